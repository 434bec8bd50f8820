//! Sandboxes that are set up before the request for them comes.
//!
//! A [`Pool`] holds the next sandbox of a session, or of a service's worker, which is admitted and set
//! up as for a request without options: while the client thinks, or, where that leaves no pause, beside
//! the program before. A run asks it what its program's file is to be called, and takes the sandbox
//! ([`Pool::take`]). A request is admitted by itself, as if there were none, and takes it only where
//! every part of the plan is in force already, and every path of the host that the plan shows, or covers
//! in a scratch, is still the same file or directory. Else that sandbox is ended, unused.
//!
//! Its interpreter is started too and waits for its program, unless something that code or client
//! has left could run at its start, or a user of the host or a program of the session could see the
//! fifo at which it waits. A request for another start of the interpreter gets another sandbox. Where
//! there is a template (`template.rs`), the interpreter is a copy of it, in a fresh sandbox too.
//!
//! What is prepared in an image holds the image's layers. After 30 s without a request it is ended, and
//! nothing is prepared until the next.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    rc::Rc,
    time::{Duration, Instant},
};

use rustix::fd::BorrowedFd;
use stockade_launcher::{ErrorKind, LaunchError, Memory, OpenedScratch, Streams, WaitingSandbox};
use stockade_policy::{
    model::Policy,
    plan::{Plan, RootEntry, UserNamespaces},
};
use stockade_protocol::{Request, step::Step};

use crate::{
    Admission, LoadedPolicy, Options, Origin, Purpose, Refusal,
    admit::{Parts, RunSandbox, StdinBytes, unique_stem},
    facts::{FileId, scratch_id},
    session::SessionState,
    template::Template,
};

/// Which file or directory each path of the host is that a plan shows.
pub(crate) type PathIds = BTreeMap<PathBuf, Option<FileId>>;

/// A host scratch that holds more is not looked through once more for every request: that
/// would soon cost more than a sandbox.
const MAX_ENTRIES: u64 = 1024;

/// An interpreter that has waited so long for its program gives its memory back, and a sandbox in an image
/// the image.
const WAITS: Duration = Duration::from_secs(30);

/// At most one prepared sandbox, which the next request of a session or a worker may take.
#[derive(Default)]
pub(crate) struct Pool {
    prepared: Option<PreparedSandbox>,
    /// Why none is, where no request would take one.
    why_none: Option<NotPrestarted>,
    /// What the file name of the next request's program begins with: its interpreter may wait for
    /// a file of this name.
    stem: Option<String>,
    /// Whose copy the program's interpreter may be, or why none.
    template: Option<Result<Rc<Template>, NotPrestarted>>,
}

/// What a run gets of a pool.
pub(crate) struct Taken {
    /// The sandbox; none: another is to be made.
    pub(crate) sandbox: Option<WaitingSandbox>,
    /// The image for the other one.
    pub(crate) memory: Option<Memory>,
    /// Why no interpreter waits for the program, if none does.
    pub(crate) not_prestarted: NotPrestarted,
    /// Why the interpreter is no copy, where the policy has a template for it.
    pub(crate) not_copied: Option<NotPrestarted>,
}

/// Interpreters that open their program once, by themselves, and before that read nothing of scratch
/// but what a request's own files could be.
const INTERPRETERS: [&str; 5] = ["python", "bash", "dash", "sh", "node"];

/// Variables that make none of them execute or read a file of the code's at its start. A trailing
/// `*` matches any ending.
const HARMLESS: [&str; 25] = [
    "HOME",
    "HOSTNAME",
    "LANG",
    "LANGUAGE",
    "LC_*",
    "LOGNAME",
    "MKL_NUM_THREADS",
    "MPLBACKEND",
    "MPLCONFIGDIR",
    "NO_COLOR",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "OPENBLAS_THREAD_TIMEOUT",
    "PATH",
    "PWD",
    "PYTHONDONTWRITEBYTECODE",
    "PYTHONHASHSEED",
    "PYTHONUNBUFFERED",
    "SHELL",
    "TERM",
    "TMPDIR",
    "TZ",
    "USER",
    "UV_USE_IO_URING",
    "XDG_CACHE_HOME",
];

