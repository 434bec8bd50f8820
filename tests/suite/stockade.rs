//! Calling the program and reading what it says.
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
    time::Duration,
};

use serde_json::{Value, json};

use crate::{
    harness::{directory, eventually, is_root},
    patience::{is_slow, patient_limit},
};

/// Whom root lets own a scratch, since none may be root's. No account has this id.
pub const OWNER: u32 = 54321;

/// The program under test.
pub fn program_path() -> Result<PathBuf, String> {
    let path = std::env::var_os("STOCKADE").map(PathBuf::from);
    let path = path.ok_or("the environment variable STOCKADE must name the program to test, by its absolute path")?;
    if path.is_absolute() && path.is_file() {
        Ok(path)
    } else {
        Err(format!("STOCKADE={}: not the absolute path of a program", path.display()))
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
pub fn under(words: &[&str]) -> Command {
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
pub fn feed(command: &mut Command, stdin: &[u8]) -> Output {
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
pub struct Done {
    /// Exit status of the program itself.
    pub status: Option<i32>,
    /// The result.
    pub result: Value,
    /// Its line as printed.
    pub line: String,
    /// What it said on stderr.
    pub stderr: String,
}

impl Done {
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
        Done { status: output.status.code(), result, line, stderr }
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

impl Index<&str> for Done {
    type Output = Value;
    fn index(&self, key: &str) -> &Value {
        &self.result[key]
    }
}

/// `exec` with this request.
#[track_caller]
pub fn exec(request: Value) -> Done {
    exec_with(&[], request)
}

/// `exec` with these options and this request. On a slow machine one under `default` that
/// names no wall clock gets the policy's own, patiently.
#[track_caller]
pub fn exec_with(options: &[&str], mut request: Value) -> Done {
    let limits = request.get("limits");
    let names_no_clock = limits.is_none_or(|limits| limits.is_object() && limits.get("wall").is_none());
    if is_slow() && options.is_empty() && request.is_object() && names_no_clock {
        request["limits"]["wall"] = json!(patient_limit(30_000));
    }
    exec_bytes(options, request.to_string().as_bytes())
}

/// `exec` with whatever bytes.
#[track_caller]
pub fn exec_bytes(options: &[&str], bytes: &[u8]) -> Done {
    Done::of(feed(&mut stockade([&["exec"], options].concat()), bytes))
}

/// Python code under `default`.
#[track_caller]
pub fn python(code: &str) -> Done {
    exec(json!({"code": code}))
}

/// Hands a path to whoever may own a scratch.
pub fn give(path: &Path) {
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
    give(&path);
    path
}

/// A file in a scratch, its owner's.
pub fn put(path: &Path, contents: impl AsRef<[u8]>) {
    fs::write(path, contents).unwrap();
    give(path);
}

/// A path as text, for a request.
pub fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A directory for policies that this launcher believes: root's must be root's alone on
/// the whole way, which nothing in /tmp is.
pub struct PolicyDirectory(pub PathBuf);

impl PolicyDirectory {
    pub fn new() -> Self {
        let path = if is_root() { PathBuf::from(format!("/run/suite-{}", std::process::id())) } else { directory().join("policies") };
        fs::create_dir(&path).unwrap();
        PolicyDirectory(path)
    }

    /// Writes one and returns its path.
    pub fn write(&self, name: &str, text: &str) -> String {
        let path = self.0.join(format!("{name}.toml"));
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    }
}

impl Drop for PolicyDirectory {
    fn drop(&mut self) {
        let _left = fs::remove_dir_all(&self.0);
    }
}

/// A policy that is `default` but for these lines.
pub fn derived(lines: &str) -> String {
    derived_from("default", lines)
}

pub fn derived_from(base: &str, lines: &str) -> String {
    format!("schema = 1\ndescription = \"of a test\"\nextends = \"{base}\"\n{lines}\n")
}

/// A policy that is a shipped one but for these lines, and for refusing code before it runs:
/// for what the sandbox does with such code.
pub fn unscreened(base: &str, lines: &str) -> String {
    let screen = stockade_policy::load_shipped(base).unwrap().screen;
    let refused = screen.actions.iter().filter(|(_, action)| action.name() != "allow");
    let notes: String = refused.map(|(rule, _)| format!("{} = \"note\"\n", rule.name())).collect();
    derived_from(base, &format!("[screen]\n{notes}\n{lines}"))
}

/// A host secret that must not be found anywhere in a result.
pub fn token(name: &str) -> String {
    format!("canary-{name}-{}", std::process::id())
}

/// A process of the host with these words in its command line.
pub fn host_process_with(words: &str) -> bool {
    let entries = fs::read_dir("/proc").unwrap();
    let own = std::process::id().to_string();
    entries.flatten().any(|entry| {
        let name = entry.file_name().to_string_lossy().into_owned();
        name != own
            && name.bytes().all(|byte| byte.is_ascii_digit())
            && fs::read(entry.path().join("cmdline")).is_ok_and(|line| String::from_utf8_lossy(&line).replace('\0', " ").contains(words))
    })
}

/// Within five seconds no process of the host has these words in its command line.
#[track_caller]
pub fn no_process_is_left(words: &str) {
    assert!(eventually(Duration::from_secs(5), || !host_process_with(words)), "a process is left: {words}");
}

/// Set-ID bits of a file of the host.
pub fn set_id_bits(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().permissions().mode() & 0o6000
}
