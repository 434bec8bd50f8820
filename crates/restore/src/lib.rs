//! Makes a running copy of a process from its image, in this process: with its pid, user,
//! descriptors, working directory, limits and namespaces, and behind its filters.
//!
//! It is started with the image at descriptor [`stockade_protocol::image::DESCRIPTOR`] and with the arguments and the
//! environment of the copy. The image is mapped copy-on-write, so that many copies share it.
//! The header is checked as hostile bytes, though a bad one could only harm this process,
//! which is a payload like every other. Once the image is closed, descriptors are the
//! caller's matter: none is opened, none but the image's is closed.
//!
//! It grants nothing and takes no privileged step. It reseeds no generator and knows no
//! language: what must differ between copies is the copy's own work.
#![no_std]

mod arguments;
mod copy;

use core::fmt::{self, Write};

use rustix::fd::BorrowedFd;
use stockade_protocol::image::ImageError;
use stockade_sys::{Errno, process::exit_now};

use arguments::InitialArguments;

/// The exit status where no copy was made.
pub const FAILED: i32 = 125;

/// Why no copy was made.
pub(crate) enum Failure {
    Call { what: &'static str, errno: Errno },
    Image(ImageError),
}

impl From<ImageError> for Failure {
    fn from(error: ImageError) -> Self {
        Failure::Image(error)
    }
}

/// Names what a system call was for.
pub(crate) fn to(what: &'static str) -> impl Fn(Errno) -> Failure {
    move |errno| Failure::Call { what, errno }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Call { what, errno } => write!(f, "{what}: errno {}", errno.raw_os_error()),
            Failure::Image(error) => error.fmt(f),
        }
    }
}

/// Becomes a copy of the process whose image is at [`stockade_protocol::image::DESCRIPTOR`], or ends with [`FAILED`] and
/// one line on stderr.
///
/// # Safety
/// `initial_stack` is what the kernel left in the stack pointer. The program has one thread,
/// is linked at `place::RESTORER` and uses no other memory of its own, its stack included.
pub unsafe extern "C" fn run(initial_stack: *const u64) -> ! {
    // SAFETY: the caller vouches for the pointer.
    let arguments = unsafe { InitialArguments::find(initial_stack) };
    // SAFETY: the caller vouches for where this program is.
    let failure = match unsafe { copy::become_copy(&arguments) } {
        Ok(never) => match never {},
        Err(failure) => failure,
    };
    let mut line = Line { bytes: [0; 200], length: 0 };
    // A message that does not fit is cut off.
    let _whole = writeln!(line, "stockade-restore: {failure}");
    // SAFETY: nothing here closes it; where the caller gave none, the write fails.
    let stderr = unsafe { BorrowedFd::borrow_raw(2) };
    let _nowhere_else = rustix::io::write(stderr, line.bytes.get(..line.length).unwrap_or_default());
    exit_now(FAILED)
}

/// A line of text, without memory from an allocator.
struct Line {
    bytes: [u8; 200],
    length: usize,
}

impl Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let free = self.bytes.get_mut(self.length..).unwrap_or_default();
        let fitting = text.len().min(free.len());
        free.iter_mut().zip(text.bytes()).for_each(|(place, byte)| *place = byte);
        self.length += fitting;
        if fitting == text.len() { Ok(()) } else { Err(fmt::Error) }
    }
}
