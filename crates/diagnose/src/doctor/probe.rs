//! Single features of the kernel, each tried in a separate child process.
//!
//! A probe does what the privileged sequence does with that feature and nothing else, so
//! that its errno belongs to it alone. The child ends with the errno as its status; it
//! changes nothing outside its own namespaces. A probe explains; whether the policy can
//! be enforced is shown by a real run and not from here.

use std::fmt;

use nix::sched::CloneFlags;
use rustix::{
    fd::{AsFd, AsRawFd, OwnedFd},
    fs::{CWD, Mode, OFlags, mkdirat, open},
    io::Errno,
    mount::{
        FsMountFlags, FsOpenFlags, MountAttrFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags, fsconfig_create,
        fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, mount_change, move_mount, open_tree, unmount,
    },
    pipe::{PipeFlags, pipe_with},
    process::{DumpableBehavior, Signal, WaitId, WaitIdOptions, pidfd_send_signal, set_dumpable_behavior, waitid},
};
use stockade_policy::plan::UserNamespaces;
use stockade_sys::{
    clone::{self, Child, flags},
    cred, landlock,
    mount::{attr, set_attributes},
    net, process,
    seccomp::{self, Instruction},
};

/// Why a probe failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// The kernel's answer.
    Refused(Errno),
    /// The child was killed, as an outer filter may do.
    Killed(i32),
}

impl From<Errno> for Failure {
    fn from(errno: Errno) -> Self {
        Failure::Refused(errno)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Refused(errno) => {
                let number = errno.raw_os_error();
                let text = std::io::Error::from_raw_os_error(number).to_string();
                // "Operation not permitted (os error 1)"
                let text = text.split(" (os error").next().unwrap_or_default().to_lowercase();
                write!(f, "{text} ({:?})", nix::errno::Errno::from_raw(number))
            }
            Failure::Killed(signal) => write!(f, "the process that tried was killed by signal {signal}"),
        }
    }
}

impl Failure {
    /// The errno, where there is one.
    pub(super) fn errno(self) -> Option<Errno> {
        match self {
            Failure::Refused(errno) => Some(errno),
            Failure::Killed(_) => None,
        }
    }
}

pub(super) type Probe = Result<(), Failure>;

/// The ids that a run would have.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ids {
    /// Whether it has user namespaces.
    pub(super) user_namespaces: UserNamespaces,
    /// Uid and gid inside.
    pub(super) inside: (u32, u32),
    /// Uid and gid on the host.
    pub(super) outside: (u32, u32),
    /// Root launches.
    pub(super) privileged: bool,
}

/// The process's end: its status is the errno, 0 for none.
fn outcome_of(child: &Child) -> Probe {
    loop {
        return match waitid(WaitId::PidFd(child.pidfd.as_fd()), WaitIdOptions::EXITED) {
            Err(Errno::INTR) => continue,
            Err(errno) => Err(errno.into()),
            Ok(None) => Err(Errno::CHILD.into()),
            Ok(Some(status)) => match (status.exit_status(), status.terminating_signal()) {
                (Some(0), _) => Ok(()),
                (Some(errno), _) => Err(Errno::from_raw_os_error(errno).into()),
                (None, signal) => Err(Failure::Killed(signal.unwrap_or(0))),
            },
        };
    }
}

fn status_of(result: Result<(), Errno>) -> i32 {
    result.err().map_or(0, Errno::raw_os_error)
}

/// Runs `act` in a child without new namespaces.
fn apart(act: impl FnOnce() -> Result<(), Errno>) -> Probe {
    outcome_of(&clone::clone_process(0, || status_of(act()))?)
}

/// Does `act` in a child in new namespaces, with the ids of a run.
fn inside(namespaces: u64, ids: Ids, act: impl FnOnce() -> Result<(), Errno>) -> Probe {
    let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
    let user = if ids.user_namespaces == UserNamespaces::Nested { flags::NEWUSER } else { 0 };
    let child = clone::clone_process(user | namespaces, || status_of(take_on(&read, &write, ids).and_then(|()| act())))?;
    let released = write_maps(child.pid, ids).and_then(|()| rustix::io::write(&write, b"0").map(drop));
    if released.is_err() {
        // It may have ended by itself.
        let _ended = pidfd_send_signal(&child.pidfd, Signal::KILL);
    }
    // Ends a child that still waits for its maps and could not be killed.
    drop(write);
    let outcome = outcome_of(&child);
    released?;
    outcome
}

