//! `POST /v1/batch`: many requests in one body, one in each line, and an answer line for each.
//!
//! The body is read as fast as it comes, whatever the client has read of the answers. Each line is
//! a run of its own, which waits for its turn as any other; a line with `cases` is one run for each
//! case. A batch whose client hangs up starts nothing more, and cancels what runs.

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
use serde_json::{Map, Value, json};
use stockade_protocol::{
    LimitKey,
    service::{Key, Settings},
};
use tokio::{
    sync::{Notify, mpsc},
    task::JoinSet,
    time::Instant,
};

use crate::{
    asking::{KeyFor, ToRun},
    front::{Buffer, Front, Order},
    http::{BodyReader, Shared, bad_query, check_type, new_number, policy_of, read_request},
    log::Ending,
    problem::Problem,
};

/// With so many bytes of answers that the client has not read, nothing more is started.
const MAX_UNREAD: usize = 64 << 20;
/// What waits for its turn beside what the key may have running, so that none of its turns is missed.
const AHEAD: usize = 2;
/// A request of a batch waits as long as the batch does, and one of another service as long as its client.
pub const FOR_EVER: Duration = Duration::from_secs(365 * 86_400);
/// Refusals after which a request is tried again: it has only come too early.
const TOO_EARLY: [&str; 5] = ["queue_full", "key_queue", "key_rate", "key_cpu", "buffers_full"];
/// How soon at the earliest, and at the latest.
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
    let buffer = front.buffer();
    let batch = Batch {
        settings,
        front,
        key,
        policy,
        deadline,
        waiting: VecDeque::new(),
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

/// One run of a batch.
struct Item {
    /// Its place among the answers.
    ticket: usize,
    /// Its line.
    index: usize,
    id: Option<String>,
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
    settings: Arc<Settings>,
    key: Key,
    policy: String,
    deadline: Option<Instant>,
    waiting: VecDeque<Item>,
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
            self.start_some();
            if body.is_none() && self.waiting.is_empty() && self.running.is_empty() {
                break;
            }
            let pause = self.not_before.filter(|_| !self.waiting.is_empty());
            let end = self.deadline.filter(|_| !self.waiting.is_empty());
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
                                self.take(&std::mem::take(&mut line), &mut buffer);
                            }
                        }
                    }
                    Ok(None) => {
                        body = None;
                        if !self.broken_off {
                            self.take(&std::mem::take(&mut line), &mut buffer);
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
                () = until(end) => self.give_up(),
                () = self.answers.taken(), if self.answers.are_many() => {}
                () = self.answers.unwanted() => return,
            }
        }
        let end = json!({ "type": "end", "lines": self.lines, "problems": self.problems });
        self.answers.send(self.tickets, vec![Bytes::from(format!("{end}\n"))]);
    }

    /// A line of the body has come.
    fn take(&mut self, line: &[u8], buffer: &mut Buffer) {
        let length = line.len();
        let text = line.trim_ascii();
        if !text.is_empty() {
            let index = self.lines;
            self.lines += 1;
            match requests_of(text, index) {
                Ok(requests) => {
                    for (id, request) in requests {
                        let mut own = self.front.buffer();
                        let item = match own.grow(request.len()) {
                            Ok(()) => Item { ticket: self.tickets, index, id, request, buffer: own },
                            Err(problem) => {
                                self.answer_new(index, id, problem);
                                continue;
                            }
                        };
                        self.tickets += 1;
                        self.waiting.push_back(item);
                    }
                }
                Err((id, problem)) => self.answer_new(index, id, problem),
            }
        }
        buffer.shrink(length);
    }

    fn answer_new(&mut self, index: usize, id: Option<String>, problem: Problem) {
        let ticket = self.tickets;
        self.tickets += 1;
        self.answer(Name { ticket, index, id }, Err(problem));
    }

    /// The body does not go on as it should. What has come of it is run, and what may still come is not.
    fn break_off(&mut self, problem: Problem) {
        if std::mem::replace(&mut self.broken_off, true) {
            return;
        }
        self.answer_new(self.lines, None, problem);
    }

    /// Starts what may be started now.
    fn start_some(&mut self) {
        while self.not_before.is_none() && !self.answers.are_many() && self.running.len() < self.key.running as usize + AHEAD {
            let Some(item) = self.waiting.pop_front() else { return };
            self.start(item);
        }
    }

    fn start(&mut self, item: Item) {
        let Item { ticket, index, id, request, buffer } = item;
        let name = Name { ticket, index, id };
        let usual = self.settings.policies.get(&self.policy).copied().unwrap_or_default();
        let prepared = read_request(&request, usual).and_then(|read| Ok((read, new_number()?)));
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
                let [least, most] = AGAIN;
                let again = Duration::from_secs(problem.retry_after.unwrap_or(0)).clamp(least, most);
                // Where it runs more itself, one of those will end before that.
                self.not_before = Some(Instant::now() + if self.running.is_empty() { again } else { least });
                let Order { request, buffer, .. } = *order;
                let Name { ticket, index, id } = name;
                self.waiting.push_front(Item { ticket, index, id, request, buffer });
            }
            Err((problem, _)) => self.answer(name, Err(problem)),
        }
    }

    /// The deadline is over: what waits is not started.
    fn give_up(&mut self) {
        for Item { ticket, index, id, .. } in std::mem::take(&mut self.waiting) {
            self.answer(Name { ticket, index, id }, Err(deadline_exceeded()));
        }
    }

    fn answer(&mut self, name: Name, ending: Ending) {
        let Name { ticket, index, id } = name;
        let start = json!({ "id": id, "index": index }).to_string();
        let start = start.trim_end_matches('}');
        let parts = match ending {
            Ok(result) => {
                let length = result.trim_ascii_end().len();
                vec![Bytes::from(format!("{start},\"result\":")), result.slice(..length), Bytes::from_static(b"}\n")]
            }
            Err(problem) => {
                self.problems += 1;
                let problem = if problem.reason == "queue_timeout" { deadline_exceeded() } else { problem };
                let problem = self.front.metrics.problem(problem);
                vec![Bytes::from(format!("{start},\"problem\":{}}}\n", problem.to_json()))]
            }
        };
        self.answers.send(ticket, parts);
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

/// One case of a line: what it has in place of the line's own.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    id: Option<String>,
    stdin: Option<Value>,
    args: Option<Value>,
    env: Option<Map<String, Value>>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Line {
    id: Option<String>,
    cases: Option<Vec<Case>>,
}

type Requests = Vec<(Option<String>, Vec<u8>)>;

/// The requests of a line, with their ids.
fn requests_of(line: &[u8], index: usize) -> Result<Requests, (Option<String>, Problem)> {
    let bad = |detail: String| Problem::new(StatusCode::BAD_REQUEST, "bad_json", detail);
    let Line { id, cases } =
        serde_json::from_slice(line).map_err(|error| (None, bad(format!("the line is no JSON object of a request: {error}"))))?;
    let Some(cases) = cases else { return Ok(vec![(id, line.to_vec())]) };
    let Ok(Value::Object(mut whole)) = serde_json::from_slice(line) else {
        return Err((id, bad("the line is no JSON object".to_owned())));
    };
    whole.remove("cases");
    if cases.is_empty() {
        return Err((id, bad("`cases` is empty; leave it out for one run".to_owned())));
    }
    let of_line = id.unwrap_or_else(|| index.to_string());
    let requests = cases.into_iter().enumerate().map(|(number, case)| {
        let Case { id, stdin, args, env } = case;
        let mut request = whole.clone();
        let id = format!("{of_line}/{}", id.unwrap_or_else(|| number.to_string()));
        request.insert("id".to_owned(), json!(id));
        request.extend(stdin.map(|stdin| ("stdin".to_owned(), stdin)));
        request.extend(args.map(|args| ("args".to_owned(), args)));
        if let Some(env) = env {
            let own = request.entry("env").or_insert_with(|| json!({}));
            own.as_object_mut().into_iter().for_each(|own| own.extend(env.clone()));
        }
        (Some(id), Value::Object(request).to_string().into_bytes())
    });
    Ok(requests.collect())
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

    use super::*;

    fn texts(line: &str) -> Vec<(Option<String>, Value)> {
        let requests = requests_of(line.as_bytes(), 7).map_err(|(_, problem)| problem.detail).unwrap();
        requests.into_iter().map(|(id, request)| (id, serde_json::from_slice(&request).unwrap())).collect()
    }

    #[test]
    fn a_line_is_one_request_or_one_for_each_case() {
        let own = r#"{"code":"a","code":"b","id":"p"}"#;
        // As it came: the worker refuses what stands twice.
        assert_eq!(requests_of(own.as_bytes(), 0).unwrap_or_default(), [(Some("p".to_owned()), own.as_bytes().to_vec())]);
        let cases = r#"{"code":"a","env":{"A":"1","B":"2"},"cases":[{"stdin":"x","env":{"B":"3"}},{"id":"c","args":["y"]}]}"#;
        assert_eq!(
            texts(cases),
            [
                (Some("7/0".to_owned()), json!({"code": "a", "env": {"A": "1", "B": "3"}, "stdin": "x", "id": "7/0"})),
                (Some("7/c".to_owned()), json!({"code": "a", "env": {"A": "1", "B": "2"}, "args": ["y"], "id": "7/c"})),
            ]
        );
        for (line, said) in [
            ("7", "no JSON object"),
            (r#"{"code":"a","cases":[]}"#, "empty"),
            (r#"{"code":"a","cases":[{"code":"b"}]}"#, "unknown field `code`"),
            (r#"{"code":"#, "EOF"),
        ] {
            let (_, problem) = requests_of(line.as_bytes(), 0).err().unwrap();
            assert!(problem.detail.contains(said), "{line}: {}", problem.detail);
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
