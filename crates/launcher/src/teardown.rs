//! What a run still has on the host: its processes, its cgroup, its place in the registry.
//!
//! Dropping it ends and removes all of that, and waits until it is done. Once the outcome is
//! known no process of the code is alive in it, but pid 1 may take a while to end: a caller with
//! other work does that first. What a killed launcher leaves, the next start sweeps,
//! but for mount points in a directory of the host (`scratch/mount_points.rs`).

use std::fs::File;

use crate::{cgroup::Cgroup, registry::Record, sandbox::Sandbox, scratch::MountPoint, signals::Signals};

/// What is removed when it is dropped.
pub struct Teardown {
    pub(crate) sandbox: Sandbox,
    pub(crate) cgroup: Cgroup,
    /// Locks of what the sandbox shows, free once nothing of it runs.
    pub(crate) _held: Vec<File>,
    /// What was made on the host to mount on, removed once nothing of it runs.
    pub(crate) _mount_points: Vec<MountPoint>,
    pub(crate) record: Option<Record>,
    /// Whether the program's file is out of the scratch.
    pub(crate) program_gone: bool,
    // Last: a signal that was held back may end this process.
    pub(crate) signals: Signals,
}

impl Teardown {
    /// The run's place in the registry.
    pub fn record(&mut self) -> Option<&mut Record> {
        self.record.as_mut()
    }

    /// Kills everything inside, and does not wait for its end.
    pub(crate) fn kill(&self) {
        self.cgroup.kill();
        self.sandbox.kill();
        self.cgroup.lift_cpu_quota();
    }
}

impl Drop for Teardown {
    fn drop(&mut self) {
        self.sandbox.end();
        if let (true, true, Some(record)) = (self.cgroup.remove(), self.program_gone, &mut self.record) {
            record.settle();
        }
    }
}
