//! What a run without a cgroup holds of memory.
//!
//! RLIMIT_DATA holds for each process by itself, and for no shared memory: a `memfd` or a shared
//! map counts in no rlimit. So the launcher adds up what the processes hold, and ends a run that
//! holds more than its limit. Files on the run's own tmpfs count where they are mapped, else by
//! the size of their file system. What fills up between two looks comes on top.
//!
//! A look adds up what each process has mapped. It is quick, and finds too much where processes
//! share memory. A count divides what is shared. It is slow for a large family of forks, code can
//! make it slow by many maps, and processes that end meanwhile make it too large: before a count
//! ends a run of several processes, it is made again while the run stands still. What
//! a count has not reached counts as far as the host has lost memory. Of the kernel's own memory only
//! page tables are counted here: `kernel_memory.rs` bounds another part of it, and nothing maps,
//! pipes and what TCP has not delivered.

use std::{
    cmp::Reverse,
    fs::read_to_string,
    time::{Duration, Instant},
};

use rustix::{
    fs::{MemfdFlags, fstat, memfd_create},
    io::Errno,
};
use stockade_policy::plan::kernel_memory;
use stockade_sys::process::{Common, have_in_common};

use crate::{
    error::errno_of,
    hold::{Hold, MAX_RESISTANCE},
    processes::{self, FileQuery, NamelessFiles, kibibytes},
    scratch::usage::LinkedOutside,
};

/// As fast as two CPUs could fill memory: above what was measured.
const BYTES_PER_US: u64 = 8192;
const MAX_INTERVAL: Duration = Duration::from_millis(MEMORY_INTERVAL_MS);
/// How often at least it is looked at.
pub(crate) const MEMORY_INTERVAL_MS: u64 = 50;
const MIN_INTERVAL: Duration = Duration::from_millis(5);
/// Looks take one part of so many of the time, and so do counts. On a busy host they take long
/// without using much: the pause is this at most, or so many times as long as a long one.
const MIN_PAUSE: u32 = 20;
const MAX_PAUSE: Duration = Duration::from_millis(150);
const MIN_PAUSE_OF_LONG: u32 = 3;
/// How long a look may take: code that forks and ends can keep ahead of it.
const MAX_LOOK: Duration = Duration::from_millis(100);
/// How long holding the run may take, however much memory the host loses meanwhile. After that it
/// goes on, up to MAX_RESISTANCE, only while the host has lost less than half of the limit: on a
/// busy host forty processes take 0.2 s to stop.
const MAX_TAKE: Duration = Duration::from_millis(200);
/// How long a count may take while the run stands still: of 64 processes that share 256 MiB on a
/// busy host. The kernel takes some 0.1 us for each page of each process.
const MAX_HELD_LOOK: Duration = Duration::from_secs(2);
/// How long a look with both counts may take.
pub(super) const MAX_TIME: Duration = MAX_LOOK.saturating_add(MAX_RESISTANCE).saturating_add(MAX_HELD_LOOK);
/// A process that has more in use, and more than the limit, is not counted: the kernel takes some
/// 60 ms to tell, and nothing interrupts that.
const MAX_READ: u64 = 4 << 30;

/// Looks at what the run's processes hold.
pub(super) struct MemorySampler {
    limit: u64,
    /// The device of files in memory that lie on no mounted file system.
    device: u64,
    /// What the host would hold without the run, as far as is known; the run's own tmpfs left out.
    without: Resident,
    /// No earlier count, unless the host has lost more than the limit.
    next_count: Instant,
    pub(super) next: Instant,
}

/// Memory in use, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Resident {
    own: u64,
    shared: u64,
}

impl Resident {
    fn plus(self, other: Self) -> Self {
        Resident { own: self.own + other.own, shared: self.shared + other.shared }
    }

    fn minus(self, other: Self) -> Self {
        Resident { own: self.own.saturating_sub(other.own), shared: self.shared.saturating_sub(other.shared) }
    }

    fn min(self, other: Self) -> Self {
        Resident { own: self.own.min(other.own), shared: self.shared.min(other.shared) }
    }
}

/// A process, as `/proc/PID/status` shows it.
struct Process {
    pid: String,
    /// A thread that has its memory.
    thread: String,
    /// Each page whole.
    mapped: Resident,
    page_tables: u64,
    /// With files of the host.
    in_use: u64,
    size: u64,
}

