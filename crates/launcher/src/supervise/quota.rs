//! What happens by the clock: set-up time, wall clock, CPU time, the size of scratch and of /tmp.
//!
//! Limits that the kernel enforces by itself (memory, processes, open files) are not looked at
//! here.

use std::time::{Duration, Instant};

use rustix::{event::epoll, fd::OwnedFd, fs::Mode, io::Errno};
use stockade_protocol::LimitKey;

use super::{Listener, Supervision, Token, failed, sampler::FsSampler};
use crate::{
    OpenedScratch,
    cgroup::CpuTime,
    error::ExecutorError,
    relay::is_readable,
    scratch::{
        self, INTERVAL_MS,
        usage::{self, TreeUse},
    },
    verdict::Cause,
};

/// What counting scratch is called in a failure.
pub(super) const COUNT: &str = "count what is in scratch";
/// By how much a scratch's file system may shrink during a run, whichever process fills it.
const MAX_UNSEEN: u64 = 2 << 30;
/// A scratch that takes longer to count is not known to be within its limits: this much, and
/// some twenty times of what each entry and each descriptor takes.
const MIN_COUNT_TIMEOUT: Duration = Duration::from_secs(1);
const MAX_ENTRY_US: u64 = 50;
/// The same where the number of entries is not limited.
const UNLIMITED_COUNT_TIMEOUT: Duration = Duration::from_secs(10);

/// What the launcher itself counts of a run's use, and when it looks next.
pub(super) struct Quota {
    /// CPU time of setting up: it counts neither as the program's nor against its limit.
    pub(super) cpu_before: CpuTime,
    /// None where no limit needs it, as below.
    next_cpu_check: Option<Instant>,
    next_scratch_count: Option<Instant>,
    pub(super) sampler: FsSampler,
    /// By how many bytes a host scratch had grown at most when it was counted.
    pub(super) scratch_peak: u64,
    /// When the payload's time to end by itself is over, and the signal that it was told by.
    pub(super) grace: Option<(Instant, i32)>,
    /// None until the child has handed a private scratch over.
    pub(super) scratch: Option<ScratchFs>,
    /// The file system of `/tmp`, home and `/dev/shm`; none until it is handed over.
    pub(super) tmp: Option<OwnedFd>,
}

/// Where scratch is.
pub(super) enum ScratchFs {
    Host(HostScratchFs),
    /// A file system of the run's own.
    Private(OwnedFd),
}

/// A host scratch, and how it was before the run.
pub(super) struct HostScratchFs {
    pub(super) directory: OwnedFd,
    pub(super) before: TreeUse,
    /// What its owner could do with the directory itself.
    pub(super) rights: Mode,
    free: u64,
}

impl ScratchFs {
    /// Its root directory.
    pub(super) fn root(&self) -> &OwnedFd {
        match self {
            ScratchFs::Host(host) => &host.directory,
            ScratchFs::Private(root) => root,
        }
    }
}

impl Quota {
    /// `tmp`: what a session keeps. Without it the code's writable file systems are handed over
    /// by the child.
    pub(super) fn new(opened: Option<OpenedScratch>, tmp: Option<OwnedFd>) -> Result<Self, Errno> {
        let host = opened.map(|OpenedScratch { directory, before, rights, .. }| {
            let free = usage::free_bytes(&directory)?;
            Ok(ScratchFs::Host(HostScratchFs { directory, before, rights, free }))
        });
        let scratch = host.transpose()?;
        Ok(Quota {
            cpu_before: CpuTime::default(),
            next_cpu_check: None,
            next_scratch_count: None,
            sampler: FsSampler::default(),
            scratch_peak: 0,
            grace: None,
            scratch,
            tmp,
        })
    }

    /// The host scratch; none where the run has a private one.
    pub(super) fn host_scratch(&self) -> Option<&HostScratchFs> {
        match &self.scratch {
            Some(ScratchFs::Host(host)) => Some(host),
            Some(ScratchFs::Private(_)) | None => None,
        }
    }

    /// Looks at the file systems of the run's own.
    pub(super) fn sample(&mut self, now: Instant) {
        let private = match &self.scratch {
            Some(ScratchFs::Private(root)) => Some(root),
            Some(ScratchFs::Host(_)) | None => None,
        };
        self.sampler.look(private, self.tmp.as_ref(), now);
    }

    /// Whether scratch may have grown since it was last counted.
    pub(super) fn counts_scratch(&self) -> bool {
        self.next_scratch_count.is_some()
    }
}

