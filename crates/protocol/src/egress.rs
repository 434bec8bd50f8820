//! What left the sandbox through the egress gate, was refused, or could not be reached.
//!
//! Names, addresses and server names come from inside the sandbox: the egress gate parses
//! them and caps their number and length. Fields are only ever added.

use alloc::{string::String, vec::Vec};
use serde::{Deserialize, Serialize};

/// How connections out are made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EgressMode {
    /// Not at all: the network namespace has only `lo`, and nothing listens there.
    #[default]
    None,
    /// By the gate, which dials what the whitelist allows.
    Gate,
}

/// Connections out of one run. Events that differ only in their time share an entry.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EgressReport {
    /// How connections out are made.
    pub mode: EgressMode,
    /// The kernel's part in it, such as `nft-tproxy`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backend: Option<String>,
    /// Rules that the caller has added to those of the policy.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub allowed_by_caller: Vec<String>,
    /// Connections that a rule allowed and whose peer was reached.
    pub allowed: Vec<EgressFlow>,
    /// Connections that no rule allows.
    pub denied: Vec<EgressDenial>,
    /// Allowed connections whose peer could not be reached.
    pub failed: Vec<EgressFailure>,
    /// A list lacks entries, or the kernel refused more than it reported: over 1000 connections
    /// or DNS queries, or 50 other packets, a second.
    pub truncated: bool,
    /// Events that the gate saw and no list has room for.
    #[serde(default)]
    pub omitted: u64,
    /// The line of a policy that extends this one, above its first section, which allows all
    /// peers of `denied` but closed addresses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub line: Option<String>,
    /// Events that the kernel dropped before they were counted; verdicts are not among
    /// what can be lost.
    pub audit_lost: u64,
    /// The alerts of the policy that refusals met, for the audit log; not part of a result.
    #[serde(skip)]
    pub alerts: Vec<String>,
}

/// Connections of one rule to one peer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EgressFlow {
    /// The rule of the whitelist.
    pub rule: String,
    /// The name that the program asked for; absent where it used an address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// The address that was dialled.
    pub addr: String,
    /// The port.
    pub port: u16,
    /// `tcp`.
    pub proto: String,
    /// The server name of a TLS hello.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sni: Option<String>,
    /// How many connections.
    pub connections: u64,
    /// Bytes to the peer.
    pub bytes_out: u64,
    /// Bytes from the peer.
    pub bytes_in: u64,
    /// The first one, counted from the start of the run.
    pub first_ms: u64,
}

/// How something was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DenialKind {
    /// A name was not resolved.
    Dns,
    /// A connection was refused.
    Connect,
    /// A connection was reset because of its TLS hello.
    Tls,
    /// A connection was reset because of an HTTP request.
    Http,
    /// A datagram was refused.
    Udp,
    /// A packet of another protocol was dropped.
    Packet,
}

/// Why something was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DenialReason {
    /// No rule allows it.
    NoRule,
    /// A rule covers it, but the address is closed unless a rule names it: loopback,
    /// link-local, metadata, multicast, an address of the host itself.
    ForbiddenRange,
    /// The same of an address that an allowed name resolved to.
    ResolvedToForbiddenRange,
    /// A public name resolved to a private address, which no rule covers.
    ResolvedToPrivateRange,
    /// An address of the range that stands for names, but for no name of this run.
    UnknownAddress,
    /// A label longer than a wildcard lets through.
    WildcardLabel,
    /// More names behind wildcards than one run may ask for, or faster.
    WildcardLimit,
    /// More names than one run may ask for.
    NameLimit,
    /// A malformed DNS query.
    DnsMalformed,
    /// A TLS hello without a server name.
    SniMissing,
    /// A TLS hello for another server.
    SniMismatch,
    /// Something that begins as TLS and is none, or is too large.
    TlsMalformed,
    /// The server name of a TLS hello is encrypted.
    Ech,
    /// An HTTP request without a host.
    HostMissing,
    /// An HTTP request for another host.
    HostMismatch,
    /// Something that begins as HTTP and is none, is too large, or has no certain end.
    HttpMalformed,
    /// HTTP/2 without TLS.
    Http2Cleartext,
    /// A request to turn the connection into something else (Upgrade).
    HttpTunnel,
    /// A request to a proxy: CONNECT, another host's URL, or SOCKS. No rule is offered: through a
    /// proxy the code could reach any peer.
    Proxy,
    /// Neither TLS nor HTTP, under a rule without `/tcp`.
    ProtocolUnknown,
    /// Not TCP: no other protocol can be allowed.
    ProtocolUnsupported,
    /// More connections than one run may have, at once or by the second.
    Limit,
}

/// One refusal and how often it happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EgressDenial {
    /// How it was refused.
    pub kind: DenialKind,
    /// The name, where there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// The address, where there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub addr: Option<String>,
    /// The port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// The protocol, where it is not the kind's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proto: Option<String>,
    /// The name that the TLS hello or the request had instead, where it is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sni: Option<String>,
    /// The type of a DNS question.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub qtype: Option<String>,
    /// Why.
    pub reason: DenialReason,
    /// The rule of `[egress] whitelist` that would allow it; null where none can. A DNS query
    /// has no port; the line then has 443.
    pub allow: Option<String>,
    /// The same as a line of a policy that extends this one, above its first section. It replaces
    /// the line of another denial; `line` of the whole allows all. The gate leaves it empty,
    /// since it does not know the policy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub line: Option<String>,
    /// How often.
    pub count: u64,
    /// The first time, counted from the start of the run.
    pub first_ms: u64,
}

/// An allowed peer that could not be reached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EgressFailure {
    /// The rule of the whitelist.
    pub rule: String,
    /// The name that the program asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// The address that was dialled last; absent where the name had none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub addr: Option<String>,
    /// The port.
    pub port: u16,
    /// An errno's name, or `ENOTFOUND` where the host could not resolve the name.
    pub error: String,
    /// How often.
    pub count: u64,
    /// The first time, counted from the start of the run.
    pub first_ms: u64,
}
