//! The privileged sequence: from the clone to the executor's first instruction.
//!
//! Everything irreversible of a run happens in this file, top to bottom; what each step is
//! made of stands in the files below it. All of it runs in the launcher's memory, beside it,
//! so it makes only system calls on prepared data: it allocates nothing, takes no lock and
//! calls no libc, whose thread-local storage is the launcher's. What could be parsed or be
//! refused by a rule of ours the launcher does. A step that fails sends its number, the
//! errno and the entry's index to the launcher, and the process ends: there is no going on
//! without.
//!
//! The order is the kernel's, not ours; the comment at each step says why it cannot
//! come earlier or later. It reads no policy and decides nothing.

mod confine;
mod root;
mod words;

use std::{
    convert::Infallible,
    mem::{ManuallyDrop, MaybeUninit},
    sync::OnceLock,
};

use rustix::{
    fd::{AsFd, BorrowedFd, OwnedFd},
    fs::{AtFlags, CWD, Mode, mkdirat, unlinkat},
    io::Errno,
    mount::{MountPropagationFlags, MoveMountFlags, UnmountFlags, mount_change, move_mount, unmount},
    net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, send, sendmsg},
    process::{DumpableBehavior, Signal, set_dumpable_behavior, set_parent_process_death_signal, setsid, umask},
    thread::{CpuSet, sched_setaffinity},
};
use stockade_egress::inside::Sockets;
use stockade_policy::plan::UserNamespaces;
use stockade_protocol::{frame::failed_frame, step::Step};
use stockade_sys::{
    clone::{self, flags, unshare},
    cred, landlock,
    mount::attr,
    net, process,
};

use confine::{
    MOST_PENDING_SIGNALS, NAMESPACE_COUNTS, RLIMIT_CORE, RLIMIT_SIGPENDING, enter_inner_namespace, load_filter, ruleset, write_proc,
};
pub(crate) use confine::{raise_core_limit, some_cpus};
pub(crate) use root::{INSIDE, attach, new_tmpfs};
use root::{MASK_FILE, Made, Terminal, copy_tree, make_entry, mount_scratch, open_terminal, place_program};
use words::{ForExecutor, await_word, still_alive};

use crate::{
    early,
    layers::{Layer, Layers},
    prepared::{Prepared, PreparedFoundation},
};

/// What the child has in common with the launcher.
pub(crate) struct Shared {
    /// Its own ends, which the launcher closes in its table right after the clone: else
    /// nothing would tell it that they are gone with the child.
    pub(crate) status_write: ManuallyDrop<OwnedFd>,
    pub(crate) handover: ManuallyDrop<OwnedFd>,
    /// The number of the launcher's end of it, which the child's table has too.
    pub(crate) launchers_handover: u32,
    /// Where it may run.
    pub(crate) cpus: Option<CpuSet>,
    /// Each is set before the child has the word for it.
    pub(crate) foundation: OnceLock<PreparedFoundation>,
    pub(crate) prepared: OnceLock<Prepared>,
    /// All layers, but in builds for tests.
    pub(crate) layers: Layers,
}

/// A step that failed.
pub(crate) struct Failure {
    pub(crate) step: Step,
    pub(crate) errno: Errno,
    pub(crate) index: u32,
}

pub(crate) type Outcome<T> = Result<T, Failure>;

/// Ties an errno to its step.
trait At<T> {
    fn at(self, step: Step) -> Outcome<T>;
    fn at_entry(self, step: Step, index: usize) -> Outcome<T>;
}

impl<T> At<T> for Result<T, Errno> {
    #[inline]
    fn at(self, step: Step) -> Outcome<T> {
        self.map_err(|errno| Failure { step, errno, index: u32::MAX })
    }
    #[inline]
    fn at_entry(self, step: Step, index: usize) -> Outcome<T> {
        self.map_err(|errno| Failure { step, errno, index: u32::try_from(index).unwrap_or(u32::MAX) })
    }
}

/// Runs the sequence. Returns only when a step failed: the launcher has learnt which.
pub(crate) fn enter(shared: &Shared) -> i32 {
    run(shared, alone(shared.launchers_handover, shared.layers))
}

/// The same from where [`alone`] has come to before libc.
pub(crate) fn resume(shared: &Shared) -> i32 {
    run(shared, early::outcome())
}

fn run(shared: &Shared, begun: Outcome<()>) -> i32 {
    let failure = match begun.and_then(|()| sequence(shared)) {
        Ok(never) => match never {},
        Err(failure) => failure,
    };
    let frame = failed_frame(failure.step, u16::try_from(failure.errno.raw_os_error()).unwrap_or(0), failure.index);
    // If the launcher is gone too there is nobody to tell.
    let _unheard = rustix::io::write(&*shared.status_write, &frame);
    125
}

