//! `stockade run`: a script, code or a command, with its streams passed through.
//!
//! A script outside the scratch is sent as a request's code is; one in the scratch is run where it
//! lies. Files are read and written with the caller's rights. `engine` decides what is run.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs::{self, File, Metadata},
    io::{Read, Write},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use anyhow::{Context, anyhow, bail};
use base64::{Engine, prelude::BASE64_STANDARD};
use rustix::fs::{Mode, OFlags, fcntl_getfl, fcntl_setfl, openat};
use stockade_engine::{
    CommandResult, MAX_REQUEST, OUTPUT_UNWRITABLE, Options, Origin, Refusal, RunSettings, caller::AwaitedStdin, is_interactive, open_file,
    plan::find_runtime, runs::EntryPoint, with_callers_rights,
};
use stockade_policy::model::Runtime;
use stockade_protocol::{Base64, LimitKey, Report, Request, TextOrBase64, Verdict};

use crate::{
    ExitCode, SANDBOX_ERROR, UNWRITTEN, USAGE_ERROR, args,
    collected::Destination,
    dry_run,
    output::{warn, warn_of_error},
    unwritten, warn_of_audit, warn_of_degraded_once, warn_of_keys,
};

/// The word that stands for code on stdin.
const STDIN: &str = "-";
/// Names of files that stockade itself gives.
const OWN_PREFIX: &str = "stockade_";

pub(crate) fn run(run: &args::Run) -> anyhow::Result<ExitCode> {
    let options = Options::from(&run.sandbox);
    warn_of_keys(&run.sandbox);
    let settings = RunSettings { limits: limits(&run.limits), collect: run.collect.clone() };
    let program = match Program::of(run, &options, &settings) {
        Ok(program) => program,
        Err(error) => {
            warn_of_error(&error);
            return Ok(ExitCode::from(USAGE_ERROR));
        }
    };
    program.swallowed(run).iter().for_each(|line| warn(line));
    let origin = program.origin(&settings);
    if run.plan.dry_run {
        return match stockade_engine::plan(origin, &options) {
            Ok(plan) => dry_run::print(&plan, run.plan.json),
            Err(refusal) => Ok(ExitCode::from(refuse(&refusal))),
        };
    }
    let scratch = options.scratch.as_deref();
    let into = if run.collect.is_empty() { None } else { Some(destination(run, scratch)?) };
    let report_file = run.report.as_deref().map(|path| open_report(path, scratch)).transpose()?;
    let (report, code) = match stockade_engine::run(origin, &options, run.report.is_some()) {
        Ok(result) => {
            let (report, code) = ended_command(result);
            explain(&report);
            (report, code)
        }
        Err(refusal) => {
            let status = refused_command(&refusal);
            if refusal.exec_errno.is_some()
                && let Program::Command(words) = &program
                && let Some(why) = words.first().and_then(|first| with_callers_rights(|| without_language(Path::new(first))).ok().flatten())
            {
                warn(&format!("stockade: {why}"));
            }
            (Report { output: None, code: status.into(), ..refusal.report() }, ExitCode::from(status))
        }
    };
    if !run.quiet {
        warn_of_degraded_once(&report);
        refused_lines(&report).iter().for_each(|line| warn(line));
    }
    warn_of_audit(&report);
    let kept = into.as_ref().map_or(Ok(()), |into| keep(&report, into, run));
    let reported = match (report_file, &run.report) {
        (Some(file), Some(path)) => write_report(file, path, &report).with_context(|| format!("write the report to {}", path.display())),
        _ => Ok(()),
    };
    let written = match (kept, reported) {
        (Err(of_files), Err(of_report)) => Err(anyhow!("{of_files:#}; {of_report:#}")),
        (kept, reported) => kept.and(reported),
    };
    match written {
        Err(error) if report.started => Ok(unwritten(&error, &verdict_and_code(&report)?)),
        written => written.map(|()| code),
    }
}

/// The limits of the command line under their names in a request.
pub(crate) fn limits(given: &args::RunLimits) -> BTreeMap<String, stockade_protocol::LimitValue> {
    let args::RunLimits { timeout, memory, processes, cpus } = given;
    let all = [(LimitKey::Wall, timeout), (LimitKey::Memory, memory), (LimitKey::Processes, processes), (LimitKey::Cpus, cpus)];
    all.into_iter().filter_map(|(key, value)| Some((key.name().to_owned(), value.clone()?))).collect()
}

/// What the words of a command line mean.
enum Program {
    Command(Vec<String>),
    /// Code that is sent.
    Code(Box<Request>),
    /// A script that the scratch shows: the runtime, then the script and its arguments.
    Script(String, Vec<String>),
}

