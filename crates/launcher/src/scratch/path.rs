//! The path of a host scratch, and the making of one that is missing.
//!
//! Only root's links are followed: a caller cannot tell a link of their own from one that code
//! left in an earlier scratch. Where the path leads is judged before anything is made, and a new
//! directory is made and opened by descriptors. What an existing directory holds is
//! not judged here.

use std::{
    ffi::OsStr,
    path::{Component, Path, PathBuf},
};

use rustix::{
    fd::OwnedFd,
    fs::{AtFlags, Mode, OFlags, fstat, mkdirat, openat, unlinkat},
    io::Errno,
};
use stockade_policy::model::Policy;

use super::{OpenedScratch, Opener, ScratchError, ScratchProblem, as_caller, directory_paths::DirectoryPaths, finish};
use crate::{
    resolve::{self, Follow, ResolveError, ResolvedPath},
    tree,
};

/// Where a scratch is, or is to be made.
#[derive(Clone, Debug)]
pub struct ScratchPath {
    named: String,
    resolved: ResolvedPath,
    paths: DirectoryPaths,
    /// Its path below the directory of `--scratch`.
    below: PathBuf,
}

impl ScratchPath {
    /// Finds the place that `path` names, and changes nothing.
    ///
    /// # Errors
    /// It is missing (and the policy makes none), outside its ceiling, a home directory
    /// itself, the launcher's own, or reached through a link that is not root's.
    pub fn find(path: &str, policy: &Policy, opener: &Opener<'_>) -> Result<Self, ScratchError> {
        Self::resolve(path, policy, opener).map_err(|problem| ScratchError { path: path.to_owned(), problem })
    }

    fn resolve(path: &str, policy: &Policy, opener: &Opener<'_>) -> Result<Self, ScratchProblem> {
        let named = Path::new(path);
        if !named.is_absolute() {
            return Err(ScratchProblem::Relative);
        }
        if path.contains('\0') || named.components().any(|part| part == Component::ParentDir) || path.contains('\n') {
            return Err(ScratchProblem::Malformed);
        }
        let walked = as_caller(opener.caller, opener.privileged, || {
            let resolved = walk(named, Follow::Roots)?;
            let ceiling = opener.ceiling.map(|ceiling| walk(ceiling, Follow::Roots)).transpose()?;
            Ok::<_, ScratchProblem>((resolved, ceiling))
        });
        let (resolved, ceiling) = walked.map_err(ScratchProblem::CallerRights)??;
        let ceiling = ceiling.map(|ceiling| ceiling.real).unwrap_or_else(|| resolved.real.clone());
        let Ok(below) = resolved.real.strip_prefix(&ceiling).map(Path::to_path_buf) else {
            return Err(ScratchProblem::OutsideCeiling { real: resolved.real, ceiling });
        };
        let paths = judge(&resolved.real, opener)?;
        if resolved.missing > 0 && !policy.scratch.create {
            return Err(ScratchProblem::NotCreated(policy.name.to_string()));
        }
        Ok(ScratchPath { named: path.to_owned(), resolved, paths, below })
    }

    /// Its path without links.
    pub fn path(&self) -> &Path {
        &self.resolved.real
    }

    /// All paths that lead there.
    pub fn paths(&self) -> &DirectoryPaths {
        &self.paths
    }

    /// Its path below the directory of `--scratch`.
    pub(super) fn below(&self) -> &Path {
        &self.below
    }

    /// Whether it would be made.
    pub fn is_missing(&self) -> bool {
        self.resolved.missing > 0
    }

    /// Opens what is there as a scratch under `policy`, or makes it. A directory that was
    /// made is removed where it is refused.
    ///
    /// # Errors
    /// It cannot be made, is not a directory, not the caller's, or root's.
    pub fn open(&self, policy: &Policy, opener: &Opener<'_>) -> Result<OpenedScratch, ScratchError> {
        self.open_or_make(policy, opener).map_err(|problem| ScratchError { path: self.named.clone(), problem })
    }

