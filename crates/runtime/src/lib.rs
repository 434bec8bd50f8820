//! What one request goes through: admission, launch, result.
//!
//! Every door (the command line, the socket, later sessions, MCP) comes through here,
//! so that one set of rules decides who may do what. Nothing here makes a system call
//! that confines anything (that is `launcher`), and nothing is printed.
#![forbid(unsafe_code)]

pub mod admit;
mod ahead;
pub mod approval;
pub mod aside;
pub mod audit;
pub mod caller;
pub mod companion;
pub mod doctor;
pub mod facts;
pub mod interpreter;
pub mod inventory;
mod policies;
mod report;
pub mod screen;
pub mod session;
mod spare;
mod trusted;

use std::{
    cell::{Cell, OnceCell},
    mem::ManuallyDrop,
    path::PathBuf,
};

use stockade_launcher::{Client, LaunchError, Outcome, Relay, Remains, Streams, What};
use stockade_policy::{facts::Caller, model::Policy, plan::Plan};
use stockade_protocol::{Report, Request, Verdict, screen::Action, step::Step};

use admit::Begun;
pub use admit::{Admission, Ask, Image, LARGEST_REQUEST, Purpose};
pub use ahead::Ahead;
use approval::{ApprovedBy, Pass, Presented};
use audit::{Subject, Trail};
pub use policies::{Loaded, list_policies, load_policy, lookup_context};

/// What is fixed beforehand, whatever a request says.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// A policy's name or file; none: `default`.
    pub policy: Option<String>,
    /// The directory that a request's scratch must be or lie below.
    pub scratch: Option<PathBuf>,
    /// Interpreters in place of the policy's, by runtime.
    pub interpreters: Vec<(String, PathBuf)>,
    /// Files of the caller's, beside the policy and this program, that say what is run.
    pub trusted: Vec<PathBuf>,
    /// Who asks, where the kernel has named somebody else than who started this process.
    pub peer: Option<Caller>,
    /// Who may approve what waits.
    pub approved_by: ApprovedBy,
}

/// Why a request is not run.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    /// `bad_request` or `sandbox_error`.
    pub verdict: Verdict,
    /// A stable identifier.
    pub reason: String,
    /// What, where, why and how to mend it.
    pub message: String,
    /// The errno, where a system call failed at the program's execve.
    pub exec_errno: Option<i32>,
}

impl Refusal {
    /// The caller must mend the request.
    pub fn bad_request(reason: &str, message: impl Into<String>) -> Self {
        Refusal { verdict: Verdict::BadRequest, reason: reason.to_owned(), message: message.into(), exec_errno: None }
    }

    /// The host or the policy must be mended.
    pub fn sandbox_error(reason: &str, message: impl Into<String>) -> Self {
        Refusal { verdict: Verdict::SandboxError, reason: reason.to_owned(), message: message.into(), exec_errno: None }
    }

    /// The result that says so.
    pub fn report(&self) -> Report {
        Report::refused(self.verdict, &self.reason, self.message.clone())
    }
}

impl From<LaunchError> for Refusal {
    fn from(error: LaunchError) -> Self {
        let callers_fault = matches!(error.what, What::Step(Step::WriteFile));
        let no_room = [rustix::io::Errno::NOSPC, rustix::io::Errno::DQUOT].map(|errno| Some(errno.raw_os_error())).contains(&error.errno);
        let mut refusal = if error.what == What::Step(Step::WriteProgram) && no_room {
            Refusal::sandbox_error("scratch_full", error.message)
        } else if callers_fault {
            Refusal::bad_request("files_not_writable", error.message)
        } else {
            Refusal::sandbox_error(error.what.reason(), error.message)
        };
        if error.what == What::Step(Step::ExecPayload) {
            refusal.exec_errno = error.errno;
            refusal.reason = String::from("program_not_started");
        }
        refusal
    }
}

/// Runs one JSON request. Always gives a result: a refusal is one too.
///
/// A process that runs one request ends after it: its policy is not freed.
pub fn exec(request: &[u8], options: &Options) -> Report {
    exec_for(request, options, None)
}

