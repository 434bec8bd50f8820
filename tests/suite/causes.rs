//! What a result says of the cause of a run's end: a table of causes, one program in each
//! language, and programs that are made at random and whose end is known.
//!
//! The table is for a reader of `verdict`, `limits_hit`, `denials` and the streams alone, such
//! as a model. The random programs are in `support/programs.rs`.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use crate::support::{
    exec::{ExecResult, exec_with, scratch_named, start, stockade, text},
    needs::cgroup,
    policy_dir::{PolicyDirectory, derived, unscreened},
    programs::{Ending, Host, KnownProgram, Random},
    runner::{eventually, test},
    timeouts::{scaled, scaled_limit},
};

/// What of a result tells the cause.
#[derive(Clone, Copy)]
struct Told {
    verdict: &'static str,
    limits_hit: &'static [&'static str],
    /// All of `denials`: kind, subject, answer, and whether it is a hint.
    denials: &'static [&'static str],
    /// A part of stderr, which for most causes repeats it in the program's own words.
    error: &'static str,
}

pub(super) struct Row {
    pub(super) cause: &'static str,
    pub(super) language: &'static str,
    pub(super) code: &'static str,
    /// `limits` of the request.
    pub(super) limits: &'static str,
    told: Told,
    /// Where rlimits are in the place of a cgroup, if that differs.
    without_cgroup: Option<Told>,
}

