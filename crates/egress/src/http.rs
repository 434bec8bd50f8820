//! Reads the HTTP/1 requests of a client: each must be for the right host.
//!
//! A head is released when it is complete and valid, a body as it arrives. The end of a request
//! must be certain, because the next one begins there. Forms that servers are known to read in
//! different ways (two lengths, a length with chunks, bare line feeds, trailers) are refused, and
//! so are upgrades to another protocol. RFC 9112.

use stockade_policy::whitelist::Name;
use stockade_protocol::DenialReason;

use crate::inspect::InspectionRefusal;

/// Bytes of one head: all that can be held.
const MAX_HEAD_LEN: usize = crate::inspect::MAX_HELD;
/// Header lines of one head.
const MAX_HEADERS: usize = 128;
/// Digits of a chunk's length, and the line's end.
const MAX_CHUNK_LINE_LEN: usize = 16 + 2;

/// Follows the requests of one connection's client.
#[derive(Clone, Debug, Default)]
pub struct HttpInspector {
    stage: Stage,
    /// How many of the held bytes were searched for the end of the head or line.
    searched: usize,
    /// Whether a valid request came before.
    spoke: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stage {
    /// A request's head.
    #[default]
    Head,
    /// This many bytes of a body with a length.
    Body(u64),
    /// The line before a chunk.
    ChunkLine,
    /// This many bytes of a chunk and its line end.
    Chunk(u64),
    /// The empty line after the last chunk.
    LastLine,
}

impl HttpInspector {
    /// How many of the held bytes may leave; see [`crate::inspect::Inspector::examine`].
    ///
    /// # Errors
    /// No HTTP/1, another host, or an ambiguous end.
    pub fn examine(&mut self, held: &[u8], name: &Name, port: u16) -> Result<usize, InspectionRefusal> {
        let mut released = 0;
        loop {
            let rest = &held[released..];
            if rest.is_empty() {
                self.searched = 0;
                return Ok(released);
            }
            let taken = match self.stage {
                Stage::Head => self.head(rest, name, port)?,
                Stage::Body(left) => Some(self.pass(rest, left, Stage::Body, Stage::Head)),
                Stage::ChunkLine => self.chunk_line(rest)?,
                Stage::Chunk(left) => Some(self.chunk(rest, left)?),
                Stage::LastLine => self.last_line(rest)?,
            };
            match taken {
                Some(taken) => {
                    released += taken;
                    // A whole head or line was taken: search from the start.
                    self.searched = 0;
                }
                None => return Ok(released),
            }
        }
    }

    fn head(&mut self, held: &[u8], name: &Name, port: u16) -> Result<Option<usize>, InspectionRefusal> {
        let malformed = || InspectionRefusal::http(DenialReason::HttpMalformed);
        let Some(end) = self.find_end(held)? else {
            return if held.len() > MAX_HEAD_LEN { Err(malformed()) } else { Ok(None) };
        };
        if end > MAX_HEAD_LEN {
            return Err(malformed());
        }
        self.stage = check_head(&held[..end], name, port)?;
        self.spoke = true;
        Ok(Some(end))
    }

    /// The length of a head with its empty line. CR and LF occur only as line ends, because
    /// some servers accept a bare one as a line end.
    fn find_end(&mut self, held: &[u8]) -> Result<Option<usize>, InspectionRefusal> {
        while let Some(&byte) = held.get(self.searched) {
            let after_return = self.searched.checked_sub(1).and_then(|before| held.get(before)) == Some(&b'\r');
            if (byte == b'\n') != after_return {
                return Err(self.no_http());
            }
            self.searched += 1;
            let line_begin = || held[..self.searched - 2].iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
            if byte == b'\n' {
                let begin = line_begin();
                if begin == 0 && !self.spoke && !is_request_line(&held[..self.searched - 2]) {
                    return Err(self.no_http());
                }
                if self.searched - 2 == begin {
                    return Ok(Some(self.searched));
                }
            }
        }
        Ok(None)
    }

    /// The first bytes may belong to another protocol.
    fn no_http(&self) -> InspectionRefusal {
        if self.spoke { InspectionRefusal::http(DenialReason::HttpMalformed) } else { InspectionRefusal::unknown() }
    }

