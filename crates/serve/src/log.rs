//! What is told of one run: events in order, and at last exactly one result or problem.
//!
//! The run writes, and never waits for a reader. Readers read at their own pace, each from where
//! it is, and again after a cut. Of what the program printed the last [`KEPT`] bytes are here, in
//! [`KEPT_PARTS`] parts at most; a reader that comes later gets a gap that counts what it has missed. What is
//! kept counts as buffered.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard},
    time::{Duration, Instant},
};

use axum::body::Bytes;
use base64::{Engine, engine::general_purpose::STANDARD};
use serde_json::{Map, Value, json};
use stockade_protocol::{OutputStream, PerStream};
use tokio::sync::Notify;

use crate::{front::Buffer, lock::lock, problem::Problem};

/// Bytes of output that wait for readers.
pub const KEPT: usize = 256 << 10;
/// Parts of output that wait for readers.
const KEPT_PARTS: usize = 4096;
/// What a part takes beside its bytes.
const OF_PART: usize = 96;
/// How many events that are gone a reader can still go on from.
const MARKS: usize = 1024;
/// A reader gets about so much at once.
const PART: usize = 64 << 10;
/// A part that may be larger counts as buffered until it was written.
const UNCOUNTED: usize = 32 << 10;
/// The most bytes of JSON for a byte of output, and for all else of an event.
const ESCAPED: usize = 6;
const FIELDS: usize = 512;
/// How long a reader waits that finds no room for its part.
const ROOM: Duration = Duration::from_millis(100);
/// After this time without an event a reader hears that the stream goes on.
const SILENCE: Duration = Duration::from_secs(10);

/// What came of a run: the worker's result with what the front adds, or why there is none.
pub type Ending = Result<Bytes, Problem>;

/// The log of one run.
pub struct RunLog {
    state: Mutex<State>,
    /// Something was added.
    changed: Notify,
    since: Instant,
    /// Bytes of output that its readers may get altogether.
    most: u64,
}

struct State {
    events: VecDeque<Entry>,
    /// The number of each event that is gone, and how much had been printed at its end.
    gone: VecDeque<(u64, PerStream<u64>)>,
    last_seq: u64,
    /// Bytes that the program has printed, told or not.
    printed: PerStream<u64>,
    /// Of these, what was told.
    told: u64,
    /// The beginning of a character whose rest has not come yet.
    held: PerStream<Vec<u8>>,
    /// Bytes of output in `events`, and in how many parts.
    kept: usize,
    parts: usize,
    buffer: Buffer,
    started: bool,
    end: Option<Ending>,
    readers: usize,
    /// When the last reader went.
    unread_since: Option<Instant>,
    /// The run is for its readers alone.
    must_be_read: bool,
}

struct Entry {
    seq: u64,
    at_ms: u64,
    /// What was printed before it.
    before: PerStream<u64>,
    event: Event,
}

enum Event {
    Accepted { run: String, position: usize },
    Started { queued_ms: u64 },
    Output(OutputStream, Vec<u8>),
    End,
}