/// Waits for the maps, then takes on the ids that they name.
fn take_on(read: &OwnedFd, write: &OwnedFd, ids: Ids) -> Result<(), Errno> {
    let ours = write.as_raw_fd().unsigned_abs();
    process::close_range(ours, ours)?;
    let mut byte = [0];
    if rustix::io::read(read, &mut byte)? != 1 {
        return Err(Errno::PIPE);
    }
    if ids.privileged {
        cred::set_groups(&[])?;
    }
    if ids.user_namespaces == UserNamespaces::Missing {
        cred::keep_permitted()?;
    }
    cred::set_group(ids.inside.1)?;
    cred::set_user(ids.inside.0)?;
    if ids.user_namespaces == UserNamespaces::Missing {
        // CAP_NET_ADMIN besides, for the loopback interface, which a run brings up before.
        cred::retain(&[cred::CAP_SYS_ADMIN, cred::CAP_SETPCAP, 12])?;
    }
    set_dumpable_behavior(DumpableBehavior::Dumpable)
}

fn write_maps(pid: i32, ids: Ids) -> Result<(), Errno> {
    if ids.user_namespaces == UserNamespaces::Missing {
        return Ok(());
    }
    let write = |file: &str, text: String| {
        std::fs::write(format!("/proc/{pid}/{file}"), text).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
    };
    if !ids.privileged {
        write("setgroups", String::from("deny"))?;
    }
    write("uid_map", format!("{} {} 1", ids.inside.0, ids.outside.0))?;
    write("gid_map", format!("{} {} 1", ids.inside.1, ids.outside.1))
}

/// Whether a child can be made at all, as every probe and every run does it.
pub(super) fn child() -> Probe {
    apart(|| Ok(()))
}

/// A user namespace in which a capability counts for something: AppArmor lets an
/// unconfined program make one, and takes its capabilities away.
pub(super) fn user_namespace(ids: Ids) -> Probe {
    inside(0, ids, cred::drop_bounding_set)
}

/// A host name of one's own.
pub(super) fn host_name(ids: Ids) -> Probe {
    inside(flags::NEWUTS, ids, || rustix::system::sethostname(b"probe"))
}

/// A second one in the first, with its maps.
pub(super) fn nested_user_namespace(ids: Ids) -> Probe {
    inside(0, ids, || {
        unshare(CloneFlags::CLONE_NEWUSER)?;
        set_dumpable_behavior(DumpableBehavior::Dumpable)?;
        let write =
            |file: &str, text: String| std::fs::write(file, text).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO));
        write("/proc/self/setgroups", String::from("deny"))?;
        write("/proc/self/gid_map", format!("{0} {0} 1", ids.inside.1))?;
        write("/proc/self/uid_map", format!("{0} {0} 1", ids.inside.0))
    })
}

