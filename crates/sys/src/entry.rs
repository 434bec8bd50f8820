//! Beginning where libc calls, without the start of Rust's runtime.
//!
//! That reads /proc/self/maps for the end of the stack and maps a second one, to handle
//! SIGSEGV there: an overflow of the stack then ends with a sentence. It costs a fiftieth of
//! the time in which a sandbox stands. Here such an overflow ends the program by SIGSEGV; what
//! else the runtime would do is done here too: SIGPIPE is ignored, and nothing that is opened
//! becomes a stream.

use rustix::{
    fd::IntoRawFd,
    fs::{Mode, OFlags, open},
};

use crate::{call::syscall, process::is_open};

/// Makes this function, of type `fn() -> u8`, what libc calls as `main` and its value the
/// exit status. For a program that is `#![no_main]`.
#[macro_export]
macro_rules! called_by_libc {
    ($function:path) => {
        #[expect(unsafe_code, reason = "the name by which libc calls it")]
        #[unsafe(no_mangle)]
        extern "C" fn main(_count: i32, _arguments: *const *const u8) -> i32 {
            $crate::entry::hold_streams();
            let status = $function();
            // What cannot be written now could not be before.
            let _flushed = std::io::Write::flush(&mut std::io::stdout());
            $crate::entry::end(status)
        }
    };
}

/// Ends the process, with nothing that libc keeps for its own exit: no stream of C is used, and
/// nobody has asked to be called.
pub fn end(status: u8) -> ! {
    const EXIT_GROUP: usize = 231;
    loop {
        // SAFETY: it takes a number, and ends everything.
        let _never = unsafe { syscall(EXIT_GROUP, [usize::from(status), 0, 0, 0, 0, 0]) };
    }
}

/// Opens /dev/null for each of the three streams that is closed. Where that cannot be done
/// the stream stays closed, and whoever uses it gets an error.
pub fn hold_streams() {
    for _closed in (0..3).filter(|stream| !is_open(*stream)) {
        // The lowest number that is free, so this one.
        let _held = open(c"/dev/null", OFlags::RDWR, Mode::empty()).map(IntoRawFd::into_raw_fd);
    }
}
