//! The caller's terminal while a command runs on a terminal of the sandbox.
//!
//! The outer terminal is in raw mode, so that the inner terminal's line discipline is the only
//! one; its mode is put back when the run ends. No descriptor of it enters the sandbox.

use rustix::{
    fd::{AsFd, BorrowedFd, OwnedFd},
    io::Errno,
    termios::{OptionalActions, Termios, isatty, tcgetattr, tcgetwinsize, tcsetattr, tcsetwinsize},
};

/// Whether the launcher's stdin and stdout are both terminals.
pub fn is_interactive() -> bool {
    isatty(rustix::stdio::stdin()) && isatty(rustix::stdio::stdout())
}

/// The caller's terminal in raw mode, until dropped.
pub(crate) struct RawTerminal {
    before: Termios,
}

impl RawTerminal {
    pub(crate) fn enter() -> Result<Self, Errno> {
        let before = tcgetattr(own())?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(own(), OptionalActions::Now, &raw)?;
        Ok(RawTerminal { before })
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        // A terminal that is gone needs no settings.
        let _gone = tcsetattr(own(), OptionalActions::Now, &self.before);
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
