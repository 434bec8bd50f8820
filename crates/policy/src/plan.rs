//! The plan of one run: policy, host facts and the request's narrowing, resolved.
//!
//! A plan is a value. Every path, flag, limit and rule of the run stands in it, and
//! nothing is decided after it; `--dry-run` prints it and tests compare it whole.
//! Making one touches nothing. It holds no contents: neither code nor files, and of
//! environment variables only what the policy itself sets.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use serde::Serialize;
use stockade_protocol::{LimitKey, Limits};

use crate::{
    facts::{CgroupFacts, HostFacts, PathKind},
    filter::Filters,
    model::{Access, Degradable, Origin, Policy, Runtime},
};

/// What one request asks for, checked for form but not yet for permission.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Narrowing {
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
    /// `--runtime NAME=PATH`: interpreters in place of the policy's.
    pub interpreters: BTreeMap<String, Interpreter>,
    /// The payload talks to a terminal.
    pub terminal: bool,
}

/// What runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Program {
    /// Code in a language, under a file name made for this run.
    Code {
        /// The request's `language`; none: the policy's.
        language: Option<String>,
        /// A name without ending that nothing in scratch has.
        stem: String,
    },
    /// A command, found inside by its PATH.
    Command(Vec<String>),
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
    /// Who owns it.
    pub owner: (u32, u32),
    /// Its file system took an idmap, or root does not launch.
    pub idmappable: bool,
    /// What lies there and matches the policy's `hidden` and `read_only`, by path below it.
    pub protected: Vec<(PathBuf, PathKind, Protection)>,
}

/// How a path below scratch is kept from the code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Protection {
    /// It may be read, not changed.
    ReadOnly,
    /// An empty, unreadable thing stands in its place.
    Hidden,
}

/// An interpreter of the host with what belongs to it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Interpreter {
    /// The program to start.
    pub program: PathBuf,
    /// Directories that it needs (virtual environment, base prefix).
    pub read_only: Vec<PathBuf>,
}

/// Why there is no plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct PlanError {
    /// The caller asked for too much (else the host offers too little).
    pub callers_fault: bool,
    /// A stable identifier.
    pub reason: &'static str,
    /// What, where, why and how to mend it.
    pub message: String,
}

fn asked(reason: &'static str, message: String) -> PlanError {
    PlanError { callers_fault: true, reason, message }
}

fn lacking(reason: &'static str, message: String) -> PlanError {
    PlanError { callers_fault: false, reason, message }
}

/// Who launches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// An ordinary user.
    Rootless,
    /// Root, for itself or for another.
    Root,
}

/// The ids of one run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Identity {
    /// Uid and gid inside.
    pub inside: (u32, u32),
    /// Uid and gid on the host.
    pub outside: (u32, u32),
    /// The ids on disk of files in an idmapped scratch; none: no idmap.
    pub idmapped_to: Option<(u32, u32)>,
    /// Supplementary groups that stay, because only root can drop them.
    pub groups_kept: Vec<u32>,
    /// Login name inside.
    pub user: String,
    /// Host name inside.
    pub hostname: String,
}

/// One entry of the sandbox's root, made in this order. Targets are relative to it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "make")]
pub enum RootEntry {
    /// A directory of the root tmpfs.
    Directory {
        /// Where.
        target: PathBuf,
        /// Permission bits.
        mode: u32,
    },
    /// A symbolic link.
    Link {
        /// Where.
        target: PathBuf,
        /// What it says.
        to: PathBuf,
    },
    /// A small file of ours.
    File {
        /// Where.
        target: PathBuf,
        /// Permission bits.
        mode: u32,
        /// Its text.
        text: String,
    },
    /// A host path, read-only, nosuid and nodev.
    Bind {
        /// The host's path.
        source: PathBuf,
        /// Where.
        target: PathBuf,
        /// Programs may be run from it.
        executable: bool,
    },
    /// A device node of the host.
    Device {
        /// The host's node.
        source: PathBuf,
        /// Where.
        target: PathBuf,
    },
    /// A writable directory: a part of the root tmpfs bound onto itself.
    Writable {
        /// Where.
        target: PathBuf,
    },
    /// A fresh proc.
    Proc {
        /// Where.
        target: PathBuf,
    },
    /// A fresh devpts.
    Devpts {
        /// Where.
        target: PathBuf,
    },
    /// Something of proc replaced by an empty thing, where it exists.
    Mask {
        /// Where.
        target: PathBuf,
    },
}

/// The writable directory of one run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ScratchPlan {
    /// Its path inside, which for a host directory is its path there.
    pub path: PathBuf,
    /// A host directory (else a tmpfs that vanishes).
    pub host: bool,
    /// Read-only.
    pub read_only: bool,
    /// Bytes: a tmpfs's size, or by how much the host directory may grow.
    pub size: Option<u64>,
    /// Files likewise.
    pub files: Option<u64>,
    /// Protected paths below it.
    pub protected: Vec<(PathBuf, PathKindName, Protection)>,
}

/// [`PathKind`] as the plan prints it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PathKindName {
    /// A directory.
    Directory,
    /// Anything else.
    File,
}

