//! `POST /v1/batch`: many requests in one body, one in each line, and an answer line for each.
//!
//! The body is read as fast as it comes, whatever the client has read of the answers. Each line is
//! a run of its own, which waits for its turn as any other; a line with `cases` is one run for each
//! case. A batch whose client hangs up starts nothing more, and cancels what runs.

mod lines;

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use axum::{
    body::{Body, Bytes},
    extract::{Query, Request, State, rejection::QueryRejection},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::Deserialize;
use serde_json::json;
use stockade_protocol::{
    LimitKey,
    service::{Key, Scope, Settings},
};
use tokio::{
    sync::{Notify, mpsc},
    task::JoinSet,
    time::Instant,
};

use crate::{
    auth::{KeyFor, ToRun},
    front::{Buffer, Front, Order},
    http::{BodyReader, Shared, bad_query, check_type, new_number, policy_of, read_request},
    keys,
    log::Ending,
    problem::Problem,
};

use lines::{Cases, Line};

/// With so many bytes of answers that the client has not read, nothing more is started.
const MAX_UNREAD: usize = 64 << 20;
/// What waits for its turn beside what the key may have running, so that none of its turns is missed.
const AHEAD: usize = 2;
/// A request of a batch waits as long as the batch does, and one of another service as long as its client.
pub const FOR_EVER: Duration = Duration::from_secs(365 * 86_400);
/// Refusals after which a request is tried again: it has only come too early.
const TOO_EARLY: [&str; 5] = ["queue_full", "key_queue", "key_rate", "key_cpu", "buffers_full"];
/// What a line takes in memory beside its bytes.
const OF_LINE: usize = 128;
/// Answers and starts between which the batch looks at what has come.
const AT_ONCE: usize = 64;
/// And so many bytes of their requests: a case has what its line says once for all.
const BYTES_AT_ONCE: usize = 1 << 20;
/// The least and the most time after which a refused start is tried again.
const AGAIN: [Duration; 2] = [Duration::from_millis(50), Duration::from_secs(5)];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BatchQuery {
    policy: Option<String>,
    #[serde(default)]
    order: AnswerOrder,
    deadline: Option<String>,
}

/// In which order answers come.
#[derive(Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum AnswerOrder {
    /// As the runs end.
    #[default]
    Ended,
    /// As the lines came.
    Input,
}

pub async fn batch(
    State(front): Shared,
    KeyFor { key, .. }: KeyFor<ToRun>,
    query: Result<Query<BatchQuery>, QueryRejection>,
    request: Request,
) -> Result<Response, Problem> {
    let (parts, body) = request.into_parts();
    let unknown = |error: QueryRejection| {
        bad_query(format!("the query may have `policy`, `order`, which is `ended` or `input`, and `deadline`: {error}"))
    };
    let BatchQuery { policy, order, deadline } = query.map_err(unknown)?.0;
    let policy = policy_of(&key, policy)?;
    let deadline = deadline.map(|text| deadline_of(&text)).transpose()?;
    check_type(&parts.headers, "application/x-ndjson")?;
    let settings = front.settings();
    let (answers, client) = answers(order);
    let buffer = front.buffer(&key.id);
    let batch = Batch {
        settings,
        front,
        key,
        policy,
        deadline,
        is_late: false,
        waiting: VecDeque::new(),
        expanded: None,
        held: None,
        running: JoinSet::new(),
        not_before: None,
        answers,
        broken_off: false,
        tickets: 0,
        lines: 0,
        problems: 0,
    };
    tokio::spawn(batch.drive(body, buffer));
    let parts = futures_util::stream::unfold(client, |mut client| async move {
        let part = client.next().await?;
        Some((Ok::<_, std::convert::Infallible>(part), client))
    });
    Ok(([(header::CONTENT_TYPE, "application/x-ndjson")], Body::from_stream(parts)).into_response())
}

fn deadline_of(text: &str) -> Result<Instant, Problem> {
    match LimitKey::Wall.parse_text(text) {
        Ok(Some(wait)) => Ok(Instant::now() + Duration::from_millis(wait)),
        _ => Err(bad_query("`deadline` is a duration from now on, such as `10m`".to_owned())),
    }
}

