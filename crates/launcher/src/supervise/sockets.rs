//! What the sockets of a run hold and its cgroup does not charge.
//!
//! Netlink sockets with their answers, connections, and the data of TCP and UDP sockets. A cgroup
//! charges what waits to be read in sockets of its processes, and what TCP has sent; it charges
//! neither what waits in a connection that no accept(2) has taken, nor an error queue, in which
//! code can have the kernel keep all that it sends (SO_TIMESTAMPING), nor what UDP sends. So what
//! the sockets hold beyond what is charged is held beside the cgroup: one sum for all of them, since
//! a socket's own figure does not tell a receive queue of small packets, which take twelve times
//! their bytes, from an error queue.
//! Without a cgroup nothing is charged, so what waits in UNIX sockets is counted, too. What waits in
//! accepted TCP connections may then be as much as the memory, because an honest server's clients
//! can make it that much.
//!
//! What a dump tells is not all: a byte of a packet can keep the whole page in which it lies, and a
//! closed UNIX socket what its peer has not read. Of these there is only a bound, which alone ends
//! no run (`kernel_memory.rs`).

use std::collections::BTreeSet;

use rustix::{
    fs::{Mode, OFlags, open},
    io::Errno,
    path::Arg,
};

use crate::{
    cgroup::Cgroup,
    proc,
    sock_diag::{Protocol, SockDiag, SocketMemory},
};

/// A connection, and one that has ended and waits (TIME_WAIT): measured on Linux 6.18.
const CONNECTION: u64 = 4096;
const ENDED_CONNECTION: u64 = 256;
/// A UNIX socket with its inode, file and name in the cache.
const UNIX_SOCKET: u64 = 2048;
/// A netlink socket, and what a UDP socket with SO_REUSEPORT has beside itself.
const UNCHARGED_SOCKET: u64 = 2048;
/// What a TCP or UDP socket keeps at most: 8 MiB each way, twice the kernel's `rmem_max`.
pub(super) const MAX_QUEUED: u64 = 16 << 20;
/// How often sockets are dumped before they hold too much: data moves between dump and charge.
const DUMPS: u32 = 3;

/// What a UNIX socket has sent and its peer has not read, at most: twice the kernel's `wmem_max`.
const MAX_SENT: u64 = 8 << 20;
/// A packet has this many pieces at most, each in a page of its own that it alone may keep
/// (MAX_SKB_FRAGS, SKB_FRAG_PAGE_ORDER).
const PAGES_OF_PACKET: u64 = 17 * (32 << 10);
/// What a packet takes at least beside the data that was copied for it: `struct sk_buff` and
/// `struct skb_shared_info`, as the kernel rounds them; of UDP also the room of its headers.
const PACKET: u64 = 576;
const ALL: [Protocol; 4] = [Protocol::TCP, Protocol::TCP6, Protocol::UDP, Protocol::UDP6];

/// Looks at what the sockets of a run hold.
pub(super) struct Sockets {
    /// None where the kernel has none.
    diag: Option<SockDiag>,
    /// The run's memory.
    limit: u64,
    /// This kernel dumps no sockets of a protocol.
    pub(super) is_blind: bool,
}

/// Bytes that the sockets of the run's network namespace hold beside its cgroup.
#[derive(Clone, Copy, Default)]
pub(super) struct Held {
    /// In what counts as the kernel's memory on the host, too.
    pub(super) kernel: u64,
    /// In pages of data, which no figure of the host shows.
    pub(super) data: u64,
    /// All that the dump tells of, charged or not.
    pub(super) told: u64,
    /// What they may keep at most that no dump tells of; 0 while they were not dumped.
    pub(super) untold: u64,
    /// How many sockets no table has: all of the network namespace but those that are counted by
    /// protocol.
    pub(super) closed: u64,
}

/// The same for sockets that hold so much, which no dump has.
pub(super) fn pages_of_closed(held: u64) -> u64 {
    held / PACKET * PAGES_OF_PACKET
}

/// What the sockets hold in data. Those of the egress gate are left out, which alone may have
/// addresses of others: its memory is not the run's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Data {
    /// What no cgroup charges; UNIX sockets are dumped only where there is none.
    uncharged: u64,
    /// What waits in UDP sockets, with their errors.
    udp: u64,
    /// The same in TCP connections that have a descriptor.
    tcp: u64,
    /// What else a cgroup charges.
    rest: u64,
    /// Packets of TCP and UDP, at most.
    packets: u64,
    /// UNIX sockets.
    unix: u64,
}

impl Sockets {
    pub(super) fn new(diag: Option<SockDiag>, limit: u64) -> Self {
        Sockets { diag, limit, is_blind: false }
    }

