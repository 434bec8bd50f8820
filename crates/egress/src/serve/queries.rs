//! DNS queries, as datagrams and over TCP, to any address: [`dns::answer`] answers them all.
//!
//! None is forwarded.

use std::time::{Duration, Instant};

use rustix::{
    fd::OwnedFd,
    io::Errno,
    net::{RecvFlags, SendFlags, recv, send},
};
use stockade_sys::socket::{receive_datagram, send_datagram};

use stockade_protocol::{DenialKind, DenialReason};

use super::{GateService, Id, Slot, TURN};
use crate::{decide::PeerDenial, dns, packet::Key, relay::reset_on_close};

/// How long a connection with DNS queries may stay open without one.
const TCP_QUERY_TIMEOUT: Duration = Duration::from_secs(5);
/// Connections with DNS queries. The one whose last query is the oldest gives way to another.
const MAX_TCP_QUERIES: usize = 32;

pub(super) struct TcpQuery {
    pub(super) key: Key,
    socket: OwnedFd,
    asked: Vec<u8>,
    answers: Vec<u8>,
    ended: bool,
    pub(super) until: Instant,
}

impl TcpQuery {
    pub(super) fn new(key: Key, socket: OwnedFd, now: Instant) -> Self {
        TcpQuery { key, socket, asked: Vec::new(), answers: Vec::new(), ended: false, until: now + TCP_QUERY_TIMEOUT }
    }
}

/// What became of the queries of one connection so far.
enum QueryProgress {
    /// The client has to read or write first.
    Waiting,
    /// More queries wait to be answered.
    Busy,
    /// The client has closed, and all is answered.
    Done,
}

impl GateService {
    /// Answers queries that came as datagrams.
    pub(super) fn answer_queries(&mut self, most: usize) {
        let mut question = [0u8; dns::MAX_QUERY_LEN + 1];
        for _ in 0..most {
            match receive_datagram(&self.channels.names, &mut question) {
                Ok(datagram) => {
                    let message = question.get(..datagram.length.min(question.len())).unwrap_or_default();
                    let now = self.elapsed_ms();
                    let answer = dns::answer(message, &self.decider, &mut self.names, now);
                    answer.denied.iter().for_each(|denied| self.deny(denied));
                    if let Some(reply) = answer.reply {
                        // From the address that the query went to. The datagram may get lost.
                        let _lost = send_datagram(&self.channels.names, &reply, datagram.to, datagram.from);
                    }
                }
                Err(Errno::INTR | Errno::PROTO) => {}
                Err(_) => return,
            }
        }
    }

    /// Makes room for one more connection with queries.
    pub(super) fn limit_tcp_queries(&mut self) {
        if self.slots.count(|slot| matches!(slot, Slot::Names(_))) < MAX_TCP_QUERIES {
            return;
        }
        let until = |slot: &Slot| if let Slot::Names(names) = slot { Some(names.until) } else { None };
        if let Some(id) = self.slots.least_by(until)
            && let Some(Slot::Names(names)) = self.slots.take(id)
        {
            reset_on_close(&names.socket);
            self.forget(id, names.key);
        }
    }

    pub(super) fn advance_names(&mut self, id: Id, mut names: Box<TcpQuery>) {
        match self.converse(&mut names) {
            Ok(QueryProgress::Waiting) => self.slots.replace(id, Slot::Names(names)),
            Ok(QueryProgress::Busy) => {
                self.slots.replace(id, Slot::Names(names));
                self.go_on_later(id);
            }
            Ok(QueryProgress::Done) => self.forget(id, names.key),
            Err(_) => {
                reset_on_close(&names.socket);
                self.forget(id, names.key);
            }
        }
    }

    /// Answers some queries. An error ends the connection.
    fn converse(&mut self, names: &mut TcpQuery) -> Result<QueryProgress, Errno> {
        for _ in 0..TURN {
            while !names.answers.is_empty() {
                match rustix::io::retry_on_intr(|| send(&names.socket, &names.answers, SendFlags::NOSIGNAL)) {
                    Ok(count) => drop(names.answers.drain(..count)),
                    Err(Errno::AGAIN) => return Ok(QueryProgress::Waiting),
                    Err(errno) => return Err(errno),
                }
            }
            match dns::unframe(&names.asked) {
                dns::TcpFrame::Message(message, length) => {
                    let now = self.elapsed_ms();
                    if !self.questions.takes_one(now) {
                        self.deny(&PeerDenial::new(DenialKind::Dns, DenialReason::Limit));
                        self.record.unseen();
                        return Err(Errno::DQUOT);
                    }
                    let answer = dns::answer(message, &self.decider, &mut self.names, now);
                    names.asked.drain(..length);
                    names.until = self.now + TCP_QUERY_TIMEOUT;
                    answer.denied.iter().for_each(|denied| self.deny(denied));
                    names.answers = answer.reply.map(|reply| dns::frame(&reply)).unwrap_or_default();
                    continue;
                }
                dns::TcpFrame::TooLong => return Err(Errno::MSGSIZE),
                dns::TcpFrame::Partial if names.ended => return Ok(QueryProgress::Done),
                dns::TcpFrame::Partial => {}
            }
            let mut chunk = [0u8; dns::MAX_QUERY_LEN + 2];
            let room = chunk.len().saturating_sub(names.asked.len());
            match rustix::io::retry_on_intr(|| recv(&names.socket, chunk.get_mut(..room).unwrap_or_default(), RecvFlags::empty())) {
                Ok((0, _)) => names.ended = true,
                Ok((count, _)) => names.asked.extend_from_slice(chunk.get(..count).unwrap_or_default()),
                Err(Errno::AGAIN) => return Ok(QueryProgress::Waiting),
                Err(errno) => return Err(errno),
            }
        }
        Ok(QueryProgress::Busy)
    }
}
