//! The verdict: what ended the run, from what was seen of it.
//!
//! A counter alone is no verdict: a program may survive a refused
//! fork. A counter decides only where its limit ended the run or the program failed; else it is
//! listed in `limits_hit`. A kill for memory decides always: whether the rest of the program was
//! still alive when the launcher heard of it is chance. What a failed program failed for is not
//! known: a limit that it stands at when it ends is taken for the cause. This module is pure: it
//! reads nothing of the host.
//! It judges runs that were started; the engine words refusals, what screening stopped and a
//! result that had to be withheld.

use stockade_protocol::{LimitKey, Verdict};

use crate::scratch::usage::Full;

/// The reason of a run that was ended because its host scratch could not be counted.
pub const SCRATCH_UNCOUNTED: &str = "scratch_uncounted";
/// The reason of a run that was ended because the kernel holds too much for it beside its memory.
pub const KERNEL_MEMORY: &str = "kernel_memory";
/// The reason of a run that was ended because what the kernel holds for it could not be counted.
pub const KERNEL_MEMORY_UNCOUNTED: &str = "kernel_memory_uncounted";

/// What the launcher ended the run for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// By a signal to the launcher.
    Cancelled(i32),
    OutOfMemory,
    CpuTime,
    WallClock,
    Output,
    /// The limit that a host scratch has outgrown.
    Disk(LimitKey),
    /// A host scratch in which something cannot be counted, so that it could hold anything.
    Uncounted,
    /// More kernel memory than a run may hold beside its own.
    KernelMemory,
    /// Kernel memory that cannot be counted, so that it could be more than the run may hold.
    UncountedKernelMemory,
    SystemCall,
}

impl Cause {
    /// The reason that the result has.
    pub(crate) fn reason(self) -> Option<&'static str> {
        match self {
            Cause::Uncounted => Some(SCRATCH_UNCOUNTED),
            Cause::KernelMemory => Some(KERNEL_MEMORY),
            Cause::UncountedKernelMemory => Some(KERNEL_MEMORY_UNCOUNTED),
            _ => None,
        }
    }
}

/// What was seen of a run that started.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RunEvidence {
    pub(crate) cause: Option<Cause>,
    /// The payload's status as wait(2) encodes it; none if the launcher ended the sandbox first.
    pub(crate) status: Option<i32>,
    pub(crate) oom_kills: u64,
    pub(crate) forks_refused: u64,
    /// The limit that a file system of the run stood at when the program ended.
    pub(crate) full: Option<LimitKey>,
    /// What was full at a time during the run.
    pub(crate) scratch_was_full: Full,
    pub(crate) tmp_was_full: bool,
    /// A file has just the size that no file may exceed.
    pub(crate) file_is_full: bool,
    /// CPU time reached a limit that only rlimits enforce.
    pub(crate) cpu_limit_reached: bool,
}

/// The verdict and what it rests on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Decision {
    pub(crate) verdict: Verdict,
    pub(crate) code: i32,
    pub(crate) signal: Option<i32>,
    /// The limit that ended the run.
    pub(crate) limit: Option<LimitKey>,
    pub(crate) limits_hit: Vec<&'static str>,
}

const SIGKILL: i32 = 9;
const SIGXCPU: i32 = 24;
const SIGXFSZ: i32 = 25;

