//! What one request goes through: screening, approval, admission, launch, result, record.
//!
//! Every request, from the command line, the socket, a session or a service's worker, comes through here, so
//! that one set of rules decides who may do what. Nothing here makes a system call that confines
//! anything (that is `launcher`), and nothing is printed.
#![forbid(unsafe_code)]

pub mod admit;
pub mod answer;
pub mod approval;
pub mod audit;
pub mod caller;
pub mod companion;
mod compile;
pub mod facts;
pub mod interpreter;
pub mod notice;
pub mod own_program;
mod policies;
mod pool;
mod refusal;
mod report;
pub mod runner;
pub mod runs;
pub mod screen;
pub mod service_key;
pub mod session;
pub mod tempdir;
pub mod template;
mod trusted;

use std::{cell::Cell, ffi::OsString, path::PathBuf, sync::Arc};

use rustix::fd::OwnedFd;
use stockade_launcher::{
    ErrorKind, Memory, OpenedScratch, Outcome, Relay, Streams, Teardown,
    registry::Record,
    scratch::{LockMode, ScratchLock},
};
use stockade_policy::{facts::Caller, model::Policy, plan::Plan, whitelist::Rule};
use stockade_protocol::{NO_TEMPLATE, Report, Request, StartKind, screen::Action};

use admit::RunSandbox;
pub use admit::{Admission, CarriedProgram, Origin, Purpose, RunSettings};
use approval::{ApprovalPass, ApprovedBy, TokenCheck};
use audit::{AuditRecorder, AuditSubject};
use caller::{CallerError, Identity};
use compile::{Compiled, StepRun};
use facts::FileId;
pub use policies::{LoadedPolicy, ancestry, list_policies, load_policy, lookup_context};
use pool::{NotPrestarted, Pool};
pub use refusal::{CancelledBeforeStart, Refusal, RefusalCause};
pub use stockade_protocol::MAX_REQUEST;
// What clients of a run need of the crates below: they link this one alone.
pub use stockade_launcher::{
    Asked, Client, OUTPUT_UNWRITABLE, SocketClient, nonblocking,
    scratch::path::{open_directory, open_file},
    signals,
    terminal::is_interactive,
};
pub use stockade_policy::plan;

/// What is fixed beforehand, whatever a request says.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// A policy's name or file; none: `default`.
    pub policy: Option<String>,
    /// The directory that a request's scratch must be or lie below.
    pub scratch: Option<PathBuf>,
    /// Interpreters in place of the policy's, by runtime.
    pub interpreters: Vec<(String, PathBuf)>,
    /// The image that is the root of requests that name none, of those that the policy lets them name.
    pub image: Option<String>,
    /// Peers that the caller allows beside those of the policy.
    pub allow: Vec<Rule>,
    /// Files of the caller's, beside the policy and this program, that say what is run.
    pub trusted: Vec<PathBuf>,
    /// Who asks, where the kernel has named somebody else than who started this process.
    pub peer: Option<Caller>,
    /// The service's key that asks, whose policies stand in its file: it is granted what its caller would
    /// need grants for, and no scratch.
    pub key: Option<String>,
    /// The place in the registry whose uid all runs have, which then follow one another; none: each has
    /// the uid of its own.
    pub uid_of: Option<Arc<Record>>,
    /// Who may approve what waits.
    pub approved_by: ApprovedBy,
    /// The command that examines the host by these runs; none: a user's.
    pub via: Option<runs::EntryPoint>,
    /// Pidfds: runs end when the first of their processes does. None: they outlive their caller.
    pub ends_with: Arc<[OwnedFd]>,
}

impl Options {
    /// Policy and interpreters as arguments, for another process of this program.
    pub fn policy_arguments(&self) -> Vec<OsString> {
        let policy = self.policy.iter().map(|policy| OsString::from(format!("--policy={policy}")));
        let runtimes = self.interpreters.iter().map(|(name, path)| {
            let mut runtime = OsString::from(format!("--runtime={name}="));
            runtime.push(path);
            runtime
        });
        policy.chain(runtimes).collect()
    }
}

