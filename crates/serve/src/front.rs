//! What the front knows: settings, requests that wait or run, and the workers that are idle.
//!
//! A run is owned by a task of its own and has a log, in which all that its client gets stands: what
//! is told while it runs, and at last exactly one result or problem. A run whose client goes is
//! cancelled, unless the client may come back for the log. What happens to one run is in `turn`, and
//! what its client holds of it in `handle`.

#[cfg(test)]
mod answer_tests;
mod buffers;
mod handle;
mod kept;
mod run_task;
mod size;
#[cfg(test)]
pub mod tests;

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, OnceLock, Weak},
    time::{Duration, Instant},
};

use axum::{body::Bytes, http::StatusCode};
use serde_json::{Value, json};
use stockade_protocol::service::{Begin, FromFront, Key, Prepared, RunSize, Settings};
use tokio::{
    runtime::Handle,
    sync::{Notify, mpsc, oneshot},
};

use crate::{
    admission::{Admission, Needs, NotAdmitted, Ticket},
    http::{policy_of, show},
    keys,
    link::WorkerLink,
    lock::lock,
    log::{Ending, RunLog},
    metrics::{Metrics, Now},
    problem::Problem,
    sessions::{Session, Sessions},
    watch::{Outcome, Watch},
};

use buffers::Buffers;
use kept::{EndedRun, KeptRuns};
pub use {
    buffers::Buffer,
    handle::{EventStream, RunHandle},
    size::{AskedLimits, AskedSize},
};

/// A run's number at the front.
pub type RunNumber = String;

/// How often the front looks, at its end, whether answers are still to be written.
const LOOK_AT_ANSWERS: Duration = Duration::from_millis(20);
/// How late the log of a run goes whose time is over.
const LOOK_AT_KEPT: Duration = Duration::from_secs(1);

/// Shared by all requests.
pub struct Front {
    /// What is counted.
    pub metrics: Metrics,
    /// What is told those who watch.
    pub watch: Watch,
    state: Mutex<State>,
    buffers: Arc<Buffers>,
    /// A list of runs is being made.
    lists: tokio::sync::Mutex<()>,
    /// The sessions of all keys.
    pub sessions: Sessions,
    /// Something has ended, while it drains.
    ended: Notify,
}

struct State {
    settings: Arc<Settings>,
    admission: Admission,
    /// Who waits for a worker.
    waiters: BTreeMap<Ticket, Waiter>,
    /// Whose worker has ended before their program began: they have had their turn.
    again: VecDeque<Waiter>,
    idle: Vec<(WorkerLink, Option<Prepared>)>,
    /// Those that wait or run.
    runs: BTreeMap<RunNumber, Run>,
    /// Those that have ended and whose clients may ask again.
    kept: KeptRuns,
    /// A task ends those of them whose time is over.
    ends_kept: bool,
    /// By key and `Idempotency-Key`.
    named: BTreeMap<(String, String), Named>,
    draining: bool,
}

/// A request that waits for a worker.
struct Waiter {
    request: WaitingRequest,
    /// None where it has a keeper.
    hand_over: oneshot::Sender<Result<Option<WorkerLink>, Problem>>,
    has_keeper: bool,
}

/// What decides when a request begins, at which worker, and whether it still may.
#[derive(Clone)]
struct WaitingRequest {
    number: RunNumber,
    /// Whose it is, as it was when it came.
    key: Key,
    asks: Asks,
    size: AskedSize,
}

/// What a worker may have prepared for a request.
#[derive(Clone, Debug)]
struct Asks {
    key: String,
    policy: String,
    /// As the request has it, in small letters; empty: it names none.
    language: String,
}

impl Asks {
    /// 2: a worker has prepared a sandbox for this request; 1: it has prepared nothing; 0: for another one.
    fn rank(&self, prepared: Option<&Prepared>) -> u8 {
        let Some(Prepared { key, policy, languages }) = prepared else { return 1 };
        let is_for_key = key.as_ref().is_none_or(|key| *key == self.key);
        if is_for_key && *policy == self.policy && languages.contains(&self.language) { 2 } else { 0 }
    }
}