    /// What they hold. They are dumped only where there are any and all of them can hold more than
    /// `allowed`, or the count `is_due`: the kernel walks the table of the whole host, some 20 ms
    /// where that is large. UNIX sockets are dumped only where they alone can hold more than `allowed`.
    /// How many there are is bounded, because each counts by itself, too.
    ///
    /// # Errors
    /// They cannot be dumped.
    pub(super) fn look(&mut self, pid_one: i32, cgroup: &Cgroup, allowed: u64, is_due: bool) -> Result<Held, Errno> {
        let file = |name| read(format!("/proc/{pid_one}/net/{name}")).unwrap_or_default();
        let protocols = file("protocols");
        let [tcp, tcp6, udp, udp6, netlink] = ["TCP", "TCPv6", "UDP", "UDPv6", "NETLINK"].map(|name| sockets(&protocols, name));
        // A cgroup charges UNIX sockets with what they hold, and sockets that no table has, such as those
        // of TCP without a port.
        let unix = if cgroup.is_absent() { sockets(&protocols, "UNIX") + sockets(&protocols, "UNIX-STREAM") } else { 0 };
        let in_unix = unix * MAX_SENT;
        let sockstat = file("sockstat");
        let mut held = Held { closed: used(&sockstat).saturating_sub(in_tables(&protocols)), ..Held::default() };
        let in_no_table = if cgroup.is_absent() { held.closed } else { 0 };
        let uncharged = (udp + udp6 + netlink) * UNCHARGED_SOCKET + unix * UNIX_SOCKET + in_no_table * CONNECTION;
        if !is_due && (tcp + tcp6 + udp + udp6) * MAX_QUEUED + in_unix + uncharged <= allowed {
            return Ok(held);
        }
        held.kernel = waiting(&file("netlink")) + connections(&sockstat) + connections(&file("sockstat6")) + uncharged;
        if held.kernel > allowed {
            return Ok(held);
        }
        let there = ALL.into_iter().zip([tcp, tcp6, udp, udp6]).filter(|(_, sockets)| *sockets > 0).map(|(protocol, _)| protocol);
        let unix = if in_unix > allowed { unix } else { 0 };
        let there = there.chain((unix > 0).then_some(Protocol::UNIX));
        for _ in 0..DUMPS {
            let charged = cgroup.socket_memory();
            let data = self.dump(there.clone())?;
            // What was charged meanwhile, or was no longer.
            held.data = data.beside(charged.max(cgroup.socket_memory()), self.limit);
            held.told = data.uncharged + data.udp + data.tcp + data.rest;
            held.untold = data.packets * PAGES_OF_PACKET + unix.saturating_sub(data.unix) * MAX_SENT;
            if held.kernel + held.data <= allowed {
                break;
            }
        }
        Ok(held)
    }

    /// The inodes of all sockets that are dumped.
    ///
    /// # Errors
    /// They cannot be dumped.
    pub(super) fn inodes(&mut self) -> Result<BTreeSet<u64>, Errno> {
        let mut inodes = BTreeSet::new();
        for protocol in ALL {
            self.each(protocol, &mut |memory| {
                inodes.insert(memory.inode);
            })?;
        }
        Ok(inodes)
    }

    fn dump(&mut self, protocols: impl Iterator<Item = Protocol>) -> Result<Data, Errno> {
        let mut data = Data::default();
        for protocol in protocols {
            match self.each(protocol, &mut |memory| data.add(protocol, memory)) {
                Err(Errno::NOENT) => {}
                dumped => dumped?,
            }
        }
        Ok(data)
    }

    /// ENOENT: this kernel dumps none.
    fn each(&mut self, protocol: Protocol, show: &mut dyn FnMut(SocketMemory)) -> Result<(), Errno> {
        let dumped = self.diag.as_ref().map_or(Err(Errno::NOENT), |diag| diag.each(protocol, show));
        self.is_blind |= dumped == Err(Errno::NOENT);
        dumped
    }
}

impl Data {
    fn add(&mut self, protocol: Protocol, memory: SocketMemory) {
        let SocketMemory { received, sent, unacknowledged, reserved, inode, is_transparent, .. } = memory;
        match protocol {
            _ if is_transparent => return,
            Protocol::UNIX => {
                (self.uncharged, self.unix) = (self.uncharged + sent, self.unix + 1);
                return;
            }
            Protocol::UDP | Protocol::UDP6 => (self.udp, self.uncharged) = (self.udp + received, self.uncharged + sent),
            _ if inode == 0 => self.uncharged += received,
            _ => self.tcp += received,
        }
        self.rest += reserved + unacknowledged;
        self.packets += memory.packets(protocol);
    }

