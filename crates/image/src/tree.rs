//! Trees of the store: their digests, and the merged tree of many layers.
//!
//! Both read what an unpacker has made, by descriptors and through no link. The digest covers names, kinds,
//! modes, contents, targets and the mark of opaque directories, and neither times nor owners. A merged
//! tree is what an overlay of the layers would show; its files are hard links to theirs.

use std::{
    collections::HashSet,
    fs::File,
    io::{self, Read},
    os::fd::{AsFd, OwnedFd},
    path::Path,
};

use rustix::{
    fs::{self, AtFlags, FileType, Mode, OFlags, Stat},
    io::Errno,
};
use sha2::{Digest as _, Sha256};
use stockade_images::Digest;

use crate::{
    error::{Attempt, ImportError},
    unpack::is_opaque,
};

/// The digest of a tree.
///
/// # Errors
/// It cannot be read.
pub fn digest(root: &Path) -> Result<Digest, ImportError> {
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 128 << 10];
    open_root(root).and_then(|root| Ok(digest_below(&root, &mut hash, &mut buffer)?)).attempt("read", root)?;
    Ok(Digest::of_bytes(&hash.finalize().into()))
}

fn open_root(root: &Path) -> io::Result<OwnedFd> {
    Ok(fs::open(root, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?)
}

fn open_below(directory: impl AsFd, name: &[u8], flags: OFlags) -> Result<OwnedFd, Errno> {
    fs::openat(directory, name, flags | OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
}

/// The names in a directory, sorted.
fn names(directory: impl AsFd) -> Result<Vec<Vec<u8>>, Errno> {
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

fn look(directory: impl AsFd, name: &[u8]) -> Result<(FileType, Stat), Errno> {
    let found = fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)?;
    Ok((FileType::from_raw_mode(found.st_mode), found))
}

fn digest_below(directory: &OwnedFd, hash: &mut Sha256, buffer: &mut [u8]) -> Result<(), Errno> {
    // What has a length says it first, so no two trees are the same bytes.
    let text = |hash: &mut Sha256, text: &[u8]| {
        hash.update((text.len() as u64).to_le_bytes());
        hash.update(text);
    };
    hash.update(if is_opaque(directory)? { b"o" } else { b"d" });
    for name in names(directory)? {
        let (kind, found) = look(directory, &name)?;
        text(hash, &name);
        hash.update(found.st_mode.to_le_bytes());
        match kind {
            FileType::Directory => digest_below(&open_below(directory, &name, OFlags::DIRECTORY)?, hash, buffer)?,
            FileType::Symlink => text(hash, fs::readlinkat(directory, &name[..], Vec::new())?.as_bytes()),
            FileType::RegularFile => {
                hash.update(found.st_size.to_le_bytes());
                let mut file = File::from(open_below(directory, &name, OFlags::NONBLOCK)?);
                loop {
                    match file.read(buffer).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))? {
                        0 => break,
                        length => hash.update(&buffer[..length]),
                    }
                }
            }
            // A whiteout: its mode has said so.
            _ => {}
        }
    }
    hash.update(b"/");
    Ok(())
}

/// Makes the tree that an overlay of these layers, bottom first, would show, in an empty directory of the
/// same file system.
///
/// # Errors
/// The kernel refuses.
pub fn merge(layers: &[impl AsRef<Path>], into: &Path) -> Result<(), ImportError> {
    let open = || layers.iter().rev().map(|layer| open_root(layer.as_ref())).collect::<io::Result<Vec<_>>>();
    let merged = open().and_then(|top_first| Ok(merge_below(&top_first, &open_root(into)?)?));
    merged.attempt("merge the layers into", into)
}

fn merge_below(top_first: &[OwnedFd], into: &OwnedFd) -> Result<(), Errno> {
    let mut seen = HashSet::new();
    for (at, directory) in top_first.iter().enumerate() {
        for name in names(directory)? {
            if seen.contains(&name) {
                continue;
            }
            match look(directory, &name)?.0 {
                FileType::Directory => {
                    let below = same_directory(&top_first[at..], &name)?;
                    fs::mkdirat(into, &name[..], Mode::from_raw_mode(0o755))?;
                    merge_below(&below, &open_below(into, &name, OFlags::DIRECTORY)?)?;
                }
                FileType::CharacterDevice => {}
                _ => link_or_copy(directory, into, &name)?,
            }
            seen.insert(name);
        }
    }
    Ok(())
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

fn link_or_copy(from: &OwnedFd, into: &OwnedFd, name: &[u8]) -> Result<(), Errno> {
    match fs::linkat(from, name, into, name, AtFlags::empty()) {
        // ext4 allows 65,000 links to one file.
        Err(Errno::MLINK) => {}
        done => return done,
    }
    let (kind, found) = look(from, name)?;
    if kind == FileType::Symlink {
        return fs::symlinkat(fs::readlinkat(from, name, Vec::new())?, into, name);
    }
    let mode = Mode::from_raw_mode(found.st_mode & 0o777);
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut source = File::from(open_below(from, name, OFlags::NONBLOCK)?);
    let mut copy = File::from(fs::openat(into, name, flags, mode)?);
    io::copy(&mut source, &mut copy).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
    Ok(())
}
