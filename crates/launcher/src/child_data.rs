//! Everything that the child needs, ready-made before it goes on.
//!
//! Whatever allocates, opens or may be refused by a rule of ours happens here; the
//! child only makes system calls on these values, which it reads from the launcher's
//! memory. Descriptors are sent to it, because its table is older than they are; one
//! opened here is never looked up again by path.

use std::{
    ffi::CString,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use rustix::{
    fd::{AsRawFd, OwnedFd},
    fs::{MemfdFlags, OFlags, SealFlags, memfd_create},
    io::{Errno, fcntl_dupfd_cloexec},
    pipe::{PipeFlags, pipe_with},
    rand::{GetRandomFlags, getrandom},
};
use stockade_policy::filter::callers_programs;
use stockade_policy::plan::{LandlockPlan, MAX_OVERLAY_LAYERS, Mode, PathKindName, Plan, Protection, RootEntry, UserNamespaces};
use stockade_protocol::{
    LimitKey,
    frame::{ExecutorCommand, FileToWrite, Job, Prestart, ProcessStart},
};

use crate::{
    ErrorKind, Inputs, LaunchError, Memory, OpenedScratch, Stdin,
    error::InputsError,
    identity,
    messages::{ExecutorFiles, MAX_SENT_MOUNTS},
    scratch::{FileId, detached_copy, mount_points},
    tree,
};

/// The executor's program.
static EXECUTOR: &[u8] = include_bytes!(env!("STOCKADE_EXECUTOR"));
/// The program that becomes a copy of the process in a memory image.
static RESTORER: &[u8] = include_bytes!(env!("STOCKADE_RESTORER"));

/// A root entry with its paths in the kernel's form, relative to the new root.
pub(crate) enum Entry {
    Directory {
        target: CString,
        mode: u32,
    },
    Link {
        target: CString,
        to: CString,
    },
    File {
        target: CString,
        mode: u32,
        text: Vec<u8>,
    },
    /// An overlay of an image's layers below what was made before, with directories for what code
    /// changes where it is writable.
    Image {
        layers: Vec<ChildLayer>,
        writable: bool,
    },
    Bind {
        source: CString,
        /// Its place among the mounts that were sent.
        sent: Option<usize>,
        target: CString,
        executable: bool,
    },
    Device {
        source: CString,
        target: CString,
    },
    Writable {
        target: CString,
    },
    /// A writable place that outlives the run, at its place among the mounts that were sent.
    Kept {
        sent: usize,
        target: CString,
    },
    Proc {
        target: CString,
    },
    Devpts {
        target: CString,
    },
    Mask {
        target: CString,
    },
    Cover {
        target: CString,
        text: Vec<u8>,
    },
    Pipe {
        target: CString,
    },
    /// The empty file that masked ones are covered with.
    StandIn,
    /// A host path that is laid where no link leads.
    Placed {
        source: CString,
        target: CString,
        executable: bool,
    },
    /// A host directory that code may write.
    Tree {
        from: ChildTree,
        target: CString,
        rules: Vec<ScratchRule>,
    },
    /// A Unix socket of the host.
    Socket {
        from: ChildTree,
        target: CString,
    },
    /// A directory of the root, laid elsewhere.
    Tmpfs {
        from: CString,
        target: CString,
        writable: bool,
    },
    /// An overlay of host directories.
    Overlay {
        layers: Vec<ChildLayer>,
        /// Directories of the root, for what code changes of it and for overlay itself.
        changes: Option<[CString; 2]>,
        target: CString,
        executable: bool,
    },
    /// A file that is laid over another.
    Laid {
        target: CString,
        mode: u32,
        bytes: Vec<u8>,
        writable: bool,
    },
}

/// Where a host directory or socket comes from.
pub(crate) enum ChildTree {
    /// Its place among the mounts that were sent.
    Sent(usize),
    /// Opened here, and then this file.
    Path { path: CString, device: u64, inode: u64 },
}

/// A directory of an overlay: a layer of an image, or one of a view.
pub(crate) enum ChildLayer {
    /// Its place among the mounts that were sent, idmapped.
    Sent(usize),
    /// Opened here, and then this directory.
    Path { path: CString, file_id: FileId },
}

/// Where scratch comes from.
pub(crate) enum ChildScratch {
    Private {
        size: Option<CString>,
        inodes: Option<CString>,
    },
    /// It comes with `LauncherMessage::Scratch`.
    Tree,
    Path {
        path: CString,
        device: u64,
        inode: u64,
    },
}

/// A protected path below scratch.
pub(crate) struct ScratchRule {
    pub(crate) path: CString,
    pub(crate) how: Laid,
    /// What must lie there, where that is known.
    pub(crate) file_id: Option<FileId>,
}

/// What is laid over a protected path.
#[derive(Clone, Copy)]
pub(crate) enum Laid {
    /// An empty directory.
    HiddenDirectory,
    /// An empty file.
    HiddenFile,
    /// Itself, read-only.
    ReadOnly,
    /// Itself, so that it cannot be renamed.
    Pinned,
}

/// The launcher's ends.
pub(crate) struct LauncherPipes {
    /// Where the payload's stdin is written; none for /dev/null.
    pub(crate) stdin: Option<OwnedFd>,
    pub(crate) stdout: OwnedFd,
    pub(crate) stderr: OwnedFd,
    /// The file of the memory image, opened for this run alone: its position says whether the restorer
    /// failed.
    pub(crate) memory_file: Option<OwnedFd>,
}

/// The plan as the child reads it.
pub(crate) struct ChildData {
    pub(crate) user_namespaces: UserNamespaces,
    pub(crate) ids: (u32, u32),
    pub(crate) clear_groups: bool,
    pub(crate) hostname: String,
    pub(crate) root_size: Option<CString>,
    /// What code may write to the root's file system beside what the set-up has put there.
    pub(crate) root_room: Option<u64>,
    pub(crate) root_inodes: CString,
    pub(crate) inner_uid_map: String,
    pub(crate) inner_gid_map: String,
    pub(crate) terminal: bool,
    /// The gate wants its sockets.
    pub(crate) egress: bool,
    /// The launcher counts what the sockets hold.
    pub(crate) sock_diag: bool,
    pub(crate) executor: &'static [u8],
    /// The payload's program, where it is executed by descriptor: a carried one, or the restorer.
    pub(crate) program_bytes: Option<&'static [u8]>,
    pub(crate) entries: Vec<Entry>,
    /// One of the entries is an image.
    pub(crate) has_image_root: bool,
    /// Code may change the root.
    pub(crate) writable_root: bool,
    pub(crate) scratch: ChildScratch,
    pub(crate) scratch_read_only: bool,
    pub(crate) scratch_target: CString,
    /// The payload starts in the first of these that is there.
    pub(crate) working_directories: Vec<CString>,
    pub(crate) scratch_rules: Vec<ScratchRule>,
    /// The fifo at which an interpreter waits for its program, by its name in scratch.
    pub(crate) program_fifo: Option<CString>,
    pub(crate) unshare_cgroup_namespace: bool,
    /// How many CPUs the code sees.
    pub(crate) cpus: usize,
    pub(crate) landlock: Option<ChildRuleset>,
    pub(crate) payload_landlock: Option<ChildRuleset>,
    pub(crate) filter: Arc<[u64]>,
}

/// A ruleset of Landlock.
pub(crate) struct ChildRuleset {
    pub(crate) handled: u64,
    pub(crate) scoped: u64,
    /// Paths inside, and the rights below them.
    pub(crate) rules: Vec<(CString, u64)>,
}

impl ChildRuleset {
    /// None where the plan has no such layer.
    fn new(plan: &LandlockPlan) -> Result<Option<Self>, LaunchError> {
        if plan.handled == 0 {
            return Ok(None);
        }
        let rules = plan.rules.iter().map(|rule| Ok((c_path(&rule.path)?, rule.rights))).collect::<Result<_, LaunchError>>()?;
        Ok(Some(ChildRuleset { handled: plan.handled, scoped: plan.scoped, rules }))
    }
}

/// A path or text with the NUL that the kernel wants.
///
/// # Errors
/// It holds a NUL itself.
pub(crate) fn c_string(bytes: &[u8]) -> Result<CString, LaunchError> {
    CString::new(bytes).map_err(|_| LaunchError::system(ErrorKind::Prepare, "a path holds a NUL byte")(Errno::INVAL))
}

fn c_path(path: &Path) -> Result<CString, LaunchError> {
    c_string(path.as_os_str().as_bytes())
}

fn relative(path: &Path) -> Result<CString, LaunchError> {
    c_path(path.strip_prefix("/").unwrap_or(path))
}

/// Files that the root tmpfs may hold: the limit of `/tmp`, `/dev/shm` and home.
const ROOT_INODES: u64 = 32 << 10;

impl ChildData {
    /// With the mounts that go to the child: those that the launcher has opened, copied or idmapped.
    pub(crate) fn new(plan: &Plan, inputs: &mut Inputs<'_>) -> Result<(Self, Vec<OwnedFd>), LaunchError> {
        if plan.session != inputs.kept.is_some() {
            return Err(InputsError::Session.into());
        }
        if plan.carried_program != inputs.carried_program.is_some() {
            return Err(InputsError::CarriedProgram.into());
        }
        let mut sent_mounts = Vec::new();
        let mut entries = vec![Entry::StandIn];
        for entry in &plan.root {
            entries.push(match entry {
                RootEntry::Tree { index, target } => prepare_tree(plan, inputs, *index, target, &mut sent_mounts)?,
                RootEntry::Socket { index, source, target } => prepare_socket(inputs, *index, source, target, &mut sent_mounts)?,
                entry => prepare_entry(entry, plan, inputs, &mut sent_mounts)?,
            });
        }
        let scratch = prepare_scratch(plan, inputs)?;
        if sent_mounts.len() > MAX_SENT_MOUNTS {
            return Err(InputsError::TooManyMounts(sent_mounts.len()).into());
        }
        let file_ids = inputs.scratch.as_ref().map_or(&[][..], OpenedScratch::file_ids);
        if plan.scratch.protected.len() > file_ids.len() {
            return Err(InputsError::Scratch.into());
        }
        let scratch_rules = prepare_rules(&plan.scratch.protected, file_ids)?;
        let (uid, gid) = plan.identity.inside;
        let data = ChildData {
            user_namespaces: plan.identity.user_namespaces,
            ids: plan.identity.inside,
            clear_groups: plan.mode == Mode::Root,
            hostname: plan.identity.hostname.clone(),
            root_size: plan.root_size.map(|size| c_string(size.to_string().as_bytes())).transpose()?,
            // A session's has no place to write, unless code may change the root.
            root_room: plan.root_size.filter(|_| !plan.session || plan.has_writable_root()).and(plan.limits.get(LimitKey::TmpSize)),
            root_inodes: c_string(ROOT_INODES.to_string().as_bytes())?,
            inner_uid_map: format!("{uid} {uid} 1"),
            inner_gid_map: format!("{gid} {gid} 1"),
            terminal: plan.terminal,
            egress: plan.egress.is_some(),
            sock_diag: plan.limits.get(LimitKey::Memory).is_some(),
            executor: EXECUTOR,
            program_bytes: inputs.carried_program.or_else(|| inputs.memory.as_ref().is_some_and(Memory::is_restored).then_some(RESTORER)),
            entries,
            has_image_root: plan.image_root.is_some(),
            writable_root: plan.has_writable_root(),
            scratch,
            scratch_read_only: plan.scratch.read_only,
            scratch_target: relative(&plan.scratch.path)?,
            working_directories: plan.start_directories().map(c_path).collect::<Result<_, _>>()?,
            scratch_rules,
            program_fifo: prestarted_program(plan, inputs).map(|(_, name)| c_string(name.as_bytes())).transpose()?,
            unshare_cgroup_namespace: !matches!(plan.cgroup, stockade_policy::plan::CgroupPlan::V2 { .. }),
            cpus: plan.cpus,
            landlock: ChildRuleset::new(&plan.landlock)?,
            payload_landlock: ChildRuleset::new(&plan.payload_landlock)?,
            filter: Arc::clone(&plan.filter.program),
        };
        Ok((data, sent_mounts))
    }
}

/// The rules of a host directory. What the plan has beyond the ids may be any file.
fn prepare_rules(protected: &[(PathBuf, PathKindName, Protection)], file_ids: &[Option<FileId>]) -> Result<Vec<ScratchRule>, LaunchError> {
    let file_ids = file_ids.iter().copied().chain(std::iter::repeat(None));
    let rules = protected.iter().zip(file_ids).map(|((path, kind, protection), file_id)| {
        let how = match (protection, kind) {
            (Protection::Hidden, PathKindName::Directory) => Laid::HiddenDirectory,
            (Protection::Hidden, PathKindName::File) => Laid::HiddenFile,
            (Protection::ReadOnly, _) => Laid::ReadOnly,
            (Protection::Pinned, _) => Laid::Pinned,
        };
        Ok(ScratchRule { path: c_path(path)?, how, file_id })
    });
    rules.collect()
}

/// A host directory of a view, as its scratch is prepared.
fn prepare_tree(
    plan: &Plan,
    inputs: &mut Inputs<'_>,
    index: usize,
    target: &Path,
    sent_mounts: &mut Vec<OwnedFd>,
) -> Result<Entry, LaunchError> {
    let (Some(opened), Some(planned)) = (inputs.writable_trees.get_mut(index), plan.writable_trees.get(index)) else {
        return Err(InputsError::Scratch.into());
    };
    if opened.idmapped_for != plan.identity.idmapped_to.map(|_| plan.identity.outside.0) {
        return Err(InputsError::Idmap.into());
    }
    if opened.facts.path != planned.source || planned.protected.len() < opened.file_ids.len() {
        return Err(InputsError::Scratch.into());
    }
    inputs.mount_points.extend(mount_points::make(opened, planned, plan.mode == Mode::Root)?);
    let from = match opened.tree.take() {
        Some(tree) => {
            sent_mounts.push(tree);
            ChildTree::Sent(sent_mounts.len() - 1)
        }
        None => {
            let stat =
                rustix::fs::fstat(&opened.directory).map_err(LaunchError::system(ErrorKind::Prepare, "look at a writable directory"))?;
            ChildTree::Path { path: c_path(&planned.source)?, device: stat.st_dev, inode: stat.st_ino }
        }
    };
    Ok(Entry::Tree { from, target: relative(target)?, rules: prepare_rules(&planned.protected, &opened.file_ids)? })
}

/// A socket of a view: root's copy of it, or where the child opens it again.
fn prepare_socket(
    inputs: &mut Inputs<'_>,
    index: usize,
    source: &Path,
    target: &Path,
    sent_mounts: &mut Vec<OwnedFd>,
) -> Result<Entry, LaunchError> {
    let Some(opened) = inputs.sockets.get_mut(index).filter(|opened| opened.facts.path == source) else {
        return Err(InputsError::Scratch.into());
    };
    let (device, inode) = opened.file_id;
    let from = match opened.tree.take() {
        Some(tree) => {
            sent_mounts.push(tree);
            ChildTree::Sent(sent_mounts.len() - 1)
        }
        None => ChildTree::Path { path: c_path(source)?, device, inode },
    };
    Ok(Entry::Socket { from, target: relative(target)? })
}

fn prepare_entry(entry: &RootEntry, plan: &Plan, inputs: &mut Inputs<'_>, sent_mounts: &mut Vec<OwnedFd>) -> Result<Entry, LaunchError> {
    Ok(match entry {
        RootEntry::Directory { target, mode } => Entry::Directory { target: relative(target)?, mode: *mode },
        RootEntry::Link { target, to } => Entry::Link { target: relative(target)?, to: c_path(to)? },
        RootEntry::File { target, mode, text } => Entry::File { target: relative(target)?, mode: *mode, text: text.clone().into_bytes() },
        RootEntry::Image { layers, writable } => {
            let is_idmapped = *writable && plan.mode == Mode::Root;
            let layers = open_layers(layers)?;
            let layers = if is_idmapped { idmap_layers(layers, plan, sent_mounts)? } else { by_path(layers)? };
            Entry::Image { layers, writable: *writable }
        }
        RootEntry::Bind { source, target, executable } => {
            let sent = inputs.opened_binds.remove(source).map(|mount| {
                sent_mounts.push(mount);
                sent_mounts.len() - 1
            });
            Entry::Bind { source: c_path(source)?, sent, target: relative(target)?, executable: *executable }
        }
        RootEntry::Device { source, target } => Entry::Device { source: c_path(source)?, target: relative(target)? },
        RootEntry::Writable { target } => match inputs.kept.as_mut().and_then(|kept| kept.writable.remove(target)) {
            Some(mount) => {
                sent_mounts.push(mount);
                Entry::Kept { sent: sent_mounts.len() - 1, target: relative(target)? }
            }
            None => Entry::Writable { target: relative(target)? },
        },
        RootEntry::Proc { target } => Entry::Proc { target: relative(target)? },
        RootEntry::Devpts { target } => Entry::Devpts { target: relative(target)? },
        RootEntry::Mask { target } => Entry::Mask { target: relative(target)? },
        RootEntry::Cover { target, text } => Entry::Cover { target: relative(target)?, text: text.clone().into_bytes() },
        RootEntry::Pipe { target } => Entry::Pipe { target: relative(target)? },
        RootEntry::Placed { source, target, executable } => {
            Entry::Placed { source: c_path(source)?, target: relative(target)?, executable: *executable }
        }
        RootEntry::Tree { .. } | RootEntry::Socket { .. } => return Err(InputsError::Scratch.into()),
        RootEntry::Tmpfs { from, target, writable } => {
            Entry::Tmpfs { from: relative(from)?, target: relative(target)?, writable: *writable }
        }
        RootEntry::Overlay { layers, changes, target, executable } => Entry::Overlay {
            layers: by_path(open_layers(layers)?)?,
            changes: changes.as_ref().map(|[upper, work]| Ok::<_, LaunchError>([relative(upper)?, relative(work)?])).transpose()?,
            target: relative(target)?,
            executable: *executable,
        },
        RootEntry::Contents { target, mode, bytes } => Entry::File { target: relative(target)?, mode: *mode, text: bytes.clone() },
        RootEntry::Laid { target, mode, bytes, writable } => {
            Entry::Laid { target: relative(target)?, mode: *mode, bytes: bytes.clone(), writable: *writable }
        }
    })
}

fn layers_failed(errno: Errno) -> LaunchError {
    LaunchError::system(ErrorKind::Prepare, "open the layers of an overlay")(errno)
}

/// With their paths.
fn open_layers(layers: &[PathBuf]) -> Result<Vec<(&Path, OwnedFd)>, LaunchError> {
    if layers.len() > MAX_OVERLAY_LAYERS {
        return Err(InputsError::TooManyLayers(layers.len()).into());
    }
    layers.iter().map(|path| Ok((path.as_path(), tree::open_unlinked(path.as_path()).map_err(layers_failed)?))).collect()
}

/// The child opens them again, because a descriptor of the host's mount namespace can be no layer (EINVAL).
fn by_path(layers: Vec<(&Path, OwnedFd)>) -> Result<Vec<ChildLayer>, LaunchError> {
    let layer = |(path, directory)| {
        let stat = rustix::fs::fstat(directory).map_err(layers_failed)?;
        Ok(ChildLayer::Path { path: c_path(path)?, file_id: (stat.st_dev, stat.st_ino) })
    };
    layers.into_iter().map(layer).collect()
}

/// Copies of the mounts are sent, in which files of root belong to the code: root is no id of the run's
/// user namespace, and the kernel copies no file up whose owner has no mapping (EOVERFLOW).
fn idmap_layers(layers: Vec<(&Path, OwnedFd)>, plan: &Plan, sent_mounts: &mut Vec<OwnedFd>) -> Result<Vec<ChildLayer>, LaunchError> {
    const ROOT: (u32, u32) = (0, 0);
    let copies: Vec<OwnedFd> =
        layers.iter().map(|(_, layer)| detached_copy(layer, false)).collect::<Result<_, _>>().map_err(layers_failed)?;
    identity::idmap(&copies, ROOT, plan.identity.outside).map_err(LaunchError::LayerIdmap)?;
    let first = sent_mounts.len();
    sent_mounts.extend(copies);
    Ok((first..sent_mounts.len()).map(ChildLayer::Sent).collect())
}

fn prepare_scratch(plan: &Plan, inputs: &Inputs<'_>) -> Result<ChildScratch, LaunchError> {
    let Some(opened) = &inputs.scratch else {
        if inputs.kept.as_ref().is_some_and(|kept| kept.scratch.is_some()) {
            return Ok(ChildScratch::Tree);
        }
        let number = |value: Option<u64>| value.map(|n| c_string(n.to_string().as_bytes())).transpose();
        // One more for the root directory itself.
        return Ok(ChildScratch::Private { size: number(plan.scratch.size)?, inodes: number(plan.scratch.files.map(|n| n + 1))? });
    };
    // An idmap for another id would give the run's files an owner that the plan does not name.
    if opened.idmapped_for != plan.identity.idmapped_to.map(|_| plan.identity.outside.0) {
        return Err(InputsError::Idmap.into());
    }
    if opened.tree.is_some() {
        return Ok(ChildScratch::Tree);
    }
    let stat = rustix::fs::fstat(&opened.directory).map_err(LaunchError::system(ErrorKind::Prepare, "look at scratch"))?;
    Ok(ChildScratch::Path { path: c_path(&plan.scratch.path)?, device: stat.st_dev, inode: stat.st_ino })
}

fn pipe_failed(errno: Errno) -> LaunchError {
    LaunchError::system(ErrorKind::Prepare, "make the pipes")(errno)
}

pub(crate) fn pipe() -> Result<(OwnedFd, OwnedFd), LaunchError> {
    pipe_with(PipeFlags::CLOEXEC).map_err(pipe_failed)
}

/// A file for the job, still empty, and the payload's streams.
pub(crate) fn for_executor(plan: &Plan, inputs: &Inputs<'_>) -> Result<(ExecutorFiles<OwnedFd>, LauncherPipes), LaunchError> {
    let (stdout_read, stdout_write) = pipe()?;
    let (stderr_read, stderr_write) = pipe()?;
    let (stdin_read, stdin_write) = match inputs.stdin {
        Stdin::Null => {
            let flags = OFlags::RDONLY | OFlags::CLOEXEC;
            (rustix::fs::open(c"/dev/null", flags, rustix::fs::Mode::empty()).map_err(pipe_failed)?, None)
        }
        Stdin::Bytes(_) | Stdin::Relay => {
            let (read, write) = pipe()?;
            (read, Some(write))
        }
    };
    if plan.mode == Mode::Root {
        // So that the code may open /dev/stdout, which is this pipe, as it may anywhere.
        let (uid, gid) = plan.identity.outside;
        for fd in [&stdout_write, &stderr_write] {
            rustix::fs::fchown(fd, Some(rustix::fs::Uid::from_raw(uid)), Some(rustix::fs::Gid::from_raw(gid))).map_err(pipe_failed)?;
        }
        if stdin_write.is_some() {
            rustix::fs::fchown(&stdin_read, Some(rustix::fs::Uid::from_raw(uid)), Some(rustix::fs::Gid::from_raw(gid)))
                .map_err(pipe_failed)?;
        }
    }
    let job = memfd_create(c"stockade-job", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).map_err(job_failed)?;
    let (memory, memory_file) = match &inputs.memory {
        None => (None, None),
        Some(Memory::ToWrite(file)) => (Some(duplicate(file)?), None),
        Some(Memory::ToRestore(file)) => {
            let opened = open_anew(file)?;
            (Some(duplicate(&opened)?), Some(opened))
        }
    };
    let sent = ExecutorFiles { job, stdin: stdin_read, stdout: stdout_write, stderr: stderr_write, memory };
    Ok((sent, LauncherPipes { stdin: stdin_write, stdout: stdout_read, stderr: stderr_read, memory_file }))
}

fn memory_failed(errno: Errno) -> LaunchError {
    LaunchError::system(ErrorKind::Prepare, "hand on the memory image")(errno)
}

fn duplicate(file: &OwnedFd) -> Result<OwnedFd, LaunchError> {
    fcntl_dupfd_cloexec(file, 0).map_err(memory_failed)
}

/// The same file with a position of its own.
fn open_anew(file: &OwnedFd) -> Result<OwnedFd, LaunchError> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, rustix::fs::Mode::empty()).map_err(memory_failed)
}

