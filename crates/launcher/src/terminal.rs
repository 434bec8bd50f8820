//! The caller's terminal while a command runs on a terminal of the sandbox.
//!
//! The outer terminal is in raw mode, so that the inner terminal's line discipline is the only
//! one; its mode is put back when the run ends. A launcher in the background leaves the terminal as
//! it is. No descriptor of it enters the sandbox.

use rustix::{
    fd::{AsFd, BorrowedFd, OwnedFd},
    io::Errno,
    process::getpgrp,
    termios::{OptionalActions, Termios, isatty, tcgetattr, tcgetpgrp, tcgetwinsize, tcsetattr, tcsetwinsize},
};

/// Whether the launcher's stdin and stdout are both terminals, and its own to use.
pub fn is_interactive() -> bool {
    isatty(rustix::stdio::stdin()) && isatty(rustix::stdio::stdout()) && !is_in_background()
}

/// Whether another process group has the terminal now, as in a shell's background, or below
/// timeout(1). A terminal that is not the controlling one has none.
fn is_in_background() -> bool {
    tcgetpgrp(own()).is_ok_and(|foreground| foreground != getpgrp())
}

/// The caller's terminal in raw mode, until dropped; as it was in the background.
pub(crate) struct RawTerminal {
    before: Option<Termios>,
}

impl RawTerminal {
    pub(crate) fn enter() -> Result<Self, Errno> {
        if is_in_background() {
            return Ok(RawTerminal { before: None });
        }
        let before = tcgetattr(own())?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(own(), OptionalActions::Now, &raw)?;
        Ok(RawTerminal { before: Some(before) })
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        // The process group in the foreground has its own settings by now.
        if let Some(before) = self.before.as_ref().filter(|_| !is_in_background()) {
            // A terminal that is gone needs none.
            let _gone = tcsetattr(own(), OptionalActions::Now, before);
        }
    }
}

/// Gives the inner terminal the outer one's size.
pub(crate) fn copy_size(inner: &OwnedFd) {
    if let Ok(size) = tcgetwinsize(own()) {
        let _ended = tcsetwinsize(inner.as_fd(), size);
    }
}

/// Whether a stream is a terminal that is gone, as when its window was closed: the kernel
/// answers everything that is asked of it with EIO.
pub(crate) fn is_gone(stream: impl AsFd) -> bool {
    matches!(tcgetattr(stream), Err(Errno::IO))
}

/// Whether the caller's terminal is gone.
pub(crate) fn own_is_gone() -> bool {
    is_gone(own())
}

fn own() -> BorrowedFd<'static> {
    rustix::stdio::stdin()
}
