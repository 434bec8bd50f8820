//! Each field of an image, altered, is refused with its own cause; no bytes make it panic.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use alloc::{vec, vec::Vec};

use super::{
    check::{SA_RESTORER, SIG_IGN},
    *,
};

const CODE: u64 = 0x40_0000;
const DATA: u64 = 0x50_0000;
const LIBRARY: u64 = 0x7f00_0000_0000;
const STACK: u64 = 0x7ffd_0000_0000;
const VDSO: u64 = 0x7ffd_8000_0000;
const CONTENTS: u64 = HEADER_LENGTH as u64;
const FILE_LENGTH: u64 = CONTENTS + 4 * PAGE;

fn parts(list: &[(i64, u64)]) -> VdsoParts {
    let mut all = VdsoParts::default();
    assert!(list.iter().all(|&(offset, length)| all.push(VdsoPart { offset, length })));
    all
}

fn host() -> HostFacts {
    HostFacts { vdso: parts(&[(-0x4000, 0x4000), (0, 0x2000)]) }
}

fn segments() -> Vec<Segment> {
    let segment = |address, pages, protection, kind, offset| Segment { address, length: pages * PAGE, protection, kind, offset };
    vec![
        segment(CODE, 1, 5, SegmentKind::Contents, CONTENTS),
        segment(DATA, 2, 3, SegmentKind::Contents, CONTENTS + PAGE),
        segment(DATA + 2 * PAGE, 3, 3, SegmentKind::Zero, 0),
        segment(LIBRARY, 8, 0, SegmentKind::Zero, 0),
        segment(STACK, 1, 3, SegmentKind::Stack, CONTENTS + 3 * PAGE),
    ]
}

fn header() -> Header {
    let mut header = Header {
        segment_count: 5,
        hot_count: 1,
        pc: CODE + 0x123,
        sp: STACK + 0x800,
        fs: DATA + 0x100,
        tid: DATA + 0x3d0,
        robust_list: DATA + 0x3e0,
        rseq: DATA + 0x1020,
        inbox: DATA + 0x200,
        name: *b"python3\0\0\0\0\0\0\0\0\0",
        umask: 0o22,
        signal_stack: [DATA + PAGE, 0, 2 * PAGE],
        bounds: Bounds {
            start_code: CODE,
            end_code: CODE + 0x800,
            start_data: DATA,
            end_data: DATA + 0x1800,
            start_brk: DATA + 5 * PAGE,
            brk: DATA + 5 * PAGE,
            start_stack: STACK + 0xf00,
        },
        vdso_address: VDSO,
        vdso: host().vdso,
        ..Header::default()
    };
    header.actions[1] = SignalAction { handler: CODE + 8, flags: SA_RESTORER, restorer: CODE + 16, mask: 0 };
    header.actions[12].handler = SIG_IGN;
    header
}

fn encode(header: &Header, segments: &[Segment], hot: &[(u64, u64)]) -> Vec<u8> {
    let mut bytes = vec![0; HEADER_LENGTH];
    header.write(&mut bytes);
    assert!(segments.iter().enumerate().all(|(index, segment)| write_segment(&mut bytes, index, segment)));
    for (index, &(address, length)) in hot.iter().enumerate() {
        put_words(&mut bytes, HOT_AT + index * HOT_BYTES, &[address, length]);
    }
    bytes
}

/// Pages of two segments that touch.
const HOT: (u64, u64) = (DATA + PAGE, 2 * PAGE);

fn sample() -> Vec<u8> {
    encode(&header(), &segments(), &[HOT])
}

fn refusal(bytes: &[u8]) -> Option<MemoryImageError> {
    check(bytes, FILE_LENGTH, &host()).err()
}

/// Refuses the sample with one change of its fixed part.
fn with(change: impl FnOnce(&mut Header)) -> Option<MemoryImageError> {
    let mut header = header();
    change(&mut header);
    refusal(&encode(&header, &segments(), &[HOT]))
}

/// The same with one change of a segment.
fn with_segment(index: usize, change: impl FnOnce(&mut Segment)) -> Option<MemoryImageError> {
    let mut segments = segments();
    change(&mut segments[index]);
    refusal(&encode(&header(), &segments, &[HOT]))
}

#[test]
fn what_was_written_is_read() {
    let bytes = sample();
    let image = check(&bytes, FILE_LENGTH, &host()).unwrap();
    assert_eq!(image.header, header());
    assert_eq!(image.segments().collect::<Vec<_>>(), segments());
    assert_eq!(image.hot().collect::<Vec<_>>(), [HOT]);
}

