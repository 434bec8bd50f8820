//! The process of the host that attacks on the launcher are aimed at, by its id.
//!
//! An answer about an id says nothing where somebody inside may have the same one. In a
//! container of few processes the launcher itself has such an id; then a child of it is the
//! target, which shares its namespaces, user and fate, and has a larger one.

use std::{io, process::Child};

use stockade_runtime::Refusal;

use crate::outside::Outside;

/// Ids below it are within reach of processes inside: every sandbox of a proof begins at 1
/// and holds a few dozen scripts, of which none has more than a few children.
const FEW: u32 = 1000;

/// See the module. A child is ended when this is dropped.
pub(crate) struct Target {
    child: Option<Child>,
}

impl Target {
    /// Finds it, or makes it: ids are given out in order, so that after as many children as
    /// there are small ids one has a larger one.
    pub(crate) fn new(outside: &Outside) -> Result<Self, Refusal> {
        let mut target = Target { child: None };
        let failed = |error: io::Error| Refusal::sandbox_error("prover", format!("start a process with an id beyond {FEW}: {error}"));
        for _ in 0..FEW {
            if target.pid() >= FEW {
                break;
            }
            let child = outside.start().map_err(failed)?;
            drop(std::mem::replace(&mut target, Target { child: Some(child) }));
        }
        Ok(target)
    }

    /// Its id on the host.
    pub(crate) fn pid(&self) -> u32 {
        self.child.as_ref().map_or_else(std::process::id, Child::id)
    }

    /// What it is.
    pub(crate) fn words(&self) -> &'static str {
        if self.child.is_some() { "a process beside the launcher" } else { "the launcher" }
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
