//! What a copy does last at its end, in C, where no audit hook, tracer or tool of the program sees it:
//! it takes the tracers away and calls the template's function for the end, or, where a hook or a tool would
//! see that function, does not; then the garbage collector gets the objects of the image back, unless the
//! program has kept all objects from it.
//!
//! Hooks and tools cannot be taken away, and whether there are any cannot be asked without their seeing it
//! (PEP 578, PEP 669). So the functions that add them note that they are called, and so does `gc.freeze`. The
//! audit hook of C that PEP 578 has for it would be called for each event: `id` takes 48 ns with one
//! instead of 27 ns, and `copy.deepcopy` a quarter longer. What code adds through the C interface is not noted.

use core::{cell::UnsafeCell, ffi::c_void, ptr::null_mut};

use crate::ThreadCell;

/// An object of CPython's.
type Object = *mut c_void;
/// A function of a module with any of the calling conventions `METH_NOARGS`, `METH_FASTCALL` and `METH_FASTCALL |
/// METH_KEYWORDS`: those with fewer arguments do not look at the last.
type Method = unsafe extern "C" fn(module: Object, arguments: *const Object, count: isize, names: Object) -> Object;
/// `PyEval_SetTrace` and `PyEval_SetProfile`. A null function removes the current one.
type SetTracer = unsafe extern "C" fn(function: *mut c_void, argument: Object);

/// Functions that note that they are called, by their places in [`AtEnd`].
const ADD_HOOK: usize = 0;
const USE_TOOL: usize = 1;
const FREEZE: usize = 2;

/// What the template passes, as C has it. It lives as long as the process.
#[repr(C)]
pub struct AtEnd {
    /// Not 0: the program has called it.
    is_called: [usize; 3],
    /// The functions of CPython. In the place of each, in its module, is one of this file.
    originals: [Option<Method>; 3],
    /// `PyEval_GetFrame`: the innermost frame of Python.
    frame: unsafe extern "C" fn() -> Object,
    set_trace: SetTracer,
    set_profile: SetTracer,
    /// `PyObject_CallNoArgs`.
    call: unsafe extern "C" fn(Object) -> Object,
    /// `PyErr_Clear`.
    clear_error: unsafe extern "C" fn(),
    /// The template's function; null: there is nothing to do.
    end: Object,
    /// `gc.unfreeze`.
    unfreeze: Object,
}

static AT_END: ThreadCell<*mut AtEnd> = ThreadCell(UnsafeCell::new(null_mut()));

/// See the interface in `lib.rs`. Before the others.
///
/// # Safety
/// The process has one thread, and the `AtEnd` stays where it is until the process ends.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stockade_image_set_end(at_end: *mut AtEnd) {
    // SAFETY: one thread; nothing else refers to it.
    unsafe { *AT_END.0.get() = at_end };
}

/// In the place of `sys.addaudithook`.
///
/// # Safety
/// CPython calls it, after [`stockade_image_set_end`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stockade_image_add_hook(module: Object, arguments: *const Object, count: isize, names: Object) -> Object {
    // SAFETY: the caller vouches for it.
    unsafe { note_and_call(ADD_HOOK, module, arguments, count, names) }
}

/// In the place of `sys.monitoring.use_tool_id`.
///
/// # Safety
/// As for [`stockade_image_add_hook`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stockade_image_use_tool(module: Object, arguments: *const Object, count: isize, names: Object) -> Object {
    // SAFETY: the caller vouches for it.
    unsafe { note_and_call(USE_TOOL, module, arguments, count, names) }
}

/// In the place of `gc.freeze`.
///
/// # Safety
/// As for [`stockade_image_add_hook`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stockade_image_freeze(module: Object, arguments: *const Object, count: isize, names: Object) -> Object {
    // SAFETY: the caller vouches for it.
    unsafe { note_and_call(FREEZE, module, arguments, count, names) }
}

/// # Safety
/// These are the arguments that CPython has for the function of this index.
unsafe fn note_and_call(index: usize, module: Object, arguments: *const Object, count: isize, names: Object) -> Object {
    // SAFETY: it was set before; nothing else refers to it while the interpreter's lock is held.
    let original = unsafe {
        let at_end = &mut **AT_END.0.get();
        at_end.is_called[index] = 1;
        at_end.originals[index]
    };
    // SAFETY: the caller vouches for the arguments.
    original.map_or(null_mut(), |original| unsafe { original(module, arguments, count, names) })
}

/// See the interface in `lib.rs`.
///
/// # Safety
/// `atexit` calls it, with the interpreter's lock.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stockade_image_at_end() {
    // SAFETY: it was set before, and its functions and objects are CPython's. What is called may change the
    // notes, so nothing refers to them meanwhile.
    unsafe {
        let at_end = *AT_END.0.get();
        let is_called = (*at_end).is_called;
        // The program may call the functions for its end itself, before it.
        let is_end = ((*at_end).frame)().is_null();
        if is_end && is_called[ADD_HOOK] == 0 && is_called[USE_TOOL] == 0 && !(*at_end).end.is_null() {
            ((*at_end).set_trace)(null_mut(), null_mut());
            ((*at_end).set_profile)(null_mut(), null_mut());
            call((*at_end).end, at_end);
        }
        if is_called[FREEZE] == 0 {
            call((*at_end).unfreeze, at_end);
        }
    }
}

/// Calls a function without arguments. What it returns stays; its error, as of a limit of the
/// program's, is forgotten.
///
/// # Safety
/// As for [`stockade_image_at_end`].
unsafe fn call(function: Object, at_end: *const AtEnd) {
    // SAFETY: the caller vouches for it.
    unsafe {
        if ((*at_end).call)(function).is_null() {
            ((*at_end).clear_error)();
        }
    }
}
