//! The receipt's inner part: what this process observes of its own confinement.
//!
//! The checks run before the payload is forked, and are judged here too: a layer that is not
//! in force ends the run before the payload's first instruction. It does not read `/proc`: the
//! launcher reads namespaces, ids, capabilities, mounts and cgroup there, from outside.

use alloc::vec::Vec;

use rustix::{
    fs::{Access, AtFlags, CWD, FileType, Mode, accessat, mknodat},
    io::Errno,
};
use stockade_protocol::{
    frame::{Evidence, Job},
    layer::Layer,
    step::Step,
    text::hex,
};
use stockade_sys::process;

use crate::Failure;

pub(crate) fn gather(job: &Job<'_>, prestarted: bool) -> Result<Evidence, Failure> {
    let failed = |errno| Failure::new(Step::Receipt, errno);
    let begun = process::monotonic_us();
    let descriptors = count_descriptors().map_err(failed)?;
    let optional = [job.start.payload_landlock, job.start.by_descriptor, job.start.memory];
    if descriptors != EXPECTED_DESCRIPTORS + optional.map(u32::from).iter().sum::<u32>() {
        return Err(failed(Errno::BADF).because(b"a descriptor too many is open"));
    }
    let clone3_errno = process::probe_clone3();
    if clone3_errno != Errno::NOSYS && must_hold(job, Layer::Seccomp) {
        return Err(failed(clone3_errno).because(b"clone3 is not refused: the system call filter is not in force"));
    }
    let landlock_errno = if job.expect_landlock { probe_landlock(begun.unwrap_or_default())? } else { 0 };
    let taken_us = begun.zip(process::monotonic_us()).map(|(begun, ended)| ended.saturating_sub(begun));
    Ok(Evidence { descriptors, clone3_errno: clone3_errno.raw_os_error() as u32, landlock_errno, taken_us, prestarted })
}

/// Job, stdout, stderr, status, the payload's stdin, lifeline. A ruleset, the payload's program and the
/// file of a memory image add one each.
const EXPECTED_DESCRIPTORS: u32 = 6;

/// Whether a layer must be in force: all must, unless a build for tests leaves one out.
#[cfg_attr(not(feature = "ablation"), expect(unused_variables, reason = "nothing can be left out"))]
fn must_hold(job: &Job<'_>, layer: Layer) -> bool {
    #[cfg(feature = "ablation")]
    return job.without != layer as u32 + 1;
    #[cfg(not(feature = "ablation"))]
    true
}

/// Tries each number, which takes a tenth of the time of listing `/proc/self/fd`. Closes all
/// higher descriptors first.
fn count_descriptors() -> Result<u32, Errno> {
    const TRIED: u32 = 64;
    process::close_range(TRIED, u32::MAX)?;
    Ok((0..TRIED).map(|number| u32::from(process::is_open(number))).sum())
}

/// Tries to create a fifo in `/dev/shm`, which only Landlock forbids. Earlier code of the
/// session cannot have created a file of that name.
fn probe_landlock(now: u64) -> Result<u32, Failure> {
    const DIRECTORY: &core::ffi::CStr = c"/dev/shm";
    // Where the file modes refuse it as well, EACCES does not prove that Landlock is in force.
    if let Err(errno) = accessat(CWD, DIRECTORY, Access::WRITE_OK | Access::EXEC_OK, AtFlags::empty()) {
        return Err(Failure::new(Step::Receipt, errno).because(b"/dev/shm is closed to its owner, so Landlock cannot be tried there"));
    }
    match mknodat(CWD, &*probe_path(now), FileType::Fifo, Mode::from_raw_mode(0o600), 0) {
        Err(Errno::ACCESS) => Ok(Errno::ACCESS.raw_os_error() as u32),
        other => {
            let errno = other.err().unwrap_or(Errno::PERM);
            Err(Failure::new(Step::Receipt, errno).because(b"a fifo in /dev/shm is not refused: Landlock is not in force"))
        }
    }
}

/// The probe's path, which contains the time in hexadecimal.
fn probe_path(now: u64) -> Vec<u8> {
    let mut path = b"/dev/shm/.probe-".to_vec();
    path.extend(hex(&now.to_be_bytes()).into_bytes());
    path
}
