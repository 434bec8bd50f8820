//! The tree that is unpacked, and the trees of layers below, as an overlay would show them.
//!
//! A path here is real: none of its directories is a symbolic link, and the kernel refuses one that is.
//! It is relative to the root, without a `/` at its beginning; the root's is empty.

use std::os::fd::{AsFd, OwnedFd};

use rustix::{
    fs::{self, AtFlags, FileType, Mode, OFlags, ResolveFlags, Stat, Timespec, Timestamps},
    io::Errno,
};

use crate::opaque::{OPAQUE, OPAQUE_REQUEST};

/// The mode of directories and programs.
pub(super) const PROGRAM: Mode = Mode::from_raw_mode(0o755);
/// The mode of other files.
pub(super) const DATA: Mode = Mode::from_raw_mode(0o644);

const BENEATH: ResolveFlags = ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_XDEV);

/// What this layer has at a path.
pub(super) enum Here {
    Missing,
    Directory,
    Symlink(Vec<u8>),
    Whiteout,
    Other,
}

/// What the layers below have at a path, all together.
pub(super) enum Below {
    Missing,
    Directory,
    Symlink(Vec<u8>),
    /// Open for reading.
    File(OwnedFd),
}

pub(super) struct Tree {
    root: OwnedFd,
    store: OwnedFd,
    /// Paths from the store on, top first.
    below: Vec<String>,
}

impl Tree {
    pub(super) fn new(root: OwnedFd, store: OwnedFd, mut below: Vec<String>) -> Self {
        below.reverse();
        Tree { root, store, below }
    }

    pub(super) fn is_lowest(&self) -> bool {
        self.below.is_empty()
    }

    fn open(&self, path: &[u8], flags: OFlags) -> Result<OwnedFd, Errno> {
        open_at(&self.root, path, flags)
    }

    pub(super) fn directory(&self, path: &[u8]) -> Result<OwnedFd, Errno> {
        self.open(path, OFlags::RDONLY | OFlags::DIRECTORY)
    }

    pub(super) fn file(&self, path: &[u8]) -> Result<OwnedFd, Errno> {
        self.open(path, OFlags::RDONLY | OFlags::NOFOLLOW)
    }

    pub(super) fn here(&self, path: &[u8]) -> Result<Here, Errno> {
        let fd = match self.open(path, OFlags::PATH | OFlags::NOFOLLOW) {
            Err(Errno::NOENT) => return Ok(Here::Missing),
            opened => opened?,
        };
        let found = fs::fstat(&fd)?;
        Ok(match FileType::from_raw_mode(found.st_mode) {
            FileType::Directory => Here::Directory,
            FileType::Symlink => Here::Symlink(fs::readlinkat(&fd, "", Vec::new())?.into_bytes()),
            FileType::CharacterDevice => Here::Whiteout,
            _ => Here::Other,
        })
    }

    /// What an overlay of the layers below, under what this layer hides, shows at a path.
    pub(super) fn below(&self, path: &[u8]) -> Result<Below, Errno> {
        if hides(&self.root, b"", path, asks)? {
            return Ok(Below::Missing);
        }
        for layer in &self.below {
            let prefix = layer.as_bytes();
            let full = [prefix, path].join(&b'/');
            let fd = match open_at(&self.store, &full, OFlags::PATH | OFlags::NOFOLLOW) {
                Ok(fd) => fd,
                Err(Errno::NOENT) if hides(&self.store, prefix, path, is_opaque)? => return Ok(Below::Missing),
                Err(Errno::NOENT) => continue,
                // A directory in the path is a file, a whiteout or a link here, and hides what is below.
                Err(Errno::NOTDIR | Errno::LOOP) => return Ok(Below::Missing),
                Err(errno) => return Err(errno),
            };
            let found: Stat = fs::fstat(&fd)?;
            return Ok(match FileType::from_raw_mode(found.st_mode) {
                FileType::Directory => Below::Directory,
                FileType::Symlink => Below::Symlink(fs::readlinkat(&fd, "", Vec::new())?.into_bytes()),
                FileType::RegularFile => Below::File(open_at(&self.store, &full, OFlags::RDONLY | OFlags::NOFOLLOW)?),
                _ => Below::Missing,
            });
        }
        Ok(Below::Missing)
    }

    pub(super) fn make(&self, path: &[u8]) -> Result<(), Errno> {
        let (directory, name) = self.above(path)?;
        fs::mkdirat(directory, name, PROGRAM)
    }

