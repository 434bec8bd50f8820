//! What the caller does while the program runs: signals, the client's requests, the terminal.
//!
//! The caller can end a run or pass signals on to the program. It changes no limit.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal as NixSignal;
use rustix::{
    event::epoll,
    io::Errno,
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};

use super::{PUMP, Supervision};
use crate::{Asked, Streams, terminal, verdict::Cause};

/// How long a payload that was told to end has for it, where its caller will not wait.
const GRACE: Duration = Duration::from_millis(500);

impl Supervision<'_> {
    /// The launcher's stdin has something, or has ended.
    pub(super) fn serve_source(&mut self) -> Result<(), Errno> {
        self.streams.stdin.as_mut().map_or(Ok(()), |stdin| stdin.on_source(&self.epoll, &PUMP))?;
        // The kernel tells the leader of the terminal's session, which may be another process.
        if self.terminal_is_gone() && self.quota.grace.is_none() {
            self.forward(NixSignal::SIGHUP as i32);
            self.end_after_grace(NixSignal::SIGHUP);
        }
        Ok(())
    }

    /// Whether the terminal is gone on which the program was run: no person is there to end it,
    /// and its policy may have no wall clock.
    fn terminal_is_gone(&self) -> bool {
        self.streams.terminal.is_some() && terminal::own_is_gone()
    }

    fn end_after_grace(&mut self, signal: NixSignal) {
        self.quota.grace.get_or_insert((Instant::now() + GRACE, signal as i32));
    }

    pub(super) fn serve_signals(&mut self) -> Result<(), Errno> {
        while let Some(signal) = self.teardown.signals.take() {
            match self.streams.mode {
                _ if signal == NixSignal::SIGWINCH as i32 => {
                    if let Some(terminal) = &self.streams.terminal {
                        terminal::copy_size(&terminal.master);
                    }
                }
                Streams::Relay(relay) if !self.state.is_before_ready() => {
                    self.forward(signal);
                    if relay.ends_on_sigterm && signal == NixSignal::SIGTERM as i32 {
                        self.end_after_grace(NixSignal::SIGTERM);
                    }
                    if signal == NixSignal::SIGHUP as i32 && self.terminal_is_gone() {
                        self.end_after_grace(NixSignal::SIGHUP);
                    }
                }
                Streams::Capture | Streams::Relay(_) => {
                    if let Some(client) = &mut self.client {
                        client.signalled(signal);
                    }
                    self.end(Cause::Cancelled(signal));
                }
            }
        }
        Ok(())
    }

    pub(super) fn serve_client(&mut self) -> Result<(), Errno> {
        let Some(client) = &mut self.client else { return Ok(()) };
        let asked = client.look();
        if asked != Asked::Nothing
            && let Some(fd) = client.requests()
        {
            epoll::delete(&self.epoll, fd)?;
        }
        if let Asked::Cancel(signal) = asked {
            self.end(Cause::Cancelled(signal));
        }
        Ok(())
    }

    /// Passes a signal on to the program, the oldest child of pid 1.
    fn forward(&mut self, signal: i32) {
        let ending = [NixSignal::SIGTERM, NixSignal::SIGINT, NixSignal::SIGHUP, NixSignal::SIGQUIT];
        self.asked_to_end |= ending.iter().any(|end| *end as i32 == signal);
        let pid = self.teardown.sandbox.pid();
        let children = self.outer.proc.read(&format!("task/{pid}/children")).unwrap_or_default();
        let program = children.split_ascii_whitespace().next().and_then(|child| child.parse().ok()).and_then(Pid::from_raw);
        if let (Some(program), Some(signal)) = (program, Signal::from_named_raw(signal)) {
            // It may have ended: its status comes through the status pipe.
            let _ended = pidfd_open(program, PidfdFlags::empty()).and_then(|pidfd| pidfd_send_signal(&pidfd, signal));
        }
    }
}
