//! A sandbox that stands ready, or is on its way there by itself, and waits for its job.
//!
//! [`set_up`] puts every layer in place that a plan has, and does not wait for the child,
//! which goes on until it is the executor. From there on it does nothing until [`run`]. How
//! long that is makes no difference: everything that the receipt tells is read, and what was
//! mounted is looked for, when the job has come. Whether a later plan may be run in it is not
//! judged here ([`Plan::is_set_up_like`] does).

use rustix::{
    fd::{AsFd, BorrowedFd, OwnedFd},
    process::Pid,
    thread::{CpuSet, sched_getaffinity, sched_setaffinity},
};
use stockade_policy::plan::Plan;

use crate::{
    Embryo, Inputs, LaunchError, Outcome, Remains, Stdin, What, cgroup, egress,
    embryo::Laid,
    identity, layers,
    prepared::{self, LauncherPipes},
    registry::Record,
    relay::is_readable,
    supervise::{self, Begun, JOB_DEADLINE, SETUP_DEADLINE},
};

/// See the module. Whatever becomes of it, dropping it leaves nothing behind.
pub struct Waiting {
    begun: Begun,
    /// None where the job was handed in already.
    job: Option<OwnedFd>,
    pipes: LauncherPipes,
    /// What the session keeps, to see how full it is.
    tmp: Option<OwnedFd>,
    // Last: it says what to remove if the rest is not.
    record: Option<Record>,
}

impl Waiting {
    /// Whether it is alive and nothing has failed, as far as is known.
    pub fn is_sound(&self) -> bool {
        let quiet = |fd| is_readable(fd).is_ok_and(|readable| !readable);
        quiet(self.end()) && quiet(self.begun.status_read.as_fd())
    }

    /// What becomes readable when it has ended, which nobody has told it to.
    pub fn end(&self) -> BorrowedFd<'_> {
        self.begun.sandbox.child.pidfd.as_fd()
    }

    /// The run's place in the registry.
    pub fn record(&mut self) -> Option<&mut Record> {
        self.record.as_mut()
    }
}

/// Sets the sandbox that was begun up for a plan. Takes of the inputs what belongs to the
/// sandbox; what belongs to the run stays in them.
///
/// # Errors
/// Something could not be put in place. Nothing is left behind.
pub fn set_up(plan: &Plan, inputs: &mut Inputs<'_>, embryo: Embryo) -> Result<Waiting, LaunchError> {
    put_up(plan, inputs, embryo, Job::ComesLater)
}

/// Sets the sandbox that was begun up for a plan, and runs the plan in it. What then still
/// stands of it goes when that is dropped.
///
/// # Errors
/// Something could not be put in place. Nothing of the payload has run, and nothing is
/// left behind.
pub fn launch(plan: &Plan, mut inputs: Inputs<'_>, embryo: Embryo) -> Result<(Outcome, Remains), LaunchError> {
    let waiting = put_up(plan, &mut inputs, embryo, Job::IsKnown)?;
    run(plan, inputs, waiting)
}

/// Whether the job can be handed in while the child works.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Job {
    IsKnown,
    ComesLater,
}

