//! What code or its caller did against limits, clocks and signals, as attackers found it; each
//! with a control.

use std::{
    ffi::OsStr,
    fs::File,
    io::{Read, Write},
    os::{fd::OwnedFd, unix::ffi::OsStrExt},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use nix::{
    fcntl::OFlag,
    sys::{
        signal::{Signal, kill},
        stat::Mode,
    },
    unistd::mkfifo,
};
use serde_json::{Value, json};

use crate::support::{
    exec::{ExecResult, exec, program_path, run_under, run_with_stdin, scratch, stockade, text},
    runner::{directory, eventually, test},
    session::Session,
    timeouts::{scaled, scaled_limit},
};

/// A request that must end within its wall clock.
#[track_caller]
fn ends_in_time(code: &str, verdicts: &[&str]) -> ExecResult {
    let wall = Duration::from_secs(2);
    let begun = Instant::now();
    let done = exec(json!({"code": code, "scratch": text(&scratch()), "limits": {"wall": scaled_limit(2000)}}));
    // Each attack held the launcher for four times as long, and more.
    assert!(begun.elapsed() < scaled(wall) + scaled(Duration::from_secs(2)), "{:?}: {}", begun.elapsed(), done.brief());
    assert!(verdicts.iter().any(|verdict| done["verdict"] == **verdict), "{}", done.brief());
    done
}

test!(serial Both, processes_that_run_from_the_count_do_not_stop_the_clock, seconds 60);
fn processes_that_run_from_the_count_do_not_stop_the_clock() {
    // Each forks its successor and then closes what it holds bit by bit: who looks through the
    // descriptors of one after the other comes to an old one quickly, and waits for a young one.
    let code = "\
import os, signal, time
open('f', 'w')
os.fork() and signal.pause()
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for _ in range(900): os.dup(1)
while True:
    time.sleep(0.002)
    try:
        if os.fork() == 0: continue
    except OSError: continue
    for step in range(1, 11):
        time.sleep(0.004); os.closerange(903 - 90 * step, 4096)
    time.sleep(0.008); os._exit(0)";
    ends_in_time(code, &["wall_timeout", "disk_limit"]);
}

test!(serial Both, files_that_run_from_the_count_do_not_stop_the_clock, seconds 60);
fn files_that_run_from_the_count_do_not_stop_the_clock() {
    // A large directory is moved to where the count comes next, whenever it is entered.
    let code = "\
import ctypes, os, struct
libc = ctypes.CDLL(None)
os.mkdir('top')
for i in range(2000): os.mkdir(f'top/{i}')
os.mkdir('S')
for i in range(4000): os.mkdir(f'S/{i}')
order = os.listdir('top')
os.rename('S', f'top/{order[0]}/S')
watch = libc.inotify_init1(0)
libc.inotify_add_watch(watch, f'top/{order[0]}/S'.encode(), 0x20)
at = 0
while True:
    events, offset, entered = os.read(watch, 65536), 0, False
    while offset < len(events):
        length = struct.unpack_from('I', events, offset + 12)[0]
        offset += 16 + length
        entered |= length == 0
    if entered:
        next = (at + 1) % len(order)
        os.rename(f'top/{order[at]}/S', f'top/{order[next]}/S')
        at = next";
    // Counted twice it is more than the limit, and more than that is not counted.
    ends_in_time(code, &["wall_timeout", "disk_limit"]);
}

test!(Both, a_large_scratch_is_counted_to_its_end);
/// The control of both: a count that takes its time ends nothing.
fn a_large_scratch_is_counted_to_its_end() {
    let code = "import os, time\nfor d in range(12):\n    os.mkdir(str(d))\n    for i in range(1000): os.close(os.open(f'{d}/{i}', os.O_CREAT))\nfor _ in range(40): os.fork() or (time.sleep(1.5), os._exit(0))\nfor _ in range(900): os.dup(1)\ntime.sleep(1.5)\nprint('done')";
    let done = exec(json!({"code": code, "scratch": text(&scratch()), "limits": {"wall": scaled_limit(30_000), "scratch_size": "100MiB"}}));
    done.succeeded().expect(json!({"output": "done\n"}));
}

fn cpu_time(done: &ExecResult) -> Duration {
    let of = |name: &str| done["usage"][name].as_u64().unwrap_or_else(|| panic!("{}", done["usage"]));
    Duration::from_millis(of("cpu_user_ms") + of("cpu_system_ms"))
}

test!(serial Both, cpu_time_of_what_is_killed_is_measured);
fn cpu_time_of_what_is_killed_is_measured() {
    // Ended by the clock; left behind by its parent; both by processes that no parent waits for.
    let endless = exec(json!({"code": "while True: pass", "limits": {"wall": scaled_limit(1000)}}));
    endless.expect(json!({"verdict": "wall_timeout"}));
    let left = "import os, time\nready, done = os.pipe()\nif os.fork() == 0:\n    end = time.process_time() + 0.5\n    while time.process_time() < end: pass\n    os.write(done, b'.')\n    while True: time.sleep(600)\nos.read(ready, 1)";
    let left = exec(json!({"code": left, "limits": {"wall": scaled_limit(20_000)}}));
    left.succeeded();
    for done in [&endless, &left] {
        assert!(cpu_time(done) >= Duration::from_millis(400), "{}", done["usage"]);
    }
    // The control: the same time asleep is counted for no process.
    let asleep = exec(json!({"code": "import time; time.sleep(600)", "limits": {"wall": scaled_limit(1000)}}));
    assert!(cpu_time(&asleep) < Duration::from_millis(400), "{}", asleep["usage"]);
}

test!(Both, no_core_is_dumped_whatever_code_sets);
fn no_core_is_dumped_whatever_code_sets() {
    let code = "\
import ctypes, resource
from resource import RLIMIT_CORE, RLIMIT_NOFILE, getrlimit, setrlimit
def tried(which, limits):
    before = getrlimit(which)
    setrlimit(which, limits)
    return getrlimit(which) == before
def by_number(which):
    before = getrlimit(which)
    limits = (ctypes.c_ulong * 2)(0, before[1])
    answer = ctypes.CDLL(None).syscall(160, which, limits)
    return answer, getrlimit(which) == before
print(tried(RLIMIT_CORE, (0, 0)), tried(RLIMIT_CORE, (4096, 4096)), by_number(RLIMIT_CORE), tried(RLIMIT_NOFILE, (200, 1000)), by_number(RLIMIT_NOFILE)[0])";
    // The control is another limit, which goes down.
    let done = exec(json!({"code": code}));
    done.succeeded().expect(json!({"output": "True True (0, True) False 0\n", "denials": []}));
}

test!(RootOnly, code_takes_no_turns_before_others, needs[Program("chrt")]);
fn code_takes_no_turns_before_others() {
    let code = "import os; print(os.sched_getscheduler(0), os.nice(0), int(open('/proc/self/oom_score_adj').read()) >= 0)";
    let request = json!({"code": code}).to_string();
    let program = program_path().unwrap();
    let with_priority = |words: &[&str]| {
        let done = ExecResult::of(run_with_stdin(&mut run_under(&[words, &[text(&program), "exec"]].concat()), request.as_bytes()));
        done.succeeded().output().to_owned()
    };
    let other = nix::libc::SCHED_OTHER;
    assert_eq!(with_priority(&["chrt", "-f", "10"]), format!("{other} 0 True\n"));
    assert_eq!(with_priority(&["chrt", "-r", "10"]), format!("{other} 0 True\n"));
    assert_eq!(with_priority(&["nice", "-n", "-10"]), format!("{other} 0 True\n"));
    // The control: what comes after others stays there.
    assert_eq!(with_priority(&["nice", "-n", "5"]), format!("{other} 5 True\n"));
    assert_eq!(with_priority(&["chrt", "-b", "0"]), format!("{} 0 True\n", nix::libc::SCHED_BATCH));
}

test!(Both, a_stream_is_used_only_as_it_is_open);
fn a_stream_is_used_only_as_it_is_open() {
    let path = directory().join("fifo");
    mkfifo(&path, Mode::from_bits_truncate(0o666)).unwrap();
    let open = |flags: OFlag| -> OwnedFd { nix::fcntl::open(&path, flags | OFlag::O_NONBLOCK, Mode::empty()).unwrap() };
    // Kept open both ways, so that what is in it stays.
    let mut fifo = File::from(open(OFlag::O_RDWR));
    fifo.write_all(b"another's").unwrap();
    let run = |words: &[&str], stdin: Stdio, stdout: Stdio| {
        let mut command = stockade(["run", "--"].iter().chain(words));
        command.stdin(stdin).stdout(stdout).output().unwrap()
    };
    // A stream open for writing only is no input, and the other way round.
    let output = run(&["cat"], open(OFlag::O_WRONLY).into(), Stdio::piped());
    assert_eq!(output.stdout, b"", "{output:?}");
    run(&["echo", "forged"], Stdio::null(), open(OFlag::O_RDONLY).into());
    let mut bytes = [0; 64];
    let length = fifo.read(&mut bytes).unwrap();
    assert_eq!(bytes.get(..length), Some(b"another's".as_slice()));
    // The control: open as it should be, both pass.
    fifo.write_all(b"for cat").unwrap();
    assert_eq!(run(&["head", "-c", "7"], open(OFlag::O_RDONLY).into(), Stdio::piped()).stdout, b"for cat");
    run(&["echo", "written"], Stdio::null(), open(OFlag::O_WRONLY).into());
    let length = fifo.read(&mut bytes).unwrap();
    assert_eq!(bytes.get(..length), Some(b"written\n".as_slice()));
}

test!(Both, a_signal_ends_a_session_without_a_reader);
fn a_signal_ends_a_session_without_a_reader() {
    let request = json!({"op": "run", "code": "print('x' * 900000)"}).to_string();
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        let mut session = Session::open(&[]);
        // An answer that no pipe holds.
        session.send(&request);
        assert!(eventually(Duration::from_secs(10), || session.has_begun_to_answer()), "it writes no answer");
        kill(session.pid(), signal).unwrap();
        assert_eq!(session.ended().code(), Some(128 + signal as i32));
    }
    // The control: a reader gets it, and the next.
    let mut session = Session::open(&[]);
    session.send(&request);
    session.send(&request);
    for _ in 0..2 {
        assert_eq!(session.answer()["output"].as_str().map(str::len), Some(900_001));
    }
}

