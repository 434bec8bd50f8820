//! The judgement of an image's header, and the use of one that passed.
//!
//! It reads the header alone. Each rule has a cause of its own ([`MemoryImageError`]).

use super::{
    Bounds, HEADER_LENGTH, HIGHEST, HOT_AT, HOT_BYTES, Header, HostFacts, Inbox, LOWEST, MAX_HOT, MAX_SEGMENTS, MemoryImageError, PAGE,
    RangeFault, SEGMENT_BYTES, SEGMENTS_AT, Segment, SegmentKind, SignalAction, Words, place, protection, put_words, word_at,
};

/// Signal flags that a copy may have (`SA_` of sigaction(2)).
pub(super) const SA_RESTORER: u64 = 0x0400_0000;
const SA_KNOWN: u64 = 0xd800_0c07 | SA_RESTORER;
pub(super) const SIG_IGN: u64 = 1;
const SIGKILL: usize = 9;
const SIGSTOP: usize = 19;
/// `struct robust_list_head`; the kernel accepts no other length.
const ROBUST_LIST_LENGTH: u64 = 24;
/// `struct rseq` as first released; the kernel accepts it in every version.
const RSEQ_LENGTH: u64 = 32;
const SS_DISABLE: u64 = 2;

/// An image whose header has been checked.
#[derive(Clone, Copy, Debug)]
pub struct MemoryImage<'a> {
    bytes: &'a [u8],
    /// The fixed part.
    pub header: Header,
}

/// Checks a header and compares it with the host.
///
/// # Errors
/// The first thing that is wrong with it.
pub fn check<'a>(header: &'a [u8], file_length: u64, host: &HostFacts) -> Result<MemoryImage<'a>, MemoryImageError> {
    let image = parse(header, file_length)?;
    if image.header.vdso == host.vdso { Ok(image) } else { Err(MemoryImageError::OtherVdso) }
}

/// Checks a header without the host: what the restorer can still do itself.
///
/// # Errors
/// The first thing that is wrong with it.
pub fn parse(header: &[u8], file_length: u64) -> Result<MemoryImage<'_>, MemoryImageError> {
    let bytes = header.get(..HEADER_LENGTH).ok_or(MemoryImageError::Truncated)?;
    let image = MemoryImage { bytes, header: Header::read(bytes)? };
    image.check_segments(file_length)?;
    image.check_vdso()?;
    image.check_hot()?;
    image.check_thread()?;
    image.check_bounds()?;
    image.check_signals()?;
    Ok(image)
}

