//! Reading what a plan needs to know of the host.
//!
//! Read, not probed: whether a feature works is shown by the run itself, and by
//! `doctor`. Every source is a small file. One that does not exist says something of the
//! host; one that cannot be read says nothing, and nothing is run on a guess.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
};

use nix::libc;
use rlimit::Resource;
use rustix::{
    fs::{Access, Mode, OFlags, access},
    io::Errno,
    thread::sched_getaffinity,
};
use stockade_launcher::{
    OpenedScratch,
    registry::{Record, Registry},
};
use stockade_policy::facts::{CgroupFacts, HostFacts};
use stockade_protocol::Verdict;

use crate::{Refusal, RefusalCause, admit::random_bytes, caller::Identity};

/// The first host id that runs use; the run's number is added.
pub const FIRST_UNIQUE_ID: u32 = 0x7000_0000;
const ROOTS_REGISTRY: &str = "/run/stockade";
/// Has a directory for each user, which is that user's.
const RUNTIME: &str = "/run/user";
/// Is everybody's.
const SHARED: &str = "/tmp";
/// The name of a user's registry there begins so; the uid follows.
const SHARED_PREFIX: &str = "stockade-";

/// A host id that is the run's own, or why there is none. Neither: it was not asked for.
///
/// # Errors
/// A file that is there cannot be read.
pub fn unique_id(identity: &Identity, record: Option<&Record>) -> Result<UniqueId, Refusal> {
    let Some(record) = record.filter(|_| identity.privileged) else { return Ok(UniqueId::default()) };
    let id = FIRST_UNIQUE_ID + record.slot();
    let refusal = why_not_unique(id)?;
    Ok(UniqueId { id: refusal.is_none().then_some(id), refusal })
}

/// The place in the registry that makes the uid of several runs, one after the other, one; none where an
/// ordinary user launches.
///
/// # Errors
/// The registry cannot be had.
pub(crate) fn uid_for_all(identity: &Identity) -> Result<Option<Arc<Record>>, Refusal> {
    identity.privileged.then(|| Ok(Arc::new(registry(identity)?.claim()?))).transpose()
}

/// See [`unique_id`].
#[derive(Debug, Default)]
pub struct UniqueId {
    /// The id.
    pub id: Option<u32>,
    /// Why there is none.
    pub refusal: Option<String>,
}

/// Reads the facts that do not depend on the request.
///
/// # Errors
/// A file that is there cannot be read.
pub fn read(identity: &Identity, unique: UniqueId, cgroup: CgroupFacts) -> Result<HostFacts, Refusal> {
    Ok(HostFacts {
        kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
        landlock_abi: stockade_sys::landlock::abi(),
        privileged: identity.privileged,
        caller: identity.caller.clone(),
        unique_id: unique.id,
        unique_id_refusal: unique.refusal,
        user_namespace_refusal: None,
        cpus: sched_getaffinity(None).map_or(1, |usable| usable.count() as usize),
        cgroup,
        swap: rustix::system::sysinfo().totalswap > 0,
        paths: BTreeMap::new(),
        empty: BTreeSet::new(),
        led: BTreeMap::new(),
        foreign: BTreeMap::new(),
        codecs: BTreeMap::new(),
        links: merged_usr_links()?,
        hard_limits: hard_limits(),
        image: None,
    })
}

/// Reads a small file. One that does not exist is empty.
///
/// # Errors
/// It cannot be read for any other reason, which says nothing of what stands in it.
pub(crate) fn small_file(path: impl AsRef<Path>) -> Result<String, Refusal> {
    let path = path.as_ref();
    let opened = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
    match opened.and_then(stockade_launcher::read_to_string) {
        Err(Errno::NOENT) => Ok(String::new()),
        read => Ok(read.map_err(|errno| unreadable("read", path)(errno.into()))?),
    }
}

