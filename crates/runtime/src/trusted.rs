//! What the next run on this host believes, kept out of the hands of this one.
//!
//! Code may write whatever lies in its scratch. A scratch that holds the policies, the
//! program, a shim or the audit log would let it choose what the host runs next, or what is
//! said of this run; so none may. A scratch that the policy shows read-only may. What else the
//! host starts out of a directory that it gives away (hooks, profiles, services) is not
//! known here.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    path::{Path, PathBuf},
};

use stockade_policy::{
    model::{Access, Policy},
    plan::Interpreter,
};

use crate::{Options, Refusal, audit, caller::Identity, facts::registry_directory, policies::lookup_context};

/// Where a package puts what goes with this program, from the program's own directory.
const COMPANIONS: &str = "../lib/stockade";

/// Refuses an interpreter whose environment lies in the scratch and has more of the host
/// shown than the policy does: code could have written there what that is.
///
/// # Errors
/// It does.
pub(crate) fn refuse_led_astray(scratch: &Path, interpreters: &BTreeMap<String, Interpreter>, policy: &Policy) -> Result<(), Refusal> {
    if policy.scratch.access == Access::Ro {
        return Ok(());
    }
    let shown = |path: &&PathBuf| path.starts_with(scratch) || policy.filesystem.read_only.iter().any(|shown| path.starts_with(shown));
    for (runtime, interpreter) in interpreters.iter().filter(|(_, interpreter)| lies_in(&interpreter.program, scratch)) {
        if let Some(astray) = interpreter.read_only.iter().find(|path| !shown(path)) {
            return Err(Refusal::bad_request(
                "scratch_holds_the_environment",
                format!(
                    "scratch {}: the {runtime} environment of {} lies in it and leads to {}, which the policy does not show and code could have written there; make the environment elsewhere, or add the directory to [filesystem] read_only",
                    scratch.display(),
                    interpreter.program.display(),
                    astray.display()
                ),
            ));
        }
    }
    Ok(())
}

/// Refuses a scratch, by its path without links, that holds something of it.
///
/// # Errors
/// It does.
pub(crate) fn refuse_replaceable(scratch: &Path, identity: &Identity, policy: &Policy, options: &Options) -> Result<(), Refusal> {
    if policy.scratch.access == Access::Ro {
        return Ok(());
    }
    let own = std::env::current_exe().ok();
    let beside = own.as_deref().and_then(Path::parent).map(|directory| directory.join(COMPANIONS));
    let programs = own.into_iter().chain(beside).chain(options.trusted.iter().cloned());
    let programs = programs.map(|path| ("scratch_holds_the_launcher", path, "which code could then replace"));
    let named = options.policy.as_ref().filter(|policy| policy.contains('/')).map(PathBuf::from);
    let sought = lookup_context().user_dir.filter(|_| !identity.privileged);
    let found = sought.iter().filter_map(|directory| std::fs::read_dir(directory).ok()).flatten().flatten().map(|entry| entry.path());
    let policies = named.into_iter().chain(found).chain(sought.clone());
    let policies = policies.map(|path| ("scratch_holds_a_policy", path, "where code could write what the next run obeys"));
    let log = audit::directory(identity).into_iter().map(|path| ("scratch_holds_the_log", path, "where code could rewrite the audit log"));
    let registry =
        std::iter::once(("scratch_holds_registry", registry_directory(identity), "where code could rewrite the launcher's own records"));
    match programs.chain(policies).chain(log).chain(registry).find(|(_, path, _)| lies_in(path, scratch)) {
        None => Ok(()),
        Some((reason, path, why)) => Err(Refusal::bad_request(
            reason,
            format!("scratch {}: {} lies in it, {why}; use a directory that does not hold it", scratch.display(), path.display()),
        )),
    }
}

/// Whether a path, whatever of it exists, lies in a directory: where it leads, or the name
/// by which it goes.
fn lies_in(path: &Path, directory: &Path) -> bool {
    let Ok(path) = std::path::absolute(path) else { return false };
    let name = || path.parent().zip(path.file_name()).map(|(parent, name)| resolved(parent).join(name));
    resolved(&path).starts_with(directory) || name().is_some_and(|name| name.starts_with(directory))
}

/// A path without links, as far as it exists.
fn resolved(path: &Path) -> PathBuf {
    let mut missing: Vec<OsString> = Vec::new();
    for ancestor in path.ancestors() {
        match (std::fs::canonicalize(ancestor), ancestor.file_name()) {
            (Ok(real), _) => return missing.iter().rev().fold(real, |path, name| path.join(name)),
            (Err(_), Some(name)) => missing.push(name.to_owned()),
            (Err(_), None) => break,
        }
    }
    path.to_path_buf()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::*;

    #[test]
    fn a_path_lies_where_it_leads_and_where_its_name_stands() {
        let root = std::env::temp_dir().canonicalize().unwrap().join(format!("trusted-{}", std::process::id()));
        let [inner, other] = ["inner", "other"].map(|name| root.join(name));
        std::fs::create_dir_all(&inner).unwrap();
        std::fs::create_dir(&other).unwrap();
        std::fs::write(inner.join("file"), "").unwrap();
        std::os::unix::fs::symlink(inner.join("file"), other.join("link")).unwrap();
        std::os::unix::fs::symlink(&inner, root.join("way")).unwrap();
        for within in [inner.join("file"), other.join("link"), root.join("way/not/yet"), inner.clone()] {
            assert!(lies_in(&within, &inner), "{}", within.display());
        }
        assert!(lies_in(&other.join("link"), &other));
        for outside in [other.join("file"), root.clone(), root.join("inner2")] {
            assert!(!lies_in(&outside, &inner), "{}", outside.display());
        }
        std::fs::remove_dir_all(root).unwrap();
    }
}
