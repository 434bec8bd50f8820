//! The root of a run whose caller says by itself what it shows: each operation in its order, later
//! ones over earlier ones.
//!
//! The policy's `[filesystem]` is the host as such a caller sees it: what it does not show does not
//! exist. Below a directory of the host an operation can only lie over what is there already, or, where
//! code may write, over an empty mount point that ends with the run. `/proc`, `/dev`, `/sys`,
//! `/run/stockade` and `/.view` are the sandbox's own, and no operation reaches them. It does not mount
//! anything.

use std::{
    collections::{BTreeMap, BTreeSet},
    os::unix::ffi::OsStrExt,
    path::{Component, Path, PathBuf},
};

use stockade_protocol::Limits;

use super::{
    HostScratch, HostSocket, Identity, MAX_OVERLAY_LAYERS, PathKindName, Protection, RootEntry, RunRequest, TreePlan, UserNamespaces,
    root::{RootBuilder, is_program_directory, plan_cpus, plan_dev, plan_etc, plan_passwd, plan_proc, plan_terminal},
};
use crate::{
    facts::{HostFacts, PathKind},
    filter::CLOSING,
    model::{Access, Policy},
    sockets,
};

/// The private scratch of a run with a view, and its first working directory.
pub const VIEW_SCRATCH: &str = "/run/stockade/scratch";
/// Directories that are the sandbox's own, whatever a view says.
const OURS: [&str; 5] = ["/proc", "/dev", "/sys", "/run/stockade", STORE];
/// Where the root keeps directories that are mounted elsewhere. A link here would lead to the host.
const STORE: &str = "/.view";
/// The most operations of a view.
pub const MAX_OPERATIONS: usize = 1024;
/// The most names of one path: each directory above it is made and looked up.
const MAX_DEPTH: usize = 100;
/// Paths of one writable directory that have rules, with the directories above them.
const MAX_PROTECTED: usize = 8192;
/// The most instructions of a caller's filter: BPF_MAXINSNS, less those that are put before them.
pub const MAX_INSTRUCTIONS: usize = 4096 - CLOSING;

/// What a caller wants to see, instead of the root that a policy describes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// In this order.
    pub entries: Vec<ViewEntry>,
    /// The working directory: the first of these that is there.
    pub working_directories: Vec<PathBuf>,
    /// Ids inside, never 0; none: the caller's own, or where that is root the policy's.
    pub ids: (Option<u32>, Option<u32>),
    /// Host name inside; none: the policy's.
    pub hostname: Option<String>,
    /// The policy's variables are left out.
    pub clears_environment: bool,
    /// Variables, set or taken away in this order.
    pub environment: Vec<(String, Option<String>)>,
    /// Further filters of system calls, instructions as in [`super::FilterPlan`].
    pub filters: Vec<Vec<u64>>,
}

/// One operation. Paths are absolute and have no `..`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ViewEntry {
    /// A path of the host, read-only.
    Show {
        /// On the host.
        source: PathBuf,
        /// Inside.
        target: PathBuf,
        /// Left out where the host, as the policy shows it, has none.
        optional: bool,
    },
    /// A directory of the host that code may write: the next of `RunRequest::writable_trees`.
    Tree {
        /// On the host.
        source: PathBuf,
        /// Inside.
        target: PathBuf,
    },
    /// Directories of the host as the policy shows them, laid over one another.
    Overlay {
        /// On the host, bottom first.
        layers: Vec<PathBuf>,
        /// Inside.
        target: PathBuf,
        /// Code may change it; what it writes is in memory, and gone after the run.
        writable: bool,
    },
    /// A Unix socket of the host: the next of `RunRequest::sockets`.
    Socket {
        /// On the host.
        source: PathBuf,
        /// Inside.
        target: PathBuf,
    },
    /// An empty writable directory.
    Tmpfs {
        /// Its path.
        target: PathBuf,
        /// Permission bits.
        mode: u32,
    },
    /// A directory.
    Directory {
        /// Its path.
        target: PathBuf,
        /// Permission bits.
        mode: u32,
    },
    /// A symbolic link.
    Link {
        /// Its path.
        target: PathBuf,
        /// Its contents.
        to: PathBuf,
    },
    /// A file.
    File {
        /// Its path.
        target: PathBuf,
        /// Permission bits.
        mode: u32,
        /// What it holds.
        bytes: Vec<u8>,
    },
    /// Other permission bits for what an earlier operation has made.
    Mode {
        /// Its path.
        target: PathBuf,
        /// Permission bits.
        mode: u32,
    },
    /// A file that is laid over what is at its path.
    Data {
        /// Its path.
        target: PathBuf,
        /// Permission bits.
        mode: u32,
        /// What it holds.
        bytes: Vec<u8>,
        /// Code may write it; the file ends with the run.
        writable: bool,
    },
}