/// Why nothing is known of a part of the host.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HostError {
    #[error("{attempt} {}: {error}; the confinement of a run depends on it: let the user who runs stockade read it", path.display())]
    Unreadable { attempt: &'static str, path: PathBuf, error: io::Error },
    #[error("cannot look at {}: {error}", path.display())]
    Unknown { path: PathBuf, error: io::Error },
    #[error("{0} cannot be read; mount proc on /proc")]
    NoProc(&'static str),
    #[error("/proc is that of another PID namespace; mount proc on /proc in this one (unshare --mount-proc)")]
    OtherProc,
}

impl RefusalCause for HostError {
    fn verdict_and_reason(&self) -> (Verdict, &'static str) {
        let reason = match self {
            HostError::Unreadable { .. } | HostError::Unknown { .. } => "host_unreadable",
            HostError::NoProc(_) | HostError::OtherProc => "no_proc",
        };
        (Verdict::SandboxError, reason)
    }
}

pub(crate) fn unreadable(attempt: &'static str, path: &Path) -> impl Fn(io::Error) -> HostError {
    move |error| HostError::Unreadable { attempt, path: path.to_path_buf(), error }
}

pub(crate) fn unknown(path: &Path) -> impl Fn(io::Error) -> HostError {
    move |error| HostError::Unknown { path: path.to_path_buf(), error }
}

/// Why a host id may be somebody's: the launcher's own map must hold it, and no account
/// may have it among its subordinate ids.
fn why_not_unique(id: u32) -> Result<Option<String>, Refusal> {
    /// The initial user namespace (PROC_USER_INIT_INO), which maps every id.
    const INITIAL: &[u8] = b"user:[4026531837]";
    let initial = rustix::fs::readlink("/proc/self/ns/user", Vec::new()).is_ok_and(|link| link.as_bytes() == INITIAL);
    let maps: &[&str] = if initial { &[] } else { &["/proc/self/uid_map", "/proc/self/gid_map"] };
    for map in maps {
        let text = small_file(map)?;
        let mapped = text.lines().any(|line| {
            let numbers: Vec<u64> = line.split_ascii_whitespace().filter_map(|word| word.parse().ok()).collect();
            matches!(numbers[..], [inside, _, count] if (inside..inside + count).contains(&u64::from(id)))
        });
        if !mapped {
            return Ok(Some(format!("the launcher's own {map} does not map id {id}, as in a container with a map of its own")));
        }
    }
    for file in ["/etc/subuid", "/etc/subgid"] {
        let text = small_file(file)?;
        let taken = text.lines().find(|line| {
            let mut fields = line.split(':').skip(1).map(str::parse::<u64>);
            matches!((fields.next(), fields.next()), (Some(Ok(first)), Some(Ok(count))) if (first..first.saturating_add(count)).contains(&u64::from(id)))
        });
        if let Some(line) = taken {
            return Ok(Some(format!("{file} gives id {id} away (`{line}`); change that range")));
        }
    }
    Ok(None)
}

fn merged_usr_links() -> Result<Vec<(String, String)>, Refusal> {
    let mut links = Vec::new();
    for name in ["bin", "sbin", "lib", "lib32", "lib64", "libx32"] {
        let path = Path::new("/").join(name);
        match fs::read_link(&path) {
            Ok(target) => links.extend(target.to_str().map(|target| (name.to_owned(), target.to_owned()))),
            // It is not there, or is a directory.
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::InvalidInput) => {}
            Err(error) => return Err(unreadable("read the link", &path)(error).into()),
        }
    }
    Ok(links)
}

/// Finite hard limits of the launcher, which no child can exceed.
fn hard_limits() -> BTreeMap<u32, u64> {
    let resources = [
        (0, Resource::CPU),
        (1, Resource::FSIZE),
        (2, Resource::DATA),
        (3, Resource::STACK),
        (6, Resource::NPROC),
        (7, Resource::NOFILE),
        (8, Resource::MEMLOCK),
        (9, Resource::AS),
        (12, Resource::MSGQUEUE),
    ];
    let finite =
        |(number, resource): (u32, Resource)| resource.get_hard().ok().filter(|hard| *hard != rlimit::INFINITY).map(|hard| (number, hard));
    resources.into_iter().filter_map(finite).collect()
}

