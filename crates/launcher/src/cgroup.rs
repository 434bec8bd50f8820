//! One run's cgroup, on v1 or v2.
//!
//! Every limit is read back after it was written: cgroup files accept values that they
//! round, and libraries ignore files that are not there. A limit that the plan calls optional
//! may be missing; the receipt has the limits as read back, without it. The launcher never
//! enters the cgroup of a run. Which limits there are is the plan's decision.

mod v1;
mod v2;

use std::path::Path;

use rustix::{
    event::epoll,
    fd::{AsFd, BorrowedFd, OwnedFd},
    fs::{Mode, OFlags, openat},
    io::Errno,
};
use stockade_policy::plan::{CgroupPlan, CgroupSetting, Plan};

use crate::{LaunchError, error::CgroupError, registry::Record};

/// CPU time of all processes of a cgroup, also of those that have ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CpuTime {
    /// Exact, where its parts may be sampled by the clock's tick (v1).
    pub(crate) total_us: u64,
    pub(crate) user_us: u64,
    pub(crate) system_us: u64,
}

impl CpuTime {
    /// What was used after an earlier reading.
    pub(crate) fn since(self, earlier: CpuTime) -> CpuTime {
        CpuTime {
            total_us: self.total_us.saturating_sub(earlier.total_us),
            user_us: self.user_us.saturating_sub(earlier.user_us),
            system_us: self.system_us.saturating_sub(earlier.system_us),
        }
    }
}

/// What the kernel counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counters {
    pub(crate) memory_peak: Option<u64>,
    pub(crate) processes_peak: Option<u64>,
    pub(crate) cpu: Option<CpuTime>,
    /// Processes that the oom killer ended.
    pub(crate) oom_kills: u64,
    /// Forks that the process limit refused.
    pub(crate) forks_refused: u64,
}

/// A run's cgroup; removed when dropped, at the latest.
pub(crate) enum Cgroup {
    V1(v1::V1),
    V2(v2::V2),
    Absent,
}

/// A cgroup that stands before the clone and has no limits yet: on v2 the child starts
/// in it. On v1 it joins later, so there is none; its directories are made beside the
/// child's work, since making them costs as much as a network namespace.
pub(crate) struct EmptyCgroup(v2::V2);

impl EmptyCgroup {
    /// The directory that clone3 starts the child in.
    pub(crate) fn directory(&self) -> BorrowedFd<'_> {
        self.0.directory()
    }
}

/// Makes what must stand before the clone; `vacate`: the launcher is alone in the cgroup
/// `parent` and must leave for a child of it first. The record learns each directory before it is
/// made, so that a later start can sweep it.
///
/// # Errors
/// A directory cannot be made.
pub(crate) fn make_empty(parent: &Path, vacate: bool, record: Option<&mut Record>) -> Result<EmptyCgroup, LaunchError> {
    v2::V2::make(parent, vacate, record).map(EmptyCgroup)
}

/// Moves this process, the only one of the cgroup `parent`, into a child of it, and hands the
/// controllers of limits down: for a process that starts launchers, which are then born in the child and
/// make the cgroups of their runs beside it.
///
/// # Errors
/// The cgroup is not this process's to divide.
pub fn leave_for_child(parent: &Path) -> Result<(), LaunchError> {
    v2::leave(parent)
}

/// Makes what is not made yet, and sets the plan's limits.
///
/// # Errors
/// A directory cannot be made, or a limit is not kept.
pub(crate) fn complete(plan: &Plan, empty_cgroup: Option<EmptyCgroup>, record: Option<&mut Record>) -> Result<Cgroup, LaunchError> {
    match (&plan.cgroup, empty_cgroup) {
        (CgroupPlan::V1 { parents, settings }, None) => v1::V1::make(parents, settings, record).map(Cgroup::V1),
        (CgroupPlan::V2 { settings, .. }, Some(EmptyCgroup(mut v2))) => v2.limit(settings).map(|()| Cgroup::V2(v2)),
        (CgroupPlan::Absent { .. }, None) => Ok(Cgroup::Absent),
        _ => Err(CgroupError::OtherVersion.into()),
    }
}

