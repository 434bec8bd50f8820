//! Writes answers to stdout, one line each.
//!
//! A slow reader blocks only the session, which still reacts to signals that end it. Such a
//! signal can cut an answer short. Nothing is buffered or dropped.

use rustix::{
    event::{PollFd, PollFlags, poll},
    io::Errno,
};
use serde::Serialize;
use stockade_engine::{nonblocking::NonblockingStdio, signals::Signals};

use super::{queue::ending, serve::SessionEnd};

/// The session's stdout.
pub(crate) struct ResponseWriter(NonblockingStdio);

impl ResponseWriter {
    pub(crate) fn new() -> Self {
        ResponseWriter(NonblockingStdio::stdout())
    }

    /// Writes one line. Returns why the session ends, where it cannot continue.
    ///
    /// # Errors
    /// The write fails for another reason than a closed reader.
    pub(crate) fn write(&self, signals: &mut Signals, answer: &impl Serialize) -> Result<Option<SessionEnd>, std::io::Error> {
        let mut line = serde_json::to_vec(answer)?;
        line.push(b'\n');
        let mut rest = line.as_slice();
        while !rest.is_empty() {
            match self.0.write(rest) {
                Ok(length) => rest = rest.get(length..).unwrap_or_default(),
                Err(Errno::INTR) => {}
                Err(Errno::PIPE | Errno::CONNRESET) => return Ok(Some(SessionEnd::OutputClosed)),
                Err(Errno::AGAIN) => {
                    if let Some(signal) = self.wait_for_room(signals)? {
                        return Ok(Some(SessionEnd::Signal(signal)));
                    }
                }
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(None)
    }

    /// Waits until stdout is writable, or returns the signal that ends the session.
    fn wait_for_room(&self, signals: &mut Signals) -> Result<Option<i32>, Errno> {
        let out = self.0.fd();
        let mut fds = [PollFd::new(&out, PollFlags::OUT), PollFd::new(&*signals, PollFlags::IN)];
        match poll(&mut fds, None) {
            Err(Errno::INTR) => return Ok(None),
            polled => polled?,
        };
        let [_, told] = fds.map(|fd| fd.revents());
        Ok(if told.is_empty() { None } else { signals.take().filter(|signal| ending(*signal)) })
    }
}
