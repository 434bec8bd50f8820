//! The privileged sequence: from the clone to the executor's first instruction.
//!
//! Everything irreversible of a run happens in this file, top to bottom. It runs in the
//! launcher's memory, beside it, so it makes only system calls on prepared data: it
//! allocates nothing, takes no lock and calls no libc, whose thread-local storage is the
//! launcher's. What could be parsed or be refused by a rule of ours the launcher does. A
//! step that fails sends its number, the errno and the entry's index to the launcher,
//! and the process ends: there is no going on without.
//!
//! The order is the kernel's, not ours; the comment at each step says why it cannot
//! come earlier or later. It reads no policy and decides nothing.

use std::{
    cell::Cell,
    convert::Infallible,
    ffi::CStr,
    mem::{ManuallyDrop, MaybeUninit},
    sync::OnceLock,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fd::{AsFd, BorrowedFd, OwnedFd},
    fs::{AtFlags, CWD, FileType, Mode, OFlags, mkdirat, mknodat, open, openat, statat, symlinkat, unlinkat},
    io::Errno,
    mount::{
        FsMountFlags, FsOpenFlags, MountAttrFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags, fsconfig_create,
        fsconfig_set_string, fsmount, fsopen, mount_change, move_mount, open_tree, unmount,
    },
    net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recvmsg, sendmsg},
    process::{DumpableBehavior, Pid, Signal, WaitOptions, set_dumpable_behavior, set_parent_process_death_signal, setsid, umask, waitpid},
    thread::{CpuSet, LinkNameSpaceType, move_into_link_name_space, sched_getcpu, sched_setaffinity},
};
use stockade_egress::inside::Sockets;
use stockade_policy::plan::UserNamespaces;
use stockade_protocol::{frame::failed_frame, step::Step};
use stockade_sys::{
    clone::{self, flags, unshare},
    cred, landlock,
    mount::attr,
    net, process, seccomp,
};

use crate::{
    layers::{Layer, Layers},
    prepared::{Entry, MOST_SENT, MOST_TREES, Prepared, PreparedScratch},
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
    /// Set before the child is told to go on.
    pub(crate) prepared: OnceLock<Prepared>,
    /// All layers, but in builds for tests.
    pub(crate) layers: Layers,
}

/// A step that failed.
struct Failure {
    step: Step,
    errno: Errno,
    index: u32,
}

type Outcome<T> = Result<T, Failure>;

/// Ties an errno to its step.
trait At<T> {
    fn at(self, step: Step) -> Outcome<T>;
    fn at_entry(self, step: Step, index: usize) -> Outcome<T>;
}

impl<T> At<T> for Result<T, Errno> {
    fn at(self, step: Step) -> Outcome<T> {
        self.map_err(|errno| Failure { step, errno, index: u32::MAX })
    }
    fn at_entry(self, step: Step, index: usize) -> Outcome<T> {
        self.map_err(|errno| Failure { step, errno, index: u32::try_from(index).unwrap_or(u32::MAX) })
    }
}

/// Runs the sequence. Returns only when a step failed: the launcher has learnt which.
pub(crate) fn enter(shared: &Shared) -> i32 {
    let failure = match sequence(shared) {
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
    let waiting = Waiting::enter(shared)?;
    let isolated = waiting.go_on()?;
    let rooted = isolated.build_root()?;
    let confined = rooted.confine()?;
    confined.exec()
}

/// In namespaces of its own, with nothing in them yet, and nobody's ids.
struct Waiting<'p> {
    shared: &'p Shared,
}

