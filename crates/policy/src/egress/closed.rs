//! Addresses that stay closed unless a rule means them, and names that nobody can register.
//!
//! The lists are constants of the protocols; what the host's own addresses are, and what is
//! decided by these lists, is not known here.

use super::{Name, Network};

const fn v4(octets: [u8; 4], prefix: u8) -> Network {
    Network::V4(octets, prefix)
}

const fn v6(segments: [u16; 8], prefix: u8) -> Network {
    Network::V6(segments, prefix)
}

/// Blocks with nobody in them whom a program of the sandbox should meet by accident.
pub const CLOSED: &[Network] = &[
    v4([0, 0, 0, 0], 8),                                 // this host, RFC 791
    v4([127, 0, 0, 0], 8),                               // loopback
    v4([169, 254, 0, 0], 16),                            // link-local; metadata of most clouds
    v4([192, 0, 0, 0], 24),                              // protocol assignments, RFC 6890; metadata of one cloud
    v4([168, 63, 129, 16], 32),                          // Azure's agent
    v4([100, 100, 100, 200], 32),                        // Alibaba's metadata
    v4([224, 0, 0, 0], 4),                               // multicast
    v4([240, 0, 0, 0], 4),                               // reserved, broadcast
    v6([0, 0, 0, 0, 0, 0, 0, 0], 96),                    // unspecified, loopback, IPv4-compatible (RFC 4291)
    v6([0, 0, 0, 0, 0, 0xffff, 0, 0], 96),               // IPv4-mapped: unwrapped before, so never meant
    v6([0x64, 0xff9b, 1, 0, 0, 0, 0, 0], 48),            // local NAT64, RFC 8215: where the IPv4 part stands is the operator's choice
    v6([0xfe80, 0, 0, 0, 0, 0, 0, 0], 10),               // link-local
    v6([0xff00, 0, 0, 0, 0, 0, 0, 0], 8),                // multicast
    v6([0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254], 128),      // Amazon's metadata
    v6([0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254], 128),       // Google's metadata
    v6([0xfd00, 0xc1, 0, 0, 0, 0, 0xa9fe, 0xa9fe], 128), // Oracle's metadata
];

/// Suffixes that no public registry hands out (RFC 6761, RFC 6762 appendix G, RFC 8375).
const INTERNAL: &[&str] = &["internal", "local", "lan", "corp", "home.arpa", "test"];

/// Whether a name cannot be a public one.
pub fn is_internal(name: &Name) -> bool {
    name.parent().is_none() || INTERNAL.iter().any(|suffix| name.is_within(suffix))
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
    fn only_names_that_nobody_can_register_are_internal() {
        let internal = |text| is_internal(&Name::new(text).unwrap());
        assert!(internal("api") && internal("api.internal") && internal("printer.home.arpa") && internal("a.b.corp"));
        assert!(!internal("pypi.org") && !internal("internal.example") && !internal("notinternal.com") && !internal("x.arpa"));
    }
}
