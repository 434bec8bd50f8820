//! Writes answers to stdout, for as long as somebody may wait for them.
//!
//! A slow reader is waited for without limit. A signal that ends programs, and the end of a process
//! that the answer is for, limit that to [`GRACE`]: another process may hold the other end of stdout
//! and never read it. An answer that is given up is cut short. Nothing is buffered or dropped.

use std::{io, sync::Arc, time::Instant};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fd::{BorrowedFd, OwnedFd},
    io::Errno,
};
use stockade_launcher::{
    Asked, Client,
    nonblocking::NonblockingStdio,
    signals::{GRACE, Signals},
};

/// SIGHUP, as for a run whose caller has ended.
const HANG_UP: i32 = 1;

/// Whether a signal ends what has no run: SIGHUP, SIGINT, SIGQUIT and SIGTERM do. Other blocked
/// signals are ignored.
pub fn ending(signal: i32) -> bool {
    matches!(signal, 1..=3 | 15)
}

/// Why an answer was not written.
#[derive(Debug, thiserror::Error)]
pub enum AnswerError {
    /// This signal, or SIGHUP for the end of a caller, has come, and the answer was not read.
    #[error("its reader has not read it, and signal {0} or the end of a caller has ended the waiting")]
    NotRead(i32),
    /// Stdout refused it.
    #[error(transparent)]
    Write(io::Error),
}

/// Stdout, and who waits for an answer there.
pub struct AnswerStdout {
    stdout: NonblockingStdio,
    /// Pidfds.
    callers: Arc<[OwnedFd]>,
    /// The first signal that has told this process to end.
    told: Option<i32>,
}

impl AnswerStdout {
    /// For these callers.
    pub fn new(callers: Arc<[OwnedFd]>) -> Self {
        AnswerStdout { stdout: NonblockingStdio::stdout(), callers, told: None }
    }

    /// This signal has told this process to end.
    pub fn tell(&mut self, signal: i32) {
        self.told.get_or_insert(signal);
    }

    /// The signal that has told this process to end, before or while an answer was written.
    pub fn told(&self) -> Option<i32> {
        self.told
    }

    /// Writes all of an answer.
    ///
    /// # Errors
    /// It was not read, or stdout refuses it.
    pub fn write_all(&mut self, answer: &[u8], signals: &mut Signals) -> Result<(), AnswerError> {
        let mut rest = answer;
        let mut until = self.told.map(|_| Instant::now() + GRACE);
        while !rest.is_empty() {
            match self.stdout.write(rest) {
                Ok(length) => rest = rest.get(length..).unwrap_or_default(),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    if let Some(signal) = self.told.filter(|_| until.is_some_and(|until| Instant::now() >= until)) {
                        return Err(AnswerError::NotRead(signal));
                    }
                    self.wait_for_room(until, signals).map_err(|errno| AnswerError::Write(errno.into()))?;
                    if self.told.is_some() {
                        until.get_or_insert_with(|| Instant::now() + GRACE);
                    }
                }
                Err(errno) => return Err(AnswerError::Write(errno.into())),
            }
        }
        Ok(())
    }

    /// Waits until stdout is writable, or this process is told to end, or this moment.
    fn wait_for_room(&mut self, until: Option<Instant>, signals: &mut Signals) -> Result<(), Errno> {
        let left = until.map(|until| until.saturating_duration_since(Instant::now())).and_then(|left| Timespec::try_from(left).ok());
        let out = self.stdout.fd();
        let mut fds = vec![PollFd::new(&out, PollFlags::OUT), PollFd::new(&*signals, PollFlags::IN)];
        // Once one has ended, its pidfd is readable for ever.
        let callers = if self.told.is_none() { &*self.callers } else { &[] };
        fds.extend(callers.iter().map(|caller| PollFd::new(caller, PollFlags::IN)));
        match poll(&mut fds, left.as_ref()) {
            Err(Errno::INTR) => return Ok(()),
            polled => polled?,
        };
        let caller_has_ended = fds.iter().skip(2).any(|caller| !caller.revents().is_empty());
        drop(fds);
        while let Some(signal) = signals.take() {
            if ending(signal) {
                self.tell(signal);
            }
        }
        if caller_has_ended {
            self.tell(HANG_UP);
        }
        Ok(())
    }
}

/// While the run goes on it asks for nothing, and keeps the signal that ends the run.
impl Client for AnswerStdout {
    fn requests(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn results(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn look(&mut self) -> Asked {
        Asked::Nothing
    }

    fn signalled(&mut self, signal: i32) {
        self.tell(signal);
    }
}
