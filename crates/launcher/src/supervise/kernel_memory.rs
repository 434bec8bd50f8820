//! Kernel memory that a run holds and no memory limit counts.
//!
//! The kernel charges some of what it keeps for code to no cgroup: answers that wait in netlink
//! sockets, TCP connections that no accept(2) has taken and what waits in them, what UDP sockets
//! have not sent yet or have back as errors, record locks. What the host's kernel holds tells when
//! to count, and so do the run's sockets, whose data no figure of the host shows, and the clock, in
//! case others give back as much. What the run itself holds decides: the growth of others ends no
//! run, but one whose locks cannot be counted where as many are held on the host. What fills up
//! between two looks comes on top.
//! Not counted is what code can hold little of (`tests/THREAT-MODEL.md` lists it), and what a cgroup
//! charges.

use std::{
    fs::File,
    io::Read,
    time::{Duration, Instant},
};

use rustix::{
    fd::OwnedFd,
    fs::{Mode, OFlags, open},
    io::{Errno, pread},
    path::Arg,
};
use stockade_policy::plan::kernel_memory;

use super::{
    Supervision,
    locks::{are_more_on_host, is_in_namespace_of_host, locks},
};
use crate::{proc, processes::kibibytes, verdict::Cause};

/// A connection, and one that has ended and waits (TIME_WAIT): measured on Linux 6.18.
const CONNECTION: u64 = 4096;
const ENDED_CONNECTION: u64 = 256;
/// A netlink socket, and what a UDP socket with SO_REUSEPORT has beside itself.
const UNCHARGED_SOCKET: u64 = 2048;
/// What a TCP or UDP socket keeps at most: 8 MiB each way, twice the kernel's `rmem_max`.
const MAX_QUEUED: u64 = 16 << 20;
/// What the kernel keeps for a byte that waits: 1.2 were measured, 12 where each was sent alone.
const PER_QUEUED_BYTE: u64 = 2;
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
/// Counting takes at most one part of so many of the time, but for this pause at most.
const MIN_PAUSE: u32 = 20;
const MAX_PAUSE: Duration = Duration::from_millis(500);
/// How long the locks of the run are counted in all: the launcher does nothing else meanwhile.
const MAX_COUNT: Duration = Duration::from_secs(2);
/// How long the tables of sockets are read: for each page of UDP's the kernel begins anew.
const MAX_TABLES: Duration = Duration::from_millis(500);
/// Looks at what the kernel holds for a run.
pub(super) struct KernelMemory {
    /// `/proc/meminfo`, kept open: to open it takes ten times as long as to read it.
    meminfo: OwnedFd,
    /// What the run may hold.
    allowed: u64,
    /// What the host's kernel would hold without the run, as far as is known.
    baseline: u64,
    /// What it held when it was last looked at, with what waited in the run's sockets.
    last: u64,
    interval: Duration,
    next_count: Instant,
    pub(super) next: Instant,
    /// From then on it looks where the loop wakes up anyway.
    may_look_from: Instant,
}

