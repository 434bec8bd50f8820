//! Error messages of interpreters, shells and the C library.
//!
//! Each line is read by itself, in time proportional to its length. A line that is not clearly
//! such a message gives nothing.

use stockade_protocol::LimitKey;

/// Bytes of a line that is read.
const MAX_LINE_LEN: usize = 4096;
/// Bytes of a path that a hint repeats.
const MAX_PATH_LEN: usize = 1024;
/// Bytes of the name of a module or command.
const MAX_NAME_LEN: usize = 100;

/// The subject of an error message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ErrorMessage {
    /// A path, absolute or relative to the working directory.
    Path { path: String, error: PathError },
    /// A module that an interpreter did not find.
    Module { name: String, python: bool },
    /// A command that was not found.
    Command(String),
    /// A refusal by a limit.
    Limit(LimitKey),
    /// A peer or a name that was not reached.
    Network,
    /// pip, which wants the network or another environment.
    Pip,
}

/// The error of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PathError {
    Missing,
    Refused,
    ReadOnly,
    /// A shell's `not found`.
    Unknown,
}

impl PathError {
    /// The name of the errno.
    pub(super) fn errno(self) -> &'static str {
        match self {
            PathError::Missing | PathError::Unknown => "ENOENT",
            PathError::Refused => "EACCES",
            PathError::ReadOnly => "EROFS",
        }
    }
}

const PATH_ERRORS: &[(&str, PathError)] = &[
    ("No such file or directory", PathError::Missing),
    ("ENOENT", PathError::Missing),
    ("Permission denied", PathError::Refused),
    ("permission denied", PathError::Refused),
    ("EACCES", PathError::Refused),
    ("Read-only file system", PathError::ReadOnly),
    ("EROFS", PathError::ReadOnly),
    (": not found", PathError::Unknown),
];

const LIMITS: &[(&str, LimitKey)] = &[
    ("Too many open files", LimitKey::OpenFiles),
    ("EMFILE", LimitKey::OpenFiles),
    ("File too large", LimitKey::FileSize),
    ("EFBIG", LimitKey::FileSize),
    ("can't start new thread", LimitKey::Processes),
    ("fork: retry: Resource temporarily unavailable", LimitKey::Processes),
    ("fork: Resource temporarily unavailable", LimitKey::Processes),
    ("BlockingIOError: [Errno 11]", LimitKey::Processes),
    ("Cannot fork", LimitKey::Processes),
    ("File size limit exceeded", LimitKey::FileSize),
    // A mapping of a file in /tmp or /dev/shm for which no page was left.
    ("Bus error", LimitKey::TmpSize),
];

/// What programs say when no memory is left to them.
const NO_MEMORY: &[&str] = &[
    "Cannot allocate memory",
    "cannot allocate memory",
    "xmalloc: cannot allocate",
    "xrealloc: cannot allocate",
    "_ArrayMemoryError: Unable to allocate",
    "std::bad_alloc",
    "JavaScript heap out of memory",
    "ENOMEM",
];

/// What programs say of a peer or a name that they do not reach.
const NO_NETWORK: &[&str] = &[
    "Temporary failure in name resolution",
    "Name or service not known",
    "Could not resolve host",
    "unable to resolve host address",
    "getaddrinfo EAI_AGAIN",
    "getaddrinfo ENOTFOUND",
    "Network is unreachable",
    "ENETUNREACH",
    "Address family not supported by protocol",
];

/// What pip ends with where it has no index, or where the distribution's Python is not its own.
const NO_PIP: &[&str] = &["ERROR: No matching distribution found for", "error: externally-managed-environment"];

