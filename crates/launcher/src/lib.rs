//! The host side of one sandbox: from a plan to an outcome.
//!
//! [`launch`] puts every layer of a plan in place, runs the executor behind them,
//! watches the run and tears everything down. It has no options of its own and never
//! goes on without a layer that the plan lists. It does not decide what is permitted
//! (that is the plan) and does not word results (that is `runtime`).
#![forbid(unsafe_code)]

mod capture;
mod cgroup;
mod child;
mod collect;
mod error;
mod identity;
mod notify;
mod prepared;
mod proc;
mod receipt;
pub mod registry;
mod relay;
pub mod scratch;
mod supervise;
pub mod terminal;
mod tree;
mod verdict;

use std::{collections::BTreeMap, path::PathBuf};

use rustix::fd::OwnedFd;
use stockade_policy::plan::{Mode, Plan};
use stockade_protocol::{CollectedFile, Denial, PerStream, Receipt, Usage, Verdict};
use stockade_sys::clone;

pub use capture::Captured;
pub use error::{LaunchError, What};
pub use scratch::OpenedScratch;

/// What a run needs beside its plan: contents and opened descriptors.
pub struct Inputs<'a> {
    /// The code; empty for a command.
    pub program: &'a [u8],
    /// Files to write, by path below scratch.
    pub files: Vec<(String, &'a [u8])>,
    /// The payload's stdin.
    pub stdin: Stdin<'a>,
    /// The host scratch, opened as the caller; none: a private one.
    pub scratch: Option<OpenedScratch>,
    /// Host trees that were opened with the caller's rights, by source path.
    pub trees: BTreeMap<PathBuf, OwnedFd>,
    /// What happens to the payload's output.
    pub streams: Streams,
    /// Globs of files to return.
    pub collect: Vec<String>,
    /// This run's place in the registry.
    pub record: Option<registry::Record>,
}

/// The payload's stdin.
pub enum Stdin<'a> {
    /// `/dev/null`.
    Null,
    /// These bytes, through a pipe.
    Bytes(&'a [u8]),
    /// The launcher's own stdin, relayed.
    Relay,
}

/// What happens to the payload's output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Streams {
    /// It is kept, head and tail, for the result.
    Capture,
    /// It goes to the launcher's own stdout and stderr, and signals to the payload.
    Relay,
}

/// What came of a run.
#[derive(Debug)]
pub struct Outcome {
    /// The one cause of the end.
    pub verdict: Verdict,
    /// Stable identifier of the detail.
    pub reason: Option<&'static str>,
    /// Exit status as the contract counts it.
    pub code: i32,
    /// The signal that ended the payload.
    pub signal: Option<i32>,
    /// Did the payload's first instruction run?
    pub started: bool,
    /// What went wrong, where the verdict is a sandbox error.
    pub message: Option<String>,
    /// From the payload's start to the end.
    pub duration_ms: u64,
    /// Limits touched without ending the run.
    pub limits_hit: Vec<&'static str>,
    /// Peaks.
    pub usage: Usage,
    /// Refusals.
    pub denials: Vec<Denial>,
    /// Refusals that `denials` has no room for.
    pub denials_omitted: u64,
    /// Both streams, where they were captured.
    pub output: Captured,
    /// See `output`.
    pub error: Captured,
    /// Bytes that each stream carried.
    pub bytes: PerStream<u64>,
    /// Collected files.
    pub files: Vec<CollectedFile>,
    /// What was in force.
    pub receipt: Option<Receipt>,
}

/// Runs a plan.
///
/// # Errors
/// Something could not be put in place. Nothing of the payload has run, and nothing is
/// left behind.
pub fn launch(plan: &Plan, mut inputs: Inputs<'_>) -> Result<Outcome, LaunchError> {
    let signals = supervise::Signals::block()?;
    if plan.mode == Mode::Root {
        child::raise_core_limit().map_err(|errno| LaunchError::system(What::Prepare, "raise the limit of core dumps", errno))?;
    }
    let pending = cgroup::prepare(plan, inputs.record.as_mut())?;
    let (prepared, pipes) = prepared::Prepared::new(plan, &mut inputs, &pending.tasks())?;
    // The network namespace, the dearest of all, the child makes itself, beside us.
    let mut namespaces = clone::flags::NEWUSER | clone::flags::NEWNS | clone::flags::NEWPID | clone::flags::NEWUTS | clone::flags::NEWIPC;
    if !prepared.unshare_cgroup_namespace {
        namespaces |= clone::flags::NEWCGROUP;
    }
    let child = clone::clone_process(namespaces, pending.directory(), || child::enter(&prepared))
        .map_err(|errno| error::clone_failed(plan, errno))?;
    // From here on an early return kills the child, which waits for our word.
    let sandbox = supervise::Sandbox::new(child);
    let set_up = || -> Result<_, LaunchError> {
        // At once: a kernel that packs new tasks onto their parent's CPU would run the two
        // by turns, and a running process would have to be stopped to be moved.
        if let Some(cpus) = &prepared.cpus {
            let attempt = |errno| LaunchError::system(What::Prepare, "choose the sandbox's CPUs", errno);
            rustix::thread::sched_setaffinity(rustix::process::Pid::from_raw(sandbox.pid()), cpus).map_err(attempt)?;
        }
        let cgroup = pending.complete()?;
        let outer = identity::write_maps(plan, sandbox.pid())?;
        Ok((cgroup, outer))
    };
    // A child that failed first is the cause of what failed here.
    let (cgroup, outer) = set_up().map_err(|error| supervise::failure_of_child(plan, &pipes.status_read).unwrap_or(error))?;
    let lifeline = prepared.into_lifeline();
    supervise::supervise(plan, inputs, cgroup, sandbox, pipes, lifeline, signals, outer)
}
