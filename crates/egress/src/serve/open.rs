//! A connection whose peer was reached: bytes are relayed and counted until it ends or is
//! cut.

use std::{
    net::IpAddr,
    time::{Duration, Instant},
};

use stockade_protocol::{DenialKind, DenialReason};

use super::{Id, MOST_ENDED, Service, Slot};
use crate::{
    decide::{Denied, Permit},
    inspect::{Inspector, Refused},
    packet::Key,
    record::FlowId,
    relay::{Relay, State},
};

/// How long a client may take to say enough to be judged.
const HELLO_PATIENCE: Duration = Duration::from_secs(10);

pub(super) struct Open {
    pub(super) key: Key,
    pub(super) relay: Relay,
    flow: FlowId,
    permit: Permit,
    address: IpAddr,
    counted: (u64, u64),
    named: bool,
    /// Since when the client's bytes are held back.
    held_since: Option<Instant>,
}

impl Open {
    pub(super) fn new(key: Key, relay: Relay, flow: FlowId, permit: Permit, address: IpAddr) -> Self {
        Open { key, relay, flow, permit, address, counted: (0, 0), named: false, held_since: None }
    }

    /// The client may become late.
    pub(super) fn has_clock(&self) -> bool {
        self.held_since.is_some()
    }

    /// The client has kept us waiting for the rest of what it began to say.
    pub(super) fn is_late(&self, now: Instant) -> bool {
        self.held_since.is_some_and(|since| now.duration_since(since) > HELLO_PATIENCE)
    }
}

impl Service {
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
                // Both ends have heard that it is over.
                self.ended.extend(open.relay.into_sockets());
                self.ended.truncate(MOST_ENDED);
            }
            State::Broken(refused) => self.cut(id, open, refused),
        }
    }

    /// Ends a connection with a reset on both sides.
    fn cut(&mut self, id: Id, mut open: Box<Open>, refused: Option<Refused>) {
        self.count(&mut open);
        if let Some(Refused { kind, reason, said }) = refused {
            self.deny(&Denied::of_speech(&open.permit, open.address, kind, reason, said));
        }
        self.forget(id, open.key);
        open.relay.reset();
    }

    /// Adds to the record what it does not know yet.
    pub(super) fn count(&mut self, open: &mut Open) {
        let (out, back) = open.relay.bytes();
        self.record.carried(open.flow, out - open.counted.0, back - open.counted.1);
        open.counted = (out, back);
    }

    /// Ends a connection whose client said too little for too long.
    pub(super) fn cut_late(&mut self, id: Id) {
        if let Some(Slot::Open(open)) = self.slots.take(id) {
            let late = Refused { kind: DenialKind::Connect, reason: DenialReason::Limit, said: None };
            self.cut(id, open, Some(late));
        }
    }
}