impl RunLog {
    /// An empty one, whose readers get at most so many bytes of output.
    pub fn new(buffer: Buffer, most: u64) -> Self {
        let state = State {
            events: VecDeque::new(),
            gone: VecDeque::new(),
            last_seq: 0,
            printed: PerStream::default(),
            told: 0,
            held: PerStream::default(),
            kept: 0,
            parts: 0,
            buffer,
            started: false,
            end: None,
            readers: 0,
            unread_since: None,
            must_be_read: false,
        };
        RunLog { state: Mutex::new(state), changed: Notify::new(), since: Instant::now(), most }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn change<T>(&self, change: impl FnOnce(&mut State, u64) -> T) -> T {
        let changed = change(&mut self.state(), self.since.elapsed().as_millis() as u64);
        self.changed.notify_waiters();
        changed
    }

    /// The request was let in; so many wait before it.
    pub fn accept(&self, run: &str, position: usize) {
        self.change(|state, now| state.add(now, Event::Accepted { run: run.to_owned(), position }));
    }

    /// The program may run from now on. A second time, as where a sandbox was replaced, is no event.
    pub fn start(&self, queued: Duration) {
        self.change(|state, now| {
            if !std::mem::replace(&mut state.started, true) {
                state.add(now, Event::Started { queued_ms: queued.as_millis() as u64 });
            }
        });
    }

    /// How many bytes its output takes.
    pub fn output(&self) -> usize {
        let state = self.state();
        state.kept + state.parts * OF_PART
    }

    /// Whether the program may have run.
    pub fn has_started(&self) -> bool {
        self.state().started
    }

    /// The program has printed this.
    pub fn print(&self, stream: OutputStream, bytes: &[u8]) {
        self.change(|state, now| {
            let mut all = std::mem::take(state.held.of_mut(stream));
            all.extend_from_slice(bytes);
            let rest = all.split_off(whole_characters(&all));
            *state.held.of_mut(stream) = rest;
            if !all.is_empty() {
                state.tell(now, stream, all, self.most);
            }
        });
    }

    /// So many bytes of a stream have not come here.
    pub fn leave_out(&self, stream: OutputStream, bytes: u64) {
        self.change(|state, _| {
            // A character that they cut stays cut.
            let held = std::mem::take(state.held.of_mut(stream)).len() as u64;
            *state.printed.of_mut(stream) += held + bytes;
            state.last_seq += 1;
        });
    }

    /// It is over. Only the first end counts.
    pub fn end(&self, ending: Ending) {
        self.change(|state, now| {
            if state.end.is_some() {
                return;
            }
            for stream in [OutputStream::Stdout, OutputStream::Stderr] {
                let held = std::mem::take(state.held.of_mut(stream));
                if !held.is_empty() {
                    state.tell(now, stream, held, self.most);
                }
            }
            state.end = Some(ending);
            state.add(now, Event::End);
        });
    }

    /// What came of it, if it is over.
    pub fn ending(&self) -> Option<Ending> {
        self.state().end.clone()
    }

    /// Waits for what comes of it.
    pub async fn ended(&self) -> Ending {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if let Some(ending) = self.ending() {
                return ending;
            }
            changed.await;
        }
    }

    /// The run is for its readers alone, and goes on no longer than they read.
    pub fn must_be_read(&self) {
        self.state().must_be_read = true;
    }

    /// How long nothing has read what must be read; none: something does, or nothing must.
    pub fn unread_for(&self) -> Option<Duration> {
        let state = self.state();
        state.unread_since.filter(|_| state.must_be_read && state.readers == 0).map(|since| since.elapsed())
    }

    /// A reader of what comes after an event; none: the log does not reach so far back any more, or there
    /// is no such event.
    pub fn read(self: &Arc<Self>, after: u64) -> Option<Reader> {
        let mut state = self.state();
        let seen = state.seen_at(after)?;
        state.readers += 1;
        drop(state);
        Some(Reader { log: Arc::clone(self), after, seen })
    }
}

impl State {
    fn add(&mut self, at_ms: u64, event: Event) {
        self.last_seq += 1;
        self.events.push_back(Entry { seq: self.last_seq, at_ms, before: self.printed, event });
    }

    fn tell(&mut self, now: u64, stream: OutputStream, bytes: Vec<u8>, most: u64) {
        let length = bytes.len();
        let fits = self.told + length as u64 <= most && self.buffer.grow(OF_PART + length).is_ok();
        if fits {
            self.add(now, Event::Output(stream, bytes));
            (self.told, self.kept, self.parts) = (self.told + length as u64, self.kept + length, self.parts + 1);
        } else {
            self.last_seq += 1;
        }
        *self.printed.of_mut(stream) += length as u64;
        while self.kept > KEPT || self.parts > KEPT_PARTS {
            self.forget_oldest();
        }
    }

