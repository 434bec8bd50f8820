//! Why a run could not begin: which part failed, at what, with which errno, and the remedy.
//!
//! Each way to fail is a variant with its own words. A step of the sandbox's set-up is
//! identified by its [`Step`]. What a failure means for the caller is not decided here.

mod step;

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use rustix::{
    fs::{AtFlags, CWD, StatxAttributes, StatxFlags, statx},
    io::Errno,
};
use stockade_egress::gate::GateError;
use stockade_protocol::step::Step;

use crate::IdmapError;

pub use step::StepFailure;

/// What lets a run begin in a container of the usual engines, whose filter and covered files
/// in /proc forbid it.
pub const CONTAINER: &str = "start the container with --security-opt seccomp=unconfined --security-opt apparmor=unconfined --security-opt systempaths=unconfined, or use the host";

/// The reason of a run that was ended because its output could not be passed on.
pub const OUTPUT_UNWRITABLE: &str = "output_unwritable";

/// The part of the launcher that met the failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// Pipes, job, strings.
    Prepare,
    /// Cgroups.
    Cgroup,
    /// Namespaces.
    Clone,
    /// Uid and gid maps.
    Maps,
    /// The registry of runs.
    Registry,
    /// A step behind the clone.
    Step(Step),
    /// The receipt.
    Receipt,
    /// The egress gate.
    Egress,
    /// The executor or its pipe.
    Executor,
    /// The file systems that a session keeps.
    Volumes,
    /// Where the program's output goes.
    Output,
    /// The restorer, which makes a copy of a memory image.
    Restore,
    /// The layers of an image that root's code may change.
    WritableRoot,
}

impl ErrorKind {
    /// A stable identifier for the result's `reason`.
    pub const fn reason(self) -> &'static str {
        match self {
            ErrorKind::Prepare => "prepare_failed",
            ErrorKind::Cgroup => "cgroup_failed",
            ErrorKind::Clone => "namespaces_refused",
            ErrorKind::Maps => "maps_refused",
            ErrorKind::Registry => "registry_failed",
            ErrorKind::Step(Step::RootEntry) => "root_entry_failed",
            ErrorKind::Step(_) | ErrorKind::Restore => "setup_step_failed",
            ErrorKind::Receipt => "receipt_mismatch",
            ErrorKind::Egress => "egress_gate_failed",
            ErrorKind::Executor => "executor_vanished",
            ErrorKind::Volumes => "session_store_failed",
            ErrorKind::Output => OUTPUT_UNWRITABLE,
            ErrorKind::WritableRoot => "writable_root_unavailable",
        }
    }
}