impl Program {
    /// What is to be run. A first word that is a file with a runtime's ending is a script. Where the
    /// policy or the caller is refused it is a command: `engine` then refuses the run for the same
    /// reason, and writes that down.
    ///
    /// # Errors
    /// The script is not there or cannot be read.
    fn of(run: &args::Run, options: &Options, settings: &RunSettings) -> anyhow::Result<Self> {
        let request = |code: TextOrBase64, language: Option<String>, filename: Option<String>, args: &[String]| {
            let RunSettings { limits, collect } = settings.clone();
            Program::Code(Box::new(Request { code, language, filename, args: args.to_vec(), limits, collect, ..Request::default() }))
        };
        if let Some(code) = &run.code {
            return Ok(request(code.clone().into(), run.language.clone(), None, &run.words));
        }
        let command = || Ok(Program::Command(run.words.clone()));
        let Some((first, arguments)) = run.words.split_first() else { return command() };
        if first == STDIN {
            let code = script(AwaitedStdin { callers: &options.ends_with }, "the code on stdin")?;
            return Ok(request(code, run.language.clone(), None, arguments));
        }
        let path = Path::new(first);
        let language = match &run.language {
            Some(language) => Some(language.clone()),
            None if path.extension().is_none() => None,
            None => stockade_engine::load_policy(options).ok().and_then(|loaded| runtime_of(path, &loaded.policy.runtimes)),
        };
        let Some(language) = language else { return command() };
        let Ok(is_file) = with_callers_rights(|| path.is_file()) else { return command() };
        if !is_file && run.language.is_none() {
            // A scratch may hold one, and PATH has programs with the ending of a script.
            if options.scratch.is_some() || options.image.is_some() || is_on_path(first, options)? {
                return command();
            }
            bail!("there is no file {first}{}", if path.is_absolute() { "" } else { " in this directory" });
        }
        let scratch = options.scratch.as_deref();
        let (file, real) = open_script(path, scratch).with_context(|| format!("open the script {first}"))?;
        let is_inside = with_callers_rights(|| scratch.and_then(|scratch| scratch.canonicalize().ok()))?
            .is_some_and(|scratch| real.starts_with(scratch));
        // A compiler gets the text of a file, since no interpreter opens the file itself.
        let loaded = stockade_engine::load_policy(options).ok();
        let is_compiled = loaded.is_some_and(|loaded| find_runtime(&loaded.policy, &language).is_ok_and(|(_, runtime)| runtime.compiles()));
        if let Some(inside) = real.to_str().filter(|_| is_inside && !is_compiled) {
            let words = std::iter::once(inside.to_owned()).chain(arguments.iter().cloned()).collect();
            return Ok(Program::Script(language, words));
        }
        let code = script(file, first)?;
        // Beside the files of a host directory the code has a name that nothing else has.
        let name = path.file_name().and_then(|name| name.to_str()).map(str::to_owned);
        let name = name.filter(|name| options.scratch.is_none() && !name.starts_with(OWN_PREFIX));
        Ok(request(code, Some(language), name, arguments))
    }

    /// Options of this command that stand behind a script, and so are its arguments. Behind a `--`
    /// they are meant to be.
    fn swallowed(&self, run: &args::Run) -> Vec<String> {
        let Some((script, arguments)) = run.words.split_first() else { return Vec::new() };
        let is_command = matches!(self, Program::Command(_)) || run.code.is_some();
        let typed: Vec<OsString> = std::env::args_os().collect();
        let before = typed.len().checked_sub(run.words.len() + 1).and_then(|at| typed.get(at));
        if is_command || before.is_some_and(|word| word == "--") {
            return Vec::new();
        }
        let own = args::long_options("run");
        let option = |word: &String| word.strip_prefix("--").map(|rest| rest.split('=').next().unwrap_or(rest).to_owned());
        let found = arguments.iter().take_while(|word| *word != "--").filter_map(option).filter(|name| own.contains(name));
        found
            .map(|name| format!("stockade: `--{name}` goes to {script}; for stockade write it before {script}, or write `--` before {script} to say that it is meant so"))
            .collect()
    }

    fn origin<'a>(&'a self, settings: &'a RunSettings) -> Origin<'a> {
        let terminal = is_interactive();
        match self {
            Program::Command(command) => Origin::Command { command, settings, terminal, view: None },
            Program::Code(request) => Origin::Script { request, terminal },
            Program::Script(runtime, arguments) => {
                let environment = &NO_VARIABLES;
                Origin::Interpreter { via: EntryPoint::Run, runtime, arguments, environment, alias: None, settings, terminal }
            }
        }
    }
}

static NO_VARIABLES: BTreeMap<String, String> = BTreeMap::new();