/// The crossings. Each state owns the descriptors that the next one needs.
fn sequence(shared: &Shared) -> Outcome<Infallible> {
    let founded = Founded::lay(shared)?;
    let rooted = founded.build_root()?;
    let confined = rooted.confine()?;
    confined.exec()
}

/// All that needs neither the plan nor an id, beside the launcher: namespaces of its own,
/// with nothing in them yet. Most often before libc has started, so this keeps to what
/// `stockade_sys::early` says.
pub(crate) fn alone(launchers_handover: u32, layers: Layers) -> Outcome<()> {
    // Modes below are meant as written.
    umask(Mode::empty());
    // Our copy of the launcher's end would hide its death from us.
    process::close_range(launchers_handover, launchers_handover).at(Step::AwaitLauncher)?;
    let uts = if layers.keep(Layer::UtsNamespace) { flags::NEWUTS } else { 0 };
    let ipc = if layers.keep(Layer::IpcNamespace) { flags::NEWIPC } else { 0 };
    unshare(flags::NEWNS | uts | ipc).at(Step::Namespaces)?;
    if layers.keep(Layer::NetworkNamespace) {
        unshare(flags::NEWNET).at(Step::NetworkNamespace)?;
        net::bring_up_loopback().at(Step::Loopback)?;
    }
    setsid().map(drop).at(Step::Session)?;
    process::give_up_precedence().at(Step::Scheduling)?;
    // pivot_root refuses shared propagation (EINVAL), and no mount event may leave.
    mount_change(c"/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).at(Step::PrivateMounts)
}

/// In its namespaces, with its ids, on the part of its root that every run of the policy has.
struct Founded<'p> {
    shared: &'p Shared,
    lifeline: OwnedFd,
    root: OwnedFd,
    proc: OwnedFd,
}

impl<'p> Founded<'p> {
    /// Waits for the launcher's first word, becomes who the plan says, and begins the root.
    fn lay(shared: &'p Shared) -> Outcome<Self> {
        let mut word = await_word(&shared.handover).at(Step::AwaitLauncher)?.into_iter().flatten();
        let lifeline = word.next().ok_or(Errno::BADF).at(Step::AwaitLauncher)?;
        let foundation = shared.foundation.get().ok_or(Errno::NODATA).at(Step::AwaitLauncher)?;
        // After the gid map, before the uid change takes the capability away; rootless it
        // is refused for ever (setgroups=deny), and the receipt names the groups kept.
        if foundation.clear_groups {
            cred::set_groups(&[]).at(Step::Groups)?;
        }
        // Before the first file: a tmpfs refuses unmapped owners (EOVERFLOW).
        let (uid, gid) = foundation.ids;
        if foundation.user_namespaces == UserNamespaces::Missing {
            cred::keep_permitted().at(Step::Ids)?;
        }
        cred::set_group(gid).at(Step::Ids)?;
        cred::set_user(uid).at(Step::Ids)?;
        if foundation.user_namespaces == UserNamespaces::Missing {
            // At once, because they are the host root's: no path may be resolved with more
            // rights to files than the run's id has.
            cred::retain(&[cred::CAP_SYS_ADMIN, cred::CAP_SETPCAP]).at(Step::Ids)?;
        }
        // setresuid has cleared both: /proc/self must be ours, and the launcher's death our own.
        set_dumpable_behavior(DumpableBehavior::Dumpable).at(Step::DeathSignal)?;
        set_parent_process_death_signal(Some(Signal::KILL)).at(Step::DeathSignal)?;
        // It may have died just before: getppid() is 0 in here and proves nothing.
        still_alive(&lifeline)?;
        if shared.layers.keep(Layer::SessionKeyring) {
            cred::join_new_session_keyring().at(Step::Keyring)?;
        }
        if shared.layers.keep(Layer::UtsNamespace) {
            rustix::system::sethostname(foundation.hostname.as_bytes()).at(Step::Hostname)?;
        }
        // Before the inner user namespace, whose maximum it becomes: pending signals are
        // counted for the user who made the namespaces, root perhaps, on the whole host.
        let (_, hard) = process::rlimit(RLIMIT_SIGPENDING).at(Step::NamespaceLimits)?;
        process::set_rlimit(RLIMIT_SIGPENDING, Some(hard.min(MOST_PENDING_SIGNALS))).at(Step::NamespaceLimits)?;
        let root =
            new_tmpfs(foundation.root_size.as_deref(), Some(foundation.root_inodes.as_c_str()), c"0755", INSIDE).at(Step::RootTmpfs)?;
        // Over "/", so that no directory of the host is needed; paths still start at the
        // old root, where this process's root directory stays until the pivot.
        move_mount(&root, c"", CWD, c"/", MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH).at(Step::RootTmpfs)?;
        let mut made = Made::default();
        for (index, entry) in foundation.entries.iter().enumerate() {
            make_entry(&root, entry, &[], &mut made, shared.layers).at_entry(Step::RootEntry, index)?;
        }
        let proc = made.proc.ok_or(Errno::NOENT).at(Step::RootEntry)?;
        Ok(Founded { shared, lifeline, root, proc })
    }

