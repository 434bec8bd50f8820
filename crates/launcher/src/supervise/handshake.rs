//! What the child hands over and the executor reports, and when the executor is told to start
//! the program: only after everything that is read from outside was verified.
//!
//! A malformed event, or one of another state, ends the run. What the evidence must be is
//! decided in `receipt.rs`.

use std::time::Instant;

use rustix::{
    event::{PollFd, PollFlags, Timespec, epoll, poll},
    fd::OwnedFd,
    fs::{Mode, OFlags},
    io::Errno,
    process::Pid,
    thread::{CpuSet, sched_setaffinity},
};
use stockade_egress::gate::Gate;
use stockade_policy::plan::Plan;
use stockade_protocol::{
    frame::{Event, Evidence, ExecutorCommand},
    step::Step,
};

use super::{
    Listener, ProgramFile, Supervision, Token, failed,
    quota::{HostScratchFs, ScratchFs},
};
use crate::{
    LaunchError,
    child_data::tell,
    error::{ExecutorError, StepFailure},
    messages::ChildMessage,
    modules::HookEvents,
    notify::Denials,
    receipt::{self, OutsideEvidence},
    relay::is_readable,
    sequence::some_cpus,
    sock_diag::SockDiag,
    supervise::state::{Ended, Ready, State, Verified},
};

/// The descriptors by which child and executor speak to the launcher, and it to them.
pub(super) struct Handshake {
    pub(super) status_read: OwnedFd,
    /// Of the executor's frames, what is not a whole one yet.
    pub(super) status: Vec<u8>,
    pub(super) handover: OwnedFd,
    pub(super) lifeline: OwnedFd,
}

/// The failure that the child has sent before it ended, if it has; not that it misses the
/// launcher, which follows from a failure of the launcher's own.
pub(crate) fn failure_of_child(plan: &Plan, status_read: &OwnedFd) -> Option<LaunchError> {
    // It was written before the child ended; a moment more for one that is about to.
    let mut fds = [PollFd::new(status_read, PollFlags::IN)];
    let moment = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
    if !matches!(poll(&mut fds, Some(&moment)), Ok(n) if n > 0) || rustix::io::ioctl_fionread(status_read).unwrap_or(0) == 0 {
        return None;
    }
    let mut bytes = vec![0; 4096];
    let length = rustix::io::read(status_read, &mut bytes).ok()?;
    bytes.truncate(length);
    match Event::take(&mut bytes) {
        Ok(Some(Event::Failed { step, errno, .. }))
            if step == Step::DeathSignal as u16 && Errno::SRCH.raw_os_error() == i32::from(errno) =>
        {
            None
        }
        Ok(Some(Event::Failed { step, errno, index, detail })) => Some(word_failure(plan, step, errno, index, &detail)),
        _ => None,
    }
}

fn word_failure(plan: &Plan, step: u16, errno: u16, index: u32, detail: &[u8]) -> LaunchError {
    let errno = Errno::from_raw_os_error(i32::from(errno));
    let Some(step) = Step::from_number(step) else { return ExecutorError::UnknownStep(step).into() };
    StepFailure::new(plan, step, errno, usize::try_from(index).ok(), String::from_utf8_lossy(detail).into_owned()).into()
}

impl Handshake {
    /// Whether the status pipe holds something. At its end it stays readable for ever.
    pub(super) fn has_status(&self) -> bool {
        is_readable(&self.status_read).unwrap_or(false) && rustix::io::ioctl_fionread(&self.status_read).is_ok_and(|left| left > 0)
    }
}

