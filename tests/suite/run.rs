//! `stockade run`: any command, its streams passed through.

use std::{
    fs::{self, File},
    io::{Read, Write},
    os::unix::process::ExitStatusExt,
    path::Path,
    process::{Command, Output, Stdio},
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use crate::support::{
    exec::{chown_to_owner, program_path, run_under, run_with_stdin, scratch, stockade, text, token, write_file},
    leftovers::no_process_is_left,
    policy_dir::{PolicyDirectory, derived},
    runner::{directory, eventually, test, wait_within},
    timeouts::{scaled, scaled_limit},
};

fn run(arguments: &[&str]) -> Command {
    stockade([&["run", "--"], arguments].concat())
}

#[track_caller]
fn says(output: &Output, stdout: &[u8], status: i32) {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(status), "{stderr}");
    assert!(output.stdout == stdout, "{:?}\n{stderr}", String::from_utf8_lossy(&output.stdout));
}

fn every_byte() -> Vec<u8> {
    (0..=255).cycle().take(70_000).collect()
}

test!(Both, streams_pass_through_byte_for_byte);
fn streams_pass_through_byte_for_byte() {
    let code = "import sys\nd = sys.stdin.buffer.read()\nfor s in (sys.stdout, sys.stderr): s.buffer.write(d)";
    let output = run_with_stdin(&mut run(&["/usr/bin/python3", "-c", code]), &every_byte());
    assert!(output.stdout == every_byte() && output.status.success(), "{} bytes", output.stdout.len());
    // What is said of the sandbox stands before it or behind it.
    let start = output.stderr.windows(70_000).position(|window| window == every_byte()).expect("stderr passes through");
    let said = [&output.stderr[..start], &output.stderr[start + 70_000..]].concat();
    assert!(String::from_utf8(said).unwrap().lines().all(|line| line.starts_with("stockade: ")));
}

test!(Both, stdin_may_be_a_pipe_a_file_or_nothing);
fn stdin_may_be_a_pipe_a_file_or_nothing() {
    let count = ["wc", "-c"];
    says(&run_with_stdin(&mut run(&count), b"12345"), b"5\n", 0);
    let file = directory().join("input");
    fs::write(&file, every_byte()).unwrap();
    says(&run(&count).stdin(File::open(&file).unwrap()).output().unwrap(), b"70000\n", 0);
    let mut half = File::open(&file).unwrap();
    half.read_exact(&mut [0; 20_000]).unwrap();
    says(&run(&count).stdin(half).output().unwrap(), b"50000\n", 0);
    says(&run(&count).stdin(Stdio::null()).output().unwrap(), b"0\n", 0);
    let closed = run_under(&["sh", "-c", "exec \"$0\" run -- wc -c <&-", text(&program_path().unwrap())]).output().unwrap();
    says(&closed, b"0\n", 0);
    let to_write = File::options().write(true).open("/dev/null").unwrap();
    says(&run(&count).stdin(to_write).output().unwrap(), b"0\n", 0);
    says(
        &run(&count)
            .stdin(File::open("/dev/zero").map(|zero| zero.take(0)).unwrap().into_inner())
            .env("X", "")
            .args(["/dev/null"])
            .output()
            .unwrap(),
        b"0 /dev/null\n",
        0,
    );
}

test!(Both, a_large_stdin_passes_whole_and_ends);
fn a_large_stdin_passes_whole_and_ends() {
    let large: Vec<u8> = every_byte().into_iter().cycle().take(20 << 20).collect();
    let file = directory().join("large");
    fs::write(&file, &large).unwrap();
    let here = Command::new("sha256sum").stdin(File::open(&file).unwrap()).output().unwrap();
    says(&run_with_stdin(&mut run(&["sha256sum"]), &large), &here.stdout, 0);
    says(&run(&["sha256sum"]).stdin(File::open(&file).unwrap()).output().unwrap(), &here.stdout, 0);
}

test!(Both, an_open_stdin_does_not_keep_a_finished_command);
fn an_open_stdin_does_not_keep_a_finished_command() {
    let mut child = run(&["echo", "done"]).stdin(Stdio::piped()).spawn().unwrap();
    let stdin = child.stdin.take();
    assert!(wait_within(&mut child, Duration::from_secs(10)).is_some_and(|status| status.success()));
    drop(stdin);
}

test!(Both, a_slow_reader_loses_nothing);
fn a_slow_reader_loses_nothing() {
    let mut child = run(&["head", "-c", "3000000", "/dev/zero"]).spawn().unwrap();
    let mut stdout = child.stdout.take().unwrap();
    let mut first = [0; 10];
    stdout.read_exact(&mut first).unwrap();
    // The pipe is full long before; the command must wait, not lose.
    assert!(!eventually(Duration::from_millis(300), || child.try_wait().unwrap().is_some()));
    let mut rest = Vec::new();
    stdout.read_to_end(&mut rest).unwrap();
    assert_eq!(rest.len() + 10, 3_000_000);
    assert!(child.wait().unwrap().success());
}

