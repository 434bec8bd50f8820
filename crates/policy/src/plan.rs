//! The plan of one run: policy, host facts and the run request, resolved.
//!
//! A plan is a value. It contains every path, flag, limit and rule of the run, and
//! nothing is decided after it; `--dry-run` prints it and tests compare it whole.
//! Making a plan changes nothing on the host. It holds neither code nor files of a request. Its printed
//! text shows no values of variables, and no contents of a view's files.

mod commands;
mod confinement;
mod error;
mod modules;
mod root;
mod value;
mod view;

use std::{
    collections::BTreeMap,
    path::{Component, Path, PathBuf},
};

use serde::Serialize;
use stockade_protocol::{LimitKey, Limits};

use crate::{
    alert::AlertKind,
    facts::{CgroupFacts, HostFacts, ImageFacts, PathKind},
    filter::Filters,
    model::{Access, Degradable, OUTPUT, Policy, Runtime},
    whitelist,
};
pub use commands::COMMANDS;
use commands::Commands;
pub use confinement::kernel_memory;
use confinement::{plan_cgroup, plan_filter, plan_landlock, plan_rlimits, usable_cpus};
pub use error::{PlanError, how_made};
use root::plan_root;
pub use root::{PROC_MASKS, WRITABLE, is_in_image, is_program_directory};

pub use value::*;
pub use view::{MAX_INSTRUCTIONS, MAX_OPERATIONS, VIEW_SCRATCH, View, ViewEntry, ViewError};
use view::{ViewPlan, plan_view};

/// The values of one request, checked for form but not yet for permission.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RunRequest {
    /// What runs.
    pub program: Program,
    /// Arguments behind it.
    pub arguments: Vec<String>,
    /// Variables.
    pub environment: BTreeMap<String, String>,
    /// Limits.
    pub limits: BTreeMap<LimitKey, Option<u64>>,
    /// The host directory, opened and checked; none: a private one.
    pub scratch: Option<HostScratch>,
    /// The caller's path for it, where that goes through symlinks of the host.
    pub scratch_alias: Option<PathBuf>,
    /// `--runtime NAME=PATH`: interpreters in place of the policy's.
    pub interpreters: BTreeMap<String, Interpreter>,
    /// The payload gets a terminal.
    pub terminal: bool,
    /// It is one run of a session.
    pub session: bool,
    /// Which run of a compiled language it is; none: its command's, where nothing is kept for it.
    pub step: Option<RunStep>,
    /// What the caller wants to see in place of the policy's root.
    pub view: Option<View>,
    /// The host directories that the view has writable, opened and checked, in its order.
    pub writable_trees: Vec<HostScratch>,
    /// The sockets of the host that the view shows, likewise.
    pub sockets: Vec<HostSocket>,
}

/// The two runs of a compiled language. They share all that code may write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunStep {
    /// The compiler.
    Compile,
    /// The command, when that has succeeded.
    Program,
}

/// What runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Program {
    /// Code in a language, under a file name made for this run.
    Code {
        /// The request's `language`; none: the policy's.
        language: Option<String>,
        /// The name of its file; none: `main` and the runtime's ending in a scratch that begins
        /// empty, else the stem and that ending.
        filename: Option<String>,
        /// A name without ending that nothing in scratch has.
        stem: String,
    },
    /// A command, searched inside by its PATH.
    Command(Vec<String>),
    /// A runtime's interpreter by itself, with the request's arguments.
    Interpreter {
        /// The runtime, or an alias of it.
        runtime: String,
    },
    /// A program that Stockade brings, given as bytes, under this name.
    Carried(String),
}

impl Default for Program {
    fn default() -> Self {
        Program::Command(Vec::new())
    }
}

/// A host directory to expose.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostScratch {
    /// Its absolute path, without links.
    pub path: PathBuf,
    /// Its owner.
    pub owner: (u32, u32),
    /// Why root's launcher could not idmap it; an ordinary user's has no need to.
    pub idmap_refusal: Option<String>,
    /// What lies there and is kept from the code, by path below it: what the policy names, and what
    /// gives rights or leads out of it.
    pub protected: Vec<(PathBuf, PathKind, Protection)>,
}

