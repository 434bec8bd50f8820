//! Files that a session's client reads, writes, lists and removes between two runs.
//!
//! The trees were written by hostile code. So everything happens beneath a directory, through no
//! link, on no other file system and on regular files only, with the ids of the tree's owner and
//! no capability, and bounded in size and number. Who may ask for what is not decided here.

use std::{
    fs::File,
    io::{Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

use rustix::{
    fd::{AsFd, OwnedFd},
    fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags, fstat, ftruncate, mkdirat, openat2, renameat, statat, unlinkat},
    io::Errno,
};
use stockade_policy::facts::Caller;

use crate::{
    OpenedScratch,
    error::{describe, errno_of},
    scratch::as_user,
    tree::{Walk, open_beneath, walk},
};

/// A directory, and the user whose rights are used in it.
pub struct Tree<'a> {
    directory: &'a OwnedFd,
    owner: Caller,
    privileged: bool,
}

/// Why a file could not be read, written, listed or removed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FileError {
    /// No link is followed.
    #[error("a symbolic link stands on the way, and none is followed")]
    Link,
    /// Nothing outside the tree's file system is opened.
    #[error("it leads to another file system")]
    Outside,
    /// It is not there.
    #[error("there is no such file")]
    Missing,
    /// A file stands where its path needs a directory.
    #[error("a part of the path is not a directory")]
    NotDirectory,
    /// It is a directory and no file.
    #[error("it is a directory")]
    Directory,
    /// It is a directory that holds something.
    #[error("it is a directory that is not empty; remove what lies in it first")]
    NotEmpty,
    /// It is a fifo, a socket or a device.
    #[error("it is not a regular file")]
    NotFile,
    /// Its owner may not.
    #[error("{}", describe(*.0))]
    Denied(Errno),
    /// There is no room.
    #[error("{}", describe(*.0))]
    NoSpace(Errno),
    /// Another answer of the kernel.
    #[error("{}", describe(*.0))]
    Failed(Errno),
    /// The launcher cannot act with the owner's rights.
    #[error("cannot change to the owner's rights: {}", describe(*.0))]
    OwnerRights(Errno),
    /// More is asked for than is read at once.
    #[error("{wanted} bytes are wanted, and at most {most} are read at once: ask for parts by `offset` and `length`")]
    TooLarge {
        /// Bytes that are asked for.
        wanted: u64,
        /// Bytes that are read at once.
        most: u64,
    },
}

impl FileError {
    /// A stable identifier.
    pub fn reason(&self) -> &'static str {
        match self {
            FileError::Link => "path_is_link",
            FileError::Outside => "path_outside",
            FileError::Missing => "file_missing",
            FileError::NotDirectory => "not_a_directory",
            FileError::Directory => "is_a_directory",
            FileError::NotEmpty => "directory_not_empty",
            FileError::NotFile => "not_a_file",
            FileError::Denied(_) => "permission_denied",
            FileError::NoSpace(_) => "no_space",
            FileError::Failed(_) | FileError::OwnerRights(_) => "file_failed",
            FileError::TooLarge { .. } => "file_too_large",
        }
    }
}

impl From<Errno> for FileError {
    fn from(errno: Errno) -> Self {
        match errno {
            Errno::LOOP => FileError::Link,
            Errno::XDEV => FileError::Outside,
            Errno::NOENT => FileError::Missing,
            Errno::NOTDIR => FileError::NotDirectory,
            Errno::ISDIR => FileError::Directory,
            Errno::NOTEMPTY => FileError::NotEmpty,
            Errno::NXIO => FileError::NotFile,
            Errno::ACCESS | Errno::PERM => FileError::Denied(errno),
            Errno::NOSPC | Errno::DQUOT => FileError::NoSpace(errno),
            errno => FileError::Failed(errno),
        }
    }
}

impl From<std::io::Error> for FileError {
    fn from(error: std::io::Error) -> Self {
        errno_of(&error).into()
    }
}

/// A part of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The bytes.
    pub bytes: Vec<u8>,
    /// The whole file's size.
    pub size: u64,
}

