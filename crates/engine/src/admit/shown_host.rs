//! What a run shows of the host: what its policy names, interpreters and what they need, and
//! the scratch.
//!
//! What the caller names is opened with the caller's rights, once, and judged by where it is
//! without links. That neither the audit log nor what the next run believes is among it is
//! made sure of here; how it is shown is the plan's to say.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use rustix::{
    fd::OwnedFd,
    fs::{FileType, stat},
};
use stockade_launcher::{
    host_socket::{OpenedSocket, SocketError, SocketProblem},
    resolve::{Follow, ResolveError, resolve},
    scratch::{self, OpenedScratch, Opener, ShownFiles, path::ScratchPath},
};
use stockade_policy::{
    facts::{HostFacts, PathKind},
    model::Policy,
    plan::{Interpreter, RunRequest, ViewEntry},
};
use stockade_protocol::Verdict;

use super::{
    inspect::{Inspected, inspect},
    interpreters::{ResolvedPrefixes, check_interpreters, codecs, open_binds},
    rights::{check_grants, open_scratch},
};
use crate::{
    Options, Refusal, RefusalCause, audit,
    caller::{self, CallerError, Identity},
    facts,
    pool::PathIds,
    trusted::{refuse_led_astray, refuse_replaceable},
};

/// The caller, and the paths that a run asks for.
pub(super) struct HostQuery<'a> {
    pub(super) identity: &'a Identity,
    pub(super) policy: &'a Policy,
    pub(super) options: &'a Options,
    /// The host directory to expose.
    pub(super) scratch: Option<&'a str>,
    /// The paths are compared with a later look at the host.
    pub(super) is_compared: bool,
}

/// The paths of the host that a run shows, opened and checked.
pub(super) struct ShownHost {
    pub(super) scratch: Option<OpenedScratch>,
    /// The directories that a view has writable, in its order.
    pub(super) writable_trees: Vec<OpenedScratch>,
    /// The sockets that a view shows, in its order.
    pub(super) sockets: Vec<OpenedSocket>,
    /// Interpreters in place of the policy's.
    pub(super) interpreters: BTreeMap<String, Interpreter>,
    /// Directories that they need, where root shows them for somebody.
    pub(super) opened_binds: BTreeMap<PathBuf, OwnedFd>,
    /// Which file or directory each path is, where that is compared.
    pub(super) seen: PathIds,
}

impl ShownHost {
    /// Opens and looks at all of it. What a plan needs to know of it is added to the host's
    /// facts.
    ///
    /// # Errors
    /// Something of it must not be shown, is not granted, or cannot be opened.
    pub(super) fn open(query: &HostQuery<'_>, run_request: &RunRequest, host: &mut HostFacts) -> Result<Self, Refusal> {
        let &HostQuery { identity, policy, options, .. } = query;
        let writable = writable_paths(run_request)?;
        let has_host_directory = query.scratch.is_some() || !writable.is_empty();
        let homes = if has_host_directory { caller::homes() } else { Vec::new() };
        let registry = facts::registry_directory(identity);
        let opener = Opener {
            caller: &identity.caller,
            privileged: identity.privileged,
            unique_id: host.unique_id,
            homes: &homes,
            registry: Some(&registry),
            ceiling: options.scratch.as_deref(),
            roots: identity.roots_scratch(policy),
            shown: &ShownFiles::new(),
        };
        let is_of_host = host.image.is_none();
        let (interpreters, led, codecs) = scratch::as_caller(opener.caller, opener.privileged, || {
            if !is_of_host {
                // Those of the image were found in it.
                return Ok(Default::default());
            }
            check_interpreters(policy, options, run_request).map(|(interpreters, led)| {
                let codecs = codecs(policy, &interpreters);
                (interpreters, led, codecs)
            })
        })
        .map_err(CallerError::Rights)??;
        host.codecs = codecs;
        let shown = if has_host_directory { shown_files(policy, &interpreters, &led) } else { ShownFiles::new() };
        let opener = Opener { shown: &shown, ..opener };
        let judge = |place: &ScratchPath| {
            refuse_replaceable(place, identity, policy, options)?;
            refuse_led_astray(place, &interpreters, policy)?;
            check_grants(identity, &policy.name, Some(place.path()), options)
        };
        let scratch = query.scratch.map(|path| open_scratch(path, policy, &opener, judge)).transpose()?;
        let open = |path: &&str| open_scratch(path, policy, &opener, judge);
        let writable_trees: Vec<OpenedScratch> = writable.iter().map(open).collect::<Result<_, _>>()?;
        let sockets = sockets(run_request).map(|path| OpenedSocket::open(path, &opener)).collect::<Result<_, _>>()?;
        // Root could reach what is closed to the caller, and would show it.
        scratch::as_caller(opener.caller, opener.privileged, || inspect_view(host, run_request, opener.caller.uid))
            .map_err(CallerError::Rights)??;
        let seen = inspect(host, identity, policy, &interpreters, &led)?;
        audit::check_unseen(identity, paths(policy, &interpreters, host, scratch.iter().chain(&writable_trees)), &seen)?;
        let seen = if query.is_compared { own(&seen) } else { PathIds::new() };
        let opened_binds = open_binds(identity, &led, &opener)?;
        Ok(ShownHost { scratch, writable_trees, sockets, interpreters, opened_binds, seen })
    }
}

