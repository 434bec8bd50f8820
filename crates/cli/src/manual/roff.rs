//! Text as the macros of man(7) take it: groff and mandoc show it character by character.

/// Text that is shown as it is, wherever on a line it stands. Quotes and dashes stay those of
/// ASCII, so that a reader can copy them into a shell.
pub(super) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len() + 16);
    for character in text.chars() {
        match character {
            '\\' => escaped.push_str("\\e"),
            '-' => escaped.push_str("\\-"),
            '\'' => escaped.push_str("\\(aq"),
            '`' => escaped.push_str("\\(ga"),
            '^' => escaped.push_str("\\(ha"),
            '~' => escaped.push_str("\\(ti"),
            // A request, were it the first of a line.
            '.' if escaped.is_empty() || escaped.ends_with('\n') => escaped.push_str("\\&."),
            _ => escaped.push(character),
        }
    }
    escaped
}

/// A line of output, which must not be taken for a request.
pub(super) fn line(inline: &str) -> String {
    let guard = if inline.starts_with(['.', '\'']) { "\\&" } else { "" };
    format!("{guard}{inline}\n")
}

/// The argument of a macro.
pub(super) fn argument(inline: &str) -> String {
    format!("\"{}\"", inline.replace('"', "\\(dq"))
}

/// Lines that are shown as they are, indented.
pub(super) fn verbatim(text: &str) -> String {
    let lines: String = text.lines().map(|text| line(&escape(text))).collect();
    format!(".PP\n.RS 4\n.EX\n{lines}.EE\n.RE\n")
}

/// One entry of a list: a term, and what it means.
pub(super) fn entry(term: &str, meaning: &str) -> String {
    format!(".TP\n{}{}", line(term), line(meaning))
}

/// A paragraph.
pub(super) fn paragraph(inline: &str) -> String {
    format!(".PP\n{}", line(inline))
}

/// A heading of a page and what stands below it. There, as after lists, a paragraph begins
/// without being told to.
pub(super) fn section(title: &str, body: &str) -> String {
    let body = body.replace(".PP\n.PP\n", ".PP\n");
    let body = body.strip_prefix(".PP\n").unwrap_or(&body);
    let body = body.strip_suffix("\n.PP\n").map_or(body.to_owned(), |body| format!("{body}\n"));
    format!(".SH {}\n{body}", argument(&escape(&title.to_uppercase())))
}
