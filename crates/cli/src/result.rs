//! How `exec` prints a result. Its forms are `protocol`'s.

use std::process::ExitCode;

use anyhow::Context;
use stockade_engine::answer::AnswerStdout;
use stockade_protocol::{
    Report,
    form::{ResultForm, exit_status},
};

use crate::{args, output::write_answer, unwritten};

impl From<&args::Exec> for ResultForm {
    fn from(exec: &args::Exec) -> Self {
        ResultForm::of_options(exec.pretty, exec.brief, exec.text)
    }
}

/// Prints a report. The status of this program.
///
/// # Errors
/// It cannot be written, and the code did not run.
pub(crate) fn print(form: ResultForm, report: &Report, stdout: &mut AnswerStdout) -> anyhow::Result<ExitCode> {
    let mut line = serde_json::to_vec(report).context("write the result as JSON")?;
    line.push(b'\n');
    let verdict = serde_json::to_value(report.verdict)?;
    print_line(form, &line, report.started, verdict.as_str().unwrap_or_default(), stdout)
}

/// The same of a result that is a line already.
///
/// # Errors
/// Likewise.
pub(crate) fn print_line(
    form: ResultForm,
    line: &[u8],
    started: bool,
    verdict: &str,
    stdout: &mut AnswerStdout,
) -> anyhow::Result<ExitCode> {
    let written = form.of_line(line).context("read the result").and_then(|bytes| write_answer(&bytes, stdout));
    match written {
        Err(error) if started => return Ok(unwritten(&error, verdict)),
        written => written?,
    }
    Ok(ExitCode::from(exit_status(verdict)))
}