/// A value to write into a cgroup's file, and to find there afterwards.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CgroupSetting {
    /// The v1 controller; of v2 none.
    pub controller: Option<&'static str>,
    /// The file.
    pub file: &'static str,
    /// The value.
    pub value: String,
    /// The file may be missing (a kernel built without swap accounting).
    pub optional: bool,
}

/// The cgroup of one run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "version")]
pub enum CgroupPlan {
    /// One directory in each v1 hierarchy.
    V1 {
        /// Parent directory by controller.
        parents: BTreeMap<String, PathBuf>,
        /// Limits.
        settings: Vec<CgroupSetting>,
    },
    /// One v2 directory.
    V2 {
        /// Its parent.
        parent: PathBuf,
        /// The launcher leaves the parent first.
        vacate: bool,
        /// Limits.
        settings: Vec<CgroupSetting>,
    },
    /// None: rlimits stand in.
    Absent {
        /// Why.
        reason: String,
    },
}

/// A rule of Landlock.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LandlockRule {
    /// A path inside.
    pub path: PathBuf,
    /// Access rights as bits of `linux/landlock.h`.
    pub rights: u64,
}

/// Landlock's part.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LandlockPlan {
    /// The kernel's ABI.
    pub abi: u32,
    /// Rights that are refused unless a rule allows them.
    pub handled: u64,
    /// Signals and abstract sockets stay inside.
    pub scoped: u64,
    /// What is allowed.
    pub rules: Vec<LandlockRule>,
}

/// A resource limit of the payload.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RlimitPlan {
    /// The kernel's name.
    pub name: &'static str,
    /// The kernel's number.
    pub resource: u32,
    /// Soft and hard value; null: unlimited.
    pub value: Option<u64>,
}

/// The system call filter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FilterPlan {
    /// SHA-256 of its instructions in hex.
    pub sha256: String,
    /// Instructions, `struct sock_filter` each.
    #[serde(skip)]
    pub program: Vec<u64>,
    /// How many there are.
    pub instructions: usize,
    /// Calls whose refusal ends the run, by number.
    #[serde(skip)]
    pub kill: BTreeSet<u32>,
    /// Their names.
    pub kill_names: Vec<String>,
}

/// Every decision of one run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Plan {
    /// The policy's name.
    pub policy: String,
    /// The policy's hash.
    pub policy_sha256: String,
    /// Who launches.
    pub mode: Mode,
    /// Ids.
    pub identity: Identity,
    /// The root, entry by entry.
    pub root: Vec<RootEntry>,
    /// Size of the root tmpfs, which carries `/tmp`, `/dev/shm` and home.
    pub root_size: Option<u64>,
    /// Scratch.
    pub scratch: ScratchPlan,
    /// Argument list of the payload.
    pub argv: Vec<String>,
    /// Names of the payload's variables.
    pub environment: Vec<String>,
    /// Their values, `NAME=value`; never printed: some are the caller's.
    #[serde(skip)]
    pub environment_values: Vec<String>,
    /// Where the code is written, and under which name; none for a command.
    pub program_file: Option<(PathBuf, String)>,
    /// Resource limits of the payload.
    pub rlimits: Vec<RlimitPlan>,
    /// Cgroup.
    pub cgroup: CgroupPlan,
    /// CPUs that the payload may run on.
    pub cpus: Vec<u32>,
    /// Landlock.
    pub landlock: LandlockPlan,
    /// Landlock of the payload alone, which shuts off pid 1.
    pub payload_landlock: LandlockPlan,
    /// The system call filter.
    pub filter: FilterPlan,
    /// The limits in force.
    #[serde(serialize_with = "limits_by_name")]
    pub limits: Limits,
    /// A pty of the sandbox's own.
    pub terminal: bool,
    /// Layers that this run goes without, and why.
    pub degraded: Vec<(&'static str, String)>,
}

fn limits_by_name<S: serde::Serializer>(limits: &Limits, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(limits.iter().map(|(key, value)| (key.json_name(), value)))
}

/// Access bits of `linux/landlock.h`, named as there. Kept here because `policy` makes
/// no system calls and so does not link `sys`; a test of `launcher` compares them.
pub mod access {
    #![allow(missing_docs, reason = "the kernel's names")]
    pub const EXECUTE: u64 = 1;
    pub const WRITE_FILE: u64 = 1 << 1;
    pub const READ_FILE: u64 = 1 << 2;
    pub const READ_DIR: u64 = 1 << 3;
    pub const MAKE_CHAR: u64 = 1 << 6;
    pub const MAKE_SOCK: u64 = 1 << 9;
    pub const MAKE_FIFO: u64 = 1 << 10;
    pub const MAKE_BLOCK: u64 = 1 << 11;
    pub const REFER: u64 = 1 << 13;
    pub const IOCTL_DEV: u64 = 1 << 15;
    pub const ALL: u64 = (1 << 16) - 1;
    pub const READ: u64 = READ_FILE | READ_DIR;
    /// Everything but devices.
    pub const WRITE_TREE: u64 = ALL & !(MAKE_CHAR | MAKE_BLOCK | IOCTL_DEV);
    /// Regular files, directories and links only.
    pub const WRITE_PLAIN: u64 = WRITE_TREE & !(MAKE_SOCK | MAKE_FIFO);

