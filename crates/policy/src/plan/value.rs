//! The plan as a value: what a run consists of, entry by entry.
//!
//! Types and what follows from them only. It decides nothing: `plan` makes the values.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::Ipv4Addr,
    path::{Path, PathBuf},
    sync::Arc,
};

use serde::Serialize;
use stockade_protocol::{LimitKey, Limits};

use super::Protection;
use crate::{alert::Alert, whitelist::Whitelist};

/// The most directories that are laid over one another. An import merges an image with more than
/// `MAX_LOWER` layers (`stockade-images`), which is no more than this: `engine` compares the two.
pub const MAX_OVERLAY_LAYERS: usize = 10;

/// The launching user.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// An ordinary user.
    Rootless,
    /// Root, for itself or for another user.
    Root,
}

/// The user namespaces between the ids inside and those of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum UserNamespaces {
    /// Two nested user namespaces.
    Nested,
    /// None: the ids inside are those of the host.
    Missing,
}

/// The ids of one run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Identity {
    /// The run's user namespaces.
    pub user_namespaces: UserNamespaces,
    /// Uid and gid inside.
    pub inside: (u32, u32),
    /// Uid and gid on the host.
    pub outside: (u32, u32),
    /// The ids on disk of files in an idmapped scratch; none: no idmap.
    pub idmapped_to: Option<(u32, u32)>,
    /// Supplementary groups that stay, because only root can drop them.
    pub groups_kept: Vec<u32>,
    /// Login name inside.
    pub user: String,
    /// Host name inside.
    pub hostname: String,
}

/// One entry of the sandbox's root, made in this order. Targets are relative to it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "make")]
pub enum RootEntry {
    /// A directory of the root tmpfs.
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
    /// A small file with this text.
    File {
        /// Its path.
        target: PathBuf,
        /// Permission bits.
        mode: u32,
        /// Its text.
        text: String,
    },
    /// An overlay of an image's layers below what the entries before it have made. What comes
    /// after it is mounted on it.
    Image {
        /// The layers' directories on the host, bottom first.
        layers: Vec<PathBuf>,
        /// Code may change it; what it writes lies in the root tmpfs.
        writable: bool,
    },
    /// A host path, read-only, nosuid and nodev.
    Bind {
        /// The host's path.
        source: PathBuf,
        /// Its path.
        target: PathBuf,
        /// Programs may be run from it.
        executable: bool,
    },
    /// A device node of the host.
    Device {
        /// The host's node.
        source: PathBuf,
        /// Its path.
        target: PathBuf,
    },
    /// A writable directory: a part of the root tmpfs bound onto itself.
    Writable {
        /// Its path.
        target: PathBuf,
    },
    /// A fresh proc.
    Proc {
        /// Its path.
        target: PathBuf,
    },
    /// A fresh devpts.
    Devpts {
        /// Its path.
        target: PathBuf,
    },
    /// A text that covers a file of a bind.
    Cover {
        /// Its path.
        target: PathBuf,
        /// The text.
        text: String,
    },
    /// A fifo that code may write to and the launcher reads.
    Pipe {
        /// Its path.
        target: PathBuf,
    },
    /// A file or directory of proc covered by an empty one, where it exists.
    Mask {
        /// Its path.
        target: PathBuf,
    },
    /// A host path of a view: as a bind, but on a way of the host perhaps, on which no link is followed.
    Placed {
        /// The host's path.
        source: PathBuf,
        /// Its path.
        target: PathBuf,
        /// Programs may be run from it.
        executable: bool,
    },
    /// An overlay of host directories, laid likewise, nosuid and nodev.
    Overlay {
        /// The directories on the host, bottom first; at most [`MAX_OVERLAY_LAYERS`].
        layers: Vec<PathBuf>,
        /// Directories of the root's own file system, for what code changes and for overlay itself;
        /// none: it is read-only.
        changes: Option<[PathBuf; 2]>,
        /// Its path.
        target: PathBuf,
        /// Programs may be run from it.
        executable: bool,
    },
    /// One of `writable_trees`, laid likewise.
    Tree {
        /// Its place in the list.
        index: usize,
        /// Its path.
        target: PathBuf,
    },
    /// A directory of the root tmpfs, laid elsewhere.
    Tmpfs {
        /// Its path in the root tmpfs.
        from: PathBuf,
        /// Where it is laid.
        target: PathBuf,
        /// Code may write there.
        writable: bool,
    },
    /// A Unix socket of the host, laid likewise: code may speak to its owner.
    Socket {
        /// Its place in the view's list.
        index: usize,
        /// The host's path.
        source: PathBuf,
        /// Its path.
        target: PathBuf,
    },
    /// A file of a view.
    Contents {
        /// Its path.
        target: PathBuf,
        /// Permission bits.
        mode: u32,
        /// What it holds; never printed.
        #[serde(skip)]
        bytes: Vec<u8>,
    },
    /// A file that is laid over another.
    Laid {
        /// The path of the other.
        target: PathBuf,
        /// Permission bits.
        mode: u32,
        /// What it holds; never printed.
        #[serde(skip)]
        bytes: Vec<u8>,
        /// Code may write it.
        writable: bool,
    },
}

