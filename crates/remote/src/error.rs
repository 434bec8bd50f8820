//! Why a service was not asked, or has not answered; each as a result of `exec` and in words.

use std::{ffi::OsString, path::PathBuf};

use serde::Deserialize;
use stockade_protocol::{Report, Verdict};

/// A problem as a service states it (RFC 9457).
#[derive(Debug, Default, Deserialize)]
pub struct Problem {
    /// The HTTP status.
    #[serde(default)]
    pub status: u16,
    /// For programs.
    #[serde(default)]
    pub reason: String,
    /// For people.
    #[serde(default)]
    pub detail: String,
    /// Whether code may have run. A problem that does not say so leaves it open.
    #[serde(default = "open")]
    pub started: bool,
    /// Seconds after which it may be tried again.
    #[serde(skip)]
    pub retry_after: Option<u64>,
}

fn open() -> bool {
    true
}

/// Why there is no result of a service.
#[derive(Debug, thiserror::Error)]
pub enum RemoteError {
    #[error(
        "stockade-remote is of version {} and {} of version {}; install both from one package",
        env!("CARGO_PKG_VERSION"), program.display(), other.display()
    )]
    Version { program: PathBuf, other: OsString },
    #[error("watch the processes that wait for the answer: {0}")]
    Watch(std::io::Error),
    #[error("--server {url}: {why}; write unix:/PATH, http://HOST:PORT or https://HOST")]
    Url { url: String, why: &'static str },
    #[error("{0}")]
    Key(String),
    #[error("the request is larger than 64 MiB")]
    RequestTooLarge,
    #[error("cannot read the request from stdin: {0}")]
    RequestUnreadable(std::io::Error),
    #[error("connect to {server}: {why}")]
    Unreachable { server: String, why: String },
    #[error("{server} is not trusted: {why}; SSL_CERT_FILE names the certificate of a private authority")]
    Tls { server: String, why: String },
    #[error("uid {uid} listens on {}, who is neither root nor you, so nothing was sent; call as that user, or name another socket", socket.display())]
    Untrusted { socket: PathBuf, uid: u32 },
    #[error(
        "{server} went away without a result ({why}); {}",
        if *started { "the code may have run" } else { "the code has not run, and the request can be sent again" }
    )]
    Lost { server: String, why: String, started: bool },
    #[error(
        "the answer of {server} is not that of stockade serve: {what}; name the address that `stockade serve` prints, or that of its proxy"
    )]
    Answer { server: String, what: String, started: bool },
    #[error("the service says: {}{}", .0.detail, .0.retry_after.map(|seconds| format!(" (try again in {seconds} s)")).unwrap_or_default())]
    Problem(Problem),
    #[error("signal {signal} ended the waiting{}", if *started { "; the run is cancelled, and its result is lost" } else { " before the code started" })]
    Cancelled { signal: i32, started: bool },
}

impl RemoteError {
    fn reason(&self) -> &str {
        match self {
            RemoteError::Version { .. } => "companion_version",
            RemoteError::Watch(_) => "server_not_asked",
            RemoteError::Url { .. } => "server_url",
            RemoteError::Key(_) => "key_file",
            RemoteError::RequestTooLarge => "request_too_large",
            RemoteError::RequestUnreadable(_) => "request_unreadable",
            RemoteError::Unreachable { .. } => "server_unreachable",
            RemoteError::Tls { .. } => "server_not_trusted",
            RemoteError::Untrusted { .. } => "socket_untrusted",
            RemoteError::Lost { .. } => "server_lost",
            RemoteError::Answer { .. } => "server_answer",
            RemoteError::Problem(problem) => &problem.reason,
            RemoteError::Cancelled { started: true, .. } => "result_not_awaited",
            RemoteError::Cancelled { started: false, .. } => "cancelled_before_start",
        }
    }

    fn verdict(&self) -> Verdict {
        match self {
            RemoteError::Url { .. } | RemoteError::Key(_) | RemoteError::RequestTooLarge => Verdict::BadRequest,
            RemoteError::Cancelled { .. } => Verdict::Cancelled,
            RemoteError::Problem(problem) => match (problem.status, problem.reason.as_str()) {
                (409, "cancelled") => Verdict::Cancelled,
                (400 | 413 | 415 | 422, _) => Verdict::BadRequest,
                _ => Verdict::SandboxError,
            },
            _ => Verdict::SandboxError,
        }
    }

    /// Whether code may have run.
    fn started(&self) -> bool {
        match self {
            RemoteError::Lost { started, .. } | RemoteError::Answer { started, .. } | RemoteError::Cancelled { started, .. } => *started,
            RemoteError::Problem(problem) => problem.started,
            _ => false,
        }
    }

    /// The result in place of a service's.
    pub fn report(&self) -> Report {
        let reason = self.reason();
        let report = Report { started: self.started(), ..Report::refused(self.verdict(), reason, self.to_string()) };
        match self {
            RemoteError::Cancelled { signal, .. } => Report { code: 128 + signal, ..report },
            _ => report,
        }
    }
}
