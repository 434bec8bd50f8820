//! Writes the calling process into an image, from within, as the process itself: no ptrace, no
//! `/proc/PID/mem`, no capability. A template loads it and calls it once.
//!
//! The C interface, for a process of one thread:
//!
//! ```c
//! int stockade_image_write(int fd);
//! /*  0  the image is written to fd, an empty file
//!     1  this is a copy: stockade-restore has made it from the image
//!    -1  refused: the process has something that an image cannot hold */
//! const char *stockade_image_reason(void);
//! /* why it was refused, one line without its end */
//! const struct { uint64_t argc; char **argv, **envp; } *stockade_image_inbox(void);
//! /* in a copy: arguments and environment that it was started with, which stay in place */
//! void stockade_image_note_pages_at_end(int fd);
//! /* in a child of the template that does what every copy does: where it ends early, it notes in the
//!    image which pages were written, so that the restorer copies them at once */
//! int stockade_image_return_early(struct _Unwind_Context *, struct early_return *);
//! /* for `_Unwind_Backtrace`: the call of a function further up returns at once, and the process then
//!    ends without what its libraries would do (`early_return.rs`) */
//! void stockade_image_set_end(struct at_end *);
//! PyObject *stockade_image_add_hook(PyObject *, PyObject *const *, Py_ssize_t, PyObject *);
//! PyObject *stockade_image_use_tool(PyObject *, PyObject *const *, Py_ssize_t, PyObject *);
//! PyObject *stockade_image_freeze(PyObject *, PyObject *const *, Py_ssize_t, PyObject *);
//! /* in the place of three functions of CPython's: each notes its call in that structure (`at_end.rs`) */
//! void stockade_image_at_end(void);
//! /* what a copy does last at its end, by these notes */
//! ```
//!
//! Between saving the registers and the last byte of the image it makes system calls only: no
//! function of libc, no lock, no allocation, so that the image has no half-done state. It
//! judges what the kernel shows of memory. What only the language knows (descriptors, timers,
//! random generators) is the template's work (`template.py`).
#![no_std]

mod at_end;
mod early_return;
mod hot;
mod refusal;
mod state;
mod writer;

use core::{
    arch::naked_asm,
    cell::UnsafeCell,
    cmp::Ordering,
    ffi::{c_int, c_void},
};

use rustix::fd::BorrowedFd;
use stockade_protocol::memory_image::{Inbox, place};
use stockade_sys::{
    memory::{AddressRange, unmap},
    thread_state::heap_end,
};

use refusal::ReasonText;
use writer::Continuation;

#[cfg(freestanding)]
#[global_allocator]
static ALLOCATOR: stockade_sys::start::NoHeap = stockade_sys::start::NoHeap;

/// Of mallopt(3); -1 keeps malloc from giving memory of its heap back.
const M_TRIM_THRESHOLD: c_int = -1;

/// What lives through the writing and is there in a copy.
struct ThreadCell<T>(UnsafeCell<T>);

// SAFETY: the interface is for processes of one thread, which the writer checks.
unsafe impl<T> Sync for ThreadCell<T> {}

/// The restorer writes here, by the address in the header.
static INBOX: ThreadCell<Inbox> = ThreadCell(UnsafeCell::new(Inbox { argc: 0, argv: 0, envp: 0 }));
static REASON: ThreadCell<ReasonText> = ThreadCell(UnsafeCell::new(ReasonText::empty()));
/// glibc's view of the end of the heap.
static HEAP_END: ThreadCell<*mut u64> = ThreadCell(UnsafeCell::new(core::ptr::null_mut()));
static SET_MALLOC: ThreadCell<Option<state::SetMalloc>> = ThreadCell(UnsafeCell::new(None));

/// See the top of this file.
///
/// # Safety
/// `fd` is open, and the process has one thread.
// The registers that a function must preserve are kept on the stack, which is part of the
// image; a copy begins at label 2 with this stack pointer, takes them back from there and
// returns to the same caller. So no Rust function returns twice.
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stockade_image_write(fd: c_int) -> c_int {
    naked_asm!(
        "push rbp",
        "push rbx",
        "push r12",
        "push r13",
        "push r14",
        "push r15",
        "sub rsp, 8",
        "stmxcsr [rsp]",
        "fnstcw [rsp + 4]",
        "lea rsi, [rip + 2f]",
        "mov rdx, rsp",
        "call {write}",
        "jmp 3f",
        "2:",
        "ldmxcsr [rsp]",
        "fldcw [rsp + 4]",
        "call {resume}",
        "3:",
        "add rsp, 8",
        "pop r15",
        "pop r14",
        "pop r13",
        "pop r12",
        "pop rbx",
        "pop rbp",
        "ret",
        write = sym write,
        resume = sym resume,
    )
}

