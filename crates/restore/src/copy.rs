//! The exchange of memory, and of what the kernel keeps for a thread: the privileged-looking
//! sequence that needs no privilege, top to bottom.
//!
//! Order matters: what a step reads is unmapped only behind it, and no signal is delivered
//! before the handlers' memory is there.

use core::{convert::Infallible, slice};

use rustix::{
    fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd},
    fs::fstat,
};
use stockade_protocol::memory_image::{
    DESCRIPTOR, HEADER_LENGTH, HIGHEST, Header, LOWEST, MemoryImage, SIGNALS, SegmentKind, parse, place, protection,
};
use stockade_sys::{
    memory::{AddressRange, map_file_at, map_stack_at, map_zeros_at, move_to, populate, read_into, unmap},
    thread_state::{
        ThreadAddresses, has_seccomp_filter, set_memory_bounds, set_name, set_signal_action, set_signal_mask, set_thread_addresses,
        set_umask,
    },
};

use crate::{
    Failure,
    arguments::{InitialArguments, MovedArguments},
    to,
};

/// Where the vDSO waits: its parts lie on both sides of its code.
const VDSO_WAITS: u64 = place::VDSO + (1 << 36);
const HEADER: AddressRange = AddressRange { address: place::HEADER, length: HEADER_LENGTH as u64 };
const SIGKILL: usize = 9;
const SIGSTOP: usize = 19;

/// Becomes the copy of the image in `file`, which is at [`DESCRIPTOR`], and open where this fails.
///
/// # Safety
/// As of [`crate::run`]; `arguments` were found in this process.
pub(crate) unsafe fn become_copy(arguments: &InitialArguments, file: BorrowedFd<'_>) -> Result<Infallible, Failure> {
    // Until the last step: a handler of the image may run only on the image's memory.
    set_signal_mask(u64::MAX).map_err(to("block signals"))?;
    let image = map_header(file)?;
    let moved = arguments.move_out().map_err(to("copy the arguments"))?;
    // SAFETY: from here on nothing of the kernel's stack or the vDSO is used.
    unsafe { exchange_memory(&image, arguments.vdso, file)? };
    // Only saves time: without it the copy copies these pages one by one.
    for (address, length) in image.hot() {
        let _slower = populate(AddressRange { address, length });
    }
    // SAFETY: the image's memory is in place, and this program has no thread-local storage.
    unsafe { exchange_state(&image.header, &moved)? };
    let Header { pc, sp, signal_mask, .. } = image.header;
    // SAFETY: `image` is not used any more.
    unsafe { unmap(HEADER) }.map_err(to("unmap the header"))?;
    // Before the program runs: it must not find a descriptor that a fresh one would not have, nor say
    // that no copy was made. What is left to do cannot fail.
    // SAFETY: nothing else owns it, and nothing uses it afterwards.
    drop(unsafe { OwnedFd::from_raw_fd(DESCRIPTOR) });
    set_signal_mask(signal_mask).map_err(to("unblock signals"))?;
    // SAFETY: the code at `pc` expects `sp` and nothing else (`stockade-image-dump`).
    unsafe { core::arch::asm!("mov rsp, {sp}", "xor ebp, ebp", "jmp {pc}", sp = in(reg) sp, pc = in(reg) pc, options(noreturn)) }
}

