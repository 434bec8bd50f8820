//! `stockade grants check`: the file of the grants, read as a run through root would read it.
//!
//! It grants nothing, and does not say what a caller may do. A caller of sudo sees only what it
//! could read itself: an error shows the line that it is about.

use std::path::Path;

use stockade_diagnose::doctor::unusable_scratch;
use stockade_policy::{Grants, grants::PATH};

use crate::{
    ExitCode,
    output::{print_text, warn, words_of},
    policy,
};

pub(crate) fn check(file: Option<&Path>) -> anyhow::Result<ExitCode> {
    let path = file.unwrap_or(Path::new(PATH));
    let grants = match stockade_engine::with_callers_rights(|| Grants::load(path))? {
        Ok(Some(grants)) => grants,
        Ok(None) if file.is_some() => {
            warn(&format!("{} does not exist", path.display()));
            return Ok(ExitCode::FAILURE);
        }
        Ok(None) => {
            warn(&format!("{} does not exist, so root runs nothing for other users", path.display()));
            return Ok(ExitCode::FAILURE);
        }
        Err(error) => {
            warn(&words_of(&error.into()));
            return Ok(ExitCode::FAILURE);
        }
    };
    let mut code = ExitCode::SUCCESS;
    for grant in &grants.grants {
        for name in &grant.policies {
            if let Err(refusal) = policy::load(name) {
                warn(&format!("{}:{}: {}", path.display(), grant.line, refusal.message));
                code = ExitCode::FAILURE;
            }
        }
    }
    // A caller of sudo is told of the file alone, and not what the host's directories are.
    let is_root = rustix::process::geteuid().is_root() && !stockade_engine::caller::identify(None)?.on_behalf;
    for (line, why) in if is_root { unusable_scratch(&grants) } else { Vec::new() } {
        warn(&format!("{}:{line}: {why}", path.display()));
        code = ExitCode::FAILURE;
    }
    if code == ExitCode::SUCCESS {
        let count = grants.grants.len();
        print_text(&format!("{}: ok ({count} grant{})", path.display(), if count == 1 { "" } else { "s" }))?;
    }
    Ok(code)
}
