//! What a run without a cgroup holds of memory.
//!
//! RLIMIT_DATA holds for each process by itself, and for no shared memory: a `memfd` or a shared
//! map counts in no rlimit. So the launcher adds up what the processes hold, and ends a run that
//! holds more than its limit. Files on the run's own tmpfs count where they are mapped, else by
//! the size of their file system. What fills up between two looks comes on top. Memory of the
//! kernel's own is not counted here: `kernel_memory.rs` bounds a part of it, and nothing page tables,
//! socket buffers and pipes.

use std::{
    fs::read_to_string,
    time::{Duration, Instant},
};

use rustix::{
    fs::{MemfdFlags, fstat, memfd_create},
    io::Errno,
};
use stockade_sys::process::{Common, have_in_common};

use crate::processes::{self, FileQuery, NamelessFiles, kibibytes};

/// As fast as two CPUs could fill memory: above what was measured.
const BYTES_PER_US: u64 = 8192;
const MAX_INTERVAL: Duration = Duration::from_millis(MEMORY_INTERVAL_MS);
/// How often at least it is looked at.
pub(crate) const MEMORY_INTERVAL_MS: u64 = 50;
const MIN_INTERVAL: Duration = Duration::from_millis(5);
/// Looking takes at most one part of so many of the time, but for this pause at most: on a busy
/// host it takes long without using much.
const MIN_PAUSE: u32 = 20;
const MAX_PAUSE: Duration = Duration::from_millis(150);
/// How long a look may take: code that forks and ends can keep ahead of it.
const MAX_LOOK: Duration = Duration::from_secs(1);

/// Looks at what the run's processes hold.
pub(super) struct MemorySampler {
    limit: u64,
    /// The device of files in memory that lie on no mounted file system.
    device: u64,
    /// The least shared memory of the host so far, without the run's own tmpfs.
    least_shared: u64,
    pub(super) next: Instant,
}

/// What one process holds, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Resident {
    own: u64,
    shared: u64,
}

impl MemorySampler {
    /// # Errors
    /// The kernel makes no file in memory.
    pub(super) fn new(limit: u64, tmpfs: u64, now: Instant) -> Result<Self, Errno> {
        let device = fstat(memfd_create("stockade", MemfdFlags::CLOEXEC)?)?.st_dev;
        Ok(MemorySampler { limit, device, least_shared: shared_of_host().saturating_sub(tmpfs), next: now + MIN_INTERVAL })
    }

    /// Looks once more, and decides when to look again. Whether the run holds more than its limit.
    /// `tmpfs`: how full the run's own file systems are.
    pub(super) fn look(&mut self, pid_one: i32, tmpfs: u64) -> bool {
        let begun = Instant::now();
        let shared_of_others_and_run = shared_of_host().saturating_sub(tmpfs);
        self.least_shared = self.least_shared.min(shared_of_others_and_run);
        let growth = shared_of_others_and_run - self.least_shared;
        // Memory that processes share is counted here for each: at least what they hold.
        let mut room = held_at_most(pid_one).map_or(0, |most| self.limit.saturating_sub(most.own + most.shared.max(growth)));
        let mut is_over = false;
        if room == 0 {
            processes::free_unreachable();
            let held = self.held(pid_one, growth, &mut || begun.elapsed() < MAX_LOOK);
            is_over = held > self.limit;
            room = self.limit.saturating_sub(held);
        }
        let pause = Duration::from_micros(room / BYTES_PER_US).clamp(MIN_INTERVAL, MAX_INTERVAL);
        self.next = Instant::now() + pause.max((begun.elapsed() * MIN_PAUSE).min(MAX_PAUSE));
        is_over
    }

