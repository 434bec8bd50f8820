//! The form of a request: size, JSON, and whether each field can be meant at all.
//!
//! What is judged here needs nothing of the host. A refusal names the field, what is wrong
//! with it and how to mend it; whether the caller may have it is not asked yet.

use std::{collections::BTreeMap, io::Read, path::Path};

use base64::{Engine, prelude::BASE64_STANDARD};
use rustix::{io::Errno, rand::GetRandomFlags};
use stockade_launcher::registry::PROGRAM_PREFIX;
use stockade_policy::{
    model::Policy,
    plan::{Narrowing, Plan, Program},
};
use stockade_protocol::{LimitKey, LimitValue, Request, TextOrBase64};

use super::{Ask, FileBytes, StdinBytes};
use crate::{Options, Refusal};

/// The largest request, in bytes.
pub const LARGEST_REQUEST: usize = 64 << 20;
/// Files that one request may bring.
const MOST_FILES: usize = 10_000;
/// The longest path that the kernel takes.
const LONGEST_PATH: usize = 4095;

/// Reads a request from a stream, up to its largest size.
///
/// # Errors
/// It is too large, or the stream fails.
pub fn read_request(input: impl Read) -> Result<Vec<u8>, Refusal> {
    let mut bytes = Vec::new();
    let read = input.take(LARGEST_REQUEST as u64 + 1).read_to_end(&mut bytes);
    read.map_err(|error| Refusal::bad_request("request_unreadable", format!("the request cannot be read: {error}")))?;
    if bytes.len() > LARGEST_REQUEST {
        return Err(Refusal::bad_request(
            "request_too_large",
            "the request is larger than 64 MiB; put large files into scratch and name the directory instead",
        ));
    }
    Ok(bytes)
}

/// Parses a request.
///
/// # Errors
/// It is not one JSON object of the contract; the message has line and column.
pub fn parse_request(bytes: &[u8]) -> Result<Request, Refusal> {
    if bytes.len() > LARGEST_REQUEST {
        return Err(Refusal::bad_request("request_too_large", "the request is larger than 64 MiB"));
    }
    if bytes.trim_ascii().is_empty() {
        return Err(Refusal::bad_request(
            "request_empty",
            "no request: the input was empty; send one JSON object such as {\"code\": \"print(6*7)\"}",
        ));
    }
    let mut deserializer = serde_json::Deserializer::from_slice(bytes);
    let request = serde_path_to_error::deserialize(&mut deserializer).map_err(|error| {
        let path = error.path().to_string();
        let inner = error.into_inner();
        let place = if path == "." || path == "?" { String::new() } else { format!(" at `{path}`") };
        let reason = if inner.is_syntax() || inner.is_eof() { "request_not_json" } else { "request_malformed" };
        Refusal::bad_request(reason, format!("the request is not as it must be{place}: {inner}"))
    })?;
    deserializer
        .end()
        .map_err(|error| Refusal::bad_request("request_not_json", format!("one JSON object is expected, but more follows it: {error}")))?;
    Ok(request)
}

/// What goes to the launcher beside the plan.
#[derive(Default)]
pub(super) struct Parts<'a> {
    pub(super) program: &'a [u8],
    pub(super) image: Option<&'static [u8]>,
    pub(super) files: Vec<(String, FileBytes<'a>)>,
    pub(super) stdin: StdinBytes<'a>,
    pub(super) collect: Vec<String>,
}

/// The bytes of a file or of stdin, which `field` names.
///
/// # Errors
/// It is no base64.
pub fn decode<'a>(value: &'a TextOrBase64, field: &str) -> Result<FileBytes<'a>, Refusal> {
    match value {
        TextOrBase64::Text(text) => Ok(text.as_bytes().into()),
        TextOrBase64::Base64(encoded) => BASE64_STANDARD
            .decode(&encoded.base64)
            .map(Into::into)
            .map_err(|error| Refusal::bad_request("base64_malformed", format!("{field}: not standard base64 with padding: {error}"))),
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
        Err(Refusal::bad_request(
            "files_in_read_only_scratch",
            format!("files: policy `{}` shows scratch read-only (access = \"ro\"), so none can be written there", plan.policy),
        ))
    }
}

