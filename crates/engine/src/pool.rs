//! Sandboxes that are set up before the request for them comes.
//!
//! [`Pool::take`] is all that a run knows of them. Behind it stands a session's next sandbox:
//! it is admitted and set up as for a request without options, while the client thinks. A
//! request is admitted by itself, as if there were none, and takes it only where every part of
//! the plan is in force already, and every path of the host that the plan shows, or covers in a
//! scratch, is still the same file or directory. Else that sandbox is ended, unused.

use std::{collections::BTreeMap, path::PathBuf};

use rustix::fd::BorrowedFd;
use stockade_launcher::{ErrorKind, LaunchError, OpenedScratch, Streams, WaitingSandbox};
use stockade_policy::plan::{Plan, UserNamespaces};
use stockade_protocol::{Request, step::Step};

use crate::{
    Admission, LoadedPolicy, Options, Origin, Purpose, Refusal,
    admit::RunSandbox,
    facts::{FileId, scratch_id},
    session::SessionState,
};

/// Which file or directory each path of the host is that a plan shows.
pub(crate) type PathIds = BTreeMap<PathBuf, Option<FileId>>;

/// A host scratch that holds more is not looked through once more for every request: that
/// would soon cost more than a sandbox.
const MAX_ENTRIES: u64 = 1024;

/// At most one prepared sandbox, which the next request of a session may take.
#[derive(Default)]
pub(crate) struct Pool {
    prepared: Option<PreparedSandbox>,
}

struct PreparedSandbox {
    plan: Plan,
    seen: PathIds,
    /// The host scratch that is mounted in it.
    scratch: Option<FileId>,
    /// What is covered in that, path by path. A cover goes with its file where somebody on the
    /// host renames that, so that two that change their names change their protection, while
    /// the plan stays the same.
    covered: Vec<Option<FileId>>,
    ready: WaitingSandbox,
}

impl Pool {
    /// Whether nothing is prepared.
    pub(crate) fn is_empty(&self) -> bool {
        self.prepared.is_none()
    }

    /// Prepares a sandbox for a request in this language. Nothing is prepared where such a
    /// request would be refused, or would not take it.
    pub(crate) fn prepare(&mut self, language: Option<String>, state: &SessionState, loaded: &LoadedPolicy, options: &Options) {
        self.prepared = PreparedSandbox::new(language, state, loaded, options).ok().flatten();
    }

    /// What becomes readable when what is prepared has ended by itself.
    pub(crate) fn end(&self) -> Option<BorrowedFd<'_>> {
        self.prepared.as_ref().map(|prepared| prepared.ready.end())
    }

    /// The prepared sandbox, for a run of this plan, that shows `seen` and `scratch` of the
    /// host. None where it is not what the plan asks for, or has ended meanwhile; it is ended
    /// then.
    pub(crate) fn take(&mut self, plan: &Plan, seen: &PathIds, scratch: Option<&OpenedScratch>) -> Option<WaitingSandbox> {
        let PreparedSandbox { plan: own, seen: own_seen, scratch: own_scratch, covered, ready } = self.prepared.take()?;
        let same_scratch = scratch.map(OpenedScratch::file_id).transpose().is_ok_and(|id| id == own_scratch);
        let same_covered = covered == scratch.map_or(&[][..], OpenedScratch::file_ids);
        let fits = same_scratch && same_covered && own_seen == *seen && plan.is_set_up_like(&own) && ready.is_sound();
        fits.then_some(ready)
    }
}

impl PreparedSandbox {
    fn new(language: Option<String>, state: &SessionState, loaded: &LoadedPolicy, options: &Options) -> Result<Option<Self>, Refusal> {
        // The gate is of one run, and begins with it.
        if !loaded.policy.egress.whitelist.is_empty() {
            return Ok(None);
        }
        let request = Request { language, ..Request::default() };
        let origin = Origin::Session { request: Some(&request), state };
        let mut admission = Admission::admit(origin, loaded, options, Purpose::Prepare, Pool::default())?;
        let large = admission.scratch().is_some_and(|scratch| scratch.entries() > MAX_ENTRIES);
        let covered = admission.scratch().map_or(Vec::new(), |scratch| scratch.file_ids().to_vec());
        if large || covered.contains(&None) || admission.plan.identity.user_namespaces != UserNamespaces::Nested {
            return Ok(None);
        }
        let seen = std::mem::take(&mut admission.seen);
        let scratch = admission.scratch().map(scratch_id).transpose()?;
        let (plan, mut inputs, sandbox) = admission.into_parts(Streams::Capture)?;
        let RunSandbox::Init(init) = sandbox else { return Ok(None) };
        inputs.meanwhile.take().into_iter().for_each(|sweep| sweep());
        let mut ready = init.setup(&plan, &mut inputs)?;
        ready.keep_prepared();
        Ok(Some(PreparedSandbox { plan, seen, scratch, covered, ready }))
    }
}

/// Whether a sandbox that was set up before its run may be to blame for an error, and not
/// the request: then another one is tried.
pub(crate) fn may_be_to_blame(error: &LaunchError) -> bool {
    !matches!(error.kind(), ErrorKind::Step(Step::WriteFile | Step::WriteProgram | Step::ExecPayload))
}
