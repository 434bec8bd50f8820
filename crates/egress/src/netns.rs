//! Creates the gate's sockets in the sandbox's network namespace and sends them to the launcher.
//!
//! A socket belongs for life to the namespace in which it was created, so the child creates them
//! and the launcher sets everything else up from outside, where the sandbox cannot interfere.
//!
//! Runs in a freshly cloned child: only system calls on prepared data, no allocation. It configures
//! nothing.

use std::mem::MaybeUninit;

use rustix::{
    fd::{AsFd, BorrowedFd, OwnedFd},
    io::{Errno, IoSlice, IoSliceMut},
    net::{
        AddressFamily, Protocol, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
        SendFlags, SocketFlags, SocketType, netlink, recvmsg, sendmsg, socket_with,
    },
};

/// The number of sockets.
pub const COUNT: usize = 7;

/// The sockets by name, in the order in which they are created and sent.
pub const NAMES: [&str; COUNT] = [
    "a routing socket",
    "a netfilter socket",
    "a second netfilter socket",
    "the listener",
    "the name service's socket",
    "a raw IPv4 socket",
    "a raw IPv6 socket",
];

/// A socket that could not be created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NetnsError {
    /// Its index in [`NAMES`].
    pub index: usize,
    /// EPERM where this process lacks CAP_NET_RAW over the namespace,
    /// EPROTONOSUPPORT where the kernel has no netfilter, EAFNOSUPPORT without IPv6.
    pub errno: Errno,
}

/// The sockets, created in the caller's network namespace; close-on-exec and non-blocking.
pub struct Sockets {
    pub(crate) route: OwnedFd,
    pub(crate) tables: OwnedFd,
    pub(crate) log: OwnedFd,
    pub(crate) listener: OwnedFd,
    pub(crate) names: OwnedFd,
    pub(crate) raw4: OwnedFd,
    pub(crate) raw6: OwnedFd,
}

/// `IPPROTO_RAW`: packets to send begin with their IP header, and none is received.
fn raw() -> Option<Protocol> {
    std::num::NonZeroU32::new(255).map(Protocol::from_raw)
}

impl Sockets {
    /// Creates them. The caller has just unshared its network namespace and still holds
    /// every capability over it.
    ///
    /// # Errors
    /// The socket that the kernel refused.
    pub fn open() -> Result<Self, NetnsError> {
        let make = |index, family, kind, protocol| {
            socket_with(family, kind, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, protocol).map_err(|errno| NetnsError { index, errno })
        };
        Ok(Sockets {
            route: make(0, AddressFamily::NETLINK, SocketType::RAW, None)?,
            tables: make(1, AddressFamily::NETLINK, SocketType::RAW, Some(netlink::NETFILTER))?,
            log: make(2, AddressFamily::NETLINK, SocketType::RAW, Some(netlink::NETFILTER))?,
            listener: make(3, AddressFamily::INET6, SocketType::STREAM, None)?,
            names: make(4, AddressFamily::INET6, SocketType::DGRAM, None)?,
            raw4: make(5, AddressFamily::INET, SocketType::RAW, raw())?,
            raw6: make(6, AddressFamily::INET6, SocketType::RAW, raw())?,
        })
    }

    /// Sends them over a `SOCK_SEQPACKET` or `SOCK_STREAM` Unix socket, in one message.
    /// This process's copies are closed when `self` is dropped.
    ///
    /// # Errors
    /// What sendmsg(2) answers.
    pub fn send(&self, over: BorrowedFd<'_>) -> Result<(), Errno> {
        let fds = [
            self.route.as_fd(),
            self.tables.as_fd(),
            self.log.as_fd(),
            self.listener.as_fd(),
            self.names.as_fd(),
            self.raw4.as_fd(),
            self.raw6.as_fd(),
        ];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(COUNT))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !ancillary.push(SendAncillaryMessage::ScmRights(&fds)) {
            return Err(Errno::NOBUFS);
        }
        sendmsg(over, &[IoSlice::new(b"e")], &mut ancillary, SendFlags::NOSIGNAL).map(drop)
    }

    /// Receives what [`Sockets::send`] sent. The launcher's side.
    ///
    /// # Errors
    /// What recvmsg(2) answers; EPIPE where the child ended first, EPROTO for anything
    /// but exactly these sockets.
    pub fn receive(over: BorrowedFd<'_>) -> Result<Self, Errno> {
        let mut byte = [0u8; 2];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(COUNT))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let got = rustix::io::retry_on_intr(|| recvmsg(over, &mut [IoSliceMut::new(&mut byte)], &mut ancillary, RecvFlags::CMSG_CLOEXEC))?;
        if got.bytes == 0 {
            return Err(Errno::PIPE);
        }
        let mut fds = ancillary.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(rights) => Some(rights),
            _ => None,
        });
        let mut fds = fds.next().into_iter().flatten();
        let mut next = || fds.next().ok_or(Errno::PROTO);
        let sockets =
            Sockets { route: next()?, tables: next()?, log: next()?, listener: next()?, names: next()?, raw4: next()?, raw6: next()? };
        if fds.next().is_some() || (got.bytes, byte[0]) != (1, b'e') {
            return Err(Errno::PROTO);
        }
        Ok(sockets)
    }
}
