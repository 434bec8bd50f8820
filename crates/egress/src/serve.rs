//! The gate's loop: one thread, one epoll, every connection a [`Slot`].
//!
//! A connection's life: its SYN is held by the kernel and logged to us; the decision; for a
//! name the look-up; the dial; only when the peer has been reached the SYN is sent again
//! and let through to our listener, else it is answered with what the dial met; accept;
//! relay. So a program's connect succeeds exactly if the peer was reached.
//!
//! What may be reached is [`Decider`]'s to say, asked for the SYN and again for each
//! address about to be dialled; what may be spoken, the inspector's. This file only carries
//! out. Everything is bounded: the slots, what each may hold, and how long it may wait.

mod budget;
mod held;
mod open;
mod questions;
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
use stockade_protocol::{DenialKind, DenialReason, EgressReport};

use crate::{
    decide::{Decider, Denied},
    dial::{Spare, acknowledge},
    inspect::Inspector,
    names::Names,
    netlink::{Attributes, Received},
    nft,
    packet::{Attempt, Key, Syn},
    poll::{Happened, Poll},
    record::Record,
    relay::{BUFFER, Relay, Side, keep_small, reset_on_close},
    resolve::Resolver,
    route::Routes,
    setup::Channels,
};
use budget::Budget;
use held::{Held, Purpose};
use open::Open;
use questions::NamesOverTcp;
use slots::{Id, Slots, Timed};

/// Connections at once, in whatever stage.
const MOST_CONNECTIONS: usize = 512;
/// Questions over TCP that are answered. Datagrams the kernel counts (nft.rs); both cost the
/// host's CPU time, which no limit of the sandbox counts.
const QUESTIONS_EACH_SECOND: u32 = 1000;
/// Connections to names for which the host's name server is asked, who is on no whitelist.
const LOOKUPS_EACH_SECOND: u32 = 500;
/// Connections whose buffers the kernel may let grow, to some ten megabytes each: a peer and
/// a program that both read nothing would fill them, and they count against no limit of the
/// sandbox. Those that are opened beside so many keep small ones.
const MOST_WITH_LARGE_BUFFERS: usize = 16;
/// How long what was said may take to be delivered after everything inside has ended.
const DELIVERY: Duration = Duration::from_millis(200);
/// Packets and questions that are read before connections get their turn.
const TURN: usize = 64;
/// How often clocks are looked at where there are some: bytes that pass have none.
const TICK: Duration = Duration::from_millis(50);
/// Sockets that may wait to be closed. Closing is long, and a program that has ended one
/// connection may have begun its next.
const MOST_ENDED: usize = 16;
const DNS_PORT: u16 = 53;

/// What is watched besides connections.
const STOP: u64 = 0;
const LOG: u64 = 1;
const LISTENER: u64 = 2;
const NAMES: u64 = 3;
/// Tokens of connections begin here; see [`slots`].
const FIRST_SLOT: u64 = 4;

/// One connection.
enum Slot {
    /// Its SYN waits.
    Held(Box<Held>),
    /// It is open.
    Open(Box<Open>),
    /// It asks for names, and is answered here.
    Names(Box<NamesOverTcp>),
}

impl Timed for Slot {
    fn has_clock(&self) -> bool {
        match self {
            Slot::Held(_) | Slot::Names(_) => true,
            Slot::Open(open) => open.has_clock(),
        }
    }
}

/// See the module.
pub(crate) struct Service {
    poll: Poll,
    routes: Routes,
    channels: Channels,
    decider: Decider,
    resolver: Resolver,
    names: Names,
    record: Record,
    spare: Spare,
    slots: Slots<Slot>,
    /// The newest connection of each pair of ends.
    by_key: HashMap<Key, Id>,
    /// Connections with more to do at once.
    busy: Vec<Id>,
    /// Sockets of connections that have ended.
    ended: Vec<OwnedFd>,
    /// Questions over TCP, and look-ups of the host's.
    questions: Budget,
    lookups: Budget,
    buffer: Vec<u8>,
    started: Instant,
    now: Instant,
    ticked: Instant,
}

