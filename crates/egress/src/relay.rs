//! Relays bytes between a sandbox's connection and its peer's until both directions have ended.
//!
//! Bytes stay in the kernel until the other side accepts them: they are peeked (MSG_PEEK), sent,
//! and only then removed (MSG_TRUNC, which copies nothing for TCP). So a connection has no buffer
//! here, a slow reader slows the writer, and bytes that the inspector has not released cannot be
//! lost or sent. An end is relayed as an end, a reset as a reset. The inspector decides.

use rustix::{
    event::epoll::EventFlags,
    fd::OwnedFd,
    io::Errno,
    net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown, sockopt},
};

use crate::inspect::{InspectionRefusal, Inspector};

/// One buffer for all connections; it holds bytes only during one call.
pub(crate) const BUFFER: usize = 256 << 10;
/// Bytes that one direction moves in one turn.
const TURN: u64 = 1 << 20;

/// Which of the two sockets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// The sandbox's.
    Client,
    /// The peer's.
    Peer,
}

/// What epoll has reported for one socket.
#[derive(Default)]
struct Ready {
    readable: bool,
    writable: bool,
    /// The other end has closed or failed: read until the kernel reports it.
    ended: bool,
}

impl Ready {
    fn note(&mut self, flags: EventFlags) {
        let end = EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR;
        self.ended |= flags.intersects(end);
        self.readable |= flags.intersects(end | EventFlags::IN);
        self.writable |= flags.intersects(EventFlags::OUT | EventFlags::HUP | EventFlags::ERR);
    }
}

/// One direction.
#[derive(Default)]
struct Direction {
    /// Its end was relayed.
    done: bool,
    bytes: u64,
}

/// A connection and its peer.
pub(crate) struct Relay {
    client: OwnedFd,
    peer: OwnedFd,
    at_client: Ready,
    at_peer: Ready,
    out: Direction,
    back: Direction,
    inspector: Option<Inspector>,
    /// How many of the bytes in the client's socket were examined, and how many of these may
    /// be sent.
    examined: usize,
    released: usize,
}

/// Its state after a turn.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// It waits for the kernel.
    Idle,
    /// It has more to do.
    Busy,
    /// Both directions have ended.
    Ended,
    /// It failed or was refused: both sides must be reset.
    Broken(Option<InspectionRefusal>),
}

enum Step {
    Waits,
    More,
}

/// Why one direction cannot go on.
enum Stop {
    Errno,
    Inspection(InspectionRefusal),
}

impl From<Errno> for Stop {
    fn from(_: Errno) -> Self {
        Stop::Errno
    }
}

impl Relay {
    /// For two sockets whose readiness is unknown.
    pub(crate) fn new(client: OwnedFd, peer: OwnedFd, inspector: Option<Inspector>) -> Self {
        let (at_client, at_peer) = (Ready::default(), Ready::default());
        let (out, back) = (Direction::default(), Direction::default());
        Relay { client, peer, at_client, at_peer, out, back, inspector, examined: 0, released: 0 }
    }

    pub(crate) fn note(&mut self, side: Side, flags: EventFlags) {
        match side {
            Side::Client => self.at_client.note(flags),
            Side::Peer => self.at_peer.note(flags),
        }
    }

    /// Bytes to the peer and from it.
    pub(crate) fn bytes(&self) -> (u64, u64) {
        (self.out.bytes, self.back.bytes)
    }

    pub(crate) fn inspector(&self) -> Option<&Inspector> {
        self.inspector.as_ref()
    }

    /// The client has sent bytes that are not released yet.
    pub(crate) fn is_held(&self) -> bool {
        self.examined > self.released
    }

    /// All bytes of the client and its end were relayed.
    pub(crate) fn has_delivered(&self) -> bool {
        self.out.done
    }

    /// Moves what can be moved.
    pub(crate) fn work(&mut self, buffer: &mut [u8]) -> State {
        let out = self.move_out(buffer);
        let back = match &out {
            Ok(_) => self.move_back(buffer),
            Err(_) => Ok(Step::Waits),
        };
        match (out, back) {
            (Err(Stop::Inspection(refused)), _) | (_, Err(Stop::Inspection(refused))) => State::Broken(Some(refused)),
            (Err(Stop::Errno), _) | (_, Err(Stop::Errno)) => State::Broken(None),
            (Ok(_), Ok(_)) if self.out.done && self.back.done => State::Ended,
            (Ok(Step::Waits), Ok(Step::Waits)) => State::Idle,
            _ => State::Busy,
        }
    }

    fn move_back(&mut self, buffer: &mut [u8]) -> Result<Step, Stop> {
        let mut moved = 0;
        while !self.back.done && self.at_peer.readable && self.at_client.writable {
            if moved > TURN {
                return Ok(Step::More);
            }
            let Some(count) = peek(&self.peer, &mut self.at_peer, buffer)? else { break };
            if count == 0 {
                hand_on_end(&self.client)?;
                self.back.done = true;
                break;
            }
            let sent = pass(&self.peer, &self.client, &mut self.at_client, buffer, count)?;
            self.back.bytes += sent as u64;
            moved += sent as u64;
            if sent == count && count < buffer.len() && !self.at_peer.ended {
                // A short read: the socket is empty (epoll(7)).
                self.at_peer.readable = false;
            }
        }
        Ok(Step::Waits)
    }

