//! The audit log: every run and refusal stands in it, nothing of the caller's secrets does,
//! code cannot reach it, and what is done to it afterwards is found.
//!
//! Root's tests have their own `/var/log`, in a mount namespace of the test's process.

use std::{
    fs,
    os::unix::{fs::PermissionsExt, net::UnixDatagram},
    path::Path,
    thread,
};

use nix::mount::{MsFlags, mount};
use serde_json::{Value, json};

use crate::support::{
    audit_log::{audit, is_whole, mount_tmpfs, own_log, records, written},
    exec::{ExecResult, exec, exec_bytes, exec_with, run_with_stdin, scratch, stockade, text, token},
    policy_dir::{PolicyDirectory, derived},
    runner::{directory, is_root, test},
    tracer::{Act, LAUNCHER, Point, trace},
};

test!(Both, a_run_and_a_refusal_are_written_down);
fn a_run_and_a_refusal_are_written_down() {
    let log = own_log();
    let request = json!({"code": "print('said')", "id": "job-7", "labels": {"agent": "a1"}});
    let done = exec(request);
    done.succeeded();
    let refused = exec(json!({"code": "", "language": "klingon"}));
    exec_bytes(&[], b"no json");
    let all = records(&log);
    assert_eq!(all.len(), 4, "{all:?}");
    assert_eq!(all[0]["event"], "opened");
    let record = &all[1];
    for (key, value) in [("event", json!("run")), ("verdict", json!("exited")), ("id", json!("job-7")), ("labels", json!({"agent": "a1"}))]
    {
        assert_eq!(record[key], value, "{record}");
    }
    assert_eq!((&record["status"], &record["started"], &record["seq"]), (&json!(0), &json!(true), &json!(2)), "{record}");
    assert_eq!(record["policy"], done["policy"]);
    assert_eq!(record["code"]["preview"], "print('said')");
    assert_eq!(record["output"], json!({"bytes": 5, "preview": "said\n"}));
    assert_eq!(record["who"]["uid"], nix::unistd::getuid().as_raw());
    assert!(record["receipt_sha256"].as_str().is_some_and(|hash| hash.len() == 64) && record["usage"].is_object(), "{record}");
    assert_eq!((&done["audit"]["run"], &done["audit"]["seq"]), (&record["run"], &record["seq"]));
    // The result names the hash that the next record carries.
    assert_eq!(done["audit"]["sha256"], all[2]["prev"]);
    assert_eq!((&all[2]["event"], &all[2]["reason"]), (&json!("refused"), &refused["reason"]));
    assert_eq!((&all[3]["event"], &all[3]["verdict"], &all[3]["code"]), (&json!("refused"), &json!("bad_request"), &Value::Null));
    is_whole();
}

test!(Both, a_command_is_written_down);
fn a_command_is_written_down() {
    let log = own_log();
    let output = stockade(["run", "--", "/bin/sh", "-c", "echo words; exit 3"]).output().unwrap();
    assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(3), &b"words\n"[..]));
    let all = records(&log);
    assert_eq!((&all[1]["code"]["kind"], &all[1]["status"]), (&json!("command"), &json!(3)), "{all:?}");
    assert!(all[1]["receipt_sha256"].is_null() && all[1].get("output").is_none(), "streams passed through are not looked at");
    // A receipt can be found in the log.
    let report = directory().join("report");
    stockade(["run", "--report", text(&report), "--", "/bin/true"]).output().unwrap();
    let all = records(&log);
    let report: Value = serde_json::from_str(&fs::read_to_string(&report).unwrap()).unwrap();
    assert!(report["receipt"]["plan_sha256"].is_string() && all[2]["receipt_sha256"].is_string(), "{all:?}");
    assert_eq!(report["audit"]["run"], all[2]["run"]);
    is_whole();
}

