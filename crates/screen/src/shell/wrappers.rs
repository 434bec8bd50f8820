//! Commands that run another command, which their arguments name.
//!
//! A table says which of the words belong to the wrapper; the rest is the command. `find` and the
//! `-c` of a shell are handled elsewhere.

use super::words::Word;

/// A command that runs another one.
struct Wrapper {
    name: &'static str,
    /// Short options that take a value, and long ones.
    values: &'static str,
    long_values: &'static [&'static str],
    /// The number of its own words before the command.
    own: usize,
}

const fn plain(name: &'static str, values: &'static str) -> Wrapper {
    Wrapper { name, values, long_values: &[], own: 0 }
}

const fn behind(name: &'static str, values: &'static str, own: usize) -> Wrapper {
    Wrapper { own, ..plain(name, values) }
}

const WRAPPERS: [Wrapper; 37] = [
    Wrapper { long_values: &["user", "group"], ..plain("sudo", "ughpCT") },
    plain("doas", "uC"),
    Wrapper { long_values: &["unset", "chdir"], ..plain("env", "uC") },
    Wrapper { long_values: &["adjustment"], ..plain("nice", "n") },
    plain("ionice", "cn"),
    Wrapper { long_values: &["signal", "kill-after"], ..behind("timeout", "sk", 1) },
    plain("nohup", ""),
    plain("exec", "a"),
    plain("command", ""),
    plain("builtin", ""),
    plain("time", "of"),
    plain("stdbuf", "ioe"),
    plain("setsid", ""),
    plain("busybox", ""),
    Wrapper { long_values: &["max-args", "max-procs", "delimiter", "arg-file"], ..plain("xargs", "InPdLsaE") },
    plain("watch", "n"),
    plain("parallel", "jNn"),
    plain("chronic", ""),
    plain("unbuffer", ""),
    plain("coproc", ""),
    plain("strace", "oeEpsSuaIXOPb"),
    plain("ltrace", "oeEpsSualnxF"),
    behind("taskset", "", 1),
    behind("chrt", "TPD", 1),
    Wrapper { long_values: &["timeout"], ..behind("flock", "wE", 1) },
    plain("runuser", "sgGuwT"),
    behind("chroot", "", 1),
    plain("unshare", "SGRw"),
    plain("nsenter", "tSG"),
    Wrapper { long_values: &["reuid", "regid", "groups", "inh-caps", "bounding-set"], ..plain("setpriv", "") },
    plain("prlimit", "p"),
    plain("fakeroot", "lsi"),
    plain("firejail", ""),
    plain("systemd-run", "pPut"),
    plain("systemd-inhibit", ""),
    // Keywords that the grammar takes for words where several come before a command.
    plain("!", ""),
    plain("{", ""),
];

/// What a command runs.
pub(super) struct Started<'w> {
    /// The words of the innermost command.
    pub words: &'w [Word],
    /// The script of `env -S`.
    pub script: Option<&'w str>,
    /// The names of the wrappers.
    pub by: Vec<&'static str>,
}

/// Whether this is the name of a wrapper.
pub(super) fn is_wrapper(name: &str) -> bool {
    WRAPPERS.iter().any(|wrapper| wrapper.name == name)
}

/// The name of a command without its directory.
pub(super) fn base(word: &str) -> &str {
    word.rsplit('/').next().unwrap_or(word)
}

/// The words of the innermost command.
pub(super) fn unwrapped(words: &[Word]) -> &[Word] {
    started(words).words
}

/// The innermost command, and what starts it.
pub(super) fn started(words: &[Word]) -> Started<'_> {
    let mut started = Started { words, script: None, by: Vec::new() };
    while let Some(wrapper) = started.words.first().and_then(|word| WRAPPERS.iter().find(|wrapper| wrapper.name == base(&word.text))) {
        if wrapper.name == "env" {
            started.script = started.script.or(split_string(started.words));
        }
        let Some(rest) = started.words.get(wrapper.length(started.words)..).filter(|rest| !rest.is_empty()) else { break };
        started.by.push(wrapper.name);
        started.words = rest;
    }
    started
}

/// The value of `-S` or `--split-string`, an option of `env`.
fn split_string(words: &[Word]) -> Option<&str> {
    let mut options = words.iter().skip(1).map(|word| word.text.as_str());
    while let Some(option) = options.next().filter(|word| word.starts_with('-') || word.contains('=')) {
        let value = match option.strip_prefix("--") {
            Some(long) => long.strip_prefix("split-string").map(|value| value.strip_prefix('=').unwrap_or(value)),
            None => option.strip_prefix('-').and_then(|letters| letters.split_once('S')).map(|(_, value)| value),
        };
        match value {
            Some("") => return options.next(),
            Some(value) => return Some(value),
            None => {}
        }
    }
    None
}

impl Wrapper {
    /// The number of words before the command it runs; all where it runs none.
    fn length(&self, words: &[Word]) -> usize {
        let (mut at, mut own) = (1, self.own);
        while let Some(word) = words.get(at).map(|word| word.text.as_str()) {
            match word.strip_prefix('-').filter(|options| !options.is_empty()) {
                // `command -v` only prints.
                Some(options) if self.name == "command" && options.contains(['v', 'V']) => return words.len(),
                Some("-") if own == 0 => return at + 1,
                Some(options) => at += usize::from(self.takes_next(options)),
                None if word.contains('=') => {}
                None if own == 0 => break,
                None => own -= 1,
            }
            at += 1;
        }
        at
    }

    /// Whether the next word is the value of this option, or of the last of several in one word.
    fn takes_next(&self, options: &str) -> bool {
        match options.strip_prefix('-') {
            Some(long) => self.long_values.contains(&long),
            None => options.find(|letter| self.values.contains(letter)).is_some_and(|at| at + 1 == options.len()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(line: &str) -> (String, Option<String>) {
        let words: Vec<Word> = line.split(' ').map(|word| Word::plain(word.replace('_', " "))).collect();
        let started = started(&words);
        (started.words.iter().map(|word| word.text.as_str()).collect::<Vec<_>>().join(" "), started.script.map(str::to_owned))
    }

    #[test]
    fn a_wrapper_is_told_from_what_it_runs() {
        for (line, words) in [
            ("nice -n 5 time -p timeout -k 1 5 a b", "a b"),
            ("sudo -u me A=1 env -i B=2 /usr/bin/nohup a", "a"),
            ("timeout --signal=KILL -- 5 a", "a"),
            ("xargs -0 -I{} a {}", "a {}"),
            ("command -v a", "command -v a"),
            ("env A=1", "env A=1"),
            ("a nice b", "a nice b"),
        ] {
            assert_eq!(run(line), (words.to_owned(), None), "{line}");
        }
        for line in ["env -S a_b", "env -iSa_b", "env --split-string=a_b"] {
            assert_eq!(run(line).1, Some("a b".to_owned()), "{line}");
        }
    }
}
