//! Places at the door: one user has so many connections at a time and no more, since
//! systemd counts those of all users together and one could take them all.
//!
//! Each connection has a server of its own, which knows no other. They meet at a file of
//! the registry, in which each uid has bytes of its own: a server locks one that is free
//! and keeps it for as long as it lives. Nothing is ever written there, and the kernel
//! takes the lock back however a server ends, so there is nothing to clean up. It orders
//! nobody: who finds no byte free is refused at once.

use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::fs::OpenOptionsExt,
    path::Path,
};

use nix::{
    errno::Errno,
    fcntl::{FcntlArg, fcntl},
    libc,
};

/// Places that a uid has in the file: the most that one may be given.
pub const MOST_PLACES: u32 = 1024;
/// The file, in the registry's directory.
const FILE: &str = "connections";

/// A connection that counts; until dropped.
#[derive(Debug)]
pub(crate) struct Place {
    _locked: File,
}

impl Place {
    /// Takes one of the `most` places of a uid. None: all are taken.
    ///
    /// # Errors
    /// The file cannot be made or locked.
    pub(crate) fn take(registry: &Path, uid: u32, most: u32) -> io::Result<Option<Self>> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600).custom_flags(libc::O_NOFOLLOW);
        let file = options.open(registry.join(FILE))?;
        for place in 0..most.min(MOST_PLACES) {
            let byte = i64::from(uid) * i64::from(MOST_PLACES) + i64::from(place);
            match fcntl(&file, FcntlArg::F_OFD_SETLK(&lock_of(byte))) {
                Ok(_) => return Ok(Some(Place { _locked: file })),
                Err(Errno::EAGAIN | Errno::EACCES) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(None)
    }
}

/// Of the open file, not of the process: what the launcher starts holds it no longer than
/// the launcher does.
fn lock_of(byte: i64) -> libc::flock {
    // The kernel's numbers for both fit.
    let (write, from_the_start) = (libc::F_WRLCK as libc::c_short, libc::SEEK_SET as libc::c_short);
    libc::flock { l_type: write, l_whence: from_the_start, l_start: byte, l_len: 1, l_pid: 0 }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::*;

    #[test]
    fn a_uid_has_its_places_and_no_others_and_a_place_is_free_when_its_holder_is_gone() {
        let registry = std::env::temp_dir().join(format!("place-{}", std::process::id()));
        std::fs::create_dir(&registry).unwrap();
        let take = |uid| Place::take(&registry, uid, 2).unwrap();
        let (first, _second) = (take(1000).unwrap(), take(1000).unwrap());
        assert!(take(1000).is_none());
        // Its neighbours have theirs, and so has the last uid of all.
        let others = [999, 1001, u32::MAX - 1].map(|uid| take(uid).unwrap());
        assert!(take(1000).is_none());
        drop(first);
        assert!(take(1000).is_some());
        drop(others);
        std::fs::remove_dir_all(&registry).unwrap();
    }
}
