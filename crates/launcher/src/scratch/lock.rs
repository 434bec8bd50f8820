//! Locks on a host scratch: while a run of approved code is in one, no other run is.
//!
//! A run that may write to a host scratch holds read locks (fcntl(2), F_OFD_SETLK) for that
//! directory and for all above it, until nothing of it is alive. They are locks on bytes of one file
//! in the registry, which only launchers of the same registry can open: neither code nor other
//! users can hold one. A directory has four bytes there; which of them a run locks says whether it
//! is in that directory or below it, and whether it is alone. A run sets its locks before it looks
//! for those of others, so of two that start at the same time at least one is refused. Nothing is
//! waited for.
//!
//! Programs of the host are not looked for, nor launchers with another registry (root's and those
//! of its callers), nor runs in a directory that has been moved, or is mounted a second time, since
//! they started.

use std::{fs::File, ops::RangeInclusive, os::unix::fs::OpenOptionsExt};

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
use crate::{error::errno_of, registry::Registry};

/// The file in the registry whose bytes stand for directories.
const FILE: &str = "scratch-locks";

/// Whether other runs may be in a scratch meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockMode {
    /// Those that lock it in this mode too.
    Shared,
    /// None.
    Exclusive,
}

// Which byte of a directory a run locks that is in it (here), or below it.
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
    _file: File,
}

impl OpenedScratch {
    /// Locks it for a run of this caller.
    ///
    /// # Errors
    /// Another run is in it, above it or below it, or that cannot be told.
    pub fn lock(&self, mode: LockMode, caller: &Caller, privileged: bool, registry: &Registry) -> Result<ScratchLock, ScratchError> {
        let walked = as_caller(caller, privileged, || with_those_above(&self.directory)).map_err(ScratchProblem::CallerRights);
        let locked = walked.and_then(|directories| lock(&directories.map_err(ScratchProblem::NotLocked)?, mode, registry));
        locked.map_err(|problem| ScratchError { path: self.facts.path.display().to_string(), problem })
    }
}

/// The scratch is the first of the directories, each by its first byte in the file.
fn lock(directories: &[i64], mode: LockMode, registry: &Registry) -> Result<ScratchLock, ScratchProblem> {
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false).mode(0o600).custom_flags(OFlags::NOFOLLOW.bits().cast_signed());
    let opened = options.open(registry.directory().join(FILE));
    let file = opened.map_err(|error| ScratchProblem::NotLocked(errno_of(&error)))?;
    let with_place = || directories.iter().enumerate().map(|(index, first)| (*first, index == 0));
    for (first, is_scratch) in with_place() {
        set(&file, first + mode.byte(is_scratch)).map_err(ScratchProblem::NotLocked)?;
    }
    for (first, is_scratch) in with_place() {
        let conflicts = mode.conflicts(is_scratch);
        if is_locked(&file, &(first + conflicts.start()..=first + conflicts.end())).map_err(ScratchProblem::NotLocked)? {
            return Err(ScratchProblem::InUse(mode));
        }
    }
    Ok(ScratchLock { _file: file })
}

/// A directory, and all above it.
fn with_those_above(scratch: &OwnedFd) -> Result<Vec<i64>, Errno> {
    let open = |directory: &OwnedFd, name| openat(directory, name, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
    let mut current = open(scratch, c".")?;
    let mut directories = Vec::new();
    loop {
        let stat = fstat(&current)?;
        let first = first_byte(stat.st_dev, stat.st_ino);
        if directories.last() == Some(&first) {
            return Ok(directories);
        }
        directories.push(first);
        current = open(&current, c"..")?;
    }
}

/// The same in every version of the program. Two directories may have the same by chance, one in
/// 2^60; then a run is refused that need not be.
fn first_byte(device: u64, inode: u64) -> i64 {
    let mixed = device.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(inode).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (mixed >> 4).cast_signed() * 4
}

fn set(file: impl AsFd, byte: i64) -> Result<(), Errno> {
    let done = fcntl(file, FcntlArg::F_OFD_SETLK(&flock(READ, &(byte..=byte))));
    done.map(drop).map_err(|errno| Errno::from_raw_os_error(errno as i32))
}

/// Whether somebody else has locked one of these bytes.
fn is_locked(file: impl AsFd, bytes: &RangeInclusive<i64>) -> Result<bool, Errno> {
    // The kernel puts a lock in its place that is in the way of this one, or says that none is.
    let mut asked = flock(WRITE, bytes);
    fcntl(file, FcntlArg::F_OFD_GETLK(&mut asked)).map_err(|errno| Errno::from_raw_os_error(errno as i32))?;
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
