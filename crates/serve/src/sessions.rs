//! Sessions over HTTP: each has a keeper, a process with the launcher's rights, and its files stay
//! between its runs.
//!
//! What is asked of one session happens one after the other, in the order in which it came. A session
//! that nothing is asked of for its time ends. One whose keeper ends is gone, with all its files.

use std::{
    collections::BTreeMap,
    ops::{Deref, DerefMut},
    sync::{Arc, Mutex},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use axum::{
    extract::{Path, Query, Request, State, rejection::QueryRejection},
    http::{HeaderMap, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use base64::{Engine, engine::general_purpose::STANDARD};
use serde::Deserialize;
use serde_json::{Value, json};
use stockade_protocol::{
    Base64, Encoding, LimitKey, TextOrBase64,
    service::{FromFront, FromWorker, KeeperOf, Key, NoKeeper},
    session::{Line, List, Only, Read, Remove, Write},
};
use tokio::{
    sync::{OwnedMutexGuard, Semaphore, mpsc, oneshot},
    time::Instant,
};

use crate::{
    auth::{KeyFor, OfSession, ToKeep},
    front::{Buffer, Front},
    http::{Shared, bad_query, buffered_json, check_type, json_response, new_number, policy_of, read, run_for},
    keys::now,
    link::{LinkError, WorkerLink},
    lock::lock,
    mcp::Calls,
    problem::Problem,
};

/// How long a session is kept that does not say.
const IDLE: Duration = Duration::from_secs(600);
/// How long a keeper may take to begin.
const BEGIN: Duration = Duration::from_secs(30);
/// The most bytes of a body that opens a session.
const MAX_OPENING: u64 = 64 << 10;
/// The most bytes of a file that is written: in base64 it fits into a line of a session.
const MAX_WRITTEN: u64 = 45 << 20;
/// Bytes of a file that are read at once.
const PART: u64 = 8 << 20;
/// Operations of a session that go on or wait for their turn, runs aside.
const MAX_OPERATIONS: usize = 256;

/// A session.
pub struct Session {
    of: KeeperOf,
    /// None: it is over.
    keeper: Arc<tokio::sync::Mutex<Option<WorkerLink>>>,
    used: Mutex<Instant>,
    /// Room for so many operations more.
    operations: Arc<Semaphore>,
    /// The messages of the Model Context Protocol that are being answered in it.
    pub calls: Calls,
}

/// All sessions.
pub struct Sessions {
    open: Mutex<BTreeMap<String, Arc<Session>>>,
    /// Those that the supervisor was asked for and has not answered, also where no request waits for it any more.
    asked: Mutex<BTreeMap<String, AskedFor>>,
    wishes: mpsc::UnboundedSender<FromFront>,
}

/// A session that the supervisor was asked for.
struct AskedFor {
    key: String,
    answer: oneshot::Sender<Result<WorkerLink, NoKeeper>>,
}

/// The keeper of a session, for one operation. Where that was begun and has not come to its end, the
/// session is over.
pub struct KeeperGuard {
    guard: OwnedMutexGuard<Option<WorkerLink>>,
    session: Arc<Session>,
    is_busy: bool,
}

impl KeeperGuard {
    /// What was asked of it is done.
    pub fn is_done(&mut self) {
        self.is_busy = false;
    }

    /// Has it do something that is no run.
    async fn ask_line(&mut self, line: &Line) -> Result<Value, Problem> {
        serde_json::from_slice(&self.ask_for_bytes(line).await?).map_err(|error| failed(&error.to_string()))
    }

    /// The same; its answer as it came.
    async fn ask_for_bytes(&mut self, line: &Line) -> Result<Vec<u8>, Problem> {
        let text = serde_json::to_vec(line).map_err(|error| failed(&error.to_string()))?;
        let lost = |error: LinkError| Problem { started: false, ..failed(&error.to_string()) };
        let answer = self.ask(&text).await.map_err(lost)?;
        if !matches!(self.next().await, Ok(FromWorker::Idle(_))) {
            return Err(failed("its keeper did not come back"));
        }
        self.is_done();
        Ok(answer)
    }
}

impl Drop for KeeperGuard {
    fn drop(&mut self) {
        self.session.touch();
        if self.is_busy {
            *self.guard = None;
        }
    }
}

impl Deref for KeeperGuard {
    type Target = WorkerLink;

    #[allow(clippy::expect_used, reason = "a guard is made of a keeper that is there, and takes it away when it is dropped")]
    fn deref(&self) -> &WorkerLink {
        self.guard.as_ref().expect("a keeper")
    }
}

impl DerefMut for KeeperGuard {
    #[allow(clippy::expect_used, reason = "as above")]
    fn deref_mut(&mut self) -> &mut WorkerLink {
        // Who changes it asks something of it.
        self.is_busy = true;
        self.guard.as_mut().expect("a keeper")
    }
}

impl Session {
    /// Its number.
    pub fn number(&self) -> &String {
        &self.of.session
    }

    /// Its keeper, when all that was asked of it before is done.
    ///
    /// # Errors
    /// The session is over.
    pub async fn keeper(self: Arc<Self>) -> Result<KeeperGuard, Problem> {
        let guard = Arc::clone(&self.keeper).lock_owned().await;
        if guard.as_ref().is_none_or(|keeper| !keeper.is_there()) {
            return Err(session_ended());
        }
        self.touch();
        Ok(KeeperGuard { guard, session: self, is_busy: false })
    }

    /// The policy of its runs.
    pub fn policy(&self) -> &String {
        &self.of.policy
    }

    /// How long it is kept without being used.
    pub fn idle(&self) -> Duration {
        Duration::from_millis(self.of.idle_ms)
    }

    /// Whether its keeper has ended, as far as is known.
    pub fn is_over(&self) -> bool {
        // One that something is asked of is in use.
        self.keeper.try_lock().is_ok_and(|keeper| keeper.as_ref().is_none_or(|keeper| !keeper.is_there()))
    }

    fn touch(&self) {
        *lock(&self.used) = Instant::now();
    }

    fn ends_at(&self) -> Instant {
        *lock(&self.used) + Duration::from_millis(self.of.idle_ms)
    }

    /// Has its keeper do something that is no run.
    async fn ask(self: &Arc<Self>, line: Line) -> Result<Value, Problem> {
        self.ask_held(line, ()).await
    }

    /// The same. `held` has the room of the line, and is dropped with it.
    async fn ask_held(self: &Arc<Self>, line: Line, held: impl Send + 'static) -> Result<Value, Problem> {
        let bytes = self.ask_for_bytes(line, held).await?;
        serde_json::from_slice(&bytes).map_err(|error| failed(&error.to_string()))
    }

    /// The same; its answer as it came.
    ///
    /// # Errors
    /// The session is over, or its keeper is lost, or too much waits for it.
    pub async fn ask_for_bytes(self: &Arc<Self>, line: Line, held: impl Send + 'static) -> Result<Vec<u8>, Problem> {
        let session = Arc::clone(self);
        let operation = async move {
            let answer = session.keeper().await?.ask_for_bytes(&line).await;
            drop((line, held));
            answer
        };
        self.to_its_end(operation).await
    }

    /// Does something of it to its end, whether or not its client still waits: an operation that is broken off
    /// ends the session. What the operation has in memory belongs to it, and not to its client.
    async fn to_its_end<T: Send + 'static>(
        &self,
        operation: impl Future<Output = Result<T, Problem>> + Send + 'static,
    ) -> Result<T, Problem> {
        let Ok(room) = Arc::clone(&self.operations).try_acquire_owned() else {
            let detail = format!("{MAX_OPERATIONS} operations of this session wait already; wait for some, or for its run");
            return Err(Problem::new(StatusCode::CONFLICT, "session_busy", detail).after(1));
        };
        let operation = tokio::spawn(async move {
            let _room = room;
            operation.await
        });
        operation.await.map_err(|error| failed(&error.to_string()))?
    }

    fn show(&self) -> Value {
        let left = self.ends_at().saturating_duration_since(Instant::now());
        let expires = (SystemTime::now() + left).duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        json!({
            "session": self.of.session,
            "key": self.of.key,
            "policy": self.of.policy,
            "labels": self.of.labels,
            "idle_ms": self.of.idle_ms,
            "expires_at": expires,
        })
    }
}

impl Sessions {
    /// None yet. `wishes` go to the supervisor.
    pub fn new(wishes: mpsc::UnboundedSender<FromFront>) -> Self {
        Sessions { open: Mutex::default(), asked: Mutex::default(), wishes }
    }

    /// How many there are, those that are being opened included.
    pub fn count(&self) -> usize {
        lock(&self.open).len() + lock(&self.asked).len()
    }

    /// The same, of one key.
    pub fn count_of(&self, key: &str) -> usize {
        let open = lock(&self.open).values().filter(|session| session.of.key == key).count();
        open + lock(&self.asked).values().filter(|asked| asked.key == key).count()
    }

    /// The supervisor has a keeper: one that was asked for here, or one of a front that has ended.
    pub fn add(&self, front: &Arc<Front>, of: KeeperOf, link: WorkerLink) {
        let asked = lock(&self.asked).remove(&of.session);
        let is_asked_for = asked.is_some();
        let link = match asked {
            None => link,
            Some(asked) => match asked.answer.send(Ok(link)) {
                Ok(()) => return,
                // The client was told that there is no session, and knows no number.
                Err(Ok(link)) => link,
                Err(Err(_)) => return,
            },
        };
        let front = Arc::clone(front);
        tokio::spawn(async move {
            let mut link = link;
            match tokio::time::timeout(BEGIN, link.next()).await {
                Ok(Ok(FromWorker::Idle(_))) if is_asked_for => close_keeper(&mut link).await,
                Ok(Ok(FromWorker::Idle(_))) => drop(front.sessions.begin(&front, of, link)),
                _ => {}
            }
        });
    }

    /// The supervisor starts none.
    pub fn refuse(&self, none: NoKeeper) {
        let asked = lock(&self.asked).remove(&none.session);
        let _gone = asked.map(|asked| asked.answer.send(Err(none)));
    }

    fn begin(&self, front: &Arc<Front>, of: KeeperOf, link: WorkerLink) -> Arc<Session> {
        let keeper = Arc::new(tokio::sync::Mutex::new(Some(link)));
        let operations = Arc::new(Semaphore::new(MAX_OPERATIONS));
        let session = Arc::new(Session { of, keeper, used: Mutex::new(Instant::now()), operations, calls: Calls::default() });
        lock(&self.open).insert(session.of.session.clone(), Arc::clone(&session));
        tokio::spawn(end_when_idle(Arc::clone(front), Arc::clone(&session)));
        session
    }

    /// A session of a key that still may use its policy.
    ///
    /// # Errors
    /// There is none, or the policy was taken from the key.
    pub fn find(&self, number: &str, key: &Key) -> Result<Arc<Session>, Problem> {
        let found = lock(&self.open).get(number).filter(|session| session.of.key == key.id).map(Arc::clone);
        let session = found.ok_or_else(|| {
            Problem::new(StatusCode::NOT_FOUND, "no_such_session", "this key has no session of this number, or it has ended")
        })?;
        if !key.policies.contains(&session.of.policy) {
            let detail = format!("key {} may use policy {} no more", key.id, session.of.policy);
            return Err(Problem::new(StatusCode::FORBIDDEN, "policy_not_granted", detail));
        }
        Ok(session)
    }

    /// Opens a session of a key.
    async fn open(&self, front: &Arc<Front>, key: &Key, of: KeeperOf) -> Result<Arc<Session>, Problem> {
        if self.count_of(&key.id) >= key.sessions as usize || self.count() >= front.settings().capacity.sessions as usize {
            return Err(too_many(front, key, 10));
        }
        let (ask, answer) = oneshot::channel();
        lock(&self.asked).insert(of.session.clone(), AskedFor { key: key.id.clone(), answer: ask });
        // It ends with this process.
        let _sent = self.wishes.send(FromFront::Keep(of.clone()));
        let begun = async {
            let none = |none: NoKeeper| if none.is_full { too_many(front, key, 1) } else { failed(&none.why) };
            let mut link = answer.await.map_err(|_| failed("the supervisor has not answered"))?.map_err(none)?;
            match link.next().await {
                Ok(FromWorker::Idle(_)) => Ok(link),
                Ok(FromWorker::Result(mut answer)) => {
                    answer.extend(link.answer().await.map_err(|error| failed(&error.to_string()))?);
                    let said: Value = serde_json::from_slice(&answer).unwrap_or_default();
                    Err(failed(said["error"].as_str().unwrap_or("without a word")))
                }
                _ => Err(failed("its keeper has ended")),
            }
        };
        let link = tokio::time::timeout(BEGIN, begun).await.map_err(|_| failed("its keeper takes too long"))??;
        Ok(self.begin(front, of, link))
    }
}

/// Closes a session after its idle time, or when its key has expired or its keeper has ended.
async fn end_when_idle(front: Arc<Front>, session: Arc<Session>) {
    loop {
        tokio::time::sleep_until(session.ends_at().min(Instant::now() + Duration::from_secs(1))).await;
        // One that something is asked of is in use.
        let Ok(keeper) = session.keeper.try_lock() else {
            session.touch();
            continue;
        };
        let is_there = keeper.as_ref().is_some_and(WorkerLink::is_there);
        // The supervisor ends those of keys that have gone.
        let has_expired = front.settings().keys.iter().any(|key| key.id == session.of.key && key.has_expired(now()));
        if is_there && !has_expired && Instant::now() < session.ends_at() {
            continue;
        }
        break;
    }
    close_session(&front, &session).await;
}

/// Ends a session, whether or not its client still waits for that. A run of it goes on to its end, unless it is
/// cancelled.
pub async fn close_to_its_end(front: Arc<Front>, session: Arc<Session>) {
    // It ends in any case: nothing in it panics.
    let _closed = tokio::spawn(async move { close_session(&front, &session).await }).await;
}

async fn close_session(front: &Front, session: &Session) {
    let mut keeper = session.keeper.lock().await;
    if let Some(mut keeper) = keeper.take() {
        close_keeper(&mut keeper).await;
    }
    lock(&front.sessions.open).remove(&session.of.session);
}

/// Tells a keeper that its session is over. One that does not hear it ends without its front.
async fn close_keeper(keeper: &mut WorkerLink) {
    let text = serde_json::to_vec(&Line::Close(Only { id: None })).unwrap_or_default();
    let _closed = tokio::time::timeout(Duration::from_secs(2), keeper.ask(&text)).await;
}

fn too_many(front: &Front, key: &Key, after: u64) -> Problem {
    let all = front.settings().capacity.sessions;
    let detail = format!("as many sessions are open, or being opened, as may be: {} of this key, {all} of all; close some", key.sessions);
    Problem::new(StatusCode::TOO_MANY_REQUESTS, "key_sessions", detail).after(after)
}

/// The keeper is gone, and all files of its session.
pub fn session_ended() -> Problem {
    let detail = "the session has ended, and its files with it; open another with POST /v1/sessions";
    Problem::new(StatusCode::GONE, "session_ended", detail)
}

fn failed(why: &str) -> Problem {
    Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "session_failed", format!("the session: {why}"))
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Opening {
    policy: Option<String>,
    idle: Option<String>,
    labels: BTreeMap<String, String>,
}

/// `POST /v1/sessions`.
pub async fn open(State(front): Shared, KeyFor { key, .. }: KeyFor<ToKeep>, request: Request) -> Result<Response, Problem> {
    let (parts, body) = request.into_parts();
    check_type(&parts.headers, "application/json")?;
    let body = read(body, MAX_OPENING, &mut front.buffer(&key.id)).await?;
    let bad = |detail: String| Problem::new(StatusCode::UNPROCESSABLE_ENTITY, "bad_request", detail);
    let Opening { policy, idle, labels } = serde_json::from_slice(&body).map_err(|error| {
        bad(format!("a session is opened by an object with `policy`, `idle` and `labels`, each of which may be missing: {error}"))
    })?;
    let policy = policy_of(&key, policy)?;
    let idle = idle_of(idle.as_deref()).map_err(|why| bad(why.to_owned()))?;
    let (most, bytes) = (KeeperOf::MAX_LABELS, KeeperOf::MAX_LABEL_BYTES);
    if labels.len() > most || serde_json::to_vec(&labels).is_ok_and(|text| text.len() > bytes) {
        return Err(bad(format!("`labels` has at most {most}, and together they take at most {bytes} bytes of JSON")));
    }
    let session = open_for(front, key, policy, idle, labels).await?;
    let mut response = json_response(&session.show());
    *response.status_mut() = StatusCode::CREATED;
    let place = HeaderValue::from_str(&format!("/v1/sessions/{}", session.of.session));
    response.headers_mut().extend(place.ok().map(|place| (header::LOCATION, place)));
    Ok(response)
}

/// How long a session is kept, by what its request says.
pub fn idle_of(asked: Option<&str>) -> Result<Duration, &'static str> {
    match asked.map(|idle| LimitKey::Wall.parse_text(idle)) {
        None => Ok(IDLE),
        Some(Ok(Some(ms))) if (1000..=KeeperOf::MAX_IDLE_MS).contains(&ms) => Ok(Duration::from_millis(ms)),
        Some(_) => Err("`idle` is a duration such as \"10min\"; \"1s\" to \"24h\""),
    }
}

/// Opens a session for a client that waits for its number.
pub async fn open_for(
    front: Arc<Front>,
    key: Key,
    policy: String,
    idle: Duration,
    labels: BTreeMap<String, String>,
) -> Result<Arc<Session>, Problem> {
    let of = KeeperOf { session: new_number()?, key: key.id.clone(), policy, idle_ms: idle.as_millis() as u64, labels };
    // A client that has gone meanwhile does not know its number: then it ends.
    let (tell, told) = oneshot::channel();
    tokio::spawn(async move {
        let opened = front.sessions.open(&front, &key, of).await;
        if let Err(Ok(session)) = tell.send(opened) {
            close_session(&front, &session).await;
        }
    });
    told.await.map_err(|_| failed("it was not opened"))?
}

/// `GET /v1/sessions`.
pub async fn list(State(front): Shared, KeyFor { key, .. }: KeyFor<ToKeep>) -> Result<Response, Problem> {
    let all: Vec<Value> =
        lock(&front.sessions.open).values().filter(|session| session.of.key == key.id).map(|session| session.show()).collect();
    buffered_json(&front, &key.id, &json!({ "sessions": all }))
}

/// `GET /v1/sessions/{session}`.
pub async fn show(OfSession(_, session): OfSession) -> Response {
    json_response(&session.show())
}

/// `DELETE /v1/sessions/{session}`.
pub async fn close(State(front): Shared, OfSession(_, session): OfSession) -> StatusCode {
    close_to_its_end(front, session).await;
    StatusCode::NO_CONTENT
}

/// `POST /v1/sessions/{session}/run`.
pub async fn run(
    State(front): Shared,
    OfSession(key, session): OfSession,
    query: Result<Query<BTreeMap<String, String>>, QueryRejection>,
    request: Request,
) -> Result<Response, Problem> {
    let (parts, body) = request.into_parts();
    let mut query = query.map_err(|error| bad_query(format!("the query may have `queue`: {error}")))?.0;
    let queue = query.remove("queue");
    if let Some(name) = query.keys().next() {
        return Err(bad_query(format!("the query may have `queue`, and not `{name}`; the policy is the session's")));
    }
    let policy = session.of.policy.clone();
    run_for(front, key, policy, queue, Some(session), &parts.headers, body).await
}

/// `POST /v1/sessions/{session}/reset`.
pub async fn reset(OfSession(_, session): OfSession) -> Result<StatusCode, Problem> {
    done(&session.ask(Line::Reset(Only { id: None })).await?)?;
    Ok(StatusCode::NO_CONTENT)
}

/// Whether an operation was done, or the problem that its answer says.
fn done(answer: &Value) -> Result<(), Problem> {
    if answer["ok"] == true {
        return Ok(());
    }
    let detail = answer["error"].as_str().unwrap_or("the session did not say why");
    let reason = answer["reason"].as_str().unwrap_or_default();
    if let Some(problem) = Problem::unrecorded(reason, detail) {
        return Err(problem);
    }
    let (status, reason) = match reason {
        "file_missing" => (StatusCode::NOT_FOUND, "file_missing"),
        "is_a_directory" => (StatusCode::CONFLICT, "is_a_directory"),
        "not_a_directory" => (StatusCode::CONFLICT, "not_a_directory"),
        "directory_not_empty" => (StatusCode::CONFLICT, "directory_not_empty"),
        "not_a_file" => (StatusCode::CONFLICT, "not_a_file"),
        "no_space" => (StatusCode::INSUFFICIENT_STORAGE, "no_space"),
        "permission_denied" | "path_read_only" | "path_hidden" | "path_is_link" | "path_outside" => (StatusCode::FORBIDDEN, "path_refused"),
        _ if answer["verdict"] == "bad_request" => (StatusCode::UNPROCESSABLE_ENTITY, "bad_request"),
        _ => (StatusCode::INTERNAL_SERVER_ERROR, "session_failed"),
    };
    Err(Problem::new(status, reason, detail))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ListQuery {
    #[serde(default)]
    recursive: bool,
}

/// `GET /v1/sessions/{session}/files/`.
pub async fn list_files(
    State(front): Shared,
    OfSession(_, session): OfSession,
    query: Result<Query<ListQuery>, QueryRejection>,
) -> Result<Response, Problem> {
    list_directory(&front, &session, String::new(), query).await
}

async fn list_directory(
    front: &Front,
    session: &Arc<Session>,
    path: String,
    query: Result<Query<ListQuery>, QueryRejection>,
) -> Result<Response, Problem> {
    let query = query.map_err(|error| bad_query(format!("the query may have `recursive`, which is true or false: {error}")))?;
    let mut answer = session.ask(Line::List(List { path, recursive: query.0.recursive, id: None })).await?;
    done(&answer)?;
    let (entries, truncated) = (answer["entries"].take(), answer["truncated"].take());
    buffered_json(front, &session.of.key, &json!({ "entries": entries, "truncated": truncated }))
}

/// `GET /v1/sessions/{session}/files/{path}`: a file, or with a slash at its end a directory.
pub async fn read_file(
    State(front): Shared,
    OfSession(_, session): OfSession,
    Path((_, path)): Path<(String, String)>,
    query: Result<Query<ListQuery>, QueryRejection>,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    if path.ends_with('/') {
        return list_directory(&front, &session, path.trim_end_matches('/').to_owned(), query).await;
    }
    let range = headers.get(header::RANGE).and_then(|range| range.to_str().ok()).and_then(parse_range);
    let (first, last) = match range {
        None => (0, None),
        Some(Range::From(first, last)) => (first, last),
        Some(Range::Last(count)) => (size_of(&session, &path).await?.saturating_sub(count), None),
    };
    let FileBytes { bytes, size, buffer } = session.to_its_end(read_all(front, Arc::clone(&session), path, first, last)).await?;
    if range.is_some() && bytes.is_empty() && first >= size {
        let detail = format!("the file has {size} bytes");
        let mut response = Problem::new(StatusCode::RANGE_NOT_SATISFIABLE, "bad_range", detail).into_response();
        response.headers_mut().extend(HeaderValue::from_str(&format!("bytes */{size}")).ok().map(|value| (header::CONTENT_RANGE, value)));
        return Ok(response);
    }
    let end = first.saturating_add(bytes.len() as u64);
    let mut response = ([(header::CONTENT_TYPE, "application/octet-stream")], buffer.hold(bytes)).into_response();
    response.headers_mut().insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    if range.is_some() {
        *response.status_mut() = StatusCode::PARTIAL_CONTENT;
        let place = format!("bytes {first}-{}/{size}", end.saturating_sub(1));
        response.headers_mut().extend(HeaderValue::from_str(&place).ok().map(|value| (header::CONTENT_RANGE, value)));
    }
    Ok(response)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Range {
    /// From this byte on, up to and with another.
    From(u64, Option<u64>),
    /// So many at the end.
    Last(u64),
}

/// One range of bytes. Several, or what is none, are answered by the whole file (RFC 9110, 14.2).
fn parse_range(text: &str) -> Option<Range> {
    let (first, last) = text.strip_prefix("bytes=")?.split_once('-')?;
    match (first.trim(), last.trim()) {
        ("", count) => count.parse().ok().map(Range::Last),
        (first, "") => first.parse().ok().map(|first| Range::From(first, None)),
        (first, last) => {
            let (first, last): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
            (first <= last).then_some(Range::From(first, Some(last)))
        }
    }
}

async fn read_part(keeper: &mut KeeperGuard, path: &str, offset: u64, length: u64) -> Result<(Vec<u8>, u64), Problem> {
    let line = Line::Read(Read { path: path.to_owned(), offset, length: Some(length), encoding: Encoding::Base64, id: None });
    let answer = keeper.ask_line(&line).await?;
    done(&answer)?;
    let bytes = STANDARD.decode(answer["base64"].as_str().unwrap_or_default()).map_err(|error| failed(&error.to_string()))?;
    Ok((bytes, answer["size"].as_u64().unwrap_or(0)))
}

async fn size_of(session: &Arc<Session>, path: &str) -> Result<u64, Problem> {
    let line = Line::Read(Read { path: path.to_owned(), offset: 0, length: Some(0), encoding: Encoding::Base64, id: None });
    let answer = session.ask(line).await?;
    done(&answer)?;
    Ok(answer["size"].as_u64().unwrap_or(0))
}

struct FileBytes {
    bytes: Vec<u8>,
    /// Of the whole file.
    size: u64,
    buffer: Buffer,
}

/// Reads a file in parts, between which nothing else happens in the session.
async fn read_all(front: Arc<Front>, session: Arc<Session>, path: String, first: u64, last: Option<u64>) -> Result<FileBytes, Problem> {
    let (mut bytes, mut buffer) = (Vec::new(), front.buffer(&session.of.key));
    let mut keeper = session.keeper().await?;
    loop {
        let offset = first.saturating_add(bytes.len() as u64);
        let most = last.map_or(PART, |last| last.saturating_add(1).saturating_sub(offset).min(PART));
        let (part, size) = read_part(&mut keeper, &path, offset, most).await?;
        buffer.grow(part.len())?;
        let length = part.len() as u64;
        bytes.extend(part);
        if length < PART || offset.saturating_add(length) >= size {
            return Ok(FileBytes { bytes, size, buffer });
        }
    }
}

/// `PUT /v1/sessions/{session}/files/{path}`.
pub async fn write_file(
    State(front): Shared,
    OfSession(_, session): OfSession,
    Path((_, path)): Path<(String, String)>,
    request: Request,
) -> Result<StatusCode, Problem> {
    let (parts, body) = request.into_parts();
    check_type(&parts.headers, "application/octet-stream")?;
    let mut buffer = front.buffer(&session.of.key);
    let bytes = read(body, front.settings().max_body.min(MAX_WRITTEN), &mut buffer).await?;
    buffer.grow(bytes.len() / 3 * 4)?;
    let contents = TextOrBase64::Base64(Base64 { base64: STANDARD.encode(bytes) });
    let line = Line::Write(Write { path, contents, append: false, whole: true, id: None });
    done(&session.ask_held(line, buffer).await?)?;
    Ok(StatusCode::NO_CONTENT)
}

/// `DELETE /v1/sessions/{session}/files/{path}`.
pub async fn remove_file(OfSession(_, session): OfSession, Path((_, path)): Path<(String, String)>) -> Result<StatusCode, Problem> {
    done(&session.ask(Line::Remove(Remove { path, id: None })).await?)?;
    Ok(StatusCode::NO_CONTENT)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use std::{io::Read, os::unix::net::UnixStream};

    use stockade_protocol::service::{Capacity, Credential, FrameDecoder, Message, Scope, Settings, ToWorker};

    use super::*;

    fn key(id: &str) -> Key {
        Key {
            id: id.to_owned(),
            credential: Credential::Uid(1),
            policies: vec!["p".to_owned()],
            scopes: vec![Scope::Keep],
            running: 1,
            waiting: 1,
            runs_per_minute: None,
            cpu_per_hour: None,
            weight: 1,
            expires: None,
            sessions: 1,
        }
    }

    /// A front for two keys and so many sessions, and what it asks the supervisor for.
    fn front(sessions: u32) -> (Arc<Front>, mpsc::UnboundedReceiver<FromFront>) {
        let capacity = Capacity { sessions, ..Capacity::default() };
        let settings = Settings { keys: vec![key("a"), key("b")], capacity, ..Settings::default() };
        let (wish, wishes) = mpsc::unbounded_channel();
        (Arc::new(Front::new(settings, wish)), wishes)
    }

    fn open(front: &Arc<Front>, id: &str) -> tokio::task::JoinHandle<Result<Arc<Session>, Problem>> {
        tokio::spawn(open_for(Arc::clone(front), key(id), "p".to_owned(), IDLE, BTreeMap::new()))
    }

    async fn asked(wishes: &mut mpsc::UnboundedReceiver<FromFront>) -> KeeperOf {
        let FromFront::Keep(of) = wishes.recv().await.unwrap();
        of
    }

    /// A keeper that is idle, and its other end.
    fn keeper() -> (WorkerLink, UnixStream) {
        let (front, mut keeper) = UnixStream::pair().unwrap();
        std::io::Write::write_all(&mut keeper, &FromWorker::Idle(None).to_frame().unwrap()).unwrap();
        (WorkerLink::new(front.into()).unwrap(), keeper)
    }

    /// Whether a keeper was told that its session is over.
    fn is_closed(mut keeper: UnixStream) -> bool {
        let mut said = FrameDecoder::default();
        let (mut piece, mut told) = ([0; 4096], Vec::new());
        keeper.set_nonblocking(true).unwrap();
        while let Ok(length @ 1..) = keeper.read(&mut piece) {
            said.push(&piece[..length]);
        }
        while let Some(message) = said.take::<ToWorker>().unwrap() {
            told.push(message);
        }
        matches!(told.as_slice(), [ToWorker::Line(_), ToWorker::Request(line)] if line.windows(7).any(|word| word == b"\"close\""))
    }

    fn numbers(front: &Front) -> Vec<String> {
        lock(&front.sessions.open).keys().cloned().collect()
    }

    #[tokio::test(start_paused = true)]
    async fn sessions_that_are_being_opened_take_no_room_of_other_keys() {
        let (front, mut wishes) = front(2);
        // The supervisor has answered none of them.
        let mut opening: Vec<_> = (0..5).map(|_| open(&front, "a")).collect();
        let first = asked(&mut wishes).await;
        for refused in opening.split_off(1) {
            assert_eq!(refused.await.unwrap().err().unwrap().reason, "key_sessions");
        }
        assert_eq!((front.sessions.count(), front.sessions.count_of("a"), front.sessions.count_of("b")), (1, 1, 0));
        let _other = open(&front, "b");
        let other = asked(&mut wishes).await;
        // What is refused makes room again.
        for session in [other.session, first.session] {
            front.sessions.refuse(NoKeeper { session, why: String::new(), is_full: false });
        }
        assert_eq!(opening.remove(0).await.unwrap().err().unwrap().reason, "session_failed");
        assert_eq!(front.sessions.count(), 0);
        let _again = open(&front, "a");
        assert_eq!(asked(&mut wishes).await.key, "a");
    }

    #[tokio::test(start_paused = true)]
    async fn a_keeper_that_comes_too_late_is_closed() {
        let (front, mut wishes) = front(2);
        let opening = open(&front, "a");
        let late = asked(&mut wishes).await;
        // The supervisor says nothing for as long as it may.
        assert_eq!(opening.await.unwrap().err().unwrap().reason, "session_failed");
        let (link, its_end) = keeper();
        front.sessions.add(&front, late.clone(), link);
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert!(is_closed(its_end) && numbers(&front).is_empty());
        // The controls: one that comes in time, and one of the front before.
        let opening = open(&front, "a");
        let in_time = asked(&mut wishes).await;
        let (link, in_time_end) = keeper();
        front.sessions.add(&front, in_time.clone(), link);
        assert_eq!(opening.await.unwrap().unwrap().number(), &in_time.session);
        let (link, adopted_end) = keeper();
        front.sessions.add(&front, KeeperOf { session: "adopted".to_owned(), ..late }, link);
        tokio::time::sleep(Duration::from_secs(5)).await;
        let mut open = vec![in_time.session, "adopted".to_owned()];
        open.sort();
        assert_eq!(numbers(&front), open);
        assert!(!is_closed(in_time_end) && !is_closed(adopted_end));
    }

    fn put(front: &Arc<Front>, session: &Arc<Session>, bytes: usize) -> tokio::task::JoinHandle<Result<StatusCode, Problem>> {
        let body = axum::body::Body::from(vec![b'x'; bytes]);
        let request = Request::put("/").header(header::CONTENT_TYPE, "application/octet-stream").body(body).unwrap();
        let (of, path) = (OfSession(key("a"), Arc::clone(session)), Path((session.number().clone(), "f".to_owned())));
        tokio::spawn(write_file(State(Arc::clone(front)), of, path, request))
    }

    #[tokio::test(start_paused = true)]
    async fn what_waits_for_a_session_counts_after_its_client_has_gone_and_is_bounded() {
        const MIB: usize = 1 << 20;
        let settings = Settings { keys: vec![key("a")], max_body: 4 << 20, max_buffers: 16 << 20, ..Settings::default() };
        let front = Arc::new(Front::new(settings, mpsc::unbounded_channel().0));
        let of =
            KeeperOf { session: "1".to_owned(), key: "a".to_owned(), policy: "p".to_owned(), idle_ms: 600_000, labels: BTreeMap::new() };
        let (mut link, mut keeper) = keeper();
        assert!(matches!(link.next().await, Ok(FromWorker::Idle(_))));
        let session = front.sessions.begin(&front, of, link);
        let room = |bytes: usize| front.buffer("a").grow(bytes).is_ok();
        // As a run that goes on.
        let run = Arc::clone(&session).keeper().await.unwrap();
        let clients: Vec<_> = (0..2).map(|_| put(&front, &session, 3 * MIB)).collect();
        tokio::time::sleep(Duration::from_secs(1)).await;
        clients.iter().for_each(tokio::task::JoinHandle::abort);
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(!room(3 * MIB));
        assert_eq!(put(&front, &session, 3 * MIB).await.unwrap().unwrap_err().reason, "buffers_full");
        // What has no body is bounded in number.
        let clients: Vec<_> = (2..MAX_OPERATIONS).map(|_| put(&front, &session, 0)).collect();
        tokio::time::sleep(Duration::from_secs(1)).await;
        clients.iter().for_each(tokio::task::JoinHandle::abort);
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(put(&front, &session, 0).await.unwrap().unwrap_err().reason, "session_busy");
        // The control: they end when the session is free, and all room is there again.
        drop(run);
        keeper.set_nonblocking(true).unwrap();
        let (mut decoder, mut piece, mut served) = (FrameDecoder::default(), vec![0; MIB], 0);
        while served < MAX_OPERATIONS {
            tokio::time::sleep(Duration::from_millis(1)).await;
            while let Ok(length @ 1..) = keeper.read(&mut piece) {
                decoder.push(&piece[..length]);
            }
            let mut line = Vec::new();
            while let Some(message) = decoder.take::<ToWorker>().unwrap() {
                if let ToWorker::Request(part) = message {
                    line = part;
                }
            }
            if line.ends_with(b"}") {
                for message in [FromWorker::Result(b"{\"ok\":true}".to_vec()), FromWorker::End, FromWorker::Idle(None)] {
                    std::io::Write::write_all(&mut keeper, &message.to_frame().unwrap()).unwrap();
                }
                served += 1;
            }
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(room(16 * MIB) && session.operations.available_permits() == MAX_OPERATIONS);
    }

    #[tokio::test(start_paused = true)]
    async fn a_session_is_closed_also_where_its_client_has_gone() {
        let (front, _wishes) = front(1);
        let of =
            KeeperOf { session: "1".to_owned(), key: "a".to_owned(), policy: "p".to_owned(), idle_ms: 600_000, labels: BTreeMap::new() };
        let (mut link, its_end) = keeper();
        assert!(matches!(link.next().await, Ok(FromWorker::Idle(_))));
        let session = front.sessions.begin(&front, of, link);
        // As a run that goes on.
        let run = Arc::clone(&session).keeper().await.unwrap();
        let client = tokio::spawn(close(State(Arc::clone(&front)), OfSession(key("a"), Arc::clone(&session))));
        tokio::time::sleep(Duration::from_secs(1)).await;
        client.abort();
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(numbers(&front), ["1"]);
        drop(run);
        tokio::time::sleep(Duration::from_secs(3)).await;
        assert!(numbers(&front).is_empty() && is_closed(its_end));
    }

    #[tokio::test(start_paused = true)]
    async fn a_session_ends_when_its_key_expires() {
        let of = |id: &str| KeeperOf {
            session: id.to_owned(),
            key: id.to_owned(),
            policy: "p".to_owned(),
            idle_ms: 600_000,
            labels: BTreeMap::new(),
        };
        let keys = vec![Key { expires: Some(now() - 1), ..key("a") }, Key { expires: Some(now() + 600), ..key("b") }];
        let front = Arc::new(Front::new(Settings { keys, ..Settings::default() }, mpsc::unbounded_channel().0));
        let ends: Vec<_> = ["a", "b"].map(|id| (front.sessions.begin(&front, of(id), keeper().0), id)).into_iter().collect();
        tokio::time::sleep(Duration::from_secs(5)).await;
        assert_eq!((numbers(&front), ends.len()), (vec!["b".to_owned()], 2));
    }

    #[test]
    fn one_range_is_understood_and_others_are_the_whole_file() {
        for (text, range) in [
            ("bytes=0-4", Some(Range::From(0, Some(4)))),
            ("bytes=7-", Some(Range::From(7, None))),
            ("bytes=-3", Some(Range::Last(3))),
            ("bytes=4-0", None),
            ("bytes=0-1,4-5", None),
            ("bytes=-", None),
            ("lines=0-4", None),
            ("bytes=18446744073709551616-", None),
        ] {
            assert_eq!(parse_range(text), range, "{text}");
        }
    }
}