impl<'p> Waiting<'p> {
    /// All that needs neither the plan nor an id, beside the launcher.
    fn enter(shared: &'p Shared) -> Outcome<Self> {
        // Modes below are meant as written.
        umask(Mode::empty());
        // Our copy of the launcher's end would hide its death from us.
        process::close_range(shared.launchers_handover, shared.launchers_handover).at(Step::AwaitLauncher)?;
        let wanted = [(Layer::UtsNamespace, flags::NEWUTS), (Layer::IpcNamespace, flags::NEWIPC)];
        let wanted = wanted.iter().filter(|(layer, _)| shared.layers.keep(*layer)).fold(flags::NEWNS, |all, (_, flag)| all | flag);
        unshare(wanted).at(Step::Namespaces)?;
        if shared.layers.keep(Layer::NetworkNamespace) {
            unshare(flags::NEWNET).at(Step::NetworkNamespace)?;
            net::bring_up_loopback().at(Step::Loopback)?;
        }
        setsid().map(drop).at(Step::Session)?;
        // pivot_root refuses shared propagation (EINVAL), and no mount event may leave.
        mount_change(c"/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).at(Step::PrivateMounts)?;
        Ok(Waiting { shared })
    }

    fn go_on(self) -> Outcome<Isolated<'p>> {
        let shared = self.shared;
        let received = Received::wait(&shared.handover).at(Step::AwaitLauncher)?;
        // The launcher had sent us to another CPU than its own; that one may be a busy one.
        if let Some(usable) = &shared.cpus {
            sched_setaffinity(None, usable).at(Step::Cpus)?;
        }
        let prepared = shared.prepared.get().ok_or(Errno::NODATA).at(Step::AwaitLauncher)?;
        if prepared.egress {
            let sockets = Sockets::open().map_err(|made| Failure {
                step: Step::EgressSockets,
                errno: made.errno,
                index: u32::try_from(made.index).unwrap_or(u32::MAX),
            })?;
            sockets.send(shared.handover.as_fd()).at(Step::EgressSockets)?;
        }
        // After the gid map, before the uid change takes the capability away; rootless it
        // is refused for ever (setgroups=deny), and the receipt names the groups kept.
        if prepared.clear_groups {
            cred::set_groups(&[]).at(Step::Groups)?;
        }
        // Before the first file: a tmpfs refuses unmapped owners (EOVERFLOW).
        let (uid, gid) = prepared.ids;
        if prepared.user_namespaces == UserNamespaces::Missing {
            cred::keep_permitted().at(Step::Ids)?;
        }
        cred::set_group(gid).at(Step::Ids)?;
        cred::set_user(uid).at(Step::Ids)?;
        if prepared.user_namespaces == UserNamespaces::Missing {
            // At once, because they are the host root's: no path may be resolved with more
            // rights to files than the run's id has.
            cred::retain(&[cred::CAP_SYS_ADMIN, cred::CAP_SETPCAP]).at(Step::Ids)?;
        }
        // setresuid has cleared both: /proc/self must be ours, and the launcher's death our own.
        set_dumpable_behavior(DumpableBehavior::Dumpable).at(Step::DeathSignal)?;
        set_parent_process_death_signal(Some(Signal::KILL)).at(Step::DeathSignal)?;
        // It may have died just before: getppid() is 0 in here and proves nothing.
        still_alive(&received.lifeline)?;
        cred::join_new_session_keyring().at(Step::Keyring)?;
        if shared.layers.keep(Layer::UtsNamespace) {
            rustix::system::sethostname(prepared.hostname.as_bytes()).at(Step::Hostname)?;
        }
        Ok(Isolated { shared, prepared, received })
    }
}

/// Sends a process that was just cloned to another CPU than this one: a kernel may leave it
/// on its parent's, where it would begin when the parent first waits. Where that fails the
/// two run by turns. (Asked here where it is, the child may ask too: on the first time
/// rustix allocates, when it looks for the kernel's quick way to ask.)
pub(crate) fn send_to_other_cpu(process: i32, usable: &CpuSet) {
    if usable.count() > 1 {
        let mut others = *usable;
        others.unset(sched_getcpu());
        let _only_slower = sched_setaffinity(Pid::from_raw(process), &others);
    }
}

/// So many of the usable CPUs, from this one on.
fn some_cpus(usable: &CpuSet, first: usize, count: usize) -> CpuSet {
    let mut some = CpuSet::new();
    let in_order = (first..CpuSet::MAX_CPU).chain(0..first.min(CpuSet::MAX_CPU));
    in_order.filter(|cpu| usable.is_set(*cpu)).take(count).for_each(|cpu| some.set(cpu));
    some
}

