//! What a program does before its libc starts.
//!
//! glibc's start executes some eighty CPUID instructions, which cost half a millisecond in
//! a virtual machine. [`before_libc!`](crate::before_libc) puts a function in front of it, by
//! the entry point of the executable, and that function can start an [`Early`] child, which
//! works beside libc's start and then waits for a place to go on at.
//!
//! Nothing is relocated yet there, and no thread-local storage exists. Such code has its
//! stack, plain statics and system calls. It must not use what the linker's work is still to
//! fill in: memcpy and its kin, tables of pointers, descriptors that libc closes; nor call
//! another crate's function that is not `#[inline]`, which is reached through such a table.
//! One that does ends every run at its first instruction.

use core::{
    arch::asm,
    cell::UnsafeCell,
    mem::MaybeUninit,
    sync::atomic::{AtomicI32, AtomicU64, AtomicUsize, Ordering},
};

use rustix::fd::{FromRawFd, IntoRawFd, OwnedFd};

use crate::{
    call::syscall,
    clone::{Child, Entry, clone_sharing},
    process,
};

/// Has the program begin with this function, of type `extern "C" fn(Start<'_>)`, and go on
/// into libc when it returns. For an executable linked with `-e stockade_start`.
#[macro_export]
macro_rules! before_libc {
    ($function:path) => {
        // What the kernel or the dynamic linker has left for libc is handed on as it was:
        // the stack, and in rdx what is to be called at the end.
        core::arch::global_asm!(
            ".globl stockade_start",
            "stockade_start:",
            "xor ebp, ebp",
            "mov rbx, rsp",
            "mov r12, rdx",
            "mov rdi, rsp",
            "and rsp, -16",
            "call {function}",
            "mov rsp, rbx",
            "mov rdx, r12",
            "jmp _start",
            function = sym $function,
        );
    };
}

/// What the kernel has laid on the stack of a program that begins.
#[repr(transparent)]
pub struct Start<'a>(&'a usize);

impl<'a> Start<'a> {
    #[inline]
    fn word(&self, index: usize) -> usize {
        // SAFETY: every caller stays within the count of arguments and the nulls that end
        // arguments, variables and auxiliary vector (SysV ABI, 3.4.1).
        unsafe { (self.0 as *const usize).add(index).read_volatile() }
    }

    #[inline]
    fn strings(&self, first: usize) -> impl Iterator<Item = Word<'a>> {
        (first..)
            .map_while(|index| core::ptr::NonNull::new(self.word(index) as *mut u8).map(|start| Word(start, core::marker::PhantomData)))
    }

    /// The program's arguments, its name among them.
    #[inline]
    pub fn arguments(&self) -> impl Iterator<Item = Word<'a>> {
        self.strings(1)
    }

    /// The environment's variables, as `NAME=value`.
    #[inline]
    pub fn variables(&self) -> impl Iterator<Item = Word<'a>> {
        self.strings(self.word(0) + 2)
    }

    /// An entry of the auxiliary vector (getauxval(3)).
    #[inline]
    pub fn auxiliary(&self, wanted: usize) -> Option<usize> {
        let mut at = self.word(0) + 2;
        while self.word(at) != 0 {
            at += 1;
        }
        at += 1;
        while self.word(at) != 0 {
            if self.word(at) == wanted {
                return Some(self.word(at + 1));
            }
            at += 2;
        }
        None
    }

    /// Makes the program's own data private to it, which the linker's work is about to write
    /// to nearly all of. Beside a child that shares this memory each such page would have to
    /// be taken from the other CPU first, by an interrupt of some ten microseconds.
    #[inline]
    pub fn settle_data(&self) {
        const AT_PHDR: usize = 3;
        const AT_PHNUM: usize = 5;
        const PT_LOAD: u32 = 1;
        const PT_PHDR: u32 = 6;
        const WRITABLE: u32 = 2;
        const PAGE: usize = 4096;
        let (Some(table), Some(count)) = (self.auxiliary(AT_PHDR), self.auxiliary(AT_PHNUM)) else { return };
        // SAFETY: the kernel has mapped the executable's program headers there, so many.
        let header = |index: usize| unsafe { (table as *const ProgramHeader).add(index).read_volatile() };
        let moved_by = (0..count).map(header).find(|header| header.kind == PT_PHDR).map_or(0, |itself| table.wrapping_sub(itself.address));
        for segment in (0..count).map(header).filter(|header| header.kind == PT_LOAD && header.flags & WRITABLE != 0) {
            let from = moved_by.wrapping_add(segment.address);
            let page = from & !(PAGE - 1);
            process::populate(page, from + segment.in_file - page);
        }
    }

    /// Makes the part of the stack ready that a run uses, below where it is now.
    #[inline]
    pub fn settle_stack(&self) {
        const USUAL: usize = 64 << 10;
        const PAGE: usize = 4096;
        let here = core::ptr::from_ref(self) as usize & !(PAGE - 1);
        process::populate(here - USUAL, USUAL);
    }
}

