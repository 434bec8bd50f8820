//! Descriptors, limits, scheduling, signals, waiting and exit of the calling process.
//!
//! It does not repeat what rustix offers.

use rustix::fd::{AsFd, AsRawFd, OwnedFd};

use crate::{Errno, Result, call::syscall};

/// Ends this process at once, without destructors, flushing or exit handlers: in a clone that
/// shares memory these belong to the parent.
///
/// A filter of a caller's may answer exit_group(2) in the kernel's place. Then an invalid instruction ends
/// the process (SIGILL).
#[inline]
pub fn exit_now(status: i32) -> ! {
    // SAFETY: exit_group takes an integer.
    let _refused = unsafe { syscall(231, [status as usize, 0, 0, 0, 0, 0]) };
    // SAFETY: it does not go on.
    unsafe { core::arch::asm!("ud2", options(noreturn, nostack, nomem)) }
}

/// Closes every descriptor in `first..=last`.
///
/// # Errors
/// EINVAL where `first` is above `last`, ENOSYS before Linux 5.9.
#[inline]
pub fn close_range(first: u32, last: u32) -> Result<()> {
    // SAFETY: integers only. The callers own none of the descriptors as `OwnedFd`
    // afterwards: they are about to exec, or state why not where they call this.
    unsafe { syscall(436, [first as usize, last as usize, 0, 0, 0, 0]) }.map(drop)
}

/// Closes every descriptor but two.
///
/// # Errors
/// ENOSYS before Linux 5.9.
pub fn close_all_but(kept: [&OwnedFd; 2]) -> Result<()> {
    let mut kept = kept.map(|fd| fd.as_raw_fd().unsigned_abs());
    kept.sort_unstable();
    let [low, high] = kept;
    for (first, end) in [(0, low), (low + 1, high), (high + 1, u32::MAX)] {
        if first < end {
            close_range(first, end - 1)?;
        }
    }
    Ok(())
}

/// Whether a descriptor of this number is open.
#[inline]
pub fn is_open(number: u32) -> bool {
    const FCNTL: usize = 72;
    const F_GETFD: usize = 1;
    // SAFETY: F_GETFD passes no pointer, and the number need not be open.
    unsafe { syscall(FCNTL, [number as usize, F_GETFD, 0, 0, 0, 0]) }.is_ok()
}

/// Marks every descriptor from `first` on as close-on-exec.
///
/// # Errors
/// EINVAL before Linux 5.11.
pub fn close_on_exec_from(first: u32) -> Result<()> {
    const CLOSE_RANGE_CLOEXEC: usize = 4;
    // SAFETY: integers only, nothing is closed.
    unsafe { syscall(436, [first as usize, u32::MAX as usize, CLOSE_RANGE_CLOEXEC, 0, 0, 0]) }.map(drop)
}

/// Makes descriptor `target` a copy of `source`, without close-on-exec.
///
/// # Errors
/// EBADF, or EMFILE where `target` is beyond the limit.
pub fn place_descriptor(source: impl AsFd, target: i32) -> Result<()> {
    let source = source.as_fd().as_raw_fd();
    if source == target {
        const F_SETFD: usize = 2;
        // SAFETY: integers only.
        return unsafe { syscall(72, [source as usize, F_SETFD, 0, 0, 0, 0]) }.map(drop);
    }
    // SAFETY: integers only; the target numbers are fixed ones that no `OwnedFd` holds.
    unsafe { syscall(33, [source as usize, target as usize, 0, 0, 0, 0]) }.map(drop)
}

/// Copies a descriptor to the lowest free number at or above `least`, close-on-exec.
///
/// # Errors
/// EMFILE.
pub fn duplicate_above(source: impl AsFd, least: i32) -> Result<OwnedFd> {
    rustix::io::fcntl_dupfd_cloexec(source, least)
}

/// Sets soft and hard limit of a resource of this process, by the kernel's number.
/// `None` is RLIM_INFINITY.
///
/// # Errors
/// EPERM where the hard limit would rise.
pub fn set_rlimit(resource: u32, value: Option<u64>) -> Result<()> {
    set_rlimit_of(0, resource, value)
}

