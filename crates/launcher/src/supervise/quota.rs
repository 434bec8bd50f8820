//! What happens by the clock: set-up time, wall clock, CPU time, the size of scratch and of /tmp,
//! and without a cgroup memory.
//!
//! A host scratch is counted now and then, while the code runs and can move what is counted. What
//! its file system has lost of free room tells how much could have been missed: where that is
//! beyond the limit the run is held still, and a count of what stands still decides. Others write
//! to the same file system, so the loss alone ends no run. Limits that the kernel enforces by
//! itself (processes, open files, memory in a cgroup) are not looked at here.

use std::time::{Duration, Instant};

use rustix::{
    event::epoll,
    fd::OwnedFd,
    fs::{MemfdFlags, Mode, fstat, memfd_create},
    io::Errno,
};
use stockade_protocol::LimitKey;

use super::{Listener, Supervision, Token, failed, memory::MemorySampler, sampler::FsSampler};
use crate::{
    OpenedScratch,
    cgroup::{Cgroup, CpuTime},
    error::ExecutorError,
    hold::Hold,
    processes::{self, FileQuery, NamelessFiles},
    relay::is_readable,
    scratch::{
        self, INTERVAL_MS, MAX_GLANCE_MS,
        usage::{self, TreeUse},
    },
    verdict::Cause,
};

/// What counting scratch is called in a failure.
pub(super) const COUNT: &str = "count what is in scratch";
/// By how much a scratch's file system may shrink during a run that has written as much.
const MAX_UNSEEN: u64 = 2 << 30;
/// How much more than the limit a file system must have lost before the run is held: a part of
/// the limit, within these. Else what others write would have an honest run held all the time.
const SLACK_PART: u64 = 4;
const MIN_SLACK: u64 = 4 << 20;
const MAX_SLACK: u64 = 64 << 20;
/// As fast as code could fill a file system: above what was measured.
const BYTES_PER_US: u64 = 4096;
const MIN_GLANCE: Duration = Duration::from_millis(5);
const MAX_GLANCE: Duration = Duration::from_millis(MAX_GLANCE_MS);
/// How often a held count is repeated that code has broken.
const MAX_HOLDS: u32 = 3;
/// How many times as long as a count took the pause after it is, up to the longest one.
const MIN_PAUSE: u32 = 29;
const MAX_PAUSE: Duration = Duration::from_secs(2);
/// A scratch that takes longer to count is not known to be within its limits: this much, and
/// some twenty times of what each entry and each descriptor takes.
const MIN_COUNT_TIMEOUT: Duration = Duration::from_secs(1);
const MAX_ENTRY_US: u64 = 50;
/// The same where the number of entries is not limited.
const UNLIMITED_COUNT_TIMEOUT: Duration = Duration::from_secs(10);

/// Between looks for the kill that an event has announced.
const OOM_INTERVAL: Duration = Duration::from_millis(10);

/// What the launcher itself counts of a run's use, and when it looks next.
pub(super) struct Quota {
    /// CPU time of setting up: it counts neither as the program's nor against its limit.
    pub(super) cpu_before: CpuTime,
    /// None where no limit needs it, as below.
    next_cpu_check: Option<Instant>,
    next_scratch_count: Option<Instant>,
    /// When to look at what the file system of a host scratch has lost.
    next_glance: Option<Instant>,
    /// None where a cgroup limits memory, or nothing does.
    memory: Option<MemorySampler>,
    /// None unless the oom killer is about to strike.
    next_oom_look: Option<Instant>,
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
    /// Bytes that were free when the run began.
    free: u64,
    /// Bytes that would be free now without the run, as far as is known.
    free_without: u64,
}

/// What a count of a host scratch has come to.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counted {
    /// What the run is to be ended for.
    pub(super) cause: Option<Cause>,
    /// By how many bytes it has grown; none where the count did not come to its end. Less than
    /// nothing where code has deleted what lay there before.
    pub(super) grown: Option<i64>,
}

