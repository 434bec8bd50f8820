//! What those see who watch the service: runs as they come, begin and end, verdicts by the minute, and
//! what runs were refused.
//!
//! Runs write here and never wait for a watcher. Events wait for watchers up to [`MAX_WAITING`] bytes;
//! a watcher that is slower is told how many it has missed, and what there is now. Without a watcher
//! no event is made. Verdicts and denials are kept in memory alone, bounded, and end with the front:
//! the audit log has all.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use serde_json::{Value, json};
use stockade_protocol::service::{Key, Scope, Settings};
use tokio::sync::Notify;

use crate::{
    denials::Denials,
    front::{Buffer, Front, Run, RunNumber},
    history::History,
    http::show,
    keys,
    lock::lock,
    log::{Format, object},
    metrics::Ended,
    problem::Problem,
};

/// Bytes of events that wait for watchers.
const MAX_WAITING: usize = 1 << 20;
/// A watcher gets about so much at once.
const PART: usize = 64 << 10;
/// A watcher gets what comes within this time at once.
const PAUSE: Duration = Duration::from_millis(100);
/// How often what is in use is told, where it has changed.
const LOAD: Duration = Duration::from_millis(500);
/// After this time without an event a watcher hears that the stream goes on.
const SILENCE: Duration = Duration::from_secs(10);

/// How a run has ended.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// With a result.
    Result(Box<Ended>),
    /// With a problem of this reason, before or after its program may have started.
    Problem {
        /// Its reason.
        reason: &'static str,
        /// Whether code may have run.
        started: bool,
    },
}

/// Shared by all runs and all watchers.
pub struct Watch {
    state: Mutex<State>,
    /// An event was added.
    changed: Notify,
    since: Instant,
}

#[derive(Default)]
struct State {
    events: VecDeque<Event>,
    /// Bytes of them.
    size: usize,
    /// Bytes of all that there were.
    written: u64,
    last_seq: u64,
    watchers: usize,
    history: History,
    denials: Denials,
    load: Option<Load>,
}

/// What is in use, as all watchers are told.
#[derive(Clone)]
struct Load {
    at: Instant,
    value: Arc<Value>,
}

struct Event {
    seq: u64,
    kind: &'static str,
    line: Vec<u8>,
}

