//! Addresses that stay closed unless a rule means them, and names that no public registry hands out.
//!
//! The lists are constants of the protocols; what the host's own addresses are, and what is
//! decided by these lists, is not known here.

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
    fn names_that_no_registry_hands_out_are_internal() {
        let internal = |text| is_internal(&Name::new(text).unwrap());
        assert!(internal("api") && internal("api.internal") && internal("printer.home.arpa") && internal("a.b.corp"));
        assert!(!internal("pypi.org") && !internal("internal.example") && !internal("notinternal.com") && !internal("x.arpa"));
    }
}
