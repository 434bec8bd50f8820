//! What still stands on the host of a run whose outcome is known.
//!
//! Nothing of the code is alive in it. Pid 1 takes a while to end, as the kernel takes down
//! what it was in; whoever has something else to do meanwhile does that first. Dropping this
//! ends and removes all of it, and waits until that is done; a launcher that is killed before
//! leaves what the next start sweeps.

use crate::{cgroup::Cgroup, registry::Record, sandbox::Sandbox, signals::Signals};

/// See the module.
pub struct Remains {
    pub(crate) sandbox: Sandbox,
    pub(crate) cgroup: Cgroup,
    pub(crate) record: Option<Record>,
    /// Whether the program's file is out of the scratch.
    pub(crate) program_gone: bool,
    // Last: a signal that was held back may end this process.
    pub(crate) _signals: Signals,
}

impl Drop for Remains {
    fn drop(&mut self) {
        self.sandbox.end();
        if let (true, true, Some(record)) = (self.cgroup.remove(), self.program_gone, &mut self.record) {
            record.settle();
        }
    }
}
