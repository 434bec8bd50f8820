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

/// The errno of an answer in -4095..0. rustix's own way to make one is no inline function,
/// and so cannot be called before libc (early.rs).
#[inline(always)]
fn errno(answer: isize) -> Errno {
    const _: () = assert!(size_of::<Errno>() == size_of::<u16>());
    // SAFETY: of the same size, and any bits are a number.
    const ENCODED: u16 = unsafe { core::mem::transmute::<Errno, u16>(Errno::PERM) };
    const _: () = assert!(ENCODED == (-1i16).cast_unsigned());
    // SAFETY: rustix keeps an errno as the low 16 bits of the negated number, which is what
    // the kernel answers; that it does is checked above, when this is compiled.
    unsafe { core::mem::transmute::<u16, Errno>(answer as u16) }
}

/// Splits the kernel's answer into value and errno.
#[inline(always)]
pub(crate) fn decode(answer: isize) -> Result<usize> {
    if (-4095..0).contains(&answer) { Err(errno(answer)) } else { Ok(answer as usize) }
}