/// A directory of the host that code may write, in a view.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TreePlan {
    /// On the host, without links.
    pub source: PathBuf,
    /// Inside.
    pub target: PathBuf,
    /// Protected paths below it.
    #[serde(serialize_with = "as_text")]
    pub protected: Vec<(PathBuf, PathKindName, Protection)>,
    /// Paths below it over which something is laid. Where the host has none, an empty file or directory is
    /// made there for the time of the run.
    pub mount_points: Vec<(PathBuf, PathKindName)>,
}

/// The writable directory of one run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ScratchPlan {
    /// Its path inside, which for a host directory is its path there.
    pub path: PathBuf,
    /// A host directory (else a tmpfs that vanishes).
    pub host: bool,
    /// Read-only.
    pub read_only: bool,
    /// Bytes: a tmpfs's size, or by how much the host directory may grow.
    pub size: Option<u64>,
    /// Files likewise.
    pub files: Option<u64>,
    /// Protected paths below it.
    #[serde(serialize_with = "as_text")]
    pub protected: Vec<(PathBuf, PathKindName, Protection)>,
}

/// A name in a scratch need not be UTF-8, and the plan's text is.
fn as_text<S: serde::Serializer>(protected: &[(PathBuf, PathKindName, Protection)], to: S) -> Result<S::Ok, S::Error> {
    to.collect_seq(protected.iter().map(|(path, kind, protection)| (path.to_string_lossy(), kind, protection)))
}

/// [`crate::facts::PathKind`] as the plan prints it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PathKindName {
    /// A directory.
    Directory,
    /// Anything else.
    File,
}

/// A value to write into a cgroup's file, and to find there afterwards.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CgroupSetting {
    /// The v1 controller; of v2 none.
    pub controller: Option<&'static str>,
    /// The file.
    pub file: &'static str,
    /// The value.
    pub value: String,
    /// The file may be missing (a kernel built without swap accounting).
    pub optional: bool,
}

/// The cgroup of one run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "version")]
pub enum CgroupPlan {
    /// One directory in each v1 hierarchy.
    V1 {
        /// Parent directory by controller.
        parents: BTreeMap<String, PathBuf>,
        /// Limits.
        settings: Vec<CgroupSetting>,
    },
    /// One v2 directory.
    V2 {
        /// Its parent.
        parent: PathBuf,
        /// The launcher leaves the parent first.
        vacate: bool,
        /// Limits.
        settings: Vec<CgroupSetting>,
    },
    /// None: rlimits replace it.
    Absent {
        /// Why.
        reason: String,
    },
}

