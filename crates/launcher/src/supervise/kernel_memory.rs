//! Kernel memory that a run holds and no memory limit counts.
//!
//! The kernel charges some of what it keeps for code to no cgroup: answers that wait in netlink
//! sockets, connections and data of TCP and UDP, without a cgroup of UNIX sockets, too
//! (`sockets.rs`), record locks (`locks.rs`). What the host's kernel holds tells when to count, and
//! so do the run's sockets, whose data no figure of the host shows, and the clock, in case others
//! give back as much: it counts closed sockets, for which the run stands still, after one second and
//! then every ten. What the run itself holds decides:
//! the growth of others ends no run, but one whose locks cannot be counted where as many are held
//! on the host, and one whose sockets, and without a cgroup descriptors and maps, could keep as much
//! as the host has grown by and nothing tells of (`look_at_unshown`). What fills up between two looks comes on top.
//! Not counted is what code can hold little of (`tests/THREAT-MODEL.md` lists it), and what a cgroup
//! charges.

use std::{
    fs::read_to_string,
    thread::sleep,
    time::{Duration, Instant},
};

use rustix::{
    fd::OwnedFd,
    fs::{Mode, OFlags, open},
    io::{Errno, pread},
    param::page_size,
};
use stockade_policy::plan::kernel_memory;

use super::{
    Supervision, closed_sockets, descriptors, failed,
    locks::{are_more_on_host, is_in_namespace_of_host, locks},
    quota::COUNT_KERNEL_MEMORY,
    sockets::{Held, MAX_QUEUED, Sockets, pages_of_closed},
};
use crate::{cgroup::Cgroup, hold::Hold, processes::kibibytes, sock_diag::SockDiag, verdict::Cause};

/// A `struct file_lock` with its share of a page: 199 were measured, older kernels need more.
const LOCK: u64 = 256;
/// Between looks at the host while that grows, and while it does not.
const MIN_INTERVAL: Duration = Duration::from_millis(25);
const MAX_INTERVAL: Duration = Duration::from_millis(100);
/// By how much it grows between two looks without a cause.
const NOISE: u64 = 512 << 10;
/// How often the run is counted though the host has not grown: less often, the longer it takes.
const COUNT_INTERVAL: Duration = Duration::from_secs(1);
const MAX_COUNT_INTERVAL: Duration = Duration::from_secs(10);
const MIN_COUNT_PAUSE: u32 = 100;
/// What a run may hold at least where there is only a bound of it.
const MIN_UNTOLD: u64 = 64 << 20;
/// Counting takes at most one part of so many of the time, but for this pause at most.
const MIN_PAUSE: u32 = 20;
const MAX_PAUSE: Duration = Duration::from_millis(500);
/// How long the locks of the run are counted in all: the launcher does nothing else meanwhile.
const MAX_COUNT: Duration = Duration::from_secs(2);

/// How long the kernel may take to free what a large process held: it takes many huge pages off the
/// process, and off the lines of `/proc/meminfo`, before it frees the first.
const MAX_FREEING: Duration = Duration::from_millis(500);

/// Why the receipt says that the data of sockets is not limited.
const NOT_COUNTED: &str = "the kernel does not tell what all sockets hold (modules inet_diag, tcp_diag, udp_diag and unix_diag; pidfd_getfd(2) of another process), so what they keep beside the memory is not limited";

/// Looks at what the kernel holds for a run.
pub(super) struct KernelMemory {
    /// `/proc/meminfo`, kept open: to open it takes ten times as long as to read it.
    meminfo: OwnedFd,
    sockets: Sockets,
    /// What the run may hold.
    allowed: u64,
    /// The same where there is only a bound.
    allowed_untold: u64,
    /// How many descriptors a process may have, where no cgroup charges what the kernel keeps for them.
    uncharged_descriptors: Option<u64>,
    /// What the host's kernel would hold without the run, as far as is known.
    baseline: u64,
    /// What it held when it was last looked at, with what waited in the run's sockets.
    last: u64,
    /// What the host would have in use without the run and show nowhere, as far as is known; without
    /// free pages.
    unshown: u64,
    /// The least that both came to together at any time.
    least: u64,
    interval: Duration,
    next_count: Instant,
    /// No earlier count of closed sockets where the host has grown, and where it has not.
    next_closed_count: Instant,
    next_closed_count_by_clock: Instant,
    pub(super) next: Instant,
    /// From then on it looks where the loop wakes up anyway.
    may_look_from: Instant,
}

