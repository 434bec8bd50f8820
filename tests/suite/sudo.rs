//! What a caller of sudo cannot have from root's launcher: another's files read or written, or a run
//! without its record. What grants allow is in `policies.rs`.

use std::{
    fs::{self, Permissions},
    io::Read,
    os::unix::fs::PermissionsExt,
    process::Output,
    thread,
    time::Duration,
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use crate::support::{
    exec::{ExecResult, OWNER, both_streams, chown_to_owner, run_under, run_with_stdin, stockade, text, token},
    policy_dir::{PolicyDirectory, command_with_etc, with_etc},
    runner::{directory, test},
    timeouts::{scaled, scaled_limit},
};

/// `stockade` by root behind sudo, for a caller with these grants.
fn behind_sudo(grants: Option<&str>, arguments: &[&str]) -> Output {
    let files: Vec<(&str, &str)> = grants.map(|grants| ("stockade/grants.toml", grants)).into_iter().collect();
    let id = OWNER.to_string();
    with_etc(&files, &[("SUDO_UID", id.as_str()), ("SUDO_GID", id.as_str()), ("SUDO_USER", "agent")], arguments, "")
}

fn grant_of_default() -> String {
    format!("[[grant]]\nuid = {OWNER}\npolicies = [\"default\"]\n")
}

test!(RootOnly, sudo_writes_no_report_where_its_caller_could_not);
fn sudo_writes_no_report_where_its_caller_could_not() {
    let place = PolicyDirectory::new();
    let (old, new, linked) = (place.0.join("old"), place.0.join("new"), directory().join("linked"));
    fs::write(&old, "untouched").unwrap();
    fs::set_permissions(&old, Permissions::from_mode(0o600)).unwrap();
    std::os::unix::fs::symlink(&old, &linked).unwrap();
    let granted = grant_of_default();
    for grants in [None, Some(granted.as_str())] {
        for path in [&old, &new, &linked] {
            let output = behind_sudo(grants, &["run", "--report", text(path), "--", "true"]);
            assert_eq!(output.status.code(), Some(125), "{}", both_streams(&output));
            assert_eq!(fs::read_to_string(&old).unwrap(), "untouched");
            assert!(!new.exists());
        }
    }
    // The controls: where the caller may write, and root for itself.
    let own = directory().join("own");
    fs::create_dir(&own).unwrap();
    chown_to_owner(&own);
    let report = own.join("report");
    let output = behind_sudo(Some(&granted), &["run", "--report", text(&report), "--", "true"]);
    assert_eq!(output.status.code(), Some(0), "{}", both_streams(&output));
    for path in [&old, &new] {
        let output = stockade(["run", "--report", text(path), "--", "true"]).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", both_streams(&output));
    }
    for path in [&report, &old, &new] {
        let written: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
        assert_eq!(written["success"], true, "{}", path.display());
    }
}

test!(RootOnly, sudo_quotes_no_file_that_its_caller_could_not_read);
fn sudo_quotes_no_file_that_its_caller_could_not_read() {
    let place = PolicyDirectory::new();
    let secret = token("quoted");
    let path = place.write("secret", &format!("root:{secret}:19000:0:99999\n"));
    fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
    let granted = grant_of_default();
    for grants in [None, Some(granted.as_str())] {
        for arguments in [&["run", "--policy", &path, "--", "true"][..], &["run", "--dry-run", "--policy", &path, "--", "true"]] {
            let output = behind_sudo(grants, arguments);
            assert_eq!(output.status.code(), Some(125), "{}", both_streams(&output));
            assert!(!both_streams(&output).contains(&secret), "{}", both_streams(&output));
        }
    }
    // The control: the words for root itself do quote it.
    let output = stockade(["run", "--policy", &path, "--", "true"]).output().unwrap();
    assert!(output.status.code() == Some(125) && both_streams(&output).contains(&secret), "{}", both_streams(&output));
}

test!(RootOnly, limits_of_a_caller_of_sudo_keep_no_run_out_of_the_log);
fn limits_of_a_caller_of_sudo_keep_no_run_out_of_the_log() {
    let grants = grant_of_default();
    let id = OWNER.to_string();
    let environment = [("SUDO_UID", id.as_str()), ("SUDO_GID", id.as_str()), ("SUDO_USER", "agent")];
    let is_recorded = |done: &ExecResult| {
        let run = done["audit"]["run"].as_str().unwrap();
        let files = fs::read_dir("/var/log/stockade").unwrap().flatten();
        files.filter_map(|file| fs::read_to_string(file.path()).ok()).any(|text| text.contains(run))
    };
    let ask = |limit: &str| {
        let command = command_with_etc(&[("stockade/grants.toml", &grants)], &environment, &["exec"]);
        let words: Vec<&str> =
            std::iter::once(command.get_program()).chain(command.get_args()).map(|word| word.to_str().unwrap()).collect();
        let mut limited = run_under(&[&["prlimit", limit, "--"], &words[..]].concat());
        limited.envs(environment);
        ExecResult::of(run_with_stdin(&mut limited, br#"{"code": "print(6*7)"}"#))
    };
    // The control; and a limit that root may lift without any right.
    for limit in ["--fsize=unlimited", "--fsize=67108864:unlimited", "--cpu=1000:unlimited"] {
        let done = ask(limit);
        done.succeeded().expect(json!({"output": "42\n"}));
        assert!(is_recorded(&done), "{limit}");
    }
    for limit in ["--fsize=67108864:67108864", "--cpu=1000:1000", "--as=8000000000:8000000000"] {
        let done = ask(limit);
        match done["verdict"].as_str() {
            // Root here may lift any.
            Some("exited") => assert!(is_recorded(&done), "{limit}"),
            _ => drop(done.broke("limits_of_caller", &["ulimit", "CAP_SYS_RESOURCE"])),
        }
    }
}

test!(RootOnly, a_caller_of_sudo_ends_or_stops_no_run_before_its_record);
fn a_caller_of_sudo_ends_or_stops_no_run_before_its_record() {
    let grants = grant_of_default();
    let id = OWNER.to_string();
    let environment = [("SUDO_UID", id.as_str()), ("SUDO_GID", id.as_str()), ("SUDO_USER", "agent")];
    for (signals, verdict) in
        [(&[Signal::SIGINT, Signal::SIGQUIT, Signal::SIGHUP][..], "cancelled"), (&[Signal::SIGTSTP][..], "wall_timeout")]
    {
        let mut command = command_with_etc(&[("stockade/grants.toml", &grants)], &environment, &["exec"]);
        let mut child = command.stdin(std::process::Stdio::piped()).spawn().unwrap();
        let wall = scaled_limit(3000);
        // Other tests' runs are in this log too.
        let named = format!("{verdict}-{}", std::process::id());
        let request = json!({"id": named, "code": "import time\nwhile True: time.sleep(1)", "limits": {"wall": wall}}).to_string();
        std::io::Write::write_all(&mut child.stdin.take().unwrap(), request.as_bytes()).unwrap();
        let pid = Pid::from_raw(child.id().cast_signed());
        thread::sleep(scaled(Duration::from_millis(700)));
        let mut said = String::new();
        while child.try_wait().unwrap().is_none() {
            for signal in signals {
                let _gone = kill(pid, *signal);
            }
            thread::sleep(Duration::from_micros(300));
        }
        child.stdout.take().unwrap().read_to_string(&mut said).unwrap();
        let files = fs::read_dir("/var/log/stockade").unwrap().flatten();
        let log: String = files.filter_map(|file| fs::read_to_string(file.path()).ok()).collect();
        let last = log.lines().rfind(|line| line.contains(&format!("\"id\":\"{named}\""))).unwrap_or_default();
        assert!(last.contains(&format!("\"verdict\":\"{verdict}\"")), "{signals:?}: {last}\n{said}");
    }
}
