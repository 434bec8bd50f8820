//! The image of a process: the file from which `stockade-restore` makes a running copy.
//!
//! ```text
//! 0             one page: the fixed part, words of 64 bits
//! SEGMENTS_AT   one entry for each piece of memory, in ascending order of address
//! HOT_AT        the ranges that every copy writes, which the restorer copies at once
//! HEADER_LENGTH contents of memory, by pages
//! ```
//!
//! A process writes its own image from inside a sandbox, so each byte is hostile. [`check()`]
//! is pure, panics on no input, and refuses what the restorer could not do or would do to
//! itself. It does not vouch for the contents: a copy is untrusted code, as every payload is.

mod check;
mod error;
mod maps;
#[cfg(test)]
mod tests;

pub use check::{MemoryImage, check, parse, set_hot};
pub use error::{MemoryImageError, RangeFault};
pub use maps::Mapping;

/// The descriptor at which the restorer finds its image. It is the first behind the standard
/// streams: nothing else may be open in a copy.
pub const DESCRIPTOR: i32 = 3;

/// Bytes of a page. Every address, length and offset is a multiple of it.
pub const PAGE: u64 = 4096;
/// Where the contents begin.
pub const HEADER_LENGTH: usize = 0x8_0000;
const MAGIC: u64 = u64::from_le_bytes(*b"stockimg");
const VERSION: u64 = 1;
const SEGMENTS_AT: usize = PAGE as usize;
const HOT_AT: usize = 0x6_0000;
const SEGMENT_BYTES: usize = 5 * 8;
const HOT_BYTES: usize = 2 * 8;

/// Entries for segments.
pub const MAX_SEGMENTS: usize = (HOT_AT - SEGMENTS_AT) / SEGMENT_BYTES;
/// Entries for ranges that every copy writes.
pub const MAX_HOT: usize = (HEADER_LENGTH - HOT_AT) / HOT_BYTES;
/// Parts of a vDSO: two or three pages of data and the code, as of Linux 6.18.
pub const MAX_VDSO_PARTS: usize = 4;
/// Signals of x86_64 Linux.
pub const SIGNALS: usize = 64;

/// The lowest address of a mapping: `vm.mmap_min_addr` is at most this.
pub const LOWEST: u64 = 0x1_0000;
/// The end of the addresses that the kernel gives without being asked for more (47 bits).
pub const HIGHEST: u64 = (1 << 47) - PAGE;

/// What the restorer and the writer use while memory is exchanged. No image may have a mapping
/// here. It is below every position-independent program and above every heap behind a program
/// at a fixed address, also with `vm.mmap_rnd_bits=32`.
pub mod place {
    /// The restorer's own program. `crates/restore/build.rs` links it here.
    pub const RESTORER: u64 = 0x1000_0000_0000;
    /// The header of the image.
    pub const HEADER: u64 = 0x1100_0000_0000;
    /// The vDSO, while the memory of the restorer's start is unmapped.
    pub const VDSO: u64 = 0x1200_0000_0000;
    /// Arguments and environment of the copy, which stay.
    pub const ARGUMENTS: u64 = 0x1300_0000_0000;
    /// The writer's memory.
    pub const WRITER: u64 = 0x1400_0000_0000;
    /// The end of all of these.
    pub const END: u64 = 0x1500_0000_0000;
}

/// Protection bits of mmap(2).
pub mod protection {
    #![allow(missing_docs, reason = "the kernel's names")]
    pub const READ: u64 = 1;
    pub const WRITE: u64 = 2;
    pub const EXEC: u64 = 4;
}

/// What a segment's memory is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum SegmentKind {
    /// Contents of the file, mapped copy-on-write.
    Contents = 0,
    /// Zeros.
    Zero = 1,
    /// The main stack: contents that are read, in memory that grows down.
    Stack = 2,
}

/// One piece of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Where it begins.
    pub address: u64,
    /// How many bytes.
    pub length: u64,
    /// [`protection`] bits.
    pub protection: u64,
    /// What it is made of.
    pub kind: SegmentKind,
    /// Where its contents begin in the file; 0 for zeros.
    pub offset: u64,
}

impl Segment {
    /// The first address behind it. Meaningful once the segment is checked.
    pub fn end(&self) -> u64 {
        self.address.wrapping_add(self.length)
    }

    fn words(&self) -> [u64; 5] {
        [self.address, self.length, self.protection, self.kind as u64, self.offset]
    }
}

