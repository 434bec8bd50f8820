//! The program `stockade-screen`: one question on stdin, one answer on stdout, both as
//! frames.
//!
//! It is started by `stockade` and confines itself before it reads. Whoever asks must take
//! its death, its silence and its answer for what they are: words of a process that has
//! read hostile text.
#![forbid(unsafe_code)]

use std::{
    io::{self, Read, Write},
    process::ExitCode,
};

use stockade_protocol::screen::{Grammar, LONGEST_CODE, Question, Source};
use stockade_screen::confine;

/// Beside the code: the lists and the path of scratch.
const LONGEST_REST: usize = 1 << 20;

/// It could not confine itself.
const NOT_CONFINED: u8 = 3;
/// It was asked nothing that it understands, or could not answer.
const NOT_ASKED: u8 = 4;

fn main() -> ExitCode {
    let confined = confine::begin().and_then(|()| {
        // The parsers look once how large their stack is, for which a file is opened.
        let sources = [(Grammar::Python, "f(1)"), (Grammar::Shell, "true")].map(|(grammar, code)| Source { grammar, code });
        stockade_screen::screen(&Question { sources: sources.into(), ..Question::default() });
        confine::finish()
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
    io::stdin().lock().take((LONGEST_CODE + LONGEST_REST) as u64).read_to_end(&mut bytes)?;
    let question = Question::decode(&bytes).map_err(io::Error::other)?;
    io::stdout().lock().write_all(&stockade_screen::screen(&question).encode())
}