/// A mounted cgroup hierarchy.
struct Mount {
    /// Where it is mounted.
    point: PathBuf,
    /// Which of its directories is mounted there.
    root: PathBuf,
    version2: bool,
    controllers: Vec<String>,
}

fn cgroup_mounts(mountinfo: &str) -> Vec<Mount> {
    let mut mounts = Vec::new();
    for line in mountinfo.lines() {
        // "36 35 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
        let Some((head, tail)) = line.split_once(" - ") else { continue };
        let mut tail = tail.split(' ');
        let (Some(kind), options) = (tail.next(), tail.nth(1).unwrap_or_default()) else { continue };
        if kind != "cgroup" && kind != "cgroup2" {
            continue;
        }
        let mut fields = head.split(' ').skip(3);
        let (Some(root), Some(point)) = (fields.next(), fields.next()) else { continue };
        mounts.push(Mount {
            point: PathBuf::from(point),
            root: PathBuf::from(root),
            version2: kind == "cgroup2",
            controllers: options.split(',').map(String::from).collect(),
        });
    }
    mounts
}

/// The hierarchies where every distribution mounts them, as far as they are there and hold
/// the launcher's own directories; empty where anything is unusual. The kernel writes the
/// list of all mounts anew for each reader, which takes longer than all other facts.
fn usual_mounts(membership: &str) -> Vec<Mount> {
    let mount_of = |line: &str| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next()?, fields.next()?);
        let version2 = controllers.is_empty();
        if !version2 && !controllers.split(',').any(|name| V1_NEEDED.contains(&name) || name == "cpuacct") {
            return None;
        }
        let point = Path::new("/sys/fs/cgroup").join(controllers);
        let mount = Mount { point, root: PathBuf::from("/"), version2, controllers: controllers.split(',').map(String::from).collect() };
        // Not there where only a part of the hierarchy is mounted, or nothing.
        let own = rustix::fs::statfs(own_directory(&mount, path));
        own.is_ok_and(|stat| stat.f_type == if version2 { libc::CGROUP2_SUPER_MAGIC } else { libc::CGROUP_SUPER_MAGIC }).then_some(mount)
    };
    let mounts: Vec<Mount> = membership.lines().filter_map(mount_of).collect();
    let v1 = V1_NEEDED.iter().all(|needed| mounts.iter().any(|mount| !mount.version2 && mount.controllers.iter().any(|c| c == needed)));
    if v1 || mounts.iter().any(|mount| mount.version2) { mounts } else { Vec::new() }
}

/// The directory of a hierarchy in which the launcher is.
fn own_directory(mount: &Mount, path: &str) -> PathBuf {
    let below = Path::new(path).strip_prefix(&mount.root).or_else(|_| Path::new(path).strip_prefix("/"));
    mount.point.join(below.unwrap_or(Path::new("")))
}

/// Whether /sys/fs/cgroup is cgroup v2, as on any host of recent years.
pub fn is_unified() -> bool {
    rustix::fs::statfs("/sys/fs/cgroup").is_ok_and(|stat| stat.f_type == libc::CGROUP2_SUPER_MAGIC)
}

