//! A connection before it is established: its SYN is held until its peer has been reached.
//!
//! It decides nothing itself: `decide` is asked for the destination and for each address.

use std::{
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant},
};

use rustix::{fd::OwnedFd, io::Errno};

use super::{DNS_PORT, GateService, Id, Slot, slots::token};
use crate::{
    decide::{self, Destination, Permit},
    dial::{Dial, Dialled},
    packet::{Key, Syn, Unreachable},
    relay::Side,
    resolve::{Lookup, Progress, ResolveError},
    route::RouteKind,
};

/// A released SYN without a connection is forgotten after this time.
const ACCEPT_PATIENCE: Duration = Duration::from_secs(5);
/// How long an unanswered SYN is remembered: longer than any SYN is repeated.
const SILENCE: Duration = Duration::from_secs(150);

/// A connection whose SYN is held.
pub(super) struct PendingConnect {
    syn: Syn,
    pub(super) stage: Stage,
}

pub(super) enum Stage {
    Resolving(Permit, Lookup),
    Dialling(Permit, Dial),
    /// The SYN was released; its connection is expected.
    Reached(Option<Purpose>, Instant),
    /// The peer did not answer: the program gets no answer either.
    Silent(Instant),
}

/// The purpose of an expected connection.
pub(super) enum Purpose {
    Peer { socket: OwnedFd, permit: Permit, address: IpAddr },
    Names,
}

