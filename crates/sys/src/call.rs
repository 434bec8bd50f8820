//! The `syscall` instruction.
//!
//! Private to the crate: each public wrapper states why its arguments are sound.

use core::arch::asm;

use crate::{Errno, Result};

/// Issues system call `number`.
///
/// # Safety
/// The arguments must satisfy the contract of that system call: every pointer among
/// them must be valid for what the kernel reads or writes through it.
#[inline(always)]
pub(crate) unsafe fn syscall(number: usize, args: [usize; 6]) -> Result<usize> {
    let answer: isize;
    // SAFETY: the kernel preserves every register but rax, rcx and r11, which are
    // declared; the caller vouches for the arguments.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number as isize => answer,
            in("rdi") args[0], in("rsi") args[1], in("rdx") args[2],
            in("r10") args[3], in("r8") args[4], in("r9") args[5],
            out("rcx") _, out("r11") _,
            options(nostack),
        );
    }
    decode(answer)
}

/// Splits the kernel's answer into value and errno.
#[inline(always)]
pub(crate) fn decode(answer: isize) -> Result<usize> {
    if (-4095..0).contains(&answer) { Err(Errno::from_raw_os_error(-(answer as i32))) } else { Ok(answer as usize) }
}
