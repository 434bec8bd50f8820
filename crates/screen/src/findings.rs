//! Collects findings: their place, their text cut to length, one per rule and line.
//!
//! Findings in code inside a string are reported at the place of that string. A secret is reported
//! by its place and length, so that a reader of the result cannot use it. Of too many findings some
//! of each rule stay, so that none can be hidden in a crowd of others. It judges nothing.

use std::{
    collections::{BTreeMap, BTreeSet},
    rc::Rc,
};

use stockade_protocol::screen::{Answer, Found, Grammar, MAX_FINDINGS, MAX_TEXT_LEN, Rule, Rules, lines};

use crate::{budget::Budget, paths, secrets};

/// Values of secrets that are removed from other findings.
const MAX_VALUES: usize = 64;
/// Shorter values occur in ordinary words.
const MIN_VALUE_LEN: usize = 6;

/// A finding of a line.
struct Noted {
    start: usize,
    end: usize,
    what: String,
}

/// The findings of one program.
pub(crate) struct Findings<'a> {
    code: &'a str,
    rules: Rules,
    /// The offsets of lines.
    lines: Vec<usize>,
    noted: BTreeMap<(usize, Rule), Noted>,
    /// The places of secrets.
    secrets: BTreeSet<(usize, usize)>,
    values: BTreeSet<String>,
    /// The files that the program has fetched so far.
    fetched: BTreeSet<String>,
    /// A shell script keeps the pids of what it has started.
    pub(crate) keeps_pids: bool,
    /// The place of the string whose code is read.
    within: Option<(usize, usize)>,
    budget: Rc<Budget>,
}

impl<'a> Findings<'a> {
    pub(crate) fn new(code: &'a str, grammar: Grammar, rules: Rules) -> Self {
        let begin_of = |next: &mut usize, line: &str| Some(std::mem::replace(next, *next + line.len()));
        let lines = lines(code, Some(grammar)).scan(0, begin_of).collect();
        let budget = Rc::new(Budget::of(code));
        let (noted, secrets) = (BTreeMap::new(), BTreeSet::new());
        let keeps_pids = ["$!", "jobs -p", "-P $$", "-P \"$$\""].iter().any(|sign| code.contains(sign));
        let (values, fetched) = (BTreeSet::new(), BTreeSet::new());
        Findings { code, rules, lines, noted, secrets, values, fetched, keeps_pids, within: None, budget }
    }

    /// Adds a finding at `start..end`. The first one of a rule and line is kept.
    pub(crate) fn add(&mut self, rule: Rule, place: (usize, usize), what: &str) {
        if !self.rules.has(rule) {
            return;
        }
        let (start, end) = self.within.unwrap_or(place);
        let line = self.lines.partition_point(|begin| *begin <= start).max(1);
        let noted = self.noted.entry((line, rule)).or_insert_with(|| Noted { start: usize::MAX, end, what: String::new() });
        if start < noted.start {
            // Secrets are removed before the text is cut, which could leave half of one.
            *noted = Noted { start, end, what: cut(&secrets::without(what)) };
        }
    }

    /// Adds a secret, which no finding shows.
    pub(crate) fn secret(&mut self, place: (usize, usize), value: &str, kind: &str) {
        self.secrets.insert(self.within.unwrap_or(place));
        if value.len() >= MIN_VALUE_LEN && value.len() <= MAX_TEXT_LEN && self.values.len() < MAX_VALUES {
            self.values.insert(value.to_owned());
        }
        self.add(Rule::Secret, place, kind);
    }

    /// Adds a secret inside `place`. Where its value is written in another form, nothing of
    /// `place` is shown.
    pub(crate) fn secret_within(&mut self, place: (usize, usize), value: &str, kind: &str) {
        let (start, end) = self.within.unwrap_or(place);
        match self.code.get(start..end).and_then(|text| text.find(value)) {
            Some(at) => self.secret((start + at, start + at + value.len()), value, kind),
            None => self.secret((start, end), value, kind),
        }
    }

    /// A file is fetched to this path. An unknown one says nothing of another.
    pub(crate) fn fetches(&mut self, path: &str) {
        if !path.contains('*') {
            self.fetched.insert(paths::plain(path));
        }
    }

    /// Whether the program has fetched the file of this path.
    pub(crate) fn has_fetched(&self, path: &str) -> bool {
        !self.fetched.is_empty() && self.fetched.contains(&paths::plain(path))
    }

    /// The budget of this program.
    pub(crate) fn budget(&self) -> Rc<Budget> {
        self.budget.clone()
    }

    /// Adds a finding where the budget was spent first.
    pub(crate) fn report_budget(&mut self, place: (usize, usize)) {
        if self.budget.has_ended() {
            self.add(Rule::Screener, place, "puts more together than is followed");
        }
    }

    /// Screens code in the string at `place`, at this cost.
    pub(crate) fn inside(&mut self, place: (usize, usize), takes: usize, screen: impl FnOnce(&mut Self)) {
        if !self.budget.spend(takes) {
            self.report_budget(place);
            return;
        }
        let outer = self.within;
        self.within = outer.or(Some(place));
        screen(self);
        self.within = outer;
    }

    /// Whether code in a string is read.
    pub(crate) fn is_inside(&self) -> bool {
        self.within.is_some()
    }

