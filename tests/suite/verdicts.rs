//! One real program for each cause, ending in that cause's verdict and no other.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    process::Child,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use crate::support::{
    control::{Control, denied_in},
    exec::{ExecResult, exec, exec_with, python, run_under, run_with_stdin, scratch, start, stockade, text},
    leftovers::no_process_is_left,
    policy_dir::{PolicyDirectory, derived, unscreened},
    runner::{directory, eventually, is_root, test, wait_within},
    timeouts::{scaled, scaled_limit},
};

/// A run that a limit or signal ended.
#[track_caller]
fn ended(done: &ExecResult, verdict: &str, code: i32, signal: Option<&str>) {
    done.expect(json!({"verdict": verdict, "code": code, "signal": signal, "success": false, "started": true, "limits_hit": []}));
}

test!(Both, exiting_is_exited);
fn exiting_is_exited() {
    for code in [0, 1, 2, 124, 125, 255] {
        let done = python(&format!("import os; os._exit({code})"));
        done.expect(json!({"verdict": "exited", "code": code, "success": code == 0, "started": true, "signal": null, "limits_hit": []}));
    }
    let done = python("raise ValueError('seen')");
    ended(&done, "exited", 1, None);
    assert!(done.error().contains("ValueError: seen"));
}

test!(Both, exiting_with_137_is_exited);
fn exiting_with_137_is_exited() {
    ended(&python("import sys; sys.exit(137)"), "exited", 137, None);
    ended(&python("import sys; sys.exit(143)"), "exited", 143, None);
}

test!(Both, a_crash_is_signaled);
fn a_crash_is_signaled() {
    ended(&python("import ctypes; ctypes.string_at(0)"), "signaled", 139, Some("SIGSEGV"));
    ended(&python("import os; os.abort()"), "signaled", 134, Some("SIGABRT"));
}

test!(Both, an_own_sigkill_and_sigterm_are_signaled);
fn an_own_sigkill_and_sigterm_are_signaled() {
    ended(&python("import os, signal; os.kill(os.getpid(), signal.SIGTERM)"), "signaled", 143, Some("SIGTERM"));
    ended(&python("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"), "signaled", 137, Some("SIGKILL"));
}

test!(Both, a_bad_system_call_of_ones_own_is_signaled);
fn a_bad_system_call_of_ones_own_is_signaled() {
    ended(&python("import os, signal; os.kill(os.getpid(), signal.SIGSYS)"), "signaled", 159, Some("SIGSYS"));
}

test!(serial Both, an_endless_loop_is_a_wall_timeout);
fn an_endless_loop_is_a_wall_timeout() {
    let (limit, most) = (scaled(Duration::from_millis(400)), scaled(Duration::from_secs(2)));
    let begin = Instant::now();
    let done = exec(json!({"code": "print('started')\nwhile True: pass", "limits": {"wall": scaled_limit(400)}}));
    ended(&done, "wall_timeout", 124, None);
    done.expect(json!({"output": "started\n"}));
    let took = Duration::from_millis(done["duration_ms"].as_u64().unwrap());
    assert!((limit..most).contains(&took), "{took:?}");
    assert!(begin.elapsed() < scaled(Duration::from_secs(4)));
}

test!(serial Both, sleeping_is_a_wall_timeout);
fn sleeping_is_a_wall_timeout() {
    let done = exec(json!({"language": "bash", "code": "sleep 600", "limits": {"wall": scaled_limit(200)}}));
    ended(&done, "wall_timeout", 124, None);
}

test!(serial Both, ignoring_signals_and_forking_away_does_not_outlast_the_wall_clock);
fn ignoring_signals_and_forking_away_does_not_outlast_the_wall_clock() {
    let mark = format!("600.{}1", std::process::id());
    let code = format!(
        "import os, signal, time\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n    except (OSError, ValueError): pass\nfor _ in range(3):\n    if os.fork() == 0:\n        os.setsid()\n        if os.fork() == 0:\n            os.execvp('sleep', ['sleep', '{mark}'])\n        os._exit(0)\nprint('forked', flush=True)\nwhile True: pass"
    );
    let done = exec(json!({"code": code, "limits": {"wall": scaled_limit(1000)}}));
    ended(&done, "wall_timeout", 124, None);
    done.expect(json!({"output": "forked\n"}));
    no_process_is_left(&mark);
}

