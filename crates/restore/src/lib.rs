//! Makes a running copy of a process from its image, in this process: with its pid, user,
//! descriptors, working directory, limits and namespaces, and behind its filters.
//!
//! It is started with the image at descriptor [`stockade_protocol::memory_image::DESCRIPTOR`] and with the arguments and the
//! environment of the copy. The image is mapped copy-on-write, so that many copies share it.
//! The header is checked as hostile bytes, though a bad one could only harm this process,
//! which is a payload like every other. Once the image is closed, descriptors are the
//! caller's matter: none is opened, none but the image's is closed.
//!
//! Where no copy is made, the position of the image's open file tells the caller why. The copy
//! itself can never tell such a thing: the image is closed before it goes on.
//!
//! It grants nothing and takes no privileged step. It reseeds no generator and knows no
//! language: what must differ between copies is the copy's own work.
#![no_std]

mod arguments;
mod copy;

use core::fmt::{self, Write};

use rustix::{
    fd::BorrowedFd,
    fs::{SeekFrom, seek},
};
use stockade_protocol::memory_image::{DESCRIPTOR, MemoryImageError};
use stockade_sys::{Errno, process::exit_now};

use arguments::InitialArguments;

/// The exit status where no copy was made.
pub const FAILED: i32 = 125;

/// Why no copy was made.
pub(crate) enum Failure {
    Call { what: &'static str, errno: Errno },
    Image(MemoryImageError),
}

impl Failure {
    /// What the caller is told.
    fn errno(&self) -> Errno {
        match self {
            Failure::Call { errno, .. } => *errno,
            Failure::Image(_) => Errno::BADMSG,
        }
    }
}

impl From<MemoryImageError> for Failure {
    fn from(error: MemoryImageError) -> Self {
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

/// Becomes a copy of the process whose image is at [`DESCRIPTOR`]. Else it ends with [`FAILED`], and
/// leaves the errno as the position of the image's open file; where it cannot, a line on stderr.
///
/// # Safety
/// `initial_stack` is what the kernel left in the stack pointer. The program has one thread,
/// is linked at `place::RESTORER` and uses no other memory of its own, its stack included.
pub unsafe extern "C" fn run(initial_stack: *const u64) -> ! {
    // SAFETY: the caller vouches for the pointer.
    let arguments = unsafe { InitialArguments::find(initial_stack) };
    // SAFETY: the program was started with it, and `become_copy` closes it when nothing can fail any
    // more; where it is not open, calls fail.
    let image = unsafe { BorrowedFd::borrow_raw(DESCRIPTOR) };
    // SAFETY: the caller vouches for where this program is.
    let failure = match unsafe { copy::become_copy(&arguments, image) } {
        Ok(never) => match never {},
        Err(failure) => failure,
    };
    if seek(image, SeekFrom::Start(u64::from(failure.errno().raw_os_error().unsigned_abs()))).is_ok() {
        exit_now(FAILED)
    }
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
