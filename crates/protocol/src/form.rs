//! The forms of a result: the JSON of the contract on one line or indented, its main fields, or
//! what a person or a model reads of it.
//!
//! It changes the form alone: no field is judged, and none is added. Printing is its caller's.

use alloc::{
    borrow::{Cow, ToOwned},
    format,
    string::String,
};

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::{
    ending::Ending,
    text::{escape_json, escape_line, is_hidden, visible},
};

/// The fields of a short result.
const BRIEF: [&str; 9] = ["output", "error", "code", "success", "verdict", "reason", "limits_hit", "denials", "files"];

/// The form of a result on stdout.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ResultForm {
    /// JSON on one line, with every field.
    #[default]
    Line,
    /// Indented, with every field.
    Pretty,
    /// JSON on one line, with the fields that say what happened.
    Brief,
    /// The status, what the code printed, what was refused and what ended it.
    Text,
}

impl ResultForm {
    /// The form that these options of `exec` ask for.
    pub fn of_options(pretty: bool, brief: bool, text: bool) -> Self {
        match (pretty, brief, text) {
            (true, ..) => ResultForm::Pretty,
            (_, true, _) => ResultForm::Brief,
            (_, _, true) => ResultForm::Text,
            _ => ResultForm::Line,
        }
    }

    /// The option of `exec` that asks for it.
    pub fn option(self) -> Option<&'static str> {
        match self {
            ResultForm::Line => None,
            ResultForm::Pretty => Some("--pretty"),
            ResultForm::Brief => Some("--brief"),
            ResultForm::Text => Some("--text"),
        }
    }

    /// A result, which is a line of JSON, in this form.
    ///
    /// # Errors
    /// The line is no JSON object.
    pub fn of_line(self, line: &[u8]) -> Result<Cow<'_, [u8]>, serde_json::Error> {
        if self == ResultForm::Line {
            return Ok(Cow::Borrowed(line));
        }
        let result: Map<String, Value> = serde_json::from_slice(line)?;
        let text = |key: &str| result.get(key).and_then(Value::as_str).unwrap_or_default();
        let formed = match self {
            ResultForm::Line | ResultForm::Pretty => format!("{}\n", escape_json(&serde_json::to_string_pretty(&result)?, is_hidden)),
            ResultForm::Brief => {
                let kept: Map<String, Value> =
                    BRIEF.iter().filter_map(|key| Some(((*key).to_owned(), result.get(*key)?.clone()))).collect();
                format!("{}\n", serde_json::to_string(&kept)?)
            }
            ResultForm::Text => {
                let how = if result.get("success") == Some(&Value::Bool(true)) { "succeeded" } else { "failed" };
                let code = result.get("code").and_then(Value::as_i64).unwrap_or_default();
                let output = [text("output"), text("error")].concat();
                let ending = Ending::deserialize(&result).unwrap_or_default();
                let end: String = ending.lines(&output).iter().map(|line| format!("{}\n", escape_line(line, is_hidden))).collect();
                visible(&format!("exitcode: {code} (execution {how})\nCode output: {}\n{end}", output.trim_end_matches('\n')))
            }
        };
        Ok(Cow::Owned(formed.into_bytes()))
    }
}

/// The exit status of `exec` for a result of this verdict.
pub fn exit_status(verdict: &str) -> u8 {
    match verdict {
        "bad_request" => 2,
        "sandbox_error" => 125,
        _ => 0,
    }
}
