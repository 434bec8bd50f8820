//! Why a registry does not give an image. No error has a password, a token or the query of a URL, which
//! may be a signature.

use std::path::PathBuf;

use stockade_connect::ConnectError;
use stockade_images::Digest;

/// Why there is no image.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// Nothing can be reached from here.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The host of `--insecure-http` or `--auth-host` is none.
    #[error("{option} {host}: {why}; write HOST or HOST:PORT")]
    Host {
        /// The option that has it.
        option: &'static str,
        /// What it has.
        host: String,
        /// What is wrong.
        why: &'static str,
    },
    /// No connection stands.
    #[error("connect to {server}: {why}")]
    Unreachable {
        /// Host and port.
        server: String,
        /// What happened.
        why: String,
    },
    /// No authority vouches for the server.
    #[error("{server} is not trusted: {why}; --ca names the certificate of a private authority")]
    Untrusted {
        /// Host and port.
        server: String,
        /// What TLS said.
        why: String,
    },
    /// A connection ended before its answer did.
    #[error("{server} broke off, again and again: {why}")]
    Broken {
        /// Host and port.
        server: String,
        /// What happened.
        why: String,
    },
    /// It does not answer now.
    #[error("{server} answers with status {status}{}{}; try again later", said(.message), .retry_after.map(|seconds| format!(", and asks to wait {seconds} s")).unwrap_or_default())]
    Busy {
        /// Host and port.
        server: String,
        /// 429, or 500 and above.
        status: u16,
        /// What it says.
        message: String,
        /// After how many seconds it wants to be asked again.
        retry_after: Option<u64>,
    },
    /// It does not give the image, or not to this user.
    #[error("{server} does not give {what} (status {status}{}); {hint}", said(.message))]
    Denied {
        /// Host and port.
        server: String,
        /// What was asked for.
        what: String,
        /// The HTTP status.
        status: u16,
        /// What it says.
        message: String,
        /// What to do.
        hint: String,
    },
    /// It has no such thing.
    #[error("{server} does not have {what}; look at the name and the tag")]
    NotFound {
        /// Host and port.
        server: String,
        /// What was asked for.
        what: String,
    },
    /// It does not speak the protocol, or does not keep to it.
    #[error("the answer of {server} is not that of a registry: {what}")]
    Answer {
        /// Host and port.
        server: String,
        /// What is wrong with it.
        what: String,
    },
    /// It leads to where nothing is asked.
    #[error("{server} leads to {to}, which is not followed: {why}")]
    Redirect {
        /// Host and port.
        server: String,
        /// Host and port, or what is written there.
        to: String,
        /// Which rule it breaks.
        why: &'static str,
    },
    /// The password would go to another's.
    #[error(
        "{server} wants its password sent to {to}, and that was not done: {why}{}",
        if *.can_be_allowed { "; if that host is to have it, name it with --auth-host" } else { "" }
    )]
    PasswordElsewhere {
        /// The registry.
        server: String,
        /// The host of its realm.
        to: String,
        /// Which rule it breaks.
        why: &'static str,
        /// Whether an option allows it.
        can_be_allowed: bool,
    },
    /// The file with the passwords cannot be used.
    #[error("credentials of {}: {why}", path.display())]
    Credentials {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// What it sent is not what its digest says.
    #[error("{server} sent {what} with the digest {got}, which must be {wanted}; the registry, or what is between, has changed it")]
    Digest {
        /// Host and port.
        server: String,
        /// What was asked for.
        what: String,
        /// The digest that was asked for.
        wanted: Digest,
        /// The digest of what came.
        got: Digest,
    },
    /// It has another length than was said.
    #[error("{server} sends {got} of {what}, which has {wanted} bytes by its descriptor")]
    Length {
        /// Host and port.
        server: String,
        /// What was asked for.
        what: String,
        /// The length that its descriptor states.
        wanted: u64,
        /// What came.
        got: String,
    },
}

impl FetchError {
    /// Whether another attempt may end better.
    pub(crate) fn is_passing(&self) -> bool {
        matches!(self, FetchError::Broken { .. } | FetchError::Busy { .. })
    }
}

fn said(message: &str) -> String {
    if message.is_empty() { String::new() } else { format!(", {message}") }
}