impl Supervision<'_> {
    pub(super) fn read_status(&mut self) -> Result<(), Errno> {
        let mut bytes = [0; 4096];
        let length = rustix::io::read(&self.handshake.status_read, &mut bytes)?;
        if length == 0 {
            return epoll::delete(&self.epoll, &self.handshake.status_read);
        }
        self.handshake.status.extend_from_slice(bytes.get(..length).unwrap_or_default());
        loop {
            match Event::take(&mut self.handshake.status) {
                Ok(Some(event)) => self.take_event(event),
                Ok(None) => return Ok(()),
                Err(_) => {
                    self.break_off(ExecutorError::Malformed.into());
                    return epoll::delete(&self.epoll, &self.handshake.status_read);
                }
            }
        }
    }

    fn take_event(&mut self, event: Event) {
        match (event, std::mem::replace(&mut self.state, State::Failed)) {
            (Event::Ready(evidence), State::Verified(verified)) => self.become_ready(verified, &evidence),
            (Event::Ready(_), State::Setup(setup)) => {
                self.state = State::Setup(setup);
                self.break_off(ExecutorError::ReadyTooEarly.into());
            }
            (Event::Started, State::Ready(run)) => self.state = State::Running(run),
            (Event::Ended { status, user_us, system_us, last }, State::Running(run)) => {
                let cpu_us = (user_us, system_us);
                self.state = State::Ended(Ended { run, at: Instant::now(), status, cpu_us, cpu_us_of_all: last });
                if last.is_none() {
                    // Pid 1 waits for this.
                    self.kill();
                }
            }
            (Event::Failed { step, errno, index, detail }, State::Setup(_) | State::Verified(_) | State::Ready(_) | State::Failed)
                if step != Step::WatchPayload as u16 =>
            {
                // What the launcher met meanwhile followed from this.
                self.failure = None;
                self.break_off(word_failure(self.plan, step, errno, index, &detail));
            }
            (Event::Failed { step, errno, index, detail }, state @ (State::Ready(_) | State::Running(_))) => {
                self.state = state;
                self.break_off(word_failure(self.plan, step, errno, index, &detail));
            }
            (_, state) => {
                self.state = state;
                self.break_off(ExecutorError::OutOfTurn.into());
            }
        }
    }

    /// Holds the file that pid 1 has made under the request's name, a moment ago: code has not
    /// begun. Somebody of the host can have replaced it since, and loses that file.
    fn hold_program(&mut self) {
        let (Some((directory, name)), Some(scratch), ProgramFile::Unwritten) =
            (&self.plan.program_file, &self.quota.scratch, &self.program)
        else {
            return;
        };
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let Ok(file) = rustix::fs::openat(scratch.root(), name.as_str(), flags, Mode::empty()) else { return };
        if let Some(record) = &mut self.teardown.record
            && self.quota.host_scratch().is_some()
        {
            // Without it the file stays where this launcher is killed, and nothing else.
            let _best_effort = record.note_written(&directory.join(name), &file);
        }
        self.program = ProgramFile::Written(file);
    }

    fn become_ready(&mut self, verified: Verified, evidence: &Evidence) {
        self.teardown.sandbox.take_back();
        self.hold_program();
        let has_listener = self.listener.is_some();
        let receipt = receipt::assemble(self.plan, &verified.evidence, &self.teardown.cgroup, evidence, has_listener);
        let now = Instant::now();
        self.state = State::Ready(Ready { since: now, receipt, told_at: verified.told_at, told: verified.told });
        self.start_quota(now);
        // Only now: nothing of the caller's is read for a program that will not run.
        if let Err(errno) = self.streams.feed(&self.epoll) {
            self.break_off(failed("feed stdin")(errno));
        }
    }

    /// Reads what the child sends: that it has made its last mount, and then, once, the
    /// descriptors that it hands over.
    pub(super) fn read_handover(&mut self) -> Result<(), Errno> {
        while matches!(self.state, State::Setup(_)) {
            if !is_readable(&self.handshake.handover)? {
                return Ok(());
            }
            if !self.read_message()? {
                break;
            }
        }
        epoll::delete(&self.epoll, &self.handshake.handover)
    }

    /// Reads one message; false: none is to follow.
    fn read_message(&mut self) -> Result<bool, Errno> {
        // None: the child has ended instead, by itself or killed.
        let Some(message) = ChildMessage::recv(&self.handshake.handover)? else { return Ok(false) };
        let (root, scratch, listener, terminal, modules, proc, sock_diag) = match message {
            ChildMessage::MountsStand => {
                if let State::Setup(setup) = &mut self.state {
                    let checked = setup.expected.check_mounts(&self.outer).map(|mounts| setup.mounts = Some(mounts));
                    if let Err(failure) = checked.and_then(|()| self.look_again()) {
                        // What the child may have handed over already starts nothing any more.
                        self.break_off(failure);
                        return Ok(false);
                    }
                }
                return Ok(true);
            }
            ChildMessage::Handover { root, scratch, listener, terminal, modules, proc, sock_diag } => {
                (root, scratch, listener, terminal, modules, proc, sock_diag)
            }
        };
        if self.quota.tmp.is_none() {
            self.quota.tmp = Some(root);
        } else if self.plan.has_writable_root() {
            self.quota.writable_root = Some(root);
        }
        self.quota.scratch.get_or_insert(ScratchFs::Private(scratch));
        self.quota.sock_diag = sock_diag.map(SockDiag::new);
        if let Some(terminal) = terminal {
            self.streams.use_terminal(&self.epoll, terminal)?;
        }
        if let Some(modules) = modules {
            epoll::add(&self.epoll, &modules, Token::Modules.data(), epoll::EventFlags::IN)?;
            self.hooks = Some(HookEvents::new(modules));
        }
        if let Some(fd) = listener {
            epoll::add(&self.epoll, &fd, Token::Listener.data(), epoll::EventFlags::IN)?;
            self.listener = Some(Listener { fd, denials: Denials::new(self.plan.filter.kill.clone()), rests_until: None });
        }
        match self.verify() {
            Ok(evidence) => self.release(evidence)?,
            Err(failure) => self.break_off(failure),
        }
        // Now that the executor does not wait for it: the end of a mount takes its time.
        drop(proc);
        Ok(false)
    }

    /// Looks through the host directories for what was moved past the first look, while the child goes
    /// on to confine itself.
    fn look_again(&mut self) -> Result<(), LaunchError> {
        let failed = |errno, detail| StepFailure::new(self.plan, Step::ScratchRule, errno, None, detail);
        for HostScratchFs { directory, second_look, .. } in self.quota.hosts_mut() {
            match second_look.take().map_or(Ok(None), |look| look.missed(directory)) {
                Ok(None) => {}
                Ok(Some(path)) => return Err(failed(Errno::STALE, path.display().to_string()).into()),
                Err(errno) => return Err(failed(errno, String::new()).into()),
            }
        }
        Ok(())
    }

    /// Compares the sandbox with the plan. Meanwhile the executor starts, and then waits for the
    /// result before it starts the program.
    fn verify(&mut self) -> Result<OutsideEvidence, LaunchError> {
        let State::Setup(setup) = &mut self.state else { return Err(ExecutorError::OutOfTurn.into()) };
        let evidence = setup.expected.check(self.plan, &self.outer, &self.teardown.cgroup, setup.mounts.take())?;
        // The gate has had the time of the steps since the pivot to confine itself.
        self.gate.as_ref().map_or(Ok(()), Gate::confirm)?;
        Ok(evidence)
    }

    /// Tells the executor to start the program.
    fn release(&mut self, evidence: OutsideEvidence) -> Result<(), Errno> {
        let State::Setup(setup) = &mut self.state else { return Ok(()) };
        // The last moment at which no instruction of the program can have run.
        self.quota.cpu_before = self.teardown.cgroup.cpu().unwrap_or_default();
        let (since, timeout) = (setup.since, setup.timeout);
        if let Some(usable) = setup.usable_cpus.take() {
            self.pin(&usable)?;
        }
        let ignored_signals = evidence.ignored_signals();
        if let Some(client) = &mut self.client {
            client.begins(self.teardown.sandbox.pid());
        }
        let told_at = Instant::now();
        let told = tell(&self.handshake.lifeline, ExecutorCommand::Go { ignored_signals })?;
        self.state = State::Verified(Verified { since, timeout, evidence, told_at, told });
        Ok(())
    }

    /// Keeps an executor that could move among these CPUs near the one on which it runs.
    fn pin(&self, usable: &CpuSet) -> Result<(), Errno> {
        let stat = self.outer.proc.read("stat")?;
        // Behind the name, which is the second field; proc_pid_stat(5) has this one as its 39th.
        let processor = stat.rsplit(')').next().and_then(|rest| rest.split_ascii_whitespace().nth(36));
        let cpu = processor.and_then(|number| number.parse().ok()).ok_or(Errno::BADMSG)?;
        sched_setaffinity(Pid::from_raw(self.teardown.sandbox.pid()), &some_cpus(usable, cpu, self.plan.cpus))
    }
}
