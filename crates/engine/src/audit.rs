//! What is written down about one request, and when.
//!
//! A record is made from the result alone and from what was asked; it never holds values of
//! `env`, a request's arguments, files or stdin, or the words of an error, which could quote
//! them. Of `stockade run` it holds the beginning of the command line.
//! Under `mode = "required"` a run has a record on disk before it starts, and its result is
//! withheld where the record of its end cannot be written. What a record looks like and how
//! it is kept is `stockade-audit`'s.

use std::{
    borrow::Cow,
    cell::{Cell, OnceCell},
    collections::BTreeMap,
    env,
    fs::DirBuilder,
    io::ErrorKind,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use base64::{Engine, prelude::BASE64_STANDARD};
pub(crate) use stockade_audit::ApprovalRecord;
use stockade_audit::{
    Actor, AnchorSinks, AuditError, Code, CodeKind, DenialSummary, Egress, Event, FileAct, Finding, Kind, Link, Log, ModuleEvent, Peer,
    Place, PolicyRef, Preview, RotatedLog, Usage, text,
};
use stockade_launcher::{registry::Record, signals::Uninterrupted};
use stockade_policy::{
    alert::{Alert, AlertKind},
    model::{Audit, AuditMode, Policy},
};
use stockade_protocol::{
    AuditRef, Denial, EgressDenial, EgressReport, Encoding, Report, Request, Verdict,
    modules::{self, HookRecord},
    screen,
};
use stockade_sys::process::{Turns, take_turns_like_others};

use crate::{
    Options, Refusal, RefusalCause, approval,
    caller::{self, Identity},
    facts::{FileId, HostError, unknown},
    runs::{self, EntryPoint, RunNote},
};

/// Root's log.
const ROOTS_LOG: &str = "/var/log/stockade";
/// The longest text of a record that is no preview.
const MAX_TEXT_LEN: usize = 256;
/// Entries of a list.
const MAX_ENTRIES: usize = 32;

/// The directory of the log of the user who runs this; none: an ordinary user without a home.
pub fn directory(identity: &Identity) -> Option<PathBuf> {
    if identity.privileged {
        return Some(PathBuf::from(ROOTS_LOG));
    }
    let absolute = |name: &str| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state = absolute("XDG_STATE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".local/state")))?;
    Some(state.join("stockade/audit"))
}

/// The log of the user who runs this, to read it.
///
/// # Errors
/// It cannot be known whose.
pub fn own_directory() -> Result<Option<PathBuf>, Refusal> {
    Ok(directory(&caller::identify(None)?))
}

/// Begins the next file of the log of the user who runs this, and removes files whose last record
/// is older than `keep`.
///
/// # Errors
/// It is root's, and a caller of sudo asks for it; or it cannot be done.
pub fn rotate(keep: Option<Duration>) -> Result<RotatedLog, Refusal> {
    let identity = caller::identify(None)?;
    if identity.on_behalf {
        return Err(RecordRefusal::RotateForAnother { uid: identity.caller.uid }.into());
    }
    let path = directory(&identity).ok_or(RecordRefusal::Rotate(RecordError::Nowhere))?;
    // The end of a killed launcher's run may stand in a file that is removed now.
    runs::sweep()?;
    if !path.exists() {
        return Ok(RotatedLog { appended: None, removed: Vec::new() });
    }
    let rotated = open_at(&path, identity.privileged).and_then(|log| Ok(log.rotate(keep)?)).map_err(RecordRefusal::Rotate)?;
    if let Some(appended) = &rotated.appended {
        let event = Event { run: String::from("-"), who: who(&identity), verdict: Some(String::from("rotated")), ..Event::default() };
        let _no_sink_took_it = AnchorSinks::default().head(appended, &event);
    }
    Ok(rotated)
}

fn open(identity: &Identity) -> Result<Log, RecordError> {
    open_at(&directory(identity).ok_or(RecordError::Nowhere)?, identity.privileged)
}

fn open_at(path: &Path, privileged: bool) -> Result<Log, RecordError> {
    let open = |mode| Log::open(path, rustix::process::geteuid().as_raw(), mode);
    if privileged {
        return Ok(open(0o750)?);
    }
    match (open(0o700), path.parent()) {
        (Err(AuditError::Io { source, .. }), Some(parent)) if source.kind() == ErrorKind::NotFound => {
            // What went wrong with it is said by the open after it.
            let _there_or_not = DirBuilder::new().recursive(true).mode(0o700).create(parent);
            Ok(open(0o700)?)
        }
        (opened, _) => Ok(opened?),
    }
}

/// Why something is not written down.
#[derive(Debug, thiserror::Error)]
enum RecordError {
    #[error("neither XDG_STATE_HOME nor HOME says where this user's audit log is; set one of them")]
    Nowhere,
    #[error("it is not known who asks")]
    UnknownCaller,
    #[error(transparent)]
    Log(#[from] AuditError),
}

/// What does not happen, or is not said, for want of its record; or because it would show the
/// log.
#[derive(Debug, thiserror::Error)]
enum RecordRefusal {
    #[error("policy `{policy}` requires an audit log ([audit] mode = \"required\"): {error}")]
    Begin { policy: String, error: RecordError },
    #[error("an approval is written down or not given, and the audit log cannot be written: {0}")]
    Approval(RecordError),
    #[error(
        "the code has run, but its end could not be written to the audit log, which policy `{policy}` requires, so its result is withheld: {error}"
    )]
    End { policy: String, error: RecordError },
    #[error("the audit log cannot be rotated: {0}")]
    Rotate(RecordError),
    #[error(
        "the audit log is root's, and sudo names uid {uid} as the caller, who has no grant for it; have a timer of root's do it, or: sudo env -u SUDO_UID -u SUDO_GID stockade audit rotate"
    )]
    RotateForAnother { uid: u32 },
    #[error("it may have been done, but could not be written to the audit log, which policy `{policy}` requires: {error}")]
    Files { policy: String, error: RecordError },
    #[error(
        "{} would show the audit log {} inside the sandbox; show directories beside it, and not the one that holds it",
        path.display(),
        log.display()
    )]
    Shown { path: PathBuf, log: PathBuf },
}

