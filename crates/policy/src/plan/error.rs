//! Why there is no plan: what, where, why and how to fix it, each with its stable reason.
//!
//! Nothing is decided here.

use std::path::{Path, PathBuf};

use stockade_protocol::LimitKey;

use super::{MIN_MEMORY, ViewError};
use crate::model::Degradable;

/// Why there is no plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "each is what its sentence says")]
pub enum PlanError {
    #[error(
        "limits.{}: {} is above the maximum {} of policy `{policy}`; ask for at most {2}, or raise `{0}` under [limits.max] in a policy of your own",
        key.name(), key.format(*wanted), key.format(*most)
    )]
    LimitAboveMaximum { policy: String, key: LimitKey, wanted: Option<u64>, most: Option<u64> },
    #[error(
        "limits: tmp_size {} and a private scratch_size {} are charged to memory {}, so their sum must be below it; lower them or raise `memory`",
        LimitKey::TmpSize.format(*tmp), LimitKey::ScratchSize.format(*scratch), LimitKey::Memory.format(Some(*memory))
    )]
    TmpfsAboveMemory { tmp: Option<u64>, scratch: Option<u64>, memory: u64 },
    /// The request asked for it, or else the policy.
    #[error(
        "limits.memory: {} is too little for the sandbox itself; at least {}, and an interpreter needs some 16MiB",
        LimitKey::Memory.format(Some(*memory)), LimitKey::Memory.format(Some(MIN_MEMORY))
    )]
    MemoryTooSmall { memory: u64, asked_for: bool },
    #[error(
        "scratch {}: it would stand at the same path inside, where {} belongs to the sandbox; use a directory elsewhere, such as below /srv, /tmp or a home directory",
        path.display(), taken.display()
    )]
    ScratchCovered { path: PathBuf, taken: PathBuf },
    #[error("language `{language}`: policy `{policy}` has no such runtime{}; it has {known}; add one by a [runtimes.NAME] section", nearest.as_ref().map_or(String::new(), |name| format!(", did you mean `{name}`?")))]
    UnknownLanguage { language: String, policy: String, nearest: Option<String>, known: String },
    #[error("env: policy `{policy}` does not accept the variable `{name}`; add it to `accept` under [environment]")]
    VariableNotAccepted { policy: String, name: String },
    #[error("policy `{policy}` requires the layer `{}`: {why}; or take a policy that allows runs without it, by `[degrade] {mode} = [\"{0}\"]`", layer.name())]
    LayerMissing { policy: String, layer: Degradable, mode: &'static str, why: String },
    #[error("without a uid of its own the run would be root's; run through sudo as an ordinary user")]
    RootUid,
    #[error("a run without `user_namespace` must have a host uid of its own, whatever `[degrade]` says: {0}")]
    NoUniqueUid(String),
    #[error("policy `{policy}` has an egress whitelist, which is not opened without user namespaces: {why}")]
    EgressOnHost { policy: String, why: String },
    #[error(
        "scratch {}: its files could not be the caller's, as an idmap needs a user namespace ({why}); or leave scratch out: `files` go in and `collect` brings them back",
        path.display()
    )]
    ScratchOnHost { path: PathBuf, why: String },
    #[error(
        "runtime `{runtime}`: {} is not on this host; {}name another by --runtime {runtime}=PATH{}",
        interpreter.display(),
        match (how_made(interpreter), venv) {
            (Some(command), _) => format!("make it by {command}, or "),
            (None, Some(venv)) => format!("make the virtual environment {} (python3 -m venv, and pip install), or ", venv.display()),
            (None, None) => String::from("install it, "),
        },
        if venv.is_some() { String::new() } else { format!(", or change `command` under [runtimes.{runtime}]") }
    )]
    InterpreterMissing { runtime: String, interpreter: PathBuf, venv: Option<PathBuf> },
    #[error("runtime `{runtime}`: {} is not on this host; install it, or change `compile` under [runtimes.{runtime}]", compiler.display())]
    CompilerMissing { runtime: String, compiler: PathBuf },
    #[error(
        "runtime `{runtime}` compiles its code, so it has no interpreter to start by itself; send the code to `stockade exec`, or run its file by `stockade run`"
    )]
    Compiles { runtime: String },
    #[error(
        "runtime `{runtime}`: image {image} has no {}, and no program of that name on its PATH; take an image that has it, or start what it has by `stockade run --image`",
        program.display()
    )]
    NotInImage { runtime: String, image: String, program: PathBuf },
    #[error("image {image} names no command of its own (neither Entrypoint nor Cmd); write one behind `--`")]
    NoCommand { image: String },
    #[error(
        "image {image}: its working directory {} {why}; name another by --scratch DIR, or send the program as code, which starts in scratch",
        path.display()
    )]
    WorkingDirectory { image: String, path: PathBuf, why: &'static str },
    #[error("{} is not on this host", .0.display())]
    PrefixMissing(PathBuf),
    #[error("[filesystem] read_only: {} is not on this host; remove it, or move it to read_only_optional", .0.display())]
    PathMissing(PathBuf),
    #[error(
        "[runtimes.{runtime}.modules]: the policy refuses modules or events, and no interpreter of `{runtime}` can be watched for them: none of its prefixes has lib/python3.*/encodings/utf_8.py, or it is an image's; name a CPython of the host by --runtime {runtime}=PATH, or only note them"
    )]
    ModulesNotWatchable { runtime: String },
    #[error(transparent)]
    View(#[from] ViewError),
}

