//! Policies of a test: a directory that the launcher trusts, policies that extend a shipped one,
//! and a copy of `/etc` with further files.

use std::{
    fs,
    path::PathBuf,
    process::{Command, Output},
};

use super::{
    exec::{program_path, run_under, run_with_stdin, text},
    runner::{directory, is_root},
    timeouts::is_slow,
};

/// A directory for policies that this launcher believes, and for copies of the program: root's
/// must be root's alone on the whole way, which nothing in /tmp is, and take programs with a
/// set-ID bit, which /run does not where systemd mounts it.
pub struct PolicyDirectory(pub PathBuf);

impl PolicyDirectory {
    pub fn new() -> Self {
        let path = if is_root() { PathBuf::from(format!("/var/lib/suite-{}", std::process::id())) } else { directory().join("policies") };
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
/// for what the sandbox does with such code. On a slow machine a request may take as long as
/// it needs.
pub fn unscreened(base: &str, lines: &str) -> String {
    let most = if is_slow() { "[limits.max]\nwall = \"none\"\ncpu = \"none\"\n" } else { "" };
    let screen = stockade_policy::load_shipped(base).unwrap().screen;
    let refused = screen.actions.iter().filter(|(_, action)| action.name() != "allow");
    let notes: String = refused.map(|(rule, _)| format!("{} = \"note\"\n", rule.name())).collect();
    derived_from(base, &format!("[screen]\n{notes}\n{most}{lines}"))
}

/// Runs a command line of the program where `/etc` is a copy that holds these files, in a
/// mount namespace of its own: the host's stays as it is.
pub fn with_etc(files: &[(&str, &str)], environment: &[(&str, &str)], arguments: &[&str], stdin: &str) -> Output {
    run_with_stdin(&mut command_with_etc(files, environment, arguments), stdin.as_bytes())
}

/// That command, not yet started.
pub fn command_with_etc(files: &[(&str, &str)], environment: &[(&str, &str)], arguments: &[&str]) -> Command {
    let program = program_path().unwrap();
    let mut command = command_under_etc(files, &[&[text(&program)], arguments].concat());
    command.envs(environment.iter().copied());
    command
}

/// The same of any command line.
pub fn command_under_etc(files: &[(&str, &str)], words: &[&str]) -> Command {
    let place = directory().join("etc");
    let _first = fs::create_dir(&place);
    let staged = directory().join("staged");
    let _before = fs::remove_dir_all(&staged);
    for (name, contents) in files {
        let path = staged.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, contents).unwrap();
    }
    fs::create_dir_all(&staged).unwrap();
    let script = "set -e; mount -t tmpfs -o mode=755 none \"$1\"; cp -a /etc/. \"$1\"; cp -r \"$2\"/. \"$1\"; chmod -R go-w \"$1\"/stockade 2>/dev/null || true; [ -z \"$SPOIL\" ] || chmod o+w \"$1\"/$SPOIL; mount --bind \"$1\" /etc; shift 2; exec \"$@\"";
    let first = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", text(&place), text(&staged)];
    run_under(&[&first, words].concat())
}
