//! A session: requests one after the other, with files that outlive each of them.
//!
//! Every request is a whole run of its own, in a sandbox made for it: nothing but files is
//! kept, and no guarantee of a run is another than without a session. Files are read and
//! written between two of its runs, never during one, and none is written to a host scratch in
//! which approved code runs. How requests arrive is not known here.

mod error;

use std::{
    cell::RefCell,
    path::{Path, PathBuf},
    rc::Rc,
    time::Duration,
};

use rustix::fd::{BorrowedFd, OwnedFd};
use stockade_audit::FileAct;
use stockade_launcher::{
    Client, OpenedScratch,
    files::{FileError, Tree},
    scratch::{LockMode, Opener, ShownFiles},
    volumes::{SessionVolumes, VolumeCopies},
};
use stockade_policy::plan::{HOME, Plan, Protection, RunRequest, find_runtime};
use stockade_protocol::{
    LimitKey, NO_TEMPLATE, Report, Request,
    session::{List, Only, Read, Remove, Write},
};

use crate::{
    Admission, Ahead, CancelledBeforeStart, LoadedPolicy, Options, Origin, Purpose, Refusal,
    admit::{check_grants, check_relative, decode, open_scratch, random_bytes, unique_stem},
    answer,
    audit::{AuditRecorder, AuditSubject},
    caller::{self, Identity},
    compile, facts, load_policy, lock_opened,
    pool::{NotPrestarted, Pool},
    report::Echo,
    screen::SessionScreener,
    template::{Template, Templates},
    trusted::refuse_replaceable,
};
use error::{NoVolumes, PathProblem, SessionError};
pub use stockade_launcher::files::{Listed, Part};

/// The most bytes of a file that are read at once.
pub const MAX_READ: u64 = 16 << 20;
/// The most entries of a listing.
pub const MAX_LISTED: usize = 10_000;

/// After this time without a line the next request's sandbox is prepared. For a client that leaves no
/// such pause it is prepared while the program before it runs.
const PAUSE: Duration = Duration::from_millis(2);
/// After how many requests without a pause the next sandbox is prepared beside the one that runs. The
/// set-up takes time from the launcher, which is lost where only two come together.
const MIN_IN_A_ROW: u32 = 2;
/// How often a session looks whether its template is made.
const LOOK_AT_TEMPLATE: Duration = Duration::from_millis(50);

/// What a session keeps.
pub struct SessionState {
    store: Result<SessionVolumes, NoVolumes>,
    /// Of this store alone: what is approved for one session is so in no other, nor in
    /// the same one after a reset.
    store_id: String,
}

impl SessionState {
    pub(crate) fn store_id(&self) -> &str {
        &self.store_id
    }

    /// Whether neither a request nor a `write` has left anything in it that code could read.
    pub(crate) fn is_left_empty(&self) -> Result<bool, Refusal> {
        Ok(self.store()?.is_left_empty()?)
    }

    /// What the two runs of one request keep.
    pub(crate) fn of_request(store: SessionVolumes) -> Self {
        SessionState { store: Ok(store), store_id: String::new() }
    }

    /// Calls `act` with a directory beside scratch, and its owner's ids, if there is one.
    pub(crate) fn in_directory(&self, path: &Path, act: impl FnOnce(&OwnedFd, (u32, u32))) {
        let Ok(store) = &self.store else { return };
        if let Some((_, directory)) = store.directories().find(|(kept, _)| kept == path) {
            act(directory, store.owner());
        }
    }

    fn store(&self) -> Result<&SessionVolumes, SessionError> {
        self.store.as_ref().map_err(|why| SessionError::NoVolumes(why.clone()))
    }

    pub(crate) fn check_request(&self, request: &Request, run_request: &RunRequest, options: &Options) -> Result<(), SessionError> {
        if request.scratch.is_some() {
            return Err(SessionError::Scratch);
        }
        let private = [LimitKey::ScratchSize, LimitKey::ScratchFiles].into_iter().filter(|_| options.scratch.is_none());
        match private.chain([LimitKey::TmpSize]).find(|key| run_request.limits.contains_key(key)) {
            Some(key) => Err(SessionError::Limit(key)),
            None => self.store().map(drop),
        }
    }