/// What waits for its turn.
struct Item {
    /// Which line it is.
    index: usize,
    /// Or why no more lines are read.
    line: Result<Vec<u8>, Problem>,
    buffer: Buffer,
}

/// A line with cases, of which some are left.
struct Expanded {
    index: usize,
    cases: Cases,
    _buffer: Buffer,
}

/// One run of a batch, which has its name.
struct Ready {
    name: Name,
    request: Vec<u8>,
    buffer: Buffer,
}

/// What an answer line begins with.
struct Name {
    ticket: usize,
    index: usize,
    id: Option<String>,
}

struct Batch {
    front: Arc<Front>,
    /// As they are now, and the key by them.
    settings: Arc<Settings>,
    key: Key,
    policy: String,
    deadline: Option<Instant>,
    /// The deadline is over: what waits is not started.
    is_late: bool,
    waiting: VecDeque<Item>,
    expanded: Option<Expanded>,
    /// It came too early.
    held: Option<Ready>,
    running: JoinSet<(Name, Ending)>,
    /// The next start was refused, and is tried again then.
    not_before: Option<Instant>,
    answers: Answers,
    /// What still comes of the body is thrown away.
    broken_off: bool,
    tickets: usize,
    lines: usize,
    problems: usize,
}

impl Batch {
    async fn drive(mut self, body: Body, mut buffer: Buffer) {
        let mut body = Some(BodyReader::new(body, self.settings.max_body));
        let mut line = Vec::new();
        loop {
            let has_more = self.start_some();
            if body.is_none() && !self.waits() && self.running.is_empty() {
                break;
            }
            let pause = self.not_before.filter(|_| self.waits());
            let end = self.deadline.filter(|_| !self.is_late && self.waits());
            tokio::select! {
                part = read_on(&mut body) => match part {
                    // A client that writes all before it reads gets its answers only so.
                    Ok(Some(_)) if self.broken_off => {}
                    Ok(Some(part)) => {
                        if let Err(problem) = buffer.grow(part.len()) {
                            self.break_off(problem);
                            continue;
                        }
                        for piece in part.split_inclusive(|byte| *byte == b'\n') {
                            line.extend_from_slice(piece);
                            if piece.ends_with(b"\n") {
                                self.take(std::mem::take(&mut line), &mut buffer);
                            }
                        }
                    }
                    Ok(None) => {
                        body = None;
                        if !self.broken_off {
                            self.take(std::mem::take(&mut line), &mut buffer);
                        }
                    }
                    Err(problem) => {
                        body = body.filter(|_| problem.reason == "too_large").map(BodyReader::without_limit);
                        self.break_off(problem);
                    }
                },
                Some(ended) = self.running.join_next() => {
                    // A task that panics has no name to answer under; there is none.
                    if let Ok((name, ending)) = ended {
                        self.answer(name, ending);
                    }
                }
                () = until(pause) => self.not_before = None,
                () = until(end) => (self.is_late, self.not_before) = (true, None),
                () = tokio::task::yield_now(), if has_more => {}
                () = self.answers.taken(), if self.answers.are_many() => {}
                () = self.answers.unwanted() => return,
            }
        }
        let end = json!({ "type": "end", "lines": self.lines, "problems": self.problems });
        self.answers.send(self.tickets, vec![Bytes::from(format!("{end}\n"))]);
    }

    /// Whether something is to be started or answered.
    fn waits(&self) -> bool {
        !self.waiting.is_empty() || self.expanded.is_some() || self.held.is_some()
    }

    /// A line of the body has come, which `buffer` has room for.
    fn take(&mut self, line: Vec<u8>, buffer: &mut Buffer) {
        buffer.shrink(line.len());
        if self.broken_off || line.trim_ascii().is_empty() {
            return;
        }
        let mut own = self.front.buffer(&self.key.id);
        match own.grow(line.len() + OF_LINE) {
            Ok(()) => self.waiting.push_back(Item { index: self.lines, line: Ok(line), buffer: own }),
            Err(problem) => return self.break_off(problem),
        }
        self.lines += 1;
    }

