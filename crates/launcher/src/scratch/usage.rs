//! How much lies in a scratch, and how full a file system is.
//!
//! Hostile code may change a tree while it is counted, so a count can be told to end. Which
//! amount is too much is decided by the caller.

use std::collections::{BTreeMap, btree_map::Entry};

use rustix::{
    fd::{AsFd, OwnedFd},
    fs::fstatvfs,
    io::Errno,
};
use stockade_protocol::LimitKey;

use super::FileId;
use crate::tree::{self, TreeEntry, Walk};

/// How many entries are looked at before it is asked whether to go on: some 50 us.
const ASKED_EVERY: u64 = 32;

/// Files of a tree that have names outside of it too, with their bytes before the run. A run that
/// deletes a name of one frees nothing, so only what they grow by counts.
pub(crate) type LinkedOutside = BTreeMap<FileId, u64>;

/// Blocks and entries of a tree.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TreeUse {
    pub(crate) bytes: u64,
    pub(crate) entries: u64,
    /// Directories that could not be counted, or not to the end: unreadable, or too deep.
    pub(crate) closed: u64,
}

/// Files of a tree that had several names before the run.
#[derive(Debug, Default)]
pub(crate) struct LinkedFiles {
    /// Those with names outside of it too.
    pub(crate) outside: LinkedOutside,
    /// How many names of each are in it.
    pub(crate) names: BTreeMap<FileId, u64>,
}

/// A count of a tree. The blocks of a file count once, whatever number of names it has. A name is an
/// entry; that of a file with other names frees none where it is deleted, because the file stays.
pub(super) struct TreeCount<'a> {
    pub(super) seen: TreeUse,
    before: &'a LinkedFiles,
    /// Of files with several names, those that were seen.
    names: BTreeMap<FileId, u64>,
}

impl<'a> TreeCount<'a> {
    pub(super) fn new(before: &'a LinkedFiles) -> Self {
        TreeCount { seen: TreeUse::default(), before, names: BTreeMap::new() }
    }

    pub(super) fn add(&mut self, found: &TreeEntry<'_>) {
        self.seen.closed += u64::from(found.closed);
        let id = found.file_id();
        if found.kind.is_file() && found.links() > 1 {
            match self.names.entry(id) {
                Entry::Vacant(first) => drop(first.insert(1)),
                Entry::Occupied(mut others) => {
                    *others.get_mut() += 1;
                    let before = self.before.names.get(&id).copied().unwrap_or(1);
                    self.seen.entries += u64::from(*others.get() > before);
                    return;
                }
            }
        }
        self.seen.entries += 1;
        self.seen.bytes += found.allocated().saturating_sub(self.before.outside.get(&id).copied().unwrap_or(0));
    }
}

/// What a file system has left, and how much is on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FsRoom {
    pub(crate) free_bytes: u64,
    /// Files and directories; 0 where the file system does not say.
    pub(crate) files: u64,
}

/// The room of a directory's file system.
///
/// # Errors
/// What fstatfs(2) answers.
pub(crate) fn room(directory: impl AsFd) -> Result<FsRoom, Errno> {
    fstatvfs(directory).map(|stat| FsRoom { free_bytes: stat.f_bfree * stat.f_frsize, files: stat.f_files.saturating_sub(stat.f_ffree) })
}

/// Counts what lies below a directory by allocated blocks: a sparse file costs nothing,
/// preallocated blocks do.
///
/// # Errors
/// It cannot be walked.
pub(crate) fn count(directory: &OwnedFd, linked: &LinkedFiles) -> Result<TreeUse, Errno> {
    // It is never told to end.
    Ok(count_while(directory, linked, |_| false, &mut || true)?.unwrap_or_default())
}

/// The same of a directory in which hostile code may move what was counted to where it is
/// counted once more, for as long as it likes: none where `goes_on` said to end, which is
/// asked now and then. What is seen to be `too_much` is counted no further.
///
/// # Errors
/// Likewise.
pub(crate) fn count_while(
    directory: &OwnedFd,
    linked: &LinkedFiles,
    too_much: impl Fn(&TreeUse) -> bool,
    goes_on: &mut dyn FnMut() -> bool,
) -> Result<Option<TreeUse>, Errno> {
    let mut count = TreeCount::new(linked);
    let (mut looked_at, mut enough) = (0u64, false);
    let to_its_end = tree::walk(directory, &mut |found| {
        count.add(found);
        looked_at += 1;
        enough = too_much(&count.seen);
        let ends = enough || (looked_at.is_multiple_of(ASKED_EVERY) && !goes_on());
        if ends { Walk::Stop } else { Walk::On }
    })?;
    Ok((to_its_end || enough).then_some(count.seen))
}

/// Whether a file has just this size and was changed since then, in seconds and nanoseconds of
/// the clock that files have: the kernel has cut a write to it short, or it happens to be so.
/// Where the tree cannot be walked: false.
pub(crate) fn has_changed_file_of(directory: &OwnedFd, size: u64, since: (i64, u32)) -> bool {
    let of_size = |found: &TreeEntry<'_>| found.kind.is_file() && found.size() == size && found.changed() >= since;
    let to_its_end = tree::walk(directory, &mut |found| if of_size(found) { Walk::Stop } else { Walk::On });
    to_its_end == Ok(false)
}

/// What the kernel reports of a file system of the run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct FsUse {
    pub(crate) bytes: u64,
    pub(crate) free_bytes: u64,
    /// How many more files it can have.
    pub(crate) free_files: u64,
    pub(crate) full: Full,
}

/// What a file system has no more of, or had no more of at a time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Full {
    /// Blocks.
    pub(crate) size: bool,
    /// Files.
    pub(crate) files: bool,
}

impl Full {
    pub(crate) fn is_full(self) -> bool {
        self.size || self.files
    }

    /// The limit that it stands at, if it is scratch.
    pub(crate) fn limit_of_scratch(self) -> Option<LimitKey> {
        let files = self.files.then_some(LimitKey::ScratchFiles);
        self.size.then_some(LimitKey::ScratchSize).or(files)
    }

    /// Either of them.
    pub(crate) fn or(self, other: Full) -> Full {
        Full { size: self.size || other.size, files: self.files || other.files }
    }
}

/// None where the kernel does not answer.
pub(crate) fn filesystem_use(fs: &OwnedFd) -> Option<FsUse> {
    let stat = fstatvfs(fs).ok()?;
    let full = Full { size: stat.f_blocks > 0 && stat.f_bfree == 0, files: stat.f_files > 0 && stat.f_ffree == 0 };
    // A limit that is not set is 0.
    let free = |total: u64, left: u64| if total > 0 { left } else { u64::MAX };
    Some(FsUse {
        bytes: (stat.f_blocks - stat.f_bfree) * stat.f_frsize,
        free_bytes: free(stat.f_blocks, stat.f_bfree).saturating_mul(stat.f_frsize),
        free_files: free(stat.f_files, stat.f_ffree),
        full,
    })
}
