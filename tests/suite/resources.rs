//! Ways of using up a host that pass by the usual ones: raw calls that make processes, room
//! that is reserved and not written, files without a name or without contents.
//!
//! Each ends at its limit with the error or verdict that is documented, and the same act
//! within the limit goes well. What they cost the host afterwards is looked at by
//! `cleanup.rs` and `load.rs`; plain loops and fork bombs are in `verdicts.rs`.

use std::{
    io::{BufRead, BufReader},
    process::Stdio,
    time::Duration,
};

use serde_json::{Value, json};

use crate::support::{
    exec::{ExecResult, exec, program_path, run_under, run_with_stdin, stockade, text},
    runner::{test, wait_within},
    timeouts::scaled_limit,
};

/// Machine code as a function that takes nothing, and raw calls.
const RAW: &str = "import ctypes, mmap, os, signal
library = ctypes.CDLL(None, use_errno=True)
def machine(code):
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(bytes.fromhex(code))
    function = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
    function.page = page
    return function
";

/// vfork, whose child ends at once: it shares the stack, and so may not return.
const VFORK_ONCE: &str = "machine('b83a0000000f0585c0750931ffb83c0000000f05c3')";

/// vfork, whose child does the same, until it is refused; then all end, the last first.
const VFORK_NESTED: &str = "machine('5331dbb83a0000000f0585c07504ffc3ebf185db740931ffb83c0000000f055bc3')";

fn raw(code: &str, processes: u32) -> ExecResult {
    exec(json!({"code": format!("{RAW}{code}"), "limits": {"processes": processes, "wall": scaled_limit(25_000)}}))
}

test!(Both, processes_made_by_raw_calls_are_held_at_the_limit);
fn processes_made_by_raw_calls_are_held_at_the_limit() {
    // fork, and clone with nothing but a signal; each child stays.
    for call in ["57", "56, 17, 0, 0, 0, 0"] {
        let made = |processes: u32| {
            let code = format!(
                "made = 0\nwhile True:\n    pid = library.syscall({call})\n    if pid == 0: signal.pause()\n    if pid < 0: break\n    made += 1\nprint(made, ctypes.get_errno())"
            );
            let done = raw(&code, processes);
            let said: Vec<u32> = done.succeeded().output().split_whitespace().map(|word| word.parse().unwrap()).collect();
            assert_eq!(said[1], 11, "EAGAIN: {}", done.brief());
            said[0]
        };
        let (few, many) = (made(20), made(60));
        assert!((15..=20).contains(&few) && (55..=60).contains(&many), "{call}: {few} and {many}");
    }
    for processes in [20, 60] {
        let done = raw(&format!("print({VFORK_NESTED}() > 0)"), processes);
        done.succeeded().expect(json!({"output": "True\n"}));
        // Without a cgroup nothing is counted.
        let peak = done["usage"]["processes_peak"].as_u64().unwrap_or(u64::from(processes));
        assert_eq!(peak, u64::from(processes), "{}", done.brief());
    }
    // clone3 is not there to be looped over.
    raw("print(library.syscall(435, 0, 0), ctypes.get_errno())", 20).succeeded().expect(json!({"output": "-1 38\n"}));
}

test!(Both, ten_thousand_short_children_use_up_no_place, seconds 60);
fn ten_thousand_short_children_use_up_no_place() {
    let children = |reap: &str| {
        format!(
            "start = {VFORK_ONCE}\nfor number in range(10_000):\n    pid = start()\n    if pid < 0: break\n    {reap}\nprint(number + 1)"
        )
    };
    raw(&children("os.waitpid(pid, 0)"), 8).succeeded().expect(json!({"output": "10000\n"}));
    // The control: who is not waited for keeps a place.
    let done = raw(&children("pass"), 8);
    let number: u32 = done.succeeded().output().trim().parse().unwrap();
    assert!((5..=8).contains(&number), "{}", done.brief());
}

test!(Both, room_cannot_be_reserved_beyond_the_limit);
fn room_cannot_be_reserved_beyond_the_limit() {
    // Ten gigabytes in a hundred files, each within what one file may hold.
    let code = "import os\nfor where in ('.', '/tmp', '/dev/shm', '/home/sandbox'):\n    try:\n        for number in range(100):\n            fd = os.open(f'{where}/reserved-{number}', os.O_CREAT | os.O_WRONLY)\n            os.posix_fallocate(fd, 0, SIZE)\n            os.close(fd)\n        print(where, number + 1)\n    except OSError as error: print(where, error.errno)\n    for name in os.listdir(where):\n        if 'reserved' in name: os.unlink(f'{where}/{name}')";
    let ask = |size: &str| exec(json!({"code": code.replace("SIZE", size), "limits": {"scratch_size": "64MiB", "tmp_size": "32MiB"}}));
    ask("100 << 20").succeeded().expect(json!({"output": ". 28\n/tmp 28\n/dev/shm 28\n/home/sandbox 28\n"}));
    ask("4096").succeeded().expect(json!({"output": ". 100\n/tmp 100\n/dev/shm 100\n/home/sandbox 100\n"}));
}

