//! The repository's documents as text of manual pages.
//!
//! Takes what they are written in: headings, paragraphs, lists, tables, code, links. Anything
//! else is an error, so that nothing of a document is dropped without a word.

use std::{io, mem};

use pulldown_cmark::{CodeBlockKind, Event, HeadingLevel, Options, Parser, Tag, TagEnd};

use super::roff;

/// What stands below a heading of the first or second level.
#[derive(Debug, Default)]
pub(super) struct Section {
    /// The heading.
    pub title: String,
    /// Its text.
    pub body: String,
    /// The code in it, with what leads to it.
    pub code: Vec<Code>,
}

/// A block of code.
#[derive(Clone, Debug)]
pub(super) struct Code {
    /// The paragraph before it, if that ends with a colon.
    pub introduction: Option<String>,
    /// Its lines.
    pub text: String,
}

/// Where a link leads on a host that has the package.
pub(super) type Resolve<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Converts a document.
///
/// # Errors
/// It holds what is not converted.
pub(super) fn sections(document: &str, resolve: Resolve<'_>) -> io::Result<Vec<Section>> {
    let mut writer = Writer {
        resolve,
        sections: Vec::new(),
        inline: String::new(),
        lists: Vec::new(),
        table: Table::default(),
        link: None,
        code: None,
        fresh_item: false,
    };
    for event in Parser::new_ext(document, Options::ENABLE_TABLES) {
        writer.event(event)?;
    }
    Ok(writer.sections)
}

struct Writer<'a> {
    resolve: Resolve<'a>,
    sections: Vec<Section>,
    /// The text that is being collected.
    inline: String,
    /// Of each list that is open, the number of the next item.
    lists: Vec<Option<u64>>,
    table: Table,
    /// Where a link leads, and where its text begins.
    link: Option<(String, usize)>,
    code: Option<String>,
    /// An item has begun, and has no text yet.
    fresh_item: bool,
}

#[derive(Default)]
struct Table {
    rows: Vec<Vec<String>>,
}

impl Writer<'_> {
    fn event(&mut self, event: Event<'_>) -> io::Result<()> {
        match event {
            Event::Start(tag) => self.start(tag)?,
            Event::End(tag) => self.end(tag)?,
            Event::Text(text) => match &mut self.code {
                Some(code) => code.push_str(&text),
                None => self.inline.push_str(&roff::escape(&text)),
            },
            Event::Code(text) => self.inline.push_str(&format!("\\fB{}\\fR", roff::escape(&text))),
            Event::SoftBreak => self.inline.push(' '),
            other => return Err(unknown(&other)),
        }
        Ok(())
    }

    fn start(&mut self, tag: Tag<'_>) -> io::Result<()> {
        match tag {
            Tag::Paragraph | Tag::Heading { .. } | Tag::TableCell => self.flush(),
            Tag::Strong => self.inline.push_str("\\fB"),
            Tag::Emphasis => self.inline.push_str("\\fI"),
            Tag::Link { dest_url, .. } => self.link = Some((dest_url.into_string(), self.inline.len())),
            Tag::List(first) => {
                self.flush();
                if !self.lists.is_empty() {
                    self.push(".RS 4\n");
                }
                self.lists.push(first);
            }
            Tag::Item => {
                let mark = match self.lists.last_mut() {
                    Some(Some(number)) => {
                        *number += 1;
                        format!(".IP {}. 4\n", *number - 1)
                    }
                    _ => ".IP \\(bu 3\n".to_owned(),
                };
                self.push(&mark);
                self.fresh_item = true;
            }
            Tag::CodeBlock(CodeBlockKind::Fenced(_) | CodeBlockKind::Indented) => {
                self.flush();
                self.code = Some(String::new());
            }
            Tag::Table(_) => self.table = Table::default(),
            Tag::TableHead | Tag::TableRow => self.table.rows.push(Vec::new()),
            other => return Err(unknown(&other)),
        }
        Ok(())
    }

    fn end(&mut self, tag: TagEnd) -> io::Result<()> {
        match tag {
            TagEnd::Paragraph | TagEnd::Item => self.flush(),
            TagEnd::Strong | TagEnd::Emphasis => self.inline.push_str("\\fR"),
            TagEnd::Link => self.end_link(),
            TagEnd::Heading(level) => {
                let text = mem::take(&mut self.inline);
                if level <= HeadingLevel::H2 {
                    self.sections.push(Section { title: plain(&text), ..Section::default() });
                } else {
                    self.push(&format!(".SS {}\n", roff::argument(&text)));
                }
            }
            TagEnd::List(_) => {
                self.lists.pop();
                if self.lists.is_empty() {
                    self.push(".PP\n");
                } else {
                    self.push(".RE\n");
                }
            }
            TagEnd::CodeBlock => self.end_code(),
            TagEnd::TableCell => {
                let cell = mem::take(&mut self.inline);
                self.table.rows.last_mut().into_iter().for_each(|row| row.push(cell.clone()));
            }
            TagEnd::TableHead | TagEnd::TableRow => {}
            TagEnd::Table => {
                let table = mem::take(&mut self.table).render();
                self.push(&table);
            }
            other => return Err(unknown(&other)),
        }
        Ok(())
    }

    fn end_link(&mut self) {
        let Some((target, start)) = self.link.take() else { return };
        let there = if target.starts_with("http") { Some(target) } else { (self.resolve)(&target) };
        let Some(there) = there else { return };
        let text = self.inline.split_off(start);
        // A path in the repository is none of the host's.
        let named = plain(&text);
        let is_path = named.contains('/') && !named.contains(' ');
        self.inline.push_str(&match is_path {
            true => roff::escape(&there),
            false => format!("{text} ({})", roff::escape(&there)),
        });
    }

    fn end_code(&mut self) {
        let text = self.code.take().unwrap_or_default();
        let Some(section) = self.sections.last_mut() else { return };
        let before = section.body.trim_end().rsplit('\n').next().unwrap_or_default();
        let introduction = before.ends_with(':').then(|| before.to_owned());
        section.body.push_str(&roff::verbatim(&text));
        section.code.push(Code { introduction, text });
    }

    /// Writes what has been collected as a paragraph.
    fn flush(&mut self) {
        let text = mem::take(&mut self.inline);
        if text.is_empty() {
            return;
        }
        let mark = match self.lists.len() {
            0 => ".PP\n",
            _ if self.fresh_item => "",
            _ => ".IP\n",
        };
        self.fresh_item = false;
        self.push(&format!("{mark}{}", roff::line(&text)));
    }

    fn push(&mut self, text: &str) {
        if let Some(section) = self.sections.last_mut() {
            section.body.push_str(text);
        }
    }
}

