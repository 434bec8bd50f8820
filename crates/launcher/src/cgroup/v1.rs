//! cgroup v1: one directory in each of the memory, pids and cpu hierarchies, and in
//! cpuacct where it is mounted.
//!
//! Directories are removed by cgroups-rs, which waits for a last process that is leaving.
//! They are made here, and limits written and read back, because the crate reports no errno
//! and does not read back. The child joins by writing `0` into
//! each `tasks`: joining by `cgroup.procs`, or moving another process, can wait for an
//! RCU grace period of more than ten milliseconds.

use std::{collections::BTreeMap, path::PathBuf};

use cgroups_rs::{Controller, cpu::CpuController, cpuacct::CpuAcctController, memory::MemController, pid::PidController};
use rustix::{
    event::{EventfdFlags, eventfd},
    fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    fs::{CWD, Mode, OFlags, mkdir, openat, rmdir},
    io::Errno,
};
use stockade_policy::plan::CgroupSetting;

use super::{Counters, CpuTime, apply, keyed, number_in, open_in, read_in, unique_name};
use crate::{ErrorKind, LaunchError, error::CgroupError, registry::Record};

struct Hierarchy {
    controller: Box<dyn Controller>,
    path: PathBuf,
    directory: OwnedFd,
}

/// The directories of one run.
pub(crate) struct V1 {
    name: String,
    hierarchies: BTreeMap<String, Hierarchy>,
    oom_event: OwnedFd,
    /// As read back.
    limits: String,
}

impl V1 {
    /// Makes the directories and sets the limits.
    pub(super) fn make(
        parents: &BTreeMap<String, PathBuf>,
        settings: &[CgroupSetting],
        record: Option<&mut Record>,
    ) -> Result<V1, LaunchError> {
        let name = unique_name();
        if let Some(record) = record {
            record.note_cgroups(parents.values().map(|parent| parent.join(&name)))?;
        }
        let oom_event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(LaunchError::system(ErrorKind::Cgroup, "make an eventfd"))?;
        let mut made = V1 { name: name.clone(), hierarchies: BTreeMap::new(), oom_event, limits: String::new() };
        for (kind, parent) in parents {
            let path = parent.join(&name);
            let controller = controller(kind, path.clone());
            // systemd mounts cpu and cpuacct as one hierarchy, where one directory is both.
            if !made.hierarchies.values().any(|other| other.path == path) {
                // Not by the controller, which keeps the errno to itself.
                mkdir(&path, Mode::from_raw_mode(0o755)).map_err(|errno| CgroupError::Make { path: path.clone(), errno })?;
            }
            let directory = openat(CWD, &path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
                .map_err(LaunchError::path(ErrorKind::Cgroup, "open cgroup", &path))?;
            made.hierarchies.insert(kind.clone(), Hierarchy { controller, path, directory });
        }
        made.limits = apply(settings, |setting| {
            let controller = setting.controller.unwrap_or_default();
            made.directory(controller).ok_or(CgroupError::NoController { file: setting.file, controller })
        })?;
        made.register_oom_event()?;
        Ok(made)
    }

    /// Opens the files through which the child joins.
    pub(super) fn tasks(&self) -> Result<Vec<OwnedFd>, LaunchError> {
        let failed = LaunchError::system(ErrorKind::Cgroup, "open the cgroup's tasks");
        self.hierarchies.values().map(|hierarchy| open_in(&hierarchy.directory, "tasks", OFlags::WRONLY).map_err(failed)).collect()
    }

    /// Asks for an event when the oom killer strikes (cgroup-v1/memory.rst, section 10).
    fn register_oom_event(&self) -> Result<(), LaunchError> {
        let Some(memory) = self.hierarchies.get("memory") else { return Ok(()) };
        let failed = LaunchError::system(ErrorKind::Cgroup, "watch the cgroup for an oom kill");
        let control = open_in(&memory.directory, "memory.oom_control", OFlags::RDONLY).map_err(failed)?;
        let register = open_in(&memory.directory, "cgroup.event_control", OFlags::WRONLY).map_err(failed)?;
        let line = format!("{} {}", self.oom_event.as_raw_fd(), control.as_raw_fd());
        rustix::io::write(&register, line.as_bytes()).map(drop).map_err(failed)
    }

    pub(super) fn directory(&self, kind: &str) -> Option<BorrowedFd<'_>> {
        self.hierarchies.get(kind).map(|hierarchy| hierarchy.directory.as_fd())
    }