/// The messages of one line, mostly none.
pub(super) fn read(line: &str) -> Vec<ErrorMessage> {
    let line = line.trim_end();
    if line.len() > MAX_LINE_LEN {
        return Vec::new();
    }
    if let Some(message) = module(line).or_else(|| command(line)).or_else(|| spawned(line)) {
        return vec![message];
    }
    if NO_PIP.iter().any(|words| line.starts_with(words)) {
        return vec![ErrorMessage::Pip];
    }
    if NO_NETWORK.iter().any(|words| line.contains(words)) {
        return vec![ErrorMessage::Network];
    }
    if line == "MemoryError" || line.starts_with("MemoryError:") || NO_MEMORY.iter().any(|words| line.contains(words)) {
        return vec![ErrorMessage::Limit(LimitKey::AddressSpace)];
    }
    if let Some((_, key)) = LIMITS.iter().find(|(words, _)| line.contains(words)) {
        return vec![ErrorMessage::Limit(*key)];
    }
    match PATH_ERRORS.iter().find_map(|(words, error)| Some((line.find(words)?, words, *error))) {
        Some((at, words, error)) => paths(line, at, words).into_iter().map(|path| ErrorMessage::Path { path, error }).collect(),
        None => Vec::new(),
    }
}

fn module(line: &str) -> Option<ErrorMessage> {
    let of = |name: &str, python| {
        let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | '@' | '/');
        let plain = name.len() <= MAX_NAME_LEN
            && name.chars().all(good)
            && name.starts_with(|c: char| c.is_ascii_alphabetic() || matches!(c, '_' | '@'));
        plain.then(|| ErrorMessage::Module { name: name.to_owned(), python })
    };
    for start in ["ModuleNotFoundError: No module named ", "ImportError: No module named "] {
        if let Some(rest) = line.strip_prefix(start) {
            let name = rest.strip_prefix('\'').and_then(|rest| rest.split('\'').next()).unwrap_or(rest);
            return of(name.split('.').next()?, true);
        }
    }
    // `python3 -m NAME`, behind the interpreter's path.
    if let Some((_, name)) = line.split_once("/python3: No module named ").or_else(|| line.split_once("/python: No module named ")) {
        return of(name.split('.').next()?, true);
    }
    let starts = ["Error: Cannot find module ", "Error [ERR_MODULE_NOT_FOUND]: Cannot find package "];
    let rest = starts.iter().find_map(|start| line.split_once(start).filter(|(before, _)| matches!(*before, "" | "Uncaught ")))?.1;
    of(rest.strip_prefix('\'')?.split('\'').next()?, false)
}

/// What Node could not start.
fn spawned(line: &str) -> Option<ErrorMessage> {
    let line = line.strip_prefix("<ref *1> ").unwrap_or(line);
    let rest = line.strip_prefix("Error: spawn").map(|rest| rest.strip_prefix("Sync").unwrap_or(rest))?.strip_prefix(' ')?;
    match rest.rsplit_once(' ')? {
        (name, "ENOENT") => plain_command(name),
        (_, "EAGAIN") => Some(ErrorMessage::Limit(LimitKey::Processes)),
        _ => None,
    }
}

/// The line of a traceback behind which Python names the program that it could not start.
pub(super) fn is_of_starting(line: &str) -> bool {
    line.trim_start().starts_with("File \"") && line.trim_end().ends_with("in _execute_child")
}

/// The command of a name without a directory.
pub(super) fn plain_command(name: &str) -> Option<ErrorMessage> {
    let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | '+');
    (!name.is_empty() && name.len() <= MAX_NAME_LEN && name.chars().all(good)).then(|| ErrorMessage::Command(name.to_owned()))
}

fn command(line: &str) -> Option<ErrorMessage> {
    let name = match line.strip_suffix(": command not found").or_else(|| line.strip_suffix(": not found")) {
        Some(before) => before.rsplit(": ").next()?,
        None => line.strip_prefix("/usr/bin/env: ").or_else(|| line.strip_prefix("env: "))?.strip_suffix(": No such file or directory")?,
    };
    plain_command(name.trim_matches(['\'', '‘', '’', '"']))
}