impl Supervision<'_> {
    /// Begins to count what the program uses.
    pub(super) fn start_quota(&mut self, now: Instant) {
        let limits_scratch = !self.plan.scratch.read_only && self.plan.scratch.size.or(self.plan.scratch.files).is_some();
        if self.quota.host_scratch().is_some() && limits_scratch {
            self.quota.next_scratch_count = Some(now + Duration::from_millis(INTERVAL_MS));
        }
        self.quota.sample(now);
        if self.plan.limits.get(LimitKey::Cpu).is_some() && self.teardown.cgroup.cpu().is_some() {
            self.quota.next_cpu_check = Some(now);
        }
    }

    /// When the program's wall clock is over.
    fn wall_deadline(&self) -> Option<Instant> {
        let (started, wall) = self.state.started_at().zip(self.plan.limits.get(LimitKey::Wall))?;
        Some(started + Duration::from_millis(wall))
    }

    /// The next time at which something is to be done by the clock.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let wall = self.wall_deadline().filter(|_| self.state.end().is_none());
        let grace = self.quota.grace.map(|(at, _)| at);
        let next_state = self.state.deadline().map(|(at, ..)| at);
        let listener = self.listener.as_ref().and_then(|listener| listener.rests_until);
        let Quota { next_cpu_check, next_scratch_count, sampler, .. } = &self.quota;
        [next_state, wall, grace, *next_cpu_check, *next_scratch_count, sampler.next, listener].into_iter().flatten().min()
    }

    pub(super) fn check_deadlines(&mut self) {
        let now = Instant::now();
        let is_due = |at: &Instant| now >= *at;
        if let Some((_, after, missing)) = self.state.deadline().filter(|(at, ..)| is_due(at)) {
            self.break_off(ExecutorError::Overdue { missing, after }.into());
        }
        if self.state.end().is_none() && self.wall_deadline().as_ref().is_some_and(is_due) {
            self.end(Cause::WallClock);
        }
        if let Some((_, signal)) = self.quota.grace.take_if(|(at, _)| is_due(at)) {
            self.end(Cause::Cancelled(signal));
        }
        if self.quota.next_cpu_check.as_ref().is_some_and(is_due) {
            self.check_cpu(now);
        }
        if self.quota.sampler.next.as_ref().is_some_and(is_due) {
            self.quota.sample(now);
        }
        if self.quota.next_scratch_count.as_ref().is_some_and(is_due) {
            self.check_scratch();
        }
        if let Some(Listener { fd, denials, rests_until }) = &mut self.listener
            && rests_until.take_if(|at| is_due(at)).is_some()
        {
            denials.refill();
            let _gone = epoll::modify(&self.epoll, fd, Token::Listener.data(), epoll::EventFlags::IN);
        }
    }

    /// Looks again no sooner than the rest could be used up by all CPUs.
    fn check_cpu(&mut self, now: Instant) {
        let Some(limit_us) = self.plan.limits.get(LimitKey::Cpu).map(|ms| ms * 1000) else { return };
        let used = self.teardown.cgroup.cpu().unwrap_or_default().since(self.quota.cpu_before).total_us;
        if used >= limit_us {
            self.quota.next_cpu_check = None;
            return self.end(Cause::CpuTime);
        }
        let cpus = u64::try_from(self.plan.cpus.max(1)).unwrap_or(1);
        let wait = ((limit_us - used) / cpus).clamp(5_000, 250_000);
        self.quota.next_cpu_check = Some(now + Duration::from_micros(wait));
    }

    /// Counting may take long in a large tree: it takes a tenth of the time, within bounds.
    fn check_scratch(&mut self) {
        let before = Instant::now();
        self.quota.next_scratch_count = None;
        let counted = self.scratch_outgrown();
        if let Ok((_, Some(grown))) = counted {
            self.quota.scratch_peak = self.quota.scratch_peak.max(grown);
        }
        match counted {
            Ok((None, _)) => {
                let pause = (before.elapsed() * 9).clamp(Duration::from_millis(INTERVAL_MS), Duration::from_secs(1));
                self.quota.next_scratch_count = Some(Instant::now() + pause);
            }
            Ok((Some(cause), _)) => self.end(cause),
            Err(errno) => self.break_off(failed(COUNT)(errno)),
        }
    }

    /// What the host scratch is to end the run for, and by how many bytes it has grown.
    ///
    /// # Errors
    /// It cannot be counted.
    pub(super) fn scratch_outgrown(&self) -> Result<(Option<Cause>, Option<u64>), Errno> {
        let Some(host) = self.quota.host_scratch().filter(|_| !self.plan.scratch.read_only) else { return Ok((None, None)) };
        let over = |limit: Option<u64>, used: u64| limit.is_some_and(|limit| used > limit);
        let (size, files) = (self.plan.scratch.size, self.plan.scratch.files);
        // Deleted files that are in flight or only mapped are found by no walk. What the file
        // system has lost bounds them; others write there too, so the bound is wide.
        let lost = host.free.saturating_sub(usage::free_bytes(&host.directory)?);
        if over(size.map(|limit| limit.saturating_mul(4).max(MAX_UNSEEN)), lost) {
            return Ok((Some(Cause::Disk(LimitKey::ScratchSize)), None));
        }
        let begun = Instant::now();
        let timeout = self.count_timeout(host);
        let mut goes_on = self.may_count(begun + timeout);
        let pid = self.teardown.sandbox.pid();
        let held = if self.all_have_ended() { Some(0) } else { usage::held_open(pid, &host.directory, &mut goes_on) };
        let too_large = |now: &TreeUse| over(size, (now.bytes + held.unwrap_or(0)).saturating_sub(host.before.bytes));
        let too_many = |now: &TreeUse| over(files, now.entries.saturating_sub(host.before.entries));
        let too_much = |now: &TreeUse| too_large(now) || too_many(now);
        let now = if held.is_some() { host.count(too_much, &mut goes_on)? } else { None };
        let Some(now) = now else {
            // Else something is to be done first, and it is counted after that.
            return Ok(((begun.elapsed() >= timeout).then_some(Cause::Uncounted), None));
        };
        let outgrown = match (too_large(&now), too_many(&now)) {
            (true, _) => Some(Cause::Disk(LimitKey::ScratchSize)),
            (_, true) => Some(Cause::Disk(LimitKey::ScratchFiles)),
            // What was closed to the count while the code ran could hold anything.
            _ => (now.closed > host.before.closed).then_some(Cause::Uncounted),
        };
        Ok((outgrown, Some(now.bytes.saturating_sub(host.before.bytes))))
    }

    /// How long a count may take: many times what it takes for as much as may be there.
    fn count_timeout(&self, host: &HostScratchFs) -> Duration {
        let limit = |key| self.plan.limits.get(key);
        let open = limit(LimitKey::Processes).zip(limit(LimitKey::OpenFiles)).map(|(processes, files)| processes.saturating_mul(files));
        let entries = self.plan.scratch.files.map(|files| files.saturating_add(host.before.entries));
        let most = entries.zip(open).map(|(entries, open)| entries.saturating_add(open));
        most.map_or(UNLIMITED_COUNT_TIMEOUT, |most| MIN_COUNT_TIMEOUT + Duration::from_micros(most.saturating_mul(MAX_ENTRY_US)))
    }

    /// Whether a count may go on: until then, and no longer than the run itself, nor while a
    /// signal waits. Code can make it as long as it likes, by moving what was counted to where
    /// it is counted once more.
    fn may_count(&self, until: Instant) -> impl FnMut() -> bool {
        let grace = self.quota.grace.map(|(at, _)| at);
        let until = [self.wall_deadline(), grace].into_iter().flatten().fold(until, Instant::min);
        let alive = !self.all_have_ended();
        move || !alive || (Instant::now() < until && !is_readable(&self.teardown.signals).unwrap_or(true))
    }
}

impl HostScratchFs {
    /// What lies in the scratch; none where the count was to end. Code that has closed the
    /// directory itself is counted all the same; if it closes it again at once, that counts as a
    /// directory closed below.
    fn count(&self, too_much: impl Fn(&TreeUse) -> bool, goes_on: &mut dyn FnMut() -> bool) -> Result<Option<TreeUse>, Errno> {
        match usage::count_while(&self.directory, &too_much, goes_on) {
            Err(Errno::ACCESS) => {}
            // It may have been closed in the midst of the count.
            Ok(Some(seen)) if seen.closed > self.before.closed => {}
            counted => return counted,
        }
        self.give_back()?;
        match usage::count_while(&self.directory, too_much, goes_on) {
            Err(Errno::ACCESS) => Ok(Some(TreeUse { closed: u64::MAX, ..self.before })),
            counted => counted,
        }
    }

    /// Gives its owner back what code has taken of the directory itself.
    pub(super) fn give_back(&self) -> Result<(), Errno> {
        scratch::give_back(&self.directory, self.rights)
    }
}
