//! The sandbox of a run, while the run is admitted.
//!
//! Its init process is spawned as soon as the caller may have one, and makes its namespaces
//! while the host is read and the plan is made; where a prepared sandbox may fit, none is
//! spawned before that is known. Whether the run is allowed is not decided here.

use stockade_launcher::{
    InitProcess, Inputs, LaunchError, Outcome, Teardown, WaitingSandbox,
    registry::{PROGRAM_PREFIX, Record},
};
use stockade_policy::{
    facts::{CgroupFacts, HostFacts},
    plan::Plan,
};

use super::{Purpose, rights::claim_record};
use crate::{Refusal, caller::Identity, facts};

/// How far the sandbox of a run is.
pub enum RunSandbox {
    /// It waits for its plan.
    Init(Box<InitProcess>),
    /// It waits for its job.
    Waiting(Box<WaitingSandbox>),
}

impl RunSandbox {
    /// The run's place in the registry.
    pub(crate) fn record<'r>(&'r mut self, inputs: &'r mut Inputs<'_>) -> Option<&'r mut Record> {
        match self {
            RunSandbox::Init(_) => inputs.record.as_mut(),
            RunSandbox::Waiting(waiting) => waiting.record(),
        }
    }

    /// Sets the sandbox up, where that is still to be done, and runs the plan in it. Dropping
    /// the teardown removes what is left of it: processes, cgroup, mounts, record.
    ///
    /// # Errors
    /// The program was not started.
    pub fn run(self, plan: &Plan, mut inputs: Inputs<'_>) -> Result<(Outcome, Teardown), LaunchError> {
        let ready = match self {
            RunSandbox::Init(init) => init.setup(plan, &mut inputs)?,
            RunSandbox::Waiting(waiting) => *waiting,
        };
        ready.run(plan, inputs)
    }
}

/// What of a run stands on the host while its plan is made.
pub(super) struct SandboxBuilder<'a> {
    identity: &'a Identity,
    purpose: Purpose,
    /// It does without no place in the registry: it gets a directory of the host, in which
    /// something of it could stay, or its loss must be written down.
    needs_record: bool,
    /// A prepared sandbox may fit.
    may_be_prepared: bool,
    cgroup: CgroupFacts,
    /// That it could not be spawned is said if nothing is found wrong with the request.
    init: Option<Result<InitProcess, LaunchError>>,
    pub(super) record: Option<Record>,
    /// Whether the registry is still to be swept of what killed launchers have left.
    pub(super) unswept: bool,
}

impl<'a> SandboxBuilder<'a> {
    /// Claims the run's place in the registry and spawns the init process; neither where a
    /// prepared sandbox may fit, which has both.
    ///
    /// # Errors
    /// The registry cannot be had, or the host does not say what cgroups it offers.
    pub(super) fn new(identity: &'a Identity, purpose: Purpose, needs_record: bool, may_be_prepared: bool) -> Result<Self, Refusal> {
        let cgroup = facts::cgroup_facts()?;
        let mut builder =
            SandboxBuilder { identity, purpose, needs_record, may_be_prepared, cgroup, init: None, record: None, unswept: false };
        if !may_be_prepared {
            builder.spawn()?;
        }
        Ok(builder)
    }

    fn spawn(&mut self) -> Result<(), Refusal> {
        let claims = self.purpose.claims();
        self.record = claim_record(self.identity, self.needs_record, claims, &self.cgroup)?;
        self.unswept = self.record.is_some();
        self.init = claims.then(|| stockade_launcher::spawn(self.identity.privileged, &self.cgroup, self.record.as_mut()));
        Ok(())
    }

    /// Reads what the host offers, while the init process makes its namespaces. `uid_of`: whose uid
    /// the run has, if not its own.
    ///
    /// # Errors
    /// The host does not say what it offers.
    pub(super) fn read_host(&self, uid_of: Option<&Record>) -> Result<HostFacts, Refusal> {
        let unique = facts::unique_id(self.identity, uid_of.or(self.record.as_ref()))?;
        let mut host = facts::read(self.identity, unique, self.cgroup.clone())?;
        host.user_namespace_refusal = match &self.init {
            Some(Ok(init)) => init.user_namespace_refusal().map(String::from),
            _ if self.identity.privileged && !self.may_be_prepared => stockade_launcher::user_namespace_refusal(),
            _ => None,
        };
        Ok(host)
    }

    /// The sandbox for a plan: the prepared one, else the one that was spawned. None where the
    /// run was only planned.
    ///
    /// # Errors
    /// The registry cannot be had.
    pub(super) fn sandbox(
        &mut self,
        plan: &Plan,
        prepared: Option<WaitingSandbox>,
    ) -> Result<Option<Result<RunSandbox, LaunchError>>, Refusal> {
        let mut sandbox = match prepared {
            Some(waiting) => Some(Ok(RunSandbox::Waiting(Box::new(waiting)))),
            None => {
                if self.may_be_prepared {
                    self.spawn()?;
                }
                self.init.take().map(|init| init.map(|init| RunSandbox::Init(Box::new(init))))
            }
        };
        let record = match &mut sandbox {
            Some(Ok(RunSandbox::Waiting(waiting))) => waiting.record(),
            _ => self.record.as_mut(),
        };
        let writes_program = plan.scratch.host && self.purpose == Purpose::Run;
        // One that the request has named may be another's file by the time of a sweep: it is
        // noted by its inode, when it is made.
        let named = plan.program_file.as_ref().filter(|(_, name)| name.starts_with(PROGRAM_PREFIX));
        if let (Some(record), Some((directory, name)), true) = (record, named, writes_program) {
            record.note_program(&directory.join(name))?;
        }
        Ok(sandbox)
    }
}
