//! Unpacks the archive of one layer into a directory that becomes a lower directory of an overlay.
//!
//! Names are resolved inside the image, as the programs in it would resolve them, and never by the
//! kernel through a symbolic link: `openat2` with RESOLVE_BENEATH and RESOLVE_NO_SYMLINKS opens all. A
//! name that is absolute or has `..` is an error. Nothing that is made has a set-ID bit, is a device
//! (but whiteouts) or belongs to another user than the store's owner; what is lost is counted. The
//! number of files, their bytes and the depth are limited. The caller confines the process before.
//!
//! Semantics are those of containerd (`pkg/archive/tar.go`): the directories in a name are followed
//! through links, also those of layers below; its last part replaces what was there, but for a directory
//! that meets a directory. Whiteouts hide what is below, and nothing of the same layer (OCI image
//! layer specification). A hard link to a file of a layer below becomes a copy.

mod tree;

pub use tree::is_opaque;

use std::{
    io::{self, BufRead, Write},
    os::fd::OwnedFd,
};

use rustix::{fs, io::Errno};
use serde::{Deserialize, Serialize};
use stockade_images::Dropped;
use stockade_protocol::text::escape_bytes;

use crate::{
    opaque::OPAQUE_REQUEST,
    tar::{Archive, Entry, Kind, TarError},
};
use tree::{Below, Here, Tree};

/// The most directories above a file. `rm -r` and others of the host recurse into them.
pub const MAX_DEPTH: usize = 128;
/// The longest path, in bytes: the path of its layer comes before it, and PATH_MAX is 4096.
const MAX_PATH_LEN: usize = 3840;
/// NAME_MAX.
const MAX_NAME_LEN: usize = 255;
/// As many links are followed in one name as the kernel follows.
const MAX_LINKS: usize = 40;
/// Begins the name of a whiteout.
const WHITEOUT: &[u8] = b".wh.";
/// Begins what AUFS keeps for itself.
const AUFS: &[u8] = b".wh..wh.";

/// How much an unpacker may make.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes of all files.
    pub bytes: u64,
    /// Files, directories and links.
    pub entries: u64,
}

/// What was unpacked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Unpacked {
    /// Bytes of its files.
    pub bytes: u64,
    /// Files, directories and links.
    pub entries: u64,
    /// The tree depends on layers below.
    pub refers_below: bool,
    /// What it has not of the archive.
    pub dropped: Dropped,
}

/// Why a layer cannot be unpacked.
#[derive(Debug, thiserror::Error)]
pub enum UnpackError {
    /// Of the archive itself.
    #[error(transparent)]
    Tar(#[from] TarError),
    /// One of its entries.
    #[error("entry {}: {problem}", escape_bytes(.name, 200))]
    Entry {
        /// Its name.
        name: Vec<u8>,
        /// What is wrong.
        problem: Problem,
    },
}

/// What is wrong with an entry.
#[derive(Debug, thiserror::Error)]
pub enum Problem {
    /// `/etc/passwd`.
    #[error("its name is absolute")]
    Absolute,
    /// `../x`.
    #[error("its name has `..`, which could lead out of the image")]
    LeadsOut,
    /// Empty, or longer than a file system takes.
    #[error("its name is empty, a part of it has more than 255 bytes, or all of it more than 3840")]
    Length,
    /// Too deep.
    #[error("it lies below more than 128 directories")]
    Depth,
    /// `.wh.` alone, or `.wh...`.
    #[error("it is a whiteout of no file")]
    Whiteout,
    /// An opaque root.
    #[error("it hides all layers below; an image that needs none of them must not have them")]
    OpaqueRoot,
    /// A file where a directory must be.
    #[error("its directory is a file")]
    NotADirectory,
    /// Links that lead in a circle.
    #[error("its directory is behind more than 40 symbolic links")]
    TooManyLinks,
    /// A hard link to nothing.
    #[error("it is a hard link to {}, which is no file of this layer or of one below", escape_bytes(.0, 200))]
    NoTarget(Vec<u8>),
    /// A symbolic link to nothing or with a target that is too long.
    #[error("the target of the symbolic link is empty or has more than 4095 bytes")]
    Target,
    /// More bytes than allowed.
    #[error("with it the image has more than {0} bytes, the most that --max-size allows or that the file system has room for")]
    Bytes(u64),
    /// More entries than allowed.
    #[error(
        "with it the image has more than {0} files, directories and links, the most that are allowed or that the file system has room for"
    )]
    Entries(u64),
    /// The kernel refuses.
    #[error("{0} it: {1}")]
    Kernel(&'static str, Errno),
    /// Its content.
    #[error("write it: {0}")]
    Write(io::Error),
}

