//! Addresses that are closed unless a rule names them, private addresses, and the forms of an IPv4
//! address inside an IPv6 address.
//!
//! The lists are constants of the protocols. It does not know the host's addresses.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use stockade_policy::whitelist::{CLOSED, Network};

/// Private networks: RFC 1918, RFC 6598, RFC 4193, and the old site-local ones.
const PRIVATE: &[Network] = &[
    Network::v4([10, 0, 0, 0], 8),
    Network::v4([172, 16, 0, 0], 12),
    Network::v4([192, 168, 0, 0], 16),
    Network::v4([100, 64, 0, 0], 10),
    Network::v6([0xfc00, 0, 0, 0, 0, 0, 0, 0], 7),
    Network::v6([0xfec0, 0, 0, 0, 0, 0, 0, 0], 10),
];

/// The closed blocks that an address lies in.
pub(super) fn blocks(address: IpAddr) -> impl Iterator<Item = Network> {
    CLOSED.iter().copied().filter(move |block| block.contains(address))
}

/// The first closed block that an address lies in, by its number.
pub(super) fn index(address: IpAddr) -> Option<usize> {
    CLOSED.iter().position(|block| block.contains(address))
}

/// Whether an address, or an IPv4 one inside it, belongs to a private network.
pub(super) fn is_private(address: IpAddr) -> bool {
    views(address).any(|view| PRIVATE.iter().any(|network| network.contains(view)))
}

/// An address and every IPv4 address that a translator or tunnel would forward it to.
pub(super) fn views(address: IpAddr) -> impl Iterator<Item = IpAddr> {
    let inner = match address {
        IpAddr::V4(_) => [None, None],
        IpAddr::V6(address) => embedded(address),
    };
    std::iter::once(address).chain(inner.into_iter().flatten().map(IpAddr::V4))
}

fn embedded(address: Ipv6Addr) -> [Option<Ipv4Addr>; 2] {
    let parts = address.segments();
    let join = |high: u16, low: u16| Ipv4Addr::from_bits(u32::from(high) << 16 | u32::from(low));
    let last = join(parts[6], parts[7]);
    match parts {
        // IPv4-compatible and -mapped (RFC 4291), IPv4-translated (RFC 2765).
        [0, 0, 0, 0, 0, 0 | 0xffff, ..] | [0, 0, 0, 0, 0xffff, 0, ..] => [Some(last), None],
        // NAT64 (RFC 6052).
        [0x64, 0xff9b, 0, 0, 0, 0, ..] => [Some(last), None],
        // 6to4 (RFC 3056).
        [0x2002, high, low, ..] => [Some(join(high, low)), None],
        // Teredo (RFC 4380): its server, and its client with every bit inverted.
        [0x2001, 0, high, low, ..] => [Some(join(high, low)), Some(join(!parts[6], !parts[7]))],
        // ISATAP (RFC 5214), in any network.
        [_, _, _, _, 0 | 0x200, 0x5efe, ..] => [Some(last), None],
        _ => [None, None],
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use super::*;

    #[test]
    fn every_disguise_is_seen_through() {
        for text in [
            "::ffff:169.254.169.254",
            "::169.254.169.254",
            "::ffff:0:169.254.169.254",
            "64:ff9b::169.254.169.254",
            "2002:a9fe:a9fe::1",
            "2001:0:a9fe:a9fe::1",
            "2001:0:102:304:0:0:5601:5601",
            "2001:db8::5efe:169.254.169.254",
            "2001:db8::200:5efe:169.254.169.254",
        ] {
            let address: IpAddr = text.parse().unwrap();
            assert!(views(address).any(|view| view == IpAddr::V4(Ipv4Addr::new(169, 254, 169, 254))), "{text}");
        }
        for text in ["2001:db8::169.254.169.254", "64:ff9c::169.254.169.254", "2003:a9fe:a9fe::1", "2001:1:a9fe:a9fe::1"] {
            let address: IpAddr = text.parse().unwrap();
            assert_eq!(views(address).count(), 1, "{text}");
        }
    }

    #[test]
    fn every_list_is_in_canonical_form() {
        for network in PRIVATE {
            assert_eq!(Network::new(network.address(), network.prefix()), Some(*network));
        }
    }
}