test!(serial Both, using_up_cpu_time_is_a_cpu_timeout);
fn using_up_cpu_time_is_a_cpu_timeout() {
    let done = exec(json!({"code": "while True: pass", "limits": {"cpu": scaled_limit(500), "wall": scaled_limit(20_000)}}));
    done.expect(json!({"verdict": "cpu_timeout", "code": 137, "success": false, "started": true, "limits_hit": []}));
    let usage = &done["usage"];
    let cpu = usage["cpu_user_ms"].as_u64().unwrap() + usage["cpu_system_ms"].as_u64().unwrap();
    let cpu = Duration::from_millis(cpu);
    assert!((scaled(Duration::from_millis(350))..scaled(Duration::from_secs(3))).contains(&cpu), "{usage}");
    // The control: the same time asleep is no CPU time.
    exec(json!({"code": "import time; time.sleep(1.2)", "limits": {"cpu": scaled_limit(500), "wall": scaled_limit(20_000)}})).succeeded();
}

test!(serial Both, cpu_time_that_the_caller_limits_is_a_cpu_timeout_that_names_the_caller);
/// It was `signaled`, and nothing said for which limit.
fn cpu_time_that_the_caller_limits_is_a_cpu_timeout_that_names_the_caller() {
    let limited = |ulimit: &str, code: &str| {
        let words = format!("ulimit {ulimit}; exec \"$STOCKADE\" exec");
        let request = json!({"code": code, "limits": {"wall": scaled_limit(20_000)}});
        ExecResult::of(run_with_stdin(&mut run_under(&["sh", "-c", &words]), request.to_string().as_bytes()))
    };
    let done = limited("-t 1", "while True: pass");
    done.expect(json!({"verdict": "cpu_timeout", "code": 137, "started": true, "limits_hit": []}));
    let denial = &done["denials"][0];
    assert_eq!((&denial["what"], &denial["rule"]), (&json!("cpu 1s"), &json!("the caller's hard limit (ulimit -t)")), "{}", done.brief());
    assert!(denial["help"].as_str().unwrap().contains("ulimit -Ht") && done["limits"]["cpu_ms"] == 1000, "{}", done.brief());
    // The controls: a lower limit of the run's own is the run's, and a soft one of the caller's is not imposed.
    let own = json!({"code": "while True: pass", "limits": {"cpu": scaled_limit(500), "wall": scaled_limit(20_000)}});
    assert_eq!(exec(own).expect(json!({"verdict": "cpu_timeout"}))["denials"][0]["rule"], "the request's limits.cpu");
    limited("-St 1", "import time\nwhile time.process_time() < 1.6: pass").succeeded();
}

test!(serial Both, cpu_time_of_children_counts, needs [Cgroup]);
fn cpu_time_of_children_counts() {
    let code = "import subprocess, sys\nwhile True: subprocess.run([sys.executable, '-c', 'for i in range(300000): pass'])";
    let done = exec(json!({"code": code, "limits": {"cpu": scaled_limit(800), "wall": scaled_limit(25_000)}}));
    ended(&done, "cpu_timeout", 137, None);
}

test!(Both, cpu_time_of_orphans_is_measured);
fn cpu_time_of_orphans_is_measured() {
    // Only pid 1 waits for the process that does the work.
    let code = "import os, time\nready, done = os.pipe()\nif os.fork() == 0:\n    if os.fork(): os._exit(0)\n    while os.getppid() != 1: pass\n    end = time.process_time() + 0.3\n    while time.process_time() < end: pass\n    os._exit(0)\nos.close(done); os.wait(); os.read(ready, 1)";
    let done = exec(json!({"code": code}));
    let usage = &done.succeeded()["usage"];
    let cpu = usage["cpu_user_ms"].as_u64().unwrap() + usage["cpu_system_ms"].as_u64().unwrap();
    assert!((Duration::from_millis(290)..scaled(Duration::from_secs(2))).contains(&Duration::from_millis(cpu)), "{usage}");
}

test!(Both, cpu_time_of_children_that_no_process_waits_for_is_measured, needs[Cgroup]);
/// The kernel adds it to no process's account, but to the cgroup's: on v1 under a limit alone.
fn cpu_time_of_children_that_no_process_waits_for_is_measured() {
    let code = "import os, signal, time\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nbefore = time.process_time()\nif os.fork() == 0:\n    while time.process_time() < 0.5: pass\n    os._exit(0)\ntry: os.wait()\nexcept ChildProcessError: print(time.process_time() - before < 0.2)";
    let done = exec(json!({"code": code, "limits": {"cpu": scaled_limit(20_000), "wall": scaled_limit(20_000)}}));
    let usage = &done.succeeded().expect(json!({"output": "True\n"}))["usage"];
    let cpu = usage["cpu_user_ms"].as_u64().unwrap() + usage["cpu_system_ms"].as_u64().unwrap();
    assert!(cpu >= 450, "{usage}");
}