/// What a run shows read-only, wherever a path to it leads: what the policy names, interpreters and
/// their environments, used by this run or not.
fn shown_files(policy: &Policy, interpreters: &BTreeMap<String, Interpreter>, led: &ResolvedPrefixes) -> ShownFiles {
    let filesystem = &policy.filesystem;
    let of_policy = filesystem.read_only.iter().chain(&filesystem.read_only_optional).cloned();
    let of_runtimes = policy.runtimes.values().flat_map(|runtime| {
        runtime.venv.clone().into_iter().chain(runtime.compiler().map(Path::to_path_buf)).chain([runtime.interpreter()])
    });
    let of_interpreters = interpreters.values().flat_map(|interpreter| interpreter.read_only.iter().chain([&interpreter.program]));
    let all = of_interpreters.chain(led.values()).cloned().chain(of_runtimes).chain(of_policy);
    let id = |path: PathBuf| stat(&path).ok().map(|stat| ((stat.st_dev, stat.st_ino), path));
    // The first name of several is the one that the caller gave.
    all.filter_map(id).fold(ShownFiles::new(), |mut shown, (id, path)| {
        shown.entry(id).or_insert(path);
        shown
    })
}

/// The host paths that a view has writable.
fn writable_paths(run_request: &RunRequest) -> Result<Vec<&str>, ViewPathError> {
    let entries = run_request.view.iter().flat_map(|view| &view.entries);
    let trees = entries.filter_map(|entry| match entry {
        ViewEntry::Tree { source, .. } => Some(source),
        _ => None,
    });
    trees.map(|source| source.to_str().ok_or_else(|| ViewPathError::NotUtf8(source.clone()))).collect()
}

/// The sockets that a view shows.
fn sockets(run_request: &RunRequest) -> impl Iterator<Item = &Path> {
    run_request.view.iter().flat_map(|view| &view.entries).filter_map(|entry| match entry {
        ViewEntry::Socket { source, .. } => Some(source.as_path()),
        _ => None,
    })
}

impl RefusalCause for SocketError {
    fn verdict_and_reason(&self) -> (Verdict, &'static str) {
        let reason = match self.problem {
            SocketProblem::Unreadable(_) | SocketProblem::NotSocket => "view_source_missing",
            SocketProblem::NotOwned { .. } => "view_socket_not_owned",
            SocketProblem::Open(_) => "view_socket_replaceable",
            SocketProblem::MountCopy(_) | SocketProblem::CallerRights(_) => return (Verdict::SandboxError, "scratch_failed"),
        };
        (Verdict::BadRequest, reason)
    }
}