/// Maps the kernel's refusal of an act.
fn refused(verb: &'static str) -> impl Fn(Errno) -> Problem {
    move |errno| Problem::Kernel(verb, errno)
}

/// A directory that is open, with the name that led there and its real path.
struct Place {
    named: Vec<u8>,
    real: Vec<u8>,
    fd: OwnedFd,
}

/// Unpacks one layer.
pub struct Unpacker {
    tree: Tree,
    limits: Limits,
    done: Unpacked,
    /// The directory of the entry before: mostly it is that of the next, too.
    last: Option<Place>,
}

impl Unpacker {
    /// An unpacker into `tree`, whose layers below are at these paths from `store` on, bottom first.
    pub fn new(tree: OwnedFd, store: OwnedFd, below: Vec<String>, limits: Limits) -> Self {
        Unpacker { tree: Tree::new(tree, store, below), limits, done: Unpacked::default(), last: None }
    }

    /// Unpacks an archive, and reads on to the end of `input`.
    ///
    /// # Errors
    /// Of the archive, of an entry, or of the kernel. What was made stays.
    pub fn unpack(mut self, input: impl BufRead) -> Result<Unpacked, UnpackError> {
        let mut archive = Archive::new(input);
        while let Some(entry) = archive.next_entry()? {
            self.enter(&entry, &mut archive).map_err(|failed| match failed {
                Failed::Tar(error) => UnpackError::Tar(error),
                Failed::Entry(problem) => UnpackError::Entry { name: entry.name.clone(), problem },
            })?;
        }
        archive.drain()?;
        Ok(self.done)
    }

    fn enter(&mut self, entry: &Entry, archive: &mut Archive<impl BufRead>) -> Result<(), Failed> {
        let parts = parts(&entry.name)?;
        let dropped = &mut self.done.dropped;
        dropped.xattrs += u64::from(entry.xattrs > 0);
        dropped.owners += u64::from(!entry.is_roots);
        dropped.set_id += u64::from(entry.mode & 0o7000 != 0 && matches!(entry.kind, Kind::File | Kind::Directory));
        let Some((&name, above)) = parts.split_last() else {
            // The root itself.
            return if entry.kind == Kind::Directory { Ok(()) } else { Err(Problem::NotADirectory.into()) };
        };
        if name.starts_with(AUFS) && name != OPAQUE_REQUEST {
            return Ok(());
        }
        match entry.kind {
            Kind::Device if !name.starts_with(WHITEOUT) => dropped.devices += 1,
            Kind::Fifo if !name.starts_with(WHITEOUT) => dropped.fifos += 1,
            _ => {
                let place = self.place(above)?;
                self.make(entry, &place, name, archive)?;
                // No other: what was just replaced may have led to one.
                self.last = Some(place);
            }
        }
        Ok(())
    }

    fn make(&mut self, entry: &Entry, place: &Place, name: &[u8], archive: &mut Archive<impl BufRead>) -> Result<(), Failed> {
        if name == OPAQUE_REQUEST {
            return Ok(self.hide_all(place)?);
        }
        if let Some(hidden) = name.strip_prefix(WHITEOUT) {
            return Ok(self.hide(place, hidden)?);
        }
        // Within the limits behind links, too.
        join(&place.real, name)?;
        self.count(0)?;
        match entry.kind {
            Kind::Directory => Ok(self.directory(place, name)?),
            Kind::Symlink => Ok(self.symlink(place, name, &entry.target)?),
            Kind::HardLink => self.hard_link(place, name, &entry.target),
            _ => self.file(place, name, entry, archive),
        }
    }

