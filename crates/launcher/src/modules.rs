//! The pipe by which watched interpreters report modules and events.
//!
//! Any code inside can write to that pipe, as much as it likes and at any time. So it is read
//! within bounds, and a failure to read it is no failure of the run. What it reports stands in
//! the result and decides nothing.

use std::mem::MaybeUninit;

use rustix::{fd::OwnedFd, io::Errno};
use stockade_protocol::modules::{Modules, Tally};

/// Bytes that are read for one run; honest interpreters write a few thousand.
const MAX_READ: u64 = 4 << 20;

/// One run's pipe, and what came through it.
pub(crate) struct HookEvents {
    pipe: OwnedFd,
    tally: Tally,
    left: u64,
}

impl HookEvents {
    pub(crate) fn new(pipe: OwnedFd) -> Self {
        HookEvents { pipe, tally: Tally::default(), left: MAX_READ }
    }

    pub(crate) fn pipe(&self) -> &OwnedFd {
        &self.pipe
    }

    /// Reads what is there; false: no more will be read.
    pub(crate) fn read(&mut self, buffer: &mut [MaybeUninit<u8>]) -> Result<bool, Errno> {
        self.read_more(buffer).map(|_| self.left > 0)
    }

    /// The same; false: nothing was there, or no more will be read.
    pub(crate) fn read_more(&mut self, buffer: &mut [MaybeUninit<u8>]) -> Result<bool, Errno> {
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