/// The descriptors that the launcher sends with its word to go on.
struct Received {
    lifeline: OwnedFd,
    trees: [Option<OwnedFd>; MOST_TREES],
}

impl Received {
    /// Waits for them.
    fn wait(handover: &OwnedFd) -> Result<Self, Errno> {
        let mut all = await_word(handover)?.into_iter().flatten();
        let lifeline = all.next().ok_or(Errno::BADF)?;
        let mut trees = [const { None }; MOST_TREES];
        for (place, tree) in trees.iter_mut().zip(all) {
            *place = Some(tree);
        }
        Ok(Received { lifeline, trees })
    }
}

/// What the executor will have, which comes first with the second word.
struct ForExecutor {
    job: OwnedFd,
    stdin: OwnedFd,
    stdout: OwnedFd,
    stderr: OwnedFd,
}

impl ForExecutor {
    fn take(second: &mut impl Iterator<Item = OwnedFd>) -> Result<Self, Errno> {
        let mut next = || second.next().ok_or(Errno::BADF);
        Ok(ForExecutor { job: next()?, stdin: next()?, stdout: next()?, stderr: next()? })
    }
}

/// Waits for the launcher's word and the descriptors that come with it. EPIPE: it is gone.
fn await_word(handover: &OwnedFd) -> Result<[Option<OwnedFd>; MOST_SENT], Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_SENT))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut word = [0u8];
    loop {
        match recvmsg(handover, &mut [std::io::IoSliceMut::new(&mut word)], &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Ok(message) if message.bytes == 1 => break,
            Ok(_) => return Err(Errno::PIPE),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    let mut fds = [const { None }; MOST_SENT];
    let received = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(rights) => Some(rights),
        _ => None,
    });
    for (place, fd) in fds.iter_mut().zip(received.flatten()) {
        *place = Some(fd);
    }
    Ok(fds)
}

/// The lifeline hangs up when the launcher ends, however it ends.
fn still_alive(lifeline: &OwnedFd) -> Outcome<()> {
    let mut fds = [PollFd::new(lifeline, PollFlags::empty())];
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).at(Step::DeathSignal)?;
    if fds.iter().any(|fd| fd.revents().contains(PollFlags::HUP)) { Err(Errno::SRCH).at(Step::DeathSignal) } else { Ok(()) }
}

/// In its namespaces, with its ids.
struct Isolated<'p> {
    shared: &'p Shared,
    prepared: &'p Prepared,
    received: Received,
}

