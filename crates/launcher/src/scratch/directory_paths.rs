//! The paths by which a directory of the host is reached, whatever mount leads there.
//!
//! A bind mount gives a directory, or a part of it, a second path. A guard of a directory compares a
//! path with all of these, and looks at nothing else. A path that a later mount hides counts as
//! well: a guard refuses rather than misses. A mount that `/proc/self/mountinfo` does not list (the root of a chroot) has only the path
//! that was named. Other file systems that show the same files (overlays, network mounts) are not
//! recognised.

use std::{
    ffi::OsString,
    fs::File,
    io::{self, Read},
    os::unix::ffi::OsStringExt,
    path::{Path, PathBuf},
};

use rustix::{
    fs::{AtFlags, CWD, StatxFlags, statx},
    io::Errno,
};

use crate::{error::errno_of, receipt::mounts::unescape};

/// The paths of one directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirectoryPaths {
    /// Of the directory itself, each with the mount point through which it leads.
    own: Vec<(PathBuf, PathBuf)>,
    /// Mount points that show something below it.
    parts: Vec<PathBuf>,
}

impl DirectoryPaths {
    /// Finds those of an absolute path without links. What is missing of it, or cannot be looked at,
    /// lies on the mount of what is above it.
    ///
    /// # Errors
    /// `/proc/self/mountinfo` cannot be read.
    pub fn of(directory: &Path) -> Result<Self, Errno> {
        let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
        let found = directory.ancestors().find_map(|above| statx(CWD, above, flags, StatxFlags::MNT_ID).ok());
        let mounts = mounts().map_err(|error| errno_of(&error))?;
        Ok(DirectoryPaths::among(&mounts, found.map(|stat| stat.stx_mnt_id), directory))
    }

    fn among(mounts: &[Mount], id: Option<u64>, directory: &Path) -> Self {
        let mount = mounts.iter().find(|mount| Some(mount.id) == id);
        let Some((device, place)) =
            mount.and_then(|mount| Some((&mount.device, joined(&mount.root, directory.strip_prefix(&mount.point).ok()?))))
        else {
            return DirectoryPaths { own: vec![(PathBuf::from("/"), directory.to_path_buf())], parts: Vec::new() };
        };
        let same = || mounts.iter().filter(|mount| mount.device == *device);
        let own = same().filter_map(|mount| Some((mount.point.clone(), joined(&mount.point, place.strip_prefix(&mount.root).ok()?))));
        let parts = same().filter(|mount| mount.root != place && mount.root.starts_with(&place));
        DirectoryPaths { own: own.collect(), parts: parts.map(|mount| mount.point.clone()).collect() }
    }

    /// The paths of the directory itself.
    pub(crate) fn own(&self) -> impl Iterator<Item = &Path> {
        self.own.iter().map(|(_, path)| path.as_path())
    }

    /// The directory's path below another, through a mount point at or above that other. A backup of the
    /// whole tree that is mounted below `/run` makes no directory a part of `/run`.
    pub(crate) fn below(&self, other: &Path) -> Option<&Path> {
        self.own.iter().filter(|(point, _)| other.starts_with(point)).find_map(|(_, path)| path.strip_prefix(other).ok())
    }

    /// Whether a path without links is the directory or lies in it.
    pub fn contains(&self, path: &Path) -> bool {
        self.own().chain(self.parts.iter().map(PathBuf::as_path)).any(|own| path.starts_with(own))
    }

    /// Whether it lies in it, and is not the directory itself.
    pub fn contains_below(&self, path: &Path) -> bool {
        self.contains(path) && !self.own().any(|own| own == path)
    }
}

struct Mount {
    id: u64,
    device: Vec<u8>,
    root: PathBuf,
    point: PathBuf,
}

/// Joining an empty path would add a slash.
fn joined(above: &Path, below: &Path) -> PathBuf {
    above.join(below).components().collect()
}

/// The mounts of this process's namespace.
fn mounts() -> io::Result<Vec<Mount>> {
    let mut text = Vec::with_capacity(8 << 10);
    File::open("/proc/self/mountinfo")?.read_to_end(&mut text)?;
    Ok(text.split(|byte| *byte == b'\n').filter_map(mount).collect())
}

/// A line: id, parent, device, root, point (proc_pid_mountinfo(5)).
fn mount(line: &[u8]) -> Option<Mount> {
    let mut fields = line.split(|byte| *byte == b' ');
    let id = std::str::from_utf8(fields.next()?).ok()?.parse().ok()?;
    let device = fields.nth(1)?.to_vec();
    let mut path = || {
        let mut plain = Vec::new();
        unescape(fields.next()?, &mut plain);
        Some(PathBuf::from(OsString::from_vec(plain)))
    };
    Some(Mount { id, device, root: path()?, point: path()? })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::*;

    fn paths_of(directory: &str, id: u64) -> DirectoryPaths {
        let table = "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n\
                     2 1 8:1 /sub\\040volume /mnt rw - ext4 /dev/sda1 rw\n\
                     3 1 8:1 /sub\\040volume/x/tools /opt/tools rw - ext4 /dev/sda1 rw\n\
                     4 1 8:2 / /data rw - ext4 /dev/sda2 rw\n\
                     5 1 8:1 / /run/backup rw - ext4 /dev/sda1 rw";
        let mounts: Vec<Mount> = table.lines().filter_map(|line| mount(line.as_bytes())).collect();
        DirectoryPaths::among(&mounts, Some(id), Path::new(directory))
    }

    #[test]
    fn a_directory_has_a_path_through_each_mount() {
        let paths = paths_of("/mnt/x", 2);
        assert_eq!(paths, paths_of("/sub volume/x", 1));
        assert_eq!(
            paths.own().collect::<Vec<_>>(),
            [Path::new("/sub volume/x"), Path::new("/mnt/x"), Path::new("/run/backup/sub volume/x")]
        );
        let hold = |path| (paths.contains(Path::new(path)), paths.contains_below(Path::new(path)));
        for within in ["/mnt/x/a", "/sub volume/x/no such/b", "/opt/tools", "/opt/tools/c"] {
            assert_eq!(hold(within), (true, true), "{within}");
        }
        assert_eq!(hold("/mnt/x"), (true, false));
        for outside in ["/mnt", "/mnt/xy", "/opt", "/data/x", "/x"] {
            assert_eq!(hold(outside), (false, false), "{outside}");
        }
        let below = |other| paths.below(Path::new(other));
        assert_eq!(
            [below("/sub volume"), below("/mnt"), below("/mnt/x")],
            [Some(Path::new("x")), Some(Path::new("x")), Some(Path::new(""))]
        );
        // A backup of the whole tree below /run makes no directory a part of /run.
        assert_eq!([below("/run"), below("/mnt/x/a"), below("/data")], [None; 3]);
        // Another device has other files under the same path.
        assert_eq!(paths_of("/data/sub volume/x", 4).own().collect::<Vec<_>>(), [Path::new("/data/sub volume/x")]);
        assert!(!paths_of("/data/x", 4).contains(Path::new("/x")));
    }

    #[test]
    fn a_mount_that_is_not_listed_has_the_path_that_was_named() {
        assert_eq!(paths_of("/mnt/x", 9), DirectoryPaths { own: vec![(PathBuf::from("/"), PathBuf::from("/mnt/x"))], parts: Vec::new() });
        let paths = DirectoryPaths::of(Path::new("/proc/no such/x")).unwrap();
        assert!(paths.own().any(|path| path == Path::new("/proc/no such/x")), "{paths:?}");
    }
}
