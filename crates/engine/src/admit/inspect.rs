//! Resolves the host paths that a run shows.
//!
//! Only symlinks of root's are followed, since code of an earlier run could have left any
//! other; the path they lead to must be one that a policy may name. The sandbox then opens the
//! path without symlinks and follows none. It does not notice a directory that code has
//! replaced by another.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use rustix::{
    fs::{FileType, Stat, stat},
    io::Errno,
};
use stockade_launcher::{
    resolve::{self, Follow, ForeignLink, ResolveError},
    scratch,
};
use stockade_policy::{
    facts::{HostFacts, PathKind},
    is_never_shown,
    model::{OUTPUT, Policy},
    plan::Interpreter,
};
use stockade_protocol::Verdict::{self, BadRequest, SandboxError};

use super::interpreters::ResolvedPrefixes;
use crate::{
    Refusal, RefusalCause,
    caller::Identity,
    facts::{FileId, unreadable},
};

/// Why a path is not shown.
#[derive(Debug, thiserror::Error)]
enum ShownError {
    #[error("policy `{policy}` shows {}: {link}; {}", path.display(), match instead {
        Some(real) => format!("if that is meant, name it without the link: {}", real.display()),
        None => String::from("name what it leads to instead"),
    })]
    OfPolicy { policy: String, path: PathBuf, link: ForeignLink, instead: Option<PathBuf> },
    #[error(transparent)]
    OfInterpreter(ForeignLink),
    #[error(
        "{} leads to {}, which no run is shown: the whole host, or what the sandbox has of its own or not at all; name the directories that the code needs",
        path.display(),
        real.display()
    )]
    SystemDirectory { path: PathBuf, real: PathBuf },
}

impl RefusalCause for ShownError {
    fn verdict_and_reason(&self) -> (Verdict, &'static str) {
        match self {
            ShownError::OfPolicy { .. } => (SandboxError, "shown_foreign_link"),
            ShownError::OfInterpreter(_) => (BadRequest, "shown_foreign_link"),
            ShownError::SystemDirectory { .. } => (SandboxError, "shown_system_directory"),
        }
    }
}

/// The file or directory of each path; `None` where it does not exist.
pub(super) type Inspected<'a> = BTreeMap<&'a Path, Option<FileId>>;

/// Inspects every path that the plan may show. `led` has the directories that the interpreters
/// need, which are checked already, with their paths without symlinks. A path that the launcher
/// may not reach counts as missing.
///
/// # Errors
/// A path leads to a directory that is never shown, or through a symlink that is not root's;
/// or stat(2) fails.
pub(super) fn inspect<'a>(
    host: &mut HostFacts,
    identity: &Identity,
    policy: &'a Policy,
    interpreters: &'a BTreeMap<String, Interpreter>,
    led: &'a ResolvedPrefixes,
) -> Result<Inspected<'a>, Refusal> {
    let mut seen = Inspected::new();
    let mut note = |path: &'a Path, found: Option<Stat>| {
        if let Some(stat) = &found {
            let is_directory = FileType::from_raw_mode(stat.st_mode).is_dir();
            host.paths.insert(path.to_path_buf(), if is_directory { PathKind::Directory } else { PathKind::File });
        }
        seen.insert(path, found.map(|stat| (stat.st_dev, stat.st_ino)));
    };
    for path in policy.filesystem.read_only.iter().chain(&policy.filesystem.read_only_optional) {
        let (real, found) = find(path, |link| {
            let instead = scratch::as_caller(&identity.caller, identity.privileged, || resolve::instead_of(path)).ok().flatten();
            ShownError::OfPolicy { policy: policy.name.clone(), path: path.clone(), link, instead }
        })?;
        note(path, found);
        if let Some(real) = real {
            host.led.insert(path.clone(), real);
        }
    }
    for (path, real) in led {
        // It has no symlink, unless one has been made since it was resolved.
        let (_, found) = find(real, ShownError::OfInterpreter)?;
        note(path, found);
        if real != path {
            refuse_never_shown(path, real)?;
            host.led.insert(path.clone(), real.clone());
        }
    }
    // The run does not show these by name; the plan only needs to know whether they exist.
    let first = |words: &'a Vec<String>| words.first().filter(|word| *word != OUTPUT).map(Path::new);
    let commands = policy.runtimes.values().flat_map(|runtime| [&runtime.command, &runtime.compile]).filter_map(first);
    for path in commands.chain(interpreters.values().map(|interpreter| interpreter.program.as_path())) {
        note(path, there(path, stat(path))?);
    }
    Ok(seen)
}

/// The path without symlinks, where it differs, and the file that it leads to.
fn find(path: &Path, foreign: impl FnOnce(ForeignLink) -> ShownError) -> Result<(Option<PathBuf>, Option<Stat>), Refusal> {
    let way = match resolve::resolve(path, Follow::Roots) {
        Ok(way) => way,
        Err(ResolveError::Foreign(link)) => return Err(foreign(link).into()),
        Err(ResolveError::TooManyLinks | ResolveError::Missing(_) | ResolveError::NotDirectory(_)) => return Ok((None, None)),
        Err(ResolveError::Unreadable(at, errno)) => return Ok((None, there(&at, Err(errno))?)),
    };
    if way.real == path {
        return Ok((None, way.stat));
    }
    refuse_never_shown(path, &way.real)?;
    Ok((way.stat.is_some().then_some(way.real), way.stat))
}

/// `None` where the path does not exist or this process may not reach it.
fn there(path: &Path, looked: Result<Stat, Errno>) -> Result<Option<Stat>, Refusal> {
    match looked {
        Ok(stat) => Ok(Some(stat)),
        Err(Errno::NOENT | Errno::NOTDIR | Errno::ACCESS | Errno::LOOP) => Ok(None),
        Err(errno) => Err(unreadable("look at", path)(errno.into()).into()),
    }
}

fn refuse_never_shown(path: &Path, real: &Path) -> Result<(), ShownError> {
    if !is_never_shown(real) {
        return Ok(());
    }
    Err(ShownError::SystemDirectory { path: path.to_path_buf(), real: real.to_path_buf() })
}
