//! The session that runs a reply's blocks.
//!
//! A session that ends, or that breaks its protocol, is a sandbox error with the session's
//! own words where there are any. SIGTERM, SIGINT and SIGHUP are passed on to it, so that a
//! cancelled run is still answered. Once there is an answer they end this program: its reader may
//! be gone for good.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    path::Path,
    sync::atomic::{AtomicI32, Ordering},
    thread,
};

use nix::sys::signal::{SigSet, Signal};
use rustix::process::pidfd_send_signal;
use serde_json::{Map, Value};
use stockade_markdown::Block;
use stockade_protocol::{Report, Request, TextOrBase64, Verdict, session::Line};
use stockade_session_client::{Answer, SessionClient, SessionError};

use crate::answer::as_map;

/// The last signal that was passed on; 0: none was.
static PASSED_ON: AtomicI32 = AtomicI32::new(0);

fn passed_on() -> SigSet {
    [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP].into_iter().collect()
}

/// Lets signals end this program from now on. The one that has told it to end already.
pub(crate) fn let_signals_end_this() -> Option<i32> {
    // The mask is ours to set.
    let _cannot_fail = passed_on().thread_unblock();
    Some(PASSED_ON.load(Ordering::Acquire)).filter(|signal| *signal != 0)
}

/// Ends this program, as SIGHUP does, when the first of these processes has ended.
///
/// # Errors
/// They cannot be watched.
pub(crate) fn hang_up_with(callers: &[i32]) -> Result<(), Box<Report>> {
    // So that the thread that watches them takes no signal.
    let _ours_to_set = passed_on().thread_block();
    let watched = stockade_session_client::hang_up_with(callers, None);
    let _ours_to_set = passed_on().thread_unblock();
    watched.map_err(|error| not_started(&format!("watch the process that started it: {error}")))
}

fn not_started(error: &dyn std::fmt::Display) -> Box<Report> {
    Box::new(Report::refused(Verdict::SandboxError, "session_not_started", error.to_string()))
}

/// A session that has begun.
pub(crate) struct Session(SessionClient);

impl Session {
    /// Starts one and waits until it is ready.
    ///
    /// # Errors
    /// There is no session; the result states why.
    pub(crate) fn start(program: &Path, options: &[OsString]) -> Result<Self, Box<Report>> {
        // Blocked before the first thread starts, so that only the thread below takes them. std
        // gives its children an empty mask.
        let signals = passed_on();
        signals.thread_block().map_err(|errno| not_started(&format!("block signals: {errno}")))?;
        let client = SessionClient::start(program, options).map_err(|error| not_started(&error))?;
        let process = client.process().map_err(|error| not_started(&error))?;
        thread::spawn(move || {
            while let Ok(signal) = signals.wait() {
                PASSED_ON.store(signal as i32, Ordering::Release);
                if let Some(signal) = rustix::process::Signal::from_named_raw(signal as i32) {
                    let _ended = pidfd_send_signal(&process, signal);
                }
            }
        });
        match client.wait_until_ready() {
            Ok(()) => Ok(Session(client)),
            Err(SessionError::Refused(answer)) => Err(Box::new(refused(&answer))),
            Err(error) => Err(Box::new(ended(&error))),
        }
    }

    /// Runs a block and gives its result.
    pub(crate) fn run(&self, block: &Block) -> Map<String, Value> {
        let files = block.file.iter().map(|file| (file.clone(), TextOrBase64::Text(block.code.clone())));
        let request =
            Request { code: block.code.clone(), language: block.language.clone(), files: BTreeMap::from_iter(files), ..Request::default() };
        // Where the line cannot be sent, an answer that is already there states why.
        let sent = self.0.send(&Line::Run(Box::new(request)));
        match self.0.answer() {
            Ok(mut result) if result.contains_key("code") => {
                result.remove("op");
                result
            }
            Ok(answer) => as_map(&refused(&answer)),
            Err(error) => as_map(&ended(&sent.err().unwrap_or(error))),
        }
    }

    /// Ends it and waits for that: nothing of it is left when this program has ended.
    pub(crate) fn end(self) {
        let _status = self.0.end(None);
    }
}

/// The result for an answer that holds none.
fn refused(answer: &Answer) -> Report {
    let words = |key: &str| answer.get(key).and_then(Value::as_str).unwrap_or_default();
    let verdict = if words("verdict") == "bad_request" { Verdict::BadRequest } else { Verdict::SandboxError };
    Report::refused(verdict, words("reason"), words("error").to_owned())
}

fn ended(error: &SessionError) -> Report {
    Report::refused(Verdict::SandboxError, "session_ended", format!("the session cannot go on: {error}"))
}