    /// Every right that a kernel with this ABI handles.
    pub const fn handled(abi: u32) -> u64 {
        match abi {
            0 => 0,
            1 => (1 << 13) - 1,
            2 => (1 << 14) - 1,
            3 | 4 => (1 << 15) - 1,
            _ => ALL,
        }
    }
}

/// Where the private scratch stands.
pub const PRIVATE_SCRATCH: &str = "/scratch";
/// Where home stands, unless it is in scratch.
pub const HOME: &str = "/home/sandbox";
/// What tells of the host or of other users and is of no use inside. kallsyms shows
/// zeros and sysrq-trigger is root's; neither needs a mask.
const PROC_MASKS: [&str; 6] = ["kcore", "keys", "key-users", "timer_list", "interrupts", "sched_debug"];
/// What the root tmpfs holds beside the writable parts.
const ROOT_OVERHEAD: u64 = 512 << 10;

/// Works out the plan of one run. `filters` are those of the policy.
///
/// # Errors
/// The request asks for more than the policy allows, or the host lacks a layer that
/// the policy does not let the run go without.
pub fn plan(policy: &Policy, filters: &Filters, facts: &HostFacts, narrowing: &Narrowing) -> Result<Plan, PlanError> {
    let mut degraded = Vec::new();
    let limits = narrow_limits(policy, narrowing)?;
    let identity = plan_identity(policy, facts, narrowing, &mut degraded)?;
    let scratch = plan_scratch(policy, narrowing, &limits)?;
    let (argv, program_file, extra) = plan_program(policy, facts, narrowing, &scratch)?;
    let (root, writable) = plan_root(policy, facts, narrowing, &identity, &scratch, &extra, &limits)?;
    let cgroup = plan_cgroup(policy, facts, &limits, &mut degraded)?;
    let (landlock, payload_landlock) = plan_landlock(policy, facts, &root, &writable, &scratch, &mut degraded)?;
    let environment = plan_environment(policy, narrowing, &scratch)?;
    let filter = plan_filter(policy, filters, &scratch);
    let rlimits = plan_rlimits(facts, &limits, matches!(cgroup, CgroupPlan::Absent { .. }));
    let cpus = plan_cpus(facts, &limits);
    Ok(Plan {
        policy: policy.name.clone(),
        policy_sha256: policy.sha256.clone(),
        mode: if facts.privileged { Mode::Root } else { Mode::Rootless },
        identity,
        root,
        root_size: limits.get(LimitKey::TmpSize).map(|size| size + ROOT_OVERHEAD),
        scratch,
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
        limits,
        terminal: narrowing.terminal,
        degraded,
    })
}

fn narrow_limits(policy: &Policy, narrowing: &Narrowing) -> Result<Limits, PlanError> {
    let mut limits = policy.limits.clone();
    for (&key, &wanted) in &narrowing.limits {
        let most = policy.limits_max.get(key);
        let fits = match (wanted, most) {
            (_, None) => true,
            (Some(wanted), Some(most)) => wanted <= most,
            (None, Some(_)) => false,
        };
        if !fits {
            let (name, wanted, most) = (key.name(), key.format(wanted), key.format(most));
            return Err(asked(
                "limit_above_maximum",
                format!(
                    "limits.{name}: {wanted} is above the maximum {most} of policy `{}`; ask for at most {most}, or raise `{name}` under [limits.max] in a policy of your own",
                    policy.name
                ),
            ));
        }
        limits.set(key, wanted);
    }
    if let Some(memory) = limits.get(LimitKey::Memory) {
        let tmp = limits.get(LimitKey::TmpSize).unwrap_or(u64::MAX);
        let scratch = if narrowing.scratch.is_some() { Some(0) } else { limits.get(LimitKey::ScratchSize) };
        if tmp.saturating_add(scratch.unwrap_or(u64::MAX)) >= memory {
            return Err(asked(
                "tmpfs_above_memory",
                format!(
                    "limits: tmp_size {} and a private scratch_size {} are charged to memory {}, so their sum must be below it; lower them or raise `memory`",
                    LimitKey::TmpSize.format(limits.get(LimitKey::TmpSize)),
                    LimitKey::ScratchSize.format(limits.get(LimitKey::ScratchSize)),
                    LimitKey::Memory.format(Some(memory)),
                ),
            ));
        }
    }
    Ok(limits)
}

fn may_degrade(policy: &Policy, facts: &HostFacts, layer: Degradable) -> bool {
    let list = if facts.privileged { &policy.degrade.root } else { &policy.degrade.rootless };
    list.contains(&layer)
}

