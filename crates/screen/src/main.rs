//! The program `stockade-screen`: one question on stdin, one answer on stdout, both as frames.
//!
//! `stockade` starts it, and it locks itself down before it reads. Callers must not trust its
//! answer: it has parsed hostile code and may be compromised, crash or hang. With the argument
//! `stay` its stdin is a socket, and it serves many questions (`stay.rs`).
#![forbid(unsafe_code)]

mod stay;

use std::{
    io::{self, Read, Write},
    process::ExitCode,
};

use stockade_protocol::screen::{Grammar, MAX_CODE_LEN, Question, STAY, Source};
use stockade_screen::confine;
use stockade_sys::lockdown::{Lockdown, LockdownError};

/// Bytes of a question besides the code: lists and the path of scratch.
const MAX_LISTS_LEN: usize = 1 << 20;

/// Exit status: the lockdown failed.
const NOT_CONFINED: u8 = 3;
/// Exit status: a malformed question, or the answer could not be written.
const NOT_ASKED: u8 = 4;

fn main() -> ExitCode {
    ExitCode::from(if std::env::args_os().nth(1).is_some_and(|word| word == STAY) { serve_many() } else { serve_one() })
}

fn serve_one() -> u8 {
    if confine_with(&confine::lockdown()).is_err() { NOT_CONFINED } else { answer() }
}

fn serve_many() -> u8 {
    if confine_with(&confine::lockdown_of_staying()).is_err() {
        return NOT_CONFINED;
    }
    match stay::serve(io::stdin(), || if confine::narrow().is_err() { NOT_CONFINED } else { answer() }) {
        Ok(()) => 0,
        Err(_) => NOT_ASKED,
    }
}

fn confine_with(lockdown: &Lockdown<'_>) -> Result<(), LockdownError> {
    lockdown.begin()?;
    // The parsers read the size of their stack once, from a file in /proc.
    let sources = [(Grammar::Python, "f(1)"), (Grammar::Shell, "true")].map(|(grammar, code)| Source { grammar, code });
    stockade_screen::screen(&Question { sources: sources.into(), ..Question::default() });
    lockdown.finish()
}

/// Reads the question and answers it. Returns the exit status.
fn answer() -> u8 {
    let answer = || -> io::Result<()> {
        let mut bytes = Vec::new();
        io::stdin().lock().take((MAX_CODE_LEN + MAX_LISTS_LEN) as u64).read_to_end(&mut bytes)?;
        let question = Question::decode(&bytes).map_err(io::Error::other)?;
        let mut stdout = io::stdout().lock();
        stdout.write_all(&stockade_screen::screen(&question).encode())?;
        // A copy ends without the end of `main`.
        stdout.flush()
    };
    if answer().is_ok() { 0 } else { NOT_ASKED }
}
