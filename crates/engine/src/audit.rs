//! What is written down about one request, and when.
//!
//! A record is made from the result alone and from what was asked; it never holds values of
//! `env`, a request's arguments, files or stdin, or the words of an error, which could quote
//! them. Of `stockade run` it holds the beginning of the command line.
//! Under `mode = "required"` a run has a record on disk before it starts, and its result is
//! withheld where the record of its end cannot be written. What a record looks like and how
//! it is kept is `stockade-audit`'s.

mod content;
mod error;
mod place;

use std::{
    borrow::Cow,
    cell::{Cell, OnceCell},
    time::{Duration, SystemTime},
};

use base64::{Engine, prelude::BASE64_STANDARD};
pub(crate) use content::policy_ref;
use content::{
    MAX_ENTRIES, MAX_TEXT_LEN, call_name, claims, denied, egress, finding, listed, met_module, run_id, verdict_name, who, writable,
};
use error::{RecordError, RecordRefusal};
pub(crate) use place::check_unseen;
pub use place::{directory, own_directory};
use place::{open, open_at};
pub(crate) use stockade_audit::ApprovalRecord;
use stockade_audit::{
    Actor, AnchorSinks, Code, CodeKind, Event, FileAct, Kind, Link, Log, Place, PolicyRef, Preview, RotatedLog, Usage, text,
};
use stockade_launcher::{
    PROGRAM,
    registry::Record,
    signals::{CancelWord, Uninterrupted},
};
use stockade_policy::{
    alert::{Alert, AlertKind, REFUSED},
    model::{Audit, AuditMode, Policy},
    plan::Plan,
};
use stockade_protocol::{AuditRef, Encoding, Report, Request, Verdict};
use stockade_sys::process::{Turns, take_turns_like_others};

use crate::{
    LoadedPolicy, Options, Refusal, admit, approval,
    caller::{self, Identity},
    policies,
    runs::{self, EntryPoint, RunNote},
};

/// Begins the next file of the log of the user who runs this, and removes files whose last record
/// is older than `keep`.
///
/// # Errors
/// It is root's, and a caller of sudo asks for it; or it cannot be done.
pub fn rotate(keep: Option<Duration>) -> Result<RotatedLog, Refusal> {
    let identity = caller::identify(None)?;
    if identity.on_behalf {
        return Err(RecordRefusal::RotateForAnother { uid: identity.caller.uid, remedy: caller::sudo_remedy() }.into());
    }
    let path = directory(&identity).ok_or(RecordRefusal::Rotate(RecordError::Nowhere))?;
    // The end of a killed launcher's run may stand in a file that is removed now.
    runs::sweep()?;
    if !path.exists() {
        return Ok(RotatedLog { appended: None, removed: Vec::new() });
    }
    let rotated = open_at(&path, identity.privileged).and_then(|log| Ok(log.rotate(keep)?)).map_err(RecordRefusal::Rotate)?;
    if let Some(appended) = &rotated.appended {
        let event = Event { run: String::from("-"), who: who(&identity, None), verdict: Some(String::from("rotated")), ..Event::default() };
        let _no_sink_took_it = AnchorSinks::default().head(appended, &event);
    }
    Ok(rotated)
}

/// A proof, as it is written down.
pub struct ProofEntry<'a> {
    /// Its JSON.
    pub json: &'a [u8],
    /// When it was begun, in UTC.
    pub begun: &'a str,
    /// How long it took.
    pub duration_ms: u64,
    /// `held`, `breached` or `not_proven`.
    pub verdict: &'a str,
}

/// Writes a proof down. Returns its record; none where the policy wants none.
pub fn write_proof(policy: &Policy, options: &Options, proof: &ProofEntry<'_>) -> Option<AuditRef> {
    let recorder = AuditRecorder::new(AuditSubject::Nothing, Some(policy), options);
    if !recorder.is_kept() {
        return None;
    }
    let event = Event {
        event: Kind::Proof,
        verdict: Some(proof.verdict.to_owned()),
        begun: Some(proof.begun.to_owned()),
        duration_ms: proof.duration_ms,
        proof_sha256: Some(text::sha256(proof.json)),
        ..recorder.base().clone()
    };
    let failed = |error: RecordError| AuditRef { run: event.run.clone(), failure: Some(error.to_string()), ..AuditRef::default() };
    Some(recorder.write(&event).unwrap_or_else(failed))
}

