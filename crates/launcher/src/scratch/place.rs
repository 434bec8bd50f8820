//! The way to a host scratch, and the making of one that is missing.
//!
//! Links on the way are followed where they are root's, and nowhere else: a caller cannot
//! tell a link of their own from one that code left in an earlier scratch. Where the way
//! leads is judged before anything is made, and what is made is made, opened and given away
//! by descriptors. What a directory that is there holds is not judged here.

use std::{
    ffi::OsStr,
    path::{Component, Path},
    time::SystemTime,
};

use rustix::{
    fd::OwnedFd,
    fs::{AtFlags, Gid, Mode, OFlags, Uid, fchown, fstat, mkdirat, openat, unlinkat},
    io::Errno,
};
use stockade_policy::model::Policy;

use super::{OpenedScratch, Opener, ScratchError, as_caller, finish};
use crate::{
    error::describe,
    tree,
    way::{self, Follow, NoWay, Way},
};

/// The owner of a scratch that root makes for itself: no code may run as root, nor leave
/// files that are root's.
const NOBODY: u32 = 65534;

/// Where a scratch is, or is to be made.
#[derive(Clone, Debug)]
pub struct Place {
    named: String,
    way: Way,
}

type MakeError<'a> = dyn Fn(&'static str, String) -> ScratchError + 'a;

impl Place {
    /// Finds the place that `path` names, and changes nothing.
    ///
    /// # Errors
    /// It is missing (and the policy makes none), outside its ceiling, a home directory
    /// itself, the launcher's own, or reached through a link that is not root's.
    pub fn find(path: &str, policy: &Policy, opener: &Opener<'_>) -> Result<Self, ScratchError> {
        let error = |reason, why: String| ScratchError { path: path.to_owned(), reason, why };
        let named = Path::new(path);
        if !named.is_absolute() {
            return Err(error("scratch_relative", String::from("name an absolute path")));
        }
        if path.contains('\0') || named.components().any(|part| part == Component::ParentDir) || path.contains('\n') {
            return Err(error("scratch_malformed", String::from("the path must hold no `..`, NUL or line break")));
        }
        let walked = as_caller(opener.caller, opener.privileged, || {
            let way = walk(named, &error)?;
            let ceiling = opener.ceiling.map(|ceiling| walk(ceiling, &error)).transpose()?;
            Ok((way, ceiling))
        });
        let (way, ceiling) = walked.map_err(|errno| no_rights(&error, errno))??;
        if let Some(ceiling) = ceiling.filter(|ceiling| !way.real.starts_with(&ceiling.real)) {
            let why = format!(
                "it leads to {}; it must be {}, which --scratch names, or lie below it",
                way.real.display(),
                ceiling.real.display()
            );
            return Err(error("scratch_outside_ceiling", why));
        }
        judge(&way.real, opener, &error)?;
        if way.missing > 0 && !policy.scratch.create {
            return Err(error(
                "scratch_missing",
                format!("it does not exist; make it, or let policy `{}` make it by `[scratch] create = true`", policy.name),
            ));
        }
        Ok(Place { named: path.to_owned(), way })
    }

    /// Its path without links.
    pub fn path(&self) -> &Path {
        &self.way.real
    }

    /// Whether it would be made.
    pub fn is_missing(&self) -> bool {
        self.way.missing > 0
    }

    /// Opens what is there as a scratch under `policy`, or makes it. A directory that was
    /// made is removed where it is refused.
    ///
    /// # Errors
    /// It cannot be made, is not a directory, not the caller's, or root's.
    pub fn open(self, policy: &Policy, opener: &Opener<'_>) -> Result<OpenedScratch, ScratchError> {
        let error = |reason, why: String| ScratchError { path: self.named.clone(), reason, why };
        let acted = |act: &dyn Fn() -> Result<OwnedFd, ScratchError>| {
            as_caller(opener.caller, opener.privileged, act).map_err(|errno| no_rights(&error, errno))?
        };
        let Way { real, missing, .. } = &self.way;
        if *missing == 0 {
            return finish(acted(&|| open_existing(real, &error))?, real.clone(), policy, opener, &error);
        }
        let refused = |errno| {
            error("scratch_not_made", format!("cannot make it: {}; its parent must exist and be writable by the caller", describe(errno)))
        };
        let (Some(above), Some(name), 1) = (real.parent(), real.file_name(), missing) else { return Err(refused(Errno::NOENT)) };
        let begun = SystemTime::now();
        let parent = acted(&|| {
            let parent = tree::open_entry(above).map_err(refused)?;
            mkdirat(&parent, name, Mode::from_raw_mode(0o755)).map_err(refused)?;
            Ok(parent)
        })?;
        let made = acted(&|| open_made(&parent, name, opener, begun).map_err(refused));
        let opened = made.and_then(|directory| finish(directory, real.clone(), policy, opener, &error));
        if opened.is_err() {
            let remove = || unlinkat(&parent, name, AtFlags::REMOVEDIR);
            let _first_error_counts = as_caller(opener.caller, opener.privileged, remove);
        }
        opened
    }
}

