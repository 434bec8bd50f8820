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
    // What it stands for above the narrow one covers all that lies below.
    parts(&wide, &narrow).into_iter().skip(1).any(|whole| whole)
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

/// Part by part; `**` stands for any number of parts, none included. For each number of
/// the narrow one's first parts, whether the wide one stands for them.
fn parts(wide: &[&str], narrow: &[&str]) -> Vec<bool> {
    reached(wide, narrow, |part| *part == "**", |one, other| *other != "**" && letters(one.as_bytes(), other.as_bytes()))
}

/// Letter by letter, reading the narrow one's own wildcards as letters that only the same
/// or a wider wildcard stands for.
fn letters(wide: &[u8], narrow: &[u8]) -> bool {
    let one = |is: &u8, letter: &u8| match is {
        b'?' => *letter != b'*',
        is => is == letter && !matches!(letter, b'*' | b'?'),
    };
    reached(wide, narrow, |is| *is == b'*', one).last() == Some(&true)
}

/// For each number of the narrow one's first items, whether all of the wide one stands for
/// them. In time of the product of their lengths: both may be an enemy's.
fn reached<T>(wide: &[T], narrow: &[T], is_star: impl Fn(&T) -> bool, stands_for: impl Fn(&T, &T) -> bool) -> Vec<bool> {
    let mut reached: Vec<bool> = std::iter::once(true).chain(narrow.iter().map(|_| false)).collect();
    for item in wide {
        reached = if is_star(item) {
            reached
                .iter()
                .scan(false, |any, here| {
                    *any |= here;
                    Some(*any)
                })
                .collect()
        } else {
            let one_on = narrow.iter().zip(&reached).map(|(other, here)| *here && stands_for(item, other));
            std::iter::once(false).chain(one_on).collect()
        };
    }
    reached
}

#[cfg(test)]
mod tests {
    use super::{covers, escapes};

    /// A match by trial of every way would not end.
    #[test]
    fn globs_of_many_stars_are_compared_in_no_time() {
        assert!(!covers(&format!("{}*b", "*a".repeat(30)), &"a".repeat(120)));
        assert!(!covers(&format!("{}b", "**/a/".repeat(20)), &"a/".repeat(60)));
        assert!(covers(&format!("{}*", "*a".repeat(30)), &"a".repeat(120)));
    }

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
