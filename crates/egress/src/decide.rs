//! The decision which peers a sandbox may reach, as one function of typed values.
//!
//! The gate asks twice for each connection: when the sandbox's SYN is held, for the destination
//! that the program named, and before each dial, for the address that is dialled, because a name
//! can resolve to other addresses in between. What no rule allows is denied; a denial carries the
//! line that would allow it. Nothing here resolves, dials or counts.

mod closed;

use std::net::{IpAddr, Ipv4Addr};

use stockade_policy::whitelist::{Name, Network, Protocol, Rule, Target, Whitelist, is_internal, views};
use stockade_protocol::{DenialKind, DenialReason};

/// What a program connects to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Destination {
    /// An address; never an IPv4 address mapped into IPv6.
    Address(IpAddr),
    /// A name, by its stand-in address in the sandbox.
    Name(Name),
    /// A stand-in address that was given to no name.
    Unknown(Ipv4Addr),
}

/// A rule's permission for one destination and port. Each address still needs [`Decider::decide_dial`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Permit {
    /// Which rule, counted from 0.
    pub rule: usize,
    /// The destination.
    pub to: Destination,
    /// TCP port.
    pub port: u16,
    /// What may be spoken.
    pub protocol: Protocol,
}

impl Permit {
    /// The name that TLS or HTTP must carry; none where any bytes may pass.
    pub fn spoken_name(&self) -> Option<&Name> {
        match (&self.to, self.protocol) {
            (Destination::Name(name), Protocol::TlsOrHttp) => Some(name),
            _ => None,
        }
    }

    /// The name that the program asked for.
    pub fn host(&self) -> Option<&Name> {
        match &self.to {
            Destination::Name(name) => Some(name),
            _ => None,
        }
    }
}

/// A refused connection, query or packet, as it is answered and recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerDenial {
    /// How it is refused.
    pub kind: DenialKind,
    /// Why.
    pub reason: DenialReason,
    /// The name that was asked for, as far as it is one.
    pub host: Option<String>,
    /// The address.
    pub address: Option<IpAddr>,
    /// The port.
    pub port: Option<u16>,
    /// The protocol, where the kind does not imply it.
    pub protocol: Option<String>,
    /// What a hello or a request named instead.
    pub said: Option<String>,
    /// The type of a DNS question.
    pub question: Option<String>,
    /// The line of a whitelist that would allow it.
    pub allow: Option<String>,
}

impl PeerDenial {
    /// A refusal of which only kind and reason are known.
    pub fn new(kind: DenialKind, reason: DenialReason) -> Self {
        PeerDenial { kind, reason, host: None, address: None, port: None, protocol: None, said: None, question: None, allow: None }
    }

    /// The refusal of TLS or HTTP over an allowed connection. `said` is what it named.
    pub fn of_protocol(permit: &Permit, address: IpAddr, kind: DenialKind, reason: DenialReason, said: Option<String>) -> Self {
        // A rule that let a proxy be asked for anything would void the whitelist.
        let host = permit.host().filter(|_| reason != DenialReason::Proxy);
        let allow = host.and_then(|name| line(Rule::name(name.clone(), permit.port, Protocol::AnyTcp)));
        PeerDenial {
            host: permit.host().map(Name::to_string),
            address: Some(address),
            port: Some(permit.port),
            said,
            allow,
            ..PeerDenial::new(kind, reason)
        }
    }

    /// The refusal of a connection beyond the limit.
    pub fn of_number(to: Destination, port: u16) -> Self {
        let (host, address) = match to {
            Destination::Name(name) => (Some(name.to_string()), None),
            Destination::Address(address) => (None, Some(address)),
            Destination::Unknown(address) => (None, Some(IpAddr::V4(address))),
        };
        PeerDenial { host, address, port: Some(port), ..PeerDenial::new(DenialKind::Connect, DenialReason::Limit) }
    }
}