test!(Both, a_command_without_stdout_is_told_from_one_that_prints_nothing);
fn a_command_without_stdout_is_told_from_one_that_prints_nothing() {
    let status = |command: &str| {
        let script = format!("exec \"$0\" run --quiet -- {command} >&-");
        run_under(&["sh", "-c", &script, text(&program_path().unwrap())]).output().unwrap().status.code()
    };
    assert_eq!([status("echo lost"), status("true"), status("false")], [Some(74), Some(0), Some(1)]);
}

test!(Both, a_reader_that_goes_away_ends_the_command);
/// As with any command: `… | head -1` comes back.
fn a_reader_that_goes_away_ends_the_command() {
    let mut child = run(&["yes"]).spawn().unwrap();
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_exact(&mut [0; 10]).unwrap();
    drop(stdout);
    let ended = wait_within(&mut child, Duration::from_secs(5));
    let _still = child.kill();
    assert!(ended.is_some(), "the command goes on printing to a closed stream");
}

test!(serial Both, no_stream_of_the_callers_stops_the_wall_clock, seconds 120);
/// A terminal without a reader, and pipes that others read and write as well: each can be ready
/// and then have nothing, or no room.
fn no_stream_of_the_callers_stops_the_wall_clock() {
    let script = r#"
import os, subprocess, sys, threading
program, policy, patience = sys.argv[1], sys.argv[2], float(sys.argv[3])
none = subprocess.DEVNULL
flood = ["/usr/bin/python3", "-c", "import sys\nwhile True: sys.stdout.write('x' * 70 + chr(10))"]
def start(command, **streams):
    return subprocess.Popen([program, "run", "--policy", policy, "--", *command], stderr=none, **streams)
def status(child):
    try: return child.wait(patience)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait() and "held up"
for streams in (["stdout"], ["stdin", "stdout"]):
    master, slave = os.openpty()
    print("terminal", status(start(flood, **{"stdin": none, **dict.fromkeys(streams, slave)})))
    print("was shown", len(os.read(master, 100)) > 0)
read, write = os.pipe()
children = [start(flood, stdin=none, stdout=write) for _ in range(3)]
os.close(write)
slow = threading.Thread(target=lambda: [None for _ in iter(lambda: os.read(read, 500), b"")])
slow.start()
print("shared stdout", [status(child) for child in children])
slow.join()
read, write = os.pipe()
children = [start(["cat"], stdin=read, stdout=none) for _ in range(2)]
os.set_blocking(write, False)
while any(child.poll() is None for child in children):
    try: os.write(write, b"x")
    except BlockingIOError: pass
    if not all(status is None for status in (child.poll() for child in children)): break
    try: children[0].wait(0.005)
    except subprocess.TimeoutExpired: pass
print("shared stdin", [status(child) for child in children])
"#;
    let policies = PolicyDirectory::new();
    let policy = policies.write("own", &derived(&format!("[limits]\nwall = \"{}\"", scaled_limit(1000))));
    let patience = scaled(Duration::from_secs(15)).as_secs().to_string();
    let output = run_under(&["/usr/bin/python3", "-c", script, text(&program_path().unwrap()), &policy, &patience]).output().unwrap();
    let shown = "terminal 124\nwas shown True\n".repeat(2);
    let wanted = format!("{shown}shared stdout [124, 124, 124]\nshared stdin [124, 124]\n");
    assert_eq!(String::from_utf8_lossy(&output.stdout), wanted, "{}", String::from_utf8_lossy(&output.stderr));
}

test!(Both, the_commands_status_is_passed_on, seconds 60);
fn the_commands_status_is_passed_on() {
    for status in 0..=255 {
        let output = run(&["sh", "-c", &format!("exit {status}")]).output().unwrap();
        says(&output, b"", status);
    }
}

test!(Both, a_signal_is_128_and_its_number);
fn a_signal_is_128_and_its_number() {
    for (name, number) in [("TERM", 15), ("KILL", 9), ("SEGV", 11), ("USR1", 10)] {
        let output = run(&["sh", "-c", &format!("kill -{name} $$")]).output().unwrap();
        says(&output, b"", 128 + number);
    }
}

fn with_policy(lines: &str, arguments: &[&str]) -> Output {
    let policies = PolicyDirectory::new();
    let policy = policies.write("own", &derived(lines));
    stockade([&["run", "--policy", &policy, "--"], arguments].concat()).output().unwrap()
}

test!(Both, the_wall_clock_is_124);
fn the_wall_clock_is_124() {
    let output = with_policy(&format!("[limits]\nwall = \"{}\"", scaled_limit(300)), &["sleep", "600"]);
    says(&output, b"", 124);
    assert!(String::from_utf8_lossy(&output.stderr).contains("stockade: the wall clock ran out"));
}