    fn pass(&mut self, held: &[u8], left: u64, more: impl Fn(u64) -> Stage, done: Stage) -> usize {
        let taken = usize::try_from(left).map_or(held.len(), |left| left.min(held.len()));
        let left = left - taken as u64;
        self.stage = if left > 0 { more(left) } else { done };
        taken
    }

    fn chunk_line(&mut self, held: &[u8]) -> Result<Option<usize>, InspectionRefusal> {
        let malformed = || InspectionRefusal::http(DenialReason::HttpMalformed);
        let Some(end) = held.iter().take(MAX_CHUNK_LINE_LEN).position(|byte| *byte == b'\n') else {
            return if held.len() >= MAX_CHUNK_LINE_LEN { Err(malformed()) } else { Ok(None) };
        };
        let digits = held[..end].strip_suffix(b"\r").ok_or_else(malformed)?;
        let length = number(digits, 16).ok_or_else(malformed)?;
        self.stage = match length {
            0 => Stage::LastLine,
            length => Stage::Chunk(length.checked_add(2).ok_or_else(malformed)?),
        };
        Ok(Some(end + 1))
    }

    /// The bytes of a chunk, then CR and LF, which are checked.
    fn chunk(&mut self, held: &[u8], left: u64) -> Result<usize, InspectionRefusal> {
        let data = left.saturating_sub(2);
        if data > 0 {
            return Ok(self.pass(held, data, |data| Stage::Chunk(data + 2), Stage::Chunk(2)));
        }
        let wanted = if left == 2 { b'\r' } else { b'\n' };
        if held[0] != wanted {
            return Err(InspectionRefusal::http(DenialReason::HttpMalformed));
        }
        self.stage = if left == 2 { Stage::Chunk(1) } else { Stage::ChunkLine };
        Ok(1)
    }

