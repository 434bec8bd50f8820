//! The result: one JSON object about one run.
//!
//! Numbers are integers with their unit in the name; unlimited and unknown are
//! null. Fields are only ever added. How a verdict is reached is not decided here.

use alloc::{boxed::Box, collections::BTreeMap, string::String, vec::Vec};
use serde::{Deserialize, Serialize, Serializer};

use crate::{egress::EgressReport, limit::Limits, modules::Modules, screen::Finding};

/// The one typed cause of a run's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The program ended by itself.
    Exited,
    /// A signal ended it that no limit sent.
    Signaled,
    /// The wall clock ran out.
    WallTimeout,
    /// The CPU time ran out.
    CpuTimeout,
    /// The kernel's oom killer ended it.
    OutOfMemory,
    /// It failed, and the process limit had refused a fork.
    ProcessLimit,
    /// It failed, and scratch or tmp was full, or scratch outgrew its limit.
    DiskLimit,
    /// It printed beyond 64 times the output limit.
    OutputLimit,
    /// The policy kills for the system call that it made.
    SyscallDenied,
    /// The caller ended the run.
    Cancelled,
    /// The request cannot be run as written.
    BadRequest,
    /// The sandbox could not be put in place, or broke.
    SandboxError,
    /// The policy refuses what screening found in the code.
    Screened,
    /// A person must approve what screening found in the code before it runs.
    ApprovalRequired,
}

impl Verdict {
    /// All, as a result has them.
    pub const NAMES: [&'static str; 14] = [
        "exited",
        "signaled",
        "wall_timeout",
        "cpu_timeout",
        "out_of_memory",
        "process_limit",
        "disk_limit",
        "output_limit",
        "syscall_denied",
        "cancelled",
        "bad_request",
        "sandbox_error",
        "screened",
        "approval_required",
    ];
}

/// Text or base64 of one stream, as the request asked.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct StreamText(pub String);

/// One value for each of the program's two streams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PerStream<T> {
    /// For stdout.
    pub output: T,
    /// For stderr.
    pub error: T,
}

/// One of the program's two streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OutputStream {
    /// Its stdout.
    Stdout,
    /// Its stderr.
    Stderr,
}

impl<T> PerStream<T> {
    /// The value for one of them.
    pub fn of(&self, stream: OutputStream) -> &T {
        match stream {
            OutputStream::Stdout => &self.output,
            OutputStream::Stderr => &self.error,
        }
    }

    /// The same, to be changed.
    pub fn of_mut(&mut self, stream: OutputStream) -> &mut T {
        match stream {
            OutputStream::Stdout => &mut self.output,
            OutputStream::Stderr => &mut self.error,
        }
    }
}

/// What the run used at its peak; null where the kernel keeps no such count.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// Peak memory of all processes, tmpfs included.
    pub memory_peak_bytes: Option<u64>,
    /// Most processes and threads at one time.
    pub processes_peak: Option<u64>,
    /// CPU time in user mode.
    pub cpu_user_ms: Option<u64>,
    /// CPU time in the kernel.
    pub cpu_system_ms: Option<u64>,
    /// What scratch had grown by at the end.
    pub scratch_bytes: Option<u64>,
    /// What `/tmp`, `/dev/shm` and home held at the end.
    pub tmp_bytes: Option<u64>,
}

/// One refusal, with the rule that decided and the line that would allow it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Denial {
    /// `syscall`, `connection` and `limit`; as hints also `path`, `command`, `module` and `network`.
    pub kind: &'static str,
    /// What was tried, such as `ptrace` or `socket(AF_VSOCK)`.
    pub what: String,
    /// How often.
    pub count: u64,
    /// The errno that the code saw, `killed`, or what the limit did.
    pub answer: String,
    /// The policy's rule that decided.
    pub rule: String,
    /// The smallest policy line that would allow it, behind its section;
    /// null where none may.
    pub allow: Option<String>,
    /// What else can be done about it, or why no line may.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub help: Option<String>,
    /// Guessed from the program's stderr: it may be wrong or forged.
    #[serde(skip_serializing_if = "is_false")]
    pub hint: bool,
    /// Of a limit: its values, and how far a request may go.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<LimitDenial>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for a reference")]
fn is_false(value: &bool) -> bool {
    !value
}

/// A limit that ended a run or was touched. Values are written as in a policy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LimitDenial {
    /// Its key in `limits`.
    pub key: &'static str,
    /// What was in force.
    pub value: String,
    /// The peak; null where none is known.
    pub peak: Option<String>,
    /// How far a request may raise it.
    pub maximum: String,
    /// A request's member that would raise it; null where it is at its maximum.
    pub request: Option<String>,
    /// The policy line that raises the maximum; null where there is none.
    pub raise_maximum: Option<String>,
}

