//! The other end of `stockade session`: one line out, one line back.
//!
//! A session that ends or says something else than its protocol is a sandbox error, with its
//! own words where it has left some. Signals that end programs are passed on to it, so that
//! a run which is cancelled is still answered.

use std::{
    ffi::OsString,
    io::{BufRead, BufReader, Write},
    path::Path,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    thread,
};

use nix::{
    sys::signal::{SigSet, Signal, kill},
    unistd::Pid,
};
use serde_json::{Map, Value, json};
use stockade_markdown::Block;
use stockade_protocol::{Report, Verdict};

use crate::answer::as_map;

/// See the module.
pub(crate) struct Session {
    child: Child,
    to: Option<ChildStdin>,
    from: BufReader<ChildStdout>,
}

impl Session {
    /// Starts one and waits until it is ready.
    ///
    /// # Errors
    /// There is none; the result says why.
    pub(crate) fn start(program: &Path, options: &[OsString]) -> Result<Self, Box<Report>> {
        let failed = |what: &str, error: &dyn std::fmt::Display| {
            Box::new(Report::refused(Verdict::SandboxError, "session_not_started", format!("{what} {}: {error}", program.display())))
        };
        // Before the first thread, so that only the one below takes them; std gives its
        // children an empty mask.
        let signals: SigSet = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP].into_iter().collect();
        signals.thread_block().map_err(|errno| failed("hold back signals for", &errno))?;
        let mut command = Command::new(program);
        command.arg("session").args(options).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(|error| failed("start", &error))?;
        let (Some(to), Some(from)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(failed("talk to", &"it has no pipes"));
        };
        if let Ok(pid) = i32::try_from(child.id()) {
            thread::spawn(move || {
                while let Ok(signal) = signals.wait() {
                    let _ended = kill(Pid::from_raw(pid), signal);
                }
            });
        }
        let mut session = Session { child, to: Some(to), from: BufReader::new(from) };
        match session.line() {
            Ok(ready) if ready.get("ok") == Some(&Value::Bool(true)) => Ok(session),
            Ok(ready) => Err(Box::new(refused(&ready))),
            Err(why) => Err(Box::new(ended(&why))),
        }
    }

    /// Runs a block and gives its result.
    pub(crate) fn run(&mut self, block: &Block) -> Map<String, Value> {
        let mut request = json!({ "op": "run", "code": block.code, "language": block.language });
        if let Some(file) = &block.file {
            request["files"] = json!({ file: block.code });
        }
        // Whether it arrived is told by whether there is an answer.
        let _sent = self.to.as_mut().map(|to| writeln!(to, "{request}"));
        match self.line() {
            Ok(mut result) if result.contains_key("code") => {
                result.remove("op");
                result
            }
            Ok(answer) => as_map(&refused(&answer)),
            Err(why) => as_map(&ended(&why)),
        }
    }

    /// The next answer, or why there is none.
    fn line(&mut self) -> Result<Map<String, Value>, String> {
        let mut line = String::new();
        match self.from.read_line(&mut line) {
            Ok(0) => Err(String::from("it ended before it had answered; stderr may say why")),
            Ok(_) => serde_json::from_str(&line).map_err(|error| format!("its answer is no object: {error}")),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Lets it end, and waits for that: nothing is left when this program has ended.
    pub(crate) fn end(mut self) {
        drop(self.to.take());
        let _status_of_no_interest = self.child.wait();
    }
}

/// The result that an answer without one amounts to.
fn refused(answer: &Map<String, Value>) -> Report {
    let words = |key: &str| answer.get(key).and_then(Value::as_str).unwrap_or_default();
    let verdict = if words("verdict") == "bad_request" { Verdict::BadRequest } else { Verdict::SandboxError };
    Report::refused(verdict, words("reason"), words("error").to_owned())
}

fn ended(why: &str) -> Report {
    Report::refused(Verdict::SandboxError, "session_ended", format!("the session cannot go on: {why}"))
}
