//! Socket options and messages that rustix lacks: transparent sockets, marks, and
//! datagrams whose local address is read and chosen (`ip(7)`, `ipv6(7)`, `netlink(7)`);
//! the groups of a UNIX socket's peer (`unix(7)`); and what a socket holds (`socket(7)`).
//!
//! It has no IPv4 addresses: sockets are IPv6 ones, and IPv4 peers appear as v4-mapped addresses.

use core::net::{Ipv6Addr, SocketAddrV6};

use rustix::fd::{AsFd, AsRawFd};

use crate::{Errno, Result, call::syscall};

/// An option that takes an integer: level and name, by the kernel's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IntegerOption(i32, i32);

/// IP_TRANSPARENT: accept connections to any address (needs CAP_NET_ADMIN over the
/// socket's network namespace).
pub const IP_TRANSPARENT: IntegerOption = IntegerOption(0, 19);
/// IPV6_TRANSPARENT, the same for IPv6.
pub const IPV6_TRANSPARENT: IntegerOption = IntegerOption(41, 75);
/// IPV6_HDRINCL: data that is sent begins with its IPv6 header.
pub const IPV6_HDRINCL: IntegerOption = IntegerOption(41, 36);
/// IPV6_RECVPKTINFO: report the address that a datagram was sent to.
pub const IPV6_RECVPKTINFO: IntegerOption = IntegerOption(41, 49);
/// SO_MARK: the mark of every packet sent.
pub const SO_MARK: IntegerOption = IntegerOption(1, 36);

/// Sets an option.
///
/// # Errors
/// The errors of setsockopt(2): EPERM without the capability, ENOPROTOOPT.
pub fn set_option(socket: impl AsFd, option: IntegerOption, value: i32) -> Result<()> {
    let IntegerOption(level, name) = option;
    let socket = socket.as_fd().as_raw_fd() as usize;
    // SAFETY: the value lives and has the 4 bytes that the length states.
    unsafe { syscall(54, [socket, level as usize, name as usize, (&raw const value) as usize, 4, 0]) }.map(drop)
}

/// Fills `groups` with the supplementary groups that the peer of a UNIX socket had when it
/// connected, and returns their number (SO_PEERGROUPS).
///
/// # Errors
/// ERANGE where `groups` is too short, ENODATA where there is no peer.
pub fn peer_groups(socket: impl AsFd, groups: &mut [u32]) -> Result<usize> {
    const SOL_SOCKET: usize = 1;
    const SO_PEERGROUPS: usize = 59;
    let mut length = core::mem::size_of_val(groups) as u32;
    let socket = socket.as_fd().as_raw_fd() as usize;
    // SAFETY: the slice is writable and `length` is its size in bytes; both live here.
    unsafe { syscall(55, [socket, SOL_SOCKET, SO_PEERGROUPS, groups.as_mut_ptr() as usize, (&raw mut length) as usize, 0]) }?;
    Ok(length as usize / core::mem::size_of::<u32>())
}

/// Bytes that wait in a socket to be read or sent, with what the kernel needs to keep them
/// (SO_MEMINFO).
///
/// # Errors
/// What getsockopt(2) answers.
pub fn socket_memory(socket: impl AsFd) -> Result<u64> {
    const SOL_SOCKET: usize = 1;
    const SO_MEMINFO: usize = 55;
    // Received, its bound, sent, and more that is not asked for.
    let mut numbers = [0u32; 3];
    let mut length = core::mem::size_of_val(&numbers) as u32;
    let socket = socket.as_fd().as_raw_fd() as usize;
    // SAFETY: the array is writable and `length` is its size in bytes; both live here.
    unsafe { syscall(55, [socket, SOL_SOCKET, SO_MEMINFO, numbers.as_mut_ptr() as usize, (&raw mut length) as usize, 0]) }?;
    Ok(u64::from(numbers[0]) + u64::from(numbers[2]))
}

/// `struct sockaddr_in6`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct RawAddress {
    family: u16,
    port: [u8; 2],
    flow: u32,
    address: [u8; 16],
    scope: u32,
}

