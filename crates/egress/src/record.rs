//! The record of a run: events that differ only in time are one entry.
//!
//! Every list has a maximum length, and each kind of denial has its own share, so that a flood of
//! one kind does not hide another. Denials that meet an alert and those of closed addresses have
//! places of their own. What does not fit is counted. Alerts are compared with each denial when
//! it happens, whether the list has room for it or not. Decides nothing.

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr},
};

use stockade_policy::{
    alert::Alert,
    whitelist::{CLOSED, views},
};
use stockade_protocol::{DenialKind, DenialReason, EgressDenial, EgressFailure, EgressFlow, EgressMode, EgressReport};

use crate::decide::{PeerDenial, Permit, closed_block};

/// Entries of one list.
pub const MAX_ENTRIES: usize = 256;
/// Denials of one kind.
pub const MAX_ENTRIES_PER_KIND: usize = 96;
/// Places that only denials have which meet an alert.
pub const MAX_OF_ALERTS: usize = 32;
/// How many of them one alert has.
pub const MAX_OF_ONE_ALERT: usize = 8;
/// Places that each closed block has, and how many of them the ports of one address may take.
pub const MAX_OF_ONE_BLOCK: usize = 4;
const MAX_OF_ONE_ADDRESS: usize = 2;
/// Places that each address in [`METADATA`] has.
const MAX_OF_ONE_SERVICE: usize = 2;
/// Places of refusals by reason: the host's own addresses, and names that lead to closed ones.
const MAX_BY_REASON: usize = 8;
/// The sum of all these places. No kind of denial takes another's.
pub const MAX_NOTABLE: usize = MAX_OF_ALERTS + MAX_OF_ONE_BLOCK * CLOSED.len() + MAX_OF_ONE_SERVICE * METADATA.len() + MAX_BY_REASON;
/// The addresses of metadata services that lie in closed blocks with other addresses. One that is
/// a block of its own needs no more.
const METADATA: [IpAddr; 4] = [
    IpAddr::V4(Ipv4Addr::new(169, 254, 169, 254)),
    IpAddr::V4(Ipv4Addr::new(169, 254, 170, 2)),
    IpAddr::V4(Ipv4Addr::new(169, 254, 170, 23)),
    IpAddr::V4(Ipv4Addr::new(192, 0, 0, 192)),
];
/// Bytes of one text.
const MAX_TEXT_LEN: usize = 255;

/// The record of one run. Times are milliseconds since its start.
#[derive(Clone, Debug, Default)]
pub struct EgressRecord {
    report: EgressReport,
    flows: BTreeMap<FlowKey, usize>,
    denials: BTreeMap<DenialKey, usize>,
    failures: BTreeMap<FailureKey, usize>,
    kinds: BTreeMap<DenialKind, usize>,
    notable: BTreeMap<Notable, usize>,
    of_addresses: BTreeMap<IpAddr, usize>,
    alerts: Vec<WatchedAlert>,
}

/// An alert, and whether a denial has met it.
#[derive(Clone, Debug)]
struct WatchedAlert {
    alert: Alert,
    is_met: bool,
}

/// Why a denial has a place of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Notable {
    /// The first alert that it meets.
    Alert(usize),
    /// The metadata service at its address, or at one that it hides.
    Service(usize),
    /// The closed block of its address.
    Closed(usize),
    /// An address of the host itself, or one that a name must not lead to.
    ByReason,
}

type FlowKey = (usize, Option<String>, IpAddr, u16);
type FailureKey = (usize, Option<String>, Option<IpAddr>, u16, String);
type DenialKey = (DenialKind, DenialReason, Option<String>, Option<IpAddr>, Option<u16>, Option<String>);

/// One entry of the connections, to count bytes under.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowId(Option<usize>);

impl EgressRecord {
    /// An empty record. `backend` names the mechanism in the kernel. Only alerts for refused
    /// peers are met here.
    pub fn new(backend: &str, alerts: Vec<Alert>) -> Self {
        let report = EgressReport { mode: EgressMode::Gate, backend: Some(backend.to_owned()), ..EgressReport::default() };
        let alerts = alerts.into_iter().map(|alert| WatchedAlert { alert, is_met: false }).collect();
        EgressRecord { report, alerts, ..EgressRecord::default() }
    }

