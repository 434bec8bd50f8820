//! Loading a filter and answering its notifications (seccomp(2), seccomp_unotify(2)).
//!
//! It does not use libseccomp's loader, which allocates and keeps the listener in a global:
//! the instructions are ready before the clone, so loading is one system call. Notifications
//! are answered only with an error: after `CONTINUE` the payload could change the arguments
//! that were checked.

use rustix::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use crate::{Result, call::syscall};

/// One BPF instruction, `struct sock_filter`.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instruction(pub u64);

impl Instruction {
    /// The longest program that a kernel takes (BPF_MAXINSNS).
    pub const MAX_PER_FILTER: usize = 4096;

    /// The instructions of these words.
    pub const fn of_words(words: &[u64]) -> &[Instruction] {
        // SAFETY: `Instruction` is a transparent wrapper of one word.
        unsafe { core::slice::from_raw_parts(words.as_ptr().cast(), words.len()) }
    }
}

/// Instructions for a filter that is written by hand, for the helper processes, whose system
/// calls are known.
pub mod program {
    use super::Instruction;

    /// The call is made.
    pub const ALLOW: u32 = 0x7fff_0000;
    /// The process ends.
    pub const KILL_PROCESS: u32 = 0x8000_0000;
    /// AUDIT_ARCH_X86_64, the only architecture that is allowed.
    pub const ARCHITECTURE_X86_64: u32 = 0xc000_003e;
    /// The offset of the call's number in `struct seccomp_data`.
    pub const NUMBER: u32 = 0;
    /// The offset of the architecture.
    pub const ARCHITECTURE: u32 = 4;

    const fn instruction(code: u16, when_true: u8, when_false: u8, k: u32) -> Instruction {
        Instruction(code as u64 | (when_true as u64) << 16 | (when_false as u64) << 24 | (k as u64) << 32)
    }
    /// Loads a word of `struct seccomp_data`.
    pub const fn load(offset: u32) -> Instruction {
        instruction(0x20, 0, 0, offset)
    }
    /// Loads the low half of an argument.
    pub const fn load_argument(index: u32) -> Instruction {
        load(16 + 8 * index)
    }
    /// Loads the high half of an argument.
    pub const fn load_high_half(index: u32) -> Instruction {
        load(20 + 8 * index)
    }
    /// Clears all other bits of the loaded word.
    pub const fn and(mask: u32) -> Instruction {
        instruction(0x54, 0, 0, mask)
    }
    /// Skips `when_true` instructions where the loaded word equals `value`, else `when_false`.
    pub const fn equal(value: u32, when_true: u8, when_false: u8) -> Instruction {
        instruction(0x15, when_true, when_false, value)
    }
    /// Skips `when_true` instructions where any bit of `mask` is set, else `when_false`.
    pub const fn any_bit(mask: u32, when_true: u8, when_false: u8) -> Instruction {
        instruction(0x45, when_true, when_false, mask)
    }
    /// Skips `count` instructions.
    pub const fn jump(count: u32) -> Instruction {
        instruction(0x05, 0, 0, count)
    }
    /// Ends the program with this action.
    pub const fn answer(action: u32) -> Instruction {
        instruction(0x06, 0, 0, action)
    }
}

#[repr(C)]
struct Program {
    length: u16,
    instructions: *const u8,
}

const INSTRUCTION_BYTES: usize = 8;

/// `key`: an argument that the kernel does not read, and filters see.
fn load(filter: &[u8], flags: usize, key: u64) -> Result<usize> {
    const SECCOMP_SET_MODE_FILTER: usize = 1;
    let Ok(length) = u16::try_from(filter.len() / INSTRUCTION_BYTES) else { return Err(crate::Errno::TOOBIG) };
    let program = Program { length, instructions: filter.as_ptr() };
    // SAFETY: the program points to `length` live instructions; the kernel copies and
    // verifies them, wherever they lie.
    unsafe { syscall(317, [SECCOMP_SET_MODE_FILTER, flags, (&raw const program) as usize, key as usize, 0, 0]) }
}

fn bytes_of(filter: &[Instruction]) -> &[u8] {
    // SAFETY: an instruction is a word without padding.
    unsafe { core::slice::from_raw_parts(filter.as_ptr().cast(), filter.len() * INSTRUCTION_BYTES) }
}

/// Loads a filter without a listener for its notifications.
///
/// # Errors
/// EACCES without no_new_privs, EINVAL for a filter that the kernel rejects.
pub fn load_filter(filter: &[Instruction]) -> Result<()> {
    load(bytes_of(filter), 0, 0).map(drop)
}

/// Loads a filter whose instructions are bytes as the kernel has them in memory. An earlier filter
/// may ask for `key` in the fourth argument.
///
/// # Errors
/// As [`load_filter`].
pub fn load_further(filter: &[u8], key: u64) -> Result<()> {
    load(filter, 0, key).map(drop)
}

/// Loads a filter and returns its listener. On Linux 5.19 and later only a fatal signal
/// interrupts a call that waits for its answer (WAIT_KILLABLE_RECV).
///
/// # Errors
/// As [`load_filter`]; EBUSY where an outer filter has a listener already.
pub fn load_filter_with_listener(filter: &[Instruction]) -> Result<OwnedFd> {
    const NEW_LISTENER: usize = 8;
    const WAIT_KILLABLE_RECV: usize = 32;
    let filter = bytes_of(filter);
    let fd = match load(filter, NEW_LISTENER | WAIT_KILLABLE_RECV, 0) {
        Err(crate::Errno::INVAL) => load(filter, NEW_LISTENER, 0)?,
        other => other?,
    };
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// A system call that waits for an answer, `struct seccomp_notif`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Notification {
    /// Identifies the waiting call.
    pub id: u64,
    /// The waiting thread, in the listener's PID namespace.
    pub pid: u32,
    flags: u32,
    /// System call number.
    pub number: i32,
    /// AUDIT_ARCH_*.
    pub architecture: u32,
    instruction_pointer: u64,
    /// Its arguments.
    pub arguments: [u64; 6],
}

/// Fetches a waiting call.
///
/// # Errors
/// ENOENT where the calling thread has been killed.
pub fn receive(listener: impl AsFd) -> Result<Notification> {
    const SECCOMP_IOCTL_NOTIF_RECV: usize = 0xc050_2100;
    let mut notification = Notification::default();
    // SAFETY: the structure is zeroed, as the kernel demands, and has its 80 bytes.
    unsafe { syscall(16, [listener.as_fd().as_raw_fd() as usize, SECCOMP_IOCTL_NOTIF_RECV, (&raw mut notification) as usize, 0, 0, 0]) }?;
    Ok(notification)
}

/// Answers a waiting call with an error.
///
/// # Errors
/// ENOENT where the calling thread has been killed.
pub fn refuse(listener: impl AsFd, id: u64, errno: crate::Errno) -> Result<()> {
    #[repr(C)]
    struct Response {
        id: u64,
        value: i64,
        error: i32,
        flags: u32,
    }
    const SECCOMP_IOCTL_NOTIF_SEND: usize = 0xc018_2101;
    let response = Response { id, value: 0, error: -errno.raw_os_error(), flags: 0 };
    // SAFETY: the structure lives and has its 24 bytes.
    unsafe { syscall(16, [listener.as_fd().as_raw_fd() as usize, SECCOMP_IOCTL_NOTIF_SEND, (&raw const response) as usize, 0, 0, 0]) }
        .map(drop)
}
