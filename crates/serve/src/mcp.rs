//! The Model Context Protocol over HTTP (streamable HTTP): the tools of `stockade mcp` in sessions of keys.
//!
//! `initialize` opens a session as `POST /v1/sessions` does, and `Mcp-Session-Id` is its number. All that
//! stays between two messages is that session: it outlives the front, and ends in each of its ways. The
//! protocol itself is the SDK's, which is told of one message at a time. Versions of the protocol without
//! sessions are refused. Nothing is sent that no call has asked for, so `GET` has no stream; an answer that
//! broke off cannot be resumed, and its run is cancelled.

mod message;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use anyhow::anyhow;
use axum::{
    body::{Body, Bytes},
    extract::{Query, Request, State, rejection::QueryRejection},
    http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header, request::Parts},
    response::{IntoResponse, Response},
};
use http_body_util::BodyExt;
use rmcp::transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService, session::never::NeverSessionManager};
use serde::{Deserialize, de::IgnoredAny};
use serde_json::Value;
use stockade_mcp_tools::{Answered, Cancelled, Server, instructions};
use stockade_protocol::{
    Request as Program,
    service::Key,
    session::{Line, Only},
};
use tokio::sync::Notify;

use crate::{
    auth::{KeyFor, ToKeep},
    front::{Buffer, Front, Order},
    http::{Shared, bad_query, check_type, new_number, policy_of, read, read_request},
    lock::lock,
    problem::Problem,
    sessions::{Session, close_to_its_end, idle_of, open_for},
};

use message::Message;

const SESSION_ID: HeaderName = HeaderName::from_static("mcp-session-id");
/// A client that waits hears something so often.
const HEARTBEAT: Duration = Duration::from_secs(10);
/// Copies of what a session answers that are in memory at once: its value, the two forms in the result, and
/// their JSON.
const COPIES: usize = 4;
/// Bytes of the SDK's words for a mistake.
const MAX_WORDS: usize = 1 << 10;

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct McpQuery {
    policy: Option<String>,
    idle: Option<String>,
}

/// An answer of the SDK, which may be an error of JSON-RPC.
#[derive(Deserialize)]
struct MaybeError {
    error: Option<IgnoredAny>,
}

/// `POST /mcp`.
pub async fn post(
    State(front): Shared,
    KeyFor { key, .. }: KeyFor<ToKeep>,
    query: Result<Query<McpQuery>, QueryRejection>,
    request: Request,
) -> Result<Response, Problem> {
    let (parts, body) = request.into_parts();
    let query = query.map_err(|error| bad_query(format!("the query may have `policy` and `idle`: {error}")))?.0;
    check_type(&parts.headers, "application/json")?;
    let session = session_of(&front, &key, &parts.headers)?;
    let idle = idle_of(query.idle.as_deref()).map_err(|why| bad_query(why.to_owned()))?;
    let policy = policy_of(&key, query.policy.clone())?;
    if let Some(session) = &session {
        // A client sends the same query with each message.
        let is_same = (query.policy.is_none() || policy == *session.policy()) && (query.idle.is_none() || idle == session.idle());
        if !is_same {
            let detail = "the session was begun with another `policy` or `idle`; send the query that it was begun with";
            return Err(bad_query(detail.to_owned()));
        }
    }
    let settings = front.settings();
    let mut buffer = front.buffer(&key.id);
    let body = read(body, settings.max_body, &mut buffer).await?;
    let message = Message::read(&body).map_err(|why| no_message(&why))?;
    // The SDK makes a message of it.
    buffer.grow(message.memory)?;
    match (&session, message.method.as_deref()) {
        (None, Some("initialize")) => {
            // The SDK answers before there is a session, so that one is opened for a good message alone.
            let server = Server::new(Arc::new(NoSession), &instructions(settings.inventories.get(&policy).map_or("", String::as_str)));
            let (mut head, body) = answer(server, parts, body, &message, settings.max_body).await?.into_parts();
            let body = body.collect().await.map(http_body_util::Collected::to_bytes).unwrap_or_default();
            let is_good = serde_json::from_slice(&body).is_ok_and(|MaybeError { error }| error.is_none());
            if head.status == StatusCode::OK && is_good {
                let session = open_for(front, key, policy, idle, BTreeMap::new()).await?;
                head.headers.extend(HeaderValue::from_str(session.number()).ok().map(|number| (SESSION_ID, number)));
            }
            Ok(Response::from_parts(head, Body::from(body)))
        }
        (None, _) if message.is_without_session => {
            answer(Server::new(Arc::new(NoSession), ""), parts, body, &message, settings.max_body).await
        }
        (None, _) => {
            let detail = "a session is begun by `initialize`, and its number sent as `Mcp-Session-Id` with all other messages";
            Err(Problem::new(StatusCode::BAD_REQUEST, "bad_http", detail))
        }
        (Some(session), method) => {
            if let (Some("notifications/cancelled"), Some(id)) = (method, &message.cancels) {
                session.calls.cancel(id);
            }
            let call = session.calls.begin(message.id.as_ref());
            let kept = KeptSession {
                front: Arc::clone(&front),
                key,
                session: Arc::clone(session),
                cancelled: Arc::clone(&call.cancelled),
                buffer: Arc::new(Mutex::new(buffer)),
            };
            let held = Arc::new((call, Arc::clone(&kept.buffer)));
            let response = answer(Server::new(Arc::new(kept), ""), parts, body, &message, settings.max_body).await?;
            // Until the last byte of the answer was written, or the client has gone.
            let part = move |bytes| Bytes::from_owner(Part { bytes, _held: Arc::clone(&held) });
            Ok(response.map(|body| Body::new(body.map_frame(move |frame| frame.map_data(&part)))))
        }
    }
}

