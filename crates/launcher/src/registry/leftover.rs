//! Removing what a record lists: cgroups, a program's file, the directory of a proof.
//!
//! Code may have changed the places that a record names since it was written. So only what has one
//! of stockade's names, or is the very file that a run made, is removed, and no link is followed.
//! What cannot be removed stays listed.

use std::{
    ffi::OsStr,
    io,
    os::unix::ffi::OsStrExt,
    path::{Component, Path},
    time::{Duration, Instant},
};

use nix::libc;
use rustix::{
    fd::{AsFd, AsRawFd, OwnedFd},
    fs::{AtFlags, CWD, Dir, Mode, OFlags, StatxFlags, chmod, fstat, openat, statx, unlinkat},
    io::Errno,
};

use super::{PROGRAM_PREFIX, PROOF_PREFIX};

/// Removes what a line lists; true if nothing of it is left. A cgroup that processes are still
/// leaving is tried until then.
pub(super) fn remove(line: &[u8], until: Instant) -> bool {
    let path = |bytes| Path::new(OsStr::from_bytes(bytes));
    if let Some(cgroup) = line.strip_prefix(b"cgroup ") {
        return remove_cgroup(path(cgroup), until);
    }
    if let Some(program) = line.strip_prefix(b"program ") {
        return remove_program(path(program));
    }
    if let Some(written) = line.strip_prefix(b"written ") {
        let mut parts = written.splitn(2, |byte| *byte == b' ');
        let (Some(identity), Some(written)) = (parts.next(), parts.next()) else { return true };
        return remove_written(path(written), identity);
    }
    if let Some(proof) = line.strip_prefix(b"proof ") {
        return remove_directory(path(proof)).is_ok();
    }
    // What is said of the run itself; or a line cut short by a full disk, under whose name nothing
    // was made.
    true
}

fn remove_cgroup(path: &Path, until: Instant) -> bool {
    let ours = path.file_name().is_some_and(|name| name.as_bytes().starts_with(b"stockade-"));
    let leads_up = path.components().any(|part| part == Component::ParentDir);
    if !ours || leads_up || !path.starts_with("/sys/fs/cgroup") {
        return true;
    }
    loop {
        match rustix::fs::rmdir(path) {
            Ok(()) => return true,
            Err(Errno::NOENT) => return cgroups_are_seen(path),
            Err(Errno::BUSY) => {
                if let Ok(kill) = openat(CWD, path.join("cgroup.kill"), OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty()) {
                    let _waits_for_it_anyway = rustix::io::write(&kill, b"1");
                }
                if Instant::now() >= until {
                    return false;
                }
                std::thread::sleep(Duration::from_millis(2));
            }
            Err(_) => return false,
        }
    }
}

/// Whether a cgroup that is not there is gone: a start in a mount namespace may have another file
/// system in place of the cgroups, or none.
fn cgroups_are_seen(path: &Path) -> bool {
    let nearest = path.ancestors().find_map(|path| rustix::fs::statfs(path).ok());
    nearest.is_some_and(|found| [libc::CGROUP_SUPER_MAGIC, libc::CGROUP2_SUPER_MAGIC].contains(&found.f_type))
}

/// Removes a program's file, and only such a file: no link is followed, so that a
/// scratch that its owner has changed cannot lead elsewhere.
fn remove_program(path: &Path) -> bool {
    let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else { return true };
    if !name.as_bytes().starts_with(PROGRAM_PREFIX.as_bytes()) {
        return true;
    }
    let Ok(directory) = crate::tree::open_directory(directory) else { return true };
    match unlinkat(&directory, name, AtFlags::empty()) {
        // A directory in its place is the code's own: ours was removed by it.
        Ok(()) | Err(Errno::NOENT | Errno::ISDIR) => true,
        Err(_) => false,
    }
}

/// What tells a file from each other that has been there: device, inode and time of birth. None
/// where the file system does not tell the last.
pub(super) fn identity(at: impl AsFd, name: impl rustix::path::Arg) -> Result<Option<String>, Errno> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::EMPTY_PATH | AtFlags::NO_AUTOMOUNT;
    let stat = statx(at, name, flags, StatxFlags::BASIC_STATS | StatxFlags::BTIME)?;
    let birth = &stat.stx_btime;
    let told = stat.stx_mask & StatxFlags::BTIME.bits() != 0;
    Ok(told.then(|| format!("{}:{}:{}:{}.{}", stat.stx_dev_major, stat.stx_dev_minor, stat.stx_ino, birth.tv_sec, birth.tv_nsec)))
}

/// Removes the very file that was made there, and no other of its name.
fn remove_written(path: &Path, made: &[u8]) -> bool {
    let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else { return true };
    let Ok(directory) = crate::tree::open_directory(directory) else { return true };
    match identity(&directory, name) {
        Ok(Some(found)) if found.as_bytes() == made => matches!(unlinkat(&directory, name, AtFlags::empty()), Ok(()) | Err(Errno::NOENT)),
        Ok(_) | Err(Errno::NOENT) => true,
        Err(_) => false,
    }
}