impl Watch {
    /// One that has seen nothing.
    pub fn new() -> Self {
        Watch { state: Mutex::default(), changed: Notify::new(), since: Instant::now() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn now_ms(&self) -> u64 {
        self.since.elapsed().as_millis() as u64
    }

    /// A request waits for its turn, or a run begins.
    pub fn changed(&self, number: &RunNumber, run: &Run) {
        let kind = if run.began.is_some() { "running" } else { "waiting" };
        self.add(kind, || show(number, run));
    }

    /// A run has ended.
    pub fn ended(&self, number: &RunNumber, run: &Run, outcome: &Outcome) {
        let now = Instant::now();
        {
            let mut state = self.state();
            let minute = state.history.now(now);
            match outcome {
                Outcome::Result(ended) => minute.add_result(&ended.verdict, ended.cpu_ms()),
                Outcome::Problem { reason, .. } => minute.add_problem(reason),
            }
            if let Outcome::Result(ended) = outcome {
                state.denials.add(&run.policy, &ended.denials, now);
            }
        }
        self.add("ended", || {
            let mut shown = show(number, run);
            let more = match outcome {
                Outcome::Result(ended) => json!({
                    "verdict": ended.verdict,
                    "reason": ended.reason,
                    "code": ended.code,
                    "started": ended.started,
                    "cpu_ms": ended.cpu_ms(),
                    "memory_peak_bytes": ended.memory_peak_bytes(),
                    "denials": ended.denials.len(),
                }),
                Outcome::Problem { reason, started } => json!({ "verdict": null, "reason": reason, "started": started }),
            };
            extend(&mut shown, more);
            extend(&mut shown, json!({ "state": "ended" }));
            shown
        });
    }

    fn add(&self, kind: &'static str, more: impl FnOnce() -> Value) {
        let mut state = self.state();
        state.last_seq += 1;
        if state.watchers == 0 {
            return;
        }
        let seq = state.last_seq;
        let line = object(kind, seq, self.now_ms(), more());
        (state.size, state.written) = (state.size + line.len(), state.written + line.len() as u64);
        state.events.push_back(Event { seq, kind, line });
        while state.size > MAX_WAITING
            && let Some(oldest) = state.events.pop_front()
        {
            state.size -= oldest.line.len();
        }
        drop(state);
        self.changed.notify_waiters();
    }

    /// Verdicts of the last minutes, for one who asks now.
    pub fn history(&self, minutes: u64) -> Value {
        let now = Instant::now();
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.state().history.show(minutes, now, unix.as_secs())
    }

    /// What runs were refused, the last first.
    pub fn denials(&self) -> Value {
        let now = Instant::now();
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.state().denials.show(now, unix.as_secs())
    }

    /// What is in use, made anew where it is old.
    fn load(&self, front: &Front) -> Arc<Value> {
        let known = self.state().load.clone();
        if let Some(Load { value, .. }) = known.filter(|load| load.at.elapsed() < LOAD) {
            return value;
        }
        self.load_now(front)
    }

    fn load_now(&self, front: &Front) -> Arc<Value> {
        let value = Arc::new(front.load());
        self.state().load = Some(Load { at: Instant::now(), value: Arc::clone(&value) });
        value
    }
}

fn extend(object: &mut Value, more: Value) {
    if let (Value::Object(object), Value::Object(more)) = (object, more) {
        object.extend(more);
    }
}

/// All that one who begins to watch must know, and the number of the last event in it.
pub struct Snapshot {
    /// It counts as buffered until it was written.
    pub buffer: Buffer,
    /// The event, without its line's end.
    pub line: Vec<u8>,
}

impl AsRef<[u8]> for Snapshot {
    fn as_ref(&self) -> &[u8] {
        &self.line
    }
}

/// What is known now, up to the last event.
///
/// # Errors
/// There is no room for it.
pub fn snapshot(front: &Front, key: &Key) -> Result<(u64, Snapshot), Problem> {
    let watch = &front.watch;
    let load = watch.load_now(front);
    // No run comes, begins or ends meanwhile.
    let (seq, mut shown) = front.overview(|| watch.state().last_seq);
    extend(&mut shown, json!({ "load": *load }));
    let line = object("snapshot", seq, watch.now_ms(), shown);
    let mut buffer = front.buffer(&key.id);
    buffer.grow(line.len())?;
    Ok((seq, Snapshot { buffer, line }))
}

/// One who watches.
pub struct Watcher {
    front: Arc<Front>,
    key: Key,
    format: Format,
    after: u64,
    /// The settings of the last snapshot; none: the next event is a snapshot.
    known: Option<Arc<Settings>>,
    load: Arc<Value>,
    last_part: Option<Instant>,
    /// Bytes that had been written when it got its last part.
    read: u64,
    is_over: bool,
}

/// A part of a stream, which may count as buffered.
pub struct Part {
    bytes: Vec<u8>,
    _buffer: Option<Buffer>,
}

impl AsRef<[u8]> for Part {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Watcher {
    /// One with this key, which has the scope.
    pub fn new(front: Arc<Front>, key: Key, format: Format) -> Self {
        front.watch.state().watchers += 1;
        Watcher { front, key, format, after: 0, known: None, load: Arc::default(), last_part: None, read: 0, is_over: false }
    }

    /// What is new, once something is; none after the end.
    pub async fn next(&mut self) -> Option<Part> {
        if self.is_over {
            return None;
        }
        let front = Arc::clone(&self.front);
        self.pause(&front.watch).await;
        let begun = Instant::now();
        loop {
            let changed = front.watch.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if let Some(part) = self.take() {
                let full = part.bytes.len() >= PART;
                self.last_part = (!full).then(Instant::now);
                self.read = front.watch.state().written;
                return Some(part);
            }
            if begun.elapsed() >= SILENCE {
                return Some(self.part("ping", self.after, Value::Null));
            }
            // Without an event it looks at keys and load.
            let _changed_or_late = tokio::time::timeout(LOAD, changed).await;
        }
    }

    /// Lets events gather, unless so many come that some would be lost.
    async fn pause(&self, watch: &Watch) {
        while let Some(rest) = self.last_part.and_then(|last| PAUSE.checked_sub(last.elapsed())) {
            let changed = watch.changed.notified();
            if watch.state().written - self.read > MAX_WAITING as u64 / 2 {
                return;
            }
            let _changed_or_late = tokio::time::timeout(rest, changed).await;
        }
    }

    fn part(&self, kind: &str, seq: u64, more: Value) -> Part {
        let mut bytes = Vec::new();
        self.format.write(&mut bytes, kind, seq, &object(kind, seq, self.front.watch.now_ms(), more));
        Part { bytes, _buffer: None }
    }

    /// What there is; none: nothing is new.
    fn take(&mut self) -> Option<Part> {
        let settings = self.front.settings();
        if let Err(problem) = keys::still_good(&settings.keys, &self.key, Scope::Watch) {
            self.is_over = true;
            return Some(self.part("problem", self.after, json!({ "problem": problem.to_json() })));
        }
        if !self.known.as_ref().is_some_and(|known| Arc::ptr_eq(known, &settings)) {
            return Some(self.show_all(settings, Vec::new()));
        }
        let mut bytes = Vec::new();
        let missed = {
            let state = self.front.watch.state();
            let first = state.events.front().map_or(state.last_seq + 1, |event| event.seq);
            let missed = first.saturating_sub(self.after + 1);
            if missed == 0 {
                let from = state.events.partition_point(|event| event.seq <= self.after);
                for event in state.events.range(from..) {
                    if bytes.len() >= PART {
                        break;
                    }
                    self.format.write(&mut bytes, event.kind, event.seq, &event.line);
                    self.after = event.seq;
                }
            }
            missed
        };
        if missed > 0 {
            let gap = self.part("gap", self.after + missed, json!({ "events": missed })).bytes;
            return Some(self.show_all(settings, gap));
        }
        let load = self.front.watch.load(&self.front);
        if load != self.load {
            let more = self.part("load", self.after, json!({ "load": *load }));
            bytes.extend(more.bytes);
            self.load = load;
        }
        (!bytes.is_empty()).then_some(Part { bytes, _buffer: None })
    }

    /// All that there is, after these bytes.
    fn show_all(&mut self, settings: Arc<Settings>, mut bytes: Vec<u8>) -> Part {
        match snapshot(&self.front, &self.key) {
            Ok((seq, Snapshot { buffer, line })) => {
                (self.after, self.known) = (seq, Some(settings));
                self.load = self.front.watch.load(&self.front);
                self.format.write(&mut bytes, "snapshot", seq, &line);
                Part { bytes, _buffer: Some(buffer) }
            }
            Err(problem) => {
                self.is_over = true;
                self.part("problem", self.after, json!({ "problem": problem.to_json() }))
            }
        }
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        let mut state = self.front.watch.state();
        state.watchers -= 1;
        if state.watchers == 0 {
            (state.events, state.size) = (VecDeque::new(), 0);
        }
    }
}
