//! What the screener keeps when it locks itself down, before it reads the first hostile byte.
//!
//! Afterwards it can read, write and use memory within limits, and nothing else: it opens no
//! file, makes no process and no socket, and starts no program. Code that takes it over has
//! what it was given to read, one file for its answer, and 2 s of CPU time.

use rustix::process::geteuid;
use stockade_sys::lockdown::{ArgumentCheck, CallRule, Limit, Lockdown, Resource, any, numbers::*};

/// The user and group of the screener where root starts it.
const NOBODY: u32 = 65534;

/// Files stay open that are, and none is opened.
const LIMITS: [Limit; 5] = [
    Resource::Cpu.at_most(2),
    Resource::Stack.at_most(8 << 20),
    Resource::Core.at_most(0),
    Resource::AddressSpace.at_most(512 << 20),
    Resource::Processes.at_most(0),
];

const NOT_EXECUTABLE: &[ArgumentCheck] = &[ArgumentCheck::Without { argument: 2, bits: PROT_EXEC }];

const CALLS: [CallRule; 17] = [
    any(__NR_read),
    any(__NR_write),
    any(__NR_close),
    any(__NR_munmap),
    any(__NR_brk),
    any(__NR_rt_sigaction),
    any(__NR_rt_sigprocmask),
    any(__NR_rt_sigreturn),
    any(__NR_mremap),
    any(__NR_madvise),
    any(__NR_exit),
    any(__NR_sigaltstack),
    any(__NR_futex),
    any(__NR_exit_group),
    any(__NR_getrandom),
    CallRule { number: __NR_mmap, checks: NOT_EXECUTABLE },
    CallRule { number: __NR_mprotect, checks: NOT_EXECUTABLE },
];

/// The screener's lockdown. It keeps stdin and stdout.
pub fn lockdown() -> Lockdown<'static> {
    let run_as = geteuid().is_root().then_some((NOBODY, NOBODY));
    Lockdown { standard_kept: 2, descriptors: &[], limits: &LIMITS, run_as, child_of: None, calls: &CALLS }
}
