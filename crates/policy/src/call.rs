//! A refused system call as text: its name and the arguments that the filter checks.
//!
//! Other arguments are left out, so that two refusals of one kind have the same text. It does
//! not state the rule that refused the call.

use crate::{
    filter::{self, F_NOTIFY, LEASES, OPEN_FILE_LOCKS},
    names,
};

/// A call as text, with the arguments that the filter checks.
pub fn describe(name: &str, arguments: &[u64; 6]) -> String {
    let low = |index| filter::low_half(arguments, index);
    match name {
        "socket" | "socketpair" => {
            let family = family(low(0));
            match low(0) {
                2 | 10 | 16 => format!("{name}({family}, type {}, protocol {})", low(1) & 0xf, low(2)),
                _ => format!("{name}({family})"),
            }
        }
        "ioctl" => {
            let forbidden = names::FORBIDDEN_IOCTLS.iter().find(|(_, number, _)| *number == low(1));
            format!("ioctl({})", forbidden.map_or_else(|| names::ioctl_text(low(1)), |(name, ..)| (*name).to_owned()))
        }
        "clone" => format!("clone(flags {:#x})", low(0)),
        "chmod" | "fchmod" | "mkdir" | "creat" | "mknod" => format!("{name}(mode {:#o})", low(1)),
        "fchmodat" | "fchmodat2" | "mkdirat" | "mknodat" | "open" => format!("{name}(mode {:#o})", low(2)),
        "openat" => format!("{name}(mode {:#o})", low(3)),
        "prlimit64" | "sched_setaffinity" | "sched_setattr" | "sched_setparam" | "sched_setscheduler" => {
            format!("{name}(pid {})", low(0))
        }
        "setpriority" | "ioprio_set" => format!("{name}(which {}, who {})", low(0), low(1)),
        "personality" => format!("personality({:#x})", low(0)),
        "prctl" => format!("prctl({})", low(0)),
        "fcntl" if low(1) == F_NOTIFY => String::from("fcntl(F_NOTIFY)"),
        "fcntl" if low(1) == LEASES[0] => String::from("fcntl(F_SETLEASE)"),
        "fcntl" if low(1) == LEASES[1] => String::from("fcntl(F_SETDELEG)"),
        "fcntl" if low(1) == OPEN_FILE_LOCKS[0] => String::from("fcntl(F_OFD_SETLK)"),
        "fcntl" if low(1) == OPEN_FILE_LOCKS[1] => String::from("fcntl(F_OFD_SETLKW)"),
        "setsockopt" => format!("setsockopt(level {}, option {})", low(1), low(2)),
        _ => name.to_owned(),
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
