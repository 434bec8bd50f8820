//! What the kernel keeps for a thread and its process beside memory and descriptors: thread
//! block, id, lists, signal stack and actions. Reading it for an image, setting it in a copy.
//!
//! libc keeps its own view of most of these. Setting them is for a process whose libc is about
//! to be the one that they were read from.

use crate::{Result, call::syscall};

const RT_SIGACTION: usize = 13;
const RT_SIGPROCMASK: usize = 14;
const UMASK: usize = 95;
const SIGALTSTACK: usize = 131;
const PRCTL: usize = 157;
const ARCH_PRCTL: usize = 158;
const GETTID: usize = 186;
const SET_TID_ADDRESS: usize = 218;
const SET_ROBUST_LIST: usize = 273;
const GET_ROBUST_LIST: usize = 274;
const RSEQ: usize = 334;

/// Bytes of the kernel's signal set.
const SIGNAL_SET: usize = 8;
const SIG_SETMASK: usize = 2;
/// Bytes of `struct robust_list_head`.
const ROBUST_LIST: usize = 24;

/// This thread's id.
pub fn thread_id() -> i32 {
    // SAFETY: no arguments; it cannot fail.
    unsafe { syscall(GETTID, [0; 6]) }.map_or(0, |id| id as i32)
}

/// The FS and GS bases.
///
/// # Errors
/// Those of arch_prctl(2).
pub fn segment_bases() -> Result<(u64, u64)> {
    const ARCH_GET_FS: usize = 0x1003;
    const ARCH_GET_GS: usize = 0x1004;
    let (mut fs, mut gs) = (0u64, 0u64);
    for (request, place) in [(ARCH_GET_FS, &mut fs), (ARCH_GET_GS, &mut gs)] {
        // SAFETY: the kernel writes one word to the place.
        unsafe { syscall(ARCH_PRCTL, [request, core::ptr::from_mut(place) as usize, 0, 0, 0, 0]) }?;
    }
    Ok((fs, gs))
}

/// Where the kernel clears the id of this thread when it ends.
///
/// # Errors
/// EINVAL without CONFIG_CHECKPOINT_RESTORE.
pub fn tid_address() -> Result<u64> {
    const PR_GET_TID_ADDRESS: usize = 40;
    let mut address = 0u64;
    // SAFETY: the kernel writes one word to the place.
    unsafe { syscall(PRCTL, [PR_GET_TID_ADDRESS, (&raw mut address) as usize, 0, 0, 0, 0]) }?;
    Ok(address)
}

/// The head of this thread's robust mutexes; 0: none was set.
///
/// # Errors
/// Those of get_robust_list(2).
pub fn robust_list() -> Result<u64> {
    let (mut head, mut length) = (0u64, 0usize);
    // SAFETY: the kernel writes one word to each place.
    unsafe { syscall(GET_ROBUST_LIST, [0, (&raw mut head) as usize, (&raw mut length) as usize, 0, 0, 0]) }?;
    Ok(head)
}

/// The name of this thread.
///
/// # Errors
/// Those of prctl(2).
pub fn name() -> Result<[u8; 16]> {
    const PR_GET_NAME: usize = 16;
    let mut name = [0u8; 16];
    // SAFETY: the kernel writes at most 16 bytes.
    unsafe { syscall(PRCTL, [PR_GET_NAME, name.as_mut_ptr() as usize, 0, 0, 0, 0]) }?;
    Ok(name)
}

/// Names this thread.
///
/// # Errors
/// Those of prctl(2).
pub fn set_name(name: &[u8; 16]) -> Result<()> {
    const PR_SET_NAME: usize = 15;
    // SAFETY: the kernel reads at most 16 bytes.
    unsafe { syscall(PRCTL, [PR_SET_NAME, name.as_ptr() as usize, 0, 0, 0, 0]) }.map(drop)
}

/// Sets the file mode mask and returns the one before.
pub fn set_umask(mask: u64) -> u64 {
    // SAFETY: an integer; it cannot fail.
    unsafe { syscall(UMASK, [mask as usize, 0, 0, 0, 0, 0]) }.map_or(0, |before| before as u64)
}

/// The blocked signals.
///
/// # Errors
/// Those of rt_sigprocmask(2).
pub fn blocked_signals() -> Result<u64> {
    let mut mask = 0u64;
    // SAFETY: no new mask; the kernel writes one word to the place.
    unsafe { syscall(RT_SIGPROCMASK, [0, 0, (&raw mut mask) as usize, SIGNAL_SET, 0, 0]) }?;
    Ok(mask)
}

/// Blocks exactly these signals.
///
/// # Errors
/// Those of rt_sigprocmask(2).
pub fn set_signal_mask(mask: u64) -> Result<()> {
    // SAFETY: the kernel reads one word.
    unsafe { syscall(RT_SIGPROCMASK, [SIG_SETMASK, (&raw const mask) as usize, 0, SIGNAL_SET, 0, 0]) }.map(drop)
}

/// The signal stack, as `stack_t`.
///
/// # Errors
/// Those of sigaltstack(2).
pub fn signal_stack() -> Result<[u64; 3]> {
    let mut stack = [0u64; 3];
    // SAFETY: no new stack; `stack` has the size of stack_t.
    unsafe { syscall(SIGALTSTACK, [0, stack.as_mut_ptr() as usize, 0, 0, 0, 0]) }?;
    Ok(stack)
}

