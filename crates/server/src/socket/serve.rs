//! Serves one connection.
//!
//! The client's identity comes from the kernel alone, and the grants are checked before its
//! request is read. Reading and writing have a time limit, so a client holds a server no
//! longer than a run may take, and a user no more servers than the limit. A second request is
//! never served.

use std::{
    io::{self, Read, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::PathBuf,
    time::{Duration, Instant},
};

use stockade_engine::{
    CancelledBeforeStart, Options, Refusal, RefusalCause, SocketClient, admit,
    caller::{Caller, identify},
    facts::registry,
    load_policy, refuse,
};
use stockade_protocol::{Report, Verdict};

use super::{CLIENT_TIMEOUT, END_OF_REQUEST, slot::ConnectionSlot};

/// Supplementary groups that a process can have (NGROUPS_MAX).
const MAX_GROUPS: usize = 65536;

/// Why a connection could not be served at all.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// Standard input is no connected UNIX stream socket.
    #[error(
        "stdin is not a connected UNIX socket ({0}); stockade serve-one is started by systemd for each connection, see stockade-exec@.socket"
    )]
    NotConnected(io::Error),
    /// No policy is named, and the socket's own name is none.
    #[error("no policy: neither --policy nor the socket's name says which one; a socket is named POLICY.sock")]
    NoPolicy,
}

/// Why a client is not served, beside what any run may be refused for.
#[derive(Debug, thiserror::Error)]
enum ClientError {
    #[error("count the connections of uid {uid} in {}: {error}", registry.display())]
    Uncounted { uid: u32, registry: PathBuf, error: io::Error },
    #[error(
        "uid {uid} has {most} connections to this host's sockets already, as many as one user may have at a time; wait until one has ended, or have root allow more: `--per-user` in stockade-exec@.service"
    )]
    TooMany { uid: u32, most: u32 },
    #[error("the request did not end within {} s; close your half of the connection after it", CLIENT_TIMEOUT.as_secs())]
    Late,
}

impl RefusalCause for ClientError {
    fn verdict_and_reason(&self) -> (Verdict, &'static str) {
        match self {
            ClientError::Uncounted { .. } => (Verdict::SandboxError, "registry_failed"),
            ClientError::TooMany { .. } => (Verdict::SandboxError, "too_many_connections"),
            ClientError::Late => (Verdict::BadRequest, "request_timeout"),
        }
    }
}

/// The outcome of one connection, for the journal.
#[derive(Debug)]
pub struct ServedConnection {
    /// Who asked.
    pub uid: u32,
    /// The client's process, as long as it lives.
    pub pid: i32,
    /// Under which policy.
    pub policy: String,
    /// The verdict of the result.
    pub verdict: Verdict,
    /// The reason of the result.
    pub reason: Option<String>,
    /// Whether the client has received the result; one that has hung up has not.
    pub taken: io::Result<()>,
}

/// Reads one request, runs it and writes its result. Without a policy in `options` the
/// socket's file name is the policy's. `most` limits the connections of one user; root and the
/// server's own user are not counted.
///
/// # Errors
/// There is no client, or no policy is known.
pub fn serve(connection: OwnedFd, mut options: Options, most: u32) -> Result<ServedConnection, ServeError> {
    let stream = UnixStream::from(connection);
    let (caller, pid) = peer(&stream).map_err(ServeError::NotConnected)?;
    if options.policy.is_none() {
        options.policy = Some(policy_of(&stream).ok_or(ServeError::NoPolicy)?);
    }
    let (uid, policy) = (caller.uid, options.policy.clone().unwrap_or_default());
    options.peer = Some(caller);
    // Held until the client has its result, or its time to read it is over.
    let slot = take_slot(uid, &options, most);
    let answered = slot.as_ref().map_err(Refusal::clone).and_then(|_| answer(&stream, &options));
    let report = answered.unwrap_or_else(|refusal| refuse(&refusal, &options));
    let taken = send_report(&stream, &report);
    Ok(ServedConnection { uid, pid, policy, verdict: report.verdict, reason: report.reason, taken })
}