/// A Unix socket of the host to show.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostSocket {
    /// Its absolute path, without links.
    pub path: PathBuf,
    /// Why root's launcher could not idmap it; an ordinary user's has no need to.
    pub idmap_refusal: Option<String>,
}

/// How a path below scratch is kept from the code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Protection {
    /// It may be read, not changed.
    ReadOnly,
    /// An empty, unreadable file or directory covers it.
    Hidden,
    /// A directory above such a path. It cannot be renamed, so that the paths below it, which
    /// the policy names, stay the same.
    Pinned,
}

/// An interpreter of the host with what belongs to it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Interpreter {
    /// The program to start.
    pub program: PathBuf,
    /// Directories that it needs (virtual environment, base prefix).
    pub read_only: Vec<PathBuf>,
}

/// The path of the private scratch.
pub const PRIVATE_SCRATCH: &str = "/scratch";
/// The name of what a compiler makes, where nothing else can have it.
pub const COMPILED: &str = "compiled";
/// The name of a program's file, without its ending, where nothing else can have it.
pub const MAIN: &str = "main";
/// The path of home, unless it is in scratch.
pub const HOME: &str = "/home/sandbox";
/// The least `memory` that a cgroup may enforce. Until it becomes the executor the sandbox's
/// first process shares the launcher's memory, and an out-of-memory kill takes all who share.
pub const MIN_MEMORY: u64 = 4 << 20;
/// What the set-up may put into the root tmpfs beside what code may write. The rest is taken away
/// before the code starts.
const ROOT_OVERHEAD: u64 = 512 << 10;

/// Works out the plan of one run. `filters` are those of the policy.
///
/// # Errors
/// The request asks for more than the policy allows, or the host lacks a layer that
/// the policy does not let the run go without.
pub fn plan(policy: &Policy, filters: &Filters, facts: &HostFacts, run_request: &RunRequest) -> Result<Plan, PlanError> {
    let mut degraded = Vec::new();
    let mut limits = narrow_limits(policy, run_request)?;
    let callers_limits = narrow_to_callers_limits(&mut limits, facts);
    refuse_too_little_memory(facts, run_request, &limits)?;
    let identity = plan_identity(policy, facts, run_request, &mut degraded)?;
    let scratch = plan_scratch(policy, run_request, &limits)?;
    let (argv, program_file, extra) = plan_program(policy, facts, run_request, &scratch)?;
    let commands = Commands::new(policy, facts, run_request, extra);
    let (root, writable, writable_trees) = match &run_request.view {
        None => {
            let (root, writable) = plan_root(policy, facts, run_request, &identity, &scratch, &commands, &limits)?;
            (root, writable, Vec::new())
        }
        Some(view) => {
            let ViewPlan { root, writable, writable_trees } = plan_view(view, policy, facts, run_request, &identity, &limits)?;
            (root, writable, writable_trees)
        }
    };
    let working_directories = match &run_request.view {
        Some(view) => view.working_directories.clone(),
        None => plan_working_directory(facts, run_request)?.into_iter().collect(),
    };
    let cgroup = plan_cgroup(policy, facts, &limits, &mut degraded)?;
    let (landlock, payload_landlock) = plan_landlock(policy, facts, &root, &writable, &scratch, &mut degraded)?;
    let environment = plan_environment(policy, facts, run_request, &scratch, commands)?;
    let callers_filters = run_request.view.as_ref().map_or_else(Vec::new, |view| view.filters.clone());
    let filter =
        plan_filter(policy, filters, (scratch.host && !scratch.read_only) || !writable_trees.is_empty(), !callers_filters.is_empty());
    let rlimits = plan_rlimits(facts, &limits, matches!(cgroup, CgroupPlan::Absent { .. }));
    let cpus = usable_cpus(facts, &limits);
    let egress = plan_egress(policy);
    Ok(Plan {
        policy: policy.name.clone(),
        policy_sha256: policy.sha256.clone(),
        mode: if facts.privileged { Mode::Root } else { Mode::Rootless },
        identity,
        root,
        root_size: root_size(&limits),
        image_root: facts.image.as_ref().map(plan_image),
        scratch,
        writable_trees,
        working_directories,
        argv,
        environment: environment.keys().cloned().collect(),
        environment_values: environment.iter().map(|(name, value)| format!("{name}={value}")).collect(),
        program_file,
        rlimits,
        cgroup,
        cpus,
        landlock,
        payload_landlock,
        filter,
        callers_filters,
        limits,
        callers_limits,
        egress,
        terminal: run_request.terminal,
        session: run_request.session || run_request.step.is_some(),
        carried_program: matches!(run_request.program, Program::Carried(_)),
        degraded,
    })
}

