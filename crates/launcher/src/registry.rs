//! Which runs are alive, and what a killed launcher left behind.
//!
//! Each run has a file in the registry's directory, locked for as long as its launcher
//! lives. What the kernel will not remove by itself (cgroup directories, the program's
//! file in a host scratch, the directory of a proof) is noted there first. A file that can
//! be locked belongs to no live run: the next start removes what it lists, and then the file.
//! The file's number also makes the uid of a root run unique. What was never noted is not found
//! here.

mod leftover;

use std::{
    fs::{DirBuilder, File, OpenOptions},
    io::{Read, Write},
    os::unix::{
        ffi::OsStrExt,
        fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rustix::{
    fs::{FlockOperation, flock},
    io::Errno,
};

use crate::{
    ErrorKind, LaunchError,
    error::{RegistryError, errno_of},
};

pub use leftover::remove_directory;

/// How many runs may be alive at one time.
const SLOTS: u32 = 16384;
/// How long a start waits for processes of runs whose launchers were killed: they die with these,
/// and what does not go is tried again by the next start. A process that cannot die would else
/// hold up every run.
const SWEEP_TIMEOUT: Duration = Duration::from_millis(200);
/// How long a run waits for its own.
const CLEAR_TIMEOUT: Duration = Duration::from_secs(1);
/// The name of every program file that a run makes begins so.
pub const PROGRAM_PREFIX: &str = "stockade_";
/// The name of every directory that a proof makes begins so.
pub const PROOF_PREFIX: &str = "stockade-prove-";

/// A directory of records.
#[derive(Clone, Debug)]
pub struct Registry {
    directory: PathBuf,
}

/// One run's record, locked until dropped.
#[derive(Debug)]
pub struct Record {
    file: File,
    path: PathBuf,
    slot: u32,
    at_drop: AtDrop,
}

fn failed(attempt: &'static str, path: &Path) -> impl Fn(std::io::Error) -> LaunchError + use<> {
    let failed = LaunchError::path(ErrorKind::Registry, attempt, path);
    move |error| failed(errno_of(&error))
}

/// What becomes of a record's file with the record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AtDrop {
    /// It goes when what it lists is gone, which is removed first.
    Clear,
    /// It goes: nothing that it lists is left.
    Remove,
    /// It stays for the next start: what it lists could not be removed just now.
    Keep,
}

impl Registry {
    /// Opens the registry at `directory`, making it if need be. It must belong to
    /// `owner` and be closed to all others: its files name what to remove.
    ///
    /// # Errors
    /// It cannot be made, or is not the owner's alone.
    pub fn open(directory: &Path, owner: u32) -> Result<Self, LaunchError> {
        match DirBuilder::new().mode(0o700).create(directory) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                return Err(failed("make the registry", directory)(error));
            }
            _ => {}
        }
        let metadata = std::fs::symlink_metadata(directory).map_err(failed("look at the registry", directory))?;
        if !metadata.is_dir() || metadata.uid() != owner || metadata.mode() & 0o022 != 0 {
            return Err(RegistryError::Insecure { directory: directory.to_path_buf(), owner }.into());
        }
        Ok(Registry { directory: directory.to_path_buf() })
    }

    /// Where it is.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Removes what killed launchers left behind. Returns how many records it cleared.
    ///
    /// # Errors
    /// The directory cannot be read. A leftover that cannot be removed stays for the
    /// next start.
    pub fn sweep(&self) -> Result<usize, LaunchError> {
        let mut cleared = 0;
        let until = Instant::now() + SWEEP_TIMEOUT;
        let entries = std::fs::read_dir(&self.directory).map_err(failed("read the registry", &self.directory))?;
        for entry in entries.flatten() {
            if let Some(mut record) = lock_existing(&entry.path()) {
                record.at_drop = if record.clear(until) { AtDrop::Remove } else { AtDrop::Keep };
                cleared += usize::from(record.at_drop == AtDrop::Remove);
            }
        }
        Ok(cleared)
    }

    /// Claims a free record.
    ///
    /// # Errors
    /// All are taken, or the file system refuses.
    pub fn claim(&self) -> Result<Record, LaunchError> {
        // Different launchers begin at different places, so that they seldom meet.
        let start = std::process::id() % SLOTS;
        for offset in 0..SLOTS {
            let slot = (start + offset) % SLOTS;
            let path = self.directory.join(format!("run-{slot}"));
            let attempt = failed("claim", &path);
            let file = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o600)
                .custom_flags(nofollow())
                .open(&path)
                .map_err(&attempt)?;
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Err(Errno::AGAIN) => continue,
                other => other.map_err(|errno| attempt(errno.into()))?,
            }
            let Some(mut record) = Record::standing(file, path.clone(), slot).map_err(&attempt)? else { continue };
            if record.has_leftovers() && !record.clear(Instant::now()) {
                record.at_drop = AtDrop::Keep;
                continue;
            }
            return Ok(record);
        }
        Err(RegistryError::Full(SLOTS).into())
    }
}

fn nofollow() -> i32 {
    nix::libc::O_NOFOLLOW
}

