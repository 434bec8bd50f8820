//! The names by which code inside finds the interpreters of its policy.
//!
//! Models write `python x.py` and `nodejs y.js`, which a distribution may not have. Every runtime
//! and alias of the policy is a name on PATH, and an interpreter of a virtual environment comes
//! before the system's. A runtime whose command has options is no name here. No program of `/usr` is replaced: the names stand last. This does not
//! decide which paths are shown.

use std::{
    collections::BTreeMap,
    path::{Component, Path, PathBuf},
};

use super::{RunRequest, base_environment, program_there};
use crate::{facts::HostFacts, model::Policy};

/// The directory of the names, the last one on PATH.
pub const COMMANDS: &str = "/run/stockade/bin";
const PATH: &str = "PATH";

/// Which directories PATH has, and which names [`COMMANDS`].
#[derive(Default)]
pub(super) struct Commands {
    path: Option<String>,
    pub(super) links: BTreeMap<String, PathBuf>,
    /// Directories that the interpreters need.
    pub(super) read_only: Vec<PathBuf>,
}

impl Commands {
    pub(super) fn new(policy: &Policy, facts: &HostFacts, run_request: &RunRequest, read_only: Vec<PathBuf>) -> Self {
        let set = base_environment(policy, facts);
        let Some(path) = set.get(PATH) else { return Commands { read_only, ..Commands::default() } };
        let directories: Vec<&Path> = path.split(':').map(Path::new).collect();
        let is_on_path = |program: &Path| program.parent().is_some_and(|directory| directories.contains(&directory));
        let chosen = run_request.interpreters.values().map(|interpreter| interpreter.program.as_path());
        // A link to it would not do: Python finds its virtual environment by the path it is started by.
        let mut first: Vec<&Path> = chosen.filter(|program| !is_on_path(program)).filter_map(Path::parent).collect();
        first.dedup();
        let mut links = BTreeMap::new();
        for (name, runtime) in &policy.runtimes {
            // A link carries no options, and what stands for another program is none itself.
            if !matches!(&runtime.command[..], [_, file] if file == "{file}") {
                continue;
            }
            let interpreter = runtime.interpreter();
            let replaced = run_request.interpreters.get(name).is_some_and(|chosen| chosen.program != interpreter);
            let Some(interpreter) = program_there(facts, &interpreter).filter(|program| !replaced && is_on_path(program)) else { continue };
            for name in runtime.aliases.iter().chain([name]).filter(|name| is_file_name(name)) {
                if interpreter.file_name() != Some(name.as_ref()) {
                    links.insert(name.clone(), interpreter.clone());
                }
            }
        }
        let text = |path: &Path| path.to_string_lossy().into_owned();
        let last = (!links.is_empty()).then(|| COMMANDS.to_owned());
        let all: Vec<String> = first.into_iter().chain(directories).map(text).chain(last).collect();
        Commands { path: Some(all.join(":")), links, read_only }
    }

    /// Puts PATH among the variables that the policy sets.
    pub(super) fn set_path(self, variables: &mut BTreeMap<String, String>) {
        variables.extend(self.path.map(|path| (PATH.to_owned(), path)));
    }
}

fn is_file_name(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    matches!((parts.next(), parts.next()), (Some(Component::Normal(part)), None) if part == name)
}