impl CgroupPlan {
    /// Whether both are the same apart from `vacate`, which the launcher does only once.
    fn is_like(&self, other: &CgroupPlan) -> bool {
        match (self, other) {
            (CgroupPlan::V2 { parent, settings, .. }, CgroupPlan::V2 { parent: others, settings: theirs, .. }) => {
                (parent, settings) == (others, theirs)
            }
            _ => self == other,
        }
    }
}

/// A rule of Landlock.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LandlockRule {
    /// A path inside.
    pub path: PathBuf,
    /// Access rights as bits of `linux/landlock.h`.
    pub rights: u64,
}

/// Landlock's part.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LandlockPlan {
    /// The kernel's ABI.
    pub abi: u32,
    /// Rights that are refused unless a rule allows them.
    pub handled: u64,
    /// Signals and abstract sockets stay inside.
    pub scoped: u64,
    /// Allowed rights by path.
    pub rules: Vec<LandlockRule>,
}

/// A resource limit of the payload.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RlimitPlan {
    /// The kernel's name.
    pub name: &'static str,
    /// The kernel's number.
    pub resource: u32,
    /// Soft and hard value; null: unlimited.
    pub value: Option<u64>,
}

/// The system call filter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FilterPlan {
    /// SHA-256 of its instructions in hex.
    pub sha256: String,
    /// Instructions, `struct sock_filter` each.
    #[serde(skip)]
    pub program: Arc<[u64]>,
    /// How many there are.
    pub instructions: usize,
    /// Calls whose refusal ends the run, by number.
    #[serde(skip)]
    pub kill: BTreeSet<u32>,
    /// Their names.
    pub kill_names: Vec<String>,
}

/// The network access of a run with a whitelist.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct EgressPlan {
    /// The peers that may be reached.
    pub whitelist: Whitelist,
    /// The resolver that the sandbox's own files name.
    pub resolver: Ipv4Addr,
    /// The alerts for refused peers, which change nothing that the run may do.
    #[serde(skip)]
    pub alerts: Vec<Alert>,
}

/// The image that is the root of one run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ImageRoot {
    /// The name by which it was found.
    pub name: Option<String>,
    /// The digest of its manifest.
    pub digest: String,
    /// The user that it asks for, and does not get; empty: none.
    pub user: String,
    /// How many of its variables can be no variables, and are left out.
    pub malformed_variables: usize,
}

impl ImageRoot {
    /// Its name where it has one, and its digest.
    pub fn title(&self) -> String {
        self.name.as_ref().map_or_else(|| self.digest.clone(), |name| format!("{name}@{}", self.digest))
    }
}

/// Every decision of one run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Plan {
    /// The policy's name.
    pub policy: String,
    /// The policy's hash.
    pub policy_sha256: String,
    /// The launching user.
    pub mode: Mode,
    /// Ids.
    pub identity: Identity,
    /// The root, entry by entry.
    pub root: Vec<RootEntry>,
    /// Size of the root tmpfs, which carries `/tmp`, `/dev/shm` and home, while it is built. Then
    /// code has `tmp_size` beside what was built.
    pub root_size: Option<u64>,
    /// The image that the root is made of; none: the host's directories.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image_root: Option<ImageRoot>,
    /// Scratch.
    pub scratch: ScratchPlan,
    /// Further directories of the host that code may write, each by as much as a scratch.
    #[serde(rename = "trees", skip_serializing_if = "Vec::is_empty")]
    pub writable_trees: Vec<TreePlan>,
    /// Where the payload starts: the first of these that is there; empty: in scratch.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub working_directories: Vec<PathBuf>,
    /// Argument list of the payload.
    pub argv: Vec<String>,
    /// Names of the payload's variables.
    pub environment: Vec<String>,
    /// Their values, `NAME=value`; never printed: some are the caller's.
    #[serde(skip)]
    pub environment_values: Vec<String>,
    /// Where the code is written, and under which name; none for a command.
    pub program_file: Option<(PathBuf, String)>,
    /// Resource limits of the payload.
    pub rlimits: Vec<RlimitPlan>,
    /// Cgroup.
    pub cgroup: CgroupPlan,
    /// How many CPUs the payload sees and may run on.
    pub cpus: usize,
    /// Landlock.
    pub landlock: LandlockPlan,
    /// Landlock of the payload alone, which shuts off pid 1.
    pub payload_landlock: LandlockPlan,
    /// The system call filter.
    pub filter: FilterPlan,
    /// The caller's own filters of system calls, which the payload's process loads last, beside that
    /// one; how many instructions each has.
    #[serde(skip_serializing_if = "Vec::is_empty", serialize_with = "lengths")]
    pub callers_filters: Vec<Vec<u64>>,
    /// The limits in force.
    #[serde(serialize_with = "limits_by_name")]
    pub limits: Limits,
    /// Those of them that the policy or the request would have had higher: the caller's own hard
    /// limits are lower.
    #[serde(skip_serializing_if = "Vec::is_empty", serialize_with = "names")]
    pub callers_limits: Vec<LimitKey>,
    /// The network access; none: no peer and no resolver can be reached.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub egress: Option<EgressPlan>,
    /// The sandbox has a pty.
    pub terminal: bool,
    /// The writable directories, apart from a host scratch, exist before the run and remain
    /// after it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub session: bool,
    /// Stockade carries the program as bytes: a file without a name, that is executed by descriptor.
    #[serde(rename = "image", skip_serializing_if = "std::ops::Not::not")]
    pub carried_program: bool,
    /// Layers that this run goes without, and why.
    pub degraded: Vec<(&'static str, String)>,
}

