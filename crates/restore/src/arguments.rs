//! The block of arguments, environment and auxiliary vector that the kernel puts on the stack
//! of a new program, and its way out of the memory that is unmapped.
//!
//! It copies and interprets nothing else.

use core::slice;

use stockade_protocol::memory_image::{Inbox, PAGE, place};
use stockade_sys::{
    Result,
    memory::{AddressRange, map_work_area},
};

/// Where the strings and pointers of a new program are.
pub(crate) struct InitialArguments {
    /// The addresses of the arguments, without the null pointer.
    argv: &'static [u64],
    /// The addresses of the environment's variables, likewise.
    envp: &'static [u64],
    /// The strings of both, one behind the other, arguments first.
    strings: &'static [u8],
    /// The address of the vDSO's code; 0 without one.
    pub(crate) vdso: u64,
}

/// Where they are for the copy.
pub(crate) struct MovedArguments {
    pub(crate) inbox: Inbox,
    /// Begin and end of the arguments' strings, then of the environment's.
    pub(crate) bounds: [u64; 4],
}

impl InitialArguments {
    /// Finds them from the first stack pointer.
    ///
    /// # Safety
    /// `initial_stack` is what the kernel left in the stack pointer, and the stack is mapped as
    /// long as the result is used.
    pub(crate) unsafe fn find(initial_stack: *const u64) -> InitialArguments {
        const AT_SYSINFO_EHDR: u64 = 33;
        // SAFETY: argc, argv with its null, envp with its null, and pairs up to AT_NULL follow
        // each other by the ABI; each loop stops at the end that it defines.
        unsafe {
            let argc = *initial_stack as usize;
            let argv = slice::from_raw_parts(initial_stack.add(1), argc);
            let variables = initial_stack.add(argc + 2);
            let mut count = 0;
            while *variables.add(count) != 0 {
                count += 1;
            }
            let envp = slice::from_raw_parts(variables, count);
            let mut pair = variables.add(count + 1);
            let mut vdso = 0;
            while *pair != 0 {
                if *pair == AT_SYSINFO_EHDR {
                    vdso = *pair.add(1);
                }
                pair = pair.add(2);
            }
            let all = || argv.iter().chain(envp);
            let strings = match (all().next(), all().next_back()) {
                (Some(&first), Some(&last)) => {
                    let end = last as usize + stockade_sys::start::strlen(last as *const u8) + 1;
                    slice::from_raw_parts(first as *const u8, end - first as usize)
                }
                _ => &[],
            };
            InitialArguments { argv, envp, strings, vdso }
        }
    }

    /// Copies them to their place of the image's format.
    pub(crate) fn move_out(&self) -> Result<MovedArguments> {
        let pointers = self.argv.len() + self.envp.len() + 2;
        let length = (8 * pointers + self.strings.len()).next_multiple_of(PAGE as usize);
        let area = map_work_area(AddressRange { address: place::ARGUMENTS, length: length as u64 })?;
        let (table, strings) = area.split_at_mut(8 * pointers);
        let begin = strings.as_ptr() as u64;
        strings.iter_mut().zip(self.strings).for_each(|(to, from)| *to = *from);
        let old_begin = self.strings.as_ptr() as u64;
        let moved = |pointer: &u64| pointer - old_begin + begin;
        let pointers = self.argv.iter().map(moved).chain([0]).chain(self.envp.iter().map(moved)).chain([0]);
        for (place, pointer) in table.chunks_exact_mut(8).zip(pointers) {
            place.copy_from_slice(&pointer.to_le_bytes());
        }
        let argv = place::ARGUMENTS;
        let envp = argv + 8 * (self.argv.len() as u64 + 1);
        let end = begin + self.strings.len() as u64;
        let between = self.envp.first().map_or(end, moved);
        Ok(MovedArguments { inbox: Inbox { argc: self.argv.len() as u64, argv, envp }, bounds: [begin, between, between, end] })
    }
}
