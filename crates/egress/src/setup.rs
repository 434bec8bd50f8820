//! Makes a fresh network namespace ready for the gate, from outside, through the sockets
//! that the sandbox's child made in it: every address local to the namespace, the rules
//! of `nft`, the listener, the name service's socket, the log.
//!
//! The caller needs no capability: as the owner of the child's user namespace, in the
//! namespace above, it has them all over what the child made (user_namespaces(7)).
//! Nothing of the host is touched: no route, rule or interface outside the namespace.
//! Which policy holds is not known here.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddrV6};

use rustix::{
    fd::{AsFd, OwnedFd},
    io::Errno,
    net::{bind, listen, sockopt},
};
use stockade_sys::socket::{IP_TRANSPARENT, IPV6_HDRINCL, IPV6_RECVPKTINFO, IPV6_TRANSPARENT, SO_MARK, set_option};

use crate::{
    inside::Sockets,
    netlink::{ACKNOWLEDGED, CREATE, EXCLUSIVE, Messages, Refused},
    nft,
};

/// The address that the sandbox's packets come from.
pub const OWN4: Ipv4Addr = Ipv4Addr::new(198, 19, 255, 254);
/// The same for IPv6 (a unique local one).
pub const OWN6: Ipv6Addr = Ipv6Addr::new(0xfd53, 0x746f, 0x636b, 0, 0, 0, 0, 1);
/// What `/etc/resolv.conf` inside names; any other address would do as well.
pub use stockade_policy::egress::RESOLVER;

/// What the gate works with.
pub struct Channels {
    pub(crate) log: OwnedFd,
    pub(crate) listener: OwnedFd,
    pub(crate) names: OwnedFd,
    pub(crate) raw4: OwnedFd,
    pub(crate) raw6: OwnedFd,
}

/// Why egress could not be set up. The run is then refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SetupError {
    /// The kernel lacks a part; `feature` names its options or modules.
    #[error("this kernel lacks {feature}, which the egress whitelist needs ({errno}); load or enable it")]
    Missing {
        /// Kernel module names, by commas.
        feature: &'static str,
        /// What the kernel answered.
        errno: Errno,
    },
    /// A step was refused.
    #[error("{what}: {errno}")]
    Refused {
        /// What was attempted.
        what: &'static str,
        /// What the kernel answered.
        errno: Errno,
    },
}

fn refused(what: &'static str) -> impl Fn(Errno) -> SetupError {
    move |errno| SetupError::Refused { what, errno }
}

/// Does everything, and closes the two sockets that can configure.
///
/// # Errors
/// The step that was refused, or the part that this kernel lacks.
pub fn configure(sockets: Sockets) -> Result<Channels, SetupError> {
    let Sockets { route, tables, log, listener, names, raw4, raw6 } = sockets;
    addresses(&route)?;
    // Before the first packet can be sent.
    let (batch, needs) = nft::ruleset(OWN4.octets(), OWN6.octets());
    batch.apply(tables.as_fd()).map_err(|refusal| judge(refusal, &needs))?;
    open_log(&log)?;
    open_listener(&listener)?;
    open_name_service(&names)?;
    let mark = nft::MARK.cast_signed();
    set_option(&raw4, SO_MARK, mark).map_err(refused("mark the raw IPv4 socket"))?;
    set_option(&raw6, SO_MARK, mark).map_err(refused("mark the raw IPv6 socket"))?;
    set_option(&raw6, IPV6_HDRINCL, 1).map_err(refused("send whole IPv6 packets"))?;
    Ok(Channels { log, listener, names, raw4, raw6 })
}

