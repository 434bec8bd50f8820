//! Runs as the registry knows them: noted, lost, listed and ended.
//!
//! Each run is noted in its record before it is launched. The sweep of a later start finds the
//! note where the launcher was killed, and writes down that the run was lost; a run whose end
//! already stands in the log is not lost. The note holds the `id`
//! of a request, and the hash and the beginning of its code, as a record of the log does.
//!
//! Root sees the runs of every user whose registry has its usual place, a caller of sudo its own
//! through root, an ordinary user its own. Only a process that holds the lock of a run's record
//! gets a signal.
//!
//! An ordinary user's records say what that user wants them to. Root's own registry is believed
//! first; where several users note one run, each of their launchers is ended.

use std::{
    collections::{HashMap, HashSet},
    io,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use rustix::{
    io::Errno,
    process::{Signal, pidfd_send_signal},
};
use serde::{Deserialize, Serialize};
use stockade_audit::{Actor, Code, Place, PolicyRef};
use stockade_launcher::{
    registry::{LiveRun, NotedRun, Record, Registry},
    signals::{CancelWord, cancel},
};
use stockade_policy::model::AuditMode;
use stockade_protocol::Verdict;

use crate::{
    Refusal, RefusalCause,
    audit::{self, LostRun},
    caller::{self, Identity},
    facts,
};

/// How long a run may take to end.
const END_TIMEOUT: Duration = Duration::from_secs(10);
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// How long a launcher is waited for before it is told once more.
const TELL_INTERVAL: Duration = Duration::from_millis(500);
/// How long it is waited for before it is told by SIGTERM.
const WORD_TIMEOUT: Duration = Duration::from_secs(5);
/// How many records of one user may note the same run, which one does where nothing is made up.
const MAX_RECORDS_OF_RUN: usize = 8;
/// How many runs wait for room in the log where it is not required: each takes up a place in the
/// registry.
const MAX_WITHOUT_ROOM: usize = 256;
/// Hexadecimal digits of a run's number.
const NUMBER_LEN: usize = 16;

/// What was used to ask for a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EntryPoint {
    /// `stockade exec`.
    Exec,
    /// `stockade run`.
    Run,
    /// `stockade bwrap`.
    Bwrap,
    /// A shim.
    Shim,
    /// `stockade session`, also below `stockade mcp`.
    Session,
    /// A socket.
    Socket,
    /// `stockade serve`.
    Serve,
    /// `stockade doctor`.
    Doctor,
    /// `stockade prove`.
    Prove,
    /// `stockade runtimes`.
    Runtimes,
}

impl EntryPoint {
    /// The word for it.
    pub fn name(self) -> &'static str {
        match self {
            EntryPoint::Exec => "exec",
            EntryPoint::Run => "run",
            EntryPoint::Bwrap => "bwrap",
            EntryPoint::Shim => "shim",
            EntryPoint::Session => "session",
            EntryPoint::Socket => "socket",
            EntryPoint::Serve => "serve",
            EntryPoint::Doctor => "doctor",
            EntryPoint::Prove => "prove",
            EntryPoint::Runtimes => "runtimes",
        }
    }

    /// Whether its runs are made to examine the host, and no user asked for them.
    pub fn examines(self) -> bool {
        matches!(self, EntryPoint::Doctor | EntryPoint::Prove | EntryPoint::Runtimes)
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
    #[serde(default)]
    pub alerts: Vec<String>,
    /// Peers that the caller has allowed, and how many of them are left out.
    #[serde(default)]
    pub allowed_by_caller: (Vec<String>, u64),
    /// Directories of the host that it may write, and how many of them are left out.
    #[serde(default)]
    pub writable: (Vec<String>, u64),
    pub mode: AuditMode,
    /// The log's directory; none where it is not known.
    pub log: Option<PathBuf>,
}

impl RunNote {
    /// A note whose run has a number: an ordinary user can write anything into a record.
    fn parse(text: &str) -> Option<Self> {
        let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        let is_number = |run: &str| run.len() == NUMBER_LEN && run.bytes().all(is_digit);
        serde_json::from_str::<RunNote>(text).ok().filter(|note| is_number(&note.run))
    }

    pub(crate) fn write(&self, record: &mut Record) -> Result<(), Refusal> {
        // It always has a JSON form: its path is text or was left out.
        Ok(record.note_run(&serde_json::to_string(self).unwrap_or_default())?)
    }
}