/// The processes of a run, as a look finds them.
struct Look {
    /// First those that have most of their own; one for each memory.
    processes: Vec<Process>,
    mapped: Resident,
    page_tables: u64,
    /// Every process that lives tells what it has.
    is_told: bool,
    /// All were looked at.
    is_whole: bool,
}

/// What a count has come to.
struct Count {
    held: u64,
    /// What the run holds, where nothing was missed.
    seen: Option<Resident>,
    is_broken_off: bool,
}

impl MemorySampler {
    /// # Errors
    /// The kernel makes no file in memory.
    pub(super) fn new(limit: u64, tmpfs: u64, now: Instant) -> Result<Self, Errno> {
        let device = fstat(memfd_create("stockade", MemfdFlags::CLOEXEC)?)?.st_dev;
        // One process may fill all of it (RLIMIT_DATA) and be told so; those beside it hold some, too.
        let limit = limit.saturating_add(limit / 16);
        Ok(MemorySampler { limit, device, without: of_host(tmpfs), next_count: now, next: now + MIN_INTERVAL })
    }

    /// Looks once more, and decides when to look again. Whether the run holds more than its limit.
    /// `tmpfs`: how full the run's own file systems are. `may_go_on`: nothing else is to be done.
    pub(super) fn look(&mut self, pid_one: i32, tmpfs: u64, may_go_on: &mut dyn FnMut() -> bool) -> bool {
        let begun = Instant::now();
        let mut goes_on = || begun.elapsed() < MAX_LOOK && may_go_on();
        let host = of_host(tmpfs);
        self.without = self.without.min(host);
        let growth = host.minus(self.without);
        let look = self.look_at(pid_one, &mut goes_on);
        let pause_of_look = pause_after(begun.elapsed());
        let mut held = look.at_most(growth);
        let mut is_decided = true;
        let mut is_over = false;
        if held > self.limit {
            held = look.by_growth(growth);
            let is_lost = held > self.limit;
            if is_lost || begun >= self.next_count {
                processes::free_unreachable();
                let grows = || look.by_growth(of_host(tmpfs).minus(self.without)) > self.limit;
                // What is lost meanwhile is looked at first.
                let mut count = self.count(pid_one, &look, growth, &mut || goes_on() && (is_lost || !grows()));
                is_decided = !count.is_broken_off || begun.elapsed() >= MAX_LOOK;
                // Where a process ends during a count, its share of the memory that others map, too, counts
                // a second time, for those. So a count of several decides only while they stand still.
                if is_decided && count.held > self.limit && look.processes.len() > 1 {
                    (count, is_decided) = self.count_held(pid_one, tmpfs, may_go_on).unwrap_or((count, true));
                }
                is_over = is_decided && count.held > self.limit;
                held = count.held;
                if let Some(seen) = count.seen {
                    self.without = of_host(tmpfs).minus(seen);
                }
                self.next_count = Instant::now() + pause_after(begun.elapsed());
            }
        }
        let pause = Duration::from_micros(self.limit.saturating_sub(held) / BYTES_PER_US).clamp(MIN_INTERVAL, MAX_INTERVAL);
        self.next = Instant::now() + if is_decided { pause.max(pause_of_look) } else { Duration::ZERO };
        is_over
    }

    /// What the run's processes have mapped.
    fn look_at(&self, pid_one: i32, goes_on: &mut dyn FnMut() -> bool) -> Look {
        let look = Look::at(pid_one, goes_on);
        // A run may hold that much of the kernel's memory beside its own, as with a cgroup.
        let page_tables = look.page_tables.saturating_sub(kernel_memory(self.limit));
        Look { page_tables, ..look }
    }

    /// What the run holds, counted for longer because it stands still, and whether that decides:
    /// what others fill meanwhile does not. None where it cannot be held, or has not stood still to
    /// the end.
    fn count_held(&self, pid_one: i32, tmpfs: u64, may_go_on: &mut dyn FnMut() -> bool) -> Option<(Count, bool)> {
        let asked = Instant::now();
        let of_all = || {
            let Resident { own, shared } = of_host(tmpfs);
            own + shared
        };
        let most = of_all() + self.limit / 2;
        let hold = Hold::take(pid_one, &mut || (asked.elapsed() < MAX_TAKE || of_all() <= most) && may_go_on())?;
        let begun = Instant::now();
        let mut goes_on = || begun.elapsed() < MAX_HELD_LOOK && may_go_on();
        let look = self.look_at(pid_one, &mut goes_on);
        let growth = of_host(tmpfs).minus(self.without);
        let count = self.count(pid_one, &look, growth, &mut goes_on);
        let is_decided = !count.is_broken_off || begun.elapsed() >= MAX_HELD_LOOK;
        hold.is_whole().then_some((count, is_decided))
    }

