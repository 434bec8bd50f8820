//! Every rule of every shipped filter on the real kernel: what a policy allows gets there,
//! what it does not is answered as documented.
//!
//! The rules are read from the policy; how arguments are judged is written down here once
//! more, in the kernel's words, so that a mistake in the compiler of filters is not repeated.
//! An allowed call is tried inside and outside with the same arguments, at which the kernel
//! does nothing: both must get the same answer, and another one than a filter's. For a
//! refused call the launcher's account names the filter. A call's own bugs, and
//! what the kernel does with good arguments, are not looked for.

use std::{
    collections::{BTreeMap, BTreeSet},
    thread,
};

use serde_json::{Value, json};
use stockade_policy::{
    SHIPPED,
    filter::{Filters, names},
    load_shipped,
    model::{Policy, SocketFamily},
};

use crate::support::{
    exec::{ExecResult, exec_with, run_under, run_with_stdin, scratch, stockade, text},
    policy_dir::{PolicyDirectory, unscreened},
    runner::{is_root, test},
    timeouts::scaled_limit,
};

/// Looks like a bad pointer, descriptor, length and flag at once.
const BAD: u64 = u64::MAX;
/// `uretprobe` and `uprobe`: from Linux 6.11 and 6.18 on they are exempt from every filter, and
/// answer only the trampolines that the kernel itself puts into traced processes.
const PAST_FILTERS: [u32; 2] = [335, 336];
/// Above the 32 bits in which the kernel reads an `int`.
const HIGH: u64 = 0x1_0000_0000;

/// One call to try.
#[derive(Clone, Debug)]
struct Probe {
    name: String,
    number: u32,
    arguments: Vec<u64>,
    answer: Answer,
}

/// What it must come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    /// The kernel's own.
    Reaches,
    /// EPERM, and the launcher's account of it.
    Denied,
    /// ENOSYS.
    Missing,
    /// EOPNOTSUPP.
    Unsupported,
    /// EINVAL.
    Invalid,
    /// ENOSYS, or the kernel's own answer, since it asks no filter about it.
    PastFilters,
}

impl Answer {
    /// The call is tried outside as well, and in its own process.
    fn is_the_kernels(self) -> bool {
        matches!(self, Answer::Reaches | Answer::PastFilters)
    }
}

/// Arguments that pass the rules and at which the kernel does nothing, for the calls for
/// which bad ones would not pass, would not come back, or would harm somebody.
fn harmless(name: &str) -> Vec<u64> {
    let directory = (-100i64).cast_unsigned();
    match name {
        "clone" => vec![17, 0, 0, 0, 0],
        // No process has this number.
        "kill" => vec![0x3fff_ffff, 0],
        // Waking no waiter: an unknown operation is answered as an unknown call.
        "futex" => vec![0, 1, 0],
        "socket" => vec![1, 1, 0],
        "socketpair" => vec![1, 1, 0, BAD],
        "ioctl" => vec![BAD, 0x5401, BAD],
        "chmod" | "fchmod" | "mkdir" | "creat" => vec![BAD, 0o755],
        "fchmodat" | "mkdirat" => vec![directory, BAD, 0o755],
        "fchmodat2" => vec![directory, BAD, 0o755, 0],
        "open" => vec![BAD, 0, 0],
        "openat" => vec![directory, BAD, 0, 0],
        "mknod" => vec![BAD, 0o100_644, 0],
        "mknodat" => vec![directory, BAD, 0o100_644, 0],
        "renameat2" => vec![BAD, BAD, BAD, BAD, 0],
        "prlimit64" | "sched_setparam" | "sched_setattr" | "sched_setscheduler" => vec![0, BAD, BAD, BAD],
        "sched_setaffinity" => vec![0, 8, BAD],
        // No lower than any other, since it cannot be raised again.
        "setpriority" => vec![0, 0, 19],
        "prctl" => vec![15, BAD],
        "mmap" => vec![BAD, 0, 0, 2, BAD, 0],
        "memfd_create" => vec![BAD, 0],
        "madvise" => vec![BAD, 0, BAD],
        "ioprio_set" => vec![1, 0, 0x4004],
        _ => vec![BAD; 6],
    }
}

