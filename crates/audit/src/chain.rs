//! One line of the log, and its place in the chain.
//!
//! The hash of a line covers its bytes in the file, without the line break; the next line
//! carries that hash. So no other way to write the same JSON matters.

use serde::{Deserialize, Serialize};
use stockade_protocol::text::{escape_json, is_not_ascii};

use crate::{event::Event, text::sha256};

/// The longest line that is written, in bytes.
pub const MAX_LINE_LEN: usize = 64 << 10;
/// Bytes that dying writers may leave behind the last record, with the line break that ends them;
/// more are corruption.
pub(crate) const MAX_RESIDUE: u64 = 16 * MAX_LINE_LEN as u64;
/// What the first record of a chain carries in place of a hash.
pub const ZERO: &str = "0000000000000000000000000000000000000000000000000000000000000000";

/// The last record of a chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// The chain's own number.
    pub chain: String,
    /// The number of its last record, from 1 on.
    pub seq: u64,
    /// SHA-256 of that record's line.
    pub hash: String,
}

/// The file before this one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PreviousFile {
    /// Its name.
    pub file: String,
    /// SHA-256 of its last record.
    pub sha256: String,
}

/// Files that `rotate` has removed because they were old enough.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemovedFiles {
    /// How many.
    pub files: u64,
    /// The last of them.
    pub last: PreviousFile,
}

/// Bytes that are no record, as of a writer that died in the middle of a line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TornBytes {
    /// How many, with their last line break.
    pub bytes: u64,
    /// Their SHA-256.
    pub sha256: String,
    /// The line break was theirs, so they are none of a dying writer.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ended: bool,
}

/// The content of a line besides its place in the chain.
#[derive(Serialize)]
#[serde(untagged)]
pub(crate) enum Body<'a> {
    /// The first record of a file.
    Opened { event: &'static str, before: Option<PreviousFile> },
    /// The bytes before this line are no record.
    Torn { event: &'static str, torn: TornBytes },
    /// The files before this one are to be removed.
    Removed { event: &'static str, removed: RemovedFiles },
    /// Everything else.
    Event(&'a Event),
}

impl Body<'_> {
    pub(crate) fn opened(before: Option<PreviousFile>) -> Self {
        Body::Opened { event: "opened", before }
    }

    pub(crate) fn removed(removed: RemovedFiles) -> Self {
        Body::Removed { event: "removed", removed }
    }

    pub(crate) fn torn(torn: TornBytes) -> Self {
        Body::Torn { event: "torn", torn }
    }
}

#[derive(Serialize)]
struct Line<'a> {
    schema: u32,
    chain: &'a str,
    seq: u64,
    prev: &'a str,
    time: &'a str,
    #[serde(flatten)]
    body: Body<'a>,
}

impl Link {
    /// Before the first record.
    pub(crate) fn beginning(chain: String) -> Self {
        Link { chain, seq: 0, hash: ZERO.to_owned() }
    }

    /// Writes the next line, which becomes the last record. No line is longer than [`MAX_LINE_LEN`]:
    /// a reader takes a longer one for bytes that are no record.
    pub(crate) fn extend(&mut self, time: &str, body: Body<'_>, out: &mut Vec<u8>) {
        let whole = if let Body::Event(event) = &body { Some(*event) } else { None };
        let seq = self.seq + 1;
        let write = |body: Body<'_>| {
            let line = Line { schema: 1, chain: &self.chain, seq, prev: &self.hash, time, body };
            // Texts and numbers always have a JSON form.
            escape_json(&serde_json::to_string(&line).unwrap_or_default(), is_not_ascii)
        };
        let mut line = write(body);
        for shorten in [Event::shortened, Event::bare] {
            if let (Some(event), true) = (whole, line.len() > MAX_LINE_LEN) {
                line = write(Body::Event(&shorten(event)));
            }
        }
        (self.seq, self.hash) = (seq, sha256(line.as_bytes()));
        out.extend_from_slice(line.as_bytes());
        out.push(b'\n');
    }
}

/// The fields of a line that the chain needs.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Header {
    /// Version of the format.
    pub schema: u32,
    /// The chain's number.
    pub chain: String,
    /// The record's number.
    pub seq: u64,
    /// SHA-256 of the record before.
    pub prev: String,
    /// What happened.
    pub event: String,
    /// Of the first record of a file: the file before.
    #[serde(default)]
    pub before: Option<PreviousFile>,
    /// Of bytes that are no record.
    #[serde(default)]
    pub torn: Option<TornBytes>,
    /// Of files that were removed.
    #[serde(default)]
    pub removed: Option<RemovedFiles>,
    /// When it was written, in UTC.
    #[serde(default)]
    pub time: String,
}

impl Header {
    /// Parses a line; `None` if it is no record.
    pub fn parse(line: &[u8]) -> Option<Self> {
        let is_hex = |text: &str, length| text.len() == length && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        let header: Header = serde_json::from_slice(line).ok()?;
        let sound = header.schema == 1 && header.seq > 0 && is_hex(&header.chain, 16) && is_hex(&header.prev, 64);
        let complete = match header.event.as_str() {
            "torn" => header.torn.is_some() && header.before.is_none(),
            "opened" => header.torn.is_none(),
            _ => header.torn.is_none() && header.before.is_none(),
        };
        let complete = complete && header.removed.is_some() == (header.event == "removed");
        (sound && complete).then_some(header)
    }
}