test!(Both, what_watched_interpreters_met_is_written_down);
fn what_watched_interpreters_met_is_written_down() {
    let log = own_log();
    let policies = PolicyDirectory::new();
    let policy = policies.write("watched", &derived("[runtimes.python.modules]\ndefault = \"note\"\nctypes = \"deny\""));
    let code = (0..40).map(|number| format!("try: import m{number}\nexcept ImportError: pass\n")).collect::<String>() + "import ctypes";
    exec_with(&["--policy", &policy], json!({"code": code})).expect(json!({"verdict": "exited", "code": 1}));
    let all = records(&log);
    let record = &all[1];
    assert_eq!(record["modules"].as_array().map(Vec::len), Some(32), "{record}");
    assert_eq!((&record["modules"][7], &record["modules_omitted"]), (&json!({"name": "m7", "action": "note", "count": 1}), &json!(9)));
    is_whole();
    exec(json!({"code": "import ctypes"})).succeeded();
    assert!(records(&log)[2].get("modules").is_none());
}

test!(Both, no_secret_of_a_request_is_written_down);
fn no_secret_of_a_request_is_written_down() {
    let log = own_log();
    let secret = token("audit");
    let policies = PolicyDirectory::new();
    let policy = policies.write("env", &derived("[environment]\naccept = { add = [\"TOKEN\"] }"));
    let request = |env: Value| json!({"code": "pass", "env": {"TOKEN": env}, "files": {"file": secret}, "stdin": secret, "args": [secret]});
    exec_with(&["--policy", &policy], request(json!(secret))).succeeded();
    // Refused for it: the words of an error quote what was wrong.
    let refused = exec_bytes(&["--policy", &policy], request(json!({(&secret): 1})).to_string().as_bytes());
    assert_eq!(refused["verdict"], "bad_request");
    exec_with(&["--policy", &policy], json!({"code": "", "language": secret}));
    assert_eq!(records(&log).len(), 4);
    assert!(!written(&log).contains(&secret), "{}", written(&log));
    // The control: what is written down can be found there.
    exec(json!({"code": format!("'{secret}'")})).succeeded();
    assert!(written(&log).contains(&secret));
}

test!(Both, nothing_that_a_terminal_acts_on_is_written_or_printed);
fn nothing_that_a_terminal_acts_on_is_written_or_printed() {
    let log = own_log();
    let hostile = "print('\\x1b[2J\\x9b31m\\u202e\\r\\x7f')  # \u{1b}[2J \u{9b} \u{202e} \u{2066}";
    let done = exec(json!({"code": hostile, "id": "\u{1b}]0;x\u{7}", "labels": {"\u{202e}": "\u{9b}"}}));
    done.succeeded();
    let text = written(&log);
    assert!(text.chars().all(|c| c == '\n' || (' '..='~').contains(&c)), "{text:?}");
    // Nothing is lost by it, and what is printed of it is as harmless: `audit` looks.
    assert_eq!(records(&log)[1]["code"]["preview"], hostile);
    for arguments in [&["tail"][..], &["tail", "--json"], &["show", done["audit"]["run"].as_str().unwrap()], &["query", "--json"]] {
        let (status, said) = audit(arguments);
        assert!(status == Some(0) && !said.is_empty(), "{arguments:?}: {said}");
    }
}

test!(Both, code_cannot_reach_the_log);
fn code_cannot_reach_the_log() {
    let log = own_log();
    exec(json!({"code": ""})).succeeded();
    let code = format!(
        "import os\nfor path in ({:?}, {:?}):\n    try: print(os.listdir(path))\n    except OSError as error: print(type(error).__name__)\n\
         print(sorted(os.readlink(f'/proc/self/fd/{{fd}}') for fd in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{{fd}}')))",
        text(&log),
        text(log.parent().unwrap())
    );
    let done = exec(json!({"code": code}));
    done.succeeded();
    let said = done["output"].as_str().unwrap();
    assert!(said.starts_with("FileNotFoundError\nFileNotFoundError\n") && !said.contains("audit"), "{said}");
    // The control: the host has it.
    assert!(fs::read_dir(&log).unwrap().count() > 1);
}

