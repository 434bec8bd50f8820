//! `stockade approve`: what waits for somebody's approval, for a person to read, and their yes.
//!
//! What another wants run is hostile text: every line of it stands behind a number, and
//! whatever cannot be seen is escaped. Who may approve is not decided here.

use std::process::ExitCode;

use serde_json::{Value, json};
use stockade_policy::visible::visible_json;
use stockade_runtime::{
    Refusal,
    approval::{self, Waiting},
    screen::sentence,
};

use crate::{
    args,
    output::{say, say_json},
    refuse,
};

pub(crate) fn run(asked: &args::Approve) -> anyhow::Result<ExitCode> {
    let waiting = if asked.yes { approval::approve(&asked.token) } else { approval::look(&asked.token) };
    match waiting {
        Ok(waiting) if asked.json => say_json(&as_json(&waiting)?)?,
        Ok(waiting) => say(&in_words(&waiting, &asked.token)?)?,
        Err(refusal) => return Ok(refuse(&refusal)),
    }
    Ok(ExitCode::SUCCESS)
}

fn as_json(waiting: &Waiting) -> anyhow::Result<Value> {
    let Waiting { requester, seconds_left, approver, shown } = waiting;
    let mut whole = json!({ "schema": 1, "requester": requester, "seconds_left": seconds_left, "approver": approver, "shown": shown });
    whole["shown"]["request"] = serde_json::from_str(&shown.request)?;
    Ok(whole)
}

fn in_words(waiting: &Waiting, token: &str) -> anyhow::Result<String> {
    let Waiting { requester, seconds_left, approver, shown } = waiting;
    let scratch = shown.scratch.as_ref().map_or_else(|| String::from("a private scratch"), |path| format!("the scratch {path:?}"));
    let mut out = format!("uid {requester} wants this run under `{}`, in {scratch}:\n", shown.policy);
    let mut rest: Value = serde_json::from_str(&shown.request)?;
    for (index, line) in rest["code"].as_str().unwrap_or_default().split('\n').enumerate() {
        out.push_str(&format!("{:5} | {line}\n", index + 1));
    }
    if let Some(fields) = rest.as_object_mut() {
        let said = |value: &Value| !matches!(value, Value::Null) && *value != json!([]) && *value != json!({});
        fields.retain(|name, value| name != "code" && said(value));
    }
    out.push_str(&format!("with {}\nwhat screening found in it:\n", visible_json(&serde_json::to_string_pretty(&rest)?)));
    for finding in &shown.findings {
        out.push_str(&format!("  {}: {}\n", finding.action.name(), sentence(finding)));
    }
    out.push_str(&match approver {
        Some(uid) => format!("approved by uid {uid}; it can be run once, within {seconds_left} s"),
        None => format!("not approved; `stockade approve --yes {token}` approves it, within {seconds_left} s"),
    });
    Ok(out)
}

/// A request with a token that the command line names: the same as if it stood in it, so
/// that one which stands there already is refused as a second.
///
/// # Errors
/// The token is none.
pub(crate) fn into_request(request: Vec<u8>, token: &str) -> Result<Vec<u8>, Refusal> {
    let token = approval::check_token(token)?;
    let Some(start) = request.iter().position(|byte| !byte.is_ascii_whitespace()).filter(|at| request[*at] == b'{') else {
        // Whatever it is, it is refused for that.
        return Ok(request);
    };
    let (before, rest) = request.split_at(start + 1);
    let more = rest.iter().find(|byte| !byte.is_ascii_whitespace()).is_some_and(|byte| *byte != b'}');
    let member = format!("\"approve\":\"{token}\"{}", if more { "," } else { "" });
    Ok([before, member.as_bytes(), rest].concat())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use super::*;

    #[test]
    fn a_token_becomes_a_member_of_whatever_object_there_is() {
        let token = "0123456789abcdef0123456789abcdef";
        let spliced = |request: &str| String::from_utf8(into_request(request.into(), token).unwrap()).unwrap();
        for request in ["{}", " {\"code\":\"1\"}", "{ \n}", "{\"approve\":\"x\"}"] {
            let whole = spliced(request);
            assert!(whole.trim_start().starts_with(&format!("{{\"approve\":\"{token}\"")), "{whole}");
            serde_json::from_str::<Value>(&whole).unwrap();
        }
        assert_eq!(spliced("[1]"), "[1]");
        assert_eq!(spliced(""), "");
        for wrong in ["", "x", "\",\"code\":\"", "0123456789ABCDEF0123456789ABCDEF"] {
            assert!(into_request(b"{}".to_vec(), wrong).is_err(), "{wrong}");
        }
    }
}