impl KernelMemory {
    /// # Errors
    /// `/proc/meminfo` cannot be opened.
    pub(super) fn new(limit: u64, sock_diag: Option<SockDiag>, uncharged_descriptors: Option<u64>, now: Instant) -> Result<Self, Errno> {
        let meminfo = open("/proc/meminfo", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        let host = held_for_all(&meminfo).without_free();
        Ok(KernelMemory {
            meminfo,
            sockets: Sockets::new(sock_diag, limit),
            allowed: kernel_memory(limit),
            allowed_untold: limit.max(MIN_UNTOLD),
            uncharged_descriptors,
            baseline: host.kernel,
            last: host.kernel,
            unshown: host.unshown,
            least: host.kernel + host.unshown,
            interval: MIN_INTERVAL,
            next_count: now + COUNT_INTERVAL,
            next_closed_count: now,
            next_closed_count_by_clock: now + COUNT_INTERVAL,
            next: now + MIN_INTERVAL,
            may_look_from: now + MIN_INTERVAL,
        })
    }

    pub(super) fn is_due(&self, now: Instant) -> bool {
        now >= self.may_look_from
    }

    /// Looks once more, and decides when to look again. Returns what the run is to be ended for: what
    /// `goes_on` has broken off before `until` is counted by the next look.
    ///
    /// # Errors
    /// The run's sockets cannot be looked at.
    fn look(&mut self, pid_one: i32, cgroup: &Cgroup, until: Instant, goes_on: &mut dyn FnMut() -> bool) -> Result<Option<Cause>, Errno> {
        let begun = Instant::now();
        let HostUse { kernel: host, unshown } = held_for_all(&self.meminfo);
        self.baseline = self.baseline.min(host);
        let has_grown = host - self.baseline > self.allowed;
        let is_due = has_grown || begun >= self.next_count;
        self.least = self.least.min(host + unshown);
        let may_hide = host + unshown - self.least > self.allowed_untold;
        let sockets = self.sockets.look(pid_one, cgroup, self.allowed, is_due || may_hide)?;
        self.interval = if host + sockets.data > self.last + NOISE { MIN_INTERVAL } else { (self.interval * 2).min(MAX_INTERVAL) };
        self.last = host + sockets.data;
        let mut cause = (sockets.data + sockets.kernel > self.allowed).then_some(Cause::KernelMemory);
        if is_due && cause.is_none() {
            let allowed = self.allowed - sockets.data;
            let counted = count(pid_one, sockets.kernel, allowed, has_grown, until, goes_on);
            cause = match counted {
                Counted::All(held) | Counted::AllButHidden(held) => (held > allowed).then_some(Cause::KernelMemory),
                Counted::Unknown => Some(Cause::UncountedKernelMemory),
                Counted::BrokenOff => None,
            };
            // Growth that hidden locks may have caused is not taken for that of others.
            if let Counted::All(held) = counted {
                self.baseline = host.saturating_sub(held);
            }
            if !matches!(counted, Counted::BrokenOff) {
                self.next_count = Instant::now() + (begun.elapsed() * MIN_COUNT_PAUSE).clamp(COUNT_INTERVAL, MAX_COUNT_INTERVAL);
            }
        }
        if cause.is_none() {
            let host = HostUse { kernel: host, unshown };
            cause = self.look_at_unshown(pid_one, self.allowed - sockets.data, host, &sockets, until, goes_on);
        }
        let pause = self.interval.max((begun.elapsed() * MIN_PAUSE).min(MAX_PAUSE));
        self.next = Instant::now() + pause;
        self.may_look_from = self.next.checked_sub(pause / 2).unwrap_or(self.next);
        Ok(cause)
    }

    /// Looks at what the host has more in use and does not show, where the run has sockets that may
    /// hold it.
    /// Closed sockets are counted where there are so many that they could hold more than `allowed`:
    /// the run must stand still for it. What the clock alone finds uncountable ends no run.
    /// What sockets may keep and no dump tells of has only a bound, and so have descriptors and maps
    /// without a cgroup: the run ends where the host has grown by more than a whole `memory` that
    /// nothing explains, and the bound is more than that.
    fn look_at_unshown(
        &mut self,
        pid_one: i32,
        allowed: u64,
        mut host: HostUse,
        sockets: &Held,
        until: Instant,
        goes_on: &mut dyn FnMut() -> bool,
    ) -> Option<Cause> {
        let begun = Instant::now();
        self.unshown = self.unshown.min(host.unshown);
        let may_have_grown = host.unshown - self.unshown > self.allowed || self.unexplained(&host, sockets).is_some();
        let has_sockets = sockets.closed > 0 || sockets.untold > 0;
        let is_due_by_clock = has_sockets && begun >= self.next_closed_count_by_clock;
        let may_hold_it = has_sockets || self.uncharged_descriptors.is_some();
        if !may_hold_it || !(may_have_grown || is_due_by_clock) {
            return None;
        }
        host = host.without_free();
        self.unshown = self.unshown.min(host.unshown);
        self.least = self.least.min(host.kernel + host.unshown);
        let unexplained = self.unexplained(&host, sockets);
        let has_grown = host.unshown - self.unshown > self.allowed || unexplained.is_some();
        let is_due = if has_grown { begun >= self.next_closed_count } else { is_due_by_clock };
        let may_hold = sockets.closed * MAX_QUEUED > allowed || (sockets.closed > 0 && unexplained.is_some());
        let mut in_closed = 0;
        // What can be counted is, before a bound decides.
        if is_due && may_hold && self.can_count_closed() {
            match closed_sockets::held(pid_one, &mut self.sockets, allowed, goes_on) {
                Some(held) if held > allowed => return Some(Cause::KernelMemory),
                // The rest is that of others.
                Some(held) => {
                    in_closed = held;
                    self.unshown = host.unshown.saturating_sub(held);
                }
                None if !goes_on() && Instant::now() < until => return None,
                None if has_grown => return Some(Cause::UncountedKernelMemory),
                None => {}
            }
            let now = Instant::now();
            if has_grown {
                self.next_closed_count = now + (begun.elapsed() * MIN_COUNT_PAUSE).clamp(COUNT_INTERVAL, MAX_COUNT_INTERVAL);
            }
            self.next_closed_count_by_clock = now + MAX_COUNT_INTERVAL;
        }
        let mut untold = sockets.untold + pages_of_closed(in_closed);
        if let Some(most) = self.uncharged_descriptors.filter(|_| unexplained.is_some()) {
            untold = untold.saturating_add(descriptors::bound(pid_one, most, goes_on));
        }
        self.stays_unexplained(pid_one, host, sockets, untold, goes_on).then_some(Cause::UncountedKernelMemory)
    }

    fn can_count_closed(&mut self) -> bool {
        let can = closed_sockets::can_be_counted(&self.meminfo);
        self.sockets.is_blind |= !can;
        can
    }

    /// Whether the host has more in use that nothing explains and `untold` could be, and still has so
    /// after a while in which the run stands still: what a large process of others gave back when it
    /// ended shows nowhere until the kernel has freed it. A run that cannot be held is looked at once.
    fn stays_unexplained(&self, pid_one: i32, mut host: HostUse, sockets: &Held, untold: u64, goes_on: &mut dyn FnMut() -> bool) -> bool {
        let may_be_of_run = |host: &HostUse| self.unexplained(host, sockets).is_some_and(|bytes| untold > bytes);
        if !may_be_of_run(&host) {
            return false;
        }
        let Some(_hold) = Hold::take(pid_one, goes_on) else { return true };
        let begun = Instant::now();
        while may_be_of_run(&host) && begun.elapsed() < MAX_FREEING && goes_on() {
            sleep(MAX_FREEING / 10);
            host = held_for_all(&self.meminfo).without_free();
        }
        may_be_of_run(&host)
    }

    /// What the host has more in use than at its least, and the run's sockets do not tell of, if it is
    /// more than a run may hold so.
    fn unexplained(&self, host: &HostUse, sockets: &Held) -> Option<u64> {
        let bytes = (host.kernel + host.unshown).saturating_sub(self.least + sockets.told + sockets.kernel);
        (bytes > self.allowed_untold).then_some(bytes)
    }
}

/// What the run holds, with `in_sockets`. Locks are sought only where the host has enough of them.
/// In another PID namespace the host hides those whose taker has ended, so there also where it
/// `has_grown`.
fn count(pid_one: i32, in_sockets: u64, allowed: u64, has_grown: bool, until: Instant, goes_on: &mut dyn FnMut() -> bool) -> Counted {
    let room = allowed.saturating_sub(in_sockets) / LOCK;
    let may_be_more = || are_more_on_host(room) || (has_grown && !is_in_namespace_of_host());
    let without_locks = || if is_in_namespace_of_host() { Counted::All(in_sockets) } else { Counted::AllButHidden(in_sockets) };
    if in_sockets > allowed || !may_be_more() {
        return without_locks();
    }
    match locks(pid_one, room, goes_on) {
        Some(locks) => Counted::All(in_sockets + locks * LOCK),
        // A run that makes it last until then has not been counted.
        None if !goes_on() && Instant::now() < until => Counted::BrokenOff,
        // What cannot be looked at, or cannot be held, could have every lock of the host.
        None if may_be_more() => Counted::Unknown,
        None => without_locks(),
    }
}

/// What a count has come to.
enum Counted {
    /// Bytes.
    All(u64),
    /// The same, but for locks that the host may hide.
    AllButHidden(u64),
    /// It was not made, and the host has so many locks that the run could hold too many.
    Unknown,
    /// Something else is to be done first.
    BrokenOff,
}

impl Supervision<'_> {
    pub(super) fn check_kernel_memory(&mut self) {
        let pid = self.teardown.sandbox.pid();
        let Some(mut memory) = self.quota.kernel_memory.take().filter(|_| !self.all_have_ended()) else { return };
        let until = Instant::now() + MAX_COUNT;
        let cause = memory.look(pid, &self.teardown.cgroup, until, &mut self.may_go_on(until));
        if memory.sockets.is_blind {
            self.state.note_degraded("socket_memory", NOT_COUNTED);
        }
        match cause {
            Ok(None) => self.quota.kernel_memory = Some(memory),
            Ok(Some(cause)) => self.end(cause),
            Err(errno) => self.break_off(failed(COUNT_KERNEL_MEMORY)(errno)),
        }
    }
}

