//! Capabilities, securebits and file-system ids of the calling thread.
//!
//! These act on the calling thread alone, which is the whole process where it is
//! single-threaded; libc's versions would signal every thread.

use crate::{Result, call::syscall};

const PRCTL: usize = 157;

/// SECBIT_NOROOT, NO_SETUID_FIXUP, KEEP_CAPS off and NO_CAP_AMBIENT_RAISE, each locked
/// (capabilities(7)): uid 0 gets no capabilities, and no bit can be changed again.
const SECUREBITS_LOCKED: usize = 0b1110_1111;

fn prctl(option: usize, second: usize, third: usize) -> Result<usize> {
    // SAFETY: every option used in this file takes integers only.
    unsafe { syscall(PRCTL, [option, second, third, 0, 0, 0]) }
}

/// Locks the securebits.
///
/// # Errors
/// EPERM without CAP_SETPCAP.
pub fn lock_securebits() -> Result<()> {
    prctl(28, SECUREBITS_LOCKED, 0).map(drop)
}

/// Empties the bounding set, whatever capabilities this kernel knows.
///
/// # Errors
/// EPERM without CAP_SETPCAP.
pub fn drop_bounding_set() -> Result<()> {
    const CAPBSET_DROP: usize = 24;
    let mut capability = 0;
    loop {
        match prctl(CAPBSET_DROP, capability, 0) {
            Ok(_) => capability += 1,
            // EINVAL: one past the last capability of this kernel (38 at least since 5.8).
            Err(crate::Errno::INVAL) if capability >= 38 => return Ok(()),
            Err(errno) => return Err(errno),
        }
    }
}

/// Empties the ambient, effective, permitted and inheritable sets.
///
/// # Errors
/// None from a correct kernel.
pub fn drop_all_sets() -> Result<()> {
    const PR_CAP_AMBIENT: usize = 47;
    const PR_CAP_AMBIENT_CLEAR_ALL: usize = 4;
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0)?;
    set_capabilities(&[0; 6])
}

/// Has the permitted set outlast a change from uid 0 to another. An execve ends this.
///
/// # Errors
/// EPERM where the securebits forbid it.
pub fn keep_permitted() -> Result<()> {
    const PR_SET_KEEPCAPS: usize = 8;
    prctl(PR_SET_KEEPCAPS, 1, 0).map(drop)
}

/// Needed to mount, to set the host name and for the cgroup namespace (capabilities(7)).
pub const CAP_SYS_ADMIN: u32 = 21;
/// Needed to change the bounding set and the securebits.
pub const CAP_SETPCAP: u32 = 8;

/// Gives up all permitted capabilities but these, which become effective.
///
/// # Errors
/// EPERM where one of them is not permitted.
pub fn retain(capabilities: &[u32]) -> Result<()> {
    let mask = |word: u32| capabilities.iter().filter(|number| **number / 32 == word).fold(0, |mask, number| mask | 1 << (number % 32));
    let (low, high) = (mask(0), mask(1));
    set_capabilities(&[low, low, 0, high, high, 0])
}

/// The capability sets of a thread.
pub struct CapabilitySets([u32; 6]);

/// Empties the effective set alone, and returns all sets as they were.
///
/// # Errors
/// None from a correct kernel.
pub fn drop_effective() -> Result<CapabilitySets> {
    let header = [CAPABILITY_VERSION, 0];
    let mut sets = [0u32; 6];
    // SAFETY: a version 3 header and its two data elements, all alive and writable here.
    unsafe { syscall(125, [header.as_ptr() as usize, sets.as_mut_ptr() as usize, 0, 0, 0, 0]) }?;
    let [_, permitted, inheritable, _, permitted_high, inheritable_high] = sets;
    set_capabilities(&[0, permitted, inheritable, 0, permitted_high, inheritable_high])?;
    Ok(CapabilitySets(sets))
}

/// Undoes [`drop_effective`].
///
/// # Errors
/// EPERM where the permitted set has shrunk meanwhile.
pub fn restore_sets(sets: &CapabilitySets) -> Result<()> {
    set_capabilities(&sets.0)
}

/// Version 3: two words for each set (capget(2)).
const CAPABILITY_VERSION: u32 = 0x2008_0522;

/// `sets` has the low words of effective, permitted and inheritable, then the high words.
fn set_capabilities(sets: &[u32; 6]) -> Result<()> {
    let header = [CAPABILITY_VERSION, 0];
    // SAFETY: a version 3 header and its two data elements, both alive here.
    unsafe { syscall(126, [header.as_ptr() as usize, sets.as_ptr() as usize, 0, 0, 0, 0]) }.map(drop)
}

/// Sets real, effective and saved user id of this thread.
///
/// # Errors
/// EINVAL for an id that the user namespace does not map, EPERM.
pub fn set_user(uid: u32) -> Result<()> {
    let id = uid as usize;
    // SAFETY: setresuid takes integers only.
    unsafe { syscall(117, [id, id, id, 0, 0, 0]) }.map(drop)
}

/// Sets real, effective and saved group id of this thread.
///
/// # Errors
/// As [`set_user`].
pub fn set_group(gid: u32) -> Result<()> {
    let id = gid as usize;
    // SAFETY: setresgid takes integers only.
    unsafe { syscall(119, [id, id, id, 0, 0, 0]) }.map(drop)
}

/// Sets the supplementary groups of this thread.
///
/// # Errors
/// EPERM without CAP_SETGID, or where `setgroups` is denied.
pub fn set_groups(groups: &[u32]) -> Result<()> {
    // SAFETY: pointer and length are those of a live slice of gid_t.
    unsafe { syscall(116, [groups.len(), groups.as_ptr() as usize, 0, 0, 0, 0]) }.map(drop)
}

/// Replaces the effective user and group id only, keeping root as the saved id.
///
/// # Errors
/// EPERM.
pub fn set_effective(uid: u32, gid: u32) -> Result<()> {
    const KEEP: usize = u32::MAX as usize;
    // Group first: once the effective uid is not 0 the group could not be set.
    // SAFETY: integers only, both calls.
    unsafe { syscall(119, [KEEP, gid as usize, KEEP, 0, 0, 0]) }?;
    // SAFETY: as above.
    unsafe { syscall(117, [KEEP, uid as usize, KEEP, 0, 0, 0]) }.map(drop)
}

/// Undoes [`set_effective`]: effective ids become root's again.
///
/// # Errors
/// EPERM where the saved id is not root's.
pub fn restore_effective_root() -> Result<()> {
    const KEEP: usize = u32::MAX as usize;
    // User first: it restores CAP_SETGID, which the change of group needs.
    // SAFETY: integers only, both calls.
    unsafe { syscall(117, [KEEP, 0, KEEP, 0, 0, 0]) }?;
    // SAFETY: as above.
    unsafe { syscall(119, [KEEP, 0, KEEP, 0, 0, 0]) }.map(drop)
}

/// Joins a new anonymous session keyring, so that the process possesses none of the caller's
/// keys. ENOSYS is no failure: a kernel without CONFIG_KEYS has no keys.
///
/// # Errors
/// EDQUOT where the user's key quota is full, EPERM under an outer filter.
pub fn join_new_session_keyring() -> Result<()> {
    const KEYCTL_JOIN_SESSION_KEYRING: usize = 1;
    // SAFETY: a null name asks for an anonymous keyring.
    match unsafe { syscall(250, [KEYCTL_JOIN_SESSION_KEYRING, 0, 0, 0, 0, 0]) } {
        Ok(_) | Err(crate::Errno::NOSYS) => Ok(()),
        Err(errno) => Err(errno),
    }
}