#[test]
fn each_altered_field_is_refused_with_its_own_cause() {
    let word = |at: usize, value: u64| {
        let mut bytes = sample();
        put_words(&mut bytes, at, &[value]);
        refusal(&bytes)
    };
    assert_eq!(word(0, 0), Some(MemoryImageError::Magic));
    assert_eq!(word(8, 2), Some(MemoryImageError::Version { version: 2 }));
    for (cause, found) in [
        (MemoryImageError::SegmentCount { count: 0 }, with(|h| h.segment_count = 0)),
        (MemoryImageError::SegmentCount { count: u64::MAX }, with(|h| h.segment_count = u64::MAX)),
        (MemoryImageError::Stacks { count: 0 }, with(|h| h.segment_count = 4)),
        (MemoryImageError::HotCount { count: 8193 }, with(|h| h.hot_count = 8193)),
        (MemoryImageError::Pc, with(|h| h.pc = DATA)),
        (MemoryImageError::Sp, with(|h| h.sp = DATA + 16)),
        (MemoryImageError::Sp, with(|h| h.sp += 8)),
        (MemoryImageError::Sp, with(|h| h.sp = STACK + PAGE)),
        (MemoryImageError::Sp, with(|h| h.sp = STACK)),
        (MemoryImageError::Fs, with(|h| h.fs = CODE)),
        (MemoryImageError::Tid, with(|h| h.tid = 0)),
        (MemoryImageError::Tid, with(|h| h.tid += 1)),
        (MemoryImageError::RobustList, with(|h| h.robust_list = u64::MAX)),
        (MemoryImageError::Rseq, with(|h| h.rseq += 8)),
        (MemoryImageError::Rseq, with(|h| h.rseq = LIBRARY)),
        (MemoryImageError::Inbox, with(|h| h.inbox = DATA + 5 * PAGE - 8)),
        (MemoryImageError::Name, with(|h| h.name = [b'x'; 16])),
        (MemoryImageError::Umask, with(|h| h.umask = 0o1000)),
        (MemoryImageError::StartStack, with(|h| h.bounds.start_stack = 0)),
        (MemoryImageError::Bounds, with(|h| h.bounds.start_code = h.bounds.end_code + 1)),
        (MemoryImageError::Bounds, with(|h| h.bounds.end_data = u64::MAX)),
        (MemoryImageError::Bounds, with(|h| h.bounds.start_brk += 1)),
        (MemoryImageError::VdsoCount { count: 9 }, with(|h| h.vdso.count = 9)),
        (MemoryImageError::OtherVdso, with(|h| h.vdso.count = 1)),
        (MemoryImageError::OtherVdso, with(|h| h.vdso = parts(&[(-0x4000, 0x4000), (0, 0x1000)]))),
        (MemoryImageError::OtherVdso, with(|h| h.vdso = parts(&[]))),
        (MemoryImageError::Vdso { index: 0, fault: RangeFault::Outside }, with(|h| h.vdso_address = 0)),
        (MemoryImageError::Vdso { index: 0, fault: RangeFault::Overlaps }, with(|h| h.vdso_address = LIBRARY + 0x2000)),
        (MemoryImageError::Vdso { index: 1, fault: RangeFault::Overlaps }, with(|h| h.vdso = parts(&[(0, 0x2000), (-0x4000, 0x4000)]))),
        (MemoryImageError::Vdso { index: 1, fault: RangeFault::Empty }, with(|h| h.vdso = parts(&[(-0x4000, 0x4000), (0, 0)]))),
        (MemoryImageError::Vdso { index: 0, fault: RangeFault::Outside }, with(|h| h.vdso = parts(&[(-(1 << 40), 0x4000)]))),
        (MemoryImageError::SignalAction { signal: 2 }, with(|h| h.actions[1].handler = DATA)),
        (MemoryImageError::SignalAction { signal: 2 }, with(|h| h.actions[1].restorer = 0)),
        (MemoryImageError::SignalAction { signal: 2 }, with(|h| h.actions[1].flags = 0)),
        (MemoryImageError::SignalAction { signal: 13 }, with(|h| h.actions[12].flags = 1 << 40)),
        (MemoryImageError::SignalAction { signal: 9 }, with(|h| h.actions[8].handler = SIG_IGN)),
        (MemoryImageError::SignalAction { signal: 19 }, with(|h| h.actions[18].mask = 1)),
        (MemoryImageError::SignalStack, with(|h| h.signal_stack[1] = 1)),
        (MemoryImageError::SignalStack, with(|h| h.signal_stack[2] = 5 * PAGE)),
        (MemoryImageError::Segment { index: 0, fault: RangeFault::Unaligned }, with_segment(0, |s| s.address += 1)),
        (MemoryImageError::Segment { index: 0, fault: RangeFault::Unaligned }, with_segment(0, |s| s.length -= 1)),
        (MemoryImageError::Segment { index: 0, fault: RangeFault::Empty }, with_segment(0, |s| s.length = 0)),
        (MemoryImageError::Segment { index: 0, fault: RangeFault::Outside }, with_segment(0, |s| s.address = 0)),
        (MemoryImageError::Segment { index: 4, fault: RangeFault::Outside }, with_segment(4, |s| s.address = HIGHEST)),
        (MemoryImageError::Segment { index: 4, fault: RangeFault::Outside }, with_segment(4, |s| s.length = 0u64.wrapping_sub(PAGE))),
        (MemoryImageError::Segment { index: 1, fault: RangeFault::Overlaps }, with_segment(1, |s| s.address = CODE)),
        (MemoryImageError::Segment { index: 2, fault: RangeFault::Overlaps }, with_segment(1, |s| s.length += PAGE)),
        (MemoryImageError::Segment { index: 3, fault: RangeFault::RestorersPlace }, with_segment(3, |s| s.address = place::HEADER)),
        (
            MemoryImageError::Segment { index: 3, fault: RangeFault::RestorersPlace },
            with_segment(3, |s| s.address = place::RESTORER - PAGE),
        ),
        (MemoryImageError::Segment { index: 3, fault: RangeFault::RestorersPlace }, with_segment(3, |s| s.address = place::END - PAGE)),
        (MemoryImageError::SegmentProtection { index: 0, protection: 8 }, with_segment(0, |s| s.protection = 8)),
        (MemoryImageError::SegmentProtection { index: 4, protection: 1 }, with_segment(4, |s| s.protection = 1)),
        (MemoryImageError::SegmentOffset { index: 0 }, with_segment(0, |s| s.offset = CONTENTS - PAGE)),
        (MemoryImageError::SegmentOffset { index: 0 }, with_segment(0, |s| s.offset += 1)),
        (MemoryImageError::SegmentOffset { index: 4 }, with_segment(4, |s| s.offset = FILE_LENGTH)),
        (MemoryImageError::SegmentOffset { index: 1 }, with_segment(1, |s| s.offset = 0u64.wrapping_sub(PAGE))),
        (MemoryImageError::SegmentOffset { index: 2 }, with_segment(2, |s| s.offset = CONTENTS)),
        (MemoryImageError::Stacks { count: 2 }, with_segment(1, |s| s.kind = SegmentKind::Stack)),
    ] {
        assert_eq!(found, Some(cause));
    }
    assert_eq!(word(SEGMENTS_AT + 24, 3), Some(MemoryImageError::SegmentKind { index: 0, kind: 3 }));
}