test!(Both, a_million_files_are_not_made, seconds 60);
fn a_million_files_are_not_made() {
    let code = "import os\nfor where in ('.', '/tmp', '/dev/shm', '/home/sandbox'):\n    try:\n        for number in range(COUNT): os.mknod(f'{where}/file-{number}')\n        print(where, 'all')\n    except OSError as error: print(where, error.errno)";
    let ask = |count: &str| {
        let request = json!({"code": code.replace("COUNT", count), "limits": {"scratch_files": 1024, "tmp_size": "16MiB", "wall": scaled_limit(25_000)}});
        let done = exec(request);
        done.succeeded();
        done.output().to_owned()
    };
    assert_eq!(ask("1_000_000"), ". 28\n/tmp 28\n/dev/shm 28\n/home/sandbox 28\n");
    assert_eq!(ask("100"), ". all\n/tmp all\n/dev/shm all\n/home/sandbox all\n");
}

/// Shared memory of the host, in which such files are counted wherever they are.
fn shared_memory_kib() -> u64 {
    let memory = std::fs::read_to_string("/proc/meminfo").unwrap();
    let line = memory.lines().find_map(|line| line.strip_prefix("Shmem:")).unwrap();
    line.trim_end_matches(" kB").trim().parse().unwrap()
}

test!(Both, files_without_a_name_count_as_memory, needs[Cgroup]);
fn files_without_a_name_count_as_memory() {
    let before = shared_memory_kib();
    let code = "import os\nheld = []\nfor number in range(COUNT):\n    fd = os.memfd_create('held')\n    os.posix_fallocate(fd, 0, 32 << 20)\n    held.append(fd)\nprint(len(held))";
    let ask = |count: &str| exec(json!({"code": code.replace("COUNT", count), "limits": {"memory": "256MiB"}}));
    ask("320").expect(json!({"verdict": "out_of_memory", "code": 137, "output": ""}));
    ask("4").succeeded().expect(json!({"output": "4\n"}));
    // None of the ten gigabytes is left; others on the host may use a little meanwhile.
    let after = shared_memory_kib();
    assert!(after < before + (128 << 10), "{before} KiB before and {after} KiB after");
}

test!(Both, memory_beyond_the_limit_is_not_swapped, needs[Cgroup]);
/// Where the host has no swap, the first half would be so anyway: hence the second.
fn memory_beyond_the_limit_is_not_swapped() {
    let code = "import os\nheld = []\nfor number in range(192): held.append(os.urandom(1 << 20))\nprint(len(held))";
    let ask = |memory: &str| exec(json!({"code": code, "limits": {"memory": memory, "scratch_size": "8MiB", "tmp_size": "8MiB"}}));
    let done = ask("96MiB");
    done.expect(json!({"verdict": "out_of_memory", "code": 137, "output": ""}));
    assert!(done["usage"]["memory_peak_bytes"].as_u64().is_some_and(|peak| peak <= 96 << 20), "{}", done["usage"]);
    let layers = done["receipt"]["layers"].as_array().unwrap();
    let cgroup = layers.iter().find(|layer| layer["layer"] == "cgroup").unwrap();
    let detail = cgroup["detail"].as_str().unwrap();
    let both = format!("memory.memsw.limit_in_bytes={}", 96 << 20);
    assert!(cgroup["known"] == "read_back" && (detail.contains("memory.swap.max=0") || detail.contains(&both)), "{detail}");
    ask("512MiB").succeeded().expect(json!({"output": "192\n"}));
}

/// A parent with 100 MiB and forty children that share them until each, if it is told so, writes
/// what it has. It stays until its stdin ends.
const FAMILY: &str = r#"
import os, signal, sys
data = bytearray(100 << 20)
for i in range(0, len(data), 4096): data[i] = 1
children = []
for _ in range(40):
    child = os.fork()
    if child == 0:
        if sys.argv[1] == 'write':
            for i in range(0, len(data), 4096): data[i] = 2
        signal.pause()
    children.append(child)
print('ready', flush=True)
sys.stdin.read()
for child in children: os.kill(child, signal.SIGKILL)
print('over', flush=True)
"#;

