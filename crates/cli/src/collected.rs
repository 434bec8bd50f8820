//! Where `stockade run --collect` writes: a directory that is opened before the run. So does
//! `stockade man --into`.
//!
//! It may lie where the code can write, and code makes links and moves directories. So it is sought
//! before the run, through no link but root's and through none in the scratch, and only its
//! descriptor is used afterwards: files are created below it, through no link and over no file. With
//! `--overwrite` a file or link of the same name is removed before.
//! All with the caller's rights. What the files hold is not looked at.

use std::{
    ffi::{OsStr, OsString},
    fs::File,
    io::{self, ErrorKind, Write},
    os::fd::OwnedFd,
    path::{Component, Path, PathBuf},
};

use anyhow::{Context, anyhow, bail};
use base64::{Engine, prelude::BASE64_STANDARD};
use rustix::{
    fs::{AtFlags, Mode, OFlags, fstat, mkdirat, openat, unlinkat},
    io::Errno,
};
use stockade_engine::{open_directory, with_callers_rights};
use stockade_protocol::CollectedFile;

const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
const NEW_FILE: OFlags = OFlags::WRONLY.union(OFlags::CREATE).union(OFlags::EXCL).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// The directory of `--into`.
pub(crate) struct Destination<'a> {
    path: PathBuf,
    scratch: Option<&'a Path>,
    directory: OwnedFd,
    overwrite: bool,
    /// The directories that were made for it, the outermost first: where, and the name.
    made: Vec<(OwnedFd, OsString)>,
}

/// What came of the files.
#[derive(Default)]
pub(crate) struct KeptFiles {
    /// How many were written.
    pub(crate) written: usize,
    /// What a run did not read of its files, and why.
    pub(crate) left_out: Vec<String>,
    /// Those in whose place a file already is.
    existing: Vec<String>,
    /// Those that could not be written, and why.
    failed: Vec<String>,
}

impl<'a> Destination<'a> {
    /// Opens an absolute path, and makes what is missing of it. `scratch`: where the code can write;
    /// `overwrite`: files in it may be replaced.
    ///
    /// # Errors
    /// It has a link that is not root's or lies in the scratch, or it cannot be made or opened.
    pub(crate) fn open(path: PathBuf, scratch: Option<&'a Path>, overwrite: bool) -> anyhow::Result<Self> {
        let what = format!("open {}, where the files are to go (--into)", path.display());
        with_callers_rights(|| Self::open_or_make(path, scratch, overwrite))?.context(what)
    }

    fn open_or_make(path: PathBuf, scratch: Option<&'a Path>, overwrite: bool) -> anyhow::Result<Self> {
        let mut missing = Vec::new();
        let mut existing = path.as_path();
        let directory = loop {
            match open_directory(existing, scratch) {
                Ok(directory) => break directory,
                Err(error) if error.problem.reason() == "scratch_missing" => {}
                Err(error) => bail!(error.problem),
            }
            let (Some(above), Some(name)) = (existing.parent(), existing.file_name()) else { bail!("it is no directory's name") };
            missing.push(name.to_owned());
            existing = above;
        };
        let mut destination = Destination { path, scratch, directory, overwrite, made: Vec::new() };
        for name in missing.into_iter().rev() {
            let is_new = make_directory(&destination.directory, &name)?;
            let below = openat(&destination.directory, &name, DIRECTORY, Mode::empty())?;
            let above = std::mem::replace(&mut destination.directory, below);
            destination.made.extend(is_new.then_some((above, name)));
        }
        Ok(destination)
    }

