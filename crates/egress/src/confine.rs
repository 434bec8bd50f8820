//! The gate gives up what it does not need, before it reads the first hostile byte.
//!
//! Afterwards it can talk over the sockets that it holds, make TCP and UDP sockets and
//! connect them, and nothing else: no files (it opens none), no capabilities, no new
//! program, no memory that is executable; it is ended with whoever started it. It must
//! stay able to connect to any address: that is its work.

use rustix::{
    fd::BorrowedFd,
    fs::{Mode, OFlags, open},
    io::Errno,
    process::{DumpableBehavior, Pid, Signal, getegid, geteuid, getppid, set_dumpable_behavior, set_parent_process_death_signal, setpgid},
};
use stockade_sys::{
    cred,
    descriptors::keep_only,
    landlock,
    process::{place_descriptor, rlimit, set_rlimit},
    seccomp::{
        Instruction, load_filter,
        program::{ALLOW, ARCHITECTURE, ARCHITECTURE_X86_64, KILL_PROCESS, NUMBER, and, answer, any_bit, equal, load, load_argument},
    },
};

/// Whom the gate runs as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunAs {
    /// The launcher's own user, who has no capabilities.
    Caller,
    /// Another user and group, without further groups: the launcher is root.
    User {
        /// User id.
        uid: u32,
        /// Group id.
        gid: u32,
    },
}

/// Three sockets for each of 512 connections, while their names are looked up, and its own:
/// with fewer it could be told of connections for ever that it cannot take.
const LEAST_DESCRIPTORS: u64 = 1600;
/// Sockets and pipes that the gate may hold at once.
pub(crate) const MOST_DESCRIPTORS: u64 = 2048;

/// What the gate could not give up.
pub(crate) struct NotConfined {
    pub(crate) step: u8,
    pub(crate) errno: Errno,
}

/// The steps by number, as [`NotConfined`] counts them.
pub(crate) const STEPS: [&str; 8] = [
    "close the launcher's descriptors",
    "give up the launcher's user",
    "limit its resources",
    "give up capabilities",
    "hide its memory",
    "end with the launcher and nobody else",
    "shut off the file system",
    "load its system call filter",
];

