//! What the kernel and glibc keep for the one thread: the header of the image.
//!
//! It reads only. Which values are possible is `stockade_protocol::memory_image`'s judgement.

use core::ffi::{CStr, c_int, c_void};

use rustix::fs::stat;
use stockade_protocol::memory_image::{Bounds, Header, SIGNALS, SignalAction};
use stockade_sys::thread_state::{
    blocked_signals, heap_end, name, robust_list, segment_bases, set_umask, signal_action, signal_stack, thread_id, tid_address,
};

use crate::refusal::{Refusal, to};

/// What only libc knows of itself.
pub(crate) struct LibcFacts {
    /// Distance of the rseq(2) area from the FS base; `None` where none is registered.
    rseq: Option<i64>,
    /// Where glibc keeps the end of the heap; null in another libc.
    pub(crate) heap_end: *mut u64,
    /// mallopt(3); `None` in another libc.
    pub(crate) set_malloc: Option<SetMalloc>,
}

/// A parameter of malloc, and its value.
pub(crate) type SetMalloc = unsafe extern "C" fn(c_int, c_int) -> c_int;

unsafe extern "C" {
    fn dlsym(handle: *mut c_void, name: *const i8) -> *mut c_void;
}

fn symbol<T>(name: &CStr) -> *mut T {
    const RTLD_DEFAULT: *mut c_void = core::ptr::null_mut();
    // SAFETY: the name ends in NUL; RTLD_DEFAULT is always valid.
    unsafe { dlsym(RTLD_DEFAULT, name.as_ptr().cast()) }.cast()
}

impl LibcFacts {
    pub(crate) fn find() -> LibcFacts {
        // SAFETY: glibc 2.35 and later documents both as constants of these types (ld.so(8)).
        let (size, offset) = unsafe { (symbol::<u32>(c"__rseq_size").as_ref(), symbol::<isize>(c"__rseq_offset").as_ref()) };
        let rseq = offset.filter(|_| size.is_some_and(|size| *size > 0)).map(|offset| *offset as i64);
        let mallopt: *mut c_void = symbol(c"mallopt");
        // SAFETY: a null pointer is `None`, and glibc's function has this type.
        let set_malloc = unsafe { core::mem::transmute::<*mut c_void, Option<SetMalloc>>(mallopt) };
        LibcFacts { rseq, heap_end: symbol(c"__curbrk"), set_malloc }
    }
}

/// The header, as far as the kernel keeps it for the thread.
pub(crate) fn thread_header(libc: &LibcFacts) -> Result<Header, Refusal> {
    // "." and ".." and one directory for each thread.
    let threads = stat(c"/proc/self/task").map_err(to("look at /proc/self/task"))?.st_nlink.saturating_sub(2);
    if threads != 1 {
        return Err(Refusal::Threads { count: threads });
    }
    if libc.heap_end.is_null() {
        return Err(Refusal::State { what: "the libc is not glibc" });
    }
    let (fs, gs) = segment_bases().map_err(to("read the segment bases"))?;
    if gs != 0 {
        return Err(Refusal::State { what: "the GS base is in use" });
    }
    let robust_list = robust_list().map_err(to("read the robust list"))?;
    let mut actions = [SignalAction::default(); SIGNALS];
    for (signal, place) in (1..=SIGNALS).zip(&mut actions) {
        let [handler, flags, restorer, mask] = signal_action(signal).map_err(to("read a signal's action"))?;
        *place = SignalAction { handler, flags, restorer, mask };
    }
    Ok(Header {
        fs,
        tid: tid(robust_list)?,
        robust_list,
        rseq: libc.rseq.map_or(0, |distance| fs.wrapping_add_signed(distance)),
        name: name().map_err(to("read the name"))?,
        umask: umask(),
        signal_mask: blocked_signals().map_err(to("read the blocked signals"))?,
        signal_stack: signal_stack().map_err(to("read the signal stack"))?,
        actions,
        ..Header::default()
    })
}

/// There is no call that only reads it.
fn umask() -> u64 {
    let mask = set_umask(0o077);
    set_umask(mask);
    mask
}

/// Where glibc keeps the thread's id. The kernel says so only with CONFIG_CHECKPOINT_RESTORE.
/// Elsewhere it is known from `struct pthread`, where the robust list's head has come 16 bytes
/// behind it since glibc 2.4.
fn tid(robust_list: u64) -> Result<u64, Refusal> {
    let address = tid_address().unwrap_or(robust_list.wrapping_sub(16));
    if address < robust_list.wrapping_sub(0x1000) || address > robust_list {
        return Err(Refusal::State { what: "the thread's id is not in its thread block" });
    }
    // SAFETY: just below the robust list's head, in the same block of glibc's.
    let found = unsafe { (address as *const i32).read_volatile() };
    if found == thread_id() { Ok(address) } else { Err(Refusal::State { what: "the thread's id is not where glibc keeps it" }) }
}

/// The bounds of the program's memory, from the text of `/proc/self/stat`.
pub(crate) fn bounds(text: &[u8]) -> Option<Bounds> {
    // The name in parentheses may have any bytes; the third field comes behind its end.
    let behind = text.iter().rposition(|&byte| byte == b')')? + 2;
    let fields = || text.get(behind..).unwrap_or_default().split(|&byte| byte == b' ');
    let field = |number: usize| core::str::from_utf8(fields().nth(number - 3)?).ok()?.trim_ascii().parse().ok();
    Some(Bounds {
        start_code: field(26)?,
        end_code: field(27)?,
        start_data: field(45)?,
        end_data: field(46)?,
        start_brk: field(47)?,
        brk: heap_end(),
        start_stack: field(28)?,
    })
}

#[cfg(test)]
mod tests {
    extern crate std;
    use std::{format, string::String};

    use super::bounds;

    #[test]
    fn the_bounds_are_found_behind_any_name_and_only_where_all_are() {
        // Each field has its own number as value.
        let fields = |last: u64| (4..=last).fold(String::from("7 (a) R (b c) R"), |text, number| format!("{text} {number}"));
        let Some(found) = bounds(format!("{}\n", fields(52)).as_bytes()) else { panic!("not found") };
        assert_eq!([found.start_code, found.end_code, found.start_stack], [26, 27, 28]);
        assert_eq!([found.start_data, found.end_data, found.start_brk], [45, 46, 47]);
        for bad in [String::new(), String::from("7 (a) R"), String::from(")"), fields(46), fields(52).replace(" 45 ", " x ")] {
            assert_eq!(bounds(bad.as_bytes()), None, "{bad}");
        }
    }
}
