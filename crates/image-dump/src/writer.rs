//! The memory of this process, written into a file.
//!
//! Each mapping that the kernel shows becomes segments: contents, or zeros where all is zero
//! or the kernel would wipe it in a child. What a copy could not have is refused. The writer's
//! own work area lies in a place of its own, and is not part of the image.

use core::ffi::CStr;

use rustix::{
    fd::BorrowedFd,
    fs::{Mode, OFlags, ftruncate, open},
    io::Errno,
};
use stockade_protocol::memory_image::{
    HEADER_LENGTH, HIGHEST, Header, Mapping, PAGE, Segment, SegmentKind, VdsoParts, header_used, parse, place, protection, write_segment,
};
use stockade_sys::memory::{AddressRange, map_work_area, unmap, write_from};

use crate::{
    refusal::{NamedMapping, Refusal, to},
    state::{LibcFacts, bounds, thread_header},
};

/// Room for the header and for the text of smaps: some 20,000 mappings.
pub(crate) const WORK: AddressRange = AddressRange { address: place::WRITER, length: 16 << 20 };
/// From so many zero pages on, zeros are a segment of their own. Fewer become holes in the
/// file: a segment costs the restorer a system call.
const MIN_ZERO_PAGES: u64 = 32;

/// Where a copy goes on, and where it looks for its arguments.
pub(crate) struct Continuation {
    pub(crate) pc: u64,
    pub(crate) sp: u64,
    pub(crate) inbox: u64,
}

/// Writes the image into a file.
///
/// # Safety
/// This thread is the only one, and a copy of its memory may go on as `continuation` says.
pub(crate) unsafe fn write(file: BorrowedFd<'_>, continuation: &Continuation, libc: &LibcFacts) -> Result<(), Refusal> {
    let work = map_work_area(WORK).map_err(to("map the work area"))?;
    let (head, text) = work.split_at_mut(HEADER_LENGTH);
    let written = write_parts(file, continuation, libc, head, text);
    // SAFETY: both halves were borrowed until here, and a refusal owns its text.
    let _unmapped = unsafe { unmap(WORK) };
    written
}

fn write_parts(
    file: BorrowedFd<'_>,
    continuation: &Continuation,
    libc: &LibcFacts,
    head: &mut [u8],
    text: &mut [u8],
) -> Result<(), Refusal> {
    let thread = thread_header(libc)?;
    let stat = read_whole(c"/proc/self/stat", text).map_err(to("read /proc/self/stat"))?;
    let bounds = bounds(stat).ok_or(Refusal::State { what: "/proc/self/stat has another form" })?;

    let smaps = read_whole(c"/proc/self/smaps", text).map_err(to("read /proc/self/smaps"))?;
    let vdso = lines(smaps).filter_map(Mapping::parse).find(|mapping| mapping.name == b"[vdso]");
    let parts = vdso.and_then(|_| VdsoParts::from_maps(smaps));
    if vdso.is_some() && parts.is_none() {
        return Err(Refusal::State { what: "the vDSO has too many parts" });
    }
    let mut memory = MemoryWriter { file, head, count: 0, last: None, offset: HEADER_LENGTH as u64 };
    memory.write_all(smaps)?;
    let (segment_count, length) = memory.finish()?;

    let Continuation { pc, sp, inbox } = *continuation;
    let vdso_address = vdso.map_or(0, |code| code.start);
    let vdso = parts.unwrap_or_default();
    Header { segment_count: segment_count as u64, pc, sp, inbox, bounds, vdso_address, vdso, ..thread }.write(head);
    // What the launcher would refuse, the template's own report names.
    parse(head, length).map_err(Refusal::Image)?;
    ftruncate(file, length).map_err(to("set the image's length"))?;
    let header = AddressRange { address: head.as_ptr() as u64, length: header_used(segment_count) as u64 };
    write_from(header, file, 0).map_err(to("write the header"))
}

