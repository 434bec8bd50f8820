//! Programs beside this one, for what is too large to be in it.
//!
//! A companion lies in the directory of the running program, or in `../lib/stockade` from
//! there, and takes this process's place. It is told which program to drive, and of which
//! version that is, so that it can refuse one that it was not made for. Root starts only
//! one that nobody else could have put there. No environment variable is looked at.

use std::{
    convert::Infallible,
    ffi::OsString,
    fs::File,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::process::CommandExt,
    },
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, bail};
use stockade_policy::open_trusted_program;
use stockade_runtime::caller;

/// Becomes the companion `name`, with these arguments after `--program` and
/// `--program-version`, each with its value.
///
/// # Errors
/// It is missing, not to be trusted, or cannot be executed.
pub(crate) fn become_companion(name: &str, arguments: impl IntoIterator<Item = OsString>) -> anyhow::Result<Infallible> {
    // Also refuses to hand on more rights than the caller has.
    let privileged = caller::identify(None)?.privileged;
    let program = std::env::current_exe().context("find the running program by /proc/self/exe")?;
    let mut places = places(&program, name).into_iter();
    let found = loop {
        let Some(place) = places.next() else {
            bail!(
                "{name} is neither beside {} nor in ../lib/stockade from there; install it there, as the package and scripts/build do",
                program.display()
            );
        };
        match open(&place, privileged)? {
            Some(found) => break found,
            None => continue,
        }
    };
    let mut command = Command::new(format!("/proc/self/fd/{}", found.as_raw_fd()));
    command.arg0(name).arg("--program").arg(&program).args(["--program-version", env!("CARGO_PKG_VERSION")]).args(arguments);
    Err(command.exec()).with_context(|| format!("execute {name}"))
}

fn places(program: &Path, name: &str) -> Vec<PathBuf> {
    let directory = program.parent();
    let library = directory.and_then(Path::parent).map(|prefix| prefix.join("lib/stockade"));
    directory.into_iter().chain(library.as_deref()).map(|place| place.join(name)).collect()
}

/// None: there is none at this place.
fn open(place: &Path, privileged: bool) -> anyhow::Result<Option<OwnedFd>> {
    if privileged {
        return Ok(open_trusted_program(place)?);
    }
    match File::open(place) {
        Ok(file) => Ok(Some(file.into())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("open {}", place.display())),
    }
}