    /// All findings, in the order of the text.
    pub(crate) fn into_found(self, source: u32) -> Vec<Found> {
        let mut noted: Vec<(usize, Rule, &Noted)> = self.noted.iter().map(|((line, rule), noted)| (*line, *rule, noted)).collect();
        noted.sort_by_key(|(_, rule, noted)| (noted.start, *rule));
        chosen(noted, |(_, rule, _)| *rule)
            .into_iter()
            .map(|(line, rule, noted)| {
                let begin = self.lines.get(line - 1).copied().unwrap_or(0);
                let column = self.code.get(begin..noted.start).map_or(0, |before| before.chars().count()) + 1;
                Found {
                    source,
                    rule,
                    line: u32::try_from(line).unwrap_or(u32::MAX),
                    column: u32::try_from(column).unwrap_or(u32::MAX),
                    text: cut(&self.shown(noted.start, noted.end)),
                    what: cut(&self.without_values(&noted.what)),
                }
            })
            .collect()
    }

    /// The number of findings.
    pub(crate) fn count(&self) -> usize {
        self.noted.len()
    }

    /// A piece of the code with its secrets removed.
    fn shown(&self, start: usize, end: usize) -> String {
        let (mut out, mut at) = (String::new(), start);
        for (from, to) in self.secrets.iter().filter(|(from, to)| *from < end && *to > start) {
            // Overlapping secrets were removed with the one before.
            if let Some(before) = self.code.get(at..*from) {
                out.push_str(before);
            }
            if *to > at {
                let hidden = self.code.get((*from).max(at)..(*to).min(end)).unwrap_or_default();
                out.push_str(&secrets::stand_in(hidden));
                at = *to;
            }
        }
        out.push_str(self.code.get(at..end).unwrap_or_default());
        self.without_values(&secrets::without(&out))
    }

    fn without_values(&self, text: &str) -> String {
        self.values.iter().fold(text.to_owned(), |text, value| text.replace(value.as_str(), &secrets::stand_in(value)))
    }
}

/// The answer with the findings of all sources; `all` is their number.
pub(crate) fn answer(found: Vec<Found>, all: usize) -> Answer {
    let found = chosen(found, |found| found.rule);
    let omitted = u64::try_from(all.saturating_sub(found.len())).unwrap_or(u64::MAX);
    Answer { found, omitted }
}

/// As many as an answer holds, in their order: the first of each rule, then the earliest.
fn chosen<T>(all: Vec<T>, rule: impl Fn(&T) -> Rule) -> Vec<T> {
    let mut seen = BTreeSet::new();
    let firsts: Vec<bool> = all.iter().map(|one| seen.insert(rule(one))).collect();
    let mut room = MAX_FINDINGS.saturating_sub(seen.len());
    let keep = |first: &bool| {
        let kept = *first || room > 0;
        room -= usize::from(kept && !*first);
        kept
    };
    let kept: Vec<bool> = firsts.iter().map(keep).collect();
    all.into_iter().zip(kept).filter_map(|(one, kept)| kept.then_some(one)).collect()
}

/// The beginning of a text that fits into a finding.
fn cut(text: &str) -> String {
    let mut end = text.len().min(MAX_TEXT_LEN);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crowd_hides_no_rule() {
        let code = "x\n".repeat(5000);
        let mut findings = Findings::new(&code, Grammar::Python, Rules::ALL);
        (0..5000).for_each(|line| findings.add(Rule::Network, (line * 2, line * 2 + 1), "x"));
        findings.add(Rule::Destroy, (9000, 9001), "x");
        let all = findings.count();
        let answer = answer(findings.into_found(0), all);
        assert_eq!((answer.found.len(), answer.omitted), (MAX_FINDINGS, 4901));
        assert_eq!(answer.found.last().map(|found| (found.rule, found.line)), Some((Rule::Destroy, 4501)));
    }

    #[test]
    fn a_secret_is_not_shown_and_its_place_is() {
        let code = "p = 'hunter2!x'; f('hunter2!x', 'ghp_0123456789abcdefghijABCDEFGHIJ012345')";
        let mut findings = Findings::new(code, Grammar::Python, Rules::ALL);
        findings.add(Rule::Network, (0, code.len()), "f hunter2!x");
        findings.secret((4, 15), "hunter2!x", "p");
        let found = findings.into_found(0);
        assert_eq!(found[0].text, "p = <11 characters>; f('<9 characters>', 'ghp_<36 characters>')");
        assert_eq!((found[0].what.as_str(), found[1].text.as_str(), found[1].column), ("f <9 characters>", "<11 characters>", 5));
    }

    #[test]
    fn lines_end_as_the_language_has_it() {
        for (grammar, line) in [(Grammar::Python, 3), (Grammar::Shell, 2)] {
            let mut findings = Findings::new("a\rb\r\nc", grammar, Rules::ALL);
            findings.add(Rule::Eval, (5, 6), "c");
            assert_eq!(findings.into_found(0).first().map(|found| (found.line, found.column)), Some((line, 1)));
        }
    }

    #[test]
    fn what_nobody_wants_is_not_noted() {
        let mut findings = Findings::new("eval", Grammar::Python, [Rule::Fork].into_iter().collect());
        findings.add(Rule::Eval, (0, 4), "eval");
        assert_eq!(findings.count(), 0);
    }
}
