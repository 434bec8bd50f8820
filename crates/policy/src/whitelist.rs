//! What may leave a sandbox, as typed values: the whitelist, its rules, names and networks.
//!
//! A rule is read once, from a policy, and is never a string again: everything later
//! compares values of these types. A text with two meanings is refused. Which rule decides, and whether an address stays closed, is decided in the egress crate and
//! not here.

mod closed;
mod name;
mod network;
mod parse;
mod ports;

use std::fmt;

use serde::{Deserialize, Serialize};

pub use closed::{CLOSED, is_closed, is_internal, views};
pub use name::{Name, NameFault};
pub use network::Network;
pub(crate) use parse::rule;
pub use ports::{Ports, PortsFault};

/// The first address of the network that stands for names inside a sandbox, 198.18.0.0/15
/// (RFC 2544: reserved for benchmarks, so no host has it).
pub const SYNTHETIC: Network = Network::v4([198, 18, 0, 0], 15);

/// The address of the sandbox's resolver; it answers on every other address too.
pub const RESOLVER: std::net::Ipv4Addr = std::net::Ipv4Addr::new(198, 19, 255, 253);

/// Bytes of a label that a wildcard stands for.
pub const MAX_WILDCARD_LABEL_LEN: usize = 40;

/// Peers that may be reached; empty: none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<String>", into = "Vec<String>")]
pub struct Whitelist(Vec<Rule>);

impl Whitelist {
    /// A whitelist of these rules, in their order.
    pub fn new(rules: Vec<Rule>) -> Self {
        Whitelist(rules)
    }

    /// Its rules, in the order of the policy.
    pub fn rules(&self) -> &[Rule] {
        &self.0
    }

    /// Adds a rule.
    ///
    /// # Errors
    /// The rule that it conflicts with.
    pub fn add(&mut self, rule: Rule) -> Result<(), &Rule> {
        match self.0.iter().position(|other| contradict(&rule, other)) {
            Some(index) => Err(&self.0[index]),
            None => {
                self.0.push(rule);
                Ok(())
            }
        }
    }

    /// Nothing may leave.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl From<Whitelist> for Vec<String> {
    fn from(whitelist: Whitelist) -> Self {
        whitelist.0.iter().map(Rule::to_string).collect()
    }
}

impl TryFrom<Vec<String>> for Whitelist {
    type Error = String;

    fn try_from(texts: Vec<String>) -> Result<Self, String> {
        texts.iter().map(|text| text.parse()).collect::<Result<_, _>>().map(Whitelist)
    }
}

/// One line of a whitelist. Displayed, it is its one canonical spelling.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Who may be reached.
    pub target: Target,
    /// On which TCP ports.
    pub ports: Ports,
    /// What may be spoken.
    pub protocol: Protocol,
}

impl Rule {
    /// The rule for one address and port.
    pub fn address(address: std::net::IpAddr, port: u16) -> Self {
        Rule { target: Target::Network(Network::host(address)), ports: Ports::one(port), protocol: Protocol::AnyTcp }
    }

    /// The rule for one name and port.
    pub fn name(name: Name, port: u16, protocol: Protocol) -> Self {
        Rule { target: Target::Name(name), ports: Ports::one(port), protocol }
    }
}

/// Who may be reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// Every address of a network; one host is a network of one address.
    Network(Network),
    /// One name.
    Name(Name),
    /// Every name that has exactly one label more, as a certificate's wildcard means it:
    /// `*.example.org` is `a.example.org`, neither `example.org` nor `b.a.example.org`.
    Wildcard(Name),
}

/// What may be spoken with a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Protocol {
    /// TLS or HTTP/1 that names the peer by the name under which it was allowed.
    TlsOrHttp,
    /// Any bytes: networks, and names with `/tcp`.
    AnyTcp,
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Target::Network(network) if network.is_v6() => write!(f, "[{network}]"),
            Target::Network(network) => write!(f, "{network}"),
            Target::Name(name) => write!(f, "{name}"),
            Target::Wildcard(name) => write!(f, "*.{name}"),
        }
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.target, self.ports)?;
        match (&self.target, self.protocol) {
            (Target::Name(_) | Target::Wildcard(_), Protocol::AnyTcp) => f.write_str("/tcp"),
            _ => Ok(()),
        }
    }
}

impl std::str::FromStr for Rule {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        rule(text).map_err(|diagnostic| {
            let help = diagnostic.help.map(|help| format!("; {help}")).unwrap_or_default();
            format!("{}: {}{help}", diagnostic.title, diagnostic.label)
        })
    }
}

impl Serialize for Rule {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Whether two rules of one target conflict: one port, any TCP and only TLS and HTTP.
pub fn contradict(one: &Rule, other: &Rule) -> bool {
    one.target == other.target && one.protocol != other.protocol && one.ports.overlap(&other.ports)
}
