//! The end of a log file: its last whole record, and the bytes behind it.
//!
//! A writer checks only that the last record carries the hash of the one before it, and that
//! the bytes behind it are as few as some dying writers leave. `verify` checks the rest.

use std::{fs::File, os::unix::fs::FileExt, path::Path};

use crate::{
    AuditError,
    chain::{Header, Link, MAX_LINE_LEN, MAX_RESIDUE},
    failed,
    text::sha256,
};

/// The first look; most records are shorter.
const WINDOW: usize = 8 << 10;

/// The end of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tail {
    /// The last record.
    pub link: Link,
    /// Bytes up to its end, its line break counted.
    pub whole: u64,
    /// Bytes behind it, with the line break that the next writer ends them with.
    pub residue: u64,
    /// That line break is missing.
    pub unended: bool,
    /// When the last record was written.
    pub time: String,
    /// That record is the one that begins the file.
    pub is_first: bool,
}

impl Tail {
    pub(crate) fn read(file: &File, path: &Path) -> Result<Self, AuditError> {
        let corrupted = |why| AuditError::Corrupted { path: path.to_path_buf(), why };
        let length = file.metadata().map_err(failed("look at", path))?.len();
        let mut window = WINDOW;
        loop {
            let start = length.saturating_sub(window as u64);
            let mut bytes = vec![0; usize::try_from(length - start).unwrap_or(0)];
            file.read_exact_at(&mut bytes, start).map_err(failed("read", path))?;
            // A record that only lacks its line break is a record.
            let unended = bytes.last().is_some_and(|byte| *byte != b'\n');
            if unended {
                bytes.push(b'\n');
            }
            match find(&bytes, start == 0) {
                Found::Last { header, line, end, linked } => {
                    if !linked {
                        return Err(corrupted("its last record does not carry the hash of the one before"));
                    }
                    let link = Link { chain: header.chain, seq: header.seq, hash: sha256(&bytes[line..end - 1]) };
                    let whole = start + end as u64;
                    let residue = length + u64::from(unended) - whole;
                    if residue > MAX_RESIDUE {
                        return Err(corrupted("more bytes stand behind its last record than dying writers leave"));
                    }
                    return Ok(Tail { link, whole, residue, unended, time: header.time, is_first: header.event == "opened" });
                }
                Found::Nothing if start == 0 || window as u64 > MAX_RESIDUE + 2 * MAX_LINE_LEN as u64 => {
                    return Err(corrupted("it does not end with a record, nor with what a dying writer leaves"));
                }
                Found::Nothing => window *= 4,
            }
        }
    }
}

enum Found {
    Last { header: Box<Header>, line: usize, end: usize, linked: bool },
    Nothing,
}

/// The last record in these bytes; `all`: they begin where the file does.
fn find(bytes: &[u8], all: bool) -> Found {
    let mut ends = bytes.iter().enumerate().rev().filter(|(_, byte)| **byte == b'\n').map(|(index, _)| index + 1).peekable();
    while let Some(end) = ends.next() {
        let before = ends.peek().copied();
        let line = match before {
            Some(start) => start,
            None if all => 0,
            None => return Found::Nothing,
        };
        let Some(header) = Header::parse(&bytes[line..end - 1]) else { continue };
        let linked = match (before, header.event.as_str()) {
            // The torn bytes lie between the mark and the record before.
            (_, "torn") => true,
            (None, _) => header.event == "opened",
            (Some(before), _) => {
                ends.next();
                let start = match ends.peek().copied() {
                    Some(start) => start,
                    None if all => 0,
                    None => return Found::Nothing,
                };
                header.prev == sha256(&bytes[start..before - 1])
            }
        };
        return Found::Last { header: Box::new(header), line, end, linked };
    }
    Found::Nothing
}
