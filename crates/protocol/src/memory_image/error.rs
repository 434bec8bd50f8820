//! Why an image is refused: one variant for each thing that the launcher can tell apart.

use core::fmt;

/// What is wrong with a range of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeFault {
    /// It is not made of whole pages.
    Unaligned,
    /// It has no length.
    Empty,
    /// It leaves the addresses that a program can have.
    Outside,
    /// It lies where the restorer works.
    RestorersPlace,
    /// It begins before the end of another, or the list is not in ascending order.
    Overlaps,
}

/// Why an image is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "`index` counts entries from 0; the other fields are the value that was found")]
pub enum MemoryImageError {
    /// The file ends within the header.
    Truncated,
    /// The file is no image.
    Magic,
    /// Another version wrote it.
    Version { version: u64 },
    /// No segment, or more than the header has room for.
    SegmentCount { count: u64 },
    /// A segment's addresses.
    Segment { index: usize, fault: RangeFault },
    /// An unknown kind of segment.
    SegmentKind { index: usize, kind: u64 },
    /// Unknown protection bits, or a stack that cannot be written.
    SegmentProtection { index: usize, protection: u64 },
    /// Contents outside the file or within its header.
    SegmentOffset { index: usize },
    /// Not exactly one main stack.
    Stacks { count: u64 },
    /// More parts of the vDSO than are known.
    VdsoCount { count: u64 },
    /// The addresses of a part of the vDSO.
    Vdso { index: usize, fault: RangeFault },
    /// The host's vDSO has other parts.
    OtherVdso,
    /// More ranges in the hot list than the header has room for.
    HotCount { count: u64 },
    /// The addresses of a range in the hot list.
    Hot { index: usize, fault: RangeFault },
    /// A range in the hot list that is not writable memory.
    HotUnmapped { index: usize },
    /// The program counter is outside code.
    Pc,
    /// The stack pointer is outside the stack or unaligned.
    Sp,
    /// The FS base is outside writable memory.
    Fs,
    /// The same of the thread id.
    Tid,
    /// The same of the list of robust mutexes.
    RobustList,
    /// The same of the rseq(2) area.
    Rseq,
    /// The same of the place for the restorer's message.
    Inbox,
    /// The process's name does not end.
    Name,
    /// The file mode mask has unknown bits.
    Umask,
    /// The beginning of the stack is outside the stack.
    StartStack,
    /// The bounds of code, data or heap are out of order.
    Bounds,
    /// A signal's action that the kernel could not have.
    SignalAction { signal: usize },
    /// A signal stack in use or outside writable memory.
    SignalStack,
}

impl fmt::Display for RangeFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            RangeFault::Unaligned => "is not made of whole pages",
            RangeFault::Empty => "has no length",
            RangeFault::Outside => "leaves the addresses of a program",
            RangeFault::RestorersPlace => "lies where the restorer works",
            RangeFault::Overlaps => "overlaps another or is out of order",
        })
    }
}

impl fmt::Display for MemoryImageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("image: ")?;
        match self {
            MemoryImageError::Truncated => f.write_str("the file ends within the header"),
            MemoryImageError::Magic => f.write_str("the file is no image"),
            MemoryImageError::Version { version } => write!(f, "unknown version {version}"),
            MemoryImageError::SegmentCount { count } => write!(f, "{count} segments"),
            MemoryImageError::Segment { index, fault } => write!(f, "segment {index} {fault}"),
            MemoryImageError::SegmentKind { index, kind } => write!(f, "segment {index} has the unknown kind {kind}"),
            MemoryImageError::SegmentProtection { index, protection } => write!(f, "segment {index} has the protection {protection:#x}"),
            MemoryImageError::SegmentOffset { index } => write!(f, "the contents of segment {index} are outside the file"),
            MemoryImageError::Stacks { count } => write!(f, "{count} main stacks"),
            MemoryImageError::VdsoCount { count } => write!(f, "a vDSO of {count} parts"),
            MemoryImageError::Vdso { index, fault } => write!(f, "part {index} of the vDSO {fault}"),
            MemoryImageError::OtherVdso => f.write_str("the vDSO of this kernel has other parts"),
            MemoryImageError::HotCount { count } => write!(f, "{count} hot ranges"),
            MemoryImageError::Hot { index, fault } => write!(f, "hot range {index} {fault}"),
            MemoryImageError::HotUnmapped { index } => write!(f, "hot range {index} is outside writable memory"),
            MemoryImageError::Pc => f.write_str("the program counter is outside code"),
            MemoryImageError::Sp => f.write_str("the stack pointer is outside the stack or unaligned"),
            MemoryImageError::Fs => f.write_str("the FS base is outside writable memory"),
            MemoryImageError::Tid => f.write_str("the thread id is outside writable memory"),
            MemoryImageError::RobustList => f.write_str("the robust list is outside writable memory"),
            MemoryImageError::Rseq => f.write_str("the rseq area is outside writable memory or unaligned"),
            MemoryImageError::Inbox => f.write_str("the inbox is outside writable memory"),
            MemoryImageError::Name => f.write_str("the name of the process does not end"),
            MemoryImageError::Umask => f.write_str("the file mode mask has unknown bits"),
            MemoryImageError::StartStack => f.write_str("the beginning of the stack is outside the stack"),
            MemoryImageError::Bounds => f.write_str("the bounds of code, data or heap are out of order"),
            MemoryImageError::SignalAction { signal } => write!(f, "signal {signal} has an impossible action"),
            MemoryImageError::SignalStack => f.write_str("the signal stack is in use or outside writable memory"),
        }
    }
}

impl core::error::Error for MemoryImageError {}
