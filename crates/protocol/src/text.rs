//! Text from hostile sources, escaped for terminals, logs and people; bytes as hex.
//!
//! Guarantees: what [`escape`] and [`escape_json`] write with [`is_hidden`] has no character
//! that a terminal acts on, that turns the direction of writing, or that is drawn as nothing.
//! Does not: tell letters apart that only look alike, or bound the length of a text.

use alloc::{format, string::String, vec::Vec};
use core::fmt::Write;

/// Whether a character is not drawn as itself: control characters, separators, blanks other
/// than the space, marks of direction, unassigned and private characters, and what Unicode
/// lets a reader ignore (`Default_Ignorable_Code_Point`).
pub fn is_hidden(letter: char) -> bool {
    // Rust's escape_debug covers all but what Unicode counts as letters, marks and symbols:
    // fillers, variation selectors and blank symbols.
    let invisible = matches!(letter,
        '\u{34f}' | '\u{2800}' | '\u{3164}' | '\u{ffa0}' | '\u{16fe4}' | '\u{1d159}'
        | '\u{115f}'..='\u{1160}'
        | '\u{17b4}'..='\u{17b5}'
        | '\u{180b}'..='\u{180f}'
        | '\u{fe00}'..='\u{fe0f}'
        | '\u{13441}'..='\u{13442}'
        | '\u{e0000}'..='\u{e0fff}');
    // Behind a space, because an accent is escaped only at the beginning of a text.
    let unprintable = || !letter.is_ascii() && format!(" {letter}").escape_debug().nth(1) == Some('\\');
    letter.is_control() || invisible || unprintable()
}

/// Whether a character is not printable ASCII.
pub fn is_not_ascii(letter: char) -> bool {
    !matches!(letter, ' '..='~')
}

/// A text whose characters that `wanted` names are escaped as Rust writes them.
pub fn escape(text: &str, wanted: impl Fn(char) -> bool) -> String {
    let mut out = String::with_capacity(text.len());
    for letter in text.chars() {
        if wanted(letter) {
            out.extend(letter.escape_default());
        } else {
            out.push(letter);
        }
    }
    out
}

/// Lines whose hidden characters are escaped, except tabs.
pub fn visible(text: &str) -> String {
    escape(text, |letter| !matches!(letter, '\n' | '\t') && is_hidden(letter))
}

/// The same as [`escape`], with backslashes escaped too: no text is shown as another.
pub fn escape_line(text: &str, wanted: impl Fn(char) -> bool) -> String {
    escape(text, |letter| letter == '\\' || wanted(letter))
}

/// JSON whose characters that `wanted` names are escaped, but for line breaks. They can only
/// be inside strings, where the escape means the same.
pub fn escape_json(json: &str, wanted: impl Fn(char) -> bool) -> String {
    let mut out = String::with_capacity(json.len());
    for letter in json.chars() {
        if letter != '\n' && wanted(letter) {
            for unit in letter.encode_utf16(&mut [0; 2]) {
                // Writing to a string cannot fail.
                let _written = write!(out, "\\u{unit:04x}");
            }
        } else {
            out.push(letter);
        }
    }
    out
}

/// The first `max` bytes in printable ASCII, and an ellipsis where there are more.
pub fn escape_bytes(bytes: &[u8], max: usize) -> String {
    let shown = &bytes[..bytes.len().min(max)];
    let mut text: String = shown.iter().flat_map(|byte| byte.escape_ascii()).map(char::from).collect();
    if shown.len() < bytes.len() {
        text.push('…');
    }
    text
}

/// A line that no other line is shown like: a hidden character and a space at the end are
/// written as their number between ⟨ and ⟩. So are these two and what looks like them.
pub fn unambiguous(line: &str) -> String {
    let mut out = String::with_capacity(line.len());
    let mut letters = line.chars().peekable();
    while let Some(letter) = letters.next() {
        let bracket = matches!(letter, '\u{27e8}' | '\u{27e9}' | '\u{2329}' | '\u{232a}' | '\u{3008}' | '\u{3009}');
        if bracket || is_hidden(letter) || (letter == ' ' && letters.peek().is_none()) {
            let _written = write!(out, "\u{27e8}U+{:04X}\u{27e9}", u32::from(letter));
        } else {
            out.push(letter);
        }
    }
    out
}

