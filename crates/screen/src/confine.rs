//! The screener gives up what it does not need, before it reads the first hostile byte.
//!
//! Afterwards it can read, write and use memory within limits, and nothing else: it opens
//! no file, makes no process and no socket, and runs no other program. Whatever takes it
//! over has the code that it was given, one pipe to answer on, and two seconds.

use rustix::{
    fs::{Mode, OFlags, open},
    io::Errno,
    process::{DumpableBehavior, Signal, geteuid, set_dumpable_behavior, set_parent_process_death_signal},
};
use stockade_sys::{
    cred,
    descriptors::keep_only,
    landlock,
    process::{place_descriptor, rlimit, set_rlimit},
    seccomp::{
        Instruction, load_filter,
        program::{ALLOW, ARCHITECTURE, ARCHITECTURE_X86_64, KILL_PROCESS, NUMBER, answer, any_bit, equal, load, load_argument},
    },
};

/// What the screener could not give up.
#[derive(Clone, Copy, Debug)]
pub struct NotConfined {
    /// What it was about.
    pub step: &'static str,
    /// Why not.
    pub errno: Errno,
}

/// The user and group of nobody, where root starts the screener.
const NOBODY: u32 = 65534;

/// Limits by the kernel's numbers: CPU seconds, bytes of stack, core dumps, memory, and
/// processes. Files stay open that are, and none is opened.
const LIMITS: [(u32, u64); 5] = [(0, 2), (3, 8 << 20), (4, 0), (9, 512 << 20), (6, 0)];

/// The first half: limits, user, descriptors. What a library does once for all, and only
/// with more rights, can be done between the two.
///
/// # Errors
/// The kernel refuses a part of it; nothing must be read then.
pub fn begin() -> Result<(), NotConfined> {
    let at = |step| move |errno| NotConfined { step, errno };
    set_parent_process_death_signal(Some(Signal::KILL)).map_err(at("end with the launcher"))?;
    let null = open(c"/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).map_err(at("open /dev/null"))?;
    // A panic's words are of no use to anybody.
    place_descriptor(&null, 2).map_err(at("silence stderr"))?;
    drop(null);
    keep_only(3, &[]).map_err(at("close descriptors"))?;
    for (resource, most) in LIMITS {
        let (_, hard) = rlimit(resource).map_err(at("read a limit"))?;
        set_rlimit(resource, Some(most.min(hard))).map_err(at("set a limit"))?;
    }
    Ok(())
}

/// The second half: capabilities, files and system calls.
///
/// # Errors
/// As [`begin`].
pub fn finish() -> Result<(), NotConfined> {
    let at = |step| move |errno| NotConfined { step, errno };
    if geteuid().is_root() {
        cred::lock_securebits().and_then(|()| cred::drop_bounding_set()).map_err(at("give up the bounding set"))?;
        cred::set_groups(&[]).and_then(|()| cred::set_group(NOBODY)).and_then(|()| cred::set_user(NOBODY)).map_err(at("become nobody"))?;
        // The change of user has cleared it.
        set_parent_process_death_signal(Some(Signal::KILL)).map_err(at("end with the launcher"))?;
    }
    cred::drop_all_sets().map_err(at("give up capabilities"))?;
    rustix::thread::set_no_new_privs(true).map_err(at("set no_new_privs"))?;
    set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(at("hide its memory"))?;
    landlock::shut_off_files().map_err(at("shut off files"))?;
    load_filter(&filter()).map_err(at("load its filter"))
}

/// Calls that need no look at their arguments.
const CALLS: [u32; 15] = [
    0,   // read
    1,   // write
    3,   // close
    11,  // munmap
    12,  // brk
    13,  // rt_sigaction
    14,  // rt_sigprocmask
    15,  // rt_sigreturn
    25,  // mremap
    28,  // madvise
    60,  // exit
    131, // sigaltstack
    202, // futex
    231, // exit_group
    318, // getrandom
];
const MMAP: u32 = 9;
const MPROTECT: u32 = 10;

/// Whatever is not listed ends the screener.
fn filter() -> Vec<Instruction> {
    const PROT_EXEC: u32 = 4;
    let mut out = vec![load(ARCHITECTURE), equal(ARCHITECTURE_X86_64, 1, 0), answer(KILL_PROCESS), load(NUMBER)];
    for number in CALLS {
        out.extend([equal(number, 0, 1), answer(ALLOW)]);
    }
    for number in [MMAP, MPROTECT] {
        out.extend([equal(number, 0, 4), load_argument(2), any_bit(PROT_EXEC, 1, 0), answer(ALLOW), answer(KILL_PROCESS)]);
    }
    out.push(answer(KILL_PROCESS));
    out
}