impl<'p> Isolated<'p> {
    /// Builds the root from nothing and pivots into it.
    fn build_root(self) -> Outcome<Rooted<'p>> {
        let Isolated { shared, prepared, received } = self;
        let root = new_tmpfs(prepared.root_size.as_deref(), Some(prepared.root_inodes.as_c_str()), c"0755", INSIDE).at(Step::RootTmpfs)?;
        // Over "/", so that no directory of the host is needed; paths still start at the
        // old root, where this process's root directory stays until the pivot.
        move_mount(&root, c"", CWD, c"/", MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH).at(Step::RootTmpfs)?;
        let mut made = Made::default();
        for (index, entry) in prepared.entries.iter().enumerate() {
            make_entry(&root, entry, &received.trees, &mut made).at_entry(Step::RootEntry, index)?;
        }
        let executor = place_program(&root, prepared.executor).at(Step::PlaceExecutor)?;
        let image = prepared.image.map(|bytes| place_program(&root, bytes)).transpose().at(Step::PlaceExecutor)?;
        let mut second = await_word(&shared.handover).at(Step::AwaitCgroup)?.into_iter().flatten();
        let for_executor = ForExecutor::take(&mut second).at(Step::AwaitCgroup)?;
        let scratch = mount_scratch(prepared, shared.layers, &mut second, &root)?;
        enter_cgroup(prepared.unshare_cgroup_namespace && shared.layers.keep(Layer::CgroupNamespace), second)?;
        // The stand-ins for hidden files stay mounted, their names go.
        for name in [HIDDEN_FILE, MASK_FILE] {
            unlinkat(&root, name, AtFlags::empty()).at(Step::SealRoot)?;
        }
        unlinkat(&root, HIDDEN_DIRECTORY, AtFlags::REMOVEDIR).at(Step::SealRoot)?;

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
        let proc = made.proc.ok_or(Errno::NOENT).at(Step::RootEntry)?;
        let terminal = if prepared.terminal { Some(open_terminal().at(Step::OpenTerminal)?) } else { None };
        let (lifeline, modules) = (received.lifeline, made.modules);
        Ok(Rooted { shared, prepared, lifeline, for_executor, root, scratch, executor, image, proc, modules, terminal })
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

pub(crate) const INSIDE: MountAttrFlags = MountAttrFlags::MOUNT_ATTR_NOSUID.union(MountAttrFlags::MOUNT_ATTR_NODEV);
/// Names in the root tmpfs, gone before the payload starts.
const HIDDEN_FILE: &CStr = c".hidden-file";
const HIDDEN_DIRECTORY: &CStr = c".hidden-directory";
const MASK_FILE: &CStr = c".mask";
const COVER_FILE: &CStr = c".cover";

pub(crate) fn new_tmpfs(size: Option<&CStr>, inodes: Option<&CStr>, mode: &CStr, attributes: MountAttrFlags) -> Result<OwnedFd, Errno> {
    let context = fsopen(c"tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(&context, c"mode", mode)?;
    if let Some(size) = size {
        fsconfig_set_string(&context, c"size", size)?;
    }
    if let Some(inodes) = inodes {
        fsconfig_set_string(&context, c"nr_inodes", inodes)?;
    }
    fsconfig_create(&context)?;
    fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)
}

pub(crate) fn attach(mount: impl AsFd, root: &OwnedFd, target: &CStr) -> Result<(), Errno> {
    move_mount(mount, c"", root, target, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
}

/// A copy of a mount, not attached anywhere. AT_RECURSIVE: without it a directory with
/// mounts below it is refused (EINVAL), as it would uncover what they hide.
fn copy_tree(directory: impl AsFd, path: &CStr) -> Result<OwnedFd, Errno> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_RECURSIVE;
    open_tree(directory, path, if path.is_empty() { flags | OpenTreeFlags::AT_EMPTY_PATH } else { flags })
}

/// What is needed again of the entries that were made.
#[derive(Default)]
struct Made {
    proc: Option<OwnedFd>,
    /// The launcher's end of what watched interpreters write to.
    modules: Option<OwnedFd>,
}

fn make_entry(root: &OwnedFd, entry: &Entry, trees: &[Option<OwnedFd>], made: &mut Made) -> Result<(), Errno> {
    let set = |mount: &OwnedFd, attributes, recursive| stockade_sys::mount::set_attributes(mount, attributes, recursive);
    match entry {
        Entry::Directory { target, mode } => match mkdirat(root, target.as_c_str(), Mode::from_raw_mode(*mode)) {
            // Above a scratch in /tmp, say, another entry has made it.
            Err(Errno::EXIST) => Ok(()),
            other => other,
        },
        Entry::Link { target, to } => symlinkat(to.as_c_str(), root, target.as_c_str()),
        // A mount point needs no contents, and so no descriptor.
        Entry::File { target, mode, text } if text.is_empty() => {
            mknodat(root, target.as_c_str(), FileType::RegularFile, Mode::from_raw_mode(*mode), 0)
        }
        Entry::File { target, mode, text } => write_file(root, target, *mode, text).map(drop),
        Entry::Bind { source, tree, target, executable } => {
            let copy;
            // Root has opened what belongs to the caller with the caller's rights.
            let tree = match tree {
                Some(index) => trees.get(*index).and_then(Option::as_ref).ok_or(Errno::BADF)?,
                None => {
                    copy = copy_tree(CWD, source)?;
                    &copy
                }
            };
            let noexec = if *executable { 0 } else { attr::NOEXEC };
            set(tree, attr::RDONLY | attr::NOSUID | attr::NODEV | noexec, true)?;
            attach(tree, root, target)
        }
        Entry::Device { source, target } => {
            // mknod is refused in a user namespace; nodev would make the node useless.
            let node = open_tree(CWD, source.as_c_str(), OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC)?;
            set(&node, attr::RDONLY | attr::NOSUID | attr::NOEXEC, false)?;
            attach(&node, root, target)
        }
        Entry::Writable { target } => {
            // A mount of its own stays writable when the root mount is sealed.
            let own = copy_tree(root, target)?;
            attach(&own, root, target)
        }
        Entry::Kept { tree, target } => attach(trees.get(*tree).and_then(Option::as_ref).ok_or(Errno::BADF)?, root, target),
        Entry::Proc { target } => {
            // Before the old root is detached: afterwards "mount too revealing" (EPERM).
            let context = fsopen(c"proc", FsOpenFlags::FSOPEN_CLOEXEC)?;
            fsconfig_create(&context)?;
            let placed = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, INSIDE | MountAttrFlags::MOUNT_ATTR_NOEXEC)?;
            attach(&placed, root, target)?;
            // Still writable, for the inner user namespace's maps and counts.
            made.proc = Some(placed);
            Ok(())
        }
        Entry::Devpts { target } => {
            let context = fsopen(c"devpts", FsOpenFlags::FSOPEN_CLOEXEC)?;
            // Not gid=5: that group is not mapped (EINVAL).
            fsconfig_set_string(&context, c"mode", c"0620")?;
            fsconfig_set_string(&context, c"ptmxmode", c"0666")?;
            fsconfig_create(&context)?;
            let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NOEXEC;
            attach(fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?, root, target)
        }
        Entry::Mask { target } => {
            match statat(root, target.as_c_str(), AtFlags::SYMLINK_NOFOLLOW) {
                Ok(_) => cover(root, root, MASK_FILE, target),
                // This kernel has no such file.
                Err(Errno::NOENT) => Ok(()),
                Err(errno) => Err(errno),
            }
        }
        Entry::Cover { target, text } => {
            write_file(root, COVER_FILE, 0o444, text)?;
            cover(root, root, COVER_FILE, target)?;
            unlinkat(root, COVER_FILE, AtFlags::empty())
        }
        Entry::Pipe { target } => {
            // Of the code's own owner, who may then do nothing but write: nobody who is of
            // the run reads what another process of it has said.
            mknodat(root, target.as_c_str(), FileType::Fifo, Mode::from_raw_mode(0o600), 0)?;
            // To write as well, so that it does not hang up with each writer.
            let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let pipe = openat(root, target.as_c_str(), flags, Mode::empty())?;
            rustix::fs::fchmod(&pipe, Mode::from_raw_mode(0o200))?;
            made.modules = Some(pipe);
            Ok(())
        }
        Entry::StandIns => {
            mknodat(root, HIDDEN_FILE, FileType::RegularFile, Mode::empty(), 0)?;
            mknodat(root, MASK_FILE, FileType::RegularFile, Mode::from_raw_mode(0o444), 0)?;
            mkdirat(root, HIDDEN_DIRECTORY, Mode::empty())
        }
    }
}

