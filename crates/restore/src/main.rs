//! The restorer's program: the entry point and nothing else.
//!
//! It leaves the kernel's stack at once, because that is unmapped on the way.
#![cfg_attr(freestanding, no_std, no_main)]

#[cfg(not(freestanding))]
fn main() {
    // Only the nested build makes a program that can do this.
    stockade_sys::process::exit_now(stockade_restore::FAILED)
}

#[cfg(freestanding)]
#[global_allocator]
static ALLOCATOR: stockade_sys::start::NoHeap = stockade_sys::start::NoHeap;

#[cfg(freestanding)]
#[repr(C, align(16))]
struct Stack(core::cell::UnsafeCell<[u8; STACK_LENGTH]>);

#[cfg(freestanding)]
const STACK_LENGTH: usize = 64 << 10;

// SAFETY: only the one thread's stack pointer points into it.
#[cfg(freestanding)]
unsafe impl Sync for Stack {}

#[cfg(freestanding)]
static STACK: Stack = Stack(core::cell::UnsafeCell::new([0; STACK_LENGTH]));

#[cfg(freestanding)]
core::arch::global_asm!(
    ".globl _start", "_start:", "xor ebp, ebp", "mov rdi, rsp", "lea rsp, [rip + {stack} + {length}]", "call {entry}", "ud2",
    stack = sym STACK,
    length = const STACK_LENGTH,
    entry = sym stockade_restore::run,
);
