//! `POST /execute`: the interface that services which are written by hand usually have.
//!
//! `{"code", "language", "timeout"}` becomes a request of `exec`, whose result is the answer as it is:
//! `success`, `output` and `error` are what clients of such a service read.

use std::collections::BTreeMap;

use stockade_protocol::{LimitKey, Request};

use super::{
    Invalid,
    fields::Fields,
    sandbox_fusion::{to_json, wall},
};

/// `exec`'s request.
///
/// # Errors
/// The body is not what the service takes.
pub fn request(body: &[u8]) -> Result<Vec<u8>, Invalid> {
    let mut fields = Fields::of(body, &["code", "language", "timeout"])?;
    let (code, language, timeout) = (fields.text("code"), fields.text_or("language", "python"), fields.seconds("timeout", 30.0));
    let limits = BTreeMap::from([(LimitKey::Wall.name().to_owned(), wall(timeout))]);
    fields.check(Request { code: code.into(), language: Some(language), limits, ..Request::default() }).map(|request| to_json(&request))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn a_body_becomes_a_request_with_its_defaults() {
        let read = |body: &str| serde_json::from_slice::<Value>(&request(body.as_bytes()).unwrap()).unwrap();
        let usual = read(r#"{"code": "1", "session": "ignored"}"#);
        assert_eq!((&usual["code"], &usual["language"], &usual["limits"]), (&json!("1"), &json!("python"), &json!({"wall": "30000ms"})));
        let other = read(r#"{"code": "1", "language": "bash", "timeout": 0.0001}"#);
        assert_eq!((&other["language"], &other["limits"]), (&json!("bash"), &json!({"wall": "1ms"})));
        assert_eq!(request(b"{}").unwrap_err().0.len(), 1);
    }
}
