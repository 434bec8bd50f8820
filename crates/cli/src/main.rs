//! The program `stockade`: flags to options, results to text and exit status.
//!
//! Decides nothing about a sandbox. What goes to stdout is the answer alone; everything
//! else goes to stderr. A usage error of `exec` is a result too, so that stdout always
//! has one.
#![forbid(unsafe_code)]

mod approve;
mod args;
mod audit;
mod bwrap;
mod collected;
mod companion;
mod completions;
mod doctor;
mod dry_run;
mod grants;
mod help;
mod image;
mod key;
mod manual;
mod output;
mod page;
mod pages;
mod policy;
mod policy_text;
mod prove;
mod remote;
mod result;
mod run;
mod runs;
mod runtimes;
mod screen;
mod serve;
mod shim;
mod templates;

use std::{
    cell::RefCell,
    collections::BTreeSet,
    ffi::OsString,
    io::{self, IsTerminal},
    os::fd::AsFd,
    path::Path,
    process::ExitCode,
    sync::Arc,
};

use anyhow::bail;
use clap::error::ErrorKind;
use rlimit::Resource;
use stockade_engine::{
    Options, Origin, admit,
    answer::AnswerStdout,
    caller::{AwaitedStdin, waiting},
};
use stockade_protocol::{Report, Verdict, form::ResultForm};
use stockade_server::session::SessionEnd;

use args::{Cli, Command, PolicyChoice, Sandbox};
use output::{print_text, tell, warn, warn_of_error};

const SANDBOX_ERROR: u8 = 125;
const USAGE_ERROR: u8 = 2;
/// The reader of stdout has gone: as SIGPIPE would end it.
const PIPE_CLOSED: u8 = 128 + 13;
/// The code ran, and what came of it could not be written: EX_IOERR of sysexits.h.
const UNWRITTEN: u8 = 74;

fn main() -> ExitCode {
    // Under `ulimit -f 0` this would die without a word. A payload gets the defaults back.
    stockade_sys::process::settle_signals();
    if let Err(why) = raise_limits() {
        return refused_by_limits(&why);
    }
    let cli = match Cli::of_process() {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    let done = match cli.command {
        Command::Exec(exec) => exec_command(&exec),
        Command::Run(asked) => run::run(&asked),
        Command::Session(session) => serve_session(&session),
        Command::Mcp(session) => serve_mcp(&session),
        Command::Image(command) => image::run(&command).map(|never| match never {}),
        Command::Policy(command) => policy::run(command),
        Command::Grants(args::Grants::Check { file }) => grants::check(file.as_deref()),
        Command::Key(command) => key::run(&command),
        Command::Shim(command) => shim::run(&command),
        Command::ShimExec(shim) => shim::exec(&shim),
        Command::Bwrap(bwrap) => bwrap::run(&bwrap),
        Command::Runtimes(choice) => runtimes::run(&choice),
        Command::Templates(command) => templates::run(&command),
        Command::Doctor(doctor) => doctor::run(&doctor),
        Command::Prove(asked) => prove::run(&asked),
        Command::Audit(command) => audit::run(&command),
        Command::Ps(asked) => runs::list(&asked),
        Command::Kill(asked) => runs::kill(&asked),
        Command::Approve(asked) => approve::run(&asked),
        Command::Screen(asked) => screen::run(&asked),
        Command::Serve(serve) => serve::run(&serve),
        Command::ServeWorker => serve::work(),
        Command::ServeKeeper(keeper) => serve::keep(&keeper),
        Command::ServeExamine(asked) => serve::examine::run(&asked),
        Command::ServeOne(serve) => serve_connection(&serve),
        Command::Help { words } => help::show(&words),
        Command::Man { words, into } => manual::run(&words, into.as_deref()),
        Command::Completions { shell } => completions::print(shell),
        Command::Version(version) => show_version(version.json),
    };
    done.unwrap_or_else(|error| failed(&error))
}

/// Raises the soft limits that the launcher itself meets: a walk through a directory and
/// descriptors in flight count against RLIMIT_NOFILE, and a small stack ends it by SIGSEGV.
/// The payload has limits of its own.
fn raise_limits() -> anyhow::Result<()> {
    const WANTED_STACK: u64 = 8 << 20;
    const MIN_STACK: u64 = 1 << 20;
    const MIN_DATA: u64 = 16 << 20;
    // A limit that cannot be raised is reported by the step that meets it.
    let _unchanged = rlimit::increase_nofile_limit(u64::MAX);
    let Ok((soft, hard)) = Resource::STACK.get() else { return Ok(()) };
    let wanted = soft.max(hard.min(WANTED_STACK));
    let stack = if Resource::STACK.set(wanted, hard).is_ok() { wanted } else { soft };
    if stack < MIN_STACK {
        bail!("the stack may have less than 1 MiB here; start stockade with a higher hard limit (ulimit -Hs)");
    }
    if Resource::DATA.get_soft().is_ok_and(|soft| soft < MIN_DATA) {
        bail!("the data segment may have less than 16 MiB here; start stockade with a higher limit (ulimit -d)");
    }
    Ok(())
}

/// What was asked for could not be done or, for all its caller knows, was not. Where the reader
/// of the answer has gone (`| head`) this ends as a program that SIGPIPE ends.
fn failed(error: &anyhow::Error) -> ExitCode {
    failed_with(SANDBOX_ERROR, error)
}

/// The same with another status.
fn failed_with(status: u8, error: &anyhow::Error) -> ExitCode {
    if error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe) {
        return ExitCode::from(PIPE_CLOSED);
    }
    warn_of_error(error);
    ExitCode::from(status)
}

