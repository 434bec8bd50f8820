//! The endpoints: which paths there are, who may use them, and what they answer.
//!
//! Every answer that is no result is a problem of RFC 9457. Over TCP a browser may be the peer: the
//! host that it names must be listed, an origin must be one of these, and bodies are JSON alone. No
//! cookie is set and none is read, and no answer permits another site to read it.

use std::{collections::BTreeMap, convert::Infallible, fmt, sync::Arc, time::Duration};

use axum::{
    Extension, Router,
    body::{Body, Bytes},
    extract::{MatchedPath, Path, Query, Request, State, rejection::QueryRejection},
    handler::Handler,
    http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{MethodFilter, MethodRouter, on},
};
use futures_util::{Stream, StreamExt};
use http_body_util::BodyExt;
use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, MapAccess, Visitor},
};
use serde_json::json;
use sha2::{Digest, Sha256};
use stockade_protocol::{
    LimitKey, LimitValue,
    service::{Key, ListenerKind, Scope, Settings},
};

use crate::{
    auth::{Any, KeyFor, ToRun, ToWatch},
    batch::batch,
    console, facade_routes,
    front::{About, AskedLimits, AskedSize, Buffer, EventStream, Front, Order, RequestHash},
    log::Format,
    mcp, metrics,
    problem::{Problem, Uncounted},
    sessions::{self, Session},
};

/// How long a part of a body may take.
const PART: Duration = Duration::from_secs(20);
/// How long a stream can be resumed after its run.
const KEEP_STREAM: Duration = Duration::from_secs(60);
/// How long a result waits for a client that asks later.
const KEEP_LATER: Duration = Duration::from_secs(300);
/// How long the same request gets the same answer.
const KEEP_NAMED: Duration = Duration::from_secs(600);
/// Labels and limits of a request that are looked at.
const FIRST_FIELDS: usize = 64;
/// No policy has a longer name of a language.
const MAX_LANGUAGE: usize = 32;
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

pub type Shared = State<Arc<Front>>;

/// What answers to a method of a path.
pub struct Endpoint {
    pub path: &'static str,
    #[cfg_attr(not(test), expect(dead_code, reason = "`handler` has it; the description is compared with this"))]
    pub method: MethodFilter,
    handler: MethodRouter<Arc<Front>>,
}

fn endpoint<H: Handler<T, Arc<Front>>, T: 'static>(method: MethodFilter, path: &'static str, handler: H) -> Endpoint {
    Endpoint { path, method, handler: on(method, handler) }
}

/// All endpoints; `openapi.json` describes each of them.
pub fn endpoints() -> Vec<Endpoint> {
    const GET: MethodFilter = MethodFilter::GET;
    const POST: MethodFilter = MethodFilter::POST;
    const DELETE: MethodFilter = MethodFilter::DELETE;
    vec![
        endpoint(POST, "/v1/run", run),
        endpoint(POST, "/v1/batch", batch),
        endpoint(GET, "/v1/runs", list_runs),
        endpoint(GET, "/v1/runs/{run}", one_run),
        endpoint(DELETE, "/v1/runs/{run}", cancel_run),
        endpoint(GET, "/v1/runs/{run}/events", run_events),
        endpoint(GET, "/v1/sessions", sessions::list),
        endpoint(POST, "/v1/sessions", sessions::open),
        endpoint(GET, "/v1/sessions/{session}", sessions::show),
        endpoint(DELETE, "/v1/sessions/{session}", sessions::close),
        endpoint(POST, "/v1/sessions/{session}/run", sessions::run),
        endpoint(POST, "/v1/sessions/{session}/reset", sessions::reset),
        endpoint(GET, "/v1/sessions/{session}/files/", sessions::list_files),
        endpoint(GET, "/v1/sessions/{session}/files/{*path}", sessions::read_file),
        endpoint(MethodFilter::PUT, "/v1/sessions/{session}/files/{*path}", sessions::write_file),
        endpoint(DELETE, "/v1/sessions/{session}/files/{*path}", sessions::remove_file),
        endpoint(GET, "/v1/policies", console::policies),
        endpoint(GET, "/v1/limits", limits),
        endpoint(GET, "/v1/watch", console::watch),
        endpoint(GET, "/v1/history", console::history),
        endpoint(GET, "/v1/denials", console::denials),
        endpoint(GET, "/", console::console),
        endpoint(GET, "/live", live),
        endpoint(GET, "/ready", ready),
        endpoint(GET, "/health", ready),
        endpoint(GET, "/metrics", show_metrics),
        endpoint(GET, "/openapi.json", openapi),
        endpoint(POST, "/run_code", facade_routes::run_code),
        endpoint(POST, "/run_jupyter", facade_routes::run_jupyter),
        endpoint(GET, "/v1/ping", facade_routes::ping),
        endpoint(POST, "/execute", facade_routes::execute),
        endpoint(POST, "/mcp", mcp::post),
        endpoint(DELETE, "/mcp", mcp::delete),
    ]
}