    /// Asks the process that started this one to mark a directory (`opaque.rs`).
    pub(super) fn make_opaque(&self, path: &[u8]) -> Result<(), Errno> {
        match self.whiteout(&self.directory(path)?, OPAQUE_REQUEST) {
            Err(Errno::EXIST) => Ok(()),
            done => done,
        }
    }

    pub(super) fn whiteout(&self, directory: &OwnedFd, name: &[u8]) -> Result<(), Errno> {
        fs::mknodat(directory, name, FileType::CharacterDevice, Mode::empty(), 0)
    }

    /// Removes what is at a path, whatever it is.
    pub(super) fn remove(&self, path: &[u8]) -> Result<(), Errno> {
        let (directory, name) = self.above(path)?;
        remove(&directory, name)
    }

    fn above<'a>(&self, path: &'a [u8]) -> Result<(OwnedFd, &'a [u8]), Errno> {
        let (above, name) = match path.iter().rposition(|byte| *byte == b'/') {
            Some(slash) => (&path[..slash], &path[slash + 1..]),
            None => (&b""[..], path),
        };
        Ok((self.directory(above)?, name))
    }
}

/// Whether a directory above `path` is opaque in this layer, or is not a directory.
fn hides(base: &OwnedFd, prefix: &[u8], path: &[u8], is_opaque: fn(&OwnedFd) -> Result<bool, Errno>) -> Result<bool, Errno> {
    for slash in path.iter().enumerate().filter(|(_, byte)| **byte == b'/').map(|(at, _)| at) {
        let above = if prefix.is_empty() { path[..slash].to_vec() } else { [prefix, &path[..slash]].join(&b'/') };
        match open_at(base, &above, OFlags::RDONLY | OFlags::DIRECTORY) {
            Ok(fd) if is_opaque(&fd)? => return Ok(true),
            Ok(_) => {}
            Err(Errno::NOENT) => return Ok(false),
            Err(Errno::NOTDIR | Errno::LOOP) => return Ok(true),
            Err(errno) => return Err(errno),
        }
    }
    Ok(false)
}

/// Whether a directory of this layer is to be marked.
fn asks(directory: &OwnedFd) -> Result<bool, Errno> {
    match fs::statat(directory, OPAQUE_REQUEST, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(_) => Ok(true),
        Err(Errno::NOENT) => Ok(false),
        Err(errno) => Err(errno),
    }
}

/// Whether a directory hides those of layers below.
///
/// # Errors
/// The kernel refuses to look.
pub fn is_opaque(directory: &OwnedFd) -> Result<bool, Errno> {
    let mut value = [0; 2];
    match fs::fgetxattr(directory, OPAQUE, &mut value) {
        Ok(length) => Ok(&value[..length] == b"y"),
        Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(false),
        Err(errno) => Err(errno),
    }
}

fn open_at(base: &OwnedFd, path: &[u8], flags: OFlags) -> Result<OwnedFd, Errno> {
    let path = if path.is_empty() { b"." } else { path };
    fs::openat2(base, path, flags | OFlags::CLOEXEC, Mode::empty(), BENEATH)
}

/// Makes a file, which must not be there, and opens it for writing.
pub(super) fn create(directory: &OwnedFd, name: &[u8], mode: Mode) -> Result<OwnedFd, Errno> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    fs::openat2(directory, name, flags, mode, BENEATH)
}

/// Interpreters compare it with what they have compiled.
pub(super) fn set_time(file: impl AsFd, seconds: i64) -> Result<(), Errno> {
    let time = Timespec { tv_sec: seconds, tv_nsec: 0 };
    fs::futimens(file, &Timestamps { last_access: time, last_modification: time })
}

/// Removes a name and all below it. As deep as trees are made, it recurses.
fn remove(directory: &OwnedFd, name: &[u8]) -> Result<(), Errno> {
    match fs::unlinkat(directory, name, AtFlags::empty()) {
        Err(Errno::ISDIR) => {}
        done => return done,
    }
    let inner = open_at(directory, name, OFlags::RDONLY | OFlags::DIRECTORY)?;
    let mut buffer = Vec::with_capacity(16 << 10);
    loop {
        let mut removed = false;
        let mut entries = fs::RawDir::new(&inner, buffer.spare_capacity_mut());
        while let Some(entry) = entries.next() {
            let entry = entry?;
            let name = entry.file_name().to_bytes().to_vec();
            if name != b"." && name != b".." {
                remove(&inner, &name)?;
                removed = true;
            }
        }
        if !removed {
            break;
        }
        // A directory that changes may skip entries, so it is read until it is empty.
        fs::seek(&inner, fs::SeekFrom::Start(0))?;
    }
    fs::unlinkat(directory, name, AtFlags::REMOVEDIR)
}
