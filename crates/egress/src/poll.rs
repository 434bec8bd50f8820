//! One epoll instance, and the word "when" for the gate's loop.
//!
//! Connections are watched edge-triggered, for everything: who is told of an event works
//! until the kernel says EAGAIN. A closed descriptor leaves by itself.

use std::time::Duration;

use rustix::{
    event::{
        Timespec,
        epoll::{self, CreateFlags, Event, EventData, EventFlags},
    },
    fd::{AsFd, BorrowedFd, OwnedFd},
    io::Errno,
};

/// Something happened on what was watched under `token`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Happened {
    pub(crate) token: u64,
    pub(crate) flags: EventFlags,
}

/// See the module.
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

    /// Watches a descriptor for the rest of its life. What it is ready for already is told
    /// too; of one that is watched before, anew.
    pub(crate) fn watch(&self, fd: impl AsFd, token: u64) -> Result<(), Errno> {
        let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        let data = EventData::new_u64(token);
        match epoll::add(&self.epoll, &fd, data, flags) {
            Err(Errno::EXIST) => epoll::modify(&self.epoll, &fd, data, flags),
            other => other,
        }
    }

    /// Watches for input only, and is told again as long as there is some.
    pub(crate) fn watch_input(&self, fd: impl AsFd, token: u64) -> Result<(), Errno> {
        epoll::add(&self.epoll, fd, EventData::new_u64(token), EventFlags::IN)
    }

    /// Waits. `most` none: for as long as it takes.
    pub(crate) fn wait(&self, into: &mut Vec<Happened>, most: Option<Duration>) -> Result<(), Errno> {
        let mut events = [Event { flags: EventFlags::empty(), data: EventData::new_u64(0) }; 64];
        let most = most
            .map(|most| Timespec { tv_sec: i64::try_from(most.as_secs()).unwrap_or(i64::MAX), tv_nsec: i64::from(most.subsec_nanos()) });
        into.clear();
        match epoll::wait(&self.epoll, &mut events[..], most.as_ref()) {
            Ok(count) => {
                into.extend(events.iter().take(count).map(|event| Happened { token: event.data.u64(), flags: event.flags }));
                Ok(())
            }
            Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(errno),
        }
    }
}
