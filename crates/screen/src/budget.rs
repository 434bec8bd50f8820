//! A bound on the work that a program can cause.
//!
//! A value that is used again is evaluated again, and code in a string is read each time it is run,
//! so a few lines could cost years. The budget grows with the length of the program. When it is
//! spent, evaluation stops, and one finding reports it. It does not bound the parsers; the limits
//! of the process do.

use std::cell::Cell;

use stockade_protocol::screen::{Grammar, Source};

/// The longest string that is built.
pub(crate) const MAX_TEXT_LEN: usize = 64 << 10;
/// The budget of an empty program: at most a few hundred milliseconds.
const MIN_BUDGET: u64 = 1 << 21;
/// What each byte of a program adds. Python's standard library needs at most 1.
const PER_BYTE: u64 = 4;
/// Bytes of a built string that cost 1.
const MADE: usize = 64;
/// Bytes of a searched string that cost 1.
const SEARCHED: usize = 8;
/// The cost of starting a parser.
const PARSER: usize = 128;
/// The cost of a byte of shell code, where a byte of Python costs 1.
const SHELL: usize = 8;

/// What is left, in evaluated expressions.
pub(crate) struct Budget {
    left: Cell<u64>,
    told: Cell<bool>,
}

impl Budget {
    pub(crate) fn of(code: &str) -> Self {
        Budget { left: Cell::new(MIN_BUDGET.saturating_add(PER_BYTE.saturating_mul(as_u64(code.len())))), told: Cell::new(false) }
    }

    /// Spends this many expressions. False where less was left.
    pub(crate) fn spend(&self, expressions: usize) -> bool {
        let left = self.left.get().checked_sub(as_u64(expressions));
        self.left.set(left.unwrap_or(0));
        left.is_some()
    }

    /// Spends the cost of building a string.
    pub(crate) fn spend_built(&self, text: &str) {
        self.spend(text.len() / MADE);
    }

    /// Spends the cost of searching a string.
    pub(crate) fn spend_searched(&self, text: &str) {
        self.spend(text.len() / SEARCHED);
    }

    /// Whether nothing is left. True once.
    pub(crate) fn has_ended(&self) -> bool {
        self.left.get() == 0 && !self.told.replace(true)
    }
}

/// The cost of reading code in a string.
pub(crate) fn of_code(source: Source<'_>) -> usize {
    match source.grammar {
        Grammar::Python => PARSER.saturating_add(source.code.len()),
        Grammar::Shell => of_shell(source.code.len()),
    }
}

/// The cost of this many bytes of shell code in a string.
pub(crate) fn of_shell(length: usize) -> usize {
    PARSER.saturating_add(length.saturating_mul(SHELL))
}

fn as_u64(number: usize) -> u64 {
    u64::try_from(number).unwrap_or(u64::MAX)
}
