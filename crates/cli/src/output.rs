//! Printing: answers to stdout, everything else to stderr.
//!
//! An answer that could not be written is an error. Rust's own stdout ignores a stdout that is
//! closed or not open for writing. Text from a sandbox is printed only as JSON.

use std::{
    fs::File,
    io::{self, Write},
    os::fd::AsFd,
};

use anyhow::Context;
use rustix::io::Errno;
use serde::Serialize;
use stockade_protocol::text::{escape, escape_json, is_hidden};

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
    write().context("write the answer to stdout")
}

/// Escapes the hidden characters of a text, except line breaks and tabs.
pub(crate) fn visible(text: &str) -> String {
    escape(text, |letter| !matches!(letter, '\n' | '\t') && is_hidden(letter))
}

/// Prints a message to stderr; hidden characters are escaped.
pub(crate) fn warn(text: &str) {
    let _stderr_closed = writeln!(io::stderr().lock(), "{}", visible(text).trim_end());
}
