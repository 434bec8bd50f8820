//! The commands that a service does: `exec`, `ps` and `kill` with `--server`.
//!
//! A companion takes this process's place, which alone links an HTTP client. Through sudo it is
//! refused: root would ask, and the key and the code would be root's to name.

use std::{convert::Infallible, ffi::OsString, process::ExitCode};

use anyhow::bail;
use stockade_engine::caller;
use stockade_protocol::{Report, Verdict, form::ResultForm};

use crate::{args, companion, print_report, warn_of_terminal};

const COMPANION: &str = "stockade-remote";
const THROUGH_SUDO: &str = "--server through sudo would have root ask; leave sudo out, or --server";

/// `exec` by way of a service.
///
/// # Errors
/// The result cannot be printed.
pub(crate) fn exec(server: &str, exec: &args::Exec) -> anyhow::Result<ExitCode> {
    if is_through_sudo() {
        return print_report(&Report::refused(Verdict::BadRequest, "server_through_sudo", THROUGH_SUDO.to_owned()));
    }
    warn_of_terminal();
    let policy = exec.sandbox.policy.iter().flat_map(|policy| ["--policy".into(), OsString::from(policy)]);
    let form = ResultForm::from(exec).option().map(OsString::from);
    let flags = [(exec.stream, "--stream"), (exec.quiet, "--quiet")];
    let flags = flags.into_iter().filter(|(given, _)| *given).map(|(_, flag)| flag.into());
    match ask("exec", server, exec.sandbox.outlive_caller, policy.chain(form).chain(flags)) {
        Ok(never) => match never {},
        Err(error) => print_report(&Report::refused(Verdict::SandboxError, "companion_missing", format!("{error:#}"))),
    }
}

/// `ps` of a service.
///
/// # Errors
/// The companion cannot be started.
pub(crate) fn list(server: &str, asked: &args::Ps) -> anyhow::Result<ExitCode> {
    let flags = [(asked.json, "--json"), (asked.watch, "--watch")];
    let flags = flags.into_iter().filter(|(given, _)| *given).map(|(_, flag)| OsString::from(flag));
    refuse_sudo()?;
    match ask("ps", server, true, flags)? {}
}

/// `kill` at a service.
///
/// # Errors
/// The companion cannot be started.
pub(crate) fn kill(server: &str, run: &str) -> anyhow::Result<ExitCode> {
    refuse_sudo()?;
    match ask("kill", server, true, [OsString::from(run)])? {}
}

fn ask(command: &str, server: &str, outlive_caller: bool, further: impl IntoIterator<Item = OsString>) -> anyhow::Result<Infallible> {
    let arguments = [OsString::from(command), OsString::from(server)].into_iter().chain(further);
    companion::become_companion(COMPANION, outlive_caller, arguments)
}

fn is_through_sudo() -> bool {
    // What cannot be told is refused where the companion is started.
    caller::identify(None).is_ok_and(|identity| identity.on_behalf)
}

fn refuse_sudo() -> anyhow::Result<()> {
    if is_through_sudo() {
        bail!(THROUGH_SUDO);
    }
    Ok(())
}
