//! Strings as TOML writes them, with what is hidden in them as escapes.
//!
//! The text that a parser reads from it is the same. It does not choose between the kinds of
//! TOML strings: `toml` does, where nothing is hidden.

use std::fmt::Write;

use stockade_protocol::text::is_hidden;

/// A text as TOML writes it.
pub fn toml_text(text: &str) -> String {
    if !text.chars().any(is_hidden) {
        return toml::Value::from(text).to_string();
    }
    let mut out = String::from("\"");
    for letter in text.chars() {
        match letter {
            '"' | '\\' => out.extend(['\\', letter]),
            letter if is_hidden(letter) => {
                // Writing to a string cannot fail.
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

    #[test]
    fn escapes_of_toml_mean_the_same_text() {
        const HIDDEN: &str = "\u{0}\u{1b}\u{7f}\u{85}\u{9b}\u{ad}\u{61c}\u{180e}\u{200b}\u{200d}\u{200f}\u{2028}\u{2029}\u{202a}\u{202e}\u{2060}\u{2066}\u{2069}\u{206f}\u{feff}\u{fe0f}\u{fff9}\u{e0001}\u{e007f}";
        const SHOWN: &str = "aé\u{5d0}\u{1f600} ~";
        for text in [HIDDEN, SHOWN, "plain", "it's \"quoted\" \\ \u{202e}"] {
            let document: toml::Table = format!("text = {}", toml_text(text)).parse().unwrap();
            assert_eq!(document["text"].as_str(), Some(text));
            assert!(!toml_text(text).chars().any(is_hidden));
        }
    }
}
