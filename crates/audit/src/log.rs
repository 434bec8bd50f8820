//! The directory of the log, and the only code that adds a record to it.
//!
//! Files are named `audit-00000001.jsonl` and so on; the last is written to, and each
//! begins with a record that names the one before. A writer holds the lock of the file
//! `lock`, which dies with it, for as long as it looks at the end of the chain and writes;
//! it changes and removes nothing, but old files in `rotate`. Readers need no lock.

use std::{
    ffi::OsStr,
    fs::{DirBuilder, File},
    io::{ErrorKind, Write},
    os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant, SystemTime},
};

use rustix::{
    fd::OwnedFd,
    fs::{AtFlags, CWD, FlockOperation, Mode, OFlags, flock, openat, renameat, unlinkat},
    io::Errno,
    rand::{GetRandomFlags, getrandom},
};
use serde::{Deserialize, Serialize};
use stockade_protocol::text::hex;

use crate::{
    AuditError, Untrusted,
    chain::{Body, Header, Link, MAX_LINE_LEN, PreviousFile, RemovedFiles, TornBytes},
    event::Event,
    failed,
    tail::Tail,
    text,
};

/// A file is closed, and the next one begun, before it grows beyond this.
pub const FILE_SIZE: u64 = 64 << 20;
/// How long another writer may keep the lock.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a writer may wait in all while others write.
const MAX_QUEUE_WAIT: Duration = Duration::from_secs(60);
/// The pause between two tries grows with the wait, or hundreds of waiting writers would use
/// up the CPU time of the one that writes.
const MIN_PAUSE: Duration = Duration::from_micros(200);
const MAX_PAUSE: Duration = Duration::from_millis(10);
const LOCK: &str = "lock";
/// Under this name a new file gets its first record.
const NEXT: &str = "next";

/// One log.
#[derive(Debug)]
pub struct Log {
    path: PathBuf,
    directory: OwnedFd,
    owner: u32,
    file_size: u64,
}

/// A record that was written, and its file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AppendedRecord {
    /// The end of the chain: this record.
    pub link: Link,
    /// The file that holds it.
    pub file: PathBuf,
}

/// What a rotation has done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RotatedLog {
    /// The end of the chain, and its file; none where there is no log yet.
    pub appended: Option<AppendedRecord>,
    /// The files that were removed.
    pub removed: Vec<PathBuf>,
}

/// Where a record stands, or will.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// The file.
    pub file: PathBuf,
    /// Its line's first byte.
    pub offset: u64,
}

impl Place {
    /// Whether a whole record of this run stands here.
    pub fn holds_run(&self, run: &str) -> bool {
        #[derive(Deserialize)]
        struct Run {
            run: String,
        }
        let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
        let Ok(file) = File::options().read(true).custom_flags(flags).open(&self.file) else { return false };
        let mut bytes = vec![0; MAX_LINE_LEN + 1];
        let Ok(length) = file.read_at(&mut bytes, self.offset) else { return false };
        let line = bytes[..length].split(|byte| *byte == b'\n').next().unwrap_or_default();
        Header::parse(line).is_some() && serde_json::from_slice::<Run>(line).is_ok_and(|found| found.run == run)
    }
}

/// The files of a log, the oldest first.
///
/// # Errors
/// The directory cannot be read.
pub fn files(directory: &Path) -> Result<Vec<PathBuf>, AuditError> {
    let entries = std::fs::read_dir(directory).map_err(failed("read the audit log", directory))?;
    let names = entries.filter_map(|entry| entry.ok().map(|entry| entry.file_name()));
    let mut numbers: Vec<u64> = names.filter_map(|name| number(&name)).collect();
    numbers.sort_unstable();
    Ok(numbers.into_iter().map(|number| directory.join(file_name(number))).collect())
}

fn number(name: &OsStr) -> Option<u64> {
    let digits = name.to_str()?.strip_prefix("audit-")?.strip_suffix(".jsonl")?;
    let number = digits.parse().ok()?;
    (file_name(number) == *name.to_str()?).then_some(number)
}

fn file_name(number: u64) -> String {
    format!("audit-{number:08}.jsonl")
}