    /// A peer was reached. `rule` is the text of the permit's rule.
    pub fn connected(&mut self, permit: &Permit, rule: &str, address: IpAddr, now_ms: u64) -> FlowId {
        let host = permit.host().map(|name| short(name.as_str()));
        let key = (permit.rule, host.clone(), address, permit.port);
        let flows = &mut self.report.allowed;
        let index = self.flows.get(&key).copied().or_else(|| {
            (flows.len() < MAX_ENTRIES).then(|| {
                flows.push(EgressFlow {
                    rule: short(rule),
                    host,
                    addr: address.to_string(),
                    port: permit.port,
                    proto: String::from("tcp"),
                    first_ms: now_ms,
                    ..EgressFlow::default()
                });
                self.flows.insert(key, flows.len() - 1);
                flows.len() - 1
            })
        });
        if index.is_none() {
            self.omit();
        }
        let flows = &mut self.report.allowed;
        if let Some(flow) = index.and_then(|index| flows.get_mut(index)) {
            flow.connections += 1;
        }
        FlowId(index)
    }

    /// Counts bytes to and from the peer.
    pub fn carried(&mut self, flow: FlowId, out: u64, back: u64) {
        if let Some(flow) = self.flow(flow) {
            flow.bytes_out = flow.bytes_out.saturating_add(out);
            flow.bytes_in = flow.bytes_in.saturating_add(back);
        }
    }

    /// A ClientHello named this server.
    pub fn named(&mut self, flow: FlowId, server: &str) {
        if let Some(flow) = self.flow(flow) {
            flow.sni.get_or_insert_with(|| short(server));
        }
    }

    fn flow(&mut self, FlowId(index): FlowId) -> Option<&mut EgressFlow> {
        self.report.allowed.get_mut(index?)
    }

    /// Something was refused.
    pub fn denied(&mut self, denied: &PeerDenial, now_ms: u64) {
        let text = |text: &Option<String>| text.as_deref().map(short);
        let names = [text(&denied.host), text(&denied.said)];
        let mut first_met = None;
        for (index, watched) in self.alerts.iter_mut().enumerate() {
            if watched.alert.meets_peer(names.iter().flatten().map(String::as_str), denied.address) {
                watched.is_met = true;
                first_met.get_or_insert(index);
            }
        }
        // `said` and `qtype` are those of the first: the program chooses them.
        let key = (denied.kind, denied.reason, text(&denied.host), denied.address, denied.port, text(&denied.protocol));
        if let Some(entry) = self.denials.get(&key).and_then(|index| self.report.denied.get_mut(*index)) {
            entry.count += 1;
            // Another question for the same name may have a rule.
            entry.allow = entry.allow.take().or_else(|| denied.allow.clone());
            return;
        }
        if !self.has_room(denied, first_met) {
            return self.omit();
        }
        self.denials.insert(key, self.report.denied.len());
        self.report.denied.push(EgressDenial {
            kind: denied.kind,
            host: text(&denied.host),
            addr: denied.address.map(|address| address.to_string()),
            port: denied.port,
            proto: text(&denied.protocol),
            sni: text(&denied.said),
            qtype: text(&denied.question),
            reason: denied.reason,
            allow: denied.allow.clone(),
            line: None,
            count: 1,
            first_ms: now_ms,
        });
    }

    /// Takes a place for a denial, if there is one for it.
    fn has_room(&mut self, denied: &PeerDenial, first_met: Option<usize>) -> bool {
        use DenialReason::{ForbiddenRange, ResolvedToForbiddenRange, ResolvedToPrivateRange};
        let address = denied.address.map(|address| address.to_canonical());
        let service = address.and_then(|address| METADATA.iter().position(|service| views(address).any(|view| view == *service)));
        let is_by_reason = matches!(denied.reason, ForbiddenRange | ResolvedToForbiddenRange | ResolvedToPrivateRange);
        let places = [
            first_met.map(Notable::Alert),
            service.map(Notable::Service),
            address.and_then(closed_block).map(Notable::Closed),
            is_by_reason.then_some(Notable::ByReason),
        ];
        if places.into_iter().flatten().any(|notable| self.takes_notable(notable, address)) {
            return true;
        }
        let ordinary: usize = self.kinds.values().sum();
        let of_kind = self.kinds.entry(denied.kind).or_default();
        let has_room = ordinary < MAX_ENTRIES - MAX_NOTABLE && *of_kind < MAX_ENTRIES_PER_KIND;
        *of_kind += usize::from(has_room);
        has_room
    }