/// What cgroups offer: v1 where memory, pids and cpu are mounted there, else v2.
///
/// # Errors
/// A file that says so cannot be read.
pub fn cgroup_facts() -> Result<CgroupFacts, Refusal> {
    let membership = small_file("/proc/self/cgroup")?;
    let mut mounts = usual_mounts(&membership);
    if mounts.is_empty() {
        mounts = cgroup_mounts(&small_file("/proc/self/mountinfo")?);
    }
    let path_of = |controller: &str| {
        membership.lines().find_map(|line| {
            let mut fields = line.splitn(3, ':').skip(1);
            let (controllers, path) = (fields.next()?, fields.next()?);
            controllers.split(',').any(|c| c == controller).then_some(path)
        })
    };
    let v1 = |controller: &str| {
        let mount = mounts.iter().find(|mount| !mount.version2 && mount.controllers.iter().any(|c| c == controller))?;
        Some((controller.to_owned(), own_directory(mount, path_of(controller)?)))
    };
    let mut controllers: BTreeMap<String, PathBuf> = V1_NEEDED.into_iter().filter_map(v1).collect();
    if controllers.len() == 3 {
        controllers.extend(v1("cpuacct"));
        let closed = controllers.values().find_map(|directory| Some((directory, access(directory, Access::WRITE_OK).err()?)));
        return Ok(match closed {
            Some((closed, Errno::ROFS)) => CgroupFacts::Unavailable {
                reason: format!(
                    "{} is mounted read-only, as in a container; mount it writable (Docker: --privileged), or use the host",
                    closed.display()
                ),
            },
            Some((closed, _)) => CgroupFacts::Unavailable {
                reason: format!(
                    "{} is not writable: an ordinary user has no cgroup v1 of its own; run as root, or on a host with cgroup v2 and systemd through `systemd-run --user --scope -p Delegate=yes stockade …`",
                    closed.display()
                ),
            },
            None => CgroupFacts::V1 { controllers },
        });
    }
    match (mounts.iter().find(|mount| mount.version2), path_of("")) {
        (Some(mount), Some(path)) => v2_facts(&own_directory(mount, path), &mount.point),
        _ => Ok(CgroupFacts::Unavailable {
            reason: String::from(
                "neither cgroup v2 nor the v1 controllers memory, pids and cpu are mounted; mount cgroup2 at /sys/fs/cgroup",
            ),
        }),
    }
}

/// Leaves a cgroup in which this process is alone for a child of it, where that is delegated to it
/// (cgroup v2): the launchers that it starts then share the delegated cgroup, and each can limit its
/// runs in there. Elsewhere nothing is done, and each launcher finds what there is.
///
/// # Errors
/// The kernel refuses what it has delegated.
pub fn share_delegated_cgroup() -> Result<(), Refusal> {
    match cgroup_facts()? {
        CgroupFacts::V2 { parent, vacate: true } => Ok(stockade_launcher::leave_for_child(&parent)?),
        _ => Ok(()),
    }
}

const V1_NEEDED: [&str; 3] = ["memory", "pids", "cpu"];
const V2_NEEDED: [&str; 3] = ["cpu", "memory", "pids"];
const DELEGATE: &str = "start it in a cgroup of its own: `systemd-run --user --scope -p Delegate=yes stockade …` (as root without --user)";