    /// What the run holds: each page once. Shared memory that no descriptor leads to shows how
    /// much of it is mapped and in use, not how much there is: then the host's growth counts.
    fn count(&self, pid_one: i32, look: &Look, growth: Resident, goes_on: &mut dyn FnMut() -> bool) -> Count {
        let mut all = Resident::default();
        let mut is_whole = look.is_whole;
        for process in &look.processes {
            // Whatever is not reached, this much there is.
            let least = all.own + all.shared + look.page_tables;
            if least > self.limit {
                return Count { held: least, seen: None, is_broken_off: false };
            }
            if !goes_on() {
                is_whole = false;
                break;
            }
            match process.divided(self.limit.max(MAX_READ)) {
                Some(part) => all = all.plus(part),
                None => is_whole = false,
            }
        }
        let is_wanted = |device| device == self.device;
        let wanted =
            FileQuery { device: self.device, linked_outside: &LinkedOutside::new(), maps: Some(&is_wanted), root: None, enough: u64::MAX };
        let files = NamelessFiles::of(pid_one, &wanted, goes_on);
        let in_files = files.as_ref().map_or(0, NamelessFiles::bytes);
        let is_broken_off = files.is_none();
        let is_hidden = !is_whole || !look.is_told || files.is_none_or(|files| files.may_be_more());
        let own = if is_whole { all.own } else { all.own.max(look.own_by_growth(growth)) };
        let shared = all.shared.max(in_files).max(if is_hidden { growth.shared } else { 0 });
        let seen = (!is_hidden).then_some(Resident { own, shared });
        Count { held: own + shared + look.page_tables, seen, is_broken_off }
    }
}

impl Look {
    fn at(pid_one: i32, goes_on: &mut dyn FnMut() -> bool) -> Self {
        let mut processes: Vec<Process> = Vec::new();
        let mut is_told = true;
        let is_whole = processes::each(pid_one, &mut |pid| {
            match status_of(pid) {
                Some((thread, status)) => {
                    let found = Process::of(pid, thread, &status);
                    if !processes.iter().any(|other| other.lends_to(&found)) {
                        processes.push(found);
                    }
                }
                None => is_told = false,
            }
            goes_on()
        });
        processes.sort_by_key(|process| Reverse(process.mapped.own));
        let mapped = processes.iter().fold(Resident::default(), |all, process| all.plus(process.mapped));
        let page_tables = processes.iter().map(|process| process.page_tables).sum();
        Look { processes, mapped, page_tables, is_told, is_whole }
    }

    /// No less than the run holds: memory that processes share counts for each.
    fn at_most(&self, growth: Resident) -> u64 {
        let known = self.is_told && self.is_whole;
        if known { self.mapped.own + self.mapped.shared.max(growth.shared) + self.page_tables } else { u64::MAX }
    }

    /// What the run holds by what the host has lost, where nothing else has changed.
    fn by_growth(&self, growth: Resident) -> u64 {
        self.own_by_growth(growth) + growth.shared + self.page_tables
    }

    fn own_by_growth(&self, growth: Resident) -> u64 {
        if self.is_whole { self.mapped.own.min(growth.own) } else { growth.own }
    }
}

impl Process {
    fn of(pid: &str, thread: String, status: &str) -> Self {
        let value = |key| kibibytes(status, key).unwrap_or(0);
        Process {
            pid: pid.to_owned(),
            thread,
            mapped: resident(status),
            page_tables: value("VmPTE"),
            in_use: value("VmRSS"),
            size: value("VmSize"),
        }
    }

    /// Whether both have the same memory: vfork(2) lends it until the child has another.
    fn lends_to(&self, other: &Process) -> bool {
        let number = |process: &Process| process.thread.parse().unwrap_or(0);
        self.size == other.size && have_in_common(number(self), number(other), Common::Memory) == Ok(true)
    }

