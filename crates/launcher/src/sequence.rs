//! The privileged sequence, from the clone to the executor's first instruction: the launcher's
//! column and the child's, step by step.
//!
//! Everything irreversible between the two happens in this file, top to bottom; what each step
//! is made of stands in the files below it. The clone is in `init.rs`, and what the executor does
//! to itself and to the payload is in its own crate. The two columns meet where one waits for a message of the
//! other (`messages.rs`). The child runs in the launcher's memory, beside it, so it makes only
//! system calls on data made ready: it allocates nothing, takes no lock and calls no libc, whose
//! thread-local storage is the launcher's. A step that fails sends its number, the errno and the
//! entry's index to the launcher, and the process ends: there is no going on without.
//!
//! The order is the kernel's; the comment at each step says why it cannot come earlier or
//! later. Nothing here reads a policy or decides anything.

mod confine;
mod root;

use std::{convert::Infallible, ffi::CString, mem::ManuallyDrop, sync::OnceLock};

use rustix::{
    fd::{AsFd, BorrowedFd, OwnedFd},
    fs::{AtFlags, FileType, Mode, OFlags, PROC_SUPER_MAGIC, mknodat, unlinkat},
    io::Errno,
    mount::{MountPropagationFlags, mount_change},
    process::{DumpableBehavior, set_dumpable_behavior, setsid, umask},
    thread::{CpuSet, sched_setaffinity},
};
use stockade_egress::netns::Sockets;
use stockade_policy::plan::{Plan, UserNamespaces};
use stockade_protocol::{frame::failed_frame, step::Step};
use stockade_sys::{
    clone::{self, flags, unshare},
    cred, landlock,
    mount::attr,
    net, process,
};

use crate::{
    ErrorKind, InitProcess, Inputs, LaunchError, cgroup,
    cgroup::Cgroup,
    child_data::{self, ChildData, LauncherPipes},
    error::InputsError,
    identity::{self, OuterNamespaces},
    layers::Layers,
    messages::{ChildMessage, ExecutorFiles, LauncherMessage, MAX_SENT_MOUNTS},
    registry::Record,
    sock_diag::SockDiag,
    tree,
};
use confine::{
    die_with_launcher, drop_capabilities, enter_inner_namespace, forbid_core_dumps, limit_namespace_counts, limit_pending_signals,
    load_filter, namespaces, ruleset, take_ids,
};
pub(crate) use confine::{raise_core_limit, some_cpus};
pub(crate) use root::{INSIDE, attach, new_tmpfs};
use root::{
    MASK_FILE, Made, NewRoot, Terminal, bound_root, copy_tree, make_entry, mount_scratch, open_terminal, pivot, place_program, seal_proc,
};

/// What the launcher's column makes.
pub(crate) struct InPlace {
    pub(crate) cgroup: Cgroup,
    pub(crate) outer: OuterNamespaces,
    /// The write end, whose closing ends the sandbox.
    pub(crate) lifeline: OwnedFd,
    /// The job's file, still empty.
    pub(crate) job: OwnedFd,
    pub(crate) pipes: LauncherPipes,
    /// What the session keeps, to see how full it is.
    pub(crate) tmp: Option<OwnedFd>,
}

/// The launcher's column, after the clone (1). An early return leaves the child waiting for a
/// message, and dropping the sandbox ends it.
pub(crate) fn launcher(
    init: &InitProcess,
    empty_cgroup: Option<cgroup::EmptyCgroup>,
    plan: &Plan,
    inputs: &mut Inputs<'_>,
    record: Option<&mut Record>,
) -> Result<InPlace, LaunchError> {
    let send = |message: &LauncherMessage<BorrowedFd<'_>>| {
        message.send(&init.handover).map_err(LaunchError::system(ErrorKind::Prepare, "let the sandbox go on"))
    };
    if init.user_namespaces != plan.identity.user_namespaces {
        return Err(InputsError::AnotherPlan.into());
    }
    // As soon as the plan has the ids: until then every id is the overflow id (2).
    let proc = identity::write_maps(plan, init.sandbox.pid())?;
    let (lifeline_read, lifeline) = child_data::pipe()?;
    let (data, mounts) = ChildData::new(plan, inputs)?;
    init.sandbox.lend(data);
    let mut sent = [None; MAX_SENT_MOUNTS];
    sent.iter_mut().zip(&mounts).for_each(|(place, mount)| *place = Some(mount.as_fd()));
    send(&LauncherMessage::Plan { lifeline: lifeline_read.as_fd(), mounts: sent })?;
    drop((lifeline_read, mounts));
    // What the child does not need yet is made beside its mounts: v1 cgroups take as long.
    let scratch = inputs.scratch.as_mut().and_then(|opened| opened.tree.take());
    let (kept, tmp) = inputs.kept.take().map(|kept| (kept.scratch, kept.tmp)).unzip();
    let (executor, pipes) = child_data::for_executor(plan, inputs)?;
    // While the child is in the outer user namespace, which it leaves after the next message.
    let outer = identity::check_maps(plan, proc)?;
    let tree = scratch.or(kept.flatten());
    send(&LauncherMessage::Scratch { executor: executor.borrowed(), tree: tree.as_ref().map(AsFd::as_fd) })?;
    // Before the last message: a failure after it would remove the cgroup under the child.
    outer.proc.reset_oom_score_adj().map_err(LaunchError::system(ErrorKind::Cgroup, "raise oom_score_adj to 0"))?;
    let cgroup = cgroup::complete(plan, empty_cgroup, record)?;
    let tasks = cgroup.tasks()?;
    let mut files = tasks.iter().map(AsFd::as_fd);
    send(&LauncherMessage::Cgroup { tasks: std::array::from_fn(|_| files.next()) })?;
    Ok(InPlace { cgroup, outer, lifeline, job: executor.job, pipes, tmp })
}

