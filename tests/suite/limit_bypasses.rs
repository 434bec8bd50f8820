//! What code or its caller did against limits, clocks and signals, as attackers found it; each
//! with a control.

use std::{
    ffi::OsStr,
    fs::File,
    io::{Read, Write},
    os::{
        fd::OwnedFd,
        unix::{
            ffi::OsStrExt,
            fs::{MetadataExt, PermissionsExt},
        },
    },
    process::{Child, Command, Stdio},
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
    control::{Control, denied},
    exec::{
        ExecResult, OWNER, chown_to_owner, exec, exec_with, program_path, run_under, run_with_stdin, scratch, scratch_named, stockade,
        text, write_file,
    },
    runner::{directory, eventually, is_root, test, wait_within},
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

test!(serial Both, files_that_run_from_the_count_do_not_stop_the_clock, needs [SlowAsUser], seconds 60);
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

test!(serial Both, cpu_time_of_what_is_killed_is_measured, needs [SlowAsUser]);
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
    // Nor may code take it back where the launcher's limits would let it.
    let limits = "import resource\nfor line in open('/proc/self/limits'):\n    if 'priority' in line: print(line.split()[-2:])";
    crate::support::exec::python(limits).succeeded().expect(json!({"output": "['0', '0']\n['0', '0']\n"}));
}

test!(Both, a_killed_run_ends_at_once_whatever_its_share_of_a_cpu, needs [Cgroup, SlowAsUser], seconds 90);
fn a_killed_run_ends_at_once_whatever_its_share_of_a_cpu() {
    let code = "import os, time\nfor n in range(40):\n    if os.fork() == 0: time.sleep(600)\ntime.sleep(600)";
    let wall = Duration::from_secs(8);
    let begun = Instant::now();
    let limits = json!({"cpus": 0.02, "wall": scaled_limit(8_000), "processes": 50});
    exec(json!({"code": code, "limits": limits})).expect(json!({"verdict": "wall_timeout"}));
    let late = begun.elapsed().saturating_sub(scaled(wall));
    assert!(late < scaled(Duration::from_secs(1)), "{late:?}");
}

test!(RootOnly, a_launcher_that_cannot_fork_for_its_deadline_says_so, needs[Program("chrt")]);
fn a_launcher_that_cannot_fork_for_its_deadline_says_so() {
    let program = program_path().unwrap();
    let request = json!({"code": "print(6*7)"}).to_string();
    let ask = |options: &[&str]| {
        let deadline = ["chrt", "-d", "-T", "5000000", "-D", "10000000", "-P", "10000000"];
        let words = [&deadline, options, &["0", text(&program), "exec"]].concat();
        ExecResult::of(run_with_stdin(&mut run_under(&words), request.as_bytes()))
    };
    ask(&[]).broke("namespaces_refused", &["SCHED_DEADLINE", "chrt -o 0"]);
    // The control: the same launcher, whose children have the default policy.
    ask(&["-R"]).succeeded().expect(json!({"output": "42\n"}));
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

test!(Both, signals_that_end_nothing_cost_a_slow_reader_no_output, seconds 60);
/// Programs in Go send SIGURG to themselves and runc passes it on; a terminal sends SIGWINCH.
fn signals_that_end_nothing_cost_a_slow_reader_no_output() {
    // More than the pipe behind the launcher holds, less than that and the one before it.
    const BYTES: usize = 100_000;
    let begun = |name: &str| {
        let place = scratch_named(name);
        let code = format!("import os; os.write(1, b'x' * {BYTES}); os.close(1); open('written', 'w').close()");
        let mut command = stockade(["run", "--scratch", text(&place), "--", "python3", "-c", &code]);
        let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        assert!(eventually(Duration::from_secs(20), || place.join("written").exists()), "it writes nothing");
        let pid = nix::unistd::Pid::from_raw(child.id().cast_signed());
        // Whatever the launcher does by now, it has ended the program before these end.
        let until = Instant::now() + scaled(Duration::from_secs(1));
        assert!(eventually(Duration::from_secs(5), || {
            for harmless in [Signal::SIGURG, Signal::SIGWINCH] {
                kill(pid, harmless).unwrap();
            }
            Instant::now() > until
        }));
        (child, pid)
    };
    let (child, _) = begun("read");
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), output.stdout.len()), (Some(0), BYTES));
    // The control: a signal that ends the launcher ends its waiting for a reader.
    let (mut child, pid) = begun("ended");
    kill(pid, Signal::SIGTERM).unwrap();
    assert!(wait_within(&mut child, Duration::from_secs(10)).is_some(), "it waits for its reader");
    let mut rest = Vec::new();
    child.stdout.take().unwrap().read_to_end(&mut rest).unwrap();
    assert!(rest.len() < BYTES, "{}", rest.len());
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
    ExecResult::of(output).broke("limits_of_caller", &["1 MiB", "ulimit -Hs"]);
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

/// Code that makes nameless files of 8 MiB, 160 MiB in all, by `keep(fd)`.
fn nameless(keep: &str, scratch_size: &str) -> ExecResult {
    let code = format!(
        "import ctypes, mmap, os, socket, sys, threading, time\nlibc = ctypes.CDLL(None, use_errno=True)\nblock = b'x' * (8 << 20)\ndef make(number):\n    fd = os.open(f'f{{number}}', os.O_CREAT | os.O_RDWR)\n    os.unlink(f'f{{number}}')\n    os.write(fd, block)\n    return fd\n{keep}\nfor number in range(20):\n    keep(make(number)); time.sleep(0.02)\ntime.sleep(1)\nprint('kept')"
    );
    let limits = json!({"wall": scaled_limit(20_000), "scratch_size": scratch_size});
    exec(json!({"code": code, "scratch": text(&scratch_named(scratch_size)), "limits": limits}))
}

/// More than the limit is found; less than it is not.
#[track_caller]
fn is_counted(keep: &str) {
    nameless(keep, "32MiB").expect(json!({"verdict": "disk_limit", "code": 137, "output": "", "limits_hit": []}));
    nameless(keep, "400MiB").succeeded().expect(json!({"output": "kept\n"}));
}

test!(Both, nameless_files_of_a_process_that_is_not_dumpable_are_counted, seconds 60);
fn nameless_files_of_a_process_that_is_not_dumpable_are_counted() {
    is_counted("libc.prctl(4, 0, 0, 0, 0)\nheld = []\nkeep = held.append");
}