/// The command that makes what the shipped policies show of `/opt/stockade`.
pub fn how_made(path: &Path) -> Option<String> {
    let name = path.strip_prefix("/opt/stockade").ok()?.iter().next()?.to_str()?;
    ["data-science", "wasm", "pyodide"]
        .contains(&name)
        .then(|| format!("`sudo /usr/share/stockade/prepare-{name}` (in a clone `sudo scripts/prepare-{name}`)"))
}

impl PlanError {
    /// A stable identifier.
    pub fn reason(&self) -> &'static str {
        match self {
            PlanError::LimitAboveMaximum { .. } => "limit_above_maximum",
            PlanError::TmpfsAboveMemory { .. } => "tmpfs_above_memory",
            PlanError::MemoryTooSmall { .. } => "memory_too_small",
            PlanError::ScratchCovered { .. } => "scratch_in_system_directory",
            PlanError::UnknownLanguage { .. } => "unknown_language",
            PlanError::VariableNotAccepted { .. } => "env_not_accepted",
            PlanError::LayerMissing { layer: Degradable::Cgroup, .. } => "cgroup_unavailable",
            PlanError::LayerMissing { layer: Degradable::Landlock, .. } => "landlock_unavailable",
            PlanError::LayerMissing { layer: Degradable::UniqueUid, .. } | PlanError::NoUniqueUid(_) => "unique_uid_unavailable",
            PlanError::LayerMissing { layer: Degradable::UserNamespace, .. } => "namespaces_refused",
            PlanError::RootUid => "root_uid",
            PlanError::EgressOnHost { .. } => "egress_unavailable",
            PlanError::ScratchOnHost { .. } => "scratch_not_idmappable",
            PlanError::InterpreterMissing { .. } | PlanError::CompilerMissing { .. } | PlanError::PrefixMissing(_) => "interpreter_missing",
            PlanError::NotInImage { .. } => "interpreter_missing",
            PlanError::NoCommand { .. } => "image_without_command",
            PlanError::WorkingDirectory { .. } => "image_working_directory",
            PlanError::Compiles { .. } => "runtime_compiles",
            PlanError::PathMissing(_) => "path_missing",
            PlanError::ModulesNotWatchable { .. } => "modules_not_watchable",
            PlanError::View(error) => error.reason(),
        }
    }

    /// Whether the caller asked for too much; else the host offers too little.
    pub fn is_the_callers_fault(&self) -> bool {
        match self {
            PlanError::MemoryTooSmall { asked_for, .. } => *asked_for,
            PlanError::LimitAboveMaximum { .. }
            | PlanError::TmpfsAboveMemory { .. }
            | PlanError::ScratchCovered { .. }
            | PlanError::UnknownLanguage { .. }
            | PlanError::Compiles { .. }
            | PlanError::View(_)
            | PlanError::NoCommand { .. }
            | PlanError::WorkingDirectory { .. }
            | PlanError::VariableNotAccepted { .. } => true,
            PlanError::LayerMissing { .. }
            | PlanError::RootUid
            | PlanError::NoUniqueUid(_)
            | PlanError::EgressOnHost { .. }
            | PlanError::ScratchOnHost { .. }
            | PlanError::InterpreterMissing { .. }
            | PlanError::CompilerMissing { .. }
            | PlanError::PrefixMissing(_)
            | PlanError::PathMissing(_)
            | PlanError::NotInImage { .. }
            | PlanError::ModulesNotWatchable { .. } => false,
        }
    }
}
