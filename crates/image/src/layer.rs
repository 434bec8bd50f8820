//! One layer from its blob to a tree: who reads what, and whose digest counts.
//!
//! ```text
//! blob ─ SHA-256 ─▶ decompressor ─▶ SHA-256, limits ─▶ unpacker ─▶ tree
//!        blob's digest              diff-id
//! ```
//!
//! Both digests are computed here, in the process that neither decompresses nor unpacks. Decompressor and
//! unpacker are started anew for each layer and have given up their rights before they read
//! (`confine.rs`). So bytes that take a decompressor over cannot come into the store under the diff-id of
//! another layer: the tree under a diff-id was made of the archive of this digest. No blob is ever whole in memory.

use std::{
    ffi::OsString,
    fs::File,
    io::{self, Read, Write},
    os::unix::process::{CommandExt, ExitStatusExt},
    path::Path,
    process::{Child, ChildStdin, Command, ExitStatus, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use nix::sys::{
    resource::{UsageWho, getrusage},
    time::TimeValLike,
};
use rustix::{
    fs::{StatVfs, statvfs},
    pipe::fcntl_setpipe_size,
};
use sha2::{Digest as _, Sha256};
use stockade_images::Digest;

use crate::{
    confine::CPU_SECONDS,
    decompress::{BUFFER, Compression},
    error::{Attempt, ImportError},
    opaque,
    progress::Progress,
    source::Blob,
    tar::Section,
    unpack::{Limits, Unpacked},
};

/// Bytes of a file system that an import leaves free.
const KEPT_FREE: u64 = 256 << 20;
/// Inodes of it that an import leaves free.
const KEPT_INODES: u64 = 10_000;
/// Bytes after which the file system is asked again how much is free.
const ASK_AFTER: u64 = 32 << 20;
/// The most bytes of what a process says of its work.
const MAX_ANSWER_LEN: u64 = 4 << 10;
/// Bytes of a pipe: the most that an ordinary user may have (`/proc/sys/fs/pipe-max-size`).
const PIPE: usize = 1 << 20;

/// The first argument of a decompressor and of an unpacker.
pub const DECOMPRESS: &str = "--decompress";
/// See [`DECOMPRESS`].
pub const UNPACK: &str = "--unpack";

/// What is promised of a layer.
#[derive(Clone, Debug)]
pub struct Promised<'a> {
    /// Of its uncompressed archive.
    pub diff_id: &'a Digest,
    /// Of its blob, with its bytes; nothing of one of `docker save`.
    pub blob: Option<(&'a Digest, u64)>,
}

/// Where a layer is unpacked, and on what.
#[derive(Clone, Debug)]
pub struct Target<'a> {
    /// The store.
    pub store: &'a Path,
    /// The tree, from the store on.
    pub tree: &'a str,
    /// The trees below, from the store on, bottom first.
    pub below: &'a [String],
}

/// How much an image may still have.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    /// The limit in bytes, for errors.
    pub max: u64,
    /// Bytes of blobs, compressed as they are.
    pub blobs: u64,
    /// Bytes of uncompressed archives.
    pub archives: u64,
    /// What unpackers may make.
    pub trees: Limits,
}

/// A process that reads hostile bytes. It is killed when this is dropped.
struct Worker(Child);

impl Drop for Worker {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _killed = self.0.kill();
        let _status = self.0.wait();
    }
}

impl Worker {
    fn start(arguments: &[OsString]) -> Result<Self, ImportError> {
        let program = "/proc/self/exe";
        let mut command = Command::new(program);
        command.arg0("stockade-image").args(arguments);
        command.args([cpu_left()?, u64::from(std::process::id())].map(|number| number.to_string())).env_clear();
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.spawn().attempt("start", program)?;
        if let Some(input) = &child.stdin {
            // A smaller pipe is slower, and nothing else.
            let _size = fcntl_setpipe_size(input, PIPE);
        }
        Ok(Worker(child))
    }

    /// Waits for its end. None: it has done its work; else what it says, or how it ended.
    fn end(&mut self) -> Result<Option<String>, ImportError> {
        self.0.stdin = None;
        let status = self.0.wait().attempt("wait for", "the unpacking process")?;
        if status.success() {
            return Ok(None);
        }
        // At its limit of CPU time the kernel kills it, and it says nothing.
        cpu_left()?;
        let mut said = Vec::new();
        if let Some(stderr) = self.0.stderr.take() {
            stderr.take(MAX_ANSWER_LEN).read_to_end(&mut said).attempt("read", "the errors of the unpacking process")?;
        }
        let said = String::from_utf8_lossy(&said);
        Ok(Some(if said.is_empty() { ending(status) } else { said.into_owned() }))
    }
}

