//! The audit log: every run and refusal stands in it, nothing of the caller's secrets does,
//! code cannot reach it, and what is done to it afterwards is found.
//!
//! Root's tests have their own `/var/log`, in a mount namespace of the test's process.

use std::{
    collections::BTreeMap,
    fs,
    io::Write,
    net::Shutdown,
    os::{
        fd::OwnedFd,
        unix::{
            fs::PermissionsExt,
            net::{UnixDatagram, UnixStream},
        },
    },
    path::Path,
    process::{Child, Command},
    thread,
    time::Duration,
};

use base64::{Engine, prelude::BASE64_STANDARD};
use nix::mount::{MsFlags, mount};
use serde_json::{Value, json};

use crate::support::{
    audit_log::{audit, is_whole, mount_tmpfs, own_log, records, written},
    exec::{
        ExecResult, OWNER, chown_to_owner, exec, exec_bytes, exec_with, program_path, run_under, run_with_stdin, scratch, scratch_named,
        start, stockade, text, token,
    },
    leftovers::{dead_records, names, registry},
    policy_dir::{PolicyDirectory, command_with_etc, derived},
    runner::{directory, eventually, is_root, test},
    session::Session,
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

test!(Both, the_log_tells_a_policy_of_a_file_from_a_shipped_one);
fn the_log_tells_a_policy_of_a_file_from_a_shipped_one() {
    let log = own_log();
    exec(json!({"code": ""})).succeeded();
    let policies = PolicyDirectory::new();
    let path = policies.write("strict", &derived(""));
    exec_with(&["--policy", &path], json!({"code": ""})).succeeded();
    let origins: Vec<Value> =
        records(&log).iter().filter(|record| record["event"] == "run").map(|record| record["policy"]["origin"].clone()).collect();
    assert_eq!(origins, [json!("shipped"), json!(path)]);
    let (_, said) = audit(&["tail"]);
    let lines: Vec<&str> = said.lines().collect();
    assert!(lines[0].contains("  default  ") && lines[1].contains(&format!("  {path}  ")), "{said}");
}

test!(Both, nul_bytes_hide_no_word_of_the_code_from_an_alert);
fn nul_bytes_hide_no_word_of_the_code_from_an_alert() {
    let log = own_log();
    let policies = PolicyDirectory::new();
    let policy = policies.write("alerts", &derived("[audit]\nalerts = { add = [\"code:hush\"] }"));
    let is_met = || records(&log).last().unwrap()["alerts"] == json!(["code:hush"]);
    let text = |code: &[u8]| {
        let code = json!({"base64": BASE64_STANDARD.encode(code)});
        exec_with(&["--policy", &policy], json!({"code": code, "language": "bash"})).succeeded();
        is_met()
    };
    for (code, met) in [
        (&b"echo hush"[..], true),
        (b"echo\nec\0ho hu\0sh", true),
        (b"echo '\xff'hush", true),
        (b"echo hu sh", false),
        (b"echo hu'\xff'sh", false),
    ] {
        assert_eq!(text(code), met, "{}", code.escape_ascii());
    }
    // Of a command NUL parts the words.
    let run = |words: &[&str]| assert!(stockade([&["run", "--policy", &policy, "--"], words].concat()).status().unwrap().success());
    run(&["echo", "hush"]);
    assert!(is_met());
    run(&["echo", "hu", "sh"]);
    assert!(!is_met());
}

test!(Both, a_preview_ends_with_a_whole_character);
fn a_preview_ends_with_a_whole_character() {
    let log = own_log();
    // One byte, and then four each: the last that the preview has room for lacks its last byte.
    let code = format!("#{}", "\u{1f600}".repeat(4096));
    exec(json!({"code": code})).succeeded();
    let kept = records(&log).last().unwrap()["code"].clone();
    let preview = kept["preview"].as_str().unwrap();
    assert!(code.starts_with(preview) && preview.len() % 4 == 1 && preview.len() > 100, "{kept}");
    assert_eq!(kept["bytes"], code.len());
}

test!(Both, a_command_is_written_down);
fn a_command_is_written_down() {
    let log = own_log();
    let output = stockade(["run", "--", "/bin/sh", "-c", "echo words; exit 3"]).output().unwrap();
    assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(3), &b"words\n"[..]));
    let all = records(&log);
    assert_eq!((&all[1]["code"]["kind"], &all[1]["status"]), (&json!("command"), &json!(3)), "{all:?}");
    assert!(all[1]["receipt_sha256"].is_null() && all[1].get("output").is_none(), "streams passed through are not looked at");
    assert!(all[1].get("image").is_none(), "{all:?}");
    let (_, said) = audit(&["tail"]);
    assert!(said.trim_end().ends_with("  /bin/sh -c echo words; exit 3"), "{said}");
    // A receipt can be found in the log.
    let report = directory().join("report");
    stockade(["run", "--report", text(&report), "--", "/bin/true"]).output().unwrap();
    let all = records(&log);
    let report: Value = serde_json::from_str(&fs::read_to_string(&report).unwrap()).unwrap();
    assert!(report["receipt"]["plan_sha256"].is_string() && all[2]["receipt_sha256"].is_string(), "{all:?}");
    assert_eq!(report["audit"]["run"], all[2]["run"]);
    is_whole();
}

