//! DNS as the sandbox sees it: every question answered from the whitelist, none forwarded.
//!
//! A name that a rule carries has one A record, the address that stands for it, and no
//! others: no AAAA, since one family is enough for what never leaves, and no HTTPS record,
//! which would bring keys to encrypt the server's name. Any other name does not exist, and
//! is told so at once. So a question carries nothing out, whatever its labels hold.
//! RFC 1035, RFC 6891 (EDNS), RFC 8914 (extended errors), RFC 2308 (no data).

mod query;

use std::net::{IpAddr, Ipv4Addr};

use stockade_policy::egress::Name;
use stockade_protocol::{DenialKind, DenialReason};

use crate::{
    decide::{Decider, Denied, name_refusal},
    inspect::printable,
    names::Names,
};
use query::{Malformed, Query};

/// The longest question that is read; those of real programs have at most some 300 bytes.
pub const LONGEST_QUERY: usize = 1232;

/// How long a program may remember an answer, in seconds; it holds for the whole run.
const TTL: u32 = 60;

const A: u16 = 1;
const PTR: u16 = 12;

/// Response codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Code {
    NoError = 0,
    FormErr = 1,
    NxDomain = 3,
    NotImp = 4,
    BadVers = 16,
}

/// What became of one question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The message to send back; none for what is no question at all.
    pub reply: Option<Vec<u8>>,
    /// The refusal, if it was one.
    pub denied: Option<Denied>,
}

/// Answers one message. `now_ms` is any clock that does not run backwards.
pub fn answer(message: &[u8], decider: &Decider, names: &mut Names, now_ms: u64) -> Answer {
    let query = match query::read(message) {
        Ok(query) => query,
        Err(Malformed { reply }) => {
            let denied = Denied::new(DenialKind::Dns, DenialReason::DnsMalformed);
            return Answer { reply: reply.map(|code| query::refuse(message, code)), denied: Some(denied) };
        }
    };
    if query.edns.is_some_and(|edns| edns.version != 0) {
        return Answer { reply: Some(query.reply(Code::BadVers, None, None)), denied: None };
    }
    match query.name() {
        Some(name) if query.kind == PTR && name.is_within("in-addr.arpa") => pointer(&query, &name, names),
        Some(name) => forward(&query, &name, decider, names, now_ms),
        None => {
            let denied = Denied { host: Some(printable(&query.text())), ..Denied::new(DenialKind::Dns, DenialReason::NoRule) };
            refused(&query, denied)
        }
    }
}

fn forward(query: &Query<'_>, name: &Name, decider: &Decider, names: &mut Names, now_ms: u64) -> Answer {
    let Some(carried) = decider.carries(name) else { return refused(query, name_refusal(name, DenialReason::NoRule)) };
    if query.kind != A {
        return Answer { reply: Some(query.reply(Code::NoError, None, None)), denied: None };
    }
    match names.assign(name, carried, now_ms) {
        Ok(address) => Answer { reply: Some(query.reply(Code::NoError, Some((A, &address.octets())), None)), denied: None },
        Err(reason) => refused(query, name_refusal(name, reason)),
    }
}

/// The name that an address stands for, as some programs ask before they print it.
fn pointer(query: &Query<'_>, name: &Name, names: &Names) -> Answer {
    match reversed(name).and_then(|address| names.name_of(address)) {
        Some(found) => {
            let wire: Vec<u8> = found.labels().chain([""]).flat_map(query::label).collect();
            Answer { reply: Some(query.reply(Code::NoError, Some((PTR, &wire)), None)), denied: None }
        }
        None => {
            let address = reversed(name).map(IpAddr::V4);
            let host = Some(name.to_string());
            refused(query, Denied { host, address, ..Denied::new(DenialKind::Dns, DenialReason::NoRule) })
        }
    }
}

/// The address of a name such as `4.3.2.1.in-addr.arpa`.
fn reversed(name: &Name) -> Option<Ipv4Addr> {
    let labels: Vec<&str> = name.as_str().strip_suffix(".in-addr.arpa")?.rsplit('.').collect();
    labels.join(".").parse().ok()
}

fn refused(query: &Query<'_>, denied: Denied) -> Answer {
    // Prohibited (RFC 8914, 4.19). Not REFUSED: the C library would try again and wait.
    let reply = query.reply(Code::NxDomain, None, Some(18));
    Answer { reply: Some(reply), denied: Some(Denied { question: Some(query::kind_name(query.kind)), ..denied }) }
}

/// What stands at the beginning of a TCP stream of messages (RFC 1035, 4.2.2).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Framed<'a> {
    /// Too little yet.
    Partial,
    /// A whole message, and how many bytes of the stream it took.
    Message(&'a [u8], usize),
    /// A message longer than any question: the connection should end.
    TooLong,
}

/// Finds the first message of what a client sent over TCP. At most
/// [`LONGEST_QUERY`] + 2 bytes need to be held.
pub fn unframe(held: &[u8]) -> Framed<'_> {
    let Some((length, rest)) = held.split_first_chunk::<2>() else { return Framed::Partial };
    let length = usize::from(u16::from_be_bytes(*length));
    if length > LONGEST_QUERY {
        return Framed::TooLong;
    }
    rest.get(..length).map_or(Framed::Partial, |message| Framed::Message(message, length + 2))
}

/// A reply as TCP carries it.
pub fn frame(reply: &[u8]) -> Vec<u8> {
    let length = u16::try_from(reply.len()).unwrap_or(u16::MAX);
    [&length.to_be_bytes(), &reply[..usize::from(length)]].concat()
}

#[cfg(test)]
mod tests;
