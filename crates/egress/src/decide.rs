//! The decision: what a sandbox may reach, as one function of typed values.
//!
//! It is asked twice for each connection: when the sandbox's SYN is held, for the
//! destination that the program named, and again by whoever dials, for the very address
//! that is about to be dialled. Between the two stands a name, and what a name resolves to
//! can change. Everything is denied that no rule allows; a denial carries the line that
//! would allow it. Nothing here resolves, dials or counts.

mod closed;

use std::net::{IpAddr, Ipv4Addr};

use stockade_policy::egress::{Name, Network, Rule, Speech, Target, Whitelist, is_internal};
use stockade_protocol::{DenialKind, DenialReason};

/// Whom a program wants to reach.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Destination {
    /// An address as it stands; never an IPv4 one in the clothes of IPv6.
    Address(IpAddr),
    /// A name, by the address that stands for it inside.
    Name(Name),
    /// An address of those that stand for names, but for none that was asked for.
    Unknown(Ipv4Addr),
}

/// A rule's yes to one destination and port. The address is still to be asked about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Permit {
    /// Which rule, counted from 0.
    pub rule: usize,
    /// Whom.
    pub to: Destination,
    /// TCP port.
    pub port: u16,
    /// What may be spoken.
    pub speech: Speech,
}

impl Permit {
    /// The name that what is spoken must name; none where any bytes may pass.
    pub fn spoken_name(&self) -> Option<&Name> {
        match (&self.to, self.speech) {
            (Destination::Name(name), Speech::Named) => Some(name),
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

/// One refusal, as it is answered and recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Denied {
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
    /// The protocol, where the kind does not say it.
    pub protocol: Option<String>,
    /// What a hello or a request named instead.
    pub said: Option<String>,
    /// The type of a DNS question.
    pub question: Option<String>,
    /// The line of a whitelist that would allow it.
    pub allow: Option<String>,
}

impl Denied {
    /// A refusal of which only kind and reason are known.
    pub fn new(kind: DenialKind, reason: DenialReason) -> Self {
        Denied { kind, reason, host: None, address: None, port: None, protocol: None, said: None, question: None, allow: None }
    }

    /// The refusal of what was spoken over an allowed connection. `said` is what it named.
    pub fn of_speech(permit: &Permit, address: IpAddr, kind: DenialKind, reason: DenialReason, said: Option<String>) -> Self {
        let allow = permit.host().and_then(|name| line(Rule::name(name.clone(), permit.port, Speech::Any)));
        Denied {
            host: permit.host().map(Name::to_string),
            address: Some(address),
            port: Some(permit.port),
            said,
            allow,
            ..Denied::new(kind, reason)
        }
    }

    /// The refusal of one connection more than there may be.
    pub fn of_number(to: Destination, port: u16) -> Self {
        let (host, address) = match to {
            Destination::Name(name) => (Some(name.to_string()), None),
            Destination::Address(address) => (None, Some(address)),
            Destination::Unknown(address) => (None, Some(IpAddr::V4(address))),
        };
        Denied { host, address, port: Some(port), ..Denied::new(DenialKind::Connect, DenialReason::Limit) }
    }
}

/// How a name is allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carried {
    /// A rule names it.
    Exactly,
    /// Only a wildcard covers it, so its first label is the program's choice.
    ByWildcard,
}

/// The whitelist of one run and the addresses of its host.
#[derive(Clone, Debug)]
pub struct Decider {
    whitelist: Whitelist,
    own: Vec<IpAddr>,
}

impl Decider {
    /// Decides by this whitelist on a host whose interfaces have these addresses.
    pub fn new(whitelist: Whitelist, own: Vec<IpAddr>) -> Self {
        let mut decider = Decider { whitelist, own: Vec::new() };
        decider.set_own_addresses(own);
        decider
    }

    /// The host's interfaces have other addresses now. For one address alone it is enough
    /// to name those of its [`views`] that are the host's.
    pub fn set_own_addresses(&mut self, own: Vec<IpAddr>) {
        self.own = own.into_iter().map(|address| address.to_canonical()).collect();
    }

    /// The whitelist.
    pub fn whitelist(&self) -> &Whitelist {
        &self.whitelist
    }

    /// A rule of a permit, in its one spelling.
    pub fn rule_text(&self, permit: &Permit) -> String {
        self.whitelist.rules().get(permit.rule).map(Rule::to_string).unwrap_or_default()
    }

    /// Whether some rule allows a name, on whatever port.
    pub fn carries(&self, name: &Name) -> Option<Carried> {
        let targets = || self.whitelist.rules().iter().map(|rule| &rule.target);
        if targets().any(|target| matches!(target, Target::Name(own) if own == name)) {
            return Some(Carried::Exactly);
        }
        targets().any(|target| covers(target, name)).then_some(Carried::ByWildcard)
    }