/// The same, for as long as its client waits if there is one.
pub fn exec_for(request: &[u8], options: &Options, client: Option<&mut dyn Client>) -> Report {
    let ahead = Ahead::begin(options.peer.as_ref());
    let request = admit::parse_request(request);
    let loaded = ManuallyDrop::new(load_policy(options));
    match &request {
        Ok(request) => answer(request, Ask::Request(request), loaded.as_ref(), options, client, ahead),
        Err(refusal) => {
            let policy = loaded.as_ref().ok().map(|loaded| &loaded.policy);
            Trail::new(Subject::Nothing, policy, options).end(refusal.report())
        }
    }
}

/// The result of a request, which `ask` asks for.
fn answer(
    request: &Request,
    ask: Ask<'_>,
    loaded: Result<&Loaded, &Refusal>,
    options: &Options,
    client: Option<&mut dyn Client>,
    ahead: Ahead,
) -> Report {
    let trail = Trail::new(Subject::Request(request), loaded.ok().map(|loaded| &loaded.policy), options);
    // Dropped before the trail, as that lets signals through; what takes its time to go does so
    // while the result is worded and written down.
    let mut remains = None;
    let run = || -> Result<Report, Refusal> {
        let loaded = loaded.map_err(Refusal::clone)?;
        let policy = &loaded.policy;
        let privileged = caller::identify(options.peer.as_ref())?.privileged;
        let begin = move || screen::Pending::of_request(request, policy, options.scratch.as_deref(), privileged);
        let screening = match &ahead.spare {
            // It need not wait for the screener's start, which can as well be beside the code.
            Some(_) if Screened::may_be_late(policy) => Screened::Late(OnceCell::new(), Box::new(begin)),
            _ => Screened::new(begin(), policy),
        };
        if let Some(refused) = screening.refusal(ask, policy, options) {
            return Ok(refused);
        }
        if let Screened::Known(known) = &screening
            && known.severest() == Action::Approve
            && request.approve.is_none()
        {
            let report = approval::ask(ask, request, loaded, options, known)?;
            return Ok(known.clone().onto(report));
        }
        let pass = match request.approve.as_deref().map(|token| approval::present(token, ask, request, loaded, options)).transpose()? {
            Some(Presented::Waits(report)) => return Ok(screening.finish().onto(*report)),
            Some(Presented::Good(pass)) => Some(pass),
            None => None,
        };
        let beside = || screening.begin();
        let wanted = Wanted { ask, loaded, options, trail: Some(&trail), pass: pass.as_ref(), beside: Some(&beside) };
        let ran = attempt(wanted, Streams::Capture, client, ahead);
        let report = ran.map_or_else(
            |refusal| ask.worded(refusal).report(),
            |Ran { outcome, plan, remains: some }| {
                remains = Some(some);
                report::from_outcome(outcome, &plan, policy, request.encoding)
            },
        );
        Ok(screening.finish().onto(report))
    };
    let report = run().unwrap_or_else(|refusal| ask.worded(refusal).report());
    report::Echo::of(request).onto(trail.end(report))
}

/// What screening found, where it can stop the run; where it can only be told, it may go on
/// beside the run.
enum Screened<'p> {
    Known(screen::Screening),
    Pending(screen::Pending<'p>),
    /// It is begun when the launcher has nothing else to do.
    Late(OnceCell<screen::Pending<'p>>, Box<dyn Fn() -> screen::Pending<'p> + 'p>),
}

impl<'p> Screened<'p> {
    fn new(pending: screen::Pending<'p>, policy: &Policy) -> Self {
        if Screened::may_be_late(policy) { Screened::Pending(pending) } else { Screened::Known(pending.finish()) }
    }

    /// Whether the run need not wait for it. On cgroup v2 no process but the launcher may be
    /// in its cgroup, which hands limits down.
    fn may_be_late(policy: &Policy) -> bool {
        matches!(policy.screen.severest(), Action::Allow | Action::Note) && !facts::is_unified()
    }

    fn begin(&self) {
        if let Screened::Late(pending, begin) = self {
            pending.get_or_init(begin);
        }
    }

    /// The result of code that does not run for what was found in it.
    fn refusal(&self, ask: Ask<'_>, policy: &Policy, options: &Options) -> Option<Report> {
        match self {
            Screened::Known(screening) => screening.refusal(policy, approval::hindrance(ask, policy, options)),
            Screened::Pending(_) | Screened::Late(..) => None,
        }
    }

    fn finish(self) -> screen::Screening {
        match self {
            Screened::Known(screening) => screening,
            Screened::Pending(pending) => pending.finish(),
            Screened::Late(pending, begin) => pending.into_inner().unwrap_or_else(begin).finish(),
        }
    }
}

/// A request that could not even be read is written down too.
pub fn refuse(refusal: &Refusal, options: &Options) -> Report {
    let loaded = load_policy(options).ok();
    Trail::new(Subject::Nothing, loaded.as_ref().map(|loaded| &loaded.policy), options).end(refusal.report())
}

/// What is to be run, and what goes with it.
#[derive(Clone, Copy)]
struct Wanted<'a> {
    ask: Ask<'a>,
    loaded: &'a Loaded,
    options: &'a Options,
    /// Where it is written down.
    trail: Option<&'a Trail<'a>>,
    /// Its approval, where it needs one.
    pass: Option<&'a Pass>,
    /// What is begun beside it.
    beside: Option<&'a dyn Fn()>,
}