impl<'a> MemoryImage<'a> {
    /// All segments, in ascending order of address.
    pub fn segments(&self) -> impl Iterator<Item = Segment> + use<'a> {
        let image = *self;
        // Every entry was decoded when the image was checked.
        (0..image.header.segment_count as usize).filter_map(move |index| image.segment(index).ok())
    }

    /// The ranges that every copy writes, as address and length.
    pub fn hot(&self) -> impl Iterator<Item = (u64, u64)> + use<'a> {
        let bytes = self.bytes;
        (0..self.header.hot_count as usize).map(move |index| {
            let at = HOT_AT + index * HOT_BYTES;
            (word_at(bytes, at), word_at(bytes, at + 8))
        })
    }

    fn segment(&self, index: usize) -> Result<Segment, MemoryImageError> {
        let [address, length, protection, kind, offset] = Words(self.bytes, SEGMENTS_AT + index * SEGMENT_BYTES).array();
        let kind = match kind {
            0 => SegmentKind::Contents,
            1 => SegmentKind::Zero,
            2 => SegmentKind::Stack,
            _ => return Err(MemoryImageError::SegmentKind { index, kind }),
        };
        Ok(Segment { address, length, protection, kind, offset })
    }

    fn check_segments(&self, file_length: u64) -> Result<(), MemoryImageError> {
        let count = self.header.segment_count;
        if count == 0 || count > MAX_SEGMENTS as u64 {
            return Err(MemoryImageError::SegmentCount { count });
        }
        let (mut free_from, mut stacks) = (LOWEST, 0);
        for index in 0..count as usize {
            let segment = self.segment(index)?;
            free_from =
                check_range(segment.address, segment.length, free_from).map_err(|fault| MemoryImageError::Segment { index, fault })?;
            if segment.protection > protection::READ | protection::WRITE | protection::EXEC {
                return Err(MemoryImageError::SegmentProtection { index, protection: segment.protection });
            }
            let in_file = segment.offset.is_multiple_of(PAGE)
                && segment.offset >= HEADER_LENGTH as u64
                && segment.offset.checked_add(segment.length).is_some_and(|end| end <= file_length);
            if segment.kind != SegmentKind::Zero && !in_file || segment.kind == SegmentKind::Zero && segment.offset != 0 {
                return Err(MemoryImageError::SegmentOffset { index });
            }
            if segment.kind == SegmentKind::Stack {
                stacks += 1;
                // It is read into, and the kernel lets only anonymous writable memory grow.
                if segment.protection & protection::WRITE == 0 {
                    return Err(MemoryImageError::SegmentProtection { index, protection: segment.protection });
                }
            }
        }
        if stacks == 1 { Ok(()) } else { Err(MemoryImageError::Stacks { count: stacks }) }
    }

    fn check_vdso(&self) -> Result<(), MemoryImageError> {
        let mut free_from = LOWEST;
        for (index, part) in self.header.vdso.as_slice().iter().enumerate() {
            let at = |fault| MemoryImageError::Vdso { index, fault };
            let address = self.header.vdso_address.checked_add_signed(part.offset).ok_or(at(RangeFault::Outside))?;
            free_from = check_range(address, part.length, free_from).map_err(at)?;
            // A distance that does not fit the restorer's place for it would reach its other places.
            if part.offset.unsigned_abs() > 1 << 30 || part.length > 1 << 30 {
                return Err(at(RangeFault::Outside));
            }
            if self.segments().any(|segment| segment.address < free_from && segment.end() > address) {
                return Err(at(RangeFault::Overlaps));
            }
        }
        Ok(())
    }

    fn check_hot(&self) -> Result<(), MemoryImageError> {
        let count = self.header.hot_count;
        if count > MAX_HOT as u64 {
            return Err(MemoryImageError::HotCount { count });
        }
        let mut free_from = LOWEST;
        for (index, (address, length)) in self.hot().enumerate() {
            free_from = check_range(address, length, free_from).map_err(|fault| MemoryImageError::Hot { index, fault })?;
            if !self.covers(address, length, protection::WRITE) {
                return Err(MemoryImageError::HotUnmapped { index });
            }
        }
        Ok(())
    }

    fn check_thread(&self) -> Result<(), MemoryImageError> {
        let header = &self.header;
        let in_stack = |address| self.segments().any(|s| s.kind == SegmentKind::Stack && s.address <= address && address < s.end());
        let writable = |address, length| self.covers(address, length, protection::WRITE);
        if !self.covers(header.pc, 1, protection::EXEC) {
            return Err(MemoryImageError::Pc);
        }
        // The ABI's alignment at a call, which is what the copy does first: it writes below.
        if !in_stack(header.sp) || !in_stack(header.sp.wrapping_sub(8)) || !header.sp.is_multiple_of(16) {
            return Err(MemoryImageError::Sp);
        }
        if !writable(header.fs, 8) {
            return Err(MemoryImageError::Fs);
        }
        if !header.tid.is_multiple_of(4) || !writable(header.tid, 4) {
            return Err(MemoryImageError::Tid);
        }
        if header.robust_list != 0 && !writable(header.robust_list, ROBUST_LIST_LENGTH) {
            return Err(MemoryImageError::RobustList);
        }
        if header.rseq != 0 && (!header.rseq.is_multiple_of(RSEQ_LENGTH) || !writable(header.rseq, RSEQ_LENGTH)) {
            return Err(MemoryImageError::Rseq);
        }
        if !header.inbox.is_multiple_of(8) || !writable(header.inbox, size_of::<Inbox>() as u64) {
            return Err(MemoryImageError::Inbox);
        }
        if header.name.last() != Some(&0) {
            return Err(MemoryImageError::Name);
        }
        if header.umask > 0o777 {
            return Err(MemoryImageError::Umask);
        }
        if in_stack(header.bounds.start_stack) { Ok(()) } else { Err(MemoryImageError::StartStack) }
    }

    fn check_bounds(&self) -> Result<(), MemoryImageError> {
        let Bounds { start_code, end_code, start_data, end_data, start_brk, brk, .. } = self.header.bounds;
        let ordered = [(start_code, end_code), (start_data, end_data), (start_brk, brk)]
            .iter()
            .all(|&(start, end)| LOWEST <= start && start <= end && end <= HIGHEST);
        if ordered { Ok(()) } else { Err(MemoryImageError::Bounds) }
    }

    fn check_signals(&self) -> Result<(), MemoryImageError> {
        let executable = |address| self.covers(address, 1, protection::EXEC);
        for (signal, action) in (1..).zip(&self.header.actions) {
            let plausible = match action.handler {
                0 | SIG_IGN => action.flags & !SA_KNOWN == 0,
                handler => {
                    action.flags & !SA_KNOWN == 0 && action.flags & SA_RESTORER != 0 && executable(handler) && executable(action.restorer)
                }
            };
            let fixed = matches!(signal, SIGKILL | SIGSTOP) && *action != SignalAction::default();
            if !plausible || fixed {
                return Err(MemoryImageError::SignalAction { signal });
            }
        }
        let [address, flags, length] = self.header.signal_stack;
        match flags {
            SS_DISABLE => Ok(()),
            0 if self.covers(address, length, protection::WRITE) => Ok(()),
            _ => Err(MemoryImageError::SignalStack),
        }
    }

    /// Whether all of this range lies in segments with this protection. Segments that touch
    /// are one memory: the writer divides a mapping where zeros begin.
    pub(super) fn covers(&self, address: u64, length: u64, wanted: u64) -> bool {
        let Some(end) = address.checked_add(length) else { return false };
        let mut reached = address;
        // The first segment that ends behind the address; all are in ascending order.
        let (mut low, mut high) = (0, self.header.segment_count as usize);
        while low < high {
            let middle = low.midpoint(high);
            match self.segment(middle) {
                Ok(segment) if segment.end() <= address => low = middle + 1,
                _ => high = middle,
            }
        }
        while reached < end {
            match self.segment(low) {
                Ok(segment)
                    if low < self.header.segment_count as usize && segment.address <= reached && segment.protection & wanted == wanted =>
                {
                    reached = segment.end();
                    low += 1;
                }
                _ => return false,
            }
        }
        length > 0
    }
}

