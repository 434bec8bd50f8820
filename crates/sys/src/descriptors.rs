//! Closing what a forked process does not need, and copying what a program was started with.

use rustix::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use crate::{Errno, Result, call::syscall, process::close_range};

/// A copy, close-on-exec, of the descriptor with this number, which another process has left open for
/// this one. The number itself stays open.
///
/// # Errors
/// EBADF where none is open, EMFILE.
pub fn copy_inherited(number: u32) -> Result<OwnedFd> {
    const FCNTL: usize = 72;
    const F_DUPFD_CLOEXEC: usize = 1030;
    // SAFETY: integers only, and the number need not be open.
    let copy = unsafe { syscall(FCNTL, [number as usize, F_DUPFD_CLOEXEC, 3, 0, 0, 0]) }?;
    // SAFETY: the kernel has just made it, so nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(copy as i32) })
}

/// How many descriptors [`keep_only`] can keep.
pub const MAX_KEPT: usize = 32;

/// Closes every descriptor from `first` on but these.
///
/// For a process that was just forked: its copy of the parent's memory may hold `OwnedFd`s
/// of the closed descriptors, which it must never use or drop.
///
/// # Errors
/// EINVAL for more than [`MAX_KEPT`], ENOSYS before Linux 5.9.
pub fn keep_only(first: u32, kept: &[BorrowedFd<'_>]) -> Result<()> {
    let mut numbers = [u32::MAX; MAX_KEPT];
    let Some(slots) = numbers.get_mut(..kept.len()) else { return Err(Errno::INVAL) };
    for (slot, fd) in slots.iter_mut().zip(kept) {
        *slot = fd.as_raw_fd().unsigned_abs();
    }
    slots.sort_unstable();
    let mut from = first;
    for &number in slots.iter() {
        if number > from {
            close_range(from, number - 1)?;
        }
        from = from.max(number + 1);
    }
    close_range(from, u32::MAX)
}