/// Runs one JSON request. Always gives a result: a refusal is one too.
pub fn exec(request: &[u8], options: &Options) -> Report {
    exec_for(request, options, None)
}

/// The same, for as long as its client waits if there is one.
pub fn exec_for(request: &[u8], options: &Options, client: Option<&mut dyn Client>) -> Report {
    let request = admit::parse_request(request);
    let loaded = load_policy(options);
    match &request {
        Ok(request) => answer(request, Origin::Request(request), loaded.as_ref(), options, client, Ahead::default()),
        Err(refusal) => refuse_known(refusal, loaded.as_ref().ok(), options),
    }
}

/// The result of a request, which `origin` asks for.
fn answer(
    request: &Request,
    origin: Origin<'_>,
    loaded: Result<&LoadedPolicy, &Refusal>,
    options: &Options,
    mut client: Option<&mut dyn Client>,
    mut ahead: Ahead<'_>,
) -> Report {
    let is_compiled = loaded.is_ok_and(|loaded| compile::compiled(request, loaded).is_some());
    if is_compiled {
        // What waits for a program is not for a compiler, nor to be there while one runs.
        ahead = Ahead { pool: Pool::never(NotPrestarted::Compiled), beside: None, ..ahead };
    }
    let recorder = AuditRecorder::new(AuditSubject::Request(request), loaded.ok().map(|loaded| &loaded.policy), options);
    // Declared after the recorder, so dropped before it: dropping the recorder unblocks signals.
    // What takes long to end does so while the result is worded and recorded.
    let mut teardown = None;
    let run = || -> Result<Report, Refusal> {
        let loaded = loaded.map_err(Refusal::clone)?;
        let policy = &loaded.policy;
        let privileged = caller::identify(options.peer.as_ref())?.privileged;
        let job = screen::ScreeningJob::of_request(request, policy, options.scratch.as_deref(), privileged, ahead.standing);
        let screening = CodeScreening::new(job, policy);
        if let Some(refused) = screening.refusal(origin, policy, options) {
            return Ok(refused);
        }
        if let CodeScreening::Judged(known) = &screening
            && known.severest() == Action::Approve
            && request.approve.is_none()
        {
            let report = approval::request_approval(origin, request, loaded, options, known)?;
            return Ok(known.clone().onto(report));
        }
        let pass =
            match request.approve.as_deref().map(|token| approval::judge_token(token, origin, request, loaded, options)).transpose()? {
                Some(TokenCheck::Waits(report)) => return Ok(screening.finish().onto(*report)),
                Some(TokenCheck::Good(pass)) => Some(pass),
                None => None,
            };
        let spec = RunSpec { origin, loaded, options, recorder: Some(&recorder), pass: pass.as_deref(), step: None };
        let compiled = is_compiled.then(|| compile::compile(spec, request, &recorder, client.as_mut().map(|client| &mut **client as _)));
        let mut made = match compiled.transpose()? {
            Some(Compiled::Failed(report)) => return Ok(screening.finish().onto(*report)),
            Some(Compiled::Made(made)) => Some(made),
            None => None,
        };
        let locked = made.as_mut().and_then(|made| made.locked.take());
        let of_step = made.as_ref().map(|made| RunSpec { options: &made.options, step: Some(made.step()), ..spec });
        let ran = attempt(of_step.unwrap_or(spec), Streams::Capture, client, Ahead { locked, ..ahead });
        let report = ran.map_or_else(
            |refusal| origin.worded(refusal).report(),
            |RunResult { outcome, plan, teardown: some, locked: _ }| {
                teardown = Some(some);
                allowed_by(options, report::from_outcome(outcome, &plan, policy, request.encoding))
            },
        );
        made.iter().for_each(|made| made.clear(&spec));
        let compile = made.map(|made| Box::new(made.report));
        Ok(screening.finish().onto(Report { compile, ..report }))
    };
    let report = run().unwrap_or_else(|refusal| origin.worded(refusal).report());
    let report = recorder.end_with_record(report, teardown.as_mut().and_then(Teardown::record));
    report::Echo::of(request).onto(report)
}

