//! What the gate keeps when it locks itself down, before it reads the first hostile byte.
//!
//! Afterwards it can talk over the sockets that it holds, make TCP and UDP sockets and
//! connect them, and nothing else: it opens no file, has no capability, starts no program and
//! makes no memory executable. It must stay able to connect to any address: that is its work.

use rustix::{fd::BorrowedFd, process::Pid};
use stockade_sys::lockdown::{
    ArgumentCheck::{self, OneOf},
    COMMON_CALLS, CallRule, IS_OPEN, Limit, Lockdown, LockdownError, Resource, any,
    net::{AF_INET, AF_INET6, SO_LINGER, SO_RCVBUF, SO_SNDBUF, SOCK_DGRAM, SOCK_STREAM, SOL_SOCKET, TCP_NODELAY, TCP_QUICKACK},
    numbers::*,
};

/// The user that the gate runs as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunAs {
    /// The launcher's own user, who has no capabilities.
    Caller,
    /// Another user and group, without supplementary groups: the launcher is root.
    User {
        /// User id.
        uid: u32,
        /// Group id.
        gid: u32,
    },
}

/// Two sockets for each of 512 connections, three for each of 128 look-ups, and its own: with
/// fewer the kernel would go on reporting connections that the gate cannot accept.
const MIN_DESCRIPTORS: u64 = 1600;
/// Sockets and pipes that the gate may hold at once.
pub(crate) const MAX_DESCRIPTORS: u64 = 2048;

const LIMITS: [Limit; 5] = [
    // The gate uses a tenth of it.
    Resource::Data.at_most(64 << 20),
    Resource::Core.at_most(0),
    Resource::Processes.at_most(0),
    Limit { resource: Resource::Descriptors, max: MAX_DESCRIPTORS, min: MIN_DESCRIPTORS },
    Resource::Locked.at_most(0),
];