/// Whether the plan's command is one of [`INTERPRETERS`] with the program's path and nothing else.
fn is_plain_command(plan: &Plan) -> bool {
    let [interpreter, file] = plan.argv.as_slice() else { return false };
    let is_program = plan.program_file.as_ref().is_some_and(|(directory, name)| directory.join(name) == Path::new(file));
    let name = Path::new(interpreter).file_name().unwrap_or_default().to_string_lossy();
    // `python3.11` is one too.
    let name = name.trim_end_matches(|letter: char| letter.is_ascii_digit() || letter == '.');
    is_program && INTERPRETERS.contains(&name)
}

fn is_harmless(variable: &str) -> bool {
    let name = variable.split('=').next().unwrap_or_default();
    HARMLESS.iter().any(|harmless| harmless.strip_suffix('*').map_or(*harmless == name, |start| name.starts_with(start)))
}

/// What pid 1 calls to give a waiting interpreter its program.
const HAND_OVER_CALLS: [&str; 3] = ["kill", "unlinkat", "waitid"];

/// Why a request finds no interpreter that waits for its program.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NotPrestarted {
    #[error("no sandbox was prepared")]
    Nothing,
    #[error("the code is compiled first, in another sandbox")]
    Compiled,
    #[error("the root is a container image, which has interpreters of its own")]
    ImageRoot,
    #[error("the request asks for no copy of the template")]
    NoCopyAsked,
    #[error("the sandbox was prepared for requests that get no copy of a template")]
    PreparedForNoCopy,
    #[error("only requests of a session or a service get copies of a template")]
    OneRequest,
    #[error("what was prepared is a copy of another key's template")]
    AnotherKey,
    #[error("the template is not being made yet")]
    TemplateNotBegun,
    #[error("the template is still being made")]
    NoTemplateYet,
    #[error("the template was refused: {0}")]
    TemplateRefused(String),
    #[error("as many copies as the policy allows have been made of the template's memory image, which is made anew")]
    UsedUp,
    #[error("scratch cannot be read, or holds too many files to be looked through")]
    ScratchUnknown,
    #[error("a file of the request, or in scratch, has the name of a module that the template has imported")]
    Shadowed,
    #[error("the interpreter, or a library, is another one than that of the template, which is made anew")]
    Outdated,
    #[error("the policy is another one than that of the template, which is made anew")]
    OtherPolicy,
    #[error("a file in scratch has the name that the template's programs have")]
    NameTaken,
    #[error("the prepared sandbox did not fit the request")]
    Misfit,
    #[error("the sandbox was prepared for other arguments, variables or limits")]
    AnotherStart,
    #[error("the request has other variables or limits, or another file name, than copies of the template")]
    AnotherThanCopies,
    #[error("the request brings files, and an interpreter may look for some before it opens its program")]
    Files,
    #[error("the prepared sandbox, or the interpreter that waited in it, had ended or did not answer")]
    Ended,
    #[error("{0}")]
    NoCopy(String),
    #[error("the runtime's command is not one of python, bash, dash, sh and node with the program's file alone")]
    Command,
    #[error("the policy sets a variable that may make an interpreter execute other files at its start")]
    Variable,
    #[error("scratch is a directory of the host, where others would see the fifo at which an interpreter waits")]
    HostScratch,
    #[error("scratch is read-only, and an interpreter waits at a fifo in it")]
    ReadOnlyScratch,
    #[error("an interpreter had waited for too long, and was ended")]
    Waited,
    #[error("the sandbox that was prepared had held its container image for too long, and was ended")]
    HeldImage,
    #[error("the policy's [seccomp] allow list lacks `{0}`, by which an interpreter gets its program")]
    Filter(&'static str),
    #[error("the client leaves no pause, and no interpreter is started while code runs that could reach it")]
    Beside,
    #[error("home holds files, and an interpreter may execute some at its start")]
    Home,
    #[error("home is in scratch, where a request's files may be some that an interpreter executes at its start")]
    HomeInScratch,
    #[error("scratch holds too many files to be looked through once more for every request")]
    LargeScratch,
    #[error("a path that is covered in scratch is a mount of its own")]
    CoveredMount,
    #[error("the run has no user namespace")]
    NoUserNamespace,
    #[error("the policy lets code reach peers, which a run does through a gate of its own")]
    Egress,
    #[error("the policy watches modules, from the interpreter's start on")]
    Watched,
    #[error("the policy asks for approvals, which depend on what scratch holds")]
    Approvals,
}