impl RefusalCause for RecordRefusal {
    fn verdict_and_reason(&self) -> (Verdict, &'static str) {
        let reason = match self {
            RecordRefusal::Begin { error, .. }
            | RecordRefusal::Approval(error)
            | RecordRefusal::Rotate(error)
            | RecordRefusal::End { error, .. }
            | RecordRefusal::Files { error, .. } => match error {
                RecordError::Nowhere | RecordError::UnknownCaller => "audit_nowhere",
                RecordError::Log(error) => error.reason(),
            },
            RecordRefusal::RotateForAnother { .. } => "not_granted",
            RecordRefusal::Shown { .. } => "audit_log_shown",
        };
        (Verdict::SandboxError, reason)
    }
}

/// What was asked.
#[derive(Clone, Copy)]
pub(crate) enum AuditSubject<'a> {
    /// A request that could not be read.
    Nothing,
    /// A request of `exec`.
    Request(&'a Request),
    /// A command of `run`.
    Command(&'a [String]),
}

/// The records of one request.
pub(crate) struct AuditRecorder<'a> {
    audit: Audit,
    identity: Option<Identity>,
    sinks: AnchorSinks,
    /// The run's own number, once it is needed.
    run: OnceCell<String>,
    /// The caller and this launcher, likewise.
    who: OnceCell<Actor>,
    /// What does not change between two records, likewise.
    base: OnceCell<Event>,
    /// The journal knows already that this run is not in the log.
    told: Cell<bool>,
    code: Cow<'a, [u8]>,
    subject: AuditSubject<'a>,
    policy: Option<&'a Policy>,
    /// Where root acts for another: until the record is written.
    _uninterrupted: Option<Uninterrupted>,
    /// Who has approved the run.
    approver: Cell<Option<u32>>,
}

