//! The compiler's run: the first of the two of a request whose runtime compiles its code.
//!
//! Both are whole runs of the policy, each in a sandbox of its own with its own limits, receipt and
//! audit record, and they share what code may write: the scratch of the request, `/tmp` and home. Those
//! exist for this request alone, or are the session's. A host scratch stays locked from the first run to
//! the end of the second. The second run begins only if the compiler has exited with 0.
//!
//! Whether the code may run is decided before, for both. How the second run goes is not known here.

use std::{collections::BTreeMap, path::Path};

use rustix::fd::BorrowedFd;
use stockade_launcher::{Asked, Client, Streams, Teardown, files::Tree, volumes::SessionVolumes};
use stockade_policy::{
    model::Runtime,
    plan::{Plan, RunRequest, RunStep, find_runtime, output},
};
use stockade_protocol::{COMPILE_FAILED, CompileReport, LimitKey, OutputStream, Report, Request, Verdict};

use crate::{
    Admission, Ahead, HeldScratch, LoadedPolicy, Options, Purpose, Refusal, RunResult, RunSpec,
    admit::{Parts, StdinBytes, parse_limits, unique_stem},
    allowed_by, attempt,
    audit::AuditRecorder,
    caller, facts,
    pool::Pool,
    report,
    session::{MAX_LISTED, SessionState},
};

/// Limits of what both runs may write.
const SHARED_SIZES: [LimitKey; 3] = [LimitKey::ScratchSize, LimitKey::ScratchFiles, LimitKey::TmpSize];

/// The runtime of a request, if it compiles.
pub(crate) fn compiled<'p>(request: &Request, loaded: &'p LoadedPolicy) -> Option<&'p Runtime> {
    let policy = &loaded.policy;
    let found = find_runtime(policy, request.language.as_deref().unwrap_or(&policy.language)).ok();
    found.map(|(_, runtime)| runtime).filter(|runtime| runtime.compiles())
}

/// One of the two runs, for its admission.
#[derive(Clone, Copy)]
pub(crate) struct StepRun<'a> {
    pub(crate) step: RunStep,
    /// What the name of the code's file, and in a session that of the output, begins with.
    pub(crate) stem: &'a str,
    /// What both may write, where it is not a session's; none: it is only planned.
    pub(crate) own: Option<&'a SessionState>,
    /// The compiler's limits.
    pub(crate) limits: &'a BTreeMap<LimitKey, Option<u64>>,
}

impl StepRun<'_> {
    /// Makes of a request that of this run: stdin, arguments and variables are the program's, and the
    /// request's files stand in scratch already when that begins.
    pub(crate) fn narrow(&self, run_request: &mut RunRequest, parts: &mut Parts<'_>) {
        run_request.step = Some(self.step);
        match self.step {
            RunStep::Compile => {
                run_request.limits.clone_from(self.limits);
                run_request.arguments.clear();
                run_request.environment.clear();
                run_request.terminal = false;
                parts.stdin = StdinBytes::Null;
            }
            RunStep::Program => parts.files.clear(),
        }
    }
}

/// What came of the compiler's run.
pub(crate) enum Compiled {
    /// The program can be run.
    Made(Box<MadeProgram>),
    /// It cannot: this is the request's result.
    Failed(Box<Report>),
}

/// A program that was made, and all that its run needs beside the request.
pub(crate) struct MadeProgram {
    pub(crate) options: Options,
    pub(crate) report: CompileReport,
    pub(crate) locked: Option<HeldScratch>,
    own: Option<SessionState>,
    stem: String,
    limits: BTreeMap<LimitKey, Option<u64>>,
    plan: Plan,
}

impl MadeProgram {
    /// The program's run.
    pub(crate) fn step(&self) -> StepRun<'_> {
        StepRun { step: RunStep::Program, stem: &self.stem, own: self.own.as_ref(), limits: &self.limits }
    }

    /// After the program has ended: takes what the compiler made out of a session.
    pub(crate) fn clear(&self, spec: &RunSpec<'_>) {
        remove_output(spec, &output(&self.plan.scratch, Some(&self.stem)));
    }
}

/// Takes what a compiler has made, whole or in part, out of a session, which keeps what code writes. What
/// cannot be removed, because code has changed it, stays as such files do.
fn remove_output(spec: &RunSpec<'_>, path: &Path) {
    let Some(state) = spec.origin.session_state() else { return };
    let privileged = caller::identify(spec.options.peer.as_ref()).is_ok_and(|identity| identity.privileged);
    let (Some(above), Some(name)) = (path.parent(), path.file_name().map(Path::new)) else { return };
    state.in_directory(above, |directory, owner| {
        let tree = Tree::kept(directory, owner, privileged);
        let entries = tree.list(name, true, MAX_LISTED).map(|(entries, _)| entries).unwrap_or_default();
        // A directory stands before what is in it.
        for entry in entries.iter().rev() {
            let _stays = tree.remove(&name.join(&entry.path));
        }
        let _stays = tree.remove(name);
    });
}

