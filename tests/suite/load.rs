//! Many runs: ten thousand in a row (two thousand by an ordinary user, whose launcher has
//! less to leave behind), and two hundred at a time. Each ends in its own
//! verdict and no other, and afterwards the host has what it had before.
//!
//! How long they take is not judged: that is scripts/bench's.

use std::{collections::BTreeSet, fs, process::Child, thread, time::Duration};

use serde_json::{Value, json};

use crate::support::{
    exec::{ExecResult, exec, program_path, start, stockade},
    leftovers::{cgroups_of, dead_records, mounts, processes},
    runner::{eventually, is_root, test},
};

/// Runs under way at any time: "in a row" is meant of the host, which has more than one CPU.
const WORKERS: usize = 4;
const AT_A_TIME: usize = 200;

/// A program, and what must become of it.
fn case(number: usize) -> (Value, Value) {
    let shell = |code: &str| json!({"code": code, "language": "sh", "id": number.to_string()});
    let ended = |verdict: &str, code: i32| json!({"verdict": verdict, "code": code, "id": number.to_string()});
    match number % 8 {
        0..=2 => (shell("exit 0"), ended("exited", 0)),
        3 => (shell("exit 3"), ended("exited", 3)),
        4 => (shell("kill -SEGV $$"), ended("signaled", 139)),
        // By its own hand, so that no limit has done it.
        5 => (shell("kill -KILL $$"), ended("signaled", 137)),
        6 => (shell("sleep 600 & exit 0"), ended("exited", 0)),
        _ => (json!({"code": "x", "language": "klingon", "id": number.to_string()}), ended("bad_request", 2)),
    }
}

/// What the host has of each kind that a run could leak.
#[derive(Debug)]
struct Host {
    processes: BTreeSet<u32>,
    mounts: usize,
    /// Of all hierarchies, as the kernel counts them: also what is removed and not yet freed.
    cgroups: u64,
    kernel_memory_kib: u64,
}

impl Host {
    fn look() -> Self {
        let column = |line: &str| line.split_ascii_whitespace().nth(2).and_then(|count| count.parse::<u64>().ok());
        let cgroups = fs::read_to_string("/proc/cgroups").unwrap_or_default().lines().skip(1).filter_map(column).sum();
        let memory = fs::read_to_string("/proc/meminfo").unwrap();
        let of = |name: &str| {
            let line = memory.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            line.trim_end_matches(" kB").trim().parse::<u64>().unwrap()
        };
        Host {
            processes: processes(),
            mounts: mounts(),
            cgroups,
            kernel_memory_kib: of("SUnreclaim:") + of("Percpu:") + of("KernelStack:") + of("Shmem:"),
        }
    }
}

test!(serial Both, thousands_of_runs_in_a_row_leave_nothing_and_each_its_verdict, needs [Long], seconds 1800);
fn thousands_of_runs_in_a_row_leave_nothing_and_each_its_verdict() {
    let runs = if is_root() { 10_000 } else { 2_000 };
    // What the first runs make for good (slab caches, the registry's directory) is not a leak.
    (0..64).for_each(|number| drop(exec(case(number).0)));
    let before = Host::look();
    let worker = |first: usize| {
        (first..runs).step_by(WORKERS).for_each(|number| {
            let (request, expected) = case(number);
            exec(request).expect(expected);
        });
    };
    thread::scope(|scope| {
        (0..WORKERS).for_each(|first| drop(scope.spawn(move || worker(first))));
    });
    let settled = |after: &Host| {
        after.mounts == before.mounts
            && after.cgroups <= before.cgroups + 64
            // A kilobyte a run; a leak of one namespace, mount or cgroup a run is many.
            && after.kernel_memory_kib <= before.kernel_memory_kib + (runs as u64).max(4096)
    };
    let mut after = Host::look();
    eventually(Duration::from_secs(30), || {
        after = Host::look();
        settled(&after)
    });
    assert!(settled(&after), "before {before:?}, after {after:?}");
    // Launchers; what they had started has gone with them, or the counts above would show it.
    let program = program_path().unwrap();
    let ours = |pid: &&u32| fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|exe| exe == program);
    let left: Vec<&u32> = after.processes.difference(&before.processes).filter(ours).collect();
    assert!(left.is_empty(), "{left:?}");
    assert_eq!(dead_records(), Vec::<String>::new());
}

test!(serial Both, two_hundred_runs_at_a_time_get_each_its_own, seconds 300);
fn two_hundred_runs_at_a_time_get_each_its_own() {
    let before = mounts();
    // They wait for each other by the clock alone: the last has begun before the first ends.
    let request = |number: usize| json!({"code": format!("sleep 5; echo {number}; exit {}", number % 50), "language": "sh", "id": number.to_string()});
    let running: Vec<Child> = (0..AT_A_TIME).map(|number| start(&mut stockade(["exec"]), request(number).to_string().as_bytes())).collect();
    let launchers: BTreeSet<u32> = running.iter().map(Child::id).collect();
    for (number, child) in running.into_iter().enumerate() {
        let done = ExecResult::of(child.wait_with_output().unwrap());
        done.expect(json!({"verdict": "exited", "code": number % 50, "output": format!("{number}\n"), "id": number.to_string()}));
    }
    assert_eq!(mounts(), before);
    assert!(eventually(Duration::from_secs(5), || cgroups_of(&launchers).is_empty()), "{:?}", cgroups_of(&launchers));
    assert_eq!(dead_records(), Vec::<String>::new());
}
