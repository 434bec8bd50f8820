//! A table is added to the file of the keys, whole or not at all.
//!
//! A new file takes the place of the old one by one rename(2), with the same owner, group and mode;
//! an ACL and other hard links do not go on. Two of these commands wait for each other, but an
//! editor that has the file open does not notice. The directories above the file were found to be
//! trusted, so that no other user can exchange one meanwhile.

use std::{
    fs::{self, DirBuilder, File, OpenOptions, Permissions},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown},
    path::{Path, PathBuf},
};

use anyhow::Context;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use stockade_engine::{
    admit::unique_stem,
    caller::{group_id, identify},
};
use stockade_policy::service::ServiceKeys;

/// The group that reads root's keys, where the host has it.
const GROUP: &str = "stockade-serve";

/// Another key has this id.
#[derive(Debug)]
pub(super) struct IdTaken {
    path: PathBuf,
    line: usize,
    id: String,
}

impl std::fmt::Display for IdTaken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let IdTaken { path, line, id } = self;
        write!(f, "{}:{line}: there is a key `{id}` already; choose another id, or remove that key", path.display())
    }
}

impl std::error::Error for IdTaken {}

/// Adds the table of a key and returns its line. `may_make_directory`: the file's directory is made
/// where there is none.
///
/// # Errors
/// The file is not trusted, has a mistake or such a key, or cannot be written. It is as before.
pub(super) fn add(path: &Path, id: &str, table: &str, user: u32, may_make_directory: bool) -> anyhow::Result<usize> {
    loop {
        let (before, lock) = locked(path, user)?;
        if let Some(key) = before.keys.iter().find(|key| key.id == id) {
            return Err(IdTaken { path: path.to_owned(), line: key.line, id: id.to_owned() }.into());
        }
        let after = before.with(table)?;
        let directory = path.parent().context("the file has no directory")?;
        if lock.is_none() && may_make_directory {
            DirBuilder::new().recursive(true).mode(0o755).create(directory).with_context(|| format!("make {}", directory.display()))?;
        }
        match write(path, directory, after.text(), lock.as_ref()) {
            // Another command has made the file since.
            Err(error) if lock.is_none() && is_taken(&error) => {}
            written => {
                written.with_context(|| format!("write {}", path.display()))?;
                return Ok(after.keys.last().map_or(1, |key| key.line));
            }
        }
    }
}

fn is_taken(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::AlreadyExists)
}

/// The keys of a file that this process has locked, or none where there is no file.
fn locked(path: &Path, user: u32) -> anyhow::Result<(ServiceKeys, Option<File>)> {
    // Nothing that is not trusted is opened: a fifo would hold this command up.
    while ServiceKeys::load(path, user)?.is_some() {
        let lock = File::open(path).and_then(|file| file.lock().map(|()| file)).with_context(|| format!("lock {}", path.display()))?;
        // The command that had the lock before has put another file in the place of this one.
        if let Some(keys) = ServiceKeys::load(path, user)?.filter(|_| is_at(&lock, path)) {
            return Ok((keys, Some(lock)));
        }
    }
    Ok((ServiceKeys::none(path), None))
}

/// Whether a file is the one of this path.
fn is_at(file: &File, path: &Path) -> bool {
    let id = |file: &fs::Metadata| (file.dev(), file.ino());
    matches!((file.metadata(), fs::symlink_metadata(path)), (Ok(held), Ok(found)) if id(&held) == id(&found))
}

fn write(path: &Path, directory: &Path, text: &str, old: Option<&File>) -> anyhow::Result<()> {
    let new = NewFile(directory.join(format!(".{}", unique_stem()?)));
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new.0)?;
    give(&file, old)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    match old {
        Some(_) => fs::rename(&new.0, path)?,
        // Another command may have made the file since.
        None => renameat_with(CWD, &new.0, CWD, path, RenameFlags::NOREPLACE).map_err(io::Error::from)?,
    }
    // The key is added, and only a power failure at once could still undo it.
    let _added_all_the_same = File::open(directory).and_then(|directory| directory.sync_all());
    Ok(())
}

/// Gives a new file the owner, group and mode of the old one, or those of a first one.
fn give(new: &File, old: Option<&File>) -> anyhow::Result<()> {
    if let Some(old) = old {
        let (from, to) = (old.metadata()?, new.metadata()?);
        if (from.uid(), from.gid()) != (to.uid(), to.gid()) {
            fchown(new, Some(from.uid()), Some(from.gid()))?;
        }
        return Ok(new.set_permissions(Permissions::from_mode(from.mode() & 0o7777))?);
    }
    let identity = identify(None)?;
    let is_root = identity.privileged && !identity.on_behalf;
    if let Some(group) = group_id(GROUP).filter(|_| is_root) {
        fchown(new, None, Some(group))?;
        new.set_permissions(Permissions::from_mode(0o640))?;
    }
    Ok(())
}

/// A file that goes again, unless it took the place of another.
struct NewFile(PathBuf);

impl Drop for NewFile {
    fn drop(&mut self) {
        let _has_its_place = fs::remove_file(&self.0);
    }
}
