//! The sandbox's first process, begun before this program's libc.
//!
//! What `child::alone` does takes about as long as libc's start, so it is done beside that
//! where the command line says that a run follows. This is a guess, made with no more than
//! what the kernel has laid on the stack: where it was wrong the process is ended unused, and
//! where nothing could be begun the run begins it later, in the ordinary way.

use rustix::io::Errno;
use stockade_protocol::step::Step;
use stockade_sys::{
    before_libc,
    clone::flags,
    early::{Begun, Early, Start, end_with, file_system_type, has_streams},
    process::{ignores, raise_soft_limit, rlimit},
};

use crate::{
    child::{self, Failure, Outcome},
    layers::Layers,
    sandbox::Sandbox,
};

static EARLY: Early = Early::new();

before_libc!(begin);

extern "C" fn begin(start: Start<'_>) {
    // A walk takes descriptors, and what is sent between processes counts against the limit of
    // the sender, with what others of its user have on their way. Code has limits of its own.
    raise_soft_limit(RLIMIT_NOFILE, u64::MAX);
    raise_soft_limit(RLIMIT_STACK, ENOUGH_STACK);
    if rlimit(RLIMIT_STACK).is_ok_and(|(soft, _)| soft < LEAST_STACK) {
        end_with(b"stockade: the stack may have less than 256 KiB here; start it with a higher hard limit (ulimit -Hs)\n", 125);
    }
    // A closed stream stays one, and where descriptors are few each is needed for an error.
    // On cgroup v2 the cgroup comes first.
    let has_descriptors = || has_streams() && rlimit(RLIMIT_NOFILE).is_ok_and(|(most, _)| most >= 64);
    // It could not wait for a process of its own.
    let may_wait = || !ignores(SIGCHLD);
    if is_run(&start) && acts_for_itself(&start) && has_descriptors() && may_wait() && file_system_type(c"/sys/fs/cgroup") != Some(CGROUP2)
    {
        start.settle_data();
        // SAFETY: called once, before libc; `alone` keeps to what may be done there.
        #[expect(unsafe_code, reason = "the one process that shares our memory")]
        unsafe {
            EARLY.begin(flags::NEWUSER | flags::NEWPID, first);
        }
        start.settle_stack();
    }
}

const RLIMIT_STACK: u32 = 3;
const RLIMIT_NOFILE: u32 = 7;
/// Bytes of stack that a launcher wants, and without which it would end by SIGSEGV.
const ENOUGH_STACK: u64 = 8 << 20;
const LEAST_STACK: u64 = 256 << 10;
const SIGCHLD: i32 = 17;

/// CGROUP2_SUPER_MAGIC.
const CGROUP2: i64 = 0x6367_7270;

/// Whether the command line is that of a run in this process.
fn is_run(start: &Start<'_>) -> bool {
    let mut words = start.arguments().skip(1);
    let command = words.next().is_some_and(|word| word.is(b"run") || word.is(b"exec"));
    // What begins with these asks for something else, or has another process run it.
    let asks_for_else = words.take_while(|word| !word.is(b"--")).any(|word| {
        word.begins_with(b"--socket") || word.is(b"--markdown") || word.is(b"--dry-run") || word.is(b"--help") || word.is(b"-h")
    });
    command && !asks_for_else && !cfg!(feature = "ablation")
}

/// Whether whoever started this program has its rights, no more and no fewer: neither
/// set-ID bits nor sudo.
fn acts_for_itself(start: &Start<'_>) -> bool {
    const AT_EUID: usize = 12;
    const AT_SECURE: usize = 23;
    let through_sudo = || start.variables().any(|variable| variable.begins_with(b"SUDO_UID="));
    start.auxiliary(AT_SECURE) == Some(0) && (start.auxiliary(AT_EUID) != Some(0) || !through_sudo())
}

/// The process's first steps; the rest follows when it is told where.
fn first(early: &Early) -> i32 {
    if let Err(Failure { step, errno, .. }) = child::alone(early.parents_end(), Layers::of_environment()) {
        early.fail(u64::from(step as u16) << 32 | u64::from(errno.raw_os_error().unsigned_abs()));
        // Whoever still has the launcher's end would wait for a launcher that is gone.
        if step == Step::AwaitLauncher {
            return 125;
        }
    }
    early.go_on()
}

/// What its first steps came to.
pub(crate) fn outcome() -> Outcome<()> {
    let failure = EARLY.failure();
    match u16::try_from(failure >> 32).ok().and_then(Step::from_number) {
        Some(step) => {
            let errno = i32::try_from(failure & 0xffff).map_or(Errno::IO, Errno::from_raw_os_error);
            Err(Failure { step, errno, index: u32::MAX })
        }
        None => Ok(()),
    }
}

/// The process, for whoever asks first.
pub(crate) fn take() -> Option<Begun> {
    EARLY.take()
}

/// Through which it is told where to go on.
pub(crate) fn place() -> &'static Early {
    &EARLY
}

/// Ends the process when this is dropped, if nobody has taken it.
pub struct Unused;

impl Drop for Unused {
    fn drop(&mut self) {
        drop(take().map(|begun| Sandbox::alone(begun.child)));
    }
}