test!(Both, a_policy_that_would_show_the_log_is_refused);
fn a_policy_that_would_show_the_log_is_refused() {
    let log = own_log();
    exec(json!({"code": ""})).succeeded();
    let policies = PolicyDirectory::new();
    let link = policies.0.join("link");
    std::os::unix::fs::symlink(log.parent().unwrap(), &link).unwrap();
    let file = log.join("audit-00000001.jsonl");
    for shown in [log.as_path(), log.parent().unwrap(), file.as_path(), &link] {
        let policy = policies.write("shows", &derived(&format!("[filesystem]\nread_only = {{ add = [{:?}] }}", text(shown))));
        let done = exec_with(&["--policy", &policy], json!({"code": ""}));
        // A user's link is not followed to begin with.
        let (reason, named) =
            if shown == link && !is_root() { ("shown_foreign_link", log.parent().unwrap()) } else { ("audit_log_shown", log.as_path()) };
        done.broke(reason, &[text(shown), text(named)]);
        assert_eq!(done["started"], false);
    }
    // The control: a directory beside it.
    let beside = policies.0.join("beside");
    fs::create_dir(&beside).unwrap();
    let policy = policies.write("beside", &derived(&format!("[filesystem]\nread_only = {{ add = [{:?}] }}", text(&beside))));
    exec_with(&["--policy", &policy], json!({"code": ""})).succeeded();
    if !is_root() {
        // Root's log lies in no scratch that root would take.
        let done = exec(json!({"code": "", "scratch": text(log.parent().unwrap())}));
        done.refused("scratch_holds_the_log", &[text(&log)]);
    }
}

/// A policy of the mode `required`.
fn required(policies: &PolicyDirectory) -> String {
    policies.write("required", &derived("[audit]\nmode = \"required\""))
}

test!(Both, a_required_log_that_is_corrupted_stops_the_run_and_a_tried_one_says_so);
fn a_required_log_that_is_corrupted_stops_the_run_and_a_tried_one_says_so() {
    let log = own_log();
    let policies = PolicyDirectory::new();
    let policy = required(&policies);
    let scratch = scratch();
    let request = json!({"code": "open('ran', 'w')", "scratch": text(&scratch)});
    let ran = || fs::remove_file(scratch.join("ran")).is_ok();
    exec_with(&["--policy", &policy], request.clone()).succeeded();
    assert!(ran());
    let events: Vec<Value> = records(&log).iter().map(|record| record["event"].clone()).collect();
    assert_eq!(events, ["opened", "begun", "run"]);
    let good = written(&log);
    fs::write(log.join("audit-00000001.jsonl"), good.replace("\"begun\"", "\"began\"")).unwrap();
    let done = exec_with(&["--policy", &policy], request.clone());
    done.broke("audit_corrupted", &["audit-00000001.jsonl", "required"]);
    assert!(done["started"] == false && !ran());
    let done = exec(request.clone());
    done.succeeded();
    assert!(ran() && done.stderr.contains("not in the audit log"), "{}", done.stderr);
    assert!(done["audit"]["failure"].as_str().is_some_and(|why| why.contains("corrupted")) && done["audit"]["seq"].is_null());
    // The control: with the log as it was.
    fs::write(log.join("audit-00000001.jsonl"), good).unwrap();
    exec_with(&["--policy", &policy], request).succeeded();
    assert!(ran());
    is_whole();
}

test!(Both, a_required_log_that_cannot_be_written_stops_the_run);
fn a_required_log_that_cannot_be_written_stops_the_run() {
    let log = own_log();
    let policies = PolicyDirectory::new();
    let policy = required(&policies);
    let request = json!({"code": "print(1)"});
    exec_with(&["--policy", &policy], request.clone()).succeeded();
    let writable = |yes: bool| {
        if is_root() {
            // Modes do not bind root.
            let flags = if yes { MsFlags::empty() } else { MsFlags::MS_RDONLY };
            mount(None::<&str>, "/var/log", None::<&str>, MsFlags::MS_REMOUNT | flags, None::<&str>).unwrap();
        } else {
            let mode = if yes { 0o600 } else { 0o400 };
            fs::set_permissions(log.join("audit-00000001.jsonl"), fs::Permissions::from_mode(mode)).unwrap();
        }
    };
    writable(false);
    exec_with(&["--policy", &policy], request.clone()).broke("audit_unwritable", &["required", text(&log)]);
    exec(request.clone()).succeeded();
    writable(true);
    exec_with(&["--policy", &policy], request).succeeded();
    is_whole();
}