impl ViewEntry {
    /// The paths of the host that it shows read-only.
    pub fn shown(&self) -> &[PathBuf] {
        match self {
            ViewEntry::Show { source, .. } => std::slice::from_ref(source),
            ViewEntry::Overlay { layers, .. } => layers,
            _ => &[],
        }
    }

    /// Its path inside.
    pub fn target(&self) -> &Path {
        match self {
            ViewEntry::Show { target, .. }
            | ViewEntry::Tree { target, .. }
            | ViewEntry::Overlay { target, .. }
            | ViewEntry::Socket { target, .. }
            | ViewEntry::Tmpfs { target, .. }
            | ViewEntry::Directory { target, .. }
            | ViewEntry::Link { target, .. }
            | ViewEntry::File { target, .. }
            | ViewEntry::Mode { target, .. }
            | ViewEntry::Data { target, .. } => target,
        }
    }
}

/// Why a view is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "each is what its sentence says")]
pub enum ViewError {
    #[error("{}: a path is absolute and has no `..`", .0.display())]
    Malformed(PathBuf),
    #[error(
        "a view has at most {MAX_OPERATIONS} operations, whose paths have at most {MAX_DEPTH} names, and keeps at most {MAX_PROTECTED} paths of a writable directory in their place; bind a directory in place of its files"
    )]
    TooMany,
    #[error("{} is the sandbox's own: `--proc /proc` and `--dev /dev` stand for what is there anyway; leave the operation out", .0.display())]
    Ours(PathBuf),
    #[error("{0} over /: the sandbox's root is its own; bind the directories below it one by one")]
    Root(&'static str),
    #[error("{} is not on this host", .0.display())]
    Missing(PathBuf),
    #[error(
        "policy `{policy}` does not show {}; add it to [filesystem] read_only_optional in a policy of your own, or bind a directory that is yours by --bind",
        path.display()
    )]
    NotShown { policy: String, path: PathBuf },
    #[error(
        "--ro-bind {}: of it the policy shows parts, and an earlier operation has put something at, above or below {}; write this one first, or name the parts one by one",
        path.display(), target.display()
    )]
    PartsOver { path: PathBuf, target: PathBuf },
    #[error(
        "--ro-bind over {}: an earlier operation has put {} below it, which code may write, or a socket; write that operation after this one",
        target.display(), writable.display()
    )]
    WritableBelow { target: PathBuf, writable: PathBuf },
    #[error(
        "{} lies below {}, which is a directory of the host: nothing is made there; make it on the host before, or lay a --tmpfs over the directory",
        target.display(), host.display()
    )]
    OnHost { target: PathBuf, host: PathBuf },
    #[error("{}: the way goes through {}, a link of this view; name the path without the link", target.display(), link.display())]
    ThroughLink { target: PathBuf, link: PathBuf },
    #[error("{} {how}; name another path", target.display())]
    Taken { target: PathBuf, how: &'static str },
    #[error("--bind {}: {} belongs to what the policy shows read-only; bind another directory, or show it by --ro-bind", tree.display(), shown.display())]
    TreeShown { tree: PathBuf, shown: PathBuf },
    #[error("--bind {}: policy `{policy}` lets code write no directory of the host (access = \"ro\" under [scratch]); show it by --ro-bind, or take another policy", path.display())]
    ReadOnly { policy: String, path: PathBuf },
    #[error("--bind {} and --bind {}: one lies in the other; bind the outer one alone", .0.display(), .1.display())]
    TreesNested(PathBuf, PathBuf),
    #[error("--overlay-src {}: it {why}", path.display())]
    Layer { path: PathBuf, why: &'static str },
    #[error("--chmod {}: it changes what --dir, --file and --tmpfs have made, and none of them has made this", .0.display())]
    NotMade(PathBuf),
    #[error("--bind {}: its file system cannot be idmapped: {why}; bind a directory of another file system", path.display())]
    NoIdmap { path: PathBuf, why: String },
    #[error("--bind {}: policy `{policy}` does not show this socket; add it to [filesystem] sockets in a policy of your own, if code may speak to its owner", path.display())]
    SocketNotShown { policy: String, path: PathBuf },
    #[error("{0}; name the path without the link")]
    ForeignLink(String),
    #[error("--bind {}: a socket of this name is never shown: who speaks to it acts as its owner outside; let a program of your own listen, which passes on what code may ask", .0.display())]
    SocketActs(PathBuf),
}

impl ViewError {
    /// A stable identifier.
    pub fn reason(&self) -> &'static str {
        match self {
            ViewError::Malformed(_) => "view_path_malformed",
            ViewError::TooMany => "view_too_large",
            ViewError::Ours(_) | ViewError::Root(_) => "view_over_sandbox",
            ViewError::Missing(_) => "view_source_missing",
            ViewError::NotShown { .. } => "view_not_shown",
            ViewError::PartsOver { .. } => "view_parts_over",
            ViewError::WritableBelow { .. } => "view_writable_below",
            ViewError::OnHost { .. } => "view_on_host",
            ViewError::ThroughLink { .. } => "view_through_link",
            ViewError::Taken { .. } => "view_path_taken",
            ViewError::TreeShown { .. } => "view_tree_shown",
            ViewError::ReadOnly { .. } => "view_read_only",
            ViewError::TreesNested(..) => "view_trees_nested",
            ViewError::Layer { .. } => "view_layer_unusable",
            ViewError::NotMade(_) => "view_not_made",
            ViewError::NoIdmap { .. } => "scratch_not_idmappable",
            ViewError::SocketNotShown { .. } => "view_socket_not_shown",
            ViewError::ForeignLink(_) => "shown_foreign_link",
            ViewError::SocketActs(_) => "view_socket_never_shown",
        }
    }
}

