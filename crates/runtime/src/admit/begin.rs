//! The sandbox of a run while that is admitted.
//!
//! Making it takes as long as admitting does, so it is begun first of all that is done on the
//! host, and has the foundation laid that the policy alone decides. What was begun so is used
//! only if it is what the plan asks for, and else ended before another is begun. Whether the
//! run may be is not decided here.

use stockade_launcher::{
    Embryo, Inputs, LaunchError, OpenedScratch, Outcome, Remains, V2Parent, Waiting,
    registry::{Record, Registry},
};
use stockade_policy::{
    facts::{CgroupFacts, HostFacts},
    plan::{Draft, Foundation, Mode, Plan, UserNamespaces},
};

use super::{Purpose, StdinBytes, rights::claim_record};
use crate::{
    Ahead, Refusal,
    caller::Identity,
    facts,
    session::Kept,
    spare::{Seen, Spare},
};

/// How far the sandbox of a run is.
pub enum Begun {
    /// It waits to be set up.
    Embryo(Embryo),
    /// It waits for its job.
    Waiting(Waiting),
}

impl Begun {
    /// Sets it up, where that is still to be done, and runs the plan in it. What then still
    /// stands of it goes when that is dropped.
    ///
    /// # Errors
    /// The program was not started.
    pub fn run(self, plan: &Plan, inputs: Inputs<'_>) -> Result<(Outcome, Remains), LaunchError> {
        match self {
            Begun::Embryo(embryo) => stockade_launcher::launch(plan, inputs, embryo),
            Begun::Waiting(waiting) => stockade_launcher::run(plan, inputs, waiting),
        }
    }
}

/// See the module.
pub(super) struct Beginning<'a> {
    identity: &'a Identity,
    purpose: Purpose,
    /// The run gets a directory of the host, in which something of it could stay.
    host_scratch: bool,
    /// That it could not be made is said if nothing is found wrong with the request.
    embryo: Option<Result<Embryo, LaunchError>>,
    spare: Option<Spare>,
    record: Option<Record>,
    /// Where the record is, until what others have left there is cleared away.
    unswept: Option<Registry>,
}

/// A sandbox that is fit for its plan.
pub(super) struct Fitted {
    /// None where the run was only planned.
    pub(super) begun: Option<Result<Begun, LaunchError>>,
    /// Its place in the registry, where it has not brought its own.
    pub(super) record: Option<Record>,
    /// Where that is, if what killed launchers have left there is still to be cleared away.
    pub(super) unswept: Option<Registry>,
}

impl<'a> Beginning<'a> {
    /// Begins the sandbox, where nothing must come before that. `ahead`: what was begun already.
    pub(super) fn new(identity: &'a Identity, purpose: Purpose, host_scratch: bool, ahead: Ahead) -> Self {
        let Ahead { embryo, spare } = ahead;
        let mut beginning = Beginning { identity, purpose, host_scratch, embryo, spare, record: None, unswept: None };
        if beginning.makes_one() && beginning.embryo.is_none() && !facts::is_unified() {
            beginning.begin(UserNamespaces::Nested, None);
        }
        beginning
    }

    /// Has it lay the foundation that is foreseen, and reads what the host offers meanwhile. On
    /// cgroup v2 that is what it can be begun by. Claims its place in the registry. `kept`: of
    /// the session, whose id its runs have.
    ///
    /// # Errors
    /// The host does not say what it offers, or the registry cannot be had.
    pub(super) fn lay(&mut self, draft: &Draft<'_>, kept: Option<&Kept>) -> Result<HostFacts, Refusal> {
        // Of root's runs the id comes from there. A spare has its own.
        let (own, id_of_record) = (self.spare.is_none(), self.identity.privileged);
        if own && id_of_record {
            self.claim()?;
        }
        let unique = facts::unique_id(self.identity, kept.and_then(Kept::record).or(self.record.as_ref()))?;
        let foreseen = self.foresee(draft, unique.id);
        self.lay_ahead(foreseen.as_ref());
        if own && !id_of_record {
            self.claim()?;
        }
        let mut host = facts::read(self.identity, unique)?;
        // The cgroup comes first, and with it a new beginning.
        if self.makes_one() && (self.embryo.is_none() || matches!(host.cgroup, CgroupFacts::V2 { .. })) {
            self.begin(UserNamespaces::Nested, Some(&host.cgroup));
            self.lay_ahead(foreseen.as_ref());
        }
        if self.identity.privileged && self.spare.is_none() && !matches!(self.embryo, Some(Ok(_))) {
            host.user_namespace_refusal = stockade_launcher::user_namespace_refusal();
        }
        Ok(host)
    }