fn no_rights(error: &MakeError<'_>, errno: Errno) -> ScratchError {
    error("scratch_failed", format!("cannot change to the caller's rights: {errno}"))
}

/// What no directory at this path could be a scratch for.
fn judge(real: &Path, opener: &Opener<'_>, error: &MakeError<'_>) -> Result<(), ScratchError> {
    if real.to_str().is_none() {
        return Err(error(
            "scratch_malformed",
            format!("it is {real:?}, which is not UTF-8, as results and plans are; rename the directory"),
        ));
    }
    if real == Path::new("/") || opener.homes.iter().any(|home| home == real) {
        return Err(error("scratch_is_home", String::from("it is the root or a home directory itself; use a directory below it")));
    }
    if opener.registry.is_some_and(|registry| real.starts_with(registry) || registry.starts_with(real)) {
        return Err(error("scratch_holds_registry", String::from("the launcher keeps its own records there; use another directory")));
    }
    Ok(())
}

fn open_existing(real: &Path, error: &MakeError<'_>) -> Result<OwnedFd, ScratchError> {
    tree::open_directory(real).map_err(|errno| match errno {
        Errno::NOTDIR => error("scratch_not_directory", String::from("it is not a directory")),
        Errno::NOENT => error("scratch_missing", String::from("it does not exist")),
        Errno::ACCESS => closed(real, error),
        errno => error("scratch_unreadable", describe(errno)),
    })
}

/// What a run that was cut off with its launcher can leave behind.
pub(super) fn closed(real: &Path, error: &MakeError<'_>) -> ScratchError {
    let why = describe(Errno::ACCESS);
    error("scratch_unreadable", format!("{why}; if earlier code has closed it, its owner opens it by chmod u+rwx {}", real.display()))
}

/// Opens the directory of the host that an absolute path leads to, sought as a scratch is: for
/// files that the launcher reads or writes where code may have put links. With whatever rights
/// this process has now, see [`as_caller`].
///
/// # Errors
/// It is not there, or a link on the way is not root's.
pub fn open_directory(named: &Path) -> Result<OwnedFd, ScratchError> {
    let error = |reason, why| ScratchError { path: named.display().to_string(), reason, why };
    open_existing(&walk(named, &error)?.real, &error)
}

/// Opens the directory that was made a moment ago, and where root has made it for itself
/// gives it to nobody. Whoever may write above it can put another in its place meanwhile:
/// one of root's stays root's where it holds anything, has been as it is since before
/// `begun`, or can be written by others, who could have emptied it just now.
fn open_made(parent: &OwnedFd, name: &OsStr, opener: &Opener<'_>, begun: SystemTime) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = openat(parent, name, flags, Mode::empty())?;
    let stat = fstat(&directory)?;
    if stat.st_uid != opener.caller.uid || !tree::list(&directory, &mut |_| tree::Walk::Stop)? {
        return Err(Errno::STALE);
    }
    if opener.privileged && opener.caller.uid == 0 {
        let begun = begun.duration_since(SystemTime::UNIX_EPOCH).map_or(i64::MAX, |since| since.as_secs().cast_signed());
        // The kernel's clock for files is a little behind.
        if stat.st_mtime < begun.saturating_sub(1) || Mode::from_raw_mode(stat.st_mode).intersects(Mode::WGRP | Mode::WOTH) {
            return Err(Errno::STALE);
        }
        fchown(&directory, Some(Uid::from_raw(NOBODY)), Some(Gid::from_raw(NOBODY)))?;
    }
    Ok(directory)
}

/// The way to a scratch, worded as its callers know it.
fn walk(named: &Path, error: &MakeError<'_>) -> Result<Way, ScratchError> {
    way::walk(named, Follow::Roots).map_err(|no_way| {
        let reason = match &no_way {
            NoWay::Foreign(_) => {
                let remedy = match way::instead_of(named) {
                    Some(real) => format!("name it without the link: {}", real.display()),
                    None => String::from("name the directory itself"),
                };
                return error("scratch_foreign_link", format!("{no_way}; {remedy}"));
            }
            NoWay::TooManyLinks => "scratch_link_loop",
            NoWay::Missing(_) => "scratch_missing",
            NoWay::NotDirectory(_) => "scratch_not_directory",
            NoWay::Unreadable(..) => "scratch_unreadable",
        };
        error(reason, no_way.to_string())
    })
}
