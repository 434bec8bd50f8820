//! Reads one DNS query strictly, and writes the reply to it.
//!
//! A query has exactly one question, no compression, no answers, at most one EDNS record, and
//! nothing after it. The reply repeats the question byte for byte, because clients mix letter case
//! to detect forged replies.

use stockade_policy::whitelist::Name;

use super::{
    Code, MAX_QUERY_LEN, TTL,
    wire::{CLASS_IN, CODE, HEADER, OPCODE, OPT, RECURSION, RESPONSE, TRUNCATED, header, number, push_sized, read_name},
};

/// Query types that a report names.
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

/// The EDNS record of the client.
#[derive(Clone, Copy, Debug)]
pub(super) struct Edns {
    pub version: u8,
}

/// One question.
#[derive(Clone, Debug)]
pub(super) struct Query<'a> {
    id: [u8; 2],
    /// RD, the only flag that the reply repeats.
    recursion: u8,
    /// Name, type and class, unchanged.
    question: &'a [u8],
    labels: Vec<&'a [u8]>,
    pub kind: u16,
    pub edns: Option<Edns>,
}

/// A message that is no valid query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MalformedQuery {
    /// The response code; none where it gets no reply.
    pub reply: Option<Code>,
}

pub(super) fn read(message: &[u8]) -> Result<Query<'_>, MalformedQuery> {
    let Some(head) = message.first_chunk::<HEADER>() else { return Err(MalformedQuery { reply: None }) };
    // Replies get no reply, or two resolvers could loop.
    if head[2] & RESPONSE != 0 {
        return Err(MalformedQuery { reply: None });
    }
    if head[2] & OPCODE != 0 {
        return Err(MalformedQuery { reply: Some(Code::NotImp) });
    }
    let malformed = MalformedQuery { reply: Some(Code::FormErr) };
    // One question, no answers, no authorities, at most one more record.
    let counts_fit = head[4..10] == [0, 1, 0, 0, 0, 0] && head[10] == 0 && head[11] <= 1;
    if message.len() > MAX_QUERY_LEN || head[2] & TRUNCATED != 0 || head[3] & CODE != 0 || !counts_fit {
        return Err(malformed);
    }
    let mut at = HEADER;
    let labels = read_name(message, &mut at, false).ok_or(malformed)?;
    let (kind, class) = number(message, at).zip(number(message, at + 2)).ok_or(malformed)?;
    let (front, extra) = message.split_at_checked(at + 4).ok_or(malformed)?;
    if class != CLASS_IN {
        return Err(malformed);
    }
    let edns = match head[11] {
        0 if extra.is_empty() => None,
        0 => return Err(malformed),
        _ => Some(read_edns(extra).ok_or(malformed)?),
    };
    Ok(Query { id: [head[0], head[1]], recursion: head[2] & RECURSION, question: &front[HEADER..], labels, kind, edns })
}

/// The EDNS record: root name, OPT, size, flags, options.
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
    /// The name of the question, if it is a host name.
    pub(super) fn name(&self) -> Option<Name> {
        // A dot inside a label would turn one label into two.
        if self.labels.iter().any(|label| label.contains(&b'.')) {
            return None;
        }
        std::str::from_utf8(&self.text()).ok().and_then(|text| Name::new(text).ok())
    }

    /// Its labels, joined by dots.
    pub(super) fn text(&self) -> Vec<u8> {
        self.labels.join(&b'.')
    }

    /// The reply with at most one record, and an extended error for clients that send EDNS.
    pub(super) fn reply(&self, code: Code, record: Option<(u16, &[u8])>, extended: Option<u16>) -> Vec<u8> {
        let mut out = answer_header(self.id, self.recursion, code, [1, u8::from(record.is_some()), 0, u8::from(self.edns.is_some())]);
        out.extend(self.question);
        if let Some((kind, data)) = record {
            // A pointer to the name of the question.
            out.extend([0xc0, 12]);
            out.extend([kind, CLASS_IN].iter().flat_map(|number| number.to_be_bytes()));
            out.extend(TTL.to_be_bytes());
            push_sized(&mut out, data);
        }
        if self.edns.is_some() {
            let size = u16::try_from(MAX_QUERY_LEN).unwrap_or(u16::MAX).to_be_bytes();
            out.extend([0, 0, 41, size[0], size[1], code as u8 >> 4, 0, 0, 0]);
            let options = extended.map(|number| [0, 15, 0, 2, number.to_be_bytes()[0], number.to_be_bytes()[1]]);
            push_sized(&mut out, options.as_ref().map_or(&[][..], |options| options));
        }
        out
    }
}

/// A header of a reply: authoritative, recursion available.
fn answer_header(id: [u8; 2], flags: u8, code: Code, counts: [u8; 4]) -> Vec<u8> {
    header(id, [0x84 | flags, 0x80 | (code as u8 & CODE)], counts)
}

/// The reply to a message with a header and no valid question. It repeats the opcode.
pub(super) fn refuse(message: &[u8], code: Code) -> Vec<u8> {
    let [first, second, flags] = message.first_chunk().copied().unwrap_or_default();
    answer_header([first, second], flags & (OPCODE | RECURSION), code, [0; 4])
}
