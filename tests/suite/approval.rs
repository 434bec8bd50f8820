//! Approval: what screening holds back runs once, for a token that is for this request of
//! this caller alone, and under `approvers` only after somebody else has said so.
//!
//! Root's tests have their own registry and log, in a mount namespace of the test's
//! process.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::{Command, Output},
    thread,
};

use base64::{Engine, prelude::BASE64_STANDARD};
use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::{
    suite::socket::SocketServer,
    support::{
        exec::{ExecResult, OWNER, exec, exec_with, program_path, run_under, run_with_stdin, scratch_named, stockade, text, write_file},
        leftovers::registry_ends_with_test,
        policy_dir::{PolicyDirectory, command_with_etc, derived},
        runner::{directory, is_root, test},
        session::Session,
    },
};

/// Starts a program, and so is held back under `review`.
pub(super) const STARTS: &str = "import subprocess\nprint(subprocess.run(['echo', 'ran'], capture_output=True, text=True).stdout, end='')";

/// A registry and a log of this test's own.
pub(super) fn own_registry() -> PathBuf {
    if is_root() {
        unshare(CloneFlags::CLONE_NEWNS).unwrap();
        mount(None::<&str>, "/", None::<&str>, MsFlags::MS_REC | MsFlags::MS_PRIVATE, None::<&str>).unwrap();
        for place in ["/run", "/var/log"] {
            mount(Some("none"), place, Some("tmpfs"), MsFlags::empty(), Some("size=16m,mode=755")).unwrap();
        }
        registry_ends_with_test();
        return PathBuf::from("/run/stockade");
    }
    directory().join("home/stockade")
}

fn log() -> PathBuf {
    if is_root() { PathBuf::from("/var/log/stockade") } else { directory().join("home/.local/state/stockade/audit") }
}

