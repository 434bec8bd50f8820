//! Names for the globs of `[scratch]`: a file of a scratch that each would keep from the code.
//!
//! Not every glob has a name that can be read off it; one that has none is not attacked, and
//! the proof says so.

use std::{os::unix::ffi::OsStrExt, path::Path};

use stockade_policy::model::Policy;

/// A file that a glob keeps from the code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GuardedFile {
    /// The glob.
    pub(crate) glob: String,
    /// Its path below the scratch.
    pub(crate) name: String,
}

/// A file for each glob of `[scratch] read_only` that no glob of `hidden` matches too.
pub(crate) fn read_only_files(policy: &Policy) -> Vec<GuardedFile> {
    let hidden = |name: &str| policy.scratch.hidden.iter().any(|glob| Path::new(name).ancestors().any(|above| matches(glob, above)));
    named(&policy.scratch.read_only).into_iter().filter(|file| !hidden(&file.name)).collect()
}

/// A file for each glob of `[scratch] hidden`.
pub(crate) fn hidden_files(policy: &Policy) -> Vec<GuardedFile> {
    named(&policy.scratch.hidden)
}

fn named(globs: &[String]) -> Vec<GuardedFile> {
    let files = globs.iter().filter_map(|glob| Some(GuardedFile { glob: glob.clone(), name: example(glob)? }));
    files.collect()
}

fn matches(glob: &str, path: &Path) -> bool {
    fast_glob::glob_match(glob, path.as_os_str().as_bytes())
}

/// A path that a glob matches, where one is simple to find.
fn example(glob: &str) -> Option<String> {
    const ANY: &str = "guarded";
    let mut name = String::new();
    let mut rest = glob.replace("**/", "").replace("**", ANY);
    while let Some(letter) = rest.chars().next() {
        let mut length = letter.len_utf8();
        match letter {
            '*' => name.push_str(ANY),
            '?' => name.push('x'),
            '[' => {
                name.extend(rest.chars().nth(1));
                length = rest.find(']')? + 1;
            }
            '{' => {
                let group = rest.get(1..rest.find('}')?)?;
                name.push_str(group.split(',').next()?);
                length = group.len() + 2;
            }
            letter => name.push(letter),
        }
        rest.drain(..length);
    }
    // A wrong guess would make a file that nothing guards.
    matches(glob, Path::new(&name)).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_found_for_common_globs_and_never_one_that_does_not_match() {
        for (glob, name) in [
            ("*.csv", "guarded.csv"),
            (".env*", ".envguarded"),
            (".git", ".git"),
            ("**/*.pem", "guarded.pem"),
            ("data/**", "data/guarded"),
            ("a/[bc]/{x,y}?", "a/b/xx"),
        ] {
            assert_eq!(example(glob).as_deref(), Some(name));
        }
        for glob in ["[!!]", "{a,{b,c}}"] {
            assert_eq!(example(glob), None, "{glob}");
        }
    }
}
