//! Queries to a name server, and what is believed of its answers (RFC 1035).
//!
//! Answers are hostile bytes: an answer counts only if it echoes id and question; aliases are
//! followed only inside it and a bounded number of steps. No system call, no clock.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::dns::wire::{
    A, AAAA, CLASS_IN, CNAME, CODE, HEADER, OPCODE, RECURSION, RESPONSE, TRUNCATED, header, number, read_name, write_name,
};

/// The address family of a query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    V4,
    V6,
}

impl Kind {
    fn number(self) -> u16 {
        match self {
            Kind::V4 => A,
            Kind::V6 => AAAA,
        }
    }
}

/// The answer of a name server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum UpstreamAnswer {
    /// The addresses; none: the name has none of this kind.
    Addresses(Vec<IpAddr>),
    /// There is no such name.
    NoSuchName,
    /// It was truncated: ask again over TCP.
    Cut,
    /// The server reports a failure.
    Failed,
}

/// Addresses kept of one answer.
const MAX_ADDRESSES: usize = 16;
/// Aliases followed.
const MAX_ALIASES: usize = 16;
/// Records looked at.
const MAX_RECORDS: u16 = 256;

/// The bytes of a query. None: no such name can be asked for.
pub(crate) fn query(id: u16, name: &str, kind: Kind) -> Option<Vec<u8>> {
    let mut bytes = header(id.to_be_bytes(), [RECURSION, 0], [1, 0, 0, 0]);
    bytes.extend(write_name(name)?);
    bytes.extend([kind.number(), CLASS_IN].iter().flat_map(|number| number.to_be_bytes()));
    Some(bytes)
}

/// Reads the answer to a query that was sent. `None`: it is not the answer to that
/// query, or malformed, and must be ignored.
pub(crate) fn read(bytes: &[u8], asked: &[u8], kind: Kind) -> Option<UpstreamAnswer> {
    let flags = *bytes.get(2)?;
    let question = asked.get(HEADER..)?;
    let echo = bytes.get(HEADER..HEADER + question.len())?;
    // Letter case may differ: some servers answer in lower case.
    if bytes.get(..2)? != asked.get(..2)?
        || flags & (RESPONSE | OPCODE) != RESPONSE
        || number(bytes, 4)? != 1
        || !echo.eq_ignore_ascii_case(question)
    {
        return None;
    }
    if flags & TRUNCATED != 0 {
        return Some(UpstreamAnswer::Cut);
    }
    match bytes.get(3)? & CODE {
        0 => {}
        3 => return Some(UpstreamAnswer::NoSuchName),
        _ => return Some(UpstreamAnswer::Failed),
    }
    let mut at = HEADER + question.len();
    let mut aliases: Vec<(WireName, WireName)> = Vec::new();
    let mut addresses: Vec<(WireName, IpAddr)> = Vec::new();
    for _ in 0..number(bytes, 6)?.min(MAX_RECORDS) {
        let owner = name(bytes, &mut at)?;
        let (record, class, length) = (number(bytes, at)?, number(bytes, at + 2)?, usize::from(number(bytes, at + 8)?));
        let data = at + 10;
        at = data + length;
        let value = bytes.get(data..at)?;
        if class != CLASS_IN {
            continue;
        }
        if record == CNAME && aliases.len() < MAX_ALIASES {
            let mut inside = data;
            aliases.push((owner, name(bytes, &mut inside)?));
        } else if record == kind.number() && addresses.len() < MAX_ADDRESSES {
            let address = match kind {
                Kind::V4 => IpAddr::V4(Ipv4Addr::from(<[u8; 4]>::try_from(value).ok()?)),
                Kind::V6 => IpAddr::V6(Ipv6Addr::from(<[u8; 16]>::try_from(value).ok()?)),
            };
            addresses.push((owner, address));
        }
    }
    let mut current = name(asked, &mut { HEADER })?;
    for _ in 0..=MAX_ALIASES {
        let found: Vec<IpAddr> = addresses.iter().filter(|(owner, _)| *owner == current).map(|(_, address)| *address).collect();
        match aliases.iter().find(|(owner, _)| *owner == current) {
            Some((_, target)) if found.is_empty() => current.clone_from(target),
            _ => return Some(UpstreamAnswer::Addresses(found)),
        }
    }
    Some(UpstreamAnswer::Failed)
}

/// The labels of a name in lower case.
type WireName = Vec<Vec<u8>>;

