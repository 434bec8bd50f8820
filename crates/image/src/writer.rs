//! Changing the store: every change is a rename of what is complete and on disk.
//!
//! An import makes everything in a directory of its own in `tmp`, which it holds locked. A crash leaves that
//! directory alone, and the next change removes it; after a signal the program does that itself. Layers go only by [`Writer::gc`], which needs the
//! store's lock exclusively: no run and no import holds a layer then. Names and records change under a lock of
//! their own, so no name is given to an image that is being removed.

use std::{
    collections::HashSet,
    fs::{self, DirBuilder, File, Permissions, TryLockError},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    time::SystemTime,
};

use serde::Serialize;
use stockade_images::{Digest, FORMAT, ImageError, ImageRecord, Store};

use crate::error::{Attempt, ImportError};

/// The parts of a store that are directories.
const PARTS: [&str; 5] = ["layers", "flat", "images", "names", "tmp"];

/// A store that is changed.
#[derive(Debug)]
pub struct Writer {
    /// What it reads as.
    pub store: Store,
}

/// A directory in `tmp` of one change. What is left of it goes with it.
#[derive(Debug)]
pub struct Staging {
    path: PathBuf,
    /// Its name in `tmp`.
    name: String,
    /// A lock on the directory itself.
    _lock: File,
    /// The store's lock, shared.
    held: Option<File>,
}

impl Drop for Staging {
    fn drop(&mut self) {
        // The next change removes what stays.
        let _left = fs::remove_dir_all(&self.path);
    }
}

impl Staging {
    /// Its directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A path in it, from the store on.
    pub fn from_store(&self, inside: &str) -> String {
        format!("tmp/{}/{inside}", self.name)
    }
}

impl Writer {
    /// Opens the store at this path, and makes it where there is none.
    ///
    /// # Errors
    /// It cannot be made, or another user could have written it.
    pub fn open(path: &Path, owner: u32) -> Result<Self, ImportError> {
        if !path.join("format").exists() {
            if let Some(above) = path.parent() {
                DirBuilder::new().recursive(true).mode(0o755).create(above).attempt("make", above)?;
            }
            for part in std::iter::once(path.to_owned()).chain(PARTS.map(|part| path.join(part))) {
                make_directory(&part)?;
            }
            let lock = path.join("lock");
            File::options().create(true).append(true).mode(0o600).open(&lock).attempt("make", lock)?;
            // Last: what has a format is whole. Two that make it at once write the same.
            let made = path.join(format!("format.{}", std::process::id()));
            write(&made, FORMAT.as_bytes())?;
            fs::rename(&made, path.join("format")).attempt("make", path.join("format"))?;
        }
        Writer::of(Store::open(path, owner)?)
    }

