//! Sets up a fresh network namespace for the gate, from outside, through the sockets that the
//! sandbox's child created in it: addresses, routes, the rules of `nft`, the listener, the socket
//! for DNS, the log.
//!
//! The caller needs no capability on the host: as owner of the child's user namespace it has all
//! capabilities over it (user_namespaces(7)). It changes no route, rule or interface of the host,
//! and does not know the policy.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddrV6};

use rustix::{
    fd::{AsFd, OwnedFd},
    io::Errno,
    net::{bind, listen, sockopt},
};
use stockade_sys::socket::{IP_TRANSPARENT, IPV6_HDRINCL, IPV6_RECVPKTINFO, IPV6_TRANSPARENT, SO_MARK, set_option};

use crate::{
    netlink::{ACKNOWLEDGED, CREATE, EXCLUSIVE, Messages, NetlinkError},
    netns::Sockets,
    nft,
};

/// The source address of the sandbox's packets.
pub const OWN4: Ipv4Addr = Ipv4Addr::new(198, 19, 255, 254);
/// The same for IPv6, a unique local address.
pub const OWN6: Ipv6Addr = Ipv6Addr::new(0xfd53, 0x746f, 0x636b, 0, 0, 0, 0, 1);
/// The name server in the sandbox's `/etc/resolv.conf`. Any address would work.
pub use stockade_policy::whitelist::RESOLVER;

/// The gate's sockets.
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
    /// The kernel refused a step.
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

/// Runs all steps, and closes the two sockets that can configure.
///
/// # Errors
/// The step that was refused, or the kernel feature that is missing.
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

/// The kernel feature that is missing where a rule was refused.
fn judge(refusal: NetlinkError, needs: &[&'static str]) -> SetupError {
    let NetlinkError { index, errno } = refusal;
    let feature = needs.get(index as usize).copied().unwrap_or("nf_tables");
    match errno {
        // An expression, table family or chain type without its module.
        Errno::NOENT | Errno::OPNOTSUPP | Errno::AFNOSUPPORT => SetupError::Missing { feature, errno },
        _ => SetupError::Refused { what: "load the rules of the sandbox's network namespace", errno },
    }
}

/// Brings `lo` up with two source addresses and makes all other addresses local: packets to
/// any address meet the rules and stay inside.
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
    // An explicit source: otherwise the source of a packet would be its destination.
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
    batch.apply(route.as_fd()).map_err(|NetlinkError { index, errno }| {
        let what = STEPS.get(index as usize).copied().unwrap_or("configure the sandbox's network namespace");
        SetupError::Refused { what, errno }
    })
}

/// Bytes of log messages that the kernel holds while the gate is busy.
const LOG_BUFFER: usize = 4 << 20;

/// Requests whole packets of the group, each at once (`linux/netfilter/nfnetlink_log.h`).
fn open_log(log: &OwnedFd) -> Result<(), SetupError> {
    const CONFIG: u16 = 4 << 8 | 1;
    const BIND: u8 = 1;
    const COPY_PACKET: u8 = 2;
    // Only root of the host may exceed the usual maximum. A SYN that does not fit is repeated, a
    // report that does not fit is counted as lost.
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
        // 512 bytes per message: the kernel counts what it allocates, and 4 KiB for each SYN would
        // soon fill the socket.
        body.number(3, 512).number(4, 0).number(5, 1);
    });
    match batch.apply(log.as_fd()) {
        Ok(()) => Ok(()),
        Err(NetlinkError { errno: errno @ (Errno::INVAL | Errno::OPNOTSUPP), .. }) => {
            Err(SetupError::Missing { feature: "nfnetlink_log", errno })
        }
        Err(NetlinkError { errno, .. }) => Err(SetupError::Refused { what: "listen to the log of packets", errno }),
    }
}

fn open_listener(listener: &OwnedFd) -> Result<(), SetupError> {
    // The backlog; each connection in it has a peer that was reached.
    const BACKLOG: i32 = 1024;
    let set = || -> Result<(), Errno> {
        sockopt::set_ipv6_v6only(listener, false)?;
        set_option(listener, IP_TRANSPARENT, 1)?;
        set_option(listener, IPV6_TRANSPARENT, 1)?;
        // Accepted sockets inherit it: an urgent byte stays in line, so that the bytes that were
        // peeked are the bytes that are read.
        sockopt::set_socket_oobinline(listener, true)?;
        // Accepted sockets inherit this.
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
        // Answers come from the address of the query, which no interface has.
        sockopt::set_ipv6_freebind(names, true)?;
        bind(names, &SocketAddrV6::new(Ipv6Addr::UNSPECIFIED, DNS, 0, 0))
    };
    set().map_err(refused("serve names"))
}
