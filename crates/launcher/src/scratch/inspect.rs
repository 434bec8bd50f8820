//! What of a host scratch must be kept from the code.
//!
//! These are matches of the policy's globs; programs with set-ID bits or file capabilities;
//! sockets, fifos and devices, at whose other end the host may sit; directories that cannot be
//! looked into, which the code could open to itself (chmod) and find any of these in; what the
//! run shows read-only elsewhere, such as an interpreter's environment, by whatever path; and what
//! other mounts lie on, where the run sees something else. The directories above each are pinned,
//! so that the code of one run moves nothing past the walk of another. How they are covered is
//! decided by the plan. What somebody of the host moves during the walk may be missed: a small
//! scratch is looked through once more when all is covered ([`SecondLook`]).

use std::{
    collections::{BTreeMap, BTreeSet},
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

use rustix::{
    fd::OwnedFd,
    fs::FileType,
    io::Errno,
    time::{ClockId, clock_gettime},
};
use stockade_policy::{
    facts::PathKind,
    model::{Policy, Scratch},
    plan::Protection,
};

use super::{
    FileId, Opener, ScratchProblem, ShownFiles,
    usage::{LinkedFiles, TreeUse},
};
use crate::tree::{self, TreeEntry, Walk};

/// A path below scratch, its kind, and how it is kept from the code.
type Protected = (PathBuf, PathKind, Protection);

/// How many such paths a scratch may hold: each is a mount, which the kernel makes and the
/// executor finds again.
pub(super) const MAX_PROTECTED: usize = 4096;

/// A larger scratch is looked through once: the second look would hold up every run for what the
/// host alone can do.
const MAX_SEEN_TWICE: u64 = 1024;

/// The globs of a policy. A scratch that a request has chosen below the directory of `--scratch` is
/// under those of both directories.
#[derive(Clone)]
pub(super) struct Rules {
    globs: Scratch,
    /// The path of the scratch below that directory; empty where it is the directory itself.
    below: PathBuf,
}

impl Rules {
    /// # Errors
    /// A glob keeps from the code, or read-only, the scratch as a whole.
    pub(super) fn new(policy: &Policy, below: PathBuf) -> Result<Self, ScratchProblem> {
        let rules = Rules { globs: policy.scratch.clone(), below: PathBuf::new() };
        let whole = below.ancestors().filter(|above| !above.as_os_str().is_empty()).find(|above| rules.named(above).is_some());
        match whole {
            Some(above) => Err(ScratchProblem::Protected { above: above.to_path_buf(), policy: policy.name.to_string() }),
            None => Ok(Rules { below, ..rules }),
        }
    }

    /// How a path of the scratch is kept from the code.
    fn named(&self, path: &Path) -> Option<Protection> {
        let whole = self.below.join(path);
        let matches = |globs: &[String]| globs.iter().any(|glob| tree::matches(glob, path) || tree::matches(glob, &whole));
        match () {
            () if matches(&self.globs.hidden) => Some(Protection::Hidden),
            () if matches(&self.globs.read_only) => Some(Protection::ReadOnly),
            () => None,
        }
    }
}

/// What was seen in a scratch.
#[derive(Default)]
pub(super) struct Inspected {
    pub(super) protected: Vec<(Protected, Option<FileId>)>,
    pub(super) before: TreeUse,
    pub(super) linked: LinkedFiles,
    /// None: it is too large to be looked through twice.
    pub(super) second_look: Option<Box<SecondLook>>,
}

/// What is needed to look through a scratch once more, when all that was found is covered.
pub(crate) struct SecondLook {
    rules: Rules,
    shown: ShownFiles,
    privileged: bool,
    /// When the first look began, by the clock that files have: seconds and nanoseconds.
    since: (i64, u32),
    covered: BTreeSet<FileId>,
    /// All that the first look came to.
    seen: BTreeSet<FileId>,
}

impl SecondLook {
    /// The first path that is to be kept from the code, was there when the first look began, and
    /// is not covered: it was moved past that look. What was made since then is not looked for.
    ///
    /// # Errors
    /// The directory cannot be walked.
    pub(crate) fn missed(&self, directory: &OwnedFd) -> Result<Option<PathBuf>, Errno> {
        let mount = tree::mount_of(directory)?;
        let (mut hidden, mut read_only, mut missed): (Option<PathBuf>, Option<PathBuf>, _) = (None, None, None);
        tree::walk(directory, &mut |entry| {
            let is_below = |above: &Option<PathBuf>| above.as_ref().is_some_and(|above| entry.path.starts_with(above));
            // What root's copy does not have, or what lies below a directory that is covered.
            if (self.privileged && entry.mount() != mount) || entry.kind.is_symlink() || is_below(&hidden) {
                return Walk::On;
            }
            let id = entry.file_id();
            // A name can have changed; whether a program gives rights has been found out.
            let obeyed = || self.shown.contains_key(&id) || (!self.seen.contains(&id) && entry.gives_rights());
            match kept(entry, true, &self.rules, obeyed) {
                None => {}
                Some(Protection::ReadOnly) if is_below(&read_only) => {}
                Some(Protection::Hidden) if self.covered.contains(&id) => hidden = Some(entry.path.to_path_buf()),
                Some(_) if self.covered.contains(&id) => read_only = Some(entry.path.to_path_buf()),
                Some(_) if entry.born().is_none_or(|born| born < self.since) => {
                    missed = Some(entry.path.to_path_buf());
                    return Walk::Stop;
                }
                // Made since. Older files that were moved below it are looked at.
                Some(_) => {}
            }
            Walk::On
        })?;
        Ok(missed)
    }
}

/// A file with several names.
struct Linked {
    /// Names in the scratch.
    seen: u64,
    /// All names.
    links: u64,
    bytes: u64,
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
    /// Of all that is visited, as long as it is to be seen twice.
    ids: BTreeSet<FileId>,
    /// Files with several names, and what was seen of them.
    linked: BTreeMap<FileId, Linked>,
    /// The first path beyond [`MAX_PROTECTED`].
    beyond: Option<PathBuf>,
}

/// Looks through a scratch, and counts all of it.
///
/// # Errors
/// The directory itself cannot be read, or holds too much that must be kept from the code.
pub(super) fn inspect(directory: &OwnedFd, rules: Rules, policy: &str, opener: &Opener<'_>) -> Result<Inspected, ScratchProblem> {
    let failed = |errno| ScratchProblem::NotListed(Some(errno));
    let begun = clock_gettime(ClockId::RealtimeCoarse);
    let since = (begun.tv_sec, u32::try_from(begun.tv_nsec).unwrap_or(0));
    let mount = tree::mount_of(directory).map_err(failed)?;
    let mut inspection = Inspection::default();
    let whole = tree::walk(directory, &mut |entry| {
        // Root's copy for the run is without what is mounted below.
        let is_shown = !opener.privileged || entry.mount() == mount;
        inspection.visit(entry, is_shown, &rules, opener.shown)
    });
    let whole = whole.map_err(failed)?;
    match inspection.beyond {
        Some(path) => Err(ScratchProblem::ProtectsTooMuch { path, policy: policy.to_owned() }),
        None if whole => {
            let ids = std::mem::take(&mut inspection.ids);
            let mut seen = inspection.finish();
            seen.second_look = (seen.before.entries <= MAX_SEEN_TWICE).then(|| {
                let covered = seen.protected.iter().filter(|((.., protection), _)| *protection != Protection::Pinned);
                let covered = covered.filter_map(|(_, id)| *id).collect();
                Box::new(SecondLook { rules, shown: opener.shown.clone(), privileged: opener.privileged, since, covered, seen: ids })
            });
            Ok(seen)
        }
        None => Err(ScratchProblem::NotListed(None)),
    }
}

/// How an entry is to be kept from the code.
fn kept(entry: &TreeEntry<'_>, is_shown: bool, rules: &Rules, is_obeyed: impl FnOnce() -> bool) -> Option<Protection> {
    let is_file = matches!(entry.kind, FileType::RegularFile | FileType::Directory);
    let leads_out = (entry.closed || !is_shown || !is_file).then_some(Protection::Hidden);
    let named = rules.named(entry.path);
    // Through a mapping it could be changed and keep the bits, which write(2) takes away.
    let obeyed = || is_obeyed().then_some(Protection::ReadOnly);
    leads_out.or(named).or_else(obeyed)
}

impl Inspection {
    fn visit(&mut self, entry: &TreeEntry<'_>, is_shown: bool, rules: &Rules, shown: &ShownFiles) -> Walk {
        if entry.path.as_os_str().is_empty() {
            return Walk::Stop;
        }
        let is_first = !self.linked.contains_key(&entry.file_id());
        if is_first {
            self.seen.before.bytes += entry.allocated();
            self.seen.before.entries += 1;
        }
        self.seen.before.closed += u64::from(entry.closed);
        if entry.kind.is_file() && entry.links() > 1 {
            let linked = self.linked.entry(entry.file_id()).or_insert(Linked { seen: 0, links: entry.links(), bytes: entry.allocated() });
            linked.seen += 1;
        }
        if self.seen.before.entries <= MAX_SEEN_TWICE {
            self.ids.insert(entry.file_id());
        }
        let is_below = |above: &Option<PathBuf>| above.as_ref().is_some_and(|above| entry.path.starts_with(above));
        if entry.kind.is_symlink() || is_below(&self.hidden) {
            return Walk::On;
        }
        let depth = entry.path.as_os_str().as_bytes().iter().filter(|byte| **byte == b'/').count();
        let id = is_shown.then(|| entry.file_id());
        self.ids_above.truncate(depth);
        self.ids_above.push(id);
        let obeyed = || entry.gives_rights() || shown.contains_key(&entry.file_id());
        let Some(protection) = kept(entry, is_shown, rules, obeyed) else { return Walk::On };
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
        let Inspection { seen: Inspected { mut protected, mut before, second_look, .. }, mut pinned, linked, .. } = self;
        let mut files = LinkedFiles::default();
        for (id, linked) in linked {
            files.names.insert(id, linked.seen);
            if linked.seen < linked.links {
                before.bytes = before.bytes.saturating_sub(linked.bytes);
                files.outside.insert(id, linked.bytes);
            }
        }
        for ((path, ..), _) in &protected {
            pinned.remove(path);
        }
        protected.extend(pinned.into_iter().map(|(path, id)| ((path, PathKind::Directory, Protection::Pinned), id)));
        // Above before below: what lies over a directory must not be laid on what it covers.
        protected.sort_by(|((a, ..), _), ((b, ..), _)| a.cmp(b));
        Inspected { protected, before, linked: files, second_look }
    }
}
