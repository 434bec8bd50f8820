//! The sandbox's root: each directory, symlink, file and mount, in order.
//!
//! The root starts empty and contains only what is listed here. It does not mount anything.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    path::{Component, Path, PathBuf},
};

use stockade_protocol::Limits;

use super::{
    COMMANDS, HOME, Identity, PlanError, RootEntry, RunRequest, ScratchPlan, commands::Commands, confinement::usable_cpus, home_of,
    modules::plan_modules, plan_working_directory, taken,
};
use crate::{
    facts::{HostFacts, ImageFacts, PathKind},
    model::Policy,
    whitelist::RESOLVER,
};

/// Files of proc that show the host or other users and have no use inside. kallsyms shows
/// zeros and only root may write sysrq-trigger; neither needs a mask.
pub const PROC_MASKS: [&str; 7] = ["kcore", "keys", "key-users", "timer_list", "interrupts", "sched_debug", "locks"];
/// Directories that the code may write besides its scratch; they vanish after the run.
pub const WRITABLE: [&str; 3] = ["/tmp", "/dev/shm", HOME];

#[derive(Default)]
pub(super) struct RootBuilder {
    pub(super) entries: Vec<RootEntry>,
    /// Compared as bytes: as paths they would be taken apart for each comparison.
    pub(super) made: BTreeMap<OsString, PathKind>,
    bound: Vec<PathBuf>,
}

impl RootBuilder {
    /// A path inside without its leading slash.
    pub(super) fn relative(path: &Path) -> PathBuf {
        path.strip_prefix("/").unwrap_or(path).to_path_buf()
    }

    pub(super) fn is_made(&self, path: &Path) -> bool {
        self.made.contains_key(path.as_os_str())
    }

    /// What is at a path of the root; a link counts as a file.
    pub(super) fn kind_of(&self, path: &Path) -> Option<PathKind> {
        if path.parent().is_none() { Some(PathKind::Directory) } else { self.made.get(path.as_os_str()).copied() }
    }

    pub(super) fn directory(&mut self, path: &Path, mode: u32) {
        // The parents of an entry exist as well, and so does each path below a bind.
        if self.is_made(path) || self.bound.iter().any(|bound| path.starts_with(bound)) {
            return;
        }
        let is_missing = |ancestor: &&Path| ancestor.parent().is_some() && !self.is_made(ancestor);
        let missing: Vec<&Path> = path.ancestors().take_while(is_missing).collect();
        for ancestor in missing.into_iter().rev() {
            self.made.insert(ancestor.into(), PathKind::Directory);
            let mode = if ancestor == path { mode } else { 0o755 };
            self.entries.push(RootEntry::Directory { target: Self::relative(ancestor), mode });
        }
    }

    pub(super) fn parent(&mut self, path: &Path) {
        if let Some(parent) = path.parent() {
            self.directory(parent, 0o755);
        }
    }

    fn file(&mut self, path: &str, mode: u32, text: String) {
        self.parent(Path::new(path));
        self.entry(Path::new(path), |target| RootEntry::File { target, mode, text });
    }

    /// A file without contents, to mount something on.
    pub(super) fn empty_file(&mut self, path: &Path, mode: u32) {
        self.parent(path);
        self.entry(path, |target| RootEntry::File { target, mode, text: String::new() });
    }

    /// An entry that makes `path`.
    pub(super) fn entry(&mut self, path: &Path, entry: impl FnOnce(PathBuf) -> RootEntry) {
        self.made.insert(path.into(), PathKind::File);
        self.entries.push(entry(Self::relative(path)));
    }

    pub(super) fn writable(&mut self, path: &Path) {
        self.entries.push(RootEntry::Writable { target: Self::relative(path) });
    }

    /// Puts the layers of an image below the directories, links and files: they hide what the image
    /// has at their paths, and are the places that the rest is mounted on.
    fn put_below(&mut self, image: &ImageFacts, writable: bool) {
        let is_file = |entry: &RootEntry| matches!(entry, RootEntry::Directory { .. } | RootEntry::Link { .. } | RootEntry::File { .. });
        let (files, mounts): (Vec<_>, Vec<_>) = std::mem::take(&mut self.entries).into_iter().partition(is_file);
        self.entries = files;
        self.entries.push(RootEntry::Image { layers: image.layers.clone(), writable });
        self.entries.extend(mounts);
    }