/// The peer's ids, as the kernel recorded them at connect(2).
fn peer(stream: &UnixStream) -> io::Result<(Caller, i32)> {
    let credentials = rustix::net::sockopt::socket_peercred(stream)?;
    let (uid, gid) = (credentials.uid.as_raw(), credentials.gid.as_raw());
    let mut groups = vec![0; MAX_GROUPS];
    let count = stockade_sys::socket::peer_groups(stream, &mut groups)?;
    groups.truncate(count);
    groups.push(gid);
    groups.sort_unstable();
    groups.dedup();
    Ok((Caller { uid, gid, groups }, credentials.pid.as_raw_nonzero().get()))
}

/// The policy in the socket's file name, `POLICY.sock`. The owner of the listening socket chose
/// that.
fn policy_of(stream: &UnixStream) -> Option<String> {
    let address = stream.local_addr().ok()?;
    let name = address.as_pathname()?.file_name()?.to_str()?;
    name.strip_suffix(".sock").filter(|name| !name.is_empty()).map(String::from)
}

/// Checks the grants and takes a connection slot. None: this client is not counted.
fn take_slot(uid: u32, options: &Options, most: u32) -> Result<Option<ConnectionSlot>, Refusal> {
    load_policy(options)?;
    let identity = identify(options.peer.as_ref())?;
    // Root and the server's own user could stop the server anyway.
    if uid == 0 || !identity.privileged {
        return Ok(None);
    }
    let registry = registry(&identity)?;
    let slot = ConnectionSlot::take(registry.directory(), uid, most).map_err(|error| ClientError::Uncounted {
        uid,
        registry: registry.directory().to_path_buf(),
        error,
    })?;
    Ok(Some(slot.ok_or(ClientError::TooMany { uid, most })?))
}

/// Reads the request and runs it. `take_slot` has checked the grants before.
fn answer(stream: &UnixStream, options: &Options) -> Result<Report, Refusal> {
    let mut incoming = IncomingRequest { stream, deadline: Instant::now() + CLIENT_TIMEOUT, ended: false, surplus: None, late: false };
    let request = admit::read_request(&mut incoming).map_err(|refusal| if incoming.late { ClientError::Late.into() } else { refusal })?;
    if let Some(signal) = incoming.surplus {
        return Ok(Report { code: 128 + i32::from(signal), ..refuse(&CancelledBeforeStart.into(), options) });
    }
    let mut client = SocketClient { socket: stream.as_fd(), may_cancel: incoming.ended };
    Ok(stockade_engine::exec_for(&request, options, Some(&mut client)))
}

/// Reads a request up to its end, within its time.
struct IncomingRequest<'a> {
    stream: &'a UnixStream,
    deadline: Instant,
    /// The byte that ends a request was read.
    ended: bool,
    /// The byte after that.
    surplus: Option<u8>,
    late: bool,
}

impl Read for IncomingRequest<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.ended {
            return Ok(0);
        }
        let Some(left) = time_left(self.deadline) else {
            self.late = true;
            return Err(io::ErrorKind::TimedOut.into());
        };
        self.stream.set_read_timeout(Some(left))?;
        match self.stream.read(buffer) {
            Ok(length) => {
                let read = buffer.get(..length).unwrap_or_default();
                let Some(end) = read.iter().position(|byte| *byte == END_OF_REQUEST) else { return Ok(length) };
                self.ended = true;
                self.surplus = read.get(end + 1).copied();
                Ok(end)
            }
            // The caller reads again, and then finds that the time is over.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(io::ErrorKind::Interrupted.into()),
            Err(error) => Err(error),
        }
    }
}

fn time_left(deadline: Instant) -> Option<Duration> {
    Some(deadline.saturating_duration_since(Instant::now())).filter(|left| !left.is_zero())
}

fn send_report(stream: &UnixStream, report: &Report) -> io::Result<()> {
    let mut line = serde_json::to_vec(report)?;
    line.push(b'\n');
    let deadline = Instant::now() + CLIENT_TIMEOUT;
    let mut rest = line.as_slice();
    let mut outgoing = stream;
    while !rest.is_empty() {
        outgoing.set_write_timeout(Some(time_left(deadline).ok_or(io::ErrorKind::TimedOut)?))?;
        match outgoing.write(rest) {
            Ok(length) => rest = rest.get(length..).unwrap_or_default(),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(error) => return Err(error),
        }
    }
    // This closes copies of the descriptor in child processes, too.
    stream.shutdown(std::net::Shutdown::Both)
}