/// `DELETE /mcp`: what runs in the session is cancelled, and the session is closed with its files.
pub async fn delete(State(front): Shared, KeyFor { key, .. }: KeyFor<ToKeep>, headers: HeaderMap) -> Result<StatusCode, Problem> {
    let Some(session) = session_of(&front, &key, &headers)? else {
        return Err(Problem::new(StatusCode::BAD_REQUEST, "bad_http", "`Mcp-Session-Id` names the session to be closed"));
    };
    session.calls.cancel_all();
    close_to_its_end(front, session).await;
    Ok(StatusCode::NO_CONTENT)
}

/// A part of an answer, which holds what the answer has.
struct Part {
    bytes: Bytes,
    _held: Arc<(Call, Arc<Mutex<Buffer>>)>,
}

impl AsRef<[u8]> for Part {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// The session that a message names, which is the key's and has not ended.
fn session_of(front: &Front, key: &Key, headers: &HeaderMap) -> Result<Option<Arc<Session>>, Problem> {
    let mut numbers = headers.get_all(SESSION_ID).iter();
    let Some(number) = numbers.next() else { return Ok(None) };
    if numbers.next().is_some() {
        return Err(Problem::new(StatusCode::BAD_REQUEST, "bad_http", "`Mcp-Session-Id` is sent once"));
    }
    let session = front.sessions.find(number.to_str().unwrap_or_default(), key)?;
    // A client begins another when it hears this.
    if session.is_over() {
        return Err(Problem::new(StatusCode::NOT_FOUND, "no_such_session", "the session has ended, and its files with it"));
    }
    Ok(Some(session))
}

/// What the SDK answers to one message.
async fn answer(server: Server, parts: Parts, body: Vec<u8>, message: &Message, max_body: u64) -> Result<Response, Problem> {
    let server = server.with_handshake_only();
    let config = StreamableHttpServerConfig::default()
        // Host and origin were looked at before.
        .disable_allowed_hosts()
        .with_legacy_session_mode(false)
        // Only a call of a tool has a stream, in which its progress comes.
        .with_json_response(message.method.as_deref() != Some("tools/call"))
        .with_sse_keep_alive(Some(HEARTBEAT))
        .with_max_request_body_bytes(usize::try_from(max_body).unwrap_or(usize::MAX));
    let service = StreamableHttpService::new(move || Ok(server.clone()), Arc::new(NeverSessionManager::default()), config);
    let response = service.handle(Request::from_parts(parts, Body::from(body))).await;
    let is_json = response.headers().get(header::CONTENT_TYPE).is_some_and(|kind| kind == "application/json");
    if response.status().is_success() || is_json {
        return Ok(response.map(Body::new).into_response());
    }
    // In words alone.
    let status = response.status();
    let words = response.into_body().collect().await.map(http_body_util::Collected::to_bytes).unwrap_or_default();
    let words = String::from_utf8_lossy(words.get(..MAX_WORDS).unwrap_or(&words)).into_owned();
    Err(match status {
        StatusCode::BAD_REQUEST => Problem::new(StatusCode::BAD_REQUEST, "bad_http", words),
        StatusCode::NOT_ACCEPTABLE => {
            let detail = "an answer is `application/json` or `text/event-stream`; send both in `Accept`";
            Problem::new(StatusCode::NOT_ACCEPTABLE, "not_acceptable", detail)
        }
        StatusCode::UNSUPPORTED_MEDIA_TYPE => no_message(&words),
        _ => Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "session_failed", words),
    })
}

fn no_message(why: &str) -> Problem {
    Problem::new(StatusCode::BAD_REQUEST, "bad_json", format!("the body is no message of JSON-RPC: {why}"))
}

/// What stands for a session where there is none: no tool is called there.
struct NoSession;

impl stockade_mcp_tools::Session for NoSession {
    fn ask(&self, _: Line, _: Option<Cancelled>) -> Answered<'_> {
        Box::pin(async { Err(anyhow!("there is no session; `initialize` begins one")) })
    }

    fn reset(&self) -> Answered<'_> {
        self.ask(Line::Reset(Only { id: None }), None)
    }
}

