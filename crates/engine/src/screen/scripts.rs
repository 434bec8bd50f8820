//! Which scripts are run by words: of a command, and of code that names files.
//!
//! Wherever an interpreter's name stands, what follows are its arguments, whether `env`,
//! `nice` or a shell's `-c` starts it; so this needs no list of what starts others. Words
//! are told apart by white space, quotes and what parts commands, in whatever language: what
//! is put together while it runs is not known.

use stockade_protocol::screen::Grammar;

/// A script that is run.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Started {
    pub path: String,
    /// How its interpreter reads it; none: as the script itself says.
    pub grammar: Option<Grammar>,
}

/// Names of files that interpreters take for code and no rule reads.
const CODE: [&str; 23] = [
    "pyc", "pyo", "pyz", "zip", "egg", "whl", "so", "js", "mjs", "cjs", "ts", "pl", "rb", "php", "lua", "r", "jl", "jar", "class", "wasm",
    "awk", "mk", "tcl",
];

/// Words of a shell behind which a command may begin.
const BEGINNINGS: [&str; 14] = ["if", "then", "else", "elif", "do", "while", "until", "!", "exec", "time", "nohup", "env", "nice", "sudo"];

/// Whether a file is code that no rule reads, by its name.
pub(super) fn is_code(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path).to_lowercase();
    matches!(name.as_str(), "makefile" | "gnumakefile") || name.rsplit_once('.').is_some_and(|(_, ending)| CODE.contains(&ending))
}

/// The lines of a `.pth` file that are run.
pub(super) fn code_of_paths(text: &str) -> String {
    let code = |line: &str| if line.starts_with("import ") || line.starts_with("import\t") { format!("{line}\n") } else { "\n".to_owned() };
    text.lines().map(code).collect()
}

/// A path as a request names its files: below scratch.
pub(super) fn plain<'p>(path: &'p str, scratch: &str) -> &'p str {
    let below = path.strip_prefix(scratch).filter(|rest| rest.starts_with('/')).unwrap_or(path);
    below.trim_start_matches("./").trim_start_matches('/')
}

/// Of the words of a command, and of scripts in them.
pub(super) fn of_words(words: &[String], interpreter: impl Fn(&str) -> Option<Grammar>) -> Vec<Started> {
    let mut started = of_command(words, &interpreter);
    // Any of them may be a script itself: its interpreter is what its first line says.
    let paths = words.iter().enumerate().filter(|(at, word)| word.contains('/') && (*at == 0 || !word.contains(char::is_whitespace)));
    started.extend(paths.map(|(_, word)| Started { path: word.clone(), grammar: None }));
    let texts = words.iter().filter(|word| word.contains(char::is_whitespace));
    started.extend(texts.flat_map(|text| of_code(Grammar::Shell, text, &interpreter)));
    let mut seen = Vec::new();
    started.retain(|script| {
        !seen.contains(&script.path) && {
            seen.push(script.path.clone());
            true
        }
    });
    started
}

/// Of the words in code.
pub(super) fn of_code(grammar: Grammar, code: &str, interpreter: impl Fn(&str) -> Option<Grammar>) -> Vec<Started> {
    let mut started = Vec::new();
    for command in code.split(['\n', ';', '|', '&', '(', ')', '{', '}', '[', ']', '`']) {
        let words: Vec<&str> =
            command.split(|c: char| c.is_whitespace() || matches!(c, '"' | '\'' | ',')).filter(|word| !word.is_empty()).collect();
        let begin = words.iter().take_while(|word| BEGINNINGS.contains(word)).count();
        match words.get(begin..).unwrap_or_default() {
            _ if grammar != Grammar::Shell => {}
            ["." | "source", path, ..] => started.push(Started { path: (*path).to_owned(), grammar: Some(Grammar::Shell) }),
            // A shell runs a file without `#!` as a shell script.
            [path, ..] if path.contains('/') => started.push(Started { path: (*path).to_owned(), grammar: None }),
            _ => {}
        }
        started.extend(of_command(&words, &interpreter));
    }
    started
}

/// Of a command whose words may begin with others that only start it.
fn of_command<S: AsRef<str>>(words: &[S], interpreter: &impl Fn(&str) -> Option<Grammar>) -> Vec<Started> {
    let reads = |(at, word): (usize, &S)| {
        let grammar = interpreter(word.as_ref())?;
        let path = script(grammar, words.get(at + 1..)?)?;
        Some(Started { path, grammar: Some(grammar) })
    };
    words.iter().enumerate().filter_map(reads).collect()
}

