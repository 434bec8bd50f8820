//! A process beside a session that makes a template.
//!
//! It is this program once more, with the subcommand `templates make`: a session answers meanwhile,
//! and what becomes of the other process never becomes its own. The image is its stdout, and what it
//! has to say comes in one line on stderr. It ends with the session.

use std::{
    cell::Cell,
    io::Read,
    process::{Child, ChildStderr, Command, Stdio},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use rustix::{
    fd::OwnedFd,
    fs::{SealFlags, fcntl_get_seals},
    io::{Errno, fcntl_dupfd_cloexec},
    process::{Pid, Signal, kill_process},
};
use serde::{Deserialize, Serialize};
use stockade_policy::{model, plan::Plan};

use super::{
    Made, NoTemplate, Template,
    make::{empty_image, errno_of, file_failed, plan_of_copies},
    start_sha256,
};
use crate::{LoadedPolicy, Options, admit::unique_stem};

/// How long it has to end its run.
const ENDS_WITHIN: Duration = Duration::from_secs(5);
/// The most that it says.
const MAX_ANSWER: usize = 1 << 20;

/// What the process says at its end.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// The image is complete, sealed and tried.
    Made(Made),
    /// There is none, for this reason, and the next try would make none either.
    Refused(String),
    /// There is none this time, for this reason.
    Failed(String),
}

/// The process at work. Dropping it ends it.
pub(super) struct Maker {
    child: Child,
    answer: ChildStderr,
    read: Vec<u8>,
    image: Arc<OwnedFd>,
    stem: String,
    plan: Plan,
    template: model::Template,
}

/// How far it is.
pub(super) enum Progress {
    Going(Maker),
    Made(Template),
    /// The template is no good start: the next would be none either.
    Refused(String),
    /// It has ended without an answer, or with one that another try may change.
    Broken(String),
}

impl Maker {
    pub(super) fn start(runtime: &str, loaded: &LoadedPolicy, options: &Options) -> Result<Self, NoTemplate> {
        let (_, template) = loaded.policy.template_of(runtime).ok_or_else(|| NoTemplate::Unnamed(runtime.to_owned()))?;
        let stem = unique_stem().map_err(|refusal| NoTemplate::NotStarted(Box::new(refusal)))?;
        let plan = plan_of_copies(runtime, &stem, loaded, options)?;
        let image = empty_image()?;
        let stdout = fcntl_dupfd_cloexec(&image, 0).map_err(file_failed("hand on the image"))?;
        let mut command = Command::new("/proc/self/exe");
        command.args(["templates", "make", runtime, "--stem", &stem, "--session", &std::process::id().to_string()]);
        command.args(options.policy_arguments());
        let started = command.stdin(Stdio::null()).stdout(stdout).stderr(Stdio::piped()).spawn();
        let mut child = started.map_err(|error| file_failed("start the process that makes it")(errno_of(&error)))?;
        let answer = child.stderr.take().ok_or_else(|| file_failed("hear the process that makes it")(Errno::BADF))?;
        let maker = Maker { child, answer, read: Vec::new(), image: Arc::new(image), stem, plan, template: template.clone() };
        rustix::io::ioctl_fionbio(&maker.answer, true).map_err(file_failed("hear the process that makes it"))?;
        Ok(maker)
    }

    /// Whether it has ended, and with what. Waits for nothing but the end of a process that has said so.
    pub(super) fn poll(mut self) -> Progress {
        loop {
            let mut part = [0; 4096];
            match self.answer.read(&mut part) {
                Ok(0) => return self.end(),
                Ok(count) if self.read.len() < MAX_ANSWER => self.read.extend(part.iter().take(count)),
                Ok(_) => return Progress::Refused(NoTemplate::Maker(String::from("it said too much")).to_string()),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Progress::Going(self),
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Progress::Refused(NoTemplate::Maker(error.to_string()).to_string()),
            }
        }
    }

    /// Whether nothing can change the image any more.
    fn is_sealed(&self) -> bool {
        fcntl_get_seals(&self.image).is_ok_and(|seals| seals.contains(SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK))
    }

    fn end(self) -> Progress {
        match serde_json::from_slice(&self.read) {
            Ok(Answer::Made(made)) if made.start_sha256 == start_sha256(&self.plan) && self.is_sealed() => Progress::Made(Template {
                image: Arc::clone(&self.image),
                stem: self.stem.clone(),
                plan: self.plan.clone(),
                made,
                since: Instant::now(),
                max_age: self.template.max_age,
                runs_left: Cell::new(self.template.max_runs),
            }),
            Ok(Answer::Made(_)) => Progress::Refused(String::from("the policy is another one than when the session began")),
            Ok(Answer::Refused(why)) => Progress::Refused(why),
            Ok(Answer::Failed(why)) => Progress::Broken(why),
            Err(_) => {
                let said = String::from_utf8_lossy(&self.read);
                Progress::Broken(NoTemplate::Maker(said.lines().last().unwrap_or("without a word").to_owned()).to_string())
            }
        }
    }
}

impl Drop for Maker {
    fn drop(&mut self) {
        // It ends its run, and leaves nothing behind. Not waited for yet, so the pid is its own.
        if let Some(pid) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            let _ended = kill_process(pid, Signal::TERM);
        }
        let end = Instant::now() + ENDS_WITHIN;
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < end {
            thread::sleep(Duration::from_millis(1));
        }
        // The next start clears away what it leaves then.
        let _gone = self.child.kill();
        let _reaped = self.child.wait();
    }
}
