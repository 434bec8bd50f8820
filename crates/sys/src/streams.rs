//! Which standard streams this program was started with.
//!
//! Rust's start-up opens `/dev/null` in the place of a closed one, and from then on nothing
//! tells it from a stream that the caller means to throw away. So this looks before that,
//! while the C library works through `.init_array`; it leaves the streams as they are.

use core::sync::atomic::{AtomicBool, Ordering};

use crate::{Errno, call::syscall};

static STDOUT_WAS_CLOSED: AtomicBool = AtomicBool::new(false);

#[used]
#[unsafe(link_section = ".init_array")]
static LOOK: extern "C" fn() = look;

extern "C" fn look() {
    const FCNTL: usize = 72;
    const F_GETFD: usize = 1;
    // SAFETY: F_GETFD passes no pointer, and asks of a number that need not be open.
    let flags = unsafe { syscall(FCNTL, [1, F_GETFD, 0, 0, 0, 0]) };
    STDOUT_WAS_CLOSED.store(flags == Err(Errno::BADF), Ordering::Relaxed);
}

/// Whether nothing was open as stdout when the program began.
pub fn stdout_was_closed() -> bool {
    STDOUT_WAS_CLOSED.load(Ordering::Relaxed)
}