test!(RootOnly, a_full_disk_stops_runs_that_require_the_log);
fn a_full_disk_stops_runs_that_require_the_log() {
    let log = own_log();
    let policies = PolicyDirectory::new();
    let policy = required(&policies);
    exec_with(&["--policy", &policy], json!({"code": ""})).succeeded();
    let filler = Path::new("/var/log/filler");
    assert!(fs::write(filler, vec![0; 8 << 20]).is_err(), "the disk is full");
    let mut refused = 0;
    // What is left of the file's last block takes a few.
    for _ in 0..20 {
        let done = exec_with(&["--policy", &policy], json!({"code": ""}));
        if done["verdict"] == "exited" {
            continue;
        }
        assert_eq!((&done["verdict"], &done["reason"]), (&json!("sandbox_error"), &json!("audit_unwritable")), "{}", done.brief());
        assert!(done.error().contains("No space left on device"), "{}", done.error());
        refused += u32::from(done["started"] == false);
    }
    assert!(refused > 10, "{refused}");
    exec(json!({"code": "print(1)"})).succeeded().expect(json!({"output": "1\n"}));
    fs::remove_file(filler).unwrap();
    exec_with(&["--policy", &policy], json!({"code": ""})).succeeded();
    is_whole();
    assert!(written(&log).ends_with('\n'));
}

test!(Both, an_audit_that_is_off_writes_nothing);
fn an_audit_that_is_off_writes_nothing() {
    let log = own_log();
    let policies = PolicyDirectory::new();
    let policy = policies.write("off", &derived("[audit]\nmode = \"off\""));
    let done = exec_with(&["--policy", &policy], json!({"code": ""}));
    done.succeeded().expect(json!({"audit": null}));
    assert!(!log.exists());
    exec(json!({"code": ""})).succeeded();
    assert!(log.exists(), "the control");
}

test!(serial Both, launchers_at_once_keep_one_chain, seconds 120);
fn launchers_at_once_keep_one_chain() {
    let log = own_log();
    thread::scope(|scope| {
        for number in 0..8 {
            scope.spawn(move || (0..5).for_each(|_| drop(exec(json!({"code": "true", "language": "sh", "id": number.to_string()})))));
        }
    });
    is_whole();
    assert_eq!(records(&log).len(), 41);
}

test!(Both, a_launcher_killed_at_any_call_of_its_record_leaves_a_whole_chain, seconds 300);
fn a_launcher_killed_at_any_call_of_its_record_leaves_a_whole_chain() {
    own_log();
    exec(json!({"code": ""})).succeeded();
    let policies = PolicyDirectory::new();
    let policy = required(&policies);
    let request = directory().join("request");
    fs::write(&request, json!({"code": "true", "language": "sh"}).to_string()).unwrap();
    let run = |act: Option<(&Point, Act<'_>)>| {
        let open = || fs::File::create(directory().join("out")).unwrap();
        trace(&["exec", "--policy", &policy], [fs::File::open(&request).unwrap(), open(), open()], act)
    };
    let calls: Vec<Point> = run(None).calls.into_iter().filter(|point| point.process == LAUNCHER && !point.is_sure()).collect();
    // A record is written between taking the lock and the datagram of its head.
    let locks: Vec<usize> =
        calls.iter().enumerate().filter(|(_, point)| point.is_one_of(&[nix::libc::SYS_flock])).map(|(at, _)| at).collect();
    assert!(locks.len() >= 2, "one for the beginning, one for the end: {locks:?}");
    let ends = &locks[locks.len() - 2..];
    let mut killed = 0;
    for point in ends.iter().flat_map(|lock| &calls[lock.saturating_sub(6)..(lock + 30).min(calls.len())]) {
        killed += u32::from(run(Some((point, Act::Kill))).acted.is_some());
        is_whole();
    }
    assert!(killed > 30, "{killed}");
    // And the next one goes on.
    exec_with(&["--policy", &policy], json!({"code": ""})).succeeded();
    is_whole();
}