/// A session of a key, for one message.
struct KeptSession {
    front: Arc<Front>,
    key: Key,
    session: Arc<Session>,
    cancelled: Arc<Notify>,
    /// Has the message, and what was answered to it.
    buffer: Arc<Mutex<Buffer>>,
}

impl stockade_mcp_tools::Session for KeptSession {
    fn ask(&self, line: Line, cancelled: Option<Cancelled>) -> Answered<'_> {
        Box::pin(async move {
            let answer = match line {
                Line::Run(program) => self.run(&program, cancelled).await,
                line => self.operate(line).await,
            };
            answer.map_err(for_model)
        })
    }

    fn reset(&self) -> Answered<'_> {
        self.ask(Line::Reset(Only { id: None }), None)
    }
}

impl KeptSession {
    async fn run(&self, program: &Program, cancelled: Option<Cancelled>) -> Result<Value, Problem> {
        let request = serde_json::to_vec(program).map_err(|error| no_message(&error.to_string()))?;
        let mut buffer = self.front.buffer(&self.key.id);
        buffer.grow(request.len())?;
        let settings = self.front.settings();
        let policy = self.session.policy().clone();
        let (size, about) = read_request(&request)?;
        let number = new_number()?;
        let order = Order {
            number: number.clone(),
            key: self.key.clone(),
            policy,
            size,
            about,
            request,
            buffer,
            wait: Duration::from_millis(settings.capacity.queue_ms),
            output: false,
            keep: Duration::ZERO,
            session: Some(Arc::clone(&self.session)),
            name: None,
        };
        let run = self.front.run(order).map_err(|(problem, _)| problem)?;
        let hung_up = async {
            match cancelled {
                Some(cancelled) => cancelled.await,
                None => std::future::pending().await,
            }
        };
        let ending = tokio::select! {
            ending = run.answer() => ending,
            () = hung_up => self.cancel(&number, run.answer()).await,
            () = self.cancelled.notified() => self.cancel(&number, run.answer()).await,
        };
        self.read(&ending?, true)
    }

    async fn cancel<T>(&self, number: &str, ending: impl Future<Output = T>) -> T {
        self.front.cancel(number, |_| true);
        ending.await
    }

    async fn operate(&self, line: Line) -> Result<Value, Problem> {
        let changes = matches!(line, Line::Write(_) | Line::Reset(_));
        self.read(&self.session.ask_for_bytes(line, Arc::clone(&self.buffer)).await?, changes)
    }

    /// `started`: whether what is answered has changed the session.
    fn read(&self, answer: &[u8], started: bool) -> Result<Value, Problem> {
        let room = lock(&self.buffer).grow(answer.len().saturating_mul(COPIES));
        room.map_err(|problem| Problem { started, ..problem })?;
        serde_json::from_slice(answer)
            .map_err(|error| Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "session_failed", format!("the session's answer: {error}")))
    }
}

/// A problem in words for a model, which can open no session.
fn for_model(problem: Problem) -> anyhow::Error {
    match (problem.reason, problem.retry_after) {
        ("session_ended", _) => anyhow!("the session has ended, and its files with it; a new connection begins another"),
        _ if problem.started => {
            anyhow!("this has begun, and may be done: {}; look at the files before you do it again", problem.detail)
        }
        (_, Some(seconds)) => anyhow!("{}; try again in {seconds} s", problem.detail),
        _ => anyhow!("{}", problem.detail),
    }
}

/// The messages of a session that are being answered, by their ids.
#[derive(Default)]
pub struct Calls(Arc<Mutex<BTreeMap<String, Arc<Notify>>>>);

/// A message that is being answered. Forgotten when dropped.
struct Call {
    calls: Arc<Mutex<BTreeMap<String, Arc<Notify>>>>,
    id: Option<String>,
    cancelled: Arc<Notify>,
}

impl Calls {
    fn begin(&self, id: Option<&Value>) -> Call {
        let (id, cancelled) = (id.map(Value::to_string), Arc::new(Notify::new()));
        if let Some(id) = &id {
            // A client that uses an id twice cancels the later of the two.
            lock(&self.0).insert(id.clone(), Arc::clone(&cancelled));
        }
        Call { calls: Arc::clone(&self.0), id, cancelled }
    }

    fn cancel(&self, id: &Value) {
        lock(&self.0).get(&id.to_string()).iter().for_each(|call| call.notify_one());
    }

    fn cancel_all(&self) {
        lock(&self.0).values().for_each(|call| call.notify_one());
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        let (Some(id), mut calls) = (&self.id, lock(&self.calls)) else { return };
        if calls.get(id).is_some_and(|call| Arc::ptr_eq(call, &self.cancelled)) {
            calls.remove(id);
        }
    }
}