/// Every rule on arguments: the call, arguments, and whether they pass.
fn judged(policy: &Policy) -> Vec<(&'static str, Vec<u64>, bool)> {
    let mut all = Vec::new();
    // With something in the half that the kernel does not read, the answer is the same.
    let mut both = |name: &'static str, at: usize, values: &[u64], passes: bool| {
        for value in values {
            for high in [0, HIGH, 0xffff_ffff << 32] {
                let mut arguments = harmless(name);
                arguments[at] = high | value;
                all.push((name, arguments, passes));
            }
        }
    };
    both("clone", 0, &[17, 0], true);
    both("clone", 0, &[1 << 17 | 17, 1 << 25, 1 << 26, 1 << 27, 1 << 28, 1 << 29, 1 << 30, 0x7e02_0011], false);
    for (name, at) in [("chmod", 1), ("fchmod", 1), ("mkdir", 1), ("creat", 1), ("fchmodat", 2), ("fchmodat2", 2), ("mkdirat", 2)] {
        both(name, at, &[0, 0o644, 0o1777], true);
        both(name, at, &[0o4755, 0o2755, 0o6000, 0o7777], false);
    }
    for (name, at) in [("mknod", 1), ("mknodat", 2)] {
        both(name, at, &[0o644, 0o100_644, 0o010_600, 0o140_600], true);
        both(name, at, &[0o020_600, 0o060_600, 0o040_755, 0o120_777, 0o170_000, 0o104_755, 0o102_755, 0o014_644], false);
    }
    both("socketpair", 0, &[1], true);
    both("socketpair", 0, &[0, 2, 10, 16, 40], false);
    // Streams and sequences of packets stay with their peer; datagrams (also as SOCK_RAW) can be sent
    // to any socket with a path.
    both("socketpair", 1, &[1, 5, 0x8_0801], true);
    both("socketpair", 1, &[2, 3, 0x8_0802], policy.seccomp.socket_families.contains(&SocketFamily::Unix));
    both("personality", 0, &[0, 0xffff_ffff], true);
    both("personality", 0, &[0x000_0008, 0x002_0000, 0x004_0000, 0x040_0000], false);
    both("renameat2", 4, &[0, 1, 2], true);
    both("renameat2", 4, &[4, 5, 6], false);
    both("prctl", 0, &[15, 16, 39], true);
    // PR_SET_MM, PR_SET_THP_DISABLE, PR_SCHED_CORE, PR_SET_MEMORY_MERGE, PR_FUTEX_HASH, PR_SET_VMA and what no kernel has yet.
    both("prctl", 0, &[22, 35, 41, 59, 62, 67, 78, 79, 200, 0x5356_4d41, 0xffff_ffff], false);
    both("mmap", 3, &[2, 0x22, 0x2_0022], true);
    both("mmap", 3, &[0x4_0022, 0x4_0000, 0x7c04_0022], false);
    both("memfd_create", 1, &[0, 1, 3, 8], true);
    both("memfd_create", 1, &[4, 5, 0x7800_0004], false);
    both("madvise", 2, &[4, 11, 13, 14], true);
    both("madvise", 2, &[12], false);
    // F_NOTIFY; F_GETFD, and numbers beside it.
    both("fcntl", 1, &[1026], policy.seccomp.allow.iter().any(|name| name == "inotify_add_watch"));
    both("fcntl", 1, &[1, 1023, 1025, 1027, 1039, 1041, 0xffff_ffff], true);
    // F_SETLEASE and F_SETDELEG.
    both("fcntl", 1, &[1024, 1040], false);
    // F_OFD_SETLK and F_OFD_SETLKW; F_OFD_GETLK, F_SETLK and F_SETLKW, and a number beside them.
    both("fcntl", 1, &[37, 38], false);
    both("fcntl", 1, &[36, 6, 7, 39], true);
    for name in ["prlimit64", "sched_setaffinity", "sched_setattr", "sched_setparam", "sched_setscheduler"] {
        both(name, 0, &[0], true);
        both(name, 0, &[1, 2, 0x3fff_ffff, 0xffff_ffff], false);
    }
    both("setpriority", 0, &[1, 2, 3], false);
    both("setpriority", 1, &[1, 1000, 0xffff_ffff], false);
    both("ioprio_set", 0, &[0, 2, 3], false);
    both("ioprio_set", 1, &[1, 1000, 0xffff_ffff], false);
    let listed: Vec<u64> = policy.seccomp.ioctl.iter().map(|request| u64::from(*request)).collect();
    both("ioctl", 1, &listed, true);
    // Typing, console, line discipline, virtual terminals, and the neighbours of what is listed.
    let mut others: Vec<u64> = vec![0, 0x5412, 0x541c, 0x541d, 0x5423, 0x5457, 0x4b3a, 0x5603, 0x8912 + 0x30, 0x4004_6601, 0xffff_ffff];
    others.extend(listed.iter().flat_map(|request| [request - 1, request + 1, request ^ 0x8000_0000]));
    others.retain(|request| !listed.contains(request));
    both("ioctl", 1, &others, false);
    let families = &policy.seccomp.socket_families;
    for family in 0..47 {
        const ASKED: &[u64] = &[0, 1, 6, 17, 41, 47, 58, 132, 136, 255, 256, 262];
        let protocols: &[u64] = match family {
            // Its protocols are the kernel's to judge: it has one.
            1 if families.contains(&SocketFamily::Unix) => ASKED,
            2 if families.contains(&SocketFamily::Inet) => &[0, 6, 17],
            10 if families.contains(&SocketFamily::Inet6) => &[0, 6, 17],
            16 if families.contains(&SocketFamily::Netlink) => &[0],
            _ => &[],
        };
        for protocol in ASKED {
            for high in [0, HIGH] {
                let passes = protocols.contains(protocol);
                // Of a family that is closed, one protocol will do.
                if passes || !protocols.is_empty() || *protocol == 0 {
                    all.push(("socket", vec![high | family, 1, high | protocol], passes));
                }
            }
        }
    }
    for (level, option, passes) in
        [(1, 2, true), (0, 26, true), (41, 26, true), (6, 50, true), (1, 26, false), (1, 50, false), (1, 51, false), (1, 52, false)]
            .into_iter()
            .chain(
                [
                    (0, 35),
                    (0, 39),
                    (0, 42),
                    (0, 48),
                    (41, 20),
                    (41, 42),
                    (41, 48),
                    (41, 6),
                    (41, 32),
                    (41, 54),
                    (41, 57),
                    (41, 59),
                    (6, 14),
                    (6, 32),
                    (6, 38),
                ]
                .map(|(level, option)| (level, option, false)),
            )
    {
        for high in [0, HIGH] {
            all.push(("setsockopt", vec![BAD, high | level, high | option, BAD, BAD], passes));
        }
    }
    for (name, first) in [("open", vec![BAD]), ("openat", vec![(-100i64).cast_unsigned(), BAD])] {
        for (flags, mode, passes) in [
            (0, 0o6777, true),
            (0o1, 0o4755, true),
            (0o101, 0o644, true),
            (0o20_200_001, 0o600, true),
            (0o101, 0o4755, false),
            (0o101, 0o2755, false),
            (0o20_200_001, 0o6755, false),
            (0o20_000_000, 0o4000, false),
        ] {
            for high in [0, HIGH] {
                all.push((name, [first.clone(), vec![high | flags, high | mode]].concat(), passes));
            }
        }
    }
    all
}

