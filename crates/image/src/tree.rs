//! Trees of the store: their digests, and the merged tree of many layers.
//!
//! Both read what an unpacker has made, by descriptors and through no link. The digest covers names, kinds,
//! modes, contents and targets, whether the owner is who reads, and the extended attributes of files and directories,
//! among them the marks of an overlay; all but names also of the tree's root. It covers neither times
//! nor groups, nor labels that the host gives by itself (`security.selinux` and the like). A merged tree is
//! what an overlay of the layers would show; its files are hard links to theirs, or to one copy where a
//! file can have no more.

use std::{
    collections::{HashMap, HashSet},
    fs::File,
    io::{self, Read},
    os::fd::{AsFd, AsRawFd, OwnedFd},
    path::Path,
};

use rustix::{
    fs::{self, AtFlags, FileType, Mode, OFlags, Stat},
    io::Errno,
    process::geteuid,
};
use sha2::{Digest as _, Sha256};
use stockade_images::Digest;

use crate::{
    error::{Attempt, ImportError},
    unpack::{Limits, is_opaque},
};

/// The digest of a tree.
///
/// # Errors
/// It cannot be read.
pub fn digest(root: &Path) -> Result<Digest, ImportError> {
    let mut hash = Sha256::new();
    let mut contents = Contents::new();
    let mut digest_all = |root: OwnedFd| -> Result<(), Errno> {
        rights(&mut hash, &fs::fstat(&root)?);
        digest_below(&root, &mut hash, &mut contents)
    };
    open_root(root).and_then(|root| Ok(digest_all(root)?)).attempt("read", root)?;
    Ok(Digest::of_bytes(&hash.finalize().into()))
}

/// Digests of files with their attributes, each of which is read once however many names it has.
struct Contents {
    /// Longer than a list of attributes and a value of one (64 KiB, xattr(7)).
    buffer: Vec<u8>,
    /// By inode; a tree lies in one file system.
    known: HashMap<u64, [u8; 32]>,
}

impl Contents {
    fn new() -> Self {
        Contents { buffer: vec![0; 128 << 10], known: HashMap::new() }
    }

    fn digest(&mut self, directory: &OwnedFd, name: &[u8], found: &Stat) -> Result<[u8; 32], Errno> {
        if let Some(known) = self.known.get(&found.st_ino) {
            return Ok(*known);
        }
        let mut file = File::from(open_below(directory, name, OFlags::NONBLOCK)?);
        let mut hash = Sha256::new();
        self.attributes(&file, &mut hash)?;
        loop {
            match file.read(&mut self.buffer).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))? {
                0 => break,
                length => hash.update(&self.buffer[..length]),
            }
        }
        let digest = hash.finalize().into();
        if found.st_nlink > 1 {
            self.known.insert(found.st_ino, digest);
        }
        Ok(digest)
    }

    fn attributes(&mut self, of: impl AsFd, hash: &mut Sha256) -> Result<(), Errno> {
        let length = match fs::flistxattr(&of, &mut self.buffer[..]) {
            Err(Errno::OPNOTSUPP) => 0,
            listed => listed?,
        };
        let listed = self.buffer[..length].split(|byte| *byte == 0);
        let mut names: Vec<Vec<u8>> = listed.filter(|name| is_of_tree(name)).map(<[u8]>::to_vec).collect();
        names.sort();
        hash.update((names.len() as u64).to_le_bytes());
        for name in names {
            // A file system can list what it has no value of.
            let length = match fs::fgetxattr(&of, &name[..], &mut self.buffer[..]) {
                Err(Errno::NODATA | Errno::OPNOTSUPP) => 0,
                read => read?,
            };
            text(hash, &name);
            text(hash, &self.buffer[..length]);
        }
        Ok(())
    }
}

/// Whether an attribute is part of a tree. Labels and hashes of security modules are the host's, which may
/// change them at any time.
fn is_of_tree(attribute: &[u8]) -> bool {
    !attribute.is_empty() && (!attribute.starts_with(b"security.") || attribute == b"security.capability")
}

/// What has a length says it first, so no two trees are the same bytes.
fn text(hash: &mut Sha256, text: &[u8]) {
    hash.update((text.len() as u64).to_le_bytes());
    hash.update(text);
}

/// The mode, and whether the file is of who reads it: that is the store's owner, under whatever number.
fn rights(hash: &mut Sha256, found: &Stat) {
    hash.update(found.st_mode.to_le_bytes());
    hash.update([u8::from(found.st_uid == geteuid().as_raw())]);
}

