//! Creating processes: clone3 into namespaces, with copied or shared memory, vfork, and exec
//! by descriptor.
//!
//! It does not wait for processes or kill them.

use core::{arch::asm, convert::Infallible};
use rustix::fd::{FromRawFd, OwnedFd};

use crate::{Result, call::decode};

/// `struct clone_args` of clone3(2), up to `cgroup` (Linux 5.7).
#[repr(C)]
#[derive(Default)]
struct CloneArgs {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    cgroup: u64,
}

/// Flags of clone3(2), 64 bits wide: libc's `CLONE_INTO_CGROUP` is truncated to 0.
pub mod flags {
    #![allow(missing_docs, reason = "the kernel's names")]
    pub const VM: u64 = 0x100;
    pub const FILES: u64 = 0x400;
    pub const VFORK: u64 = 0x4000;
    pub const PIDFD: u64 = 0x1000;
    pub const PARENT: u64 = 0x8000;
    pub const NEWNS: u64 = 0x2_0000;
    pub const NEWCGROUP: u64 = 0x200_0000;
    pub const NEWUTS: u64 = 0x400_0000;
    pub const NEWIPC: u64 = 0x800_0000;
    pub const NEWUSER: u64 = 0x1000_0000;
    pub const NEWPID: u64 = 0x2000_0000;
    pub const NEWNET: u64 = 0x4000_0000;
    pub const INTO_CGROUP: u64 = 0x2_0000_0000;
}

const SIGCHLD: u64 = 17;

/// Memory for a child's stack.
#[repr(C, align(4096))]
struct Stack<const N: usize>([u8; N]);

/// A child process.
pub struct Child {
    /// Its pid in the caller's PID namespace.
    pub pid: i32,
    /// Its pidfd.
    pub pidfd: OwnedFd,
}

/// Copies this process into new namespaces, as fork(2) does, and runs `child` in the
/// copy, which has its own memory and descriptor table.
///
/// What `child` returns becomes the exit status. With [`flags::PARENT`] the copy is a child of this
/// process's parent, which alone can wait for it.
///
/// # Errors
/// EBUSY where this process has a second thread, whose locks would stay locked in the
/// child for ever; else the errors of clone3(2): EPERM where user namespaces are
/// forbidden, ENOSPC where their limit is 0.
pub fn clone_process(namespaces: u64, child: impl FnOnce() -> i32) -> Result<Child> {
    // "." and ".." and one directory for each thread.
    if rustix::fs::stat(c"/proc/self/task")?.st_nlink != 3 {
        return Err(crate::Errno::BUSY);
    }
    let mut pidfd: i32 = -1;
    // A sibling ends with the signal that this process ends with: clone3(2) takes no other.
    let exit_signal = if namespaces & flags::PARENT == 0 { SIGCHLD } else { 0 };
    let args = CloneArgs { flags: namespaces | flags::PIDFD, pidfd: (&raw mut pidfd) as u64, exit_signal, ..CloneArgs::default() };
    // SAFETY: the arguments live; without CLONE_VM the child goes on in its own copy of
    // this stack frame; the process is single-threaded.
    let pid = unsafe { crate::call::syscall(435, [(&raw const args) as usize, core::mem::size_of::<CloneArgs>(), 0, 0, 0, 0]) }?;
    if pid == 0 {
        // Exits without returning, so that the child does not run the parent's destructors.
        crate::process::exit_now(child());
    }
    // SAFETY: CLONE_PIDFD has just made this descriptor, and nothing else owns it.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    Ok(Child { pid: pid as i32, pidfd })
}

