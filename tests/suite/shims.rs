//! Shims: an interpreter by its name, and yet a sandbox. What is compared is the host's own
//! interpreter, started the same way.

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    os::unix::fs::{MetadataExt, symlink},
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use crate::{
    suite::run::drive_on_terminal,
    support::{
        exec::{OWNER, program_path, run_under, run_with_stdin, scratch, scratch_named, stockade, text, token, write_file},
        leftovers::no_process_is_left,
        policy_dir::{PolicyDirectory, derived},
        runner::{directory, is_root, test, wait_within},
        timeouts::{scaled, scaled_limit},
    },
};

/// Shims outside of any scratch.
fn install(options: &[&str]) -> PathBuf {
    let shims = directory().join("shims");
    let output = stockade([&["shim", "install", text(&shims)], options].concat()).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    shims
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A shim, started where `scratch` is.
fn shim(shims: &Path, name: &str, scratch: &Path) -> Command {
    let mut command = run_under(&[text(&shims.join(name))]);
    command.current_dir(scratch);
    command
}

#[track_caller]
fn gives(output: &Output, stdout: &str, status: i32) {
    assert_eq!((output.status.code(), String::from_utf8_lossy(&output.stdout).as_ref()), (Some(status), stdout), "{}", said(output));
}

test!(Both, shims_are_made_listed_and_removed);
fn shims_are_made_listed_and_removed() {
    let shims = directory().join("some/where");
    let make = || stockade(["shim", "install", text(&shims)]).output().unwrap();
    let made = make();
    let paths: Vec<String> = ["python", "python3", "sh", "bash", "node"].map(|name| shims.join(name).display().to_string()).to_vec();
    gives(&made, &format!("{}\n", paths.join("\n")), 0);
    assert!(said(&made).contains("left out pwsh"), "{}", said(&made));
    // Once more replaces them.
    gives(&make(), &format!("{}\n", paths.join("\n")), 0);
    let listed = stockade(["shim", "list", text(&shims)]).output().unwrap();
    let lines = String::from_utf8_lossy(&listed.stdout).into_owned();
    assert_eq!((listed.status.code(), lines.lines().count()), (Some(0), 5), "{lines}");
    assert!(lines.contains(&format!("{}  python3 under policy default\n", paths[1])), "{lines}");
    gives(&stockade(["shim", "remove", text(&shims)]).output().unwrap(), "", 0);
    assert!(!shims.exists());
    let gone = stockade(["shim", "list", text(&shims)]).output().unwrap();
    assert!(gone.status.code() == Some(125) && said(&gone).contains(text(&shims)), "{}", said(&gone));
    fs::create_dir(&shims).unwrap();
    gives(&stockade(["shim", "list", text(&shims)]).output().unwrap(), "", 1);
    gives(&stockade(["shim", "remove", text(&shims)]).output().unwrap(), "", 1);
    assert!(shims.exists());
    gives(&stockade(["shim", "install"]).output().unwrap(), "", 2);
    gives(&stockade(["shim", "install", text(&shims), "--policy", "no-such-policy"]).output().unwrap(), "", 125);
}

test!(Both, a_file_that_is_no_shim_is_left_alone);
fn a_file_that_is_no_shim_is_left_alone() {
    let shims = directory().join("shims");
    fs::create_dir(&shims).unwrap();
    let own = shims.join("python3");
    for contents in ["#!/bin/sh\n", "", "#!/usr/bin/stockade shim-executed\n"] {
        fs::write(&own, contents).unwrap();
        let output = stockade(["shim", "install", text(&shims)]).output().unwrap();
        assert!(output.status.code() == Some(125) && said(&output).contains(text(&own)), "{}", said(&output));
        assert_eq!(fs::read_to_string(&own).unwrap(), contents);
    }
    fs::remove_file(&own).unwrap();
    // A link, where the file at its other end would be overwritten.
    let victim = directory().join("victim");
    fs::write(&victim, "untouched").unwrap();
    symlink(&victim, &own).unwrap();
    assert_eq!(stockade(["shim", "install", text(&shims)]).output().unwrap().status.code(), Some(125));
    assert_eq!(fs::read_to_string(&victim).unwrap(), "untouched");
    fs::remove_file(&own).unwrap();
    install(&[]);
    fs::write(shims.join("notes"), "mine").unwrap();
    gives(&stockade(["shim", "remove", text(&shims)]).output().unwrap(), "", 0);
    assert_eq!(fs::read_dir(&shims).unwrap().count(), 1);
    assert_eq!(fs::read_to_string(shims.join("notes")).unwrap(), "mine");
}

test!(Both, what_a_policy_adds_gets_a_shim_and_what_the_host_lacks_is_named);
fn what_a_policy_adds_gets_a_shim_and_what_the_host_lacks_is_named() {
    let policies = PolicyDirectory::new();
    let lines = "[runtimes.perl]\ncommand = [\"/usr/bin/perl\", \"{file}\"]\nextension = \"pl\"\n\
                 [runtimes.pwsh]\ncommand = [\"/usr/bin/no-such-pwsh\", \"{file}\"]\nextension = \"ps1\"";
    let policy = policies.write("own", &derived(lines));
    let shims = directory().join("shims");
    // The policy's path is kept whole, wherever the shim is started.
    let relative = Path::new(&policy).file_name().unwrap().to_str().unwrap();
    let mut command = stockade(["shim", "install", text(&shims), "--policy", &format!("./{relative}")]);
    let output = command.current_dir(&policies.0).output().unwrap();
    assert!(output.status.success() && said(&output).contains("/usr/bin/no-such-pwsh is not on this host"), "{}", said(&output));
    assert!(!shims.join("pwsh").exists());
    gives(&shim(&shims, "perl", &scratch()).args(["-e", "print 6*7, \"@ARGV\"", "--", "-x"]).output().unwrap(), "42-x", 0);
}

test!(Both, a_shim_does_what_its_interpreter_does, seconds 60);
/// Whatever the arguments: the same as where the host's interpreter has them.
fn a_shim_does_what_its_interpreter_does() {
    let shims = install(&[]);
    let scratch = scratch();
    write_file(&scratch.join("part.py"), "import sys; print(__name__, sys.argv, __file__)");
    write_file(&scratch.join("part.sh"), "echo \"$0 $# $*\"; exit 3");
    write_file(&scratch.join("part.js"), "console.log(__filename, process.argv.slice(2)); process.exitCode = 4");
    let absolute = scratch.join("part.py");
    let cases: [(&str, &str, &[&str]); 18] = [
        ("python", "/usr/bin/python3", &["-c", "import sys; print(sys.argv)", "a", "-b", "--", "--help", "", " x\ny "]),
        ("python", "/usr/bin/python3", &["-u", "-X", "utf8", "part.py", "-c", "x"]),
        ("python", "/usr/bin/python3", &[text(&absolute), "1"]),
        ("python3", "/usr/bin/python3", &["-m", "part", "1"]),
        ("python3", "/usr/bin/python3", &["-m", "json.tool", "--help"]),
        ("python", "/usr/bin/python3", &["--version"]),
        ("python", "/usr/bin/python3", &["--help"]),
        ("python", "/usr/bin/python3", &["no-such-file.py"]),
        ("python", "/usr/bin/python3", &["-c", "import os; print(os.getcwd(), os.path.realpath('.'))"]),
        ("python", "/usr/bin/python3", &["-c", "raise SystemExit('said')"]),
        ("python", "/usr/bin/python3", &["-c", "print('ünïcødé'); import sys; print('err', file=sys.stderr)"]),
        ("sh", "/usr/bin/sh", &["part.sh", "a b", "c"]),
        ("sh", "/usr/bin/sh", &["-c", "echo \"$0:$1\"; pwd", "zero", "one"]),
        ("bash", "/usr/bin/bash", &["-c", "echo ${BASH_VERSION}; [[ a == a ]] && exit 9"]),
        ("bash", "/usr/bin/bash", &["--", "./part.sh", "--", "-c"]),
        ("node", "/usr/bin/node", &["part.js", "--version"]),
        ("node", "/usr/bin/node", &["-e", "console.log(process.argv.slice(1))", "x"]),
        ("node", "/usr/bin/node", &["-p", "6*7"]),
    ];
    for (name, host, arguments) in cases {
        let mut command = run_under(&[host]);
        command.current_dir(&scratch).env("LANG", "C.UTF-8").env("HOME", "/home/sandbox").env("PYTHONDONTWRITEBYTECODE", "1");
        let there = command.args(arguments).output().unwrap();
        let here = shim(&shims, name, &scratch).args(arguments).output().unwrap();
        let all = |output: &Output| (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned(), said(output));
        assert_eq!(all(&here), all(&there), "{name} {arguments:?}");
    }
}

test!(Both, a_program_on_stdin_is_read_and_so_is_its_input);
fn a_program_on_stdin_is_read_and_so_is_its_input() {
    let shims = install(&[]);
    let scratch = scratch();
    gives(&run_with_stdin(&mut shim(&shims, "python", &scratch), b"print(6*7)\n"), "42\n", 0);
    gives(&run_with_stdin(shim(&shims, "python", &scratch).args(["-", "a"]), b"import sys; print(sys.argv)"), "['-', 'a']\n", 0);
    gives(&run_with_stdin(shim(&shims, "bash", &scratch).arg("-s"), b"echo one\nread line\ntwo\necho $line\nexit 5\n"), "one\ntwo\n", 5);
    let bytes: Vec<u8> = (0..=255).cycle().take(3_000_000).collect();
    let sum = "import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())";
    let here = run_with_stdin(run_under(&["/usr/bin/python3", "-c"]).arg(sum), &bytes);
    gives(&run_with_stdin(shim(&shims, "python", &scratch).args(["-c", sum]), &bytes), &String::from_utf8_lossy(&here.stdout), 0);
    // A shell that is fed line by line answers line by line.
    let mut child = shim(&shims, "bash", &scratch).stdin(Stdio::piped()).spawn().unwrap();
    let (mut stdin, mut stdout) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
    for turn in ["x=1; printf 'done %s\\n' $?", "(exit 3); printf 'done %s\\n' $?", "echo $x"] {
        writeln!(stdin, "{turn}").unwrap();
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        assert!(["done 0\n", "done 3\n", "1\n"].contains(&line.as_str()), "{line}");
    }
    drop(stdin);
    assert_eq!(wait_within(&mut child, Duration::from_secs(10)).unwrap().code(), Some(0));
}

test!(Both, an_interpreter_on_a_terminal_is_interactive, seconds 60);
fn an_interpreter_on_a_terminal_is_interactive() {
    let shims = install(&[]);
    let steps = json!([["wait", ">>> "], ["type", "6*7\n"], ["wait", "42"], ["wait", ">>> "], ["type", "exit(3)\n"]]);
    let found = drive_on_terminal(&shims.join("python"), &scratch(), &[], steps);
    assert_eq!((&found["status"], &found["restored"]), (&json!(3), &json!(true)), "{found}");
}

test!(Both, the_exit_status_is_the_interpreters);
fn the_exit_status_is_the_interpreters() {
    let shims = install(&[]);
    let scratch = scratch();
    for status in [0, 1, 2, 3, 77, 124, 125, 126, 127, 128, 254, 255] {
        gives(&shim(&shims, "python", &scratch).args(["-c", &format!("import os; os._exit({status})")]).output().unwrap(), "", status);
    }
    for (name, number) in [("TERM", 15), ("KILL", 9), ("SEGV", 11), ("INT", 2)] {
        gives(&shim(&shims, "sh", &scratch).args(["-c", &format!("kill -{name} $$")]).output().unwrap(), "", 128 + number);
    }
}

test!(Both, files_by_absolute_path_below_the_working_directory_are_there);
fn files_by_absolute_path_below_the_working_directory_are_there() {
    let shims = install(&[]);
    let scratch = scratch();
    let below = scratch.join("below");
    fs::create_dir(&below).unwrap();
    crate::support::exec::chown_to_owner(&below);
    let program = below.join("tmp_code_1234.py");
    write_file(&program, "import sys; open(sys.argv[1], 'w').write('result'); print(__file__)");
    let result = scratch.join("result");
    let output = shim(&shims, "python", &scratch).args([&program, &result]).output().unwrap();
    gives(&output, &format!("{}\n", text(&program)), 0);
    assert_eq!(fs::read_to_string(&result).unwrap(), "result");
    // What code writes is the caller's.
    let owner = if is_root() { OWNER } else { nix::unistd::Uid::current().as_raw() };
    assert_eq!(fs::metadata(&result).unwrap().uid(), owner);
    // What lies beside the working directory is not.
    let beside = directory().join("beside.py");
    fs::write(&beside, "print('seen')").unwrap();
    let output = shim(&shims, "python", &scratch).arg(&beside).output().unwrap();
    assert!(output.status.code() == Some(2) && said(&output).contains("No such file"), "{}", said(&output));
    gives(&run_under(&["/usr/bin/python3", text(&beside)]).output().unwrap(), "seen\n", 0);
}

test!(Both, files_named_through_a_link_to_the_working_directory_are_there);
/// A framework names its files by the path that it was given, and the kernel knows the
/// working directory by the one without links.
fn files_named_through_a_link_to_the_working_directory_are_there() {
    let shims = install(&[]);
    let scratch = scratch();
    write_file(&scratch.join("part.py"), "import os, sys; print(__file__, os.getcwd(), open(sys.argv[1]).read())");
    write_file(&scratch.join("data"), "x");
    let link = directory().join("link");
    symlink(&scratch, &link).unwrap();
    let (program, data) = (link.join("part.py"), link.join("data"));
    let output = shim(&shims, "python", &link).args(["-u", text(&program), text(&data)]).output().unwrap();
    gives(&output, &format!("{} {} x\n", text(&program), text(&scratch)), 0);
    // A shell records in PWD how it came there.
    let script = format!("cd {} && exec {} -c 'cat {}'", text(&link), text(&shims.join("sh")), text(&data));
    gives(&run_under(&["sh", "-c", &script]).output().unwrap(), "x", 0);
    // A link to somewhere else leads nowhere.
    let elsewhere = scratch_named("elsewhere");
    write_file(&elsewhere.join("data"), "secret");
    let other = directory().join("other");
    symlink(&elsewhere, &other).unwrap();
    let output = shim(&shims, "sh", &scratch).args(["-c", "cat \"$0\"", text(&other.join("data"))]).output().unwrap();
    gives(&output, "", 1);
}

test!(Both, a_shim_is_found_by_path_by_link_and_when_moved);
fn a_shim_is_found_by_path_by_link_and_when_moved() {
    let shims = install(&[]);
    let scratch = scratch();
    let who = ["-c", "import getpass; print(getpass.getuser())"];
    let by_path = run_under(&["/usr/bin/env", "python"]).args(who).env("PATH", text(&shims)).current_dir(&scratch).output().unwrap();
    gives(&by_path, "sandbox\n", 0);
    let link = directory().join("link");
    symlink(&shims, &link).unwrap();
    gives(&shim(&link, "python3", &scratch).args(who).output().unwrap(), "sandbox\n", 0);
    let alias = directory().join("interpreter");
    symlink(shims.join("python"), &alias).unwrap();
    gives(&run_under(&[text(&alias)]).args(who).current_dir(&scratch).output().unwrap(), "sandbox\n", 0);
    fs::rename(shims.join("python"), directory().join("moved")).unwrap();
    gives(&run_under(&[text(&directory().join("moved"))]).args(who).current_dir(&scratch).output().unwrap(), "sandbox\n", 0);
    gives(&run_under(&["../shims/python3"]).args(who).current_dir(&scratch).output().unwrap(), "sandbox\n", 0);
}

test!(Both, a_shell_finds_the_real_interpreters);
fn a_shell_finds_the_real_interpreters() {
    let shims = install(&[]);
    let script = "command -v python3; python3 -c 'import os; print(os.getppid())'; echo $PPID";
    let mut command = shim(&shims, "sh", &scratch());
    let output = command.args(["-c", script]).env("PATH", text(&shims)).output().unwrap();
    let lines = String::from_utf8_lossy(&output.stdout).into_owned();
    // pid 1 started the shell, and the shell started python: no sandbox in the sandbox.
    assert!(lines.starts_with("/usr/bin/python3\n") && lines.ends_with("\n1\n"), "{lines}{}", said(&output));
}

test!(Both, nothing_is_on_stderr_but_the_programs_own);
fn nothing_is_on_stderr_but_the_programs_own() {
    let shims = install(&[]);
    let output = shim(&shims, "sh", &scratch()).args(["-c", "echo out; echo err >&2; exit 1"]).output().unwrap();
    gives(&output, "out\n", 1);
    assert_eq!(said(&output), "err\n");
}

test!(Both, of_the_callers_variables_those_come_along_that_the_policy_accepts);
fn of_the_callers_variables_those_come_along_that_the_policy_accepts() {
    let shims = install(&[]);
    let secret = token("environment");
    let mut command = shim(&shims, "sh", &scratch());
    command.args(["-c", "env; exit 0"]).env("API_KEY", &secret).env("LC_TIME", "C").env("CI", "yes").env("LD_PRELOAD", "/no/such");
    let output = command.env("PYTHONHASHSEED", "7").env("PATH", "/nowhere").env("HOME", text(&directory())).output().unwrap();
    let all = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(!all.contains(&secret) && !all.contains("LD_PRELOAD") && !all.contains("/nowhere"), "{all}{}", said(&output));
    for line in
        ["LC_TIME=C\n", "CI=yes\n", "PYTHONHASHSEED=7\n", "PATH=/usr/local/bin:/usr/bin:/bin:/run/stockade/bin\n", "HOME=/home/sandbox\n"]
    {
        assert!(all.contains(line), "{line} is not in {all}");
    }
}

test!(Both, what_is_not_utf8_is_replaced_unless_exactness_was_asked_for);
fn what_is_not_utf8_is_replaced_unless_exactness_was_asked_for() {
    let scratch = scratch();
    let code = "import sys\nfor s in (sys.stdout, sys.stderr): s.buffer.write(b'a\\xff\\xe2\\x82z\\xc0\\xaf\\xf0\\x9f')";
    let bytes = b"a\xff\xe2\x82z\xc0\xaf\xf0\x9f";
    let output = shim(&install(&[]), "python", &scratch).args(["-c", code]).output().unwrap();
    let replaced = String::from_utf8_lossy(bytes).into_owned();
    assert_eq!((String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap()), (replaced.clone(), replaced));
    let output = shim(&install(&["--exact"]), "python", &scratch).args(["-c", code]).output().unwrap();
    assert!(output.stdout == bytes && output.stderr == bytes, "{output:?}");
    let every: Vec<u8> = (0..=255).cycle().take(70_000).collect();
    let output = run_with_stdin(shim(&directory().join("shims"), "sh", &scratch).args(["-c", "cat"]), &every);
    assert!(output.stdout == every);
}

test!(Both, characters_that_a_read_cuts_in_two_stay_whole);
fn characters_that_a_read_cuts_in_two_stay_whole() {
    let shims = install(&[]);
    // Of one, two, three and four bytes, at every offset to any size of a read.
    let code = "import os\nfor shift in range(12):\n    data = (b'x' * shift) + 'aß€🦀'.encode() * 5000\n    while data: data = data[os.write(1, data[:997]):]";
    let output = shim(&shims, "python", &scratch()).args(["-c", code]).output().unwrap();
    let wanted: String = (0..12).map(|shift| "x".repeat(shift) + &"aß€🦀".repeat(5000)).collect();
    assert!(output.stdout == wanted.as_bytes(), "{} bytes\n{}", output.stdout.len(), said(&output));
    // One byte in its own piece: what can be seen of it waits for the rest.
    let code = "import os, sys\nos.write(1, b'\\xe2')\nsys.stdin.readline()\nos.write(1, b'\\x82\\xac\\n')";
    let mut child = shim(&shims, "python", &scratch_named("second")).args(["-c", code]).stdin(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"go\n").unwrap();
    gives(&child.wait_with_output().unwrap(), "€\n", 0);
}

/// A program whose descendants hold its pipes, one of them in its own session.
const STUBBORN: &str = "import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(['/usr/bin/sleep', sys.argv[1]], start_new_session=True)
subprocess.Popen(['/usr/bin/sleep', sys.argv[1]])
print('ready', flush=True)
signal.pause()
signal.pause()";

/// Starts it, sends the signal once it is ready, and waits until it and its pipes are gone.
#[track_caller]
fn end_stubborn(signal: Signal, length: &str) -> (Option<i32>, Duration) {
    let shims = install(&[]);
    let mut child = shim(&shims, "python", &scratch()).args(["-c", STUBBORN, length]).spawn().unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    stdout.read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n");
    let begin = Instant::now();
    kill(Pid::from_raw(child.id().cast_signed()), signal).unwrap();
    // As asyncio does: until the streams have ended, in every process that holds them.
    let (mut rest, mut errors) = (String::new(), String::new());
    stdout.read_to_string(&mut rest).unwrap();
    child.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
    let status = child.wait().unwrap();
    no_process_is_left(&format!("sleep {length}"));
    (status.code(), begin.elapsed())
}

test!(serial Both, sigterm_ends_everything_and_closes_every_pipe);
fn sigterm_ends_everything_and_closes_every_pipe() {
    let (status, time) = end_stubborn(Signal::SIGTERM, "6011");
    assert_eq!(status, Some(143));
    assert!(time < scaled(Duration::from_secs(2)), "{time:?}");
}

test!(serial Both, sigkill_ends_everything_and_closes_every_pipe);
fn sigkill_ends_everything_and_closes_every_pipe() {
    let (status, time) = end_stubborn(Signal::SIGKILL, "6012");
    assert_eq!(status, None);
    assert!(time < scaled(Duration::from_secs(1)), "{time:?}");
}

test!(Both, a_program_that_catches_sigterm_has_a_moment);
fn a_program_that_catches_sigterm_has_a_moment() {
    let shims = install(&[]);
    let code = "import signal, sys\ndef end(*_):\n    print('caught', flush=True)\n    sys.exit(7)\nsignal.signal(signal.SIGTERM, end)\nprint('ready', flush=True)\nwhile True: signal.pause()";
    let mut child = shim(&shims, "python", &scratch()).args(["-c", code]).spawn().unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    stdout.read_line(&mut line).unwrap();
    kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGTERM).unwrap();
    stdout.read_line(&mut line).unwrap();
    assert_eq!((line.as_str(), child.wait().unwrap().code()), ("ready\ncaught\n", Some(7)));
}

