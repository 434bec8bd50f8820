//! Admission: whether this caller may have this run, and what exactly the run is.
//!
//! Form first (is the request well made?), then rights (grants, scratch), then the plan.
//! A refusal names the field, what is wrong with it and how to mend it. Nothing is
//! started here.

mod interpreters;
mod prefixes;
mod request;
mod rights;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use rustix::fd::OwnedFd;
use stockade_launcher::{
    Embryo, Inputs, LaunchError, Outcome, Stdin, Streams, V2Parent, Waiting,
    registry::Record,
    scratch::{self, Idmap, OpenedScratch, Opener},
};
use stockade_policy::{
    facts::CgroupFacts,
    model::Policy,
    plan::{Draft, Foundation, Mode, Narrowing, Plan, Program, UserNamespaces},
};
use stockade_protocol::{LimitKey, Request};

use crate::{
    Ahead, Loaded, Options, Refusal, audit,
    caller::{self, Identity},
    facts,
    session::Kept,
    spare::Seen,
    trusted::{refuse_led_astray, refuse_replaceable},
};
use interpreters::{check_interpreters, codecs, open_trees};
pub use request::{LARGEST_REQUEST, decode, parse_request, read_request};
use request::{Parts, check_request, check_size};
pub(crate) use request::{check_relative, random_bytes};
pub use rights::check_grants;
use rights::claim_record;
pub(crate) use rights::{open_scratch, scratch_of};

/// What somebody wants run.
#[derive(Clone, Copy)]
pub enum Ask<'a> {
    /// A request of `exec`.
    Request(&'a Request),
    /// A command of `run`.
    Command {
        /// Program and arguments.
        command: &'a [String],
        /// On a terminal of its own.
        terminal: bool,
    },
    /// A runtime's interpreter, of a shim.
    Interpreter {
        /// The runtime.
        runtime: &'a str,
        /// All its arguments.
        arguments: &'a [String],
        /// The caller's variables that the policy accepts.
        environment: &'a BTreeMap<String, String>,
        /// Another path by which the caller speaks of the scratch.
        alias: Option<&'a Path>,
        /// On a terminal of its own.
        terminal: bool,
    },
    /// A program of stockade's own.
    Image(&'a Image<'a>),
    /// A request to a session; none: what the session itself is planned by.
    Session {
        /// The request.
        request: Option<&'a Request>,
        /// What the session keeps.
        kept: &'a Kept,
    },
}

impl<'a> Ask<'a> {
    /// Program and arguments, of a command or an interpreter.
    pub(crate) fn words(self) -> Vec<String> {
        match self {
            Ask::Command { command, .. } => command.to_vec(),
            Ask::Interpreter { runtime, arguments, .. } => std::iter::once(runtime.to_owned()).chain(arguments.iter().cloned()).collect(),
            Ask::Request(_) | Ask::Image(_) | Ask::Session { .. } => Vec::new(),
        }
    }

    pub(crate) fn kept(self) -> Option<&'a Kept> {
        match self {
            Ask::Session { kept, .. } => Some(kept),
            _ => None,
        }
    }

    /// What no other session has; none of a run by itself.
    pub(crate) fn number_of_session(self) -> Option<&'a str> {
        self.kept().map(Kept::number)
    }

    /// A refusal as it is meant here: earlier code of a session may have left no room for
    /// the next.
    pub(crate) fn worded(self, refusal: Refusal) -> Refusal {
        if self.kept().is_none() || refusal.reason != "scratch_full" {
            return refusal;
        }
        let message = format!("{}; or empty files of the session by `write`, or `reset` it", refusal.message);
        Refusal { verdict: stockade_protocol::Verdict::DiskLimit, message, ..refusal }
    }
}

/// A program of stockade's own to run behind every layer of a policy. No request can name
/// one: it is for clients of this crate that carry it.
#[derive(Clone, Debug, Default)]
pub struct Image<'a> {
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
    /// The run: its place in the registry is taken, what killed launchers left behind is
    /// swept, and the sandbox is begun.
    Run,
    /// A sandbox for a run that is yet to be asked for.
    Spare,
    /// The run, whose scratch turned out not to be idmappable.
    RunAfterRefusedIdmap,
}

