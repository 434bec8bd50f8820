//! The sandbox's first process, as the launcher holds it.
//!
//! Lends it memory until it has become the executor, kills it, reaps it. Whatever becomes of
//! a run, dropping this leaves no process behind.

use std::sync::Arc;

use rustix::process::{Signal, pidfd_send_signal};
use stockade_sys::clone::Child;

use crate::{child_data::ChildData, sequence::Shared};

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

    /// Puts the plan where the child reads it, once in a sandbox's life: it is told when.
    pub(crate) fn lend(&self, data: ChildData) {
        if let Some((shared, _)) = &self.lent {
            let _first = shared.data.set(data);
        }
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        self.end();
    }
}
