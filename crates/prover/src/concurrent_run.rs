//! A second run at the same time as the attacks, under the same policy and in the same
//! scratch.
//!
//! A launcher has one run at a time, so this one is another process of this program. It
//! ends with the proof, or by its wall clock if the proof is killed.

use std::{
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};
use stockade_engine::{Options, Refusal, load_policy};
use stockade_protocol::LimitKey;

use crate::{
    attack::Limits,
    attacks::{READY, concurrent_script},
    fixture::Fixture,
    inside::{Inside, ProbeBatch},
};

/// How long it may take to be ready.
const START_TIMEOUT: Duration = Duration::from_secs(10);
/// Its wall clock, which ends it where the proof does not.
const MAX_LIFE_MS: u64 = 30_000;

/// The second run; dropping this ends it.
pub(crate) struct ConcurrentRun {
    child: Child,
}

impl ConcurrentRun {
    /// Starts it and waits until its targets are ready; `None` if they do not become so.
    pub(crate) fn start(fixture: &Fixture, options: &Options) -> Option<Self> {
        let mut command = Command::new("/proc/self/exe");
        command.arg("prove").arg("--concurrent").arg(&fixture.scratch);
        command.args(options.policy_arguments());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut run = ConcurrentRun { child: command.spawn().ok()? };
        let end = Instant::now() + START_TIMEOUT;
        while Instant::now() < end && run.is_there() {
            if fixture.scratch.join(READY).symlink_metadata().is_ok() {
                return Some(run);
            }
            thread::sleep(Duration::from_millis(5));
        }
        None
    }

    /// Whether it still runs.
    pub(crate) fn is_there(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }
}

impl Drop for ConcurrentRun {
    fn drop(&mut self) {
        if self.is_there() {
            let _gone = kill_process(Pid::from_child(&self.child), Signal::TERM);
        }
        let _reaped = self.child.wait();
    }
}

/// What the second process does: it is the run that a proof in `options.scratch` attacks.
///
/// # Errors
/// It was not started, or was ended; the proof ends it so.
pub fn run_concurrently(options: &Options) -> Result<(), Refusal> {
    let loaded = load_policy(options)?;
    let proof = options.scratch.as_deref().and_then(|scratch| scratch.parent()?.parent()?.file_name()).unwrap_or_default();
    let most = loaded.policy.limits_max.get(LimitKey::Wall).map_or(MAX_LIFE_MS, |most| MAX_LIFE_MS.min(most));
    let probe_batch = ProbeBatch {
        prelude: concurrent_script(&proof.to_string_lossy(), &loaded.policy),
        limits: Limits::from([(LimitKey::Wall, Some(most))]),
        ..ProbeBatch::default()
    };
    Inside { loaded: &loaded, options }.run(&probe_batch).map(drop)
}
