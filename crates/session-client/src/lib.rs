//! A `stockade session` as a child process: one line out, one line back.
//!
//! The companions `stockade-mcp` and `stockade-markdown` share it. All calls block. Sending
//! and reading have a lock each, so that one thread can cancel a run whose answer another
//! thread is reading. It holds no rights and judges no answer.
#![forbid(unsafe_code)]

use std::{
    ffi::OsString,
    io::{self, BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio},
    sync::{Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fd::{BorrowedFd, OwnedFd},
    io::Errno,
    process::{Pid, PidfdFlags, Signal, getpid, kill_process, pidfd_open},
};
use serde_json::{Map, Value};
use stockade_protocol::session::Line;

/// An answer: one JSON object.
pub type Answer = Map<String, Value>;

/// Why there is no session, or no answer.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// The program could not be started.
    #[error("start {program}: {error}", program = .0.display(), error = .1)]
    NotStarted(PathBuf, #[source] io::Error),
    /// The session refused to begin; this is its first line.
    #[error("{}", refusal_text(.0))]
    Refused(Answer),
    /// It closed its output before it answered.
    #[error("it ended before it had answered; stderr may say why")]
    Closed,
    /// Its answer is no JSON object.
    #[error("its answer is no object: {0}")]
    Malformed(#[source] serde_json::Error),
    /// A pipe to it failed.
    #[error("{0}")]
    Pipe(#[from] io::Error),
}

fn refusal_text(refusal: &Answer) -> &str {
    refusal.get("error").and_then(Value::as_str).unwrap_or("the session did not begin")
}

/// Has this process get SIGTERM when the first of these processes, given by their pids, has ended,
/// or when `answers` has no reader any more. A thread waits for that; it takes the signals that
/// its maker takes.
///
/// # Errors
/// There is no descriptor or no thread left.
pub fn hang_up_with(callers: &[i32], answers: Option<BorrowedFd<'static>>) -> io::Result<()> {
    let (mut pidfds, mut gone) = (Vec::new(), false);
    for caller in callers.iter().filter_map(|pid| Pid::from_raw(*pid)) {
        match pidfd_open(caller, PidfdFlags::empty()) {
            Ok(pidfd) => pidfds.push(pidfd),
            Err(Errno::SRCH) => gone = true,
            Err(errno) => return Err(errno.into()),
        }
    }
    thread::Builder::new().spawn(move || {
        let mut fds: Vec<PollFd<'_>> = pidfds.iter().map(|pidfd| PollFd::new(pidfd, PollFlags::IN)).collect();
        // The kernel reports a hang-up whether it is asked for or not.
        fds.extend(answers.iter().map(|answers| PollFd::new(answers, PollFlags::empty())));
        while !gone {
            match poll(&mut fds, None) {
                Ok(_) => gone = true,
                Err(Errno::INTR) => {}
                Err(_) => return,
            }
        }
        // A process may signal itself. Below an agent under nohup SIGHUP is ignored.
        let _cannot_fail = kill_process(getpid(), Signal::TERM);
    })?;
    Ok(())
}

/// A session that has begun. Its pipes close when this is dropped, which ends it.
#[derive(Debug)]
pub struct SessionClient {
    child: Mutex<Child>,
    pidfd: OwnedFd,
    lines: Mutex<Option<ChildStdin>>,
    answers: Mutex<BufReader<ChildStdout>>,
}

/// A lock whose holder panicked still holds a usable pipe.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl SessionClient {
    /// Starts `PROGRAM session OPTIONS`.
    ///
    /// # Errors
    /// The program cannot be started.
    pub fn start(program: &Path, options: &[OsString]) -> Result<Self, SessionError> {
        let failed = |error| SessionError::NotStarted(program.to_path_buf(), error);
        let mut command = Command::new(program);
        command.arg("session").args(options).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(failed)?;
        let (lines, answers) = (child.stdin.take(), child.stdout.take());
        let answers = answers.ok_or_else(|| failed(io::ErrorKind::BrokenPipe.into()))?;
        let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).map_err(|errno| failed(errno.into()))?;
        let answers = Mutex::new(BufReader::new(answers));
        Ok(SessionClient { child: Mutex::new(child), pidfd, lines: Mutex::new(lines), answers })
    }

    /// Waits until it is ready.
    ///
    /// # Errors
    /// Its first line refuses to begin.
    pub fn wait_until_ready(&self) -> Result<(), SessionError> {
        let ready = self.answer()?;
        if ready.get("ok") == Some(&Value::Bool(true)) { Ok(()) } else { Err(SessionError::Refused(ready)) }
    }

    /// Its process, to signal it.
    ///
    /// # Errors
    /// There is no descriptor left.
    pub fn process(&self) -> io::Result<OwnedFd> {
        self.pidfd.try_clone()
    }

    /// Sends a line.
    ///
    /// # Errors
    /// The session has closed its input.
    pub fn send(&self, line: &Line) -> Result<(), SessionError> {
        let mut bytes = serde_json::to_vec(line).map_err(SessionError::Malformed)?;
        bytes.push(b'\n');
        let mut lines = lock(&self.lines);
        let pipe = lines.as_mut().ok_or(SessionError::Closed)?;
        Ok(pipe.write_all(&bytes).and_then(|()| pipe.flush())?)
    }

    /// Reads the next answer; answers come in the order of the lines.
    ///
    /// # Errors
    /// The session has ended, or its answer is none.
    pub fn answer(&self) -> Result<Answer, SessionError> {
        let mut line = Vec::new();
        match lock(&self.answers).read_until(b'\n', &mut line)? {
            0 => Err(SessionError::Closed),
            _ => serde_json::from_slice(&line).map_err(SessionError::Malformed),
        }
    }

    /// Closes the session's input, which ends it, and waits for that. After a timeout it is
    /// killed; the kernel then ends what runs in it.
    ///
    /// # Errors
    /// Its end cannot be waited for.
    pub fn end(&self, timeout: Option<Duration>) -> io::Result<ExitStatus> {
        drop(lock(&self.lines).take());
        let mut child = lock(&self.child);
        let limit = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        if poll(&mut [PollFd::new(&self.pidfd, PollFlags::IN)], limit.as_ref())? == 0 {
            child.kill()?;
        }
        child.wait()
    }
}
