//! Counters of the service, as OpenMetrics text.
//!
//! Labels are bounded: routes of the router's table, reasons and verdicts that the code names, keys and
//! policies of the configuration. Nothing that a client sends becomes a label.

use std::fmt;

use axum::http::StatusCode;
use prometheus_client::{
    encoding::{EncodeLabelSet, text::encode},
    metrics::{
        counter::Counter,
        family::Family,
        gauge::Gauge,
        histogram::{Histogram, exponential_buckets},
    },
    registry::{Registry, Unit},
};
use serde::Deserialize;
use stockade_protocol::Verdict;

use crate::problem::Problem;

/// What the text is.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Kinds that a denial can have; another is counted as `other`.
const DENIALS: [&str; 7] = ["syscall", "connection", "limit", "path", "command", "module", "network"];

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct RunLabels {
    policy: String,
    verdict: &'static str,
    key: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct KeyLabel {
    key: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct RequestLabels {
    route: String,
    status: u16,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ReasonLabel {
    reason: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct KindLabel {
    kind: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct StateLabel {
    state: &'static str,
}

/// What a run's result says that is counted, or shown to those who watch.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Ended {
    /// Its verdict.
    pub verdict: String,
    /// Its reason.
    pub reason: Option<String>,
    /// Its exit status.
    pub code: i32,
    /// Whether the program's first instruction ran.
    pub started: bool,
    duration_ms: u64,
    usage: Usage,
    /// What it was refused, and its compiler.
    pub denials: Vec<Denial>,
    audit: Option<Audit>,
    compile: Option<Compile>,
}

/// What came of the compiler's run.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Compile {
    verdict: String,
    code: i32,
    usage: Usage,
    denials: Vec<Denial>,
    audit: Option<Audit>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Usage {
    cpu_user_ms: Option<u64>,
    cpu_system_ms: Option<u64>,
    memory_peak_bytes: Option<u64>,
}

impl Usage {
    /// Of this run and of one before it.
    fn and(&self, before: &Usage) -> Usage {
        let sum = |one: Option<u64>, other: Option<u64>| one.map_or(other, |one| Some(one.saturating_add(other.unwrap_or(0))));
        Usage {
            cpu_user_ms: sum(self.cpu_user_ms, before.cpu_user_ms),
            cpu_system_ms: sum(self.cpu_system_ms, before.cpu_system_ms),
            memory_peak_bytes: self.memory_peak_bytes.max(before.memory_peak_bytes),
        }
    }
}

/// A denial of a result.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Denial {
    /// Its kind.
    pub kind: String,
    /// What was tried.
    pub what: String,
    /// How often.
    pub count: u64,
    /// The policy's line that would allow it.
    pub allow: Option<String>,
    /// What else can be done.
    pub help: Option<String>,
    /// It was guessed from what the program printed.
    pub hint: bool,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Audit {
    failure: Option<String>,
}

impl Ended {
    /// Of `exec`'s JSON.
    pub fn of(result: &[u8]) -> Self {
        let ended: Ended = serde_json::from_slice(result).unwrap_or_default();
        ended.with_compiler()
    }

    /// Adds what the compiler has used and was refused. Where it has made no program, the result is that of
    /// its run, and has both already.
    fn with_compiler(mut self) -> Self {
        let Some(Compile { verdict, code, usage, denials, audit }) = self.compile.take() else { return self };
        self.audit = self.audit.filter(|audit| audit.failure.is_some()).or(audit);
        if verdict == "exited" && code == 0 {
            self.usage = self.usage.and(&usage);
            self.denials.extend(denials);
        }
        self
    }

    /// The CPU time of the run, in milliseconds, with that of its compiler.
    pub fn cpu_ms(&self) -> u64 {
        self.usage.cpu_user_ms.unwrap_or(0).saturating_add(self.usage.cpu_system_ms.unwrap_or(0))
    }

    /// The most memory that it had, in bytes, where that is known.
    pub fn memory_peak_bytes(&self) -> Option<u64> {
        self.usage.memory_peak_bytes
    }
}

/// What there is at this moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Now {
    /// Runs at workers.
    pub running: u64,
    /// Requests that wait.
    pub waiting: u64,
    /// Memory that the runs may use, in bytes.
    pub memory: u64,
    /// Workers that wait for a run.
    pub idle: u64,
    /// Workers that should be there.
    pub workers: u64,
    /// Sessions that are open.
    pub sessions: u64,
}

/// All of them, since this process began.
pub struct Metrics {
    registry: Registry,
    runs: Family<RunLabels, Counter>,
    running: Gauge,
    waiting: Gauge,
    queue: Histogram,
    start: Histogram,
    run: Histogram,
    cpu: Family<KeyLabel, Counter<f64, std::sync::atomic::AtomicU64>>,
    requests: Family<RequestLabels, Counter>,
    refused: Family<ReasonLabel, Counter>,
    denials: Family<KindLabel, Counter>,
    workers: Family<StateLabel, Gauge>,
    arrived: Counter,
    restarts: Counter,
    memory: Gauge,
    sessions: Gauge,
    audit_failures: Counter,
}

impl Default for Metrics {
    fn default() -> Self {
        // From 1 ms to 9 min.
        let histogram = || Histogram::new(exponential_buckets(0.001, 2.0, 20));
        let mut metrics = Metrics {
            registry: Registry::with_prefix("stockade"),
            runs: Family::default(),
            running: Gauge::default(),
            waiting: Gauge::default(),
            queue: histogram(),
            start: histogram(),
            run: histogram(),
            cpu: Family::default(),
            requests: Family::default(),
            refused: Family::default(),
            denials: Family::default(),
            workers: Family::default(),
            arrived: Counter::default(),
            restarts: Counter::default(),
            memory: Gauge::default(),
            sessions: Gauge::default(),
            audit_failures: Counter::default(),
        };
        metrics.register();
        metrics
    }
}

impl fmt::Debug for Metrics {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("Metrics")
    }
}

impl Metrics {
    /// Each name gets its unit and `_total` where it is a counter.
    fn register(&mut self) {
        let registry = &mut self.registry;
        registry.register("runs", "Runs with a result", self.runs.clone());
        registry.register("runs_running", "Runs that have begun, those of sessions included", self.running.clone());
        registry.register("runs_waiting", "Requests in the queue", self.waiting.clone());
        registry.register_with_unit("queue", "Time in the queue of requests that began", Unit::Seconds, self.queue.clone());
        registry.register_with_unit("start", "From the end of the queue to the start of the program", Unit::Seconds, self.start.clone());
        registry.register_with_unit("run", "From the start of the program to its end", Unit::Seconds, self.run.clone());
        registry.register_with_unit("run_cpu", "CPU time of runs and of their compilers", Unit::Seconds, self.cpu.clone());
        registry.register("requests", "Answered requests", self.requests.clone());
        registry.register("refused", "Error responses by their reason", self.refused.clone());
        registry.register("denials", "What sandboxes refused to programs", self.denials.clone());
        registry.register("workers", "Workers", self.workers.clone());
        registry.register("worker_restarts", "Workers that were started in place of others", self.restarts.clone());
        registry.register_with_unit("memory_reserved", "Memory that the runs may use that have begun", Unit::Bytes, self.memory.clone());
        registry.register("sessions", "Sessions that are open", self.sessions.clone());
        registry.register("audit_failures", "Results whose run is not in the audit log", self.audit_failures.clone());
    }

    /// A worker has got a run, whose request had waited for so long.
    pub fn begun(&self, queued: std::time::Duration) {
        self.queue.observe(queued.as_secs_f64());
    }

    /// Its program starts, so long after the worker had got it.
    pub fn started(&self, after: std::time::Duration) {
        self.start.observe(after.as_secs_f64());
    }

    /// A run has ended with a result.
    pub fn ended(&self, policy: &str, key: &str, ended: &Ended) {
        let verdict = known(&Verdict::NAMES, &ended.verdict);
        self.runs.get_or_create(&RunLabels { policy: policy.to_owned(), verdict, key: key.to_owned() }).inc();
        self.cpu.get_or_create(&KeyLabel { key: key.to_owned() }).inc_by(ended.cpu_ms() as f64 / 1000.0);
        if ended.started {
            self.run.observe(ended.duration_ms as f64 / 1000.0);
        }
        for denial in &ended.denials {
            self.denials.get_or_create(&KindLabel { kind: known(&DENIALS, &denial.kind) }).inc_by(denial.count);
        }
        if ended.audit.as_ref().is_some_and(|audit| audit.failure.is_some()) {
            self.audit_failures.inc();
        }
    }

    /// A request was answered. `route`: of the router's table; none: it has no such path.
    pub fn answered(&self, route: Option<&str>, status: StatusCode) {
        let route = route.unwrap_or("none").to_owned();
        self.requests.get_or_create(&RequestLabels { route, status: status.as_u16() }).inc();
    }

    /// Counts a problem that is told in some other way than as an answer, unless it was counted.
    pub fn problem(&self, problem: Problem) -> Problem {
        if !problem.counted {
            self.refused(problem.reason);
        }
        Problem { counted: true, ..problem }
    }

    /// A problem was answered.
    pub fn refused(&self, reason: &'static str) {
        self.refused.get_or_create(&ReasonLabel { reason }).inc();
    }

    /// A worker has come.
    pub fn worker_came(&self) {
        self.arrived.inc();
    }

    /// All as text.
    pub fn text(&self, now: Now) -> String {
        let number = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
        self.running.set(number(now.running));
        self.waiting.set(number(now.waiting));
        self.memory.set(number(now.memory));
        self.sessions.set(number(now.sessions));
        // A run of a session has no worker.
        let running = now.running.min(now.workers.saturating_sub(now.idle));
        // Those that clear up after a run, start, or are being replaced.
        let not_ready = now.workers.saturating_sub(now.idle + running);
        for (state, count) in [("idle", now.idle), ("running", running), ("not_ready", not_ready)] {
            self.workers.get_or_create(&StateLabel { state }).set(number(count));
        }
        let restarts = self.arrived.get().saturating_sub(now.workers);
        self.restarts.inc_by(restarts.saturating_sub(self.restarts.get()));
        let mut text = String::new();
        // Text takes all that is written.
        let _written = encode(&mut text, &self.registry);
        text
    }
}

/// The name that is listed, or `other`.
pub fn known(listed: &[&'static str], name: &str) -> &'static str {
    listed.iter().find(|listed| **listed == name).copied().unwrap_or("other")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn every_series_of_the_documents_is_there() {
        let metrics = Metrics::default();
        let result = br#"{"verdict": "exited", "started": true, "duration_ms": 1500, "usage": {"cpu_user_ms": 250, "cpu_system_ms": null},
            "denials": [{"kind": "syscall", "count": 2}, {"kind": "new", "count": 1}], "audit": {"failure": "full"}, "more": 1}"#;
        metrics.begun(Duration::from_millis(3));
        metrics.started(Duration::from_millis(500));
        metrics.ended("default", "rl", &Ended::of(result));
        metrics.answered(Some("/v1/run"), StatusCode::OK);
        metrics.answered(None, StatusCode::NOT_FOUND);
        metrics.refused("no_such_path");
        let problem = metrics.problem(Problem::new(StatusCode::SERVICE_UNAVAILABLE, "draining", "x"));
        metrics.problem(problem);
        (0..5).for_each(|_| metrics.worker_came());
        let now = Now { running: 1, waiting: 2, memory: 512, idle: 2, workers: 4, sessions: 3 };
        let text = metrics.text(now);
        assert_eq!(metrics.text(now), text, "a look changes nothing");
        for line in [
            r#"stockade_runs_total{policy="default",verdict="exited",key="rl"} 1"#,
            "stockade_runs_running 1",
            "stockade_runs_waiting 2",
            "stockade_queue_seconds_count 1",
            r#"stockade_queue_seconds_bucket{le="0.004"} 1"#,
            "stockade_start_seconds_sum 0.5",
            "stockade_run_seconds_sum 1.5",
            r#"stockade_run_cpu_seconds_total{key="rl"} 0.25"#,
            r#"stockade_requests_total{route="/v1/run",status="200"} 1"#,
            r#"stockade_requests_total{route="none",status="404"} 1"#,
            r#"stockade_refused_total{reason="no_such_path"} 1"#,
            r#"stockade_refused_total{reason="draining"} 1"#,
            r#"stockade_denials_total{kind="syscall"} 2"#,
            r#"stockade_denials_total{kind="other"} 1"#,
            r#"stockade_workers{state="idle"} 2"#,
            r#"stockade_workers{state="running"} 1"#,
            r#"stockade_workers{state="not_ready"} 1"#,
            "stockade_worker_restarts_total 1",
            "stockade_memory_reserved_bytes 512",
            "stockade_sessions 3",
            "stockade_audit_failures_total 1",
            "# EOF",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
    }

    #[test]
    fn what_a_compiler_used_and_was_refused_counts_once() {
        let usage = |user: u64, peak: u64| json!({ "cpu_user_ms": user, "cpu_system_ms": 1, "memory_peak_bytes": peak });
        let denials = json!([{ "kind": "syscall", "count": 2 }]);
        let compile = |code: i32| json!({ "verdict": "exited", "code": code, "usage": usage(500, 9), "denials": denials });
        let counted = |result: &Value| {
            let ended = Ended::of(result.to_string().as_bytes());
            let denials: u64 = ended.denials.iter().map(|denial| denial.count).sum();
            (ended.cpu_ms(), ended.memory_peak_bytes(), denials)
        };
        let alone = json!({ "verdict": "exited", "code": 0, "started": true, "usage": usage(20, 3), "denials": denials });
        assert_eq!(counted(&alone), (21, Some(3), 2));
        let with = |mut result: Value, compile: Value| {
            result["compile"] = compile;
            result
        };
        assert_eq!(counted(&with(alone, compile(0))), (522, Some(9), 4));
        // The result of code that did not compile is the compiler's.
        let failed = json!({ "verdict": "exited", "code": 1, "started": false, "usage": usage(500, 9), "denials": denials });
        assert_eq!(counted(&with(failed, compile(1))), (501, Some(9), 2));
        // A program that was made and could not be started has used nothing itself.
        let refused = json!({ "verdict": "sandbox_error", "code": 125, "usage": {"cpu_user_ms": null} });
        assert_eq!(counted(&with(refused, compile(0))), (501, Some(9), 2));
        let metrics = Metrics::default();
        let unrecorded = json!({ "verdict": "exited", "audit": {"failure": null}, "compile": {"audit": {"failure": "full"}} });
        metrics.ended("p", "k", &Ended::of(unrecorded.to_string().as_bytes()));
        assert!(metrics.text(Now::default()).contains("stockade_audit_failures_total 1"));
    }

    #[test]
    fn what_a_worker_says_becomes_no_label() {
        let metrics = Metrics::default();
        for number in 0..100 {
            let result = format!(r#"{{"verdict": "v{number}", "denials": [{{"kind": "k{number}", "count": 1}}]}}"#);
            metrics.ended("p", "k", &Ended::of(result.as_bytes()));
        }
        let text = metrics.text(Now::default());
        assert!(text.contains(r#"verdict="other",key="k"} 100"#) && text.contains(r#"kind="other"} 100"#));
        assert!(text.contains("stockade_run_seconds_count 0"), "nothing has started");
    }
}
