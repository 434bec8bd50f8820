//! A sandbox that is set up for a plan and waits for its job.
//!
//! [`InitProcess::setup`] puts every layer in place that a plan has, and does not wait for the
//! child, which goes on until it is the executor. From there on it does nothing until
//! [`WaitingSandbox::run`]. How long that is makes no difference: evidence is read, and
//! mounts are checked, only after the job has arrived. Whether a later
//! plan may be run in it is not judged here ([`Plan::is_set_up_like`] does).

use std::fs::File;

use rustix::{
    fd::{AsFd, BorrowedFd, OwnedFd},
    fs::{AtFlags, FileType, Stat, statat, unlinkat},
    io::fcntl_dupfd_cloexec,
    process::Pid,
    thread::{CpuSet, sched_getaffinity, sched_setaffinity},
};
use stockade_policy::plan::Plan;

use crate::{
    ErrorKind, InitProcess, Inputs, LaunchError, Memory, Outcome, Stdin, Teardown,
    child_data::{self, LauncherPipes},
    egress,
    error::InputsError,
    layers,
    registry::Record,
    relay::is_readable,
    sequence::{self, InPlace},
    supervise::{self, JOB_TIMEOUT, SETUP_TIMEOUT, SandboxHandles},
};

/// A sandbox that was given its whole plan and will wait for its job. Dropping it leaves nothing
/// behind.
pub struct WaitingSandbox {
    handles: SandboxHandles,
    /// The job's file, and where the job will begin in it.
    job: OwnedFd,
    job_offset: u64,
    memory: Option<Memory>,
    pipes: LauncherPipes,
    /// What the session keeps, to see how full it is.
    tmp: Option<OwnedFd>,
    /// It was set up before its run was asked for.
    is_prepared: bool,
    /// Locks of what it shows.
    held: Vec<File>,
    /// Where its interpreter waits for the program, in a scratch that outlives the sandbox.
    fifo: Option<ProgramFifo>,
    // Last: it says what to remove if the rest is not.
    record: Option<Record>,
}

impl InitProcess {
    /// Sets it up for a plan. Takes of the inputs what belongs to the sandbox; what belongs to
    /// the run stays in them.
    ///
    /// # Errors
    /// Something could not be put in place. Nothing of the payload has run, and nothing is left
    /// behind.
    pub fn setup(mut self, plan: &Plan, inputs: &mut Inputs<'_>) -> Result<WaitingSandbox, LaunchError> {
        let mut record = inputs.record.take();
        let layers = layers::Layers::in_this_build();
        #[cfg_attr(not(feature = "ablation"), expect(clippy::needless_borrow, reason = "it may be another plan in a build for tests"))]
        let plan: &Plan = &layers.applied_to(plan);
        let empty_cgroup = self.cgroup.take();
        let fifo = ProgramFifo::of(plan, inputs)?;
        let waits_for = child_data::prestarted_program(plan, inputs);
        // A child that failed first is the cause of what failed here.
        let cause = |error, status: &OwnedFd| supervise::failure_of_child(plan, status).unwrap_or(error);
        let in_place = sequence::launcher(&self, empty_cgroup, plan, inputs, record.as_mut());
        let InPlace { cgroup, outer, lifeline, job, pipes, tmp } = in_place.map_err(|error| cause(error, &self.status_read))?;
        // The last is dropped first: a signal that was held back may end this process, so it
        // comes through when the sandbox is gone.
        let InitProcess { signals, handover, status_read, sandbox, .. } = self;
        let mut handles = SandboxHandles {
            sandbox,
            cgroup,
            outer,
            gate: None,
            lifeline,
            status_read,
            handover,
            usable_cpus: None,
            timeout: SETUP_TIMEOUT,
            signals,
        };
        if let Some(egress) = &plan.egress {
            // Beside the child's last steps, none of which needs the network. The program waits
            // for one more command, which comes when the gate has said that it is confined.
            let gate = egress::begin(plan, egress, &handles.handover).map_err(|error| cause(error, &handles.status_read))?;
            handles.gate = Some(gate);
        }
        let started = waits_for
            .map(|program| child_data::hand_in_prestart(&job, &handles.lifeline, plan, inputs.memory.as_ref(), program))
            .transpose();
        let job_offset = started.map_err(|error| cause(error, &handles.status_read))?.unwrap_or_default();
        let memory = inputs.memory.take();
        let held = std::mem::take(&mut inputs.held);
        Ok(WaitingSandbox { handles, job, job_offset, memory, pipes, tmp, is_prepared: false, held, fifo, record })
    }
}