/// How a name is allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NameMatch {
    /// A rule names it.
    Exactly,
    /// Only a wildcard covers it, so the program chooses its first label.
    ByWildcard,
}

/// The whitelist of one run and the addresses of its host.
#[derive(Clone, Debug)]
pub struct Decider {
    whitelist: Whitelist,
    own: Vec<IpAddr>,
}

impl Decider {
    /// For this whitelist, on a host whose interfaces have these addresses.
    pub fn new(whitelist: Whitelist, own: Vec<IpAddr>) -> Self {
        let mut decider = Decider { whitelist, own: Vec::new() };
        decider.set_own_addresses(own);
        decider
    }

    /// Replaces the addresses of the host's interfaces. To decide on one address, those of
    /// its [`views`] that are the host's are enough.
    pub fn set_own_addresses(&mut self, own: Vec<IpAddr>) {
        self.own = own.into_iter().map(|address| address.to_canonical()).collect();
    }

    /// The whitelist.
    pub fn whitelist(&self) -> &Whitelist {
        &self.whitelist
    }

    /// The canonical text of the permit's rule.
    pub fn rule_text(&self, permit: &Permit) -> String {
        self.whitelist.rules().get(permit.rule).map(Rule::to_string).unwrap_or_default()
    }

    /// Whether a rule allows a name on any port.
    pub fn match_name(&self, name: &Name) -> Option<NameMatch> {
        let targets = || self.whitelist.rules().iter().map(|rule| &rule.target);
        if targets().any(|target| matches!(target, Target::Name(own) if own == name)) {
            return Some(NameMatch::Exactly);
        }
        targets().any(|target| covers(target, name)).then_some(NameMatch::ByWildcard)
    }

    /// Whether a connection may be tried.
    ///
    /// An exact name comes before a wildcard, a smaller network before a larger one.
    ///
    /// # Errors
    /// No rule allows it, or the address is closed.
    pub fn decide(&self, to: Destination, port: u16) -> Result<Permit, Box<PeerDenial>> {
        let found = match &to {
            Destination::Name(name) => self
                .find(port, |target| matches!(target, Target::Name(own) if own == name))
                .or_else(|| self.find(port, |target| covers(target, name))),
            Destination::Address(address) => {
                let address = address.to_canonical();
                self.networks(port)
                    .filter(|(_, network)| network.contains(address))
                    .max_by_key(|(_, network)| network.prefix())
                    .map(|(index, _)| index)
            }
            Destination::Unknown(_) => None,
        };
        let Some(rule) = found else {
            let reason = if matches!(to, Destination::Unknown(_)) { DenialReason::UnknownAddress } else { DenialReason::NoRule };
            return Err(Box::new(refusal(&to, port, reason)));
        };
        let protocol = self.whitelist.rules().get(rule).map_or(Protocol::TlsOrHttp, |rule| rule.protocol);
        let permit = Permit { rule, to, port, protocol };
        match &permit.to {
            Destination::Address(address) if self.closed(address.to_canonical(), port) => {
                Err(Box::new(refusal(&permit.to, port, DenialReason::ForbiddenRange)))
            }
            _ => Ok(permit),
        }
    }