test!(Both, nameless_files_of_a_thread_with_its_own_descriptors_are_counted, seconds 60);
fn nameless_files_of_a_thread_with_its_own_descriptors_are_counted() {
    // The first thread is gone, and /proc/PID/fd with it.
    is_counted(
        "held = []\nkeep = held.append\ndef rest():\n    for number in range(20):\n        keep(make(number)); time.sleep(0.02)\n    time.sleep(1); os.write(1, b'kept\\n'); os._exit(0)\nthreading.Thread(target=rest).start()\nlibc.syscall(60, 0)",
    );
}

/// What no count finds is bounded by what the file system has lost.
#[track_caller]
fn is_missed(keep: &str) {
    let done = nameless(keep, "32MiB");
    done.expect(json!({"verdict": "disk_limit", "code": 137, "reason": "scratch_uncounted", "output": ""}));
    nameless(keep, "400MiB").succeeded().expect(json!({"output": "kept\n"}));
}

test!(serial Both, nameless_files_that_are_only_mapped_end_the_run, seconds 60);
fn nameless_files_that_are_only_mapped_end_the_run() {
    is_missed(
        "libc.mmap.restype = ctypes.c_void_p\nlibc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]\ndef keep(fd):\n    assert libc.mmap(None, 4096, 1, 1, fd, 0); os.close(fd)",
    );
}

test!(serial Both, nameless_files_on_their_way_end_the_run, seconds 60);
fn nameless_files_on_their_way_end_the_run() {
    is_missed("sender, receiver = socket.socketpair()\ndef keep(fd):\n    socket.send_fds(sender, [b'.'], [fd]); os.close(fd)");
}

test!(serial Both, nameless_files_that_a_thread_has_mapped_whose_process_looks_ended_end_the_run, seconds 60);
fn nameless_files_that_a_thread_has_mapped_whose_process_looks_ended_end_the_run() {
    // The first thread is gone, and the text of /proc/PID/maps with it.
    is_missed(
        "libc.mmap.restype = ctypes.c_void_p\nlibc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]\ndef keep(fd):\n    assert libc.mmap(None, 4096, 1, 1, fd, 0); os.close(fd)\ndef rest():\n    for number in range(20):\n        keep(make(number)); time.sleep(0.02)\n    time.sleep(1); os.write(1, b'kept\\n'); os._exit(0)\nthreading.Thread(target=rest).start()\nlibc.syscall(60, 0)",
    );
}

/// A program of one page that copies its end to other memory, goes on there, unmaps itself and
/// sleeps: its file is no longer mapped then.
const UNMAPS_ITSELF: &str = r"
import struct, subprocess
code = bytes.fromhex('6a095831ffbe001000006a075a6a22415a6aff41584531c90f054889c7488d35070000006a2059f3a4ffe0bf00004000be001000006a0b580f056a22580f05ebf9')
program = struct.pack('<16sHHIQQQIHHHHHH', b'\x7fELF\2\1\1', 2, 62, 1, 0x400078, 64, 0, 0, 64, 56, 1, 0, 0, 0)
program += struct.pack('<IIQQQQQQ', 1, 5, 0, 0x400000, 0x400000, 0x1000, 0x1000, 0x1000) + code
def make(number):
    fd = os.open(f'f{number}', os.O_CREAT | os.O_RDWR, 0o755)
    os.write(fd, program + block); os.close(fd)
    return number
running = []
def keep(number):
    running.append(subprocess.Popen([f'./f{number}'])); os.unlink(f'f{number}')
";

test!(Both, nameless_files_that_are_a_running_program_are_counted, seconds 60);
fn nameless_files_that_are_a_running_program_are_counted() {
    is_counted(UNMAPS_ITSELF);
}

test!(Both, nameless_directories_that_are_a_working_directory_are_counted, needs [SlowAsUser], seconds 60);
fn nameless_directories_that_are_a_working_directory_are_counted() {
    // A directory stays as large as it was, on most file systems.
    let code = "\
import os, signal
def keep():
    os.mkdir('d'); at = os.open('d', os.O_RDONLY); os.close(os.open('one', os.O_CREAT))
    names = [f'{number:05}' + 'n' * 245 for number in range(12000)]
    for name in names: os.link('one', name, dst_dir_fd=at)
    for name in names: os.unlink(name, dir_fd=at)
    size = os.fstat(at).st_blocks * 512
    if os.fork() == 0:
        os.fchdir(at); os.close(at); os.rmdir(os.getcwd())
        os.write(writes, b'.'); signal.pause()
    os.close(at); os.read(reads, 1)
    return size
reads, writes = os.pipe()
kept = sum(keep() for _ in range(3))
import time; time.sleep(3)
print('kept', kept > 8 << 20)";
    let ask = |size: &str| {
        exec(json!({"code": code, "scratch": text(&scratch_named(size)), "limits": {"wall": scaled_limit(40_000), "scratch_size": size}}))
    };
    let control = ask("400MiB");
    control.succeeded();
    if control["output"] == "kept True\n" {
        ask("8MiB").expect(json!({"verdict": "disk_limit", "code": 137, "output": "", "limits_hit": []}));
    }
}

/// Keeps files in sockets of which each end is in a message to the other. The kernel frees such when
/// another socket is closed, by any process, so on a busy host this comes to nothing by itself.
const UNREACHABLE: &str = "
import atexit, select
ends = []
def keep(fd):
    one, other = socket.socketpair(); reads, writes = os.pipe()
    socket.send_fds(one, [b'.'], [fd, writes, other.fileno()]); socket.send_fds(other, [b'.'], [one.fileno()])
    os.close(fd); os.close(writes); one.close(); other.close(); ends.append(reads)
atexit.register(lambda: print(len(ends) - len(select.select(ends, [], [], 0)[0]), 'left'))
";

/// How many are left of them at the end.
#[track_caller]
fn left(done: &ExecResult) -> u32 {
    let output = done.succeeded()["output"].as_str().unwrap().to_owned();
    output.strip_prefix("kept\n").and_then(|line| line.strip_suffix(" left\n")?.parse().ok()).unwrap_or_else(|| panic!("{output}"))
}

