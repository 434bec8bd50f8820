//! `stockade screen`: what a policy's screening finds in files, before anything runs.
//!
//! The same screener and the same judgement as `exec`. Of a directory every file is read
//! that is Python or shell by its ending or its first line; hidden directories and links in
//! it are left out. Nothing is run and nothing is written.

use std::{
    fs,
    io::{self, Read},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use anyhow::{Context, bail};
use rustix::fs::OFlags;
use serde::Serialize;
use stockade_engine::{
    Options, caller, load_policy,
    screen::{ScreeningJob, grammar_of_file, sentence},
    with_callers_rights,
};
use stockade_protocol::{
    screen::{Action, Finding, Grammar, MAX_CODE_LEN, Rule},
    text::{escape_line, is_hidden},
};

use crate::{
    ExitCode, USAGE_ERROR, args,
    output::{print_json, print_text, warn, warn_of_error},
};

/// What was found in one file.
#[derive(Serialize)]
struct Screened {
    path: String,
    language: &'static str,
    findings: Vec<Finding>,
    findings_omitted: u64,
}

pub(crate) fn run(asked: &args::Screen) -> anyhow::Result<ExitCode> {
    let loaded = match load_policy(&Options { policy: asked.policy.clone(), ..Options::default() }) {
        Ok(loaded) => loaded,
        Err(refusal) => {
            warn(&refusal.message);
            return Ok(ExitCode::from(USAGE_ERROR));
        }
    };
    let privileged = caller::identify(None)?.privileged;
    let mut screen = loaded.policy.screen.clone();
    // A file that could not be screened is never passed over here.
    screen.actions.entry(Rule::Screener).and_modify(|action| *action = (*action).max(Action::Note)).or_insert(Action::Note);
    let language = asked.language.as_deref().and_then(language);
    let (mut all, mut failed) = (Vec::new(), false);
    let mut wrong = |error: anyhow::Error| {
        warn_of_error(&error);
        failed = true;
    };
    for path in &asked.files {
        let (named, errors) = with_callers_rights(|| files(path))?;
        errors.into_iter().for_each(&mut wrong);
        for path in named {
            // One text at a time: a directory may have more than memory has.
            let (grammar, code) = match with_callers_rights(|| path.read(language))? {
                Ok(Some(read)) => read,
                Ok(None) => continue,
                Err(error) => {
                    wrong(error);
                    continue;
                }
            };
            let screening = ScreeningJob::of_text(&code, grammar, &screen, privileged).finish();
            let file = Screened {
                path: path.path.display().to_string(),
                language: if grammar == Grammar::Python { "python" } else { "bash" },
                findings: screening.findings,
                findings_omitted: screening.omitted,
            };
            if !asked.json {
                print(&file)?;
            }
            all.push(file);
        }
    }
    let found = || all.iter().flat_map(|file| &file.findings);
    let stops = found().any(|finding| finding.action > Action::Note);
    failed |= found().any(|finding| finding.rule == Rule::Screener);
    let policy = &loaded.policy;
    if asked.json {
        let whole =
            serde_json::json!({ "schema": 1, "policy": { "name": policy.name, "sha256": policy.sha256 }, "stops": stops, "files": all });
        print_json(&whole)?;
    } else {
        let stopped = all.iter().filter(|file| file.findings.iter().any(|finding| finding.action > Action::Note)).count();
        print_text(&format!("{stopped} of {} files would be stopped under `{}`", all.len(), policy.name))?;
    }
    Ok(match (stops, failed) {
        (true, _) => ExitCode::FAILURE,
        (false, true) => ExitCode::from(USAGE_ERROR),
        (false, false) => ExitCode::SUCCESS,
    })
}

/// A path as the start of a line. CI runners read a line that begins with `::` as a command.
fn at_the_start_of_a_line(path: &str) -> String {
    let path = escape_line(path, is_hidden);
    if path.starts_with("::") { format!("./{path}") } else { path }
}

fn print(file: &Screened) -> anyhow::Result<()> {
    let path = at_the_start_of_a_line(&file.path);
    for finding in &file.findings {
        print_text(&format!("{path}: {}: {}", finding.action.name(), sentence(finding)))?;
    }
    if file.findings_omitted > 0 {
        print_text(&format!("{path}: and {} more", file.findings_omitted))?;
    }
    Ok(())
}

fn language(name: &str) -> Option<Grammar> {
    match name.to_ascii_lowercase().as_str() {
        "python" | "python3" | "py" => Some(Grammar::Python),
        "bash" | "sh" | "shell" => Some(Grammar::Shell),
        _ => None,
    }
}

/// A path in one line, as a person can read it.
fn shown(path: &Path) -> String {
    escape_line(&path.to_string_lossy(), is_hidden)
}

/// A file to be screened.
struct Named {
    path: PathBuf,
    /// By name, and not found in a directory: then it is screened, or it is an error.
    asked_for: bool,
}

/// The files of a path on the command line, and what of it cannot be read.
fn files(path: &Path) -> (Vec<Named>, Vec<anyhow::Error>) {
    let (mut named, mut errors) = (Vec::new(), Vec::new());
    let file = || Named { path: path.to_owned(), asked_for: true };
    if path == Path::new("-") {
        return (vec![file()], errors);
    }
    match fs::metadata(path).with_context(|| format!("look at {}", shown(path))) {
        Ok(metadata) if metadata.is_dir() => directory(path, &mut named, &mut errors),
        Ok(_) => named.push(file()),
        Err(error) => errors.push(error),
    }
    (named, errors)
}

fn directory(path: &Path, named: &mut Vec<Named>, errors: &mut Vec<anyhow::Error>) {
    let entries = fs::read_dir(path).and_then(|entries| {
        let entries = entries.map(|entry| entry.and_then(|entry| Ok((entry.file_name(), entry.file_type()?))));
        entries.collect::<io::Result<Vec<_>>>()
    });
    let mut entries = match entries.with_context(|| format!("read the directory {}", shown(path))) {
        Ok(entries) => entries,
        Err(error) => return errors.push(error),
    };
    entries.sort_by(|(one, _), (other, _)| one.cmp(other));
    for (name, kind) in entries {
        let path = path.join(&name);
        if kind.is_dir() && !name.as_encoded_bytes().starts_with(b".") {
            directory(&path, named, errors);
        } else if kind.is_file() {
            named.push(Named { path, asked_for: false });
        }
    }
}

impl Named {
    /// Its text; none: it is in a directory, and neither Python nor shell.
    fn read(&self, language: Option<Grammar>) -> anyhow::Result<Option<(Grammar, String)>> {
        let path = &self.path;
        if path == Path::new("-") {
            let grammar = language.context("for code on stdin, give its language with --language")?;
            return Ok(Some((grammar, text(io::stdin().lock(), path)?)));
        }
        let code = text(open(path)?, path)?;
        let known = grammar_of_file(path, &code);
        match language.filter(|_| self.asked_for || known.is_some()).or(known) {
            Some(grammar) => Ok(Some((grammar, code))),
            None if self.asked_for => {
                bail!("{} is neither Python nor shell by its ending or first line; give its language with --language", shown(path))
            }
            None => Ok(None),
        }
    }
}

/// Reads a regular file; it never waits for a writer of a fifo.
fn open(path: &Path) -> anyhow::Result<fs::File> {
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let opened = fs::OpenOptions::new().read(true).custom_flags(flags).open(path);
    let file = opened.with_context(|| format!("open {}", shown(path)))?;
    if !file.metadata().with_context(|| format!("look at {}", shown(path)))?.is_file() {
        bail!("{} is no regular file; to have code from elsewhere read, give it on stdin (`-`)", shown(path));
    }
    Ok(file)
}

/// So much of a file as is needed to see that it is too long.
fn text(from: impl Read, path: &Path) -> anyhow::Result<String> {
    let mut bytes = Vec::new();
    from.take(MAX_CODE_LEN as u64 + 1).read_to_end(&mut bytes).with_context(|| format!("read {}", shown(path)))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