    /// Counts one file, directory or link, and bytes.
    fn count(&mut self, bytes: u64) -> Result<(), Problem> {
        self.done.entries += 1;
        self.done.bytes = self.done.bytes.saturating_add(bytes);
        if self.done.entries > self.limits.entries {
            return Err(Problem::Entries(self.limits.entries));
        }
        if self.done.bytes > self.limits.bytes {
            return Err(Problem::Bytes(self.limits.bytes));
        }
        Ok(())
    }

    /// The directory of these names, which is made where it is not there.
    fn place(&mut self, above: &[&[u8]]) -> Result<Place, Problem> {
        let named = above.join(&b'/');
        if let Some(place) = self.last.take().filter(|place| place.named == named) {
            return Ok(place);
        }
        let real = self.resolve(above, true)?;
        let fd = self.tree.directory(&real).map_err(refused("open the directory of"))?;
        Ok(Place { named, real, fd })
    }

    /// The real path of a directory, behind links of this layer and of those below. With `make` it is
    /// made in this layer where it is not there.
    fn resolve(&mut self, named: &[&[u8]], make: bool) -> Result<Vec<u8>, Problem> {
        let mut left: Vec<Vec<u8>> = named.iter().rev().map(|part| part.to_vec()).collect();
        let (mut real, mut links) = (Vec::new(), 0);
        while let Some(part) = left.pop() {
            match part.as_slice() {
                b"" | b"." => continue,
                b".." => {
                    let end = real.iter().rposition(|byte| *byte == b'/').unwrap_or(0);
                    real.truncate(end);
                    continue;
                }
                // A directory of this name would be in the way of the request to mark its parent.
                OPAQUE_REQUEST => return Err(Problem::Whiteout),
                _ => {}
            }
            let next = join(&real, &part)?;
            let target = match self.tree.here(&next).map_err(refused("look at the directory of"))? {
                Here::Directory => None,
                Here::Symlink(target) => Some(target),
                Here::Other => return Err(Problem::NotADirectory),
                Here::Whiteout if make => {
                    self.count(0)?;
                    self.tree.remove(&next).and_then(|()| self.tree.make(&next)).map_err(refused("make the directory of"))?;
                    self.make_opaque(&next)?;
                    None
                }
                Here::Whiteout => return Err(Problem::NotADirectory),
                Here::Missing => {
                    // Another layer below could have a link there.
                    self.done.refers_below = true;
                    match self.tree.below(&next).map_err(refused("look below for the directory of"))? {
                        Below::Symlink(target) => Some(target),
                        Below::File(_) => return Err(Problem::NotADirectory),
                        Below::Missing | Below::Directory => {
                            if make {
                                self.count(0)?;
                                self.tree.make(&next).map_err(refused("make the directory of"))?;
                            }
                            None
                        }
                    }
                }
            };
            let Some(target) = target else {
                real = next;
                continue;
            };
            links += 1;
            if links > MAX_LINKS {
                return Err(Problem::TooManyLinks);
            }
            if target.starts_with(b"/") {
                real.clear();
            }
            left.extend(target.split(|byte| *byte == b'/').rev().map(<[u8]>::to_vec));
        }
        Ok(real)
    }

