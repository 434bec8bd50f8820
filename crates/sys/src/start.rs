//! Start-up of a program without libc: entry point, memory functions, allocator and panic
//! handler.
//!
//! glibc's start-up executes about 80 CPUID instructions, which take 0.6 ms in a virtual
//! machine; the executor avoids them. It offers no unwinding, no thread-local storage and no
//! freeing of memory: the program ends after one run.

extern crate alloc;

use core::{alloc::Layout, arch::asm};

/// Copies `n` bytes; the compiler emits calls to it.
///
/// # Safety
/// As memcpy(3).
#[cfg_attr(freestanding, unsafe(no_mangle))]
pub unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, n: usize) -> *mut u8 {
    // SAFETY: the caller vouches for both ranges; the direction flag is clear by ABI.
    unsafe { asm!("rep movsb", inout("rcx") n => _, inout("rdi") to => _, inout("rsi") from => _, options(nostack, preserves_flags)) };
    to
}

/// Copies `n` bytes between ranges that may overlap.
///
/// # Safety
/// As memmove(3).
#[cfg_attr(freestanding, unsafe(no_mangle))]
pub unsafe extern "C" fn memmove(to: *mut u8, from: *const u8, n: usize) -> *mut u8 {
    if (to as usize).wrapping_sub(from as usize) >= n {
        // SAFETY: a forward copy never overwrites what it has still to read here.
        return unsafe { memcpy(to, from, n) };
    }
    // SAFETY: backwards, from the last byte on; the flag is cleared again.
    unsafe {
        asm!("std", "rep movsb", "cld", inout("rcx") n => _,
            inout("rdi") to.add(n).wrapping_sub(1) => _, inout("rsi") from.add(n).wrapping_sub(1) => _, options(nostack));
    }
    to
}

/// Fills `n` bytes.
///
/// # Safety
/// As memset(3).
#[cfg_attr(freestanding, unsafe(no_mangle))]
pub unsafe extern "C" fn memset(to: *mut u8, byte: i32, n: usize) -> *mut u8 {
    // SAFETY: the caller vouches for the range.
    unsafe { asm!("rep stosb", inout("rcx") n => _, inout("rdi") to => _, in("al") byte as u8, options(nostack, preserves_flags)) };
    to
}

/// Compares `n` bytes.
///
/// # Safety
/// As memcmp(3).
#[cfg_attr(freestanding, unsafe(no_mangle))]
pub unsafe extern "C" fn memcmp(a: *const u8, b: *const u8, n: usize) -> i32 {
    let mut i = 0;
    while i < n {
        // SAFETY: `i` is below `n`; volatile, or the compiler would see memcmp here.
        let (x, y) = unsafe { (core::ptr::read_volatile(a.add(i)), core::ptr::read_volatile(b.add(i))) };
        if x != y {
            return i32::from(x) - i32::from(y);
        }
        i += 1;
    }
    0
}

/// Compares `n` bytes for equality.
///
/// # Safety
/// As bcmp(3).
#[cfg_attr(freestanding, unsafe(no_mangle))]
pub unsafe extern "C" fn bcmp(a: *const u8, b: *const u8, n: usize) -> i32 {
    // SAFETY: the caller vouches for both ranges.
    unsafe { memcmp(a, b, n) }
}

/// Length of a C string.
///
/// # Safety
/// As strlen(3).
#[cfg_attr(freestanding, unsafe(no_mangle))]
pub unsafe extern "C" fn strlen(s: *const u8) -> usize {
    let mut n = 0;
    // SAFETY: the caller vouches for a NUL.
    while unsafe { core::ptr::read_volatile(s.add(n)) } != 0 {
        n += 1;
    }
    n
}

const HEAP: usize = 4 << 20;

/// Allocates from a fixed block and never frees.
pub struct Bump {
    memory: core::cell::UnsafeCell<[u8; HEAP]>,
    used: core::cell::Cell<usize>,
}

// SAFETY: the program that uses it has one thread.
unsafe impl Sync for Bump {}

impl Bump {
    /// An allocator with 4 MiB.
    #[expect(clippy::new_without_default, reason = "only used for a static")]
    pub const fn new() -> Self {
        Bump { memory: core::cell::UnsafeCell::new([0; HEAP]), used: core::cell::Cell::new(0) }
    }
}

// SAFETY: each block lies inside `memory`, is aligned and is handed out once.
unsafe impl core::alloc::GlobalAlloc for Bump {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let base = self.memory.get() as usize;
        let start = (base + self.used.get()).next_multiple_of(layout.align());
        let end = start + layout.size();
        if end > base + HEAP {
            return core::ptr::null_mut();
        }
        self.used.set(end - base);
        start as *mut u8
    }

    unsafe fn dealloc(&self, _block: *mut u8, _layout: Layout) {}
}

/// An allocator that has nothing, for programs that allocate nothing.
pub struct NoHeap;

// SAFETY: null says that there is no block, so none is ever used or freed.
unsafe impl core::alloc::GlobalAlloc for NoHeap {
    unsafe fn alloc(&self, _layout: Layout) -> *mut u8 {
        core::ptr::null_mut()
    }

