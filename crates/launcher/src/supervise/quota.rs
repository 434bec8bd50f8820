//! What happens by the clock: set-up time, wall clock, CPU time, the size of scratch and of /tmp,
//! kernel memory that no cgroup charges, and without a cgroup memory.
//!
//! A host scratch is counted now and then, while the code runs and can move what is counted. What
//! its file system has lost of free room tells how much could have been missed: where that is
//! beyond the limit, and a short count does not find it, the run is held still, and a count of what
//! stands still decides. Others write to the same file system, so the loss alone ends no run; what
//! no count explains is bounded where the run may have written as much. Limits that the kernel
//! enforces by itself (processes, open files, memory in a cgroup) are not looked at here.

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rustix::{
    event::epoll,
    fd::OwnedFd,
    fs::{MemfdFlags, Mode, fstat, memfd_create},
    io::Errno,
};
use stockade_policy::plan::Plan;
use stockade_protocol::LimitKey;

use super::{
    Listener, ProgramFile, Supervision, Token, failed,
    kernel_memory::KernelMemory,
    memory::{self, MemorySampler},
    sampler::FsSampler,
};
use crate::{
    OpenedScratch,
    cgroup::{Cgroup, CpuTime},
    error::ExecutorError,
    hold::Hold,
    processes::{self, FileQuery, NamelessFiles},
    scratch::{
        self, INTERVAL_MS, MAX_GLANCE_MS, SecondLook,
        usage::{self, FsRoom, LinkedFiles, TreeUse},
    },
    sock_diag::SockDiag,
    verdict::Cause,
};

/// What counting scratch is called in a failure.
pub(super) const COUNT: &str = "count what is in scratch";
/// What counting the kernel's memory is called in a failure.
pub(super) const COUNT_KERNEL_MEMORY: &str = "count what the kernel holds";
/// How much of what a file system has lost during a run may be explained by no held count, where
/// the run may have written as much: so many times the limit, at least this. Others write there too.
const UNEXPLAINED_TIMES: u64 = 4;
const MIN_UNEXPLAINED: u64 = 256 << 20;
/// How much more than the limit a file system must have lost before the run is held: a part of
/// the limit, within these. Else what others write would have an honest run held all the time.
const SLACK_PART: u64 = 4;
const MIN_SLACK: u64 = 4 << 20;
const MAX_SLACK: u64 = 64 << 20;
/// The same of files.
const FILE_SLACK_PART: u64 = 16;
const MIN_FILE_SLACK: u64 = 64;
const MAX_FILE_SLACK: u64 = 4096;
/// As fast as code could fill a file system: above what was measured.
const BYTES_PER_US: u64 = 4096;
const FILES_PER_US: u64 = 1;
const MIN_GLANCE: Duration = Duration::from_millis(5);
const MAX_GLANCE: Duration = Duration::from_millis(MAX_GLANCE_MS);
/// How long a short count takes at most, and how often there is one of a run that is not held yet.
const MAX_SHORT_COUNT: Duration = Duration::from_millis(10);
const SHORT_COUNT_INTERVAL: Duration = Duration::from_millis(5);
/// How much a run may write, beyond its limit, while it is about to be held.
const MIN_RESISTANCE: u64 = 16 << 20;
/// How often a held count is repeated that code has broken.
const MAX_HOLDS: u32 = 3;
/// How many times as long as a count took the pause after it is, up to the longest one.
const MIN_PAUSE: u32 = 39;
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
    /// None until it is handed over, once `kernel_memory` has it, and where the kernel has none.
    pub(super) sock_diag: Option<SockDiag>,
    /// None where nothing limits memory.
    pub(super) kernel_memory: Option<KernelMemory>,
    /// None unless the oom killer is about to strike.
    next_oom_look: Option<Instant>,
    pub(super) sampler: FsSampler,
    /// By how many bytes a host scratch had grown at most when it was counted.
    pub(super) scratch_peak: u64,
    /// When the payload's time to end by itself is over, and the signal that it was told by.
    pub(super) grace: Option<(Instant, i32)>,
    /// None until the child has handed a private scratch over.
    pub(super) scratch: Option<ScratchFs>,
    /// Further host directories, each with limits as a host scratch.
    pub(super) writable_trees: Vec<HostScratchFs>,
    /// The file system of `/tmp`, home and `/dev/shm`; none until it is handed over.
    pub(super) tmp: Option<OwnedFd>,
    /// The file system of what code changes of the root, where that of `tmp` is another.
    pub(super) writable_root: Option<OwnedFd>,
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
    /// Its path as the code sees it.
    inside: PathBuf,
    pub(super) before: TreeUse,
    pub(super) linked: LinkedFiles,
    /// Done once, when the sandbox has its mounts.
    pub(super) second_look: Option<Box<SecondLook>>,
    /// What its owner could do with the directory itself.
    pub(super) rights: Mode,
    /// What its file system had when the run began.
    room: FsRoom,
    /// What that would have now without the run, as far as is known.
    room_without: FsRoom,
}