/// Goes on without a layer if the policy lets it, else refuses.
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
    let (name, mode) = (layer.name(), if facts.privileged { "root" } else { "rootless" });
    let id = match layer {
        Degradable::Cgroup => "cgroup_unavailable",
        Degradable::Landlock => "landlock_unavailable",
        Degradable::UniqueUid => "unique_uid_unavailable",
    };
    Err(lacking(
        id,
        format!(
            "policy `{}` requires the layer `{name}`: {reason}; or allow runs without it by `[degrade] {mode} = [\"{name}\"]`",
            policy.name
        ),
    ))
}

fn plan_identity(
    policy: &Policy,
    facts: &HostFacts,
    narrowing: &Narrowing,
    degraded: &mut Vec<(&'static str, String)>,
) -> Result<Identity, PlanError> {
    let caller = (facts.caller.uid, facts.caller.gid);
    let (mut outside, mut idmapped_to) = (caller, None);
    if facts.privileged {
        let refusal = match (&narrowing.scratch, facts.unique_id) {
            (_, None) => facts.unique_id_refusal.clone().or_else(|| Some(String::from("no host uid could be set aside for the run"))),
            (Some(scratch), _) if !scratch.idmappable => Some(format!(
                "the file system of {} cannot be idmapped; put scratch on ext4, xfs or btrfs (tmpfs from Linux 6.3)",
                scratch.path.display()
            )),
            _ => None,
        };
        match (refusal, facts.unique_id) {
            (None, Some(id)) => {
                outside = (id, id);
                idmapped_to = narrowing.scratch.as_ref().map(|scratch| scratch.owner);
            }
            (refusal, _) => {
                degrade(policy, facts, Degradable::UniqueUid, refusal.unwrap_or_default(), degraded)?;
                outside = narrowing.scratch.as_ref().map_or(caller, |scratch| scratch.owner);
                if outside.0 == 0 || outside.1 == 0 {
                    return Err(lacking(
                        "root_uid",
                        String::from("without a uid of its own the run would be root's; run through sudo as an ordinary user"),
                    ));
                }
            }
        }
    }
    Ok(Identity {
        inside: (policy.identity.uid, policy.identity.gid),
        outside,
        idmapped_to,
        groups_kept: if facts.privileged { Vec::new() } else { facts.caller.groups.clone() },
        user: policy.identity.user.clone(),
        hostname: policy.identity.hostname.clone(),
    })
}

fn plan_scratch(policy: &Policy, narrowing: &Narrowing, limits: &Limits) -> Result<ScratchPlan, PlanError> {
    let read_only = policy.scratch.access == Access::Ro;
    let kind = |kind: PathKind| match kind {
        PathKind::Directory => PathKindName::Directory,
        PathKind::File => PathKindName::File,
    };
    let (path, host, protected) = match &narrowing.scratch {
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

/// A scratch stands at its own path inside, so it must not cover what the sandbox is.
fn refuse_covered_scratch(policy: &Policy, path: &Path) -> Result<(), PlanError> {
    let ours = ["/proc", "/dev", "/sys", "/etc", "/bin", "/sbin", "/lib", "/lib64", "/run"].into_iter().map(Path::new);
    let shown = policy.filesystem.read_only.iter().chain(&policy.filesystem.read_only_optional).map(PathBuf::as_path);
    match ours.chain(shown).find(|taken| path.starts_with(taken) || taken.starts_with(path)) {
        Some(taken) => Err(asked(
            "scratch_in_system_directory",
            format!(
                "scratch {}: it would stand at the same path inside, where {} belongs to the sandbox; use a directory elsewhere, such as below /srv, /tmp or a home directory",
                path.display(),
                taken.display()
            ),
        )),
        None => Ok(()),
    }
}

type ProgramPlan = (Vec<String>, Option<(PathBuf, String)>, Vec<PathBuf>);

fn plan_program(policy: &Policy, facts: &HostFacts, narrowing: &Narrowing, scratch: &ScratchPlan) -> Result<ProgramPlan, PlanError> {
    let (language, stem) = match &narrowing.program {
        Program::Command(command) => {
            let argv = command.iter().chain(&narrowing.arguments).cloned().collect();
            return Ok((argv, None, interpreter_paths(narrowing, None)));
        }
        Program::Code { language, stem } => (language.as_deref().unwrap_or(&policy.language), stem),
    };
    let (name, runtime) = find_runtime(policy, language)?;
    let file_name = if runtime.extension.is_empty() { stem.clone() } else { format!("{stem}.{}", runtime.extension) };
    let directory = if scratch.read_only { PathBuf::from("/tmp") } else { scratch.path.clone() };
    let file = directory.join(&file_name);
    let mut argv: Vec<String> = runtime.command.iter().map(|word| word.replace("{file}", &file.to_string_lossy())).collect();
    let chosen = narrowing.interpreters.get(name);
    let interpreter = match (chosen, &runtime.venv) {
        (Some(chosen), _) => Some(chosen.program.clone()),
        (None, Some(venv)) => {
            let program = venv.join("bin").join(runtime.command.first().and_then(|word| Path::new(word).file_name()).unwrap_or_default());
            Some(program)
        }
        (None, None) => None,
    };
    if let (Some(program), Some(first)) = (interpreter, argv.first_mut()) {
        *first = program.to_string_lossy().into_owned();
    }
    let first = PathBuf::from(argv.first().cloned().unwrap_or_default());
    if facts.paths.get(&first) != Some(&PathKind::File) {
        let remedy = match &runtime.venv {
            Some(venv) if chosen.is_none() => format!(
                "make the virtual environment {} (policies/README.md says how), or name another by --runtime {name}=PATH",
                venv.display()
            ),
            _ => format!("install it, name another by --runtime {name}=PATH, or change `command` under [runtimes.{name}]"),
        };
        return Err(lacking("interpreter_missing", format!("runtime `{name}`: {} is not on this host; {remedy}", first.display())));
    }
    argv.extend(narrowing.arguments.iter().cloned());
    Ok((argv, Some((directory, file_name)), interpreter_paths(narrowing, runtime.venv.as_ref())))
}

/// Every directory that a chosen interpreter needs, and the runtime's own venv.
fn interpreter_paths(narrowing: &Narrowing, venv: Option<&PathBuf>) -> Vec<PathBuf> {
    narrowing.interpreters.values().flat_map(|interpreter| interpreter.read_only.iter()).chain(venv).cloned().collect()
}

/// A runtime by name or alias, case ignored.
///
/// # Errors
/// The policy has none of that name; the message lists those it has.
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
            asked(
                "unknown_language",
                format!(
                    "language `{language}`: policy `{}` has no such runtime; it has {}; add one by a [runtimes.NAME] section",
                    policy.name,
                    known.join(", ")
                ),
            )
        })
}