/// Notes where the record of a run's end will stand in the log.
pub(crate) fn note_end(record: &mut Record, place: &Place) -> Result<(), Refusal> {
    Ok(record.note_end(&serde_json::to_string(place).unwrap_or_default())?)
}

/// Removes what killed launchers of this user have left, in each place where they may have noted
/// it, and writes their runs down as lost. What cannot be cleared away stays for the next start; so
/// does a lost run that its policy requires to be written down, or for which the log has no room.
pub(crate) fn sweep() -> Result<(), Refusal> {
    let identity = caller::identify(None)?;
    let own = rustix::process::geteuid().as_raw();
    let mut swept = Ok(());
    for directory in facts::registries(&identity, &mut Vec::new()) {
        let Some(registry) = Registry::existing(&directory) else { continue };
        let trusted = Registry::open(registry.directory(), own);
        let mut without_room = 0;
        let mut account = |noted: NotedRun, record: &mut Record| account(&noted, identity.on_behalf, record, &mut without_room);
        let one = trusted.and_then(|registry| registry.sweep(&mut account));
        // What is wrong with one place keeps no other.
        swept = swept.and(one.map(drop));
    }
    Ok(swept?)
}

/// Whether a run that was found is accounted for. `without_room`: runs before it that wait for room
/// in the log, which is asked for once.
fn account(noted: &NotedRun, on_behalf: bool, record: &mut Record, without_room: &mut usize) -> bool {
    // What another version has noted, or nothing that can be read, says nothing to write down.
    let Ok(note) = serde_json::from_str::<RunNote>(&noted.run) else { return true };
    let end = noted.end.as_deref().and_then(|end| serde_json::from_str::<Place>(end).ok());
    let lost = if *without_room == 0 { audit::write_lost(&note, end.as_ref(), on_behalf, record) } else { LostRun::NoRoom };
    if lost == LostRun::NoRoom {
        *without_room += 1;
    }
    match lost {
        LostRun::Settled => true,
        LostRun::NoRoom => note.mode != AuditMode::Required && *without_room > MAX_WITHOUT_ROOM,
        LostRun::Waits => false,
    }
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

const FULL_QUEUE: &str = "; if its queue of signals is full (SigQ in /proc/PID/status), it cannot be told which run to end: end the whole session (kill PID), and start the next with room for signals (ulimit -i)";

/// What a launcher is told to end a run by.
#[derive(Clone, Copy)]
enum EndSignal {
    /// A signal with the run's word, which ends this run alone. The kernel drops the word where the
    /// launcher's queue of signals is full.
    Word,
    /// SIGTERM, which needs no place in that queue and ends the launcher.
    Terminate,
}

/// Why a run is not ended.
#[derive(Debug, thiserror::Error)]
enum RunsError {
    #[error("no run {0} is alive here, or not for this user to see; `stockade ps` lists those that are")]
    NoSuchRun(String),
    #[error("run {run} belongs to uid {owner}, not to uid {uid}")]
    NotYours { run: String, owner: u32, uid: u32 },
    #[error(
        "no process of uid {owner} that is to be seen here holds the lock of {}, the record of run {run}; its launcher may be in a PID namespace beside this one: call kill from that one or from one above it", record.display()
    )]
    Unknown { run: String, owner: u32, record: PathBuf },
    #[error("cannot look for the launcher of run {run}: /proc: {error}")]
    NoProc { run: String, error: io::Error },
    #[error("cannot signal the launcher of run {run}, a process of uid {owner}: {errno}")]
    Signal { run: String, owner: u32, errno: Errno },
    #[error("run {run} has not ended within {} s: its launcher, a process of uid {owner} that holds the lock of {}, does not act{}", END_TIMEOUT.as_secs(), record.display(), if *of_session { FULL_QUEUE } else { "" })]
    Stuck { run: String, owner: u32, record: PathBuf, of_session: bool },
    #[error("whether run {run} is alive is not known, since not every record can be read: {problem}")]
    Unread { run: String, problem: String },
}

impl RefusalCause for RunsError {
    fn verdict_and_reason(&self) -> (Verdict, &'static str) {
        match self {
            RunsError::NoSuchRun(_) => (Verdict::BadRequest, "no_such_run"),
            RunsError::NotYours { .. } => (Verdict::BadRequest, "not_your_run"),
            RunsError::Unknown { .. } => (Verdict::SandboxError, "launcher_unknown"),
            RunsError::NoProc { .. } => (Verdict::SandboxError, "no_proc"),
            RunsError::Unread { .. } => (Verdict::SandboxError, "registry_unreadable"),
            RunsError::Signal { .. } => (Verdict::SandboxError, "launcher_unreachable"),
            RunsError::Stuck { .. } => (Verdict::SandboxError, "run_not_ended"),
        }
    }
}