/// What a signal does: handler, flags, restorer and mask.
///
/// # Errors
/// EINVAL for a number that is no signal.
pub fn signal_action(signal: usize) -> Result<[u64; 4]> {
    let mut action = [0u64; 4];
    // SAFETY: no new action; `action` has the layout of struct kernel_sigaction.
    unsafe { syscall(RT_SIGACTION, [signal, 0, action.as_mut_ptr() as usize, SIGNAL_SET, 0, 0]) }?;
    Ok(action)
}

/// Sets what a signal does.
///
/// # Safety
/// The handler and its restorer are code of the program that runs from now on.
///
/// # Errors
/// EINVAL for SIGKILL and SIGSTOP.
pub unsafe fn set_signal_action(signal: usize, action: &[u64; 4]) -> Result<()> {
    // SAFETY: the caller vouches for the addresses; no old action is asked for.
    unsafe { syscall(RT_SIGACTION, [signal, action.as_ptr() as usize, 0, SIGNAL_SET, 0, 0]) }.map(drop)
}

/// The addresses that the kernel keeps for this thread.
#[derive(Clone, Copy, Debug)]
pub struct ThreadAddresses {
    /// The FS base.
    pub fs: u64,
    /// Where the id is cleared at the end.
    pub tid: u64,
    /// The head of the robust mutexes; 0: none.
    pub robust_list: u64,
    /// The rseq(2) area of 32 bytes; 0: none.
    pub rseq: u64,
    /// The signal stack, as `stack_t`.
    pub signal_stack: [u64; 3],
}

/// Sets all of them, and returns the thread's id, which it also writes where it is kept.
///
/// # Safety
/// Each address is mapped, writable and laid out as its name says, and this program uses no
/// thread-local storage afterwards but the new one.
///
/// # Errors
/// That of the call that failed.
pub unsafe fn set_thread_addresses(addresses: &ThreadAddresses) -> Result<i32> {
    const ARCH_SET_FS: usize = 0x1002;
    const RSEQ_SIGNATURE: usize = 0x5305_3053;
    const RSEQ_AREA: usize = 32;
    const RSEQ_CS: u64 = 8;
    let ThreadAddresses { fs, tid, robust_list, rseq, signal_stack } = addresses;
    // SAFETY: the caller vouches for each address; the kernel keeps them.
    unsafe {
        syscall(ARCH_PRCTL, [ARCH_SET_FS, *fs as usize, 0, 0, 0, 0])?;
        let id = syscall(SET_TID_ADDRESS, [*tid as usize, 0, 0, 0, 0, 0])? as i32;
        (*tid as *mut i32).write(id);
        if *robust_list != 0 {
            syscall(SET_ROBUST_LIST, [*robust_list as usize, ROBUST_LIST, 0, 0, 0, 0])?;
        }
        if *rseq != 0 {
            // A critical section that the image was written in would be aborted at once.
            ((*rseq + RSEQ_CS) as *mut u64).write(0);
            syscall(RSEQ, [*rseq as usize, RSEQ_AREA, 0, RSEQ_SIGNATURE, 0, 0])?;
        }
        syscall(SIGALTSTACK, [signal_stack.as_ptr() as usize, 0, 0, 0, 0, 0])?;
        Ok(id)
    }
}

/// `struct prctl_mm_map` without its auxiliary vector and executable: the bounds of code (2
/// words), data (2), heap (2), the stack's begin, the bounds of arguments (2) and environment (2).
///
/// # Errors
/// EINVAL without CONFIG_CHECKPOINT_RESTORE.
pub fn set_memory_bounds(bounds: &[u64; 11]) -> Result<()> {
    const PR_SET_MM: usize = 35;
    const PR_SET_MM_MAP: usize = 14;
    /// No auxiliary vector in the lower half, no executable (-1) in the upper.
    const NEITHER: u64 = 0xffff_ffff_0000_0000;
    let mut map = [0u64; 13];
    map[..11].copy_from_slice(bounds);
    map[12] = NEITHER;
    // SAFETY: `map` has the layout and size of struct prctl_mm_map; the kernel checks its values,
    // and uses them for /proc and as the place where the heap grows.
    unsafe { syscall(PRCTL, [PR_SET_MM, PR_SET_MM_MAP, map.as_ptr() as usize, size_of_val(&map), 0, 0]) }.map(drop)
}

/// Whether this thread has a seccomp filter.
pub fn has_seccomp_filter() -> bool {
    const PR_GET_SECCOMP: usize = 21;
    const SECCOMP_MODE_FILTER: usize = 2;
    // SAFETY: it takes no pointer and changes nothing.
    let mode = unsafe { syscall(PRCTL, [PR_GET_SECCOMP, 0, 0, 0, 0, 0]) };
    mode == Ok(SECCOMP_MODE_FILTER)
}

/// The end of the heap, as the kernel has it.
pub fn heap_end() -> u64 {
    const BRK: usize = 12;
    // SAFETY: 0 asks and changes nothing; it cannot fail.
    unsafe { syscall(BRK, [0; 6]) }.map_or(0, |end| end as u64)
}