/// One entry of a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Path below the directory listed.
    pub path: PathBuf,
    /// `file`, `directory`, `link` or `other`.
    pub kind: &'static str,
    /// Bytes of a file, else 0.
    pub size: u64,
}

/// The most bytes of all paths of a listing: code can make names of 255 letters, each six times as long in JSON.
pub const MAX_LISTED_BYTES: usize = 1 << 20;

impl<'a> Tree<'a> {
    /// A directory of a session's own, whose files belong to the runs.
    pub fn kept(directory: &'a OwnedFd, owner: (u32, u32), privileged: bool) -> Self {
        Tree { directory, owner: Caller { uid: owner.0, gid: owner.1, groups: Vec::new() }, privileged }
    }

    /// A host scratch; with its owner's groups where that is the caller, and not root.
    pub fn host(scratch: &'a OpenedScratch, caller: &Caller, privileged: bool) -> Self {
        let (uid, gid) = scratch.facts.owner;
        let owner = if caller.uid == uid && uid != 0 { caller.clone() } else { Caller { uid, gid, groups: Vec::new() } };
        Tree { directory: &scratch.directory, owner, privileged }
    }

    fn act<T>(&self, act: impl FnOnce() -> Result<T, FileError>) -> Result<T, FileError> {
        as_user(&self.owner, self.privileged, act).map_err(FileError::OwnerRights)?
    }

    /// Reads a file from `offset` on: `length` bytes, or to its end. More than `most` are not
    /// read.
    ///
    /// # Errors
    /// It is missing, no regular file, closed to its owner, or too large.
    pub fn read(&self, path: &Path, offset: u64, length: Option<u64>, most: u64) -> Result<Part, FileError> {
        self.act(|| {
            // NONBLOCK: a fifo must not keep us waiting before it is seen to be one.
            let (mut file, size) = regular(open_beneath(self.directory, path, OFlags::RDONLY | OFlags::NONBLOCK))?;
            let wanted = length.unwrap_or_else(|| size.saturating_sub(offset));
            if wanted > most {
                return Err(FileError::TooLarge { wanted, most });
            }
            let mut bytes = Vec::new();
            file.seek(SeekFrom::Start(offset))?;
            file.take(wanted).read_to_end(&mut bytes)?;
            Ok(Part { bytes, size })
        })
    }

    /// Writes a file, or adds to it, and makes the directories above it. Returns its size.
    ///
    /// # Errors
    /// What stands there is no regular file, its owner may not write it, or there is no room.
    pub fn write(&self, path: &Path, bytes: &[u8], append: bool) -> Result<u64, FileError> {
        self.act(|| {
            if let Some(above) = path.parent() {
                self.make_directories(above)?;
            }
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::NONBLOCK;
            let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS | ResolveFlags::NO_XDEV;
            let opened = openat2(self.directory, path, flags | OFlags::CLOEXEC, Mode::from_raw_mode(0o644), resolve);
            let (mut file, size) = regular(opened)?;
            let start = if append { size } else { 0 };
            if !append {
                // Only now: what is no regular file was not touched.
                ftruncate(&file, 0)?;
            }
            file.seek(SeekFrom::Start(start))?;
            file.write_all(bytes)?;
            Ok(start + bytes.len() as u64)
        })
    }

    /// Writes a file whole, or leaves what stands there as it was. `aside` is a name that nothing else has.
    /// Returns its size.
    ///
    /// # Errors
    /// As [`Self::write`]; or what stands there is a directory.
    pub fn replace(&self, path: &Path, bytes: &[u8], aside: &str) -> Result<u64, FileError> {
        self.act(|| {
            if let Some(above) = path.parent() {
                self.make_directories(above)?;
            }
            let (directory, name) = self.open_above(path)?;
            let mode = match statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile => Mode::from_raw_mode(stat.st_mode),
                Ok(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Directory => return Err(FileError::Directory),
                Ok(_) => return Err(FileError::NotFile),
                Err(Errno::NOENT) => Mode::from_raw_mode(0o644),
                Err(errno) => return Err(errno.into()),
            };
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let file = rustix::fs::openat(&directory, aside, flags, mode)?;
            let written = File::from(file).write_all(bytes).map_err(FileError::from);
            let written = written.and_then(|()| Ok(renameat(&directory, aside, &directory, name)?));
            if written.is_err() {
                // What is left of it takes room; there is nothing else to be done.
                let _left = unlinkat(&directory, aside, AtFlags::empty());
            }
            written.map(|()| bytes.len() as u64)
        })
    }