fn by_number(policy: &Policy, growing_scratch: bool) -> Vec<Probe> {
    let answer = |number: u32, name: &str| match name {
        _ if PAST_FILTERS.contains(&number) => Answer::PastFilters,
        "" => Answer::Missing,
        "clone3" | "openat2" => Answer::Missing,
        _ if policy.seccomp.enosys.iter().any(|listed| listed == name) => Answer::Missing,
        _ if !policy.seccomp.allow.iter().any(|listed| listed == name) => {
            assert!(number < names::first_unknown());
            Answer::Denied
        }
        "sendfile" | "splice" | "tee" => Answer::Invalid,
        "setxattr" | "lsetxattr" | "fsetxattr" | "setxattrat" => Answer::Unsupported,
        "fallocate" | "landlock_create_ruleset" | "landlock_add_rule" if growing_scratch => Answer::Unsupported,
        _ => Answer::Reaches,
    };
    let killed = |name: &str| policy.seccomp.kill.iter().any(|listed| listed == name);
    // The x32 entry has the same numbers with one bit more.
    let x32 = (0..names::first_unknown() + 100).map(|number| 0x4000_0000 | number);
    let beyond = [600, 1000, 0xffff, 0x3fff_ffff, 0x7fff_ffff];
    (0..names::first_unknown() + 50)
        .chain(x32)
        .chain(beyond)
        .map(|number| {
            let name = names::name(number).unwrap_or_default();
            Probe { answer: answer(number, &name), arguments: harmless(&name), name, number }
        })
        .filter(|probe| !killed(&probe.name))
        .collect()
}

