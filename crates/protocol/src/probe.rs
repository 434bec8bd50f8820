//! The prover's batches of scripts for its probe, and the probe's answers.
//!
//! An attack is a short list of system calls with prepared arguments, so that the same probe
//! tries the same act inside a sandbox and outside. The prover decides what an answer means.
//! Answers come out of a sandbox: every length is checked, and no input causes a panic.

use alloc::vec::Vec;

use crate::frame::{Malformed, Reader, Writer};

/// An argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value {
    /// A number, 64 bits wide.
    Number(u64),
    /// The address of a place in the script's memory.
    Memory(u32),
    /// The result of an earlier step, by its index.
    Result(u32),
}

/// The ABI by which a system call enters the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SyscallAbi {
    /// `syscall`.
    Native,
    /// `int 0x80`, with the numbers of i386.
    I386,
}

/// What becomes of a step that fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failing {
    /// The script stops: what it wants to try could not be prepared.
    Breaks,
    /// Nothing: the errno, negative, is its result.
    Counts,
    /// The script ends here, with this as its answer.
    Answers,
}

/// One step of a script. Its result is a number, an errno negative.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// A system call, so many times in a row or until it fails; of one that is made more
    /// than once the result is how often it succeeded, or the errno.
    Call {
        /// Its ABI.
        abi: SyscallAbi,
        /// Its number.
        number: u32,
        /// Its arguments.
        arguments: [Value; 6],
        /// How often.
        times: u32,
        /// Where it fails.
        failing: Failing,
    },
    /// Writes a value into memory: `width` bytes, little-endian.
    Store {
        /// Where.
        at: u32,
        /// How many bytes, at most 8.
        width: u32,
        /// What.
        value: Value,
    },
    /// Reads `width` bytes from memory; its result is what they have in common with `mask`.
    Load {
        /// Where.
        at: u32,
        /// How many bytes, at most 8.
        width: u32,
        /// Which bits count.
        mask: u64,
    },
    /// How often the bytes at `needle` occur in those at `at`.
    Find {
        /// Where.
        at: u32,
        /// In how many bytes.
        length: Value,
        /// The bytes to find.
        needle: u32,
        /// How many bytes that has.
        needle_length: u32,
    },
    /// A child does the next steps and ends; this process goes on behind them. Its result
    /// is the child's pid.
    Fork {
        /// How many.
        steps: u32,
        /// Where no child can be made.
        failing: Failing,
    },
    /// The rest is a child's; this process waits and ends as that does. Makes the first
    /// process of a PID namespace.
    Descend,
    /// Breaks the script off unless two values are equal.
    Require {
        /// One.
        left: Value,
        /// The other.
        right: Value,
    },
}

/// What is tried. The answer is the last step's result.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Script {
    /// Its memory, as it is at the start.
    pub memory: Vec<u8>,
    /// Its steps.
    pub ops: Vec<Op>,
}

/// The result of a script.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The last step's result; an errno is negative.
    Result(i64),
    /// This step, which only prepared the attempt, failed with this errno.
    Broken {
        /// Its index, or [`NO_PROCESS`].
        step: u32,
        /// The errno; 0: two values were not equal.
        errno: u32,
    },
    /// A signal ended it.
    Signal(u32),
    /// It became another program, which ended with this status.
    Exited(u32),
}

/// Scripts for one probe.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// Repeated in the answers: nothing that a script prints is taken for them.
    pub nonce: u64,
    /// What the probe does first, itself; the scripts run in children of it.
    pub prelude: Script,
    /// After so many seconds a script that hangs is ended by SIGALRM.
    pub timeout_s: u32,
    /// The scripts, in order.
    pub scripts: Vec<Script>,
}

const BATCH_MAGIC: u32 = u32::from_le_bytes(*b"SB\x00\x01");
const ANSWERS_MAGIC: u32 = u32::from_le_bytes(*b"SA\x00\x01");
/// In the place of a step's index: not even a process for the script could be had.
pub const NO_PROCESS: u32 = u32::MAX;
/// The status with which a probe ends that was given no batch.
pub const NO_BATCH: i32 = 77;
/// The status with which a probe ends that could not do what it should do first.
pub const NOT_PREPARED: i32 = 78;

fn write_value(w: &mut Writer, value: Value) {
    let (kind, number) = match value {
        Value::Number(number) => (0, number),
        Value::Memory(at) => (1, u64::from(at)),
        Value::Result(index) => (2, u64::from(index)),
    };
    w.u32(kind);
    w.u64(number);
}

