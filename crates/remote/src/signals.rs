//! SIGINT, SIGTERM and SIGHUP: the first asks for the end of the run, whose result is still awaited;
//! another after it, or the end of [`GRACE`], ends this program.

use std::{
    thread,
    time::{Duration, Instant},
};

use nix::sys::signal::{SigSet, Signal, raise};

use crate::RemoteError;

/// How long a run that was asked to end has for its result, and its reader for reading that.
const GRACE: Duration = Duration::from_secs(7);
/// Signals that come so close together are one: timeout(1) sends it to the process and to its group.
const SAME: Duration = Duration::from_millis(500);

/// Holds signals back and reports the first of them. Before the first thread is started: all of
/// them are to hold signals back.
///
/// # Errors
/// The processes that wait for the answer cannot be watched.
pub fn watch(ends_with: &[i32], first: impl Fn(i32) + Send + 'static) -> Result<(), RemoteError> {
    let all = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP];
    // One that the caller ignores, as under nohup, would be taken by `wait` all the same.
    let signals: SigSet = all.into_iter().filter(|signal| !is_ignored(*signal)).collect();
    signals.thread_block().map_err(|errno| RemoteError::Watch(errno.into()))?;
    stockade_session_client::hang_up_with(ends_with, None).map_err(RemoteError::Watch)?;
    let wait = move || {
        let Ok(signal) = signals.wait() else { return };
        thread::spawn(move || {
            thread::sleep(GRACE);
            end(signals, signal);
        });
        let begun = Instant::now();
        first(signal as i32);
        while let Ok(signal) = signals.wait() {
            if begun.elapsed() > SAME {
                end(signals, signal);
            }
        }
    };
    thread::Builder::new().spawn(wait).map_err(RemoteError::Watch)?;
    Ok(())
}

/// Ends this program as if the signal had not been held back.
fn end(signals: SigSet, signal: Signal) {
    let _cannot_fail = signals.thread_unblock();
    let _ends_this = raise(signal);
}

fn is_ignored(signal: Signal) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("SigIgn:")?.trim(), 16).ok());
    ignored.is_some_and(|ignored| ignored & (1 << (signal as i32 - 1)) != 0)
}