test!(Both, other_signals_reach_the_interpreter);
fn other_signals_reach_the_interpreter() {
    let shims = install(&[]);
    let code = "import signal\ntry:\n    print('ready', flush=True)\n    while True: signal.pause()\nexcept KeyboardInterrupt: print('interrupted', flush=True)\nwhile True: signal.pause()";
    let mut child = shim(&shims, "python", &scratch()).args(["-c", code]).spawn().unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    stdout.read_line(&mut line).unwrap();
    kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGINT).unwrap();
    stdout.read_line(&mut line).unwrap();
    assert_eq!(line, "ready\ninterrupted\n");
    // It goes on, until one comes that it does not catch.
    kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGUSR1).unwrap();
    assert_eq!(wait_within(&mut child, Duration::from_secs(10)).unwrap().code(), Some(128 + 10));
}

test!(serial Both, a_background_child_delays_nothing_and_output_is_kept);
fn a_background_child_delays_nothing_and_output_is_kept() {
    let shims = install(&[]);
    let scratch = scratch();
    let begin = Instant::now();
    gives(&shim(&shims, "bash", &scratch).args(["-c", "sleep 6013 & setsid sleep 6013 & echo said"]).output().unwrap(), "said\n", 0);
    let code = "import subprocess; print('begun', flush=True); subprocess.Popen(['sleep', '6013']); print('over')";
    gives(&shim(&shims, "python", &scratch).args(["-c", code]).output().unwrap(), "begun\nover\n", 0);
    assert!(begin.elapsed() < scaled(Duration::from_secs(5)), "{:?}", begin.elapsed());
    no_process_is_left("sleep 6013");
}