    /// For one run.
    pub(crate) fn copies(&self, plan: &Plan, purpose: Purpose) -> Result<VolumeCopies, Refusal> {
        let store = self.store()?;
        if store.owner() != plan.identity.outside {
            return Err(SessionError::OwnerChanged.into());
        }
        // What is prepared may be so beside code, which would find its directory open again.
        Ok(store.copies(purpose != Purpose::Prepare)?)
    }
}

/// Whether the next request's sandbox may be set up before it comes.
#[derive(PartialEq, Eq)]
enum Preparing {
    Now,
    /// The last one has ended by itself, could not be set up, or has held an image for long. The next may
    /// do the same.
    WhenAnswered,
    /// No request would take it, for this reason.
    Never(NotPrestarted),
}

fn asks_for_none(template: Option<&str>) -> bool {
    template == Some(NO_TEMPLATE)
}

/// One session: a policy, the file systems that its requests share, and the next one's sandbox.
pub struct Session {
    /// The next request's sandbox. First, so that it goes before what it has mounted.
    pool: Pool,
    /// The screener that stays for its texts.
    standing: SessionScreener,
    /// Whether there was a sandbox. On cgroup v2 the first may make the launcher leave its cgroup, and a
    /// process that it has started before would stay behind there.
    had_sandbox: bool,
    /// How many requests there were since the last pause.
    since_pause: u32,
    templates: Templates,
    preparing: Preparing,
    /// What the last request was written in, as the next one will be.
    language: Option<String>,
    /// What it said of templates.
    asked_template: Option<String>,
    options: Options,
    loaded: LoadedPolicy,
    identity: Identity,
    plan: Plan,
    state: SessionState,
}

impl Session {
    /// Opens a session: everything that a run could be refused for, but the request, is
    /// looked at now.
    ///
    /// # Errors
    /// It is not granted, its policy or scratch is refused, or the host lacks a layer.
    pub fn open(mut options: Options) -> Result<Self, Refusal> {
        let loaded = load_policy(&options)?;
        let identity = caller::identify(options.peer.as_ref())?;
        options.uid_of = facts::uid_for_all(&identity)?;
        let mut state = SessionState { store: Err(NoVolumes::NotBegun), store_id: new_store_id()? };
        let origin = Origin::Session { request: None, state: &state };
        let plan = Admission::admit(origin, &loaded, &options, Purpose::Plan, None, Pool::default())?.plan;
        state.store = Ok(SessionVolumes::make(&plan)?);
        Ok(Session {
            pool: Pool::default(),
            standing: SessionScreener::default(),
            had_sandbox: false,
            since_pause: 0,
            templates: Templates::default(),
            preparing: Preparing::Now,
            language: None,
            asked_template: None,
            options,
            loaded,
            identity,
            plan,
            state,
        })
    }

    /// The plan that what it keeps was made by.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Where home stands inside.
    pub fn home(&self) -> &Path {
        if self.loaded.policy.scratch.home { &self.plan.scratch.path } else { Path::new(HOME) }
    }

