//! Limits how many connections one user has at a time. systemd counts those of all users
//! together, so one user could take them all.
//!
//! Each connection has its own server process. The servers share a file of the registry in
//! which each uid owns a range of bytes: a server locks a free byte and holds the lock while
//! it lives. Nothing is written to the file, and the kernel releases the lock however a server
//! ends, so nothing needs cleaning up. There is no queue: without a free byte a connection is
//! refused at once.

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

/// Bytes of one uid in the file: the highest limit that can be set.
pub const MAX_CONNECTIONS: u32 = 1024;
/// The file, in the registry's directory.
const FILE: &str = "connections";

/// A counted connection; dropping it releases the slot.
#[derive(Debug)]
pub(crate) struct ConnectionSlot {
    _locked: File,
}

impl ConnectionSlot {
    /// Takes one of the `most` slots of a uid. None: all are taken.
    ///
    /// # Errors
    /// The file cannot be made or locked.
    pub(crate) fn take(registry: &Path, uid: u32, most: u32) -> io::Result<Option<Self>> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600).custom_flags(libc::O_NOFOLLOW);
        let file = options.open(registry.join(FILE))?;
        for slot in 0..most.min(MAX_CONNECTIONS) {
            let byte = i64::from(uid) * i64::from(MAX_CONNECTIONS) + i64::from(slot);
            match fcntl(&file, FcntlArg::F_OFD_SETLK(&lock_of(byte))) {
                Ok(_) => return Ok(Some(ConnectionSlot { _locked: file })),
                Err(Errno::EAGAIN | Errno::EACCES) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(None)
    }
}

/// The lock belongs to the open file description, so a child of the launcher does not prolong
/// it.
fn lock_of(byte: i64) -> libc::flock {
    // Both constants fit in 16 bits.
    let (write, from_the_start) = (libc::F_WRLCK as libc::c_short, libc::SEEK_SET as libc::c_short);
    libc::flock { l_type: write, l_whence: from_the_start, l_start: byte, l_len: 1, l_pid: 0 }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::*;

    #[test]
    fn each_uid_has_its_own_slots_and_a_slot_is_free_after_its_holder_is_dropped() {
        let registry = std::env::temp_dir().join(format!("slot-{}", std::process::id()));
        std::fs::create_dir(&registry).unwrap();
        let take = |uid| ConnectionSlot::take(&registry, uid, 2).unwrap();
        let (first, _second) = (take(1000).unwrap(), take(1000).unwrap());
        assert!(take(1000).is_none());
        // The neighbouring uids have their own slots, and so has the largest uid.
        let others = [999, 1001, u32::MAX - 1].map(|uid| take(uid).unwrap());
        assert!(take(1000).is_none());
        drop(first);
        assert!(take(1000).is_some());
        drop(others);
        std::fs::remove_dir_all(&registry).unwrap();
    }
}
