//! Printing: answers to stdout, everything else to stderr.
//!
//! Text that came out of a sandbox is not printed here.

use std::io::{self, Write};

/// Prints an answer.
///
/// # Errors
/// Stdout is closed or full.
pub(crate) fn say(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    if !text.ends_with('\n') {
        out.write_all(b"\n")?;
    }
    out.flush()
}

/// Prints a remark for a person; control characters are made visible.
pub(crate) fn warn(text: &str) {
    let visible: String = text
        .chars()
        .flat_map(|c| if c.is_control() && c != '\n' && c != '\t' { c.escape_default().collect::<Vec<_>>() } else { vec![c] })
        .collect();
    let _unheard = writeln!(io::stderr().lock(), "{}", visible.trim_end());
}
