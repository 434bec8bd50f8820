//! The prover's probe: makes the system calls of its scripts and prints the kernel's answers.
//!
//! It reads a batch of scripts from stdin and runs each in its own child, so that a killed
//! script has an answer too. It knows neither where it runs nor what an answer means, and
//! protects nothing: inside a sandbox it is the payload.
#![no_std]
#![deny(unsafe_code)]
extern crate alloc;

mod script;

use alloc::{vec, vec::Vec};
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use rustix::io::Errno;
use stockade_protocol::probe::{Answer, Batch, NO_BATCH, NO_PROCESS, NOT_PREPARED, encode_answers};
use stockade_sys::probe::shared_words;

use script::{Ended, call, fork, perform};

/// The probe's whole life. Returns its exit status.
pub fn run() -> i32 {
    let Ok(input) = read_to_end() else { return 1 };
    if input.is_empty() {
        return NO_BATCH;
    }
    let (Ok(batch), Ok(words)) = (Batch::decode(&input), shared_words()) else { return 2 };
    let (status, answers) = match perform(&batch.prelude) {
        Ok(_) => (0, batch.scripts.iter().map(|script| attempt(script, batch.timeout_s, words)).collect()),
        // Nothing was tried: each answer names the step that failed.
        Err(Ended::Broken { step, errno }) => (NOT_PREPARED, vec![Answer::Broken { step, errno }; batch.scripts.len()]),
        // Another process is the probe now, and this one ends with its status.
        Err(Ended::Left(status)) => return status,
    };
    if write_all(&encode_answers(batch.nonce, &answers)).is_ok() { status } else { 1 }
}

const READ: u32 = 0;
const WRITE: u32 = 1;
const ALARM: u32 = 37;
const KILL: u32 = 62;
const SETPGID: u32 = 109;

/// The number of a shared word.
mod word {
    pub(crate) const KIND: usize = 0;
    pub(crate) const STEP: usize = 1;
    pub(crate) const VALUE: usize = 2;
}
/// In the first word.
mod kind {
    pub(crate) const NOTHING: u64 = 0;
    pub(crate) const RESULT: u64 = 1;
    pub(crate) const BROKEN: u64 = 2;
}

/// Runs a script in a child.
fn attempt(script: &stockade_protocol::probe::Script, timeout_s: u32, words: &[AtomicU64; 8]) -> Answer {
    words[word::KIND].store(kind::NOTHING, Relaxed);
    let pid = match fork() {
        Err(errno) => return Answer::Broken { step: NO_PROCESS, errno: errno.raw_os_error() as u32 },
        Ok(0) => {
            // A new process group, so that the kill below reaches everything that it started.
            let _refused = call(SETPGID, [0; 6]);
            let _refused = call(ALARM, [u64::from(timeout_s), 0, 0, 0, 0, 0]);
            let (kind, step, value) = match perform(script) {
                Ok(result) => (kind::RESULT, 0, result.cast_unsigned()),
                Err(Ended::Broken { step, errno }) => (kind::BROKEN, step, u64::from(errno)),
                Err(Ended::Left(status)) => stockade_sys::process::exit_now(status),
            };
            words[word::STEP].store(u64::from(step), Relaxed);
            words[word::VALUE].store(value, Relaxed);
            words[word::KIND].store(kind, Relaxed);
            stockade_sys::process::exit_now(0)
        }
        Ok(pid) => pid,
    };
    let status = wait_for(pid);
    const SIGKILL: u64 = 9;
    let _nobody = call(KILL, [pid.wrapping_neg(), SIGKILL, 0, 0, 0, 0]);
    let value = words[word::VALUE].load(Relaxed);
    match (words[word::KIND].load(Relaxed), status) {
        (kind::RESULT, _) => Answer::Result(value.cast_signed()),
        (kind::BROKEN, _) => Answer::Broken { step: words[word::STEP].load(Relaxed) as u32, errno: value as u32 },
        (_, Err(errno)) => Answer::Broken { step: NO_PROCESS, errno: errno.raw_os_error() as u32 },
        (_, Ok(status)) if status & 0x7f == 0 => Answer::Exited(status >> 8 & 0xff),
        (_, Ok(status)) => Answer::Signal(status & 0x7f),
    }
}

/// Waits for a child and returns the status word of wait(2).
pub(crate) fn wait_for(pid: u64) -> Result<u32, Errno> {
    loop {
        let ended = stockade_sys::process::wait_any()?;
        // Others are orphans, where this is pid 1.
        if ended.pid == pid as i32 {
            return Ok(ended.status as u32);
        }
    }
}

fn read_to_end() -> Result<Vec<u8>, Errno> {
    let mut bytes = vec![0; 64 << 10];
    let mut length = 0;
    loop {
        if length == bytes.len() {
            bytes.resize(length * 2, 0);
        }
        let room = bytes.get_mut(length..).unwrap_or_default();
        match call(READ, [0, room.as_mut_ptr() as u64, room.len() as u64, 0, 0, 0]) {
            Ok(0) => break,
            Ok(n) => length += n as usize,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    bytes.truncate(length);
    Ok(bytes)
}

fn write_all(mut bytes: &[u8]) -> Result<(), Errno> {
    while !bytes.is_empty() {
        match call(WRITE, [1, bytes.as_ptr() as u64, bytes.len() as u64, 0, 0, 0]) {
            Ok(n) => bytes = bytes.get(n as usize..).unwrap_or_default(),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}