    /// Binds a host path at the same path, unless a bind above shows it already. The source is
    /// the path without symlinks, so that none is followed when it is mounted.
    fn bind(&mut self, path: &Path, facts: &HostFacts, kind: PathKind, executable: bool) {
        if self.bound.iter().any(|bound| path.starts_with(bound)) {
            return;
        }
        match kind {
            PathKind::Directory => self.directory(path, 0o755),
            PathKind::File => self.file(&path.to_string_lossy(), 0o644, String::new()),
        }
        let source = facts.led.get(path).cloned().unwrap_or_else(|| path.to_path_buf());
        self.entries.push(RootEntry::Bind { source, target: Self::relative(path), executable });
        self.bound.push(path.to_path_buf());
    }
}

/// The root and its writable directories.
pub(super) fn plan_root(
    policy: &Policy,
    facts: &HostFacts,
    run_request: &RunRequest,
    identity: &Identity,
    scratch: &ScratchPlan,
    commands: &Commands,
    limits: &Limits,
) -> Result<(Vec<RootEntry>, Vec<PathBuf>), PlanError> {
    let mut root = RootBuilder::default();
    root.directory(Path::new("/tmp"), 0o1777);
    root.directory(Path::new("/dev/shm"), 0o1777);
    root.directory(Path::new(HOME), 0o700);
    plan_dev(&mut root, policy);
    plan_proc(&mut root);
    plan_etc(&mut root, identity.inside.1, policy, &identity.hostname);
    if facts.image.is_some() && policy.egress.whitelist.is_empty() {
        // Not the image's, which may name a resolver.
        root.file("/etc/resolv.conf", 0o444, String::new());
    }
    let writable = WRITABLE.map(PathBuf::from).to_vec();
    for path in &writable {
        root.writable(path);
    }
    // An image has its own.
    for (name, to) in facts.links.iter().filter(|_| facts.image.is_none()) {
        root.made.insert(format!("/{name}").into(), PathKind::File);
        root.entries.push(RootEntry::Link { target: PathBuf::from(name), to: PathBuf::from(to) });
    }
    let is_shown = |path: &&PathBuf| facts.image.is_none() || !is_in_image(path);
    for path in policy.filesystem.read_only.iter().filter(is_shown) {
        let kind = facts.paths.get(path).copied().ok_or_else(|| PlanError::PathMissing(path.clone()))?;
        root.bind(path, facts, kind, is_program_directory(path));
    }
    for path in policy.filesystem.read_only_optional.iter().filter(is_shown) {
        if let Some(kind) = facts.paths.get(path) {
            root.bind(path, facts, *kind, false);
        }
    }
    for path in &commands.read_only {
        let kind = facts.paths.get(path).copied().ok_or_else(|| PlanError::PrefixMissing(path.clone()))?;
        root.bind(path, facts, kind, true);
    }
    let watch = plan_modules(policy, facts, run_request, scratch, |path| root.bound.iter().any(|bound| path.starts_with(bound)))?;
    for entry in watch {
        if let RootEntry::Pipe { target } = &entry {
            root.parent(&Path::new("/").join(target));
        }
        root.entries.push(entry);
    }
    for (name, interpreter) in &commands.links {
        let path = Path::new(COMMANDS).join(name);
        root.parent(&path);
        root.entries.push(RootEntry::Link { target: RootBuilder::relative(&path), to: interpreter.clone() });
    }
    plan_passwd(&mut root, identity, &home_of(scratch, policy.scratch.home));
    if run_request.terminal {
        plan_terminal(&mut root);
    }
    plan_cpus(&mut root, facts, limits);
    root.directory(&scratch.path, 0o755);
    if let Some(alias) = run_request.scratch_alias.as_ref().filter(|alias| is_free(alias, policy, scratch, &root)) {
        root.parent(alias);
        root.entries.push(RootEntry::Link { target: RootBuilder::relative(alias), to: scratch.path.clone() });
    }
    if let Some(image) = &facts.image {
        // One that the image has is covered below what code may write.
        let is_covered = |path: &Path| WRITABLE.iter().any(|writable| path.starts_with(writable));
        if let (Some(path), Some((_, there))) = (plan_working_directory(facts, run_request)?, &image.working_directory)
            && (there.is_none() || is_covered(&path))
        {
            root.directory(&path, 0o755);
        }
        root.put_below(image, policy.filesystem.writable_root);
    }
    Ok((root.entries, writable))
}