const AF_INET6: u16 = 10;

#[repr(C)]
struct Part {
    base: usize,
    length: usize,
}

/// `struct msghdr`.
#[repr(C)]
struct Message {
    name: usize,
    name_length: u32,
    parts: usize,
    parts_count: usize,
    control: usize,
    control_length: usize,
    flags: i32,
}

/// A control message with a `struct in6_pktinfo`, padded to the kernel's alignment.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct PacketInfo {
    length: usize,
    level: i32,
    kind: i32,
    address: [u8; 16],
    interface: u32,
    padding: u32,
}

const SOL_IPV6: i32 = 41;
const IPV6_PKTINFO: i32 = 50;
/// Header and data without the padding.
const PACKET_INFO_LENGTH: usize = 36;

/// A datagram's addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Datagram {
    /// Bytes received; more than the buffer holds if it was cut.
    pub length: usize,
    /// The sender's address.
    pub from: SocketAddrV6,
    /// The address that it was sent to.
    pub to: Ipv6Addr,
}

/// Receives one datagram from an IPv6 socket with [`IPV6_RECVPKTINFO`].
///
/// # Errors
/// EAGAIN where a non-blocking socket has none; EPROTO where the kernel gives no destination.
pub fn receive_datagram(socket: impl AsFd, buffer: &mut [u8]) -> Result<Datagram> {
    const MSG_TRUNC: usize = 0x20;
    let mut name = RawAddress::default();
    let mut control = PacketInfo::default();
    let mut part = Part { base: buffer.as_mut_ptr() as usize, length: buffer.len() };
    let mut message = Message {
        name: (&raw mut name) as usize,
        name_length: core::mem::size_of::<RawAddress>() as u32,
        parts: (&raw mut part) as usize,
        parts_count: 1,
        control: (&raw mut control) as usize,
        control_length: core::mem::size_of::<PacketInfo>(),
        flags: 0,
    };
    let socket = socket.as_fd().as_raw_fd() as usize;
    // SAFETY: the message points to live, writable buffers with their true lengths.
    let length = unsafe { syscall(47, [socket, (&raw mut message) as usize, MSG_TRUNC, 0, 0, 0]) }?;
    if name.family != AF_INET6 || message.control_length < PACKET_INFO_LENGTH || (control.level, control.kind) != (SOL_IPV6, IPV6_PKTINFO) {
        return Err(Errno::PROTO);
    }
    let from = SocketAddrV6::new(Ipv6Addr::from(name.address), u16::from_be_bytes(name.port), 0, name.scope);
    Ok(Datagram { length, from, to: Ipv6Addr::from(control.address) })
}

/// Sends one datagram from a chosen local address.
///
/// # Errors
/// The errors of sendmsg(2); EINVAL where `from` is not an address of that namespace.
pub fn send_datagram(socket: impl AsFd, bytes: &[u8], from: Ipv6Addr, to: SocketAddrV6) -> Result<()> {
    const MSG_NOSIGNAL: usize = 0x4000;
    let mut name = RawAddress { family: AF_INET6, port: to.port().to_be_bytes(), flow: 0, address: to.ip().octets(), scope: to.scope_id() };
    let mut control =
        PacketInfo { length: PACKET_INFO_LENGTH, level: SOL_IPV6, kind: IPV6_PKTINFO, address: from.octets(), ..PacketInfo::default() };
    let mut part = Part { base: bytes.as_ptr() as usize, length: bytes.len() };
    let message = Message {
        name: (&raw mut name) as usize,
        name_length: core::mem::size_of::<RawAddress>() as u32,
        parts: (&raw mut part) as usize,
        parts_count: 1,
        control: (&raw mut control) as usize,
        control_length: core::mem::size_of::<PacketInfo>(),
        flags: 0,
    };
    let socket = socket.as_fd().as_raw_fd() as usize;
    // SAFETY: the message points to live buffers with their true lengths; the kernel
    // only reads them.
    unsafe { syscall(46, [socket, (&raw const message) as usize, MSG_NOSIGNAL, 0, 0, 0]) }.map(drop)
}
