//! DNS as the sandbox sees it: the gate answers every query from the whitelist and forwards none.
//!
//! A name that a rule allows has one A record, its stand-in address, and nothing else: no AAAA,
//! since one family is enough for addresses that stay inside, no HTTPS record, which would
//! carry keys for an encrypted server name, and no SRV records below it: a program that asks for
//! them goes on with the name itself. Any other name gets NXDOMAIN at once. So no query
//! carries data out in its labels.
//! RFC 1035, RFC 6891 (EDNS), RFC 8914 (extended errors), RFC 2308 (no data).

mod query;
pub(crate) mod wire;

use std::net::{IpAddr, Ipv4Addr};

use stockade_policy::whitelist::Name;
use stockade_protocol::{DenialKind, DenialReason, text::escape_bytes};

use crate::{
    decide::{Decider, PeerDenial, name_refusal},
    names::Names,
};
use query::{MalformedQuery, Query};
use wire::{A, AAAA, HTTPS, PTR, write_name};

/// The longest query that is read. Real programs send at most about 300 bytes.
pub const MAX_QUERY_LEN: usize = 1232;

/// Bytes of a malformed name that a report shows.
const MAX_SAID: usize = 128;

/// Seconds for which a program may cache an answer. An answer holds for the whole run.
const TTL: u32 = 60;

/// Response codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Code {
    NoError = 0,
    FormErr = 1,
    NxDomain = 3,
    NotImp = 4,
    BadVers = 16,
}

/// The reply to one query.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DnsReply {
    /// The message to send back; none where the message is no query.
    pub reply: Option<Vec<u8>>,
    /// The refusal, if it was one.
    pub denied: Option<PeerDenial>,
}

/// Answers one message. `now_ms` is a monotonic clock.
pub fn answer(message: &[u8], decider: &Decider, names: &mut Names, now_ms: u64) -> DnsReply {
    let query = match query::read(message) {
        Ok(query) => query,
        Err(MalformedQuery { reply }) => {
            let denied = PeerDenial::new(DenialKind::Dns, DenialReason::DnsMalformed);
            return DnsReply { reply: reply.map(|code| query::refuse(message, code)), denied: Some(denied) };
        }
    };
    if query.edns.is_some_and(|edns| edns.version != 0) {
        return DnsReply { reply: Some(query.reply(Code::BadVers, None, None)), denied: None };
    }
    match query.name() {
        Some(name) if query.kind == PTR && name.is_within("in-addr.arpa") => pointer(&query, &name, names),
        Some(name) => forward(&query, &name, decider, names, now_ms),
        None => {
            let denied =
                PeerDenial { host: Some(escape_bytes(&query.text(), MAX_SAID)), ..PeerDenial::new(DenialKind::Dns, DenialReason::NoRule) };
            refused(&query, denied)
        }
    }
}

fn forward(query: &Query<'_>, name: &Name, decider: &Decider, names: &mut Names, now_ms: u64) -> DnsReply {
    let Some(carried) = decider.match_name(name) else {
        if is_service_of_allowed(decider, name) {
            return DnsReply { reply: Some(query.reply(Code::NxDomain, None, None)), denied: None };
        }
        return refused(query, name_refusal(name, DenialReason::NoRule));
    };
    if query.kind != A {
        return DnsReply { reply: Some(query.reply(Code::NoError, None, None)), denied: None };
    }
    match names.assign(name, carried, now_ms) {
        Ok(address) => DnsReply { reply: Some(query.reply(Code::NoError, Some((A, &address.octets())), None)), denied: None },
        Err(reason) => refused(query, name_refusal(name, reason)),
    }
}

/// Whether a name is that of a service of an allowed name, such as `_https._tcp.pypi.org` (RFC 2782).
fn is_service_of_allowed(decider: &Decider, name: &Name) -> bool {
    let mut host = name.as_str();
    while let Some((_, rest)) = host.split_once('.').filter(|_| host.starts_with('_')) {
        host = rest;
    }
    host != name.as_str() && Name::new(host).is_ok_and(|host| decider.match_name(&host).is_some())
}

/// The name of a stand-in address, which some programs look up before they print it.
fn pointer(query: &Query<'_>, name: &Name, names: &Names) -> DnsReply {
    match reversed(name).and_then(|address| names.name_of(address)).and_then(|found| write_name(found.as_str())) {
        Some(wire) => DnsReply { reply: Some(query.reply(Code::NoError, Some((PTR, &wire)), None)), denied: None },
        None => {
            let address = reversed(name).map(IpAddr::V4);
            let host = Some(name.to_string());
            refused(query, PeerDenial { host, address, ..PeerDenial::new(DenialKind::Dns, DenialReason::NoRule) })
        }
    }
}

/// The address of a name such as `4.3.2.1.in-addr.arpa`.
fn reversed(name: &Name) -> Option<Ipv4Addr> {
    let labels: Vec<&str> = name.as_str().strip_suffix(".in-addr.arpa")?.rsplit('.').collect();
    labels.join(".").parse().ok()
}

fn refused(query: &Query<'_>, denied: PeerDenial) -> DnsReply {
    // Prohibited (RFC 8914, 4.19). Not REFUSED: the C library would try again and wait.
    let reply = query.reply(Code::NxDomain, None, Some(18));
    // A rule gives a name an address, and would not answer other questions.
    let allow = denied.allow.clone().filter(|_| matches!(query.kind, A | AAAA | HTTPS));
    DnsReply { reply: Some(reply), denied: Some(PeerDenial { question: Some(query::kind_name(query.kind)), allow, ..denied }) }
}

/// The first message of a TCP stream (RFC 1035, 4.2.2).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TcpFrame<'a> {
    /// More bytes are needed.
    Partial,
    /// A whole message, and how many bytes of the stream it took.
    Message(&'a [u8], usize),
    /// A message longer than any query: the connection should end.
    TooLong,
}

/// Finds the first message in the bytes that a client sent over TCP. At most
/// [`MAX_QUERY_LEN`] + 2 bytes need to be held.
pub fn unframe(held: &[u8]) -> TcpFrame<'_> {
    let Some((length, rest)) = held.split_first_chunk::<2>() else { return TcpFrame::Partial };
    let length = usize::from(u16::from_be_bytes(*length));
    if length > MAX_QUERY_LEN {
        return TcpFrame::TooLong;
    }
    rest.get(..length).map_or(TcpFrame::Partial, |message| TcpFrame::Message(message, length + 2))
}

/// A message with the length that TCP puts before it.
pub fn frame(reply: &[u8]) -> Vec<u8> {
    let length = u16::try_from(reply.len()).unwrap_or(u16::MAX);
    [&length.to_be_bytes(), &reply[..usize::from(length)]].concat()
}

#[cfg(test)]
mod tests;
