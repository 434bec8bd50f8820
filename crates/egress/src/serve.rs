//! The gate's loop: one thread, one epoll, every connection a [`Slot`].
//!
//! The kernel holds and logs a SYN; the gate decides, looks the name up, and dials. Once the peer
//! has answered, the gate sends the SYN again, which reaches its listener, accepts, and relays.
//! Otherwise it answers the SYN with the error of the dial. So a program's connect succeeds exactly
//! if the peer was reached.
//!
//! [`Decider`] decides, for the SYN and again for each address that is dialled; the inspector
//! judges the bytes. This file only carries that out. Everything is bounded: the slots, what each
//! holds, and how long it waits.

mod budget;
mod lookups;
mod open;
mod pending;
mod queries;
mod slots;

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant},
};

use rustix::{
    fd::OwnedFd,
    io::Errno,
    net::{RecvFlags, SendFlags, SocketAddrAny, SocketFlags, acceptfrom_with, getsockname, recv, sendto},
};
use stockade_policy::alert::Alert;
use stockade_protocol::{DenialKind, DenialReason, EgressReport};

use crate::{
    decide::{Decider, PeerDenial},
    dial::{PreparedSocket, acknowledge},
    inspect::Inspector,
    names::Names,
    netlink::{Attributes, Received},
    nft,
    packet::{Attempt, Key, Syn},
    poll::{Poll, Readiness},
    record::EgressRecord,
    relay::{BUFFER, Relay, Side, keep_small, reset_on_close},
    resolve::Resolver,
    route::Routes,
    setup::Channels,
};
use budget::Budget;
use lookups::SharedLookups;
use open::Open;
use pending::{PendingConnect, Purpose};
use queries::TcpQuery;
use slots::{Id, Slots, Timed};

/// Connections in any stage.
const MAX_CONNECTIONS: usize = 512;
/// Queries over TCP that are answered. The kernel limits datagrams (nft.rs). Both cost CPU
/// time of the host, which no limit of the sandbox counts.
const QUERIES_PER_SECOND: u32 = 1000;
/// Lookups by the host's name server, which no whitelist names.
const LOOKUPS_PER_SECOND: u32 = 500;
/// Connections whose buffers the kernel may grow, to about 10 MB each. A peer and a program
/// that both read nothing would fill them, and no limit of the sandbox counts them. Further
/// connections keep small buffers.
const MAX_WITH_LARGE_BUFFERS: usize = 16;
/// The time limit for delivery after every process of the sandbox has ended.
const DELIVERY: Duration = Duration::from_millis(200);
/// Packets and queries that are read in one turn.
const TURN: usize = 64;
/// The interval at which deadlines are checked, where there are any.
const TICK: Duration = Duration::from_millis(50);
/// Sockets that wait to be closed. A close takes long, and the program may open its next
/// connection meanwhile.
const MAX_ENDED: usize = 16;
const DNS_PORT: u16 = 53;

/// Tokens of what is watched besides connections.
const STOP: u64 = 0;
const LOG: u64 = 1;
const LISTENER: u64 = 2;
const NAMES: u64 = 3;
/// Tokens of connections begin here; see [`slots`].
const FIRST_SLOT: u64 = 4;

/// One connection.
enum Slot {
    /// Its SYN is held.
    Pending(Box<PendingConnect>),
    /// It is open.
    Open(Box<Open>),
    /// It sends DNS queries, which are answered here.
    Names(Box<TcpQuery>),
}

impl Timed for Slot {
    fn has_clock(&self) -> bool {
        match self {
            Slot::Pending(_) | Slot::Names(_) => true,
            Slot::Open(open) => open.has_clock(),
        }
    }
}

/// The gate's state.
pub(crate) struct GateService {
    poll: Poll,
    routes: Routes,
    channels: Channels,
    decider: Decider,
    resolver: Resolver,
    names: Names,
    record: EgressRecord,
    spare: PreparedSocket,
    slots: Slots<Slot>,
    /// The newest connection of each pair of ends, and the number with which it begins.
    by_key: HashMap<Key, (Id, u32)>,
    /// Connections with more to do.
    busy: Vec<Id>,
    /// Sockets of connections that have ended.
    ended: Vec<OwnedFd>,
    /// Queries over TCP, and lookups on the host.
    questions: Budget,
    lookups: Budget,
    shared: SharedLookups,
    buffer: Vec<u8>,
    started: Instant,
    now: Instant,
    ticked: Instant,
    /// Every packet that was sent until then has been read.
    heard: Instant,
}