/// The same of another process.
///
/// # Errors
/// As above; EPERM where that process belongs to another user.
pub fn set_rlimit_of(process: i32, resource: u32, value: Option<u64>) -> Result<()> {
    let both = [value.unwrap_or(u64::MAX); 2];
    // SAFETY: `both` has the layout of rlimit64 and lives; no old value is asked for.
    unsafe { syscall(302, [process as usize, resource as usize, both.as_ptr() as usize, 0, 0, 0]) }.map(drop)
}

/// Soft and hard limit of a resource of this process.
///
/// # Errors
/// EINVAL for an unknown resource.
#[inline]
pub fn rlimit(resource: u32) -> Result<(u64, u64)> {
    let mut both = [0u64; 2];
    // SAFETY: `both` has the layout of rlimit64 and is writable.
    unsafe { syscall(302, [0, resource as usize, 0, both.as_mut_ptr() as usize, 0, 0]) }?;
    Ok((both[0], both[1]))
}

/// The `si_code` of a signal that was sent with a word.
pub const SI_QUEUE: i32 = -1;

/// Sends a process a signal with a word, as sigqueue(3) does by number: the receiver finds the word
/// in `si_int`, beside [`SI_QUEUE`].
///
/// # Errors
/// ESRCH where it has ended, EPERM where it may not be signalled.
pub fn queue_signal(process: impl AsFd, signal: i32, word: i32) -> Result<()> {
    const PIDFD_SEND_SIGNAL: usize = 424;
    // siginfo_t: signal, errno, code, a gap, pid, uid, word. The pid and uid say nothing here.
    let mut info = [0i32; 32];
    (info[0], info[2], info[6]) = (signal, SI_QUEUE, word);
    let process = process.as_fd().as_raw_fd();
    // SAFETY: `info` has the size and layout of siginfo_t, and lives.
    unsafe { syscall(PIDFD_SEND_SIGNAL, [process as usize, signal as usize, info.as_ptr() as usize, 0, 0, 0]) }.map(drop)
}

const GETPRIORITY: usize = 140;
const SETPRIORITY: usize = 141;
const SCHED_SETSCHEDULER: usize = 144;
const SCHED_GETSCHEDULER: usize = 145;
const SCHED_SETAFFINITY: usize = 203;
const SCHED_GETAFFINITY: usize = 204;
/// SCHED_FIFO, SCHED_RR and SCHED_DEADLINE, without SCHED_RESET_ON_FORK.
const REAL_TIME: [usize; 3] = [1, 2, 6];

/// Gives up what lets this process and its children run before others: real-time scheduling,
/// a nice value below 0, the real-time I/O class (sched(7), ioprio_set(2)). A priority below
/// the default is kept.
///
/// # Errors
/// The kernel's errno; the kernel always allows this.
#[inline]
pub fn give_up_precedence() -> Result<()> {
    const IOPRIO_SET: usize = 251;
    const IOPRIO_GET: usize = 252;
    const IOPRIO_WHO_PROCESS: usize = 1;
    const SCHED_OTHER: usize = 0;
    let get = |number, arguments: [usize; 2]| {
        // SAFETY: integers only; the calls concern this process.
        unsafe { syscall(number, [arguments[0], arguments[1], 0, 0, 0, 0]) }
    };
    if REAL_TIME.contains(&(get(SCHED_GETSCHEDULER, [0, 0])? & 0xff)) {
        let parameter = 0i32;
        // SAFETY: `parameter` is a sched_param, and lives.
        unsafe { syscall(SCHED_SETSCHEDULER, [0, SCHED_OTHER, (&raw const parameter) as usize, 0, 0, 0]) }?;
    }
    // The system call returns 20 minus the nice value.
    if get(GETPRIORITY, [0, 0])? > 20 {
        get(SETPRIORITY, [0, 0])?;
    }
    match get(IOPRIO_GET, [IOPRIO_WHO_PROCESS, 0]) {
        Ok(priority) if priority >> 13 == 1 => get(IOPRIO_SET, [IOPRIO_WHO_PROCESS, 0]).map(drop),
        // A kernel without CONFIG_BLOCK has no I/O classes.
        Ok(_) | Err(Errno::NOSYS) => Ok(()),
        Err(errno) => Err(errno),
    }
}

