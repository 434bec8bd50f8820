//! The encoding that a Python file says it is in (PEP 263).
//!
//! The interpreter decodes the file by it before it looks at anything else, so that under
//! some encodings a comment becomes code. Only those are passed over in which every ASCII
//! character stands for itself and nothing else stands for one.

/// Encodings of one byte a character that hold ASCII, by how their names begin.
const PLAIN: [&str; 12] =
    ["iso-8859", "iso8859", "latin", "l1", "cp125", "windows-125", "koi8-", "mac-roman", "macroman", "cp437", "cp850", "cp866"];
/// Names of ASCII and of what the text is in anyway.
const SAME: [&str; 7] = ["ascii", "us-ascii", "646", "utf-8", "utf8", "u8", "utf-8-sig"];

/// Where a file names an encoding under which it is not what it looks like, and the name.
pub(crate) fn foreign(code: &str) -> Option<((usize, usize), &str)> {
    let mut rest = code;
    for _ in 0..2 {
        let end = rest.find(['\n', '\r']).unwrap_or(rest.len());
        let line = rest[..end].trim_start_matches([' ', '\t', '\x0c', '\u{feff}']);
        if let Some(name) = named(line) {
            let start = name.as_ptr() as usize - code.as_ptr() as usize;
            return (!is_plain(name)).then_some(((start, start + name.len()), name));
        }
        // A second line counts only below a comment or nothing.
        if !(line.is_empty() || line.starts_with('#')) {
            return None;
        }
        rest = rest[end..].strip_prefix("\r\n").or_else(|| rest[end..].get(1..)).unwrap_or_default();
    }
    None
}

/// The encoding that a line names.
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
    // What follows `utf-8-` Python does not look at, but for one name, which is the same.
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
