//! The form of a request: size, JSON, and the value of each field.
//!
//! Nothing of the host is read here. An error names the field, what is wrong with it and how
//! to fix it. Whether the caller may have what it asks for is not checked here.

use std::{collections::BTreeMap, io::Read, path::Path};

use base64::{Engine, prelude::BASE64_STANDARD};
use rustix::{io::Errno, rand::GetRandomFlags};
use stockade_launcher::registry::PROGRAM_PREFIX;
use stockade_policy::{
    model::Policy,
    plan::{MAIN, Plan, Program, RunRequest, find_runtime},
};
use stockade_protocol::{LimitError, LimitKey, LimitValue, MAX_REQUEST, NO_TEMPLATE, Request, TextOrBase64, Verdict};

use super::{FileBytes, Origin, RunSettings, StdinBytes};
use crate::{Options, Refusal, RefusalCause};

/// Files that one request may bring.
const MAX_FILES: usize = 10_000;
/// Patterns of one request: the launcher compares each with every file of scratch, when no limit
/// of the run holds any more.
const MAX_PATTERNS: usize = 256;
/// The longest path that the kernel takes.
const MAX_PATH_LEN: usize = 4095;
/// The most strings that execve(2) gets, of arguments and variables together.
const MAX_STRINGS: usize = 4096;