pub(crate) fn open_root(root: &Path) -> io::Result<OwnedFd> {
    Ok(fs::open(root, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?)
}

pub(crate) fn open_below(directory: impl AsFd, name: &[u8], flags: OFlags) -> Result<OwnedFd, Errno> {
    fs::openat(directory, name, flags | OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
}

/// The names in a directory, sorted.
pub(crate) fn names(directory: impl AsFd) -> Result<Vec<Vec<u8>>, Errno> {
    let mut names = Vec::new();
    for entry in fs::Dir::read_from(directory)? {
        let name = entry?.file_name().to_bytes().to_vec();
        if name != b"." && name != b".." {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}

pub(crate) fn look(directory: impl AsFd, name: &[u8]) -> Result<(FileType, Stat), Errno> {
    let found = fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)?;
    Ok((FileType::from_raw_mode(found.st_mode), found))
}

fn digest_below(directory: &OwnedFd, hash: &mut Sha256, contents: &mut Contents) -> Result<(), Errno> {
    contents.attributes(directory, hash)?;
    for name in names(directory)? {
        let (kind, found) = look(directory, &name)?;
        text(hash, &name);
        rights(hash, &found);
        match kind {
            FileType::Directory => digest_below(&open_below(directory, &name, OFlags::DIRECTORY)?, hash, contents)?,
            FileType::Symlink => text(hash, fs::readlinkat(directory, &name[..], Vec::new())?.as_bytes()),
            FileType::RegularFile => hash.update(contents.digest(directory, &name, &found)?),
            // A whiteout: its mode has said so.
            _ => {}
        }
    }
    hash.update(b"/");
    Ok(())
}

/// Makes the tree that an overlay of these layers, bottom first, would show, in an empty directory of the
/// same file system. `limits` are for what it makes beside hard links.
///
/// # Errors
/// It would make more, or the kernel refuses.
pub fn merge(layers: &[impl AsRef<Path>], into: &Path, limits: Limits) -> Result<(), ImportError> {
    let open = || layers.iter().rev().map(|layer| open_root(layer.as_ref())).collect::<io::Result<Vec<_>>>();
    let (top_first, root) = open().and_then(|top_first| Ok((top_first, open_root(into)?))).attempt("merge the layers into", into)?;
    match (Merge { left: limits, copies: HashMap::new() }).below(&top_first, &root) {
        Ok(()) => Ok(()),
        Err(Stopped::Limit) => Err(ImportError::Merged { bytes: limits.bytes, entries: limits.entries }),
        Err(Stopped::Kernel(errno)) => Err(errno).attempt("merge the layers into", into),
    }
}

/// Why a merge has ended.
#[derive(Debug, PartialEq, Eq)]
enum Stopped {
    Limit,
    Kernel(Errno),
}

impl From<Errno> for Stopped {
    fn from(errno: Errno) -> Self {
        Stopped::Kernel(errno)
    }
}

/// A merge of layers.
struct Merge {
    left: Limits,
    /// The last copy of a file that can have no more links, by the file's inode.
    copies: HashMap<u64, OwnedFd>,
}

impl Merge {
    fn below(&mut self, top_first: &[OwnedFd], into: &OwnedFd) -> Result<(), Stopped> {
        let mut seen = HashSet::new();
        for (at, directory) in top_first.iter().enumerate() {
            for name in names(directory)? {
                if seen.contains(&name) {
                    continue;
                }
                match look(directory, &name)?.0 {
                    FileType::Directory => {
                        let below = same_directory(&top_first[at..], &name)?;
                        self.count(0)?;
                        fs::mkdirat(into, &name[..], Mode::from_raw_mode(0o755))?;
                        self.below(&below, &open_below(into, &name, OFlags::DIRECTORY)?)?;
                    }
                    FileType::CharacterDevice => {}
                    _ => match fs::linkat(directory, &name[..], into, &name[..], AtFlags::empty()) {
                        // ext4 allows 65,000 links to one file.
                        Err(Errno::MLINK) => self.link_to_copy(directory, into, &name)?,
                        done => done?,
                    },
                }
                seen.insert(name);
            }
        }
        Ok(())
    }

    /// Counts one file or directory, and bytes.
    fn count(&mut self, bytes: u64) -> Result<(), Stopped> {
        let left = self.left.bytes.checked_sub(bytes).zip(self.left.entries.checked_sub(1));
        self.left = left.map(|(bytes, entries)| Limits { bytes, entries }).ok_or(Stopped::Limit)?;
        Ok(())
    }

    /// Gives a name in the merged tree to a copy of a file, which is made where there is none or it can have no
    /// more links either.
    fn link_to_copy(&mut self, from: &OwnedFd, into: &OwnedFd, name: &[u8]) -> Result<(), Stopped> {
        let (kind, found) = look(from, name)?;
        if kind == FileType::Symlink {
            self.count(0)?;
            return Ok(fs::symlinkat(fs::readlinkat(from, name, Vec::new())?, into, name)?);
        }
        if let Some(copy) = self.copies.get(&found.st_ino) {
            // AT_EMPTY_PATH needs a capability; this leads to the open file without one (linkat(2)).
            let copy = format!("/proc/self/fd/{}", copy.as_raw_fd());
            match fs::linkat(fs::CWD, copy, into, name, AtFlags::SYMLINK_FOLLOW) {
                Err(Errno::MLINK) => {}
                done => return Ok(done?),
            }
        }
        self.count(u64::try_from(found.st_size).unwrap_or(u64::MAX))?;
        let mode = Mode::from_raw_mode(found.st_mode & 0o777);
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut source = File::from(open_below(from, name, OFlags::NONBLOCK)?);
        let mut copy = File::from(fs::openat(into, name, flags, mode)?);
        io::copy(&mut source, &mut copy).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
        self.copies.insert(found.st_ino, copy.into());
        Ok(())
    }
}

/// The directories of this name that are one, top first: down to an opaque one, or to what is none.
fn same_directory(top_first: &[OwnedFd], name: &[u8]) -> Result<Vec<OwnedFd>, Errno> {
    let mut same = Vec::new();
    for layer in top_first {
        match look(layer, name) {
            Ok((FileType::Directory, _)) => same.push(open_below(layer, name, OFlags::DIRECTORY)?),
            Ok(_) => break,
            Err(Errno::NOENT) => continue,
            Err(errno) => return Err(errno),
        }
        if same.last().map(is_opaque).transpose()?.unwrap_or(false) {
            break;
        }
    }
    Ok(same)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use std::{env, fs, os::unix::fs::MetadataExt, path::PathBuf, process};

    use super::*;

    fn directory(name: &str) -> PathBuf {
        let path = env::temp_dir().join(format!("stockade-tree-{}-{name}", process::id()));
        fs::create_dir(&path).unwrap();
        path
    }

    #[test]
    fn a_file_of_many_names_is_read_once_and_the_digest_is_that_of_files_of_their_own() {
        let (linked, apart) = (directory("linked"), directory("apart"));
        fs::write(linked.join("a"), "content").unwrap();
        fs::hard_link(linked.join("a"), linked.join("b")).unwrap();
        for name in ["a", "b"] {
            fs::write(apart.join(name), "content").unwrap();
        }
        assert_eq!(digest(&linked).unwrap(), digest(&apart).unwrap());
        fs::write(apart.join("b"), "CONTENT").unwrap();
        assert_ne!(digest(&linked).unwrap(), digest(&apart).unwrap());
        // What was read of the first name is what the second has, even where it cannot be read any more.
        let root = open_root(&linked).unwrap();
        let mut contents = Contents::new();
        let (_, found) = look(&root, b"a").unwrap();
        let first = contents.digest(&root, b"a", &found).unwrap();
        fs::remove_file(linked.join("b")).unwrap();
        assert_eq!(contents.digest(&root, b"b", &found).unwrap(), first);
        contents.known.clear();
        assert_eq!(contents.digest(&root, b"b", &found), Err(Errno::NOENT), "the control");
        [linked, apart].iter().for_each(|path| fs::remove_dir_all(path).unwrap());
    }

    #[test]
    fn a_file_with_no_links_left_is_copied_once_and_within_the_limits() {
        let (from, into) = (directory("from"), directory("into"));
        fs::write(from.join("a"), "four").unwrap();
        fs::hard_link(from.join("a"), from.join("b")).unwrap();
        let (layer, tree) = (open_root(&from).unwrap(), open_root(&into).unwrap());
        let mut merge = Merge { left: Limits { bytes: 7, entries: 2 }, copies: HashMap::new() };
        for name in [b"a", b"b"] {
            merge.link_to_copy(&layer, &tree, name).unwrap();
        }
        let [a, b] = ["a", "b"].map(|name| fs::metadata(into.join(name)).unwrap());
        assert_eq!((a.ino(), a.nlink(), merge.left.bytes, merge.left.entries), (b.ino(), 2, 3, 1));
        assert_eq!(fs::read(into.join("b")).unwrap(), b"four");
        // Another file of four bytes has no room.
        fs::write(from.join("c"), "more").unwrap();
        assert_eq!(merge.link_to_copy(&layer, &tree, b"c"), Err(Stopped::Limit));
        assert!(!into.join("c").exists());
        merge.left.bytes = 4;
        merge.link_to_copy(&layer, &tree, b"c").unwrap();
        [from, into].iter().for_each(|path| fs::remove_dir_all(path).unwrap());
    }
}