/// Why a run could not begin.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// A system call of the launcher failed.
    #[error("{attempt}: {}", describe(*errno))]
    System {
        /// The part that made it.
        kind: ErrorKind,
        /// What it was made for.
        attempt: &'static str,
        /// The kernel's answer.
        errno: Errno,
    },
    /// clone3 was refused.
    #[error("make the namespaces: {}{}", describe(*errno), clone_remedy(*privileged, *errno))]
    Clone {
        /// The launcher is root.
        privileged: bool,
        /// The kernel's answer.
        errno: Errno,
    },
    /// The kernel keeps another map of ids than was written.
    #[error("the kernel keeps {file} as `{}`, not `{} {} 1`", kept.trim(), ids.0, ids.1)]
    Maps {
        /// `uid_map` or `gid_map`.
        file: &'static str,
        /// What is read back.
        kept: String,
        /// The id inside and outside.
        ids: (u32, u32),
    },
    /// The same, where it was about a path.
    #[error("{attempt} {}: {}", path.display(), describe(*errno))]
    Path {
        /// The part that made it.
        kind: ErrorKind,
        /// What it was made for.
        attempt: &'static str,
        /// On what.
        path: PathBuf,
        /// The kernel's answer.
        errno: Errno,
    },
    /// The plan and what the engine gives beside it do not belong together.
    #[error(transparent)]
    Inputs(#[from] InputsError),
    /// See [`CgroupError`].
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
    /// See [`RegistryError`].
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// See [`StepFailure`].
    #[error(transparent)]
    Step(#[from] StepFailure),
    /// See [`ReceiptError`].
    #[error(transparent)]
    Receipt(#[from] ReceiptError),
    /// The gate's namespace cannot be set up.
    #[error("set up the egress gate: {0}; `stockade doctor` says more")]
    EgressSetup(stockade_egress::setup::SetupError),
    /// The gate failed.
    #[error(transparent)]
    Gate(#[from] GateError),
    /// See [`ExecutorError`].
    #[error(transparent)]
    Executor(#[from] ExecutorError),
    /// The restorer made no copy, and nothing of the program ran.
    #[error("no copy could be made of the memory image: {}", describe(*.0))]
    Restore(Errno),
    /// The files of an image of root's cannot be the code's.
    #[error(
        "[filesystem] writable_root: the image's layers cannot be idmapped, and code cannot change files of root: {0}; or run as an ordinary user, or remove `writable_root` from the policy"
    )]
    LayerIdmap(IdmapError),
    /// The plan has more writable places than a session can keep.
    #[error("a session keeps at most {0} writable places beside scratch")]
    TooManyVolumes(usize),
}

impl LaunchError {
    /// A failed system call of the launcher, for `map_err`.
    pub(crate) fn system(kind: ErrorKind, attempt: &'static str) -> impl Fn(Errno) -> LaunchError + Copy {
        move |errno| LaunchError::System { kind, attempt, errno }
    }

    /// The same about a path.
    pub(crate) fn path(kind: ErrorKind, attempt: &'static str, path: &Path) -> impl Fn(Errno) -> LaunchError + use<> {
        let path = path.to_path_buf();
        move |errno| LaunchError::Path { kind, attempt, path: path.clone(), errno }
    }

    /// The part that failed.
    pub fn kind(&self) -> ErrorKind {
        match self {
            LaunchError::System { kind, .. } | LaunchError::Path { kind, .. } => *kind,
            LaunchError::Clone { .. } => ErrorKind::Clone,
            LaunchError::Maps { .. } => ErrorKind::Maps,
            LaunchError::Inputs(InputsError::AnotherPlan) => ErrorKind::Clone,
            LaunchError::Inputs(_) => ErrorKind::Prepare,
            LaunchError::Cgroup(_) => ErrorKind::Cgroup,
            LaunchError::Registry(_) => ErrorKind::Registry,
            LaunchError::Step(StepFailure { step: Step::Receipt, .. }) | LaunchError::Receipt(_) => ErrorKind::Receipt,
            LaunchError::Step(failure) => ErrorKind::Step(failure.step),
            LaunchError::EgressSetup(_) | LaunchError::Gate(_) => ErrorKind::Egress,
            LaunchError::Executor(_) => ErrorKind::Executor,
            LaunchError::Restore(_) => ErrorKind::Restore,
            LaunchError::TooManyVolumes(_) => ErrorKind::Volumes,
            LaunchError::LayerIdmap(_) => ErrorKind::WritableRoot,
        }
    }

    /// The errno of a failed step.
    pub fn step_errno(&self) -> Option<Errno> {
        match self {
            LaunchError::Step(failure) => Some(failure.errno),
            _ => None,
        }
    }
}

/// What of a plan and its inputs does not belong together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InputsError {
    /// The first process was cloned for another.
    #[error("the sandbox was begun for another plan")]
    AnotherPlan,
    /// Only one of them is a session's.
    #[error("the plan and its inputs disagree on there being a session")]
    Session,
    /// Only one of them has a carried program.
    #[error("the plan and its inputs disagree on whether Stockade carries the program")]
    CarriedProgram,
    /// The plan protects more than was found.
    #[error("the plan and its inputs disagree on what scratch holds")]
    Scratch,
    /// The scratch's idmap is not the plan's.
    #[error("the plan and its inputs disagree on the ids of files in scratch")]
    Idmap,
    /// Only one of them has a stdin.
    #[error("the sandbox and what is to be run in it disagree on there being a stdin")]
    Stdin,
    /// More directories are to be shown than can be sent.
    #[error("the run needs {0} directories of the caller's own; at most {most} fit", most = crate::messages::MAX_SENT_MOUNTS)]
    TooManyMounts(usize),
    /// An image has more layers than are laid over one another.
    #[error("the image has {0} layers, and at most {most} are laid over one another; import it again, which merges them", most = stockade_policy::plan::MAX_OVERLAY_LAYERS)]
    TooManyLayers(usize),
}

/// Why a run has no cgroup, or not the plan's.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// v1: a directory cannot be made.
    #[error("make cgroup {}: {}; the launcher must be able to write there", path.display(), describe(*errno))]
    Make {
        /// Where it was to be.
        path: PathBuf,
        /// The kernel's answer.
        errno: Errno,
    },
    /// v2: controllers cannot be handed down to a run's cgroup.
    #[error("hand {controllers} down from cgroup {}: {}", path.display(), describe(*errno))]
    HandDown {
        /// As they are written, such as `+memory +pids`.
        controllers: String,
        /// The cgroup that has them.
        path: PathBuf,
        /// The kernel's answer.
        errno: Errno,
    },
    /// A limit cannot be set.
    #[error("set cgroup limit {file} to {value}: {}", describe(*errno))]
    Limit {
        /// The limit's file.
        file: &'static str,
        /// What was written.
        value: String,
        /// The kernel's answer.
        errno: Errno,
    },
    /// A limit is kept otherwise than it was written.
    #[error("set cgroup limit {file} to {value}: the kernel keeps {kept}")]
    NotKept {
        /// The limit's file.
        file: &'static str,
        /// What was written.
        value: String,
        /// What is read back.
        kept: String,
    },
    /// v1: the plan has a limit of a controller that is not there.
    #[error("set cgroup limit {file}: this host mounts no v1 {controller} controller")]
    NoController {
        /// The limit's file.
        file: &'static str,
        /// Its controller.
        controller: &'static str,
    },
    /// The plan is for the other version.
    #[error("the plan's cgroup is of another kind than the host's")]
    OtherVersion,
}

