//! Reads the TLS ClientHello as it arrives: in pieces, over several records.
//!
//! It must have exactly one server name, the right one, in the clear, before any byte is sent.
//! After the first hello the records are followed until a second one cannot come any more, because
//! a server may ask for one (HelloRetryRequest) and would use its name. Encrypted data is not seen:
//! for example, a Host header for another site of the same server.
//! RFC 8446 §4.1.2, §5.1; RFC 6066 §3; RFC 9849.

use std::collections::BTreeSet;

use stockade_policy::whitelist::Name;
use stockade_protocol::DenialReason;

use crate::inspect::InspectionRefusal;

/// Bytes of one hello. Browsers with post-quantum keys send about 2000.
const MAX_HELLO_LEN: usize = 16 << 10;
/// Records over which a hello may be spread.
const MAX_RECORDS: usize = 64;
/// Bytes of one unencrypted record.
const MAX_RECORD_LEN: usize = 1 << 14;
/// What encryption may add.
const EXPANSION: usize = 256;

const CHANGE_CIPHER_SPEC: u8 = 20;
const ALERT: u8 = 21;
const HANDSHAKE: u8 = 22;
const APPLICATION_DATA: u8 = 23;
const CLIENT_HELLO: u8 = 1;

const SERVER_NAME: u16 = 0;
const EARLY_DATA: u16 = 42;
/// Encrypted ClientHello: the standard and the drafts.
const ENCRYPTED: [u16; 2] = [0xfe0d, 0xffce];

/// Follows the records of one connection's client.
#[derive(Clone, Debug, Default)]
pub struct ClientHelloInspector {
    stage: Stage,
    /// Where in the held bytes the next record begins.
    next: usize,
    /// The ranges of the current hello in the held bytes.
    pieces: Vec<std::ops::Range<usize>>,
    /// Data may come before the second hello.
    early: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stage {
    /// The first hello is incomplete.
    #[default]
    First,
    /// One was accepted, another may come. This many bytes of a record pass first.
    Between(usize),
    /// The second one is incomplete.
    Second,
    /// No other can come.
    Through,
}

impl ClientHelloInspector {
    /// How many of the held bytes may leave; see [`crate::inspect::Inspector::examine`].
    ///
    /// # Errors
    /// No hello, or another server.
    pub fn examine(&mut self, held: &[u8], name: &Name) -> Result<usize, InspectionRefusal> {
        let mut released = 0;
        loop {
            let rest = &held[released..];
            match self.stage {
                Stage::Through => return Ok(held.len()),
                Stage::Between(pass) if pass > 0 => {
                    let pass_now = pass.min(rest.len());
                    released += pass_now;
                    self.stage = Stage::Between(pass - pass_now);
                    if released == held.len() {
                        return Ok(released);
                    }
                }
                Stage::Between(_) => match self.after_hello(rest)? {
                    Some(stage) => self.stage = stage,
                    None => return Ok(released),
                },
                Stage::First | Stage::Second => {
                    let Some(hello) = self.whole_hello(rest)? else { return Ok(released) };
                    self.early |= check(&hello, name)?;
                    released += self.next;
                    (self.next, self.pieces) = (0, Vec::new());
                    self.stage = if self.stage == Stage::First { Stage::Between(0) } else { Stage::Through };
                }
            }
        }
    }

    /// No other hello can come.
    pub fn is_through(&self) -> bool {
        self.stage == Stage::Through
    }

    /// A hello for the right server has come.
    pub fn was_accepted(&self) -> bool {
        self.stage != Stage::First
    }

    /// Reads records until a hello is complete.
    fn whole_hello(&mut self, held: &[u8]) -> Result<Option<Vec<u8>>, InspectionRefusal> {
        let malformed = || InspectionRefusal::tls(DenialReason::TlsMalformed);
        while let Some(header) = held.get(self.next..self.next + 5) {
            let length = usize::from(u16::from_be_bytes([header[3], header[4]]));
            let plain = header[0] == HANDSHAKE && header[1] == 3 && header[2] <= 4;
            if !plain || length == 0 || length > MAX_RECORD_LEN || self.pieces.len() == MAX_RECORDS {
                return Err(malformed());
            }
            let begin = self.next + 5;
            if held.len() < begin + length {
                break;
            }
            self.pieces.push(begin..begin + length);
            self.next = begin + length;
            let total: usize = self.pieces.iter().map(|piece| piece.len()).sum();
            let start: Vec<u8> = self.pieces.iter().flat_map(|piece| &held[piece.clone()]).take(4).copied().collect();
            let [kind, high, middle, low] = start[..] else { continue };
            let wanted = 4 + usize::from(high) * 65536 + usize::from(middle) * 256 + usize::from(low);
            // Bytes after the hello in its record would be unchecked.
            if kind != CLIENT_HELLO || wanted > MAX_HELLO_LEN || total > wanted {
                return Err(malformed());
            }
            if total == wanted {
                return Ok(Some(self.pieces.iter().flat_map(|piece| &held[piece.clone()]).skip(4).copied().collect()));
            }
        }
        Ok(None)
    }