    unsafe fn dealloc(&self, _block: *mut u8, _layout: Layout) {}
}

#[cfg(freestanding)]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    crate::process::exit_now(134)
}

/// Defines the entry point of a program: calls `$main`, exits with what it returns.
/// An ordinary build of the workspace compiles the same program with libc and std, for its
/// checks: only the nested build sets `freestanding`, and only its program is used.
#[macro_export]
macro_rules! program {
    ($main:path) => {
        #[cfg(not(freestanding))]
        fn main() {
            $crate::process::exit_now($main())
        }

        #[cfg(freestanding)]
        #[global_allocator]
        static ALLOCATOR: $crate::start::Bump = $crate::start::Bump::new();

        #[cfg(freestanding)]
        core::arch::global_asm!(
            ".globl _start", "_start:", "xor ebp, ebp", "and rsp, -16", "call {entry}", "ud2",
            entry = sym entry
        );

        #[cfg(freestanding)]
        extern "C" fn entry() -> ! {
            $crate::process::exit_now($main())
        }
    };
}

/// The descriptors that the launcher gives to the executor.
pub mod descriptor {
    use rustix::fd::BorrowedFd;

    const fn fixed(number: i32) -> BorrowedFd<'static> {
        // SAFETY: the launcher's last step before exec places exactly these, and
        // the executor never closes one.
        unsafe { BorrowedFd::borrow_raw(number) }
    }

    /// The job: empty until the launcher sends `ExecutorCommand::Job`, and sealed from then on.
    pub const JOB: BorrowedFd<'static> = fixed(0);
    /// The pipe for events.
    pub const STATUS: BorrowedFd<'static> = fixed(3);
    /// The payload's stdin.
    pub const STDIN: BorrowedFd<'static> = fixed(4);
    /// The launcher's messages; end of file means that the launcher has exited.
    pub const LIFELINE: BorrowedFd<'static> = fixed(5);
    /// The ruleset of the payload's own Landlock layer, where it has one.
    pub const RULESET: BorrowedFd<'static> = fixed(6);
    /// The payload's program, where it is executed by descriptor.
    pub const PROGRAM: BorrowedFd<'static> = fixed(7);
    /// The file of a memory image that the payload gets, where it gets one.
    pub const MEMORY: BorrowedFd<'static> = fixed(8);
}

/// Pointers to NUL-terminated strings, in the form that execve takes.
pub struct Arguments<'a> {
    argv: alloc::vec::Vec<*const u8>,
    envp: alloc::vec::Vec<*const u8>,
    strings: core::marker::PhantomData<&'a [u8]>,
}

impl<'a> Arguments<'a> {
    /// Collects the pointers; the strings must outlive what this returns.
    pub fn new(argv: &[TerminatedBytes<'a>], envp: &[TerminatedBytes<'a>]) -> Self {
        let pointers = |list: &[TerminatedBytes<'a>]| list.iter().map(|s| s.0.as_ptr()).chain([core::ptr::null()]).collect();
        Arguments { argv: pointers(argv), envp: pointers(envp), strings: core::marker::PhantomData }
    }
}

/// Bytes that end in their only NUL.
#[derive(Clone, Copy)]
pub struct TerminatedBytes<'a>(&'a [u8]);

impl<'a> TerminatedBytes<'a> {
    /// `None` unless the last byte, and no other, is NUL.
    pub fn new(bytes: &'a [u8]) -> Option<Self> {
        core::ffi::CStr::from_bytes_with_nul(bytes).ok().map(|_| TerminatedBytes(bytes))
    }
}

/// Replaces this process by the program at `path`; returns the errno when that failed.
pub fn exec_prepared(path: TerminatedBytes<'_>, arguments: &Arguments<'_>) -> crate::Errno {
    // SAFETY: all strings are NUL-terminated and alive, both arrays end in null.
    match unsafe { crate::clone::exec_path(path.0.as_ptr(), arguments.argv.as_ptr(), arguments.envp.as_ptr()) } {
        Ok(never) => match never {},
        Err(errno) => errno,
    }
}

/// Replaces this process by the program behind `program`; returns the errno when that failed.
pub fn exec_by_descriptor(program: rustix::fd::BorrowedFd<'_>, arguments: &Arguments<'_>) -> crate::Errno {
    // SAFETY: as in `exec_prepared`.
    match unsafe { crate::clone::exec_descriptor(program, arguments.argv.as_ptr(), arguments.envp.as_ptr()) } {
        Ok(never) => match never {},
        Err(errno) => errno,
    }
}

/// [`crate::clone::vfork`] for a program that has no libc, no second thread and a panic
/// handler that only exits.
///
/// # Errors
/// As [`crate::clone::vfork`].
pub fn vfork<T>(entry: crate::clone::Entry<T>, argument: &T) -> crate::Result<i32> {
    // SAFETY: this module replaces libc, so no system call uses libc, and a panic in the child
    // only ends the child.
    unsafe { crate::clone::vfork(entry, argument) }
}