/// An admitted run: its plan, and what else it needs.
pub struct Admission<'a> {
    /// The plan.
    pub plan: Plan,
    program: &'a [u8],
    image: Option<&'static [u8]>,
    files: Vec<(String, FileBytes<'a>)>,
    stdin: StdinBytes<'a>,
    scratch: Option<OpenedScratch>,
    trees: BTreeMap<PathBuf, OwnedFd>,
    collect: Vec<String>,
    record: Option<Record>,
    kept: Option<&'a Kept>,
    /// What was seen of the host, for a spare.
    pub(crate) seen: Seen,
    begun: Option<Result<Begun, LaunchError>>,
}

/// How far the sandbox of a run is.
pub enum Begun {
    /// It waits to be set up.
    Embryo(Embryo),
    /// It waits for its job.
    Waiting(Waiting),
}

impl Begun {
    /// Sets it up, where that is still to be done, and runs the plan in it.
    ///
    /// # Errors
    /// The program was not started.
    pub fn run(self, plan: &Plan, inputs: Inputs<'_>) -> Result<Outcome, LaunchError> {
        match self {
            Begun::Embryo(embryo) => stockade_launcher::launch(plan, inputs, embryo),
            Begun::Waiting(waiting) => stockade_launcher::run(plan, inputs, waiting),
        }
    }
}

/// A file's bytes: the request's own text, or decoded.
pub type FileBytes<'a> = std::borrow::Cow<'a, [u8]>;

#[derive(Default)]
enum StdinBytes<'a> {
    #[default]
    Null,
    Bytes(FileBytes<'a>),
    Relay,
}