impl WaitingSandbox {
    /// Whether it is alive and nothing has failed, as far as is known.
    pub fn is_sound(&self) -> bool {
        let quiet = |fd| is_readable(fd).is_ok_and(|readable| !readable);
        quiet(self.end()) && quiet(self.handles.status_read.as_fd())
    }

    /// What becomes readable when it has ended by itself.
    pub fn end(&self) -> BorrowedFd<'_> {
        self.handles.sandbox.child.pidfd.as_fd()
    }

    /// The run's place in the registry.
    pub fn record(&mut self) -> Option<&mut Record> {
        self.record.as_mut()
    }

    /// Keeps it for a run that is yet to be asked for. That run gives it less time to become
    /// ready, since another sandbox can take its place, and lets it wake on any CPU.
    pub fn keep_prepared(&mut self) {
        self.is_prepared = true;
    }

    /// Whether it was set up before its run was asked for.
    pub fn is_prepared(&self) -> bool {
        self.is_prepared
    }

    /// Whether its program's process is a copy from a memory image.
    pub fn is_restored(&self) -> bool {
        self.memory.as_ref().is_some_and(Memory::is_restored)
    }

    /// Runs the plan that the sandbox was set up for. Dropping the teardown removes what is left
    /// of it.
    ///
    /// # Errors
    /// The program was not started. Nothing of it has run, and nothing is left behind.
    pub fn run(self, plan: &Plan, inputs: Inputs<'_>) -> Result<(Outcome, Teardown), LaunchError> {
        // The fifo goes after the run, should pid 1 not have removed it.
        let WaitingSandbox { record, is_prepared, held, fifo: _fifo, tmp, pipes, memory, job, job_offset, mut handles } = self;
        let layers = layers::Layers::in_this_build();
        #[cfg_attr(not(feature = "ablation"), expect(clippy::needless_borrow, reason = "it may be another plan in a build for tests"))]
        let plan: &Plan = &layers.applied_to(plan);
        if matches!(inputs.stdin, Stdin::Null) != pipes.stdin.is_none() {
            return Err(InputsError::Stdin.into());
        }
        if is_prepared {
            handles.timeout = JOB_TIMEOUT;
            handles.usable_cpus = unpin(&handles, plan.cpus);
        }
        let handed_in = child_data::hand_in_job(&job, job_offset, &handles.lifeline, plan, memory.as_ref(), &inputs);
        handed_in.map_err(|error| supervise::failure_of_child(plan, &handles.status_read).unwrap_or(error))?;
        supervise::supervise(plan, Inputs { record, held, ..inputs }, handles, pipes, tmp)
    }
}

/// The fifo of an interpreter that waits for its program, in a scratch that a session keeps.
/// Dropping it removes the fifo, if it is still there.
struct ProgramFifo {
    scratch: OwnedFd,
    name: String,
}

impl ProgramFifo {
    /// None where no interpreter is started ahead, or scratch ends with the sandbox.
    fn of(plan: &Plan, inputs: &Inputs<'_>) -> Result<Option<Self>, LaunchError> {
        let kept = inputs.kept.as_ref().and_then(|kept| kept.scratch.as_ref());
        let (Some((_, name)), Some(kept)) = (child_data::prestarted_program(plan, inputs), kept) else { return Ok(None) };
        let scratch = fcntl_dupfd_cloexec(kept, 0).map_err(LaunchError::system(ErrorKind::Prepare, "hold the session's scratch"))?;
        Ok(Some(ProgramFifo { scratch, name: name.to_owned() }))
    }
}

impl Drop for ProgramFifo {
    fn drop(&mut self) {
        let name = self.name.as_str();
        let is_fifo = |stat: Stat| FileType::from_raw_mode(stat.st_mode) == FileType::Fifo;
        if statat(&self.scratch, name, AtFlags::SYMLINK_NOFOLLOW).is_ok_and(is_fifo) {
            let _gone_meanwhile = unlinkat(&self.scratch, name, AtFlags::empty());
        }
    }
}

/// Lets an executor that has stood ready wake where there is room now: the CPUs of code with a
/// quota were chosen when it was set up. Which they may be; none where it stays.
fn unpin(handles: &SandboxHandles, cpus: usize) -> Option<CpuSet> {
    let usable = sched_getaffinity(None).ok().filter(|usable| (cpus as u64) < u64::from(usable.count()))?;
    // One that is still on its way chooses for itself.
    let has_chosen = is_readable(&handles.handover).unwrap_or(false);
    (has_chosen && sched_setaffinity(Pid::from_raw(handles.sandbox.pid()), &usable).is_ok()).then_some(usable)
}