impl NotPrestarted {
    /// Why the interpreter of this plan may not start ahead; none: it may.
    pub(crate) fn of(plan: &Plan, policy: &Policy, held_back: Option<Self>) -> Option<Self> {
        let watched = plan.root.iter().any(|entry| matches!(entry, RootEntry::Pipe { .. }));
        let lacking = HAND_OVER_CALLS.into_iter().find(|call| !policy.seccomp.allow.iter().any(|allowed| allowed == call));
        let causes = [
            (plan.image_root.is_some(), NotPrestarted::ImageRoot),
            (plan.scratch.host, NotPrestarted::HostScratch),
            (plan.scratch.read_only, NotPrestarted::ReadOnlyScratch),
            (policy.scratch.home, NotPrestarted::HomeInScratch),
            (!is_plain_command(plan), NotPrestarted::Command),
            (!plan.environment_values.iter().all(|variable| is_harmless(variable)), NotPrestarted::Variable),
            (plan.egress.is_some(), NotPrestarted::Egress),
            (watched, NotPrestarted::Watched),
            (policy.screen.wants_approval(), NotPrestarted::Approvals),
        ];
        causes.into_iter().find_map(|(applies, cause)| applies.then_some(cause)).or(lacking.map(NotPrestarted::Filter)).or(held_back)
    }
}

struct PreparedSandbox {
    plan: Plan,
    /// Its stdin is a pipe, and no `/dev/null`.
    reads_stdin: bool,
    seen: PathIds,
    /// The host scratch that is mounted in it.
    scratch: Option<FileId>,
    /// What is covered in that, path by path. A cover goes with its file where somebody on the
    /// host renames that, so that two that change their names change their protection, while
    /// the plan stays the same.
    covered: Vec<Option<FileId>>,
    /// None where its interpreter was started too.
    not_prestarted: Option<NotPrestarted>,
    /// Whose copy the interpreter is, or why none.
    template: Option<Result<Rc<Template>, NotPrestarted>>,
    since: Instant,
    ready: WaitingSandbox,
}

impl Pool {
    /// Nothing: no request would take it, for this reason.
    pub(crate) fn never(why: NotPrestarted) -> Self {
        Pool { why_none: Some(why), ..Pool::default() }
    }

    /// Whether nothing is prepared.
    pub(crate) fn is_empty(&self) -> bool {
        self.prepared.is_none()
    }

    /// Prepares a sandbox for a request like this one, of which language and whether it has stdin count; or
    /// why such a request would not take it. `state`: what the session keeps whose request it is, if any.
    /// `template`: whose copy its interpreter
    /// may be, or why none. `held_back`: why no interpreter is to be started.
    ///
    /// # Errors
    /// Such a request would be refused, or the sandbox cannot be set up.
    pub(crate) fn prepare(
        request: &Request,
        state: Option<&SessionState>,
        loaded: &LoadedPolicy,
        options: &Options,
        template: Option<Result<Rc<Template>, NotPrestarted>>,
        held_back: Option<NotPrestarted>,
    ) -> Result<Result<Self, NotPrestarted>, Refusal> {
        // One request without a copy does not prevent a copy for the next.
        let template = template.filter(|template| !matches!(template, Err(NotPrestarted::NoCopyAsked)));
        let of_template = template.as_ref().and_then(|template| template.as_ref().ok()?.stem());
        let stem = match (of_template, state) {
            (Some(stem), _) => Some(stem.to_owned()),
            // The plan names the program where nothing else can be in its scratch.
            (None, None) => None,
            (None, Some(_)) => Some(unique_stem()?),
        };
        let prepared = PreparedSandbox::new(request, state, loaded, options, stem.clone(), template, held_back)?;
        Ok(prepared.map(|prepared| Pool { prepared: Some(prepared), stem, ..Pool::default() }))
    }

    /// Adds whose copy the interpreter may be, or why none.
    pub(crate) fn with(mut self, template: Option<Result<Rc<Template>, NotPrestarted>>) -> Self {
        if let (None, Some(Ok(template))) = (&self.prepared, &template) {
            self.stem = template.stem().map(str::to_owned);
        }
        self.template = template;
        self
    }

    /// What the file name of the next request's program begins with; none: anything.
    pub(crate) fn stem(&self) -> Option<&str> {
        self.stem.as_deref()
    }

    /// Whether an interpreter waits for its program.
    pub(crate) fn waits_for_program(&self) -> bool {
        self.prepared.as_ref().is_some_and(|prepared| prepared.not_prestarted.is_none())
    }

    /// Whether what is prepared holds the layers of an image.
    pub(crate) fn holds_image(&self) -> bool {
        self.prepared.as_ref().is_some_and(|prepared| prepared.plan.image_root.is_some())
    }

