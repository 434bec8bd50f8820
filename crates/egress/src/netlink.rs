//! Netlink messages: building them, sending them in one piece, and reading every
//! acknowledgement (`linux/netlink.h`).
//!
//! It does not know what the messages mean.

use rustix::{
    fd::BorrowedFd,
    io::Errno,
    net::{RecvFlags, SendFlags, recv, send},
};

/// NLM_F_REQUEST | NLM_F_ACK.
pub(crate) const ACKNOWLEDGED: u16 = 5;
/// NLM_F_REQUEST alone.
pub const REQUEST: u16 = 1;
/// NLM_F_CREATE.
pub(crate) const CREATE: u16 = 0x400;
/// NLM_F_EXCL.
pub(crate) const EXCLUSIVE: u16 = 0x200;
/// NLM_F_APPEND.
pub(crate) const APPEND: u16 = 0x800;

const HEADER: usize = 16;
const NLMSG_ERROR: u16 = 2;
const NLA_F_NESTED: u16 = 1 << 15;

/// Messages for one send. The sequence number of each is its index.
#[derive(Default)]
pub struct Messages {
    bytes: Vec<u8>,
    count: u32,
    wanted: Vec<u32>,
}

/// A request that the kernel refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NetlinkError {
    /// The index of the message.
    pub(crate) index: u32,
    pub(crate) errno: Errno,
}

impl Messages {
    /// Adds a message; `body` writes what follows the header.
    pub fn message(&mut self, kind: u16, flags: u16, body: impl FnOnce(&mut Body<'_>)) {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(&[0; 4]);
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        self.bytes.extend_from_slice(&flags.to_ne_bytes());
        self.bytes.extend_from_slice(&self.count.to_ne_bytes());
        self.bytes.extend_from_slice(&[0; 4]);
        if flags & ACKNOWLEDGED == ACKNOWLEDGED {
            self.wanted.push(self.count);
        }
        self.count += 1;
        body(&mut Body { bytes: &mut self.bytes });
        let length = u32::try_from(self.bytes.len() - start).unwrap_or(u32::MAX);
        put(&mut self.bytes, start, &length.to_ne_bytes());
        pad(&mut self.bytes);
    }

    /// The bytes to send.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Sends all messages and reads every acknowledgement that was requested.
    pub(crate) fn apply(&self, socket: BorrowedFd<'_>) -> Result<(), NetlinkError> {
        let failed = |errno| NetlinkError { index: u32::MAX, errno };
        let sent = send(socket, &self.bytes, SendFlags::NOSIGNAL).map_err(failed)?;
        if sent != self.bytes.len() {
            return Err(failed(Errno::MSGSIZE));
        }
        let mut left = self.wanted.clone();
        let mut buffer = vec![0u8; 16 << 10];
        while !left.is_empty() {
            // The kernel answers before send returns, so recv never waits.
            let (_, length) = rustix::io::retry_on_intr(|| recv(socket, &mut buffer[..], RecvFlags::empty())).map_err(failed)?;
            for (kind, sequence, body) in Received::new(buffer.get(..length).unwrap_or_default()) {
                let code = body.first_chunk::<4>().map(|code| i32::from_ne_bytes(*code));
                match (kind, code) {
                    (NLMSG_ERROR, Some(0)) => left.retain(|wanted| *wanted != sequence),
                    (NLMSG_ERROR, Some(code)) => {
                        return Err(NetlinkError { index: sequence, errno: Errno::from_raw_os_error(code.saturating_neg()) });
                    }
                    _ => {}
                }
            }
        }
        Ok(())
    }
}

/// The part of a message behind its header.
pub struct Body<'a> {
    bytes: &'a mut Vec<u8>,
}

impl Body<'_> {
    /// Raw bytes.
    pub fn raw(&mut self, bytes: &[u8]) -> &mut Self {
        self.bytes.extend_from_slice(bytes);
        self
    }

    /// An attribute.
    pub(crate) fn attribute(&mut self, kind: u16, value: &[u8]) -> &mut Self {
        let length = u16::try_from(value.len() + 4).unwrap_or(u16::MAX);
        self.raw(&length.to_ne_bytes()).raw(&kind.to_ne_bytes()).raw(value);
        pad(self.bytes);
        self
    }

    /// An attribute that is a NUL-terminated string.
    pub(crate) fn text(&mut self, kind: u16, value: &str) -> &mut Self {
        let mut bytes = value.as_bytes().to_vec();
        bytes.push(0);
        self.attribute(kind, &bytes)
    }

    /// An attribute in network byte order, as netfilter wants its integers.
    pub(crate) fn number(&mut self, kind: u16, value: u32) -> &mut Self {
        self.attribute(kind, &value.to_be_bytes())
    }

    /// The same, 64 bits wide.
    pub(crate) fn wide(&mut self, kind: u16, value: u64) -> &mut Self {
        self.attribute(kind, &value.to_be_bytes())
    }

    /// A nested attribute.
    pub(crate) fn nest(&mut self, kind: u16, inner: impl FnOnce(&mut Body<'_>)) -> &mut Self {
        let start = self.bytes.len();
        self.raw(&[0, 0]).raw(&(kind | NLA_F_NESTED).to_ne_bytes());
        inner(&mut Body { bytes: self.bytes });
        let length = u16::try_from(self.bytes.len() - start).unwrap_or(u16::MAX);
        put(self.bytes, start, &length.to_ne_bytes());
        self
    }
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    if let Some(slot) = bytes.get_mut(at..at + value.len()) {
        slot.copy_from_slice(value);
    }
}

fn pad(bytes: &mut Vec<u8>) {
    bytes.resize(bytes.len().next_multiple_of(4), 0);
}

/// The messages in what was received: type, sequence number, body.
pub struct Received<'a> {
    rest: &'a [u8],
}

impl<'a> Received<'a> {
    /// Of what one recv has returned.
    pub fn new(bytes: &'a [u8]) -> Self {
        Received { rest: bytes }
    }
}

impl<'a> Iterator for Received<'a> {
    type Item = (u16, u32, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let length = u32::from_ne_bytes(*self.rest.first_chunk()?) as usize;
        let kind = u16::from_ne_bytes(*self.rest.get(4..)?.first_chunk()?);
        let sequence = u32::from_ne_bytes(*self.rest.get(8..)?.first_chunk()?);
        let body = self.rest.get(HEADER..length)?;
        self.rest = self.rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, sequence, body))
    }
}

/// The attributes in a body: type without its flags, value.
pub struct Attributes<'a> {
    rest: &'a [u8],
}

impl<'a> Attributes<'a> {
    /// Of the part of a body behind what its type has in front.
    pub fn new(bytes: &'a [u8]) -> Self {
        Attributes { rest: bytes }
    }
}

impl<'a> Iterator for Attributes<'a> {
    type Item = (u16, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let length = usize::from(u16::from_ne_bytes(*self.rest.first_chunk()?));
        let kind = u16::from_ne_bytes(*self.rest.get(2..)?.first_chunk()?) & 0x3fff;
        let value = self.rest.get(4..length)?;
        self.rest = self.rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    }
}
