//! Admission: whether this caller may have this run, and what exactly the run is.
//!
//! Form first (is the request well made?), then rights (grants, scratch), then the plan.
//! A refusal names the field, what is wrong with it and how to mend it. Nothing is
//! started here.

use std::{
    collections::BTreeMap,
    io::Read,
    path::{Component, Path, PathBuf},
};

use base64::{Engine, prelude::BASE64_STANDARD};
use rustix::fd::OwnedFd;
use stockade_launcher::{
    Embryo, Inputs, LaunchError, Stdin, Streams, V2Parent,
    registry::{PROGRAM_PREFIX, Record},
    scratch::{self, Idmap, OpenedScratch, Opener},
};
use stockade_policy::{
    Grants,
    facts::{CgroupFacts, Codec},
    grants,
    model::Policy,
    plan::{Interpreter, Narrowing, Plan, Program, UserNamespaces, plan},
};
use stockade_protocol::{LimitKey, LimitValue, Request, TextOrBase64};

use crate::{
    Ahead, Loaded, Options, Refusal, audit,
    caller::{self, Identity},
    facts,
    session::Kept,
};

/// The largest request, in bytes.
pub const LARGEST_REQUEST: usize = 64 << 20;
/// Files that one request may bring.
const MOST_FILES: usize = 10_000;
/// Versions of Python that are watched below one prefix.
const MOST_VERSIONS: usize = 16;
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

/// What somebody wants run.
#[derive(Clone, Copy)]
pub enum Ask<'a> {
    /// A request of `exec`.
    Request(&'a Request),
    /// A command of `run`.
    Command {
        /// Program and arguments.
        command: &'a [String],
        /// On a terminal of its own.
        terminal: bool,
    },
    /// A runtime's interpreter, of a shim.
    Interpreter {
        /// The runtime.
        runtime: &'a str,
        /// All its arguments.
        arguments: &'a [String],
        /// The caller's variables that the policy accepts.
        environment: &'a BTreeMap<String, String>,
        /// Another path by which the caller speaks of the scratch.
        alias: Option<&'a Path>,
        /// On a terminal of its own.
        terminal: bool,
    },
    /// A program of stockade's own.
    Image(&'a Image<'a>),
    /// A request to a session; none: what the session itself is planned by.
    Session {
        /// The request.
        request: Option<&'a Request>,
        /// What the session keeps.
        kept: &'a Kept,
    },
}

impl<'a> Ask<'a> {
    fn kept(self) -> Option<&'a Kept> {
        match self {
            Ask::Session { kept, .. } => Some(kept),
            _ => None,
        }
    }

    /// A refusal as it is meant here: earlier code of a session may have left no room for
    /// the next.
    pub(crate) fn worded(self, refusal: Refusal) -> Refusal {
        if self.kept().is_none() || refusal.reason != "scratch_full" {
            return refusal;
        }
        let message = format!("{}; or empty files of the session by `write`, or `reset` it", refusal.message);
        Refusal { verdict: stockade_protocol::Verdict::DiskLimit, message, ..refusal }
    }
}

/// A program of stockade's own to run behind every layer of a policy. No request can name
/// one: it is for clients of this crate that carry it.
#[derive(Clone, Debug, Default)]
pub struct Image<'a> {
    /// Its name.
    pub name: &'a str,
    /// The program, static.
    pub program: &'static [u8],
    /// What it reads from stdin.
    pub stdin: &'a [u8],
    /// Limits, up to the policy's maximum.
    pub limits: BTreeMap<LimitKey, Option<u64>>,
    /// Globs of files to return.
    pub collect: Vec<String>,
}

/// What a run is admitted for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Its plan, to look at.
    Plan,
    /// The run: its place in the registry is taken, what killed launchers left behind is
    /// swept, and the sandbox is begun.
    Run,
    /// The run, whose scratch turned out not to be idmappable.
    RunAfterRefusedIdmap,
}

/// An admitted run: its plan, and what else it needs.
pub struct Admission<'a> {
    /// The plan.
    pub plan: Plan,
    program: &'a [u8],
    image: Option<&'static [u8]>,
    files: Vec<(String, FileBytes<'a>)>,
    stdin: StdinBytes<'a>,
    scratch: Option<OpenedScratch>,
    trees: BTreeMap<PathBuf, OwnedFd>,
    collect: Vec<String>,
    record: Option<Record>,
    kept: Option<&'a Kept>,
    embryo: Option<Result<Embryo, LaunchError>>,
}