test!(serial Both, nameless_files_in_sockets_that_nothing_leads_to_are_freed, seconds 60);
fn nameless_files_in_sockets_that_nothing_leads_to_are_freed() {
    // Beyond 40 MiB, of 8 MiB each, the launcher closes one; others write to the file system too.
    let (few, most) = (left(&nameless(UNREACHABLE, "32MiB")), left(&nameless(UNREACHABLE, "400MiB")));
    assert!(few <= 10, "{few} left, and {most} where the limit is higher");
}

test!(Both, nameless_files_cannot_be_kept_by_a_landlock_rule);
fn nameless_files_cannot_be_kept_by_a_landlock_rule() {
    let code = "\
import ctypes, os, struct
libc = ctypes.CDLL(None, use_errno=True)
def call(*words):
    done = libc.syscall(*words)
    return done if done >= 0 else -ctypes.get_errno()
version = call(444, None, 0, 1)
rules = call(444, struct.pack('Q', 1 << 2), 8, 0)
fd = os.open('f', os.O_CREAT | os.O_RDWR)
os.write(fd, b'x' * (8 << 20))
free = os.statvfs('.').f_bfree
rule = call(445, rules, 1, struct.pack('<Qi', 1 << 2, fd), 0)
os.unlink('f'); os.close(fd)
print(min(version, 1), rule, os.statvfs('.').f_bfree > free + 1024)";
    let ask = |scratch: Option<&str>| exec(json!({"code": code, "scratch": scratch}));
    // EOPNOTSUPP, as of a kernel that has Landlock switched off, and no denial.
    let inside = scratch();
    let refused = ask(Some(text(&inside)));
    refused.succeeded().expect(json!({"error": "", "denials": []}));
    assert!(refused["output"].as_str().unwrap().starts_with("-95 -95 "), "{}", refused.brief());
    // The control: on the run's own tmpfs, whose size the kernel keeps, a rule keeps a file in being.
    ask(None).succeeded().expect(json!({"output": "1 0 False\n"}));
}

test!(serial Both, files_that_are_moved_behind_the_count_are_found, needs [SlowAsUser], seconds 60);
fn files_that_are_moved_behind_the_count_are_found() {
    // Whenever the count opens the directory that the files are in, they are moved to the other.
    let code = "\
import ctypes, os, struct, threading, time
libc = ctypes.CDLL(None)
for name in 'ab':
    os.mkdir(name)
    for number in range(1500): os.close(os.open(f'{name}/{number}', os.O_CREAT))
os.mkdir('a/S')
at = 'a'
def write():
    with open('a/S/0', 'wb', 0) as file:
        for _ in range(160): file.write(b'x' * (1 << 20)); time.sleep(0.005)
    time.sleep(1); os.write(1, b'kept\\n'); os._exit(0)
threads = threading.Thread(target=write); threads.start()
watch = libc.inotify_init1(0)
names = {libc.inotify_add_watch(watch, name.encode(), 0x20): name for name in 'ab'}
while True:
    events, offset = os.read(watch, 65536), 0
    while offset < len(events):
        number, _, _, length = struct.unpack_from('iIII', events, offset)
        offset += 16 + length
        if length == 0 and names[number] == at:
            other = 'b' if at == 'a' else 'a'
            os.rename(f'{at}/S', f'{other}/S'); at = other";
    let ask = |size: &str| {
        exec(
            json!({"code": code, "scratch": text(&scratch_named(size)), "limits": {"wall": scaled_limit(20_000), "scratch_size": size, "file_size": "256MiB"}}),
        )
    };
    ask("32MiB").expect(json!({"verdict": "disk_limit", "code": 137, "output": ""}));
    ask("400MiB").succeeded().expect(json!({"output": "kept\n"}));
}

/// Code with a directory of 4 MiB and more that `hold` deletes and keeps in being, five times. A
/// directory stays as large as it was on most file systems; else this shows nothing.
fn large_directories(hold: &str, limit: &str) -> ExecResult {
    let code = format!(
        "\
import os, time
open('one', 'w').close(); total = 0
for _ in range(5):
    os.mkdir('d'); at = os.open('d', os.O_RDONLY)
    names = [f'{{number:05}}' + 'n' * 245 for number in range(12000)]
    for name in names: os.link('one', name, dst_dir_fd=at)
    for name in names: os.unlink(name, dir_fd=at)
    total += os.fstat(at).st_blocks * 512; os.close(at)
    {hold}
    os.rmdir('d'); time.sleep(0.1)
time.sleep(1)
print('kept', total > 16 << 20)"
    );
    let limits = json!({"wall": scaled_limit(40_000), "scratch_size": limit});
    exec(json!({"code": code, "scratch": text(&scratch_named(&format!("{limit}-{}", hold.len()))), "limits": limits}))
}

#[track_caller]
fn is_counted_as_large(hold: &str, reason: Value) {
    let control = large_directories(hold, "400MiB");
    control.succeeded();
    if control["output"] == "kept True\n" {
        large_directories(hold, "8MiB").expect(json!({"verdict": "disk_limit", "code": 137, "reason": reason, "output": ""}));
    }
}

test!(serial Both, deleted_directories_above_a_deleted_one_are_counted, seconds 90);
fn deleted_directories_above_a_deleted_one_are_counted() {
    is_counted_as_large("os.mkdir('d/below'); held = os.open('d/below', os.O_RDONLY); os.dup(held); os.rmdir('d/below')", Value::Null);
}

test!(serial Both, deleted_directories_above_a_deleted_file_end_the_run, needs [SlowAsUser], seconds 90);
fn deleted_directories_above_a_deleted_file_end_the_run() {
    is_counted_as_large("held = os.dup(os.open('d/file', os.O_CREAT)); os.unlink('d/file')", json!("scratch_uncounted"));
    // The file has another name.
    is_counted_as_large(
        "os.link('one', 'd/file'); held = os.dup(os.open('d/file', os.O_RDONLY)); os.unlink('d/file')",
        json!("scratch_uncounted"),
    );
}

