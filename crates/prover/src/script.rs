//! Writing scripts for the probe.
//!
//! System calls are named; numbers come from libseccomp. A name that it does not know
//! makes a call that no kernel has, which the control of the attack then shows.

use stockade_policy::filter::names;
use stockade_protocol::probe::{Failing, Op, Script, SyscallAbi, Value};

/// A number.
pub(crate) fn n(number: i64) -> Value {
    Value::Number(number.cast_unsigned())
}

/// `AT_FDCWD`.
pub(crate) const CWD: Value = Value::Number(-100i64 as u64);

/// A script in the making.
#[derive(Default)]
pub(crate) struct Builder {
    script: Script,
}

/// Writes a script.
pub(crate) fn script(write: impl FnOnce(&mut Builder)) -> Script {
    let mut builder = Builder::default();
    write(&mut builder);
    builder.script
}

fn number_of(name: &str) -> u32 {
    names::number(name).unwrap_or(u32::MAX >> 2)
}

impl Builder {
    fn memory(&mut self, bytes: &[u8]) -> Value {
        let at = self.script.memory.len().next_multiple_of(8);
        self.script.memory.resize(at, 0);
        self.script.memory.extend_from_slice(bytes);
        Value::Memory(u32::try_from(at).unwrap_or(u32::MAX))
    }

    fn push(&mut self, op: Op) -> Value {
        let index = self.script.ops.len();
        self.script.ops.push(op);
        Value::Result(u32::try_from(index).unwrap_or(u32::MAX))
    }

    fn call(&mut self, name: &str, arguments: &[Value], times: u32, failing: Failing) -> Value {
        self.by_number(number_of(name), arguments, times, failing)
    }

    fn by_number(&mut self, number: u32, arguments: &[Value], times: u32, failing: Failing) -> Value {
        let mut all = [n(0); 6];
        all.iter_mut().zip(arguments).for_each(|(slot, argument)| *slot = *argument);
        self.push(Op::Call { abi: SyscallAbi::Native, number, arguments: all, times, failing })
    }

    /// A text with its NUL.
    pub(crate) fn text(&mut self, text: &str) -> Value {
        self.memory(&[text.as_bytes(), b"\0"].concat())
    }

    /// Bytes.
    pub(crate) fn bytes(&mut self, bytes: &[u8]) -> Value {
        self.memory(bytes)
    }

    /// Room for what the kernel writes.
    pub(crate) fn space(&mut self, length: usize) -> Value {
        self.memory(&vec![0; length])
    }

    /// A call without which the attack cannot be tried.
    pub(crate) fn need(&mut self, name: &str, arguments: &[Value]) -> Value {
        self.call(name, arguments, 1, Failing::Breaks)
    }

    /// A call that may fail.
    pub(crate) fn may(&mut self, name: &str, arguments: &[Value]) -> Value {
        self.call(name, arguments, 1, Failing::Counts)
    }

    /// The attack: where it fails, its errno is the answer.
    pub(crate) fn attack(&mut self, name: &str, arguments: &[Value]) -> Value {
        self.call(name, arguments, 1, Failing::Answers)
    }

    /// An attack by number.
    pub(crate) fn attack_number(&mut self, number: u32, arguments: &[Value]) -> Value {
        self.by_number(number, arguments, 1, Failing::Answers)
    }

    /// An attack by the i386 ABI.
    pub(crate) fn attack_int80(&mut self, number: u32, arguments: &[Value]) -> Value {
        let mut all = [n(0); 6];
        all.iter_mut().zip(arguments).for_each(|(slot, argument)| *slot = *argument);
        self.push(Op::Call { abi: SyscallAbi::I386, number, arguments: all, times: 1, failing: Failing::Answers })
    }

    /// An attack that is made again and again, until it fails.
    pub(crate) fn repeat(&mut self, times: u32, name: &str, arguments: &[Value]) -> Value {
        self.call(name, arguments, times, Failing::Answers)
    }

    /// Reads from memory.
    pub(crate) fn load(&mut self, at: Value, offset: u32, width: u32, mask: u64) -> Value {
        self.push(Op::Load { at: place(at) + offset, width, mask })
    }

    /// How often bytes occur in memory.
    pub(crate) fn find(&mut self, at: Value, length: Value, needle: &[u8]) -> Value {
        let at_needle = place(self.memory(needle));
        self.push(Op::Find { at: place(at), length, needle: at_needle, needle_length: u32::try_from(needle.len()).unwrap_or(u32::MAX) })
    }

    /// What a child does; gives its pid. `failing`: that no child can be made is the answer,
    /// or breaks the script.
    pub(crate) fn fork(&mut self, failing: Failing, child: impl FnOnce(&mut Self)) -> Value {
        let index = self.script.ops.len();
        let pid = self.push(Op::Fork { steps: 0, failing });
        child(self);
        let steps = u32::try_from(self.script.ops.len() - index - 1).unwrap_or(u32::MAX);
        if let Some(op) = self.script.ops.get_mut(index) {
            *op = Op::Fork { steps, failing };
        }
        pid
    }

    /// The rest is done by a child, for which this process waits.
    pub(crate) fn descend(&mut self) {
        self.push(Op::Descend);
    }

    /// Two values must be equal, or the attack cannot be tried.
    pub(crate) fn require(&mut self, left: Value, right: Value) {
        self.push(Op::Require { left, right });
    }

    /// Opens a file; gives its descriptor.
    pub(crate) fn open(&mut self, path: &str, flags: i64) -> Value {
        let path = self.text(path);
        self.need("openat", &[CWD, path, n(flags), n(0o600)])
    }

    /// Reads the first 16 KiB of a file; gives where, and how many bytes.
    pub(crate) fn read(&mut self, path: &str) -> (Value, Value) {
        let path = self.text(path);
        let fd = self.attack("openat", &[CWD, path, n(0)]);
        let to = self.space(READ);
        let length = self.attack("read", &[fd, to, n(READ as i64)]);
        (to, length)
    }
}

const READ: usize = 16 << 10;

fn place(value: Value) -> u32 {
    match value {
        Value::Memory(at) => at,
        // Outside every script's memory: the script breaks at this step.
        _ => u32::MAX >> 1,
    }
}

/// A script of one call.
pub(crate) fn one(name: &str, arguments: &[Value]) -> Script {
    script(|b| {
        b.attack(name, arguments);
    })
}
