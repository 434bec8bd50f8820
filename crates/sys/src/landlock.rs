//! Landlock's three system calls, raw: the rules are added between clone and exec,
//! where the `landlock` crate's allocations are forbidden.
//!
//! Access bits are those of `linux/landlock.h`; which of them a kernel knows follows
//! from [`abi`]. The choice of rules is the plan's.

use rustix::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use crate::{Result, call::syscall};

/// The names of rights and scopes, which `policy` uses as well.
pub use stockade_protocol::landlock::{access, scopes};

#[repr(C)]
struct RulesetAttr {
    handled_access_fs: u64,
    handled_access_net: u64,
    scoped: u64,
}

#[repr(C, packed)]
struct PathBeneathAttr {
    allowed_access: u64,
    parent_fd: i32,
}

/// The kernel's Landlock ABI version; 0 where Landlock is not built in or is switched off.
pub fn abi() -> u32 {
    const CREATE_RULESET_VERSION: usize = 1;
    // SAFETY: with this flag the kernel reads no attribute.
    unsafe { syscall(444, [0, 0, CREATE_RULESET_VERSION, 0, 0, 0]) }.unwrap_or(0) as u32
}

/// Makes a ruleset that handles `rights` and scopes.
///
/// # Errors
/// EINVAL for a right that this kernel does not know, EOPNOTSUPP where it is off.
pub fn create_ruleset(rights: u64, scoped: u64) -> Result<OwnedFd> {
    let attr = RulesetAttr { handled_access_fs: rights, handled_access_net: 0, scoped };
    // An older kernel has a shorter structure, and refuses a longer one (E2BIG) only where the
    // additional bytes are not zero.
    let size = if scoped == 0 { 8 } else { core::mem::size_of::<RulesetAttr>() };
    // SAFETY: `attr` lives and is at least `size` bytes long.
    let fd = unsafe { syscall(444, [(&raw const attr) as usize, size, 0, 0, 0, 0]) }?;
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// Allows `rights` on and below the file behind `parent`.
///
/// # Errors
/// EINVAL for a directory right on a file, EBADFD for a file of no file system.
pub fn allow_beneath(ruleset: &OwnedFd, parent: impl AsFd, rights: u64) -> Result<()> {
    const RULE_PATH_BENEATH: usize = 1;
    let attr = PathBeneathAttr { allowed_access: rights, parent_fd: parent.as_fd().as_raw_fd() };
    // SAFETY: `attr` lives and has the layout of the rule type.
    unsafe { syscall(445, [ruleset.as_raw_fd() as usize, RULE_PATH_BENEATH, (&raw const attr) as usize, 0, 0, 0]) }.map(drop)
}

/// Enforces the ruleset on this thread; it cannot be removed.
///
/// # Errors
/// EPERM without no_new_privs, E2BIG beyond 16 layers.
pub fn restrict_self(ruleset: impl AsFd) -> Result<()> {
    // SAFETY: integers only.
    unsafe { syscall(446, [ruleset.as_fd().as_raw_fd() as usize, 0, 0, 0, 0, 0]) }.map(drop)
}
