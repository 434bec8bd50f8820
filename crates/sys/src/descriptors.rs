//! Closing what a forked process does not need.

use rustix::fd::{AsRawFd, BorrowedFd};

use crate::{Errno, Result, process::close_range};

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
