//! Programs beside this one, for what is too large to be in it.
//!
//! A companion lies in the directory of the running program, or in `../lib/stockade` from
//! there. Root takes only one that root alone can have installed. No environment
//! variable is looked at. Starting it is its user's business.

use std::{
    fs::File,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
};

use stockade_policy::{ReadError, open_trusted_program};

/// Why there is no companion to start.
#[derive(Debug, thiserror::Error)]
pub enum CompanionError {
    /// This program does not know where it is.
    #[error("find the running program by /proc/self/exe: {0}")]
    Program(std::io::Error),
    /// There is none.
    #[error("{name} is neither beside {} nor in ../lib/stockade from there; install it there, as the package and scripts/build do", program.display())]
    Missing {
        /// What was sought.
        name: String,
        /// Beside which program.
        program: PathBuf,
    },
    /// It is there and cannot be opened.
    #[error("open {}: {error}", path.display())]
    Open {
        /// Which.
        path: PathBuf,
        /// Why not.
        error: std::io::Error,
    },
    /// Others than root could have put it there.
    #[error(transparent)]
    Untrusted(#[from] ReadError),
}

/// The running program and its companion of this name, open for execution.
///
/// # Errors
/// It is missing or, where root would start it, not root's alone.
pub fn find(name: &str, privileged: bool) -> Result<(PathBuf, OwnedFd), CompanionError> {
    let program = std::env::current_exe().map_err(CompanionError::Program)?;
    for place in places(&program, name) {
        if let Some(found) = open(&place, privileged)? {
            return Ok((program, found));
        }
    }
    Err(CompanionError::Missing { name: name.to_owned(), program })
}

fn places(program: &Path, name: &str) -> Vec<PathBuf> {
    let directory = program.parent();
    let library = directory.and_then(Path::parent).map(|prefix| prefix.join("lib/stockade"));
    directory.into_iter().chain(library.as_deref()).map(|place| place.join(name)).collect()
}

/// None: there is none at this place.
fn open(place: &Path, privileged: bool) -> Result<Option<OwnedFd>, CompanionError> {
    if privileged {
        return Ok(open_trusted_program(place)?);
    }
    match File::open(place) {
        Ok(file) => Ok(Some(file.into())),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(CompanionError::Open { path: place.to_owned(), error }),
    }
}
