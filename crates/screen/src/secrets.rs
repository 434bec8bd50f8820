//! Strings that look like secrets or hide a program.
//!
//! Known prefixes of keys and tokens, and values under a name such as `password`. It does not test
//! whether a secret is valid.

use std::ops::Range;

/// Prefixes of tokens, the minimum of characters after them, and their kind.
const TOKENS: [(&str, usize, &str); 16] = [
    ("AKIA", 16, "AWS access key"),
    ("ASIA", 16, "AWS access key"),
    ("ghp_", 30, "GitHub token"),
    ("gho_", 30, "GitHub token"),
    ("ghs_", 30, "GitHub token"),
    ("github_pat_", 30, "GitHub token"),
    ("glpat-", 20, "GitLab token"),
    ("xoxb-", 20, "Slack token"),
    ("xoxp-", 20, "Slack token"),
    ("sk-", 32, "API key"),
    ("sk_live_", 20, "Stripe key"),
    ("AIza", 35, "Google API key"),
    ("npm_", 36, "npm token"),
    ("pypi-", 40, "PyPI token"),
    ("hf_", 30, "Hugging Face token"),
    ("SG.", 40, "SendGrid key"),
];

/// Parts of names of secrets.
const NAMES: [&str; 8] = ["password", "passwd", "secret", "token", "apikey", "api_key", "access_key", "private_key"];

/// The kind of secret in a text.
pub(crate) fn in_text(text: &str) -> Option<&'static str> {
    places(text).first().map(|(_, kind)| *kind)
}

/// The text with each secret replaced by its length.
pub(crate) fn without(text: &str) -> String {
    let mut places = places(text);
    places.sort_by_key(|(place, _)| place.start);
    let (mut out, mut at) = (String::new(), 0);
    for (place, _) in places {
        if place.start >= at {
            out.push_str(&text[at..place.start]);
            out.push_str(&stand_in(&text[place.clone()]));
            at = place.end;
        }
    }
    out.push_str(&text[at..]);
    out
}

/// The replacement of a secret.
pub(crate) fn stand_in(secret: &str) -> String {
    format!("<{} characters>", secret.chars().count())
}

