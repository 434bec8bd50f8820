//! What is wrong with a file, where, and how to fix it.
//!
//! A report holds every mistake found, in the order of the file. Rendering shows file,
//! line, column, the source line and a caret; text from the file is shown with hidden
//! characters escaped. Nothing here decides what a mistake is.

use std::{collections::BTreeSet, fmt, ops::Range};

use annotate_snippets::{AnnotationKind, Group, Level, Renderer, Snippet};

use stockade_protocol::text::is_hidden;

/// A text that was read, and what to call it.
#[derive(Clone, Debug)]
pub struct Source {
    /// Its path, or `shipped policy NAME`.
    pub label: String,
    /// All of it.
    pub text: String,
}

/// Bytes of one of a report's sources.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct SourceSpan {
    /// Which source.
    pub source: usize,
    /// First byte.
    pub start: usize,
    /// Byte after the last.
    pub end: usize,
}

impl SourceSpan {
    pub(crate) fn new(source: usize, span: Range<usize>) -> Self {
        SourceSpan { source, start: span.start, end: span.end }
    }
}

/// A value and where it stands.
#[derive(Clone, Debug)]
pub struct Located<T> {
    /// The value.
    pub value: T,
    /// Where it stands.
    pub span: SourceSpan,
}

/// One thing that is wrong.
#[derive(Clone, Debug)]
pub struct Diagnostic {
    /// What, in one line.
    pub title: String,
    /// What stands below the caret.
    pub label: String,
    /// A second place that matters, and what stands below its caret.
    pub also: Option<(SourceSpan, String)>,
    /// How to fix it.
    pub help: Option<String>,
}

impl Diagnostic {
    pub(crate) fn new(title: impl Into<String>, label: impl Into<String>) -> Self {
        Diagnostic { title: title.into(), label: label.into(), also: None, help: None }
    }

    pub(crate) fn help(mut self, help: impl Into<String>) -> Self {
        self.help = Some(help.into());
        self
    }

    pub(crate) fn also(mut self, span: &SourceSpan, label: impl Into<String>) -> Self {
        self.also = Some((span.clone(), label.into()));
        self
    }
}

/// The mistakes found so far; the same title is kept once for each place.
#[derive(Debug, Default)]
pub(crate) struct Diagnostics {
    list: Vec<Located<Diagnostic>>,
    seen: BTreeSet<(SourceSpan, String)>,
}

impl Diagnostics {
    pub(crate) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    pub(crate) fn add(&mut self, span: &SourceSpan, diagnostic: Diagnostic) {
        if self.seen.insert((span.clone(), diagnostic.title.clone())) {
            self.list.push(Located { value: diagnostic, span: span.clone() });
        }
    }
}

/// Everything that is wrong with a file, or with what it makes of the files it extends.
#[derive(Clone, Debug, Default)]
pub struct DiagnosticReport {
    sources: Vec<Source>,
    list: Vec<Located<Diagnostic>>,
    /// What was found is no mistake.
    is_advice: bool,
}

/// How many are rendered; a file with more mistakes is no policy.
const MAX_RENDERED: usize = 24;

impl DiagnosticReport {
    pub(crate) fn new(sources: Vec<Source>, found: Diagnostics) -> Self {
        let mut list = found.list;
        list.sort_by(|a, b| a.span.cmp(&b.span));
        DiagnosticReport { sources, list, is_advice: false }
    }

    /// The same of what is no mistake, and may mean something else than its author believed.
    pub(crate) fn advice(sources: Vec<Source>, found: Diagnostics) -> Self {
        DiagnosticReport { is_advice: true, ..Self::new(sources, found) }
    }

    /// The mistakes, in the order of the files.
    pub fn diagnostics(&self) -> &[Located<Diagnostic>] {
        &self.list
    }

    /// Line and column of a place, counted from 1.
    pub fn position(&self, span: &SourceSpan) -> (usize, usize) {
        let text = self.sources.get(span.source).map_or("", |source| source.text.as_str());
        let before = &text[..floor(text, span.start)];
        let line = before.matches('\n').count() + 1;
        let column = before.rsplit('\n').next().map_or(0, |rest| rest.chars().count()) + 1;
        (line, column)
    }

    /// The report as text, with colour for a terminal.
    pub fn render(&self, colour: bool) -> String {
        let renderer = if colour { Renderer::styled() } else { Renderer::plain() };
        let mut out = String::new();
        for (index, diagnostic) in self.list.iter().take(MAX_RENDERED).enumerate() {
            if index > 0 {
                out.push_str("\n\n");
            }
            out.push_str(&renderer.render(&[self.group(diagnostic)]));
        }
        if self.list.len() > MAX_RENDERED {
            out.push_str(&format!("\n\nand {} more", self.list.len() - MAX_RENDERED));
        }
        out
    }

    fn group<'a>(&'a self, Located { value, span }: &'a Located<Diagnostic>) -> Group<'a> {
        let primary = self.snippet(span, AnnotationKind::Primary, &value.label);
        let level = if self.is_advice { Level::WARNING } else { Level::ERROR };
        let mut group = level.primary_title(value.title.as_str()).element(primary);
        if let Some((span, label)) = &value.also {
            group = group.element(self.snippet(span, AnnotationKind::Context, label));
        }
        if let Some(help) = &value.help {
            group = group.element(Level::HELP.message(help.as_str()));
        }
        group
    }

    fn snippet<'a>(&'a self, span: &SourceSpan, kind: AnnotationKind, label: &'a str) -> Snippet<'a, annotate_snippets::Annotation<'a>> {
        let (text, path) = self.sources.get(span.source).map_or(("", ""), |source| (source.text.as_str(), source.label.as_str()));
        let start = floor(text, span.start);
        let end = floor(text, span.end.max(start));
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

impl fmt::Display for DiagnosticReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.render(false))
    }
}

impl std::error::Error for DiagnosticReport {}

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