fn v2_facts(own: &Path, top: &Path) -> Result<CgroupFacts, Refusal> {
    let read = |directory: &Path, file: &str| small_file(directory.join(file));
    let has_all = |directory: &Path, file: &str| -> Result<bool, Refusal> {
        let text = read(directory, file)?;
        Ok(V2_NEEDED.iter().all(|needed| text.split_ascii_whitespace().any(|word| word == *needed)))
    };
    let below = |parent: &Path, vacate| Ok(CgroupFacts::V2 { parent: parent.to_path_buf(), vacate });
    let unavailable = |why: String| Ok(CgroupFacts::Unavailable { reason: format!("{why}; {DELEGATE}") });
    let writable = |directory: &Path| {
        access(directory, Access::WRITE_OK).is_ok() && access(directory.join("cgroup.subtree_control"), Access::WRITE_OK).is_ok()
    };
    // A launcher that has left for the child of its cgroup before, in this scope.
    if own.file_name().is_some_and(|name| name == "stockade-launcher")
        && let Some(above) = own.parent().filter(|above| writable(above))
        && has_all(above, "cgroup.subtree_control")?
    {
        return below(above, false);
    }
    if !has_all(own, "cgroup.controllers")? {
        return unavailable(format!(
            "cgroup {} is not given the controllers cpu, memory and pids (it has: {})",
            own.display(),
            read(own, "cgroup.controllers")?.trim()
        ));
    }
    if !writable(own) {
        return unavailable(format!("cgroup {} is not delegated to this user", own.display()));
    }
    // The root cgroup has no limits, and may hold processes beside children.
    let is_root = own == top && !own.join("cgroup.type").exists();
    if is_root || has_all(own, "cgroup.subtree_control")? {
        return below(own, false);
    }
    let alone = read(own, "cgroup.procs")?.lines().map(str::trim).eq([std::process::id().to_string().as_str()]);
    if alone {
        return below(own, true);
    }
    // A sibling loses no cap on memory or CPU, where the launcher's own cgroup sets none.
    // systemd gives every unit a cap on its tasks: that one a sibling escapes, but its own
    // process limit is far below.
    let mut uncapped = read(own, "cpu.max")?.trim_start().starts_with("max");
    for file in ["memory.max", "memory.high", "memory.swap.max"] {
        uncapped &= matches!(read(own, file)?.trim(), "max" | "");
    }
    match own.parent() {
        Some(above) if uncapped && above.starts_with(top) && writable(above) && has_all(above, "cgroup.subtree_control")? => {
            below(above, false)
        }
        _ => unavailable(format!("other processes share cgroup {}, so no limits can be handed down in it", own.display())),
    }
}

/// Device and inode.
pub(crate) type FileId = (u64, u64);

/// Which directory a scratch is.
pub(crate) fn scratch_id(scratch: &OpenedScratch) -> Result<FileId, HostError> {
    scratch.file_id().map_err(|errno| unknown(&scratch.facts.path)(errno.into()))
}

/// The registry of the user who runs this.
///
/// # Errors
/// Its directory is somebody else's, or cannot be made.
pub fn registry(identity: &Identity) -> Result<Registry, Refusal> {
    Ok(Registry::open(&registry_directory(identity), rustix::process::geteuid().as_raw())?)
}

/// Where that is. `/tmp` is everybody's: where somebody else has taken the name there, the
/// user's own directory has a longer one that no other user knows beforehand.
pub fn registry_directory(identity: &Identity) -> PathBuf {
    static NEW: OnceLock<PathBuf> = OnceLock::new();
    if identity.privileged {
        return PathBuf::from(ROOTS_REGISTRY);
    }
    if let Some(runtime) = runtime_registry() {
        return runtime;
    }
    let uid = identity.caller.uid;
    let shared = PathBuf::from(format!("{SHARED}/{SHARED_PREFIX}{uid}"));
    // Somebody else can also put a file of this user's there.
    let is_free = matches!(fs::symlink_metadata(&shared), Err(error) if error.kind() == io::ErrorKind::NotFound);
    if is_free || is_owners(&shared, uid) {
        return shared;
    }
    let other = shared_registries(&mut Vec::new()).into_iter().find(|(_, owner)| *owner == uid);
    other.map_or_else(|| NEW.get_or_init(|| longer_name(shared)).clone(), |(path, _)| path)
}

fn longer_name(shared: PathBuf) -> PathBuf {
    let mut random = [0; 8];
    match random_bytes(&mut random) {
        Ok(()) => PathBuf::from(format!("{}-{:016x}", shared.display(), u64::from_ne_bytes(random))),
        // It is another's, which is said when it is opened.
        Err(_) => shared,
    }
}

fn runtime_registry() -> Option<PathBuf> {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|path| path.is_absolute() && path.is_dir());
    Some(runtime?.join("stockade"))
}