/// Each kind of namespace beside the user namespace, made as the sequence makes it: the
/// network and cgroup namespaces by the child itself.
pub(super) fn namespaces(ids: Ids) -> [(&'static str, Probe); 6] {
    let at_birth = |kind| inside(kind, ids, || Ok(()));
    let later = |kind| inside(0, ids, || unshare(kind));
    [
        ("mnt", at_birth(flags::NEWNS)),
        ("pid", at_birth(flags::NEWPID)),
        ("net", later(CloneFlags::CLONE_NEWNET)),
        ("uts", at_birth(flags::NEWUTS)),
        ("ipc", at_birth(flags::NEWIPC)),
        ("cgroup", later(CloneFlags::CLONE_NEWCGROUP)),
    ]
}

fn unshare(namespaces: CloneFlags) -> Result<(), Errno> {
    nix::sched::unshare(namespaces).map_err(|errno| Errno::from_raw_os_error(errno as i32))
}

fn private_mounts() -> Result<(), Errno> {
    mount_change(c"/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
}

const PLAIN: MountAttrFlags = MountAttrFlags::MOUNT_ATTR_NOSUID.union(MountAttrFlags::MOUNT_ATTR_NODEV);

fn new_tmpfs() -> Result<OwnedFd, Errno> {
    let context = fsopen(c"tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(&context, c"size", c"65536")?;
    fsconfig_create(&context)?;
    fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, PLAIN)
}

/// A tmpfs, a read-only bind, and the pivot into them.
pub(super) fn root_file_system(ids: Ids) -> Probe {
    inside(flags::NEWNS, ids, || {
        private_mounts()?;
        let root = new_tmpfs()?;
        move_mount(&root, c"", CWD, c"/", MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?;
        mkdirat(&root, c"usr", Mode::from_raw_mode(0o755))?;
        let tree =
            open_tree(CWD, c"/usr", OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_RECURSIVE)?;
        set_attributes(&tree, attr::RDONLY | attr::NOSUID | attr::NODEV, true)?;
        move_mount(&tree, c"", &root, c"usr", MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?;
        rustix::process::fchdir(&root)?;
        rustix::process::pivot_root(c".", c".")?;
        unmount(c".", UnmountFlags::DETACH)
    })
}

/// An overlay of two directories, as an image and what lies above it are.
pub(super) fn overlay(ids: Ids) -> Probe {
    inside(flags::NEWNS, ids, || {
        private_mounts()?;
        let root = new_tmpfs()?;
        move_mount(&root, c"", CWD, c"/", MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?;
        mkdirat(&root, c"upper", Mode::from_raw_mode(0o755))?;
        mkdirat(&root, c"lower", Mode::from_raw_mode(0o755))?;
        rustix::process::fchdir(&root)?;
        let context = fsopen(c"overlay", FsOpenFlags::FSOPEN_CLOEXEC)?;
        fsconfig_set_string(&context, c"lowerdir", c"upper:lower")?;
        fsconfig_set_flag(&context, c"userxattr")?;
        fsconfig_create(&context)?;
        fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, PLAIN).map(drop)
    })
}

/// A fresh proc, which the kernel refuses where the host's is partly covered.
pub(super) fn fresh_proc(ids: Ids) -> Probe {
    inside(flags::NEWNS | flags::NEWPID, ids, || {
        let context = fsopen(c"proc", FsOpenFlags::FSOPEN_CLOEXEC)?;
        fsconfig_create(&context)?;
        fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, PLAIN | MountAttrFlags::MOUNT_ATTR_NOEXEC).map(drop)
    })
}

/// A devpts of one's own, for `run` on a terminal.
pub(super) fn terminals(ids: Ids) -> Probe {
    inside(flags::NEWNS, ids, || {
        let context = fsopen(c"devpts", FsOpenFlags::FSOPEN_CLOEXEC)?;
        fsconfig_set_string(&context, c"mode", c"0620")?;
        fsconfig_set_string(&context, c"ptmxmode", c"0666")?;
        fsconfig_create(&context)?;
        fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NOEXEC).map(drop)
    })
}

/// A device node of the host, copied and opened.
pub(super) fn device(path: &std::ffi::CStr, ids: Ids) -> Probe {
    inside(flags::NEWNS, ids, || {
        private_mounts()?;
        let node = open_tree(CWD, path, OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC)?;
        set_attributes(&node, attr::RDONLY | attr::NOSUID | attr::NOEXEC, false)?;
        match open(path, OFlags::RDONLY | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty()) {
            // /dev/tty without a controlling terminal.
            Ok(_) | Err(Errno::NXIO) => Ok(()),
            Err(errno) => Err(errno),
        }
    })
}

/// The loopback interface of a new network namespace.
pub(super) fn loopback(ids: Ids) -> Probe {
    inside(flags::NEWNET, ids, net::bring_up_loopback)
}

/// A session keyring of one's own; container engines forbid keyctl(2).
pub(super) fn keyring() -> Probe {
    apart(cred::join_new_session_keyring)
}

/// Answers clone3 with ENOSYS and allows everything else: struct sock_filter, four times.
const FILTER: [Instruction; 4] = [
    Instruction(0x20),                            // load the system call's number
    Instruction(0x15 | 1 << 24 | 435 << 32),      // not clone3: over the next one
    Instruction(0x06 | (0x0005_0000 | 38) << 32), // SECCOMP_RET_ERRNO, ENOSYS
    Instruction(0x06 | 0x7fff_0000 << 32),        // SECCOMP_RET_ALLOW
];

/// A filter that is then seen to answer.
pub(super) fn filter() -> Probe {
    apart(|| {
        rustix::thread::set_no_new_privs(true)?;
        seccomp::load_filter(&FILTER)?;
        if process::probe_clone3() == Errno::NOSYS { Ok(()) } else { Err(Errno::NOMSG) }
    })
}

/// A filter with a listener; EBUSY where an outer supervisor has one.
pub(super) fn listener() -> Probe {
    apart(|| {
        rustix::thread::set_no_new_privs(true)?;
        seccomp::load_filter_with_listener(&FILTER).map(drop)
    })
}

/// A ruleset that allows nothing, and an act that it must refuse.
pub(super) fn landlock() -> Probe {
    let abi = landlock::abi();
    apart(|| {
        // Where there is no ABI, the errno says why.
        let ruleset = landlock::create_ruleset(landlock::access::handled(abi.max(1)), landlock::scopes(abi))?;
        rustix::thread::set_no_new_privs(true)?;
        landlock::restrict_self(&ruleset)?;
        match open(c"/", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()) {
            Err(Errno::ACCESS) => Ok(()),
            Err(errno) => Err(errno),
            Ok(_) => Err(Errno::NOMSG),
        }
    })
}
