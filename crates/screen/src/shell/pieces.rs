//! Code that the grammar does not parse: lines with syntax errors, and backquotes that it takes for
//! text.
//!
//! It splits such lines at separators; it does not understand their syntax.

use std::borrow::Cow;

use tree_sitter::Node;

use super::{Walk, span};

/// Words that can come before a command.
const BEGINNINGS: [&str; 9] = ["if", "then", "else", "elif", "do", "while", "until", "time", "!"];

/// A piece without the words before its command.
fn command(piece: &str) -> &str {
    let mut rest = piece.trim();
    while let Some(after) =
        BEGINNINGS.iter().find_map(|word| rest.strip_prefix(word)).filter(|after| after.starts_with(char::is_whitespace))
    {
        rest = after.trim_start();
    }
    rest
}

/// The code with everything before `begin` blanked.
pub(super) fn without_start(code: &str, begin: usize) -> Cow<'_, str> {
    match code.get(begin..) {
        _ if begin == 0 => Cow::Borrowed(code),
        rest => Cow::Owned(" ".repeat(begin) + rest.unwrap_or_default()),
    }
}

impl Walk<'_, '_> {
    /// Reads the line of an error, and the rest unless that is parsed `anew`, split at
    /// separators of commands. Returns where the next line begins.
    pub(super) fn pieces(&mut self, error: usize, anew: bool) -> usize {
        let code = self.code;
        let begin = code.get(..error).and_then(|before| before.rfind('\n')).map_or(0, |end| end + 1);
        let end = code.get(error..).and_then(|rest| rest.find('\n')).filter(|_| anew).map_or(code.len(), |end| error + end + 1);
        let mut at = begin;
        for line in code.get(begin..end).unwrap_or_default().split_inclusive('\n') {
            let place = (at + line.len() - line.trim_start().len(), at + line.trim_end().len());
            at += line.len();
            for piece in line.split([';', '{', '}', '(', ')', '&', '|']).map(command).filter(|piece| piece.contains(char::is_alphabetic)) {
                self.runs("sh", piece, place);
            }
        }
        end
    }

    /// Reads code in backquotes, in text in which the shell expands them.
    pub(super) fn backquotes(&mut self, node: Node<'_>) {
        let quoted =
            self.children(node).iter().any(|part| part.kind() == "heredoc_start" && self.source(*part).contains(['\'', '"', '\\']));
        let text = self.source(node).to_owned();
        if quoted || !text.contains('`') {
            return;
        }
        let mut parts = text.split('`').skip(1);
        while let (Some(script), Some(_)) = (parts.next(), parts.next()) {
            self.runs("sh", script, span(node));
        }
    }
}