impl<'a> Admission<'a> {
    /// Admits a run, or refuses it. `ahead`: what was begun of it already.
    ///
    /// # Errors
    /// The request is malformed, asks for too much, is not granted, or the host lacks a
    /// layer that the policy requires.
    pub fn new(ask: Ask<'a>, loaded: &Loaded, options: &Options, purpose: Purpose, ahead: Ahead) -> Result<Self, Refusal> {
        let claim = purpose != Purpose::Plan;
        let Loaded { policy, filters } = loaded;
        let identity = caller::identify(options.peer.as_ref())?;
        let mut narrowing = Narrowing::default();
        let mut parts = Parts::default();
        match ask {
            Ask::Request(request) => check_request(request, policy, &mut narrowing, &mut parts)?,
            Ask::Command { command, terminal } => {
                if command.iter().any(|word| word.contains('\0')) || command.first().is_none_or(String::is_empty) {
                    return Err(Refusal::bad_request("command_malformed", "the command is empty or holds a NUL byte"));
                }
                check_size("the command", command.iter())?;
                narrowing.program = Program::Command(command.to_vec());
                narrowing.terminal = terminal;
                parts.stdin = if terminal { StdinBytes::Null } else { StdinBytes::Relay };
            }
            Ask::Interpreter { runtime, arguments, environment, alias, terminal } => {
                // Neither can hold a NUL byte: both came through an execve.
                check_size("the arguments and accepted variables", arguments.iter().chain(environment.keys()).chain(environment.values()))?;
                narrowing.program = Program::Interpreter { runtime: runtime.to_owned() };
                narrowing.arguments = arguments.to_vec();
                narrowing.environment = environment.clone();
                narrowing.scratch_alias = alias.map(Path::to_path_buf);
                narrowing.terminal = terminal;
                parts.stdin = if terminal { StdinBytes::Null } else { StdinBytes::Relay };
            }
            Ask::Image(image) => {
                narrowing.program = Program::Image(image.name.to_owned());
                narrowing.limits = image.limits.clone();
                parts.image = Some(image.program);
                parts.stdin = StdinBytes::Bytes(image.stdin.into());
                parts.collect = image.collect.clone();
            }
            Ask::Session { request, kept } => {
                narrowing.session = true;
                if let Some(request) = request {
                    check_request(request, policy, &mut narrowing, &mut parts)?;
                    kept.check_request(request, &narrowing, options)?;
                }
            }
        }
        let wanted_scratch = scratch_of(ask, options)?;
        // Before anything of the host is looked at for whoever has no right to it.
        check_grants(&identity, &policy.name, None, options)?;
        // First of all that is done on the host, so that it makes its namespaces beside what
        // follows. That it cannot be made is said if nothing is found wrong with the request.
        let Ahead { embryo: early, spare } = ahead;
        let makes_one = claim && spare.is_none();
        let mut early = early.or_else(|| (makes_one && !facts::is_unified()).then(|| begin(&identity, UserNamespaces::Nested, None, None)));
        // A spare has its own; the id of a session's runs is the session's.
        let mut record = if spare.is_some() { None } else { claim_record(&identity, wanted_scratch.is_some(), claim)? };
        let kept = ask.kept();
        let unique = facts::unique_id(&identity, kept.and_then(Kept::record).or(record.as_ref()))?;
        let draft = Draft::of(policy);
        let foreseen = matches!(purpose, Purpose::Run | Purpose::Spare).then(|| foresee(&draft, &identity, unique.id)).flatten();
        let lay = |begun: &mut Option<Result<Embryo, LaunchError>>| {
            if let (Some(Ok(embryo)), Some(foundation)) = (begun, &foreseen) {
                embryo.lay_ahead(foundation);
            }
        };
        lay(&mut early);
        let mut host = facts::read(&identity, unique)?;
        let embryo = match (&host.cgroup, early) {
            // The cgroup comes first, and with it a new beginning.
            (CgroupFacts::V2 { .. }, _) | (_, None) if makes_one => {
                let mut begun = Some(begin(&identity, UserNamespaces::Nested, Some(&host.cgroup), record.as_mut()));
                lay(&mut begun);
                begun
            }
            (_, early) => early,
        };
        if identity.privileged && spare.is_none() && !matches!(embryo, Some(Ok(_))) {
            host.user_namespace_refusal = stockade_launcher::user_namespace_refusal();
        }
        let homes = if wanted_scratch.is_some() { caller::homes() } else { Vec::new() };
        let registry = facts::registry_directory(&identity);
        let opener = Opener {
            caller: &identity.caller,
            privileged: identity.privileged,
            unique_id: host.unique_id,
            idmap: match purpose {
                Purpose::Plan => Idmap::Try,
                Purpose::Run | Purpose::Spare => Idmap::Assume,
                Purpose::RunAfterRefusedIdmap => Idmap::Refused,
            },
            homes: &homes,
            registry: Some(&registry),
            ceiling: options.scratch.as_deref(),
        };
        let (interpreters, codecs) = scratch::as_caller(opener.caller, opener.privileged, || {
            check_interpreters(policy, options, &narrowing).map(|interpreters| {
                let codecs = codecs(policy, &interpreters);
                (interpreters, codecs)
            })
        })
        .map_err(|errno| Refusal::sandbox_error("caller_rights", format!("cannot change to the caller's rights: {errno}")))??;
        host.codecs = codecs;
        let scratch = match &wanted_scratch {
            Some(path) => {
                let judge = |real: &Path| {
                    refuse_replaceable(real, &identity, policy, options)?;
                    refuse_led_astray(real, &interpreters, policy)?;
                    check_grants(&identity, &policy.name, Some(real), options)
                };
                Some(open_scratch(path, policy, &opener, judge)?)
            }
            None => None,
        };
        narrowing.scratch = scratch.as_ref().map(|opened| opened.facts.clone());
        let more: Vec<PathBuf> =
            interpreters.values().flat_map(|interpreter| interpreter.read_only.iter().chain([&interpreter.program])).cloned().collect();
        let seen = facts::look_at(&mut host, policy, more.iter().map(PathBuf::as_path))?;
        audit::check_unseen(&identity, shown(policy, &more, scratch.as_ref()), &seen)?;
        let seen = if spare.is_some() || purpose == Purpose::Spare { own(&seen) } else { Seen::new() };
        let trees = open_trees(&identity, &interpreters, &opener)?;
        narrowing.interpreters = interpreters;
        let plan = draft.plan(filters, &host, &narrowing).map_err(|error| match error.callers_fault {
            true => Refusal::bad_request(error.reason, error.message),
            false => Refusal::sandbox_error(error.reason, error.message),
        })?;
        if plan.scratch.read_only && !parts.files.is_empty() {
            return Err(Refusal::bad_request(
                "files_in_read_only_scratch",
                format!("files: policy `{}` shows scratch read-only (access = \"ro\"), so none can be written there", policy.name),
            ));
        }
        let stood_ready = spare.is_some();
        // One that is not taken is gone before another is begun, and with it its record.
        let waits =
            spare.filter(|_| matches!(parts.stdin, StdinBytes::Null)).and_then(|spare| spare.for_run(&plan, &seen, scratch.as_ref()));
        if stood_ready && waits.is_none() {
            record = claim_record(&identity, wanted_scratch.is_some(), claim)?;
        }
        // Without user namespaces, which were refused above, or with another limit than the
        // policy's, the plan is not the one for which the sandbox was begun.
        let namespaces = plan.identity.user_namespaces;
        let is_unfit = |begun: &Result<Embryo, LaunchError>| match begun {
            Ok(embryo) => !embryo.fits(&plan),
            Err(_) => namespaces == UserNamespaces::Missing,
        };
        let mut begun = match embryo {
            _ if waits.is_some() => waits.map(|waiting| Ok(Begun::Waiting(waiting))),
            embryo if claim && (stood_ready || embryo.as_ref().is_some_and(is_unfit)) => {
                drop(embryo);
                Some(begin(&identity, namespaces, Some(&host.cgroup), record.as_mut()).map(Begun::Embryo))
            }
            embryo => embryo.map(|embryo| embryo.map(Begun::Embryo)),
        };
        let record_of_run = match &mut begun {
            Some(Ok(Begun::Waiting(waiting))) => waiting.record(),
            _ => record.as_mut(),
        };
        let writes_program = plan.scratch.host && claim && purpose != Purpose::Spare;
        if let (Some(record), Some((directory, name)), true) = (record_of_run, &plan.program_file, writes_program) {
            record.note_program(&directory.join(name))?;
        }
        let Parts { program, image, files, stdin, collect } = parts;
        Ok(Admission { plan, program, image, files, stdin, scratch, trees, collect, record, kept, seen, begun })
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
    pub fn into_parts(self, streams: Streams) -> Result<(Plan, Inputs<'a>, Begun), Refusal> {
        let begun = self.begun.ok_or_else(|| Refusal::sandbox_error("not_claimed", "this run was only planned"))??;
        // One that was set up has them.
        let kept = self.kept.filter(|_| matches!(begun, Begun::Embryo(_)));
        let kept = kept.map(|kept| kept.copies(&self.plan)).transpose()?;
        let inputs = Inputs {
            program: self.program,
            image: self.image,
            files: self.files,
            stdin: match self.stdin {
                StdinBytes::Null => Stdin::Null,
                StdinBytes::Bytes(bytes) => Stdin::Bytes(bytes),
                StdinBytes::Relay => Stdin::Relay,
            },
            scratch: self.scratch,
            kept,
            trees: self.trees,
            streams,
            collect: self.collect,
            record: self.record,
            client: None,
            meanwhile: None,
        };
        Ok((self.plan, inputs, begun))
    }
}

/// Which file or directory each path is, to be compared later.
fn own(seen: &BTreeMap<&Path, Option<facts::Number>>) -> Seen {
    seen.iter().map(|(path, number)| (path.to_path_buf(), *number)).collect()
}

/// Every path of the host that a run shows.
fn shown<'p>(policy: &'p Policy, more: &'p [PathBuf], scratch: Option<&'p OpenedScratch>) -> impl Iterator<Item = &'p Path> {
    let filesystem = &policy.filesystem;
    let paths = filesystem.read_only.iter().chain(&filesystem.read_only_optional).chain(more);
    let environments = policy.runtimes.values().filter_map(|runtime| runtime.venv.as_ref());
    paths.chain(environments).map(PathBuf::as_path).chain(scratch.map(|scratch| scratch.facts.path.as_path()))
}

/// What the plan's foundation will be, unless the host or the request makes an exception. Not
/// where the run has no host id of its own: then it depends on the scratch who it is.
fn foresee(draft: &Draft<'_>, identity: &Identity, unique: Option<u32>) -> Option<Foundation> {
    let (mode, outside) = if identity.privileged {
        let id = unique?;
        (Mode::Root, (id, id))
    } else {
        (Mode::Rootless, (identity.caller.uid, identity.caller.gid))
    };
    Some(draft.foundation(mode, outside))
}

/// Begins a sandbox; on cgroup v2 in a cgroup of its own.
fn begin(
    identity: &Identity,
    user_namespaces: UserNamespaces,
    cgroup: Option<&CgroupFacts>,
    record: Option<&mut Record>,
) -> Result<Embryo, LaunchError> {
    let v2 = match cgroup {
        Some(CgroupFacts::V2 { parent, vacate }) => Some(V2Parent { path: parent, vacate: *vacate }),
        _ => None,
    };
    Embryo::begin(identity.privileged, user_namespaces, v2, record)
}