/// What came of it.
struct Ran {
    outcome: Outcome,
    plan: Plan,
    remains: Remains,
}

/// Admits and launches. That a scratch can be idmapped is taken for granted, as almost
/// every file system can; where it cannot, the run is planned once more without. Where a
/// sandbox that stood ready turns out not to be fit, it gets another one.
fn attempt(wanted: Wanted<'_>, streams: Streams, mut client: Option<&mut dyn Client>, ahead: Ahead) -> Result<Ran, Refusal> {
    let Wanted { ask, loaded, options, trail, pass, beside } = wanted;
    // Nobody reads the receipt of a command whose report was not asked for.
    let wants_hash = !matches!(streams, Streams::Relay(Relay { keep_errors: false, .. }));
    let noted = Cell::new(false);
    let mut run = |purpose, ahead| -> Result<_, Refusal> {
        let hash = Cell::new(None);
        let (plan, mut inputs, begun) = Admission::new(ask, loaded, options, purpose, ahead)?.into_parts(streams)?;
        // After all that can refuse the run but the log, so that nothing uses a token up in vain.
        if let Some(pass) = pass {
            pass.claim(inputs.scratch.as_ref(), ask)?;
            trail.into_iter().for_each(|trail| trail.approved(pass.approver));
        }
        if let (false, Some(trail)) = (noted.replace(true), trail) {
            trail.begin()?;
        }
        inputs.client = client.as_mut().map(|client| &mut **client as _);
        let sweep = inputs.meanwhile.take();
        inputs.meanwhile = Some(Box::new(|| {
            sweep.into_iter().for_each(|sweep| sweep());
            beside.into_iter().for_each(|begin| begin());
            hash.set(wants_hash.then(|| report::plan_hash(&plan)));
            trail.into_iter().for_each(Trail::prepare);
        }));
        let stood_ready = matches!(begun, Begun::Waiting(_));
        let mut launched = begun.run(&plan, inputs);
        if let Ok((Outcome { receipt: Some(receipt), .. }, _)) = &mut launched {
            receipt.plan_sha256 = hash.take().unwrap_or_default();
        }
        Ok((launched, plan, stood_ready))
    };
    let again = match run(Purpose::Run, ahead)? {
        (Err(error), ..) if error.what == What::Idmap => Purpose::RunAfterRefusedIdmap,
        (Err(error), _, true) if spare::may_be_to_blame(&error) => Purpose::Run,
        (launched, plan, _) => return launched.map(|(outcome, remains)| Ran { outcome, plan, remains }).map_err(Refusal::from),
    };
    let (launched, plan, _) = run(again, Ahead::default())?;
    let (outcome, remains) = launched?;
    Ok(Ran { outcome, plan, remains })
}

/// What came of a command whose streams were relayed.
pub struct CommandResult {
    /// The exit status for the caller.
    pub code: i32,
    /// The result, without streams.
    pub report: Report,
}

