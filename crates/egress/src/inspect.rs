//! Checks that a client names the allowed peer over an allowed connection.
//!
//! The inspector sees every byte before it is sent and returns how many may be sent. It keeps no
//! copy: the caller holds the bytes back and passes them again. Anything but TLS and HTTP/1 is
//! refused, and so is anything that can be read in two ways. It has no clock; the caller limits
//! the time. It does not see the peer's bytes, so protocols in which the server speaks first are
//! not delayed.

use stockade_policy::whitelist::Name;
use stockade_protocol::{DenialKind, DenialReason};

use crate::{http::HttpInspector, tls::ClientHelloInspector};

/// The most bytes that an inspector holds back. A caller's buffer needs room for one more.
pub const MAX_HELD: usize = 32 << 10;

/// Why a connection must end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InspectionRefusal {
    /// The protocol.
    pub kind: DenialKind,
    /// The reason.
    pub reason: DenialReason,
    /// The name that the client used instead, if it is one.
    pub said: Option<String>,
}

impl InspectionRefusal {
    pub(crate) fn tls(reason: DenialReason) -> Self {
        InspectionRefusal { kind: DenialKind::Tls, reason, said: None }
    }

    pub(crate) fn http(reason: DenialReason) -> Self {
        InspectionRefusal { kind: DenialKind::Http, reason, said: None }
    }

    /// The first bytes belong to another protocol.
    pub(crate) fn unknown() -> Self {
        InspectionRefusal { kind: DenialKind::Connect, reason: DenialReason::ProtocolUnknown, said: None }
    }

    pub(crate) fn naming(self, said: &[u8]) -> Self {
        let name = std::str::from_utf8(said).ok().and_then(|said| Name::new(said).ok());
        InspectionRefusal { said: name.map(|name| name.to_string()), ..self }
    }
}

/// Inspects the client's bytes of one connection, from the first byte on.
#[derive(Clone, Debug)]
pub struct Inspector {
    name: Name,
    port: u16,
    speaks: Speaks,
}

#[derive(Clone, Debug)]
enum Speaks {
    /// No byte came yet.
    Unknown,
    Tls(ClientHelloInspector),
    Http(HttpInspector),
}

impl Inspector {
    /// For a connection to this name and port.
    pub fn new(name: Name, port: u16) -> Self {
        Inspector { name, port, speaks: Speaks::Unknown }
    }

    /// How many of the held bytes may be sent now. `held` begins with the first byte that was
    /// not released, and includes bytes that an earlier call has seen.
    ///
    /// # Errors
    /// The connection must end, and no more of its bytes may be sent.
    pub fn examine(&mut self, held: &[u8]) -> Result<usize, InspectionRefusal> {
        if let (Speaks::Unknown, Some(first)) = (&self.speaks, held.first()) {
            self.speaks = match first {
                4 | 5 if held.len() == 1 => return Ok(0),
                22 => Speaks::Tls(ClientHelloInspector::default()),
                b'A'..=b'Z' => Speaks::Http(HttpInspector::default()),
                _ if is_socks(held) => return Err(InspectionRefusal { reason: DenialReason::Proxy, ..InspectionRefusal::unknown() }),
                _ => return Err(InspectionRefusal::unknown()),
            };
        }
        let released = match &mut self.speaks {
            Speaks::Unknown => 0,
            Speaks::Tls(check) => check.examine(held, &self.name)?,
            Speaks::Http(check) => check.examine(held, &self.name, self.port)?,
        };
        if held.len() - released > MAX_HELD {
            return Err(match self.speaks {
                Speaks::Http(_) => InspectionRefusal::http(DenialReason::HttpMalformed),
                _ => InspectionRefusal::tls(DenialReason::TlsMalformed),
            });
        }
        Ok(released)
    }

    /// All later bytes may be sent without inspection.
    pub fn is_through(&self) -> bool {
        matches!(&self.speaks, Speaks::Tls(check) if check.is_through())
    }

    /// A ClientHello for the right server was accepted.
    pub fn saw_server_name(&self) -> bool {
        matches!(&self.speaks, Speaks::Tls(check) if check.was_accepted())
    }
}

/// Whether bytes begin as a request to a SOCKS proxy does: with version 5 and how many methods the
/// client knows (RFC 1928), or version 4 and the command 1 or 2. Other protocols have the same
/// first byte, so that the second is waited for.
fn is_socks(held: &[u8]) -> bool {
    matches!(held, [5, methods, ..] if *methods > 0) || matches!(held, [4, 1 | 2, ..])
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use super::*;
    use crate::tls::tests::hello;

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
    fn what_was_said_instead_is_a_name_or_is_not_shown() {
        for (host, said) in
            [("Evil.example", Some("evil.example")), ("evil.example:80", Some("evil.example")), ("a\tb", None), ("10.0.0.1", None)]
        {
            let refused = inspector().examine(format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n").as_bytes()).unwrap_err();
            assert_eq!((refused.reason, refused.said.as_deref()), (DenialReason::HostMismatch, said), "{host}");
        }
        assert_eq!(inspector().examine(&hello("evil.example")).unwrap_err().said.as_deref(), Some("evil.example"));
    }

    #[test]
    fn a_protocol_that_begins_with_letters_is_not_taken_for_http() {
        let refused = inspector().examine(b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n").unwrap_err();
        assert_eq!((refused.kind, refused.reason), (DenialKind::Connect, DenialReason::ProtocolUnknown));
    }

    #[test]
    fn a_request_to_a_proxy_is_told_from_others() {
        for request in [
            &b"CONNECT pypi.org:443 HTTP/1.1\r\nHost: pypi.org:443\r\n\r\n"[..],
            b"CONNECT pypi.org:443 HTTP/1.1\r\nHost: api.internal:8443\r\n\r\n",
            b"GET http://pypi.org/simple HTTP/1.1\r\nHost: pypi.org\r\n\r\n",
            b"GET ftp://pypi.org/simple HTTP/1.1\r\nHost: pypi.org\r\n\r\n",
            b"\x05\x01\x00",
            b"\x05\x02\x00\x02",
            b"\x04\x01\x01\xbb\x01\x02\x03\x04\x00",
        ] {
            assert_eq!(reason(request), DenialReason::Proxy, "{request:?}");
        }
        for other in [&b"\x06\x01\x00"[..], b"\x04\x00\x00\x00\x01", b"\x05\x00\x00\x00\x05", b"\x04\x03"] {
            assert_eq!(reason(other), DenialReason::ProtocolUnknown, "{other:?}");
        }
        let mut in_pieces = inspector();
        assert_eq!(in_pieces.examine(b"\x05"), Ok(0), "one byte decides nothing");
        assert_eq!(in_pieces.examine(b"\x05\x01").unwrap_err().reason, DenialReason::Proxy);
        let own = b"GET http://api.internal:8443/ HTTP/1.1\r\nHost: api.internal:8443\r\n\r\n";
        assert_eq!(inspector().examine(own), Ok(own.len()), "the control");
    }

    #[test]
    fn no_more_is_held_than_was_promised() {
        let mut request = b"GET / HTTP/1.1\r\nHost: api.internal\r\nX: ".to_vec();
        request.resize(MAX_HELD, b'a');
        assert_eq!(inspector().examine(&request), Ok(0));
        request.push(b'a');
        assert_eq!(reason(&request), DenialReason::HttpMalformed);
    }
}