/// Locks this process down. `kept` stay open; it ends with `parent`.
pub(crate) fn confine(kept: &[BorrowedFd<'_>], parent: Option<Pid>, run_as: RunAs) -> Result<(), LockdownError> {
    let run_as = match run_as {
        RunAs::User { uid, gid } => Some((uid, gid)),
        RunAs::Caller => None,
    };
    let calls = &[&CALLS[..], &COMMON_CALLS];
    let lockdown = Lockdown { standard_kept: 0, descriptors: kept, limits: &LIMITS, run_as, child_of: parent, files: &[], calls };
    lockdown.begin()?;
    lockdown.finish()
}

/// SOCK_CLOEXEC and SOCK_NONBLOCK.
const SOCKET_FLAGS: u32 = 0o2_004_000;
const SOCKET: &[ArgumentCheck] = &[
    OneOf { argument: 0, ignored: 0, values: &[AF_INET, AF_INET6] },
    OneOf { argument: 1, ignored: SOCKET_FLAGS, values: &[SOCK_STREAM, SOCK_DGRAM] },
];
/// The same numbers mean other options at another level.
const SOCKET_OPTIONS: &[ArgumentCheck] = &[
    OneOf { argument: 1, ignored: 0, values: &[SOL_SOCKET] },
    OneOf { argument: 2, ignored: 0, values: &[SO_LINGER, SO_SNDBUF, SO_RCVBUF] },
];
const TCP_OPTIONS: &[ArgumentCheck] =
    &[OneOf { argument: 1, ignored: 0, values: &[IPPROTO_TCP] }, OneOf { argument: 2, ignored: 0, values: &[TCP_NODELAY, TCP_QUICKACK] }];
const IPPROTO_TCP: u32 = 6;

/// The frequent calls first, before the common ones.
const CALLS: [CallRule; 20] = [
    any(__NR_recvfrom),
    any(__NR_sendto),
    any(__NR_epoll_wait),
    any(__NR_epoll_pwait),
    any(__NR_epoll_pwait2),
    any(__NR_epoll_ctl),
    any(__NR_accept4),
    any(__NR_connect),
    any(__NR_shutdown),
    any(__NR_getsockname),
    any(__NR_getsockopt),
    any(__NR_sendmsg),
    any(__NR_recvmsg),
    any(__NR_clock_gettime),
    any(__NR_restart_syscall),
    any(__NR_poll),
    CallRule { number: __NR_socket, checks: SOCKET },
    CallRule { number: __NR_setsockopt, checks: SOCKET_OPTIONS },
    CallRule { number: __NR_setsockopt, checks: TCP_OPTIONS },
    IS_OPEN,
];

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use stockade_sys::{
        lockdown::Filter,
        seccomp::program::{ALLOW, ARCHITECTURE_X86_64, KILL_PROCESS},
    };

    const SOCKET: u32 = 41;
    const SETSOCKOPT: u32 = 54;
    const MMAP: u32 = 9;
    const FCNTL: u32 = 72;

    /// Runs the filter as the kernel does.
    fn run(number: u32, arguments: [u32; 3]) -> u32 {
        let filter = Filter::new(&[&super::CALLS, &super::COMMON_CALLS]).unwrap();
        let program = filter.instructions();
        let (mut at, mut accumulator) = (0usize, 0u32);
        loop {
            let raw = program[at].0;
            let [code, ..] = raw.to_le_bytes();
            let (when_true, when_false, k) = (raw >> 16 & 0xff, raw >> 24 & 0xff, u32::try_from(raw >> 32).unwrap());
            let mut jump = |condition: bool| at += usize::try_from(if condition { when_true } else { when_false }).unwrap();
            match code {
                0x20 => {
                    accumulator = match k {
                        0 => number,
                        4 => ARCHITECTURE_X86_64,
                        _ => arguments[(usize::try_from(k).unwrap() - 16) / 8],
                    }
                }
                0x54 => accumulator &= k,
                0x05 => at += usize::try_from(k).unwrap(),
                0x15 => jump(accumulator == k),
                0x45 => jump(accumulator & k != 0),
                _ => return k,
            }
            at += 1;
        }
    }

    #[test]
    fn the_gates_filter_allows_its_calls_and_ends_it_for_all_others() {
        // By number, as the kernel has them and not as the table names them.
        for number in
            [45, 44, 232, 281, 441, 233, 288, 42, 3, 48, 51, 55, 46, 47, 0, 1, 228, 318, 12, 11, 25, 28, 202, 15, 219, 131, 60, 231, 7]
        {
            assert_eq!(run(number, [0; 3]), ALLOW);
        }
        assert_eq!((0..600).filter(|number| run(*number, [0; 3]) == ALLOW).count(), 30, "mmap besides");
        // open, execve, ptrace, bind, listen, fork, openat, io_uring_setup.
        for number in [2, 59, 101, 49, 50, 57, 257, 425] {
            assert_eq!(run(number, [0; 3]), KILL_PROCESS, "{number}");
        }
        for (arguments, action) in [
            ([2, 1, 0], ALLOW),
            ([10, 0o2_004_002, 0], ALLOW),
            ([2, 3, 0], KILL_PROCESS),
            ([1, 1, 0], KILL_PROCESS),
            ([16, 3, 0], KILL_PROCESS),
            ([17, 2, 0], KILL_PROCESS),
        ] {
            assert_eq!(run(SOCKET, arguments), action, "socket {arguments:?}");
        }
        for (arguments, action) in [
            ([0, 1, 13], ALLOW),
            ([0, 1, 7], ALLOW),
            ([0, 1, 8], ALLOW),
            ([0, 6, 1], ALLOW),
            ([0, 6, 12], ALLOW),
            ([0, 1, 36], KILL_PROCESS),
            ([0, 1, 1], KILL_PROCESS),
            ([0, 6, 31], KILL_PROCESS),
            ([0, 6, 13], KILL_PROCESS),
            ([0, 0, 19], KILL_PROCESS),
        ] {
            assert_eq!(run(SETSOCKOPT, arguments), action, "setsockopt {arguments:?}");
        }
        assert_eq!((run(FCNTL, [3, 1, 0]), run(FCNTL, [3, 4, 0])), (ALLOW, KILL_PROCESS));
        assert_eq!((run(MMAP, [0, 4096, 3]), run(MMAP, [0, 4096, 7])), (ALLOW, KILL_PROCESS));
    }
}
