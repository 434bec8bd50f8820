//! Locks on a host scratch: while a run of approved code is in one, no other run is.
//!
//! A run that may write to a host scratch holds read locks (fcntl(2), F_OFD_SETLK) on that
//! directory and on those above it that have the same owner, until nothing of it is alive. The
//! locked byte says whether the run is in that directory or below it, and whether it is alone.
//! A run sets its locks before it looks for those of others, so of two that start at the
//! same time at least one is refused. Nothing is waited for. Only read locks, because the kernel
//! locks no directory for writing; F_OFD_GETLK finds those of others.
//!
//! Code in a scratch may use flock(2) there as ever, which is another kind of lock. By read locks of
//! its own it can keep others from starting there, but it can take none away from a launcher.
//! Programs of the host are not looked for, nor runs in a directory that has been moved, or
//! is mounted a second time, since they started.

use std::ops::RangeInclusive;

use nix::{
    fcntl::{FcntlArg, fcntl},
    libc,
};
use rustix::{
    fd::{AsFd, OwnedFd},
    fs::{Mode, OFlags, fstat, openat},
    io::Errno,
};
use stockade_policy::facts::Caller;

use super::{OpenedScratch, ScratchError, ScratchProblem, as_caller};

/// Whether other runs may be in a scratch meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockMode {
    /// Those that lock it in this mode too.
    Shared,
    /// None.
    Exclusive,
}

// The byte that a run locks in a directory that is its scratch (here), or lies above it.
const SHARED_BELOW: i64 = 0;
const SHARED_HERE: i64 = 1;
const EXCLUSIVE_HERE: i64 = 2;
const EXCLUSIVE_BELOW: i64 = 3;

impl LockMode {
    fn byte(self, is_scratch: bool) -> i64 {
        match (self, is_scratch) {
            (LockMode::Shared, true) => SHARED_HERE,
            (LockMode::Shared, false) => SHARED_BELOW,
            (LockMode::Exclusive, true) => EXCLUSIVE_HERE,
            (LockMode::Exclusive, false) => EXCLUSIVE_BELOW,
        }
    }

    /// Why a run is refused that locks in this mode, and what to do.
    pub(super) fn in_use(self) -> &'static str {
        match self {
            LockMode::Shared => {
                "a run of approved code is in it, or above or below it, and no other may be there meanwhile; wait for its end, or use another directory"
            }
            LockMode::Exclusive => {
                "another run is in it, or above or below it, and could change the approved code before it is read; wait for its end, or use another directory; the token can still be used"
            }
        }
    }

    /// The bytes that no other run may have locked.
    fn conflicts(self, is_scratch: bool) -> RangeInclusive<i64> {
        match (self, is_scratch) {
            (LockMode::Shared, true) => EXCLUSIVE_HERE..=EXCLUSIVE_BELOW,
            (LockMode::Shared, false) => EXCLUSIVE_HERE..=EXCLUSIVE_HERE,
            (LockMode::Exclusive, true) => SHARED_BELOW..=EXCLUSIVE_BELOW,
            (LockMode::Exclusive, false) => SHARED_HERE..=EXCLUSIVE_HERE,
        }
    }
}

/// The locks of one run; dropping it releases them.
#[derive(Debug)]
pub struct ScratchLock {
    _directories: Vec<OwnedFd>,
}

impl OpenedScratch {
    /// Locks it for a run of this caller. A file system without locks is no error in shared mode:
    /// no run is alone there.
    ///
    /// # Errors
    /// Another run is in it, above it or below it, or it cannot be locked.
    pub fn lock(&self, mode: LockMode, caller: &Caller, privileged: bool) -> Result<ScratchLock, ScratchError> {
        let locked = as_caller(caller, privileged, || lock(&self.directory, mode)).map_err(ScratchProblem::CallerRights).flatten();
        locked.map_err(|problem| ScratchError { path: self.facts.path.display().to_string(), problem })
    }
}

fn lock(scratch: &OwnedFd, mode: LockMode) -> Result<ScratchLock, ScratchProblem> {
    let directories = with_those_above(scratch).map_err(ScratchProblem::NotLocked)?;
    let with_place = || directories.iter().enumerate().map(|(index, directory)| (directory, index == 0));
    // The file system has no such locks, so no approved code runs there.
    let tolerated = |errno| match (mode, errno) {
        (LockMode::Shared, Errno::INVAL | Errno::OPNOTSUPP | Errno::NOSYS) => Ok(false),
        _ => Err(ScratchProblem::NotLocked(errno)),
    };
    for (directory, is_scratch) in with_place() {
        let byte = mode.byte(is_scratch);
        set(directory, byte).map(|()| false).or_else(tolerated)?;
    }
    for (directory, is_scratch) in with_place() {
        if is_locked(directory, &mode.conflicts(is_scratch)).or_else(tolerated)? {
            return Err(ScratchProblem::InUse(mode));
        }
    }
    Ok(ScratchLock { _directories: directories })
}

/// A directory, and those above it that belong to its owner: what another user owns is no scratch
/// of the same caller's, unless that is root, whose code there has the rights of that user.
fn with_those_above(scratch: &OwnedFd) -> Result<Vec<OwnedFd>, Errno> {
    let reopened = |directory: &OwnedFd| openat(directory, c".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
    let owner = fstat(scratch)?.st_uid;
    let mut directories = vec![reopened(scratch)?];
    let mut current = openat(scratch, c".", OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    loop {
        let above = openat(&current, c"..", OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        let (stat, below) = (fstat(&above)?, fstat(&current)?);
        if (stat.st_dev, stat.st_ino) == (below.st_dev, below.st_ino) {
            return Ok(directories);
        }
        if stat.st_uid == owner {
            directories.push(reopened(&above)?);
        }
        current = above;
    }
}

fn set(directory: impl AsFd, byte: i64) -> Result<(), Errno> {
    let done = fcntl(directory, FcntlArg::F_OFD_SETLK(&flock(READ, &(byte..=byte))));
    done.map(drop).map_err(|errno| Errno::from_raw_os_error(errno as i32))
}

/// Whether somebody else has locked one of these bytes.
fn is_locked(directory: impl AsFd, bytes: &RangeInclusive<i64>) -> Result<bool, Errno> {
    // The kernel puts a lock in its place that is in the way of this one, or says that none is.
    let mut asked = flock(WRITE, bytes);
    fcntl(directory, FcntlArg::F_OFD_GETLK(&mut asked)).map_err(|errno| Errno::from_raw_os_error(errno as i32))?;
    Ok(asked.l_type != NONE)
}

// These constants fit in 16 bits.
const READ: libc::c_short = libc::F_RDLCK as libc::c_short;
const WRITE: libc::c_short = libc::F_WRLCK as libc::c_short;
const NONE: libc::c_short = libc::F_UNLCK as libc::c_short;
const FROM_THE_START: libc::c_short = libc::SEEK_SET as libc::c_short;

/// A lock that belongs to an open file description, and ends with its last descriptor.
fn flock(kind: libc::c_short, bytes: &RangeInclusive<i64>) -> libc::flock {
    let length = bytes.end() - bytes.start() + 1;
    libc::flock { l_type: kind, l_whence: FROM_THE_START, l_start: *bytes.start(), l_len: length, l_pid: 0 }
}
