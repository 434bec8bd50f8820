//! Files in a host scratch that the launcher itself reads, writes or removes: only those that the
//! code could, and no other file in the place of its own.

use std::{
    fs::{self, Permissions},
    io::Write,
    os::unix::fs::PermissionsExt,
    time::Duration,
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use crate::support::{
    exec::{chown_to_owner, exec, scratch, stockade, text, write_file},
    runner::{directory, eventually, test},
    session::Session,
};

test!(RootOnly, no_file_is_collected_that_the_code_could_not_read);
fn no_file_is_collected_that_the_code_could_not_read() {
    let scratch = scratch();
    for (name, mode) in [("roots", 0o600), ("everybodys", 0o644)] {
        let path = scratch.join(name);
        fs::write(&path, "contents").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
    }
    let code = "open('own', 'w').write('contents'); import os; os.chmod('own', 0o600)";
    let done = exec(json!({"code": code, "scratch": text(&scratch), "collect": ["*"]}));
    let read = |name: &str| {
        let files = done["files"].as_array().unwrap();
        files.iter().find(|file| file["path"] == name).map(|file| file["text"].clone()).unwrap_or_default()
    };
    assert_eq!((read("roots"), read("everybodys"), read("own")), (Value::Null, json!("contents"), json!("contents")), "{}", done.result);
}

test!(RootOnly, nothing_is_read_or_written_for_root_in_its_scratch_that_code_could_not);
fn nothing_is_read_or_written_for_root_in_its_scratch_that_code_could_not() {
    let path = directory().join("of-root");
    fs::create_dir_all(path.join("pd")).unwrap();
    for (name, mode) in [("priv", 0o600), ("pd/x", 0o600), ("pd", 0o700), ("own", 0o600)] {
        let path = path.join(name);
        if name != "pd" {
            fs::write(&path, "contents").unwrap();
        }
        fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        if name != "own" {
            chown_to_owner(&path);
        }
    }
    let code = "for name in ('priv', 'pd/x', 'own'):\n try: print(open(name).read())\n except OSError as e: print(e.errno)";
    let done = exec(json!({"code": code, "scratch": text(&path), "collect": ["priv", "pd/*", "own"]}));
    // The control is the file of root's own, mode 0600.
    assert_eq!(done.output(), "13\n13\ncontents\n", "{}", done.brief());
    let read: Vec<&str> = done["files"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|file| file["text"] == "contents")
        .filter_map(|file| file["path"].as_str())
        .collect();
    assert_eq!(read, ["own"], "{}", done["files"]);
    let mut session = Session::open(&["--scratch", text(&path)]);
    for name in ["priv", "pd/x"] {
        session.refused(json!({"op": "read", "path": name}), "permission_denied");
    }
    for name in ["priv", "pd/x", "pd/new"] {
        session.refused(json!({"op": "write", "path": name, "contents": "other"}), "permission_denied");
    }
    session.refused(json!({"op": "list", "path": "pd"}), "permission_denied");
    session.write("own", json!("written"));
    session.write("new/below", json!("written"));
    assert_eq!(session.ask(json!({"op": "read", "path": "own"}))["text"], "written");
    session.close();
    assert_eq!(fs::read_to_string(path.join("priv")).unwrap(), "contents");
    assert!(!path.join("pd/new").exists() && path.join("new/below").exists());
}

test!(serial Both, only_the_programs_own_file_is_removed_under_a_name_of_the_request, seconds 90);
/// Serial: a start of another test would be the next one, and remove what this looks for.
fn only_the_programs_own_file_is_removed_under_a_name_of_the_request() {
    let scratch = scratch();
    let program = scratch.join("app.py");
    let request = |code: &str| json!({"code": code, "scratch": text(&scratch), "filename": "app.py"}).to_string();
    let waits = request("import time; open('began', 'w').close(); time.sleep(600 if not __import__('os').path.exists('short') else 4)");
    let begin = || {
        let mut child = stockade(["exec"]).stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(waits.as_bytes()).unwrap();
        assert!(eventually(Duration::from_secs(20), || scratch.join("began").exists()));
        fs::remove_file(scratch.join("began")).unwrap();
        child
    };
    // A launcher that is killed removes nothing; the next start does.
    let mut child = begin();
    kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGKILL).unwrap();
    child.wait().unwrap();
    assert!(program.exists());
    exec(json!({"code": "", "scratch": text(&scratch)})).succeeded();
    assert!(eventually(Duration::from_secs(20), || !program.exists()));
    exec(json!({"code": "", "scratch": text(&scratch), "filename": "app.py"})).succeeded();
    // What the host has put in its place, during the run or after the launcher's death, stays.
    write_file(&scratch.join("short"), "");
    for killed in [false, true] {
        let mut child = begin();
        write_file(&scratch.join("new"), "the host's");
        fs::rename(scratch.join("new"), &program).unwrap();
        if killed {
            kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGKILL).unwrap();
        }
        child.wait().unwrap();
        exec(json!({"code": "", "scratch": text(&scratch)})).succeeded();
        assert_eq!(fs::read_to_string(&program).unwrap(), "the host's");
        fs::remove_file(&program).unwrap();
    }
}

test!(Both, a_listing_has_so_many_bytes_of_paths);
fn a_listing_has_so_many_bytes_of_paths() {
    // As many files, with names of 250 letters and of a few.
    for (letters, is_whole) in [(246, false), (1, true)] {
        let mut session = Session::open(&[]);
        session.output(&format!("for n in range(6000): open('\\x01' * {letters} + f'{{n:04}}', 'w').close()"));
        let listed = session.ask(json!({"op": "list"}));
        let entries = listed["entries"].as_array().unwrap().len();
        assert_eq!((&listed["truncated"], entries >= 6000), (&json!(!is_whole), is_whole), "{letters}: {entries}");
        assert!(listed.to_string().len() < 8 << 20);
        session.close();
    }
}