/// The image that the root is made of.
fn plan_image(image: &ImageFacts) -> ImageRoot {
    let ImageFacts { name, digest, user, malformed_variables, .. } = image.clone();
    ImageRoot { name, digest, user, malformed_variables }
}

/// Where a command starts that is given no directory: the image's working directory. Code has its
/// file in scratch, and starts there.
fn plan_working_directory(facts: &HostFacts, run_request: &RunRequest) -> Result<Option<PathBuf>, PlanError> {
    let Some(image) = &facts.image else { return Ok(None) };
    let Some((path, there)) = &image.working_directory else { return Ok(None) };
    if run_request.session || run_request.scratch.is_some() || !matches!(run_request.program, Program::Command(_)) {
        return Ok(None);
    }
    let is_plain = path.is_absolute() && path.components().skip(1).all(|part| matches!(part, Component::Normal(_)));
    let why = match there {
        _ if !is_plain => "is no absolute path without `..`",
        Some(PathKind::File) => "is no directory in it",
        _ => return Ok(Some(path.components().collect())),
    };
    Err(PlanError::WorkingDirectory { image: image.title(), path: path.clone(), why })
}

/// The program that stands for one that the policy names: itself where the host has it, or what
/// the image has in its place.
fn program_there(facts: &HostFacts, program: &Path) -> Option<PathBuf> {
    match &facts.image {
        Some(image) => image.programs.get(program).cloned(),
        None => (facts.paths.get(program) == Some(&PathKind::File)).then(|| program.to_path_buf()),
    }
}

/// The variables that the policy sets, and those of the image, which knows where its programs lie.
fn base_environment(policy: &Policy, facts: &HostFacts) -> BTreeMap<String, String> {
    let of_image = facts.image.iter().flat_map(|image| image.environment.clone()).filter(|(name, _)| name != "TMPDIR");
    policy.environment.set.clone().into_iter().chain(of_image).collect()
}

fn root_size(limits: &Limits) -> Option<u64> {
    limits.get(LimitKey::TmpSize).map(|size| size + ROOT_OVERHEAD)
}

fn plan_egress(policy: &Policy) -> Option<EgressPlan> {
    let whitelist = policy.egress.whitelist.clone();
    let alerts = policy.audit.alerts.iter().filter(|alert| alert.kind == AlertKind::Egress).cloned().collect();
    (!whitelist.is_empty()).then_some(EgressPlan { whitelist, resolver: whitelist::RESOLVER, alerts })
}

/// Setting up the sandbox must not reach the limit: see [`MIN_MEMORY`].
fn refuse_too_little_memory(facts: &HostFacts, run_request: &RunRequest, limits: &Limits) -> Result<(), PlanError> {
    let Some(memory) = limits.get(LimitKey::Memory).filter(|memory| *memory < MIN_MEMORY) else { return Ok(()) };
    if matches!(facts.cgroup, CgroupFacts::Unavailable { .. }) {
        return Ok(());
    }
    let asked_for = run_request.limits.contains_key(&LimitKey::Memory);
    Err(PlanError::MemoryTooSmall { memory, asked_for })
}

