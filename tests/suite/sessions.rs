//! Sessions: requests one after the other whose files outlive them, and nothing else does.

use std::{
    collections::BTreeSet,
    fs,
    io::Write,
    os::unix::fs::{MetadataExt, symlink},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use crate::support::{
    exec::{OWNER, chown_to_owner, exec, run_with_stdin, scratch, scratch_named, stockade, text, token, write_file},
    leftovers::{cgroups_of, dead_records, mounts, no_process_is_left, processes, processes_around, the_next_start_has_swept},
    policy_dir::{PolicyDirectory, derived},
    runner::{directory, eventually, is_root, test, wait_within},
    session::{Session, begin, children, is_screener, prepared_sandbox, stop},
    starts::NO_TEMPLATE,
    timeouts::scaled_limit,
};

const PLACES: &str = "import os; places = ['.', '/tmp', os.path.expanduser('~'), '/dev/shm']\n";

test!(Both, files_outlive_a_request_and_end_with_the_session, seconds 60);
fn files_outlive_a_request_and_end_with_the_session() {
    let mut session = Session::open(&[]);
    session.output(&format!("{PLACES}for place in places: open(place + '/kept', 'w').write(place)"));
    let found = session.output(&format!("{PLACES}print([open(place + '/kept').read() for place in places], sorted(os.listdir('.')))"));
    assert!(found.starts_with("['.', '/tmp', '/home/sandbox', '/dev/shm'] ['kept', 'stockade_"), "{found}");
    // The program of an earlier request is not there.
    assert_eq!(found.matches("stockade_").count(), 1, "{found}");
    // A control, that they are this session's and no other's.
    let mut other = Session::open(&[]);
    assert_eq!(
        other.output(&format!("{PLACES}print([os.path.exists(place + '/kept') for place in places])")),
        "[False, False, False, False]\n"
    );
    session.close();
    other.close();
}

test!(Both, each_request_is_its_own_run, seconds 60);
fn each_request_is_its_own_run() {
    let mut session = Session::open(&[]);
    let line =
        json!({"op": "run", "id": "a", "code": "import os; os.environ['LEFT'] = 'x'; x = 1; os.chdir('/tmp')", "labels": {"k": "v"}});
    let first = session.ask(line);
    assert_eq!((&first["id"], &first["labels"], &first["schema"]), (&json!("a"), &json!({"k": "v"}), &json!(1)));
    let second = session.run("import os; print('LEFT' in os.environ, 'x' in globals(), os.getcwd(), os.getpid())");
    assert_eq!(second["output"], "False False /scratch 2\n");
    let layers = |result: &Value| -> BTreeSet<String> {
        result["receipt"]["layers"].as_array().unwrap().iter().map(|layer| layer["layer"].as_str().unwrap().to_owned()).collect()
    };
    // The same layers as a run without a session has, each with its receipt.
    let alone = exec(json!({"code": "1"}));
    assert_eq!(layers(&second), layers(&alone.result));
    assert_ne!(first["audit"]["run"], second["audit"]["run"]);
    let mounts = second["receipt"]["layers"].as_array().unwrap().iter().find(|layer| layer["layer"] == "mounts").unwrap();
    assert!(mounts["detail"].as_str().unwrap().ends_with("which outlive the run"), "{mounts}");
    for (line, reason) in [
        (json!({"op": "run", "code": "1", "scratch": "/srv"}), "scratch_of_session"),
        (json!({"op": "run", "code": "1", "limits": {"scratch_size": "1MiB"}}), "limit_of_session"),
        (json!({"op": "run", "code": "1", "limits": {"tmp_size": "1MiB"}}), "limit_of_session"),
        (json!({"op": "run", "code": "1", "language": "cobol"}), "unknown_language"),
        (json!({"op": "run", "code": "1", "limits": {"wall": "1day"}}), "limit_malformed"),
    ] {
        let result = session.ask(line);
        assert_eq!((&result["verdict"], &result["started"]), (&json!("bad_request"), &json!(false)), "{result}");
        assert_eq!(result["reason"], reason, "{result}");
    }
    assert_eq!(session.output("print(1)"), "1\n");
    session.close();
}

test!(Both, no_process_outlives_its_request, seconds 60);
fn no_process_outlives_its_request() {
    let mut session = Session::open(&[]);
    let words = token("daemon");
    let daemon = "import os, sys, time\nif os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\nopen('/tmp/alive', 'w').write(str(os.getpid()))\ntime.sleep(600)";
    let code = format!(
        "import subprocess, sys, os, time\nsubprocess.Popen([sys.executable, '-c', {daemon:?}, {words:?}], stdin=-3, stdout=-3, stderr=-3)\nwhile not os.path.exists('/tmp/alive') or not open('/tmp/alive').read(): time.sleep(0.01)\nprint('started')"
    );
    assert_eq!(session.output(&code), "started\n");
    // It had begun, as its own file shows, and is gone.
    no_process_is_left(&words);
    assert_eq!(session.output("import os; print([p for p in os.listdir('/proc') if p.isdigit()])"), "['1', '2']\n");
    session.close();
}

test!(Both, neither_a_lock_nor_an_open_file_outlives_its_request, seconds 60);
fn neither_a_lock_nor_an_open_file_outlives_its_request() {
    let mut session = Session::open(&[]);
    let held = "import fcntl, os\nlock = open('lock', 'w'); fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)\nif os.fork() == 0:\n  os.setsid(); import time; time.sleep(600)\nfree = os.statvfs('.').f_bfree\nlost = open('lost', 'wb'); lost.write(b'x' * (8 << 20)); lost.flush(); os.unlink('lost')\nprint(free - os.statvfs('.').f_bfree >= 2048)\n";
    // A control, in it: the deleted file takes room for as long as it is open.
    assert_eq!(session.output(held), "True\n");
    let next = session.output(
        "import fcntl, os\nfcntl.flock(open('lock', 'w'), fcntl.LOCK_EX | fcntl.LOCK_NB)\ns = os.statvfs('.'); print((s.f_blocks - s.f_bfree) * s.f_frsize < 1 << 20)",
    );
    assert_eq!(next, "True\n");
    session.close();
}

test!(Both, the_wall_clock_is_each_requests_own, seconds 60);
fn the_wall_clock_is_each_requests_own() {
    let mut session = Session::open(&[]);
    let begun = Instant::now();
    let result = session.ask(
        json!({"op": "run", "code": "open('before', 'w').write('x')\nimport time\ntime.sleep(60)", "limits": {"wall": scaled_limit(1500)}}),
    );
    assert_eq!((&result["verdict"], &result["code"]), (&json!("wall_timeout"), &json!(124)), "{result}");
    assert!(begun.elapsed() < Duration::from_secs(50));
    // What it had written is there, and the next has its own clock.
    assert_eq!(session.output("import os, time; time.sleep(0.1); print(os.listdir('.').count('before'))"), "1\n");
    session.close();
}

test!(Both, a_request_is_cancelled_while_it_runs_and_the_session_goes_on, seconds 60);
fn a_request_is_cancelled_while_it_runs_and_the_session_goes_on() {
    let mut session = Session::open(&[]);
    assert_eq!(session.ask(json!({"op": "cancel"}))["cancelled"], false, "nothing runs");
    let long =
        json!({"op": "run", "id": "long", "code": "print('begun', flush=True)\nimport time\ntime.sleep(60)", "limits": {"wall": "10min"}});
    // Sent ahead, so that it may be read before the request begins, or while it runs.
    session.send(&long.to_string());
    session.send(r#"{"op":"cancel","run":"another","id":"c1"}"#);
    session.send(r#"{"op":"run","code":"print('next')"}"#);
    session.send(r#"{"op":"run","code":"print('never')","id":"never"}"#);
    session.send(r#"{"op":"cancel","run":"long","id":"c2"}"#);
    session.send(r#"{"op":"cancel","run":"never"}"#);
    let cancelled = session.answer();
    assert_eq!(
        (&cancelled["id"], &cancelled["verdict"], &cancelled["code"]),
        (&json!("long"), &json!("cancelled"), &json!(130)),
        "{cancelled}"
    );
    assert_eq!(session.answer(), json!({"op": "cancel", "ok": true, "id": "c1", "cancelled": false}));
    assert_eq!(session.answer()["output"], "next\n");
    let never = session.answer();
    assert_eq!((&never["id"], &never["verdict"], &never["started"]), (&json!("never"), &json!("cancelled"), &json!(false)), "{never}");
    assert_eq!(session.answer(), json!({"op": "cancel", "ok": true, "id": "c2", "cancelled": true}));
    assert_eq!(session.answer(), json!({"op": "cancel", "ok": true, "cancelled": true}));
    // And one that certainly runs.
    let words = token("cancelled");
    begin(&mut session, &words);
    session.send(r#"{"op":"cancel"}"#);
    let cancelled = session.answer();
    assert_eq!(
        (&cancelled["verdict"], &cancelled["code"], &cancelled["started"]),
        (&json!("cancelled"), &json!(130), &json!(true)),
        "{cancelled}"
    );
    assert_eq!(session.answer()["cancelled"], true);
    no_process_is_left(&words);
    assert_eq!(session.output("print('on')"), "on\n");
    session.close();
}

test!(Both, signals_cancel_a_request_or_end_the_session, seconds 60);
fn signals_cancel_a_request_or_end_the_session() {
    for (signal, ends) in [(Signal::SIGINT, false), (Signal::SIGTERM, true), (Signal::SIGHUP, true)] {
        let words = token(signal.as_str());
        let mut session = Session::open(&[]);
        session.output("open('kept', 'w')");
        begin(&mut session, &words);
        kill(session.pid(), signal).unwrap();
        let result = session.answer();
        assert_eq!((&result["verdict"], &result["code"]), (&json!("cancelled"), &json!(128 + signal as i32)), "{result}");
        no_process_is_left(&words);
        if ends {
            assert_eq!(session.ended().code(), Some(128 + signal as i32));
        } else {
            assert_eq!(session.output("import os; print(os.path.exists('kept'))"), "True\n");
            // With nothing to cancel it ends the session too.
            kill(session.pid(), signal).unwrap();
            assert_eq!(session.ended().code(), Some(130));
        }
    }
}

test!(Both, a_signal_ends_the_session_whatever_its_request_is_ending_by, seconds 60);
fn a_signal_ends_the_session_whatever_its_request_is_ending_by() {
    // A control: SIGINT means the request alone, and finds it ended.
    for (signal, ends) in [(Signal::SIGINT, false), (Signal::SIGTERM, true), (Signal::SIGHUP, true)] {
        // The stop is news to the session's loop as well, which may then see the signal first.
        assert!((0..20).any(|_| meets_a_request_that_ends(signal, ends)), "{signal} never met a request that a line was ending");
    }
}

/// Sends a line that cancels a request, then this signal, to a session that sees both at once.
/// Whether the line was first.
fn meets_a_request_that_ends(signal: Signal, ends: bool) -> bool {
    let words = token(signal.as_str());
    let mut session = Session::open(&[]);
    begin(&mut session, &words);
    stop(session.pid());
    session.send(r#"{"op":"cancel"}"#);
    kill(session.pid(), signal).unwrap();
    kill(session.pid(), Signal::SIGCONT).unwrap();
    let result = session.answer();
    let by_line = result["code"] == json!(130);
    assert!(result["verdict"] == "cancelled" && (by_line || result["code"] == json!(128 + signal as i32)), "{result}");
    no_process_is_left(&words);
    if ends {
        assert_eq!(session.ended().code(), Some(128 + signal as i32));
        return by_line;
    }
    let met = session.answer()["cancelled"] == true;
    assert_eq!(session.output("print('on')"), "on\n");
    session.close();
    met
}

test!(Both, a_reset_empties_what_the_session_keeps_and_no_host_scratch, seconds 60);
fn a_reset_empties_what_the_session_keeps_and_no_host_scratch() {
    let code = format!("{PLACES}[open(place + '/kept', 'w') for place in places]");
    let look = format!("{PLACES}print([os.path.exists(place + '/kept') for place in places])");
    let mut session = Session::open(&[]);
    session.output(&code);
    assert_eq!(session.ask(json!({"op": "reset", "id": "r"})), json!({"op": "reset", "ok": true, "id": "r"}));
    assert_eq!(session.output(&look), "[False, False, False, False]\n");
    session.close();
    let host = scratch();
    let mut session = Session::open(&["--scratch", text(&host)]);
    session.output(&code);
    session.ask(json!({"op": "reset"}));
    assert_eq!(session.output(&look), "[True, False, False, False]\n");
    session.close();
    assert!(host.join("kept").exists());
}

test!(Both, a_reset_that_fails_leaves_a_session_that_says_so_until_one_succeeds, seconds 60);
fn a_reset_that_fails_leaves_a_session_that_says_so_until_one_succeeds() {
    let mut session = Session::open(&[]);
    session.write("kept", json!("k"));
    let pid = session.child.id().to_string();
    let descriptors = |most: &str| {
        assert!(Command::new("prlimit").args(["--pid", &pid, &format!("--nofile={most}:")]).status().unwrap().success());
    };
    // poll(2) takes no more than that many, and the session waits for six things at most.
    descriptors("6");
    let failed = session.ask(json!({"op": "reset"}));
    assert_eq!((&failed["ok"], &failed["reason"]), (&json!(false), &json!("session_ended")), "{failed}");
    descriptors("1024");
    for line in [json!({"op": "run", "code": "1"}), json!({"op": "list"}), json!({"op": "write", "path": "a", "contents": ""})] {
        let answer = session.ask(line);
        assert_eq!((&answer["verdict"], &answer["reason"]), (&json!("sandbox_error"), &json!("session_ended")), "{answer}");
        let why = answer["error"].as_str().unwrap();
        assert!(why.contains("reset failed") && why.contains("EMFILE") && why.contains("begins it anew"), "{why}");
    }
    assert_eq!(session.ask(json!({"op": "reset"}))["ok"], true);
    assert_eq!(session.output("import os; print(os.path.exists('kept'))"), "False\n");
    session.close();
}

test!(Both, files_go_in_and_out_byte_by_byte, seconds 60);
fn files_go_in_and_out_byte_by_byte() {
    let mut session = Session::open(&[]);
    // Before anything has run.
    session.write("sub/dir/bytes", json!({"base64": "AP8KDQo="}));
    session.write("text", json!("gr\u{fc}\u{df}e\r\n"));
    session.write("/tmp/t", json!("tmp"));
    session.write("/home/sandbox/h", json!("home"));
    let code = "import os; print(open('sub/dir/bytes', 'rb').read(), open('text', 'rb').read(), open('/tmp/t').read(), open(os.path.expanduser('~/h')).read(), oct(os.stat('text').st_mode), os.stat('sub').st_uid)\nopen('out', 'wb').write(bytes(range(256))); os.mkdir('empty'); os.symlink('text', 'link'); os.chmod('text', 0o444)";
    assert_eq!(session.output(code), "b'\\x00\\xff\\n\\r\\n' b'gr\\xc3\\xbc\\xc3\\x9fe\\r\\n' tmp home 0o100644 1000\n");
    let read = session.ask(json!({"op": "read", "path": "out", "id": "i"}));
    assert_eq!((&read["ok"], &read["id"], &read["size"], &read["text"]), (&json!(true), &json!("i"), &json!(256), &Value::Null));
    assert!(read["base64"].as_str().unwrap().starts_with("AAECAwQF"), "{read}");
    assert_eq!(session.ask(json!({"op": "read", "path": "text"}))["text"], "gr\u{fc}\u{df}e\r\n");
    assert_eq!(session.ask(json!({"op": "read", "path": "/scratch/text", "encoding": "base64"}))["base64"], "Z3LDvMOfZQ0K");
    let part = session.ask(json!({"op": "read", "path": "out", "offset": 65, "length": 3}));
    assert_eq!((&part["text"], &part["size"], &part["offset"]), (&json!("ABC"), &json!(256), &json!(65)));
    let beyond = session.ask(json!({"op": "read", "path": "out", "offset": u64::MAX}));
    assert_eq!((&beyond["text"], &beyond["size"]), (&json!(""), &json!(256)), "{beyond}");
    let added = session.ask(json!({"op": "write", "path": "/tmp/t", "contents": "+", "append": true}));
    assert_eq!(added, json!({"op": "write", "ok": true, "path": "/tmp/t", "size": 4}));
    let listed = session.ask(json!({"op": "list"}));
    let kinds: Vec<(&str, &str)> = listed["entries"]
        .as_array()
        .unwrap()
        .iter()
        .map(|entry| (entry["path"].as_str().unwrap(), entry["kind"].as_str().unwrap()))
        .collect();
    assert_eq!(kinds, [("empty", "directory"), ("link", "link"), ("out", "file"), ("sub", "directory"), ("text", "file")]);
    assert!(!listed.to_string().contains("lossy"), "{listed}");
    session.ask(json!({"op": "run", "code": "import os; os.mkdir('odd'); open(b'odd/\\xff', 'w'); open('odd/\u{fffd}x', 'w')"}));
    let odd = [
        json!({"path": "odd/\u{fffd}x", "kind": "file", "size": 0}),
        json!({"path": "odd/\u{fffd}", "lossy": true, "kind": "file", "size": 0}),
    ];
    assert_eq!(session.ask(json!({"op": "list", "path": "odd"}))["entries"], json!(odd));
    let below = session.ask(json!({"op": "list", "path": "sub", "recursive": true}));
    assert_eq!(
        below["entries"],
        json!([{"path": "sub/dir", "kind": "directory", "size": 0}, {"path": "sub/dir/bytes", "kind": "file", "size": 5}])
    );
    // What the code closed to itself is closed to the session, which has no more rights.
    session.refused(json!({"op": "write", "path": "text", "contents": "x"}), "permission_denied");
    session.refused(json!({"op": "read", "path": "missing"}), "file_missing");
    session.refused(json!({"op": "read", "path": "sub"}), "is_a_directory");
    session.refused(json!({"op": "read", "path": "/tmp"}), "is_a_directory");
    session.refused(json!({"op": "write", "path": "sub", "contents": ""}), "is_a_directory");
    session.refused(json!({"op": "write", "path": "text/below", "contents": ""}), "not_a_directory");
    session.refused(json!({"op": "list", "path": "text"}), "not_a_directory");
    session.refused(json!({"op": "write", "path": "a", "contents": {"base64": "!"}}), "base64_malformed");
    session.output("open('large', 'wb').truncate((16 << 20) + 1)");
    let why = session.refused(json!({"op": "read", "path": "large"}), "file_too_large");
    assert!(why.contains("offset"), "{why}");
    assert_eq!(session.ask(json!({"op": "read", "path": "large", "offset": 16 << 20}))["text"], "\0");
    session.close();
}

test!(Both, no_link_leads_the_session_out, seconds 60);
fn no_link_leads_the_session_out() {
    let secret = directory().join("secret");
    fs::write(&secret, token("secret")).unwrap();
    let host = scratch();
    symlink(&secret, host.join("out")).unwrap();
    symlink(directory(), host.join("above")).unwrap();
    write_file(&host.join("plain"), "plain");
    symlink("plain", host.join("near")).unwrap();
    let mut session = Session::open(&["--scratch", text(&host)]);
    assert_eq!(session.ask(json!({"op": "read", "path": "plain"}))["text"], "plain", "a control");
    for path in ["out", "above/secret", "near"] {
        session.refused(json!({"op": "read", "path": path}), "path_is_link");
        session.refused(json!({"op": "write", "path": path, "contents": "x"}), "path_is_link");
    }
    session.refused(json!({"op": "list", "path": "above"}), "path_is_link");
    for path in ["../secret", "a/../../secret", "./plain", "a//b", "", "a\0b"] {
        session.refused(json!({"op": "read", "path": path}), "path_malformed");
    }
    // A path of the host's is one of the sandbox's, or none.
    session.refused(json!({"op": "read", "path": text(&secret)}), "file_missing");
    for path in ["/etc/passwd", "/proc/self/environ", "/", "/run/secrets/x"] {
        session.refused(json!({"op": "read", "path": path}), "path_outside");
    }
    session.refused(json!({"op": "write", "path": "above/new", "contents": "x"}), "path_is_link");
    assert!(!directory().join("new").exists());
    assert_eq!(fs::read_to_string(&secret).unwrap(), token("secret"));
    // The same in what the session keeps itself, where the code made the links.
    session.output("import os; os.symlink('/etc', '/tmp/etc'); os.symlink('/proc/self/environ', os.path.expanduser('~/env'))");
    session.refused(json!({"op": "read", "path": "/tmp/etc/passwd"}), "path_is_link");
    session.refused(json!({"op": "read", "path": "/home/sandbox/env"}), "path_is_link");
    session.close();
}

test!(Both, a_session_follows_no_link_in_the_place_of_its_scratch);
/// Code whose scratch lies above can put a link in the place of a session's.
fn a_session_follows_no_link_in_the_place_of_its_scratch() {
    let (above, secrets) = (scratch(), scratch_named("secrets"));
    write_file(&secrets.join("key"), token("key"));
    let (host, moved) = (above.join("host"), above.join("moved"));
    fs::create_dir(&host).unwrap();
    chown_to_owner(&host);
    let mut session = Session::open(&["--scratch", text(&host)]);
    session.output("open('mine', 'w').write('x')");
    let swap = format!("import os; os.rename('host', 'moved'); os.symlink({:?}, 'host')", text(&secrets));
    exec(json!({"code": swap, "scratch": text(&above)})).succeeded();
    assert_eq!(session.run("print(1)")["reason"], "scratch_foreign_link");
    session.refused(json!({"op": "list", "path": "."}), "scratch_foreign_link");
    session.refused(json!({"op": "read", "path": "key"}), "scratch_foreign_link");
    session.refused(json!({"op": "write", "path": "planted", "contents": "x"}), "scratch_foreign_link");
    assert_eq!(fs::read_dir(&secrets).unwrap().count(), 1);
    // The control: its directory in its place again.
    fs::remove_file(&host).unwrap();
    fs::rename(&moved, &host).unwrap();
    assert_eq!(session.ask(json!({"op": "read", "path": "mine"}))["text"], "x");
    session.close();
}

test!(Both, a_host_scratch_is_written_as_its_owner_and_keeps_its_rules, seconds 60);
fn a_host_scratch_is_written_as_its_owner_and_keeps_its_rules() {
    let policies = PolicyDirectory::new();
    // `default` hides `.env*`.
    let policy = policies.write("rules", &derived("[scratch]\nread_only = { add = [\".git\"] }"));
    let host = scratch();
    write_file(&host.join(".env"), token("env"));
    fs::create_dir(host.join(".git")).unwrap();
    crate::support::exec::chown_to_owner(&host.join(".git"));
    write_file(&host.join(".git/config"), "config");
    let mut session = Session::open(&["--policy", &policy, "--scratch", text(&host)]);
    assert_eq!((&session.ready["scratch"], &session.ready["host_scratch"]), (&json!(text(&host)), &json!(true)));
    session.write("made/new", json!("n"));
    session.write(text(&host.join("absolute")), json!("a"));
    let owner = if is_root() { OWNER } else { nix::unistd::getuid().as_raw() };
    for path in ["made", "made/new", "absolute"] {
        assert_eq!(fs::metadata(host.join(path)).unwrap().uid(), owner, "{path}");
    }
    assert_eq!(session.output("open('made/new', 'a').write('+'); print(open('made/new').read())"), "n+\n");
    for op in [json!({"op": "read", "path": ".env"}), json!({"op": "write", "path": ".env.local", "contents": "x"})] {
        session.refused(op, "path_hidden");
    }
    session.refused(json!({"op": "write", "path": ".git/config", "contents": "x"}), "path_read_only");
    assert_eq!(session.ask(json!({"op": "read", "path": ".git/config"}))["text"], "config");
    let listed = session.ask(json!({"op": "list"})).to_string();
    assert!(listed.contains("made") && !listed.contains(".env"), "{listed}");
    session.close();
}

test!(Both, what_a_session_keeps_has_its_size_and_is_counted, seconds 60);
fn what_a_session_keeps_has_its_size_and_is_counted() {
    let policies = PolicyDirectory::new();
    let policy = policies.write("small", &derived("[limits]\nscratch_size = \"4MiB\"\ntmp_size = \"2MiB\""));
    let mut session = Session::open(&["--policy", &policy]);
    let first = session.run("open('a', 'wb').write(b'x' * (3 << 20)); open('/tmp/a', 'wb').write(b'x' * (1 << 20))");
    assert!(first["usage"]["scratch_bytes"].as_u64().unwrap() >= 3 << 20, "{}", first["usage"]);
    assert!(first["usage"]["tmp_bytes"].as_u64().unwrap() >= 1 << 20, "{}", first["usage"]);
    // What an earlier request left counts.
    let full = session.run("open('b', 'wb').write(b'x' * (2 << 20))");
    assert_eq!(full["verdict"], "disk_limit", "{}", full["error"]);
    session.refused(json!({"op": "write", "path": "c", "contents": "x".repeat(1 << 20)}), "no_space");
    // No room even for the next program; a client can make some.
    let none = session.run("print(1)");
    assert_eq!(
        (&none["verdict"], &none["reason"], &none["started"], &none["code"]),
        (&json!("disk_limit"), &json!("scratch_full"), &json!(false), &json!(137)),
        "{none}"
    );
    session.write("b", json!(""));
    let full = session.run("import os; os.unlink('b'); open('/dev/shm/b', 'wb').write(b'x' * (2 << 20))");
    assert_eq!(full["verdict"], "disk_limit", "{}", full["error"]);
    session.ask(json!({"op": "reset"}));
    assert_eq!(session.output("open('b', 'wb').write(b'x' * (2 << 20)); print('room')"), "room\n");
    session.close();
}

test!(Both, a_line_that_is_not_understood_is_answered_and_the_session_goes_on, seconds 60);
fn a_line_that_is_not_understood_is_answered_and_the_session_goes_on() {
    let mut session = Session::open(&[]);
    session.output("open('kept', 'w')");
    for (line, op, reason) in [
        ("print(1)", Value::Null, "line_not_json"),
        ("", Value::Null, "line_empty"),
        ("[]", Value::Null, "line_malformed"),
        ("{\"code\": \"1\"}", Value::Null, "op_missing"),
        ("{\"op\": \"exec\", \"code\": \"1\"}", Value::Null, "op_unknown"),
        ("{\"op\": \"run\", \"code\": \"1\", \"kode\": 2}", json!("run"), "line_malformed"),
        ("{\"op\": \"read\"}", json!("read"), "line_malformed"),
        ("{\"op\": \"reset\", \"force\": true}", json!("reset"), "line_malformed"),
    ] {
        session.send(line);
        let answer = session.answer();
        assert_eq!((&answer["op"], &answer["ok"], &answer["reason"]), (&op, &json!(false), &json!(reason)), "{answer}");
        assert!(answer["verdict"] == "bad_request" && !answer["error"].as_str().unwrap().is_empty());
    }
    session.lines.as_mut().unwrap().write_all(b"{\"op\": \"\xff\"}\n").unwrap();
    assert_eq!(session.answer()["reason"], "line_not_json");
    assert_eq!(session.output("import os; print(os.path.exists('kept'))"), "True\n");
    session.close();
}

test!(Both, a_line_beyond_the_cap_is_forgotten, seconds 90);
fn a_line_beyond_the_cap_is_forgotten() {
    let mut session = Session::open(&[]);
    let mut lines = session.lines.take().unwrap();
    // In one write the pipe would be full before it is read.
    let writer = thread::spawn(move || {
        let piece = vec![b'x'; 1 << 20];
        lines.write_all(b"{\"op\": \"run\", \"code\": \"").unwrap();
        for _ in 0..66 {
            lines.write_all(&piece).unwrap();
        }
        lines.write_all(b"\"}\n{\"op\": \"run\", \"code\": \"print(2)\"}\n").unwrap();
        lines
    });
    let answer = session.answer();
    assert_eq!((&answer["op"], &answer["reason"]), (&Value::Null, &json!("line_too_long")), "{answer}");
    assert_eq!(session.answer()["output"], "2\n");
    let peak = session.kilobytes("VmHWM");
    assert!(peak < 200 << 10, "{peak} kB to forget a line");
    session.lines = Some(writer.join().unwrap());
    session.close();
}

test!(Both, lines_sent_ahead_are_answered_in_their_order, seconds 60);
fn lines_sent_ahead_are_answered_in_their_order() {
    let lines: String = (0..12)
        .map(|number| match number % 3 {
            0 => format!("{{\"op\":\"write\",\"path\":\"n\",\"contents\":\"{number}\",\"id\":\"{number}\"}}\n"),
            1 => format!("{{\"op\":\"run\",\"code\":\"print(open('n').read())\",\"id\":\"{number}\"}}\n"),
            _ => format!("{{\"op\":\"read\",\"path\":\"n\",\"id\":\"{number}\"}}\n"),
        })
        .collect();
    // The last line without its end; stdin as a file, which no epoll takes, and as a pipe.
    let path = directory().join("lines");
    fs::write(&path, lines.trim_end()).unwrap();
    let from_file = stockade(["session"]).stdin(fs::File::open(&path).unwrap()).output().unwrap();
    for output in [from_file, run_with_stdin(&mut stockade(["session"]), lines.as_bytes())] {
        assert!(output.status.success());
        let answers: Vec<Value> =
            String::from_utf8(output.stdout).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let ids: Vec<&str> = answers.iter().skip(1).map(|answer| answer["id"].as_str().unwrap()).collect();
        assert_eq!(ids, ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "11"]);
        assert_eq!((&answers[2]["output"], &answers[12]["text"]), (&json!("0\n"), &json!("9")));
    }
}

test!(Both, code_that_writes_the_protocol_writes_its_own_output, seconds 60);
fn code_that_writes_the_protocol_writes_its_own_output() {
    let mut session = Session::open(&[]);
    let forged = r#"{"op":"ready","ok":true}"#;
    let code = format!(
        "import os, sys\nline = '''{forged}'''\nprint(line)\nprint(line, file=sys.stderr)\nfor fd in range(3, 64):\n  try: os.write(fd, (line + chr(10)).encode())\n  except OSError: pass\nfor path in ('/proc/1/fd/1', '/proc/1/fd/0', '/dev/tty', '/dev/console'):\n  try: open(path, 'w').write(line)\n  except OSError: pass\nfor name in os.listdir('.'):\n  if name.startswith('stockade_'): os.unlink(name); os.mkdir(name)\n"
    );
    let result = session.run(&code);
    assert_eq!(
        (&result["op"], &result["output"], &result["error"]),
        (&json!("run"), &json!(format!("{forged}\n")), &json!(format!("{forged}\n")))
    );
    assert_eq!(session.output("print('next')"), "next\n");
    session.close();
}

test!(Both, a_session_that_cannot_begin_says_why_in_its_first_line);
fn a_session_that_cannot_begin_says_why_in_its_first_line() {
    for (options, verdict, reason, status) in [
        (["--policy", "nobody-has-it"], "sandbox_error", "policy_not_found", 125),
        (["--scratch", "/nonexistent-scratch"], "bad_request", "scratch_missing", 2),
        (["--scratch", ""], "bad_request", "scratch_relative", 2),
    ] {
        let output = run_with_stdin(&mut stockade([&["session"], &options[..]].concat()), b"{\"op\":\"run\",\"code\":\"1\"}\n");
        let line: Value = serde_json::from_slice(&output.stdout).unwrap();
        let wanted = json!({"op": "ready", "ok": false, "verdict": verdict, "reason": reason, "error": line["error"]});
        assert_eq!((line, output.status.code()), (wanted, Some(status)));
    }
}

test!(serial Both, a_hundred_requests_leave_nothing, seconds 180);
fn a_hundred_requests_leave_nothing() {
    let host = scratch();
    let (before, mounts_before) = (processes(), mounts());
    // What makes a template would have some of the descriptors.
    let policies = PolicyDirectory::new();
    let mut session = Session::open(&["--scratch", text(&host), "--policy", &policies.write("no-template", &derived(NO_TEMPLATE))]);
    let launchers = BTreeSet::from([session.child.id()]);
    let descriptors = |pid: Pid| fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
    session.output("print(0)");
    // What stands ready for the next is there each time.
    prepared_sandbox(&session);
    assert!(eventually(Duration::from_secs(10), || children(session.child.id()).into_iter().any(is_screener)), "no screener stays");
    let (first, waiting, mut after_ten) = (descriptors(session.pid()), cgroups_of(&launchers).len(), 0);
    for number in 0..100 {
        let code = format!(
            "import os; n = int(open('n').read()) if {number} else 0; open('n', 'w').write(str(n + 1)); open('/tmp/n', 'a').write('.'); print(n, os.path.getsize('/tmp/n'))"
        );
        assert_eq!(session.output(&code), format!("{number} {}\n", number + 1));
        if number == 10 {
            after_ten = session.kilobytes("VmRSS");
        }
    }
    let now = session.kilobytes("VmRSS");
    assert!(now < after_ten + 512, "{after_ten} kB after ten requests, {now} kB after a hundred");
    prepared_sandbox(&session);
    // The launcher may still be busy with the sandbox that stands there.
    let as_before = || descriptors(session.pid()) == first;
    assert!(
        eventually(Duration::from_secs(5), as_before),
        "{first} descriptors, and {} a hundred requests later",
        descriptors(session.pid())
    );
    assert_eq!(cgroups_of(&launchers).len(), waiting, "{:?}", cgroups_of(&launchers));
    assert_eq!(mounts(), mounts_before);
    session.close();
    assert_eq!(cgroups_of(&launchers), Vec::<std::path::PathBuf>::new());
    assert!(eventually(Duration::from_secs(5), || processes_around(&host, &before).is_empty()), "{:?}", processes_around(&host, &before));
    assert_eq!(dead_records(), Vec::<String>::new());
    let left: Vec<_> = fs::read_dir(&host).unwrap().flatten().map(|entry| entry.file_name()).collect();
    assert_eq!(left, ["n"]);
}

test!(serial Both, a_session_killed_at_any_moment_leaves_nothing_running, seconds 120);
fn a_session_killed_at_any_moment_leaves_nothing_running() {
    let host = scratch();
    let mut launchers = BTreeSet::new();
    for step in 0..24u64 {
        let before = processes();
        let mut session = Session::open(&["--scratch", text(&host)]);
        launchers.insert(session.child.id());
        session.send(r#"{"op":"run","code":"print(1)"}"#);
        session.send(r#"{"op":"write","path":"/tmp/x","contents":"x"}"#);
        session.send(r#"{"op":"reset"}"#);
        session.send(r#"{"op":"run","code":"import time; time.sleep(60)"}"#);
        let at = Instant::now() + Duration::from_millis(step * 4);
        while Instant::now() < at {
            thread::yield_now();
        }
        kill(session.pid(), Signal::SIGKILL).unwrap();
        drop(session);
        assert!(
            eventually(Duration::from_secs(5), || processes_around(&host, &before).is_empty()),
            "{:?}",
            processes_around(&host, &before)
        );
    }
    the_next_start_has_swept(&launchers);
    // The sweep is the next start's.
    exec(json!({"code": "", "scratch": text(&host)})).succeeded();
    let left: Vec<_> = fs::read_dir(&host).unwrap().flatten().map(|entry| entry.file_name()).collect();
    assert!(left.is_empty(), "{left:?}");
}

test!(Both, an_end_of_either_stream_ends_the_session, seconds 60);
fn an_end_of_either_stream_ends_the_session() {
    // Of stdin: what was asked is answered first.
    let mut session = Session::open(&[]);
    session.send(r#"{"op":"run","code":"import time; time.sleep(0.3); print('done')"}"#);
    drop(session.lines.take());
    assert_eq!(session.answer()["output"], "done\n");
    assert_eq!(session.ended().code(), Some(0));
    // Of stdout, while a request runs: it is not waited for.
    let words = token("unheard");
    let mut session = Session::open(&[]);
    begin(&mut session, &words);
    let Session { child, lines, .. } = &mut session;
    let (mut child_of, held) = (std::mem::replace(child, Command::new("true").spawn().unwrap()), lines.take());
    drop(session);
    assert!(wait_within(&mut child_of, Duration::from_secs(20)).is_some(), "it goes on without a client");
    no_process_is_left(&words);
    drop(held);
}

test!(Both, what_code_does_to_its_directories_does_not_stop_the_next);
fn what_code_does_to_its_directories_does_not_stop_the_next() {
    let mut session = Session::open(&[]);
    let scratch = session.output("import os; print(os.getcwd(), end='')");
    for directory in ["/dev/shm", "/tmp", scratch.as_str()] {
        for mode in ["0", "0o555"] {
            let code = format!("import os; d = {directory:?}; os.chmod(d, {mode}); print(os.access(d, os.R_OK | os.W_OK | os.X_OK))");
            assert_eq!(session.output(&code), "False\n", "{directory}");
            let code = format!("import tempfile; tempfile.TemporaryFile(dir={directory:?}).write(b'x'); print('there')");
            assert_eq!(session.output(&code), "there\n", "{directory} {mode}");
        }
    }
    // Whatever stands where the receipt tries Landlock.
    session.output("import os; [os.mkfifo(f'/tmp/{n}') for n in range(3)]; [open(f'/dev/shm/{n}', 'w') for n in ('.stockade-probe', '.probe-', '.probe-' + 16 * '0')]");
    let result = session.run("");
    let layers = result["receipt"]["layers"].as_array().unwrap();
    let landlock = layers.iter().find(|layer| layer["layer"] == "landlock").unwrap();
    assert!(landlock["detail"].as_str().unwrap().contains("answered EACCES"), "{landlock}");
}
