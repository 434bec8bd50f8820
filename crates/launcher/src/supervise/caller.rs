//! What the caller does while the program runs: signals, a word of the client's, a terminal.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal as NixSignal;
use rustix::{
    event::epoll,
    fd::OwnedFd,
    io::Errno,
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};

use super::{FEED, Phase, Supervision, Token};
use crate::{
    Asked, Streams,
    relay::{Feed, Source},
    terminal::{self, RawTerminal},
    verdict::Cause,
};

/// How long a payload that was told to end has for it, where whoever told it will not wait.
const GRACE: Duration = Duration::from_millis(500);

impl Supervision<'_> {
    /// The inner terminal takes the place of the pipes.
    pub(super) fn use_terminal(&mut self, master: OwnedFd) -> Result<(), Errno> {
        terminal::copy_size(&master);
        self.raw = Some(RawTerminal::enter()?);
        let stream = rustix::io::fcntl_dupfd_cloexec(&master, 0)?;
        if let Some(pipe) = self.stdout.replace(stream) {
            epoll::delete(&self.epoll, &pipe)?;
        }
        if let Some(stream) = &self.stdout {
            epoll::add(&self.epoll, stream, Token::Stdout.data(), epoll::EventFlags::IN)?;
        }
        let input = rustix::io::fcntl_dupfd_cloexec(&master, 0)?;
        self.feed = Some(Feed::new(input, Source::stdin(), true)?);
        self.master = Some(master);
        Ok(())
    }

    /// The launcher's stdin has something, or is no more.
    pub(super) fn serve_source(&mut self) -> Result<(), Errno> {
        self.feed.as_mut().map_or(Ok(()), |feed| feed.on_source(&self.epoll, &FEED))?;
        // The kernel tells the leader of the terminal's session, who may be another process.
        if self.is_left_alone() && self.ends_at.is_none() {
            self.forward(NixSignal::SIGHUP as i32);
            self.end_after_grace(NixSignal::SIGHUP);
        }
        Ok(())
    }

    /// Whether the terminal is gone on which the program was run: nobody is there who could
    /// end it, and its policy may have no wall clock.
    fn is_left_alone(&self) -> bool {
        self.master.is_some() && terminal::own_is_gone()
    }

    fn end_after_grace(&mut self, signal: NixSignal) {
        self.ends_at.get_or_insert((Instant::now() + GRACE, signal as i32));
    }

    pub(super) fn serve_signals(&mut self) -> Result<(), Errno> {
        while let Some(signal) = self.signals.take() {
            if signal == NixSignal::SIGWINCH as i32 {
                if let Some(master) = &self.master {
                    terminal::copy_size(master);
                }
            } else if self.streams == Streams::Capture || self.phase == Phase::SettingUp {
                if let Some(client) = &mut self.client {
                    client.signalled(signal);
                }
                self.end(Cause::Cancelled(signal));
            } else {
                self.forward(signal);
                let Streams::Relay(relay) = self.streams else { continue };
                if relay.ends_on_sigterm && signal == NixSignal::SIGTERM as i32 {
                    self.end_after_grace(NixSignal::SIGTERM);
                }
                if signal == NixSignal::SIGHUP as i32 && self.is_left_alone() {
                    self.end_after_grace(NixSignal::SIGHUP);
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
        let pid = self.sandbox.pid();
        let children = self.outer.proc.read(&format!("task/{pid}/children")).unwrap_or_default();
        let program = children.split_ascii_whitespace().next().and_then(|child| child.parse().ok()).and_then(Pid::from_raw);
        if let (Some(program), Some(signal)) = (program, Signal::from_named_raw(signal)) {
            // Ended meanwhile: its status is on the way.
            let _ended = pidfd_open(program, PidfdFlags::empty()).and_then(|pidfd| pidfd_send_signal(&pidfd, signal));
        }
    }
}
