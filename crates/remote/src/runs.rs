//! `stockade ps --server` and `stockade kill --server`: the runs of this key at a service, or with the
//! scope `watch` those of all keys.

use std::{
    io::{self, IsTerminal, Write},
    process::ExitCode,
    thread,
    time::{Duration, Instant},
};

use serde::Deserialize;
use serde_json::{Value, json};
use stockade_protocol::text::{columns, escape, escape_json, is_hidden};

use crate::{
    RemoteError,
    arguments::{Arguments, PsTask},
    connect::Client,
    exec::refusal,
    lines::Lines,
    warn,
};

/// How often the list is read.
const INTERVAL: Duration = Duration::from_secs(1);
/// How long a cancelled run has to end.
const END_TIMEOUT: Duration = Duration::from_secs(10);
const END_INTERVAL: Duration = Duration::from_millis(100);
/// Nothing came of it.
const FAILED: u8 = 125;
/// There is no such run.
const NO_SUCH_RUN: u8 = 1;
const PIPE_CLOSED: u8 = 128 + 13;

/// A run, as far as it is shown.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Run {
    run: String,
    state: String,
    policy: String,
    key: String,
    queued_ms: u64,
    running_ms: Option<u64>,
}

/// Prints the runs, and with `--watch` again whenever they change.
pub fn list(arguments: &Arguments, task: PsTask) -> ExitCode {
    let mut before = None;
    let mut look = |client: &Client| -> Result<io::Result<()>, RemoteError> {
        let runs = ask(client, "/v1/runs")?;
        let runs = runs.get("runs").filter(|runs| runs.is_array()).cloned().ok_or_else(|| wrong(client))?;
        if before.as_ref() == Some(&runs) {
            return Ok(Ok(()));
        }
        let written = show(&runs, task);
        before = Some(runs);
        Ok(written)
    };
    let done = arguments.check_version().and_then(|()| Client::new(&arguments.server)).and_then(|client| {
        loop {
            let written = look(&client)?;
            if written.is_err() || !task.watch {
                return Ok(written);
            }
            thread::sleep(INTERVAL);
        }
    });
    match done {
        Ok(Ok(())) => ExitCode::SUCCESS,
        Ok(Err(error)) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::from(PIPE_CLOSED),
        Ok(Err(error)) => {
            warn(&format!("stockade: write the answer to stdout: {error}"));
            ExitCode::from(FAILED)
        }
        Err(error) => failed(&error),
    }
}

fn show(runs: &Value, task: PsTask) -> io::Result<()> {
    let text = if task.json {
        let all = json!({ "schema": 1, "runs": runs });
        let text = if task.watch { all.to_string() } else { serde_json::to_string_pretty(&all)? };
        escape_json(&text, is_hidden)
    } else {
        table(runs)
    };
    let mut stdout = io::stdout().lock();
    if task.watch && !task.json && stdout.is_terminal() {
        // To the first line, and all below it is erased.
        write!(stdout, "\x1b[H\x1b[J")?;
    }
    writeln!(stdout, "{text}")?;
    stdout.flush()
}

fn table(runs: &Value) -> String {
    let runs: Vec<Run> = runs.as_array().into_iter().flatten().filter_map(|run| Run::deserialize(run).ok()).collect();
    let seconds = |ms: u64| format!("{}.{} s", ms / 1000, ms % 1000 / 100);
    let row = |run: Run| {
        let cells = [run.run, run.state, run.policy, run.key, seconds(run.queued_ms), run.running_ms.map(seconds).unwrap_or_default()];
        cells.map(|cell| escape(&cell, is_hidden))
    };
    let heads = ["ID", "STATE", "POLICY", "KEY", "QUEUED", "RUNNING"].map(String::from);
    let rows: Vec<[String; 6]> = std::iter::once(heads).chain(runs.into_iter().map(row)).collect();
    columns(&rows)
}

/// Cancels a run, and waits until it has ended.
pub fn kill(arguments: &Arguments, run: &str) -> ExitCode {
    // It becomes a part of a path.
    if run.is_empty() || !run.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
        warn(&format!("stockade: {run} is no number of a run; `stockade ps --server {}` lists them", arguments.server));
        return ExitCode::from(NO_SUCH_RUN);
    }
    let path = format!("/v1/runs/{run}");
    let ended = arguments.check_version().and_then(|()| Client::new(&arguments.server)).and_then(|client| {
        let reply = client.delete(&path)?;
        if reply.status != 202 {
            return Err(refusal(client.name(), reply));
        }
        let until = Instant::now() + END_TIMEOUT;
        while Instant::now() < until {
            match ask(&client, &path) {
                Err(RemoteError::Problem(problem)) if problem.status == 404 => return Ok(true),
                Ok(found) if found.get("state").and_then(Value::as_str) == Some("ended") => return Ok(true),
                asked => asked?,
            };
            thread::sleep(END_INTERVAL);
        }
        Ok(false)
    });
    match ended {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => {
            warn(&format!("stockade: run {run} has not ended within {} s; see the log of the service", END_TIMEOUT.as_secs()));
            ExitCode::from(FAILED)
        }
        Err(error) => failed(&error),
    }
}

/// The JSON of a path.
fn ask(client: &Client, path: &str) -> Result<Value, RemoteError> {
    let reply = client.get(path)?;
    if (reply.status, reply.kind.as_str()) != (200, "application/json") {
        return Err(refusal(client.name(), reply));
    }
    let bytes = Lines::new(reply.body).rest().map_err(|_| wrong(client))?;
    serde_json::from_slice(&bytes).map_err(|_| wrong(client))
}

fn wrong(client: &Client) -> RemoteError {
    RemoteError::Answer { server: client.name(), what: String::from("it is no list of runs"), started: false }
}

fn failed(error: &RemoteError) -> ExitCode {
    warn(&format!("stockade: {error}"));
    let is_missing = matches!(error, RemoteError::Problem(problem) if problem.status == 404);
    ExitCode::from(if is_missing { NO_SUCH_RUN } else { FAILED })
}
