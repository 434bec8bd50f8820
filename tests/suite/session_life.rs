//! A session over many requests: what one leaves to the next, what it costs, whose rights it
//! has, and what becomes of it when its scratch goes away or is closed.

use std::{fs, os::unix::fs::MetadataExt};

use serde_json::{Value, json};

use crate::support::{
    audit_log::{is_whole, own_log, records},
    exec::{OWNER, chown_to_owner, run_with_stdin, scratch, stockade, text, token, write_file},
    policy_dir::{PolicyDirectory, command_with_etc, derived},
    runner::{directory, test},
    session::Session,
};

/// Every place where an interpreter of the host looks for something to run by itself.
const PLANT: &str = "import os, site
home = os.path.expanduser('~')
packages = site.getusersitepackages()
os.makedirs(packages)
os.makedirs('node_modules/planted')
for place, text in {
    packages + '/planted.pth': \"import sys; print('pth')\",
    packages + '/usercustomize.py': \"print('usercustomize')\",
    'textwrap.py': \"print('module')\",
    'node_modules/planted/index.js': \"console.log('node module')\",
    'sitecustomize.py': \"print('NOT')\",
    '.pth': \"print('NOT')\",
    **{home + '/' + name: 'echo NOT' for name in ('.bashrc', '.profile', '.bash_profile', '.bash_login', '.shrc', '.noderc')},
    '/tmp/sitecustomize.py': \"print('NOT')\",
}.items():
    open(place, 'w').write(text)
for place in (home + '/bin', home + '/.local/bin', '.'):
    os.makedirs(place, exist_ok=True)
    open(place + '/true', 'w').write('#!/bin/sh\\necho NOT')
    os.chmod(place + '/true', 0o755)
";

test!(Both, what_one_request_planted_acts_on_the_next_until_a_reset, seconds 60);
fn what_one_request_planted_acts_on_the_next_until_a_reset() {
    let mut session = Session::open(&[]);
    session.output(PLANT);
    let next = |session: &mut Session| session.output("print('program')\nimport textwrap");
    assert_eq!(next(&mut session), "pth\nusercustomize\nprogram\nmodule\n");
    for (language, code) in [("bash", "true; echo program"), ("sh", "true; echo program"), ("node", "console.log('program')")] {
        let result = session.ask(json!({"op": "run", "language": language, "code": code}));
        assert_eq!(result["output"], "program\n", "{language}: {}", result["error"]);
    }
    let result = session.ask(json!({"op": "run", "language": "node", "code": "require('planted')"}));
    assert_eq!(result["output"], "node module\n", "{}", result["error"]);
    session.ask(json!({"op": "reset"}));
    assert_eq!(next(&mut session), "program\n");
    session.close();
}

test!(Both, a_scratch_that_its_code_closed_is_open_to_the_next_program, seconds 60);
fn a_scratch_that_its_code_closed_is_open_to_the_next_program() {
    let mut session = Session::open(&[]);
    for mode in ["0", "0o555", "0o077"] {
        session.output(&format!("import os; open('kept', 'w').write('k'); os.chmod('.', {mode})"));
        assert_eq!(session.output("print(open('kept').read())"), "k\n", "mode {mode}");
    }
    // What it closes elsewhere stays closed, as it does to code that asks for it.
    session.output("import os; os.chmod('/tmp', 0)");
    session.refused(json!({"op": "read", "path": "/tmp/x"}), "permission_denied");
    session.close();
}

test!(Both, without_its_scratch_a_session_says_so_and_goes_on_when_it_is_back, seconds 60);
fn without_its_scratch_a_session_says_so_and_goes_on_when_it_is_back() {
    let host = scratch();
    let away = host.with_file_name("away");
    let mut session = Session::open(&["--scratch", text(&host)]);
    session.output("open('kept', 'w').write('k'); open('/tmp/kept', 'w').write('t')");
    fs::rename(&host, &away).unwrap();
    let result = session.run("print(1)");
    assert_eq!((&result["verdict"], &result["reason"]), (&json!("bad_request"), &json!("scratch_missing")), "{result}");
    for line in [json!({"op": "read", "path": "kept"}), json!({"op": "write", "path": "kept", "contents": "x"}), json!({"op": "list"})] {
        session.refused(line, "scratch_missing");
    }
    assert_eq!(session.ask(json!({"op": "read", "path": "/tmp/kept"}))["text"], "t");
    // Nor is another in its place taken for it, where that is none.
    write_file(&host, "a file");
    assert_eq!(session.run("print(1)")["reason"], "scratch_not_directory");
    fs::remove_file(&host).unwrap();
    fs::rename(&away, &host).unwrap();
    assert_eq!(session.output("print(open('kept').read(), open('/tmp/kept').read())"), "k t\n");
    session.close();
}

