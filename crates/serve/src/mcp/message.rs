//! What is looked at of a message of the Model Context Protocol before the SDK reads it.
//!
//! The SDK makes values of all of a message, and sends some of its texts back. So sizes are looked at first,
//! and nothing of the message is kept but a few short texts. Whether it is a message of the protocol is for
//! the SDK to say.

use serde::Deserialize;
use serde_json::{Value, value::RawValue};

/// The most values in a message.
const MAX_VALUES: usize = 10_000;
/// Bytes that a value may take in memory beside its text, in all forms that the SDK makes of it.
const OF_VALUE: usize = 1 << 10;
/// The most bytes of a text that the SDK sends back.
const MAX_TEXT: usize = 1 << 10;
/// The most bytes of a message that calls no tool.
const MAX_WITHOUT_CALL: usize = 64 << 10;

/// A message that is small enough for the SDK.
pub struct Message {
    /// What it asks for.
    pub method: Option<String>,
    /// By which it is answered.
    pub id: Option<Value>,
    /// The message that it cancels.
    pub cancels: Option<Value>,
    /// Whether it is of a version of the protocol that has no sessions. The SDK refuses those, and says which
    /// there are.
    pub is_without_session: bool,
    /// Bytes that it takes while the SDK has it, beside those of the body.
    pub memory: usize,
}

/// The texts of a message that come back, as they are written.
#[derive(Deserialize)]
struct Texts<'a> {
    #[serde(borrow)]
    method: Option<&'a RawValue>,
    #[serde(borrow)]
    id: Option<&'a RawValue>,
    #[serde(borrow, default)]
    params: Params<'a>,
}

#[derive(Default, Deserialize)]
struct Params<'a> {
    /// Of `notifications/cancelled`.
    #[serde(borrow, rename = "requestId")]
    request_id: Option<&'a RawValue>,
    #[serde(borrow, rename = "_meta", default)]
    meta: Meta<'a>,
}

#[derive(Default, Deserialize)]
struct Meta<'a> {
    #[serde(borrow, rename = "progressToken")]
    progress_token: Option<&'a RawValue>,
    #[serde(borrow, rename = "io.modelcontextprotocol/protocolVersion")]
    version: Option<&'a RawValue>,
}

impl Message {
    /// Looks at the message of a body.
    ///
    /// # Errors
    /// It is no JSON object of a message, or one of its sizes is too large.
    pub fn read(body: &[u8]) -> Result<Self, String> {
        let values = count_values(body);
        if values > MAX_VALUES {
            return Err(format!("it has more than {MAX_VALUES} values; send long data as one text"));
        }
        let Texts { method, id, params: Params { request_id, meta } } = serde_json::from_slice(body).map_err(|error| error.to_string())?;
        for (name, text) in [
            ("id", id),
            ("method", method),
            ("params.requestId", request_id),
            ("params._meta.progressToken", meta.progress_token),
            ("params._meta.io.modelcontextprotocol/protocolVersion", meta.version),
        ] {
            let length = text.map_or(0, |text| text.get().len());
            if length > MAX_TEXT {
                return Err(format!("`{name}` has {length} bytes, and may have {MAX_TEXT}; send a shorter one"));
            }
        }
        let method: Option<String> = read(method)?;
        if method.as_deref() != Some("tools/call") && body.len() > MAX_WITHOUT_CALL {
            return Err(format!("it has {} bytes, and one that calls no tool may have {MAX_WITHOUT_CALL}", body.len()));
        }
        let is_without_session = method.as_deref() == Some("server/discover") || meta.version.is_some();
        let memory = body.len() + values * OF_VALUE;
        Ok(Message { method, id: read(id)?, cancels: read(request_id)?, is_without_session, memory })
    }
}

fn read<'a, T: Deserialize<'a>>(text: Option<&'a RawValue>) -> Result<Option<T>, String> {
    text.map(|text| serde_json::from_str(text.get())).transpose().map_err(|error| error.to_string())
}

/// No less than the values in a JSON text: one before each comma, and one in each list or object.
fn count_values(text: &[u8]) -> usize {
    let (mut values, mut is_in_text, mut is_escaped) = (1, false, false);
    for byte in text {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = is_in_text,
            b'"' => is_in_text = !is_in_text,
            b',' | b'[' | b'{' if !is_in_text => values += 1,
            _ => {}
        }
    }
    values
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use serde_json::json;

    use super::*;

    fn call(arguments: &Value) -> Value {
        json!({ "jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": { "name": "write_file", "arguments": arguments } })
    }

    /// A call with this in it.
    fn with(path: &str, value: Value) -> Vec<u8> {
        let (parent, name) = path.rsplit_once('/').unwrap();
        let mut message = call(&json!({}));
        message["params"]["_meta"] = json!({});
        message.pointer_mut(parent).unwrap()[name] = value;
        message.to_string().into_bytes()
    }

    #[test]
    fn texts_that_come_back_are_short() {
        for path in ["/id", "/method", "/params/requestId", "/params/_meta/progressToken"] {
            let long = |length: usize| Message::read(&with(path, json!("x".repeat(length))));
            // With its quotation marks.
            assert!(long(MAX_TEXT - 2).is_ok(), "{path}");
            let why = long(MAX_TEXT - 1).err().unwrap();
            let name = path.trim_start_matches('/').replace('/', ".");
            assert_eq!(why, format!("`{name}` has 1025 bytes, and may have 1024; send a shorter one"));
        }
        let version = |length: usize| {
            let meta = json!({ "io.modelcontextprotocol/protocolVersion": "x".repeat(length) });
            Message::read(&with("/params/_meta", meta)).map(|message| message.is_without_session)
        };
        assert!(version(10).unwrap());
        assert!(version(MAX_TEXT).err().unwrap().contains("protocolVersion` has 1026 bytes"));
    }

    #[test]
    fn values_are_counted_outside_of_texts() {
        for (text, count) in [("7", 1), ("[]", 2), ("[1, [2], {\"a\": 3}]", 6), (r#"["[{,\"[{,", "\\", 1]"#, 4)] {
            assert_eq!(count_values(text.as_bytes()), count, "{text}");
        }
        let base = count_values(call(&json!([])).to_string().as_bytes());
        let list = |length: usize| Message::read(call(&json!(vec![0; length])).to_string().as_bytes());
        let most = list(MAX_VALUES - base + 1).unwrap();
        assert!(most.memory > MAX_VALUES * OF_VALUE);
        assert!(list(MAX_VALUES - base + 2).err().unwrap().contains("more than 10000 values"));
        // Text of the same size and more is one value.
        let text = call(&json!({ "text": "[0,".repeat(MAX_VALUES) })).to_string();
        assert!(Message::read(text.as_bytes()).unwrap().memory < text.len() + 20 * OF_VALUE);
    }

    #[test]
    fn a_message_that_calls_no_tool_is_short() {
        let message = |method: &str, length: usize| {
            let message = json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": { "a": "x".repeat(length) } });
            Message::read(message.to_string().as_bytes())
        };
        assert!(message("tools/call", MAX_WITHOUT_CALL).is_ok() && message("ping", MAX_WITHOUT_CALL / 2).is_ok());
        assert!(message("ping", MAX_WITHOUT_CALL).err().unwrap().contains("calls no tool may have 65536"));
    }
}
