//! Who may be reached beyond another whitelist: name by name, port by port, network by
//! network, as the gate would decide.

use std::{collections::BTreeSet, net::IpAddr, ops::RangeInclusive};

use super::{Area, Difference};
use crate::egress::{CLOSED, LONGEST_WILDCARD_LABEL, Name, Network, Rule, Speech, Target, Whitelist, is_internal};

const KEY: &str = "[egress] whitelist";

/// Rules times ranges of ports that are gone through for one rule; more is no whitelist that
/// anybody reads, and would take long.
const MOST_STEPS: usize = 1 << 16;

pub(super) fn beyond(ceiling: &Whitelist, whitelist: &Whitelist, out: &mut Vec<Difference>) {
    if ceiling == whitelist {
        return;
    }
    let found = Found::new(ceiling, whitelist);
    let mut add = |items: Vec<String>, says: &str, follows: String, certain: bool| {
        if !items.is_empty() {
            let difference = Difference::new(Area::Egress, KEY, says).items(items).follows(follows);
            out.push(if certain { difference } else { difference.undecided() });
        }
    };
    let to = |items: &[String]| items.join(", ");
    let follows = format!("code can send anything that it reads to {}", to(&found.reached));
    add(found.reached, "reach these peers", follows, true);
    let follows = format!("what passes to {} need no longer be TLS or HTTP that names it", to(&found.spoken));
    add(found.spoken, "speak anything with these peers", follows, true);
    let follows = String::from(
        "these are loopback, link-local, metadata, multicast or reserved addresses: code can ask a cloud for its credentials where one answers there",
    );
    add(found.closed, "reach these addresses, which stay closed unless a rule lies within them", follows, true);
    let follows = String::from("should one of these be an address of the host itself, code can reach the host's own services there");
    add(found.single, "reach these single addresses even where the host itself has them", follows, false);
    let follows = String::from("such a name may resolve to a private address, which it may not under the other policy's wildcard");
    add(found.internal, "reach these names inside private networks", follows, true);
    let follows = String::from("there are too many rules for one peer to be gone through");
    add(found.unread, "reach these peers, as far as can be told", follows, false);
}

/// What was found, as rules.
#[derive(Default)]
struct Found {
    reached: Vec<String>,
    spoken: Vec<String>,
    closed: Vec<String>,
    single: Vec<String>,
    internal: Vec<String>,
    unread: Vec<String>,
}

impl Found {
    fn new(ceiling: &Whitelist, whitelist: &Whitelist) -> Self {
        let mut found = Found::default();
        let mut names = BTreeSet::new();
        for rule in ceiling.rules().iter().chain(whitelist.rules()) {
            match &rule.target {
                Target::Name(name) => drop(names.insert((name.clone(), false))),
                Target::Below(name) => drop(names.insert((name.clone(), true))),
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

    /// One name, or whatever stands below one and has no rule of its own.
    fn name(&mut self, ceiling: &Whitelist, whitelist: &Whitelist, name: &Name, below: bool) {
        let concerns = |rule: &&Rule| match &rule.target {
            Target::Name(own) => !below && own == name,
            Target::Below(base) => {
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
        let (mut reached, mut spoken, mut internal) = (Vec::new(), Vec::new(), Vec::new());
        let long = !below && name.labels().next().is_some_and(|label| label.len() > LONGEST_WILDCARD_LABEL);
        let star = if below { "*." } else { "" };
        let ranges = intervals(above.iter().chain(&here));
        if ranges.len() * (above.len() + here.len()) > MOST_STEPS {
            self.unread.push(format!("{star}{name}"));
            return;
        }
        for range in ranges {
            let port = *range.start();
            let Some((speech, exactly)) = decide(&here, port) else { continue };
            match decide(&above, port) {
                None => reached.push(range),
                Some((_, false)) if exactly && long => reached.push(range),
                Some((other, by_name)) => {
                    if speech > other {
                        spoken.push(range.clone());
                    }
                    if exactly && !by_name && is_internal(name) {
                        internal.push(range);
                    }
                }
            }
        }
        for (list, ranges) in [(&mut self.reached, reached), (&mut self.spoken, spoken), (&mut self.internal, internal)] {
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
        if ranges.len() * relevant.len() > MOST_STEPS {
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
            let meant = |block: &&Network| {
                let within: Vec<Network> = above.iter().copied().filter(|other| other.is_within(block)).collect();
                covered(network, &within)
            };
            if is_host && above.contains(&network) {
                // The same address by itself: nothing is closed to either.
            } else if !CLOSED.iter().filter(|block| network.is_within(block)).all(|block| meant(&block)) {
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

/// What may be spoken on a port, and whether a rule names the name: such a rule comes
/// before a wildcard.
fn decide(rules: &[&Rule], port: u16) -> Option<(Speech, bool)> {
    let find = |exactly: bool| {
        let found = rules.iter().find(|rule| rule.ports.contains(port) && matches!(rule.target, Target::Name(_)) == exactly);
        found.map(|rule| (rule.speech, exactly))
    };
    find(true).or_else(|| find(false))
}

/// Whether every address of a network lies in one of these.
fn covered(network: Network, by: &[Network]) -> bool {
    if by.iter().any(|other| network.is_within(other)) {
        return true;
    }
    // Halved only where something lies inside, so at most once for each bit of each.
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

/// The ports of all rules, cut wherever one of them begins or ends.
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

/// Ranges of ports as a rule writes them; those that touch become one.
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