test!(serial Both, a_programs_file_that_the_launcher_holds_is_counted, seconds 60);
fn a_programs_file_that_the_launcher_holds_is_counted() {
    // Closed in the midst of a write, it is open nowhere afterwards.
    let code = "\
import os, threading, time
block = b'x' * (100 << 20)
file = os.open('named.py', os.O_RDWR); os.unlink('named.py')
before = os.fstat(file).st_blocks
writing = threading.Thread(target=os.pwrite, args=(file, block, 0)); writing.start()
while os.fstat(file).st_blocks == before: pass
os.close(file); writing.join(); time.sleep(1)
print('kept')";
    let ask = |size: &str| {
        let limits = json!({"wall": scaled_limit(20_000), "scratch_size": size});
        exec(json!({"code": code, "filename": "named.py", "scratch": text(&scratch_named(size)), "limits": limits}))
    };
    ask("16MiB").expect(json!({"verdict": "disk_limit", "code": 137, "reason": null, "output": ""}));
    ask("400MiB").succeeded().expect(json!({"output": "kept\n"}));
}

test!(serial Both, large_writes_are_counted_while_they_last, seconds 60);
fn large_writes_are_counted_while_they_last() {
    // Calls that no SIGSTOP interrupts, of 128 MiB each.
    let code = "\
import os
blocks = [b'x' * (1 << 20)] * 128
for number in range(4):
    if os.fork() == 0:
        file = os.open(str(number), os.O_CREAT | os.O_WRONLY)
        for _ in range(ROUNDS): os.pwritev(file, blocks, 0)
        os._exit(0)
for _ in range(4): os.wait()
print('written')";
    let ask = |size: &str, rounds: u32| {
        let inside = scratch_named(size);
        let code = code.replace("ROUNDS", &rounds.to_string());
        let done = exec(
            json!({"code": code, "scratch": text(&inside), "limits": {"wall": scaled_limit(30_000), "scratch_size": size, "file_size": "256MiB"}}),
        );
        let left: u64 = inside.read_dir().unwrap().flatten().map(|file| file.metadata().unwrap().blocks() * 512).sum();
        (done, left)
    };
    let (done, left) = ask("16MiB", 100);
    done.expect(json!({"verdict": "disk_limit", "code": 137, "output": ""}));
    // 30 MiB on an idle machine; before there were counts meanwhile 230 MiB and more.
    assert!(left < 120 << 20, "{} MiB are left", left >> 20);
    ask("700MiB", 1).0.succeeded().expect(json!({"output": "written\n"}));
}

/// A run that may have so many files.
fn with_files(code: &str, files: u64, links: u32) -> (ExecResult, u64) {
    let inside = scratch_named(&format!("{files}-{}", code.len()));
    // What lay there before makes a count slow.
    write_file(&inside.join("one"), "");
    std::fs::create_dir(inside.join("many")).unwrap();
    for number in 0..links {
        std::fs::hard_link(inside.join("one"), inside.join(format!("many/{number}"))).unwrap();
    }
    let limits = json!({"wall": scaled_limit(30_000), "scratch_files": files});
    let done = exec(json!({"code": code, "scratch": text(&inside), "limits": limits}));
    let left = inside.read_dir().unwrap().count();
    (done, u64::try_from(left).unwrap())
}

test!(serial Both, nameless_files_are_counted_by_number_too, needs [SlowAsUser], seconds 90);
fn nameless_files_are_counted_by_number_too() {
    let open = "\
import os, time
for process in range(5):
    if os.fork() == 0:
        for number in range(800): os.open(f'{process}-{number}', os.O_CREAT); os.unlink(f'{process}-{number}')
        time.sleep(2); os._exit(0)
for _ in range(5): os.wait()
print('kept')";
    let chains = "\
import os, time
path = '/'.join('d' * 100)
for _ in range(40): os.makedirs(path); os.dup(os.open(path, os.O_RDONLY)); os.removedirs(path)
time.sleep(2)
print('kept')";
    for code in [open, chains] {
        with_files(code, 1000, 0).0.expect(json!({"verdict": "disk_limit", "code": 137, "output": ""}));
        with_files(code, 8000, 0).0.succeeded().expect(json!({"output": "kept\n"}));
    }
}

test!(serial Both, files_are_counted_before_there_are_far_too_many, needs [SlowAsUser], seconds 60);
fn files_are_counted_before_there_are_far_too_many() {
    const LINKS: u32 = 30_000;
    let code = "import os\nfor number in range(7000): os.close(os.open(str(number), os.O_CREAT))\nprint('made')";
    let (done, left) = with_files(code, 4000, LINKS);
    done.expect(json!({"verdict": "disk_limit", "output": ""}));
    // A sixteenth more, and what is made until the kill; before, a count came every 100 ms or later.
    assert!(left < 5_500, "{left} are left");
    with_files(code, 8000, LINKS).0.succeeded().expect(json!({"output": "made\n"}));
}

test!(serial Both, what_a_run_may_have_written_and_no_count_explains_is_bounded, seconds 90);
fn what_a_run_may_have_written_and_no_count_explains_is_bounded() {
    // 400 MiB in all, and 4 MiB at a time; then others write as much.
    let code = "\
import os, time
block = b'x' * (4 << 20)
for _ in range(100):
    with open('file', 'wb', 0) as file: file.write(block)
open('ready', 'w').close()
while not os.path.exists('go'): time.sleep(0.01)
print('done')";
    let ask = |size: &str| {
        let inside = scratch_named(size);
        let beside = directory().join(format!("beside-{size}"));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                assert!(eventually(Duration::from_secs(30), || inside.join("ready").exists()));
                let file = File::create(&beside).unwrap();
                for step in 1..=36 {
                    nix::fcntl::posix_fallocate(&file, 0, step * (10 << 20)).unwrap();
                    std::thread::sleep(Duration::from_millis(40));
                }
                File::create(inside.join("go")).unwrap();
            });
            exec(json!({"code": code, "scratch": text(&inside), "limits": {"wall": scaled_limit(40_000), "scratch_size": size}}))
        })
    };
    ask("8MiB").expect(json!({"verdict": "disk_limit", "reason": "scratch_uncounted", "output": ""}));
    // The control: four times the limit is more; and a run that has written less, as below.
    ask("100MiB").succeeded().expect(json!({"output": "done\n"}));
}

