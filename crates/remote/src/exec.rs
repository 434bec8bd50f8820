//! `stockade exec --server`: one request from stdin, one result on stdout.
//!
//! The run is asked for as a stream of events, so that it can be cancelled by its number and a
//! service that has gone is noticed. A stream that was cut is resumed, which runs nothing again. The
//! result is printed as it came. What has none becomes a result
//! of this program; its `started` is false only where the code cannot have run.

use std::{
    io::{self, Read, Write},
    process::ExitCode,
    sync::{
        Arc, OnceLock,
        mpsc::{RecvTimeoutError, SyncSender, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

use base64::{Engine, engine::general_purpose::STANDARD};
use serde::Deserialize;
use serde_json::value::RawValue;
use stockade_protocol::{
    MAX_REQUEST,
    ending::Ending,
    form::{ResultForm, exit_status},
    text::{escape_line, is_hidden, visible},
};

use crate::{
    RemoteError,
    arguments::{Arguments, ExecTask},
    connect::{Client, Reply},
    error::Problem,
    lines::{LineError, Lines},
    signals, warn,
};

/// The longest problem.
const MAX_PROBLEM: u64 = 1 << 20;
/// How long a request that is to be cancelled has for its number.
const NUMBER_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a cancelled run has for its result.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(5);
/// How often a stream that was cut is asked for again without anything new in it.
const MAX_TRIES: u32 = 3;
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
const EVENTS: &str = "application/x-ndjson";
/// The code ran, and what came of it could not be written: EX_IOERR of sysexits.h.
const UNWRITTEN: u8 = 74;
/// The reader of stdout has gone: as SIGPIPE would end it.
const PIPE_CLOSED: u8 = 128 + 13;

/// What the main thread waits for.
enum Incoming {
    /// A line of the stream that is not its last.
    Event(Vec<u8>),
    /// The result, as JSON on one line, or why there is none.
    End(Result<Vec<u8>, RemoteError>),
    /// The first signal that ends programs.
    Signal(i32),
}

/// Runs the request on stdin and prints its result.
pub fn run(arguments: &Arguments, task: &ExecTask) -> ExitCode {
    let (tell, told) = sync_channel(4);
    let ends = tell.clone();
    let prepared = arguments.check_version().and_then(|()| {
        // Where nothing listens any more, the end is near.
        signals::watch(&arguments.ends_with, move |signal| drop(ends.send(Incoming::Signal(signal))))?;
        Ok((Arc::new(Client::new(&arguments.server)?), Arc::new(OnceLock::new())))
    });
    let (client, number) = match prepared {
        Ok(prepared) => prepared,
        Err(error) => return finish(task, Err(error)),
    };
    begin(&client, &number, task.policy.clone(), tell);
    let mut ended_by: Option<i32> = None;
    // The run is cancelled, or its number is awaited for that.
    let (mut is_cancelled, mut until) = (false, None);
    loop {
        let left = until.map(|until: Instant| until.saturating_duration_since(Instant::now()));
        let next = match left {
            Some(left) => told.recv_timeout(left),
            None => told.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        match next {
            Ok(Incoming::Event(line)) if task.stream => {
                if let Err(error) = show(task, &line) {
                    if let Some(number) = number.get() {
                        cancel(&client, number);
                    }
                    return unwritten(&error, true);
                }
            }
            Ok(Incoming::Event(_)) => {}
            Ok(Incoming::End(result)) => return finish(task, result),
            Ok(Incoming::Signal(signal)) => {
                if !client.has_connected() {
                    return finish(task, Err(RemoteError::Cancelled { signal, started: false }));
                }
                (ended_by, until) = (Some(signal), Some(Instant::now() + NUMBER_TIMEOUT));
            }
            // To hang up cancels it too, later.
            Err(_) => return finish(task, Err(RemoteError::Cancelled { signal: ended_by.unwrap_or_default(), started: true })),
        }
        if let (Some(_), false, Some(number)) = (ended_by, is_cancelled, number.get()) {
            let (client, number) = (Arc::clone(&client), number.clone());
            thread::spawn(move || cancel(&client, &number));
            (is_cancelled, until) = (true, Some(Instant::now() + CANCEL_TIMEOUT));
        }
    }
}

/// Reads the request, sends it, and passes on what comes back. It ends with this program.
fn begin(client: &Arc<Client>, number: &Arc<OnceLock<String>>, policy: Option<String>, tell: SyncSender<Incoming>) {
    let (client, number) = (Arc::clone(client), Arc::clone(number));
    thread::spawn(move || {
        let result = read_request().and_then(|request| {
            let reply = client.run(policy.as_deref(), &request)?;
            drop(request);
            let send = |line| tell.send(Incoming::Event(line)).is_ok();
            read_reply(&client, reply, &number, send)
        });
        // The main thread may have ended.
        drop(tell.send(Incoming::End(result)));
    });
}

fn read_request() -> Result<Vec<u8>, RemoteError> {
    let mut request = Vec::new();
    io::stdin().lock().take(MAX_REQUEST as u64 + 1).read_to_end(&mut request).map_err(RemoteError::RequestUnreadable)?;
    if request.len() > MAX_REQUEST { Err(RemoteError::RequestTooLarge) } else { Ok(request) }
}

/// Asks for the end of a run. Its result says whether that was heard.
fn cancel(client: &Client, number: &str) {
    if let Err(error) = client.delete(&format!("/v1/runs/{number}")) {
        warn(&format!("stockade: cancel run {number}: {error}"));
    }
}

/// The fields of an event that matter here.
#[derive(Deserialize)]
struct Event<'a> {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    seq: u64,
    run: Option<String>,
    #[serde(borrow)]
    result: Option<&'a RawValue>,
    problem: Option<Problem>,
}

/// Passes events on, up to the last. The result.
fn read_reply(client: &Client, reply: Reply, number: &OnceLock<String>, pass_on: impl Fn(Vec<u8>) -> bool) -> Result<Vec<u8>, RemoteError> {
    let server = client.name();
    let wrong = |what: &str| RemoteError::Answer { server: server.clone(), what: what.to_owned(), started: true };
    let lost = |why: String| RemoteError::Lost { server: server.clone(), why, started: true };
    let too_long = || wrong("it is longer than 128 MiB");
    match (reply.status, reply.kind.as_str()) {
        (200, EVENTS) => {}
        (200, "application/json") => {
            let whole = Lines::new(reply.body).rest().map_err(|error| match error {
                LineError::TooLong => too_long(),
                LineError::Read(error) => lost(words_of(&error)),
            })?;
            return one_line(whole).ok_or_else(|| wrong("it is no result"));
        }
        _ => return Err(refusal(server, reply)),
    }
    let (mut lines, mut seen, mut tries) = (Lines::new(reply.body), 0, 0);
    loop {
        let why = match lines.next() {
            Ok(Some(line)) => {
                let event: Event<'_> = serde_json::from_slice(&line).map_err(|_| wrong("a line of it is no event"))?;
                match (event.kind.as_str(), event.result, event.problem) {
                    ("result", Some(result), _) => return one_line(result.get().into()).ok_or_else(|| wrong("it is no result")),
                    ("problem", _, Some(problem)) => return Err(RemoteError::Problem(problem)),
                    ("result" | "problem", ..) => return Err(wrong("its last event is empty")),
                    ("accepted", ..) => drop(event.run.filter(|run| is_number(run)).map(|run| number.set(run))),
                    _ => {}
                }
                if event.seq > seen {
                    (seen, tries) = (event.seq, 0);
                }
                if !pass_on(line) {
                    return Err(lost(String::from("its events are not wanted any more")));
                }
                continue;
            }
            Ok(None) => String::from("it ended the stream"),
            Err(LineError::TooLong) => return Err(too_long()),
            Err(LineError::Read(error)) => words_of(&error),
        };
        match number.get().and_then(|number| go_on(client, number, seen, &mut tries)) {
            Some(reply) => lines = Lines::new(reply.body),
            None => return Err(lost(why)),
        }
    }
}

/// The stream of a run after an event, where it was cut; none: it is not to be had.
fn go_on(client: &Client, number: &str, seen: u64, tries: &mut u32) -> Option<Reply> {
    while *tries < MAX_TRIES {
        *tries += 1;
        thread::sleep(RETRY_INTERVAL);
        match client.get(&format!("/v1/runs/{number}/events?after={seen}")) {
            Ok(reply) if (reply.status, reply.kind.as_str()) == (200, EVENTS) => return Some(reply),
            Ok(_) => return None,
            Err(_) => {}
        }
    }
    None
}

/// What an answer without a result says.
pub fn refusal(server: String, reply: Reply) -> RemoteError {
    let Reply { status, kind, location, retry_after, body } = reply;
    // A proxy that answers so has not passed the request on.
    let started = !(300..500).contains(&status);
    if kind == "application/problem+json" {
        let mut bytes = Vec::new();
        let read = body.take(MAX_PROBLEM).read_to_end(&mut bytes);
        let problem = read.ok().and_then(|_| serde_json::from_slice::<Problem>(&bytes).ok());
        if let Some(problem) = problem.filter(|problem| !problem.reason.is_empty()) {
            return RemoteError::Problem(Problem { status, retry_after, ..problem });
        }
    }
    let what = match location {
        Some(location) if (300..400).contains(&status) => format!("status {status} leads to {location}, which does not get the key"),
        _ => format!("status {status} with {}", if kind.is_empty() { "no type" } else { &kind }),
    };
    RemoteError::Answer { server, what, started }
}

fn words_of(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => String::from("it closed the connection"),
        io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => String::from("it was silent for too long"),
        _ => error.to_string(),
    }
}

/// Whether this can be a part of a path.
fn is_number(run: &str) -> bool {
    (1..=64).contains(&run.len()) && run.bytes().all(|byte| byte.is_ascii_alphanumeric())
}

/// The fields of a result that matter here.
#[derive(Deserialize)]
struct Outline {
    verdict: String,
    #[serde(default)]
    started: bool,
    #[serde(default)]
    limits_unenforced: Vec<String>,
    receipt: Option<Receipt>,
    audit: Option<Audit>,
}

#[derive(Deserialize)]
struct Receipt {
    #[serde(default)]
    layers: Vec<Layer>,
}

#[derive(Deserialize)]
struct Layer {
    layer: String,
    known: String,
    detail: String,
}

#[derive(Deserialize)]
struct Audit {
    failure: Option<String>,
}

/// A result on one line; none where it is no result.
fn one_line(mut json: Vec<u8>) -> Option<Vec<u8>> {
    serde_json::from_slice::<Outline>(&json).ok()?;
    json.truncate(json.trim_ascii_end().len());
    // JSON has line breaks between its parts alone.
    json.iter_mut().filter(|byte| matches!(byte, b'\n' | b'\r')).for_each(|byte| *byte = b' ');
    json.push(b'\n');
    Some(json)
}

/// Prints the result, or another that says why there is none. The status of this program.
fn finish(task: &ExecTask, result: Result<Vec<u8>, RemoteError>) -> ExitCode {
    let line = result.unwrap_or_else(|error| {
        let mut line = serde_json::to_vec(&error.report()).unwrap_or_default();
        line.push(b'\n');
        line
    });
    let Ok(outline) = serde_json::from_slice::<Outline>(&line) else {
        warn("stockade: the result cannot be written as JSON");
        return ExitCode::from(exit_status("sandbox_error"));
    };
    warn_of(&outline, task.quiet);
    match print(task, &line) {
        Ok(()) => ExitCode::from(exit_status(&outline.verdict)),
        Err(error) => unwritten(&error, outline.started),
    }
}

fn print(task: &ExecTask, line: &[u8]) -> io::Result<()> {
    match (task.stream, task.form) {
        (true, ResultForm::Text) => {
            warn(&ending_of(line)?);
            Ok(())
        }
        (true, _) => write_out(&[br#"{"type":"result","result":"#, line.trim_ascii_end(), b"}\n"].concat()),
        (false, form) => write_out(&form.of_line(line)?),
    }
}

/// Prints an event: itself or, as text, what the program has printed, each stream to its own.
fn show(task: &ExecTask, line: &[u8]) -> io::Result<()> {
    if task.form != ResultForm::Text {
        return write_out(&[line, b"\n"].concat());
    }
    let event: Printed = serde_json::from_slice(line)?;
    let bytes = event.base64.and_then(|base64| STANDARD.decode(base64).ok());
    let text = bytes.map_or(event.text, |bytes| String::from_utf8_lossy(&bytes).into_owned());
    match event.kind.as_str() {
        "stdout" => write_out(visible(&text).as_bytes()),
        "stderr" => io::stderr().lock().write_all(visible(&text).as_bytes()),
        "gap" => {
            warn(&format!("stockade: {} bytes of {} are left out here", event.bytes, event.stream));
            Ok(())
        }
        _ => Ok(()),
    }
}

/// An event about output.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Printed {
    #[serde(rename = "type")]
    kind: String,
    text: String,
    base64: Option<String>,
    stream: String,
    bytes: u64,
}

/// What is left to say of a result whose output has been printed.
fn ending_of(line: &[u8]) -> serde_json::Result<String> {
    let text = ResultForm::Text.of_line(line)?;
    let result: Said = serde_json::from_slice(line)?;
    let lines =
        Ending::deserialize(&serde_json::from_slice::<serde_json::Value>(line)?)?.lines(&[&*result.output, &*result.error].concat());
    let status = String::from_utf8_lossy(&text).lines().next().unwrap_or_default().to_owned();
    // Of what did not run the reason is no output.
    let why = if result.started { String::new() } else { format!("{}\n", result.error) };
    Ok(format!("{why}{status}\n{}", lines.iter().map(|line| escape_line(line, is_hidden)).collect::<Vec<_>>().join("\n")))
}

/// What a result says in words.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Said {
    output: String,
    error: String,
    started: bool,
}

/// The bytes of an answer; std's own stdout would take a closed one for written.
fn write_out(bytes: &[u8]) -> io::Result<()> {
    let stdout = rustix::stdio::stdout();
    let mut rest = bytes;
    while !rest.is_empty() {
        match rustix::io::write(stdout, rest) {
            Ok(length) => rest = rest.get(length..).unwrap_or_default(),
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    io::stdout().flush()
}

fn unwritten(error: &io::Error, started: bool) -> ExitCode {
    if error.kind() == io::ErrorKind::BrokenPipe {
        return ExitCode::from(PIPE_CLOSED);
    }
    let ran = if started { "the code ran, and what came of it is lost: " } else { "" };
    warn(&format!("stockade: {ran}write the answer to stdout: {error}"));
    ExitCode::from(if started { UNWRITTEN } else { exit_status("sandbox_error") })
}

/// Says what the run lacked at the service, as `exec` does of a run here.
fn warn_of(outline: &Outline, quiet: bool) {
    let layers = outline.receipt.iter().flat_map(|receipt| &receipt.layers).filter(|layer| layer.known == "degraded" && !quiet);
    for layer in layers {
        let open = outline.limits_unenforced.join(", ");
        let open = if layer.layer == "cgroup" && !open.is_empty() { format!("; not enforced: {open}") } else { String::new() };
        let why = layer.detail.split("; ").next().unwrap_or_default();
        warn(&format!("stockade: the service runs code without `{}`: {why}{open}", layer.layer));
    }
    if let Some(failure) = outline.audit.as_ref().and_then(|audit| audit.failure.as_ref()) {
        warn(&format!("stockade: not in the audit log of the service: {failure}"));
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::*;

    #[test]
    fn a_result_stays_one_line_and_what_is_none_is_not_taken() {
        let line = one_line(b"{\"verdict\": \"exited\",\n \"output\": \"a\\nb\"}\n".to_vec()).unwrap();
        assert_eq!(line, b"{\"verdict\": \"exited\",  \"output\": \"a\\nb\"}\n");
        for other in ["", "{}", "[]", "\"x\"", "{\"verdict\": 1}", "{\"verdict\": \"exited\"} {}", "<html>"] {
            assert!(one_line(other.into()).is_none(), "{other}");
        }
    }

    #[test]
    fn a_runs_number_cannot_lead_to_another_path() {
        assert!(is_number("4f1c2a9be07d3365") && is_number("01JX5"));
        for other in ["", "..", "a/b", "a?b", "a b", "ä", &"a".repeat(65)] {
            assert!(!is_number(other), "{other}");
        }
    }
}