/// A screening that the run waits for where the policy may stop it, and else runs beside it.
enum CodeScreening<'p> {
    Judged(screen::Screening),
    Running(screen::ScreeningJob<'p>),
}

impl<'p> CodeScreening<'p> {
    /// On cgroup v2 the run always waits: the launcher leaves a cgroup that is to hand limits down, and a
    /// screener that it has started there would stay behind.
    fn new(job: screen::ScreeningJob<'p>, policy: &Policy) -> Self {
        let only_notes = matches!(policy.screen.severest(), Action::Allow | Action::Note);
        if only_notes && !facts::is_unified() { CodeScreening::Running(job) } else { CodeScreening::Judged(job.finish()) }
    }

    /// The result of code that does not run for what was found in it.
    fn refusal(&self, origin: Origin<'_>, policy: &Policy, options: &Options) -> Option<Report> {
        match self {
            CodeScreening::Judged(screening) => screening.refusal(policy, approval::hindrance(origin, policy, options)),
            CodeScreening::Running(_) => None,
        }
    }

    fn finish(self) -> screen::Screening {
        match self {
            CodeScreening::Judged(screening) => screening,
            CodeScreening::Running(job) => job.finish(),
        }
    }
}

/// The result of a request that is refused before it is parsed, or because it cannot be; the audit log has it too.
pub fn refuse(refusal: &Refusal, options: &Options) -> Report {
    refuse_known(refusal, load_policy(options).ok().as_ref(), options)
}

/// The same, where the caller may not use the policy: its file is not read.
pub fn refuse_unread(refusal: &Refusal, options: &Options) -> Report {
    refuse_known(refusal, None, options)
}

/// The same, where the policy was loaded already.
fn refuse_known(refusal: &Refusal, loaded: Option<&LoadedPolicy>, options: &Options) -> Report {
    AuditRecorder::new(AuditSubject::Nothing, loaded.map(|loaded| &loaded.policy), options).end(refusal.report())
}

/// What is to be run, and what goes with it.
#[derive(Clone, Copy)]
struct RunSpec<'a> {
    origin: Origin<'a>,
    loaded: &'a LoadedPolicy,
    options: &'a Options,
    /// Where it is written down.
    recorder: Option<&'a AuditRecorder<'a>>,
    /// Its approval, where it needs one.
    pass: Option<&'a ApprovalPass>,
    /// Which run of a compiled language it is.
    step: Option<StepRun<'a>>,
}

/// What came of it.
struct RunResult {
    outcome: Outcome,
    plan: Plan,
    teardown: Teardown,
    /// Its host scratch, for the run that follows it.
    locked: Option<HeldScratch>,
}

/// A host scratch that is locked, and which directory that is.
struct HeldScratch {
    scratch: FileId,
    _lock: ScratchLock,
}

/// What a session or a worker has ready for a run, and makes ready while that runs.
#[derive(Default)]
struct Ahead<'a> {
    /// It prepares sandboxes, so the receipt says what the run has found.
    prepares: bool,
    pool: Pool,
    /// The screener that stays.
    standing: Option<&'a screen::SessionScreener>,
    /// Prepares the next request's sandbox.
    beside: Option<Box<dyn FnOnce() + 'a>>,
    /// The host scratch, which the run before has locked.
    locked: Option<HeldScratch>,
}