/// `Elf64_Phdr` (elf(5)).
#[repr(C)]
#[derive(Clone, Copy)]
struct ProgramHeader {
    kind: u32,
    flags: u32,
    offset: usize,
    address: usize,
    physical: usize,
    in_file: usize,
    in_memory: usize,
    alignment: usize,
}

/// A string of the first stack.
pub struct Word<'a>(core::ptr::NonNull<u8>, core::marker::PhantomData<&'a u8>);

impl Word<'_> {
    /// Whether it begins like this.
    #[inline]
    pub fn begins_with(&self, start: &[u8]) -> bool {
        // SAFETY: a string of the kernel's, read no further than its NUL, which equals no
        // byte of `start`. Volatile, or the compiler might call libc's memcmp.
        (0..start.len()).all(|index| start.get(index) == Some(&unsafe { self.0.add(index).read_volatile() }))
    }

    /// Whether it is this.
    #[inline]
    pub fn is(&self, whole: &[u8]) -> bool {
        // SAFETY: all bytes before were found to be no NUL.
        self.begins_with(whole) && unsafe { self.0.add(whole.len()).read_volatile() } == 0
    }
}

/// Whether descriptors 0, 1 and 2 are open: else the next that is made would be one of them.
#[inline]
pub fn has_streams() -> bool {
    (0..3).all(process::is_open)
}

/// Says why on stderr, and ends the process.
#[inline]
pub fn end_with(why: &[u8], status: i32) -> ! {
    const WRITE: usize = 1;
    const EXIT_GROUP: usize = 231;
    loop {
        // SAFETY: the bytes live; the other call passes none.
        unsafe {
            let _unheard = syscall(WRITE, [2, why.as_ptr() as usize, why.len(), 0, 0, 0]);
            let _never_returns = syscall(EXIT_GROUP, [status as usize, 0, 0, 0, 0, 0]);
        }
    }
}

/// The type of the file system at `path` (statfs(2)).
#[inline]
pub fn file_system_type(path: &core::ffi::CStr) -> Option<i64> {
    const STATFS: usize = 137;
    // `struct statfs`, whose first field it is.
    let mut found = MaybeUninit::<[i64; 15]>::uninit();
    // SAFETY: the path ends in NUL, and the structure has 120 bytes.
    unsafe { syscall(STATFS, [path.as_ptr() as usize, found.as_mut_ptr() as usize, 0, 0, 0, 0]) }.ok()?;
    // SAFETY: the kernel has filled it in.
    Some(unsafe { found.as_ptr().cast::<i64>().read() })
}

/// The child's stack: what it runs before and after it goes on.
const STACK: usize = 256 << 10;

#[repr(C, align(4096))]
struct Stack(UnsafeCell<[u8; STACK]>);

// SAFETY: only the one child uses it, which `begin` starts once.
unsafe impl Sync for Stack {}

/// The one child of a program that is begun before libc, and what it has in common with its
/// parent: a pipe on which it reports, and a pair of sockets by which it is spoken to.
pub struct Early {
    /// 0: there is none.
    pid: AtomicI32,
    pidfd: AtomicI32,
    /// Read and write end.
    status: [AtomicI32; 2],
    /// The parent's end and the child's.
    handover: [AtomicI32; 2],
    failure: AtomicU64,
    next: AtomicUsize,
    argument: AtomicUsize,
    storage: AtomicUsize,
    stack: Stack,
}

/// A child that was begun, and all four ends, which the parent has as well.
pub struct Begun {
    /// The child.
    pub child: Child,
    /// The pipe's read and write end.
    pub status: [OwnedFd; 2],
    /// The parent's end and the child's.
    pub handover: [OwnedFd; 2],
}

impl Early {
    /// None yet.
    pub const fn new() -> Self {
        Early {
            pid: AtomicI32::new(0),
            pidfd: AtomicI32::new(0),
            status: [const { AtomicI32::new(0) }; 2],
            handover: [const { AtomicI32::new(0) }; 2],
            failure: AtomicU64::new(0),
            next: AtomicUsize::new(0),
            argument: AtomicUsize::new(0),
            storage: AtomicUsize::new(0),
            stack: Stack(UnsafeCell::new([0; STACK])),
        }
    }

