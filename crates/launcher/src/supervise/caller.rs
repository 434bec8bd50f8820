//! What the caller does while the program runs: signals, the client's requests, the terminal.
//!
//! The caller can end a run or pass signals on to the program. It changes no limit.

use std::time::Instant;

use nix::sys::signal::Signal as NixSignal;
use rustix::{
    event::epoll,
    io::Errno,
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};

use super::{PUMP, Supervision, Token};
use crate::{
    Asked, Streams,
    signals::{CANCEL, GRACE},
    terminal,
    verdict::Cause,
};

impl Supervision<'_> {
    /// The launcher's stdin has something, or has ended.
    pub(super) fn serve_source(&mut self) -> Result<(), Errno> {
        self.streams.stdin.as_mut().map_or(Ok(()), |stdin| stdin.on_source(&self.epoll, &PUMP))?;
        // The kernel tells the leader of the terminal's session, which may be another process.
        if self.terminal_is_gone() && self.quota.grace.is_none() {
            self.hang_up();
        }
        Ok(())
    }

    /// The process that started the run has ended, or its terminal is gone, and nothing else may end
    /// the run: its policy need not have a wall clock. A command gets SIGHUP and [`GRACE`] to end by
    /// itself; a request is ended at once.
    pub(super) fn hang_up(&mut self) {
        match self.streams.mode {
            Streams::Relay(_) if !self.state.is_before_ready() => {
                self.forward(NixSignal::SIGHUP as i32);
                self.end_after_grace(NixSignal::SIGHUP as i32);
            }
            Streams::Capture | Streams::Relay(_) => self.end(Cause::Cancelled(NixSignal::SIGHUP as i32)),
        }
    }

    /// Whether the terminal is gone on which the program was run.
    fn terminal_is_gone(&self) -> bool {
        self.streams.terminal.is_some() && terminal::own_is_gone()
    }

    fn end_after_grace(&mut self, signal: i32) {
        self.quota.grace.get_or_insert((Instant::now() + GRACE, signal));
    }

    pub(super) fn serve_signals(&mut self) -> Result<(), Errno> {
        while let Some(signal) = self.teardown.signals.take() {
            match self.streams.mode {
                _ if signal == CANCEL => self.end(Cause::Cancelled(NixSignal::SIGTERM as i32)),
                _ if signal == NixSignal::SIGWINCH as i32 => {
                    if let Some(terminal) = &self.streams.terminal {
                        terminal::copy_size(&terminal.master);
                    }
                }
                Streams::Relay(_) if !self.state.is_before_ready() => {
                    self.forward(signal);
                    // The others are the program's to answer: an interpreter's prompt lives on.
                    if [NixSignal::SIGTERM, NixSignal::SIGHUP].iter().any(|end| *end as i32 == signal) {
                        self.end_after_grace(signal);
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
            return Ok(());
        }
        self.watch_for_room()
    }

    /// Watches for room to write to the client as long as it wants some.
    pub(super) fn watch_for_room(&mut self) -> Result<(), Errno> {
        let Some(client) = &self.client else { return Ok(()) };
        let wants = client.wants_room();
        if std::mem::replace(&mut self.client_wants_room, wants) == wants {
            return Ok(());
        }
        let Some(fd) = client.requests() else { return Ok(()) };
        let events = epoll::EventFlags::IN | if wants { epoll::EventFlags::OUT } else { epoll::EventFlags::empty() };
        match epoll::modify(&self.epoll, fd, Token::Client.data(), events) {
            // It is watched no more, as the run is ending.
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(errno),
        }
    }

    /// Passes a signal on to the program, the oldest child of pid 1.
    fn forward(&mut self, signal: i32) {
        let ending = [NixSignal::SIGTERM, NixSignal::SIGINT, NixSignal::SIGHUP, NixSignal::SIGQUIT];
        self.asked_to_end |= ending.iter().any(|end| *end as i32 == signal);
        let oldest = || {
            let pid = self.teardown.sandbox.pid();
            let children = self.outer.proc.read(&format!("task/{pid}/children")).unwrap_or_default();
            children.split_ascii_whitespace().next().and_then(|child| child.parse().ok()).and_then(Pid::from_raw)
        };
        // Only while it is listed after it was opened was the pid its own all the time.
        let opened = oldest().and_then(|program| Some((program, pidfd_open(program, PidfdFlags::empty()).ok()?)));
        let program = opened.filter(|(program, _)| oldest() == Some(*program));
        if let (Some((_, program)), Some(signal)) = (program, Signal::from_named_raw(signal)) {
            // It may have ended: its status comes through the status pipe.
            let _ended = pidfd_send_signal(&program, signal);
        }
    }
}