struct RootBuilder {
    entries: Vec<RootEntry>,
    made: BTreeSet<PathBuf>,
    bound: Vec<PathBuf>,
}

impl RootBuilder {
    /// A path inside without its leading slash.
    fn relative(path: &Path) -> PathBuf {
        path.strip_prefix("/").unwrap_or(path).to_path_buf()
    }

    fn directory(&mut self, path: &Path, mode: u32) {
        let ancestors: Vec<&Path> = path.ancestors().filter(|ancestor| ancestor.parent().is_some()).collect();
        for ancestor in ancestors.into_iter().rev() {
            if self.bound.iter().any(|bound| ancestor.starts_with(bound)) || !self.made.insert(ancestor.to_path_buf()) {
                continue;
            }
            let mode = if ancestor == path { mode } else { 0o755 };
            self.entries.push(RootEntry::Directory { target: Self::relative(ancestor), mode });
        }
    }

    fn parent(&mut self, path: &Path) {
        if let Some(parent) = path.parent() {
            self.directory(parent, 0o755);
        }
    }

    fn file(&mut self, path: &str, mode: u32, text: String) {
        self.parent(Path::new(path));
        self.made.insert(PathBuf::from(path));
        self.entries.push(RootEntry::File { target: Self::relative(Path::new(path)), mode, text });
    }

    /// Binds a host path at its own place, unless a bind above shows it already.
    fn bind(&mut self, path: &Path, kind: PathKind, executable: bool) {
        if self.bound.iter().any(|bound| path.starts_with(bound)) {
            return;
        }
        match kind {
            PathKind::Directory => self.directory(path, 0o755),
            PathKind::File => self.file(&path.to_string_lossy(), 0o644, String::new()),
        }
        self.entries.push(RootEntry::Bind { source: path.to_path_buf(), target: Self::relative(path), executable });
        self.bound.push(path.to_path_buf());
    }
}

fn plan_root(
    policy: &Policy,
    facts: &HostFacts,
    narrowing: &Narrowing,
    identity: &Identity,
    scratch: &ScratchPlan,
    extra: &[PathBuf],
    limits: &Limits,
) -> Result<(Vec<RootEntry>, Vec<PathBuf>), PlanError> {
    let mut root = RootBuilder { entries: Vec::new(), made: BTreeSet::new(), bound: Vec::new() };
    let writable = vec![PathBuf::from("/tmp"), PathBuf::from("/dev/shm"), PathBuf::from(HOME)];
    root.directory(Path::new("/tmp"), 0o1777);
    root.directory(Path::new("/dev/shm"), 0o1777);
    root.directory(Path::new(HOME), 0o700);
    for path in &writable {
        root.entries.push(RootEntry::Writable { target: RootBuilder::relative(path) });
    }
    for (name, to) in &facts.links {
        root.made.insert(Path::new("/").join(name));
        root.entries.push(RootEntry::Link { target: PathBuf::from(name), to: PathBuf::from(to) });
    }
    for path in &policy.filesystem.read_only {
        let kind = facts.paths.get(path).copied().ok_or_else(|| {
            lacking(
                "path_missing",
                format!("[filesystem] read_only: {} is not on this host; remove it, or move it to read_only_optional", path.display()),
            )
        })?;
        root.bind(path, kind, is_program_directory(path));
    }
    for path in &policy.filesystem.read_only_optional {
        if let Some(kind) = facts.paths.get(path) {
            root.bind(path, *kind, false);
        }
    }
    for path in extra {
        let kind = facts
            .paths
            .get(path)
            .copied()
            .ok_or_else(|| lacking("interpreter_missing", format!("{} is not on this host", path.display())))?;
        root.bind(path, kind, true);
    }
    plan_etc(&mut root, identity, scratch, policy.scratch.home);
    plan_dev(&mut root, policy, narrowing.terminal);
    root.directory(Path::new("/proc"), 0o555);
    root.entries.push(RootEntry::Proc { target: PathBuf::from("proc") });
    for mask in PROC_MASKS {
        root.entries.push(RootEntry::Mask { target: Path::new("proc").join(mask) });
    }
    // glibc's sysconf reads the number of CPUs here.
    let online = usable_cpus(facts, limits);
    let text = if online == 1 { String::from("0\n") } else { format!("0-{}\n", online - 1) };
    root.file("/sys/devices/system/cpu/online", 0o444, text);
    root.directory(&scratch.path, 0o755);
    Ok((root.entries, writable))
}