test!(Both, the_policys_wall_clock_is_124);
fn the_policys_wall_clock_is_124() {
    let policies = PolicyDirectory::new();
    let policy = policies.write("own", &derived(&format!("[limits]\nwall = \"{}\"", scaled_limit(500))));
    let shims = install(&["--policy", &policy]);
    let output = shim(&shims, "sh", &scratch()).args(["-c", "echo kept; sleep 600"]).output().unwrap();
    gives(&output, "kept\n", 124);
    assert_eq!(said(&output), "stockade: the wall clock ran out\n");
}

test!(Both, a_working_directory_that_cannot_be_scratch_is_refused);
fn a_working_directory_that_cannot_be_scratch_is_refused() {
    let shims = install(&[]);
    let cases = [
        (PathBuf::from("/"), "the root or a home directory itself"),
        (PathBuf::from("/usr/sbin"), "home directory itself"),
        (PathBuf::from("/etc"), if is_root() { "the system's /etc" } else { "not to the caller" }),
        (PathBuf::from("/var/lib"), if is_root() { "the system's /var" } else { "not to the caller" }),
    ];
    for (directory, why) in cases {
        let output = shim(&shims, "python", &directory).args(["-c", "print('ran')"]).output().unwrap();
        gives(&output, "", 2);
        let words = said(&output);
        assert!(words.contains(&format!("the working directory {}", text(&directory))) && words.contains(why), "{words}");
    }
    let gone = scratch_named("gone");
    let program = shims.join("python");
    let script = format!("rmdir {0} && exec {1} -c 'print(1)'", text(&gone), text(&program));
    let output = run_under(&["sh", "-c", &script]).current_dir(&gone).output().unwrap();
    gives(&output, "", 125);
    assert!(said(&output).contains("working directory"), "{}", said(&output));
}