/// Directories of the operating system, which an image brings itself: a run from an image is shown
/// none of the host's.
const OF_SYSTEM: [&str; 8] = ["/usr", "/etc", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"];

/// Whether an image stands in for this path of the host.
pub fn is_in_image(path: &Path) -> bool {
    OF_SYSTEM.iter().any(|system| path.starts_with(system))
}

/// Whether a symlink to scratch can be made at this path. Where it cannot, the path does not
/// exist inside.
fn is_free(alias: &Path, policy: &Policy, scratch: &ScratchPlan, root: &RootBuilder) -> bool {
    let plain = alias.is_absolute() && alias.components().skip(1).all(|part| matches!(part, Component::Normal(_)));
    let apart = !alias.starts_with(&scratch.path) && !scratch.path.starts_with(alias);
    plain && apart && taken(policy, alias).is_none() && !root.made.keys().any(|made| Path::new(made).starts_with(alias))
}

/// Only programs of the operating system and of named interpreters may be run; binds
/// of configuration and data are noexec.
pub fn is_program_directory(path: &Path) -> bool {
    !path.starts_with("/etc")
}

/// A fresh proc, with what it masks.
pub(super) fn plan_proc(root: &mut RootBuilder) {
    root.directory(Path::new("/proc"), 0o555);
    root.entries.push(RootEntry::Proc { target: PathBuf::from("proc") });
    for mask in PROC_MASKS {
        root.entries.push(RootEntry::Mask { target: Path::new("proc").join(mask) });
    }
}

/// The number of CPUs, where glibc's sysconf reads it.
pub(super) fn plan_cpus(root: &mut RootBuilder, facts: &HostFacts, limits: &Limits) {
    let online = usable_cpus(facts, limits);
    let text = if online == 1 { String::from("0\n") } else { format!("0-{}\n", online - 1) };
    root.file("/sys/devices/system/cpu/online", 0o444, text);
}

pub(super) fn plan_passwd(root: &mut RootBuilder, identity: &Identity, home: &Path) {
    let (uid, gid) = identity.inside;
    let user = &identity.user;
    root.file("/etc/passwd", 0o444, format!("root:x:0:0::/nonexistent:/usr/sbin/nologin\n{user}:x:{uid}:{gid}::{}:/bin/sh\nnobody:x:65534:65534::/nonexistent:/usr/sbin/nologin\n", home.display()));
}

pub(super) fn plan_etc(root: &mut RootBuilder, gid: u32, policy: &Policy, hostname: &str) {
    let user = &policy.identity.user;
    root.file("/etc/group", 0o444, format!("root:x:0:\n{user}:x:{gid}:\nnogroup:x:65534:\n"));
    root.file("/etc/hosts", 0o444, format!("127.0.0.1 localhost {hostname}\n::1 localhost\n"));
    let hosts = if policy.egress.whitelist.is_empty() { "files" } else { "files dns" };
    root.file("/etc/nsswitch.conf", 0o444, format!("passwd: files\ngroup: files\nhosts: {hosts}\nservices: files\nprotocols: files\n"));
    if !policy.egress.whitelist.is_empty() {
        // The gate answers at once or has ended, so a longer timeout is of no use.
        root.file("/etc/resolv.conf", 0o444, format!("nameserver {RESOLVER}\noptions timeout:2 attempts:1\n"));
    }
    root.file("/etc/machine-id", 0o444, String::from("00000000000000000000000000000000\n"));
    root.file("/etc/hostname", 0o444, format!("{hostname}\n"));
}

pub(super) fn plan_dev(root: &mut RootBuilder, policy: &Policy) {
    for device in &policy.filesystem.devices {
        let path = format!("/dev/{device}");
        root.file(&path, 0o644, String::new());
        root.entries.push(RootEntry::Device { source: PathBuf::from(&path), target: RootBuilder::relative(Path::new(&path)) });
    }
    for (name, to) in [("fd", "/proc/self/fd"), ("stdin", "/proc/self/fd/0"), ("stdout", "/proc/self/fd/1"), ("stderr", "/proc/self/fd/2")]
    {
        root.entries.push(RootEntry::Link { target: Path::new("dev").join(name), to: PathBuf::from(to) });
    }
}

pub(super) fn plan_terminal(root: &mut RootBuilder) {
    root.directory(Path::new("/dev/pts"), 0o755);
    root.entries.push(RootEntry::Devpts { target: PathBuf::from("dev/pts") });
    root.entries.push(RootEntry::Link { target: PathBuf::from("dev/ptmx"), to: PathBuf::from("pts/ptmx") });
}