/// Lays a read-only copy of one of the root's own files over `target`.
fn cover(root: &OwnedFd, below: &OwnedFd, stand_in: &CStr, target: &CStr) -> Result<(), Errno> {
    let copy = copy_tree(root, stand_in)?;
    stockade_sys::mount::set_attributes(&copy, attr::RDONLY | attr::NOSUID | attr::NODEV | attr::NOEXEC, false)?;
    attach(&copy, below, target)
}

fn write_file(root: &OwnedFd, target: &CStr, mode: u32, mut text: &[u8]) -> Result<OwnedFd, Errno> {
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
    let file = openat(root, target, flags, Mode::from_raw_mode(mode))?;
    while !text.is_empty() {
        let written = rustix::io::write(&file, text)?;
        text = text.get(written..).unwrap_or_default();
    }
    Ok(file)
}

/// Mounts scratch at its place and returns its root.
fn mount_scratch(prepared: &Prepared, layers: Layers, second: &mut impl Iterator<Item = OwnedFd>, root: &OwnedFd) -> Outcome<OwnedFd> {
    let flags = if layers.keep(Layer::ScratchFlags) { INSIDE } else { MountAttrFlags::empty() };
    let scratch = match &prepared.scratch {
        PreparedScratch::Private { size, inodes } => new_tmpfs(size.as_deref(), inodes.as_deref(), c"0755", flags).at(Step::Scratch)?,
        // Root's is idmapped already, which only the initial user namespace's root may do; a
        // session's is its own.
        PreparedScratch::Tree => second.next().ok_or(Errno::BADF).at(Step::Scratch)?,
        // Rootless: a descriptor of the host's mount namespace cannot be copied (EINVAL),
        // so it is opened again here, and must be the directory that was checked.
        PreparedScratch::Path { path, device, inode } => {
            let again = copy_tree(CWD, path).at(Step::Scratch)?;
            let found = rustix::fs::fstat(&again).at(Step::Scratch)?;
            if (found.st_dev, found.st_ino) != (*device, *inode) {
                return Err(Errno::STALE).at(Step::Scratch);
            }
            again
        }
    };
    let read_only = if prepared.scratch_read_only { attr::RDONLY } else { 0 };
    stockade_sys::mount::set_attributes(&scratch, u64::from(flags.bits()) | read_only, true).at(Step::Scratch)?;
    attach(&scratch, root, &prepared.scratch_target).at(Step::Scratch)?;
    for (index, rule) in prepared.scratch_rules.iter().enumerate() {
        let done = match rule.stand_in() {
            Some(true) => cover(root, &scratch, HIDDEN_DIRECTORY, rule.path()),
            Some(false) => cover(root, &scratch, HIDDEN_FILE, rule.path()),
            None => copy_tree(&scratch, rule.path()).and_then(|copy| {
                stockade_sys::mount::set_attributes(&copy, attr::RDONLY | attr::NOSUID | attr::NODEV, true)?;
                attach(&copy, &scratch, rule.path())
            }),
        };
        done.at_entry(Step::ScratchRule, index)?;
    }
    Ok(scratch)
}