test!(Both, shims_with_a_scratch_serve_callers_that_are_elsewhere);
fn shims_with_a_scratch_serve_callers_that_are_elsewhere() {
    let scratch = scratch();
    let below = scratch.join("below");
    fs::create_dir(&below).unwrap();
    let script = format!("cd {} && id -un && pwd && echo made > made", text(&scratch));
    // The control: without it, the caller is told of it.
    let refused = shim(&install(&[]), "sh", Path::new("/")).args(["-c", &script]).output().unwrap();
    gives(&refused, "", 2);
    assert!(said(&refused).contains("install them with `--scratch DIR`"), "{}", said(&refused));
    let shims = install(&["--scratch", text(&scratch)]);
    let output = shim(&shims, "sh", Path::new("/")).args(["-c", &script]).output().unwrap();
    gives(&output, &format!("sandbox\n{}\n", text(&scratch)), 0);
    assert_eq!(fs::read_to_string(scratch.join("made")).unwrap(), "made\n");
    // Below it the working directory is the scratch, as it is without.
    let output = shim(&shims, "sh", &below).args(["-c", "pwd; ls ../made 2>/dev/null"]).output().unwrap();
    gives(&output, &format!("{}\n", text(&below)), 2);
    let listed = stockade(["shim", "list", text(&shims)]).output().unwrap();
    assert!(String::from_utf8_lossy(&listed.stdout).contains(&format!("sh under policy default, scratch {}\n", text(&scratch))));
}