test!(Both, using_up_memory_is_out_of_memory, needs[Cgroup]);
fn using_up_memory_is_out_of_memory() {
    let code = "held = []\nwhile True: held.append(bytearray(1 << 20))";
    let done = exec(json!({"code": code, "limits": {"memory": "96MiB", "scratch_size": "8MiB", "tmp_size": "8MiB"}}));
    done.expect(json!({"verdict": "out_of_memory", "code": 137, "success": false, "started": true, "limits_hit": []}));
    assert!(done["usage"]["memory_peak_bytes"].as_u64().is_some_and(|peak| (90 << 20..=96 << 20).contains(&peak)), "{}", done["usage"]);
    // The control: under a larger limit the same memory is there.
    let code = "held = [bytearray(1 << 20) for _ in range(200)]";
    exec(json!({"code": code, "limits": {"memory": "512MiB"}})).succeeded();
}

test!(Both, a_pool_that_uses_up_memory_is_out_of_memory, needs[Cgroup]);
/// One worker killed would leave the pool waiting for ever: the first kill ends the run.
fn a_pool_that_uses_up_memory_is_out_of_memory() {
    let code = "import os\nfrom multiprocessing import Pool\ndef work(_):\n    held = bytearray(50 << 20)\n    for i in range(0, len(held), 4096): held[i] = 1\n    return len(held)\nif __name__ == '__main__':\n    print(os.cpu_count(), flush=True)\n    with Pool(64) as pool: print(sum(pool.map(work, range(64))))";
    let request = json!({"code": code, "limits": {"memory": "256MiB", "scratch_size": "8MiB", "tmp_size": "8MiB", "processes": 128, "wall": scaled_limit(25_000)}});
    let done = exec(request);
    done.expect(json!({"verdict": "out_of_memory", "code": 137, "started": true, "output": "1\n"}));
    assert!(Duration::from_millis(done["duration_ms"].as_u64().unwrap()) < scaled(Duration::from_secs(20)));
}

test!(Both, memory_filled_through_tmp_is_out_of_memory_or_disk_limit, needs[Cgroup]);
fn memory_filled_through_tmp_is_out_of_memory_or_disk_limit() {
    // tmpfs is charged to the memory limit: what is full first decides, and nothing else.
    let code = "import os\nheld = bytearray(70 << 20)\nfor i in range(0, len(held), 4096): held[i] = 1\nwith open('/tmp/f', 'wb') as f:\n    for _ in range(60): f.write(b'x' * (1 << 20))";
    let limits = json!({"memory": "100MiB", "scratch_size": "8MiB", "tmp_size": "64MiB"});
    exec(json!({"code": code, "limits": limits})).expect(json!({"verdict": "out_of_memory", "code": 137}));
}

test!(Both, without_a_cgroup_memory_is_refused_to_each_process, needs[NoCgroup]);
fn without_a_cgroup_memory_is_refused_to_each_process() {
    let code = "try: bytearray(600 << 20)\nexcept MemoryError: print('refused')\nbytearray(300 << 20)\nprint('granted')";
    python(code).succeeded().expect(json!({"output": "refused\ngranted\n"}));
}

const FORK_BOMB: &str = "import os\nwhile True: os.fork()";

test!(serial Both, a_fork_bomb_is_a_process_limit, needs [Cgroup]);
fn a_fork_bomb_is_a_process_limit() {
    let done = exec(json!({"code": FORK_BOMB, "limits": {"wall": scaled_limit(20_000)}}));
    // The program that began it fails as soon as a fork is refused.
    done.expect(json!({"verdict": "process_limit", "code": 1, "signal": null, "started": true, "limits_hit": []}));
    assert!(done.error().contains("BlockingIOError"), "{}", done.brief());
    python("print('the next run is well')").succeeded();
}

test!(serial Both, without_a_cgroup_a_fork_bomb_is_held_down, needs [NoCgroup]);
fn without_a_cgroup_a_fork_bomb_is_held_down() {
    let code = "import os, time\nn = 0\ntry:\n    while True:\n        if os.fork() == 0: time.sleep(60); os._exit(0)\n        n += 1\nexcept BlockingIOError: print(n)";
    let done = exec(json!({"code": code, "limits": {"processes": 20}}));
    let forked: u32 = done.succeeded().output().trim().parse().unwrap();
    assert!((15..=20).contains(&forked), "{forked}");
}