    /// Runs a request. Its result is that of a run for which nothing was prepared, but for what copies
    /// of a template have in common.
    pub fn run(&mut self, request: &Request, client: &mut dyn Client) -> Report {
        let is_open = || self.state.store.as_ref().is_ok_and(SessionVolumes::is_open);
        // What was set up before code closed a directory could not start in it.
        if self.templates.take_made() || !is_open() {
            self.pool = Pool::default();
        }
        let template = self.template_for(request.language.as_deref(), request.template.as_deref());
        if matches!(template, Some(Err(_))) && self.pool.is_for_copy() {
            // Its program would have the name of the template's programs, which may be taken.
            self.pool = Pool::default();
        }
        let of_next = template.clone();
        let pool = match &self.preparing {
            Preparing::Never(why) => Pool::never(why.clone()),
            Preparing::Now | Preparing::WhenAnswered => std::mem::take(&mut self.pool),
        };
        let pool = pool.with(template);
        let next = RefCell::new(None);
        let prepare = || {
            if !is_open() {
                return;
            }
            *next.borrow_mut() = Some(Pool::prepare(
                &Request { language: request.language.clone(), ..Request::default() },
                Some(&self.state),
                &self.loaded,
                &self.options,
                of_next,
                Some(NotPrestarted::Beside),
            ));
        };
        let leaves_no_pause = self.since_pause >= MIN_IN_A_ROW && self.preparing == Preparing::Now;
        // To look through a directory of the host may take longer than the run's limits can wait.
        let has_own_scratch = self.options.scratch.is_none();
        let beside = (leaves_no_pause && has_own_scratch).then(|| Box::new(prepare) as Box<dyn FnOnce() + '_>);
        let origin = Origin::Session { request: Some(request), state: &self.state };
        let ahead = Ahead { prepares: true, pool, beside, standing: Some(&self.standing), locked: None };
        let report = answer(request, origin, Ok(&self.loaded), &self.options, Some(client), ahead);
        if let Some(prepared) = next.into_inner() {
            self.keep_prepared(prepared);
        }
        if self.preparing == Preparing::WhenAnswered {
            self.preparing = Preparing::Now;
        }
        self.had_sandbox |= report.started;
        if report.started {
            self.language.clone_from(&request.language);
            self.asked_template.clone_from(&request.template);
        }
        // A client that leaves no pause gets a template and a screener too, unless this was all that it wanted.
        if self.since_pause > 0 {
            self.begin_template();
            self.start_screener();
        }
        self.since_pause = self.since_pause.saturating_add(1);
        report
    }

    /// Keeps what was prepared; or why no request would take it.
    fn keep_prepared(&mut self, prepared: Result<Result<Pool, NotPrestarted>, Refusal>) {
        match prepared {
            Ok(Ok(pool)) => (self.pool, self.had_sandbox) = (pool, true),
            Ok(Err(why)) => self.preparing = Preparing::Never(why),
            // What has failed once may do the next time.
            Err(_) => self.preparing = Preparing::WhenAnswered,
        }
    }

    /// How long to wait for a line before [`Session::prepare_next`]; none: for ever.
    pub fn until_preparation(&self) -> Option<Duration> {
        if self.can_prepare() || self.since_pause > 0 {
            return Some(PAUSE);
        }
        self.templates.is_making().then_some(LOOK_AT_TEMPLATE).into_iter().chain(self.pool.may_wait()).min()
    }

    /// No line has come for that long: sets up the sandbox of a request without options, with its
    /// interpreter. One whose interpreter has waited for long it replaces by one without, and it ends one
    /// that has held an image for long, without replacement. Where that fails, such a request gets the error
    /// when it comes. A template that is made meanwhile takes the place of the interpreter that waits.
    pub fn prepare_next(&mut self) {
        self.since_pause = 0;
        let made = self.templates.take_made();
        let has_waited = self.pool.has_waited();
        if has_waited && self.pool.holds_image() {
            (self.pool, self.preparing) = (Pool::default(), Preparing::WhenAnswered);
        } else if self.can_prepare() || made && !self.pool.is_empty() || has_waited {
            let held_back = match () {
                () if has_waited => Some(NotPrestarted::Waited),
                () if !self.is_home_empty() => Some(NotPrestarted::Home),
                () => None,
            };
            // Ended first: there are never two.
            self.pool = Pool::default();
            let template = self.template_for(self.language.as_deref(), self.asked_template.as_deref());
            let request = Request { language: self.language.clone(), ..Request::default() };
            self.keep_prepared(Pool::prepare(&request, Some(&self.state), &self.loaded, &self.options, template, held_back));
        }
        // After what a request may be waiting for already.
        self.begin_template();
        self.start_screener();
    }

    fn start_screener(&self) {
        if self.had_sandbox {
            self.standing.start(&self.loaded.policy, self.identity.privileged);
        }
    }

    /// Begins to make the template of the language that the last request had, unless that asked for
    /// none.
    fn begin_template(&mut self) {
        // Nor can a copy run in an image.
        let wants_none = asks_for_none(self.asked_template.as_deref()) || self.options.image.is_some();
        if let (Some(runtime), true, false) = (self.runtime(self.language.as_deref()), self.had_sandbox, wants_none) {
            self.templates.begin(&runtime, &self.loaded, &self.options);
        }
    }

    /// The runtime of a language.
    fn runtime(&self, language: Option<&str>) -> Option<String> {
        let policy = &self.loaded.policy;
        find_runtime(policy, language.unwrap_or(&policy.language)).ok().map(|(name, _)| name.to_owned())
    }

    /// The template for the next request in a language, or why its copy would not be what a fresh
    /// start is now. None where the policy has no template for it.
    fn template_for(&self, language: Option<&str>, asked: Option<&str>) -> Option<Result<Rc<Template>, NotPrestarted>> {
        let runtime = self.runtime(language)?;
        self.loaded.policy.template_of(&runtime)?;
        if asks_for_none(asked) {
            return Some(Err(NotPrestarted::NoCopyAsked));
        }
        let usable = |template: Rc<Template>| match () {
            () if !self.is_home_empty() => Err(NotPrestarted::Home),
            () => self.look_at_scratch(&template).map(|()| template),
        };
        Some(self.templates.ready(&runtime).and_then(usable))
    }

    /// Whether no file in scratch is in a copy's way.
    fn look_at_scratch(&self, template: &Template) -> Result<(), NotPrestarted> {
        let listed = || -> Result<_, Refusal> {
            let store = self.state.store()?;
            let scratch = store.scratch().ok_or(SessionError::NoVolumes(NoVolumes::NoSuchDirectory))?;
            let tree = Tree::kept(scratch, store.owner(), self.identity.privileged);
            Ok(tree.list(Path::new(""), false, MAX_LISTED).map_err(|error| wrong("", error))?)
        };
        // One that cannot be read, or not whole, may hold anything.
        let Ok((entries, false)) = listed() else { return Err(NotPrestarted::ScratchUnknown) };
        let has_stem = |entry: &Listed| template.stem().is_some_and(|stem| entry.path.to_string_lossy().starts_with(stem));
        let is_program = |entry: &Listed| has_stem(entry) && !self.is_fifo_of_pool(entry);
        match () {
            () if entries.iter().any(is_program) => Err(NotPrestarted::NameTaken),
            () if entries.iter().any(|entry| template.is_shadowed_by(&entry.path)) => Err(NotPrestarted::Shadowed),
            () => Ok(()),
        }
    }

    /// Whether a sandbox can be prepared now. None is while code has closed a directory: only a run
    /// opens that again.
    fn can_prepare(&self) -> bool {
        let is_wanted = (self.pool.is_empty() || self.pool.is_of_beside()) && !self.compiles();
        self.preparing == Preparing::Now && is_wanted && self.state.store.as_ref().is_ok_and(SessionVolumes::is_open)
    }

    /// Whether the next request, in the language of the last, would be compiled, and take no sandbox that
    /// was prepared.
    fn compiles(&self) -> bool {
        let request = Request { language: self.language.clone(), ..Request::default() };
        compile::compiled(&request, &self.loaded).is_some()
    }

    /// Whether home holds nothing. One that cannot be read is taken for one that does.
    fn is_home_empty(&self) -> bool {
        let empty = || -> Result<bool, Refusal> {
            let (store, home) = (self.state.store()?, self.home());
            let directory = store.directories().find(|(path, _)| path == home).map(|(_, directory)| directory);
            let directory = directory.ok_or(SessionError::NoVolumes(NoVolumes::NoSuchDirectory))?;
            let tree = Tree::kept(directory, store.owner(), self.identity.privileged);
            let (entries, _) = tree.list(Path::new(""), false, 1).map_err(|error| wrong(&home.to_string_lossy(), error))?;
            Ok(entries.is_empty())
        };
        empty().unwrap_or(false)
    }

    /// Whether this entry of scratch is where an interpreter waits for its program.
    fn is_fifo_of_pool(&self, entry: &Listed) -> bool {
        let stem = self.pool.stem().filter(|_| self.pool.waits_for_program());
        stem.is_some_and(|stem| entry.path.to_str().is_some_and(|path| path.starts_with(stem)))
    }

    /// Becomes readable when the prepared sandbox has ended before a request took it; None
    /// without one.
    pub fn end_of_prepared(&self) -> Option<BorrowedFd<'_>> {
        self.pool.end()
    }

