//! Keeps files that later runs on this host trust out of a writable scratch.
//!
//! Code may write every file in its scratch. A scratch with the policies, the program, a shim
//! or the audit log would let it choose what the host runs next, or change the record of this
//! run, so it is refused, unless the policy shows the scratch read-only. Nor may code choose by a
//! file in the scratch which directories an interpreter is shown. It does not find other
//! files that the host starts from a scratch (hooks, profiles, services).

use std::{
    collections::BTreeMap,
    ffi::{OsStr, OsString},
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

use stockade_launcher::scratch::{directory_paths::DirectoryPaths, path::ScratchPath};
use stockade_policy::{
    model::{Access, Policy},
    plan::Interpreter,
};
use stockade_protocol::Verdict;

use crate::{Options, RefusalCause, audit, caller::Identity, facts::registry_directory, policies::lookup_context};

/// The package's directory for companion files, relative to the program's directory.
const COMPANIONS: &str = "../lib/stockade";

/// Why code may not write in a scratch.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TrustError {
    #[error(
        "scratch {}: the {runtime} environment of {} lies in it and leads to {}, which the policy does not show and code could have written there; make the environment elsewhere, or add the directory to [filesystem] read_only",
        scratch.display(),
        program.display(),
        astray.display()
    )]
    Environment { scratch: PathBuf, runtime: String, program: PathBuf, astray: PathBuf },
    #[error(
        "scratch {}: {} lies in it, a link to the interpreter of {runtime}, and code could make it lead elsewhere; name the interpreter by its path without links",
        scratch.display(),
        link.display()
    )]
    Link { scratch: PathBuf, runtime: String, link: PathBuf },
    #[error("scratch {}: {} lies in it, {}; use a directory that does not hold it", scratch.display(), path.display(), held.harm())]
    Holds { scratch: PathBuf, path: PathBuf, held: TrustedFile },
    #[error("scratch {}: it is a part of the store of images {}, {}; use a directory elsewhere", scratch.display(), store.display(), TrustedFile::Images.harm())]
    InStore { scratch: PathBuf, store: PathBuf },
}

/// A file that later runs trust.
#[derive(Clone, Copy, Debug)]
pub(crate) enum TrustedFile {
    Launcher,
    Policy,
    AuditLog,
    Registry,
    Images,
}

impl TrustedFile {
    fn harm(self) -> &'static str {
        match self {
            TrustedFile::Launcher => "which code could then replace",
            TrustedFile::Policy => "where code could write what the next run obeys",
            TrustedFile::AuditLog => "where code could rewrite the audit log",
            TrustedFile::Images => "where code could change the images that later runs start from",
            TrustedFile::Registry => "where code could rewrite the launcher's own records",
        }
    }
}

impl RefusalCause for TrustError {
    fn verdict_and_reason(&self) -> (Verdict, &'static str) {
        let reason = match self {
            TrustError::Environment { .. } | TrustError::Link { .. } => "scratch_holds_the_environment",
            TrustError::Holds { held: TrustedFile::Launcher, .. } => "scratch_holds_the_launcher",
            TrustError::Holds { held: TrustedFile::Policy, .. } => "scratch_holds_a_policy",
            TrustError::Holds { held: TrustedFile::AuditLog, .. } => "scratch_holds_the_log",
            TrustError::InStore { .. } | TrustError::Holds { held: TrustedFile::Images, .. } => "scratch_holds_images",
            TrustError::Holds { held: TrustedFile::Registry, .. } => "scratch_holds_registry",
        };
        (Verdict::BadRequest, reason)
    }
}

