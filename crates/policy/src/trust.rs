//! Reads a small text file, trusted or not, and opens a trusted program: one that only root can
//! have written, or root and the user who reads it.
//!
//! A trusted read walks from the root directory by descriptor, one component at a time, follows
//! no symlink, and checks each opened descriptor, never a path, so that no file can be swapped
//! between check and use. It does not check the contents.

use std::{
    ffi::OsStr,
    io,
    os::unix::ffi::OsStrExt,
    path::{Component, Path, PathBuf},
};

// The workspace's rustix is built without std, for the executor. It then has its own descriptor
// types and takes paths as bytes.
use rustix::{
    fd::{AsFd, OwnedFd},
    fs::{FileType, Mode, OFlags, Stat, fstat, open, openat},
    io::Errno,
};

/// Bytes of a file that is read.
const MAX_FILE_LEN: usize = 1 << 20;

/// Why a privileged launcher does not trust a file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Distrust {
    /// The path is relative or holds `..`.
    #[error("its path is not absolute and plain; name it from /, without `..`")]
    Path,
    /// A symlink on the way.
    #[error("{} is a symlink; name the file itself", .0.display())]
    Link(PathBuf),
    /// Another user owns it, or a directory above it.
    #[error(
        "{} belongs to uid {owner}, {}",
        path.display(),
        match user {
            0 => format!("not to root; run `chown root {}`", path.display()),
            user => format!("neither to root nor to uid {user}; put the file into a directory of yours"),
        }
    )]
    Owner {
        /// The file or directory.
        path: PathBuf,
        /// Its owner.
        owner: u32,
        /// Who may own it beside root; 0: root alone.
        user: u32,
    },
    /// Other users may write it, or a directory above it.
    #[error(
        "{} may be written by others than its owner (mode {mode:04o}); {}put the file into {}",
        path.display(),
        // Of a directory such as /tmp everybody needs that permission.
        if mode & 0o1000 == 0 { format!("chmod go-w {}, or ", path.display()) } else { String::new() },
        if *user == 0 { "/etc/stockade" } else { "a directory of yours" }
    )]
    Writable {
        /// The file or directory.
        path: PathBuf,
        /// Its mode.
        mode: u32,
        /// Who may own it beside root; 0: root alone.
        user: u32,
    },
    /// Its mode allows more than such a file may.
    #[error("{} has mode {mode:04o}, and may have at most {max_mode:04o}; run `chmod {max_mode:04o} {}`", path.display(), path.display())]
    Mode {
        /// The file.
        path: PathBuf,
        /// Its mode.
        mode: u32,
        /// All bits that it may have.
        max_mode: u32,
    },
}

/// Why a file was not read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The kernel refused.
    #[error("cannot read {}: {error}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The kernel's reason.
        error: io::Error,
    },
    /// It is a directory, a device or the like.
    #[error("{} is not a regular file", .0.display())]
    NotRegular(PathBuf),
    /// It is too large.
    #[error("{} is larger than 1 MiB", .0.display())]
    TooLarge(PathBuf),
    /// It is not UTF-8.
    #[error("{} is not UTF-8 text (byte {at})", path.display())]
    NotText {
        /// The file.
        path: PathBuf,
        /// The first byte that is not.
        at: usize,
    },
    /// Another user can have written it.
    #[error("{}not trusted{}: {why}", subject(path, why), if *user == 0 { " while running as root" } else { "" })]
    Untrusted {
        /// The file.
        path: PathBuf,
        /// Who may have written it beside root; 0: root alone.
        user: u32,
        /// What is wrong with it or with a directory above it.
        why: Distrust,
    },
}

/// The file, where the reason is about a directory above it.
fn subject(path: &Path, why: &Distrust) -> String {
    match why {
        Distrust::Link(named)
        | Distrust::Owner { path: named, .. }
        | Distrust::Writable { path: named, .. }
        | Distrust::Mode { path: named, .. }
            if named == path =>
        {
            String::new()
        }
        _ => format!("{} is ", path.display()),
    }
}

const FILE: OFlags = OFlags::RDONLY
    .union(OFlags::CLOEXEC)
    .union(OFlags::NOCTTY)
    // Opening a fifo must not block; it is refused afterwards.
    .union(OFlags::NONBLOCK);
const DIRECTORY: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Reads any file. `None`: there is none.
pub(crate) fn read_any(path: &Path) -> Result<Option<String>, ReadError> {
    match open(path.as_os_str().as_bytes(), FILE, Mode::empty()) {
        Ok(file) => read(&file, path).map(Some),
        Err(Errno::NOENT | Errno::NOTDIR) => Ok(None),
        Err(error) => Err(refused(path, error)),
    }
}

