//! What a copy calls last at its end: the template's function for it, or, where the program has added an
//! audit hook, the one that does nothing such a hook sees.
//!
//! `sys.addaudithook` notes that first, since an audit hook can be neither seen nor removed (PEP 578). The
//! hook of C that PEP 578 has for it would be called for each event: `id` takes 48 ns with one instead of
//! 27 ns, and `copy.deepcopy` a quarter longer. A hook that code adds through the C interface is not noted.

use core::{cell::UnsafeCell, ffi::c_void, ptr::null_mut};

use crate::ThreadCell;

/// An object of CPython's.
type Object = *mut c_void;
/// `PyEval_SetTrace` and `PyEval_SetProfile`; no function takes the current one away.
type SetTracer = unsafe extern "C" fn(function: *mut c_void, argument: Object);

/// What the template passes, as C has it. It lives as long as the process.
#[repr(C)]
pub struct AtEnd {
    /// Not 0: the program has added an audit hook, or has tried to.
    has_hook: usize,
    /// The function behind `sys.addaudithook`, in whose place is [`stockade_image_add_hook`].
    add_hook: Option<unsafe extern "C" fn(Object, *const Object, isize, Object) -> Object>,
    set_trace: SetTracer,
    set_profile: SetTracer,
    /// `PyObject_CallNoArgs`.
    call: unsafe extern "C" fn(Object) -> Object,
    /// Called where there is no audit hook, when no tracer is left that would see it.
    end: Object,
    /// Called where there is one.
    end_with_hook: Object,
}

static AT_END: ThreadCell<*mut AtEnd> = ThreadCell(UnsafeCell::new(null_mut()));

/// See the interface in `lib.rs`. Before the two that follow.
///
/// # Safety
/// The process has one thread, and the `AtEnd` stays where it is until the process ends.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stockade_image_set_end(at_end: *mut AtEnd) {
    // SAFETY: one thread; nothing else refers to it.
    unsafe { *AT_END.0.get() = at_end };
}

/// In the place of the function behind `sys.addaudithook`, with the same arguments (`METH_FASTCALL |
/// METH_KEYWORDS`).
///
/// # Safety
/// CPython calls it, after `stockade_image_set_end`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stockade_image_add_hook(module: Object, arguments: *const Object, count: isize, names: Object) -> Object {
    // SAFETY: it was set before; nothing else refers to it while the interpreter's lock is held.
    let add_hook = unsafe {
        (**AT_END.0.get()).has_hook = 1;
        (**AT_END.0.get()).add_hook
    };
    // SAFETY: these are the arguments that CPython has for it.
    add_hook.map_or(null_mut(), |add_hook| unsafe { add_hook(module, arguments, count, names) })
}

/// See the interface in `lib.rs`. Returns what the function has returned, or null with its exception.
///
/// # Safety
/// The caller holds the interpreter's lock, and the functions and objects are CPython's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stockade_image_at_end() -> Object {
    // SAFETY: it was set before. The values are copied, since what is called may change the word.
    let AtEnd { has_hook, set_trace, set_profile, call, end, end_with_hook, .. } = unsafe { (*AT_END.0.get()).read() };
    if has_hook != 0 {
        // SAFETY: as above.
        return unsafe { call(end_with_hook) };
    }
    // SAFETY: as above; without a function the object is not looked at.
    unsafe {
        set_trace(null_mut(), null_mut());
        set_profile(null_mut(), null_mut());
        call(end)
    }
}
