//! Networks of IPv4 and IPv6 by prefix, with no bit set beyond it.
//!
//! The two families never match each other: an IPv4 address that is written as an IPv6 one
//! has to be unwrapped before it comes here.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use ipnet::IpNet;

/// A network: its first address and how many leading bits it fixes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Network(IpNet);

impl Network {
    /// A constant of IPv4; a prefix above 32 does not compile.
    pub const fn v4(octets: [u8; 4], prefix: u8) -> Self {
        let [a, b, c, d] = octets;
        Network(IpNet::new_assert(IpAddr::V4(Ipv4Addr::new(a, b, c, d)), prefix))
    }

    /// A constant of IPv6; a prefix above 128 does not compile.
    pub const fn v6(segments: [u16; 8], prefix: u8) -> Self {
        let [a, b, c, d, e, f, g, h] = segments;
        Network(IpNet::new_assert(IpAddr::V6(Ipv6Addr::new(a, b, c, d, e, f, g, h)), prefix))
    }

    /// The network of one address.
    pub fn host(address: IpAddr) -> Self {
        Network(address.into())
    }

    /// A network of this address and prefix; none if the prefix is too long or bits are
    /// set beyond it.
    pub fn new(address: IpAddr, prefix: u8) -> Option<Self> {
        Network::around(address, prefix).filter(|found| found.address() == address)
    }

    /// The network of this prefix that holds an address; none if the prefix is too long.
    pub fn around(address: IpAddr, prefix: u8) -> Option<Self> {
        IpNet::new(address, prefix).ok().map(|network| Network(network.trunc()))
    }

    /// Its first address.
    pub fn address(&self) -> IpAddr {
        self.0.network()
    }

    /// Its last address.
    pub fn last(&self) -> IpAddr {
        self.0.broadcast()
    }

    /// How many leading bits it fixes.
    pub fn prefix(&self) -> u8 {
        self.0.prefix_len()
    }

    /// Whether it is of IPv6.
    pub fn is_v6(&self) -> bool {
        matches!(self.0, IpNet::V6(_))
    }

    /// Whether an address lies in it.
    pub fn contains(&self, address: IpAddr) -> bool {
        self.0.contains(&address)
    }

    /// Whether all of it lies in another.
    pub fn is_within(&self, other: &Network) -> bool {
        other.0.contains(&self.0)
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.prefix() == self.0.max_prefix_len() {
            true => write!(f, "{}", self.address()),
            false => write!(f, "{}", self.0),
        }
    }
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
