//! Whether a log is whole: every line in its place, none changed, none missing.
//!
//! It reads an untrusted log line by line, in bounded memory, and reports what does not fit.
//! That records were cut off at the end it can see only with an anchor. It repairs nothing.

use std::{
    collections::BTreeMap,
    io::{self, BufRead, Read},
};

use sha2::{Digest, Sha256};
use stockade_protocol::text::hex;

use crate::{
    anchor::Anchor,
    chain::{Header, Link, MAX_LINE_LEN, MAX_RESIDUE, PreviousFile, ZERO},
    text::sha256,
};

/// More than these are counted, not listed.
const MAX_PROBLEMS: usize = 100;

/// Something wrong, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The file's name.
    pub file: String,
    /// The line, from 1 on; 0: the file as a whole.
    pub line: u64,
    /// What is wrong.
    pub what: String,
}

/// What was found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Findings {
    /// Records that were read.
    pub records: u64,
    /// Files that were read.
    pub files: u64,
    /// What is wrong; empty: nothing is.
    pub problems: Vec<Problem>,
    /// Problems beyond those.
    pub omitted: u64,
    /// Observations that prove nothing.
    pub notes: Vec<String>,
    /// Anchors that a record matched.
    pub anchored: u64,
    /// The number of the last record that matched an anchor: it and all before it are as they were
    /// written.
    pub anchored_up_to: Option<u64>,
    /// The last record.
    pub end: Option<Link>,
}

/// Goes through a log, file by file.
#[derive(Debug)]
pub struct Verifier {
    end: Option<Link>,
    /// The hash that the first record must carry; `None`: it may be any record of its chain.
    after: Option<String>,
    last_file: Option<String>,
    /// The log begins behind a file that is not here; it is a problem unless a later record states
    /// that it was removed.
    unexplained: Option<(Problem, Option<PreviousFile>)>,
    anchors: BTreeMap<(String, u64), String>,
    chains: Vec<String>,
    /// The chain that must be here.
    wanted: Option<String>,
    findings: Findings,
}

/// Bytes that are no record, until a later record accounts for them.
#[derive(Default)]
struct Residue {
    hash: Sha256,
    bytes: u64,
    line: u64,
    /// A line break ends them. A dying writer leaves none: the lines that it ends are records.
    ended: bool,
}

impl Verifier {
    /// A log that must begin with the first record of a chain, or after a known one; or, for
    /// `None`, anywhere.
    pub fn new(after: Option<&str>) -> Self {
        Verifier {
            end: None,
            after: after.map(str::to_owned),
            last_file: None,
            unexplained: None,
            anchors: BTreeMap::new(),
            chains: Vec::new(),
            wanted: None,
            findings: Findings::default(),
        }
    }

    /// A log that must begin with the first record of its chain.
    pub fn from_beginning() -> Self {
        Self::new(Some(ZERO))
    }

    /// The chain that the log must hold. Anchors of another chain that is not here prove nothing:
    /// any user writes a log of its own, and anchors of it.
    pub fn want_chain(&mut self, chain: &str) {
        self.wanted = Some(chain.to_owned());
    }

    /// What is known of the chain outside the log.
    pub fn expect(&mut self, anchors: impl IntoIterator<Item = Anchor>) {
        for Anchor { link } in anchors {
            let place = (link.chain, link.seq);
            let known = self.anchors.entry(place).or_insert_with(|| link.hash.clone());
            if *known != link.hash {
                self.problem("(anchors)", 0, format!("two anchors have different hashes for record {}", link.seq));
            }
        }
    }

    fn problem(&mut self, file: &str, line: u64, what: impl Into<String>) {
        if self.findings.problems.len() < MAX_PROBLEMS {
            self.findings.problems.push(Problem { file: file.to_owned(), line, what: what.into() });
        } else {
            self.findings.omitted += 1;
        }
    }

