//! Writes answers to stdout, one line each.
//!
//! A slow reader blocks only the session, which still reacts to the signals and the ends of callers
//! that end it, and may then cut an answer short.

use std::{io, sync::Arc};

use rustix::fd::OwnedFd;
use serde::Serialize;
use stockade_engine::{
    answer::{AnswerError, AnswerStdout},
    signals::Signals,
};

use super::serve::SessionEnd;

/// The session's stdout.
pub(crate) struct ResponseWriter(AnswerStdout);

impl ResponseWriter {
    pub(crate) fn new(callers: Arc<[OwnedFd]>) -> Self {
        ResponseWriter(AnswerStdout::new(callers))
    }

    /// This signal ends the session once the next line is written.
    pub(crate) fn tell(&mut self, signal: i32) {
        self.0.tell(signal);
    }

    /// Writes one line. Returns why the session ends, where it cannot continue.
    ///
    /// # Errors
    /// The write fails for another reason than a closed reader.
    pub(crate) fn write(&mut self, signals: &mut Signals, answer: &impl Serialize) -> Result<Option<SessionEnd>, io::Error> {
        self.write_line(signals, serde_json::to_vec(answer)?)
    }

    /// Writes a line that lacks its end.
    ///
    /// # Errors
    /// As [`Self::write`].
    pub(crate) fn write_line(&mut self, signals: &mut Signals, mut line: Vec<u8>) -> Result<Option<SessionEnd>, io::Error> {
        line.push(b'\n');
        match self.0.write_all(&line, signals) {
            Ok(()) => Ok(self.0.told().map(SessionEnd::Signal)),
            Err(AnswerError::NotRead(signal)) => Ok(Some(SessionEnd::Signal(signal))),
            Err(AnswerError::Write(error)) => match error.kind() {
                io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => Ok(Some(SessionEnd::OutputClosed)),
                _ => Err(error),
            },
        }
    }
}