/// What a path of the root shows, from here down.
enum Region {
    /// The root's own file system, at this path of it.
    Own(PathBuf),
    /// The host's.
    Host,
    /// The host's, and code may write it: this one of the writable trees.
    Tree(usize),
}

struct ViewBuilder<'a> {
    root: RootBuilder,
    policy: &'a Policy,
    facts: &'a HostFacts,
    /// The last one that a path lies in is what is there.
    regions: Vec<(PathBuf, Region)>,
    /// Where the view has links, and what they say.
    links: BTreeMap<PathBuf, PathBuf>,
    /// Where empty files are laid, and nothing over them.
    empty_files: BTreeSet<PathBuf>,
    /// Where sockets are shown.
    sockets: Vec<PathBuf>,
    writable_trees: Vec<TreePlan>,
    writable: Vec<PathBuf>,
    stored: usize,
}

/// The entries of the root, what code may write, and the host's directories in it.
pub(super) struct ViewPlan {
    pub(super) root: Vec<RootEntry>,
    pub(super) writable: Vec<PathBuf>,
    pub(super) writable_trees: Vec<TreePlan>,
}

pub(super) fn plan_view(
    view: &View,
    policy: &Policy,
    facts: &HostFacts,
    run_request: &RunRequest,
    identity: &Identity,
    limits: &Limits,
) -> Result<ViewPlan, ViewError> {
    if view.entries.len() > MAX_OPERATIONS {
        return Err(ViewError::TooMany);
    }
    let mut root = RootBuilder::default();
    root.directory(Path::new("/dev/shm"), 0o1777);
    plan_dev(&mut root, policy);
    plan_proc(&mut root);
    root.writable(Path::new("/dev/shm"));
    if run_request.terminal {
        plan_terminal(&mut root);
    }
    plan_cpus(&mut root, facts, limits);
    root.directory(Path::new(VIEW_SCRATCH), 0o755);
    let mut builder = ViewBuilder {
        root,
        policy,
        facts,
        regions: vec![(PathBuf::from("/"), Region::Own(PathBuf::from("/")))],
        links: BTreeMap::new(),
        empty_files: BTreeSet::new(),
        sockets: Vec::new(),
        writable_trees: Vec::new(),
        writable: vec![PathBuf::from("/dev/shm")],
        stored: 0,
    };
    let mut opened = run_request.writable_trees.iter();
    let mut sockets = run_request.sockets.iter().enumerate();
    for (entry, later) in view.entries.iter().enumerate().map(|(at, entry)| (entry, view.entries.get(at + 1..).unwrap_or_default())) {
        builder.check(entry)?;
        match entry {
            // Callers pin directories so, below what they bind writable afterwards.
            ViewEntry::Show { target, .. } if is_covered(target, later) => {}
            ViewEntry::Socket { source, target } => {
                let socket = sockets.next().filter(|(_, socket)| socket.path == *source);
                let (index, socket) = socket.ok_or_else(|| ViewError::Missing(source.clone()))?;
                builder.socket(index, socket, target)?;
            }
            ViewEntry::Show { source, target, optional } => builder.show(source, target, *optional, identity)?,
            ViewEntry::Tree { source, target } => {
                let scratch = opened.next().ok_or_else(|| ViewError::Missing(source.clone()))?;
                builder.tree(scratch, target)?;
            }
            ViewEntry::Overlay { layers, target, writable } => builder.overlay(layers, target, *writable, identity)?,
            ViewEntry::Tmpfs { target, mode } => builder.tmpfs(target, *mode)?,
            ViewEntry::Directory { target, mode } => builder.directory(target, *mode)?,
            ViewEntry::Link { target, to } => builder.link(target, to)?,
            ViewEntry::File { target, mode, bytes } => {
                let at = builder.free(target)?;
                builder.root.parent(&at);
                builder.root.entry(&at, |at| RootEntry::Contents { target: at, mode: *mode, bytes: bytes.clone() });
            }
            ViewEntry::Mode { target, mode } => builder.change_mode(target, *mode)?,
            ViewEntry::Data { target, mode, bytes, writable } => {
                builder.place(target, PathKind::File)?;
                builder.pin(target);
                let (target_inside, bytes) = (RootBuilder::relative(target), bytes.clone());
                builder.root.entries.push(RootEntry::Laid { target: target_inside, mode: *mode, bytes, writable: *writable });
                if *writable {
                    builder.writable.push(target.clone());
                }
                builder.cover(target, Region::Host);
            }
        }
        if builder.writable_trees.iter().any(|tree| tree.protected.len() > MAX_PROTECTED) {
            return Err(ViewError::TooMany);
        }
    }
    Ok(ViewPlan { root: builder.root.entries, writable: builder.writable, writable_trees: builder.writable_trees })
}

