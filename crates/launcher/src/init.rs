//! The sandbox's init process, cloned before its plan exists.
//!
//! [`spawn`] is the one place where a sandbox's first process is started. Making a network
//! namespace takes as long as planning, so the child makes its namespaces while the launcher
//! reads, checks and plans, and then waits. It holds nothing of the request and has changed
//! nothing of the host; dropping it kills and reaps it, and removes its cgroup.

use std::{
    mem::ManuallyDrop,
    sync::{Arc, OnceLock},
};

use nix::sys::{
    personality::{self, Persona},
    prctl::{set_thp_disable, set_timerslack},
};
use rustix::{
    fd::{AsRawFd, OwnedFd},
    io::Errno,
    net::{AddressFamily, SocketFlags, SocketType, socketpair},
    pipe::{PipeFlags, pipe_with},
    thread::sched_getaffinity,
};
use stockade_policy::{facts::CgroupFacts, plan::UserNamespaces};
use stockade_sys::{
    clone,
    process::{close_range, send_to_other_cpu},
};

use crate::{
    ErrorKind, LaunchError, cgroup, identity,
    layers::{Layer, Layers},
    registry::Record,
    sandbox::Sandbox,
    sequence::{self, Shared},
    signals::Signals,
};

/// The child's stack. Its frames are small; pages that are not touched cost nothing.
const STACK: usize = 256 << 10;

/// A child that makes its namespaces and then waits for the plan.
pub struct InitProcess {
    pub(crate) sandbox: Sandbox,
    pub(crate) user_namespaces: UserNamespaces,
    pub(crate) user_namespace_refusal: Option<String>,
    pub(crate) cgroup: Option<cgroup::EmptyCgroup>,
    /// Where the child reports, by the executor's frames.
    pub(crate) status_read: OwnedFd,
    /// Where messages go to the child and come from it.
    pub(crate) handover: OwnedFd,
    // Last, because a signal held back until now may end this process.
    pub(crate) signals: Signals,
}

impl InitProcess {
    /// Why it is in no user namespace, where root was refused one.
    pub fn user_namespace_refusal(&self) -> Option<&str> {
        self.user_namespace_refusal.as_deref()
    }
}

/// Resets what this process and the code would have of the caller, and what no limit takes
/// account of. `counted`: a cgroup counts huge pages. Nothing else does: of one that is unmapped but
/// for a part, the whole stays in use, and `/proc` shows the part.
fn reset_inherited(counted: bool) -> Result<(), Errno> {
    /// The kernel's own, in nanoseconds (prctl(2), PR_SET_TIMERSLACK).
    const TIMER_SLACK: u64 = 50_000;
    // With a slack of an hour epoll_wait(2) may be an hour late: no limit of time would hold.
    set_timerslack(TIMER_SLACK).map_err(of_nix)?;
    set_thp_disable(!counted).map_err(of_nix)?;
    // setarch(8), such as addresses that are not random. Not asked for first: a service's
    // LockPersonality= lets a process set what it has, and refuses the question.
    personality::set(Persona::empty()).map_err(of_nix)?;
    Ok(())
}

fn of_nix(errno: nix::errno::Errno) -> Errno {
    Errno::from_raw_os_error(errno as i32)
}

/// Starts it, in user and PID namespaces. `privileged`: this process is root, which alone can
/// do without user namespaces; where the host refuses them the process is started without, and
/// the plan decides whether that may be. On cgroup v2 the run's cgroup is made first, because a
/// process can be started inside one, but not moved into it without a wait.
///
/// # Errors
/// The kernel refuses the namespaces, or the cgroup cannot be made.
pub fn spawn(privileged: bool, cgroup: &CgroupFacts, record: Option<&mut Record>) -> Result<InitProcess, LaunchError> {
    let failed = LaunchError::system(ErrorKind::Prepare, "make the pipes");
    let layers = Layers::in_this_build();
    let signals = Signals::block()?;
    let counted = !matches!(cgroup, CgroupFacts::Unavailable { .. });
    reset_inherited(counted).map_err(|errno| LaunchError::system(ErrorKind::Prepare, "reset what the caller has handed down")(errno))?;
    let cgroup = match cgroup {
        CgroupFacts::V2 { parent, vacate } => Some(cgroup::make_empty(parent, *vacate, record)?),
        _ => None,
    };
    let (status_read, status_write) = pipe_with(PipeFlags::CLOEXEC).map_err(failed)?;
    let (handover, childs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).map_err(failed)?;
    let number = |fd: &OwnedFd| fd.as_raw_fd().unsigned_abs();
    let lent = [number(&status_write), number(&childs)];
    let shared = Arc::new(Shared {
        status_write: ManuallyDrop::new(status_write),
        handover: ManuallyDrop::new(childs),
        cpus: sched_getaffinity(None).ok(),
        data: OnceLock::new(),
        layers,
    });
    let mut stack = vec![0; STACK];
    let directory = cgroup.as_ref().map(cgroup::EmptyCgroup::directory);
    let mut namespaces = if layers.has(Layer::PidNamespace) { clone::flags::NEWPID } else { 0 };
    if cgroup.is_some() && layers.has(Layer::CgroupNamespace) {
        namespaces |= clone::flags::NEWCGROUP;
    }
    let mut clone_into = |namespaces| {
        // SAFETY: `Sandbox` keeps both until it has seen the executor or reaped the child;
        // `sequence::child` makes only system calls on data made ready.
        #[expect(unsafe_code, reason = "the one process that shares our memory")]
        unsafe {
            clone::clone_sharing(namespaces, directory, &mut stack, sequence::child, &*shared)
        }
    };
    let nested = layers.has(Layer::UserNamespaces);
    let mut cloned = clone_into(if nested { namespaces | clone::flags::NEWUSER } else { namespaces });
    // Any other cause would meet the process without one as well.
    let refusal = if nested && privileged && cloned.is_err() { identity::user_namespace_refusal() } else { None };
    if refusal.is_some() {
        cloned = clone_into(namespaces);
    }
    if let Ok(child) = &cloned {
        send_to_other_cpu(child.pid);
    }
    // First of all, so that no way out of here leaves a child in memory that is gone.
    let sandbox = cloned.map(|child| Sandbox::new(child, shared, stack));
    // Whether there is a child or not: from here on they are its alone.
    for fd in lent {
        close_range(fd, fd).map_err(failed)?;
    }
    let sandbox = sandbox.map_err(|errno| LaunchError::Clone { privileged, errno })?;
    if privileged {
        // A limit can be raised by root only, and by the sandbox later no more.
        sequence::raise_core_limit(sandbox.pid()).map_err(LaunchError::system(ErrorKind::Prepare, "raise the limit of core dumps"))?;
    }
    let user_namespaces = if nested && refusal.is_none() { UserNamespaces::Nested } else { UserNamespaces::Missing };
    Ok(InitProcess { sandbox, user_namespaces, user_namespace_refusal: refusal, cgroup, status_read, handover, signals })
}
