//! Everything that the child needs, ready-made before the clone.
//!
//! Whatever allocates, opens or may be refused by a rule of ours happens here; the
//! child only makes system calls on these values. A descriptor opened here is never
//! looked up again by path.

use std::{
    ffi::CString,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

use rustix::{
    fd::OwnedFd,
    fs::{MemfdFlags, SealFlags, memfd_create},
    io::Errno,
    net::{AddressFamily, SocketFlags, SocketType, socketpair},
    pipe::{PipeFlags, pipe_with},
    thread::CpuSet,
};
use stockade_policy::{
    filter::{RET_WITH_LISTENER, RET_WITHOUT_LISTENER},
    plan::{PathKindName, Plan, Protection, RootEntry},
};
use stockade_protocol::frame::{FileToWrite, Job};
use stockade_sys::seccomp::Instruction;

use crate::{Inputs, LaunchError, Stdin, What};

/// The executor's program.
static EXECUTOR: &[u8] = include_bytes!(env!("STOCKADE_EXECUTOR"));

/// A root entry with its paths in the kernel's form, relative to the new root.
pub(crate) enum Entry<'a> {
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
        text: &'a [u8],
    },
    Bind {
        source: CString,
        tree: Option<OwnedFd>,
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
    Proc {
        target: CString,
    },
    Devpts {
        target: CString,
    },
    Mask {
        target: CString,
    },
    /// The empty things that masks and hidden paths are covered with.
    StandIns,
}

/// Where scratch comes from.
pub(crate) enum PreparedScratch {
    Private { size: Option<CString>, inodes: Option<CString> },
    Tree(OwnedFd),
    Path { path: CString, device: u64, inode: u64 },
}

/// A protected path below scratch.
pub(crate) struct ScratchRule {
    path: CString,
    /// The stand-in's being a directory; none: read-only, no stand-in.
    stand_in: Option<bool>,
}

impl ScratchRule {
    pub(crate) fn path(&self) -> &std::ffi::CStr {
        &self.path
    }
    pub(crate) fn stand_in(&self) -> Option<bool> {
        self.stand_in
    }
}

/// The payload's ends of its streams.
pub(crate) struct Streams {
    pub(crate) stdin: OwnedFd,
    pub(crate) stdout: OwnedFd,
    pub(crate) stderr: OwnedFd,
}

/// The child's ends of everything, and the one end that it must close.
pub(crate) struct ChildPipes {
    pub(crate) status_write: OwnedFd,
    pub(crate) lifeline_read: OwnedFd,
    pub(crate) lifeline_write: OwnedFd,
    pub(crate) handover_child: OwnedFd,
    pub(crate) streams: Streams,
}

/// The launcher's ends.
pub(crate) struct LauncherPipes {
    pub(crate) status_read: OwnedFd,
    pub(crate) handover: OwnedFd,
    /// Where the payload's stdin is written; none for /dev/null.
    pub(crate) stdin: Option<OwnedFd>,
    pub(crate) stdout: OwnedFd,
    pub(crate) stderr: OwnedFd,
}

/// See the module.
pub(crate) struct Prepared<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) executor: &'static [u8],
    pub(crate) entries: Vec<Entry<'a>>,
    pub(crate) root_size: Option<CString>,
    pub(crate) root_inodes: CString,
    pub(crate) scratch: PreparedScratch,
    pub(crate) scratch_target: CString,
    pub(crate) scratch_path: CString,
    pub(crate) scratch_rules: Vec<ScratchRule>,
    pub(crate) cgroup_tasks: Vec<CString>,
    pub(crate) unshare_cgroup_namespace: bool,
    pub(crate) clear_groups: bool,
    pub(crate) cpus: Option<CpuSet>,
    pub(crate) inner_uid_map: String,
    pub(crate) inner_gid_map: String,
    pub(crate) landlock_rules: Vec<(CString, u64)>,
    pub(crate) filter: Vec<Instruction>,
    pub(crate) filter_without_listener: Vec<Instruction>,
    pub(crate) job: OwnedFd,
    pub(crate) pipes: ChildPipes,
}

/// A path or text with the NUL that the kernel wants.
///
/// # Errors
/// It holds a NUL itself.
pub(crate) fn c_string(bytes: &[u8]) -> Result<CString, LaunchError> {
    CString::new(bytes).map_err(|_| LaunchError::system(What::Prepare, "a path holds a NUL byte", Errno::INVAL))
}

fn c_path(path: &Path) -> Result<CString, LaunchError> {
    c_string(path.as_os_str().as_bytes())
}

fn relative(path: &Path) -> Result<CString, LaunchError> {
    c_path(path.strip_prefix("/").unwrap_or(path))
}

/// Files that the root tmpfs may hold: the limit of `/tmp`, `/dev/shm` and home.
const ROOT_INODES: u64 = 32 << 10;