    fn open_or_make(&self, policy: &Policy, opener: &Opener<'_>) -> Result<OpenedScratch, ScratchProblem> {
        let acted = |act: &dyn Fn() -> Result<OwnedFd, ScratchProblem>| {
            as_caller(opener.caller, opener.privileged, act).map_err(ScratchProblem::CallerRights)?
        };
        let ResolvedPath { real, missing, .. } = &self.resolved;
        if *missing == 0 {
            return finish(acted(&|| open_existing(real))?, self, policy, opener);
        }
        let (Some(above), Some(name), 1) = (real.parent(), real.file_name(), missing) else {
            return Err(ScratchProblem::NotMade(Errno::NOENT));
        };
        let parent = acted(&|| {
            let parent = tree::open_entry(above).map_err(ScratchProblem::NotMade)?;
            mkdirat(&parent, name, Mode::from_raw_mode(0o755)).map_err(ScratchProblem::NotMade)?;
            Ok(parent)
        })?;
        let made = acted(&|| open_made(&parent, name, opener).map_err(ScratchProblem::NotMade));
        let opened = made.and_then(|directory| finish(directory, self, policy, opener));
        if opened.is_err() {
            let remove = || unlinkat(&parent, name, AtFlags::REMOVEDIR);
            let _first_error_counts = as_caller(opener.caller, opener.privileged, remove);
        }
        opened
    }
}

/// Refuses a path at which no directory may be a scratch. Returns all paths that lead there.
fn judge(real: &Path, opener: &Opener<'_>) -> Result<DirectoryPaths, ScratchProblem> {
    if real.to_str().is_none() {
        return Err(ScratchProblem::NotUtf8(real.to_path_buf()));
    }
    let paths = DirectoryPaths::of(real).map_err(ScratchProblem::Unreadable)?;
    if paths.own().any(|path| path == Path::new("/") || opener.homes.iter().any(|home| home == path)) {
        return Err(ScratchProblem::Home);
    }
    if opener.registry.is_some_and(|registry| paths.contains(registry) || paths.below(registry).is_some()) {
        return Err(ScratchProblem::Registry);
    }
    Ok(paths)
}

fn open_existing(real: &Path) -> Result<OwnedFd, ScratchProblem> {
    tree::open_directory(real).map_err(|errno| match errno {
        Errno::NOTDIR => ScratchProblem::NotDirectory,
        Errno::NOENT => ScratchProblem::Missing,
        Errno::ACCESS => ScratchProblem::Closed(real.to_path_buf()),
        errno => ScratchProblem::Unreadable(errno),
    })
}

/// Opens the directory of the host that an absolute path leads to, sought as a scratch is: for
/// files that the launcher reads or writes where code may have put links. With the rights that
/// this process has now, see [`as_caller`]. `scratch`: the one of a run that is asked for.
///
/// # Errors
/// It is not there, or its path has a link that is not root's, or lies in that scratch.
pub fn open_directory(named: &Path, scratch: Option<&Path>) -> Result<OwnedFd, ScratchError> {
    let opened = find_outside(named, scratch).and_then(|real| open_existing(&real));
    opened.map_err(|problem| ScratchError { path: named.display().to_string(), problem })
}

/// Opens a file to be read, found as [`open_directory`] finds a directory. With its path without
/// links.
///
/// # Errors
/// As above.
pub fn open_file(named: &Path, scratch: Option<&Path>) -> Result<(OwnedFd, PathBuf), ScratchError> {
    let opened = find_outside(named, scratch).and_then(|real| match tree::open_to_read(&real) {
        Ok(file) => Ok((file, real)),
        Err(errno) => Err(ScratchProblem::Unreadable(errno)),
    });
    opened.map_err(|problem| ScratchError { path: named.display().to_string(), problem })
}

fn find_outside(named: &Path, scratch: Option<&Path>) -> Result<PathBuf, ScratchProblem> {
    let scratch = scratch.and_then(|scratch| scratch.canonicalize().ok());
    let follow = scratch.as_deref().map_or(Follow::Roots, Follow::RootsOutside);
    Ok(walk(named, follow)?.real)
}

/// Opens the directory that was made a moment ago. A user who may write above it can replace it
/// meanwhile.
fn open_made(parent: &OwnedFd, name: &OsStr, opener: &Opener<'_>) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = openat(parent, name, flags, Mode::empty())?;
    let stat = fstat(&directory)?;
    if stat.st_uid != opener.caller.uid || !tree::list(&directory, &mut |_| tree::Walk::Stop)? {
        return Err(Errno::STALE);
    }
    Ok(directory)
}

/// Resolves the path of a scratch.
fn walk(named: &Path, follow: Follow<'_>) -> Result<ResolvedPath, ScratchProblem> {
    resolve::resolve(named, follow).map_err(|error| match error {
        ResolveError::Foreign(link) => ScratchProblem::ForeignLink { link, real: resolve::instead_of(named) },
        error => error.into(),
    })
}