/// Runs the compiler of a request. `main`: the recorder of the request, whose records name the program.
///
/// # Errors
/// One of the two runs would be refused, and none was begun.
pub(crate) fn compile(
    spec: RunSpec<'_>,
    request: &Request,
    main: &AuditRecorder<'_>,
    client: Option<&mut dyn Client>,
) -> Result<Compiled, Refusal> {
    let RunSpec { origin, loaded, options, .. } = spec;
    let identity = caller::identify(options.peer.as_ref())?;
    let mut options = options.clone();
    if options.uid_of.is_none() {
        // What the first run writes is the second's.
        options.uid_of = facts::uid_for_all(&identity)?;
    }
    let stem = unique_stem()?;
    let mut limits = parse_limits("compile_limits", &request.compile_limits)?;
    if let Some(key) = SHARED_SIZES.into_iter().find(|key| limits.contains_key(key)) {
        return Err(CompileError::SharedSize(key).into());
    }
    let step = StepRun { step: RunStep::Program, stem: &stem, own: None, limits: &limits };
    let plan = Admission::admit(origin, loaded, &options, Purpose::Plan, Some(step), Pool::default())?.plan;
    limits.extend(SHARED_SIZES.map(|key| (key, plan.limits.get(key))));
    let own = match origin.session_state() {
        Some(_) => None,
        None => Some(SessionState::of_request(SessionVolumes::make(&plan)?)),
    };
    let step = StepRun { step: RunStep::Compile, stem: &stem, own: own.as_ref(), limits: &limits };
    let recorder = main.for_compiler(loaded, &options);
    let first = RunSpec { options: &options, recorder: Some(&recorder), step: Some(step), ..spec };
    let mut quiet = client.map(CompilerClient);
    let client = quiet.as_mut().map(|client| client as &mut dyn Client);
    let (report, mut teardown, locked) = match attempt(first, Streams::Capture, client, Ahead::default()) {
        Ok(RunResult { outcome, plan, teardown, locked }) => {
            let report = report::from_outcome(outcome, &plan, &loaded.policy, request.encoding);
            (allowed_by(&options, report), Some(teardown), locked)
        }
        Err(refusal) => {
            let refusal = origin.worded(refusal);
            (Refusal { message: format!("compile the code: {}", refusal.message), ..refusal }.report(), None, None)
        }
    };
    let report = recorder.end_with_record(report, teardown.as_mut().and_then(Teardown::record));
    // Its cgroup is gone before the program's is made.
    drop(teardown);
    if !report.success {
        // It may have been ended while it wrote.
        remove_output(&spec, &output(&plan.scratch, Some(&stem)));
        return Ok(Compiled::Failed(Box::new(failed(report))));
    }
    let report = CompileReport::from(report);
    Ok(Compiled::Made(Box::new(MadeProgram { options, report, locked, own, stem, limits, plan })))
}

/// The result of a request whose code was not made into a program. The compiler's streams are what a
/// client needs to read; of the code itself nothing has run.
fn failed(report: Report) -> Report {
    let is_of_code = report.started && !matches!(report.verdict, Verdict::SandboxError | Verdict::BadRequest | Verdict::Cancelled);
    let compile = report.started.then(|| Box::new(CompileReport::from(report.clone())));
    let reason = if is_of_code { Some(COMPILE_FAILED.to_owned()) } else { report.reason };
    Report { compile, reason, started: false, ..report }
}

/// Why a compiler's limits cannot be meant.
#[derive(Debug, thiserror::Error)]
enum CompileError {
    #[error("compile_limits.{}: compiler and program write to the same file systems; write it in `limits`", .0.name())]
    SharedSize(LimitKey),
}

impl crate::RefusalCause for CompileError {
    fn verdict_and_reason(&self) -> (Verdict, &'static str) {
        (Verdict::BadRequest, "limit_malformed")
    }
}

/// The client of a request while its code is compiled: it may cancel that, and hears of the program alone.
struct CompilerClient<'c>(&'c mut dyn Client);

impl Client for CompilerClient<'_> {
    fn requests(&self) -> Option<BorrowedFd<'_>> {
        self.0.requests()
    }

    fn results(&self) -> Option<BorrowedFd<'_>> {
        self.0.results()
    }

    fn look(&mut self) -> Asked {
        self.0.look()
    }

    fn signalled(&mut self, signal: i32) {
        self.0.signalled(signal);
    }

    fn begins(&mut self, _: i32) {}

    fn printed(&mut self, _: OutputStream, _: &[u8]) {}

    fn wants_room(&self) -> bool {
        self.0.wants_room()
    }
}
