//! A process that makes a template beside a session or a service.
//!
//! It is this program once more, with the subcommand `templates make`: who has started it answers
//! meanwhile, and what becomes of the other process never becomes its own. The image is its stdout, and
//! what it has to say comes in one line on stderr. It ends with the one that has started it.

use std::{
    io::Read,
    process::{Child, ChildStderr, Stdio},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use rustix::{
    fd::{AsFd, BorrowedFd, OwnedFd},
    io::{Errno, fcntl_dupfd_cloexec},
    process::{Pid, Signal, kill_process},
};
use serde::{Deserialize, Serialize};
use stockade_policy::plan::MAIN;

use super::{
    Made, NoTemplate, TemplateImage,
    make::{empty_image, errno_of, file_failed},
};
use crate::{
    Options,
    own_program::{own_program, own_program_of_service},
};

/// How long it has to end its run.
const ENDS_WITHIN: Duration = Duration::from_secs(5);
/// The most that it says.
const MAX_ANSWER: usize = 1 << 20;
/// The most letters of a reason: it may be what code of the template has printed, and stands in every
/// receipt of a run that goes without a copy.
const MAX_REASON: usize = 1024;

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
pub struct Maker {
    child: Child,
    answer: ChildStderr,
    read: Vec<u8>,
    image: Arc<OwnedFd>,
}

/// How far it is.
pub enum Progress {
    /// It is at work.
    Going(Maker),
    /// It has made this.
    Made(TemplateImage),
    /// The template is no good start: the next would be none either.
    Refused(String),
    /// It has ended without an answer, or with one that another try may change.
    Broken(String),
}

impl Maker {
    /// Starts it. Its policy, interpreters and key are those of the options. `stem`: what the names of
    /// its copies' programs begin with.
    ///
    /// # Errors
    /// There is no memory, or no process.
    pub fn start(runtime: &str, stem: &str, options: &Options) -> Result<Self, NoTemplate> {
        let image = empty_image()?;
        let stdout = fcntl_dupfd_cloexec(&image, 0).map_err(file_failed("hand on the image"))?;
        let mut command = if options.key.is_some() { own_program_of_service() } else { own_program() };
        command.args(["templates", "make", runtime, "--stem", stem, "--session", &std::process::id().to_string()]);
        command.args(options.policy_arguments());
        if let Some(key) = &options.key {
            command.arg("--key").arg(key);
        }
        let started = command.stdin(Stdio::null()).stdout(stdout).stderr(Stdio::piped()).spawn();
        let mut child = started.map_err(|error| file_failed("start the process that makes it")(errno_of(&error)))?;
        let answer = child.stderr.take().ok_or_else(|| file_failed("hear the process that makes it")(Errno::BADF))?;
        let maker = Maker { child, answer, read: Vec::new(), image: Arc::new(image) };
        rustix::io::ioctl_fionbio(&maker.answer, true).map_err(file_failed("hear the process that makes it"))?;
        Ok(maker)
    }

    /// The same for copies whose programs are called as any in a scratch of its own, which those of a
    /// service's worker are.
    ///
    /// # Errors
    /// There is no memory, or no process.
    pub fn start_for_worker(runtime: &str, options: &Options) -> Result<Self, NoTemplate> {
        Self::start(runtime, MAIN, options)
    }

    /// Whether it has ended, and with what. Waits for nothing but the end of a process that has said so.
    pub fn poll(mut self) -> Progress {
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

    /// What becomes readable when it has something to say.
    pub fn answer(&self) -> BorrowedFd<'_> {
        self.answer.as_fd()
    }

    fn end(self) -> Progress {
        match serde_json::from_slice(&self.read) {
            Ok(Answer::Made(made)) => {
                let image = TemplateImage { file: Arc::clone(&self.image), made };
                if image.is_sealed() { Progress::Made(image) } else { Progress::Refused(String::from("its image is not sealed")) }
            }
            Ok(Answer::Refused(why)) => Progress::Refused(shortened(&why)),
            Ok(Answer::Failed(why)) => Progress::Broken(shortened(&why)),
            Err(_) => {
                let said = String::from_utf8_lossy(&self.read);
                let last = shortened(said.lines().last().unwrap_or("without a word"));
                Progress::Broken(NoTemplate::Maker(last).to_string())
            }
        }
    }
}

/// A reason without what is beyond [`MAX_REASON`].
fn shortened(why: &str) -> String {
    match why.char_indices().nth(MAX_REASON) {
        Some((end, _)) => format!("{}...", why.get(..end).unwrap_or_default()),
        None => why.to_owned(),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_reason_is_cut_between_two_letters() {
        assert_eq!(shortened(&"é".repeat(MAX_REASON)), "é".repeat(MAX_REASON));
        assert_eq!(shortened(&"é".repeat(MAX_REASON + 1)), format!("{}...", "é".repeat(MAX_REASON)));
    }
}
