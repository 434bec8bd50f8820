//! Findings as they are made: where in the text, cut to length, each line once for a rule.
//!
//! Code that stands in a text of other code is screened too; what is found there is told
//! at the place of that text.

use std::collections::BTreeMap;

use stockade_protocol::screen::{Answer, Found, LONGEST_TEXT, MOST_FOUND, Rule};

/// The findings of one program.
pub(crate) struct Findings<'a> {
    code: &'a str,
    /// Where each line begins.
    lines: Vec<usize>,
    found: BTreeMap<(usize, Rule), Found>,
    omitted: u64,
    /// Where the text stands whose code is being read.
    within: Option<(usize, usize)>,
}

impl<'a> Findings<'a> {
    pub(crate) fn new(code: &'a str) -> Self {
        let lines = std::iter::once(0).chain(code.match_indices('\n').map(|(at, _)| at + 1)).collect();
        Findings { code, lines, found: BTreeMap::new(), omitted: 0, within: None }
    }

    /// Notes what stands in `start..end`. The first finding of a rule on a line is kept.
    pub(crate) fn add(&mut self, rule: Rule, (start, end): (usize, usize), what: &str) {
        let (start, end) = self.within.unwrap_or((start, end));
        let line = self.lines.partition_point(|begin| *begin <= start).max(1);
        // More than an answer lists, and nothing is gained by keeping them.
        if self.found.len() >= MOST_FOUND && !self.found.contains_key(&(line, rule)) {
            self.omitted += 1;
            return;
        }
        let begin = self.lines.get(line - 1).copied().unwrap_or(0);
        let column = self.code.get(begin..start).map_or(0, |before| before.chars().count()) + 1;
        let text = self.code.get(start..end).unwrap_or_default();
        let found = Found {
            rule,
            line: u32::try_from(line).unwrap_or(u32::MAX),
            column: u32::try_from(column).unwrap_or(u32::MAX),
            text: cut(text),
            what: cut(what),
        };
        self.found
            .entry((line, rule))
            .and_modify(|old| {
                if found.column < old.column {
                    *old = found.clone()
                }
            })
            .or_insert(found);
    }

    /// Screens code that stands in the text at `place`.
    pub(crate) fn inside(&mut self, place: (usize, usize), screen: impl FnOnce(&mut Self)) {
        let outer = self.within;
        self.within = outer.or(Some(place));
        screen(self);
        self.within = outer;
    }

    /// Whether code in a text is being read.
    pub(crate) fn is_inside(&self) -> bool {
        self.within.is_some()
    }

    pub(crate) fn into_answer(self) -> Answer {
        let mut found: Vec<Found> = self.found.into_values().collect();
        found.sort_by_key(|found| (found.line, found.column, found.rule));
        Answer { found, omitted: self.omitted }
    }
}

/// So much of a text as a finding may hold.
fn cut(text: &str) -> String {
    let mut end = text.len().min(LONGEST_TEXT);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].to_owned()
}
