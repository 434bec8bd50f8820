//! Calling the program and reading its results.
//!
//! Whatever is asked of `exec`, its stdout must be one line of UTF-8 that is one JSON
//! object: that is checked here, on every call of every test.

use std::{
    ffi::OsStr,
    fs,
    io::Write,
    ops::Index,
    os::unix::{
        fs::{PermissionsExt, chown},
        process::ExitStatusExt,
    },
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    thread,
};

use serde_json::{Value, json};

use super::{
    image_store::{ImageStore, SYSTEM},
    runner::{directory, is_root},
    timeouts::{is_slow, scaled_limit},
};

/// The uid that owns the scratches of root's tests, since none may be root's. No account has it.
pub const OWNER: u32 = 54321;

/// The program under test: what `STOCKADE` names, or what cargo has built beside the tests.
pub fn program_path() -> Result<PathBuf, String> {
    if let Some(path) = std::env::var_os("STOCKADE").map(PathBuf::from) {
        let found = path.is_absolute() && path.is_file();
        return if found { Ok(path) } else { Err(format!("STOCKADE={}: not the absolute path of a program", path.display())) };
    }
    // From target/PROFILE/deps/integration-…
    let tests = std::env::current_exe().map_err(|error| error.to_string())?;
    let path = tests.ancestors().nth(2).unwrap_or(&tests).join("stockade");
    let built = fs::metadata(&path).and_then(|file| file.modified()).map_err(|_| {
        format!("no program at {}: build it with `cargo build` and the same profile, or name one in STOCKADE", path.display())
    })?;
    // cargo lists the sources beside the program.
    let sources = fs::read_to_string(path.with_extension("d")).unwrap_or_default();
    let is_newer = |source: &&str| fs::metadata(source).and_then(|file| file.modified()).is_ok_and(|changed| changed > built);
    match sources.split_whitespace().skip(1).find(is_newer) {
        Some(source) => Err(format!("{} is older than {source}: run `cargo build` with the same profile", path.display())),
        None => Ok(path),
    }
}

/// A command line of the program, in an empty environment.
pub fn stockade<S: AsRef<OsStr>>(arguments: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(program_path().unwrap());
    command.args(arguments);
    prepare(&mut command);
    command
}

/// Other words before the program (`setpriv`, `unshare`, `sh -c`), the rest alike.
pub fn run_under(words: &[&str]) -> Command {
    let (first, rest) = words.split_first().unwrap();
    let mut command = Command::new(first);
    command.args(rest);
    prepare(&mut command);
    command
}

fn prepare(command: &mut Command) {
    let home = directory().join("home");
    fs::create_dir_all(&home).unwrap();
    command.env_clear().env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin").env("HOME", &home);
    // The registry of an ordinary user's runs is the test's own.
    command.env("XDG_RUNTIME_DIR", &home).env("STOCKADE", program_path().unwrap()).current_dir(directory());
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
}

/// Runs a command with these bytes on its stdin.
pub fn run_with_stdin(command: &mut Command, stdin: &[u8]) -> Output {
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    let mut pipe = child.stdin.take().unwrap();
    let bytes = stdin.to_vec();
    let writer = thread::spawn(move || {
        // It may refuse to read to the end.
        let _refused = pipe.write_all(&bytes);
    });
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    output
}

/// Starts a command with these bytes on its stdin, and comes back at once.
pub fn start(command: &mut Command, stdin: &[u8]) -> Child {
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(stdin).unwrap();
    child
}

/// What came of one call of `exec`.
pub struct ExecResult {
    /// Exit status of the program itself.
    pub status: Option<i32>,
    /// The result.
    pub result: Value,
    /// Its line as printed.
    pub line: String,
    /// What it said on stderr.
    pub stderr: String,
}

impl ExecResult {
    /// Reads a finished call, and holds it to what is true of every call.
    pub fn of(output: Output) -> Self {
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.signal().is_none(), "stockade itself was ended by a signal: {:?}\n{stderr}", output.status);
        let line = String::from_utf8(output.stdout).expect("the result is not UTF-8");
        assert!(line.ends_with('\n') && line.trim_end_matches('\n').lines().count() == 1, "not one line: {line:?}\n{stderr}");
        let result: Value = serde_json::from_str(&line).unwrap_or_else(|error| panic!("no JSON: {error}: {line}"));
        assert!(result.is_object(), "{line}");
        let expected = match result["verdict"].as_str() {
            Some("bad_request") => 2,
            Some("sandbox_error") => 125,
            _ => 0,
        };
        assert_eq!(output.status.code(), Some(expected), "exit status for {line}\n{stderr}");
        assert!(!stderr.contains("panicked") && !line.contains("panicked"), "{line}\n{stderr}");
        ExecResult { status: output.status.code(), result, line, stderr }
    }

    /// The result must hold all of this.
    #[track_caller]
    pub fn expect(&self, wanted: Value) -> &Self {
        for (key, value) in wanted.as_object().unwrap() {
            assert_eq!(&self.result[key], value, "`{key}` of {}\nstderr: {}", self.brief(), self.stderr);
        }
        self
    }

    /// It exited by itself with 0.
    #[track_caller]
    pub fn succeeded(&self) -> &Self {
        self.expect(json!({"verdict": "exited", "code": 0, "success": true, "started": true, "signal": null}))
    }

    /// It was refused as the caller's mistake, for this reason; the message holds all of these.
    #[track_caller]
    pub fn refused(&self, reason: &str, message: &[&str]) -> &Self {
        self.not_run("bad_request", 2, reason, message)
    }

    /// The sandbox could not be put in place, for this reason.
    #[track_caller]
    pub fn broke(&self, reason: &str, message: &[&str]) -> &Self {
        self.not_run("sandbox_error", 125, reason, message)
    }

    #[track_caller]
    fn not_run(&self, verdict: &str, code: i32, reason: &str, message: &[&str]) -> &Self {
        self.expect(json!({"verdict": verdict, "code": code, "reason": reason, "started": false, "success": false, "output": ""}));
        let error = self.result["error"].as_str().unwrap();
        for part in message {
            assert!(error.contains(part), "`{part}` is not in: {error}");
        }
        self
    }

    #[track_caller]
    pub fn output(&self) -> &str {
        self.result["output"].as_str().unwrap()
    }

    pub fn error(&self) -> &str {
        self.result["error"].as_str().unwrap_or_default()
    }

    /// The program's stdout as JSON.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(self.output()).unwrap_or_else(|error| panic!("{error}: {}\nstderr: {}", self.brief(), self.stderr))
    }

    /// A collected file.
    #[track_caller]
    pub fn file(&self, path: &str) -> &Value {
        let files = self.result["files"].as_array().unwrap();
        files.iter().find(|file| file["path"] == path).unwrap_or_else(|| panic!("{path} was not collected: {}", self.brief()))
    }

    /// The result without its longest parts.
    pub fn brief(&self) -> String {
        let mut result = self.result.clone();
        if let Some(fields) = result.as_object_mut() {
            for long in ["receipt", "limits", "policy", "egress"] {
                fields.remove(long);
            }
        }
        let text = result.to_string();
        text.chars().take(4000).collect()
    }
}