impl<'a> AuditRecorder<'a> {
    /// A recorder; with the default audit mode where the policy could not be read.
    pub(crate) fn new(subject: AuditSubject<'a>, policy: Option<&'a Policy>, options: &Options) -> Self {
        let audit = policy.map(|policy| policy.audit.clone()).unwrap_or_default();
        // Without an identity it is not known whose log to write, nor with what rights. A peer
        // that is not served is known, and stands in the server's own.
        let identity = caller::identify(options.peer.as_ref()).or_else(|refusal| {
            let peer = options.peer.clone().ok_or(refusal)?;
            Ok::<_, Refusal>(Identity { caller: peer, ..caller::identify(None)? })
        });
        let identity = identity.ok();
        let code = match subject {
            AuditSubject::Nothing => Cow::default(),
            AuditSubject::Request(request) => Cow::Borrowed(request.code.as_bytes()),
            AuditSubject::Command(words) => Cow::Owned(words.join("\0").into_bytes()),
        };
        let is_for_another = audit.mode != AuditMode::Off && identity.as_ref().is_some_and(|identity| identity.on_behalf);
        AuditRecorder {
            audit,
            identity,
            sinks: AnchorSinks::default(),
            run: OnceCell::new(),
            who: OnceCell::new(),
            base: OnceCell::new(),
            told: Cell::new(false),
            code,
            subject,
            policy,
            approver: Cell::new(None),
            _uninterrupted: is_for_another.then(Uninterrupted::begin),
        }
    }

    /// Prepares what a record will hold: hashing the code takes its time.
    pub(crate) fn prepare(&self) {
        if self.is_kept() {
            self.base();
        }
    }

    /// Whether anything is written down.
    fn is_kept(&self) -> bool {
        self.audit.mode != AuditMode::Off && self.identity.is_some()
    }

    fn run(&self) -> String {
        self.run.get_or_init(run_id).clone()
    }

    fn who(&self) -> Actor {
        self.who.get_or_init(|| self.identity.as_ref().map(who).unwrap_or_default()).clone()
    }

    /// Notes the run in its place in the registry: what is written down of it should its launcher
    /// be killed, and what `ps` lists.
    ///
    /// # Errors
    /// It cannot be noted, and its loss would not be found.
    pub(crate) fn note(&self, via: EntryPoint, record: Option<&mut Record>) -> Result<(), Refusal> {
        let (Some(record), Some(identity)) = (record, &self.identity) else { return Ok(()) };
        let command = match self.subject {
            AuditSubject::Command(words) => {
                let most = usize::try_from(self.audit.preview).map_or(MAX_TEXT_LEN, |preview| preview.min(MAX_TEXT_LEN));
                text::clip(&words.join(" "), most)
            }
            AuditSubject::Nothing | AuditSubject::Request(_) => String::new(),
        };
        let note = RunNote {
            run: self.run(),
            who: self.who(),
            policy: self.policy.map(policy_ref).unwrap_or_default(),
            id: claims(self.subject).id,
            begun: text::time(SystemTime::now()),
            via,
            command,
            code: if self.is_kept() { self.base().code.clone() } else { None },
            alerts: self.alerts_if_lost(),
            mode: self.audit.mode,
            log: directory(identity).filter(|log| log.to_str().is_some()),
        };
        note.write(record)
    }

    /// The lines of `alerts` that it meets should its launcher be killed: what would then have come
    /// of it is not known.
    fn alerts_if_lost(&self) -> Vec<String> {
        let meets = |alert: &&Alert| match alert.kind {
            AlertKind::Verdict => alert.meets(LOST),
            AlertKind::Code => self.meets_code(alert),
            AlertKind::Reason | AlertKind::Syscall | AlertKind::Egress | AlertKind::Output => false,
        };
        self.audit.alerts.iter().filter(meets).map(ToString::to_string).collect()
    }

    fn meets_code(&self, alert: &Alert) -> bool {
        alert.meets(&String::from_utf8_lossy(&self.code))
    }

    fn base(&self) -> &Event {
        self.base.get_or_init(|| Event {
            run: self.run(),
            who: self.who(),
            policy: self.policy.map(policy_ref),
            code: match self.subject {
                AuditSubject::Nothing => None,
                AuditSubject::Request(_) => Some(self.code(CodeKind::Code)),
                AuditSubject::Command(_) => Some(self.code(CodeKind::Command)),
            },
            ..claims(self.subject)
        })
    }

