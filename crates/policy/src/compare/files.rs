//! Paths of the host that are shown, and what may be done in the scratch.

use std::path::{Path, PathBuf};

use super::{
    Area, Difference,
    globs::{covers, escapes},
};
use crate::{
    model::{Access, Policy, Scratch},
    plan::is_program_directory,
};

/// One path of the host as a policy shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Shown {
    pub path: PathBuf,
    /// Programs may be run from it.
    pub executable: bool,
    /// It may be missing on a host.
    pub optional: bool,
}

/// The paths that a policy shows, in the order in which the plan binds them: what lies
/// below an earlier one is not bound again, and a later one covers what it holds.
pub(crate) fn shown(policy: &Policy) -> Vec<Shown> {
    let mut out: Vec<Shown> = Vec::new();
    let required = policy.filesystem.read_only.iter().map(|path| (path, is_program_directory(path), false));
    let optional = policy.filesystem.read_only_optional.iter().map(|path| (path, false, true));
    for (path, executable, optional) in required.chain(optional) {
        // One that may be missing hides nothing that comes after it.
        if !out.iter().any(|earlier| !earlier.optional && path.starts_with(&earlier.path)) {
            out.push(Shown { path: path.clone(), executable, optional });
        }
    }
    out
}

/// Whether all of a path can be read.
fn readable(shown: &[Shown], path: &Path) -> bool {
    shown.iter().any(|other| path.starts_with(&other.path))
}

/// Whether programs can be run from all of a path, whatever of the optional is on a host.
fn runnable(shown: &[Shown], path: &Path) -> bool {
    let index = shown.iter().position(|other| other.executable && path.starts_with(&other.path));
    // What is bound later above it takes the right away.
    index.is_some_and(|index| {
        !shown.iter().skip(index + 1).any(|later| !later.executable && (path.starts_with(&later.path) || later.path.starts_with(path)))
    })
}

pub(super) fn shown_beyond(ceiling: &Policy, policy: &Policy, out: &mut Vec<Difference>) {
    let (above, here) = (shown(ceiling), shown(policy));
    if above != here {
        let text = |shown: &Shown| shown.path.display().to_string();
        let read: Vec<String> = here.iter().filter(|one| !readable(&above, &one.path)).map(text).collect();
        let run: Vec<String> = here.iter().filter(|one| one.executable && !runnable(&above, &one.path)).map(text).collect();
        if !read.is_empty() {
            let difference = Difference::new(Area::Files, "[filesystem] read_only, read_only_optional", "read these paths of the host");
            out.push(difference.items(read).follows(
                "code can read every file there that its host user may read, and connect to every socket there that this user may",
            ));
        }
        if !run.is_empty() {
            let difference = Difference::new(Area::Files, "[filesystem] read_only", "run programs from these paths of the host");
            out.push(difference.items(run).follows("code can start whatever program lies there"));
        }
    }
    let devices: Vec<String> = policy
        .filesystem
        .devices
        .iter()
        .filter(|device| !ceiling.filesystem.devices.contains(device))
        .map(|name| format!("/dev/{name}"))
        .collect();
    if !devices.is_empty() {
        let tty = devices.iter().any(|device| device == "/dev/tty");
        let difference = Difference::new(Area::Files, "[filesystem] devices", "open these device nodes").items(devices);
        let what = if tty {
            "code can open its own terminal, where it has one, past its redirected streams"
        } else {
            "code gets their bytes; none of them is a disk or the host's memory"
        };
        out.push(difference.follows(what));
    }
    for (name, runtime) in &policy.runtimes {
        let Some(venv) = &runtime.venv else { continue };
        let same = ceiling.runtimes.get(name).is_some_and(|other| other.venv.as_ref() == Some(venv));
        if !same && !runnable(&above, venv) {
            let difference = Difference::new(
                Area::Files,
                format!("[runtimes.{name}] venv"),
                "read and run this virtual environment, and the prefix of the interpreter that it was made from",
            );
            out.push(difference.items(vec![venv.display().to_string()]).follows("code can use every package that is installed there"));
        }
    }
}

pub(super) fn scratch_beyond(ceiling: &Scratch, scratch: &Scratch, out: &mut Vec<Difference>) {
    let mut add = |key: &str, says: &str, follows: &str| {
        out.push(Difference::new(Area::Scratch, format!("[scratch] {key}"), says).follows(follows));
    };
    if scratch.access == Access::Rw && ceiling.access == Access::Ro {
        add("access", "write in the scratch", "code can change and delete everything in the scratch that is not protected");
    }
    if scratch.create && !ceiling.create {
        add("create", "have a missing scratch directory made", "a misspelt scratch is made instead of refused");
    }
    if scratch.home && !ceiling.home {
        add(
            "home",
            "keep HOME in the scratch",
            "what a run leaves in HOME, such as start-up files of programs, is there for the next run in that scratch",
        );
    }
    let hides: Vec<&String> = scratch.hidden.iter().collect();
    let keeps: Vec<&String> = scratch.hidden.iter().chain(&scratch.read_only).collect();
    let hidden = unprotected("hidden", &ceiling.hidden, &hides);
    let changed = if scratch.access == Access::Rw { unprotected("read_only", &ceiling.read_only, &keeps) } else { Vec::new() };
    for (differences, says, follows) in [
        (hidden, "read what matches these globs in the scratch", "code can read what was hidden there"),
        (changed, "change what matches these globs in the scratch", "code can change and delete what was read-only there"),
    ] {
        out.extend(differences.into_iter().map(|difference| Difference { says: says.to_owned(), ..difference.follows(follows) }));
    }
}

/// The globs that a ceiling protects and these do not: those that certainly escape, and
/// those of which it cannot be told.
fn unprotected(key: &str, protected: &[String], by: &[&String]) -> Vec<Difference> {
    let open = protected.iter().filter(|glob| !by.iter().any(|wide| covers(wide, glob)));
    let (certain, doubtful): (Vec<String>, Vec<String>) = open.cloned().partition(|glob| escapes(glob, by.iter().copied()));
    let difference =
        |globs: Vec<String>| (!globs.is_empty()).then(|| Difference::new(Area::Scratch, format!("[scratch] {key}"), "").items(globs));
    difference(certain).into_iter().chain(difference(doubtful).map(Difference::undecided)).collect()
}
