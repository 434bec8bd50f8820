//! How full the run's own file systems get while it runs.
//!
//! The kernel counts no write that it refused, and a program can clean up before it ends, so
//! the launcher looks now and then: the sooner, the less room is left. What is filled and
//! emptied between two looks is not seen. A host scratch is counted in `quota.rs`.

use std::time::{Duration, Instant};

use rustix::fd::OwnedFd;

use crate::scratch::usage::{FsUse, Full, filesystem_use};

/// As fast as a program could fill a tmpfs: above all that was measured.
const BYTES_PER_US: u64 = 4096;
const FILES_PER_US: u64 = 1;
const MIN_INTERVAL: Duration = Duration::from_micros(250);
const MAX_INTERVAL: Duration = Duration::from_millis(16);
/// Between looks at file systems that do not change.
const IDLE_INTERVAL: Duration = Duration::from_millis(64);

/// The most that was seen of one file system.
#[derive(Debug, Default)]
pub(super) struct FsPeak {
    last: FsUse,
    pub(super) bytes: u64,
    /// What it had no more of at a time.
    pub(super) full: Full,
}

impl FsPeak {
    /// Looks once more. Whether it has changed.
    fn look(&mut self, fs: Option<&OwnedFd>) -> bool {
        let Some(now) = fs.and_then(filesystem_use) else { return false };
        let has_changed = now != self.last;
        self.bytes = self.bytes.max(now.bytes);
        self.full = self.full.or(now.full);
        self.last = now;
        has_changed
    }

    /// What it had no more of when it was last looked at.
    pub(super) fn full_at_last(&self) -> Full {
        self.last.full
    }

    /// How many bytes it held when it was last looked at.
    pub(super) fn bytes_at_last(&self) -> u64 {
        self.last.bytes
    }

    /// How long it takes at least until it is full in a way in which it has not been; none where
    /// it has been full in each.
    fn until_full(&self) -> Option<Duration> {
        let bytes = (!self.full.size).then_some(self.last.free_bytes / BYTES_PER_US);
        let files = (!self.full.files).then_some(self.last.free_files / FILES_PER_US);
        bytes.into_iter().chain(files).min().map(Duration::from_micros)
    }
}

/// Looks at a private scratch, and at the file system of `/tmp`, home and `/dev/shm`.
#[derive(Debug, Default)]
pub(super) struct FsSampler {
    pub(super) scratch: FsPeak,
    pub(super) tmp: FsPeak,
    interval: Duration,
    /// None before the program starts, and when nothing more can be learned.
    pub(super) next: Option<Instant>,
}

impl FsSampler {
    /// Looks at both, and decides when to look again.
    pub(super) fn look(&mut self, scratch: Option<&OwnedFd>, tmp: Option<&OwnedFd>, now: Instant) {
        let has_changed = self.scratch.look(scratch) | self.tmp.look(tmp);
        let soonest = [&self.scratch, &self.tmp].into_iter().filter_map(FsPeak::until_full).min();
        self.interval = match soonest {
            Some(soonest) if has_changed => soonest.clamp(MIN_INTERVAL, MAX_INTERVAL),
            Some(_) => (self.interval * 2).clamp(MIN_INTERVAL, IDLE_INTERVAL),
            None => IDLE_INTERVAL,
        };
        self.next = soonest.map(|_| now + self.interval);
    }
}
