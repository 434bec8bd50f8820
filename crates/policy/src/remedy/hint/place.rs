//! Where a path lies in a sandbox, by the plan alone.
//!
//! Links that the sandbox's root has are followed; those of the host are not known here.

use std::path::{Component, Path, PathBuf};

use crate::{
    compare::{covers, shown},
    model::Policy,
    plan::{Plan, Protection, RootEntry},
};

/// Where a path lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// Nothing of the sandbox is there.
    Outside,
    /// In something that is shown of the host, or a device of it.
    Shown,
    /// A file or directory of the sandbox's own, read-only.
    Own,
    /// Masked in /proc.
    Masked,
    /// In a place of memory that may be written.
    Writable,
    /// In the scratch.
    Scratch,
    /// Hidden in the scratch, by these globs.
    Hidden(Vec<String>),
    /// Kept from changes in the scratch; the globs as in `Hidden`.
    Kept(Vec<String>),
}

/// How many links are followed.
const MOST_LINKS: usize = 8;

/// A path in its plain form, and where it lies. None for what is no path at all.
pub(super) fn place(path: &str, plan: &Plan, policy: &Policy) -> Option<(PathBuf, Place)> {
    let mut path = plain(&plan.scratch.path.join(path))?;
    for _ in 0..MOST_LINKS {
        match followed(&path, plan) {
            Some(next) => path = plain(&next)?,
            None => break,
        }
    }
    let place = find(&path, plan, policy);
    Some((path, place))
}

/// Without `.` and `..`, as far as names go.
fn plain(path: &Path) -> Option<PathBuf> {
    let mut out = PathBuf::from("/");
    for part in path.components() {
        match part {
            Component::Normal(name) => out.push(name),
            Component::ParentDir => drop(out.pop()),
            Component::RootDir | Component::CurDir => {}
            Component::Prefix(_) => return None,
        }
    }
    Some(out)
}

/// A path behind a link of the sandbox's root.
fn followed(path: &Path, plan: &Plan) -> Option<PathBuf> {
    plan.root.iter().find_map(|entry| {
        let RootEntry::Link { target, to } = entry else { return None };
        let link = Path::new("/").join(target);
        let rest = path.strip_prefix(&link).ok()?;
        let to = link.parent().unwrap_or(Path::new("/")).join(to);
        Some(if rest.as_os_str().is_empty() { to } else { to.join(rest) })
    })
}

fn find(path: &Path, plan: &Plan, policy: &Policy) -> Place {
    if let Ok(below) = path.strip_prefix(&plan.scratch.path) {
        return in_scratch(below, plan, policy);
    }
    // What the policy shows where the host has it is not outside where the host has it not.
    let shown = shown(policy).iter().any(|shown| path.starts_with(&shown.path));
    let mut found = if shown { Place::Shown } else { Place::Outside };
    for entry in plan.root.iter() {
        let at = |target: &PathBuf| Path::new("/").join(target);
        match entry {
            RootEntry::Mask { target } if path.starts_with(at(target)) => return Place::Masked,
            RootEntry::Writable { target } | RootEntry::Devpts { target } if path.starts_with(at(target)) => return Place::Writable,
            RootEntry::Bind { target, .. } | RootEntry::Device { target, .. } if path.starts_with(at(target)) => found = Place::Shown,
            RootEntry::Proc { target } if path.starts_with(at(target)) => found = Place::Own,
            // A directory on the way to something: itself, not what it would hold elsewhere.
            RootEntry::Directory { target, .. } | RootEntry::File { target, .. } if at(target) == path && found == Place::Outside => {
                found = Place::Own;
            }
            _ => {}
        }
    }
    if path.parent().is_none() { Place::Own } else { found }
}

fn in_scratch(below: &Path, plan: &Plan, policy: &Policy) -> Place {
    for (path, _, protection) in plan.scratch.protected.iter().filter(|(.., protection)| *protection != Protection::Pinned) {
        if below.starts_with(path) {
            let of = |globs: &[String]| {
                let path = path.to_string_lossy();
                globs.iter().filter(|glob| covers(glob, &path)).cloned().collect()
            };
            return match protection {
                Protection::Hidden => Place::Hidden(of(&policy.scratch.hidden)),
                Protection::ReadOnly | Protection::Pinned => Place::Kept(of(&policy.scratch.read_only)),
            };
        }
    }
    Place::Scratch
}
