//! The arguments that `stockade` passes. It has checked their form; this finds each in its place.

use std::{ffi::OsString, path::PathBuf};

use crate::{import::MAX_SIZE, manifest::Platform};

/// What is to be done.
#[derive(Debug)]
pub enum Task {
    /// Bring an image in.
    Import(ImportTask),
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