/// Seconds of CPU time that are left for processes of this import: all of them are children of this one. Two
/// that run at once may use as much each.
fn cpu_left() -> Result<u64, ImportError> {
    let used = children_cpu_time().attempt("measure the CPU time of", "the unpacking processes")?;
    cpu_left_after(used).ok_or(ImportError::CpuTime)
}

/// Of all that have ended, in microseconds.
fn children_cpu_time() -> nix::Result<u64> {
    let usage = getrusage(UsageWho::RUSAGE_CHILDREN)?;
    Ok((usage.user_time() + usage.system_time()).num_microseconds().unsigned_abs())
}

fn cpu_left_after(used_microseconds: u64) -> Option<u64> {
    CPU_SECONDS.checked_sub(used_microseconds.div_ceil(1_000_000)).filter(|left| *left > 0)
}

fn ending(status: ExitStatus) -> String {
    const SIGKILL: i32 = 9;
    match status.signal() {
        Some(SIGKILL) => "the process was killed: memory or CPU time ran out, or it made a system call that it may not make".into(),
        _ => format!("the process ended without a word ({status})"),
    }
}

/// Where a transfer stopped.
enum Stopped {
    Read(io::Error),
    /// The reader has ended, and says why.
    Write,
    Limit(ImportError),
}

/// The digest of all that was transferred, and its bytes.
type Transferred = Result<(Digest, u64), Stopped>;

/// Reads all, writes all, and digests it. What `see` says of the bytes so far may end it.
fn transfer(from: &mut dyn Read, to: &mut dyn Write, mut see: impl FnMut(usize) -> Result<(), Stopped>) -> Transferred {
    let (mut buffer, mut hash, mut bytes) = (vec![0; BUFFER], Sha256::new(), 0);
    loop {
        let length = match from.read(&mut buffer) {
            Ok(0) => return Ok((Digest::of_bytes(&hash.finalize().into()), bytes)),
            Ok(length) => length,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(Stopped::Read(error)),
        };
        see(length)?;
        hash.update(&buffer[..length]);
        bytes += length as u64;
        to.write_all(&buffer[..length]).map_err(|_| Stopped::Write)?;
    }
}

/// A pipe to a decompressor that may end early: what it is not given is digested all the same, since a
/// wrong digest says more than what came of it.
struct WhileItReads(ChildStdin, bool);

