//! Walking a directory that hostile code may have written.
//!
//! No link is followed, no other file system is entered, and depth and number of
//! entries are bounded. Nothing is opened but directories.

use std::{
    ffi::{CStr, OsStr},
    os::unix::ffi::OsStrExt,
    path::Path,
};

use rustix::{
    fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, ResolveFlags, Statx, StatxFlags, lgetxattr, makedev, openat, openat2, statx},
    io::Errno,
};

const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// Opens a directory by an absolute path in which no component is a link.
///
/// # Errors
/// ELOOP for a link, else what openat2(2) answers.
pub(crate) fn open_directory(path: &Path) -> Result<OwnedFd, Errno> {
    openat2(CWD, path, DIRECTORY, Mode::empty(), ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS)
}

/// Opens an absolute path to be looked at, following no link: a link at its end is opened
/// itself.
///
/// # Errors
/// ELOOP for a link in the middle, else what openat2(2) answers.
pub(crate) fn open_entry(path: &Path) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat2(CWD, path, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS)
}

/// Opens a file by an absolute path in which no component is a link. One without a writer is opened
/// at once.
///
/// # Errors
/// ELOOP for a link, else what openat2(2) answers.
pub(crate) fn open_to_read(path: &Path) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    openat2(CWD, path, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS)
}

/// Opens a path in which no component is a link, to be mounted elsewhere.
///
/// # Errors
/// ELOOP for a link, else what openat2(2) answers.
pub(crate) fn open_unlinked(path: impl rustix::path::Arg) -> Result<OwnedFd, Errno> {
    openat2(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty(), ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS)
}

/// Opens a path inside the sandbox, after the pivot, following its links but those of `/proc` to open
/// files, working directories and roots: any of them may lead to the host.
///
/// # Errors
/// ELOOP for such a link, else what openat2(2) answers.
pub(crate) fn open_inside(path: &CStr, more: OFlags) -> Result<OwnedFd, Errno> {
    openat2(CWD, path, OFlags::PATH | OFlags::CLOEXEC | more, Mode::empty(), ResolveFlags::NO_MAGICLINKS)
}

/// Opens something below a directory: through no link, not above it, on no other file system.
///
/// # Errors
/// What openat2(2) answers: ELOOP, EXDEV.
pub(crate) fn open_beneath(directory: impl AsFd, path: &Path, flags: OFlags) -> Result<OwnedFd, Errno> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS | ResolveFlags::NO_XDEV;
    openat2(directory, path, flags | OFlags::CLOEXEC, Mode::empty(), resolve)
}

/// One entry of a walked tree.
pub(crate) struct TreeEntry<'a> {
    /// Path below the start, without a leading slash; bytes, which need not be UTF-8.
    pub(crate) path: &'a Path,
    pub(crate) kind: FileType,
    /// Where it lies, and its name there.
    parent: BorrowedFd<'a>,
    name: &'a CStr,
    stat: Statx,
    /// A directory that is not entered, or not to its end: it is unreadable, too deep, has too
    /// long a path or is on another file system. A directory without search right is visited
    /// twice.
    pub(crate) closed: bool,
}

impl TreeEntry<'_> {
    /// Its length in bytes.
    pub(crate) fn size(&self) -> u64 {
        self.stat.stx_size
    }

    /// Whether it is a program that runs with other rights than its caller's: by set-ID bits, or
    /// by file capabilities. True also where the kernel does not tell.
    pub(crate) fn gives_rights(&self) -> bool {
        let has_set_id = || Mode::from_raw_mode(self.stat.stx_mode.into()).intersects(Mode::SUID | Mode::SGID);
        self.kind.is_file() && (has_set_id() || self.has_capabilities())
    }

    fn has_capabilities(&self) -> bool {
        // No call of all kernels takes a directory and a name.
        let directory = format!("/proc/self/fd/{}", self.parent.as_raw_fd());
        let path = Path::new(&directory).join(OsStr::from_bytes(self.name.to_bytes()));
        let none: &mut [u8] = &mut [];
        !matches!(lgetxattr(&path, c"security.capability", none), Err(Errno::NODATA | Errno::NOTSUP | Errno::NOENT))
    }

    /// How many names it has.
    pub(crate) fn links(&self) -> u64 {
        self.stat.stx_nlink.into()
    }

    /// The bytes that are allocated for it.
    pub(crate) fn allocated(&self) -> u64 {
        self.stat.stx_blocks * 512
    }

    /// When its content or its status was last changed (ctime): seconds and nanoseconds.
    pub(crate) fn changed(&self) -> (i64, u32) {
        (self.stat.stx_ctime.tv_sec, self.stat.stx_ctime.tv_nsec)
    }

    /// When it was made, as its status was last changed; none where the file system does not tell.
    pub(crate) fn born(&self) -> Option<(i64, u32)> {
        let tells = StatxFlags::from_bits_retain(self.stat.stx_mask).contains(StatxFlags::BTIME);
        tells.then_some((self.stat.stx_btime.tv_sec, self.stat.stx_btime.tv_nsec))
    }

    /// Device and inode.
    pub(crate) fn file_id(&self) -> (u64, u64) {
        (device(&self.stat), self.stat.stx_ino)
    }

    /// The mount that it was seen through.
    pub(crate) fn mount(&self) -> u64 {
        self.stat.stx_mnt_id
    }
}