fn limits_by_name<S: serde::Serializer>(limits: &Limits, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(limits.iter().map(|(key, value)| (key.json_name(), value)))
}

fn lengths<S: serde::Serializer>(filters: &[Vec<u64>], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(filters.iter().map(Vec::len))
}

fn names<S: serde::Serializer>(keys: &[LimitKey], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(keys.iter().map(|key| key.name()))
}

impl Plan {
    /// Whether a sandbox that was set up for `other` fits this plan: the two differ only in
    /// values of the run's job and in what the launcher does during the run.
    pub fn is_set_up_like(&self, other: &Plan) -> bool {
        let Plan {
            policy,
            policy_sha256,
            mode,
            identity,
            root,
            root_size,
            image_root,
            scratch,
            writable_trees,
            working_directories,
            argv: _,
            environment: _,
            environment_values: _,
            program_file: _,
            rlimits: _,
            cgroup,
            cpus,
            landlock,
            payload_landlock,
            filter,
            callers_filters,
            limits: _,
            callers_limits: _,
            egress,
            terminal,
            session,
            carried_program,
            degraded,
        } = self;
        (policy, policy_sha256, mode, identity, root, root_size)
            == (&other.policy, &other.policy_sha256, &other.mode, &other.identity, &other.root, &other.root_size)
            && image_root == &other.image_root
            && (scratch, cpus, filter) == (&other.scratch, &other.cpus, &other.filter)
            && (writable_trees, working_directories, callers_filters)
                == (&other.writable_trees, &other.working_directories, &other.callers_filters)
            && (landlock, payload_landlock) == (&other.landlock, &other.payload_landlock)
            && (egress, terminal, session, carried_program) == (&other.egress, &other.terminal, &other.session, &other.carried_program)
            && degraded == &other.degraded
            && cgroup.is_like(&other.cgroup)
    }

    /// Whether the program's process is started as that of `other`: with the same arguments,
    /// variables and resource limits, and the program in the same file.
    pub fn starts_like(&self, other: &Plan) -> bool {
        (&self.argv, &self.environment_values, &self.program_file, &self.rlimits)
            == (&other.argv, &other.environment_values, &other.program_file, &other.rlimits)
    }

    /// The same, but for arguments behind those of `other`.
    pub fn starts_like_before_arguments(&self, other: &Plan) -> bool {
        self.argv.starts_with(&other.argv)
            && (&self.environment_values, &self.program_file, &self.rlimits)
                == (&other.environment_values, &other.program_file, &other.rlimits)
    }

