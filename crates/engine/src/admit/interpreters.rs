//! The interpreters that a run takes in place of the policy's, and what they need of the
//! host.
//!
//! Everything here is looked at with the caller's rights. Whether an interpreter is granted
//! is not decided here.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use rustix::fd::OwnedFd;
use stockade_launcher::scratch::{self, Opener, ScratchError};
use stockade_policy::{
    facts::Codec,
    model::Policy,
    plan::{Interpreter, PlanError, Program, RunRequest},
};
use stockade_protocol::Verdict;

use super::prefixes::{self, Prefix};
use crate::{Options, Refusal, RefusalCause, caller::Identity};

/// Why an interpreter cannot be taken, or not what it needs.
#[derive(Debug, thiserror::Error)]
enum InterpreterError {
    #[error("--runtime: {0}")]
    Runtime(PlanError),
    #[error("--runtime {runtime}={}: {}", path.display(), problem.words(runtime, path))]
    Missing { runtime: String, path: PathBuf, problem: PathProblem },
    #[error("{}: {}", .0.path, .0.problem)]
    Tree(ScratchError),
}

/// Why a path is no interpreter.
#[derive(Clone, Copy, Debug)]
enum PathProblem {
    Relative,
    Missing,
    Directory,
    NoFile,
}

impl PathProblem {
    /// None: it is a file.
    fn of(path: &Path) -> Option<Self> {
        match std::fs::metadata(path) {
            _ if !path.is_absolute() => Some(PathProblem::Relative),
            Ok(found) if found.is_file() => None,
            Ok(found) if found.is_dir() => Some(PathProblem::Directory),
            Ok(_) => Some(PathProblem::NoFile),
            Err(_) => Some(PathProblem::Missing),
        }
    }

    fn words(self, runtime: &str, path: &Path) -> String {
        let program = path.join("bin").join(runtime);
        match self {
            PathProblem::Relative => String::from("name an interpreter by its absolute path"),
            PathProblem::Missing => String::from("it does not exist, or a link on its way leads nowhere"),
            PathProblem::Directory => format!("it is a directory: use {}", program.display()),
            PathProblem::NoFile => String::from("it is no program"),
        }
    }
}

impl RefusalCause for InterpreterError {
    fn verdict_and_reason(&self) -> (Verdict, &'static str) {
        let reason = match self {
            InterpreterError::Runtime(error) => error.reason(),
            InterpreterError::Missing { .. } => "interpreter_missing",
            InterpreterError::Tree(error) => error.problem.reason(),
        };
        (Verdict::BadRequest, reason)
    }
}

/// Directories of the host, and each without links: where it leads.
pub(super) type ResolvedPrefixes = BTreeMap<PathBuf, PathBuf>;

/// The interpreters that `--runtime` names, and those of the virtual environments that
/// the policy names, with the directories that they need, and where each of these leads.
pub(super) fn check_interpreters(
    policy: &Policy,
    options: &Options,
    run_request: &RunRequest,
) -> Result<(BTreeMap<String, Interpreter>, ResolvedPrefixes), Refusal> {
    let mut led = ResolvedPrefixes::new();
    let mut interpreter = |name: &str, program: &Path| -> Result<Interpreter, Refusal> {
        let needed = prefixes::needed(name, program, policy)?;
        let read_only = needed.iter().map(|(path, _)| path.clone()).collect();
        led.extend(needed);
        Ok(Interpreter { program: program.to_path_buf(), read_only })
    };
    let mut all = BTreeMap::new();
    for (name, path) in &options.interpreters {
        let (name, _) = stockade_policy::plan::find_runtime(policy, name).map_err(InterpreterError::Runtime)?;
        if let Some(problem) = PathProblem::of(path) {
            return Err(InterpreterError::Missing { runtime: name.to_owned(), path: path.clone(), problem }.into());
        }
        all.insert(name.to_owned(), interpreter(name, path)?);
    }
    let language = match &run_request.program {
        Program::Code { language, .. } => language.as_deref().unwrap_or(&policy.language),
        Program::Interpreter { runtime } => runtime,
        Program::Command(_) | Program::Carried(_) => &policy.language,
    };
    if let Ok((name, runtime)) = stockade_policy::plan::find_runtime(policy, language) {
        let program = runtime.venv.as_ref().map(|_| runtime.interpreter());
        if let Some(program) = program.filter(|program| program.is_file() && !all.contains_key(name)) {
            all.insert(name.to_owned(), interpreter(name, &program)?);
        }
    }
    Ok((all, led))
}

/// The codecs by which the interpreters of every watched runtime can be watched: of all
/// versions that a prefix holds, since code can start another one than its own.
pub(super) fn codecs(policy: &Policy, interpreters: &BTreeMap<String, Interpreter>) -> BTreeMap<String, Vec<Codec>> {
    let mut all = BTreeMap::new();
    for (name, runtime) in policy.runtimes.iter().filter(|(_, runtime)| runtime.modules.watches()) {
        let program = interpreters.get(name).map_or_else(|| runtime.interpreter(), |interpreter| interpreter.program.clone());
        let mut found: Vec<Codec> = Vec::new();
        let own = prefixes::environment(&program);
        let base = own.as_deref().and_then(prefixes::base);
        for prefix in own.into_iter().chain(base).chain(prefixes::real(&program)).filter(|prefix| prefix.is_absolute()) {
            let Some(opened) = Prefix::open(&prefix) else { continue };
            for codec in opened.libraries().iter().map(|library| library.join("encodings/utf_8.py")) {
                let path = prefix.join(&codec);
                let text = opened.small_file(&codec).filter(|text| !text.is_empty());
                if let Some(text) = text.filter(|_| !found.iter().any(|codec| codec.path == path)) {
                    found.push(Codec { path, text });
                }
            }
        }
        all.insert(name.clone(), found);
    }
    all
}

/// Directories outside the policy that root shows on the caller's behalf, opened with
/// the caller's rights, by their paths without links.
pub(super) fn open_binds(identity: &Identity, led: &ResolvedPrefixes, opener: &Opener<'_>) -> Result<BTreeMap<PathBuf, OwnedFd>, Refusal> {
    let mut opened = BTreeMap::new();
    if identity.privileged {
        for path in led.values() {
            opened.insert(path.clone(), scratch::open_tree_as_caller(path, opener).map_err(InterpreterError::Tree)?);
        }
    }
    Ok(opened)
}