test!(Both, a_sandbox_that_cannot_be_made_is_125);
fn a_sandbox_that_cannot_be_made_is_125() {
    let output = with_policy("[filesystem]\nread_only = { add = [\"/not-on-this-host\"] }", &["true"]);
    says(&output, b"", 125);
    assert!(String::from_utf8_lossy(&output.stderr).contains("/not-on-this-host"));
    let output = stockade(["run", "--policy", "no-such-policy", "--", "true"]).output().unwrap();
    says(&output, b"", 125);
}

test!(Both, what_cannot_be_executed_is_126_and_what_is_not_there_127);
fn what_cannot_be_executed_is_126_and_what_is_not_there_127() {
    for (command, status) in [
        ("no-such-command", 127),
        ("/usr/bin/no-such-command", 127),
        ("./missing", 127),
        ("/etc/hosts", 126),
        ("/usr", 126),
        ("/usr/lib/os-release", 126),
    ] {
        let output = run(&[command]).output().unwrap();
        says(&output, b"", status);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains(command), "{said}");
    }
}

test!(Both, a_relative_scratch_begins_at_the_working_directory);
fn a_relative_scratch_begins_at_the_working_directory() {
    let place = scratch();
    fs::create_dir(place.join("below")).unwrap();
    chown_to_owner(&place.join("below"));
    for (from, named, made) in [(&*place, ".", "a"), (&*place, "./below", "below/b"), (&place.join("below"), "..", "c")] {
        let file = text(&place.join(made)).to_owned();
        let output = stockade(["run", "--scratch", named, "--", "touch", &file]).current_dir(from).output().unwrap();
        says(&output, b"", 0);
        assert!(Path::new(&file).exists());
    }
}

test!(Both, a_report_has_the_status_of_a_command_that_could_not_start);
fn a_report_has_the_status_of_a_command_that_could_not_start() {
    for (command, status) in [("/nonexistent", 127), ("/etc/passwd", 126)] {
        let report = directory().join("report");
        let output = stockade(["run", "--report", text(&report), "--", command]).output().unwrap();
        assert_eq!(output.status.code(), Some(status));
        let report: Value = serde_json::from_slice(&fs::read(&report).unwrap()).unwrap();
        assert_eq!((&report["code"], &report["started"]), (&json!(status), &json!(false)), "{report}");
    }
}

test!(Both, a_mistake_on_the_command_line_is_2);
fn a_mistake_on_the_command_line_is_2() {
    for arguments in [
        &["run"][..],
        &["run", "--"],
        &["run", "--nonsense", "--", "true"],
        &["run", "--", ""],
        &["run", "--scratch", "", "--", "true"],
        &["run", "--scratch", "missing", "--", "true"],
        &["run", "--scratch", "/no/such", "--", "true"],
    ] {
        let output = stockade(arguments).output().unwrap();
        assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        assert!(!output.stderr.is_empty());
    }
}