    /// Drops the oldest event that has output.
    fn forget_oldest(&mut self) {
        let Some(index) = self.events.iter().position(|entry| matches!(entry.event, Event::Output(..))) else { return };
        let Some(entry) = self.events.remove(index) else { return };
        if let Event::Output(stream, bytes) = entry.event {
            (self.kept, self.parts) = (self.kept - bytes.len(), self.parts - 1);
            self.buffer.shrink(OF_PART + bytes.len());
            let mut after = entry.before;
            *after.of_mut(stream) += bytes.len() as u64;
            self.gone.push_back((entry.seq, after));
            if self.gone.len() > MARKS {
                self.gone.pop_front();
            }
        }
    }

    /// What a reader has heard of that has had all events up to this one.
    fn seen_at(&self, after: u64) -> Option<PerStream<u64>> {
        if after == 0 {
            return Some(PerStream::default());
        }
        if after > self.last_seq {
            return None;
        }
        let entry = self.events.iter().find(|entry| entry.seq >= after);
        match entry {
            Some(Entry { seq, before, event: Event::Output(stream, bytes), .. }) if *seq == after => {
                let mut seen = *before;
                *seen.of_mut(*stream) += bytes.len() as u64;
                Some(seen)
            }
            // Nothing was printed between the two.
            Some(Entry { seq, before, .. }) if *seq == after || *seq == after + 1 => Some(*before),
            None if after == self.last_seq => Some(self.printed),
            _ => self.gone.iter().rev().find(|(seq, _)| *seq <= after).map(|(_, seen)| *seen),
        }
    }
}

/// How many of these bytes have no character that is cut at the end.
fn whole_characters(bytes: &[u8]) -> usize {
    let from = bytes.len().saturating_sub(3);
    let tail = bytes.get(from..).unwrap_or_default();
    // The first byte of a character that may be longer than what there is of it.
    let start = tail.iter().rposition(|byte| *byte >= 0xC0).map_or(bytes.len(), |at| from + at);
    match std::str::from_utf8(bytes.get(start..).unwrap_or_default()) {
        Err(error) if error.error_len().is_none() => start + error.valid_up_to(),
        _ => bytes.len(),
    }
}

/// How events are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// A JSON object in each line.
    Lines,
    /// `text/event-stream`, as HTML has it.
    EventStream,
}

impl Format {
    /// Adds an event.
    pub fn write(self, out: &mut Vec<u8>, kind: &str, seq: u64, object: &[u8]) {
        self.begin(out, kind, seq);
        out.extend_from_slice(object);
        out.extend_from_slice(if self == Format::EventStream { b"\n\n" } else { b"\n" });
    }

    /// Adds what stands before an event's object.
    fn begin(self, out: &mut Vec<u8>, kind: &str, seq: u64) {
        if self == Format::EventStream {
            out.extend(format!("id: {seq}\nevent: {kind}\ndata: ").into_bytes());
        }
    }

    /// The end of an object that has another as its last field, and of its event.
    fn end_of_nested(self) -> &'static [u8] {
        if self == Format::EventStream { b"}\n\n" } else { b"}\n" }
    }
}

/// An event, with what all have.
pub fn object(kind: &str, seq: u64, at_ms: u64, more: Value) -> Vec<u8> {
    let mut all = Map::new();
    all.insert("type".to_owned(), json!(kind));
    all.insert("seq".to_owned(), json!(seq));
    all.insert("at_ms".to_owned(), json!(at_ms));
    if let Value::Object(more) = more {
        all.extend(more);
    }
    Value::Object(all).to_string().into_bytes()
}

fn name(stream: OutputStream) -> &'static str {
    match stream {
        OutputStream::Stdout => "stdout",
        OutputStream::Stderr => "stderr",
    }
}

/// One who reads a log.
pub struct Reader {
    log: Arc<RunLog>,
    after: u64,
    seen: PerStream<u64>,
}

/// What a reader takes of a log.
struct Taken {
    text: Vec<u8>,
    /// Has room for the text where that may be large.
    buffer: Buffer,
    /// The result, whose event the text has begun.
    result: Option<Bytes>,
    /// What follows found no room.
    lacks_room: bool,
    is_over: bool,
}