/// Why a path of a view is not opened.
#[derive(Debug, thiserror::Error)]
enum ViewPathError {
    #[error("{}: a path of the host must be UTF-8", .0.display())]
    NotUtf8(PathBuf),
    #[error(transparent)]
    Unresolved(ResolveError),
}

impl RefusalCause for ViewPathError {
    fn verdict_and_reason(&self) -> (Verdict, &'static str) {
        let reason = match self {
            ViewPathError::NotUtf8(_) => "view_path_malformed",
            ViewPathError::Unresolved(ResolveError::Foreign(_)) => "shown_foreign_link",
            ViewPathError::Unresolved(_) => "view_source_missing",
        };
        (Verdict::BadRequest, reason)
    }
}

/// Looks at the paths of the host that a view shows read-only: what is there, and where its links
/// lead. Only root's are followed. Of the caller's own directories, which hold nothing. What is shown is
/// the plan's to say.
fn inspect_view(host: &mut HostFacts, run_request: &RunRequest, caller: u32) -> Result<(), ViewPathError> {
    let entries = run_request.view.as_ref().map_or(&[][..], |view| &view.entries);
    for entry in entries {
        let optional = matches!(entry, ViewEntry::Show { optional: true, .. });
        entry.shown().iter().try_for_each(|source| inspect_shown(host, source, optional))?;
        if let ViewEntry::Show { source, .. } = entry {
            note_empty(host, source, caller);
        }
    }
    Ok(())
}

/// As with bubblewrap a path is left out only where nothing is; whether also where a link is not followed, the
/// plan says.
fn inspect_shown(host: &mut HostFacts, source: &Path, optional: bool) -> Result<(), ViewPathError> {
    let found = match resolve(source, Follow::Roots) {
        Ok(found) => found,
        Err(ResolveError::Missing(_)) => return Ok(()),
        Err(link @ ResolveError::Foreign(_)) if optional => {
            host.foreign.insert(source.to_path_buf(), link.to_string());
            return Ok(());
        }
        Err(error) => return Err(ViewPathError::Unresolved(error)),
    };
    let Some(stat) = found.stat else { return Ok(()) };
    let is_directory = FileType::from_raw_mode(stat.st_mode).is_dir();
    host.paths.insert(source.to_path_buf(), if is_directory { PathKind::Directory } else { PathKind::File });
    if found.real != source {
        host.led.insert(source.to_path_buf(), found.real);
    }
    Ok(())
}

/// Notes a directory of the caller's own that holds nothing.
fn note_empty(host: &mut HostFacts, source: &Path, caller: u32) {
    if host.paths.get(source) != Some(&PathKind::Directory) {
        return;
    }
    let real = host.led.get(source).map_or(source, PathBuf::as_path);
    let is_own = stat(real).is_ok_and(|stat| stat.st_uid == caller);
    if is_own && std::fs::read_dir(real).is_ok_and(|mut entries| entries.next().is_none()) {
        host.empty.insert(source.to_path_buf());
    }
}

/// Which file or directory each path is, to be compared later.
fn own(seen: &Inspected<'_>) -> PathIds {
    seen.iter().map(|(path, number)| (path.to_path_buf(), *number)).collect()
}

/// Every path of the host that a run shows, and where it leads.
fn paths<'p>(
    policy: &'p Policy,
    interpreters: &'p BTreeMap<String, Interpreter>,
    host: &'p HostFacts,
    writable: impl Iterator<Item = &'p OpenedScratch>,
) -> impl Iterator<Item = &'p Path> {
    let filesystem = &policy.filesystem;
    let needed = interpreters.values().flat_map(|interpreter| interpreter.read_only.iter().chain([&interpreter.program]));
    let paths = filesystem.read_only.iter().chain(&filesystem.read_only_optional).chain(needed).chain(host.led.values());
    let environments = policy.runtimes.values().filter_map(|runtime| runtime.venv.as_ref());
    paths.chain(environments).map(PathBuf::as_path).chain(writable.map(|opened| opened.facts.path.as_path()))
}
