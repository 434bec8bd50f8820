//! A connection before it is established: its SYN is held until its peer has been reached.
//!
//! It decides nothing itself: `decide` is asked for the destination and for each address.

use std::{
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant},
};

use rustix::{fd::OwnedFd, io::Errno};
use stockade_policy::whitelist::views;

use super::{
    DNS_PORT, GateService, Id, Slot,
    lookups::{Addresses, LookupStart},
    slots::token,
};
use crate::{
    decide::{Destination, Permit},
    dial::{Dial, Dialled},
    packet::{Key, Syn, Unreachable},
    relay::Side,
    resolve::ResolveError,
    route::RouteKind,
};

/// A released SYN without a connection is forgotten after this time.
const ACCEPT_PATIENCE: Duration = Duration::from_secs(5);
/// The first interval after which the program's kernel repeats a SYN (TCP_TIMEOUT_INIT), and the
/// longest (TCP_RTO_MAX).
const SYN_INTERVAL: Duration = Duration::from_secs(1);
const MAX_SYN_INTERVAL: Duration = Duration::from_secs(120);
/// What a repeated SYN may be late beyond its interval.
const SYN_SLACK: Duration = Duration::from_millis(500);

/// A connection whose SYN is held.
pub(super) struct PendingConnect {
    held: HeldSyn,
    pub(super) stage: Stage,
}

/// A SYN and the times at which the program's kernel sent it.
pub(super) struct HeldSyn {
    syn: Syn,
    first: Instant,
    last: Instant,
    interval: Duration,
}

impl HeldSyn {
    fn new(syn: Syn, now: Instant) -> Self {
        HeldSyn { syn, first: now, last: now, interval: SYN_INTERVAL }
    }

    /// It was sent again.
    fn repeat(&mut self, syn: Syn, now: Instant) {
        self.interval = now.duration_since(self.last).clamp(SYN_INTERVAL, MAX_SYN_INTERVAL);
        (self.syn, self.last) = (syn, now);
    }

    /// It is overdue: the program has closed the socket, or its kernel has given up. An
    /// interval is at most twice the one before, and a timer of the kernel at most an eighth
    /// late. If the SYN does come again, it is held as a new one.
    fn is_abandoned(&self, now: Instant) -> bool {
        now.duration_since(self.last) > self.interval * 5 / 2 + SYN_SLACK
    }
}

pub(super) enum Stage {
    /// Its name is looked up. No address so far may be dialled.
    Resolving(Permit, Option<NotDialled>),
    Dialling(Permit, Dial),
    /// The SYN was released; its connection is expected.
    Reached(Option<Purpose>, Instant),
    /// The peer did not answer: the program gets no answer either, as long as it asks.
    Silent,
}

/// Why no address was dialled.
pub(super) enum NotDialled {
    Denied,
    NoRoute(IpAddr, Errno),
}

/// The purpose of an expected connection.
pub(super) enum Purpose {
    Peer { socket: OwnedFd, permit: Permit, address: IpAddr },
    Names,
}

impl PendingConnect {
    pub(super) fn key(&self) -> Key {
        self.held.syn.key()
    }

    /// Since when it waits for its peer's name or answer.
    fn waits_since(&self) -> Option<Instant> {
        match self.stage {
            Stage::Resolving(..) | Stage::Dialling(..) | Stage::Silent => Some(self.held.first),
            Stage::Reached(..) => None,
        }
    }

    /// The purpose of a connection that was just accepted.
    pub(super) fn take_reached(&mut self) -> Option<Purpose> {
        match &mut self.stage {
            Stage::Reached(purpose, _) => purpose.take(),
            _ => None,
        }
    }
}