/// Limits that an rlimit of the caller's bounds too: the resource, and its unit in theirs.
const CALLERS_LIMITS: [(LimitKey, u32, u64); 5] = [
    (LimitKey::Cpu, 0, 1000),
    (LimitKey::FileSize, 1, 1),
    (LimitKey::Stack, 3, 1),
    (LimitKey::OpenFiles, 7, 1),
    (LimitKey::AddressSpace, 9, 1),
];

fn narrow_limits(policy: &Policy, run_request: &RunRequest) -> Result<Limits, PlanError> {
    let mut limits = policy.limits.clone();
    for (&key, &wanted) in &run_request.limits {
        let most = policy.limits_max.get(key);
        let fits = match (wanted, most) {
            (_, None) => true,
            (Some(wanted), Some(most)) => wanted <= most,
            (None, Some(_)) => false,
        };
        if !fits {
            return Err(PlanError::LimitAboveMaximum { policy: policy.name.clone(), key, wanted, most });
        }
        limits.set(key, wanted);
    }
    let Some(memory) = limits.get(LimitKey::Memory) else { return Ok(limits) };
    if charged_to_memory(&limits, run_request) < memory {
        return Ok(limits);
    }
    lower_open_sizes(&limits, run_request, memory).ok_or_else(|| {
        let (tmp, scratch) = (limits.get(LimitKey::TmpSize), limits.get(LimitKey::ScratchSize));
        PlanError::TmpfsAboveMemory { tmp, scratch, memory }
    })
}

/// The sizes of file systems whose files are kept in the run's memory.
fn sizes_in_memory(run_request: &RunRequest) -> &'static [LimitKey] {
    if run_request.scratch.is_some() { &[LimitKey::TmpSize] } else { &[LimitKey::TmpSize, LimitKey::ScratchSize] }
}

/// What files may take of the run's memory.
fn charged_to_memory(limits: &Limits, run_request: &RunRequest) -> u64 {
    let sizes = sizes_in_memory(run_request).iter().map(|key| limits.get(*key).unwrap_or(u64::MAX));
    sizes.fold(0, u64::saturating_add)
}

/// The limits where a request lowers `memory` and leaves sizes of file systems open: each of these
/// is at most a quarter of the memory that the sizes it states leave. None where that does not
/// fit, or in a session, whose file systems are made already.
fn lower_open_sizes(limits: &Limits, run_request: &RunRequest, memory: u64) -> Option<Limits> {
    if run_request.session || !run_request.limits.contains_key(&LimitKey::Memory) {
        return None;
    }
    let is_stated = |key: &&LimitKey| run_request.limits.contains_key(key);
    let (stated, open): (Vec<&LimitKey>, Vec<&LimitKey>) = sizes_in_memory(run_request).iter().partition(is_stated);
    let stated = stated.into_iter().map(|key| limits.get(*key).unwrap_or(u64::MAX)).fold(0, u64::saturating_add);
    // A tmpfs of size 0 has no limit.
    let most = (memory.saturating_sub(stated) / 4).max(1);
    let mut lowered = limits.clone();
    for key in open {
        lowered.set(*key, Some(limits.get(*key).map_or(most, |size| size.min(most))));
    }
    (charged_to_memory(&lowered, run_request) < memory).then_some(lowered)
}

/// Takes the caller's hard limits where they are lower: no process below can exceed them. The
/// keys of those.
fn narrow_to_callers_limits(limits: &mut Limits, facts: &HostFacts) -> Vec<LimitKey> {
    let mut narrowed = Vec::new();
    for (key, resource, unit) in CALLERS_LIMITS {
        // The kernel takes a limit of 0 s of CPU time for 1 s.
        let hard = facts.hard_limits.get(&resource).map(|hard| if key == LimitKey::Cpu { *hard.max(&1) } else { *hard });
        let Some(hard) = hard.map(|hard| hard.saturating_mul(unit)) else { continue };
        if limits.get(key).is_none_or(|value| value > hard) {
            limits.set(key, Some(hard));
            narrowed.push(key);
        }
    }
    narrowed
}

