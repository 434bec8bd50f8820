//! An interpreter in place of the host's: what a shim runs.
//!
//! The caller's working directory is the scratch, or the directory that the shim names where
//! the caller is not in it. The arguments are the caller's as they are, and of the caller's
//! variables those come along that the policy accepts. The
//! difference to a command of `run` ends here: admission and launch are the same. Where
//! the shims are and what stands in them is the command line's business.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    path::{Path, PathBuf},
};

use stockade_launcher::Relay;
use stockade_protocol::Verdict;

use crate::{
    CommandResult, LoadedPolicy, Options, Origin, Refusal, RefusalCause, RunSettings,
    audit::{AuditRecorder, AuditSubject},
    end_command, is_interactive, load_policy, relay,
    runs::EntryPoint,
    with_callers_rights,
};

/// Arguments that are looked at as paths.
const MAX_ALIAS_CANDIDATES: usize = 16;

/// What a shim asks for.
#[derive(Clone, Debug)]
pub struct Interpreter {
    /// The runtime, or an alias of it.
    pub runtime: String,
    /// Every argument of the interpreter.
    pub arguments: Vec<String>,
    /// The caller's variables.
    pub variables: BTreeMap<String, String>,
    /// The caller's working directory, without links.
    pub directory: PathBuf,
    /// The scratch of callers that work neither in it nor below it.
    pub scratch: Option<PathBuf>,
    /// The shim.
    pub shim: PathBuf,
    /// Output is passed on as it is, also where it is not UTF-8.
    pub exact: bool,
}

impl Interpreter {
    /// Where the code works.
    fn place(&self) -> &Path {
        self.scratch.as_deref().filter(|scratch| !self.directory.starts_with(scratch)).unwrap_or(&self.directory)
    }
}

/// An argument of a shim's caller that no request can hold.
#[derive(Debug, thiserror::Error)]
#[error("the argument {} is not UTF-8", .0.to_string_lossy())]
pub struct ArgumentNotUtf8(pub OsString);

impl RefusalCause for ArgumentNotUtf8 {
    fn verdict_and_reason(&self) -> (Verdict, &'static str) {
        (Verdict::BadRequest, "command_malformed")
    }
}

/// Runs it, its streams relayed.
///
/// # Errors
/// It was not started.
pub fn interpret(asked: &Interpreter, options: &Options) -> Result<CommandResult, Refusal> {
    let options = Options { scratch: Some(asked.place().to_path_buf()), trusted: vec![asked.shim.clone()], ..options.clone() };
    let loaded = load_policy(&options);
    let words: Vec<String> = std::iter::once(&asked.runtime).chain(&asked.arguments).cloned().collect();
    let recorder = AuditRecorder::new(AuditSubject::Command(&words), loaded.as_ref().ok().map(|loaded| &loaded.policy), &options);
    let run = || {
        let loaded: &LoadedPolicy = loaded.as_ref().map_err(Refusal::clone)?;
        let accepted = |(name, _): &(&String, &String)| loaded.policy.environment.accepts(name);
        let environment = asked.variables.iter().filter(accepted).map(|(name, value)| (name.clone(), value.clone())).collect();
        let terminal = is_interactive();
        let alias = alias(asked)?;
        let origin = Origin::Interpreter {
            via: EntryPoint::Shim,
            runtime: &asked.runtime,
            arguments: &asked.arguments,
            environment: &environment,
            alias: alias.as_deref(),
            settings: RunSettings::NONE,
            terminal,
        };
        let how = Relay { keep_errors: false, as_text: !asked.exact };
        relay(origin, loaded, &options, how, &recorder, None).map_err(|refusal| of_directory(refusal, asked))
    };
    let came = run();
    end_command(recorder, came).map(CommandResult::new)
}

/// The path by which the caller speaks of where the code works, where that leads there
/// through links: of an argument such as a script's, or of the shell that it works in.
///
/// # Errors
/// The caller's rights cannot be taken on.
fn alias(asked: &Interpreter) -> Result<Option<PathBuf>, Refusal> {
    let place = asked.place();
    let other = |path: &&Path| path.is_absolute() && !path.starts_with(place);
    let arguments = asked.arguments.iter().map(Path::new).filter(other).take(MAX_ALIAS_CANDIDATES);
    let candidates: Vec<&Path> = arguments.chain(asked.variables.get("PWD").map(Path::new).filter(other)).collect();
    if candidates.is_empty() {
        return Ok(None);
    }
    let leads_here = |path: &&Path| std::fs::canonicalize(path).is_ok_and(|real| real == place);
    with_callers_rights(|| candidates.iter().flat_map(|path| path.ancestors()).find(leads_here).map(Path::to_path_buf))
}

/// A refused scratch is the working directory here, which the caller may not have thought of.
fn of_directory(refusal: Refusal, asked: &Interpreter) -> Refusal {
    if refusal.verdict != Verdict::BadRequest || !refusal.reason.starts_with("scratch_") {
        return refusal;
    }
    let place = asked.place().display();
    let (whose, remedy) = match &asked.scratch {
        Some(_) => ("directory", "install the shims again with another --scratch"),
        None => (
            "working directory",
            "for callers that start shims in such a place, install them with `--scratch DIR`, where their code is to work",
        ),
    };
    let message =
        format!("the {whose} {place} cannot be the sandbox's scratch, which is where code may write: {}; {remedy}", refusal.message);
    Refusal { message, ..refusal }
}
