//! Addresses that are closed unless a rule names them, and private addresses.
//!
//! The lists are constants of the protocols. It does not know the host's addresses.

use std::net::IpAddr;

use stockade_policy::whitelist::{CLOSED, Network, views};

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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use super::*;

    #[test]
    fn every_list_is_in_canonical_form() {
        for network in PRIVATE {
            assert_eq!(Network::new(network.address(), network.prefix()), Some(*network));
        }
    }
}
