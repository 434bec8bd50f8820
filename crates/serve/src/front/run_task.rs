//! One run, from the queue to its result: the wait for a worker or a keeper, what that says while it
//! runs, and what is given back at its end.
//!
//! A run whose worker goes before the program has begun is given to another one, which compiles the code anew
//! where that is to be compiled. Which request is next is decided in `admission`.

use std::{
    ops::{Deref, DerefMut},
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use axum::http::StatusCode;
use serde_json::json;
use stockade_protocol::service::{Begin, FromWorker, Malformed, ToWorker};
use tokio::sync::oneshot;

use super::{Buffer, EndedRun, Front, MAX_WORKERS_OF_RUN, RunNumber, WaitingRequest, draining};
use crate::{
    admission::Ticket,
    link::{LinkError, WorkerLink},
    log::{Ending, RunLog},
    metrics::Ended,
    problem::Problem,
    sessions::{KeeperGuard, Session, session_ended},
    watch::Outcome,
};

/// A request that waits or runs: takes it off the front's lists when dropped.
pub(super) struct RunGuard {
    pub(super) front: Arc<Front>,
    pub(super) ticket: Ticket,
    pub(super) number: RunNumber,
    pub(super) keep: Duration,
    /// What came of the run.
    pub(super) outcome: OnceLock<Outcome>,
}

impl Drop for RunGuard {
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
            // A log without an end is that of a task that has panicked.
            run.log.end(Err(lost("its task has failed")));
        }
        if let Some(run) = run.filter(|_| !self.keep.is_zero()) {
            let kept = EndedRun { key: run.key, name: run.name, log: run.log, until: tokio::time::Instant::now() + self.keep };
            self.front.keep(self.number.clone(), kept);
        }
        self.front.ended.notify_waiters();
    }
}

/// A request until it has its worker.
pub(super) struct PendingRun {
    pub(super) begin: Begin,
    pub(super) request: Vec<u8>,
    pub(super) buffer: Buffer,
    pub(super) waits: WaitingRequest,
    pub(super) session: Option<Arc<Session>>,
    pub(super) worker: oneshot::Receiver<Result<Option<WorkerLink>, Problem>>,
    pub(super) cancelled: oneshot::Receiver<()>,
    pub(super) wait: Duration,
    pub(super) came: Instant,
}