    /// To change a store that is there.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn of(store: Store) -> Result<Self, ImportError> {
        // Who can open a file to read it can lock it (flock(2)), and so hold up all others.
        for (part, mode) in [("lock", 0o600), ("tmp", 0o700)] {
            let path = store.path().join(part);
            fs::set_permissions(&path, Permissions::from_mode(mode)).attempt("set the mode of", path)?;
        }
        Ok(Writer { store })
    }

    fn path(&self, part: &str) -> PathBuf {
        self.store.path().join(part)
    }

    /// A new directory for a change; no layer is removed while it lives. Removes what crashed changes left.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn stage(&self) -> Result<Staging, ImportError> {
        let held = self.store.lock_shared()?;
        let mut staging = self.directory()?;
        staging.held = Some(held);
        Ok(staging)
    }

    fn directory(&self) -> Result<Staging, ImportError> {
        self.sweep()?;
        loop {
            let since = SystemTime::UNIX_EPOCH.elapsed().map_or(0, |time| time.as_nanos());
            let name = format!("{}-{since}", std::process::id());
            let path = self.path("tmp").join(&name);
            make_directory(&path)?;
            // Another change may take it for a left one before it is locked.
            if let Some(lock) = lock_directory(&path)? {
                return Ok(Staging { path, name, _lock: lock, held: None });
            }
        }
    }

    /// Removes what crashed changes left.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn sweep(&self) -> Result<(), ImportError> {
        for name in self.store.entries("tmp")? {
            let path = self.path("tmp").join(name);
            if let Some(_lock) = lock_directory(&path)? {
                fs::remove_dir_all(&path).attempt("remove", &path)?;
            }
        }
        Ok(())
    }

    /// Writes all that a change has made to the disk.
    ///
    /// # Errors
    /// The disk refuses.
    pub fn sync(&self, staging: &Staging) -> Result<(), ImportError> {
        let directory = File::open(&staging.path).attempt("open", &staging.path)?;
        rustix::fs::syncfs(directory).attempt("write to disk what is in", &staging.path)
    }

    /// Moves a directory into the store. One that is there has the same content, and stays.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn place(&self, made: &Path, at: &Path) -> Result<(), ImportError> {
        match fs::rename(made, at) {
            Err(error) if matches!(error.kind(), io::ErrorKind::DirectoryNotEmpty | io::ErrorKind::AlreadyExists) => Ok(()),
            done => done.attempt("put into the store", at),
        }
    }

    /// Adds or replaces the record of an image, whose layers are there, and gives it a name.
    ///
    /// # Errors
    /// The kernel refuses, or it can be no name.
    pub fn add(&self, staging: &Staging, record: &ImageRecord, name: &str) -> Result<(), ImportError> {
        for part in ["layers", "flat"] {
            sync_directory(&self.path(part))?;
        }
        let _alone = self.lock_records()?;
        self.replace(staging, &json(record), &self.store.image(&record.digest))?;
        self.name(staging, name, &record.digest)
    }

    /// Gives a name to an image that is there whole. Its record; none: it is not there.
    ///
    /// # Errors
    /// The kernel refuses, or it can be no name.
    pub fn name_again(&self, staging: &Staging, digest: &Digest, name: &str) -> Result<Option<ImageRecord>, ImportError> {
        let _alone = self.lock_records()?;
        let Ok(image) = self.store.resolve(&digest.to_string()) else { return Ok(None) };
        self.name(staging, name, digest)?;
        Ok(Some(image.record))
    }

    /// Another image may have had the name.
    fn name(&self, staging: &Staging, name: &str, digest: &Digest) -> Result<(), ImportError> {
        self.replace(staging, format!("{}\n", digest.hex()).as_bytes(), &self.store.name(name)?)
    }

    /// One process at a time changes names and records: an image that gets a name is not removed meanwhile. It
    /// waits for small files to reach the disk; no other user can open `tmp`. The store's lock cannot
    /// serve, which every change and run holds shared.
    fn lock_records(&self) -> Result<File, ImportError> {
        let path = self.path("tmp");
        let directory = File::open(&path).attempt("open", &path)?;
        directory.lock().attempt("lock", path)?;
        Ok(directory)
    }

    fn replace(&self, staging: &Staging, content: &[u8], at: &Path) -> Result<(), ImportError> {
        let made = staging.path.join("file");
        write(&made, content)?;
        fs::rename(&made, at).attempt("put into the store", at)?;
        at.parent().map_or(Ok(()), sync_directory)
    }

    /// Removes a name, and the image with its last name; a digest removes the image and all its names.
    /// Its layers stay for `gc`. The digest, if the image has gone.
    ///
    /// # Errors
    /// There is none, or the kernel refuses.
    pub fn remove(&self, name_or_digest: &str) -> Result<Option<Digest>, ImportError> {
        let _alone = self.lock_records()?;
        let (name, digest) = match self.store.find(name_or_digest) {
            // The file of a name that says no digest.
            Err(ImageError::Damaged { path, .. }) => return fs::remove_file(&path).attempt("remove", path).map(|()| None),
            found => found?,
        };
        let is_all = name.is_none() || name_or_digest.contains('@');
        // An unreadable record can be removed, too.
        let path = self.store.image(&digest);
        let mut others = 0;
        for (of, named) in self.store.names()? {
            if named == digest && (is_all || Some(&of) == name.as_ref()) {
                let path = self.store.name(&of)?;
                fs::remove_file(&path).attempt("remove", path)?;
            } else if named == digest {
                others += 1;
            }
        }
        if others > 0 {
            return Ok(None);
        }
        match fs::remove_file(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && is_all => Err(ImageError::UnknownDigest { digest }.into()),
            done => done.attempt("remove", path).map(|()| Some(digest)),
        }
    }

    /// Removes layers and merged trees that no image has, and what crashed changes left. How many it removed.
    ///
    /// # Errors
    /// A run, a prepared sandbox or an import holds images, or a record cannot be read.
    pub fn gc(&self) -> Result<usize, ImportError> {
        let staging = self.directory()?;
        let path = self.path("lock");
        let lock = File::open(&path).attempt("open", &path)?;
        match lock.try_lock() {
            Err(TryLockError::WouldBlock) => return Err(ImportError::Held),
            Err(TryLockError::Error(error)) => return Err(error).attempt("lock", path),
            Ok(()) => {}
        }
        let records = self.store.list()?;
        let layers: HashSet<&str> = records.iter().flat_map(|record| &record.layers).map(|layer| layer.key.hex()).collect();
        let flat: HashSet<&str> = records.iter().filter_map(|record| Some(record.flat.as_ref()?.chain_id.hex())).collect();
        let mut removed = 0;
        for (part, used) in [("layers", layers), ("flat", flat)] {
            for name in self.store.entries(part)?.iter().filter(|name| !used.contains(name.as_str())) {
                let path = self.path(part).join(name);
                fs::rename(&path, staging.path.join(format!("{part}-{name}"))).attempt("remove", path)?;
                removed += 1;
            }
        }
        // To delete them takes longer, and nothing has to wait for that.
        drop(lock);
        drop(staging);
        Ok(removed)
    }
}

fn make_directory(path: &Path) -> Result<(), ImportError> {
    match DirBuilder::new().mode(0o755).create(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        done => done.attempt("make", path),
    }
}

