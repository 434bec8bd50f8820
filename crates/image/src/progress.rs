//! How far an import has come, on a terminal alone.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// The bytes of layers, as they lie in the archive, on stderr.
#[derive(Debug)]
pub struct Progress(ProgressBar);

impl Progress {
    /// A bar for so many bytes; nothing where stderr is no terminal.
    pub fn new(bytes: u64) -> Self {
        let target = if std::io::stderr().is_terminal() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(Some(bytes), target);
        if let Ok(style) = ProgressStyle::with_template("{msg} {bar:30} {bytes}/{total_bytes} {bytes_per_sec} {eta}") {
            bar.set_style(style);
        }
        Progress(bar)
    }

    /// What is done.
    pub fn says(&self, what: String) {
        self.0.set_message(what);
    }

    /// So many bytes more were read.
    pub fn add(&self, bytes: usize) {
        self.0.inc(bytes as u64);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