    /// Whether a connection may be tried.
    ///
    /// A rule that names the name comes before a wildcard; of two networks the smaller
    /// comes first.
    ///
    /// # Errors
    /// No rule allows it, or the address is closed.
    pub fn decide(&self, to: Destination, port: u16) -> Result<Permit, Box<Denied>> {
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
        let speech = self.whitelist.rules().get(rule).map_or(Speech::Named, |rule| rule.speech);
        let permit = Permit { rule, to, port, speech };
        match &permit.to {
            Destination::Address(address) if self.closed(address.to_canonical(), port) => {
                Err(Box::new(refusal(&permit.to, port, DenialReason::ForbiddenRange)))
            }
            _ => Ok(permit),
        }
    }

    /// Whether this very address may be dialled for a permit. To be asked by the process
    /// that dials, with the address that it dials.
    ///
    /// # Errors
    /// The address is closed, or is a private one behind a public name.
    pub fn decide_dial(&self, permit: &Permit, address: IpAddr) -> Result<(), Box<Denied>> {
        let address = address.to_canonical();
        let refuse = |reason| {
            let allow = line(Rule::address(address, permit.port));
            let host = permit.host().map(Name::to_string);
            Err(Box::new(Denied {
                host,
                address: Some(address),
                port: Some(permit.port),
                allow,
                ..Denied::new(DenialKind::Connect, reason)
            }))
        };
        let name = match &permit.to {
            Destination::Name(name) => name,
            // Whoever dials something else than was allowed has made a mistake.
            Destination::Address(allowed) if allowed.to_canonical() != address => return refuse(DenialReason::NoRule),
            Destination::Address(_) if self.closed(address, permit.port) => return refuse(DenialReason::ForbiddenRange),
            Destination::Address(_) => return Ok(()),
            Destination::Unknown(_) => return refuse(DenialReason::UnknownAddress),
        };
        if self.closed(address, permit.port) {
            return refuse(DenialReason::ResolvedToForbiddenRange);
        }
        let covered = || self.networks(permit.port).any(|(_, network)| network.contains(address));
        let exact = || self.carries(name) == Some(Carried::Exactly);
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

    /// Whether it counts whose an address is: not where a rule names this very address on
    /// this port, for then it was meant, the host's own too.
    pub fn asks_whose(&self, address: IpAddr, port: u16) -> bool {
        !self.networks(port).any(|(_, network)| network == Network::host(address))
    }

    /// Whether an address is closed on a port. What closes it is a block of addresses; it
    /// is open if some rule's network lies within that block, for then it was meant.
    fn closed(&self, address: IpAddr, port: u16) -> bool {
        if !self.asks_whose(address, port) {
            return false;
        }
        closed::views(address).any(|view| {
            let own = self.own.contains(&view).then(|| Network::host(view));
            closed::blocks(view)
                .chain(own)
                .any(|block| !self.networks(port).any(|(_, network)| network.contains(view) && network.is_within(&block)))
        })
    }
}

fn covers(target: &Target, name: &Name) -> bool {
    matches!(target, Target::Below(base) if name.parent() == Some(base.as_str()))
}

fn refusal(to: &Destination, port: u16, reason: DenialReason) -> Denied {
    let (host, address, rule) = match to {
        Destination::Name(name) => (Some(name.to_string()), None, Some(Rule::name(name.clone(), port, Speech::Named))),
        Destination::Address(address) => (None, Some(*address), Some(Rule::address(address.to_canonical(), port))),
        Destination::Unknown(address) => (None, Some(IpAddr::V4(*address)), None),
    };
    Denied { host, address, port: Some(port), allow: rule.and_then(line), ..Denied::new(DenialKind::Connect, reason) }
}

/// The refusal of a name; `allow` guesses at the port.
pub(crate) fn name_refusal(name: &Name, reason: DenialReason) -> Denied {
    let rule = Rule::name(name.clone(), 443, Speech::Named);
    let allow = matches!(reason, DenialReason::NoRule | DenialReason::WildcardLabel | DenialReason::WildcardLimit).then(|| line(rule));
    Denied { host: Some(name.to_string()), allow: allow.flatten(), ..Denied::new(DenialKind::Dns, reason) }
}

/// An address and every IPv4 address that a translator or a tunnel would take it for: all
/// of them have to be open.
pub fn views(address: IpAddr) -> impl Iterator<Item = IpAddr> {
    closed::views(address)
}

/// A rule as a line, if a policy would take it.
fn line(rule: Rule) -> Option<String> {
    let text = rule.to_string();
    text.parse::<Rule>().is_ok().then_some(text)
}

#[cfg(test)]
mod tests;