test!(Both, other_limits_are_said_on_stderr);
fn other_limits_are_said_on_stderr() {
    let output = with_policy("[limits]\ntmp_size = \"2MiB\"", &["sh", "-c", "head -c 5000000 /dev/zero >/tmp/f"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("stockade: scratch or tmp is full"),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

fn report_of(path: &Path) -> Value {
    let text = fs::read_to_string(path).unwrap();
    assert_eq!(text.lines().count(), 1, "{text}");
    serde_json::from_str(&text).unwrap()
}

test!(Both, the_report_holds_the_result_without_the_streams);
fn the_report_holds_the_result_without_the_streams() {
    let path = directory().join("report.json");
    let output = stockade(["run", "--report", text(&path), "--", "sh", "-c", "echo out; echo err >&2; exit 5"]).output().unwrap();
    says(&output, b"out\n", 5);
    let report = report_of(&path);
    assert_eq!(
        (&report["verdict"], &report["code"], &report["started"], &report["schema"]),
        (&json!("exited"), &json!(5), &json!(true), &json!(1))
    );
    assert_eq!((&report["bytes"]["output"], &report["bytes"]["error"]), (&json!(4), &json!(4)));
    assert!(report.get("output").is_none() && report["receipt"]["layers"].is_array(), "{report}");
    // An older and longer one is replaced whole.
    fs::write(&path, "x".repeat(100_000)).unwrap();
    stockade(["run", "--report", text(&path), "--", "true"]).output().unwrap();
    assert_eq!(report_of(&path)["success"], true);
    let nowhere = stockade(["run", "--report", "/no/such/place/report", "--", "true"]).output().unwrap();
    assert_eq!(nowhere.status.code(), Some(125));
    assert!(String::from_utf8_lossy(&nowhere.stderr).contains("/no/such/place/report"));
}

test!(Both, a_report_that_cannot_be_written_is_no_success);
fn a_report_that_cannot_be_written_is_no_success() {
    let to = |report: &str| stockade(["run", "--report", report, "--", "echo", "said"]).output().unwrap();
    let full = to("/dev/full");
    says(&full, b"said\n", 74);
    let said = String::from_utf8_lossy(&full.stderr).into_owned();
    assert!(said.contains("/dev/full") && said.contains("No space left on device"), "{said}");
    assert!(said.contains("the code ran (exited, status 0)"), "{said}");
    // What did not run is told by its own status.
    let refused = stockade(["run", "--report", "/dev/full", "--", "no-such-command"]).output().unwrap();
    assert_eq!(refused.status.code(), Some(125));
    // The control: a device that takes it.
    says(&to("/dev/null"), b"said\n", 0);
}

test!(Both, a_report_that_code_replaces_is_no_success);
fn a_report_that_code_replaces_is_no_success() {
    let scratch = scratch();
    let path = scratch.join("report.json");
    let run = |script: &str| {
        let options = ["run", "--scratch", text(&scratch), "--report", text(&path), "--", "sh", "-c", script];
        stockade(options).output().unwrap()
    };
    for script in ["mv report.json gone; echo forged > report.json", "rm report.json", "ln -sf /etc/passwd report.json"] {
        let output = run(script);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(74) && said.contains("another file has taken its place"), "{script}: {said}");
        let _replaced = fs::remove_file(&path);
    }
    // The control: it may lie there.
    assert_eq!(run("true").status.code(), Some(0));
    assert_eq!(report_of(&path)["verdict"], "exited");
    // A fifo without a reader.
    fs::remove_file(&path).unwrap();
    nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
    chown_to_owner(&path);
    let output = run("true");
    assert!(output.status.code() == Some(125) && String::from_utf8_lossy(&output.stderr).contains("a fifo without a reader"), "{output:?}");
}

test!(Both, a_report_is_written_for_a_run_that_never_began);
fn a_report_is_written_for_a_run_that_never_began() {
    let path = directory().join("report.json");
    let output = stockade(["run", "--report", text(&path), "--", "no-such-command"]).output().unwrap();
    assert_eq!(output.status.code(), Some(127));
    let report = report_of(&path);
    assert_eq!((&report["started"], &report["success"], &report["verdict"]), (&json!(false), &json!(false), &json!("sandbox_error")));
}

test!(Both, a_report_cannot_be_reached_from_inside);
fn a_report_cannot_be_reached_from_inside() {
    let scratch = scratch();
    let path = scratch.join("report.json");
    let victim = directory().join("victim");
    fs::write(&victim, "untouched").unwrap();
    let script = format!("ln -s {} report.json; echo forged >report.json; exit 0", text(&victim));
    let output = stockade(["run", "--scratch", text(&scratch), "--report", text(&path), "--", "sh", "-c", &script]).output().unwrap();
    // Written to where the code's link leads, it would be a way to overwrite any file.
    assert_eq!(fs::read_to_string(&victim).unwrap(), "untouched", "{:?}", output.status);
    // Nor for the next run, by a link on the way.
    let run = |report: &Path, script: &str| {
        stockade(["run", "--scratch", text(&scratch), "--report", text(report), "--", "sh", "-c", script]).output().unwrap()
    };
    let elsewhere = directory().join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    let plant = format!("mkdir out; ln -s {} led", text(&elsewhere));
    assert_eq!(run(&directory().join("first.json"), &plant).status.code(), Some(0));
    let output = run(&scratch.join("led/report.json"), "true");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(125) && said.contains("link"), "{said}");
    assert_eq!(fs::read_dir(&elsewhere).unwrap().count(), 0);
    // The control: a directory that is one, and a way that goes up.
    for report in ["out/report.json", "out/../report2.json"] {
        assert_eq!(run(&scratch.join(report), "true").status.code(), Some(0), "{report}");
    }
}

test!(Both, signals_reach_the_command);
fn signals_reach_the_command() {
    for (signal, name) in [
        (Signal::SIGTERM, "TERM"),
        (Signal::SIGINT, "INT"),
        (Signal::SIGHUP, "HUP"),
        (Signal::SIGUSR1, "USR1"),
        (Signal::SIGUSR2, "USR2"),
        (Signal::SIGQUIT, "QUIT"),
    ] {
        let script = format!("trap 'echo got {name}; exit 7' {name}; echo ready; while :; do sleep 0.05; done");
        let mut child = run(&["bash", "-c", &script]).spawn().unwrap();
        let mut stdout = child.stdout.take().unwrap();
        stdout.read_exact(&mut [0; 6]).unwrap();
        kill(Pid::from_raw(child.id().cast_signed()), signal).unwrap();
        let mut rest = String::new();
        stdout.read_to_string(&mut rest).unwrap();
        assert_eq!((rest, child.wait().unwrap().code()), (format!("got {name}\n"), Some(7)));
    }
}

test!(Both, a_signal_that_is_not_caught_ends_the_command);
fn a_signal_that_is_not_caught_ends_the_command() {
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        let mut child = run(&["sh", "-c", "echo ready; exec sleep 600"]).spawn().unwrap();
        child.stdout.take().unwrap().read_exact(&mut [0; 6]).unwrap();
        // The exec may not be done yet; sh dies of them just as well.
        kill(Pid::from_raw(child.id().cast_signed()), signal).unwrap();
        assert_eq!(wait_within(&mut child, Duration::from_secs(10)).unwrap().code(), Some(128 + signal as i32));
    }
}

