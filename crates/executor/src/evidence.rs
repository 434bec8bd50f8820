//! The receipt's inner part: what this process can see of its own confinement.
//!
//! Read before the payload exists, and judged here too: a layer that is not in force
//! ends the run before its first instruction. What only the launcher can see
//! (namespace ids, maps, cgroup membership) it reads itself, from outside.

use alloc::{vec, vec::Vec};

use rustix::{
    fs::{Access, AtFlags, CWD, FileType, Mode, OFlags, RawDir, accessat, mknodat, openat},
    io::Errno,
};
use stockade_protocol::{
    frame::{Evidence, Job},
    layer::Layer,
    step::Step,
};

use crate::Failure;

pub(crate) fn gather(job: &Job<'_>) -> Result<Evidence, Failure> {
    let failed = |errno| Failure::new(Step::Receipt, errno);
    let begun = stockade_sys::process::monotonic_us();
    let status = read(c"/proc/self/status").map_err(failed)?;
    check_status(&status, job)?;
    let mounts = check_mounts(job)?;
    let descriptors = count_descriptors().map_err(failed)?;
    if descriptors != EXPECTED_DESCRIPTORS + u32::from(job.image) {
        return Err(failed(Errno::BADF).because(b"a descriptor too many is open"));
    }
    let clone3_errno = stockade_sys::process::probe_clone3();
    if clone3_errno != Errno::NOSYS && must_hold(job, Layer::Seccomp) {
        return Err(failed(clone3_errno).because(b"clone3 is not refused: the system call filter is not in force"));
    }
    let landlock_errno = if job.expect_landlock { probe_landlock(begun.unwrap_or_default())? } else { 0 };
    let taken_us = begun.zip(stockade_sys::process::monotonic_us()).map(|(begun, ended)| ended.saturating_sub(begun));
    Ok(Evidence { status, mounts, descriptors, clone3_errno: clone3_errno.raw_os_error() as u32, landlock_errno, taken_us })
}

/// Job, stdout, stderr, status, the payload's stdin, lifeline; an image comes on top.
const EXPECTED_DESCRIPTORS: u32 = 6;

fn read(path: &core::ffi::CStr) -> Result<Vec<u8>, Errno> {
    let file = openat(CWD, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    // Most often enough; each page costs a fault.
    let mut bytes = vec![0; 4 << 10];
    let mut length = 0;
    loop {
        match rustix::io::read(&file, bytes.get_mut(length..).unwrap_or_default()) {
            Ok(0) if length == bytes.len() => bytes.resize(length * 2, 0),
            Ok(0) => break,
            Ok(n) => length += n,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
        if length == bytes.len() {
            bytes.resize(length * 2, 0);
        }
    }
    bytes.truncate(length);
    Ok(bytes)
}

/// Whether a layer must be in force: all must, unless a build for tests leaves one out.
#[cfg_attr(not(feature = "ablation"), expect(unused_variables, reason = "nothing can be left out"))]
fn must_hold(job: &Job<'_>, layer: Layer) -> bool {
    #[cfg(feature = "ablation")]
    return job.without != layer as u32 + 1;
    #[cfg(not(feature = "ablation"))]
    true
}

fn check_status(status: &[u8], job: &Job<'_>) -> Result<(), Failure> {
    const EXPECTED: [(&[u8], &[u8]); 7] = [
        (b"CapInh:", b"0000000000000000"),
        (b"CapPrm:", b"0000000000000000"),
        (b"CapEff:", b"0000000000000000"),
        (b"CapBnd:", b"0000000000000000"),
        (b"CapAmb:", b"0000000000000000"),
        (b"NoNewPrivs:", b"1"),
        (b"Seccomp:", b"2"),
    ];
    for (key, expected) in EXPECTED {
        let line = status.split(|&byte| byte == b'\n').find_map(|line| line.strip_prefix(key));
        let found = line.map(<[u8]>::trim_ascii);
        // Without no_new_privs a capability must take its place until the payload starts.
        let layers: &[Layer] = if key.starts_with(b"Cap") { &[Layer::Capabilities, Layer::NoNewPrivs] } else { &[Layer::NoNewPrivs] };
        if found != Some(expected) && layers.iter().all(|layer| must_hold(job, *layer)) {
            return Err(Failure::new(Step::Receipt, Errno::PERM).because(key).because(found.unwrap_or(b"missing")));
        }
    }
    Ok(())
}

/// The signals that whoever started the launcher, or the launcher, ignores.
pub(crate) fn ignored_signals(status: &[u8]) -> u64 {
    let line = status.split(|&byte| byte == b'\n').find_map(|line| line.strip_prefix(b"SigIgn:"));
    let hex = line.map(<[u8]>::trim_ascii).and_then(|hex| core::str::from_utf8(hex).ok());
    // An unreadable mask means all: setting a default signal to its default is harmless.
    hex.and_then(|hex| u64::from_str_radix(hex, 16).ok()).unwrap_or(u64::MAX)
}

/// Every mount is read-only and nosuid unless the plan lists it as writable; every
/// mount that the plan requires is there. Returns how many there are.
fn check_mounts(job: &Job<'_>) -> Result<u32, Failure> {
    let wrong = |what: &[u8], point: &[u8]| Failure::new(Step::Receipt, Errno::PERM).because(what).because(point);
    let (required, writable) = (sorted(&job.required_mounts), sorted(&job.writable_mounts));
    let mut seen = vec![false; required.len()];
    let mut count = 0;
    let mut point = Vec::with_capacity(256);
    let mut check = |line: &[u8]| {
        let mut fields = line.split(|&byte| byte == b' ').skip(4);
        let (Some(escaped), Some(options)) = (fields.next(), fields.next()) else {
            return Err(wrong(b"unreadable mount ", line));
        };
        unescape(escaped, &mut point);
        let has = |option: &[u8]| options.split(|&byte| byte == b',').any(|o| o == option);
        let may_be_writable = writable.binary_search(&point.as_slice()).is_ok();
        let read_only = [Layer::ReadOnlyRoot, Layer::ReadOnlyProc, Layer::DetachedRoot].iter().all(|layer| must_hold(job, *layer));
        if !has(b"ro") && !may_be_writable && read_only {
            return Err(wrong(b"writable: ", &point));
        }
        if !has(b"nosuid") && must_hold(job, Layer::ScratchFlags) && must_hold(job, Layer::DetachedRoot) {
            return Err(wrong(b"honours set-ID bits: ", &point));
        }
        count += 1;
        if let Some(seen) = required.binary_search(&point.as_slice()).ok().and_then(|place| seen.get_mut(place)) {
            *seen = true;
        }
        Ok(())
    };
    each_line(c"/proc/self/mountinfo", &mut check)?;
    match required.iter().zip(&seen).find(|(_, seen)| !**seen) {
        Some((missing, _)) => Err(wrong(b"not mounted: ", missing)),
        None => Ok(count),
    }
}

/// To be searched: what code has left in a scratch can make thousands of mounts.
fn sorted<'a>(paths: &[&'a [u8]]) -> Vec<&'a [u8]> {
    let mut paths = paths.to_vec();
    paths.sort_unstable();
    paths.dedup();
    paths
}