fn name(bytes: &[u8], at: &mut usize) -> Option<WireName> {
    Some(read_name(bytes, at, true)?.into_iter().map(<[u8]>::to_ascii_lowercase).collect())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use super::*;

    fn reply(asked: &[u8], flags: [u8; 2], records: &[(&[u8], u16, &[u8])]) -> Vec<u8> {
        let mut bytes = asked.to_vec();
        bytes[2..4].copy_from_slice(&flags);
        bytes[7] = u8::try_from(records.len()).unwrap();
        for (owner, kind, value) in records {
            bytes.extend_from_slice(owner);
            bytes.extend_from_slice(&kind.to_be_bytes());
            bytes.extend_from_slice(&[0, 1, 0, 0, 0, 60]);
            bytes.extend_from_slice(&u16::try_from(value.len()).unwrap().to_be_bytes());
            bytes.extend_from_slice(value);
        }
        bytes
    }

    const SELF: &[u8] = &[0xc0, 12];
    const OK: [u8; 2] = [0x81, 0x80];

    #[test]
    fn addresses_of_the_name_asked_for_are_believed_and_of_no_other() {
        let asked = query(7, "api.internal", Kind::V4).unwrap();
        let good = reply(&asked, OK, &[(SELF, 1, &[10, 0, 5, 7])]);
        assert_eq!(read(&good, &asked, Kind::V4), Some(UpstreamAnswer::Addresses(vec!["10.0.5.7".parse().unwrap()])));
        let other = reply(&asked, OK, &[(b"\x04evil\x00", 1, &[10, 0, 5, 7])]);
        assert_eq!(read(&other, &asked, Kind::V4), Some(UpstreamAnswer::Addresses(vec![])));
    }

    #[test]
    fn aliases_are_followed_inside_the_answer() {
        let asked = query(7, "api.internal", Kind::V4).unwrap();
        let chain: &[(&[u8], u16, &[u8])] = &[(SELF, 5, b"\x01B\x00"), (b"\x01b\x00", 5, b"\x01c\x00"), (b"\x01c\x00", 1, &[10, 0, 5, 8])];
        assert_eq!(read(&reply(&asked, OK, chain), &asked, Kind::V4), Some(UpstreamAnswer::Addresses(vec!["10.0.5.8".parse().unwrap()])));
        let circle: &[(&[u8], u16, &[u8])] = &[(SELF, 5, b"\x01b\x00"), (b"\x01b\x00", 5, b"\x03api\x08internal\x00")];
        assert_eq!(read(&reply(&asked, OK, circle), &asked, Kind::V4), Some(UpstreamAnswer::Failed));
    }

    #[test]
    fn an_answer_to_another_question_is_ignored() {
        let asked = query(7, "api.internal", Kind::V4).unwrap();
        let good = reply(&asked, OK, &[]);
        assert!(read(&good, &asked, Kind::V4).is_some());
        for (at, value) in [(0, 9), (1, 9), (2, 0x01), (5, 2), (13, b'x'), (good.len() - 3, 28)] {
            let mut bad = good.clone();
            bad[at] = value;
            assert_eq!(read(&bad, &asked, Kind::V4), None, "byte {at}");
        }
        let mut upper = good;
        upper[13] = b'A';
        assert!(read(&upper, &asked, Kind::V4).is_some());
    }

    #[test]
    fn codes_are_told_apart() {
        let asked = query(7, "a", Kind::V6).unwrap();
        for (flags, said) in
            [([0x81, 3], UpstreamAnswer::NoSuchName), ([0x81, 2], UpstreamAnswer::Failed), ([0x83, 0], UpstreamAnswer::Cut)]
        {
            assert_eq!(read(&reply(&asked, flags, &[]), &asked, Kind::V6), Some(said));
        }
    }

    #[test]
    fn no_bytes_make_it_panic_or_loop() {
        let asked = query(7, "api.internal", Kind::V4).unwrap();
        let seed = reply(&asked, OK, &[(SELF, 5, b"\x01b\xc0\x0c"), (b"\x01b\xc0\x10", 1, &[1, 2, 3, 4])]);
        let mut state = 0x1234_5678_9abc_def1_u64;
        for _ in 0..200_000 {
            let mut bytes = seed.clone();
            for _ in 0..4 {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                let at = usize::try_from(state >> 8).unwrap() % bytes.len();
                bytes[at] = state.to_le_bytes()[0];
            }
            bytes.truncate(usize::try_from(state >> 40).unwrap() % (seed.len() + 1));
            let _any = read(&bytes, &asked, Kind::V4);
        }
    }

    #[test]
    fn impossible_names_are_not_asked() {
        assert!(query(1, "a.b", Kind::V4).is_some());
        for name in ["", "a..b", ".a", "a.", &"x".repeat(64), &"abc.".repeat(70)] {
            assert_eq!(query(1, name, Kind::V4), None, "{name}");
        }
    }
}