/// The runs of a host, and what could not be read of them.
#[derive(Debug)]
pub struct RunList {
    /// Those that this user may know of, the oldest first.
    pub runs: Vec<RunningRun>,
    /// Why some may be missing.
    pub problems: Vec<String>,
    /// What users have noted that is not true. They decide how much there is of it.
    pub untrue: Vec<String>,
}

/// A run whose launcher lives, and its note.
struct FoundRun {
    live: LiveRun,
    note: RunNote,
    /// Who asked for it: as the note says, where that is this launcher's own.
    uid: u32,
}

impl FoundRun {
    /// Closes its record.
    fn describe(self) -> RunningRun {
        let RunNote { run, who, policy, id, begun, via, command, .. } = self.note;
        RunningRun { run, policy: policy.name, policy_sha256: policy.sha256, uid: self.uid, pid: who.pid, since: begun, via, command, id }
    }

    /// Tells its launcher to end it.
    fn end(&self, by: EndSignal) -> Result<(), RunsError> {
        let (run, owner) = (self.note.run.clone(), self.live.owner);
        let launcher = match self.live.launcher() {
            Ok(launcher) if launcher.is_empty() && self.live.is_alive() => {
                return Err(RunsError::Unknown { run, owner, record: self.live.path().to_path_buf() });
            }
            Ok(launcher) => launcher,
            Err(error) => return Err(RunsError::NoProc { run, error }),
        };
        // A note without a number is no run.
        let Some(word) = CancelWord::of(&run) else { return Err(RunsError::NoSuchRun(run)) };
        for process in launcher {
            // One that is stopped acts on nothing else.
            let end = match by {
                EndSignal::Word => cancel(&process, word),
                EndSignal::Terminate => pidfd_send_signal(&process, Signal::TERM),
            };
            for told in [pidfd_send_signal(&process, Signal::CONT), end] {
                match told {
                    Ok(()) | Err(Errno::SRCH) => {}
                    Err(errno) => return Err(RunsError::Signal { run, owner, errno }),
                }
            }
        }
        Ok(())
    }

