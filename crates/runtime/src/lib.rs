//! What one request goes through: admission, launch, result.
//!
//! Every door (the command line, later the socket, sessions, MCP) comes through here,
//! so that one set of rules decides who may do what. Nothing here makes a system call
//! that confines anything (that is `launcher`), and nothing is printed.
#![forbid(unsafe_code)]

pub mod admit;
pub mod caller;
pub mod doctor;
pub mod facts;
pub mod inventory;
mod policies;
mod report;

use std::path::PathBuf;

use stockade_launcher::{LaunchError, Outcome, Streams, What, launch};
use stockade_policy::plan::Plan;
use stockade_protocol::{Report, Verdict, step::Step};

pub use admit::{Admission, Ask, Image, LARGEST_REQUEST, Purpose};
pub use policies::{Loaded, list_policies, load_policy, lookup_context};

/// What the command line fixes, whatever a request says.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// A policy's name or file; none: `default`.
    pub policy: Option<String>,
    /// The directory that a request's scratch must be or lie below.
    pub scratch: Option<PathBuf>,
    /// Interpreters in place of the policy's, by runtime.
    pub interpreters: Vec<(String, PathBuf)>,
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
        let mut refusal = if callers_fault {
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
pub fn exec(request: &[u8], options: &Options) -> Report {
    let request = match admit::parse_request(request) {
        Ok(request) => request,
        Err(refusal) => return refusal.report(),
    };
    let echo = report::Echo::of(&request);
    let run = || -> Result<Report, Refusal> {
        let loaded = load_policy(options)?;
        let (outcome, plan) = attempt(Ask::Request(&request), &loaded, options, Streams::Capture)?;
        Ok(report::from_outcome(outcome, &plan, &loaded.policy, request.encoding, true))
    };
    match run() {
        Ok(report) => echo.onto(report),
        Err(refusal) => echo.onto(refusal.report()),
    }
}

/// Admits and launches. That a scratch can be idmapped is taken for granted, as almost
/// every file system can; where it cannot, the run is planned once more without.
fn attempt(ask: Ask<'_>, loaded: &Loaded, options: &Options, streams: Streams) -> Result<(Outcome, Plan), Refusal> {
    let run = |purpose| -> Result<_, Refusal> {
        let (plan, inputs, embryo) = Admission::new(ask, loaded, options, purpose)?.into_parts(streams)?;
        Ok((launch(&plan, inputs, embryo), plan))
    };
    match run(Purpose::Run)? {
        (Err(error), _) if error.what == What::Idmap => {
            let (outcome, plan) = run(Purpose::RunAfterRefusedIdmap)?;
            Ok((outcome?, plan))
        }
        (outcome, plan) => Ok((outcome?, plan)),
    }
}

/// What came of a command whose streams were relayed.
pub struct CommandResult {
    /// The exit status for the caller.
    pub code: i32,
    /// The result, without streams.
    pub report: Report,
}

/// Runs a command with relayed streams. `wants_report`: the result will be kept.
///
/// # Errors
/// It was not started.
pub fn run(command: &[String], options: &Options, wants_report: bool) -> Result<CommandResult, Refusal> {
    let loaded = load_policy(options)?;
    let terminal = stockade_launcher::terminal::is_interactive();
    let (outcome, plan) = attempt(Ask::Command { command, terminal }, &loaded, options, Streams::Relay { keep_errors: wants_report })?;
    let (code, message) = (outcome.code, outcome.message.clone());
    let report = report::from_outcome(outcome, &plan, &loaded.policy, stockade_protocol::Encoding::Text, wants_report);
    Ok(CommandResult { code, report: report::without_streams(report, message) })
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

/// Runs a program of stockade's own under a policy.
///
/// # Errors
/// It was not started.
pub fn run_image(image: &Image<'_>, loaded: &Loaded, options: &Options) -> Result<ImageResult, Refusal> {
    let (outcome, plan) = attempt(Ask::Image(image), loaded, options, Streams::Capture)?;
    let output = outcome.output.bytes.clone();
    let report = report::from_outcome(outcome, &plan, &loaded.policy, stockade_protocol::Encoding::Text, true);
    Ok(ImageResult { output, report, plan })
}

/// Does something with the rights of whoever asked, where root acts for another.
///
/// # Errors
/// It cannot be known who that is, or the rights cannot be changed.
pub fn with_callers_rights<T>(act: impl FnOnce() -> T) -> Result<T, Refusal> {
    let identity = caller::identify()?;
    stockade_launcher::scratch::as_caller(&identity.caller, identity.privileged, act)
        .map_err(|errno| Refusal::sandbox_error("caller_rights", format!("cannot change to the caller's rights: {errno}")))
}

/// The plan of a request or a command, without running it.
///
/// # Errors
/// There is none.
pub fn plan(ask: Ask<'_>, options: &Options) -> Result<Plan, Refusal> {
    let loaded = load_policy(options)?;
    Admission::new(ask, &loaded, options, Purpose::Plan).map(|admission| admission.plan)
}