impl Service {
    pub(crate) fn new(
        channels: Channels,
        poll: Poll,
        routes: Routes,
        decider: Decider,
        resolver: Resolver,
        stop: &OwnedFd,
    ) -> Result<Self, Errno> {
        // Once is enough, and told again it would keep the last moments busy.
        poll.watch(stop, STOP)?;
        poll.watch_input(&channels.log, LOG)?;
        poll.watch_input(&channels.listener, LISTENER)?;
        poll.watch_input(&channels.names, NAMES)?;
        let now = Instant::now();
        Ok(Service {
            poll,
            routes,
            channels,
            decider,
            resolver,
            names: Names::default(),
            record: Record::new("nft-tproxy"),
            spare: Spare::default(),
            slots: Slots::new(MOST_CONNECTIONS),
            by_key: HashMap::new(),
            busy: Vec::new(),
            ended: Vec::new(),
            questions: Budget::of(QUESTIONS_EACH_SECOND),
            lookups: Budget::of(LOOKUPS_EACH_SECOND),
            buffer: vec![0; BUFFER],
            started: now,
            now,
            ticked: now,
        })
    }

    /// Serves until the stop pipe closes.
    ///
    /// # Errors
    /// The kernel refuses to wait for events.
    pub(crate) fn run(mut self) -> Result<EgressReport, Errno> {
        let mut events = Vec::with_capacity(64);
        loop {
            let patience =
                if !self.busy.is_empty() || self.has_to_tidy() { Some(Duration::ZERO) } else { self.slots.have_clocks().then_some(TICK) };
            self.poll.wait(&mut events, patience)?;
            self.now = Instant::now();
            if events.is_empty() && self.busy.is_empty() {
                self.tidy();
            }
            if self.attend(&events) {
                return Ok(self.conclude());
            }
            if self.now.duration_since(self.ticked) >= TICK {
                self.ticked = self.now;
                self.slots.ids().into_iter().for_each(|id| self.tick(id));
            }
        }
    }

    /// There is something to do that nobody waits for.
    fn has_to_tidy(&self) -> bool {
        !self.ended.is_empty() || self.spare.is_wanted()
    }

    /// Does a piece of it; the next one when nothing happened meanwhile.
    fn tidy(&mut self) {
        if self.spare.is_wanted() {
            self.spare.refill();
        } else {
            drop(self.ended.pop());
        }
    }