    /// Takes down a prepared sandbox that has ended.
    pub fn clear_prepared(&mut self) {
        self.pool = Pool::default();
        self.preparing = Preparing::WhenAnswered;
    }

    /// The result of a request that was cancelled, as this signal would, before its turn came.
    pub fn never_begun(&self, request: &Request, signal: i32) -> Report {
        let report = Report { code: 128 + signal, ..Refusal::from(CancelledBeforeStart).report() };
        let recorder = AuditRecorder::new(AuditSubject::Request(request), Some(&self.loaded.policy), &self.options);
        Echo::of(request).onto(recorder.end(report))
    }

    /// Writes down a request that could not even be read.
    pub fn refuse(&self, refusal: &Refusal) {
        AuditRecorder::new(AuditSubject::Nothing, Some(&self.loaded.policy), &self.options).end(refusal.report());
    }

    /// Makes everything that it keeps anew. A host scratch is left as it is.
    ///
    /// # Errors
    /// It cannot; the session then has nothing, and answers so, until another try succeeds.
    pub fn reset(&mut self, asked: &Only) -> Result<(), Refusal> {
        // First, so that there is never twice as much as the limits say.
        self.pool = Pool::default();
        self.preparing = Preparing::Now;
        self.state.store = Err(NoVolumes::BeingReset);
        let made = SessionVolumes::make(&self.plan).map_err(Refusal::from).and_then(|store| Ok((store, new_store_id()?)));
        self.state.store = made.map_err(|refusal| NoVolumes::ResetFailed(Box::new(refusal))).map(|(store, store_id)| {
            self.state.store_id = store_id;
            store
        });
        self.noted("reset", "", asked.id.as_ref(), |()| None, self.state.store().map(drop).map_err(Refusal::from))
    }