impl Counted {
    /// By how many bytes it has grown, if it has.
    pub(super) fn growth(&self) -> Option<u64> {
        self.grown.map(|grown| u64::try_from(grown).unwrap_or(0))
    }
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
            Ok(ScratchFs::Host(HostScratchFs { directory, before, rights, free, free_without: free }))
        });
        let scratch = host.transpose()?;
        Ok(Quota {
            cpu_before: CpuTime::default(),
            next_cpu_check: None,
            next_scratch_count: None,
            next_glance: None,
            memory: None,
            next_oom_look: None,
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

    /// Bytes in the file systems of the run's own, as they were last looked at.
    fn tmpfs(&self) -> u64 {
        self.sampler.scratch.bytes_at_last() + self.sampler.tmp.bytes_at_last()
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
            self.quota.next_glance = self.plan.scratch.size.map(|_| now + MIN_GLANCE);
        }
        self.quota.sample(now);
        if let (Cgroup::Absent, Some(limit)) = (&self.teardown.cgroup, self.plan.limits.get(LimitKey::Memory)) {
            match MemorySampler::new(limit, self.quota.tmpfs(), now) {
                Ok(memory) => self.quota.memory = Some(memory),
                Err(errno) => self.break_off(failed("count the run's memory")(errno)),
            }
        }
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
        let Quota { next_cpu_check, next_scratch_count, next_glance, next_oom_look, memory, sampler, .. } = &self.quota;
        let memory = memory.as_ref().map(|memory| memory.next);
        let counts = [*next_cpu_check, *next_scratch_count, *next_glance, *next_oom_look, memory, sampler.next];
        [next_state, wall, grace, listener].into_iter().chain(counts).flatten().min()
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
        if self.quota.next_oom_look.as_ref().is_some_and(is_due) {
            self.check_oom();
        }
        if self.quota.sampler.next.as_ref().is_some_and(is_due) {
            self.quota.sample(now);
        }
        if self.quota.memory.as_ref().is_some_and(|memory| is_due(&memory.next)) {
            self.check_memory();
        }
        if self.quota.next_glance.as_ref().is_some_and(is_due) {
            self.check_loss();
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

    /// Ends the run if the oom killer has struck. The event of cgroup v1 comes before the kill,
    /// and no second one after it.
    pub(super) fn check_oom(&mut self) {
        self.quota.next_oom_look = None;
        if self.teardown.cgroup.oom_kills() > 0 {
            self.end(Cause::OutOfMemory);
        } else if matches!(self.teardown.cgroup, Cgroup::V1(_)) {
            self.quota.next_oom_look = Some(Instant::now() + OOM_INTERVAL);
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

    fn check_memory(&mut self) {
        self.quota.sample(Instant::now());
        let tmpfs = self.quota.tmpfs();
        let pid = self.teardown.sandbox.pid();
        if !self.all_have_ended() && self.quota.memory.as_mut().is_some_and(|memory| memory.look(pid, tmpfs)) {
            self.quota.memory = None;
            self.end(Cause::OutOfMemory);
        }
    }

    /// Counting may take long in a large tree: it takes a thirtieth of the time, up to the longest pause.
    fn check_scratch(&mut self) {
        let before = Instant::now();
        self.quota.next_scratch_count = None;
        match self.count_scratch(false) {
            Ok(counted) => {
                self.take_count(counted, false);
                if counted.grown.is_none() {
                    // What the file system has lost may have ended it.
                    self.quota.next_glance = self.quota.next_glance.and(Some(before));
                }
                if counted.cause.is_none() {
                    let pause = (before.elapsed() * MIN_PAUSE).clamp(Duration::from_millis(INTERVAL_MS), MAX_PAUSE);
                    self.quota.next_scratch_count = Some(Instant::now() + pause);
                }
            }
            Err(errno) => self.break_off(failed(COUNT)(errno)),
        }
    }

    /// Looks at what the file system has lost; where that is beyond what the run may have, holds
    /// the run and counts.
    fn check_loss(&mut self) {
        self.quota.next_glance = None;
        let (Some(host), Some(most)) = (self.quota.host_scratch(), self.max_loss()) else { return };
        match host.lost() {
            Ok(lost) if lost > most && !self.all_have_ended() => {
                // What it frees is not to be taken for what others have written.
                processes::free_unreachable();
                self.count_held();
            }
            Ok(_) => {}
            Err(errno) => return self.break_off(failed(COUNT)(errno)),
        }
        if let (None, Some(Ok(lost))) = (self.cause, self.quota.host_scratch().map(HostScratchFs::lost)) {
            let pause = Duration::from_micros(most.saturating_sub(lost) / BYTES_PER_US).clamp(MIN_GLANCE, MAX_GLANCE);
            self.quota.next_glance = Some(Instant::now() + pause);
        }
    }

    /// What the file system may lose before the run is held.
    fn max_loss(&self) -> Option<u64> {
        self.plan.scratch.size.map(|limit| limit.saturating_add((limit / SLACK_PART).clamp(MIN_SLACK, MAX_SLACK)))
    }

    /// Counts while the run stands still, so that nothing can be moved behind the count.
    fn count_held(&mut self) {
        for _ in 0..MAX_HOLDS {
            let Some(hold) = Hold::take(self.teardown.sandbox.pid()) else { break };
            match self.count_scratch(true) {
                Ok(counted) if counted.cause.is_some() || counted.grown.is_none() => return self.take_count(counted, true),
                Ok(counted) if hold.is_whole() => return self.take_count(counted, true),
                // Something went on: a signal of another process of the user, or the code's own.
                Ok(_) => {}
                Err(errno) => return self.break_off(failed(COUNT)(errno)),
            }
        }
        if !self.all_have_ended() {
            self.end(Cause::Uncounted);
        }
    }

    /// Ends the run if it is to be ended, and learns what others have written: in a held count all
    /// that the run has not. Else it could be what code has moved behind the count.
    fn take_count(&mut self, counted: Counted, held: bool) {
        self.quota.scratch_peak = self.quota.scratch_peak.max(counted.growth().unwrap_or(0));
        if let (Some(grown), Some(ScratchFs::Host(host))) = (counted.grown, &mut self.quota.scratch)
            && let Ok(free) = usage::free_bytes(&host.directory)
        {
            let without = free.saturating_add_signed(grown);
            host.free_without = if held { without } else { host.free_without.max(without) };
        }
        if let Some(cause) = counted.cause {
            self.end(cause);
        }
    }

    /// Counts the host scratch; `held`: while the run stands still, so that what is there but not
    /// found lies with others, or where no count finds it.
    ///
    /// # Errors
    /// It cannot be counted.
    pub(super) fn count_scratch(&self, held: bool) -> Result<Counted, Errno> {
        let Some(host) = self.quota.host_scratch().filter(|_| !self.plan.scratch.read_only) else { return Ok(Counted::default()) };
        let ended_for = |cause| Ok(Counted { cause: Some(cause), ..Counted::default() });
        let limit = self.plan.scratch.size;
        // The filter refuses what keeps deleted files that nothing shows. Where a policy allows more
        // (io_uring, fanotify), what the file system has lost bounds them. Others write there too, so
        // the bound is wide, and the run must have written as much.
        let lost = host.free.saturating_sub(usage::free_bytes(&host.directory)?);
        if limit.is_some_and(|limit| lost > limit.saturating_mul(4).max(MAX_UNSEEN))
            && !self.all_have_ended()
            && processes::written(self.teardown.sandbox.pid()).is_none_or(|written| written >= lost)
        {
            return ended_for(Cause::Disk(LimitKey::ScratchSize));
        }
        let begun = Instant::now();
        let timeout = self.count_timeout(host);
        let mut goes_on = self.may_count(begun + timeout, if held { None } else { self.max_loss() });
        let nameless = if self.all_have_ended() { Some(NamelessFiles::default()) } else { self.nameless(host, held, &mut goes_on)? };
        let in_nameless = nameless.as_ref().map_or(0, NamelessFiles::bytes);
        let grown = |now: &TreeUse| (now.bytes + in_nameless).saturating_sub(host.before.bytes);
        let too_large = |now: &TreeUse| limit.is_some_and(|limit| grown(now) > limit);
        let too_many = |now: &TreeUse| self.plan.scratch.files.is_some_and(|limit| now.entries.saturating_sub(host.before.entries) > limit);
        let now = if nameless.is_some() { host.count(|now| too_large(now) || too_many(now), &mut goes_on)? } else { None };
        let Some(now) = now else {
            // Else something is to be done first, and it is counted after that.
            let cause = (begun.elapsed() >= timeout).then_some(Cause::Uncounted);
            return Ok(Counted { cause, ..Counted::default() });
        };
        let unseen = nameless.is_some_and(|nameless| nameless.may_be_more());
        let is_lost = || Ok(self.max_loss().is_some_and(|most| host.lost().is_ok_and(|lost| lost > most)));
        let cause = match (too_large(&now), too_many(&now)) {
            (true, _) => Some(Cause::Disk(LimitKey::ScratchSize)),
            (_, true) => Some(Cause::Disk(LimitKey::ScratchFiles)),
            // What was closed to the count while the code ran could hold anything.
            _ if now.closed > host.before.closed => Some(Cause::Uncounted),
            // So could what nothing shows, where as much is missing.
            _ => (held && unseen && is_lost()?).then_some(Cause::Uncounted),
        };
        let bytes = i64::try_from(now.bytes + in_nameless).unwrap_or(i64::MAX);
        let grown = bytes.saturating_sub(i64::try_from(host.before.bytes).unwrap_or(i64::MAX));
        Ok(Counted { cause, grown: Some(grown) })
    }

    /// What of the scratch has no name any more; thoroughly where `held`.
    fn nameless(&self, host: &HostScratchFs, held: bool, goes_on: &mut dyn FnMut() -> bool) -> Result<Option<NamelessFiles>, Errno> {
        let device = fstat(&host.directory)?.st_dev;
        let tmpfs = self.quota.tmp.as_ref().map(fstat).transpose()?.map(|stat| stat.st_dev);
        let memory = fstat(memfd_create("stockade", MemfdFlags::CLOEXEC)?)?.st_dev;
        // Some file systems show another device in a map: so all but what is known not to be it.
        let may_be = |device| Some(device) != tmpfs && device != memory;
        let wanted = FileQuery { device, maps: held.then_some(&may_be) };
        Ok(NamelessFiles::of(self.teardown.sandbox.pid(), &wanted, goes_on))
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
    /// it is counted once more. `most`: nor beyond this loss of the file system.
    fn may_count(&self, until: Instant, most: Option<u64>) -> impl FnMut() -> bool {
        let grace = self.quota.grace.map(|(at, _)| at);
        let until = [self.wall_deadline(), grace].into_iter().flatten().fold(until, Instant::min);
        let alive = !self.all_have_ended();
        let host = self.quota.host_scratch();
        let is_lost = move || most.zip(host).is_some_and(|(most, host)| host.lost().is_ok_and(|lost| lost > most));
        move || !alive || (Instant::now() < until && !is_lost() && !is_readable(&self.teardown.signals).unwrap_or(true))
    }
}

impl HostScratchFs {
    /// By how many bytes its file system has less room than it would have without the run.
    fn lost(&self) -> Result<u64, Errno> {
        Ok(self.free_without.saturating_sub(usage::free_bytes(&self.directory)?))
    }

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
