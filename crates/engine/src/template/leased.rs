//! The templates that a worker of a service was given.
//!
//! The service makes their images and counts their runs: it lends an image for some runs at a time, so
//! that all workers together start no more than the policy allows. Whether an image is for the policy as
//! it is now is judged here, by the plan of a run. What to ask the service for is decided here and sent by the
//! worker; no image is made here.

use std::{
    cell::Cell,
    collections::BTreeMap,
    rc::Rc,
    time::{Duration, Instant},
};

use stockade_policy::plan::{MAIN, Plan};
use stockade_protocol::service::{TemplateOf, TemplateWanted};

use super::{Template, TemplateImage, make::plan_of_copies};
use crate::{LoadedPolicy, Options, pool::NotPrestarted};

/// So many are kept; the one that was used least recently goes for another.
const MAX_KEPT: usize = 16;
/// After this time the service is asked again: an answer may have found no room in the socket.
const ASK_AGAIN: Duration = Duration::from_secs(30);
/// So many images in a row that are not for the plan, and the template is refused.
const MAX_UNFIT: u32 = 2;

/// An image, and how much of it may be used.
#[derive(Debug)]
pub struct Lease {
    /// Its number at the service.
    pub number: u64,
    /// The image.
    pub image: TemplateImage,
    /// Copies that may be made.
    pub runs: u64,
    /// When it was made.
    pub since: Instant,
}

/// All that a worker has been lent. It is lent nothing that it has not asked for.
#[derive(Default)]
pub(crate) struct LeasedTemplates {
    all: BTreeMap<TemplateOf, Leased>,
    /// Counts the uses.
    clock: u64,
}

#[derive(Default)]
struct Leased {
    /// The policy that all the rest is for, and when it was seen for the first time.
    policy: Option<(String, Instant)>,
    /// How a copy is started, or why none may be.
    plan: Option<Result<Rc<Plan>, String>>,
    /// What copies are made of.
    current: Option<Current>,
    /// Replaces `current` when that is used up or too old.
    next: Option<Lease>,
    /// Why there is none, and since when that is known.
    refused: Option<(String, Instant)>,
    /// The age at which an image is made anew, and after which what was refused is tried again.
    max_age: Duration,
    /// An image that is of no use any more, which the service is to be told.
    unfit: Option<u64>,
    unfit_in_a_row: u32,
    /// When the service was asked, as long as it has not answered.
    asked: Option<Instant>,
    used: u64,
}

struct Current {
    number: u64,
    runs: u64,
    template: Rc<Template>,
}

impl LeasedTemplates {
    /// The template for a run, or why there is none.
    ///
    /// # Errors
    /// None was given yet, or it is refused.
    pub(crate) fn ready(&mut self, of: &TemplateOf, loaded: &LoadedPolicy, options: &Options) -> Result<Rc<Template>, NotPrestarted> {
        self.leased(of).ready(&of.runtime, loaded, options)
    }

    /// What is had of a template, which now is the one that was used last.
    fn leased(&mut self, of: &TemplateOf) -> &mut Leased {
        self.clock += 1;
        if !self.all.contains_key(of) && self.all.len() >= MAX_KEPT {
            let oldest = self.all.iter().min_by_key(|(_, leased)| leased.used).map(|(of, _)| of.clone());
            oldest.map(|oldest| self.all.remove(&oldest));
        }
        let leased = self.all.entry(of.clone()).or_default();
        leased.used = self.clock;
        leased
    }

    /// The request to send to the supervisor; `None`: there is nothing to ask for, or it was sent already.
    pub(crate) fn wanted(&mut self, of: &TemplateOf, key: &str) -> Option<TemplateWanted> {
        let leased = self.all.get_mut(of)?;
        leased.drop_outdated();
        leased.wants_more().then(|| {
            leased.asked = Some(Instant::now());
            TemplateWanted { of: of.clone(), key: key.to_owned(), unfit: leased.unfit.take(), has_one: leased.usable().is_some() }
        })
    }

    /// What the service has lent.
    pub(crate) fn give(&mut self, of: &TemplateOf, lease: Lease) {
        let leased = self.leased(of);
        (leased.asked, leased.refused) = (None, None);
        leased.next = Some(lease);
    }

    /// The service has none, for this reason. It is asked again after the time of [`Leased::max_age`].
    pub(crate) fn refuse(&mut self, of: &TemplateOf, why: String) {
        if let Some(leased) = self.all.get_mut(of) {
            (leased.asked, leased.current, leased.next) = (None, None, None);
            leased.refused = Some((why, Instant::now()));
        }
    }

