//! Why a directory is no scratch.
//!
//! Each problem has a stable reason and, where there is one, a remedy. Whether the caller or the
//! policy is at fault is not said here.

use std::path::PathBuf;

use rustix::io::Errno;

use super::{LockMode, inspect::MAX_PROTECTED};
use crate::{
    error::describe,
    resolve::{ForeignLink, ResolveError},
};

/// A directory that cannot be a scratch.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("scratch {path}: {problem}")]
pub struct ScratchError {
    /// As named by the caller.
    pub path: String,
    /// What is wrong with it.
    pub problem: ScratchProblem,
}

/// What is wrong with a directory, and how to fix it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ScratchProblem {
    /// Its path has no root.
    #[error("in a request it must be an absolute path, such as /home/alice/data")]
    Relative,
    /// Its path can mean another directory than it seems to.
    #[error("the path must hold no `..`, NUL or line break")]
    Malformed,
    /// Its path cannot be written in a result.
    #[error("it is {0:?}, which is not UTF-8, as results and plans are; rename the directory")]
    NotUtf8(PathBuf),
    /// The caller may name none there.
    #[error("it leads to {}; it must be {}, which --scratch names, or lie below it", real.display(), ceiling.display())]
    OutsideCeiling {
        /// Its path without links.
        real: PathBuf,
        /// What `--scratch` names.
        ceiling: PathBuf,
    },
    /// A rule for the directory of `--scratch` keeps it from the code, or read-only.
    #[error("policy `{policy}` keeps {} below --scratch from the code, or read-only; name another directory there, or --scratch itself", above.display())]
    Protected {
        /// The match, below that directory.
        above: PathBuf,
        /// The policy's name.
        policy: String,
    },
    /// It is not there.
    #[error("it does not exist")]
    Missing,
    /// It is not there, and this policy makes none.
    #[error("it does not exist; make it, or let policy `{0}` make it by `[scratch] create = true`")]
    NotCreated(String),
    /// Code in it could write what the caller's programs trust.
    #[error("it is the root or a home directory itself; use a directory below it")]
    Home,
    /// It holds the registry or lies in it.
    #[error("the launcher keeps its own records there; use another directory")]
    Registry,
    /// Its files are the kernel's state.
    #[error(
        "its file system is the kernel's own (proc, sysfs, cgroup or the like), and code that writes there changes the host; use a directory on a disk or a tmpfs"
    )]
    OfKernel,
    /// It is something else.
    #[error("it is not a directory")]
    NotDirectory,
    /// What a run that was cut off with its launcher can leave behind.
    #[error("{}; if earlier code has closed it, its owner opens it by chmod u+rwx {}", describe(Errno::ACCESS), .0.display())]
    Closed(PathBuf),
    /// The kernel does not open it.
    #[error("{}", describe(*.0))]
    Unreadable(Errno),
    /// The kernel does not open a path that is shown on the caller's behalf.
    #[error("{}", describe(*.0))]
    PathUnreadable(Errno),
    /// It is root's: the policy lists no place for one, or root acts for another.
    #[error(
        "it belongs to root, and only root itself may name such a one, under a policy whose [scratch] root lists the place; give it to an ordinary user: chown -R USER:GROUP"
    )]
    RootOwned,
    /// The same of its group.
    #[error(
        "its group is root's (gid 0), and code run for root would write with that group there; give it to an ordinary group: chgrp -R GROUP"
    )]
    RootGroup,
    /// It is root's, at a place where the policy takes none.
    #[error(
        "it is root's {}, where programs of the host may trust what code has written; use a directory such as /srv/work, or name the place in [scratch] root of the policy",
        .system.as_ref().map_or_else(|| String::from("and outside of [scratch] root"), |system| format!("and lies in the system's {}", system.display()))
    )]
    SystemDirectory {
        /// Its path without links.
        real: PathBuf,
        /// The directory of the system that it is or lies in.
        system: Option<PathBuf>,
    },
    /// It is root's, and what a home's programs read.
    #[error("it holds a home, or is a hidden directory of one, whose files shells and SSH obey; use another directory")]
    RootsHome,
    /// Every user writes there.
    #[error(
        "all users may write to it (o+w), and code could read and replace their files; use a directory below it, or close it to others: chmod o-w"
    )]
    Shared,
    /// It is another user's.
    #[error("it belongs to uid {owner}, not to the caller (uid {caller})")]
    NotOwned {
        /// Whose it is.
        owner: u32,
        /// Who asks for it.
        caller: u32,
    },
    /// It holds too many paths that must be kept from the code.
    #[error(
        "more than {MAX_PROTECTED} paths in it are to be kept from the code, such as {path:?} (by [scratch] hidden and read_only of policy `{policy}`, or as sockets, fifos, devices, mounts and closed directories, with the directories above them); remove what earlier code may have left, name whole directories in the policy, or use another scratch"
    )]
    ProtectsTooMuch {
        /// The first one beyond.
        path: PathBuf,
        /// The policy's name.
        policy: String,
    },
    /// Its entries cannot be listed to the end, with the errno where there is one.
    #[error("{}; what the policy hides in it could not be found", .0.map_or_else(|| String::from("its entries cannot be listed to the end"), describe))]
    NotListed(Option<Errno>),
    /// Its mount cannot be copied.
    #[error("copy its mount: {}", describe(*.0))]
    MountCopy(Errno),
    /// The launcher cannot act with the caller's rights.
    #[error("cannot change to the caller's rights: {}", describe(*.0))]
    CallerRights(Errno),
    /// It is shown read-only.
    #[error(
        "it is or lies in {}, which this run shows read-only, since the host and the next run start what is there; use a directory beside it, or make the environment in a directory of its own", .0.display()
    )]
    Shown(PathBuf),
    /// Another run is in it, above it or below it, and one of the two must be alone.
    #[error("{}", .0.in_use())]
    InUse(LockMode),
    /// Whether another run is in it cannot be told.
    #[error(
        "whether another run is in it cannot be told: {}; such a run could change approved code before it is read: look at the registry of runs (`stockade doctor`), or use another directory", describe(*.0)
    )]
    NotLocked(Errno),
    /// It is missing and cannot be made.
    #[error("cannot make it: {}; its parent must exist and be writable by the caller", describe(*.0))]
    NotMade(Errno),
    /// Its path has a link that is not root's.
    #[error("{link}; {}", .real.as_ref().map_or_else(|| String::from("name the directory itself"), |real| format!("name it without the link: {}", real.display())))]
    ForeignLink {
        /// The link.
        link: ForeignLink,
        /// Where it leads, if the caller may find that out.
        real: Option<PathBuf>,
    },
    /// Its path leads nowhere.
    #[error(transparent)]
    Unresolved(#[from] ResolveError),
}

