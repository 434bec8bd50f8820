//! Questions for names, as datagrams and over TCP, to whatever address: all are answered
//! here, by [`dns::answer`], and none is passed on.

use std::time::{Duration, Instant};

use rustix::{
    fd::OwnedFd,
    io::Errno,
    net::{RecvFlags, SendFlags, recv, send},
};
use stockade_sys::socket::{receive_datagram, send_datagram};

use super::{Id, Service, Slot, TURN};
use crate::{dns, packet::Key, relay::reset_on_close};

/// How long a connection that asks for names may stay open.
const NAMES_PATIENCE: Duration = Duration::from_secs(30);

pub(super) struct NamesOverTcp {
    pub(super) key: Key,
    socket: OwnedFd,
    asked: Vec<u8>,
    answers: Vec<u8>,
    ended: bool,
    pub(super) until: Instant,
}

impl NamesOverTcp {
    pub(super) fn new(key: Key, socket: OwnedFd, now: Instant) -> Self {
        NamesOverTcp { key, socket, asked: Vec::new(), answers: Vec::new(), ended: false, until: now + NAMES_PATIENCE }
    }
}

/// How a conversation stands.
enum Talk {
    /// It is the other side's turn.
    Waits,
    /// There is more to do at once.
    Goes,
    /// All was said.
    Over,
}

impl Service {
    /// Answers questions that came as datagrams.
    pub(super) fn answer_questions(&mut self, most: usize) {
        let mut question = [0u8; dns::LONGEST_QUERY + 1];
        for _ in 0..most {
            match receive_datagram(&self.channels.names, &mut question) {
                Ok(datagram) => {
                    let message = question.get(..datagram.length.min(question.len())).unwrap_or_default();
                    let now = self.elapsed_ms();
                    let answer = dns::answer(message, &self.decider, &mut self.names, now);
                    answer.denied.iter().for_each(|denied| self.deny(denied));
                    if let Some(reply) = answer.reply {
                        // From the address that was asked. Lost like any datagram.
                        let _lost = send_datagram(&self.channels.names, &reply, datagram.to, datagram.from);
                    }
                }
                Err(Errno::INTR | Errno::PROTO) => {}
                Err(_) => return,
            }
        }
    }

    pub(super) fn advance_names(&mut self, id: Id, mut names: Box<NamesOverTcp>) {
        match self.converse(&mut names) {
            Ok(Talk::Waits) => self.slots.replace(id, Slot::Names(names)),
            Ok(Talk::Goes) => {
                self.slots.replace(id, Slot::Names(names));
                self.go_on_later(id);
            }
            Ok(Talk::Over) => self.forget(id, names.key),
            Err(_) => {
                reset_on_close(&names.socket);
                self.forget(id, names.key);
            }
        }
    }

    /// Answers some questions. An error ends the connection.
    fn converse(&mut self, names: &mut NamesOverTcp) -> Result<Talk, Errno> {
        for _ in 0..TURN {
            while !names.answers.is_empty() {
                match rustix::io::retry_on_intr(|| send(&names.socket, &names.answers, SendFlags::NOSIGNAL)) {
                    Ok(count) => drop(names.answers.drain(..count)),
                    Err(Errno::AGAIN) => return Ok(Talk::Waits),
                    Err(errno) => return Err(errno),
                }
            }
            match dns::unframe(&names.asked) {
                dns::Framed::Message(message, length) => {
                    let now = self.elapsed_ms();
                    if !self.questions.takes_one(now) {
                        return Err(Errno::DQUOT);
                    }
                    let answer = dns::answer(message, &self.decider, &mut self.names, now);
                    names.asked.drain(..length);
                    answer.denied.iter().for_each(|denied| self.deny(denied));
                    names.answers = answer.reply.map(|reply| dns::frame(&reply)).unwrap_or_default();
                    continue;
                }
                dns::Framed::TooLong => return Err(Errno::MSGSIZE),
                dns::Framed::Partial if names.ended => return Ok(Talk::Over),
                dns::Framed::Partial => {}
            }
            let mut chunk = [0u8; dns::LONGEST_QUERY + 2];
            let room = chunk.len().saturating_sub(names.asked.len());
            match rustix::io::retry_on_intr(|| recv(&names.socket, chunk.get_mut(..room).unwrap_or_default(), RecvFlags::empty())) {
                Ok((0, _)) => names.ended = true,
                Ok((count, _)) => names.asked.extend_from_slice(chunk.get(..count).unwrap_or_default()),
                Err(Errno::AGAIN) => return Ok(Talk::Waits),
                Err(errno) => return Err(errno),
            }
        }
        Ok(Talk::Goes)
    }
}