test!(Both, an_interpreter_that_is_asked_for_its_version_is_written_down);
fn an_interpreter_that_is_asked_for_its_version_is_written_down() {
    let log = own_log();
    let policies = PolicyDirectory::new();
    let lines = "remove_runtimes = [\"bash\", \"node\", \"python\"]\nlanguage = \"sort\"\n\
                 [runtimes.sort]\ncommand = [\"/usr/bin/sort\", \"{file}\"]\nextension = \"txt\"";
    let policy = policies.write("sort", &derived(lines));
    let output = stockade(["runtimes", "--policy", &policy, "--json"]).output().unwrap();
    let said: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"));
    let sort = said["runtimes"].as_array().unwrap().iter().find(|runtime| runtime["name"] == "sort").unwrap();
    assert!(sort["version"].is_string(), "{said}");
    let all = records(&log);
    let previews: Vec<&str> = all.iter().filter_map(|record| record["code"]["preview"].as_str()).collect();
    assert!(previews.contains(&"/usr/bin/sort\0--version"), "{all:?}");
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

fn make_writable(log: &Path, yes: bool) {
    if is_root() {
        // Modes do not bind root.
        let flags = if yes { MsFlags::empty() } else { MsFlags::MS_RDONLY };
        mount(None::<&str>, "/var/log", None::<&str>, MsFlags::MS_REMOUNT | flags, None::<&str>).unwrap();
    } else {
        let mode = if yes { 0o600 } else { 0o400 };
        fs::set_permissions(log.join("audit-00000001.jsonl"), fs::Permissions::from_mode(mode)).unwrap();
    }
}

test!(Both, a_required_log_that_cannot_be_written_stops_the_run);
fn a_required_log_that_cannot_be_written_stops_the_run() {
    let log = own_log();
    let policies = PolicyDirectory::new();
    let policy = required(&policies);
    let request = json!({"code": "print(1)"});
    exec_with(&["--policy", &policy], request.clone()).succeeded();
    make_writable(&log, false);
    exec_with(&["--policy", &policy], request.clone()).broke("audit_unwritable", &["required", text(&log)]);
    exec(request.clone()).succeeded();
    make_writable(&log, true);
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
    // No writer has died: what the disk had no room for is not there in part.
    assert!(records(&log).iter().all(|record| record["event"] != "torn"));
}

/// Fills the file system that its scratch is on, keeps its program's file from making room, and says
/// so much that its record is long.
const FILL: &str = r#"
import os, sys
if os.path.exists(sys.argv[0]): os.link(sys.argv[0], 'kept')
print('x' * 8192, flush=True)
fill = os.open('fill', os.O_WRONLY | os.O_CREAT | os.O_APPEND)
for size in (65536, 4096, 1):
    try:
        while True: os.write(fill, b'x' * size)
    except OSError: pass
"#;

/// What code is given to, the log that has it then, and how.
type StartCase<'a> = (&'a str, &'a Path, &'a dyn Fn(&str));

test!(RootOnly, code_that_fills_the_disk_leaves_a_lost_record, seconds 120);
/// Scratch and log share a file system.
fn code_that_fills_the_disk_leaves_a_lost_record() {
    let roots_log = own_log();
    let policies = PolicyDirectory::new();
    let policy = policies.write("filled", &derived("[audit]\npreview = \"4KiB\""));
    let shared = directory().join("shared");
    fs::create_dir(&shared).unwrap();
    mount_tmpfs(text(&shared), "size=4m,mode=755");
    let [log, place, home] = ["log", "place", "home"].map(|name| shared.join(name));
    [&log, &place, &home].into_iter().for_each(|path| fs::create_dir(path).unwrap());
    [&place, &home].into_iter().for_each(|path| chown_to_owner(path));
    mount(Some(&log), "/var/log", None::<&str>, MsFlags::MS_BIND, None::<&str>).unwrap();
    let users_log = home.join(".local/state/stockade/audit");
    let id = OWNER.to_string();
    let user = ["setpriv", "--reuid", &id, "--regid", &id, "--clear-groups", "--inh-caps=-all", "--"];
    let program = program_path().unwrap();
    let as_user = |arguments: &[&str]| {
        let mut command = run_under(&[&user[..], &[text(&program)], arguments].concat());
        command.env("HOME", &home).env("XDG_RUNTIME_DIR", &home);
        command
    };
    let long = format!("{FILL}#{}", "x".repeat(8192));
    let sandbox = ["--policy", policy.as_str(), "--scratch", text(&place)];
    let execute = |command: &mut Command, code: &str| drop(run_with_stdin(command, json!({"code": code}).to_string().as_bytes()));
    let exec_line = [&["exec"], &sandbox[..]].concat();
    let doors: [StartCase<'_>; 4] = [
        ("exec", &roots_log, &|code| execute(&mut stockade(&exec_line), code)),
        ("rootless", &users_log, &|code| execute(&mut as_user(&exec_line), code)),
        ("run", &roots_log, &|code| drop(stockade([&["run"], &sandbox[..], &["--", "python3", "-c", code]].concat()).output())),
        ("session", &roots_log, &|code| {
            let mut session = Session::open(&sandbox);
            session.send(&json!({"op": "run", "code": code}).to_string());
            session.answer();
            session.close();
        }),
    ];
    for (door, log, run) in doors {
        let start = || if door == "rootless" { execute(&mut as_user(&["exec"]), "") } else { drop(exec(json!({"code": ""}))) };
        // The control: with room it is written down as it ended.
        let ends = |event: &str| records(log).iter().filter(|record| record["event"] == event).count();
        run("");
        let before = (ends("run"), ends("lost"));
        run(&long);
        assert!(place.join("fill").metadata().unwrap().len() > 1 << 20, "{door}");
        assert_eq!((ends("run"), ends("lost")), before, "{door}: the log had room");
        // A start that finds the disk full still leaves it to the next.
        start();
        assert_eq!(ends("lost"), before.1, "{door}");
        fs::remove_file(place.join("fill")).unwrap();
        let _kept_by_some = fs::remove_file(place.join("kept"));
        start();
        start();
        assert_eq!(ends("lost"), before.1 + 1, "{door}: {:?}", records(log));
        let (status, said) = audit(&["verify", text(log)]);
        assert_eq!(status, Some(0), "{said}");
    }
    assert_eq!(dead_records(), Vec::<String>::new());
    drop(policies);
}

