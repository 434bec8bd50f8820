//! What of a host scratch must be kept from the code.
//!
//! These are matches of the policy's globs; programs with set-ID bits or file capabilities;
//! sockets, fifos and devices, at whose other end the host may sit; directories that cannot be
//! looked into, which the code could open to itself (chmod) and find any of these in; what the
//! run shows read-only elsewhere, such as an interpreter's environment, by whatever path; and what
//! other mounts lie on, where the run sees something else. The directories above each are pinned,
//! so that the code of one run moves nothing past the walk of another. How they are covered is
//! decided by the plan. What somebody of the host moves during the walk may be missed.

use std::{
    collections::BTreeMap,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

use rustix::{fd::OwnedFd, fs::FileType};
use stockade_policy::{facts::PathKind, model::Policy, plan::Protection};

use super::{FileId, Opener, ScratchProblem, usage::TreeUse};
use crate::tree::{self, TreeEntry, Walk};

/// A path below scratch, its kind, and how it is kept from the code.
type Protected = (PathBuf, PathKind, Protection);

/// How many such paths a scratch may hold: each is a mount, which the kernel makes and the
/// executor finds again.
pub(super) const MAX_PROTECTED: usize = 4096;

/// What was seen in a scratch.
#[derive(Default)]
pub(super) struct Inspected {
    pub(super) protected: Vec<(Protected, Option<FileId>)>,
    pub(super) before: TreeUse,
}

/// The state of one walk. What lies below a directory is visited directly after it, so the last
/// path of each kind is enough to know what is covered already.
#[derive(Default)]
struct Inspection {
    seen: Inspected,
    /// Directories above what is kept from the code: they must not be renamed.
    pinned: BTreeMap<PathBuf, Option<FileId>>,
    /// The ids of the directories above what is visited, its own the last.
    ids_above: Vec<Option<FileId>>,
    hidden: Option<PathBuf>,
    read_only: Option<PathBuf>,
    /// The first path beyond [`MAX_PROTECTED`].
    beyond: Option<PathBuf>,
}

/// Looks through a scratch, and counts all of it.
///
/// # Errors
/// The directory itself cannot be read, or holds too much that must be kept from the code.
pub(super) fn inspect(directory: &OwnedFd, policy: &Policy, opener: &Opener<'_>) -> Result<Inspected, ScratchProblem> {
    let failed = |errno| ScratchProblem::NotListed(Some(errno));
    let mount = tree::mount_of(directory).map_err(failed)?;
    let mut inspection = Inspection::default();
    let whole = tree::walk(directory, &mut |entry| {
        // Root's copy for the run is without what is mounted below.
        let is_shown = !opener.privileged || entry.mount() == mount;
        inspection.visit(entry, is_shown, policy, opener)
    });
    let whole = whole.map_err(failed)?;
    match inspection.beyond {
        Some(path) => Err(ScratchProblem::ProtectsTooMuch { path, policy: policy.name.clone() }),
        None if whole => Ok(inspection.finish()),
        None => Err(ScratchProblem::NotListed(None)),
    }
}

/// How a glob of the policy keeps a path from the code.
fn named(policy: &Policy, path: &Path) -> Option<Protection> {
    let matches = |globs: &[String]| globs.iter().any(|glob| tree::matches(glob, path));
    match () {
        () if matches(&policy.scratch.hidden) => Some(Protection::Hidden),
        () if matches(&policy.scratch.read_only) => Some(Protection::ReadOnly),
        () => None,
    }
}

impl Inspection {
    fn visit(&mut self, entry: &TreeEntry<'_>, is_shown: bool, policy: &Policy, opener: &Opener<'_>) -> Walk {
        if entry.path.as_os_str().is_empty() {
            return Walk::Stop;
        }
        self.seen.before.add(entry);
        let is_below = |above: &Option<PathBuf>| above.as_ref().is_some_and(|above| entry.path.starts_with(above));
        if entry.kind.is_symlink() || is_below(&self.hidden) {
            return Walk::On;
        }
        let depth = entry.path.as_os_str().as_bytes().iter().filter(|byte| **byte == b'/').count();
        let id = is_shown.then(|| entry.file_id());
        self.ids_above.truncate(depth);
        self.ids_above.push(id);
        let is_file = matches!(entry.kind, FileType::RegularFile | FileType::Directory);
        let leads_out = (entry.closed || !is_shown || !is_file).then_some(Protection::Hidden);
        let named = named(policy, entry.path);
        // Through a mapping it could be changed and keep the bits, which write(2) takes away.
        let obeyed = (entry.gives_rights() || opener.shown.contains_key(&entry.file_id())).then_some(Protection::ReadOnly);
        let Some(protection) = leads_out.or(named).or(obeyed) else { return Walk::On };
        if protection == Protection::ReadOnly && is_below(&self.read_only) {
            return Walk::On;
        }
        self.pin_above(entry.path, depth);
        let kind = if entry.kind.is_dir() { PathKind::Directory } else { PathKind::File };
        match protection {
            Protection::Hidden => self.hidden = Some(entry.path.to_path_buf()),
            Protection::ReadOnly | Protection::Pinned => self.read_only = Some(entry.path.to_path_buf()),
        }
        self.seen.protected.push(((entry.path.to_path_buf(), kind, protection), id));
        if self.seen.protected.len() + self.pinned.len() > MAX_PROTECTED {
            self.beyond = Some(entry.path.to_path_buf());
            return Walk::Stop;
        }
        Walk::On
    }

    fn pin_above(&mut self, path: &Path, depth: usize) {
        let above = path.ancestors().skip(1).take_while(|above| !above.as_os_str().is_empty());
        for (above, depth) in above.zip((0..depth).rev()) {
            // All directories above a pinned one are pinned already.
            if self.pinned.insert(above.to_path_buf(), self.ids_above.get(depth).copied().flatten()).is_some() {
                break;
            }
        }
    }

    fn finish(self) -> Inspected {
        let Inspection { seen: Inspected { mut protected, before }, mut pinned, .. } = self;
        for ((path, ..), _) in &protected {
            pinned.remove(path);
        }
        protected.extend(pinned.into_iter().map(|(path, id)| ((path, PathKind::Directory, Protection::Pinned), id)));
        // Above before below: what lies over a directory must not be laid on what it covers.
        protected.sort_by(|((a, ..), _), ((b, ..), _)| a.cmp(b));
        Inspected { protected, before }
    }
}