/// What the host has in use.
struct HostUse {
    /// What its kernel holds and cannot give back.
    kernel: u64,
    /// Pages that no line of `/proc/meminfo` shows, as those of sockets' data, with the free ones of
    /// the lists of each CPU.
    unshown: u64,
}

impl HostUse {
    /// The same without the free pages of the lists of each CPU.
    fn without_free(self) -> Self {
        HostUse { unshown: self.unshown.saturating_sub(free_in_lists()), ..self }
    }
}

/// Free pages in the lists of each CPU, in bytes: the kernel keeps there what was given back, which
/// no line of `/proc/meminfo` shows. They were up to 190 MiB for a CPU on Linux 6.18.
fn free_in_lists() -> u64 {
    let zones = read_to_string("/proc/zoneinfo").unwrap_or_default();
    let pages = zones.lines().filter_map(|line| line.trim_start().strip_prefix("count:")?.trim().parse::<u64>().ok()).sum::<u64>();
    pages * u64::try_from(page_size()).unwrap_or(4096)
}

fn held_for_all(meminfo: &OwnedFd) -> HostUse {
    const SHOWN: [&str; 14] = [
        "MemFree",
        "Buffers",
        "Cached",
        "SwapCached",
        "AnonPages",
        "Slab",
        "KernelStack",
        "PageTables",
        "SecPageTables",
        "VmallocUsed",
        "Percpu",
        "Hugetlb",
        "WritebackTmp",
        "Zswap",
    ];
    let mut text = [0; 4096];
    let length = pread(meminfo, &mut text, 0).unwrap_or(0);
    let text = String::from_utf8_lossy(text.get(..length).unwrap_or_default());
    let sum = |keys: &[&str]| keys.iter().filter_map(|key| kibibytes(&text, key)).sum::<u64>();
    HostUse { kernel: sum(&["SUnreclaim", "VmallocUsed"]), unshown: sum(&["MemTotal"]).saturating_sub(sum(&SHOWN)) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::*;

    #[test]
    fn what_the_kernel_holds_is_known() {
        assert!(KernelMemory::new(1 << 30, None, None, Instant::now()).unwrap().baseline > 1 << 20);
    }

    #[test]
    fn free_pages_of_each_cpu_are_known() {
        // The kernel gives some back to the others now and then.
        assert!((0..100).any(|_| free_in_lists() > 0) && free_in_lists() < 16 << 30);
    }
}