/// The runtime whose ending a file's name has.
fn runtime_of(path: &Path, runtimes: &BTreeMap<String, Runtime>) -> Option<String> {
    let ending = path.extension()?.to_str()?;
    runtimes.iter().find(|(_, runtime)| runtime.extension == ending).map(|(name, _)| name.clone())
}

/// Why a file that is no runtime's by its ending is not run either. None: it is no file, or a program.
fn without_language(path: &Path) -> Option<String> {
    const EXECUTABLE: u32 = 0o111;
    if !fs::metadata(path).is_ok_and(|found| found.is_file() && found.mode() & EXECUTABLE == 0) {
        return None;
    }
    let of_what = path.extension().map_or_else(|| String::from("it"), |ending| format!(".{}", ending.display()));
    Some(format!("{}: no language for {of_what}; use --language, or make it executable", path.display()))
}

/// Whether a word is a program's name where the policy's PATH leads.
fn is_on_path(word: &str, options: &Options) -> Result<bool, Refusal> {
    if word.contains('/') {
        return Ok(false);
    }
    let loaded = stockade_engine::load_policy(options)?;
    let path = loaded.policy.environment.set.get("PATH").map_or("", String::as_str);
    with_callers_rights(|| path.split(':').any(|directory| Path::new(directory).join(word).is_file()))
}

/// Opens a script, through no link but root's and none in the scratch: code could have left one that
/// leads to any file of the caller. With its path without links.
fn open_script(path: &Path, scratch: Option<&Path>) -> anyhow::Result<(File, PathBuf)> {
    let whole = std::path::absolute(path)?;
    let (file, real) = with_callers_rights(|| open_file(&whole, scratch))?.map_err(|error| anyhow!(error.problem))?;
    let file = File::from(file);
    if !file.metadata()?.is_file() {
        bail!("it is no regular file; `{STDIN}` reads code from stdin");
    }
    Ok((file, real))
}

/// A script, no larger than a request may be; in base64 if it is no text, as a module of WebAssembly.
fn script(from: impl Read, name: &str) -> anyhow::Result<TextOrBase64> {
    let mut bytes = Vec::new();
    from.take(MAX_REQUEST as u64 + 1).read_to_end(&mut bytes).with_context(|| format!("read {name}"))?;
    if bytes.len() > MAX_REQUEST {
        bail!("{name} is larger than 64 MiB");
    }
    Ok(match String::from_utf8(bytes) {
        Ok(text) if !text.contains('\0') => TextOrBase64::Text(text),
        Ok(text) => TextOrBase64::Base64(Base64 { base64: BASE64_STANDARD.encode(text) }),
        Err(error) => TextOrBase64::Base64(Base64 { base64: BASE64_STANDARD.encode(error.as_bytes()) }),
    })
}

/// Where collected files go.
fn destination<'a>(run: &args::Run, scratch: Option<&'a Path>) -> anyhow::Result<Destination<'a>> {
    let into = run.into.as_deref().map_or_else(|| args::from_here(Path::new("collected")), |into| Ok(into.to_path_buf()));
    Destination::open(into.map_err(|error| anyhow!(error))?, scratch, run.overwrite)
}

/// Writes the files that were collected, and says where.
fn keep(report: &Report, into: &Destination<'_>, run: &args::Run) -> anyhow::Result<()> {
    if report.files.is_empty() {
        if report.started && !run.quiet {
            warn(&format!("stockade: no file in scratch matches --collect {}", run.collect.join(" or ")));
        }
        return Ok(());
    }
    let kept = into.keep(&report.files)?;
    kept.left_out.iter().for_each(|why| warn(&format!("stockade: left out {why}")));
    if !run.quiet {
        let files = if kept.written == 1 { "file is" } else { "files are" };
        warn(&format!("stockade: {} {files} in {}", kept.written, into.path().display()));
    }
    into.check(&kept)
}

/// What ended a run, in words for a person.
fn verdict_and_code(report: &Report) -> anyhow::Result<String> {
    let verdict = serde_json::to_value(report.verdict)?;
    Ok(format!("{}, status {}", verdict.as_str().unwrap_or_default(), report.code))
}

/// The report of a command that was started, and the status of this program.
pub(crate) fn ended_command(result: CommandResult) -> (Report, ExitCode) {
    let CommandResult { mut report, code } = result;
    if report.started && report.reason.as_deref() == Some(OUTPUT_UNWRITABLE) {
        report.code = UNWRITTEN.into();
        return (report, ExitCode::from(UNWRITTEN));
    }
    (report, command_status(code))
}

/// A command's status as this program's own.
fn command_status(code: i32) -> ExitCode {
    ExitCode::from(u8::try_from(code & 0xff).unwrap_or(SANDBOX_ERROR))
}