    /// How long an interpreter that waits, or a sandbox in an image, may still do so; none: for ever.
    pub(crate) fn may_wait(&self) -> Option<Duration> {
        self.prepared
            .as_ref()
            .filter(|_| self.waits_for_program() || self.holds_image())
            .map(|prepared| WAITS.saturating_sub(prepared.since.elapsed()))
    }

    /// Whether that has waited for too long.
    pub(crate) fn has_waited(&self) -> bool {
        self.may_wait().is_some_and(|left| left.is_zero())
    }

    /// Since when a sandbox is prepared.
    pub(crate) fn since(&self) -> Option<Instant> {
        self.prepared.as_ref().map(|prepared| prepared.since)
    }

    /// Whether its interpreter is a copy, or is to be one.
    pub(crate) fn is_copy(&self) -> bool {
        self.prepared.as_ref().is_some_and(|prepared| prepared.ready.is_restored())
    }

    /// Whether the interpreter that waits is to be replaced by a copy of this template: it is none, or one of
    /// an image that is too old.
    pub(crate) fn gives_way_to(&self, template: &Template) -> bool {
        let is_worse = |own: &Option<Result<Rc<Template>, NotPrestarted>>| match own {
            Some(Ok(own)) => own.is_too_old() && !template.is_too_old(),
            _ => true,
        };
        self.waits_for_program() && self.prepared.as_ref().is_some_and(|prepared| is_worse(&prepared.template))
    }

    /// Whether no interpreter was started in it for the only reason that code ran then.
    pub(crate) fn is_of_beside(&self) -> bool {
        self.prepared.as_ref().is_some_and(|prepared| prepared.not_prestarted == Some(NotPrestarted::Beside))
    }

    /// Whether its interpreter is to be a copy that is made when the request comes.
    pub(crate) fn is_for_copy(&self) -> bool {
        self.prepared.as_ref().is_some_and(|prepared| prepared.not_prestarted.is_some() && prepared.ready.is_restored())
    }

    /// What becomes readable when what is prepared has ended by itself.
    pub(crate) fn end(&self) -> Option<BorrowedFd<'_>> {
        self.prepared.as_ref().map(|prepared| prepared.ready.end())
    }

    /// What is ready for a run of this plan, that shows `seen` and `scratch` of the host. A
    /// prepared sandbox that is not what the plan asks for, or has ended meanwhile, is ended.
    pub(crate) fn take(&mut self, plan: &Plan, seen: &PathIds, scratch: Option<&OpenedScratch>, parts: &Parts<'_>) -> Taken {
        let is_of_host = plan.image_root.is_none();
        let template = self.template.take().map(|template| if is_of_host { template } else { Err(NotPrestarted::ImageRoot) });
        let of_prepared = self.prepared.as_ref().and_then(|prepared| prepared.template.as_ref());
        let not_copied = [template.as_ref(), of_prepared].into_iter().flatten().find_map(|template| template.as_ref().err().cloned());
        let (sandbox, not_prestarted) = self.take_prepared(plan, seen, scratch, parts, not_copied.as_ref());
        if let Some(sandbox) = sandbox {
            let is_copy = sandbox.is_restored() || template.is_none();
            let not_copied = not_copied.or((!is_copy).then_some(NotPrestarted::PreparedForNoCopy));
            return Taken { sandbox: Some(sandbox), memory: None, not_prestarted, not_copied };
        }
        let copied = template.map(|template| template.and_then(|template| template.copy(plan, parts))).transpose();
        let (memory, not_copied) = copied.map_or_else(|cause| (None, Some(cause)), |memory| (memory, None));
        Taken { sandbox: None, memory, not_prestarted, not_copied }
    }

    /// The prepared sandbox, and why it has no interpreter that waits, or why it is not taken.
    fn take_prepared(
        &mut self,
        plan: &Plan,
        seen: &PathIds,
        scratch: Option<&OpenedScratch>,
        parts: &Parts<'_>,
        not_copied: Option<&NotPrestarted>,
    ) -> (Option<WaitingSandbox>, NotPrestarted) {
        let Some(prepared) = self.prepared.take() else { return (None, self.why_none.take().unwrap_or(NotPrestarted::Nothing)) };
        let PreparedSandbox {
            plan: own,
            reads_stdin,
            seen: own_seen,
            scratch: own_scratch,
            covered,
            not_prestarted,
            template,
            since: _,
            ready,
        } = prepared;
        let template = template.and_then(Result::ok);
        let same_scratch = scratch.map(OpenedScratch::file_id).transpose().is_ok_and(|id| id == own_scratch);
        let same_covered = covered == scratch.map_or(&[][..], OpenedScratch::file_ids);
        let same_stdin = reads_stdin != matches!(parts.stdin, StdinBytes::Null);
        let fits = same_stdin && same_scratch && same_covered && own_seen == *seen && plan.is_set_up_like(&own);
        let is_for_start = not_prestarted.is_none() || ready.is_restored();
        match not_prestarted {
            _ if !ready.is_sound() => (None, NotPrestarted::Ended),
            _ if !fits => (None, NotPrestarted::Misfit),
            _ if template.as_ref().is_some_and(|template| !template.is_current()) => (None, NotPrestarted::Outdated),
            // It was a good start when it was prepared.
            _ if ready.is_restored() && not_copied.is_some() => (None, NotPrestarted::Misfit),
            // Its interpreter is to be a copy, or waits: what that has used of the sandbox's limits, and
            // written, would be the request's.
            _ if is_for_start && !plan.starts_like(&own) => (None, NotPrestarted::AnotherStart),
            _ if is_for_start && !parts.files.is_empty() => (None, NotPrestarted::Files),
            Some(cause) => (Some(ready), cause),
            // Told where the interpreter turns out not to have waited.
            None => (Some(ready), NotPrestarted::Ended),
        }
    }
}

