//! Names of images, and how they are written as names of files.

use crate::ImageError;

/// The longest name of a file, `NAME_MAX` of `limits.h`, in bytes.
const MAX_FILE_NAME_LEN: usize = 255;

/// Checks that this can name an image: printable ASCII without spaces and `@`, no digest, and short
/// enough to be the name of a file.
///
/// # Errors
/// It cannot.
pub fn check_name(name: &str) -> Result<(), ImageError> {
    let refuse = |why| Err(ImageError::Name { name: name.to_owned(), why });
    if name.is_empty() {
        refuse("it is empty")
    } else if !name.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'@') {
        refuse("it has a character other than printable ASCII, a space or `@`")
    } else if name.starts_with("sha256:") {
        refuse("it begins as a digest does")
    } else if escape(name).len() > MAX_FILE_NAME_LEN {
        refuse("it is too long")
    } else {
        Ok(())
    }
}

/// A name as the name of a file: letters, digits, `_`, `-` and inner dots stay, each other byte is `%`
/// and two hex digits.
pub fn escape(name: &str) -> String {
    let mut escaped = String::new();
    for (at, byte) in name.bytes().enumerate() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'-' => escaped.push(char::from(byte)),
            b'.' if at > 0 => escaped.push('.'),
            _ => escaped.push_str(&format!("%{byte:02X}")),
        }
    }
    escaped
}

/// The name that a file's name stands for. None: it is no name that [`escape`] writes.
pub fn unescape(file: &str) -> Option<String> {
    let mut name = Vec::new();
    let mut rest = file.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        rest = after;
        if first == b'%' {
            let digits = rest.get(..2).and_then(|digits| str::from_utf8(digits).ok())?;
            name.push(u8::from_str_radix(digits, 16).ok()?);
            rest = rest.get(2..)?;
        } else {
            name.push(first);
        }
    }
    let name = String::from_utf8(name).ok()?;
    (escape(&name) == file && check_name(&name).is_ok()).then_some(name)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::{check_name, escape, unescape};

    #[test]
    fn a_name_comes_back_from_its_file_and_leads_nowhere() {
        for name in ["python", "docker.io/library/python:3.12", "../../etc/passwd", "..", ".", "%2F", "a%b"] {
            let file = escape(name);
            assert!(!file.contains('/') && !file.starts_with('.'), "{file}");
            assert_eq!(unescape(&file).as_deref(), Some(name));
        }
        for file in ["", "a/b", "%2f", "%", "%4", "a b", "%00", ".x"] {
            assert_eq!(unescape(file), None, "{file}");
        }
    }

    #[test]
    fn a_name_is_no_digest_and_has_no_hidden_character() {
        for name in ["", "sha256:00", "a b", "a@b", "é", "a\n", "\u{202e}x", &"x".repeat(256), &"/".repeat(100)] {
            assert!(check_name(name).is_err(), "{name:?}");
        }
        check_name(&"x".repeat(255)).unwrap();
    }
}