impl GateService {
    /// A program wants to connect.
    pub(super) fn hold(&mut self, syn: Syn) {
        let key = syn.key();
        if let Some((id, sequence)) = self.by_key.get_mut(&key) {
            let is_repeated = std::mem::replace(sequence, syn.sequence()) == syn.sequence();
            match self.slots.get_mut(*id) {
                // Repeated while it is held, or a new attempt with the same ends.
                Some(Slot::Pending(held)) => {
                    let released = matches!(held.stage, Stage::Reached(..)).then(|| syn.again());
                    held.held.repeat(syn, self.now);
                    if let Some(packet) = released {
                        self.inject(key.to, &packet);
                        self.accept(super::TURN);
                    }
                    return;
                }
                // It was sent before the connection that it asks for was accepted.
                Some(_) if is_repeated => return,
                _ => {}
            }
        }
        // The gate answers DNS queries to any address and forwards none.
        let permit = if key.to.port() == DNS_PORT {
            None
        } else {
            let to = self.names.destination(key.to.ip());
            match self.decider.decide(to, key.to.port()) {
                Ok(permit) => Some(permit),
                Err(denied) => {
                    self.deny(&denied);
                    return self.inject(key.from, &syn.reset());
                }
            }
        };
        let Some(id) = self.slots.reserve().or_else(|| self.displace()) else {
            self.deny_by_number(key.to.ip(), key.to.port());
            return self.inject(key.from, &syn.reset());
        };
        // An older connection with the same ends continues without its key.
        self.by_key.insert(key, (id, syn.sequence()));
        let held = HeldSyn::new(syn, self.now);
        let Some(permit) = permit else { return self.release(id, held, Purpose::Names) };
        match &permit.to {
            Destination::Name(name) => {
                let name = name.clone();
                match self.look_up(id, &name) {
                    LookupStart::Known(addresses) => self.resolved(id, held, Stage::Resolving(permit, None), addresses),
                    LookupStart::Waits => self.keep(id, held, Stage::Resolving(permit, None)),
                    LookupStart::Refused => {
                        self.deny_by_number(key.to.ip(), key.to.port());
                        self.refuse(id, &held);
                    }
                }
            }
            Destination::Address(address) => {
                let addresses = Addresses::Last(vec![*address]);
                self.resolved(id, held, Stage::Resolving(permit, None), addresses);
            }
            // Never permitted.
            Destination::Unknown(_) => self.refuse(id, &held),
        }
    }

    /// Takes the place of the connection that has waited for its peer the longest, and answers
    /// its SYN. None: all places have connections whose peer has answered.
    fn displace(&mut self) -> Option<Id> {
        let id = self.slots.least_by(|slot| match slot {
            Slot::Pending(pending) => pending.waits_since(),
            _ => None,
        })?;
        let Some(Slot::Pending(pending)) = self.slots.take(id) else { return None };
        let key = pending.key();
        self.deny_by_number(key.to.ip(), key.to.port());
        self.inject(key.from, &pending.held.syn.unreachable(Unreachable::Host));
        self.unanswered(&pending.stage);
        self.forget(id, key);
        self.slots.reserve()
    }

    pub(super) fn advance_pending(&mut self, id: Id, pending: Box<PendingConnect>) {
        let PendingConnect { held, stage } = *pending;
        match stage {
            Stage::Dialling(permit, mut dial) => {
                let state = dial.advance(&mut self.spare, &self.poll, token(id, Side::Peer), self.now);
                self.dialled(id, held, permit, dial, state);
            }
            stage => self.keep(id, held, stage),
        }
    }

    pub(super) fn tick_pending(&mut self, id: Id) {
        let Some(Slot::Pending(pending)) = self.slots.take(id) else { return };
        let is_over = match &pending.stage {
            Stage::Reached(_, until) => self.now > *until,
            // A SYN may wait to be read.
            _ => pending.held.is_abandoned(self.heard),
        };
        if is_over {
            self.unanswered(&pending.stage);
            return self.forget(id, pending.key());
        }
        self.advance_pending(id, pending);
    }

