//! Runs as the registry knows them: noted, lost, listed and ended.
//!
//! Each run is noted in its record before it is launched. The sweep of a later start finds the
//! note where the launcher was killed, and writes down that the run was lost; a run whose end
//! already stands in the log is not lost. The note holds the `id`
//! of a request, and the hash and the beginning of its code, as a record of the log does.
//!
//! Root sees the runs of every user whose registry has its usual place, a caller of sudo its own
//! through root, an ordinary user its own. Only a process that has a run's record open, and whose
//! lock is held, gets a signal.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use rustix::{fd::OwnedFd, io::Errno, process::pidfd_send_signal};
use serde::{Deserialize, Serialize};
use stockade_audit::{Actor, Code, Place, PolicyRef};
use stockade_launcher::{
    registry::{LiveRun, NotedRun, Record, Registry},
    signals::CANCEL,
};
use stockade_policy::model::AuditMode;
use stockade_protocol::Verdict;

use crate::{
    Refusal, RefusalCause, audit,
    caller::{self, Identity},
    facts,
};

/// How long a run may take to end.
const END_TIMEOUT: Duration = Duration::from_secs(10);
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// What was used to ask for a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EntryPoint {
    /// `stockade exec`.
    Exec,
    /// `stockade run`.
    Run,
    /// A shim.
    Shim,
    /// `stockade session`, also below `stockade mcp`.
    Session,
    /// A socket.
    Socket,
}

impl EntryPoint {
    /// The word for it.
    pub fn name(self) -> &'static str {
        match self {
            EntryPoint::Exec => "exec",
            EntryPoint::Run => "run",
            EntryPoint::Shim => "shim",
            EntryPoint::Session => "session",
            EntryPoint::Socket => "socket",
        }
    }
}

/// The line of a run in its record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RunNote {
    pub run: String,
    pub who: Actor,
    pub policy: PolicyRef,
    pub id: Option<String>,
    pub begun: String,
    pub via: EntryPoint,
    /// The beginning of a command; empty for a request.
    pub command: String,
    /// What a record of its loss says of the code; none where nothing is written down.
    pub code: Option<Code>,
    /// The alerts that its loss raises.
    pub alerts: Vec<String>,
    pub mode: AuditMode,
    /// The log's directory; none where it is not known.
    pub log: Option<PathBuf>,
}

impl RunNote {
    pub(crate) fn write(&self, record: &mut Record) -> Result<(), Refusal> {
        // It always has a JSON form: its path is text or was left out.
        Ok(record.note_run(&serde_json::to_string(self).unwrap_or_default())?)
    }
}

/// Notes where the record of a run's end will stand in the log.
pub(crate) fn note_end(record: &mut Record, place: &Place) -> Result<(), Refusal> {
    Ok(record.note_end(&serde_json::to_string(place).unwrap_or_default())?)
}

/// Removes what killed launchers have left, and writes their runs down as lost. What cannot be
/// cleared away, and a lost run that its policy requires to be written down, stays for the next
/// start.
pub(crate) fn sweep(registry: &Registry) -> Result<(), Refusal> {
    let on_behalf = caller::identify(None).is_ok_and(|identity| identity.on_behalf);
    registry.sweep(&mut |noted, record| account(&noted, on_behalf, record))?;
    Ok(())
}

fn account(noted: &NotedRun, on_behalf: bool, record: &mut Record) -> bool {
    // What another version has noted, or nothing that can be read, says nothing to write down.
    let Ok(note) = serde_json::from_str::<RunNote>(&noted.run) else { return true };
    let end = noted.end.as_deref().and_then(|end| serde_json::from_str::<Place>(end).ok());
    audit::write_lost(&note, end.as_ref(), on_behalf, record)
}

/// A run on this host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RunningRun {
    /// The run's own number, as the audit log has it.
    pub run: String,
    /// The policy's name.
    pub policy: String,
    /// Its hash.
    pub policy_sha256: String,
    /// Who asked for it.
    pub uid: u32,
    /// The launcher's process.
    pub pid: u32,
    /// When it was begun, in UTC.
    pub since: String,
    /// What was used to ask for it.
    pub via: EntryPoint,
    /// The beginning of a command; empty for a request.
    pub command: String,
    /// The request's `id`: a claim of the caller.
    pub id: Option<String>,
}

/// Why a run is not ended.
#[derive(Debug, thiserror::Error)]
enum RunsError {
    #[error("no run {0} is alive here, or not for this user to see; `stockade ps` lists those that are")]
    NoSuchRun(String),
    #[error("run {run} belongs to uid {owner}, not to uid {uid}")]
    NotYours { run: String, owner: u32, uid: u32 },
    #[error("run {run} is noted by process {pid}, which is not the launcher that holds its record {}", record.display())]
    Unknown { run: String, pid: u32, record: PathBuf },
    #[error("cannot signal process {pid}, the launcher of run {run}: {errno}")]
    Signal { run: String, pid: u32, errno: Errno },
    #[error("run {run} has not ended within {} s: its launcher, process {pid}, does not act; it may be stopped", END_TIMEOUT.as_secs())]
    Stuck { run: String, pid: u32 },
}

impl RefusalCause for RunsError {
    fn verdict_and_reason(&self) -> (Verdict, &'static str) {
        match self {
            RunsError::NoSuchRun(_) => (Verdict::BadRequest, "no_such_run"),
            RunsError::NotYours { .. } => (Verdict::BadRequest, "not_your_run"),
            RunsError::Unknown { .. } => (Verdict::SandboxError, "launcher_unknown"),
            RunsError::Signal { .. } => (Verdict::SandboxError, "launcher_unreachable"),
            RunsError::Stuck { .. } => (Verdict::SandboxError, "run_not_ended"),
        }
    }
}

