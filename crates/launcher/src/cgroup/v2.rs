//! cgroup v2: one directory below the launcher's own.
//!
//! The hierarchy's rule of no internal processes means that a launcher which is alone
//! in its cgroup must first leave for a child of it ("vacate"), before controllers can
//! be handed down. The run itself starts inside by CLONE_INTO_CGROUP.

use std::path::{Path, PathBuf};

use rustix::{
    fd::{AsFd, BorrowedFd, OwnedFd},
    fs::{CWD, Mode, OFlags, mkdir, openat},
    io::Errno,
};
use stockade_policy::plan::CgroupSetting;

use super::{Counters, CpuTime, apply, keyed, number_in, open_in, read_in, unique_name, v1::without_executor};
use crate::{ErrorKind, LaunchError, error::CgroupError, registry::Record};

/// The directory of one run.
pub(crate) struct V2 {
    name: String,
    path: PathBuf,
    directory: OwnedFd,
    events: OwnedFd,
    /// As read back.
    limits: String,
}

const NEEDED: [&str; 3] = ["cpu", "memory", "pids"];

impl V2 {
    /// Makes the directory, without limits.
    pub(super) fn make(parent: &Path, vacate: bool, record: Option<&mut Record>) -> Result<Self, LaunchError> {
        if vacate {
            leave(parent)?;
        } else {
            hand_down_controllers(&open_directory(parent)?, parent)?;
        }
        let name = unique_name();
        let path = parent.join(&name);
        if let Some(record) = record {
            record.note_cgroups([path.clone()])?;
        }
        mkdir(&path, Mode::from_raw_mode(0o755)).map_err(LaunchError::path(ErrorKind::Cgroup, "make cgroup", &path))?;
        let open = |path: &Path| openat(CWD, path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
        let opened = open(&path).and_then(|directory| Ok((open_in(&directory, "memory.events", OFlags::RDONLY)?, directory)));
        let made = opened.map(|(events, directory)| V2 { name, path: path.clone(), directory, events, limits: String::new() });
        made.map_err(|errno| {
            // Nothing else knows of it yet; the record does, should this fail too.
            let _swept_later = rustix::fs::rmdir(&path);
            LaunchError::path(ErrorKind::Cgroup, "open cgroup", &path)(errno)
        })
    }

    /// Sets the limits.
    pub(super) fn limit(&mut self, settings: &[CgroupSetting]) -> Result<(), LaunchError> {
        self.limits = apply(settings, |_| Ok(self.directory()))?;
        Ok(())
    }

    pub(super) fn directory(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }

    pub(super) fn oom_event(&self) -> BorrowedFd<'_> {
        self.events.as_fd()
    }

    pub(super) fn oom_kills(&self) -> u64 {
        let mut text = [0; 512];
        let length = rustix::io::pread(&self.events, &mut text, 0).unwrap_or(0);
        keyed(&String::from_utf8_lossy(text.get(..length).unwrap_or_default()), "oom_kill").unwrap_or(0)
    }

    pub(super) fn cpu(&self) -> Option<CpuTime> {
        let text = read_in(&self.directory, "cpu.stat")?;
        let us = |key| keyed(&text, key);
        Some(CpuTime { total_us: us("usage_usec")?, user_us: us("user_usec")?, system_us: us("system_usec")? })
    }

    /// With what may be charged and not added up yet: the kernel adds up when 64 pages for each CPU
    /// have changed (Linux 6.8), or after two seconds.
    pub(super) fn socket_memory(&self) -> Option<u64> {
        const NOT_ADDED_UP: u64 = 64 * 4096;
        let last = std::fs::read_to_string("/sys/devices/system/cpu/online").ok()?.trim().rsplit(['-', ',']).next()?.parse::<u64>().ok()?;
        Some(keyed(&read_in(&self.directory, "memory.stat")?, "sock")? + (last + 1) * NOT_ADDED_UP)
    }

    pub(super) fn kill(&self) {
        // Linux 5.14; before that the death of pid 1 does the same a little later.
        if let Ok(file) = open_in(&self.directory, "cgroup.kill", OFlags::WRONLY) {
            let _pid_one_dies_anyway = rustix::io::write(&file, b"1");
        }
    }

    pub(super) fn holds(&self, membership: &str) -> bool {
        let end = format!("/{}", self.name);
        membership.lines().any(|line| line.strip_prefix("0::").is_some_and(|path| path.ends_with(&end)))
    }

    pub(super) fn describe(&self) -> String {
        format!("v2 {}: {}", self.name, self.limits)
    }

    pub(super) fn counters(&self) -> Counters {
        Counters {
            // Linux 5.19 and 6.1.
            memory_peak: number_in(&self.directory, "memory.peak"),
            processes_peak: number_in(&self.directory, "pids.peak").map(without_executor),
            cpu: self.cpu(),
            oom_kills: self.oom_kills(),
            forks_refused: read_in(&self.directory, "pids.events").and_then(|text| keyed(&text, "max")).unwrap_or(0),
        }
    }
}

fn open_directory(path: &Path) -> Result<OwnedFd, LaunchError> {
    let opened = openat(CWD, path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
    opened.map_err(LaunchError::path(ErrorKind::Cgroup, "open cgroup", path))
}

/// Leaves `parent` for a child of it, and hands its controllers down.
pub(super) fn leave(parent: &Path) -> Result<(), LaunchError> {
    let above = open_directory(parent)?;
    leave_for_child(&above, parent)?;
    hand_down_controllers(&above, parent)
}

/// Moves the launcher, the only process of its cgroup, into a child of it.
fn leave_for_child(above: &OwnedFd, parent: &Path) -> Result<(), LaunchError> {
    const LEAF: &str = "stockade-launcher";
    let failed = LaunchError::path(ErrorKind::Cgroup, "leave for its child stockade-launcher cgroup", parent);
    match rustix::fs::mkdirat(above, LEAF, Mode::from_raw_mode(0o755)) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(errno) => return Err(failed(errno)),
    }
    let procs = open_in(above, &format!("{LEAF}/cgroup.procs"), OFlags::WRONLY).map_err(&failed)?;
    rustix::io::write(&procs, b"0").map(drop).map_err(failed)
}

/// Sees to it that children have the controllers that limits need.
fn hand_down_controllers(above: &OwnedFd, parent: &Path) -> Result<(), LaunchError> {
    let enabled = read_in(above, "cgroup.subtree_control").unwrap_or_default();
    let missing: Vec<String> = NEEDED
        .iter()
        .filter(|needed| !enabled.split_ascii_whitespace().any(|on| on == **needed))
        .map(|needed| format!("+{needed}"))
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    let controllers = missing.join(" ");
    let failed = |errno| CgroupError::HandDown { controllers: controllers.clone(), path: parent.to_path_buf(), errno };
    let control = open_in(above, "cgroup.subtree_control", OFlags::WRONLY).map_err(failed)?;
    Ok(rustix::io::write(&control, controllers.as_bytes()).map(drop).map_err(failed)?)
}

impl V2 {
    /// Removes the directory; false if it is left, to be swept by the next start.
    pub(super) fn remove(&mut self) -> bool {
        // The last process may still be leaving: a few milliseconds at most.
        for _ in 0..200 {
            match rustix::fs::rmdir(&self.path) {
                Ok(()) | Err(Errno::NOENT) => return true,
                Err(Errno::BUSY) => std::thread::sleep(std::time::Duration::from_millis(1)),
                Err(_) => return false,
            }
        }
        false
    }
}

impl Drop for V2 {
    fn drop(&mut self) {
        self.remove();
    }
}