    /// Clears the event, so that it can become ready again.
    pub(super) fn acknowledge_oom(&self) {
        let mut count = [0; 8];
        // EAGAIN: cleared already.
        let _cleared = rustix::io::read(&self.oom_event, &mut count);
    }

    pub(super) fn oom_event(&self) -> BorrowedFd<'_> {
        self.oom_event.as_fd()
    }

    pub(super) fn oom_kills(&self) -> u64 {
        let control = self.directory("memory").and_then(|directory| read_in(directory, "memory.oom_control"));
        control.and_then(|text| keyed(&text, "oom_kill")).unwrap_or(0)
    }

    pub(super) fn cpu(&self) -> Option<CpuTime> {
        let directory = self.directory("cpuacct")?;
        let us = |file| number_in(directory, file).map(|nanos| nanos / 1000);
        Some(CpuTime { total_us: us("cpuacct.usage")?, user_us: us("cpuacct.usage_user")?, system_us: us("cpuacct.usage_sys")? })
    }

    /// None where the kernel has no such limit, and so charges nothing.
    pub(super) fn socket_memory(&self) -> Option<u64> {
        number_in(self.directory("memory")?, "memory.kmem.tcp.usage_in_bytes")
    }

    /// Each hierarchy's line ends in this run's name.
    pub(super) fn holds(&self, membership: &str) -> bool {
        let end = format!("/{}", self.name);
        self.hierarchies.keys().all(|kind| {
            membership.lines().any(|line| {
                let mut fields = line.splitn(3, ':').skip(1);
                let controllers = fields.next().unwrap_or_default();
                controllers.split(',').any(|controller| controller == kind) && fields.next().is_some_and(|path| path.ends_with(&end))
            })
        })
    }

    pub(super) fn describe(&self) -> String {
        format!("v1 {}: {}", self.name, self.limits)
    }

    pub(super) fn counters(&self) -> Counters {
        let memory = self.directory("memory");
        let pids = self.directory("pids");
        Counters {
            memory_peak: memory.and_then(|directory| number_in(directory, "memory.max_usage_in_bytes")),
            processes_peak: pids.and_then(|directory| number_in(directory, "pids.peak")).map(without_executor),
            cpu: self.cpu(),
            oom_kills: self.oom_kills(),
            forks_refused: pids.and_then(|directory| read_in(directory, "pids.events")).and_then(|text| keyed(&text, "max")).unwrap_or(0),
        }
    }
}

/// Pid 1 is the executor, which no user means.
pub(super) fn without_executor(peak: u64) -> u64 {
    peak.saturating_sub(1)
}

fn controller(kind: &str, path: PathBuf) -> Box<dyn Controller> {
    match kind {
        "memory" => Box::new(MemController::new(path, false)),
        "pids" => Box::new(PidController::new(path, false)),
        "cpu" => Box::new(CpuController::new(path, false)),
        _ => Box::new(CpuAcctController::new(path)),
    }
}

impl V1 {
    /// Removes the directories; false if one is left, to be swept by the next start.
    pub(super) fn remove(&mut self) -> bool {
        let mut all = true;
        for (_, hierarchy) in std::mem::take(&mut self.hierarchies) {
            // The crate's own removal waits and retries, as the last process may still be
            // leaving.
            let is_gone = matches!(rmdir(&hierarchy.path), Ok(()) | Err(Errno::NOENT));
            all &= is_gone || hierarchy.controller.delete().is_ok();
        }
        all
    }
}

impl Drop for V1 {
    fn drop(&mut self) {
        self.remove();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use super::*;

    /// A directory of no cgroup has no files, and these controllers need none to be made.
    #[test]
    fn two_controllers_of_one_hierarchy_share_a_directory() {
        let parent = std::env::temp_dir().join(format!("cgroup-v1-{}", std::process::id()));
        std::fs::create_dir(&parent).unwrap();
        let parents = ["cpu", "cpuacct"].map(|kind| (String::from(kind), parent.clone()));
        let mut made = V1::make(&BTreeMap::from(parents), &[], None).unwrap();
        assert!(made.directory("cpu").is_some() && made.directory("cpuacct").is_some());
        assert_eq!(std::fs::read_dir(&parent).unwrap().count(), 1);
        assert!(made.remove());
        std::fs::remove_dir(&parent).unwrap();
    }
}