    /// Hides a name of the layers below.
    fn hide(&mut self, place: &Place, name: &[u8]) -> Result<(), Problem> {
        if matches!(name, b"" | b"." | b"..") {
            return Err(Problem::Whiteout);
        }
        self.done.refers_below = true;
        if self.tree.is_lowest() {
            // There is nothing to hide, and an overlay shows the whiteouts of its lowest layer.
            return Ok(());
        }
        match self.tree.whiteout(&place.fd, name) {
            Ok(()) => self.count(0),
            // What this layer has of that name stays, and only that.
            Err(Errno::EXIST) => {
                let path = join(&place.real, name)?;
                if matches!(self.tree.here(&path).map_err(refused("look at"))?, Here::Directory) {
                    self.make_opaque(&path)?;
                }
                Ok(())
            }
            Err(errno) => Err(Problem::Kernel("make", errno)),
        }
    }

    /// What asks for the mark takes an inode.
    fn make_opaque(&mut self, path: &[u8]) -> Result<(), Problem> {
        self.count(0)?;
        self.tree.make_opaque(path).map_err(refused("make opaque"))
    }

    fn hide_all(&mut self, place: &Place) -> Result<(), Problem> {
        if place.real.is_empty() {
            return Err(Problem::OpaqueRoot);
        }
        self.done.refers_below = true;
        self.make_opaque(&place.real)
    }

    fn directory(&mut self, place: &Place, name: &[u8]) -> Result<(), Problem> {
        match fs::mkdirat(&place.fd, name, tree::PROGRAM) {
            Ok(()) => Ok(()),
            Err(Errno::EXIST) => {
                let path = join(&place.real, name)?;
                if matches!(self.tree.here(&path).map_err(refused("look at"))?, Here::Directory) {
                    return Ok(());
                }
                // What was there had hidden a directory below.
                self.tree.remove(&path).and_then(|()| self.tree.make(&path)).map_err(refused("make"))?;
                self.make_opaque(&path)
            }
            Err(errno) => Err(Problem::Kernel("make", errno)),
        }
    }

    /// Does what makes a name, once more after what had the name was removed.
    fn replacing<T>(&mut self, place: &Place, name: &[u8], act: impl Fn() -> Result<T, Errno>) -> Result<T, Problem> {
        match act() {
            Err(Errno::EXIST) => {}
            done => return done.map_err(refused("make")),
        }
        self.tree.remove(&join(&place.real, name)?).map_err(refused("replace"))?;
        act().map_err(refused("make"))
    }

    fn symlink(&mut self, place: &Place, name: &[u8], target: &[u8]) -> Result<(), Problem> {
        if target.is_empty() || target.len() > 4095 {
            return Err(Problem::Target);
        }
        self.replacing(place, name, || fs::symlinkat(target, &place.fd, name))
    }

    fn file(&mut self, place: &Place, name: &[u8], entry: &Entry, archive: &mut Archive<impl BufRead>) -> Result<(), Failed> {
        self.done.bytes = self.done.bytes.saturating_add(entry.size);
        if self.done.bytes > self.limits.bytes {
            return Err(Problem::Bytes(self.limits.bytes).into());
        }
        let mode = if entry.mode & 0o111 == 0 { tree::DATA } else { tree::PROGRAM };
        let fd = self.replacing(place, name, || tree::create(&place.fd, name, mode))?;
        let mut file = std::fs::File::from(fd);
        archive.copy_to(&mut file)?;
        tree::set_time(&file, entry.mtime).map_err(|errno| Problem::Kernel("set the time of", errno))?;
        Ok(())
    }

