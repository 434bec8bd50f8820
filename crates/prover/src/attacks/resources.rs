//! More than the limits allow: memory, processes, CPU time, disk, and the kernel's own objects.

use nix::libc::{EAGAIN, EMFILE, ENOMEM, ENOSPC, EPERM};
use stockade_policy::plan::{CgroupPlan, UserNamespaces};
use stockade_protocol::{
    LimitKey, Verdict,
    probe::{Answer, Failing, Script},
};

use super::{O_CREAT, O_WRONLY};
use crate::{
    attack::{Attack, Class, Control, ControlExpectation, Expected, Limits, Observation, Run, RunControl},
    fixture::Fixture,
    inside::ProbeRun,
    room::{MAX_PROCESSES, MORE_PROCESSES},
    script::{CWD, n, script},
};

const CLASS: Class = Class::Resources;
const MIB: u64 = 1 << 20;

pub(crate) fn attacks(fixture: &Fixture) -> Vec<Attack> {
    let mut all = Vec::new();
    all.extend(memory(fixture));
    all.extend(processes(fixture));
    all.extend(cpu(fixture));
    all.extend(disk(fixture));
    all.extend(rlimits(fixture));
    all.extend(kernel_objects(fixture));
    all
}

/// The layer that holds the limits of all processes together.
fn shared_limits(fixture: &Fixture) -> &'static [&'static str] {
    if matches!(fixture.plan.cgroup, CgroupPlan::Absent { .. }) { &["rlimits"] } else { &["cgroup"] }
}

/// A value that the policy lets a run ask for.
fn within(fixture: &Fixture, key: LimitKey, wanted: u64) -> (LimitKey, Option<u64>) {
    (key, Some(fixture.policy.limits_max.get(key).map_or(wanted, |most| wanted.min(most))))
}

/// Small tmpfs sizes, so that the memory limit, which counts them, can be small too.
fn small(fixture: &Fixture, more: &[(LimitKey, u64)]) -> Limits {
    let sizes = [(LimitKey::ScratchSize, 8 * MIB), (LimitKey::TmpSize, 8 * MIB)];
    sizes.iter().chain(more).map(|(key, value)| within(fixture, *key, *value)).collect()
}

fn run(script: Script, limits: Limits, expected: &str, judge: crate::attack::Judge) -> Run {
    Run { script, first_process: false, limits, host_scratch: false, collect: &[], expected: String::from(expected), judge }
}

fn memory(fixture: &Fixture) -> Vec<Attack> {
    const POPULATE_PRIVATE_ANONYMOUS: i64 = 0x8022;
    const READ_WRITE: i64 = 3;
    let take = |mib: u64| {
        script(|b| {
            let length = n((mib * MIB).cast_signed());
            b.attack("mmap", &[n(0), length, n(READ_WRITE), n(POPULATE_PRIVATE_ANONYMOUS), n(-1), n(0)]);
        })
    };
    const SIGKILL: u32 = 9;
    // The kernel may kill only the process that asked; the run then ends by itself.
    let held = |done: &ProbeRun, _: &Fixture| {
        let killed = done.answer() == Some(Answer::Signal(SIGKILL)) && done.result.report.limits_hit.contains(&"memory");
        Observation { held: killed || done.ended_as(Verdict::OutOfMemory) || done.answered(ENOMEM), what: done.words() }
    };
    let limits = |mib| small(fixture, &[(LimitKey::Memory, mib * MIB)]);
    vec![Attack::run(
        CLASS,
        "memory",
        "use 48 MiB of memory where 24 are allowed",
        shared_limits(fixture),
        run(take(48), limits(24), "killed for memory, or ENOMEM", held),
        RunControl::Limits(limits(96)),
    )]
}

