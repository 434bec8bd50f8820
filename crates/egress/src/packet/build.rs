//! Builds the packets in answer to a held SYN, from the IP header on, with all checksums.
//!
//! They are sent through a raw socket in the sandbox's network namespace, so none can leave it.

use std::net::IpAddr;

use super::{ACK, ICMP, ICMPV6, RST, Syn, TCP};

/// Lifetime of a packet that goes no further than `lo`.
const HOPS: u8 = 64;

/// Why a peer is unreachable: the errno of the program's `connect`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unreachable {
    /// ENETUNREACH.
    Network,
    /// EHOSTUNREACH.
    Host,
}

impl Syn {
    /// The SYN itself with checksums.
    pub fn again(&self) -> Vec<u8> {
        let mut packet = self.packet.clone();
        if packet[0] >> 4 == 4 {
            let sum = [packet[..10].to_vec(), packet[12..self.tcp].to_vec()].concat();
            packet[10..12].copy_from_slice(&checksum(&[&sum]));
        }
        let segment = &mut packet[self.tcp..];
        segment[16..18].fill(0);
        let sum = self.sum(self.key.from.ip(), self.key.to.ip(), TCP, segment);
        segment[16..18].copy_from_slice(&sum);
        packet
    }

    /// The reset of a peer without a listener: ECONNREFUSED.
    pub fn reset(&self) -> Vec<u8> {
        // The SYN counts as one byte (RFC 9293, 3.10.7.1).
        let acknowledged = self.sequence().wrapping_add(1).to_be_bytes();
        let mut segment = [
            &self.key.to.port().to_be_bytes()[..],
            &self.key.from.port().to_be_bytes(),
            &[0; 4],
            &acknowledged,
            &[5 << 4, RST | ACK, 0, 0, 0, 0, 0, 0],
        ]
        .concat();
        let sum = self.sum(self.key.to.ip(), self.key.from.ip(), TCP, &segment);
        segment[16..18].copy_from_slice(&sum);
        self.answer(TCP, &segment)
    }

    /// The ICMP error of a router without a route.
    pub fn unreachable(&self, why: Unreachable) -> Vec<u8> {
        let v6 = self.key.to.is_ipv6();
        // Type and code: RFC 792; RFC 4443, 3.1.
        let (kind, code) = match (v6, why) {
            (false, Unreachable::Network) => (3, 0),
            (false, Unreachable::Host) => (3, 1),
            (true, Unreachable::Network) => (1, 0),
            (true, Unreachable::Host) => (1, 3),
        };
        // The kernel finds the socket by these bytes.
        let mut message = [&[kind, code, 0, 0, 0, 0, 0, 0], &self.packet[..]].concat();
        let sum = match v6 {
            true => self.sum(self.key.to.ip(), self.key.from.ip(), ICMPV6, &message),
            false => checksum(&[&message]),
        };
        message[2..4].copy_from_slice(&sum);
        self.answer(if v6 { ICMPV6 } else { ICMP }, &message)
    }

    /// A packet from the peer to the program.
    fn answer(&self, protocol: u8, body: &[u8]) -> Vec<u8> {
        match (self.key.to.ip(), self.key.from.ip()) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                let length = u16::try_from(20 + body.len()).unwrap_or(u16::MAX).to_be_bytes();
                let mut header =
                    [&[0x45, 0, length[0], length[1], 0, 0, 0x40, 0, HOPS, protocol, 0, 0][..], &from.octets(), &to.octets()].concat();
                let sum = checksum(&[&header]);
                header[10..12].copy_from_slice(&sum);
                [&header, body].concat()
            }
            (from, to) => {
                let length = u16::try_from(body.len()).unwrap_or(u16::MAX).to_be_bytes();
                [&[0x60, 0, 0, 0, length[0], length[1], protocol, HOPS][..], &octets(from), &octets(to), body].concat()
            }
        }
    }

    /// The checksum of a segment with its pseudo header (RFC 9293, 3.1; RFC 8200, 8.1).
    fn sum(&self, from: IpAddr, to: IpAddr, protocol: u8, segment: &[u8]) -> [u8; 2] {
        let length = u32::try_from(segment.len()).unwrap_or(0).to_be_bytes();
        checksum(&[&octets(from), &octets(to), &[0, protocol], &length, segment])
    }
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

/// The internet checksum (RFC 1071). Every part but the last has an even length.
fn checksum(parts: &[&[u8]]) -> [u8; 2] {
    let words = parts.iter().flat_map(|part| part.chunks(2));
    let mut sum: u64 = words.map(|word| u64::from(word[0]) << 8 | u64::from(word.get(1).copied().unwrap_or(0))).sum();
    while sum > 0xffff {
        sum = (sum >> 16) + (sum & 0xffff);
    }
    let folded = !u16::try_from(sum).unwrap_or(0);
    folded.to_be_bytes()
}
