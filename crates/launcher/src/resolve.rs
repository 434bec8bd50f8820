//! Resolving a path of the host, link by link.
//!
//! Code may have left a link wherever it could write. Such a link belongs to the caller or to the
//! owner of the scratch, so only root's links are trusted. Every name is looked up without
//! following a link, so that no link can be added meanwhile. The result is a path without links,
//! to be opened without following any; whether it is still the same directory then is not checked
//! here.

use std::{
    ffi::OsString,
    os::unix::ffi::OsStringExt,
    path::{Component, Path, PathBuf},
};

use rustix::{
    fs::{FileType, Stat, fstat, readlinkat},
    io::Errno,
};

use crate::tree;

/// Links that are followed on one path.
const MAX_LINKS: usize = 16;

/// A path without links, as far as it exists.
#[derive(Clone, Debug)]
pub struct ResolvedPath {
    /// The path.
    pub real: PathBuf,
    /// What is there; none where a name is missing.
    pub stat: Option<Stat>,
    /// How many of its last names are not there.
    pub(crate) missing: usize,
    /// The first link on it that is not root's.
    pub foreign: Option<ForeignLink>,
}

/// A link that code may have left.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{} is a link of uid {uid}, which may have been left by code that ran there; {} followed",
    link.display(),
    if *uid == 0 { "none in a scratch is" } else { "only root's are" }
)]
pub struct ForeignLink {
    /// Where it is.
    pub link: PathBuf,
    /// Whose it is.
    pub uid: u32,
}

/// Why a path cannot be resolved.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResolveError {
    /// See [`ForeignLink`].
    #[error(transparent)]
    Foreign(#[from] ForeignLink),
    /// They lead in a circle, or there are more than 16.
    #[error("too many links on the way")]
    TooManyLinks,
    /// What a link leads to, or what a `..` would leave.
    #[error("{} does not exist", .0.display())]
    Missing(PathBuf),
    /// A name below what is none.
    #[error("{} is not a directory", .0.display())]
    NotDirectory(PathBuf),
    /// The kernel does not let it be looked at.
    #[error("{}: {}", .0.display(), crate::error::describe(*.1))]
    Unreadable(PathBuf, Errno),
}

/// Which links are followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Follow<'a> {
    /// Root's alone.
    Roots,
    /// The same, and none that lies in this directory, which has no link on its path: code there
    /// may have root's id, where the directory is root's.
    RootsOutside(&'a Path),
    /// All: the caller of this module judges where they lead.
    All,
}

/// Resolves an absolute path.
///
/// # Errors
/// See [`ResolveError`].
pub fn resolve(named: &Path, follow: Follow<'_>) -> Result<ResolvedPath, ResolveError> {
    let is_plain = !named.components().any(|part| part == Component::ParentDir);
    // Most paths have no link, and then one look at the whole path is enough.
    if let Some(stat) = is_plain.then(|| tree::open_entry(named).and_then(fstat).ok()).flatten().filter(|stat| !is_link(stat)) {
        return Ok(ResolvedPath { real: named.components().collect(), stat: Some(stat), missing: 0, foreign: None });
    }
    let mut resolved = ResolvedPath { real: PathBuf::from("/"), stat: None, missing: 0, foreign: None };
    let mut pending = Vec::new();
    push_names(named, &mut pending);
    let mut links = 0;
    while let Some(part) = pending.pop() {
        if part == ".." {
            resolved.real.pop();
            continue;
        }
        let next = resolved.real.join(&part);
        let found = match tree::open_entry(&next) {
            Ok(found) => found,
            Err(Errno::NOENT) if !pending.iter().any(|part| part == "..") => {
                resolved.missing = 1 + pending.len();
                resolved.real = pending.into_iter().rev().fold(next, |above, part| above.join(part));
                return Ok(resolved);
            }
            Err(Errno::NOENT) => return Err(ResolveError::Missing(next)),
            Err(Errno::NOTDIR) => return Err(ResolveError::NotDirectory(resolved.real)),
            Err(errno) => return Err(ResolveError::Unreadable(next, errno)),
        };
        let stat = fstat(&found).map_err(|errno| ResolveError::Unreadable(next.clone(), errno))?;
        if !is_link(&stat) {
            resolved.real = next;
            continue;
        }
        let is_of_code = matches!(follow, Follow::RootsOutside(scratch) if next.starts_with(scratch));
        if stat.st_uid != 0 || is_of_code {
            let foreign = ForeignLink { link: next.clone(), uid: stat.st_uid };
            if follow != Follow::All {
                return Err(foreign.into());
            }
            resolved.foreign.get_or_insert(foreign);
        }
        links += 1;
        if links > MAX_LINKS {
            return Err(ResolveError::TooManyLinks);
        }
        let target = readlinkat(&found, c"", Vec::new()).map_err(|errno| ResolveError::Unreadable(next, errno))?;
        let target = PathBuf::from(OsString::from_vec(target.into_bytes()));
        if target.is_absolute() {
            resolved.real = PathBuf::from("/");
        }
        push_names(&target, &mut pending);
    }
    let found = tree::open_entry(&resolved.real).and_then(fstat).map_err(|errno| ResolveError::Unreadable(resolved.real.clone(), errno))?;
    resolved.stat = Some(found);
    Ok(resolved)
}

/// What to name in place of a path whose link is not followed, where the caller may find that
/// out.
pub fn instead_of(named: &Path) -> Option<PathBuf> {
    let above = || Some(named.parent()?.canonicalize().ok()?.join(named.file_name()?));
    named.canonicalize().ok().or_else(above)
}

fn is_link(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode).is_symlink()
}

/// The names of a path, the first one last.
fn push_names(path: &Path, pending: &mut Vec<OsString>) {
    let names = path.components().rev().filter(|part| matches!(part, Component::Normal(_) | Component::ParentDir));
    pending.extend(names.map(|part| part.as_os_str().to_owned()));
}