    fn move_out(&mut self, buffer: &mut [u8]) -> Result<Step, Stop> {
        let mut moved = 0;
        while !self.out.done && self.at_client.readable && self.at_peer.writable {
            if moved > TURN {
                return Ok(Step::More);
            }
            let Some(count) = peek(&self.client, &mut self.at_client, buffer)? else { break };
            if count == 0 {
                hand_on_end(&self.peer)?;
                self.out.done = true;
                break;
            }
            let free = self.examine(buffer.get(..count).unwrap_or_default())?;
            if free == 0 {
                if !self.at_client.ended {
                    self.at_client.readable = false;
                    break;
                }
                // The client has closed: an incomplete request stays incomplete.
                let now = peek(&self.client, &mut self.at_client, buffer)?;
                if now.is_none_or(|now| now <= count) {
                    return Err(Stop::Errno);
                }
                continue;
            }
            let sent = pass(&self.client, &self.peer, &mut self.at_peer, buffer, free)?;
            self.out.bytes += sent as u64;
            moved += sent as u64;
            self.examined = self.examined.saturating_sub(sent);
            self.released = self.released.saturating_sub(sent);
            if sent == count && count < buffer.len() && !self.at_client.ended {
                self.at_client.readable = false;
            }
        }
        Ok(Step::Waits)
    }

    /// How many of the waiting bytes may leave.
    fn examine(&mut self, waiting: &[u8]) -> Result<usize, Stop> {
        let Some(inspector) = &mut self.inspector else { return Ok(waiting.len()) };
        if inspector.is_through() && self.released >= self.examined {
            return Ok(waiting.len());
        }
        if waiting.len() > self.examined {
            let held = waiting.get(self.released..).unwrap_or_default();
            self.released += inspector.examine(held).map_err(Stop::Inspection)?;
            self.examined = waiting.len();
        }
        Ok(self.released)
    }

    /// Its sockets, to be closed.
    pub(crate) fn into_sockets(self) -> [OwnedFd; 2] {
        [self.client, self.peer]
    }

    /// Resets both sides and discards what the kernel still holds.
    pub(crate) fn reset(self) {
        for socket in [&self.client, &self.peer] {
            reset_on_close(socket);
        }
    }
}

/// Keeps the kernel's buffers of a socket small.
pub(crate) fn keep_small(socket: &OwnedFd) {
    // It doubles them for its own use (socket(7)).
    const LITTLE: usize = 64 << 10;
    let _set = sockopt::set_socket_recv_buffer_size(socket, LITTLE);
    let _set = sockopt::set_socket_send_buffer_size(socket, LITTLE);
}

/// Makes the close of a socket a reset.
pub(crate) fn reset_on_close(socket: &OwnedFd) {
    // It fails only for a descriptor that is no socket.
    let _set = sockopt::set_socket_linger(socket, Some(std::time::Duration::ZERO));
}

/// Peeks at waiting bytes. `None`: there are none yet.
fn peek(from: &OwnedFd, ready: &mut Ready, buffer: &mut [u8]) -> Result<Option<usize>, Errno> {
    match rustix::io::retry_on_intr(|| recv(from, &mut *buffer, RecvFlags::PEEK)) {
        Ok((count, _)) => Ok(Some(count)),
        Err(Errno::AGAIN) => {
            ready.readable = false;
            Ok(None)
        }
        Err(errno) => Err(errno),
    }
}

/// Sends the first `count` bytes of `buffer`, and removes those that were accepted from the
/// socket that they came from.
fn pass(from: &OwnedFd, to: &OwnedFd, ready: &mut Ready, buffer: &mut [u8], count: usize) -> Result<usize, Errno> {
    let sent = match rustix::io::retry_on_intr(|| send(to, buffer.get(..count).unwrap_or_default(), SendFlags::NOSIGNAL)) {
        Ok(sent) => sent,
        Err(Errno::AGAIN) => 0,
        Err(errno) => return Err(errno),
    };
    if sent < count {
        ready.writable = false;
    }
    let mut left = sent;
    while left > 0 {
        let room = buffer.get_mut(..left).ok_or(Errno::INVAL)?;
        match rustix::io::retry_on_intr(|| recv(from, &mut *room, RecvFlags::TRUNC))? {
            (0, _) => return Err(Errno::CONNRESET),
            (count, _) => left = left.saturating_sub(count),
        }
    }
    Ok(sent)
}

fn hand_on_end(to: &OwnedFd) -> Result<(), Errno> {
    match shutdown(to, Shutdown::Write) {
        // The other side is closed already.
        Err(Errno::NOTCONN) => Ok(()),
        other => other,
    }
}