test!(Both, code_cannot_replace_the_shims_or_the_program);
fn code_cannot_replace_the_shims_or_the_program() {
    let scratch = scratch();
    let inside = scratch.join("shims");
    assert!(stockade(["shim", "install", text(&inside)]).output().unwrap().status.success());
    let refused = shim(&inside, "python", &scratch).args(["-c", "print('ran')"]).output().unwrap();
    gives(&refused, "", 2);
    assert!(said(&refused).contains(text(&inside.join("python"))) && said(&refused).contains("could then replace"), "{}", said(&refused));
    // By another path to it, no more.
    let link = directory().join("link");
    symlink(&inside, &link).unwrap();
    gives(&shim(&link, "python", &scratch).args(["-c", "print('ran')"]).output().unwrap(), "", 2);
    // The program likewise.
    let copy = scratch.join("stockade");
    fs::copy(program_path().unwrap(), &copy).unwrap();
    let outside = directory().join("outside");
    assert!(run_under(&[text(&copy), "shim", "install", text(&outside)]).output().unwrap().status.success());
    let refused = shim(&outside, "python", &scratch).args(["-c", "print('ran')"]).output().unwrap();
    gives(&refused, "", 2);
    assert!(said(&refused).contains(text(&copy)), "{}", said(&refused));
    // The controls: the same shims, from a directory that holds neither.
    let other = scratch_named("other");
    gives(&shim(&inside, "python", &other).args(["-c", "print('ran')"]).output().unwrap(), "ran\n", 0);
    gives(&shim(&outside, "python", &other).args(["-c", "print('ran')"]).output().unwrap(), "ran\n", 0);
}

