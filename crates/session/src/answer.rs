//! The lines that answer.

use base64::{Engine, prelude::BASE64_STANDARD};
use serde::Serialize;
use stockade_launcher::files::{Listed, Part};
use stockade_protocol::{
    Encoding, Report, Verdict,
    session::{List, Read},
};
use stockade_runtime::{Refusal, session::Session};

use crate::line::Malformed;

/// The result of a request.
#[derive(Serialize)]
pub(crate) struct Ran<'a> {
    op: &'static str,
    #[serde(flatten)]
    report: &'a Report,
}

impl<'a> Ran<'a> {
    pub(crate) fn new(report: &'a Report) -> Self {
        Ran { op: "run", report }
    }
}

/// What was done, with what there is to say of it.
#[derive(Serialize)]
pub(crate) struct Done<'a, T> {
    op: &'static str,
    ok: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a str>,
    #[serde(flatten)]
    more: T,
}

impl<'a, T> Done<'a, T> {
    pub(crate) fn new(op: &'static str, id: Option<&'a String>, more: T) -> Self {
        Done { op, ok: true, id: id.map(String::as_str), more }
    }
}

/// Nothing more to say.
#[derive(Serialize)]
pub(crate) struct Nothing {}

/// Of a request to cancel.
#[derive(Serialize)]
pub(crate) struct Cancelled {
    pub(crate) cancelled: bool,
}

/// Of a file that was written.
#[derive(Serialize)]
pub(crate) struct Written<'a> {
    pub(crate) path: &'a str,
    pub(crate) size: u64,
}

/// The first line.
#[derive(Serialize)]
pub(crate) struct Ready<'a> {
    schema: u32,
    version: &'static str,
    policy: &'a str,
    scratch: String,
    host_scratch: bool,
    home: String,
}

impl<'a> Ready<'a> {
    pub(crate) fn of(session: &'a Session) -> Self {
        let plan = session.plan();
        Ready {
            schema: 1,
            version: env!("CARGO_PKG_VERSION"),
            policy: &plan.policy,
            scratch: plan.scratch.path.display().to_string(),
            host_scratch: plan.scratch.host,
            home: session.home().display().to_string(),
        }
    }
}

/// Of a file that was read.
#[derive(Serialize)]
pub(crate) struct Found<'a> {
    path: &'a str,
    size: u64,
    offset: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    base64: Option<String>,
}

impl<'a> Found<'a> {
    pub(crate) fn new(asked: &'a Read, part: Part) -> Self {
        let bytes = match asked.encoding {
            Encoding::Text => String::from_utf8(part.bytes).map_err(std::string::FromUtf8Error::into_bytes),
            Encoding::Base64 => Err(part.bytes),
        };
        let (text, base64) = match bytes {
            Ok(text) => (Some(text), None),
            Err(bytes) => (None, Some(BASE64_STANDARD.encode(bytes))),
        };
        Found { path: &asked.path, size: part.size, offset: asked.offset, text, base64 }
    }
}

#[derive(Serialize)]
struct Entry {
    path: String,
    /// The name is no UTF-8: `path` is not quite it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    lossy: bool,
    kind: &'static str,
    size: u64,
}

/// Of a directory.
#[derive(Serialize)]
pub(crate) struct Listing<'a> {
    path: &'a str,
    entries: Vec<Entry>,
    truncated: bool,
}

impl<'a> Listing<'a> {
    pub(crate) fn new(asked: &'a List, (entries, truncated): (Vec<Listed>, bool)) -> Self {
        let entries = entries
            .into_iter()
            .map(|Listed { path, kind, size }| {
                let lossy = path.to_str().is_none();
                Entry { path: path.to_string_lossy().into_owned(), lossy, kind, size }
            })
            .collect();
        Listing { path: &asked.path, entries, truncated }
    }
}

/// What was not done, and why.
#[derive(Serialize)]
pub(crate) struct Failed<'a> {
    op: Option<&'static str>,
    ok: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a str>,
    verdict: Verdict,
    reason: &'a str,
    error: &'a str,
}

impl<'a> Failed<'a> {
    pub(crate) fn new(op: &'static str, id: Option<&'a String>, refusal: &'a Refusal) -> Self {
        let Refusal { verdict, reason, message, .. } = refusal;
        Failed { op: Some(op), ok: false, id: id.map(String::as_str), verdict: *verdict, reason, error: message }
    }
}

impl<'a> From<&'a Malformed> for Failed<'a> {
    fn from(wrong: &'a Malformed) -> Self {
        let Malformed { op, id, reason, error } = wrong;
        Failed { op: *op, ok: false, id: id.as_deref(), verdict: Verdict::BadRequest, reason, error }
    }
}