test!(Both, no_descriptor_of_the_caller_enters);
fn no_descriptor_of_the_caller_enters() {
    let secret = token("descriptor");
    let file = directory().join("input");
    fs::write(&file, format!("first\n{secret}\n")).unwrap();
    let log = directory().join("log");
    fs::write(&log, "before\n").unwrap();
    let script = "import os, stat\nfor fd in (0, 1, 2): print(stat.S_ISFIFO(os.fstat(fd).st_mode), os.readlink(f'/proc/self/fd/{fd}').split(':')[0])\nfor fd in (0, 1):\n    try: print(os.lseek(fd, 0, 0))\n    except OSError as e: print(e.errno)\nprint(sorted(os.listdir('/proc/self/fd'))[:3])";
    let mut command = run(&["/usr/bin/python3", "-c", script]);
    command.stdin(File::open(&file).unwrap()).stdout(File::options().append(true).open(&log).unwrap());
    assert!(command.output().unwrap().status.success());
    let written = fs::read_to_string(&log).unwrap();
    assert_eq!(written, "before\nTrue pipe\nTrue pipe\nTrue pipe\n29\n29\n['0', '1', '2']\n");
    // A directory as stdin is no way out either.
    let output = run(&["ls", "/proc/self/fd/0/"]).stdin(File::open("/").unwrap()).output().unwrap();
    assert!(!output.status.success() && !String::from_utf8_lossy(&output.stdout).contains("root"));
}

test!(Both, nothing_of_the_callers_environment_enters);
fn nothing_of_the_callers_environment_enters() {
    let secret = token("environment");
    let output = run(&["env"]).env("SECRET", &secret).env("TERM", "xterm").env("LD_LIBRARY_PATH", "/tmp").output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(!said.contains(&secret) && !said.contains("LD_LIBRARY_PATH") && said.contains("HOME=/home/sandbox\n"), "{said}");
}

test!(Both, the_scratch_is_the_working_directory);
fn the_scratch_is_the_working_directory() {
    let scratch = scratch();
    write_file(&scratch.join("input"), "in");
    let output = stockade(["run", "--scratch", text(&scratch), "--", "sh", "-c", "pwd; cat input; echo x >result"]).output().unwrap();
    says(&output, format!("{}\nin", text(&scratch)).as_bytes(), 0);
    assert_eq!(fs::read_to_string(scratch.join("result")).unwrap(), "x\n");
    says(&run(&["pwd"]).output().unwrap(), b"/scratch\n", 0);
}

test!(Both, commands_are_found_by_path_inside_only);
fn commands_are_found_by_path_inside_only() {
    let scratch = scratch();
    let script = "printf '#!/bin/sh\\necho planted\\n' >ls; chmod +x ls";
    assert!(stockade(["run", "--scratch", text(&scratch), "--", "sh", "-c", script]).output().unwrap().status.success());
    let mut command = stockade(["run", "--scratch", text(&scratch), "--", "ls", "-d", "."]);
    says(&command.env("PATH", text(&scratch)).output().unwrap(), b".\n", 0);
    says(&stockade(["run", "--scratch", text(&scratch), "--", "./ls"]).output().unwrap(), b"planted\n", 0);
}

test!(Both, an_argument_that_looks_like_an_option_is_the_commands);
fn an_argument_that_looks_like_an_option_is_the_commands() {
    says(&run(&["echo", "--report", "x", "--", "-h"]).output().unwrap(), b"--report x -- -h\n", 0);
}

