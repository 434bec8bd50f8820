//! Admission: whether this caller may have this run, and what exactly the run is.
//!
//! Form first (is the request well made?), then the grants. Then the init process is spawned, and while
//! it makes its namespaces follow the host's facts, the scratch and its guards, what the run would
//! show of the host, and the plan. Where a prepared sandbox fits the plan, that is taken at the end. A
//! refusal names the field, what is wrong with it and how to fix it. No code is started here.

pub(crate) mod image_root;
mod inspect;
mod interpreters;
mod prefixes;
mod request;
mod rights;
mod sandbox;
mod shown_host;

use std::{
    collections::BTreeMap,
    fs::File,
    path::{Path, PathBuf},
};

use rustix::fd::OwnedFd;
use stockade_launcher::{Inputs, LaunchError, Memory, Stdin, Streams, host_socket::OpenedSocket, registry::Record, scratch::OpenedScratch};
use stockade_policy::{
    model::AuditMode,
    plan::{Plan, View, plan},
};
use stockade_protocol::{LimitKey, LimitValue, Request, Verdict};

use crate::{
    LoadedPolicy, Options, Refusal, RefusalCause, caller,
    compile::StepRun,
    pool::{NotPrestarted, PathIds, Pool, Taken},
    runs::{self, EntryPoint},
    session::SessionState,
    template::TemplateRun,
};
pub use image_root::{ImageStatus, look_at_images, program_of};
use request::well_formed;
pub(crate) use request::{Parts, check_relative, parse_limits};
pub use request::{decode, parse_request, random_bytes, read_request, unique_stem};
pub use rights::check_grants;
pub(crate) use rights::{open_scratch, scratch_of};
pub use sandbox::RunSandbox;
use sandbox::SandboxBuilder;
use shown_host::{HostQuery, ShownHost};

/// What somebody wants run.
#[derive(Clone, Copy)]
pub enum Origin<'a> {
    /// A request of `exec`.
    Request(&'a Request),
    /// A command of `run`.
    Command {
        /// Program and arguments.
        command: &'a [String],
        /// Limits, and files to return.
        settings: &'a RunSettings,
        /// On a terminal of its own.
        terminal: bool,
        /// What it shows in place of the policy's root.
        view: Option<&'a View>,
    },
    /// A program of `run`, with its streams passed through.
    Script {
        /// The program; its `stdin` and `encoding` have no meaning.
        request: &'a Request,
        /// On a terminal of its own.
        terminal: bool,
    },
    /// A runtime's interpreter: a shim's, or `run`'s for a script that lies in the scratch.
    Interpreter {
        /// Which of the two.
        via: EntryPoint,
        /// The runtime.
        runtime: &'a str,
        /// All its arguments.
        arguments: &'a [String],
        /// The caller's variables that the policy accepts.
        environment: &'a BTreeMap<String, String>,
        /// Another path by which the caller speaks of the scratch.
        alias: Option<&'a Path>,
        /// Limits, and files to return.
        settings: &'a RunSettings,
        /// On a terminal of its own.
        terminal: bool,
    },
    /// A program that Stockade carries.
    Carried(&'a CarriedProgram<'a>),
    /// A run that makes or tries a template.
    Template(&'a TemplateRun<'a>),
    /// A request to a session; none: what the session itself is planned by.
    Session {
        /// The request.
        request: Option<&'a Request>,
        /// What the session keeps.
        state: &'a SessionState,
    },
}

/// What of a request's fields a command has too.
#[derive(Clone, Debug, Default)]
pub struct RunSettings {
    /// Limits, up to the policy's maximum.
    pub limits: BTreeMap<String, LimitValue>,
    /// Globs of the regular files under scratch to return.
    pub collect: Vec<String>,
}

impl RunSettings {
    /// The policy's limits, and no file.
    pub const NONE: &'static RunSettings = &RunSettings { limits: BTreeMap::new(), collect: Vec::new() };
}

impl<'a> Origin<'a> {
    /// Program and arguments, of a command or an interpreter.
    pub(crate) fn words(self) -> Vec<String> {
        match self {
            Origin::Command { command, .. } => command.to_vec(),
            Origin::Interpreter { runtime, arguments, .. } => {
                std::iter::once(runtime.to_owned()).chain(arguments.iter().cloned()).collect()
            }
            Origin::Request(_) | Origin::Script { .. } | Origin::Carried(_) | Origin::Template(_) | Origin::Session { .. } => Vec::new(),
        }
    }