    /// What the run holds: each page once. Shared memory that no descriptor leads to shows how
    /// much of it is mapped and in use, not how much there is: then the host's growth counts.
    fn held(&self, pid_one: i32, growth: u64, goes_on: &mut dyn FnMut() -> bool) -> u64 {
        let mut all = Resident::default();
        let mut seen: Vec<(i32, u64)> = Vec::new();
        let mut is_told = true;
        processes::each(pid_one, &mut |pid| {
            let Some((pid, status)) = status_of(pid) else {
                is_told = false;
                return goes_on();
            };
            let number = pid.parse().unwrap_or(0);
            let size = kibibytes(&status, "VmSize").unwrap_or(0);
            // vfork(2) lends its memory until the child has another.
            let is_lent = |other: i32| have_in_common(other, number, Common::Memory) == Ok(true);
            if !seen.iter().any(|(other, others)| *others == size && is_lent(*other)) {
                let rollup = read_to_string(format!("/proc/{pid}/smaps_rollup"));
                let part = rollup.as_deref().ok().and_then(proportional).unwrap_or_else(|| resident(&status));
                all = Resident { own: all.own + part.own, shared: all.shared + part.shared };
                seen.push((number, size));
            }
            goes_on()
        });
        let is_wanted = |device| device == self.device;
        let wanted = FileQuery { device: self.device, maps: Some(&is_wanted), root: None, enough: u64::MAX };
        let files = NamelessFiles::of(pid_one, &wanted, goes_on);
        let in_files = files.as_ref().map_or(0, NamelessFiles::bytes);
        let hidden = if !is_told || files.is_none_or(|files| files.may_be_more()) { growth } else { 0 };
        all.own + all.shared.max(in_files).max(hidden)
    }
}

/// Of `/proc/PID/smaps_rollup`: each page divided by the number of processes that map it.
fn proportional(text: &str) -> Option<Resident> {
    Some(Resident { own: kibibytes(text, "Pss_Anon")?, shared: kibibytes(text, "Pss_Shmem")? })
}

/// Of `/proc/PID/status`: each page whole. A process that has ended has none.
fn resident(status: &str) -> Resident {
    Resident { own: kibibytes(status, "RssAnon").unwrap_or(0), shared: kibibytes(status, "RssShmem").unwrap_or(0) }
}

/// A thread of a process that has its memory, and the thread's `/proc/TID/status`: one that is
/// ending has none any more, while others go on. A process that has ended holds nothing. None
/// where one lives and does not tell.
fn status_of(pid: &str) -> Option<(String, String)> {
    let read = |thread: String| {
        let status = read_to_string(format!("/proc/{thread}/status")).unwrap_or_default();
        (thread, status)
    };
    let tells = |(_, status): &(String, String)| kibibytes(status, "RssAnon").is_some();
    let first = read(pid.to_owned());
    if tells(&first) {
        return Some(first);
    }
    let tasks = format!("/proc/{pid}/task");
    let threads = processes::entries(&tasks).filter_map(|task| task.file_name()?.to_str().map(String::from));
    let found = threads.map(read).find(tells);
    found.or_else(|| processes::has_ended(&processes::living_thread(pid)).then_some(first))
}

/// None where a process lives and does not tell.
fn held_at_most(pid_one: i32) -> Option<Resident> {
    let mut all = Some(Resident::default());
    let begun = Instant::now();
    processes::each(pid_one, &mut |pid| {
        all = all.zip(status_of(pid)).map(|(all, (_, status))| {
            let part = resident(&status);
            Resident { own: all.own + part.own, shared: all.shared + part.shared }
        });
        all.is_some() && begun.elapsed() < MAX_LOOK
    });
    all
}

/// Shared memory of the host, tmpfs included.
fn shared_of_host() -> u64 {
    kibibytes(&read_to_string("/proc/meminfo").unwrap_or_default(), "Shmem").unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_of_several_processes_is_divided() {
        let rollup = "Rss: 8 kB\nPss:  4 kB\nPss_Anon:   3 kB\nPss_File:  0 kB\nPss_Shmem:  1 kB\n";
        assert_eq!(proportional(rollup), Some(Resident { own: 3 << 10, shared: 1 << 10 }));
        assert_eq!(proportional("Rss: 8 kB\n"), None);
        assert_eq!(resident("RssAnon:\t 8 kB\nRssFile:\t 4 kB\nRssShmem:\t 2 kB\n"), Resident { own: 8 << 10, shared: 2 << 10 });
        assert_eq!(resident("State:\tZ (zombie)\n"), Resident::default());
    }
}