/// All endpoints, behind what turns away what none should see.
pub fn router(front: Arc<Front>) -> Router {
    let routed = endpoints().into_iter().fold(Router::new(), |router, Endpoint { path, handler, .. }| router.route(path, handler));
    routed
        .fallback(no_such_path)
        .method_not_allowed_fallback(no_such_method)
        .layer(middleware::from_fn_with_state(Arc::clone(&front), guard))
        .with_state(front)
}

/// Turns away what no endpoint should see.
async fn guard(State(front): Shared, Extension(peer): Extension<Peer>, request: Request, next: Next) -> Response {
    let refused = if peer.kind == ListenerKind::Tcp { refuse_foreign(&front.settings(), request.uri(), request.headers()) } else { None };
    let route = request.extensions().get::<MatchedPath>().cloned();
    let mut response = match (refused, refuse_path(request.uri())) {
        (Some(problem), _) => problem.into_response(),
        // What stands behind it on the connection may be another's than the proxy believes.
        (None, Some(problem)) => ([(header::CONNECTION, "close")], problem).into_response(),
        (None, None) => next.run(request).await,
    };
    front.metrics.answered(route.as_ref().map(MatchedPath::as_str), response.status());
    if let Some(Uncounted(reason)) = response.extensions().get() {
        front.metrics.refused(reason);
    }
    let headers = response.headers_mut();
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

/// A site that the browser of a user of this host shows, and that asks under a name of its own
/// (DNS rebinding) or from its own origin.
fn refuse_foreign(settings: &Settings, uri: &Uri, headers: &HeaderMap) -> Option<Problem> {
    let is_listed = |host: &str| settings.hosts.iter().any(|listed| listed.eq_ignore_ascii_case(host));
    let mut hosts = headers.get_all(header::HOST).iter();
    let host = hosts.next().and_then(|host| host.to_str().ok());
    // One in the target counts before the field (RFC 9112, 3.2.2).
    let is_own = host.is_some_and(is_listed) && uri.authority().is_none_or(|target| is_listed(target.as_str()));
    if hosts.next().is_some() || !is_own {
        let detail = "this service is not called that; an administrator adds the name to `hosts` in serve.toml";
        return Some(Problem::new(StatusCode::MISDIRECTED_REQUEST, "host_unknown", detail));
    }
    let is_own = |origin: &HeaderValue| {
        let origin = origin.to_str().unwrap_or_default();
        ["http://", "https://"].iter().find_map(|scheme| origin.strip_prefix(scheme)).is_some_and(is_listed)
    };
    (!headers.get_all(header::ORIGIN).iter().all(is_own)).then(|| {
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

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RunQuery {
    policy: Option<String>,
    queue: Option<String>,
}

async fn run(
    State(front): Shared,
    KeyFor { key, .. }: KeyFor<ToRun>,
    query: Result<Query<RunQuery>, QueryRejection>,
    request: Request,
) -> Result<Response, Problem> {
    let (parts, body) = request.into_parts();
    let unknown = |error: QueryRejection| bad_query(format!("the query may have `policy` and `queue`: {error}"));
    let RunQuery { policy, queue } = query.map_err(unknown)?.0;
    let policy = policy_of(&key, policy)?;
    run_for(front, key, policy, queue, None, &parts.headers, body).await
}

/// Runs a request, in a session or by itself.
pub async fn run_for(
    front: Arc<Front>,
    key: Key,
    policy: String,
    queue: Option<String>,
    session: Option<Arc<Session>>,
    headers: &HeaderMap,
    body: Body,
) -> Result<Response, Problem> {
    let settings = front.settings();
    let wait = wait_of(&settings, queue.as_deref())?;
    let answer = Answer::of(headers)?;
    check_type(headers, "application/json")?;
    let name = idempotency_key(headers)?;
    let mut buffer = front.buffer(&key.id);
    let request = read(body, settings.max_body, &mut buffer).await?;
    let place = session.as_ref().map_or(&policy, |session| session.number());
    let name = name.map(|name| (name, hash_of(place, &request)));
    if let Some((name, hash)) = &name
        && let Some((number, log, ending)) = front.repeated(&key.id, name, hash)?
    {
        return match answer {
            Answer::Whole => ending.map(result_response),
            Answer::Later => Ok(later_response(&number)),
            Answer::Stream(format) => {
                EventStream::new(front, number, log, 0, format).map(|events| event_response(events, format)).ok_or_else(events_gone)
            }
        };
    }
    let (size, about) = read_request(&request)?;
    let number = new_number()?;
    let keep = answer.keep().max(if name.is_some() { KEEP_NAMED } else { Duration::ZERO });
    let (output, may_return) = (matches!(answer, Answer::Stream(_)), name.is_some());
    let order = Order { number: number.clone(), key, policy, size, about, request, buffer, wait, output, keep, session, name };
    let handle = front.run(order).map_err(|(problem, _)| problem)?;
    match answer {
        Answer::Later => {
            handle.detach();
            Ok(later_response(&number))
        }
        Answer::Stream(format) => {
            handle.into_events(format, !may_return).map(|events| event_response(events, format)).ok_or_else(events_gone)
        }
        // Its client may ask again.
        Answer::Whole if may_return => handle.detach().ended().await.map(result_response),
        Answer::Whole => handle.answer().await.map(result_response),
    }
}

fn later_response(number: &str) -> Response {
    let mut response = json_response(&json!({ "run": number }));
    *response.status_mut() = StatusCode::ACCEPTED;
    let place = HeaderValue::from_str(&format!("/v1/runs/{number}"));
    response.headers_mut().extend(place.ok().map(|place| (header::LOCATION, place)));
    response
}

pub fn result_response(result: Bytes) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], result).into_response()
}

fn event_response(events: EventStream, format: Format) -> Response {
    let parts = futures_util::stream::unfold(events, |mut events| async move {
        let parts = events.next().await?;
        Some((parts, events))
    });
    stream_response(Body::from_stream(parts.flat_map(in_order)), format)
}

fn in_order(parts: Vec<Bytes>) -> impl Stream<Item = Result<Bytes, Infallible>> {
    futures_util::stream::iter(parts.into_iter().map(Ok))
}

/// A body that has events.
pub fn stream_response(body: Body, format: Format) -> Response {
    let kind = match format {
        Format::Lines => "application/x-ndjson",
        Format::EventStream => "text/event-stream",
    };
    // A proxy before this that keeps parts back would make a stream useless.
    ([(header::CONTENT_TYPE, kind), (header::HeaderName::from_static("x-accel-buffering"), "no")], body).into_response()
}

/// How a client wants its answer.
#[derive(Clone, Copy)]
enum Answer {
    /// The result.
    Whole,
    /// Events as they come.
    Stream(Format),
    /// A place to ask later.
    Later,
}

impl Answer {
    fn of(headers: &HeaderMap) -> Result<Self, Problem> {
        let later = headers
            .get_all("prefer")
            .iter()
            .filter_map(|value| value.to_str().ok())
            .any(|value| value.split(',').any(|wish| wish.trim().eq_ignore_ascii_case("respond-async")));
        match (format_of(headers), later) {
            (Some(_), true) => {
                let detail = "`Prefer: respond-async` gives no stream; leave it out, or read the run's events from its place";
                Err(Problem::new(StatusCode::BAD_REQUEST, "bad_http", detail))
            }
            (Some(format), false) => Ok(Answer::Stream(format)),
            (None, true) => Ok(Answer::Later),
            (None, false) => Ok(Answer::Whole),
        }
    }

    /// How long the log is kept after the run.
    fn keep(self) -> Duration {
        match self {
            Answer::Whole => Duration::ZERO,
            Answer::Stream(_) => KEEP_STREAM,
            Answer::Later => KEEP_LATER,
        }
    }
}

/// The kind of stream that `Accept` names, if it names one.
pub fn format_of(headers: &HeaderMap) -> Option<Format> {
    let accepted = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    accepted.flat_map(|value| value.split(',')).find_map(|kind| match kind.split(';').next().unwrap_or_default().trim() {
        "application/x-ndjson" => Some(Format::Lines),
        "text/event-stream" => Some(Format::EventStream),
        _ => None,
    })
}

/// The `Idempotency-Key` of a request, with or without the quotes of a structured field.
fn idempotency_key(headers: &HeaderMap) -> Result<Option<String>, Problem> {
    let Some(value) = headers.get("idempotency-key") else { return Ok(None) };
    let text = value.to_str().ok().map(|text| text.strip_prefix('"').and_then(|text| text.strip_suffix('"')).unwrap_or(text));
    match text {
        Some(text) if (1..=255).contains(&text.len()) => Ok(Some(text.to_owned())),
        _ => Err(Problem::new(StatusCode::BAD_REQUEST, "bad_http", "`Idempotency-Key` has 1 to 255 printable ASCII characters")),
    }
}

fn hash_of(policy: &str, request: &[u8]) -> RequestHash {
    Sha256::new().chain_update(policy).chain_update([0]).chain_update(request).finalize().into()
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct EventsQuery {
    after: Option<u64>,
}

async fn run_events(
    State(front): Shared,
    KeyFor { key, .. }: KeyFor<ToRun>,
    Path(number): Path<String>,
    query: Result<Query<EventsQuery>, QueryRejection>,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    let query = query.map_err(|error| bad_query(format!("the query may have `after`, the `seq` of an event: {error}")))?;
    let last = headers.get("last-event-id").and_then(|value| value.to_str().ok()).map(str::parse).transpose();
    let last = last.map_err(|_| bad_query("`Last-Event-ID` is no `seq` of an event".to_owned()))?;
    // A browser that comes back asks by the same URL.
    let after = last.or(query.0.after).unwrap_or(0);
    let format = format_of(&headers).unwrap_or(Format::Lines);
    let log = front.log(&number, &key.id).ok_or_else(no_such_run)?;
    let events = EventStream::new(Arc::clone(&front), number, log, after, format);
    events.map(|events| event_response(events, format)).ok_or_else(events_gone)
}

fn events_gone() -> Problem {
    let detail = "the events after this one are gone; ask for the run without `after`";
    Problem::new(StatusCode::GONE, "events_gone", detail)
}

pub fn bad_query(detail: String) -> Problem {
    Problem::new(StatusCode::BAD_REQUEST, "bad_http", detail)
}

/// How long a request may wait: as long as all may, or less.
fn wait_of(settings: &Settings, asked: Option<&str>) -> Result<Duration, Problem> {
    let most = settings.capacity.queue_ms;
    let Some(asked) = asked else { return Ok(Duration::from_millis(most)) };
    match LimitKey::Wall.parse_text(asked) {
        Ok(Some(wait)) if wait <= most => Ok(Duration::from_millis(wait)),
        _ => Err(bad_query(format!("`queue` is a duration such as `10s`, and at most {most}ms here (`[capacity] queue`)"))),
    }
}

/// The policy that a request asks for.
pub fn policy_of(key: &Key, asked: Option<String>) -> Result<String, Problem> {
    let Some(asked) = asked else { return Ok(key.policies.first().cloned().unwrap_or_default()) };
    if key.policies.contains(&asked) {
        return Ok(asked);
    }
    let detail = format!("key {} may use {}; an administrator adds others to its `policies` in keys.toml", key.id, key.policies.join(", "));
    Err(Problem::new(StatusCode::FORBIDDEN, "policy_not_granted", detail))
}

/// A form in a page of another site can send some types without being asked (CSRF).
pub fn check_type(headers: &HeaderMap, wanted: &str) -> Result<(), Problem> {
    let value = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let kind = value.split(';').next().unwrap_or_default().trim();
    if kind.eq_ignore_ascii_case(wanted) {
        return Ok(());
    }
    Err(Problem::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "bad_type", format!("send the request as `Content-Type: {wanted}`")))
}

/// The parts of a body that comes in its time and is not too long.
pub struct BodyReader {
    body: Body,
    /// Bytes that may still come.
    left: u64,
    most: u64,
}

impl BodyReader {
    /// Of a body that may have so many bytes.
    pub fn new(body: Body, most: u64) -> Self {
        BodyReader { body, left: most, most }
    }

    /// The same body, however long.
    pub fn without_limit(self) -> Self {
        BodyReader { left: u64::MAX, ..self }
    }

    /// The next part; none at the end. Nothing is lost where this is dropped before it is ready.
    pub async fn next(&mut self) -> Result<Option<Bytes>, Problem> {
        let frame = tokio::time::timeout(PART, self.body.frame()).await;
        let late = |_| Problem::new(StatusCode::REQUEST_TIMEOUT, "body_timeout", "the request's body does not go on; send it at once");
        let Some(frame) = frame.map_err(late)? else { return Ok(None) };
        let frame =
            frame.map_err(|error| Problem::new(StatusCode::BAD_REQUEST, "bad_http", format!("the request's body broke off: {error}")))?;
        let part: Bytes = frame.into_data().unwrap_or_default();
        let too_large =
            || Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", format!("the request has more than {} bytes", self.most));
        self.left = self.left.checked_sub(part.len() as u64).ok_or_else(too_large)?;
        Ok(Some(part))
    }
}

/// Reads a whole body.
pub async fn read(body: Body, most: u64, buffer: &mut Buffer) -> Result<Vec<u8>, Problem> {
    let (mut body, mut bytes) = (BodyReader::new(body, most), Vec::new());
    while let Some(part) = body.next().await? {
        buffer.grow(part.len())?;
        bytes.extend_from_slice(&part);
    }
    Ok(bytes)
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Asked {
    #[serde(deserialize_with = "first_fields")]
    limits: BTreeMap<String, LimitValue>,
    #[serde(deserialize_with = "first_fields")]
    compile_limits: BTreeMap<String, LimitValue>,
    language: Option<String>,
    id: Option<String>,
    #[serde(deserialize_with = "first_fields")]
    labels: BTreeMap<String, String>,
}

/// The first fields of an object; those behind them take no memory. There are fewer limits than that, and
/// fewer labels are shown.
fn first_fields<'de, T: Deserialize<'de>, D: Deserializer<'de>>(from: D) -> Result<BTreeMap<String, T>, D::Error> {
    struct First<T>(BTreeMap<String, T>);

    impl<'de, T: Deserialize<'de>> Visitor<'de> for First<T> {
        type Value = BTreeMap<String, T>;

        fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
            out.write_str("an object")
        }

        fn visit_map<A: MapAccess<'de>>(mut self, mut fields: A) -> Result<Self::Value, A::Error> {
            while self.0.len() < FIRST_FIELDS {
                let Some((name, value)) = fields.next_entry()? else { return Ok(self.0) };
                self.0.insert(name, value);
            }
            while fields.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
            Ok(self.0)
        }
    }

    from.deserialize_map(First(BTreeMap::new()))
}

