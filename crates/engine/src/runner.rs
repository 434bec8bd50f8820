//! The runs of a service's worker, one after the other, and the sandbox of the next.
//!
//! Every request is a whole run of its own, as that of `exec`: it is parsed, screened, admitted and
//! recorded by itself, in a scratch of its own, and the policy is read anew. What is prepared between
//! two of them has no request in it, and is taken only where it is what the next one asks for
//! (`pool.rs`). Which keys may use which policy, and how requests arrive, is not known here.

use std::{rc::Rc, time::Duration};

use rustix::fd::BorrowedFd;
use stockade_launcher::Client;
use stockade_policy::{model::SharedBy, plan::find_runtime};
use stockade_protocol::{
    NO_TEMPLATE, Report, Request, Stdin,
    service::{Prepared, ReadyFor, TemplateOf, TemplateWanted},
};

use crate::{
    Ahead, LoadedPolicy, Options, Origin, admit, answer, caller, compile, facts, load_policy,
    pool::{NotPrestarted, Pool},
    refuse_known,
    screen::SessionScreener,
    template::{Lease, LeasedTemplates, Template},
};

/// A prepared sandbox that has ended by itself sooner is not replaced before the next run: it would be
/// again and again.
const SHORT_LIFE: Duration = Duration::from_secs(1);

/// What the next request is expected to ask for.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Expected {
    key: String,
    policy: String,
    language: Option<String>,
    /// What it says of templates.
    template: Option<String>,
    has_stdin: bool,
}

impl Expected {
    /// A request like that, without a program.
    fn request(&self) -> Request {
        let stdin = self.has_stdin.then(|| Stdin::Text(String::new()));
        Request { language: self.language.clone(), stdin, ..Request::default() }
    }
}

/// Runs requests one after the other.
pub struct Runner {
    /// The next request's sandbox. First, so that it goes before all else.
    pool: Pool,
    /// Whose requests may take that, and of which template its copy is.
    prepared: Option<(Prepared, Option<TemplateOf>)>,
    /// None is prepared under this policy, of this hash, for this reason.
    never: Option<(String, String, NotPrestarted)>,
    /// The screener that stays.
    standing: SessionScreener,
    templates: LeasedTemplates,
    /// The policy of the last request, as it was then.
    loaded: Option<(String, Rc<LoadedPolicy>)>,
    /// As the last request.
    last: Option<Expected>,
    /// In place of that, from the beginning on.
    ready_for: Option<Expected>,
    base: Options,
}

impl Runner {
    /// One that has nothing prepared. `base`: what all its runs have in common.
    pub fn new(mut base: Options) -> Self {
        let identity = caller::identify(base.peer.as_ref());
        // Without one each run says by itself what is wrong.
        base.uid_of = identity.ok().and_then(|identity| facts::uid_for_all(&identity).ok().flatten());
        Runner {
            pool: Pool::default(),
            prepared: None,
            never: None,
            standing: SessionScreener::default(),
            templates: LeasedTemplates::default(),
            loaded: None,
            last: None,
            ready_for: None,
            base,
        }
    }

    /// What the runs of a key under a policy have fixed beforehand.
    pub fn options(&self, key: &str, policy: &str) -> Options {
        Options { policy: Some(policy.to_owned()), key: Some(key.to_owned()), ..self.base.clone() }
    }