/// Refuses an interpreter whose environment lies in the scratch and needs host directories
/// that the policy does not show: code could have written the names of these directories. Or one
/// that is reached by a link in the scratch.
///
/// # Errors
/// There is such an interpreter.
pub(crate) fn refuse_led_astray(
    scratch: &ScratchPath,
    interpreters: &BTreeMap<String, Interpreter>,
    policy: &Policy,
) -> Result<(), TrustError> {
    if policy.scratch.access == Access::Ro {
        return Ok(());
    }
    let (scratch, paths) = (scratch.path(), scratch.paths());
    let is_shown = |path: &Path| path.starts_with(scratch) || policy.filesystem.read_only.iter().any(|shown| path.starts_with(shown));
    let shown = |path: &&PathBuf| is_shown(path) && is_shown(&resolved(path, &mut |_| {}));
    let chosen = interpreters.iter().map(|(name, interpreter)| (name, interpreter.program.clone()));
    let of_policy = policy.runtimes.iter().filter(|(name, _)| !interpreters.contains_key(*name));
    let compilers = policy.runtimes.iter().filter_map(|(name, runtime)| Some((name, runtime.compiler()?.to_path_buf())));
    for (runtime, program) in chosen.chain(of_policy.map(|(name, runtime)| (name, runtime.interpreter()))).chain(compilers) {
        if let Some(link) = replaceable_link(&program, paths, interpreters, policy) {
            return Err(TrustError::Link { scratch: scratch.to_path_buf(), runtime: runtime.clone(), link });
        }
    }
    for (runtime, interpreter) in interpreters.iter().filter(|(_, interpreter)| lies_in(&interpreter.program, paths)) {
        if let Some(astray) = interpreter.read_only.iter().find(|path| !shown(path)) {
            let (runtime, program) = (runtime.clone(), interpreter.program.clone());
            return Err(TrustError::Environment { scratch: scratch.to_path_buf(), runtime, program, astray: astray.clone() });
        }
    }
    Ok(())
}

/// The link to an interpreter's program that code in the scratch could replace: one that lies there
/// by itself, in no environment, since a link cannot be covered.
fn replaceable_link(
    program: &Path,
    scratch: &DirectoryPaths,
    interpreters: &BTreeMap<String, Interpreter>,
    policy: &Policy,
) -> Option<PathBuf> {
    let environments = policy.runtimes.values().filter_map(|runtime| runtime.venv.as_ref());
    let shown = interpreters.values().flat_map(|interpreter| &interpreter.read_only).chain(environments);
    // An environment above the scratch protects no link in it; those inside do.
    let shown: Vec<&PathBuf> = shown.filter(|shown| scratch.contains(shown)).collect();
    let mut found = None;
    resolved(program, &mut |at| {
        let is_covered = || shown.iter().any(|shown| at != shown.as_path() && at.starts_with(shown));
        if scratch.contains(at) && at.is_symlink() && !is_covered() {
            found.get_or_insert_with(|| at.to_path_buf());
        }
    });
    found
}

/// Refuses a writable scratch that is a part of the store of images, or contains the program, a policy, the audit log, the
/// registry or the store of images.
///
/// # Errors
/// It contains one of them.
pub(crate) fn refuse_replaceable(scratch: &ScratchPath, identity: &Identity, policy: &Policy, options: &Options) -> Result<(), TrustError> {
    if policy.scratch.access == Access::Ro {
        return Ok(());
    }
    let own = std::env::current_exe().ok();
    let beside = own.as_deref().and_then(Path::parent).map(|directory| directory.join(COMPANIONS));
    // The program may have been started through a symlink.
    let started = PathBuf::from(OsStr::from_bytes(rustix::param::linux_execfn().to_bytes()));
    let programs = own.into_iter().chain(beside).chain([started]).chain(options.trusted.iter().cloned());
    let programs = programs.map(|path| (TrustedFile::Launcher, path));
    let named = options.policy.as_ref().filter(|policy| policy.contains('/')).map(PathBuf::from);
    let sought = lookup_context().user_dir.filter(|_| !identity.privileged);
    let found = sought.iter().filter_map(|directory| std::fs::read_dir(directory).ok()).flatten().flatten().map(|entry| entry.path());
    let policies = named.into_iter().chain(found).chain(sought.clone());
    let policies = policies.map(|path| (TrustedFile::Policy, path));
    let log = audit::directory(identity).into_iter().map(|path| (TrustedFile::AuditLog, path));
    let registry = [(TrustedFile::Registry, registry_directory(identity))];
    let store = stockade_images::default_path(identity.privileged).ok();
    let is_in = |store: &PathBuf| DirectoryPaths::of(store).is_ok_and(|store| store.contains(scratch.path()));
    if let Some(store) = store.as_ref().and_then(|store| store.canonicalize().ok()).filter(is_in) {
        return Err(TrustError::InStore { scratch: scratch.path().to_path_buf(), store });
    }
    let images = store.map(|path| (TrustedFile::Images, path));
    match programs.chain(policies).chain(log).chain(registry).chain(images).find(|(_, path)| lies_in(path, scratch.paths())) {
        None => Ok(()),
        Some((held, path)) => Err(TrustError::Holds { scratch: scratch.path().to_path_buf(), path, held }),
    }
}