/// A time as records have it, in UTC.
pub fn utc(at: SystemTime) -> String {
    text::time(at)
}

/// SHA-256 of this program's file; none where it cannot be read.
pub fn program_sha256() -> Option<String> {
    std::fs::read("/proc/self/exe").ok().map(|program| text::sha256(&program))
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
    /// A request's code without its NUL bytes, likewise; none where it has none.
    code_without_nul: OnceCell<Option<Vec<u8>>>,
    subject: AuditSubject<'a>,
    policy: Option<&'a Policy>,
    /// The policy that was asked for.
    requested: String,
    /// The command that examines the host by it, if one does.
    via: Option<EntryPoint>,
    /// The service's key that asks.
    key: Option<String>,
    /// Peers that the caller has allowed, and how many of them are left out.
    allowed: (Vec<String>, u64),
    /// Directories of the host that the run may write, once it is admitted.
    writable: OnceCell<(Vec<String>, u64)>,
    /// Where root acts for another: until the record is written.
    _uninterrupted: Option<Uninterrupted>,
    /// Who has approved the run.
    approver: Cell<Option<u32>>,
    /// The run whose code this one compiles.
    compiles: Option<String>,
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
            // What is no base64 is refused for it.
            AuditSubject::Request(request) => admit::decode(&request.code, "code").unwrap_or_default(),
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
            code_without_nul: OnceCell::new(),
            subject,
            policy,
            requested: text::clip(policies::name(options), MAX_TEXT_LEN),
            via: options.via,
            key: options.key.clone(),
            allowed: listed(options.allow.iter().map(ToString::to_string)),
            writable: OnceCell::new(),
            approver: Cell::new(None),
            compiles: None,
            _uninterrupted: is_for_another.then(Uninterrupted::begin),
        }
    }

    /// The recorder of the run that compiles this one's code, which is a run of its own.
    pub(crate) fn for_compiler(&self, loaded: &'a LoadedPolicy, options: &Options) -> Self {
        AuditRecorder { compiles: Some(self.run()), ..AuditRecorder::new(self.subject, Some(&loaded.policy), options) }
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

    /// What a signal that ends this run carries.
    pub(crate) fn cancel_word(&self) -> Option<CancelWord> {
        CancelWord::of(&self.run())
    }

    fn who(&self) -> Actor {
        self.who.get_or_init(|| self.identity.as_ref().map(|identity| who(identity, self.key.as_deref())).unwrap_or_default()).clone()
    }

    /// Notes which directories of the host the run may write, for its records.
    pub(crate) fn admitted(&self, plan: &Plan) {
        // A second attempt of the same run has the same.
        self.writable.get_or_init(|| listed(writable(plan).into_iter()));
    }

    fn writable(&self) -> (Vec<String>, u64) {
        self.writable.get().cloned().unwrap_or_default()
    }

    /// Notes the run in its place in the registry: what is written down of it should its launcher
    /// be killed, and what `ps` lists.
    ///
    /// # Errors
    /// It cannot be noted, and its loss would not be found.
    pub(crate) fn note_start(&self, via: EntryPoint, record: Option<&mut Record>) -> Result<(), Refusal> {
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
            allowed_by_caller: self.allowed.clone(),
            writable: self.writable(),
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
        listed_alerts(self.audit.alerts.iter().filter(meets).map(ToString::to_string))
    }

    fn meets_code(&self, alert: &Alert) -> bool {
        let meets = |code: &[u8]| code.utf8_chunks().any(|text| alert.meets(text.valid()));
        meets(&self.code) || self.code_without_nul().is_some_and(meets)
    }

    /// As Bash reads it. In a command NUL parts the words.
    fn code_without_nul(&self) -> Option<&[u8]> {
        let has_nul = || matches!(self.subject, AuditSubject::Request(_)) && self.code.contains(&0);
        let without = || has_nul().then(|| self.code.iter().copied().filter(|byte| *byte != 0).collect());
        self.code_without_nul.get_or_init(without).as_deref()
    }

    fn base(&self) -> &Event {
        self.base.get_or_init(|| Event {
            run: self.run(),
            who: self.who(),
            via: self.via.map(EntryPoint::name),
            program: PROGRAM,
            compiles: self.compiles.clone(),
            policy: self.policy.map(policy_ref),
            policy_requested: self.policy.is_none().then(|| self.requested.clone()),
            allowed_by_caller: self.allowed.0.clone(),
            allowed_by_caller_omitted: self.allowed.1,
            code: match self.subject {
                AuditSubject::Nothing => None,
                AuditSubject::Request(_) => Some(self.code(CodeKind::Code)),
                AuditSubject::Command(_) => Some(self.code(CodeKind::Command)),
            },
            ..claims(self.subject)
        })
    }

    fn code(&self, kind: CodeKind) -> Code {
        // What the preview shows, and a whole character more, which the cut may break.
        let most = usize::try_from(self.audit.preview).unwrap_or(0).saturating_add(char::MAX.len_utf8());
        let begin = &self.code[..self.code.len().min(most)];
        let preview = self.preview(&String::from_utf8_lossy(begin), self.code.len() as u64);
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
        let (writable, writable_omitted) = self.writable();
        let event = Event { event: Kind::Begun, approval: self.approval(None), writable, writable_omitted, ..self.base().clone() };
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
        self.end_with_record(report, None)
    }

    /// The same of a run whose place in the registry is `record`: should this launcher be killed
    /// now, the next start looks there for what it has written. Where the log has no room the note
    /// of the run stays there, or code that fills the disk would leave no trace.
    pub(crate) fn end_with_record(&self, report: Report, mut record: Option<&mut Record>) -> Report {
        if !self.is_kept() {
            return report;
        }
        let mut event = self.event(&report);
        event.alerts = self.alerts(&report);
        let run = event.run.clone();
        let written = self.write_noted(&event, record.as_deref_mut());
        if let (Err(error), Some(record)) = (&written, record)
            && error.is_no_room()
        {
            record.keep();
        }
        match written {
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
            // No program runs, so nothing is reached.
            allowed_by_caller: Vec::new(),
            allowed_by_caller_omitted: 0,
            ..self.base().clone()
        };
        match self.write(&event) {
            Err(error) if self.audit.mode == AuditMode::Required => Err(RecordRefusal::Files { policy: self.policy_name(), error }.into()),
            // Under `try` the next result's `audit.failure` tells.
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

    fn write_as(&self, identity: &Identity, event: &Event, mut record: Option<&mut Record>) -> Result<AuditRef, RecordError> {
        let log = open(identity);
        raise_alerts(log.as_ref().ok(), &self.sinks, event);
        let link = append(&log?, &self.sinks, event, self.audit.mode, &mut |place| {
            if let Some(record) = &mut record {
                // Without it, a launcher that is killed right now is taken for one that has written nothing.
                let _lost_once_more = runs::note_end(record, &place);
            }
        })?;
        Ok(AuditRef { run: event.run.clone(), chain: Some(link.chain), seq: Some(link.seq), sha256: Some(link.hash), failure: None })
    }

    fn event(&self, report: &Report) -> Event {
        let refused = is_refused(report);
        let (usage, met) = (&report.usage, report.modules.as_ref());
        let stream = |text, bytes| self.stream(report, text).map(|text| self.preview(&text, bytes));
        let denials = report.denials.iter().filter(|denial| !denial.hint);
        // A receipt without the plan's hash is not recorded.
        let given = report.receipt.as_ref().filter(|receipt| !receipt.plan_sha256.is_empty());
        let receipt = given.and_then(|receipt| serde_json::to_vec(receipt).ok());
        // What is refused had no peer: nothing was reached.
        let (allowed_by_caller, allowed_by_caller_omitted) = if refused { (Vec::new(), 0) } else { self.allowed.clone() };
        let (writable, writable_omitted) = if refused { (Vec::new(), 0) } else { self.writable() };
        Event {
            event: match report.verdict {
                Verdict::ApprovalRequired => Kind::Held,
                _ if refused => Kind::Refused,
                _ => Kind::Run,
            },
            approval: self.approval(Some(report)),
            verdict: Some(verdict_name(report.verdict)),
            reason: report.reason.as_ref().map(|reason| text::clip(reason, MAX_TEXT_LEN)),
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
            allowed_by_caller,
            allowed_by_caller_omitted,
            writable,
            writable_omitted,
            egress: egress(&report.egress, &self.audit.alerts),
            modules_omitted: met.map_or(0, |met| met.omitted + met.seen.len().saturating_sub(MAX_ENTRIES) as u64),
            modules: met.map_or(&[][..], |met| &met.seen).iter().take(MAX_ENTRIES).map(met_module).collect(),
            image: report.receipt.as_ref().and_then(|receipt| receipt.image.clone()),
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
            AlertKind::Verdict => alert.meets(&verdict_name(report.verdict)) || (is_refused(report) && alert.meets(REFUSED)),
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
        let met = self.audit.alerts.iter().filter(meets).map(ToString::to_string);
        // No policy was read that could choose, and it is root's host that is tried.
        let is_unchosen = self.policy.is_none() && is_refused(report) && self.identity.as_ref().is_some_and(|who| who.on_behalf);
        listed_alerts(met.chain(is_unchosen.then(|| format!("verdict:{REFUSED}"))))
    }
}

/// The first of the lines that are met, as a record and a message of the journal have them.
fn listed_alerts(met: impl Iterator<Item = String>) -> Vec<String> {
    met.take(MAX_ENTRIES).map(|alert| text::clip(&alert, MAX_TEXT_LEN)).collect()
}

/// Whether the result says why a run was not begun.
fn is_refused(report: &Report) -> bool {
    matches!(report.verdict, Verdict::BadRequest | Verdict::SandboxError | Verdict::Screened) && !report.started
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

/// Adds a record to a log and sends its anchor. Before, it says where the record will stand.
fn append(log: &Log, sinks: &AnchorSinks, event: &Event, mode: AuditMode, before: &mut dyn FnMut(Place)) -> Result<Link, RecordError> {
    let appended = log.append_at(event, mode == AuditMode::Required, before)?;
    let _no_sink_took_it = sinks.head(&appended, event);
    Ok(appended.link)
}

/// What became of the record of a lost run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LostRun {
    /// It is written, or the policy does without it.
    Settled,
    /// It is tried again.
    Waits,
    /// The log has no room for it.
    NoRoom,
}

/// Writes down that a run was lost, if the run's own end is not in the log.
pub(crate) fn write_lost(note: &RunNote, end: Option<&Place>, on_behalf: bool, record: &mut Record) -> LostRun {
    let is_written = end.is_some_and(|place| place.holds_run(&note.run));
    if note.mode == AuditMode::Off || is_written {
        return LostRun::Settled;
    }
    let event = Event {
        event: Kind::Lost,
        run: note.run.clone(),
        who: note.who.clone(),
        via: note.via.examines().then(|| note.via.name()),
        id: note.id.clone(),
        policy: Some(note.policy.clone()),
        begun: Some(note.begun.clone()),
        code: note.code.clone(),
        alerts: note.alerts.clone(),
        allowed_by_caller: note.allowed_by_caller.0.clone(),
        allowed_by_caller_omitted: note.allowed_by_caller.1,
        writable: note.writable.0.clone(),
        writable_omitted: note.writable.1,
        ..Event::default()
    };
    let sinks = AnchorSinks::default();
    let write = || {
        let path = note.log.as_deref().ok_or(RecordError::Nowhere)?;
        let log = open_at(path, rustix::process::geteuid().is_root());
        raise_alerts(log.as_ref().ok(), &sinks, &event);
        append(&log?, &sinks, &event, note.mode, &mut |place| {
            // While the log is full the place stays the same, and the registry's record must not grow.
            if end != Some(&place) {
                let _lost_once_more = runs::note_end(record, &place);
            }
        })
    };
    let Err(error) = as_others_would(on_behalf, write) else { return LostRun::Settled };
    let _no_sink_took_it = sinks.unrecorded(&event, &error.to_string());
    match note.mode {
        _ if error.is_no_room() => LostRun::NoRoom,
        AuditMode::Required => LostRun::Waits,
        AuditMode::Try | AuditMode::Off => LostRun::Settled,
    }
}

/// What alerts compare in place of the verdict of a run whose launcher was killed.
const LOST: &str = "lost";

/// Who keeps anchors here.
pub fn carrier() -> Option<stockade_audit::AnchorSink> {
    AnchorSinks::default().available()
}