impl ViewBuilder<'_> {
    fn check(&self, entry: &ViewEntry) -> Result<(), ViewError> {
        let target = entry.target();
        let source = match entry {
            ViewEntry::Tree { source, .. } | ViewEntry::Socket { source, .. } => Some(source),
            _ => None,
        };
        let mut paths = std::iter::once(target).chain(source.into_iter().chain(entry.shown()).map(PathBuf::as_path));
        let is_plain = |path: &Path| path.is_absolute() && path.components().skip(1).all(|part| matches!(part, Component::Normal(_)));
        if let Some(wrong) = paths.clone().find(|path| !is_plain(path)) {
            return Err(ViewError::Malformed(wrong.to_path_buf()));
        }
        if paths.any(|path| path.components().count() > 1 + MAX_DEPTH) {
            return Err(ViewError::TooMany);
        }
        let covers = matches!(
            entry,
            ViewEntry::Show { .. } | ViewEntry::Overlay { .. } | ViewEntry::Tree { .. } | ViewEntry::Socket { .. } | ViewEntry::Data { .. }
        );
        let is_over =
            |ours: &&&str| target.starts_with(ours) || (covers && target != Path::new("/") && Path::new(ours).starts_with(target));
        match OURS.iter().find(is_over) {
            Some(_) => Err(ViewError::Ours(target.to_path_buf())),
            None => Ok(()),
        }
    }

    fn region(&self, path: &Path) -> (&Path, &Region) {
        let found = self.regions.iter().rev().find(|(above, _)| lies_in(path, above));
        found.map_or((Path::new("/"), &Region::Host), |(above, region)| (above, region))
    }

    /// Where a path lies in the root's own file system.
    ///
    /// # Errors
    /// It lies in the host's, or the way goes through a link or a file.
    fn own(&self, path: &Path) -> Result<PathBuf, ViewError> {
        let (above, region) = self.region(path);
        let Region::Own(real) = region else {
            return Err(ViewError::OnHost { target: path.to_path_buf(), host: above.to_path_buf() });
        };
        let at: PathBuf = real.join(path.strip_prefix(above).unwrap_or(path)).components().collect();
        // Those above one that is made are directories.
        let above = at.ancestors().skip(1).find_map(|above| Some((above, self.root.kind_of(above)?)));
        match above {
            Some((link, PathKind::File)) if self.links.contains_key(link) => {
                Err(ViewError::ThroughLink { target: path.to_path_buf(), link: link.to_path_buf() })
            }
            Some((_, PathKind::File)) => Err(ViewError::Taken { target: path.to_path_buf(), how: "lies below a file of the sandbox" }),
            _ => Ok(at),
        }
    }

    /// The same, where a new file or link is made: nothing may be there.
    fn free(&self, path: &Path) -> Result<PathBuf, ViewError> {
        let at = self.own(path)?;
        let how = match self.root.kind_of(&at) {
            Some(PathKind::Directory) => "is a directory of the sandbox already",
            Some(PathKind::File) => "is a file or a link of the sandbox already",
            None => return Ok(at),
        };
        Err(ViewError::Taken { target: path.to_path_buf(), how })
    }

    /// Makes a mount point, where the root's own file system is there. What code may write of the host
    /// gets one for the time of the run; elsewhere the host must have it.
    fn place(&mut self, target: &Path, kind: PathKind) -> Result<(), ViewError> {
        if let Some((tree, below)) = self.tree_at(target).filter(|(_, below)| !below.as_os_str().is_empty()) {
            let is_hidden = |(above, _, how): &&(PathBuf, _, _)| *how == Protection::Hidden && below != *above && below.starts_with(above);
            if let Some((above, ..)) = tree.protected.iter().find(is_hidden) {
                return Err(ViewError::OnHost { target: target.to_path_buf(), host: tree.target.join(above) });
            }
            let kind = if kind == PathKind::Directory { PathKindName::Directory } else { PathKindName::File };
            if !tree.mount_points.iter().any(|(path, _)| *path == below) {
                tree.mount_points.push((below, kind));
            }
            return Ok(());
        }
        if !matches!(self.region(target).1, Region::Own(_)) {
            return Ok(());
        }
        let at = self.own(target)?;
        if self.links.contains_key(&at) {
            return Err(ViewError::ThroughLink { target: target.to_path_buf(), link: target.to_path_buf() });
        }
        if self.root.kind_of(&at) == Some(kind) {
            return Ok(());
        }
        let at = self.free(target)?;
        match kind {
            PathKind::Directory => self.root.directory(&at, 0o755),
            PathKind::File => self.root.empty_file(&at, 0o644),
        }
        Ok(())
    }

    /// Something new is at `target`, and what was there or below is covered.
    fn cover(&mut self, target: &Path, region: Region) {
        self.writable.retain(|writable| writable == target || !lies_in(writable, target));
        self.empty_files.retain(|file| !lies_in(file, target));
        self.regions.push((target.to_path_buf(), region));
    }

    fn directory(&mut self, target: &Path, mode: u32) -> Result<(), ViewError> {
        let at = self.own(target)?;
        if self.root.kind_of(&at) == Some(PathKind::File) && !self.links.contains_key(&at) {
            return Err(ViewError::Taken { target: target.to_path_buf(), how: "is a file of the sandbox already" });
        }
        self.root.directory(&at, mode);
        Ok(())
    }

    fn link(&mut self, target: &Path, to: &Path) -> Result<(), ViewError> {
        if self.links.get(&self.own(target)?).is_some_and(|there| there == to) {
            return Ok(());
        }
        let at = self.free(target)?;
        self.root.parent(&at);
        self.links.insert(at.clone(), to.to_path_buf());
        self.root.entry(&at, |at| RootEntry::Link { target: at, to: to.to_path_buf() });
        Ok(())
    }

    fn tmpfs(&mut self, target: &Path, mode: u32) -> Result<(), ViewError> {
        if target == Path::new("/") {
            return Err(ViewError::Root("--tmpfs"));
        }
        self.lay_directory(target, mode, true)
    }

    /// A new directory each time: what was below the path is covered.
    fn lay_directory(&mut self, target: &Path, mode: u32, writable: bool) -> Result<(), ViewError> {
        let is_new = matches!(self.region(target).1, Region::Own(_)) && self.own(target).is_ok_and(|at| !self.root.is_made(&at));
        let real = if is_new { self.own(target)? } else { self.stored() };
        self.root.directory(&real, mode);
        if let Ok(below) = Path::new(VIEW_SCRATCH).strip_prefix(target) {
            self.root.directory(&real.join(below), 0o755);
        }
        self.place(target, PathKind::Directory)?;
        self.pin(target);
        let (from, at) = (RootBuilder::relative(&real), RootBuilder::relative(target));
        self.root.entries.push(RootEntry::Tmpfs { from, target: at, writable });
        if writable {
            self.writable.push(target.to_path_buf());
        }
        self.cover(target, Region::Own(real));
        Ok(())
    }

    /// A new path for what is mounted elsewhere.
    fn stored(&mut self) -> PathBuf {
        self.stored += 1;
        PathBuf::from(format!("{STORE}/{}", self.stored - 1))
    }

    fn overlay(&mut self, layers: &[PathBuf], target: &Path, writable: bool, identity: &Identity) -> Result<(), ViewError> {
        if target == Path::new("/") {
            return Err(ViewError::Root(if writable { "--tmp-overlay" } else { "--ro-overlay" }));
        }
        if let Some(path) = layers.get(MAX_OVERLAY_LAYERS) {
            return Err(ViewError::Layer { path: path.clone(), why: "is one too many: at most ten directories are laid over one another" });
        }
        let mut below: Vec<PathBuf> = Vec::new();
        for source in layers {
            let unusable = |why| Err(ViewError::Layer { path: source.clone(), why });
            let real = self.facts.led.get(source).unwrap_or(source);
            if !self.is_shown(real) {
                return Err(ViewError::NotShown { policy: self.policy.name.clone(), path: source.clone() });
            }
            if identity.user_namespaces == UserNamespaces::Missing {
                return unusable("would show what the host's mounts hide in it, as the host forbids user namespaces; show it by --ro-bind");
            }
            match self.facts.paths.get(source) {
                Some(PathKind::Directory) => {}
                Some(PathKind::File) => return unusable("is not a directory"),
                None => return Err(ViewError::Missing(source.clone())),
            }
            if below.iter().any(|other| other.starts_with(real) || real.starts_with(other)) {
                return unusable("lies in another layer, is it, or holds it; name the outer one alone");
            }
            below.push(real.clone());
        }
        self.place(target, PathKind::Directory)?;
        self.pin(target);
        let changes = writable.then(|| self.stored()).map(|stored| [stored.join("upper"), stored.join("work")]);
        changes.iter().flatten().for_each(|directory| self.root.directory(directory, 0o755));
        self.root.entries.push(RootEntry::Overlay {
            executable: below.iter().all(|layer| is_program_directory(layer)),
            layers: below,
            changes: changes.map(|both| both.map(|directory| RootBuilder::relative(&directory))),
            target: RootBuilder::relative(target),
        });
        if writable {
            self.writable.push(target.to_path_buf());
        }
        self.cover(target, Region::Host);
        Ok(())
    }

    fn change_mode(&mut self, target: &Path, new: u32) -> Result<(), ViewError> {
        let not_made = || ViewError::NotMade(target.to_path_buf());
        let at = self.own(target).map(|at| RootBuilder::relative(&at)).map_err(|_| not_made())?;
        let found = self.root.entries.iter_mut().rev().find_map(|entry| match entry {
            RootEntry::Directory { target, mode } | RootEntry::File { target, mode, .. } | RootEntry::Contents { target, mode, .. } => {
                (*target == at).then_some(mode)
            }
            _ => None,
        });
        *found.ok_or_else(not_made)? = new;
        Ok(())
    }

    fn tree(&mut self, scratch: &HostScratch, target: &Path) -> Result<(), ViewError> {
        if target == Path::new("/") {
            return Err(ViewError::Root("--bind"));
        }
        if self.policy.scratch.access == Access::Ro {
            return Err(ViewError::ReadOnly { policy: self.policy.name.clone(), path: scratch.path.clone() });
        }
        let filesystem = &self.policy.filesystem;
        let shown = filesystem.read_only.iter().chain(&filesystem.read_only_optional);
        let mut shown = shown.flat_map(|path| std::iter::once(path).chain(self.facts.led.get(path)));
        if let Some(shown) = shown.find(|shown| shown.starts_with(&scratch.path) || scratch.path.starts_with(shown)) {
            return Err(ViewError::TreeShown { tree: scratch.path.clone(), shown: shown.clone() });
        }
        let is_nested = |other: &&TreePlan| other.source.starts_with(&scratch.path) || scratch.path.starts_with(&other.source);
        if let Some(other) = self.writable_trees.iter().find(is_nested).filter(|other| other.source != scratch.path) {
            return Err(ViewError::TreesNested(other.source.clone(), scratch.path.clone()));
        }
        if let Some(why) = &scratch.idmap_refusal {
            return Err(ViewError::NoIdmap { path: scratch.path.clone(), why: why.clone() });
        }
        self.place(target, PathKind::Directory)?;
        self.root.entries.push(RootEntry::Tree { index: self.writable_trees.len(), target: RootBuilder::relative(target) });
        let kind = |kind: PathKind| if kind == PathKind::Directory { PathKindName::Directory } else { PathKindName::File };
        let protected = scratch.protected.iter().map(|(path, found, protection)| (path.clone(), kind(*found), *protection)).collect();
        self.cover(target, Region::Tree(self.writable_trees.len()));
        let (source, target) = (scratch.path.clone(), target.to_path_buf());
        self.writable_trees.push(TreePlan { source, target, protected, mount_points: Vec::new() });
        Ok(())
    }

    fn socket(&mut self, index: usize, socket: &HostSocket, target: &Path) -> Result<(), ViewError> {
        let path = &socket.path;
        if sockets::is_never_shown(path) {
            return Err(ViewError::SocketActs(path.clone()));
        }
        if !self.policy.filesystem.sockets.iter().any(|pattern| sockets::matches(pattern, path)) {
            return Err(ViewError::SocketNotShown { policy: self.policy.name.clone(), path: path.clone() });
        }
        if let Some(why) = &socket.idmap_refusal {
            return Err(ViewError::NoIdmap { path: path.clone(), why: why.clone() });
        }
        self.place(target, PathKind::File)?;
        self.pin(target);
        self.root.entries.push(RootEntry::Socket { index, source: path.clone(), target: RootBuilder::relative(target) });
        self.cover(target, Region::Host);
        self.sockets.push(target.to_path_buf());
        Ok(())
    }

    /// What the policy shows and the host has, and where that leads.
    fn shown_by_policy(&self) -> impl Iterator<Item = (&Path, &Path, PathKind)> {
        let filesystem = &self.policy.filesystem;
        filesystem.read_only.iter().chain(&filesystem.read_only_optional).filter_map(|path| {
            let kind = *self.facts.paths.get(path)?;
            Some((path.as_path(), self.facts.led.get(path).unwrap_or(path).as_path(), kind))
        })
    }

    /// Whether the policy shows all of a path of the host.
    fn is_shown(&self, real: &Path) -> bool {
        self.shown_by_policy().any(|(path, led, _)| real.starts_with(led) || real.starts_with(path))
    }

    /// Shows a path of the host as the policy shows it: whole, or the parts of it that it shows.
    fn show(&mut self, source: &Path, target: &Path, optional: bool, identity: &Identity) -> Result<(), ViewError> {
        if source == Path::new("/dev/null") {
            // Callers cover a file by it.
            return self.empty(target);
        }
        if let Some(why) = self.facts.foreign.get(source) {
            return if self.reaches_host(target) { Err(ViewError::ForeignLink(why.clone())) } else { Ok(()) };
        }
        if self.keep_read_only(source, target)? {
            return Ok(());
        }
        let kind = self.facts.paths.get(source).copied();
        let real = self.facts.led.get(source).map_or(source, PathBuf::as_path);
        if self.is_shown(real) {
            return match kind {
                Some(kind) => self.bind(real.to_path_buf(), target, kind),
                None if optional => Ok(()),
                None => Err(ViewError::Missing(source.to_path_buf())),
            };
        }
        let parts = self.shown_by_policy().filter(|(path, ..)| path.starts_with(source));
        let parts: Vec<_> = parts.map(|(path, led, kind)| (path.to_path_buf(), led.to_path_buf(), kind)).collect();
        if parts.is_empty() && self.facts.empty.contains(source) {
            // Callers cover a directory by it. It is the sandbox's own, whatever the host's holds later.
            if target == Path::new("/") {
                return Err(ViewError::Root("--ro-bind"));
            }
            return self.lay_directory(target, 0o755, false);
        }
        if parts.is_empty() {
            // What code can write of the host there was to be kept from it.
            let keeps = (kind.is_some() || self.is_mount_point(source)) && self.reaches_host(target);
            return match optional && !keeps {
                true => Ok(()),
                false => Err(ViewError::NotShown { policy: self.policy.name.clone(), path: source.to_path_buf() }),
            };
        }
        self.show_parts(source, target, parts, identity)
    }

    fn show_parts(
        &mut self,
        source: &Path,
        target: &Path,
        parts: Vec<(PathBuf, PathBuf, PathKind)>,
        identity: &Identity,
    ) -> Result<(), ViewError> {
        let is_used = |path: &Path| path.starts_with(target) && !OURS.iter().any(|ours| path.starts_with(ours));
        let is_base = |path: &Path| OURS.iter().any(|ours| Path::new(ours).starts_with(path));
        let below = |path: &Path| is_used(path) && !is_base(path);
        // The whole of the host has a socket too, and the directories above it.
        let is_way = |path: &Path| self.sockets.iter().any(|socket| socket.starts_with(path));
        let is_made = self.root.made.keys().map(Path::new).any(|made| below(made) && !is_way(made));
        let is_own = matches!(self.region(target).1, Region::Own(_));
        if !is_own || is_made || self.regions.iter().any(|(at, _)| below(at) && !self.sockets.contains(at)) {
            return Err(ViewError::PartsOver { path: source.to_path_buf(), target: target.to_path_buf() });
        }
        self.place(target, PathKind::Directory)?;
        let inside = |path: &Path| -> PathBuf { target.join(path.strip_prefix(source).unwrap_or(path)).components().collect() };
        if source == Path::new("/") && target == source {
            for (name, to) in &self.facts.links {
                self.link(&target.join(name), Path::new(to))?;
            }
        }
        let etc = Path::new("/etc");
        if etc.starts_with(source) && inside(etc) == etc {
            // The host's name its users.
            plan_etc(&mut self.root, identity.inside.1, self.policy, &identity.hostname);
            plan_passwd(&mut self.root, identity, Path::new("/"));
        }
        for (path, led, kind) in parts {
            let at = inside(&path);
            let is_bound = !matches!(self.region(&at).1, Region::Own(_));
            if !is_bound && !self.links.contains_key(&at) {
                self.bind(led, &at, kind)?;
            }
        }
        Ok(())
    }

    fn bind(&mut self, source: PathBuf, target: &Path, kind: PathKind) -> Result<(), ViewError> {
        if target == Path::new("/") {
            return Err(ViewError::Root("--ro-bind"));
        }
        self.place(target, kind)?;
        self.pin(target);
        let executable = is_program_directory(&source);
        self.root.entries.push(RootEntry::Placed { source, target: RootBuilder::relative(target), executable });
        self.cover(target, Region::Host);
        Ok(())
    }

    fn empty(&mut self, target: &Path) -> Result<(), ViewError> {
        // Callers cover a file again after operations above it.
        if self.empty_files.contains(target) {
            return Ok(());
        }
        self.place(target, PathKind::File)?;
        self.pin(target);
        let target_inside = RootBuilder::relative(target);
        self.root.entries.push(RootEntry::Laid { target: target_inside, mode: 0o444, bytes: Vec::new(), writable: false });
        self.cover(target, Region::Host);
        self.empty_files.insert(target.to_path_buf());
        Ok(())
    }

    /// The directory that code may write at this path, as far as nothing was laid over it there, and
    /// where the path lies below it.
    fn tree_at(&mut self, target: &Path) -> Option<(&mut TreePlan, PathBuf)> {
        let Region::Tree(index) = *self.region(target).1 else { return None };
        let tree = self.writable_trees.get_mut(index)?;
        let below = target.strip_prefix(&tree.target).ok()?.components().collect();
        Some((tree, below))
    }

    /// Below a path, not at it: where a directory of the host lies that code may write, or a socket.
    fn host_below(&self, target: &Path) -> Option<&Path> {
        let is_there = |at: &&Path| *at != target && lies_in(at, target) && self.region(at).0 == *at;
        let of_host = self.regions.iter().filter(|(at, region)| matches!(region, Region::Tree(_)) || self.sockets.contains(at));
        of_host.map(|(at, _)| at.as_path()).find(is_there)
    }

    /// Whether something that is laid at a path could keep a part of the host from code: what code may write
    /// of it, or a socket, is there or below, or a link on the way may lead there.
    fn reaches_host(&self, target: &Path) -> bool {
        let has_any = !self.writable_trees.is_empty() || !self.sockets.is_empty();
        let is_elsewhere = || self.own(target).map_or(true, |at| self.links.contains_key(&at));
        has_any && (is_elsewhere() || self.host_below(target).is_some())
    }

    /// Whether an operation makes this path of the host, as a mount point or above one.
    fn is_mount_point(&self, source: &Path) -> bool {
        let has = |tree: &TreePlan, below: &Path| tree.mount_points.iter().any(|(path, _)| path.starts_with(below));
        self.writable_trees.iter().any(|tree| source.strip_prefix(&tree.source).is_ok_and(|below| has(tree, below)))
    }

    /// Where the path is part of a directory that code may write, at its place there, code can read it and
    /// not write it. Whether that is so.
    ///
    /// # Errors
    /// Code may write something that lies over a part of it.
    fn keep_read_only(&mut self, source: &Path, target: &Path) -> Result<bool, ViewError> {
        let real = self.facts.led.get(source).map_or(source, PathBuf::as_path).to_path_buf();
        let Some(kind) = self.facts.paths.get(source).copied() else { return Ok(false) };
        if self.tree_at(target).is_none_or(|(tree, below)| tree.source.join(below) != real) {
            return Ok(false);
        }
        // The rule holds below what is mounted later.
        let below = self.writable.iter().map(PathBuf::as_path).find(|writable| *writable != target && lies_in(writable, target));
        if let Some(writable) = below.or_else(|| self.host_below(target)) {
            return Err(ViewError::WritableBelow { target: target.to_path_buf(), writable: writable.to_path_buf() });
        }
        let Some((tree, below)) = self.tree_at(target) else { return Ok(false) };
        let kind = if kind == PathKind::Directory { PathKindName::Directory } else { PathKindName::File };
        // The whole of it is the directory itself.
        let below = if below.as_os_str().is_empty() { PathBuf::from(".") } else { below };
        match tree.protected.iter_mut().find(|(path, ..)| *path == below) {
            Some((.., how)) if *how == Protection::Pinned => *how = Protection::ReadOnly,
            Some(_) => {}
            None => {
                pin_above(tree, &below);
                tree.protected.push((below.clone(), kind, Protection::ReadOnly));
            }
        }
        // It may be another run's mount point, whose end would uncover it here.
        if below != Path::new(".") && !tree.mount_points.iter().any(|(path, _)| *path == below) {
            tree.mount_points.push((below, kind));
        }
        Ok(true)
    }

    /// What is laid over a path of a directory that code may write stays there: code could else move the
    /// directories above it away, and put others in their place.
    fn pin(&mut self, target: &Path) {
        if let Some((tree, below)) = self.tree_at(target) {
            pin_above(tree, &below);
        }
    }
}

