//! From names to addresses on the host's side: its `/etc/hosts`, then the name servers of
//! its `/etc/resolv.conf`, over UDP and, where an answer does not fit, TCP.
//!
//! Not getaddrinfo: in a static program that would load plug-ins, and it blocks. What
//! nsswitch.conf names beyond files and DNS (mDNS, LDAP) is not asked. Both files are
//! read once, before the gate confines itself. Answers are not kept: each connection is
//! decided on the addresses that it dials.

mod wire;

use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    time::{Duration, Instant},
};

use rustix::{
    fd::OwnedFd,
    io::Errno,
    net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, connect, recv, send, socket_with},
};

use crate::poll::Poll;
use wire::{Answer, Kind};

/// Name servers used (`MAXNS` of resolv.conf(5)).
const MOST_SERVERS: usize = 3;
const MOST_SEARCHED: usize = 6;
/// Addresses given for one name.
const MOST_ADDRESSES: usize = 16;
const DNS: u16 = 53;

/// How this host finds addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resolver {
    hosts: BTreeMap<String, Vec<IpAddr>>,
    servers: Vec<SocketAddr>,
    search: Vec<String>,
    patience: Duration,
    attempts: u32,
}

/// Reads bytes as a name server's answer to a question for `name`, as a look-up does. For
/// tests that feed it with anything. `None`: it would be ignored.
pub fn read_answer(bytes: &[u8], name: &str, v6: bool) -> Option<Vec<IpAddr>> {
    let kind = if v6 { Kind::V6 } else { Kind::V4 };
    let id = bytes.first_chunk().map_or(0, |id| u16::from_be_bytes(*id));
    match wire::answer(bytes, &wire::question(id, name, kind)?, kind)? {
        Answer::Addresses(addresses) => Some(addresses),
        Answer::NoSuchName | Answer::Cut | Answer::Failed => Some(Vec::new()),
    }
}

/// Why there is no address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResolveError {
    /// There is no such name.
    NoSuchName,
    /// It has no address.
    NoAddress,
    /// The servers failed to answer.
    Failed,
    /// Nobody answered in time.
    TimedOut,
}

impl Resolver {
    /// From the texts of `/etc/hosts` (hosts(5)) and `/etc/resolv.conf` (resolv.conf(5)).
    /// What makes no sense in them is passed over, as glibc does.
    pub fn new(hosts: &str, resolv: &str) -> Self {
        let mut resolver =
            Resolver { hosts: BTreeMap::new(), servers: Vec::new(), search: Vec::new(), patience: Duration::from_secs(5), attempts: 2 };
        for line in hosts.lines() {
            let mut words = line.split('#').next().unwrap_or_default().split_ascii_whitespace();
            if let Some(address) = words.next().and_then(parse_address) {
                for name in words {
                    resolver.hosts.entry(name.to_ascii_lowercase()).or_default().push(address.ip());
                }
            }
        }
        for line in resolv.lines() {
            let mut words = line.split(['#', ';']).next().unwrap_or_default().split_ascii_whitespace();
            match words.next() {
                Some("nameserver") if resolver.servers.len() < MOST_SERVERS => {
                    resolver.servers.extend(words.next().and_then(parse_address))
                }
                Some("search" | "domain") => {
                    resolver.search = words.take(MOST_SEARCHED).map(|word| word.trim_matches('.').to_ascii_lowercase()).collect();
                }
                Some("options") => words.for_each(|option| resolver.option(option)),
                _ => {}
            }
        }
        if resolver.servers.is_empty() {
            resolver.servers.push(SocketAddr::from((Ipv4Addr::LOCALHOST, DNS)));
        }
        resolver
    }

    fn option(&mut self, option: &str) {
        match option.split_once(':').map(|(key, value)| (key, value.parse::<u32>())) {
            Some(("timeout", Ok(seconds))) => self.patience = Duration::from_secs(u64::from(seconds.clamp(1, 30))),
            Some(("attempts", Ok(attempts))) => self.attempts = attempts.clamp(1, 5),
            _ => {}
        }
    }