pub(crate) fn decide(seen: &RunEvidence) -> Decision {
    let signal = seen.status.map(|status| status & 0x7f).filter(|signal| *signal != 0);
    let exited = seen.status.filter(|status| status & 0x7f == 0).map(|status| status >> 8 & 0xff);
    let failed = exited != Some(0);
    let own_code = exited.unwrap_or_else(|| 128 + signal.unwrap_or(SIGKILL));
    let disk_full = seen.full.or(seen.file_is_full.then_some(LimitKey::FileSize));
    let (verdict, code) = match seen.cause {
        Some(Cause::Cancelled(by)) => (Verdict::Cancelled, 128 + by),
        Some(Cause::OutOfMemory | Cause::KernelMemory | Cause::UncountedKernelMemory) => (Verdict::OutOfMemory, 137),
        Some(Cause::CpuTime) => (Verdict::CpuTimeout, 137),
        Some(Cause::WallClock) => (Verdict::WallTimeout, 124),
        Some(Cause::Output) => (Verdict::OutputLimit, 137),
        Some(Cause::Disk(_) | Cause::Uncounted) => (Verdict::DiskLimit, 137),
        Some(Cause::SystemCall) => (Verdict::SyscallDenied, 137),
        None if seen.oom_kills > 0 => (Verdict::OutOfMemory, 137),
        None if seen.cpu_limit_reached && matches!(signal, Some(SIGXCPU | SIGKILL)) => (Verdict::CpuTimeout, 137),
        None if signal == Some(SIGXFSZ) => (Verdict::DiskLimit, own_code),
        None if failed && seen.forks_refused > 0 => (Verdict::ProcessLimit, own_code),
        None if failed && disk_full.is_some() => (Verdict::DiskLimit, own_code),
        None if signal.is_some() => (Verdict::Signaled, own_code),
        None => (Verdict::Exited, own_code),
    };
    let limit = match (verdict, seen.cause) {
        (Verdict::WallTimeout, _) => Some(LimitKey::Wall),
        (Verdict::CpuTimeout, _) => Some(LimitKey::Cpu),
        (Verdict::OutOfMemory, Some(Cause::UncountedKernelMemory)) => None,
        (Verdict::OutOfMemory, _) => Some(LimitKey::Memory),
        (Verdict::ProcessLimit, _) => Some(LimitKey::Processes),
        (Verdict::OutputLimit, _) => Some(LimitKey::OutputSize),
        (Verdict::DiskLimit, Some(Cause::Disk(limit))) => Some(limit),
        (Verdict::DiskLimit, Some(Cause::Uncounted)) => None,
        (Verdict::DiskLimit, _) if signal == Some(SIGXFSZ) => Some(LimitKey::FileSize),
        (Verdict::DiskLimit, _) => disk_full,
        _ => None,
    };
    let touched = [
        (seen.oom_kills > 0, LimitKey::Memory),
        (seen.forks_refused > 0, LimitKey::Processes),
        (seen.scratch_was_full.size, LimitKey::ScratchSize),
        (seen.scratch_was_full.files, LimitKey::ScratchFiles),
        (seen.tmp_was_full, LimitKey::TmpSize),
        (seen.file_is_full, LimitKey::FileSize),
    ];
    let limits_hit = touched.iter().filter(|(hit, key)| *hit && Some(*key) != limit).map(|(_, key)| key.name()).collect();
    // Whether the kernel or the launcher killed it for a limit is chance.
    let is_own = matches!(verdict, Verdict::Exited | Verdict::Signaled | Verdict::ProcessLimit)
        || (verdict == Verdict::DiskLimit && seen.cause.is_none());
    Decision { verdict, code, signal: signal.filter(|_| is_own), limit, limits_hit }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILES: Full = Full { size: false, files: true };

    fn exit(code: i32) -> Option<i32> {
        Some(code << 8)
    }

    #[test]
    fn counters_decide_only_where_the_program_failed() {
        let full = Some(LimitKey::TmpSize);
        let seen = RunEvidence { status: exit(0), forks_refused: 3, full, tmp_was_full: true, ..RunEvidence::default() };
        let decision = decide(&seen);
        assert_eq!((decision.verdict, decision.code), (Verdict::Exited, 0));
        assert_eq!(decision.limits_hit, ["processes", "tmp_size"]);
        let decision = decide(&RunEvidence { status: exit(1), ..seen });
        assert_eq!((decision.verdict, decision.code), (Verdict::ProcessLimit, 1));
        assert_eq!(decision.limits_hit, ["tmp_size"]);
    }

    #[test]
    fn a_kill_for_memory_decides_whatever_the_rest_of_the_program_made_of_it() {
        for status in [exit(0), exit(1), exit(137), Some(9), None] {
            let decision = decide(&RunEvidence { status, oom_kills: 1, ..RunEvidence::default() });
            assert_eq!((decision.verdict, decision.code, decision.limit), (Verdict::OutOfMemory, 137, Some(LimitKey::Memory)));
            assert!(decision.limits_hit.is_empty());
        }
    }

    #[test]
    fn what_was_full_and_is_no_more_is_told_and_decides_nothing() {
        let seen = RunEvidence { status: exit(1), scratch_was_full: FILES, tmp_was_full: true, ..RunEvidence::default() };
        let decision = decide(&seen);
        assert_eq!((decision.verdict, decision.limits_hit), (Verdict::Exited, vec!["scratch_files", "tmp_size"]));
        let decision = decide(&RunEvidence { full: Some(LimitKey::ScratchFiles), ..seen });
        assert_eq!((decision.verdict, decision.limit), (Verdict::DiskLimit, Some(LimitKey::ScratchFiles)));
        assert_eq!(decision.limits_hit, ["tmp_size"]);
        let both = RunEvidence { scratch_was_full: Full { size: true, files: true }, tmp_was_full: false, ..seen };
        assert_eq!(decide(&both).limits_hit, ["scratch_size", "scratch_files"]);
    }

    #[test]
    fn a_signal_of_a_limit_names_it_though_a_fork_was_refused() {
        let decision = decide(&RunEvidence { status: Some(SIGXFSZ), forks_refused: 2, ..RunEvidence::default() });
        assert_eq!((decision.verdict, decision.code, decision.limit), (Verdict::DiskLimit, 153, Some(LimitKey::FileSize)));
        assert_eq!(decision.limits_hit, ["processes"]);
    }

    #[test]
    fn how_the_program_died_of_a_limit_is_no_signal_of_its_own() {
        // Whether the kernel had killed the program itself, or the launcher was first, is chance.
        for status in [Some(9), None] {
            for cause in [Cause::OutOfMemory, Cause::CpuTime, Cause::WallClock] {
                let decision = decide(&RunEvidence { cause: Some(cause), status, oom_kills: 1, ..RunEvidence::default() });
                assert_eq!(decision.signal, None, "{cause:?}");
            }
        }
        assert_eq!(decide(&RunEvidence { status: Some(9), cpu_limit_reached: true, ..RunEvidence::default() }).signal, None);
        assert_eq!(decide(&RunEvidence { status: Some(SIGXFSZ), ..RunEvidence::default() }).signal, Some(SIGXFSZ));
    }

    #[test]
    fn a_file_of_all_that_a_file_may_have_is_a_limit_that_was_reached() {
        let seen = RunEvidence { status: exit(153), file_is_full: true, ..RunEvidence::default() };
        let failed = decide(&seen);
        assert_eq!((failed.verdict, failed.limit, failed.limits_hit.len()), (Verdict::DiskLimit, Some(LimitKey::FileSize), 0));
        let survived = decide(&RunEvidence { status: exit(0), ..seen });
        assert_eq!((survived.verdict, survived.limits_hit), (Verdict::Exited, vec!["file_size"]));
    }

    #[test]
    fn what_the_launcher_did_comes_first() {
        for (cause, verdict, code) in [
            (Cause::Cancelled(15), Verdict::Cancelled, 143),
            (Cause::OutOfMemory, Verdict::OutOfMemory, 137),
            (Cause::WallClock, Verdict::WallTimeout, 124),
            (Cause::SystemCall, Verdict::SyscallDenied, 137),
            (Cause::Uncounted, Verdict::DiskLimit, 137),
            (Cause::KernelMemory, Verdict::OutOfMemory, 137),
            (Cause::UncountedKernelMemory, Verdict::OutOfMemory, 137),
        ] {
            let decision = decide(&RunEvidence { cause: Some(cause), forks_refused: 1, ..RunEvidence::default() });
            assert_eq!((decision.verdict, decision.code), (verdict, code));
        }
    }

    #[test]
    fn what_cannot_be_counted_is_beyond_no_limit_that_could_be_raised() {
        let seen = RunEvidence { full: Some(LimitKey::TmpSize), tmp_was_full: true, ..RunEvidence::default() };
        let limit = |cause| decide(&RunEvidence { cause: Some(cause), ..seen }).limit;
        assert_eq!((limit(Cause::Uncounted), limit(Cause::UncountedKernelMemory)), (None, None));
        assert_eq!(limit(Cause::Disk(LimitKey::ScratchSize)), Some(LimitKey::ScratchSize));
    }

    #[test]
    fn the_programs_own_137_and_its_own_sigkill_are_told_apart() {
        let own = decide(&RunEvidence { status: exit(137), ..RunEvidence::default() });
        assert_eq!((own.verdict, own.code, own.signal), (Verdict::Exited, 137, None));
        let killed = decide(&RunEvidence { status: Some(9), ..RunEvidence::default() });
        assert_eq!((killed.verdict, killed.code, killed.signal), (Verdict::Signaled, 137, Some(9)));
        let limited = decide(&RunEvidence { status: Some(9), cpu_limit_reached: true, ..RunEvidence::default() });
        assert_eq!(limited.verdict, Verdict::CpuTimeout);
    }
}
