//! The program `stockade`: flags to options, results to text and exit status.
//!
//! Decides nothing about a sandbox. What goes to stdout is the answer alone; everything
//! else goes to stderr. A usage error of `exec` is a result too, so that whoever reads
//! stdout always finds one.
#![deny(unsafe_code)]
// Called by libc without what Rust's own start does before: see `stockade_sys::entry`.
#![cfg_attr(not(test), no_main)]

mod approve;
mod args;
mod audit;
mod companion;
mod doctor;
mod dry_run;
mod explained;
mod output;
mod page;
mod policy;
mod prove;
mod runtimes;
mod screen;
mod shim;

use std::{
    ffi::OsString,
    fs::{self, File, Metadata},
    io::{self, Write},
    os::{fd::AsFd, unix::fs::MetadataExt},
    path::Path,
};

use anyhow::{Context, anyhow, bail};
use clap::error::ErrorKind;
use rustix::fs::{Mode, OFlags, fcntl_getfl, fcntl_setfl, openat};
use stockade_protocol::{Report, Verdict};
use stockade_runtime::{Ahead, Ask, Options, Refusal, admit};
use stockade_session::Ended;

use args::{Cli, Command, PolicyChoice, Sandbox};
use output::{say, warn, write_out};

const SANDBOX_ERROR: u8 = 125;
const USAGE_ERROR: u8 = 2;

/// How the program ends.
#[derive(Clone, Copy, PartialEq, Eq)]
struct ExitCode(u8);

impl ExitCode {
    const SUCCESS: ExitCode = ExitCode(0);
    const FAILURE: ExitCode = ExitCode(1);
}

impl From<u8> for ExitCode {
    fn from(code: u8) -> Self {
        ExitCode(code)
    }
}

#[global_allocator]
static MEMORY: stockade_sys::arena::Arena<std::alloc::System, { 1 << 20 }> = stockade_sys::arena::Arena::before(std::alloc::System);

#[cfg(not(test))]
stockade_sys::called_by_libc!(program);

#[cfg_attr(test, expect(dead_code, reason = "tests begin elsewhere"))]
fn program() -> u8 {
    let ExitCode(code) = act();
    code
}

