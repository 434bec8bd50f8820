//! How the interpreter of a session's request came to be, and that its program cannot tell: results
//! of the same program in an interpreter that was started for it, and in one that was not.

use std::{collections::BTreeSet, time::Duration};

use serde_json::{Value, json};

use super::{
    policy_dir::{PolicyDirectory, derived},
    runner::eventually,
    session::{Session, waiting, waiting_interpreter},
    timeouts::{is_slow, scaled_limit},
};

/// Lines of a policy by which the interpreters of Python are started as those of any other language.
pub const NO_TEMPLATE: &str = "[runtimes.python]\ntemplate = \"none\"";

/// A session in which no request starts from a template.
pub fn session_without_template(policies: &PolicyDirectory) -> Session {
    Session::open(&["--policy", &policies.write("no-template", &derived(NO_TEMPLATE))])
}

/// The interpreter that waits for the session's next request.
#[track_caller]
pub fn interpreter(session: &Session) -> u32 {
    let mut found = None;
    let waits = eventually(Duration::from_secs(10), || {
        found = waiting(session).and_then(waiting_interpreter);
        found.is_some()
    });
    assert!(waits, "no interpreter waits");
    found.unwrap()
}

/// In place of a start: the interpreter was started when the request had come, in a sandbox that may have
/// been prepared beside the request before.
pub const AT_REQUEST: &str = "fresh or prepared";

/// The request got such a start, and the receipt's cause of it has these words.
#[track_caller]
pub fn started(result: &Value, start: &str, cause: &str) {
    let receipt = &result["receipt"];
    let is_as_told =
        if start == AT_REQUEST { ["fresh", "prepared"].iter().any(|start| receipt["start"] == **start) } else { receipt["start"] == start };
    assert!(is_as_told, "{start}: {} {} {}", receipt["start"], receipt["start_cause"], result["error"]);
    assert!(receipt["start_cause"].as_str().unwrap_or_default().contains(cause), "{}", receipt["start_cause"]);
}

/// What a program can tell of its run, without what is random in each.
pub fn told(result: &Value) -> String {
    // Their help names the policy, and two are compared that differ in the template.
    let of_denial = |denial: &Value| ["kind", "what", "count", "answer", "rule"].map(|field| denial[field].clone());
    let denials: Vec<_> = result["denials"].as_array().unwrap().iter().map(of_denial).collect();
    let fields = ["verdict", "code", "signal", "limits_hit", "findings", "output", "error"].map(|field| &result[field]);
    let shown = json!([fields, denials]).to_string();
    let mut parts = shown.split("stockade_");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |all, part| all + "PROGRAM" + part.get(16..).unwrap_or(part))
}

/// A program's result in an empty session, without a pause before it.
pub fn result_without_pause(session: &mut Session, line: &Value) -> Value {
    session.send(&format!("{}\n{line}", json!({"op": "reset"})));
    assert_eq!(session.answer()["ok"], true);
    session.answer()
}

/// The same in the interpreter that waits.
pub fn result_after_pause(session: &mut Session, line: &Value) -> Value {
    assert_eq!(session.ask(json!({"op": "reset"}))["ok"], true);
    interpreter(session);
    session.ask(line.clone())
}

/// What a program told that was started afresh. No template may be ready.
pub fn told_afresh(session: &mut Session, line: &Value) -> String {
    // A busy host can make a pause of two lines that were sent as one.
    let results = std::iter::repeat_with(|| result_without_pause(session, line));
    let result = results.take(20).find(|result| result["receipt"]["start"] == "fresh").unwrap_or_default();
    started(&result, "fresh", "no sandbox was prepared");
    told(&result)
}

/// What it told in an interpreter that waited, and got its start in this way.
pub fn told_after_pause(session: &mut Session, line: &Value, start: &str) -> String {
    let result = result_after_pause(session, line);
    started(&result, start, "");
    told(&result)
}

/// What it told without a pause before it, where it got its start in this way.
pub fn told_without_pause(session: &mut Session, line: &Value, start: &str) -> String {
    let result = result_without_pause(session, line);
    started(&result, start, "");
    told(&result)
}

