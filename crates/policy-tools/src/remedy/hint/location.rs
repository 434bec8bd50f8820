//! Where in a sandbox a path lies, by the plan alone.
//!
//! Symlinks of the sandbox's root are followed. Symlinks of the host are not known here.

use std::{
    os::unix::ffi::OsStrExt,
    path::{Component, Path, PathBuf},
};

use stockade_policy::{
    model::Policy,
    plan::{Plan, Protection, RootEntry},
};

use crate::compare::visible_paths;

/// The part of the sandbox that holds a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum PathLocation {
    /// The sandbox has nothing there.
    Outside,
    /// In a visible path of the host, or a device node.
    Visible,
    /// A file or directory that is made for the sandbox, read-only.
    Made,
    /// Masked in /proc.
    Masked,
    /// In a writable tmpfs.
    Writable,
    /// In the scratch.
    Scratch,
    /// Hidden in the scratch, by these globs.
    Hidden(Vec<String>),
    /// Read-only in the scratch, by these globs.
    ReadOnly(Vec<String>),
}

/// Symlinks that are followed.
const MAX_LINKS: usize = 8;

/// A path without `.`, `..` and symlinks, and where it lies. None if it is no path.
pub(super) fn locate(path: &str, plan: &Plan, policy: &Policy) -> Option<(PathBuf, PathLocation)> {
    let mut path = plain(&plan.scratch.path.join(path))?;
    for _ in 0..MAX_LINKS {
        match followed(&path, plan) {
            Some(next) => path = plain(&next)?,
            None => break,
        }
    }
    let location = find(&path, plan, policy);
    Some((path, location))
}

/// Without `.` and `..`, by name.
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

/// The target of a path through a symlink of the sandbox's root.
fn followed(path: &Path, plan: &Plan) -> Option<PathBuf> {
    plan.root.iter().find_map(|entry| {
        let RootEntry::Link { target, to } = entry else { return None };
        let link = Path::new("/").join(target);
        let rest = path.strip_prefix(&link).ok()?;
        let to = link.parent().unwrap_or(Path::new("/")).join(to);
        Some(if rest.as_os_str().is_empty() { to } else { to.join(rest) })
    })
}

fn find(path: &Path, plan: &Plan, policy: &Policy) -> PathLocation {
    if let Ok(below) = path.strip_prefix(&plan.scratch.path) {
        return in_scratch(below, plan, policy);
    }
    // A path that the policy shows and this host lacks counts as visible.
    let visible = visible_paths(policy).iter().any(|visible| path.starts_with(&visible.path));
    let mut found = if visible { PathLocation::Visible } else { PathLocation::Outside };
    for entry in plan.root.iter() {
        let at = |target: &PathBuf| Path::new("/").join(target);
        match entry {
            RootEntry::Mask { target } if path.starts_with(at(target)) => return PathLocation::Masked,
            RootEntry::Writable { target } | RootEntry::Devpts { target } if path.starts_with(at(target)) => return PathLocation::Writable,
            RootEntry::Bind { target, .. } | RootEntry::Device { target, .. } if path.starts_with(at(target)) => {
                found = PathLocation::Visible
            }
            RootEntry::Proc { target } if path.starts_with(at(target)) => found = PathLocation::Made,
            // The parent of a mount exists; its other contents do not.
            RootEntry::Directory { target, .. } | RootEntry::File { target, .. }
                if at(target) == path && found == PathLocation::Outside =>
            {
                found = PathLocation::Made;
            }
            _ => {}
        }
    }
    if path.parent().is_none() { PathLocation::Made } else { found }
}

fn in_scratch(below: &Path, plan: &Plan, policy: &Policy) -> PathLocation {
    for (path, _, protection) in plan.scratch.protected.iter().filter(|(.., protection)| *protection != Protection::Pinned) {
        if below.starts_with(path) {
            let of =
                |globs: &[String]| globs.iter().filter(|glob| fast_glob::glob_match(glob, path.as_os_str().as_bytes())).cloned().collect();
            return match protection {
                Protection::Hidden => PathLocation::Hidden(of(&policy.scratch.hidden)),
                Protection::ReadOnly | Protection::Pinned => PathLocation::ReadOnly(of(&policy.scratch.read_only)),
            };
        }
    }
    PathLocation::Scratch
}
