//! What the service tells the manager that started it, as sd_notify(3) has it.
//!
//! Without `NOTIFY_SOCKET` nothing is sent, and nothing else changes. A message that the manager does not take
//! is lost: it acts by its own clock.

use std::time::Duration;

use sd_notify::NotifyState;

fn say(states: &[NotifyState<'_>]) {
    let _untaken = sd_notify::notify(states);
}

/// Connections are accepted, under settings that were just read.
pub(super) fn ready(status: &str) {
    // One line is one word.
    say(&[NotifyState::Ready, NotifyState::Status(&status.replace('\n', " "))]);
}

/// The settings are being read again; [`ready`] ends it.
pub(super) fn reloading() {
    let now = NotifyState::monotonic_usec_now().into_iter();
    say(&[NotifyState::Reloading].into_iter().chain(now).collect::<Vec<_>>());
}

/// The service ends, which takes at most so long.
pub(super) fn stopping(most: Duration) {
    let most = u32::try_from(most.as_micros()).unwrap_or(u32::MAX);
    say(&[NotifyState::Stopping, NotifyState::Status("ending: runs have their time to end"), NotifyState::ExtendTimeoutUsec(most)]);
}

/// The service is well.
pub(super) fn alive() {
    say(&[NotifyState::Watchdog]);
}

/// How long the manager waits for [`alive`], if it does.
pub(super) fn patience() -> Option<Duration> {
    sd_notify::watchdog_enabled()
}