/// The places of secrets in a text, without their prefixes.
fn places(text: &str) -> Vec<(Range<usize>, &'static str)> {
    let mut out = Vec::new();
    if let Some(at) = text.find("-----BEGIN ").filter(|at| text[*at..].contains("PRIVATE KEY-----")) {
        out.push((at..text.len(), "private key"));
    }
    for (prefix, least, kind) in TOKENS {
        for (at, _) in text.match_indices(prefix) {
            let begins = text[..at].chars().next_back().is_none_or(|c| !c.is_ascii_alphanumeric());
            let start = at + prefix.len();
            let follow = text[start..].chars().take_while(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-')).count();
            if begins && follow >= least {
                out.push((start..start + follow, kind));
            }
        }
    }
    for (at, _) in text.match_indices("eyJ") {
        let word = &text[at..at + text[at..].find([' ', '"', '\'']).unwrap_or(text.len() - at)];
        let begins = text[..at].chars().next_back().is_none_or(|c| matches!(c, ' ' | '"' | '\''));
        if begins && word.split('.').filter(|part| part.len() >= 10).count() == 3 {
            out.push((at..at + word.len(), "signed token"));
        }
    }
    out.extend(passwords_in_urls(text).map(|place| (place, "password in an address")));
    out
}

/// `scheme://user:password@host`.
fn passwords_in_urls(text: &str) -> impl Iterator<Item = Range<usize>> {
    text.match_indices("://").filter_map(|(at, _)| {
        let rest = &text[at + 3..];
        let host = &rest[..rest.find(['/', ' ', '"', '\'', '?']).unwrap_or(rest.len())];
        let (user, _) = host.rsplit_once('@')?;
        let (name, password) = user.split_once(':')?;
        let start = at + 3 + name.len() + 1;
        is_password(password).then_some(start..start + password.len())
    })
}

/// Whether a text in the place of a password is one.
pub(crate) fn is_password(text: &str) -> bool {
    is_likely(text, 6)
}

/// Whether a text with this name is a secret.
pub(crate) fn under_name(name: &str, text: &str) -> bool {
    let name = name.to_ascii_lowercase();
    NAMES.iter().any(|known| name.ends_with(known)) && is_likely(text, 8)
}

/// Long enough, without blanks, of several kinds of characters, and no placeholder.
fn is_likely(text: &str, least: usize) -> bool {
    let kinds: [fn(char) -> bool; 3] = [|c| c.is_ascii_alphabetic(), |c| c.is_ascii_digit(), |c| c.is_ascii_punctuation()];
    let several = kinds.iter().filter(|kind| text.chars().any(kind)).count() >= 2;
    let stand_in = text.starts_with(['<', '$', '{', '%', '*']) || text.contains("://") || text.starts_with('/');
    text.len() >= least && text.len() <= 512 && several && !stand_in && !text.chars().any(char::is_whitespace)
}

/// Whether a text is long and dense enough to be encoded data.
pub(crate) fn is_blob(text: &str) -> bool {
    const LONG: usize = 200;
    const LONG_BINARY: usize = 100;
    let length = text.chars().count();
    if length < LONG_BINARY {
        return false;
    }
    let odd = text.chars().filter(|c| (c.is_control() && !c.is_whitespace()) || ('\u{80}'..='\u{ff}').contains(c)).count();
    if odd * 3 > length {
        return true;
    }
    let dense = text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '+' | '/' | '=' | '-' | '_' | '\n'));
    let mut seen = [false; 128];
    text.bytes().filter(|byte| *byte < 128).for_each(|byte| seen[usize::from(byte)] = true);
    length >= LONG
        && dense
        && seen.iter().filter(|seen| **seen).count() >= 16
        && text.lines().all(|line| line.len() >= 40 || line.len() * 4 > length)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_known_and_words_are_not() {
        for text in [
            "AKIAIOSFODNN7EXAMPLE",
            "token ghp_0123456789abcdefghijABCDEFGHIJ012345",
            "mysql://root:pa55w0rd!@db/x",
            "-----BEGIN RSA PRIVATE KEY-----",
        ] {
            assert!(in_text(text).is_some(), "{text}");
        }
        for text in ["https://example.com/a:b@c", "sk-learn", "ask-me-anything-about-this-thing-please-now", "AKIA", "http://user@host/x"] {
            assert_eq!(in_text(text), None, "{text}");
        }
        assert!(under_name("db_password", "hunter2!x"));
        assert!(!under_name("password", "correct horse") && !under_name("password", "changeme") && !under_name("passwords", "hunter2!x"));
    }

    #[test]
    fn secrets_are_taken_out() {
        for (text, left) in [
            ("a ghp_0123456789abcdefghijABCDEFGHIJ012345 b", "a ghp_<36 characters> b"),
            ("mysql://root:pa55w0rd!@db/x", "mysql://root:<9 characters>@db/x"),
            ("x -----BEGIN RSA PRIVATE KEY-----\nabc", "x <35 characters>"),
            ("nothing to hide", "nothing to hide"),
        ] {
            assert_eq!(without(text), left);
        }
    }

    #[test]
    fn blobs_are_long_and_dense() {
        let base64 = "TVqQAAMAAAAEAAAA8LgAAAAAAAAAQAAAAAAAAAAdZbCxyv".repeat(6);
        assert!(is_blob(&base64) && is_blob(&"\u{fc}\u{48}\u{83}\u{e4}".repeat(40)));
        assert!(!is_blob(&"a".repeat(400)) && !is_blob(&"some words of a text ".repeat(30)) && !is_blob(&base64[..150]));
    }
}
