//! A client of `stockade session`, and the sandbox that a session prepares for its next request.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio},
    time::Duration,
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use super::{
    exec::stockade,
    leftovers::host_process_with,
    runner::{eventually, wait_within},
    timeouts::{is_slow, scaled_limit},
};

/// A session, and the two ends of its pipes.
pub struct Session {
    pub child: Child,
    pub lines: Option<ChildStdin>,
    pub answers: BufReader<ChildStdout>,
    pub ready: Value,
}

impl Session {
    pub fn open(options: &[&str]) -> Self {
        Session::of(&mut stockade([&["session"], options].concat()))
    }

    pub fn of(command: &mut Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let (lines, answers) = (child.stdin.take(), BufReader::new(child.stdout.take().unwrap()));
        let mut session = Session { child, lines, answers, ready: Value::Null };
        session.ready = session.answer();
        assert_eq!((&session.ready["op"], &session.ready["ok"]), (&json!("ready"), &json!(true)), "{}", session.ready);
        session
    }

    pub fn pid(&self) -> Pid {
        Pid::from_raw(i32::try_from(self.child.id()).unwrap())
    }

    /// A figure of the launcher's memory.
    pub fn kilobytes(&self, what: &str) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(what)?.strip_prefix(':'));
        line.unwrap().trim().trim_end_matches(" kB").parse().unwrap()
    }

    pub fn send(&mut self, line: &str) {
        let lines = self.lines.as_mut().unwrap();
        lines.write_all(line.as_bytes()).unwrap();
        lines.write_all(b"\n").unwrap();
        lines.flush().unwrap();
    }

    #[track_caller]
    pub fn answer(&mut self) -> Value {
        let mut line = String::new();
        self.answers.read_line(&mut line).unwrap();
        assert!(line.ends_with('\n'), "the session ended without an answer: {line:?}");
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("no JSON: {error}: {line}"))
    }

    #[track_caller]
    pub fn ask(&mut self, line: Value) -> Value {
        self.send(&line.to_string());
        let answer = self.answer();
        assert_eq!(answer["op"], line["op"], "{answer}");
        answer
    }

    /// Runs Python code; on a slow machine with the time that it needs.
    #[track_caller]
    pub fn run(&mut self, code: &str) -> Value {
        let mut line = json!({"op": "run", "code": code});
        if is_slow() {
            line["limits"]["wall"] = json!(scaled_limit(30_000));
        }
        self.ask(line)
    }

    /// Its output, if it succeeded.
    #[track_caller]
    pub fn output(&mut self, code: &str) -> String {
        let result = self.run(code);
        assert!(result["success"] == true, "{} {}", result["verdict"], result["error"]);
        result["output"].as_str().unwrap().to_owned()
    }

    #[track_caller]
    pub fn write(&mut self, path: &str, contents: Value) {
        let answer = self.ask(json!({"op": "write", "path": path, "contents": contents}));
        assert_eq!(answer["ok"], true, "{answer}");
    }

    #[track_caller]
    pub fn refused(&mut self, line: Value, reason: &str) -> String {
        let answer = self.ask(line);
        let wanted = (json!(false), json!("bad_request"), json!(reason));
        assert_eq!((answer["ok"].clone(), answer["verdict"].clone(), answer["reason"].clone()), wanted, "{answer}");
        answer["error"].as_str().unwrap().to_owned()
    }

    /// Whether there is something of an answer to read.
    pub fn has_begun_to_answer(&self) -> bool {
        rustix::io::ioctl_fionread(self.answers.get_ref()).unwrap() > 0
    }

    /// Waits for its end.
    #[track_caller]
    pub fn ended(&mut self) -> ExitStatus {
        wait_within(&mut self.child, Duration::from_secs(20)).expect("the session goes on")
    }

    /// Its input ends.
    pub fn end_input(&mut self) {
        drop(self.lines.take());
    }

    #[track_caller]
    pub fn close(mut self) {
        drop(self.lines.take());
        assert_eq!(self.ended().code(), Some(0));
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // One that is killed leaves its sandboxes' cgroups to the next start that knows its registry,
        // which a registry of the test's own has none of.
        drop(self.lines.take());
        if wait_within(&mut self.child, Duration::from_secs(10)).is_some() {
            return;
        }
        let _ended = self.child.kill();
        let _reaped = self.child.wait();
    }
}

/// Sends code that never ends, and waits until it runs.
pub fn begin(session: &mut Session, words: &str) {
    begin_with(session, words, json!({}));
}

/// The same with these limits.
pub fn begin_with(session: &mut Session, words: &str, mut limits: Value) {
    let code = format!("import time  # {words}\ntime.sleep(600)");
    limits["wall"] = json!("10min");
    session.send(&json!({"op": "run", "code": code, "args": [words], "limits": limits}).to_string());
    assert!(eventually(Duration::from_secs(10), || host_process_with(words)), "it does not run");
}

/// Stops a process, and waits until it stands still.
pub fn stop(pid: Pid) {
    kill(pid, Signal::SIGSTOP).unwrap();
    let stands = || fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| stat.contains(") T "));
    assert!(eventually(Duration::from_secs(5), stands), "it does not stop");
}

pub fn children(pid: u32) -> Vec<u32> {
    let list = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    list.split_whitespace().map(|child| child.parse().unwrap()).collect()
}

/// Whether this process is a screener.
pub fn is_screener(pid: u32) -> bool {
    fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.starts_with(b"stockade-screen\0"))
}

/// Whether a thread of an interpreter waits in open(2) for its program.
fn waits_for_program(pid: u32) -> bool {
    const OPEN: [&str; 2] = ["2", "257"];
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    threads.into_iter().any(|thread| {
        let call = fs::read_to_string(thread.path().join("syscall")).unwrap_or_default();
        call.split(' ').next().is_some_and(|number| OPEN.contains(&number))
    })
}

/// The interpreter that waits in the sandbox of this first process.
pub fn waiting_interpreter(sandbox: u32) -> Option<u32> {
    children(sandbox).into_iter().find(|pid| waits_for_program(*pid))
}

/// The first process of the sandbox that waits for a request: it has become the executor, and
/// no program runs in it.
pub fn waiting(session: &Session) -> Option<u32> {
    let launcher = session.pid().as_raw().unsigned_abs();
    let waits = |pid: &u32| {
        let executor = fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.starts_with(b"stockade-executor"));
        executor
            && fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| stat.contains(") S "))
            && children(*pid).into_iter().all(waits_for_program)
    };
    children(launcher).into_iter().find(waits)
}

/// The same, when it has come so far.
#[track_caller]
pub fn prepared_sandbox(session: &Session) -> u32 {
    let mut found = None;
    let stands = eventually(Duration::from_secs(10), || {
        found = waiting(session);
        found.is_some()
    });
    assert!(stands, "nothing stands ready: {:?}", children(session.pid().as_raw().unsigned_abs()));
    found.unwrap()
}
