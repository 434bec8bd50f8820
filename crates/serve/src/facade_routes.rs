//! The endpoints of other services: who may use them, and when they answer.
//!
//! Each is off until the configuration enables it. What a client of SandboxFusion may try again is 504
//! here, the one status after which it does. Who waits longer than a heartbeat gets the head of its answer
//! and then a blank each heartbeat, which is legal before JSON: to the client the service is alive.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    Extension,
    body::{Body, Bytes},
    extract::{Request, State},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use hyper::body::{Body as HttpBody, Frame};
use stockade_protocol::service::{Key, Scope};
use stockade_serve::facade::{Invalid, execute as execute_facade, sandbox_fusion};
use tokio::time::{Interval, MissedTickBehavior};

use crate::{
    auth::{KeyFor, ToFacade, note_key},
    batch::FOR_EVER,
    front::{Front, Order, RunHandle},
    http::{Peer, Shared, check_type, new_number, policy_of, read, read_request, result_response},
    keys,
    problem::Problem,
};

const JSON: [(header::HeaderName, &str); 1] = [(header::CONTENT_TYPE, "application/json")];

/// Why there is no run.
enum Refused {
    Problem(Problem),
    Invalid(Invalid),
}

impl From<Problem> for Refused {
    fn from(problem: Problem) -> Self {
        Refused::Problem(problem)
    }
}

impl From<Invalid> for Refused {
    fn from(invalid: Invalid) -> Self {
        Refused::Invalid(invalid)
    }
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        match self {
            Refused::Problem(problem) => problem.into_response(),
            Refused::Invalid(invalid) => (StatusCode::UNPROCESSABLE_ENTITY, JSON, invalid.to_json()).into_response(),
        }
    }
}

fn off(name: &str) -> Problem {
    let detail =
        format!("the service does not offer this interface; an administrator writes `[facade.{name}] enabled = true` in serve.toml");
    Problem::new(StatusCode::NOT_FOUND, "facade_off", detail)
}

/// Lets a request in. `policy`: that of the configuration; `wait`: how long it may wait.
async fn begin(
    front: &Arc<Front>,
    key: Key,
    policy: Option<String>,
    wait: Duration,
    request: Request,
    translate: fn(&[u8]) -> Result<Vec<u8>, Invalid>,
) -> Result<RunHandle, Refused> {
    let settings = front.settings();
    let policy = policy_of(&key, policy)?;
    let (parts, body) = request.into_parts();
    check_type(&parts.headers, "application/json")?;
    let mut buffer = front.buffer(&key.id);
    let body = read(body, settings.max_body, &mut buffer).await?;
    let request = translate(&body)?;
    if request.len() as u64 > settings.max_body {
        let detail = format!("as a request of `exec` it has more than {} bytes", settings.max_body);
        return Err(Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", detail).into());
    }
    buffer.grow(request.len())?;
    buffer.shrink(body.len());
    drop(body);
    let (size, about) = read_request(&request)?;
    let (number, keep) = (new_number()?, Duration::ZERO);
    let order = Order { number, key, policy, size, about, request, buffer, wait, output: false, keep, name: None, session: None };
    Ok(front.run(order).map_err(|(problem, _)| problem)?)
}

/// `POST /run_code` of SandboxFusion.
pub async fn run_code(State(front): Shared, key: Result<KeyFor<ToFacade>, Problem>, request: Request) -> Response {
    let settings = front.settings();
    let Some(facade) = settings.facades.sandbox_fusion.clone() else { return off("sandbox_fusion").into_response() };
    let key = match key {
        Ok(KeyFor { key, .. }) => key,
        Err(problem) => return problem.into_response(),
    };
    let handle = match begin(&front, key.clone(), facade.policy, FOR_EVER, request, sandbox_fusion::request).await {
        Ok(handle) => handle,
        Err(Refused::Problem(problem)) => return to_be_tried_again(&front, problem),
        Err(invalid) => return invalid.into_response(),
    };
    let heartbeat = Duration::from_millis(facade.heartbeat_ms);
    let (own, key) = (Arc::clone(&front), key.id);
    let mut answer = Box::pin(async move { own.buffered(&key, sandbox_fusion::response(&handle.answer().await?), true) });
    tokio::select! {
        answer = &mut answer => match answer {
            Ok(response) => (JSON, response).into_response(),
            Err(problem) => to_be_tried_again(&front, problem),
        },
        () = tokio::time::sleep(heartbeat) => {
            let late = async move { answer.await.unwrap_or_else(|problem| sandbox_error(&front, problem)) };
            (JSON, Body::new(Heartbeat::new(heartbeat, Box::pin(late)))).into_response()
        }
    }
}

/// A problem as an answer, for clients that read no other.
fn sandbox_error(front: &Front, problem: Problem) -> Bytes {
    sandbox_fusion::sandbox_error(&front.metrics.problem(problem).detail).into()
}

/// A problem that passes by itself is 504; one that no other try would change is an answer.
fn to_be_tried_again(front: &Front, problem: Problem) -> Response {
    match problem.status {
        StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
            Problem { status: StatusCode::GATEWAY_TIMEOUT, ..problem }.into_response()
        }
        StatusCode::UNPROCESSABLE_ENTITY | StatusCode::CONFLICT => (JSON, sandbox_error(front, problem)).into_response(),
        _ => problem.into_response(),
    }
}