/// What a request asks for, as far as the queue must know it, and what it says of itself. The worker judges
/// the request.
pub fn read_request(body: &[u8]) -> Result<(AskedSize, About), Problem> {
    let bad = |error: serde_json::Error| {
        Problem::new(StatusCode::BAD_REQUEST, "bad_json", format!("the request is no JSON object with `code`: {error}"))
    };
    let Asked { limits, compile_limits, language, id, labels } = serde_json::from_slice(body).map_err(bad)?;
    let asked = |limits: &BTreeMap<String, LimitValue>| {
        let of = |key: LimitKey| limits.get(key.name()).and_then(|value| key.parse(value).ok());
        AskedLimits { cpus: of(LimitKey::Cpus), memory: of(LimitKey::Memory) }
    };
    let about = About::of(language.as_deref(), id.as_deref(), labels);
    let size = AskedSize {
        program: asked(&limits),
        compiler: asked(&compile_limits),
        language: language.filter(|name| name.len() <= MAX_LANGUAGE).unwrap_or_default(),
    };
    Ok((size, about))
}

pub fn new_number() -> Result<String, Problem> {
    let mut bytes = [0; NUMBER];
    let failed =
        |error: rustix::io::Errno| Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "sandbox_error", format!("no random number: {error}"));
    rustix::rand::getrandom(&mut bytes[..], rustix::rand::GetRandomFlags::empty()).map_err(failed)?;
    Ok(stockade_protocol::text::hex(&bytes))
}