test!(RootOnly, the_proc_of_another_pid_namespace_is_refused);
fn the_proc_of_another_pid_namespace_is_refused() {
    let program = program_path().unwrap();
    let request = json!({"code": "print(6*7)"}).to_string();
    let ask = |options: &[&str]| {
        let words = [&["unshare", "--mount", "--pid", "--fork"], options, &[text(&program), "exec"]].concat();
        ExecResult::of(run_with_stdin(&mut run_under(&words), request.as_bytes()))
    };
    ask(&[]).broke("no_proc", &["another PID namespace", "--mount-proc"]);
    ask(&["--mount-proc"]).succeeded().expect(json!({"output": "42\n"}));
}

test!(Both, a_small_stack_is_raised_or_refused_in_words);
fn a_small_stack_is_raised_or_refused_in_words() {
    let program = program_path().unwrap();
    let request = json!({"code": "print(6*7)"}).to_string();
    let ask = |limit: &str| {
        run_with_stdin(&mut run_under(&["prlimit", &format!("--stack={limit}"), "--", text(&program), "exec"]), request.as_bytes())
    };
    let output = ask("140000:140000");
    assert_eq!(output.status.code(), Some(125), "{output:?}");
    ExecResult::of(output).broke("limits_of_caller", &["256 KiB", "ulimit -Hs"]);
    ExecResult::of(ask("140000:")).succeeded().expect(json!({"output": "42\n"}));
}

