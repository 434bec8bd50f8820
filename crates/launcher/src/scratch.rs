//! The host scratch: opened as its owner and judged.
//!
//! A launcher with root's rights opens it with the caller's uid, groups and no
//! capabilities, so that it can name nothing that the caller could not. The directory
//! is opened once; afterwards only its descriptor is used. Where it is, is decided in [`path`].

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use nix::libc;
use rustix::{
    fd::OwnedFd,
    fs::{Mode, fchmod, fstat, fstatfs},
    io::Errno,
    mount::{OpenTreeFlags, open_tree},
};
use stockade_policy::{
    facts::Caller,
    model::{Access, Policy},
    plan::{HostScratch, Protection},
};
use stockade_sys::cred::{self, CapabilitySets};

use crate::{identity, tree};

pub mod directory_paths;
mod error;
mod inspect;
mod lock;
pub(crate) mod mount_points;
pub mod path;
mod roots;
pub(crate) mod usage;

pub use error::{ScratchError, ScratchProblem};
pub(crate) use inspect::SecondLook;
use inspect::{Inspected, Rules, inspect};
pub use lock::{LockMode, ScratchLock};
pub use mount_points::MountPoint;
use path::ScratchPath;
use usage::{LinkedFiles, TreeUse};

/// About how often a host scratch is counted while the code runs.
pub const INTERVAL_MS: u64 = 100;

/// How often at least it is looked at what the file system of a host scratch has lost.
pub(crate) const MAX_GLANCE_MS: u64 = 25;

/// What tells a file or directory from every other that is there: device and inode.
pub type FileId = (u64, u64);

/// What a run shows read-only, and by which path. Where it lies in a scratch, code could write it
/// there, and what the host or the next run starts with it.
pub type ShownFiles = BTreeMap<FileId, PathBuf>;

/// Directories of an environment whose files its interpreter loads and its user starts.
const OBEYED: [&str; 3] = ["bin", "lib", "lib64"];

/// File systems whose files are state of the kernel, or memory that no limit counts: code that writes
/// there acts on the host (`linux/magic.h`, and where it lacks one the file system's own source).
const OF_KERNEL: [i64; 20] = [
    libc::PROC_SUPER_MAGIC,
    libc::SYSFS_MAGIC,
    libc::CGROUP_SUPER_MAGIC,
    libc::CGROUP2_SUPER_MAGIC,
    libc::DEBUGFS_MAGIC,
    libc::TRACEFS_MAGIC,
    libc::SECURITYFS_MAGIC,
    libc::DEVPTS_SUPER_MAGIC,
    libc::BPF_FS_MAGIC,
    libc::SELINUX_MAGIC,
    libc::SMACK_MAGIC,
    libc::RDTGROUP_SUPER_MAGIC,
    libc::HUGETLBFS_MAGIC,
    0x6573_5543, // FUSE_CTL_SUPER_MAGIC
    0x5a3c_69f0, // AAFS_MAGIC
    0xde5e_81e4, // EFIVARFS_MAGIC
    0x6165_676c, // PSTOREFS_MAGIC
    0x6265_6570, // CONFIGFS_MAGIC
    0x4249_4e4d, // BINFMTFS_MAGIC
    0x1980_0202, // MQUEUE_MAGIC
];

/// A host directory, opened.
pub struct OpenedScratch {
    pub(crate) directory: OwnedFd,
    /// Root: a copy of its mount.
    pub(crate) tree: Option<OwnedFd>,
    /// The host id that the copy is idmapped for.
    pub(crate) idmapped_for: Option<u32>,
    /// Which file or directory each of `facts.protected` was when that was decided. None: what
    /// another mount shows there, and not the one that the run gets.
    pub(crate) file_ids: Vec<Option<FileId>>,
    /// What lay there before the run.
    pub(crate) before: TreeUse,
    pub(crate) linked: LinkedFiles,
    /// For when all of `facts.protected` is covered; none for a large one.
    pub(crate) second_look: Option<Box<SecondLook>>,
    /// What its owner might do with the directory itself before the run.
    pub(crate) rights: Mode,
    /// What the plan needs to know.
    pub facts: HostScratch,
}

impl OpenedScratch {
    /// Its directory's.
    ///
    /// # Errors
    /// What fstat(2) answers.
    pub fn file_id(&self) -> Result<FileId, Errno> {
        let stat = rustix::fs::fstat(&self.directory)?;
        Ok((stat.st_dev, stat.st_ino))
    }

    /// Those of what is kept from the code, in the order of the plan's list.
    pub fn file_ids(&self) -> &[Option<FileId>] {
        &self.file_ids
    }

    /// How many files and directories lay in it when it was opened.
    pub fn entries(&self) -> u64 {
        self.before.entries
    }