/// How a host scratch is counted.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum CountMode {
    /// While the run goes on, until the file system has lost too much.
    Running,
    /// The same, for a short time, whatever it has lost: only what is found counts.
    Short,
    /// While the run stands still, so that what is there but not found lies with others, or where
    /// no count finds it.
    Held,
}

/// By how much the run's part of a file system has grown, or that file system has less room. Less
/// than nothing where code has deleted what lay there before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Growth {
    bytes: i64,
    files: i64,
}

impl Growth {
    fn between(before: &TreeUse, bytes: u64, entries: u64) -> Self {
        Growth { bytes: difference(before.bytes, bytes), files: difference(before.entries, entries) }
    }
}

/// From `before` to `now`.
fn difference(before: u64, now: u64) -> i64 {
    let signed = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
    signed(now) - signed(before)
}

/// How much a file system may lose.
#[derive(Clone, Copy, Debug, Default)]
struct MaxLoss {
    bytes: Option<u64>,
    files: Option<u64>,
}

impl MaxLoss {
    fn is_passed(&self, lost: Growth) -> bool {
        let passes = |most: Option<u64>, lost: i64| most.is_some_and(|most| u64::try_from(lost).is_ok_and(|lost| lost > most));
        passes(self.bytes, lost.bytes) || passes(self.files, lost.files)
    }

    /// How long it takes at least until more is lost.
    fn until_passed(&self, lost: Growth) -> Duration {
        let left = |most: Option<u64>, lost: i64| most.map_or(u64::MAX, |most| most.saturating_sub(u64::try_from(lost).unwrap_or(0)));
        Duration::from_micros((left(self.bytes, lost.bytes) / BYTES_PER_US).min(left(self.files, lost.files) / FILES_PER_US))
    }
}

/// What a count of a host scratch has come to.
#[derive(Clone, Debug, Default)]
pub(super) struct Counted {
    /// What the run is to be ended for.
    pub(super) cause: Option<Cause>,
    /// By how much each host directory has grown; none where the count did not come to its end.
    pub(super) grown: Option<Vec<Growth>>,
}

