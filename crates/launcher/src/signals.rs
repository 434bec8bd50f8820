//! The signals that end or reach a run, held back and read from a descriptor.
//!
//! What each of them does to the run is decided by `supervise.rs`.

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
/// ignores it by default: a launcher that has no run at the moment goes on. It counts with its word
/// alone: programs in Go send this signal to their own threads, and runc, which is one, passes those
/// on to the container's first process.
pub(crate) const CANCEL: i32 = NixSignal::SIGURG as i32;
/// `S` and the letters after it.
const CANCEL_WORD: i32 = 0x5354_4344;

/// Tells a launcher to end its run.
///
/// # Errors
/// ESRCH where it has ended, EPERM where it may not be signalled.
pub fn cancel(launcher: impl AsFd) -> Result<(), Errno> {
    stockade_sys::process::queue_signal(launcher, CANCEL, CANCEL_WORD)
}

/// Signals that arrive as readable events; dropping it restores the mask.
pub struct Signals {
    fd: SignalFd,
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
        let before = held.thread_swap_mask(nix::sys::signal::SigmaskHow::SIG_BLOCK).map_err(failed)?;
        let fd = SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK).map_err(failed)?;
        Ok(Signals { fd, before })
    }

    /// The next one that has come.
    pub fn take(&mut self) -> Option<i32> {
        loop {
            let info = self.fd.read_signal().ok().flatten()?;
            let signal = info.ssi_signo.cast_signed();
            if signal != CANCEL || (info.ssi_code, info.ssi_int) == (SI_QUEUE, CANCEL_WORD) {
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
        let _mask_was_valid = self.before.thread_set_mask();
    }
}