/// As AutoGen (asyncio, SIGTERM, then the pipes' end), AG2 (subprocess by name, SIGKILL) and
/// Microsoft's framework (a shell fed through pipes) do it: argv is the shims' directory and
/// the working one; what was seen is printed as JSON.
const AGENTS: &str = r#"
import asyncio, hashlib, json, os, subprocess, sys, time
shims, work_dir, slow = sys.argv[1], sys.argv[2], float(sys.argv[3])
env = dict(os.environ, PATH=shims + ":" + os.environ["PATH"], OPENAI_API_KEY="sk-secret")
found = {}
def write(code, ending="py"):
    path = os.path.join(work_dir, f"tmp_code_{hashlib.sha256(code.encode()).hexdigest()}.{ending}")
    with open(path, "w") as file: file.write(code)
    os.chmod(path, 0o644)
    return path
async def autogen(program, code, timeout):
    begin = time.monotonic()
    process = await asyncio.create_subprocess_exec(program, write(code), cwd=work_dir, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=env)
    try:
        out, err = await asyncio.wait_for(process.communicate(), timeout)
        return process.returncode, err.decode() + out.decode(), time.monotonic() - begin
    except asyncio.TimeoutError:
        process.terminate()
        await process.wait()
        return 124, "", time.monotonic() - begin