    /// The sandbox for this plan. `seen`, `scratch`: what the plan shows of the host.
    ///
    /// # Errors
    /// The registry cannot be had.
    pub(super) fn fit(
        mut self,
        plan: &Plan,
        seen: &Seen,
        scratch: Option<&OpenedScratch>,
        stdin: &StdinBytes<'_>,
        cgroup: &CgroupFacts,
    ) -> Result<Fitted, Refusal> {
        let stood_ready = self.spare.is_some();
        let spare = self.spare.take().filter(|_| matches!(stdin, StdinBytes::Null));
        let mut begun = match spare.and_then(|spare| spare.for_run(plan, seen, scratch)) {
            Some(waiting) => Some(Ok(Begun::Waiting(waiting))),
            None => {
                // One that was not taken is gone, and with it its record.
                if stood_ready {
                    self.claim()?;
                }
                if self.purpose.claims() && (stood_ready || self.is_unfit(plan)) {
                    self.begin(plan.identity.user_namespaces, Some(cgroup));
                }
                self.embryo.take().map(|embryo| embryo.map(Begun::Embryo))
            }
        };
        let record = match &mut begun {
            Some(Ok(Begun::Waiting(waiting))) => waiting.record(),
            _ => self.record.as_mut(),
        };
        let writes_program = plan.scratch.host && matches!(self.purpose, Purpose::Run | Purpose::RunAfterRefusedIdmap);
        if let (Some(record), Some((directory, name)), true) = (record, &plan.program_file, writes_program) {
            record.note_program(&directory.join(name))?;
        }
        Ok(Fitted { begun, record: self.record, unswept: self.unswept })
    }

    /// Whether the run is in need of a sandbox that is begun for it.
    fn makes_one(&self) -> bool {
        self.purpose.claims() && self.spare.is_none()
    }

    fn claim(&mut self) -> Result<(), Refusal> {
        (self.record, self.unswept) = claim_record(self.identity, self.host_scratch, self.purpose.claims())?.unzip();
        Ok(())
    }

    /// Begins it anew; on cgroup v2 in a cgroup of its own.
    fn begin(&mut self, user_namespaces: UserNamespaces, cgroup: Option<&CgroupFacts>) {
        // Before another is begun: what it holds back of signals is let go with it.
        self.embryo = None;
        let v2 = match cgroup {
            Some(CgroupFacts::V2 { parent, vacate }) => Some(V2Parent { path: parent, vacate: *vacate }),
            _ => None,
        };
        self.embryo = Some(Embryo::begin(self.identity.privileged, user_namespaces, v2, self.record.as_mut()));
    }

    /// What the plan's foundation will be, unless the host or the request makes an exception. Not
    /// where the run has no host id of its own: then it depends on the scratch who it is.
    fn foresee(&self, draft: &Draft<'_>, unique: Option<u32>) -> Option<Foundation> {
        let (mode, outside) = match self.purpose {
            Purpose::Plan | Purpose::RunAfterRefusedIdmap => return None,
            Purpose::Run | Purpose::Spare if self.identity.privileged => (Mode::Root, unique.map(|id| (id, id))?),
            Purpose::Run | Purpose::Spare => (Mode::Rootless, (self.identity.caller.uid, self.identity.caller.gid)),
        };
        Some(draft.foundation(mode, outside))
    }

    fn lay_ahead(&mut self, foreseen: Option<&Foundation>) {
        if let (Some(Ok(embryo)), Some(foundation)) = (&mut self.embryo, foreseen) {
            embryo.lay_ahead(foundation);
        }
    }

    /// Without user namespaces, which were refused then, or with another limit than the
    /// policy's, the plan is not the one for which the sandbox was begun.
    fn is_unfit(&self, plan: &Plan) -> bool {
        match &self.embryo {
            Some(Ok(embryo)) => !embryo.fits(plan),
            Some(Err(_)) => plan.identity.user_namespaces == UserNamespaces::Missing,
            None => false,
        }
    }
}