    /// Reads a file, or a part of one.
    ///
    /// # Errors
    /// There is none, it is kept from the code, or it is too large.
    pub fn read(&self, asked: &Read) -> Result<Part, Refusal> {
        self.noted("read", &asked.path, asked.id.as_ref(), |part| Some(part.bytes.len() as u64), self.try_read(asked))
    }

    fn try_read(&self, Read { path, offset, length, .. }: &Read) -> Result<Part, Refusal> {
        let place = self.place(path, false)?;
        // No file is longer, and lseek takes no more.
        let offset = (*offset).min(i64::MAX.cast_unsigned());
        Ok(place.tree(self)?.read(&place.below, offset, *length, MAX_READ).map_err(|error| wrong(path, error))?)
    }

    /// Writes a file, or adds to it. Returns its size.
    ///
    /// # Errors
    /// The code could not write it either, or there is no room.
    pub fn write(&mut self, asked: &Write) -> Result<u64, Refusal> {
        if self.pool.waits_for_program() {
            // Its interpreter has started without the file; another is started in the next pause.
            self.pool = Pool::default();
        }
        let op = if asked.append { "append" } else { "write" };
        self.noted(op, &asked.path, asked.id.as_ref(), |size| Some(*size), self.try_write(asked))
    }

    fn try_write(&self, Write { path, contents, append, whole, .. }: &Write) -> Result<u64, Refusal> {
        let bytes = decode(contents, "contents")?;
        if *append && *whole {
            return Err(SessionError::AppendWhole.into());
        }
        let place = self.place_to_change(path)?;
        let _locked = place.host.as_ref().map(|opened| lock_opened(opened, LockMode::Shared, &self.identity)).transpose()?;
        let tree = place.tree(self)?;
        let written = if *whole { tree.replace(&place.below, &bytes, &unique_stem()?) } else { tree.write(&place.below, &bytes, *append) };
        Ok(written.map_err(|error| wrong(path, error))?)
    }