test!(Both, a_refused_fork_that_is_survived_is_only_a_limit_hit, needs[Cgroup]);
fn a_refused_fork_that_is_survived_is_only_a_limit_hit() {
    let code = "import os, time\ntry:\n    for _ in range(40):\n        if os.fork() == 0: time.sleep(60); os._exit(0)\nexcept BlockingIOError: print('refused')";
    let done = exec(json!({"code": code, "limits": {"processes": 10}}));
    done.succeeded().expect(json!({"output": "refused\n", "limits_hit": ["processes"]}));
    exec(json!({"code": code, "limits": {"processes": 50}})).succeeded().expect(json!({"output": "", "limits_hit": []}));
}

fn fill(path: &str) -> String {
    format!("with open({path:?}, 'wb', buffering=0) as f:\n    for _ in range(40): f.write(b'x' * (1 << 20))")
}

test!(Both, a_full_private_scratch_is_a_disk_limit);
fn a_full_private_scratch_is_a_disk_limit() {
    let done = exec(json!({"code": fill("f"), "limits": {"scratch_size": "8MiB"}}));
    ended(&done, "disk_limit", 1, None);
    assert!(done.error().contains("No space left on device"), "{}", done.brief());
    exec(json!({"code": fill("f"), "limits": {"scratch_size": "48MiB"}})).succeeded();
}

test!(Both, too_many_files_in_a_private_scratch_are_a_disk_limit);
fn too_many_files_in_a_private_scratch_are_a_disk_limit() {
    let code = "for i in range(300): open(f'f{i}', 'w').close()";
    let done = exec(json!({"code": code, "limits": {"scratch_files": 100}}));
    ended(&done, "disk_limit", 1, None);
    exec(json!({"code": code, "limits": {"scratch_files": 400}})).succeeded();
}

test!(Both, a_full_tmp_is_a_disk_limit);
fn a_full_tmp_is_a_disk_limit() {
    for path in ["/tmp/f", "/dev/shm/f", "/home/sandbox/f"] {
        let done = exec(json!({"code": fill(path), "limits": {"tmp_size": "8MiB"}}));
        ended(&done, "disk_limit", 1, None);
        exec(json!({"code": fill(path), "limits": {"tmp_size": "64MiB"}})).succeeded();
    }
}

test!(Both, tmp_holds_as_much_as_its_limit_and_no_more);
fn tmp_holds_as_much_as_its_limit_and_no_more() {
    let code = "import os\nfd = os.open('/tmp/f', os.O_CREAT | os.O_WRONLY)\nwritten = 0\ntry:\n    while True: written += os.write(fd, b'x' * 4096)\nexcept OSError as error: print(error.errno, written)";
    // The control: under a larger limit as much as before is written, and more.
    for size in [2 << 20, 3 << 20] {
        let done = exec(json!({"code": code, "limits": {"tmp_size": format!("{size}B")}}));
        done.succeeded().expect(json!({"output": format!("28 {size}\n"), "limits_hit": ["tmp_size"]}));
    }
}

test!(Both, a_full_tmp_that_is_survived_is_only_a_limit_hit);
fn a_full_tmp_that_is_survived_is_only_a_limit_hit() {
    let code = "try:\n    while True: open('/tmp/f', 'ab').write(b'x' * 65536)\nexcept OSError: print('full')";
    let done = exec(json!({"code": code, "limits": {"tmp_size": "4MiB"}}));
    done.succeeded().expect(json!({"output": "full\n", "limits_hit": ["tmp_size"]}));
}

test!(Both, a_file_beyond_file_size_is_a_disk_limit);
fn a_file_beyond_file_size_is_a_disk_limit() {
    let code = "exec dd if=/dev/zero of=f bs=64k count=64 status=none";
    let ask = |size: &str| exec(json!({"language": "sh", "code": code, "limits": {"file_size": size}}));
    ended(&ask("1MiB"), "disk_limit", 153, Some("SIGXFSZ"));
    ask("8MiB").succeeded();
}

fn grow(body: &str) -> String {
    format!("import os, time\nblock = b'x' * (1 << 20)\ni = 0\nwhile True:\n    i += 1\n{body}")
}

#[track_caller]
fn outgrows(body: &str, limits: Value) {
    let scratch = scratch();
    let mut limits = limits;
    limits["wall"] = json!(scaled_limit(20_000));
    let done = exec(json!({"code": grow(body), "scratch": text(&scratch), "limits": limits}));
    ended(&done, "disk_limit", 137, None);
    assert!(Duration::from_millis(done["duration_ms"].as_u64().unwrap()) < scaled(Duration::from_secs(10)), "{}", done.brief());
}