fn lock_existing(path: &Path) -> Option<Record> {
    let slot = path.file_name()?.to_str()?.strip_prefix("run-")?.parse().ok()?;
    let file = OpenOptions::new().read(true).write(true).custom_flags(nofollow()).open(path).ok()?;
    flock(&file, FlockOperation::NonBlockingLockExclusive).ok()?;
    Record::standing(file, path.to_path_buf(), slot).ok()?
}

impl Record {
    /// The record in a file that is locked. None where its last owner has removed it between
    /// our opening and our locking: another may stand at its path by now, which is not ours to
    /// remove. One that is locked stands at its path until its owner removes it.
    fn standing(file: File, path: PathBuf, slot: u32) -> std::io::Result<Option<Self>> {
        let stands = file.metadata()?.nlink() > 0;
        // Made only where it stands: a record that is dropped removes what is at its path.
        Ok(stands.then(|| Record { file, path, slot, at_drop: AtDrop::Clear }))
    }

    /// A number that no other live run of this registry has.
    pub fn slot(&self) -> u32 {
        self.slot
    }

    /// By one write, so that either all of them are noted or none is.
    fn note(&mut self, kind: &str, paths: &[PathBuf]) -> Result<(), LaunchError> {
        let mut lines = Vec::new();
        for path in paths {
            // A newline in a path would make two lines of one.
            if path.as_os_str().as_bytes().contains(&b'\n') {
                return Err(RegistryError::LineBreak(path.clone()).into());
            }
            lines.extend_from_slice(&[kind.as_bytes(), b" ", path.as_os_str().as_bytes(), b"\n"].concat());
        }
        let first = paths.first().map_or(Path::new(""), PathBuf::as_path);
        self.file.write_all(&lines).map_err(failed("note in the registry", first))
    }

    /// Notes cgroup directories that are about to be made.
    ///
    /// # Errors
    /// The record cannot be written.
    pub fn note_cgroups(&mut self, paths: impl IntoIterator<Item = PathBuf>) -> Result<(), LaunchError> {
        self.note("cgroup", &paths.into_iter().collect::<Vec<_>>())
    }

    /// Notes the program's file in a host scratch.
    ///
    /// # Errors
    /// The record cannot be written.
    pub fn note_program(&mut self, path: &Path) -> Result<(), LaunchError> {
        self.note("program", &[path.to_path_buf()])
    }

    /// Notes the directory of a proof, which goes with everything in it.
    ///
    /// # Errors
    /// The record cannot be written.
    pub fn note_proof(&mut self, path: &Path) -> Result<(), LaunchError> {
        self.note("proof", &[path.to_path_buf()])
    }

    /// Forgets what was noted: all of it is gone.
    pub fn settle(&mut self) {
        self.at_drop = AtDrop::Remove;
    }

    fn has_leftovers(&self) -> bool {
        self.file.metadata().is_ok_and(|metadata| metadata.len() > 0)
    }

    /// Removes what is listed, and waits for it until then; true if nothing of it is left.
    fn clear(&self, until: Instant) -> bool {
        let mut text = Vec::new();
        if rustix::fs::seek(&self.file, rustix::fs::SeekFrom::Start(0)).is_err() || (&self.file).read_to_end(&mut text).is_err() {
            return false;
        }
        // What cannot be removed keeps nothing else.
        let lines = text.split(|&byte| byte == b'\n').filter(|line| !line.is_empty());
        let all_gone = lines.filter(|line| !leftover::remove(line, until)).count() == 0;
        all_gone && self.file.set_len(0).is_ok() && rustix::fs::seek(&self.file, rustix::fs::SeekFrom::Start(0)).is_ok()
    }
}

/// The run's own end: what was noted is gone by now, the file goes too.
impl Drop for Record {
    fn drop(&mut self) {
        let is_done = match self.at_drop {
            AtDrop::Clear => !self.has_leftovers() || self.clear(Instant::now() + CLEAR_TIMEOUT),
            AtDrop::Remove => true,
            AtDrop::Keep => false,
        };
        if is_done {
            let _next_start_removes_it = rustix::fs::unlink(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::*;

    #[test]
    fn a_record_that_was_removed_before_it_was_locked_takes_no_other_with_it() {
        let directory = std::env::temp_dir().join(format!("stockade-registry-test-{}", std::process::id()));
        let registry = Registry::open(&directory, rustix::process::geteuid().as_raw()).unwrap();
        let first = registry.claim().unwrap();
        let (path, slot) = (first.path.clone(), first.slot);
        // Another launcher opens the file, and its owner removes it before that one has the lock.
        let slow = File::open(&path).unwrap();
        drop(first);
        let next = registry.claim().unwrap();
        assert_eq!(next.slot, slot);
        flock(&slow, FlockOperation::NonBlockingLockExclusive).unwrap();
        assert!(Record::standing(slow, path.clone(), slot).unwrap().is_none());
        assert!(path.exists());
        assert_ne!(registry.claim().unwrap().slot, slot);
        drop(next);
        assert!(!path.exists());
        std::fs::remove_dir(&directory).unwrap();
    }
}
