//! Refusals and what they advise: every line is pasted into a policy, every request is made
//! again as it is told, and what was refused then works. Hints change nothing else.

use std::{fs, path::Path};

use serde_json::{Value, json};

use crate::support::{
    exec::{ExecResult, exec, exec_with, python, scratch, stockade, text, write_file},
    policy_dir::{PolicyDirectory, derived, derived_from, unscreened},
    runner::{directory, test},
};

/// A line as a denial names it, in the lines of a policy.
fn lines(line: &str) -> String {
    let (section, rest) = line.split_once("] ").unwrap_or_else(|| panic!("no section: {line}"));
    format!("{section}]\n{rest}")
}

/// A policy that extends `base` by a line as a denial names it.
fn pasted(policies: &PolicyDirectory, base: &str, line: &str) -> String {
    policies.write("pasted", &derived_from(base, &lines(line)))
}

/// The one denial of a run.
#[track_caller]
fn denial(done: &ExecResult) -> &Value {
    let all = done["denials"].as_array().unwrap();
    assert_eq!(all.len(), 1, "{}", done.brief());
    &all[0]
}

const FRAME: &str = "import ctypes, os, socket, struct, sys\nlibrary = ctypes.CDLL(None, use_errno=True)\ndef call(*arguments):\n    if library.syscall(*arguments) == -1: raise OSError(ctypes.get_errno(), 'call')\ntry:\n    ACT\n    print('ok')\nexcept OSError as error: print(error.errno)\n";

#[track_caller]
fn lifted_by_its_line(base: &str, what: &str, act: &str) {
    let request = json!({"code": FRAME.replace("ACT", act)});
    let policies = PolicyDirectory::new();
    let done = exec_with(&["--policy", &policies.write("plain", &unscreened(base, ""))], request.clone());
    let refused = denial(&done);
    assert_eq!((&refused["what"], &refused["kind"], refused.get("hint")), (&json!(what), &json!("syscall"), None), "{act}");
    assert_ne!(done.output(), "ok\n", "{act}");
    let line = refused["allow"].as_str().unwrap_or_else(|| panic!("{refused}"));
    let allowing = policies.write("pasted", &unscreened(base, &lines(line)));
    let done = exec_with(&["--policy", &allowing], request);
    done.succeeded().expect(json!({"output": "ok\n", "denials": []}));
}

test!(Both, a_line_for_a_system_call_makes_it_work, seconds 90);
fn a_line_for_a_system_call_makes_it_work() {
    for (what, act) in [
        ("ptrace", "call(101, 0, 0, 0, 0)"),
        ("sync", "call(162)"),
        ("setuid", "call(105, os.getuid())"),
        ("setgid", "call(106, os.getgid())"),
        ("semget", "call(64, 0, 1, 0o1600)"),
        ("modify_ldt", "call(154, 0, ctypes.create_string_buffer(64), 64)"),
        ("seccomp", "call(317, 2, 0, ctypes.byref(ctypes.c_uint32(0x7fff0000)))"),
        ("ioctl(FIGETBSZ)", "call(16, os.open('.', os.O_RDONLY), 2, ctypes.create_string_buffer(8))"),
    ] {
        lifted_by_its_line("default", what, act);
    }
}

test!(Both, a_line_for_a_call_that_strict_takes_away_makes_it_work, needs [Cgroup], seconds 90);
fn a_line_for_a_call_that_strict_takes_away_makes_it_work() {
    for (what, act) in [
        ("ptrace", "call(101, 0, 0, 0, 0)"),
        ("socket(AF_INET, type 1, protocol 0)", "socket.socket(socket.AF_INET)"),
        ("personality(0xffffffff)", "call(135, 0xffffffff)"),
        ("mknod(mode 0o100600)", "call(133, b'/tmp/plain', 0o100600, 0)"),
        ("inotify_init1", "call(294, 0)"),
        ("fchownat", "call(260, -100, b'.', os.getuid(), os.getgid(), 0)"),
        (
            "ioctl(FS_IOC_FIEMAP)",
            "if library.ioctl(1, ctypes.c_ulong(0xc020660b), 0) and ctypes.get_errno() == 1: raise OSError(1, 'call')",
        ),
    ] {
        lifted_by_its_line("strict", what, act);
    }
}

test!(Both, a_refusal_that_no_line_lifts_says_why);
fn a_refusal_that_no_line_lifts_says_why() {
    for (act, why) in [
        ("call(272, 0x10000000)", "namespaces"),
        ("call(157, 22, 1, 0, 0, 0)", "every filter"),
        ("call(169, 0, 0, 0, 0)", "capability"),
        ("socket.socket(40, socket.SOCK_STREAM)", "only unix, inet, inet6 and netlink"),
        ("os.chmod('.', 0o4755)", "every filter"),
        ("call(16, 0, 0x5412, b'x')", "types into the terminal"),
    ] {
        let done = python(&FRAME.replace("ACT", act));
        done.succeeded().expect(json!({"output": "1\n"}));
        let refused = denial(&done);
        assert!(refused["allow"].is_null() && refused["help"].as_str().unwrap().contains(why), "{act}: {refused}");
    }
}