/// What is asked for: how it narrows the policy, and the bytes that go with it.
///
/// # Errors
/// It cannot be meant.
pub(super) fn well_formed<'a>(ask: Ask<'a>, policy: &Policy, options: &Options) -> Result<(Narrowing, Parts<'a>), Refusal> {
    let mut narrowing = Narrowing::default();
    let mut parts = Parts::default();
    match ask {
        Ask::Request(request) => check_request(request, policy, &mut narrowing, &mut parts)?,
        Ask::Command { command, terminal } => {
            if command.iter().any(|word| word.contains('\0')) || command.first().is_none_or(String::is_empty) {
                return Err(Refusal::bad_request("command_malformed", "the command is empty or holds a NUL byte"));
            }
            check_size("the command", command.iter())?;
            narrowing.program = Program::Command(command.to_vec());
            narrowing.terminal = terminal;
            parts.stdin = if terminal { StdinBytes::Null } else { StdinBytes::Relay };
        }
        Ask::Interpreter { runtime, arguments, environment, alias, terminal } => {
            // Neither can hold a NUL byte: both came through an execve.
            check_size("the arguments and accepted variables", arguments.iter().chain(environment.keys()).chain(environment.values()))?;
            narrowing.program = Program::Interpreter { runtime: runtime.to_owned() };
            narrowing.arguments = arguments.to_vec();
            narrowing.environment = environment.clone();
            narrowing.scratch_alias = alias.map(Path::to_path_buf);
            narrowing.terminal = terminal;
            parts.stdin = if terminal { StdinBytes::Null } else { StdinBytes::Relay };
        }
        Ask::Image(image) => {
            narrowing.program = Program::Image(image.name.to_owned());
            narrowing.limits = image.limits.clone();
            parts.image = Some(image.program);
            parts.stdin = StdinBytes::Bytes(image.stdin.into());
            parts.collect = image.collect.clone();
        }
        Ask::Session { request, kept } => {
            narrowing.session = true;
            if let Some(request) = request {
                check_request(request, policy, &mut narrowing, &mut parts)?;
                kept.check_request(request, &narrowing, options)?;
            }
        }
    }
    Ok((narrowing, parts))
}

fn check_request<'a>(request: &'a Request, policy: &Policy, narrowing: &mut Narrowing, parts: &mut Parts<'a>) -> Result<(), Refusal> {
    if request.code.contains('\0') {
        return Err(Refusal::bad_request(
            "code_holds_nul",
            "code: a NUL byte cannot stand in a program's text; write it as an escape of the language, such as \\0",
        ));
    }
    if let Some(index) = request.args.iter().position(|argument| argument.contains('\0')) {
        return Err(Refusal::bad_request("args_malformed", format!("args[{index}]: an argument cannot hold a NUL byte")));
    }
    check_size("args and env", request.args.iter().chain(request.env.keys()).chain(request.env.values()))?;
    for (name, value) in &request.env {
        if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
            return Err(Refusal::bad_request(
                "env_malformed",
                format!("env: {name:?}: a variable's name holds no `=`, and neither name nor value a NUL byte"),
            ));
        }
    }
    if request.files.len() > MOST_FILES {
        return Err(Refusal::bad_request(
            "too_many_files",
            format!("files: at most {MOST_FILES} in one request; put them into scratch instead"),
        ));
    }
    for (path, contents) in &request.files {
        check_relative("files", path)?;
        parts.files.push((path.clone(), decode(contents, &format!("files[{path:?}]"))?));
    }
    for glob in &request.collect {
        check_relative("collect", glob)?;
    }
    narrowing.limits = parse_limits(request)?;
    narrowing.arguments = request.args.clone();
    narrowing.environment = request.env.clone();
    narrowing.program = Program::Code { language: request.language.clone(), stem: unique_stem()? };
    // Named early, so that a misspelt language is refused before anything is opened.
    stockade_policy::plan::find_runtime(policy, request.language.as_deref().unwrap_or(&policy.language))
        .map_err(|error| Refusal::bad_request(error.reason, error.message))?;
    parts.program = request.code.as_bytes();
    parts.collect = request.collect.clone();
    if let Some(stdin) = &request.stdin {
        parts.stdin = StdinBytes::Bytes(decode(stdin, "stdin")?);
    }
    Ok(())
}

