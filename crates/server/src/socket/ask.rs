//! The client: sends one request to a socket and receives its result.
//!
//! The server's answer is passed on unchanged. Without a complete answer the client makes a
//! result itself; it has `started: false` only where the code cannot have run. Nothing is sent
//! to a server that is neither root's nor the caller's own.

use std::{
    io,
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
};

use rustix::{
    event::{PollFd, PollFlags, poll},
    io::Errno,
    net::{RecvFlags, SendFlags, recv, send, sockopt::socket_peercred},
    process::geteuid,
};
use serde::Deserialize;
use stockade_engine::{Refusal, RefusalCause, answer::AnswerStdout, caller, signals::Signals};
use stockade_protocol::{
    Report,
    Verdict::{self, SandboxError},
};

use super::END_OF_REQUEST;

/// The server's answer.
#[derive(Debug)]
pub struct ServerAnswer {
    /// Its line.
    pub line: Vec<u8>,
    /// `verdict`.
    pub verdict: String,
    /// `started`.
    pub started: bool,
    /// Layers that the run lacked, and why.
    pub degraded: Vec<(String, String)>,
    /// Limits that nothing enforced.
    pub unenforced: Vec<String>,
    /// Why the audit log has no record of it.
    pub unrecorded: Option<String>,
}

/// The fields of a result that the client uses.
#[derive(Deserialize)]
struct ReportOutline {
    verdict: String,
    #[serde(default)]
    started: bool,
    #[serde(default)]
    limits_unenforced: Vec<String>,
    receipt: Option<ReceiptOutline>,
    audit: Option<AuditOutline>,
}

#[derive(Deserialize)]
struct AuditOutline {
    failure: Option<String>,
}

#[derive(Deserialize)]
struct ReceiptOutline {
    layers: Vec<LayerOutline>,
}

#[derive(Deserialize)]
struct LayerOutline {
    layer: String,
    known: String,
    detail: String,
}

impl ServerAnswer {
    /// Parses a complete answer: one line with one result.
    fn read(line: Vec<u8>) -> Option<Self> {
        let outline: ReportOutline = serde_json::from_slice(line.strip_suffix(b"\n")?).ok()?;
        let layers = outline.receipt.map(|receipt| receipt.layers).unwrap_or_default();
        let degraded = layers.into_iter().filter(|layer| layer.known == "degraded").map(|layer| (layer.layer, layer.detail));
        let unrecorded = outline.audit.and_then(|audit| audit.failure);
        let (verdict, unenforced) = (outline.verdict, outline.limits_unenforced);
        Some(ServerAnswer { line, verdict, started: outline.started, degraded: degraded.collect(), unenforced, unrecorded })
    }
}

/// Why there is no answer of the server.
#[derive(Debug, thiserror::Error)]
enum AskError {
    #[error("connect to {}: {error}; root makes it with: systemctl enable --now stockade-exec@{}.socket", socket.display(), unit(socket))]
    Missing { socket: PathBuf, error: io::Error },
    #[error("connect to {}: {error}; it is for members of its group: adduser USER stockade, and then a new login of that user", socket.display())]
    Denied { socket: PathBuf, error: io::Error },
    #[error("connect to {}: {error}; nobody listens there: systemctl restart stockade-exec@{}.socket", socket.display(), unit(socket))]
    NotListening { socket: PathBuf, error: io::Error },
    #[error("connect to {}: {error}; --socket takes the path of a UNIX socket, at most 107 bytes long", socket.display())]
    Unusable { socket: PathBuf, error: io::Error },
    #[error("--socket through sudo would have root ask, and not uid {0}, who called sudo; leave sudo out, or --socket")]
    ThroughSudo(u32),
    #[error(
        "uid {uid} listens on {}, who is neither root nor you, so nothing was sent; name a socket of root's, as in /run/stockade-exec",
        socket.display()
    )]
    Untrusted { socket: PathBuf, uid: u32 },
    #[error(
        "the server behind {} went away without a result ({}); {}; its journal may say more: journalctl --unit 'stockade-exec@*'",
        socket.display(),
        why.map_or_else(|| String::from("it closed the connection"), |errno| errno.to_string()),
        if *may_have_started { "the code may have run" } else { "the code has not run, and the request can be sent again" }
    )]
    Lost { socket: PathBuf, why: Option<Errno>, may_have_started: bool, cancelled: bool },
}

impl AskError {
    fn connect(socket: &Path, error: io::Error) -> Self {
        let socket = socket.to_path_buf();
        match error.kind() {
            io::ErrorKind::NotFound => AskError::Missing { socket, error },
            io::ErrorKind::PermissionDenied => AskError::Denied { socket, error },
            io::ErrorKind::ConnectionRefused => AskError::NotListening { socket, error },
            _ => AskError::Unusable { socket, error },
        }
    }
}

/// The instance of systemd's units that makes a socket.
fn unit(socket: &Path) -> &str {
    socket.file_stem().and_then(|stem| stem.to_str()).unwrap_or("POLICY")
}

impl RefusalCause for AskError {
    fn verdict_and_reason(&self) -> (Verdict, &'static str) {
        match self {
            AskError::Missing { .. } => (SandboxError, "socket_missing"),
            AskError::Denied { .. } => (SandboxError, "socket_denied"),
            AskError::NotListening { .. } => (SandboxError, "socket_refused"),
            AskError::Unusable { .. } => (SandboxError, "socket_unusable"),
            AskError::ThroughSudo(_) => (Verdict::BadRequest, "socket_through_sudo"),
            AskError::Untrusted { .. } => (SandboxError, "socket_untrusted"),
            AskError::Lost { cancelled: true, .. } => (Verdict::Cancelled, "cancelled_before_start"),
            AskError::Lost { .. } => (SandboxError, "server_lost"),
        }
    }
}