/// One mapping of the vDSO.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VdsoPart {
    /// Distance from the code; the data lie below it.
    pub offset: i64,
    /// How many bytes.
    pub length: u64,
}

/// The parts of a vDSO, in ascending order of address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VdsoParts {
    count: usize,
    parts: [VdsoPart; MAX_VDSO_PARTS],
}

impl VdsoParts {
    /// Adds a part; false where there is no room.
    pub fn push(&mut self, part: VdsoPart) -> bool {
        let free = self.parts.get_mut(self.count);
        let fits = free.is_some();
        if let Some(free) = free {
            *free = part;
            self.count += 1;
        }
        fits
    }

    /// The parts.
    pub fn as_slice(&self) -> &[VdsoPart] {
        self.parts.get(..self.count).unwrap_or_default()
    }

    /// Those of the process whose `/proc/PID/maps` this is; `None` without a vDSO.
    pub fn from_maps(text: &[u8]) -> Option<VdsoParts> {
        let mappings = || text.split(|&byte| byte == b'\n').filter_map(Mapping::parse).filter(|mapping| mapping.is_vdso());
        let code = mappings().find(|mapping| mapping.name == b"[vdso]")?.start;
        let mut all = VdsoParts::default();
        mappings().all(|mapping| all.push(mapping.vdso_part(code))).then_some(all)
    }
}

/// What the image depends on that is the host's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostFacts {
    /// The vDSO that the kernel gives to programs.
    pub vdso: VdsoParts,
}

/// An action of sigaction(2), as the kernel keeps it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
#[allow(missing_docs, reason = "the kernel's names")]
pub struct SignalAction {
    pub handler: u64,
    pub flags: u64,
    pub restorer: u64,
    pub mask: u64,
}

/// The fixed part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// How many segments there are.
    pub segment_count: u64,
    /// How many ranges every copy writes.
    pub hot_count: u64,
    /// Where the copy goes on.
    pub pc: u64,
    /// Its stack pointer there. All other registers are on the stack.
    pub sp: u64,
    /// The FS base: glibc's thread block.
    pub fs: u64,
    /// Where glibc keeps the thread's id.
    pub tid: u64,
    /// The list of robust mutexes; 0: none.
    pub robust_list: u64,
    /// The rseq(2) area; 0: none is registered.
    pub rseq: u64,
    /// Where the restorer writes an [`Inbox`].
    pub inbox: u64,
    /// The name of the process, as of `PR_SET_NAME`.
    pub name: [u8; 16],
    /// The file mode mask.
    pub umask: u64,
    /// The blocked signals.
    pub signal_mask: u64,
    /// The signal stack: address, flags, length, as in `stack_t`.
    pub signal_stack: [u64; 3],
    /// Where the program's code, data and heap begin and end, for `PR_SET_MM_MAP`.
    pub bounds: Bounds,
    /// Where the vDSO's code was.
    pub vdso_address: u64,
    /// The vDSO that the contents have pointers into.
    pub vdso: VdsoParts,
    /// What each signal does, the first one first.
    pub actions: [SignalAction; SIGNALS],
}

/// What the kernel remembers of a program's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "the kernel's names: struct prctl_mm_map")]
pub struct Bounds {
    pub start_code: u64,
    pub end_code: u64,
    pub start_data: u64,
    pub end_data: u64,
    pub start_brk: u64,
    pub brk: u64,
    pub start_stack: u64,
}

/// What the restorer tells the copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Inbox {
    /// How many arguments the restorer was started with.
    pub argc: u64,
    /// Their addresses, and a null pointer.
    pub argv: u64,
    /// The addresses of the environment's variables, and a null pointer.
    pub envp: u64,
}

impl Default for Header {
    fn default() -> Self {
        Header {
            segment_count: 0,
            hot_count: 0,
            pc: 0,
            sp: 0,
            fs: 0,
            tid: 0,
            robust_list: 0,
            rseq: 0,
            inbox: 0,
            name: [0; 16],
            umask: 0,
            signal_mask: 0,
            signal_stack: [0; 3],
            bounds: Bounds::default(),
            vdso_address: 0,
            vdso: VdsoParts::default(),
            actions: [SignalAction::default(); SIGNALS],
        }
    }
}

/// Bytes that are written or read word by word.
struct Words<'a>(&'a [u8], usize);

impl Words<'_> {
    fn next(&mut self) -> u64 {
        let word = word_at(self.0, self.1);
        self.1 += 8;
        word
    }

    fn array<const N: usize>(&mut self) -> [u64; N] {
        core::array::from_fn(|_| self.next())
    }
}

