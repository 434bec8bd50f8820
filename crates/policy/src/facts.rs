//! What a plan needs to know of the host and of the caller.
//!
//! Plain values: `engine` reads them, `doctor` probes them, a test writes them down.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
};

/// The host as one run sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostFacts {
    /// Release of the running kernel.
    pub kernel: String,
    /// Landlock ABI; 0: none.
    pub landlock_abi: u32,
    /// The launcher has root's rights (effective uid 0 and CAP_SYS_ADMIN).
    pub privileged: bool,
    /// Who asked: the launcher's own ids, or those behind sudo.
    pub caller: Caller,
    /// Host uid and gid that belong to this run alone; only root can give one.
    pub unique_id: Option<u32>,
    /// Why there is none.
    pub unique_id_refusal: Option<String>,
    /// Why root can make no user namespace, with the remedy; none where one was made, or
    /// where an ordinary user launches.
    pub user_namespace_refusal: Option<String>,
    /// How many CPUs the launcher may run on.
    pub cpus: usize,
    /// What cgroups offer.
    pub cgroup: CgroupFacts,
    /// Swap is switched on.
    pub swap: bool,
    /// What stands at each path that the policy names.
    pub paths: BTreeMap<PathBuf, PathKind>,
    /// Directories of the caller's own among the sources of a view that hold nothing.
    pub empty: BTreeSet<PathBuf>,
    /// Where those of them lead on whose way are links: the path without any.
    pub led: BTreeMap<PathBuf, PathBuf>,
    /// Sources of a view that may be left out, on whose way are links that are not followed, and which.
    pub foreign: BTreeMap<PathBuf, String>,
    /// By runtime whose modules the policy watches: the codecs of its interpreters.
    pub codecs: BTreeMap<String, Vec<Codec>>,
    /// Top-level links of a merged /usr, such as `bin` to `usr/bin`.
    pub links: Vec<(String, String)>,
    /// The launcher's own hard limits by resource number, where finite.
    pub hard_limits: BTreeMap<u32, u64>,
    /// The image that is the run's root; none: the host's directories are.
    pub image: Option<ImageFacts>,
}

/// The image that is a run's root, and what of the policy's was found in it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImageFacts {
    /// The name by which it was found.
    pub name: Option<String>,
    /// The digest of its manifest.
    pub digest: String,
    /// Its lower directories on the host, bottom first.
    pub layers: Vec<PathBuf>,
    /// The variables that it sets.
    pub environment: BTreeMap<String, String>,
    /// How many of its variables can be no variables.
    pub malformed_variables: usize,
    /// Its working directory as it stands in its configuration, and what the image has there; none:
    /// it names none.
    pub working_directory: Option<(PathBuf, Option<PathKind>)>,
    /// Its entry point and default arguments.
    pub command: Vec<String>,
    /// The user that it asks for.
    pub user: String,
    /// By program that the policy's runtimes name: the program of the image in its place.
    pub programs: BTreeMap<PathBuf, PathBuf>,
}

impl ImageFacts {
    /// Its name where it has one, and its digest.
    pub fn title(&self) -> String {
        self.name.as_ref().map_or_else(|| self.digest.clone(), |name| format!("{name}@{}", self.digest))
    }
}

/// The codec of an interpreter that it loads before any code.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Codec {
    /// Its path.
    pub path: PathBuf,
    /// Its text.
    pub text: String,
}

/// Ids of the caller.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Caller {
    /// User id.
    pub uid: u32,
    /// Primary group id.
    pub gid: u32,
    /// Supplementary group ids.
    pub groups: Vec<u32>,
}

/// What stands at a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathKind {
    /// A directory.
    Directory,
    /// Anything else.
    File,
}

/// Where cgroups could be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CgroupFacts {
    /// The launcher's own directory in each v1 hierarchy, by controller.
    V1 {
        /// memory, pids and cpu, each writable; cpuacct where there is one.
        controllers: BTreeMap<String, PathBuf>,
    },
    /// A v2 directory below which the launcher may make cgroups.
    V2 {
        /// The directory.
        parent: PathBuf,
        /// The launcher is the only process in it and must leave for a child first.
        vacate: bool,
    },
    /// None, and why, with the remedy.
    Unavailable {
        /// For a person.
        reason: String,
    },
}

impl Default for CgroupFacts {
    fn default() -> Self {
        CgroupFacts::Unavailable { reason: String::from("not looked for") }
    }
}
