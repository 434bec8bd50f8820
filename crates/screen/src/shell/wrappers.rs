//! Commands that run another command, which their arguments name.
//!
//! A table says which of the words belong to the wrapper. The rest is a command, or a script in one
//! word. `find` and the `-c` of a shell are handled elsewhere.

use super::words::Word;
use crate::budget::MAX_TEXT_LEN;

/// A command that runs another one.
struct Wrapper {
    name: &'static str,
    /// Short options that take a value, and long ones.
    values: &'static str,
    long_values: &'static [&'static str],
    /// Its own words before the command.
    operands: Operands,
    /// The option whose value is a script, short and long.
    script: Option<(char, &'static str)>,
}

/// The words before the command.
#[derive(Clone, Copy, PartialEq)]
enum Operands {
    /// This many words.
    Own(usize),
    /// Assignments of variables.
    Assignments,
    /// There is no command, only a script.
    Only,
    /// The words after the options are a script, joined by blanks.
    Joined,
}

const fn plain(name: &'static str, values: &'static str) -> Wrapper {
    Wrapper { name, values, long_values: &[], operands: Operands::Own(0), script: None }
}

const fn behind(name: &'static str, values: &'static str, own: usize) -> Wrapper {
    Wrapper { operands: Operands::Own(own), ..plain(name, values) }
}

const WRAPPERS: [Wrapper; 39] = [
    Wrapper { long_values: &["user", "group"], operands: Operands::Assignments, ..plain("sudo", "ughpCT") },
    plain("doas", "uC"),
    Wrapper {
        long_values: &["unset", "chdir"],
        operands: Operands::Assignments,
        script: Some(('S', "split-string")),
        ..plain("env", "uC")
    },
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
    Wrapper { operands: Operands::Joined, ..plain("watch", "n") },
    Wrapper { operands: Operands::Joined, ..plain("parallel", "jNn") },
    plain("chronic", ""),
    plain("unbuffer", ""),
    plain("coproc", ""),
    plain("strace", "oeEpsSuaIXOPb"),
    plain("ltrace", "oeEpsSualnxF"),
    behind("taskset", "", 1),
    behind("chrt", "TPD", 1),
    Wrapper { long_values: &["timeout"], script: Some(('c', "command")), ..behind("flock", "wE", 1) },
    Wrapper { operands: Operands::Only, script: Some(('c', "command")), ..plain("script", "BEIOTmo") },
    Wrapper { operands: Operands::Only, script: Some(('c', "command")), ..plain("su", "sgGwT") },
    Wrapper { script: Some(('c', "command")), ..plain("runuser", "sgGuwT") },
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
    /// Scripts of the wrappers.
    pub scripts: Vec<String>,
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

/// The innermost command, the scripts and the wrappers.
pub(super) fn started(words: &[Word]) -> Started<'_> {
    let mut started = Started { words, scripts: Vec::new(), by: Vec::new() };
    while let Some(wrapper) = started.words.first().and_then(|word| WRAPPERS.iter().find(|wrapper| wrapper.name == base(&word.text))) {
        let own = wrapper.own(started.words, &mut started.scripts);
        let Some(rest) = own.and_then(|own| started.words.get(own..)).filter(|rest| !rest.is_empty()) else { break };
        started.by.push(wrapper.name);
        started.words = rest;
    }
    started
}

impl Wrapper {
    /// The number of its own words with its name; none where it runs no command.
    fn own(&self, words: &[Word], scripts: &mut Vec<String>) -> Option<usize> {
        let text = |at: usize| words.get(at).map(|word| word.text.as_str());
        let mut operands = match self.operands {
            Operands::Own(own) => own,
            _ => 0,
        };
        // Before a brace comes the name of the coprocess.
        if self.name == "coproc" && text(2) == Some("{") {
            operands = 1;
        }
        let mut at = 1;
        while let Some(word) = text(at) {
            if let Some(options) = word.strip_prefix('-').filter(|options| !options.is_empty()) {
                // `command -v` only prints.
                if self.name == "command" && options.contains(['v', 'V']) {
                    return None;
                }
                at += 1;
                if options == "-" {
                    if operands == 0 && self.operands != Operands::Only {
                        break;
                    }
                    continue;
                }
                match self.option(options) {
                    Value::None => {}
                    Value::Next => at += 1,
                    Value::Script("") => {
                        scripts.extend(text(at).map(str::to_owned));
                        at += 1;
                    }
                    Value::Script(script) => scripts.push(script.to_owned()),
                }
            } else if self.operands == Operands::Only || (self.operands == Operands::Assignments && word.contains('=')) {
                at += 1;
            } else if operands > 0 {
                (at, operands) = (at + 1, operands - 1);
            } else {
                break;
            }
        }
        // Nested wrappers copy the inner words: bound their length.
        if self.operands == Operands::Joined && scripts.iter().map(String::len).sum::<usize>() <= MAX_TEXT_LEN {
            let rest = words.get(at..).unwrap_or_default();
            scripts.push(rest.iter().map(|word| word.text.as_str()).collect::<Vec<_>>().join(" "));
        }
        Some(at)
    }

    /// The value of an option, or of several in one word.
    fn option<'o>(&self, options: &'o str) -> Value<'o> {
        if let Some(long) = options.strip_prefix('-') {
            let (name, value) = long.split_once('=').map_or((long, None), |(name, value)| (name, Some(value)));
            return match self.script {
                Some((_, script)) if script == name => Value::Script(value.unwrap_or_default()),
                _ if value.is_none() && self.long_values.contains(&name) => Value::Next,
                _ => Value::None,
            };
        }
        for (at, letter) in options.char_indices() {
            let rest = &options[at + letter.len_utf8()..];
            if self.script.is_some_and(|(script, _)| script == letter) {
                return Value::Script(rest);
            }
            if self.values.contains(letter) {
                return if rest.is_empty() { Value::Next } else { Value::None };
            }
        }
        Value::None
    }
}

/// The value of an option.
enum Value<'o> {
    None,
    /// The next word.
    Next,
    /// A script: this, or the next word where it is empty.
    Script(&'o str),
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(line: &str) -> (String, Vec<String>) {
        let words: Vec<Word> = line.split(' ').map(|word| Word::plain(word.replace('_', " "))).collect();
        let started = started(&words);
        (started.words.iter().map(|word| word.text.as_str()).collect::<Vec<_>>().join(" "), started.scripts)
    }

    #[test]
    fn a_wrapper_is_told_from_what_it_runs() {
        for (line, words) in [
            ("nice -n 5 time -p timeout -k 1 5 a b", "a b"),
            ("sudo -u me A=1 env -i B=2 /usr/bin/nohup a", "a"),
            ("flock -n lock a -c x", "a -c x"),
            ("timeout --signal=KILL -- 5 a", "a"),
            ("coproc NAME { a", "a"),
            ("xargs -0 -I{} a {}", "a {}"),
            ("command -v a", "command -v a"),
            ("env A=1", "env A=1"),
            ("a nice b", "a nice b"),
        ] {
            assert_eq!(run(line), (words.to_owned(), vec![]), "{line}");
        }
        for (line, script) in [
            ("env -S a_b", "a b"),
            ("env -iSa_b", "a b"),
            ("env --split-string=a_b", "a b"),
            ("flock f -c a_b", "a b"),
            ("script -qc a_b log", "a b"),
            ("su me -c a_b", "a b"),
            ("watch -n 1 a b", "a b"),
        ] {
            assert_eq!(run(line).1, [script], "{line}");
        }
    }
}