    /// What was used to ask for it.
    pub(crate) fn entry_point(self, options: &Options) -> EntryPoint {
        if let Some(via) = options.via {
            return via;
        }
        match self {
            Origin::Request(_) if options.key.is_some() => EntryPoint::Serve,
            Origin::Request(_) if options.peer.is_some() => EntryPoint::Socket,
            Origin::Request(_) => EntryPoint::Exec,
            Origin::Command { view: Some(_), .. } => EntryPoint::Bwrap,
            Origin::Command { .. } | Origin::Script { .. } | Origin::Carried(_) | Origin::Template(_) => EntryPoint::Run,
            Origin::Interpreter { via, .. } => via,
            Origin::Session { .. } => EntryPoint::Session,
        }
    }

    pub(crate) fn session_state(self) -> Option<&'a SessionState> {
        match self {
            Origin::Session { state, .. } => Some(state),
            _ => None,
        }
    }

    /// What no other session has; none of a run by itself.
    pub(crate) fn number_of_session(self) -> Option<&'a str> {
        self.session_state().map(SessionState::store_id)
    }

    /// A refusal as it is meant here: earlier code of a session may have left no room for
    /// the next.
    pub(crate) fn worded(self, refusal: Refusal) -> Refusal {
        if self.session_state().is_none() || refusal.reason != "scratch_full" {
            return refusal;
        }
        let message = format!("{}; or empty files of the session by `write`, or `reset` it", refusal.message);
        Refusal { verdict: Verdict::DiskLimit, message, ..refusal }
    }
}

/// A program that Stockade carries, to run behind every layer of a policy. No request can name
/// one: it is for clients of this crate that have it as bytes.
#[derive(Clone, Debug, Default)]
pub struct CarriedProgram<'a> {
    /// Its name.
    pub name: &'a str,
    /// The program, static.
    pub program: &'static [u8],
    /// What it reads from stdin.
    pub stdin: &'a [u8],
    /// Limits, up to the policy's maximum.
    pub limits: BTreeMap<LimitKey, Option<u64>>,
    /// Globs of files to return.
    pub collect: Vec<String>,
}

/// What a run is admitted for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Its plan, to look at.
    Plan,
    /// The run: its place in the registry is taken, and the sandbox is begun. What killed launchers
    /// left behind is swept while that sets itself up.
    Run,
    /// A sandbox for a run that is yet to be asked for.
    Prepare,
}

impl Purpose {
    /// Whether something is made on the host.
    fn claims(self) -> bool {
        self != Purpose::Plan
    }
}

/// An admitted run: its plan, and what else it needs.
pub struct Admission<'a> {
    /// The plan.
    pub plan: Plan,
    program: FileBytes<'a>,
    carried_program: Option<&'static [u8]>,
    memory: Option<Memory>,
    files: Vec<(String, FileBytes<'a>)>,
    stdin: StdinBytes<'a>,
    scratch: Option<OpenedScratch>,
    writable_trees: Vec<OpenedScratch>,
    sockets: Vec<OpenedSocket>,
    opened_binds: BTreeMap<PathBuf, OwnedFd>,
    collect: Vec<String>,
    record: Option<Record>,
    /// Whether the registry is still to be swept of what killed launchers have left.
    unswept: bool,
    state: Option<&'a SessionState>,
    purpose: Purpose,
    /// The lock of the image that is its root.
    held: Vec<File>,
    /// What was seen of the host, for a sandbox that is prepared.
    pub(crate) seen: PathIds,
    /// Why no interpreter waits for the program, if none does.
    pub(crate) not_prestarted: NotPrestarted,
    /// Why the interpreter is no copy of a template, where the policy has one.
    pub(crate) not_copied: Option<NotPrestarted>,
    sandbox: Option<Result<RunSandbox, LaunchError>>,
}

/// A run that was admitted for its plan alone.
#[derive(Debug, thiserror::Error)]
#[error("this run was only planned")]
struct OnlyPlanned;

impl RefusalCause for OnlyPlanned {
    fn verdict_and_reason(&self) -> (Verdict, &'static str) {
        (Verdict::SandboxError, "not_claimed")
    }
}

/// A file's bytes: the request's own text, or decoded.
pub type FileBytes<'a> = std::borrow::Cow<'a, [u8]>;

#[derive(Default)]
pub(crate) enum StdinBytes<'a> {
    #[default]
    Null,
    Bytes(FileBytes<'a>),
    Relay,
}

