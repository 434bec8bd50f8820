//! What the executor hands over and says, and the word that it gets for it: only when all of
//! it is in order may the program start.
//!
//! An event out of turn, or one that is none, ends the run.

use std::time::{Duration, Instant};

use rustix::{
    event::{Timespec, epoll},
    fd::OwnedFd,
    io::Errno,
    net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg},
    process::Pid,
    thread::sched_setaffinity,
};
use stockade_egress::gate::Gate;
use stockade_policy::plan::Plan;
use stockade_protocol::{
    LimitKey,
    frame::{Event, Evidence, Word},
    step::Step,
};

use super::{FEED, Phase, Supervision, Token, failed};
use crate::{
    LaunchError, What,
    child::{MOST_HANDED_OVER, MOUNTS_STAND, some_cpus},
    egress,
    error::step_failed,
    modules::Heard,
    prepared::tell,
    receipt,
    relay::is_readable,
    scratch::INTERVAL_MS,
};

/// The failure that the child has sent before it ended, if it has; not that it misses the
/// launcher, which follows from a failure of the launcher's own.
pub(crate) fn failure_of_child(plan: &Plan, status_read: &OwnedFd) -> Option<LaunchError> {
    // It was written before the child ended; a moment more for one that is about to.
    let mut fds = [rustix::event::PollFd::new(status_read, rustix::event::PollFlags::IN)];
    let moment = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
    if !matches!(rustix::event::poll(&mut fds, Some(&moment)), Ok(n) if n > 0) || rustix::io::ioctl_fionread(status_read).unwrap_or(0) == 0
    {
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
    match Step::from_number(step) {
        Some(step) => step_failed(plan, step, errno, usize::try_from(index).ok(), &String::from_utf8_lossy(detail)),
        None => LaunchError::other(What::Executor, format!("the sandbox failed at an unknown step {step}")),
    }
}

impl Supervision<'_> {
    pub(super) fn read_status(&mut self) -> Result<(), Errno> {
        let mut bytes = [0; 4096];
        let length = rustix::io::read(&self.status_read, &mut bytes)?;
        if length == 0 {
            return epoll::delete(&self.epoll, &self.status_read);
        }
        self.status.extend_from_slice(bytes.get(..length).unwrap_or_default());
        loop {
            match Event::take(&mut self.status) {
                Ok(Some(event)) => self.take_event(event),
                Ok(None) => return Ok(()),
                Err(_) => {
                    self.break_off(LaunchError::other(What::Executor, String::from("the executor sent something that is no event")));
                    return epoll::delete(&self.epoll, &self.status_read);
                }
            }
        }
    }

    fn take_event(&mut self, event: Event) {
        match (event, self.phase) {
            (Event::Ready(evidence), Phase::SettingUp) => self.become_ready(&evidence),
            (Event::Started, Phase::Ready) => self.phase = Phase::Started,
            (Event::Ended { status, user_us, system_us, last }, Phase::Started) => {
                self.phase = Phase::Ended;
                self.ended_at = Some(Instant::now());
                self.used_by_all = last;
                if last.is_none() {
                    // It waits for this.
                    self.note_cpu_of_living();
                    self.cgroup.kill();
                    self.sandbox.kill();
                }
                self.wait_status = Some(status);
                self.rusage_us = Some((user_us, system_us));
            }
            (Event::Failed { step, errno, index, detail }, Phase::SettingUp | Phase::Ready) if step != Step::WatchPayload as u16 => {
                self.phase = Phase::SettingUp;
                self.released = false;
                // Whatever the launcher met meanwhile followed from this.
                self.failure = None;
                self.break_off(word_failure(self.plan, step, errno, index, &detail));
            }
            (Event::Failed { step, errno, index, detail }, Phase::Ready | Phase::Started) => {
                self.break_off(word_failure(self.plan, step, errno, index, &detail));
            }
            _ => self.break_off(LaunchError::other(What::Executor, String::from("the executor sent an event out of turn"))),
        }
    }

    fn become_ready(&mut self, evidence: &Evidence) {
        self.sandbox.take_back();
        let Some(outside) = &self.outside else {
            return self
                .break_off(LaunchError::other(What::Executor, String::from("the executor was ready before the sandbox was handed over")));
        };
        self.receipt = Some(receipt::assemble(self.plan, outside, &self.cgroup, evidence, self.listener.is_some()));
        let now = Instant::now();
        self.phase = Phase::Ready;
        self.started_at = Some(now);
        if self.scratch_directory.is_some() && !self.plan.scratch.read_only && self.plan.scratch.size.or(self.plan.scratch.files).is_some()
        {
            self.next_scratch_count = Some(now + Duration::from_millis(INTERVAL_MS));
        }
        if self.plan.limits.get(LimitKey::Cpu).is_some() && self.cgroup.cpu().is_some() {
            self.next_cpu_check = Some(now);
        }
        // Only now: nothing of the caller's is read for a program that will not run.
        let fed = self.feed.as_mut().map_or(Ok(()), |feed| feed.start(&self.epoll, &FEED));
        if let Err(errno) = fed {
            self.break_off(failed("feed stdin")(errno));
        }
    }

    /// Keeps an executor that could roam where it has come to run.
    fn settle(&mut self) -> Result<(), Errno> {
        let Some(usable) = self.roams.take() else { return Ok(()) };
        let stat = self.outer.proc.read("stat")?;
        // Behind the name, which is the second field; proc_pid_stat(5) has this one as its 39th.
        let processor = stat.rsplit(')').next().and_then(|rest| rest.split_ascii_whitespace().nth(36));
        let cpu = processor.and_then(|number| number.parse().ok()).ok_or(Errno::BADMSG)?;
        sched_setaffinity(Pid::from_raw(self.sandbox.pid()), &some_cpus(&usable, cpu, self.plan.cpus))
    }

    /// Hears what the child has said: that its mounts stand, and then the descriptors that it
    /// hands over, once.
    pub(super) fn hear_child(&mut self) -> Result<(), Errno> {
        while self.outside.is_none() && is_readable(&self.handover)? {
            if !self.hear_message()? {
                return epoll::delete(&self.epoll, &self.handover);
            }
        }
        Ok(())
    }

    /// Hears one message; false: none is to follow.
    fn hear_message(&mut self) -> Result<bool, Errno> {
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_HANDED_OVER))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut tags = [0; MOST_HANDED_OVER];
        let message = recvmsg(&self.handover, &mut [std::io::IoSliceMut::new(&mut tags)], &mut ancillary, RecvFlags::CMSG_CLOEXEC);
        let message = match message {
            // It has ended instead, by its own word or by ours; ECONNRESET: with one unread.
            Ok(message) if message.bytes == 0 => return Ok(false),
            Err(Errno::CONNRESET) => return Ok(false),
            message => message?,
        };
        if tags.starts_with(&[MOUNTS_STAND]) {
            match self.expected.check_standing(&self.outer) {
                Ok(standing) => self.standing = Some(standing),
                Err(failure) => self.break_off(failure),
            }
            return Ok(true);
        }
        let mut fds = Vec::new();
        for received in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = received {
                fds.extend(rights);
            }
        }
        let mut to_close = None;
        for (tag, fd) in tags.iter().take(message.bytes).zip(fds) {
            match tag {
                b'r' => drop(self.root_fs.get_or_insert(fd)),
                b's' => self.scratch_fs = Some(fd),
                b't' => self.use_terminal(fd)?,
                b'm' => {
                    epoll::add(&self.epoll, &fd, Token::Modules.data(), epoll::EventFlags::IN)?;
                    self.modules = Some(Heard::new(fd));
                }
                b'l' => {
                    epoll::add(&self.epoll, &fd, Token::Listener.data(), epoll::EventFlags::IN)?;
                    self.listener = Some(fd);
                }
                b'p' => to_close = Some(fd),
                _ => {}
            }
        }
        // The executor is on its way, and waits for this before it starts the program.
        let standing = self.standing.take();
        let checked = self.expected.check(self.plan, &self.outer, &self.cgroup, standing).and_then(|outside| {
            // The gate has had the time of the steps since the pivot to confine itself.
            self.gate.as_ref().map_or(Ok(()), Gate::confirm).map_err(|error| egress::failed(&error))?;
            Ok(outside)
        });
        match checked {
            Ok(outside) => {
                let ignored_signals = outside.ignored_signals();
                self.outside = Some(outside);
                // The last moment at which no instruction of the program can have run.
                self.cpu_before = self.cgroup.cpu().unwrap_or_default();
                self.settle()?;
                self.released = tell(&self.lifeline, Word::Go { ignored_signals })?;
            }
            Err(failure) => self.break_off(failure),
        }
        // Now that nobody waits for us: it is a mount of its own, whose end takes its time.
        drop(to_close);
        Ok(false)
    }
}