/// Reads a file that only root can have written. `None`: there is none.
pub(crate) fn read_trusted(path: &Path) -> Result<Option<String>, ReadError> {
    walk(top(path)?, path, &Guard::ROOT)
}

/// Reads a file that only root, or this user, can have written, with at most this mode. `None`:
/// there is none.
///
/// Of a user's file a directory above may be sticky, such as `/tmp`: another user's file there is
/// refused by its owner.
pub(crate) fn read_trusted_of(path: &Path, user: u32, max_mode: u32) -> Result<Option<String>, ReadError> {
    let sticky = if user == 0 { StickyDirectory::Distrusted } else { StickyDirectory::Trusted };
    walk(top(path)?, path, &Guard { owners: [0, user], sticky, max_mode })
}

/// Opens a program that only root can have written. `None`: there is none.
///
/// # Errors
/// Another user can have written it, or the kernel refuses.
pub fn open_trusted_program(path: &Path) -> Result<Option<OwnedFd>, ReadError> {
    let found = find(top(path)?, path, &Guard { sticky: StickyDirectory::Trusted, ..Guard::ROOT })?;
    found.map(|program| regular(&program, path).map(|()| program)).transpose()
}

fn top(path: &Path) -> Result<OwnedFd, ReadError> {
    open("/", DIRECTORY, Mode::empty()).map_err(|error| refused(path, error))
}

/// The walk, from any directory and for any owner, so that a test needs no root.
fn walk(root: OwnedFd, path: &Path, guard: &Guard) -> Result<Option<String>, ReadError> {
    find(root, path, guard)?.map(|file| read(&file, path)).transpose()
}

/// What is asked of a trusted file and of the directories above it.
#[derive(Clone, Copy)]
struct Guard {
    /// One of these users must own each; the second is named in an error.
    owners: [u32; 2],
    sticky: StickyDirectory,
    /// All bits that the mode of the file may have, but not of a directory.
    max_mode: u32,
}

impl Guard {
    /// Only root can have written it, and anybody may read it.
    const ROOT: Guard = Guard { owners: [0, 0], sticky: StickyDirectory::Distrusted, max_mode: 0o7777 };
}

/// Whether a sticky directory such as `/tmp` is trusted: all users may make files in it, and
/// none may replace another's.
#[derive(Clone, Copy, PartialEq, Eq)]
enum StickyDirectory {
    /// No: another user may make the file that is missing.
    Distrusted,
    /// Yes: a file in it that root owns was made by root.
    Trusted,
}

fn find(root: OwnedFd, path: &Path, guard: &Guard) -> Result<Option<OwnedFd>, ReadError> {
    let distrust = |why| ReadError::Untrusted { path: path.to_owned(), user: guard.owners[1], why };
    let mut parts: Vec<&OsStr> = Vec::new();
    for (index, part) in path.components().enumerate() {
        match part {
            Component::RootDir if index == 0 => {}
            Component::Normal(part) if index > 0 => parts.push(part),
            _ => return Err(distrust(Distrust::Path)),
        }
    }
    let Some((name, above)) = parts.split_last() else { return Err(ReadError::NotRegular(path.to_owned())) };
    let mut here = PathBuf::from("/");
    let mut directory = root;
    judge(&stat(&directory, path)?, &here, guard).map_err(distrust)?;
    for part in above {
        here.push(part);
        directory = match openat(&directory, part.as_bytes(), DIRECTORY, Mode::empty()) {
            Ok(next) => next,
            Err(Errno::NOENT | Errno::NOTDIR) => return Ok(None),
            Err(error) => return Err(refused(path, error)),
        };
        judge(&stat(&directory, path)?, &here, guard).map_err(distrust)?;
    }
    here.push(name);
    match openat(&directory, name.as_bytes(), FILE | OFlags::NOFOLLOW, Mode::empty()) {
        Ok(file) => {
            judge(&stat(&file, path)?, &here, guard).map_err(distrust)?;
            Ok(Some(file))
        }
        Err(Errno::NOENT | Errno::NOTDIR) => Ok(None),
        // With O_NOFOLLOW a symlink fails with ELOOP.
        Err(Errno::LOOP) => Err(distrust(Distrust::Link(here))),
        Err(error) => Err(refused(path, error)),
    }
}

