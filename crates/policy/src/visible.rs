//! Texts that somebody else wrote, for a person to read: what hides, turns or ends the
//! text around it is written as an escape.
//!
//! TOML and JSON get escapes of their own, which mean the same text. In messages an escape
//! may be mistaken for the same letters in the text; where somebody decides by what they
//! read, [`marked`] leaves no such doubt, nor about blanks. Letters that only look alike are left as
//! they are.

use std::fmt::Write;

/// Whether a character is not shown as itself: a control character, a line or paragraph
/// separator, a mark that turns the direction of writing, and what Unicode lets a reader
/// ignore (`Default_Ignorable_Code_Point`), such as zero-width spaces and tags.
pub fn is_hidden(letter: char) -> bool {
    letter.is_control()
        || matches!(letter,
            '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{feff}' | '\u{3164}' | '\u{ffa0}'
            | '\u{115f}'..='\u{1160}'
            | '\u{17b4}'..='\u{17b5}'
            | '\u{180b}'..='\u{180f}'
            | '\u{200b}'..='\u{200f}'
            | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}'
            | '\u{fe00}'..='\u{fe0f}'
            | '\u{fff0}'..='\u{fffb}'
            | '\u{1bca0}'..='\u{1bca3}'
            | '\u{1d173}'..='\u{1d17a}'
            | '\u{e0000}'..='\u{e0fff}')
}

/// A text whose hidden characters are escaped as Rust writes them, but for those that
/// `keep` names.
pub fn visible(text: &str, keep: &[char]) -> String {
    let mut out = String::with_capacity(text.len());
    for letter in text.chars() {
        if is_hidden(letter) && !keep.contains(&letter) {
            out.extend(letter.escape_default());
        } else {
            out.push(letter);
        }
    }
    out
}

/// Whether a letter cannot be told by its looks: one that is hidden, a blank that is no
/// space, what has no looks of its own (private use, unassigned), and ⟨ and ⟩ and their
/// likes, since they mark the others. The mark of an accent is none of these.
fn wants_number(letter: char) -> bool {
    // By their names letters and symbols, and drawn as nothing.
    let blank = matches!(letter, '\u{2800}' | '\u{13441}'..='\u{13442}' | '\u{16fe4}' | '\u{1d159}');
    // Of what begins no text, Rust escapes all that Unicode does not call printable.
    let unprintable = || !letter.is_ascii() && format!(" {letter}").escape_debug().nth(1) == Some('\\');
    let mark = matches!(letter, '\u{27e8}' | '\u{27e9}' | '\u{2329}' | '\u{232a}' | '\u{3008}' | '\u{3009}');
    mark || blank || is_hidden(letter) || unprintable()
}

/// A line of which every character can be told: what cannot be by its looks stands as its
/// number between ⟨ and ⟩, and so does a space at the end, so that no other line is shown
/// alike.
pub fn marked(line: &str) -> String {
    let mut out = String::with_capacity(line.len());
    let mut letters = line.chars().peekable();
    while let Some(letter) = letters.next() {
        if wants_number(letter) || (letter == ' ' && letters.peek().is_none()) {
            // Writing to a string cannot fail.
            let _written = write!(out, "\u{27e8}U+{:04X}\u{27e9}", u32::from(letter));
        } else {
            out.push(letter);
        }
    }
    out
}

/// JSON whose hidden characters are escapes: they stand in strings alone, where that means
/// the same.
pub fn visible_json(json: &str) -> String {
    let mut out = String::with_capacity(json.len());
    for letter in json.chars() {
        if is_hidden(letter) && letter != '\n' {
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

/// A text as TOML writes it.
pub(crate) fn toml_text(text: &str) -> String {
    if !text.chars().any(is_hidden) {
        return toml::Value::from(text).to_string();
    }
    let mut out = String::from("\"");
    for letter in text.chars() {
        match letter {
            '"' | '\\' => out.extend(['\\', letter]),
            letter if is_hidden(letter) => {
                let _written = write!(out, "\\U{:08x}", u32::from(letter));
            }
            letter => out.push(letter),
        }
    }
    out.push('"');
    out
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
    fn what_hides_or_turns_text_is_escaped_and_letters_are_not() {
        assert!(HIDDEN.chars().all(is_hidden) && !SHOWN.chars().any(is_hidden));
        // Every mark of direction by its property, as Unicode lists them.
        let marks = (0x200e..=0x200f).chain(0x202a..=0x202e).chain(0x2066..=0x2069).chain([0x61c]);
        assert!(marks.filter_map(char::from_u32).all(is_hidden));
        assert!((0x80..0xa0).filter_map(char::from_u32).all(is_hidden));
        assert_eq!(visible("a\u{202e}b\nc\u{2028}", &['\n']), "a\\u{202e}b\nc\\u{2028}");
        assert_eq!(visible(SHOWN, &[]), SHOWN);
    }

    #[test]
    fn no_text_is_shown_as_another_where_it_is_marked() {
        let marks = [
            ("\u{1b}", "⟨U+001B⟩"),
            ("⟨U+001B⟩", "⟨U+27E8⟩U+001B⟨U+27E9⟩"),
            ("\\u{1b}", "\\u{1b}"),
            ("a\tb\r", "a⟨U+0009⟩b⟨U+000D⟩"),
            (" a  b  ", " a  b ⟨U+0020⟩"),
        ];
        for (text, shown) in marks {
            assert_eq!(marked(text), shown);
        }
        for letter in BLANK.chars() {
            assert_eq!(marked(&format!("a{letter}b")), format!("a⟨U+{:04X}⟩b", u32::from(letter)));
        }
        // The control: letters, accents and what is drawn of no script.
        for shown in [SHOWN, "e\u{301} \u{915}\u{93e}\u{94d} \u{4e00}\u{fffd}\u{2801}"] {
            assert_eq!(marked(shown), shown);
        }
        // From what is shown the text comes back: two texts are never shown alike.
        let whole = format!("{HIDDEN}{BLANK}{SHOWN}⟨\u{3009}U+\\");
        let mut back = String::new();
        let shown = marked(&whole);
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
    fn escapes_of_toml_mean_the_same_text() {
        for text in [HIDDEN, SHOWN, "plain", "it's \"quoted\" \\ \u{202e}"] {
            let document: toml::Table = format!("text = {}", toml_text(text)).parse().unwrap();
            assert_eq!(document["text"].as_str(), Some(text));
            assert!(!toml_text(text).chars().any(is_hidden));
        }
    }
}