    /// Handles what happened. True: it is time to stop.
    fn attend(&mut self, events: &[Happened]) -> bool {
        let mut stop = false;
        for Happened { token, flags } in events.iter().copied() {
            match token {
                STOP => stop = true,
                // One, for which there may be much to do; we are told again of what is left.
                LOG => self.read_log(1),
                LISTENER => self.accept(TURN),
                NAMES => self.answer_questions(TURN),
                _ => {
                    if let Some((id, side)) = slots::id_of(token) {
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

    fn deny(&mut self, denied: &Denied) {
        let now = self.elapsed_ms();
        self.record.denied(denied, now);
    }

    /// Refuses one more than there may be.
    fn deny_by_number(&mut self, to: IpAddr, port: u16) {
        self.deny(&Denied::of_number(self.names.destination(to), port));
    }

    /// Everything inside is dead: what it said is still delivered, what the kernel still
    /// holds is read, open connections are counted.
    fn conclude(mut self) -> EgressReport {
        // There is an end to it: nobody is left to send more.
        self.read_log(usize::MAX);
        self.answer_questions(usize::MAX);
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
            if let Some(Slot::Open(mut open)) = self.slots.take(id) {
                self.count(&mut open);
            }
        }
        self.record.report().clone()
    }

    /// Reads the log of packets until it is empty, or others shall have their turn.
    fn read_log(&mut self, most: usize) {
        for _ in 0..most {
            let got = recv(&self.channels.log, &mut self.buffer[..], RecvFlags::empty());
            match got {
                Ok((length, _)) => {
                    let bytes = self.buffer.get(..length).unwrap_or_default().to_vec();
                    logged(&bytes).for_each(|(prefix, packet)| self.packet(prefix, packet));
                }
                Err(Errno::INTR) => {}
                // The kernel had no room; a lost SYN is sent again, a lost report is lost.
                Err(Errno::NOBUFS) => self.record.lost(1),
                Err(_) => return,
            }
        }
    }

    /// One packet of the sandbox that the rules held or refused.
    fn packet(&mut self, prefix: &[u8], packet: &[u8]) {
        if prefix == nft::HELD.as_bytes() {
            // What is no plain SYN stays dropped.
            if let Ok(syn) = Syn::read(packet) {
                self.hold(syn);
            }
            return;
        }
        let Ok(Attempt { protocol, to, port }) = Attempt::read(packet) else { return };
        let denied = match protocol.as_str() {
            "tcp" => return self.deny_by_number(to, port.unwrap_or(0)),
            "udp" if port == Some(DNS_PORT) => Denied { port, ..Denied::new(DenialKind::Dns, DenialReason::Limit) },
            "udp" => Denied { address: Some(to), port, ..Denied::new(DenialKind::Udp, DenialReason::ProtocolUnsupported) },
            _ => Denied {
                address: Some(to),
                port,
                protocol: Some(protocol),
                ..Denied::new(DenialKind::Packet, DenialReason::ProtocolUnsupported)
            },
        };
        self.deny(&denied);
    }

    /// Sends a packet into the sandbox's network.
    fn inject(&self, to: SocketAddr, packet: &[u8]) {
        // The port of a raw socket's address is a protocol, and must be none.
        let sent = match to {
            SocketAddr::V4(_) => sendto(&self.channels.raw4, packet, SendFlags::NOSIGNAL, &SocketAddr::new(to.ip(), 0)),
            SocketAddr::V6(_) => sendto(&self.channels.raw6, packet, SendFlags::NOSIGNAL, &SocketAddr::new(to.ip(), 0)),
        };
        // Lost like any packet: the program's kernel tries again.
        let _lost = sent;
    }

    /// Takes the connections that were let through.
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
        let id = key.and_then(|key| self.by_key.get(&key).copied());
        let waiting = id.and_then(|id| match self.slots.get_mut(id) {
            Some(Slot::Held(held)) => held.take_reached().map(|reached| (id, held.key(), reached)),
            _ => None,
        });
        let Some((id, key, purpose)) = waiting else {
            // Somebody found the listener without being sent there.
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
        // What both have already is told in the next turn.
        match purpose {
            Purpose::Names => {
                let names = NamesOverTcp::new(key, socket, self.now);
                self.slots.replace(id, Slot::Names(Box::new(names)));
            }
            Purpose::Peer { socket: peer, permit, address } => {
                if self.slots.taken() > MOST_WITH_LARGE_BUFFERS {
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

    /// Goes on with one connection as far as it goes.
    fn advance(&mut self, id: Id) {
        match self.slots.take(id) {
            Some(Slot::Held(held)) => self.advance_held(id, held),
            Some(Slot::Open(open)) => self.advance_open(id, open),
            Some(Slot::Names(names)) => self.advance_names(id, names),
            None => {}
        }
    }

    /// Has a connection advanced again in the next turn: once, however often it asked, or the
    /// busiest would soon have all turns.
    fn go_on_later(&mut self, id: Id) {
        if !self.busy.contains(&id) {
            self.busy.push(id);
        }
    }

    /// Frees a connection's place, which was taken out.
    fn forget(&mut self, id: Id, key: Key) {
        self.slots.free(id);
        if self.by_key.get(&key) == Some(&id) {
            self.by_key.remove(&key);
        }
    }

    fn remove(&mut self, id: Id) {
        match self.slots.take(id) {
            Some(Slot::Held(held)) => self.forget(id, held.key()),
            Some(Slot::Open(open)) => self.forget(id, open.key),
            Some(Slot::Names(names)) => self.forget(id, names.key),
            None => {}
        }
    }

    /// Looks at a connection's clocks.
    fn tick(&mut self, id: Id) {
        match self.slots.get_mut(id) {
            Some(Slot::Open(open)) if open.is_late(self.now) => self.cut_late(id),
            Some(Slot::Names(names)) if self.now > names.until => self.remove(id),
            Some(Slot::Held(_)) => self.tick_held(id),
            _ => {}
        }
    }
}

/// The packets in what the log said: prefix without its NUL, packet.
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

/// An address as packets carry it: IPv4 as such.
fn canonical(address: SocketAddrAny) -> Option<SocketAddr> {
    let address = SocketAddr::try_from(address).ok()?;
    Some(SocketAddr::new(address.ip().to_canonical(), address.port()))
}
