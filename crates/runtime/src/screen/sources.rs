//! What of a request or a command is code that can be read before it runs.
//!
//! Of a request: its code, and the files that it brings. Of a command: its words, as a shell
//! would be given them, and the script that an interpreter among them is to run, where that
//! lies in scratch. What comes on stdin, what is there already and is only imported, and
//! what the code writes itself is not read.

use std::{
    borrow::Cow,
    fs::OpenOptions,
    io::{self, Read},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use rustix::fs::OFlags;
use stockade_policy::{
    model::{Policy, Runtime},
    plan::PRIVATE_SCRATCH,
};
use stockade_protocol::{
    Request,
    screen::{Grammar, LONGEST_CODE, MOST_SOURCES, Rule},
};

use super::{Sources, grammar, grammar_of_file};
use crate::{admit, with_callers_rights};

/// The runtime of this name or alias.
pub(crate) fn runtime<'p>(policy: &'p Policy, name: &str) -> Option<(&'p str, &'p Runtime)> {
    let name = name.to_lowercase();
    let named = |(own, runtime): &(&String, &Runtime)| **own == name || runtime.aliases.contains(&name);
    policy.runtimes.iter().find(named).map(|(own, runtime)| (own.as_str(), runtime))
}

/// Where code may write, as far as a request and an option say so.
fn scratch<'a>(request: Option<&'a str>, option: Option<&'a Path>) -> &'a str {
    request.or_else(|| option.and_then(Path::to_str)).unwrap_or(PRIVATE_SCRATCH)
}

/// Of a request; `option` is the scratch that its caller's door has named. None where no
/// runtime is meant, which admission refuses.
pub(super) fn of_request<'a>(request: &'a Request, policy: &Policy, option: Option<&'a Path>) -> Option<Sources<'a>> {
    let (name, runtime) = runtime(policy, request.language.as_deref().unwrap_or(&policy.language))?;
    let mut sources = Sources::new(scratch(request.scratch.as_deref(), option).into());
    match grammar(runtime) {
        Some(grammar) => sources.add(None, grammar, request.code.as_str().into()),
        None => sources.know(None, Rule::Language, name.to_owned()),
    }
    for (path, content) in &request.files {
        // What is no base64 is refused for it.
        let Ok(bytes) = admit::decode(content, path) else { continue };
        let text = String::from_utf8_lossy(bytes.as_ref()).into_owned();
        if let Some(grammar) = grammar_of_file(Path::new(path), &text) {
            sources.add(Some(path.clone()), grammar, text.into());
        }
    }
    Some(sources)
}

/// Of a command whose working directory is the scratch that `option` names.
pub(super) fn of_command(words: &[String], policy: &Policy, option: Option<&Path>) -> Sources<'static> {
    let mut sources = Sources::new(scratch(None, option).to_owned().into());
    let quoted: Vec<String> = words.iter().map(|word| quoted(word)).collect();
    sources.add(None, Grammar::Shell, quoted.join(" ").into());
    let Some((program, arguments)) = words.split_first() else { return sources };
    let name = Path::new(program).file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let unnumbered = name.trim_end_matches(|c: char| c.is_ascii_digit() || c == '.');
    let Some((name, runtime)) = runtime(policy, name).or_else(|| runtime(policy, unnumbered)) else { return sources };
    let Some(grammar) = grammar(runtime) else {
        sources.know(None, Rule::Language, name.to_owned());
        return sources;
    };
    // Without a directory of the host there is no script but the sandbox's own.
    if let (Some(path), Some(scratch)) = (script(grammar, arguments), option) {
        match with_callers_rights(|| read(&scratch.join(&path), scratch)) {
            Ok(Ok(Some(text))) => sources.add(Some(path), grammar, text.into()),
            Ok(Ok(None)) => {}
            Ok(Err(error)) => sources.know(Some(path), Rule::Screener, format!("cannot be read: {error}")),
            Err(refusal) => sources.know(Some(path), Rule::Screener, refusal.message),
        }
    }
    sources
}

/// A word as a shell reads it back.
fn quoted(word: &str) -> String {
    let plain = !word.is_empty() && word.chars().all(|c| c.is_ascii_alphanumeric() || "_-./:=,+@%".contains(c));
    if plain { word.to_owned() } else { format!("'{}'", word.replace('\'', r"'\''")) }
}

/// The script that an interpreter is to run by these arguments: not where they hold the code
/// themselves, name a module, or leave it to stdin.
fn script(grammar: Grammar, arguments: &[String]) -> Option<String> {
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        let options = match argument.strip_prefix('-') {
            Some("-") => return rest.next().cloned(),
            Some("") => return None,
            Some(options) => options,
            None if grammar == Grammar::Shell && argument.starts_with('+') => &argument[1..],
            None => return Some(argument.clone()),
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

/// A script in scratch; none where it is not there, or leads elsewhere.
fn read(path: &Path, scratch: &Path) -> io::Result<Option<String>> {
    let real: PathBuf = match path.canonicalize() {
        Ok(real) => real,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    if !real.starts_with(scratch.canonicalize()?) {
        return Ok(None);
    }
    // A fifo must not keep us.
    let file = OpenOptions::new().read(true).custom_flags(OFlags::NONBLOCK.bits().cast_signed()).open(&real)?;
    if !file.metadata()?.is_file() {
        return Ok(None);
    }
    let mut bytes = Vec::new();
    file.take(LONGEST_CODE as u64 + 1).read_to_end(&mut bytes)?;
    Ok(Some(String::from_utf8_lossy(&bytes).into_owned()))
}

impl<'a> Sources<'a> {
    pub(super) fn new(scratch: Cow<'a, str>) -> Self {
        Sources { scratch, texts: Vec::new(), known: Vec::new() }
    }

    /// What is known of a source without reading it.
    fn know(&mut self, file: Option<String>, rule: Rule, what: String) {
        self.known.push((file, rule, what));
    }

    /// A text to read, unless it is too much.
    pub(super) fn add(&mut self, file: Option<String>, grammar: Grammar, code: Cow<'a, str>) {
        let whole = code.len() + self.texts.iter().map(|(_, _, code)| code.len()).sum::<usize>();
        if whole > LONGEST_CODE {
            self.know(file, Rule::Screener, format!("{whole} bytes with what is before it, which is more than {LONGEST_CODE}"));
        } else if self.texts.len() >= MOST_SOURCES {
            self.know(file, Rule::Screener, format!("more than {MOST_SOURCES} texts"));
        } else {
            self.texts.push((file, grammar, code));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn a_scratch_that_an_option_names_is_where_code_may_write() {
        let option = Some(Path::new("/srv/work"));
        assert_eq!(scratch(Some("/srv/work/a"), option), "/srv/work/a");
        assert_eq!((scratch(None, option), scratch(None, None)), ("/srv/work", PRIVATE_SCRATCH));
    }

    #[test]
    fn words_come_back_from_a_shell_as_they_went() {
        for (word, there) in [("rm", "rm"), ("", "''"), ("a b", "'a b'"), ("it's", r"'it'\''s'"), ("$x", "'$x'"), ("/a-b_c.d", "/a-b_c.d")]
        {
            assert_eq!(quoted(word), there);
        }
    }
}