    /// Takes a place that is kept for this.
    fn takes_notable(&mut self, notable: Notable, address: Option<IpAddr>) -> bool {
        let of_alerts = || -> usize { self.notable.iter().filter(|(of, _)| matches!(of, Notable::Alert(_))).map(|(_, taken)| taken).sum() };
        let of_address = || address.and_then(|address| self.of_addresses.get(&address)).copied().unwrap_or_default();
        let (most, has_room) = match notable {
            Notable::Alert(_) => (MAX_OF_ONE_ALERT, of_alerts() < MAX_OF_ALERTS),
            Notable::Service(_) => (MAX_OF_ONE_SERVICE, true),
            Notable::Closed(_) => (MAX_OF_ONE_BLOCK, of_address() < MAX_OF_ONE_ADDRESS),
            Notable::ByReason => (MAX_BY_REASON, true),
        };
        let of_one = self.notable.entry(notable).or_default();
        if !has_room || *of_one >= most {
            return false;
        }
        *of_one += 1;
        if let (Notable::Closed(_), Some(address)) = (notable, address) {
            *self.of_addresses.entry(address).or_default() += 1;
        }
        true
    }

    /// Counts an event that no list has room for.
    fn omit(&mut self) {
        self.report.omitted = self.report.omitted.saturating_add(1);
        self.report.truncated = true;
    }

    /// The kernel refused packets without a report of each, so any alert may have been met.
    pub fn unseen(&mut self) {
        self.report.truncated = true;
        self.alerts.iter_mut().for_each(|watched| watched.is_met = true);
    }

    /// The alerts that were met.
    pub fn alerts_met(&self) -> Vec<String> {
        self.alerts.iter().filter(|watched| watched.is_met).map(|watched| watched.alert.to_string()).collect()
    }

    /// An allowed peer could not be reached. `error` is an errno's name, or `ENOTFOUND`.
    pub fn failed(&mut self, permit: &Permit, rule: &str, address: Option<IpAddr>, error: &str, now_ms: u64) {
        let host = permit.host().map(|name| short(name.as_str()));
        let key = (permit.rule, host.clone(), address, permit.port, error.to_owned());
        if let Some(entry) = self.failures.get(&key).and_then(|index| self.report.failed.get_mut(*index)) {
            entry.count += 1;
            return;
        }
        if self.report.failed.len() >= MAX_ENTRIES {
            return self.omit();
        }
        self.failures.insert(key, self.report.failed.len());
        self.report.failed.push(EgressFailure {
            rule: short(rule),
            host,
            addr: address.map(|address| address.to_string()),
            port: permit.port,
            error: error.to_owned(),
            count: 1,
            first_ms: now_ms,
        });
    }

    /// The kernel dropped so many events before they could be counted.
    pub fn lost(&mut self, events: u64) {
        self.report.audit_lost = self.report.audit_lost.saturating_add(events);
        self.unseen();
    }

    /// The report as it stands.
    pub fn report(&self) -> &EgressReport {
        &self.report
    }
}

