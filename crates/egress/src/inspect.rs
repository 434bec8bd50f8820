//! Whether what a client says over an allowed connection names the peer that was allowed.
//!
//! The inspector sees every byte before it leaves and says how many may. It keeps no copy:
//! whoever reads from the client holds the bytes back and shows them. What is neither TLS
//! nor HTTP/1 is refused, as is whatever could be understood in two ways. It holds no
//! clock: how long a client may take is the caller's to say. Bytes from the peer pass
//! unseen, so protocols in which the peer speaks first are not held up.

use stockade_policy::egress::Name;
use stockade_protocol::{DenialKind, DenialReason};

use crate::{hello::HelloCheck, http::HttpCheck};

/// The most bytes that an inspector wants to be held back. A caller's buffer must have
/// room for these and one more.
pub const MOST_HELD: usize = 32 << 10;

/// Why a connection has to end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// In which protocol it was seen.
    pub kind: DenialKind,
    /// Why.
    pub reason: DenialReason,
    /// What was named instead, made printable and cut.
    pub said: Option<String>,
}

impl Refused {
    pub(crate) fn tls(reason: DenialReason) -> Self {
        Refused { kind: DenialKind::Tls, reason, said: None }
    }

    pub(crate) fn http(reason: DenialReason) -> Self {
        Refused { kind: DenialKind::Http, reason, said: None }
    }

    pub(crate) fn naming(self, said: &[u8]) -> Self {
        Refused { said: Some(printable(said)), ..self }
    }
}

/// Looks at one connection's bytes from the client, from the first one on.
#[derive(Clone, Debug)]
pub struct Inspector {
    name: Name,
    port: u16,
    speaks: Speaks,
}

#[derive(Clone, Debug)]
enum Speaks {
    /// Nothing yet.
    Unknown,
    Tls(HelloCheck),
    Http(HttpCheck),
}

impl Inspector {
    /// For a connection to this name and port.
    pub fn new(name: Name, port: u16) -> Self {
        Inspector { name, port, speaks: Speaks::Unknown }
    }

    /// How many of the held bytes may leave now. `held` begins with the first byte that
    /// was not released before and holds all that came since, what was shown earlier
    /// included.
    ///
    /// # Errors
    /// The connection must end, and nothing more of it may leave.
    pub fn examine(&mut self, held: &[u8]) -> Result<usize, Refused> {
        if let (Speaks::Unknown, Some(first)) = (&self.speaks, held.first()) {
            self.speaks = match first {
                22 => Speaks::Tls(HelloCheck::default()),
                b'A'..=b'Z' => Speaks::Http(HttpCheck::default()),
                _ => return Err(Refused { kind: DenialKind::Connect, reason: DenialReason::ProtocolUnknown, said: None }),
            };
        }
        let released = match &mut self.speaks {
            Speaks::Unknown => 0,
            Speaks::Tls(check) => check.examine(held, &self.name)?,
            Speaks::Http(check) => check.examine(held, &self.name, self.port)?,
        };
        if held.len() - released > MOST_HELD {
            return Err(match self.speaks {
                Speaks::Http(_) => Refused::http(DenialReason::HttpMalformed),
                _ => Refused::tls(DenialReason::TlsMalformed),
            });
        }
        Ok(released)
    }

    /// Everything that follows may leave unseen.
    pub fn is_through(&self) -> bool {
        matches!(&self.speaks, Speaks::Tls(check) if check.is_through())
    }

    /// Something was said, and it was TLS for the right server.
    pub fn saw_server_name(&self) -> bool {
        matches!(&self.speaks, Speaks::Tls(check) if check.was_accepted())
    }
}

/// Bytes from inside as a short text without control characters.
pub(crate) fn printable(bytes: &[u8]) -> String {
    let shown = &bytes[..bytes.len().min(128)];
    let mut text: String = shown.iter().flat_map(|byte| byte.escape_ascii()).map(char::from).collect();
    if shown.len() < bytes.len() {
        text.push('…');
    }
    text
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use super::*;
    use crate::hello::tests::hello;

    fn inspector() -> Inspector {
        Inspector::new(Name::new("api.internal").unwrap(), 8443)
    }

    fn reason(bytes: &[u8]) -> DenialReason {
        inspector().examine(bytes).unwrap_err().reason
    }

    #[test]
    fn nothing_is_released_before_something_was_said() {
        let mut inspector = inspector();
        assert_eq!(inspector.examine(b""), Ok(0));
        assert!(!inspector.is_through());
    }

    #[test]
    fn the_first_byte_tells_tls_from_http_and_both_from_anything_else() {
        assert_eq!(inspector().examine(&hello("api.internal")), Ok(hello("api.internal").len()));
        let request = b"GET / HTTP/1.1\r\nHost: api.internal:8443\r\n\r\n";
        assert_eq!(inspector().examine(request), Ok(request.len()));
        for other in
            [&b"\0\0\0\x08\x04\xd2\x16\x2f"[..], b"*1\r\n$4\r\nPING\r\n", b"\x80\x2e\x01", b"\n", b"get / HTTP/1.1\r\n", b"\x17\x03\x03"]
        {
            assert_eq!(reason(other), DenialReason::ProtocolUnknown, "{other:?}");
        }
    }

    #[test]
    fn what_was_said_instead_is_short_and_printable() {
        let refused = inspector().examine(b"GET / HTTP/1.1\r\nHost: a\tb\xff\r\n\r\n").unwrap_err();
        assert_eq!(refused.said.as_deref(), Some("a\\tb\\xff"));
        assert_eq!(printable(&[b'a'; 500]).chars().count(), 129);
    }

    #[test]
    fn no_more_is_held_than_was_promised() {
        let mut request = b"GET / HTTP/1.1\r\nHost: api.internal\r\nX: ".to_vec();
        request.resize(MOST_HELD, b'a');
        assert_eq!(inspector().examine(&request), Ok(0));
        request.push(b'a');
        assert_eq!(reason(&request), DenialReason::HttpMalformed);
    }
}