/// Whether this process is scheduled by SCHED_DEADLINE without SCHED_RESET_ON_FORK.
pub fn has_deadline() -> bool {
    const SCHED_DEADLINE: usize = 6;
    // SAFETY: integers only; the call concerns this process.
    let policy = unsafe { syscall(SCHED_GETSCHEDULER, [0, 0, 0, 0, 0, 0]) };
    policy == Ok(SCHED_DEADLINE)
}

/// What two tasks may have in common: the `KCMP_` constants of kcmp(2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Common {
    /// Memory.
    Memory = 1,
    /// The table of descriptors.
    Files = 2,
}

/// Whether two tasks, by their thread ids, have this in common.
///
/// # Errors
/// What kcmp(2) answers: EPERM, ESRCH, or ENOSYS without CONFIG_KCMP.
pub fn have_in_common(one: i32, other: i32, what: Common) -> Result<bool> {
    // SAFETY: integers only.
    unsafe { syscall(KCMP, [one as usize, other as usize, what as usize, 0, 0, 0]) }.map(|order| order == 0)
}

/// Whether two descriptors of a task, by its thread id, are of one open file, as after dup(2).
///
/// # Errors
/// Likewise, and EBADF.
pub fn is_duplicate(task: i32, one: u32, other: u32) -> Result<bool> {
    const KCMP_FILE: usize = 0;
    // SAFETY: integers only.
    unsafe { syscall(KCMP, [task as usize, task as usize, KCMP_FILE, one as usize, other as usize, 0]) }.map(|order| order == 0)
}

const KCMP: usize = 312;

/// How a process is scheduled: policy, nice value and allowed CPUs.
#[derive(Clone, Copy)]
pub struct Turns {
    policy: usize,
    /// 20 minus the nice value, as getpriority(2) returns it.
    weight: usize,
    cpus: [u64; 8],
}

/// Gives this process the default policy, a nice value of at most 0 and every CPU. Returns the
/// state before, which the caller restores with [`Turns::take`]. CPUs from number 512 on are
/// ignored. What cannot be set stays as it is.
pub fn take_turns_like_others() -> Option<Turns> {
    let call = |number, arguments: [usize; 3]| {
        // SAFETY: integers, or `cpus` with its own length.
        unsafe { syscall(number, [arguments[0], arguments[1], arguments[2], 0, 0, 0]) }
    };
    let mut cpus = [0u64; 8];
    call(SCHED_GETAFFINITY, [0, size_of_val(&cpus), cpus.as_mut_ptr() as usize]).ok()?;
    let before = Turns { policy: call(SCHED_GETSCHEDULER, [0; 3]).ok()?, weight: call(GETPRIORITY, [0; 3]).ok()?, cpus };
    let like_others = Turns { policy: 0, weight: before.weight.max(20), cpus: [u64::MAX; 8] };
    like_others.take();
    Some(before)
}

impl Turns {
    /// Applies this to the calling process.
    pub fn take(&self) {
        let call = |number, arguments: [usize; 3]| {
            // SAFETY: integers, or pointers to live values with their length.
            let _as_before = unsafe { syscall(number, [arguments[0], arguments[1], arguments[2], 0, 0, 0]) };
        };
        let parameter = 0i32;
        if !REAL_TIME.contains(&(self.policy & 0xff)) {
            call(SCHED_SETSCHEDULER, [0, self.policy, (&raw const parameter) as usize]);
        }
        call(SETPRIORITY, [0, 0, 20usize.wrapping_sub(self.weight)]);
        call(SCHED_SETAFFINITY, [0, size_of_val(&self.cpus), self.cpus.as_ptr() as usize]);
    }
}