fn read_value(r: &mut Reader<'_>) -> Result<Value, Malformed> {
    let (kind, number) = (r.u32()?, r.u64()?);
    let small = u32::try_from(number).map_err(|_| Malformed);
    match kind {
        0 => Ok(Value::Number(number)),
        1 => small.map(Value::Memory),
        2 => small.map(Value::Result),
        _ => Err(Malformed),
    }
}

fn write_failing(w: &mut Writer, failing: Failing) {
    w.u32(match failing {
        Failing::Breaks => 0,
        Failing::Counts => 1,
        Failing::Answers => 2,
    });
}

fn read_failing(r: &mut Reader<'_>) -> Result<Failing, Malformed> {
    match r.u32()? {
        0 => Ok(Failing::Breaks),
        1 => Ok(Failing::Counts),
        2 => Ok(Failing::Answers),
        _ => Err(Malformed),
    }
}

fn write_op(w: &mut Writer, op: &Op) {
    match *op {
        Op::Call { abi, number, arguments, times, failing } => {
            w.u32(if abi == SyscallAbi::Native { 0 } else { 1 });
            w.u32(number);
            // Most calls have fewer than six arguments.
            let used = arguments.iter().rposition(|value| *value != Value::Number(0)).map_or(0, |last| last + 1);
            w.u32(used as u32);
            arguments.iter().take(used).for_each(|value| write_value(w, *value));
            w.u32(times);
            write_failing(w, failing);
        }
        Op::Store { at, width, value } => {
            [2, at, width].into_iter().for_each(|number| w.u32(number));
            write_value(w, value);
        }
        Op::Load { at, width, mask } => {
            [3, at, width].into_iter().for_each(|number| w.u32(number));
            w.u64(mask);
        }
        Op::Find { at, length, needle, needle_length } => {
            [4, at].into_iter().for_each(|number| w.u32(number));
            write_value(w, length);
            [needle, needle_length].into_iter().for_each(|number| w.u32(number));
        }
        Op::Fork { steps, failing } => {
            [5, steps].into_iter().for_each(|number| w.u32(number));
            write_failing(w, failing);
        }
        Op::Descend => w.u32(6),
        Op::Require { left, right } => {
            w.u32(7);
            write_value(w, left);
            write_value(w, right);
        }
    }
}

fn read_op(r: &mut Reader<'_>) -> Result<Op, Malformed> {
    Ok(match r.u32()? {
        kind @ (0 | 1) => {
            let number = r.u32()?;
            let mut arguments = [Value::Number(0); 6];
            let used = r.u32()? as usize;
            for slot in arguments.get_mut(..used).ok_or(Malformed)? {
                *slot = read_value(r)?;
            }
            let times = r.u32()?;
            let abi = if kind == 0 { SyscallAbi::Native } else { SyscallAbi::I386 };
            Op::Call { abi, number, arguments, times, failing: read_failing(r)? }
        }
        2 => Op::Store { at: r.u32()?, width: r.u32()?, value: read_value(r)? },
        3 => Op::Load { at: r.u32()?, width: r.u32()?, mask: r.u64()? },
        4 => Op::Find { at: r.u32()?, length: read_value(r)?, needle: r.u32()?, needle_length: r.u32()? },
        5 => Op::Fork { steps: r.u32()?, failing: read_failing(r)? },
        6 => Op::Descend,
        7 => Op::Require { left: read_value(r)?, right: read_value(r)? },
        _ => return Err(Malformed),
    })
}

/// The largest memory of a script.
const MAX_MEMORY: usize = 1 << 20;

fn write_script(w: &mut Writer, script: &Script) {
    // Room for what the kernel writes is not sent.
    let used = script.memory.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    w.string(script.memory.get(..used).unwrap_or_default());
    w.u32(script.memory.len() as u32);
    w.u32(script.ops.len() as u32);
    script.ops.iter().for_each(|op| write_op(w, op));
}

fn read_script(r: &mut Reader<'_>) -> Result<Script, Malformed> {
    let used = r.string()?;
    let length = r.u32()? as usize;
    if length < used.len() || length > MAX_MEMORY {
        return Err(Malformed);
    }
    let mut memory = Vec::with_capacity(length);
    memory.extend_from_slice(used);
    memory.resize(length, 0);
    Ok(Script { memory, ops: r.list(read_op)? })
}

