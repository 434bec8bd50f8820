//! The JSON of each answer. Nothing is decided here, and no wording is made.

use base64::{Engine, prelude::BASE64_STANDARD};
use serde::Serialize;
use stockade_engine::{
    Refusal,
    session::{Listed, Part, Session},
};
use stockade_protocol::{
    Encoding, Report, Verdict,
    session::{DirectoryEntry, DirectoryListing, FilePart, List, Read},
};

/// The result of a request.
#[derive(Serialize)]
pub(crate) struct RunAnswer<'a> {
    op: &'static str,
    #[serde(flatten)]
    report: &'a Report,
}

impl<'a> RunAnswer<'a> {
    pub(crate) fn new(report: &'a Report) -> Self {
        RunAnswer { op: "run", report }
    }
}

/// An operation that succeeded, with its fields.
#[derive(Serialize)]
pub(crate) struct OkAnswer<'a, T> {
    op: &'static str,
    ok: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a str>,
    #[serde(flatten)]
    fields: T,
}

impl<'a, T> OkAnswer<'a, T> {
    pub(crate) fn new(op: &'static str, id: Option<&'a String>, fields: T) -> Self {
        OkAnswer { op, ok: true, id: id.map(String::as_str), fields }
    }
}

/// No further fields.
#[derive(Serialize)]
pub(crate) struct NoFields {}

/// Answers `cancel`.
#[derive(Serialize)]
pub(crate) struct CancelAnswer {
    pub(crate) cancelled: bool,
}

/// The first line.
#[derive(Serialize)]
pub(crate) struct ReadyAnswer<'a> {
    schema: u32,
    version: &'static str,
    policy: &'a str,
    scratch: String,
    host_scratch: bool,
    home: String,
}

impl<'a> ReadyAnswer<'a> {
    pub(crate) fn of(session: &'a Session) -> Self {
        let plan = session.plan();
        ReadyAnswer {
            schema: 1,
            version: env!("CARGO_PKG_VERSION"),
            policy: &plan.policy,
            scratch: plan.scratch.path.display().to_string(),
            host_scratch: plan.scratch.host,
            home: session.home().display().to_string(),
        }
    }
}

/// The answer about a file that was read.
pub(crate) fn file_part(asked: &Read, part: Part) -> FilePart {
    let bytes = match asked.encoding {
        Encoding::Text => String::from_utf8(part.bytes).map_err(std::string::FromUtf8Error::into_bytes),
        Encoding::Base64 => Err(part.bytes),
    };
    let (text, base64) = match bytes {
        Ok(text) => (Some(text), None),
        Err(bytes) => (None, Some(BASE64_STANDARD.encode(bytes))),
    };
    FilePart { path: asked.path.clone(), size: part.size, offset: asked.offset, text, base64 }
}

/// The answer about a directory.
pub(crate) fn directory_listing(asked: &List, (entries, truncated): (Vec<Listed>, bool)) -> DirectoryListing {
    let entry = |Listed { path, kind, size }: Listed| DirectoryEntry {
        lossy: path.to_str().is_none(),
        path: path.to_string_lossy().into_owned(),
        kind: String::from(kind),
        size,
    };
    DirectoryListing { path: asked.path.clone(), entries: entries.into_iter().map(entry).collect(), truncated }
}

/// An operation that failed, and why.
#[derive(Serialize)]
pub(crate) struct ErrorAnswer<'a> {
    op: Option<&'static str>,
    ok: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a str>,
    verdict: Verdict,
    reason: &'a str,
    error: &'a str,
}

impl<'a> ErrorAnswer<'a> {
    pub(crate) fn new(op: impl Into<Option<&'static str>>, id: Option<&'a String>, refusal: &'a Refusal) -> Self {
        let Refusal { verdict, reason, message, .. } = refusal;
        ErrorAnswer { op: op.into(), ok: false, id: id.map(String::as_str), verdict: *verdict, reason, error: message }
    }
}
