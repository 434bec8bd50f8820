//! What is wrong with a file, where, and how to mend it.
//!
//! A report holds every problem found, in the order of the file. Rendering shows file,
//! line, column, the source line and a caret; text from the file is shown with hidden
//! characters escaped. Nothing here decides what a problem is.

use std::{collections::BTreeSet, fmt, ops::Range};

use annotate_snippets::{AnnotationKind, Group, Level, Renderer, Snippet};

use crate::visible::is_hidden;

/// A text that was read, and what to call it.
#[derive(Clone, Debug)]
pub struct Source {
    /// Its path, or `shipped policy NAME`.
    pub label: String,
    /// All of it.
    pub text: String,
}

/// Bytes of one of a report's sources.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// Which source.
    pub source: usize,
    /// First byte.
    pub start: usize,
    /// Byte after the last.
    pub end: usize,
}

impl Place {
    pub(crate) fn new(source: usize, span: Range<usize>) -> Self {
        Place { source, start: span.start, end: span.end }
    }
}

/// A value and where it stands.
#[derive(Clone, Debug)]
pub(crate) struct At<T> {
    pub value: T,
    pub place: Place,
}

/// What a check says about one value; the reader adds the place.
#[derive(Clone, Debug)]
pub(crate) struct Complaint {
    pub title: String,
    pub label: String,
    pub help: Option<String>,
}

impl Complaint {
    pub(crate) fn new(title: impl Into<String>, label: impl Into<String>) -> Self {
        Complaint { title: title.into(), label: label.into(), help: None }
    }

    pub(crate) fn help(mut self, help: impl Into<String>) -> Self {
        self.help = Some(help.into());
        self
    }
}

/// One thing that is wrong.
#[derive(Clone, Debug)]
pub struct Problem {
    /// Where.
    pub place: Place,
    /// What, in one line.
    pub title: String,
    /// What stands below the caret.
    pub label: String,
    /// A second place that matters.
    pub also: Option<(Place, String)>,
    /// How to mend it.
    pub help: Option<String>,
}

/// Everything that is wrong with a file, or with what it makes of the files it extends.
#[derive(Clone, Debug, Default)]
pub struct Report {
    sources: Vec<Source>,
    problems: Vec<Problem>,
}

/// Beyond this a file is not a policy with mistakes but something else.
const SHOWN: usize = 24;

impl Report {
    pub(crate) fn new(sources: Vec<Source>, found: Problems) -> Self {
        let mut problems = found.list;
        problems.sort_by(|a, b| a.place.cmp(&b.place));
        Report { sources, problems }
    }

    /// The problems, in the order of the files.
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }

    /// Line and column of a place, counted from 1.
    pub fn position(&self, place: &Place) -> (usize, usize) {
        let text = self.sources.get(place.source).map_or("", |source| source.text.as_str());
        let before = &text[..floor(text, place.start)];
        let line = before.matches('\n').count() + 1;
        let column = before.rsplit('\n').next().map_or(0, |rest| rest.chars().count()) + 1;
        (line, column)
    }

    /// The report as text, with colour when a person watches.
    pub fn render(&self, colour: bool) -> String {
        let renderer = if colour { Renderer::styled() } else { Renderer::plain() };
        let mut out = String::new();
        for (index, problem) in self.problems.iter().take(SHOWN).enumerate() {
            if index > 0 {
                out.push_str("\n\n");
            }
            out.push_str(&renderer.render(&[self.group(problem)]));
        }
        if self.problems.len() > SHOWN {
            out.push_str(&format!("\n\nand {} more", self.problems.len() - SHOWN));
        }
        out
    }

    fn group<'a>(&'a self, problem: &'a Problem) -> Group<'a> {
        let mut group = Level::ERROR.primary_title(problem.title.as_str()).element(self.snippet(
            &problem.place,
            AnnotationKind::Primary,
            &problem.label,
        ));
        if let Some((place, label)) = &problem.also {
            group = group.element(self.snippet(place, AnnotationKind::Context, label));
        }
        if let Some(help) = &problem.help {
            group = group.element(Level::HELP.message(help.as_str()));
        }
        group
    }

    fn snippet<'a>(&'a self, place: &Place, kind: AnnotationKind, label: &'a str) -> Snippet<'a, annotate_snippets::Annotation<'a>> {
        let (text, path) = self.sources.get(place.source).map_or(("", ""), |source| (source.text.as_str(), source.label.as_str()));
        let start = floor(text, place.start);
        let end = floor(text, place.end.max(start));
        let mut annotation = kind.span(start..end);
        if !label.is_empty() {
            annotation = annotation.label(label);
        }
        Snippet::source(text).path(path).annotation(annotation)
    }
}

/// The nearest character boundary at or before an offset.
fn floor(text: &str, offset: usize) -> usize {
    (0..=offset.min(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0)
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.render(false))
    }
}

impl std::error::Error for Report {}

/// The problems found so far.
#[derive(Debug, Default)]
pub(crate) struct Problems {
    list: Vec<Problem>,
    seen: BTreeSet<(Place, String)>,
}

impl Problems {
    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    pub(crate) fn add(&mut self, place: &Place, complaint: Complaint) {
        self.add_also(place, complaint, None);
    }

    pub(crate) fn add_also(&mut self, place: &Place, complaint: Complaint, also: Option<(Place, String)>) {
        let Complaint { title, label, help } = complaint;
        if self.seen.insert((place.clone(), title.clone())) {
            self.list.push(Problem { place: place.clone(), title, label, also, help });
        }
    }
}

/// A text from a file between backticks: short, and without hidden characters.
pub(crate) fn quote(text: &str) -> String {
    let mut out = String::from("`");
    for (index, c) in text.chars().enumerate() {
        if index == 80 {
            out.push('…');
            break;
        }
        if is_hidden(c) {
            out.extend(c.escape_unicode());
        } else {
            out.push(c);
        }
    }
    out.push('`');
    out
}
