//! Parses one line of the protocol strictly. Every error names the field and what is wrong.
//! Nothing is executed here.

use serde::Deserialize;
use stockade_engine::RefusalCause;
use stockade_protocol::{Verdict, session::Line};

const OPS: [&str; 8] = ["run", "write", "read", "list", "remove", "cancel", "reset", "close"];

/// A line that cannot be executed.
#[derive(Debug)]
pub(crate) struct MalformedLine {
    /// Its op, if that is known.
    pub(crate) op: Option<&'static str>,
    /// Its `id`, if it could be read.
    pub(crate) id: Option<String>,
    /// What is wrong with it.
    pub(crate) error: LineError,
}

/// What is wrong with a line.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LineError {
    #[error("the line is longer than 64 MiB; write large files in parts (`append`), or into a host scratch")]
    TooLong,
    #[error("the line is empty; send one JSON object such as {{\"op\": \"run\", \"code\": \"print(6*7)\"}}")]
    Empty,
    #[error("the line is not one JSON object: {0}")]
    NotJson(serde_json::Error),
    #[error("the line is not one JSON object: {0}")]
    NotObject(serde_json::Error),
    #[error("the line is JSON, but not one object")]
    Array,
    #[error("the line has no `op`; there are {}", OPS.join(", "))]
    OpMissing,
    #[error("there is no op {}; there are {}", .0, OPS.join(", "))]
    OpUnknown(serde_json::Value),
    #[error("{op}: not as it must be{place}: {error}")]
    Malformed { op: &'static str, place: String, error: serde_json::Error },
}

impl RefusalCause for LineError {
    fn verdict_and_reason(&self) -> (Verdict, &'static str) {
        let reason = match self {
            LineError::TooLong => "line_too_long",
            LineError::Empty => "line_empty",
            LineError::NotJson(_) => "line_not_json",
            LineError::NotObject(_) | LineError::Array | LineError::Malformed { .. } => "line_malformed",
            LineError::OpMissing => "op_missing",
            LineError::OpUnknown(_) => "op_unknown",
        };
        (Verdict::BadRequest, reason)
    }
}

impl From<LineError> for MalformedLine {
    fn from(error: LineError) -> Self {
        MalformedLine { op: None, id: None, error }
    }
}

/// The fields that are read first, to say which line is wrong.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Head {
    op: Option<serde_json::Value>,
    id: Option<serde_json::Value>,
}

/// Parses a line, without its end.
///
/// # Errors
/// The line is not JSON, or not as the protocol has it.
pub(crate) fn parse(bytes: &[u8]) -> Result<Line, MalformedLine> {
    if bytes.trim_ascii().is_empty() {
        return Err(LineError::Empty.into());
    }
    let head: Head = serde_json::from_slice(bytes)
        .map_err(|error| if error.is_syntax() || error.is_eof() { LineError::NotJson(error) } else { LineError::NotObject(error) })?;
    // serde's derived reader accepts an array, too.
    if !bytes.trim_ascii_start().starts_with(b"{") {
        return Err(LineError::Array.into());
    }
    let id = head.id.as_ref().and_then(|id| id.as_str()).map(String::from);
    let named = head.op.as_ref().and_then(|op| op.as_str());
    let Some(op) = OPS.into_iter().find(|op| Some(*op) == named) else {
        return Err(MalformedLine { op: None, id, error: head.op.map_or(LineError::OpMissing, LineError::OpUnknown) });
    };
    let mut deserializer = serde_json::Deserializer::from_slice(bytes);
    serde_path_to_error::deserialize(&mut deserializer).map_err(|error| {
        let path = error.path().to_string();
        let place = if path == "." || path == "?" { String::new() } else { format!(" at `{path}`") };
        MalformedLine { op: Some(op), id, error: LineError::Malformed { op, place, error: error.into_inner() } }
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use super::*;

    #[test]
    fn each_op_is_understood() {
        for (line, op) in [
            (r#"{"op":"run","code":"1","stdin":{"base64":"AA=="},"limits":{"wall":"1s"}}"#, "Run"),
            (r#"{"code":"1","id":"x","op":"run"}"#, "Run"),
            (r#"{"op":"write","path":"a","contents":{"base64":"AA=="},"append":true}"#, "Write"),
            (r#"{"op":"read","path":"a","offset":1,"length":2,"encoding":"base64"}"#, "Read"),
            (r#"{"op":"list"}"#, "List"),
            (r#"{"op":"remove","path":"a"}"#, "Remove"),
            (r#"{"op":"cancel","run":"x"}"#, "Cancel"),
            (r#" {"op":"reset"} "#, "Reset"),
            (r#"{"op":"close","id":"y"}"#, "Close"),
        ] {
            assert!(format!("{:?}", parse(line.as_bytes()).unwrap()).starts_with(op), "{line}");
        }
    }

    #[test]
    fn what_is_none_of_the_protocol_is_refused_with_its_reason() {
        for (line, op, id, reason) in [
            ("", None, None, "line_empty"),
            ("print(1)", None, None, "line_not_json"),
            ("{\"op\":\"run\"", None, None, "line_not_json"),
            ("{\"op\":\"close\"} x", None, None, "line_not_json"),
            ("[1]", None, None, "line_malformed"),
            ("\"\u{e9}\"", None, None, "line_malformed"),
            ("{\"code\":\"1\",\"id\":\"a\"}", None, Some("a"), "op_missing"),
            ("{\"op\":\"exec\",\"id\":\"a\"}", None, Some("a"), "op_unknown"),
            ("{\"op\":[\"run\"]}", None, None, "op_unknown"),
            ("{\"op\":\"run\",\"id\":\"a\"}", Some("run"), Some("a"), "line_malformed"),
            ("{\"op\":\"run\",\"code\":\"1\",\"cod\":2}", Some("run"), None, "line_malformed"),
            ("{\"op\":\"run\",\"code\":\"1\",\"id\":7}", Some("run"), None, "line_malformed"),
            ("{\"op\":\"read\",\"path\":\"a\",\"offset\":-1}", Some("read"), None, "line_malformed"),
            ("{\"op\":\"reset\",\"all\":true}", Some("reset"), None, "line_malformed"),
        ] {
            let wrong = parse(line.as_bytes()).unwrap_err();
            let expected = (op, id, (Verdict::BadRequest, reason));
            assert_eq!((wrong.op, wrong.id.as_deref(), wrong.error.verdict_and_reason()), expected, "{line}: {}", wrong.error);
        }
        assert_eq!(parse(b"{\"op\":\"\xff\"}").unwrap_err().error.verdict_and_reason().1, "line_not_json");
    }
}
