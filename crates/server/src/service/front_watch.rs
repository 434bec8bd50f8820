//! Looks every few seconds whether the front reads what the supervisor sends.
//!
//! The supervisor asks the kernel whether the front has read its socket, and does not wait for an answer of the
//! front. A front that does not read is ended, and so replaced. The manager of the service is told that all is
//! well only while the front reads. Workers are not watched: one reads nothing while it has a run.

use std::time::{Duration, Instant};

use stockade_protocol::service::FromSupervisor;
use stockade_sys::socket::socket_memory;

use super::{notify, send, supervisor::Process};

/// Between two looks.
const INTERVAL: Duration = Duration::from_secs(5);

/// When the front is looked at next, and what was seen.
pub(super) struct FrontWatch {
    interval: Duration,
    next: Instant,
    /// At the last look it had not read all, and was not seen to have since.
    is_behind: bool,
}

/// How a front was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FrontState {
    /// It reads, or has time to.
    Reads,
    /// It has read nothing from one look to the next.
    Stuck,
}

impl FrontWatch {
    pub(super) fn new() -> Self {
        // A front that stands still is found at the second look, and its successor is well at the third.
        let interval = notify::patience().map_or(INTERVAL, |patience| INTERVAL.min(patience / 6));
        FrontWatch { interval, next: Instant::now() + interval, is_behind: false }
    }

    /// When to call [`FrontWatch::look`] at the latest.
    pub(super) fn next(&self) -> Instant {
        self.next
    }

    /// Looks, if it is time to.
    pub(super) fn look(&mut self, front: Option<&Process>) -> FrontState {
        if Instant::now() < self.next {
            return FrontState::Reads;
        }
        // From now: a service that was frozen for a while finds a front that was frozen, too.
        self.next = Instant::now() + self.interval;
        let Some(front) = front else { return FrontState::Reads };
        if has_read_all(front) {
            self.is_behind = false;
            notify::alive();
            // One that has just ended is replaced.
            let _ended = send(front.socket(), &FromSupervisor::Ping);
            return FrontState::Reads;
        }
        if std::mem::replace(&mut self.is_behind, true) { FrontState::Stuck } else { FrontState::Reads }
    }

    /// Notes whether the front has read all, before more is sent: one that is sent something at each look
    /// is no front that reads nothing.
    pub(super) fn note(&mut self, front: Option<&Process>) {
        self.is_behind &= !front.is_some_and(has_read_all);
    }

    /// Another front has begun.
    pub(super) fn begin(&mut self) {
        self.is_behind = false;
    }
}

/// Whether a process has read all that was sent to it.
pub(super) fn has_read_all(process: &Process) -> bool {
    // What the kernel does not tell is no reason to end a process.
    socket_memory(process.socket()).unwrap_or(0) == 0
}
