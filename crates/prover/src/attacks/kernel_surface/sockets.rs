//! Sockets of families and protocols that the policy does not list.
//!
//! Each attack asks for a usable socket where this kernel has the family loaded. Where it has
//! not, only the filter's answer is shown, and the attack's text states that.

use super::{CLASS, FILTER, HIGH, REFUSED, attack};
use crate::{
    attack::{Attack, Control, ControlExpectation, ControlHost},
    fixture::Fixture,
    script::{n, one, script},
};

/// A socket type that does not exist: the kernel refuses it before it loads a module for the
/// family or protocol.
const NO_KIND: i64 = 15;
const STREAM: i64 = 1;
const DATAGRAM: i64 = 2;
const RAW: i64 = 3;
const PACKETS_IN_ORDER: i64 = 5;

/// The families and protocols that this kernel has loaded. For any other it would load a
/// module, and a control must not change the host.
struct AtHand {
    protocols: Vec<String>,
    netlink: Vec<i64>,
}

impl AtHand {
    fn of_this_kernel() -> Self {
        let column = |path: &str, which: usize| -> Vec<String> {
            let text = std::fs::read_to_string(path).unwrap_or_default();
            text.lines().skip(1).filter_map(|line| line.split_whitespace().nth(which).map(str::to_owned)).collect()
        };
        // A kernel without any user of it lists none for USERSOCK, which is always there.
        let netlink = column("/proc/net/netlink", 1).iter().filter_map(|number| number.parse().ok()).chain([2]).collect();
        AtHand { protocols: column("/proc/net/protocols", 0), netlink }
    }

    /// The kind of socket to ask for, where the kernel's list has the name.
    fn kind(&self, (listed_as, kind): (&str, i64)) -> i64 {
        if self.protocols.iter().any(|name| name == listed_as) { kind } else { NO_KIND }
    }
}

/// A socket that the filter must refuse: as it would be used where the kernel has it.
fn socket(name: String, what: String, family: i64, kind: i64, protocol: i64) -> Attack {
    let act = one("socket", &[n(family), n(kind), n(protocol)]);
    let (tried, control) = match kind {
        NO_KIND => (
            format!("{what}, of a type that does not exist: this kernel has not loaded the family, and the control must not load it"),
            Control::Outside(ControlHost::Host, ControlExpectation::Reaches),
        ),
        _ => (what, Control::Outside(ControlHost::OwnNamespaces, ControlExpectation::Succeeds)),
    };
    let layers: &[&str] = if kind == RAW && family != NETLINK { &["seccomp", "capabilities"] } else { FILTER };
    Attack::new(CLASS, name, tried, layers, act, REFUSED, control)
}

const INET: i64 = 2;
const NETLINK: i64 = 16;
/// Of no family, or of one that no kernel has any more.
const NONE: (&str, i64) = ("", NO_KIND);

