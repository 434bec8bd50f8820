//! The endpoints: which paths there are, who may use them, and what they answer.
//!
//! Every answer that is no result is a problem of RFC 9457. Over TCP a browser may be the peer: the
//! host that it names must be listed, an origin must be one of these, and bodies are JSON alone. No
//! cookie is set and none is read, and no answer permits another site to read it.

use std::{sync::Arc, time::Duration};

use axum::{
    Extension, Router,
    body::{Body, Bytes},
    extract::{Path, Query, Request, State, rejection::QueryRejection},
    http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use http_body_util::BodyExt;
use serde::Deserialize;
use serde_json::json;
use stockade_protocol::{
    LimitKey, LimitValue,
    service::{Key, ListenerKind, RunSize, Scope, Settings},
};

use crate::{
    front::{Buffer, Front},
    keys,
    problem::Problem,
};

/// How long a part of a body may take.
const PART: Duration = Duration::from_secs(20);
/// Bytes of a run's number.
const NUMBER: usize = 8;

/// Who is at the other end of a connection.
#[derive(Clone, Copy, Debug)]
pub struct Peer {
    /// By which socket.
    pub kind: ListenerKind,
    /// Its user, over the UNIX socket.
    pub uid: Option<u32>,
}

type Shared = State<Arc<Front>>;

/// All endpoints.
pub fn router(front: Arc<Front>) -> Router {
    Router::new()
        .route("/v1/run", post(run))
        .route("/v1/runs", get(list_runs))
        .route("/v1/runs/{run}", get(one_run).delete(cancel_run))
        .route("/v1/policies", get(policies))
        .route("/v1/limits", get(limits))
        .route("/live", get(live))
        .route("/ready", get(ready))
        .route("/health", get(ready))
        .fallback(no_such_path)
        .method_not_allowed_fallback(no_such_method)
        .layer(middleware::from_fn_with_state(Arc::clone(&front), guard))
        .with_state(front)
}

/// Turns away what no endpoint should see.
async fn guard(State(front): Shared, Extension(peer): Extension<Peer>, request: Request, next: Next) -> Response {
    let refused = if peer.kind == ListenerKind::Tcp { refuse_foreign(&front.settings(), request.headers()) } else { None };
    let mut response = match refused.or_else(|| refuse_path(request.uri())) {
        Some(problem) => problem.into_response(),
        None => next.run(request).await,
    };
    let headers = response.headers_mut();
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

/// A site that the browser of a user of this host shows, and that asks under a name of its own
/// (DNS rebinding) or from its own origin.
fn refuse_foreign(settings: &Settings, headers: &HeaderMap) -> Option<Problem> {
    let is_listed = |host: &str| settings.hosts.iter().any(|listed| listed.eq_ignore_ascii_case(host));
    let mut hosts = headers.get_all(header::HOST).iter();
    let host = hosts.next().and_then(|host| host.to_str().ok());
    if hosts.next().is_some() || !host.is_some_and(is_listed) {
        let detail = "this service is not called that; an administrator adds the name to `hosts` in serve.toml";
        return Some(Problem::new(StatusCode::MISDIRECTED_REQUEST, "host_unknown", detail));
    }
    let origin = headers.get(header::ORIGIN)?.to_str().unwrap_or_default();
    let own = ["http://", "https://"].iter().find_map(|scheme| origin.strip_prefix(scheme));
    (!own.is_some_and(is_listed)).then(|| {
        let detail = "a page of another origin asks; call the service from a program, or from its own pages";
        Problem::new(StatusCode::FORBIDDEN, "origin_refused", detail)
    })
}

/// A path that a proxy before this may have read in another way.
fn refuse_path(uri: &Uri) -> Option<Problem> {
    let path = uri.path().to_ascii_lowercase();
    let is_odd =
        path.contains("%2f") || path.contains("%00") || path.split('/').any(|part| part == "." || part == ".." || part.contains("%2e"));
    is_odd.then(|| Problem::new(StatusCode::BAD_REQUEST, "bad_http", "the path has `..`, `.`, `%2e`, `%2f` or `%00` in it"))
}

async fn no_such_path() -> Problem {
    Problem::new(StatusCode::NOT_FOUND, "no_such_path", "there is no such path; programs are sent to POST /v1/run")
}

async fn no_such_method(method: Method) -> Problem {
    Problem::new(StatusCode::METHOD_NOT_ALLOWED, "no_such_method", format!("this path does not answer to {method}"))
}

/// The key of a request, with a scope.
fn key_of(front: &Front, peer: Peer, headers: &HeaderMap, uri: &Uri, scope: Scope) -> Result<Key, Problem> {
    let settings = front.settings();
    let key = keys::find(&settings.keys, headers, uri, peer.uid)?;
    keys::check_scope(key, scope)?;
    Ok(key.clone())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RunQuery {
    policy: Option<String>,
}

async fn run(
    State(front): Shared,
    Extension(peer): Extension<Peer>,
    query: Result<Query<RunQuery>, QueryRejection>,
    request: Request,
) -> Result<Response, Problem> {
    let (parts, body) = request.into_parts();
    let key = key_of(&front, peer, &parts.headers, &parts.uri, Scope::Run)?;
    let settings = front.settings();
    let unknown =
        |error: QueryRejection| Problem::new(StatusCode::BAD_REQUEST, "bad_http", format!("the query may have `policy` alone: {error}"));
    let policy = policy_of(&key, query.map_err(unknown)?.0.policy)?;
    check_type(&parts.headers)?;
    let mut buffer = front.buffer();
    let body = read(body, settings.max_body, &mut buffer).await?;
    let size = size_of(&body, settings.policies.get(&policy).copied().unwrap_or_default())?;
    let number = new_number()?;
    let handle = front.run(number.clone(), &key, &policy, size, body)?;
    let answer = handle.answer().await?;
    let queued_ms = answer.queued.as_millis() as u64;
    let mut result = answer.result;
    buffer.grow(result.len()).map_err(|problem| Problem { started: true, ..problem })?;
    // It is an object, which ends with its brace.
    while result.last().is_some_and(|byte| *byte != b'}') {
        result.pop();
    }
    result.pop();
    let more = json!({ "run": number, "key": key.id, "queued_ms": queued_ms }).to_string();
    result.push(b',');
    result.extend(more.as_bytes().get(1..).unwrap_or_default());
    result.push(b'\n');
    Ok(([(header::CONTENT_TYPE, "application/json")], result).into_response())
}

/// The policy that a request asks for.
fn policy_of(key: &Key, asked: Option<String>) -> Result<String, Problem> {
    let Some(asked) = asked else { return Ok(key.policies.first().cloned().unwrap_or_default()) };
    if key.policies.contains(&asked) {
        return Ok(asked);
    }
    let detail = format!("key {} may use {}; an administrator adds others to its `policies` in keys.toml", key.id, key.policies.join(", "));
    Err(Problem::new(StatusCode::FORBIDDEN, "policy_not_granted", detail))
}

/// A form in a page of another site can send some types without being asked (CSRF).
fn check_type(headers: &HeaderMap) -> Result<(), Problem> {
    let value = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let kind = value.split(';').next().unwrap_or_default().trim();
    if kind.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    Err(Problem::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "bad_type", "send the request as `Content-Type: application/json`"))
}

/// Reads a body that comes in its time and is not too long.
async fn read(mut body: Body, most: u64, buffer: &mut Buffer) -> Result<Vec<u8>, Problem> {
    let too_large = || Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", format!("the request has more than {most} bytes"));
    let mut bytes = Vec::new();
    loop {
        let frame = tokio::time::timeout(PART, body.frame()).await;
        let late = |_| Problem::new(StatusCode::REQUEST_TIMEOUT, "body_timeout", "the request's body does not go on; send it at once");
        let Some(frame) = frame.map_err(late)? else { return Ok(bytes) };
        let frame =
            frame.map_err(|error| Problem::new(StatusCode::BAD_REQUEST, "bad_http", format!("the request's body broke off: {error}")))?;
        let part: Bytes = frame.into_data().unwrap_or_default();
        if bytes.len() as u64 + part.len() as u64 > most {
            return Err(too_large());
        }
        buffer.grow(part.len())?;
        bytes.extend_from_slice(&part);
    }
}

#[derive(Default, Deserialize)]
struct Asked {
    #[serde(default)]
    limits: std::collections::BTreeMap<String, LimitValue>,
}

/// What a run takes: by its request, or else by its policy. The worker judges the request.
fn size_of(body: &[u8], usual: RunSize) -> Result<RunSize, Problem> {
    let bad = |error: serde_json::Error| {
        Problem::new(StatusCode::BAD_REQUEST, "bad_json", format!("the request is no JSON object with `code`: {error}"))
    };
    let asked: Asked = serde_json::from_slice(body).map_err(bad)?;
    let value = |key: LimitKey, usual: u64| {
        let asked = asked.limits.get(key.name()).and_then(|value| key.parse(value).ok());
        asked.map_or(usual, |value| value.unwrap_or(usual))
    };
    Ok(RunSize { cpus: value(LimitKey::Cpus, usual.cpus), memory: value(LimitKey::Memory, usual.memory) })
}

fn new_number() -> Result<String, Problem> {
    let mut bytes = [0; NUMBER];
    let failed =
        |error: rustix::io::Errno| Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "sandbox_error", format!("no random number: {error}"));
    rustix::rand::getrandom(&mut bytes[..], rustix::rand::GetRandomFlags::empty()).map_err(failed)?;
    Ok(stockade_protocol::text::hex(&bytes))
}

fn show(number: &String, run: &crate::front::Run) -> serde_json::Value {
    let ms = |since: std::time::Instant| since.elapsed().as_millis() as u64;
    let state = if run.began.is_some() { "running" } else { "waiting" };
    let queued = run.began.map_or_else(|| ms(run.came), |began| began.duration_since(run.came).as_millis() as u64);
    json!({
        "run": number,
        "state": state,
        "key": run.key,
        "policy": run.policy,
        "queued_ms": queued,
        "running_ms": run.began.map(ms),
    })
}

/// The runs that a key may see: its own, or with `watch` all.
fn visible(key: &Key) -> impl Fn(&crate::front::Run) -> bool {
    let (id, all) = (key.id.clone(), key.scopes.contains(&Scope::Watch));
    move |run| all || run.key == id
}

fn any_key(front: &Front, peer: Peer, headers: &HeaderMap, uri: &Uri) -> Result<Key, Problem> {
    keys::find(&front.settings().keys, headers, uri, peer.uid).cloned()
}

async fn list_runs(State(front): Shared, Extension(peer): Extension<Peer>, headers: HeaderMap, uri: Uri) -> Result<Response, Problem> {
    let key = any_key(&front, peer, &headers, &uri)?;
    Ok(json_response(&json!({ "runs": front.runs(visible(&key), show) })))
}

async fn one_run(
    State(front): Shared,
    Extension(peer): Extension<Peer>,
    Path(number): Path<String>,
    headers: HeaderMap,
    uri: Uri,
) -> Result<Response, Problem> {
    let key = any_key(&front, peer, &headers, &uri)?;
    let found = front.runs(visible(&key), |found, run| (*found == number).then(|| show(found, run)));
    found.into_iter().flatten().next().map(|run| json_response(&run)).ok_or_else(no_such_run)
}

async fn cancel_run(
    State(front): Shared,
    Extension(peer): Extension<Peer>,
    Path(number): Path<String>,
    headers: HeaderMap,
    uri: Uri,
) -> Result<StatusCode, Problem> {
    let key = key_of(&front, peer, &headers, &uri, Scope::Run)?;
    let cancelled = front.cancel(&number, |run| run.key == key.id);
    if cancelled { Ok(StatusCode::ACCEPTED) } else { Err(no_such_run()) }
}

fn no_such_run() -> Problem {
    Problem::new(StatusCode::NOT_FOUND, "no_such_run", "no run of this key that waits or runs has this number")
}

async fn policies(State(front): Shared, Extension(peer): Extension<Peer>, headers: HeaderMap, uri: Uri) -> Result<Response, Problem> {
    let key = any_key(&front, peer, &headers, &uri)?;
    let settings = front.settings();
    let list: Vec<_> = key
        .policies
        .iter()
        .map(|name| {
            let size = settings.policies.get(name).copied().unwrap_or_default();
            json!({ "name": name, "cpus": size.cpus as f64 / 1000.0, "memory_bytes": size.memory })
        })
        .collect();
    Ok(json_response(&json!({ "policies": list })))
}

async fn limits(State(front): Shared, Extension(peer): Extension<Peer>, headers: HeaderMap, uri: Uri) -> Result<Response, Problem> {
    let key = any_key(&front, peer, &headers, &uri)?;
    let (running, waiting) = front.of_key(&key.id);
    Ok(json_response(&json!({
        "key": key.id,
        "running": { "now": running, "most": key.running },
        "waiting": { "now": waiting, "most": key.waiting },
        "runs_per_minute": key.runs_per_minute,
        "cpu_per_hour_ms": key.cpu_per_hour,
        "scopes": key.scopes,
    })))
}

fn json_response(value: &serde_json::Value) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], value.to_string() + "\n").into_response()
}

async fn live() -> Response {
    json_response(&json!({ "live": true }))
}

async fn ready(State(front): Shared) -> Response {
    let is_ready = !front.is_draining();
    let mut response = json_response(&json!({ "live": true, "ready": is_ready }));
    if !is_ready {
        *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    }
    response
}