/// Moves a process that was just cloned to another CPU: the kernel may leave it on its
/// parent's CPU, where it starts only when the parent first blocks. On failure both share one
/// CPU, which is only slower. CPUs from number 512 on are ignored.
#[inline]
pub fn send_to_other_cpu(process: i32) {
    let mut usable = [0u64; 8];
    // SAFETY: the length is that of the array.
    if unsafe { syscall(SCHED_GETAFFINITY, [0, size_of_val(&usable), usable.as_mut_ptr() as usize, 0, 0, 0]) }.is_err() {
        return;
    }
    let own = current_cpu();
    if let Some(word) = usable.get_mut(own / 64) {
        *word &= !(1 << (own % 64));
    }
    if usable.iter().any(|word| *word != 0) {
        // SAFETY: as above; the kernel only reads the array.
        let _only_slower =
            unsafe { syscall(SCHED_SETAFFINITY, [process as usize, size_of_val(&usable), usable.as_ptr() as usize, 0, 0, 0]) };
    }
}

/// The number of the current CPU, 0 where getcpu(2) fails. It uses the system call, because
/// the vDSO is found with libc's help.
#[inline]
pub fn current_cpu() -> usize {
    const GETCPU: usize = 309;
    let mut own = 0u32;
    // SAFETY: the kernel writes only the CPU's number.
    let _or_the_first = unsafe { syscall(GETCPU, [(&raw mut own) as usize, 0, 0, 0, 0, 0]) };
    own as usize
}

/// How a child ended and what it used.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ended {
    /// Its pid.
    pub pid: i32,
    /// The status word of wait(2).
    pub status: i32,
    /// CPU time in user mode, microseconds, its own waited-for children included.
    pub user_us: u64,
    /// CPU time in the kernel, microseconds.
    pub system_us: u64,
}

/// Waits for any child to end; retries when a signal interrupts.
///
/// # Errors
/// ECHILD when there is none.
pub fn wait_any() -> Result<Ended> {
    wait4(0)
}

/// Reaps a child that has already ended; `None` where all that are left still run.
///
/// # Errors
/// ECHILD when none is left.
pub fn ended_any() -> Result<Option<Ended>> {
    const WNOHANG: usize = 1;
    wait4(WNOHANG).map(|ended| (ended.pid != 0).then_some(ended))
}

