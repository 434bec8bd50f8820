//! The parts of giving up rights: namespace counts, the inner user namespace, limits,
//! Landlock, the filter.
//!
//! In which order they come, and why, stands in `sequence.rs`; what may be done between clone
//! and exec too.

use std::ffi::CStr;

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fd::OwnedFd,
    fs::{Mode, OFlags, openat},
    io::Errno,
    process::{DumpableBehavior, Signal, set_dumpable_behavior, set_parent_process_death_signal},
    thread::CpuSet,
};
use stockade_policy::{
    filter::{RET_WITH_LISTENER, RET_WITHOUT_LISTENER},
    plan::UserNamespaces,
};
use stockade_protocol::step::Step;
use stockade_sys::{
    clone::{flags, unshare},
    cred, landlock, process,
    seccomp::{self, Instruction},
};

use super::{At, StepResult};
use crate::{
    child_data::{ChildData, ChildRuleset},
    layers::{Layer, Layers},
    tree,
};

/// So many of the usable CPUs, from this one on.
pub(crate) fn some_cpus(usable: &CpuSet, first: usize, count: usize) -> CpuSet {
    let mut some = CpuSet::new();
    let in_order = (first..CpuSet::MAX_CPU).chain(0..first.min(CpuSet::MAX_CPU));
    in_order.filter(|cpu| usable.is_set(*cpu)).take(count).for_each(|cpu| some.set(cpu));
    some
}

/// Gives up every capability: securebits, bounding set, then the sets. Each needs CAP_SETPCAP,
/// which the last of them takes away.
pub(super) fn drop_capabilities(_layers: Layers) -> Result<(), Errno> {
    #[cfg(feature = "ablation")]
    if !_layers.has(Layer::NoNewPrivs) {
        keep_over_exec()?;
        cred::lock_securebits()?;
        return cred::drop_bounding_set();
    }
    cred::lock_securebits()?;
    cred::drop_bounding_set()?;
    cred::drop_all_sets()
}

/// The namespaces that are left to the child: those of mounts, host name and System V IPC.
pub(super) fn namespaces(layers: Layers) -> u64 {
    let uts = if layers.has(Layer::UtsNamespace) { flags::NEWUTS } else { 0 };
    let ipc = if layers.has(Layer::IpcNamespace) { flags::NEWIPC } else { 0 };
    flags::NEWNS | uts | ipc
}

/// Limits the counts of the namespace that this process owns.
pub(super) fn limit_namespace_counts(proc: &OwnedFd) -> StepResult<()> {
    for (index, (file, value)) in NAMESPACE_COUNTS.iter().enumerate() {
        write_proc(proc, file, value).at_entry(Step::NamespaceLimits, index)?;
    }
    Ok(())
}

/// Bounds the signals that may be pending, below what the launcher may have, to which code could else
/// leave no room for one. The limit becomes the maximum of the inner user
/// namespace: signals are counted for the user who made the namespaces, root perhaps, on the
/// whole host.
pub(super) fn limit_pending_signals() -> Result<(), Errno> {
    let (_, hard) = process::rlimit(RLIMIT_SIGPENDING)?;
    process::set_rlimit(RLIMIT_SIGPENDING, Some((hard / 2).min(MAX_PENDING_SIGNALS)))
}

/// Forbids core dumps: 1, not 0, because a piped core_pattern ignores 0, and 1 makes the kernel
/// skip it. A hard limit of 0 that the launcher could not raise stays.
pub(super) fn forbid_core_dumps() -> Result<(), Errno> {
    let (_, hard) = process::rlimit(RLIMIT_CORE)?;
    process::set_rlimit(RLIMIT_CORE, Some(hard.min(1)))
}

/// Ends with the launcher, which may have died just before: getppid() is 0 in here and proves
/// nothing, but the lifeline hangs up.
pub(super) fn die_with_launcher(lifeline: &OwnedFd) -> Result<(), Errno> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    let mut fds = [PollFd::new(lifeline, PollFlags::empty())];
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))?;
    if fds.iter().any(|fd| fd.revents().contains(PollFlags::HUP)) { Err(Errno::SRCH) } else { Ok(()) }
}