/// A run as JSON, for clients that may see it.
pub fn show(number: &String, run: &crate::front::Run) -> serde_json::Value {
    let ms = |since: std::time::Instant| since.elapsed().as_millis() as u64;
    let state = if run.began.is_some() { "running" } else { "waiting" };
    let queued = run.began.map_or_else(|| ms(run.came), |began| began.duration_since(run.came).as_millis() as u64);
    json!({
        "run": number,
        "state": state,
        "key": run.key,
        "policy": run.policy,
        "language": run.about.language,
        "id": run.about.id,
        "labels": run.about.labels,
        "queued_ms": queued,
        "running_ms": run.began.map(ms),
        "cpus": run.size.cpus as f64 / 1000.0,
        "memory_bytes": run.size.memory,
    })
}

/// The runs that a key may see: its own, or with `watch` all.
fn visible(key: &Key) -> impl Fn(&crate::front::Run) -> bool {
    let (id, all) = (key.id.clone(), key.scopes.contains(&Scope::Watch));
    move |run| all || run.key == id
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RunsQuery {
    state: Option<RunState>,
}

/// How far a run is that has not ended.
#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum RunState {
    Waiting,
    Running,
}

async fn list_runs(
    State(front): Shared,
    KeyFor { key, .. }: KeyFor<Any>,
    query: Result<Query<RunsQuery>, QueryRejection>,
) -> Result<Response, Problem> {
    let query = query.map_err(|error| bad_query(format!("the query may have `state`, which is `waiting` or `running`: {error}")))?;
    let (visible, wanted) = (visible(&key), query.0.state);
    let is_wanted = |run: &crate::front::Run| wanted.is_none_or(|state| (state == RunState::Running) == run.began.is_some());
    let (runs, truncated) = front.runs(|run| visible(run) && is_wanted(run)).await;
    buffered_json(&front, &key.id, &json!({ "runs": runs, "truncated": truncated }))
}