test!(serial Both, what_others_write_beside_a_scratch_ends_no_run, seconds 90);
/// The control of all these: the file system loses as much, and the run is not the cause.
fn what_others_write_beside_a_scratch_ends_no_run() {
    let beside = directory().join("beside");
    let code = "import os, subprocess, time\nopen('ready', 'w')\nwhile not os.path.exists('go'): subprocess.run(['true']); time.sleep(0.01)\nprint('done')";
    let inside = scratch();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            assert!(eventually(Duration::from_secs(20), || inside.join("ready").exists()));
            let file = File::create(&beside).unwrap();
            // Three gigabytes where there is room, of which none has to be written.
            let free = nix::sys::statvfs::fstatvfs(&file).unwrap();
            let steps = (free.blocks_available() * free.fragment_size() / 2 / (20 << 20)).min(150);
            assert!(steps > 10, "the file system is nearly full");
            for step in 1..=i64::try_from(steps).unwrap() {
                nix::fcntl::posix_fallocate(&file, 0, step * (20 << 20)).unwrap();
                std::thread::sleep(Duration::from_millis(10));
            }
            File::create(inside.join("go")).unwrap();
        });
        let limits = json!({"wall": scaled_limit(30_000), "scratch_size": "8MiB"});
        exec(json!({"code": code, "scratch": text(&inside), "limits": limits}))
            .succeeded()
            .expect(json!({"output": "done\n", "error": ""}));
    });
}

test!(serial Both, files_that_others_make_beside_a_scratch_end_no_run, seconds 60);
/// The same of files.
fn files_that_others_make_beside_a_scratch_end_no_run() {
    let beside = directory().join("beside");
    let code = "import os, time\nopen('ready', 'w').close()\nwhile not os.path.exists('go'): time.sleep(0.01)\nprint('done')";
    let inside = scratch();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            assert!(eventually(Duration::from_secs(20), || inside.join("ready").exists()));
            std::fs::create_dir(&beside).unwrap();
            for number in 0..2000 {
                File::create(beside.join(number.to_string())).unwrap();
            }
            File::create(inside.join("go")).unwrap();
        });
        let limits = json!({"wall": scaled_limit(30_000), "scratch_files": 100});
        exec(json!({"code": code, "scratch": text(&inside), "limits": limits})).succeeded().expect(json!({"output": "done\n"}));
    });
}

/// Code that holds memory in pieces of 16 MiB, by `piece()`.
fn holding(piece: &str, pieces: u32) -> ExecResult {
    let code = format!(
        "import ctypes, mmap, os, socket, time\nlibc = ctypes.CDLL(None, use_errno=True)\nblock = b'x' * (16 << 20)\nheld = []\n{piece}\nfor _ in range({pieces}):\n    held.append(piece()); time.sleep(0.01)\ntime.sleep(1)\nprint('kept')"
    );
    // A process for each piece, of two threads.
    let limits =
        json!({"wall": scaled_limit(20_000), "memory": "256MiB", "scratch_size": "8MiB", "tmp_size": "8MiB", "processes": 2 * pieces + 16});
    exec(json!({"code": code, "limits": limits}))
}

/// More than the limit is counted, wherever it is; less than it is not too much.
#[track_caller]
fn is_held(piece: &str) {
    holding(piece, 40).expect(json!({"verdict": "out_of_memory", "code": 137, "output": ""}));
    holding(piece, 8).succeeded().expect(json!({"output": "kept\n"}));
}

const FILE_IN_MEMORY: &str = "def file():\n    fd = os.memfd_create('held'); os.write(fd, block)\n    return fd\n";

test!(serial Both, files_in_memory_are_counted_without_a_cgroup_too, needs [SlowAsUser], seconds 60);
fn files_in_memory_are_counted_without_a_cgroup_too() {
    is_held(&format!("{FILE_IN_MEMORY}piece = file"));
    is_held(&format!("{FILE_IN_MEMORY}libc.prctl(4, 0, 0, 0, 0)\npiece = file"));
    // In a message, and in a map of one page.
    is_held(&format!(
        "{FILE_IN_MEMORY}sender, receiver = socket.socketpair()\ndef piece():\n    fd = file(); socket.send_fds(sender, [b'.'], [fd]); os.close(fd)"
    ));
    is_held(&format!("{FILE_IN_MEMORY}def piece():\n    fd = file(); page = mmap.mmap(fd, 4096); os.close(fd)\n    return page"));
}

test!(serial Both, files_in_memory_in_sockets_that_nothing_leads_to_are_freed_without_a_cgroup_too, seconds 60);
fn files_in_memory_in_sockets_that_nothing_leads_to_are_freed_without_a_cgroup_too() {
    let piece = format!("{FILE_IN_MEMORY}{UNREACHABLE}def piece(): keep(file())");
    // With a cgroup the kernel counts them: it ends the run, if no process closes a socket before.
    let done = holding(&piece, 40);
    if done["verdict"] != "out_of_memory" {
        assert!(left(&done) <= 24, "{}", done.brief());
    }
    holding(&piece, 8).succeeded();
}

test!(serial Both, shared_maps_are_counted_without_a_cgroup_too, seconds 60);
fn shared_maps_are_counted_without_a_cgroup_too() {
    is_held("def piece():\n    page = mmap.mmap(-1, 16 << 20); page.write(block)\n    return page");
    // In use, and not mapped.
    is_held("def piece():\n    page = mmap.mmap(-1, 16 << 20); page.write(block); page.madvise(mmap.MADV_DONTNEED)\n    return page");
}

test!(serial Both, memory_of_all_processes_together_is_counted_without_a_cgroup_too, needs [SlowAsUser], seconds 60);
fn memory_of_all_processes_together_is_counted_without_a_cgroup_too() {
    // A piece is there when its process says so.
    let hold =
        "full, says = os.pipe()\ndef hold():\n    mine = os.urandom(16 << 20); os.write(says, b'.')\n    while True: time.sleep(600)\n";
    is_held(&format!("{hold}def piece():\n    if os.fork(): return os.read(full, 1)\n    hold()"));
    // The first thread of each has ended.
    is_held(&format!(
        "{hold}import threading\ndef piece():\n    if os.fork(): return os.read(full, 1)\n    threading.Thread(target=hold).start(); libc.syscall(60, 0)"
    ));
    // Each thread hands the memory on to the next and ends.
    is_held(&format!(
        "{hold}import threading\ndef chain():\n    time.sleep(0.004)\n    while True:\n        try: return threading.Thread(target=chain).start()\n        except RuntimeError: time.sleep(0.001)\ndef piece():\n    if os.fork(): return os.read(full, 1)\n    mine = os.urandom(16 << 20); os.write(says, b'.'); chain(); libc.syscall(60, 0)"
    ));
    // The control: what many processes share is there once.
    let shared = "all = os.urandom(96 << 20)\npage = mmap.mmap(-1, 32 << 20); page.write(block); page.write(block)\ndef piece():\n    if os.fork(): return\n    for at in range(0, 32 << 20, 4096): page[at]\n    time.sleep(600)";
    holding(shared, 6).succeeded().expect(json!({"output": "kept\n"}));
}

