//! System calls: which may be made, with which arguments, and what a refusal costs.
//!
//! Argument rules that no policy can change (no namespaces in clone, no set-ID bits, no
//! foreign pids) are the same on both sides and so no difference.

use std::collections::BTreeSet;

use super::{Area, Difference};
use crate::{
    filter::names::number,
    inherit::family_name,
    model::{Seccomp, SocketFamily},
    names,
};

/// What becomes of a call, from the narrowest on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Answer {
    Killed,
    Refused,
    Missing,
    Allowed,
}

/// What a policy does with a call; the filter reads its lists in this order.
pub(super) fn answer(seccomp: &Seccomp, name: &str) -> Answer {
    let listed = |list: &[String]| list.iter().any(|other| other == name);
    match () {
        () if listed(&seccomp.enosys) => Answer::Missing,
        () if listed(&seccomp.allow) => Answer::Allowed,
        () if listed(&seccomp.kill) => Answer::Killed,
        () => Answer::Refused,
    }
}

/// Every call that one of two policies names and this architecture has.
pub(super) fn named<'p>(first: &'p Seccomp, second: &'p Seccomp) -> BTreeSet<&'p str> {
    let lists = |seccomp: &'p Seccomp| seccomp.allow.iter().chain(&seccomp.kill).chain(&seccomp.enosys);
    lists(first).chain(lists(second)).map(String::as_str).filter(|name| number(name).is_some()).collect()
}

/// Calls that belong together, and what follows from having them.
const GROUPS: &[(&[&str], &str)] = &[
    (
        &["ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "kcmp", "process_mrelease"],
        "code can look into and change its other processes; pid 1 and everything outside stay out of reach",
    ),
    (&["add_key", "request_key", "keyctl"], "code can use the kernel's key rings, where holes have been found often"),
    (
        &["perf_event_open"],
        "code can ask for the processor's counters, a tool for spying on caches; the host's kernel.perf_event_paranoid decides",
    ),
    (&["userfaultfd"], "code can hold the kernel up in the middle of a copy, which makes races against it easy to win"),
    (
        &["splice", "tee", "vmsplice"],
        "code can pass pages between pipes and files inside the kernel, a path with a history of holes (CVE-2022-0847)",
    ),
    (
        &["setxattr", "lsetxattr", "fsetxattr", "removexattr", "lremovexattr", "fremovexattr"],
        "code can change extended attributes of its files, and reaches their parsers in the file systems",
    ),
    (
        &["inotify_init", "inotify_init1", "inotify_add_watch", "inotify_rm_watch"],
        "code can watch files, also those that others change in a shared scratch; `fcntl` watches directories then, too",
    ),
    (&["fanotify_init", "fanotify_mark"], "code can watch files, also those that others change in a shared scratch"),
    (&["mlock", "mlock2", "munlock", "mlockall", "munlockall"], "code can hold memory that the kernel cannot reclaim, within its limit"),
    (&["pkey_alloc", "pkey_free", "pkey_mprotect"], "just-in-time compilers can protect their code pages"),
    (
        &["get_mempolicy", "set_mempolicy", "mbind", "migrate_pages", "move_pages", "set_mempolicy_home_node"],
        "code sees and chooses where its memory lies on a machine with several nodes",
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
        "code can choose its CPU, class and priority, for itself, which helps it win races",
    ),
    (
        &["timer_create", "timer_settime", "timer_gettime", "timer_getoverrun", "timer_delete"],
        "code can set POSIX timers, whose lists in the kernel had holes (CVE-2025-38352)",
    ),
    (
        &["chown", "fchown", "lchown", "fchownat"],
        "code can ask for another owner of its files; without a capability only its own ids are granted",
    ),
    (
        &["setuid", "setgid", "setreuid", "setregid", "setresuid", "setresgid", "setgroups", "setfsuid", "setfsgid", "capset"],
        "code can ask for other ids; without a capability it gets only those that it has",
    ),
    (&["mknod", "mknodat"], "code can make fifos and sockets where Landlock lets it; devices need a capability"),
    (&["personality"], "code can choose the plain personality; the filter refuses the others"),
    (&["sync", "syncfs"], "code can make the host write out its disks, which slows others down"),
    (
        &["shmget", "shmat", "shmdt", "shmctl", "semget", "semop", "semtimedop", "semctl", "msgget", "msgsnd", "msgrcv", "msgctl"],
        "code can use System V IPC, in a namespace of its own; its memory counts, its bookkeeping is the kernel's",
    ),
    (
        &["mq_open", "mq_unlink", "mq_timedsend", "mq_timedreceive", "mq_notify", "mq_getsetattr"],
        "code can use POSIX message queues; their size stays limited to nothing",
    ),
    (&["modify_ldt", "iopl", "ioperm"], "code reaches old and seldom tried parts of the kernel's handling of the processor"),
    (&["seccomp"], "code can load filters of its own, which only take rights away"),
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
        "code can use sockets of the families that are allowed, in a network namespace of its own",
    ),
];