/// One collected file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct CollectedFile {
    /// Path below scratch.
    pub path: String,
    /// The path is not UTF-8: U+FFFD replaces the bytes that are not, so two paths may look
    /// the same.
    #[serde(default, skip_serializing_if = "is_false")]
    pub lossy: bool,
    /// Its size.
    pub size: u64,
    /// SHA-256 of its bytes in hex; null when it was not read.
    pub sha256: Option<String>,
    /// Its content, where that is UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// Its content in base64, where it is not UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub base64: Option<String>,
    /// Why its content is not here.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub omitted: Option<String>,
}

/// How a statement of the receipt is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Known {
    /// Read back from the kernel after it was set.
    ReadBack,
    /// A forbidden act was tried and failed.
    Probed,
    /// It was set; the kernel offers no way to look.
    Applied,
    /// The policy's `[degrade]` let the run go on without it.
    Degraded,
}

/// One layer's line in the receipt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LayerReceipt {
    /// The layer's name, as in the plan.
    pub layer: &'static str,
    /// How the statement is known.
    pub known: Known,
    /// What was found in force.
    pub detail: String,
}

/// What the receipt itself cost the run, in microseconds. The two run side by side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ReceiptCost {
    /// Reading and probing inside, by the executor; null where the policy refuses it the clock.
    pub inside: Option<u64>,
    /// Comparing namespaces and cgroup from outside, by the launcher.
    pub outside: u64,
}

/// What was in force, taken before the program's first instruction.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Receipt {
    /// `root` or `rootless`.
    pub mode: &'static str,
    /// The program and its version.
    pub program: &'static str,
    /// The running kernel.
    pub kernel: String,
    /// One line for each layer.
    pub layers: Vec<LayerReceipt>,
    /// The names of degraded layers; empty when every layer was in force.
    pub degraded: Vec<String>,
    /// SHA-256 of the canonical plan in hex.
    pub plan_sha256: String,
    /// What taking it cost, in microseconds.
    pub taken_us: ReceiptCost,
    /// How much had been started before the request came.
    pub start: StartKind,
    /// In a session: why no more had been.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start_cause: Option<String>,
    /// `shared` where other runs of the session have the same memory layout, string hashes and stack
    /// canary, as all copies of a template have.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layout: Option<&'static str>,
    /// The digest of the image that was the root's; none: the host's directories were.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
}

/// How much of a run had been started before its request came.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum StartKind {
    /// Nothing.
    #[default]
    Fresh,
    /// The sandbox.
    Prepared,
    /// The sandbox, and in it the program's interpreter, for this run alone.
    Prestarted,
    /// The program's interpreter, which is a copy of a template's.
    Restored,
}

/// Which policy decided.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PolicyId {
    /// Its name.
    pub name: String,
    /// `shipped`, or the file it came from.
    pub origin: String,
    /// SHA-256 over its text and the text of all that it extends.
    pub sha256: String,
}

/// Where a run is written down.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct AuditRef {
    /// The run's number in the log.
    pub run: String,
    /// The id of the log's chain.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chain: Option<String>,
    /// The number of its last record; null where it is not written down.
    pub seq: Option<u64>,
    /// SHA-256 of that record, which the next record carries. With chain and number it is an anchor:
    /// it shows that the log was cut off or rewritten.
    pub sha256: Option<String>,
    /// Why it is not written down.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
}

/// How to get code approved that waits for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Approval {
    /// Send it as `approve` with the same request, once that is approved. Valid once.
    pub token: String,
    /// How long it stays valid.
    pub seconds_left: u64,
    /// Who must approve it first, by `stockade approve`; empty: the caller approves it by
    /// sending the request again.
    pub approvers: Vec<String>,
}

/// The reason of a result whose program was not started, because its compiler did not exit with 0.
pub const COMPILE_FAILED: &str = "compile_failed";

/// What came of the compiler's run, where the runtime has one; its fields are those of a result.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CompileReport {
    /// What it printed on stdout.
    pub output: StreamText,
    /// What it printed on stderr.
    pub error: StreamText,
    /// Its exit status.
    pub code: i32,
    /// The one cause of its end.
    pub verdict: Verdict,
    /// A stable identifier of the detail.
    pub reason: Option<String>,
    /// The signal that ended it.
    pub signal: Option<String>,
    /// From its start to its end.
    pub duration_ms: u64,
    /// Limits that it touched.
    pub limits_hit: Vec<&'static str>,
    /// Bytes that each stream carried in all.
    pub bytes: PerStream<u64>,
    /// Whether the middle of a stream was cut out.
    pub truncated: PerStream<bool>,
    /// Whether a stream held bytes that are not UTF-8.
    pub lossy: PerStream<bool>,
    /// Peaks.
    pub usage: Usage,
    /// The limits in force.
    #[serde(serialize_with = "limits_with_units")]
    pub limits: Limits,
    /// What was refused.
    pub denials: Vec<Denial>,
    /// What was in force.
    pub receipt: Option<Receipt>,
    /// The run's own record in the audit log; null where the policy wants none.
    pub audit: Option<AuditRef>,
}