/// Why a run has no place in the registry.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// Others could write to it: its files say what to remove.
    #[error(
        "the registry {} must be a directory of uid {owner} that nobody else may write to; remove it or fix its owner and mode",
        directory.display()
    )]
    Insecure {
        /// Where it is.
        directory: PathBuf,
        /// Whose it must be.
        owner: u32,
    },
    /// All records are taken.
    #[error("{0} runs are alive already; wait for one to end")]
    Full(u32),
    /// It would make two lines of one.
    #[error("the path {0:?} holds a line break")]
    LineBreak(PathBuf),
}

/// How the sandbox differs from its plan.
#[derive(Debug, thiserror::Error)]
pub enum ReceiptError {
    /// The child handed its descriptors over too early.
    #[error("the sandbox was handed over before its mounts stood")]
    NoMounts,
    /// It is in another cgroup.
    #[error("the sandbox is not in its cgroup but in {}", .0.trim().replace('\n', " "))]
    Cgroup(String),
    /// A namespace of this kind is the launcher's.
    #[error("the sandbox shares the launcher's {0} namespace")]
    SharedNamespace(&'static str),
    /// It has a user namespace too many.
    #[error("the sandbox has a user namespace that the plan goes without")]
    UserNamespace,
    /// It has a user namespace too few.
    #[error("the sandbox is still in its outer user namespace")]
    OuterUserNamespace,
    /// A mount is not as the plan says.
    #[error("the sandbox's mounts are not those of the plan ({problem}{point})")]
    Mount {
        /// What is wrong with it.
        problem: &'static str,
        /// Where it is.
        point: String,
    },
    /// A line of its status is not as the plan says.
    #[error("the sandbox has {key} {found}, not {expected}")]
    Status {
        /// The line's key.
        key: &'static str,
        /// What the kernel reports.
        found: String,
        /// What it must be.
        expected: String,
    },
}

/// How the sandbox's first process failed, or broke its protocol.
#[derive(Debug, thiserror::Error)]
pub enum ExecutorError {
    /// It failed at a step that there is not.
    #[error("the sandbox failed at an unknown step {0}")]
    UnknownStep(u16),
    /// What it sent is no event.
    #[error("the executor sent something that is no event")]
    Malformed,
    /// It sent an event of another phase.
    #[error("the executor sent an event out of turn")]
    OutOfTurn,
    /// It was ready too early.
    #[error("the executor was ready before the sandbox was handed over")]
    ReadyTooEarly,
    /// It ended during set-up and reported nothing.
    #[error("the sandbox vanished while it was being set up; the kernel's log may say why (out of memory?)")]
    VanishedInSetup,
    /// It ended and did not report the program's end.
    #[error("the executor vanished without a report: something outside killed the sandbox")]
    Vanished,
    /// It did not go on.
    #[error(
        "{missing} after {} s: the sandbox's first process was stopped from outside, gets no CPU time, or waits for a file system that does not answer; find out which (ps -o pid,stat,wchan,comm -e), then start it again",
        after.as_secs()
    )]
    Overdue {
        /// What had not come.
        missing: &'static str,
        /// How long was waited for it.
        after: Duration,
    },
}