/// Only programs of the operating system and of named interpreters may be run; binds
/// of configuration and data are noexec.
fn is_program_directory(path: &Path) -> bool {
    !path.starts_with("/etc")
}

fn plan_etc(root: &mut RootBuilder, identity: &Identity, scratch: &ScratchPlan, home_in_scratch: bool) {
    let (uid, gid) = identity.inside;
    let user = &identity.user;
    let home = home_of(scratch, home_in_scratch);
    root.file("/etc/passwd", 0o444, format!("root:x:0:0::/nonexistent:/usr/sbin/nologin\n{user}:x:{uid}:{gid}::{}:/bin/sh\nnobody:x:65534:65534::/nonexistent:/usr/sbin/nologin\n", home.display()));
    root.file("/etc/group", 0o444, format!("root:x:0:\n{user}:x:{gid}:\nnogroup:x:65534:\n"));
    root.file("/etc/hosts", 0o444, format!("127.0.0.1 localhost {}\n::1 localhost\n", identity.hostname));
    root.file("/etc/nsswitch.conf", 0o444, String::from("passwd: files\ngroup: files\nhosts: files\nservices: files\nprotocols: files\n"));
    root.file("/etc/machine-id", 0o444, String::from("00000000000000000000000000000000\n"));
    root.file("/etc/hostname", 0o444, format!("{}\n", identity.hostname));
}

fn plan_dev(root: &mut RootBuilder, policy: &Policy, terminal: bool) {
    for device in &policy.filesystem.devices {
        let path = format!("/dev/{device}");
        root.file(&path, 0o644, String::new());
        root.entries.push(RootEntry::Device { source: PathBuf::from(&path), target: RootBuilder::relative(Path::new(&path)) });
    }
    for (name, to) in [("fd", "/proc/self/fd"), ("stdin", "/proc/self/fd/0"), ("stdout", "/proc/self/fd/1"), ("stderr", "/proc/self/fd/2")]
    {
        root.entries.push(RootEntry::Link { target: Path::new("dev").join(name), to: PathBuf::from(to) });
    }
    if terminal {
        root.directory(Path::new("/dev/pts"), 0o755);
        root.entries.push(RootEntry::Devpts { target: PathBuf::from("dev/pts") });
        root.entries.push(RootEntry::Link { target: PathBuf::from("dev/ptmx"), to: PathBuf::from("pts/ptmx") });
    }
}

fn home_of(scratch: &ScratchPlan, in_scratch: bool) -> PathBuf {
    if in_scratch { scratch.path.clone() } else { PathBuf::from(HOME) }
}

/// Where sockets and fifos may be made, and so where TMPDIR points: `/tmp`, unless scratch
/// lies below it, where the rule would reach.
fn temporary(scratch: &ScratchPlan) -> &'static Path {
    if scratch.path.starts_with("/tmp") { Path::new(HOME) } else { Path::new("/tmp") }
}

fn plan_environment(policy: &Policy, narrowing: &Narrowing, scratch: &ScratchPlan) -> Result<BTreeMap<String, String>, PlanError> {
    let mut all = policy.environment.set.clone();
    all.insert(String::from("HOME"), home_of(scratch, policy.scratch.home).to_string_lossy().into_owned());
    all.insert(String::from("USER"), policy.identity.user.clone());
    all.insert(String::from("LOGNAME"), policy.identity.user.clone());
    if all.get("TMPDIR").is_some_and(|directory| directory == "/tmp") {
        all.insert(String::from("TMPDIR"), temporary(scratch).to_string_lossy().into_owned());
    }
    if let Program::Code { language, .. } = &narrowing.program {
        let (_, runtime) = find_runtime(policy, language.as_deref().unwrap_or(&policy.language))?;
        all.extend(runtime.environment.clone());
    }
    for (name, value) in &narrowing.environment {
        let accepted = policy.environment.accept.iter().any(|pattern| match pattern.strip_suffix('*') {
            Some(prefix) => name.starts_with(prefix),
            None => name == pattern,
        });
        if !accepted {
            return Err(asked(
                "env_not_accepted",
                format!("env: policy `{}` does not accept the variable `{name}`; add it to `accept` under [environment]", policy.name),
            ));
        }
        all.insert(name.clone(), value.clone());
    }
    Ok(all)
}