test!(Both, a_host_scratch_that_grows_is_a_disk_limit);
fn a_host_scratch_that_grows_is_a_disk_limit() {
    outgrows("    open(f'f{i}', 'wb').write(block); time.sleep(0.01)", json!({"scratch_size": "16MiB"}));
    // The control: within the limit nothing happens, for as long as several counts.
    let scratch = crate::support::exec::scratch_named("small");
    let code = "import time\nfor i in range(8): open(f'f{i}','wb').write(b'x' * (1 << 20)); time.sleep(0.06)";
    let done = exec(json!({"code": code, "scratch": text(&scratch), "limits": {"scratch_size": "16MiB"}}));
    done.succeeded();
    assert!((8 << 20..9 << 20).contains(&done["usage"]["scratch_bytes"].as_u64().unwrap()), "{}", done["usage"]);
}

test!(Both, too_many_files_in_a_host_scratch_are_a_disk_limit);
fn too_many_files_in_a_host_scratch_are_a_disk_limit() {
    outgrows("    open(f'f{i}', 'w').close(); time.sleep(0.0005)", json!({"scratch_files": 200}));
}

test!(Both, unlinked_files_held_open_are_a_disk_limit);
fn unlinked_files_held_open_are_a_disk_limit() {
    outgrows(
        "    f = open('f', 'wb', buffering=0); os.unlink('f'); f.write(block); globals().setdefault('held', []).append(f); time.sleep(0.01)",
        json!({"scratch_size": "16MiB"}),
    );
}

test!(Both, blocks_of_a_host_scratch_cannot_be_preallocated);
fn blocks_of_a_host_scratch_cannot_be_preallocated() {
    let scratch = scratch();
    let act = "fd = os.open('f', os.O_CREAT | os.O_RDWR)\ncall(285, fd, 1, 0, 64 << 20)";
    // FALLOC_FL_KEEP_SIZE; the control is the sandbox's own tmpfs, whose size holds it.
    denied_in(json!({"scratch": text(&scratch)}), act, "EOPNOTSUPP", Control::Request(json!({})));
}

test!(Both, what_a_host_scratch_held_before_does_not_count);
fn what_a_host_scratch_held_before_does_not_count() {
    let scratch = scratch();
    let code = "open('old','wb').write(b'x' * (12 << 20))";
    exec(json!({"code": code, "scratch": text(&scratch), "limits": {"scratch_size": "16MiB"}})).succeeded();
    let code = "import time\nopen('new','wb').write(b'x' * (12 << 20)); time.sleep(0.4)";
    exec(json!({"code": code, "scratch": text(&scratch), "limits": {"scratch_size": "16MiB"}})).succeeded();
    assert!(fs::metadata(scratch.join("old")).unwrap().blocks() > 0);
}

test!(Both, endless_output_is_an_output_limit);
fn endless_output_is_an_output_limit() {
    let done = exec(json!({"language": "sh", "code": "exec yes line", "limits": {"output_size": "64KiB"}}));
    ended(&done, "output_limit", 137, None);
    done.expect(json!({"truncated": {"output": true, "error": false}}));
    assert!(done["bytes"]["output"].as_u64().unwrap() > 64 * (64 << 10));
    assert!(done.output().starts_with("line\nline\n") && done.output().len() < (64 << 10) + 100);
}

test!(Both, endless_output_on_both_streams_is_an_output_limit);
fn endless_output_on_both_streams_is_an_output_limit() {
    let code = "import os\nblock = b'z' * 65536\nwhile True: os.write(1, block); os.write(2, block)";
    let done = exec(json!({"code": code, "limits": {"output_size": "64KiB"}}));
    ended(&done, "output_limit", 137, None);
    done.expect(json!({"truncated": {"output": true, "error": true}}));
}

/// Highest resident size of a process, as long as it lives.
fn peak_resident(child: &mut Child) -> u64 {
    let path = format!("/proc/{}/status", child.id());
    let mut peak = 0;
    eventually(Duration::from_secs(200), || {
        let status = fs::read_to_string(&path).unwrap_or_default();
        // While it is started it has this process's memory and name.
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).filter(|_| status.starts_with("Name:\tstockade\n"));
        let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
        peak = peak.max(kib.unwrap_or(0) << 10);
        child.try_wait().unwrap().is_some()
    });
    peak
}

const EIGHT_MIB: u64 = 8 << 20;

