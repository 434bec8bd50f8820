//! What the screener keeps when it locks itself down, before it reads the first hostile byte.
//!
//! Afterwards it can read, write and use memory within limits, and nothing else: it opens no
//! file, makes no process and no socket, and starts no program. Code that takes it over has
//! what it was given to read, one file for its answer, and 2 s of CPU time.
//!
//! A screener that stays keeps the calls by which it gets descriptors and copies itself, and reads no
//! text. Each copy gives these up before it reads.

use rustix::process::geteuid;
use stockade_sys::lockdown::{COMMON_CALLS, CallRule, IS_OPEN, Limit, Lockdown, LockdownError, NOT_EXECUTABLE, Resource, any, numbers::*};

/// The user and group of the screener where root starts it.
const NOBODY: u32 = 65534;

/// Those of every screener.
const SHARED_LIMITS: [Limit; 3] = [Resource::Stack.at_most(8 << 20), Resource::Core.at_most(0), Resource::AddressSpace.at_most(512 << 20)];
/// Those of one that reads hostile text.
const READING_LIMITS: [Limit; 2] = [Resource::Cpu.at_most(2), Resource::Processes.at_most(0)];
/// Files stay open that are, and none is opened.
const LIMITS: [Limit; 5] = [SHARED_LIMITS[0], SHARED_LIMITS[1], SHARED_LIMITS[2], READING_LIMITS[0], READING_LIMITS[1]];

/// Those of a screener that reads hostile text.
const CALLS: [&[CallRule]; 2] =
    [&COMMON_CALLS, &[any(__NR_rt_sigaction), any(__NR_rt_sigprocmask), CallRule { number: __NR_mprotect, checks: NOT_EXECUTABLE }]];

/// What one that stays needs besides: to get a question's descriptors, to copy itself and pass the
/// copy on; and the copy, to give these up.
const STAYING_CALLS: [CallRule; 10] = [
    IS_OPEN,
    any(__NR_recvmsg),
    any(__NR_sendmsg),
    any(__NR_newfstatat),
    any(__NR_statx),
    any(__NR_clone3),
    any(__NR_dup2),
    any(__NR_prlimit64),
    any(__NR_prctl),
    any(__NR_seccomp),
];

/// The user and group of a screener that root has started.
fn run_as() -> Option<(u32, u32)> {
    geteuid().is_root().then_some((NOBODY, NOBODY))
}

/// The lockdown of a screener for one question. It keeps stdin and stdout.
pub fn lockdown() -> Lockdown<'static> {
    Lockdown { standard_kept: 2, descriptors: &[], limits: &LIMITS, run_as: run_as(), child_of: None, files: &[], calls: &CALLS }
}

/// The lockdown of one that stays, which keeps stdin alone.
pub fn lockdown_of_staying() -> Lockdown<'static> {
    let calls = &[CALLS[0], CALLS[1], &STAYING_CALLS];
    Lockdown { standard_kept: 1, descriptors: &[], limits: &SHARED_LIMITS, run_as: run_as(), child_of: None, files: &[], calls }
}

/// What a copy of it gives up before it reads.
///
/// # Errors
/// The kernel refuses a step.
pub fn narrow() -> Result<(), LockdownError> {
    Lockdown::narrow(&READING_LIMITS, &CALLS)
}