test!(Both, few_descriptors_do_not_end_a_run);
fn few_descriptors_do_not_end_a_run() {
    let program = program_path().unwrap();
    let code = "import os, time\nfor _ in range(150):\n    os.mkdir('d'); os.chdir('d')\ntime.sleep(0.5)\nprint('done')";
    let request = json!({"code": code, "scratch": text(&scratch())}).to_string();
    let mut limited = run_under(&["prlimit", "--nofile=200:", "--", text(&program), "exec"]);
    ExecResult::of(run_with_stdin(&mut limited, request.as_bytes())).succeeded().expect(json!({"output": "done\n"}));
}

test!(RootOnly, a_sudo_variable_that_is_no_number_makes_no_caller_root);
fn a_sudo_variable_that_is_no_number_makes_no_caller_root() {
    let ask = |uid: &[u8]| -> Value {
        let mut command: Command = stockade(["exec"]);
        command.env("SUDO_UID", OsStr::from_bytes(uid)).env("SUDO_GID", "0");
        ExecResult::of(run_with_stdin(&mut command, br#"{"code": ""}"#)).result
    };
    for uid in [b"\xff".as_slice(), b"", b"+0", b"-0", b"0x0", b" 0"] {
        assert_eq!((&ask(uid)["reason"], &ask(uid)["started"]), (&json!("sudo_variables"), &json!(false)), "{uid:?}");
    }
    assert_eq!(ask(b"0")["verdict"], "exited");
}