const fn told(verdict: &'static str, limits_hit: &'static [&'static str], denials: &'static [&'static str], error: &'static str) -> Told {
    Told { verdict, limits_hit, denials, error }
}

const fn row(cause: &'static str, limits: &'static str, language: &'static str, code: &'static str, told: Told) -> Row {
    Row { cause, language, code, limits, told, without_cgroup: None }
}

impl Row {
    const fn without_cgroup(self, told: Told) -> Row {
        Row { without_cgroup: Some(told), ..self }
    }
}

/// Every cause has a row in each language.
const CAUSES: [&str; 15] = [
    "memory",
    "disk full and cleaned up",
    "inodes",
    "file too large",
    "processes",
    "CPU",
    "wall",
    "output",
    "no network",
    "host not allowed",
    "package missing",
    "program missing",
    "path not there",
    "path read-only",
    "refused system call",
];

const LITTLE_MEMORY: &str = r#"{"memory": "64MiB", "scratch_size": "8MiB", "tmp_size": "8MiB"}"#;
const KILLED_FOR_MEMORY: Told = told("out_of_memory", &[], &["limit memory 64MiB ended"], "");
const CLEANED_UP: Told = told("exited", &["scratch_size"], &["limit scratch_size 8MiB refused"], "o space left on device");
const NO_INODE: Told = told("disk_limit", &[], &["limit scratch_files 50 refused"], "o space left on device");
const TOO_LARGE: &[&str] = &["limit file_size 1MiB refused"];
const NO_PROCESS: &[&str] = &["limit processes 16 refused"];
const NO_PROCESS_HINT: &[&str] = &["limit processes 16 refused (hint)"];
const CPU: Told = told("cpu_timeout", &[], &["limit cpu 1s ended"], "");
const WALL: Told = told("wall_timeout", &[], &["limit wall 1s ended"], "");
const OUTPUT: Told = told("output_limit", &[], &["limit output_size 4KiB ended"], "");
const NO_NETWORK: &[&str] = &["network no network not reached (hint)"];
const NOT_ALLOWED: &[&str] = &["connection not-allowed.example refused"];
const NO_PACKAGE: &[&str] = &["module no_such_package not found (hint)"];
const NO_PROGRAM: &[&str] = &["command no-such-program not found (hint)"];
const NO_PATH: &[&str] = &["path /data/x.csv ENOENT (hint)"];
const READ_ONLY: &[&str] = &["path /usr/x EROFS (hint)"];
const NO_CALL: &[&str] = &["syscall unshare EPERM"];

pub(super) const TABLE: &[Row] = &[
    row("memory", LITTLE_MEMORY, "python", "held = []\nwhile True: held.append(bytearray(1 << 20))", KILLED_FOR_MEMORY)
        .without_cgroup(told("exited", &[], &["limit memory 64MiB refused (hint)"], "MemoryError")),
    row("memory", LITTLE_MEMORY, "bash", "held=x; while :; do held=$held$held; done", KILLED_FOR_MEMORY).without_cgroup(told(
        "exited",
        &[],
        &["limit memory 64MiB refused (hint)"],
        "cannot allocate",
    )),
    row("memory", LITTLE_MEMORY, "node", "const held = []; for (;;) held.push(Buffer.alloc(1 << 20, 1))", KILLED_FOR_MEMORY)
        .without_cgroup(told("signaled", &[], &["limit memory 64MiB refused (hint)"], "")),
    row(
        "disk full and cleaned up",
        r#"{"scratch_size": "8MiB"}"#,
        "python",
        "import os, time\ntry:\n    with open('f', 'wb') as f: f.write(bytes(9 << 20))\nfinally: time.sleep(0.2); os.remove('f')",
        CLEANED_UP,
    ),
    row(
        "disk full and cleaned up",
        r#"{"scratch_size": "8MiB"}"#,
        "bash",
        "trap 'sleep 0.2; rm -f f' EXIT; set -e; head -c 9M /dev/zero > f",
        CLEANED_UP,
    ),
    row(
        "disk full and cleaned up",
        r#"{"scratch_size": "8MiB"}"#,
        "node",
        "const fs = require('fs')\ntry { fs.writeFileSync('f', Buffer.alloc(9 << 20)) } finally { Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 200); fs.rmSync('f') }",
        CLEANED_UP,
    ),
    row("inodes", r#"{"scratch_files": 50}"#, "python", "for i in range(99): open(f'f{i}', 'w').close()", NO_INODE),
    row("inodes", r#"{"scratch_files": 50}"#, "bash", "set -e; for i in {1..99}; do : > f$i; done", NO_INODE),
    row("inodes", r#"{"scratch_files": 50}"#, "node", "for (let i = 0; i < 99; i++) require('fs').writeFileSync('f' + i, '')", NO_INODE),
    row(
        "file too large",
        r#"{"file_size": "1MiB"}"#,
        "python",
        "open('f', 'wb').write(bytes(2 << 20))",
        told("disk_limit", &[], TOO_LARGE, "File too large"),
    ),
    row(
        "file too large",
        r#"{"file_size": "1MiB"}"#,
        "bash",
        "head -c 2M /dev/zero > f",
        told("disk_limit", &[], TOO_LARGE, "File size limit exceeded"),
    ),
    row(
        "file too large",
        r#"{"file_size": "1MiB"}"#,
        "node",
        "require('fs').writeFileSync('f', Buffer.alloc(2 << 20))",
        told("disk_limit", &[], TOO_LARGE, "EFBIG"),
    ),
    row(
        "processes",
        r#"{"processes": 16}"#,
        "python",
        "import subprocess\nheld = [subprocess.Popen(['sleep', '60']) for _ in range(99)]",
        told("process_limit", &[], NO_PROCESS, "BlockingIOError"),
    )
    .without_cgroup(told("exited", &[], NO_PROCESS_HINT, "BlockingIOError")),
    row(
        "processes",
        r#"{"processes": 16}"#,
        "bash",
        "for i in {1..99}; do sleep 60 & done; wait",
        told("process_limit", &[], NO_PROCESS, "fork: Resource temporarily unavailable"),
    )
    .without_cgroup(told("exited", &[], NO_PROCESS_HINT, "fork: Resource temporarily unavailable")),
    row(
        "processes",
        r#"{"processes": 16}"#,
        "node",
        "const { spawn } = require('child_process'); for (let i = 0; i < 99; i++) spawn('sleep', ['60'])",
        told("process_limit", &[], NO_PROCESS, "EAGAIN"),
    )
    .without_cgroup(told("exited", &[], NO_PROCESS_HINT, "EAGAIN")),
    row("CPU", r#"{"cpu": "1s"}"#, "python", "while True: pass", CPU),
    row("CPU", r#"{"cpu": "1s"}"#, "bash", "while :; do :; done", CPU),
    row("CPU", r#"{"cpu": "1s"}"#, "node", "for (;;);", CPU),
    row("wall", r#"{"wall": "1s"}"#, "python", "import time; time.sleep(60)", WALL),
    row("wall", r#"{"wall": "1s"}"#, "bash", "sleep 60", WALL),
    row("wall", r#"{"wall": "1s"}"#, "node", "setTimeout(() => {}, 60000)", WALL),
    row("output", r#"{"output_size": "4KiB"}"#, "python", "while True: print('line')", OUTPUT),
    row("output", r#"{"output_size": "4KiB"}"#, "bash", "while :; do echo line; done", OUTPUT),
    row("output", r#"{"output_size": "4KiB"}"#, "node", "for (;;) require('fs').writeSync(1, 'line\\n')", OUTPUT),
    row(
        "no network",
        "{}",
        "python",
        "import urllib.request; urllib.request.urlopen('http://not-allowed.example')",
        told("exited", &[], NO_NETWORK, "urlopen error"),
    ),
    row("no network", "{}", "bash", "curl -sS http://not-allowed.example", told("exited", &[], NO_NETWORK, "Could not resolve host")),
    row(
        "no network",
        "{}",
        "node",
        "fetch('http://not-allowed.example').catch(error => { console.error(error); process.exit(1) })",
        told("exited", &[], NO_NETWORK, "getaddrinfo"),
    ),
    row(
        "host not allowed",
        "{}",
        "python",
        "import urllib.request; urllib.request.urlopen('http://not-allowed.example')",
        told("exited", &[], NOT_ALLOWED, "urlopen error"),
    ),
    row(
        "host not allowed",
        "{}",
        "bash",
        "curl -sS http://not-allowed.example",
        told("exited", &[], NOT_ALLOWED, "Could not resolve host"),
    ),
    row(
        "host not allowed",
        "{}",
        "node",
        "fetch('http://not-allowed.example').catch(error => { console.error(error); process.exit(1) })",
        told("exited", &[], NOT_ALLOWED, "getaddrinfo"),
    ),
    row("package missing", "{}", "python", "import no_such_package", told("exited", &[], NO_PACKAGE, "No module named")),
    row("package missing", "{}", "bash", "python3 -m no_such_package", told("exited", &[], NO_PACKAGE, "No module named")),
    row("package missing", "{}", "node", "require('no_such_package')", told("exited", &[], NO_PACKAGE, "Cannot find module")),
    row("package missing", "{}", "node", "import('no_such_package')", told("exited", &[], NO_PACKAGE, "Cannot find package")),
    row(
        "program missing",
        "{}",
        "python",
        "import subprocess; subprocess.run(['no-such-program'])",
        told("exited", &[], NO_PROGRAM, "No such file or directory"),
    ),
    row("program missing", "{}", "bash", "no-such-program", told("exited", &[], NO_PROGRAM, "command not found")),
    row(
        "program missing",
        "{}",
        "node",
        "require('child_process').execFileSync('no-such-program')",
        told("exited", &[], NO_PROGRAM, "ENOENT"),
    ),
    row("path not there", "{}", "python", "open('/data/x.csv')", told("exited", &[], NO_PATH, "No such file or directory")),
    row("path not there", "{}", "bash", "cat /data/x.csv", told("exited", &[], NO_PATH, "No such file or directory")),
    row("path not there", "{}", "node", "require('fs').readFileSync('/data/x.csv')", told("exited", &[], NO_PATH, "ENOENT")),
    row("path read-only", "{}", "python", "open('/usr/x', 'w')", told("exited", &[], READ_ONLY, "Read-only file system")),
    row("path read-only", "{}", "bash", "echo x > /usr/x", told("exited", &[], READ_ONLY, "Read-only file system")),
    row("path read-only", "{}", "node", "require('fs').writeFileSync('/usr/x', '')", told("exited", &[], READ_ONLY, "EROFS")),
    row(
        "refused system call",
        "{}",
        "python",
        "import ctypes, os\nc = ctypes.CDLL(None, use_errno=True)\nif c.unshare(0x10000000): raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))",
        told("exited", &[], NO_CALL, "Operation not permitted"),
    ),
    row("refused system call", "{}", "bash", "unshare --user true", told("exited", &[], NO_CALL, "Operation not permitted")),
    row(
        "refused system call",
        "{}",
        "node",
        "require('child_process').execFileSync('unshare', ['--user', 'true'])",
        told("exited", &[], NO_CALL, "Operation not permitted"),
    ),
];

/// A denial in the words of the table.
fn in_words(denial: &Value) -> String {
    let word = |field: &str| denial[field].as_str().unwrap_or_default().to_owned();
    // The arguments of a call differ from program to program.
    let what = word("what").split('(').next().unwrap_or_default().to_owned();
    let hint = if denial["hint"] == true { " (hint)" } else { "" };
    format!("{} {what} {}{hint}", word("kind"), word("answer"))
}

#[track_caller]
fn tells(language: &str) {
    let policies = PolicyDirectory::new();
    let one_host = policies.write("one-host", &derived("[egress]\nwhitelist = { add = [\"allowed.example:443\"] }"));
    let mut wrong = Vec::new();
    for row in TABLE.iter().filter(|row| row.language == language) {
        let mut limits: Value = serde_json::from_str(row.limits).unwrap();
        if limits.get("wall").is_none() {
            limits["wall"] = json!(scaled_limit(20_000));
        }
        let options: &[&str] = if row.cause == "host not allowed" { &["--policy", &one_host] } else { &[] };
        let done = exec_with(options, json!({"language": language, "code": row.code, "limits": limits}));
        let told = row.without_cgroup.filter(|_| cgroup() == "none").unwrap_or(row.told);
        let denials: Vec<String> = done["denials"].as_array().unwrap().iter().map(in_words).collect();
        let is_told = done["verdict"] == told.verdict
            && done["limits_hit"] == json!(told.limits_hit)
            && denials == told.denials
            && done.error().contains(told.error);
        if !is_told {
            wrong.push(format!("{}: {denials:?} {}", row.cause, done.brief()));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

test!(Both, the_table_has_each_cause_in_each_language);
fn the_table_has_each_cause_in_each_language() {
    let mut languages: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for row in TABLE {
        languages.entry(row.cause).or_default().insert(row.language);
    }
    assert_eq!(languages.keys().copied().collect::<BTreeSet<_>>(), BTreeSet::from(CAUSES));
    assert!(languages.values().all(|of_cause| *of_cause == BTreeSet::from(["bash", "node", "python"])), "{languages:?}");
}

test!(Both, a_result_alone_tells_what_went_wrong_in_python, seconds 90);
fn a_result_alone_tells_what_went_wrong_in_python() {
    tells("python");
}

test!(Both, a_result_alone_tells_what_went_wrong_in_bash, needs [Program("curl")], seconds 120);
/// bash itself waits 15 s before it gives a refused fork up.
fn a_result_alone_tells_what_went_wrong_in_bash() {
    tells("bash");
}

test!(Both, a_result_alone_tells_what_went_wrong_in_node, needs [Program("node")], seconds 90);
fn a_result_alone_tells_what_went_wrong_in_node() {
    tells("node");
}

test!(Both, a_kept_limit_is_taken_for_the_cause_of_any_failure);
/// No evidence tells an unrelated failure from one for the limit at which the program still
/// stands: it may have gone on for long in either case. So the limit is the verdict, and stderr has
/// the program's own words.
fn a_kept_limit_is_taken_for_the_cause_of_any_failure() {
    let kept = "import time\ntry:\n    with open('f', 'wb') as f: f.write(bytes(9 << 20))\nexcept OSError: pass\ntime.sleep(0.5)\nint('x')";
    let limits = json!({"scratch_size": "8MiB", "wall": scaled_limit(20_000)});
    let done = exec_with(&[], json!({"code": kept, "limits": limits}));
    done.expect(json!({"verdict": "disk_limit", "code": 1, "limits_hit": []}));
    assert!(done.error().contains("ValueError"), "{}", done.brief());
    // The controls: it has cleaned up; it does not fail.
    let cleaned = kept.replace("int('x')", "import os; os.remove('f'); int('x')");
    let done = exec_with(&[], json!({"code": cleaned, "limits": limits}));
    done.expect(json!({"verdict": "exited", "code": 1, "limits_hit": ["scratch_size"]}));
    let done = exec_with(&[], json!({"code": kept.replace("int('x')", ""), "limits": limits}));
    done.succeeded().expect(json!({"limits_hit": ["scratch_size"]}));
}

test!(Both, a_refused_peer_is_a_denial_with_its_line);
fn a_refused_peer_is_a_denial_with_its_line() {
    let policies = PolicyDirectory::new();
    let one_host = policies.write("one-host", &derived("[egress]\nwhitelist = { add = [\"allowed.example:443\"] }"));
    let code = "import socket\nfor name in [f'h{n}.example' for n in range(20)] + ['h0.example']:\n    try: socket.getaddrinfo(name, 443)\n    except OSError: pass";
    let done = exec_with(&["--policy", &one_host], json!({"code": code}));
    let denials = done.succeeded()["denials"].as_array().unwrap();
    let first = &denials[0];
    assert_eq!(
        (&first["kind"], &first["what"], &first["rule"]),
        (&json!("connection"), &json!("h0.example"), &json!("[egress] whitelist"))
    );
    assert_eq!(first["allow"], "[egress] whitelist = { add = [\"h0.example:443\"] }");
    // Bounded: `egress` has them all.
    assert_eq!(denials.len(), 8, "{}", done.brief());
    assert!(done["egress"]["denied"].as_array().unwrap().len() >= 20, "{}", done["egress"]);
}

test!(Both, output_beyond_its_limit_is_one_however_fast_it_is_taken);
/// What the pipe still held when the program ended did not count, so the verdict was chance.
fn output_beyond_its_limit_is_one_however_fast_it_is_taken() {
    let ask = |blocks: u32| {
        let code = format!("import os\nfor _ in range({blocks}): os.write(1, bytes(4096))");
        exec_with(&[], json!({"code": code, "limits": {"output_size": "4KiB", "wall": scaled_limit(20_000)}}))
    };
    for _ in 0..20 {
        ask(66).expect(json!({"verdict": "output_limit", "code": 137, "limits_hit": []}));
    }
    // The control: just 64 times as much.
    ask(64).succeeded().expect(json!({"truncated": {"output": true, "error": false}}));
}

test!(Both, each_way_in_which_scratch_was_full_is_told);
/// Only the first was remembered.
fn each_way_in_which_scratch_was_full_is_told() {
    let code = "import os, time\ndef clear():\n    time.sleep(0.2)\n    for name in os.listdir():\n        if name.startswith('f'): os.remove(name)\ntry:\n    with open('f', 'wb') as f: f.write(bytes(9 << 20))\nexcept OSError: clear()\ntry:\n    for i in range(99): open(f'f{i}', 'w').close()\nexcept OSError: clear()";
    let limits = json!({"scratch_size": "8MiB", "scratch_files": 50, "wall": scaled_limit(20_000)});
    let done = exec_with(&[], json!({"code": code, "limits": limits}));
    done.succeeded().expect(json!({"limits_hit": ["scratch_size", "scratch_files"]}));
}

test!(Both, a_child_killed_for_memory_ends_a_run_that_would_wait_on, needs [Cgroup], seconds 90);
/// The event of cgroup v1 comes before the kill: a launcher that was quick found none, and looked
/// no more. Several at a time, so that the killer is not at once done.
fn a_child_killed_for_memory_ends_a_run_that_would_wait_on() {
    let code = "import os, time\npid = os.fork()\nif pid == 0:\n    held = []\n    while True: held.append(bytearray(1 << 20))\nos.waitpid(pid, 0)\ntime.sleep(600)";
    let limits = json!({"memory": "64MiB", "scratch_size": "4MiB", "tmp_size": "4MiB", "wall": scaled_limit(10_000)});
    let ask = || {
        for _ in 0..10 {
            let done = exec_with(&[], json!({"code": code, "limits": limits}));
            done.expect(json!({"verdict": "out_of_memory", "code": 137, "limits_hit": []}));
        }
    };
    thread::scope(|scope| (0..6).for_each(|_| drop(scope.spawn(ask))));
}

/// The part of a result that must be the same each time.
type Answer = (String, i64, Value, BTreeSet<String>, BTreeSet<String>);

fn answer_of(done: &ExecResult) -> Answer {
    let names = |list: &Value, field: fn(&Value) -> &Value| {
        let all = list.as_array().unwrap().iter();
        all.filter_map(|one| field(one).as_str().map(String::from)).collect::<BTreeSet<_>>()
    };
    let limits_hit = names(&done["limits_hit"], |name| name);
    let denied = names(&done["denials"], |denial| &denial["limit"]["key"]);
    let verdict = done["verdict"].as_str().unwrap_or_default().to_owned();
    (verdict, done["code"].as_i64().unwrap_or(-1), done["signal"].clone(), limits_hit, denied)
}

/// Runs a program once. What differs from what is known of it, and its answer.
fn run_known(program: &KnownProgram, policy: &str, name: &str) -> (Vec<String>, Answer) {
    let limits: serde_json::Map<String, Value> = program.limits.iter().map(|(key, value)| ((*key).to_owned(), limit(value))).collect();
    let mut request = json!({"code": program.code, "limits": limits});
    let scratch = program.host_scratch.then(|| scratch_named(name));
    if let Some(scratch) = &scratch {
        request["scratch"] = json!(text(scratch));
    }
    let done = match (program.cancelled_by, &scratch) {
        (Some(signal), Some(scratch)) => {
            let child = start(&mut stockade(["exec", "--policy", policy]), request.to_string().as_bytes());
            let ready = eventually(Duration::from_secs(20), || scratch.join("ready").exists());
            kill(Pid::from_raw(child.id().cast_signed()), Signal::try_from(signal).unwrap()).unwrap();
            assert!(ready, "it was never ready");
            ExecResult::of(child.wait_with_output().unwrap())
        }
        _ => exec_with(&["--policy", policy], request),
    };
    if let Some(scratch) = scratch {
        fs::remove_dir_all(scratch).unwrap();
    }
    let answer = answer_of(&done);
    let expected: BTreeSet<String> = program.limits_hit.iter().map(|name| (*name).to_owned()).collect();
    let (verdict, code, _, limits_hit, _) = &answer;
    let mut wrong = Vec::new();
    let mut check = |is_right: bool, what: String| {
        if !is_right {
            wrong.push(format!("{what}: {}", done.brief()));
        }
    };
    check(verdict == program.verdict && *code == i64::from(program.status), format!("{} {} expected", program.verdict, program.status));
    check(*limits_hit == expected, format!("limits_hit {expected:?} expected"));
    check(done.error().starts_with(&program.says), format!("it did not come to its end ({:?})", program.says));
    check(done["started"] == true, String::from("it has started"));
    check(done["success"] == json!(verdict == "exited" && *code == 0), String::from("success"));
    (wrong, answer)
}

/// A limit as a request has it: a plain number is a count.
fn limit(value: &str) -> Value {
    value.parse::<u64>().map_or_else(|_| json!(value), |count| json!(count))
}

/// Runs so many programs, twice each and several at a time, from the seed in `STOCKADE_TEST_SEED`
/// or a fresh one. Most of them wait most of the time.
#[track_caller]
fn programs_end_by_their_cause(count: u64, at_a_time: usize) {
    let fresh = || u64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() & u128::from(u64::MAX)).unwrap();
    let seed = std::env::var("STOCKADE_TEST_SEED").map_or_else(|_| fresh(), |seed| seed.parse().expect("STOCKADE_TEST_SEED is a number"));
    println!("STOCKADE_TEST_SEED={seed}");
    let host = Host { cgroup: cgroup() != "none", slower: u32::try_from(scaled(Duration::from_secs(1)).as_secs()).unwrap() };
    let policies = PolicyDirectory::new();
    let policy = policies.write("kills", &unscreened("default", "[seccomp]\nkill = { add = [\"ptrace\"] }"));
    let (next, failures) = (AtomicU64::new(0), Mutex::new(Vec::new()));
    let work = || {
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= count {
                return;
            }
            let ending = Ending::ALL[usize::try_from(number).unwrap() % Ending::ALL.len()];
            let program = KnownProgram::new(&mut Random::new(seed.wrapping_add(number)), ending, host);
            let twice = catch_unwind(AssertUnwindSafe(|| {
                let [(mut wrong, first), (more, second)] =
                    ["a", "b"].map(|turn| run_known(&program, &policy, &format!("scratch-{number}-{turn}")));
                wrong.extend(more);
                if first != second {
                    wrong.push(format!("another answer: {first:?} and {second:?}"));
                }
                wrong
            }));
            let wrong = twice.unwrap_or_else(|_| vec![String::from("no result, see above")]);
            if !wrong.is_empty() {
                let limits = &program.limits;
                let failure = format!("program {number}, {ending:?}: {}\n{limits:?}\n{}\n", wrong.join("\n"), program.code);
                failures.lock().unwrap().push(failure);
            }
        }
    };
    thread::scope(|scope| (0..at_a_time).for_each(|_| drop(scope.spawn(work))));
    let failures = failures.into_inner().unwrap();
    for failure in failures.iter().take(5) {
        println!("{failure}");
    }
    assert!(failures.is_empty(), "{} of {count} programs, STOCKADE_TEST_SEED={seed}", failures.len());
}

test!(Both, generated_programs_end_by_their_cause, seconds 150);
fn generated_programs_end_by_their_cause() {
    programs_end_by_their_cause(100, 4);
}

test!(Both, two_thousand_generated_programs_end_by_their_cause, needs [Long], seconds 3000);
/// Each cause more than 100 times.
fn two_thousand_generated_programs_end_by_their_cause() {
    programs_end_by_their_cause(2_000, 8);
}