    /// Builds the rest of the root, as the plan says, and pivots into it.
    fn build_root(self) -> Outcome<Rooted<'p>> {
        let Founded { shared, lifeline, root, proc } = self;
        let trees = await_word(&shared.handover).at(Step::AwaitLauncher)?;
        let prepared = shared.prepared.get().ok_or(Errno::NODATA).at(Step::AwaitLauncher)?;
        if prepared.egress {
            let sockets = Sockets::open().map_err(|made| Failure {
                step: Step::EgressSockets,
                errno: made.errno,
                index: u32::try_from(made.index).unwrap_or(u32::MAX),
            })?;
            sockets.send(shared.handover.as_fd()).at(Step::EgressSockets)?;
        }
        let mut made = Made::default();
        let founded = shared.foundation.get().map_or(0, |foundation| foundation.entries.len());
        for (index, entry) in prepared.entries.iter().enumerate() {
            make_entry(&root, entry, &trees, &mut made, shared.layers).at_entry(Step::RootEntry, founded + index)?;
        }
        let executor = place_program(&root, prepared.executor).at(Step::PlaceExecutor)?;
        let image = prepared.image.map(|bytes| place_program(&root, bytes)).transpose().at(Step::PlaceExecutor)?;
        let mut third = await_word(&shared.handover).at(Step::AwaitScratch)?.into_iter().flatten();
        let for_executor = ForExecutor::take(&mut third).at(Step::AwaitScratch)?;
        let scratch = mount_scratch(prepared, shared.layers, third.next(), &root)?;
        // The stand-in for masked files stays mounted, its name goes.
        unlinkat(&root, MASK_FILE, AtFlags::empty()).at(Step::SealRoot)?;
        rustix::process::fchdir(&root).at(Step::PivotRoot)?;
        if shared.layers.keep(Layer::DetachedRoot) {
            rustix::process::pivot_root(c".", c".").at(Step::PivotRoot)?;
            // The old root now lies over the new one; after this no path leads to the host.
            unmount(c".", UnmountFlags::DETACH).at(Step::DetachOldRoot)?;
        } else {
            // In builds for tests alone. Not over the new one, or it counts as a chroot, in
            // which no user namespace can be made.
            mkdirat(&root, c".host", Mode::from_raw_mode(0o755)).at(Step::PivotRoot)?;
            rustix::process::pivot_root(c".", c".host").at(Step::PivotRoot)?;
        }
        if shared.layers.keep(Layer::ReadOnlyRoot) {
            stockade_sys::mount::set_attributes(&root, attr::RDONLY, false).at(Step::SealRoot)?;
        }
        // fchdir left us at the root of the tmpfs, which is "/" now.
        rustix::process::chdir(c"/").at(Step::PivotRoot)?;
        let terminal = if prepared.terminal { Some(open_terminal().at(Step::OpenTerminal)?) } else { None };
        Ok(Rooted { shared, prepared, lifeline, for_executor, root, scratch, executor, image, proc, modules: made.modules, terminal })
    }
}

/// Joins the cgroup on v1, and hides its path.
fn enter_cgroup(own_namespace: bool, tasks: impl Iterator<Item = OwnedFd>) -> Outcome<()> {
    for (index, tasks) in tasks.enumerate() {
        // 0 is this process; naming another, or itself by number, would wait (v1.rs).
        rustix::io::write(&tasks, b"0").map(drop).at_entry(Step::JoinCgroup, index)?;
    }
    // After the join, or its path would show from inside.
    if own_namespace { unshare(flags::NEWCGROUP).at(Step::CgroupNamespace) } else { Ok(()) }
}