    fn code(&self, kind: CodeKind) -> Code {
        let preview = self.preview(&String::from_utf8_lossy(&self.code), self.code.len() as u64);
        Code { kind, sha256: text::sha256(&self.code), preview }
    }

    fn preview(&self, text: &str, bytes: u64) -> Preview {
        Preview { bytes, preview: text::clip(text, usize::try_from(self.audit.preview).unwrap_or(0)) }
    }

    /// Where the log is required: a record that the run is about to start, on disk.
    ///
    /// # Errors
    /// There is none; the run must not start.
    pub(crate) fn begin(&self) -> Result<(), Refusal> {
        if self.audit.mode != AuditMode::Required {
            return Ok(());
        }
        let event = Event { event: Kind::Begun, approval: self.approval(None), ..self.base().clone() };
        self.write(&event).map_err(|error| RecordRefusal::Begin { policy: self.policy_name(), error })?;
        Ok(())
    }

    /// Notes that the run has been approved, for the records to come.
    pub(crate) fn approved(&self, approver: u32) {
        self.approver.set(Some(approver));
    }

    /// Writes down that somebody approves what another has asked for.
    ///
    /// # Errors
    /// It is not written down.
    pub(crate) fn approve(&self, policy: PolicyRef, approved: ApprovalRecord) -> Result<(), Refusal> {
        let event = Event { event: Kind::Approved, policy: Some(policy), approval: Some(approved), ..self.base().clone() };
        self.write(&event).map_err(RecordRefusal::Approval)?;
        Ok(())
    }

    /// Of the token that the request brought, or that the result gives.
    fn approval(&self, report: Option<&Report>) -> Option<ApprovalRecord> {
        let given = report.and_then(|report| report.approval.as_ref()).map(|approval| &approval.token);
        let brought = match self.subject {
            AuditSubject::Request(request) => request.approve.as_ref(),
            _ => None,
        };
        let token_sha256 = approval::hash_of_token(given.or(brought)?);
        Some(ApprovalRecord { token_sha256, requester: None, approver: self.approver.get() })
    }

    fn policy_name(&self) -> String {
        self.policy.map_or_else(String::new, |policy| policy.name.clone())
    }

    /// Writes down how it ended, and says so in the result.
    pub(crate) fn end(&self, report: Report) -> Report {
        self.end_of(report, None)
    }

    /// The same of a run whose place in the registry is `record`: should this launcher be killed
    /// now, the next start looks there for what it has written.
    pub(crate) fn end_of(&self, report: Report, record: Option<&mut Record>) -> Report {
        if !self.is_kept() {
            return report;
        }
        let mut event = self.event(&report);
        event.alerts = self.alerts(&report);
        let run = event.run.clone();
        match self.write_noted(&event, record) {
            Ok(audit) => Report { audit: Some(audit), ..report },
            Err(error) if self.audit.mode == AuditMode::Required && report.started => {
                let audit = AuditRef { run, failure: Some(error.to_string()), ..AuditRef::default() };
                let withheld = Refusal::from(RecordRefusal::End { policy: self.policy_name(), error }).report();
                Report { started: true, policy: report.policy, receipt: report.receipt, audit: Some(audit), ..withheld }
            }
            Err(error) => {
                let audit = AuditRef { run, failure: Some(error.to_string()), ..AuditRef::default() };
                Report { audit: Some(audit), ..report }
            }
        }
    }

    /// Writes down what was done with a session's files; `refusal`: why it was not.
    ///
    /// # Errors
    /// There is no record, and the policy requires one: nothing is to be said of the files.
    pub(crate) fn end_files(self, act: FileAct, id: Option<&String>, refusal: Option<&Refusal>) -> Result<(), Refusal> {
        if !self.is_kept() {
            return Ok(());
        }
        let event = Event {
            event: Kind::Files,
            id: id.map(|id| text::clip(id, MAX_TEXT_LEN)),
            files: Some(FileAct { path: text::clip(&act.path, MAX_TEXT_LEN), ..act }),
            verdict: refusal.map(|refusal| verdict_name(refusal.verdict)),
            reason: refusal.map(|refusal| refusal.reason.clone()),
            ..self.base().clone()
        };
        match self.write(&event) {
            Err(error) if self.audit.mode == AuditMode::Required => Err(RecordRefusal::Files { policy: self.policy_name(), error }.into()),
            // What is only tried is missed in the result of the next run.
            _ => Ok(()),
        }
    }

