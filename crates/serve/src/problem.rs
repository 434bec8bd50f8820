//! Answers to what could not be run: problems as RFC 9457 has them.
//!
//! Each has a reason that programs may look at, and a detail for people that says what to do.

use axum::{
    body::Body,
    http::{HeaderValue, Response, StatusCode, header},
    response::IntoResponse,
};
use serde_json::{Value, json};

/// Reasons for which a policy that requires the audit log gives no result.
const UNRECORDED: [&str; 5] = ["audit_nowhere", "audit_unwritable", "audit_untrusted", "audit_locked", "audit_corrupted"];
/// Seconds after which a log may be there again that was not: somebody has to make room for it.
const UNTIL_RECORDED: u64 = 10;

/// The reason of a problem that is not counted yet, beside its answer.
#[derive(Clone, Copy, Debug)]
pub struct Uncounted(pub &'static str);

/// Why a request was not run.
#[derive(Clone, Debug)]
pub struct Problem {
    /// The status.
    pub status: StatusCode,
    /// For programs.
    pub reason: &'static str,
    /// For people.
    pub detail: String,
    /// Seconds after which it may be tried again.
    pub retry_after: Option<u64>,
    /// Whether code may have run.
    pub started: bool,
    /// The metrics have it.
    pub counted: bool,
}

impl Problem {
    /// One before anything was begun.
    pub fn new(status: StatusCode, reason: &'static str, detail: impl Into<String>) -> Self {
        Problem { status, reason, detail: detail.into(), retry_after: None, started: false, counted: false }
    }

    /// The same, to be tried again after so many seconds.
    pub fn after(self, seconds: u64) -> Self {
        Problem { retry_after: Some(seconds.max(1)), ..self }
    }

    /// Of a refusal for this reason of the launcher's: the audit log lacks what the policy requires to stand
    /// in it. None: it was refused for another.
    pub fn unrecorded(reason: &str, why: &str) -> Option<Self> {
        let detail = || format!("{why} ({reason}); an administrator has to mend the audit log");
        let is_it = UNRECORDED.contains(&reason);
        is_it.then(|| Problem::new(StatusCode::SERVICE_UNAVAILABLE, "audit_unavailable", detail()).after(UNTIL_RECORDED))
    }
}

impl Problem {
    /// The object of RFC 9457.
    pub fn to_json(&self) -> Value {
        json!({
            "type": format!("urn:stockade:{}", self.reason),
            "title": self.status.canonical_reason(),
            "status": self.status.as_u16(),
            "detail": self.detail,
            "reason": self.reason,
            "started": self.started,
        })
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response<Body> {
        let mut response = Response::new(Body::from(self.to_json().to_string()));
        *response.status_mut() = self.status;
        if !self.counted {
            response.extensions_mut().insert(Uncounted(self.reason));
        }
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        if let Some(seconds) = self.retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer, Basic realm=\"stockade\""));
        }
        response
    }
}
