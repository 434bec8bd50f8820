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

/// Prints an answer, as its last line ends.
///
/// # Errors
/// Stdout is closed or full.
pub(crate) fn say(text: &str) -> anyhow::Result<()> {
    let mut bytes = text.as_bytes().to_vec();
    if !text.ends_with('\n') {
        bytes.push(b'\n');
    }
    write_out(&bytes)
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

/// Text with its control characters made visible, but for line breaks and tabs.
pub(crate) fn visible(text: &str) -> String {
    text.chars()
        .flat_map(|c| if c.is_control() && c != '\n' && c != '\t' { c.escape_default().collect::<Vec<_>>() } else { vec![c] })
        .collect()
}

/// Prints a remark for a person; control characters are made visible.
pub(crate) fn warn(text: &str) {
    let _unheard = writeln!(io::stderr().lock(), "{}", visible(text).trim_end());
}