test!(Both, what_earlier_requests_left_is_charged_to_no_later_one, needs [Cgroup], seconds 60);
fn what_earlier_requests_left_is_charged_to_no_later_one() {
    let policies = PolicyDirectory::new();
    let limits = "[limits]\nmemory = \"192MiB\"\nscratch_size = \"96MiB\"\ntmp_size = \"16MiB\"";
    let mut session = Session::open(&["--policy", &policies.write("small", &derived(limits))]);
    let leave = "open('left', 'wb').write(b'x' * (90 << 20))";
    let take = "taken = bytearray(130 << 20); print(len(taken))";
    // A control: together they are more than there is.
    let both = session.run(&format!("{leave}\n{take}"));
    assert_eq!(both["verdict"], "out_of_memory", "{}", both["error"]);
    session.ask(json!({"op": "reset"}));
    session.output(leave);
    // Reading it, piece by piece, charges it to no cgroup anew.
    let read = "left = open('left', 'rb'); print(sum(map(len, iter(lambda: left.read(1 << 20), b''))))";
    assert_eq!(session.output(&format!("{take}\n{read}")), "136314880\n94371840\n");
    session.close();
}

test!(Both, a_failure_beside_a_full_tmp_is_told_as_a_full_disk, seconds 60);
fn a_failure_beside_a_full_tmp_is_told_as_a_full_disk() {
    let mut session = Session::open(&[]);
    let fill =
        "f = open('/tmp/all', 'wb', buffering=0)\ntry:\n  while True: f.write(b'x' * 65536)\nexcept OSError as error: print(error.errno)";
    let result = session.run(fill);
    assert_eq!((&result["verdict"], &result["output"]), (&json!("exited"), &json!("28\n")), "{result}");
    assert_eq!(result["limits_hit"], json!(["tmp_size"]));
    // Whether that was the cause is unknown; a client should check it first.
    let failed = session.run("raise SystemExit(3)");
    assert_eq!((&failed["verdict"], &failed["code"]), (&json!("disk_limit"), &json!(3)), "{failed}");
    session.write("/tmp/all", json!(""));
    let failed = session.run("raise SystemExit(3)");
    assert_eq!((&failed["verdict"], &failed["code"]), (&json!("exited"), &json!(3)), "{failed}");
    session.close();
}

test!(Both, what_is_done_with_files_is_written_down, seconds 60);
fn what_is_done_with_files_is_written_down() {
    let log = own_log();
    let secret = token("contents");
    let mut session = Session::open(&[]);
    session.write("sub/a", json!(secret));
    session.ask(json!({"op": "write", "path": "sub/a", "contents": "+", "append": true, "id": "job-7"}));
    assert_eq!(session.ask(json!({"op": "read", "path": "sub/a", "length": 3}))["size"], secret.len() + 1);
    session.ask(json!({"op": "list", "path": "/tmp"}));
    session.refused(json!({"op": "read", "path": "/etc/shadow"}), "path_outside");
    session.ask(json!({"op": "reset"}));
    session.output("print(1)");
    session.close();
    let all = records(&log);
    let events: Vec<&Value> = all.iter().map(|record| &record["event"]).collect();
    assert_eq!(events, ["opened", "files", "files", "files", "files", "files", "files", "run"], "{all:?}");
    let acts: Vec<&Value> = all.iter().filter(|record| record["event"] == "files").map(|record| &record["files"]).collect();
    let wanted = [
        json!({"op": "write", "path": "sub/a", "bytes": secret.len()}),
        json!({"op": "append", "path": "sub/a", "bytes": secret.len() + 1}),
        json!({"op": "read", "path": "sub/a", "bytes": 3}),
        json!({"op": "list", "path": "/tmp"}),
        json!({"op": "read", "path": "/etc/shadow"}),
        json!({"op": "reset", "path": ""}),
    ];
    assert_eq!(acts, wanted.iter().collect::<Vec<_>>());
    assert_eq!((&all[2]["id"], &all[2]["verdict"]), (&json!("job-7"), &Value::Null));
    assert_eq!((&all[5]["verdict"], &all[5]["reason"]), (&json!("bad_request"), &json!("path_outside")));
    assert!(!all.iter().any(|record| record.to_string().contains(&secret)), "what stands in files is not written down");
    is_whole();
    let tail = String::from_utf8(stockade(["audit", "tail", "-n", "3"]).output().unwrap().stdout).unwrap();
    assert!(tail.contains("  files  bad_request  path_outside  ") && tail.contains("read /etc/shadow"), "{tail}");
}