    /// The names to ask for: one without a dot is first sought in the host's own domains.
    fn candidates(&self, name: &str) -> Vec<String> {
        let mut names: Vec<String> = Vec::new();
        if !name.contains('.') {
            names.extend(self.search.iter().filter(|domain| !domain.is_empty()).map(|domain| format!("{name}.{domain}")));
        }
        names.push(name.to_owned());
        names
    }
}

/// An address, of a link if it is written so (`fe80::1%2`, by number).
fn parse_address(word: &str) -> Option<SocketAddr> {
    let (address, link) = word.split_once('%').map_or((word, None), |(address, link)| (address, Some(link)));
    let mut address = SocketAddr::new(address.parse().ok()?, DNS);
    if let (SocketAddr::V6(address), Some(link)) = (&mut address, link) {
        address.set_scope_id(link.parse().ok()?);
    }
    Some(address)
}

/// A question that waits for its answer.
struct Question {
    kind: Kind,
    bytes: Vec<u8>,
    state: State,
}

enum State {
    /// Sent over the lookup's UDP socket.
    Asked,
    /// Over a connection: what is still to send, what has come.
    Connected {
        socket: OwnedFd,
        unsent: Vec<u8>,
        received: Vec<u8>,
    },
    Answered(Answer),
}

/// One name being looked up.
pub(crate) struct Lookup {
    /// Names still to try, the current one last.
    names: Vec<String>,
    /// Server and attempt, counted through.
    turn: usize,
    socket: Option<OwnedFd>,
    questions: Vec<Question>,
    retry_at: Instant,
}

/// How a lookup goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    Waiting,
    Done(Result<Vec<IpAddr>, ResolveError>),
}

impl Lookup {
    /// Begins; its sockets are watched under `token`. A name of `/etc/hosts` needs none.
    pub(crate) fn start(resolver: &Resolver, name: &str, poll: &Poll, token: u64, now: Instant) -> (Self, Progress) {
        let mut names = resolver.candidates(name);
        names.reverse();
        let mut lookup = Lookup { names, turn: 0, socket: None, questions: Vec::new(), retry_at: now };
        if let Some(known) = resolver.hosts.get(name) {
            return (lookup, Progress::Done(Ok(known.clone())));
        }
        let progress = lookup.ask(resolver, poll, token, now);
        (lookup, progress)
    }

    /// Asks the current server, or the next ones where that cannot even be sent to.
    fn ask(&mut self, resolver: &Resolver, poll: &Poll, token: u64, now: Instant) -> Progress {
        if self.questions.is_empty() {
            for kind in [Kind::V4, Kind::V6] {
                let question = self.names.last().and_then(|name| wire::question(0, name, kind));
                let Some(bytes) = question else { return Progress::Done(Err(ResolveError::NoSuchName)) };
                self.questions.push(Question { kind, bytes, state: State::Asked });
            }
        }
        let turns = resolver.servers.len() * resolver.attempts as usize;
        while self.turn < turns {
            let server = resolver.servers.get(self.turn % resolver.servers.len()).copied();
            if server.is_some_and(|server| self.send_to(server, poll, token).is_ok()) {
                self.retry_at = now + resolver.patience;
                return Progress::Waiting;
            }
            self.turn += 1;
        }
        Progress::Done(Err(ResolveError::TimedOut))
    }

    fn send_to(&mut self, server: SocketAddr, poll: &Poll, token: u64) -> Result<(), Errno> {
        // A new socket each time: a random port of the kernel's choice, and a peer that
        // the kernel checks.
        let socket = socket_with(family(server), SocketType::DGRAM, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)?;
        connect(&socket, &server)?;
        for question in &mut self.questions {
            if matches!(question.state, State::Answered(Answer::Addresses(_) | Answer::NoSuchName)) {
                continue;
            }
            if let Some(id) = question.bytes.get_mut(..2) {
                id.copy_from_slice(&random()?);
            }
            send(&socket, &question.bytes, SendFlags::NOSIGNAL)?;
            question.state = State::Asked;
        }
        poll.watch(&socket, token)?;
        self.socket = Some(socket);
        Ok(())
    }

