//! Addresses that stay closed unless a rule means them, the forms of an IPv4 address inside an
//! IPv6 address, and names that no public registry hands out.
//!
//! The lists are constants of the protocols; what the host's own addresses are, and what is
//! decided by these lists, is not known here.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::{Name, Network};

/// Blocks that hold no peer of a sandbox: loopback, link-local, metadata services, reserved.
pub const CLOSED: &[Network] = &[
    Network::v4([0, 0, 0, 0], 8),                                 // this host, RFC 791
    Network::v4([127, 0, 0, 0], 8),                               // loopback
    Network::v4([169, 254, 0, 0], 16),                            // link-local; metadata of most clouds
    Network::v4([192, 0, 0, 0], 24),                              // protocol assignments, RFC 6890; metadata of one cloud
    Network::v4([168, 63, 129, 16], 32),                          // Azure's agent
    Network::v4([100, 100, 100, 200], 32),                        // Alibaba's metadata
    Network::v4([224, 0, 0, 0], 4),                               // multicast
    Network::v4([240, 0, 0, 0], 4),                               // reserved, broadcast
    Network::v6([0, 0, 0, 0, 0, 0, 0, 0], 96),                    // unspecified, loopback, IPv4-compatible (RFC 4291)
    Network::v6([0, 0, 0, 0, 0, 0xffff, 0, 0], 96),               // IPv4-mapped: unwrapped before, so never meant
    Network::v6([0x64, 0xff9b, 1, 0, 0, 0, 0, 0], 48), // local NAT64, RFC 8215: where the IPv4 part stands is the operator's choice
    Network::v6([0xfe80, 0, 0, 0, 0, 0, 0, 0], 10),    // link-local
    Network::v6([0xff00, 0, 0, 0, 0, 0, 0, 0], 8),     // multicast
    Network::v6([0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254], 128), // Amazon's metadata
    Network::v6([0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254], 128), // Google's metadata
    Network::v6([0xfd00, 0xc1, 0, 0, 0, 0, 0xa9fe, 0xa9fe], 128), // Oracle's metadata
];

/// Suffixes that no public registry hands out (RFC 6761, RFC 6762 appendix G, RFC 8375).
const INTERNAL: &[&str] = &["internal", "local", "lan", "corp", "home.arpa", "test"];

/// Whether a name cannot be a public one.
pub fn is_internal(name: &Name) -> bool {
    name.parent().is_none() || INTERNAL.iter().any(|suffix| name.is_within(suffix))
}

/// An address and every IPv4 address that a translator or tunnel would forward it to.
pub fn views(address: IpAddr) -> impl Iterator<Item = IpAddr> {
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

/// Whether an address, or an IPv4 one that it hides, lies in a closed block.
pub fn is_closed(address: IpAddr) -> bool {
    views(address).any(|view| CLOSED.iter().any(|block| block.contains(view)))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use super::*;

    #[test]
    fn every_closed_block_is_in_canonical_form() {
        for network in CLOSED {
            assert_eq!(Network::new(network.address(), network.prefix()), Some(*network));
        }
    }

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
    fn names_that_no_registry_hands_out_are_internal() {
        let internal = |text| is_internal(&Name::new(text).unwrap());
        assert!(internal("api") && internal("api.internal") && internal("printer.home.arpa") && internal("a.b.corp"));
        assert!(!internal("pypi.org") && !internal("internal.example") && !internal("notinternal.com") && !internal("x.arpa"));
    }
}