impl<'a> Admission<'a> {
    /// Admits a run, or refuses it. `step`: which of two it is. `pool`: what is prepared for it.
    ///
    /// # Errors
    /// The request is malformed, asks for too much, is not granted, or the host lacks a
    /// layer that the policy requires.
    pub(crate) fn admit(
        origin: Origin<'a>,
        loaded: &LoadedPolicy,
        options: &Options,
        purpose: Purpose,
        step: Option<StepRun<'a>>,
        mut pool: Pool,
    ) -> Result<Self, Refusal> {
        let LoadedPolicy { policy, filters } = loaded;
        let identity = caller::identify(options.peer.as_ref())?;
        let stem = step.map(|step| step.stem).or(pool.stem());
        let (mut run_request, mut parts) = well_formed(origin, policy, options, stem)?;
        step.into_iter().for_each(|step| step.narrow(&mut run_request, &mut parts));
        let scratch = scratch_of(origin, options)?;
        // Before the launcher reads anything of the host for a caller who has no right to it.
        check_grants(&identity, &policy.name, None, options)?;
        let is_compared = !pool.is_empty() || purpose == Purpose::Prepare;
        // First of all that is done on the host, so that it makes its namespaces beside what
        // follows.
        let must_be_noted = policy.audit.mode == AuditMode::Required;
        let has_trees = run_request.view.as_ref().is_some_and(|view| !view.entries.is_empty());
        let mut builder = SandboxBuilder::new(&identity, purpose, scratch.is_some() || has_trees || must_be_noted, !pool.is_empty())?;
        let state = origin.session_state().or(step.and_then(|step| step.own));
        let mut host = builder.read_host(options.uid_of.as_deref())?;
        let image = image_root::find(origin, policy, options, &identity)?.map(|image| image_root::facts(image, policy)).transpose()?;
        let (image, held) = image.unzip();
        host.image = image;
        let query = HostQuery { identity: &identity, policy, options, scratch: scratch.as_deref(), is_compared };
        let ShownHost { scratch, writable_trees, sockets, interpreters, opened_binds, seen } =
            ShownHost::open(&query, &run_request, &mut host)?;
        run_request.scratch = scratch.as_ref().map(|opened| opened.facts.clone());
        run_request.writable_trees = writable_trees.iter().map(|opened| opened.facts.clone()).collect();
        run_request.sockets = sockets.iter().map(|opened| opened.facts.clone()).collect();
        run_request.interpreters = interpreters;
        let mut plan = plan(policy, filters, &host, &run_request)?;
        parts.check_writable(&plan)?;
        if plan.program_file.is_none() {
            // Its compiler has read it.
            parts.program = FileBytes::default();
        }
        if let Origin::Template(run) = origin {
            run.adjust(&mut plan);
        }
        // One that does not fit ends here, before another is spawned.
        let Taken { sandbox: prepared, memory, not_prestarted, not_copied } = pool.take(&plan, &seen, scratch.as_ref(), &parts);
        let memory = if let Origin::Template(run) = origin { run.memory() } else { memory };
        let sandbox = builder.sandbox(&plan, prepared)?;
        let SandboxBuilder { record, unswept, .. } = builder;
        let Parts { program, carried_program, files, stdin, collect } = parts;
        Ok(Admission {
            plan,
            program,
            carried_program,
            memory,
            files,
            stdin,
            scratch,
            writable_trees,
            sockets,
            opened_binds,
            collect,
            record,
            unswept,
            state,
            purpose,
            held: held.into_iter().collect(),
            seen,
            not_prestarted,
            not_copied,
            sandbox,
        })
    }

    /// The host's directory that the run gets.
    pub(crate) fn scratch(&self) -> Option<&OpenedScratch> {
        self.scratch.as_ref()
    }

    /// The plan, the parts that the launcher takes beside it, and the sandbox that was
    /// begun.
    ///
    /// # Errors
    /// It could not be begun, or the run was not claimed.
    pub fn into_parts(self, streams: Streams) -> Result<(Plan, Inputs<'a>, RunSandbox), Refusal> {
        let sandbox = self.sandbox.ok_or(OnlyPlanned)??;
        // One that was set up has them.
        let state = self.state.filter(|_| matches!(sandbox, RunSandbox::Init(_)));
        let kept = state.map(|state| state.copies(&self.plan, self.purpose)).transpose()?;
        let inputs = Inputs {
            program: self.program,
            carried_program: self.carried_program,
            memory: self.memory,
            files: self.files,
            stdin: match self.stdin {
                StdinBytes::Null => Stdin::Null,
                StdinBytes::Bytes(bytes) => Stdin::Bytes(bytes),
                // Where output is captured no caller reads stdin to it.
                StdinBytes::Relay if streams == Streams::Capture => Stdin::Null,
                StdinBytes::Relay => Stdin::Relay,
            },
            scratch: self.scratch,
            writable_trees: self.writable_trees,
            sockets: self.sockets,
            mount_points: Vec::new(),
            kept,
            opened_binds: self.opened_binds,
            held: self.held,
            streams,
            collect: self.collect,
            record: self.record,
            cancel_word: None,
            client: None,
            callers: &[],
            prestart: false,
            // What cannot be cleared away stays for the next start.
            meanwhile: self.unswept.then(|| Box::new(|| drop(runs::sweep())) as _),
            beside: None,
        };
        Ok((self.plan, inputs, sandbox))
    }
}