    /// Trailers are refused: they could name another host.
    fn last_line(&mut self, held: &[u8]) -> Result<Option<usize>, InspectionRefusal> {
        if !b"\r\n".starts_with(&held[..held.len().min(2)]) {
            return Err(InspectionRefusal::http(DenialReason::HttpMalformed));
        }
        if held.len() < 2 {
            return Ok(None);
        }
        self.stage = Stage::Head;
        Ok(Some(2))
    }
}

/// Whether a line ends like a request line.
fn is_request_line(line: &[u8]) -> bool {
    [&b" HTTP/1.1"[..], b" HTTP/1.0", b" HTTP/2.0"].iter().any(|ending| line.ends_with(ending))
}

/// Reads a whole head, and returns what follows it.
fn check_head(head: &[u8], name: &Name, port: u16) -> Result<Stage, InspectionRefusal> {
    let malformed = || InspectionRefusal::http(DenialReason::HttpMalformed);
    if head.starts_with(b"PRI ") {
        return Err(InspectionRefusal::http(DenialReason::Http2Cleartext));
    }
    // The parser skips empty lines before the request.
    if !head[0].is_ascii_uppercase() {
        return Err(malformed());
    }
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    match request.parse(head) {
        Ok(httparse::Status::Complete(length)) if length == head.len() => {}
        _ => return Err(malformed()),
    }
    let (Some(method), Some(target), Some(version)) = (request.method, request.path, request.version) else {
        return Err(malformed());
    };
    check_proxy(method, target, name, port)?;
    check_host(one(&request, "host")?, name, port)?;
    check_target(method, target)?;
    check_upgrade(&request)?;
    framing(&request, version)
}

/// The single value of a header. Two are refused, even if equal.
fn one<'a>(request: &httparse::Request<'_, 'a>, wanted: &str) -> Result<Option<&'a [u8]>, InspectionRefusal> {
    let mut found = request.headers.iter().filter(|header| header.name.eq_ignore_ascii_case(wanted));
    let value = found.next().map(|header| header.value);
    if found.next().is_some() {
        return Err(InspectionRefusal::http(DenialReason::HttpMalformed));
    }
    Ok(value)
}

fn check_host(host: Option<&[u8]>, name: &Name, port: u16) -> Result<(), InspectionRefusal> {
    let host = host.filter(|host| !host.is_empty()).ok_or_else(|| InspectionRefusal::http(DenialReason::HostMissing))?;
    is_authority(host, name, port).then_some(()).ok_or_else(|| InspectionRefusal::http(DenialReason::HostMismatch).naming(host_of(host)))
}

/// A host without its port.
fn host_of(authority: &[u8]) -> &[u8] {
    authority.split(|byte| *byte == b':').next().unwrap_or_default()
}

/// Whether this is the name, with or without the connection's port.
fn is_authority(text: &[u8], name: &Name, port: u16) -> bool {
    let Ok(text) = std::str::from_utf8(text) else { return false };
    let (host, own_port) = match text.split_once(':') {
        Some((host, said)) => (host, said == port.to_string()),
        None => (text, true),
    };
    own_port && Name::new(host).is_ok_and(|said| said == *name)
}

/// CONNECT, and a whole URL for another host, are requests to a proxy.
fn check_proxy(method: &str, target: &str, name: &Name, port: u16) -> Result<(), InspectionRefusal> {
    let authority = match target.split_once("://") {
        _ if method == "CONNECT" => target,
        Some((scheme, rest)) if scheme.bytes().all(|byte| byte.is_ascii_alphanumeric()) => {
            // Some servers end the host at a `?` or `#`, others at the slash that follows.
            if is_authority(rest.split('/').next().unwrap_or_default().as_bytes(), name, port) {
                return Ok(());
            }
            rest.split(['/', '?', '#']).next().unwrap_or_default()
        }
        _ => return Ok(()),
    };
    Err(InspectionRefusal::http(DenialReason::Proxy).naming(host_of(authority.as_bytes())))
}

/// A path, `*`, or a whole URL; [`check_proxy`] has checked its host. No fragment is sent to a
/// server (RFC 9112, 3.2): where one begins, servers read the rest in different ways.
fn check_target(method: &str, target: &str) -> Result<(), InspectionRefusal> {
    let is_url = target.get(..7).is_some_and(|scheme| scheme.eq_ignore_ascii_case("http://"));
    let is_own = target.starts_with('/') || (target == "*" && method == "OPTIONS") || is_url;
    (is_own && !target.contains('#')).then_some(()).ok_or_else(|| InspectionRefusal::http(DenialReason::HttpMalformed))
}

/// After an upgrade the client would send another protocol. An offer of HTTP/2 is harmless:
/// it needs a preface, which is refused.
fn check_upgrade(request: &httparse::Request<'_, '_>) -> Result<(), InspectionRefusal> {
    match one(request, "upgrade")? {
        Some(value) if !value.eq_ignore_ascii_case(b"h2c") => Err(InspectionRefusal::http(DenialReason::HttpTunnel)),
        _ => Ok(()),
    }
}

/// What follows the head: a body with a length, chunks, or the next head.
fn framing(request: &httparse::Request<'_, '_>, version: u8) -> Result<Stage, InspectionRefusal> {
    let malformed = || InspectionRefusal::http(DenialReason::HttpMalformed);
    let length = one(request, "content-length")?.map(|value| number(value, 10).ok_or_else(malformed)).transpose()?;
    // Some servers treat `_` in a header's name as `-`.
    let lookalike = ["content_length", "transfer_encoding"];
    if request.headers.iter().any(|header| lookalike.iter().any(|name| header.name.eq_ignore_ascii_case(name))) {
        return Err(malformed());
    }
    match (length, one(request, "transfer-encoding")?) {
        (None, None) | (Some(0), None) => Ok(Stage::Head),
        (Some(length), None) => Ok(Stage::Body(length)),
        (None, Some(coding)) if version == 1 && coding.eq_ignore_ascii_case(b"chunked") => Ok(Stage::ChunkLine),
        _ => Err(malformed()),
    }
}

/// A number of at most 16 digits.
fn number(digits: &[u8], radix: u32) -> Option<u64> {
    if digits.is_empty() || digits.len() > 16 {
        return None;
    }
    digits.iter().try_fold(0u64, |value, digit| {
        let digit = char::from(*digit).to_digit(radix)?;
        value.checked_mul(radix.into())?.checked_add(digit.into())
    })
}

#[cfg(test)]
mod tests;