/// What the child has in common with the launcher.
pub(crate) struct Shared {
    /// Its own ends, which the launcher closes in its table right after the clone: else
    /// nothing would tell it that they are gone with the child.
    pub(crate) status_write: ManuallyDrop<OwnedFd>,
    pub(crate) handover: ManuallyDrop<OwnedFd>,
    /// Where it may run.
    pub(crate) cpus: Option<CpuSet>,
    /// Set before the child gets the message `Plan`.
    pub(crate) data: OnceLock<ChildData>,
    /// All layers, but in builds for tests.
    pub(crate) layers: Layers,
}

/// A step that failed.
pub(crate) struct Failure {
    pub(crate) step: Step,
    pub(crate) errno: Errno,
    pub(crate) index: u32,
}

pub(crate) type StepResult<T> = Result<T, Failure>;

/// Ties an errno to its step.
trait At<T> {
    fn at(self, step: Step) -> StepResult<T>;
    fn at_entry(self, step: Step, index: usize) -> StepResult<T>;
}

impl<T> At<T> for Result<T, Errno> {
    fn at(self, step: Step) -> StepResult<T> {
        self.map_err(|errno| Failure { step, errno, index: u32::MAX })
    }
    fn at_entry(self, step: Step, index: usize) -> StepResult<T> {
        self.map_err(|errno| Failure { step, errno, index: u32::try_from(index).unwrap_or(u32::MAX) })
    }
}

impl Shared {
    /// Does a step and names its failure. A build for tests may leave the step out.
    fn step(&self, step: Step, act: impl FnOnce() -> Result<(), Errno>) -> StepResult<()> {
        if self.layers.has_step(step) { act().at(step) } else { Ok(()) }
    }

    /// Waits for the launcher's next message.
    fn recv(&self, step: Step) -> StepResult<LauncherMessage<OwnedFd>> {
        LauncherMessage::recv(&self.handover).at(step)
    }
}

/// The child's column. Returns only when a step failed: the launcher has learnt which.
pub(crate) fn child(shared: &Shared) -> i32 {
    let failure = match sequence(shared) {
        Ok(never) => match never {},
        Err(failure) => failure,
    };
    let frame = failed_frame(failure.step, u16::try_from(failure.errno.raw_os_error()).unwrap_or(0), failure.index);
    // If the launcher is gone too, no process is left to read it.
    let _unheard = rustix::io::write(&*shared.status_write, &frame);
    125
}

/// The crossings. Each state owns the descriptors that the next one needs.
fn sequence(shared: &Shared) -> StepResult<Infallible> {
    unshare_namespaces(shared)?;
    let rooted = Rooted::build(shared)?;
    let confined = rooted.confine()?;
    confined.exec()
}