/// Writes a program into the root and takes its name away again: a file of this run
/// alone, through which nothing on the host can be reached.
fn place_program(root: &OwnedFd, bytes: &[u8]) -> Result<OwnedFd, Errno> {
    const NAME: &CStr = c".executor";
    // Closed before the exec, which refuses a file open for writing (ETXTBSY).
    drop(write_file(root, NAME, 0o500, bytes)?);
    let program = openat(root, NAME, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    unlinkat(root, NAME, AtFlags::empty())?;
    Ok(program)
}

/// The two ends of a terminal of the sandbox's own devpts.
struct Terminal {
    master: OwnedFd,
    slave: OwnedFd,
}

fn open_terminal() -> Result<Terminal, Errno> {
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
    let master = open(c"/dev/pts/ptmx", flags, Mode::empty())?;
    rustix::pty::unlockpt(&master)?;
    // The first terminal of a fresh instance.
    let slave = open(c"/dev/pts/0", flags, Mode::empty())?;
    Ok(Terminal { master, slave })
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
        // While we still own the outer namespace: its counts bind whatever is made below it.
        // Without one they would be the host's.
        if prepared.user_namespaces == UserNamespaces::Nested && shared.layers.keep(Layer::NamespaceCounts) {
            for (index, (file, value)) in NAMESPACE_COUNTS.iter().enumerate() {
                write_proc(&proc, file, value).at_entry(Step::NamespaceLimits, index)?;
            }
        }
        // Before the inner user namespace, whose maximum it becomes: pending signals are
        // counted for the user who made the namespaces, root perhaps, on the whole host.
        let (_, hard) = process::rlimit(RLIMIT_SIGPENDING).at(Step::NamespaceLimits)?;
        process::set_rlimit(RLIMIT_SIGPENDING, Some(hard.min(MOST_PENDING_SIGNALS))).at(Step::NamespaceLimits)?;
        // The inner user namespace comes before the drop, because it refills the sets,
        // the bounding set too. From here on mounts, host name and network of the outer
        // one are out of reach for any capability.
        let sealed = if shared.layers.keep(Layer::ReadOnlyProc) { attr::RDONLY } else { 0 };
        match prepared.user_namespaces {
            UserNamespaces::Nested if shared.layers.keep(Layer::InnerUserNamespace) => enter_inner_namespace(prepared, &proc, sealed)?,
            _ => stockade_sys::mount::set_attributes(&proc, sealed, false).at(Step::SealRoot)?,
        }
        rustix::process::chdir(prepared.scratch_path.as_c_str()).at(Step::WorkingDirectory)?;
        umask(Mode::from_raw_mode(0o022));
        // 1, not 0: a piped core_pattern ignores 0, and 1 makes the kernel skip it. A
        // hard limit of 0 that the launcher could not raise stays.
        let (_, hard) = process::rlimit(RLIMIT_CORE).at(Step::CoreLimit)?;
        process::set_rlimit(RLIMIT_CORE, Some(hard.min(1))).at(Step::CoreLimit)?;
        // Each needs CAP_SETPCAP, which the last of them gives up.
        if shared.layers.keep(Layer::Capabilities) {
            #[cfg(feature = "ablation")]
            let kept = (!shared.layers.keep(Layer::NoNewPrivs)).then(keep_over_exec).transpose().at(Step::Capabilities)?;
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
        // After the last mount call, which a Landlock domain forbids.
        if prepared.landlock_handled != 0 {
            restrict(prepared, std::iter::once(&executor).chain(&image))?;
        }
        // setns has cleared it once more.
        set_parent_process_death_signal(Some(Signal::KILL)).at(Step::DeathSignal)?;
        still_alive(&lifeline)?;
        // The code sees as many CPUs as its quota is worth. Which, the scheduler has chosen:
        // the one on which we are.
        if let Some(usable) = shared.cpus.as_ref().filter(|usable| (prepared.cpus as u64) < u64::from(usable.count())) {
            sched_setaffinity(None, &some_cpus(usable, sched_getcpu(), prepared.cpus)).at(Step::Cpus)?;
        }
        // Last: what follows must pass the filter itself.
        let listener = load_filter(prepared)?;
        Ok(Confined { shared, lifeline, for_executor, root, scratch, executor, image, listener, modules, terminal })
    }
}

/// In place of no_new_privs, what else lets the filter and the payload's Landlock be put on.
#[cfg(feature = "ablation")]
fn keep_over_exec() -> Result<(), Errno> {
    use rustix::thread::{CapabilitySet, CapabilitySets, configure_capability_in_ambient_set, set_capabilities};
    let one = CapabilitySet::SYS_ADMIN;
    // Dropping the bounding set still needs CAP_SETPCAP.
    let held = one | CapabilitySet::SETPCAP;
    set_capabilities(None, CapabilitySets { effective: held, permitted: held, inheritable: one })?;
    configure_capability_in_ambient_set(one, true)
}

/// What the process that makes the inner user namespace works with, and leaves.
struct Maker<'p> {
    prepared: &'p Prepared,
    proc: &'p OwnedFd,
    made: Cell<Option<Result<OwnedFd, Errno>>>,
}

