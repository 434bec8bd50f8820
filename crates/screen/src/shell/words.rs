//! Expands the words of a shell command as far as they are known.
//!
//! Quotes and backslashes are removed, and known variables replaced. A home directory is `~`, an
//! unknown variable `$NAME`, the output of a command `*`. Globs are not expanded.

use std::collections::HashMap;

use tree_sitter::Node;

use crate::budget::MAX_TEXT_LEN;

/// Words that are nested deeper are unknown.
const MAX_DEPTH: u8 = 30;

/// A word after expansion.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Word {
    pub text: String,
    /// Every part is known.
    pub known: bool,
    /// It contains unquoted blanks, at which the shell splits it.
    spaced: bool,
}

impl Word {
    pub(super) fn plain(text: String) -> Self {
        Word { text, known: true, spaced: false }
    }

    pub(super) fn unknown(text: &str) -> Self {
        Word { text: text.to_owned(), known: false, spaced: false }
    }

    fn and(mut self, other: Word) -> Word {
        if self.text.len() + other.text.len() <= MAX_TEXT_LEN {
            self.text.push_str(&other.text);
        }
        Word { text: self.text, known: self.known && other.known, spaced: self.spaced || other.spaced }
    }

    /// The words after word splitting.
    pub(super) fn split(self) -> Vec<Word> {
        if !self.spaced {
            return vec![self];
        }
        self.text.split_whitespace().map(|text| Word { text: text.to_owned(), known: self.known, spaced: false }).collect()
    }
}

/// The values of these options, in the same word or the next. Other letters may stand before a
/// `clustered` one, as in `-su`.
pub(super) fn option_values<'w>(arguments: &'w [Word], options: &[&str], clustered: bool) -> impl Iterator<Item = &'w str> {
    let next = arguments.iter().skip(1).map(Some).chain([None]);
    arguments.iter().zip(next).filter_map(move |(word, next)| match behind(&word.text, options, clustered)? {
        "" => next.map(|next| next.text.as_str()),
        value => Some(value),
    })
}

/// The value of an option in the same word; empty where the next word is its value.
fn behind<'w>(word: &'w str, options: &[&str], clustered: bool) -> Option<&'w str> {
    options.iter().find_map(|option| match option.starts_with("--") {
        true => word.strip_prefix(*option).and_then(|rest| if rest.is_empty() { Some(rest) } else { rest.strip_prefix('=') }),
        false => {
            let (before, value) = word.strip_prefix('-')?.split_once(option.trim_start_matches('-'))?;
            (before.is_empty() || (clustered && before.bytes().all(|byte| byte.is_ascii_alphabetic()))).then_some(value)
        }
    })
}

/// The values of variables.
#[derive(Default)]
pub(super) struct Variables(HashMap<String, Word>);

impl Variables {
    pub(super) fn set(&mut self, name: &str, value: Word) {
        self.0.insert(name.to_owned(), value);
    }

    fn get(&self, name: &str) -> Word {
        match (self.0.get(name), name) {
            (Some(word), _) => word.clone(),
            (None, "HOME") => Word::plain("~".to_owned()),
            (None, "IFS") => Word { text: " ".to_owned(), known: true, spaced: true },
            (None, name) => Word::unknown(&format!("${name}")),
        }
    }
}

fn source<'c>(node: Node<'_>, code: &'c str) -> &'c str {
    code.get(node.byte_range()).unwrap_or_default()
}

/// The expansion of a word.
pub(super) fn evaluate(node: Node<'_>, code: &str, variables: &Variables, depth: u8) -> Word {
    if depth > MAX_DEPTH {
        return Word::unknown("*");
    }
    let whole = source(node, code);
    match node.kind() {
        "word" => Word::plain(without_backslashes(whole)),
        "raw_string" => Word::plain(whole.trim_matches('\'').to_owned()),
        "ansi_c_string" => Word::plain(escapes(whole.strip_prefix("$'").and_then(|text| text.strip_suffix('\'')).unwrap_or(whole))),
        "number" | "string_content" | "special_character" => Word::plain(whole.to_owned()),
        "simple_expansion" => variables.get(whole.strip_prefix('$').unwrap_or(whole)),
        "expansion" => {
            let name: String = whole.trim_start_matches("${").chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            let form = whole.get(name.len() + 2..whole.len() - 1).unwrap_or_default();
            let value = variables.get(&name);
            match form {
                "" => value,
                // The value is set, so its default is not used.
                _ if value.known && form.trim_start_matches(':').starts_with(['-', '=', '?']) => value,
                // Substrings and replacements are not followed.
                _ => Word::unknown(&format!("${name}")),
            }
        }
        "command_substitution" | "process_substitution" | "arithmetic_expansion" => Word::unknown("*"),
        "string" => parts(node, code, variables, depth, (1, 1)),
        "concatenation" | "command_name" => parts(node, code, variables, depth, (0, 0)),
        _ => Word::plain(whole.to_owned()),
    }
}

