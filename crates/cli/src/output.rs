//! Printing: answers to stdout, everything else to stderr.
//!
//! An answer that could not be written is an error, also where Rust's own stdout would not
//! say so: it takes a stdout that is closed or not open for writing for one that nobody
//! reads. Text that came out of a sandbox is not printed here but as JSON.

use std::{
    fs::File,
    io::{self, Write},
    os::fd::AsFd,
};

use anyhow::Context;
use rustix::io::Errno;
use serde::Serialize;
use stockade_policy::visible::visible_json;

/// Prints an answer for a person, as its last line ends; what is hidden in it is escaped.
///
/// # Errors
/// Stdout is closed or full.
pub(crate) fn say(text: &str) -> anyhow::Result<()> {
    let mut text = visible(text);
    if !text.ends_with('\n') {
        text.push('\n');
    }
    write_out(text.as_bytes())
}

/// Prints an answer for a program, in lines for a person; the same holds.
///
/// # Errors
/// Stdout is closed or full.
pub(crate) fn say_json(value: &impl Serialize) -> anyhow::Result<()> {
    let json = serde_json::to_string_pretty(value)?;
    write_out(format!("{}\n", visible_json(&json)).as_bytes())
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

/// Text with what is hidden in it escaped, but for line breaks and tabs.
pub(crate) fn visible(text: &str) -> String {
    stockade_policy::visible::visible(text, &['\n', '\t'])
}

/// Prints a remark for a person; what is hidden in it is escaped.
pub(crate) fn warn(text: &str) {
    let _unheard = writeln!(io::stderr().lock(), "{}", visible(text).trim_end());
}