/// Starts a child in new namespaces that shares this process's memory (CLONE_VM) until
/// it execs or ends, and runs concurrently: the kernel copies no page, neither now nor when
/// one of the two writes. The child gets its own descriptor table.
///
/// `cgroup` is the directory of a v2 cgroup to start in (CLONE_INTO_CGROUP). What `entry`
/// returns becomes the exit status.
///
/// # Safety
/// `stack` has at least 64 KiB; `stack` and `shared` live until the child has exec'd or
/// ended. `entry` runs with the parent's thread-local storage: it may only make system calls
/// that bypass libc, and must not allocate, lock or panic.
///
/// # Errors
/// The errors of clone3(2): EPERM where user namespaces are forbidden, ENOSPC where their
/// limit is 0, EOPNOTSUPP for a cgroup that cannot hold processes.
#[inline]
pub unsafe fn clone_sharing<T: Sync>(
    namespaces: u64,
    cgroup: Option<rustix::fd::BorrowedFd<'_>>,
    stack: &mut [u8],
    entry: Entry<T>,
    shared: &T,
) -> Result<Child> {
    let mut pidfd: i32 = -1;
    let bottom = stack.as_mut_ptr() as usize;
    // The child's argument lies at the top of its stack, since this stack frame may end first.
    let top = (bottom + stack.len() - core::mem::size_of::<Trampoline<'_, T>>()) & !63;
    let trampoline = top as *mut Trampoline<'_, T>;
    // SAFETY: aligned, within the stack, and not used yet.
    unsafe { trampoline.write(Trampoline { entry, argument: shared }) };
    let mut args = CloneArgs {
        flags: namespaces | flags::PIDFD | flags::VM,
        pidfd: (&raw mut pidfd) as u64,
        exit_signal: SIGCHLD,
        stack: bottom as u64,
        stack_size: (top - bottom) as u64,
        ..CloneArgs::default()
    };
    if let Some(fd) = cgroup {
        args.flags |= flags::INTO_CGROUP;
        args.cgroup = rustix::fd::AsRawFd::as_raw_fd(&fd) as u64;
    }
    let answer: isize;
    // SAFETY: the arguments live; in the child rax is 0 and the stack pointer is `top`,
    // from which `enter` is called and never returns; the caller vouches for the rest.
    unsafe {
        asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "mov rdi, r13",
            "call r12",
            "ud2",
            "2:",
            inlateout("rax") 435isize => answer,
            in("rdi") &raw const args, in("rsi") core::mem::size_of::<CloneArgs>(),
            in("r12") enter::<T> as extern "C" fn(*const Trampoline<'_, T>) -> !,
            in("r13") trampoline,
            out("rcx") _, out("r11") _,
        );
    }
    let pid = decode(answer)? as i32;
    // SAFETY: CLONE_PIDFD has just made this descriptor, and nothing else owns it.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    Ok(Child { pid, pidfd })
}

/// The function that a child with shared memory runs. It returns an exit status.
pub type Entry<T> = fn(&T) -> i32;

struct Trampoline<'a, T> {
    entry: Entry<T>,
    argument: &'a T,
}

#[inline]
extern "C" fn enter<T>(trampoline: *const Trampoline<'_, T>) -> ! {
    // SAFETY: it lies in a stack frame that CLONE_VFORK keeps alive, or on the child's stack.
    let Trampoline { entry, argument } = unsafe { &*trampoline };
    crate::process::exit_now(entry(argument))
}

/// clone(2) with CLONE_VM and CLONE_VFORK: the child runs `entry` on `stack`, and the kernel
/// suspends the calling thread until the child has exec'd or ended.
unsafe fn clone_borrowing<T, const N: usize>(
    more: u64,
    pidfd: *mut i32,
    stack: &mut Stack<N>,
    entry: Entry<T>,
    argument: &T,
) -> Result<i32> {
    let trampoline = Trampoline { entry, argument };
    let top = stack.0.as_mut_ptr() as usize + N;
    let answer: isize;
    // SAFETY: CLONE_VFORK keeps this frame alive while the child uses its stack and
    // the trampoline; in the child rax is 0 and the stack pointer is `top`, from which
    // `enter` is called and never returns.
    unsafe {
        asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "and rsp, -16",
            "mov rdi, r13",
            "call r12",
            "ud2",
            "2:",
            inlateout("rax") 56isize => answer,
            in("rdi") flags::VM | flags::VFORK | SIGCHLD | more,
            in("rsi") top, in("rdx") pidfd, in("r10") 0, in("r8") 0,
            in("r12") enter::<T> as extern "C" fn(*const Trampoline<'_, T>) -> !,
            in("r13") &raw const trampoline,
            out("rcx") _, out("r11") _,
        );
    }
    decode(answer).map(|pid| pid as i32)
}

/// Creates a user namespace whose only process has ended when this returns: an idmapped mount
/// needs the namespace, not a process in it. The caller writes the id maps, then reaps the
/// zombie through the pidfd.
///
/// # Errors
/// EPERM where user namespaces are forbidden, ENOSPC where their number is limited.
pub fn user_namespace_holder() -> Result<Child> {
    let mut stack = Stack::<4096>([0; 4096]);
    let mut pidfd: i32 = -1;
    // SAFETY: the child returns at once and touches nothing.
    let pid = unsafe { clone_borrowing(flags::NEWUSER | flags::PIDFD, &raw mut pidfd, &mut stack, |(): &()| 0, &()) }?;
    // SAFETY: CLONE_PIDFD has just made this descriptor, and nothing else owns it.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    Ok(Child { pid, pidfd })
}