async fn one_run(State(front): Shared, KeyFor { key, .. }: KeyFor<Any>, Path(number): Path<String>) -> Result<Response, Problem> {
    if let Some(run) = front.one_run(&number, visible(&key)) {
        return buffered_json(&front, &key.id, &run);
    }
    // One that has ended is kept for its own key alone.
    let log = front.log(&number, &key.id).ok_or_else(no_such_run)?;
    match log.ending().ok_or_else(no_such_run)? {
        Ok(result) => {
            // Those that ask at the same time have the result in memory once.
            let begin = Bytes::from(format!("{{\"run\":\"{number}\",\"state\":\"ended\",\"result\":"));
            let parts = vec![begin, result.slice(..result.trim_ascii_end().len()), Bytes::from_static(b"}\n")];
            let length: usize = parts.iter().map(Bytes::len).sum();
            let fields = [(header::CONTENT_TYPE, HeaderValue::from_static("application/json")), (header::CONTENT_LENGTH, length.into())];
            Ok((fields, Body::from_stream(in_order(parts))).into_response())
        }
        Err(problem) => buffered_json(&front, &key.id, &json!({ "run": number, "state": "ended", "problem": problem.to_json() })),
    }
}

async fn cancel_run(State(front): Shared, KeyFor { key, .. }: KeyFor<ToRun>, Path(number): Path<String>) -> Result<StatusCode, Problem> {
    let cancelled = front.cancel(&number, |run| run.key == key.id);
    if cancelled { Ok(StatusCode::ACCEPTED) } else { Err(no_such_run()) }
}