/// What a refused part of the rules says about the kernel.
fn judge(refusal: Refused, needs: &[&'static str]) -> SetupError {
    let Refused { index, errno } = refusal;
    let feature = needs.get(index as usize).copied().unwrap_or("nf_tables");
    match errno {
        // An expression, table family or chain type without its module.
        Errno::NOENT | Errno::OPNOTSUPP | Errno::AFNOSUPPORT => SetupError::Missing { feature, errno },
        _ => SetupError::Refused { what: "load the rules of the sandbox's network namespace", errno },
    }
}

/// `lo` up, two addresses to come from, and all others local too: whatever address a
/// program connects to, its packets meet the rules and go nowhere else.
fn addresses(route: &OwnedFd) -> Result<(), SetupError> {
    const NEW_LINK: u16 = 16;
    const NEW_ADDRESS: u16 = 20;
    const NEW_ROUTE: u16 = 24;
    const AF_INET: u8 = 2;
    const AF_INET6: u8 = 10;
    const UP: u32 = 1;
    const LO: u32 = 1;
    const IFA_ADDRESS: u16 = 1;
    const IFA_LOCAL: u16 = 2;
    /// No duplicate address detection.
    const NODAD: u8 = 2;
    const RTA_OIF: u16 = 4;
    const RTA_PREFSRC: u16 = 7;
    const ALL: u8 = 0;
    const LOCAL_TABLE: u8 = 255;
    const STATIC: u8 = 4;
    const HOST_SCOPE: u8 = 254;
    const LOCAL: u8 = 2;
    let mut batch = Messages::default();
    let new = ACKNOWLEDGED | CREATE | EXCLUSIVE;
    batch.message(NEW_LINK, ACKNOWLEDGED, |body| {
        body.raw(&[0; 4]).raw(&LO.to_ne_bytes()).raw(&UP.to_ne_bytes()).raw(&UP.to_ne_bytes());
    });
    batch.message(NEW_ADDRESS, new, |body| {
        body.raw(&[AF_INET, 32, 0, 0]).raw(&LO.to_ne_bytes());
        body.attribute(IFA_LOCAL, &OWN4.octets()).attribute(IFA_ADDRESS, &OWN4.octets());
    });
    batch.message(NEW_ADDRESS, new, |body| {
        body.raw(&[AF_INET6, 128, NODAD, 0]).raw(&LO.to_ne_bytes()).attribute(IFA_ADDRESS, &OWN6.octets());
    });
    // A source of their own: otherwise a packet's source would be its destination.
    batch.message(NEW_ROUTE, new, |body| {
        body.raw(&[AF_INET, ALL, 0, 0, LOCAL_TABLE, STATIC, HOST_SCOPE, LOCAL]).raw(&[0; 4]);
        body.attribute(RTA_OIF, &LO.to_ne_bytes()).attribute(RTA_PREFSRC, &OWN4.octets());
    });
    batch.message(NEW_ROUTE, new, |body| {
        body.raw(&[AF_INET6, ALL, 0, 0, LOCAL_TABLE, STATIC, 0, LOCAL]).raw(&[0; 4]);
        body.attribute(RTA_OIF, &LO.to_ne_bytes()).attribute(RTA_PREFSRC, &OWN6.octets());
    });
    const STEPS: [&str; 5] = [
        "bring up lo in the sandbox's network namespace",
        "give lo an IPv4 address",
        "give lo an IPv6 address",
        "make every IPv4 address local",
        "make every IPv6 address local",
    ];
    batch.apply(route.as_fd()).map_err(|Refused { index, errno }| {
        let what = STEPS.get(index as usize).copied().unwrap_or("configure the sandbox's network namespace");
        SetupError::Refused { what, errno }
    })
}

/// Bytes that the kernel may hold for us while the gate is busy.
const LOG_BUFFER: usize = 4 << 20;

/// Asks for whole packets of our group, each at once (`linux/netfilter/nfnetlink_log.h`).
fn open_log(log: &OwnedFd) -> Result<(), SetupError> {
    const CONFIG: u16 = 4 << 8 | 1;
    const BIND: u8 = 1;
    const COPY_PACKET: u8 = 2;
    // Beyond the host's usual maximum only for root of the host; what does not fit is a SYN
    // that its program sends again, or a report that is counted as lost.
    match sockopt::set_socket_recv_buffer_size_force(log, LOG_BUFFER) {
        Err(Errno::PERM) => sockopt::set_socket_recv_buffer_size(log, LOG_BUFFER),
        other => other,
    }
    .map_err(refused("make room for the log of packets"))?;
    let mut batch = Messages::default();
    batch.message(CONFIG, ACKNOWLEDGED, |body| {
        let [high, low] = nft::LOG_GROUP.to_be_bytes();
        body.raw(&[0, 0, high, low]).attribute(1, &[BIND]);
        let [a, b, c, d] = 0xffffu32.to_be_bytes();
        body.attribute(2, &[a, b, c, d, COPY_PACKET, 0]);
        // A buffer of 512 bytes for each, or as many as the packet has: the kernel counts
        // what it allocates, and 4 KiB for a SYN would soon fill the socket.
        body.number(3, 512).number(4, 0).number(5, 1);
    });
    match batch.apply(log.as_fd()) {
        Ok(()) => Ok(()),
        Err(Refused { errno: errno @ (Errno::INVAL | Errno::OPNOTSUPP), .. }) => {
            Err(SetupError::Missing { feature: "nfnetlink_log", errno })
        }
        Err(Refused { errno, .. }) => Err(SetupError::Refused { what: "listen to the log of packets", errno }),
    }
}

fn open_listener(listener: &OwnedFd) -> Result<(), SetupError> {
    // Connections that wait to be accepted; each has a peer that was reached before.
    const BACKLOG: i32 = 1024;
    let set = || -> Result<(), Errno> {
        sockopt::set_ipv6_v6only(listener, false)?;
        set_option(listener, IP_TRANSPARENT, 1)?;
        set_option(listener, IPV6_TRANSPARENT, 1)?;
        // Accepted sockets have it from here: an urgent byte stays in its place, or what was
        // looked at would not be what is read.
        sockopt::set_socket_oobinline(listener, true)?;
        // Its connections take this after it.
        sockopt::set_tcp_nodelay(listener, true)?;
        bind(listener, &SocketAddrV6::new(Ipv6Addr::UNSPECIFIED, nft::LISTENER_PORT, 0, 0))?;
        listen(listener, BACKLOG)
    };
    set().map_err(refused("listen for released connections"))
}

fn open_name_service(names: &OwnedFd) -> Result<(), SetupError> {
    const DNS: u16 = 53;
    let set = || -> Result<(), Errno> {
        sockopt::set_ipv6_v6only(names, false)?;
        set_option(names, IPV6_RECVPKTINFO, 1)?;
        // Answers come from the address that was asked, which no interface has.
        sockopt::set_ipv6_freebind(names, true)?;
        bind(names, &SocketAddrV6::new(Ipv6Addr::UNSPECIFIED, DNS, 0, 0))
    };
    set().map_err(refused("serve names"))
}