test!(Both, verify_names_the_line_and_tells_by_its_status);
fn verify_names_the_line_and_tells_by_its_status() {
    let log = own_log();
    assert_eq!(audit(&["verify"]).0, Some(2), "there is none");
    (0..3).for_each(|number| drop(exec(json!({"code": "", "id": format!("run-{number}")}))));
    is_whole();
    let file = log.join("audit-00000001.jsonl");
    let good = written(&log);
    let lines: Vec<&str> = good.lines().collect();
    let swapped = [lines[0], lines[2], lines[1], lines[3]].join("\n") + "\n";
    let cut = lines[..3].join("\n") + "\n";
    for (bad, status, words) in [
        (good.replace("run-1", "run-9"), 1, "line 4: record 4 does not carry the hash of record 3"),
        (good.replacen(&format!("{}\n", lines[2]), "", 1), 1, "line 3: record 4 follows record 2: 1 record is missing"),
        (swapped, 1, "line 3: record 2 comes after record 3"),
        (String::from("nothing\n"), 1, "holds no record"),
        (cut, 0, "only an anchor reveals"),
        (good.clone(), 0, "each in its place and unchanged"),
    ] {
        fs::write(&file, bad).unwrap();
        for place in [text(&log), text(&file)] {
            let (found, said) = audit(&["verify", place]);
            assert!(found == Some(status) && said.contains(words), "{found:?}: {said}");
        }
    }
}

test!(Both, a_reader_is_not_led_astray_by_what_stands_in_a_log);
fn a_reader_is_not_led_astray_by_what_stands_in_a_log() {
    let place = directory().join("hostile");
    let all = [&["verify", text(&place)][..], &["tail", "--log", text(&place)], &["show", "--log", text(&place), "x"]];
    for make in [
        |path: &Path| nix::unistd::mkfifo(path, nix::sys::stat::Mode::S_IRWXU).unwrap(),
        |path: &Path| std::os::unix::fs::symlink("/etc/passwd", path).unwrap(),
        |path: &Path| fs::create_dir(path).unwrap(),
    ] {
        fs::create_dir(&place).unwrap();
        make(&place.join("audit-00000001.jsonl"));
        for arguments in all {
            let (status, said) = audit(arguments);
            assert!(status == Some(2) && said.contains("audit-00000001.jsonl") && !said.contains("root:"), "{arguments:?}: {said}");
        }
        fs::remove_dir_all(&place).unwrap();
    }
    // The control: a log, in another place than one's own.
    let log = own_log();
    exec(json!({"code": "", "id": "x"})).succeeded();
    fs::create_dir(&place).unwrap();
    fs::copy(log.join("audit-00000001.jsonl"), place.join("audit-00000001.jsonl")).unwrap();
    for arguments in all {
        assert_eq!(audit(arguments).0, Some(0), "{arguments:?}");
    }
}

test!(Both, tail_show_and_query_find_records);
fn tail_show_and_query_find_records() {
    own_log();
    let run = |id: &str, agent: &str, code: &str| exec(json!({"code": code, "language": "sh", "id": id, "labels": {"agent": agent}}));
    let first = run("first", "a", "true");
    run("second", "b", "kill -9 $$");
    run("third", "a", "exit 3");
    let found = |arguments: &[&str]| {
        let (status, said) = audit(&[arguments, &["--json"]].concat());
        let ids: Vec<String> =
            said.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()?["id"].as_str().map(String::from)).collect();
        (status, ids.join(" "))
    };
    assert_eq!(found(&["query"]), (Some(0), String::from("first second third")));
    assert_eq!(found(&["query", "--label", "agent=a"]), (Some(0), String::from("first third")));
    assert_eq!(found(&["query", "--verdict", "signaled", "--policy", "default"]), (Some(0), String::from("second")));
    assert_eq!(found(&["query", "--since", "2020-01-01", "--until", "2020-01-02"]).0, Some(1));
    assert_eq!(found(&["query", "--since", "2020-01-01", "--until", "9999-01-01T00:00Z"]).1, "first second third");
    assert_eq!(found(&["query", "--since", "yesterday"]).0, Some(2));
    assert_eq!(found(&["tail", "-n", "2"]), (Some(0), String::from("second third")));
    for id in ["first", first["audit"]["run"].as_str().unwrap()] {
        let (status, said) = audit(&["show", id]);
        assert_eq!((status, &serde_json::from_str::<Value>(&said).unwrap()["id"]), (Some(0), &json!("first")));
    }
    assert_eq!(audit(&["show", "nobody"]).0, Some(1));
}

/// A journal's socket where the launcher looks for it, in this test's mount namespace.
fn journal() -> UnixDatagram {
    mount_tmpfs("/run", "size=4m,mode=755");
    fs::create_dir_all("/run/systemd/journal").unwrap();
    let journal = UnixDatagram::bind("/run/systemd/journal/socket").unwrap();
    journal.set_nonblocking(true).unwrap();
    journal
}

