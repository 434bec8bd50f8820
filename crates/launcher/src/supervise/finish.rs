//! The end of a run: the last bytes, the counters, the verdict.
//!
//! Nothing of the code is alive any more, so what is read here is finite and stays as it is.
//! What the run still has on the host is removed by [`Teardown`].

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::{
    fs::{AtFlags, SeekFrom, seek, unlinkat},
    io::Errno,
};
use stockade_egress::gate::Gate;
use stockade_policy::plan::Mode;
use stockade_protocol::{CollectedFile, EgressReport, LimitKey, Usage, Verdict};

use super::{
    Supervision, failed,
    quota::{COUNT, CountMode, HostScratchFs, ScratchFs},
    sampler::FsSampler,
    state::State,
    unwritten,
};
use crate::{
    LaunchError, Outcome,
    capture::Capture,
    cgroup::Counters,
    collect::collect,
    error::ExecutorError,
    modules::HookEvents,
    relay::OutputSink,
    scratch::{
        self,
        usage::{self, Full},
    },
    teardown::Teardown,
    verdict::{Cause, Decision, RunEvidence, decide},
};

/// The largest that the kernel has.
const MAX_ERRNO: u64 = 4095;

/// What a run has come to.
struct RunEnd {
    decision: Decision,
    egress: EgressReport,
    files: Vec<CollectedFile>,
    usage: Usage,
}