/// Admits and launches. Where a prepared sandbox turns out not to be fit, the run gets another
/// one.
fn attempt(spec: RunSpec<'_>, streams: Streams, mut client: Option<&mut dyn Client>, ahead: Ahead<'_>) -> Result<RunResult, Refusal> {
    let Ahead { prepares, pool, mut beside, standing: _, mut locked } = ahead;
    let RunSpec { origin, loaded, options, recorder, pass, step } = spec;
    // The receipt of a command without `--report` is not printed.
    let wants_hash = !matches!(streams, Streams::Relay(Relay { keep_errors: false, .. }));
    let noted = Cell::new(false);
    let mut run = |pool, failed: Option<NotPrestarted>| -> Result<_, Refusal> {
        let hash = Cell::new(None);
        let admission = Admission::admit(origin, loaded, options, Purpose::Run, step, pool)?;
        let not_prestarted = failed.unwrap_or_else(|| admission.not_prestarted.clone());
        let not_copied = admission.not_copied.clone();
        let (plan, mut inputs, mut sandbox) = admission.into_parts(streams)?;
        if let Some(recorder) = recorder {
            recorder.admitted(&plan);
            recorder.note_start(origin.entry_point(options), sandbox.record(&mut inputs))?;
        }
        // After all that can refuse the run but the log, so that a refused run leaves the token usable.
        if let Some(pass) = pass {
            pass.claim(inputs.scratch.as_ref(), origin, plan.image_root.as_ref())?;
        }
        // After the claim: of many who bring one token, the first is not refused for the others.
        let scratch = inputs.scratch.as_ref().map(facts::scratch_id).transpose()?;
        if locked.as_ref().map(|held| held.scratch) != scratch {
            // At most one: of two the second would be refused for the first.
            locked = None;
            let lock = lock_scratch(&plan, inputs.scratch.as_ref(), pass, options)?;
            locked = lock.zip(scratch).map(|(lock, scratch)| HeldScratch { scratch, _lock: lock });
        }
        let shared = |tree: &OpenedScratch| lock_scratch(&plan, Some(tree), None, options);
        let _tree_locks: Vec<Option<ScratchLock>> = inputs.writable_trees.iter().map(shared).collect::<Result<_, _>>()?;
        if let Some(pass) = pass {
            recorder.into_iter().for_each(|recorder| recorder.approved(pass.approver));
        }
        if let (false, Some(recorder)) = (noted.replace(true), recorder) {
            recorder.begin()?;
        }
        inputs.cancel_word = recorder.and_then(AuditRecorder::cancel_word);
        inputs.callers = &options.ends_with;
        inputs.client = client.as_mut().map(|client| &mut **client as _);
        let sweep = inputs.meanwhile.take();
        inputs.meanwhile = Some(Box::new(|| {
            sweep.into_iter().for_each(|sweep| sweep());
            hash.set(wants_hash.then(|| report::plan_hash(&plan)));
            recorder.into_iter().for_each(AuditRecorder::prepare);
        }));
        inputs.beside = beside.take();
        let was_prepared = matches!(sandbox, RunSandbox::Waiting(_));
        let is_copy = match &sandbox {
            RunSandbox::Waiting(waiting) => waiting.is_restored(),
            RunSandbox::Init(_) => inputs.memory.as_ref().is_some_and(Memory::is_restored),
        };
        let mut launched = sandbox.run(&plan, inputs);
        if let Ok((Outcome { receipt: Some(receipt), .. }, _)) = &mut launched {
            receipt.plan_sha256 = hash.take().unwrap_or_default();
            if is_copy {
                receipt.start = StartKind::Restored;
                receipt.layout = Some("shared");
            } else if receipt.start == StartKind::Prestarted {
                receipt.start_cause = not_copied.map(|cause| cause.to_string());
            } else if prepares {
                receipt.start = if was_prepared { StartKind::Prepared } else { StartKind::Fresh };
                let of_copy = not_copied.filter(|cause| *cause != not_prestarted);
                let causes = std::iter::once(not_prestarted).chain(of_copy);
                receipt.start_cause = Some(causes.map(|cause| cause.to_string()).collect::<Vec<_>>().join("; "));
            } else if let Origin::Request(Request { template: Some(asked), .. }) = origin
                && asked != NO_TEMPLATE
            {
                receipt.start_cause = Some(NotPrestarted::OneRequest.to_string());
            }
        }
        Ok((launched, plan, was_prepared))
    };
    let (launched, plan, _) = match run(pool, None)? {
        // Nothing of the program has run. A template that is tried is refused for it.
        (Err(error), ..) if error.kind() == ErrorKind::Restore && !matches!(origin, Origin::Template(_)) => {
            run(Pool::default(), Some(NotPrestarted::NoCopy(error.to_string())))?
        }
        (Err(error), _, true) if pool::may_be_to_blame(&error) => run(Pool::default(), Some(NotPrestarted::Ended))?,
        ran => ran,
    };
    let (outcome, teardown) = launched?;
    // No process of the code is alive any more.
    Ok(RunResult { outcome, plan, teardown, locked })
}