    /// Reads whatever has come.
    pub(crate) fn progress(&mut self, resolver: &Resolver, poll: &Poll, token: u64, now: Instant) -> Progress {
        let mut buffer = [0u8; 4096];
        let mut unreachable = false;
        while let Some(socket) = &self.socket {
            match recv(socket, &mut buffer, RecvFlags::empty()) {
                Ok((count, _)) => self.take(buffer.get(..count).unwrap_or_default()),
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => {}
                Err(_) => {
                    // Nobody listens there.
                    unreachable = true;
                    break;
                }
            }
        }
        let server = resolver.servers.get(self.turn % resolver.servers.len().max(1)).copied();
        for question in &mut self.questions {
            if question.state.is_cut() && server.is_none_or(|server| question.connect(server, poll, token).is_err()) {
                question.state = State::Answered(Answer::Failed);
            }
            question.converse();
        }
        let answered = self.questions.iter().all(|question| matches!(question.state, State::Answered(_)));
        let failed = self.questions.iter().any(|question| matches!(question.state, State::Answered(Answer::Failed)));
        if unreachable || (answered && failed && self.addresses().is_empty()) {
            return self.next_server(resolver, poll, token, now);
        }
        if answered { self.conclude(resolver, poll, token, now) } else { Progress::Waiting }
    }

    /// Tries again, elsewhere, where the time is up.
    pub(crate) fn tick(&mut self, resolver: &Resolver, poll: &Poll, token: u64, now: Instant) -> Progress {
        if now < self.retry_at {
            return Progress::Waiting;
        }
        // One family's answer is better than none.
        if !self.addresses().is_empty() {
            return Progress::Done(Ok(self.addresses()));
        }
        self.next_server(resolver, poll, token, now)
    }

    fn next_server(&mut self, resolver: &Resolver, poll: &Poll, token: u64, now: Instant) -> Progress {
        let failed = self.questions.iter().any(|question| matches!(question.state, State::Answered(Answer::Failed)));
        self.turn += 1;
        self.socket = None;
        match self.ask(resolver, poll, token, now) {
            Progress::Done(Err(ResolveError::TimedOut)) if failed => Progress::Done(Err(ResolveError::Failed)),
            other => other,
        }
    }

    /// Finds the question that a datagram answers.
    fn take(&mut self, bytes: &[u8]) {
        for question in &mut self.questions {
            if matches!(question.state, State::Asked)
                && let Some(answer) = wire::answer(bytes, &question.bytes, question.kind)
            {
                question.state = State::Answered(answer);
                return;
            }
        }
    }

    fn addresses(&self) -> Vec<IpAddr> {
        let found = |question: &Question| match &question.state {
            State::Answered(Answer::Addresses(addresses)) => addresses.clone(),
            _ => Vec::new(),
        };
        // By turns, so that a broken family costs one attempt (RFC 8305).
        let mut lists: Vec<_> = self.questions.iter().rev().map(|question| found(question).into_iter()).collect();
        let mut out = Vec::new();
        loop {
            let before = out.len();
            out.extend(lists.iter_mut().filter_map(Iterator::next));
            if out.len() == before || out.len() >= MOST_ADDRESSES {
                out.truncate(MOST_ADDRESSES);
                return out;
            }
        }
    }

    fn conclude(&mut self, resolver: &Resolver, poll: &Poll, token: u64, now: Instant) -> Progress {
        let addresses = self.addresses();
        if !addresses.is_empty() {
            return Progress::Done(Ok(addresses));
        }
        let exists = self.questions.iter().any(|question| matches!(question.state, State::Answered(Answer::Addresses(_))));
        if self.names.len() > 1 {
            self.names.pop();
            self.questions.clear();
            self.turn = 0;
            return self.ask(resolver, poll, token, now);
        }
        Progress::Done(Err(if exists { ResolveError::NoAddress } else { ResolveError::NoSuchName }))
    }
}

impl State {
    fn is_cut(&self) -> bool {
        matches!(self, State::Answered(Answer::Cut))
    }
}