impl Maker<'_> {
    /// In the new namespace: writes its maps, which is allowed for one's own ids.
    fn make(&self) -> i32 {
        let made = write_proc(self.proc, c"self/setgroups", b"deny")
            .and_then(|()| write_proc(self.proc, c"self/gid_map", self.prepared.inner_gid_map.as_bytes()))
            .and_then(|()| write_proc(self.proc, c"self/uid_map", self.prepared.inner_uid_map.as_bytes()))
            .and_then(|()| openat(self.proc, c"self/ns/user", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()));
        self.made.set(Some(made));
        0
    }
}

/// Has a short-lived process make the inner user namespace, and enters it.
fn enter_inner_namespace(prepared: &Prepared, proc: &OwnedFd, sealed: u64) -> Outcome<()> {
    let step = Step::InnerUserNamespace;
    let maker = Maker { prepared, proc, made: Cell::new(None) };
    // SAFETY: it makes system calls only.
    #[expect(unsafe_code, reason = "a second process in our memory, while we stand still")]
    let process = unsafe { clone::in_namespaces(flags::NEWUSER, Maker::make, &maker) }.at(step)?;
    waitpid(Pid::from_raw(process), WaitOptions::empty()).map(drop).at(step)?;
    let namespace = maker.made.take().unwrap_or(Err(Errno::CHILD)).at(step)?;
    // The last use of the outer namespace's rights, and of a writable /proc.
    stockade_sys::mount::set_attributes(proc, sealed, false).at(Step::SealRoot)?;
    move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::User)).at(step)?;
    set_dumpable_behavior(DumpableBehavior::Dumpable).at(step)
}