    /// Enters a connection that ends before its peer was reached, or before the program took it.
    pub(super) fn unanswered(&mut self, stage: &Stage) {
        match stage {
            Stage::Resolving(permit, _) => self.fail(permit, None, "EAI_AGAIN"),
            Stage::Dialling(permit, dial) => self.fail(permit, dial.address().map(|address| address.ip()), "ETIMEDOUT"),
            Stage::Reached(Some(Purpose::Peer { permit, address, .. }), _) => self.fail(permit, Some(*address), "ECONNABORTED"),
            // It was entered when the dial ended.
            Stage::Silent | Stage::Reached(..) => {}
        }
    }

    fn keep(&mut self, id: Id, held: HeldSyn, stage: Stage) {
        self.slots.replace(id, Slot::Pending(Box::new(PendingConnect { held, stage })));
    }

    /// A connection learns more of its name's addresses, if it still waits for them.
    pub(super) fn told(&mut self, id: Id, addresses: Addresses) {
        match self.slots.get_mut(id) {
            Some(Slot::Pending(pending)) if matches!(pending.stage, Stage::Resolving(..) | Stage::Dialling(..)) => {}
            _ => return,
        }
        if let Some(Slot::Pending(pending)) = self.slots.take(id) {
            let PendingConnect { held, stage } = *pending;
            self.resolved(id, held, stage, addresses);
        }
    }

    fn resolved(&mut self, id: Id, held: HeldSyn, stage: Stage, addresses: Addresses) {
        let (addresses, are_all) = match addresses {
            Addresses::Some(addresses) => (addresses, false),
            Addresses::Last(addresses) => (addresses, true),
            Addresses::None(error) => return self.not_resolved(id, held, stage, error),
        };
        let token = token(id, Side::Peer);
        match stage {
            Stage::Resolving(permit, before) => {
                let (open, not_dialled) = self.judge(&permit, &addresses);
                let not_dialled = if matches!(before, Some(NotDialled::Denied)) { before } else { not_dialled.or(before) };
                if !open.is_empty() {
                    let (dial, state) = Dial::start(open, are_all, &mut self.spare, &self.poll, token, self.now);
                    return self.dialled(id, held, permit, dial, state);
                }
                match not_dialled {
                    not_dialled if !are_all => self.keep(id, held, Stage::Resolving(permit, not_dialled)),
                    Some(NotDialled::NoRoute(address, errno)) => self.not_reached(id, held, &permit, Some(address), errno),
                    Some(NotDialled::Denied) | None => self.refuse(id, &held),
                }
            }
            Stage::Dialling(permit, mut dial) => {
                let (open, _) = self.judge(&permit, &addresses);
                dial.add(open, are_all);
                let state = dial.advance(&mut self.spare, &self.poll, token, self.now);
                self.dialled(id, held, permit, dial, state);
            }
            stage => self.keep(id, held, stage),
        }
    }

    fn not_resolved(&mut self, id: Id, held: HeldSyn, stage: Stage, error: ResolveError) {
        let Stage::Resolving(permit, _) = stage else { return self.keep(id, held, stage) };
        let error = match error {
            ResolveError::NoSuchName | ResolveError::NoAddress => "ENOTFOUND",
            ResolveError::Failed | ResolveError::TimedOut => "EAI_AGAIN",
        };
        self.fail(&permit, None, error);
        self.inject(held.syn.key().from, &held.syn.unreachable(Unreachable::Host));
        self.forget(id, held.syn.key());
    }