/// A file's bytes: the request's own text, or decoded.
pub(crate) type FileBytes<'a> = std::borrow::Cow<'a, [u8]>;

#[derive(Default)]
enum StdinBytes<'a> {
    #[default]
    Null,
    Bytes(FileBytes<'a>),
    Relay,
}

impl<'a> Admission<'a> {
    /// Admits a run, or refuses it. `ahead`: what was begun of it already.
    ///
    /// # Errors
    /// The request is malformed, asks for too much, is not granted, or the host lacks a
    /// layer that the policy requires.
    pub fn new(ask: Ask<'a>, loaded: &Loaded, options: &Options, purpose: Purpose, ahead: Ahead) -> Result<Self, Refusal> {
        let claim = purpose != Purpose::Plan;
        let Loaded { policy, filters } = loaded;
        let identity = caller::identify(options.peer.as_ref())?;
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
        let wanted_scratch = scratch_of(ask, options)?;
        // Before anything of the host is looked at for whoever has no right to it.
        check_grants(&identity, &policy.name, None, options)?;
        // First of all that is done on the host, so that it makes its namespaces beside what
        // follows. That it cannot be made is said if nothing is found wrong with the request.
        let early = ahead.take().or_else(|| (claim && !facts::is_unified()).then(|| begin(&identity, UserNamespaces::Nested, None, None)));
        let mut record = claim_record(&identity, wanted_scratch.is_some(), claim)?;
        let kept = ask.kept();
        let mut host = facts::read(&identity, kept.and_then(Kept::record).or(record.as_ref()))?;
        let embryo = match (&host.cgroup, early) {
            // The cgroup comes first, and with it a new beginning.
            (CgroupFacts::V2 { .. }, _) | (_, None) if claim => {
                Some(begin(&identity, UserNamespaces::Nested, Some(&host.cgroup), record.as_mut()))
            }
            (_, early) => early,
        };
        if identity.privileged && !matches!(embryo, Some(Ok(_))) {
            host.user_namespace_refusal = stockade_launcher::user_namespace_refusal();
        }
        let homes = if wanted_scratch.is_some() { caller::homes() } else { Vec::new() };
        let registry = facts::registry_directory(&identity);
        let opener = Opener {
            caller: &identity.caller,
            privileged: identity.privileged,
            unique_id: host.unique_id,
            idmap: match purpose {
                Purpose::Plan => Idmap::Try,
                Purpose::Run => Idmap::Assume,
                Purpose::RunAfterRefusedIdmap => Idmap::Refused,
            },
            homes: &homes,
            registry: Some(&registry),
        };
        let (interpreters, codecs) = scratch::as_caller(opener.caller, opener.privileged, || {
            check_interpreters(policy, options, &narrowing).map(|interpreters| {
                let codecs = codecs(policy, &interpreters);
                (interpreters, codecs)
            })
        })
        .map_err(|errno| Refusal::sandbox_error("caller_rights", format!("cannot change to the caller's rights: {errno}")))??;
        host.codecs = codecs;
        let scratch = match &wanted_scratch {
            Some(path) => {
                let opened = scratch::open(path, policy, &opener).map_err(|error| Refusal::bad_request(error.reason, error.to_string()))?;
                check_ceiling(path, &opened.facts.path, options)?;
                // By the path that was opened: the one that was named may lead elsewhere now.
                check_grants(&identity, &policy.name, Some(&opened.facts.path), options)?;
                Some(opened)
            }
            None => None,
        };
        narrowing.scratch = scratch.as_ref().map(|opened| opened.facts.clone());
        let more: Vec<PathBuf> =
            interpreters.values().flat_map(|interpreter| interpreter.read_only.iter().chain([&interpreter.program])).cloned().collect();
        let seen = facts::look_at(&mut host, policy, more.iter().map(PathBuf::as_path))?;
        audit::check_unseen(&identity, shown(policy, &more, scratch.as_ref()), &seen)?;
        let trees = open_trees(&identity, &interpreters, &opener)?;
        narrowing.interpreters = interpreters;
        let plan = plan(policy, filters, &host, &narrowing).map_err(|error| match error.callers_fault {
            true => Refusal::bad_request(error.reason, error.message),
            false => Refusal::sandbox_error(error.reason, error.message),
        })?;
        if plan.scratch.read_only && !parts.files.is_empty() {
            return Err(Refusal::bad_request(
                "files_in_read_only_scratch",
                format!("files: policy `{}` shows scratch read-only (access = \"ro\"), so none can be written there", policy.name),
            ));
        }
        if let (Some(record), Some((directory, name)), true) = (&mut record, &plan.program_file, plan.scratch.host && claim) {
            record.note_program(&directory.join(name))?;
        }
        let embryo = match plan.identity.user_namespaces {
            // Refused above; the plan goes without.
            UserNamespaces::Missing if claim => Some(begin(&identity, UserNamespaces::Missing, Some(&host.cgroup), record.as_mut())),
            _ => embryo,
        };
        let Parts { program, image, files, stdin, collect } = parts;
        Ok(Admission { plan, program, image, files, stdin, scratch, trees, collect, record, kept, embryo })
    }