    /// How the policy keeps a path below it from the code: by what was found there, or by a glob
    /// that matches the name.
    pub fn protection(&self, path: &Path, policy: &Policy) -> Option<Protection> {
        let found = self.facts.protected.iter().filter(|(above, ..)| path.starts_with(above)).map(|(.., protection)| *protection);
        let names = |globs: &[String]| {
            let above = || path.ancestors().filter(|above| !above.as_os_str().is_empty());
            globs.iter().any(|glob| above().any(|above| tree::matches(glob, above)))
        };
        let named = [(&policy.scratch.hidden, Protection::Hidden), (&policy.scratch.read_only, Protection::ReadOnly)];
        let named = named.into_iter().filter(|(globs, _)| names(globs)).map(|(_, protection)| protection);
        let all: Vec<Protection> = found.chain(named).collect();
        [Protection::Hidden, Protection::ReadOnly].into_iter().find(|protection| all.contains(protection))
    }
}

/// With which user's rights a scratch is opened, and within which bounds.
#[derive(Clone, Debug)]
pub struct Opener<'a> {
    /// Who asked.
    pub caller: &'a Caller,
    /// The launcher is root.
    pub privileged: bool,
    /// The run's own host id, for the idmap; none: no idmap.
    pub unique_id: Option<u32>,
    /// Home directories, none of which may be a scratch itself.
    pub homes: &'a [PathBuf],
    /// The registry's directory, which a scratch must neither be nor hold nor lie in.
    pub registry: Option<&'a Path>,
    /// What `--scratch` names: a scratch must be it or lie below it.
    pub ceiling: Option<&'a Path>,
    /// Where a directory of root's may be a scratch; empty: nowhere.
    pub roots: &'a [PathBuf],
    /// What code in the scratch must not write, though it lies there.
    pub shown: &'a ShownFiles,
}

/// Takes on a user's ids for as long as host paths are resolved. Leaving effective
/// uid 0 empties the effective capabilities; the kernel gives them back with it.
struct AsUser {
    own_groups: Vec<u32>,
    /// Those of uid 0, which no change of ids takes away.
    sets: Option<CapabilitySets>,
}

impl AsUser {
    fn enter(user: &Caller) -> Result<Self, Errno> {
        let own: Vec<u32> =
            nix::unistd::getgroups().map_err(|errno| Errno::from_raw_os_error(errno as i32))?.iter().map(|group| group.as_raw()).collect();
        cred::set_groups(&user.groups)?;
        cred::set_effective(user.uid, user.gid)?;
        let sets = (user.uid == 0).then(cred::drop_effective).transpose()?;
        Ok(AsUser { own_groups: own, sets })
    }

    fn leave(self) -> Result<(), Errno> {
        self.sets.map_or(Ok(()), |sets| cred::restore_sets(&sets))?;
        cred::restore_effective_root()?;
        cred::set_groups(&self.own_groups)
    }
}

/// Does something with the caller's ids and no capabilities, where root acts for another. Root
/// itself keeps its own.
///
/// # Errors
/// The ids cannot be changed, or not changed back.
pub fn as_caller<T>(caller: &Caller, privileged: bool, act: impl FnOnce() -> T) -> Result<T, Errno> {
    if caller.uid == 0 { Ok(act()) } else { as_user(caller, privileged, act) }
}

/// Does something in a tree with the ids of the user whose it is and no capabilities, also where
/// that is root: code in it has none.
///
/// # Errors
/// The ids cannot be changed, or not changed back.
pub(crate) fn as_user<T>(user: &Caller, privileged: bool, act: impl FnOnce() -> T) -> Result<T, Errno> {
    if !privileged {
        return Ok(act());
    }
    let changed = AsUser::enter(user)?;
    let done = act();
    changed.leave()?;
    Ok(done)
}

/// The same with the ids of a scratch's owner alone, which are those of the code in it.
///
/// # Errors
/// Likewise.
pub(crate) fn as_owner<T>(scratch: &OwnedFd, privileged: bool, act: impl FnOnce() -> T) -> Result<T, Errno> {
    let stat = fstat(scratch)?;
    as_user(&Caller { uid: stat.st_uid, gid: stat.st_gid, groups: Vec::new() }, privileged, act)
}

/// Why the file system of a directory cannot be idmapped for a run with the host id `run`, tried on
/// a copy of its mount. None: it can be. Nothing of the host is changed.
///
/// # Errors
/// There is no such directory, or its mount cannot be copied.
pub fn idmap_refusal(path: &Path, run: u32) -> Result<Option<String>, ScratchError> {
    const NOBODY: u32 = 65534;
    let directory = path::open_directory(path, None)?;
    let failed = |errno| ScratchError { path: path.display().to_string(), problem: ScratchProblem::MountCopy(errno) };
    let copy = detached_copy(&directory, false).map_err(failed)?;
    Ok(identity::idmap(&[copy], (NOBODY, NOBODY), (run, run)).err().map(|error| error.to_string()))
}