    fn wait_for_end(&self, until: Instant) -> Result<(), RunsError> {
        let of_session = self.note.via == EntryPoint::Session;
        let mut again = Instant::now() + TELL_INTERVAL;
        // Once: another would end the launcher before it has printed the result.
        let mut terminate = (!of_session).then(|| Instant::now() + WORD_TIMEOUT);
        while self.live.is_alive() {
            // The kernel keeps one signal of a kind, and another's may have been the first.
            if Instant::now() >= again {
                self.end(EndSignal::Word)?;
                again = Instant::now() + TELL_INTERVAL;
            }
            if terminate.take_if(|at| Instant::now() >= *at).is_some() {
                self.end(EndSignal::Terminate)?;
            }
            if Instant::now() >= until {
                let record = self.live.path().to_path_buf();
                return Err(RunsError::Stuck { run: self.note.run.clone(), owner: self.live.owner, record, of_session });
            }
            thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }
}

/// Shows each run that this user may know of. Returns what cannot be read. Each has its record
/// open: users decide how many there are.
fn each(identity: &Identity, see: &mut dyn FnMut(FoundRun)) -> Vec<String> {
    let mut problems = Vec::new();
    let own = rustix::process::geteuid().as_raw();
    for directory in facts::registries(identity, &mut problems) {
        each_in(&directory, own, &mut problems, see);
    }
    if identity.privileged && !identity.on_behalf {
        for (directory, owner) in facts::registries_of_others(&mut problems) {
            each_in(&directory, owner, &mut problems, see);
        }
    }
    problems
}

fn each_in(directory: &Path, owner: u32, problems: &mut Vec<String>, see: &mut dyn FnMut(FoundRun)) {
    let Some(registry) = Registry::existing(directory) else { return };
    let runs = match registry.live_runs() {
        Ok(runs) => runs,
        Err(error) => return problems.push(error.to_string()),
    };
    for live in runs {
        match live {
            Ok(live) if live.owner == owner => {
                let Some(note) = RunNote::parse(&live.noted.run) else { continue };
                // Only root acts for others.
                let uid = if owner == 0 { note.who.uid } else { owner };
                see(FoundRun { live, note, uid });
            }
            Ok(_) => {}
            Err(error) => problems.push(error.to_string()),
        }
    }
}

/// Lists the runs on this host that this user may know of, the oldest first. What an ordinary
/// user's record says of a run that root's registry has is left out.
///
/// # Errors
/// It is not known who asks.
pub fn list() -> Result<RunList, Refusal> {
    let identity = caller::identify(None)?;
    let (mut roots, mut others) = (Vec::new(), Vec::new());
    let problems = each(&identity, &mut |run| {
        let is_theirs = !identity.on_behalf || run.uid == identity.caller.uid;
        let kept = if run.live.owner == 0 { &mut roots } else { &mut others };
        kept.extend(is_theirs.then(|| run.describe()));
    });
    let known: HashSet<String> = roots.iter().map(|run| run.run.clone()).collect();
    let (made_up, others): (Vec<RunningRun>, Vec<RunningRun>) = others.into_iter().partition(|run| known.contains(&run.run));
    let mut noted: HashMap<&str, Vec<u32>> = HashMap::new();
    for run in &others {
        noted.entry(&run.run).or_default().push(run.uid);
    }
    let doubled = noted.iter().filter(|(_, users)| users.len() > 1);
    let doubled =
        doubled.map(|(run, users)| format!("run {run} is noted more than once, by the uids {users:?}: one at most tells the truth"));
    let made_up = made_up.iter().map(|run| format!("uid {} has noted run {}, which is in root's registry: left out", run.uid, run.run));
    let untrue = doubled.chain(made_up).collect();
    let mut runs = roots;
    runs.extend(others);
    runs.sort_by(|one, other| one.since.cmp(&other.since));
    Ok(RunList { runs, problems, untrue })
}

/// Ends a run as `cancelled`, and waits until nothing of it is left. Where several users have
/// noted it, all of theirs: one of them tells the truth.
///
/// # Errors
/// There is none, it is another user's, or it does not end.
pub fn kill(run: &str) -> Result<(), Refusal> {
    let identity = caller::identify(None)?;
    let mut found: Vec<FoundRun> = Vec::new();
    let mut left_out = false;
    let mut problems = each(&identity, &mut |seen| {
        if seen.note.run == run {
            let of_user = found.iter().filter(|other| other.live.owner == seen.live.owner).count();
            if of_user < MAX_RECORDS_OF_RUN { found.push(seen) } else { left_out = true }
        }
    });
    if left_out {
        problems.push(format!("one user notes this run in more than {MAX_RECORDS_OF_RUN} records"));
    }
    // Ordinary users have no say in what root's registry knows.
    if found.iter().any(|found| found.live.owner == 0) {
        found.retain(|found| found.live.owner == 0);
        problems.clear();
    }
    if let Some(another) = found.iter().find(|found| identity.on_behalf && found.uid != identity.caller.uid) {
        return Err(RunsError::NotYours { run: run.to_owned(), owner: another.uid, uid: identity.caller.uid }.into());
    }
    if found.is_empty() && problems.is_empty() {
        return Err(RunsError::NoSuchRun(run.to_owned()).into());
    }
    let told: Vec<Result<(), RunsError>> = found.iter().map(|found| found.end(EndSignal::Word)).collect();
    let until = Instant::now() + END_TIMEOUT;
    // A launcher that cannot be told is not waited for; all the others are.
    let ended = found.iter().zip(told).map(|(found, told)| told.and_then(|()| found.wait_for_end(until)));
    let failures: Vec<RunsError> = ended.filter_map(Result::err).collect();
    if let Some(failure) = failures.into_iter().next() {
        return Err(failure.into());
    }
    match problems.into_iter().next() {
        Some(problem) => Err(RunsError::Unread { run: run.to_owned(), problem }.into()),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use serde_json::json;

    use super::*;

    #[test]
    fn a_note_without_a_runs_number_is_none() {
        let note = |run: &str| {
            let who = json!({"uid": 1000, "gid": 1000, "on_behalf": false, "launcher_uid": 1000, "pid": 7});
            let policy = json!({"name": "default", "origin": "shipped", "sha256": ""});
            let note = json!({"run": run, "who": who, "policy": policy, "id": null, "begun": "", "via": "exec", "command": "", "mode": "off", "log": null});
            RunNote::parse(&note.to_string()).is_some()
        };
        assert!(note("4f1c2a9be07d3365"));
        for other in ["../../etc", "", "4F1C2A9BE07D3365", "4f1c2a9be07d336", "4f1c2a9be07d33655"] {
            assert!(!note(other), "{other}");
        }
    }
}