/// A request for this program.
pub fn line_of(language: &str, code: &str, wall_ms: u32) -> Value {
    json!({"op": "run", "code": code, "language": language, "limits": {"wall": scaled_limit(wall_ms)}})
}

/// Runs every program of a corpus. `pair` gives what it told of a fresh start and of another one. They
/// must be alike, but for programs that print what depends on the moment: no two results of theirs
/// are the same. Returns how many were alike, and the names of those that were not.
pub fn compare_corpus(corpus: &'static str, mut pair: impl FnMut(&str) -> (String, String)) -> (usize, Vec<&'static str>) {
    // Where each takes seconds, some.
    let step = if is_slow() { 8 } else { 1 };
    let (mut same, mut different) = (0, Vec::new());
    for program in corpus.split("%%%% ").skip(1).step_by(step) {
        let (name, code) = program.split_once('\n').unwrap();
        let mut fresh_results = BTreeSet::new();
        let mut is_alike = || {
            let (fresh, other) = pair(code);
            let alike = fresh == other;
            fresh_results.insert(fresh);
            alike
        };
        match (0..6).any(|_| is_alike()) {
            true => same += step,
            false if fresh_results.len() > 1 => {}
            false => different.push(name),
        }
    }
    (same, different)
}

/// Programs that print all they can find out of their start.
pub const CURIOUS_PROGRAMS: [(&str, &str); 21] = [
    ("python", "import os, sys\nprint(__file__ == sys.argv[0], sys.path[0], sys.argv[1:], os.getcwd(), sys.flags, sys.orig_argv)"),
    ("python", "import inspect\nprint([frame.function for frame in inspect.stack()], sorted(vars()), __name__, __spec__, __cached__)"),
    ("python", "import sys\nprint(sorted(sys.modules), sys.path, sys.warnoptions)"),
    ("python", "import os\nprint(os.getpid(), os.getppid(), os.getsid(0), os.environ, os.umask(0), os.listdir('/proc/self/fd'))"),
    ("python", "def f(): return 1 / 0\ndef g(): return f()\ng()"),
    ("python", "print(open(__file__).read() == open(__file__, 'rb').read().decode()); import os; print(oct(os.stat(__file__).st_mode))"),
    ("python", "# -*- coding: latin-1 -*-\nprint(len('\u{e4}'))"),
    ("python", "import sys; sys.exit('said')"),
    (
        "python",
        "import os, signal\nfor name in ('SigIgn', 'SigCgt', 'SigBlk', 'Seccomp', 'CapEff', 'NoNewPrivs'):\n    print([line for line in open('/proc/self/status') if line.startswith(name)])\nos.kill(os.getpid(), signal.SIGINT)",
    ),
    (
        "python",
        "import atexit, threading\natexit.register(print, 'end')\nthreading.Thread(target=lambda: print(threading.active_count())).start()",
    ),
    ("python", "import subprocess, sys\nprint(subprocess.run([sys.executable, '-c', 'print(1)'], capture_output=True))"),
    (
        "python",
        "import multiprocessing as m\nif __name__ == '__main__':\n    m.set_start_method('spawn')\n    with m.Pool(2) as p: print(p.map(abs, [-1, 2]))",
    ),
    ("python", "def f(n): return f(n - 1) if n else 0\nimport sys; sys.setrecursionlimit(30000); print(f(15000))"),
    ("python", "import resource as r\nprint([r.getrlimit(n) for n in range(16)], open('/proc/self/oom_score_adj').read())"),
    ("python", "syntax error here"),
    ("bash", "echo \"$0\" \"$#\" \"$BASH_SOURCE\" $$ $PPID; cat \"$0\"; set; exit 3"),
    ("bash", "trap 'echo end' EXIT; f() { false; caller 0; }; f; (sleep 0.01 & wait); kill -TERM $$"),
    ("sh", "echo \"$0\" $$; nonsense; cat < \"$0\""),
    ("node", "console.log(__filename, process.argv, module.paths, require.main === module, process.execArgv, process.pid)"),
    ("node", "console.error(new Error('x').stack); process.exitCode = 4"),
    ("node", "import('fs').then(fs => console.log(typeof fs.readFileSync)); throw new TypeError('thrown')"),
];
