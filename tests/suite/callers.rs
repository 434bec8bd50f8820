//! What becomes of a run when the process that started it ends, when it is told to end, and
//! what of its caller's settings neither it nor its limits get.

use std::{
    fs,
    path::Path,
    process::{Child, Command},
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use crate::support::{
    exec::{ExecResult, program_path, run_under, run_with_stdin, scratch, stockade, text},
    leftovers::{host_process_with, no_process_is_left},
    runner::{directory, eventually, test},
    timeouts::{scaled, scaled_limit},
};

/// A shell that starts the program by this line and waits for it; the code inside sleeps for
/// `mark` seconds, and has begun when this returns.
fn started_by_a_shell(line: &str, scratch: &Path) -> Child {
    let line = line.replace("STOCKADE", text(&program_path().unwrap())).replace("SCRATCH", text(scratch));
    let child = run_under(&["sh", "-c", &format!("{line}; exit 3")]).spawn().unwrap();
    assert!(eventually(Duration::from_secs(20), || scratch.join("ready").exists()), "it did not begin");
    child
}

test!(Both, a_run_ends_with_the_process_that_started_it, seconds 120);
fn a_run_ends_with_the_process_that_started_it() {
    let mark = format!("600.{}7", std::process::id());
    let request = |scratch: &Path| json!({"language": "sh", "code": format!("touch ready; sleep {mark}"), "scratch": text(scratch)});
    let place = scratch();
    let begin = || {
        let _from_before = fs::remove_file(place.join("ready"));
    };
    let file = directory().join("request");
    fs::write(&file, request(&place).to_string()).unwrap();
    let command = format!("STOCKADE run --policy shell --scratch SCRATCH -- sh -c 'touch ready; sleep {mark}'");
    let captured = format!("STOCKADE exec --policy shell < {}", text(&file));
    for line in [&command, &captured] {
        begin();
        let mut shell = started_by_a_shell(line, &place);
        shell.kill().unwrap();
        shell.wait().unwrap();
        no_process_is_left(&mark);
    }
    // The controls: told to outlive it, and with hang-ups ignored.
    for line in [command.replace(" --policy", " --outlive-caller --policy"), format!("nohup {command}")] {
        begin();
        let mut shell = started_by_a_shell(&line, &place);
        shell.kill().unwrap();
        shell.wait().unwrap();
        std::thread::sleep(Duration::from_secs(1));
        assert!(host_process_with(&mark), "{line}");
        Command::new("pkill").args(["-KILL", "-f", &format!("^{} run .*{mark}", text(&program_path().unwrap()))]).status().unwrap();
        no_process_is_left(&mark);
    }
}

test!(Both, a_command_that_ignores_signals_is_ended_and_reported, seconds 60);
fn a_command_that_ignores_signals_is_ended_and_reported() {
    let code = "trap '' TERM HUP INT QUIT; touch ready; while :; do sleep 0.1; done";
    for (signal, status) in [(Signal::SIGTERM, 143), (Signal::SIGHUP, 129)] {
        let (place, report) = (scratch(), directory().join(signal.as_str()));
        let words = ["run", "--policy", "shell", "--scratch", text(&place), "--report", text(&report), "--", "bash", "-c", code];
        let mut child = stockade(words).spawn().unwrap();
        assert!(eventually(Duration::from_secs(20), || place.join("ready").exists()));
        let told = Instant::now();
        kill(Pid::from_raw(child.id().cast_signed()), signal).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(status));
        let took = told.elapsed();
        assert!((Duration::from_secs(1)..scaled(Duration::from_secs(6))).contains(&took), "{took:?}");
        let report: Value = serde_json::from_slice(&fs::read(&report).unwrap()).unwrap();
        assert_eq!((&report["verdict"], &report["code"]), (&json!("cancelled"), &json!(status)));
        fs::remove_dir_all(&place).unwrap();
    }
}

test!(Both, a_callers_timer_slack_holds_up_no_limit);
/// prctl(2), PR_SET_TIMERSLACK: it survives fork and exec, and sudo passes it on.
fn a_callers_timer_slack_holds_up_no_limit() {
    let program = program_path().unwrap();
    let set =
        "import ctypes, os, sys\nctypes.CDLL(None).prctl(29, ctypes.c_ulong(3600 * 10**9), 0, 0, 0)\nos.execv(sys.argv[1], sys.argv[1:])";
    let ask = |code: &str| {
        let request = json!({"code": code, "limits": {"wall": scaled_limit(1500)}});
        let words = ["python3", "-c", set, text(&program), "exec"];
        ExecResult::of(run_with_stdin(&mut run_under(&words), request.to_string().as_bytes()))
    };
    let done = ask("while True: pass");
    done.expect(json!({"verdict": "wall_timeout"}));
    assert!(Duration::from_millis(done["duration_ms"].as_u64().unwrap()) < scaled(Duration::from_secs(10)), "{}", done.brief());
    ask("print(open('/proc/self/timerslack_ns').read())").expect(json!({"output": "50000\n\n"}));
    // The control: it was set.
    let shown = run_under(&["python3", "-c", set, "/usr/bin/cat", "/proc/self/timerslack_ns"]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&shown.stdout), "3600000000000\n");
}

test!(Both, a_callers_personality_is_not_the_codes);
fn a_callers_personality_is_not_the_codes() {
    let program = program_path().unwrap();
    let request = json!({"language": "sh", "code": "cat /proc/self/personality"}).to_string();
    let words = ["setarch", "-R", text(&program), "exec"];
    let done = ExecResult::of(run_with_stdin(&mut run_under(&words), request.as_bytes()));
    done.succeeded().expect(json!({"output": "00000000\n"}));
    // The control: it was set.
    let shown = run_under(&["setarch", "-R", "cat", "/proc/self/personality"]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&shown.stdout), "00040000\n");
}
