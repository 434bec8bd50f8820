//! Mount points in a directory that code may write, for what a view lays over names that are not there.
//!
//! Each is made by its directory's owner, empty, through no link and on no other file system, and is gone
//! after the run if it is still the same one and empty. Runs in one directory share it: each holds a
//! lock of it (flock), and the last removes it. Its mode tells it from the files of others, so the next
//! run takes over what a killed launcher has left, and no other user can open it. Code with the owner's user
//! can, where nothing lies over it: with its lock held, a run is refused or the file stays. What lies over
//! it is not its concern, nor is a name that is there.

use std::{
    ffi::{OsStr, OsString},
    path::Path,
    thread,
    time::Duration,
};

use rustix::{
    fd::OwnedFd,
    fs::{AtFlags, FileType, FlockOperation, Mode, OFlags, Stat, fchmod, flock, fstat, mkdirat, openat, statat, unlinkat},
    io::Errno,
};
use stockade_policy::plan::{PathKindName, TreePlan};

use super::{OpenedScratch, as_owner};
use crate::{ErrorKind, LaunchError, tree};

/// Modes that nothing else has: who is not the owner cannot open it, and so cannot lock it.
const FILE: Mode = Mode::RUSR.union(Mode::XOTH);
const DIRECTORY: Mode = FILE.union(Mode::XUSR);
/// How often it is tried again where another run is removing the one that was found.
const ATTEMPTS: u32 = 50;
const PAUSE: Duration = Duration::from_millis(2);

/// A mount point of this run and perhaps of others. Dropping the last one removes it.
pub struct MountPoint {
    parent: OwnedFd,
    name: OsString,
    kind: PathKindName,
    /// Opened and locked.
    held: OwnedFd,
    privileged: bool,
}

/// Makes those that are missing of a tree's mount points.
///
/// # Errors
/// One cannot be made: its directory is missing, or closed to its owner.
pub(crate) fn make(opened: &OpenedScratch, planned: &TreePlan, privileged: bool) -> Result<Vec<MountPoint>, LaunchError> {
    let mut made = Vec::new();
    for (below, kind) in &planned.mount_points {
        let point = as_owner(&opened.directory, privileged, || hold(&opened.directory, below, *kind, privileged)).flatten();
        let attempt = "make an empty mount point for the time of the run, in a directory that must be there,";
        made.extend(point.map_err(LaunchError::path(ErrorKind::Prepare, attempt, &planned.source.join(below)))?);
    }
    Ok(made)
}

/// None: something else is there, or another file system.
fn hold(directory: &OwnedFd, below: &Path, kind: PathKindName, privileged: bool) -> Result<Option<MountPoint>, Errno> {
    let name = below.file_name().ok_or(Errno::INVAL)?;
    let above = below.parent().filter(|above| !above.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let parent = match tree::open_beneath(directory, above, OFlags::PATH | OFlags::DIRECTORY) {
        Err(Errno::XDEV) => return Ok(None),
        parent => parent?,
    };
    let owner = fstat(directory)?.st_uid;
    for _ in 0..ATTEMPTS {
        match statat(&parent, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(found) if !is_ours(&found, kind, owner) => return Ok(None),
            Ok(_) => {}
            Err(Errno::NOENT) => match make_one(&parent, name, kind) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(errno) => return Err(errno),
            },
            Err(errno) => return Err(errno),
        }
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let held = match openat(&parent, name, flags, Mode::empty()) {
            Err(Errno::NOENT) => continue,
            held => held?,
        };
        // Another run may have removed it before this one had its lock.
        let is_locked = flock(&held, FlockOperation::NonBlockingLockShared).is_ok();
        if is_locked && is_at(&parent, name, &held) && is_ours(&fstat(&held)?, kind, owner) {
            return Ok(Some(MountPoint { parent, name: name.to_owned(), kind, held, privileged }));
        }
        thread::sleep(PAUSE);
    }
    Err(Errno::BUSY)
}

fn make_one(parent: &OwnedFd, name: &OsStr, kind: PathKindName) -> Result<(), Errno> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    // The mode without what a umask takes.
    match kind {
        PathKindName::Directory => {
            mkdirat(parent, name, DIRECTORY)?;
            fchmod(openat(parent, name, flags | OFlags::DIRECTORY, Mode::empty())?, DIRECTORY)
        }
        PathKindName::File => fchmod(openat(parent, name, flags | OFlags::CREATE | OFlags::EXCL, FILE)?, FILE),
    }
}

/// Whether a file or directory is what this module makes.
fn is_ours(found: &Stat, kind: PathKindName, owner: u32) -> bool {
    let mode = Mode::from_raw_mode(found.st_mode);
    let is_empty_file = FileType::from_raw_mode(found.st_mode).is_file() && found.st_size == 0 && found.st_nlink == 1 && mode == FILE;
    let is_directory = FileType::from_raw_mode(found.st_mode).is_dir() && mode == DIRECTORY;
    let is_kind = if kind == PathKindName::Directory { is_directory } else { is_empty_file };
    is_kind && found.st_uid == owner
}

/// Whether a name still leads to what was opened.
fn is_at(parent: &OwnedFd, name: &OsStr, held: &OwnedFd) -> bool {
    let id = |stat: Stat| (stat.st_dev, stat.st_ino);
    let there = statat(parent, name, AtFlags::SYMLINK_NOFOLLOW).map(id);
    there.is_ok_and(|there| fstat(held).map(id) == Ok(there))
}

impl Drop for MountPoint {
    fn drop(&mut self) {
        let remove = || {
            // Refused while another run has its lock, which removes it then.
            let is_last = flock(&self.held, FlockOperation::NonBlockingLockExclusive).is_ok();
            let is_unchanged = fstat(&self.held).is_ok_and(|stat| is_ours(&stat, self.kind, stat.st_uid));
            if is_last && is_unchanged && is_at(&self.parent, &self.name, &self.held) {
                let flags = if self.kind == PathKindName::Directory { AtFlags::REMOVEDIR } else { AtFlags::empty() };
                // A directory that somebody has filled stays.
                let _not_empty = unlinkat(&self.parent, &self.name, flags);
            }
        };
        // Its owner can remove it as well, should this fail.
        let _unchanged = as_owner(&self.held, self.privileged, remove);
    }
}
