//! One stand-in address for each name that a sandbox looks up, for the whole run.
//!
//! A program never learns a peer's real address: it connects to the stand-in, so the gate knows
//! the name of every connection, and an address that was not handed out leads nowhere. The number
//! of names is limited. The limit is lower for names under a wildcard, because the program chooses
//! their first label and could put data into it.

use std::{
    collections::{BTreeMap, VecDeque},
    net::{IpAddr, Ipv4Addr},
};

use stockade_policy::whitelist::{MAX_WILDCARD_LABEL_LEN, Name, SYNTHETIC};
use stockade_protocol::DenialReason;

use crate::decide::{Destination, NameMatch};

/// Names that one run may look up.
pub const MAX_NAMES: usize = 4096;
/// How many of them may be under wildcards.
pub const MAX_WILDCARD_NAMES: usize = 64;
/// How many new ones of those per minute.
pub const MAX_WILDCARD_NAMES_PER_MINUTE: usize = 30;

const MINUTE_MS: u64 = 60_000;
/// 198.18.0.1. Names get the addresses after it, below 198.19.0.0, where the resolver is.
const FIRST: u32 = Ipv4Addr::new(198, 18, 0, 1).to_bits();

/// The names of one run and their addresses.
#[derive(Clone, Debug, Default)]
pub struct Names {
    numbers: BTreeMap<Name, u32>,
    /// By number.
    names: Vec<Name>,
    wildcards: usize,
    /// When the latest names under wildcards came, in milliseconds.
    recent: VecDeque<u64>,
}

impl Names {
    /// The stand-in address of a name that a rule allows, the same for the whole run.
    /// `now_ms` is a monotonic clock.
    ///
    /// # Errors
    /// A limit on names or labels is reached.
    pub fn assign(&mut self, name: &Name, carried: NameMatch, now_ms: u64) -> Result<Ipv4Addr, DenialReason> {
        if let Some(number) = self.numbers.get(name) {
            return Ok(address(*number));
        }
        if self.names.len() >= MAX_NAMES {
            return Err(DenialReason::NameLimit);
        }
        if carried == NameMatch::ByWildcard {
            self.charge(name, now_ms)?;
        }
        let number = u32::try_from(self.names.len()).map_err(|_| DenialReason::NameLimit)?;
        self.names.push(name.clone());
        self.numbers.insert(name.clone(), number);
        Ok(address(number))
    }

    fn charge(&mut self, name: &Name, now_ms: u64) -> Result<(), DenialReason> {
        if name.labels().next().is_some_and(|label| label.len() > MAX_WILDCARD_LABEL_LEN) {
            return Err(DenialReason::WildcardLabel);
        }
        while self.recent.front().is_some_and(|then| now_ms.saturating_sub(*then) >= MINUTE_MS) {
            self.recent.pop_front();
        }
        if self.wildcards >= MAX_WILDCARD_NAMES || self.recent.len() >= MAX_WILDCARD_NAMES_PER_MINUTE {
            return Err(DenialReason::WildcardLimit);
        }
        self.wildcards += 1;
        self.recent.push_back(now_ms);
        Ok(())
    }

    /// The name of a stand-in address.
    pub fn name_of(&self, address: Ipv4Addr) -> Option<&Name> {
        self.names.get(usize::try_from(address.to_bits().checked_sub(FIRST)?).ok()?)
    }

    /// The destination behind the address that a program connects to.
    pub fn destination(&self, address: IpAddr) -> Destination {
        match address.to_canonical() {
            IpAddr::V4(v4) if SYNTHETIC.contains(IpAddr::V4(v4)) => {
                self.name_of(v4).map_or(Destination::Unknown(v4), |name| Destination::Name(name.clone()))
            }
            other => Destination::Address(other),
        }
    }
}

fn address(number: u32) -> Ipv4Addr {
    Ipv4Addr::from_bits(FIRST + number)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use super::*;
    use NameMatch::{ByWildcard, Exactly};

    fn name(text: &str) -> Name {
        Name::new(text).unwrap()
    }

    #[test]
    fn a_name_keeps_its_address_and_shares_it_with_none() {
        let mut names = Names::default();
        let one = names.assign(&name("a.example"), Exactly, 0).unwrap();
        let two = names.assign(&name("b.example"), Exactly, 0).unwrap();
        assert_ne!(one, two);
        assert_eq!(names.assign(&name("A.example."), Exactly, 9).unwrap(), one);
        assert_eq!(names.name_of(two), Some(&name("b.example")));
        assert_eq!(names.destination(IpAddr::V4(one)), Destination::Name(name("a.example")));
        assert_eq!(names.destination(IpAddr::V6(one.to_ipv6_mapped())), Destination::Name(name("a.example")));
    }

    #[test]
    fn an_address_that_was_not_handed_out_stands_for_nothing() {
        let mut names = Names::default();
        names.assign(&name("a.example"), Exactly, 0).unwrap();
        for text in ["198.18.0.0", "198.18.0.2", "198.18.255.255", "198.19.255.253"] {
            assert_eq!(names.destination(text.parse().unwrap()), Destination::Unknown(text.parse().unwrap()), "{text}");
        }
        for text in ["198.17.255.255", "198.20.0.0", "10.0.0.1", "2001:db8::1"] {
            assert_eq!(names.destination(text.parse().unwrap()), Destination::Address(text.parse().unwrap()), "{text}");
        }
    }

    #[test]
    fn the_number_of_names_is_limited_and_every_address_is_synthetic() {
        let mut names = Names::default();
        for number in 0..MAX_NAMES {
            let address = names.assign(&name(&format!("n{number}.example")), Exactly, 0).unwrap();
            assert!(SYNTHETIC.contains(address.into()) && address.octets()[1] == 18);
        }
        assert_eq!(names.assign(&name("more.example"), Exactly, 0), Err(DenialReason::NameLimit));
        assert!(names.assign(&name("n7.example"), Exactly, 0).is_ok());
    }

    #[test]
    fn names_behind_wildcards_are_few_slow_and_short() {
        let mut names = Names::default();
        let mut ask = |number: usize, now| names.assign(&name(&format!("n{number}.example")), ByWildcard, now);
        for number in 0..30 {
            assert!(ask(number, 0).is_ok());
        }
        assert_eq!(ask(30, MINUTE_MS - 1), Err(DenialReason::WildcardLimit));
        assert!(ask(7, MINUTE_MS - 1).is_ok(), "known");
        for number in 30..60 {
            assert!(ask(number, MINUTE_MS).is_ok());
        }
        for number in 60..64 {
            assert!(ask(number, 2 * MINUTE_MS).is_ok());
        }
        assert_eq!(ask(64, 9 * MINUTE_MS), Err(DenialReason::WildcardLimit));
        assert!(names.assign(&name("exact.example"), Exactly, 0).is_ok());
        let mut names = Names::default();
        let label = |length| name(&format!("{}.example", "a".repeat(length)));
        assert!(names.assign(&label(40), ByWildcard, 0).is_ok());
        assert_eq!(names.assign(&label(41), ByWildcard, 0), Err(DenialReason::WildcardLabel));
        assert!(names.assign(&label(41), Exactly, 0).is_ok());
    }
}