/// Runs `entry` in a child in new namespaces that shares this process's memory and
/// descriptors, and waits until it has ended. Returns the pid, which the caller must reap.
///
/// A process that shares its memory may join a user namespace, but unshare(CLONE_NEWUSER)
/// fails there with EINVAL.
///
/// # Safety
/// `entry` makes only system calls that bypass libc and never panics.
///
/// # Errors
/// EPERM where namespaces are forbidden, ENOSPC where their number is limited.
pub unsafe fn in_namespaces<T>(namespaces: u64, entry: Entry<T>, argument: &T) -> Result<i32> {
    let mut stack = Stack::<16384>([0; 16384]);
    // SAFETY: the caller vouches for `entry`.
    unsafe { clone_borrowing(namespaces | flags::FILES, core::ptr::null_mut(), &mut stack, entry, argument) }
}

/// Moves the calling process into new namespaces with unshare(2).
///
/// # Errors
/// EPERM without CAP_SYS_ADMIN in the user namespace, ENOSPC at the limit of
/// `/proc/sys/user`.
#[inline]
pub fn unshare(namespaces: u64) -> Result<()> {
    // SAFETY: an integer only. CLONE_FILES and CLONE_FS are not among `flags`.
    unsafe { crate::call::syscall(272, [namespaces as usize, 0, 0, 0, 0, 0]) }.map(drop)
}

/// Starts a child as vfork(2) does, with clone(2): the sandbox's filter makes clone3 fail
/// with ENOSYS. `entry` returns only when it failed; its value becomes the exit status.
///
/// # Safety
/// `entry` makes only system calls that bypass libc and never panics.
///
/// # Errors
/// EAGAIN at the process limit, ENOMEM.
pub unsafe fn vfork<T>(entry: Entry<T>, argument: &T) -> Result<i32> {
    let mut stack = Stack::<16384>([0; 16384]);
    // SAFETY: the caller vouches for `entry`.
    unsafe { clone_borrowing(0, core::ptr::null_mut(), &mut stack, entry, argument) }
}

/// Replaces this process by the program behind `program`, with `stockade-executor` as `argv[0]`,
/// no further arguments and no environment. Returns the errno when that failed.
pub fn exec_alone(program: rustix::fd::BorrowedFd<'_>) -> crate::Errno {
    let argv = [c"stockade-executor".as_ptr().cast(), core::ptr::null()];
    let envp = [core::ptr::null::<u8>()];
    // SAFETY: both arrays live, hold NUL-terminated strings and end in null.
    match unsafe { exec_descriptor(program, argv.as_ptr(), envp.as_ptr()) } {
        Ok(never) => match never {},
        Err(errno) => errno,
    }
}

/// Replaces this process by the program behind `program`. Returns only when it failed.
///
/// # Safety
/// Every string is NUL-terminated; both arrays end in a null pointer.
pub unsafe fn exec_descriptor(program: rustix::fd::BorrowedFd<'_>, argv: *const *const u8, envp: *const *const u8) -> Result<Infallible> {
    const AT_EMPTY_PATH: usize = 0x1000;
    let fd = rustix::fd::AsRawFd::as_raw_fd(&program) as usize;
    // SAFETY: the caller vouches for both arrays.
    let failed = unsafe { crate::call::syscall(322, [fd, c"".as_ptr() as usize, argv as usize, envp as usize, AT_EMPTY_PATH, 0]) };
    Err(failed.err().unwrap_or(crate::Errno::NOEXEC))
}

/// Replaces this process by the program at `path`. Returns only when it failed.
///
/// # Safety
/// `path` and every string are NUL-terminated; both arrays end in a null pointer.
pub unsafe fn exec_path(path: *const u8, argv: *const *const u8, envp: *const *const u8) -> Result<Infallible> {
    // SAFETY: the caller vouches for all three.
    let failed = unsafe { crate::call::syscall(59, [path as usize, argv as usize, envp as usize, 0, 0, 0]) };
    Err(failed.err().unwrap_or(crate::Errno::NOEXEC))
}