    /// The body does not go on as it should. What has come of it is run, and what may still come is not.
    fn break_off(&mut self, problem: Problem) {
        if std::mem::replace(&mut self.broken_off, true) {
            return;
        }
        self.waiting.push_back(Item { index: self.lines, line: Err(problem), buffer: self.front.buffer(&self.key.id) });
    }

    /// Starts what may be started now, and answers what cannot be; whether there may be more of both.
    fn start_some(&mut self) -> bool {
        self.take_settings();
        let mut bytes = 0;
        for _ in 0..AT_ONCE {
            if bytes > BYTES_AT_ONCE {
                return true;
            }
            if self.not_before.is_some() || self.answers.are_many() || self.running.len() >= self.key.running as usize + AHEAD {
                return false;
            }
            match self.next() {
                None => return false,
                Some(Ok(ready)) => {
                    bytes += ready.request.len();
                    self.start(ready);
                }
                Some(Err((name, problem))) => self.answer(name, Err(problem)),
            }
        }
        true
    }

    /// Takes what holds now, and the key as it is now.
    fn take_settings(&mut self) {
        let settings = self.front.settings();
        if Arc::ptr_eq(&settings, &self.settings) {
            return;
        }
        if let Some(key) = settings.keys.iter().find(|key| key.id == self.key.id && key.credential == self.key.credential) {
            self.key = key.clone();
        }
        self.settings = settings;
    }

    /// The next run, or what is answered in its place.
    fn next(&mut self) -> Option<Result<Ready, (Name, Problem)>> {
        if let Some(held) = self.held.take() {
            return Some(if self.is_late { Err((held.name, deadline_exceeded())) } else { Ok(held) });
        }
        loop {
            if let Some(case) = self.expanded.as_mut().and_then(|line| line.cases.next()) {
                return self.ready_case(case);
            }
            self.expanded = None;
            let Item { index, line, buffer } = self.waiting.pop_front()?;
            let read = line.map_err(|problem| (None, problem)).and_then(|line| Ok((Line::read(&line, index)?, line)));
            match read {
                Ok((Line::Cases(cases), _)) => self.expanded = Some(Expanded { index, cases, _buffer: buffer }),
                Ok((Line::Whole(id), _)) if self.is_late => return Some(Err((self.name(index, id), deadline_exceeded()))),
                Ok((Line::Whole(id), request)) => return Some(Ok(Ready { name: self.name(index, id), request, buffer })),
                Err((id, problem)) => return Some(Err((self.name(index, id), problem))),
            }
        }
    }

    fn ready_case(&mut self, (id, case): (String, lines::Case)) -> Option<Result<Ready, (Name, Problem)>> {
        let line = self.expanded.as_ref()?;
        let index = line.index;
        if self.is_late {
            return Some(Err((self.name(index, Some(id)), deadline_exceeded())));
        }
        let request = line.cases.request(&id, case);
        Some(Ok(Ready { name: self.name(index, Some(id)), request, buffer: self.front.buffer(&self.key.id) }))
    }

    fn name(&mut self, index: usize, id: Option<String>) -> Name {
        let ticket = self.tickets;
        self.tickets += 1;
        Name { ticket, index, id }
    }

    fn start(&mut self, ready: Ready) {
        let Ready { name, request, mut buffer } = ready;
        // That of a case has no room yet.
        if let Err(problem) = buffer.grow(request.len().saturating_sub(buffer.bytes())) {
            if self.running.is_empty() {
                return self.answer(name, Err(problem));
            }
            return self.hold(Ready { name, request, buffer }, &problem);
        }
        let good = keys::still_good(&self.settings.keys, &self.key, Scope::Run)
            .and_then(|()| policy_of(&self.key, Some(self.policy.clone())).map(drop));
        let prepared = good.and_then(|()| read_request(&request)).and_then(|read| Ok((read, new_number()?)));
        let ((size, about), number) = match prepared {
            Ok(prepared) => prepared,
            Err(problem) => return self.answer(name, Err(problem)),
        };
        let wait = self.deadline.map_or(FOR_EVER, |end| end.saturating_duration_since(Instant::now()));
        let order = Order {
            number,
            key: self.key.clone(),
            policy: self.policy.clone(),
            size,
            about,
            request,
            buffer,
            wait,
            output: false,
            keep: Duration::ZERO,
            session: None,
            name: None,
        };
        match self.front.run(order) {
            Ok(handle) => {
                self.running.spawn(async move { (name, handle.answer().await) });
            }
            Err((problem, order)) if TOO_EARLY.contains(&problem.reason) => {
                let Order { request, buffer, .. } = *order;
                self.hold(Ready { name, request, buffer }, &problem);
            }
            Err((problem, _)) => self.answer(name, Err(problem)),
        }
    }