/// An errno's name and meaning.
pub(crate) fn describe(errno: Errno) -> String {
    let text = std::io::Error::from(errno).to_string();
    // "Operation not permitted (os error 1)"
    let text = text.split(" (os error").next().unwrap_or(&text).to_lowercase();
    let name = format!("{:?}", nix::errno::Errno::from_raw(errno.raw_os_error()));
    let remedy = match errno {
        // No file that the launcher writes is large: its caller has set a limit.
        Errno::FBIG => "; files of this size are forbidden to the launcher: ulimit -f unlimited",
        Errno::MFILE => {
            "; the launcher may have too few descriptors here: raise the hard limit (ulimit -Hn), 256 are enough, and two more for each path that a view shows"
        }
        // unix(7): descriptors on their way count for all processes of a user.
        Errno::TOOMANYREFS => {
            "; more descriptors of this user are on their way than it may have open files: raise the hard limit (ulimit -Hn), or start fewer runs at a time"
        }
        Errno::NFILE => "; this host has no descriptor left: see /proc/sys/fs/file-nr and raise fs.file-max",
        _ => "",
    };
    format!("{text} ({name}){remedy}")
}

/// The errno of an error of the standard library's file functions.
pub(crate) fn errno_of(error: &std::io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

/// The remedy where clone3 is refused: the one failure that most users will meet.
fn clone_remedy(privileged: bool, errno: Errno) -> String {
    match errno {
        Errno::PERM | Errno::ACCESS => namespace_remedy(privileged),
        Errno::NOSPC => {
            "; the limit in /proc/sys/user/max_user_namespaces is used up or zero: raise it (sysctl user.max_user_namespaces=10000)".into()
        }
        Errno::INVAL => "; the kernel has no user namespaces (it needs CONFIG_USER_NS)".into(),
        Errno::NOSYS => {
            format!("; the kernel needs clone3 (Linux 5.3), or a filter around the launcher forbids it; in a container: {CONTAINER}")
        }
        // sched(7): such a process cannot fork.
        Errno::AGAIN if stockade_sys::process::has_deadline() => {
            "; stockade was started under SCHED_DEADLINE, where no process can be made: start it with another policy (chrt -o 0 stockade ...)".into()
        }
        Errno::AGAIN => "; the user's process limit is reached (ulimit -u)".into(),
        _ => String::new(),
    }
}

/// Whether the root directory is not that of a mount. A chroot into a mount's own root cannot be
/// told from the host.
fn is_chroot() -> bool {
    let root = statx(CWD, "/", AtFlags::empty(), StatxFlags::BASIC_STATS);
    root.is_ok_and(|root| {
        root.stx_attributes_mask.contains(StatxAttributes::MOUNT_ROOT) && !root.stx_attributes.contains(StatxAttributes::MOUNT_ROOT)
    })
}

/// What forbids user namespaces here.
fn namespace_remedy(privileged: bool) -> String {
    if is_chroot() {
        return String::from(
            "; stockade was started in a chroot, where the kernel makes no user namespace; change the root by pivot_root(2) instead, as systemd-nspawn and container engines do, or start it outside",
        );
    }
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    if read("/proc/sys/kernel/apparmor_restrict_unprivileged_userns").trim() == "1" && !privileged {
        return String::from(
            "; AppArmor keeps user namespaces from unconfined programs on this host: install the profile scripts/apparmor/stockade into /etc/apparmor.d and load it with `apparmor_parser -r`",
        );
    }
    if read("/proc/sys/kernel/unprivileged_userns_clone").trim() == "0" {
        return String::from("; unprivileged user namespaces are off: sysctl kernel.unprivileged_userns_clone=1");
    }
    format!("; user namespaces are forbidden here (a container's seccomp profile, or a security module); in a container: {CONTAINER}")
}
