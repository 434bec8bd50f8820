//! The signals that end or reach a run, held back and read from a descriptor.
//!
//! None is lost: what was looked at is kept to be taken, and sent once more where nothing takes it.
//! What each of them does to the run is decided by `supervise.rs`.

use std::{cell::RefCell, collections::VecDeque, iter, time::Duration};

use nix::sys::{
    signal::{SigSet, Signal as NixSignal},
    signalfd::{SfdFlags, SignalFd},
};
use rustix::{
    fd::{AsFd, BorrowedFd},
    io::Errno,
};

use stockade_sys::process::SI_QUEUE;

use crate::{ErrorKind, LaunchError};

/// Ends a run as its client's own cancelling would, and is passed on to no program. The kernel
/// ignores it by default: a launcher that has no run at the moment goes on. It counts with the
/// run's word alone: programs in Go send this signal to their own threads, and runc, which is one,
/// passes those on to the container's first process.
pub(crate) const CANCEL: i32 = NixSignal::SIGURG as i32;

/// How long a command that was told to end has for it, and the reader of an answer for that. Its
/// record must be written before a caller loses patience: timeout(1) and docker(1) are often told to
/// wait two seconds.
pub const GRACE: Duration = Duration::from_millis(1500);

/// What the signal that ends a run carries: the first half of the run's number. A launcher of a
/// session may have another run by the time it reads the signal, which that does not end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CancelWord(i32);

impl CancelWord {
    /// That of a run's number of 16 hexadecimal digits; none for what is no such number.
    pub fn of(run: &str) -> Option<Self> {
        let number = u64::from_str_radix(run, 16).ok().filter(|_| run.len() == 16)?;
        u32::try_from(number >> 32).ok().map(|word| CancelWord(word.cast_signed()))
    }
}

/// Tells a launcher to end this run, if it still has it.
///
/// # Errors
/// ESRCH where it has ended, EPERM where it may not be signalled.
pub fn cancel(launcher: impl AsFd, run: CancelWord) -> Result<(), Errno> {
    stockade_sys::process::queue_signal(launcher, CANCEL, run.0)
}

/// Signals that arrive as readable events; dropping it restores the mask.
pub struct Signals {
    fd: SignalFd,
    /// Those that were looked at and not taken: one of a kind, as the kernel keeps them.
    kept: RefCell<VecDeque<i32>>,
    /// The run that can be cancelled by one; none between two runs.
    run: Option<CancelWord>,
    before: SigSet,
}

impl Signals {
    /// Holds them back; the old mask returns when this is dropped.
    ///
    /// # Errors
    /// There is no descriptor left.
    pub fn block() -> Result<Self, LaunchError> {
        let failed =
            |errno: nix::errno::Errno| LaunchError::system(ErrorKind::Prepare, "hold back signals")(Errno::from_raw_os_error(errno as i32));
        let mut set = SigSet::empty();
        for signal in [
            NixSignal::SIGTERM,
            NixSignal::SIGINT,
            NixSignal::SIGHUP,
            NixSignal::SIGQUIT,
            NixSignal::SIGUSR1,
            NixSignal::SIGUSR2,
            NixSignal::SIGWINCH,
        ] {
            // A caller that ignores it (nohup) does not want it to end the run; once blocked
            // it would be delivered all the same.
            if !stockade_sys::process::ignores(signal as i32) {
                set.add(signal);
            }
        }
        set.add(NixSignal::SIGURG);
        // A terminal sends these to a process in the background that uses it. A launcher that stands
        // still watches no clock and reads no signal; while they are held back, its read fails.
        let held = SigSet::from_iter(set.iter().chain([NixSignal::SIGTTIN, NixSignal::SIGTTOU]));
        // First, since nothing would give the signals back where it cannot be made.
        let fd = SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK).map_err(failed)?;
        let before = held.thread_swap_mask(nix::sys::signal::SigmaskHow::SIG_BLOCK).map_err(failed)?;
        Ok(Signals { fd, kept: RefCell::default(), run: None, before })
    }

    /// From now on the signal that ends this run is one of them.
    pub(crate) fn serve_run(&mut self, run: Option<CancelWord>) {
        self.run = run;
    }

    /// The next one that has come.
    pub fn take(&mut self) -> Option<i32> {
        self.kept.get_mut().pop_front().or_else(|| self.read())
    }

    /// Whether one has come that can end the run or this process. All stay to be taken.
    pub(crate) fn has_ending(&self) -> bool {
        let mut kept = self.kept.borrow_mut();
        for signal in iter::from_fn(|| self.read()) {
            if !kept.contains(&signal) {
                kept.push_back(signal);
            }
        }
        kept.iter().any(|signal| *signal != NixSignal::SIGWINCH as i32)
    }

    /// Whether one stays to be taken that the descriptor does not show any more.
    pub(crate) fn has_kept(&self) -> bool {
        !self.kept.borrow().is_empty()
    }

    fn read(&self) -> Option<i32> {
        loop {
            let info = self.fd.read_signal().ok().flatten()?;
            let signal = info.ssi_signo.cast_signed();
            let has_word = info.ssi_code == SI_QUEUE && self.run == Some(CancelWord(info.ssi_int));
            if signal != CANCEL || has_word {
                return Some(signal);
            }
        }
    }
}