    /// Removes a file, a link or an empty directory.
    ///
    /// # Errors
    /// There is none, a directory holds something, or the code could not remove it either.
    pub fn remove(&mut self, asked: &Remove) -> Result<(), Refusal> {
        if self.pool.waits_for_program() {
            // What its interpreter has read may be what is removed.
            self.pool = Pool::default();
        }
        self.noted("remove", &asked.path, asked.id.as_ref(), |()| None, self.try_remove(&asked.path))
    }

    fn try_remove(&self, path: &str) -> Result<(), Refusal> {
        let place = self.place_to_change(path)?;
        let _locked = place.host.as_ref().map(|opened| lock_opened(opened, LockMode::Shared, &self.identity)).transpose()?;
        Ok(place.tree(self)?.remove(&place.below).map_err(|error| wrong(path, error))?)
    }

    /// The place of a path at which something may be changed.
    fn place_to_change(&self, path: &str) -> Result<Place, Refusal> {
        let place = self.place(path, false)?;
        if let Some(opened) = &place.host {
            if self.plan.scratch.read_only || opened.protection(&place.below, &self.loaded.policy) == Some(Protection::ReadOnly) {
                return Err(wrong(path, PathProblem::ReadOnly(self.loaded.policy.name.clone())).into());
            }
        } else if self.plan.scratch.read_only && place.root == self.plan.scratch.path {
            return Err(wrong(path, PathProblem::ReadOnlyScratch(self.loaded.policy.name.clone())).into());
        }
        Ok(place)
    }

    /// Lists a directory, and whether there is more in it than is listed.
    ///
    /// # Errors
    /// There is none.
    pub fn list(&self, asked: &List) -> Result<(Vec<Listed>, bool), Refusal> {
        self.noted("list", &asked.path, asked.id.as_ref(), |_| None, self.try_list(asked))
    }

    fn try_list(&self, List { path, recursive, .. }: &List) -> Result<(Vec<Listed>, bool), Refusal> {
        let place = self.place(path, true)?;
        let (mut entries, truncated) = place.tree(self)?.list(&place.below, *recursive, MAX_LISTED).map_err(|error| wrong(path, error))?;
        if let Some(opened) = &place.host {
            entries.retain(|entry| opened.protection(&place.below.join(&entry.path), &self.loaded.policy) != Some(Protection::Hidden));
        }
        if place.root == self.plan.scratch.path && place.below.as_os_str().is_empty() {
            entries.retain(|entry| !self.is_fifo_of_pool(entry));
        }
        let above = path.trim_end_matches('/');
        let above = if path.starts_with('/') && above.is_empty() { "/" } else { above };
        if !matches!(above, "" | ".") {
            entries.iter_mut().for_each(|entry| entry.path = Path::new(above).join(&entry.path));
        }
        Ok((entries, truncated))
    }

    /// Writes down what was asked for files, and passes on what came of it.
    fn noted<T>(
        &self,
        op: &'static str,
        path: &str,
        id: Option<&String>,
        bytes: impl FnOnce(&T) -> Option<u64>,
        came: Result<T, Refusal>,
    ) -> Result<T, Refusal> {
        let act = FileAct { op, path: path.to_owned(), bytes: came.as_ref().ok().and_then(bytes) };
        let recorder = AuditRecorder::new(AuditSubject::Nothing, Some(&self.loaded.policy), &self.options);
        recorder.end_files(act, id, came.as_ref().err())?;
        came
    }