    /// Runs one JSON request, for as long as its client waits. Always gives a result, which does not
    /// depend on what was prepared, but for what copies of a template have in common.
    pub fn run(&mut self, key: &str, policy: &str, request: &[u8], client: &mut dyn Client) -> Report {
        let options = self.options(key, policy);
        let (request, loaded) = (admit::parse_request(request), load_policy(&options).map(Rc::new));
        self.loaded = loaded.as_ref().ok().map(|loaded| (policy.to_owned(), Rc::clone(loaded)));
        let loaded = loaded.as_ref().map(|loaded| &**loaded);
        let request = match &request {
            Ok(request) => request,
            Err(refusal) => return refuse_known(refusal, loaded.ok(), &options),
        };
        let asks = Expected {
            key: key.to_owned(),
            policy: policy.to_owned(),
            language: request.language.clone(),
            template: request.template.clone(),
            has_stdin: request.stdin.is_some(),
        };
        let (_, template) = self.template_for(&asks, loaded.ok(), &options);
        let pool = match (&self.never, self.prepared.take()) {
            (_, Some((_, Some(TemplateOf { key: Some(other), .. })))) if other != key => {
                self.pool = Pool::default();
                Pool::never(NotPrestarted::AnotherKey)
            }
            (Some((of, sha256, why)), _)
                if of == policy && self.pool.is_empty() && loaded.is_ok_and(|loaded| loaded.policy.sha256 == *sha256) =>
            {
                Pool::never(why.clone())
            }
            _ => std::mem::take(&mut self.pool),
        };
        // The next one may wait as long.
        self.never.take_if(|(_, _, why)| *why == NotPrestarted::HeldImage);
        let ahead = Ahead { prepares: true, pool: pool.with(template), standing: Some(&self.standing), ..Ahead::default() };
        let report = answer(request, Origin::Request(request), loaded, &options, Some(client), ahead);
        if report.started {
            self.last = Some(asks);
        }
        report
    }

    /// Prepares a sandbox for a request like the last one, or for that which this is to be ready for;
    /// or replaces one whose interpreter has waited for long by one without, and one that has held an image
    /// for long by none. Where that fails, such a request gets the error when it comes. Not while a run
    /// goes on.
    pub fn prepare_next(&mut self) {
        let has_waited = self.pool.has_waited();
        let held_image = has_waited && self.pool.holds_image();
        if has_waited {
            // Whatever comes of the rest: it would be found to have waited again at once.
            (self.pool, self.prepared) = (Pool::default(), None);
        }
        let Some(expected) = self.expected().cloned() else { return };
        let options = self.options(&expected.key, &expected.policy);
        let Some(loaded) = self.policy(&options) else { return };
        if held_image {
            self.never = Some((expected.policy, loaded.policy.sha256.clone(), NotPrestarted::HeldImage));
            return;
        }
        if compile::compiled(&expected.request(), &loaded).is_some() {
            // It would take none.
            return;
        }
        let (of, template) = self.template_for(&expected, Some(&loaded), &options);
        let is_better = matches!(&template, Some(Ok(template)) if self.pool.gives_way_to(template));
        if !(self.pool.is_empty() || is_better) {
            return;
        }
        if self.never.as_ref().is_some_and(|(policy, sha256, _)| (policy, sha256) == (&expected.policy, &loaded.policy.sha256)) {
            return;
        }
        // Ended first: there are never two.
        (self.pool, self.prepared, self.never) = (Pool::default(), None, None);
        let held_back = has_waited.then_some(NotPrestarted::Waited);
        match Pool::prepare(&expected.request(), None, &loaded, &options, template, held_back) {
            Ok(Ok(pool)) => {
                // Any key may take what is no copy.
                let of = of.filter(|_| pool.is_copy());
                self.prepared = Some((described(&expected, &loaded, of.as_ref()), of));
                self.pool = pool;
            }
            Ok(Err(why)) => self.never = Some((expected.policy, loaded.policy.sha256.clone(), why)),
            // What has failed once may do the next time.
            Err(_) => {}
        }
        self.standing.start(&loaded.policy, caller::identify(options.peer.as_ref()).is_ok_and(|identity| identity.privileged));
    }

    /// Whose requests would take what is prepared.
    pub fn prepared(&self) -> Option<Prepared> {
        self.prepared.as_ref().map(|(prepared, _)| prepared.clone())
    }

    /// How long to wait before [`Runner::prepare_next`]; none: for ever.
    pub fn until_preparation(&self) -> Option<Duration> {
        self.pool.may_wait()
    }

