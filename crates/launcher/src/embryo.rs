//! A sandbox before it is known what it will run.
//!
//! Making a network namespace takes as long as admitting a request. So the process that
//! becomes pid 1 is cloned first: it makes its namespaces while the launcher reads,
//! checks and plans, and then waits. It holds nothing of the request and has not touched
//! the host; dropping it kills and reaps it, and that was all.

use std::{
    mem::ManuallyDrop,
    path::Path,
    sync::{Arc, OnceLock},
};

use rustix::{
    fd::{AsRawFd, OwnedFd},
    net::{AddressFamily, SocketFlags, SocketType, socketpair},
    pipe::{PipeFlags, pipe_with},
    thread::sched_getaffinity,
};
use stockade_policy::plan::{Foundation, Plan, UserNamespaces};
use stockade_sys::{
    clone,
    process::{close_range, send_to_other_cpu},
};

use crate::{
    LaunchError, What, cgroup,
    child::{self, Shared},
    early, error, identity,
    layers::{Layer, Layers},
    prepared::{PreparedFoundation, pipe},
    proc::ProcDirectory,
    registry::Record,
    sandbox::Sandbox,
    signals::Signals,
};

/// The child's stack. Its frames are small; pages that are not touched cost nothing.
const STACK: usize = 256 << 10;

/// A sandbox that has its ids.
pub(crate) struct Laid {
    /// Its first process's directory.
    pub(crate) proc: ProcDirectory,
    /// The write end, whose closing ends the sandbox.
    pub(crate) lifeline: OwnedFd,
}

/// See the module.
pub struct Embryo {
    pub(crate) sandbox: Sandbox,
    pub(crate) user_namespaces: UserNamespaces,
    pub(crate) cgroup: Option<cgroup::Founded>,
    /// Where the child reports, by the executor's frames.
    pub(crate) status_read: OwnedFd,
    /// Through which it is told to go on, and hands over what it made.
    pub(crate) handover: OwnedFd,
    /// What it has been told to begin with, and whether that could be said.
    pub(crate) laid: Option<(Foundation, Result<Laid, LaunchError>)>,
    // Last, because a signal held back until now may end this process.
    pub(crate) signals: Signals,
}

impl Embryo {
    /// Starts it. `privileged`: this process is root, which alone can do without user
    /// namespaces. `v2`: the cgroup below which the run's own is made first, on cgroup v2,
    /// because a process can be started inside one, but not moved into it without a wait.
    ///
    /// # Errors
    /// The kernel refuses user namespaces, or the cgroup cannot be made.
    pub fn begin(
        privileged: bool,
        user_namespaces: UserNamespaces,
        v2: Option<V2Parent<'_>>,
        record: Option<&mut Record>,
    ) -> Result<Self, LaunchError> {
        let failed = |errno| LaunchError::system(What::Prepare, "make the pipes", errno);
        let signals = Signals::block()?;
        let cgroup = v2.map(|parent| cgroup::found(&parent, record)).transpose()?;
        let (waiting, [status_read, status_write], [handover, childs]) = match early::take() {
            Some(begun) if user_namespaces == UserNamespaces::Nested && cgroup.is_none() => {
                (Some(begun.child), begun.status, begun.handover)
            }
            unfit => {
                drop(unfit.map(|begun| Sandbox::alone(begun.child)));
                let status = pipe_with(PipeFlags::CLOEXEC).map_err(failed)?;
                let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).map_err(failed)?;
                (None, status.into(), pair.into())
            }
        };
        let number = |fd: &OwnedFd| fd.as_raw_fd().unsigned_abs();
        let (launchers, lent) = (number(&handover), [number(&status_write), number(&childs)]);
        let shared = Arc::new(Shared {
            status_write: ManuallyDrop::new(status_write),
            handover: ManuallyDrop::new(childs),
            launchers_handover: launchers,
            cpus: sched_getaffinity(None).ok(),
            foundation: OnceLock::new(),
            prepared: OnceLock::new(),
            layers: Layers::of_environment(),
        });
        // The child makes the rest itself, on another CPU than ours.
        let layers = Layers::of_environment();
        let user_namespaces = if layers.keep(Layer::UserNamespaces) { user_namespaces } else { UserNamespaces::Missing };
        let mut namespaces = if layers.keep(Layer::PidNamespace) { clone::flags::NEWPID } else { 0 };
        if user_namespaces == UserNamespaces::Nested {
            namespaces |= clone::flags::NEWUSER;
        }
        if cgroup.is_some() && layers.keep(Layer::CgroupNamespace) {
            namespaces |= clone::flags::NEWCGROUP;
        }
        let mut stack = Vec::new();
        let directory = cgroup.as_ref().map(cgroup::Founded::directory);
        // SAFETY: `Sandbox` keeps both until it has seen the executor or reaped the child;
        // `child::enter` and `resume` make only system calls on prepared data.
        #[expect(unsafe_code, reason = "the one process that shares our memory")]
        let cloned = unsafe {
            match waiting {
                Some(child) => {
                    early::place().lead(child::resume, &*shared);
                    Ok(child)
                }
                None => {
                    stack.resize(STACK, 0);
                    clone::clone_sharing(namespaces, directory, &mut stack, child::enter, &*shared)
                        .inspect(|child| send_to_other_cpu(child.pid))
                }
            }
        };
        // First of all, so that no way out of here leaves a child in memory that is gone.
        let sandbox = cloned.map(|child| Sandbox::new(child, shared, stack));
        // Whether there is a child or not: from here on they are its alone.
        for fd in lent {
            close_range(fd, fd).map_err(failed)?;
        }
        let sandbox = sandbox.map_err(|errno| error::clone_failed(privileged, errno))?;
        if privileged {
            // A limit can be raised by root only, and by the sandbox later no more.
            child::raise_core_limit(sandbox.pid())
                .map_err(|errno| LaunchError::system(What::Prepare, "raise the limit of core dumps", errno))?;
        }
        Ok(Embryo { sandbox, user_namespaces, cgroup, status_read, handover, laid: None, signals })
    }

    /// Has it begin while the rest of the plan is worked out, with what the plan's foundation
    /// will be. That this failed is said when it is set up.
    pub fn lay_ahead(&mut self, foundation: &Foundation) {
        // A build for tests may leave out what was foreseen.
        if !cfg!(feature = "ablation") {
            self.lay(foundation.clone());
        }
    }

    /// Gives it its ids, and has it lay this foundation.
    pub(crate) fn lay(&mut self, foundation: Foundation) {
        let laid = self.try_to_lay(&foundation);
        self.laid = Some((foundation, laid));
    }

    fn try_to_lay(&self, foundation: &Foundation) -> Result<Laid, LaunchError> {
        let proc = identity::write_maps(foundation, self.sandbox.pid())?;
        let (lifeline_read, lifeline) = pipe()?;
        self.sandbox.let_lay(PreparedFoundation::new(foundation)?, &lifeline_read, &self.handover)?;
        Ok(Laid { proc, lifeline })
    }

    /// Whether this plan can be launched in it.
    pub fn fits(&self, plan: &Plan) -> bool {
        self.user_namespaces == plan.identity.user_namespaces && self.laid.as_ref().is_none_or(|(laid, _)| plan.is_founded_on(laid))
    }
}

/// A cgroup of version 2 in which a run's cgroup can be made.
pub struct V2Parent<'a> {
    /// Its directory.
    pub path: &'a Path,
    /// The launcher is alone in it and must leave for a child of it first.
    pub vacate: bool,
}
