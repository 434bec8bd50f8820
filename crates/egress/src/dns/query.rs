//! One DNS question on the wire, read strictly, and the reply to it.
//!
//! Exactly one question, no compression, no answers, at most one EDNS record, nothing
//! behind. The question is echoed byte for byte, so that a client which mixes letter case
//! against forgers gets its own mix back.

use stockade_policy::egress::Name;

use super::{Code, LONGEST_QUERY, TTL};

const IN: u16 = 1;
const OPT: u16 = 41;

/// Types that a person may want to read in a report.
const KINDS: &[(u16, &str)] = &[
    (1, "A"),
    (2, "NS"),
    (5, "CNAME"),
    (6, "SOA"),
    (10, "NULL"),
    (12, "PTR"),
    (15, "MX"),
    (16, "TXT"),
    (28, "AAAA"),
    (33, "SRV"),
    (64, "SVCB"),
    (65, "HTTPS"),
    (255, "ANY"),
];

/// The name of a question's type.
pub(super) fn kind_name(kind: u16) -> String {
    KINDS.iter().find(|(number, _)| *number == kind).map_or_else(|| format!("TYPE{kind}"), |(_, name)| (*name).to_owned())
}

/// The client's EDNS record.
#[derive(Clone, Copy, Debug)]
pub(super) struct Edns {
    pub version: u8,
}

/// One question.
#[derive(Clone, Debug)]
pub(super) struct Query<'a> {
    id: [u8; 2],
    /// RD, the only flag that is given back.
    recursion: bool,
    /// Name, type and class as they came.
    question: &'a [u8],
    labels: Vec<&'a [u8]>,
    pub kind: u16,
    pub edns: Option<Edns>,
}

/// What is no question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Malformed {
    /// How to answer; none: not at all.
    pub reply: Option<Code>,
}

pub(super) fn read(message: &[u8]) -> Result<Query<'_>, Malformed> {
    let Some((header, body)) = message.split_first_chunk::<12>() else { return Err(Malformed { reply: None }) };
    // A reply is never answered, or two resolvers could talk for ever.
    if header[2] & 0x80 != 0 {
        return Err(Malformed { reply: None });
    }
    let operation = header[2] >> 3 & 0xf;
    if operation != 0 {
        return Err(Malformed { reply: Some(Code::NotImp) });
    }
    let malformed = Malformed { reply: Some(Code::FormErr) };
    let truncated = header[2] & 0x02 != 0;
    let code = header[3] & 0x0f;
    // One question, no answers, no authorities, at most one more record.
    let counts_fit = header[4..10] == [0, 1, 0, 0, 0, 0] && header[10] == 0 && header[11] <= 1;
    if message.len() > LONGEST_QUERY || truncated || code != 0 || !counts_fit {
        return Err(malformed);
    }
    let (labels, after) = read_name(body).ok_or(malformed)?;
    let (&[a, b, c, d], extra) = body[after..].split_first_chunk::<4>().ok_or(malformed)?;
    if u16::from_be_bytes([c, d]) != IN {
        return Err(malformed);
    }
    let edns = match header[11] {
        0 if extra.is_empty() => None,
        0 => return Err(malformed),
        _ => Some(read_edns(extra).ok_or(malformed)?),
    };
    Ok(Query {
        id: [header[0], header[1]],
        recursion: header[2] & 1 != 0,
        question: &body[..after + 4],
        labels,
        kind: u16::from_be_bytes([a, b]),
        edns,
    })
}

/// Labels of an uncompressed name, and where it ends.
fn read_name(bytes: &[u8]) -> Option<(Vec<&[u8]>, usize)> {
    let mut labels = Vec::new();
    let mut at = 0;
    loop {
        let length = usize::from(*bytes.get(at)?);
        at += 1;
        if length == 0 {
            return Some((labels, at));
        }
        // Above 63 stand pointers and what was never defined.
        if length > 63 || at + length >= 255 {
            return None;
        }
        labels.push(bytes.get(at..at + length)?);
        at += length;
    }
}

/// The one record that may follow: root name, OPT, size, flags, options.
fn read_edns(extra: &[u8]) -> Option<Edns> {
    let (&[root, high, low, _, _, _, version, _, _, length_high, length_low], mut options) = extra.split_first_chunk::<11>()?;
    let length = usize::from(u16::from_be_bytes([length_high, length_low]));
    if root != 0 || u16::from_be_bytes([high, low]) != OPT || options.len() != length {
        return None;
    }
    while !options.is_empty() {
        let (&[_, _, high, low], rest) = options.split_first_chunk::<4>()?;
        options = rest.get(usize::from(u16::from_be_bytes([high, low]))..)?;
    }
    Some(Edns { version })
}

impl Query<'_> {
    /// The name that is asked for, if it is a plain host name.
    pub(super) fn name(&self) -> Option<Name> {
        // A dot inside a label would turn one label into two.
        if self.labels.iter().any(|label| label.contains(&b'.')) {
            return None;
        }
        std::str::from_utf8(&self.text()).ok().and_then(|text| Name::new(text).ok())
    }

    /// Its labels with dots between.
    pub(super) fn text(&self) -> Vec<u8> {
        self.labels.join(&b'.')
    }

    /// The reply: at most one record, and why not, for clients that can hear it.
    pub(super) fn reply(&self, code: Code, record: Option<(u16, &[u8])>, extended: Option<u16>) -> Vec<u8> {
        let mut out = head(self.id, self.recursion, code, [1, u8::from(record.is_some()), 0, u8::from(self.edns.is_some())]);
        out.extend(self.question);
        if let Some((kind, data)) = record {
            // The name is the one that stands behind the header.
            out.extend([0xc0, 12]);
            out.extend([kind, IN].iter().flat_map(|number| number.to_be_bytes()));
            out.extend(TTL.to_be_bytes());
            push_sized(&mut out, data);
        }
        if self.edns.is_some() {
            let size = u16::try_from(LONGEST_QUERY).unwrap_or(u16::MAX).to_be_bytes();
            out.extend([0, 0, 41, size[0], size[1], code as u8 >> 4, 0, 0, 0]);
            let options = extended.map(|number| [0, 15, 0, 2, number.to_be_bytes()[0], number.to_be_bytes()[1]]);
            push_sized(&mut out, options.as_ref().map_or(&[][..], |options| options));
        }
        out
    }
}

fn push_sized(out: &mut Vec<u8>, data: &[u8]) {
    out.extend(u16::try_from(data.len()).unwrap_or(u16::MAX).to_be_bytes());
    out.extend(data);
}

/// A header that answers: authoritative, and as if it had asked others.
fn head(id: [u8; 2], recursion: bool, code: Code, counts: [u8; 4]) -> Vec<u8> {
    let flags = [0x84 | u8::from(recursion), 0x80 | (code as u8 & 0xf)];
    [&id[..], &flags, &counts.map(|count| [0, count]).concat()].concat()
}

/// The answer to what has a header and no readable question.
pub(super) fn refuse(message: &[u8], code: Code) -> Vec<u8> {
    let id = [message.first().copied().unwrap_or(0), message.get(1).copied().unwrap_or(0)];
    let flags = message.get(2).copied().unwrap_or(0);
    let mut reply = head(id, flags & 1 != 0, code, [0; 4]);
    // The operation is given back.
    if let Some(byte) = reply.get_mut(2) {
        *byte |= flags & 0x78;
    }
    reply
}

/// A label as it stands in a message; an empty one ends a name.
pub(super) fn label(text: &str) -> Vec<u8> {
    [&[u8::try_from(text.len()).unwrap_or(0)], text.as_bytes()].concat()
}
