//! Peers that a whitelist allows and another does not: name by name, port by port, network
//! by network, as the gate decides. It does not know the host's own addresses.

use std::{collections::BTreeSet, net::IpAddr, ops::RangeInclusive};

use stockade_policy::whitelist::{
    CLOSED, MAX_WILDCARD_LABEL_LEN, Name, Network, Protocol, Rule, Target, Whitelist, is_closed, is_internal,
};

use super::{Area, Difference};

const KEY: &str = "[egress] whitelist";

/// Rules times port ranges that are compared for one rule; a bound on the time.
const MAX_STEPS: usize = 1 << 16;

pub(super) fn loosened(ceiling: &Whitelist, whitelist: &Whitelist, out: &mut Vec<Difference>) {
    if ceiling == whitelist {
        return;
    }
    let found = PeerChanges::new(ceiling, whitelist);
    let mut add = |items: Vec<String>, text: &str, consequence: &str, certain: bool| {
        if !items.is_empty() {
            let difference = Difference::new(Area::Egress, KEY, text).items(items).consequence(consequence);
            out.push(if certain { difference } else { difference.undecided() });
        }
    };
    let reached = format!("code can send anything that it reads to {}", found.reached.join(", "));
    add(found.reached, "peers", &reached, true);
    add(found.any_protocol, "peers with any protocol", "traffic to them need not be TLS or HTTP that names the peer", true);
    let closed =
        "loopback, link-local, metadata, multicast or reserved addresses; a cloud's metadata service may hand out credentials there";
    add(found.closed, "addresses that are closed unless a rule is within them", closed, true);
    let single = "if one is an address of the host, code can reach the host's services there";
    add(found.single, "single addresses, also if the host has them", single, false);
    let internal = "such a name may resolve to a private address; under the other policy's wildcard it may not";
    add(found.internal, "names in private networks", internal, true);
    add(found.unread, "peers that were not compared", "too many rules apply to one peer", false);
}

/// Loosened peers, written as rules.
#[derive(Default)]
struct PeerChanges {
    reached: Vec<String>,
    any_protocol: Vec<String>,
    /// Addresses in blocks that stay closed unless a rule lies within them.
    closed: Vec<String>,
    /// Single addresses within an allowed network.
    single: Vec<String>,
    internal: Vec<String>,
    unread: Vec<String>,
}

impl PeerChanges {
    fn new(ceiling: &Whitelist, whitelist: &Whitelist) -> Self {
        let mut found = PeerChanges::default();
        let mut names = BTreeSet::new();
        for rule in ceiling.rules().iter().chain(whitelist.rules()) {
            match &rule.target {
                Target::Name(name) => drop(names.insert((name.clone(), false))),
                Target::Wildcard(name) => drop(names.insert((name.clone(), true))),
                Target::Network(_) => {}
            }
        }
        for (name, below) in &names {
            found.name(ceiling, whitelist, name, *below);
        }
        for rule in whitelist.rules() {
            if let Target::Network(network) = rule.target
                && !ceiling.rules().contains(rule)
            {
                found.network(ceiling, rule, network);
            }
        }
        found
    }

    /// One name, or all names below one that have no rule.
    fn name(&mut self, ceiling: &Whitelist, whitelist: &Whitelist, name: &Name, below: bool) {
        let concerns = |rule: &&Rule| match &rule.target {
            Target::Name(own) => !below && own == name,
            Target::Wildcard(base) => {
                if below {
                    base == name
                } else {
                    name.parent() == Some(base.as_str())
                }
            }
            Target::Network(_) => false,
        };
        let (above, here): (Vec<&Rule>, Vec<&Rule>) =
            (ceiling.rules().iter().filter(concerns).collect(), whitelist.rules().iter().filter(concerns).collect());
        let (mut reached, mut any_protocol, mut internal) = (Vec::new(), Vec::new(), Vec::new());
        let long = !below && name.labels().next().is_some_and(|label| label.len() > MAX_WILDCARD_LABEL_LEN);
        let star = if below { "*." } else { "" };
        let ranges = intervals(above.iter().chain(&here));
        if ranges.len() * (above.len() + here.len()) > MAX_STEPS {
            self.unread.push(format!("{star}{name}"));
            return;
        }
        for range in ranges {
            let port = *range.start();
            let Some((protocol, exactly)) = decide(&here, port) else { continue };
            match decide(&above, port) {
                None => reached.push(range),
                Some((_, false)) if exactly && long => reached.push(range),
                Some((other, by_name)) => {
                    if protocol > other {
                        any_protocol.push(range.clone());
                    }
                    if exactly && !by_name && is_internal(name) {
                        internal.push(range);
                    }
                }
            }
        }
        for (list, ranges) in [(&mut self.reached, reached), (&mut self.any_protocol, any_protocol), (&mut self.internal, internal)] {
            if !ranges.is_empty() {
                list.push(format!("{star}{name}:{}", ports(&ranges)));
            }
        }
    }

