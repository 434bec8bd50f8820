//! Printing: answers to stdout, everything else to stderr.
//!
//! An answer that could not be written is an error. Rust's own stdout ignores a stdout that is
//! closed or not open for writing. Text from a sandbox is printed only as JSON.

use std::{
    fs::File,
    io::{self, IsTerminal, Write},
    os::fd::AsFd,
    time::{Duration, Instant},
};

use anyhow::Context;
use rustix::io::Errno;
use serde::Serialize;
use stockade_audit::AuditError;
use stockade_engine::{
    answer::{AnswerError, AnswerStdout},
    caller::sudo_remedy,
    nonblocking::NonblockingStdio,
    signals::Signals,
};
use stockade_policy::{ReadError, grants::GrantsError, service::ServiceError};
use stockade_protocol::text::{escape_json, is_hidden, visible};

/// Prints an answer for a person, with a final line break; hidden characters are escaped.
///
/// # Errors
/// Stdout is closed or full.
pub(crate) fn print_text(text: &str) -> anyhow::Result<()> {
    let mut text = visible(text);
    if !text.ends_with('\n') {
        text.push('\n');
    }
    write_out(text.as_bytes())
}

/// What a state means to a reader, and its colour on a terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Colour {
    /// Not a state.
    Plain,
    /// All is as it should be: green.
    Good,
    /// Something is missing that may be: yellow.
    Warning,
    /// Something is wrong: red.
    Bad,
}

/// A text of which parts have a colour.
#[derive(Debug, Default)]
pub(crate) struct Painted(Vec<(Colour, String)>);

impl Painted {
    /// Adds a part.
    pub(crate) fn add(&mut self, colour: Colour, part: impl Into<String>) {
        self.0.push((colour, part.into()));
    }

    /// Prints it; hidden characters of its parts are escaped. It has colours where stdout is a
    /// terminal and the variable NO_COLOR is empty (<https://no-color.org>).
    ///
    /// # Errors
    /// Stdout is closed or full.
    pub(crate) fn print(&self) -> anyhow::Result<()> {
        let is_set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let in_colour = io::stdout().is_terminal() && !is_set("NO_COLOR");
        let paint = |(colour, part): &(Colour, String)| {
            let code = match colour {
                Colour::Plain => return visible(part),
                Colour::Good => 32,
                Colour::Warning => 33,
                Colour::Bad => 31,
            };
            if in_colour { format!("\x1b[{code}m{}\x1b[0m", visible(part)) } else { visible(part) }
        };
        write_out(self.0.iter().map(paint).collect::<String>().as_bytes())
    }
}

/// A line on a terminal about work that takes more than a second.
pub(crate) struct Progress {
    what: &'static str,
    next: Instant,
    is_shown: bool,
}

impl Progress {
    const INTERVAL: Duration = Duration::from_millis(200);

    pub(crate) fn new(what: &'static str) -> Self {
        Progress { what, next: Instant::now() + Duration::from_secs(1), is_shown: false }
    }

    /// So much of it is done.
    pub(crate) fn at(&mut self, done: usize, all: usize) {
        let now = Instant::now();
        if now >= self.next && io::stderr().is_terminal() {
            self.next = now + Self::INTERVAL;
            self.is_shown = true;
            let _not_shown = write!(io::stderr().lock(), "\r{done} of {all} {}", self.what);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.is_shown {
            // To the beginning of the line, and all after it is erased.
            let _not_shown = write!(io::stderr().lock(), "\r\x1b[K");
        }
    }
}

/// Prints an answer for a program, as indented JSON; hidden characters are escaped.
///
/// # Errors
/// Stdout is closed or full.
pub(crate) fn print_json(value: &impl Serialize) -> anyhow::Result<()> {
    let json = serde_json::to_string_pretty(value)?;
    write_out(format!("{}\n", escape_json(&json, is_hidden)).as_bytes())
}

/// Writes bytes to stdout, all of them.
///
/// # Errors
/// Stdout is closed or full.
pub(crate) fn write_out(bytes: &[u8]) -> anyhow::Result<()> {
    let write = || -> io::Result<()> {
        if stockade_sys::streams::stdout_was_closed() {
            return Err(Errno::BADF.into());
        }
        File::from(io::stdout().as_fd().try_clone_to_owned()?).write_all(bytes)
    };
    write().context(WRITE_ANSWER)
}

const WRITE_ANSWER: &str = "write the answer to stdout";

/// The same of a result, for as long as a process may wait for it. Signals that end this process are
/// held back for that time.
///
/// # Errors
/// Stdout is closed or full, or was not read.
pub(crate) fn write_answer(bytes: &[u8], stdout: &mut AnswerStdout) -> anyhow::Result<()> {
    if stockade_sys::streams::stdout_was_closed() {
        return Err(io::Error::from(Errno::BADF)).context(WRITE_ANSWER);
    }
    // Where signals cannot be held back, one ends this process and with it the writing.
    let Ok(mut signals) = Signals::block() else { return write_out(bytes) };
    match stdout.write_all(bytes, &mut signals) {
        Err(AnswerError::Write(error)) => Err(error).context(WRITE_ANSWER),
        written => written.context(WRITE_ANSWER),
    }
}

/// Prints an error to stderr.
pub(crate) fn warn_of_error(error: &anyhow::Error) {
    tell(error, &format!("stockade: {}", words_of(error)));
}

/// Prints what is to be said of an error to stderr. Where the answer has not been read, stderr may not
/// be read either, so that is tried once.
pub(crate) fn tell(error: &anyhow::Error, text: &str) {
    if !error.is::<AnswerError>() {
        return warn(text);
    }
    let _not_read = NonblockingStdio::stderr().write(format!("{}\n", visible(text)).as_bytes());
}

/// The words of an error. Where the kernel refused a caller of sudo, they also say who that is: a
/// root shell of sudo's looks like root.
pub(crate) fn words_of(error: &anyhow::Error) -> String {
    let is_refused = |error: &io::Error| error.kind() == io::ErrorKind::PermissionDenied;
    let refused = error.chain().any(|cause| {
        cause.downcast_ref::<io::Error>().is_some_and(is_refused)
            || matches!(cause.downcast_ref(), Some(AuditError::Io { error, .. }) if is_refused(error))
            || matches!(cause.downcast_ref(), Some(GrantsError::Read(ReadError::Io { error, .. })) if is_refused(error))
            || matches!(cause.downcast_ref(), Some(ServiceError::Read(ReadError::Io { error, .. })) if is_refused(error))
    });
    let remedy = refused.then(sudo_remedy).flatten().map(|remedy| format!("\n{remedy}")).unwrap_or_default();
    format!("{error:#}{remedy}")
}

/// Prints a message to stderr; hidden characters are escaped.
pub(crate) fn warn(text: &str) {
    let _stderr_closed = writeln!(io::stderr().lock(), "{}", visible(text).trim_end());
}