impl ScratchProblem {
    /// A stable identifier.
    pub fn reason(&self) -> &'static str {
        match self {
            ScratchProblem::Relative => "scratch_relative",
            ScratchProblem::Malformed | ScratchProblem::NotUtf8(_) => "scratch_malformed",
            ScratchProblem::OutsideCeiling { .. } => "scratch_outside_ceiling",
            ScratchProblem::Protected { .. } => "scratch_protected",
            ScratchProblem::Missing | ScratchProblem::NotCreated(_) | ScratchProblem::Unresolved(ResolveError::Missing(_)) => {
                "scratch_missing"
            }
            ScratchProblem::Home | ScratchProblem::RootsHome => "scratch_is_home",
            ScratchProblem::SystemDirectory { .. } => "scratch_in_system_directory",
            ScratchProblem::Shared => "scratch_shared",
            ScratchProblem::Shown(_) => "scratch_shown_read_only",
            ScratchProblem::Registry => "scratch_holds_registry",
            ScratchProblem::OfKernel => "scratch_of_kernel",
            ScratchProblem::NotDirectory | ScratchProblem::Unresolved(ResolveError::NotDirectory(_)) => "scratch_not_directory",
            ScratchProblem::Closed(_)
            | ScratchProblem::Unreadable(_)
            | ScratchProblem::NotListed(_)
            | ScratchProblem::Unresolved(ResolveError::Unreadable(..)) => "scratch_unreadable",
            ScratchProblem::PathUnreadable(_) => "path_unreadable",
            ScratchProblem::RootOwned | ScratchProblem::RootGroup => "scratch_root_owned",
            ScratchProblem::NotOwned { .. } => "scratch_not_owned",
            ScratchProblem::ProtectsTooMuch { .. } => "scratch_protects_too_much",
            ScratchProblem::MountCopy(_) | ScratchProblem::CallerRights(_) => "scratch_failed",
            ScratchProblem::NotMade(_) => "scratch_not_made",
            ScratchProblem::InUse(_) => "scratch_in_use",
            ScratchProblem::NotLocked(_) => "scratch_not_locked",
            ScratchProblem::ForeignLink { .. } | ScratchProblem::Unresolved(ResolveError::Foreign(_)) => "scratch_foreign_link",
            ScratchProblem::Unresolved(ResolveError::TooManyLinks) => "scratch_link_loop",
        }
    }
}