    /// Finds the place that a path of the protocol means. `top`: it may be that place itself.
    fn place(&self, path: &str, top: bool) -> Result<Place, Refusal> {
        let store = self.state.store()?;
        let scratch = self.plan.scratch.path.as_path();
        let absolute = if path.starts_with('/') {
            PathBuf::from(path)
        } else if top && matches!(path, "" | ".") {
            scratch.to_path_buf()
        } else {
            check_relative("path", path)?;
            scratch.join(path)
        };
        let roots = store.directories().map(|(root, _)| root).chain([scratch.to_path_buf()]);
        let root = roots.filter(|root| absolute.starts_with(root)).max_by_key(|root| root.as_os_str().len());
        let root = root.ok_or_else(|| wrong(path, PathProblem::Outside { scratch: scratch.to_path_buf() }))?;
        let below = path.strip_prefix(&*root.to_string_lossy()).map_or(path, |below| below.trim_matches('/'));
        let below = if matches!(below, "." | "") { "" } else { below };
        match (top, below) {
            (true, "") => {}
            (false, "") => return Err(wrong(path, FileError::Directory).into()),
            _ => check_relative("path", below)?,
        }
        let host = if root == scratch && self.plan.scratch.host { Some(self.open_scratch()?) } else { None };
        let below = PathBuf::from(below);
        if host.as_ref().and_then(|opened| opened.protection(&below, &self.loaded.policy)) == Some(Protection::Hidden) {
            return Err(wrong(path, PathProblem::Hidden(self.loaded.policy.name.clone())).into());
        }
        Ok(Place { root, below, host })
    }

    /// The host scratch, with every rule of a run's.
    fn open_scratch(&self) -> Result<OpenedScratch, Refusal> {
        let homes = caller::homes();
        let registry = facts::registry_directory(&self.identity);
        let opener = Opener {
            caller: &self.identity.caller,
            privileged: self.identity.privileged,
            unique_id: None,
            homes: &homes,
            registry: Some(&registry),
            ceiling: self.options.scratch.as_deref(),
            roots: self.identity.roots_scratch(&self.loaded.policy),
            // The session's client writes here, not its code.
            shown: &ShownFiles::new(),
        };
        let path = self.options.scratch.as_deref().unwrap_or(&self.plan.scratch.path).to_string_lossy();
        open_scratch(&path, &self.loaded.policy, &opener, |place| {
            refuse_replaceable(place, &self.identity, &self.loaded.policy, &self.options)?;
            check_grants(&self.identity, &self.loaded.policy.name, Some(place.path()), &self.options)
        })
    }
}

/// A place where files are read and written.
struct Place {
    /// A directory inside.
    root: PathBuf,
    /// The path below it.
    below: PathBuf,
    /// That directory, where it is the host's.
    host: Option<OpenedScratch>,
}

impl Place {
    fn tree<'a>(&'a self, session: &'a Session) -> Result<Tree<'a>, SessionError> {
        let privileged = session.identity.privileged;
        if let Some(opened) = &self.host {
            return Ok(Tree::host(opened, &session.identity.caller, privileged));
        }
        let store = session.state.store()?;
        let other = store.directories().find(|(root, _)| *root == self.root).map(|(_, directory)| directory);
        let directory = other.or(store.scratch()).ok_or(SessionError::NoVolumes(NoVolumes::NoSuchDirectory))?;
        Ok(Tree::kept(directory, store.owner(), privileged))
    }
}

fn wrong(path: &str, problem: impl Into<PathProblem>) -> SessionError {
    SessionError::Path { path: path.to_owned(), problem: problem.into() }
}

fn new_store_id() -> Result<String, Refusal> {
    let mut bits = [0; 16];
    random_bytes(&mut bits)?;
    Ok(format!("{:032x}", u128::from_ne_bytes(bits)))
}
