//! `stockade ps` and `stockade kill`: what the registry says of the runs on this host.
//!
//! Which of them this user may see and end is the engine's to say.

use serde_json::json;
use stockade_engine::{caller::user_name, runs};
use stockade_protocol::{
    Verdict,
    text::{escape, is_hidden},
};

use crate::{
    ExitCode, SANDBOX_ERROR,
    output::{print_json, print_text, warn},
};

/// The most characters of the last column.
const MAX_WORDS: usize = 60;

pub(crate) fn list(json: bool) -> anyhow::Result<ExitCode> {
    let all = match runs::list() {
        Ok(all) => all,
        Err(refusal) => return Ok(refused(&refusal)),
    };
    // What is not true hides no run, so it is no failure.
    let status = if all.problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(SANDBOX_ERROR) };
    all.problems.iter().chain(&all.untrue).for_each(|problem| warn(&format!("stockade: {}", escape(problem, is_hidden))));
    if json {
        print_json(&json!({ "schema": 1, "runs": all.runs }))?;
        return Ok(status);
    }
    let heads = ["ID", "POLICY", "USER", "SINCE", "COMMAND"].map(String::from);
    let rows: Vec<[String; 5]> = std::iter::once(heads).chain(all.runs.into_iter().map(row)).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..4).map(width).collect();
    let line = |row: &[String; 5]| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}  ")).collect::<String>();
        format!("{cells}{}", row[4])
    };
    print_text(&rows.iter().map(line).collect::<Vec<_>>().join("\n"))?;
    Ok(status)
}

fn row(run: runs::RunningRun) -> [String; 5] {
    let words = match (run.command.is_empty(), &run.id) {
        (false, _) => run.command,
        (true, Some(id)) => format!("{} ({id})", run.via.name()),
        (true, None) => run.via.name().to_owned(),
    };
    // Fractions of a second tell runs apart only in the log.
    let since = run.since.split_once('.').map_or(run.since.clone(), |(seconds, _)| format!("{seconds}Z"));
    let user = user_name(run.uid).unwrap_or_else(|| run.uid.to_string());
    [run.run, run.policy, user, since, words.chars().take(MAX_WORDS).collect()].map(|cell| escape(&cell, is_hidden))
}

pub(crate) fn kill(id: &str) -> anyhow::Result<ExitCode> {
    Ok(runs::kill(id).map_or_else(|refusal| refused(&refusal), |()| ExitCode::SUCCESS))
}

fn refused(refusal: &stockade_engine::Refusal) -> ExitCode {
    warn(&format!("stockade: {refusal}"));
    if refusal.verdict == Verdict::BadRequest { ExitCode::FAILURE } else { ExitCode::from(SANDBOX_ERROR) }
}
