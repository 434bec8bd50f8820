//! What DNS messages are made of (RFC 1035): headers, numbers, names.
//!
//! Every read is bounded by the message and every name by 255 bytes. Does not judge a
//! message: the server of the sandbox and the resolver of the host do that themselves.

/// The length of a header, behind which the question is.
pub(crate) const HEADER: usize = 12;
/// The longest name with its length bytes.
const MAX_NAME: usize = 255;
/// The longest label.
const MAX_LABEL: usize = 63;

/// The internet's class.
pub(crate) const CLASS_IN: u16 = 1;
/// An IPv4 address.
pub(crate) const A: u16 = 1;
/// An alias.
pub(crate) const CNAME: u16 = 5;
/// A name for an address.
pub(crate) const PTR: u16 = 12;
/// An IPv6 address.
pub(crate) const AAAA: u16 = 28;
/// The pseudo-record of EDNS.
pub(crate) const OPT: u16 = 41;
/// The type of an HTTPS record.
pub(crate) const HTTPS: u16 = 65;

/// A reply, not a query.
pub(crate) const RESPONSE: u8 = 0x80;
/// The operation; 0 is a standard query.
pub(crate) const OPCODE: u8 = 0x78;
/// The message was cut.
pub(crate) const TRUNCATED: u8 = 0x02;
/// Recursion is desired.
pub(crate) const RECURSION: u8 = 0x01;
/// The response code, in the second byte of flags.
pub(crate) const CODE: u8 = 0x0f;

/// A header, with the numbers of questions, answers, authorities and additional records.
pub(crate) fn header(id: [u8; 2], flags: [u8; 2], counts: [u8; 4]) -> Vec<u8> {
    [&id[..], &flags, &counts.map(|count| [0, count]).concat()].concat()
}

/// The number of 16 bits at a place.
pub(crate) fn number(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..)?.first_chunk().map(|pair| u16::from_be_bytes(*pair))
}

/// Data behind its length.
pub(crate) fn push_sized(out: &mut Vec<u8>, data: &[u8]) {
    out.extend(u16::try_from(data.len()).unwrap_or(u16::MAX).to_be_bytes());
    out.extend(data);
}

/// A name without a dot at its end. None: a label is empty or too long, or the name is.
pub(crate) fn write_name(name: &str) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(name.len() + 2);
    for label in name.split('.') {
        out.push(u8::try_from(label.len()).ok().filter(|length| (1..=MAX_LABEL).contains(&usize::from(*length)))?);
        out.extend(label.as_bytes());
    }
    out.push(0);
    (out.len() <= MAX_NAME).then_some(out)
}

/// Reads the labels of the name at `at`, and moves `at` behind it. Pointers are followed
/// only where they are `allowed`, and only backwards, so that every name ends.
pub(crate) fn read_name<'a>(bytes: &'a [u8], at: &mut usize, allowed: bool) -> Option<Vec<&'a [u8]>> {
    let mut labels = Vec::new();
    let (mut position, mut lowest) = (*at, *at);
    let (mut end, mut total) = (None, 1);
    loop {
        let length = usize::from(*bytes.get(position)?);
        match length >> 6 {
            0 => {
                let label = bytes.get(position + 1..position + 1 + length)?;
                position += 1 + length;
                if length == 0 {
                    *at = end.unwrap_or(position);
                    return Some(labels);
                }
                total += 1 + length;
                if total > MAX_NAME {
                    return None;
                }
                labels.push(label);
            }
            3 if allowed => {
                let target = (length & MAX_LABEL) << 8 | usize::from(*bytes.get(position + 1)?);
                if target >= lowest {
                    return None;
                }
                end.get_or_insert(position + 2);
                (position, lowest) = (target, target);
            }
            // What was never defined.
            _ => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use super::*;

    #[test]
    fn names_are_written_as_they_are_read() {
        let wire = write_name("api.internal").unwrap();
        let mut at = 0;
        assert_eq!(read_name(&wire, &mut at, false), Some(vec![&b"api"[..], b"internal"]));
        assert_eq!(at, wire.len());
        for name in ["", "a..b", ".a", "a.", &"x".repeat(64), &"abc.".repeat(70)] {
            assert_eq!(write_name(name), None, "{name}");
        }
        let longest = format!("{}{}", "a.".repeat(126), "b");
        assert_eq!(write_name(&longest).map(|wire| wire.len()), Some(255));
        assert_eq!(write_name(&format!("{longest}b")), None);
        let wire = write_name(&longest).unwrap();
        assert_eq!(read_name(&wire, &mut 0, false).map(|labels| labels.len()), Some(127));
        assert_eq!(read_name(&[&b"\x01x"[..], &wire].concat(), &mut 0, false), None);
    }

    #[test]
    fn pointers_lead_backwards_or_nowhere() {
        let bytes = b"\x01b\x00\x01a\xc0\x00\xc0\x08\xc0\x03";
        let mut at = 3;
        assert_eq!(read_name(bytes, &mut at, true), Some(vec![&b"a"[..], b"b"]));
        assert_eq!(at, 7);
        assert_eq!(read_name(bytes, &mut 3, false), None);
        assert_eq!(read_name(bytes, &mut 7, true), None, "to what is behind it");
        assert_eq!(read_name(bytes, &mut 9, true), Some(vec![&b"a"[..], b"b"]));
        assert_eq!(read_name(b"\x40a\x00", &mut 0, true), None, "a label of no known kind");
    }
}