impl Supervision<'_> {
    /// The code and all that it has started are dead: takes what is left in the pipes, counts,
    /// decides.
    ///
    /// # Errors
    /// The program was not started.
    pub(super) fn finish(mut self, globs: &[String]) -> Result<(Outcome, Teardown), LaunchError> {
        let cpu_of_all = self.reap();
        while self.handshake.has_status() && self.read_status().is_ok() {}
        self.drain();
        self.check_copy();
        // How fast the launcher took it is chance.
        self.check_output();
        // With all that the program has left, its own file among it.
        self.quota.sample(Instant::now());
        self.leave_scratch();
        // Nothing inside is left to send: what the gate has seen is all.
        let gate = self.gate.take().map(Gate::finish).transpose();
        let counters = self.teardown.cgroup.counters();
        if counters.oom_kills > 0 && self.failure.is_none() {
            // The event and the program's end can arrive together.
            self.cause.get_or_insert(Cause::OutOfMemory);
        }
        let egress = gate.unwrap_or_else(|error| {
            self.failure.get_or_insert(error.into());
            None
        });
        let ended = self.decide(&counters, cpu_of_all, egress.unwrap_or_default(), globs);
        match ended {
            Err(failure) if !self.state.is_released() => Err(failure),
            ended => Ok(self.outcome(ended)),
        }
    }

    /// The CPU time of all processes of the code, user and kernel, in microseconds, as the kernel
    /// tells it with the end of pid 1 or as the executor has reported it.
    fn reap(&mut self) -> Option<(u64, u64)> {
        if self.all_have_ended() {
            return self.state.end()?.cpu_us_of_all;
        }
        let (killed_user, killed_system) = self.cpu_us_of_killed.unwrap_or_default();
        self.teardown.sandbox.reap().map(|(user, system)| (user + killed_user, system + killed_system))
    }

    /// Takes what is left in the pipes.
    fn drain(&mut self) {
        let must_end = self.asked_to_end || self.cause.is_some();
        for drained in self.streams.drain(&self.teardown.signals, must_end, &mut self.client) {
            if let Err(errno) = drained {
                self.failure.get_or_insert(unwritten(errno));
            }
        }
        if let Some(hooks) = &mut self.hooks {
            // What cannot be read is not known.
            while matches!(hooks.read_more(&mut self.streams.buffer), Ok(true)) {}
        }
        self.streams.terminal = None;
    }

    /// Where the restorer has made no copy, the program has not run, whatever pid 1 says. Only the
    /// restorer moves the position of the image's open file, which it closes before the copy goes on.
    fn check_copy(&mut self) {
        let Some(position) = self.memory_file.as_ref().map(|file| seek(file, SeekFrom::Current(0))) else { return };
        let failure = match position {
            Ok(0) => return,
            Ok(errno) => LaunchError::Restore(Errno::from_raw_os_error(i32::try_from(errno.min(MAX_ERRNO)).unwrap_or_default())),
            Err(errno) => failed("look at the memory image")(errno),
        };
        self.state = State::Failed;
        self.failure = Some(failure);
    }

    /// Keeps a failure, unless there is one.
    fn note(&mut self, done: Result<(), Errno>, attempt: &'static str) {
        if let Err(errno) = done {
            self.failure.get_or_insert(failed(attempt)(errno));
        }
    }

    /// Gives scratch back to its owner and removes the program's file.
    fn leave_scratch(&mut self) {
        let given_back = self.quota.hosts().filter(|_| !self.plan.scratch.read_only).try_for_each(HostScratchFs::give_back);
        self.note(given_back, "give the scratch back to its owner");
        if let (Some((_, name)), Some(scratch)) = (&self.plan.program_file, &self.quota.scratch) {
            // A run that failed early has written none; a read-only scratch holds none.
            // A directory in its place is the code's own.
            self.teardown.program_gone = match self.program.is_at(scratch.root(), name) {
                Ok(true) => matches!(unlinkat(scratch.root(), name.as_str(), AtFlags::empty()), Ok(()) | Err(Errno::NOENT | Errno::ISDIR)),
                Ok(false) => true,
                Err(_) => false,
            };
        }
    }

    /// What the run has come to.
    ///
    /// # Errors
    /// A failure of the launcher's own, after which nothing is known of the program but whether it
    /// may have run.
    fn decide(
        &mut self,
        counters: &Counters,
        cpu_of_all: Option<(u64, u64)>,
        egress: EgressReport,
        globs: &[String],
    ) -> Result<RunEnd, LaunchError> {
        // What failed before the code could begin may be tried once more: not where the caller
        // has cancelled the run.
        let unwanted = !self.state.is_released() && matches!(self.cause, Some(Cause::Cancelled(_)));
        if let Some(failure) = self.failure.take().filter(|_| !unwanted) {
            return Err(failure);
        }
        if self.state.is_before_ready() && self.cause.is_none() {
            return Err(ExecutorError::VanishedInSetup.into());
        }
        let mut grown = None;
        if self.cause.is_none() && self.quota.counts_scratch() {
            // It grew within the last interval, and its program is over.
            let counted = self.count_scratch(CountMode::Running).map_err(failed(COUNT))?;
            (self.cause, grown) = (counted.cause, counted.growth());
        }
        let scratch_bytes = grown.or_else(|| self.scratch_growth()).map(|bytes| bytes.max(self.quota.scratch_peak));
        let FsSampler { scratch, tmp, .. } = &self.quota.sampler;
        // It can have grown while the launcher had no turn.
        let has_outgrown =
            self.quota.hosts().next().is_some() && scratch_bytes.zip(self.plan.scratch.size).is_some_and(|(bytes, limit)| bytes > limit);
        let status = self.state.end().map(|end| end.status);
        let cpu_of_program = self.state.end().map(|end| end.cpu_us);
        if status.is_none() && self.cause.is_none() {
            return Err(ExecutorError::Vanished.into());
        }
        let decision = decide(&RunEvidence {
            cause: self.cause,
            status,
            oom_kills: counters.oom_kills,
            forks_refused: counters.forks_refused,
            full: scratch.full_at_last().limit_of_scratch().or(tmp.full_at_last().is_full().then_some(LimitKey::TmpSize)),
            scratch_was_full: Full { size: scratch.full.size || has_outgrown, ..scratch.full },
            tmp_was_full: tmp.full.is_full(),
            file_is_full: self.has_full_file(),
            cpu_limit_reached: self.has_reached_rlimit(cpu_of_program),
        });
        let files = self.collected(globs).map_err(failed("take on the rights of the scratch's owner"))?;
        let cpu_of_cgroup = counters.cpu.map(|cpu| cpu.since(self.quota.cpu_before)).map(|cpu| (cpu.user_us, cpu.system_us));
        let cpu = cpu_of_cgroup.or(cpu_of_all).or(cpu_of_program);
        let usage = Usage {
            memory_peak_bytes: counters.memory_peak,
            processes_peak: counters.processes_peak,
            cpu_user_ms: cpu.map(|(user, _)| user / 1000),
            cpu_system_ms: cpu.map(|(_, system)| system / 1000),
            scratch_bytes,
            tmp_bytes: self.quota.tmp.as_ref().map(|_| tmp.bytes),
        };
        Ok(RunEnd { decision, egress, files, usage })
    }

    /// Whether the program has reached the rlimit of CPU time: without a cgroup the run's own, else
    /// one that the caller imposes. The kernel enforces it by sampled time, which runs ahead: by some
    /// percent, and by 28 of a hundred for one second on a busy host.
    fn has_reached_rlimit(&self, cpu_of_program: Option<(u64, u64)>) -> bool {
        let used = cpu_of_program.map_or(0, |(user, system)| user + system);
        let limit = self.plan.rlimits.iter().find(|limit| limit.name == "RLIMIT_CPU").and_then(|limit| limit.value);
        limit.is_some_and(|seconds| used >= seconds.saturating_mul(600_000))
    }

    /// The files that were asked for. Root reads a host scratch as its owner, else it would
    /// read what the code could not.
    fn collected(&self, globs: &[String]) -> Result<Vec<CollectedFile>, Errno> {
        let collected = |root| collect(root, globs, &self.plan.scratch.protected, self.plan.limits.get(LimitKey::CollectSize));
        match &self.quota.scratch {
            _ if globs.is_empty() => Ok(Vec::new()),
            Some(ScratchFs::Host(host)) => scratch::as_owner(&host.directory, self.plan.mode == Mode::Root, || collected(&host.directory)),
            Some(ScratchFs::Private(root)) => Ok(collected(root)),
            None => Ok(Vec::new()),
        }
    }

    /// By how many bytes scratch has grown, or was full at most.
    fn scratch_growth(&self) -> Option<u64> {
        match self.quota.scratch.as_ref()? {
            ScratchFs::Host(host) => Some(usage::count(&host.directory, &host.linked).ok()?.bytes.saturating_sub(host.before.bytes)),
            ScratchFs::Private(_) => Some(self.quota.sampler.scratch.bytes),
        }
    }

    /// Whether the program has left a file of just the size that no file may exceed.
    fn has_full_file(&self) -> bool {
        let limit = self.plan.limits.get(LimitKey::FileSize);
        let (Some(size), Some(started)) = (limit.filter(|size| *size > 0), self.state.told_at()) else { return false };
        // Files have a clock of their own, which may be a tick behind.
        let since = SystemTime::now().checked_sub(started.elapsed() + Duration::from_millis(10));
        let Some(since) = since.and_then(|at| at.duration_since(UNIX_EPOCH).ok()) else { return false };
        let since = (since.as_secs().cast_signed(), since.subsec_nanos());
        // What holds less than one such file is not searched.
        let sampler = &self.quota.sampler;
        let scratch = self.quota.scratch.as_ref().filter(|scratch| match scratch {
            ScratchFs::Private(_) => sampler.scratch.bytes >= size,
            ScratchFs::Host(_) => !self.plan.scratch.read_only,
        });
        let tmp = self.quota.tmp.as_ref().filter(|_| sampler.tmp.bytes >= size);
        scratch.map(ScratchFs::root).into_iter().chain(tmp).any(|root| usage::has_changed_file_of(root, size, since))
    }

    fn outcome(self, ended: Result<RunEnd, LaunchError>) -> (Outcome, Teardown) {
        let broken = ended.as_ref().err().map(|failure| (failure.kind().reason(), failure.to_string()));
        let uncounted = self.cause.and_then(Cause::reason);
        let RunEnd { decision, egress, files, usage } = ended.unwrap_or_else(|_| RunEnd {
            decision: Decision { verdict: Verdict::SandboxError, code: 125, signal: None, limit: None, limits_hit: Vec::new() },
            egress: EgressReport::default(),
            files: Vec::new(),
            usage: Usage::default(),
        });
        let (reason, message) = broken.map_or((uncounted, None), |(reason, message)| (Some(reason), Some(message)));
        let ended_at = self.state.end().map_or_else(Instant::now, |end| end.at);
        let duration = self.state.started_at().map(|at| ended_at.saturating_duration_since(at));
        let (denials, denials_omitted) = self.listener.map(|listener| listener.denials.finish()).unwrap_or_default();
        let captured = |sink: OutputSink| sink.into_kept().map(Capture::finish).unwrap_or_default();
        let outcome = Outcome {
            verdict: decision.verdict,
            reason,
            code: decision.code,
            signal: decision.signal,
            started: self.state.is_released(),
            message,
            duration_ms: duration.map_or(0, |duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)),
            limit: decision.limit,
            limits_hit: decision.limits_hit,
            usage,
            denials,
            denials_omitted,
            bytes: self.streams.total(),
            output: captured(self.streams.output.sink),
            error: captured(self.streams.error.sink),
            egress,
            modules: self.hooks.map(HookEvents::finish),
            files,
            receipt: self.state.into_receipt(),
        };
        (outcome, self.teardown)
    }
}