const OTHERWISE: &str = "more of the kernel's own code can be reached, and with it whatever is wrong there";

pub(super) fn beyond(ceiling: &Seccomp, seccomp: &Seccomp, out: &mut Vec<Difference>) {
    let all = named(ceiling, seccomp);
    let allowed: Vec<&str> =
        all.iter().copied().filter(|name| answer(seccomp, name) == Answer::Allowed && answer(ceiling, name) != Answer::Allowed).collect();
    for group in groups(&allowed) {
        let difference = Difference::new(Area::SystemCalls, "[seccomp] allow", "make these system calls").items(group.0);
        out.push(difference.follows(group.1));
    }
    let survived: Vec<String> = all
        .iter()
        .filter(|name| answer(ceiling, name) == Answer::Killed && matches!(answer(seccomp, name), Answer::Refused | Answer::Missing))
        .map(|name| (*name).to_owned())
        .collect();
    if !survived.is_empty() {
        let difference =
            Difference::new(Area::SystemCalls, "[seccomp] kill", "try these system calls without being ended for it").items(survived);
        out.push(difference.follows("they fail all the same, but code can go on and try the next"));
    }
    let family = |family: &&SocketFamily| !ceiling.socket_families.contains(family) || answer(ceiling, "socket") != Answer::Allowed;
    let families: Vec<&SocketFamily> = seccomp.socket_families.iter().filter(family).collect();
    if !families.is_empty() && answer(seccomp, "socket") == Answer::Allowed {
        let network = families.iter().any(|family| matches!(family, SocketFamily::Inet | SocketFamily::Inet6));
        let items = families.iter().map(|family| family_name(**family).to_owned()).collect();
        let difference = Difference::new(Area::SystemCalls, "[seccomp] socket_families", "open sockets of these families").items(items);
        out.push(difference.follows(if network {
            "code reaches the kernel's network stack, over its own lo, and over the gate whatever [egress] allows"
        } else {
            "code reaches this part of the kernel's network stack, in a network namespace of its own"
        }));
    }
    let requests: Vec<String> =
        seccomp.ioctl.iter().filter(|request| !ceiling.ioctl.contains(request)).map(|request| ioctl(*request)).collect();
    if !requests.is_empty() {
        let difference = Difference::new(Area::SystemCalls, "[seccomp] ioctl", "make these requests of ioctl").items(requests);
        out.push(difference.follows("the drivers and file systems behind the files that code can open take them"));
    }
}

/// Calls by what follows from them.
fn groups(calls: &[&str]) -> Vec<(Vec<String>, &'static str)> {
    let owned = |names: Vec<&&str>| names.into_iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    let known = GROUPS.iter().map(|(names, follows)| (owned(calls.iter().filter(|call| names.contains(call)).collect()), *follows));
    let rest = calls.iter().filter(|call| GROUPS.iter().all(|(names, _)| !names.contains(call))).collect();
    known.chain([(owned(rest), OTHERWISE)]).filter(|(calls, _)| !calls.is_empty()).collect()
}

/// A request as a policy may write it.
pub(crate) fn ioctl(request: u32) -> String {
    names::ioctl_name(request).map_or_else(|| format!("{request:#x}"), str::to_owned)
}

#[cfg(test)]
mod tests {
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
