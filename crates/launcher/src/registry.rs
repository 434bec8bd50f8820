//! Which runs are alive, and what a killed launcher left behind.
//!
//! Each run has a file in the registry's directory, locked for as long as its launcher
//! lives. What the kernel will not remove by itself (cgroup directories, the program's
//! file in a host scratch, the directory of a proof) is noted there first. A file that can
//! be locked belongs to no live run: the next start removes what it lists, and then the file.
//! The file's number also makes the uid of a root run unique. What was never noted is not found
//! here.
//!
//! A record also holds one line about the run itself, and one about where its end is written
//! down. Both are `engine`'s texts. The run's own launcher drops them with the record; a sweep
//! removes them only after its caller has accounted for the run.

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
    fd::OwnedFd,
    fs::{FlockOperation, flock},
    io::Errno,
    process::{Pid, PidfdFlags, pidfd_open},
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
/// Begins the line about the run itself.
const RUN: &[u8] = b"run";
/// Begins the line about where its end is written down.
const END: &[u8] = b"end";
/// A record's text is shorter: a dozen paths and two lines of JSON.
const MAX_RECORD_LEN: usize = 128 << 10;
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
    /// It stays for the next start: what it lists could not be removed or written down just now.
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

    /// The registry at `directory`, to read it; none where there is no such directory. It may be
    /// anybody's.
    pub fn existing(directory: &Path) -> Option<Self> {
        directory.is_dir().then(|| Registry { directory: directory.to_path_buf() })
    }

    /// Where it is.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Removes what killed launchers left behind. Returns how many records it cleared. `account`
    /// is told of each run that a record names, and may note there where it has written down the
    /// run's end; where it returns false, the record stays. No other sweep has the same record at
    /// the same time.
    ///
    /// # Errors
    /// The directory cannot be read. A leftover that cannot be removed stays for the
    /// next start.
    pub fn sweep(&self, account: &mut dyn FnMut(NotedRun, &mut Record) -> bool) -> Result<usize, LaunchError> {
        let mut cleared = 0;
        let until = Instant::now() + SWEEP_TIMEOUT;
        for path in self.paths()? {
            if let Some(mut record) = lock_existing(&path) {
                let is_accounted_for = record.noted_run().is_none_or(|run| account(run, &mut record));
                let is_clear = record.remove_leftovers(until) && is_accounted_for && record.empty();
                record.at_drop = if is_clear { AtDrop::Remove } else { AtDrop::Keep };
                cleared += usize::from(is_clear);
            }
        }
        Ok(cleared)
    }

    /// The records' paths: there are no more than runs may be alive, whatever else lies there.
    fn paths(&self) -> Result<Vec<PathBuf>, LaunchError> {
        let failed = failed("read the registry", &self.directory);
        let mut paths = Vec::new();
        for entry in std::fs::read_dir(&self.directory).map_err(&failed)? {
            let path = entry.map_err(&failed)?.path();
            paths.extend(slot_of(&path).map(|_| path));
        }
        Ok(paths)
    }

    /// The runs whose launchers live, one after the other: each has its record open, so a
    /// registry with many records must not be kept whole. An error is about one record that
    /// cannot be read.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn live_runs(&self) -> Result<impl Iterator<Item = Result<LiveRun, LaunchError>>, LaunchError> {
        Ok(self.paths()?.into_iter().filter_map(|path| LiveRun::read(&path).map_err(failed("read", &path)).transpose()))
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
            // A run that a killed launcher has left in it is for the sweep to account for.
            let is_free = !record.has_leftovers() || (record.noted_run().is_none() && record.clear(Instant::now()));
            if !is_free {
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

fn slot_of(path: &Path) -> Option<u32> {
    let number = path.file_name()?.to_str()?.strip_prefix("run-")?;
    // No two names are one slot.
    number.parse().ok().filter(|slot: &u32| *slot < SLOTS && slot.to_string() == number)
}

fn lock_existing(path: &Path) -> Option<Record> {
    let slot = slot_of(path)?;
    let file = OpenOptions::new().read(true).write(true).custom_flags(nofollow()).open(path).ok()?;
    flock(&file, FlockOperation::NonBlockingLockExclusive).ok()?;
    Record::standing(file, path.to_path_buf(), slot).ok()?
}

/// What a record says of its run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotedRun {
    /// The run.
    pub run: String,
    /// Where its end is written down, if the writer lived long enough.
    pub end: Option<String>,
}

