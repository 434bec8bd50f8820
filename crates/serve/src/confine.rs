//! What the front gives up before it reads the first byte of a client.
//!
//! Afterwards it can accept connections at the sockets that it is given, read and write what is
//! open, and use memory: it opens no file, connects nowhere, and starts and
//! signals no process. Code that takes it over has what all keys together may have.

use rustix::{
    io::Errno,
    process::{Rlimit, getrlimit, setrlimit},
};
use stockade_sys::lockdown::{
    ArgumentCheck, COMMON_CALLS, CallRule, Limit, Lockdown, LockdownError, NOT_EXECUTABLE, Resource, any, net, numbers::*,
};

/// Connections, workers and some.
const DESCRIPTORS: u64 = 16384;

const LIMITS: [Limit; 4] = [
    Resource::Stack.at_most(8 << 20),
    Resource::Core.at_most(0),
    Resource::Descriptors.at_most(DESCRIPTORS),
    Resource::Processes.at_most(0),
];

const DESCRIPTOR_FLAGS: &[ArgumentCheck] =
    &[ArgumentCheck::OneOf { argument: 1, ignored: 0, values: &[F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC] }];
const NON_BLOCKING: &[ArgumentCheck] = &[ArgumentCheck::OneOf { argument: 1, ignored: 0, values: &[FIONBIO] }];
/// `ioctl_list(2)`.
const FIONBIO: u32 = 0x5421;

/// Reading from a listener that others share must not be ended: `SHUT_WR` does nothing to one.
const WRITES_ALONE: &[ArgumentCheck] = &[ArgumentCheck::OneOf { argument: 1, ignored: 0, values: &[SHUT_WR] }];
/// `shutdown(2)`.
const SHUT_WR: u32 = 1;

/// What is set of a connection, and nothing of a listener that the next front has too, such as a filter of packets.
const NO_DELAY_ALONE: &[ArgumentCheck] = &[
    ArgumentCheck::OneOf { argument: 1, ignored: 0, values: &[net::IPPROTO_TCP as u32] },
    ArgumentCheck::OneOf { argument: 2, ignored: 0, values: &[net::TCP_NODELAY] },
];

/// The front's own limit of memory, which changes with the settings.
const OWN_DATA_ALONE: &[ArgumentCheck] = &[
    ArgumentCheck::OneOf { argument: 0, ignored: 0, values: &[0] },
    ArgumentCheck::OneOf { argument: 1, ignored: 0, values: &[RLIMIT_DATA] },
];

/// What the front has beside requests and results: runs, sessions and connections, and results that are just
/// being sent.
const BESIDE_BUFFERS: u64 = 512 << 20;

const CALLS: [CallRule; 32] = [
    any(__NR_readv),
    any(__NR_writev),
    any(__NR_recvfrom),
    any(__NR_recvmsg),
    // No sendmsg: it would hand descriptors to other processes.
    any(__NR_sendto),
    any(__NR_accept4),
    // The runtime's own, between two of its parts: it leads nowhere.
    any(__NR_socketpair),
    any(__NR_getsockopt),
    any(__NR_getsockname),
    any(__NR_getpeername),
    any(__NR_epoll_create1),
    any(__NR_epoll_ctl),
    any(__NR_epoll_wait),
    any(__NR_epoll_pwait),
    any(__NR_epoll_pwait2),
    any(__NR_eventfd2),
    any(__NR_poll),
    any(__NR_clock_gettime),
    any(__NR_clock_nanosleep),
    any(__NR_gettimeofday),
    any(__NR_getpid),
    any(__NR_gettid),
    any(__NR_sched_yield),
    any(__NR_sched_getaffinity),
    any(__NR_rt_sigaction),
    any(__NR_rt_sigprocmask),
    CallRule { number: __NR_shutdown, checks: WRITES_ALONE },
    CallRule { number: __NR_setsockopt, checks: NO_DELAY_ALONE },
    CallRule { number: __NR_prlimit64, checks: OWN_DATA_ALONE },
    CallRule { number: __NR_fcntl, checks: DESCRIPTOR_FLAGS },
    CallRule { number: __NR_ioctl, checks: NON_BLOCKING },
    CallRule { number: __NR_mprotect, checks: NOT_EXECUTABLE },
];

/// Gives all else up. The socket of the supervisor is stdin, and stderr stays. Returns how many descriptors there
/// may be.
///
/// # Errors
/// The kernel refuses a step.
pub fn confine(run_as: Option<(u32, u32)>) -> Result<u64, LockdownError> {
    let descriptors = getrlimit(rustix::process::Resource::Nofile).maximum.map_or(DESCRIPTORS, |most| most.min(DESCRIPTORS));
    let calls = &[&COMMON_CALLS[..], &CALLS];
    let lockdown = Lockdown { standard_kept: 3, descriptors: &[], limits: &LIMITS, run_as, child_of: None, files: &[], calls };
    lockdown.begin()?;
    lockdown.finish()?;
    Ok(descriptors)
}

/// Limits the memory of the front by that of requests and results, which what grows can hold twice (a vector
/// doubles). What is counted never comes so far: this ends a front that takes more than it counts, and another
/// replaces it. Code that takes the front over can raise it.
///
/// # Errors
/// The kernel refuses it.
pub fn limit_memory(max_buffers: u64) -> Result<(), Errno> {
    let before = getrlimit(rustix::process::Resource::Data);
    let most = max_buffers.saturating_mul(2).saturating_add(BESIDE_BUFFERS);
    let current = Some(before.maximum.map_or(most, |maximum| most.min(maximum)));
    setrlimit(rustix::process::Resource::Data, Rlimit { current, ..before })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_descriptor_goes_to_another_process_and_no_listener_ends_for_those_that_share_it() {
        let rule = |number: u32| COMMON_CALLS.iter().chain(&CALLS).find(|rule| rule.number == number);
        assert!(rule(__NR_sendmsg).is_none() && rule(SENDMMSG).is_none());
        // The control: what is written goes by calls that carry no descriptor.
        assert!(rule(__NR_sendto).is_some() && rule(__NR_writev).is_some());
        let checks = rule(__NR_shutdown).map(|rule| rule.checks);
        assert!(matches!(checks, Some([ArgumentCheck::OneOf { argument: 1, ignored: 0, values: [SHUT_WR] }])));
        // Of options TCP_NODELAY alone, by level and name: `IP_MINTTL` of a listener would end it for all.
        let options = CALLS.iter().filter(|rule| rule.number == __NR_setsockopt).map(|rule| rule.checks).collect::<Vec<_>>();
        let [[level, name]] = options.as_slice() else { panic!("{options:?}") };
        assert!(matches!(level, ArgumentCheck::OneOf { argument: 1, ignored: 0, values: [6] }), "{level:?}");
        assert!(matches!(name, ArgumentCheck::OneOf { argument: 2, ignored: 0, values: [1] }), "{name:?}");
    }

    /// `sendmmsg(2)` on x86-64.
    const SENDMMSG: u32 = 307;
}