/// Removes the directory of a proof with everything in it, also what code has closed to
/// its owner. A directory of another user is left alone: stockade did not make it.
///
/// # Errors
/// Something of it cannot be removed; the error names it.
pub fn remove_directory(path: &Path) -> io::Result<()> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else { return Ok(()) };
    if !name.as_bytes().starts_with(PROOF_PREFIX.as_bytes()) {
        return Ok(());
    }
    let parent = match crate::tree::open_directory(parent) {
        Err(Errno::NOENT) => return Ok(()),
        parent => parent?,
    };
    let owner = match rustix::fs::statat(&parent, name, AtFlags::SYMLINK_NOFOLLOW) {
        Err(Errno::NOENT) => return Ok(()),
        found => found?.st_uid,
    };
    if owner != rustix::process::geteuid().as_raw() {
        return Ok(());
    }
    empty(&parent, name, path)?;
    unlinkat(&parent, name, AtFlags::REMOVEDIR).map_err(|errno| at(path, errno))
}

fn at(path: &Path, errno: Errno) -> io::Error {
    io::Error::new(io::Error::from(errno).kind(), format!("{}: {}", path.display(), crate::error::describe(errno)))
}

/// Removes what is in a directory. Each level holds two descriptors; what is nested deeper
/// than they last cannot be removed.
fn empty(parent: &OwnedFd, name: &OsStr, path: &Path) -> io::Result<()> {
    let directory = open_up(parent, name).map_err(|errno| at(path, errno))?;
    for entry in Dir::read_from(&directory).map_err(|errno| at(path, errno))? {
        let entry = entry.map_err(|errno| at(path, errno))?;
        let name = OsStr::from_bytes(entry.file_name().to_bytes());
        if name == "." || name == ".." {
            continue;
        }
        let below = path.join(name);
        match unlinkat(&directory, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(Errno::ISDIR) => {
                empty(&directory, name, &below)?;
                unlinkat(&directory, name, AtFlags::REMOVEDIR).map_err(|errno| at(&below, errno))?;
            }
            Err(errno) => return Err(at(&below, errno)),
        }
    }
    Ok(())
}

/// Opens a directory, no link, and opens it to its owner if code has closed it.
fn open_up(parent: impl AsFd, name: &OsStr) -> Result<OwnedFd, Errno> {
    const HANDLE: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
    let handle = openat(parent, name, HANDLE, Mode::empty())?;
    if fstat(&handle)?.st_mode & 0o700 != 0o700 {
        // By the handle, since a name could have become another's meanwhile.
        chmod(format!("/proc/self/fd/{}", handle.as_raw_fd()), Mode::RWXU)?;
    }
    openat(&handle, c".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use std::{
        fs::{self, Permissions},
        os::unix::fs::{PermissionsExt, symlink},
        path::PathBuf,
    };

    use super::*;

    fn place(name: &str) -> PathBuf {
        std::env::temp_dir().canonicalize().unwrap().join(format!("{name}{}", std::process::id()))
    }

    #[test]
    fn a_directory_of_a_proof_goes_with_what_code_has_closed_and_no_link_is_followed() {
        let (proof, beside) = (place(PROOF_PREFIX), place("beside-"));
        fs::create_dir_all(proof.join("a/b")).unwrap();
        fs::create_dir(&beside).unwrap();
        fs::write(beside.join("kept"), "").unwrap();
        fs::write(proof.join("a/b/file"), "").unwrap();
        symlink(&beside, proof.join("a/link")).unwrap();
        for closed in ["a/b", "a"] {
            fs::set_permissions(proof.join(closed), Permissions::from_mode(0o000)).unwrap();
        }
        let removed = remove_directory(&proof);
        let (left, kept) = (proof.exists(), beside.join("kept").exists());
        // A directory of another name is no proof's.
        let other = remove_directory(&beside);
        let spared = beside.exists();
        fs::remove_dir_all(&beside).unwrap();
        removed.unwrap();
        other.unwrap();
        assert_eq!((left, kept, spared), (false, true, true));
        remove_directory(&proof).unwrap();
    }

    #[test]
    fn what_stands_under_the_name_as_a_link_is_neither_followed_nor_passed_over() {
        let (link, beside) = (place("stockade-prove-link-"), place("beside-link-"));
        fs::create_dir(&beside).unwrap();
        fs::write(beside.join("kept"), "").unwrap();
        symlink(&beside, &link).unwrap();
        let refused = remove_directory(&link);
        let kept = beside.join("kept").exists();
        fs::remove_file(&link).unwrap();
        fs::remove_dir_all(&beside).unwrap();
        assert!(refused.is_err_and(|error| error.to_string().contains("stockade-prove-link-")) && kept);
    }
}