test!(RootOnly, doctor_is_strict_about_a_log_that_cannot_be_written, seconds 120);
fn doctor_is_strict_about_a_log_that_cannot_be_written() {
    let log = own_log();
    exec(json!({"code": ""})).succeeded();
    let doctor = || {
        let strict = stockade(["doctor", "--json", "--strict"]).output().unwrap();
        let found: Value = serde_json::from_slice(&strict.stdout).unwrap();
        let is_audit = |finding: &&Value| finding["feature"] == "audit";
        let audit = found["findings"].as_array().unwrap().iter().find(is_audit).unwrap().clone();
        (strict.status.code(), stockade(["doctor"]).output().unwrap().status.code(), audit)
    };
    let (_, lenient, audit) = doctor();
    assert!(lenient == Some(0) && audit["state"] != "degraded", "{audit}");
    let spoilt = |remedy: &str, spoil: &dyn Fn(), mend: &dyn Fn()| {
        spoil();
        let (strict, lenient, audit) = doctor();
        mend();
        assert_eq!((strict, lenient, &audit["state"]), (Some(3), Some(0), &json!("degraded")), "{audit}");
        assert!(audit["remedy"].as_str().is_some_and(|said| said.contains(remedy)), "{remedy}: {audit}");
    };
    let mode = |mode| fs::set_permissions(&log, fs::Permissions::from_mode(mode)).unwrap();
    spoilt("its mode is 0777: chmod go-w /var/log/stockade", &|| mode(0o777), &|| mode(0o750));
    let own = |uid| std::os::unix::fs::chown(&log, Some(uid), None).unwrap();
    spoilt(&format!("it belongs to uid {OWNER} (mode 0750): chown 0 /var/log/stockade"), &|| own(OWNER), &|| own(0));
    let aside = Path::new("/var/log/aside");
    let link = || {
        fs::rename(&log, aside).unwrap();
        std::os::unix::fs::symlink(aside, &log).unwrap();
    };
    spoilt("it is a symlink", &link, &|| fs::remove_file(&log).and_then(|()| fs::rename(aside, &log)).unwrap());
    spoilt("mount -o remount,rw", &|| make_writable(&log, false), &|| make_writable(&log, true));
    // What is left of the file's last block takes a few.
    let filler = Path::new("/var/log/filler");
    let fill = || {
        assert!(fs::write(filler, vec![0; 8 << 20]).is_err(), "the disk is full");
        (0..20).for_each(|_| drop(exec(json!({"code": ""}))));
    };
    spoilt("make room on its file system", &fill, &|| fs::remove_file(filler).unwrap());
    exec(json!({"code": ""})).succeeded();
    is_whole();
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
    let log = own_log();
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
    for point in ends.iter().flat_map(|lock| &calls[lock.saturating_sub(6)..(lock + 40).min(calls.len())]) {
        killed += u32::from(run(Some((point, Act::Kill))).acted.is_some());
        // Sweeps, so that the next one makes the same calls.
        exec(json!({"code": ""})).succeeded();
        is_whole();
    }
    assert!(killed > 30, "{killed}");
    // And the next one goes on. Each run that began has one end, which its launcher has written
    // or the sweep.
    exec_with(&["--policy", &policy], json!({"code": ""})).succeeded();
    is_whole();
    let all = records(&log);
    let mut ends = BTreeMap::<&str, Vec<&str>>::new();
    for record in all.iter().filter(|record| record["run"].is_string()) {
        ends.entry(record["run"].as_str().unwrap()).or_default().extend(record["event"].as_str().filter(|event| *event != "begun"));
    }
    let odd: Vec<_> = ends.iter().filter(|(_, ends)| ends.len() != 1).collect();
    assert!(odd.is_empty(), "{odd:?} of {}", ends.len());
    let count = |wanted: &str| ends.values().filter(|ends| ends[0] == wanted).count();
    let swept = usize::try_from(killed).unwrap() + 3;
    assert!(count("lost") > 3 && count("run") > swept + 3, "{} and {}", count("lost"), count("run"));
}

/// Starts a run, and waits until its code runs.
fn begin(command: &mut Command, id: &str) -> Child {
    let scratch = scratch_named(id);
    let code = "open('running', 'w').close()\nimport time\ntime.sleep(600)";
    let child = start(command, json!({"code": code, "scratch": text(&scratch), "id": id}).to_string().as_bytes());
    assert!(eventually(Duration::from_secs(10), || scratch.join("running").exists()), "{id} does not run");
    child
}

/// Kills its launcher, and returns that one's pid.
fn lose(mut child: Child) -> u32 {
    child.kill().unwrap();
    child.wait().unwrap();
    child.id()
}

fn lost(log: &Path) -> Vec<Value> {
    records(log).into_iter().filter(|record| record["event"] == "lost").collect()
}

test!(Both, a_run_whose_launcher_was_killed_is_written_down_once, seconds 90);
fn a_run_whose_launcher_was_killed_is_written_down_once() {
    let log = own_log();
    exec(json!({"code": "", "id": "ended"})).succeeded();
    let pids: Vec<u32> = ["a", "b", "c"].into_iter().map(|id| lose(begin(&mut stockade(["exec"]), id))).collect();
    // Several starts find them at the same time, and later ones find them no more.
    thread::scope(|scope| (0..6).for_each(|_| drop(scope.spawn(|| drop(exec(json!({"code": ""})))))));
    exec(json!({"code": ""})).succeeded();
    let mut found = lost(&log);
    found.sort_by_key(|record| record["id"].to_string());
    let ids: Vec<&Value> = found.iter().map(|record| &record["id"]).collect();
    assert_eq!(ids, ["a", "b", "c"], "{found:?}");
    let all = records(&log);
    let ended = all.iter().find(|record| record["id"] == "ended").unwrap();
    for (record, pid) in found.iter().zip(pids) {
        assert_eq!(record["policy"], ended["policy"], "{record}");
        assert_eq!((&record["who"]["uid"], &record["who"]["pid"]), (&ended["who"]["uid"], &json!(pid)), "{record}");
        assert_eq!((&record["verdict"], &record["started"]), (&Value::Null, &Value::Null), "{record}");
        let code = &record["code"];
        assert!(code["sha256"].as_str().is_some_and(|hash| hash.len() == 64) && code["kind"] == "code", "{record}");
        assert!(code["preview"].as_str().is_some_and(|preview| preview.contains("sleep")), "{record}");
        let (run, begun) = (record["run"].as_str().unwrap(), record["begun"].as_str().unwrap());
        assert!(run.len() == 16 && begun < record["time"].as_str().unwrap(), "{record}");
        assert_eq!(all.iter().filter(|other| other["run"] == run).count(), 1, "{record}");
    }
    is_whole();
    assert_eq!(dead_records(), Vec::<String>::new());
}