/// Checks one opened file or directory. The group bits are also the mask of an ACL, so an ACL
/// that lets another user write is seen.
fn judge(stat: &Stat, path: &Path, guard: &Guard) -> Result<(), Distrust> {
    let (path, user, mode) = (path.to_owned(), guard.owners[1], stat.st_mode & 0o7777);
    let kind = FileType::from_raw_mode(stat.st_mode);
    if kind == FileType::Symlink {
        return Err(Distrust::Link(path));
    }
    if !guard.owners.contains(&stat.st_uid) {
        return Err(Distrust::Owner { path, owner: stat.st_uid, user });
    }
    let is_directory = kind == FileType::Directory;
    let guarded = guard.sticky == StickyDirectory::Trusted && is_directory && mode & 0o1000 != 0;
    if mode & 0o022 != 0 && !guarded {
        return Err(Distrust::Writable { path, mode, user });
    }
    if mode & !guard.max_mode != 0 && !is_directory {
        return Err(Distrust::Mode { path, mode, max_mode: guard.max_mode });
    }
    Ok(())
}

fn stat(file: impl AsFd, path: &Path) -> Result<Stat, ReadError> {
    fstat(file).map_err(|error| refused(path, error))
}

fn refused(path: &Path, error: Errno) -> ReadError {
    ReadError::Io { path: path.to_owned(), error: io::Error::from_raw_os_error(error.raw_os_error()) }
}

fn regular(file: &OwnedFd, path: &Path) -> Result<(), ReadError> {
    match FileType::from_raw_mode(stat(file, path)?.st_mode) {
        FileType::RegularFile => Ok(()),
        _ => Err(ReadError::NotRegular(path.to_owned())),
    }
}

fn read(file: &OwnedFd, path: &Path) -> Result<String, ReadError> {
    regular(file, path)?;
    let mut bytes = Vec::new();
    let mut chunk = [0; 1 << 14];
    loop {
        match rustix::io::read(file, &mut chunk) {
            Ok(0) => break,
            Ok(count) => bytes.extend_from_slice(chunk.get(..count).unwrap_or_default()),
            Err(Errno::INTR) => {}
            Err(error) => return Err(refused(path, error)),
        }
        if bytes.len() > MAX_FILE_LEN {
            return Err(ReadError::TooLarge(path.to_owned()));
        }
    }
    String::from_utf8(bytes).map_err(|error| ReadError::NotText { path: path.to_owned(), at: error.utf8_error().valid_up_to() })
}

#[cfg(test)]
pub(crate) mod tests {
    #![allow(clippy::unwrap_used, clippy::panic, reason = "a test may panic")]
    use std::{
        fs::{self, Permissions},
        os::unix::fs::{PermissionsExt, symlink},
        sync::atomic::{AtomicU32, Ordering},
    };

    use super::*;

    /// A directory that goes with the test.
    pub(crate) struct Scene(pub PathBuf);

    impl Scene {
        pub(crate) fn new() -> Self {
            static COUNT: AtomicU32 = AtomicU32::new(0);
            let name = format!("stockade-policy-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
            let path = std::env::temp_dir().join(name);
            fs::create_dir(&path).unwrap();
            fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
            Scene(path)
        }

        pub(crate) fn write(&self, name: &str, text: &str) -> PathBuf {
            let path = self.0.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::set_permissions(path.parent().unwrap(), Permissions::from_mode(0o755)).unwrap();
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
            path
        }

        fn walk(&self, path: &str) -> Result<Option<String>, ReadError> {
            let root = open(self.0.as_os_str().as_bytes(), DIRECTORY, Mode::empty()).unwrap();
            walk(root, Path::new(path), &own())
        }

        fn distrust(&self, path: &str) -> Distrust {
            match self.walk(path) {
                Err(ReadError::Untrusted { why, .. }) => why,
                other => panic!("{other:?}"),
            }
        }
    }

    /// Files of this user alone, so that a test needs no root.
    fn own() -> Guard {
        Guard { owners: [rustix::process::geteuid().as_raw(); 2], ..Guard::ROOT }
    }

    impl Drop for Scene {
        fn drop(&mut self) {
            drop(fs::remove_dir_all(&self.0));
        }
    }

    #[test]
    fn a_file_that_only_its_owner_can_write_is_read() {
        let scene = Scene::new();
        scene.write("a/b/policy.toml", "text");
        assert_eq!(scene.walk("/a/b/policy.toml").unwrap().as_deref(), Some("text"));
        assert!(scene.walk("/a/b/other.toml").unwrap().is_none());
        assert!(scene.walk("/a/c/policy.toml").unwrap().is_none());
    }

    #[test]
    fn a_file_or_directory_that_others_can_write_is_not_trusted() {
        for (path, mode) in [("a/f", 0o664), ("a/f", 0o646), ("a", 0o775), ("a", 0o1777), ("", 0o1777)] {
            let scene = Scene::new();
            scene.write("a/f", "text");
            fs::set_permissions(scene.0.join(path), Permissions::from_mode(mode)).unwrap();
            assert!(matches!(scene.distrust("/a/f"), Distrust::Writable { mode: found, .. } if found == mode), "{path}");
        }
    }