/// A body that has a blank each heartbeat until its text is there.
struct Heartbeat {
    ticks: Interval,
    text: Option<Pin<Box<dyn Future<Output = Bytes> + Send>>>,
}

impl Heartbeat {
    fn new(every: Duration, text: Pin<Box<dyn Future<Output = Bytes> + Send>>) -> Self {
        // The first blank goes at once.
        let mut ticks = tokio::time::interval(every);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Heartbeat { ticks, text: Some(text) }
    }
}

impl HttpBody for Heartbeat {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let Some(text) = &mut self.text else { return Poll::Ready(None) };
        if let Poll::Ready(text) = text.as_mut().poll(context) {
            self.text = None;
            return Poll::Ready(Some(Ok(Frame::data(text))));
        }
        self.ticks.poll_tick(context).map(|_| Some(Ok(Frame::data(Bytes::from_static(b" ")))))
    }
}

/// `POST /run_jupyter` of SandboxFusion, which needs an interpreter that goes on between cells.
pub async fn run_jupyter() -> Problem {
    let detail = "cells of a notebook are not run here; send each program whole to POST /run_code";
    Problem::new(StatusCode::NOT_FOUND, "no_kernels", detail)
}

/// `GET /v1/ping` of SandboxFusion: whether it is there, which needs no key.
pub async fn ping(State(front): Shared) -> Response {
    match front.settings().facades.sandbox_fusion {
        Some(_) => (JSON, "\"pong\"").into_response(),
        None => off("sandbox_fusion").into_response(),
    }
}

/// `POST /execute` of services that are written by hand.
pub async fn execute(State(front): Shared, Extension(peer): Extension<Peer>, request: Request) -> Response {
    execute_or_refuse(&front, peer, request).await.unwrap_or_else(IntoResponse::into_response)
}

async fn execute_or_refuse(front: &Arc<Front>, peer: Peer, request: Request) -> Result<Response, Refused> {
    let settings = front.settings();
    let facade = settings.facades.execute.clone().ok_or_else(|| off("execute"))?;
    let key = keys::find_by_field(&settings.keys, request.headers(), request.uri(), peer.uid)?;
    note_key(request.extensions());
    keys::check_scope(key, Scope::Facade)?;
    let wait = Duration::from_millis(settings.capacity.queue_ms);
    let handle = begin(front, key.clone(), facade.policy, wait, request, execute_facade::request).await?;
    Ok(handle.answer().await.map(result_response)?)
}
