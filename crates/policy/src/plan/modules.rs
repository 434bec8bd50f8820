//! Watching Python's modules: what stands in the place of a file of each interpreter, and
//! the pipe to which they report.
//!
//! The file is a codec that every CPython loads before anything that a request, a variable or
//! an option can choose, with ours behind it (`inside/import_hooks.py`). It is advice for readers of
//! results: no layer depends on it, and it changes no verdict. But code in a
//! runtime for which the policy refuses something is not started where no interpreter could
//! be watched.

use std::path::Path;

use stockade_protocol::{modules::PIPE, screen::Action};

use super::{HOME, PlanError, Program, RootEntry, RunRequest, ScratchPlan, find_runtime};
use crate::{
    facts::HostFacts,
    model::{Modules, Policy},
};

const IMPORT_HOOKS: &str = include_str!("../../inside/import_hooks.py");

/// The entries for every interpreter that the policy watches, the run's own first.
pub(super) fn plan_modules(
    policy: &Policy,
    facts: &HostFacts,
    run_request: &RunRequest,
    scratch: &ScratchPlan,
    is_shown: impl Fn(&Path) -> bool,
) -> Result<Vec<RootEntry>, PlanError> {
    let own = match &run_request.program {
        Program::Code { language, .. } => Some(language.as_deref().unwrap_or(&policy.language)),
        Program::Interpreter { runtime } => Some(runtime.as_str()),
        Program::Command(_) | Program::Carried(_) => None,
    };
    let own = own.map(|language| find_runtime(policy, language)).transpose()?.map(|(name, _)| name);
    let mut watched: Vec<_> = policy.runtimes.iter().filter(|(_, runtime)| runtime.modules.watches()).collect();
    if facts.image.is_some() {
        // Its interpreters are not looked for.
        let denied = watched.iter().find(|(name, runtime)| Some(name.as_str()) == own && runtime.modules.denies());
        return denied.map_or(Ok(Vec::new()), |(name, _)| Err(PlanError::ModulesNotWatchable { runtime: (*name).clone() }));
    }
    watched.sort_by_key(|(name, _)| Some(name.as_str()) != own);
    let mut entries: Vec<RootEntry> = Vec::new();
    for (name, runtime) in &watched {
        let codecs = facts.codecs.get(*name).into_iter().flatten().filter(|codec| is_shown(&codec.path));
        let behind = behind(&runtime.modules, name, scratch);
        let mut found = false;
        for codec in codecs {
            found = true;
            let target = codec.path.strip_prefix("/").unwrap_or(&codec.path).to_path_buf();
            if !entries.iter().any(|entry| matches!(entry, RootEntry::Cover { target: other, .. } if *other == target)) {
                entries.push(RootEntry::Cover { target, text: format!("{}{behind}", codec.text) });
            }
        }
        if !found && Some(name.as_str()) == own && runtime.modules.denies() {
            return Err(PlanError::ModulesNotWatchable { runtime: (*name).clone() });
        }
    }
    if !watched.is_empty() {
        let target = Path::new(PIPE).strip_prefix("/").unwrap_or(Path::new(PIPE)).to_path_buf();
        entries.push(RootEntry::Pipe { target });
    }
    Ok(entries)
}

/// What comes behind an interpreter's own codec.
fn behind(modules: &Modules, name: &str, scratch: &ScratchPlan) -> String {
    let rules: Vec<String> = modules.rules.iter().map(|(name, action)| format!("{}: '{}'", literal(name), action.name())).collect();
    let open_to: Vec<String> = ["/dev", "/tmp", HOME]
        .into_iter()
        .chain(scratch.path.to_str().filter(|_| !scratch.read_only))
        .map(|path| literal(&format!("{path}/")))
        .collect();
    let place = literal(&format!("[runtimes.{name}.modules]"));
    let default = modules.default.unwrap_or(Action::Allow).name();
    format!("{IMPORT_HOOKS}\n_watch({{{}}}, '{default}', ({},), '{PIPE}', {place})\ndel _watch\n", rules.join(", "), open_to.join(", "))
}

/// A text as Python writes it, in ASCII.
fn literal(text: &str) -> String {
    let plain = |c: char| matches!(c, ' '..='~') && !matches!(c, '\'' | '\\');
    let quoted: String = text.chars().map(|c| if plain(c) { c.to_string() } else { format!("\\U{:08x}", u32::from(c)) }).collect();
    format!("'{quoted}'")
}

#[cfg(test)]
mod tests {
    use super::literal;

    #[test]
    fn a_text_cannot_end_its_literal() {
        assert_eq!(literal("/a b/c"), "'/a b/c'");
        assert_eq!(literal("'\\\né"), "'\\U00000027\\U0000005c\\U0000000a\\U000000e9'");
    }
}
