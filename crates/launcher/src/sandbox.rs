//! The sandbox's first process, as the launcher holds it.
//!
//! Speaks to it until it has become the executor, kills it, reaps it. Whatever becomes of
//! a run, dropping this leaves no process behind.

use std::{mem::MaybeUninit, sync::Arc};

use rustix::{
    fd::{AsFd, BorrowedFd, OwnedFd},
    io::Errno,
    net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg},
    process::{Signal, pidfd_send_signal},
};
use stockade_sys::clone::Child;

use crate::{
    LaunchError, What,
    child::Shared,
    prepared::{ForExecutor, MOST_SENT, Prepared, PreparedFoundation},
};

/// Pid 1 and everything below it; killed and reaped when dropped, at the latest.
pub(crate) struct Sandbox {
    pub(crate) child: Child,
    reaped: bool,
    /// What the child uses of our memory, until it has become the executor: kept until it
    /// is known to have, and dropped after the above at the latest.
    lent: Option<(Arc<Shared>, Vec<u8>)>,
}

impl Sandbox {
    pub(crate) fn new(child: Child, shared: Arc<Shared>, stack: Vec<u8>) -> Self {
        Sandbox { child, reaped: false, lent: Some((shared, stack)) }
    }

    /// One to which nothing was lent.
    pub(crate) fn alone(child: Child) -> Self {
        Sandbox { child, reaped: false, lent: None }
    }

    /// The executor has spoken: what its predecessor used is free.
    pub(crate) fn take_back(&mut self) {
        self.lent = None;
    }

    /// Whether everything inside is known to have ended.
    pub(crate) fn is_over(&self) -> bool {
        self.reaped
    }

    pub(crate) fn pid(&self) -> i32 {
        self.child.pid
    }

    pub(crate) fn kill(&self) {
        // It may have ended by itself.
        let _ended = pidfd_send_signal(&self.child.pidfd, Signal::KILL);
    }

    /// Waits for pid 1's end, by which everything inside has ended. Returns the CPU time
    /// of all, user and kernel, in microseconds.
    pub(crate) fn reap(&mut self) -> Option<(u64, u64)> {
        self.reaped = true;
        let ended = stockade_sys::process::wait_child(&self.child.pidfd);
        ended.ok().map(|ended| (ended.user_us, ended.system_us))
    }

    /// Kills what is left, and waits until nothing is.
    pub(crate) fn end(&mut self) {
        if !self.reaped {
            self.kill();
            self.reap();
        }
    }

    /// Tells the waiting child that it has its ids, and to lay the foundation of its root. The
    /// lifeline goes with it; the rest it reads from our memory.
    ///
    /// # Errors
    /// It has ended meanwhile: its own word is in the status pipe.
    pub(crate) fn let_lay(&self, foundation: PreparedFoundation, lifeline: &OwnedFd, handover: &OwnedFd) -> Result<(), LaunchError> {
        if let Some((shared, _)) = &self.lent {
            // Once in a sandbox's life, as below.
            let _first = shared.foundation.set(foundation);
        }
        send_word(handover, std::iter::once(lifeline.as_fd()))
    }

    /// Tells it to build the rest, with these trees of the host.
    ///
    /// # Errors
    /// As above.
    pub(crate) fn let_build(&self, prepared: Prepared, trees: &[OwnedFd], handover: &OwnedFd) -> Result<(), LaunchError> {
        if let Some((shared, _)) = &self.lent {
            let _first = shared.prepared.set(prepared);
        }
        send_word(handover, trees.iter().map(AsFd::as_fd))
    }

    /// Tells it to mount scratch and to pivot. Behind what is the executor's comes the copy of
    /// the scratch, if there is one.
    ///
    /// # Errors
    /// As above.
    pub(crate) fn let_pivot(&self, sent: &ForExecutor, scratch: Option<&OwnedFd>, handover: &OwnedFd) -> Result<(), LaunchError> {
        send_word(handover, sent.in_order().chain(scratch.map(AsFd::as_fd)))
    }

    /// Tells it to enter its cgroup, by v1's files of it, and to go through to the end.
    ///
    /// # Errors
    /// As above.
    pub(crate) fn let_enter<'f>(&self, tasks: impl Iterator<Item = BorrowedFd<'f>>, handover: &OwnedFd) -> Result<(), LaunchError> {
        send_word(handover, tasks)
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        self.end();
    }
}

/// Sends one byte, with descriptors.
fn send_word<'f>(handover: &OwnedFd, fds: impl Iterator<Item = BorrowedFd<'f>>) -> Result<(), LaunchError> {
    let failed = |errno| LaunchError::system(What::Prepare, "let the sandbox go on", errno);
    let fds: Vec<_> = fds.collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_SENT))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(failed(Errno::NOBUFS));
    }
    sendmsg(handover, &[std::io::IoSlice::new(b"g")], &mut ancillary, SendFlags::NOSIGNAL).map(drop).map_err(failed)
}