    /// It has come too early.
    fn hold(&mut self, ready: Ready, why: &Problem) {
        let [least, most] = AGAIN;
        let again = Duration::from_secs(why.retry_after.unwrap_or(0)).clamp(least, most);
        // Where it runs more itself, one of those will end before that.
        self.not_before = Some(Instant::now() + if self.running.is_empty() { again } else { least });
        self.held = Some(ready);
    }

    fn answer(&mut self, name: Name, ending: Ending) {
        let Name { ticket, index, id } = name;
        let start = json!({ "id": id, "index": index }).to_string();
        let start = start.trim_end_matches('}');
        let parts = match ending {
            Ok(result) => {
                let length = result.trim_ascii_end().len();
                vec![self.hold_text(format!("{start},\"result\":")), result.slice(..length), Bytes::from_static(b"}\n")]
            }
            Err(problem) => {
                self.problems += 1;
                let problem = if problem.reason == "queue_timeout" { deadline_exceeded() } else { problem };
                let problem = self.front.metrics.problem(problem);
                vec![self.hold_text(format!("{start},\"problem\":{}}}\n", problem.to_json()))]
            }
        };
        self.answers.send(ticket, parts);
    }

    /// A part of an answer, which counts as buffered. Where there is no room for more of them, they come slowly.
    fn hold_text(&mut self, text: String) -> Bytes {
        let mut buffer = self.front.buffer(&self.key.id);
        if buffer.grow(text.len()).is_ok() {
            return buffer.hold(text.into_bytes());
        }
        self.not_before = Some(Instant::now() + AGAIN[0]);
        Bytes::from(text)
    }
}

fn deadline_exceeded() -> Problem {
    Problem::new(StatusCode::SERVICE_UNAVAILABLE, "deadline_exceeded", "the deadline of the batch came before the run was started")
}

/// The next part of a body; none is to come of one that has ended.
async fn read_on(body: &mut Option<BodyReader>) -> Result<Option<Bytes>, Problem> {
    match body {
        Some(body) => body.next().await,
        None => std::future::pending().await,
    }
}

async fn until(time: Option<Instant>) {
    match time {
        Some(time) => tokio::time::sleep_until(time).await,
        None => std::future::pending().await,
    }
}

/// What a client has not read.
struct Unread {
    bytes: AtomicUsize,
    taken: Notify,
}

/// The answers on their way to a client.
struct Answers {
    order: AnswerOrder,
    to: mpsc::UnboundedSender<Bytes>,
    unread: Arc<Unread>,
    /// Those whose turn has not come.
    early: BTreeMap<usize, Vec<Bytes>>,
    next: usize,
}

/// The client's end.
struct ClientEnd {
    from: mpsc::UnboundedReceiver<Bytes>,
    unread: Arc<Unread>,
}

fn answers(order: AnswerOrder) -> (Answers, ClientEnd) {
    let (to, from) = mpsc::unbounded_channel();
    let unread = Arc::new(Unread { bytes: AtomicUsize::new(0), taken: Notify::new() });
    (Answers { order, to, unread: Arc::clone(&unread), early: BTreeMap::new(), next: 0 }, ClientEnd { from, unread })
}

impl Answers {
    fn send(&mut self, ticket: usize, parts: Vec<Bytes>) {
        self.unread.bytes.fetch_add(parts.iter().map(Bytes::len).sum(), Relaxed);
        if self.order == AnswerOrder::Ended {
            self.pass_on(parts);
            return;
        }
        self.early.insert(ticket, parts);
        while let Some(parts) = self.early.remove(&self.next) {
            self.next += 1;
            self.pass_on(parts);
        }
    }