fn job_failed(errno: Errno) -> LaunchError {
    LaunchError::system(ErrorKind::Prepare, "write the job")(errno)
}

/// Directory and name of the program, where its interpreter is started before it is known.
pub(crate) fn prestarted_program<'p>(plan: &'p Plan, inputs: &Inputs<'_>) -> Option<(&'p Path, &'p str)> {
    plan.program_file.as_ref().filter(|_| inputs.prestart).map(|(directory, name)| (directory.as_path(), name.as_str()))
}

/// How the program's process is started, which does or does not use a memory image.
fn process_start<'p>(plan: &'p Plan, memory: Option<&Memory>, filters: &'p CallersFilters) -> ProcessStart<'p> {
    ProcessStart {
        argv: plan.argv.iter().map(String::as_bytes).collect(),
        envp: plan.environment_values.iter().map(String::as_bytes).collect(),
        rlimits: plan.rlimits.iter().map(|limit| (limit.resource, limit.value)).collect(),
        payload_landlock: plan.payload_landlock.handled != 0,
        terminal: plan.terminal,
        by_descriptor: plan.carried_program || memory.is_some_and(Memory::is_restored),
        memory: memory.is_some(),
        filters: filters.programs.iter().map(Vec::as_slice).collect(),
        filters_key: filters.key,
    }
}

