//! Reads packets that the kernel logged, and for a SYN writes the packets in answer.
//!
//! A held SYN is sent on with checksums, which the kernel leaves to hardware that does not exist
//! here, and without data: TCP fast open may carry 64 KiB, which the sender sends again. A refused
//! SYN gets a reset or an ICMP error. Only plain packets are read: no fragments, no extension
//! headers. The bytes are hostile. RFC 791, 8200, 9293, 7413, 792, 4443.

mod build;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

pub use build::Unreachable;

const ICMP: u8 = 1;
const TCP: u8 = 6;
const UDP: u8 = 17;
const ICMPV6: u8 = 58;

const FIN: u8 = 1;
const SYN: u8 = 2;
const RST: u8 = 4;
const ACK: u8 = 16;

/// Both ends of a connection, which identify an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// The program's end.
    pub from: SocketAddr,
    /// The destination.
    pub to: SocketAddr,
}

/// A TCP SYN without data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Syn {
    key: Key,
    /// Its headers, with a length of no data.
    packet: Vec<u8>,
    /// Where the TCP header begins.
    tcp: usize,
}

/// What a packet was for, as far as its headers tell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// `tcp`, `udp`, `icmp`, or `protocol 132` by its number.
    pub protocol: String,
    /// Its destination.
    pub to: IpAddr,
    /// Its port, where the protocol has ports.
    pub port: Option<u16>,
}

/// Why a packet is no SYN that can be held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PacketFault {
    /// Truncated, or with a wrong length.
    #[error("truncated, or its length field is wrong")]
    Length,
    /// Neither IPv4 nor IPv6.
    #[error("neither IPv4 nor IPv6")]
    Version,
    /// A fragment.
    #[error("a fragment")]
    Fragment,
    /// Not TCP, or behind an extension header.
    #[error("not TCP")]
    Protocol,
    /// Not the first packet of a connection.
    #[error("not a SYN")]
    Flags,
}

/// A packet's network header.
struct Outer<'a> {
    from: IpAddr,
    to: IpAddr,
    protocol: u8,
    fragment: bool,
    /// The packet without trailing bytes, as far as it was logged.
    packet: &'a [u8],
    /// Where its header ends.
    end: usize,
}

impl<'a> Outer<'a> {
    fn read(bytes: &'a [u8]) -> Result<Self, PacketFault> {
        match bytes.first().map(|byte| byte >> 4) {
            Some(4) => Self::read_v4(bytes),
            Some(6) => Self::read_v6(bytes),
            Some(_) => Err(PacketFault::Version),
            None => Err(PacketFault::Length),
        }
    }

    fn read_v4(bytes: &'a [u8]) -> Result<Self, PacketFault> {
        let header = bytes.first_chunk::<20>().ok_or(PacketFault::Length)?;
        let end = usize::from(header[0] & 0xf) * 4;
        let length = usize::from(u16::from_be_bytes([header[2], header[3]]));
        let packet = bytes.get(..length).unwrap_or(bytes);
        if end < 20 || packet.len() < end {
            return Err(PacketFault::Length);
        }
        let [.., a, b, c, d, e, f, g, h] = *header;
        Ok(Outer {
            from: IpAddr::V4(Ipv4Addr::new(a, b, c, d)),
            to: IpAddr::V4(Ipv4Addr::new(e, f, g, h)),
            protocol: header[9],
            // Every bit of the offset, and "more fragments".
            fragment: header[6] & 0x3f != 0 || header[7] != 0,
            packet,
            end,
        })
    }

    fn read_v6(bytes: &'a [u8]) -> Result<Self, PacketFault> {
        let header = bytes.first_chunk::<40>().ok_or(PacketFault::Length)?;
        let length = 40 + usize::from(u16::from_be_bytes([header[4], header[5]]));
        let packet = bytes.get(..length).unwrap_or(bytes);
        let address = |at: usize| header[at..].first_chunk::<16>().map_or(Ipv6Addr::UNSPECIFIED, |octets| Ipv6Addr::from(*octets));
        Ok(Outer { from: IpAddr::V6(address(8)), to: IpAddr::V6(address(24)), protocol: header[6], fragment: false, packet, end: 40 })
    }
}

impl Syn {
    /// Reads a captured packet that begins with its IP header. Its data may be missing.
    ///
    /// # Errors
    /// The packet is no plain SYN with complete headers.
    pub fn read(bytes: &[u8]) -> Result<Self, PacketFault> {
        let outer = Outer::read(bytes)?;
        if outer.fragment {
            return Err(PacketFault::Fragment);
        }
        if outer.protocol != TCP {
            return Err(PacketFault::Protocol);
        }
        let segment = &outer.packet[outer.end..];
        let header = segment.first_chunk::<20>().ok_or(PacketFault::Length)?;
        let options_end = usize::from(header[12] >> 4) * 4;
        if options_end < 20 || options_end > segment.len() {
            return Err(PacketFault::Length);
        }
        if header[13] & (FIN | SYN | RST | ACK) != SYN {
            return Err(PacketFault::Flags);
        }
        let port = |at: usize| u16::from_be_bytes([header[at], header[at + 1]]);
        let key = Key { from: SocketAddr::new(outer.from, port(0)), to: SocketAddr::new(outer.to, port(2)) };
        let mut packet = outer.packet[..outer.end + options_end].to_vec();
        // IPv4 counts its header in, IPv6 does not.
        let (at, length) = if outer.to.is_ipv4() { (2, packet.len()) } else { (4, options_end) };
        packet[at..at + 2].copy_from_slice(&u16::try_from(length).map_err(|_| PacketFault::Length)?.to_be_bytes());
        Ok(Syn { key, packet, tcp: outer.end })
    }

    /// Both ends.
    pub fn key(&self) -> Key {
        self.key
    }

    /// The number with which its connection begins: the same each time the SYN is sent.
    pub fn sequence(&self) -> u32 {
        self.packet[self.tcp + 4..self.tcp + 8].iter().fold(0, |number, byte| number << 8 | u32::from(*byte))
    }
}

impl Attempt {
    /// Reads the beginning of a captured packet, for the record only.
    ///
    /// # Errors
    /// It has no complete IP header.
    pub fn read(bytes: &[u8]) -> Result<Self, PacketFault> {
        let outer = Outer::read(bytes)?;
        let protocol = match outer.protocol {
            TCP => String::from("tcp"),
            UDP => String::from("udp"),
            ICMP | ICMPV6 => String::from("icmp"),
            other => format!("protocol {other}"),
        };
        let ports = outer.packet.get(outer.end..outer.end + 4).filter(|_| matches!(outer.protocol, TCP | UDP) && !outer.fragment);
        Ok(Attempt { protocol, to: outer.to, port: ports.map(|ports| u16::from_be_bytes([ports[2], ports[3]])) })
    }
}

#[cfg(test)]
mod tests;
