//! The pages that every copy writes, learnt in a child of the template.
//!
//! After fork(2) parent and child share each page until one of them writes to it. The child
//! does what every copy does, ends as every copy does, and then asks the kernel which pages are
//! its own. The list saves time and decides nothing: a bad one is refused with the image.

use rustix::{
    fd::BorrowedFd,
    fs::{Mode, OFlags, fstat, open},
};
use stockade_protocol::memory_image::{HEADER_LENGTH, PAGE, hot_list, parse, protection, set_hot};
use stockade_sys::memory::{AddressRange, map_work_area, read_into, unmap, write_from};

use crate::{
    refusal::{Refusal, to},
    writer::WORK,
};

/// Bits of an entry in `/proc/self/pagemap`.
const PRESENT: u64 = 1 << 63;
const OF_FILE: u64 = 1 << 61;
const EXCLUSIVE: u64 = 1 << 56;

/// Writes the list into the image.
///
/// # Safety
/// This thread is the only one.
pub(crate) unsafe fn note_written_pages(image: BorrowedFd<'_>) -> Result<(), Refusal> {
    let work = map_work_area(WORK).map_err(to("map the work area"))?;
    let (head, pages) = work.split_at_mut(HEADER_LENGTH);
    let noted = note_with(image, head, pages);
    // SAFETY: both halves were borrowed until here.
    let _unmapped = unsafe { unmap(WORK) };
    noted
}

fn note_with(image: BorrowedFd<'_>, head: &mut [u8], pages: &mut [u8]) -> Result<(), Refusal> {
    let length = u64::try_from(fstat(image).map_err(to("look at the image"))?.st_size).unwrap_or(0);
    let whole = AddressRange { address: head.as_ptr() as u64, length: HEADER_LENGTH as u64 };
    // SAFETY: it is exactly `head`, which is not used meanwhile.
    unsafe { read_into(whole, image, 0) }.map_err(to("read the header"))?;
    let pagemap = open(c"/proc/self/pagemap", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).map_err(to("open /proc/self/pagemap"))?;

    let (checked, mut found) = (parse(head, length).map_err(Refusal::Image)?, 0);
    let mut places = pages.chunks_exact_mut(8);
    for segment in checked.segments().filter(|segment| segment.protection & protection::WRITE != 0) {
        let mut entries = [0u8; PAGE as usize];
        let mut address = segment.address;
        while address < segment.end() {
            let wanted = entries.len().min((segment.end() - address) as usize / PAGE as usize * 8);
            let read = rustix::io::pread(&pagemap, &mut entries[..wanted], address / PAGE * 8).map_err(to("read /proc/self/pagemap"))?;
            for entry in entries[..read].chunks_exact(8) {
                let bits = entry.try_into().map_or(0, u64::from_ne_bytes);
                if bits & (PRESENT | OF_FILE | EXCLUSIVE) == PRESENT | EXCLUSIVE {
                    let Some(place) = places.next() else { return Err(Refusal::TooMany) };
                    place.copy_from_slice(&address.to_ne_bytes());
                    found += 1;
                }
                address += PAGE;
            }
            if read == 0 {
                break;
            }
        }
    }
    let addresses = pages.chunks_exact(8).take(found).map(|place| place.try_into().map_or(0, u64::from_ne_bytes));
    let count = set_hot(head, length, addresses).map_err(Refusal::Image)?;
    // The list before its length: an image is good at every moment.
    for part in [hot_list(count), 0..PAGE as usize] {
        let range = AddressRange { address: head.as_ptr() as u64 + part.start as u64, length: part.len() as u64 };
        write_from(range, image, part.start as u64).map_err(to("write the header"))?;
    }
    Ok(())
}