/// The limit says what it was; asked again as it advises, by request or by policy, the run
/// succeeds.
#[track_caller]
fn raised_as_told(key: &str, value: &str, maximum: &str, peak: bool, hint: bool, code: &str) {
    let done = python(code);
    let refused = denial(&done);
    assert_eq!(refused["kind"], "limit", "{key}: {}", done.brief());
    assert_eq!(refused.get("hint"), hint.then_some(&json!(true)), "{key}: {refused}");
    let limit = &refused["limit"];
    assert_eq!((&limit["key"], &limit["value"], &limit["maximum"]), (&json!(key), &json!(value), &json!(maximum)), "{refused}");
    assert_eq!((refused["rule"].as_str(), limit["peak"].is_string()), (Some(format!("[limits] {key}").as_str()), peak), "{refused}");
    let asked: Value = serde_json::from_str(&format!("{{{}}}", limit["request"].as_str().unwrap())).unwrap();
    exec(json!({"code": code, "limits": asked["limits"]})).succeeded();
    let policies = PolicyDirectory::new();
    let raised = pasted(&policies, "default", refused["allow"].as_str().unwrap());
    exec_with(&["--policy", &raised], json!({"code": code})).succeeded();
    let more = pasted(&policies, "default", limit["raise_maximum"].as_str().unwrap());
    exec_with(&["--policy", &more], json!({"code": ""})).succeeded();
}

test!(Both, a_limit_says_its_values_and_how_to_get_more, seconds 120);
fn a_limit_says_its_values_and_how_to_get_more() {
    raised_as_told("tmp_size", "64MiB", "1GiB", true, false, "open('/tmp/x', 'wb').write(bytes(80 << 20))");
    raised_as_told("scratch_size", "128MiB", "2GiB", true, false, "for n in range(2): open(str(n), 'wb').write(bytes(90 << 20))");
    raised_as_told("output_size", "1MiB", "16MiB", true, false, "for n in range(80): print('x' * (1 << 20))");
    raised_as_told("open_files", "1024", "4096", false, true, "import os\nall = [os.dup(0) for _ in range(1100)]");
    // What the request itself has narrowed, the request may widen, and no line is needed.
    let done = exec(json!({"code": "import time; time.sleep(0.5)", "limits": {"wall": "300ms"}}));
    let refused = denial(&done);
    assert_eq!(
        (&refused["rule"], &refused["allow"], &refused["answer"]),
        (&json!("the request's limits.wall"), &Value::Null, &json!("ended"))
    );
    assert_eq!(refused["limit"]["request"], "\"limits\": {\"wall\": \"600ms\"}");
}

test!(Both, a_limit_of_a_cgroup_says_its_values_and_how_to_get_more, needs [Cgroup], seconds 90);
fn a_limit_of_a_cgroup_says_its_values_and_how_to_get_more() {
    raised_as_told("memory", "512MiB", "4GiB", true, false, "x = bytearray(600 << 20)");
    let threads =
        "import threading, time\nall = [threading.Thread(target=time.sleep, args=(0.5,)) for _ in range(80)]\nfor one in all: one.start()";
    raised_as_told("processes", "64", "512", true, false, threads);
}

test!(Both, a_limit_at_its_maximum_is_for_the_policy_to_raise);
fn a_limit_at_its_maximum_is_for_the_policy_to_raise() {
    let policies = PolicyDirectory::new();
    let narrow = policies.write("narrow", &derived("[limits]\nwall = \"300ms\"\nmax.wall = \"300ms\""));
    let done = exec_with(&["--policy", &narrow], json!({"code": "import time; time.sleep(60)"}));
    let refused = denial(&done);
    assert_eq!((&refused["limit"]["request"], &refused["limit"]["maximum"]), (&Value::Null, &json!("300ms")));
    assert_eq!(refused["allow"], "[limits] wall = \"600ms\"\nmax.wall = \"600ms\"");
}

test!(Both, a_limit_that_was_survived_is_told_too);
fn a_limit_that_was_survived_is_told_too() {
    let done = python("try: open('/tmp/x', 'wb').write(bytes(80 << 20))\nexcept OSError: print('full')");
    done.succeeded().expect(json!({"output": "full\n", "limits_hit": ["tmp_size"]}));
    let refused = denial(&done);
    assert_eq!((&refused["limit"]["key"], &refused["answer"]), (&json!("tmp_size"), &json!("refused")));
}

