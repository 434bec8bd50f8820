//! A sandbox of a session that is set up before the request for it comes.
//!
//! Whoever thinks between two requests has the next sandbox made meanwhile. It is admitted
//! and set up as for a request without options. The request that comes is admitted by
//! itself, as if there were none, and takes it only where every part of the plan is the same
//! that is already in force, and every path of the host that the plan shows, or covers in a scratch,
//! is still the same file or directory. Else it is ended, unused, and the request gets a sandbox of its own.

use std::{collections::BTreeMap, path::PathBuf};

use rustix::fd::BorrowedFd;
use stockade_launcher::{LaunchError, OpenedScratch, Streams, Waiting, What, set_up};
use stockade_policy::plan::{Plan, UserNamespaces};
use stockade_protocol::{Request, step::Step};

use crate::{Admission, Ahead, Ask, Loaded, Options, Purpose, Refusal, admit::Begun, facts::Number, session::Kept};

/// Which file or directory each path of the host is that a plan shows.
pub(crate) type Seen = BTreeMap<PathBuf, Option<Number>>;

/// A host scratch that holds more is not looked through once more for every request: that
/// would soon cost more than a sandbox.
const MOST_ENTRIES: u64 = 1024;

/// See the module.
pub(crate) struct Spare {
    plan: Plan,
    seen: Seen,
    /// The host scratch that is mounted in it.
    scratch: Option<Number>,
    /// What is covered in that, path by path. A cover goes with its file where somebody on the
    /// host renames that, so that two that change their names change their protection, while
    /// the plan stays the same.
    covered: Vec<Option<Number>>,
    waiting: Waiting,
}

impl Spare {
    /// Sets one up for a request in this language; none where a request would not take it.
    ///
    /// # Errors
    /// Such a request would be refused too.
    pub(crate) fn set_up(language: Option<String>, kept: &Kept, loaded: &Loaded, options: &Options) -> Result<Option<Self>, Refusal> {
        // The gate is of one run, and begins with it.
        if !loaded.policy.egress.whitelist.is_empty() {
            return Ok(None);
        }
        let request = Request { language, ..Request::default() };
        let ask = Ask::Session { request: Some(&request), kept };
        let mut admission = Admission::new(ask, loaded, options, Purpose::Spare, Ahead::default())?;
        let large = admission.scratch().is_some_and(|scratch| scratch.entries() > MOST_ENTRIES);
        let covered = admission.scratch().map_or(Vec::new(), |scratch| scratch.numbers().to_vec());
        if large || covered.contains(&None) || admission.plan.identity.user_namespaces != UserNamespaces::Nested {
            return Ok(None);
        }
        let seen = std::mem::take(&mut admission.seen);
        let scratch = admission.scratch().map(OpenedScratch::number).transpose().map_err(unknown_scratch)?;
        let (plan, mut inputs, begun) = admission.into_parts(Streams::Capture)?;
        let Begun::Embryo(embryo) = begun else { return Ok(None) };
        inputs.meanwhile.take().into_iter().for_each(|sweep| sweep());
        let waiting = set_up(&plan, &mut inputs, embryo)?;
        Ok(Some(Spare { plan, seen, scratch, covered, waiting }))
    }

    /// What becomes readable when it has ended by itself.
    pub(crate) fn end(&self) -> BorrowedFd<'_> {
        self.waiting.end()
    }

    /// The sandbox, for a run of this plan; none where it is not what the plan asks for, or
    /// has ended meanwhile.
    pub(crate) fn for_run(self, plan: &Plan, seen: &Seen, scratch: Option<&OpenedScratch>) -> Option<Waiting> {
        let same_scratch = scratch.map(OpenedScratch::number).transpose().is_ok_and(|number| number == self.scratch);
        let same_covered = self.covered == scratch.map_or(&[][..], OpenedScratch::numbers);
        let fits = same_scratch && same_covered && self.seen == *seen && plan.is_set_up_like(&self.plan) && self.waiting.is_sound();
        fits.then_some(self.waiting)
    }
}

/// Whether a sandbox that was set up before its run may be to blame for an error, and not
/// the request: then another one is tried.
pub(crate) fn may_be_to_blame(error: &LaunchError) -> bool {
    !matches!(error.what, What::Step(Step::WriteFile | Step::WriteProgram | Step::ExecPayload))
}

fn unknown_scratch(errno: rustix::io::Errno) -> Refusal {
    Refusal::sandbox_error("scratch_failed", format!("the scratch cannot be told from others: {errno}"))
}