/// None: another process has it, or has removed it.
fn lock_directory(path: &Path) -> Result<Option<File>, ImportError> {
    let directory = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened.attempt("open", path)?,
    };
    match directory.try_lock() {
        Err(TryLockError::WouldBlock) => return Ok(None),
        Err(TryLockError::Error(error)) => return Err(error).attempt("lock", path),
        Ok(()) => {}
    }
    let own = directory.metadata().attempt("look at", path)?;
    let there = fs::symlink_metadata(path).ok();
    Ok(there.is_some_and(|there| (there.dev(), there.ino()) == (own.dev(), own.ino())).then_some(directory))
}

/// Writes a file whole, and to the disk.
///
/// # Errors
/// The kernel refuses.
pub fn write(path: &Path, content: &[u8]) -> Result<(), ImportError> {
    fs::write(path, content).and_then(|()| File::open(path)?.sync_all()).attempt("write", path)
}

fn sync_directory(path: &Path) -> Result<(), ImportError> {
    File::open(path).and_then(|directory| directory.sync_all()).attempt("write to disk", path)
}

/// As the store has it.
pub fn json(value: &impl Serialize) -> Vec<u8> {
    // These records have no map with other keys than texts, which alone could fail.
    let mut text = serde_json::to_vec_pretty(value).unwrap_or_default();
    text.push(b'\n');
    text
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use std::{sync::Barrier, thread};

    use super::*;

    fn writer(name: &str) -> (PathBuf, Writer) {
        let path = std::env::temp_dir().join(format!("stockade-writer-{}-{name}", std::process::id()));
        let writer = Writer::open(&path, rustix::process::geteuid().as_raw()).unwrap();
        (path, writer)
    }

    #[test]
    fn what_can_be_locked_no_other_user_can_open() {
        let (path, writer) = writer("modes");
        drop(writer.stage().unwrap());
        let modes = || ["lock", "tmp", "layers"].map(|part| fs::metadata(path.join(part)).unwrap().mode() & 0o777);
        assert_eq!(modes(), [0o600, 0o700, 0o755]);
        // As a store has them that an earlier version made.
        for (part, mode) in [("lock", 0o644), ("tmp", 0o755)] {
            fs::set_permissions(path.join(part), Permissions::from_mode(mode)).unwrap();
        }
        Writer::of(writer.store).unwrap();
        assert_eq!(modes(), [0o600, 0o700, 0o755]);
        fs::remove_dir_all(path).unwrap();
    }

    #[test]
    fn an_image_that_gets_a_name_while_its_last_one_is_removed_stays_or_is_not_named() {
        let (path, writer) = writer("race");
        let staging = writer.stage().unwrap();
        let record = ImageRecord {
            digest: Digest::of_bytes(&[1; 32]),
            config_digest: Digest::of_bytes(&[1; 32]),
            os: "linux".into(),
            architecture: "amd64".into(),
            created: None,
            layers: vec![],
            flat: None,
            env: vec![],
            working_dir: String::new(),
            entrypoint: vec![],
            cmd: vec![],
            user: String::new(),
            size_bytes: 0,
            source: String::new(),
            imported_at: 0,
        };
        for _ in 0..200 {
            writer.add(&staging, &record, "old:1").unwrap();
            let at_once = Barrier::new(2);
            let (removed, named) = thread::scope(|scope| {
                let removal = scope.spawn(|| {
                    at_once.wait();
                    writer.remove("old:1").unwrap()
                });
                at_once.wait();
                let named = writer.name_again(&staging, &record.digest, "new:1").unwrap();
                (removal.join().unwrap(), named)
            });
            assert_ne!(removed.is_some(), named.is_some(), "it is named, or it has gone");
            assert_eq!(writer.store.resolve("new:1").is_ok(), named.is_some());
            if named.is_some() {
                writer.remove("new:1").unwrap();
            }
        }
        drop(staging);
        fs::remove_dir_all(path).unwrap();
    }

    #[test]
    fn a_damaged_name_can_be_removed_and_hides_no_other() {
        let (path, writer) = writer("damaged");
        let digest = Digest::of_bytes(&[1; 32]);
        let staging = writer.stage().unwrap();
        for name in ["good:1", "good:2", "bad:1"] {
            writer.name(&staging, name, &digest).unwrap();
        }
        fs::write(writer.store.name("bad:1").unwrap(), "rubbish").unwrap();
        assert!(matches!(writer.store.find("bad:1"), Err(ImageError::Damaged { .. })));
        assert_eq!(writer.store.names().unwrap().len(), 2);
        assert_eq!(writer.remove("good:1").unwrap(), None);
        assert_eq!(writer.remove("bad:1").unwrap(), None);
        assert_eq!(writer.store.entries("names").unwrap().len(), 1);
        assert!(matches!(writer.store.find("bad:1"), Err(ImageError::UnknownName { .. })));
        drop(staging);
        fs::remove_dir_all(path).unwrap();
    }
}