/// Whether a path leads into a directory, or a name in the path or in one of its symlinks lies
/// there, through whatever mount. The path need not exist.
fn lies_in(path: &Path, directory: &DirectoryPaths) -> bool {
    let mut passes = false;
    // Write permission in a directory does not allow replacing the directory itself.
    let end = resolved(path, &mut |at| passes |= directory.contains_below(at));
    passes || directory.contains(&end)
}

/// A path with its symlinks resolved, as far as it exists. `passed` gets each path on the way,
/// the result last, but not the working directory.
fn resolved(path: &Path, passed: &mut dyn FnMut(&Path)) -> PathBuf {
    // The kernel's limit (path_resolution(7)).
    let mut links = 40;
    let names = |path: &Path| -> Vec<OsString> { path.components().rev().map(|part| part.as_os_str().to_owned()).collect() };
    let mut pending = names(path);
    let mut at = if path.is_absolute() { PathBuf::new() } else { std::env::current_dir().unwrap_or_else(|_| PathBuf::from("/")) };
    while let Some(name) = pending.pop() {
        if name == "." {
            continue;
        }
        if name == ".." {
            at.pop();
            continue;
        }
        // Pushing the root directory replaces the whole path.
        at.push(name);
        passed(&at);
        if let Some(to) = std::fs::read_link(&at).ok().filter(|_| links > 0) {
            links -= 1;
            at.pop();
            pending.extend(names(&to));
        }
    }
    at
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::*;

    #[test]
    fn a_path_lies_where_it_leads_and_where_its_name_stands() {
        let lies_in = |path: &Path, directory: &Path| lies_in(path, &DirectoryPaths::of(directory).unwrap());
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
        // A symlink on the way, which is neither the given path nor its target.
        std::os::unix::fs::symlink(other.join("link"), root.join("first")).unwrap();
        std::os::unix::fs::symlink("first", root.join("before")).unwrap();
        std::os::unix::fs::symlink("circle", root.join("circle")).unwrap();
        for way in ["first", "before", "other/../before"] {
            assert!(lies_in(&root.join(way), &other) && lies_in(&root.join(way), &inner), "{way}");
        }
        for outside in [root.join("before"), root.join("circle"), root.join("elsewhere/../file")] {
            assert!(!lies_in(&outside, &root.join("elsewhere")), "{}", outside.display());
        }
        let here = std::env::current_dir().unwrap();
        assert!(lies_in(Path::new("file"), &here) && !lies_in(Path::new("../file"), &here));
        assert_eq!(resolved(&root.join("other/../before/x"), &mut |_| {}), inner.join("file/x"));
        for outside in [other.join("file"), root.clone(), root.join("inner2")] {
            assert!(!lies_in(&outside, &inner), "{}", outside.display());
        }
        std::fs::remove_dir_all(root).unwrap();
    }
}
