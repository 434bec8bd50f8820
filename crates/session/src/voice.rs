//! Answers on stdout, each a line.
//!
//! Nothing waits for whoever does not read them but the session itself, and that goes on
//! heeding the signals that end it: an answer that is cut short by one has lost its end.

use rustix::{
    event::{PollFd, PollFlags, poll},
    io::Errno,
};
use serde::Serialize;
use stockade_launcher::{own::OwnStream, signals::Signals};

use crate::{queue::ending, serve::Ended};

/// See the module.
pub(crate) struct Voice(OwnStream);

impl Voice {
    pub(crate) fn new() -> Self {
        Voice(OwnStream::stdout())
    }

    /// Writes one line; what the session ends by where it cannot go on.
    ///
    /// # Errors
    /// It cannot be written, and not because nobody reads it.
    pub(crate) fn say(&self, signals: &mut Signals, answer: &impl Serialize) -> Result<Option<Ended>, std::io::Error> {
        let mut line = serde_json::to_vec(answer)?;
        line.push(b'\n');
        let mut rest = line.as_slice();
        while !rest.is_empty() {
            match self.0.write(rest) {
                Ok(length) => rest = rest.get(length..).unwrap_or_default(),
                Err(Errno::INTR) => {}
                Err(Errno::PIPE | Errno::CONNRESET) => return Ok(Some(Ended::Unheard)),
                Err(Errno::AGAIN) => {
                    if let Some(signal) = self.wait_for_room(signals)? {
                        return Ok(Some(Ended::Signal(signal)));
                    }
                }
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(None)
    }

    /// Waits until there is room, or for a signal that ends the session, which it returns.
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