impl Index<&str> for ExecResult {
    type Output = Value;
    fn index(&self, key: &str) -> &Value {
        &self.result[key]
    }
}

/// What a command has printed, on stdout and then on stderr.
pub fn both_streams(output: &Output) -> String {
    [String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr)].concat()
}

/// `exec` with this request.
#[track_caller]
pub fn exec(request: Value) -> ExecResult {
    exec_with(&[], request)
}

/// `exec` with these options and this request. On a slow machine one under `default` that
/// names no wall clock gets the policy's own, patiently.
#[track_caller]
pub fn exec_with(options: &[&str], mut request: Value) -> ExecResult {
    let limits = request.get("limits");
    let names_no_clock = limits.is_none_or(|limits| limits.is_object() && limits.get("wall").is_none());
    if is_slow() && options.is_empty() && request.is_object() && names_no_clock {
        request["limits"]["wall"] = json!(scaled_limit(30_000));
    }
    let done = exec_bytes(options, request.to_string().as_bytes());
    if let Some(path) = std::env::var_os(RECORD) {
        record(Path::new(&path), options, &request, &done.result);
    }
    done
}

/// Names a file for the requests that a test makes, and their results.
pub const RECORD: &str = "STOCKADE_TEST_RECORD";

/// Adds a line, by one write, since other tests add theirs.
fn record(path: &Path, options: &[&str], request: &Value, result: &Value) {
    let policy = match options {
        [] => Some(String::new()),
        ["--policy", path] => fs::read_to_string(path).ok(),
        _ => None,
    };
    let line = json!({"policy": policy, "request": request, "result": result});
    let mut file = fs::OpenOptions::new().create(true).append(true).open(path).unwrap();
    file.write_all(format!("{line}\n").as_bytes()).unwrap();
}

/// `exec` with whatever bytes.
#[track_caller]
pub fn exec_bytes(options: &[&str], bytes: &[u8]) -> ExecResult {
    let words = [&["exec"], options].concat();
    let Some(store) = ImageStore::of_every_request() else { return ExecResult::of(run_with_stdin(&mut stockade(words), bytes)) };
    let bytes = in_system(bytes);
    ExecResult::of(run_with_stdin(&mut store.command(&words), &bytes))
}

/// A request that names no image, with [`SYSTEM`] as its image; other bytes as they are.
fn in_system(bytes: &[u8]) -> Vec<u8> {
    let mut request: Value = serde_json::from_slice(bytes).unwrap_or_default();
    let is_plain = request.as_object().is_some_and(|request| !request.contains_key("image") && !request.contains_key("template"));
    if is_plain {
        request["image"] = json!(SYSTEM);
        return request.to_string().into_bytes();
    }
    bytes.to_vec()
}

/// Python code under `default`.
#[track_caller]
pub fn python(code: &str) -> ExecResult {
    exec(json!({"code": code}))
}

/// Gives a path to the user who may own a scratch.
pub fn chown_to_owner(path: &Path) {
    if is_root() {
        chown(path, Some(OWNER), Some(OWNER)).unwrap();
    }
}

/// A host directory that may be a scratch.
pub fn scratch() -> PathBuf {
    scratch_named("scratch")
}

pub fn scratch_named(name: &str) -> PathBuf {
    let path = directory().join(name);
    fs::create_dir(&path).unwrap();
    chown_to_owner(&path);
    path
}

/// A file in a scratch, its owner's.
pub fn write_file(path: &Path, contents: impl AsRef<[u8]>) {
    fs::write(path, contents).unwrap();
    chown_to_owner(path);
}

/// A path as text, for a request.
pub fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A host secret that must not be found anywhere in a result.
pub fn token(name: &str) -> String {
    format!("canary-{name}-{}", std::process::id())
}

/// Set-ID bits of a file of the host.
pub fn set_id_bits(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().permissions().mode() & 0o6000
}