fn may_degrade(policy: &Policy, facts: &HostFacts, layer: Degradable) -> bool {
    let list = if facts.privileged { &policy.degrade.root } else { &policy.degrade.rootless };
    list.contains(&layer)
}

/// Continues without a layer if the policy's `[degrade]` allows that, else refuses.
fn degrade(
    policy: &Policy,
    facts: &HostFacts,
    layer: Degradable,
    reason: String,
    degraded: &mut Vec<(&'static str, String)>,
) -> Result<(), PlanError> {
    if may_degrade(policy, facts, layer) {
        degraded.push((layer.name(), reason));
        return Ok(());
    }
    let mode = if facts.privileged { "root" } else { "rootless" };
    Err(PlanError::LayerMissing { policy: policy.name.clone(), layer, mode, why: reason })
}

fn plan_identity(
    policy: &Policy,
    facts: &HostFacts,
    run_request: &RunRequest,
    degraded: &mut Vec<(&'static str, String)>,
) -> Result<Identity, PlanError> {
    if let Some(refusal) = &facts.user_namespace_refusal {
        return plan_identity_on_host(policy, facts, run_request, refusal, degraded);
    }
    let caller = (facts.caller.uid, facts.caller.gid);
    let (mut outside, mut idmapped_to) = (caller, None);
    if facts.privileged {
        let refusal = match (&run_request.scratch, facts.unique_id) {
            (_, None) => facts.unique_id_refusal.clone().or_else(|| Some(String::from("no host uid could be set aside for the run"))),
            (Some(HostScratch { path, idmap_refusal: Some(why), .. }), _) => {
                Some(format!("scratch {} cannot be idmapped: {why}", path.display()))
            }
            _ => None,
        };
        match (refusal, facts.unique_id) {
            (None, Some(id)) => {
                outside = (id, id);
                // Each tree is idmapped for its own owner.
                idmapped_to = run_request.scratch.as_ref().or(run_request.writable_trees.first()).map(|scratch| scratch.owner);
            }
            (refusal, _) => {
                degrade(policy, facts, Degradable::UniqueUid, refusal.unwrap_or_default(), degraded)?;
                outside = run_request.scratch.as_ref().map_or(caller, |scratch| scratch.owner);
                if outside.0 == 0 || outside.1 == 0 {
                    return Err(PlanError::RootUid);
                }
            }
        }
    }
    Ok(Identity {
        user_namespaces: UserNamespaces::Nested,
        inside: ids_inside(policy, facts, run_request),
        outside,
        idmapped_to,
        groups_kept: if facts.privileged { Vec::new() } else { facts.caller.groups.clone() },
        user: policy.identity.user.clone(),
        hostname: hostname(policy, run_request),
    })
}

/// The ids of the code. A view has its caller's, as bubblewrap does, but never root's.
fn ids_inside(policy: &Policy, facts: &HostFacts, run_request: &RunRequest) -> (u32, u32) {
    let own = (policy.identity.uid, policy.identity.gid);
    let Some(view) = &run_request.view else { return own };
    let callers = |id: u32, own: u32| if id == 0 { own } else { id };
    let (uid, gid) = view.ids;
    (uid.unwrap_or_else(|| callers(facts.caller.uid, own.0)), gid.unwrap_or_else(|| callers(facts.caller.gid, own.1)))
}

fn hostname(policy: &Policy, run_request: &RunRequest) -> String {
    let of_view = run_request.view.as_ref().and_then(|view| view.hostname.as_ref());
    of_view.unwrap_or(&policy.identity.hostname).clone()
}

/// Root without user namespaces. Then only a dedicated uid separates the run from the host's
/// users, so it must have one.
fn plan_identity_on_host(
    policy: &Policy,
    facts: &HostFacts,
    run_request: &RunRequest,
    refusal: &str,
    degraded: &mut Vec<(&'static str, String)>,
) -> Result<Identity, PlanError> {
    degrade(policy, facts, Degradable::UserNamespace, refusal.to_owned(), degraded)?;
    let Some(id) = facts.unique_id else {
        let why = facts.unique_id_refusal.as_deref().unwrap_or("no host uid could be set aside for the run");
        return Err(PlanError::NoUniqueUid(why.to_owned()));
    };
    if !policy.egress.whitelist.is_empty() {
        // The gate has the run's uid on the host: a user namespace must separate the two.
        return Err(PlanError::EgressOnHost { policy: policy.name.clone(), why: refusal.to_owned() });
    }
    if let Some(scratch) = run_request.scratch.as_ref().or(run_request.writable_trees.first()) {
        return Err(PlanError::ScratchOnHost { path: scratch.path.clone(), why: refusal.to_owned() });
    }
    Ok(Identity {
        user_namespaces: UserNamespaces::Missing,
        inside: (id, id),
        outside: (id, id),
        idmapped_to: None,
        groups_kept: Vec::new(),
        user: policy.identity.user.clone(),
        hostname: hostname(policy, run_request),
    })
}

fn plan_scratch(policy: &Policy, run_request: &RunRequest, limits: &Limits) -> Result<ScratchPlan, PlanError> {
    let read_only = policy.scratch.access == Access::Ro;
    let kind = |kind: PathKind| match kind {
        PathKind::Directory => PathKindName::Directory,
        PathKind::File => PathKindName::File,
    };
    let (path, host, protected) = match &run_request.scratch {
        None if run_request.view.is_some() => (PathBuf::from(VIEW_SCRATCH), false, Vec::new()),
        None => (PathBuf::from(PRIVATE_SCRATCH), false, Vec::new()),
        Some(scratch) => {
            refuse_covered_scratch(policy, &scratch.path)?;
            (
                scratch.path.clone(),
                true,
                scratch.protected.iter().map(|(path, k, protection)| (path.clone(), kind(*k), *protection)).collect(),
            )
        }
    };
    Ok(ScratchPlan { path, host, read_only, size: limits.get(LimitKey::ScratchSize), files: limits.get(LimitKey::ScratchFiles), protected })
}

/// A host scratch has the same path inside, so it must not cover a directory of the sandbox.
fn refuse_covered_scratch(policy: &Policy, path: &Path) -> Result<(), PlanError> {
    match taken(policy, path) {
        Some(taken) => Err(PlanError::ScratchCovered { path: path.to_path_buf(), taken: taken.to_path_buf() }),
        None => Ok(()),
    }
}

/// The sandbox directory that a path equals, contains or lies in.
fn taken<'p>(policy: &'p Policy, path: &Path) -> Option<&'p Path> {
    let ours = ["/proc", "/dev", "/sys", "/etc", "/bin", "/sbin", "/lib", "/lib64", "/run"].into_iter().map(Path::new);
    let shown = policy.filesystem.read_only.iter().chain(&policy.filesystem.read_only_optional).map(PathBuf::as_path);
    ours.chain(shown).find(|taken| path.starts_with(taken) || taken.starts_with(path))
}

type ProgramPlan = (Vec<String>, Option<(PathBuf, String)>, Vec<PathBuf>);

fn plan_program(policy: &Policy, facts: &HostFacts, run_request: &RunRequest, scratch: &ScratchPlan) -> Result<ProgramPlan, PlanError> {
    let (language, file) = match &run_request.program {
        Program::Command(command) => {
            let command = match &facts.image {
                // A session starts nothing itself; each of its requests says what it starts.
                Some(image) if command.is_empty() && image.command.is_empty() && !run_request.session => {
                    return Err(PlanError::NoCommand { image: image.title() });
                }
                Some(image) if command.is_empty() => &image.command,
                _ => command,
            };
            let argv = command.iter().chain(&run_request.arguments).cloned().collect();
            return Ok((argv, None, interpreter_paths(run_request, None)));
        }
        Program::Carried(name) => return Ok((vec![name.clone()], None, Vec::new())),
        Program::Interpreter { runtime } => (runtime.as_str(), None),
        Program::Code { language, filename, stem } => (language.as_deref().unwrap_or(&policy.language), Some((filename, stem))),
    };
    let (name, runtime) = find_runtime(policy, language)?;
    let interpreter = plan_interpreter(name, runtime, facts, run_request)?;
    // An image has the environment itself, or its interpreter was not found.
    let own = facts.image.is_none() && !run_request.interpreters.contains_key(name);
    let extra = interpreter_paths(run_request, runtime.venv.as_ref().filter(|_| own));
    let Some((filename, stem)) = file else {
        if runtime.compiles() {
            return Err(PlanError::Compiles { runtime: name.to_owned() });
        }
        let argv = std::iter::once(interpreter.to_string_lossy().into_owned()).chain(run_request.arguments.iter().cloned());
        return Ok((argv.collect(), None, extra));
    };
    let directory = if scratch.read_only { PathBuf::from("/tmp") } else { scratch.path.clone() };
    let begins_empty = !run_request.session && (!scratch.host || scratch.read_only);
    let file = (directory, filename.clone().unwrap_or_else(|| runtime.file_name(if begins_empty { MAIN } else { stem })));
    let output = output(scratch, run_request.session.then_some(stem));
    let (words, program) = match run_request.step {
        Some(RunStep::Compile) => (&runtime.compile, plan_compiler(name, runtime, facts, interpreter)?),
        _ if runtime.runs_output() => (&runtime.command, output.clone()),
        _ => (&runtime.command, interpreter),
    };
    let is_read = words.iter().any(|word| word.contains("{file}"));
    let path = file.0.join(&file.1);
    // The request names the file: nothing is replaced in that name.
    let place = |word: &String| {
        let around: Vec<String> = word.split("{file}").map(|part| part.replace(OUTPUT, &output.to_string_lossy())).collect();
        around.join(&path.to_string_lossy())
    };
    let mut argv = vec![program.to_string_lossy().into_owned()];
    argv.extend(words.iter().skip(1).map(place));
    if run_request.step != Some(RunStep::Compile) {
        argv.extend(run_request.arguments.iter().cloned());
    }
    Ok((argv, is_read.then_some(file), extra))
}

/// Where a compiler puts what it makes: beside what code may write, and never in a host scratch.
/// `stem`: its name in a session, whose earlier code may have taken any other.
pub fn output(scratch: &ScratchPlan, stem: Option<&String>) -> PathBuf {
    temporary(scratch).join(stem.map_or(COMPILED, String::as_str))
}

/// The compiler of a runtime: the chosen one where the program is what it makes, else its own.
fn plan_compiler(name: &str, runtime: &Runtime, facts: &HostFacts, interpreter: PathBuf) -> Result<PathBuf, PlanError> {
    if runtime.runs_output() {
        return Ok(interpreter);
    }
    let compiler = runtime.compiler().map(Path::to_path_buf).unwrap_or_default();
    match (program_there(facts, &compiler), &facts.image) {
        (Some(compiler), _) => Ok(compiler),
        (None, Some(image)) => Err(PlanError::NotInImage { runtime: name.to_owned(), image: image.title(), program: compiler }),
        (None, None) => Err(PlanError::CompilerMissing { runtime: name.to_owned(), compiler }),
    }
}

/// The interpreter of a runtime: the chosen one, that of its virtual environment, or the
/// command's own.
fn plan_interpreter(name: &str, runtime: &Runtime, facts: &HostFacts, run_request: &RunRequest) -> Result<PathBuf, PlanError> {
    let chosen = run_request.interpreters.get(name).map(|chosen| chosen.program.clone());
    let interpreter = chosen.clone().unwrap_or_else(|| runtime.interpreter());
    if let Some(program) = program_there(facts, &interpreter) {
        return Ok(program);
    }
    if let Some(image) = &facts.image {
        return Err(PlanError::NotInImage { runtime: name.to_owned(), image: image.title(), program: interpreter });
    }
    let venv = runtime.venv.clone().filter(|_| chosen.is_none());
    Err(PlanError::InterpreterMissing { runtime: name.to_owned(), interpreter, venv })
}

/// Every directory that a chosen interpreter needs, and the runtime's own venv.
fn interpreter_paths(run_request: &RunRequest, venv: Option<&PathBuf>) -> Vec<PathBuf> {
    run_request.interpreters.values().flat_map(|interpreter| interpreter.read_only.iter()).chain(venv).cloned().collect()
}

/// A runtime by name or alias, case ignored.
///
/// # Errors
/// The policy has no runtime of that name; the message lists the names.
pub fn find_runtime<'a>(policy: &'a Policy, language: &str) -> Result<(&'a str, &'a Runtime), PlanError> {
    policy
        .runtimes
        .iter()
        .find(|(name, runtime)| {
            name.eq_ignore_ascii_case(language) || runtime.aliases.iter().any(|alias| alias.eq_ignore_ascii_case(language))
        })
        .map(|(name, runtime)| (name.as_str(), runtime))
        .ok_or_else(|| {
            let known: Vec<&str> = policy.runtimes.keys().map(String::as_str).collect();
            let nearest = crate::names::nearest(language, known.iter().copied()).map(str::to_owned);
            PlanError::UnknownLanguage { language: language.to_owned(), policy: policy.name.clone(), nearest, known: known.join(", ") }
        })
}