test!(Both, the_launcher_stays_small_while_the_program_prints, seconds 60);
fn the_launcher_stays_small_while_the_program_prints() {
    let kept = 64 << 10;
    let request = json!({"language": "sh", "code": "sleep 0.2; exec cat /dev/zero", "limits": {"output_size": "64KiB"}}).to_string();
    let result = directory().join("result");
    let mut command = stockade(["exec"]);
    command.stdout(fs::File::create(&result).unwrap());
    let mut child = start(&mut command, request.as_bytes());
    let peak = peak_resident(&mut child);
    let result: Value = serde_json::from_slice(&fs::read(&result).unwrap()).unwrap();
    assert_eq!(result["verdict"], "output_limit");
    assert!(peak > 0 && peak <= EIGHT_MIB + 2 * kept, "{} KiB resident", peak >> 10);
}

test!(RootOnly, the_launcher_stays_small_while_ten_gigabytes_pass_through, needs [Speed], seconds 240);
fn the_launcher_stays_small_while_ten_gigabytes_pass_through() {
    let mut command = stockade(["run", "--policy", "shell", "--", "head", "-c", "10G", "/dev/zero"]);
    let mut child = command.stdout(fs::File::create("/dev/null").unwrap()).spawn().unwrap();
    let peak = peak_resident(&mut child);
    assert!(wait_within(&mut child, Duration::from_secs(1)).unwrap().success());
    assert!(peak > 0 && peak <= EIGHT_MIB, "{} KiB resident", peak >> 10);
}

test!(Both, a_system_call_that_the_policy_kills_for_is_syscall_denied);
fn a_system_call_that_the_policy_kills_for_is_syscall_denied() {
    let policies = PolicyDirectory::new();
    let policy = policies.write("kill", &derived("[seccomp]\nkill = { add = [\"ptrace\"] }"));
    let code = "import ctypes\nprint('before', flush=True)\nctypes.CDLL(None).ptrace(0, 0, 0, 0)\nprint('after', flush=True)";
    let done = exec_with(&["--policy", &policy], json!({"code": code}));
    ended(&done, "syscall_denied", 137, None);
    done.expect(json!({"output": "before\n"}));
    let denial = &done["denials"][0];
    assert_eq!((&denial["what"], &denial["answer"], &denial["rule"]), (&json!("ptrace"), &json!("killed"), &json!("[seccomp] kill")));
    // The control: without the line the call is answered and the program goes on.
    python(code).succeeded().expect(json!({"output": "before\nafter\n"}));
}

test!(Both, strict_kills_for_the_tools_of_exploits, needs[Cgroup]);
fn strict_kills_for_the_tools_of_exploits() {
    let policies = PolicyDirectory::new();
    let policy = policies.write("strict", &unscreened("strict", ""));
    for (number, name) in [(321, "bpf"), (425, "io_uring_setup"), (272, "unshare"), (165, "mount"), (250, "keyctl"), (323, "userfaultfd")] {
        let code = format!("import ctypes\nctypes.CDLL(None).syscall({number}, 0, 0, 0, 0, 0)\nprint('after')");
        let done = exec_with(&["--policy", &policy], json!({"code": code}));
        ended(&done, "syscall_denied", 137, None);
        assert_eq!((done["denials"][0]["what"].as_str(), done.output()), (Some(name), ""));
        python(&code).succeeded();
    }
}

test!(Both, sigterm_and_sigint_cancel);
fn sigterm_and_sigint_cancel() {
    for (signal, code) in [(Signal::SIGTERM, 143), (Signal::SIGINT, 130)] {
        let mark = format!("600.{}2", std::process::id());
        let scratch = crate::support::exec::scratch_named(&format!("scratch-{signal}"));
        let request = json!({"language": "bash", "code": format!("echo so far; touch ready; sleep {mark}"), "scratch": text(&scratch), "collect": ["ready"]});
        let child = start(&mut stockade(["exec"]), request.to_string().as_bytes());
        assert!(eventually(Duration::from_secs(10), || scratch.join("ready").exists()));
        kill(Pid::from_raw(child.id().cast_signed()), signal).unwrap();
        let done = ExecResult::of(child.wait_with_output().unwrap());
        ended(&done, "cancelled", code, None);
        done.expect(json!({"output": "so far\n"}));
        assert_eq!(done.file("ready")["size"], 0);
        no_process_is_left(&mark);
    }
}

test!(Both, a_mistake_of_the_caller_is_a_bad_request);
fn a_mistake_of_the_caller_is_a_bad_request() {
    exec(json!({"code": "", "language": "klingon"})).refused("unknown_language", &[]);
}

