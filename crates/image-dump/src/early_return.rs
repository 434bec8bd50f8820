//! Has a call of C return before it is done, as `longjmp` would if that function had called `setjmp`.
//!
//! An interpreter that ends takes itself apart, and a copy would first get a page of its own for each
//! object. Where nothing is left to be done but that, the template ends the call at once, and its
//! caller ends the process with the status that it alone knows; libc then calls no function of a
//! library for the end. The frames are found by libgcc's unwinder from the tables of each library
//! (`.eh_frame`, required by the x86-64 psABI, 3.7). The caller is the frame that goes on behind a call
//! instruction for that function; where none does, nothing happens.

use core::{
    arch::{asm, naked_asm},
    ffi::{c_int, c_void},
};

/// What the template passes to `_Unwind_Backtrace`, as C has it.
#[repr(C)]
pub struct EarlyReturn {
    /// The function whose call returns.
    function: u64,
    /// What it returns.
    value: u64,
    /// The library that it belongs to, and that calls it: its first address, and the one behind it.
    library: [u64; 2],
    /// Functions of the unwinder: `_Unwind_GetIP`, `_Unwind_GetCFA` and `_Unwind_GetGR`.
    ip: unsafe extern "C" fn(*mut c_void) -> u64,
    cfa: unsafe extern "C" fn(*mut c_void) -> u64,
    register: unsafe extern "C" fn(*mut c_void, c_int) -> u64,
    /// `on_exit` of libc: the function that was registered last is called first, with the status.
    on_exit: unsafe extern "C" fn(extern "C" fn(c_int, *mut c_void) -> !, *mut c_void) -> c_int,
}

/// The registers that a function preserves, by their numbers in DWARF (x86-64 psABI, 3.6.2): rbx, rbp and
/// r12 to r15.
const PRESERVED: [c_int; 6] = [3, 6, 12, 13, 14, 15];
const GO_ON: c_int = 0;
/// `_URC_NORMAL_STOP`.
const STOP: c_int = 4;

/// The state of a caller when a call has returned.
#[repr(C)]
struct Caller {
    preserved: [u64; 6],
    stack: u64,
    instruction: u64,
    value: u64,
}

/// See the top of this file. Called for each frame, the innermost first.
///
/// # Safety
/// `_Unwind_Backtrace` calls it with its context and an [`EarlyReturn`]; no frame up to the one that is
/// ended holds anything that must be given back.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stockade_image_return_early(context: *mut c_void, wanted: *const EarlyReturn) -> c_int {
    // SAFETY: the caller passes an `EarlyReturn`, and nothing else refers to it meanwhile.
    let wanted = unsafe { &*wanted };
    // SAFETY: these are functions of the unwinder, and the context is its own.
    let (instruction, stack) = unsafe { ((wanted.ip)(context), (wanted.cfa)(context)) };
    // SAFETY: the caller vouches for the library.
    if unsafe { called_before(instruction, wanted.library) } != Some(wanted.function) {
        return GO_ON;
    }
    // SAFETY: libc vouches for its function; this library is never unloaded before.
    if has_shadow_stack() || unsafe { (wanted.on_exit)(crate::exit, core::ptr::null_mut()) } != 0 {
        return STOP;
    }
    // SAFETY: as above; the unwinder knows these registers of each frame.
    let preserved = PRESERVED.map(|number| unsafe { (wanted.register)(context, number) });
    let caller = Caller { preserved, stack, instruction, value: wanted.value };
    // SAFETY: this is what the caller's registers are when the call returns.
    unsafe { enter(&raw const caller) }
}

/// The function that the call instruction before this one names: by its place, or by a word that holds
/// it, which the instruction or a stub of the procedure linkage table reads (psABI, 5.2). None outside
/// the library, and for any other instruction.
///
/// # Safety
/// All of the library is mapped.
unsafe fn called_before(instruction: u64, library: [u64; 2]) -> Option<u64> {
    /// Bytes: more than a call, or a stub with what may stand before its jump.
    const MAX_CODE: u64 = 16;
    const CALL: &[u8] = &[0xe8];
    const CALL_BY_WORD: &[u8] = &[0xff, 0x15];
    const JUMP_BY_WORD: &[u8] = &[0xff, 0x25];
    const BRANCH_TARGET: &[u8] = &[0xf3, 0x0f, 0x1e, 0xfa];
    const BOUND: &[u8] = &[0xf2];
    let is_inside = |at: &u64| library[0] + MAX_CODE <= *at && *at + MAX_CODE <= library[1];
    // SAFETY: what is asked for lies in the library, which is mapped.
    let begins_with = |at: u64, code: &[u8]| code.iter().zip(at..).all(|(byte, at)| unsafe { *(at as *const u8) } == *byte);
    // Where an instruction leads whose distance stands behind its operation.
    let leads_to = |at: u64, operation: &[u8]| {
        let distance = at + operation.len() as u64;
        // SAFETY: as above.
        let far = begins_with(at, operation).then(|| unsafe { (distance as *const i32).read_unaligned() })?;
        Some((distance + 4).wrapping_add_signed(i64::from(far)))
    };
    // SAFETY: as above.
    let word = |at: u64| is_inside(&at).then(|| unsafe { (at as *const u64).read_unaligned() });
    if !is_inside(&instruction) {
        return None;
    }
    if let Some(function) = leads_to(instruction - 6, CALL_BY_WORD).and_then(word) {
        return Some(function);
    }
    let called = leads_to(instruction - 5, CALL).filter(is_inside)?;
    let mut jump = called;
    for prefix in [BRANCH_TARGET, BOUND] {
        jump += if begins_with(jump, prefix) { prefix.len() as u64 } else { 0 };
    }
    Some(leads_to(jump, JUMP_BY_WORD).and_then(word).unwrap_or(called))
}

/// Whether the processor would compare this return with a stack of its own: the instruction does nothing
/// where there is none.
fn has_shadow_stack() -> bool {
    let pointer: u64;
    // SAFETY: RDSSPQ RAX changes no other register.
    unsafe { asm!("xor eax, eax", ".byte 0xf3, 0x48, 0x0f, 0x1e, 0xc8", out("rax") pointer, options(nomem, nostack)) };
    pointer != 0
}

/// # Safety
/// The stack and the instruction belong together, and so do the registers.
#[unsafe(naked)]
unsafe extern "C" fn enter(caller: *const Caller) -> ! {
    // What is read lies below the new stack pointer, where a signal's handler may write.
    naked_asm!(
        "mov rbx, [rdi]",
        "mov rbp, [rdi + 8]",
        "mov r12, [rdi + 16]",
        "mov r13, [rdi + 24]",
        "mov r14, [rdi + 32]",
        "mov r15, [rdi + 40]",
        "mov rcx, [rdi + 48]",
        "mov rdx, [rdi + 56]",
        "mov rax, [rdi + 64]",
        "mov rsp, rcx",
        "jmp rdx",
    )
}
