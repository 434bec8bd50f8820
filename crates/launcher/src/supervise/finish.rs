//! The end of a run: the last bytes, the counters, the verdict, and nothing left behind.

use std::time::Instant;

use rustix::{
    event::Timespec,
    fd::OwnedFd,
    fs::{AtFlags, unlinkat},
    io::Errno,
};
use stockade_egress::gate::Gate;
use stockade_policy::plan::Mode;
use stockade_protocol::{CollectedFile, EgressReport, LimitKey, PerStream, Usage, Verdict};

use super::{COUNT, Phase, Supervision, Token, failed};
use crate::{
    LaunchError, Outcome, What,
    capture::Capture,
    cgroup::Cgroup,
    collect::collect,
    egress,
    modules::Heard,
    relay::{Outlet, Turn, is_readable},
    remains::Remains,
    scratch,
    verdict::{Cause, Observed, SCRATCH_UNCOUNTED, decide},
};

impl Supervision<'_> {
    /// The code and all that it has started are dead: takes what is left in the pipes, counts,
    /// decides.
    pub(super) fn finish(mut self, program: Option<&str>, globs: &[String]) -> Result<(Outcome, Remains), LaunchError> {
        if !self.all_have_ended() {
            let (killed_user, killed_system) = self.used_by_killed.unwrap_or_default();
            self.used_by_all = self.sandbox.reap().map(|(user, system)| (user + killed_user, system + killed_system));
        }
        while self.read_status_to_end() {}
        if self.phase == Phase::SettingUp {
            // Our word to start the program can have reached nobody who had not said that he is
            // ready for it.
            self.released = false;
        }
        for token in [Token::Stdout, Token::Stderr] {
            if let Err(errno) = self.drain(token) {
                self.failure.get_or_insert(failed("take the program's output")(errno));
            }
        }
        if let Some(heard) = &mut self.modules {
            // What is left in the pipe is finite now; what cannot be read is not known.
            while matches!(heard.hear_more(&mut self.buffer), Ok(true)) {}
        }
        self.raw = None;
        if let (Some(host), false) = (&self.scratch_directory, self.plan.scratch.read_only)
            && let Err(errno) = scratch::give_back(host, self.scratch_rights)
        {
            self.failure.get_or_insert(failed("give the scratch back to its owner")(errno));
        }
        let scratch_root = self.scratch_directory.as_ref().or(self.scratch_fs.as_ref());
        // Before the program's file makes room.
        let private = self.scratch_fs.as_ref().filter(|_| self.scratch_directory.is_none());
        let scratch_full = private.and_then(filesystem_use).and_then(|(_, full)| full);
        if let (Some(name), Some(root)) = (program, scratch_root) {
            // A run that failed early has written none; a read-only scratch holds none.
            // A directory in its place is the code's own.
            self.program_gone = matches!(unlinkat(root, name, AtFlags::empty()), Ok(()) | Err(Errno::NOENT | Errno::ISDIR));
        }
        // Nobody is left who could send: what the gate has seen is all.
        let gate = self.gate.take().map(Gate::finish).transpose();
        let counters = self.cgroup.counters();
        if counters.oom_kills > 0 && self.wait_status.is_none() && self.failure.is_none() {
            // The event and pid 1's end can arrive together.
            self.cause.get_or_insert(Cause::OutOfMemory);
        }
        let egress = match gate {
            Ok(report) => report.unwrap_or_default(),
            Err(error) => {
                self.failure.get_or_insert(egress::failed(&error));
                EgressReport::default()
            }
        };
        // What failed before the code could begin may be tried once more: not where whoever asked
        // wants no more of it.
        let unwanted = !self.released && matches!(self.cause, Some(Cause::Cancelled(_)));
        if let Some(failure) = self.failure.take().filter(|_| !unwanted) {
            return self.broken(failure);
        }
        if self.phase == Phase::SettingUp && self.cause.is_none() {
            let message = "the sandbox vanished while it was being set up; the kernel's log may say why (out of memory?)";
            return self.broken(LaunchError::other(What::Executor, String::from(message)));
        }
        let mut grown = None;
        if self.cause.is_none() && self.next_scratch_count.is_some() {
            // It grew within the last interval, and its program is over.
            match self.scratch_outgrown() {
                Ok((outgrown, by)) => {
                    self.cause = outgrown;
                    grown = by;
                }
                Err(errno) => return self.broken(failed(COUNT)(errno)),
            }
        }
        let scratch_bytes = grown.or_else(|| self.scratch_use());
        let tmp = self.root_fs.as_ref().and_then(filesystem_use);
        let cpu_us = self.rusage_us.map_or(0, |(user, system)| user + system);
        let no_cgroup = matches!(self.cgroup, Cgroup::Absent);
        // The kernel enforces the limit by sampled time, which runs some percent ahead.
        let cpu_limit_reached = no_cgroup && self.plan.limits.get(LimitKey::Cpu).is_some_and(|ms| cpu_us >= ms.div_ceil(1000) * 850_000);
        if self.wait_status.is_none() && self.cause.is_none() {
            let message = "the executor vanished without a report: something outside killed the sandbox";
            return self.broken(LaunchError::other(What::Executor, String::from(message)));
        }
        let observed = Observed {
            cause: self.cause,
            status: self.wait_status,
            oom_kills: counters.oom_kills,
            forks_refused: counters.forks_refused,
            scratch_full: scratch_full.map(|full| match full {
                Full::Bytes => LimitKey::ScratchSize,
                Full::Files => LimitKey::ScratchFiles,
            }),
            tmp_full: tmp.is_some_and(|(_, full)| full.is_some()),
            cpu_limit_reached,
        };
        let decision = decide(&observed);
        let reason = (self.cause == Some(Cause::Uncounted)).then_some(SCRATCH_UNCOUNTED);
        let files = match self.collected(globs) {
            Ok(files) => files,
            Err(errno) => return self.broken(failed("take on the rights of the scratch's owner")(errno)),
        };
        let of_cgroup = counters.cpu.map(|cpu| cpu.since(self.cpu_before)).map(|cpu| (cpu.user_us, cpu.system_us));
        let cpu = of_cgroup.or(self.used_by_all).or(self.rusage_us);
        let (mut outcome, remains) = self.outcome(decision.verdict, decision.code, decision.signal, decision.limits_hit);
        outcome.limit = decision.limit;
        outcome.reason = reason;
        outcome.egress = egress;
        outcome.files = files;
        outcome.usage = Usage {
            memory_peak_bytes: counters.memory_peak,
            processes_peak: counters.processes_peak,
            cpu_user_ms: cpu.map(|(user, _)| user / 1000),
            cpu_system_ms: cpu.map(|(_, system)| system / 1000),
            scratch_bytes,
            tmp_bytes: tmp.map(|(bytes, _)| bytes),
        };
        Ok((outcome, remains))
    }

    /// The files that were asked for. Root reads a host scratch as its owner, else it would
    /// read what the code could not.
    fn collected(&self, globs: &[String]) -> Result<Vec<CollectedFile>, Errno> {
        let collected = |root| collect(root, globs, &self.plan.scratch.protected, self.plan.limits.get(LimitKey::CollectSize));
        match (&self.scratch_directory, &self.scratch_fs) {
            _ if globs.is_empty() => Ok(Vec::new()),
            (Some(host), _) => scratch::as_owner(host, self.plan.mode == Mode::Root, || collected(host)),
            (None, Some(private)) => Ok(collected(private)),
            (None, None) => Ok(Vec::new()),
        }
    }

    /// A failure of ours, after which nothing can be said about the program but whether it
    /// may have run.
    fn broken(self, failure: LaunchError) -> Result<(Outcome, Remains), LaunchError> {
        if !self.released {
            return Err(failure);
        }
        let (mut outcome, remains) = self.outcome(Verdict::SandboxError, 125, None, Vec::new());
        outcome.reason = Some(failure.what.reason());
        outcome.message = Some(failure.message);
        Ok((outcome, remains))
    }

    fn read_status_to_end(&mut self) -> bool {
        let more = |status: &OwnedFd| is_readable(status).unwrap_or(false);
        more(&self.status_read) && self.read_status().is_ok() && more(&self.status_read) && !self.status_at_end()
    }

    /// At end of file a pipe stays readable for ever.
    fn status_at_end(&self) -> bool {
        rustix::io::ioctl_fionread(&self.status_read).is_ok_and(|left| left == 0)
    }

    /// Takes what the program had written when it ended.
    fn drain(&mut self, which: Token) -> Result<(), Errno> {
        let (stream, outlet) = match which {
            Token::Stdout => (self.stdout.take(), &mut self.out),
            _ => (self.stderr.take(), &mut self.err),
        };
        let Some(from) = stream else { return Ok(()) };
        // Every writer is dead, so what the pipe holds is finite; should one be alive against
        // all reason, it is not waited for.
        while outlet.holds() || is_readable(&from)? {
            match outlet.turn(&from, &mut self.buffer)? {
                Turn::Ended => break,
                Turn::More => {}
                Turn::Blocked => {
                    let Some(target) = outlet.target() else { break };
                    let ready = rustix::event::PollFlags::OUT;
                    let mut fds = [
                        rustix::event::PollFd::new(&target, ready),
                        rustix::event::PollFd::new(&self.signals, rustix::event::PollFlags::IN),
                    ];
                    // A slow reader gets everything, unless the run was to end: then it must
                    // not hold up whoever waits for the launcher.
                    let patience = (self.asked_to_end || self.cause.is_some()).then_some(Timespec { tv_sec: 2, tv_nsec: 0 });
                    let ready = rustix::event::poll(&mut fds, patience.as_ref());
                    if matches!(ready, Ok(0)) || fds.last().is_some_and(|signals| !signals.revents().is_empty()) {
                        break;
                    }
                }
            }
        }
        Ok(())
    }

    /// By how much scratch has grown.
    fn scratch_use(&self) -> Option<u64> {
        match (&self.scratch_directory, &self.scratch_fs) {
            (Some(directory), _) => Some(scratch::count(directory).ok()?.bytes.saturating_sub(self.scratch_before.bytes)),
            (None, Some(fs)) => filesystem_use(fs).map(|(bytes, _)| bytes),
            (None, None) => None,
        }
    }

    fn outcome(self, verdict: Verdict, code: i32, signal: Option<i32>, limits_hit: Vec<&'static str>) -> (Outcome, Remains) {
        let started = self.released;
        let ended_at = self.ended_at.unwrap_or_else(Instant::now);
        let duration_ms =
            self.started_at.map_or(0, |at| u64::try_from(ended_at.saturating_duration_since(at).as_millis()).unwrap_or(u64::MAX));
        let (denials, denials_omitted) = self.denials.finish();
        let bytes = PerStream { output: self.out.total(), error: self.err.total() };
        let captured = |outlet: Outlet| outlet.into_kept().map(Capture::finish).unwrap_or_default();
        let outcome = Outcome {
            verdict,
            reason: None,
            code,
            signal,
            started,
            message: None,
            duration_ms,
            limit: None,
            limits_hit,
            usage: Usage::default(),
            denials,
            denials_omitted,
            output: captured(self.out),
            error: captured(self.err),
            bytes,
            egress: EgressReport::default(),
            modules: self.modules.map(Heard::finish),
            files: Vec::new(),
            receipt: self.receipt,
        };
        let Supervision { sandbox, cgroup, record, program_gone, signals, .. } = self;
        (outcome, Remains { sandbox, cgroup, record, program_gone, _signals: signals })
    }
}

/// What a file system has no more of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Full {
    Bytes,
    Files,
}

/// Bytes in use on a file system of ours, and what it is full of.
fn filesystem_use(fs: &OwnedFd) -> Option<(u64, Option<Full>)> {
    let stat = rustix::fs::fstatvfs(fs).ok()?;
    let used = (stat.f_blocks - stat.f_bfree) * stat.f_frsize;
    let full = match () {
        () if stat.f_blocks > 0 && stat.f_bfree == 0 => Some(Full::Bytes),
        () if stat.f_files > 0 && stat.f_ffree == 0 => Some(Full::Files),
        () => None,
    };
    Some((used, full))
}
