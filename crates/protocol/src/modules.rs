//! What watched interpreters say of the modules and events that a policy names.
//!
//! They write lines into a pipe, and so can whatever else runs beside them: a line is
//! advice, whoever wrote it. It is read as hostile bytes. What has not the form of a line is
//! passed over, lists and texts have a largest length, and nothing here decides anything.
//!
//! ```text
//! watch                                              an interpreter is watched from here on
//! note|deny TAB import|event TAB NAME TAB COUNT TAB LINE TAB FILE
//! ```

use alloc::{collections::BTreeMap, string::String, vec::Vec};

use serde::Serialize;

/// Where the pipe stands inside.
pub const PIPE: &str = "/run/stockade/modules";
/// Names that are kept; what is said of further ones is only counted.
pub const MOST_SEEN: usize = 256;
/// Bytes of a line. The kernel writes so many in one piece.
const LONGEST_LINE: usize = 1024;
/// Bytes of a name, and of a file's.
const LONGEST_TEXT: usize = 256;

/// What a watched interpreter did when it met a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Met {
    /// It went on.
    Note,
    /// It refused.
    Deny,
}

/// What a name stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Sort {
    /// The import of a module.
    Import,
    /// An event of the interpreter's.
    Event,
}

/// One name that was met.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Seen {
    /// The module, or the event.
    pub name: String,
    /// Which of the two.
    pub kind: Sort,
    /// What was done.
    pub action: Met,
    /// How often at least: it is said at each doubling.
    pub count: u64,
    /// Whose code came to it first; empty: not known.
    pub file: String,
    /// The line of it; 0: not known.
    pub line: u64,
}

/// What all interpreters of one run said.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Modules {
    /// How many said that they are watched.
    pub interpreters: u64,
    /// What they met, in the order of the first time.
    pub seen: Vec<Seen>,
    /// What was said beyond that, as often as it was said.
    pub omitted: u64,
}

/// Lines as they come, in whatever pieces.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    said: Modules,
    places: BTreeMap<(String, Sort, Met), usize>,
    /// The beginning of a line whose end has not come.
    rest: Vec<u8>,
    /// The line is too long: passed over to its end.
    skips: bool,
}

impl Tally {
    /// Takes the next bytes.
    pub fn take(&mut self, bytes: &[u8]) {
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            let (text, ends) = piece.strip_suffix(b"\n").map_or((piece, false), |text| (text, true));
            self.skips |= self.rest.len() + text.len() > LONGEST_LINE;
            if !self.skips {
                self.rest.extend_from_slice(text);
            }
            if ends {
                let line = core::mem::take(&mut self.rest);
                if !core::mem::take(&mut self.skips) {
                    self.line(&line);
                }
            }
        }
    }

    /// What was said. A last line without an end is none.
    pub fn finish(self) -> Modules {
        self.said
    }

    fn line(&mut self, line: &[u8]) {
        if line == b"watch" {
            self.said.interpreters = self.said.interpreters.saturating_add(1);
            return;
        }
        let Some((key, count, line, file)) = read(line) else { return };
        let next = self.said.seen.len();
        match self.places.get(&key).and_then(|index| self.said.seen.get_mut(*index)) {
            Some(seen) => seen.count = seen.count.saturating_add(count),
            None if next < MOST_SEEN => {
                let (name, kind, action) = key.clone();
                self.said.seen.push(Seen { name, kind, action, count, file, line });
                self.places.insert(key, next);
            }
            None => self.said.omitted = self.said.omitted.saturating_add(count),
        }
    }
}

type Line = ((String, Sort, Met), u64, u64, String);

fn read(line: &[u8]) -> Option<Line> {
    let mut fields = core::str::from_utf8(line).ok()?.split('\t');
    let mut next = || fields.next();
    let action = match next()? {
        "note" => Met::Note,
        "deny" => Met::Deny,
        _ => return None,
    };
    let kind = match next()? {
        "import" => Sort::Import,
        "event" => Sort::Event,
        _ => return None,
    };
    let (name, count, number, file) = (next()?, next()?.parse().ok()?, next()?.parse().ok()?, next()?);
    // Whatever a terminal would act on is no part of what an interpreter writes.
    let plain = |text: &str| text.len() <= LONGEST_TEXT && text.bytes().all(|byte| (b' '..=b'~').contains(&byte));
    let whole = next().is_none() && !name.is_empty() && plain(name) && plain(file);
    whole.then(|| ((String::from(name), kind, action), count, number, String::from(file)))
}

#[cfg(test)]
mod tests {
    use alloc::format;

    use super::*;

    fn said(pieces: &[&[u8]]) -> Modules {
        let mut tally = Tally::default();
        pieces.iter().for_each(|piece| tally.take(piece));
        tally.finish()
    }

    #[test]
    fn lines_are_counted_by_name_however_they_are_cut() {
        let text = b"watch\nnote\timport\tctypes\t1\t3\t/scratch/x.py\nnote\timport\tctypes\t2\t9\ty\ndeny\tevent\tos.system\t1\t0\t\nnote\tevent\tcut";
        let whole = said(&[text]);
        assert_eq!(whole, said(&text.chunks(3).collect::<Vec<_>>()));
        let seen: Vec<_> = whole.seen.iter().map(|seen| (seen.name.as_str(), seen.action, seen.count, seen.line)).collect();
        assert_eq!((whole.interpreters, seen), (1, [("ctypes", Met::Note, 3, 3), ("os.system", Met::Deny, 1, 0)].into()));
        assert_eq!(whole.seen[0].file, "/scratch/x.py");
    }

    #[test]
    fn what_is_no_line_is_passed_over() {
        let long = [&b"note\timport\t"[..], &[b'x'; LONGEST_LINE], b"\t1\t1\t\nwatch\n"].concat();
        assert_eq!(said(&[&long]), Modules { interpreters: 1, ..Modules::default() });
        for line in [
            "note",
            "allow\timport\tx\t1\t1\t",
            "note\tfile\tx\t1\t1\t",
            "note\timport\t\t1\t1\t",
            "note\timport\tx\t-1\t1\t",
            "note\timport\tx\t1\t1\t\t",
            "note\timport\tx\u{1b}\t1\t1\t",
            "note\timport\tx\t99999999999999999999\t1\t",
            "watch ",
        ] {
            assert_eq!(said(&[line.as_bytes(), b"\n"]), Modules::default(), "{line}");
        }
    }

    #[test]
    fn a_flood_of_names_is_counted_and_not_kept() {
        let flood: String = (0..MOST_SEEN + 7).map(|number| format!("note\timport\tm{number}\t2\t1\t\n")).collect();
        let said = said(&[flood.as_bytes()]);
        assert_eq!((said.seen.len(), said.omitted), (MOST_SEEN, 14));
    }
}