    /// Asks anew for all of them: the settings of the service are others.
    pub(crate) fn forget(&mut self) {
        self.all.clear();
    }
}

impl Leased {
    fn ready(&mut self, runtime: &str, loaded: &LoadedPolicy, options: &Options) -> Result<Rc<Template>, NotPrestarted> {
        if self.policy.as_ref().is_none_or(|(sha256, _)| *sha256 != loaded.policy.sha256) {
            self.begin_policy(runtime, loaded);
        }
        let plan = self.plan.get_or_insert_with(|| {
            let plan = plan_of_copies(runtime, MAIN, loaded, options);
            plan.map(Rc::new).map_err(|why| why.to_string())
        });
        let plan = Rc::clone(plan.as_ref().map_err(|why| NotPrestarted::TemplateRefused(why.clone()))?);
        let renewed = self.renew(&plan);
        if let Some(template) = self.usable() {
            return Ok(Rc::clone(template));
        }
        renewed?;
        Err(match &self.refused {
            Some((why, _)) => NotPrestarted::TemplateRefused(why.clone()),
            None if self.current.take().is_some() => NotPrestarted::UsedUp,
            None if self.asked.is_some() => NotPrestarted::NoTemplateYet,
            None => NotPrestarted::TemplateNotBegun,
        })
    }

    /// Forgets what was of another policy. What was lent last may be of this one.
    fn begin_policy(&mut self, runtime: &str, loaded: &LoadedPolicy) {
        let max_age = loaded.policy.template_of(runtime).map_or(Duration::ZERO, |(_, template)| template.max_age);
        let unfit = self.current.as_ref().map(|current| current.number).or(self.unfit);
        *self = Leased {
            policy: Some((loaded.policy.sha256.clone(), Instant::now())),
            max_age,
            unfit,
            next: self.next.take(),
            asked: self.asked,
            used: self.used,
            ..Leased::default()
        };
    }

    /// What a copy can be made of.
    fn usable(&self) -> Option<&Rc<Template>> {
        self.current.as_ref().map(|current| &current.template).filter(|template| template.runs_left.get() > 0)
    }

    /// Where what copies are made of is used up or too old, takes what was lent for then.
    ///
    /// # Errors
    /// That is no image for this plan.
    fn renew(&mut self, plan: &Rc<Plan>) -> Result<(), NotPrestarted> {
        let is_due = self.current.as_ref().is_none_or(|current| current.template.is_used_up());
        let Some(Lease { number, image, runs, since }) = self.next.take_if(|_| is_due) else { return Ok(()) };
        if !image.is_for(plan) {
            self.unfit = Some(number);
            // One that was made before this policy was there says nothing about the next.
            self.unfit_in_a_row += u32::from(self.policy.as_ref().is_some_and(|(_, seen)| since >= *seen));
            if self.unfit_in_a_row >= MAX_UNFIT {
                let why = "the process that makes it finds another policy, or another host, than this one";
                self.refused = Some((why.to_owned(), Instant::now()));
            }
            return Err(NotPrestarted::OtherPolicy);
        }
        self.unfit_in_a_row = 0;
        let (plan, max_age) = (Rc::clone(plan), self.max_age);
        let template = Rc::new(Template { image, stem: None, plan, since, max_age, runs_left: Cell::new(runs) });
        self.current = Some(Current { number, runs, template });
        Ok(())
    }

    /// An image of files that are others by now is of no use.
    fn drop_outdated(&mut self) {
        if let Some(current) = self.current.take_if(|current| !current.template.is_current()) {
            // What was lent for then may be of the same files.
            self.next = None;
            self.unfit = Some(current.number);
        }
    }

    fn wants_more(&self) -> bool {
        let is_low =
            |Current { template, runs, .. }: &Current| template.is_too_old() || template.runs_left.get().saturating_mul(2) <= *runs;
        let has_plan = !matches!(self.plan, Some(Err(_)));
        let is_refused = self.refused.as_ref().is_some_and(|(_, since)| since.elapsed() < self.max_age);
        let is_asked = self.asked.is_some_and(|asked| asked.elapsed() < ASK_AGAIN);
        has_plan && !is_refused && !is_asked && self.next.is_none() && self.current.as_ref().is_none_or(is_low)
    }
}