test!(serial Both, page_tables_are_counted_without_a_cgroup_too, seconds 60);
fn page_tables_are_counted_without_a_cgroup_too() {
    // A table of 4 KiB for each 2 MiB of which a byte is read: the page itself is the kernel's own of zeros.
    is_held(
        "def piece():\n    page = mmap.mmap(-1, 8 << 30, flags=0x4022, prot=1)\n    for at in range(0, 8 << 30, 2 << 20): page[at]\n    return page",
    );
}

test!(serial Both, maps_that_are_slow_to_count_hide_no_memory, needs [SlowAsUser], seconds 150);
fn maps_that_are_slow_to_count_hide_no_memory() {
    // Thirty processes have every page of 14000 maps of one file in use, and others fill memory.
    let hidden = |pieces: u32| {
        let code = format!(
            "\
import ctypes, os, time
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_long
libc.mmap.argtypes = [ctypes.c_long] * 6
libc.madvise.argtypes = [ctypes.c_long] * 3
size, maps = 128 << 10, 14000
file = os.memfd_create('many'); os.write(file, bytes(size))
(full, says), (go, starts) = os.pipe(), os.pipe()
def fork(work):
    if os.fork() == 0:
        held = work(); os.write(says, b'.'); time.sleep(600)
for _ in range({pieces}): fork(lambda: os.read(go, 1) and os.urandom(60 << 20))
at = libc.mmap(0, size * maps, 0, 0x22, -1, 0)
for n in range(maps): libc.mmap(at + n * size, size, 3, 0x11, file, 0)
for _ in range(30): fork(lambda: libc.madvise(at, size * maps, 22))
for _ in range(30): os.read(full, 1)
os.write(starts, b'.' * {pieces})
for _ in range({pieces}): os.read(full, 1)
time.sleep(2)
print('kept', flush=True); os._exit(0)"
        );
        let limits = json!({"wall": scaled_limit(60_000), "memory": "512MiB", "processes": 80, "scratch_size": "8MiB", "tmp_size": "8MiB"});
        exec(json!({"code": code, "limits": limits}))
    };
    hidden(12).expect(json!({"verdict": "out_of_memory", "code": 137, "output": ""}));
    hidden(1).succeeded().expect(json!({"output": "kept\n"}));
}

test!(serial Both, huge_pages_are_not_there_where_nothing_counts_them);
fn huge_pages_are_not_there_where_nothing_counts_them() {
    // A fresh range of 8 MiB, and one byte of each 2 MiB written.
    let code = "\
import ctypes, mmap
page = mmap.mmap(-1, 8 << 20, flags=0x22); page.madvise(14)
for at in range(0, 8 << 20, 2 << 20): page[at] = 1
huge = sum(int(line.split()[1]) for line in open('/proc/self/smaps') if line.startswith('AnonHugePages'))
libc = ctypes.CDLL(None, use_errno=True)
print(huge > 0, libc.prctl(42, 0, 0, 0, 0), libc.prctl(41, 0, 0, 0, 0), ctypes.get_errno())";
    let done = exec(json!({"code": code}));
    let is_counted = done["receipt"]["degraded"].as_array().is_some_and(|missing| missing.iter().all(|name| name != "cgroup"));
    // The control: with a cgroup they are there, if the host has any.
    let mode = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    let has_any = !mode.is_empty() && !mode.contains("[never]");
    let expected = if is_counted { format!("{} 0 -1 1\n", if has_any { "True" } else { "False" }) } else { String::from("False 1 -1 1\n") };
    done.succeeded().expect(json!({"output": expected}));
}

/// A thread that goes on when the first one has ended, with `code` in it.
fn without_first_thread(code: &str) -> String {
    let body = code.replace('\n', "\n    ");
    format!(
        "import ctypes, os, threading\nlibc = ctypes.CDLL(None, use_errno=True)\ndef rest():\n    {body}\n    os.write(1, b'kept\\n'); os._exit(0)\nthreading.Thread(target=rest).start()\nlibc.syscall(60, 0)"
    )
}

test!(serial Both, memory_of_processes_without_their_first_thread_is_counted, seconds 60);
fn memory_of_processes_without_their_first_thread_is_counted() {
    for piece in ["os.urandom(16 << 20)", "shared()"] {
        // Of two, since RLIMIT_DATA holds for each.
        let held = |pieces: u32| {
            let code = format!(
                "import mmap, time\nheld = []\ndef shared():\n    page = mmap.mmap(-1, 16 << 20); page.write(bytes(16 << 20))\n    return page\ntime.sleep(0.3)\nfor _ in range({pieces}):\n    held.append({piece}); time.sleep(0.01)\ntime.sleep(1 if os.getpid() == one else 600)"
            );
            let code = format!("import os\none = os.getpid(); os.fork()\n{}", without_first_thread(&code));
            let limits = json!({"wall": scaled_limit(20_000), "memory": "256MiB", "scratch_size": "8MiB", "tmp_size": "8MiB"});
            exec(json!({"code": code, "limits": limits}))
        };
        held(12).expect(json!({"verdict": "out_of_memory", "code": 137, "output": ""}));
        held(4).succeeded().expect(json!({"output": "kept\n"}));
    }
}

/// Code that has the kernel hold more than a tenth of 256 MiB and less than one of 2 GiB.
#[track_caller]
pub(super) fn is_held_by_kernel(code: &str) {
    let ask = |memory: &str| {
        let limits = json!({"wall": scaled_limit(25_000), "memory": memory, "processes": 40, "scratch_size": "8MiB", "tmp_size": "8MiB"});
        exec(json!({"code": code, "limits": limits}))
    };
    ask("256MiB").expect(json!({"verdict": "out_of_memory", "code": 137, "output": "", "reason": "kernel_memory"}));
    ask("2GiB").succeeded().expect(json!({"output": "kept\n"}));
}