    /// The plan, the parts that the launcher takes beside it, and the sandbox that was
    /// begun.
    ///
    /// # Errors
    /// It could not be begun, or the run was not claimed.
    pub fn into_parts(self, streams: Streams) -> Result<(Plan, Inputs<'a>, Embryo), Refusal> {
        let embryo = self.embryo.ok_or_else(|| Refusal::sandbox_error("not_claimed", "this run was only planned"))??;
        let kept = self.kept.map(|kept| kept.copies(&self.plan)).transpose()?;
        let inputs = Inputs {
            program: self.program,
            image: self.image,
            files: self.files,
            stdin: match self.stdin {
                StdinBytes::Null => Stdin::Null,
                StdinBytes::Bytes(bytes) => Stdin::Bytes(bytes),
                StdinBytes::Relay => Stdin::Relay,
            },
            scratch: self.scratch,
            kept,
            trees: self.trees,
            streams,
            collect: self.collect,
            record: self.record,
            client: None,
            meanwhile: None,
        };
        Ok((self.plan, inputs, embryo))
    }
}

/// Every path of the host that a run shows.
fn shown<'p>(policy: &'p Policy, more: &'p [PathBuf], scratch: Option<&'p OpenedScratch>) -> impl Iterator<Item = &'p Path> {
    let filesystem = &policy.filesystem;
    let paths = filesystem.read_only.iter().chain(&filesystem.read_only_optional).chain(more);
    let environments = policy.runtimes.values().filter_map(|runtime| runtime.venv.as_ref());
    paths.chain(environments).map(PathBuf::as_path).chain(scratch.map(|scratch| scratch.facts.path.as_path()))
}

/// Begins a sandbox; on cgroup v2 in a cgroup of its own.
fn begin(
    identity: &Identity,
    user_namespaces: UserNamespaces,
    cgroup: Option<&CgroupFacts>,
    record: Option<&mut Record>,
) -> Result<Embryo, LaunchError> {
    let v2 = match cgroup {
        Some(CgroupFacts::V2 { parent, vacate }) => Some(V2Parent { path: parent, vacate: *vacate }),
        _ => None,
    };
    Embryo::begin(identity.privileged, user_namespaces, v2, record)
}

#[derive(Default)]
struct Parts<'a> {
    program: &'a [u8],
    image: Option<&'static [u8]>,
    files: Vec<(String, FileBytes<'a>)>,
    stdin: StdinBytes<'a>,
    collect: Vec<String>,
}

pub(crate) fn decode<'a>(value: &'a TextOrBase64, field: &str) -> Result<FileBytes<'a>, Refusal> {
    match value {
        TextOrBase64::Text(text) => Ok(text.as_bytes().into()),
        TextOrBase64::Base64(encoded) => BASE64_STANDARD
            .decode(&encoded.base64)
            .map(Into::into)
            .map_err(|error| Refusal::bad_request("base64_malformed", format!("{field}: not standard base64 with padding: {error}"))),
    }
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
    let filled = std::fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(bytes));
    filled.map_err(|error| Refusal::sandbox_error("no_randomness", format!("/dev/urandom cannot be read: {error}")))
}