/// Why a request or a command cannot be meant.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RequestError {
    #[error("the request cannot be read: {0}")]
    Unreadable(std::io::Error),
    #[error("the request is larger than 64 MiB; put large files into scratch and name the directory instead")]
    TooLarge,
    #[error("no request: the input was empty; send one JSON object such as {{\"code\": \"print(6*7)\"}}")]
    Empty,
    #[error("the request is no JSON{place}: {error}; it begins with {begin:?}; a program is run by `stockade run script.py`")]
    NotJson { place: String, error: serde_json::Error, begin: String },
    #[error("the request is malformed{place}: {error}{guess}")]
    Malformed { place: String, error: serde_json::Error, guess: &'static str },
    #[error(
        "the request is a list, and must be one JSON object such as {{\"code\": \"print(6*7)\"}}; several are run by `stockade session`, one on a line"
    )]
    List,
    #[error("one JSON object is expected, but more follows it: {0}")]
    Trailing(serde_json::Error),
    #[error("{0}: not standard base64 with padding: {1}")]
    Base64(String, base64::DecodeError),
    #[error("files: policy `{0}` shows scratch read-only (access = \"ro\"), so none can be written there")]
    ReadOnlyScratch(String),
    #[error("the command is empty or holds a NUL byte")]
    Command,
    #[error(
        "code: a NUL byte cannot stand in a program's text; write it as an escape of the language, such as \\0, or send a binary program as {{\"base64\": …}}"
    )]
    NulInCode,
    #[error("args[{0}]: an argument cannot hold a NUL byte")]
    NulInArgument(usize),
    #[error("env: {0:?}: a variable's name holds no `=`, and neither name nor value a NUL byte")]
    Variable(String),
    #[error("files: at most {MAX_FILES} in one request; put them into scratch instead")]
    TooManyFiles,
    #[error("collect: at most {MAX_PATTERNS} patterns; put the files into one directory, and name it as `out/**`")]
    TooManyPatterns,
    #[error("{0}: at most {MAX_STRINGS} strings, 1 MiB together, 127 KiB each; put data into `stdin` or `files`")]
    ArgumentsTooLarge(String),
    #[error("{field}: {path:?}: {why}")]
    Path { field: String, path: String, why: String },
    #[error("filename: {0:?}: {1}")]
    Filename(String, &'static str),
    #[error("template: {0:?} was made on the host, and no copy of it can run in an image; leave `template` out, or `image`")]
    TemplateInImage(String),
    #[error("template: {asked:?} is no template of the runtime `{runtime}`; {known}")]
    Template { asked: String, runtime: String, known: String },
    #[error("{field}: there is no limit `{name}`{near}; there are {known}")]
    UnknownLimit { field: &'static str, name: String, near: String, known: String },
    #[error("{field}.{name}: got {value}; {error}")]
    Limit { field: &'static str, name: String, value: String, error: LimitError },
    #[error("the kernel gives no random bytes: {0}; a filter over the launcher must let it call getrandom(2)")]
    Randomness(Errno),
}

impl RefusalCause for RequestError {
    fn verdict_and_reason(&self) -> (Verdict, &'static str) {
        let reason = match self {
            RequestError::Unreadable(_) => "request_unreadable",
            RequestError::TooLarge => "request_too_large",
            RequestError::Empty => "request_empty",
            RequestError::NotJson { .. } | RequestError::Trailing(_) => "request_not_json",
            RequestError::Malformed { .. } | RequestError::List => "request_malformed",
            RequestError::Base64(..) => "base64_malformed",
            RequestError::ReadOnlyScratch(_) => "files_in_read_only_scratch",
            RequestError::Command => "command_malformed",
            RequestError::NulInCode => "code_holds_nul",
            RequestError::NulInArgument(_) => "args_malformed",
            RequestError::Variable(_) => "env_malformed",
            RequestError::TooManyFiles => "too_many_files",
            RequestError::TooManyPatterns => "too_many_patterns",
            RequestError::ArgumentsTooLarge(_) => "arguments_too_large",
            RequestError::Path { .. } => "path_malformed",
            RequestError::Filename(..) => "filename_malformed",
            RequestError::TemplateInImage(_) => "template_in_image",
            RequestError::Template { .. } => "template_unknown",
            RequestError::UnknownLimit { .. } => "unknown_limit",
            RequestError::Limit { .. } => "limit_malformed",
            RequestError::Randomness(_) => return (Verdict::SandboxError, "no_randomness"),
        };
        (Verdict::BadRequest, reason)
    }
}

/// Reads a request from a stream, up to its largest size.
///
/// # Errors
/// It is too large, or the stream fails.
pub fn read_request(input: impl Read) -> Result<Vec<u8>, Refusal> {
    let mut bytes = Vec::new();
    let read = input.take(MAX_REQUEST as u64 + 1).read_to_end(&mut bytes);
    read.map_err(RequestError::Unreadable)?;
    if bytes.len() > MAX_REQUEST {
        return Err(RequestError::TooLarge.into());
    }
    Ok(bytes)
}

/// Parses a request.
///
/// # Errors
/// It is not one JSON object of the contract; the message has line and column.
pub fn parse_request(bytes: &[u8]) -> Result<Request, Refusal> {
    if bytes.len() > MAX_REQUEST {
        return Err(RequestError::TooLarge.into());
    }
    if bytes.trim_ascii().is_empty() {
        return Err(RequestError::Empty.into());
    }
    // A list would be read as the fields in their order.
    if bytes.trim_ascii_start().starts_with(b"[") {
        return Err(RequestError::List.into());
    }
    let mut deserializer = serde_json::Deserializer::from_slice(bytes);
    let request = serde_path_to_error::deserialize(&mut deserializer).map_err(|error| {
        let path = error.path().to_string();
        let inner = error.into_inner();
        let place = if path == "." || path == "?" { String::new() } else { format!(" at `{path}`") };
        if inner.is_syntax() || inner.is_eof() {
            let begin = String::from_utf8_lossy(bytes.trim_ascii_start()).chars().take(MAX_BEGIN).collect();
            return RequestError::NotJson { place, error: inner, begin };
        }
        let guess = guess(&inner);
        RequestError::Malformed { place, error: inner, guess }
    })?;
    deserializer.end().map_err(RequestError::Trailing)?;
    Ok(request)
}

/// Fields that callers of other tools expect, and what is to be written here.
const GUESSES: &[(&[&str], &str)] = &[
    (&["timeout", "timeout_s", "timeout_ms", "timeout_seconds", "time_limit", "wall"], r#"; write "limits": {"wall": "10s"}"#),
    (&["memory", "mem", "memory_limit", "memory_mb"], r#"; write "limits": {"memory": "512MiB"}"#),
    (&["cpu", "cpus", "cpu_limit"], r#"; write "limits": {"cpus": 2}"#),
    (&["processes", "pids"], r#"; write "limits": {"processes": 64}"#),
    (
        &["network", "internet", "allow", "allow_network", "hosts", "egress"],
        "; the policy decides what code may reach: name one that has [egress] whitelist by --policy, or allow a peer by --allow HOST:PORT",
    ),
    (&["policy", "profile"], "; the policy is named on the command line: --policy NAME"),
    (
        &["workdir", "cwd", "dir", "directory", "working_dir", "work_dir", "workspace", "mount"],
        r#"; write "scratch": "/absolute/directory""#,
    ),
    (&["lang", "runtime", "kernel"], r#"; write "language": "python""#),
    (&["script", "source", "program", "src", "text"], r#"; write "code": "print(1)""#),
    (&["command", "cmd", "argv"], r#"; write "code" with "language": "bash", or start commands by `stockade run`"#),
    (&["arguments"], r#"; write "args": ["…"]"#),
    (&["environment", "envs", "variables"], r#"; write "env": {"NAME": "value"}"#),
    (&["input"], r#"; write "stdin": "…""#),
    (&["outputs", "output_files", "artifacts", "fetch_files"], r#"; write "collect": ["*.png"]"#),
    (&["file", "name", "file_name", "path"], r#"; write "filename": "main.py", or "files": {"data.csv": "…"}"#),
    (
        &["packages", "requirements", "dependencies", "libraries"],
        "; packages come from a virtual environment: --runtime python=VENV/bin/python",
    ),
    (&["container", "docker_image", "root"], r#"; write "image": "python:3.12", an image of the store (stockade image ls)"#),
];
/// Limits by the names that other tools have for them.
const LIMIT_GUESSES: &[(&[&str], LimitKey)] = &[
    (&["timeout", "time", "time_limit", "wall_time", "seconds"], LimitKey::Wall),
    (&["cpu_time", "cpu_seconds"], LimitKey::Cpu),
    (&["mem", "ram", "memory_limit", "memory_mb"], LimitKey::Memory),
    (&["pids", "procs", "threads", "nproc"], LimitKey::Processes),
    (&["cpu_count", "cores"], LimitKey::Cpus),
    (&["disk", "disk_size", "storage"], LimitKey::ScratchSize),
    (&["nofile", "files", "fds"], LimitKey::OpenFiles),
];
/// How much of what is no JSON an error quotes.
const MAX_BEGIN: usize = 24;

/// What to write in place of a field that there is not.
fn guess(error: &serde_json::Error) -> &'static str {
    let error = error.to_string();
    let field = error.strip_prefix("unknown field `").and_then(|rest| rest.split('`').next()).unwrap_or_default();
    GUESSES.iter().find(|(names, _)| names.contains(&field)).map_or("", |(_, what)| what)
}

/// What goes to the launcher beside the plan.
#[derive(Default)]
pub(crate) struct Parts<'a> {
    pub(super) program: FileBytes<'a>,
    pub(super) carried_program: Option<&'static [u8]>,
    pub(crate) files: Vec<(String, FileBytes<'a>)>,
    pub(crate) stdin: StdinBytes<'a>,
    pub(super) collect: Vec<String>,
}

/// The bytes of a file or of stdin, which `field` names.
///
/// # Errors
/// It is no base64.
pub fn decode<'a>(value: &'a TextOrBase64, field: &str) -> Result<FileBytes<'a>, Refusal> {
    match value {
        TextOrBase64::Text(text) => Ok(text.as_bytes().into()),
        TextOrBase64::Base64(encoded) => {
            BASE64_STANDARD.decode(&encoded.base64).map(Into::into).map_err(|error| RequestError::Base64(field.to_owned(), error).into())
        }
    }
}

impl Parts<'_> {
    /// Whether the request's files can be written where the plan has them.
    ///
    /// # Errors
    /// They cannot.
    pub(super) fn check_writable(&self, plan: &Plan) -> Result<(), Refusal> {
        if !plan.scratch.read_only || self.files.is_empty() {
            return Ok(());
        }
        Err(RequestError::ReadOnlyScratch(plan.policy.clone()).into())
    }
}

/// What is asked for: how it narrows the policy, and the bytes that go with it. `stem`: what the
/// name of the program's file begins with; none: something random.
///
/// # Errors
/// It cannot be meant.
pub(super) fn well_formed<'a>(
    origin: Origin<'a>,
    policy: &Policy,
    options: &Options,
    stem: Option<&str>,
) -> Result<(RunRequest, Parts<'a>), Refusal> {
    let has_image = options.image.is_some() || policy.filesystem.root.image.is_some();
    let mut run_request = RunRequest::default();
    let mut parts = Parts::default();
    match origin {
        Origin::Request(request) => check_request(request, policy, stem, &mut run_request, &mut parts)?,
        Origin::Script { request, terminal } => {
            check_request(request, policy, stem, &mut run_request, &mut parts)?;
            run_request.terminal = terminal;
            parts.stdin = if terminal { StdinBytes::Null } else { StdinBytes::Relay };
        }
        Origin::Command { command, settings, terminal, view } => {
            // Without a word it is an image's own.
            let is_missing = command.first().map_or(!has_image, String::is_empty);
            if is_missing || command.iter().any(|word| word.contains('\0')) {
                return Err(RequestError::Command.into());
            }
            check_size("the command", command.iter())?;
            run_request.program = Program::Command(command.to_vec());
            if let Some(view) = view {
                let set = view.environment.iter().flat_map(|(name, value)| std::iter::once(name).chain(value));
                check_size("the variables", set)?;
                run_request.view = Some(view.clone());
            }
            check_settings(settings, &mut run_request, &mut parts)?;
            run_request.terminal = terminal;
            parts.stdin = if terminal { StdinBytes::Null } else { StdinBytes::Relay };
        }
        Origin::Interpreter { via: _, runtime, arguments, environment, alias, settings, terminal } => {
            // Neither can hold a NUL byte: both came through an execve.
            check_size("the arguments and accepted variables", arguments.iter().chain(environment.keys()).chain(environment.values()))?;
            run_request.program = Program::Interpreter { runtime: runtime.to_owned() };
            run_request.arguments = arguments.to_vec();
            run_request.environment = environment.clone();
            check_settings(settings, &mut run_request, &mut parts)?;
            run_request.scratch_alias = alias.map(Path::to_path_buf);
            run_request.terminal = terminal;
            parts.stdin = if terminal { StdinBytes::Null } else { StdinBytes::Relay };
        }
        Origin::Carried(carried) => {
            run_request.program = Program::Carried(carried.name.to_owned());
            run_request.limits = carried.limits.clone();
            parts.carried_program = Some(carried.program);
            parts.stdin = StdinBytes::Bytes(carried.stdin.into());
            parts.collect = carried.collect.clone();
        }
        Origin::Template(run) => {
            check_request(run.request, policy, Some(run.stem), &mut run_request, &mut parts)?;
            let (_, runtime) = find_runtime(policy, run.request.language.as_deref().unwrap_or(&policy.language))?;
            let filename = Some(runtime.file_name(run.stem));
            run_request.program = Program::Code { language: run.request.language.clone(), filename, stem: run.stem.to_owned() };
            parts.files = run.files();
            run_request.limits = run.limits(policy);
        }
        Origin::Session { request, state } => {
            run_request.session = true;
            if let Some(request) = request {
                check_request(request, policy, stem, &mut run_request, &mut parts)?;
                state.check_request(request, &run_request, options)?;
            }
        }
    }
    Ok((run_request, parts))
}

fn check_request<'a>(
    request: &'a Request,
    policy: &Policy,
    stem: Option<&str>,
    run_request: &mut RunRequest,
    parts: &mut Parts<'a>,
) -> Result<(), Refusal> {
    if matches!(&request.code, TextOrBase64::Text(code) if code.contains('\0')) {
        return Err(RequestError::NulInCode.into());
    }
    if let Some(index) = request.args.iter().position(|argument| argument.contains('\0')) {
        return Err(RequestError::NulInArgument(index).into());
    }
    check_size("args and env", request.args.iter().chain(request.env.keys()).chain(request.env.values()))?;
    for (name, value) in &request.env {
        if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
            return Err(RequestError::Variable(name.clone()).into());
        }
    }
    if request.files.len() > MAX_FILES {
        return Err(RequestError::TooManyFiles.into());
    }
    for (path, contents) in &request.files {
        check_relative("files", path)?;
        parts.files.push((path.clone(), decode(contents, &format!("files[{path:?}]"))?));
    }
    check_collect(&request.collect)?;
    run_request.limits = parse_limits("limits", &request.limits)?;
    parse_limits("compile_limits", &request.compile_limits)?;
    run_request.arguments = request.args.clone();
    run_request.environment = request.env.clone();
    // Sought early, so that a misspelt language is refused before anything is opened.
    let (name, runtime) = find_runtime(policy, request.language.as_deref().unwrap_or(&policy.language))?;
    request.template.as_ref().map_or(Ok(()), |asked| check_template(asked, name, policy))?;
    if let (Some(asked), true) = (request.template.as_ref().filter(|asked| *asked != NO_TEMPLATE), request.image.is_some()) {
        return Err(RequestError::TemplateInImage(asked.clone()).into());
    }
    let stem = stem.map_or_else(unique_stem, |stem| Ok(stem.to_owned()))?;
    let filename = match &request.filename {
        Some(name) => Some(check_filename(name, request)?),
        None => request.files.contains_key(&runtime.file_name(MAIN)).then(|| runtime.file_name(&stem)),
    };
    run_request.program = Program::Code { language: request.language.clone(), filename, stem };
    parts.program = decode(&request.code, "code")?;
    parts.collect = request.collect.clone();
    if let Some(stdin) = &request.stdin {
        parts.stdin = StdinBytes::Bytes(decode(stdin, "stdin")?);
    }
    Ok(())
}

fn check_settings(settings: &RunSettings, run_request: &mut RunRequest, parts: &mut Parts<'_>) -> Result<(), Refusal> {
    check_collect(&settings.collect)?;
    run_request.limits = parse_limits("limits", &settings.limits)?;
    parts.collect = settings.collect.clone();
    Ok(())
}

fn check_collect(globs: &[String]) -> Result<(), Refusal> {
    if globs.len() > MAX_PATTERNS {
        return Err(RequestError::TooManyPatterns.into());
    }
    for glob in globs {
        check_relative("collect", glob)?;
        check_glob("collect", glob)?;
    }
    Ok(())
}

/// A runtime has one template at most, and a request its copy or none.
fn check_template(asked: &str, runtime: &str, policy: &Policy) -> Result<(), RequestError> {
    let known = match policy.template_of(runtime) {
        _ if asked == NO_TEMPLATE => return Ok(()),
        Some((own, _)) if asked == own => return Ok(()),
        Some((own, _)) => {
            format!("it has `{own}` in policy `{}`: name that one, or \"{NO_TEMPLATE}\", or leave `template` out", policy.name)
        }
        None => format!("it has none in policy `{}`: leave `template` out, or add one to the policy", policy.name),
    };
    Err(RequestError::Template { asked: asked.to_owned(), runtime: runtime.to_owned(), known })
}

/// The name that a request gives its program.
fn check_filename(name: &str, request: &Request) -> Result<String, Refusal> {
    check_relative("filename", name)?;
    let wrong = |why| Err(RequestError::Filename(name.to_owned(), why).into());
    if name.contains('/') {
        return wrong("it is the name of a file directly in scratch, without a directory");
    }
    if name.starts_with(PROGRAM_PREFIX) {
        return wrong("names that begin with `stockade_` are those that stockade gives; choose another");
    }
    if request.files.keys().any(|path| path.split('/').next() == Some(name)) {
        return wrong("`files` has it too; choose another name for the program, or leave the file out");
    }
    Ok(name.to_owned())
}

/// Bounds what execve has to take: 128 KiB for one string is the kernel's own limit.
pub(super) fn check_size<'a>(what: &str, strings: impl Iterator<Item = &'a String>) -> Result<(), Refusal> {
    const MAX_STRING: usize = (128 << 10) - 256;
    const MAX_TOTAL: usize = 1 << 20;
    let (mut count, mut total) = (0, 0);
    for string in strings {
        (count, total) = (count + 1, total + string.len());
        if string.len() > MAX_STRING || count > MAX_STRINGS || total > MAX_TOTAL {
            return Err(RequestError::ArgumentsTooLarge(what.to_owned()).into());
        }
    }
    Ok(())
}

pub(crate) fn check_relative(field: &str, path: &str) -> Result<(), Refusal> {
    let wrong = |why| Err(RequestError::Path { field: field.to_owned(), path: path.to_owned(), why: String::from(why) }.into());
    if path.is_empty() || path.contains('\0') {
        return wrong("a path must not be empty or hold a NUL byte");
    }
    if path.starts_with('/') {
        return wrong("paths are relative to scratch");
    }
    if path.len() > MAX_PATH_LEN || path.split('/').any(|part| part.len() > 255) {
        return wrong("too long for the kernel (4095 bytes, 255 for each part)");
    }
    if path.split('/').any(|part| matches!(part, "" | "." | "..")) {
        return wrong("no part may be empty, `.` or `..`");
    }
    Ok(())
}

/// Refuses a malformed glob, which would match nothing.
fn check_glob(field: &str, glob: &str) -> Result<(), RequestError> {
    let (field, path) = (field.to_owned(), glob.to_owned());
    fast_glob::validate(glob).map_err(|error| RequestError::Path { field, path, why: error.to_string() })
}

/// The values of limits, which stand in `field`.
pub(crate) fn parse_limits(field: &'static str, given: &BTreeMap<String, LimitValue>) -> Result<BTreeMap<LimitKey, Option<u64>>, Refusal> {
    let mut limits = BTreeMap::new();
    for (name, value) in given {
        let key = LimitKey::from_name(name).ok_or_else(|| {
            let names: Vec<&str> = LimitKey::ALL.iter().map(|key| key.name()).collect();
            let usual = LIMIT_GUESSES.iter().find(|(guesses, _)| guesses.contains(&name.as_str())).map(|(_, key)| key.name());
            let near = usual.or_else(|| stockade_policy::names::nearest(name, names.iter().copied()));
            let near = near.map(|near| format!("; did you mean `{near}`?")).unwrap_or_default();
            RequestError::UnknownLimit { field, name: name.clone(), near, known: names.join(", ") }
        })?;
        limits.insert(
            key,
            key.parse(value).map_err(|error| RequestError::Limit { field, name: name.clone(), value: written(value), error })?,
        );
    }
    Ok(limits)
}

/// A value as the caller wrote it.
fn written(value: &LimitValue) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

/// A random file name that cannot be guessed.
///
/// # Errors
/// The kernel gives no random bytes.
pub fn unique_stem() -> Result<String, Refusal> {
    let mut random = [0; 8];
    random_bytes(&mut random)?;
    Ok(format!("{PROGRAM_PREFIX}{:016x}", u64::from_ne_bytes(random)))
}

/// Fills a few bytes at random.
///
/// # Errors
/// The kernel gives none.
pub fn random_bytes(bytes: &mut [u8]) -> Result<(), Refusal> {
    let why = match rustix::rand::getrandom(&mut *bytes, GetRandomFlags::empty()) {
        Ok(length) if length == bytes.len() => return Ok(()),
        // So few as are wanted here come whole.
        Ok(_) => Errno::IO,
        Err(errno) => errno,
    };
    Err(RequestError::Randomness(why).into())
}