test!(Both, a_run_whose_end_exceeds_the_callers_file_size_is_written_down_later);
fn a_run_whose_end_exceeds_the_callers_file_size_is_written_down_later() {
    let log = own_log();
    // The log is larger than a file of the caller's may be; what a run needs is not.
    let file = log.join("audit-00000001.jsonl");
    while fs::metadata(&file).map_or(0, |file| file.len()) <= 60 << 10 {
        exec(json!({"code": "", "labels": {"long": "x".repeat(200)}})).succeeded();
    }
    let code = |id: &str| json!({"code": "print(6 * 7)", "id": id}).to_string();
    let limited = |blocks: u32, id: &str| {
        let script = format!("ulimit -f {blocks}; exec \"$0\" exec --quiet");
        run_with_stdin(&mut run_under(&["bash", "-c", &script, text(&program_path().unwrap())]), code(id).as_bytes())
    };
    let answer: Value = serde_json::from_slice(&limited(60, "limited").stdout).unwrap();
    assert!(answer["output"] == "42\n" && answer["audit"]["failure"].as_str().is_some(), "{answer}");
    exec(json!({"code": ""})).succeeded();
    let found = lost(&log);
    assert_eq!(found.iter().map(|record| &record["id"]).collect::<Vec<_>>(), ["limited"], "{found:?}");
    // The control: with room for both, the end itself is written down.
    limited(1000, "roomy");
    assert!(records(&log).iter().any(|record| record["id"] == "roomy" && record["event"] == "run") && lost(&log).len() == 1);
    is_whole();
}

test!(Both, a_lost_run_raises_the_alerts_that_it_is_known_to_meet);
fn a_lost_run_raises_the_alerts_that_it_is_known_to_meet() {
    let log = own_log();
    let policies = PolicyDirectory::new();
    let policy = policies.write(
        "alerting",
        &derived("[audit]\nalerts = { replace = [\"verdict:lost\", \"code:sleep\", \"code:never\", \"verdict:exited\"] }"),
    );
    lose(begin(&mut stockade(["exec", "--policy", &policy]), "alerting"));
    exec(json!({"code": ""})).succeeded();
    let found = lost(&log);
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!(found[0]["alerts"], json!(["verdict:lost", "code:sleep"]), "{found:?}");
}

/// `--allow` for so many hosts.
fn allowing(hosts: usize) -> Vec<String> {
    (0..hosts).flat_map(|host| [String::from("--allow"), format!("h{host}.example.org:443")]).collect()
}

test!(Both, peers_that_a_caller_allows_break_no_log);
fn peers_that_a_caller_allows_break_no_log() {
    let log = own_log();
    let run = |policy: &str, hosts| {
        let words = [vec![String::from("run"), String::from("--policy"), policy.to_owned()], allowing(hosts), vec![String::from("true")]];
        stockade(words.concat().iter().map(String::as_str).collect::<Vec<_>>()).output().unwrap()
    };
    for _ in 0..3 {
        assert_eq!(run("nope", 8000).status.code(), Some(125));
    }
    let done = run("default", 40);
    assert!(done.status.success(), "{done:?}");
    is_whole();
    let all = records(&log);
    assert_eq!(all.len(), 1 + 4, "{all:?}");
    // A run that was refused reaches nothing.
    assert!(all[1..4].iter().all(|record| record["event"] == "refused" && record["allowed_by_caller"].is_null()), "{all:?}");
    let (peers, omitted) = (all[4]["allowed_by_caller"].as_array().unwrap(), &all[4]["allowed_by_caller_omitted"]);
    assert_eq!((peers.len(), &peers[31], omitted), (32, &json!("h31.example.org:443"), &json!(8)));
}

test!(Both, peers_that_a_caller_allows_are_those_of_runs);
fn peers_that_a_caller_allows_are_those_of_runs() {
    let log = own_log();
    let allow = ["--allow", "pypi.org:443"];
    let mut session = Session::open(&allow);
    session.send(&json!({"op": "write", "path": "a", "contents": "x"}).to_string());
    assert_eq!(session.answer()["ok"], true);
    session.send(&json!({"op": "run", "code": ""}).to_string());
    assert_eq!(session.answer()["verdict"], "exited");
    session.close();
    lose(begin(&mut stockade([&["exec"], &allow[..]].concat()), "allowing"));
    exec(json!({"code": ""})).succeeded();
    let all = records(&log);
    let of = |event: &str| all.iter().find(|record| record["event"] == event).unwrap_or_else(|| panic!("{event}: {all:?}"));
    assert!(of("files")["allowed_by_caller"].is_null(), "{all:?}");
    for event in ["run", "lost"] {
        assert_eq!(of(event)["allowed_by_caller"], json!(["pypi.org:443"]), "{event}");
    }
}

test!(Both, what_code_could_write_of_the_host_is_written_down);
fn what_code_could_write_of_the_host_is_written_down() {
    let log = own_log();
    let policies = PolicyDirectory::new();
    let (one, other, third) = (scratch_named("one"), scratch_named("other"), scratch_named("third"));
    exec(json!({"code": "", "id": "its own"})).succeeded();
    exec(json!({"code": "", "id": "scratch", "scratch": text(&one)})).succeeded();
    let reading = policies.write("reading", &derived("[scratch]\naccess = \"ro\""));
    exec_with(&["--policy", &reading], json!({"code": "", "id": "reads", "scratch": text(&one)})).succeeded();
    exec(json!({"code": "", "id": "refused", "scratch": text(&one), "language": "klingon"})).refused("unknown_language", &[]);
    let required = required(&policies);
    exec_with(&["--policy", &required], json!({"code": "", "id": "begun", "scratch": text(&one)})).succeeded();
    lose(begin(&mut stockade(["exec"]), "lost"));
    let binds = ["--ro-bind", "/", "/", "--bind", text(&other), "/w", "--bind", text(&third), "/v", "--ro-bind", text(&third), "/v"];
    assert!(stockade([&["bwrap"][..], &binds, &["true"]].concat()).status().unwrap().success());
    let all = records(&log);
    let of = |id: Value| {
        let told = all.iter().filter(move |record| record["event"] != "opened" && record["id"] == id);
        told.map(|record| &record["writable"]).collect::<Vec<_>>()
    };
    for id in ["its own", "reads", "refused"] {
        assert_eq!(of(json!(id)), [&Value::Null], "{id}");
    }
    assert_eq!(of(json!("scratch")), [&json!([text(&one)])]);
    assert_eq!(of(json!("begun")), [&json!([text(&one)]); 2]);
    assert_eq!(of(json!("lost")), [&json!([text(&directory().join("lost"))])]);
    // What was bound and then covered by itself, read-only, is not there.
    assert_eq!(of(Value::Null), [&json!([text(&other)])]);
}