/// The request's scratch, below the command line's if that names one.
fn scratch_of(ask: Ask<'_>, options: &Options) -> Result<Option<String>, Refusal> {
    let ceiling = options.scratch.as_ref().map(|path| path.to_string_lossy().into_owned());
    let wanted = match ask {
        Ask::Request(request) => request.scratch.clone(),
        Ask::Command { .. } | Ask::Interpreter { .. } | Ask::Image(_) | Ask::Session { .. } => None,
    };
    match (wanted, ceiling) {
        (Some(wanted), Some(ceiling)) => {
            let inside =
                Path::new(&wanted).starts_with(&ceiling) && !Path::new(&wanted).components().any(|part| part == Component::ParentDir);
            if inside {
                Ok(Some(wanted))
            } else {
                Err(Refusal::bad_request(
                    "scratch_outside_ceiling",
                    format!("scratch {wanted}: it must be {ceiling}, which --scratch names, or lie below it"),
                ))
            }
        }
        (wanted, ceiling) => Ok(wanted.or(ceiling)),
    }
}

/// Once more by the path without links: one that an earlier run left below the ceiling
/// must not lead out of it.
fn check_ceiling(wanted: &str, real: &Path, options: &Options) -> Result<(), Refusal> {
    let Some(ceiling) = &options.scratch else { return Ok(()) };
    // What was opened below it is there; if it has vanished since, nothing lies below it.
    let inside = std::fs::canonicalize(ceiling).is_ok_and(|ceiling| real.starts_with(ceiling));
    if inside {
        return Ok(());
    }
    Err(Refusal::bad_request(
        "scratch_outside_ceiling",
        format!(
            "scratch {wanted}: it leads to {}; it must be {}, which --scratch names, or lie below it",
            real.display(),
            ceiling.display()
        ),
    ))
}

/// The interpreters that `--runtime` names, and those of the virtual environments that
/// the policy names, with the directories that they need.
fn check_interpreters(policy: &Policy, options: &Options, narrowing: &Narrowing) -> Result<BTreeMap<String, Interpreter>, Refusal> {
    let mut all = BTreeMap::new();
    for (name, path) in &options.interpreters {
        let (name, _) = stockade_policy::plan::find_runtime(policy, name)
            .map_err(|error| Refusal::bad_request(error.reason, format!("--runtime: {}", error.message)))?;
        if !path.is_absolute() || !path.is_file() {
            return Err(Refusal::bad_request(
                "interpreter_missing",
                format!("--runtime {name}={}: name an interpreter by its absolute path", path.display()),
            ));
        }
        all.insert(name.to_owned(), interpreter(path));
    }
    let language = match &narrowing.program {
        Program::Code { language, .. } => language.as_deref().unwrap_or(&policy.language),
        Program::Interpreter { runtime } => runtime,
        Program::Command(_) | Program::Image(_) => &policy.language,
    };
    if let Ok((name, runtime)) = stockade_policy::plan::find_runtime(policy, language) {
        let program = runtime.venv.as_ref().map(|_| runtime.interpreter());
        if let Some(program) = program.filter(|program| program.is_file() && !all.contains_key(name)) {
            all.insert(name.to_owned(), interpreter(&program));
        }
    }
    Ok(all)
}

/// An interpreter with what it needs outside /usr: its virtual environment, and the
/// prefix of the interpreter that the environment was made from.
fn interpreter(program: &Path) -> Interpreter {
    let mut read_only: Vec<PathBuf> = Vec::new();
    for path in prefixes(program) {
        if !path.starts_with("/usr") && path.parent().is_some() && !read_only.iter().any(|known| path.starts_with(known)) {
            read_only.push(path);
        }
    }
    Interpreter { program: program.to_path_buf(), read_only }
}

/// The prefixes of an interpreter: where it lies, where its virtual environment's settings
/// have it from, and where it lies without links.
fn prefixes(program: &Path) -> impl Iterator<Item = PathBuf> {
    let prefix = |program: &Path| program.parent().and_then(Path::parent).map(Path::to_path_buf);
    let environment = prefix(program);
    let base = environment.as_ref().and_then(|environment| {
        let settings = small_regular_file(&environment.join("pyvenv.cfg"));
        let home =
            settings.lines().find_map(|line| line.split_once('=').filter(|(key, _)| key.trim() == "home").map(|(_, home)| home.trim()));
        home.map(Path::new).and_then(Path::parent).map(Path::to_path_buf)
    });
    let real = std::fs::canonicalize(program).ok().as_deref().and_then(prefix);
    environment.into_iter().chain(base).chain(real)
}