/// Drives the program on a terminal: argv is the program, a JSON list of arguments and a
/// JSON list of steps, and how many seconds to wait for each; prints what was seen as JSON.
const TERMINAL: &str = r#"
import fcntl, json, os, pty, select, signal, struct, sys, termios, time
program, arguments, steps, patience = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3]), float(sys.argv[4])
settings_are_known, know_settings = os.pipe()
pid, master = pty.fork()
if pid == 0:
    os.close(know_settings)
    os.read(settings_are_known, 1)
    fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 77, 0, 0))
    # Held open and idle behind the program, so that the terminal can be looked at after it;
    # deaf to what is typed before the program can be asked for it.
    kept = [signal.signal(s, signal.SIG_IGN) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)]
    child = os.fork()
    if child == 0:
        for s, action in zip((signal.SIGINT, signal.SIGTERM, signal.SIGQUIT), kept):
            signal.signal(s, action)
        os.execv(program, [program] + arguments)
    before = termios.tcgetattr(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.write(1, f"\n<<status {status}>>\n".encode())
    time.sleep(patience)
    os._exit(0)
seen, found = b"", {}
def wait_for(text):
    global seen
    end = time.monotonic() + patience
    while text.encode() not in seen:
        ready, _, _ = select.select([master], [], [], max(0, end - time.monotonic()))
        if not ready:
            print(json.dumps({"missing": text, "seen": seen.decode(errors="replace")}))
            os.kill(pid, 9)
            sys.exit(0)
        try:
            seen += os.read(master, 65536)
        except OSError as error:
            # No process holds the terminal open any more.
            print(json.dumps({"missing": text, "seen": seen.decode(errors="replace"), "error": str(error), "status": os.waitpid(pid, 0)[1]}))
            sys.exit(0)
settings = termios.tcgetattr(master)
os.close(know_settings)
for step in steps:
    kind, value = step
    if kind == "wait": wait_for(value)
    elif kind == "type": os.write(master, value.encode())
    elif kind == "resize":
        fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", *value, 0, 0))
    elif kind == "raw": found["raw"] = not termios.tcgetattr(master)[3] & termios.ICANON
    elif kind == "signal":
        children = open(f"/proc/{pid}/task/{pid}/children").read().split()
        os.kill(int(children[0]), value)
wait_for("<<status ")
wait_for(">>")
found["restored"] = termios.tcgetattr(master)[:4] == settings[:4]
found["status"] = int(seen.split(b"<<status ")[1].split(b">>")[0])
found["seen"] = seen.decode(errors="replace")
os.kill(pid, 9)
os.waitpid(pid, 0)
print(json.dumps(found))
"#;

#[track_caller]
fn on_terminal(arguments: &[&str], steps: Value) -> Value {
    drive_on_terminal(&program_path().unwrap(), &directory(), &[&["run"], arguments].concat(), steps)
}

/// Any program on a terminal; see `TERMINAL`.
#[track_caller]
pub fn drive_on_terminal(program: &Path, directory: &Path, arguments: &[&str], steps: Value) -> Value {
    let arguments = json!(arguments).to_string();
    let patience = scaled(Duration::from_secs(20)).as_secs().to_string();
    let words = ["/usr/bin/python3", "-c", TERMINAL, text(program), &arguments, &steps.to_string(), &patience];
    let output = run_under(&words).current_dir(directory).output().unwrap();
    let found: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&output.stderr)));
    assert!(found.get("missing").is_none(), "{found}");
    found
}

test!(Both, a_run_in_the_background_leaves_the_terminal_alone, needs [Program("timeout")], seconds 120);
/// timeout(1) makes a process group of its own, which the terminal does not belong to.
fn a_run_in_the_background_leaves_the_terminal_alone() {
    let program = program_path().unwrap();
    let below_timeout = |options: &[&str], command: &[&str]| {
        let words = [options, &[text(&program), "run", "-q"], command].concat();
        drive_on_terminal(Path::new("/usr/bin/timeout"), &directory(), &words, json!([]))
    };
    let asks = ["-c", "import os; print([os.isatty(fd) for fd in (0, 1)])"];
    let patience = scaled(Duration::from_secs(15)).as_secs().to_string();
    let behind = below_timeout(&[&patience], &asks);
    assert!(behind["status"] == 0 && behind["restored"] == true, "{behind}");
    assert!(behind["seen"].as_str().unwrap().contains("[False, False]"), "{behind}");
    // SIGTERM, and SIGCONT after it.
    let ended = below_timeout(&["2"], &["--", "sleep", "600"]);
    assert!(ended["status"] == 124 && ended["restored"] == true, "{ended}");
    // The control: in the foreground the command has a terminal.
    let before = below_timeout(&["--foreground", &patience], &asks);
    assert!(before["status"] == 0 && before["seen"].as_str().unwrap().contains("[True, True]"), "{before}");
}