fn act() -> ExitCode {
    // Under `ulimit -f 0` this would die without a word. A payload gets the defaults back.
    stockade_sys::process::settle_signals();
    // What was begun before libc and is not wanted after all ends with this.
    let _begun_early = stockade_launcher::early::Unused;
    let ahead = if Cli::is_run_of_process() { Ahead::begin(None) } else { Ahead::default() };
    let cli = match apart(Cli::of_process) {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    let done = match cli.command {
        Command::Exec(exec) => apart(|| exec_command(&exec)),
        Command::Run(run) => apart(|| run_command(&run, ahead)),
        Command::Session(session) => apart(|| serve_session(&session)),
        Command::Mcp(session) => apart(|| serve_mcp(&session)),
        Command::Policy(command) => apart(|| policy::run(command)),
        Command::Shim(command) => apart(|| shim::run(&command)),
        Command::ShimExec(shim) => apart(|| shim::exec(&shim)),
        Command::Runtimes(choice) => apart(|| runtimes::run(&choice)),
        Command::Doctor(doctor) => apart(|| doctor::run(&doctor)),
        Command::Prove(asked) => apart(|| prove::run(&asked)),
        Command::Audit(command) => apart(|| audit::run(&command)),
        Command::Approve(asked) => apart(|| approve::run(&asked)),
        Command::Screen(asked) => apart(|| screen::run(&asked)),
        Command::Serve(serve) => apart(|| serve_connection(&serve)),
        Command::Version(version) => apart(|| show_version(version.json)),
    };
    done.unwrap_or_else(|error| failed(&error))
}

/// Does this in a frame of its own. Of a frame each page is touched when it is entered, so
/// that in one frame each run would pay for the largest of all commands.
#[inline(never)]
fn apart<T>(command: impl FnOnce() -> T) -> T {
    command()
}

/// What was asked for could not be done or, for all its caller knows, was not.
fn failed(error: &anyhow::Error) -> ExitCode {
    warn(&format!("stockade: {error:#}"));
    ExitCode::from(SANDBOX_ERROR)
}

/// Help goes to stdout; an error of `exec` is a result as well.
fn usage(error: &clap::Error) -> ExitCode {
    let asked_for = matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
    if !asked_for && std::env::args_os().nth(1).is_some_and(|first| first == "exec") {
        let message = error.render().to_string();
        let report = Report::refused(Verdict::BadRequest, "usage", message.trim_end().to_owned());
        return print_report(&report).unwrap_or_else(|error| failed(&error));
    }
    // Nobody listens where both streams are closed.
    let _unheard = error.print();
    ExitCode::from(if asked_for { 0 } else { USAGE_ERROR })
}

impl From<&Sandbox> for Options {
    fn from(sandbox: &Sandbox) -> Self {
        Options {
            policy: sandbox.policy.clone(),
            scratch: sandbox.scratch.clone(),
            interpreters: sandbox.runtimes.clone(),
            ..Options::default()
        }
    }
}

impl From<&PolicyChoice> for Options {
    fn from(choice: &PolicyChoice) -> Self {
        Options { policy: choice.policy.clone(), interpreters: choice.runtimes.clone(), ..Options::default() }
    }
}

fn exec_command(exec: &args::Exec) -> anyhow::Result<ExitCode> {
    if exec.markdown {
        return exec_markdown(exec);
    }
    let options = Options::from(&exec.sandbox);
    let read = admit::read_request(io::stdin().lock()).and_then(|bytes| match &exec.approve {
        Some(token) => approve::into_request(bytes, token),
        None => Ok(bytes),
    });
    let bytes = match read {
        Ok(bytes) => bytes,
        Err(refusal) => return print_report(&stockade_runtime::refuse(&refusal, &options)),
    };
    if exec.plan.dry_run {
        let planned = admit::parse_request(&bytes).and_then(|request| stockade_runtime::plan(Ask::Request(&request), &options));
        return match planned {
            Ok(plan) => dry_run::print(&plan, exec.plan.json),
            Err(refusal) => print_report(&refusal.report()),
        };
    }
    if let Some(socket) = &exec.socket {
        return ask(socket, &bytes);
    }
    let report = stockade_runtime::exec(&bytes, &options);
    warn_of_degraded(&report);
    warn_of_audit(&report);
    print_report(&report)
}

/// A model's reply in place of a request: a companion reads it, and has this program run
/// its blocks in a session.
fn exec_markdown(exec: &args::Exec) -> anyhow::Result<ExitCode> {
    let flags = [(exec.last, "--last"), (exec.text, "--text"), (true, "--")];
    let mut arguments: Vec<OsString> = flags.iter().filter(|(given, _)| *given).map(|(_, flag)| flag.into()).collect();
    arguments.extend(exec.sandbox.to_arguments());
    // The session ends with the reply, and what waits in it could never be run.
    arguments.extend(args::ApprovedBy::Nobody.to_arguments());
    match companion::become_companion("stockade-markdown", arguments) {
        Ok(never) => match never {},
        Err(error) => print_report(&Report::refused(Verdict::SandboxError, "companion_missing", format!("{error:#}"))),
    }
}

/// The same by way of a socket.
fn ask(socket: &Path, request: &[u8]) -> anyhow::Result<ExitCode> {
    let answer = match stockade_service::ask(socket, request) {
        Ok(answer) => answer,
        Err(report) => return print_report(&report),
    };
    answer.degraded.iter().for_each(|(layer, detail)| warn_of(layer, detail));
    answer.unrecorded.iter().for_each(|failure| warn_of_record(failure));
    write_out(&answer.line)?;
    Ok(match answer.verdict.as_str() {
        "bad_request" => ExitCode::from(USAGE_ERROR),
        "sandbox_error" => ExitCode::from(SANDBOX_ERROR),
        _ => ExitCode::SUCCESS,
    })
}

/// A connection that was answered was served, whatever the answer; stderr is the journal.
fn serve_connection(serve: &args::Serve) -> anyhow::Result<ExitCode> {
    let options = Options { policy: serve.policy.clone(), scratch: serve.scratch.clone(), ..Options::default() };
    let served = stockade_service::serve(io::stdin().as_fd().try_clone_to_owned()?, options, serve.per_user)?;
    let verdict = serde_json::to_value(served.verdict)?;
    let reason = served.reason.map(|reason| format!(" ({reason})")).unwrap_or_default();
    let verdict = verdict.as_str().unwrap_or_default();
    let untaken = served.taken.err().map(|error| format!("; its result was not taken: {error}")).unwrap_or_default();
    warn(&format!("uid {}, pid {}, policy {}: {verdict}{reason}{untaken}", served.uid, served.pid, served.policy));
    Ok(ExitCode::SUCCESS)
}

/// Whatever its requests came to, a session that began has done its work.
fn serve_session(session: &args::Session) -> anyhow::Result<ExitCode> {
    let options = Options { approved_by: session.approved_by.into(), ..Options::from(&session.kept.sandbox) };
    let ended = stockade_session::serve(options, |report| {
        warn_of_degraded(report);
        warn_of_audit(report);
    })?;
    Ok(match ended {
        Ended::Closed => ExitCode::SUCCESS,
        Ended::Refused(Verdict::BadRequest) => ExitCode::from(USAGE_ERROR),
        Ended::Refused(_) => ExitCode::from(SANDBOX_ERROR),
        Ended::Signal(signal) => ExitCode::from(u8::try_from(128 + signal).unwrap_or(SANDBOX_ERROR)),
        Ended::Unheard => return Err(anyhow::anyhow!("nobody reads the session's answers any more")),
    })
}

/// The companion takes this process's place, and starts a session as its child. Its tokens
/// are read by a model, which must not approve itself.
fn serve_mcp(kept: &args::Kept) -> anyhow::Result<ExitCode> {
    let approved_by = args::ApprovedBy::Approvers.to_arguments();
    match companion::become_companion("stockade-mcp", kept.sandbox.to_arguments().into_iter().chain(approved_by))? {}
}

/// What the run goes without is said on stderr too, where a person sees it.
fn warn_of_degraded(report: &Report) {
    for layer in report.receipt.iter().flat_map(|receipt| &receipt.layers) {
        if layer.known == stockade_protocol::Known::Degraded {
            warn_of(layer.layer, &layer.detail);
        }
    }
}

/// A run that is not written down says so where a person sees it.
fn warn_of_audit(report: &Report) {
    if let Some(failure) = report.audit.as_ref().and_then(|audit| audit.failure.as_ref()) {
        warn_of_record(failure);
    }
}

fn warn_of_record(failure: &str) {
    warn(&format!("stockade: not in the audit log: {failure}"));
}

fn warn_of(layer: &str, detail: &str) {
    warn(&format!("stockade: running without `{layer}`: {detail}"));
}

fn print_report(report: &Report) -> anyhow::Result<ExitCode> {
    let mut line = serde_json::to_vec(report).context("write the result as JSON")?;
    line.push(b'\n');
    write_out(&line)?;
    Ok(match report.verdict {
        Verdict::BadRequest => ExitCode::from(USAGE_ERROR),
        Verdict::SandboxError => ExitCode::from(SANDBOX_ERROR),
        _ => ExitCode::SUCCESS,
    })
}

fn run_command(run: &args::Run, ahead: Ahead) -> anyhow::Result<ExitCode> {
    let options = Options::from(&run.sandbox);
    if run.plan.dry_run {
        let ask = Ask::Command { command: &run.command, terminal: stockade_launcher::terminal::is_interactive() };
        return match stockade_runtime::plan(ask, &options) {
            Ok(plan) => dry_run::print(&plan, run.plan.json),
            Err(refusal) => Ok(refuse(&refusal)),
        };
    }
    let report_file = run.report.as_deref().map(open_report).transpose()?;
    let (report, code) = match stockade_runtime::run(&run.command, &options, run.report.is_some(), ahead) {
        Ok(result) => (result.report, command_status(result.code)),
        Err(refusal) => (Report { output: None, ..refusal.report() }, refused_command(&refusal)),
    };
    warn_of_degraded(&report);
    warn_of_audit(&report);
    explain(&report);
    if let (Some(file), Some(path)) = (report_file, &run.report) {
        write_report(file, path, &report).with_context(|| format!("write the report to {}", path.display()))?;
    }
    Ok(code)
}

/// A command's status as this program's own.
fn command_status(code: i32) -> ExitCode {
    ExitCode::from(u8::try_from(code & 0xff).unwrap_or(SANDBOX_ERROR))
}

/// A command that was not started.
fn refused_command(refusal: &Refusal) -> ExitCode {
    const NOT_EXECUTABLE: u8 = 126;
    const NOT_FOUND: u8 = 127;
    const ENOENT: i32 = 2;
    let code = refuse(refusal);
    match refusal.exec_errno {
        Some(ENOENT) => ExitCode::from(NOT_FOUND),
        Some(_) => ExitCode::from(NOT_EXECUTABLE),
        None => code,
    }
}

/// One line for a person, where something other than the command ended it.
fn explain(report: &Report) {
    let why = match report.verdict {
        Verdict::WallTimeout => "the wall clock ran out",
        Verdict::CpuTimeout => "its CPU time ran out",
        Verdict::OutOfMemory => "it ran out of memory",
        Verdict::DiskLimit if report.reason.is_some() => "a directory in scratch cannot be counted: closed to its owner, or too deep",
        Verdict::DiskLimit => "scratch or tmp is full",
        Verdict::ProcessLimit => "it reached the process limit",
        Verdict::OutputLimit => "it printed too much",
        Verdict::SyscallDenied => "it made a system call for which the policy kills",
        Verdict::Screened | Verdict::SandboxError => &report.error.0,
        _ => return,
    };
    warn(&format!("stockade: {why}"));
}

fn refuse(refusal: &Refusal) -> ExitCode {
    warn(&format!("stockade: {refusal}"));
    ExitCode::from(if refusal.verdict == Verdict::BadRequest { USAGE_ERROR } else { SANDBOX_ERROR })
}

/// Before the run, and through no link but root's: the file may lie where
/// the code can write, and would be led to anything that the caller may overwrite.
fn open_report(path: &Path) -> anyhow::Result<File> {
    let whole = std::path::absolute(path)?;
    let (Some(parent), Some(name)) = (whole.parent(), whole.file_name()) else { bail!("{} is no file's name", path.display()) };
    // A fifo that nobody reads would hold us before there is anybody to interrupt.
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    // With the caller's rights: root writes no file for whoever may not.
    let file = stockade_runtime::with_callers_rights(|| -> anyhow::Result<File> {
        let directory = stockade_launcher::scratch::place::open_directory(parent).map_err(|error| anyhow!(error.why))?;
        Ok(openat(&directory, name, flags, Mode::from_raw_mode(0o666))?.into())
    })?
    .with_context(|| format!("open {}, which must not be a link, nor a fifo that nobody reads", path.display()))?;
    // Whoever reads it may be slow.
    let blocking = fcntl_getfl(&file).and_then(|flags| fcntl_setfl(&file, flags - OFlags::NONBLOCK));
    blocking.with_context(|| format!("wait for whoever reads {}", path.display()))?;
    Ok(file)
}

fn write_report(file: File, path: &Path, report: &Report) -> anyhow::Result<()> {
    let mut text = serde_json::to_vec(report)?;
    text.push(b'\n');
    let opened = file.metadata()?;
    write_into(file, &text)?;
    let same = |found: Metadata| (found.dev(), found.ino()) == (opened.dev(), opened.ino());
    if stockade_runtime::with_callers_rights(|| fs::symlink_metadata(path))?.is_ok_and(same) {
        return Ok(());
    }
    Err(anyhow!("another file has taken its place since the run began, and is no report; name a file where the code cannot write"))
}

fn write_into(mut file: File, text: &[u8]) -> anyhow::Result<()> {
    // A device or a pipe has no length to cut.
    if file.metadata()?.is_file() {
        file.set_len(0)?;
    }
    Ok(file.write_all(text)?)
}

fn show_version(json: bool) -> anyhow::Result<ExitCode> {
    let version = env!("CARGO_PKG_VERSION");
    if json {
        let features = [
            "exec",
            "exec-socket",
            "exec-markdown",
            "run",
            "session",
            "mcp",
            "shim",
            "runtimes",
            "policy",
            "doctor",
            "prove",
            "audit",
            "screen",
            "approve",
        ];
        say(&serde_json::json!({ "version": version, "schema": 1, "features": features }).to_string())?;
    } else {
        say(&format!("stockade {version}"))?;
    }
    Ok(ExitCode::SUCCESS)
}