    fn write(&self, event: &Event) -> Result<AuditRef, RecordError> {
        self.write_noted(event, None)
    }

    fn write_noted(&self, event: &Event, record: Option<&mut Record>) -> Result<AuditRef, RecordError> {
        let written = match &self.identity {
            None => Err(RecordError::UnknownCaller),
            Some(identity) => as_others_would(identity.on_behalf, || self.write_as(identity, event, record)),
        };
        // A refusal for want of a record is not in the log either, for the same reason.
        if let (Err(error), false) = (&written, self.told.get()) {
            self.told.set(true);
            let _no_sink_took_it = self.sinks.unrecorded(event, &error.to_string());
        }
        written
    }

    fn write_as(&self, identity: &Identity, event: &Event, record: Option<&mut Record>) -> Result<AuditRef, RecordError> {
        let log = open(identity);
        raise_alerts(log.as_ref().ok(), &self.sinks, event);
        let link = append(&log?, &self.sinks, event, self.audit.mode, record)?;
        Ok(AuditRef { run: event.run.clone(), seq: Some(link.seq), sha256: Some(link.hash), failure: None })
    }

    fn event(&self, report: &Report) -> Event {
        let refused = matches!(report.verdict, Verdict::BadRequest | Verdict::SandboxError | Verdict::Screened) && !report.started;
        let (usage, met) = (&report.usage, report.modules.as_ref());
        let stream = |text, bytes| self.stream(report, text).map(|text| self.preview(&text, bytes));
        let denials = report.denials.iter().filter(|denial| !denial.hint);
        // A receipt without the plan's hash is not recorded.
        let given = report.receipt.as_ref().filter(|receipt| !receipt.plan_sha256.is_empty());
        let receipt = given.and_then(|receipt| serde_json::to_vec(receipt).ok());
        Event {
            event: match report.verdict {
                Verdict::ApprovalRequired => Kind::Held,
                _ if refused => Kind::Refused,
                _ => Kind::Run,
            },
            approval: self.approval(Some(report)),
            verdict: Some(verdict_name(report.verdict)),
            reason: report.reason.clone(),
            status: Some(report.code),
            started: Some(report.started),
            duration_ms: report.duration_ms,
            usage: report.started.then_some(Usage {
                memory_peak_bytes: usage.memory_peak_bytes,
                processes_peak: usage.processes_peak,
                cpu_user_ms: usage.cpu_user_ms,
                cpu_system_ms: usage.cpu_system_ms,
                scratch_bytes: usage.scratch_bytes,
            }),
            findings_omitted: report.findings_omitted + report.findings.len().saturating_sub(MAX_ENTRIES) as u64,
            findings: report.findings.iter().take(MAX_ENTRIES).map(finding).collect(),
            denials_omitted: report.denials_omitted + denials.clone().count().saturating_sub(MAX_ENTRIES) as u64,
            denials: denials.take(MAX_ENTRIES).map(denied).collect(),
            egress: egress(&report.egress, &self.audit.alerts),
            modules_omitted: met.map_or(0, |met| met.omitted + met.seen.len().saturating_sub(MAX_ENTRIES) as u64),
            modules: met.map_or(&[][..], |met| &met.seen).iter().take(MAX_ENTRIES).map(met_module).collect(),
            receipt_sha256: receipt.map(|receipt| text::sha256(&receipt)),
            degraded: report.receipt.as_ref().map(|receipt| receipt.degraded.clone()).unwrap_or_default(),
            output: report.output.as_ref().and_then(|output| stream(&output.0, report.bytes.output)),
            error: stream(&report.error.0, report.bytes.error),
            ..self.base().clone()
        }
    }

