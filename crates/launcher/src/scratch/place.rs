//! Where a path lies in its file system, whatever mount leads there.
//!
//! A bind mount gives a directory a second path. A guard of a directory compares places, which
//! are the same through each mount of a file system. A mount that `/proc/self/mountinfo` does not
//! list (the root of a chroot) has only its path. Other file systems that show the same files
//! (overlays, network mounts) are not recognised.

use std::{
    ffi::OsString,
    os::unix::ffi::OsStringExt,
    path::{Path, PathBuf},
};

use rustix::{
    fs::{AtFlags, CWD, StatxFlags, statx},
    io::Errno,
};

use crate::{error::errno_of, receipt::mounts::unescape};

/// A file system's device, and a path below its root.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    device: Vec<u8>,
    path: PathBuf,
}

impl Place {
    /// Whether it is the other or lies below it.
    pub fn starts_with(&self, other: &Place) -> bool {
        self.device == other.device && self.path.starts_with(&other.path)
    }

    /// Its path below the other, if it lies there.
    pub(crate) fn below(&self, other: &Place) -> Option<&Path> {
        self.path.strip_prefix(&other.path).ok().filter(|_| self.device == other.device)
    }
}

struct Mount {
    id: u64,
    device: Vec<u8>,
    root: PathBuf,
    point: PathBuf,
}

/// The mounts of this process's namespace.
pub struct Mounts(Vec<Mount>);

impl Mounts {
    /// Reads them.
    ///
    /// # Errors
    /// `/proc/self/mountinfo` cannot be read.
    pub fn read() -> Result<Self, Errno> {
        let text = std::fs::read("/proc/self/mountinfo").map_err(|error| errno_of(&error))?;
        Ok(Mounts(text.split(|byte| *byte == b'\n').filter_map(mount).collect()))
    }

    /// The place of an absolute path without links. What is missing, or cannot be looked at, lies
    /// on the mount of what is above it.
    pub fn place(&self, path: &Path) -> Place {
        let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
        let found = path.ancestors().find_map(|above| statx(CWD, above, flags, StatxFlags::MNT_ID).ok());
        let mount = found.and_then(|stat| self.0.iter().find(|mount| mount.id == stat.stx_mnt_id));
        let below = mount.and_then(|mount| Some((mount, path.strip_prefix(&mount.point).ok()?)));
        match below {
            // Joining an empty path would add a slash.
            Some((mount, below)) => Place { device: mount.device.clone(), path: mount.root.join(below).components().collect() },
            None => Place { device: Vec::new(), path: path.to_path_buf() },
        }
    }
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

    #[test]
    fn a_place_is_the_same_through_each_mount() {
        let root = statx(CWD, "/", AtFlags::empty(), StatxFlags::MNT_ID).unwrap().stx_mnt_id;
        let line = format!("{root} 1 8:1 /sub\\040volume / rw - ext4 /dev/sda1 rw");
        let mounts = Mounts(vec![mount(line.as_bytes()).unwrap()]);
        let (above, below) = (mounts.place(Path::new("/")), mounts.place(Path::new("/no such/x")));
        assert_eq!((&above.path, &below.path), (&PathBuf::from("/sub volume"), &PathBuf::from("/sub volume/no such/x")));
        assert!(below.starts_with(&above) && !above.starts_with(&below));
        assert_eq!(below.below(&above), Some(Path::new("no such/x")));
        // Another device has other files under the same path.
        let other = Place { device: b"8:2".to_vec(), ..above };
        assert!(!below.starts_with(&other));
    }
}