impl<'a> Prepared<'a> {
    pub(crate) fn new(plan: &'a Plan, inputs: &mut Inputs<'_>, cgroup_tasks: &[PathBuf]) -> Result<(Self, LauncherPipes), LaunchError> {
        let mut entries = vec![Entry::StandIns];
        for entry in &plan.root {
            entries.push(prepare_entry(entry, inputs)?);
        }
        let (pipes, launcher_pipes) = make_pipes(plan, &inputs.stdin)?;
        let filter: Vec<Instruction> = plan.filter.program.iter().map(|&i| Instruction(i)).collect();
        let filter_without_listener = filter.iter().map(|&i| without_listener(i)).collect();
        let (uid, gid) = plan.identity.inside;
        let rules = plan.landlock.rules.iter().map(|rule| Ok((c_path(&rule.path)?, rule.rights))).collect::<Result<_, LaunchError>>()?;
        let scratch_rules = plan
            .scratch
            .protected
            .iter()
            .map(|(path, kind, protection)| {
                let stand_in = (*protection == Protection::Hidden).then_some(*kind == PathKindName::Directory);
                Ok(ScratchRule { path: c_path(path)?, stand_in })
            })
            .collect::<Result<_, LaunchError>>()?;
        let prepared = Prepared {
            plan,
            executor: EXECUTOR,
            entries,
            root_size: plan.root_size.map(|size| c_string(size.to_string().as_bytes())).transpose()?,
            root_inodes: c_string(ROOT_INODES.to_string().as_bytes())?,
            scratch: prepare_scratch(plan, inputs)?,
            scratch_target: relative(&plan.scratch.path)?,
            scratch_path: c_path(&plan.scratch.path)?,
            scratch_rules,
            unshare_cgroup_namespace: !matches!(plan.cgroup, stockade_policy::plan::CgroupPlan::V2 { .. }),
            cgroup_tasks: cgroup_tasks.iter().map(|path| c_path(path)).collect::<Result<_, LaunchError>>()?,
            clear_groups: plan.mode == stockade_policy::plan::Mode::Root,
            cpus: cpu_set(&plan.cpus),
            inner_uid_map: format!("{uid} {uid} 1"),
            inner_gid_map: format!("{gid} {gid} 1"),
            landlock_rules: rules,
            filter,
            filter_without_listener,
            job: write_job(plan, inputs)?,
            pipes,
        };
        Ok((prepared, launcher_pipes))
    }
}

impl Prepared<'_> {
    /// What the launcher keeps of it once the child has its copy: the write end whose
    /// closing ends the sandbox.
    pub(crate) fn into_lifeline(self) -> OwnedFd {
        self.pipes.lifeline_write
    }
}

fn without_listener(instruction: Instruction) -> Instruction {
    const RETURN: u64 = 0x06;
    let return_notify = RETURN | u64::from(RET_WITH_LISTENER) << 32;
    if instruction.0 == return_notify { Instruction(RETURN | u64::from(RET_WITHOUT_LISTENER) << 32) } else { instruction }
}

fn cpu_set(cpus: &[u32]) -> Option<CpuSet> {
    let mut set = CpuSet::new();
    for &cpu in cpus {
        if (cpu as usize) < CpuSet::MAX_CPU {
            set.set(cpu as usize);
        }
    }
    (set.count() > 0).then_some(set)
}

fn prepare_entry<'a>(entry: &'a RootEntry, inputs: &mut Inputs<'_>) -> Result<Entry<'a>, LaunchError> {
    Ok(match entry {
        RootEntry::Directory { target, mode } => Entry::Directory { target: relative(target)?, mode: *mode },
        RootEntry::Link { target, to } => Entry::Link { target: relative(target)?, to: c_path(to)? },
        RootEntry::File { target, mode, text } => Entry::File { target: relative(target)?, mode: *mode, text: text.as_bytes() },
        RootEntry::Bind { source, target, executable } => {
            Entry::Bind { source: c_path(source)?, tree: inputs.trees.remove(source), target: relative(target)?, executable: *executable }
        }
        RootEntry::Device { source, target } => Entry::Device { source: c_path(source)?, target: relative(target)? },
        RootEntry::Writable { target } => Entry::Writable { target: relative(target)? },
        RootEntry::Proc { target } => Entry::Proc { target: relative(target)? },
        RootEntry::Devpts { target } => Entry::Devpts { target: relative(target)? },
        RootEntry::Mask { target } => Entry::Mask { target: relative(target)? },
    })
}

fn prepare_scratch(plan: &Plan, inputs: &mut Inputs<'_>) -> Result<PreparedScratch, LaunchError> {
    let Some(opened) = &mut inputs.scratch else {
        let number = |value: Option<u64>| value.map(|n| c_string(n.to_string().as_bytes())).transpose();
        // One more for the root directory itself.
        return Ok(PreparedScratch::Private { size: number(plan.scratch.size)?, inodes: number(plan.scratch.files.map(|n| n + 1))? });
    };
    if let Some(tree) = opened.tree.take() {
        return Ok(PreparedScratch::Tree(tree));
    }
    let stat = rustix::fs::fstat(&opened.directory).map_err(|errno| LaunchError::system(What::Prepare, "look at scratch", errno))?;
    Ok(PreparedScratch::Path { path: c_path(&plan.scratch.path)?, device: stat.st_dev, inode: stat.st_ino })
}

