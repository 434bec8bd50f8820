//! The host directories that an interpreter needs besides the one where it was named.
//!
//! Code of an earlier run may have written an environment in its scratch. So a directory that
//! the environment's settings or symlinks lead to is shown only where it looks like an
//! interpreter's directory; code in a scratch cannot make another host directory look like one.
//! It does not refuse such a directory that code has made in its scratch: that one is shown.

use std::{
    fs::File,
    io::Read,
    path::{Component, Path, PathBuf},
};

use rustix::{
    fd::{AsFd, OwnedFd},
    fs::{Mode, OFlags, ResolveFlags, openat2},
};
use stockade_launcher::resolve::{self, Follow, ForeignLink};
use stockade_policy::model::Policy;
use stockade_protocol::Verdict;

use crate::RefusalCause;

/// The size in bytes from which a small file is not read.
const MAX_SMALL_FILE: u64 = 64 << 10;
/// How many Python versions are searched below one prefix.
const MAX_VERSIONS: usize = 16;
/// How many entries an interpreter's directory may have.
const MAX_ENTRIES: usize = 256;
/// Dot files that conda and Homebrew keep there.
const KNOWN_DOTS: [&str; 3] = [".brew", ".condarc", ".nonadmin"];

/// Why a directory is not shown for an interpreter.
#[derive(Debug, thiserror::Error)]
pub(super) enum PrefixError {
    #[error("runtime `{runtime}`: {}: {foreign}; if that is meant, name it without the link: in {}", program.display(), real.display())]
    Foreign { runtime: String, program: PathBuf, foreign: ForeignLink, real: PathBuf },
    #[error(
        "runtime `{runtime}`: {}: {how} {}, which policy `{policy}` does not show, and which is not plainly an interpreter's own directory (with bin/python3 and lib/python3.*/os.py, and nothing whose name begins with a dot). Code that could write to the environment may have had a hand in it: make it anew, name the interpreter by its path without links, or add the directory to [filesystem] read_only",
        program.display(),
        path.display()
    )]
    LedAstray { runtime: String, program: PathBuf, how: &'static str, path: PathBuf, policy: String },
}

impl RefusalCause for PrefixError {
    fn verdict_and_reason(&self) -> (Verdict, &'static str) {
        let reason = match self {
            PrefixError::Foreign { .. } => "shown_foreign_link",
            PrefixError::LedAstray { .. } => "interpreter_led_astray",
        };
        (Verdict::BadRequest, reason)
    }
}

/// The environment directory of an interpreter's path: the parent of its `bin`.
pub(super) fn environment(program: &Path) -> Option<PathBuf> {
    program.parent().and_then(Path::parent).map(Path::to_path_buf)
}

/// The prefix that an environment was made from, as its pyvenv.cfg states.
pub(super) fn base(environment: &Path) -> Option<PathBuf> {
    let settings = Prefix::open(environment)?.small_file(Path::new("pyvenv.cfg"))?;
    let home =
        settings.lines().find_map(|line| line.split_once('=').filter(|(key, _)| key.trim() == "home").map(|(_, home)| home.trim()))?;
    Path::new(home).parent().map(Path::to_path_buf)
}

/// The prefix of an interpreter's path without symlinks.
pub(super) fn real(program: &Path) -> Option<PathBuf> {
    std::fs::canonicalize(program).ok().as_deref().and_then(environment)
}