/// Reads a file of /proc, which has no length of its own.
fn read_whole<'a>(path: &CStr, buffer: &'a mut [u8]) -> Result<&'a [u8], Errno> {
    let file = open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let mut length = 0;
    loop {
        let free = buffer.get_mut(length..).unwrap_or_default();
        if free.is_empty() {
            return Err(Errno::FBIG);
        }
        match rustix::io::read(&file, free) {
            Ok(0) => return Ok(buffer.get(..length).unwrap_or_default()),
            Ok(count) => length += count,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
}

fn lines(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    text.split(|&byte| byte == b'\n')
}

/// What becomes of a mapping.
#[derive(Debug, PartialEq, Eq)]
enum Treatment {
    /// It is no part of the image: the kernel's, or the writer's.
    Leave,
    /// Zeros without a look: no access, or wiped in a child.
    Zeros,
    /// Its bytes, without a look for zeros.
    Bytes,
    /// The main stack.
    Stack,
    /// Anonymous memory: its bytes, but for long runs of zeros.
    Anonymous,
}

/// Decides about a mapping, by its line, its VmFlags and its KiB of anonymous pages.
fn treatment(mapping: &Mapping<'_>, flags: &[u8], anonymous_kib: u64) -> Result<Treatment, &'static str> {
    let has = |flag: &[u8; 2]| flags.split(|&byte| byte == b' ').any(|shown| shown == flag);
    let is_readable = mapping.protection & protection::READ != 0;
    let is_stack = mapping.name == b"[stack]";
    let in_work_area = mapping.start >= WORK.address && mapping.end <= WORK.address + WORK.length;
    if mapping.is_vdso() || mapping.name == b"[vsyscall]" || in_work_area {
        return Ok(Treatment::Leave);
    }
    if mapping.start < place::END && mapping.end > place::RESTORER {
        return Err("a mapping lies where the restorer works");
    }
    if mapping.end > HIGHEST {
        return Err("a mapping lies above 47 bits");
    }
    for (flag, why) in [
        (b"ss", "a shadow stack"),
        (b"um", "memory that userfaultfd fills"),
        (b"uw", "memory whose writes userfaultfd watches"),
        (b"ht", "memory of hugetlbfs"),
        (b"io", "memory of a device"),
        (b"pf", "memory of a driver"),
    ] {
        if has(flag) {
            return Err(why);
        }
    }
    if mapping.shared && mapping.protection & protection::WRITE != 0 {
        return Err("shared writable memory");
    }
    if has(b"gd") && !is_stack {
        return Err("a second stack that grows");
    }
    if has(b"wf") || has(b"dp") {
        return Ok(Treatment::Zeros);
    }
    if !is_readable {
        // Nothing was ever written where nothing could be: reserved address space.
        return if anonymous_kib == 0 && mapping.protection == 0 { Ok(Treatment::Zeros) } else { Err("memory that cannot be read") };
    }
    Ok(match mapping.name.first() {
        _ if is_stack => Treatment::Stack,
        Some(b'/') => Treatment::Bytes,
        _ => Treatment::Anonymous,
    })
}

/// The segments and the contents, as far as they are written.
struct MemoryWriter<'a> {
    file: BorrowedFd<'a>,
    head: &'a mut [u8],
    /// Segments whose entry is written.
    count: usize,
    /// The segment behind them, which may still grow.
    last: Option<Segment>,
    /// The end of the contents in the file.
    offset: u64,
}

impl MemoryWriter<'_> {
    fn write_all(&mut self, smaps: &[u8]) -> Result<(), Refusal> {
        let mut current: Option<Mapping<'_>> = None;
        let mut anonymous_kib = 0;
        for line in lines(smaps) {
            if let Some(mapping) = Mapping::parse(line) {
                (current, anonymous_kib) = (Some(mapping), 0);
            } else if let Some(value) = line.strip_prefix(b"Anonymous:") {
                let digits = value.trim_ascii().split(|&byte| byte == b' ').next().unwrap_or_default();
                anonymous_kib = core::str::from_utf8(digits).ok().and_then(|digits| digits.parse().ok()).unwrap_or(u64::MAX);
            } else if let Some(flags) = line.strip_prefix(b"VmFlags:") {
                // The last line of each mapping.
                let Some(mapping) = current.take() else { continue };
                let refuse = |why| Refusal::Mapping { mapping: NamedMapping::new(&mapping), why };
                let treatment = treatment(&mapping, flags, anonymous_kib).map_err(refuse)?;
                self.write(&mapping, &treatment).map_err(|error| match error {
                    Refusal::Call { errno: Errno::FAULT, .. } => refuse("memory that cannot be read"),
                    other => other,
                })?;
            }
        }
        match current {
            Some(_) => Err(Refusal::State { what: "/proc/self/smaps has no VmFlags" }),
            None => Ok(()),
        }
    }

    fn write(&mut self, mapping: &Mapping<'_>, treatment: &Treatment) -> Result<(), Refusal> {
        let Mapping { start, end, protection, .. } = *mapping;
        match treatment {
            Treatment::Leave => Ok(()),
            Treatment::Zeros => self.add_zeros(start, end, protection),
            Treatment::Bytes => self.add_contents(start, start, end, protection, SegmentKind::Contents),
            Treatment::Stack => self.add_contents(start, start, end, protection, SegmentKind::Stack),
            Treatment::Anonymous => self.write_anonymous(start, end, protection),
        }
    }

    fn write_anonymous(&mut self, start: u64, end: u64, protection: u64) -> Result<(), Refusal> {
        let mut at = start;
        while at < end {
            let data = end_of(at, end, true);
            if data - at >= MIN_ZERO_PAGES * PAGE || data == end {
                self.add_zeros(at, data, protection)?;
                at = data;
                continue;
            }
            // Up to the next long run of zeros, or to the end.
            let mut data_end = data;
            let contents_end = loop {
                data_end = end_of(data_end, end, false);
                let zeros_end = end_of(data_end, end, true);
                if zeros_end - data_end >= MIN_ZERO_PAGES * PAGE || zeros_end == end {
                    break data_end;
                }
                data_end = zeros_end;
            };
            self.add_contents(at, data, contents_end, protection, SegmentKind::Contents)?;
            at = contents_end;
        }
        Ok(())
    }

    /// Contents from `start` to `end`. What comes before `data` is zero, and a hole in the file.
    fn add_contents(&mut self, start: u64, data: u64, end: u64, protection: u64, kind: SegmentKind) -> Result<(), Refusal> {
        let offset = self.offset;
        write_from(AddressRange { address: data, length: end - data }, self.file, offset + (data - start))
            .map_err(to("write the contents"))?;
        self.offset += end - start;
        self.add(Segment { address: start, length: end - start, protection, kind, offset })
    }

    fn add_zeros(&mut self, start: u64, end: u64, protection: u64) -> Result<(), Refusal> {
        self.add(Segment { address: start, length: end - start, protection, kind: SegmentKind::Zero, offset: 0 })
    }

    /// Adds a segment, to the last one where both are one.
    fn add(&mut self, segment: Segment) -> Result<(), Refusal> {
        if let Some(last) = &mut self.last {
            let alike = last.kind == segment.kind && last.protection == segment.protection && segment.kind != SegmentKind::Stack;
            let in_file = segment.kind == SegmentKind::Zero || last.offset + last.length == segment.offset;
            if alike && in_file && last.end() == segment.address {
                last.length += segment.length;
                return Ok(());
            }
        }
        self.close_last()?;
        self.last = Some(segment);
        Ok(())
    }

    fn close_last(&mut self) -> Result<(), Refusal> {
        if let Some(last) = self.last.take() {
            if !write_segment(self.head, self.count, &last) {
                return Err(Refusal::TooMany);
            }
            self.count += 1;
        }
        Ok(())
    }

    /// The number of segments, and the length of the file.
    fn finish(mut self) -> Result<(usize, u64), Refusal> {
        self.close_last()?;
        Ok((self.count, self.offset))
    }
}