/// Code that holds a number of locks of so many files, 250 of each.
fn locks(files: u32) -> String {
    format!(
        "\
import fcntl, os, struct, time
held = [os.memfd_create('held') for _ in range({files})]
for fd in held:
    for at in range(250): fcntl.fcntl(fd, fcntl.F_SETLK, struct.pack('hhqqi4x', fcntl.F_WRLCK, 0, 2 * at, 1, 0))
time.sleep(3)"
    )
}

test!(serial Both, record_locks_are_counted, needs [SlowAsUser], seconds 90);
fn record_locks_are_counted() {
    let of_four = |files: u32| {
        let fork = "import os\nfirst = os.getpid()\nfor _ in range(3):\n    if os.fork() == 0: break\n";
        format!("{fork}{}\nif os.getpid() == first: print('kept')", locks(files))
    };
    is_held_by_kernel(&of_four(200));
    is_held_by_kernel(&without_first_thread(&locks(800)));
    // `strict` refuses runs without a cgroup.
    if is_root() {
        let strict = |files: u32| {
            let limits = json!({"memory": "128MiB", "scratch_size": "8MiB", "tmp_size": "8MiB"});
            exec_with(&["--policy", "strict"], json!({"code": of_four(files), "limits": limits}))
        };
        strict(200).expect(json!({"verdict": "out_of_memory", "code": 137, "output": ""}));
        strict(20).succeeded().expect(json!({"output": "kept\n"}));
    }
}

/// A process of the host that holds 800 files' locks.
fn holder_of_locks() -> Child {
    let mut holder = run_under(&["/usr/bin/python3", "-"]);
    holder.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut holder = holder.spawn().unwrap();
    let held = format!("{}\nprint('held', flush=True)\ntime.sleep(600)", locks(800));
    holder.stdin.take().unwrap().write_all(held.as_bytes()).unwrap();
    holder.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
    holder
}

test!(serial Both, what_others_hold_in_the_kernel_ends_no_run, needs [SlowAsUser], seconds 60);
/// The control of all these: the host's kernel holds as much, and the run is not the cause.
fn what_others_hold_in_the_kernel_ends_no_run() {
    let code = "import os, time\nopen('ready', 'w')\nwhile not os.path.exists('go'): time.sleep(0.01)\ntime.sleep(1.5)\nprint('done')";
    let inside = scratch();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            assert!(eventually(Duration::from_secs(20), || inside.join("ready").exists()));
            let mut other = holder_of_locks();
            File::create(inside.join("go")).unwrap();
            std::thread::sleep(Duration::from_secs(3));
            other.kill().unwrap();
            other.wait().unwrap();
        });
        let limits = json!({"wall": scaled_limit(30_000), "memory": "64MiB", "scratch_size": "8MiB", "tmp_size": "8MiB"});
        exec(json!({"code": code, "scratch": text(&inside), "limits": limits})).succeeded().expect(json!({"output": "done\n"}));
    });
}

test!(serial RootOnly, locks_that_cannot_be_counted_end_the_run_and_say_so, seconds 120);
/// An ordinary user's launcher cannot look at a process whose program only root may read.
fn locks_that_cannot_be_counted_end_the_run_and_say_so() {
    let (place, home) = (scratch(), directory().join("users"));
    std::fs::create_dir(&home).unwrap();
    chown_to_owner(&home);
    for (name, mode) in [("hidden", 0o111), ("readable", 0o755)] {
        std::fs::copy("/usr/bin/python3", place.join(name)).unwrap();
        std::fs::set_permissions(place.join(name), std::fs::Permissions::from_mode(mode)).unwrap();
    }
    let (id, program) = (OWNER.to_string(), program_path().unwrap());
    let ask = |namespace: &[&str], name: &str, memory: &str, code: &str| {
        let user = ["setpriv", "--reuid", &id, "--regid", &id, "--clear-groups", "--inh-caps=-all", "--", text(&program), "exec"];
        let mut command = run_under(&[namespace, &user].concat());
        command.env("HOME", &home).env_remove("XDG_RUNTIME_DIR");
        let code = format!(
            "import subprocess
subprocess.run(['./{name}', '-c', {}], check=True)
print('kept')",
            json!(code)
        );
        // What others write at the same time must not end it as well.
        let limits = json!({"wall": scaled_limit(60_000), "memory": memory, "processes": 40, "scratch_size": "1GiB", "tmp_size": "8MiB"});
        let request = json!({"code": code, "scratch": text(&place), "limits": limits}).to_string();
        ExecResult::of(run_with_stdin(&mut command, request.as_bytes()))
    };
    let uncounted = json!({"verdict": "out_of_memory", "code": 137, "reason": "kernel_memory_uncounted", "limits_hit": []});
    // Locks of processes that have ended, a few at a time, in files that another has.
    let dead = "import ctypes, fcntl, os, struct, time
libc = ctypes.CDLL(None)
held = [os.memfd_create('held') for _ in range(800)]
for part in range(16):
    taker = libc.syscall(56, 0x400 | 17, 0, 0, 0, 0)
    if taker == 0:
        for fd in held[50 * part:50 * part + 50]:
            for at in range(250): fcntl.fcntl(fd, fcntl.F_SETLK, struct.pack('hhqqi4x', fcntl.F_WRLCK, 0, 2 * at, 1, 0))
        os._exit(0)
    os.waitpid(taker, 0)
time.sleep(5)";
    let apart = ["unshare", "-p", "-f", "--mount-proc"];
    ask(&apart, "hidden", "256MiB", dead).expect(uncounted.clone());
    ask(&apart, "readable", "256MiB", dead).expect(json!({"verdict": "out_of_memory", "code": 137, "reason": "kernel_memory"}));
    // The control: it holds nothing.
    let waits = "import time; time.sleep(3)";
    ask(&apart, "hidden", "4GiB", waits).succeeded().expect(json!({"output": "kept\n"}));
    // Locks of others.
    let mut other = holder_of_locks();
    let [hidden, readable] = ["hidden", "readable"].map(|name| ask(&[], name, "256MiB", waits));
    other.kill().unwrap();
    other.wait().unwrap();
    hidden.expect(uncounted);
    // The controls: a run that can be counted, and a host without many locks.
    readable.succeeded().expect(json!({"output": "kept\n"}));
    ask(&[], "hidden", "256MiB", waits).succeeded().expect(json!({"output": "kept\n"}));
}