test!(Both, a_host_that_lacks_something_is_a_sandbox_error);
fn a_host_that_lacks_something_is_a_sandbox_error() {
    let policies = PolicyDirectory::new();
    let policy = policies.write("lacking", &derived("[filesystem]\nread_only = { add = [\"/usr-that-is-not-there\"] }"));
    let done = exec_with(&["--policy", &policy], json!({"code": ""}));
    done.broke("path_missing", &["/usr-that-is-not-there", "read_only_optional"]);
}

test!(RootlessOnly, strict_without_a_cgroup_is_a_sandbox_error, needs[NoCgroup]);
fn strict_without_a_cgroup_is_a_sandbox_error() {
    assert!(!is_root());
    exec_with(&["--policy", "strict"], json!({"code": "print(1)"})).broke("cgroup_unavailable", &["`strict`", "cgroup"]);
}

test!(Both, reading_through_the_page_cache_is_no_out_of_memory, seconds 120);
/// Reclaim raises the kernel's failcnt, which is no kill.
fn reading_through_the_page_cache_is_no_out_of_memory() {
    let scratch = scratch();
    let code = "dd if=/dev/zero of=big bs=1M count=300 status=none && dd if=big of=/dev/null bs=1M status=none && stat -c %s big";
    let limits =
        json!({"memory": "64MiB", "tmp_size": "16MiB", "scratch_size": "512MiB", "file_size": "512MiB", "wall": scaled_limit(75_000)});
    let done = exec(json!({"language": "bash", "code": code, "scratch": text(&scratch), "limits": limits}));
    done.succeeded().expect(json!({"output": "314572800\n", "limits_hit": []}));
}

test!(Both, a_limit_too_small_for_the_sandbox_itself_never_kills_the_launcher, needs [Cgroup], seconds 60);
fn a_limit_too_small_for_the_sandbox_itself_never_kills_the_launcher() {
    let limited = |memory: &str| {
        let limits = json!({"memory": memory, "tmp_size": "1MiB", "scratch_size": "1MiB"});
        exec(json!({"code": "exit 0", "language": "sh", "limits": limits}))
    };
    limited("4095KiB").refused("memory_too_small", &["limits.memory", "4095KiB", "at least 4MiB"]);
    for _ in 0..30 {
        // `exec` itself being killed fails the test wherever it is called.
        let done = limited("4MiB");
        assert!(done["verdict"] == "exited" || done["verdict"] == "out_of_memory", "{}", done.brief());
    }
    // The control.
    limited("64MiB").succeeded();
}

/// Runs one program of each language, and says what each result is called.
#[track_caller]
fn in_each_language(programs: [(&str, &str); 3], limits: &Value, judge: impl Fn(&ExecResult)) {
    for (language, code) in programs {
        println!("{language}");
        judge(&exec(json!({"language": language, "code": code, "limits": limits})));
    }
}

test!(Both, a_child_killed_for_memory_is_out_of_memory_however_its_parent_goes_on, needs[Cgroup]);
/// The kill and the parent's end raced: the verdict went either way.
fn a_child_killed_for_memory_is_out_of_memory_however_its_parent_goes_on() {
    let limits = json!({"memory": "128MiB", "scratch_size": "8MiB", "tmp_size": "8MiB"});
    let child = "import subprocess, sys\nr = subprocess.run([sys.executable, '-c', 'x = bytearray(300 << 20)'])\n";
    for end in ["sys.exit(0)", "sys.exit(3)", "import os; os.kill(os.getpid(), 9)"] {
        for _ in 0..5 {
            let done = exec(json!({"code": format!("{child}{end}"), "limits": limits}));
            done.expect(json!({"verdict": "out_of_memory", "code": 137, "success": false, "started": true, "limits_hit": []}));
        }
    }
    let done = exec(json!({"language": "bash", "code": "python3 -c 'x = bytearray(300 << 20)'; exit 0", "limits": limits}));
    done.expect(json!({"verdict": "out_of_memory", "code": 137, "success": false}));
    // The control: with room for the child the parent ends as it likes.
    exec(json!({"code": format!("{child}sys.exit(0)"), "limits": {"memory": "512MiB"}})).succeeded();
}