/// The paths in a line: the quoted ones, else the text between the last colon and the error.
fn paths(line: &str, at: usize, words: &str) -> Vec<String> {
    let quoted = quoted(line);
    let found: Vec<&str> = if quoted.is_empty() {
        let before = line.get(..at).unwrap_or_default().trim_end_matches([':', ' ']);
        let part = before.rsplit(": ").next().unwrap_or_default();
        // `cannot create /usr/x`: the path begins at the slash.
        let absolute = if part.starts_with('/') { Some(0) } else { part.find(" /").map(|at| at + 1) };
        let after = line.get(at + words.len()..).unwrap_or_default().trim_start_matches([',', ':', ' ']);
        let path = absolute.and_then(|at| part.get(at..)).or_else(|| after.starts_with('/').then_some(after)).unwrap_or(part);
        vec![path]
    } else {
        quoted
    };
    let good = |path: &&str| {
        !path.is_empty() && path.len() <= MAX_PATH_LEN && !path.contains(|c: char| c.is_control() || matches!(c, '\\' | '\u{fffd}'))
    };
    found.into_iter().filter(good).map(str::to_owned).collect()
}

/// The quoted texts of a line.
fn quoted(line: &str) -> Vec<&str> {
    let mut out = Vec::new();
    let mut rest = line;
    while let Some(at) = rest.find(['\'', '"', '‘', '`']) {
        let Some(open) = rest.get(at..).and_then(|rest| rest.chars().next()) else { break };
        let inside = rest.get(at + open.len_utf8()..).unwrap_or_default();
        // The apostrophe of `can't` is no quote.
        let word = rest.get(..at).and_then(|before| before.chars().next_back()).is_some_and(char::is_alphanumeric);
        let close = if open == '‘' {
            '’'
        } else if open == '`' {
            '\''
        } else {
            open
        };
        match inside.find(close) {
            Some(end) if !word => {
                out.extend(inside.get(..end));
                rest = inside.get(end + close.len_utf8()..).unwrap_or_default();
            }
            _ => rest = inside,
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(path: &str, error: PathError) -> Vec<ErrorMessage> {
        vec![ErrorMessage::Path { path: path.to_owned(), error }]
    }

    #[test]
    fn messages_of_programs_are_read() {
        for (line, path_in, error) in [
            ("FileNotFoundError: [Errno 2] No such file or directory: '/data/x.csv'", "/data/x.csv", PathError::Missing),
            ("PermissionError: [Errno 13] Permission denied: '.env'", ".env", PathError::Refused),
            ("OSError: [Errno 30] Read-only file system: '/usr/x'", "/usr/x", PathError::ReadOnly),
            ("cat: /data/x: No such file or directory", "/data/x", PathError::Missing),
            ("cat: .env: Permission denied", ".env", PathError::Refused),
            ("touch: cannot touch '/usr/x': Read-only file system", "/usr/x", PathError::ReadOnly),
            ("mkdir: cannot create directory ‘/data’: Permission denied", "/data", PathError::Refused),
            ("/tmp/a.sh: 1: cannot create /usr/x: Read-only file system", "/usr/x", PathError::ReadOnly),
            ("/scratch/a.sh: line 1: /usr/x: Read-only file system", "/usr/x", PathError::ReadOnly),
            ("/scratch/a.sh: 1: /opt/tool: not found", "/opt/tool", PathError::Unknown),
            ("Error: ENOENT: no such file or directory, open '/data/x'", "/data/x", PathError::Missing),
            ("python3: can't open file '/srv/a.py': [Errno 2] No such file or directory", "/srv/a.py", PathError::Missing),
            ("ls: cannot access '/home/sandbox/my file': No such file or directory", "/home/sandbox/my file", PathError::Missing),
        ] {
            assert_eq!(read(line), path(path_in, error), "{line}");
        }
    }

    #[test]
    fn modules_commands_and_limits_are_read() {
        let module = |name: &str, python| vec![ErrorMessage::Module { name: name.to_owned(), python }];
        assert_eq!(read("ModuleNotFoundError: No module named 'pandas'"), module("pandas", true));
        assert_eq!(read("ModuleNotFoundError: No module named 'sklearn.svm'; 'sklearn' is not a package"), module("sklearn", true));
        assert_eq!(read("Error: Cannot find module 'lodash'"), module("lodash", false));
        let package = "Error [ERR_MODULE_NOT_FOUND]: Cannot find package 'lodash' imported from /scratch/main.mjs";
        assert_eq!(read(package), module("lodash", false));
        assert_eq!(read("/usr/bin/python3: No module named pytest"), module("pytest", true));
        let command = |name: &str| vec![ErrorMessage::Command(name.to_owned())];
        assert_eq!(read("/scratch/a.sh: line 1: ruby: command not found"), command("ruby"));
        assert_eq!(read("/scratch/a.sh: 1: ruby: not found"), command("ruby"));
        assert_eq!(read("/usr/bin/env: ‘ruby’: No such file or directory"), command("ruby"));
        assert_eq!(read("Error: spawnSync ruby ENOENT"), command("ruby"));
        assert_eq!(read("<ref *1> Error: spawnSync ruby ENOENT"), command("ruby"));
        assert_eq!(read("Error: spawn ruby ENOENT"), command("ruby"));
        assert_eq!(read("MemoryError"), [ErrorMessage::Limit(LimitKey::AddressSpace)]);
        assert_eq!(read("OSError: [Errno 24] Too many open files: 'x'"), [ErrorMessage::Limit(LimitKey::OpenFiles)]);
        assert_eq!(read("OSError: [Errno 27] File too large"), [ErrorMessage::Limit(LimitKey::FileSize)]);
        for (line, key) in [
            ("RuntimeError: can't start new thread", LimitKey::Processes),
            ("BlockingIOError: [Errno 11] Resource temporarily unavailable", LimitKey::Processes),
            ("/bin/sh: 1: Cannot fork", LimitKey::Processes),
            ("Error: spawn sleep EAGAIN", LimitKey::Processes),
            ("/scratch/main.sh: xmalloc: cannot allocate 33554433 bytes", LimitKey::AddressSpace),
            ("File size limit exceeded (core dumped)", LimitKey::FileSize),
            ("Bus error", LimitKey::TmpSize),
            ("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 7.45 GiB for an array", LimitKey::AddressSpace),
            ("OSError: [Errno 12] Cannot allocate memory", LimitKey::AddressSpace),
            ("/scratch/main.sh: xrealloc: cannot allocate 18446744071562067968 bytes: cannot allocate memory", LimitKey::AddressSpace),
            ("FATAL ERROR: Reached heap limit Allocation failed - JavaScript heap out of memory", LimitKey::AddressSpace),
        ] {
            assert_eq!(read(line), [ErrorMessage::Limit(key)], "{line}");
        }
    }

    #[test]
    fn a_missing_network_is_read() {
        for line in [
            "socket.gaierror: [Errno -3] Temporary failure in name resolution",
            "OSError: [Errno 101] Network is unreachable",
            "OSError: [Errno 97] Address family not supported by protocol",
            "curl: (6) Could not resolve host: example.org",
            "Error: getaddrinfo EAI_AGAIN example.org",
            "Error: connect ENETUNREACH 192.0.2.1:443 - Local (0.0.0.0:0)",
        ] {
            assert_eq!(read(line), [ErrorMessage::Network], "{line}");
        }
        for line in ["ERROR: No matching distribution found for requests", "error: externally-managed-environment"] {
            assert_eq!(read(line), [ErrorMessage::Pip], "{line}");
        }
    }

    #[test]
    fn other_lines_give_nothing() {
        let long = format!("cat: /{}: No such file or directory", "x".repeat(5000));
        for line in [
            "",
            "Traceback (most recent call last):",
            "  File \"/usr/lib/python3/x.py\", line 3, in <module>",
            "a page was not found",
            "ModuleNotFoundError: No module named 'a b\u{7}'",
            "Error: Cannot find module './x'",
            &long,
            "cat: /a\\nb: No such file or directory",
            "cat: /a\u{1b}[2J: No such file or directory",
        ] {
            assert_eq!(read(line), [], "{line}");
        }
    }
}
