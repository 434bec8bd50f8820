//! The encoding that a Python file declares (PEP 263).
//!
//! The interpreter decodes the file with it first, so some encodings turn a comment into code.
//! Accepted are only encodings in which every ASCII character stands for itself and no other bytes
//! stand for one. It decodes nothing.

/// Single-byte encodings that extend ASCII, by the beginning of their names.
const PLAIN: [&str; 12] =
    ["iso-8859", "iso8859", "latin", "l1", "cp125", "windows-125", "koi8-", "mac-roman", "macroman", "cp437", "cp850", "cp866"];
/// Names of ASCII and UTF-8.
const SAME: [&str; 7] = ["ascii", "us-ascii", "646", "utf-8", "utf8", "u8", "utf-8-sig"];

/// Place and name of an encoding that changes what the file means.
pub(crate) fn foreign(code: &str) -> Option<((usize, usize), &str)> {
    let mut rest = code;
    for _ in 0..2 {
        let end = rest.find(['\n', '\r']).unwrap_or(rest.len());
        let line = rest[..end].trim_start_matches([' ', '\t', '\x0c', '\u{feff}']);
        if let Some(name) = named(line) {
            let start = name.as_ptr() as usize - code.as_ptr() as usize;
            return (!is_plain(name)).then_some(((start, start + name.len()), name));
        }
        // The second line counts only after a comment or an empty line.
        if !(line.is_empty() || line.starts_with('#')) {
            return None;
        }
        rest = rest[end..].strip_prefix("\r\n").or_else(|| rest[end..].get(1..)).unwrap_or_default();
    }
    None
}

/// The encoding that a line declares.
fn named(line: &str) -> Option<&str> {
    let comment = line.strip_prefix('#')?;
    comment.match_indices("coding").find_map(|(at, word)| {
        let rest = comment[at + word.len()..].strip_prefix([':', '='])?.trim_start_matches([' ', '\t']);
        let end = rest.find(|c: char| !(c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))).unwrap_or(rest.len());
        (end > 0).then_some(&rest[..end])
    })
}

fn is_plain(name: &str) -> bool {
    let name = name.to_ascii_lowercase().replace('_', "-");
    // Python ignores what follows `utf-8-`; `utf-8-sig` is UTF-8 too.
    SAME.contains(&name.as_str()) || name.starts_with("utf-8-") || PLAIN.iter().any(|plain| name.starts_with(plain))
}

#[cfg(test)]
mod tests {
    use super::foreign;

    #[test]
    fn an_encoding_that_makes_code_of_comments_is_told() {
        for (code, name) in [
            ("# coding: utf-7\n", "utf-7"),
            ("#!/usr/bin/python3\n# -*- coding: raw_unicode_escape -*-\nx", "raw_unicode_escape"),
            ("\r\n#vim: fileencoding=shift_jis :\r\n", "shift_jis"),
            ("\u{feff} \x0c# coding=\tunicode-escape", "unicode-escape"),
            ("# coding coding: utf_16", "utf_16"),
            ("#\r# coding: hz\r", "hz"),
        ] {
            assert_eq!(foreign(code).map(|(_, name)| name), Some(name), "{code:?}");
        }
        for code in [
            "# coding: utf-8\n# coding: utf-7\n",
            "# -*- coding: Latin_1 -*-",
            "# coding: iso-8859-15",
            "x = 1\n# coding: utf-7\n",
            "\n\n# coding: utf-7\n",
            "'''\n# coding: x",
            "# decoding is slow: utf-7",
            "",
        ] {
            assert_eq!(foreign(code), None, "{code:?}");
        }
    }
}