test!(Both, locks_of_open_files_are_refused);
fn locks_of_open_files_are_refused() {
    // They last while a file is only mapped or on its way, where no count finds them.
    for command in ["F_OFD_SETLK", "F_OFD_SETLKW"] {
        denied(
            &format!("fcntl.fcntl(os.memfd_create('held'), fcntl.{command}, struct.pack('hhqqi4x', fcntl.F_WRLCK, 0, 0, 1, 0))"),
            "EPERM",
            Control::Outside,
        );
    }
    denied(
        "fcntl.fcntl(os.memfd_create('held'), fcntl.F_OFD_SETLK, struct.pack('hhqqi4x', fcntl.F_WRLCK, 0, 0, 1, 0))",
        "EPERM",
        Control::Instead("fcntl.fcntl(os.memfd_create('held'), fcntl.F_SETLK, struct.pack('hhqqi4x', fcntl.F_WRLCK, 0, 0, 1, 0))"),
    );
}

test!(Both, access_control_lists_are_refused_and_copies_go_on);
fn access_control_lists_are_refused_and_copies_go_on() {
    // Of a directory in a tmpfs; the kernel keeps as many entries as 64 KiB hold.
    let set = |kind: &str| {
        format!(
            "import tempfile
place = tempfile.mkdtemp(dir='/dev/shm')
entries = [(1, 7, -1), *[(2, 7, os.getuid())] * 100, (4, 5, -1), (16, 7, -1), (32, 5, -1)]
try: os.setxattr(place, '{kind}', struct.pack('<I', 2) + b''.join(struct.pack('<HHi', *entry) for entry in entries))
finally: os.rmdir(place)"
        )
    };
    for kind in ["system.posix_acl_access", "system.posix_acl_default"] {
        denied(&set(kind), "EOPNOTSUPP", Control::Outside);
    }
    let copies = "\
import os, shutil, subprocess
os.mkdir('a'); open('a/f', 'w').write('kept'); os.chmod('a/f', 0o640)
run = lambda *words: subprocess.run(words, check=True)
shutil.copytree('a', 'b'); shutil.copystat('a/f', 'b/f')
run('cp', '-a', 'a', 'c'); run('tar', '-cf', 'a.tar', 'a'); os.mkdir('d'); run('tar', '-xpf', 'a.tar', '-C', 'd')
run('install', '-m', '640', 'a/f', 'e')
print([(open(path).read(), oct(os.stat(path).st_mode)) for path in ('b/f', 'c/f', 'd/a/f', 'e')] == [('kept', '0o100640')] * 4)";
    for request in [json!({"code": copies}), json!({"code": copies, "scratch": text(&scratch())})] {
        exec(request).succeeded().expect(json!({"output": "True\n", "denials": []}));
    }
}

test!(Both, code_chooses_no_memory_nodes);
fn code_chooses_no_memory_nodes() {
    // set_mempolicy and mbind with MPOL_DEFAULT.
    denied("call(238, 0, 0, 0)", "ENOSYS", Control::Outside);
    denied(
        "page = mmap.mmap(-1, 4096)\nat = ctypes.addressof(ctypes.c_char.from_buffer(page))\ncall(237, at, 4096, 0, 0, 0, 0)",
        "ENOSYS",
        Control::Outside,
    );
    for (name, _) in stockade_policy::SHIPPED {
        let allowed = stockade_policy::load_shipped(name).unwrap().seccomp.allow;
        for call in ["set_mempolicy", "mbind", "migrate_pages", "move_pages", "set_mempolicy_home_node"] {
            assert!(!allowed.iter().any(|allowed| allowed == call), "{call} in {name}");
        }
    }
}

test!(Both, little_memory_is_locked_whatever_the_caller_may_lock);
fn little_memory_is_locked_whatever_the_caller_may_lock() {
    let act = |size: u32| {
        format!(
            "page = mmap.mmap(-1, {size}, flags=mmap.MAP_PRIVATE)\nat = ctypes.addressof(ctypes.c_char.from_buffer(page))\ncall(149, at, {size})"
        )
    };
    denied(&act(1 << 20), "ENOMEM", Control::Instead(&act(32 << 10)));
    let done = exec(json!({"code": "import resource; print(max(resource.getrlimit(resource.RLIMIT_MEMLOCK)) <= 65536)"}));
    done.succeeded().expect(json!({"output": "True\n"}));
}

test!(Both, no_page_of_a_file_is_kept_by_a_pipe_and_copies_go_on, seconds 60);
fn no_page_of_a_file_is_kept_by_a_pipe_and_copies_go_on() {
    let keep = "import errno, os\n\
        def tried(call):\n    try: return call()\n    except OSError as error: return errno.errorcode[error.errno]\n\
        file = os.open('kept', os.O_RDWR | os.O_CREAT)\nos.write(file, b'x' * 8192)\nout = os.pipe()[1]\n\
        print(tried(lambda: os.sendfile(out, file, 0, 1)), tried(lambda: os.splice(file, out, 1, 4096)))";
    let copy = "import shutil\nshutil.copy('kept', 'copied')\nprint(open('copied').read() == open('kept').read())";
    let done = exec(json!({"code": format!("{keep}\n{copy}")}));
    assert_eq!(done["output"], "EINVAL EINVAL\nTrue\n", "{}", done.brief());
    let node = "const fs = require('fs'); fs.writeFileSync('a', 'x'.repeat(9000)); fs.copyFileSync('a', 'b'); \
        console.log(fs.readFileSync('b').length); fs.createReadStream('b').pipe(process.stdout)";
    let done = exec(json!({"language": "node", "code": node}));
    assert_eq!(done["output"], format!("9000\n{}", "x".repeat(9000)), "{}", done.brief());
    exec(json!({"language": "bash", "code": "head -c 100000 /dev/zero > a; cp a b; cat b | tail -c 1 | wc -c; cmp a b"})).succeeded();
    // The control: the kernel does both.
    let outside = Command::new("python3").args(["-c", keep]).current_dir(scratch()).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&outside.stdout), "1 1\n");
}
