//! Access rights of Landlock, named as in `linux/landlock.h`.
//!
//! Kept here because `policy` makes no system calls and so does not link `sys`; a test of
//! `launcher` compares the two.
#![allow(missing_docs, reason = "the kernel's names")]

pub const EXECUTE: u64 = 1;
pub const WRITE_FILE: u64 = 1 << 1;
pub const READ_FILE: u64 = 1 << 2;
pub const READ_DIR: u64 = 1 << 3;
pub const MAKE_CHAR: u64 = 1 << 6;
pub const MAKE_SOCK: u64 = 1 << 9;
pub const MAKE_FIFO: u64 = 1 << 10;
pub const MAKE_BLOCK: u64 = 1 << 11;
pub const REFER: u64 = 1 << 13;
pub const IOCTL_DEV: u64 = 1 << 15;
pub const ALL: u64 = (1 << 16) - 1;
pub const READ: u64 = READ_FILE | READ_DIR;
/// Everything but devices.
pub const WRITE_TREE: u64 = ALL & !(MAKE_CHAR | MAKE_BLOCK | IOCTL_DEV);
/// Regular files, directories and links only.
pub const WRITE_PLAIN: u64 = WRITE_TREE & !(MAKE_SOCK | MAKE_FIFO);

/// Every right that a kernel with this ABI handles.
pub const fn handled(abi: u32) -> u64 {
    match abi {
        0 => 0,
        1 => (1 << 13) - 1,
        2 => (1 << 14) - 1,
        3 | 4 => (1 << 15) - 1,
        _ => ALL,
    }
}
