//! The client: a request to a socket, its result back.
//!
//! What the server answers is passed on as it is. Where no whole answer came, the client
//! makes a result of its own; it says `started: false` only where the code cannot have run.

use std::{io, os::unix::net::UnixStream, path::Path};

use rustix::{
    event::{PollFd, PollFlags, poll},
    io::Errno,
    net::{RecvFlags, SendFlags, recv, send, sockopt::socket_peercred},
    process::geteuid,
};
use serde::Deserialize;
use stockade_launcher::signals::Signals;
use stockade_protocol::{Report, Verdict};
use stockade_runtime::{Refusal, caller};

use crate::END_OF_REQUEST;

/// What the server answered.
#[derive(Debug)]
pub struct Answer {
    /// Its line.
    pub line: Vec<u8>,
    /// `verdict`.
    pub verdict: String,
    /// Layers that the run went without, and why.
    pub degraded: Vec<(String, String)>,
    /// Why it is not in the audit log.
    pub unrecorded: Option<String>,
}

/// The parts of a result that a client acts on.
#[derive(Deserialize)]
struct Outline {
    verdict: String,
    receipt: Option<OutlineOfReceipt>,
    audit: Option<OutlineOfAudit>,
}

#[derive(Deserialize)]
struct OutlineOfAudit {
    failure: Option<String>,
}

#[derive(Deserialize)]
struct OutlineOfReceipt {
    layers: Vec<OutlineOfLayer>,
}

#[derive(Deserialize)]
struct OutlineOfLayer {
    layer: String,
    known: String,
    detail: String,
}

impl Answer {
    /// A whole answer: one line, one result.
    fn read(line: Vec<u8>) -> Option<Self> {
        let outline: Outline = serde_json::from_slice(line.strip_suffix(b"\n")?).ok()?;
        let layers = outline.receipt.map(|receipt| receipt.layers).unwrap_or_default();
        let degraded = layers.into_iter().filter(|layer| layer.known == "degraded").map(|layer| (layer.layer, layer.detail));
        let unrecorded = outline.audit.and_then(|audit| audit.failure);
        Some(Answer { line, verdict: outline.verdict, degraded: degraded.collect(), unrecorded })
    }
}

/// Sends a request to the server behind a socket and waits for its result. A signal that
/// would end this process cancels the run instead, and its result still comes.
///
/// # Errors
/// There is no whole answer; the report says why.
pub fn ask(socket: &Path, request: &[u8]) -> Result<Answer, Box<Report>> {
    let refused = |refusal: Refusal| Box::new(refusal.report());
    check_own_name().map_err(refused)?;
    let mut signals = Signals::block().map_err(|error| refused(error.into()))?;
    let stream = UnixStream::connect(socket).map_err(|error| refused(unconnected(socket, &error)))?;
    check_server(socket, &stream).map_err(refused)?;
    let mut exchange = Exchange { stream: &stream, request, sent: 0, cancel: None, unread: false, answer: Vec::new() };
    let broken = exchange.run(&mut signals).err();
    let Exchange { sent, unread, answer, cancel, .. } = exchange;
    Answer::read(answer).ok_or_else(|| {
        // A server reads the whole of a request before it begins anything.
        let may_have_started = sent > request.len() && !unread;
        let again = if may_have_started { "the code may have run" } else { "the code has not run, and the request can be sent again" };
        let why = broken.map_or_else(|| String::from("it closed the connection"), |errno| errno.to_string());
        let error = format!("the server behind {} went away without a result ({why}); {again}; its journal may say more: journalctl --unit 'stockade-exec@*'", socket.display());
        let report = Refusal::sandbox_error("server_lost", error).report();
        let report = Report { started: may_have_started, ..report };
        Box::new(match cancel {
            // Before the server had the request.
            Some(signal) if !may_have_started => Report { verdict: Verdict::Cancelled, code: 128 + i32::from(signal), reason: Some(String::from("cancelled_before_start")), ..report },
            _ => report,
        })
    })
}