impl GateService {
    pub(crate) fn new(
        channels: Channels,
        poll: Poll,
        routes: Routes,
        decider: Decider,
        resolver: Resolver,
        alerts: Vec<Alert>,
        stop: &OwnedFd,
    ) -> Result<Self, Errno> {
        // Edge-triggered: level-triggered it would wake up every wait at the end.
        poll.watch(stop, STOP)?;
        poll.watch_input(&channels.log, LOG)?;
        poll.watch_input(&channels.listener, LISTENER)?;
        poll.watch_input(&channels.names, NAMES)?;
        let now = Instant::now();
        Ok(GateService {
            poll,
            routes,
            channels,
            decider,
            resolver,
            names: Names::default(),
            record: EgressRecord::new("nft-tproxy", alerts),
            spare: PreparedSocket::default(),
            slots: Slots::new(MAX_CONNECTIONS),
            by_key: HashMap::new(),
            busy: Vec::new(),
            ended: Vec::new(),
            questions: Budget::of(QUERIES_PER_SECOND),
            lookups: Budget::of(LOOKUPS_PER_SECOND),
            shared: SharedLookups::default(),
            buffer: vec![0; BUFFER],
            started: now,
            now,
            ticked: now,
            heard: now,
        })
    }

    /// Serves until the stop pipe closes. The report, and the alerts that were met.
    ///
    /// # Errors
    /// The kernel refuses to wait for events.
    pub(crate) fn run(mut self) -> Result<(EgressReport, Vec<String>), Errno> {
        let mut events = Vec::with_capacity(64);
        loop {
            let has_clocks = self.slots.have_clocks() || self.shared.are_under_way();
            let patience = if !self.busy.is_empty() || self.has_to_tidy() { Some(Duration::ZERO) } else { has_clocks.then_some(TICK) };
            let are_all = self.poll.wait(&mut events, patience)?;
            self.now = Instant::now();
            if are_all && !events.iter().any(|event| event.token == LOG) {
                self.heard = self.now;
            }
            if events.is_empty() && self.busy.is_empty() {
                self.tidy();
            }
            if self.attend(&events) {
                return Ok(self.conclude());
            }
            if self.now.duration_since(self.ticked) >= TICK {
                self.ticked = self.now;
                self.tick_lookups();
                self.slots.ids().into_iter().for_each(|id| self.tick(id));
            }
        }
    }

    /// There is work for idle time.
    fn has_to_tidy(&self) -> bool {
        !self.ended.is_empty() || self.spare.is_wanted()
    }

    /// Does one piece of it.
    fn tidy(&mut self) {
        if self.spare.is_wanted() {
            self.spare.refill();
        } else {
            drop(self.ended.pop());
        }
    }

    /// Handles events. True: stop.
    fn attend(&mut self, events: &[Readiness]) -> bool {
        let mut stop = false;
        for Readiness { token, flags } in events.iter().copied() {
            match token {
                STOP => stop = true,
                // One packet, since it may need much work; epoll reports the rest again.
                LOG => self.read_log(1),
                LISTENER => self.accept(TURN),
                NAMES => self.answer_queries(TURN),
                _ => {
                    if let Some(number) = lookups::number_of(token) {
                        self.advance_lookup(number);
                    } else if let Some((id, side)) = slots::id_of(token) {
                        if let Some(Slot::Open(open)) = self.slots.get_mut(id) {
                            open.relay.note(side, flags);
                        }
                        self.advance(id);
                    }
                }
            }
        }
        for id in std::mem::take(&mut self.busy) {
            self.advance(id);
        }
        stop
    }

    fn elapsed_ms(&self) -> u64 {
        u64::try_from(self.now.duration_since(self.started).as_millis()).unwrap_or(u64::MAX)
    }

    fn deny(&mut self, denied: &PeerDenial) {
        let now = self.elapsed_ms();
        self.record.denied(denied, now);
    }

    /// Refuses a connection beyond the limit.
    fn deny_by_number(&mut self, to: IpAddr, port: u16) {
        self.deny(&PeerDenial::of_number(self.names.destination(to), port));
    }