/// Rows as lines whose cells stand in columns. No line ends in blanks.
pub fn columns<const N: usize>(rows: &[[String; N]]) -> String {
    let mut widths = [0; N];
    for row in rows {
        widths.iter_mut().zip(row).for_each(|(width, cell)| *width = cell.chars().count().max(*width));
    }
    let line = |row: &[String; N]| {
        let mut line = String::new();
        for (cell, width) in row.iter().zip(widths) {
            // Writing to a string cannot fail.
            let _written = write!(line, "{cell:width$}  ");
        }
        line.truncate(line.trim_end().len());
        line
    };
    rows.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// Bytes as two lower-case hexadecimal digits each.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]).filter_map(|digit| char::from_digit(digit.into(), 16)).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::*;

    /// One of each kind, and what looks like them and is a letter.
    const HIDDEN: &str = "\u{0}\u{1b}\u{7f}\u{85}\u{9b}\u{ad}\u{61c}\u{180e}\u{200b}\u{200d}\u{200f}\u{2028}\u{2029}\u{202a}\u{202e}\u{2060}\u{2066}\u{2069}\u{206f}\u{feff}\u{fe0f}\u{fff9}\u{e0001}\u{e007f}";
    /// Blanks that are no space, and what is drawn by no rule.
    const BLANK: &str = "\t\u{a0}\u{1680}\u{2000}\u{200a}\u{202f}\u{205f}\u{2800}\u{3000}\u{13441}\u{16fe4}\u{1d159}\u{e000}\u{f0000}\u{378}\u{fdd0}\u{ffff}\u{600}\u{6dd}\u{70f}\u{110bd}";
    const SHOWN: &str = "aé\u{5d0}\u{1f600} ~";

    #[test]
    fn cells_stand_below_each_other_and_no_line_ends_in_blanks() {
        let rows = [["ID", "WHAT"], ["ä1234", ""], ["7", "x y"]].map(|row| row.map(String::from));
        assert_eq!(columns(&rows), "ID     WHAT\nä1234\n7      x y");
        assert_eq!(columns::<2>(&[]), "");
        assert_eq!(visible("a\u{202e}\tb\n"), "a\\u{202e}\tb\n");
    }

    #[test]
    fn what_is_not_drawn_is_escaped_and_letters_are_not() {
        assert!(HIDDEN.chars().chain(BLANK.chars()).all(is_hidden) && !SHOWN.chars().any(is_hidden));
        // Default_Ignorable_Code_Point, marks of direction, separators and interlinear
        // annotation, as Unicode lists them.
        let listed = [
            0x00..=0x1f,
            0x7f..=0x9f,
            0xad..=0xad,
            0x34f..=0x34f,
            0x61c..=0x61c,
            0x115f..=0x1160,
            0x17b4..=0x17b5,
            0x180b..=0x180f,
            0x200b..=0x200f,
            0x2028..=0x202e,
            0x2060..=0x206f,
            0x3164..=0x3164,
            0xfe00..=0xfe0f,
            0xfeff..=0xfeff,
            0xffa0..=0xffa0,
            0xfff0..=0xfffb,
            0x1bca0..=0x1bca3,
            0x1d173..=0x1d17a,
            0xe0000..=0xe0fff,
        ];
        for letter in listed.into_iter().flatten().filter_map(char::from_u32) {
            assert!(is_hidden(letter), "{letter:?}");
        }
        assert_eq!(escape("a\u{202e}b\nc\u{2028}", |c| c != '\n' && is_hidden(c)), "a\\u{202e}b\nc\\u{2028}");
        assert_eq!(escape(SHOWN, is_hidden), SHOWN);
        assert_eq!(escape("e\u{301} \\", is_hidden), "e\u{301} \\");
        assert_eq!(escape_line("a\n\\n", is_hidden), "a\\n\\\\n");
        assert_eq!(escape("é\u{1b}[", is_not_ascii), "\\u{e9}\\u{1b}[");
    }

    #[test]
    fn no_line_is_shown_as_another_where_it_is_unambiguous() {
        let marks = [
            ("\u{1b}", "⟨U+001B⟩"),
            ("⟨U+001B⟩", "⟨U+27E8⟩U+001B⟨U+27E9⟩"),
            ("\\u{1b}", "\\u{1b}"),
            ("a\tb\r", "a⟨U+0009⟩b⟨U+000D⟩"),
            (" a  b  ", " a  b ⟨U+0020⟩"),
        ];
        for (text, shown) in marks {
            assert_eq!(unambiguous(text), shown);
        }
        for letter in BLANK.chars() {
            assert_eq!(unambiguous(&format!("a{letter}b")), format!("a⟨U+{:04X}⟩b", u32::from(letter)));
        }
        // The control: letters, accents and what is drawn of no script.
        for shown in [SHOWN, "e\u{301} \u{915}\u{93e}\u{94d} \u{4e00}\u{fffd}\u{2801}"] {
            assert_eq!(unambiguous(shown), shown);
        }
        // From what is shown the text can be had back: two texts are never shown alike.
        let whole = format!("{HIDDEN}{BLANK}{SHOWN}⟨\u{3009}U+\\");
        let mut back = String::new();
        let shown = unambiguous(&whole);
        let mut rest = shown.as_str();
        while let Some((before, from)) = rest.split_once('⟨') {
            let (number, after) = from.split_once('⟩').unwrap();
            back.push_str(before);
            back.push(char::from_u32(u32::from_str_radix(&number[2..], 16).unwrap()).unwrap());
            rest = after;
        }
        assert_eq!(back + rest, whole);
        assert!(!shown.chars().any(is_hidden));
    }

    #[test]
    fn escapes_of_json_mean_the_same_text() {
        let text = format!("{HIDDEN}{BLANK}{SHOWN}\u{1f600}");
        let json = serde_json::to_string_pretty(&[&text]).unwrap();
        for wanted in [is_hidden, is_not_ascii] {
            let safe = escape_json(&json, wanted);
            assert!(!safe.chars().any(|c| c != '\n' && wanted(c)), "{safe}");
            assert_eq!(serde_json::from_str::<[String; 1]>(&safe).unwrap(), [text.as_str()]);
        }
    }

    #[test]
    fn bytes_are_shown_in_ascii_and_in_hex() {
        assert_eq!(escape_bytes(b"a\tb\xff", 128), "a\\tb\\xff");
        assert_eq!(escape_bytes(&[b'a'; 500], 128).chars().count(), 129);
        assert_eq!(hex(&[0, 0x9a, 0xff]), "009aff");
    }
}