/// Why there is no connection, and how to mend it.
fn unconnected(socket: &Path, error: &io::Error) -> Refusal {
    let unit = socket.file_stem().and_then(|stem| stem.to_str()).map_or_else(|| String::from("POLICY"), String::from);
    let (reason, remedy) = match error.kind() {
        io::ErrorKind::NotFound => ("socket_missing", format!("root makes it with: systemctl enable --now stockade-exec@{unit}.socket")),
        io::ErrorKind::PermissionDenied => {
            ("socket_denied", String::from("it is for members of its group: adduser USER stockade, and then a new login of that user"))
        }
        io::ErrorKind::ConnectionRefused => {
            ("socket_refused", format!("nobody listens there: systemctl restart stockade-exec@{unit}.socket"))
        }
        _ => ("socket_unusable", String::from("--socket takes the path of a UNIX socket, at most 107 bytes long")),
    };
    Refusal::sandbox_error(reason, format!("connect to {}: {error}; {remedy}", socket.display()))
}

/// The server is told by the kernel who asks, and takes root for root, whoever called sudo:
/// no grant would be asked for, and who approves could approve what they have asked for.
fn check_own_name() -> Result<(), Refusal> {
    let identity = caller::identify(None)?;
    if !identity.on_behalf {
        return Ok(());
    }
    let why = format!(
        "--socket through sudo would have root ask, and not uid {}, who called sudo; leave sudo out, or --socket",
        identity.caller.uid
    );
    Err(Refusal::bad_request("socket_through_sudo", why))
}

/// A request is for root's launcher or for one's own: whoever else got hold of the path
/// would learn the code, and say of it what he likes.
fn check_server(socket: &Path, stream: &UnixStream) -> Result<(), Refusal> {
    let listener = socket_peercred(stream).map_err(|errno| unconnected(socket, &errno.into()))?.uid;
    if listener.is_root() || listener == geteuid() {
        return Ok(());
    }
    let why = format!(
        "uid {} listens on {}, who is neither root nor you, so nothing was sent; name a socket of root's, as in /run/stockade-exec",
        listener.as_raw(),
        socket.display()
    );
    Err(Refusal::sandbox_error("socket_untrusted", why))
}

struct Exchange<'a> {
    stream: &'a UnixStream,
    request: &'a [u8],
    /// Bytes sent, the one that ends the request included.
    sent: usize,
    /// The signal that is to cancel the run.
    cancel: Option<u8>,
    /// The server left something of the request unread.
    unread: bool,
    answer: Vec<u8>,
}

impl Exchange<'_> {
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
                    // Whether it is still there to hear it is seen below.
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

    /// Whether there is more to send.
    fn send_some(&mut self) -> bool {
        let rest = self.request.get(self.sent..).unwrap_or_default();
        let rest = if rest.is_empty() { &[END_OF_REQUEST][..] } else { rest };
        match send(self.stream, rest, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Ok(length) => self.sent += length,
            Err(Errno::AGAIN | Errno::INTR) => {}
            // It has heard enough, and may have said why.
            Err(_) => return false,
        }
        self.sent <= self.request.len()
    }

    /// Whether that was all.
    fn receive_some(&mut self) -> Result<bool, Errno> {
        let mut buffer = [0; 1 << 16];
        match recv(self.stream, &mut buffer, RecvFlags::DONTWAIT) {
            Ok((0, _)) => Ok(true),
            Ok((length, _)) => {
                self.answer.extend_from_slice(buffer.get(..length).unwrap_or_default());
                Ok(false)
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(false),
            // What the kernel says where a socket is closed with something unread in it.
            Err(Errno::CONNRESET) => {
                self.unread = true;
                Err(Errno::CONNRESET)
            }
            Err(errno) => Err(errno),
        }
    }
}

/// SIGWINCH, which asks for nothing.
const WINDOW_CHANGED: i32 = 28;