/// A run whose launcher lives, and its note.
struct FoundRun {
    live: LiveRun,
    note: RunNote,
    /// Who asked for it: as the note says, where that is this launcher's own.
    uid: u32,
}

impl FoundRun {
    fn describe(self) -> RunningRun {
        let RunNote { run, who, policy, id, begun, via, command, .. } = self.note;
        RunningRun { run, policy: policy.name, policy_sha256: policy.sha256, uid: self.uid, pid: who.pid, since: begun, via, command, id }
    }

    fn launcher(&self) -> Result<OwnedFd, RunsError> {
        let pid = self.note.who.pid;
        let unknown = || RunsError::Unknown { run: self.note.run.clone(), pid, record: self.live.path().to_path_buf() };
        let pidfd = self.live.launcher(pid.cast_signed()).ok_or_else(unknown)?;
        // A record that came out of another PID namespace, or that a user has made up, names any pid.
        if self.live.is_open_in(pid) && owner_of(pid) == Some(self.live.owner) { Ok(pidfd) } else { Err(unknown()) }
    }
}

/// The real uid of a process.
fn owner_of(pid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("Uid:"))?.split_ascii_whitespace().next()?.parse().ok()
}

/// The runs that this user may know of.
fn found(identity: &Identity) -> Result<Vec<FoundRun>, Refusal> {
    let directory = facts::registry_directory(identity);
    let own = rustix::process::geteuid().as_raw();
    let mut all = found_in(&directory, own)?;
    if identity.privileged && !identity.on_behalf {
        for (directory, owner) in registries_of_others() {
            // What cannot be read there is that user's to care for.
            all.extend(found_in(&directory, owner).unwrap_or_default());
        }
    }
    all.sort_by(|one, other| one.note.begun.cmp(&other.note.begun));
    Ok(all)
}

fn found_in(directory: &Path, owner: u32) -> Result<Vec<FoundRun>, Refusal> {
    let parse = |live: LiveRun| {
        let note: RunNote = serde_json::from_str(&live.noted.run).ok().filter(|_| live.owner == owner)?;
        // Only root acts for others.
        let uid = if owner == 0 { note.who.uid } else { owner };
        Some(FoundRun { live, note, uid })
    };
    let Some(registry) = Registry::existing(directory) else { return Ok(Vec::new()) };
    Ok(registry.live_runs()?.into_iter().filter_map(parse).collect())
}

/// The usual places of ordinary users' registries, each with its user.
fn registries_of_others() -> Vec<(PathBuf, u32)> {
    let users = |parent: &str, prefix: &str, below: &str| -> Vec<(PathBuf, u32)> {
        let entries = fs::read_dir(parent).into_iter().flatten().flatten();
        let user = |name: &std::ffi::OsStr| name.to_str()?.strip_prefix(prefix)?.parse::<u32>().ok();
        entries.filter_map(|entry| Some((entry.path().join(below), user(&entry.file_name())?))).filter(|(_, uid)| *uid != 0).collect()
    };
    let mut all = users("/run/user", "", "stockade");
    all.extend(users("/tmp", "stockade-", ""));
    let is_its_users = |(path, uid): &(PathBuf, u32)| fs::symlink_metadata(path).is_ok_and(|found| found.is_dir() && found.uid() == *uid);
    all.retain(is_its_users);
    all
}

/// Lists the runs on this host that this user may know of, the oldest first.
///
/// # Errors
/// It is not known who asks, or the registry cannot be read.
pub fn list() -> Result<Vec<RunningRun>, Refusal> {
    let identity = caller::identify(None)?;
    let is_theirs = |run: &FoundRun| !identity.on_behalf || run.uid == identity.caller.uid;
    Ok(found(&identity)?.into_iter().filter(is_theirs).map(FoundRun::describe).collect())
}

/// Ends a run as `cancelled`, and waits until nothing of it is left.
///
/// # Errors
/// There is none, it is another user's, or it does not end.
pub fn kill(run: &str) -> Result<RunningRun, Refusal> {
    let identity = caller::identify(None)?;
    let found = found(&identity)?.into_iter().find(|found| found.note.run == run);
    let found = found.ok_or_else(|| RunsError::NoSuchRun(run.to_owned()))?;
    if identity.on_behalf && found.uid != identity.caller.uid {
        return Err(RunsError::NotYours { run: run.to_owned(), owner: found.uid, uid: identity.caller.uid }.into());
    }
    let pid = found.note.who.pid;
    let until = Instant::now() + END_TIMEOUT;
    if let Some(launcher) = still_alive(&found, found.launcher())? {
        match pidfd_send_signal(&launcher, CANCEL) {
            Ok(()) | Err(Errno::SRCH) => {}
            Err(errno) => return Err(RunsError::Signal { run: run.to_owned(), pid, errno }.into()),
        }
    }
    while found.live.is_alive() {
        if Instant::now() >= until {
            return Err(RunsError::Stuck { run: run.to_owned(), pid }.into());
        }
        thread::sleep(POLL_INTERVAL);
    }
    Ok(found.describe())
}

/// None where the run has ended meanwhile, as it was to.
fn still_alive(found: &FoundRun, launcher: Result<OwnedFd, RunsError>) -> Result<Option<OwnedFd>, RunsError> {
    match launcher {
        Err(_) if !found.live.is_alive() => Ok(None),
        launcher => launcher.map(Some),
    }
}