/// Whether the first word is `exec`, of which an error is a result as well.
fn is_exec() -> bool {
    std::env::args_os().nth(1).is_some_and(|first| first == "exec")
}

/// A limit of the caller's leaves this program too little to work with.
fn refused_by_limits(why: &anyhow::Error) -> ExitCode {
    if !is_exec() {
        return failed(why);
    }
    let report = Report::refused(Verdict::SandboxError, "limits_of_caller", format!("{why:#}"));
    print_report(&report).unwrap_or_else(|error| failed(&error))
}

/// Help goes to stdout; an error of `exec` is a result as well.
fn usage(error: &clap::Error) -> ExitCode {
    let asked_for = matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
    if !asked_for && is_exec() {
        let message = error.render().to_string();
        let report = Report::refused(Verdict::BadRequest, "usage", message.trim_end().to_owned());
        return print_report(&report).unwrap_or_else(|error| failed(&error));
    }
    match error.print() {
        Err(error) if asked_for && error.kind() == io::ErrorKind::BrokenPipe => ExitCode::from(PIPE_CLOSED),
        // Where both streams are closed there is nowhere to print it.
        _ => ExitCode::from(if asked_for { 0 } else { USAGE_ERROR }),
    }
}

impl From<&Sandbox> for Options {
    fn from(sandbox: &Sandbox) -> Self {
        Options {
            policy: sandbox.policy.clone(),
            scratch: sandbox.scratch.clone(),
            interpreters: sandbox.runtimes.clone(),
            image: sandbox.image.clone(),
            allow: sandbox.allow.clone(),
            ends_with: if sandbox.outlive_caller { Arc::default() } else { waiting().into() },
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
    if let Some(server) = &exec.server {
        return remote::exec(server, exec);
    }
    let (options, form) = (Options::from(&exec.sandbox), ResultForm::from(exec));
    let mut stdout = AnswerStdout::new(Arc::clone(&options.ends_with));
    warn_of_keys(&exec.sandbox);
    warn_of_terminal();
    let read = admit::read_request(AwaitedStdin { callers: &options.ends_with }).and_then(|bytes| match &exec.approve {
        Some(token) => approve::into_request(bytes, token),
        None => Ok(bytes),
    });
    let bytes = match read {
        Ok(bytes) => bytes,
        Err(refusal) => return result::print(form, &stockade_engine::refuse(&refusal, &options), &mut stdout),
    };
    if exec.plan.dry_run {
        let planned = admit::parse_request(&bytes).and_then(|request| stockade_engine::plan(Origin::Request(&request), &options));
        return match planned {
            Ok(plan) => dry_run::print(&plan, exec.plan.json),
            Err(refusal) => print_report(&refusal.report()),
        };
    }
    if let Some(socket) = &exec.socket {
        return ask(socket, &bytes, form, stdout);
    }
    let report = stockade_engine::exec_for(&bytes, &options, Some(&mut stdout));
    if !exec.quiet {
        warn_of_degraded(&report);
    }
    warn_of_audit(&report);
    result::print(form, &report, &mut stdout)
}

/// Says what `exec` waits for, where a person may have meant another command.
fn warn_of_terminal() {
    if io::stdin().is_terminal() {
        warn("stockade: exec reads a JSON request from this terminal, up to Ctrl-D; to run a script: stockade run script.py");
    }
}

/// A model's reply in place of a request: a companion reads it, and has this program run
/// its blocks in a session.
fn exec_markdown(exec: &args::Exec) -> anyhow::Result<ExitCode> {
    let flags = [(exec.last, "--last"), (exec.text, "--text"), (true, "--")];
    let mut arguments: Vec<OsString> = flags.iter().filter(|(given, _)| *given).map(|(_, flag)| flag.into()).collect();
    arguments.extend(exec.sandbox.to_arguments());
    arguments.extend(exec.quiet.then(|| "--quiet".into()));
    // The session ends with the reply, and what waits in it could never be run.
    arguments.extend(args::ApprovedBy::NoOne.to_arguments());
    match companion::become_companion("stockade-markdown", exec.sandbox.outlive_caller, arguments) {
        Ok(never) => match never {},
        Err(error) => print_report(&Report::refused(Verdict::SandboxError, "companion_missing", format!("{error:#}"))),
    }
}

/// The same by way of a socket.
fn ask(socket: &Path, request: &[u8], form: ResultForm, mut stdout: AnswerStdout) -> anyhow::Result<ExitCode> {
    let answer = match stockade_server::socket::ask(socket, request, &mut stdout) {
        Ok(answer) => answer,
        Err(report) => return result::print(form, &report, &mut stdout),
    };
    answer.degraded.iter().for_each(|(layer, detail)| warn_of(layer, detail, &answer.unenforced));
    answer.unrecorded.iter().for_each(|failure| warn_of_record(failure));
    result::print_line(form, &answer.line, answer.started, &answer.verdict, &mut stdout)
}

/// Exits with 0 for every connection that was answered; stderr is the journal.
fn serve_connection(serve: &args::ServeOne) -> anyhow::Result<ExitCode> {
    let options = Options { policy: serve.policy.clone(), scratch: serve.scratch.clone(), ..Options::default() };
    let served = stockade_server::socket::serve(io::stdin().as_fd().try_clone_to_owned()?, options, serve.per_user)?;
    let verdict = serde_json::to_value(served.verdict)?;
    let reason = served.reason.map(|reason| format!(" ({reason})")).unwrap_or_default();
    let verdict = verdict.as_str().unwrap_or_default();
    let untaken = served.taken.err().map(|error| format!("; its result was not taken: {error}")).unwrap_or_default();
    warn(&format!("uid {}, pid {}, policy {}: {verdict}{reason}{untaken}", served.uid, served.pid, served.policy));
    Ok(ExitCode::SUCCESS)
}

/// A session that began and was closed exits with 0, whatever its requests did.
fn serve_session(session: &args::Session) -> anyhow::Result<ExitCode> {
    let options = Options { approved_by: session.approved_by.into(), ..Options::from(&session.options.sandbox) };
    warn_of_keys(&session.options.sandbox);
    let quiet = session.quiet;
    let told = RefCell::new(BTreeSet::new());
    let ended = stockade_server::session::serve(options, |report| {
        for (layer, detail) in degraded(report) {
            // Once for a session: every receipt has it.
            if !quiet && told.borrow_mut().insert((layer, detail.to_owned())) {
                warn_of(layer, detail, &report.limits_unenforced);
            }
        }
        warn_of_audit(report);
    })?;
    Ok(match ended {
        SessionEnd::Closed => ExitCode::SUCCESS,
        SessionEnd::Refused(Verdict::BadRequest) => ExitCode::from(USAGE_ERROR),
        SessionEnd::Refused(_) => ExitCode::from(SANDBOX_ERROR),
        SessionEnd::Signal(signal) => ExitCode::from(u8::try_from(128 + signal).unwrap_or(SANDBOX_ERROR)),
        SessionEnd::OutputClosed => return Err(anyhow::anyhow!("the reader of the session's answers has gone")),
    })
}

/// The companion takes this process's place, and starts a session as its child. Its tokens
/// are read by a model, which must not approve itself.
fn serve_mcp(options: &args::SessionOptions) -> anyhow::Result<ExitCode> {
    let approved_by = args::ApprovedBy::Approvers.to_arguments();
    let arguments = options.sandbox.to_arguments().into_iter().chain(approved_by);
    match companion::become_companion("stockade-mcp", options.sandbox.outlive_caller, arguments)? {}
}

/// Prints that code gets the keys of a person or a service with its scratch. What is a home is
/// refused, if it is an account's.
fn warn_of_keys(sandbox: &Sandbox) {
    const KEYS: [&str; 9] = [".ssh", ".gnupg", ".aws", ".azure", ".kube", ".docker", ".password-store", ".config/gcloud", ".config/gh"];
    let Some(scratch) = &sandbox.scratch else { return };
    let find = || {
        let real = scratch.canonicalize().ok()?;
        let lies_in = |keys: &&str| real.ancestors().any(|above| above.ends_with(keys));
        KEYS.iter()
            .find(|keys| lies_in(keys))
            .map(|_| real.clone())
            .or_else(|| KEYS.iter().map(|keys| real.join(keys)).find(|keys| keys.is_dir()))
    };
    if let Ok(Some(keys)) = stockade_engine::with_callers_rights(find) {
        warn(&format!(
            "stockade: code can read the keys in {}, and change them unless the policy forbids it; use a directory without keys",
            keys.display()
        ));
    }
}

/// Prints missing layers to stderr too, where a person sees them.
fn warn_of_degraded(report: &Report) {
    degraded(report).for_each(|(layer, detail)| warn_of(layer, detail, &report.limits_unenforced));
}

/// The same once for each user and start of the host.
fn warn_of_degraded_once(report: &Report) {
    let layers: Vec<&str> = degraded(report).map(|(layer, _)| layer).collect();
    if !layers.is_empty() && stockade_engine::notice::is_due(&layers) {
        warn_of_degraded(report);
    }
}

/// The layers that a run was without, each with the reason.
fn degraded(report: &Report) -> impl Iterator<Item = (&'static str, &str)> {
    let layers = report.receipt.iter().flat_map(|receipt| &receipt.layers);
    layers.filter(|layer| layer.known == stockade_protocol::Known::Degraded).map(|layer| (layer.layer, layer.detail.as_str()))
}

/// Prints to stderr that a run is not in the audit log.
fn warn_of_audit(report: &Report) {
    if let Some(failure) = report.audit.as_ref().and_then(|audit| audit.failure.as_ref()) {
        warn_of_record(failure);
    }
}

fn warn_of_record(failure: &str) {
    warn(&format!("stockade: not in the audit log: {failure}"));
}

/// What follows for an ordinary user's runs, or else the cause: all of both is in the receipt and
/// in `doctor`. Only a cgroup enforces what may be `unenforced`.
fn warn_of(layer: &str, detail: &str, unenforced: &[impl AsRef<str>]) {
    let why = match layer {
        "cgroup" => "the memory of all processes is added up, CPU time is limited for each",
        _ => detail.split("; ").next().unwrap_or_default(),
    };
    let open = match unenforced {
        [_, ..] if layer == "cgroup" => format!("; not enforced: {}", unenforced.iter().map(AsRef::as_ref).collect::<Vec<_>>().join(", ")),
        _ => String::new(),
    };
    warn(&format!("stockade: running without `{layer}`: {why}{open} (more: stockade doctor)"));
}

fn print_report(report: &Report) -> anyhow::Result<ExitCode> {
    result::print(ResultForm::Line, report, &mut AnswerStdout::new(Arc::default()))
}

/// Says that the code ran, though what came of it is lost. The status of this program.
fn unwritten(error: &anyhow::Error, verdict: &str) -> ExitCode {
    tell(error, &format!("stockade: the code ran ({verdict}), and what came of it is lost: {error:#}"));
    ExitCode::from(UNWRITTEN)
}

fn show_version(json: bool) -> anyhow::Result<ExitCode> {
    let version = env!("CARGO_PKG_VERSION");
    if json {
        let features = [
            "exec",
            "exec-socket",
            "exec-markdown",
            "exec-server",
            "run",
            "bwrap",
            "session",
            "mcp",
            "serve",
            "shim",
            "runtimes",
            "image",
            "policy",
            "grants",
            "key",
            "doctor",
            "prove",
            "audit",
            "ps",
            "kill",
            "screen",
            "approve",
        ];
        print_text(&serde_json::json!({ "version": version, "schema": 1, "features": features }).to_string())?;
    } else {
        print_text(&format!("stockade {version}"))?;
    }
    Ok(ExitCode::SUCCESS)
}
