//! Why no image was written, and its wording.

use core::fmt::{self, Write};

use stockade_protocol::memory_image::{Mapping, MemoryImageError};
use stockade_sys::Errno;

/// Why no image was written.
pub(crate) enum Refusal {
    /// A mapping that an image cannot hold, and why.
    Mapping { mapping: NamedMapping, why: &'static str },
    /// More mappings than an image has room for.
    TooMany,
    /// More threads than one.
    Threads { count: u64 },
    /// State of the thread that a copy could not have.
    State { what: &'static str },
    /// A system call failed.
    Call { what: &'static str, errno: Errno },
    /// The image would be refused when it is checked.
    Image(MemoryImageError),
}

/// A mapping to be named, copied out of the work area.
pub(crate) struct NamedMapping {
    start: u64,
    end: u64,
    /// The beginning of its name, padded with 0.
    name: [u8; 80],
}

impl NamedMapping {
    pub(crate) fn new(mapping: &Mapping<'_>) -> NamedMapping {
        let mut name = [0; 80];
        name.iter_mut().zip(mapping.name).for_each(|(place, byte)| *place = *byte);
        NamedMapping { start: mapping.start, end: mapping.end, name }
    }
}

/// Names what a system call was for.
pub(crate) fn to(what: &'static str) -> impl Fn(Errno) -> Refusal {
    move |errno| Refusal::Call { what, errno }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::Mapping { mapping: NamedMapping { start, end, name }, why } => {
                write!(f, "{why}: {start:x}-{end:x} ")?;
                // A path may have any byte.
                name.utf8_chunks().try_for_each(|chunk| f.write_str(chunk.valid().trim_end_matches('\0')))
            }
            Refusal::TooMany => f.write_str("too many mappings"),
            Refusal::Threads { count } => write!(f, "{count} threads"),
            Refusal::State { what } => f.write_str(what),
            Refusal::Call { what, errno } => write!(f, "{what}: errno {}", errno.raw_os_error()),
            Refusal::Image(error) => error.fmt(f),
        }
    }
}

/// A refusal as a C string, in memory of its own.
pub(crate) struct ReasonText {
    /// The last byte stays 0.
    text: [u8; 256],
    length: usize,
}

impl ReasonText {
    pub(crate) const fn empty() -> ReasonText {
        ReasonText { text: [0; 256], length: 0 }
    }

    pub(crate) fn set(&mut self, refusal: &Refusal) {
        *self = ReasonText::empty();
        // A reason that does not fit is cut off.
        let _whole = write!(self, "{refusal}");
    }

    pub(crate) fn as_c_string(&self) -> *const u8 {
        self.text.as_ptr()
    }
}

impl Write for ReasonText {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let end = self.text.len() - 1;
        let free = self.text.get_mut(self.length..end).unwrap_or_default();
        let fitting = text.len().min(free.len());
        free.iter_mut().zip(text.bytes()).for_each(|(place, byte)| *place = byte);
        self.length += fitting;
        if fitting == text.len() { Ok(()) } else { Err(fmt::Error) }
    }
}