impl Cgroup {
    /// v1: the files through which the child joins, opened by us, since the kernel asks who
    /// opened them.
    ///
    /// # Errors
    /// One cannot be opened.
    pub(crate) fn tasks(&self) -> Result<Vec<OwnedFd>, LaunchError> {
        match self {
            Cgroup::V1(v1) => v1.tasks(),
            Cgroup::V2(_) | Cgroup::Absent => Ok(Vec::new()),
        }
    }

    /// Adds the source that becomes ready when the oom killer has struck.
    pub(crate) fn watch_oom(&mut self, epoll: &OwnedFd, data: epoll::EventData) -> Result<(), Errno> {
        match self {
            Cgroup::V1(v1) => epoll::add(epoll, v1.oom_event(), data, epoll::EventFlags::IN),
            Cgroup::V2(v2) => epoll::add(epoll, v2.oom_event(), data, epoll::EventFlags::PRI | epoll::EventFlags::ET),
            Cgroup::Absent => Ok(()),
        }
    }

    /// Clears that source.
    pub(crate) fn acknowledge_oom(&self) {
        if let Cgroup::V1(v1) = self {
            v1.acknowledge_oom();
        }
    }

    /// Whether the oom killer has ended a process of this cgroup.
    pub(crate) fn oom_kills(&self) -> u64 {
        match self {
            Cgroup::V1(v1) => v1.oom_kills(),
            Cgroup::V2(v2) => v2.oom_kills(),
            Cgroup::Absent => 0,
        }
    }

    /// CPU time used so far.
    pub(crate) fn cpu(&self) -> Option<CpuTime> {
        match self {
            Cgroup::V1(v1) => v1.cpu(),
            Cgroup::V2(v2) => v2.cpu(),
            Cgroup::Absent => None,
        }
    }

    /// Whether nothing is charged for what the kernel keeps for code.
    pub(crate) fn is_absent(&self) -> bool {
        matches!(self, Cgroup::Absent)
    }

    /// What it charges for the data of TCP and UDP sockets; None where it charges none.
    pub(crate) fn socket_memory(&self) -> Option<u64> {
        match self {
            Cgroup::V1(v1) => v1.socket_memory(),
            Cgroup::V2(v2) => v2.socket_memory(),
            Cgroup::Absent => None,
        }
    }

    /// Kills every process in it; v1 has no such thing, there the death of pid 1 does it.
    pub(crate) fn kill(&self) {
        if let Cgroup::V2(v2) = self {
            v2.kill();
        }
    }

    /// Takes the CPU quota from processes that were killed: they end by their own work, which under
    /// a small quota would last longer than the wall clock.
    pub(crate) fn lift_cpu_quota(&self) {
        let (directory, file, none) = match self {
            Cgroup::V1(v1) => (v1.directory("cpu"), "cpu.cfs_quota_us", "-1"),
            Cgroup::V2(v2) => (Some(v2.directory()), "cpu.max", "max"),
            Cgroup::Absent => return,
        };
        // Where there is no such file there is no quota.
        if let Some(file) = directory.and_then(|directory| open_in(directory, file, OFlags::WRONLY).ok()) {
            let _ends_slowly = rustix::io::write(&file, none.as_bytes());
        }
    }

    /// Whether a process's `/proc/PID/cgroup` says that it is in this cgroup.
    pub(crate) fn holds(&self, membership: &str) -> bool {
        match self {
            Cgroup::V1(v1) => v1.holds(membership),
            Cgroup::V2(v2) => v2.holds(membership),
            Cgroup::Absent => true,
        }
    }

    /// The limits as read back, for the receipt.
    pub(crate) fn describe(&self) -> String {
        match self {
            Cgroup::V1(v1) => v1.describe(),
            Cgroup::V2(v2) => v2.describe(),
            Cgroup::Absent => String::new(),
        }
    }

    /// Removes it; false if something is left, to be swept by the next start.
    pub(crate) fn remove(&mut self) -> bool {
        match self {
            Cgroup::V1(v1) => v1.remove(),
            Cgroup::V2(v2) => v2.remove(),
            Cgroup::Absent => true,
        }
    }

    /// Reads all counters.
    pub(crate) fn counters(&self) -> Counters {
        match self {
            Cgroup::V1(v1) => v1.counters(),
            Cgroup::V2(v2) => v2.counters(),
            Cgroup::Absent => Counters::default(),
        }
    }
}