/// See the top of this file. Valid until the next call of [`stockade_image_write`].
#[unsafe(no_mangle)]
pub extern "C" fn stockade_image_reason() -> *const u8 {
    // SAFETY: only `write` changes it, which is not running: there is one thread.
    unsafe { (*REASON.0.get()).as_c_string() }
}

/// See the top of this file. All zero outside a copy.
#[unsafe(no_mangle)]
pub extern "C" fn stockade_image_inbox() -> *const Inbox {
    INBOX.0.get()
}

/// See the top of this file.
///
/// # Safety
/// `fd` is that of an image until the process ends, and the process has one thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stockade_image_note_pages_at_end(fd: c_int) {
    // SAFETY: one thread; nothing else refers to it.
    unsafe { *REHEARSED.0.get() = fd };
}

/// The image of which this process is a rehearsal; 0 outside one.
static REHEARSED: ThreadCell<c_int> = ThreadCell(UnsafeCell::new(0));

/// Ends the process as libc would, but for what libraries do then. A rehearsal notes its pages; a copy
/// writes nothing here.
pub(crate) extern "C" fn exit(status: c_int, _: *mut c_void) -> ! {
    // SAFETY: only `stockade_image_note_pages_at_end` changes it, which is not running.
    let fd = unsafe { *REHEARSED.0.get() };
    if fd > 0 {
        // SAFETY: the caller of that function vouches for the descriptor and the one thread.
        let _only_slower = unsafe { hot::note_written_pages(BorrowedFd::borrow_raw(fd)) };
    }
    stockade_sys::process::exit_now(status)
}

/// Writes the image of a process that is to go on at `pc` with `sp`.
unsafe extern "C" fn write(fd: c_int, pc: u64, sp: u64) -> c_int {
    // The only calls of libc: afterwards its state must not change.
    let libc = state::LibcFacts::find();
    // SAFETY: one thread; nothing else refers to it.
    unsafe { (*HEAP_END.0.get(), *SET_MALLOC.0.get()) = (libc.heap_end, libc.set_malloc) };
    let continuation = Continuation { pc, sp, inbox: INBOX.0.get() as u64 };
    // SAFETY: the caller vouches for the descriptor and that there is one thread; `pc` and `sp`
    // are those of label 2 above.
    let written = unsafe { writer::write(BorrowedFd::borrow_raw(fd), &continuation, &libc) };
    match written {
        Ok(()) => 0,
        Err(refusal) => {
            // SAFETY: one thread; the caller reads it only when this has returned.
            unsafe { (*REASON.0.get()).set(&refusal) };
            -1
        }
    }
}

/// The first steps of a copy.
unsafe extern "C" fn resume() -> c_int {
    let restorer = AddressRange { address: place::RESTORER, length: place::ARGUMENTS - place::RESTORER };
    // SAFETY: the restorer has jumped here and is not used again. A failure leaves it mapped,
    // which the next image of this process would refuse.
    let _harmless = unsafe { unmap(restorer) };
    // SAFETY: `write` has found both in this libc before the image was written.
    let (heap, set_malloc) = unsafe { ((*HEAP_END.0.get()).as_mut(), *SET_MALLOC.0.get()) };
    let Some(heap) = heap else { return 1 };
    // Without PR_SET_MM_MAP the kernel's heap is the restorer's. Where it lies above glibc's,
    // malloc would take it for its own, grown by other code; asked to begin anew, it does. Where it
    // lies below, growing fails and malloc maps memory instead: asking anew would abort there. It must
    // not give back the end of its heap either, since it takes the kernel's for what is left.
    match heap_end().cmp(heap) {
        Ordering::Greater => *heap = 0,
        Ordering::Equal => {}
        Ordering::Less => {
            // SAFETY: the image was written between two calls of libc.
            let _set = set_malloc.map(|set_malloc| unsafe { set_malloc(M_TRIM_THRESHOLD, -1) });
        }
    }
    1
}