    /// What the program printed, as text; none where it did not run, or printed elsewhere.
    /// What Stockade itself says in place of it could quote the request.
    fn stream<'r>(&self, report: &Report, text: &'r str) -> Option<Cow<'r, str>> {
        let AuditSubject::Request(request) = self.subject else { return None };
        if !report.started || report.verdict == Verdict::SandboxError || text.is_empty() {
            return None;
        }
        match request.encoding {
            Encoding::Text => Some(Cow::Borrowed(text)),
            Encoding::Base64 => Some(Cow::Owned(String::from_utf8_lossy(&BASE64_STANDARD.decode(text).ok()?).into_owned())),
        }
    }

    /// The lines of `alerts` that a result meets.
    fn alerts(&self, report: &Report) -> Vec<String> {
        let meets = |alert: &&Alert| match alert.kind {
            AlertKind::Verdict => alert.meets(&verdict_name(report.verdict)),
            AlertKind::Reason => report.reason.as_deref().is_some_and(|reason| alert.meets(reason)),
            AlertKind::Syscall => {
                report.denials.iter().filter(|denial| denial.kind == "syscall").any(|denial| alert.meets(call_name(denial)))
            }
            // The gate compares each refusal; the list may lack some.
            AlertKind::Egress => report.egress.alerts.contains(&alert.to_string()),
            AlertKind::Code => self.meets_code(alert),
            AlertKind::Output => {
                let streams = [report.output.as_ref().map(|output| &output.0), Some(&report.error.0)];
                streams.into_iter().flatten().filter_map(|text| self.stream(report, text)).any(|text| alert.meets(&text))
            }
        };
        self.audit.alerts.iter().filter(meets).map(ToString::to_string).collect()
    }
}

/// Other runs wait for a lock that this process holds: a caller of sudo that runs slowly must not
/// delay them.
fn as_others_would<T>(on_behalf: bool, act: impl FnOnce() -> T) -> T {
    let before = on_behalf.then(take_turns_like_others).flatten();
    let done = act();
    before.iter().for_each(Turns::take);
    done
}

/// Sends the alerts that a record names, as many as the rate lets pass.
fn raise_alerts(log: Option<&Log>, sinks: &AnchorSinks, event: &Event) {
    if event.alerts.is_empty() {
        return;
    }
    // A count that cannot be kept does not silence anybody.
    let admitted = log.map_or(Some(0), |log| stockade_audit::alert::admit(log, event.who.uid, SystemTime::now()).unwrap_or(Some(0)));
    if let Some(held_back) = admitted {
        let _no_sink_took_it = sinks.alert(event, held_back);
    }
}

/// Adds a record to a log and sends the head of its chain. Before, it notes in `record` where it
/// will stand.
fn append(log: &Log, sinks: &AnchorSinks, event: &Event, mode: AuditMode, mut record: Option<&mut Record>) -> Result<Link, RecordError> {
    let appended = log.append_at(event, mode == AuditMode::Required, &mut |place| {
        if let Some(record) = &mut record {
            // Without it, a launcher that is killed right now is taken for one that has written nothing.
            let _lost_once_more = runs::note_end(record, &place);
        }
    })?;
    let _no_sink_took_it = sinks.head(&appended, event);
    Ok(appended.link)
}

/// Writes down that a run's launcher was killed, if the run's own end is not in the log.
/// Returns whether the run is accounted for: only a log that is required is tried again.
pub(crate) fn write_lost(note: &RunNote, end: Option<&Place>, on_behalf: bool, record: &mut Record) -> bool {
    let is_written = end.is_some_and(|place| place.holds_run(&note.run));
    if note.mode == AuditMode::Off || is_written {
        return true;
    }
    let event = Event {
        event: Kind::Lost,
        run: note.run.clone(),
        who: note.who.clone(),
        id: note.id.clone(),
        policy: Some(note.policy.clone()),
        begun: Some(note.begun.clone()),
        code: note.code.clone(),
        alerts: note.alerts.clone(),
        ..Event::default()
    };
    let sinks = AnchorSinks::default();
    let write = || {
        let path = note.log.as_deref().ok_or(RecordError::Nowhere)?;
        let log = open_at(path, rustix::process::geteuid().is_root());
        raise_alerts(log.as_ref().ok(), &sinks, &event);
        append(&log?, &sinks, &event, note.mode, Some(record))
    };
    let Err(error) = as_others_would(on_behalf, write) else { return true };
    let _no_sink_took_it = sinks.unrecorded(&event, &error.to_string());
    note.mode != AuditMode::Required
}