/// Locks a host scratch that the run may write to, for approved code against all other runs: these
/// could exchange the code, or files of the request, before they are read.
fn lock_scratch(
    plan: &Plan,
    scratch: Option<&OpenedScratch>,
    pass: Option<&ApprovalPass>,
    options: &Options,
) -> Result<Option<ScratchLock>, Refusal> {
    let Some(scratch) = scratch.filter(|_| !plan.scratch.read_only) else { return Ok(None) };
    let mode = if pass.is_some() { LockMode::Exclusive } else { LockMode::Shared };
    let locked = lock_opened(scratch, mode, &caller::identify(options.peer.as_ref())?);
    if let (Err(_), Some(pass)) = (&locked, pass) {
        pass.give_back()?;
    }
    locked.map(Some)
}

/// The same for a scratch that is open, on behalf of its caller.
pub(crate) fn lock_opened(scratch: &OpenedScratch, mode: LockMode, identity: &Identity) -> Result<ScratchLock, Refusal> {
    Ok(scratch.lock(mode, &identity.caller, identity.privileged, &facts::registry(identity)?)?)
}

/// What came of a command whose streams were relayed.
pub struct CommandResult {
    /// The exit status for the caller.
    pub code: i32,
    /// The result, without streams.
    pub report: Report,
}

impl CommandResult {
    /// Of a run whose streams went to the caller.
    fn new(report: Report) -> Self {
        CommandResult { code: report.code, report: Report { output: None, ..report } }
    }
}

/// Runs a command, a script or an interpreter with relayed streams. `wants_report`: the result
/// will be kept.
///
/// # Errors
/// It was not started.
pub fn run(origin: Origin<'_>, options: &Options, wants_report: bool) -> Result<CommandResult, Refusal> {
    run_for(origin, options, wants_report, None)
}

/// The same, with a client that hears of its beginning.
///
/// # Errors
/// It was not started.
pub fn run_for(
    origin: Origin<'_>,
    options: &Options,
    wants_report: bool,
    client: Option<&mut dyn Client>,
) -> Result<CommandResult, Refusal> {
    let loaded = load_policy(options);
    let words = origin.words();
    let subject = match origin {
        Origin::Script { request, .. } => AuditSubject::Request(request),
        _ => AuditSubject::Command(&words),
    };
    let recorder = AuditRecorder::new(subject, loaded.as_ref().ok().map(|loaded| &loaded.policy), options);
    let run = || {
        let loaded = loaded.as_ref().map_err(Refusal::clone)?;
        let how = Relay { keep_errors: wants_report, as_text: false };
        relay(origin, loaded, options, how, &recorder, client)
    };
    let came = run();
    end_command(recorder, came).map(CommandResult::new)
}

/// What came of a command, and what still stands of it.
type Relayed = (Report, Option<Teardown>);

/// Runs something whose streams are relayed; the report is without them.
fn relay(
    origin: Origin<'_>,
    loaded: &LoadedPolicy,
    options: &Options,
    how: Relay,
    recorder: &AuditRecorder<'_>,
    client: Option<&mut dyn Client>,
) -> Result<Relayed, Refusal> {
    approval::check_approvable(origin, &loaded.policy)?;
    let policy = &loaded.policy;
    let screening = CodeScreening::new(screen::ScreeningJob::of_command(origin, policy, options, how.keep_errors)?, policy);
    if let Some(refused) = screening.refusal(origin, policy, options) {
        return Ok((refused, None));
    }
    let spec = RunSpec { origin, loaded, options, recorder: Some(recorder), pass: None, step: None };
    let mut made = match origin {
        Origin::Script { request, .. } if compile::compiled(request, loaded).is_some() => {
            match compile::compile(spec, request, recorder, None)? {
                Compiled::Failed(report) => return Ok((screening.finish().onto(*report), None)),
                Compiled::Made(made) => Some(made),
            }
        }
        _ => None,
    };
    let locked = made.as_mut().and_then(|made| made.locked.take());
    let of_step = made.as_ref().map(|made| RunSpec { options: &made.options, step: Some(made.step()), ..spec });
    let ahead = Ahead { locked, ..Ahead::default() };
    let RunResult { outcome, plan, teardown, locked: _ } = attempt(of_step.unwrap_or(spec), Streams::Relay(how), client, ahead)?;
    let message = outcome.message.clone();
    let report = allowed_by(options, report::from_outcome(outcome, &plan, policy, stockade_protocol::Encoding::Text));
    let report = Report { compile: made.map(|made| Box::new(made.report)), ..report::without_streams(report, message) };
    Ok((screening.finish().onto(report), Some(teardown)))
}