    /// The limits that nothing enforces. Without a cgroup no share of a CPU is kept: code is kept
    /// to a number of CPUs at its start, and may choose others. Memory, processes and CPU time
    /// are limited in other ways then.
    pub fn unenforced_limits(&self) -> Vec<LimitKey> {
        // More than the CPUs that there are is no limit.
        let present = u64::try_from(self.cpus).unwrap_or(u64::MAX).saturating_mul(1000);
        let kept = !matches!(self.cgroup, CgroupPlan::Absent { .. });
        let share = self.limits.get(LimitKey::Cpus).filter(|milli| !kept && *milli <= present);
        share.map(|_| LimitKey::Cpus).into_iter().collect()
    }

    /// Where the payload starts: the first of these that is there.
    pub fn start_directories(&self) -> impl Iterator<Item = &Path> {
        let scratch = self.working_directories.is_empty().then_some(self.scratch.path.as_path());
        self.working_directories.iter().map(PathBuf::as_path).chain(scratch)
    }

    /// Code may change the root, which is an image's.
    pub fn has_writable_root(&self) -> bool {
        self.root.iter().any(|entry| matches!(entry, RootEntry::Image { writable: true, .. }))
    }

    /// Unix sockets of the host that the root shows.
    pub fn host_sockets(&self) -> impl Iterator<Item = &Path> {
        self.root.iter().filter_map(|entry| match entry {
            RootEntry::Socket { source, .. } => Some(source.as_path()),
            _ => None,
        })
    }

    /// Mount points inside that may be writable.
    pub fn writable_mounts(&self) -> Vec<PathBuf> {
        let mut all: Vec<PathBuf> = self
            .root
            .iter()
            .filter_map(|entry| match entry {
                RootEntry::Writable { target }
                | RootEntry::Devpts { target }
                | RootEntry::Tree { target, .. }
                | RootEntry::Tmpfs { target, writable: true, .. }
                | RootEntry::Overlay { target, changes: Some(_), .. }
                | RootEntry::Laid { target, writable: true, .. } => Some(Path::new("/").join(target)),
                RootEntry::Image { writable: true, .. } => Some(PathBuf::from("/")),
                _ => None,
            })
            .collect();
        for TreePlan { target, protected, .. } in &self.writable_trees {
            let pinned = protected.iter().filter(|(.., protection)| *protection == Protection::Pinned);
            all.extend(pinned.map(|(path, ..)| target.join(path)));
        }
        if !self.scratch.read_only {
            all.push(self.scratch.path.clone());
            let pinned = self.scratch.protected.iter().filter(|(.., protection)| *protection == Protection::Pinned);
            all.extend(pinned.map(|(path, ..)| self.scratch.path.join(path)));
        }
        all
    }

    /// Mount points that must exist inside.
    pub fn required_mounts(&self) -> Vec<PathBuf> {
        let mut all: Vec<PathBuf> = self
            .root
            .iter()
            .filter_map(|entry| match entry {
                RootEntry::Bind { target, .. }
                | RootEntry::Device { target, .. }
                | RootEntry::Writable { target }
                | RootEntry::Proc { target }
                | RootEntry::Cover { target, .. }
                | RootEntry::Placed { target, .. }
                | RootEntry::Tree { target, .. }
                | RootEntry::Tmpfs { target, .. }
                | RootEntry::Overlay { target, .. }
                | RootEntry::Laid { target, .. }
                | RootEntry::Socket { target, .. }
                | RootEntry::Devpts { target } => Some(Path::new("/").join(target)),
                _ => None,
            })
            .collect();
        for TreePlan { target, protected, .. } in &self.writable_trees {
            all.extend(protected.iter().map(|(path, ..)| target.join(path).components().collect::<PathBuf>()));
        }
        all.push(PathBuf::from("/"));
        all.push(self.scratch.path.clone());
        all.extend(self.scratch.protected.iter().map(|(path, ..)| self.scratch.path.join(path)));
        all
    }
}