/// Reads a file line by line: whole, it could be more than there is memory for.
fn each_line(path: &core::ffi::CStr, check: &mut dyn FnMut(&[u8]) -> Result<(), Failure>) -> Result<(), Failure> {
    let failed = |errno| Failure::new(Step::Receipt, errno);
    let file = openat(CWD, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).map_err(failed)?;
    let mut buffer = vec![0; 4 << 10];
    let mut held = 0;
    loop {
        if held == buffer.len() {
            buffer.resize(held * 2, 0);
        }
        match rustix::io::read(&file, buffer.get_mut(held..).unwrap_or_default()) {
            Ok(0) => return if held == 0 { Ok(()) } else { Err(failed(Errno::BADMSG)) },
            Ok(n) => held += n,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(failed(errno)),
        }
        let mut rest = buffer.get(..held).unwrap_or_default();
        while let Some(end) = rest.iter().position(|&byte| byte == b'\n') {
            check(rest.get(..end).unwrap_or_default())?;
            rest = rest.get(end + 1..).unwrap_or_default();
        }
        let (from, left) = (held - rest.len(), rest.len());
        buffer.copy_within(from..held, 0);
        held = left;
    }
}

/// Undoes the octal escapes of mountinfo (`\040` for a space), into a buffer that is used again.
fn unescape(field: &[u8], plain: &mut Vec<u8>) {
    plain.clear();
    let mut rest = field;
    while let Some((&byte, tail)) = rest.split_first() {
        rest = tail;
        match tail {
            [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', more @ ..] if byte == b'\\' => {
                plain.push((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'));
                rest = more;
            }
            _ => plain.push(byte),
        }
    }
}

fn count_descriptors() -> Result<u32, Errno> {
    let directory = openat(CWD, c"/proc/self/fd", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let mut buffer = Vec::with_capacity(2048);
    let mut entries = RawDir::new(&directory, buffer.spare_capacity_mut());
    let mut count = 0;
    while let Some(entry) = entries.next() {
        count += u32::from(!entry?.file_name().to_bytes().starts_with(b"."));
    }
    // Without the directory itself.
    Ok(count - 1)
}

/// Tries what Landlock alone forbids: a fifo in `/dev/shm`, by a name that earlier code of a
/// session cannot have taken.
fn probe_landlock(now: u64) -> Result<u32, Failure> {
    const DIRECTORY: &core::ffi::CStr = c"/dev/shm";
    // Where modes refuse it as well, its refusal says nothing.
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

/// The probe's path, which holds the time in hexadecimal.
fn probe_path(now: u64) -> Vec<u8> {
    let mut path = b"/dev/shm/.probe-".to_vec();
    path.extend((0..16).rev().map(|place| b"0123456789abcdef"[(now >> (4 * place)) as usize & 15]));
    path
}