/// What alerts compare in place of the verdict of a run whose launcher was killed.
const LOST: &str = "lost";

fn verdict_name(verdict: Verdict) -> String {
    serde_json::to_value(verdict).ok().and_then(|value| value.as_str().map(String::from)).unwrap_or_default()
}

/// `socket(AF_VSOCK)` is about `socket`.
fn call_name(denial: &Denial) -> &str {
    denial.what.split('(').next().unwrap_or_default()
}

fn finding(found: &screen::Finding) -> Finding {
    Finding {
        rule: found.rule.name().to_owned(),
        action: found.action.name().to_owned(),
        file: found.file.as_ref().map(|file| text::clip(file, MAX_TEXT_LEN)),
        line: found.line,
        column: found.column,
    }
}

fn denied(denial: &Denial) -> DenialSummary {
    let clip = |text: &str| text::clip(text, MAX_TEXT_LEN);
    DenialSummary { kind: clip(denial.kind), what: clip(&denial.what), answer: clip(&denial.answer), count: denial.count }
}

fn met_module(seen: &HookRecord) -> ModuleEvent {
    let action = match seen.action {
        modules::HookAction::Note => "note",
        modules::HookAction::Deny => "deny",
    };
    ModuleEvent { name: text::clip(&seen.name, MAX_TEXT_LEN), action: action.to_owned(), count: seen.count }
}

/// None where nothing was tried. Refusals that an alert names come first.
fn egress(report: &EgressReport, alerts: &[Alert]) -> Option<Egress> {
    let peer = |host: &Option<String>, addr: Option<&String>, port, why: Option<String>, count| Peer {
        peer: text::clip(host.as_ref().or(addr).map_or("", String::as_str), MAX_TEXT_LEN),
        port,
        why,
        count,
    };
    let lists = [report.allowed.len(), report.denied.len(), report.failed.len()];
    if lists == [0; 3] {
        return None;
    }
    let why = |reason| serde_json::to_value(reason).ok().and_then(|value| value.as_str().map(String::from));
    let allowed = report.allowed.iter().map(|flow| peer(&flow.host, Some(&flow.addr), Some(flow.port), None, flow.connections));
    let is_named = |denied: &&EgressDenial| {
        let names = || [&denied.host, &denied.sni].into_iter().flatten().map(String::as_str);
        let address = denied.addr.as_ref().and_then(|address| address.parse().ok());
        alerts.iter().filter(|alert| alert.kind == AlertKind::Egress).any(|alert| alert.meets_peer(names(), address))
    };
    let (named, others): (Vec<_>, Vec<_>) = report.denied.iter().partition(is_named);
    let denied = named
        .into_iter()
        .chain(others)
        .map(|denied| peer(&denied.host, denied.addr.as_ref(), denied.port, why(denied.reason), denied.count));
    let failed = report
        .failed
        .iter()
        .map(|failed| peer(&failed.host, failed.addr.as_ref(), Some(failed.port), Some(failed.error.clone()), failed.count));
    Some(Egress {
        allowed: allowed.take(MAX_ENTRIES).collect(),
        denied: denied.take(MAX_ENTRIES).collect(),
        failed: failed.take(MAX_ENTRIES).collect(),
        bytes_out: report.allowed.iter().map(|flow| flow.bytes_out).sum(),
        bytes_in: report.allowed.iter().map(|flow| flow.bytes_in).sum(),
        omitted: lists.iter().map(|length| length.saturating_sub(MAX_ENTRIES) as u64).sum::<u64>() + report.omitted,
    })
}

pub(crate) fn policy_ref(policy: &Policy) -> PolicyRef {
    PolicyRef { name: policy.name.clone(), origin: policy.origin.to_string(), sha256: policy.sha256.clone() }
}

fn claims(subject: AuditSubject<'_>) -> Event {
    let AuditSubject::Request(request) = subject else { return Event::default() };
    let labels: BTreeMap<String, String> =
        request.labels.iter().take(MAX_ENTRIES).map(|(name, value)| (text::clip(name, 64), text::clip(value, MAX_TEXT_LEN))).collect();
    Event { id: request.id.as_ref().map(|id| text::clip(id, MAX_TEXT_LEN)), labels, ..Event::default() }
}

