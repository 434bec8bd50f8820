//! The session that runs a reply's blocks.
//!
//! A session that ends, or that breaks its protocol, is a sandbox error with the session's
//! own words where there are any, unless a signal has ended it. SIGTERM, SIGINT and SIGHUP
//! are passed on to it, so that a cancelled run is still answered. Once there is an answer they
//! end this program: its reader may be gone for good.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    path::Path,
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
};

use nix::sys::signal::{SigSet, Signal, raise};
use rustix::{fd::OwnedFd, process::pidfd_send_signal};
use serde_json::{Map, Value};
use stockade_markdown::Block;
use stockade_protocol::{Report, Request, TextOrBase64, Verdict, session::Line};
use stockade_session_client::{Answer, SessionClient, SessionError};

use crate::answer::as_map;

/// What becomes of a signal, and the last one that was passed on.
struct Signalled {
    passed_on: Option<i32>,
    /// Signals end this program.
    ends_this: bool,
}

static SIGNALLED: Mutex<Signalled> = Mutex::new(Signalled { passed_on: None, ends_this: false });

fn signalled() -> MutexGuard<'static, Signalled> {
    SIGNALLED.lock().unwrap_or_else(PoisonError::into_inner)
}

fn passed_on() -> SigSet {
    [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP].into_iter().collect()
}

/// Lets signals end this program from now on. The one that has told it to end already.
pub(crate) fn let_signals_end_this() -> Option<i32> {
    // The mask is ours to set. The thread that waits for signals may still be given one.
    let _cannot_fail = passed_on().thread_unblock();
    let mut signalled = signalled();
    signalled.ends_this = true;
    signalled.passed_on
}

/// Passes signals on to a session, until they end this program.
fn pass_on(signals: SigSet, session: &OwnedFd) {
    while let Ok(signal) = signals.wait() {
        let mut signalled = signalled();
        if signalled.ends_this {
            // As if it had not been waited for.
            let _cannot_fail = signals.thread_unblock();
            let _ends_this = raise(signal);
        }
        signalled.passed_on = Some(signal as i32);
        drop(signalled);
        if let Some(signal) = rustix::process::Signal::from_named_raw(signal as i32) {
            let _ended = pidfd_send_signal(session, signal);
        }
    }
}

/// Ends this program, as SIGTERM does, when the first of these processes has ended.
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
        thread::spawn(move || pass_on(signals, &process));
        match client.wait_until_ready() {
            Ok(()) => Ok(Session(client)),
            Err(SessionError::Refused(answer)) => Err(Box::new(refused(&answer))),
            Err(error) => Err(Box::new(ended(&error))),
        }
    }

    /// Runs a block and gives its result.
    pub(crate) fn run(&self, block: &Block) -> Map<String, Value> {
        let files = block.file.iter().map(|file| (file.clone(), TextOrBase64::Text(block.code.clone())));
        let request = Request {
            code: block.code.clone().into(),
            language: block.language.clone(),
            files: BTreeMap::from_iter(files),
            ..Request::default()
        };
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

/// The result for a session that has ended: by a signal that was passed on, no code was running.
fn ended(error: &SessionError) -> Report {
    if let Some(signal) = signalled().passed_on {
        let error = String::from("the reply was cancelled before this code started");
        return Report { code: 128 + signal, ..Report::refused(Verdict::Cancelled, "cancelled_before_start", error) };
    }
    Report::refused(Verdict::SandboxError, "session_ended", format!("the session cannot go on: {error}"))
}