/// The status of an entry; a link's own.
fn look_at(directory: impl AsFd, name: &CStr) -> Result<Statx, Errno> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT | AtFlags::EMPTY_PATH;
    statx(directory, name, flags, StatxFlags::BASIC_STATS | StatxFlags::BTIME | StatxFlags::MNT_ID)
}

fn device(stat: &Statx) -> u64 {
    makedev(stat.stx_dev_major, stat.stx_dev_minor)
}

/// The mount that a directory was opened through.
///
/// # Errors
/// What statx(2) answers.
pub(crate) fn mount_of(directory: impl AsFd) -> Result<u64, Errno> {
    look_at(directory, c"").map(|stat| stat.stx_mnt_id)
}

/// Whether one of a policy's or a request's globs matches a path, byte for byte.
pub(crate) fn matches(glob: &str, path: &Path) -> bool {
    fast_glob::glob_match(glob, path.as_os_str().as_bytes())
}

/// Whether a walk goes on.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Walk {
    On,
    Stop,
}

/// Each level holds two descriptors.
const MAX_DEPTH: usize = 200;
/// Bytes of the path of a directory that is entered: with the scratch's path before it and a name
/// behind it, it still fits into PATH_MAX.
const MAX_PATH_LEN: usize = 2048;

/// Visits the entries of `top` and none below them, as [`walk`] does.
///
/// # Errors
/// It cannot be read.
pub(crate) fn list(top: &OwnedFd, visit: &mut dyn FnMut(&TreeEntry<'_>) -> Walk) -> Result<bool, Errno> {
    let start = openat(top, c".", DIRECTORY, Mode::empty())?;
    // No device has this number: nothing is entered.
    Ok(walk_below(&start, u64::MAX, &mut Vec::new(), 0, visit)? == Walk::On)
}

/// Visits every entry below `top`. Returns false if the walk was stopped.
///
/// # Errors
/// The tree cannot be walked for another reason than a missing right (EACCES).
pub(crate) fn walk(top: &OwnedFd, visit: &mut dyn FnMut(&TreeEntry<'_>) -> Walk) -> Result<bool, Errno> {
    let start = openat(top, c".", DIRECTORY, Mode::empty())?;
    let device = device(&look_at(&start, c"")?);
    let mut path = Vec::new();
    Ok(walk_below(&start, device, &mut path, 0, visit)? == Walk::On)
}

fn walk_below(
    directory: &OwnedFd,
    top_device: u64,
    path: &mut Vec<u8>,
    depth: usize,
    visit: &mut dyn FnMut(&TreeEntry<'_>) -> Walk,
) -> Result<Walk, Errno> {
    let entries = match Dir::read_from(directory) {
        // Removed since it was opened.
        Err(Errno::NOENT) => return Ok(Walk::On),
        entries => entries?,
    };
    for entry in entries {
        let entry = match entry {
            Err(Errno::NOENT) => break,
            entry => entry?,
        };
        let name: &CStr = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        let stat = match look_at(directory, name) {
            Ok(stat) => stat,
            // Gone meanwhile.
            Err(Errno::NOENT) => continue,
            // A directory that may be listed and not searched.
            Err(Errno::ACCESS) => {
                let stat = look_at(directory, c"")?;
                return Ok(visit(&TreeEntry {
                    path: as_path(path),
                    kind: FileType::Directory,
                    parent: directory.as_fd(),
                    name: c".",
                    stat,
                    closed: true,
                }));
            }
            Err(errno) => return Err(errno),
        };
        let length = path.len();
        if length > 0 {
            path.push(b'/');
        }
        path.extend_from_slice(name.to_bytes());
        let kind = FileType::from_raw_mode(stat.stx_mode.into());
        let enter = kind.is_dir() && device(&stat) == top_device && depth < MAX_DEPTH && path.len() <= MAX_PATH_LEN;
        let (below, closed) = match enter.then(|| openat(directory, name, DIRECTORY | OFlags::NOFOLLOW, Mode::empty())) {
            Some(Ok(below)) => (Some(below), false),
            // Removed or replaced since it was listed.
            Some(Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP)) => (None, false),
            Some(Err(Errno::ACCESS)) => (None, true),
            Some(Err(errno)) => return Err(errno),
            None => (None, kind.is_dir()),
        };
        let mut next = visit(&TreeEntry { path: as_path(path), kind, parent: directory.as_fd(), name, stat, closed });
        if let (Walk::On, Some(below)) = (next, &below) {
            next = walk_below(below, top_device, path, depth + 1, visit)?;
        }
        path.truncate(length);
        if next == Walk::Stop {
            return Ok(Walk::Stop);
        }
    }
    Ok(Walk::On)
}

fn as_path(bytes: &[u8]) -> &Path {
    Path::new(OsStr::from_bytes(bytes))
}
