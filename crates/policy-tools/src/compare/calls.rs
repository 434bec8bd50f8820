//! System calls: which may be made, with which arguments, and what a refusal costs.
//!
//! Argument rules that no policy can change (no namespaces in clone, no set-ID bits, no
//! foreign pids) are the same on both sides and so no difference.

use std::collections::BTreeSet;

use stockade_policy::{
    filter::names::number,
    model::{Seccomp, SocketFamily},
    names::ioctl_text,
};

use super::{Area, Difference};

/// What the filter does with a call, the strictest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum SyscallOutcome {
    Killed,
    Refused,
    Missing,
    Allowed,
}

/// What a policy does with a call; the filter reads its lists in this order.
pub(super) fn outcome(seccomp: &Seccomp, name: &str) -> SyscallOutcome {
    let listed = |list: &[String]| list.iter().any(|other| other == name);
    match () {
        () if listed(&seccomp.enosys) => SyscallOutcome::Missing,
        () if listed(&seccomp.allow) => SyscallOutcome::Allowed,
        () if listed(&seccomp.kill) => SyscallOutcome::Killed,
        () => SyscallOutcome::Refused,
    }
}

/// Every call that one of two policies names and this architecture has.
pub(super) fn named<'p>(first: &'p Seccomp, second: &'p Seccomp) -> BTreeSet<&'p str> {
    let lists = |seccomp: &'p Seccomp| seccomp.allow.iter().chain(&seccomp.kill).chain(&seccomp.enosys);
    lists(first).chain(lists(second)).map(String::as_str).filter(|name| number(name).is_some()).collect()
}