fn who(identity: &Identity) -> Actor {
    Actor {
        uid: identity.caller.uid,
        gid: identity.caller.gid,
        on_behalf: identity.on_behalf,
        launcher_uid: rustix::process::geteuid().as_raw(),
        pid: std::process::id(),
        unit: crate::facts::small_file("/proc/self/cgroup").ok().as_deref().and_then(unit),
    }
}

/// The innermost systemd unit of a process, from its line in `/proc/self/cgroup`.
fn unit(cgroups: &str) -> Option<String> {
    let of_systemd = |line: &&str| line.starts_with("0::") || line.contains(":name=systemd:");
    let is_unit = |part: &&str| [".service", ".scope"].iter().any(|ending| part.ends_with(ending));
    cgroups.lines().filter(of_systemd).find_map(|line| line.rsplit('/').find(is_unit)).map(|name| text::clip(name, MAX_TEXT_LEN))
}

/// An id that no other run has. It is a name, no secret.
fn run_id() -> String {
    let mut bytes = [0; 8];
    // Without randomness the run is refused elsewhere; time and process tell refusals apart.
    if crate::admit::random_bytes(&mut bytes).is_err() {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
        bytes = (since << 32 | u64::from(std::process::id())).to_ne_bytes();
    }
    format!("{:016x}", u64::from_ne_bytes(bytes))
}

/// Refuses to show the log inside, or a directory above it, by whatever name: the parts of
/// its path are known by device and inode, which links and bind mounts share. `seen`: those
/// of paths that were looked at already.
pub(crate) fn check_unseen<'p>(
    identity: &Identity,
    shown: impl Iterator<Item = &'p Path>,
    seen: &BTreeMap<&Path, Option<FileId>>,
) -> Result<(), Refusal> {
    let Some(log) = directory(identity) else { return Ok(()) };
    let (mut above, mut real) = (Vec::new(), log.clone());
    for path in log.ancestors() {
        if let Some(file_id) = file_id(path)? {
            if above.is_empty() {
                let there = path.canonicalize().map_err(unknown(path))?;
                real = log.strip_prefix(path).map_or(there.clone(), |rest| there.join(rest));
                // Of the real path, where links have led elsewhere.
                for path in there.ancestors().skip(1).filter(|_| there != path) {
                    above.extend(self::file_id(path)?);
                }
            }
            above.push(file_id);
        }
    }
    for path in shown {
        let inside = path.starts_with(&real) || path.starts_with(&log);
        let own_id = || seen.get(path).map_or_else(|| file_id(path), |id| Ok(*id));
        if inside || real.starts_with(path) || own_id()?.is_some_and(|id| above.contains(&id)) {
            return Err(RecordRefusal::Shown { path: path.to_path_buf(), log }.into());
        }
    }
    Ok(())
}

/// None where the path does not exist or the caller cannot look at it.
fn file_id(path: &Path) -> Result<Option<FileId>, HostError> {
    match std::fs::metadata(path) {
        Ok(metadata) => Ok(Some((metadata.dev(), metadata.ino()))),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory | ErrorKind::PermissionDenied) => Ok(None),
        // A circle of links leads nowhere.
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error()) => Ok(None),
        Err(error) => Err(unknown(path)(error)),
    }
}

/// Who keeps the heads of the chain here.
pub fn carrier() -> Option<stockade_audit::AnchorSink> {
    AnchorSinks::default().available()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_unit_is_the_innermost_one() {
        assert_eq!(unit("0::/system.slice/stockade-exec@a-1.service\n").as_deref(), Some("stockade-exec@a-1.service"));
        let session = "12:pids:/x.service\n1:name=systemd:/user.slice/user-1000.slice/user@1000.service/app.slice/run-u3.scope/below\n";
        assert_eq!(unit(session).as_deref(), Some("run-u3.scope"));
        assert_eq!(unit("0::/\n"), None);
        assert_eq!(unit(""), None);
    }
}
