//! A connection whose peer was reached: relays and counts bytes until it ends or is refused.
//!
//! It does not judge the bytes; the inspector does.

use std::{
    net::IpAddr,
    time::{Duration, Instant},
};

use stockade_protocol::{DenialKind, DenialReason};

use super::{GateService, Id, MAX_ENDED, Slot};
use crate::{
    decide::{PeerDenial, Permit},
    inspect::{InspectionRefusal, Inspector},
    packet::Key,
    record::FlowId,
    relay::{Relay, State},
};

/// The time limit for a client to send a complete hello or head.
const HELLO_PATIENCE: Duration = Duration::from_secs(10);

pub(super) struct Open {
    pub(super) key: Key,
    pub(super) relay: Relay,
    flow: FlowId,
    permit: Permit,
    address: IpAddr,
    counted: (u64, u64),
    named: bool,
    /// Since when bytes of the client are held back.
    held_since: Option<Instant>,
}

impl Open {
    pub(super) fn new(key: Key, relay: Relay, flow: FlowId, permit: Permit, address: IpAddr) -> Self {
        Open { key, relay, flow, permit, address, counted: (0, 0), named: false, held_since: None }
    }

    /// It has a deadline.
    pub(super) fn has_clock(&self) -> bool {
        self.held_since.is_some()
    }

    /// The client has not completed its hello or head in time.
    pub(super) fn is_late(&self, now: Instant) -> bool {
        self.held_since.is_some_and(|since| now.duration_since(since) > HELLO_PATIENCE)
    }
}

impl GateService {
    pub(super) fn advance_open(&mut self, id: Id, mut open: Box<Open>) {
        let state = open.relay.work(&mut self.buffer);
        if !open.named && open.relay.inspector().is_some_and(Inspector::saw_server_name) {
            open.named = true;
            if let Some(host) = open.permit.host() {
                self.record.named(open.flow, host.as_str());
            }
        }
        open.held_since = open.relay.is_held().then(|| open.held_since.unwrap_or(self.now));
        match state {
            State::Idle => self.slots.replace(id, Slot::Open(open)),
            State::Busy => {
                self.slots.replace(id, Slot::Open(open));
                self.go_on_later(id);
            }
            State::Ended => {
                self.count(&mut open);
                self.forget(id, open.key);
                // Both ends know that it has ended.
                self.ended.extend(open.relay.into_sockets());
                self.ended.truncate(MAX_ENDED);
            }
            State::Broken(refused) => self.cut(id, open, refused),
        }
    }

    /// Ends a connection with a reset on both sides.
    fn cut(&mut self, id: Id, mut open: Box<Open>, refused: Option<InspectionRefusal>) {
        self.count(&mut open);
        if let Some(InspectionRefusal { kind, reason, said }) = refused {
            self.deny(&PeerDenial::of_protocol(&open.permit, open.address, kind, reason, said));
        }
        self.forget(id, open.key);
        open.relay.reset();
    }

    /// Adds new bytes to the record.
    pub(super) fn count(&mut self, open: &mut Open) {
        let (out, back) = open.relay.bytes();
        self.record.carried(open.flow, out - open.counted.0, back - open.counted.1);
        open.counted = (out, back);
    }

    /// Ends a connection whose client is late.
    pub(super) fn cut_late(&mut self, id: Id) {
        if let Some(Slot::Open(open)) = self.slots.take(id) {
            let late = InspectionRefusal { kind: DenialKind::Connect, reason: DenialReason::Limit, said: None };
            self.cut(id, open, Some(late));
        }
    }
}