    /// The stage after a record that follows the first hello; none while it is too short.
    fn after_hello(&self, held: &[u8]) -> Result<Option<Stage>, InspectionRefusal> {
        let Some(header) = held.get(..5) else { return Ok(None) };
        let length = usize::from(u16::from_be_bytes([header[3], header[4]]));
        let malformed = Err(InspectionRefusal::tls(DenialReason::TlsMalformed));
        if header[1] != 3 || length > MAX_RECORD_LEN + EXPANSION {
            return malformed;
        }
        match header[0] {
            // For middleboxes (RFC 8446, D.4), and a warning: neither ends the handshake.
            CHANGE_CIPHER_SPEC | ALERT => Ok(Some(Stage::Between(5 + length))),
            // Early data; the server may still send HelloRetryRequest.
            APPLICATION_DATA if self.early => Ok(Some(Stage::Between(5 + length))),
            APPLICATION_DATA => Ok(Some(Stage::Through)),
            // An empty one is invalid (RFC 8446, 5.1), although some servers skip it.
            HANDSHAKE if length > 0 => Ok(held.get(5).map(|kind| if *kind == CLIENT_HELLO { Stage::Second } else { Stage::Through })),
            _ => malformed,
        }
    }
}

/// Checks one hello without its header, and returns whether it announces early data.
fn check(hello: &[u8], name: &Name) -> Result<bool, InspectionRefusal> {
    let malformed = || InspectionRefusal::tls(DenialReason::TlsMalformed);
    let mut hello = Bytes(hello);
    let extensions = read_past_suites(&mut hello).ok_or_else(malformed)?;
    let mut extensions = Bytes(extensions);
    let mut seen = BTreeSet::new();
    let mut server = None;
    while !extensions.0.is_empty() {
        let (kind, body) = extensions.u16().zip(extensions.vector16()).ok_or_else(malformed)?;
        if !seen.insert(kind) {
            return Err(malformed());
        }
        if ENCRYPTED.contains(&kind) {
            return Err(InspectionRefusal::tls(DenialReason::Ech));
        }
        if kind == SERVER_NAME {
            server = Some(body);
        }
    }
    let list = server.ok_or_else(|| InspectionRefusal::tls(DenialReason::SniMissing))?;
    let said = host_name(list).ok_or_else(malformed)?;
    let same = std::str::from_utf8(said).ok().and_then(|text| Name::new(text).ok()).is_some_and(|said| said == *name);
    if !same {
        return Err(InspectionRefusal::tls(DenialReason::SniMismatch).naming(said));
    }
    Ok(seen.contains(&EARLY_DATA))
}

/// The extensions, which must end the hello.
fn read_past_suites<'a>(hello: &mut Bytes<'a>) -> Option<&'a [u8]> {
    hello.take(2 + 32)?;
    let session = hello.vector8()?;
    let suites = hello.vector16()?;
    let compression = hello.vector8()?;
    let sound = session.len() <= 32 && suites.len() >= 2 && suites.len().is_multiple_of(2) && !compression.is_empty();
    // An old client has none, and names no server.
    let extensions = if hello.0.is_empty() { &[][..] } else { hello.vector16()? };
    (sound && hello.0.is_empty()).then_some(extensions)
}

/// The host name of a list with one entry.
fn host_name(list: &[u8]) -> Option<&[u8]> {
    let mut body = Bytes(list);
    let mut names = Bytes(body.vector16()?);
    let kind = names.take(1)?;
    let name = names.vector16()?;
    (kind == [0] && !name.is_empty() && names.0.is_empty() && body.0.is_empty()).then_some(name)
}

/// A reader from the front.
struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (front, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(front)
    }

    fn u16(&mut self) -> Option<u16> {
        self.take(2).map(|bytes| u16::from_be_bytes([bytes[0], bytes[1]]))
    }

    /// Bytes after a length of one byte.
    fn vector8(&mut self) -> Option<&'a [u8]> {
        let length = usize::from(self.take(1)?[0]);
        self.take(length)
    }

    /// Bytes after a length of two bytes.
    fn vector16(&mut self) -> Option<&'a [u8]> {
        let length = usize::from(self.u16()?);
        self.take(length)
    }
}

#[cfg(test)]
pub(crate) mod tests;
