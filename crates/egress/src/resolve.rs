//! Resolves names on the host's side: `/etc/hosts`, then the name servers of `/etc/resolv.conf`,
//! over UDP and, where an answer does not fit, TCP.
//!
//! Not getaddrinfo: it blocks, and loads plug-ins in a static program. Other sources of
//! nsswitch.conf (mDNS, LDAP) are not asked. Both files are read once, before the lockdown. The
//! addresses of one family do not wait for those of the other (RFC 8305, 3). A server that was
//! silent is asked last for a while. No answer is kept here.

mod answer;

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

use crate::{dns, poll::Poll};
use answer::{Kind, UpstreamAnswer};

/// Name servers used (`MAXNS` of resolv.conf(5)).
const MAX_SERVERS: usize = 3;
const MAX_SEARCH_DOMAINS: usize = 6;
/// Addresses given for one name.
const MAX_ADDRESSES: usize = 16;
const DNS: u16 = 53;
/// How long the addresses of one family wait for the other's.
const RESOLUTION_DELAY: Duration = Duration::from_millis(50);
/// How long a server that was silent is asked last.
const SHUNNED: Duration = Duration::from_secs(30);

/// How this host finds addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resolver {
    hosts: BTreeMap<String, Vec<IpAddr>>,
    servers: Vec<SocketAddr>,
    search: Vec<String>,
    patience: Duration,
    attempts: u32,
    /// Servers that did not answer, and until when they are asked last.
    shunned: BTreeMap<SocketAddr, Instant>,
}