/// Judges what was opened at a place, and looks through it.
///
/// # Errors
/// It is another's, or root's and may not be a scratch, or holds too much that must be kept from the code.
pub(crate) fn finish(
    directory: OwnedFd,
    place: &ScratchPath,
    policy: &Policy,
    opener: &Opener<'_>,
) -> Result<OpenedScratch, ScratchProblem> {
    let real = place.path();
    let stat = fstat(&directory).map_err(ScratchProblem::Unreadable)?;
    if OF_KERNEL.contains(&fstatfs(&directory).map_err(ScratchProblem::Unreadable)?.f_type) {
        return Err(ScratchProblem::OfKernel);
    }
    let owner = (stat.st_uid, stat.st_gid);
    if opener.caller.uid != 0 && owner.0 != opener.caller.uid {
        return Err(ScratchProblem::NotOwned { owner: owner.0, caller: opener.caller.uid });
    }
    let mode = Mode::from_raw_mode(stat.st_mode);
    if opener.privileged && (owner.0 == 0 || owner.1 == 0) {
        roots::judge(real, place.paths(), owner.0, mode, opener)?;
    }
    let rights = mode.intersection(Mode::RWXU);
    if !rights.contains(Mode::RUSR | Mode::XUSR) {
        return Err(ScratchProblem::Closed(real.to_path_buf()));
    }
    refuse_shown(real, policy, opener.shown)?;
    let Inspected { protected, before, linked, second_look } =
        inspect(&directory, Rules::new(policy, place.below().to_path_buf())?, &policy.name, opener)?;
    let tree = opener.privileged.then(|| detached_copy(&directory, false)).transpose().map_err(ScratchProblem::MountCopy)?;
    // Before the plan, which needs to know whether the kernel and the file system take it.
    let idmap = |(tree, id)| identity::idmap(std::slice::from_ref(tree), owner, (id, id)).map(|()| id);
    let idmapped = tree.as_ref().zip(opener.unique_id).map(idmap).transpose();
    let (idmapped_for, idmap_refusal) = match idmapped {
        Ok(id) => (id, None),
        Err(error) => (None, Some(error.to_string())),
    };
    let (protected, file_ids) = protected.into_iter().unzip();
    let facts = HostScratch { path: real.to_path_buf(), owner, idmap_refusal, protected };
    Ok(OpenedScratch { directory, tree, idmapped_for, file_ids, before, linked, second_look, rights, facts })
}

/// Refuses a writable scratch that is shown read-only itself, or lies where an interpreter's files
/// do. What the policy shows by the same path is refused by the plan.
fn refuse_shown(real: &Path, policy: &Policy, shown: &ShownFiles) -> Result<(), ScratchProblem> {
    if policy.scratch.access == Access::Ro {
        return Ok(());
    }
    let filesystem = &policy.filesystem;
    for above in real.ancestors() {
        let Some(path) = rustix::fs::stat(above).ok().and_then(|stat| shown.get(&(stat.st_dev, stat.st_ino))) else { continue };
        let below = real.strip_prefix(above).ok().and_then(|below| below.iter().next());
        let is_planned = path == above && filesystem.read_only.iter().chain(&filesystem.read_only_optional).any(|named| named == path);
        if !is_planned && below.is_none_or(|name| OBEYED.iter().any(|obeyed| name == *obeyed)) {
            return Err(ScratchProblem::Shown(path.clone()));
        }
    }
    Ok(())
}

/// Gives the owner of a scratch back what code has taken of the directory itself, and
/// nothing else: it could not be counted, nor could a later run start in it.
///
/// # Errors
/// What fstat(2) and fchmod(2) answer.
pub(crate) fn give_back(directory: &OwnedFd, rights: Mode) -> Result<(), Errno> {
    let mode = Mode::from_raw_mode(fstat(directory)?.st_mode);
    // By the descriptor, since code may have put another in its place.
    if mode.contains(rights) { Ok(()) } else { fchmod(directory, mode | rights) }
}

/// Opens a host directory that root shows inside on the caller's behalf, through no link.
///
/// # Errors
/// The caller may not open it.
pub fn open_tree_as_caller(path: &Path, opener: &Opener<'_>) -> Result<OwnedFd, ScratchError> {
    let error = |errno| ScratchError { path: path.display().to_string(), problem: ScratchProblem::PathUnreadable(errno) };
    let opened = as_caller(opener.caller, opener.privileged, || tree::open_unlinked(path)).map_err(error)?;
    opened.and_then(|fd| detached_copy(&fd, true)).map_err(error)
}

/// A copy of the host's mount behind a descriptor, with those below it where `recursive`.
/// Private from the first: where systemd runs, mounts are shared, and a copy is its
/// original's peer. What is mounted on it inside, such as what hides a file, would be
/// mounted on the host too, and stay there.
pub(crate) fn detached_copy(directory: &OwnedFd, recursive: bool) -> Result<OwnedFd, Errno> {
    let depth = if recursive { OpenTreeFlags::AT_RECURSIVE } else { OpenTreeFlags::empty() };
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH | depth;
    let copy = open_tree(directory, c"", flags)?;
    stockade_sys::mount::make_private(&copy, recursive)?;
    Ok(copy)
}