/// The codecs by which the interpreters of every watched runtime can be watched: of all
/// versions that a prefix holds, since code can start another one than its own.
fn codecs(policy: &Policy, interpreters: &BTreeMap<String, Interpreter>) -> BTreeMap<String, Vec<Codec>> {
    let mut all = BTreeMap::new();
    for (name, runtime) in policy.runtimes.iter().filter(|(_, runtime)| runtime.modules.watches()) {
        let program = interpreters.get(name).map_or_else(|| runtime.interpreter(), |interpreter| interpreter.program.clone());
        let mut found: Vec<Codec> = Vec::new();
        for prefix in prefixes(&program).filter(|prefix| prefix.is_absolute()) {
            for library in ["lib", "lib64"].map(|name| prefix.join(name)).iter().filter(|library| !library.is_symlink()) {
                let versions = std::fs::read_dir(library).into_iter().flatten().flatten();
                for version in versions.filter(|entry| entry.file_name().as_encoded_bytes().starts_with(b"python3.")).take(MOST_VERSIONS) {
                    let path = version.path().join("encodings/utf_8.py");
                    let text = small_regular_file(&path);
                    let whole = (1..LARGEST_SMALL_FILE).contains(&(text.len() as u64));
                    if whole && !found.iter().any(|codec| codec.path == path) {
                        found.push(Codec { path, text });
                    }
                }
            }
        }
        all.insert(name.clone(), found);
    }
    all
}

/// What is read of such a file.
const LARGEST_SMALL_FILE: u64 = 64 << 10;

/// The text of a file that its owner chose: nothing that has no end or keeps us waiting.
fn small_regular_file(path: &Path) -> String {
    use std::os::unix::fs::OpenOptionsExt;
    let nonblocking = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
    let opened = std::fs::OpenOptions::new().read(true).custom_flags(nonblocking).open(path);
    let Some(file) = opened.ok().filter(|file| file.metadata().is_ok_and(|metadata| metadata.is_file())) else { return String::new() };
    let mut text = String::new();
    let _unreadable = file.take(LARGEST_SMALL_FILE).read_to_string(&mut text);
    text
}

/// Where root acts for another: whether that one was granted the policy, the scratch and
/// the interpreters. Everybody else acts with rights of their own.
///
/// # Errors
/// Not granted; the message says which line of the grants would do it.
pub fn check_grants(identity: &Identity, policy: &str, scratch: Option<&Path>, options: &Options) -> Result<(), Refusal> {
    if !identity.on_behalf {
        return Ok(());
    }
    let path = Path::new(grants::PATH);
    let loaded = Grants::load(path).map_err(|error| Refusal::sandbox_error("grants_unreadable", error.to_string()))?;
    let grants = loaded.ok_or_else(|| {
        Refusal::sandbox_error(
            "not_granted",
            format!(
                "{} does not exist, so root runs nothing for uid {}; name there what this user may run, or have it run stockade with its own rights",
                path.display(),
                identity.caller.uid
            ),
        )
    })?;
    let asker = stockade_policy::Caller { uid: identity.caller.uid, gids: identity.caller.groups.clone() };
    let interpreters: Vec<PathBuf> = options.interpreters.iter().map(|(_, path)| path.clone()).collect();
    let name = options.policy.as_deref().unwrap_or(policy);
    grants.decide(&asker, name, scratch, &interpreters).map_err(|refusal| Refusal::sandbox_error("not_granted", refusal.to_string()))
}

/// The run's record; none where nothing could be left behind.
fn claim_record(identity: &Identity, host_scratch: bool, claim: bool) -> Result<Option<Record>, Refusal> {
    let leaves_nothing = !identity.privileged && !host_scratch && matches!(facts::cgroup_facts()?, CgroupFacts::Unavailable { .. });
    if leaves_nothing || (!claim && !identity.privileged) {
        return Ok(None);
    }
    let registry = facts::registry(identity)?;
    registry.sweep()?;
    Ok(Some(registry.claim()?))
}

/// Directories outside the policy that root shows on the caller's behalf, opened with
/// the caller's rights.
fn open_trees(
    identity: &Identity,
    interpreters: &BTreeMap<String, Interpreter>,
    opener: &Opener<'_>,
) -> Result<BTreeMap<PathBuf, OwnedFd>, Refusal> {
    let mut trees = BTreeMap::new();
    if identity.privileged {
        for path in interpreters.values().flat_map(|interpreter| &interpreter.read_only) {
            let tree = scratch::open_tree_as_caller(path, opener)
                .map_err(|error| Refusal::bad_request(error.reason, format!("{}: {}", error.path, error.why)))?;
            trees.insert(path.clone(), tree);
        }
    }
    Ok(trees)
}
