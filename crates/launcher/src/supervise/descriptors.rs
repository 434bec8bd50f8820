//! What the kernel may keep for descriptors and maps where no cgroup charges it.
//!
//! It keeps files of `/proc` with what was read of them, pipes, inodes without a name, what epoll
//! watches, and maps. No figure of a process tells how much that is, so there is only a bound by
//! their number, which alone ends no run (`kernel_memory.rs`).

use std::{
    fs::{File, read_dir},
    io::Read,
};

use crate::processes;

/// The most for one descriptor: a file of `/proc` and a page of its text, or a pipe with two pages.
const DESCRIPTOR: u64 = 16 << 10;
/// A pipe keeps as much (pipe(7)), until those of a user keep so much together
/// (`pipe-user-pages-soft`); each has two pages from then on.
const PIPE: u64 = 64 << 10;
const PIPES: u64 = 64 << 20;
/// For one descriptor that one epoll instance watches (`struct epitem`, `struct eppoll_entry`).
const WATCH: u64 = 192;
/// For one map: a shared one of anonymous memory has a file and an inode of its own. A process has
/// so many at most (`vm.max_map_count`).
const MAP: u64 = 2 << 10;
const MAX_MAPS: u64 = 65_530;

/// How much that is at most. A table of descriptors that cannot be looked at may be full:
/// `most_descriptors`.
pub(super) fn bound(pid_one: i32, most_descriptors: u64, goes_on: &mut dyn FnMut() -> bool) -> u64 {
    let own = pid_one.to_string();
    let (mut descriptors, mut watches, mut maps) = (0_u64, 0_u64, 0_u64);
    processes::each(pid_one, &mut |pid| {
        if *pid == own {
            return true;
        }
        for task in processes::tables(pid) {
            // Its `fd` is refused where the process is not dumpable.
            let open = match read_dir(format!("/proc/{pid}/task/{task}/fdinfo")) {
                Ok(entries) => u64::try_from(entries.count()).unwrap_or(u64::MAX),
                Err(error) if processes::is_refusal(&error) => most_descriptors,
                Err(_) => 0,
            };
            descriptors = descriptors.saturating_add(open);
            // Half of them may watch the others.
            watches = watches.saturating_add((open / 2).saturating_pow(2));
        }
        maps += maps_of(pid);
        goes_on()
    });
    let pipes = descriptors.saturating_mul(PIPE).min(PIPES);
    let each = [(descriptors, DESCRIPTOR), (watches, WATCH), (maps, MAP)];
    each.into_iter().fold(pipes, |all, (count, bytes)| all.saturating_add(count.saturating_mul(bytes)))
}

/// How many maps a process has.
fn maps_of(pid: &str) -> u64 {
    let mut text = vec![0; 64 << 10];
    let mut maps = 0;
    let mut file = match File::open(format!("/proc/{}/maps", processes::living_thread(pid))) {
        Ok(file) => file,
        Err(error) if processes::is_refusal(&error) => return MAX_MAPS,
        Err(_) => return 0,
    };
    while let Ok(length @ 1..) = file.read(&mut text) {
        maps += text.iter().take(length).filter(|byte| **byte == b'\n').fold(0, |count, _| count + 1);
    }
    maps
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bound_grows_with_descriptors() {
        // Its parent stands for pid 1, which is left out.
        let parent = rustix::process::getppid().map_or(1, |pid| pid.as_raw_nonzero().get());
        let before = bound(parent, 0, &mut || true);
        let held: Vec<_> = (0..200).map(|_| File::open("/proc/self/stat")).collect();
        // Other tests of this process may close some meanwhile.
        assert!(bound(parent, 0, &mut || true) >= before + 100 * (DESCRIPTOR + PIPE) && held.iter().all(Result::is_ok));
    }

    #[test]
    fn maps_are_counted() {
        assert!((10..1000).contains(&maps_of("self")) && maps_of("0") == 0);
    }
}