    /// Becomes readable when the prepared sandbox has ended before a request took it; none without one.
    pub fn end_of_prepared(&self) -> Option<BorrowedFd<'_>> {
        self.pool.end()
    }

    /// Takes down a prepared sandbox that has ended, and prepares another.
    pub fn replace_prepared(&mut self) {
        let lived = self.pool.since().map(|since| since.elapsed());
        (self.pool, self.prepared) = (Pool::default(), None);
        if lived.is_some_and(|lived| lived >= SHORT_LIFE) {
            self.prepare_next();
        }
    }

    /// Fixes what is prepared; `None`: for a request like the last.
    pub fn be_ready_for(&mut self, what: Option<ReadyFor>) {
        let expected =
            |ReadyFor { key, policy, runtime }| Expected { key, policy, language: Some(runtime), template: None, has_stdin: false };
        self.ready_for = what.map(expected);
    }

    /// The template to ask the service for, if a request for it is due.
    pub fn wanted_template(&mut self) -> Option<TemplateWanted> {
        let expected = self.expected()?.clone();
        let loaded = self.policy(&self.options(&expected.key, &expected.policy))?;
        let of = template_of(&expected, &loaded).filter(|_| !asks_for_none(&expected))?;
        self.templates.wanted(&of, &expected.key)
    }

    /// What the service has lent for a template.
    pub fn give_template(&mut self, of: &TemplateOf, lease: Lease) {
        self.templates.give(of, lease);
    }

    /// The service has no such template, for this reason, and makes none.
    pub fn refuse_template(&mut self, of: &TemplateOf, why: String) {
        self.templates.refuse(of, why);
    }

    /// Asks anew for all templates: the settings of the service are others.
    pub fn forget_templates(&mut self) {
        self.templates.forget();
    }

    /// The policy that these options name, as the last request had it where that was the same.
    fn policy(&self, options: &Options) -> Option<Rc<LoadedPolicy>> {
        let same = self.loaded.as_ref().filter(|(policy, _)| Some(policy) == options.policy.as_ref());
        same.map(|(_, loaded)| Rc::clone(loaded)).or_else(|| load_policy(options).ok().map(Rc::new))
    }

    fn expected(&self) -> Option<&Expected> {
        self.ready_for.as_ref().or(self.last.as_ref())
    }

    /// Which template a request is for, and the template for it, or why it gets no copy. Neither where its
    /// policy has none.
    fn template_for(
        &mut self,
        asks: &Expected,
        loaded: Option<&LoadedPolicy>,
        options: &Options,
    ) -> (Option<TemplateOf>, Option<Result<Rc<Template>, NotPrestarted>>) {
        let Some((of, loaded)) = loaded.and_then(|loaded| Some((template_of(asks, loaded)?, loaded))) else { return (None, None) };
        let template = match asks_for_none(asks) {
            true => Err(NotPrestarted::NoCopyAsked),
            false => self.templates.ready(&of, loaded, options),
        };
        (Some(of), Some(template))
    }
}

fn asks_for_none(asks: &Expected) -> bool {
    asks.template.as_deref() == Some(NO_TEMPLATE)
}

/// The template of what is asked for, and whose runs it is for.
fn template_of(asks: &Expected, loaded: &LoadedPolicy) -> Option<TemplateOf> {
    let policy = &loaded.policy;
    let (runtime, _) = find_runtime(policy, asks.language.as_deref().unwrap_or(&policy.language)).ok()?;
    let (_, template) = policy.template_of(runtime)?;
    let key = (template.shared_by == SharedBy::Caller).then(|| asks.key.clone());
    Some(TemplateOf { policy: asks.policy.clone(), runtime: runtime.to_owned(), key })
}

/// What the front can know of what is prepared. `of`: the template that it is a copy of.
fn described(expected: &Expected, loaded: &LoadedPolicy, of: Option<&TemplateOf>) -> Prepared {
    let policy = &loaded.policy;
    let mut languages = Vec::new();
    if let Ok((name, runtime)) = find_runtime(policy, expected.language.as_deref().unwrap_or(&policy.language)) {
        languages.extend(std::iter::once(name).chain(runtime.aliases.iter().map(String::as_str)).map(str::to_ascii_lowercase));
        // A request that names none.
        languages.extend((name == policy.language).then(String::new));
    }
    Prepared { key: of.and_then(|of| of.key.clone()), policy: expected.policy.clone(), languages }
}
