//! The host process at which attacks on the launcher are aimed, by its pid.
//!
//! An answer about a pid proves nothing where a process inside can have the same pid. In a
//! container with few processes the launcher itself has such a small pid; then the target is
//! a child of it, with the same namespaces and user and a larger pid.

use std::process::Child;

use crate::{error::ProveError, outside::Outside};

/// Processes inside can have pids below this: every sandbox of a proof begins at 1 and holds
/// a few dozen scripts with a few children each.
pub(crate) const FEW: u32 = 1000;

/// The target; dropping this ends a child that was made for it.
pub(crate) struct Target {
    child: Option<Child>,
}

impl Target {
    /// Finds or makes it: the kernel gives pids out in order, so after as many children as
    /// there are small pids one has a larger pid.
    pub(crate) fn new(outside: &Outside) -> Result<Self, ProveError> {
        let mut target = Target { child: None };
        for _ in 0..FEW {
            if target.pid() >= FEW {
                break;
            }
            let child = outside.start().map_err(ProveError::Target)?;
            drop(std::mem::replace(&mut target, Target { child: Some(child) }));
        }
        Ok(target)
    }

    /// Its pid on the host.
    pub(crate) fn pid(&self) -> u32 {
        self.child.as_ref().map_or_else(std::process::id, Child::id)
    }

    /// Its description.
    pub(crate) fn words(&self) -> &'static str {
        if self.child.is_some() { "a child of the launcher" } else { "the launcher" }
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _gone = child.kill();
            let _reaped = child.wait();
        }
    }
}