fn records() -> Vec<Value> {
    let written = fs::read_to_string(log().join("audit-00000001.jsonl")).unwrap();
    written.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

pub(super) fn review(request: &Value) -> ExecResult {
    exec_with(&["--policy", "review"], request.clone())
}

pub(super) fn with_token(request: &Value, token: &str) -> Value {
    let mut request = request.clone();
    request["approve"] = json!(token);
    request
}

/// The token of a result that waits.
#[track_caller]
pub(super) fn token_of(done: &ExecResult) -> String {
    let held = json!({"verdict": "approval_required", "code": 126, "started": false, "success": false, "output": "", "receipt": null});
    done.expect(held);
    let token = done["approval"]["token"].as_str().unwrap().to_owned();
    assert!(token.len() == 32 && token.bytes().all(|byte| byte.is_ascii_hexdigit()), "{token}");
    token
}

fn hash(token: &str) -> String {
    Sha256::digest(token).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// What is kept under a token.
fn kept(registry: &Path, token: &str, ending: &str) -> PathBuf {
    registry.join(format!("approval-{}.{ending}", hash(token)))
}

test!(Both, code_that_is_held_back_runs_once_with_its_token, seconds 60);
fn code_that_is_held_back_runs_once_with_its_token() {
    let registry = own_registry();
    let request = json!({"code": STARTS});
    let done = review(&request);
    let token = token_of(&done);
    done.expect(json!({"reason": "approval_required"}));
    assert!((1..=900).contains(&done["approval"]["seconds_left"].as_u64().unwrap()) && done["approval"]["approvers"] == json!([]));
    assert_eq!(done["findings"][0]["action"], "approve", "{}", done.brief());
    assert!(done.error().contains("subprocess") && done.error().contains("15min") && !done.error().contains(&token), "{}", done.error());
    let granted = with_token(&request, &token);
    review(&granted).succeeded().expect(json!({"output": "ran\n"}));
    review(&granted).refused("approval_used", &["once"]);
    assert!(kept(&registry, &token, "used").exists() && !kept(&registry, &token, "held").exists());
    // On the command line, and never both.
    let token_two = token_of(&review(&request));
    let both = exec_with(&["--policy", "review", "--approve", &token_two], with_token(&request, &token_two));
    both.refused("request_malformed", &["duplicate field `approve`"]);
    exec_with(&["--policy", "review", "--approve", &token_two], request.clone()).succeeded();
    for (wrong, reason) in
        [("0".repeat(32), "approval_unknown"), ("x".to_owned(), "approval_malformed"), (token.to_uppercase(), "approval_malformed")]
    {
        review(&with_token(&request, &wrong)).refused(reason, &["approve: "]);
    }
    // The control: what needs no approval.
    let honest = review(&json!({"code": "print(6 * 7)"}));
    assert!(honest.succeeded()["approval"].is_null());
    // What cannot be seen in the code is seen in the words about it.
    let hidden = review(&json!({"code": "import shutil\nshutil.rmtree('\u{1b}[2J\u{202e}x')"}));
    token_of(&hidden);
    assert!(hidden.error().contains("\\u{1b}[2J\\u{202e}") && !hidden.error().contains(['\u{1b}', '\u{202e}']), "{:?}", hidden.error());
    // Nothing of the first two but their hashes is in the log.
    let all = records();
    let of_first: Vec<_> = all.iter().filter(|record| record["approval"]["token_sha256"] == hash(&token)).collect();
    let events: Vec<_> = of_first.iter().map(|record| (record["event"].as_str().unwrap(), record["reason"].as_str())).collect();
    assert_eq!(events, [("held", Some("approval_required")), ("run", None), ("refused", Some("approval_used"))]);
    // What was found stands there, of what waits as of what runs; and of honest code nothing.
    for record in &of_first[..2] {
        for part in ["rule", "action", "line", "column"] {
            assert_eq!(record["findings"][0][part], done["findings"][0][part], "{part} in {record}");
        }
    }
    assert!(all.iter().any(|record| record["code"]["preview"] == "print(6 * 7)" && record["findings"].is_null()));
    let uid = json!(nix::unistd::getuid().as_raw());
    assert_eq!([&of_first[0]["approval"]["approver"], &of_first[1]["approval"]["approver"]], [&Value::Null, &uid]);
    let written = fs::read_to_string(log().join("audit-00000001.jsonl")).unwrap();
    assert!(!written.contains(&token) && !written.contains(&token_two));
    for entry in fs::read_dir(&registry).unwrap().flatten() {
        let held = fs::read_to_string(entry.path()).unwrap_or_default();
        assert!(!held.contains(&token_two) && !entry.path().to_string_lossy().contains(&token_two), "{held}");
    }
}

test!(Both, a_token_is_for_the_very_same_request, seconds 90);
fn a_token_is_for_the_very_same_request() {
    own_registry();
    let request = json!({
        "code": STARTS, "args": ["a"], "stdin": "in", "env": {"LANG": "C"}, "files": {"f": "1"}, "collect": ["f"], "limits": {"wall": "20s"},
        "language": "python",
    });
    let token = token_of(&review(&request));
    for (field, other) in [
        ("code", json!(format!("{STARTS}\nprint('more')"))),
        ("args", json!(["b"])),
        ("args", json!([])),
        ("stdin", json!("other")),
        ("env", json!({"LANG": "C.UTF-8"})),
        ("files", json!({"f": "2"})),
        ("files", json!({"f": "1", "g": ""})),
        ("collect", json!(["*"])),
        ("limits", json!({"wall": "21s"})),
        ("language", json!("python3")),
    ] {
        let mut changed = with_token(&request, &token);
        changed[field] = other;
        review(&changed).refused("approval_of_other_request", &["another request", "limits"]);
    }
    // What only speaks about it may be another, and none of this has used the token up.
    let mut same = with_token(&request, &token);
    same["id"] = json!("second try");
    same["labels"] = json!({"try": "2"});
    review(&same).succeeded().expect(json!({"output": "ran\n"}));
}

test!(Both, a_token_is_for_its_policy_and_its_scratch, seconds 60);
fn a_token_is_for_its_policy_and_its_scratch() {
    own_registry();
    let policies = PolicyDirectory::new();
    let write = |more: &str| policies.write("mine", &derived(&format!("[screen]\nprocess = \"approve\"\n{more}")));
    let place = scratch_named("place");
    let request = json!({"code": STARTS, "scratch": text(&place)});
    let policy = write("");
    let ask = |request: &Value| exec_with(&["--policy", &policy], request.clone());
    let token = token_of(&ask(&request));
    let granted = with_token(&request, &token);
    write("network = \"approve\"");
    ask(&granted).refused("approval_of_other_policy", &["mine"]);
    review(&granted).refused("approval_of_other_policy", &["`review`"]);
    write("");
    exec_with(&["--policy", &policy, "--runtime", "python=/usr/bin/python3"], granted.clone())
        .refused("approval_of_other_policy", &["interpreters"]);
    if !is_root() {
        exec_with(&["--policy", &policy, "--allow", "127.0.0.1:9"], granted.clone()).refused("approval_of_other_policy", &["mine"]);
    }
    let mut elsewhere = granted.clone();
    elsewhere["scratch"] = json!(text(&scratch_named("elsewhere")));
    ask(&elsewhere).refused("approval_of_other_scratch", &["another scratch"]);
    elsewhere["scratch"] = Value::Null;
    ask(&elsewhere).refused("approval_of_other_scratch", &[]);
    // The same path, and another directory; by a link too.
    let aside = place.with_file_name("aside");
    fs::rename(&place, &aside).unwrap();
    scratch_named("place");
    ask(&granted).refused("approval_of_other_scratch", &[]);
    fs::remove_dir(&place).unwrap();
    symlink(&aside, &place).unwrap();
    let through_link = ask(&granted);
    assert!(through_link["verdict"] == "bad_request", "{}", through_link.brief());
    fs::remove_file(&place).unwrap();
    fs::rename(&aside, &place).unwrap();
    ask(&granted).succeeded().expect(json!({"output": "ran\n"}));
}

test!(Both, of_many_who_bring_a_token_at_one_time_one_runs, seconds 60);
fn of_many_who_bring_a_token_at_one_time_one_runs() {
    own_registry();
    let place = scratch_named("place");
    let request = json!({"code": format!("{STARTS}\nopen('runs', 'a').write('x')"), "scratch": text(&place)});
    let granted = with_token(&request, &token_of(&review(&request))).to_string();
    let commands: Vec<Command> = (0..6).map(|_| stockade(["exec", "--policy", "review"])).collect();
    let running: Vec<_> = commands
        .into_iter()
        .map(|mut command| {
            let granted = granted.clone();
            thread::spawn(move || ExecResult::of(run_with_stdin(&mut command, granted.as_bytes())))
        })
        .collect();
    let all: Vec<ExecResult> = running.into_iter().map(|one| one.join().unwrap()).collect();
    let (ran, late): (Vec<_>, Vec<_>) = all.iter().partition(|done| done["started"] == true);
    assert_eq!(ran.len(), 1, "{:?}", all.iter().map(ExecResult::brief).collect::<Vec<_>>());
    ran[0].succeeded();
    for done in late {
        done.refused("approval_used", &[]);
    }
    assert_eq!(fs::read_to_string(place.join("runs")).unwrap(), "x");
}

/// Changes what is kept under a token; what was there.
fn change(path: &Path, field: &str, value: Value) -> String {
    let before = fs::read_to_string(path).unwrap();
    let mut held: Value = serde_json::from_str(&before).unwrap();
    assert!(!held[field].is_null(), "{held}");
    held[field] = value;
    fs::write(path, held.to_string()).unwrap();
    before
}

test!(Both, a_token_ends_with_its_time_and_its_boot, seconds 60);
fn a_token_ends_with_its_time_and_its_boot() {
    let registry = own_registry();
    let request = json!({"code": STARTS});
    let token = token_of(&review(&request));
    let (held, granted) = (kept(&registry, &token, "held"), with_token(&request, &token));
    let uptime = fs::read_to_string("/proc/uptime").unwrap().split('.').next().unwrap().parse::<u64>().unwrap();
    let before = change(&held, "until_ms", json!((uptime - 1) * 1000));
    review(&granted).refused("approval_expired", &["time is over"]);
    fs::write(&held, &before).unwrap();
    change(&held, "boot", json!("5d8e2f2c-0000-0000-0000-000000000000"));
    review(&granted).refused("approval_unknown", &[]);
    // The control: as it was.
    fs::write(&held, &before).unwrap();
    review(&granted).succeeded();
    // The next that waits sweeps what is past.
    let past = kept(&registry, &token, "used");
    token_of(&review(&request));
    assert!(past.exists());
    change(&past, "boot", json!("5d8e2f2c-0000-0000-0000-000000000000"));
    token_of(&review(&request));
    assert!(!past.exists());
}

test!(RootOnly, a_used_token_is_forgotten_five_minutes_after_its_time);
fn a_used_token_is_forgotten_five_minutes_after_its_time() {
    let registry = own_registry();
    let request = json!({"code": STARTS});
    let token = token_of(&review(&request));
    review(&with_token(&request, &token)).succeeded();
    let past = kept(&registry, &token, "used");
    token_of(&later(1000, &request));
    assert!(past.exists());
    token_of(&later(1300, &request));
    assert!(!past.exists());
}

/// So many seconds later by the kernel's CLOCK_BOOTTIME, which a time namespace shifts.
fn later(seconds: u64, request: &Value) -> ExecResult {
    let (seconds, program) = (seconds.to_string(), program_path().unwrap());
    let words = ["unshare", "--time", "--boottime", &seconds, "--fork", text(&program), "exec", "--policy", "review"];
    ExecResult::of(run_with_stdin(&mut run_under(&words), request.to_string().as_bytes()))
}

test!(RootOnly, a_clock_that_is_set_changes_nothing_and_time_that_passes_does, seconds 60);
/// CLOCK_REALTIME has no namespace, so nothing which it says may stand in what is kept.
fn a_clock_that_is_set_changes_nothing_and_time_that_passes_does() {
    let registry = own_registry();
    let request = json!({"code": STARTS});
    let token = token_of(&review(&request));
    let granted = with_token(&request, &token);
    let until = serde_json::from_str::<Value>(&fs::read_to_string(kept(&registry, &token, "held")).unwrap()).unwrap()["until_ms"].clone();
    let uptime = fs::read_to_string("/proc/uptime").unwrap().split('.').next().unwrap().parse::<u64>().unwrap();
    let left = until.as_u64().unwrap() / 1000 - uptime;
    assert!((800..=901).contains(&left), "{left} s by the kernel's own clock");
    later(1000, &granted).refused("approval_expired", &[]);
    later(60, &granted).succeeded();
}

test!(Both, a_token_of_a_session_is_for_that_session_until_its_reset, seconds 60);
fn a_token_of_a_session_is_for_that_session_until_its_reset() {
    own_registry();
    let open = || Session::open(&["--policy", "review"]);
    let (mut first, mut second) = (open(), open());
    let line = json!({"op": "run", "code": STARTS});
    let ask = |session: &mut Session| session.ask(line.clone())["approval"]["token"].as_str().unwrap().to_owned();
    let (token, lost) = (ask(&mut first), ask(&mut first));
    let granted = with_token(&line, &token);
    let elsewhere = second.ask(granted.clone());
    assert_eq!((&elsewhere["verdict"], &elsewhere["reason"]), (&json!("bad_request"), &json!("approval_of_other_scratch")));
    let outside = review(&with_token(&json!({"code": STARTS}), &token));
    outside.refused("approval_of_other_scratch", &["session"]);
    assert_eq!(first.ask(granted.clone())["output"], "ran\n");
    assert_eq!(first.ask(granted)["reason"], "approval_used");
    assert_eq!(first.ask(json!({"op": "reset"}))["ok"], true);
    assert_eq!(first.ask(with_token(&line, &lost))["reason"], "approval_of_other_scratch");
}

test!(Both, a_token_comes_and_goes_through_a_socket, seconds 60);
fn a_token_comes_and_goes_through_a_socket() {
    own_registry();
    let socket = SocketServer::open("review.sock", || stockade(["serve-one"]));
    let request = json!({"code": STARTS});
    let token = token_of(&socket.ask(&[], &request));
    socket.ask(&[], &with_token(&request, &token)).succeeded().expect(json!({"output": "ran\n"}));
    let token = token_of(&socket.ask(&[], &request));
    let mut client = socket.client(&[]);
    client.args(["--approve", &token]);
    ExecResult::of(run_with_stdin(&mut client, request.to_string().as_bytes())).succeeded();
}

/// A policy whose code somebody else approves.
fn four_eyes() -> String {
    format!("schema = 1\ndescription = \"of a test\"\nextends = \"review\"\n[screen]\napprovers = {{ add = [\"uid:{}\"] }}\n", OWNER + 7)
}

/// `stockade` by root behind sudo, for this user; every one of three has the grants.
fn behind_sudo(uid: u32, arguments: &[&str]) -> Command {
    let grant = |uid| {
        format!(
            "[[grant]]\nuid = {uid}\npolicies = [\"review\", \"four-eyes\"]\nscratch = [{:?}]\ninterpreters = [\"/usr/bin/python3\"]\n",
            text(&directory())
        )
    };
    let grants = grant(OWNER) + &grant(OWNER + 1) + &grant(OWNER + 7);
    let files = [("stockade/grants.toml", grants.as_str()), ("stockade/policies/four-eyes.toml", &four_eyes())];
    let id = uid.to_string();
    command_with_etc(&files, &[("SUDO_UID", &id), ("SUDO_GID", &id)], arguments)
}

fn exec_as(uid: u32, policy: &str, request: &Value) -> ExecResult {
    ExecResult::of(run_with_stdin(&mut behind_sudo(uid, &["exec", "--policy", policy]), request.to_string().as_bytes()))
}

test!(RootOnly, anothers_token_is_none, seconds 60);
fn anothers_token_is_none() {
    own_registry();
    let request = json!({"code": STARTS});
    let token = token_of(&exec_as(OWNER, "review", &request));
    let granted = with_token(&request, &token);
    let (anothers, nobodys) =
        (exec_as(OWNER + 1, "review", &granted), exec_as(OWNER + 1, "review", &with_token(&request, &"0".repeat(32))));
    anothers.refused("approval_unknown", &[]);
    assert_eq!(anothers.error(), nobodys.error());
    // Not even root for itself.
    review(&granted).refused("approval_unknown", &[]);
    exec_as(OWNER, "review", &granted).succeeded().expect(json!({"output": "ran\n"}));
    assert_eq!(exec_as(OWNER + 1, "review", &granted).error(), nobodys.error());
}

/// `stockade approve` by root behind sudo, for this user: its status and output.
fn approve(uid: u32, words: &[&str]) -> (Option<i32>, String) {
    let Output { status, stdout, stderr } = behind_sudo(uid, &[&["approve"], words].concat()).output().unwrap();
    (status.code(), String::from_utf8(stdout).unwrap() + &String::from_utf8(stderr).unwrap())
}

test!(RootOnly, approvers_see_what_they_approve_and_no_other_user_approves, seconds 90);
fn approvers_see_what_they_approve_and_no_other_user_approves() {
    let registry = own_registry();
    // A return by itself, which ends a line of Python and looks like none.
    let code = format!("# \u{202e}harmless, as in C:\\r\r{STARTS}");
    let request = json!({
        "code": code, "args": ["--now"], "stdin": {"base64": BASE64_STANDARD.encode("one\ntwo")},
        "files": {"m.py": {"base64": BASE64_STANDARD.encode("import socket\n")}},
    });
    let done = exec_as(OWNER, "four-eyes", &request);
    let token = token_of(&done);
    assert_eq!(done["approval"]["approvers"], json!([format!("uid:{}", OWNER + 7)]));
    assert!(done.error().contains("stockade approve"), "{}", done.error());
    let granted = with_token(&request, &token);
    let pending = || {
        let done = exec_as(OWNER, "four-eyes", &granted);
        done.expect(json!({"verdict": "approval_required", "reason": "approval_pending", "started": false}));
        assert_eq!(done["approval"]["token"], token.as_str());
    };
    pending();
    // Neither the requester nor any other user, and these learn nothing.
    let (status, said) = approve(OWNER, &["--yes", &token]);
    assert!(status == Some(2) && said.contains("yourself"), "{said}");
    let unlisted = approve(OWNER + 1, &["--yes", &token]);
    assert_eq!(unlisted, approve(OWNER + 1, &["--yes", &"0".repeat(32)]));
    assert_eq!(unlisted.0, Some(2));
    pending();
    // To look is not to approve.
    let (status, said) = approve(OWNER + 7, &[&token]);
    assert_eq!(status, Some(0), "{said}");
    for part in [
        &format!("uid {OWNER} wants this run as python under `four-eyes`,\nin a private scratch that vanishes:\n"),
        "    1 | # ⟨U+202E⟩harmless, as in C:\\r⟨U+000D⟩\n    2 | import subprocess\n    3 | print(subprocess.run(",
        "stdin, 7 bytes, sent as base64 and decoded here:\n    1 | one\n    2 | two\n",
        "file \"m.py\", 14 bytes, sent as base64 and decoded here:\n    1 | import socket\n",
        "--now",
        "approve: line 2, column 8",
        "approve: line 3, column 7",
        "approve: m.py: line 1, column 8",
        "not approved",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert!(!said.contains('\u{202e}'));
    pending();
    let (status, said) = approve(OWNER + 7, &["--yes", "--json", &token]);
    let whole: Value = serde_json::from_str(&said).unwrap();
    assert_eq!((status, &whole["requester"], &whole["approver"]), (Some(0), &json!(OWNER), &json!(OWNER + 7)));
    assert_eq!((&whole["shown"]["request"]["code"], &whole["shown"]["findings_omitted"]), (&json!(code), &json!(0)));
    exec_as(OWNER, "four-eyes", &granted).succeeded().expect(json!({"output": "ran\n"}));
    exec_as(OWNER, "four-eyes", &granted).refused("approval_used", &[]);
    for ending in ["held", "shown", "approved"] {
        assert!(!kept(&registry, &token, ending).exists(), "{ending}");
    }
    // Who asked, who approved, what ran: in the log, in this order, and no token.
    let of_token = |record: &Value| record["approval"]["token_sha256"] == hash(&token);
    let told: Vec<_> = records()
        .into_iter()
        .filter(of_token)
        .map(|record| (record["event"].clone(), record["who"]["uid"].clone(), record["approval"]["approver"].clone()))
        .collect();
    let (requester, approver, none) = (json!(OWNER), json!(OWNER + 7), Value::Null);
    for step in [(json!("held"), &requester, &none), (json!("approved"), &approver, &approver), (json!("run"), &requester, &approver)] {
        assert!(told.contains(&(step.0.clone(), step.1.clone(), step.2.clone())), "{step:?}: {told:?}");
    }
    assert!(!fs::read_to_string(log().join("audit-00000001.jsonl")).unwrap().contains(&token));
    // No command is a way past them; the control is a policy without.
    let run = |policy: &str| behind_sudo(OWNER, &["run", "--policy", policy, "--", "true"]).output().unwrap();
    let refused = run("four-eyes");
    assert!(refused.status.code() == Some(2) && String::from_utf8_lossy(&refused.stderr).contains("requests of `exec`"), "{refused:?}");
    assert_eq!(run("review").status.code(), Some(0));
    // What no approver could read is not shown to one.
    let long = json!({"code": STARTS, "files": {"f": "x".repeat(300 << 10)}});
    exec_as(OWNER, "four-eyes", &long).refused("approval_too_large", &["send less"]);
    token_of(&exec_as(OWNER, "review", &long));
    // What is found beyond what is listed is counted.
    let many = json!({"code": format!("import os\n{}", "os.system('id')\n".repeat(150))});
    let token = token_of(&exec_as(OWNER, "four-eyes", &many));
    let omitted = serde_json::from_str::<Value>(&approve(OWNER + 7, &["--json", &token]).1).unwrap()["shown"]["findings_omitted"].clone();
    assert!(omitted.as_u64().unwrap() > 0, "{omitted}");
    let (_, said) = approve(OWNER + 7, &[&token]);
    assert!(said.contains(&format!("\n  and {omitted} more\n")), "{said}");
}

test!(RootOnly, what_others_approve_is_all_that_runs, seconds 90);
/// What lies in a host scratch, or below an interpreter of one's own, can be exchanged after
/// somebody has approved what they saw.
fn what_others_approve_is_all_that_runs() {
    own_registry();
    let place = scratch_named("place");
    let request = json!({"code": STARTS});
    let token = token_of(&exec_as(OWNER, "four-eyes", &request));
    assert_eq!(approve(OWNER + 7, &["--yes", &token]).0, Some(0));
    let granted = with_token(&request, &token);
    let ask = |policy: &str, options: &[&str], request: &Value| {
        ExecResult::of(run_with_stdin(
            &mut behind_sudo(OWNER, &[&["exec", "--policy", policy], options].concat()),
            request.to_string().as_bytes(),
        ))
    };
    let in_place = |request: &Value| {
        let mut request = request.clone();
        request["scratch"] = json!(text(&place));
        request
    };
    let socket = SocketServer::open("four-eyes.sock", || behind_sudo(0, &["serve-one"]));
    let ids = [format!("--reuid={OWNER}"), format!("--regid={OWNER}")];
    let peer = ["setpriv", &ids[0], &ids[1], "--clear-groups"];
    for request in [&request, &granted] {
        let by_files = [text(&place), "`files`", "`collect`", "without `approvers`"];
        ask("four-eyes", &[], &in_place(request)).refused("approval_not_self_contained", &by_files);
        ask("four-eyes", &["--scratch", text(&place)], request).refused("approval_not_self_contained", &by_files);
        socket.ask(&peer, &in_place(request)).refused("approval_not_self_contained", &by_files);
        ask("four-eyes", &["--runtime", "python=/usr/bin/python3"], request)
            .refused("approval_not_self_contained", &["/usr/bin/python3", "--runtime", "in the policy"]);
    }
    // The controls: what needs no approval runs there, and without approvers both wait.
    ask("four-eyes", &[], &in_place(&json!({"code": "print(1)"}))).succeeded();
    token_of(&ask("review", &[], &in_place(&request)));
    token_of(&ask("review", &["--runtime", "python=/usr/bin/python3"], &request));
    // None of this has used the token up.
    socket.ask(&peer, &granted).succeeded().expect(json!({"output": "ran\n"}));
}

test!(RootOnly, what_others_approve_in_a_session_finds_nothing_there, seconds 90);
fn what_others_approve_in_a_session_finds_nothing_there() {
    own_registry();
    let open = |policy: &str, more: &[&str]| Session::of(&mut behind_sudo(OWNER, &[&["session", "--policy", policy], more].concat()));
    let line = json!({"op": "run", "code": STARTS});
    let token_in = |answer: &Value| answer["approval"]["token"].as_str().unwrap_or_else(|| panic!("{answer}")).to_owned();
    let mut session = open("four-eyes", &[]);
    let mut lost = token_in(&session.ask(line.clone()));
    // A module in the place of one that the code imports.
    for path in ["subprocess.py", "/tmp/subprocess.py", "/home/sandbox/subprocess.py"] {
        assert_eq!(approve(OWNER + 7, &["--yes", &lost]).0, Some(0));
        session.write(path, json!("print('exchanged')"));
        for line in [line.clone(), with_token(&line, &lost)] {
            let refused = session.ask(line);
            assert_eq!((&refused["verdict"], &refused["reason"]), (&json!("bad_request"), &json!("approval_not_self_contained")));
            let error = refused["error"].as_str().unwrap();
            assert!(error.contains("`reset`") && error.contains("`files`"), "{path}: {error}");
        }
        assert_eq!(session.ask(json!({"op": "reset"}))["ok"], true);
        assert_eq!(session.ask(with_token(&line, &lost))["reason"], "approval_of_other_scratch", "{path}");
        lost = token_in(&session.ask(line.clone()));
    }
    // The controls: in an empty one it waits, and runs once it is approved.
    let (status, said) = approve(OWNER + 7, &["--yes", &lost]);
    assert!(status == Some(0) && said.contains("in a session that is empty before it, and keeps the files that it leaves"), "{said}");
    assert_eq!(session.ask(with_token(&line, &lost))["output"], "ran\n");
    // What code has left counts as what was written.
    assert_eq!(session.output("open('/tmp/left', 'w').close()"), "");
    assert_eq!(session.ask(line.clone())["reason"], "approval_not_self_contained");
    // So does what a directory itself says by its mode. Where they are is told by `args`, or the
    // home's would be held back itself.
    let places = ["/scratch", "/tmp", "/home/sandbox", "/dev/shm"];
    let did = |session: &mut Session, places: &[&str], deed: &str| {
        let code = format!("import os, sys\nfor place in sys.argv[1:]:\n    {deed}");
        let result = session.ask(json!({"op": "run", "code": code, "args": places}));
        assert_eq!(result["success"], true, "{result}");
        result["output"].as_str().unwrap().to_owned()
    };
    let deed = "os.chmod(place, 0o711)";
    for place in places {
        assert_eq!(session.ask(json!({"op": "reset"}))["ok"], true);
        // The control: code that has been in each of them, and left nothing.
        did(&mut session, &places, "open(place + '/a', 'w').close(); os.remove(place + '/a')");
        token_in(&session.ask(line.clone()));
        did(&mut session, &[place], deed);
        let refused = session.ask(line.clone());
        assert_eq!(refused["reason"], "approval_not_self_contained", "{place} {deed}");
        assert!(refused["error"].as_str().unwrap().contains("`reset`"), "{refused}");
    }
    // Times, which every run changes, are no message: what is approved finds others.
    assert_eq!(session.ask(json!({"op": "reset"}))["ok"], true);
    let old = "import os, subprocess, sys\nprint([place for place in sys.argv[1:] if os.stat(place).st_mtime == 7], end='')";
    let look = json!({"op": "run", "code": old, "args": places});
    let token = token_in(&session.ask(look.clone()));
    assert_eq!(approve(OWNER + 7, &["--yes", &token]).0, Some(0));
    assert_eq!(did(&mut session, &places, "os.utime(place, (7, 7)); print(os.stat(place).st_mtime, end=' ')"), "7.0 ".repeat(4));
    // The control: they stay for a run that is not approved. That of scratch its program changes.
    assert_eq!(did(&mut session, &places[1..], "print(os.stat(place).st_mtime, end=' ')"), "7.0 ".repeat(3));
    assert_eq!(session.ask(with_token(&look, &token))["output"], "[]");
    let place = scratch_named("place");
    assert_eq!(open("four-eyes", &["--scratch", text(&place)]).ask(line.clone())["reason"], "approval_not_self_contained");
    // A requester who approves knows what they have written.
    let mut own = open("review", &[]);
    own.write("subprocess.py", json!("print('exchanged')"));
    token_in(&own.ask(line.clone()));
    // Another approver may approve a program too.
    token_in(&open("four-eyes", &["--approved-by", "approvers"]).ask(line.clone()));
    assert_eq!(open("four-eyes", &["--approved-by", "nobody"]).ask(line)["reason"], "approval_not_here");
}

test!(Both, a_command_that_needs_approval_does_not_run, seconds 90);
/// Commands and shims cannot wait, so that the rule would mean nothing.
fn a_command_that_needs_approval_does_not_run() {
    own_registry();
    let place = scratch_named("place");
    write_file(&place.join("starts.py"), STARTS);
    let gives = |output: &Output, policy: &str, ran: bool| {
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!((output.status.code(), output.stdout == b"ran\n"), (Some(if ran { 0 } else { 126 }), ran), "{policy}: {said}");
        assert!(ran || ["`review`", "subprocess", "`stockade exec`"].iter().all(|part| said.contains(part)), "{said}");
    };
    for (policy, ran) in [("default", true), ("review", false)] {
        let run = |options: &[&str], command: &[&str]| {
            stockade([&["run", "--policy", policy, "--scratch", text(&place)], options, &["--"], command].concat()).output().unwrap()
        };
        gives(&run(&[], &["python3", "-c", STARTS]), policy, ran);
        gives(&run(&[], &["python3", "starts.py"]), policy, ran);
        let report = directory().join(format!("{policy}.json"));
        gives(&run(&["--report", text(&report)], &["python3", "starts.py"]), policy, ran);
        let report: Value = serde_json::from_slice(&fs::read(&report).unwrap()).unwrap();
        let shims = directory().join(format!("shims-{policy}"));
        assert!(stockade(["shim", "install", text(&shims), "--policy", policy]).output().unwrap().status.success());
        gives(&run_under(&[text(&shims.join("python3")), "starts.py"]).current_dir(&place).output().unwrap(), policy, ran);
        let last = records().pop().unwrap();
        if ran {
            assert_eq!((&report["verdict"], &last["event"]), (&json!("exited"), &json!("run")));
            continue;
        }
        let refused = json!({"verdict": "screened", "reason": "approval_not_here", "code": 126, "started": false, "approval": null});
        refused.as_object().unwrap().iter().for_each(|(key, value)| assert_eq!(&report[key], value, "{key}: {report}"));
        assert_eq!(report["findings"][0]["action"], "approve", "{report}");
        assert_eq!([&last["event"], &last["verdict"], &last["reason"]], ["refused", "screened", "approval_not_here"]);
    }
    // The control: what needs no approval.
    assert_eq!(stockade(["run", "--policy", "review", "--", "python3", "-c", "print(6 * 7)"]).output().unwrap().stdout, b"42\n");
}

test!(Both, no_program_gets_a_token_to_approve_itself, seconds 60);
/// A model reads what its tools answer: with a token it would be its own approver. A reply's
/// blocks have no approver.
fn no_program_gets_a_token_to_approve_itself() {
    let registry = own_registry();
    let line = json!({"op": "run", "code": STARTS});
    for who in ["approvers", "nobody"] {
        let answer = Session::open(&["--policy", "review", "--approved-by", who]).ask(line.clone());
        assert_eq!([&answer["verdict"], &answer["reason"]], ["screened", "approval_not_here"]);
        assert!(answer["approval"].is_null() && answer["error"].as_str().unwrap().contains("`stockade exec`"), "{answer}");
    }
    let reply = format!("```sh\necho first\n```\n```python\n{STARTS}\n```\n```sh\necho last\n```\n");
    let blocks = |policy: &str| ExecResult::of(run_with_stdin(&mut stockade(["exec", "--markdown", "--policy", policy]), reply.as_bytes()));
    let fates =
        |done: &ExecResult| done["blocks"].as_array().unwrap().iter().map(|block| json!([block["ran"], block["why"]])).collect::<Vec<_>>();
    let held = blocks("review");
    held.expect(json!({"verdict": "screened", "reason": "approval_not_here", "output": "first\n", "success": false}));
    assert_eq!(fates(&held), [json!([true, null]), json!([false, "screened"]), json!([false, "after_failure"])]);
    let kept = fs::read_dir(&registry).into_iter().flatten().flatten().map(|entry| entry.file_name().into_string().unwrap());
    assert_eq!(kept.filter(|name| name.starts_with("approval-")).collect::<Vec<_>>(), Vec::<String>::new());
    // The controls: a session that does not say so, and a policy that does not ask.
    assert!(Session::open(&["--policy", "review"]).ask(line)["approval"]["token"].is_string());
    let ran = blocks("default");
    assert_eq!(fates(ran.succeeded()), vec![json!([true, null]); 3]);
}

test!(RootlessOnly, an_ordinary_users_launcher_holds_nothing_back_for_others);
fn an_ordinary_users_launcher_holds_nothing_back_for_others() {
    let policies = PolicyDirectory::new();
    let policy = policies.write("four-eyes", &four_eyes());
    exec_with(&["--policy", &policy], json!({"code": STARTS})).broke("approvers_need_root", &["sudo"]);
    exec_with(&["--policy", &policy], json!({"code": "print(1)"})).succeeded();
    assert_eq!(stockade(["run", "--policy", &policy, "--", "true"]).output().unwrap().status.code(), Some(2));
    let output = stockade(["approve", "--yes", &"0".repeat(32)]).output().unwrap();
    assert!(output.status.code() == Some(2) && String::from_utf8_lossy(&output.stderr).contains("sudo stockade approve"));
}

test!(Both, what_cannot_be_kept_has_no_token, seconds 90);
fn what_cannot_be_kept_has_no_token() {
    let registry = own_registry();
    let request = json!({"code": STARTS});
    for _ in 0..16 {
        token_of(&review(&request));
    }
    review(&request).refused("too_many_approvals", &["16"]);
    // Only what waits for them: the rest runs.
    review(&json!({"code": "print(1)"})).succeeded();
    for entry in fs::read_dir(&registry).unwrap().flatten() {
        fs::remove_file(entry.path()).unwrap();
    }
    // A link in a token's place is not followed.
    let token = token_of(&review(&request));
    let (held, aside) = (kept(&registry, &token, "held"), directory().join("aside"));
    fs::copy(&held, &aside).unwrap();
    fs::remove_file(&held).unwrap();
    symlink(&aside, &held).unwrap();
    review(&with_token(&request, &token)).broke("approval_not_kept", &["approval-"]);
    fs::remove_file(&held).unwrap();
    fs::copy(&aside, &held).unwrap();
    // Nor is a registry believed that is a link, or that others may write to.
    let elsewhere = registry.with_file_name("elsewhere");
    fs::rename(&registry, &elsewhere).unwrap();
    symlink(&elsewhere, &registry).unwrap();
    review(&with_token(&request, &token)).broke("registry_failed", &["must be a directory"]);
    fs::remove_file(&registry).unwrap();
    fs::rename(&elsewhere, &registry).unwrap();
    fs::set_permissions(&registry, fs::Permissions::from_mode(0o777)).unwrap();
    review(&with_token(&request, &token)).broke("registry_failed", &["nobody else may write to"]);
    fs::set_permissions(&registry, fs::Permissions::from_mode(0o700)).unwrap();
    review(&with_token(&request, &token)).succeeded();
    if !is_root() {
        return;
    }
    // A full disk: neither a token nor half a file.
    mount(Some("none"), &registry, Some("tmpfs"), MsFlags::empty(), Some("size=8k,mode=700")).unwrap();
    fs::write(registry.join("filler"), [0; 8192]).unwrap();
    review(&request).broke("approval_not_kept", &["No space left"]);
    let left: Vec<_> = fs::read_dir(&registry).unwrap().flatten().map(|entry| entry.file_name()).collect();
    assert_eq!(left, ["filler"]);
    fs::remove_file(registry.join("filler")).unwrap();
    token_of(&review(&request));
}

test!(Both, used_tokens_do_not_pile_up, seconds 60);
fn used_tokens_do_not_pile_up() {
    let registry = own_registry();
    let request = json!({"code": STARTS});
    let token = token_of(&review(&request));
    review(&with_token(&request, &token)).succeeded();
    let mut used: Value = serde_json::from_str(&fs::read_to_string(kept(&registry, &token, "used")).unwrap()).unwrap();
    let mut fill = |uid: u32, prefix: &str| {
        used["requester"] = json!(uid);
        (0..100).for_each(|number| fs::write(registry.join(format!("approval-{prefix}{number:063}.used")), used.to_string()).unwrap());
    };
    let own = nix::unistd::getuid().as_raw();
    fill(own, "a");
    fill(own + 1, "b");
    token_of(&review(&request));
    let left = |requester: u32| {
        let files = fs::read_dir(&registry)
            .unwrap()
            .flatten()
            .map(|entry| entry.path())
            .filter(|path| path.extension().is_some_and(|ending| ending == "used"));
        files.filter(|path| serde_json::from_slice::<Value>(&fs::read(path).unwrap()).unwrap()["requester"] == requester).count()
    };
    // The control: another's are theirs to forget, or for time.
    assert_eq!((left(own), left(own + 1)), (64, 100));
}

test!(Both, review_holds_back_processes_network_and_files_outside, seconds 90);
fn review_holds_back_processes_network_and_files_outside() {
    own_registry();
    for (language, code) in [
        ("python", "import os; os.system('id')"),
        ("python", "import multiprocessing as m; m.Pool(2)"),
        ("python", "import socket; socket.create_connection(('192.0.2.1', 80))"),
        ("python", "import urllib.request as r; r.urlopen('http://example.org')"),
        ("python", "open('/etc/passwd', 'a').write('x')"),
        ("python", "import ctypes"),
        ("bash", "curl http://example.org"),
        ("node", "console.log(1)"),
    ] {
        token_of(&review(&json!({"language": language, "code": code})));
    }
    for (code, said) in [
        ("print(sum(range(10)))", "45\n"),
        ("open('notes', 'w').write('x'); print(open('notes').read())", "x\n"),
        ("import json, math; print(json.dumps(math.gcd(4, 6)))", "2\n"),
    ] {
        review(&json!({"code": code})).succeeded().expect(json!({"output": said}));
    }
    // `default` runs what `review` holds back.
    exec(json!({"code": STARTS})).succeeded();
    review(&json!({"code": "import shutil; shutil.rmtree('/')"})).expect(json!({"verdict": "screened"}));
}
