//! Makes any system call, for the prover's probe.
//!
//! It does not protect this process: the caller answers for what a call does to its memory.
//! The programs that set up a sandbox are built without this module.

use core::{arch::asm, sync::atomic::AtomicU64};

use crate::{Result, call};

/// Issues system call `number`. It returns twice for fork(2).
///
/// # Safety
/// As the call itself: every pointer must be valid for what the kernel does through it,
/// and nothing that this process still uses may be unmapped or overwritten.
///
/// # Errors
/// The kernel's errno.
pub unsafe fn any(number: u32, arguments: [u64; 6]) -> Result<u64> {
    // SAFETY: the caller vouches for the arguments.
    unsafe { call::syscall(number as usize, arguments.map(|argument| argument as usize)) }.map(|value| value as u64)
}

/// Issues a system call of i386 through `int 0x80`, with 32-bit arguments. A kernel without
/// IA-32 emulation kills the process with SIGSEGV.
///
/// # Safety
/// As [`any`].
///
/// # Errors
/// The kernel's errno.
pub unsafe fn int80(number: u32, arguments: [u64; 6]) -> Result<u64> {
    let answer: u64;
    // SAFETY: LLVM reserves rbx, so it is exchanged around the call; the kernel clears r8 to
    // r11, which are declared. The caller vouches for the rest.
    unsafe {
        asm!(
            "xchg rbx, r12",
            "int 0x80",
            "xchg rbx, r12",
            inout("r12") arguments[0] & 0xffff_ffff => _,
            inlateout("rax") u64::from(number) => answer,
            in("rcx") arguments[1] as u32, in("rdx") arguments[2] as u32,
            in("rsi") arguments[3] as u32, in("rdi") arguments[4] as u32,
            out("r8") _, out("r9") _, out("r10") _, out("r11") _,
            options(nostack),
        );
    }
    call::decode(answer as u32 as i32 as isize).map(|value| value as u64)
}

/// Words in memory that this process shares with its children.
///
/// # Errors
/// ENOMEM.
pub fn shared_words() -> Result<&'static [AtomicU64; 8]> {
    const PROT_READ_WRITE: usize = 3;
    const MAP_SHARED_ANONYMOUS: usize = 0x21;
    // SAFETY: the kernel chooses the address of a page that is new.
    let address = unsafe { call::syscall(9, [0, 4096, PROT_READ_WRITE, MAP_SHARED_ANONYMOUS, usize::MAX, 0]) }?;
    // SAFETY: the page is zeroed, aligned, larger than the words, and never unmapped.
    Ok(unsafe { &*(address as *const [AtomicU64; 8]) })
}
