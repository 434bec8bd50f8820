//! How `exec` prints a result: one line of JSON, or what a person or a model reads of it.

use std::process::ExitCode;

use anyhow::Context;
use serde::Deserialize;
use serde_json::{Map, Value};
use stockade_engine::answer::AnswerStdout;
use stockade_protocol::{
    Report,
    ending::Ending,
    text::{escape_json, escape_line, is_hidden},
};

use crate::{
    SANDBOX_ERROR, USAGE_ERROR, args,
    output::{visible, write_answer},
    unwritten,
};

/// The fields of a short result.
const BRIEF: [&str; 9] = ["output", "error", "code", "success", "verdict", "reason", "limits_hit", "denials", "files"];

/// The form of a result on stdout.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) enum ResultForm {
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

impl From<&args::Exec> for ResultForm {
    fn from(exec: &args::Exec) -> Self {
        match (exec.pretty, exec.brief, exec.text) {
            (true, ..) => ResultForm::Pretty,
            (_, true, _) => ResultForm::Brief,
            (_, _, true) => ResultForm::Text,
            _ => ResultForm::Line,
        }
    }
}

impl ResultForm {
    /// Prints a report. The status of this program.
    ///
    /// # Errors
    /// It cannot be written, and the code did not run.
    pub(crate) fn print(self, report: &Report, stdout: &mut AnswerStdout) -> anyhow::Result<ExitCode> {
        let mut line = serde_json::to_vec(report).context("write the result as JSON")?;
        line.push(b'\n');
        let verdict = serde_json::to_value(report.verdict)?;
        self.print_line(&line, report.started, verdict.as_str().unwrap_or_default(), stdout)
    }

    /// The same of a result that is a line already.
    ///
    /// # Errors
    /// Likewise.
    pub(crate) fn print_line(self, line: &[u8], started: bool, verdict: &str, stdout: &mut AnswerStdout) -> anyhow::Result<ExitCode> {
        let written = match self {
            ResultForm::Line => write_answer(line, stdout),
            _ => self.worded(line).and_then(|text| write_answer(text.as_bytes(), stdout)),
        };
        match written {
            Err(error) if started => return Ok(unwritten(&error, verdict)),
            written => written?,
        }
        Ok(match verdict {
            "bad_request" => ExitCode::from(USAGE_ERROR),
            "sandbox_error" => ExitCode::from(SANDBOX_ERROR),
            _ => ExitCode::SUCCESS,
        })
    }

    fn worded(self, line: &[u8]) -> anyhow::Result<String> {
        let result: Map<String, Value> = serde_json::from_slice(line).context("read the result")?;
        let text = |key: &str| result.get(key).and_then(Value::as_str).unwrap_or_default();
        Ok(match self {
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
        })
    }
}