/// Runs a command with relayed streams. `wants_report`: the result will be kept. `ahead`:
/// what was begun of it already.
///
/// # Errors
/// It was not started.
pub fn run(command: &[String], options: &Options, wants_report: bool, ahead: Ahead) -> Result<CommandResult, Refusal> {
    let loaded = ManuallyDrop::new(load_policy(options));
    let trail = Trail::new(Subject::Command(command), loaded.as_ref().ok().map(|loaded| &loaded.policy), options);
    let run = || {
        let loaded = loaded.as_ref().map_err(Refusal::clone)?;
        let ask = Ask::Command { command, terminal: stockade_launcher::terminal::is_interactive() };
        let how = Relay { keep_errors: wants_report, ..Relay::default() };
        relay(ask, loaded, options, how, &trail, ahead)
    };
    let came = run();
    end_command(trail, came)
}

/// What came of a command, and what still stands of it.
type Relayed = (Report, Option<Remains>);

/// Runs something whose streams are relayed; the report is without them.
fn relay(ask: Ask<'_>, loaded: &Loaded, options: &Options, how: Relay, trail: &Trail<'_>, ahead: Ahead) -> Result<Relayed, Refusal> {
    approval::check_approvable(ask, &loaded.policy)?;
    let policy = &loaded.policy;
    let screening = Screened::new(screen::Pending::of_command(&ask.words(), policy, options, how.keep_errors)?, policy);
    if let Some(refused) = screening.refusal(ask, policy, options) {
        return Ok((refused, None));
    }
    let wanted = Wanted { ask, loaded, options, trail: Some(trail), pass: None, beside: None };
    let Ran { outcome, plan, remains } = attempt(wanted, Streams::Relay(how), None, ahead)?;
    let message = outcome.message.clone();
    let report = report::from_outcome(outcome, &ManuallyDrop::new(plan), policy, stockade_protocol::Encoding::Text);
    Ok((screening.finish().onto(report::without_streams(report, message)), Some(remains)))
}

/// Writes down what came of a command.
fn end_command(trail: Trail<'_>, came: Result<Relayed, Refusal>) -> Result<CommandResult, Refusal> {
    match came {
        Ok((report, _remains)) => {
            let report = Report { output: None, ..trail.end(report) };
            Ok(CommandResult { code: report.code, report })
        }
        Err(refusal) => {
            trail.end(refusal.report());
            Err(refusal)
        }
    }
}

/// What came of an image's run.
pub struct ImageResult {
    /// What it printed, as far as it was kept.
    pub output: Vec<u8>,
    /// The result.
    pub report: Report,
    /// The plan.
    pub plan: Plan,
}

/// Runs a program of stockade's own under a policy. It is nobody's code, and leaves no
/// record in the audit log.
///
/// # Errors
/// It was not started.
pub fn run_image(image: &Image<'_>, loaded: &Loaded, options: &Options) -> Result<ImageResult, Refusal> {
    let wanted = Wanted { ask: Ask::Image(image), loaded, options, trail: None, pass: None, beside: None };
    let Ran { outcome, plan, remains: _ } = attempt(wanted, Streams::Capture, None, Ahead::default())?;
    let output = outcome.output.bytes.clone();
    let report = report::from_outcome(outcome, &plan, &loaded.policy, stockade_protocol::Encoding::Text);
    Ok(ImageResult { output, report, plan })
}

/// Does something with the rights of whoever asked, where root acts for another.
///
/// # Errors
/// It cannot be known who that is, or the rights cannot be changed.
pub fn with_callers_rights<T>(act: impl FnOnce() -> T) -> Result<T, Refusal> {
    let identity = caller::identify(None)?;
    stockade_launcher::scratch::as_caller(&identity.caller, identity.privileged, act)
        .map_err(|errno| Refusal::sandbox_error("caller_rights", format!("cannot change to the caller's rights: {errno}")))
}

/// The plan of a request or a command, without running it.
///
/// # Errors
/// There is none.
pub fn plan(ask: Ask<'_>, options: &Options) -> Result<Plan, Refusal> {
    let loaded = load_policy(options)?;
    approval::check_approvable(ask, &loaded.policy)?;
    Admission::new(ask, &loaded, options, Purpose::Plan, Ahead::default()).map(|admission| admission.plan)
}