test!(Both, a_disk_that_was_full_is_told_though_the_program_cleans_up);
/// A fifth of a second later: a busy machine may keep the launcher from looking sooner.
fn a_disk_that_was_full_is_told_though_the_program_cleans_up() {
    let programs = [
        (
            "python",
            "import os, time\nf = open('a', 'wb', 0)\ntry:\n    while True: f.write(b'x' * (1 << 20))\nfinally: time.sleep(0.2); f.close(); os.remove('a')",
        ),
        ("bash", "trap 'sleep 0.2; rm -f a' EXIT; set -e; cat /dev/zero > a"),
        (
            "node",
            "const fs = require('fs'); const b = Buffer.alloc(1 << 20)\ntry { for (;;) fs.appendFileSync('a', b) } finally { Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 200); fs.rmSync('a') }",
        ),
    ];
    in_each_language(programs, &json!({"scratch_size": "64MiB"}), |done| {
        done.expect(json!({"verdict": "exited", "code": 1, "success": false, "limits_hit": ["scratch_size"]}));
        assert!(done["usage"]["scratch_bytes"].as_u64().is_some_and(|peak| peak >= 64 << 20), "{}", done["usage"]);
        let denial = &done["denials"][0];
        assert_eq!((&denial["kind"], &denial["limit"]["key"]), (&json!("limit"), &json!("scratch_size")), "{}", done.brief());
    });
    // The control: what fits reaches no limit.
    let code = "import os\nopen('a', 'wb').write(b'x' * (50 << 20)); os.remove('a'); raise SystemExit(1)";
    let done = exec(json!({"code": code, "limits": {"scratch_size": "64MiB"}}));
    done.expect(json!({"verdict": "exited", "code": 1, "limits_hit": []}));
}

test!(Both, a_tmp_that_was_full_is_told_though_the_program_cleans_up);
fn a_tmp_that_was_full_is_told_though_the_program_cleans_up() {
    let shm = "import mmap, os, time\nf = open('/dev/shm/a', 'w+b'); os.unlink('/dev/shm/a'); f.truncate(64 << 20)\nm = mmap.mmap(f.fileno(), 64 << 20)\nif os.fork() == 0:\n    for at in range(0, 64 << 20, 4096): m[at] = 1\nstatus = os.wait()[1]; time.sleep(0.2); os.kill(os.getpid(), status & 127)";
    let done = exec(json!({"code": shm, "limits": {"tmp_size": "32MiB"}}));
    done.expect(json!({"verdict": "signaled", "signal": "SIGBUS", "limits_hit": ["tmp_size"]}));
    let pause = "except OSError: time.sleep(0.2); raise";
    let directory = format!(
        "import tempfile, time\nwith tempfile.TemporaryDirectory() as d:\n    try:\n        for i in range(100): open(f'{{d}}/{{i}}', 'wb', 0).write(b'x' * (1 << 20))\n    {pause}"
    );
    let done = exec(json!({"code": directory, "limits": {"tmp_size": "32MiB"}}));
    done.expect(json!({"verdict": "exited", "code": 1, "limits_hit": ["tmp_size"]}));
    let inodes = format!(
        "import tempfile, time\nwith tempfile.TemporaryDirectory(dir='.') as d:\n    try:\n        for i in range(9000): open(f'{{d}}/{{i}}', 'wb').close()\n    {pause}"
    );
    let done = exec(json!({"code": inodes, "limits": {"scratch_files": 8192}}));
    done.expect(json!({"verdict": "exited", "code": 1, "limits_hit": ["scratch_files"]}));
}

test!(Both, a_file_that_was_cut_short_is_told_in_each_language);
fn a_file_that_was_cut_short_is_told_in_each_language() {
    let programs = [
        ("python", "open('big', 'wb').write(b'x' * (20 << 20))"),
        ("bash", "head -c 20M /dev/zero > big"),
        ("node", "require('fs').writeFileSync('big', Buffer.alloc(20 << 20))"),
    ];
    in_each_language(programs, &json!({"file_size": "10MiB"}), |done| {
        done.expect(json!({"verdict": "disk_limit", "success": false, "limits_hit": []}));
        assert_eq!(done["denials"][0]["limit"]["key"], "file_size", "{}", done.brief());
    });
    let survived = "head -c 20M /dev/zero > big; exit 0";
    let done = exec(json!({"language": "bash", "code": survived, "limits": {"file_size": "10MiB"}}));
    done.expect(json!({"verdict": "exited", "code": 0, "limits_hit": ["file_size"]}));
    // The control: one byte less.
    let less = "open('big', 'wb').write(b'x' * ((10 << 20) - 1)); raise SystemExit(1)";
    exec(json!({"code": less, "limits": {"file_size": "10MiB"}})).expect(json!({"verdict": "exited", "code": 1, "limits_hit": []}));
}
