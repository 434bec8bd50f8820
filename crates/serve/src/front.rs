//! What the front knows: settings, requests that wait or run, and the workers that are idle.
//!
//! A run is owned by a task of its own, so that a client who hangs up cancels it and loses nothing
//! else. Each run ends in exactly one of three ways: with a result, with a problem, or cancelled.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use axum::http::StatusCode;
use stockade_protocol::service::{Begin, FromWorker, Key, RunSize, Settings, ToWorker};
use tokio::sync::{Notify, oneshot};

use crate::{
    admission::{Admission, NotAdmitted, Ticket},
    link::{LinkError, WorkerLink},
    problem::Problem,
};

/// A run's number at the front.
pub type RunNumber = String;

/// What came of a run: the worker's result, and how long the request had waited for it.
#[derive(Debug)]
pub struct Answer {
    /// `exec`'s JSON.
    pub result: Vec<u8>,
    /// From the request's end to its beginning at a worker.
    pub queued: Duration,
}

/// Shared by all requests.
pub struct Front {
    state: Mutex<State>,
    /// Something has ended, while it drains.
    ended: Notify,
}

struct State {
    settings: Arc<Settings>,
    admission: Admission,
    /// Who waits for a worker.
    waiters: BTreeMap<Ticket, oneshot::Sender<Result<WorkerLink, Problem>>>,
    idle: Vec<WorkerLink>,
    runs: BTreeMap<RunNumber, Run>,
    /// Bytes of requests and results in memory.
    buffered: u64,
    draining: bool,
}

/// A request that was let in.
#[derive(Debug)]
pub struct Run {
    /// Whose it is.
    pub key: String,
    /// Its policy.
    pub policy: String,
    /// When it came.
    pub came: Instant,
    /// When it began, if it has.
    pub began: Option<Instant>,
    cancel: Option<oneshot::Sender<()>>,
}

impl Front {
    /// One that has no worker yet.
    pub fn new(settings: Settings) -> Self {
        let admission = Admission::new(settings.capacity, &settings.keys);
        let state = State {
            settings: Arc::new(settings),
            admission,
            waiters: BTreeMap::new(),
            idle: Vec::new(),
            runs: BTreeMap::new(),
            buffered: 0,
            draining: false,
        };
        Front { state: Mutex::new(state), ended: Notify::new() }
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
        state.settings = Arc::new(settings);
        for ticket in state.admission.without_key() {
            let Some(waiter) = state.waiters.remove(&ticket) else { continue };
            let gone =
                Problem::new(StatusCode::UNAUTHORIZED, "key_revoked", "the key was taken away while the request waited; ask for another");
            let _gone = waiter.send(Err(gone));
        }
    }

    /// Room for what one request brings and gets.
    pub fn buffer(self: &Arc<Self>) -> Buffer {
        Buffer { front: Arc::clone(self), bytes: 0 }
    }