/// Does everything. `kept` stay open; `parent` is whoever must not outlive it.
pub(crate) fn confine(kept: &[BorrowedFd<'_>], parent: Option<Pid>, run_as: RunAs) -> Result<(), NotConfined> {
    let at = |step| move |errno| NotConfined { step, errno };
    close_others(kept).map_err(at(0))?;
    let privileged = matches!(run_as, RunAs::User { .. });
    if privileged {
        // Needs the capabilities that the change of user takes away.
        cred::lock_securebits().map_err(at(3))?;
        cred::drop_bounding_set().map_err(at(3))?;
    }
    if let RunAs::User { uid, gid } = run_as {
        cred::set_groups(&[]).and_then(|()| cred::set_group(gid)).and_then(|()| cred::set_user(uid)).map_err(at(1))?;
        // setresuid(-1) succeeds and changes nothing.
        if (geteuid().as_raw(), getegid().as_raw()) != (uid, gid) || uid == 0 {
            return Err(at(1)(Errno::INVAL));
        }
    }
    limit().map_err(at(2))?;
    cred::drop_all_sets().map_err(at(3))?;
    rustix::thread::set_no_new_privs(true).map_err(at(3))?;
    set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(at(4))?;
    // What a terminal sends to the launcher's group is no business of the gate. Not a
    // session of its own: that would be a scheduling group of its own too (autogroup), in
    // which, on a busy host, it waited twice as long for its first turn.
    setpgid(None, None).map_err(at(5))?;
    // After the change of user, which clears it.
    set_parent_process_death_signal(Some(Signal::KILL)).map_err(at(5))?;
    if getppid() != parent {
        return Err(at(5)(Errno::SRCH));
    }
    landlock::shut_off_files().map_err(at(6))?;
    load_filter(&filter()).map_err(at(7))
}

/// The standard descriptors become /dev/null: a panic's message must not land in a socket
/// that has taken their number.
fn close_others(kept: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    let null = open(c"/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    for number in 0..3 {
        place_descriptor(&null, number)?;
    }
    drop(null);
    keep_only(3, kept)
}

fn limit() -> Result<(), Errno> {
    const DATA: u32 = 2;
    const CORE: u32 = 4;
    const PROCESSES: u32 = 6;
    const FILES: u32 = 7;
    const LOCKED: u32 = 8;
    // The gate's own use is a tenth of it.
    const MOST_DATA: u64 = 64 << 20;
    for (resource, most) in [(DATA, MOST_DATA), (CORE, 0), (PROCESSES, 0), (FILES, MOST_DESCRIPTORS), (LOCKED, 0)] {
        let (_, hard) = rlimit(resource)?;
        if resource == FILES && hard < LEAST_DESCRIPTORS {
            return Err(Errno::MFILE);
        }
        set_rlimit(resource, Some(most.min(hard)))?;
    }
    Ok(())
}

/// Calls that need no look at their arguments, by number, the frequent ones first.
const CALLS: [u32; 29] = [
    45,  // recvfrom
    44,  // sendto
    232, // epoll_wait
    281, // epoll_pwait
    441, // epoll_pwait2
    233, // epoll_ctl
    288, // accept4
    42,  // connect
    3,   // close
    48,  // shutdown
    51,  // getsockname
    55,  // getsockopt
    46,  // sendmsg
    47,  // recvmsg
    0,   // read
    1,   // write
    228, // clock_gettime
    318, // getrandom
    12,  // brk
    11,  // munmap
    25,  // mremap
    28,  // madvise
    202, // futex
    15,  // rt_sigreturn
    219, // restart_syscall
    131, // sigaltstack
    60,  // exit
    231, // exit_group
    7,   // poll
];
const SOCKET: u32 = 41;
const SETSOCKOPT: u32 = 54;
const MMAP: u32 = 9;
const FCNTL: u32 = 72;

/// Whatever is not listed ends the gate, and with it the sandbox.
fn filter() -> Vec<Instruction> {
    const PROT_EXEC: u32 = 4;
    /// SOCK_CLOEXEC and SOCK_NONBLOCK.
    const FLAGS: u32 = 0o2_004_000;
    let mut out = vec![load(ARCHITECTURE), equal(ARCHITECTURE_X86_64, 1, 0), answer(KILL_PROCESS), load(NUMBER)];
    for number in CALLS {
        out.extend([equal(number, 0, 1), answer(ALLOW)]);
    }
    // socket: AF_INET and AF_INET6, SOCK_STREAM and SOCK_DGRAM.
    let socket = [
        load_argument(0),
        equal(2, 1, 0),
        equal(10, 0, 5),
        load_argument(1),
        and(!FLAGS),
        equal(1, 1, 0),
        equal(2, 0, 1),
        answer(ALLOW),
        answer(KILL_PROCESS),
    ];
    // setsockopt: SO_LINGER, SO_SNDBUF and SO_RCVBUF, and TCP_NODELAY and TCP_QUICKACK; the
    // same number's high bits apart.
    let setsockopt = [
        load_argument(1),
        equal(1, 0, 4),
        load_argument(2),
        equal(13, 6, 0),
        equal(7, 5, 0),
        equal(8, 4, 5),
        equal(6, 0, 4),
        load_argument(2),
        equal(1, 1, 0),
        equal(12, 0, 1),
        answer(ALLOW),
        answer(KILL_PROCESS),
    ];
    let mmap = [load_argument(2), any_bit(PROT_EXEC, 1, 0), answer(ALLOW), answer(KILL_PROCESS)];
    // fcntl: F_GETFD, by which std looks in debug builds whether what it closes is open.
    let fcntl = [load_argument(1), equal(1, 0, 1), answer(ALLOW), answer(KILL_PROCESS)];
    for (number, body) in [(SOCKET, &socket[..]), (SETSOCKOPT, &setsockopt[..]), (MMAP, &mmap[..]), (FCNTL, &fcntl[..])] {
        out.push(equal(number, 0, u8::try_from(body.len()).unwrap_or(u8::MAX)));
        out.extend_from_slice(body);
    }
    out.push(answer(KILL_PROCESS));
    out
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use super::*;

    /// Runs the filter as the kernel does.
    fn run(number: u32, arguments: [u32; 3]) -> u32 {
        let program = filter();
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
                0x15 => jump(accumulator == k),
                0x45 => jump(accumulator & k != 0),
                _ => return k,
            }
            at += 1;
        }
    }

    #[test]
    fn the_gates_filter_allows_its_calls_and_ends_it_for_all_others() {
        for number in CALLS {
            assert_eq!(run(number, [0; 3]), ALLOW);
        }
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
