//! What of a request or a command is code that can be read before it runs.
//!
//! Of a request: its code, and of the files that it brings those that are code by their
//! names or first lines, and those that the code has run. Of a command: its words, as a shell
//! would be given them, and the scripts that they have run ([`super::scripts`]), where those
//! lie in scratch. What comes on stdin, what is there already and is only imported, and what
//! the code writes itself is not read.

use std::{
    borrow::Cow,
    fs::{self, File},
    io::{self, Read},
    os::fd::{AsRawFd, OwnedFd},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{FileType, Mode, OFlags, fstat, open},
    io::Errno,
};
use stockade_launcher::scratch::path::open_directory;
use stockade_policy::{
    model::{Policy, Runtime},
    plan::PRIVATE_SCRATCH,
};
use stockade_protocol::{
    Request, TextOrBase64,
    screen::{Grammar, MAX_CODE_LEN, MAX_SOURCES, Rule},
};

use super::{
    Sources, grammar, grammar_of_file,
    scripts::{self, Started},
};
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

/// Of a request; `option` is the scratch that the command line has named. None where no
/// runtime is meant, which admission refuses.
pub(super) fn of_request<'a>(request: &'a Request, policy: &Policy, option: Option<&'a Path>) -> Option<Sources<'a>> {
    let (name, runtime) = runtime(policy, request.language.as_deref().unwrap_or(&policy.language))?;
    let mut sources = Sources::new(scratch(request.scratch.as_deref(), option).into());
    let mut run = Vec::new();
    if let Some(grammar) = grammar(runtime) {
        let (code, is_text) = text_of(&request.code);
        if !is_text {
            // An interpreter may read another program in them than the screener.
            sources.know(None, Rule::Screener, "bytes that are no text".to_owned());
        }
        run = scripts::of_code(grammar, &code, interpreter(policy));
        sources.add(None, grammar, code);
    } else {
        sources.know(None, Rule::Language, name.to_owned());
    }
    for (path, content) in &request.files {
        // What is no base64 is refused for it.
        let Ok(bytes) = admit::decode(content, path) else { continue };
        let text = String::from_utf8_lossy(bytes.as_ref()).into_owned();
        let started = run.iter().find(|script| scripts::plain(&script.path, &sources.scratch) == path.as_str());
        let ending = Path::new(path).extension().and_then(|ending| ending.to_str()).unwrap_or_default();
        if let Some(grammar) = started.and_then(|script| script.grammar).or_else(|| grammar_of_file(Path::new(path), &text)) {
            sources.add(Some(path.clone()), grammar, text.into());
        } else if ending == "pth" {
            sources.add(Some(path.clone()), Grammar::Python, scripts::code_of_paths(&text).into());
        } else if started.is_some() {
            sources.add(Some(path.clone()), Grammar::Shell, text.into());
        } else if scripts::is_code(path) {
            sources.know(Some(path.clone()), Rule::Language, format!("a file of code, {}", path.rsplit(['/', '.']).next().unwrap_or(path)));
        }
        if ending == "so" {
            sources.know(Some(path.clone()), Rule::Native, "a library".to_owned());
        }
    }
    Some(sources)
}

/// A request's code as text, and whether it is one: UTF-8 without NUL.
fn text_of(code: &TextOrBase64) -> (Cow<'_, str>, bool) {
    if let TextOrBase64::Text(text) = code {
        return (text.into(), true);
    }
    // What is no base64 is refused for it.
    let mut bytes = admit::decode(code, "code").unwrap_or_default().into_owned();
    let is_text = std::str::from_utf8(&bytes).is_ok_and(|text| !text.contains('\0'));
    if !is_text {
        bytes.truncate(MAX_CODE_LEN);
        // As Bash does.
        bytes.retain(|byte| *byte != 0);
    }
    let text = String::from_utf8(bytes).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned());
    (text.into(), is_text)
}

/// Of a command whose working directory is the scratch that `option` names.
pub(super) fn of_command(words: &[String], policy: &Policy, option: Option<&Path>) -> Sources<'static> {
    let mut sources = Sources::new(scratch(None, option).to_owned().into());
    let quoted: Vec<String> = words.iter().map(|word| quoted(word)).collect();
    sources.add(None, Grammar::Shell, quoted.join(" ").into());
    if let Some(program) = words.first()
        && let Some((name, runtime)) = named_after(policy, program)
        && grammar(runtime).is_none()
    {
        sources.know(None, Rule::Language, name.to_owned());
    }
    // Without a directory of the host there is no script but the sandbox's own.
    let Some(scratch) = option else { return sources };
    let directory = match with_callers_rights(|| open_directory(scratch, None)) {
        Ok(Ok(directory)) => directory,
        // There is no script yet.
        Ok(Err(error)) if error.problem.reason() == "scratch_missing" => return sources,
        // What can be opened a moment later must not go unread for it.
        Ok(Err(error)) => {
            sources.know(None, Rule::Screener, error.to_string());
            return sources;
        }
        Err(refusal) => {
            sources.know(None, Rule::Screener, refusal.message);
            return sources;
        }
    };
    for Started { path, grammar } in scripts::of_words(words, interpreter(policy)) {
        // What only stands there as a word is run if it may be.
        match with_callers_rights(|| read(&scratch.join(&path), &directory, grammar.is_none())) {
            Ok(Ok(Some(text))) => {
                if let Some(grammar) = grammar.or_else(|| grammar_of_file(Path::new(&path), &text)) {
                    sources.add(Some(path), grammar, text.into());
                }
            }
            Ok(Ok(None)) => {}
            Ok(Err(error)) => sources.know(Some(path), Rule::Screener, format!("cannot be read: {error}")),
            Err(refusal) => sources.know(Some(path), Rule::Screener, refusal.message),
        }
    }
    sources
}