    /// Takes no more requests. Those that wait get a problem.
    pub fn drain(&self) {
        let mut state = self.state();
        state.draining = true;
        for waiter in std::mem::take(&mut state.waiters).into_values() {
            // One that was cancelled just now does not wait any more.
            let _gone = waiter.send(Err(draining()));
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

    /// The runs that `shows` picks, as `show` words them.
    pub fn runs<T>(&self, shows: impl Fn(&Run) -> bool, show: impl Fn(&RunNumber, &Run) -> T) -> Vec<T> {
        let state = self.state();
        state.runs.iter().filter(|(_, run)| shows(run)).map(|(number, run)| show(number, run)).collect()
    }

    /// Cancels a run that `may` be cancelled. Whether there is one.
    pub fn cancel(&self, number: &str, may: impl Fn(&Run) -> bool) -> bool {
        let mut state = self.state();
        let Some(run) = state.runs.get_mut(number).filter(|run| may(run)) else { return false };
        // One that is cancelled already stays so.
        let _cancelled = run.cancel.take().map(|cancel| cancel.send(()));
        true
    }

    /// A worker that takes a run.
    pub fn add_idle(&self, worker: WorkerLink) {
        let mut state = self.state();
        state.idle.push(worker);
        state.begin_all();
    }

    /// Runs a request, once it is its turn. Dropping what is returned cancels it.
    ///
    /// # Errors
    /// It may not even wait.
    pub fn run(
        self: &Arc<Self>,
        number: RunNumber,
        key: &Key,
        policy: &str,
        size: RunSize,
        request: Vec<u8>,
    ) -> Result<RunHandle, Problem> {
        let (cancel, cancelled) = oneshot::channel();
        let (done, answer) = oneshot::channel();
        let (hand_over, worker) = oneshot::channel();
        let came = Instant::now();
        let (ticket, wait) = {
            let mut state = self.state();
            if state.draining {
                return Err(draining());
            }
            let ticket = state.admission.ask(&key.id, size, came).map_err(|why| state.not_admitted(why, key))?;
            state.waiters.insert(ticket, hand_over);
            let run = Run { key: key.id.clone(), policy: policy.to_owned(), came, began: None, cancel: Some(cancel) };
            state.runs.insert(number.clone(), run);
            state.begin_all();
            (ticket, Duration::from_millis(state.settings.capacity.queue_ms))
        };
        let begin = Begin { run: number.clone(), key: key.id.clone(), policy: policy.to_owned(), length: request.len() as u64 };
        let place = Place { front: Arc::clone(self), ticket, number: number.clone() };
        tokio::spawn(async move {
            let came_of_it = serve(&place, begin, request, worker, cancelled, wait, came).await;
            drop(place);
            // The client may have gone.
            let _untaken = done.send(came_of_it);
        });
        Ok(RunHandle { front: Arc::clone(self), number, answer })
    }
}

impl State {
    /// Gives idle workers to the requests whose turn it is.
    fn begin_all(&mut self) {
        while !self.idle.is_empty() && !self.draining {
            let Some(ticket) = self.admission.begin_next() else { return };
            let (Some(waiter), Some(worker)) = (self.waiters.remove(&ticket), self.idle.pop()) else { continue };
            if let Err(Ok(worker)) = waiter.send(Ok(worker)) {
                // It was cancelled just now, and ends by itself.
                self.idle.push(worker);
            }
        }
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
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.front.state();
        state.waiters.remove(&self.ticket);
        state.runs.remove(&self.number);
        state.admission.end(self.ticket);
        state.begin_all();
        drop(state);
        self.front.ended.notify_waiters();
    }
}

/// Bytes that a request, or its result, has in memory; given back when dropped.
pub struct Buffer {
    front: Arc<Front>,
    bytes: u64,
}

impl Buffer {
    /// Takes more.
    ///
    /// # Errors
    /// All requests together have as much as they may.
    pub fn grow(&mut self, bytes: usize) -> Result<(), Problem> {
        let mut state = self.front.state();
        let most = state.settings.max_buffers;
        if state.buffered + bytes as u64 > most {
            let detail =
                format!("requests and results in memory have {most} bytes together (`[limits] buffers`); try again when some have ended");
            return Err(Problem::new(StatusCode::SERVICE_UNAVAILABLE, "buffers_full", detail).after(1));
        }
        state.buffered += bytes as u64;
        self.bytes += bytes as u64;
        Ok(())
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.front.state().buffered -= self.bytes;
    }
}

/// A run that was let in. Dropping it cancels the run.
pub struct RunHandle {
    front: Arc<Front>,
    number: RunNumber,
    answer: oneshot::Receiver<Result<Answer, Problem>>,
}

impl RunHandle {
    /// Waits for what comes of it.
    ///
    /// # Errors
    /// It was not run, or its result is lost.
    pub async fn answer(mut self) -> Result<Answer, Problem> {
        (&mut self.answer).await.unwrap_or_else(|_| Err(lost("its task has ended")))
    }
}

impl Drop for RunHandle {
    fn drop(&mut self) {
        self.front.cancel(&self.number, |_| true);
    }
}

fn lost(why: &str) -> Problem {
    let detail = format!("the worker has gone, and what came of the run with it: {why}; `started` says whether code may have run");
    Problem { started: true, ..Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "worker_lost", detail) }
}

fn cancelled_in_queue() -> Problem {
    Problem::new(StatusCode::CONFLICT, "cancelled", "the run was cancelled before it began")
}

/// Waits for a worker, and for what comes of the run there.
async fn serve(
    place: &Place,
    begin: Begin,
    request: Vec<u8>,
    worker: oneshot::Receiver<Result<WorkerLink, Problem>>,
    mut cancelled: oneshot::Receiver<()>,
    wait: Duration,
    came: Instant,
) -> Result<Answer, Problem> {
    let mut worker = tokio::select! {
        worker = worker => worker.unwrap_or_else(|_| Err(draining()))?,
        _ = &mut cancelled => return Err(cancelled_in_queue()),
        () = tokio::time::sleep(wait) => {
            let detail = format!("no worker was free within {} s", wait.as_secs());
            return Err(Problem::new(StatusCode::SERVICE_UNAVAILABLE, "queue_timeout", detail).after(wait.as_secs().div_ceil(2)));
        }
    };
    let (began, key) = (Instant::now(), begin.key.clone());
    if let Some(run) = place.front.state().runs.get_mut(&place.number) {
        run.began = Some(began);
    }
    // A worker runs nothing before it has the whole request.
    worker.begin(begin, &request).await.map_err(|error| Problem { started: false, ..lost(&error.to_string()) })?;
    let result = exchange(&mut worker, &mut cancelled).await.map_err(|error| lost(&error.to_string()))?;
    place.front.state().admission.spend(&key, cpu_of(&result), Instant::now());
    // It is idle when it has cleared up, which the answer does not wait for.
    let front = Arc::clone(&place.front);
    tokio::spawn(async move {
        if let Ok(FromWorker::Idle) = worker.next().await {
            front.add_idle(worker);
        }
    });
    Ok(Answer { result, queued: began.duration_since(came) })
}

/// The CPU time of a run, in milliseconds, as its result says.
fn cpu_of(result: &[u8]) -> u64 {
    #[derive(Default, serde::Deserialize)]
    #[serde(default)]
    struct Result {
        usage: Option<Usage>,
    }
    #[derive(Default, serde::Deserialize)]
    #[serde(default)]
    struct Usage {
        cpu_user_ms: Option<u64>,
        cpu_system_ms: Option<u64>,
    }
    let usage = serde_json::from_slice::<Result>(result).unwrap_or_default().usage.unwrap_or_default();
    usage.cpu_user_ms.unwrap_or(0) + usage.cpu_system_ms.unwrap_or(0)
}

async fn exchange(worker: &mut WorkerLink, cancelled: &mut oneshot::Receiver<()>) -> Result<Vec<u8>, LinkError> {
    let (mut result, mut may_cancel) = (Vec::new(), true);
    loop {
        tokio::select! {
            message = worker.next() => match message? {
                FromWorker::Result(part) => result.extend(part),
                FromWorker::End => return Ok(result),
                FromWorker::Idle => return Err(LinkError::Malformed(stockade_protocol::service::Malformed::Kind(128))),
            },
            _ = &mut *cancelled, if may_cancel => {
                may_cancel = false;
                worker.send(&ToWorker::Cancel).await?;
            }
        }
    }
}