    /// Reads the next file. `last`: writers may still be adding to it.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn file(&mut self, name: &str, input: impl Read, last: bool) -> io::Result<()> {
        let mut input = io::BufReader::new(input);
        let (mut line, mut bytes, mut residue, mut first) = (0, Vec::new(), Residue::default(), true);
        self.findings.files += 1;
        loop {
            bytes.clear();
            // A writer makes no longer line; it is read in pieces.
            if (&mut input).take(2 * MAX_LINE_LEN as u64).read_until(b'\n', &mut bytes)? == 0 {
                break;
            }
            line += 1;
            let header = bytes.strip_suffix(b"\n").and_then(|text| Some((Header::parse(text)?, sha256(text))));
            match header {
                Some((header, hash)) => {
                    self.account(name, line, &header, std::mem::take(&mut residue));
                    self.place(name, line, &header, first);
                    self.meet(name, line, &header, &hash);
                    self.explain(name, line, &header);
                    self.findings.records += 1;
                    self.end = Some(Link { chain: header.chain, seq: header.seq, hash });
                    first = false;
                }
                None => {
                    residue.line = if residue.bytes == 0 { line } else { residue.line };
                    residue.bytes += bytes.len() as u64;
                    residue.hash.update(&bytes);
                    residue.ended = bytes.ends_with(b"\n");
                }
            }
        }
        if first {
            self.problem(name, 0, "holds no record");
        } else if residue.bytes > 0 && !last {
            self.problem(name, residue.line, format!("{} bytes at the end of a file that is not the last are no record", residue.bytes));
        } else if residue.ended {
            let what = format!("{} bytes that a line break ends are no record: a line was changed or added", residue.bytes);
            self.problem(name, residue.line, what);
        } else if residue.bytes >= MAX_RESIDUE {
            let what = format!("{} bytes are no record, more than launchers leave that die while they write", residue.bytes);
            self.problem(name, residue.line, what);
        } else if residue.bytes > 0 {
            self.findings.notes.push(format!(
                "{name}: from line {} on, {} bytes are no record: a launcher died while it wrote, or the file was overwritten; the next record will state how many they are",
                residue.line, residue.bytes
            ));
        }
        self.last_file = Some(name.to_owned());
        Ok(())
    }

    /// Whether bytes that are no record are those that the record behind them names.
    fn account(&mut self, name: &str, line: u64, header: &Header, residue: Residue) {
        let (bytes, hash) = (residue.bytes, hex(&residue.hash.finalize()));
        match &header.torn {
            Some(torn) if torn.bytes == bytes && torn.sha256 == hash && torn.ended => self.problem(
                name,
                residue.line,
                format!("{bytes} bytes that a line break ends are no record, as record {} states: a line was changed or added", header.seq),
            ),
            Some(torn) if torn.bytes == bytes && torn.sha256 == hash => self.findings.notes.push(format!(
                "{name}: line {}: {bytes} bytes of a launcher that died while it wrote, as record {} states",
                residue.line, header.seq
            )),
            Some(torn) => self.problem(
                name,
                line,
                format!(
                    "record {} states {} bytes before it that are no record; there are {bytes}, or different ones",
                    header.seq, torn.bytes
                ),
            ),
            None if bytes > 0 => self.problem(name, residue.line, format!("{bytes} bytes are no record, and none accounts for them")),
            None => {}
        }
    }

    /// Whether a record follows the one before it.
    fn place(&mut self, name: &str, line: u64, header: &Header, first: bool) {
        let seq = header.seq;
        let Some(end) = self.end.clone() else {
            self.begin(name, line, header);
            return;
        };
        if header.chain != end.chain {
            return self.problem(name, line, format!("record {seq} belongs to another chain, {} instead of {}", header.chain, end.chain));
        }
        if seq != end.seq + 1 {
            let what = if seq > end.seq + 1 {
                format!("record {seq} follows record {}: {} missing between them", end.seq, count(seq - end.seq - 1))
            } else {
                format!("record {seq} comes after record {}: out of order, or twice", end.seq)
            };
            return self.problem(name, line, what);
        }
        if header.prev != end.hash {
            return self.problem(
                name,
                line,
                format!("record {seq} does not carry the hash of record {} before it: one of the two was changed", end.seq),
            );
        }
        match (&header.before, first, &self.last_file) {
            (Some(before), true, Some(file)) if before.file == *file && before.sha256 == end.hash => {}
            (None, true, _) => self.problem(name, line, "the first record of the file is not marked as one"),
            (Some(before), true, _) => {
                let what = format!("the file claims to follow {}, which is not the file that was read before it", before.file);
                self.problem(name, line, what);
            }
            (_, false, _) if header.event == "opened" => self.problem(name, line, "the beginning of a file in the middle of one"),
            _ => {}
        }
    }

    /// The first record of all.
    fn begin(&mut self, name: &str, line: u64, header: &Header) {
        if header.seq == 1 && header.prev != ZERO {
            self.problem(name, line, "the first record of a chain carries the hash of another before it");
        }
        let missing = match &header.before {
            Some(before) => format!("what came before it, in {} (last hash {}), is not here", before.file, before.sha256),
            None => format!("what came before it (last hash {}) is not here", header.prev),
        };
        match &self.after {
            Some(after) if *after == header.prev && header.event == "opened" => {}
            Some(_) => {
                let what = format!("the log begins with record {}: {missing}", header.seq);
                self.unexplained = Some((Problem { file: name.to_owned(), line, what }, header.before.clone()));
            }
            None if header.prev == ZERO => {}
            None => self.findings.notes.push(format!("{name} begins with record {}: {missing}", header.seq)),
        }
    }

    /// Compares a record with the anchor for it.
    fn meet(&mut self, name: &str, line: u64, header: &Header, hash: &str) {
        if !self.chains.contains(&header.chain) {
            self.chains.push(header.chain.clone());
        }
        match self.anchors.remove(&(header.chain.clone(), header.seq)) {
            Some(anchor) if anchor == hash => {
                self.findings.anchored += 1;
                self.findings.anchored_up_to = self.findings.anchored_up_to.max(Some(header.seq));
            }
            Some(_) => self.problem(name, line, format!("record {} is not the one that the anchor knows: it was rewritten", header.seq)),
            None => {}
        }
    }

    /// Whether a record states that what is missing at the beginning was removed for its age.
    fn explain(&mut self, name: &str, line: u64, header: &Header) {
        let Some(removed) = &header.removed else { return };
        let last = &removed.last;
        self.findings.notes.push(format!(
            "{name}: line {line}: the {} up to {} were removed for their age, as record {} states",
            if removed.files == 1 { String::from("file") } else { format!("{} files", removed.files) },
            last.file,
            header.seq
        ));
        // Where not all of them were, the chain of those that are left leads to the last one.
        let is_stated = |before: &PreviousFile| before.file < last.file || before == last;
        if self.unexplained.as_ref().is_some_and(|(_, before)| before.as_ref().is_some_and(is_stated)) {
            self.unexplained = None;
        }
    }

    /// What was found in all.
    pub fn finish(mut self) -> Findings {
        if let Some((Problem { file, line, what }, _)) = self.unexplained.take() {
            self.problem(&file, line, what);
        }
        let file = self.last_file.clone().unwrap_or_default();
        let mut unmet: BTreeMap<String, (u64, u64)> = BTreeMap::new();
        for (chain, seq) in self.anchors.keys() {
            let (most, number) = unmet.entry(chain.clone()).or_default();
            (*most, *number) = ((*most).max(*seq), *number + 1);
        }
        for (chain, (most, number)) in unmet {
            let end = self.end.as_ref().filter(|end| end.chain == chain).map(|end| end.seq);
            match end {
                Some(end) if most > end => {
                    let what = format!("the log ends with record {end}, but the anchor knows record {most}: {} cut off", count(most - end));
                    self.problem(&file, 0, what);
                }
                Some(_) => self.findings.notes.push(format!("{number} anchors are for records before the first that was read")),
                None if self.wanted.as_ref() == Some(&chain) => {}
                None => self.findings.notes.push(format!(
                    "the anchors know a chain {chain} of {most} records that is not here: another user's log, or one that was removed or replaced; with --chain {chain} it is an error"
                )),
            }
        }
        if let Some(wanted) = self.wanted.take().filter(|wanted| !self.chains.contains(wanted)) {
            self.problem(&file, 0, format!("no record is of chain {wanted}: the log was removed or replaced"));
        }
        Findings { end: self.end, ..self.findings }
    }
}

fn count(records: u64) -> String {
    if records == 1 { String::from("1 record is") } else { format!("{records} records are") }
}

#[cfg(test)]
mod tests;
