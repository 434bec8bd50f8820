//! `stockade screen`: what a policy would say of files, before anything runs.
//!
//! The same screener and the same judgement as `exec`. Of a directory every file is read
//! that is Python or shell by its ending or its first line; hidden directories and links in
//! it are left out. Nothing is run and nothing is written.

use std::{
    fs,
    io::{self, Read},
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, bail};
use serde::Serialize;
use stockade_protocol::screen::{Action, Finding, Grammar, LONGEST_CODE, Rule};
use stockade_runtime::{
    Options, caller, load_policy,
    screen::{Pending, grammar_of_file, sentence, visible},
    with_callers_rights,
};

use crate::{
    USAGE_ERROR, args,
    output::{say, say_json, warn},
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
    let (mut files, mut failed) = (Vec::new(), false);
    for path in &asked.files {
        match with_callers_rights(|| read(path, language))? {
            Ok(found) => files.extend(found),
            Err(error) => {
                warn(&format!("stockade: {error:#}"));
                failed = true;
            }
        }
    }
    let mut all = Vec::new();
    for (path, grammar, code) in files {
        let screening = Pending::of_text(&code, grammar, &screen, privileged).finish();
        let language = if grammar == Grammar::Python { "python" } else { "bash" };
        all.push(Screened {
            path: path.display().to_string(),
            language,
            findings: screening.findings,
            findings_omitted: screening.omitted,
        });
    }
    let found = || all.iter().flat_map(|file| &file.findings);
    let stops = found().any(|finding| finding.action > Action::Note);
    failed |= found().any(|finding| finding.rule == Rule::Screener);
    if asked.json {
        let policy = &loaded.policy;
        let whole =
            serde_json::json!({ "schema": 1, "policy": { "name": policy.name, "sha256": policy.sha256 }, "stops": stops, "files": all });
        say_json(&whole)?;
    } else {
        print(&all, &loaded.policy.name)?;
    }
    Ok(match (stops, failed) {
        (true, _) => ExitCode::FAILURE,
        (false, true) => ExitCode::from(USAGE_ERROR),
        (false, false) => ExitCode::SUCCESS,
    })
}

fn print(all: &[Screened], policy: &str) -> anyhow::Result<()> {
    let mut out = String::new();
    for file in all {
        for finding in &file.findings {
            out.push_str(&format!("{}: {}: {}\n", visible(&file.path), finding.action.name(), sentence(finding)));
        }
        if file.findings_omitted > 0 {
            out.push_str(&format!("{}: and {} more\n", visible(&file.path), file.findings_omitted));
        }
    }
    let stopped = all.iter().filter(|file| file.findings.iter().any(|finding| finding.action > Action::Note)).count();
    out.push_str(&format!("{} of {} files would be stopped under `{policy}`", stopped, all.len()));
    say(&out)
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
    visible(&path.to_string_lossy())
}

type Code = (PathBuf, Grammar, String);

/// What a path of the command line stands for.
fn read(path: &Path, language: Option<Grammar>) -> anyhow::Result<Vec<Code>> {
    if path == Path::new("-") {
        let grammar = language.context("for code on stdin, say its language with --language")?;
        return Ok(vec![(path.to_owned(), grammar, text(io::stdin().lock(), path)?)]);
    }
    let metadata = fs::metadata(path).with_context(|| format!("look at {}", shown(path)))?;
    if metadata.is_dir() {
        let mut out = Vec::new();
        directory(path, language, &mut out)?;
        return Ok(out);
    }
    let code = file(path)?;
    match language.or_else(|| grammar_of_file(path, &code)) {
        Some(grammar) => Ok(vec![(path.to_owned(), grammar, code)]),
        None => bail!("{} is neither Python nor shell by its ending or first line; say its language with --language", shown(path)),
    }
}

fn directory(path: &Path, language: Option<Grammar>, out: &mut Vec<Code>) -> anyhow::Result<()> {
    let context = || format!("read the directory {}", shown(path));
    let mut entries = fs::read_dir(path).with_context(context)?.collect::<Result<Vec<_>, _>>().with_context(context)?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let kind = entry.file_type().with_context(context)?;
        let hidden = entry.file_name().to_string_lossy().starts_with('.');
        if kind.is_dir() && !hidden {
            directory(&entry.path(), language, out)?;
        } else if kind.is_file() {
            let code = file(&entry.path())?;
            if let Some(grammar) = grammar_of_file(&entry.path(), &code) {
                out.push((entry.path(), language.unwrap_or(grammar), code));
            }
        }
    }
    Ok(())
}

fn file(path: &Path) -> anyhow::Result<String> {
    text(fs::File::open(path).with_context(|| format!("open {}", shown(path)))?, path)
}

/// So much of a file as is needed to see that it is too long.
fn text(from: impl Read, path: &Path) -> anyhow::Result<String> {
    let mut bytes = Vec::new();
    from.take(LONGEST_CODE as u64 + 1).read_to_end(&mut bytes).with_context(|| format!("read {}", shown(path)))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