    /// Those of `addresses` that may be dialled; and if that is not all, why not.
    fn judge(&mut self, permit: &Permit, addresses: &[IpAddr]) -> (Vec<SocketAddr>, Option<NotDialled>) {
        let mut open = Vec::new();
        let mut not_dialled = None;
        for address in addresses.iter().map(IpAddr::to_canonical) {
            // Where it does not matter, the dial reports a missing route.
            let own = if self.decider.asks_whose(address, permit.port) { self.own_views(address) } else { Ok(Vec::new()) };
            match own {
                Ok(own) => self.decider.set_own_addresses(own),
                Err(errno) => {
                    not_dialled.get_or_insert(NotDialled::NoRoute(address, errno));
                    continue;
                }
            }
            match self.decider.decide_dial(permit, address) {
                Ok(()) => open.push(SocketAddr::new(address, permit.port)),
                Err(denied) => {
                    not_dialled = Some(NotDialled::Denied);
                    self.deny(&denied);
                }
            }
        }
        self.decider.set_own_addresses(Vec::new());
        (open, not_dialled)
    }

    /// Which of this address and its views are the host's own now, by its routing. An address
    /// without a route is not the host's.
    fn own_views(&self, address: IpAddr) -> Result<Vec<IpAddr>, Errno> {
        let way = self.routes.route_to(address)?;
        let is_own =
            |view: &IpAddr| if *view == address { way == RouteKind::Local } else { self.routes.route_to(*view) == Ok(RouteKind::Local) };
        Ok(views(address).filter(is_own).collect())
    }

    fn dialled(&mut self, id: Id, held: HeldSyn, permit: Permit, dial: Dial, state: Dialled) {
        match state {
            Dialled::Waiting => self.keep(id, held, Stage::Dialling(permit, dial)),
            Dialled::Connected(socket, address) => self.release(id, held, Purpose::Peer { socket, permit, address: address.ip() }),
            Dialled::Failed(address, errno) => self.not_reached(id, held, &permit, address.map(|address| address.ip()), errno),
        }
    }

    /// Releases the SYN and accepts its connection, which exists once the packet is sent.
    fn release(&mut self, id: Id, held: HeldSyn, purpose: Purpose) {
        let again = held.syn.again();
        let to = held.syn.key().to;
        self.keep(id, held, Stage::Reached(Some(purpose), self.now + ACCEPT_PATIENCE));
        self.inject(to, &again);
        self.accept(1);
    }

    /// Answers the SYN with the result of the dial.
    fn not_reached(&mut self, id: Id, held: HeldSyn, permit: &Permit, address: Option<IpAddr>, errno: Errno) {
        self.fail(permit, address, name_of(errno));
        let HeldSyn { syn, .. } = &held;
        let from = syn.key().from;
        match errno {
            Errno::TIMEDOUT => return self.keep(id, held, Stage::Silent),
            Errno::NETUNREACH => self.inject(from, &syn.unreachable(Unreachable::Network)),
            Errno::HOSTUNREACH | Errno::ACCESS | Errno::PERM | Errno::HOSTDOWN => {
                self.inject(from, &syn.unreachable(Unreachable::Host));
            }
            _ => self.inject(from, &syn.reset()),
        }
        let key = syn.key();
        self.forget(id, key);
    }

    fn refuse(&mut self, id: Id, held: &HeldSyn) {
        self.inject(held.syn.key().from, &held.syn.reset());
        self.forget(id, held.syn.key());
    }

    fn fail(&mut self, permit: &Permit, address: Option<IpAddr>, error: &str) {
        let (rule, now) = (self.decider.rule_text(permit), self.elapsed_ms());
        self.record.failed(permit, &rule, address, error, now);
    }
}

fn name_of(errno: Errno) -> &'static str {
    match errno {
        Errno::CONNREFUSED => "ECONNREFUSED",
        Errno::CONNRESET => "ECONNRESET",
        Errno::TIMEDOUT => "ETIMEDOUT",
        Errno::NETUNREACH => "ENETUNREACH",
        Errno::HOSTUNREACH => "EHOSTUNREACH",
        Errno::ACCESS => "EACCES",
        Errno::PERM => "EPERM",
        Errno::MFILE => "EMFILE",
        Errno::ADDRNOTAVAIL => "EADDRNOTAVAIL",
        Errno::INVAL => "EINVAL",
        _ => "EIO",
    }
}