/// Holds back for good what a terminal can send to stop this process: a launcher that
/// stands still watches no clock.
pub fn hold_back_stops() {
    let stops = SigSet::from_iter([NixSignal::SIGTSTP, NixSignal::SIGTTIN, NixSignal::SIGTTOU]);
    // The mask is ours to set.
    let _cannot_fail = stops.thread_block();
}

/// What a terminal can send to end this process, held back until this is dropped: a
/// launcher that acts for somebody must not be ended by him between a run and its record.
pub struct Uninterrupted {
    before: Option<SigSet>,
}

impl Uninterrupted {
    /// Holds them back.
    pub fn begin() -> Self {
        let ends = [NixSignal::SIGTERM, NixSignal::SIGINT, NixSignal::SIGHUP, NixSignal::SIGQUIT, NixSignal::SIGUSR1, NixSignal::SIGUSR2];
        let set = SigSet::from_iter(ends);
        Uninterrupted { before: set.thread_swap_mask(nix::sys::signal::SigmaskHow::SIG_BLOCK).ok() }
    }
}

impl Drop for Uninterrupted {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            // The mask was ours to set.
            let _cannot_fail = before.thread_set_mask();
        }
    }
}

impl AsFd for Signals {
    /// Readable when one has come.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        for signal in self.kept.get_mut().drain(..).filter(|signal| *signal != CANCEL) {
            // A thread may always signal itself, and this is the one whose mask is restored.
            let _sent = NixSignal::try_from(signal).and_then(nix::sys::signal::raise);
        }
        let _mask_was_valid = self.before.thread_set_mask();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use nix::sys::signal::raise;

    use super::*;

    #[test]
    fn signals_that_were_looked_at_are_taken_or_come_once_more() {
        let mut outer = Signals::block().unwrap();
        let signals = Signals::block().unwrap();
        for harmless in [NixSignal::SIGURG, NixSignal::SIGWINCH] {
            raise(harmless).unwrap();
        }
        assert!(!signals.has_ending() && signals.has_kept());
        raise(NixSignal::SIGTERM).unwrap();
        assert!(signals.has_ending() && signals.has_ending());
        // Nothing takes them, so they are there for the next that has held them back.
        drop(signals);
        let mut taken: Vec<i32> = iter::from_fn(|| outer.take()).collect();
        taken.sort_unstable();
        assert_eq!(taken, [NixSignal::SIGTERM as i32, NixSignal::SIGWINCH as i32]);
        assert!(!outer.has_ending() && !outer.has_kept());
    }

    #[test]
    fn a_word_is_half_of_a_number() {
        assert_eq!(CancelWord::of("4f1c2a9be07d3365"), Some(CancelWord(0x4f1c_2a9b)));
        assert_eq!(CancelWord::of("fffffffe00000000"), Some(CancelWord(-2)));
        assert_eq!([CancelWord::of(""), CancelWord::of("4f1c2a9b"), CancelWord::of("run 4f1c2a9be07d")], [None; 3]);
    }
}
