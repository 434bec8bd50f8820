//! What happens by the clock: set-up time, wall clock, CPU time, the size of scratch.

use std::time::{Duration, Instant};

use rustix::{event::epoll, fd::OwnedFd, io::Errno};
use stockade_protocol::LimitKey;

use super::{COUNT, Phase, SETUP_DEADLINE, Supervision, Token, failed};
use crate::{
    LaunchError, What,
    relay::is_readable,
    scratch::{self, INTERVAL_MS, TreeUse},
    verdict::Cause,
};

/// By how much a scratch's file system may shrink during a run, whoever it is.
const UNSEEN: u64 = 2 << 30;

/// A scratch that takes longer to count is not known to be within its limits: so much, and so
/// much for each entry and each descriptor that may be there, some twenty times what each
/// takes; this much where their number is not limited.
const SHORTEST_COUNT: Duration = Duration::from_secs(1);
const MOST_FOR_ENTRY_US: u64 = 50;
const LONGEST_COUNT: Duration = Duration::from_secs(10);

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
        let (size, files) = (self.plan.scratch.size, self.plan.scratch.files);
        // Deleted files that are in flight or only mapped are found by no walk. What the file
        // system has lost bounds them; others write there too, so the bound is wide.
        let lost = self.scratch_free.saturating_sub(scratch::free_bytes(directory)?);
        if over(size.map(|limit| limit.saturating_mul(4).max(UNSEEN)), lost) {
            return Ok((Some(Cause::Disk(LimitKey::ScratchSize)), None));
        }
        let begun = Instant::now();
        let longest = self.longest_count();
        let mut goes_on = self.may_count(begun + longest);
        let held = if self.all_have_ended() { Some(0) } else { scratch::held_open(self.sandbox.pid(), directory, &mut goes_on) };
        let before = self.scratch_before;
        let too_large = |now: &TreeUse| over(size, (now.bytes + held.unwrap_or(0)).saturating_sub(before.bytes));
        let too_many = |now: &TreeUse| over(files, now.entries.saturating_sub(before.entries));
        let too_much = |now: &TreeUse| too_large(now) || too_many(now);
        let now = if held.is_some() { self.counted(directory, too_much, &mut goes_on)? } else { None };
        let Some(now) = now else {
            // Else something is to be done first, and it is counted after that.
            return Ok(((begun.elapsed() >= longest).then_some(Cause::Uncounted), None));
        };
        let outgrown = match (too_large(&now), too_many(&now)) {
            (true, _) => Some(Cause::Disk(LimitKey::ScratchSize)),
            (_, true) => Some(Cause::Disk(LimitKey::ScratchFiles)),
            // What was closed to the count while the code ran could hold anything.
            _ => (now.closed > before.closed).then_some(Cause::Uncounted),
        };
        Ok((outgrown, Some(now.bytes.saturating_sub(before.bytes))))
    }

    /// How long a count may take: many times what it takes for as much as may be there.
    fn longest_count(&self) -> Duration {
        let limit = |key| self.plan.limits.get(key);
        let open = limit(LimitKey::Processes).zip(limit(LimitKey::OpenFiles)).map(|(processes, files)| processes.saturating_mul(files));
        let entries = self.plan.scratch.files.map(|files| files.saturating_add(self.scratch_before.entries));
        let most = entries.zip(open).map(|(entries, open)| entries.saturating_add(open));
        most.map_or(LONGEST_COUNT, |most| SHORTEST_COUNT + Duration::from_micros(most.saturating_mul(MOST_FOR_ENTRY_US)))
    }

    /// Whether a count may go on: until then, and no longer than the run itself, nor while a
    /// signal waits. Code can make it as long as it likes, by moving what was counted to where
    /// it is counted once more.
    fn may_count(&self, until: Instant) -> impl FnMut() -> bool {
        let wall = self.started_at.zip(self.plan.limits.get(LimitKey::Wall)).map(|(at, wall)| at + Duration::from_millis(wall));
        let until = [wall, self.ends_at.map(|(at, _)| at)].into_iter().flatten().fold(until, Instant::min);
        let alive = !self.all_have_ended();
        move || !alive || (Instant::now() < until && !is_readable(&self.signals).unwrap_or(true))
    }

    /// What lies in the scratch; none where the count was to end. Code that has closed the
    /// directory itself is counted all the same; if it closes it again at once, that counts as a
    /// directory closed below.
    fn counted(
        &self,
        directory: &OwnedFd,
        too_much: impl Fn(&TreeUse) -> bool,
        goes_on: &mut dyn FnMut() -> bool,
    ) -> Result<Option<TreeUse>, Errno> {
        match scratch::count_while(directory, &too_much, goes_on) {
            Err(Errno::ACCESS) => {}
            // It may have been closed in the midst of the count.
            Ok(Some(seen)) if seen.closed > self.scratch_before.closed => {}
            counted => return counted,
        }
        scratch::give_back(directory, self.scratch_rights)?;
        match scratch::count_while(directory, too_much, goes_on) {
            Err(Errno::ACCESS) => Ok(Some(TreeUse { closed: u64::MAX, ..self.scratch_before })),
            counted => counted,
        }
    }
}