    /// Removes a file, a link or an empty directory.
    ///
    /// # Errors
    /// It is missing, a directory that holds something, or its owner may not remove it.
    pub fn remove(&self, path: &Path) -> Result<(), FileError> {
        self.act(|| {
            let (directory, name) = self.open_above(path)?;
            match unlinkat(&directory, name, AtFlags::empty()) {
                Err(Errno::ISDIR) => Ok(unlinkat(&directory, name, AtFlags::REMOVEDIR)?),
                removed => Ok(removed?),
            }
        })
    }

    /// The directory in which a path lies, and its name there.
    fn open_above<'p>(&self, path: &'p Path) -> Result<(OwnedFd, &'p std::ffi::OsStr), FileError> {
        let name = path.file_name().ok_or(FileError::Directory)?;
        let directory = match path.parent().filter(|above| !above.as_os_str().is_empty()) {
            Some(above) => open_beneath(self.directory, above, OFlags::PATH | OFlags::DIRECTORY)?,
            None => self.directory.try_clone()?,
        };
        Ok((directory, name))
    }

    fn make_directories(&self, path: &Path) -> Result<(), FileError> {
        let ancestors: Vec<&Path> = path.ancestors().filter(|above| !above.as_os_str().is_empty()).collect();
        for directory in ancestors.into_iter().rev() {
            let (Some(name), above) = (directory.file_name(), directory.parent().filter(|above| !above.as_os_str().is_empty())) else {
                continue;
            };
            let parent = match above {
                Some(above) => open_beneath(self.directory, above, OFlags::PATH | OFlags::DIRECTORY)?,
                None => self.directory.try_clone()?,
            };
            match mkdirat(&parent, name, Mode::from_raw_mode(0o755)) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    /// Lists what lies in a directory, or below it, in the order of the paths, and whether
    /// there is more than `most`, or than [`MAX_LISTED_BYTES`] of their paths. The empty path is the tree's own.
    ///
    /// # Errors
    /// It is missing, or no directory.
    pub fn list(&self, path: &Path, recursive: bool, most: usize) -> Result<(Vec<Listed>, bool), FileError> {
        self.act(|| {
            let directory = match path.as_os_str().is_empty() {
                true => self.directory.try_clone()?,
                false => open_beneath(self.directory, path, OFlags::RDONLY | OFlags::DIRECTORY)?,
            };
            let (mut all, mut left, mut truncated) = (Vec::<Listed>::new(), MAX_LISTED_BYTES, false);
            let above = path.as_os_str().len();
            let visit = &mut |found: &crate::tree::TreeEntry<'_>| {
                let (kind, size) = match found.kind {
                    FileType::RegularFile => ("file", found.size()),
                    FileType::Directory => ("directory", 0),
                    FileType::Symlink => ("link", 0),
                    _ => ("other", 0),
                };
                // A directory that may only be listed is visited twice, or is the top.
                if !found.path.as_os_str().is_empty() && all.last().is_none_or(|last| last.path != found.path) {
                    let length = above + found.path.as_os_str().len();
                    if all.len() == most || length > left {
                        truncated = true;
                        return Walk::Stop;
                    }
                    left -= length;
                    all.push(Listed { path: found.path.to_owned(), kind, size });
                }
                Walk::On
            };
            if recursive { walk(&directory, visit) } else { crate::tree::list(&directory, visit) }?;
            all.sort_by(|a, b| a.path.as_os_str().cmp(b.path.as_os_str()));
            Ok((all, truncated))
        })
    }
}

/// An opened file and its size, if it is a regular file.
fn regular(opened: Result<OwnedFd, Errno>) -> Result<(File, u64), FileError> {
    let file = opened?;
    let stat = fstat(file.as_fd())?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Ok((File::from(file), u64::try_from(stat.st_size).unwrap_or(0))),
        FileType::Directory => Err(FileError::Directory),
        _ => Err(FileError::NotFile),
    }
}
