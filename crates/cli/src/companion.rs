//! Becoming a companion program.
//!
//! It takes this process's place, and is told which program to drive and of which version
//! that is, so that it can refuse one that it was not made for. Where it is sought, and
//! whom root trusts, is `runtime`'s to say.

use std::{
    convert::Infallible,
    ffi::OsString,
    os::{fd::AsRawFd, unix::process::CommandExt},
    process::Command,
};

use anyhow::Context;
use stockade_runtime::{caller, companion};

/// Becomes the companion `name`, with these arguments after `--program` and
/// `--program-version`, each with its value.
///
/// # Errors
/// It is missing, not to be trusted, or cannot be executed.
pub(crate) fn become_companion(name: &str, arguments: impl IntoIterator<Item = OsString>) -> anyhow::Result<Infallible> {
    // Also refuses to hand on more rights than the caller has.
    let privileged = caller::identify(None)?.privileged;
    let (program, found) = companion::find(name, privileged)?;
    let mut command = Command::new(format!("/proc/self/fd/{}", found.as_raw_fd()));
    command.arg0(name).arg("--program").arg(&program).args(["--program-version", env!("CARGO_PKG_VERSION")]).args(arguments);
    Err(command.exec()).with_context(|| format!("execute {name}"))
}