impl Question {
    /// Asks again over TCP.
    fn connect(&mut self, server: SocketAddr, poll: &Poll, token: u64) -> Result<(), Errno> {
        let socket = socket_with(family(server), SocketType::STREAM, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)?;
        match connect(&socket, &server) {
            Ok(()) | Err(Errno::INPROGRESS) => {}
            Err(errno) => return Err(errno),
        }
        poll.watch(&socket, token)?;
        let length = u16::try_from(self.bytes.len()).unwrap_or(u16::MAX);
        let mut unsent = length.to_be_bytes().to_vec();
        unsent.extend_from_slice(&self.bytes);
        self.state = State::Connected { socket, unsent, received: Vec::new() };
        Ok(())
    }

    /// Sends and receives what is possible now.
    fn converse(&mut self) {
        let State::Connected { socket, unsent, received } = &mut self.state else { return };
        match exchange(socket, unsent, received) {
            Ok(false) => {}
            Ok(true) => {
                let answer = received.get(2..).and_then(|bytes| wire::answer(bytes, &self.bytes, self.kind));
                // Cut over TCP too: nothing more to be had.
                self.state = State::Answered(answer.filter(|answer| *answer != Answer::Cut).unwrap_or(Answer::Failed));
            }
            Err(_) => self.state = State::Answered(Answer::Failed),
        }
    }
}

/// True when one whole message has come.
fn exchange(socket: &OwnedFd, unsent: &mut Vec<u8>, received: &mut Vec<u8>) -> Result<bool, Errno> {
    while !unsent.is_empty() {
        match send(socket, unsent, SendFlags::NOSIGNAL) {
            Ok(count) => drop(unsent.drain(..count)),
            // Not connected yet, or full.
            Err(Errno::AGAIN | Errno::NOTCONN) => return Ok(false),
            Err(errno) => return Err(errno),
        }
    }
    let mut buffer = [0u8; 2048];
    loop {
        match recv(socket, &mut buffer, RecvFlags::empty()) {
            Ok((0, _)) => return Err(Errno::CONNRESET),
            Ok((count, _)) => received.extend_from_slice(buffer.get(..count).unwrap_or_default()),
            Err(Errno::AGAIN) => return Ok(false),
            Err(errno) => return Err(errno),
        }
        let whole = received.first_chunk().map(|length| usize::from(u16::from_be_bytes(*length)) + 2);
        if whole.is_some_and(|whole| received.len() >= whole) {
            return Ok(true);
        }
    }
}

pub(crate) fn family(address: SocketAddr) -> AddressFamily {
    if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 }
}

/// Bytes that a stranger cannot guess.
fn random() -> Result<[u8; 2], Errno> {
    let mut bytes = [0u8; 2];
    match rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())? {
        2 => Ok(bytes),
        _ => Err(Errno::AGAIN),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use super::*;

    #[test]
    fn the_hosts_own_files_are_read_as_libc_reads_them() {
        let hosts = "127.0.0.1 localhost\n10.0.5.7\tapi.internal API2 # api3\n::1 localhost\nnonsense api4\n#10.0.0.1 api5\n";
        let resolv = "; comment\nsearch corp.example. lan\nnameserver 127.0.0.53\nnameserver fe80::1%2\nnameserver x\noptions timeout:2 attempts:9 ndots:1\n";
        let resolver = Resolver::new(hosts, resolv);
        assert_eq!(resolver.hosts["localhost"].len(), 2);
        assert_eq!(resolver.hosts["api2"], ["10.0.5.7".parse::<IpAddr>().unwrap()]);
        assert!(["api3", "api4", "api5"].iter().all(|name| !resolver.hosts.contains_key(*name)));
        let servers: Vec<String> = resolver.servers.iter().map(ToString::to_string).collect();
        assert_eq!(servers, ["127.0.0.53:53", "[fe80::1%2]:53"]);
        assert_eq!((resolver.patience.as_secs(), resolver.attempts), (2, 5));
        assert_eq!(resolver.candidates("registry"), ["registry.corp.example", "registry.lan", "registry"]);
        assert_eq!(resolver.candidates("a.b"), ["a.b"]);
    }

    #[test]
    fn without_a_name_server_the_local_one_is_asked() {
        assert_eq!(Resolver::new("", "").servers, ["127.0.0.1:53".parse().unwrap()]);
    }
}