/// The policy's own number, in the program's first process: under `processes = 1` there is no
/// other. Its exit status is what the last fork answered.
fn processes(fixture: &Fixture) -> Vec<Attack> {
    const REFUSED: i32 = (-EAGAIN) & 0xff;
    let allowed = fixture.processes.map_or(MAX_PROCESSES, |own| own.min(MAX_PROCESSES));
    let bomb = script(|b| {
        let pause = b.bytes(&[20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        let mut child = |failing| {
            b.fork(failing, |b| {
                b.may("nanosleep", &[pause, n(0)]);
            })
        };
        // With the process that makes them these are as many as are allowed.
        (1..allowed).for_each(|_| {
            child(Failing::Breaks);
        });
        let last = child(Failing::Counts);
        b.attack("exit_group", &[last]);
    });
    let held = move |done: &ProbeRun, _: &Fixture| {
        let report = &done.result.report;
        let refused = matches!(report.verdict, Verdict::Exited | Verdict::ProcessLimit) && report.code == REFUSED;
        Observation { held: refused, what: if refused { format!("EAGAIN for the last one; {}", done.words()) } else { done.words() } }
    };
    let made = move |done: &ProbeRun, _: &Fixture| {
        let all = done.ended_as(Verdict::Exited) && done.result.report.code != REFUSED;
        Observation { held: all, what: if all { String::from("all were made") } else { done.words() } }
    };
    let limits = |count| small(fixture, &[(LimitKey::Processes, count), (LimitKey::Memory, 64 * MIB)]);
    let first = |count, expected: &str, judge| Run { first_process: true, ..run(bomb.clone(), limits(count), expected, judge) };
    let more = allowed + MORE_PROCESSES;
    vec![Attack::run(
        CLASS,
        "processes",
        format!("have {} processes under a limit of {allowed}", allowed + 1),
        shared_limits(fixture),
        first(allowed, "EAGAIN for the last one", held),
        RunControl::Run(Box::new(first(more, &format!("with {more} allowed"), made))),
    )]
}

fn cpu(fixture: &Fixture) -> Vec<Attack> {
    const SIGXCPU: u32 = 24;
    const SIGKILL: u32 = 9;
    // Some two seconds.
    const CALLS: u32 = 12_000_000;
    let busy = script(|b| {
        b.repeat(CALLS, "getpid", &[]);
    });
    let held = |done: &ProbeRun, _: &Fixture| Observation {
        // Where soft and hard limit are one, the kernel kills.
        held: done.ended_as(Verdict::CpuTimeout) || matches!(done.answer(), Some(Answer::Signal(SIGXCPU | SIGKILL))),
        what: done.words(),
    };
    let limits = |ms| small(fixture, &[(LimitKey::Cpu, ms), (LimitKey::Wall, 60_000)]);
    vec![Attack::run(
        CLASS,
        "CPU time",
        "compute for seconds where a fifth of one is allowed",
        shared_limits(fixture),
        run(busy, limits(200), "cpu_timeout, or a signal", held),
        RunControl::Limits(limits(30_000)),
    )]
}

/// Writes 16 MiB into a new file.
fn fill(path: &str) -> Script {
    script(|b| {
        let fd = b.open(path, O_WRONLY | O_CREAT);
        let block = b.space(64 << 10);
        b.repeat(256, "write", &[fd, block, n(64 << 10)]);
    })
}

fn disk(fixture: &Fixture) -> Vec<Attack> {
    let full =
        |done: &ProbeRun, _: &Fixture| Observation { held: done.answered(ENOSPC) || done.ended_as(Verdict::DiskLimit), what: done.words() };
    let sizes = |scratch: u64, tmp: u64| -> Limits {
        [
            (LimitKey::ScratchSize, scratch * MIB),
            (LimitKey::TmpSize, tmp * MIB),
            (LimitKey::Memory, 128 * MIB),
            (LimitKey::FileSize, 32 * MIB),
        ]
        .into_iter()
        .map(|(key, value)| within(fixture, key, value))
        .collect()
    };
    let mut all = Vec::new();
    let mut places = vec![("/tmp/fill", sizes(8, 4), sizes(8, 24)), ("/dev/shm/fill", sizes(8, 4), sizes(8, 24))];
    if !fixture.plan.scratch.read_only {
        places.push(("/scratch/fill", sizes(4, 8), sizes(24, 8)));
    }
    for (path, little, enough) in places {
        all.push(Attack::run(
            CLASS,
            format!("fill {}", path.trim_end_matches("/fill")),
            format!("write 16 MiB to {path} where 4 are allowed"),
            &["sized tmpfs"],
            run(fill(path), little, "ENOSPC, or disk_limit", full),
            RunControl::Limits(enough),
        ));
    }
    if fixture.plan.scratch.read_only {
        return all;
    }
    let many = script(|b| {
        const TMPFILE_READ_WRITE: i64 = 0o20_200_002;
        let path = b.text(".");
        b.repeat(64, "openat", &[CWD, path, n(TMPFILE_READ_WRITE), n(0o600)]);
    });
    let files = |count| -> Limits { [within(fixture, LimitKey::ScratchFiles, count)].into_iter().collect() };
    all.push(Attack::run(
        CLASS,
        "many files",
        "make 64 files where 16 are allowed",
        &["sized tmpfs"],
        run(many, files(16), "ENOSPC, or disk_limit", full),
        RunControl::Limits(files(256)),
    ));
    let grow = |name: &str, limit: u64| Run {
        host_scratch: true,
        ..run(fill(name), sizes(limit, 8), "disk_limit", |done, _| Observation {
            held: done.ended_as(Verdict::DiskLimit),
            what: done.words(),
        })
    };
    let fits = Run {
        expected: String::from("with more of it, exited"),
        judge: |done, _| Observation { held: done.ended_as(Verdict::Exited), what: done.words() },
        ..grow("fits", 24)
    };
    all.push(Attack::run(
        CLASS,
        "fill a host scratch",
        "write 16 MiB into a host directory where it may grow by 4",
        &["launcher"],
        grow("grown", 4),
        RunControl::Run(Box::new(fits)),
    ));
    all
}

/// Limits of one process, which no process inside may raise.
fn rlimits(fixture: &Fixture) -> Vec<Attack> {
    let mut all = Vec::new();
    let set = |resource: u32, value: u64| {
        script(|b| {
            let limit = b.bytes(&[value.to_le_bytes(), value.to_le_bytes()].concat());
            b.attack("prlimit64", &[n(0), n(i64::from(resource)), limit, n(0)]);
        })
    };
    for limit in &fixture.plan.rlimits {
        let Some(value) = limit.value.filter(|value| *value < u64::MAX >> 1) else { continue };
        all.push(Attack::new(
            CLASS,
            format!("raise {}", limit.name),
            format!("raise {} above {value}", limit.name),
            &["rlimits", "capabilities"],
            set(limit.resource, value + 1),
            Expected::Errno(&[EPERM]),
            Control::Instead(set(limit.resource, value), ControlExpectation::Succeeds),
        ));
        if limit.name == "RLIMIT_NOFILE" && value < 1 << 16 {
            let open = |times: u64| {
                script(|b| {
                    let path = b.text("/");
                    b.repeat(u32::try_from(times).unwrap_or(u32::MAX), "openat", &[CWD, path, n(0)]);
                })
            };
            all.push(Attack::new(
                CLASS,
                "open files",
                format!("open more than {value} files"),
                &["rlimits"],
                open(value + 1),
                Expected::Errno(&[EMFILE]),
                Control::Instead(open(value.saturating_sub(8)), ControlExpectation::Succeeds),
            ));
        }
    }
    const SIGXFSZ: u32 = 25;
    let grow = script(|b| {
        let fd = b.open("/tmp/large", O_WRONLY | O_CREAT);
        b.attack("ftruncate", &[fd, n((2 * MIB).cast_signed())]);
    });
    let sizes = |mib: u64| -> Limits { [within(fixture, LimitKey::FileSize, mib * MIB)].into_iter().collect() };
    all.push(Attack::run(
        CLASS,
        "a large file",
        "make a file of 2 MiB where one is allowed",
        &["rlimits"],
        run(grow, sizes(1), "SIGXFSZ", |done, _| Observation { held: done.answer() == Some(Answer::Signal(SIGXFSZ)), what: done.words() }),
        RunControl::Limits(sizes(4)),
    ));
    const RLIMIT_CORE: i64 = 4;
    const RLIMIT_LOCKS: i64 = 10;
    // The call returns success, so only reading the limit back shows whether it changed.
    let lowered = |resource: i64| {
        script(|b| {
            let none = b.bytes(&[0; 16]);
            b.may("prlimit64", &[n(0), n(resource), none, n(0)]);
            let to = b.space(16);
            b.need("prlimit64", &[n(0), n(resource), n(0), to]);
            b.find(to, n(16), &[0; 16]);
        })
    };
    all.push(Attack::new(
        CLASS,
        "a core dump",
        "lower the limit of core dumps to 0, at which the host's handler is started for it",
        &["rlimits", "seccomp"],
        lowered(RLIMIT_CORE),
        Expected::Value(0),
        Control::Instead(lowered(RLIMIT_LOCKS), ControlExpectation::Finds),
    ));
    all
}

/// What the kernel counts for each user, and so for all runs together.
fn kernel_objects(fixture: &Fixture) -> Vec<Attack> {
    let mut all = Vec::new();
    if fixture.knows("inotify_init1") && fixture.plan.identity.user_namespaces == UserNamespaces::Nested {
        let make = |times| {
            script(|b| {
                b.repeat(times, "inotify_init1", &[n(0)]);
            })
        };
        all.push(Attack::new(
            CLASS,
            "inotify instances",
            "make nine inotify instances where eight are allowed",
            &["user_namespace counts"],
            make(9),
            Expected::Errno(&[EMFILE]),
            Control::Instead(make(4), ControlExpectation::Succeeds),
        ));
    }
    if fixture.knows("rt_sigqueueinfo") {
        const BLOCK: i64 = 0;
        const SIGRTMIN: i64 = 34;
        let queue = |times| {
            script(|b| {
                let mask = b.bytes(&[0xff; 8]);
                b.need("rt_sigprocmask", &[n(BLOCK), mask, n(0), n(8)]);
                let own = b.need("getpid", &[]);
                // si_code SI_QUEUE.
                let info = b.bytes(&[34, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0]);
                b.space(112);
                b.repeat(times, "rt_sigqueueinfo", &[own, n(SIGRTMIN), info]);
            })
        };
        all.push(Attack::new(
            CLASS,
            "pending signals",
            "queue 600 signals where 512 are allowed",
            &["rlimits"],
            queue(600),
            Expected::Errno(&[EAGAIN]),
            Control::Instead(queue(300), ControlExpectation::Succeeds),
        ));
    }
    all
}
