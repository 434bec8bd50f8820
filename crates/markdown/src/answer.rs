//! What is printed: one result for all blocks, and each block's own in `blocks`.
//!
//! The result is that of the last block that was sent to the session, with the output of all
//! blocks. A block's own result is not changed.

use serde::Deserialize;
use serde_json::{Map, Value, json};
use stockade_markdown::Block;
use stockade_protocol::{
    Report,
    ending::Ending,
    text::{escape_line, is_hidden},
};

/// What happened to one block.
pub(crate) enum Given {
    /// What the session answered, whether it ran or was refused.
    Result(Map<String, Value>),
    /// It was not sent there, for this reason.
    NotSent(&'static str),
}

/// The results so far.
#[derive(Default)]
pub(crate) struct Answer {
    /// The result so far; before any block has run there is none.
    result: Option<Map<String, Value>>,
    output: String,
    error: String,
    /// Each block's stderr, then its stdout, as agents expect it.
    mixed: String,
    duration_ms: u64,
    started: bool,
    blocks: Vec<Value>,
}

impl Answer {
    /// The answer where no block was run at all.
    pub(crate) fn of(report: &Report) -> Self {
        let mut answer = Answer::default();
        answer.take(as_map(report));
        answer
    }

    /// Adds the next block.
    pub(crate) fn add(&mut self, block: &Block, given: Given) {
        let (ran, why, result) = match given {
            Given::Result(result) => {
                self.take(result.clone());
                let ran = has_started(&result);
                let why = if ran { Value::Null } else { result.get("verdict").cloned().unwrap_or_default() };
                (ran, why, Value::Object(result))
            }
            Given::NotSent(why) => (false, Value::from(why), Value::Null),
        };
        self.blocks.push(json!({
            "line": block.line, "language": block.language, "file": block.file, "ran": ran, "why": why, "result": result,
        }));
    }

    fn take(&mut self, result: Map<String, Value>) {
        let words = |key: &str| result.get(key).and_then(Value::as_str).unwrap_or_default();
        self.output.push_str(words("output"));
        self.error.push_str(words("error"));
        self.mixed.push_str(words("error"));
        self.mixed.push_str(words("output"));
        self.duration_ms += result.get("duration_ms").and_then(Value::as_u64).unwrap_or(0);
        self.started |= has_started(&result);
        self.result = Some(result);
    }

    /// Whether a block did not succeed.
    pub(crate) fn has_failed(&self) -> bool {
        self.result.as_ref().is_some_and(|result| result.get("success") != Some(&Value::Bool(true)))
    }

    fn field(&self, key: &str) -> Option<&Value> {
        self.result.as_ref().and_then(|result| result.get(key))
    }

    /// One line.
    pub(crate) fn json(&self) -> String {
        let mut all = self.result.clone().unwrap_or_default();
        all.insert(String::from("output"), Value::from(self.output.as_str()));
        all.insert(String::from("error"), Value::from(self.error.as_str()));
        all.insert(String::from("duration_ms"), Value::from(self.duration_ms));
        all.insert(String::from("started"), Value::from(self.started));
        all.insert(String::from("blocks"), Value::from(self.blocks.clone()));
        format!("{}\n", Value::Object(all))
    }

    /// As the agents of AG2 and AutoGen word it.
    pub(crate) fn text(&self) -> String {
        let code = self.field("code").and_then(Value::as_i64).unwrap_or(125);
        let how = if self.has_failed() { "failed" } else { "succeeded" };
        let end: String = self.ending().lines(&self.mixed).iter().map(|line| format!("{}\n", escape_line(line, is_hidden))).collect();
        format!("exitcode: {code} (execution {how})\nCode output: {}\n{end}", self.mixed.trim_end_matches('\n'))
    }

    /// What was refused to the last block, and what ended it.
    fn ending(&self) -> Ending {
        self.result.as_ref().and_then(|result| Ending::deserialize(result).ok()).unwrap_or_default()
    }

    /// The exit status, as that of `exec`.
    pub(crate) fn status(&self) -> u8 {
        match self.field("verdict").and_then(Value::as_str) {
            Some("bad_request") => 2,
            Some("sandbox_error") | None => 125,
            Some(_) => 0,
        }
    }
}

/// Whether the first instruction of the code ran.
fn has_started(result: &Map<String, Value>) -> bool {
    result.get("started") == Some(&Value::Bool(true))
}

/// A result as a client of `exec` reads it.
pub(crate) fn as_map(report: &Report) -> Map<String, Value> {
    match serde_json::to_value(report) {
        Ok(Value::Object(map)) => map,
        _ => Map::new(),
    }
}