/// The end of the run of pages from `start` on that are all zero, or all not.
fn end_of(start: u64, end: u64, zero: bool) -> u64 {
    let mut at = start;
    while at < end && is_zero(at) == zero {
        at += PAGE;
    }
    at
}

/// Whether all bytes of a page are zero.
fn is_zero(address: u64) -> bool {
    const WORDS: u64 = PAGE / 8;
    (0..WORDS).all(|index| {
        // SAFETY: the kernel has just shown the page as readable anonymous memory of this process,
        // which has one thread. Volatile, because it may be memory that Rust knows otherwise.
        unsafe { ((address + 8 * index) as *const u64).read_volatile() == 0 }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decide(line: &str, flags: &[u8], anonymous_kib: u64) -> Result<Treatment, &'static str> {
        Mapping::parse(line.as_bytes()).map_or(Err("no mapping"), |mapping| treatment(&mapping, flags, anonymous_kib))
    }

    #[test]
    fn what_a_copy_could_not_have_is_refused_with_its_reason() {
        let anonymous = "7f0000000000-7f0000001000 rw-p 00000000 00:00 0 ";
        for (line, flags, reason) in [
            (anonymous, &b"rd wr mr mw me ac ss"[..], "a shadow stack"),
            (anonymous, b"rd wr um", "memory that userfaultfd fills"),
            (anonymous, b"rd wr uw", "memory whose writes userfaultfd watches"),
            (anonymous, b"rd wr ht", "memory of hugetlbfs"),
            (anonymous, b"rd wr io pf", "memory of a device"),
            (anonymous, b"rd wr gd", "a second stack that grows"),
            ("7f0000000000-7f0000001000 rw-s 00000000 00:01 7 /dev/zero (deleted)", b"rd wr sh", "shared writable memory"),
            ("7f0000000000-7f0000001000 ---p 00000000 00:00 0 ", b"mr mw me", "memory that cannot be read"),
            ("7f0000000000-7f0000001000 --xp 00000000 00:00 0 ", b"ex", "memory that cannot be read"),
            ("800000000000-800000001000 rw-p 00000000 00:00 0 ", b"rd wr", "a mapping lies above 47 bits"),
            ("100000000000-100000001000 rw-p 00000000 00:00 0 ", b"rd wr", "a mapping lies where the restorer works"),
            ("0fffffff0000-100000001000 rw-p 00000000 00:00 0 ", b"rd wr", "a mapping lies where the restorer works"),
        ] {
            assert_eq!(decide(line, flags, 4), Err(reason), "{line}");
        }
    }

    #[test]
    fn each_other_mapping_is_written_as_what_it_is() {
        for (line, flags, expected) in [
            ("7f0000000000-7f0000001000 rw-p 00000000 00:00 0 ", &b"rd wr"[..], Treatment::Anonymous),
            ("7f0000000000-7f0000001000 rw-p 00000000 00:00 0 [heap]", b"rd wr", Treatment::Anonymous),
            ("7f0000000000-7f0000001000 rw-p 00000000 00:00 0 ", b"rd wr wf dd", Treatment::Zeros),
            ("7f0000000000-7f0000001000 rw-p 00000000 00:00 0 ", b"rd wr dp", Treatment::Zeros),
            ("7f0000000000-7f0000001000 ---p 00000000 fe:00 9 /lib/a.so", b"mr mw me", Treatment::Zeros),
            ("7f0000000000-7f0000001000 r-xp 00000000 fe:00 9 /lib/a.so", b"rd ex", Treatment::Bytes),
            ("7f0000000000-7f0000001000 r--s 00000000 fe:00 9 /lib/cache", b"rd sh", Treatment::Bytes),
            ("7ffd00000000-7ffd00021000 rw-p 00000000 00:00 0 [stack]", b"rd wr gd ac", Treatment::Stack),
            ("7ffd80000000-7ffd80002000 r-xp 00000000 00:00 0 [vdso]", b"rd ex de", Treatment::Leave),
            ("7ffd7fffc000-7ffd80000000 r--p 00000000 00:00 0 [vvar]", b"rd io pf de dd", Treatment::Leave),
            ("ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0 [vsyscall]", b"ex", Treatment::Leave),
            ("140000000000-140001000000 rw-p 00000000 00:00 0 ", b"rd wr", Treatment::Leave),
        ] {
            assert_eq!(decide(line, flags, 0), Ok(expected), "{line}");
        }
    }
}