    /// Each page divided by the number of processes that map it. None where more than `most` is in
    /// use, where the thread has ended and others may have the memory, and where the kernel is taking
    /// that back: that can take it longer than a look.
    fn divided(&self, most: u64) -> Option<Resident> {
        if self.in_use > most {
            return None;
        }
        match read_to_string(format!("/proc/{}/smaps_rollup", self.thread)) {
            Ok(rollup) => proportional(&rollup).or(Some(self.mapped)),
            Err(_) if processes::is_over(&self.pid) => Some(Resident::default()),
            Err(error) if matches!(errno_of(&error), Errno::SRCH | Errno::NOENT) => None,
            Err(_) => Some(self.mapped),
        }
    }
}

/// Of `/proc/PID/smaps_rollup`: each page, in memory or swapped out, divided by the number of
/// processes that map it.
fn proportional(text: &str) -> Option<Resident> {
    let swapped = kibibytes(text, "SwapPss").unwrap_or(0);
    Some(Resident { own: kibibytes(text, "Pss_Anon")? + swapped, shared: kibibytes(text, "Pss_Shmem")? })
}

/// Of `/proc/PID/status`: each page whole. A process that has ended has none.
fn resident(status: &str) -> Resident {
    let value = |key| kibibytes(status, key).unwrap_or(0);
    Resident { own: value("RssAnon") + value("VmSwap"), shared: value("RssShmem") }
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
    found.or_else(|| processes::is_over(pid).then_some(first))
}

fn pause_after(took: Duration) -> Duration {
    (took * MIN_PAUSE).min(MAX_PAUSE).max(took * MIN_PAUSE_OF_LONG)
}

/// What the whole host holds, but for the run's own tmpfs.
fn of_host(tmpfs: u64) -> Resident {
    let text = read_to_string("/proc/meminfo").unwrap_or_default();
    let value = |key| kibibytes(&text, key).unwrap_or(0);
    // What is swapped out may be of either kind.
    let swapped = value("SwapTotal").saturating_sub(value("SwapFree"));
    Resident { own: value("AnonPages") + swapped, shared: (value("Shmem") + swapped).saturating_sub(tmpfs) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_of_several_processes_is_divided() {
        let rollup = "Rss: 8 kB\nPss:  4 kB\nPss_Anon:   3 kB\nPss_File:  0 kB\nPss_Shmem:  1 kB\n";
        assert_eq!(proportional(rollup), Some(Resident { own: 3 << 10, shared: 1 << 10 }));
        assert_eq!(proportional(&format!("{rollup}SwapPss: 5 kB\n")), Some(Resident { own: 8 << 10, shared: 1 << 10 }));
        assert_eq!(proportional("Rss: 8 kB\n"), None);
        assert_eq!(resident("RssAnon:\t 8 kB\nRssFile:\t 4 kB\nRssShmem:\t 2 kB\n"), Resident { own: 8 << 10, shared: 2 << 10 });
        assert_eq!(resident("RssAnon:\t 8 kB\nRssShmem:\t 2 kB\nVmSwap:\t 1 kB\n"), Resident { own: 9 << 10, shared: 2 << 10 });
        assert_eq!(resident("State:\tZ (zombie)\n"), Resident::default());
    }

    #[test]
    #[expect(clippy::print_stderr, reason = "it says why it was not tried")]
    fn a_process_whose_memory_is_taken_back_has_none_of_its_own_and_tells_none() {
        let mapped = Resident { own: 1 << 30, shared: 1 << 30 };
        let of = |thread: &str| Process {
            pid: thread.to_owned(),
            thread: thread.to_owned(),
            mapped,
            page_tables: 0,
            in_use: 1 << 20,
            size: 1 << 30,
        };
        // A thread of the kernel lives without memory, as a process does that is ending.
        let is_kernels = |pid: &String| read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| stat.starts_with("2 (kthreadd)"));
        match Some("2".to_owned()).filter(is_kernels) {
            Some(kernels) => assert_eq!(of(&kernels).divided(u64::MAX), None),
            None => eprintln!("not tried: this PID namespace shows no thread of the kernel"),
        }
        // The controls: one that has ended, and one that tells.
        assert_eq!(of("4194304").divided(u64::MAX), Some(Resident::default()));
        assert!(of("self").divided(u64::MAX).is_some_and(|part| part.own > 0 && part != mapped));
    }
}