test!(serial Both, forks_that_share_memory_are_not_ended_for_what_others_fill, needs [NoCgroup], seconds 120);
/// Forty times 100 MiB take longer to count than a look may take. Serial: each fills 300 MiB.
fn forks_that_share_memory_are_not_ended_for_what_others_fill() {
    let family = |how: &str| {
        let wall = scaled_limit(30_000);
        stockade(["run", "--memory", "256m", "--timeout", &wall, "--", "python3", "-c", FAMILY, how]).stdin(Stdio::piped()).spawn().unwrap()
    };
    for _ in 0..10 {
        let mut child = family("share");
        let mut output = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        // Filled within some 0.2 s, and held for as long again.
        let fills = "import time\nheld = b'x' * (300 << 20)\ntime.sleep(0.2)";
        assert!(run_under(&["/usr/bin/python3", "-c", fills]).status().unwrap().success());
        drop(child.stdin.take());
        line.clear();
        output.read_line(&mut line).unwrap();
        let ended = child.wait_with_output().unwrap();
        assert_eq!((line.as_str(), ended.status.code()), ("over\n", Some(0)), "{}", String::from_utf8_lossy(&ended.stderr));
    }
    // The control: what is written is no more shared.
    let mut writing = family("write");
    let status = wait_within(&mut writing, Duration::from_secs(20));
    assert_eq!(status.and_then(|status| status.code()), Some(137));
}

test!(Both, pending_signals_are_few);
fn pending_signals_are_few() {
    let code = r#"
import ctypes, errno, json, os, signal
library = ctypes.CDLL(None, use_errno=True)
number = signal.SIGRTMIN + 1
signal.pthread_sigmask(signal.SIG_BLOCK, [number])
sent = 0
while sent < 600 and library.sigqueue(os.getpid(), number, ctypes.c_void_p(0)) == 0:
    sent += 1
print(json.dumps([sent, sent < 600 and errno.errorcode[ctypes.get_errno()]]))
"#;
    let answer = exec(json!({"code": code})).succeeded().json();
    let sent = answer[0].as_u64().unwrap();
    assert!((100..=512).contains(&sent) && answer[1] == "EAGAIN", "{answer}");
    // Where the launcher may have few, code may have fewer.
    let program = program_path().unwrap();
    let few = format!("ulimit -i 100; exec {} exec", text(&program));
    let done = ExecResult::of(run_with_stdin(&mut run_under(&["bash", "-c", &few]), json!({"code": code}).to_string().as_bytes()));
    assert!(done.succeeded().json()[0].as_u64().unwrap() <= 50, "{}", done.brief());
    // The control: outside there is room for all of them.
    let output = run_with_stdin(&mut run_under(&["/usr/bin/python3", "-"]), code.as_bytes());
    assert_eq!(serde_json::from_slice::<Value>(&output.stdout).unwrap(), json!([600, false]));
}

/// Fills the receive buffers of many sockets and prints how many bytes they hold: 72 MiB, where
/// nothing holds them back. More than a tenth of 1 GiB would end the run of the control. How much
/// one socket takes is the host's to say (`net.core.rmem_max`): Debian 12 takes 13 of these blocks.
const FILL_SOCKETS: &str = r#"
import socket
sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sender.setblocking(False)
block = b'x' * 32768
held = []
sent = 0
for _ in range(300):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    s.setblocking(False)
    s.bind(('127.0.0.1', 0))
    held.append(s)
    for _ in range(10):
        try: sent += sender.sendto(block, s.getsockname())
        except OSError: break
    if sent > 72 << 20: break
total = 0
for s in held:
    try:
        while True: total += len(s.recv(67108864))
    except OSError: pass
print(total)
"#;

test!(RootOnly, socket_buffers_count_as_memory, needs [Cgroup], seconds 60);
fn socket_buffers_count_as_memory() {
    let ask = |memory: &str| {
        exec(
            json!({"code": FILL_SOCKETS, "limits": {"memory": memory, "tmp_size": "8MiB", "scratch_size": "8MiB", "wall": scaled_limit(20_000), "open_files": 600}}),
        )
    };
    let total = |done: &ExecResult| done.succeeded().output().trim().parse::<u64>().unwrap();
    let small = ask("48MiB");
    // Either way of holding it back will do.
    if small["verdict"] != "out_of_memory" {
        let held = total(&small);
        assert!(held <= 48 << 20, "{held} bytes\n{}", small.brief());
    }
    // The control: where memory is plenty, the same sockets hold more than that.
    let large = ask("1GiB");
    let held = total(&large);
    assert!(held > 64 << 20, "{held} bytes\n{}", large.brief());
}
