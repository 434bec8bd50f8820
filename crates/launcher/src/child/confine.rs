//! The parts of giving up rights: namespace counts, the inner user namespace, limits,
//! Landlock, the filter.
//!
//! In which order they come, and why, stands in `child.rs`; what may be done between clone
//! and exec too.

use std::{cell::Cell, ffi::CStr};

use rustix::{
    fd::{AsFd, OwnedFd},
    fs::{Mode, OFlags, open, openat},
    io::Errno,
    process::{DumpableBehavior, Pid, WaitOptions, set_dumpable_behavior, waitpid},
    thread::{CpuSet, LinkNameSpaceType, move_into_link_name_space},
};
use stockade_protocol::step::Step;
use stockade_sys::{
    clone::{self, flags},
    landlock, process, seccomp,
};

use super::{At, Outcome};
use crate::prepared::{Prepared, PreparedFoundation};

/// So many of the usable CPUs, from this one on.
pub(crate) fn some_cpus(usable: &CpuSet, first: usize, count: usize) -> CpuSet {
    let mut some = CpuSet::new();
    let in_order = (first..CpuSet::MAX_CPU).chain(0..first.min(CpuSet::MAX_CPU));
    in_order.filter(|cpu| usable.is_set(*cpu)).take(count).for_each(|cpu| some.set(cpu));
    some
}

/// In place of no_new_privs, what else lets the filter and the payload's Landlock be put on.
#[cfg(feature = "ablation")]
pub(super) fn keep_over_exec() -> Result<(), Errno> {
    use rustix::thread::{CapabilitySet, CapabilitySets, configure_capability_in_ambient_set, set_capabilities};
    let one = CapabilitySet::SYS_ADMIN;
    // Dropping the bounding set still needs CAP_SETPCAP.
    let held = one | CapabilitySet::SETPCAP;
    set_capabilities(None, CapabilitySets { effective: held, permitted: held, inheritable: one })?;
    configure_capability_in_ambient_set(one, true)
}

/// What the process that makes the inner user namespace works with, and leaves.
struct Maker<'p> {
    foundation: &'p PreparedFoundation,
    proc: OwnedFd,
    made: Cell<Option<Result<OwnedFd, Errno>>>,
}

impl Maker<'_> {
    /// In the new namespace: writes its maps, which is allowed for one's own ids.
    fn make(&self) -> i32 {
        let made = self
            .write(c"self/setgroups", b"deny")
            .and_then(|()| self.write(c"self/gid_map", self.foundation.inner_gid_map.as_bytes()))
            .and_then(|()| self.write(c"self/uid_map", self.foundation.inner_uid_map.as_bytes()))
            .and_then(|()| openat(&self.proc, c"self/ns/user", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()));
        self.made.set(Some(made));
        0
    }

    /// Where the launcher, whose memory this is, takes on a caller's ids meanwhile, that clears
    /// what lets /proc/self be ours, once for each time it does so.
    fn write(&self, file: &CStr, value: &[u8]) -> Result<(), Errno> {
        const MOST_CHANGES: usize = 1000;
        for _change in 0..MOST_CHANGES {
            match write_proc(&self.proc, file, value) {
                Err(Errno::ACCESS) => set_dumpable_behavior(DumpableBehavior::Dumpable)?,
                other => return other,
            }
        }
        Err(Errno::ACCESS)
    }
}

/// Has a short-lived process make the inner user namespace, to be entered when the outer one's
/// rights have served.
pub(super) fn make_inner_namespace(foundation: &PreparedFoundation) -> Result<OwnedFd, Errno> {
    // The host's, in which the launcher has found us too; ours is not there yet.
    let proc = open(c"/proc", OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let maker = Maker { foundation, proc, made: Cell::new(None) };
    // SAFETY: it makes system calls only.
    #[expect(unsafe_code, reason = "a second process in our memory, while we stand still")]
    let process = unsafe { clone::in_namespaces(flags::NEWUSER, Maker::make, &maker) }?;
    waitpid(Pid::from_raw(process), WaitOptions::empty())?;
    maker.made.take().unwrap_or(Err(Errno::CHILD))
}

/// Enters it. Entering clears what lets /proc/self be ours.
pub(super) fn enter_inner_namespace(inner: &OwnedFd) -> Result<(), Errno> {
    move_into_link_name_space(inner.as_fd(), Some(LinkNameSpaceType::User))?;
    set_dumpable_behavior(DumpableBehavior::Dumpable)
}

pub(super) const RLIMIT_CORE: u32 = 4;

/// Makes room for the limit of core dumps that the sandbox will set: sudo hands on a hard
/// limit of 0. Without CAP_SYS_RESOURCE it stays, and forbids all but piped dumps.
pub(crate) fn raise_core_limit(child: i32) -> Result<(), Errno> {
    let (_, hard) = process::rlimit(RLIMIT_CORE)?;
    match (hard < 1).then(|| process::set_rlimit_of(child, RLIMIT_CORE, Some(1))) {
        None | Some(Ok(()) | Err(Errno::PERM)) => Ok(()),
        Some(Err(errno)) => Err(errno),
    }
}

pub(super) const RLIMIT_SIGPENDING: u32 = 11;
pub(super) const MOST_PENDING_SIGNALS: u64 = 512;

/// One inner user namespace and no further; few inotify objects (user_namespaces(7)
/// and inotify(7): they are counted for each user namespace and its ancestors).
pub(super) const NAMESPACE_COUNTS: [(&CStr, &[u8]); 3] =
    [(c"sys/user/max_user_namespaces", b"1"), (c"sys/user/max_inotify_instances", b"8"), (c"sys/user/max_inotify_watches", b"8192")];

pub(super) fn write_proc(proc: &OwnedFd, file: &CStr, value: &[u8]) -> Result<(), Errno> {
    let file = openat(proc, file, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
    rustix::io::write(&file, value).map(drop)
}

pub(super) fn restrict<'f>(prepared: &Prepared, programs: impl Iterator<Item = &'f OwnedFd>) -> Outcome<()> {
    let ruleset = landlock::create_ruleset(prepared.landlock_handled, prepared.landlock_scoped).at(Step::Landlock)?;
    for (index, (path, rights)) in prepared.landlock_rules.iter().enumerate() {
        let parent = open(path.as_c_str(), OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).at_entry(Step::Landlock, index)?;
        // A right on directories is refused for a plain file (EINVAL).
        let is_directory = rustix::fs::fstat(&parent)
            .map(|stat| rustix::fs::FileType::from_raw_mode(stat.st_mode).is_dir())
            .at_entry(Step::Landlock, index)?;
        let rights = if is_directory { *rights } else { rights & landlock::access::ON_FILE };
        landlock::allow_beneath(&ruleset, &parent, rights).at_entry(Step::Landlock, index)?;
    }
    // execveat reads the file as well as executing it.
    for program in programs {
        landlock::allow_beneath(&ruleset, program, landlock::access::EXECUTE | landlock::access::READ_FILE).at(Step::Landlock)?;
    }
    landlock::restrict_self(&ruleset).at(Step::Landlock)
}

/// Loads the filter. Where an outer supervisor already listens (EBUSY), its denials
/// stay and only their reports are lost.
pub(super) fn load_filter(prepared: &Prepared) -> Outcome<Option<OwnedFd>> {
    match seccomp::load_filter_with_listener(&prepared.filter) {
        Ok(listener) => Ok(Some(listener)),
        Err(Errno::BUSY) => seccomp::load_filter(&prepared.filter_without_listener).map(|()| None).at(Step::Seccomp),
        Err(errno) => Err(errno).at(Step::Seccomp),
    }
}
