//! Whether one glob matches everything that another matches.
//!
//! Sound and not complete: a yes is certain, a no means that it could not be shown. Only
//! literals, `*`, `?` and `**` are reasoned about; classes, alternatives and escapes are
//! compared letter by letter.

/// Whether whatever `narrow` matches, or something above it, is matched by `wide`. What is
/// below a covered directory is covered with it.
pub(crate) fn covers(wide: &str, narrow: &str) -> bool {
    if wide == narrow {
        return true;
    }
    if !is_plain(wide) || !is_plain(narrow) {
        return false;
    }
    let wide: Vec<&str> = wide.split('/').collect();
    let narrow: Vec<&str> = narrow.split('/').collect();
    (1..=narrow.len()).any(|depth| narrow.get(..depth).is_some_and(|above| parts(&wide, above)))
}

/// Whether it is certain that `narrow` matches something that none of `wide` covers: a
/// name that stands for nothing in particular is tried.
pub(super) fn escapes<'g>(narrow: &str, mut wide: impl Iterator<Item = &'g String>) -> bool {
    let witness: Vec<String> = narrow.split('/').map(|part| part.replace('*', "stockade").replace('?', "s")).collect();
    is_plain(narrow) && wide.all(|wide| is_plain(wide) && !covers(wide, &witness.join("/")))
}

fn is_plain(glob: &str) -> bool {
    !glob.contains(['[', ']', '{', '}', '\\', '!'])
}

/// Part by part; `**` stands for any number of parts, none included.
fn parts(wide: &[&str], narrow: &[&str]) -> bool {
    match (wide.split_first(), narrow.split_first()) {
        (None, None) => true,
        (Some((&"**", rest)), Some((_, below))) => parts(rest, narrow) || parts(wide, below),
        (Some((&"**", rest)), None) => parts(rest, narrow),
        (Some((first, rest)), Some((part, below))) => *part != "**" && letters(first.as_bytes(), part.as_bytes()) && parts(rest, below),
        _ => false,
    }
}

/// Letter by letter, reading the narrow one's own wildcards as letters that only the same
/// or a wider wildcard stands for.
fn letters(wide: &[u8], narrow: &[u8]) -> bool {
    match (wide.split_first(), narrow.split_first()) {
        (None, None) => true,
        (Some((b'*', rest)), Some((_, more))) => letters(rest, narrow) || letters(wide, more),
        (Some((b'*', rest)), None) => letters(rest, narrow),
        (Some((b'?', rest)), Some((letter, more))) => *letter != b'*' && letters(rest, more),
        (Some((is, rest)), Some((letter, more))) => is == letter && !matches!(letter, b'*' | b'?') && letters(rest, more),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::{covers, escapes};

    #[test]
    fn a_wider_glob_covers_a_narrower_one() {
        for (wide, narrow) in [
            (".env*", ".env"),
            (".env*", ".env*"),
            ("**/.env*", ".env.local"),
            ("**/.env*", "a/b/.env"),
            ("**/.env*", "**/.env"),
            ("config", "config/*.key"),
            ("config/*", "config/a/b"),
            ("*.k?y", "a.key"),
            ("**", "a/b"),
            ("a/**/b", "a/b"),
            ("a/**/b", "a/x/y/b"),
            ("[ab]*", "[ab]*"),
        ] {
            assert!(covers(wide, narrow), "{wide} {narrow}");
        }
    }

    #[test]
    fn an_escape_is_claimed_only_with_a_witness() {
        let escapes = |narrow: &str, wide: &[&str]| escapes(narrow, wide.iter().map(|glob| (*glob).to_owned()).collect::<Vec<_>>().iter());
        assert!(escapes(".git", &[]) && escapes(".git", &[".env*", "*.key"]) && escapes("*", &["*.key"]) && escapes("**", &["a/*"]));
        // Two that together cover it, and one that cannot be read here.
        assert!(!escapes(".env*", &["**/.env*"]) && !escapes(".git", &["[.]git"]) && !escapes("{a,b}", &[]));
    }

    #[test]
    fn what_cannot_be_shown_is_not_claimed() {
        for (wide, narrow) in [
            (".env", ".env*"),
            (".env*", "**/.env*"),
            (".env*", "a/.env"),
            ("?", "*"),
            ("a*", "*a"),
            ("a?", "a*"),
            ("config/*.key", "config"),
            ("config/*.key", "config/*"),
            ("*", "**/a"),
            ("[ab]", "a"),
            ("{a,b}", "a"),
            ("a*", "a[bc]"),
            ("a/**/b", "a"),
            ("?", "??"),
        ] {
            assert!(!covers(wide, narrow), "{wide} {narrow}");
        }
    }
}