impl Write for WhileItReads {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.1 = self.1 && self.0.write_all(bytes).is_ok();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What came of a blob behind a decompressor.
struct Expanded {
    blob: Transferred,
    archive: Transferred,
    complaint: Option<String>,
}

fn through_decompressor(
    mut blob: Blob,
    to: &mut dyn Write,
    see_archive: impl FnMut(usize) -> Result<(), Stopped>,
    progress: &Progress,
) -> Result<Expanded, ImportError> {
    let mut worker = Worker::start(&[DECOMPRESS.into()])?;
    let (Some(stdin), Some(mut stdout)) = (worker.0.stdin.take(), worker.0.stdout.take()) else {
        return Err(io::Error::other("it has no pipes")).attempt("start", "the decompressing process");
    };
    let _smaller_is_slower = fcntl_setpipe_size(&stdout, PIPE);
    let is_wanted = AtomicBool::new(true);
    let (blob, archive) = thread::scope(|scope| {
        let feeder = scope.spawn(|| {
            transfer(&mut blob, &mut WhileItReads(stdin, true), |length| {
                progress.add(length);
                if is_wanted.load(Ordering::Relaxed) { Ok(()) } else { Err(Stopped::Write) }
            })
        });
        let archive = transfer(&mut stdout, to, see_archive);
        if archive.is_err() {
            is_wanted.store(false, Ordering::Relaxed);
            // It may wait for a reader of its output.
            let _ended = worker.0.kill();
        }
        (feeder.join().unwrap_or(Err(Stopped::Write)), archive)
    });
    Ok(Expanded { blob, archive, complaint: worker.end()? })
}

/// The first bytes, and the whole again.
fn begin(mut blob: Blob) -> io::Result<(Compression, Blob)> {
    let mut begin = Vec::new();
    (&mut blob).take(4).read_to_end(&mut begin)?;
    Ok((Compression::of(&begin), Box::new(io::Cursor::new(begin).chain(blob))))
}

fn check_blob(promised: &Promised<'_>, (found, bytes): &(Digest, u64)) -> Result<(), ImportError> {
    let Some((expected, size)) = promised.blob else { return Ok(()) };
    let what = format!("the blob {expected}");
    if *bytes != size {
        return Err(ImportError::Size { what, found: *bytes, expected: size });
    }
    if found != expected {
        return Err(ImportError::Digest { what, found: found.clone(), expected: expected.clone() });
    }
    Ok(())
}

impl Budget {
    /// What looks at the bytes of archives as they come.
    fn watch(&mut self, store: &Path) -> impl FnMut(usize) -> Result<(), Stopped> {
        let mut since_asked = ASK_AFTER;
        move |length| {
            let length = length as u64;
            self.archives = self.archives.checked_sub(length).ok_or(Stopped::Limit(ImportError::TooLarge { max: self.max }))?;
            since_asked += length;
            if since_asked >= ASK_AFTER {
                since_asked = 0;
                room(store).map_err(Stopped::Limit)?;
            }
            Ok(())
        }
    }
}

/// What may be made on the store's file system beside what stays free.
fn room(store: &Path) -> Result<Limits, ImportError> {
    let found = statvfs(store).attempt("look at the file system of", store)?;
    room_of(&found).ok_or_else(|| ImportError::NoRoom(store.to_owned()))
}

fn room_of(found: &StatVfs) -> Option<Limits> {
    let bytes = found.f_bavail.saturating_mul(found.f_frsize).checked_sub(KEPT_FREE);
    // One that makes inodes as they are needed, such as btrfs, says that it has none at all.
    let entries = if found.f_files == 0 { Some(u64::MAX) } else { found.f_favail.checked_sub(KEPT_INODES) };
    bytes.zip(entries).map(|(bytes, entries)| Limits { bytes, entries })
}

impl Limits {
    /// The same, but no more than the store's file system has room for.
    ///
    /// # Errors
    /// It has none, or does not say it.
    pub fn within_room(self, store: &Path) -> Result<Self, ImportError> {
        let room = room(store)?;
        Ok(Limits { bytes: self.bytes.min(room.bytes), entries: self.entries.min(room.entries) })
    }
}

/// Writes the archive of a layer, and compares both digests. False: its reader has ended early.
fn feed(
    blob: Blob,
    promised: &Promised<'_>,
    to: &mut dyn Write,
    budget: &mut Budget,
    store: &Path,
    progress: &Progress,
) -> Result<bool, ImportError> {
    let what = promised.blob.map_or_else(|| format!("the layer {}", promised.diff_id), |(digest, _)| format!("the blob {digest}"));
    let (compression, mut blob) = begin(blob).attempt("read", &what)?;
    let mut watch = budget.watch(store);
    let archive = if compression == Compression::None {
        let archive = transfer(&mut blob, to, |length| {
            progress.add(length);
            watch(length)
        });
        if let Ok(read) = &archive {
            check_blob(promised, read)?;
        }
        archive
    } else {
        let expanded = through_decompressor(blob, to, watch, progress)?;
        match (&expanded.archive, expanded.blob) {
            (Ok(_), Ok(read)) => check_blob(promised, &read)?,
            (_, Err(Stopped::Read(error))) => return Err(error).attempt("read", what),
            _ => {}
        }
        if let (Ok(_), Some(why)) = (&expanded.archive, expanded.complaint) {
            return Err(ImportError::Decompress { layer: promised.diff_id.clone(), why });
        }
        expanded.archive
    };
    match archive {
        Ok((found, _)) if found != *promised.diff_id => {
            Err(ImportError::Digest { what: format!("the uncompressed archive of {what}"), found, expected: promised.diff_id.clone() })
        }
        Ok(_) => Ok(true),
        Err(Stopped::Write) => Ok(false),
        Err(Stopped::Limit(error)) => Err(error),
        Err(Stopped::Read(error)) => Err(error).attempt("read", what),
    }
}

/// Unpacks a layer into an empty directory.
///
/// # Errors
/// It is not what was promised, holds what no layer may, is too large, takes too long, or the kernel refuses.
pub fn unpack(
    blob: Blob,
    promised: &Promised<'_>,
    target: &Target<'_>,
    budget: &mut Budget,
    progress: &Progress,
) -> Result<Unpacked, ImportError> {
    let failed = |why| ImportError::Unpack { layer: promised.diff_id.clone(), why };
    let mut arguments: Vec<OsString> = vec![UNPACK.into(), target.store.into(), target.tree.into()];
    let limits = budget.trees.within_room(target.store)?;
    arguments.extend([limits.bytes, limits.entries].map(|limit| limit.to_string().into()));
    arguments.extend(target.below.iter().map(OsString::from));
    let mut worker = Worker::start(&arguments)?;
    let mut stdin = worker.0.stdin.take().ok_or_else(|| failed("it has no stdin".into()))?;
    let is_whole = feed(blob, promised, &mut stdin, budget, target.store, progress)?;
    drop(stdin);
    if let Some(why) = worker.end()? {
        return Err(failed(why));
    }
    if !is_whole {
        return Err(failed("the process has ended before the archive".into()));
    }
    let mut said = Vec::new();
    if let Some(stdout) = worker.0.stdout.take() {
        stdout.take(MAX_ANSWER_LEN).read_to_end(&mut said).attempt("read", "the answer of the unpacking process")?;
    }
    let done: Unpacked = serde_json::from_slice(&said).map_err(|error| failed(format!("its answer is none: {error}")))?;
    let too_much = || failed("its answer has more than it may make".into());
    budget.trees.bytes = budget.trees.bytes.checked_sub(done.bytes).ok_or_else(too_much)?;
    budget.trees.entries = budget.trees.entries.checked_sub(done.entries).ok_or_else(too_much)?;
    opaque::mark(&target.store.join(target.tree), promised.diff_id)?;
    Ok(done)
}

/// Decompresses a whole archive into a file. None: it is not compressed.
///
/// # Errors
/// It cannot be decompressed, or is too large.
pub fn expand(
    file: &File,
    into: impl FnOnce() -> Result<File, ImportError>,
    budget: Budget,
    store: &Path,
) -> Result<Option<File>, ImportError> {
    let what = "the archive";
    let length = file.metadata().attempt("look at", what)?.len();
    let blob = Section::new(Arc::new(file.try_clone().attempt("open", what)?), 0, length);
    let (compression, blob) = begin(Box::new(blob)).attempt("read", what)?;
    if compression == Compression::None {
        return Ok(None);
    }
    let (progress, mut budget, mut into) = (Progress::new(length), budget, into()?);
    progress.says("decompress".into());
    let expanded = through_decompressor(blob, &mut into, budget.watch(store), &progress)?;
    match (expanded.archive, expanded.blob, expanded.complaint) {
        (Err(Stopped::Limit(error)), ..) => Err(error),
        (Err(Stopped::Write), ..) => Err(io::Error::other("it refuses more bytes")).attempt("write to", store),
        (Err(Stopped::Read(error)), ..) | (_, Err(Stopped::Read(error)), _) => Err(error).attempt("read", what),
        (.., Some(why)) => Err(io::Error::other(why)).attempt("decompress", what),
        _ => Ok(Some(into)),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::*;

    #[test]
    fn cpu_time_of_every_process_counts_and_the_last_second_is_the_end() {
        let before = children_cpu_time().unwrap();
        let script = "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done";
        assert!(Command::new("sh").args(["-c", script]).status().unwrap().success());
        assert!(children_cpu_time().unwrap() - before > 10_000);
        assert_eq!([cpu_left_after(0), cpu_left_after(1)], [Some(CPU_SECONDS), Some(CPU_SECONDS - 1)], "the control");
        let used = |seconds: u64| cpu_left_after(seconds * 1_000_000);
        assert_eq!([used(CPU_SECONDS - 1), used(CPU_SECONDS), used(CPU_SECONDS + 60)], [Some(1), None, None]);
    }

    #[test]
    fn bytes_and_inodes_stay_free() {
        let mut found = statvfs("/").unwrap();
        (found.f_frsize, found.f_bavail) = (4096, (KEPT_FREE >> 12) + 2);
        (found.f_files, found.f_favail) = (100_000, KEPT_INODES + 3);
        let room = |found: &StatVfs| room_of(found).map(|room| (room.bytes, room.entries));
        assert_eq!(room(&found), Some((8192, 3)));
        let few_inodes = StatVfs { f_favail: KEPT_INODES - 1, ..found };
        assert_eq!(room(&few_inodes), None);
        assert_eq!(room(&StatVfs { f_bavail: 0, ..found }), None);
        assert_eq!(room(&StatVfs { f_files: 0, ..few_inodes }), Some((8192, u64::MAX)), "without a number of inodes");
    }
}