    fn network(&mut self, ceiling: &Whitelist, rule: &Rule, network: Network) {
        let relevant: Vec<&Rule> = ceiling
            .rules()
            .iter()
            .filter(|other| matches!(other.target, Target::Network(other) if other.is_within(&network) || network.is_within(&other)))
            .collect();
        let (mut reached, mut closed, mut single) = (Vec::new(), Vec::new(), Vec::new());
        let ranges = intervals(relevant.iter().chain([&rule]));
        if ranges.len() * relevant.len() > MAX_STEPS {
            self.unread.push(rule.to_string());
            return;
        }
        for range in ranges {
            let port = *range.start();
            if !rule.ports.contains(port) {
                continue;
            }
            let above: Vec<Network> =
                relevant.iter().filter(|rule| rule.ports.contains(port)).filter_map(|rule| network_of(rule)).collect();
            let is_host = network == Network::host(network.address());
            let opened = |block: &&Network| {
                let within: Vec<Network> = above.iter().copied().filter(|other| other.is_within(block)).collect();
                covered(network, &within)
            };
            if is_host && above.contains(&network) {
                // The ceiling has a rule for this address: nothing is closed to either.
            } else if !CLOSED.iter().filter(|block| network.is_within(block)).all(|block| opened(&block)) {
                closed.push(range);
            } else if is_host && is_closed(network.address()) && !CLOSED.iter().any(|block| network.is_within(block)) {
                // It hides an IPv4 address that is closed where only a network allows it.
                closed.push(range);
            } else if !covered(network, &above) {
                reached.push(range);
            } else if is_host {
                single.push(range);
            }
        }
        for (list, ranges) in [(&mut self.reached, reached), (&mut self.closed, closed), (&mut self.single, single)] {
            if !ranges.is_empty() {
                list.push(format!("{}:{}", rule.target, ports(&ranges)));
            }
        }
    }
}

fn network_of(rule: &Rule) -> Option<Network> {
    match rule.target {
        Target::Network(network) => Some(network),
        _ => None,
    }
}

/// The protocol that a port allows, and whether a rule has the whole name: such a rule
/// precedes a wildcard.
fn decide(rules: &[&Rule], port: u16) -> Option<(Protocol, bool)> {
    let find = |exactly: bool| {
        let found = rules.iter().find(|rule| rule.ports.contains(port) && matches!(rule.target, Target::Name(_)) == exactly);
        found.map(|rule| (rule.protocol, exactly))
    };
    find(true).or_else(|| find(false))
}

/// Whether each address of a network lies in one of these.
fn covered(network: Network, by: &[Network]) -> bool {
    if by.iter().any(|other| network.is_within(other)) {
        return true;
    }
    // Halved only where one lies inside, so at most once for each bit of each prefix.
    let inside: Vec<Network> = by.iter().copied().filter(|other| other.is_within(&network)).collect();
    !inside.is_empty() && halves(network).is_some_and(|halves| halves.into_iter().all(|half| covered(half, &inside)))
}

fn halves(network: Network) -> Option<[Network; 2]> {
    let prefix = network.prefix() + 1;
    let last = match network.last() {
        IpAddr::V4(last) => Network::around(IpAddr::V4(last), prefix),
        IpAddr::V6(last) => Network::around(IpAddr::V6(last), prefix),
    };
    Some([Network::around(network.address(), prefix)?, last?])
}

/// The ports of all rules, cut where a range begins or ends.
fn intervals<'r>(rules: impl Iterator<Item = &'r &'r Rule>) -> Vec<RangeInclusive<u16>> {
    let mut cuts = BTreeSet::new();
    for range in rules.flat_map(|rule| rule.ports.ranges()) {
        cuts.insert(u32::from(*range.start()));
        cuts.insert(u32::from(*range.end()) + 1);
    }
    let cuts: Vec<u32> = cuts.into_iter().collect();
    let range = |pair: &[u32]| Some(u16::try_from(*pair.first()?).ok()?..=u16::try_from(pair.get(1)?.checked_sub(1)?).ok()?);
    cuts.windows(2).filter_map(range).collect()
}

/// Port ranges as a rule writes them; adjacent ranges become one.
fn ports(ranges: &[RangeInclusive<u16>]) -> String {
    let mut joined: Vec<(u16, u16)> = Vec::new();
    for range in ranges {
        match joined.last_mut() {
            Some((_, end)) if end.checked_add(1) == Some(*range.start()) => *end = *range.end(),
            _ => joined.push((*range.start(), *range.end())),
        }
    }
    let words: Vec<String> =
        joined.iter().map(|(first, last)| if first == last { first.to_string() } else { format!("{first}-{last}") }).collect();
    words.join(",")
}
