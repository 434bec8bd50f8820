//! Memory of this process at fixed addresses: mapping, moving, and its bytes to and from a
//! file. For programs that exchange all of their memory.
//!
//! No function maps over what is there: an address in use is EEXIST. None keeps a record of
//! what is mapped; callers that hold references into it must not unmap it.

use rustix::fd::{AsFd, AsRawFd};

use crate::{Errno, Result, call::syscall};

const READ: usize = 1;
const WRITE: usize = 2;

const MAP_PRIVATE: usize = 0x02;
const MAP_ANONYMOUS: usize = 0x20;
const MAP_GROWSDOWN: usize = 0x100;
const MAP_NORESERVE: usize = 0x4000;
const MAP_FIXED_NOREPLACE: usize = 0x10_0000;

const MMAP: usize = 9;
const MUNMAP: usize = 11;
const PREAD64: usize = 17;
const PWRITE64: usize = 18;
const MREMAP: usize = 25;
const MADVISE: usize = 28;

/// A range of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressRange {
    /// Where it begins: a multiple of the page size.
    pub address: u64,
    /// How many bytes.
    pub length: u64,
}

/// Maps a part of a file copy-on-write.
///
/// # Errors
/// EEXIST where something is mapped there; else those of mmap(2).
pub fn map_file_at(to: AddressRange, protection: u64, file: impl AsFd, offset: u64) -> Result<()> {
    map(to, protection, MAP_PRIVATE, file.as_fd().as_raw_fd() as usize, offset)
}

/// Maps zeros. Like a heap, they count only once they are written.
///
/// # Errors
/// Likewise.
pub fn map_zeros_at(to: AddressRange, protection: u64) -> Result<()> {
    map(to, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, usize::MAX, 0)
}

/// Maps zeros that grow down, as the kernel does for a stack.
///
/// # Errors
/// Likewise.
pub fn map_stack_at(to: AddressRange, protection: u64) -> Result<()> {
    map(to, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_GROWSDOWN, usize::MAX, 0)
}

fn map(to: AddressRange, protection: u64, flags: usize, file: usize, offset: u64) -> Result<()> {
    let arguments = [to.address as usize, to.length as usize, protection as usize, flags | MAP_FIXED_NOREPLACE, file, offset as usize];
    // SAFETY: no reference points to where nothing is mapped, and what is mapped stays.
    let at = unsafe { syscall(MMAP, arguments) }?;
    // Before Linux 4.17 the address is only a hint.
    if at == to.address as usize { Ok(()) } else { Err(Errno::EXIST) }
}

/// Maps a work area of zeros, readable and writable, and returns it.
///
/// # Errors
/// Likewise.
pub fn map_work_area(at: AddressRange) -> Result<&'static mut [u8]> {
    map_zeros_at(at, (READ | WRITE) as u64)?;
    // SAFETY: the range was unmapped until now, so no other reference points into it, and zeros
    // are valid bytes. It lives until `unmap`, whose caller vouches for it.
    Ok(unsafe { core::slice::from_raw_parts_mut(at.address as *mut u8, at.length as usize) })
}

/// Unmaps all that lies in a range.
///
/// # Safety
/// Nothing of it is used afterwards.
///
/// # Errors
/// ENOMEM where the kernel cannot divide a mapping.
#[inline]
pub unsafe fn unmap(range: AddressRange) -> Result<()> {
    // SAFETY: the caller uses nothing of the range.
    unsafe { syscall(MUNMAP, [range.address as usize, range.length as usize, 0, 0, 0, 0]) }.map(drop)
}

/// Moves a mapping, over what is at its new place.
///
/// # Safety
/// Nothing at either place is used by its old address.
///
/// # Errors
/// EFAULT where the range is not one mapping.
pub unsafe fn move_to(range: AddressRange, address: u64) -> Result<()> {
    const MREMAP_MAYMOVE: usize = 1;
    const MREMAP_FIXED: usize = 2;
    let length = range.length as usize;
    // SAFETY: the caller uses nothing at either place.
    unsafe { syscall(MREMAP, [range.address as usize, length, length, MREMAP_MAYMOVE | MREMAP_FIXED, address as usize, 0]) }.map(drop)
}

/// Makes the pages of a range private and present, as writing to each would.
///
/// # Errors
/// EINVAL before Linux 5.14, ENOMEM where nothing is mapped.
pub fn populate(range: AddressRange) -> Result<()> {
    const MADV_POPULATE_WRITE: usize = 23;
    // SAFETY: it changes no byte that can be read.
    unsafe { syscall(MADVISE, [range.address as usize, range.length as usize, MADV_POPULATE_WRITE, 0, 0, 0]) }.map(drop)
}

/// Reads a part of a file into memory.
///
/// # Safety
/// The range is mapped, writable and not borrowed.
///
/// # Errors
/// EIO where the file ends before; else those of pread(2).
pub unsafe fn read_into(to: AddressRange, file: impl AsFd, offset: u64) -> Result<()> {
    let file = file.as_fd().as_raw_fd() as usize;
    // SAFETY: the kernel writes into the rest of the range only.
    transfer(to, offset, |address, length, offset| unsafe { syscall(PREAD64, [file, address, length, offset, 0, 0]) })
}

/// Writes memory into a file. What cannot be read is EFAULT.
///
/// # Errors
/// Those of pwrite(2).
pub fn write_from(from: AddressRange, file: impl AsFd, offset: u64) -> Result<()> {
    let file = file.as_fd().as_raw_fd() as usize;
    // SAFETY: the kernel only reads memory, and checks that it can.
    transfer(from, offset, |address, length, offset| unsafe { syscall(PWRITE64, [file, address, length, offset, 0, 0]) })
}

fn transfer(range: AddressRange, offset: u64, call: impl Fn(usize, usize, usize) -> Result<usize>) -> Result<()> {
    let mut done = 0;
    while done < range.length as usize {
        match call(range.address as usize + done, range.length as usize - done, offset as usize + done) {
            Ok(0) => return Err(Errno::IO),
            Ok(count) => done += count,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}