/// So many workers in turn get a request whole, or the run is lost.
const MAX_WORKERS_OF_RUN: u32 = 3;

/// A request that was let in.
pub struct Run {
    /// Whose it is.
    pub key: String,
    /// Its policy.
    pub policy: String,
    /// What it takes.
    pub size: RunSize,
    /// What it says of itself.
    pub about: About,
    /// When it came.
    pub came: Instant,
    /// When it began, if it has.
    pub began: Option<Instant>,
    log: Arc<RunLog>,
    cancel: Option<oneshot::Sender<()>>,
    /// Its `Idempotency-Key`.
    name: Option<String>,
}

/// What a request says of itself, for those who look at runs.
#[derive(Clone, Debug, Default)]
pub struct About {
    /// `language`.
    pub language: Option<String>,
    /// `id`.
    pub id: Option<String>,
    /// `labels`.
    pub labels: BTreeMap<String, String>,
}

/// Characters of a text that a request says of itself, and labels.
const MAX_ABOUT: usize = 256;
const MAX_LABELS: usize = 32;
/// Bytes of all labels of a run, as JSON.
const MAX_LABEL_BYTES: usize = 12 << 10;
/// Runs in a list, and in what those are told first who watch.
pub const MAX_LISTED: usize = 500;
/// Bytes of JSON of the labels of runs that are listed.
const MAX_LISTED_LABELS: usize = 1 << 20;

impl About {
    /// Cut to what is kept for those who look: a request may be long.
    pub fn of(language: Option<&str>, id: Option<&str>, labels: BTreeMap<String, String>) -> Self {
        let cut = |text: &str| text.chars().take(MAX_ABOUT).collect::<String>();
        let mut left = MAX_LABEL_BYTES;
        let mut fits = |(name, value): &(String, String)| {
            let bytes = Value::from(&**name).to_string().len() + Value::from(&**value).to_string().len();
            left.checked_sub(bytes).map(|rest| left = rest).is_some()
        };
        let labels = labels.into_iter().take(MAX_LABELS).map(|(name, value)| (cut(&name), cut(&value))).filter(|label| fits(label));
        About { language: language.map(cut), id: id.map(cut), labels: labels.collect() }
    }
}

/// The run of a request with an `Idempotency-Key`.
struct Named {
    request: RequestHash,
    number: RunNumber,
    log: Weak<RunLog>,
}

/// SHA-256 of what a request asks for.
pub type RequestHash = [u8; 32];

/// A request, and how it is to be answered.
pub struct Order {
    /// Its number.
    pub number: RunNumber,
    /// Who asks.
    pub key: Key,
    /// Under which policy.
    pub policy: String,
    /// What it asks for.
    pub size: AskedSize,
    /// What it says of itself.
    pub about: About,
    /// `exec`'s JSON.
    pub request: Vec<u8>,
    /// Has the request.
    pub buffer: Buffer,
    /// How long it may wait.
    pub wait: Duration,
    /// Its output is told as it comes.
    pub output: bool,
    /// How long its log is kept after the run.
    pub keep: Duration,
    /// The session that it is of.
    pub session: Option<Arc<Session>>,
    /// Its `Idempotency-Key`, and what it asks for.
    pub name: Option<(String, RequestHash)>,
}