def ag2(name, code, timeout, ending="py"):
    begin = time.monotonic()
    try:
        done = subprocess.run([name, write(code, ending)], cwd=work_dir, capture_output=True, text=True, encoding="utf-8", timeout=timeout, env=env)
        return done.returncode, done.stderr + done.stdout, time.monotonic() - begin
    except subprocess.TimeoutExpired:
        return 124, "", time.monotonic() - begin
long = 20 * slow
found["autogen"] = asyncio.run(autogen(os.path.join(shims, "python"), "import getpass, os\nprint(getpass.getuser(), 'OPENAI_API_KEY' in os.environ)", long))[:2]
found["autogen_bytes"] = asyncio.run(autogen(os.path.join(shims, "python"), "import sys; sys.stdout.buffer.write(b'\\xff')", long))[:2]
found["autogen_background"] = asyncio.run(autogen("bash", "sleep 6014 & echo said", long))[:2]
code, _, took = asyncio.run(autogen("bash", "sleep 6014 & sleep 6014", 2 * slow))
found["autogen_timeout"] = [code, took < 4 * slow]
found["ag2"] = ag2("python", "import getpass; print(getpass.getuser()); open('made', 'w').write('x')", long)[:2]
found["ag2_shell"] = ag2("sh", "python3 -c 'import getpass; print(getpass.getuser())'", long, "sh")[:2]
code, _, took = ag2("python", "import subprocess, time; subprocess.Popen(['sleep', '6014']); time.sleep(6014)", 2 * slow)
found["ag2_timeout"] = [code, took < 4 * slow]
shell = subprocess.Popen(["bash"], cwd=work_dir, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1)
answers = []
for command in ("cd .; x=5", "echo $((x + 1)); false"):
    shell.stdin.write(f"{command}\nprintf 'MARK %s\\n' $?\n")
    while not (line := shell.stdout.readline()).startswith("MARK"): answers.append(line)
    answers.append(line)
