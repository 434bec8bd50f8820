//! How much work a program may make of itself.
//!
//! A value that is used again is looked at again, and code in a text is read as often as the
//! text is run: a few lines could ask for years. What can be asked for grows with the
//! length of the program, as honest work does; beyond that nothing is put together, which
//! is told once. It bounds no parser of the program itself: the limits of the process do.

use std::cell::Cell;

/// What a short program may ask for: some hundred milliseconds at worst.
const LEAST: u64 = 1 << 21;
/// What each byte of it adds. Python's own library asks for one at most.
const FOR_A_BYTE: u64 = 4;
/// Bytes of a text that are put together for one.
const MADE: usize = 64;
/// Bytes of a text that are searched for one.
const SEARCHED: usize = 8;
/// What a parser asks for before it reads.
const PARSER: usize = 128;
/// What a byte of a shell's code asks for, where one of Python's asks for one.
const SHELL: usize = 8;

/// What is left of it, in expressions.
pub(crate) struct Work {
    left: Cell<u64>,
    told: Cell<bool>,
}

impl Work {
    pub(crate) fn of(code: &str) -> Self {
        Work { left: Cell::new(LEAST.saturating_add(FOR_A_BYTE.saturating_mul(as_u64(code.len())))), told: Cell::new(false) }
    }

    /// One expression, or so many. Whether so much was left.
    pub(crate) fn take(&self, expressions: usize) -> bool {
        let left = self.left.get().checked_sub(as_u64(expressions));
        self.left.set(left.unwrap_or(0));
        left.is_some()
    }

    /// A text is put together.
    pub(crate) fn take_made(&self, text: &str) {
        self.take(text.len() / MADE);
    }

    /// A text is searched for what may stand in it.
    pub(crate) fn take_searched(&self, text: &str) {
        self.take(text.len() / SEARCHED);
    }

    /// Whether nothing is left, which is said once.
    pub(crate) fn has_ended(&self) -> bool {
        self.left.get() == 0 && !self.told.replace(true)
    }
}

/// What it takes to read so many bytes of Python in a text.
pub(crate) fn of_python(length: usize) -> usize {
    PARSER.saturating_add(length)
}

/// What it takes to read so many bytes of a shell's code in a text.
pub(crate) fn of_shell(length: usize) -> usize {
    PARSER.saturating_add(length.saturating_mul(SHELL))
}

fn as_u64(number: usize) -> u64 {
    u64::try_from(number).unwrap_or(u64::MAX)
}