impl Table {
    /// For tbl(1). A column whose cells are all short is as wide as they are; the others share
    /// the rest, and their cells are filled like paragraphs.
    fn render(self) -> String {
        const SHORT: usize = 22;
        /// What a terminal of 80 columns leaves for short ones.
        const MAX_WIDTH: usize = 60;
        let columns = self.rows.first().map_or(0, Vec::len);
        let width =
            |column: usize| self.rows.iter().filter_map(|row| row.get(column)).map(|cell| plain(cell).chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let fits = widths.iter().filter(|width| **width <= SHORT).sum::<usize>() <= MAX_WIDTH;
        let short: Vec<bool> = widths.iter().map(|width| fits && *width <= SHORT).collect();
        let layout =
            |font: &str| short.iter().map(|short| format!("l{font}{}", if *short { "" } else { "x" })).collect::<Vec<_>>().join(" ");
        let mut text = format!(".PP\n.TS\ntab(\t);\n{}\n{}.\n", layout("b"), layout(""));
        // A table of names without a heading begins with its first row.
        let empty = self.rows.first().is_some_and(|row| row.iter().all(String::is_empty));
        if empty {
            text = text.replace(&format!("{}\n", layout("b")), "");
        }
        for row in self.rows.iter().skip(usize::from(empty)) {
            let cells = row.iter().zip(&short).map(|(cell, short)| match short {
                true => cell.clone(),
                // Its lines are short: no blanks are put in to make them equal.
                false => format!("T{{\n.na\n{}T}}", roff::line(cell)),
            });
            text.push_str(&roff::line(&cells.collect::<Vec<_>>().join("\t")));
        }
        text.push_str(".TE\n");
        text
    }
}

/// Text as a reader sees it.
fn plain(inline: &str) -> String {
    let fonts = ["\\fB", "\\fI", "\\fR", "\\&"].iter().fold(inline.to_owned(), |text, font| text.replace(font, ""));
    [("\\e", "\\"), ("\\-", "-"), ("\\(aq", "'"), ("\\(ga", "`"), ("\\(ha", "^"), ("\\(ti", "~")]
        .iter()
        .fold(fonts, |text, (from, to)| text.replace(from, to))
}

fn unknown(what: &dyn std::fmt::Debug) -> io::Error {
    io::Error::other(format!("a document has what manual pages are not made of: {what:?}"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use super::*;

    fn body(document: &str) -> String {
        let resolve = |target: &str| target.starts_with("../").then(|| "stockade-policy(5)".to_owned());
        sections(&format!("# Title\n\n{document}"), &resolve).unwrap().remove(0).body
    }

    #[test]
    fn what_would_be_a_request_is_text() {
        assert_eq!(body(".so is \\f -x"), ".PP\n\\&.so is \\ef \\-x\n");
        assert_eq!(body("`'.x` y"), ".PP\n\\fB\\(aq.x\\fR y\n");
        assert_eq!(body("```\n.TH\n'br\na\\n\n```"), ".PP\n.RS 4\n.EX\n\\&.TH\n\\(aqbr\na\\en\n.EE\n.RE\n");
    }

    #[test]
    fn lists_tables_and_links_are_those_of_a_page() {
        assert_eq!(body("1. a\n2. b\n\n- c\n- d"), ".IP 1. 4\na\n.IP 2. 4\nb\n.PP\n.IP \\(bu 3\nc\n.IP \\(bu 3\nd\n.PP\n");
        assert_eq!(body("| a | b |\n|---|---|\n| .c | d |"), ".PP\n.TS\ntab(\t);\nlb lb\nl l.\na\tb\n\\&.c\td\n.TE\n");
        assert_eq!(
            body("[this](../x.md#y), [`a/b`](../x.md), [here](#z)"),
            ".PP\nthis (stockade\\-policy(5)), stockade\\-policy(5), here\n"
        );
    }

    #[test]
    fn what_is_not_converted_is_an_error() {
        for document in ["# T\n\n![picture](x.png)", "# T\n\n<b>x</b>", "# T\n\n> x", "# T\n\n---\n"] {
            sections(document, &|_| None).unwrap_err();
        }
    }
}
