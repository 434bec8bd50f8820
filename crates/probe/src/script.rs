//! Carrying out a script, step by step.
//!
//! Bounds of the script's own memory are checked, so that a faulty script is an answer
//! and no crash. What a system call does to the process that makes it is its own affair:
//! the process is there for nothing else.

use alloc::vec::Vec;

use rustix::io::Errno;
use stockade_protocol::probe::{Failing, Op, Script, SyscallAbi, Value};
use stockade_sys::probe::{any, int80};

/// How a script ended before its last step.
pub(crate) enum Ended {
    /// A step that prepared the attempt failed.
    Broken { step: u32, errno: u32 },
    /// A child took over, and ended with this status.
    Left(i32),
}

/// Makes a system call.
pub(crate) fn call(number: u32, arguments: [u64; 6]) -> Result<u64, Errno> {
    by(SyscallAbi::Native, number, arguments)
}

fn by(abi: SyscallAbi, number: u32, arguments: [u64; 6]) -> Result<u64, Errno> {
    // SAFETY: pointers among the arguments lead into the script's memory or nowhere, which
    // the kernel notices. That a call may break this process is what a script is for: it
    // runs in a child, whose end is the answer.
    #[expect(unsafe_code, reason = "the one place from which anything at all may be asked of the kernel")]
    unsafe {
        match abi {
            SyscallAbi::Native => any(number, arguments),
            SyscallAbi::I386 => int80(number, arguments),
        }
    }
}

/// Makes a child with a copy of this process's memory.
pub(crate) fn fork() -> Result<u64, Errno> {
    const CLONE: u32 = 56;
    const SIGCHLD: u64 = 17;
    call(CLONE, [SIGCHLD, 0, 0, 0, 0, 0])
}

struct Machine {
    memory: Vec<u8>,
    results: Vec<i64>,
}

/// Carries out a script and returns the last step's result.
pub(crate) fn perform(script: &Script) -> Result<i64, Ended> {
    let mut machine = Machine { memory: script.memory.clone(), results: Vec::with_capacity(script.ops.len()) };
    let mut last = script.ops.len();
    let mut child = false;
    let mut next = 0;
    while next < last {
        let Some(op) = script.ops.get(next) else { break };
        let broken = |errno| Ended::Broken { step: next as u32, errno };
        let mut skip = 0;
        let result = match *op {
            Op::Call { abi, number, arguments, times, failing } => {
                let result = machine.call(abi, number, &arguments, times);
                match failing {
                    Failing::Breaks if result < 0 => return Err(broken(result.unsigned_abs() as u32)),
                    Failing::Answers if result < 0 && !child => return Ok(result),
                    _ => result,
                }
            }
            Op::Store { at, width, value } => {
                let bytes = machine.value(value).to_le_bytes();
                let (Some(to), Some(from)) = (machine.range(at, width), bytes.get(..width as usize)) else { return Err(broken(14)) };
                to.copy_from_slice(from);
                0
            }
            Op::Load { at, width, mask } => {
                let Some(from) = machine.range(at, width).filter(|from| from.len() <= 8) else { return Err(broken(14)) };
                let number = from.iter().rev().fold(0u64, |number, byte| number << 8 | u64::from(*byte));
                (number & mask).cast_signed()
            }
            Op::Find { at, length, needle, needle_length } => {
                let length = machine.value(length) as u32;
                let Some(sought) = machine.range(needle, needle_length).map(|bytes| bytes.to_vec()) else { return Err(broken(14)) };
                match machine.range(at, length) {
                    Some(found) if !sought.is_empty() => found.windows(sought.len()).filter(|window| **window == *sought).count() as i64,
                    _ => return Err(broken(14)),
                }
            }
            Op::Fork { steps, failing } => match fork() {
                Ok(0) => {
                    child = true;
                    last = (next + 1 + steps as usize).min(last);
                    0
                }
                Ok(pid) => {
                    skip = steps as usize;
                    pid.cast_signed()
                }
                Err(errno) => match failing {
                    Failing::Breaks => return Err(broken(errno.raw_os_error() as u32)),
                    Failing::Answers if !child => return Ok(-i64::from(errno.raw_os_error())),
                    _ => {
                        skip = steps as usize;
                        -i64::from(errno.raw_os_error())
                    }
                },
            },
            Op::Descend => match fork() {
                Ok(0) => 0,
                Ok(pid) => return Err(Ended::Left(crate::wait_for(pid).map_or(1, |status| (status >> 8 & 0xff) as i32))),
                Err(errno) => return Err(broken(errno.raw_os_error() as u32)),
            },
            Op::Require { left, right } => {
                if machine.value(left) != machine.value(right) {
                    return Err(broken(0));
                }
                0
            }
        };
        // What is skipped has no result, but keeps its number.
        machine.results.push(result);
        machine.results.resize(machine.results.len() + skip, 0);
        next += 1 + skip;
    }
    let result = machine.results.last().copied().unwrap_or(0);
    if child {
        stockade_sys::process::exit_now(i32::from(result < 0));
    }
    Ok(result)
}

impl Machine {
    fn range(&mut self, at: u32, length: u32) -> Option<&mut [u8]> {
        self.memory.get_mut(at as usize..)?.get_mut(..length as usize)
    }

    fn value(&self, value: Value) -> u64 {
        match value {
            Value::Number(number) => number,
            Value::Memory(at) => (self.memory.as_ptr() as u64).wrapping_add(u64::from(at)),
            Value::Result(index) => self.results.get(index as usize).copied().unwrap_or(0).cast_unsigned(),
        }
    }

    fn call(&mut self, abi: SyscallAbi, number: u32, arguments: &[Value; 6], times: u32) -> i64 {
        let arguments = arguments.map(|argument| self.value(argument));
        let mut done = 0;
        while done < times {
            match by(abi, number, arguments) {
                Err(errno) => return -i64::from(errno.raw_os_error()),
                Ok(value) if times == 1 => return value.cast_signed(),
                Ok(_) => done += 1,
            }
        }
        i64::from(done)
    }
}