/// Calls that belong together, and what code can do with them.
const GROUPS: &[(&[&str], &str)] = &[
    (
        &["ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "kcmp", "process_mrelease"],
        "code can read and change the memory of its other processes, but not of pid 1 or of processes outside",
    ),
    (&["add_key", "request_key", "keyctl"], "code can use the kernel's keyrings, which had many vulnerabilities"),
    (
        &["perf_event_open"],
        "code can read the processor's counters, which help cache side channels, if the host's kernel.perf_event_paranoid allows it",
    ),
    (&["userfaultfd"], "code can pause the kernel in the middle of a copy, which makes races easy to win"),
    (
        &["splice", "tee", "vmsplice"],
        "code can move pages between pipes and files inside the kernel, which had vulnerabilities (CVE-2022-0847)",
    ),
    (
        &["setxattr", "lsetxattr", "fsetxattr", "removexattr", "lremovexattr", "fremovexattr"],
        "code can remove extended attributes of its files, which file systems parse; setting one is never supported",
    ),
    (
        &["inotify_init", "inotify_init1", "inotify_add_watch", "inotify_rm_watch"],
        "code can watch files, also those that other runs change in a shared scratch; `fcntl` can then watch directories",
    ),
    (&["fanotify_init", "fanotify_mark"], "code can watch files, also those that other runs change in a shared scratch"),
    (&["mlock", "mlock2", "munlock", "mlockall", "munlockall"], "code can lock memory that the kernel cannot reclaim, within its limit"),
    (&["pkey_alloc", "pkey_free", "pkey_mprotect"], "just-in-time compilers can protect their code pages"),
    (
        &["get_mempolicy", "set_mempolicy", "mbind", "migrate_pages", "move_pages", "set_mempolicy_home_node"],
        "code sees and chooses the NUMA node of its memory",
    ),
    (
        &[
            "sched_setparam",
            "sched_setscheduler",
            "sched_setattr",
            "sched_setaffinity",
            "getcpu",
            "setpriority",
            "ioprio_get",
            "ioprio_set",
        ],
        "code can choose its own CPU, scheduling class and priority, which helps it win races",
    ),
    (
        &["timer_create", "timer_settime", "timer_gettime", "timer_getoverrun", "timer_delete"],
        "code can set POSIX timers, which had vulnerabilities (CVE-2025-38352)",
    ),
    (&["chown", "fchown", "lchown", "fchownat"], "code can change the owner of its files to its own ids; others need a capability"),
    (
        &["setuid", "setgid", "setreuid", "setregid", "setresuid", "setresgid", "setgroups", "setfsuid", "setfsgid", "capset"],
        "code can switch between the ids that it has; others need a capability",
    ),
    (&["mknod", "mknodat"], "code can make fifos and sockets where Landlock allows it; devices need a capability"),
    (&["personality"], "code can set the default personality; the filter refuses others"),
    (&["sync", "syncfs"], "code can make the host write its dirty pages to disk, which slows other processes"),
    (
        &["shmget", "shmat", "shmdt", "shmctl", "semget", "semop", "semtimedop", "semctl", "msgget", "msgsnd", "msgrcv", "msgctl"],
        "code can use System V IPC in its own namespace; segments count as its memory, the kernel's own structures may not",
    ),
    (
        &["mq_open", "mq_unlink", "mq_timedsend", "mq_timedreceive", "mq_notify", "mq_getsetattr"],
        "code can use POSIX message queues, with a size limit of 0",
    ),
    (&["modify_ldt", "iopl", "ioperm"], "code reaches old and rarely used processor code of the kernel"),
    (&["seccomp"], "code can load further filters, which only remove rights"),
    (
        &[
            "sendmmsg",
            "recvmmsg",
            "socket",
            "bind",
            "listen",
            "accept",
            "accept4",
            "connect",
            "sendto",
            "recvfrom",
            "sendmsg",
            "recvmsg",
            "shutdown",
            "getsockname",
            "getpeername",
            "getsockopt",
            "setsockopt",
        ],
        "code can use sockets of the allowed families, in its own network namespace",
    ),
];

const OTHER_CALLS: &str = "code reaches more of the kernel's code, and the bugs in it";

pub(super) fn loosened(ceiling: &Seccomp, seccomp: &Seccomp, out: &mut Vec<Difference>) {
    let all = named(ceiling, seccomp);
    let allowed: Vec<&str> = all
        .iter()
        .copied()
        .filter(|name| outcome(seccomp, name) == SyscallOutcome::Allowed && outcome(ceiling, name) != SyscallOutcome::Allowed)
        .collect();
    for group in groups(&allowed) {
        let difference = Difference::new(Area::SystemCalls, "[seccomp] allow", "system calls").items(group.0);
        out.push(difference.consequence(group.1));
    }
    let survived: Vec<String> = all
        .iter()
        .filter(|name| {
            outcome(ceiling, name) == SyscallOutcome::Killed
                && matches!(outcome(seccomp, name), SyscallOutcome::Refused | SyscallOutcome::Missing)
        })
        .map(|name| (*name).to_owned())
        .collect();
    if !survived.is_empty() {
        let difference =
            Difference::new(Area::SystemCalls, "[seccomp] kill", "refused system calls that do not end the run").items(survived);
        out.push(difference.consequence("they still fail, but code can go on and try others"));
    }
    let family =
        |family: &&SocketFamily| !ceiling.socket_families.contains(family) || outcome(ceiling, "socket") != SyscallOutcome::Allowed;
    let families: Vec<&SocketFamily> = seccomp.socket_families.iter().filter(family).collect();
    if !families.is_empty() && outcome(seccomp, "socket") == SyscallOutcome::Allowed {
        let network = families.iter().any(|family| matches!(family, SocketFamily::Inet | SocketFamily::Inet6));
        let items = families.iter().map(|family| family.name().to_owned()).collect();
        let difference = Difference::new(Area::SystemCalls, "[seccomp] socket_families", "socket families").items(items);
        out.push(difference.consequence(if network {
            "code reaches the kernel's network stack: its own loopback interface, and through the gate the peers of [egress]"
        } else {
            "code reaches this part of the kernel's network stack, in its own network namespace"
        }));
    }
    let requests: Vec<String> =
        seccomp.ioctl.iter().filter(|request| !ceiling.ioctl.contains(request)).map(|request| ioctl_text(*request)).collect();
    if !requests.is_empty() {
        let difference = Difference::new(Area::SystemCalls, "[seccomp] ioctl", "ioctl requests").items(requests);
        out.push(difference.consequence("they reach the drivers and file systems behind the files that code can open"));
    }
}

/// Calls, grouped by what code can do with them.
fn groups(calls: &[&str]) -> Vec<(Vec<String>, &'static str)> {
    let owned = |names: Vec<&&str>| names.into_iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    let known = GROUPS.iter().map(|(names, consequence)| (owned(calls.iter().filter(|call| names.contains(call)).collect()), *consequence));
    let rest = calls.iter().filter(|call| GROUPS.iter().all(|(names, _)| !names.contains(call))).collect();
    known.chain([(owned(rest), OTHER_CALLS)]).filter(|(calls, _)| !calls.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use stockade_policy::names;

    use super::*;

    #[test]
    fn every_call_of_a_group_exists_and_is_in_one_group() {
        let mut seen = BTreeSet::new();
        for name in GROUPS.iter().flat_map(|(names, _)| *names) {
            assert!(names::is_syscall(name), "{name}");
            assert!(seen.insert(name), "{name}");
        }
    }
}