/// All that needs neither the plan nor an id, while the launcher plans: namespaces with
/// nothing in them yet.
fn unshare_namespaces(shared: &Shared) -> StepResult<()> {
    // Modes below are meant as written.
    umask(Mode::empty());
    // Through one of a directory a path of `/proc` would lead back to the host (CVE-2024-21626), and
    // our copy of the launcher's end would hide its death from us.
    process::close_all_but([&*shared.status_write, &*shared.handover]).at(Step::AwaitLauncher)?;
    shared.step(Step::Namespaces, || unshare(namespaces(shared.layers)))?;
    shared.step(Step::NetworkNamespace, || unshare(flags::NEWNET))?;
    shared.step(Step::Loopback, net::bring_up_loopback)?;
    shared.step(Step::Session, || setsid().map(drop))?;
    shared.step(Step::Scheduling, process::give_up_precedence)?;
    // pivot_root refuses shared propagation (EINVAL), and no mount event may leave.
    shared.step(Step::PrivateMounts, || mount_change(c"/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC))
}

/// In its own root, with nothing of the host in reach by path.
struct Rooted<'p> {
    shared: &'p Shared,
    data: &'p ChildData,
    lifeline: OwnedFd,
    for_executor: ExecutorFiles<OwnedFd>,
    root: OwnedFd,
    scratch: OwnedFd,
    executor: OwnedFd,
    program: Option<OwnedFd>,
    proc: OwnedFd,
    modules: Option<OwnedFd>,
    terminal: Option<Terminal>,
}

impl<'p> Rooted<'p> {
    /// Waits for the id maps and the plan, switches to the sandbox's ids, builds the root and
    /// pivots into it.
    fn build(shared: &'p Shared) -> StepResult<Self> {
        let LauncherMessage::Plan { lifeline, mounts } = shared.recv(Step::AwaitLauncher)? else {
            return Err(Errno::PROTO).at(Step::AwaitLauncher);
        };
        let data = shared.data.get().ok_or(Errno::NODATA).at(Step::AwaitLauncher)?;
        // After the gid map, before the uid change takes the capability away; rootless it
        // is refused for ever (setgroups=deny), and the receipt names the groups kept.
        shared.step(Step::Groups, || if data.clear_groups { cred::set_groups(&[]) } else { Ok(()) })?;
        // Before the first file: a tmpfs refuses unmapped owners (EOVERFLOW).
        shared.step(Step::Ids, || take_ids(data.ids, data.user_namespaces))?;
        // setresuid has cleared both: /proc/self must be ours, and the launcher's death our own.
        shared.step(Step::DeathSignal, || set_dumpable_behavior(DumpableBehavior::Dumpable))?;
        shared.step(Step::DeathSignal, || die_with_launcher(&lifeline))?;
        shared.step(Step::Keyring, cred::join_new_session_keyring)?;
        shared.step(Step::Hostname, || rustix::system::sethostname(data.hostname.as_bytes()))?;
        // Before the inner user namespace, whose maximum it becomes.
        limit_pending_signals().at(Step::NamespaceLimits)?;
        let mut root = NewRoot::mount(data).at(Step::RootTmpfs)?;
        let mut made = Made::default();
        for (index, entry) in data.entries.iter().enumerate() {
            make_entry(&mut root, entry, &mounts, &mut made, shared.layers).at_entry(Step::RootEntry, index)?;
        }
        let proc = made.proc.ok_or(Errno::NOENT).at(Step::RootEntry)?;
        if data.egress {
            let sockets = Sockets::open().map_err(|made| Failure {
                step: Step::EgressSockets,
                errno: made.errno,
                index: u32::try_from(made.index).unwrap_or(u32::MAX),
            })?;
            sockets.send(shared.handover.as_fd()).at(Step::EgressSockets)?;
        }
        let executor = place_program(root.tmpfs(), data.executor).at(Step::PlaceExecutor)?;
        let program = data.program_bytes.map(|bytes| place_program(root.tmpfs(), bytes)).transpose().at(Step::PlaceExecutor)?;
        let LauncherMessage::Scratch { executor: for_executor, tree } = shared.recv(Step::AwaitScratch)? else {
            return Err(Errno::PROTO).at(Step::AwaitScratch);
        };
        let scratch = mount_scratch(data, shared.layers, tree, &root)?;
        // Landlock allows no fifo in scratch.
        if let Some(name) = &data.program_fifo {
            mknodat(&scratch, &**name, FileType::Fifo, Mode::from_raw_mode(0o600), 0).at(Step::ProgramFifo)?;
        }
        // The stand-in for masked files stays mounted, its name goes.
        unlinkat(root.tmpfs(), MASK_FILE, AtFlags::empty()).at(Step::SealRoot)?;
        // After the last file of the set-up, while the rights over the file system are held.
        data.root_room.map_or(Ok(()), |room| bound_root(root.tmpfs(), room)).at(Step::SealRoot)?;
        // After the last path of the host was used.
        pivot(&root, shared.layers)?;
        if !data.writable_root {
            shared.step(Step::SealRoot, || stockade_sys::mount::set_attributes(root.top(), attr::RDONLY, false))?;
        }
        // The pivot left us at the new root, which is "/" now.
        shared.step(Step::PivotRoot, || rustix::process::chdir(c"/"))?;
        let terminal = if data.terminal { Some(open_terminal().at(Step::OpenTerminal)?) } else { None };
        let root = root.into_tmpfs();
        Ok(Rooted { shared, data, lifeline, for_executor, root, scratch, executor, program, proc, modules: made.modules, terminal })
    }

    /// Gives up everything that could undo the above.
    fn confine(self) -> StepResult<Confined<'p>> {
        let Rooted { shared, data, lifeline, for_executor, root, scratch, executor, program, proc, modules, terminal } = self;
        let nested = data.user_namespaces == UserNamespaces::Nested;
        // While we still own the outer namespace: its counts bind whatever is made below it.
        // Without one they would be the host's.
        if nested && shared.layers.has_step(Step::NamespaceLimits) {
            limit_namespace_counts(&proc)?;
        }
        // To be sealed /proc wants the outer namespace's rights, and the inner one's maps one
        // that is not: a copy that is mounted nowhere.
        let enters_inner = nested && shared.layers.has_step(Step::InnerUserNamespace);
        let writable = enters_inner.then(|| copy_tree(&proc, c"")).transpose().at(Step::InnerUserNamespace)?;
        seal_proc(&proc, shared.layers).at(Step::SealRoot)?;
        // That was the last mount: the launcher can look at them while the rest is done.
        ChildMessage::MountsStand.send(&shared.handover).at(Step::SealRoot)?;
        // After the last mount call, which its domain forbids. Put on when nothing else is to come.
        let programs = std::iter::once(&executor).chain(&program);
        let landlock = data.landlock.as_ref().map(|rules| ruleset(rules, programs, Step::Landlock)).transpose()?;
        // Before the filter too, which refuses rules where a host scratch is counted. The payload's
        // process puts it on.
        let for_payload = data.payload_landlock.as_ref();
        let payload_landlock = for_payload.map(|rules| ruleset(rules, program.iter(), Step::PayloadLandlock)).transpose()?;
        // That was the last use of the outer namespace's rights. The inner one comes before the
        // drop, because it refills the sets, the bounding set too. From here on mounts, host name
        // and network of the outer one are out of reach for any capability.
        if let Some(writable) = &writable {
            enter_inner_namespace(data, writable).at(Step::InnerUserNamespace)?;
        }
        shared.step(Step::WorkingDirectory, || enter_first(&data.working_directories))?;
        umask(Mode::from_raw_mode(0o022));
        shared.step(Step::CoreLimit, forbid_core_dumps)?;
        // As late as can be, since the launcher takes long to make it.
        let LauncherMessage::Cgroup { tasks } = shared.recv(Step::AwaitCgroup)? else {
            return Err(Errno::PROTO).at(Step::AwaitCgroup);
        };
        for (index, tasks) in tasks.iter().flatten().enumerate() {
            // 0 is this process; naming another, or itself by number, would wait (v1.rs).
            rustix::io::write(tasks, b"0").map(drop).at_entry(Step::JoinCgroup, index)?;
        }
        // After the join, or its path would show from inside. On v2 it was part of the clone.
        shared.step(Step::CgroupNamespace, || if data.unshare_cgroup_namespace { unshare(flags::NEWCGROUP) } else { Ok(()) })?;
        shared.step(Step::Capabilities, || drop_capabilities(shared.layers))?;
        // Without capabilities, Landlock and the filter are refused until this is set.
        shared.step(Step::NoNewPrivs, || rustix::thread::set_no_new_privs(true))?;
        shared.step(Step::Landlock, || landlock.as_ref().map_or(Ok(()), landlock::restrict_self))?;
        // A change of credentials clears it (prctl(2)).
        shared.step(Step::DeathSignal, || die_with_launcher(&lifeline))?;
        // The code sees as many CPUs as its quota is worth, and the launcher's among them last:
        // it had sent us to another.
        if let Some(usable) = &shared.cpus {
            sched_setaffinity(None, &some_cpus(usable, process::current_cpu(), data.cpus)).at(Step::Cpus)?;
        }
        // It belongs to the network namespace in which it is made; the filter would refuse it.
        let sock_diag = if data.sock_diag { SockDiag::open().at(Step::HandOver)? } else { None };
        // Last: what follows must pass the filter itself.
        let listener = load_filter(data)?;
        Ok(Confined {
            shared,
            lifeline,
            for_executor,
            root,
            scratch,
            executor,
            program,
            payload_landlock,
            listener,
            modules,
            terminal,
            writable,
            sock_diag,
        })
    }
}