fn put_up(plan: &Plan, inputs: &mut Inputs<'_>, mut embryo: Embryo, job: Job) -> Result<Waiting, LaunchError> {
    let mut record = inputs.record.take();
    let layers = layers::Layers::of_environment();
    #[cfg_attr(not(feature = "ablation"), expect(clippy::needless_borrow, reason = "it may be another plan in a build for tests"))]
    let plan: &Plan = &layers.applied_to(plan);
    if !embryo.fits(plan) {
        return Err(LaunchError::other(What::Clone, String::from("the sandbox was begun for another plan")));
    }
    if embryo.laid.is_none() {
        embryo.lay(plan.foundation());
    }
    // The last is dropped first: a signal that was held back may end this process, so it
    // comes through when the sandbox is gone.
    let Embryo { signals, handover, status_read, cgroup, user_namespaces: _, laid, sandbox } = embryo;
    // An early return kills the child, which waits for our word.
    let put_in_place = || -> Result<_, LaunchError> {
        let (_, laid) = laid.ok_or_else(|| LaunchError::other(What::Prepare, String::from("the sandbox was not begun")))?;
        let Laid { proc, lifeline } = laid?;
        let (prepared, trees) = prepared::Prepared::new(plan, inputs)?;
        sandbox.let_build(prepared, &trees, &handover)?;
        // What the child does not need yet comes beside its mounts: the idmap and v1 cgroups
        // cost as much.
        let scratch = inputs.scratch.as_mut().and_then(|opened| Some((opened.tree.take()?, opened.facts.owner)));
        let idmap = |(tree, owner): &(OwnedFd, _)| {
            let attempt = format!("idmap scratch {}", plan.scratch.path.display());
            identity::idmap(tree, *owner, plan.identity.outside).map_err(|errno| LaunchError::system(What::Idmap, &attempt, errno))
        };
        // Reaped when the child has its last word.
        let _holder = scratch.as_ref().filter(|_| plan.identity.idmapped_to.is_some()).map(idmap).transpose()?;
        let (kept, tmp) = inputs.kept.take().map(|kept| (kept.scratch, kept.tmp)).unzip();
        let (for_executor, pipes) = prepared::for_executor(plan, inputs)?;
        // While it is in the outer user namespace, which this looks at: it leaves that after the
        // next word.
        let outer = identity::check_maps(plan, proc)?;
        sandbox.let_pivot(&for_executor, scratch.map(|(tree, _)| tree).or(kept.flatten()).as_ref(), &handover)?;
        let cgroup = cgroup::complete(plan, cgroup, record.as_mut())?;
        sandbox.let_enter(cgroup.tasks()?.iter().map(AsFd::as_fd), &handover)?;
        // It has long to go now.
        if job == Job::IsKnown {
            prepared::hand_in_job(&for_executor.job, &lifeline, plan, inputs)?;
        }
        outer.proc.forgo_oom_exemption().map_err(|errno| LaunchError::system(What::Cgroup, "raise oom_score_adj to 0", errno))?;
        Ok((cgroup, outer, lifeline, for_executor.job, pipes, tmp))
    };
    // A child that failed first is the cause of what failed here.
    let cause = |error, status: &OwnedFd| supervise::failure_of_child(plan, status).unwrap_or(error);
    let (cgroup, outer, lifeline, file, pipes, tmp) = put_in_place().map_err(|error| cause(error, &status_read))?;
    let mut begun =
        Begun { sandbox, cgroup, outer, gate: None, lifeline, status_read, handover, roams: None, patience: SETUP_DEADLINE, signals };
    if let Some(egress) = &plan.egress {
        // Beside the child's last steps, none of which needs the network. The program waits
        // for one word more, which comes when the gate has said that it is confined.
        let gate = egress::begin(plan, egress, &begun.handover).map_err(|error| cause(error, &begun.status_read))?;
        begun.gate = Some(gate);
    }
    Ok(Waiting { begun, job: (job == Job::ComesLater).then_some(file), pipes, tmp, record })
}

/// Runs a plan in the sandbox that was set up for it. What then still stands of it goes when
/// that is dropped.
///
/// # Errors
/// The program was not started. Nothing of it has run, and nothing is left behind.
pub fn run(plan: &Plan, inputs: Inputs<'_>, waiting: Waiting) -> Result<(Outcome, Remains), LaunchError> {
    let Waiting { record, tmp, pipes, job, mut begun } = waiting;
    let layers = layers::Layers::of_environment();
    #[cfg_attr(not(feature = "ablation"), expect(clippy::needless_borrow, reason = "it may be another plan in a build for tests"))]
    let plan: &Plan = &layers.applied_to(plan);
    if matches!(inputs.stdin, Stdin::Null) != pipes.stdin.is_none() {
        let message = String::from("the sandbox and what is to be run in it disagree on there being a stdin");
        return Err(LaunchError::other(What::Prepare, message));
    }
    if let Some(job) = job {
        begun.patience = JOB_DEADLINE;
        begun.roams = let_roam(&begun, plan.cpus);
        let handed_in = prepared::hand_in_job(&job, &begun.lifeline, plan, &inputs);
        handed_in.map_err(|error| supervise::failure_of_child(plan, &begun.status_read).unwrap_or(error))?;
    }
    supervise::supervise(plan, Inputs { record, ..inputs }, begun, pipes, tmp)
}

/// Lets an executor that has stood ready wake where there is room now: the CPUs of code with a
/// quota were chosen when it was set up. Which they may be; none where it stays.
fn let_roam(begun: &Begun, cpus: usize) -> Option<CpuSet> {
    let usable = sched_getaffinity(None).ok().filter(|usable| (cpus as u64) < u64::from(usable.count()))?;
    // One that is still on its way chooses for itself.
    let has_chosen = is_readable(&begun.handover).unwrap_or(false);
    (has_chosen && sched_setaffinity(Pid::from_raw(begun.sandbox.pid()), &usable).is_ok()).then_some(usable)
}
