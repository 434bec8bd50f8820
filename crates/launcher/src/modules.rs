//! What watched interpreters say of modules and events, as the launcher hears it.
//!
//! Whatever is inside can write to that pipe, as much as it likes and at any time, so it is
//! heard in bounds, and no failure of it is a failure of the run. What it says is kept for
//! the result and decides nothing.

use std::mem::MaybeUninit;

use rustix::{fd::OwnedFd, io::Errno};
use stockade_protocol::modules::{Modules, Tally};

/// Bytes that are heard of one run; honest ones take a few thousand.
const MOST_HEARD: u64 = 4 << 20;

/// One run's pipe, and what came through it.
pub(crate) struct Heard {
    pipe: OwnedFd,
    tally: Tally,
    left: u64,
}

impl Heard {
    pub(crate) fn new(pipe: OwnedFd) -> Self {
        Heard { pipe, tally: Tally::default(), left: MOST_HEARD }
    }

    pub(crate) fn pipe(&self) -> &OwnedFd {
        &self.pipe
    }

    /// Takes what is there; false: no more will be taken.
    pub(crate) fn hear(&mut self, buffer: &mut [MaybeUninit<u8>]) -> Result<bool, Errno> {
        self.hear_more(buffer).map(|_| self.left > 0)
    }

    /// The same; false: nothing was there, or no more will be taken.
    pub(crate) fn hear_more(&mut self, buffer: &mut [MaybeUninit<u8>]) -> Result<bool, Errno> {
        if self.left == 0 {
            return Ok(false);
        }
        match rustix::io::read(&self.pipe, buffer) {
            Ok((bytes, _)) => {
                self.tally.take(bytes);
                self.left = self.left.saturating_sub(bytes.len() as u64);
                Ok(!bytes.is_empty())
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(false),
            Err(errno) => Err(errno),
        }
    }

    pub(crate) fn finish(self) -> Modules {
        self.tally.finish()
    }
}