    /// After the sandbox has ended: delivers what was sent, reads what the kernel still holds,
    /// and counts open connections.
    fn conclude(mut self) -> (EgressReport, Vec<String>) {
        // Finite: no process is left that sends more.
        self.read_log(usize::MAX);
        self.answer_queries(usize::MAX);
        let end = self.now + DELIVERY;
        let mut events = Vec::new();
        while self.now < end && self.slots.any(|slot| matches!(slot, Slot::Open(open) if !open.relay.has_delivered())) {
            if self.poll.wait(&mut events, Some(end.duration_since(self.now))).is_err() {
                break;
            }
            self.now = Instant::now();
            self.attend(&events);
        }
        for id in self.slots.ids() {
            match self.slots.take(id) {
                Some(Slot::Open(mut open)) => self.count(&mut open),
                Some(Slot::Pending(pending)) => self.unanswered(&pending.stage),
                Some(Slot::Names(_)) | None => {}
            }
        }
        (self.record.report().clone(), self.record.alerts_met())
    }

    /// Reads the log of packets until it is empty, or until the turn ends.
    fn read_log(&mut self, most: usize) {
        for _ in 0..most {
            let got = recv(&self.channels.log, &mut self.buffer[..], RecvFlags::empty());
            match got {
                Ok((length, _)) => {
                    let bytes = self.buffer.get(..length).unwrap_or_default().to_vec();
                    logged(&bytes).for_each(|(prefix, packet)| self.packet(prefix, packet));
                }
                Err(Errno::INTR) => {}
                // The kernel had no room. A lost SYN is repeated, a lost report is counted.
                Err(Errno::NOBUFS) => self.record.lost(1),
                Err(_) => return,
            }
        }
    }

    /// One packet of the sandbox that the rules held or refused.
    fn packet(&mut self, prefix: &[u8], packet: &[u8]) {
        if prefix == nft::HELD.as_bytes() {
            // Anything but a plain SYN stays dropped.
            if let Ok(syn) = Syn::read(packet) {
                self.hold(syn);
            }
            return;
        }
        if prefix == nft::UNSEEN.as_bytes() {
            self.record.unseen();
        }
        let Ok(Attempt { protocol, to, port }) = Attempt::read(packet) else { return };
        let denied = match protocol.as_str() {
            "tcp" => return self.deny_by_number(to, port.unwrap_or(0)),
            "udp" if port == Some(DNS_PORT) => PeerDenial { port, ..PeerDenial::new(DenialKind::Dns, DenialReason::Limit) },
            "udp" => PeerDenial { address: Some(to), port, ..PeerDenial::new(DenialKind::Udp, DenialReason::ProtocolUnsupported) },
            _ => PeerDenial {
                address: Some(to),
                port,
                protocol: Some(protocol),
                ..PeerDenial::new(DenialKind::Packet, DenialReason::ProtocolUnsupported)
            },
        };
        self.deny(&denied);
    }

    /// Sends a packet into the sandbox's network.
    fn inject(&self, to: SocketAddr, packet: &[u8]) {
        // The port of a raw socket's address is its protocol, and must be 0.
        let sent = match to {
            SocketAddr::V4(_) => sendto(&self.channels.raw4, packet, SendFlags::NOSIGNAL, &SocketAddr::new(to.ip(), 0)),
            SocketAddr::V6(_) => sendto(&self.channels.raw6, packet, SendFlags::NOSIGNAL, &SocketAddr::new(to.ip(), 0)),
        };
        // A lost packet: the program's kernel repeats the SYN.
        let _lost = sent;
    }

    /// Accepts the connections whose SYN was released.
    fn accept(&mut self, most: usize) {
        for _ in 0..most {
            match acceptfrom_with(&self.channels.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok((socket, from)) => self.accepted(socket, from),
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(_) => return,
            }
        }
    }

