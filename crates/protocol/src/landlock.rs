//! Landlock's rights and scopes, as in `linux/landlock.h`: the plan names them, and
//! launcher, executor and gate hand them to the kernel.
//!
//! Numbers only; which of them a run gets is the plan's.

/// Access rights to files (`LANDLOCK_ACCESS_FS_*`).
pub mod access {
    #![allow(missing_docs, reason = "the kernel's names, and what plans are made of")]
    pub const EXECUTE: u64 = 1;
    pub const WRITE_FILE: u64 = 1 << 1;
    pub const READ_FILE: u64 = 1 << 2;
    pub const READ_DIR: u64 = 1 << 3;
    pub const REMOVE_DIR: u64 = 1 << 4;
    pub const REMOVE_FILE: u64 = 1 << 5;
    pub const MAKE_CHAR: u64 = 1 << 6;
    pub const MAKE_DIR: u64 = 1 << 7;
    pub const MAKE_REG: u64 = 1 << 8;
    pub const MAKE_SOCK: u64 = 1 << 9;
    pub const MAKE_FIFO: u64 = 1 << 10;
    pub const MAKE_BLOCK: u64 = 1 << 11;
    pub const MAKE_SYM: u64 = 1 << 12;
    pub const REFER: u64 = 1 << 13;
    pub const TRUNCATE: u64 = 1 << 14;
    pub const IOCTL_DEV: u64 = 1 << 15;

    /// Every right that Landlock had by ABI 5.
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

    /// Rights that the kernel accepts on a file that is no directory.
    pub const ON_FILE: u64 = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV;
}

/// Scopes (`LANDLOCK_SCOPE_*`): abstract sockets and signals, from ABI 6.
pub const fn scopes(abi: u32) -> u64 {
    if abi >= 6 { 3 } else { 0 }
}