    /// Its path, as it was found before the run.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the files that a run has returned, each that can be written.
    ///
    /// # Errors
    /// It cannot be known with whose rights.
    pub(crate) fn keep(&self, files: &[CollectedFile]) -> anyhow::Result<KeptFiles> {
        Ok(with_callers_rights(|| {
            let mut kept = KeptFiles::default();
            for file in files {
                let bytes = match (&file.text, &file.base64) {
                    (Some(text), _) => Ok(text.clone().into_bytes()),
                    (None, Some(base64)) => BASE64_STANDARD.decode(base64).map_err(|error| io::Error::other(error.to_string())),
                    (None, None) => {
                        kept.left_out.push(format!("{}: {}", file.path, file.omitted.as_deref().unwrap_or("not read")));
                        continue;
                    }
                };
                match bytes.and_then(|bytes| self.create_below(Path::new(&file.path), &bytes)) {
                    Ok(()) => kept.written += 1,
                    Err(error) if error.kind() == ErrorKind::AlreadyExists => kept.existing.push(file.path.clone()),
                    Err(error) => kept.failed.push(format!("{}: {error}", file.path)),
                }
            }
            kept
        })?)
    }

    /// Makes a file. The name is the code's choice: no link is on its way, and what is at its end is
    /// kept or removed, and never followed.
    pub(crate) fn create_below(&self, name: &Path, bytes: &[u8]) -> io::Result<()> {
        let mut below: Option<OwnedFd> = None;
        let mut parts = name.components().peekable();
        while let Some(part) = parts.next() {
            let Component::Normal(part) = part else { break };
            let directory = below.as_ref().unwrap_or(&self.directory);
            if parts.peek().is_none() {
                if self.overwrite {
                    match unlinkat(directory, part, AtFlags::empty()) {
                        Ok(()) | Err(Errno::NOENT) => {}
                        Err(errno) => return Err(errno.into()),
                    }
                }
                return File::from(openat(directory, part, NEW_FILE, Mode::from_raw_mode(0o644))?).write_all(bytes);
            }
            make_directory(directory, part)?;
            below = Some(openat(directory, part, DIRECTORY, Mode::empty())?);
        }
        Err(io::Error::new(ErrorKind::InvalidInput, "it is no path below a directory"))
    }

    /// Whether what was written is what the caller finds.
    ///
    /// # Errors
    /// A file was not written, or the directory is no longer where it was.
    pub(crate) fn check(&self, kept: &KeptFiles) -> anyhow::Result<()> {
        let mut problems = kept.failed.clone();
        if !kept.existing.is_empty() {
            let exist = if kept.existing.len() == 1 { "exists already and was" } else { "exist already and were" };
            problems.push(format!(
                "{} {exist} kept; write --overwrite to replace, or --into DIR for another directory",
                kept.existing.join(", ")
            ));
        }
        if kept.written > 0 && !self.is_in_place()? {
            problems.push(String::from(
                "something else has taken its place since the run began, and they are where it was moved to; name a directory where the code cannot write",
            ));
        }
        if problems.is_empty() {
            return Ok(());
        }
        Err(anyhow!("{}", problems.join("; "))).with_context(|| format!("write the collected files to {}", self.path.display()))
    }

    fn is_in_place(&self) -> anyhow::Result<bool> {
        let found = with_callers_rights(|| open_directory(&self.path, self.scratch).ok().map(fstat).transpose())??;
        let own = fstat(&self.directory)?;
        Ok(found.is_some_and(|found| (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino)))
    }
}

impl Drop for Destination<'_> {
    /// Removes the directories that were made and have stayed empty.
    fn drop(&mut self) {
        let remove = || {
            for (above, name) in self.made.iter().rev() {
                let _is_in_use = unlinkat(above, name, AtFlags::REMOVEDIR);
            }
        };
        let _they_stay = with_callers_rights(remove);
    }
}

/// Whether it was not there.
fn make_directory(above: &OwnedFd, name: &OsStr) -> Result<bool, Errno> {
    match mkdirat(above, name, Mode::from_raw_mode(0o777)) {
        Ok(()) => Ok(true),
        Err(Errno::EXIST) => Ok(false),
        Err(errno) => Err(errno),
    }
}