const RLIMIT_CORE: u32 = 4;

/// Makes room for the limit of core dumps that the sandbox will set: sudo hands on a hard
/// limit of 0. Without CAP_SYS_RESOURCE it stays, and forbids all but piped dumps.
pub(crate) fn raise_core_limit() -> Result<(), Errno> {
    let (_, hard) = process::rlimit(RLIMIT_CORE)?;
    match (hard < 1).then(|| process::set_rlimit(RLIMIT_CORE, Some(1))) {
        None | Some(Ok(()) | Err(Errno::PERM)) => Ok(()),
        Some(Err(errno)) => Err(errno),
    }
}

const RLIMIT_SIGPENDING: u32 = 11;
const MOST_PENDING_SIGNALS: u64 = 512;

/// One inner user namespace and no further; few inotify objects (user_namespaces(7)
/// and inotify(7): they are counted for each user namespace and its ancestors).
const NAMESPACE_COUNTS: [(&CStr, &[u8]); 3] =
    [(c"sys/user/max_user_namespaces", b"1"), (c"sys/user/max_inotify_instances", b"8"), (c"sys/user/max_inotify_watches", b"8192")];

fn write_proc(proc: &OwnedFd, file: &CStr, value: &[u8]) -> Result<(), Errno> {
    let file = openat(proc, file, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
    rustix::io::write(&file, value).map(drop)
}

fn restrict<'f>(prepared: &Prepared, programs: impl Iterator<Item = &'f OwnedFd>) -> Outcome<()> {
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
fn load_filter(prepared: &Prepared) -> Outcome<Option<OwnedFd>> {
    match seccomp::load_filter_with_listener(&prepared.filter) {
        Ok(listener) => Ok(Some(listener)),
        Err(Errno::BUSY) => seccomp::load_filter(&prepared.filter_without_listener).map(|()| None).at(Step::Seccomp),
        Err(errno) => Err(errno).at(Step::Seccomp),
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
}

impl Confined<'_> {
    fn exec(self) -> Outcome<Infallible> {
        self.hand_over().at(Step::HandOver)?;
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
    /// use it will read, and its end of what watched interpreters write to.
    fn hand_over(&self) -> Result<(), Errno> {
        let mut fds = [self.root.as_fd(); MOST_HANDED_OVER];
        let mut tags = [b'r', 0, 0, 0, 0];
        let more = [
            (b's', Some(&self.scratch)),
            (b'l', self.listener.as_ref()),
            (b't', self.terminal.as_ref().map(|terminal| &terminal.master)),
            (b'm', self.modules.as_ref()),
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

/// Descriptors that the launcher gets.
pub(crate) const MOST_HANDED_OVER: usize = 5;
const LOWEST_FREE: i32 = 16;
/// Where the executor finds the image of the payload's program.
const IMAGE: i32 = 6;
