//! Headers of memory images, which a process inside a sandbox writes.

use std::cell::RefCell;

use stockade_protocol::memory_image::{
    Bounds, HEADER_LENGTH, HIGHEST, Header, LOWEST, PAGE, Segment, SegmentKind, header_used, hot_list, parse, place, write_segment,
};

use super::Target;

/// Bytes of the fixed part, and of the segments that an input has.
const FIXED: usize = 2328;
const SEGMENTS: usize = 10 * 40;
/// Bytes of the file that the header is said to begin.
const FILE: u64 = HEADER_LENGTH as u64 + 8 * PAGE;

pub const IMAGE: Target = Target {
    name: "image",
    about: "the header of a memory image",
    corpus: include_str!("../corpus/image"),
    seeds: || vec![seed()],
    words: &[b"stockimg", b"\x00\x10\x00\x00\x00\x00\x00\x00", b"\x00\x00\x08\x00\x00\x00\x00\x00", b"\x00\xf0\xff\xff\xff\x7f\x00\x00"],
    longest: FIXED + SEGMENTS + 64,
    run,
};

thread_local! {
    /// A header, of which each input writes the same parts.
    static HEADER: RefCell<Vec<u8>> = RefCell::new(vec![0; HEADER_LENGTH]);
}

/// Gives `act` the header of which an input is the short form.
fn with_header<T>(input: &[u8], act: impl FnOnce(&[u8]) -> T) -> T {
    HEADER.with_borrow_mut(|bytes| {
        let mut rest = input;
        for (at, most) in [(0, FIXED), (header_used(0), SEGMENTS), (hot_list(0).start, 64)] {
            let (part, behind) = rest.split_at(rest.len().min(most));
            bytes[at..at + most].fill(0);
            bytes[at..at + part.len()].copy_from_slice(part);
            rest = behind;
        }
        act(bytes)
    })
}

fn seed() -> Vec<u8> {
    const DATA: u64 = 0x50_0000;
    const STACK: u64 = 0x7ffd_0000_0000;
    let code = Segment { address: 0x40_0000, length: PAGE, protection: 5, kind: SegmentKind::Contents, offset: HEADER_LENGTH as u64 };
    let data = Segment { address: DATA, length: 2 * PAGE, protection: 3, offset: code.offset + PAGE, ..code };
    let stack = Segment { address: STACK, length: PAGE, protection: 3, kind: SegmentKind::Stack, offset: data.offset + 2 * PAGE };
    let fixed = Header {
        segment_count: 3,
        hot_count: 1,
        pc: code.address + 0x10,
        sp: STACK + 0x800,
        fs: DATA + 0x100,
        tid: DATA + 0x3d0,
        inbox: DATA + 0x200,
        signal_stack: [0, 2, 0],
        bounds: Bounds {
            start_code: code.address,
            end_code: code.address + 8,
            start_data: DATA,
            end_data: DATA + 8,
            start_brk: DATA + 2 * PAGE,
            brk: DATA + 2 * PAGE,
            start_stack: STACK + 0xf00,
        },
        ..Header::default()
    };
    let mut bytes = vec![0; HEADER_LENGTH];
    fixed.write(&mut bytes);
    [code, data, stack].iter().enumerate().for_each(|(index, segment)| assert!(write_segment(&mut bytes, index, segment)));
    let hot: Vec<u8> = [DATA, PAGE].iter().flat_map(|word| word.to_le_bytes()).collect();
    [&bytes[..FIXED], &bytes[header_used(0)..header_used(0) + SEGMENTS], &hot].concat()
}

fn run(input: &[u8]) {
    with_header(input, check);
}

fn check(bytes: &[u8]) {
    let Ok(image) = parse(bytes, FILE) else { return };
    let mut end = LOWEST;
    for segment in image.segments() {
        assert!(segment.address >= end && segment.end() <= HIGHEST && segment.length > 0, "in order, none over another, none too high");
        assert!(segment.end() <= place::RESTORER || segment.address >= place::END, "none over the restorer");
        assert!([segment.address, segment.length, segment.offset].iter().all(|word| word % PAGE == 0), "whole pages");
        let in_file = segment.offset.checked_add(segment.length).is_some_and(|end| end <= FILE);
        assert!(segment.kind == SegmentKind::Zero || in_file, "nothing behind the end of the file");
        end = segment.end();
    }
    let is_writable = |address: u64| {
        let holds = |segment: &Segment| (segment.address..segment.end()).contains(&address) && segment.protection & 2 != 0;
        image.segments().any(|segment| holds(&segment))
    };
    assert!([image.header.sp - 1, image.header.tid, image.header.inbox].into_iter().all(is_writable), "what is written to is writable");
    assert!(image.hot().all(|(address, length)| is_writable(address) && is_writable(address + length - 1)), "so are the pages to copy");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_seed_is_an_image() {
        with_header(&seed(), |bytes| assert!(parse(bytes, FILE).is_ok(), "{:?}", parse(bytes, FILE).err()));
    }
}
