//! Connects to a peer: non-blocking connects to its addresses, each with a short head start
//! (RFC 8305), until one answers. Where all that may be tried at once are silent, the first
//! of them goes to the end of the list.
//!
//! Dials only the addresses that it is given, each of which was decided on before. It resolves no
//! name.

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

/// The delay before the next address is tried in parallel.
const HEAD_START: Duration = Duration::from_millis(250);
/// A peer that has not answered within this time is unreachable.
const DIAL_TIMEOUT: Duration = Duration::from_secs(30);
/// Addresses tried in parallel.
const MAX_CONCURRENT_DIALS: usize = 2;
/// How long an address is tried while others wait: its second SYN, after 1 s, can be answered.
const TURN: Duration = Duration::from_secs(2);

/// A socket for the next dial, created while the gate is idle.
#[derive(Default)]
pub(crate) struct PreparedSocket {
    wanted: Option<AddressFamily>,
    socket: Option<(AddressFamily, OwnedFd)>,
}

impl PreparedSocket {
    /// The prepared socket where it has this family, else a new one.
    fn take(&mut self, family: AddressFamily) -> Result<OwnedFd, Errno> {
        self.wanted = Some(family);
        match self.socket.take_if(|(of, _)| *of == family) {
            Some((_, socket)) => Ok(socket),
            None => stream(family),
        }
    }

    /// A dial has used it.
    pub(crate) fn is_wanted(&self) -> bool {
        self.wanted.is_some()
    }

    /// Creates another of the family that was used last.
    pub(crate) fn refill(&mut self) {
        let Some(family) = self.wanted.take() else { return };
        // On failure the next dial creates a socket itself and gets the error.
        self.socket = stream(family).ok().map(|socket| (family, socket));
    }
}

/// One peer being dialled.
pub(crate) struct Dial {
    waiting: VecDeque<SocketAddr>,
    /// No further address will come.
    has_all: bool,
    trying: Vec<Attempt>,
    next_at: Instant,
    give_up_at: Instant,
    /// The most specific error so far.
    error: Option<(SocketAddr, Errno)>,
}

/// A connect in progress.
struct Attempt {
    socket: OwnedFd,
    address: SocketAddr,
    since: Instant,
    /// epoll reports its end.
    watched: bool,
}

/// The state of a dial.
pub(crate) enum Dialled {
    Waiting,
    Connected(OwnedFd, SocketAddr),
    /// No address could be reached; the address that failed last, if one was tried.
    Failed(Option<SocketAddr>, Errno),
}

impl Dial {
    /// `addresses` in order of preference. `has_all`: none will be added.
    pub(crate) fn start(
        addresses: Vec<SocketAddr>,
        has_all: bool,
        spare: &mut PreparedSocket,
        poll: &Poll,
        token: u64,
        now: Instant,
    ) -> (Self, Dialled) {
        let waiting = addresses.into();
        let mut dial = Dial { waiting, has_all, trying: Vec::new(), next_at: now, give_up_at: now + DIAL_TIMEOUT, error: None };
        let state = dial.advance(spare, poll, token, now);
        (dial, state)
    }

    /// Further addresses, to be tried before those that were silent.
    pub(crate) fn add(&mut self, addresses: Vec<SocketAddr>, has_all: bool) {
        self.has_all = has_all;
        addresses.into_iter().rev().for_each(|address| self.waiting.push_front(address));
    }

    /// Checks the attempts and starts those that are due.
    pub(crate) fn advance(&mut self, spare: &mut PreparedSocket, poll: &Poll, token: u64, now: Instant) -> Dialled {
        loop {
            if let Some(Attempt { socket, address, .. }) = self.settle() {
                return Dialled::Connected(socket, address);
            }
            let is_full = self.trying.len() >= MAX_CONCURRENT_DIALS;
            let has_room = !is_full || self.trying.first().is_some_and(|first| now >= first.since + TURN);
            let due = self.trying.is_empty() || (now >= self.next_at && has_room);
            if !due || self.waiting.is_empty() {
                break;
            }
            if is_full {
                let Attempt { address, .. } = self.trying.remove(0);
                self.waiting.push_back(address);
            }
            if let Some(address) = self.waiting.pop_front() {
                match attempt(address, spare) {
                    Ok(socket) => self.trying.push(Attempt { socket, address, since: now, watched: false }),
                    Err(errno) => self.remember(address, errno),
                }
                self.next_at = now + HEAD_START;
            }
        }
        self.watch(poll, token);
        if self.trying.is_empty() {
            if !self.has_all && now < self.give_up_at {
                return Dialled::Waiting;
            }
            return match self.error {
                Some((address, errno)) => Dialled::Failed(Some(address), errno),
                None => Dialled::Failed(None, Errno::ADDRNOTAVAIL),
            };
        }
        if now >= self.give_up_at {
            return Dialled::Failed(self.address(), Errno::TIMEDOUT);
        }
        Dialled::Waiting
    }

    /// An address that has not answered so far.
    pub(crate) fn address(&self) -> Option<SocketAddr> {
        self.trying.first().map(|attempt| attempt.address)
    }

    /// Takes out the attempt that succeeded, and drops those that failed.
    fn settle(&mut self) -> Option<Attempt> {
        let mut index = 0;
        while let Some(Attempt { socket, address, .. }) = self.trying.get(index) {
            let address = *address;
            // A second connect returns the result of the first (connect(2)).
            match connect(socket, &address) {
                Ok(()) | Err(Errno::ISCONN) => return Some(self.trying.remove(index)),
                Err(Errno::ALREADY | Errno::INPROGRESS | Errno::INTR) => index += 1,
                Err(errno) => {
                    drop(self.trying.remove(index));
                    self.remember(address, errno);
                }
            }
        }
        None
    }

    /// Watches the attempts without an answer. Peers on this host have answered already, and
    /// each earlier system call delays the program.
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
        // A refusal is more specific than a missing route of the other family.
        if self.error.is_none() || !matches!(errno, Errno::NETUNREACH | Errno::AFNOSUPPORT) {
            self.error = Some((address, errno));
        }
    }
}

/// Sends the delayed ACK to a peer at once, unless the kernel has sent it already.
pub(crate) fn acknowledge(socket: &OwnedFd) {
    let _set = sockopt::set_tcp_quickack(socket, true);
}

fn stream(family: AddressFamily) -> Result<OwnedFd, Errno> {
    let socket = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)?;
    sockopt::set_tcp_nodelay(&socket, true)?;
    // The ACK waits until the program knows of the connection: it would wake up a peer on this
    // host, on the CPU that the program waits for.
    sockopt::set_tcp_quickack(&socket, false)?;
    Ok(socket)
}

fn attempt(address: SocketAddr, spare: &mut PreparedSocket) -> Result<OwnedFd, Errno> {
    let socket = spare.take(family(address))?;
    match connect(&socket, &address) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(socket),
        Err(errno) => Err(errno),
    }
}