/// Enters the first directory that is there. A caller, an image or earlier code has chosen the path, and
/// this process still has descriptors of the set-up: a link of `/proc` to one of them is refused
/// (ELOOP), wherever it stands on the path, and so is what lies in `/proc`, where `self` is this process.
fn enter_first(directories: &[CString]) -> Result<(), Errno> {
    let mut entered = Err(Errno::NOENT);
    for directory in directories {
        entered = tree::open_inside(directory.as_c_str(), OFlags::DIRECTORY).and_then(|opened| {
            let is_proc = rustix::fs::fstatfs(&opened)?.f_type == PROC_SUPER_MAGIC;
            if is_proc { Err(Errno::LOOP) } else { rustix::process::fchdir(opened) }
        });
        if entered.is_ok() {
            break;
        }
    }
    entered
}

/// Behind every layer. What is left is to become the executor.
struct Confined<'p> {
    shared: &'p Shared,
    lifeline: OwnedFd,
    for_executor: ExecutorFiles<OwnedFd>,
    root: OwnedFd,
    scratch: OwnedFd,
    executor: OwnedFd,
    program: Option<OwnedFd>,
    payload_landlock: Option<OwnedFd>,
    listener: Option<OwnedFd>,
    modules: Option<OwnedFd>,
    terminal: Option<Terminal>,
    /// The copy of /proc, which has no use any more.
    writable: Option<OwnedFd>,
    sock_diag: Option<OwnedFd>,
}