shell.stdin.write("exit\n")
found["shell"] = [shell.wait(long), answers]
print(json.dumps(found))
"#;

test!(Both, agents_that_start_python_by_name_start_it_in_a_sandbox);
fn agents_that_start_python_by_name_start_it_in_a_sandbox() {
    let shims = install(&[]);
    let scratch = scratch();
    let slow = scaled(Duration::from_secs(1)).as_secs().to_string();
    let output = run_under(&["/usr/bin/python3", "-c", AGENTS, text(&shims), text(&scratch), &slow]).output().unwrap();
    let found: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", said(&output)));
    let wanted = json!({
        "autogen": [0, "sandbox False\n"],
        "autogen_bytes": [0, "\u{fffd}"],
        "autogen_background": [0, "said\n"],
        "autogen_timeout": [124, true],
        "ag2": [0, "sandbox\n"],
        "ag2_shell": [0, "sandbox\n"],
        "ag2_timeout": [124, true],
        "shell": [0, ["MARK 0\n", "6\n", "MARK 1\n"]],
    });
    assert_eq!(found, wanted, "{}", said(&output));
    assert_eq!(fs::read_to_string(scratch.join("made")).unwrap(), "x");
    no_process_is_left("sleep 6014");
}

test!(Both, a_virtual_environment_is_the_interpreters_own);
fn a_virtual_environment_is_the_interpreters_own() {
    let venv = directory().join("venv");
    let made = run_under(&["/usr/bin/python3", "-m", "venv", "--without-pip", text(&venv)]).output().unwrap();
    assert!(made.status.success(), "{}", said(&made));
    let python = venv.join("bin/python");
    let shims = install(&["--runtime", &format!("python={}", text(&python))]);
    let code = "import sys; print(sys.executable, sys.prefix, sys.prefix != sys.base_prefix)";
    let output = shim(&shims, "python3", &scratch()).args(["-c", code]).output().unwrap();
    gives(&output, &format!("{} {} True\n", text(&python), text(&venv)), 0);
    let listed = stockade(["shim", "list", text(&shims)]).output().unwrap();
    assert!(String::from_utf8_lossy(&listed.stdout).contains(&format!("python is {}", text(&python))));
}

test!(Both, a_shim_of_another_version_says_what_to_do);
fn a_shim_of_another_version_says_what_to_do() {
    let shims = install(&[]);
    let scratch = scratch();
    let path = shims.join("python");
    let good = fs::read_to_string(&path).unwrap();
    let first = good.lines().next().unwrap();
    for (text_of_it, why) in [
        (good.replace("runtime python", "runtime python\nfuture yes"), "`future yes`"),
        (format!("{first}\n"), "names no runtime"),
        (format!("{first}\nruntime python\nexact no\n"), "`exact no`"),
    ] {
        fs::write(&path, text_of_it).unwrap();
        let output = shim(&shims, "python", &scratch).args(["-c", "print(1)"]).output().unwrap();
        gives(&output, "", 125);
        assert!(said(&output).contains(why) && said(&output).contains("shim install"), "{}", said(&output));
    }
    fs::write(&path, format!("{first}\nruntime cobol\n")).unwrap();
    let output = shim(&shims, "python", &scratch).output().unwrap();
    assert!(output.status.code() == Some(2) && said(&output).contains("cobol"), "{}", said(&output));
    gives(&stockade(["shim-exec"]).output().unwrap(), "", 125);
    gives(&stockade(["shim-exec", text(&directory().join("log"))]).output().unwrap(), "", 125);
}