test!(Both, a_script_that_the_policy_refuses_is_written_down);
fn a_script_that_the_policy_refuses_is_written_down() {
    let log = own_log();
    let (script, report) = (directory().join("a.py"), directory().join("report.json"));
    fs::write(&script, "print(6*7)").unwrap();
    for (policy, status, reason) in [("nope", 125, json!("policy_not_found")), ("default", 0, Value::Null)] {
        let done = stockade(["run", "--policy", policy, "--report", text(&report), text(&script)]).output().unwrap();
        assert_eq!(done.status.code(), Some(status), "{done:?}");
        let report: Value = serde_json::from_slice(&fs::read(&report).unwrap()).unwrap();
        assert_eq!((&report["reason"], &report["started"]), (&reason, &json!(status == 0)));
        assert_eq!(records(&log).last().unwrap()["reason"], reason);
    }
    assert_eq!(records(&log).len(), 1 + 2);
    if !is_root() {
        return;
    }
    let id = OWNER.to_string();
    let words = ["run", "/bin/ls.py"];
    let done = command_with_etc(&[], &[("SUDO_UID", &id), ("SUDO_GID", &id)], &words).output().unwrap();
    assert_eq!(done.status.code(), Some(125), "{done:?}");
    assert_eq!(records(&log).last().unwrap()["reason"], "not_granted");
}

test!(RootOnly, a_lost_run_is_its_callers_and_no_roots);
fn a_lost_run_is_its_callers_and_no_roots() {
    let log = own_log();
    let id = OWNER.to_string();
    let variables = [("SUDO_UID", id.as_str()), ("SUDO_GID", id.as_str()), ("SUDO_USER", "agent")];
    let grants = format!("[[grant]]\nuid = {OWNER}\npolicies = [\"default\"]\nscratch = [{:?}]\n", text(&directory()));
    lose(begin(&mut command_with_etc(&[("stockade/grants.toml", grants.as_str())], &variables, &["exec"]), "agents"));
    exec(json!({"code": ""})).succeeded();
    let found = lost(&log);
    assert_eq!(found.len(), 1, "{found:?}");
    let who = &found[0]["who"];
    assert_eq!((&who["uid"], &who["on_behalf"], &who["launcher_uid"]), (&json!(OWNER), &json!(true), &json!(0)), "{who}");
}

test!(Both, a_lost_run_that_must_be_written_down_waits_until_it_is, seconds 60);
fn a_lost_run_that_must_be_written_down_waits_until_it_is() {
    let log = own_log();
    let policies = PolicyDirectory::new();
    let policy = required(&policies);
    let both = [begin(&mut stockade(["exec", "--policy", &policy]), "required"), begin(&mut stockade(["exec"]), "tried")];
    for child in both {
        lose(child);
    }
    let begun = records(&log).into_iter().find(|record| record["event"] == "begun").unwrap();
    make_writable(&log, false);
    exec(json!({"code": ""})).succeeded();
    exec_with(&["--policy", &policy], json!({"code": ""})).broke("audit_unwritable", &[]);
    make_writable(&log, true);
    assert_eq!(lost(&log), Vec::<Value>::new());
    exec(json!({"code": ""})).succeeded();
    exec(json!({"code": ""})).succeeded();
    let found: Vec<Value> = lost(&log).into_iter().map(|record| record["run"].clone()).collect();
    assert_eq!(found, [begun["run"].clone()], "of the one that is only tried the journal knows");
    is_whole();
}

test!(Both, a_lost_run_of_a_policy_without_a_log_is_written_nowhere);
fn a_lost_run_of_a_policy_without_a_log_is_written_nowhere() {
    let log = own_log();
    let policies = PolicyDirectory::new();
    lose(begin(&mut stockade(["exec", "--policy", &policies.write("off", &derived("[audit]\nmode = \"off\""))]), "off"));
    exec(json!({"code": ""})).succeeded();
    assert_eq!((lost(&log), dead_records()), (Vec::new(), Vec::new()));
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
        (cut, 0, "the chain is consistent; the chain ends with"),
        (good.clone(), 0, "no anchor was given: a change of the last record, a cut tail or a full rewrite cannot be seen"),
    ] {
        fs::write(&file, bad).unwrap();
        for place in [text(&log), text(&file)] {
            let (found, said) = audit(&["verify", place]);
            assert!(found == Some(status) && said.contains(words), "{found:?}: {said}");
        }
    }
}

test!(Both, what_no_launcher_leaves_at_the_end_is_a_change);
fn what_no_launcher_leaves_at_the_end_is_a_change() {
    let log = own_log();
    (0..3).for_each(|_| drop(exec(json!({"code": ""}))));
    let good = written(&log);
    let last = good.trim_end().rfind('\n').unwrap() + 1;
    let half = &good[..(last + good.len()) / 2];
    let changed = format!("{}{}", &good[..last], good[last..].replace("\"uid\":", "\"uid\":0000"));
    let room = 1 << 20;
    let died = "a launcher died while it wrote";
    for (bad, status, words, goes_on) in [
        (changed, 1, "that a line break ends are no record", true),
        (format!("{good}{}", "x".repeat(room)), 1, "more than launchers leave", false),
        // The controls: what a launcher leaves that dies.
        (half.to_owned(), 0, died, true),
        (format!("{good}{}", "x".repeat(room - 1)), 0, died, true),
    ] {
        fs::write(log.join("audit-00000001.jsonl"), &bad).unwrap();
        let (found, said) = audit(&["verify"]);
        assert!(found == Some(status) && said.contains(words), "{found:?}: {said}");
        // A launcher and `verify` agree, and the next record hides nothing.
        let done = exec(json!({"code": ""}));
        assert_eq!(done["audit"]["failure"].is_null(), goes_on, "{}", done["audit"]);
        assert_eq!(audit(&["verify"]).0, Some(status), "{words}");
    }
}