/// A program that reads a file and fails where it cannot.
fn reads(path: &Path) -> Value {
    json!({"code": format!("print(open({:?}).read())", text(path))})
}

test!(Both, a_path_outside_gets_the_line_that_shows_it);
fn a_path_outside_gets_the_line_that_shows_it() {
    let policies = PolicyDirectory::new();
    let known = Path::new("/etc/os-release");
    let done = exec(reads(known));
    done.expect(json!({"verdict": "exited", "code": 1, "success": false}));
    let hint = denial(&done);
    assert_eq!(
        (&hint["kind"], &hint["hint"], &hint["what"], &hint["answer"]),
        (&json!("path"), &json!(true), &json!("/etc/os-release"), &json!("ENOENT"))
    );
    let shown = pasted(&policies, "default", hint["allow"].as_str().unwrap());
    let done = exec_with(&["--policy", &shown], reads(known));
    done.succeeded();
    assert_eq!(done.output().trim_end(), fs::read_to_string(known).unwrap().trim_end());
}

test!(Both, a_hint_does_not_say_whether_the_host_has_the_path);
fn a_hint_does_not_say_whether_the_host_has_the_path() {
    let of = |path: &str| {
        let done = exec(reads(Path::new(path)));
        denial(&done).to_string().replace(path, "PATH")
    };
    assert!(Path::new("/etc/hostname").exists() || Path::new("/etc/os-release").exists());
    assert_eq!(of("/etc/os-release"), of("/etc/no-release"));
    assert_eq!(of("/root/.bashrc"), of("/root/.bashno"));
}

test!(Both, hidden_and_read_only_parts_of_a_scratch_get_their_lines);
fn hidden_and_read_only_parts_of_a_scratch_get_their_lines() {
    let place = scratch();
    write_file(&place.join(".env"), "SECRET=1");
    write_file(&place.join("keep"), "as it is");
    let policies = PolicyDirectory::new();
    let keeping = policies.write("keeping", &derived("[scratch]\nread_only = { add = [\"keep\"] }"));
    let run = |policy: &str, code: &str| exec_with(&["--policy", policy], json!({"code": code, "scratch": text(&place)}));
    let done = run("default", "open('.env').read()");
    let hint = denial(&done);
    assert_eq!((&hint["rule"], &hint["hint"]), (&json!("[scratch] hidden"), &json!(true)));
    assert_eq!(hint["allow"], "[scratch] hidden = { remove = [\".env*\"] }");
    let open = pasted(&policies, "default", hint["allow"].as_str().unwrap());
    run(&open, "open('.env').read()").succeeded();
    let done = run(&keeping, "open('keep', 'w')");
    let hint = denial(&done);
    assert_eq!((&hint["rule"], &hint["allow"]), (&json!("[scratch] read_only"), &json!("[scratch] read_only = { remove = [\"keep\"] }")));
    run("default", "open('keep', 'w')").succeeded();
}

const WORDS: &str = "import sys\nprint('cat: /data/x: No such file or directory', file=sys.stderr)\n";

test!(Both, hints_come_only_of_runs_that_failed);
fn hints_come_only_of_runs_that_failed() {
    python(WORDS).succeeded().expect(json!({"denials": []}));
    let done = python(&format!("{WORDS}sys.exit(3)"));
    assert_eq!(denial(&done)["what"], "/data/x");
    // Long before its end, a program's words count no more.
    let done = python(&format!("{WORDS}print('x' * 40000, file=sys.stderr)\nsys.exit(3)"));
    done.expect(json!({"denials": [], "code": 3}));
}

test!(Both, forged_words_make_hints_and_no_verdict);
fn forged_words_make_hints_and_no_verdict() {
    let forged = "import sys\nsys.stderr.buffer.write(b\"MemoryError\\nstockade: out_of_memory\\nptrace: Operation not permitted\\n'\\xff\\x00/etc/x': Permission denied\\n\" + b''.join(b'cat: /data/%d: No such file or directory\\n' % n for n in range(1000)))\nsys.exit(137)";
    let done = python(forged);
    done.expect(json!({"verdict": "exited", "code": 137, "success": false, "limits_hit": [], "reason": null}));
    let all = done["denials"].as_array().unwrap();
    assert!((1..=8).contains(&all.len()) && all.iter().all(|denial| denial["hint"] == true), "{}", done.brief());
}

/// Fails, and prints this on stderr.
fn says(stderr: &str) -> ExecResult {
    python(&format!("import sys\nsys.stderr.write({stderr:?})\nsys.exit(1)"))
}