/// Sends a request to the server behind a socket and waits for its result. A signal that
/// would end this process cancels the run instead, and the result still arrives; `stdout` is told of it.
///
/// # Errors
/// There is no complete answer; the report has the reason.
pub fn ask(socket: &Path, request: &[u8], stdout: &mut AnswerStdout) -> Result<ServerAnswer, Box<Report>> {
    let refused = |refusal: Refusal| Box::new(refusal.report());
    check_own_name().map_err(refused)?;
    let mut signals = Signals::block().map_err(|error| refused(error.into()))?;
    let stream = UnixStream::connect(socket).map_err(|error| refused(AskError::connect(socket, error).into()))?;
    check_server(socket, &stream).map_err(|error| refused(error.into()))?;
    let mut exchange = ClientExchange { stream: &stream, request, sent: 0, cancel: None, unread: false, answer: Vec::new() };
    let broken = exchange.run(&mut signals).err();
    let ClientExchange { sent, unread, answer, cancel, .. } = exchange;
    cancel.into_iter().for_each(|signal| stdout.tell(signal.into()));
    ServerAnswer::read(answer).ok_or_else(|| {
        // A server reads the complete request before it starts anything.
        let may_have_started = sent > request.len() && !unread;
        // Else the server did not have the complete request yet.
        let cancelled = cancel.filter(|_| !may_have_started);
        let lost = AskError::Lost { socket: socket.to_path_buf(), why: broken, may_have_started, cancelled: cancelled.is_some() };
        let report = Report { started: may_have_started, ..Refusal::from(lost).report() };
        Box::new(match cancelled {
            Some(signal) => Report { code: 128 + i32::from(signal), ..report },
            None => report,
        })
    })
}

/// The kernel tells the server the caller's uid. Through sudo that is 0: the server would
/// check no grant, and an approver could approve their own request.
fn check_own_name() -> Result<(), Refusal> {
    let identity = caller::identify(None)?;
    if !identity.on_behalf {
        return Ok(());
    }
    Err(AskError::ThroughSudo(identity.caller.uid).into())
}

/// A request goes to root's launcher or to the caller's own. Another user who bound the path
/// would read the code and could forge its result.
fn check_server(socket: &Path, stream: &UnixStream) -> Result<(), AskError> {
    let listener = socket_peercred(stream).map_err(|errno| AskError::connect(socket, errno.into()))?.uid;
    if listener.is_root() || listener == geteuid() {
        return Ok(());
    }
    Err(AskError::Untrusted { socket: socket.to_path_buf(), uid: listener.as_raw() })
}

struct ClientExchange<'a> {
    stream: &'a UnixStream,
    request: &'a [u8],
    /// Bytes sent, including the one that ends the request.
    sent: usize,
    /// The signal that cancels the run.
    cancel: Option<u8>,
    /// The server has not read all of the request.
    unread: bool,
    answer: Vec<u8>,
}

impl ClientExchange<'_> {
    /// Sends and receives until the server has closed.
    fn run(&mut self, signals: &mut Signals) -> Result<(), Errno> {
        let mut sending = true;
        loop {
            let wanted = if sending { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
            let mut fds = [PollFd::new(self.stream, wanted), PollFd::new(&*signals, PollFlags::IN)];
            match poll(&mut fds, None) {
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(errno),
            }
            let [ours, theirs] = fds.map(|fd| fd.revents());
            if !theirs.is_empty() {
                while let Some(signal) = signals.take() {
                    if signal != WINDOW_CHANGED {
                        self.cancel = self.cancel.or(u8::try_from(signal).ok());
                    }
                }
                if self.cancel.is_some() && self.sent <= self.request.len() {
                    return Ok(());
                }
                if let Some(signal) = self.cancel {
                    // A closed connection is detected below.
                    let _gone = send(self.stream, &[signal], SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
                }
            }
            if sending && ours.intersects(PollFlags::OUT | PollFlags::HUP | PollFlags::ERR) {
                sending = self.send_some();
            }
            if ours.intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR) && self.receive_some()? {
                return Ok(());
            }
        }
    }

    /// Sends once. Returns whether more is left to send.
    fn send_some(&mut self) -> bool {
        let rest = self.request.get(self.sent..).unwrap_or_default();
        let rest = if rest.is_empty() { &[END_OF_REQUEST][..] } else { rest };
        match send(self.stream, rest, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Ok(length) => self.sent += length,
            Err(Errno::AGAIN | Errno::INTR) => {}
            // The server has stopped reading, and may have answered why.
            Err(_) => return false,
        }
        self.sent <= self.request.len()
    }

    /// Receives once. Returns whether the server has closed.
    fn receive_some(&mut self) -> Result<bool, Errno> {
        let mut buffer = [0; 1 << 16];
        match recv(self.stream, &mut buffer, RecvFlags::DONTWAIT) {
            Ok((0, _)) => Ok(true),
            Ok((length, _)) => {
                self.answer.extend_from_slice(buffer.get(..length).unwrap_or_default());
                Ok(false)
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(false),
            // The kernel's answer where the peer closed with unread bytes.
            Err(Errno::CONNRESET) => {
                self.unread = true;
                Err(Errno::CONNRESET)
            }
            Err(errno) => Err(errno),
        }
    }
}

/// SIGWINCH, which is ignored.
const WINDOW_CHANGED: i32 = 28;
