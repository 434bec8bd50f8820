//! Which standard streams this program was started with.
//!
//! Rust's start-up opens `/dev/null` in place of a closed stream, which can then not be told
//! from a stream that the caller has redirected there. So the check runs earlier, from
//! `.init_array`. It does not change the streams.

use core::sync::atomic::{AtomicBool, Ordering};

use crate::{Errno, call::syscall};

static STDOUT_WAS_CLOSED: AtomicBool = AtomicBool::new(false);

#[used]
#[unsafe(link_section = ".init_array")]
static LOOK: extern "C" fn() = look;

extern "C" fn look() {
    const FCNTL: usize = 72;
    const F_GETFD: usize = 1;
    // SAFETY: F_GETFD passes no pointer, and the number need not be open.
    let flags = unsafe { syscall(FCNTL, [1, F_GETFD, 0, 0, 0, 0]) };
    STDOUT_WAS_CLOSED.store(flags == Err(Errno::BADF), Ordering::Relaxed);
}

/// Whether nothing was open as stdout when the program began.
pub fn stdout_was_closed() -> bool {
    STDOUT_WAS_CLOSED.load(Ordering::Relaxed)
}