#[test]
fn each_hot_range_is_whole_pages_of_writable_memory() {
    let hot = |list: &[(u64, u64)]| {
        let header = Header { hot_count: list.len() as u64, ..header() };
        refusal(&encode(&header, &segments(), list))
    };
    assert_eq!(hot(&[(DATA, PAGE), (DATA + PAGE, 4 * PAGE)]), None);
    assert_eq!(hot(&[(DATA, PAGE), (DATA, PAGE)]), Some(MemoryImageError::Hot { index: 1, fault: RangeFault::Overlaps }));
    assert_eq!(hot(&[(DATA, 0)]), Some(MemoryImageError::Hot { index: 0, fault: RangeFault::Empty }));
    assert_eq!(hot(&[(DATA, 6 * PAGE)]), Some(MemoryImageError::HotUnmapped { index: 0 }));
    assert_eq!(hot(&[(CODE, PAGE)]), Some(MemoryImageError::HotUnmapped { index: 0 }));
}

#[test]
fn a_learnt_hot_list_leaves_out_what_no_copy_can_write() {
    let mut bytes = sample();
    let pages = [CODE, DATA, DATA, DATA + 1, DATA + PAGE, DATA + 4 * PAGE, DATA + 5 * PAGE, LIBRARY, STACK, u64::MAX, DATA];
    assert_eq!(set_hot(&mut bytes, FILE_LENGTH, pages.into_iter()), Ok(3));
    let image = check(&bytes, FILE_LENGTH, &host()).unwrap();
    assert_eq!(image.hot().collect::<Vec<_>>(), [(DATA, 2 * PAGE), (DATA + 4 * PAGE, PAGE), (STACK, PAGE)]);
    assert_eq!(set_hot(&mut bytes, FILE_LENGTH, core::iter::empty()), Ok(0));
    assert_eq!(image_of(&bytes).hot().count(), 0);
}