/// The caller's filters as the payload's process loads them. The key is this run's alone: code that
/// had it could load filters, whose memory no limit counts.
#[derive(Default)]
struct CallersFilters {
    programs: Vec<Vec<u8>>,
    key: u64,
}

impl CallersFilters {
    fn new(plan: &Plan) -> Result<Self, LaunchError> {
        if plan.callers_filters.is_empty() {
            return Ok(CallersFilters::default());
        }
        let mut key = [0; 8];
        let failed = LaunchError::system(ErrorKind::Prepare, "make a random number");
        match getrandom(&mut key[..], GetRandomFlags::empty()) {
            Ok(8) => {}
            other => return Err(failed(other.err().unwrap_or(Errno::IO))),
        }
        let key = u64::from_ne_bytes(key);
        Ok(CallersFilters { programs: callers_programs(&plan.callers_filters, key), key })
    }
}

/// Writes `bytes` at a place of the job's file.
fn write_at(file: &OwnedFd, mut bytes: &[u8], mut at: u64) -> Result<u64, LaunchError> {
    while !bytes.is_empty() {
        let written = rustix::io::pwrite(file, bytes, at).map_err(job_failed)?;
        bytes = bytes.get(written..).unwrap_or_default();
        at += written as u64;
    }
    Ok(at)
}

