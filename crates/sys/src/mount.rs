//! mount_setattr(2), which rustix lacks.
//!
//! It adds attributes and never clears any: the kernel refuses that on an inherited mount
//! (EPERM), and no layer needs it.

use rustix::fd::{AsFd, AsRawFd};

use crate::{Result, call::syscall};

/// Attributes of mount_setattr(2).
pub mod attr {
    #![allow(missing_docs, reason = "the kernel's names")]
    pub const RDONLY: u64 = 1;
    pub const NOSUID: u64 = 2;
    pub const NODEV: u64 = 4;
    pub const NOEXEC: u64 = 8;
    pub const IDMAP: u64 = 0x10_0000;
}

#[repr(C)]
#[derive(Default)]
struct MountAttr {
    set: u64,
    clear: u64,
    propagation: u64,
    userns_fd: u64,
}

fn mount_setattr(mount: impl AsFd, recursive: bool, attr: &MountAttr) -> Result<()> {
    const AT_EMPTY_PATH: usize = 0x1000;
    const AT_RECURSIVE: usize = 0x8000;
    let flags = AT_EMPTY_PATH | if recursive { AT_RECURSIVE } else { 0 };
    let fd = mount.as_fd().as_raw_fd() as usize;
    // SAFETY: the path is a constant, `attr` lives and its size is given.
    unsafe { syscall(442, [fd, c"".as_ptr() as usize, flags, core::ptr::from_ref(attr) as usize, core::mem::size_of::<MountAttr>(), 0]) }
        .map(drop)
}

/// Adds attributes to the mount behind a descriptor.
///
/// # Errors
/// EPERM without CAP_SYS_ADMIN over the mount namespace.
pub fn set_attributes(mount: impl AsFd, attributes: u64, recursive: bool) -> Result<()> {
    mount_setattr(mount, recursive, &MountAttr { set: attributes, ..MountAttr::default() })
}

/// Takes a mount out of its peer group, and those below it where `recursive`.
///
/// # Errors
/// EPERM without CAP_SYS_ADMIN over the mount namespace.
pub fn make_private(mount: impl AsFd, recursive: bool) -> Result<()> {
    const MS_PRIVATE: u64 = 1 << 18;
    mount_setattr(mount, recursive, &MountAttr { propagation: MS_PRIVATE, ..MountAttr::default() })
}

/// Adds attributes and the id map of a user namespace to a detached mount.
///
/// # Errors
/// EINVAL where the file system cannot idmap or the mount is attached, EPERM without
/// privilege over its superblock or with the initial user namespace.
pub fn set_idmap(mount: impl AsFd, attributes: u64, user_namespace: impl AsFd) -> Result<()> {
    let userns_fd = user_namespace.as_fd().as_raw_fd() as u64;
    mount_setattr(mount, false, &MountAttr { set: attributes | attr::IDMAP, userns_fd, ..MountAttr::default() })
}