/// The runtime whose interpreter a program is, by its name.
fn named_after<'p>(policy: &'p Policy, program: &str) -> Option<(&'p str, &'p Runtime)> {
    let name = Path::new(program).file_name()?.to_str()?;
    runtime(policy, name).or_else(|| runtime(policy, name.trim_end_matches(|c: char| c.is_ascii_digit() || c == '.')))
}

/// What a program of this name takes for code.
fn interpreter(policy: &Policy) -> impl Fn(&str) -> Option<Grammar> {
    |program| named_after(policy, program).and_then(|(_, runtime)| grammar(runtime))
}

/// A word as a shell reads it back.
fn quoted(word: &str) -> String {
    let plain = !word.is_empty() && word.chars().all(|c| c.is_ascii_alphanumeric() || "_-./:=,+@%".contains(c));
    if plain { word.to_owned() } else { format!("'{}'", word.replace('\'', r"'\''")) }
}

/// A script in scratch; none where it is not there, leads elsewhere, or is none that the
/// kernel would run where it must be an `executable`. Where it lies is asked of what was
/// opened: code beside may turn links on the way meanwhile.
fn read(path: &Path, scratch: &OwnedFd, executable: bool) -> io::Result<Option<String>> {
    let found = match open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) {
        Ok(found) => found,
        Err(Errno::NOENT) => return Ok(None),
        Err(errno) => return Err(errno.into()),
    };
    if !place(&found)?.starts_with(place(scratch)?) {
        return Ok(None);
    }
    let kind = fstat(&found)?;
    match FileType::from_raw_mode(kind.st_mode) {
        // What an interpreter runs of a directory.
        FileType::Directory if !executable => return read(&path.join("__main__.py"), scratch, false),
        FileType::RegularFile if !executable || kind.st_mode & 0o111 != 0 => {}
        _ => return Ok(None),
    }
    let mut bytes = Vec::new();
    // NONBLOCK: a lease on the file must not block the launcher.
    let file = match open(by_descriptor(&found), OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty()) {
        Ok(file) => File::from(file),
        Err(Errno::AGAIN) => return Err(io::Error::other("another process has a lease on it")),
        Err(errno) => return Err(errno.into()),
    };
    file.take(MAX_CODE_LEN as u64 + 1).read_to_end(&mut bytes)?;
    Ok(Some(String::from_utf8_lossy(&bytes).into_owned()))
}

fn by_descriptor(file: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// Where a file lies that is open.
fn place(file: &OwnedFd) -> io::Result<PathBuf> {
    fs::read_link(by_descriptor(file))
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
        if whole > MAX_CODE_LEN {
            self.know(file, Rule::Screener, format!("{whole} bytes with what is before it, which is more than {MAX_CODE_LEN}"));
        } else if self.texts.len() >= MAX_SOURCES {
            self.know(file, Rule::Screener, format!("more than {MAX_SOURCES} texts"));
        } else {
            self.texts.push((file, grammar, code));
        }
    }
}

#[cfg(test)]
mod tests {
    use stockade_protocol::Base64;

    use super::*;

    #[test]
    fn a_scratch_that_an_option_names_is_where_code_may_write() {
        let option = Some(Path::new("/srv/work"));
        assert_eq!(scratch(Some("/srv/work/a"), option), "/srv/work/a");
        assert_eq!((scratch(None, option), scratch(None, None)), ("/srv/work", PRIVATE_SCRATCH));
    }

    #[test]
    fn code_that_is_no_text_is_read_as_far_as_it_is_one() {
        let read = |base64: &str| {
            let code = TextOrBase64::Base64(Base64 { base64: base64.to_owned() });
            let (text, is_text) = text_of(&code);
            (text.into_owned(), is_text)
        };
        assert_eq!(read("c3Vkbw=="), (String::from("sudo"), true));
        assert_eq!(read("c3UAZG8="), (String::from("sudo"), false));
        assert_eq!(read("c3X/ZG8="), (String::from("su\u{fffd}do"), false));
    }

    #[test]
    fn words_come_back_from_a_shell_as_they_went() {
        for (word, there) in [("rm", "rm"), ("", "''"), ("a b", "'a b'"), ("it's", r"'it'\''s'"), ("$x", "'$x'"), ("/a-b_c.d", "/a-b_c.d")]
        {
            assert_eq!(quoted(word), there);
        }
    }
}
