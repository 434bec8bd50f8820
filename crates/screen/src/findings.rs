//! Findings as they are made: where in the text, cut to length, each line once for a rule.
//!
//! Code that stands in a text of other code is screened too; what is found there is told
//! at the place of that text. A secret is told by its place and length: whoever reads a
//! result need not be able to use what the code should not have held. Of too many findings
//! some of each rule stay, so that none can be hidden behind a crowd of others.

use std::{
    collections::{BTreeMap, BTreeSet},
    rc::Rc,
};

use stockade_protocol::screen::{Answer, Found, Grammar, LONGEST_TEXT, MOST_FOUND, Rule, Rules, lines};

use crate::{secrets, work::Work};

/// Values of secrets that are looked for in other findings.
const MOST_VALUES: usize = 64;
/// Shorter ones stand in honest words.
const SHORTEST_VALUE: usize = 6;

/// What was noted at a line.
struct Noted {
    start: usize,
    end: usize,
    what: String,
}

/// The findings of one program.
pub(crate) struct Findings<'a> {
    code: &'a str,
    rules: Rules,
    /// Where each line begins.
    lines: Vec<usize>,
    noted: BTreeMap<(usize, Rule), Noted>,
    /// Where secrets stand.
    secrets: BTreeSet<(usize, usize)>,
    values: BTreeSet<String>,
    /// Where the text stands whose code is being read.
    within: Option<(usize, usize)>,
    work: Rc<Work>,
}

impl<'a> Findings<'a> {
    pub(crate) fn new(code: &'a str, grammar: Grammar, rules: Rules) -> Self {
        let begin_of = |next: &mut usize, line: &str| Some(std::mem::replace(next, *next + line.len()));
        let lines = lines(code, Some(grammar)).scan(0, begin_of).collect();
        let work = Rc::new(Work::of(code));
        Findings { code, rules, lines, noted: BTreeMap::new(), secrets: BTreeSet::new(), values: BTreeSet::new(), within: None, work }
    }

    /// Notes what stands in `start..end`. The first finding of a rule on a line is kept.
    pub(crate) fn add(&mut self, rule: Rule, place: (usize, usize), what: &str) {
        if !self.rules.has(rule) {
            return;
        }
        let (start, end) = self.within.unwrap_or(place);
        let line = self.lines.partition_point(|begin| *begin <= start).max(1);
        let noted = self.noted.entry((line, rule)).or_insert_with(|| Noted { start: usize::MAX, end, what: String::new() });
        if start < noted.start {
            // Without its secrets before it is cut, which would leave half of one.
            *noted = Noted { start, end, what: cut(&secrets::without(what)) };
        }
    }

    /// Notes a secret, which no finding shows from now on, nor did before.
    pub(crate) fn secret(&mut self, place: (usize, usize), value: &str, kind: &str) {
        self.secrets.insert(self.within.unwrap_or(place));
        if value.len() >= SHORTEST_VALUE && value.len() <= LONGEST_TEXT && self.values.len() < MOST_VALUES {
            self.values.insert(value.to_owned());
        }
        self.add(Rule::Secret, place, kind);
    }

    /// Notes a secret somewhere in what stands in `place`. Where it is not to be found, since
    /// it is written otherwise there, nothing of that is shown.
    pub(crate) fn secret_within(&mut self, place: (usize, usize), value: &str, kind: &str) {
        let (start, end) = self.within.unwrap_or(place);
        match self.code.get(start..end).and_then(|text| text.find(value)) {
            Some(at) => self.secret((start + at, start + at + value.len()), value, kind),
            None => self.secret((start, end), value, kind),
        }
    }

    /// What is left to do for this program.
    pub(crate) fn work(&self) -> Rc<Work> {
        self.work.clone()
    }

    /// Notes that nothing is left, where that was met first.
    pub(crate) fn tell_of_work(&mut self, place: (usize, usize)) {
        if self.work.has_ended() {
            self.add(Rule::Screener, place, "puts more together than is followed");
        }
    }

    /// Screens code that stands in the text at `place`, which takes so much work.
    pub(crate) fn inside(&mut self, place: (usize, usize), takes: usize, screen: impl FnOnce(&mut Self)) {
        if !self.work.take(takes) {
            self.tell_of_work(place);
            return;
        }
        let outer = self.within;
        self.within = outer.or(Some(place));
        screen(self);
        self.within = outer;
    }

    /// Whether code in a text is being read.
    pub(crate) fn is_inside(&self) -> bool {
        self.within.is_some()
    }

    /// All of them, in the order of the text.
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

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.noted.len()
    }

    /// A piece of the code without the secrets in it.
    fn shown(&self, start: usize, end: usize) -> String {
        let (mut out, mut at) = (String::new(), start);
        for (from, to) in self.secrets.iter().filter(|(from, to)| *from < end && *to > start) {
            // Those that overlap were hidden with the one before.
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

/// The answer of what was found in all sources, of which there were `all`.
pub(crate) fn answer(found: Vec<Found>, all: usize) -> Answer {
    let found = chosen(found, |found| found.rule);
    let omitted = u64::try_from(all.saturating_sub(found.len())).unwrap_or(u64::MAX);
    Answer { found, omitted }
}

/// As many as an answer holds, in their order: the first of each rule, and those that come
/// before the others.
fn chosen<T>(all: Vec<T>, rule: impl Fn(&T) -> Rule) -> Vec<T> {
    let mut seen = BTreeSet::new();
    let firsts: Vec<bool> = all.iter().map(|one| seen.insert(rule(one))).collect();
    let mut room = MOST_FOUND.saturating_sub(seen.len());
    let keep = |first: &bool| {
        let kept = *first || room > 0;
        room -= usize::from(kept && !*first);
        kept
    };
    let kept: Vec<bool> = firsts.iter().map(keep).collect();
    all.into_iter().zip(kept).filter_map(|(one, kept)| kept.then_some(one)).collect()
}

/// So much of a text as a finding may hold.
fn cut(text: &str) -> String {
    let mut end = text.len().min(LONGEST_TEXT);
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
        assert_eq!((answer.found.len(), answer.omitted), (MOST_FOUND, 4901));
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