/// In its own root, with nothing of the host in reach by path.
struct Rooted<'p> {
    shared: &'p Shared,
    prepared: &'p Prepared,
    lifeline: OwnedFd,
    for_executor: ForExecutor,
    root: OwnedFd,
    scratch: OwnedFd,
    executor: OwnedFd,
    image: Option<OwnedFd>,
    proc: OwnedFd,
    modules: Option<OwnedFd>,
    terminal: Option<Terminal>,
}

impl<'p> Rooted<'p> {
    /// Gives up everything that could undo the above.
    fn confine(self) -> Outcome<Confined<'p>> {
        let Rooted { shared, prepared, lifeline, for_executor, root, scratch, executor, image, proc, modules, terminal } = self;
        let nested = shared.foundation.get().filter(|foundation| foundation.user_namespaces == UserNamespaces::Nested);
        // While we still own the outer namespace: its counts bind whatever is made below it.
        // Without one they would be the host's.
        if nested.is_some() && shared.layers.keep(Layer::NamespaceCounts) {
            for (index, (file, value)) in NAMESPACE_COUNTS.iter().enumerate() {
                write_proc(&proc, file, value).at_entry(Step::NamespaceLimits, index)?;
            }
        }
        let inner = nested.filter(|_| shared.layers.keep(Layer::InnerUserNamespace));
        // To be sealed /proc wants the outer namespace's rights, and the inner one's maps one
        // that is not: a copy that is mounted nowhere.
        let writable = inner.map(|_| copy_tree(&proc, c"")).transpose().at(Step::InnerUserNamespace)?;
        let sealed = if shared.layers.keep(Layer::ReadOnlyProc) { attr::RDONLY } else { 0 };
        stockade_sys::mount::set_attributes(&proc, sealed, false).at(Step::SealRoot)?;
        // That was the last: the launcher can look at them while the rest is done.
        send(&*shared.handover, &[MOUNTS_STAND], SendFlags::NOSIGNAL).map(drop).at(Step::SealRoot)?;
        // After the last mount call, which its domain forbids. Put on when nothing else is to come.
        let landlock =
            if prepared.landlock_handled == 0 { None } else { Some(ruleset(prepared, std::iter::once(&executor).chain(&image))?) };
        // That was the last use of the outer namespace's rights. The inner one comes before the
        // drop, because it refills the sets, the bounding set too. From here on mounts, host name
        // and network of the outer one are out of reach for any capability.
        if let Some((inner, writable)) = inner.zip(writable.as_ref()) {
            enter_inner_namespace(inner, writable).at(Step::InnerUserNamespace)?;
        }
        rustix::process::chdir(prepared.scratch_path.as_c_str()).at(Step::WorkingDirectory)?;
        umask(Mode::from_raw_mode(0o022));
        // 1, not 0: a piped core_pattern ignores 0, and 1 makes the kernel skip it. A
        // hard limit of 0 that the launcher could not raise stays.
        let (_, hard) = process::rlimit(RLIMIT_CORE).at(Step::CoreLimit)?;
        process::set_rlimit(RLIMIT_CORE, Some(hard.min(1))).at(Step::CoreLimit)?;
        // As late as can be, since the launcher takes long to make it.
        let mut tasks = await_word(&shared.handover).at(Step::AwaitCgroup)?.into_iter().flatten();
        enter_cgroup(prepared.unshare_cgroup_namespace && shared.layers.keep(Layer::CgroupNamespace), &mut tasks)?;
        // Each needs CAP_SETPCAP, which the last of them gives up.
        if shared.layers.keep(Layer::Capabilities) {
            #[cfg(feature = "ablation")]
            let kept = (!shared.layers.keep(Layer::NoNewPrivs)).then(confine::keep_over_exec).transpose().at(Step::Capabilities)?;
            cred::lock_securebits().at(Step::Capabilities)?;
            cred::drop_bounding_set().at(Step::Capabilities)?;
            #[cfg(feature = "ablation")]
            if kept.is_none() {
                cred::drop_all_sets().at(Step::Capabilities)?;
            }
            #[cfg(not(feature = "ablation"))]
            cred::drop_all_sets().at(Step::Capabilities)?;
        }
        // Without capabilities, Landlock and the filter are refused until this is set.
        if shared.layers.keep(Layer::NoNewPrivs) {
            rustix::thread::set_no_new_privs(true).at(Step::NoNewPrivs)?;
        }
        if let Some(landlock) = &landlock {
            landlock::restrict_self(landlock).at(Step::Landlock)?;
        }
        // A change of credentials clears it (prctl(2)).
        set_parent_process_death_signal(Some(Signal::KILL)).at(Step::DeathSignal)?;
        still_alive(&lifeline)?;
        // The code sees as many CPUs as its quota is worth, and the launcher's among them last:
        // it had sent us to another.
        if let Some(usable) = &shared.cpus {
            sched_setaffinity(None, &some_cpus(usable, process::current_cpu(), prepared.cpus)).at(Step::Cpus)?;
        }
        // Last: what follows must pass the filter itself.
        let listener = load_filter(prepared)?;
        Ok(Confined { shared, lifeline, for_executor, root, scratch, executor, image, listener, modules, terminal, writable })
    }
}