/// A result that says which peers the caller itself has allowed.
fn allowed_by(options: &Options, mut report: Report) -> Report {
    report.egress.allowed_by_caller = options.allow.iter().map(Rule::to_string).collect();
    report
}

/// Writes down what came of a command.
fn end_command(recorder: AuditRecorder<'_>, came: Result<Relayed, Refusal>) -> Result<Report, Refusal> {
    match came {
        Ok((report, mut teardown)) => Ok(recorder.end_with_record(report, teardown.as_mut().and_then(Teardown::record))),
        Err(refusal) => {
            recorder.end(refusal.report());
            Err(refusal)
        }
    }
}

/// What came of a carried program's run.
pub struct CarriedResult {
    /// What it printed, as far as it was kept.
    pub output: Vec<u8>,
    /// The result.
    pub report: Report,
    /// The plan.
    pub plan: Plan,
}

/// Runs a program that Stockade carries under a policy. It leaves no record in the audit log,
/// because no caller sent it.
///
/// # Errors
/// It was not started.
pub fn run_carried(program: &CarriedProgram<'_>, loaded: &LoadedPolicy, options: &Options) -> Result<CarriedResult, Refusal> {
    let spec = RunSpec { origin: Origin::Carried(program), loaded, options, recorder: None, pass: None, step: None };
    let RunResult { outcome, plan, .. } = attempt(spec, Streams::Capture, None, Ahead::default())?;
    let output = outcome.output.bytes.clone();
    let report = report::from_outcome(outcome, &plan, &loaded.policy, stockade_protocol::Encoding::Text);
    Ok(CarriedResult { output, report, plan })
}

/// Runs a command under a policy, with empty stdin, and keeps what it prints. The audit log has it
/// as any command: its program may be one that the caller has added.
///
/// # Errors
/// It was not started.
pub fn run_captured(command: &[&str], loaded: &LoadedPolicy, options: &Options) -> Result<Report, Refusal> {
    let command: Vec<String> = command.iter().map(|word| String::from(*word)).collect();
    let recorder = AuditRecorder::new(AuditSubject::Command(&command), Some(&loaded.policy), options);
    let origin = Origin::Command { command: &command, settings: RunSettings::NONE, terminal: false, view: None };
    let spec = RunSpec { origin, loaded, options, recorder: Some(&recorder), pass: None, step: None };
    let came = attempt(spec, Streams::Capture, None, Ahead::default()).map(|RunResult { outcome, plan, teardown, locked: _ }| {
        (report::from_outcome(outcome, &plan, &loaded.policy, stockade_protocol::Encoding::Text), Some(teardown))
    });
    end_command(recorder, came)
}

/// Calls `act` with the caller's rights, where root acts for another user.
///
/// # Errors
/// It cannot be known who that is, or the rights cannot be changed.
pub fn with_callers_rights<T>(act: impl FnOnce() -> T) -> Result<T, Refusal> {
    let identity = caller::identify(None)?;
    stockade_launcher::scratch::as_caller(&identity.caller, identity.privileged, act).map_err(|errno| CallerError::Rights(errno).into())
}

/// The plan of a request or a command, without running it.
///
/// # Errors
/// There is none.
pub fn plan(origin: Origin<'_>, options: &Options) -> Result<Plan, Refusal> {
    let loaded = load_policy(options)?;
    approval::check_approvable(origin, &loaded.policy)?;
    Admission::admit(origin, &loaded, options, Purpose::Plan, None, Pool::default()).map(|admission| admission.plan)
}