impl Confined<'_> {
    fn exec(mut self) -> StepResult<Infallible> {
        let handover = ChildMessage::Handover {
            root: self.root.as_fd(),
            scratch: self.scratch.as_fd(),
            listener: self.listener.as_ref().map(AsFd::as_fd),
            terminal: self.terminal.as_ref().map(|terminal| terminal.master.as_fd()),
            modules: self.modules.as_ref().map(AsFd::as_fd),
            proc: self.writable.as_ref().map(AsFd::as_fd),
            sock_diag: self.sock_diag.as_ref().map(AsFd::as_fd),
        };
        handover.send(&self.shared.handover).at(Step::HandOver)?;
        // The launcher has it now: the last close waits for all CPUs.
        drop(self.writable.take());
        let ExecutorFiles { job, stdin, stdout, stderr, memory } = &self.for_executor;
        // Clear of the fixed numbers, so that placing one cannot overwrite another.
        let above = |fd: BorrowedFd<'_>| process::duplicate_above(fd, LOWEST_FREE).at(Step::Descriptors);
        let job = above(job.as_fd())?;
        let status = above(self.shared.status_write.as_fd())?;
        let (input, output, error) = match &self.terminal {
            Some(terminal) => (above(terminal.slave.as_fd())?, above(terminal.slave.as_fd())?, above(terminal.slave.as_fd())?),
            None => (above(stdin.as_fd())?, above(stdout.as_fd())?, above(stderr.as_fd())?),
        };
        let lifeline = above(self.lifeline.as_fd())?;
        let executor = above(self.executor.as_fd())?;
        let optional = |fd: &Option<OwnedFd>| fd.as_ref().map(|fd| above(fd.as_fd())).transpose();
        let (ruleset, program, memory) = (optional(&self.payload_landlock)?, optional(&self.program)?, optional(memory)?);
        // Every other descriptor, of the launcher or of its caller, is closed by
        // the exec; none is opened without close-on-exec after this.
        process::close_on_exec_from(0).at(Step::Descriptors)?;
        let fixed = [(&job, 0), (&output, 1), (&error, 2), (&status, 3), (&input, 4), (&lifeline, 5)];
        let optional = [(&ruleset, RULESET), (&program, PROGRAM), (&memory, MEMORY)];
        let there = optional.into_iter().filter_map(|(fd, number)| fd.as_ref().map(|fd| (fd, number)));
        for (fd, number) in fixed.into_iter().chain(there) {
            process::place_descriptor(fd, number).at(Step::Descriptors)?;
        }
        Err(clone::exec_alone(executor.as_fd())).at(Step::ExecExecutor)
    }
}

const LOWEST_FREE: i32 = 16;
/// Where the executor finds the ruleset of the payload's Landlock layer.
const RULESET: i32 = 6;
/// Where it finds the payload's program, where that is executed by descriptor.
const PROGRAM: i32 = 7;
/// Where it finds the file of a memory image that the payload gets.
const MEMORY: i32 = 8;
