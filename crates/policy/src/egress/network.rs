//! Networks of IPv4 and IPv6 by prefix, with no bit set beyond it.
//!
//! The two families never match each other: an IPv4 address that is written as an IPv6 one
//! has to be unwrapped before it comes here.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

/// A network: its first address and how many leading bits it fixes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Network {
    /// IPv4, prefix at most 32.
    V4([u8; 4], u8),
    /// IPv6, prefix at most 128.
    V6([u16; 8], u8),
}

impl Network {
    /// The network of one address.
    pub fn host(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(address) => Network::V4(address.octets(), 32),
            IpAddr::V6(address) => Network::V6(address.segments(), 128),
        }
    }

    /// A network of this address and prefix; none if the prefix is too long or bits are
    /// set beyond it.
    pub fn new(address: IpAddr, prefix: u8) -> Option<Self> {
        let found = Network::around(address, prefix)?;
        (found.address() == address).then_some(found)
    }

    /// The network of this prefix that holds an address; none if the prefix is too long.
    pub fn around(address: IpAddr, prefix: u8) -> Option<Self> {
        match address {
            IpAddr::V4(address) if prefix <= 32 => {
                Some(Network::V4(Ipv4Addr::from_bits(address.to_bits() & v4_mask(prefix)).octets(), prefix))
            }
            IpAddr::V6(address) if prefix <= 128 => {
                Some(Network::V6(Ipv6Addr::from_bits(address.to_bits() & v6_mask(prefix)).segments(), prefix))
            }
            _ => None,
        }
    }

    /// Its first address.
    pub fn address(&self) -> IpAddr {
        match *self {
            Network::V4(octets, _) => IpAddr::V4(octets.into()),
            Network::V6(segments, _) => IpAddr::V6(segments.into()),
        }
    }

    /// Its last address.
    pub fn last(&self) -> IpAddr {
        match *self {
            Network::V4(octets, prefix) => IpAddr::V4(Ipv4Addr::from_bits(Ipv4Addr::from(octets).to_bits() | !v4_mask(prefix))),
            Network::V6(segments, prefix) => IpAddr::V6(Ipv6Addr::from_bits(Ipv6Addr::from(segments).to_bits() | !v6_mask(prefix))),
        }
    }

    /// How many leading bits it fixes.
    pub fn prefix(&self) -> u8 {
        match *self {
            Network::V4(_, prefix) | Network::V6(_, prefix) => prefix,
        }
    }

    /// Whether it is of IPv6.
    pub fn is_v6(&self) -> bool {
        matches!(self, Network::V6(..))
    }

    /// Whether an address lies in it.
    pub fn contains(&self, address: IpAddr) -> bool {
        Network::around(address, self.prefix()).is_some_and(|network| network == *self)
    }

    /// Whether all of it lies in another.
    pub fn is_within(&self, other: &Network) -> bool {
        self.prefix() >= other.prefix() && other.contains(self.address())
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whole = if self.is_v6() { 128 } else { 32 };
        match self.prefix() {
            prefix if prefix == whole => write!(f, "{}", self.address()),
            prefix => write!(f, "{}/{prefix}", self.address()),
        }
    }
}

fn v4_mask(prefix: u8) -> u32 {
    u32::MAX.checked_shl(32 - u32::from(prefix)).unwrap_or(0)
}

fn v6_mask(prefix: u8) -> u128 {
    u128::MAX.checked_shl(128 - u32::from(prefix)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn network(text: &str, prefix: u8) -> Network {
        Network::new(ip(text), prefix).unwrap()
    }

    #[test]
    fn a_network_holds_what_shares_its_prefix() {
        let net = network("10.0.5.0", 24);
        assert!(net.contains(ip("10.0.5.0")) && net.contains(ip("10.0.5.255")));
        assert!(!net.contains(ip("10.0.4.255")) && !net.contains(ip("10.0.6.0")));
        assert!(!net.contains(ip("::ffff:10.0.5.7")));
        let net = network("2001:db8::", 48);
        assert!(net.contains(ip("2001:db8:0:ffff::1")) && !net.contains(ip("2001:db8:1::")));
        assert!(network("0.0.0.0", 0).contains(ip("255.255.255.255")) && network("::", 0).contains(ip("ffff::")));
        assert_eq!(net.last(), ip("2001:db8:0:ffff:ffff:ffff:ffff:ffff"));
    }

    #[test]
    fn bits_beyond_the_prefix_make_no_network() {
        assert_eq!(Network::new(ip("10.0.5.7"), 24), None);
        assert_eq!(Network::around(ip("10.0.5.7"), 24), Some(network("10.0.5.0", 24)));
        assert_eq!(Network::new(ip("2001:db8::1"), 64), None);
        assert_eq!(Network::new(ip("10.0.0.0"), 33), None);
        assert_eq!(Network::new(ip("::"), 129), None);
    }

    #[test]
    fn one_lies_within_another_as_a_whole() {
        assert!(network("10.1.0.0", 16).is_within(&network("10.0.0.0", 8)));
        assert!(network("10.0.0.0", 8).is_within(&network("10.0.0.0", 8)));
        assert!(!network("10.0.0.0", 8).is_within(&network("10.1.0.0", 16)));
        assert!(!network("0.0.0.0", 0).is_within(&network("::", 0)));
    }
}