    fn pass_on(&self, parts: Vec<Bytes>) {
        for part in parts {
            // A client that has gone is seen by `unwanted`.
            let _unwanted = self.to.send(part);
        }
    }

    fn are_many(&self) -> bool {
        self.unread.bytes.load(Relaxed) >= MAX_UNREAD
    }

    /// Returns when the client has taken something.
    async fn taken(&self) {
        self.unread.taken.notified().await;
    }

    /// Returns when the client has gone.
    async fn unwanted(&self) {
        self.to.closed().await;
    }
}

impl ClientEnd {
    async fn next(&mut self) -> Option<Bytes> {
        let part = self.from.recv().await?;
        self.unread.bytes.fetch_sub(part.len(), Relaxed);
        self.unread.taken.notify_one();
        Some(part)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use crate::front::tests::{Worker, front, key, settings, settle};
    use serde_json::Value;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_batch_whose_key_has_expired_or_changed_starts_nothing_more() {
        let (good, expired) = (key("a"), Key { expires: Some(1), ..key("a") });
        let other_token = Key { credential: stockade_protocol::service::Credential::Uid(2), ..key("a") };
        let no_policy = Key { policies: vec!["q".to_owned()], ..key("a") };
        let no_scope = Key { scopes: Vec::new(), ..key("a") };
        for (changed, reason) in [
            (good.clone(), None),
            (expired, Some("key_revoked")),
            (other_token, Some("key_revoked")),
            (no_policy, Some("policy_not_granted")),
            (no_scope, Some("scope_missing")),
        ] {
            let front = front(settings(std::slice::from_ref(&good)));
            let (to, from) = mpsc::unbounded_channel::<Result<Bytes, std::convert::Infallible>>();
            let body = Body::from_stream(futures_util::stream::unfold(from, |mut from| async move { Some((from.recv().await?, from)) }));
            let (answers, mut client) = answers(AnswerOrder::Ended);
            let batch = Batch {
                settings: front.settings(),
                front: Arc::clone(&front),
                key: good.clone(),
                policy: "p".to_owned(),
                deadline: None,
                is_late: false,
                waiting: VecDeque::new(),
                expanded: None,
                held: None,
                running: JoinSet::new(),
                not_before: None,
                answers,
                broken_off: false,
                tickets: 0,
                lines: 0,
                problems: 0,
            };
            tokio::spawn(batch.drive(body, front.buffer("a")));
            let (link, mut worker) = Worker::new();
            front.add_idle(link, None);
            let mut ask = async |index: u64| {
                to.send(Ok(Bytes::from_static(b"{\"code\": \"1\"}\n"))).unwrap();
                settle().await;
                if !worker.heard().0.is_empty() {
                    worker.answer(&json!({ "verdict": "exited" }));
                    worker.say(&stockade_protocol::service::FromWorker::Idle(None));
                }
                let mut line = Vec::new();
                while !line.ends_with(b"\n") {
                    line.extend(client.next().await.unwrap());
                }
                let line: Value = serde_json::from_slice(&line).unwrap();
                assert_eq!(line["index"], index);
                line
            };
            assert_eq!(ask(0).await["result"]["verdict"], "exited");
            front.change(settings(&[changed]));
            let after = ask(1).await;
            assert_eq!(after["problem"]["reason"].as_str(), reason, "{after}");
            assert_eq!(after["result"].is_object(), reason.is_none());
        }
    }

    #[test]
    fn answers_come_as_they_end_or_as_the_lines_came() {
        for (order, expected) in [(AnswerOrder::Ended, ["b", "a", "c"]), (AnswerOrder::Input, ["a", "b", "c"])] {
            let (mut answers, mut client) = answers(order);
            for (ticket, text) in [(1, "b"), (0, "a"), (2, "c")] {
                answers.send(ticket, vec![Bytes::from(text)]);
            }
            assert_eq!(answers.unread.bytes.load(Relaxed), 3);
            for text in expected {
                assert_eq!(client.from.try_recv().unwrap(), text);
            }
        }
    }
}