impl NotedRun {
    fn parse(text: &[u8]) -> Option<Self> {
        // A line without its end was never whole.
        let whole = &text[..text.iter().rposition(|&byte| byte == b'\n')?];
        let line = |kind: &[u8]| {
            let mut lines = whole.split(|&byte| byte == b'\n').filter_map(|line| line.strip_prefix(kind)?.strip_prefix(b" "));
            lines.next_back().map(|line| String::from_utf8_lossy(line).into_owned())
        };
        Some(NotedRun { run: line(RUN)?, end: line(END) })
    }
}

/// A run whose launcher lives, or did when it was read.
#[derive(Debug)]
pub struct LiveRun {
    /// What its record says of it.
    pub noted: NotedRun,
    /// The uid of the record's file: of the launcher.
    pub owner: u32,
    file: File,
    path: PathBuf,
}

impl LiveRun {
    /// The file may be somebody else's: it can be anything, and can change at any time. None
    /// where it is no record of a live run.
    fn read(path: &Path) -> std::io::Result<Option<Self>> {
        let flags = nofollow() | nix::libc::O_NONBLOCK;
        let file = match OpenOptions::new().read(true).custom_flags(flags).open(path) {
            Ok(file) => file,
            // It has ended meanwhile, or is a link or a socket, which no launcher makes.
            Err(error) => return none_where(error, &[Errno::NOENT, Errno::LOOP, Errno::NXIO]),
        };
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return Ok(None);
        }
        let mut live = LiveRun { noted: NotedRun { run: String::new(), end: None }, owner: metadata.uid(), file, path: path.to_path_buf() };
        let Some(noted) = live.noted_run() else { return Ok(None) };
        live.noted = noted;
        Ok(live.is_locked().then_some(live))
    }

    fn noted_run(&self) -> Option<NotedRun> {
        let mut text = vec![0; MAX_RECORD_LEN];
        let length = rustix::io::pread(&self.file, &mut text, 0).ok()?;
        NotedRun::parse(&text[..length])
    }

    /// Whether its launcher lives: the kernel drops the lock with it.
    fn is_locked(&self) -> bool {
        match flock(&self.file, FlockOperation::NonBlockingLockShared) {
            Err(errno) => errno == Errno::AGAIN,
            Ok(()) => {
                // The next start may want it.
                let _closing_does_it_too = flock(&self.file, FlockOperation::Unlock);
                false
            }
        }
    }

    /// Whether this run still has its record: its launcher lives, and has not removed what the
    /// run had on the host.
    pub fn is_alive(&self) -> bool {
        let is_linked = self.file.metadata().is_ok_and(|metadata| metadata.nlink() > 0);
        is_linked && self.noted_run().is_some_and(|noted| noted.run == self.noted.run) && self.is_locked()
    }

    /// Its launcher: the processes of the record's owner that hold the record's lock, as the
    /// kernel shows their descriptors in `/proc`. A pid in the record proves nothing: it may be of
    /// another PID namespace, or made up. More than one is a launcher that makes its child just
    /// now. None is found where the run has ended, or from another PID namespace than theirs.
    ///
    /// # Errors
    /// `/proc` cannot be read.
    pub fn launcher(&self) -> std::io::Result<Vec<OwnedFd>> {
        let mut found = Vec::new();
        for entry in std::fs::read_dir("/proc")? {
            let pid = entry?.file_name().to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw);
            let Some(pid) = pid.filter(|pid| self.is_locked_by(*pid)) else { continue };
            // By now another process can have its pid: asked once more, when that is held.
            found.extend(pidfd_open(pid, PidfdFlags::empty()).ok().filter(|_| self.is_locked_by(pid)));
        }
        Ok(found)
    }

    /// Whether a process of the record's owner holds the lock.
    fn is_locked_by(&self, pid: Pid) -> bool {
        let process = PathBuf::from(format!("/proc/{}", pid.as_raw_nonzero()));
        if owner_of(&process) != Some(self.owner) {
            return false;
        }
        let id = |metadata: std::fs::Metadata| (metadata.dev(), metadata.ino());
        let Ok(own) = self.file.metadata().map(id) else { return false };
        let descriptors = std::fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
        let mut of_record = descriptors.filter(|entry| std::fs::metadata(entry.path()).is_ok_and(|found| id(found) == own));
        // The lock belongs to one opening of the file. Who else has opened it only reads.
        of_record.any(|entry| {
            let info = std::fs::read_to_string(process.join("fdinfo").join(entry.file_name()));
            info.is_ok_and(|info| {
                info.lines().any(|line| line.starts_with("lock:") && line.contains(" FLOCK ") && line.contains(" WRITE "))
            })
        })
    }

    /// The record's file.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

