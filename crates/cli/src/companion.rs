//! Becoming a companion program.
//!
//! The companion replaces this process. It gets this program's path and version, so that it
//! can refuse another version. `engine` decides where to look for it and which one root
//! trusts.

use std::{
    convert::Infallible,
    ffi::OsString,
    os::{fd::AsRawFd, unix::process::CommandExt},
    process::Command,
};

use anyhow::Context;
use stockade_engine::{caller, companion};

/// Becomes the companion `name`, with these arguments after `--program`, `--program-version` and
/// an `--ends-with` for each process that it does not outlive, each with its value.
///
/// # Errors
/// It is missing, not to be trusted, or cannot be executed.
pub(crate) fn become_companion(
    name: &str,
    outlive_caller: bool,
    arguments: impl IntoIterator<Item = OsString>,
) -> anyhow::Result<Infallible> {
    // `identify` also refuses to pass on more rights than the caller has.
    let privileged = caller::identify(None)?.privileged;
    let (program, found) = companion::find(name, privileged)?;
    let mut command = Command::new(format!("/proc/self/fd/{}", found.as_raw_fd()));
    command.arg0(name).arg("--program").arg(&program).args(["--program-version", env!("CARGO_PKG_VERSION")]);
    for pid in if outlive_caller { Vec::new() } else { caller::waiting_pids() } {
        command.args(["--ends-with", &pid.to_string()]);
    }
    command.args(arguments);
    Err(command.exec()).with_context(|| format!("execute {name}"))
}
