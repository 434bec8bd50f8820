//! Sentences of interpreters, shells and the C library that say what was missing.
//!
//! One line at a time, without state, each read in time proportional to its length. What
//! is not plainly such a sentence gives nothing.

use stockade_protocol::LimitKey;

/// A line longer than this is no message for a person.
const LONGEST_LINE: usize = 4096;
/// A path longer than this is not repeated in a hint.
const LONGEST_PATH: usize = 1024;
/// A name longer than this is no module and no command.
const LONGEST_NAME: usize = 100;

/// What a line says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// A path, absolute or relative to the working directory, and what was wrong with it.
    Path { path: String, trouble: Trouble },
    /// A module that an interpreter did not find.
    Module { name: String, python: bool },
    /// A command that was not found.
    Command(String),
    /// Something that a limit refuses.
    Limit(LimitKey),
}

/// What was wrong with a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Trouble {
    Missing,
    Refused,
    ReadOnly,
    /// A shell's `not found`.
    Unknown,
}

impl Trouble {
    /// The error as a program knows it.
    pub(super) fn errno(self) -> &'static str {
        match self {
            Trouble::Missing | Trouble::Unknown => "ENOENT",
            Trouble::Refused => "EACCES",
            Trouble::ReadOnly => "EROFS",
        }
    }
}

const TROUBLES: &[(&str, Trouble)] = &[
    ("No such file or directory", Trouble::Missing),
    ("ENOENT", Trouble::Missing),
    ("Permission denied", Trouble::Refused),
    ("permission denied", Trouble::Refused),
    ("EACCES", Trouble::Refused),
    ("Read-only file system", Trouble::ReadOnly),
    ("EROFS", Trouble::ReadOnly),
    (": not found", Trouble::Unknown),
];

const LIMITS: &[(&str, LimitKey)] = &[
    ("Too many open files", LimitKey::OpenFiles),
    ("EMFILE", LimitKey::OpenFiles),
    ("File too large", LimitKey::FileSize),
    ("EFBIG", LimitKey::FileSize),
    ("can't start new thread", LimitKey::Processes),
    ("fork: retry: Resource temporarily unavailable", LimitKey::Processes),
    ("fork: Resource temporarily unavailable", LimitKey::Processes),
];

/// What one line says; mostly nothing.
pub(super) fn read(line: &str) -> Vec<Message> {
    let line = line.trim_end();
    if line.len() > LONGEST_LINE {
        return Vec::new();
    }
    if let Some(message) = module(line).or_else(|| command(line)) {
        return vec![message];
    }
    if line == "MemoryError" || line.starts_with("MemoryError:") || line.ends_with("Cannot allocate memory") {
        return vec![Message::Limit(LimitKey::AddressSpace)];
    }
    if let Some((_, key)) = LIMITS.iter().find(|(words, _)| line.contains(words)) {
        return vec![Message::Limit(*key)];
    }
    match TROUBLES.iter().find_map(|(words, trouble)| Some((line.find(words)?, words, *trouble))) {
        Some((at, words, trouble)) => paths(line, at, words).into_iter().map(|path| Message::Path { path, trouble }).collect(),
        None => Vec::new(),
    }
}

fn module(line: &str) -> Option<Message> {
    let of = |name: &str, python| {
        let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | '@' | '/');
        let plain = name.len() <= LONGEST_NAME
            && name.chars().all(good)
            && name.starts_with(|c: char| c.is_ascii_alphabetic() || matches!(c, '_' | '@'));
        plain.then(|| Message::Module { name: name.to_owned(), python })
    };
    for start in ["ModuleNotFoundError: No module named ", "ImportError: No module named "] {
        if let Some(rest) = line.strip_prefix(start) {
            let name = rest.strip_prefix('\'').and_then(|rest| rest.split('\'').next()).unwrap_or(rest);
            return of(name.split('.').next()?, true);
        }
    }
    let rest = line.strip_prefix("Error: Cannot find module ")?;
    of(rest.strip_prefix('\'')?.split('\'').next()?, false)
}

fn command(line: &str) -> Option<Message> {
    let name = match line.strip_suffix(": command not found").or_else(|| line.strip_suffix(": not found")) {
        Some(before) => before.rsplit(": ").next()?,
        None => line.strip_prefix("/usr/bin/env: ").or_else(|| line.strip_prefix("env: "))?.strip_suffix(": No such file or directory")?,
    };
    let name = name.trim_matches(['\'', '‘', '’', '"']);
    let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | '+');
    (!name.is_empty() && name.len() <= LONGEST_NAME && name.chars().all(good)).then(|| Message::Command(name.to_owned()))
}

