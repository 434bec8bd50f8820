//! Opaque directories: an unpacker asks for the mark, and the process that started it sets it.
//!
//! The mark is an extended attribute. Others are access lists, and so the modes of files, and Landlock covers
//! none. So an unpacker has no call that sets one. In a directory that hides those of layers below it makes a
//! whiteout of a name that no archive can give one; here the whiteout becomes the mark. The unpacker may have
//! been taken over: its tree is walked by descriptors, through no link and no deeper than an archive leads, and
//! what an archive cannot have is refused. No content is read or compared here.

use std::{os::fd::OwnedFd, path::Path};

use rustix::{
    fs::{AtFlags, FileType, XattrFlags, fsetxattr, unlinkat},
    io::Errno,
};
use stockade_images::Digest;

use crate::{
    error::{Attempt, ImportError},
    tree::{look, names, open_below, open_root},
    unpack::MAX_DEPTH,
};

/// The mark of a directory that hides those of layers below (overlayfs.rst, "userxattr").
pub const OPAQUE: &str = "user.overlay.opaque";
/// In an archive it hides all of its directory that is below; in an unpacked tree it asks for the mark.
pub const OPAQUE_REQUEST: &[u8] = b".wh..wh..opq";

const SET_ID: u32 = 0o6000;

/// Marks the directories of an unpacked layer that ask for it.
///
/// # Errors
/// The tree is none that an archive leads to, or the kernel refuses.
pub fn mark(root: &Path, layer: &Digest) -> Result<(), ImportError> {
    match open_root(root).attempt("open", root).map(|root| below(&root, 0))? {
        Ok(()) => Ok(()),
        Err(Stopped::Made(what)) => Err(ImportError::Made { layer: layer.clone(), what }),
        Err(Stopped::Kernel(errno)) => Err(errno).attempt("mark the opaque directories of", root),
    }
}

/// Why the walk has ended.
#[derive(Debug, PartialEq, Eq)]
enum Stopped {
    Made(&'static str),
    Kernel(Errno),
}

impl From<Errno> for Stopped {
    fn from(errno: Errno) -> Self {
        Stopped::Kernel(errno)
    }
}

/// `depth` is the number of directories above this one.
fn below(directory: &OwnedFd, depth: usize) -> Result<(), Stopped> {
    if depth > MAX_DEPTH + 1 {
        return Err(Stopped::Made("too deep a tree"));
    }
    for name in names(directory)? {
        let (kind, found) = look(directory, &name)?;
        match kind {
            FileType::Directory => below(&open_below(directory, &name, rustix::fs::OFlags::DIRECTORY)?, depth + 1)?,
            FileType::CharacterDevice if name == OPAQUE_REQUEST && depth == 0 => return Err(Stopped::Made("an opaque root")),
            FileType::CharacterDevice if name == OPAQUE_REQUEST => {
                unlinkat(directory, &name[..], AtFlags::empty())?;
                fsetxattr(directory, OPAQUE, b"y", XattrFlags::empty())?;
            }
            // A directory may have the set-group-ID bit of the directory that has the store.
            FileType::RegularFile if found.st_mode & SET_ID != 0 => return Err(Stopped::Made("a set-ID file")),
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use std::{fs, os::unix::fs::PermissionsExt};

    use rustix::fs::{CWD, Mode, mknodat};

    use super::*;

    #[test]
    fn a_tree_that_no_archive_leads_to_is_refused() {
        let root = std::env::temp_dir().join(format!("stockade-opaque-{}", std::process::id()));
        let deepest = root.join("d/".repeat(MAX_DEPTH + 1));
        fs::create_dir_all(&deepest).unwrap();
        fs::write(root.join("file"), "x").unwrap();
        let found = || below(&open_root(&root).unwrap(), 0);
        assert_eq!(found(), Ok(()), "the control");
        fs::create_dir(deepest.join("d")).unwrap();
        assert_eq!(found(), Err(Stopped::Made("too deep a tree")));
        fs::remove_dir(deepest.join("d")).unwrap();
        fs::set_permissions(root.join("file"), fs::Permissions::from_mode(0o4755)).unwrap();
        assert_eq!(found(), Err(Stopped::Made("a set-ID file")));
        fs::remove_file(root.join("file")).unwrap();
        assert_eq!(found(), Ok(()));
        mknodat(CWD, root.join(".wh..wh..opq"), FileType::CharacterDevice, Mode::empty(), 0).unwrap();
        assert_eq!(found(), Err(Stopped::Made("an opaque root")));
        fs::remove_dir_all(root).unwrap();
    }
}