    #[test]
    fn a_program_may_lie_below_a_sticky_directory_and_nowhere_else_where_others_write() {
        let found = |scene: &Scene| {
            let root = open(scene.0.as_os_str().as_bytes(), DIRECTORY, Mode::empty()).unwrap();
            find(root, Path::new("/a/f"), &Guard { sticky: StickyDirectory::Trusted, ..own() })
        };
        for (path, mode, trusted) in [("a", 0o1777, true), ("", 0o1777, true), ("a", 0o777, false), ("a/f", 0o1757, false)] {
            let scene = Scene::new();
            scene.write("a/f", "text");
            fs::set_permissions(scene.0.join(path), Permissions::from_mode(mode)).unwrap();
            assert_eq!(found(&scene).is_ok(), trusted, "{path} {mode:o}");
        }
    }

    #[test]
    fn no_symbolic_link_is_followed() {
        let scene = Scene::new();
        scene.write("a/f", "text");
        symlink("f", scene.0.join("a/link")).unwrap();
        symlink("a", scene.0.join("b")).unwrap();
        assert_eq!(scene.distrust("/a/link"), Distrust::Link(PathBuf::from("/a/link")));
        assert_eq!(scene.distrust("/b/f"), Distrust::Link(PathBuf::from("/b")));
    }

    #[test]
    fn a_path_that_is_relative_or_climbs_is_not_trusted() {
        let scene = Scene::new();
        scene.write("a/f", "text");
        for path in ["a/f", "./a/f", "/a/../a/f"] {
            assert_eq!(scene.distrust(path), Distrust::Path);
        }
    }

    #[test]
    fn another_users_file_is_not_trusted() {
        let scene = Scene::new();
        scene.write("f", "text");
        let root = open(scene.0.as_os_str().as_bytes(), DIRECTORY, Mode::empty()).unwrap();
        let user = rustix::process::geteuid().as_raw();
        let stranger = user.wrapping_add(1);
        let guard = Guard { owners: [stranger; 2], ..Guard::ROOT };
        let Err(ReadError::Untrusted { why: Distrust::Owner { .. }, .. }) = walk(root, Path::new("/f"), &guard) else {
            panic!("another user's file was read")
        };
        // The control: one of two owners is enough.
        let root = open(scene.0.as_os_str().as_bytes(), DIRECTORY, Mode::empty()).unwrap();
        assert!(walk(root, Path::new("/f"), &Guard { owners: [stranger, user], ..Guard::ROOT }).is_ok());
    }

    #[test]
    fn a_file_of_secrets_has_at_most_its_mode_whatever_the_directories_have() {
        let scene = Scene::new();
        let path = scene.write("a/f", "text");
        let found = |mode: u32| {
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            let root = open(scene.0.as_os_str().as_bytes(), DIRECTORY, Mode::empty()).unwrap();
            walk(root, Path::new("/a/f"), &Guard { max_mode: 0o640, ..own() })
        };
        for mode in [0o640, 0o600, 0o400] {
            assert!(found(mode).is_ok(), "{mode:o}");
        }
        for mode in [0o644, 0o641, 0o740, 0o4640] {
            let said = found(mode).unwrap_err().to_string();
            assert!(said.ends_with("and may have at most 0640; run `chmod 0640 /a/f`"), "{said}");
        }
        assert!(matches!(found(0o660), Err(ReadError::Untrusted { why: Distrust::Writable { .. }, .. })));
    }

    #[test]
    fn only_small_regular_text_files_are_read() {
        let scene = Scene::new();
        let large = scene.write("large", &"x".repeat(1 << 20));
        assert!(read_any(&large).unwrap().is_some());
        fs::write(&large, "x".repeat((1 << 20) + 1)).unwrap();
        assert!(matches!(read_any(&large), Err(ReadError::TooLarge(_))));
        fs::write(&large, [b'a', 0xff]).unwrap();
        assert!(matches!(read_any(&large), Err(ReadError::NotText { at: 1, .. })));
        assert!(matches!(read_any(&scene.0), Err(ReadError::NotRegular(_))));
        assert!(matches!(read_any(Path::new("/dev/null")), Err(ReadError::NotRegular(_))));
        let fifo = scene.0.join("fifo");
        rustix::fs::mknodat(rustix::fs::CWD, fifo.as_os_str().as_bytes(), FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
        assert!(matches!(read_any(&fifo), Err(ReadError::NotRegular(_))));
    }
}