/// Takes the terminal from a command that runs on it, as a shell does, types something, and ends
/// the command. Prints its status, and whether the terminal is as the shell has set it.
const TAKEN: &str = r#"
import os, pty, select, signal, sys, termios, time
program, patience = sys.argv[1], float(sys.argv[2])
read_end, write_end = os.pipe()
leader, master = pty.fork()
if leader == 0:
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    cooked = termios.tcgetattr(0)
    launcher = os.fork()
    if launcher == 0:
        os.setpgid(0, 0)
        os.tcsetpgrp(0, os.getpid())
        signal.signal(signal.SIGTTOU, signal.SIG_DFL)
        os.execv(program, [program, "run", "-q", "--policy", "shell", "--", "sh", "-c", "echo ready; exec sleep 600"])
    while termios.tcgetattr(0)[3] & termios.ICANON: time.sleep(0.02)
    os.tcsetpgrp(0, os.getpgrp())
    termios.tcsetattr(0, termios.TCSANOW, cooked)
    os.write(write_end, b"%d " % launcher)
    status = os.waitstatus_to_exitcode(os.waitpid(launcher, 0)[1])
    os.write(write_end, b"%d %d" % (status, termios.tcgetattr(0) == cooked))
    os._exit(0)
def within(fd):
    if not select.select([fd], [], [], patience)[0]:
        os.kill(launcher, signal.SIGKILL) if launcher else None
        sys.exit("it stands still")
launcher, seen = 0, b""
within(read_end)
launcher = int(os.read(read_end, 64).split()[0])
while b"ready" not in seen:
    within(master)
    seen += os.read(master, 4096)
os.write(master, b"typed for the shell\n")
os.kill(launcher, signal.SIGTERM)
within(read_end)
print(os.read(read_end, 64).decode())
"#;

test!(Both, a_run_whose_terminal_is_taken_away_can_be_ended, needs [Program("python3")], seconds 60);
fn a_run_whose_terminal_is_taken_away_can_be_ended() {
    let patience = scaled(Duration::from_secs(15)).as_secs().to_string();
    let output =
        run_under(&["/usr/bin/python3", "-c", TAKEN, text(&program_path().unwrap()), &patience]).current_dir(directory()).output().unwrap();
    says(&output, b"143 1\n", 0);
}

/// Code that is deaf to SIGHUP: it is told, and ended a moment later. Its launcher leads the
/// terminal's session (`direct`), and is told when that is gone, or does not.
const HANG_UP: &str = r#"
import os, pty, select, signal, sys, time
program, direct, patience = sys.argv[1], sys.argv[2] == "direct", float(sys.argv[3])
code = """
import signal, time
signal.signal(signal.SIGHUP, lambda *_: print("told", flush=True))
print("ready", flush=True)
while True: time.sleep(60)
"""
note, noted = os.pipe()
pid, master = pty.fork()
if pid == 0:
    if not direct:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        child = os.fork()
        if child:
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            os.write(noted, f"{status}".encode())
            os._exit(0)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        os.write(noted, f"{os.getpid()} ".encode())
    os.close(noted)
    os.execv(program, [program, "run", "--policy", "shell", "--", "/usr/bin/python3", "-c", code])
os.close(noted)
seen = b""
def expect(word):
    global seen
    end = time.monotonic() + patience
    while word not in seen:
        if not select.select([master], [], [], max(0, end - time.monotonic()))[0]: sys.exit(f"{word} is missing: {seen}")
        seen += os.read(master, 65536)
launcher = pid if direct else int(os.read(note, 64).split()[0])
expect(b"ready")
os.kill(launcher, signal.SIGHUP)
expect(b"told")
os.close(master)
if direct:
    pidfd = os.pidfd_open(pid)
    if not select.select([pidfd], [], [], patience)[0]:
        os.kill(pid, 9)
        sys.exit("it lives on")
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
else:
    if not select.select([note], [], [], patience)[0]:
        os.kill(launcher, 9)
        sys.exit("it lives on")
    print(os.read(note, 64).decode())
"#;

test!(serial Both, a_command_does_not_outlive_its_terminal, seconds 60);
fn a_command_does_not_outlive_its_terminal() {
    let patience = scaled(Duration::from_secs(15)).as_secs().to_string();
    for leader in ["direct", "another"] {
        let output = run_under(&["/usr/bin/python3", "-c", HANG_UP, text(&program_path().unwrap()), leader, &patience])
            .current_dir(directory())
            .output()
            .unwrap();
        says(&output, b"129\n", 0);
    }
}

test!(serial Both, a_terminal_passes_through, seconds 60);
fn a_terminal_passes_through() {
    let script = r#"
import os, sys, time
print([os.isatty(fd) for fd in (0, 1, 2)], tuple(os.get_terminal_size()), os.ttyname(0), os.getsid(0) == os.getpid())
print("ready", flush=True)
while tuple(os.get_terminal_size()) != (101, 44): time.sleep(0.01)
try:
    print("resized", flush=True)
    while True: time.sleep(0.05)
except KeyboardInterrupt:
    print("interrupted", flush=True)
sys.exit(5)
"#;
    let steps =
        json!([["wait", "ready"], ["raw", null], ["resize", [44, 101]], ["wait", "resized"], ["type", "\u{3}"], ["wait", "interrupted"]]);
    let found = on_terminal(&["--", "/usr/bin/python3", "-c", script], steps);
    let seen = found["seen"].as_str().unwrap();
    assert!(seen.contains("[True, True, True] (77, 33) /dev/pts/0 True"), "{seen}");
    assert_eq!((&found["raw"], &found["restored"], &found["status"]), (&json!(true), &json!(true), &json!(5)), "{seen}");
}