/// Bounds what execve has to take: 128 KiB for one string is the kernel's own limit.
fn check_size<'a>(what: &str, strings: impl Iterator<Item = &'a String>) -> Result<(), Refusal> {
    const LONGEST: usize = (128 << 10) - 256;
    const MOST: usize = 4096;
    const TOTAL: usize = 1 << 20;
    let (mut count, mut total) = (0, 0);
    for string in strings {
        (count, total) = (count + 1, total + string.len());
        if string.len() > LONGEST || count > MOST || total > TOTAL {
            return Err(Refusal::bad_request(
                "arguments_too_large",
                format!("{what}: at most {MOST} strings, 1 MiB together, 127 KiB each; put data into `stdin` or `files`"),
            ));
        }
    }
    Ok(())
}

pub(crate) fn check_relative(field: &str, path: &str) -> Result<(), Refusal> {
    let wrong = |why: &str| Err(Refusal::bad_request("path_malformed", format!("{field}: {path:?}: {why}")));
    if path.is_empty() || path.contains('\0') {
        return wrong("a path must not be empty or hold a NUL byte");
    }
    if path.starts_with('/') {
        return wrong("paths are relative to scratch");
    }
    if path.len() > LONGEST_PATH || path.split('/').any(|part| part.len() > 255) {
        return wrong("too long for the kernel (4095 bytes, 255 for each part)");
    }
    if path.split('/').any(|part| matches!(part, "" | "." | "..")) {
        return wrong("no part may be empty, `.` or `..`");
    }
    Ok(())
}

fn parse_limits(request: &Request) -> Result<BTreeMap<LimitKey, Option<u64>>, Refusal> {
    let mut limits = BTreeMap::new();
    for (name, value) in &request.limits {
        let key = LimitKey::from_name(name).ok_or_else(|| {
            let names: Vec<&str> = LimitKey::ALL.iter().map(|key| key.name()).collect();
            let near = stockade_policy::names::nearest(name, names.iter().copied())
                .map(|near| format!("; did you mean `{near}`?"))
                .unwrap_or_default();
            Refusal::bad_request("unknown_limit", format!("limits: there is no limit `{name}`{near}; there are {}", names.join(", ")))
        })?;
        let parsed = match value {
            LimitValue::Integer(number) => key.parse_integer(*number),
            LimitValue::Float(number) => key.parse_float(*number),
            LimitValue::Text(text) => key.parse_text(text),
        };
        limits.insert(key, parsed.map_err(|error| Refusal::bad_request("limit_malformed", format!("limits: {error}")))?);
    }
    Ok(limits)
}

/// A file name that nothing in scratch has and nobody can guess.
fn unique_stem() -> Result<String, Refusal> {
    let mut random = [0; 8];
    random_bytes(&mut random)?;
    Ok(format!("{PROGRAM_PREFIX}{:016x}", u64::from_ne_bytes(random)))
}

pub(crate) fn random_bytes(bytes: &mut [u8]) -> Result<(), Refusal> {
    let why = match rustix::rand::getrandom(&mut *bytes, GetRandomFlags::empty()) {
        Ok(length) if length == bytes.len() => return Ok(()),
        // So few as are wanted here come whole.
        Ok(_) => Errno::IO,
        Err(errno) => errno,
    };
    let message = format!("the kernel gives no random bytes: {why}; a filter over the launcher must let it call getrandom(2)");
    Err(Refusal::sandbox_error("no_randomness", message))
}