impl Counted {
    /// By how many bytes the one has grown that has grown most, if one has.
    pub(super) fn growth(&self) -> Option<u64> {
        self.grown.as_ref()?.iter().map(|grown| u64::try_from(grown.bytes).unwrap_or(0)).max()
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
    pub(super) fn new(
        plan: &Plan,
        opened: Option<OpenedScratch>,
        writable_trees: Vec<OpenedScratch>,
        tmp: Option<OwnedFd>,
    ) -> Result<Self, Errno> {
        let host = |OpenedScratch { directory, before, linked, second_look, rights, .. }, inside: &Path| {
            let room = usage::room(&directory)?;
            let inside = inside.to_path_buf();
            Ok(HostScratchFs { directory, inside, before, linked, second_look, rights, room, room_without: room })
        };
        let scratch = opened.map(|opened| host(opened, &plan.scratch.path).map(ScratchFs::Host)).transpose()?;
        let writable_trees = writable_trees
            .into_iter()
            .zip(&plan.writable_trees)
            .map(|(opened, tree)| host(opened, &tree.target))
            .collect::<Result<_, Errno>>()?;
        Ok(Quota {
            cpu_before: CpuTime::default(),
            next_cpu_check: None,
            next_scratch_count: None,
            next_glance: None,
            memory: None,
            sock_diag: None,
            kernel_memory: None,
            next_oom_look: None,
            sampler: FsSampler::default(),
            scratch_peak: 0,
            grace: None,
            scratch,
            writable_trees,
            tmp,
            writable_root: None,
        })
    }

    /// All directories of the host that the code may write.
    pub(super) fn hosts(&self) -> impl Iterator<Item = &HostScratchFs> {
        self.host_scratch().into_iter().chain(&self.writable_trees)
    }

    pub(super) fn hosts_mut(&mut self) -> impl Iterator<Item = &mut HostScratchFs> {
        let scratch = match &mut self.scratch {
            Some(ScratchFs::Host(host)) => Some(host),
            Some(ScratchFs::Private(_)) | None => None,
        };
        scratch.into_iter().chain(&mut self.writable_trees)
    }

    /// What the file system of one of them has lost at most; none where there is none.
    fn lost(&self) -> Result<Option<Growth>, Errno> {
        self.hosts().try_fold(None, |most: Option<Growth>, host| {
            let lost = host.lost()?;
            let most = most.unwrap_or(lost);
            Ok(Some(Growth { bytes: most.bytes.max(lost.bytes), files: most.files.max(lost.files) }))
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
        let of_root = self.writable_root.as_ref().and_then(usage::filesystem_use).map_or(0, |held| held.bytes);
        self.sampler.scratch.bytes_at_last() + self.sampler.tmp.bytes_at_last() + of_root
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
        if self.quota.hosts().next().is_some() && limits_scratch {
            self.quota.next_scratch_count = Some(now + Duration::from_millis(INTERVAL_MS));
            self.quota.next_glance = Some(now + MIN_GLANCE);
        }
        self.quota.sample(now);
        if let (Cgroup::Absent, Some(limit)) = (&self.teardown.cgroup, self.plan.limits.get(LimitKey::Memory)) {
            match MemorySampler::new(limit, self.quota.tmpfs(), now) {
                Ok(memory) => self.quota.memory = Some(memory),
                Err(errno) => self.break_off(failed("count the run's memory")(errno)),
            }
        }
        let sock_diag = self.quota.sock_diag.take();
        let open_files = self.plan.limits.get(LimitKey::OpenFiles).unwrap_or(u64::MAX);
        let uncharged_descriptors = self.teardown.cgroup.is_absent().then_some(open_files);
        let new = |limit| KernelMemory::new(limit, sock_diag, uncharged_descriptors, now);
        match self.plan.limits.get(LimitKey::Memory).map(new).transpose() {
            Ok(memory) => self.quota.kernel_memory = memory,
            Err(errno) => self.break_off(failed(COUNT_KERNEL_MEMORY)(errno)),
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
        let wall = self.wall_deadline().filter(|_| self.state.end().is_none() && !self.is_ending());
        let grace = self.quota.grace.map(|(at, _)| at);
        let next_state = self.state.deadline().map(|(at, ..)| at).filter(|_| !self.is_ending());
        let listener = self.listener.as_ref().and_then(|listener| listener.rests_until);
        let Quota { next_cpu_check, next_scratch_count, next_glance, next_oom_look, memory, sampler, .. } = &self.quota;
        let memory = memory.as_ref().map(|memory| memory.next);
        let kernel = self.quota.kernel_memory.as_ref().map(|memory| memory.next);
        let counts = [*next_cpu_check, *next_scratch_count, *next_glance, *next_oom_look, memory, kernel, sampler.next];
        [next_state, wall, grace, listener].into_iter().chain(counts).flatten().min()
    }

    pub(super) fn check_deadlines(&mut self) {
        let now = Instant::now();
        let is_due = |at: &Instant| now >= *at;
        if let Some((_, after, missing)) = self.state.deadline().filter(|(at, ..)| is_due(at) && !self.is_ending()) {
            self.break_off(ExecutorError::Overdue { missing, after }.into());
        }
        if self.state.end().is_none() && !self.is_ending() && self.wall_deadline().as_ref().is_some_and(is_due) {
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
        if self.quota.kernel_memory.as_ref().is_some_and(|memory| memory.is_due(now)) {
            self.check_kernel_memory();
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
        let Some(mut memory) = self.quota.memory.take().filter(|_| !self.is_ending() && !self.all_have_ended()) else { return };
        let now = Instant::now();
        self.quota.sample(now);
        let (pid, tmpfs) = (self.teardown.sandbox.pid(), self.quota.tmpfs());
        if memory.look(pid, tmpfs, &mut self.may_go_on(now + memory::MAX_TIME)) {
            self.end(Cause::OutOfMemory);
        } else {
            self.quota.memory = Some(memory);
        }
    }

    /// Counting may take long in a large tree: it takes a fortieth of the time, up to the longest pause.
    fn check_scratch(&mut self) {
        let before = Instant::now();
        self.quota.next_scratch_count = None;
        match self.count_scratch(CountMode::Running) {
            Ok(counted) => {
                let (is_whole, is_over) = (counted.grown.is_some(), counted.cause.is_some());
                self.take_count(counted, CountMode::Running);
                if !is_whole {
                    // What the file system has lost may have ended it.
                    self.quota.next_glance = self.quota.next_glance.and(Some(before));
                }
                if !is_over {
                    let pause = (before.elapsed() * MIN_PAUSE).clamp(Duration::from_millis(INTERVAL_MS), MAX_PAUSE);
                    self.quota.next_scratch_count = Some(Instant::now() + pause);
                }
            }
            Err(errno) => self.break_off(failed(COUNT)(errno)),
        }
    }

    /// Looks at what the file system has lost; where that is beyond what the run may have, counts,
    /// and where a short count does not find it, holds the run and counts.
    fn check_loss(&mut self) {
        self.quota.next_glance = None;
        let most = self.max_loss();
        match self.quota.lost() {
            Ok(Some(lost)) if most.is_passed(lost) && !self.all_have_ended() => {
                // What it frees is not to be taken for what others have written.
                processes::free_unreachable();
                match self.count_scratch(CountMode::Short) {
                    Ok(counted) if counted.cause.is_some() => self.take_count(counted, CountMode::Short),
                    Ok(_) => self.count_held(),
                    Err(errno) => return self.break_off(failed(COUNT)(errno)),
                }
            }
            Ok(_) => {}
            Err(errno) => return self.break_off(failed(COUNT)(errno)),
        }
        if let (None, Ok(Some(lost))) = (self.cause, self.quota.lost()) {
            self.quota.next_glance = Some(Instant::now() + most.until_passed(lost).clamp(MIN_GLANCE, MAX_GLANCE));
        }
    }

    /// What the file system may lose before the run is held.
    fn max_loss(&self) -> MaxLoss {
        let with_slack = |limit: u64, part: u64, least, most| limit.saturating_add((limit / part).clamp(least, most));
        MaxLoss {
            bytes: self.plan.scratch.size.map(|limit| with_slack(limit, SLACK_PART, MIN_SLACK, MAX_SLACK)),
            files: self.plan.scratch.files.map(|limit| with_slack(limit, FILE_SLACK_PART, MIN_FILE_SLACK, MAX_FILE_SLACK)),
        }
    }

    /// Counts while the run stands still, so that nothing can be moved behind the count.
    fn count_held(&mut self) {
        for _ in 0..MAX_HOLDS {
            let (hold, found) = self.hold();
            if let Some(counted) = found {
                return self.take_count(counted, CountMode::Short);
            }
            let Some(hold) = hold else { break };
            match self.count_scratch(CountMode::Held) {
                Ok(counted) if counted.cause.is_some() || counted.grown.is_none() => return self.take_count(counted, CountMode::Held),
                Ok(counted) if hold.is_whole() => return self.take_count(counted, CountMode::Held),
                // Something went on: a signal of another process of the user, or the code's own.
                Ok(_) => {}
                Err(errno) => return self.break_off(failed(COUNT)(errno)),
            }
        }
        if !self.all_have_ended() {
            self.end(Cause::Uncounted);
        }
    }

    /// Holds the run. No signal interrupts a large write: meanwhile what can be found is counted,
    /// and what is to end the run is returned. Nor is a run waited for that writes more than its
    /// limit in this time.
    fn hold(&self) -> (Option<Hold>, Option<Counted>) {
        let most = self.plan.scratch.size.map(|limit| limit.max(MIN_RESISTANCE));
        let pid = self.teardown.sandbox.pid();
        let mut found = None;
        let mut written_before = None;
        let mut next = Instant::now() + SHORT_COUNT_INTERVAL;
        let hold = Hold::take(pid, &mut || {
            if Instant::now() < next {
                return true;
            }
            // One that cannot be made is made when the run is held.
            found = self.count_scratch(CountMode::Short).ok().filter(|counted| counted.cause.is_some());
            let until = Instant::now() + MAX_SHORT_COUNT;
            let written = processes::written(pid, &mut || Instant::now() < until);
            let before = *written_before.get_or_insert(written);
            next = Instant::now() + SHORT_COUNT_INTERVAL;
            // What is not known is not too much: the resistance ends all the same.
            let is_too_much = written.zip(before).zip(most).is_some_and(|((now, before), most)| now.saturating_sub(before) > most);
            found.is_none() && !is_too_much
        });
        (hold, found)
    }

    /// Ends the run if it is to be ended, and learns what others have written: in a held count all
    /// that the run has not. Else it could be what code has moved behind the count.
    fn take_count(&mut self, counted: Counted, mode: CountMode) {
        self.quota.scratch_peak = self.quota.scratch_peak.max(counted.growth().unwrap_or(0));
        for (grown, host) in counted.grown.iter().flatten().zip(self.quota.hosts_mut()) {
            let Ok(now) = usage::room(&host.directory) else { continue };
            let free_bytes = now.free_bytes.saturating_add_signed(grown.bytes);
            let files = now.files.saturating_add_signed(grown.files.saturating_neg());
            host.room_without = match mode {
                CountMode::Held => FsRoom { free_bytes, files },
                CountMode::Running | CountMode::Short => {
                    FsRoom { free_bytes: host.room_without.free_bytes.max(free_bytes), files: host.room_without.files.min(files) }
                }
            };
        }
        if let Some(cause) = counted.cause {
            self.end(cause);
        }
    }

    /// Counts the directories of the host, up to one for which the run is to be ended.
    ///
    /// # Errors
    /// One cannot be counted.
    pub(super) fn count_scratch(&self, mode: CountMode) -> Result<Counted, Errno> {
        let mut all = Vec::new();
        for host in self.quota.hosts().filter(|_| !self.plan.scratch.read_only) {
            let (cause, grown) = self.count_host(host, mode)?;
            all.extend(grown);
            if cause.is_some() || grown.is_none() {
                return Ok(Counted { cause, grown: grown.map(|_| all) });
            }
        }
        Ok(Counted { cause: None, grown: if all.is_empty() { None } else { Some(all) } })
    }

    /// One of them.
    fn count_host(&self, host: &HostScratchFs, mode: CountMode) -> Result<(Option<Cause>, Option<Growth>), Errno> {
        let begun = Instant::now();
        let timeout = if mode == CountMode::Short { MAX_SHORT_COUNT } else { self.count_timeout(host) };
        let mut goes_on = self.may_count(begun + timeout, mode);
        let nameless = if self.all_have_ended() { Some(NamelessFiles::default()) } else { self.nameless(host, mode, &mut goes_on)? };
        let [in_nameless, nameless_files] = nameless.as_ref().map_or([0, 0], |nameless| [nameless.bytes(), nameless.count()]);
        let grown = |now: &TreeUse| Growth::between(&host.before, now.bytes + in_nameless, now.entries + nameless_files);
        let passes = |grown: i64, limit: Option<u64>| limit.is_some_and(|limit| u64::try_from(grown).is_ok_and(|grown| grown > limit));
        let too_large = |now: &TreeUse| passes(grown(now).bytes, self.plan.scratch.size);
        let too_many = |now: &TreeUse| passes(grown(now).files, self.plan.scratch.files);
        let now = if nameless.is_some() { host.count(|now| too_large(now) || too_many(now), &mut goes_on)? } else { None };
        let Some(now) = now else {
            // Else something is to be done first, and it is counted after that.
            let is_overdue = mode != CountMode::Short && begun.elapsed() >= timeout;
            return Ok((is_overdue.then_some(Cause::Uncounted), None));
        };
        let unseen = nameless.is_some_and(|nameless| nameless.may_be_more());
        let cause = match (too_large(&now), too_many(&now)) {
            (true, _) => Some(Cause::Disk(LimitKey::ScratchSize)),
            (_, true) => Some(Cause::Disk(LimitKey::ScratchFiles)),
            // What was closed to the count while the code ran could hold anything.
            _ if now.closed > host.before.closed => Some(Cause::Uncounted),
            // So could what nothing shows, where as much is missing.
            _ if mode == CountMode::Held && !self.all_have_ended() => {
                let is_lost = unseen && host.lost().is_ok_and(|lost| self.max_loss().is_passed(lost));
                let is_unexplained = self.may_have_written_unexplained(host, grown(&now), &mut goes_on)?;
                if !goes_on() && begun.elapsed() < timeout {
                    // Something is to be done first, as above.
                    return Ok((None, None));
                }
                (is_lost || is_unexplained).then_some(Cause::Uncounted)
            }
            _ => None,
        };
        Ok((cause, Some(grown(&now))))
    }

    /// Whether the file system has lost far more over the run than a held count explains, and the
    /// run may have written as much. The filter refuses what keeps deleted files that nothing shows;
    /// a policy may allow more (fanotify). Others write there too, so the bound is wide. Where it is
    /// not known what the run has written, it has: then the writes of others alone end it. Writes
    /// of children that no process waits for are not known, nor do directories count as written.
    fn may_have_written_unexplained(&self, host: &HostScratchFs, grown: Growth, goes_on: &mut dyn FnMut() -> bool) -> Result<bool, Errno> {
        let lost = difference(usage::room(&host.directory)?.free_bytes, host.room.free_bytes);
        let unexplained = u64::try_from(lost - grown.bytes).unwrap_or(0);
        let most = self.plan.scratch.size.map(|limit| limit.saturating_mul(UNEXPLAINED_TIMES).max(MIN_UNEXPLAINED));
        let by_run = unexplained.saturating_add_signed(grown.bytes);
        Ok(most.is_some_and(|most| unexplained > most)
            && processes::written(self.teardown.sandbox.pid(), goes_on).is_none_or(|written| written >= by_run))
    }

    /// What of the scratch has no name any more; thoroughly where the run is held.
    fn nameless(&self, host: &HostScratchFs, mode: CountMode, goes_on: &mut dyn FnMut() -> bool) -> Result<Option<NamelessFiles>, Errno> {
        let device = fstat(&host.directory)?.st_dev;
        let tmpfs = self.quota.tmp.as_ref().map(fstat).transpose()?.map(|stat| stat.st_dev);
        let memory = fstat(memfd_create("stockade", MemfdFlags::CLOEXEC)?)?.st_dev;
        // Some file systems show another device in a map: so all but what is known not to be it.
        let may_be = |device| Some(device) != tmpfs && device != memory;
        let wanted = FileQuery {
            device,
            linked_outside: &host.linked.outside,
            maps: if mode == CountMode::Held { Some(&may_be) } else { None },
            root: Some(&host.inside),
            enough: self.plan.scratch.files.map_or(u64::MAX, |limit| limit.saturating_add(host.before.entries)),
        };
        let mut nameless = NamelessFiles::of(self.teardown.sandbox.pid(), &wanted, goes_on);
        if let (Some(nameless), ProgramFile::Written(file)) = (&mut nameless, &self.program) {
            nameless.add_own(file)?;
        }
        Ok(nameless)
    }

    /// How long a count may take: many times what it takes for as much as may be there.
    fn count_timeout(&self, host: &HostScratchFs) -> Duration {
        let limit = |key| self.plan.limits.get(key);
        let open = limit(LimitKey::Processes).zip(limit(LimitKey::OpenFiles)).map(|(processes, files)| processes.saturating_mul(files));
        let entries = self.plan.scratch.files.map(|files| files.saturating_add(host.before.entries));
        let most = entries.zip(open).map(|(entries, open)| entries.saturating_add(open));
        most.map_or(UNLIMITED_COUNT_TIMEOUT, |most| MIN_COUNT_TIMEOUT + Duration::from_micros(most.saturating_mul(MAX_ENTRY_US)))
    }

    /// Whether a count may go on, which nothing else is done beside: until then, and no longer than
    /// the run itself, nor while a signal waits that can end it.
    pub(super) fn may_go_on(&self, until: Instant) -> impl FnMut() -> bool {
        let grace = self.quota.grace.map(|(at, _)| at);
        let until = [self.wall_deadline(), grace].into_iter().flatten().fold(until, Instant::min);
        let alive = !self.all_have_ended();
        move || !alive || (Instant::now() < until && !self.teardown.signals.has_ending())
    }

    /// The same for scratch. Code can make a count as long as it likes, by moving what was counted
    /// to where it is counted once more. Nor does a count go on of a run that goes on, where the
    /// file system has lost too much.
    fn may_count(&self, until: Instant, mode: CountMode) -> impl FnMut() -> bool {
        let alive = !self.all_have_ended();
        let quota = &self.quota;
        let most = (mode == CountMode::Running && alive).then(|| self.max_loss());
        let is_lost = move || most.is_some_and(|most| matches!(quota.lost(), Ok(Some(lost)) if most.is_passed(lost)));
        let mut goes_on = self.may_go_on(until);
        move || goes_on() && !is_lost()
    }
}

impl HostScratchFs {
    /// By how much its file system has less room than it would have without the run.
    fn lost(&self) -> Result<Growth, Errno> {
        let now = usage::room(&self.directory)?;
        let bytes = difference(now.free_bytes, self.room_without.free_bytes);
        Ok(Growth { bytes, files: difference(self.room_without.files, now.files) })
    }

    /// What lies in the scratch; none where the count was to end. Code that has closed the
    /// directory itself is counted all the same; if it closes it again at once, that counts as a
    /// directory closed below.
    fn count(&self, too_much: impl Fn(&TreeUse) -> bool, goes_on: &mut dyn FnMut() -> bool) -> Result<Option<TreeUse>, Errno> {
        match usage::count_while(&self.directory, &self.linked, &too_much, goes_on) {
            Err(Errno::ACCESS) => {}
            // It may have been closed in the midst of the count.
            Ok(Some(seen)) if seen.closed > self.before.closed => {}
            counted => return counted,
        }
        self.give_back()?;
        match usage::count_while(&self.directory, &self.linked, too_much, goes_on) {
            Err(Errno::ACCESS) => Ok(Some(TreeUse { closed: u64::MAX, ..self.before })),
            counted => counted,
        }
    }

    /// Gives its owner back what code has taken of the directory itself.
    pub(super) fn give_back(&self) -> Result<(), Errno> {
        scratch::give_back(&self.directory, self.rights)
    }
}
