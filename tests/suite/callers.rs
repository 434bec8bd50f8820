//! What becomes of a run when the process that started it ends, when it is told to end, and
//! what of its caller's settings neither it nor its limits get.

use std::{
    fs,
    io::{BufRead, BufReader, PipeReader, Read, Write},
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use crate::support::{
    exec::{ExecResult, OWNER, program_path, run_under, run_with_stdin, scratch, start, stockade, text, token},
    leftovers::{host_process_with, no_process_is_left},
    policy_dir::command_under_etc,
    runner::{directory, eventually, test, wait_within},
    timeouts::{scaled, scaled_limit},
};

/// A line of a shell with the program and the scratch in it.
fn filled_in(line: &str, scratch: &Path) -> String {
    line.replace("STOCKADE", text(&program_path().unwrap())).replace("SCRATCH", text(scratch))
}

/// A shell that starts the program by this line and waits for it; the code inside sleeps for
/// `mark` seconds, and has begun when this returns.
fn started_by_a_shell(line: &str, scratch: &Path) -> Child {
    begun(&mut run_under(&["sh", "-c", &format!("{}; exit 3", filled_in(line, scratch))]), scratch)
}

/// Starts what starts the program, and waits until the code inside has begun.
fn begun(command: &mut Command, scratch: &Path) -> Child {
    let _from_before = fs::remove_file(scratch.join("ready"));
    let child = command.spawn().unwrap();
    assert!(eventually(Duration::from_secs(20), || scratch.join("ready").exists()), "it did not begin");
    child
}

/// The run goes on though who started it has ended; then it is ended.
#[track_caller]
fn outlives_its_caller(mark: &str, what: &str) {
    thread::sleep(Duration::from_secs(1));
    assert!(host_process_with(mark), "{what}");
    end_launchers(mark);
}

/// Ends every launcher of a run whose command sleeps for `mark` seconds.
#[track_caller]
fn end_launchers(mark: &str) {
    let launcher = format!("^{} run .*{mark}", text(&program_path().unwrap()));
    Command::new("pkill").args(["-KILL", "-f", &launcher]).status().unwrap();
    no_process_is_left(mark);
}

test!(Both, a_run_ends_with_the_process_that_started_it, seconds 120);
fn a_run_ends_with_the_process_that_started_it() {
    let mark = format!("600.{}7", std::process::id());
    let request = |scratch: &Path| json!({"language": "sh", "code": format!("touch ready; sleep {mark}"), "scratch": text(scratch)});
    let place = scratch();
    let file = directory().join("request");
    fs::write(&file, request(&place).to_string()).unwrap();
    let command = format!("STOCKADE run --policy shell --scratch SCRATCH -- sh -c 'touch ready; sleep {mark}'");
    let captured = format!("STOCKADE exec --policy shell < {}", text(&file));
    for line in [&command, &captured] {
        let mut shell = started_by_a_shell(line, &place);
        shell.kill().unwrap();
        shell.wait().unwrap();
        no_process_is_left(&mark);
    }
    // The controls: told to outlive it, and with hang-ups ignored.
    for line in [command.replace(" --policy", " --outlive-caller --policy"), format!("nohup {command}")] {
        let mut shell = started_by_a_shell(&line, &place);
        shell.kill().unwrap();
        shell.wait().unwrap();
        outlives_its_caller(&mark, &line);
    }
}

/// A shell that gives the program what `input` holds; its stdout is a pipe that is full by now.
fn answering(words: &str, input: &Path) -> (Child, PipeReader) {
    let (answers, stdout) = std::io::pipe().unwrap();
    let line = filled_in(&format!("STOCKADE {words} < {}; exit 3", text(input)), input);
    let shell = run_under(&["sh", "-c", &line]).stdout(stdout).spawn().unwrap();
    assert!(eventually(Duration::from_secs(20), || rustix::io::ioctl_fionread(&answers).unwrap() > 0), "no answer: {words}");
    (shell, answers)
}

test!(Both, no_launcher_waits_for_the_reader_of_its_answer_when_its_caller_has_ended, seconds 120);
fn no_launcher_waits_for_the_reader_of_its_answer_when_its_caller_has_ended() {
    let place = scratch();
    let input = directory().join("input");
    fs::write(&input, format!("{}\n", json!({"op": "run", "code": "print('x' * 900000)"}))).unwrap();
    let request = directory().join("request-of-much");
    fs::write(&request, json!({"code": "print('x' * 900000)"}).to_string()).unwrap();
    for (words, input) in [("exec -q", &request), ("session --quiet", &input)] {
        let words = format!("{words} --scratch {}", text(&place));
        // Another process, this one, holds the other end and does not read.
        let (mut shell, answers) = answering(&words, input);
        shell.kill().unwrap();
        shell.wait().unwrap();
        no_process_is_left(text(&place));
        drop(answers);
        // The controls: a caller that lives waits for its slow reader, and so does one without a caller.
        let outlives = format!("{words} --outlive-caller");
        for (words, ends) in [(&words, false), (&outlives, true)] {
            let (mut shell, mut answers) = answering(words, input);
            if ends {
                shell.kill().unwrap();
            }
            thread::sleep(scaled(Duration::from_secs(3)));
            assert!(host_process_with(text(&place)), "{words}");
            let mut all = String::new();
            answers.read_to_string(&mut all).unwrap();
            let result: Value = serde_json::from_str(all.lines().next_back().unwrap()).unwrap();
            assert_eq!(result["output"].as_str().map(str::len), Some(900_001), "{words}");
            shell.wait().unwrap();
        }
    }
}

test!(Both, a_signal_ends_the_waiting_for_the_reader_of_an_answer, seconds 120);
fn a_signal_ends_the_waiting_for_the_reader_of_an_answer() {
    let place = scratch();
    let begun = place.join("ready");
    for (last, waits) in [("open('ready', 'w'); time.sleep(600)", true), ("", false)] {
        for signal in [Signal::SIGTERM, Signal::SIGHUP, Signal::SIGINT] {
            let code = format!("import time\nprint('x' * 900000, flush=True)\n{last}");
            let (mut answers, stdout) = std::io::pipe().unwrap();
            let mut command = stockade(["exec", "-q", "--scratch", text(&place)]);
            let mut child = start(command.stdout(stdout), json!({"code": code}).to_string().as_bytes());
            drop(command);
            let is_ready = || if waits { begun.exists() } else { rustix::io::ioctl_fionread(&answers).unwrap() > 0 };
            assert!(eventually(Duration::from_secs(20), is_ready), "{signal} {waits}");
            kill(Pid::from_raw(child.id().cast_signed()), signal).unwrap();
            let status = wait_within(&mut child, Duration::from_secs(10)).unwrap_or_else(|| panic!("{signal} {waits}: it waits"));
            assert_eq!(status.code(), Some(74), "{signal} {waits}");
            let mut part = Vec::new();
            answers.read_to_end(&mut part).unwrap();
            assert!(!part.is_empty() && part.len() < 900_000, "{}", part.len());
            let _none_yet = fs::remove_file(&begun);
        }
    }
    // The control: with a reader the cancelled run's answer is whole.
    let mut child = start(
        stockade(["exec", "-q", "--scratch", text(&place)]).stdout(Stdio::piped()),
        json!({"code": "import time\nprint('x' * 900000, flush=True)\nopen('ready', 'w'); time.sleep(600)"}).to_string().as_bytes(),
    );
    assert!(eventually(Duration::from_secs(20), || begun.exists()));
    kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGTERM).unwrap();
    let mut all = String::new();
    child.stdout.take().unwrap().read_to_string(&mut all).unwrap();
    let result: Value = serde_json::from_str(&all).unwrap();
    assert_eq!((&result["verdict"], result["output"].as_str().map(str::len)), (&json!("cancelled"), Some(900_001)));
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

test!(Both, a_run_below_an_agent_that_ignores_hang_ups_ends_with_it, seconds 120);
/// `nohup agent &`: the signal is ignored by all that the agent starts.
fn a_run_below_an_agent_that_ignores_hang_ups_ends_with_it() {
    let (mark, place) = (format!("607.{}7", std::process::id()), scratch());
    let command = format!("STOCKADE run --policy shell --scratch SCRATCH -- sh -c 'touch ready; sleep {mark}'");
    for line in [format!("trap '' HUP; {command}"), format!("trap '' HUP; nohup {command}")] {
        let mut shell = started_by_a_shell(&line, &place);
        shell.kill().unwrap();
        shell.wait().unwrap();
        no_process_is_left(&mark);
    }
    // So do the companion programs.
    let reply = directory().join("reply");
    fs::write(&reply, format!("```sh\ntouch ready; sleep {mark}\n```\n")).unwrap();
    let line = format!("trap '' HUP; STOCKADE exec --markdown --scratch SCRATCH <{} >/dev/null", text(&reply));
    let mut shell = started_by_a_shell(&line, &place);
    shell.kill().unwrap();
    shell.wait().unwrap();
    no_process_is_left(&mark);
    // The controls: the run itself was started by nohup, or told to outlive its caller.
    let kept = command.replace(" --policy", " --outlive-caller --policy");
    for line in [format!("nohup {command}"), format!("trap '' HUP; {kept}")] {
        let mut shell = started_by_a_shell(&line, &place);
        shell.kill().unwrap();
        shell.wait().unwrap();
        outlives_its_caller(&mark, &line);
    }
}

test!(Both, a_run_ends_with_a_shell_that_left_it_in_the_background, seconds 120);
fn a_run_ends_with_a_shell_that_left_it_in_the_background() {
    let mark = format!("601.{}7", std::process::id());
    let place = scratch();
    let command = format!("STOCKADE run --policy shell --scratch SCRATCH -- sh -c 'touch ready; sleep {mark}'");
    let left = |line: &str| {
        let line = format!("{} & until [ -e {}/ready ]; do sleep 0.1; done", filled_in(line, &place), text(&place));
        assert!(begun(&mut run_under(&["sh", "-c", &line]), &place).wait().unwrap().success());
    };
    // A session and a process group of its own change nothing: what waits for it counts.
    for line in [command.clone(), format!("setsid {command}")] {
        left(&line);
        no_process_is_left(&mark);
    }
    for line in [format!("nohup {command}"), command.replace(" --policy", " --outlive-caller --policy")] {
        left(&line);
        outlives_its_caller(&mark, &line);
    }
}

/// A terminal with an interactive shell, in which a line is typed. When the code has begun,
/// the user logs out or the line breaks.
const TERMINAL: &str = r#"
import os, pty, sys, threading, time
line, ready, how = sys.argv[1:]
shell, terminal = pty.fork()
if shell == 0:
    os.execvp("bash", ["bash", "--norc", "--noprofile", "-i"])
def read():
    try:
        while os.read(terminal, 4096): pass
    except OSError: pass
threading.Thread(target=read, daemon=True).start()
os.write(terminal, (line + "\n").encode())
while not os.path.exists(ready): time.sleep(0.05)
if how == "exit":
    os.write(terminal, b"exit\n")
    os.waitpid(shell, 0)
# The end of this process breaks the line.
"#;

test!(Both, a_run_ends_with_the_terminal_that_it_was_started_from, needs [Program("python3")], seconds 120);
fn a_run_ends_with_the_terminal_that_it_was_started_from() {
    let mark = format!("602.{}7", std::process::id());
    let place = scratch();
    let command = filled_in(&format!("STOCKADE run --policy shell --scratch SCRATCH -- sh -c 'touch ready; sleep {mark}'"), &place);
    // In the background a program that takes the terminal is stopped.
    let apart = format!("{command} </dev/null >/dev/null 2>&1 &");
    let ready = place.join("ready");
    let typed = |line: &str, how: &str| {
        let mut terminal = begun(&mut run_under(&["python3", "-c", TERMINAL, line, text(&ready), how]), &place);
        assert!(terminal.wait().unwrap().success());
    };
    for (line, how) in [(&apart, "exit"), (&apart, "break"), (&command, "break")] {
        typed(line, how);
        no_process_is_left(&mark);
    }
    let line = format!("nohup {apart}");
    typed(&line, "exit");
    outlives_its_caller(&mark, &line);
}

test!(Both, a_run_of_a_daemon_ends_with_the_process_that_waits_for_it, seconds 60);
/// As cron does it: the daemon forks a process for each job, which waits for the command.
fn a_run_of_a_daemon_ends_with_the_process_that_waits_for_it() {
    let (mark, place) = (format!("603.{}7", std::process::id()), scratch());
    let status = directory().join("status");
    let begin = |code: &str| {
        let job = filled_in(&format!("STOCKADE run --policy shell --scratch SCRATCH -- sh -c '{code}'"), &place);
        let daemon = format!("({job}; echo $? >{}) </dev/null >/dev/null 2>&1 & echo $!; wait", text(&status));
        let mut daemon = begun(&mut run_under(&["setsid", "sh", "-c", &daemon]), &place);
        let mut job = String::new();
        BufReader::new(daemon.stdout.take().unwrap()).read_line(&mut job).unwrap();
        (daemon, Pid::from_raw(job.trim().parse().unwrap()))
    };
    // The daemon is gone, and its job goes on to its end.
    let (mut daemon, _) = begin("touch ready; until [ -e go ]; do sleep 0.1; done; exit 7");
    daemon.kill().unwrap();
    daemon.wait().unwrap();
    fs::write(place.join("go"), "").unwrap();
    let said = || fs::read_to_string(&status).unwrap_or_default();
    assert!(eventually(Duration::from_secs(20), || said() == "7\n"), "{}", said());
    // Its job's process is gone.
    let (mut daemon, job) = begin(&format!("touch ready; sleep {mark}"));
    kill(job, Signal::SIGKILL).unwrap();
    daemon.wait().unwrap();
    no_process_is_left(&mark);
}

test!(RootOnly, through_sudo_a_run_ends_with_the_process_that_called_sudo, needs [Program("sudo")], seconds 120);
fn through_sudo_a_run_ends_with_the_process_that_called_sudo() {
    let mark = format!("604.{}7", std::process::id());
    let place = scratch();
    let grants = format!("[[grant]]\nuid = {OWNER}\npolicies = [\"shell\"]\nscratch = [{:?}]\n", text(&place));
    let passwd = fs::read_to_string("/etc/passwd").unwrap();
    let files = [
        ("stockade/grants.toml", grants.as_str()),
        ("passwd", &format!("{passwd}caller:*:{OWNER}:{OWNER}::/nonexistent:/bin/sh\n")),
        ("sudoers", "Defaults !authenticate, secure_path=/usr/bin\ncaller ALL = (root) ALL\n"),
    ];
    let call = |line: &str| {
        let line = format!("{}; exit 3", filled_in(line, &place));
        let id = OWNER.to_string();
        let caller = ["setpriv", "--reuid", &id, "--regid", &id, "--clear-groups", "sh", "-c", &line];
        begun(&mut command_under_etc(&files, &caller), &place)
    };
    let command = format!("sudo -n STOCKADE run --policy shell --scratch SCRATCH -- sh -c 'touch ready; sleep {mark}'");
    // The caller dies; sudo itself is told to end.
    let mut shell = call(&command);
    shell.kill().unwrap();
    shell.wait().unwrap();
    no_process_is_left(&mark);
    let mut shell = call(&command);
    let sudo = format!("^sudo .*{mark}");
    assert!(Command::new("pkill").args(["-TERM", "-o", "-f", &sudo]).status().unwrap().success());
    assert_eq!(shell.wait().unwrap().code(), Some(3));
    no_process_is_left(&mark);
    for line in [format!("nohup {command}"), command.replace(" --policy", " --outlive-caller --policy")] {
        let mut shell = call(&line);
        shell.kill().unwrap();
        shell.wait().unwrap();
        outlives_its_caller(&mark, &line);
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

test!(Both, a_session_ends_with_the_process_that_started_it, seconds 60);
/// Somebody else may hold the writing end of its input.
fn a_session_ends_with_the_process_that_started_it() {
    let program = program_path().unwrap();
    let session = |options: &str, name: &str| {
        let (fifo, place) = (directory().join(format!("{name}.fifo")), crate::support::exec::scratch_named(name));
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::from_bits_truncate(0o600)).unwrap();
        // Open for both, it waits for no other end.
        let writer = fs::File::options().read(true).write(true).open(&fifo).unwrap();
        let answers = directory().join(format!("{name}.answers"));
        let line = format!(
            "{} session {options} --scratch {} <{} >{} & echo $! >{}.pid; wait",
            text(&program),
            text(&place),
            text(&fifo),
            text(&answers),
            text(&answers)
        );
        let mut shell = run_under(&["sh", "-c", &line]).spawn().unwrap();
        let is_ready = || fs::read_to_string(&answers).is_ok_and(|said| said.contains("ready"));
        assert!(eventually(Duration::from_secs(10), is_ready));
        let pid = fs::read_to_string(format!("{}.pid", text(&answers))).unwrap().trim().to_owned();
        shell.kill().unwrap();
        shell.wait().unwrap();
        (writer, answers, pid, place)
    };
    let (mut writer, answers, pid, place) = session("", "left");
    let request = b"{\"op\": \"run\", \"code\": \"open('begun', 'w')\"}\n";
    writer.write_all(request).unwrap();
    assert!(eventually(Duration::from_secs(5), || !lives(&pid)), "it outlives its caller");
    assert!(!place.join("begun").exists(), "{}", fs::read_to_string(answers).unwrap());
    // The control: told to outlive it, it runs what it is sent.
    let (mut writer, _, pid, place) = session("--outlive-caller", "kept");
    writer.write_all(request).unwrap();
    assert!(eventually(Duration::from_secs(10), || place.join("begun").exists()));
    writer.write_all(b"{\"op\": \"close\"}\n").unwrap();
    assert!(eventually(Duration::from_secs(5), || !lives(&pid)));
}

/// Whether a process has not ended.
fn lives(pid: &str) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

/// Whether a thread of a process waits in read(2) of a pipe, or in poll(2).
fn waits_for_input(pid: &str) -> bool {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let mut places = threads.map(|thread| fs::read_to_string(thread.path().join("wchan")).unwrap_or_default());
    places.any(|place| place.contains("pipe_") || place.contains("poll"))
}

test!(Both, what_waits_for_its_input_ends_with_the_process_that_started_it, seconds 120);
/// Somebody else may hold the writing end, so that the input does not end.
fn what_waits_for_its_input_ends_with_the_process_that_started_it() {
    // A writing end of its input, and its pid; who started it has ended while it waited.
    let left_by_a_shell = |command: &str, name: &str| {
        let fifo = directory().join(format!("{name}.fifo"));
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::from_bits_truncate(0o600)).unwrap();
        // Open for both, it waits for no other end.
        let writer = fs::File::options().read(true).write(true).open(&fifo).unwrap();
        let line = format!("{} {command} <{} >{name}.out & echo $!; wait", text(&program_path().unwrap()), text(&fifo));
        let mut shell = run_under(&["sh", "-c", &line]).spawn().unwrap();
        let mut pid = String::new();
        BufReader::new(shell.stdout.take().unwrap()).read_line(&mut pid).unwrap();
        let pid = pid.trim().to_owned();
        let waits = eventually(Duration::from_secs(20), || waits_for_input(&pid));
        shell.kill().unwrap();
        shell.wait().unwrap();
        assert!(waits, "{command} does not wait for its input");
        (writer, pid)
    };
    for (command, name) in [("exec", "exec"), ("run -", "run"), ("exec --markdown", "markdown"), ("mcp", "mcp")] {
        let (_writer, pid) = left_by_a_shell(command, name);
        assert!(eventually(Duration::from_secs(5), || !lives(&pid)), "{command} outlives its caller");
        // The control: told to outlive it, it waits until its input ends.
        let words = command.replacen(' ', " --outlive-caller ", 1);
        let words = if words == command { format!("{command} --outlive-caller") } else { words };
        let (writer, pid) = left_by_a_shell(&words, &format!("{name}-kept"));
        thread::sleep(Duration::from_millis(500));
        assert!(lives(&pid), "{words} ends with its caller");
        drop(writer);
        assert!(eventually(Duration::from_secs(10), || !lives(&pid)), "{words} outlives its input");
    }
}

test!(Both, a_reply_ends_with_the_process_that_brought_it, seconds 60);
fn a_reply_ends_with_the_process_that_brought_it() {
    let (mark, place) = (format!("605.{}7", std::process::id()), scratch());
    let reply = directory().join("reply");
    fs::write(&reply, format!("```sh\ntouch ready; sleep {mark}\n```\n")).unwrap();
    let mut shell = started_by_a_shell(&format!("STOCKADE exec --markdown --scratch SCRATCH <{}", text(&reply)), &place);
    shell.kill().unwrap();
    shell.wait().unwrap();
    no_process_is_left(&mark);
    // The control: told to outlive it, it goes on until its session is ended.
    let kept = format!("STOCKADE exec --markdown --outlive-caller --scratch SCRATCH <{}", text(&reply));
    let mut shell = started_by_a_shell(&kept, &place);
    shell.kill().unwrap();
    shell.wait().unwrap();
    thread::sleep(Duration::from_secs(1));
    assert!(host_process_with(&mark));
    Command::new("pkill").args(["-TERM", "-f", &format!("session --scratch {}", text(&place))]).status().unwrap();
    no_process_is_left(&mark);
}

test!(Both, a_call_of_mcp_ends_with_its_client, seconds 60);
fn a_call_of_mcp_ends_with_its_client() {
    let mark = format!("606.{}7", std::process::id());
    let call = |code: &str| {
        let hello = json!({"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}});
        let arguments = json!({"language": "sh", "code": code});
        let messages = [
            json!({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello}),
            json!({"jsonrpc": "2.0", "method": "notifications/initialized"}),
            json!({"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {"name": "execute_code", "arguments": arguments}}),
        ];
        let lines: String = messages.iter().map(|message| format!("{message}\n")).collect();
        let client = stockade(["mcp"]).stdin(Stdio::piped()).spawn().unwrap();
        client.stdin.as_ref().unwrap().write_all(lines.as_bytes()).unwrap();
        client
    };
    let mut server = call(&format!("sleep {mark}"));
    assert!(eventually(Duration::from_secs(20), || host_process_with(&mark)), "it did not begin");
    let left = Instant::now();
    drop((server.stdin.take(), server.stdout.take()));
    server.wait().unwrap();
    assert!(left.elapsed() < scaled(Duration::from_secs(3)), "{:?}", left.elapsed());
    no_process_is_left(&mark);
    // The control: a client that has only said all still gets its answer.
    let mut server = call("sleep 1; echo answered");
    drop(server.stdin.take());
    let said = String::from_utf8(server.wait_with_output().unwrap().stdout).unwrap();
    assert!(said.contains("answered"), "{said}");
}

test!(Both, a_caller_that_ignores_its_children_is_served);
fn a_caller_that_ignores_its_children_is_served() {
    let script = "trap '' CHLD; exec \"$@\"";
    let mut command = run_under(&["bash", "-c", script, "bash", text(&program_path().unwrap()), "exec"]);
    ExecResult::of(run_with_stdin(&mut command, br#"{"code": "import subprocess; print(subprocess.run(['true']).returncode)"}"#))
        .succeeded()
        .expect(json!({"output": "0\n"}));
}

test!(serial Both, an_unread_stdout_does_not_keep_a_run_that_is_asked_to_end, seconds 60);
fn an_unread_stdout_does_not_keep_a_run_that_is_asked_to_end() {
    let mark = token("yes");
    let mut child = stockade(["run", "--", "yes", &mark]).spawn().unwrap();
    // It has begun; from here on its output is not read.
    let mut first = [0; 1];
    child.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
    thread::sleep(scaled(Duration::from_millis(500)));
    // The control: by itself it stays.
    assert!(child.try_wait().unwrap().is_none());
    let begin = Instant::now();
    kill(Pid::from_raw(i32::try_from(child.id()).unwrap()), Signal::SIGTERM).unwrap();
    let ended = wait_within(&mut child, Duration::from_secs(15));
    if ended.is_none() {
        child.kill().unwrap();
    }
    assert!(ended.is_some(), "still there after {:?}", begin.elapsed());
    no_process_is_left(&mark);
}
