//! What happens by the clock: set-up time, wall clock, CPU time, the size of scratch.

use std::time::{Duration, Instant};

use rustix::{event::epoll, fd::OwnedFd, io::Errno};
use stockade_protocol::LimitKey;

use super::{COUNT, Phase, SETUP_DEADLINE, Supervision, Token, failed};
use crate::{
    LaunchError, What,
    scratch::{self, INTERVAL_MS, TreeUse},
    verdict::Cause,
};

/// By how much a scratch's file system may shrink during a run, whoever it is.
const UNSEEN: u64 = 2 << 30;

/// The sandbox's first process stands still.
pub(crate) fn overdue(what: &str, after: Duration) -> LaunchError {
    let message = format!(
        "{what} after {} s: the sandbox's first process was stopped from outside, gets no CPU time, or waits for a file system that does not answer; find out which (ps -o pid,stat,wchan,comm -e), then start it again",
        after.as_secs()
    );
    LaunchError::other(What::Executor, message)
}

impl Supervision<'_> {
    /// Until when the next phase must have come: before the program has started there may be
    /// no wall clock to end what stands still. With what is missing then.
    fn next_phase_by(&self) -> Option<(Instant, Duration, &'static str)> {
        let (since, patience, missing) = match self.phase {
            Phase::SettingUp => (self.begun, self.patience, "the sandbox was not ready"),
            Phase::Ready => (self.started_at?, SETUP_DEADLINE, "the program was not started"),
            Phase::Started | Phase::Ended => return None,
        };
        Some((since + patience, patience, missing))
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let wall = self.started_at.zip(self.plan.limits.get(LimitKey::Wall)).map(|(at, wall)| at + Duration::from_millis(wall));
        let ends_at = self.ends_at.map(|(at, _)| at);
        let next_phase = self.next_phase_by().map(|(at, ..)| at);
        [next_phase, wall, ends_at, self.next_cpu_check, self.next_scratch_count, self.listener_rests_until].into_iter().flatten().min()
    }

    pub(super) fn check_deadlines(&mut self) {
        let now = Instant::now();
        if let Some((_, patience, missing)) = self.next_phase_by().filter(|(at, ..)| now >= *at) {
            self.break_off(overdue(missing, patience));
        }
        if let (Some(at), None, Some(wall)) = (self.started_at, self.ended_at, self.plan.limits.get(LimitKey::Wall))
            && now >= at + Duration::from_millis(wall)
        {
            self.end(Cause::WallClock);
        }
        if let Some((_, signal)) = self.ends_at.take_if(|(at, _)| now >= *at) {
            self.end(Cause::Cancelled(signal));
        }
        if self.next_cpu_check.is_some_and(|at| now >= at) {
            self.check_cpu(now);
        }
        if self.next_scratch_count.is_some_and(|at| now >= at) {
            self.check_scratch();
        }
        if self.listener_rests_until.is_some_and(|at| now >= at) {
            self.listener_rests_until = None;
            self.denials.refill();
            if let Some(listener) = &self.listener {
                let _gone = epoll::modify(&self.epoll, listener, Token::Listener.data(), epoll::EventFlags::IN);
            }
        }
    }

    /// Looks again no sooner than the rest could be used up by all CPUs.
    fn check_cpu(&mut self, now: Instant) {
        let Some(limit_us) = self.plan.limits.get(LimitKey::Cpu).map(|ms| ms * 1000) else { return };
        let used = self.cgroup.cpu().unwrap_or_default().since(self.cpu_before).total_us;
        if used >= limit_us {
            self.next_cpu_check = None;
            return self.end(Cause::CpuTime);
        }
        let cpus = u64::try_from(self.plan.cpus.max(1)).unwrap_or(1);
        let wait = ((limit_us - used) / cpus).clamp(5_000, 250_000);
        self.next_cpu_check = Some(now + Duration::from_micros(wait));
    }

    /// Counting may take long in a large tree: it takes a tenth of the time, within bounds.
    fn check_scratch(&mut self) {
        let before = Instant::now();
        match self.scratch_outgrown() {
            Ok((None, _)) => {}
            Ok((Some(cause), _)) => {
                self.next_scratch_count = None;
                return self.end(cause);
            }
            Err(errno) => {
                self.next_scratch_count = None;
                return self.break_off(failed(COUNT)(errno));
            }
        }
        let pause = (before.elapsed() * 9).clamp(Duration::from_millis(INTERVAL_MS), Duration::from_secs(1));
        self.next_scratch_count = Some(Instant::now() + pause);
    }

    /// What the host scratch is to end the run for, and by how much it has grown.
    ///
    /// # Errors
    /// It cannot be counted.
    pub(super) fn scratch_outgrown(&self) -> Result<(Option<Cause>, Option<u64>), Errno> {
        let Some(directory) = self.scratch_directory.as_ref().filter(|_| !self.plan.scratch.read_only) else { return Ok((None, None)) };
        let over = |limit: Option<u64>, used: u64| limit.is_some_and(|limit| used > limit);
        let limit = self.plan.scratch.size;
        // Deleted files that are in flight or only mapped are found by no walk. What the file
        // system has lost bounds them; others write there too, so the bound is wide.
        let lost = self.scratch_free.saturating_sub(scratch::free_bytes(directory)?);
        if over(limit.map(|limit| limit.saturating_mul(4).max(UNSEEN)), lost) {
            return Ok((Some(Cause::Disk(LimitKey::ScratchSize)), None));
        }
        let held = if self.sandbox.is_over() { 0 } else { scratch::held_open(self.sandbox.pid(), directory) };
        let now = self.counted(directory)?;
        let too_large = over(limit, (now.bytes + held).saturating_sub(self.scratch_before.bytes));
        let too_many = over(self.plan.scratch.files, now.entries.saturating_sub(self.scratch_before.entries));
        let outgrown = match (too_large, too_many) {
            (true, _) => Some(Cause::Disk(LimitKey::ScratchSize)),
            (_, true) => Some(Cause::Disk(LimitKey::ScratchFiles)),
            // What was closed to the count while the code ran could hold anything.
            _ => (now.closed > self.scratch_before.closed).then_some(Cause::Uncounted),
        };
        Ok((outgrown, Some(now.bytes.saturating_sub(self.scratch_before.bytes))))
    }

    /// What lies in the scratch. Code that has closed the directory itself is counted all the
    /// same; if it closes it again at once, that counts as a directory closed below.
    fn counted(&self, directory: &OwnedFd) -> Result<TreeUse, Errno> {
        match scratch::count(directory) {
            Err(Errno::ACCESS) => {}
            // It may have been closed in the midst of the count.
            Ok(seen) if seen.closed > self.scratch_before.closed => {}
            counted => return counted,
        }
        scratch::give_back(directory, self.scratch_rights)?;
        match scratch::count(directory) {
            Err(Errno::ACCESS) => Ok(TreeUse { closed: u64::MAX, ..self.scratch_before }),
            counted => counted,
        }
    }
}
