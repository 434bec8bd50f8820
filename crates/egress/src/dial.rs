//! Reaching a peer: non-blocking connects to its addresses, one after the other with a
//! short head start each (RFC 8305), until one answers.
//!
//! Dials only addresses that it is given: each was decided on before. No name is seen here.

use std::{
    collections::VecDeque,
    net::SocketAddr,
    time::{Duration, Instant},
};

use rustix::{
    fd::OwnedFd,
    io::Errno,
    net::{AddressFamily, SocketFlags, SocketType, connect, socket_with, sockopt},
};

use crate::{poll::Poll, resolve::family};

/// After this long the next address is tried beside the first.
const HEAD_START: Duration = Duration::from_millis(250);
/// After this long a peer counts as not answering.
const PATIENCE: Duration = Duration::from_secs(30);
/// Addresses tried at the same time.
const MOST_AT_ONCE: usize = 2;

/// A socket for the next dial, made while no program waits for it.
#[derive(Default)]
pub(crate) struct Spare {
    wanted: Option<AddressFamily>,
    socket: Option<(AddressFamily, OwnedFd)>,
}

impl Spare {
    /// The spare one where it is of this family, else a new one.
    fn take(&mut self, family: AddressFamily) -> Result<OwnedFd, Errno> {
        self.wanted = Some(family);
        match self.socket.take_if(|(of, _)| *of == family) {
            Some((_, socket)) => Ok(socket),
            None => stream(family),
        }
    }

    /// It was used up.
    pub(crate) fn is_wanted(&self) -> bool {
        self.wanted.is_some()
    }

    /// Makes one again, of the family that was wanted last.
    pub(crate) fn refill(&mut self) {
        let Some(family) = self.wanted.take() else { return };
        // Without one the next dial makes its own, and hears why it cannot.
        self.socket = stream(family).ok().map(|socket| (family, socket));
    }
}

/// One peer being dialled.
pub(crate) struct Dial {
    waiting: VecDeque<SocketAddr>,
    trying: Vec<Attempt>,
    next_at: Instant,
    give_up_at: Instant,
    /// The most telling error so far.
    error: Option<(SocketAddr, Errno)>,
}

/// A connect that was begun.
struct Attempt {
    socket: OwnedFd,
    address: SocketAddr,
    /// We are told when it has ended.
    watched: bool,
}

/// How it goes.
pub(crate) enum Dialled {
    Waiting,
    Connected(OwnedFd, SocketAddr),
    /// Nobody could be reached; the address that failed last, if one was tried.
    Failed(Option<SocketAddr>, Errno),
}

impl Dial {
    /// `addresses` in order of preference.
    pub(crate) fn start(addresses: Vec<SocketAddr>, spare: &mut Spare, poll: &Poll, token: u64, now: Instant) -> (Self, Dialled) {
        let mut dial = Dial { waiting: addresses.into(), trying: Vec::new(), next_at: now, give_up_at: now + PATIENCE, error: None };
        let state = dial.advance(spare, poll, token, now);
        (dial, state)
    }

    /// Looks how the attempts stand and begins those that are due.
    pub(crate) fn advance(&mut self, spare: &mut Spare, poll: &Poll, token: u64, now: Instant) -> Dialled {
        loop {
            if let Some(Attempt { socket, address, .. }) = self.settle() {
                return Dialled::Connected(socket, address);
            }
            let due = self.trying.is_empty() || (now >= self.next_at && self.trying.len() < MOST_AT_ONCE);
            if !due || self.waiting.is_empty() {
                break;
            }
            if let Some(address) = self.waiting.pop_front() {
                match attempt(address, spare) {
                    Ok(socket) => self.trying.push(Attempt { socket, address, watched: false }),
                    Err(errno) => self.remember(address, errno),
                }
                self.next_at = now + HEAD_START;
            }
        }
        self.watch(poll, token);
        if self.trying.is_empty() {
            return match self.error {
                Some((address, errno)) => Dialled::Failed(Some(address), errno),
                None => Dialled::Failed(None, Errno::ADDRNOTAVAIL),
            };
        }
        if now >= self.give_up_at {
            return Dialled::Failed(self.trying.first().map(|attempt| attempt.address), Errno::TIMEDOUT);
        }
        Dialled::Waiting
    }

    /// Takes out the attempt that succeeded, and drops those that failed.
    fn settle(&mut self) -> Option<Attempt> {
        let mut index = 0;
        while let Some(Attempt { socket, address, .. }) = self.trying.get(index) {
            let address = *address;
            // Asking once more tells how the first connect went (connect(2)).
            match connect(socket, &address) {
                Ok(()) | Err(Errno::ISCONN) => return Some(self.trying.swap_remove(index)),
                Err(Errno::ALREADY | Errno::INPROGRESS | Errno::INTR) => index += 1,
                Err(errno) => {
                    drop(self.trying.remove(index));
                    self.remember(address, errno);
                }
            }
        }
        None
    }

    /// Watches the attempts that no answer has come to yet: who is on this host has answered
    /// by now, and the program waits for every call that is made before.
    fn watch(&mut self, poll: &Poll, token: u64) {
        let mut index = 0;
        while let Some(attempt) = self.trying.get_mut(index) {
            match if attempt.watched { Ok(()) } else { poll.watch(&attempt.socket, token) } {
                Ok(()) => {
                    attempt.watched = true;
                    index += 1;
                }
                Err(errno) => {
                    let Attempt { address, .. } = self.trying.remove(index);
                    self.remember(address, errno);
                }
            }
        }
    }

    fn remember(&mut self, address: SocketAddr, errno: Errno) {
        // A refusal says more than a missing route of the other family.
        if self.error.is_none() || !matches!(errno, Errno::NETUNREACH | Errno::AFNOSUPPORT) {
            self.error = Some((address, errno));
        }
    }
}

/// Tells a peer that its answer has come, unless the kernel has told it meanwhile: it waits
/// for no more than a fraction of a second.
pub(crate) fn acknowledge(socket: &OwnedFd) {
    let _set = sockopt::set_tcp_quickack(socket, true);
}

fn stream(family: AddressFamily) -> Result<OwnedFd, Errno> {
    let socket = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)?;
    sockopt::set_tcp_nodelay(&socket, true)?;
    // The peer's answer is enough for us: it hears that we have it when the program knows.
    // A peer on this host would wake up by it, on the processor that the program waits for.
    sockopt::set_tcp_quickack(&socket, false)?;
    Ok(socket)
}

fn attempt(address: SocketAddr, spare: &mut Spare) -> Result<OwnedFd, Errno> {
    let socket = spare.take(family(address))?;
    match connect(&socket, &address) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(socket),
        Err(errno) => Err(errno),
    }
}