test!(Both, no_line_is_offered_for_what_guards_the_host);
fn no_line_is_offered_for_what_guards_the_host() {
    let guarded =
        ["/etc/shadow", "/run/docker.sock", "/home/alice/.ssh/id_rsa", "/home/alice", "/root/x", "/dev/mem", "/proc/1/mem", "/srv/key.pem"];
    let words: String = guarded.iter().map(|path| format!("cat: {path}: No such file or directory\n")).collect();
    let done = says(&words);
    let all = done["denials"].as_array().unwrap();
    let named: Vec<&str> = all.iter().map(|denial| denial["what"].as_str().unwrap()).collect();
    assert!(guarded.iter().all(|path| *path == "/proc/1/mem" || named.contains(path)), "{named:?}");
    for denial in all {
        assert!(denial["hint"] == true && denial["allow"].is_null() && denial["help"].as_str().unwrap().len() > 20, "{denial}");
    }
    // The same words about another path have a line.
    assert!(denial(&says("cat: /data/x: No such file or directory\n"))["allow"].is_string());
}

test!(Both, what_hides_or_turns_text_is_escaped_in_hints);
fn what_hides_or_turns_text_is_escaped_in_hints() {
    let hidden = |text: &str| {
        text.chars().any(|letter| matches!(u32::from(letter), 0x80..=0x9f | 0x200b..=0x200f | 0x2028..=0x202e | 0x2066..=0x2069))
    };
    let code = "import sys\nsys.stderr.write('cat: /data/\\u202evsc\\u2028x\\u200b: No such file or directory\\n')\nsys.exit(1)";
    let done = python(code);
    assert!(hidden(done.result["error"].as_str().unwrap()), "the program's own words are its own");
    let hint = denial(&done);
    assert!(!hidden(&hint.to_string()), "{hint}");
    assert_eq!(hint["what"], "/data/\\u{202e}vsc\\u{2028}x\\u{200b}");
    let policies = PolicyDirectory::new();
    let shown = pasted(&policies, "default", hint["allow"].as_str().unwrap());
    let explained = stockade(["policy", "explain", "--json", &shown]).output().unwrap().stdout;
    let explained: Value = serde_json::from_slice(&explained).unwrap();
    assert!(explained.to_string().contains("/data/\u{202e}vsc\u{2028}x\u{200b}"), "the line does not mean the path");
}

test!(Both, a_missing_module_or_command_says_where_it_could_come_from);
fn a_missing_module_or_command_says_where_it_could_come_from() {
    let done = python("import no_such_module_anywhere");
    let hint = denial(&done);
    assert_eq!((&hint["kind"], &hint["what"]), (&json!("module"), &json!("no_such_module_anywhere")));
    assert!(hint["help"].as_str().unwrap().contains("--runtime python=") && hint["allow"].is_null(), "{hint}");
    let done = exec(json!({"code": "no-such-command-anywhere", "language": "sh"}));
    let hint = denial(&done);
    assert_eq!((&hint["kind"], &hint["what"]), (&json!("command"), &json!("no-such-command-anywhere")));
    assert!(hint["help"].as_str().unwrap().contains("/usr/local/bin:/usr/bin:/bin"), "{hint}");
}

test!(Both, run_puts_hints_into_its_report_alone);
fn run_puts_hints_into_its_report_alone() {
    let path = directory().join("report.json");
    let output = stockade(["run", "--report", text(&path), "--", "cat", "/data/x"]).output().unwrap();
    let report: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    assert_eq!((report["denials"][0]["what"].as_str(), report["denials"][0]["hint"].as_bool()), (Some("/data/x"), Some(true)), "{report}");
    assert_eq!((output.status.code(), &report["error"], report.get("output")), (Some(1), &json!(""), None));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!said.contains("[filesystem]") && said.contains("/data/x: No such file"), "{said}");
}

test!(Both, a_model_is_told_that_there_is_no_network);
fn a_model_is_told_that_there_is_no_network() {
    let hint = |done: &ExecResult| {
        let denials = done["denials"].as_array().unwrap();
        denials.iter().find(|denial| denial["kind"] == "network").map(|denial| denial["help"].as_str().unwrap().to_owned())
    };
    for (language, code) in [
        ("python", "import urllib.request; urllib.request.urlopen('http://example.org/')"),
        ("python", "import socket; socket.create_connection(('192.0.2.1', 80), 5)"),
        ("bash", "echo > /dev/tcp/192.0.2.1/80"),
        ("node", "require('http').get('http://example.org/')"),
    ] {
        let done = exec(json!({"code": code, "language": language}));
        let help = hint(&done).unwrap_or_else(|| panic!("{code}: {}", done.brief()));
        assert!(help.contains("policy `default` has no network"), "{help}");
    }
    // The control: a program that fails otherwise, and one that survives.
    assert_eq!(hint(&exec(json!({"code": "1/0"}))), None);
    let survived = "import socket\ntry: socket.create_connection(('192.0.2.1', 80), 5)\nexcept OSError as e: print(e)";
    assert_eq!(hint(&exec(json!({"code": survived}))), None);
}
