//! The epoll instance of the gate's loop.
//!
//! Connections are watched edge-triggered: after an event a caller must read or write until
//! EAGAIN. The kernel removes a closed descriptor by itself. It does not interpret tokens.

use std::time::Duration;

use rustix::{
    event::{
        Timespec,
        epoll::{self, CreateFlags, Event, EventData, EventFlags},
    },
    fd::{AsFd, BorrowedFd, OwnedFd},
    io::{Errno, retry_on_intr},
};

/// An event on the descriptor that is watched under `token`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Readiness {
    pub(crate) token: u64,
    pub(crate) flags: EventFlags,
}

/// An epoll instance.
pub(crate) struct Poll {
    epoll: OwnedFd,
}

impl Poll {
    pub(crate) fn new() -> Result<Self, Errno> {
        Ok(Poll { epoll: epoll::create(CreateFlags::CLOEXEC)? })
    }

    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Watches a descriptor until it is closed. Readiness that exists already is reported too,
    /// also for a descriptor that was watched before.
    pub(crate) fn watch(&self, fd: impl AsFd, token: u64) -> Result<(), Errno> {
        let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        let data = EventData::new_u64(token);
        match epoll::add(&self.epoll, &fd, data, flags) {
            Err(Errno::EXIST) => epoll::modify(&self.epoll, &fd, data, flags),
            other => other,
        }
    }

    /// Watches for input only, level-triggered.
    pub(crate) fn watch_input(&self, fd: impl AsFd, token: u64) -> Result<(), Errno> {
        epoll::add(&self.epoll, fd, EventData::new_u64(token), EventFlags::IN)
    }

    /// Waits at most `most`; none means without a limit. Whether these are all that is ready.
    pub(crate) fn wait(&self, into: &mut Vec<Readiness>, most: Option<Duration>) -> Result<bool, Errno> {
        let mut events = [Event { flags: EventFlags::empty(), data: EventData::new_u64(0) }; 64];
        let most = most
            .map(|most| Timespec { tv_sec: i64::try_from(most.as_secs()).unwrap_or(i64::MAX), tv_nsec: i64::from(most.subsec_nanos()) });
        into.clear();
        // A stopped process that goes on gets EINTR.
        let count = retry_on_intr(|| epoll::wait(&self.epoll, &mut events[..], most.as_ref()))?;
        into.extend(events.iter().take(count).map(|event| Readiness { token: event.data.u64(), flags: event.flags }));
        Ok(count < events.len())
    }
}