impl Log {
    /// Opens the log at `path`, making its directory with this mode if need be.
    ///
    /// # Errors
    /// It cannot be made or opened, another user owns it, or others may write there.
    pub fn open(path: &Path, owner: u32, mode: u32) -> Result<Self, AuditError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let open = || openat(CWD, path, flags, Mode::empty());
        let mut opened = open();
        if opened.as_ref().err() == Some(&Errno::NOENT) {
            match DirBuilder::new().mode(mode).create(path) {
                // Another launcher made it meanwhile.
                Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(failed("make the audit log", path)(error)),
                _ => opened = open(),
            }
        }
        let directory = opened.map_err(|errno| match errno {
            Errno::NOTDIR | Errno::LOOP if path.is_symlink() => {
                AuditError::Untrusted { path: path.to_path_buf(), wanted: "a directory", owner, found: Untrusted::Link }
            }
            errno => failed("open the audit log", path)(errno.into()),
        })?;
        let log = Log { path: path.to_path_buf(), directory, owner, file_size: FILE_SIZE };
        let metadata = rustix::fs::fstat(&log.directory).map_err(|errno| failed("look at the audit log", path)(errno.into()))?;
        if metadata.st_uid != owner || metadata.st_mode & 0o022 != 0 {
            let found = Untrusted::Status { kind_fits: true, uid: metadata.st_uid, mode: metadata.st_mode & 0o7777 };
            return Err(log.untrusted(path, "a directory", found));
        }
        Ok(log)
    }

    /// The same with files of another size.
    #[must_use]
    pub fn with_file_size(self, file_size: u64) -> Self {
        Log { file_size, ..self }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn untrusted(&self, path: &Path, wanted: &'static str, found: Untrusted) -> AuditError {
        AuditError::Untrusted { path: path.to_path_buf(), wanted, owner: self.owner, found }
    }

    /// A file of the directory, which must be the owner's alone.
    pub(crate) fn file(&self, name: &str, flags: OFlags, mode: u32) -> Result<File, AuditError> {
        let path = self.path.join(name);
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let opened = openat(&self.directory, name, flags, Mode::from_bits_truncate(mode));
        let file = File::from(opened.map_err(|errno| match errno {
            Errno::LOOP => self.untrusted(&path, "a file", Untrusted::Link),
            errno => failed("open", &path)(errno.into()),
        })?);
        let metadata = file.metadata().map_err(failed("look at", &path))?;
        if !metadata.is_file() || metadata.uid() != self.owner || metadata.mode() & 0o022 != 0 {
            let found = Untrusted::Status { kind_fits: metadata.is_file(), uid: metadata.uid(), mode: metadata.mode() & 0o7777 };
            return Err(self.untrusted(&path, "a file", found));
        }
        Ok(file)
    }

    /// Takes a lock, with a time limit: a stopped writer must not stop all others. Each holder
    /// writes to the lock's file; as long as its mtime changes, the wait goes on.
    pub(crate) fn locked(&self, name: &str) -> Result<File, AuditError> {
        // Mode 0600, since opening a file for reading is enough to hold its lock.
        let file = self.file(name, OFlags::RDWR | OFlags::CREATE, 0o600)?;
        let path = || self.path.join(name);
        let begin = Instant::now();
        let taken = || file.metadata().map(|data| (data.mtime(), data.mtime_nsec())).map_err(failed("look at", &path()));
        let mut last = None;
        loop {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(file),
                Err(Errno::AGAIN) => {}
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(failed("lock", &path())(errno.into())),
            }
            match last {
                Some((at, _)) if Instant::elapsed(&at) < LOCK_TIMEOUT => {}
                Some((_, before)) if before == taken()? || begin.elapsed() >= MAX_QUEUE_WAIT => {
                    return Err(AuditError::Locked { path: path(), seconds: begin.elapsed().as_secs() });
                }
                _ => last = Some((Instant::now(), taken()?)),
            }
            thread::sleep((begin.elapsed() / 8).clamp(MIN_PAUSE, MAX_PAUSE));
        }
    }

    /// Adds one record at the end. `durable`: it is on disk when this returns.
    ///
    /// # Errors
    /// It could not be written whole, and what was written of it is taken back. Where this writer
    /// dies in between, the next one marks the bytes as torn.
    pub fn append(&self, event: &Event, durable: bool) -> Result<AppendedRecord, AuditError> {
        self.append_at(event, durable, &mut |_| {})
    }

    /// The same, and says before it writes where the record will stand.
    ///
    /// # Errors
    /// As above.
    pub fn append_at(&self, event: &Event, durable: bool, before: &mut dyn FnMut(Place)) -> Result<AppendedRecord, AuditError> {
        let lock = self.locked(LOCK)?;
        // Only the new mtime matters: it shows waiting writers that the lock changes hands.
        let holder = std::process::id().to_ne_bytes();
        lock.write_all_at(&holder, 0).map_err(failed("write to", &self.path.join(LOCK)))?;
        let time = text::time(SystemTime::now());
        let mut number = self.last_number()?;
        if number == 0 {
            number = 1;
            self.begin_file(number, &mut Link::beginning(new_chain()?), None, &time)?;
        }
        let tail_number = number;
        let mut file = self.open_file(number)?;
        let tail = Tail::read(&file, &self.path.join(file_name(number)))?;
        let mut link = tail.link.clone();
        let mut bytes = Vec::with_capacity(4096);
        if tail.unended {
            bytes.push(b'\n');
        }
        if tail.residue > 0 {
            let torn = self.torn(&file, number, &tail)?;
            link.extend(&time, Body::torn(torn), &mut bytes);
        }
        let mut next = link.clone();
        let start = bytes.len();
        next.extend(&time, Body::Event(event), &mut bytes);
        if tail.whole > 0 && tail.whole + tail.residue + bytes.len() as u64 > self.file_size {
            bytes.truncate(start);
            self.write(&mut file, number, &bytes)?;
            self.sync(&file, number)?;
            let before = PreviousFile { file: file_name(number), sha256: link.hash.clone() };
            number += 1;
            self.begin_file(number, &mut link, Some(before), &time)?;
            file = self.open_file(number)?;
            bytes.clear();
            next = link;
            next.extend(&time, Body::Event(event), &mut bytes);
        }
        let start = if number == tail_number { start as u64 } else { 0 };
        if let Ok(metadata) = file.metadata() {
            before(Place { file: self.path.join(file_name(number)), offset: metadata.len() + start });
        }
        self.write(&mut file, number, &bytes)?;
        // Released before the sync, so that several writers wait for the disk together.
        drop(lock);
        if durable {
            self.sync(&file, number)?;
        }
        Ok(AppendedRecord { link: next, file: self.path.join(file_name(number)) })
    }

    /// Begins the next file, if the last has a record of its own. With `keep`, removes the oldest
    /// files whose last record is older than that: a record in the last file states it first, so
    /// that the log still verifies. Returns the file that is written to from now on, and those
    /// that were removed.
    ///
    /// # Errors
    /// Something cannot be written, read or removed. What was stated and not removed goes next time.
    pub fn rotate(&self, keep: Option<Duration>) -> Result<RotatedLog, AuditError> {
        let lock = self.locked(LOCK)?;
        let holder = std::process::id().to_ne_bytes();
        lock.write_all_at(&holder, 0).map_err(failed("write to", &self.path.join(LOCK)))?;
        let now = SystemTime::now();
        let time = text::time(now);
        let mut number = self.last_number()?;
        if number == 0 {
            return Ok(RotatedLog { appended: None, removed: Vec::new() });
        }
        let mut file = self.open_file(number)?;
        let tail = Tail::read(&file, &self.path.join(file_name(number)))?;
        let mut link = tail.link.clone();
        let mut bytes = Vec::new();
        if tail.unended {
            bytes.push(b'\n');
        }
        if tail.residue > 0 {
            link.extend(&time, Body::torn(self.torn(&file, number, &tail)?), &mut bytes);
        }
        self.write(&mut file, number, &bytes)?;
        if !tail.is_first {
            self.sync(&file, number)?;
            let before = PreviousFile { file: file_name(number), sha256: link.hash.clone() };
            number += 1;
            self.begin_file(number, &mut link, Some(before), &time)?;
        }
        let oldest = keep.and_then(|keep| now.checked_sub(keep)).map(text::time);
        let old = oldest.map_or(Ok(Vec::new()), |oldest| self.files_before(number, &oldest))?;
        if let Some((_, last)) = old.last() {
            let removed = RemovedFiles { files: old.len() as u64, last: last.clone() };
            let mut bytes = Vec::new();
            link.extend(&time, Body::removed(removed), &mut bytes);
            let mut file = self.open_file(number)?;
            self.write(&mut file, number, &bytes)?;
            self.sync(&file, number)?;
        }
        let mut removed = Vec::new();
        for (path, PreviousFile { file, .. }) in old {
            unlinkat(&self.directory, &file, AtFlags::empty()).map_err(|errno| failed("remove", &path)(errno.into()))?;
            removed.push(path);
        }
        Ok(RotatedLog { appended: Some(AppendedRecord { link, file: self.path.join(file_name(number)) }), removed })
    }

    /// The files from the oldest on, but `last`, whose last record is older than a time.
    fn files_before(&self, last: u64, oldest: &str) -> Result<Vec<(PathBuf, PreviousFile)>, AuditError> {
        let mut old = Vec::new();
        for path in files(&self.path)? {
            let name = path.file_name().unwrap_or_default();
            let Some(number) = number(name).filter(|number| *number != last) else { break };
            let tail = Tail::read(&self.file(&file_name(number), OFlags::RDONLY, 0)?, &path)?;
            if tail.time.as_str() >= oldest {
                break;
            }
            old.push((path, PreviousFile { file: file_name(number), sha256: tail.link.hash }));
        }
        Ok(old)
    }

    fn last_number(&self) -> Result<u64, AuditError> {
        let unreadable = |errno: Errno| failed("read the audit log", &self.path)(errno.into());
        let mut last = 0;
        for entry in rustix::fs::Dir::read_from(&self.directory).map_err(unreadable)? {
            let name = entry.map_err(unreadable)?.file_name().to_string_lossy().into_owned();
            last = last.max(self::number(OsStr::new(&name)).unwrap_or(0));
        }
        Ok(last)
    }

    fn open_file(&self, number: u64) -> Result<File, AuditError> {
        self.file(&file_name(number), OFlags::RDWR | OFlags::APPEND, 0)
    }

    /// Makes a file with its first record; it gets its name once that record is whole.
    fn begin_file(&self, number: u64, link: &mut Link, before: Option<PreviousFile>, time: &str) -> Result<(), AuditError> {
        let mut file = self.file(NEXT, OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC, 0o640)?;
        let mut bytes = Vec::new();
        link.extend(time, Body::opened(before), &mut bytes);
        let path = self.path.join(NEXT);
        file.write_all(&bytes).and_then(|()| file.sync_data()).map_err(failed("write", &path))?;
        renameat(&self.directory, NEXT, &self.directory, file_name(number)).map_err(|errno| failed("rename", &path)(errno.into()))?;
        rustix::fs::fsync(&self.directory).map_err(|errno| failed("sync", &self.path)(errno.into()))
    }

    /// The bytes behind the last whole record, left by a writer that died or by who changed the log.
    fn torn(&self, file: &File, number: u64, tail: &Tail) -> Result<TornBytes, AuditError> {
        let mut bytes = vec![b'\n'; usize::try_from(tail.residue).unwrap_or(0)];
        let there = bytes.len() - usize::from(tail.unended);
        file.read_exact_at(&mut bytes[..there], tail.whole).map_err(failed("read", &self.path.join(file_name(number))))?;
        Ok(TornBytes { bytes: tail.residue, sha256: text::sha256(&bytes), ended: !tail.unended })
    }

    fn write(&self, file: &mut File, number: u64, bytes: &[u8]) -> Result<(), AuditError> {
        let path = self.path.join(file_name(number));
        let failed = failed("write to the audit log", &path);
        let length = file.metadata().map_err(&failed)?.len();
        file.write_all(bytes).map_err(|error| {
            // What a full disk took of it is no record, and this writer lives to say so. Under the
            // lock no other has added to it.
            let _stays_as_torn = file.set_len(length);
            failed(error)
        })
    }

    fn sync(&self, file: &File, number: u64) -> Result<(), AuditError> {
        file.sync_data().map_err(failed("sync the audit log", &self.path.join(file_name(number))))
    }
}

fn new_chain() -> Result<String, AuditError> {
    let mut random = [0; 8];
    // So few bytes always arrive whole.
    getrandom(&mut random, GetRandomFlags::empty()).map_err(|errno| AuditError::NoRandomness(errno.into()))?;
    Ok(hex(&random))
}

#[cfg(test)]
pub(crate) mod tests;