fn make_pipes(plan: &Plan, stdin: &Stdin<'_>) -> Result<(ChildPipes, LauncherPipes), LaunchError> {
    let failed = |errno| LaunchError::system(What::Prepare, "make the pipes", errno);
    let pipe = || pipe_with(PipeFlags::CLOEXEC).map_err(failed);
    let (status_read, status_write) = pipe()?;
    let (lifeline_read, lifeline_write) = pipe()?;
    let (stdout_read, stdout_write) = pipe()?;
    let (stderr_read, stderr_write) = pipe()?;
    let (handover, handover_child) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).map_err(failed)?;
    let (stdin_read, stdin_write) = match stdin {
        Stdin::Null => {
            let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CLOEXEC;
            (rustix::fs::open(c"/dev/null", flags, rustix::fs::Mode::empty()).map_err(failed)?, None)
        }
        Stdin::Bytes(_) | Stdin::Relay => {
            let (read, write) = pipe()?;
            (read, Some(write))
        }
    };
    if plan.mode == stockade_policy::plan::Mode::Root {
        // So that the code may open /dev/stdout, which is this pipe, as it may anywhere.
        let (uid, gid) = plan.identity.outside;
        for fd in [&stdout_write, &stderr_write] {
            rustix::fs::fchown(fd, Some(rustix::fs::Uid::from_raw(uid)), Some(rustix::fs::Gid::from_raw(gid))).map_err(failed)?;
        }
        if stdin_write.is_some() {
            rustix::fs::fchown(&stdin_read, Some(rustix::fs::Uid::from_raw(uid)), Some(rustix::fs::Gid::from_raw(gid))).map_err(failed)?;
        }
    }
    let streams = Streams { stdin: stdin_read, stdout: stdout_write, stderr: stderr_write };
    let child = ChildPipes { status_write, lifeline_read, lifeline_write, handover_child, streams };
    let launcher = LauncherPipes { status_read, handover, stdin: stdin_write, stdout: stdout_read, stderr: stderr_read };
    Ok((child, launcher))
}

/// Writes the job into a sealed memory file, contents behind the frame.
fn write_job(plan: &Plan, inputs: &Inputs<'_>) -> Result<OwnedFd, LaunchError> {
    let failed = |errno| LaunchError::system(What::Prepare, "write the job", errno);
    let bytes = |path: &Path| path.as_os_str().as_bytes().to_vec();
    let writable: Vec<Vec<u8>> = plan.writable_mounts().iter().map(|path| bytes(path)).collect();
    let required: Vec<Vec<u8>> = plan.required_mounts().iter().map(|path| bytes(path)).collect();
    let (directory, name) =
        plan.program_file.as_ref().map_or((&[][..], &[][..]), |(directory, name)| (directory.as_os_str().as_bytes(), name.as_bytes()));
    let files = inputs
        .files
        .iter()
        .map(|(path, contents)| FileToWrite { path: path.as_bytes(), offset: 0, length: contents.len() as u64 })
        .collect();
    let mut job = Job {
        argv: plan.argv.iter().map(String::as_bytes).collect(),
        envp: plan.environment_values.iter().map(String::as_bytes).collect(),
        program_directory: directory,
        program: FileToWrite { path: name, offset: 0, length: inputs.program.len() as u64 },
        files,
        rlimits: plan.rlimits.iter().map(|limit| (limit.resource, limit.value)).collect(),
        landlock_handled: plan.payload_landlock.handled,
        landlock_scoped: plan.payload_landlock.scoped,
        landlock_rules: plan.payload_landlock.rules.iter().map(|rule| (rule.path.as_os_str().as_bytes(), rule.rights)).collect(),
        writable_mounts: writable.iter().map(Vec::as_slice).collect(),
        required_mounts: required.iter().map(Vec::as_slice).collect(),
        expect_landlock: plan.landlock.handled != 0,
        terminal: plan.terminal,
    };
    job.place_contents();
    let memory = memfd_create(c"stockade-job", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).map_err(failed)?;
    let frame = job.encode();
    let parts =
        std::iter::once(frame.as_slice()).chain(std::iter::once(inputs.program)).chain(inputs.files.iter().map(|(_, contents)| *contents));
    for mut part in parts {
        while !part.is_empty() {
            let written = rustix::io::write(&memory, part).map_err(failed)?;
            part = part.get(written..).unwrap_or_default();
        }
    }
    rustix::fs::fcntl_add_seals(&memory, SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL).map_err(failed)?;
    Ok(memory)
}