test!(Both, a_result_is_an_anchor_and_one_can_be_required);
fn a_result_is_an_anchor_and_one_can_be_required() {
    let log = own_log();
    let results: Vec<Value> = (0..3).map(|_| exec(json!({"code": ""})).result).collect();
    let place = text(&log);
    let verify = |anchors: &[&Value], pretty: bool, options: &[&str]| {
        let file = directory().join("results.json");
        let lines = anchors.iter().map(|result| if pretty { format!("{result:#}\n") } else { format!("{result}\n") });
        fs::write(&file, lines.collect::<String>()).unwrap();
        audit(&[&["verify", "--log", place, "--anchors", text(&file)], options].concat())
    };
    for pretty in [true, false] {
        let (status, said) = verify(&[&results[0], &results[2]], pretty, &["--require-anchor"]);
        assert!(status == Some(0) && said.contains("4 records in 1 files: each in its place and unchanged"), "{said}");
        assert!(said.contains("2 anchors matched"), "{said}");
    }
    let (status, said) = verify(&[&results[0]], false, &[]);
    assert!(status == Some(0) && said.contains("up to record 2 each in its place"), "{said}");
    let line = json!({"audit": {"chain": "0123456789abcdef", "seq": 9, "sha256": "ab".repeat(32)}});
    let (status, said) = verify(&[&line], false, &[]);
    assert!(status == Some(0) && said.contains("note: the anchors know a chain 0123456789abcdef"), "{said}");
    for option in [&["--require-anchor"][..], &["--chain", "0123456789abcdef"]] {
        assert_eq!(verify(&[&line], false, option).0, Some(1), "{option:?}");
    }
    assert_eq!(verify(&[&results[0]], false, &["--chain", results[0]["audit"]["chain"].as_str().unwrap()]).0, Some(0));
    assert_eq!(audit(&["verify", "--require-anchor"]).0, Some(1));
    let (status, said) = verify(&[&json!({"audit": null})], false, &[]);
    assert!(status == Some(2) && said.contains("audit head CHAIN:SEQ:SHA256"), "{said}");
    // A change of the last record is what no log shows by itself.
    let changed = written(&log).replace(results[2]["audit"]["run"].as_str().unwrap(), "0123456789abcdef");
    fs::write(log.join("audit-00000001.jsonl"), changed).unwrap();
    is_whole();
    assert_eq!(verify(&[&results[2]], false, &[]).0, Some(1));
}

test!(Both, tail_as_json_is_the_log_line_by_line);
fn tail_as_json_is_the_log_line_by_line() {
    let log = own_log();
    (0..2).for_each(|_| drop(exec(json!({"code": "", "labels": {"b": "\u{e9}", "a": "1"}}))));
    let (status, said) = audit(&["tail", "--json"]);
    assert_eq!((status, said.as_str()), (Some(0), written(&log).as_str()));
    assert!(said.contains("\"event\":\"opened\""), "{said}");
    let (_, said) = audit(&["query", "--json"]);
    assert_eq!(said.lines().collect::<Vec<_>>(), written(&log).lines().skip(1).collect::<Vec<_>>());
    // The control: a person reads of runs alone.
    assert_eq!(audit(&["tail"]).1.lines().count(), 2);
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
    assert_eq!(found(&["query", "--since", "today"]).1, "first second third");
    assert_eq!(found(&["query", "--until", "today"]).0, Some(1));
    assert_eq!(found(&["tail", "-n", "2"]), (Some(0), String::from("second third")));
    for id in ["first", first["audit"]["run"].as_str().unwrap()] {
        let (status, said) = audit(&["show", id]);
        assert_eq!((status, &serde_json::from_str::<Value>(&said).unwrap()["id"]), (Some(0), &json!("first")));
    }
    assert_eq!(audit(&["show", "nobody"]).0, Some(1));
}

/// MESSAGE_ID of a head.
const HEAD: &str = "3c787cb39d1d4d2db3bdbf27aa2bcc54";

/// A journal's socket where the launcher looks for it, in this test's mount namespace.
pub(super) fn journal() -> UnixDatagram {
    mount_tmpfs("/run", "size=4m,mode=755");
    fs::create_dir_all("/run/systemd/journal").unwrap();
    let journal = UnixDatagram::bind("/run/systemd/journal/socket").unwrap();
    journal.set_nonblocking(true).unwrap();
    journal
}

pub(super) fn received(journal: &UnixDatagram) -> Vec<String> {
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
    assert!(status == Some(0) && said.contains("note: the anchors know a chain") && said.contains("no anchor matched"), "{said}");
    let chain = good.split("\"chain\":\"").nth(1).unwrap().split('"').next().unwrap();
    let (status, said) = audit(&["verify", "--chain", chain]);
    assert!(status == Some(1) && said.contains("the log was removed or replaced"), "{said}");
}

test!(Both, an_alert_for_a_peer_is_met_behind_a_flood_of_refusals, seconds 60);
/// More refusals than the result's list has room for come first.
fn an_alert_for_a_peer_is_met_behind_a_flood_of_refusals() {
    let log = own_log();
    let policies = PolicyDirectory::new();
    let lines = "[egress]\nwhitelist = { add = [\"192.0.2.1:443\"] }\n[audit]\nalerts = { add = [\"egress:169.254.*\"] }";
    let policy = policies.write("alerts", &derived(lines));
    let flood = "import socket
def refused(to):
    s = socket.socket(); s.settimeout(2)
    try: s.connect((to, 80))
    except ConnectionRefusedError: pass
for number in range(400): refused('198.51.100.%d' % (number % 250) if number < 250 else '203.0.113.%d' % (number - 250))
";
    let run = |code: String| {
        ExecResult::of(run_with_stdin(&mut stockade(["exec", "--policy", &policy]), json!({"code": code}).to_string().as_bytes()))
    };
    run(flood.to_owned()).succeeded();
    assert_eq!(records(&log).last().unwrap().get("alerts"), None, "the control");
    run(format!("{flood}refused('169.254.169.254')")).succeeded();
    let records = records(&log);
    let record = records.last().unwrap();
    assert_eq!(record["alerts"], json!(["egress:169.254.*"]), "{record}");
    assert_eq!(record["egress"]["denied"][0]["peer"], "169.254.169.254", "{record}");
    let listed: u64 = record["egress"]["denied"].as_array().unwrap().iter().map(|peer| peer["count"].as_u64().unwrap()).sum();
    assert_eq!(listed + record["egress"]["omitted"].as_u64().unwrap(), 401, "{record}");
}