    fn hard_link(&mut self, place: &Place, name: &[u8], target: &[u8]) -> Result<(), Failed> {
        let missing = || Problem::NoTarget(target.to_vec());
        // Some programs write it from the root on.
        let relative = target.iter().position(|byte| *byte != b'/').map_or(&[][..], |first| &target[first..]);
        let parts = parts(relative).map_err(|_| missing())?;
        let (&last, above) = parts.split_last().ok_or_else(missing)?;
        let directory = self.resolve(above, false)?;
        let real = join(&directory, last)?;
        if real == join(&place.real, name)? {
            return Err(missing().into());
        }
        match self.tree.here(&real).map_err(refused("look at the target of"))? {
            Here::Symlink(target) => Ok(self.symlink(place, name, &target)?),
            Here::Other => {
                let from = self.tree.directory(&directory).map_err(refused("open the target of"))?;
                let link = || fs::linkat(&from, last, &place.fd, name, fs::AtFlags::empty());
                match self.replacing(place, name, link) {
                    Ok(()) => return Ok(()),
                    // Landlock before Linux 5.19 allows no link between directories; a file may have many links.
                    Err(Problem::Kernel(_, Errno::XDEV | Errno::MLINK)) => {}
                    Err(problem) => return Err(problem.into()),
                }
                let source = self.tree.file(&real).map_err(refused("open the target of"))?;
                self.copy(place, name, source)
            }
            Here::Missing => {
                self.done.refers_below = true;
                match self.tree.below(&real).map_err(refused("look below for the target of"))? {
                    Below::File(source) => self.copy(place, name, source),
                    Below::Symlink(target) => Ok(self.symlink(place, name, &target)?),
                    _ => Err(missing().into()),
                }
            }
            _ => Err(missing().into()),
        }
    }

    fn copy(&mut self, place: &Place, name: &[u8], source: OwnedFd) -> Result<(), Failed> {
        let found = fs::fstat(&source).map_err(refused("look at the target of"))?;
        let size = u64::try_from(found.st_size).unwrap_or(0);
        self.done.bytes = self.done.bytes.saturating_add(size);
        if self.done.bytes > self.limits.bytes {
            return Err(Problem::Bytes(self.limits.bytes).into());
        }
        let fd = self.replacing(place, name, || tree::create(&place.fd, name, fs::Mode::from(found.st_mode & 0o777)))?;
        let (mut from, mut to) = (std::fs::File::from(source), std::fs::File::from(fd));
        copy_all(&mut from, &mut to).map_err(Problem::Write)?;
        tree::set_time(&to, found.st_mtime).map_err(refused("set the time of"))?;
        Ok(())
    }
}

/// By read and write alone: the process has no other call for it.
fn copy_all(from: &mut impl io::Read, to: &mut impl Write) -> io::Result<()> {
    let mut buffer = vec![0; 64 << 10];
    loop {
        match from.read(&mut buffer)? {
            0 => return Ok(()),
            length => to.write_all(&buffer[..length])?,
        }
    }
}

enum Failed {
    Tar(TarError),
    Entry(Problem),
}

impl From<Problem> for Failed {
    fn from(problem: Problem) -> Self {
        Failed::Entry(problem)
    }
}

impl From<TarError> for Failed {
    fn from(error: TarError) -> Self {
        match error {
            TarError::Write(error) => Failed::Entry(Problem::Write(error)),
            error => Failed::Tar(error),
        }
    }
}

/// The parts of a name; none for the root.
fn parts(name: &[u8]) -> Result<Vec<&[u8]>, Problem> {
    if name.starts_with(b"/") {
        return Err(Problem::Absolute);
    }
    if name.is_empty() {
        return Err(Problem::Length);
    }
    let parts: Vec<&[u8]> = name.split(|byte| *byte == b'/').filter(|part| !matches!(*part, b"" | b".")).collect();
    if parts.contains(&&b".."[..]) {
        return Err(Problem::LeadsOut);
    }
    if name.len() > MAX_PATH_LEN || parts.iter().any(|part| part.len() > MAX_NAME_LEN) {
        return Err(Problem::Length);
    }
    Ok(parts)
}

/// A real path and one more part, within the limits.
fn join(real: &[u8], part: &[u8]) -> Result<Vec<u8>, Problem> {
    let joined = if real.is_empty() { part.to_vec() } else { [real, part].join(&b'/') };
    if part.len() > MAX_NAME_LEN || joined.len() > MAX_PATH_LEN {
        return Err(Problem::Length);
    }
    if joined.iter().filter(|byte| **byte == b'/').count() > MAX_DEPTH {
        return Err(Problem::Depth);
    }
    Ok(joined)
}