fn by_argument(policy: &Policy) -> Vec<Probe> {
    let of = |(name, arguments, passes): (&str, Vec<u64>, bool)| {
        let allowed = policy.seccomp.allow.iter().any(|listed| listed == name);
        let answer = if allowed && passes { Answer::Reaches } else { Answer::Denied };
        Probe { name: name.to_owned(), number: names::number(name).unwrap(), arguments, answer }
    };
    judged(policy).into_iter().map(of).collect()
}

/// The program that tries them: of the 32-bit entry only these numbers.
fn script(probes: &[Probe], i386: &[u32]) -> String {
    let calls: Vec<Value> =
        probes.iter().map(|probe| json!([probe.number, probe.arguments, u8::from(probe.answer.is_the_kernels())])).collect();
    format!("CALLS = {}\nI386 = {}\n{}", json!(calls), json!(i386), include_str!("../support/filters.py"))
}

fn walk(name: &str, probes: &[Probe], scratch: Option<&str>) {
    let limits = json!({"wall": scaled_limit(60_000), "cpu": scaled_limit(60_000), "cpus": 1, "memory": "256MiB"});
    let i386: Vec<u32> = (0..470).collect();
    let policies = PolicyDirectory::new();
    let policy = policies.write(name, &unscreened(name, ""));
    let done = exec_with(&["--policy", &policy], json!({"code": script(probes, &i386), "limits": limits, "scratch": scratch}));
    let inside = done.succeeded().json();
    // The control: only what is allowed, and by the 32-bit entry only to ask for the own number.
    let reaching: Vec<Probe> = probes.iter().filter(|probe| probe.answer.is_the_kernels()).cloned().collect();
    let output = run_with_stdin(&mut run_under(&["/usr/bin/python3", "-"]), script(&reaching, &[20]).as_bytes());
    let outside: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&output.stderr)));
    let mut answers = outside[0].as_array().unwrap().iter();
    let (mut wrong, mut lacking) = (Vec::new(), BTreeSet::new());
    assert_eq!(inside[0].as_array().unwrap().len(), probes.len());
    for (probe, inside) in probes.iter().zip(inside[0].as_array().unwrap()) {
        let right = match probe.answer {
            Answer::Reaches | Answer::PastFilters => {
                let outside = answers.next().unwrap();
                let filtered = probe.answer == Answer::PastFilters && inside == "ENOSYS";
                // An older kernel lacks a few of what is allowed.
                if inside == "ENOSYS" && outside == "ENOSYS" {
                    lacking.insert(probe.name.as_str());
                } else if !filtered && (inside != outside || inside == "EPERM" || inside == "ENOSYS") {
                    wrong.push(format!("{} {:x?}: {inside} inside, {outside} outside", probe.name, probe.arguments));
                }
                continue;
            }
            Answer::Denied => inside == "EPERM",
            Answer::Missing => inside == "ENOSYS",
            Answer::Invalid => inside == "EINVAL",
            Answer::Unsupported => inside == "EOPNOTSUPP" || inside == "ENOTSUP",
        };
        if !right {
            wrong.push(format!("{} {} {:x?}: {inside} inside, not {:?}", probe.number, probe.name, probe.arguments, probe.answer));
        }
    }
    assert!(wrong.is_empty(), "{} are wrong\n{}", wrong.len(), wrong[..wrong.len().min(20)].join("\n"));
    assert!(lacking.len() <= 4, "{lacking:?}");
    // A kernel without the 32-bit entry kills the process that tries it.
    let ends = outside[1][0] != "ok";
    let entries = inside[1].as_array().unwrap();
    assert!(entries.iter().all(|answer| answer == "ENOSYS") && entries.len() == i386.len() || ends, "{entries:?}");
    it_was_the_filter(&done, probes);
}