    fn accepted(&mut self, socket: OwnedFd, from: Option<SocketAddrAny>) {
        let ends = (from, getsockname(&socket).ok());
        let key = match ends {
            (Some(from), Some(to)) => canonical(from).zip(canonical(to)).map(|(from, to)| Key { from, to }),
            _ => None,
        };
        let id = key.and_then(|key| self.by_key.get(&key)).map(|(id, _)| *id);
        let waiting = id.and_then(|id| match self.slots.get_mut(id) {
            Some(Slot::Pending(held)) => held.take_reached().map(|reached| (id, held.key(), reached)),
            _ => None,
        });
        let Some((id, key, purpose)) = waiting else {
            // A connection that was not released by the gate.
            reset_on_close(&socket);
            return;
        };
        let watched = self.poll.watch(&socket, slots::token(id, Side::Client)).and_then(|()| match &purpose {
            Purpose::Peer { socket: peer, .. } => {
                acknowledge(peer);
                self.poll.watch(peer, slots::token(id, Side::Peer))
            }
            Purpose::Names => Ok(()),
        });
        if watched.is_err() {
            reset_on_close(&socket);
            return self.remove(id);
        }
        // epoll reports what both hold already in the next turn.
        match purpose {
            Purpose::Names => {
                self.limit_tcp_queries();
                let names = TcpQuery::new(key, socket, self.now);
                self.slots.replace(id, Slot::Names(Box::new(names)));
            }
            Purpose::Peer { socket: peer, permit, address } => {
                if self.slots.taken() > MAX_WITH_LARGE_BUFFERS {
                    [&socket, &peer].into_iter().for_each(keep_small);
                }
                let rule = self.decider.rule_text(&permit);
                let now = self.elapsed_ms();
                let flow = self.record.connected(&permit, &rule, address, now);
                let inspector = permit.spoken_name().map(|name| Inspector::new(name.clone(), permit.port));
                let relay = Relay::new(socket, peer, inspector);
                let open = Open::new(key, relay, flow, permit, address);
                self.slots.replace(id, Slot::Open(Box::new(open)));
            }
        }
    }

    /// Continues one connection.
    fn advance(&mut self, id: Id) {
        match self.slots.take(id) {
            Some(Slot::Pending(held)) => self.advance_pending(id, held),
            Some(Slot::Open(open)) => self.advance_open(id, open),
            Some(Slot::Names(names)) => self.advance_names(id, names),
            None => {}
        }
    }

    /// Queues a connection for the next turn, once, so that the busiest does not take all
    /// turns.
    fn go_on_later(&mut self, id: Id) {
        if !self.busy.contains(&id) {
            self.busy.push(id);
        }
    }

    /// Frees the slot of a connection that was taken out.
    fn forget(&mut self, id: Id, key: Key) {
        self.slots.free(id);
        if self.by_key.get(&key).is_some_and(|(known, _)| *known == id) {
            self.by_key.remove(&key);
        }
    }

    fn remove(&mut self, id: Id) {
        match self.slots.take(id) {
            Some(Slot::Pending(held)) => self.forget(id, held.key()),
            Some(Slot::Open(open)) => self.forget(id, open.key),
            Some(Slot::Names(names)) => self.forget(id, names.key),
            None => {}
        }
    }

    /// Checks the deadlines of a connection.
    fn tick(&mut self, id: Id) {
        match self.slots.get_mut(id) {
            Some(Slot::Open(open)) if open.is_late(self.now) => self.cut_late(id),
            Some(Slot::Names(names)) if self.now > names.until => self.remove(id),
            Some(Slot::Pending(_)) => self.tick_pending(id),
            _ => {}
        }
    }
}

/// The packets of a log message: prefix without its NUL, packet.
fn logged(bytes: &[u8]) -> impl Iterator<Item = (&[u8], &[u8])> {
    /// NFNL_SUBSYS_ULOG, NFULNL_MSG_PACKET.
    const PACKET: u16 = 4 << 8;
    const PAYLOAD: u16 = 9;
    const PREFIX: u16 = 10;
    Received::new(bytes).filter(|(kind, _, _)| *kind == PACKET).filter_map(|(_, _, body)| {
        let attributes = || Attributes::new(body.get(4..).unwrap_or_default());
        let find = |wanted| attributes().find(|(kind, _)| *kind == wanted).map(|(_, value)| value);
        let prefix = find(PREFIX)?;
        Some((prefix.strip_suffix(&[0]).unwrap_or(prefix), find(PAYLOAD)?))
    })
}

/// An address as in packets: IPv4 is not mapped into IPv6.
fn canonical(address: SocketAddrAny) -> Option<SocketAddr> {
    let address = SocketAddr::try_from(address).ok()?;
    Some(SocketAddr::new(address.ip().to_canonical(), address.port()))
}