fn plan_cgroup(
    policy: &Policy,
    facts: &HostFacts,
    limits: &Limits,
    degraded: &mut Vec<(&'static str, String)>,
) -> Result<CgroupPlan, PlanError> {
    const PERIOD_US: u64 = 100_000;
    let get = |key| limits.get(key);
    let quota = get(LimitKey::Cpus).map(|milli| (milli * PERIOD_US / 1000).max(1000));
    // One more than asked for: pid 1 is the executor.
    let processes = get(LimitKey::Processes).map(|n| n + 1);
    match &facts.cgroup {
        CgroupFacts::V1 { controllers } => {
            let mut settings = Vec::new();
            let mut set = |controller, file, value: Option<u64>, optional| {
                if let Some(value) = value {
                    settings.push(CgroupSetting { controller: Some(controller), file, value: value.to_string(), optional });
                }
            };
            let memory = get(LimitKey::Memory).map(whole_pages);
            set("memory", "memory.limit_in_bytes", memory, false);
            // Memory and swap together: no swap. Missing where swap is not accounted.
            set("memory", "memory.memsw.limit_in_bytes", memory, !facts.swap);
            set("memory", "memory.swappiness", Some(0), true);
            // Socket buffers are not in the above on v1; this holds those of TCP and UDP.
            set("memory", "memory.kmem.tcp.limit_in_bytes", memory, true);
            set("pids", "pids.max", processes, false);
            set("cpu", "cpu.cfs_period_us", quota.map(|_| PERIOD_US), false);
            set("cpu", "cpu.cfs_quota_us", quota, false);
            // cpuacct only counts: without a CPU limit pid 1's own account does, which in the
            // end holds that of everything inside.
            let counted = get(LimitKey::Cpu).is_some();
            let parents = controllers.iter().filter(|(kind, _)| counted || *kind != "cpuacct");
            Ok(CgroupPlan::V1 { parents: parents.map(|(kind, path)| (kind.clone(), path.clone())).collect(), settings })
        }
        CgroupFacts::V2 { parent, vacate } => {
            let mut settings = Vec::new();
            let mut set = |file, value: Option<String>, optional| {
                if let Some(value) = value {
                    settings.push(CgroupSetting { controller: None, file, value, optional });
                }
            };
            let memory = get(LimitKey::Memory).map(whole_pages);
            set("memory.max", memory.map(|m| m.to_string()), false);
            set("memory.swap.max", memory.map(|_| String::from("0")), !facts.swap);
            set("memory.oom.group", Some(String::from("1")), false);
            set("pids.max", processes.map(|n| n.to_string()), false);
            set("cpu.max", quota.map(|q| format!("{q} {PERIOD_US}")), false);
            Ok(CgroupPlan::V2 { parent: parent.clone(), vacate: *vacate, settings })
        }
        CgroupFacts::Unavailable { reason } => {
            degrade(policy, facts, Degradable::Cgroup, reason.clone(), degraded)?;
            Ok(CgroupPlan::Absent { reason: reason.clone() })
        }
    }
}

/// The kernel keeps memory limits in whole pages; so do we, to read back what we wrote.
fn whole_pages(bytes: u64) -> u64 {
    bytes / 4096 * 4096
}

fn plan_landlock(
    policy: &Policy,
    facts: &HostFacts,
    root: &[RootEntry],
    writable: &[PathBuf],
    scratch: &ScratchPlan,
    degraded: &mut Vec<(&'static str, String)>,
) -> Result<(LandlockPlan, LandlockPlan), PlanError> {
    let abi = facts.landlock_abi;
    if abi < 2 {
        let reason = if abi == 0 {
            "the kernel offers no Landlock (it needs CONFIG_SECURITY_LANDLOCK and `landlock` in the kernel's lsm= list)"
        } else {
            "the kernel's Landlock is ABI 1, 2 is needed (Linux 5.19)"
        };
        degrade(policy, facts, Degradable::Landlock, reason.to_owned(), degraded)?;
        return Ok((LandlockPlan::default(), LandlockPlan::default()));
    }
    let handled = access::handled(abi);
    let scoped = if abi >= 6 { 3 } else { 0 };
    let mut rules = Vec::new();
    let mut rule = |path: &Path, rights: u64| rules.push(LandlockRule { path: path.to_path_buf(), rights: rights & handled });
    rule(Path::new("/"), access::READ_DIR);
    rule(Path::new("/etc"), access::READ);
    rule(Path::new("/sys"), access::READ);
    rule(Path::new("/proc"), access::READ);
    rule(Path::new("/dev"), access::READ | access::WRITE_FILE | access::IOCTL_DEV);
    for entry in root {
        if let RootEntry::Bind { target, executable, .. } = entry {
            let path = Path::new("/").join(target);
            // Rules reach through mounts: that of /etc covers what is bound there.
            if *executable || !path.starts_with("/etc") {
                rule(&path, access::READ | if *executable { access::EXECUTE } else { 0 });
            }
        }
    }
    for path in writable {
        // One place takes sockets and fifos; the probe of the receipt tries /dev/shm.
        let rights = if path == temporary(scratch) { access::WRITE_TREE } else { access::WRITE_PLAIN };
        rule(path, rights);
    }
    rule(&scratch.path, if scratch.read_only { access::READ | access::EXECUTE } else { access::WRITE_PLAIN });
    let payload = LandlockPlan {
        abi,
        // REFER must be handled to be allowed: without it every layer refuses to move
        // a file into another directory.
        handled: access::EXECUTE | access::REFER,
        scoped,
        rules: vec![LandlockRule { path: PathBuf::from("/"), rights: access::EXECUTE | access::REFER }],
    };
    Ok((LandlockPlan { abi, handled, scoped, rules }, payload))
}

fn plan_filter(policy: &Policy, filters: &Filters, scratch: &ScratchPlan) -> FilterPlan {
    let filter = if scratch.host && !scratch.read_only { &filters.host_scratch } else { &filters.private_scratch };
    FilterPlan {
        sha256: filter.sha256.clone(),
        instructions: filter.program.len(),
        program: filter.program.clone(),
        kill: filters.kill.clone(),
        kill_names: policy.seccomp.kill.clone(),
    }
}

fn plan_rlimits(facts: &HostFacts, limits: &Limits, no_cgroup: bool) -> Vec<RlimitPlan> {
    let get = |key| limits.get(key);
    let mut all = vec![
        ("RLIMIT_AS", 9, get(LimitKey::AddressSpace)),
        ("RLIMIT_FSIZE", 1, get(LimitKey::FileSize)),
        ("RLIMIT_NOFILE", 7, get(LimitKey::OpenFiles)),
        ("RLIMIT_STACK", 3, get(LimitKey::Stack)),
        // Message queues would be memory that no tmpfs limit counts.
        ("RLIMIT_MSGQUEUE", 12, Some(0)),
    ];
    if no_cgroup {
        // Each process, not all together: the receipt says so.
        all.push(("RLIMIT_DATA", 2, get(LimitKey::Memory)));
        all.push(("RLIMIT_NPROC", 6, get(LimitKey::Processes).map(|n| n + 1)));
        all.push(("RLIMIT_CPU", 0, get(LimitKey::Cpu).map(|ms| ms.div_ceil(1000))));
    }
    all.into_iter()
        .map(|(name, resource, value)| {
            let hard = facts.hard_limits.get(&resource).copied();
            RlimitPlan { name, resource, value: value.map_or(hard, |v| Some(hard.map_or(v, |h| v.min(h)))) }
        })
        .collect()
}

/// How many CPUs the code sees: its quota rounded up, at most what there is.
fn usable_cpus(facts: &HostFacts, limits: &Limits) -> usize {
    let present = facts.cpus.len().max(1);
    limits.get(LimitKey::Cpus).map_or(present, |milli| usize::try_from(milli.div_ceil(1000)).unwrap_or(usize::MAX)).min(present)
}

/// Which CPUs. The launcher's place is the scheduler's choice, so runs spread with it.
fn plan_cpus(facts: &HostFacts, limits: &Limits) -> Vec<u32> {
    let count = usable_cpus(facts, limits);
    if facts.cpus.is_empty() || count == facts.cpus.len() {
        return facts.cpus.clone();
    }
    // The one behind the launcher's own, so that both can run at once.
    let start = facts.cpus.iter().position(|cpu| *cpu == facts.launcher_cpu).map_or(0, |index| index + 1);
    (0..count).filter_map(|i| facts.cpus.get((start + i) % facts.cpus.len())).copied().collect()
}

impl Plan {
    /// Where the policy came from, for the result.
    pub fn origin(policy: &Policy) -> String {
        match &policy.origin {
            Origin::Shipped => String::from("shipped"),
            Origin::File(path) => path.display().to_string(),
        }
    }

    /// Mount points inside that may be writable.
    pub fn writable_mounts(&self) -> Vec<PathBuf> {
        let mut all: Vec<PathBuf> = self
            .root
            .iter()
            .filter_map(|entry| match entry {
                RootEntry::Writable { target } | RootEntry::Devpts { target } => Some(Path::new("/").join(target)),
                _ => None,
            })
            .collect();
        if !self.scratch.read_only {
            all.push(self.scratch.path.clone());
        }
        all
    }

    /// Mount points inside that must be there.
    pub fn required_mounts(&self) -> Vec<PathBuf> {
        let mut all: Vec<PathBuf> = self
            .root
            .iter()
            .filter_map(|entry| match entry {
                RootEntry::Bind { target, .. }
                | RootEntry::Device { target, .. }
                | RootEntry::Writable { target }
                | RootEntry::Proc { target }
                | RootEntry::Devpts { target } => Some(Path::new("/").join(target)),
                _ => None,
            })
            .collect();
        all.push(PathBuf::from("/"));
        all.push(self.scratch.path.clone());
        all.extend(self.scratch.protected.iter().map(|(path, ..)| self.scratch.path.join(path)));
        all
    }
}