/// Reads bytes as a name server's answer to a query for `name`, for fuzz tests. `None`: a
/// lookup would ignore it.
pub fn read_answer(bytes: &[u8], name: &str, v6: bool) -> Option<Vec<IpAddr>> {
    let kind = if v6 { Kind::V6 } else { Kind::V4 };
    let id = bytes.first_chunk().map_or(0, |id| u16::from_be_bytes(*id));
    match answer::read(bytes, &answer::query(id, name, kind)?, kind)? {
        UpstreamAnswer::Addresses(addresses) => Some(addresses),
        UpstreamAnswer::NoSuchName | UpstreamAnswer::Cut | UpstreamAnswer::Failed => Some(Vec::new()),
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
    /// No server answered in time.
    TimedOut,
}

impl Resolver {
    /// From the texts of `/etc/hosts` (hosts(5)) and `/etc/resolv.conf` (resolv.conf(5)).
    /// Malformed lines are skipped, as glibc does.
    pub fn new(hosts: &str, resolv: &str) -> Self {
        let mut resolver = Resolver {
            hosts: BTreeMap::new(),
            servers: Vec::new(),
            search: Vec::new(),
            patience: Duration::from_secs(5),
            attempts: 2,
            shunned: BTreeMap::new(),
        };
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
                Some("nameserver") if resolver.servers.len() < MAX_SERVERS => resolver.servers.extend(words.next().and_then(parse_address)),
                Some("search" | "domain") => {
                    resolver.search = words.take(MAX_SEARCH_DOMAINS).map(|word| word.trim_matches('.').to_ascii_lowercase()).collect();
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

    /// The servers as they are asked: those that were silent last.
    fn servers_in_order(&self, now: Instant) -> Vec<SocketAddr> {
        let is_shunned = |server: &SocketAddr| self.shunned.get(server).is_some_and(|until| now < *until);
        let (last, mut order): (Vec<_>, Vec<_>) = self.servers.iter().copied().partition(is_shunned);
        order.extend(last);
        order
    }

    /// The names to query: one without a dot is first tried in the search domains.
    fn candidates(&self, name: &str) -> Vec<String> {
        let mut names: Vec<String> = Vec::new();
        if !name.contains('.') {
            names.extend(self.search.iter().filter(|domain| !domain.is_empty()).map(|domain| format!("{name}.{domain}")));
        }
        names.push(name.to_owned());
        names
    }
}

/// An address, with the number of its link if there is one (`fe80::1%2`).
fn parse_address(word: &str) -> Option<SocketAddr> {
    let (address, link) = word.split_once('%').map_or((word, None), |(address, link)| (address, Some(link)));
    let mut address = SocketAddr::new(address.parse().ok()?, DNS);
    if let (SocketAddr::V6(address), Some(link)) = (&mut address, link) {
        address.set_scope_id(link.parse().ok()?);
    }
    Some(address)
}

/// A query and its answer.
struct UpstreamQuery {
    kind: Kind,
    bytes: Vec<u8>,
    state: State,
}

enum State {
    /// Sent over the UDP socket of the lookup.
    Asked,
    /// Over TCP, with the bytes to send and those received.
    Connected {
        socket: OwnedFd,
        unsent: Vec<u8>,
        received: Vec<u8>,
    },
    Answered(UpstreamAnswer),
}

/// A lookup of one name.
pub(crate) struct Lookup {
    /// Names still to try, the current one last.
    names: Vec<String>,
    /// The servers in the order in which they are asked.
    servers: Vec<SocketAddr>,
    /// Number of the attempt, over all servers.
    turn: usize,
    /// It has answered in this attempt.
    heard: bool,
    /// When the first addresses came.
    first_at: Option<Instant>,
    /// They were passed on.
    passed_on: bool,
    socket: Option<OwnedFd>,
    queries: Vec<UpstreamQuery>,
    retry_at: Instant,
}

/// The state of a lookup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    Waiting,
    /// Addresses of one family; the other's may come, and then all are part of the result. Once.
    Found(Vec<IpAddr>),
    Done(Result<Vec<IpAddr>, ResolveError>),
}

impl Lookup {
    /// Starts a lookup, with its sockets watched under `token`. A name of `/etc/hosts` is done
    /// at once.
    pub(crate) fn start(resolver: &mut Resolver, name: &str, poll: &Poll, token: u64, now: Instant) -> (Self, Progress) {
        let mut names = resolver.candidates(name);
        names.reverse();
        let servers = resolver.servers_in_order(now);
        let (socket, queries) = (None, Vec::new());
        let mut lookup = Lookup { names, servers, turn: 0, heard: false, first_at: None, passed_on: false, socket, queries, retry_at: now };
        if let Some(known) = resolver.hosts.get(name) {
            return (lookup, Progress::Done(Ok(known.clone())));
        }
        let progress = lookup.ask(resolver, poll, token, now);
        (lookup, progress)
    }

    /// Sends to the current server, or to the next one where sending fails.
    fn ask(&mut self, resolver: &Resolver, poll: &Poll, token: u64, now: Instant) -> Progress {
        if self.queries.is_empty() {
            for kind in [Kind::V4, Kind::V6] {
                let question = self.names.last().and_then(|name| answer::query(0, name, kind));
                let Some(bytes) = question else { return Progress::Done(Err(ResolveError::NoSuchName)) };
                self.queries.push(UpstreamQuery { kind, bytes, state: State::Asked });
            }
        }
        let turns = self.servers.len() * resolver.attempts as usize;
        while self.turn < turns {
            if self.server().is_some_and(|server| self.send_to(server, poll, token).is_ok()) {
                self.retry_at = now + resolver.patience;
                return Progress::Waiting;
            }
            self.turn += 1;
        }
        Progress::Done(Err(ResolveError::TimedOut))
    }

    /// The server that is asked.
    fn server(&self) -> Option<SocketAddr> {
        self.servers.get(self.turn.checked_rem(self.servers.len())?).copied()
    }

    fn send_to(&mut self, server: SocketAddr, poll: &Poll, token: u64) -> Result<(), Errno> {
        self.heard = false;
        // A new socket each time: the kernel chooses a random port and checks the peer.
        let socket = socket_with(family(server), SocketType::DGRAM, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)?;
        connect(&socket, &server)?;
        for question in &mut self.queries {
            if matches!(question.state, State::Answered(UpstreamAnswer::Addresses(_) | UpstreamAnswer::NoSuchName)) {
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

    /// Reads all answers.
    pub(crate) fn progress(&mut self, resolver: &mut Resolver, poll: &Poll, token: u64, now: Instant) -> Progress {
        let mut buffer = [0u8; 4096];
        let mut unreachable = false;
        while let Some(socket) = &self.socket {
            match recv(socket, &mut buffer, RecvFlags::empty()) {
                Ok((count, _)) => self.take(buffer.get(..count).unwrap_or_default()),
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => {}
                Err(_) => {
                    // No server listens there.
                    unreachable = true;
                    break;
                }
            }
        }
        let server = self.server();
        for question in &mut self.queries {
            if question.state.is_cut() && server.is_none_or(|server| question.connect(server, poll, token).is_err()) {
                question.state = State::Answered(UpstreamAnswer::Failed);
            }
            question.converse();
        }
        let answered = self.queries.iter().all(|question| matches!(question.state, State::Answered(_)));
        if let Some(server) = server.filter(|_| self.heard) {
            resolver.shunned.remove(&server);
        }
        let failed = self.queries.iter().any(|question| matches!(question.state, State::Answered(UpstreamAnswer::Failed)));
        if unreachable || (answered && failed && self.addresses().is_empty()) {
            return self.next_server(resolver, poll, token, now);
        }
        if answered { self.conclude(resolver, poll, token, now) } else { self.pass_on(now) }
    }

    /// Passes on the addresses of one family, once they have waited for the other's.
    fn pass_on(&mut self, now: Instant) -> Progress {
        let addresses = self.addresses();
        if self.passed_on || addresses.is_empty() || now < *self.first_at.get_or_insert(now) + RESOLUTION_DELAY {
            return Progress::Waiting;
        }
        self.passed_on = true;
        Progress::Found(addresses)
    }

    /// Tries the next server after a timeout.
    pub(crate) fn tick(&mut self, resolver: &mut Resolver, poll: &Poll, token: u64, now: Instant) -> Progress {
        if now < self.retry_at {
            return self.pass_on(now);
        }
        // The addresses of one family are enough.
        if !self.addresses().is_empty() {
            return Progress::Done(Ok(self.addresses()));
        }
        self.next_server(resolver, poll, token, now)
    }

    fn next_server(&mut self, resolver: &mut Resolver, poll: &Poll, token: u64, now: Instant) -> Progress {
        if let Some(server) = self.server().filter(|_| !self.heard) {
            resolver.shunned.insert(server, now + SHUNNED);
        }
        let failed = self.queries.iter().any(|question| matches!(question.state, State::Answered(UpstreamAnswer::Failed)));
        self.turn += 1;
        self.socket = None;
        match self.ask(resolver, poll, token, now) {
            Progress::Done(Err(_)) if !self.addresses().is_empty() => Progress::Done(Ok(self.addresses())),
            Progress::Done(Err(ResolveError::TimedOut)) if failed => Progress::Done(Err(ResolveError::Failed)),
            other => other,
        }
    }

    /// Finds the query that a datagram answers.
    fn take(&mut self, bytes: &[u8]) {
        for question in &mut self.queries {
            if matches!(question.state, State::Asked)
                && let Some(answer) = answer::read(bytes, &question.bytes, question.kind)
            {
                question.state = State::Answered(answer);
                self.heard = true;
                return;
            }
        }
    }

    fn addresses(&self) -> Vec<IpAddr> {
        let found = |question: &UpstreamQuery| match &question.state {
            State::Answered(UpstreamAnswer::Addresses(addresses)) => addresses.clone(),
            _ => Vec::new(),
        };
        // Alternating, so that a broken family costs one attempt (RFC 8305).
        let mut lists: Vec<_> = self.queries.iter().rev().map(|question| found(question).into_iter()).collect();
        let mut out = Vec::new();
        loop {
            let before = out.len();
            out.extend(lists.iter_mut().filter_map(Iterator::next));
            if out.len() == before || out.len() >= MAX_ADDRESSES {
                out.truncate(MAX_ADDRESSES);
                return out;
            }
        }
    }

    fn conclude(&mut self, resolver: &Resolver, poll: &Poll, token: u64, now: Instant) -> Progress {
        let addresses = self.addresses();
        if !addresses.is_empty() {
            return Progress::Done(Ok(addresses));
        }
        let exists = self.queries.iter().any(|question| matches!(question.state, State::Answered(UpstreamAnswer::Addresses(_))));
        if self.names.len() > 1 {
            self.names.pop();
            self.queries.clear();
            self.turn = 0;
            return self.ask(resolver, poll, token, now);
        }
        Progress::Done(Err(if exists { ResolveError::NoAddress } else { ResolveError::NoSuchName }))
    }
}

impl State {
    fn is_cut(&self) -> bool {
        matches!(self, State::Answered(UpstreamAnswer::Cut))
    }
}

impl UpstreamQuery {
    /// Sends the query again over TCP.
    fn connect(&mut self, server: SocketAddr, poll: &Poll, token: u64) -> Result<(), Errno> {
        let socket = socket_with(family(server), SocketType::STREAM, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)?;
        match connect(&socket, &server) {
            Ok(()) | Err(Errno::INPROGRESS) => {}
            Err(errno) => return Err(errno),
        }
        poll.watch(&socket, token)?;
        self.state = State::Connected { socket, unsent: dns::frame(&self.bytes), received: Vec::new() };
        Ok(())
    }

    /// Sends and receives without blocking.
    fn converse(&mut self) {
        let State::Connected { socket, unsent, received } = &mut self.state else { return };
        match exchange(socket, unsent, received) {
            Ok(false) => {}
            Ok(true) => {
                let answer = received.get(2..).and_then(|bytes| answer::read(bytes, &self.bytes, self.kind));
                // Truncated over TCP too.
                self.state = State::Answered(answer.filter(|answer| *answer != UpstreamAnswer::Cut).unwrap_or(UpstreamAnswer::Failed));
            }
            Err(_) => self.state = State::Answered(UpstreamAnswer::Failed),
        }
    }
}

/// True when a whole message has arrived.
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

/// Two random bytes.
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
    fn a_server_that_was_silent_is_asked_last_for_a_while() {
        let mut resolver = Resolver::new(
            "",
            "nameserver 10.0.0.1
nameserver 10.0.0.2
nameserver 10.0.0.3
",
        );
        let now = Instant::now();
        let order =
            |resolver: &Resolver, now| resolver.servers_in_order(now).iter().map(|server| server.ip().to_string()).collect::<Vec<_>>();
        resolver.shunned.insert("10.0.0.1:53".parse().unwrap(), now + SHUNNED);
        assert_eq!(order(&resolver, now), ["10.0.0.2", "10.0.0.3", "10.0.0.1"]);
        assert_eq!(order(&resolver, now + SHUNNED), ["10.0.0.1", "10.0.0.2", "10.0.0.3"]);
        for server in resolver.servers.clone() {
            resolver.shunned.insert(server, now + SHUNNED);
        }
        assert_eq!(order(&resolver, now), ["10.0.0.1", "10.0.0.2", "10.0.0.3"], "all are asked, whatever they did");
    }

    #[test]
    fn without_a_name_server_the_local_one_is_asked() {
        assert_eq!(Resolver::new("", "").servers, ["127.0.0.1:53".parse().unwrap()]);
    }
}