/// The word at `offset`; 0 behind the end, which the callers have excluded.
fn word_at(bytes: &[u8], offset: usize) -> u64 {
    bytes.get(offset..offset + 8).and_then(|word| word.try_into().ok()).map_or(0, u64::from_le_bytes)
}

fn put_words(bytes: &mut [u8], offset: usize, words: &[u64]) {
    let places = bytes.get_mut(offset..).unwrap_or_default().chunks_exact_mut(8);
    for (place, word) in places.zip(words) {
        place.copy_from_slice(&word.to_le_bytes());
    }
}

impl Header {
    /// Writes the fixed part into the first page of an image.
    pub fn write(&self, page: &mut [u8]) {
        let [name_begin, name_end] = [word_at(&self.name, 0), word_at(&self.name, 8)];
        let Bounds { start_code, end_code, start_data, end_data, start_brk, brk, start_stack } = self.bounds;
        let [stack_address, stack_flags, stack_length] = self.signal_stack;
        let fixed = [
            MAGIC,
            VERSION,
            self.segment_count,
            self.hot_count,
            self.pc,
            self.sp,
            self.fs,
            self.tid,
            self.robust_list,
            self.rseq,
            self.inbox,
            name_begin,
            name_end,
            self.umask,
            self.signal_mask,
            stack_address,
            stack_flags,
            stack_length,
            start_code,
            end_code,
            start_data,
            end_data,
            start_brk,
            brk,
            start_stack,
            self.vdso_address,
            self.vdso.count as u64,
        ];
        put_words(page, 0, &fixed);
        let mut at = 8 * fixed.len();
        for part in self.vdso.parts {
            put_words(page, at, &[part.offset as u64, part.length]);
            at += 16;
        }
        for action in self.actions {
            put_words(page, at, &[action.handler, action.flags, action.restorer, action.mask]);
            at += 32;
        }
    }

    /// Reads the fixed part, of which it judges only what it must know to do so.
    fn read(header: &[u8]) -> Result<Header, MemoryImageError> {
        let mut words = Words(header, 0);
        let [magic, version] = words.array();
        if magic != MAGIC {
            return Err(MemoryImageError::Magic);
        }
        if version != VERSION {
            return Err(MemoryImageError::Version { version });
        }
        let [segment_count, hot_count, pc, sp, fs, tid, robust_list, rseq, inbox] = words.array();
        let name_words: [u64; 2] = words.array();
        let mut name = [0; 16];
        put_words(&mut name, 0, &name_words);
        let [umask, signal_mask] = words.array();
        let signal_stack = words.array();
        let [start_code, end_code, start_data, end_data, start_brk, brk, start_stack] = words.array();
        let [vdso_address, vdso_count] = words.array();
        let parts = core::array::from_fn(|_| VdsoPart { offset: words.next() as i64, length: words.next() });
        let count = usize::try_from(vdso_count).ok().filter(|count| *count <= MAX_VDSO_PARTS);
        let vdso = VdsoParts { count: count.ok_or(MemoryImageError::VdsoCount { count: vdso_count })?, parts };
        let actions = core::array::from_fn(|_| {
            let [handler, flags, restorer, mask] = words.array();
            SignalAction { handler, flags, restorer, mask }
        });
        let bounds = Bounds { start_code, end_code, start_data, end_data, start_brk, brk, start_stack };
        Ok(Header {
            segment_count,
            hot_count,
            pc,
            sp,
            fs,
            tid,
            robust_list,
            rseq,
            inbox,
            name,
            umask,
            signal_mask,
            signal_stack,
            bounds,
            vdso_address,
            vdso,
            actions,
        })
    }
}

/// Writes the entry of a segment; false where there is no room for so many.
pub fn write_segment(header: &mut [u8], index: usize, segment: &Segment) -> bool {
    let fits = index < MAX_SEGMENTS;
    if fits {
        put_words(header, SEGMENTS_AT + index * SEGMENT_BYTES, &segment.words());
    }
    fits
}

/// Where the list of so many ranges that every copy writes lies in the header.
pub const fn hot_list(count: usize) -> core::ops::Range<usize> {
    HOT_AT..HOT_AT + count * HOT_BYTES
}

/// How many bytes of the header an image with so many segments uses.
pub const fn header_used(segments: usize) -> usize {
    SEGMENTS_AT + segments * SEGMENT_BYTES
}