fn wait4(options: usize) -> Result<Ended> {
    let mut usage = [0u64; 18];
    let mut status = 0i32;
    loop {
        // SAFETY: `status` and `usage` (struct rusage, 144 bytes) are writable.
        let answer = unsafe { syscall(61, [usize::MAX, (&raw mut status) as usize, options, usage.as_mut_ptr() as usize, 0, 0]) };
        match answer {
            Ok(pid) => {
                return Ok(Ended {
                    pid: pid as i32,
                    status,
                    user_us: usage[0] * 1_000_000 + usage[1],
                    system_us: usage[2] * 1_000_000 + usage[3],
                });
            }
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
}

/// Waits for the child behind a pidfd to end. The CPU time includes that of the children it
/// waited for: for pid 1 of a PID namespace that is every process inside.
///
/// # Errors
/// ECHILD when it was waited for already.
pub fn wait_child(pidfd: impl AsFd) -> Result<Ended> {
    const P_PIDFD: usize = 3;
    const WEXITED: usize = 4;
    let mut usage = [0u64; 18];
    let mut info = [0u32; 32];
    loop {
        let pidfd = pidfd.as_fd().as_raw_fd() as usize;
        // SAFETY: `info` (siginfo_t, 128 bytes) and `usage` (struct rusage) are writable.
        match unsafe { syscall(247, [P_PIDFD, pidfd, info.as_mut_ptr() as usize, WEXITED, usage.as_mut_ptr() as usize, 0]) } {
            Ok(_) => {
                return Ok(Ended {
                    pid: info[4] as i32,
                    status: info[6] as i32,
                    user_us: usage[0] * 1_000_000 + usage[1],
                    system_us: usage[2] * 1_000_000 + usage[3],
                });
            }
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
}

/// Resets the ignored signals to their default and unblocks all, since both states survive
/// exec: the program starts as from a login. `ignored` is the mask that `/proc/self/status`
/// shows as SigIgn.
pub fn reset_signals(ignored: u64) {
    // struct kernel_sigaction: handler, flags, restorer, mask; all zero is SIG_DFL.
    let default = [0u64; 4];
    for signal in (1..=64usize).filter(|signal| ignored >> (signal - 1) & 1 == 1) {
        // SAFETY: `default` lives, no old action is asked for, the mask size is 8.
        let _cannot_fail = unsafe { syscall(13, [signal, default.as_ptr() as usize, 0, 8, 0, 0]) };
    }
    let none = 0u64;
    const SIG_SETMASK: usize = 2;
    // SAFETY: `none` lives; 8 is the size of the kernel's signal set.
    let _cannot_fail = unsafe { syscall(14, [SIG_SETMASK, (&raw const none) as usize, 0, 8, 0, 0]) };
}

/// Whether this process ignores a signal, as under nohup or as a shell's background job.
#[inline]
pub fn ignores(signal: i32) -> bool {
    const SIG_IGN: u64 = 1;
    let mut current = [0u64; 4];
    // SAFETY: no new action is given, `current` takes the old one, the mask size is 8.
    let asked = unsafe { syscall(13, [signal as usize, 0, current.as_mut_ptr() as usize, 8, 0, 0]) };
    asked.is_ok() && current[0] == SIG_IGN
}

/// Sets the signal actions that the launcher relies on, whatever it inherited. SIGXFSZ and
/// SIGPIPE are ignored: a write beyond RLIMIT_FSIZE or to a closed pipe then fails with an
/// error that can be reported (EFBIG, EPIPE). SIGCHLD gets its default: while it is ignored
/// the kernel reaps children automatically, and waitid(2) fails.
pub fn settle_signals() {
    const SIGPIPE: usize = 13;
    const SIGCHLD: usize = 17;
    const SIGXFSZ: usize = 25;
    const SIG_DFL: u64 = 0;
    const SIG_IGN: u64 = 1;
    for (signal, handler) in [(SIGXFSZ, SIG_IGN), (SIGPIPE, SIG_IGN), (SIGCHLD, SIG_DFL)] {
        let action = [handler, 0, 0, 0];
        // SAFETY: `action` lives, no old one is asked for, the mask size is 8.
        let _cannot_fail = unsafe { syscall(13, [signal, action.as_ptr() as usize, 0, 8, 0, 0]) };
    }
}

/// Stops inherited interval timers: they survive execve(2), and their signals would kill this
/// process.
pub fn stop_timers() {
    const TIMERS: core::ops::RangeInclusive<usize> = 0..=2;
    let never = [0u64; 4];
    for timer in TIMERS {
        // SAFETY: `never`, an interval and a value of zero, lives; no old one is asked for.
        let _cannot_fail = unsafe { syscall(38, [timer, never.as_ptr() as usize, 0, 0, 0, 0]) };
    }
}

/// Makes the terminal behind `terminal` the controlling one of this session.
///
/// # Errors
/// EPERM where this process leads no session, or another session controls the terminal.
pub fn take_terminal(terminal: impl AsFd) -> Result<()> {
    const TIOCSCTTY: usize = 0x540E;
    // SAFETY: the request takes an integer.
    unsafe { syscall(16, [terminal.as_fd().as_raw_fd() as usize, TIOCSCTTY, 0, 0, 0, 0]) }.map(drop)
}

/// The time since boot in microseconds, without suspension; `None` where a system call filter
/// refuses it. It uses the system call and not the vDSO, for programs without libc.
#[inline]
pub fn monotonic_us() -> Option<u64> {
    const CLOCK_MONOTONIC: usize = 1;
    let mut now = [0u64; 2];
    // SAFETY: the kernel writes one timespec, two words of 64 bits, to the array.
    unsafe { syscall(228, [CLOCK_MONOTONIC, now.as_mut_ptr() as usize, 0, 0, 0, 0]) }.ok()?;
    let [seconds, nanoseconds] = now;
    Some(seconds * 1_000_000 + nanoseconds / 1000)
}

/// The errno of clone3 with a null argument: ENOSYS under the sandbox's filter, EINVAL without.
pub fn probe_clone3() -> Errno {
    // SAFETY: a null structure of size 0 makes the kernel refuse before it reads.
    unsafe { syscall(435, [0, 0, 0, 0, 0, 0]) }.err().unwrap_or(Errno::ALREADY)
}

/// Maps the whole of a file read-only.
///
/// # Errors
/// The errors of mmap(2).
pub fn map_file(file: impl AsFd, length: usize) -> Result<&'static [u8]> {
    const PROT_READ: usize = 1;
    const MAP_PRIVATE: usize = 2;
    if length == 0 {
        return Ok(&[]);
    }
    // SAFETY: the kernel chooses the address; the mapping is never removed, so it is
    // valid until the process ends. The launcher, its only writer, has sealed the file.
    let address = unsafe { syscall(9, [0, length, PROT_READ, MAP_PRIVATE, file.as_fd().as_raw_fd() as usize, 0]) }?;
    // SAFETY: `length` bytes from `address` are mapped and stay unchanged.
    Ok(unsafe { core::slice::from_raw_parts(address as *const u8, length) })
}

/// Whether the kernel started this program with more rights than its caller has
/// (AT_SECURE: set-ID bits or file capabilities).
///
/// # Errors
/// EINVAL before Linux 6.4, where only `/proc/self/auxv` has it.
pub fn is_secure_exec() -> Result<bool> {
    const PRCTL: usize = 157;
    const PR_GET_AUXV: usize = 0x4155_5856;
    let mut auxv = [0u8; 1024];
    // SAFETY: the kernel writes at most as many bytes as the array has.
    let length = unsafe { syscall(PRCTL, [PR_GET_AUXV, auxv.as_mut_ptr() as usize, auxv.len(), 0, 0, 0]) }?;
    auxv.get(..length).map(says_secure_exec).ok_or(Errno::OVERFLOW)
}

/// The same from the bytes of `/proc/self/auxv`.
pub fn says_secure_exec(auxv: &[u8]) -> bool {
    const AT_SECURE: u64 = 23;
    auxv.chunks_exact(16).any(|pair| {
        let (key, value) = pair.split_at(8);
        matches!((key.try_into().map(u64::from_ne_bytes), value.try_into().map(u64::from_ne_bytes)), (Ok(AT_SECURE), Ok(secure)) if secure != 0)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_are_those_of_others_for_a_while() {
        const SCHED_BATCH: usize = 3;
        // SAFETY: integers only.
        let policy = || unsafe { syscall(SCHED_GETSCHEDULER, [0; 6]) };
        let cpus = || {
            let mut cpus = [0u64; 8];
            // SAFETY: the length is that of the array.
            unsafe { syscall(SCHED_GETAFFINITY, [0, size_of_val(&cpus), cpus.as_mut_ptr() as usize, 0, 0, 0]) }.map(|_| cpus)
        };
        let all = cpus();
        let first = all.map(|all| core::array::from_fn(|at| if at == 0 { all[0] & all[0].wrapping_neg() } else { 0 }));
        let (Ok(all), Ok(first)) = (all, first) else { panic!("no affinity") };
        // These calls affect only this thread.
        Turns { policy: SCHED_BATCH, weight: 15, cpus: first }.take();
        assert_eq!((policy(), cpus()), (Ok(SCHED_BATCH), Ok(first)));
        let before = take_turns_like_others();
        assert_eq!((policy(), cpus()), (Ok(0), Ok(all)));
        before.iter().for_each(Turns::take);
        assert_eq!((policy(), cpus()), (Ok(SCHED_BATCH), Ok(first)));
    }

    #[test]
    fn precedence_is_given_up_and_what_comes_after_others_stays_there() {
        // SAFETY: integers only.
        let nice = || unsafe { syscall(GETPRIORITY, [0; 6]) };
        let before = nice();
        assert_eq!(give_up_precedence(), Ok(()));
        assert_eq!(nice(), before.map(|weight| weight.min(20)));
    }
}