test!(RootOnly, the_journal_is_told_what_is_not_in_the_log_from_every_door, seconds 90);
fn the_journal_is_told_what_is_not_in_the_log_from_every_door() {
    let log = own_log();
    let journal = journal();
    let policies = PolicyDirectory::new();
    let policy = required(&policies);
    let shims = directory().join("shims");
    assert!(stockade(["shim", "install", text(&shims), "--policy", "default"]).status().unwrap().success());
    let work = scratch();
    let request = json!({"code": "pass"}).to_string();
    let doors: [(&str, &dyn Fn()); 5] = [
        ("exec", &|| drop(exec(json!({"code": "pass"})))),
        ("run", &|| assert!(stockade(["run", "--", "/bin/true"]).status().unwrap().success())),
        ("shim", &|| assert!(run_under(&[text(&shims.join("python3")), "-c", ""]).current_dir(&work).status().unwrap().success())),
        ("session", &|| {
            let mut session = Session::open(&[]);
            session.output("pass");
            session.close();
        }),
        ("socket", &|| {
            let (mut client, server) = UnixStream::pair().unwrap();
            client.write_all(request.as_bytes()).unwrap();
            client.shutdown(Shutdown::Write).unwrap();
            let mut serve = stockade(["serve-one", "--policy", "default"]);
            assert!(serve.stdin(OwnedFd::from(server)).status().unwrap().success());
        }),
    ];
    let told = |journal: &UnixDatagram| -> Vec<String> {
        received(journal).into_iter().filter(|message| message.contains("\nPRIORITY=3\n")).collect()
    };
    doors.iter().for_each(|(_, run)| run());
    assert_eq!(told(&journal), Vec::<String>::new(), "the control: with a log");
    make_writable(&log, false);
    for (door, run) in doors {
        run();
        let told = told(&journal);
        assert_eq!(told.len(), 1, "{door}: {told:?}");
        for part in ["MESSAGE=not in the audit log: exited by run ", "STOCKADE_FAILURE=cannot ", "STOCKADE_POLICY=default\n"] {
            assert!(told[0].contains(part), "{door}: {part}: {told:?}");
        }
        assert!(told[0].contains("\nMESSAGE_ID=") && !told[0].contains(HEAD), "{told:?}");
    }
    // What is refused for want of the log, too, and once for a run.
    exec_with(&["--policy", &policy], json!({"code": "pass"})).broke("audit_unwritable", &[]);
    let refused = told(&journal);
    assert!(refused.len() == 1 && refused[0].contains("required.toml\n"), "{refused:?}");
    // A log that is corrupted is as bad as one that is full.
    make_writable(&log, true);
    fs::write(log.join("audit-00000001.jsonl"), "nothing\n").unwrap();
    exec(json!({"code": "pass"}));
    let corrupted = told(&journal);
    assert!(corrupted.len() == 1 && corrupted[0].contains("is corrupted"), "{corrupted:?}");
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

test!(RootOnly, refusals_raise_alerts, seconds 60);
fn refusals_raise_alerts() {
    let log = own_log();
    let journal = journal();
    let grants = format!("[[grant]]\nuid = {OWNER}\npolicies = [\"strict\"]\n");
    let id = OWNER.to_string();
    let alerts = |journal: &UnixDatagram| {
        let all = received(journal).into_iter().filter(|message| message.contains("MESSAGE=audit alert: "));
        all.map(|message| message.lines().next().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let through_sudo = |grants: &str, options: &[&str], request: &str| {
        let variables = [("SUDO_UID", id.as_str()), ("SUDO_GID", id.as_str())];
        let mut command = command_with_etc(&[("stockade/grants.toml", grants)], &variables, &[&["exec"], options].concat());
        ExecResult::of(run_with_stdin(&mut command, request.as_bytes()))
    };
    // No policy was read that could choose.
    for (grants, policy, reason) in
        [(grants.as_str(), "default", "not_granted"), ("grant = 1\n", "strict", "grants_unreadable"), (&grants, "strict", "request_empty")]
    {
        let request = if reason == "request_empty" { "" } else { "{\"code\": \"\"}" };
        assert_eq!(through_sudo(grants, &["--policy", policy], request)["reason"], reason);
        let (alerts, record) = (alerts(&journal), records(&log).pop().unwrap());
        if reason == "request_empty" {
            // The control: its policy was read, and has no such alert.
            assert_eq!((alerts, &record["alerts"], &record["policy_requested"]), (vec![], &Value::Null, &Value::Null));
            continue;
        }
        assert!(alerts.len() == 1 && alerts[0].contains("sandbox_error (") && alerts[0].ends_with(": verdict:refused"), "{alerts:?}");
        assert_eq!((&record["alerts"], &record["policy_requested"]), (&json!(["verdict:refused"]), &json!(policy)), "{record}");
        assert_eq!((&record["policy"], &record["program"]), (&Value::Null, &json!(concat!("stockade ", env!("CARGO_PKG_VERSION")))));
    }
    // One's own rights: the policy chooses.
    let policies = PolicyDirectory::new();
    let policy = policies.write("alerts", &derived("[audit]\nalerts = { add = [\"verdict:refused\"] }"));
    exec_with(&["--policy", &policy], json!({"code": "", "language": "no-such"})).refused("unknown_language", &[]);
    assert!(alerts(&journal)[0].contains("bad_request (unknown_language) by run"));
    exec_with(&["--policy", &policy], json!({"code": ""})).succeeded();
    exec_with(&["--policy", "no-such"], json!({"code": ""})).broke("policy_not_found", &[]);
    assert_eq!(alerts(&journal), Vec::<String>::new());
    assert_eq!(records(&log).pop().unwrap()["policy_requested"], "no-such");
}

test!(Both, checks_of_the_host_are_told_from_runs_of_users, seconds 120);
fn checks_of_the_host_are_told_from_runs_of_users() {
    let log = own_log();
    stockade(["doctor"]).output().unwrap();
    stockade(["doctor", "--scratch", "/no-such-directory"]).output().unwrap();
    stockade(["runtimes", "--json"]).output().unwrap();
    assert_eq!(audit(&["query", "--without-checks"]).0, Some(1));
    let made_by = |record: &Value| record["via"].as_str().map(str::to_owned);
    let via: Vec<_> = records(&log)[1..].iter().map(made_by).collect();
    assert!(via.iter().all(Option::is_some) && via.contains(&Some("doctor".into())) && via.contains(&Some("runtimes".into())), "{via:?}");
    let refused = records(&log).into_iter().find(|record| record["event"] == "refused").unwrap();
    assert_eq!(refused["via"], "doctor");
    exec(json!({"code": "", "id": "a-users"})).succeeded();
    let (status, said) = audit(&["query", "--without-checks", "--json"]);
    assert!(status == Some(0) && said.lines().count() == 1 && said.contains("a-users") && !said.contains("\"via\""), "{said}");
}

test!(Both, an_auditor_can_compute_the_hashes_of_a_record);
fn an_auditor_can_compute_the_hashes_of_a_record() {
    let log = own_log();
    let policies = PolicyDirectory::new();
    let policy = policies.write("mine", "schema = 1\nextends = \"default\"\n");
    let mut command = stockade(["exec", "--policy", &policy]);
    let result = run_with_stdin(&mut command, br#"{"code": "print(6*7)"}"#).stdout;
    let kept = directory().join("result.json");
    fs::write(&kept, &result).unwrap();
    let shell = |script: &str| {
        let default = Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("policies").join("default.toml");
        let done = Command::new("sh").args(["-c", script, "sh", &policy, text(&default), text(&kept)]).output().unwrap();
        String::from_utf8(done.stdout).unwrap().trim_end().to_owned()
    };
    let record = records(&log).pop().unwrap();
    // As operate.md has them.
    let of_policy = shell("sha256sum \"$1\" \"$2\" | cut -c 1-64 | sha256sum | cut -c 1-64");
    assert_eq!(record["policy"]["sha256"], of_policy);
    let of_receipt = shell("jq -cj .receipt \"$3\" | sha256sum | cut -c 1-64");
    assert_eq!(record["receipt_sha256"], of_receipt);
    let receipt = &serde_json::from_slice::<Value>(&result).unwrap()["receipt"];
    assert_eq!((&receipt["program"], &record["program"]), (&json!(concat!("stockade ", env!("CARGO_PKG_VERSION"))), &receipt["program"]));
}

test!(Both, a_rotated_log_is_verified_across_files_and_what_was_removed_is_stated);
fn a_rotated_log_is_verified_across_files_and_what_was_removed_is_stated() {
    let log = own_log();
    let (status, said) = audit(&["rotate"]);
    assert!(status == Some(i32::from(!is_root())) && said.contains(&format!("{}: there is no audit log yet", log.display())), "{said}");
    let (status, said) = audit(&["tail"]);
    assert!(status == Some(2) && (is_root() || said.contains("root's log: --log /var/log/stockade")), "{said}");
    for id in ["one", "two"] {
        exec(json!({"code": "", "id": id})).succeeded();
        assert_eq!(audit(&["rotate", "--keep-days", "1"]).0, Some(0));
    }
    exec(json!({"code": "", "id": "three"})).succeeded();
    let (status, said) = audit(&["verify"]);
    assert!(status == Some(0) && said.contains("in 3 files: the chain is consistent"), "{said}");
    // The control: a file that goes by itself is missed.
    let first = log.join("audit-00000001.jsonl");
    let kept = fs::read(&first).unwrap();
    fs::remove_file(&first).unwrap();
    assert_eq!(audit(&["verify"]).0, Some(1));
    fs::write(&first, kept).unwrap();
    let (status, said) = audit(&["rotate", "--keep-days", "0"]);
    assert!(status == Some(0) && said.matches("removed ").count() == 3, "{said}");
    exec(json!({"code": "", "id": "four"})).succeeded();
    let (status, said) = audit(&["verify"]);
    assert!(status == Some(0) && said.contains("3 files up to audit-00000003.jsonl were removed for their age"), "{said}");
    assert!(audit(&["show", "four"]).0 == Some(0) && audit(&["show", "one"]).0 == Some(1));
    if is_root() {
        let through_sudo = stockade(["audit", "rotate"]).env("SUDO_UID", "1000").env("SUDO_GID", "1000").output().unwrap();
        assert!(through_sudo.status.code() == Some(125) && String::from_utf8_lossy(&through_sudo.stderr).contains("uid 1000"));
    }
}

test!(Both, a_rotation_makes_no_run_lost_whose_end_it_removes);
fn a_rotation_makes_no_run_lost_whose_end_it_removes() {
    let log = own_log();
    // The launcher was killed after its end was written: its record names a run that stands there.
    exec(json!({"code": "", "id": "ended"})).succeeded();
    lose(begin(&mut stockade(["exec"]), "killed"));
    let name = names(&registry()).into_iter().find(|name| name.starts_with("run-")).unwrap();
    let record = fs::read_to_string(registry().join(&name)).unwrap();
    let of_killed = record.lines().find(|line| line.starts_with("run ")).unwrap();
    let killed: Value = serde_json::from_str(&of_killed[4..]).unwrap();
    let file = log.join("audit-00000001.jsonl");
    let lines = fs::read_to_string(&file).unwrap();
    let ended = records(&log).into_iter().find(|record| record["id"] == "ended").unwrap();
    let offset = lines.find(lines.lines().find(|line| line.contains("\"ended\"")).unwrap()).unwrap();
    let of_ended = of_killed.replace(killed["run"].as_str().unwrap(), ended["run"].as_str().unwrap());
    let end = json!({"file": text(&file), "offset": offset});
    let other = registry().join(if name == "run-16000" { "run-16001" } else { "run-16000" });
    fs::write(&other, format!("{of_ended}\nend {end}\n")).unwrap();
    assert_eq!(audit(&["rotate", "--keep-days", "0"]).0, Some(0));
    exec(json!({"code": "", "id": "later"})).succeeded();
    assert!(!other.exists());
    // The control: the other was lost, and the rotation wrote it down before it removed the file.
    let standing: String = fs::read_dir(&log).unwrap().flatten().filter_map(|file| fs::read_to_string(file.path()).ok()).collect();
    assert!(!standing.contains(ended["run"].as_str().unwrap()), "{standing}");
    assert_eq!(dead_records(), Vec::<String>::new());
}

test!(Both, records_are_found_by_their_event);
fn records_are_found_by_their_event() {
    let _log = own_log();
    exec(json!({"code": "", "id": "ran"})).succeeded();
    exec(json!({"code": "", "id": "none", "language": "klingon"})).refused("unknown_language", &[]);
    let ids = |event: &str| {
        let (status, said) = audit(&["query", "--json", "--event", event]);
        let ids = said.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["id"].as_str().unwrap_or("-").to_owned());
        (status, ids.collect::<Vec<_>>())
    };
    assert_eq!(ids("run"), (Some(0), vec![String::from("ran")]));
    assert_eq!(ids("refused"), (Some(0), vec![String::from("none")]));
    assert_eq!(ids("proof"), (Some(1), Vec::new()));
    let unknown = stockade(["audit", "query", "--event", "refusal"]).output().unwrap();
    let why = String::from_utf8(unknown.stderr).unwrap();
    assert!(unknown.status.code() == Some(2) && why.contains("refused, held"), "{why}");
}
