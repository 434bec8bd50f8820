//! The arguments that `stockade` passes. It has checked their form; this finds each in its place.

use std::{ffi::OsString, path::PathBuf};

use crate::{import::MAX_SIZE, manifest::Platform};

/// What is to be done.
#[derive(Debug)]
pub enum Task {
    /// Bring an image in.
    Import(ImportTask),
    /// Bring an image in from a registry.
    Pull(PullTask),
    /// List the images.
    List {
        /// As JSON.
        json: bool,
    },
    /// Print what is known of an image.
    Inspect(String),
    /// Compare images with what was unpacked; all where none is named.
    Verify(Vec<String>),
    /// Remove names and images.
    Remove(Vec<String>),
    /// Remove what no image has.
    Collect,
}

/// An image to bring in.
#[derive(Debug)]
pub struct ImportTask {
    /// The archive or directory.
    pub from: PathBuf,
    /// The image's name in the store.
    pub name: Option<String>,
    /// The image's name in the archive.
    pub reference: Option<String>,
    /// What it is for.
    pub platform: Platform,
    /// The most bytes, uncompressed.
    pub max_size: u64,
}

/// An image of a registry.
#[derive(Debug)]
pub struct PullTask {
    /// What was asked for.
    pub reference: String,
    /// The image's name in the store, if it is another.
    pub name: Option<String>,
    /// What it is for.
    pub platform: Platform,
    /// The most bytes, uncompressed.
    pub max_size: u64,
    /// How the registry is asked.
    pub options: stockade_registry::Options,
}

/// The version of the program that became this one, and what it wants. None: another program has
/// started this.
pub fn of(mut words: impl Iterator<Item = OsString>) -> Option<(OsString, Task)> {
    let mut version = OsString::new();
    let command = loop {
        let word = words.next()?;
        match word.to_str()? {
            "--program" => drop(words.next()?),
            "--program-version" => version = words.next()?,
            _ => break word,
        }
    };
    let task = match command.to_str()? {
        "import" => Task::Import(import_task(&mut words)?),
        "pull" => Task::Pull(pull_task(&mut words)?),
        "ls" => Task::List { json: words.next().is_some_and(|word| word == "--json") },
        "inspect" => Task::Inspect(words.next()?.into_string().ok()?),
        "verify" => Task::Verify(texts(&mut words)?),
        "rm" => Task::Remove(texts(&mut words)?),
        "gc" => Task::Collect,
        _ => return None,
    };
    words.next().is_none().then_some((version, task))
}

fn texts(words: &mut dyn Iterator<Item = OsString>) -> Option<Vec<String>> {
    words.map(|word| word.into_string().ok()).collect()
}

fn import_task(words: &mut dyn Iterator<Item = OsString>) -> Option<ImportTask> {
    let from = words.next()?.into();
    let mut task = ImportTask { from, name: None, reference: None, platform: Platform::host(), max_size: MAX_SIZE };
    while let Some(word) = words.next() {
        let value = words.next()?.into_string().ok()?;
        match word.to_str()? {
            "--name" => task.name = Some(value),
            "--ref" => task.reference = Some(value),
            "--platform" => task.platform = Platform::parse(&value)?,
            "--max-size" => task.max_size = value.parse().ok()?,
            _ => return None,
        }
    }
    Some(task)
}

fn pull_task(words: &mut dyn Iterator<Item = OsString>) -> Option<PullTask> {
    let reference = words.next()?.into_string().ok()?;
    let options = stockade_registry::Options { credentials: stockade_registry::docker_config(), ..Default::default() };
    let mut task = PullTask { reference, name: None, platform: Platform::host(), max_size: MAX_SIZE, options };
    while let Some(word) = words.next() {
        let value = words.next()?;
        let text = value.to_str().map(str::to_owned);
        match word.to_str()? {
            "--name" => task.name = Some(text?),
            "--platform" => task.platform = Platform::parse(&text?)?,
            "--max-size" => task.max_size = text?.parse().ok()?,
            "--creds-file" => task.options.credentials = Some(value.into()),
            "--ca" => task.options.ca = Some(value.into()),
            "--insecure-http" => task.options.insecure_http.push(text?),
            "--auth-host" => task.options.auth_hosts.push(text?),
            _ => return None,
        }
    }
    Some(task)
}
