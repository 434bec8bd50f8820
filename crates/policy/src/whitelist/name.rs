//! Host names in their one canonical spelling.
//!
//! Every reader of names (the whitelist, a DNS query, the SNI of a TLS hello, a Host
//! header) reads them here, so that no two readers disagree on a name. What is no plain name is refused, never corrected, but for letter case and one final dot.

use std::fmt;

/// The longest name, without a final dot (RFC 1035, 3.1: 255 bytes on the wire).
const MAX_LEN: usize = 253;

/// A host name: labels of small letters, digits, `-` and `_`, at most 253 bytes, no final
/// dot, and never something that a resolver could take for an address.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(String);

/// Why a text is no name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameFault {
    /// Nothing there, or an empty label.
    #[error("a label is empty")]
    Empty,
    /// More than 253 bytes, or a label of more than 63.
    #[error("longer than DNS takes: 63 bytes a label, 253 in all")]
    TooLong,
    /// Something else than letters, digits, `-` and `_`.
    #[error("a name holds letters, digits, `-`, `_` and dots only")]
    Character,
    /// A label that begins or ends with a hyphen.
    #[error("a label cannot begin or end with `-`")]
    Hyphen,
    /// The last label is a number, so that `inet_aton` or a browser would read an address.
    #[error("the last label is a number, which some programs read as an address")]
    Address,
}

impl Name {
    /// Reads a name in ASCII, in any letter case, with or without its final dot.
    ///
    /// # Errors
    /// The text is not a plain host name.
    pub fn new(text: &str) -> Result<Self, NameFault> {
        let text = text.strip_suffix('.').unwrap_or(text);
        if text.len() > MAX_LEN {
            return Err(NameFault::TooLong);
        }
        text.split('.').try_for_each(check_label)?;
        if text.rsplit('.').next().is_some_and(is_number) {
            return Err(NameFault::Address);
        }
        Ok(Name(text.to_ascii_lowercase()))
    }

    /// The canonical text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Its labels, from the left.
    pub fn labels(&self) -> impl DoubleEndedIterator<Item = &str> {
        self.0.split('.')
    }

    /// The name without its first label; none of a single label.
    pub fn parent(&self) -> Option<&str> {
        self.0.split_once('.').map(|(_, parent)| parent)
    }

    /// Whether it is `suffix` or something below it, label by label.
    pub fn is_within(&self, suffix: &str) -> bool {
        self.0.strip_suffix(suffix).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

fn check_label(label: &str) -> Result<(), NameFault> {
    if label.is_empty() {
        return Err(NameFault::Empty);
    }
    if !label.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_')) {
        return Err(NameFault::Character);
    }
    if label.len() > 63 {
        return Err(NameFault::TooLong);
    }
    if label.starts_with('-') || label.ends_with('-') {
        return Err(NameFault::Hyphen);
    }
    Ok(())
}

/// Whether a last label makes an address of the whole (URL Standard, "ends in a number").
fn is_number(label: &str) -> bool {
    let hex = label.strip_prefix("0x").or_else(|| label.strip_prefix("0X"));
    match hex {
        Some(digits) => digits.bytes().all(|byte| byte.is_ascii_hexdigit()),
        None => label.bytes().all(|byte| byte.is_ascii_digit()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use super::*;

    #[test]
    fn case_and_one_final_dot_make_no_difference() {
        for text in ["pypi.org", "PyPI.Org", "pypi.org.", "PYPI.ORG."] {
            assert_eq!(Name::new(text).unwrap().as_str(), "pypi.org");
        }
        assert_eq!(Name::new("pypi.org.."), Err(NameFault::Empty));
        assert_eq!(Name::new("_dmarc.a-b.x1").unwrap().as_str(), "_dmarc.a-b.x1");
        assert_eq!(Name::new("api").unwrap().parent(), None);
    }

    #[test]
    fn what_is_no_plain_name_is_refused() {
        let long = "a".repeat(64);
        let many = ["a"; 128].join(".");
        for (text, fault) in [
            ("", NameFault::Empty),
            (".", NameFault::Empty),
            (".a", NameFault::Empty),
            ("a..b", NameFault::Empty),
            ("a b", NameFault::Character),
            ("a\0.b", NameFault::Character),
            ("a%00.b", NameFault::Character),
            ("a\n", NameFault::Character),
            ("a/b", NameFault::Character),
            ("a:1", NameFault::Character),
            ("a@b", NameFault::Character),
            ("*.a", NameFault::Character),
            ("bücher.example", NameFault::Character),
            ("-a.b", NameFault::Hyphen),
            ("a-.b", NameFault::Hyphen),
            (&long, NameFault::TooLong),
            (&many, NameFault::TooLong),
        ] {
            assert_eq!(Name::new(text), Err(fault), "{text:?}");
        }
        assert!(Name::new(&"a".repeat(63)).is_ok());
        assert!(Name::new(&["a"; 127].join(".")).is_ok());
    }

    #[test]
    fn an_address_in_disguise_is_no_name() {
        for text in ["127.0.0.1", "2130706433", "0x7f000001", "0x7f.1", "0177.0.0.1", "127.1", "a.256", "a.0x", "1.2.3.4.", "0X7F.0X1"] {
            assert_eq!(Name::new(text), Err(NameFault::Address), "{text}");
        }
        for text in ["127.0.0.1.example", "0x7f.a", "3com", "0xyz", "1e100.net"] {
            assert!(Name::new(text).is_ok(), "{text}");
        }
    }

    #[test]
    fn a_suffix_ends_at_a_label() {
        let name = Name::new("files.pythonhosted.org").unwrap();
        assert!(name.is_within("pythonhosted.org") && name.is_within("files.pythonhosted.org") && name.is_within("org"));
        assert!(!name.is_within("hosted.org") && !name.is_within("rg"));
    }
}