/// Switches to the run's ids.
pub(super) fn take_ids((uid, gid): (u32, u32), user_namespaces: UserNamespaces) -> Result<(), Errno> {
    if user_namespaces == UserNamespaces::Missing {
        cred::keep_permitted()?;
    }
    cred::set_group(gid)?;
    cred::set_user(uid)?;
    if user_namespaces == UserNamespaces::Missing {
        // At once, because they are the host root's: no path may be resolved with more
        // rights to files than the run's id has.
        cred::retain(&[cred::CAP_SYS_ADMIN, cred::CAP_SETPCAP])?;
    }
    Ok(())
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

/// Makes the inner user namespace, and enters it: with the ids of the outer one, mapped to
/// themselves, which is allowed for one's own. `proc`: writable.
pub(super) fn enter_inner_namespace(data: &ChildData, proc: &OwnedFd) -> Result<(), Errno> {
    unshare(flags::NEWUSER)?;
    write_own(proc, c"self/setgroups", b"deny")?;
    write_own(proc, c"self/gid_map", data.inner_gid_map.as_bytes())?;
    write_own(proc, c"self/uid_map", data.inner_uid_map.as_bytes())
}

/// Where the launcher, whose memory this is, takes on a caller's ids meanwhile, that clears
/// what lets /proc/self be ours, once for each time it does so.
fn write_own(proc: &OwnedFd, file: &CStr, value: &[u8]) -> Result<(), Errno> {
    const MAX_CHANGES: usize = 1000;
    for _change in 0..MAX_CHANGES {
        match write_proc(proc, file, value) {
            Err(Errno::ACCESS) => set_dumpable_behavior(DumpableBehavior::Dumpable)?,
            other => return other,
        }
    }
    Err(Errno::ACCESS)
}

const RLIMIT_CORE: u32 = 4;

/// Makes room for the limit of core dumps that the sandbox will set: sudo hands on a hard
/// limit of 0. Without CAP_SYS_RESOURCE it stays, and forbids all but piped dumps.
pub(crate) fn raise_core_limit(child: i32) -> Result<(), Errno> {
    let (_, hard) = process::rlimit(RLIMIT_CORE)?;
    match (hard < 1).then(|| process::set_rlimit_of(child, RLIMIT_CORE, Some(1))) {
        None | Some(Ok(()) | Err(Errno::PERM)) => Ok(()),
        Some(Err(errno)) => Err(errno),
    }
}

const RLIMIT_SIGPENDING: u32 = 11;
const MAX_PENDING_SIGNALS: u64 = 512;

/// One inner user namespace and no further; few inotify objects (user_namespaces(7)
/// and inotify(7): they are counted for each user namespace and its ancestors).
const NAMESPACE_COUNTS: [(&CStr, &[u8]); 3] =
    [(c"sys/user/max_user_namespaces", b"1"), (c"sys/user/max_inotify_instances", b"8"), (c"sys/user/max_inotify_watches", b"8192")];

fn write_proc(proc: &OwnedFd, file: &CStr, value: &[u8]) -> Result<(), Errno> {
    let file = openat(proc, file, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
    rustix::io::write(&file, value).map(drop)
}

/// What the code may do with which paths; in force when a process puts it on, in this step.
pub(super) fn ruleset<'f>(data: &ChildRuleset, programs: impl Iterator<Item = &'f OwnedFd>, step: Step) -> StepResult<OwnedFd> {
    let ruleset = landlock::create_ruleset(data.handled, data.scoped).at(step)?;
    for (index, (path, rights)) in data.rules.iter().enumerate() {
        let parent = tree::open_inside(path.as_c_str(), OFlags::empty()).at_entry(step, index)?;
        // A right on directories is refused for a plain file (EINVAL).
        let is_directory =
            rustix::fs::fstat(&parent).map(|stat| rustix::fs::FileType::from_raw_mode(stat.st_mode).is_dir()).at_entry(step, index)?;
        let rights = if is_directory { *rights } else { rights & landlock::access::ON_FILE };
        landlock::allow_beneath(&ruleset, &parent, rights).at_entry(step, index)?;
    }
    // They lie in the root tmpfs, which no path leads to where an image is the root. execveat reads the
    // file as well as executing it.
    for program in programs {
        let rights = (landlock::access::EXECUTE | landlock::access::READ_FILE) & data.handled;
        landlock::allow_beneath(&ruleset, program, rights).at(step)?;
    }
    Ok(ruleset)
}

/// Loads the filter. Where an outer supervisor already listens (EBUSY), its denials
/// stay and only their reports are lost.
pub(super) fn load_filter(data: &ChildData) -> StepResult<Option<OwnedFd>> {
    let filter = Instruction::of_words(&data.filter);
    match seccomp::load_filter_with_listener(filter) {
        Ok(listener) => Ok(Some(listener)),
        Err(Errno::BUSY) => load_without_listener(filter).map(|()| None).at(Step::Seccomp),
        Err(errno) => Err(errno).at(Step::Seccomp),
    }
}

/// The same with an errno wherever a listener would be asked.
#[inline(never)]
fn load_without_listener(filter: &[Instruction]) -> Result<(), Errno> {
    const RETURN: u64 = 0x06;
    let returning = |value| Instruction(RETURN | u64::from(value) << 32);
    let mut silent = [returning(RET_WITHOUT_LISTENER); Instruction::MAX_PER_FILTER];
    let silent = silent.get_mut(..filter.len()).ok_or(Errno::TOOBIG)?;
    for (place, instruction) in silent.iter_mut().zip(filter) {
        if *instruction != returning(RET_WITH_LISTENER) {
            *place = *instruction;
        }
    }
    seccomp::load_filter(silent)
}