test!(Both, a_required_log_that_cannot_be_written_keeps_files_back, seconds 60);
fn a_required_log_that_cannot_be_written_keeps_files_back() {
    let log = own_log();
    let policies = PolicyDirectory::new();
    let policy = policies.write("required", &derived("[audit]\nmode = \"required\""));
    let mut session = Session::open(&["--policy", &policy]);
    session.write("a", json!("kept back"));
    assert_eq!(session.ask(json!({"op": "read", "path": "a"}))["text"], "kept back", "a control");
    let last = log.join("audit-00000001.jsonl");
    let whole = fs::read_to_string(&last).unwrap();
    fs::write(&last, whole.replace("\"write\"", "\"wrote\"")).unwrap();
    let answer = session.ask(json!({"op": "read", "path": "a"}));
    assert_eq!((&answer["ok"], &answer["reason"], answer.get("text")), (&json!(false), &json!("audit_corrupted"), None), "{answer}");
    assert!(answer["error"].as_str().unwrap().contains("requires: the audit log"), "{answer}");
    fs::write(&last, whole).unwrap();
    assert_eq!(session.ask(json!({"op": "read", "path": "a"}))["text"], "kept back");
    session.close();
}

test!(RootOnly, through_sudo_a_session_has_what_is_granted, seconds 60);
fn through_sudo_a_session_has_what_is_granted() {
    let granted = scratch();
    let other = directory().join("other");
    fs::create_dir(&other).unwrap();
    chown_to_owner(&other);
    let id = OWNER.to_string();
    let variables = [("SUDO_UID", id.as_str()), ("SUDO_GID", id.as_str()), ("SUDO_USER", "agent")];
    let grants = format!("[[grant]]\nuid = {OWNER}\npolicies = [\"default\"]\nscratch = [{:?}]\n", text(&granted));
    let files = [("stockade/grants.toml", grants.as_str())];
    for (files, options, named) in [
        (&[][..], &["session"][..], "/etc/stockade/grants.toml"),
        (&files[..], &["session", "--policy", "shell"][..], "`shell`"),
        (&files[..], &["session", "--scratch", text(&other)][..], text(&other)),
    ] {
        let output = run_with_stdin(&mut command_with_etc(files, &variables, options), b"{\"op\":\"run\",\"code\":\"print(1)\"}\n");
        let line: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!((&line["op"], &line["reason"], output.status.code()), (&json!("ready"), &json!("not_granted"), Some(125)), "{line}");
        assert!(line["error"].as_str().unwrap().contains(named), "{line}");
    }
    let mut session = Session::of(&mut command_with_etc(&files, &variables, &["session", "--scratch", text(&granted)]));
    session.output("open('by-code', 'w')");
    session.write("by-session", json!("s"));
    for name in ["by-code", "by-session"] {
        assert_eq!(fs::metadata(granted.join(name)).unwrap().uid(), OWNER, "{name}");
    }
    // A file of root's, in a directory of the caller's, is written by neither.
    fs::write(granted.join("roots"), "r").unwrap();
    session.refused(json!({"op": "write", "path": "roots", "contents": "x"}), "permission_denied");
    session.close();
}

test!(Both, there_is_no_session_behind_a_socket);
fn there_is_no_session_behind_a_socket() {
    let output = stockade(["session", "--socket", "/run/stockade/default.sock"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("unexpected argument '--socket'"), "{said}");
}