    /// Whether an address may be dialled for a permit. The process that dials must ask, with
    /// the address that it dials.
    ///
    /// # Errors
    /// The address is closed, or is a private one behind a public name.
    pub fn decide_dial(&self, permit: &Permit, address: IpAddr) -> Result<(), Box<PeerDenial>> {
        let address = address.to_canonical();
        let refuse = |reason| {
            let allow = line(Rule::address(address, permit.port));
            let host = permit.host().map(Name::to_string);
            Err(Box::new(PeerDenial {
                host,
                address: Some(address),
                port: Some(permit.port),
                allow,
                ..PeerDenial::new(DenialKind::Connect, reason)
            }))
        };
        let name = match &permit.to {
            Destination::Name(name) => name,
            // A bug of the caller: it dials another address than the permit allows.
            Destination::Address(allowed) if allowed.to_canonical() != address => return refuse(DenialReason::NoRule),
            Destination::Address(_) if self.closed(address, permit.port) => return refuse(DenialReason::ForbiddenRange),
            Destination::Address(_) => return Ok(()),
            Destination::Unknown(_) => return refuse(DenialReason::UnknownAddress),
        };
        if self.closed(address, permit.port) {
            return refuse(DenialReason::ResolvedToForbiddenRange);
        }
        let covered = || self.networks(permit.port).any(|(_, network)| network.contains(address));
        let exact = || self.match_name(name) == Some(NameMatch::Exactly);
        if closed::is_private(address) && !(is_internal(name) && exact()) && !covered() {
            return refuse(DenialReason::ResolvedToPrivateRange);
        }
        Ok(())
    }

    fn find(&self, port: u16, fits: impl Fn(&Target) -> bool) -> Option<usize> {
        self.whitelist.rules().iter().position(|rule| rule.ports.contains(port) && fits(&rule.target))
    }

    /// The networks that are allowed on a port.
    fn networks(&self, port: u16) -> impl Iterator<Item = (usize, Network)> {
        self.whitelist.rules().iter().enumerate().filter_map(move |(index, rule)| match rule.target {
            Target::Network(network) if rule.ports.contains(port) => Some((index, network)),
            _ => None,
        })
    }

    /// Whether the host's own addresses are closed here: not where a rule names exactly this
    /// address on this port.
    pub fn asks_whose(&self, address: IpAddr, port: u16) -> bool {
        !self.networks(port).any(|(_, network)| network == Network::host(address))
    }

    /// Whether an address is closed on a port: it lies in a closed block, and no rule names a
    /// network within that block.
    fn closed(&self, address: IpAddr, port: u16) -> bool {
        if !self.asks_whose(address, port) {
            return false;
        }
        views(address).any(|view| {
            let own = self.own.contains(&view).then(|| Network::host(view));
            closed::blocks(view)
                .chain(own)
                .any(|block| !self.networks(port).any(|(_, network)| network.contains(view) && network.is_within(&block)))
        })
    }
}

fn covers(target: &Target, name: &Name) -> bool {
    matches!(target, Target::Wildcard(base) if name.parent() == Some(base.as_str()))
}

fn refusal(to: &Destination, port: u16, reason: DenialReason) -> PeerDenial {
    let (host, address, rule) = match to {
        Destination::Name(name) => (Some(name.to_string()), None, Some(Rule::name(name.clone(), port, Protocol::TlsOrHttp))),
        Destination::Address(address) => (None, Some(*address), Some(Rule::address(address.to_canonical(), port))),
        Destination::Unknown(address) => (None, Some(IpAddr::V4(*address)), None),
    };
    PeerDenial { host, address, port: Some(port), allow: rule.and_then(line), ..PeerDenial::new(DenialKind::Connect, reason) }
}

/// The refusal of a name; `allow` assumes port 443.
pub(crate) fn name_refusal(name: &Name, reason: DenialReason) -> PeerDenial {
    let rule = Rule::name(name.clone(), 443, Protocol::TlsOrHttp);
    let allow = matches!(reason, DenialReason::NoRule | DenialReason::WildcardLabel | DenialReason::WildcardLimit).then(|| line(rule));
    PeerDenial { host: Some(name.to_string()), allow: allow.flatten(), ..PeerDenial::new(DenialKind::Dns, reason) }
}

/// Which of the closed blocks an address lies in, or one that it hides.
pub(crate) fn closed_block(address: IpAddr) -> Option<usize> {
    views(address.to_canonical()).find_map(closed::index)
}

/// A rule as a line, if a policy accepts it.
fn line(rule: Rule) -> Option<String> {
    let text = rule.to_string();
    text.parse::<Rule>().is_ok().then_some(text)
}

#[cfg(test)]
mod tests;