fn received(journal: &UnixDatagram) -> Vec<String> {
    let mut bytes = vec![0; 64 << 10];
    std::iter::from_fn(|| journal.recv(&mut bytes).ok().map(|length| String::from_utf8(bytes[..length].to_vec()).unwrap())).collect()
}

test!(RootOnly, the_journal_gets_every_head_and_shows_a_cut_tail);
fn the_journal_gets_every_head_and_shows_a_cut_tail() {
    let log = own_log();
    let journal = journal();
    (0..3).for_each(|_| drop(exec(json!({"code": ""}))));
    let heads = received(&journal);
    assert_eq!(heads.len(), 3, "{heads:?}");
    assert!(heads.iter().all(|head| head.contains("\nPRIORITY=6\n") && head.contains("STOCKADE_VERDICT=exited\n")), "{heads:?}");
    let verify = || {
        let output = run_with_stdin(&mut stockade(["audit", "verify", "--anchors", "-"]), heads.concat().as_bytes());
        (output.status.code(), String::from_utf8(output.stdout).unwrap())
    };
    let (status, said) = verify();
    assert!(status == Some(0) && said.contains("3 anchors matched"), "{said}");
    let good = written(&log);
    let cut = good.lines().take(3).map(|line| format!("{line}\n")).collect::<String>();
    fs::write(log.join("audit-00000001.jsonl"), cut).unwrap();
    is_whole();
    let (status, said) = verify();
    assert!(status == Some(1) && said.contains("1 record is cut off"), "{said}");
    // A new record does not hide it.
    exec(json!({"code": ""})).succeeded();
    is_whole();
    let (status, said) = verify();
    assert!(status == Some(1) && said.contains("line 4: record 4 is not the one that the anchor knows"), "{said}");
    fs::remove_dir_all(&log).unwrap();
    exec(json!({"code": ""})).succeeded();
    let (status, said) = verify();
    assert!(status == Some(1) && said.contains("a log was removed or replaced"), "{said}");
}

test!(RootOnly, alerts_go_to_the_journal_and_are_limited, seconds 60);
fn alerts_go_to_the_journal_and_are_limited() {
    let log = own_log();
    let journal = journal();
    let policies = PolicyDirectory::new();
    let lines = "[audit]\nalerts = { add = [\"output:canary\", \"syscall:ptrace\", \"code:/etc/shadow\", \"verdict:signaled\"] }";
    let policy = policies.write("alerts", &derived(lines));
    let run = |request: Value| ExecResult::of(run_with_stdin(&mut stockade(["exec", "--policy", &policy]), request.to_string().as_bytes()));
    let alerts =
        |journal: &UnixDatagram| received(journal).into_iter().filter(|message| message.contains("\nPRIORITY=4\n")).collect::<Vec<_>>();
    run(json!({"code": "print('nothing')"})).succeeded();
    assert_eq!(alerts(&journal), Vec::<String>::new(), "the control");
    let trace = "import ctypes\nctypes.CDLL(None).ptrace(0, 0, 0, 0)";
    for (request, met) in [
        (json!({"code": "print('a ' + 'canary')"}), "output:canary"),
        (json!({"code": "print('a ' + 'canary')", "encoding": "base64"}), "output:canary"),
        (json!({"code": trace}), "syscall:ptrace"),
        (json!({"code": "# /etc/shadow"}), "code:/etc/shadow"),
        (json!({"code": "import os\nos.kill(os.getpid(), 9)"}), "verdict:signaled"),
    ] {
        run(request);
        let alerts = alerts(&journal);
        assert!(alerts.len() == 1 && alerts[0].contains(&format!("\nSTOCKADE_ALERTS={met}\n")), "{met}: {alerts:?}");
        assert_eq!(records(&log).last().unwrap()["alerts"], json!([met]));
    }
    let mut more = 0;
    for _ in 0..30 {
        run(json!({"code": "# /etc/shadow"}));
        more += alerts(&journal).len();
    }
    // At most ten in one minute, and two minutes at most were touched.
    assert!((5..=20).contains(&more), "{more}");
    assert!(records(&log)[7..].iter().all(|record| record["alerts"] == json!(["code:/etc/shadow"])), "the log has them all");
}