test!(serial Both, a_terminal_is_restored_after_the_launcher_was_asked_to_end, seconds 60);
fn a_terminal_is_restored_after_the_launcher_was_asked_to_end() {
    let found = on_terminal(&["--", "sh", "-c", "echo ready; exec sleep 600"], json!([["wait", "ready"], ["raw", null], ["signal", 15]]));
    assert_eq!((&found["raw"], &found["restored"], &found["status"]), (&json!(true), &json!(true), &json!(143)), "{found}");
}

test!(serial Both, what_is_typed_reaches_a_shell_on_a_terminal, seconds 60);
fn what_is_typed_reaches_a_shell_on_a_terminal() {
    let steps = json!([
        ["wait", "$ "],
        ["type", "echo $((6 * 7)); tty\r"],
        ["wait", "42"],
        ["wait", "/dev/pts/0"],
        // What prints is the command itself, so that it is in the foreground when it is interrupted.
        ["type", "sh -c 'echo $((7 * 11)); exec sleep 600'\r"],
        ["wait", "77"],
        ["type", "\u{3}"],
        // An interrupt throws away what was typed and not read yet: first the prompt.
        ["wait", "^C\r\nbash-"],
        ["type", "exit 9\r"]
    ]);
    let found = on_terminal(&["--policy", "shell", "--", "bash", "--norc", "-i"], steps);
    assert_eq!((&found["restored"], &found["status"]), (&json!(true), &json!(9)), "{found}");
    // The end of input is a character there.
    let found = on_terminal(&["--", "cat"], json!([["type", "typed\r"], ["wait", "typed\r\ntyped"], ["type", "\u{4}"]]));
    assert_eq!(found["status"], 0, "{found}");
}

test!(Both, killing_the_launcher_kills_the_sandbox);
fn killing_the_launcher_kills_the_sandbox() {
    let mark = format!("600.{}6", std::process::id());
    let mut child = run(&["bash", "-c", &format!("setsid sleep {mark} & echo ready; sleep {mark}")]).spawn().unwrap();
    child.stdout.take().unwrap().read_exact(&mut [0; 6]).unwrap();
    child.kill().unwrap();
    assert_eq!(child.wait().unwrap().signal(), Some(9));
    no_process_is_left(&mark);
}

test!(serial Both, output_of_a_killed_run_is_not_lost);
fn output_of_a_killed_run_is_not_lost() {
    let begin = Instant::now();
    let output = with_policy(&format!("[limits]\nwall = \"{}\"", scaled_limit(300)), &["sh", "-c", "echo before; sleep 600"]);
    says(&output, b"before\n", 124);
    assert!(begin.elapsed() < scaled(Duration::from_secs(5)));
    let mut child = run(&["cat"]).stdin(Stdio::piped()).spawn().unwrap();
    child.stdin.as_mut().unwrap().write_all(b"typed").unwrap();
    child.stdout.as_mut().unwrap().read_exact(&mut [0; 5]).unwrap();
    kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGTERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(143));
}

test!(Both, output_that_cannot_be_passed_on_ends_the_run);
/// What a pipe held would else be lost without a word.
fn output_that_cannot_be_passed_on_ends_the_run() {
    let run = |script: &str| run_under(&["sh", "-c", script]).output().unwrap();
    let full = run(r#""$STOCKADE" run --report report -- /bin/echo words > /dev/full"#);
    let words = String::from_utf8_lossy(&full.stderr).into_owned();
    assert_eq!(full.status.code(), Some(74), "{words}");
    assert!(words.contains("no space left on device") && words.contains("the command had begun"), "{words}");
    let report = report_of(&directory().join("report"));
    let told = ["verdict", "reason", "code", "started"].map(|field| &report[field]);
    assert_eq!(told, [&json!("sandbox_error"), &json!("output_unwritable"), &json!(74), &json!(true)], "{report}");
    // The controls: with room it succeeds, and a reader that has gone is the program's affair.
    assert_eq!(run(r#""$STOCKADE" run -- /bin/echo words > /dev/null"#).status.code(), Some(0));
    let gone = run(r#"{ "$STOCKADE" run -- /bin/echo words; echo "status $?" >&2; } | :"#);
    assert!(gone.stderr.ends_with(b"status 0\n"), "{}", String::from_utf8_lossy(&gone.stderr));
}