/// The directories that an interpreter needs outside /usr, each with its path without
/// symlinks: the one where it was named, and those that its settings and symlinks lead to.
///
/// # Errors
/// One of them does not look like an interpreter's directory.
pub(super) fn needed(runtime: &str, program: &Path, policy: &Policy) -> Result<Vec<(PathBuf, PathBuf)>, PrefixError> {
    let filesystem = &policy.filesystem;
    let shown = |path: &Path| filesystem.read_only.iter().chain(&filesystem.read_only_optional).any(|shown| path.starts_with(shown));
    let mut needed: Vec<(PathBuf, PathBuf)> = Vec::new();
    let Some(own) = environment(program) else { return Ok(needed) };
    let has_settings = |path: &Path| Prefix::open(path).is_some_and(|prefix| prefix.small_file(Path::new("pyvenv.cfg")).is_some());
    let led = [
        (base(&own), false, "its pyvenv.cfg has it made from"),
        (real(program), false, "it is a link to a program in"),
        (Some(own), true, "a link leads to its directory"),
    ];
    // The named directory comes first, since it shows the directories below it as well.
    for (path, is_named, how) in led.into_iter().rev() {
        let Some(path) = path.filter(|path| path.parent().is_some()) else { continue };
        let is_clean = path.is_absolute() && !path.components().any(|part| part == Component::ParentDir);
        if is_clean && (path.starts_with("/usr") || needed.iter().any(|(known, _)| path.starts_with(known))) {
            continue;
        }
        let way = resolve::resolve(&path, Follow::All).ok();
        let (real, foreign) = way.map_or_else(|| (path.clone(), None), |way| (way.real, way.foreign));
        // The caller named this directory, so it is allowed unless a symlink leads elsewhere.
        let is_meant = is_named && (real == path || foreign.is_none() && has_settings(&real));
        let is_believed = || is_clean && (shown(&path) || Prefix::open(&real).is_some_and(|prefix| prefix.is_interpreters()));
        if !is_meant && !is_believed() {
            let (runtime, program) = (runtime.to_owned(), program.to_path_buf());
            return Err(match foreign.filter(|_| is_named && has_settings(&real)) {
                Some(foreign) => PrefixError::Foreign { runtime, program, foreign, real },
                None => PrefixError::LedAstray { runtime, program, how, path, policy: policy.name.clone() },
            });
        }
        needed.push((path, real));
    }
    Ok(needed)
}

/// An opened directory that may have `bin` and `lib`.
pub(super) struct Prefix {
    path: PathBuf,
    directory: OwnedFd,
}

impl Prefix {
    pub(super) fn open(path: &Path) -> Option<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::open(path, flags, Mode::empty()).ok()?;
        Some(Prefix { path: path.to_path_buf(), directory })
    }

    /// A regular file below it. Symlinks that lead out of it are refused.
    fn regular(&self, path: &Path) -> Option<File> {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        let file = File::from(openat2(self.directory.as_fd(), path, flags, Mode::empty(), resolve).ok()?);
        file.metadata().is_ok_and(|metadata| metadata.is_file()).then_some(file)
    }

    /// The text of a regular file below it.
    pub(super) fn small_file(&self, path: &Path) -> Option<String> {
        let mut text = String::new();
        let length = self.regular(path)?.take(MAX_SMALL_FILE).read_to_string(&mut text).ok()?;
        ((length as u64) < MAX_SMALL_FILE).then_some(text)
    }

    /// The directories of its Python versions' standard libraries, relative to it.
    pub(super) fn libraries(&self) -> Vec<PathBuf> {
        let is_version = |name: &[u8]| name.starts_with(b"python") || name.starts_with(b"pypy");
        let mut found = Vec::new();
        for library in ["lib", "lib64"].map(Path::new) {
            let directory = self.path.join(library);
            let entries = std::fs::read_dir(&directory).into_iter().flatten().flatten().filter(|_| !directory.is_symlink());
            let versions = entries.map(|entry| entry.file_name()).filter(|name| is_version(name.as_encoded_bytes()));
            found.extend(versions.take(MAX_VERSIONS).map(|name| library.join(name)));
        }
        found
    }

    /// Whether it is only an interpreter's directory. A home directory, for example, is not: it
    /// has entries whose names begin with a dot.
    fn is_interpreters(&self) -> bool {
        let programs = ["bin/python3", "bin/python", "bin/pypy3"];
        let is_dot = |name: &[u8]| name.starts_with(b".") && !KNOWN_DOTS.iter().any(|known| known.as_bytes() == name);
        let Ok(entries) = std::fs::read_dir(&self.path) else { return false };
        let mut entries = entries.take(MAX_ENTRIES + 1).enumerate();
        programs.iter().any(|program| self.regular(Path::new(program)).is_some())
            && self.libraries().iter().any(|library| self.regular(&library.join("os.py")).is_some())
            && entries.all(|(number, entry)| number < MAX_ENTRIES && entry.is_ok_and(|entry| !is_dot(entry.file_name().as_encoded_bytes())))
    }
}