fn short(text: &str) -> String {
    let end = (0..=text.len().min(MAX_TEXT_LEN)).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
    text[..end].to_owned()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use super::*;
    use crate::decide::{Decider, Destination};
    use stockade_policy::whitelist::{Name, Whitelist};

    fn permit() -> (Permit, &'static str) {
        let decider = Decider::new(Whitelist::new(vec!["pypi.org:443".parse().unwrap()]), Vec::new());
        (decider.decide(Destination::Name(Name::new("pypi.org").unwrap()), 443).unwrap(), "pypi.org:443")
    }

    fn ip(last: u16) -> IpAddr {
        IpAddr::from([10, 0, (last >> 8) as u8, last as u8])
    }

    fn denied(kind: DenialKind, last: u16) -> PeerDenial {
        PeerDenial { address: Some(ip(last)), port: Some(80), ..PeerDenial::new(kind, DenialReason::NoRule) }
    }

    #[test]
    fn connections_to_one_peer_are_one_entry() {
        let mut record = EgressRecord::new("nft-tproxy", Vec::new());
        let (permit, rule) = permit();
        let first = record.connected(&permit, rule, ip(1), 412);
        let second = record.connected(&permit, rule, ip(1), 500);
        let other = record.connected(&permit, rule, ip(2), 600);
        assert_eq!(first, second);
        record.carried(first, 100, 1000);
        record.carried(second, 20, 3000);
        record.named(other, "pypi.org");
        let report = record.report();
        assert_eq!(report.allowed.len(), 2);
        let flow = &report.allowed[0];
        assert_eq!((flow.connections, flow.bytes_out, flow.bytes_in, flow.first_ms), (2, 120, 4000, 412));
        assert_eq!((flow.rule.as_str(), flow.host.as_deref(), flow.sni.as_deref()), ("pypi.org:443", Some("pypi.org"), None));
        assert_eq!(report.allowed[1].sni.as_deref(), Some("pypi.org"));
        assert!(!report.truncated);
    }

    #[test]
    fn denials_that_differ_in_time_only_are_one_entry() {
        let mut record = EgressRecord::new("nft-tproxy", Vec::new());
        for now in 5..8 {
            record.denied(&denied(DenialKind::Connect, 1), now);
        }
        record.denied(&denied(DenialKind::Connect, 2), 9);
        record.denied(&PeerDenial { reason: DenialReason::ForbiddenRange, ..denied(DenialKind::Connect, 1) }, 9);
        let denials: Vec<_> = record.report().denied.iter().map(|denial| (denial.count, denial.first_ms)).collect();
        assert_eq!(denials, [(3, 5), (1, 9), (1, 9)]);
    }

    #[test]
    fn a_flood_of_one_kind_leaves_room_for_others_and_is_admitted() {
        let mut record = EgressRecord::new("nft-tproxy", Vec::new());
        for number in 0..10_000 {
            record.denied(&denied(DenialKind::Udp, number), 0);
        }
        assert_eq!(record.report().denied.len(), MAX_ENTRIES_PER_KIND);
        assert_eq!((record.report().truncated, record.report().omitted), (true, 10_000 - MAX_ENTRIES_PER_KIND as u64));
        record.denied(&denied(DenialKind::Connect, 7), 1);
        assert_eq!(record.report().denied.last().unwrap().kind, DenialKind::Connect);
        record.denied(&denied(DenialKind::Udp, 0), 2);
        assert_eq!(record.report().denied[0].count, 2);
        for kind in [DenialKind::Dns, DenialKind::Tls, DenialKind::Http, DenialKind::Packet] {
            (0..1000).for_each(|number| record.denied(&denied(kind, number), 0));
        }
        assert_eq!(record.report().denied.len(), MAX_ENTRIES - MAX_NOTABLE);
    }

    #[test]
    fn no_flood_silences_an_alert_or_hides_a_closed_address() {
        let alerts =
            ["egress:203.0.113.*", "egress:evil.example", "egress:192.0.2.1"].map(|text| Alert::try_from(text.to_owned()).unwrap());
        let mut record = EgressRecord::new("nft-tproxy", alerts.to_vec());
        let connect = |address: [u8; 4]| PeerDenial { address: Some(address.into()), ..denied(DenialKind::Connect, 1) };
        for number in 0..5000 {
            record.denied(&denied(DenialKind::Connect, number), 0);
            record.denied(&PeerDenial { host: Some(format!("n{number}.example")), ..denied(DenialKind::Dns, 1) }, 0);
            record.denied(&connect([127, 1, (number >> 8) as u8, number as u8]), 0);
        }
        assert_eq!(record.alerts_met(), Vec::<String>::new(), "the control");
        record.denied(&connect([203, 0, 113, 9]), 1);
        record.denied(&PeerDenial { host: Some("evil.example".to_owned()), address: None, ..denied(DenialKind::Dns, 1) }, 1);
        record.denied(&connect([169, 254, 169, 254]), 1);
        assert_eq!(record.alerts_met(), ["egress:203.0.113.*", "egress:evil.example"]);
        let last: Vec<_> =
            record.report().denied.iter().rev().take(3).map(|entry| entry.host.clone().or(entry.addr.clone()).unwrap()).collect();
        assert_eq!(last, ["169.254.169.254", "evil.example", "203.0.113.9"]);
        // Where the alert's own places are taken, it is met all the same.
        for number in 0..200 {
            record.denied(&connect([203, 0, 113, number]), 1);
        }
        assert!(record.report().denied.len() <= MAX_ENTRIES);
        let counted: u64 = record.report().denied.iter().map(|entry| entry.count).sum();
        assert_eq!(counted + record.report().omitted, 15_203);
    }

    #[test]
    fn no_flood_of_closed_addresses_hides_the_metadata_service_or_another_block() {
        let connect =
            |address: IpAddr, port: u16| PeerDenial { address: Some(address), port: Some(port), ..denied(DenialKind::Connect, 1) };
        let mut record = EgressRecord::new("nft-tproxy", Vec::new());
        // Every place that any denial may take is taken, but those of the last two.
        for number in 0..=255 {
            record.denied(&connect(IpAddr::from([203, 0, 113, number]), 80), 0);
            for port in 1..9 {
                for start in [[169, 254, 1], [0, 1, 1], [192, 0, 0], [224, 1, 1], [240, 1, 1]] {
                    record.denied(&connect(IpAddr::from([start[0], start[1], start[2], number.min(100)]), port), 0);
                }
                let last = u16::from(number);
                record.denied(&connect(IpAddr::from([0xfe80, 0, 0, 0, 0, 0, 0, last]), port), 0);
                record.denied(&connect(IpAddr::from([0xff02, 0, 0, 0, 0, 0, 0, last]), port), 0);
                record.denied(&connect(IpAddr::from([168, 63, 129, 16]), port), 0);
                record.denied(&connect(IpAddr::from([100, 100, 100, 200]), port), 0);
            }
        }
        let omitted = record.report().omitted;
        for address in ["169.254.169.254", "127.0.0.1", "fd00:ec2::254"] {
            record.denied(&connect(address.parse().unwrap(), 80), 1);
            assert_eq!(record.report().denied.last().unwrap().addr.as_deref(), Some(address));
        }
        assert_eq!(record.report().omitted, omitted);
        // Ports of one address leave room for another of its block.
        let mut record = EgressRecord::new("nft-tproxy", Vec::new());
        (0..200).for_each(|number| record.denied(&denied(DenialKind::Connect, number), 0));
        (1..200).for_each(|port| record.denied(&connect(IpAddr::from([127, 0, 0, 1]), port), 0));
        record.denied(&connect(IpAddr::from([127, 0, 0, 2]), 80), 1);
        assert_eq!(record.report().denied.last().unwrap().addr.as_deref(), Some("127.0.0.2"));
        assert!(record.report().denied.len() <= MAX_ENTRIES);
    }

    #[test]
    fn a_name_that_was_said_and_a_hidden_address_meet_an_alert() {
        let alerts = ["egress:evil.example", "egress:169.254.*"].map(|text| Alert::try_from(text.to_owned()).unwrap());
        let mut record = EgressRecord::new("nft-tproxy", alerts.to_vec());
        record.denied(&PeerDenial { said: Some("a.example".to_owned()), ..denied(DenialKind::Tls, 1) }, 0);
        assert_eq!(record.alerts_met(), Vec::<String>::new(), "the control");
        record.denied(&PeerDenial { said: Some("evil.example".to_owned()), ..denied(DenialKind::Tls, 1) }, 0);
        assert_eq!(record.alerts_met(), ["egress:evil.example"], "the control's entry is the same but for what was said");
        record.denied(&PeerDenial { address: "64:ff9b::a9fe:a9fe".parse().ok(), ..denied(DenialKind::Connect, 1) }, 0);
        assert_eq!(record.alerts_met(), ["egress:evil.example", "egress:169.254.*"]);
    }

    #[test]
    fn what_the_kernel_refused_unseen_may_have_met_every_alert() {
        let alert = Alert::try_from(String::from("egress:203.0.113.*")).unwrap();
        for act in [EgressRecord::unseen, |record: &mut EgressRecord| record.lost(1)] {
            let mut record = EgressRecord::new("nft-tproxy", vec![alert.clone()]);
            act(&mut record);
            assert_eq!((record.alerts_met(), record.report().truncated), (vec![alert.to_string()], true));
        }
    }

    #[test]
    fn connections_and_failures_beyond_the_largest_number_are_admitted() {
        let mut record = EgressRecord::new("nft-tproxy", Vec::new());
        let (permit, rule) = permit();
        let flows: Vec<FlowId> = (0..300).map(|number| record.connected(&permit, rule, ip(number), 0)).collect();
        record.carried(flows[299], 5, 5);
        assert_eq!((record.report().allowed.len(), record.report().truncated), (MAX_ENTRIES, true));
        let mut record = EgressRecord::new("nft-tproxy", Vec::new());
        for number in 0..300 {
            record.failed(&permit, rule, Some(ip(number)), "ECONNREFUSED", 3);
            record.failed(&permit, rule, Some(ip(number)), "ECONNREFUSED", 4);
        }
        let report = record.report();
        assert_eq!((report.failed.len(), report.truncated, report.failed[0].count, report.failed[0].first_ms), (MAX_ENTRIES, true, 2, 3));
    }

    #[test]
    fn texts_are_cut_where_a_character_ends() {
        let mut record = EgressRecord::new("nft-tproxy", Vec::new());
        record.denied(&PeerDenial { host: Some("ü".repeat(500)), ..denied(DenialKind::Dns, 1) }, 0);
        assert_eq!(record.report().denied[0].host.as_deref().map(str::len), Some(254));
    }
}