/// Says why a command was not started. The status of this program.
pub(crate) fn refused_command(refusal: &Refusal) -> u8 {
    const NOT_EXECUTABLE: u8 = 126;
    const NOT_FOUND: u8 = 127;
    const ENOENT: i32 = 2;
    let status = refuse(refusal);
    match refusal.exec_errno {
        Some(ENOENT) => NOT_FOUND,
        Some(_) => NOT_EXECUTABLE,
        None => status,
    }
}

/// What the compiler said, where there is no program, and one line for a person, where something other
/// than the command ended it.
pub(crate) fn explain(report: &Report) {
    if let (false, Some(compile)) = (report.started, &report.compile) {
        let said = [&compile.output.0, &compile.error.0].into_iter().map(|said| said.trim_end());
        said.filter(|said| !said.is_empty()).for_each(warn);
        warn(&format!("stockade: the code does not compile: {}", verdict_and_code(report).unwrap_or_default()));
    }
    let why = match report.verdict {
        Verdict::WallTimeout => "the wall clock ran out",
        Verdict::CpuTimeout => "its CPU time ran out",
        Verdict::OutOfMemory => "it ran out of memory",
        Verdict::DiskLimit if report.reason.is_some() => "a directory in scratch could not be counted (stockade help reasons)",
        Verdict::DiskLimit => "scratch or tmp is full",
        Verdict::ProcessLimit => "it reached the process limit",
        Verdict::OutputLimit => "it printed too much",
        Verdict::SyscallDenied => "it made a system call for which the policy kills",
        Verdict::SandboxError if report.started => &format!("the command had begun, and was ended: {}", report.error.0),
        Verdict::Screened | Verdict::SandboxError => &report.error.0,
        _ => return,
    };
    warn(&format!("stockade: {why}"));
}

/// One line for each refusal that is certain: the first few peers and, of a program that failed,
/// system calls. Limits have their own line, and hints are guesses.
fn refused_lines(report: &Report) -> Vec<String> {
    const MAX_LINES: usize = 3;
    let mut all: Vec<String> = Vec::new();
    for denied in &report.egress.denied {
        let Some(host) = denied.host.as_ref().or(denied.addr.as_ref()) else { continue };
        let peer = denied.port.map_or_else(|| host.clone(), |port| format!("{host}:{port}"));
        let opened = denied.allow.as_ref().map(|rule| format!(" (--allow {rule} would open it)")).unwrap_or_default();
        let line = format!("stockade: refused {peer}{opened}");
        if !all.contains(&line) {
            all.push(line);
        }
    }
    let calls = report.denials.iter().filter(|denial| denial.kind == "syscall" && !denial.hint && !report.success);
    all.extend(calls.map(|denial| format!("stockade: refused the system call {} ({})", denial.what, denial.answer)));
    let more = all.len().saturating_sub(MAX_LINES);
    all.truncate(MAX_LINES);
    if more > 0 {
        all.push(format!("stockade: refused {more} more; --report FILE has all"));
    }
    all
}

pub(crate) fn refuse(refusal: &Refusal) -> u8 {
    warn(&format!("stockade: {refusal}"));
    if refusal.verdict == Verdict::BadRequest { USAGE_ERROR } else { SANDBOX_ERROR }
}

/// Before the run, and through no link but root's and none in the scratch: the file may lie where
/// the code can write, and would be led to anything that the caller may overwrite.
fn open_report(path: &Path, scratch: Option<&Path>) -> anyhow::Result<File> {
    let whole = std::path::absolute(path)?;
    let (Some(parent), Some(name)) = (whole.parent(), whole.file_name()) else { bail!("{} is no file's name", path.display()) };
    // Opening a fifo without a reader would block before signals are handled.
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    // With the caller's rights: root must not write files that the caller could not.
    let file = stockade_engine::with_callers_rights(|| -> anyhow::Result<File> {
        let directory = stockade_engine::open_directory(parent, scratch).map_err(|error| anyhow!(error.problem))?;
        Ok(openat(&directory, name, flags, Mode::from_raw_mode(0o666))?.into())
    })?
    .with_context(|| format!("open {}, which must not be a symlink, nor a fifo without a reader", path.display()))?;
    // Its reader may be slow.
    let blocking = fcntl_getfl(&file).and_then(|flags| fcntl_setfl(&file, flags - OFlags::NONBLOCK));
    blocking.with_context(|| format!("wait for the reader of {}", path.display()))?;
    Ok(file)
}

fn write_report(file: File, path: &Path, report: &Report) -> anyhow::Result<()> {
    let mut text = serde_json::to_vec(report)?;
    text.push(b'\n');
    let opened = file.metadata()?;
    write_into(file, &text)?;
    let same = |found: Metadata| (found.dev(), found.ino()) == (opened.dev(), opened.ino());
    if stockade_engine::with_callers_rights(|| fs::symlink_metadata(path))?.is_ok_and(same) {
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