/// Opens a file of a cgroup directory.
fn open_in(directory: impl AsFd, file: &str, flags: OFlags) -> Result<OwnedFd, Errno> {
    openat(directory, file, flags | OFlags::CLOEXEC, Mode::empty())
}

/// Reads a file of a cgroup directory whole.
fn read_in(directory: impl AsFd, file: &str) -> Option<String> {
    crate::proc::read_to_string(open_in(directory, file, OFlags::RDONLY).ok()?).ok()
}

fn number_in(directory: impl AsFd, file: &str) -> Option<u64> {
    read_in(directory, file)?.trim().parse().ok()
}

/// The value of `key` in a file of `key value` lines.
fn keyed(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')?.trim().parse().ok())
}

/// Writes each limit and reads it back. Returns `file=value`, as read back, of those that the
/// kernel kept.
///
/// # Errors
/// A limit is not there and not optional, or the kernel did not keep it.
fn apply<'d>(
    settings: &[CgroupSetting],
    directory_of: impl Fn(&CgroupSetting) -> Result<BorrowedFd<'d>, CgroupError>,
) -> Result<String, CgroupError> {
    let mut kept = Vec::new();
    for setting in settings {
        if let Some(value) = apply_setting(directory_of(setting)?, setting)? {
            kept.push(format!("{}={value}", setting.file));
        }
    }
    Ok(kept.join(" "))
}

/// Writes a limit and returns what the kernel then has; None if an optional one is not there.
fn apply_setting(directory: BorrowedFd<'_>, setting: &CgroupSetting) -> Result<Option<String>, CgroupError> {
    let CgroupSetting { file, value, optional, .. } = setting;
    let failed = |errno| CgroupError::Limit { file, value: value.clone(), errno };
    let handle = match open_in(directory, file, OFlags::RDWR) {
        Err(Errno::NOENT) if *optional => return Ok(None),
        other => other.map_err(failed)?,
    };
    rustix::io::write(&handle, value.as_bytes()).map_err(failed)?;
    let mut kept = [0; 64];
    let length = rustix::io::pread(&handle, &mut kept, 0).map_err(failed)?;
    let kept = String::from_utf8_lossy(kept.get(..length).unwrap_or_default()).trim().to_owned();
    if kept == *value {
        return Ok(Some(kept));
    }
    Err(CgroupError::NotKept { file, value: value.clone(), kept })
}

/// A name that no other run has.
fn unique_name() -> String {
    use std::time::{SystemTime, UNIX_EPOCH};
    let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
    format!("stockade-{}-{nanos:x}", std::process::id())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::*;

    #[test]
    fn the_receipt_has_the_limits_as_read_back() {
        let directory = std::env::temp_dir().join(format!("cgroup-limits-{}", std::process::id()));
        std::fs::create_dir(&directory).unwrap();
        // A file of a file system, unlike one of a cgroup, keeps what is longer than the new value.
        std::fs::write(directory.join("pids.max"), "max").unwrap();
        let opened = openat(rustix::fs::CWD, &directory, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap();
        let setting = |file, value: &str, optional| CgroupSetting { controller: None, file, value: value.to_owned(), optional };
        let limits = |settings: &[CgroupSetting]| apply(settings, |_| Ok(opened.as_fd()));
        let absent = setting("memory.swap.max", "0", true);
        assert_eq!(limits(&[setting("pids.max", "641", false), absent.clone()]).unwrap(), "pids.max=641");
        assert!(matches!(limits(&[setting("pids.max", "64", true)]), Err(CgroupError::NotKept { .. })));
        assert!(matches!(limits(&[CgroupSetting { optional: false, ..absent }]), Err(CgroupError::Limit { .. })));
        std::fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn cpu_time_since_a_reading_leaves_out_what_was_used_before_it() {
        let time = |total_us, user_us, system_us| CpuTime { total_us, user_us, system_us };
        assert_eq!(time(900, 500, 400).since(time(300, 100, 200)), time(600, 400, 200));
        // The kernel divides anew into user and system at each reading.
        assert_eq!(time(310, 90, 220).since(time(300, 100, 200)), time(10, 0, 20));
        assert_eq!(time(7, 5, 2).since(CpuTime::default()), time(7, 5, 2));
    }
}