impl Batch {
    /// The frame's bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::default();
        w.u32(BATCH_MAGIC);
        w.u64(self.nonce);
        write_script(&mut w, &self.prelude);
        w.u32(self.timeout_s);
        w.u32(self.scripts.len() as u32);
        self.scripts.iter().for_each(|script| write_script(&mut w, script));
        w.into_bytes()
    }

    /// Reads the frame.
    ///
    /// # Errors
    /// The bytes are no batch.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader::new(bytes);
        if r.u32()? != BATCH_MAGIC {
            return Err(Malformed);
        }
        let batch = Batch { nonce: r.u64()?, prelude: read_script(&mut r)?, timeout_s: r.u32()?, scripts: r.list(read_script)? };
        if r.is_empty() { Ok(batch) } else { Err(Malformed) }
    }
}

/// Encodes the answers to a batch.
pub fn encode_answers(nonce: u64, answers: &[Answer]) -> Vec<u8> {
    let mut w = Writer::default();
    w.u32(ANSWERS_MAGIC);
    w.u64(nonce);
    w.u32(answers.len() as u32);
    for answer in answers {
        let (kind, step, value) = match *answer {
            Answer::Result(value) => (0, 0, value.cast_unsigned()),
            Answer::Broken { step, errno } => (1, step, u64::from(errno)),
            Answer::Signal(number) => (2, 0, u64::from(number)),
            Answer::Exited(status) => (3, 0, u64::from(status)),
        };
        w.u32(kind);
        w.u32(step);
        w.u64(value);
    }
    w.into_bytes()
}

/// Finds the answers at the end of what a probe printed; scripts may have printed before.
///
/// # Errors
/// They are not there, or are another batch's.
pub fn decode_answers(printed: &[u8], nonce: u64, count: usize) -> Result<Vec<Answer>, Malformed> {
    const HEAD: usize = 16;
    const ENTRY: usize = 16;
    let length = HEAD + ENTRY * count;
    let start = printed.len().checked_sub(length).ok_or(Malformed)?;
    let mut r = Reader::new(printed.get(start..).ok_or(Malformed)?);
    if r.u32()? != ANSWERS_MAGIC || r.u64()? != nonce {
        return Err(Malformed);
    }
    let answers = r.list(|r| {
        let (kind, step, value) = (r.u32()?, r.u32()?, r.u64()?);
        let small = u32::try_from(value).map_err(|_| Malformed);
        match kind {
            0 => Ok(Answer::Result(value.cast_signed())),
            1 => Ok(Answer::Broken { step, errno: small? }),
            2 => small.map(Answer::Signal),
            3 => small.map(Answer::Exited),
            _ => Err(Malformed),
        }
    })?;
    if answers.len() == count { Ok(answers) } else { Err(Malformed) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use super::*;
    use alloc::vec;

    fn batch() -> Batch {
        let call = Op::Call {
            abi: SyscallAbi::Native,
            number: 257,
            arguments: [Value::Number(u64::MAX), Value::Memory(3), Value::Number(0), Value::Result(0), Value::Number(0), Value::Number(0)],
            times: 1,
            failing: Failing::Breaks,
        };
        let ops = vec![
            call,
            Op::Store { at: 0, width: 8, value: Value::Memory(8) },
            Op::Load { at: 0, width: 4, mask: 0xff },
            Op::Find { at: 0, length: Value::Result(1), needle: 4, needle_length: 2 },
            Op::Fork { steps: 1, failing: Failing::Answers },
            Op::Descend,
            Op::Require { left: Value::Result(0), right: Value::Number(1) },
        ];
        Batch { nonce: 7, prelude: Script::default(), timeout_s: 4, scripts: vec![Script { memory: b"/etc/x\0".to_vec(), ops }] }
    }

    #[test]
    fn a_batch_survives_the_crossing_and_no_part_of_it_is_one() {
        let bytes = batch().encode();
        assert_eq!(Batch::decode(&bytes).unwrap(), batch());
        for length in 0..bytes.len() {
            assert_eq!(Batch::decode(&bytes[..length]), Err(Malformed));
        }
    }

    #[test]
    fn answers_are_found_behind_what_was_printed_and_only_with_their_nonce() {
        let answers =
            [Answer::Result(-13), Answer::Broken { step: 2, errno: 2 }, Answer::Signal(9), Answer::Exited(77), Answer::Result(i64::MAX)];
        let mut printed = b"noise".to_vec();
        printed.extend(encode_answers(9, &answers));
        assert_eq!(decode_answers(&printed, 9, 5).unwrap(), answers);
        assert_eq!(decode_answers(&printed, 8, 5), Err(Malformed));
        assert_eq!(decode_answers(&printed, 9, 4), Err(Malformed));
        assert_eq!(decode_answers(&printed[1..printed.len() - 1], 9, 5), Err(Malformed));
    }
}
