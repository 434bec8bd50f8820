//! Memory for a process that lives for milliseconds: taken from one piece, end to end, and
//! given back only where it was taken last.
//!
//! Most of what a run of a sandbox takes is small, and lives until the process ends; an
//! allocator that keeps lists of it costs a thirtieth of the time in which a sandbox stands.
//! Where the piece has been used up, all else comes from the allocator behind, and goes back
//! to it: a process that lives on has lost the piece, and no more.

use core::{
    alloc::{GlobalAlloc, Layout},
    cell::UnsafeCell,
    ptr,
    sync::atomic::{AtomicUsize, Ordering},
};

use crate::process::populate;

/// Larger blocks come from the allocator behind, which has them of the kernel: empty, and
/// untouched.
const LARGE: usize = 16 << 10;

/// Bytes that are made ready at once.
const USUAL: usize = 112 << 10;

/// What blocks begin and end at. What must begin elsewhere comes from the allocator behind.
const GRAIN: usize = 8;

/// The bytes that a block of so many takes.
fn in_grains(size: usize) -> usize {
    size.next_multiple_of(GRAIN)
}

/// `N` bytes, and the allocator behind them.
#[repr(C, align(4096))]
pub struct Arena<A, const N: usize> {
    memory: UnsafeCell<[u8; N]>,
    /// Bytes taken of it.
    taken: AtomicUsize,
    behind: A,
}

// SAFETY: a byte of `memory` belongs to whoever has taken it, and `taken` is changed
// atomically.
unsafe impl<A: Sync, const N: usize> Sync for Arena<A, N> {}

impl<A, const N: usize> Arena<A, N> {
    /// Nothing taken yet.
    pub const fn before(behind: A) -> Self {
        Arena { memory: UnsafeCell::new([0; N]), taken: AtomicUsize::new(0), behind }
    }

    /// Where in the piece this pointer is.
    fn offset(&self, pointer: *mut u8) -> Option<usize> {
        (pointer as usize).checked_sub(self.memory.get() as usize).filter(|offset| *offset < N)
    }

    /// Takes so many bytes more; from where.
    fn take(&self, layout: Layout) -> Option<usize> {
        // The piece begins at a page, and every block is of whole grains.
        if layout.align() > GRAIN || layout.size() > LARGE {
            return None;
        }
        let size = in_grains(layout.size());
        // Written before it is ever read: a page that is read first is mapped twice, and the
        // second time interrupts the CPU of a child that shares this memory.
        let start = self.taken.fetch_add(size, Ordering::Relaxed);
        if start == 0 {
            // A run takes about so much, and would take a fault for each page of it.
            populate(self.memory.get() as usize, N.min(USUAL));
        }
        if start + size <= N {
            return Some(start);
        }
        // Until this is taken back others may be sent to the allocator behind as well.
        self.taken.fetch_sub(size, Ordering::Relaxed);
        None
    }

    /// Moves the end of what is taken, where this is the end.
    fn move_end(&self, from: usize, to: usize) -> bool {
        to <= N && self.taken.compare_exchange(from, to, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}

// SAFETY: a block lies in what was taken and is given out once, until it was the last and came
// back; all others are those of the allocator behind, and go back to it.
unsafe impl<A: GlobalAlloc, const N: usize> GlobalAlloc for Arena<A, N> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match self.take(layout) {
            // SAFETY: `take` stays within the piece.
            Some(start) => unsafe { self.memory.get().cast::<u8>().add(start) },
            // SAFETY: the caller's promise is passed on.
            None => unsafe { self.behind.alloc(layout) },
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        match self.take(layout) {
            // SAFETY: as above; what came back is not empty any more.
            Some(start) => unsafe {
                let block = self.memory.get().cast::<u8>().add(start);
                block.write_bytes(0, layout.size());
                block
            },
            // SAFETY: as above.
            None => unsafe { self.behind.alloc_zeroed(layout) },
        }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        match self.offset(pointer) {
            // What is not the last stays taken.
            Some(start) => drop(self.move_end(start + in_grains(layout.size()), start)),
            // SAFETY: as above.
            None => unsafe { self.behind.dealloc(pointer, layout) },
        }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let Some(start) = self.offset(pointer) else {
            // SAFETY: as above.
            return unsafe { self.behind.realloc(pointer, layout, size) };
        };
        let (end, end_then) = (start + in_grains(layout.size()), start.saturating_add(in_grains(size)));
        if end == end_then || self.move_end(end, end_then) || size <= layout.size() {
            return pointer;
        }
        // SAFETY: the caller vouches for the size not to overflow with this alignment.
        let layout_then = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        // SAFETY: as above.
        let moved = unsafe { self.alloc(layout_then) };
        if !moved.is_null() {
            // SAFETY: two blocks, of which the old one is the shorter.
            unsafe { ptr::copy_nonoverlapping(pointer, moved, layout.size()) };
        }
        moved
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    extern crate std;

    use core::alloc::{GlobalAlloc, Layout};
    use std::{alloc::System, vec::Vec};

    use super::Arena;

    #[test]
    fn blocks_are_apart_and_the_last_comes_back() {
        let arena = Arena::<System, 4096>::before(System);
        let layout = Layout::from_size_align(100, 4).unwrap();
        // SAFETY: every block is used within its layout, and given back with it.
        unsafe {
            let first = arena.alloc(layout);
            let second = arena.alloc(layout);
            assert!(arena.offset(first) == Some(0) && arena.offset(second) == Some(104));
            first.write_bytes(1, 100);
            second.write_bytes(2, 100);
            let grown = arena.realloc(second, layout, 200);
            assert_eq!(grown, second);
            let moved = arena.realloc(first, layout, 150);
            assert!(arena.offset(moved).is_some_and(|offset| offset >= 304));
            assert!((0..100).all(|index| moved.add(index).read() == 1 && grown.add(index).read() == 2));
            arena.dealloc(moved, Layout::from_size_align(150, 4).unwrap());
            assert_eq!(arena.alloc(layout), moved);
        }
    }

    #[test]
    fn what_does_not_fit_comes_from_behind() {
        let arena = Arena::<System, 4096>::before(System);
        let layouts: Vec<_> =
            [(4000, 8), (200, 8), (20_000, 8), (16, 16), (8, 8)].map(|(size, align)| Layout::from_size_align(size, align).unwrap()).into();
        // SAFETY: as above.
        let blocks: Vec<_> = layouts.iter().map(|layout| unsafe { arena.alloc(*layout) }).collect();
        let inside: Vec<_> = blocks.iter().map(|block| arena.offset(*block).is_some()).collect();
        assert_eq!(inside, [true, false, false, false, true]);
        for (block, layout) in blocks.into_iter().zip(layouts) {
            // SAFETY: as above.
            unsafe {
                let moved = arena.realloc(block, layout, layout.size() * 2);
                moved.write_bytes(3, layout.size() * 2);
                arena.dealloc(moved, Layout::from_size_align(layout.size() * 2, 8).unwrap());
            }
        }
    }
}