/// The script that an interpreter is to run by these arguments: not where they hold the code
/// themselves, name a module, or leave it to stdin.
fn script<S: AsRef<str>>(grammar: Grammar, arguments: &[S]) -> Option<String> {
    let mut rest = arguments.iter().map(AsRef::as_ref);
    while let Some(argument) = rest.next() {
        let options = match argument.strip_prefix('-') {
            Some("-") => return rest.next().map(str::to_owned),
            Some("") => return None,
            Some(options) => options,
            None if grammar == Grammar::Shell && argument.starts_with('+') => &argument[1..],
            None => return Some(argument.to_owned()),
        };
        let takes_next = match (options.strip_prefix('-'), grammar) {
            (Some(long), _) => matches!(long, "rcfile" | "init-file" | "check-hash-based-pycs"),
            (None, Grammar::Python) => match options.find(['c', 'm', 'W', 'X']) {
                Some(at) if options[at..].starts_with(['c', 'm']) => return None,
                // The value is what follows, or the next.
                Some(at) => at + 1 == options.len(),
                None => false,
            },
            (None, Grammar::Shell) if options.contains(['c', 's']) => return None,
            (None, Grammar::Shell) => options.contains(['o', 'O']),
        };
        if takes_next {
            rest.next();
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interpreter(name: &str) -> Option<Grammar> {
        match name.rsplit('/').next() {
            Some("python3") => Some(Grammar::Python),
            Some("sh" | "bash") => Some(Grammar::Shell),
            _ => None,
        }
    }

    fn paths(started: &[Started]) -> Vec<(&str, Option<Grammar>)> {
        started.iter().map(|script| (script.path.as_str(), script.grammar)).collect()
    }

    #[test]
    fn scripts_are_found_behind_whatever_starts_them() {
        let (python, shell) = (Some(Grammar::Python), Some(Grammar::Shell));
        for (words, expected) in [
            (&["python3", "e.py", "data"][..], &[("e.py", python)][..]),
            (&["./e.py"], &[("./e.py", None)]),
            (&["env", "A=1", "python3", "-B", "e.py"], &[("e.py", python)]),
            (&["nice", "-n", "5", "./e"], &[("./e", None)]),
            (&["sh", "-c", "cd x && python3 e.py"], &[("e.py", python)]),
            (&["bash", "-c", ". ./e; echo"], &[("./e", shell)]),
            (&["bash", "-ec", "timeout 5 bash x/e"], &[("x/e", shell)]),
            (&["cat", "e.py"], &[]),
        ] {
            let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
            assert_eq!(paths(&of_words(&words, interpreter)), expected, "{words:?}");
        }
    }

    #[test]
    fn code_names_the_scripts_that_it_runs() {
        let (python, shell) = (Some(Grammar::Python), Some(Grammar::Shell));
        for (grammar, code, expected) in [
            (Grammar::Shell, "echo a\nif ./q; then bash q; fi", &[("./q", None), ("q", shell)][..]),
            (Grammar::Shell, "cat ./q", &[]),
            (Grammar::Python, "subprocess.run(['python3', 'q.txt'])", &[("q.txt", python)]),
            (Grammar::Python, "os.system(\"sh q.txt\"); open('./q')", &[("q.txt", shell)]),
        ] {
            assert_eq!(paths(&of_code(grammar, code, interpreter)), expected, "{code}");
        }
    }

    #[test]
    fn files_of_code_are_known_by_their_names() {
        assert!(["q.pyc", "a/q.SO", "z.zip", "Makefile", "x/q.js"].iter().all(|path| is_code(path)));
        assert!(!["q.txt", "zip", "data.csv", "a.so/b", "makefile.txt"].iter().any(|path| is_code(path)));
        assert_eq!(code_of_paths("/lib\nimport os; os.system('id')\nimports\n"), "\nimport os; os.system('id')\n\n");
        assert_eq!((plain("./a/b", "/scratch"), plain("/scratch/a", "/scratch"), plain("a", "")), ("a/b", "a", "a"));
    }

    fn of(grammar: Grammar, line: &str) -> Option<String> {
        script(grammar, &line.split(' ').map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn the_script_is_found_among_an_interpreters_arguments() {
        for line in ["x.py", "-B x.py a", "-W error x.py", "-Werror x.py", "-X dev -u x.py", "-- x.py", "-Bu x.py -c y"] {
            assert_eq!(of(Grammar::Python, line).as_deref(), Some("x.py"), "{line}");
        }
        for line in ["-c x.py", "-Bc x.py", "-m x.py", "- x.py", "-B", "-mtimeit x.py"] {
            assert_eq!(of(Grammar::Python, line), None, "{line}");
        }
        for line in ["x.sh", "-e x.sh", "-o pipefail x.sh", "+x x.sh", "-eo pipefail x.sh", "--rcfile y x.sh", "--norc x.sh", "-- x.sh"] {
            assert_eq!(of(Grammar::Shell, line).as_deref(), Some("x.sh"), "{line}");
        }
        for line in ["-c x.sh", "-ec x.sh", "-s x.sh", "-"] {
            assert_eq!(of(Grammar::Shell, line), None, "{line}");
        }
    }
}