/// Each refused call stands in the result by its name, as often as it was tried.
fn it_was_the_filter(done: &ExecResult, probes: &[Probe]) {
    let mut counted: BTreeMap<&str, u64> = BTreeMap::new();
    for denial in done["denials"].as_array().unwrap().iter().filter(|denial| denial["kind"] == "syscall") {
        let what = denial["what"].as_str().unwrap();
        *counted.entry(what.split('(').next().unwrap()).or_default() += denial["count"].as_u64().unwrap();
    }
    let listed: u64 = counted.values().sum();
    let tried = probes.iter().filter(|probe| probe.answer == Answer::Denied).count() as u64;
    assert_eq!(listed + done["denials_omitted"].as_u64().unwrap(), tried, "{}", done.brief());
    if done["denials_omitted"] == 0 {
        for probe in probes.iter().filter(|probe| probe.answer == Answer::Denied) {
            assert!(counted.contains_key(probe.name.as_str()), "{} is not among {counted:?}", probe.name);
        }
    }
}

fn shipped(name: &str) -> Policy {
    load_shipped(name).unwrap()
}

test!(Both, every_shipped_policy_loads_one_of_two_filters);
/// So that to walk over two is to walk over all; by the plan, which is what a run loads.
fn every_shipped_policy_loads_one_of_two_filters() {
    let sums = |name: &str| Filters::new(&shipped(name).seccomp).unwrap();
    for (name, _) in SHIPPED.iter().copied() {
        let walked = if name == "strict" { "strict" } else { "default" };
        assert_eq!(sums(name), sums(walked), "{name} needs its own walk");
        // Without a cgroup, which an ordinary user may lack, `strict` has no plan.
        if name == "strict" && !is_root() {
            continue;
        }
        let output = stockade(["run", "--policy", name, "--dry-run", "--json", "--", "true"]).output().unwrap();
        let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
        let filters = sums(walked);
        assert_eq!(plan["filter"]["sha256"], filters.private_scratch.sha256.as_str(), "{name}");
        assert_eq!(plan["filter"]["kill_names"].as_array().map(Vec::len), Some(filters.kill.len()), "{name}");
    }
}

test!(Both, every_call_by_number_is_answered_as_default_says, seconds 90);
fn every_call_by_number_is_answered_as_default_says() {
    walk("default", &by_number(&shipped("default"), false), None);
}

test!(Both, every_argument_rule_of_default_is_the_kernels, seconds 90);
fn every_argument_rule_of_default_is_the_kernels() {
    walk("default", &by_argument(&shipped("default")), None);
}

test!(Both, every_call_by_number_is_answered_as_strict_says, needs [Cgroup], seconds 90);
fn every_call_by_number_is_answered_as_strict_says() {
    walk("strict", &by_number(&shipped("strict"), false), None);
}

test!(Both, every_argument_rule_of_strict_is_the_kernels, needs [Cgroup], seconds 90);
fn every_argument_rule_of_strict_is_the_kernels() {
    walk("strict", &by_argument(&shipped("strict")), None);
}

test!(Both, every_call_by_number_is_answered_so_in_a_host_scratch, seconds 90);
fn every_call_by_number_is_answered_so_in_a_host_scratch() {
    walk("default", &by_number(&shipped("default"), true), Some(text(&scratch())));
}

test!(Both, every_call_that_strict_kills_for_ends_the_run, needs [Cgroup], seconds 120);
fn every_call_that_strict_kills_for_ends_the_run() {
    let kill = shipped("strict").seccomp.kill;
    assert!(kill.len() > 30, "{kill:?}");
    let policies = PolicyDirectory::new();
    let policy = policies.write("strict", &unscreened("strict", ""));
    let try_each = |names: &[String]| {
        for name in names {
            let number = names::number(name).unwrap();
            let code = format!(
                "import ctypes\nprint('tried', flush=True)\nctypes.CDLL(None).syscall({number}, -1, -1, -1, -1, -1, -1)\nprint('lived')"
            );
            let done = exec_with(&["--policy", &policy], json!({"code": code, "limits": {"wall": scaled_limit(20_000), "cpus": 1}}));
            done.expect(json!({"verdict": "syscall_denied", "output": "tried\n", "success": false}));
            assert_eq!(done["denials"][0]["what"], name.as_str(), "{}", done.brief());
        }
    };
    thread::scope(|scope| {
        kill.chunks(kill.len().div_ceil(4)).for_each(|part| drop(scope.spawn(|| try_each(part))));
    });
    // The control: under a policy that only refuses them the program lives on.
    let number = names::number(&kill[0]).unwrap();
    let code = format!("import ctypes\nprint(ctypes.CDLL(None).syscall({number}, -1, -1, -1, -1, -1, -1))");
    exec_with(&[], json!({"code": code})).succeeded().expect(json!({"output": "-1\n"}));
}