impl KernelMemory {
    /// # Errors
    /// `/proc/meminfo` cannot be opened.
    pub(super) fn new(limit: u64, now: Instant) -> Result<Self, Errno> {
        let meminfo = open("/proc/meminfo", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        let host = held_for_all(&meminfo);
        Ok(KernelMemory {
            meminfo,
            allowed: kernel_memory(limit),
            baseline: host,
            last: host,
            interval: MIN_INTERVAL,
            next_count: now + COUNT_INTERVAL,
            next: now + MIN_INTERVAL,
            may_look_from: now + MIN_INTERVAL,
        })
    }

    pub(super) fn is_due(&self, now: Instant) -> bool {
        now >= self.may_look_from
    }

    /// Looks once more, and decides when to look again. Returns what the run is to be ended for: what
    /// `goes_on` has broken off before `until` is counted by the next look.
    fn look(&mut self, pid_one: i32, until: Instant, goes_on: &mut dyn FnMut() -> bool) -> Option<Cause> {
        let begun = Instant::now();
        let host = held_for_all(&self.meminfo);
        self.baseline = self.baseline.min(host);
        let has_grown = host - self.baseline > self.allowed;
        let is_due = has_grown || begun >= self.next_count;
        let network = Network::of(pid_one, self.allowed, is_due);
        self.interval = if host + network.queued > self.last + NOISE { MIN_INTERVAL } else { (self.interval * 2).min(MAX_INTERVAL) };
        self.last = host + network.queued;
        let mut cause = (network.queued + network.held > self.allowed).then_some(Cause::OutOfMemory);
        if is_due && cause.is_none() {
            let allowed = self.allowed - network.queued;
            let counted = count(pid_one, network.held, allowed, has_grown, until, goes_on);
            cause = match counted {
                Counted::All(held) | Counted::AllButHidden(held) => (held > allowed).then_some(Cause::OutOfMemory),
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
        let pause = self.interval.max((begun.elapsed() * MIN_PAUSE).min(MAX_PAUSE));
        self.next = Instant::now() + pause;
        self.may_look_from = self.next.checked_sub(pause / 2).unwrap_or(self.next);
        cause
    }
}

/// What the run holds, with `in_network`. Locks are sought only where the host has enough of them.
/// In another PID namespace the host hides those whose taker has ended, so there also where it
/// `has_grown`.
fn count(pid_one: i32, in_network: u64, allowed: u64, has_grown: bool, until: Instant, goes_on: &mut dyn FnMut() -> bool) -> Counted {
    let room = allowed.saturating_sub(in_network) / LOCK;
    let may_be_more = || are_more_on_host(room) || (has_grown && !is_in_namespace_of_host());
    let without_locks = || if is_in_namespace_of_host() { Counted::All(in_network) } else { Counted::AllButHidden(in_network) };
    if in_network > allowed || !may_be_more() {
        return without_locks();
    }
    match locks(pid_one, room, goes_on) {
        Some(locks) => Counted::All(in_network + locks * LOCK),
        // A run that makes it last until then has not been counted.
        None if !goes_on() && Instant::now() < until => Counted::BrokenOff,
        // What cannot be looked at, or cannot be held, could have every lock of the host.
        None if may_be_more() => Counted::Unknown,
        None => without_locks(),
    }
}

/// Bytes that the sockets of the run's network namespace hold beside their cgroup.
#[derive(Default)]
struct Network {
    /// In what counts as the kernel's memory on the host, too.
    held: u64,
    /// In pages of data, which no figure of the host shows.
    queued: u64,
}

impl Network {
    /// A table is read only where it has sockets and all of them can hold more than `allowed`, or the
    /// count `is_due`: the kernel walks that of the whole host, some 20 ms where that is large.
    fn of(pid_one: i32, allowed: u64, is_due: bool) -> Self {
        let path = |name| format!("/proc/{pid_one}/net/{name}");
        let file = |name| read(path(name)).unwrap_or_default();
        let protocols = file("protocols");
        let [tcp, tcp6, udp, udp6, netlink] = ["TCP", "TCPv6", "UDP", "UDPv6", "NETLINK"].map(|name| sockets(&protocols, name));
        let uncharged = (udp + udp6 + netlink) * UNCHARGED_SOCKET;
        if !is_due && (tcp + tcp6 + udp + udp6) * MAX_QUEUED + uncharged <= allowed {
            return Network::default();
        }
        let connections = connections(&file("sockstat")) + connections(&file("sockstat6"));
        let held = waiting(&file("netlink")) + connections + uncharged;
        if held > allowed {
            return Network { held, queued: 0 };
        }
        let until = Instant::now() + MAX_TABLES;
        let table = |name, sockets, bytes: fn(&str) -> u64| if sockets == 0 { 0 } else { bytes(&read_until(&path(name), until)) };
        let of_tcp = table("tcp", tcp, not_accepted) + table("tcp6", tcp6, not_accepted);
        let of_udp = table("udp", udp, unread) + table("udp6", udp6, unread);
        Network { held, queued: of_tcp + of_udp }
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
        let cause = memory.look(pid, until, &mut self.may_go_on(until));
        match cause {
            Some(cause) => self.end(cause),
            None => self.quota.kernel_memory = Some(memory),
        }
    }
}

fn read(path: impl Arg) -> Result<String, Errno> {
    proc::read_to_string(open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
}

/// As much of a file as is read by then.
fn read_until(path: &str, until: Instant) -> String {
    let (mut text, mut page) = (Vec::new(), [0; 1 << 14]);
    if let Ok(mut file) = File::open(path) {
        while let Ok(length @ 1..) = file.read(&mut page) {
            text.extend_from_slice(page.get(..length).unwrap_or_default());
            if Instant::now() >= until {
                break;
            }
        }
    }
    String::from_utf8_lossy(&text).into_owned()
}

/// What the host's kernel holds and cannot give back.
fn held_for_all(meminfo: &OwnedFd) -> u64 {
    let mut text = [0; 4096];
    let length = pread(meminfo, &mut text, 0).unwrap_or(0);
    let text = String::from_utf8_lossy(text.get(..length).unwrap_or_default());
    ["SUnreclaim", "VmallocUsed"].into_iter().filter_map(|key| kibibytes(&text, key)).sum()
}

/// Bytes that wait in the netlink sockets of `/proc/PID/net/netlink`: its column Rmem.
fn waiting(netlink: &str) -> u64 {
    let of = |line: &str| line.split_ascii_whitespace().nth(4)?.parse::<u64>().ok();
    netlink.lines().skip(1).filter_map(of).sum()
}

/// Bytes of the TCP connections of `/proc/PID/net/sockstat`, whose line has `inuse` and `tw`, or
/// of `sockstat6`.
fn connections(sockstat: &str) -> u64 {
    let Some(words) = sockstat.lines().find_map(|line| line.strip_prefix("TCP: ").or_else(|| line.strip_prefix("TCP6: "))) else {
        return 0;
    };
    let words: Vec<&str> = words.split_ascii_whitespace().collect();
    let after = |key| words.iter().zip(words.iter().skip(1)).find(|(word, _)| **word == key).and_then(|(_, count)| count.parse().ok());
    after("inuse").unwrap_or(0) * CONNECTION + after("tw").unwrap_or(0) * ENDED_CONNECTION
}

/// How many sockets of a protocol `/proc/PID/net/protocols` has, bound or not.
fn sockets(protocols: &str, name: &str) -> u64 {
    let of = |line: &str| {
        let mut words = line.split_ascii_whitespace();
        words.next().filter(|first| *first == name).and_then(|_| words.nth(1)?.parse::<u64>().ok())
    };
    protocols.lines().find_map(of).unwrap_or(0)
}

/// What waits in the connections of `/proc/PID/net/tcp` that no accept(2) has taken, whose inode is
/// 0: the kernel charges the others' data.
fn not_accepted(table: &str) -> u64 {
    queues(table).filter(|(_, _, inode)| *inode == "0").map(|(_, received, _)| received * PER_QUEUED_BYTE).sum()
}

/// What the sockets of `/proc/PID/net/udp` keep, errors and pieces of unsent datagrams included.
fn unread(table: &str) -> u64 {
    queues(table).map(|(unsent, received, _)| unsent + received).sum()
}

/// The columns tx_queue, rx_queue and inode.
fn queues(table: &str) -> impl Iterator<Item = (u64, u64, &str)> {
    table.lines().skip(1).filter_map(|line| {
        let mut words = line.split_ascii_whitespace();
        let (unsent, received) = words.nth(4)?.split_once(':')?;
        let bytes = |text| u64::from_str_radix(text, 16).ok();
        Some((bytes(unsent)?, bytes(received)?, words.nth(4)?))
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use super::*;

    #[test]
    fn what_waits_in_netlink_sockets_is_added_up() {
        let netlink = "\
sk               Eth Pid        Groups   Rmem     Wmem     Dump  Locks    Drops    Inode
000000008ab3bc63 0   0          00000000 0        0        0     2        0        4
000000002e72ccd3 0   17         00000000 8388992  0        0     2        0        1587
00000000e4da6184 0   18         00000000 131456   0        0     2        0        1589
";
        assert_eq!((waiting(netlink), waiting("")), (8_388_992 + 131_456, 0));
    }

    #[test]
    fn connections_are_counted_with_those_that_have_ended() {
        let sockstat = "sockets: used 17\nTCP: inuse 100 orphan 7 tw 16 alloc 120 mem 127\nUDP: inuse 9 mem 121\n";
        assert_eq!(connections(sockstat), 101 * 4096);
        assert_eq!((connections("TCP6: inuse 3\nUDP6: inuse 9\n"), connections("")), (3 * 4096, 0));
    }

    #[test]
    fn data_that_waits_in_sockets_is_counted() {
        let tcp = "\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:95E3 00000000:0000 0A 00000000:00000001 00:00000000 00000000     0        0 23554341 2 0 100 0 0 10 0
   1: 0100007F:95E3 0100007F:8ABC 01 00000000:0001F3E5 00:00000000 00000000     0        0 0 1 0 20 8 0 10 -1
   2: 0100007F:95E3 0100007F:8ABD 01 00000007:00010000 00:00000000 00000000     0        0 23554342 1 0 20 8 0 10 -1
   3: 0100007F:8ABC 0100007F:95E3 04 007E2687:00000000 04:00000045 00000000     0        1 0 2 0 20 0 0 15 -1
";
        assert_eq!((not_accepted(tcp), not_accepted("")), (0x1_F3E5 * 2, 0));
        let udp = "\
   sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode ref pointer drops
 1234: 00000000:A3B4 00000000:0000 07 00010128:007D4F60 00:00000000 00000000     0        0 23554337 2 0000000000000000 0
";
        assert_eq!(unread(udp), 0x1_0128 + 0x7D_4F60);
        let protocols = "protocol  size sockets  memory\nUDPv6 1472 3 75 NI\nUDP 1344 4 75 NI\nNETLINK   1096  16000 -1 NI\n";
        assert_eq!((sockets(protocols, "UDP"), sockets(protocols, "NETLINK"), sockets(protocols, "TCP")), (4, 16000, 0));
    }

    #[test]
    fn what_the_kernel_holds_is_known() {
        assert!(KernelMemory::new(1 << 30, Instant::now()).unwrap().baseline > 1 << 20);
        assert!(waiting(&read("/proc/self/net/netlink").unwrap()) < 1 << 30);
    }
}
