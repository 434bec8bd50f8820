//! What the front knows: settings, requests that wait or run, and the workers that are idle.
//!
//! A run is owned by a task of its own and has a log, in which all that its client gets stands: what
//! is told while it runs, and at last exactly one result or problem. A run whose client goes is
//! cancelled, unless the client may come back for the log.

use std::{
    collections::{BTreeMap, VecDeque},
    ops::{Deref, DerefMut},
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use axum::{body::Bytes, http::StatusCode};
use serde_json::{Value, json};
use stockade_protocol::service::{Begin, FromFront, FromWorker, Key, Malformed, Prepared, RunSize, Settings, ToWorker};
use tokio::{
    runtime::Handle,
    sync::{Notify, mpsc, oneshot},
};

use crate::{
    admission::{Admission, NotAdmitted, Ticket},
    http::show,
    link::{LinkError, WorkerLink},
    log::{Ending, Format, Reader, RunLog},
    metrics::{Ended, Metrics, Now},
    problem::Problem,
    sessions::{KeeperGuard, Session, Sessions, session_ended},
    watch::{Outcome, Watch},
};

/// A run's number at the front.
pub type RunNumber = String;

/// A run whose stream nobody reads is cancelled after this time: its client may come back.
const UNREAD: Duration = Duration::from_secs(10);
/// The most bytes of results that are kept after their runs.
const MAX_KEPT: usize = 64 << 20;

/// Shared by all requests.
pub struct Front {
    /// What is counted.
    pub metrics: Metrics,
    /// What is told those who watch.
    pub watch: Watch,
    state: Mutex<State>,
    buffers: Arc<Buffers>,
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
    /// Who is to begin, and waits for an idle worker.
    wanting: VecDeque<Waiter>,
    idle: Vec<(WorkerLink, Option<Prepared>)>,
    /// Those that wait or run.
    runs: BTreeMap<RunNumber, Run>,
    /// Those that have ended and whose clients may ask again.
    kept: BTreeMap<RunNumber, EndedRun>,
    /// By key and `Idempotency-Key`.
    named: BTreeMap<(String, String), Named>,
    draining: bool,
}

/// A request that waits for a worker.
struct Waiter {
    asks: Asks,
    /// None where it has a keeper.
    hand_over: oneshot::Sender<Result<Option<WorkerLink>, Problem>>,
    has_keeper: bool,
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
    /// How good a worker is that has this prepared: for this request before for none, and that before for
    /// another.
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

impl About {
    /// Cut to what is kept for those who look: a request may be long.
    pub fn of(language: Option<&str>, id: Option<&str>, labels: BTreeMap<String, String>) -> Self {
        let cut = |text: &str| text.chars().take(MAX_ABOUT).collect::<String>();
        let labels = labels.into_iter().take(MAX_LABELS).map(|(name, value)| (cut(&name), cut(&value)));
        About { language: language.map(cut), id: id.map(cut), labels: labels.collect() }
    }
}

/// A run that has ended.
struct EndedRun {
    key: String,
    log: Arc<RunLog>,
    until: Instant,
}

/// The run of a request with an `Idempotency-Key`.
struct Named {
    request: RequestHash,
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
    /// What it takes.
    pub size: RunSize,
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
        let buffers = Arc::new(Buffers { used: AtomicU64::new(0), most: AtomicU64::new(settings.max_buffers) });
        let state = State {
            settings: Arc::new(settings),
            admission,
            waiters: BTreeMap::new(),
            wanting: VecDeque::new(),
            idle: Vec::new(),
            runs: BTreeMap::new(),
            kept: BTreeMap::new(),
            named: BTreeMap::new(),
            draining: false,
        };
        let (metrics, sessions) = (Metrics::default(), Sessions::new(wishes));
        Front { metrics, watch: Watch::new(), state: Mutex::new(state), buffers, sessions, ended: Notify::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing that holds it panics half-way.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What holds now.
    pub fn settings(&self) -> Arc<Settings> {
        Arc::clone(&self.state().settings)
    }

    /// Takes other settings, for all requests that come from now on.
    pub fn change(&self, settings: Settings) {
        let mut state = self.state();
        state.admission.change(settings.capacity, &settings.keys);
        self.buffers.most.store(settings.max_buffers, Relaxed);
        state.settings = Arc::new(settings);
        for ticket in state.admission.without_key() {
            let Some(waiter) = state.waiters.remove(&ticket) else { continue };
            let gone =
                Problem::new(StatusCode::UNAUTHORIZED, "key_revoked", "the key was taken away while the request waited; ask for another");
            let _gone = waiter.hand_over.send(Err(gone));
        }
    }

    /// Room for what one request brings and gets.
    pub fn buffer(&self) -> Buffer {
        Buffer { buffers: Arc::clone(&self.buffers), bytes: 0 }
    }

    /// An answer that counts as buffered until its last byte was written.
    ///
    /// # Errors
    /// There is no room for it.
    pub fn buffered(&self, answer: Vec<u8>) -> Result<Bytes, Problem> {
        let mut buffer = self.buffer();
        buffer.grow(answer.len()).map_err(|problem| Problem { started: true, ..problem })?;
        Ok(buffer.hold(answer))
    }

    /// Takes no more requests. Those that wait get a problem.
    pub fn drain(&self) {
        let mut state = self.state();
        state.draining = true;
        let wanting = std::mem::take(&mut state.wanting);
        for waiter in std::mem::take(&mut state.waiters).into_values().chain(wanting) {
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

    /// How many requests of a key run, and how many wait.
    pub fn of_key(&self, key: &str) -> (u32, usize) {
        self.state().admission.of_key(key)
    }

    /// What there is at this moment.
    pub fn now(&self) -> Now {
        let state = self.state();
        let running = state.runs.values().filter(|run| run.began.is_some()).count();
        Now {
            running: running as u64,
            waiting: (state.runs.len() - running) as u64,
            memory: state.admission.used().memory,
            idle: state.idle.len() as u64,
            workers: state.settings.workers.into(),
            sessions: self.sessions.count("").1 as u64,
        }
    }

    /// What is in use, and what of its quotas each key has used.
    pub fn load(&self) -> Value {
        let (state, now) = (self.state(), Instant::now());
        let of_key = |key: &Key| {
            let (running, waiting) = state.admission.of_key(&key.id);
            let (minute, hour) = state.admission.recent_of(&key.id, now);
            (
                key.id.clone(),
                json!({ "running": running, "waiting": waiting, "sessions": self.sessions.count(&key.id).0, "runs_in_minute": minute, "cpu_in_hour_ms": hour }),
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

    /// The runs, and what holds for them, at the moment of which `moment` speaks.
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
        let shown = json!({
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
            "runs": state.runs.iter().map(|(number, run)| show(number, run)).collect::<Vec<_>>(),
        });
        (moment, shown)
    }

    /// The runs that `shows` picks, as `show` words them.
    pub fn runs<T>(&self, shows: impl Fn(&Run) -> bool, show: impl Fn(&RunNumber, &Run) -> T) -> Vec<T> {
        let state = self.state();
        state.runs.iter().filter(|(_, run)| shows(run)).map(|(number, run)| show(number, run)).collect()
    }

    /// What is told of a run of this key, which may have ended.
    pub fn log(&self, number: &str, key: &str) -> Option<Arc<RunLog>> {
        let state = self.state();
        let running = state.runs.get(number).filter(|run| run.key == key).map(|run| &run.log);
        let kept = || state.kept.get(number).filter(|kept| kept.key == key).map(|kept| &kept.log);
        running.or_else(kept).map(Arc::clone)
    }

    /// What came of the request of this key that had this `Idempotency-Key`, where it is known.
    ///
    /// # Errors
    /// It is not answered yet, or was another request.
    pub fn repeated(&self, key: &str, name: &str, request: &RequestHash) -> Result<Option<Ending>, Problem> {
        let (same, log) = {
            let state = self.state();
            let Some(named) = state.named.get(&(key.to_owned(), name.to_owned())) else { return Ok(None) };
            let Some(log) = named.log.upgrade() else { return Ok(None) };
            (named.request == *request, log)
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
            ending => Ok(ending),
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

    /// A worker that takes a run, and has this prepared.
    pub fn add_idle(&self, worker: WorkerLink, prepared: Option<Prepared>) {
        let mut state = self.state();
        state.idle.push((worker, prepared));
        state.begin_all();
    }

    /// Another worker for a request whose worker had ended.
    fn another_worker(&self, asks: Asks) -> oneshot::Receiver<Result<Option<WorkerLink>, Problem>> {
        let (hand_over, worker) = oneshot::channel();
        let mut state = self.state();
        if !state.draining {
            state.wanting.push_back(Waiter { asks, hand_over, has_keeper: false });
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
        let log = Arc::new(RunLog::new(self.buffer(), self.settings().stream_size));
        let mut state = self.state();
        let position = state.admission.waiting();
        let asked = if state.draining {
            Err(draining())
        } else {
            state.admission.ask(&order.key.id, order.size, came).map_err(|why| state.not_admitted(why, &order.key))
        };
        let ticket = match asked {
            Ok(ticket) => ticket,
            Err(problem) => return Err((problem, Box::new(order))),
        };
        let Order { number, key, policy, size, about, request, buffer, wait, output, keep, session, name } = order;
        let language = about.language.as_deref().unwrap_or_default().to_ascii_lowercase();
        let asks = Asks { key: key.id.clone(), policy: policy.clone(), language };
        state.waiters.insert(ticket, Waiter { asks: asks.clone(), hand_over, has_keeper: session.is_some() });
        let run = Run {
            key: key.id.clone(),
            policy: policy.clone(),
            size,
            about,
            came,
            began: None,
            log: Arc::clone(&log),
            cancel: Some(cancel),
        };
        if let Some((name, request)) = name {
            state.named.retain(|_, named| named.log.strong_count() > 0);
            state.named.insert((run.key.clone(), name), Named { request, log: Arc::downgrade(&run.log) });
        }
        self.watch.changed(&number, &run);
        state.runs.insert(number.clone(), run);
        state.begin_all();
        drop(state);
        log.accept(&number, position);
        let length = request.len() as u64;
        let begin = Begin { run: number.clone(), key: key.id.clone(), policy, length, output };
        let place = Place { front: Arc::clone(self), ticket, number: number.clone(), keep, outcome: OnceLock::new() };
        let turn = Queued { begin, request, buffer, asks, session, worker, cancelled, wait, came };
        let own_log = Arc::clone(&log);
        tokio::spawn(async move {
            let ending = serve(&place, turn, &own_log).await.map_err(|problem| place.front.metrics.problem(problem));
            if let Err(problem) = &ending {
                // After a result that found no room its verdict stands.
                let _stands = place.outcome.set(Outcome::Problem { reason: problem.reason, started: problem.started });
            }
            own_log.end(ending);
            drop(place);
        });
        Ok(RunHandle { front: Arc::clone(self), number, log, cancels: true })
    }

    /// Keeps the log of a run that has ended.
    fn keep(self: &Arc<Self>, number: RunNumber, kept: EndedRun) {
        let until = kept.until;
        let dropped = {
            let mut state = self.state();
            state.kept.insert(number.clone(), kept);
            state.forget_most()
        };
        drop(dropped);
        // None when the process ends.
        let Ok(runtime) = Handle::try_current() else { return };
        let front = Arc::clone(self);
        runtime.spawn(async move {
            tokio::time::sleep_until(until.into()).await;
            let gone = front.state().kept.remove(&number);
            drop(gone);
        });
    }
}

impl State {
    /// Lets those begin whose turn it is and that fit, and gives them idle workers.
    fn begin_all(&mut self) {
        while !self.draining
            && let Some(ticket) = self.admission.begin_next()
        {
            let Some(waiter) = self.waiters.remove(&ticket) else { continue };
            if waiter.has_keeper {
                // One that was cancelled just now ends by itself.
                let _gone = waiter.hand_over.send(Ok(None));
            } else {
                self.wanting.push_back(waiter);
            }
        }
        while let Some(waiter) = self.wanting.pop_front() {
            let Some((worker, prepared)) = self.take_idle(&waiter.asks) else { return self.wanting.push_front(waiter) };
            if let Err(Ok(Some(worker))) = waiter.hand_over.send(Ok(Some(worker))) {
                // It was cancelled just now, and ends by itself.
                self.idle.push((worker, prepared));
            }
        }
    }

    /// The best idle worker for a request. Those that have ended are dropped.
    fn take_idle(&mut self, asks: &Asks) -> Option<(WorkerLink, Option<Prepared>)> {
        loop {
            let ranked = self.idle.iter().enumerate().max_by_key(|(_, (_, prepared))| asks.rank(prepared.as_ref()));
            let best = ranked.map(|(index, _)| index)?;
            let (worker, prepared) = self.idle.remove(best);
            if worker.is_there() {
                return Some((worker, prepared));
            }
        }
    }

    /// Drops what was to be kept for the shortest time, until the rest is not too large.
    fn forget_most(&mut self) -> Vec<EndedRun> {
        let size = |kept: &EndedRun| kept.log.ending().and_then(Result::ok).map_or(0, |result| result.len());
        let mut all: usize = self.kept.values().map(size).sum();
        let mut dropped = Vec::new();
        while all > MAX_KEPT
            && let Some(number) = self.kept.iter().min_by_key(|(_, kept)| kept.until).map(|(number, _)| number.clone())
        {
            let kept = self.kept.remove(&number);
            all -= kept.as_ref().map_or(0, size);
            dropped.extend(kept);
        }
        dropped
    }

    fn not_admitted(&self, why: NotAdmitted, key: &Key) -> Problem {
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
            NotAdmitted::KeyQueue => {
                let detail = format!("as many requests of key {} wait as may ({}); try again when some have ended", key.id, key.waiting);
                Problem::new(StatusCode::TOO_MANY_REQUESTS, "key_queue", detail).after(1)
            }
            NotAdmitted::KeyCpu(after) => {
                let detail = format!("the runs of key {} have used the CPU time that they may use in an hour", key.id);
                Problem::new(StatusCode::TOO_MANY_REQUESTS, "key_cpu", detail).after(after.as_secs() + 1)
            }
            NotAdmitted::KeyRate(after) => {
                let most = key.runs_per_minute.unwrap_or_default();
                let detail = format!("key {} may begin {most} runs a minute", key.id);
                Problem::new(StatusCode::TOO_MANY_REQUESTS, "key_rate", detail).after(after.as_secs() + 1)
            }
        }
    }
}

fn draining() -> Problem {
    Problem::new(StatusCode::SERVICE_UNAVAILABLE, "draining", "the service ends, and takes no more requests").after(1)
}

/// The place that a request has taken; gives it back when dropped.
struct Place {
    front: Arc<Front>,
    ticket: Ticket,
    number: RunNumber,
    keep: Duration,
    /// What came of the run.
    outcome: OnceLock<Outcome>,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.front.state();
        state.waiters.remove(&self.ticket);
        let run = state.runs.remove(&self.number);
        if let (Some(run), Some(outcome)) = (&run, self.outcome.get()) {
            self.front.watch.ended(&self.number, run, outcome);
        }
        state.admission.end(self.ticket);
        state.begin_all();
        drop(state);
        if let Some(run) = &run {
            // Only a task that has failed has not ended it itself.
            run.log.end(Err(lost("its task has failed")));
        }
        if let Some(run) = run.filter(|_| !self.keep.is_zero()) {
            let kept = EndedRun { key: run.key, log: run.log, until: Instant::now() + self.keep };
            self.front.keep(self.number.clone(), kept);
        }
        self.front.ended.notify_waiters();
    }
}

/// Bytes of requests and results in memory.
struct Buffers {
    used: AtomicU64,
    most: AtomicU64,
}

/// Bytes that a request, or its result, has in memory; given back when dropped.
pub struct Buffer {
    buffers: Arc<Buffers>,
    bytes: u64,
}

impl Buffer {
    /// Takes more.
    ///
    /// # Errors
    /// All requests together have as much as they may.
    pub fn grow(&mut self, bytes: usize) -> Result<(), Problem> {
        let most = self.buffers.most.load(Relaxed);
        // One thread alone does all this.
        if self.buffers.used.load(Relaxed) + bytes as u64 > most {
            let detail =
                format!("requests and results in memory have {most} bytes together (`[limits] buffers`); try again when some have ended");
            return Err(Problem::new(StatusCode::SERVICE_UNAVAILABLE, "buffers_full", detail).after(1));
        }
        self.buffers.used.fetch_add(bytes as u64, Relaxed);
        self.bytes += bytes as u64;
        Ok(())
    }

    /// These bytes, which it has room for: they count until the last was written.
    pub fn hold(self, answer: Vec<u8>) -> Bytes {
        Bytes::from_owner(BufferedAnswer { answer, _buffer: self })
    }

    /// Gives some back.
    pub fn shrink(&mut self, bytes: usize) {
        let bytes = self.bytes.min(bytes as u64);
        self.buffers.used.fetch_sub(bytes, Relaxed);
        self.bytes -= bytes;
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.buffers.used.fetch_sub(self.bytes, Relaxed);
    }
}

/// A run that was let in. Dropping it cancels the run, unless it was detached.
pub struct RunHandle {
    front: Arc<Front>,
    number: RunNumber,
    log: Arc<RunLog>,
    cancels: bool,
}

impl RunHandle {
    /// Waits for what comes of it.
    ///
    /// # Errors
    /// It was not run, or its result is lost.
    pub async fn answer(&self) -> Ending {
        self.log.ended().await
    }

    /// Lets it go on by itself.
    pub fn detach(mut self) -> Arc<RunLog> {
        self.cancels = false;
        Arc::clone(&self.log)
    }

    /// Its events. It is cancelled when nothing has read them for some time.
    pub fn into_events(self, format: Format) -> Option<EventStream> {
        let (front, number) = (Arc::clone(&self.front), self.number.clone());
        let log = self.detach();
        EventStream::new(front, number, log, 0, format, true)
    }
}

impl Drop for RunHandle {
    fn drop(&mut self) {
        if self.cancels {
            self.front.cancel(&self.number, |_| true);
        }
    }
}

/// The events of a run, for one client.
pub struct EventStream {
    front: Arc<Front>,
    number: RunNumber,
    log: Arc<RunLog>,
    /// None at its end.
    reader: Option<Reader>,
    format: Format,
    cancels: bool,
}

impl EventStream {
    /// Those that come `after` one; none: the log does not reach so far back. `cancels`: a run whose events
    /// nothing reads for some time is cancelled.
    pub fn new(front: Arc<Front>, number: RunNumber, log: Arc<RunLog>, after: u64, format: Format, cancels: bool) -> Option<Self> {
        let reader = log.read(after)?;
        Some(EventStream { front, number, log, reader: Some(reader), format, cancels })
    }

    /// The next bytes; none at the end.
    pub async fn next(&mut self) -> Option<Vec<u8>> {
        self.reader.as_mut()?.next(self.format).await
    }
}

impl Drop for EventStream {
    fn drop(&mut self) {
        self.reader = None;
        if !self.cancels || self.log.is_read() || self.log.ending().is_some() {
            return;
        }
        // None when the process ends, and all runs with it.
        let Ok(runtime) = Handle::try_current() else { return };
        let (front, number, log) = (Arc::clone(&self.front), self.number.clone(), Arc::clone(&self.log));
        runtime.spawn(async move {
            tokio::time::sleep(UNREAD).await;
            if !log.is_read() {
                front.cancel(&number, |_| true);
            }
        });
    }
}

fn lost(why: &str) -> Problem {
    let detail = format!("the worker has gone, and what came of the run with it: {why}; `started` says whether code may have run");
    Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "worker_lost", detail)
}

fn cancelled_in_queue() -> Problem {
    Problem::new(StatusCode::CONFLICT, "cancelled", "the run was cancelled before it began")
}

/// A request until it has its worker.
struct Queued {
    begin: Begin,
    request: Vec<u8>,
    buffer: Buffer,
    /// Which worker is good for it, and the one that it gets.
    asks: Asks,
    session: Option<Arc<Session>>,
    worker: oneshot::Receiver<Result<Option<WorkerLink>, Problem>>,
    cancelled: oneshot::Receiver<()>,
    wait: Duration,
    came: Instant,
}

/// Waits for a worker, and for what comes of the run there.
async fn serve(place: &Place, turn: Queued, log: &RunLog) -> Ending {
    let Queued { begin, request, buffer, asks, session, worker: mut given, mut cancelled, wait, came } = turn;
    let (key, policy, number) = (begin.key.clone(), begin.policy.clone(), begin.run.clone());
    let metrics = &place.front.metrics;
    let mut held = Some((request, buffer));
    let mut tries = 0;
    let (mut worker, result, queued) = loop {
        let next = tokio::select! {
            worker = given => worker.unwrap_or_else(|_| Err(draining()))?,
            _ = &mut cancelled => return Err(cancelled_in_queue()),
            () = tokio::time::sleep(wait.saturating_sub(came.elapsed())) => return Err(queue_timeout(wait)),
        };
        let mut worker = match (next, &session) {
            (Some(worker), _) => Link::Worker(worker),
            (None, Some(session)) => tokio::select! {
                keeper = Arc::clone(session).keeper() => Link::Keeper(keeper?),
                _ = &mut cancelled => return Err(cancelled_in_queue()),
                () = tokio::time::sleep(wait.saturating_sub(came.elapsed())) => return Err(queue_timeout(wait)),
            },
            (None, None) => return Err(draining()),
        };
        let began = Instant::now();
        let queued = began.duration_since(came);
        if let Some(run) = place.front.state().runs.get_mut(&place.number) {
            run.began = Some(began);
            place.front.watch.changed(&place.number, run);
        }
        if tries == 0 {
            metrics.begun(queued);
        }
        let started = || {
            metrics.started(began.elapsed());
            log.start(queued);
        };
        let error = match worker.begin(begin.clone(), held.as_ref().map_or(&[], |(request, _)| request)).await {
            Ok(()) => match exchange(&mut worker, &mut cancelled, log, &mut held, started).await {
                Ok(result) => break (worker, result, queued),
                Err(error) => error,
            },
            Err(error) => error,
        };
        tries += 1;
        // Its code has not begun, so another worker may have it. A session has one keeper.
        if held.is_none() || session.is_some() || tries >= MAX_WORKERS_OF_RUN {
            let problem = if session.is_some() { session_ended() } else { lost(&error.to_string()) };
            return Err(Problem { started: log.has_started(), ..problem });
        }
        given = place.front.another_worker(asks.clone());
    };
    let ended = Ended::of(&result);
    metrics.ended(&policy, &key, &ended);
    place.front.state().admission.spend(&key, ended.cpu_ms(), Instant::now());
    // It is idle when it has cleared up, which the answer does not wait for.
    let front = Arc::clone(&place.front);
    tokio::spawn(async move {
        let idle = worker.next().await;
        match (idle, worker) {
            (Ok(FromWorker::Idle(prepared)), Link::Worker(worker)) => front.add_idle(worker, prepared),
            // It is free from here on.
            (Ok(FromWorker::Idle(_)), Link::Keeper(keeper)) => keeper.give_back(),
            _ => {}
        }
    });
    // It is the first outcome.
    let _first = place.outcome.set(Outcome::Result(ended));
    place.front.buffered(with_place(result, &number, &key, queued))
}

fn queue_timeout(wait: Duration) -> Problem {
    let detail = format!("the run did not begin within {} s", wait.as_secs_f64());
    Problem::new(StatusCode::SERVICE_UNAVAILABLE, "queue_timeout", detail).after(wait.as_secs().div_ceil(2))
}

/// Who runs it: a worker of its own, or the keeper of its session, which others may wait for.
enum Link {
    Worker(WorkerLink),
    Keeper(KeeperGuard),
}

impl Deref for Link {
    type Target = WorkerLink;

    fn deref(&self) -> &WorkerLink {
        match self {
            Link::Worker(worker) => worker,
            Link::Keeper(keeper) => keeper,
        }
    }
}

impl DerefMut for Link {
    fn deref_mut(&mut self) -> &mut WorkerLink {
        match self {
            Link::Worker(worker) => worker,
            Link::Keeper(keeper) => keeper,
        }
    }
}

/// An answer, with its room.
struct BufferedAnswer {
    answer: Vec<u8>,
    _buffer: Buffer,
}

impl AsRef<[u8]> for BufferedAnswer {
    fn as_ref(&self) -> &[u8] {
        &self.answer
    }
}

/// A worker's result, with what the front knows of the run.
fn with_place(mut result: Vec<u8>, number: &str, key: &str, queued: Duration) -> Vec<u8> {
    // It is an object, which ends with its brace.
    while result.pop().is_some_and(|byte| byte != b'}') {}
    let more = json!({ "run": number, "key": key, "queued_ms": queued.as_millis() as u64 }).to_string();
    result.push(b',');
    result.extend(more.as_bytes().get(1..).unwrap_or_default());
    result.push(b'\n');
    result
}

/// Hears what the worker says of a run, until its result is whole. `held`: the request, as long as another
/// worker may have it.
async fn exchange(
    worker: &mut WorkerLink,
    cancelled: &mut oneshot::Receiver<()>,
    log: &RunLog,
    held: &mut Option<(Vec<u8>, Buffer)>,
    started: impl Fn(),
) -> Result<Vec<u8>, LinkError> {
    let (mut result, mut may_cancel) = (Vec::new(), true);
    loop {
        tokio::select! {
            message = worker.next() => match message? {
                FromWorker::Started => {
                    *held = None;
                    started();
                }
                FromWorker::Output(stream, bytes) => log.print(stream, &bytes),
                FromWorker::LeftOut(stream, bytes) => log.leave_out(stream, bytes),
                FromWorker::Result(part) => result.extend(part),
                FromWorker::End => return Ok(result),
                FromWorker::Idle(_) => return Err(LinkError::Malformed(Malformed::Kind(128))),
            },
            _ = &mut *cancelled, if may_cancel => {
                (may_cancel, *held) = (false, None);
                worker.send(&ToWorker::Cancel).await?;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_that_is_prepared_for_a_request_comes_before_one_for_none_and_that_before_others() {
        let prepared = |key: Option<&str>, policy: &str, languages: &[&str]| Prepared {
            key: key.map(str::to_owned),
            policy: policy.to_owned(),
            languages: languages.iter().map(|name| (*name).to_owned()).collect(),
        };
        let asks = |language: &str| Asks { key: "a".to_owned(), policy: "p".to_owned(), language: language.to_owned() };
        let names = ["python", "py", ""];
        for language in names {
            assert_eq!(asks(language).rank(Some(&prepared(None, "p", &names))), 2, "{language}");
            assert_eq!(asks(language).rank(Some(&prepared(Some("a"), "p", &names))), 2, "{language}");
            assert_eq!(asks(language).rank(None), 1);
            for other in
                [prepared(Some("b"), "p", &names), prepared(None, "q", &names), prepared(None, "p", &["sh"]), prepared(None, "p", &[])]
            {
                assert_eq!(asks(language).rank(Some(&other)), 0, "{other:?}");
            }
        }
    }
}