/// Lets the executor start the interpreter of this program. Returns where the job's file goes on.
pub(crate) fn hand_in_prestart(
    job: &OwnedFd,
    lifeline: &OwnedFd,
    plan: &Plan,
    memory: Option<&Memory>,
    (directory, name): (&Path, &str),
) -> Result<u64, LaunchError> {
    let filters = CallersFilters::default();
    let prestart =
        Prestart { start: process_start(plan, memory, &filters), directory: directory.as_os_str().as_bytes(), name: name.as_bytes() };
    let length = write_at(job, &prestart.encode(), 0)?;
    tell(lifeline, ExecutorCommand::Prestart { length }).map_err(job_failed)?;
    Ok(length)
}

/// Writes the job from `offset` on, contents behind the frame, seals it, and says so: the executor
/// has the file already, or will have.
pub(crate) fn hand_in_job(
    file: &OwnedFd,
    offset: u64,
    lifeline: &OwnedFd,
    plan: &Plan,
    memory: Option<&Memory>,
    inputs: &Inputs<'_>,
) -> Result<(), LaunchError> {
    let (directory, name) =
        plan.program_file.as_ref().map_or((&[][..], &[][..]), |(directory, name)| (directory.as_os_str().as_bytes(), name.as_bytes()));
    let files = inputs
        .files
        .iter()
        .map(|(path, contents)| FileToWrite { path: path.as_bytes(), offset: 0, length: contents.len() as u64 })
        .collect();
    let filters = CallersFilters::new(plan)?;
    let mut job = Job {
        start: process_start(plan, memory, &filters),
        program_directory: directory,
        program: FileToWrite { path: name, offset: 0, length: inputs.program.len() as u64 },
        files,
        expect_landlock: plan.landlock.handled != 0,
        #[cfg(feature = "ablation")]
        without: crate::layers::Layers::in_this_build().number(),
    };
    job.place_contents();
    let frame = job.encode();
    let parts = std::iter::once(frame.as_slice())
        .chain(std::iter::once(inputs.program.as_ref()))
        .chain(inputs.files.iter().map(|(_, contents)| contents.as_ref()));
    let mut at = offset;
    for part in parts {
        at = write_at(file, part, at)?;
    }
    rustix::fs::fcntl_add_seals(file, SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL).map_err(job_failed)?;
    tell(lifeline, ExecutorCommand::Job { offset }).map(drop).map_err(job_failed)
}

/// Says a command to the executor; false if it is gone, and will have said why.
pub(crate) fn tell(lifeline: &OwnedFd, command: ExecutorCommand) -> Result<bool, Errno> {
    match rustix::io::write(lifeline, &command.encode()) {
        Ok(_) => Ok(true),
        Err(Errno::PIPE) => Ok(false),
        Err(errno) => Err(errno),
    }
}
