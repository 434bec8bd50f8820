//! What watched interpreters report about the modules and events that a policy names.
//!
//! They write lines into a pipe to which every process of the sandbox can write: a line is
//! advice, and is parsed as hostile bytes. Malformed lines are skipped, lists and texts have
//! a maximum length, and nothing here decides anything.
//!
//! ```text
//! watch                                              an interpreter is watched from now on
//! note|deny TAB import|event TAB NAME TAB COUNT TAB LINE TAB FILE
//! ```

use alloc::{collections::BTreeMap, string::String, vec::Vec};

use serde::Serialize;

/// The pipe's path inside.
pub const PIPE: &str = "/run/stockade/modules";
/// Names that are kept; reports of further ones are only counted.
pub const MAX_NAMES: usize = 256;
/// Bytes of a line. The kernel writes so many in one piece.
const MAX_LINE_LEN: usize = 1024;
/// Bytes of a name, and of a file's.
const MAX_TEXT_LEN: usize = 256;

/// What a watched interpreter did when it met a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum HookAction {
    /// It went on.
    Note,
    /// It refused.
    Deny,
}

/// What a name names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum HookSubject {
    /// The import of a module.
    Import,
    /// An event of the interpreter's.
    Event,
}

/// One name that was met.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HookRecord {
    /// The module, or the event.
    pub name: String,
    /// Which of the two.
    pub kind: HookSubject,
    /// What was done.
    pub action: HookAction,
    /// How often at least: an interpreter reports each doubling.
    pub count: u64,
    /// The file whose code reached it first; empty: not known.
    pub file: String,
    /// The line of it; 0: not known.
    pub line: u64,
}

/// The reports of all interpreters of one run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Modules {
    /// How many reported that they are watched.
    pub interpreters: u64,
    /// What they met, in the order of the first time.
    pub seen: Vec<HookRecord>,
    /// Further reports, counted.
    pub omitted: u64,
}

/// Collects lines that arrive in pieces.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    modules: Modules,
    places: BTreeMap<(String, HookSubject, HookAction), usize>,
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
            self.skips |= self.rest.len() + text.len() > MAX_LINE_LEN;
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

    /// All reports. A last line without its end does not count.
    pub fn finish(self) -> Modules {
        self.modules
    }

    fn line(&mut self, line: &[u8]) {
        if line == b"watch" {
            self.modules.interpreters = self.modules.interpreters.saturating_add(1);
            return;
        }
        let Some((key, count, line, file)) = read(line) else { return };
        let next = self.modules.seen.len();
        match self.places.get(&key).and_then(|index| self.modules.seen.get_mut(*index)) {
            Some(seen) => seen.count = seen.count.saturating_add(count),
            None if next < MAX_NAMES => {
                let (name, kind, action) = key.clone();
                self.modules.seen.push(HookRecord { name, kind, action, count, file, line });
                self.places.insert(key, next);
            }
            None => self.modules.omitted = self.modules.omitted.saturating_add(count),
        }
    }
}

type Line = ((String, HookSubject, HookAction), u64, u64, String);

fn read(line: &[u8]) -> Option<Line> {
    let mut fields = core::str::from_utf8(line).ok()?.split('\t');
    let mut next = || fields.next();
    let action = match next()? {
        "note" => HookAction::Note,
        "deny" => HookAction::Deny,
        _ => return None,
    };
    let kind = match next()? {
        "import" => HookSubject::Import,
        "event" => HookSubject::Event,
        _ => return None,
    };
    let (name, count, number, file) = (next()?, next()?.parse().ok()?, next()?.parse().ok()?, next()?);
    // An interpreter writes no byte that a terminal acts on.
    let plain = |text: &str| text.len() <= MAX_TEXT_LEN && text.bytes().all(|byte| (b' '..=b'~').contains(&byte));
    let whole = next().is_none() && !name.is_empty() && plain(name) && plain(file);
    whole.then(|| ((String::from(name), kind, action), count, number, String::from(file)))
}

#[cfg(test)]
mod tests {
    use alloc::format;

    use super::*;

    fn tally(pieces: &[&[u8]]) -> Modules {
        let mut tally = Tally::default();
        pieces.iter().for_each(|piece| tally.take(piece));
        tally.finish()
    }

    #[test]
    fn lines_are_counted_by_name_however_they_are_cut() {
        let text = b"watch\nnote\timport\tctypes\t1\t3\t/scratch/x.py\nnote\timport\tctypes\t2\t9\ty\ndeny\tevent\tos.system\t1\t0\t\nnote\tevent\tcut";
        let whole = tally(&[text]);
        assert_eq!(whole, tally(&text.chunks(3).collect::<Vec<_>>()));
        let seen: Vec<_> = whole.seen.iter().map(|seen| (seen.name.as_str(), seen.action, seen.count, seen.line)).collect();
        assert_eq!((whole.interpreters, seen), (1, [("ctypes", HookAction::Note, 3, 3), ("os.system", HookAction::Deny, 1, 0)].into()));
        assert_eq!(whole.seen[0].file, "/scratch/x.py");
    }

    #[test]
    fn what_is_no_line_is_passed_over() {
        let long = [&b"note\timport\t"[..], &[b'x'; MAX_LINE_LEN], b"\t1\t1\t\nwatch\n"].concat();
        assert_eq!(tally(&[&long]), Modules { interpreters: 1, ..Modules::default() });
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
            assert_eq!(tally(&[line.as_bytes(), b"\n"]), Modules::default(), "{line}");
        }
    }

    #[test]
    fn a_flood_of_names_is_counted_and_not_kept() {
        let flood: String = (0..MAX_NAMES + 7).map(|number| format!("note\timport\tm{number}\t2\t1\t\n")).collect();
        let modules = tally(&[flood.as_bytes()]);
        assert_eq!((modules.seen.len(), modules.omitted), (MAX_NAMES, 14));
    }
}