impl PendingConnect {
    pub(super) fn key(&self) -> Key {
        self.syn.key()
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
        if let Some(Slot::Pending(held)) = self.by_key.get(&key).and_then(|id| self.slots.get_mut(*id)) {
            // Repeated while it is held, or a new attempt with the same ends.
            let released = matches!(held.stage, Stage::Reached(..)).then(|| syn.again());
            held.syn = syn;
            if let Some(packet) = released {
                self.inject(key.to, &packet);
                self.accept(super::TURN);
            }
            return;
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
        let Some(id) = self.slots.reserve() else {
            self.deny_by_number(key.to.ip(), key.to.port());
            return self.inject(key.from, &syn.reset());
        };
        // An older connection with the same ends continues without its key.
        self.by_key.insert(key, id);
        let Some(permit) = permit else { return self.release(id, syn, Purpose::Names) };
        match &permit.to {
            Destination::Name(name) => {
                let name = name.clone();
                if !self.lookups.takes_one(self.elapsed_ms()) {
                    self.deny_by_number(key.to.ip(), key.to.port());
                    return self.refuse(id, &syn);
                }
                let (lookup, progress) = Lookup::start(&self.resolver, name.as_str(), &self.poll, token(id, Side::Peer), self.now);
                self.resolved(id, syn, permit, lookup, progress);
            }
            Destination::Address(address) => {
                let address = *address;
                self.dial(id, syn, permit, &[address]);
            }
            // Never permitted.
            Destination::Unknown(_) => self.refuse(id, &syn),
        }
    }

    pub(super) fn advance_pending(&mut self, id: Id, held: Box<PendingConnect>) {
        let PendingConnect { syn, stage } = *held;
        let token = token(id, Side::Peer);
        match stage {
            Stage::Resolving(permit, mut lookup) => {
                let progress = lookup.progress(&self.resolver, &self.poll, token, self.now);
                self.resolved(id, syn, permit, lookup, progress);
            }
            Stage::Dialling(permit, mut dial) => {
                let state = dial.advance(&mut self.spare, &self.poll, token, self.now);
                self.dialled(id, syn, permit, dial, state);
            }
            stage => self.slots.replace(id, Slot::Pending(Box::new(PendingConnect { syn, stage }))),
        }
    }

    pub(super) fn tick_pending(&mut self, id: Id) {
        let Some(Slot::Pending(held)) = self.slots.take(id) else { return };
        let PendingConnect { syn, stage } = *held;
        let token = token(id, Side::Peer);
        match stage {
            Stage::Resolving(permit, mut lookup) => {
                let progress = lookup.tick(&self.resolver, &self.poll, token, self.now);
                self.resolved(id, syn, permit, lookup, progress);
            }
            Stage::Dialling(permit, mut dial) => {
                let state = dial.advance(&mut self.spare, &self.poll, token, self.now);
                self.dialled(id, syn, permit, dial, state);
            }
            Stage::Reached(_, until) | Stage::Silent(until) if self.now > until => self.forget(id, syn.key()),
            stage => self.slots.replace(id, Slot::Pending(Box::new(PendingConnect { syn, stage }))),
        }
    }

    fn keep(&mut self, id: Id, syn: Syn, stage: Stage) {
        self.slots.replace(id, Slot::Pending(Box::new(PendingConnect { syn, stage })));
    }

    fn resolved(&mut self, id: Id, syn: Syn, permit: Permit, lookup: Lookup, progress: Progress) {
        match progress {
            Progress::Waiting => self.keep(id, syn, Stage::Resolving(permit, lookup)),
            Progress::Done(Ok(addresses)) => self.dial(id, syn, permit, &addresses),
            Progress::Done(Err(error)) => {
                let error = match error {
                    ResolveError::NoSuchName | ResolveError::NoAddress => "ENOTFOUND",
                    ResolveError::Failed | ResolveError::TimedOut => "EAI_AGAIN",
                };
                self.fail(&permit, None, error);
                self.inject(syn.key().from, &syn.unreachable(Unreachable::Host));
                self.forget(id, syn.key());
            }
        }
    }

    /// Dials those of `addresses` that may be dialled.
    fn dial(&mut self, id: Id, syn: Syn, permit: Permit, addresses: &[IpAddr]) {
        let mut open = Vec::new();
        let mut denied_one = false;
        let mut no_way = None;
        for address in addresses.iter().map(IpAddr::to_canonical) {
            // Where it does not matter, the dial reports a missing route.
            let own = if self.decider.asks_whose(address, permit.port) { self.own_views(address) } else { Ok(Vec::new()) };
            match own {
                Ok(own) => self.decider.set_own_addresses(own),
                Err(errno) => {
                    no_way = Some((address, errno));
                    continue;
                }
            }
            match self.decider.decide_dial(&permit, address) {
                Ok(()) => open.push(SocketAddr::new(address, permit.port)),
                Err(denied) => {
                    denied_one = true;
                    self.deny(&denied);
                }
            }
        }
        self.decider.set_own_addresses(Vec::new());
        if open.is_empty() {
            return match no_way {
                Some((address, errno)) if !denied_one => self.not_reached(id, syn, &permit, Some(address), errno),
                _ => self.refuse(id, &syn),
            };
        }
        let (dial, state) = Dial::start(open, &mut self.spare, &self.poll, token(id, Side::Peer), self.now);
        self.dialled(id, syn, permit, dial, state);
    }

    /// Which of this address and its views are the host's own now, by its routing. An address
    /// without a route is not the host's.
    fn own_views(&self, address: IpAddr) -> Result<Vec<IpAddr>, Errno> {
        let way = self.routes.route_to(address)?;
        let is_own =
            |view: &IpAddr| if *view == address { way == RouteKind::Local } else { self.routes.route_to(*view) == Ok(RouteKind::Local) };
        Ok(decide::views(address).filter(is_own).collect())
    }

    fn dialled(&mut self, id: Id, syn: Syn, permit: Permit, dial: Dial, state: Dialled) {
        match state {
            Dialled::Waiting => self.keep(id, syn, Stage::Dialling(permit, dial)),
            Dialled::Connected(socket, address) => self.release(id, syn, Purpose::Peer { socket, permit, address: address.ip() }),
            Dialled::Failed(address, errno) => self.not_reached(id, syn, &permit, address.map(|address| address.ip()), errno),
        }
    }

    /// Releases the SYN and accepts its connection, which exists once the packet is sent.
    fn release(&mut self, id: Id, syn: Syn, purpose: Purpose) {
        let again = syn.again();
        let to = syn.key().to;
        self.keep(id, syn, Stage::Reached(Some(purpose), self.now + ACCEPT_PATIENCE));
        self.inject(to, &again);
        self.accept(1);
    }

    /// Answers the SYN with the result of the dial.
    fn not_reached(&mut self, id: Id, syn: Syn, permit: &Permit, address: Option<IpAddr>, errno: Errno) {
        self.fail(permit, address, name_of(errno));
        let from = syn.key().from;
        match errno {
            Errno::TIMEDOUT => return self.keep(id, syn, Stage::Silent(self.now + SILENCE)),
            Errno::NETUNREACH => self.inject(from, &syn.unreachable(Unreachable::Network)),
            Errno::HOSTUNREACH | Errno::ACCESS | Errno::PERM | Errno::HOSTDOWN => {
                self.inject(from, &syn.unreachable(Unreachable::Host));
            }
            _ => self.inject(from, &syn.reset()),
        }
        self.forget(id, syn.key());
    }

    fn refuse(&mut self, id: Id, syn: &Syn) {
        self.inject(syn.key().from, &syn.reset());
        self.forget(id, syn.key());
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