impl From<Report> for CompileReport {
    fn from(report: Report) -> Self {
        CompileReport {
            output: report.output.unwrap_or_default(),
            error: report.error,
            code: report.code,
            verdict: report.verdict,
            reason: report.reason,
            signal: report.signal,
            duration_ms: report.duration_ms,
            limits_hit: report.limits_hit,
            bytes: report.bytes,
            truncated: report.truncated,
            lossy: report.lossy,
            usage: report.usage,
            limits: report.limits,
            denials: report.denials,
            receipt: report.receipt,
            audit: report.audit,
        }
    }
}

/// The result of one request.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// Version of this format.
    pub schema: u32,
    /// The request's `id`.
    pub id: Option<String>,
    /// The program's stdout.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output: Option<StreamText>,
    /// The program's stderr, or what went wrong before it could start.
    pub error: StreamText,
    /// What came of compiling the code, where the runtime does; absent: nothing was compiled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compile: Option<Box<CompileReport>>,
    /// Exit status; 128+N for a signal, 124 wall clock, 137 another limit, 126 screened, 2 and 125 for no run.
    pub code: i32,
    /// It exited by itself with 0.
    pub success: bool,
    /// The one cause of the end.
    pub verdict: Verdict,
    /// A stable identifier of the detail.
    pub reason: Option<String>,
    /// Whether the first instruction of the code ran.
    pub started: bool,
    /// The signal that ended the program.
    pub signal: Option<String>,
    /// From the start of the program to its end.
    pub duration_ms: u64,
    /// Limits that were touched without ending the program.
    pub limits_hit: Vec<&'static str>,
    /// Bytes that each stream carried in all.
    pub bytes: PerStream<u64>,
    /// Whether the middle of a stream was cut out.
    pub truncated: PerStream<bool>,
    /// Whether a stream held bytes that are not UTF-8.
    pub lossy: PerStream<bool>,
    /// Peaks.
    pub usage: Usage,
    /// The limits in force.
    #[serde(serialize_with = "limits_with_units")]
    pub limits: Limits,
    /// Those of them that nothing enforces here; the receipt has the layer that is missing.
    pub limits_unenforced: Vec<&'static str>,
    /// What screening found in the code; also where it ran.
    pub findings: Vec<Finding>,
    /// Findings beyond those that `findings` lists.
    pub findings_omitted: u64,
    /// How to get it approved, where it did not run because approval is missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub approval: Option<Approval>,
    /// Modules and events of the policy's list that watched interpreters reported; null where
    /// the policy has no such list. Advice: the code can forge and suppress it.
    pub modules: Option<Modules>,
    /// What was refused.
    pub denials: Vec<Denial>,
    /// Refusals beyond those that `denials` lists.
    pub denials_omitted: u64,
    /// Connections out.
    pub egress: EgressReport,
    /// Collected files.
    pub files: Vec<CollectedFile>,
    /// What was in force; null when no sandbox was set up.
    pub receipt: Option<Receipt>,
    /// Which policy decided; null when none could be read.
    pub policy: Option<PolicyId>,
    /// The run's record in the audit log; null where the policy wants none.
    pub audit: Option<AuditRef>,
    /// The request's labels, echoed.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
}

fn limits_with_units<S: Serializer>(limits: &Limits, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(limits.iter().map(|(key, value)| (key.json_name(), value)))
}

impl Report {
    /// The result of a run that never began.
    pub fn refused(verdict: Verdict, reason: &str, error: String) -> Self {
        Report {
            schema: 1,
            id: None,
            output: Some(StreamText::default()),
            error: StreamText(error),
            compile: None,
            code: match verdict {
                Verdict::BadRequest => 2,
                Verdict::Screened | Verdict::ApprovalRequired => 126,
                Verdict::DiskLimit => 137,
                _ => 125,
            },
            success: false,
            verdict,
            reason: Some(String::from(reason)),
            started: false,
            signal: None,
            duration_ms: 0,
            limits_hit: Vec::new(),
            bytes: PerStream::default(),
            truncated: PerStream::default(),
            lossy: PerStream::default(),
            usage: Usage::default(),
            limits: Limits::default(),
            limits_unenforced: Vec::new(),
            findings: Vec::new(),
            findings_omitted: 0,
            approval: None,
            modules: None,
            denials: Vec::new(),
            denials_omitted: 0,
            egress: EgressReport::default(),
            files: Vec::new(),
            receipt: None,
            policy: None,
            audit: None,
            labels: BTreeMap::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Verdict::*;

    #[test]
    fn the_names_of_verdicts_are_those_in_results() {
        let all = [
            Exited,
            Signaled,
            WallTimeout,
            CpuTimeout,
            OutOfMemory,
            ProcessLimit,
            DiskLimit,
            OutputLimit,
            SyscallDenied,
            Cancelled,
            BadRequest,
            SandboxError,
            Screened,
            ApprovalRequired,
        ];
        // ApprovalRequired is the last.
        assert_eq!(all.len(), ApprovalRequired as usize + 1);
        for (verdict, name) in all.iter().zip(super::Verdict::NAMES) {
            assert_eq!(serde_json::to_value(verdict).ok(), Some(name.into()));
        }
    }
}
