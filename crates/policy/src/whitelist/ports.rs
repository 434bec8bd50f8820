//! Sets of TCP ports: `443`, `8000-8100`, `80,443,8000-8100`.
//!
//! A set is sorted, its ranges never touch, and it is never empty. Port 0 and port 53 are
//! in none: the first is no port, the second is answered by the sandbox's own resolver.

use std::{fmt, ops::RangeInclusive};

/// How many ranges one rule may have.
const MAX_RANGES: usize = 64;

/// Where every query ends at our own resolver, whatever the address.
const DNS: u16 = 53;

/// A set of ports.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Ports(Vec<(u16, u16)>);

/// Why a text is no set of ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PortsFault {
    /// Nothing between two commas, or nothing at all.
    #[error("a port is missing")]
    Missing,
    /// Not a number of 1 to 65535 in plain digits.
    #[error("a port is a number from 1 to 65535")]
    Number,
    /// A range that ends before it begins.
    #[error("a range runs from the smaller port to the larger")]
    Backwards,
    /// A port is in it twice.
    #[error("a port is named twice")]
    Twice,
    /// Port 53.
    #[error("port 53 is always answered by the sandbox's own resolver, which forwards nothing")]
    Dns,
    /// More than 64 ranges.
    #[error("more than 64 ports and ranges in one rule")]
    TooMany,
}

impl Ports {
    /// The set of one port.
    pub fn one(port: u16) -> Self {
        Ports(vec![(port, port)])
    }

    /// Reads a set.
    ///
    /// # Errors
    /// The text is not a list of ports and ranges, or names one twice.
    pub fn new(text: &str) -> Result<Self, PortsFault> {
        let mut ranges = Vec::new();
        for item in text.split(',') {
            if ranges.len() == MAX_RANGES {
                return Err(PortsFault::TooMany);
            }
            let (first, last) = item.split_once('-').unwrap_or((item, item));
            let (first, last) = (port(first)?, port(last)?);
            if first > last || (first == last && item.contains('-')) {
                return Err(PortsFault::Backwards);
            }
            if (first..=last).contains(&DNS) {
                return Err(PortsFault::Dns);
            }
            ranges.push((first, last));
        }
        ranges.sort_unstable();
        if ranges.windows(2).any(|pair| pair[0].1 >= pair[1].0) {
            return Err(PortsFault::Twice);
        }
        let mut joined: Vec<(u16, u16)> = Vec::new();
        for (first, last) in ranges {
            match joined.last_mut() {
                Some((_, end)) if u32::from(*end) + 1 == u32::from(first) => *end = last,
                _ => joined.push((first, last)),
            }
        }
        Ok(Ports(joined))
    }

    /// Whether a port is in it.
    pub fn contains(&self, port: u16) -> bool {
        self.0.iter().any(|(first, last)| (*first..=*last).contains(&port))
    }

    /// Its ranges, from the smallest port on; they never touch.
    pub fn ranges(&self) -> impl Iterator<Item = RangeInclusive<u16>> {
        self.0.iter().map(|(first, last)| *first..=*last)
    }

    /// These ports but for those of another set; none if none is left.
    pub fn without(&self, other: &Ports) -> Option<Ports> {
        let mut left = Vec::new();
        for (first, last) in &self.0 {
            let mut from = u32::from(*first);
            for (begin, end) in other.0.iter().filter(|(begin, end)| begin <= last && first <= end) {
                if let Ok(port) = u16::try_from(from)
                    && port < *begin
                {
                    left.push((port, begin - 1));
                }
                from = u32::from(*end) + 1;
            }
            if let Ok(port) = u16::try_from(from)
                && port <= *last
            {
                left.push((port, *last));
            }
        }
        (!left.is_empty()).then_some(Ports(left))
    }

    /// Whether a port is in both.
    pub fn overlap(&self, other: &Ports) -> bool {
        self.0.iter().any(|(first, last)| other.0.iter().any(|(begin, end)| first <= end && begin <= last))
    }
}

fn port(text: &str) -> Result<u16, PortsFault> {
    if text.is_empty() {
        return Err(PortsFault::Missing);
    }
    let plain = text.bytes().all(|byte| byte.is_ascii_digit()) && !text.starts_with('0');
    text.parse().ok().filter(|_| plain).ok_or(PortsFault::Number)
}

impl fmt::Display for Ports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (first, last)) in self.0.iter().enumerate() {
            if index > 0 {
                f.write_str(",")?;
            }
            match first == last {
                true => write!(f, "{first}")?,
                false => write!(f, "{first}-{last}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use super::*;

    #[test]
    fn ports_ranges_and_lists_have_one_spelling() {
        for (text, shown) in
            [("443", "443"), ("443,80", "80,443"), ("8000-8100", "8000-8100"), ("80,81,82-90", "80-90"), ("1-52,54-65535", "1-52,54-65535")]
        {
            assert_eq!(Ports::new(text).unwrap().to_string(), shown);
        }
        let ports = Ports::new("80,8000-8100").unwrap();
        assert!(ports.contains(80) && ports.contains(8000) && ports.contains(8100));
        assert!(!ports.contains(79) && !ports.contains(81) && !ports.contains(7999) && !ports.contains(8101));
        assert!(ports.overlap(&Ports::one(8050)) && !ports.overlap(&Ports::one(443)));
    }

    #[test]
    fn what_is_taken_out_is_gone_and_nothing_else() {
        for (all, out, left) in [
            ("80,443", "443", "80"),
            ("80-90", "85", "80-84,86-90"),
            ("80-90", "70-81,89-95", "82-88"),
            ("65000-65535", "65535", "65000-65534"),
            ("1-52,54-65535", "54-65535", "1-52"),
            ("80", "443", "80"),
        ] {
            assert_eq!(Ports::new(all).unwrap().without(&Ports::new(out).unwrap()).unwrap().to_string(), left, "{all} without {out}");
        }
        assert_eq!(Ports::new("80-90").unwrap().without(&Ports::new("1-52,54-100").unwrap()), None);
    }

    #[test]
    fn what_is_no_set_of_ports_is_refused() {
        let many = (1..=65).map(|n| (1000 + 2 * n).to_string()).collect::<Vec<_>>().join(",");
        for (text, fault) in [
            ("", PortsFault::Missing),
            ("80,", PortsFault::Missing),
            ("80-", PortsFault::Missing),
            ("-80", PortsFault::Missing),
            ("0", PortsFault::Number),
            ("0-80", PortsFault::Number),
            ("080", PortsFault::Number),
            ("65536", PortsFault::Number),
            ("+80", PortsFault::Number),
            (" 80", PortsFault::Number),
            ("http", PortsFault::Number),
            ("*", PortsFault::Number),
            ("1-2-3", PortsFault::Number),
            ("90-80", PortsFault::Backwards),
            ("80-80", PortsFault::Backwards),
            ("80,80", PortsFault::Twice),
            ("80-90,85", PortsFault::Twice),
            ("53", PortsFault::Dns),
            ("1-1024", PortsFault::Dns),
            (&many, PortsFault::TooMany),
        ] {
            assert_eq!(Ports::new(text), Err(fault), "{text:?}");
        }
    }
}