/// Waits for a worker, and for what comes of the run there.
pub(super) async fn execute(guard: &RunGuard, run: PendingRun, log: &RunLog) -> Ending {
    let PendingRun { begin, request, buffer, waits, session, worker: mut given, mut cancelled, wait, came } = run;
    let (key, policy, number) = (begin.key.clone(), begin.policy.clone(), begin.run.clone());
    let metrics = &guard.front.metrics;
    let late = || tokio::time::sleep(wait.saturating_sub(came.elapsed()));
    // The turn of a session's run comes only when it has its keeper.
    let mut keeper = match &session {
        None => None,
        Some(session) => tokio::select! {
            biased;
            keeper = Arc::clone(session).keeper() => Some(keeper?),
            problem = &mut given => return Err(problem.ok().and_then(Result::err).unwrap_or_else(draining)),
            _ = &mut cancelled => return Err(cancelled_in_queue()),
            () = late() => return Err(queue_timeout(wait)),
        },
    };
    if keeper.is_some() {
        guard.front.has_keeper(guard.ticket);
    }
    let mut held = Some((request, buffer));
    let mut tries = 0;
    let (mut worker, result, queued) = loop {
        let next = tokio::select! {
            // First: a worker that was handed over belongs to this run, and would end with it.
            biased;
            worker = &mut given => worker.unwrap_or_else(|_| Err(draining())),
            _ = &mut cancelled => Err(cancelled_in_queue()),
            // One that had begun has its turn.
            () = late(), if tries == 0 => Err(queue_timeout(wait)),
        };
        let next = match next {
            Ok(Some(worker)) => Some(Link::Worker(worker)),
            Ok(None) => keeper.take().map(Link::Keeper),
            Err(problem) => return Err(problem),
        };
        let Some(mut worker) = next else { return Err(draining()) };
        let began = Instant::now();
        let queued = began.duration_since(came);
        if let Some(run) = guard.front.state().runs.get_mut(&guard.number) {
            run.began = Some(began);
            guard.front.watch.changed(&guard.number, run);
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
        // Its program has not begun, at most a compiler has read the code: another worker may have it. A session
        // has one keeper.
        if held.is_none() || session.is_some() || tries >= MAX_WORKERS_OF_RUN {
            let problem = if session.is_some() { session_ended() } else { lost(&error.to_string()) };
            return Err(Problem { started: log.has_started(), ..problem });
        }
        given = guard.front.another_worker(waits.clone());
    };
    let ended = Ended::of(&result);
    let unrecorded = unrecorded(&ended, &result);
    metrics.ended(&policy, &key, &ended);
    guard.front.state().admission.spend(&key, ended.cpu_ms(), Instant::now());
    // It is idle when it has cleared up, which the answer does not wait for.
    let front = Arc::clone(&guard.front);
    tokio::spawn(async move {
        let idle = worker.next().await;
        match (idle, worker) {
            (Ok(FromWorker::Idle(prepared)), Link::Worker(worker)) => front.add_idle(worker, prepared),
            // It is free from here on.
            (Ok(FromWorker::Idle(_)), Link::Keeper(mut keeper)) => keeper.is_done(),
            _ => {}
        }
    });
    // It is the first outcome.
    let _first = guard.outcome.set(Outcome::Result(Box::new(ended)));
    match unrecorded {
        Some(problem) => Err(problem),
        None => guard.front.buffered(&key, with_run(result, &number, &key, queued), true),
    }
}

/// The problem in place of a result that says that its run could not be recorded, and had to be.
fn unrecorded(ended: &Ended, result: &[u8]) -> Option<Problem> {
    let reason = ended.reason.as_ref().filter(|_| ended.verdict == "sandbox_error")?;
    let refusal: serde_json::Value = serde_json::from_slice(result).ok()?;
    let problem = Problem::unrecorded(reason, refusal["error"].as_str().unwrap_or_default())?;
    Some(Problem { started: ended.started, ..problem })
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

/// Hears what the worker says of a run, until its result is whole. `held`: the request, as long as another
/// worker may have it.
async fn exchange(
    worker: &mut WorkerLink,
    cancelled: &mut oneshot::Receiver<()>,
    log: &RunLog,
    held: &mut Option<(Vec<u8>, Buffer)>,
    started: impl Fn(),
) -> Result<Vec<u8>, LinkError> {
    let (mut result, mut may_cancel, mut has_answered) = (Vec::new(), true, false);
    loop {
        let message = tokio::select! {
            message = worker.next() => message?,
            _ = &mut *cancelled, if may_cancel => {
                (may_cancel, *held) = (false, None);
                worker.send(&ToWorker::Cancel).await?;
                continue;
            }
        };
        if matches!(message, FromWorker::Idle(_)) && !has_answered {
            // It had prepared something else before it read of the run.
            continue;
        }
        has_answered = true;
        match message {
            FromWorker::Started => {
                *held = None;
                started();
            }
            FromWorker::Output(stream, bytes) => log.print(stream, &bytes),
            FromWorker::LeftOut(stream, bytes) => log.leave_out(stream, bytes),
            FromWorker::Result(part) => result.extend(part),
            FromWorker::End => return Ok(result),
            FromWorker::Idle(_) => return Err(LinkError::Malformed(Malformed::Kind(128))),
        }
    }
}

/// A worker's result, with what the front knows of the run.
fn with_run(mut result: Vec<u8>, number: &str, key: &str, queued: Duration) -> Vec<u8> {
    // It is an object, which ends with its brace.
    while result.pop().is_some_and(|byte| byte != b'}') {}
    let more = json!({ "run": number, "key": key, "queued_ms": queued.as_millis() as u64 }).to_string();
    result.push(b',');
    result.extend(more.as_bytes().get(1..).unwrap_or_default());
    result.push(b'\n');
    result
}

fn lost(why: &str) -> Problem {
    let detail = format!("the worker has gone, and what came of the run with it: {why}; `started` says whether code may have run");
    Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "worker_lost", detail)
}

fn cancelled_in_queue() -> Problem {
    Problem::new(StatusCode::CONFLICT, "cancelled", "the run was cancelled before it began")
}

fn queue_timeout(wait: Duration) -> Problem {
    let detail = format!("the run did not begin within {} s", wait.as_secs_f64());
    Problem::new(StatusCode::SERVICE_UNAVAILABLE, "queue_timeout", detail).after(wait.as_secs().div_ceil(2))
}