/// Every place where a run of the user who runs this may be noted: which one a start takes
/// depends on its environment, and on what others have put into `/tmp` by then.
pub(crate) fn registries(identity: &Identity, problems: &mut Vec<String>) -> Vec<PathBuf> {
    if identity.privileged {
        return vec![PathBuf::from(ROOTS_REGISTRY)];
    }
    let uid = identity.caller.uid;
    let in_tmp = shared_registries(problems).into_iter().filter(|(_, owner)| *owner == uid).map(|(path, _)| path);
    let places = [PathBuf::from(format!("{RUNTIME}/{uid}/stockade"))].into_iter().chain(runtime_registry()).chain(in_tmp);
    // One may be named in two ways.
    let mut all: Vec<PathBuf> = places.filter_map(|path| path.canonicalize().ok()).filter(|path| is_owners(path, uid)).collect();
    all.sort();
    all.dedup();
    all
}

/// The usual places of ordinary users' registries, each with its user.
pub(crate) fn registries_of_others(problems: &mut Vec<String>) -> Vec<(PathBuf, u32)> {
    let user = |name: &str| name.parse::<u32>().ok();
    let in_runtime = names(Path::new(RUNTIME), problems)
        .into_iter()
        .filter_map(|name| Some((Path::new(RUNTIME).join(&name).join("stockade"), user(&name)?)));
    let mut all: Vec<(PathBuf, u32)> = in_runtime.filter(|(path, uid)| is_owners(path, *uid)).collect();
    all.extend(shared_registries(problems));
    all.retain(|(_, uid)| *uid != 0);
    all
}

/// The registries in `/tmp`: a name says whose it is, and so does its owner.
fn shared_registries(problems: &mut Vec<String>) -> Vec<(PathBuf, u32)> {
    let owned = |name: String| {
        let uid = name.strip_prefix(SHARED_PREFIX)?.split('-').next()?.parse().ok()?;
        let path = Path::new(SHARED).join(name);
        is_owners(&path, uid).then_some((path, uid))
    };
    names(Path::new(SHARED), problems).into_iter().filter_map(owned).collect()
}

/// The names in a directory; none where it does not exist.
fn names(directory: &Path, problems: &mut Vec<String>) -> Vec<String> {
    let read = || fs::read_dir(directory)?.map(|entry| Ok(entry?.file_name())).collect::<io::Result<Vec<_>>>();
    match read() {
        Ok(names) => names.into_iter().filter_map(|name| name.into_string().ok()).collect(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        Err(error) => {
            problems.push(format!("cannot read {}: {error}", directory.display()));
            Vec::new()
        }
    }
}

/// Whether this is a directory of that user, which nobody else may write to.
fn is_owners(path: &Path, uid: u32) -> bool {
    fs::symlink_metadata(path).is_ok_and(|there| there.uid() == uid && there.is_dir() && there.mode() & 0o022 == 0)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::*;

    #[test]
    fn a_file_that_does_not_exist_is_empty_and_one_that_cannot_be_read_is_an_error() {
        let directory = std::env::temp_dir().join(format!("facts-{}", std::process::id()));
        fs::create_dir(&directory).unwrap();
        fs::write(directory.join("file"), "text").unwrap();
        std::os::unix::fs::symlink("link", directory.join("link")).unwrap();
        let read = |name: &str| small_file(directory.join(name)).map_err(|refusal| (refusal.verdict, refusal.reason, refusal.message));
        let found = [read("file"), read("missing"), read("missing/file"), read("."), read("link"), read("file/file")];
        fs::remove_dir_all(&directory).unwrap();
        let [file, missing, below_missing, unreadable @ ..] = found;
        assert_eq!((file.unwrap(), missing.unwrap(), below_missing.unwrap()), ("text".into(), String::new(), String::new()));
        for (refusal, why) in unreadable.into_iter().zip(["Is a directory", "symbolic links", "Not a directory"]) {
            let (verdict, reason, message) = refusal.unwrap_err();
            assert_eq!((verdict, reason.as_str()), (stockade_protocol::Verdict::SandboxError, "host_unreadable"));
            assert!(message.contains(directory.to_str().unwrap()) && message.contains(why), "{message}");
        }
    }
}