fn no_such_run() -> Problem {
    Problem::new(StatusCode::NOT_FOUND, "no_such_run", "no run of this key that waits or runs has this number")
}

async fn limits(State(front): Shared, KeyFor { key, .. }: KeyFor<Any>) -> Response {
    let (running, waiting) = front.of_key(&key.id);
    json_response(&json!({
        "key": key.id,
        "running": { "now": running, "most": key.running },
        "waiting": { "now": waiting, "most": key.waiting },
        "runs_per_minute": key.runs_per_minute,
        "cpu_per_hour_ms": key.cpu_per_hour,
        "sessions": { "now": front.sessions.count_of(&key.id), "most": key.sessions },
        "scopes": key.scopes,
    }))
}

/// An answer that may be large: it counts as buffered until its last byte was written.
///
/// # Errors
/// There is no room for it.
pub fn buffered_json(front: &Front, key: &str, value: &serde_json::Value) -> Result<Response, Problem> {
    front.buffered(key, (value.to_string() + "\n").into_bytes(), false).map(result_response)
}

/// An answer of at most some KiB, which counts nowhere.
pub fn json_response(value: &serde_json::Value) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], value.to_string() + "\n").into_response()
}

/// Over the UNIX socket, whose peers the kernel has let in, no key is needed.
async fn show_metrics(
    State(front): Shared,
    Extension(peer): Extension<Peer>,
    headers: HeaderMap,
    key: Result<KeyFor<ToWatch>, Problem>,
) -> Result<Response, Problem> {
    if peer.kind == ListenerKind::Tcp || headers.contains_key(header::AUTHORIZATION) {
        key?;
    }
    Ok(([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], front.metrics.text(front.now())).into_response())
}

/// The description of all endpoints.
pub const OPENAPI: &str = include_str!("openapi.json");

async fn openapi() -> Response {
    ([(header::CONTENT_TYPE, "application/json")], OPENAPI).into_response()
}

async fn live() -> Response {
    json_response(&json!({ "live": true }))
}

/// What the host lacks is for those who may know its policies: local users and keys.
async fn ready(State(front): Shared, Extension(peer): Extension<Peer>, key: Result<KeyFor<Any>, Problem>) -> Response {
    let settings = front.settings();
    let is_ready = !front.is_draining() && !settings.lacks.iter().any(|lack| lack.prevents);
    let mut answer = json!({ "live": true, "ready": is_ready });
    if peer.kind == ListenerKind::Unix || key.is_ok() {
        answer["lacks"] = settings.lacks.iter().map(ToString::to_string).collect();
    }
    let mut response = json_response(&answer);
    if !is_ready {
        *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    }
    response
}