impl Taken {
    /// In the order in which they are written.
    fn into_parts(mut self, format: Format) -> Vec<Bytes> {
        self.buffer.shrink(self.buffer.bytes().saturating_sub(self.text.len()));
        let end = self.result.as_ref().map(|_| Bytes::from_static(format.end_of_nested()));
        [self.buffer.hold(self.text)].into_iter().chain(self.result).chain(end).collect()
    }
}

impl Reader {
    /// What is new, once something is; none after the end. It counts as buffered until it was written, and the
    /// result is that of all readers.
    pub async fn next(&mut self, format: Format) -> Option<Vec<Bytes>> {
        let asked = tokio::time::Instant::now();
        loop {
            let log = Arc::clone(&self.log);
            let changed = log.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            let taken = self.take(format);
            if !taken.text.is_empty() {
                return Some(taken.into_parts(format));
            }
            if taken.is_over {
                return None;
            }
            let silence = SILENCE.saturating_sub(asked.elapsed());
            let wait = if taken.lacks_room { ROOM.min(silence) } else { silence };
            let _changed_or_late = tokio::time::timeout(wait, changed).await;
            if asked.elapsed() >= SILENCE {
                let mut ping = Vec::new();
                let at_ms = log.since.elapsed().as_millis() as u64;
                format.write(&mut ping, "ping", self.after, &object("ping", self.after, at_ms, Value::Null));
                return Some(vec![Bytes::from(ping)]);
            }
        }
    }

    /// What there is, about [`PART`] bytes of it.
    fn take(&mut self, format: Format) -> Taken {
        let state = self.log.state();
        let buffer = state.buffer.another();
        let mut taken = Taken { text: Vec::new(), buffer, result: None, lacks_room: false, is_over: false };
        let part = &mut taken.text;
        let after = self.after;
        for entry in state.events.iter().filter(|entry| entry.seq > after) {
            if part.len() >= PART {
                return taken;
            }
            let Entry { seq, at_ms, before, event } = entry;
            let needs = part.len() + FIELDS + if let Event::Output(_, bytes) = event { ESCAPED * bytes.len() } else { 0 };
            if needs > UNCOUNTED && taken.buffer.grow(needs.saturating_sub(taken.buffer.bytes())).is_err() {
                taken.lacks_room = true;
                return taken;
            }
            for stream in [OutputStream::Stdout, OutputStream::Stderr] {
                let missed = before.of(stream).saturating_sub(*self.seen.of(stream));
                if missed > 0 {
                    // Its number is that of the last event that is missing.
                    let gap = object("gap", seq - 1, *at_ms, json!({ "stream": name(stream), "bytes": missed }));
                    format.write(part, "gap", seq - 1, &gap);
                }
            }
            (self.after, self.seen) = (*seq, *before);
            let simple = |kind, more| (kind, object(kind, *seq, *at_ms, more));
            let (kind, line) = match event {
                Event::Accepted { run, position } => simple("accepted", json!({ "run": run, "position": position })),
                Event::Started { queued_ms } => simple("started", json!({ "queued_ms": queued_ms })),
                Event::Output(stream, bytes) => {
                    *self.seen.of_mut(*stream) += bytes.len() as u64;
                    let more = match std::str::from_utf8(bytes) {
                        Ok(text) => json!({ "text": text }),
                        Err(_) => json!({ "base64": STANDARD.encode(bytes) }),
                    };
                    simple(name(*stream), more)
                }
                Event::End => match &state.end {
                    Some(Ok(result)) => {
                        let mut line = object("result", *seq, *at_ms, Value::Null);
                        line.pop();
                        format.begin(part, "result", *seq);
                        part.extend(line);
                        part.extend_from_slice(b",\"result\":");
                        taken.result = Some(result.slice(..result.trim_ascii_end().len()));
                        break;
                    }
                    Some(Err(problem)) => simple("problem", json!({ "problem": problem.to_json() })),
                    None => continue,
                },
            };
            format.write(part, kind, *seq, &line);
        }
        taken.is_over = state.end.is_some();
        taken
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let mut state = self.log.state();
        state.readers -= 1;
        state.unread_since = Some(Instant::now());
    }
}