fn none_where<T>(error: std::io::Error, expected: &[Errno]) -> std::io::Result<Option<T>> {
    if expected.contains(&errno_of(&error)) { Ok(None) } else { Err(error) }
}

/// The real uid of a process.
fn owner_of(process: &Path) -> Option<u32> {
    let status = std::fs::read_to_string(process.join("status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("Uid:"))?.split_ascii_whitespace().next()?.parse().ok()
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
    fn note(&mut self, kind: &[u8], paths: &[PathBuf]) -> Result<(), LaunchError> {
        let mut lines = Vec::new();
        for path in paths {
            // A newline in a path would make two lines of one.
            if path.as_os_str().as_bytes().contains(&b'\n') {
                return Err(RegistryError::LineBreak(path.clone()).into());
            }
            lines.extend_from_slice(&[kind, b" ", path.as_os_str().as_bytes(), b"\n"].concat());
        }
        let first = paths.first().map_or(Path::new(""), PathBuf::as_path);
        self.append(&lines).map_err(failed("note in the registry", first))
    }

    /// Adds whole lines, or nothing: the beginning of a line would become that of the next.
    fn append(&mut self, lines: &[u8]) -> std::io::Result<()> {
        let length = self.file.metadata()?.len();
        let end = rustix::fs::seek(&self.file, rustix::fs::SeekFrom::Start(length));
        end.map_err(std::io::Error::from).and_then(|_| self.file.write_all(lines)).inspect_err(|_| {
            let _stays_cut_short = self.file.set_len(length);
        })
    }

    /// Notes the run itself; `text` is one line.
    ///
    /// # Errors
    /// The record cannot be written.
    pub fn note_run(&mut self, text: &str) -> Result<(), LaunchError> {
        self.note_text(RUN, text)
    }

    /// Notes where the run's end is about to be written down; `text` is one line.
    ///
    /// # Errors
    /// The record cannot be written.
    pub fn note_end(&mut self, text: &str) -> Result<(), LaunchError> {
        self.note_text(END, text)
    }

    fn note_text(&mut self, kind: &[u8], text: &str) -> Result<(), LaunchError> {
        let line: String = text.chars().map(|c| if c == '\n' { ' ' } else { c }).collect();
        let path = self.path.clone();
        self.append(&[kind, b" ", line.as_bytes(), b"\n"].concat()).map_err(failed("note in the registry", &path))
    }

    /// Notes cgroup directories that are about to be made.
    ///
    /// # Errors
    /// The record cannot be written.
    pub fn note_cgroups(&mut self, paths: impl IntoIterator<Item = PathBuf>) -> Result<(), LaunchError> {
        self.note(b"cgroup", &paths.into_iter().collect::<Vec<_>>())
    }

    /// Notes the program's file in a host scratch.
    ///
    /// # Errors
    /// The record cannot be written.
    pub fn note_program(&mut self, path: &Path) -> Result<(), LaunchError> {
        self.note(b"program", &[path.to_path_buf()])
    }

    /// Notes the program's file under a name that the request has chosen, by the inode that was
    /// made. Where the file system tells no birth time nothing is noted: an inode number is used
    /// again.
    ///
    /// # Errors
    /// The record cannot be written, or the file not looked at.
    pub(crate) fn note_written(&mut self, path: &Path, file: &rustix::fd::OwnedFd) -> Result<(), LaunchError> {
        let identity = leftover::identity(file, c"").map_err(|errno| failed("look at", path)(errno.into()))?;
        identity.map_or(Ok(()), |identity| self.note(format!("written {identity}").as_bytes(), &[path.to_path_buf()]))
    }

    /// Notes the directory of a proof, which goes with everything in it.
    ///
    /// # Errors
    /// The record cannot be written.
    pub fn note_proof(&mut self, path: &Path) -> Result<(), LaunchError> {
        self.note(b"proof", &[path.to_path_buf()])
    }

    /// Forgets what was noted: all of it is gone, but the run itself where it is kept.
    pub fn settle(&mut self) {
        if self.at_drop == AtDrop::Clear {
            self.at_drop = AtDrop::Remove;
        }
    }

    /// Keeps the note of the run for a sweep, as if this launcher had been killed.
    pub fn keep(&mut self) {
        self.at_drop = AtDrop::Keep;
    }

    fn has_leftovers(&self) -> bool {
        self.file.metadata().is_ok_and(|metadata| metadata.len() > 0)
    }

    fn text(&self) -> std::io::Result<Vec<u8>> {
        let mut text = Vec::new();
        rustix::fs::seek(&self.file, rustix::fs::SeekFrom::Start(0))?;
        (&self.file).read_to_end(&mut text)?;
        Ok(text)
    }

    fn noted_run(&self) -> Option<NotedRun> {
        NotedRun::parse(&self.text().ok()?)
    }

    /// Removes what is listed, and waits for it until then; true if nothing of it is left.
    fn remove_leftovers(&self, until: Instant) -> bool {
        let Ok(text) = self.text() else { return false };
        // What cannot be removed keeps nothing else.
        let lines = text.split(|&byte| byte == b'\n').filter(|line| !line.is_empty());
        lines.filter(|line| !leftover::remove(line, until)).count() == 0
    }

    fn empty(&self) -> bool {
        self.file.set_len(0).is_ok()
    }

    fn clear(&self, until: Instant) -> bool {
        self.remove_leftovers(until) && self.empty()
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

    fn registry(name: &str) -> Registry {
        let directory = std::env::temp_dir().join(format!("stockade-registry-{name}-{}", std::process::id()));
        Registry::open(&directory, rustix::process::geteuid().as_raw()).unwrap()
    }

    fn live_runs(registry: &Registry) -> Vec<LiveRun> {
        registry.live_runs().unwrap().map(Result::unwrap).collect()
    }

    #[test]
    fn a_run_of_a_killed_launcher_stays_noted_until_it_is_accounted_for() {
        let registry = registry("lost");
        let mut record = registry.claim().unwrap();
        record.note_run("one").unwrap();
        record.keep();
        record.settle();
        drop(record);
        // Its place is not taken by the next claim, which would forget the run.
        let next = registry.claim().unwrap();
        let mut told = Vec::new();
        let mut sweep = |answer: bool| {
            registry
                .sweep(&mut |noted, record| {
                    told.push(noted);
                    record.note_end("there").unwrap();
                    answer
                })
                .unwrap()
        };
        assert_eq!((sweep(false), sweep(true), sweep(true)), (0, 1, 0));
        let noted = |end: Option<&str>| NotedRun { run: String::from("one"), end: end.map(String::from) };
        assert_eq!(told, [noted(None), noted(Some("there"))]);
        drop(next);
        std::fs::remove_dir(registry.directory()).unwrap();
    }

    #[test]
    fn the_runs_own_end_removes_its_record() {
        let registry = registry("own");
        let mut record = registry.claim().unwrap();
        record.note_run("one").unwrap();
        drop(record);
        assert_eq!(registry.sweep(&mut |_, _| panic!("no run is left")).unwrap(), 0);
        std::fs::remove_dir(registry.directory()).unwrap();
    }

    #[test]
    fn only_a_run_whose_record_is_locked_is_alive() {
        let registry = registry("alive");
        let mut record = registry.claim().unwrap();
        assert!(live_runs(&registry).is_empty(), "it holds no run yet");
        record.note_run("one\ntwo").unwrap();
        let live = live_runs(&registry).pop().unwrap();
        assert_eq!((live.noted.run.as_str(), live.is_alive()), ("one two", true));
        assert_eq!(live.launcher().unwrap().len(), 1, "this process");
        record.keep();
        drop(record);
        assert!(!live.is_alive() && live_runs(&registry).is_empty());
        assert!(live.launcher().unwrap().is_empty(), "it has it open, and no lock");
        registry.sweep(&mut |_, _| true).unwrap();
        std::fs::remove_dir(registry.directory()).unwrap();
    }

    #[test]
    fn what_no_launcher_makes_is_no_record() {
        let registry = registry("names");
        let mut record = registry.claim().unwrap();
        record.note_run("one").unwrap();
        let slot = record.slot();
        let others = [format!("run-0{slot}"), format!("run-+{slot}"), format!("run-{SLOTS}"), String::from("run-"), String::from("other")];
        for name in &others {
            std::fs::hard_link(&record.path, registry.directory().join(name)).unwrap();
        }
        let link = registry.directory().join(format!("run-{}", (slot + 1) % SLOTS));
        std::os::unix::fs::symlink(&record.path, &link).unwrap();
        assert_eq!(live_runs(&registry).len(), 1);
        drop(record);
        std::fs::remove_dir_all(registry.directory()).unwrap();
    }
}