impl PreparedSandbox {
    fn new(
        request: &Request,
        state: Option<&SessionState>,
        loaded: &LoadedPolicy,
        options: &Options,
        stem: Option<String>,
        template: Option<Result<Rc<Template>, NotPrestarted>>,
        held_back: Option<NotPrestarted>,
    ) -> Result<Result<Self, NotPrestarted>, Refusal> {
        // The gate is of one run, and begins with it.
        if !loaded.policy.egress.whitelist.is_empty() {
            return Ok(Err(NotPrestarted::Egress));
        }
        let origin = match state {
            Some(state) => Origin::Session { request: Some(request), state },
            None => Origin::Request(request),
        };
        let named = Pool { stem, ..Pool::default() };
        let mut admission = Admission::admit(origin, loaded, options, Purpose::Prepare, None, named)?;
        let large = admission.scratch().is_some_and(|scratch| scratch.entries() > MAX_ENTRIES);
        let covered = admission.scratch().map_or(Vec::new(), |scratch| scratch.file_ids().to_vec());
        let causes = [
            (large, NotPrestarted::LargeScratch),
            (covered.contains(&None), NotPrestarted::CoveredMount),
            (admission.plan.identity.user_namespaces != UserNamespaces::Nested, NotPrestarted::NoUserNamespace),
        ];
        if let Some((_, cause)) = causes.into_iter().find(|(applies, _)| *applies) {
            return Ok(Err(cause));
        }
        let (reads_stdin, seen) = (request.stdin.is_some(), std::mem::take(&mut admission.seen));
        let scratch = admission.scratch().map(scratch_id).transpose()?;
        let (plan, mut inputs, sandbox) = admission.into_parts(Streams::Capture)?;
        let RunSandbox::Init(init) = sandbox else { return Ok(Err(NotPrestarted::Nothing)) };
        let not_prestarted = NotPrestarted::of(&plan, &loaded.policy, held_back);
        // Where none may wait now, a copy is made when the request comes.
        let is_good = matches!(not_prestarted, None | Some(NotPrestarted::Waited | NotPrestarted::Beside));
        let template = template.filter(|_| is_good).map(|template| {
            let template = template?;
            inputs.memory = Some(template.copy(&plan, &Parts::default())?);
            Ok(template)
        });
        inputs.prestart = not_prestarted.is_none();
        inputs.meanwhile.take().into_iter().for_each(|sweep| sweep());
        let mut ready = init.setup(&plan, &mut inputs)?;
        ready.keep_prepared();
        Ok(Ok(PreparedSandbox { plan, reads_stdin, seen, scratch, covered, not_prestarted, template, since: Instant::now(), ready }))
    }
}

/// Whether a sandbox that was set up before its run may be to blame for an error, and not
/// the request: then another one is tried.
pub(crate) fn may_be_to_blame(error: &LaunchError) -> bool {
    !matches!(error.kind(), ErrorKind::Step(Step::WriteFile | Step::WriteProgram | Step::ExecPayload))
}
