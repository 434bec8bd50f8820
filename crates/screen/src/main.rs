//! The program `stockade-screen`: one question on stdin, one answer on stdout, both as frames.
//!
//! `stockade` starts it, and it locks itself down before it reads. Callers must not trust its
//! answer: it has parsed hostile code and may be compromised, crash or hang.
#![forbid(unsafe_code)]

use std::{
    io::{self, Read, Write},
    process::ExitCode,
};

use stockade_protocol::screen::{Grammar, MAX_CODE_LEN, Question, Source};
use stockade_screen::confine;

/// Bytes of a question besides the code: lists and the path of scratch.
const MAX_LISTS_LEN: usize = 1 << 20;

/// Exit status: the lockdown failed.
const NOT_CONFINED: u8 = 3;
/// Exit status: a malformed question, or the answer could not be written.
const NOT_ASKED: u8 = 4;

fn main() -> ExitCode {
    let lockdown = confine::lockdown();
    let confined = lockdown.begin().and_then(|()| {
        // The parsers read the size of their stack once, from a file in /proc.
        let sources = [(Grammar::Python, "f(1)"), (Grammar::Shell, "true")].map(|(grammar, code)| Source { grammar, code });
        stockade_screen::screen(&Question { sources: sources.into(), ..Question::default() });
        lockdown.finish()
    });
    match confined {
        Ok(()) => match answer() {
            Ok(()) => ExitCode::SUCCESS,
            Err(_) => ExitCode::from(NOT_ASKED),
        },
        Err(_) => ExitCode::from(NOT_CONFINED),
    }
}

fn answer() -> io::Result<()> {
    let mut bytes = Vec::new();
    io::stdin().lock().take((MAX_CODE_LEN + MAX_LISTS_LEN) as u64).read_to_end(&mut bytes)?;
    let question = Question::decode(&bytes).map_err(io::Error::other)?;
    io::stdout().lock().write_all(&stockade_screen::screen(&question).encode())
}