/// Behind every layer. What is left is to become the executor.
struct Confined<'p> {
    shared: &'p Shared,
    lifeline: OwnedFd,
    for_executor: ForExecutor,
    root: OwnedFd,
    scratch: OwnedFd,
    executor: OwnedFd,
    image: Option<OwnedFd>,
    listener: Option<OwnedFd>,
    modules: Option<OwnedFd>,
    terminal: Option<Terminal>,
    /// The copy of /proc, which has no use any more.
    writable: Option<OwnedFd>,
}

impl Confined<'_> {
    fn exec(mut self) -> Outcome<Infallible> {
        self.hand_over().at(Step::HandOver)?;
        // The launcher has it now: whoever closes it last waits for all CPUs.
        drop(self.writable.take());
        let ForExecutor { job, stdin, stdout, stderr } = &self.for_executor;
        // Clear of the fixed numbers, so that placing one cannot overwrite another.
        let above = |fd: BorrowedFd<'_>| process::duplicate_above(fd, LOWEST_FREE).at(Step::Descriptors);
        let job = above(job.as_fd())?;
        let status = above(self.shared.status_write.as_fd())?;
        let (input, output, error) = match &self.terminal {
            Some(terminal) => (above(terminal.slave.as_fd())?, above(terminal.slave.as_fd())?, above(terminal.slave.as_fd())?),
            None => (above(stdin.as_fd())?, above(stdout.as_fd())?, above(stderr.as_fd())?),
        };
        let lifeline = above(self.lifeline.as_fd())?;
        let executor = above(self.executor.as_fd())?;
        let image = self.image.as_ref().map(|image| above(image.as_fd())).transpose()?;
        let fixed = [(&job, 0), (&output, 1), (&error, 2), (&status, 3), (&input, 4), (&lifeline, 5)];
        for (fd, number) in fixed.into_iter().chain(image.iter().map(|image| (image, IMAGE))) {
            process::place_descriptor(fd, number).at(Step::Descriptors)?;
        }
        // Every other descriptor, of ours or of whoever started the launcher, is closed by
        // the exec; none was opened without close-on-exec after this.
        process::close_on_exec_from(if image.is_some() { 7 } else { 6 }).at(Step::Descriptors)?;
        Err(clone::exec_alone(executor.as_fd())).at(Step::ExecExecutor)
    }

    /// Sends the launcher what only it may keep: the listener, the two file systems whose
    /// use it will read, its end of what watched interpreters write to, and what it is to close.
    fn hand_over(&self) -> Result<(), Errno> {
        let mut fds = [self.root.as_fd(); MOST_HANDED_OVER];
        let mut tags = [b'r', 0, 0, 0, 0, 0];
        let more = [
            (b's', Some(&self.scratch)),
            (b'l', self.listener.as_ref()),
            (b't', self.terminal.as_ref().map(|terminal| &terminal.master)),
            (b'm', self.modules.as_ref()),
            (b'p', self.writable.as_ref()),
        ];
        let mut count = 1;
        for (tag, fd) in more {
            if let (Some(fd), Some(fd_slot), Some(tag_slot)) = (fd, fds.get_mut(count), tags.get_mut(count)) {
                *fd_slot = fd.as_fd();
                *tag_slot = tag;
                count += 1;
            }
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_HANDED_OVER))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !ancillary.push(SendAncillaryMessage::ScmRights(fds.get(..count).unwrap_or_default())) {
            return Err(Errno::NOBUFS);
        }
        let tags = [std::io::IoSlice::new(tags.get(..count).unwrap_or_default())];
        sendmsg(&*self.shared.handover, &tags, &mut ancillary, SendFlags::NOSIGNAL).map(drop)
    }
}

/// The message, without descriptors, that no mount is to come any more.
pub(crate) const MOUNTS_STAND: u8 = b'.';
/// Descriptors that the launcher gets.
pub(crate) const MOST_HANDED_OVER: usize = 6;
const LOWEST_FREE: i32 = 16;
/// Where the executor finds the image of the payload's program.
const IMAGE: i32 = 6;