    /// What is held beside what a cgroup has `charged`; None: it charges nothing, and accepted
    /// connections may hold as much as the `limit` of memory.
    fn beside(self, charged: Option<u64>, limit: u64) -> u64 {
        self.uncharged
            + match charged {
                Some(charged) => (self.udp + self.tcp + self.rest).saturating_sub(charged),
                None => self.udp + self.tcp.saturating_sub(limit),
            }
    }
}

impl SocketMemory {
    /// How many packets there may be. The data of TCP takes no more than its bytes: the kernel tells
    /// of what it takes beside.
    fn packets(&self, protocol: Protocol) -> u64 {
        match protocol {
            Protocol::UDP | Protocol::UDP6 => (self.received + self.sent) / PACKET,
            _ => {
                let beside = |all: u64, data| all.saturating_sub(data) / PACKET;
                beside(self.received, self.data_received) + beside(self.unacknowledged, self.data_unacknowledged)
            }
        }
    }
}

/// How many sockets of the run no table has.
pub(super) fn closed(pid_one: i32) -> u64 {
    let file = |name| read(format!("/proc/{pid_one}/net/{name}")).unwrap_or_default();
    used(&file("sockstat")).saturating_sub(in_tables(&file("protocols")))
}

/// All sockets of a network namespace, by its `sockstat`.
fn used(sockstat: &str) -> u64 {
    sockstat.lines().find_map(|line| line.strip_prefix("sockets: used ")?.trim().parse().ok()).unwrap_or(0)
}

/// The column `sockets` of all lines of `protocols`.
fn in_tables(protocols: &str) -> u64 {
    protocols.lines().filter_map(|line| line.split_ascii_whitespace().nth(2)?.parse::<u64>().ok()).sum()
}

fn read(path: impl Arg) -> Result<String, Errno> {
    proc::read_to_string(open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
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
    fn sockets_of_a_protocol_are_counted() {
        let protocols = "protocol  size sockets  memory\nUDPv6 1472 3 75 NI\nUDP 1344 4 75 NI\nNETLINK   1096  16000 -1 NI\n";
        assert_eq!((sockets(protocols, "UDP"), sockets(protocols, "NETLINK"), sockets(protocols, "TCP")), (4, 16000, 0));
        assert!(waiting(&read("/proc/self/net/netlink").unwrap()) < 1 << 30);
    }

    #[test]
    fn sockets_in_no_table_are_those_that_are_left() {
        assert_eq!((used("sockets: used 17\nTCP: inuse 1\n"), used("")), (17, 0));
        assert_eq!(in_tables("protocol  size sockets  memory\nUDPv6 1472 3 75 NI\nUNIX 1152 9 -1 NI\n"), 12);
    }

    #[test]
    fn a_kernel_that_dumps_no_sockets_is_noticed() {
        let mut sockets = Sockets::new(None, 0);
        assert_eq!((sockets.dump([Protocol::TCP].into_iter()), sockets.is_blind), (Ok(Data::default()), true));
        let mut sockets = Sockets::new(SockDiag::open().unwrap().map(SockDiag::new), 0);
        assert!(sockets.dump([Protocol::TCP, Protocol::UDP6].into_iter()).is_ok() && !sockets.is_blind);
    }

    #[test]
    fn what_a_cgroup_charges_is_not_held_beside_it() {
        let mut data = Data::default();
        let memory = SocketMemory { received: 1000, sent: 7, unacknowledged: 200, reserved: 50, inode: 9, ..SocketMemory::default() };
        data.add(Protocol::TCP, memory);
        data.add(Protocol::TCP6, SocketMemory { inode: 0, ..memory });
        data.add(Protocol::UDP, SocketMemory { unacknowledged: 0, ..memory });
        data.add(Protocol::TCP, SocketMemory { is_transparent: true, ..memory });
        data.add(Protocol::UNIX, SocketMemory { sent: 100, ..SocketMemory::default() });
        assert_eq!(data, Data { uncharged: 1107, udp: 1000, tcp: 1000, rest: 550, packets: 3, unix: 1 });
        let long = SocketMemory { received: 9 << 20, data_received: (9 << 20) - 6000, ..SocketMemory::default() };
        assert_eq!([Protocol::TCP, Protocol::UDP].map(|protocol| long.packets(protocol)), [10, 16384]);
        // Receive queues and what is sent are charged; an error queue of 300 is not.
        assert_eq!([Some(2550), Some(2250), Some(0)].map(|charged| data.beside(charged, 0)), [1107, 1407, 3657]);
        // Without a cgroup accepted connections may hold as much as the memory, and no more.
        assert_eq!([1000, 999, 0].map(|limit| data.beside(None, limit)), [2107, 2108, 3107]);
    }
}