impl Front {
    /// One that has no worker yet.
    pub fn new(settings: Settings, wishes: mpsc::UnboundedSender<FromFront>) -> Self {
        let admission = Admission::new(settings.capacity, &settings.keys);
        let buffers = Buffers::new(settings.max_buffers, settings.keys.len(), settings.max_body);
        let kept = KeptRuns::new(settings.max_buffers);
        let state = State {
            settings: Arc::new(settings),
            admission,
            waiters: BTreeMap::new(),
            again: VecDeque::new(),
            idle: Vec::new(),
            runs: BTreeMap::new(),
            kept,
            ends_kept: false,
            named: BTreeMap::new(),
            draining: false,
        };
        let (metrics, sessions) = (Metrics::default(), Sessions::new(wishes));
        Front {
            metrics,
            watch: Watch::new(),
            state: Mutex::new(state),
            buffers,
            lists: tokio::sync::Mutex::new(()),
            sessions,
            ended: Notify::new(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// What holds now.
    pub fn settings(&self) -> Arc<Settings> {
        Arc::clone(&self.state().settings)
    }

    /// Takes other settings, for all requests that wait and all that come from now on.
    pub fn change(&self, settings: Settings) {
        let mut state = self.state();
        self.buffers.change(settings.max_buffers, settings.keys.len(), settings.max_body);
        state.kept.change(settings.max_buffers);
        state.settings = Arc::new(settings);
        let State { settings, admission, waiters, runs, .. } = &mut *state;
        for (ticket, waiter) in waiters {
            let size = waiter.request.size.under(settings, &waiter.request.asks.policy);
            admission.resize(*ticket, size);
            runs.get_mut(&waiter.request.number).into_iter().for_each(|run| run.size = size);
        }
        for (ticket, why) in admission.change(settings.capacity, &settings.keys) {
            state.refuse(ticket, |state, waiter| Some(state.not_admitted(why, &waiter.request.key.id)));
        }
        let waiting: Vec<Ticket> = state.waiters.keys().copied().collect();
        for ticket in waiting {
            state.refuse(ticket, State::revoked);
        }
        // There may be more than before.
        state.begin_all();
    }

    /// Room for what one request of a key brings and gets.
    pub fn buffer(&self, key: &str) -> Buffer {
        self.buffers.buffer(key)
    }

    /// An answer for a key that counts as buffered until its last byte was written. `started`: whether code may
    /// have run for it.
    ///
    /// # Errors
    /// There is no room for it.
    pub fn buffered(&self, key: &str, answer: Vec<u8>, started: bool) -> Result<Bytes, Problem> {
        let mut buffer = self.buffer(key);
        buffer.grow(answer.len()).map_err(|problem| Problem { started, ..problem })?;
        Ok(buffer.hold(answer))
    }

    /// Takes no more requests. Those that wait get a problem.
    pub fn drain(&self) {
        let mut state = self.state();
        state.draining = true;
        let again = std::mem::take(&mut state.again);
        for waiter in std::mem::take(&mut state.waiters).into_values().chain(again) {
            // One that was cancelled just now does not wait any more.
            let _gone = waiter.hand_over.send(Err(draining()));
        }
    }

    /// Whether it takes no more requests.
    pub fn is_draining(&self) -> bool {
        self.state().draining
    }

    /// Returns when no request waits or runs any more.
    pub async fn drained(&self) {
        loop {
            let ended = self.ended.notified();
            if self.state().runs.is_empty() {
                return;
            }
            ended.await;
        }
    }

    /// Returns when no answer of more than some KiB is still to be written.
    pub async fn all_answered(&self) {
        while !self.buffers.are_empty() {
            // No client asks for a result any more.
            let kept = std::mem::replace(&mut self.state().kept, KeptRuns::new(0));
            drop(kept);
            tokio::time::sleep(LOOK_AT_ANSWERS).await;
        }
    }

    /// How many requests of a key run, and how many wait.
    pub fn of_key(&self, key: &str) -> (u32, usize) {
        self.state().admission.of_key(key)
    }

    /// What there is at this moment.
    pub fn now(&self) -> Now {
        let mut state = self.state();
        state.forget_ended_workers();
        let running = state.runs.values().filter(|run| run.began.is_some()).count();
        Now {
            running: running as u64,
            waiting: (state.runs.len() - running) as u64,
            memory: state.admission.used().memory,
            idle: state.idle.len() as u64,
            workers: state.settings.workers.into(),
            sessions: self.sessions.count() as u64,
        }
    }

    /// What is in use, and what of its quotas each key has used.
    pub fn load(&self) -> Value {
        let (mut state, now) = (self.state(), Instant::now());
        state.forget_ended_workers();
        let of_key = |key: &Key| {
            let (running, waiting) = state.admission.of_key(&key.id);
            let (minute, hour) = state.admission.recent_of(&key.id, now);
            (
                key.id.clone(),
                json!({ "running": running, "waiting": waiting, "sessions": self.sessions.count_of(&key.id), "runs_in_minute": minute, "cpu_in_hour_ms": hour }),
            )
        };
        let used = state.admission.used();
        json!({
            "cpus": used.cpus as f64 / 1000.0,
            "memory_bytes": used.memory,
            "idle_workers": state.idle.len(),
            "draining": state.draining,
            "keys": state.settings.keys.iter().map(of_key).collect::<serde_json::Map<_, _>>(),
        })
    }

    /// The runs and the settings at one moment. `moment` is called under the lock, and gives its number.
    pub fn overview(&self, moment: impl FnOnce() -> u64) -> (u64, Value) {
        let state = self.state();
        let moment = moment();
        let Settings { keys, capacity, policies, workers, .. } = &*state.settings;
        let keys = keys.iter().map(|key| {
            json!({
                "key": key.id,
                "policies": key.policies,
                "scopes": key.scopes,
                "weight": key.weight,
                "running": key.running,
                "waiting": key.waiting,
                "sessions": key.sessions,
                "runs_per_minute": key.runs_per_minute,
                "cpu_per_hour_ms": key.cpu_per_hour,
                "expires": key.expires,
            })
        });
        let policies =
            policies.iter().map(|(name, size)| json!({ "name": name, "cpus": size.cpus as f64 / 1000.0, "memory_bytes": size.memory }));
        let mut shown = json!({
            "version": env!("CARGO_PKG_VERSION"),
            "capacity": {
                "cpus": capacity.size.cpus as f64 / 1000.0,
                "memory_bytes": capacity.size.memory,
                "waiting": capacity.waiting,
                "queue_ms": capacity.queue_ms,
                "workers": workers,
            },
            "keys": keys.collect::<Vec<_>>(),
            "policies": policies.collect::<Vec<_>>(),
        });
        let (runs, truncated) = state.newest(|_| true);
        shown["runs"] = runs;
        shown["truncated"] = truncated.into();
        (moment, shown)
    }

    /// The newest of the runs that `shows` picks, and whether there are more.
    pub async fn runs(&self, shows: impl Fn(&Run) -> bool) -> (Value, bool) {
        // One list after the other: all else has its turn between two.
        let _turn = self.lists.lock().await;
        self.state().newest(shows)
    }

    /// One that waits or runs, if `shows` picks it.
    pub fn one_run(&self, number: &RunNumber, shows: impl Fn(&Run) -> bool) -> Option<Value> {
        self.state().runs.get(number).filter(|run| shows(run)).map(|run| show(number, run))
    }

    /// What is told of a run of this key, which may have ended.
    pub fn log(&self, number: &str, key: &str) -> Option<Arc<RunLog>> {
        let state = self.state();
        let running = state.runs.get(number).filter(|run| run.key == key).map(|run| &run.log);
        running.or_else(|| state.kept.log(number, key)).map(Arc::clone)
    }

    /// The run of the request of this key that had this `Idempotency-Key`, and what came of it, where that is
    /// known.
    ///
    /// # Errors
    /// It is not answered yet, or was another request.
    pub fn repeated(&self, key: &str, name: &str, request: &RequestHash) -> Result<Option<(RunNumber, Arc<RunLog>, Ending)>, Problem> {
        let (same, number, log) = {
            let state = self.state();
            let Some(named) = state.named.get(&(key.to_owned(), name.to_owned())) else { return Ok(None) };
            let Some(log) = named.log.upgrade() else { return Ok(None) };
            (named.request == *request, named.number.clone(), log)
        };
        match log.ending() {
            // Nothing came of it, and it may be tried again.
            Some(Err(Problem { started: false, .. })) => Ok(None),
            _ if !same => {
                let detail = "another request had this `Idempotency-Key`; make a new one for each request";
                Err(Problem::new(StatusCode::UNPROCESSABLE_ENTITY, "idempotency_reused", detail))
            }
            None => {
                let detail = "the request with this `Idempotency-Key` is not answered yet; ask again later";
                Err(Problem { started: log.has_started(), ..Problem::new(StatusCode::CONFLICT, "idempotency_in_flight", detail) })
            }
            Some(ending) => Ok(Some((number, log, ending))),
        }
    }

    /// Cancels a run that `may` be cancelled. Whether there is one.
    pub fn cancel(&self, number: &str, may: impl Fn(&Run) -> bool) -> bool {
        let mut state = self.state();
        let Some(run) = state.runs.get_mut(number).filter(|run| may(run)) else { return false };
        // One that is cancelled already stays so.
        let _cancelled = run.cancel.take().map(|cancel| cancel.send(()));
        true
    }

    /// A worker has come, mostly in the place of one that has ended.
    pub fn worker_came(&self) {
        self.metrics.worker_came();
        self.state().forget_ended_workers();
    }

    /// A worker that takes a run, and has this prepared.
    pub fn add_idle(&self, worker: WorkerLink, prepared: Option<Prepared>) {
        let mut state = self.state();
        state.idle.push((worker, prepared));
        state.begin_all();
    }

    /// A request that waited for its keeper has it.
    fn has_keeper(&self, ticket: Ticket) {
        let mut state = self.state();
        state.admission.has_keeper(ticket);
        state.begin_all();
    }

    /// Another worker for a request whose worker had ended.
    fn another_worker(&self, request: WaitingRequest) -> oneshot::Receiver<Result<Option<WorkerLink>, Problem>> {
        let (hand_over, worker) = oneshot::channel();
        let mut state = self.state();
        if !state.draining {
            state.again.push_back(Waiter { request, hand_over, has_keeper: false });
            state.begin_all();
        }
        worker
    }

    /// Runs a request, once it is its turn.
    ///
    /// # Errors
    /// It may not even wait; and the order, for another try.
    pub fn run(self: &Arc<Self>, order: Order) -> Result<RunHandle, (Problem, Box<Order>)> {
        let (cancel, cancelled) = oneshot::channel();
        let (hand_over, worker) = oneshot::channel();
        let came = Instant::now();
        let log = Arc::new(RunLog::new(self.buffer(&order.key.id), self.settings().stream_size));
        let mut state = self.state();
        let position = state.admission.waiting();
        let size = order.size.under(&state.settings, &order.policy);
        let needs = if order.session.is_some() { Needs::Keeper } else { Needs::Worker };
        let asked = if state.draining {
            Err(draining())
        } else {
            state.admission.ask(&order.key.id, size, needs, came).map_err(|why| state.not_admitted(why, &order.key.id))
        };
        let ticket = match asked {
            Ok(ticket) => ticket,
            Err(problem) => return Err((problem, Box::new(order))),
        };
        let Order { number, key, policy, size: asked_size, about, request, buffer, wait, output, keep, session, name } = order;
        let language = about.language.as_deref().unwrap_or_default().to_ascii_lowercase();
        let asks = Asks { key: key.id.clone(), policy: policy.clone(), language };
        let waits = WaitingRequest { number: number.clone(), key: key.clone(), asks, size: asked_size };
        state.waiters.insert(ticket, Waiter { request: waits.clone(), hand_over, has_keeper: session.is_some() });
        let run = Run {
            key: key.id.clone(),
            policy: policy.clone(),
            size,
            about,
            came,
            began: None,
            log: Arc::clone(&log),
            cancel: Some(cancel),
            name: name.as_ref().map(|(name, _)| name.clone()),
        };
        if let Some((name, request)) = name {
            state.named.insert((run.key.clone(), name), Named { request, number: number.clone(), log: Arc::downgrade(&run.log) });
        }
        self.watch.changed(&number, &run);
        state.runs.insert(number.clone(), run);
        state.begin_all();
        drop(state);
        log.accept(&number, position);
        let length = request.len() as u64;
        let begin = Begin { run: number.clone(), key: key.id.clone(), policy, length, output };
        let guard = run_task::RunGuard { front: Arc::clone(self), ticket, number: number.clone(), keep, outcome: OnceLock::new() };
        let run = run_task::PendingRun { begin, request, buffer, waits, session, worker, cancelled, wait, came };
        let own_log = Arc::clone(&log);
        tokio::spawn(async move {
            let ending = run_task::execute(&guard, run, &own_log).await.map_err(|problem| guard.front.metrics.problem(problem));
            if let Err(problem) = &ending {
                // After a result that found no room its verdict stands.
                let _stands = guard.outcome.set(Outcome::Problem { reason: problem.reason, started: problem.started });
            }
            own_log.end(ending);
            drop(guard);
        });
        Ok(RunHandle { front: Arc::clone(self), number, log, cancels: true })
    }

    /// Keeps the log of a run that has ended.
    fn keep(self: &Arc<Self>, number: RunNumber, kept: EndedRun) {
        let (dropped, is_watched) = {
            let mut state = self.state();
            let dropped = state.kept.add(number, kept);
            state.forget_names(&dropped);
            (dropped, std::mem::replace(&mut state.ends_kept, true))
        };
        drop(dropped);
        // None when the process ends.
        if let (false, Ok(runtime)) = (is_watched, Handle::try_current()) {
            runtime.spawn(Arc::clone(self).end_kept());
        }
    }

    /// Drops the logs that are kept when their time is over, until there is none.
    async fn end_kept(self: Arc<Self>) {
        loop {
            let next = {
                let mut state = self.state();
                let next = state.kept.next_end();
                state.ends_kept = next.is_some();
                next
            };
            let Some(next) = next else { return };
            // One that is added meanwhile and goes sooner waits for this one.
            tokio::time::sleep_until(next.min(tokio::time::Instant::now() + LOOK_AT_KEPT)).await;
            let over = {
                let mut state = self.state();
                let over = state.kept.end(tokio::time::Instant::now());
                state.forget_names(&over);
                over
            };
            drop(over);
        }
    }
}

impl State {
    /// The names of runs that are kept no more go with them, unless a later request has them.
    fn forget_names(&mut self, runs: &[EndedRun]) {
        for run in runs {
            let Some(name) = &run.name else { continue };
            let of_run = (run.key.clone(), name.clone());
            if self.named.get(&of_run).is_some_and(|named| std::ptr::eq(named.log.as_ptr(), Arc::as_ptr(&run.log))) {
                self.named.remove(&of_run);
            }
        }
    }

    /// At most [`MAX_LISTED`] of the runs that `shows` picks, or [`MAX_LISTED_LABELS`] of labels, the newest first,
    /// and whether there are more.
    fn newest(&self, shows: impl Fn(&Run) -> bool) -> (Value, bool) {
        let mut found: Vec<(&RunNumber, &Run)> = self.runs.iter().filter(|(_, run)| shows(run)).collect();
        found.sort_unstable_by_key(|(_, run)| std::cmp::Reverse(run.came));
        let mut labels = 0;
        let fits = |run: &Run| {
            labels += serde_json::to_string(&run.about.labels).map_or(0, |text| text.len());
            labels <= MAX_LISTED_LABELS
        };
        let listed = found.iter().take(MAX_LISTED).map(|(_, run)| run).scan(fits, |fits, run| fits(run).then_some(())).count();
        (found.iter().take(listed).map(|(number, run)| show(number, run)).collect(), found.len() > listed)
    }

    /// Lets those begin whose turn it is, that fit, and that have a worker or a keeper.
    fn begin_all(&mut self) {
        while let Some(waiter) = self.again.pop_front() {
            if let Some(problem) = self.revoked(&waiter) {
                let _gone = waiter.hand_over.send(Err(problem));
                continue;
            }
            let Some(worker) = self.take_idle(&waiter.request.asks) else {
                self.again.push_front(waiter);
                break;
            };
            self.hand_over(waiter, Some(worker));
        }
        while !self.draining
            && let has_worker = self.has_idle()
            && let Some(ticket) = self.admission.next(has_worker)
        {
            if self.refuse(ticket, State::revoked) {
                continue;
            }
            let worker = match self.waiters.get(&ticket) {
                Some(waiter) if !waiter.has_keeper => {
                    let asks = waiter.request.asks.clone();
                    // It has ended just now: then it is another's turn.
                    let Some(worker) = self.take_idle(&asks) else { continue };
                    Some(worker)
                }
                _ => None,
            };
            self.admission.begin(ticket);
            if let Some(waiter) = self.waiters.remove(&ticket) {
                self.hand_over(waiter, worker);
            }
        }
    }

    /// Tells a request that waits why it does not begin, where there is a reason. Whether there is.
    fn refuse(&mut self, ticket: Ticket, why: impl FnOnce(&State, &Waiter) -> Option<Problem>) -> bool {
        let Some(problem) = self.waiters.get(&ticket).and_then(|waiter| why(self, waiter)) else { return false };
        let refused = self.waiters.remove(&ticket).map(|waiter| waiter.hand_over.send(Err(problem)));
        self.admission.end(ticket);
        refused.is_some()
    }

    /// Why a request may not begin that was let in: its key has expired meanwhile, or was taken away, or its policy
    /// was.
    fn revoked(&self, waiter: &Waiter) -> Option<Problem> {
        let WaitingRequest { key, asks, .. } = &waiter.request;
        keys::still_there(&self.settings.keys, key).and_then(|key| policy_of(key, Some(asks.policy.clone()))).err()
    }

    fn hand_over(&mut self, waiter: Waiter, worker: Option<(WorkerLink, Option<Prepared>)>) {
        let (worker, prepared) = worker.unzip();
        if let Err(Ok(Some(worker))) = waiter.hand_over.send(Ok(worker)) {
            // It was cancelled just now, and ends by itself.
            self.idle.push((worker, prepared.flatten()));
        }
    }

    /// Drops those that ended while they were idle. A sandbox that one had prepared can keep its socket open
    /// for some moments.
    fn forget_ended_workers(&mut self) {
        self.idle.retain(|(worker, _)| worker.is_there());
    }

    /// Whether there is an idle worker, by what all have said.
    fn has_idle(&mut self) -> bool {
        self.idle.retain_mut(|(worker, prepared)| worker.is_idle(prepared));
        !self.idle.is_empty()
    }

    /// The best idle worker for a request, by what each has prepared now. Those that have ended are dropped.
    fn take_idle(&mut self, asks: &Asks) -> Option<(WorkerLink, Option<Prepared>)> {
        while self.has_idle() {
            let ranked = self.idle.iter().enumerate().max_by_key(|(_, (_, prepared))| asks.rank(prepared.as_ref()));
            let best = ranked.map(|(index, _)| index)?;
            let (worker, prepared) = self.idle.remove(best);
            if worker.is_there() {
                return Some((worker, prepared));
            }
        }
        None
    }

    fn not_admitted(&self, why: NotAdmitted, id: &str) -> Problem {
        let wait = self.settings.capacity.queue_ms.div_ceil(1000);
        match why {
            NotAdmitted::NeverFits => Problem::new(
                StatusCode::UNPROCESSABLE_ENTITY,
                "never_fits",
                "the request asks for more CPUs or memory than all runs together may use here; ask for less in `limits`, or have `[capacity]` raised in serve.toml",
            ),
            NotAdmitted::QueueFull => {
                let detail =
                    format!("{} requests wait already, as many as may (`[capacity] waiting`); try again later", self.admission.waiting());
                Problem::new(StatusCode::SERVICE_UNAVAILABLE, "queue_full", detail).after(wait / 2)
            }
            NotAdmitted::KeyGone => {
                Problem::new(StatusCode::UNAUTHORIZED, "key_revoked", "the key was taken away while the request waited; ask for another")
            }
            NotAdmitted::KeyQueue => {
                let detail = format!("as many requests of key {id} wait as may (`waiting`); try again when some have ended");
                Problem::new(StatusCode::TOO_MANY_REQUESTS, "key_queue", detail).after(1)
            }
            NotAdmitted::KeyCpu(after) => {
                let detail = format!("the runs of key {id} have used the CPU time that they may use in an hour");
                Problem::new(StatusCode::TOO_MANY_REQUESTS, "key_cpu", detail).after(after.as_secs() + 1)
            }
            NotAdmitted::KeyRate(after) => {
                let key = self.settings.keys.iter().find(|key| key.id == id);
                let most = key.and_then(|key| key.runs_per_minute).unwrap_or_default();
                let detail = format!("key {id} may send {most} requests a minute");
                Problem::new(StatusCode::TOO_MANY_REQUESTS, "key_rate", detail).after(after.as_secs() + 1)
            }
        }
    }
}

fn draining() -> Problem {
    Problem::new(StatusCode::SERVICE_UNAVAILABLE, "draining", "the service ends, and takes no more requests").after(1)
}
