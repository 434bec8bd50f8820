//! Refused system calls: answered, counted, named.
//!
//! The filter asks, the launcher says no; it never lets a call through. A program that
//! repeats refused calls is answered at a bounded rate, so that it cannot spend the
//! host's CPU through the launcher.

use std::collections::BTreeSet;

use rustix::{fd::OwnedFd, io::Errno};
use stockade_policy::filter::names;
use stockade_protocol::Denial;
use stockade_sys::seccomp::{self, Notification};

/// Different refusals that a result lists.
const LISTED: usize = 64;
/// Answers in one round of the loop's clock.
const PER_ROUND: u32 = 200;

/// The account of refused calls.
pub(crate) struct Denials {
    kill: BTreeSet<u32>,
    list: Vec<Denial>,
    omitted: u64,
    answered: u32,
}

/// What to do after one notification.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Go on listening.
    On,
    /// The policy kills for this call.
    Kill,
    /// Enough for this round.
    Rest,
}

impl Denials {
    pub(crate) fn new(kill: BTreeSet<u32>) -> Self {
        Denials { kill, list: Vec::new(), omitted: 0, answered: 0 }
    }

    /// A new round of the clock.
    pub(crate) fn refill(&mut self) {
        self.answered = 0;
    }

    /// Answers one waiting call.
    pub(crate) fn serve(&mut self, listener: &OwnedFd) -> Next {
        let Ok(notification) = seccomp::receive(listener) else { return Next::On };
        let number = u32::try_from(notification.number).unwrap_or(u32::MAX);
        let killed = self.kill.contains(&number);
        self.count(&notification, number, killed);
        if killed {
            return Next::Kill;
        }
        // It may have been killed meanwhile; then there is nobody to answer.
        let _gone = seccomp::refuse(listener, notification.id, Errno::PERM);
        self.answered += 1;
        if self.answered >= PER_ROUND { Next::Rest } else { Next::On }
    }

    fn count(&mut self, notification: &Notification, number: u32, killed: bool) {
        let name = names::name(number).unwrap_or_else(|| format!("system call {number}"));
        let (what, rule, allow) = describe(&name, &notification.arguments);
        if let Some(known) = self.list.iter_mut().find(|denial| denial.what == what) {
            known.count += 1;
        } else if self.list.len() < LISTED {
            let answer = String::from(if killed { "killed" } else { "EPERM" });
            let rule = if killed { String::from("[seccomp] kill") } else { rule };
            self.list.push(Denial { kind: "syscall", what, count: 1, answer, rule, allow });
        } else {
            self.omitted += 1;
        }
    }

    pub(crate) fn finish(self) -> (Vec<Denial>, u64) {
        (self.list, self.omitted)
    }
}

/// A refused call with the arguments that mattered, the rule, and the line that would
/// allow it, if any policy may.
fn describe(name: &str, arguments: &[u64; 6]) -> (String, String, Option<String>) {
    let low = |index: usize| arguments.get(index).map_or(0, |argument| *argument as u32);
    let add = |list: &str, value: &str| Some(format!("[seccomp] {list} = {{ add = [{value}] }}"));
    let fixed = |rule: &str| (String::from(rule), None);
    let mode = |index| (format!("{name}(mode {:#o})", low(index)), String::from("set-ID bits are refused in every mode"), None);
    match name {
        "socket" | "socketpair" => {
            let family = family(low(0));
            let what = match low(0) {
                2 | 10 | 16 => format!("{name}({family}, type {}, protocol {})", low(1) & 0xf, low(2)),
                _ => format!("{name}({family})"),
            };
            let allow = match low(0) {
                1 if name == "socket" => add("socket_families", "\"unix\""),
                2 if name == "socket" && matches!(low(2), 0 | 6 | 17) => add("socket_families", "\"inet\""),
                10 if name == "socket" && matches!(low(2), 0 | 6 | 17) => add("socket_families", "\"inet6\""),
                16 if name == "socket" && low(2) == 0 => add("socket_families", "\"netlink\""),
                _ => None,
            };
            (what, String::from("[seccomp] socket_families"), allow)
        }
        "ioctl" => {
            let request = low(1);
            let forbidden = stockade_policy::names::FORBIDDEN_IOCTLS.iter().find(|(_, number, _)| *number == request);
            let known = forbidden.map(|(name, ..)| *name).or_else(|| stockade_policy::names::ioctl_name(request));
            let what = known.map_or_else(|| format!("ioctl({request:#x})"), |name| format!("ioctl({name})"));
            let allow = if forbidden.is_some() { None } else { add("ioctl", &format!("\"{request:#x}\"")) };
            (what, String::from("[seccomp] ioctl"), allow)
        }
        "clone" => {
            let (rule, allow) = fixed("new namespaces are refused");
            (format!("clone(flags {:#x})", low(0)), rule, allow)
        }
        "mknod" | "mknodat" if matches!(low(usize::from(name == "mknodat") + 1) & 0o170_000, 0o020_000 | 0o060_000) => {
            let (rule, allow) = fixed("device nodes are refused");
            (format!("{name}(mode {:#o})", low(usize::from(name == "mknodat") + 1)), rule, allow)
        }
        "chmod" | "fchmod" | "mkdir" | "creat" | "mknod" => mode(1),
        "fchmodat" | "fchmodat2" | "mkdirat" | "mknodat" | "open" => mode(2),
        "openat" => mode(3),
        "prlimit64" | "sched_setaffinity" | "sched_setattr" | "sched_setparam" | "sched_setscheduler" => {
            let (rule, allow) = fixed("only pid 0, oneself, may be named");
            (format!("{name}(pid {})", low(0)), rule, allow)
        }
        "setpriority" | "ioprio_set" => {
            let (rule, allow) = fixed("only oneself may be named");
            (format!("{name}(which {}, who {})", low(0), low(1)), rule, allow)
        }
        "personality" => {
            let (rule, allow) = fixed("only the plain personality is allowed");
            (format!("personality({:#x})", low(0)), rule, allow)
        }
        "prctl" => (format!("prctl({})", low(0)), String::from("[seccomp] allow"), add("allow", "\"prctl\"")),
        _ => {
            let allow = if stockade_policy::names::FORBIDDEN_SYSCALLS.iter().any(|(forbidden, _)| *forbidden == name) {
                None
            } else {
                add("allow", &format!("\"{name}\""))
            };
            (String::from(name), String::from("[seccomp] allow"), allow)
        }
    }
}

fn family(number: u32) -> String {
    let name = match number {
        1 => "AF_UNIX",
        2 => "AF_INET",
        10 => "AF_INET6",
        15 => "AF_KEY",
        16 => "AF_NETLINK",
        17 => "AF_PACKET",
        30 => "AF_TIPC",
        38 => "AF_ALG",
        40 => "AF_VSOCK",
        44 => "AF_XDP",
        _ => return format!("family {number}"),
    };
    String::from(name)
}
