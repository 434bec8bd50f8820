//! The interpreters that a run takes in place of the policy's, and what they need of the
//! host.
//!
//! Everything here is looked at with the caller's rights. Whether an interpreter is granted
//! is not decided here.

use std::{
    collections::BTreeMap,
    io::Read,
    path::{Path, PathBuf},
};

use rustix::fd::OwnedFd;
use stockade_launcher::scratch::{self, Opener};
use stockade_policy::{
    facts::Codec,
    model::Policy,
    plan::{Interpreter, Narrowing, Program},
};

use crate::{Options, Refusal, caller::Identity};

/// Versions of Python that are watched below one prefix.
const MOST_VERSIONS: usize = 16;

/// The interpreters that `--runtime` names, and those of the virtual environments that
/// the policy names, with the directories that they need.
pub(super) fn check_interpreters(
    policy: &Policy,
    options: &Options,
    narrowing: &Narrowing,
) -> Result<BTreeMap<String, Interpreter>, Refusal> {
    let mut all = BTreeMap::new();
    for (name, path) in &options.interpreters {
        let (name, _) = stockade_policy::plan::find_runtime(policy, name)
            .map_err(|error| Refusal::bad_request(error.reason, format!("--runtime: {}", error.message)))?;
        if !path.is_absolute() || !path.is_file() {
            return Err(Refusal::bad_request(
                "interpreter_missing",
                format!("--runtime {name}={}: name an interpreter by its absolute path", path.display()),
            ));
        }
        all.insert(name.to_owned(), interpreter(path));
    }
    let language = match &narrowing.program {
        Program::Code { language, .. } => language.as_deref().unwrap_or(&policy.language),
        Program::Interpreter { runtime } => runtime,
        Program::Command(_) | Program::Image(_) => &policy.language,
    };
    if let Ok((name, runtime)) = stockade_policy::plan::find_runtime(policy, language) {
        let program = runtime.venv.as_ref().map(|_| runtime.interpreter());
        if let Some(program) = program.filter(|program| program.is_file() && !all.contains_key(name)) {
            all.insert(name.to_owned(), interpreter(&program));
        }
    }
    Ok(all)
}

/// An interpreter with what it needs outside /usr: its virtual environment, and the
/// prefix of the interpreter that the environment was made from.
fn interpreter(program: &Path) -> Interpreter {
    let mut read_only: Vec<PathBuf> = Vec::new();
    for path in prefixes(program) {
        if !path.starts_with("/usr") && path.parent().is_some() && !read_only.iter().any(|known| path.starts_with(known)) {
            read_only.push(path);
        }
    }
    Interpreter { program: program.to_path_buf(), read_only }
}

/// The prefixes of an interpreter: where it lies, where its virtual environment's settings
/// have it from, and where it lies without links.
fn prefixes(program: &Path) -> impl Iterator<Item = PathBuf> {
    let prefix = |program: &Path| program.parent().and_then(Path::parent).map(Path::to_path_buf);
    let environment = prefix(program);
    let base = environment.as_ref().and_then(|environment| {
        let settings = small_regular_file(&environment.join("pyvenv.cfg"));
        let home =
            settings.lines().find_map(|line| line.split_once('=').filter(|(key, _)| key.trim() == "home").map(|(_, home)| home.trim()));
        home.map(Path::new).and_then(Path::parent).map(Path::to_path_buf)
    });
    let real = std::fs::canonicalize(program).ok().as_deref().and_then(prefix);
    environment.into_iter().chain(base).chain(real)
}

/// The codecs by which the interpreters of every watched runtime can be watched: of all
/// versions that a prefix holds, since code can start another one than its own.
pub(super) fn codecs(policy: &Policy, interpreters: &BTreeMap<String, Interpreter>) -> BTreeMap<String, Vec<Codec>> {
    let mut all = BTreeMap::new();
    for (name, runtime) in policy.runtimes.iter().filter(|(_, runtime)| runtime.modules.watches()) {
        let program = interpreters.get(name).map_or_else(|| runtime.interpreter(), |interpreter| interpreter.program.clone());
        let mut found: Vec<Codec> = Vec::new();
        for prefix in prefixes(&program).filter(|prefix| prefix.is_absolute()) {
            for library in ["lib", "lib64"].map(|name| prefix.join(name)).iter().filter(|library| !library.is_symlink()) {
                let versions = std::fs::read_dir(library).into_iter().flatten().flatten();
                for version in versions.filter(|entry| entry.file_name().as_encoded_bytes().starts_with(b"python3.")).take(MOST_VERSIONS) {
                    let path = version.path().join("encodings/utf_8.py");
                    let text = small_regular_file(&path);
                    let whole = (1..LARGEST_SMALL_FILE).contains(&(text.len() as u64));
                    if whole && !found.iter().any(|codec| codec.path == path) {
                        found.push(Codec { path, text });
                    }
                }
            }
        }
        all.insert(name.clone(), found);
    }
    all
}

/// What is read of such a file.
const LARGEST_SMALL_FILE: u64 = 64 << 10;

/// The text of a file that its owner chose: nothing that has no end or keeps us waiting.
fn small_regular_file(path: &Path) -> String {
    use std::os::unix::fs::OpenOptionsExt;
    let nonblocking = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
    let opened = std::fs::OpenOptions::new().read(true).custom_flags(nonblocking).open(path);
    let Some(file) = opened.ok().filter(|file| file.metadata().is_ok_and(|metadata| metadata.is_file())) else { return String::new() };
    let mut text = String::new();
    let _unreadable = file.take(LARGEST_SMALL_FILE).read_to_string(&mut text);
    text
}

/// Directories outside the policy that root shows on the caller's behalf, opened with
/// the caller's rights.
pub(super) fn open_trees(
    identity: &Identity,
    interpreters: &BTreeMap<String, Interpreter>,
    opener: &Opener<'_>,
) -> Result<BTreeMap<PathBuf, OwnedFd>, Refusal> {
    let mut trees = BTreeMap::new();
    if identity.privileged {
        for path in interpreters.values().flat_map(|interpreter| &interpreter.read_only) {
            let tree = scratch::open_tree_as_caller(path, opener)
                .map_err(|error| Refusal::bad_request(error.reason, format!("{}: {}", error.path, error.why)))?;
            trees.insert(path.clone(), tree);
        }
    }
    Ok(trees)
}
