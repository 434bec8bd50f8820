//! `stockade ps` and `stockade kill`: what the registry says of the runs on this host.
//!
//! Which of them this user may see and end is the engine's to say. With `--server` both are a
//! companion's.

use std::{
    io::{self, IsTerminal},
    thread,
    time::Duration,
};

use serde_json::json;
use stockade_engine::{
    caller::user_name,
    runs::{self, RunningRun},
};
use stockade_protocol::{
    Verdict,
    text::{columns, escape, escape_json, is_hidden},
};

use crate::{
    ExitCode, SANDBOX_ERROR, args,
    output::{print_json, print_text, warn, write_out},
    remote,
};

/// The most characters of the last column.
const MAX_WORDS: usize = 60;

/// To a terminal's first line, and all below it is erased.
const CLEAR: &[u8] = b"\x1b[H\x1b[J";
/// How often `--watch` looks.
const INTERVAL: Duration = Duration::from_secs(1);

pub(crate) fn list(asked: &args::Ps) -> anyhow::Result<ExitCode> {
    if let Some(server) = &asked.server {
        return remote::list(server, asked);
    }
    let mut before = None;
    loop {
        let all = match runs::list() {
            Ok(all) => all,
            Err(refusal) => return Ok(refused(&refusal)),
        };
        let problems: Vec<String> = all.problems.iter().chain(&all.untrue).cloned().collect();
        // What is not true hides no run, so it is no failure.
        let status = if all.problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(SANDBOX_ERROR) };
        let seen = (all.runs, problems);
        if before.as_ref() != Some(&seen) {
            seen.1.iter().for_each(|problem| warn(&format!("stockade: {}", escape(problem, is_hidden))));
            show(&seen.0, asked)?;
        }
        if !asked.watch {
            return Ok(status);
        }
        before = Some(seen);
        thread::sleep(INTERVAL);
    }
}

fn show(runs: &[RunningRun], asked: &args::Ps) -> anyhow::Result<()> {
    let all = json!({ "schema": 1, "runs": runs });
    match (asked.json, asked.watch) {
        (true, false) => return print_json(&all),
        (true, true) => return print_text(&escape_json(&all.to_string(), is_hidden)),
        (false, true) if io::stdout().is_terminal() => write_out(CLEAR)?,
        _ => {}
    }
    let heads = ["ID", "POLICY", "USER", "SINCE", "COMMAND"].map(String::from);
    let rows: Vec<[String; 5]> = std::iter::once(heads).chain(runs.iter().map(row)).collect();
    print_text(&columns(&rows))
}

fn row(run: &RunningRun) -> [String; 5] {
    let words = match (run.command.is_empty(), &run.id) {
        (false, _) => run.command.clone(),
        (true, Some(id)) => format!("{} ({id})", run.via.name()),
        (true, None) => run.via.name().to_owned(),
    };
    // Fractions of a second tell runs apart only in the log.
    let since = run.since.split_once('.').map_or(run.since.clone(), |(seconds, _)| format!("{seconds}Z"));
    let user = user_name(run.uid).unwrap_or_else(|| run.uid.to_string());
    [run.run.clone(), run.policy.clone(), user, since, words.chars().take(MAX_WORDS).collect()].map(|cell| escape(&cell, is_hidden))
}

pub(crate) fn kill(asked: &args::Kill) -> anyhow::Result<ExitCode> {
    if let Some(server) = &asked.server {
        return remote::kill(server, &asked.id);
    }
    Ok(runs::kill(&asked.id).map_or_else(|refusal| refused(&refusal), |()| ExitCode::SUCCESS))
}

fn refused(refusal: &stockade_engine::Refusal) -> ExitCode {
    warn(&format!("stockade: {refusal}"));
    if refusal.verdict == Verdict::BadRequest { ExitCode::FAILURE } else { ExitCode::from(SANDBOX_ERROR) }
}
