//! How far a run has come, and what there is by then.
//!
//! A state owns what exists in it and in no earlier one. Which event leads from one state to
//! the next is decided in `handshake.rs`.

use std::time::{Duration, Instant};

use rustix::thread::CpuSet;
use stockade_protocol::{Known, LayerReceipt, Receipt};

use super::SETUP_TIMEOUT;
use crate::receipt::{ExpectedSandbox, MountEvidence, OutsideEvidence};

/// How far a run has come.
pub(super) enum State {
    /// The child sets itself up.
    Setup(Setup),
    /// The launcher has compared what it can read from outside with the plan, and has sent Go.
    Verified(Verified),
    /// The executor has sent its own evidence too: the program may run from now on.
    Ready(Ready),
    /// The executor has started the program.
    Running(Ready),
    /// The program has ended.
    Ended(Ended),
    /// A step failed before the program was started.
    Failed,
}

/// What is known before the sandbox is verified.
pub(super) struct Setup {
    pub(super) since: Instant,
    /// How long the child may take to become ready.
    pub(super) timeout: Duration,
    /// CPUs among which a prepared executor may move until it is told to go.
    pub(super) usable_cpus: Option<CpuSet>,
    /// What the sandbox is compared with.
    pub(super) expected: ExpectedSandbox,
    /// None until the child has made its last mount.
    pub(super) mounts: Option<MountEvidence>,
}

/// What is known of a sandbox that is as planned.
pub(super) struct Verified {
    pub(super) since: Instant,
    pub(super) timeout: Duration,
    pub(super) evidence: OutsideEvidence,
    /// Before this no code ran.
    pub(super) told_at: Instant,
    /// The executor was alive when it was told to go.
    pub(super) told: bool,
}

/// What is known when the program may run.
pub(super) struct Ready {
    pub(super) since: Instant,
    pub(super) receipt: Receipt,
    /// See [`Verified::told_at`].
    pub(super) told_at: Instant,
    /// See [`Verified::told`].
    pub(super) told: bool,
}

/// What is known when the program has ended.
pub(super) struct Ended {
    pub(super) run: Ready,
    pub(super) at: Instant,
    /// Its status as wait(2) encodes it.
    pub(super) status: i32,
    /// Its CPU time, user and kernel, in microseconds.
    pub(super) cpu_us: (u64, u64),
    /// That of all processes of the code, where none is left.
    pub(super) cpu_us_of_all: Option<(u64, u64)>,
}

impl State {
    /// Whether the executor has not sent its evidence.
    pub(super) fn is_before_ready(&self) -> bool {
        matches!(self, State::Setup(_) | State::Verified(_) | State::Failed)
    }

    fn run(&self) -> Option<&Ready> {
        match self {
            State::Ready(run) | State::Running(run) | State::Ended(Ended { run, .. }) => Some(run),
            State::Setup(_) | State::Verified(_) | State::Failed => None,
        }
    }

    /// Whether the program may have run. An executor that never sent Ready never acted on Go.
    pub(super) fn is_released(&self) -> bool {
        self.run().is_some_and(|run| run.told)
    }

    /// Since when the program may run.
    pub(super) fn started_at(&self) -> Option<Instant> {
        self.run().map(|run| run.since)
    }

    /// Before when no code ran. The launcher may hear of the program's start after its end.
    pub(super) fn told_at(&self) -> Option<Instant> {
        self.run().map(|run| run.told_at)
    }

    /// What there is of the program's end.
    pub(super) fn end(&self) -> Option<&Ended> {
        match self {
            State::Ended(ended) => Some(ended),
            _ => None,
        }
    }

    /// By when the next state must be reached, how long that is, and what is missing then.
    /// Before the program is started no wall clock ends a sandbox that does not go on.
    pub(super) fn deadline(&self) -> Option<(Instant, Duration, &'static str)> {
        let (since, timeout, missing) = match self {
            State::Setup(Setup { since, timeout, .. }) | State::Verified(Verified { since, timeout, .. }) => {
                (*since, *timeout, "the sandbox was not ready")
            }
            State::Ready(ready) => (ready.since, SETUP_TIMEOUT, "the program was not started"),
            State::Running(_) | State::Ended(_) | State::Failed => return None,
        };
        Some((since + timeout, timeout, missing))
    }

    /// Adds to the receipt, once, what turns out to be missing while the program runs.
    pub(super) fn note_degraded(&mut self, layer: &'static str, reason: &str) {
        if let State::Ready(run) | State::Running(run) | State::Ended(Ended { run, .. }) = self
            && !run.receipt.degraded.iter().any(|name| name == layer)
        {
            run.receipt.degraded.push(String::from(layer));
            run.receipt.layers.push(LayerReceipt { layer, known: Known::Degraded, detail: String::from(reason) });
        }
    }

    /// The receipt, once it is complete.
    pub(super) fn into_receipt(self) -> Option<Receipt> {
        match self {
            State::Ready(run) | State::Running(run) | State::Ended(Ended { run, .. }) => Some(run.receipt),
            State::Setup(_) | State::Verified(_) | State::Failed => None,
        }
    }
}