fn image_of(bytes: &[u8]) -> MemoryImage<'_> {
    check(bytes, FILE_LENGTH, &host()).unwrap()
}

#[test]
fn a_file_that_ends_anywhere_is_refused_and_never_panics() {
    let bytes = sample();
    for length in (0..HEADER_LENGTH).step_by(61).chain(0..8192) {
        assert_eq!(refusal(&bytes[..length]), Some(MemoryImageError::Truncated));
    }
    for length in 0..FILE_LENGTH {
        assert!(matches!(check(&bytes, length, &host()), Err(MemoryImageError::SegmentOffset { .. })));
    }
}

#[test]
fn no_bytes_make_it_panic() {
    // xorshift: the same numbers on every run, so that a failure can be found again.
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let good = sample();
    let edges = [0, 1, PAGE, HIGHEST, place::RESTORER, place::END, u64::MAX, u64::MAX - PAGE + 1, 1 << 63, DATA, STACK, CODE];
    let lists = [0..2500usize, SEGMENTS_AT..SEGMENTS_AT + 5 * SEGMENT_BYTES, HOT_AT..HOT_AT + HOT_BYTES];
    let mut bytes = good.clone();
    let (mut accepted, mut refused) = (0, 0);
    for _ in 0..60_000 {
        let mut touched = [0; 4];
        let count = 1 + next() as usize % 4;
        for place in &mut touched[..count] {
            let list = &lists[next() as usize % 3];
            *place = list.start + next() as usize % (list.len() / 8) * 8;
            let value = if next() & 1 == 0 { edges[next() as usize % edges.len()] } else { word_at(&bytes, *place) ^ 1 << (next() % 64) };
            put_words(&mut bytes, *place, &[value]);
        }
        match check(&bytes, FILE_LENGTH, &host()) {
            Ok(image) => {
                accepted += 1;
                // What is accepted can be used: each promise of the format holds.
                assert!(image.segments().all(|s| s.end() <= HIGHEST && (s.end() <= place::RESTORER || s.address >= place::END)));
                assert!(image.hot().all(|(address, length)| image.covers(address, length, protection::WRITE)));
                assert!(image.covers(image.header.pc, 1, protection::EXEC) && image.covers(image.header.sp, 1, protection::WRITE));
            }
            Err(_) => refused += 1,
        }
        for place in touched {
            put_words(&mut bytes, place, &[word_at(&good, place)]);
        }
    }
    assert!(accepted > 100 && refused > 10_000, "{accepted} accepted, {refused} refused");
}

#[test]
fn the_parts_of_a_vdso_are_read_from_maps() {
    let maps = b"00400000-00401000 r-xp 00000000 fe:00 12 /usr/bin/with space\n\
        7ffd7fffc000-7ffd7ffff000 r--p 00000000 00:00 0                          [vvar]\n\
        7ffd7ffff000-7ffd80000000 r--p 00000000 00:00 0                          [vvar_vclock]\n\
        7ffd80000000-7ffd80002000 r-xp 00000000 00:00 0                          [vdso]\n\
        ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]\n";
    assert_eq!(VdsoParts::from_maps(maps), Some(parts(&[(-0x4000, 0x3000), (-0x1000, 0x1000), (0, 0x2000)])));
    assert_eq!(VdsoParts::from_maps(b"nothing\n\n7-8 r--p 0 0 0 [vvar]"), None);
    let first = maps.split(|&byte| byte == b'\n').next().and_then(Mapping::parse);
    let expected = Mapping { start: 0x40_0000, end: 0x40_1000, protection: 5, shared: false, name: b"/usr/bin/with space" };
    assert_eq!(first, Some(expected));
    for line in [&b""[..], b" ", b"-", b"1-2", b"1-2 rwxp", b"g-2 rwxp 0 0 0", b"1-2 rwx 0 0 0", b"\xff-2 rwxp 0 0 0"] {
        assert_eq!(Mapping::parse(line), None);
    }
}