fn home_of(scratch: &ScratchPlan, in_scratch: bool) -> PathBuf {
    if in_scratch { scratch.path.clone() } else { PathBuf::from(HOME) }
}

/// Where sockets and fifos may be made, and so where TMPDIR points: `/tmp`, unless scratch
/// lies below it, where the rule would reach.
fn temporary(scratch: &ScratchPlan) -> &'static Path {
    if scratch.path.starts_with("/tmp") { Path::new(HOME) } else { Path::new("/tmp") }
}

fn plan_environment(
    policy: &Policy,
    facts: &HostFacts,
    run_request: &RunRequest,
    scratch: &ScratchPlan,
    commands: Commands,
) -> Result<BTreeMap<String, String>, PlanError> {
    let mut all = base_environment(policy, facts);
    if run_request.view.is_none() {
        commands.set_path(&mut all);
    }
    all.insert(String::from("HOME"), home_of(scratch, policy.scratch.home).to_string_lossy().into_owned());
    all.insert(String::from("USER"), policy.identity.user.clone());
    all.insert(String::from("LOGNAME"), policy.identity.user.clone());
    if all.get("TMPDIR").is_some_and(|directory| directory == "/tmp") {
        all.insert(String::from("TMPDIR"), temporary(scratch).to_string_lossy().into_owned());
    }
    let language = match &run_request.program {
        Program::Code { language, .. } => Some(language.as_deref().unwrap_or(&policy.language)),
        Program::Interpreter { runtime } => Some(runtime.as_str()),
        Program::Command(_) | Program::Carried(_) => None,
    };
    if let Some(language) = language {
        let (_, runtime) = find_runtime(policy, language)?;
        all.extend(runtime.environment.clone());
    }
    // A compiler is the policy's program: a request's variables are for its own.
    if run_request.step == Some(RunStep::Compile) {
        return Ok(all);
    }
    if let Some(view) = &run_request.view {
        all.insert(String::from("HOME"), String::from("/"));
        if view.clears_environment {
            all.clear();
        }
        for (name, value) in &view.environment {
            match value {
                Some(value) => all.insert(name.clone(), value.clone()),
                None => all.remove(name),
            };
        }
        return Ok(all);
    }
    for (name, value) in &run_request.environment {
        if !policy.environment.accepts(name) {
            return Err(PlanError::VariableNotAccepted { policy: policy.name.clone(), name: name.clone() });
        }
        all.insert(name.clone(), value.clone());
    }
    Ok(all)
}
