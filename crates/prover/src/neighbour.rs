//! A second run beside the attacks, under the same policy and in the same scratch.
//!
//! A launcher has one run at a time, so this one is another process of this program. It
//! ends with the proof, and by its own wall clock if the proof is killed.

use std::{
    ffi::OsString,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};
use stockade_protocol::LimitKey;
use stockade_runtime::{Options, Refusal, load_policy};

use crate::{
    attack::Limits,
    attacks::{READY, neighbour},
    inside::{Errand, Inside},
    world::World,
};

/// So long it may take to be ready.
const PATIENCE: Duration = Duration::from_secs(10);
/// So long it lives where nobody ends it.
const LIFE_MS: u64 = 30_000;

/// See the module. Ended when dropped.
pub(crate) struct Neighbour {
    child: Child,
}

impl Neighbour {
    /// Starts it, and waits until it has what it is there for. None: it does not get so far.
    pub(crate) fn start(world: &World, options: &Options) -> Option<Self> {
        let mut command = Command::new("/proc/self/exe");
        command.arg("prove").arg("--beside").arg(&world.scratch);
        if let Some(policy) = &options.policy {
            command.arg(format!("--policy={policy}"));
        }
        for (name, path) in &options.interpreters {
            let mut runtime = OsString::from(format!("--runtime={name}="));
            runtime.push(path);
            command.arg(runtime);
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut neighbour = Neighbour { child: command.spawn().ok()? };
        let end = Instant::now() + PATIENCE;
        while Instant::now() < end && neighbour.is_there() {
            if world.scratch.join(READY).symlink_metadata().is_ok() {
                return Some(neighbour);
            }
            thread::sleep(Duration::from_millis(5));
        }
        None
    }

    /// It has not ended.
    pub(crate) fn is_there(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        if self.is_there() {
            let _gone = kill_process(Pid::from_child(&self.child), Signal::TERM);
        }
        let _reaped = self.child.wait();
    }
}

/// What that process does: it is the run beside which a proof in `options.scratch` tries
/// its attacks.
///
/// # Errors
/// It was not started, or was ended, as it is by its proof.
pub fn stand_beside(options: &Options) -> Result<(), Refusal> {
    let loaded = load_policy(options)?;
    let proof = options.scratch.as_deref().and_then(|scratch| scratch.parent()?.parent()?.file_name()).unwrap_or_default();
    let most = loaded.policy.limits_max.get(LimitKey::Wall).map_or(LIFE_MS, |most| LIFE_MS.min(most));
    let errand = Errand {
        prelude: neighbour(&proof.to_string_lossy(), &loaded.policy),
        limits: Limits::from([(LimitKey::Wall, Some(most))]),
        ..Errand::default()
    };
    Inside { loaded: &loaded, options }.run(&errand).map(drop)
}
