//! Where the paths that a run shows of the host lead.
//!
//! What a policy names is shown through no link but root's, as any other could have been left
//! by code of an earlier run; where a path leads is held to what a policy may name. What is
//! found is shown by its path without links, which the sandbox opens through none. A
//! directory that code has put in the place of another is not told from it.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use rustix::{
    fs::{FileType, Stat, stat},
    io::Errno,
};
use stockade_launcher::{
    scratch,
    way::{self, Follow, NoWay},
};
use stockade_policy::{
    facts::{HostFacts, PathKind},
    is_never_shown,
    model::Policy,
    plan::Interpreter,
};

use super::interpreters::Led;
use crate::{
    Refusal,
    caller::Identity,
    facts::{Number, unreadable},
};

/// Which file or directory each path is; none of what is not there.
pub(super) type Looked<'a> = BTreeMap<&'a Path, Option<Number>>;

/// Looks at every path that the plan may show. `led`: where the directories lead that the
/// interpreters need, which were judged already. What the launcher may not reach is not there.
///
/// # Errors
/// A path leads where none may, or through a link that is not root's; or the host does not
/// say whether it is there.
pub(super) fn look_at<'a>(
    host: &mut HostFacts,
    identity: &Identity,
    policy: &'a Policy,
    interpreters: &'a BTreeMap<String, Interpreter>,
    led: &'a Led,
) -> Result<Looked<'a>, Refusal> {
    let mut seen = Looked::new();
    let mut note = |path: &'a Path, found: Option<Stat>| {
        if let Some(stat) = &found {
            let is_directory = FileType::from_raw_mode(stat.st_mode).is_dir();
            host.paths.insert(path.to_path_buf(), if is_directory { PathKind::Directory } else { PathKind::File });
        }
        seen.insert(path, found.map(|stat| (stat.st_dev, stat.st_ino)));
    };
    for path in policy.filesystem.read_only.iter().chain(&policy.filesystem.read_only_optional) {
        let (real, found) = find(path, |no_way| {
            let instead = scratch::as_caller(&identity.caller, identity.privileged, || way::instead_of(path)).ok().flatten();
            let remedy = instead.map_or_else(
                || String::from("name what it leads to instead"),
                |real| format!("if that is meant, name it without the link: {}", real.display()),
            );
            let shows = format!("policy `{}` shows {}", policy.name, path.display());
            Refusal::sandbox_error("shown_foreign_link", format!("{shows}: {no_way}; {remedy}"))
        })?;
        note(path, found);
        if let Some(real) = real {
            host.led.insert(path.clone(), real);
        }
    }
    for (path, real) in led {
        // There is no link on it, unless one has been put there since.
        let (_, found) = find(real, |no_way| Refusal::bad_request("shown_foreign_link", no_way.to_string()))?;
        note(path, found);
        if real != path {
            refuse_never_shown(path, real)?;
            host.led.insert(path.clone(), real.clone());
        }
    }
    // These are not shown by themselves: whether they are there is all that is asked.
    let commands = policy.runtimes.values().filter_map(|runtime| runtime.command.first()).map(Path::new);
    for path in commands.chain(interpreters.values().map(|interpreter| interpreter.program.as_path())) {
        note(path, there(path, stat(path))?);
    }
    Ok(seen)
}

/// What is at the end of a path, and the path without links where that is another.
fn find(path: &Path, foreign: impl FnOnce(NoWay) -> Refusal) -> Result<(Option<PathBuf>, Option<Stat>), Refusal> {
    let way = match way::walk(path, Follow::Roots) {
        Ok(way) => way,
        Err(no_way @ NoWay::Foreign(_)) => return Err(foreign(no_way)),
        Err(NoWay::TooManyLinks | NoWay::Missing(_) | NoWay::NotDirectory(_)) => return Ok((None, None)),
        Err(NoWay::Unreadable(at, errno)) => return Ok((None, there(&at, Err(errno))?)),
    };
    if way.real == path {
        return Ok((None, way.stat));
    }
    refuse_never_shown(path, &way.real)?;
    Ok((way.stat.is_some().then_some(way.real), way.stat))
}

/// None of what is not there or cannot be looked at by this process.
fn there(path: &Path, looked: Result<Stat, Errno>) -> Result<Option<Stat>, Refusal> {
    match looked {
        Ok(stat) => Ok(Some(stat)),
        Err(Errno::NOENT | Errno::NOTDIR | Errno::ACCESS | Errno::LOOP) => Ok(None),
        Err(errno) => Err(unreadable("look at", path, &errno.into())),
    }
}

fn refuse_never_shown(path: &Path, real: &Path) -> Result<(), Refusal> {
    if !is_never_shown(real) {
        return Ok(());
    }
    Err(Refusal::sandbox_error(
        "shown_system_directory",
        format!(
            "{} leads to {}, which no run is shown: the whole host, or what the sandbox has of its own or not at all; name the directories that the code needs",
            path.display(),
            real.display()
        ),
    ))
}