/// `Path::starts_with` of paths without `.`, `..` and `//`, compared as bytes: as paths they would be taken
/// apart for each comparison.
fn lies_in(path: &Path, above: &Path) -> bool {
    let rest = path.as_os_str().as_bytes().strip_prefix(above.as_os_str().as_bytes());
    rest.is_some_and(|rest| rest.is_empty() || rest[0] == b'/' || above.parent().is_none())
}

/// Whether a directory that code may write is bound over a path later.
fn is_covered(target: &Path, later: &[ViewEntry]) -> bool {
    later.iter().any(|entry| matches!(entry, ViewEntry::Tree { target: tree, .. } if target.starts_with(tree)))
}

/// Directories above a path of a tree cannot be renamed.
fn pin_above(tree: &mut TreePlan, below: &Path) {
    let is_protected = |directory: &&Path| tree.protected.iter().any(|(path, ..)| path.as_os_str() == directory.as_os_str());
    // Those above one that is protected are so already.
    let above = below.ancestors().skip(1).take_while(|above| !above.as_os_str().is_empty() && !is_protected(above));
    let mut above: Vec<_> = above.map(|above| (above.to_path_buf(), PathKindName::Directory, Protection::Pinned)).collect();
    above.reverse();
    tree.protected.append(&mut above);
}