/// Replaces the list of ranges that every copy writes by these pages, in ascending order, as a
/// copy found them. Pages that cannot be in it are left out: they come from untrusted code.
/// Returns how many ranges the list now has.
///
/// # Errors
/// As of [`parse`].
pub fn set_hot(header: &mut [u8], file_length: u64, pages: impl Iterator<Item = u64>) -> Result<usize, MemoryImageError> {
    let mut count = 0;
    let mut fixed = parse(header, file_length)?.header;
    let mut last: Option<(u64, u64)> = None;
    for page in pages {
        let image = MemoryImage { bytes: header, header: fixed };
        let is_next = last.is_none_or(|(address, length)| address + length <= page);
        if !page.is_multiple_of(PAGE) || !is_next || !image.covers(page, PAGE, protection::WRITE) {
            continue;
        }
        last = match last {
            Some((address, length)) if address + length == page => Some((address, length + PAGE)),
            _ if count == MAX_HOT => break,
            _ => {
                count += 1;
                Some((page, PAGE))
            }
        };
        if let Some((address, length)) = last {
            put_words(header, HOT_AT + (count - 1) * HOT_BYTES, &[address, length]);
        }
    }
    fixed.hot_count = count as u64;
    fixed.write(header);
    Ok(count)
}

/// Checks one range and returns its end, from which on the next may begin.
fn check_range(address: u64, length: u64, free_from: u64) -> Result<u64, RangeFault> {
    if !address.is_multiple_of(PAGE) || !length.is_multiple_of(PAGE) {
        return Err(RangeFault::Unaligned);
    }
    let end = address.checked_add(length).filter(|end| *end <= HIGHEST).ok_or(RangeFault::Outside)?;
    if length == 0 {
        return Err(RangeFault::Empty);
    }
    if address < LOWEST {
        return Err(RangeFault::Outside);
    }
    if address < place::END && end > place::RESTORER {
        return Err(RangeFault::RestorersPlace);
    }
    if address < free_from {
        return Err(RangeFault::Overlaps);
    }
    Ok(end)
}