/// A word of parts; text between them is literal.
fn parts(node: Node<'_>, code: &str, variables: &Variables, depth: u8, (left, right): (usize, usize)) -> Word {
    let (mut at, end) = (node.start_byte() + left, node.end_byte().saturating_sub(right));
    let mut cursor = node.walk();
    let mut word = Word::plain(String::new());
    for child in node.named_children(&mut cursor) {
        let between = code.get(at..child.start_byte()).unwrap_or_default();
        word = word.and(Word::plain(between.to_owned())).and(evaluate(child, code, variables, depth + 1));
        at = child.end_byte();
    }
    word.and(Word::plain(code.get(at..end).unwrap_or_default().to_owned()))
}

/// The script for the grammar, which takes the offset of a substring (`${x:$i:1}`, `${@:$#}`) for
/// an error unless it is a number, a name or a substitution. Other signs in it become letters; all
/// places stay the same.
pub(super) fn with_plain_offsets(code: &str) -> String {
    let (mut out, mut rest) = (String::with_capacity(code.len()), code);
    while let Some(begin) = rest.find("${").map(|at| at + 2) {
        let name = rest[begin..].trim_start_matches(|c: char| c.is_ascii_alphanumeric() || "_@*!".contains(c));
        let indexed = name.strip_prefix('[').and_then(|index| index.split_at_checked(index.find(['[', ']', '{', '}', '\n'])?));
        let form = indexed.and_then(|(_, rest)| rest.strip_prefix(']')).unwrap_or(name);
        out.push_str(&rest[..rest.len() - form.len()]);
        rest = form;
        // Signs of a default value.
        if !form.starts_with(':') || form[1..].starts_with(['-', '=', '?', '+']) {
            continue;
        }
        let end = form.find(|c: char| !c.is_ascii_alphanumeric() && !":_$#@*![]()+-/% ".contains(c)).unwrap_or(form.len());
        let offset = form[..end].trim_end_matches('$').split("$(").next().unwrap_or_default();
        let letters = offset.replace("++", "__").replace("--", "__").replace(['$', '#', '@', '!', '[', ']', '(', ')', ' '], "_");
        out.push_str(&letters);
        rest = &form[offset.len()..];
    }
    out + rest
}

/// Whether the name of a command is built from several variables.
pub(super) fn is_put_together(name: Node<'_>) -> bool {
    let is_variable = |part: &Node<'_>| matches!(part.kind(), "simple_expansion" | "expansion");
    let mut cursor = name.walk();
    name.named_children(&mut cursor).any(|word| {
        let mut cursor = word.walk();
        word.named_children(&mut cursor).filter(is_variable).count() >= 2
    })
}

fn without_backslashes(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut letters = text.chars();
    while let Some(letter) = letters.next() {
        match letter {
            '\\' => out.extend(letters.next().filter(|next| *next != '\n')),
            other => out.push(other),
        }
    }
    out
}

/// Escapes as in `$'…'` and printf.
pub(super) fn escapes(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find('\\') {
        out.push_str(&rest[..at]);
        let after = &rest[at + 1..];
        let digits = |skip: usize, most: usize, radix: u32| {
            let digits: String = after.chars().skip(skip).take(most).take_while(|c| c.is_digit(radix)).collect();
            u32::from_str_radix(&digits, radix).ok().and_then(char::from_u32).map(|letter| (letter, skip + digits.len()))
        };
        let (letter, used) = match after.chars().next() {
            Some('x') => digits(1, 2, 16).unwrap_or(('x', 1)),
            Some('u') => digits(1, 4, 16).unwrap_or(('u', 1)),
            Some('0'..='7') => digits(0, 3, 8).unwrap_or(('0', 1)),
            Some('n') => ('\n', 1),
            Some('t') => ('\t', 1),
            Some(other) => (other, other.len_utf8()),
            None => ('\\', 0),
        };
        out.push(letter);
        rest = after.get(used..).unwrap_or_default();
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_are_undone() {
        assert_eq!(escapes(r"\x72\x6d"), "rm");
        assert_eq!(escapes(r"a\tb\\\101\u00e9"), "a\tb\\Aé");
        assert_eq!(without_backslashes(r"\rm"), "rm");
    }

    #[test]
    fn an_offset_becomes_letters_and_all_places_stay() {
        for (code, plain) in [
            ("${x:$i:1}", "${x:_i:1}"),
            ("${a[$i]:i++}$y", "${a[$i]:i__}$y"),
            ("${@:$#-1}", "${@:__-1}"),
            ("${x:$i:$(f $i)}", "${x:_i:$(f $i)}"),
            ("${x:-$i}${x:${y:$i}}", "${x:-$i}${x:${y:_i}}"),
            ("'${x:' $i é ${x:$", "'${x:' $i é ${x:$"),
        ] {
            assert_eq!(with_plain_offsets(code), plain);
        }
    }
}