/// The paths that a line names: those in quotes, else what stands before the error, up to
/// the colon before it.
fn paths(line: &str, at: usize, words: &str) -> Vec<String> {
    let quoted = quoted(line);
    let found: Vec<&str> = if quoted.is_empty() {
        let before = line.get(..at).unwrap_or_default().trim_end_matches([':', ' ']);
        let part = before.rsplit(": ").next().unwrap_or_default();
        // `cannot create /usr/x`: the words before the path are not part of it.
        let absolute = if part.starts_with('/') { Some(0) } else { part.find(" /").map(|at| at + 1) };
        let after = line.get(at + words.len()..).unwrap_or_default().trim_start_matches([',', ':', ' ']);
        let path = absolute.and_then(|at| part.get(at..)).or_else(|| after.starts_with('/').then_some(after)).unwrap_or(part);
        vec![path]
    } else {
        quoted
    };
    let good = |path: &&str| {
        !path.is_empty() && path.len() <= LONGEST_PATH && !path.contains(|c: char| c.is_control() || matches!(c, '\\' | '\u{fffd}'))
    };
    found.into_iter().filter(good).map(str::to_owned).collect()
}

/// Texts between quotes of one kind.
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

    fn path(path: &str, trouble: Trouble) -> Vec<Message> {
        vec![Message::Path { path: path.to_owned(), trouble }]
    }

    #[test]
    fn sentences_that_programs_say_are_read() {
        for (line, path_said, trouble) in [
            ("FileNotFoundError: [Errno 2] No such file or directory: '/data/x.csv'", "/data/x.csv", Trouble::Missing),
            ("PermissionError: [Errno 13] Permission denied: '.env'", ".env", Trouble::Refused),
            ("OSError: [Errno 30] Read-only file system: '/usr/x'", "/usr/x", Trouble::ReadOnly),
            ("cat: /data/x: No such file or directory", "/data/x", Trouble::Missing),
            ("cat: .env: Permission denied", ".env", Trouble::Refused),
            ("touch: cannot touch '/usr/x': Read-only file system", "/usr/x", Trouble::ReadOnly),
            ("mkdir: cannot create directory ‘/data’: Permission denied", "/data", Trouble::Refused),
            ("/tmp/a.sh: 1: cannot create /usr/x: Read-only file system", "/usr/x", Trouble::ReadOnly),
            ("/scratch/a.sh: line 1: /usr/x: Read-only file system", "/usr/x", Trouble::ReadOnly),
            ("/scratch/a.sh: 1: /opt/tool: not found", "/opt/tool", Trouble::Unknown),
            ("Error: ENOENT: no such file or directory, open '/data/x'", "/data/x", Trouble::Missing),
            ("python3: can't open file '/srv/a.py': [Errno 2] No such file or directory", "/srv/a.py", Trouble::Missing),
            ("ls: cannot access '/home/sandbox/my file': No such file or directory", "/home/sandbox/my file", Trouble::Missing),
        ] {
            assert_eq!(read(line), path(path_said, trouble), "{line}");
        }
    }

    #[test]
    fn modules_commands_and_limits_are_read() {
        let module = |name: &str, python| vec![Message::Module { name: name.to_owned(), python }];
        assert_eq!(read("ModuleNotFoundError: No module named 'pandas'"), module("pandas", true));
        assert_eq!(read("ModuleNotFoundError: No module named 'sklearn.svm'; 'sklearn' is not a package"), module("sklearn", true));
        assert_eq!(read("Error: Cannot find module 'lodash'"), module("lodash", false));
        let command = |name: &str| vec![Message::Command(name.to_owned())];
        assert_eq!(read("/scratch/a.sh: line 1: ruby: command not found"), command("ruby"));
        assert_eq!(read("/scratch/a.sh: 1: ruby: not found"), command("ruby"));
        assert_eq!(read("/usr/bin/env: ‘ruby’: No such file or directory"), command("ruby"));
        assert_eq!(read("MemoryError"), [Message::Limit(LimitKey::AddressSpace)]);
        assert_eq!(read("OSError: [Errno 24] Too many open files: 'x'"), [Message::Limit(LimitKey::OpenFiles)]);
        assert_eq!(read("OSError: [Errno 27] File too large"), [Message::Limit(LimitKey::FileSize)]);
        assert_eq!(read("RuntimeError: can't start new thread"), [Message::Limit(LimitKey::Processes)]);
    }

    #[test]
    fn what_is_no_such_sentence_gives_nothing() {
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