/// Maps and checks the header.
fn map_header(file: BorrowedFd<'_>) -> Result<MemoryImage<'static>, Failure> {
    let status = fstat(file).map_err(to("look at the image's descriptor"))?;
    map_file_at(HEADER, protection::READ, file, 0).map_err(to("map the header"))?;
    let length = u64::try_from(status.st_size).unwrap_or(0);
    // A read behind the end of the file would be SIGBUS.
    let readable = length.min(HEADER.length) as usize;
    // SAFETY: `readable` bytes are mapped here until `become_copy` unmaps them, and the file is
    // sealed, or else only this process suffers.
    let header = unsafe { slice::from_raw_parts(HEADER.address as *const u8, readable) };
    Ok(parse(header, length)?)
}

/// Replaces all memory but the restorer's by the image's.
///
/// # Safety
/// Nothing outside the restorer's places is used afterwards.
unsafe fn exchange_memory(image: &MemoryImage<'_>, vdso: u64, file: impl AsFd) -> Result<(), Failure> {
    let header = &image.header;
    let parts = || header.vdso.as_slice().iter();
    for part in parts() {
        let range = AddressRange { address: vdso.wrapping_add_signed(part.offset), length: part.length };
        // SAFETY: the restorer asks the kernel, never the vDSO; nothing else is mapped there.
        unsafe { move_to(range, VDSO_WAITS.wrapping_add_signed(part.offset)) }.map_err(to("move the vDSO away"))?;
    }
    let below = AddressRange { address: LOWEST, length: place::RESTORER - LOWEST };
    let above = AddressRange { address: place::WRITER, length: HIGHEST - place::WRITER };
    for range in [below, above] {
        // SAFETY: the caller uses nothing outside the restorer's places.
        unsafe { unmap(range) }.map_err(to("unmap the restorer's start"))?;
    }
    for part in parts() {
        let range = AddressRange { address: VDSO_WAITS.wrapping_add_signed(part.offset), length: part.length };
        // SAFETY: all is unmapped where it goes: the header's check keeps it off the restorer.
        unsafe { move_to(range, header.vdso_address.wrapping_add_signed(part.offset)) }.map_err(to("move the vDSO to its place"))?;
    }
    for segment in image.segments() {
        let range = AddressRange { address: segment.address, length: segment.length };
        match segment.kind {
            SegmentKind::Contents => map_file_at(range, segment.protection, &file, segment.offset).map_err(to("map contents"))?,
            SegmentKind::Zero => map_zeros_at(range, segment.protection).map_err(to("map zeros"))?,
            SegmentKind::Stack => {
                map_stack_at(range, segment.protection).map_err(to("map the stack"))?;
                // SAFETY: it has just been mapped, writable as the check demands.
                unsafe { read_into(range, &file, segment.offset) }.map_err(to("read the stack"))?;
            }
        }
    }
    Ok(())
}

/// Gives the kernel the image's view of the process, and the copy its arguments.
///
/// # Safety
/// The image's memory is in place.
unsafe fn exchange_state(header: &Header, moved: &MovedArguments) -> Result<(), Failure> {
    let b = &header.bounds;
    let [arg_start, arg_end, env_start, env_end] = moved.bounds;
    let bounds =
        [b.start_code, b.end_code, b.start_data, b.end_data, b.start_brk, b.brk, b.start_stack, arg_start, arg_end, env_start, env_end];
    // Not every kernel can. The heap's end is then the restorer's, which the copy's first call
    // notices (`stockade-image-dump`), and /proc/self/cmdline is empty. The filter of a run refuses
    // it: the launcher would count the call as the program's, and answers once a request is there.
    if !has_seccomp_filter() {
        let _without = set_memory_bounds(&bounds);
    }
    let Header { fs, tid, robust_list, rseq, signal_stack, .. } = *header;
    // SAFETY: the check found each in writable memory of the image, which is in place.
    unsafe { set_thread_addresses(&ThreadAddresses { fs, tid, robust_list, rseq, signal_stack }) }.map_err(to("set the thread's state"))?;
    set_name(&header.name).map_err(to("set the name"))?;
    set_umask(header.umask);
    for (signal, action) in (1..=SIGNALS).zip(&header.actions).filter(|(signal, _)| !matches!(*signal, SIGKILL | SIGSTOP)) {
        let action = [action.handler, action.flags, action.restorer, action.mask];
        // SAFETY: the check found its addresses in code of the image.
        unsafe { set_signal_action(signal, &action) }.map_err(to("set a signal's action"))?;
    }
    // SAFETY: the check found it in writable memory of the image, aligned.
    unsafe { (header.inbox as *mut stockade_protocol::memory_image::Inbox).write(moved.inbox) };
    Ok(())
}