/// Families and protocols beyond the listed ones, each with how the kernel lists it and a
/// kind of socket that it has.
pub(super) fn attacks(fixture: &Fixture) -> Vec<Attack> {
    let at_hand = AtHand::of_this_kernel();
    let families = [
        ("UNSPEC", NONE),
        ("UNIX", ("UNIX", STREAM)),
        ("INET", ("TCP", STREAM)),
        ("AX25", ("AX25", PACKETS_IN_ORDER)),
        ("IPX", NONE),
        ("APPLETALK", ("DDP", DATAGRAM)),
        ("NETROM", ("NETROM", PACKETS_IN_ORDER)),
        ("BRIDGE", NONE),
        ("ATMPVC", ("VCC", DATAGRAM)),
        ("X25", ("X25", PACKETS_IN_ORDER)),
        ("INET6", ("TCPv6", STREAM)),
        ("ROSE", ("ROSE", PACKETS_IN_ORDER)),
        ("DECnet", NONE),
        ("NETBEUI", NONE),
        ("SECURITY", NONE),
        ("KEY", ("KEY", RAW)),
        ("NETLINK", ("NETLINK", RAW)),
        ("PACKET", ("PACKET", RAW)),
        ("ASH", NONE),
        ("ECONET", NONE),
        ("ATMSVC", NONE),
        ("RDS", ("RDS", PACKETS_IN_ORDER)),
        ("SNA", NONE),
        ("IRDA", NONE),
        ("PPPOX", NONE),
        ("WANPIPE", NONE),
        ("LLC", ("LLC", DATAGRAM)),
        ("IB", NONE),
        ("MPLS", NONE),
        ("CAN", NONE),
        ("TIPC", ("TIPC", STREAM)),
        ("BLUETOOTH", NONE),
        ("IUCV", NONE),
        ("RXRPC", ("RXRPC", DATAGRAM)),
        ("ISDN", NONE),
        ("PHONET", NONE),
        ("IEEE802154", NONE),
        ("CAIF", NONE),
        ("ALG", ("ALG", PACKETS_IN_ORDER)),
        ("NFC", NONE),
        ("VSOCK", ("AF_VSOCK", STREAM)),
        ("KCM", ("KCM", DATAGRAM)),
        ("QIPCRTR", ("QIPCRTR", DATAGRAM)),
        ("SMC", ("SMC", STREAM)),
        ("XDP", ("XDP", RAW)),
        ("MCTP", ("MCTP", DATAGRAM)),
    ];
    let mut all = Vec::new();
    for (number, (name, listed)) in (0u32..).zip(families) {
        if !fixture.has_family(number) {
            let what = format!("open a socket of the family {name} ({number})");
            all.push(socket(format!("a socket of AF_{name}"), what, i64::from(number), at_hand.kind(listed), 0));
        }
    }
    for (name, family, listed) in [
        ("VSOCK", 40i64, ("AF_VSOCK", STREAM)),
        ("ALG", 38, ("ALG", PACKETS_IN_ORDER)),
        ("PACKET", 17, ("PACKET", RAW)),
        ("a number beyond the table", 999, NONE),
    ] {
        let what = format!("open a socket of the family {name}, whose number has high bits that the kernel ignores");
        all.push(socket(format!("a socket of AF_{name}, with high bits"), what, family | HIGH, at_hand.kind(listed), 0));
    }
    if fixture.has_family(2) {
        // Any protocol can be spoken through a raw socket; the others have their own.
        let protocols = [
            ("ICMP", 1i64, ("RAW", RAW)),
            ("IGMP", 2, ("RAW", RAW)),
            ("DCCP", 33, NONE),
            ("GRE", 47, ("RAW", RAW)),
            ("ESP", 50, ("RAW", RAW)),
            ("SCTP", 132, ("SCTP", STREAM)),
            ("UDP-Lite", 136, ("UDP-Lite", DATAGRAM)),
            ("raw IP", 255, ("RAW", RAW)),
            ("SMC", 256, ("SMC", STREAM)),
            ("multipath TCP", 262, ("MPTCP", STREAM)),
        ];
        for (name, protocol, listed) in protocols {
            let what = format!("open an internet socket for {name}");
            all.push(socket(format!("a socket for {name}"), what, INET, at_hand.kind(listed), protocol));
        }
    }
    if fixture.has_family(16) {
        let protocols = [
            (2, "USERSOCK"),
            (3, "FIREWALL"),
            (4, "SOCK_DIAG"),
            (5, "NFLOG"),
            (6, "XFRM"),
            (7, "SELINUX"),
            (8, "ISCSI"),
            (9, "AUDIT"),
            (10, "FIB_LOOKUP"),
            (11, "CONNECTOR"),
            (12, "NETFILTER"),
            (15, "KOBJECT_UEVENT"),
            (16, "GENERIC"),
            (18, "SCSITRANSPORT"),
            (19, "ECRYPTFS"),
            (20, "RDMA"),
            (21, "CRYPTO"),
        ];
        for (protocol, name) in protocols {
            let kind = if at_hand.netlink.contains(&protocol) { RAW } else { NO_KIND };
            all.push(socket(format!("netlink for {name}"), format!("open a netlink socket for {name}"), NETLINK, kind, protocol));
        }
    }
    if fixture.has_family(1) && fixture.knows("socketpair") {
        // No kernel makes pairs of these: its own answer shows that it was asked.
        let pair = |family: i64| {
            script(|b| {
                let to = b.space(8);
                b.attack("socketpair", &[n(family), n(NO_KIND), n(0), to]);
            })
        };
        for (name, family) in [("INET", 2), ("TIPC", 30), ("VSOCK, with high bits", 40 | HIGH)] {
            all.push(attack(
                format!("a pair of sockets of AF_{name}"),
                format!("open a pair of connected sockets of {name}"),
                pair(family),
                Control::Outside(ControlHost::Host, ControlExpectation::Reaches),
            ));
        }
    }
    all
}
