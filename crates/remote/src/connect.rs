//! Connections to a service: over a UNIX socket, TCP or TLS, directly or through a proxy.
//!
//! One address gets the key: redirects are not followed, and of a UNIX socket the listener is looked
//! at first. Names, authorities and the environment's proxy are the crate `connect`'s. An answer's head
//! may have 64 KiB, and 60 s may pass without a byte of it: while a run goes on the service sends one
//! at least every 10 s.

use std::{
    io::{self, Read, Write},
    net::{Ipv4Addr, SocketAddr},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use rustix::{net::sockopt::socket_peercred, process::geteuid};
use stockade_connect::{ConnectError, GetentResolver, proxy, tls, tls_error, words_of};
use ureq::{
    Agent, Body, BodyReader, Error,
    config::Config,
    http::{Response, Uri, header},
    unversioned::{
        resolver::{ResolvedSocketAddrs, Resolver},
        transport::{
            Buffers, ConnectProxyConnector, ConnectionDetails, Connector, LazyBuffers, NextTimeout, RustlsConnector, TcpConnector,
            Transport,
        },
    },
};

use crate::{RemoteError, key, server::Address, warn};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Six times the interval at which a service says that it is there.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(60);
const MAX_HEAD_LEN: usize = 64 << 10;
const BUFFER_LEN: usize = 64 << 10;

/// A client of one service, with its key.
pub struct Client {
    address: Address,
    token: Option<String>,
    agent: Agent,
    progress: Arc<Progress>,
}

/// How far a connection came.
#[derive(Debug, Default)]
struct Progress {
    /// It stood: something may have been sent.
    connected: AtomicBool,
    /// The service took no more before all was sent.
    cut_short: AtomicBool,
}

/// The head of an answer, and the stream of its body.
pub struct Reply {
    /// The HTTP status.
    pub status: u16,
    /// The type, without its parameters.
    pub kind: String,
    /// Where another status than 200 sends a browser.
    pub location: Option<String>,
    /// Seconds after which to try again.
    pub retry_after: Option<u64>,
    /// The body.
    pub body: BodyReader<'static>,
}

impl Client {
    /// # Errors
    /// The address, the key or the certificates cannot be used.
    pub fn new(url: &str) -> Result<Self, RemoteError> {
        let address = Address::parse(url)?;
        let token = key::read()?;
        if token.is_none() && !matches!(address, Address::Unix(_)) {
            let detail = format!("a service asks for a key over TCP: set {} to the file that has its token", key::VARIABLE);
            return Err(RemoteError::Key(detail));
        }
        if address.is_open() {
            warn(&format!("stockade: {} sees the key and the code unencrypted, as does all on the way; use https", address.name()));
        }
        let progress = Arc::default();
        let agent = agent(&address, &progress)?;
        Ok(Client { address, token, agent, progress })
    }

    /// The address, for people.
    pub fn name(&self) -> String {
        self.address.name()
    }

    /// Whether a service may have seen a request.
    pub fn has_connected(&self) -> bool {
        self.progress.connected.load(Ordering::Relaxed)
    }

    /// Sends a request to run code, and waits for the head of the answer.
    ///
    /// # Errors
    /// There is no answer.
    pub fn run(&self, policy: Option<&str>, request: &[u8]) -> Result<Reply, RemoteError> {
        let query = policy.map(|policy| format!("?policy={}", percent_encoded(policy))).unwrap_or_default();
        let mut builder = self.agent.post(self.address.url(&format!("/v1/run{query}"))).content_type("application/json");
        builder = builder.header(header::ACCEPT, "application/x-ndjson");
        if let Some(token) = &self.token {
            builder = builder.header(header::AUTHORIZATION, format!("Bearer {token}"));
        }
        self.reply(builder.send(request))
    }

    /// # Errors
    /// There is no answer.
    pub fn get(&self, path: &str) -> Result<Reply, RemoteError> {
        let builder = self.agent.get(self.address.url(path)).header(header::ACCEPT, "application/x-ndjson, application/json");
        self.reply(self.with_key(builder).call())
    }

    /// # Errors
    /// There is no answer.
    pub fn delete(&self, path: &str) -> Result<Reply, RemoteError> {
        let builder = self.agent.delete(self.address.url(path));
        self.reply(self.with_key(builder).call())
    }

    fn with_key<B>(&self, builder: ureq::RequestBuilder<B>) -> ureq::RequestBuilder<B> {
        match &self.token {
            Some(token) => builder.header(header::AUTHORIZATION, format!("Bearer {token}")),
            None => builder,
        }
    }

    fn reply(&self, answered: Result<Response<Body>, Error>) -> Result<Reply, RemoteError> {
        let (head, body) = answered.map_err(|error| self.failure(error))?.into_parts();
        let text = |name: header::HeaderName| head.headers.get(name).and_then(|value| value.to_str().ok());
        Ok(Reply {
            status: head.status.as_u16(),
            kind: text(header::CONTENT_TYPE).unwrap_or_default().split(';').next().unwrap_or_default().trim().to_ascii_lowercase(),
            location: text(header::LOCATION).map(str::to_owned),
            retry_after: text(header::RETRY_AFTER).and_then(|seconds| seconds.parse().ok()),
            body: body.into_reader(),
        })
    }

    /// What went wrong before there was a head.
    fn failure(&self, error: Error) -> RemoteError {
        let server = self.name();
        let error = match error {
            Error::Other(other) => match other.downcast::<RemoteError>() {
                Ok(own) => return *own,
                Err(other) => Error::Other(other),
            },
            error => error,
        };
        let why = words_of(&error, SILENCE_TIMEOUT);
        if !self.has_connected() || matches!(error, Error::ConnectProxyFailed(_)) {
            return match tls_error(&error) {
                Some(error @ rustls::Error::InvalidCertificate(_)) => RemoteError::Tls { server, why: error.to_string() },
                Some(error) => RemoteError::Unreachable { server, why: format!("no TLS is spoken there: {error}") },
                None => RemoteError::Unreachable { server, why },
            };
        }
        match error {
            Error::Io(_) | Error::Timeout(_) | Error::ConnectionFailed | Error::BodyStalled => {
                // It starts nothing of which it has not got all.
                let started = !self.progress.cut_short.load(Ordering::Relaxed);
                RemoteError::Lost { server, why, started }
            }
            _ => RemoteError::Answer { server, what: why, started: true },
        }
    }
}

/// As a value in a query.
fn percent_encoded(text: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~' | b'/');
    text.bytes().map(|byte| if is_plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") }).collect()
}

fn agent(address: &Address, progress: &Arc<Progress>) -> Result<Agent, RemoteError> {
    let noted = |authority: &str| NotedConnector { authority: authority.to_owned(), progress: Arc::clone(progress) };
    let patient = PatientConnector(Arc::clone(progress));
    let builder = Config::builder()
        .http_status_as_error(false)
        .max_redirects(0)
        .max_redirects_will_error(false)
        .user_agent(concat!("stockade-remote/", env!("CARGO_PKG_VERSION")))
        .max_response_header_size(MAX_HEAD_LEN)
        .timeout_resolve(Some(CONNECT_TIMEOUT))
        .timeout_connect(Some(CONNECT_TIMEOUT))
        .timeout_per_read(Some(SILENCE_TIMEOUT))
        .timeout_per_write(Some(SILENCE_TIMEOUT));
    match address {
        Address::Unix(path) => {
            let connector = UnixConnector(path.clone()).chain(patient).chain(noted("localhost"));
            Ok(Agent::with_parts(builder.proxy(None).build(), connector, NoResolver))
        }
        Address::Http(base) => {
            let no_proxy = |error: ConnectError| RemoteError::Unreachable { server: base.to_string(), why: error.to_string() };
            let proxy = proxy(base).map_err(no_proxy)?;
            let is_tls = base.scheme_str() == Some("https");
            let builder = if is_tls { builder.tls_config(tls(None).map_err(no_authorities)?) } else { builder };
            let tcp = ().chain(ConnectProxyConnector::default()).chain(TcpConnector::default());
            let authority = base.authority().map(|authority| authority.as_str()).unwrap_or_default();
            let connector = tcp.chain(patient).chain(RustlsConnector::default()).chain(noted(authority));
            Ok(Agent::with_parts(builder.proxy(proxy).build(), connector, GetentResolver))
        }
    }
}

fn no_authorities(error: ConnectError) -> RemoteError {
    RemoteError::Tls { server: String::from("a service by https"), why: error.to_string() }
}

/// Notes that a connection to the service stands, TLS included. One to a proxy is none.
#[derive(Debug)]
struct NotedConnector {
    authority: String,
    progress: Arc<Progress>,
}

impl<In: Transport> Connector<In> for NotedConnector {
    type Out = In;

    fn connect(&self, details: &ConnectionDetails<'_>, chained: Option<In>) -> Result<Option<In>, Error> {
        if chained.is_some() && details.uri.authority().is_some_and(|authority| authority.as_str() == self.authority) {
            self.progress.connected.store(true, Ordering::Relaxed);
        }
        Ok(chained)
    }
}

/// Has an answer read that came before all of the request was sent, as a refusal does.
#[derive(Debug)]
struct PatientConnector(Arc<Progress>);

impl<In: Transport> Connector<In> for PatientConnector {
    type Out = PatientTransport<In>;

    fn connect(&self, _: &ConnectionDetails<'_>, chained: Option<In>) -> Result<Option<PatientTransport<In>>, Error> {
        Ok(chained.map(|transport| PatientTransport { transport, progress: Arc::clone(&self.0) }))
    }
}

#[derive(Debug)]
struct PatientTransport<T> {
    transport: T,
    progress: Arc<Progress>,
}

impl<T: Transport> Transport for PatientTransport<T> {
    fn buffers(&mut self) -> &mut dyn Buffers {
        self.transport.buffers()
    }

    fn transmit_output(&mut self, amount: usize, timeout: NextTimeout) -> Result<(), Error> {
        if self.progress.cut_short.load(Ordering::Relaxed) {
            return Ok(());
        }
        match self.transport.transmit_output(amount, timeout) {
            Err(Error::Io(error)) if matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) => {
                self.progress.cut_short.store(true, Ordering::Relaxed);
                Ok(())
            }
            sent => sent,
        }
    }

    fn await_input(&mut self, timeout: NextTimeout) -> Result<bool, Error> {
        self.transport.await_input(timeout)
    }

    fn is_open(&mut self) -> bool {
        self.transport.is_open()
    }

    fn is_tls(&self) -> bool {
        self.transport.is_tls()
    }
}

/// Connects to a UNIX socket of root's or of this user's.
#[derive(Debug)]
struct UnixConnector(PathBuf);

impl Connector<()> for UnixConnector {
    type Out = UnixTransport;

    fn connect(&self, _: &ConnectionDetails<'_>, _: Option<()>) -> Result<Option<UnixTransport>, Error> {
        let stream = UnixStream::connect(&self.0)?;
        check_listener(&self.0, &stream)?;
        Ok(Some(UnixTransport { stream, buffers: LazyBuffers::new(BUFFER_LEN, BUFFER_LEN) }))
    }
}

/// Another user who listens there would get the code, and could make up its result.
fn check_listener(socket: &Path, stream: &UnixStream) -> Result<(), Error> {
    let listener = socket_peercred(stream).map_err(io::Error::from)?.uid;
    if listener.is_root() || listener == geteuid() {
        return Ok(());
    }
    Err(Error::Other(Box::new(RemoteError::Untrusted { socket: socket.to_owned(), uid: listener.as_raw() })))
}

#[derive(Debug)]
struct UnixTransport {
    stream: UnixStream,
    buffers: LazyBuffers,
}

impl Transport for UnixTransport {
    fn buffers(&mut self) -> &mut dyn Buffers {
        &mut self.buffers
    }

    fn transmit_output(&mut self, amount: usize, timeout: NextTimeout) -> Result<(), Error> {
        let timeout = timeout.for_write();
        self.stream.set_write_timeout(timeout.not_zero().map(|left| *left))?;
        let output = self.buffers.output().get(..amount).unwrap_or_default();
        self.stream.write_all(output).map_err(|error| late(error, timeout))
    }

    fn await_input(&mut self, timeout: NextTimeout) -> Result<bool, Error> {
        let timeout = timeout.for_read();
        self.stream.set_read_timeout(timeout.not_zero().map(|left| *left))?;
        let length = loop {
            match self.stream.read(self.buffers.input_append_buf()) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                read => break read.map_err(|error| late(error, timeout))?,
            }
        };
        self.buffers.input_appended(length);
        Ok(length > 0)
    }

    fn is_open(&mut self) -> bool {
        // No connection is used twice.
        false
    }
}

fn late(error: io::Error, timeout: NextTimeout) -> Error {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Error::Timeout(timeout.reason),
        _ => Error::Io(error),
    }
}

/// For UNIX sockets, which have no name.
#[derive(Debug)]
struct NoResolver;

impl Resolver for NoResolver {
    fn resolve(&self, _: &Uri, _: &Config, _: NextTimeout) -> Result<ResolvedSocketAddrs, Error> {
        let mut addresses = self.empty();
        addresses.push(SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)));
        Ok(addresses)
    }
}