    /// Starts a child in new namespaces that runs `first` and then [`Early::go_on`]. What
    /// cannot be made is left to be made later, with an error for it.
    ///
    /// # Safety
    /// Called once, before libc, with a `first` that keeps to what the module says.
    #[inline]
    pub unsafe fn begin(&'static self, namespaces: u64, first: Entry<Early>) {
        const PIPE2: usize = 293;
        const SOCKETPAIR: usize = 53;
        const O_CLOEXEC: usize = 0x8_0000;
        const SEQPACKET_CLOEXEC: usize = 5 | O_CLOEXEC;
        let (status, handover) = (self.status.as_ptr() as usize, self.handover.as_ptr() as usize);
        // SAFETY: each writes two numbers, and there is room for two.
        if unsafe { syscall(PIPE2, [status, O_CLOEXEC, 0, 0, 0, 0]) }.is_err() {
            return;
        }
        // SAFETY: as above. 1 is AF_UNIX.
        if unsafe { syscall(SOCKETPAIR, [1, SEQPACKET_CLOEXEC, 0, handover, 0, 0]) }.is_err() {
            return close(&self.status);
        }
        // SAFETY: nothing else ever borrows the stack, and it lives for ever, as this does.
        let started = unsafe { clone_sharing(namespaces, None, &mut *self.stack.0.get(), first, self) };
        match started {
            Ok(child) => {
                process::send_to_other_cpu(child.pid);
                self.pidfd.store(child.pidfd.into_raw_fd(), Ordering::Relaxed);
                self.pid.store(child.pid, Ordering::Relaxed);
            }
            Err(_) => {
                close(&self.status);
                close(&self.handover);
            }
        }
    }

    /// Whoever calls this first gets the child, if there is one.
    pub fn take(&self) -> Option<Begun> {
        let pid = self.pid.swap(0, Ordering::Relaxed);
        // SAFETY: `begin` has made these descriptors for whoever asks first.
        let own = |number: &AtomicI32| unsafe { OwnedFd::from_raw_fd(number.load(Ordering::Relaxed)) };
        (pid != 0).then(|| Begun {
            child: Child { pid, pidfd: own(&self.pidfd) },
            status: [own(&self.status[0]), own(&self.status[1])],
            handover: [own(&self.handover[0]), own(&self.handover[1])],
        })
    }

    /// Tells the child where to go on: at `next`, with libc's state as this process has it.
    /// It looks there when the first message comes.
    ///
    /// # Safety
    /// As [`clone_sharing`] has it for `entry` and `shared`.
    pub unsafe fn lead<T: Sync>(&self, next: Entry<T>, shared: &T) {
        let storage: usize;
        // SAFETY: the first word of the thread control block is its own address (ELF TLS
        // for x86-64, 4.3).
        unsafe { asm!("mov {}, fs:0", out(reg) storage, options(nostack, readonly, preserves_flags)) };
        self.storage.store(storage, Ordering::Relaxed);
        self.argument.store(core::ptr::from_ref(shared) as usize, Ordering::Relaxed);
        self.next.store(next as usize, Ordering::Release);
    }

    /// For the child: the number of its parent's end.
    #[inline]
    pub fn parents_end(&self) -> u32 {
        self.handover[0].load(Ordering::Relaxed).unsigned_abs()
    }

    /// For the child: leaves word of a failure.
    #[inline]
    pub fn fail(&self, failure: u64) {
        self.failure.store(failure, Ordering::Relaxed);
    }

    /// What the child has left, 0 if nothing.
    pub fn failure(&self) -> u64 {
        self.failure.load(Ordering::Relaxed)
    }

    /// For the child: waits for the first message, leaves it to be read, and goes on where
    /// the parent has said. A parent that is gone, or refuses, sends none.
    #[inline]
    pub fn go_on(&self) -> i32 {
        const RECVFROM: usize = 45;
        const MSG_PEEK: usize = 2;
        const MSG_DONTWAIT: usize = 0x40;
        const ARCH_PRCTL: usize = 158;
        const ARCH_SET_FS: usize = 0x1002;
        const LOST: i32 = 125;
        let mut word = 0u8;
        let end = self.handover[1].load(Ordering::Relaxed) as usize;
        // SAFETY: as below.
        let _or_later =
            process::soon(|| unsafe { syscall(RECVFROM, [end, (&raw mut word) as usize, 1, MSG_PEEK | MSG_DONTWAIT, 0, 0]) }.ok());
        loop {
            // SAFETY: it writes one byte at most, and there is one.
            match unsafe { syscall(RECVFROM, [end, (&raw mut word) as usize, 1, MSG_PEEK, 0, 0]) } {
                Ok(1) => break,
                Err(crate::Errno::INTR) => {}
                _ => return LOST,
            }
        }
        let next = self.next.load(Ordering::Acquire);
        let storage = self.storage.load(Ordering::Relaxed);
        // SAFETY: the parent's own thread-local storage, which a process that is cloned
        // later finds there as well.
        if next == 0 || unsafe { syscall(ARCH_PRCTL, [ARCH_SET_FS, storage, 0, 0, 0, 0]) }.is_err() {
            return LOST;
        }
        // SAFETY: `lead` has stored both, and vouches for the pair; a reference to any `T`
        // with a size is one pointer.
        let next = unsafe { core::mem::transmute::<usize, fn(*const ()) -> i32>(next) };
        next(self.argument.load(Ordering::Relaxed) as *const ())
    }
}

impl Default for Early {
    fn default() -> Self {
        Early::new()
    }
}

#[inline]
fn close(both: &[AtomicI32; 2]) {
    for number in both {
        let number = number.load(Ordering::Relaxed).unsigned_abs();
        // Nothing is left to be done where this fails.
        let _closed = process::close_range(number, number);
    }
}
