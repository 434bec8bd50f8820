//! The payload's streams while it runs, and the caller's terminal in front of them.
//!
//! No read or write here waits. What the bytes mean is not looked at.

use std::{
    mem::MaybeUninit,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, epoll, poll},
    fd::{AsFd, BorrowedFd, OwnedFd},
    io::Errno,
};
use stockade_policy::plan::Plan;
use stockade_protocol::{LimitKey, OutputStream, PerStream};

use super::{PUMP, Token};
use crate::{
    Client, Stdin, Streams,
    capture::Capture,
    child_data::LauncherPipes,
    nonblocking::NonblockingStdio,
    relay::{OutputSink, StdinPump, StdinSource, Transfer, is_readable, unregister},
    signals::Signals,
    terminal::{self, RawTerminal},
    utf8::LossyUtf8,
};

/// Bytes kept of relayed errors; hints are read off the last half.
const KEPT_OF_ERRORS: u64 = 32 << 10;
/// A program that prints this many times the limit is ended.
const OUTPUT_FACTOR: u64 = 64;
/// How long a slow reader may take for the rest, where the run was to end.
const SLOW_READER: Duration = Duration::from_secs(2);

/// The client, if there is one, that hears what is printed.
pub(super) type Listening<'l, 'c> = &'l mut Option<&'c mut dyn Client>;

fn tell(client: Listening<'_, '_>, stream: OutputStream, bytes: &[u8]) {
    if let Some(client) = client {
        client.printed(stream, bytes);
    }
}

/// The payload's stdin, stdout and stderr.
pub(super) struct PayloadStreams<'a> {
    pub(super) mode: Streams,
    pub(super) output: OutputPipe,
    pub(super) error: OutputPipe,
    pub(super) stdin: Option<StdinPump<'a>>,
    /// The inner terminal, where the payload has one.
    pub(super) terminal: Option<InnerTerminal>,
    pub(super) buffer: Box<[MaybeUninit<u8>]>,
}

/// The sandbox's terminal, and the caller's as long as it is raw.
pub(super) struct InnerTerminal {
    pub(super) master: OwnedFd,
    _raw: RawTerminal,
}

impl<'a> PayloadStreams<'a> {
    pub(super) fn new(plan: &Plan, mode: Streams, pipes: LauncherPipes, stdin: Stdin<'a>) -> Result<Self, Errno> {
        let sink = |stream, has_errors: bool| match mode {
            Streams::Capture => OutputSink::Capture(Capture::new(plan.limits.get(LimitKey::OutputSize))),
            Streams::Relay(relay) => {
                let kept = (relay.keep_errors && has_errors).then(|| Capture::new(Some(KEPT_OF_ERRORS)));
                let text = (relay.as_text && !plan.terminal).then(LossyUtf8::default);
                OutputSink::relay(stream, kept, text)
            }
        };
        let source = match stdin {
            Stdin::Bytes(all) => Some(StdinSource::Bytes { all, passed: 0 }),
            Stdin::Relay if !plan.terminal => Some(StdinSource::stdin()),
            Stdin::Relay | Stdin::Null => None,
        };
        let pump = pipes.stdin.zip(source).map(|(pipe, source)| StdinPump::new(pipe, source, false));
        // A terminal carries both.
        let (output, error) = (sink(NonblockingStdio::stdout(), plan.terminal), sink(NonblockingStdio::stderr(), !plan.terminal));
        Ok(PayloadStreams {
            mode,
            output: OutputPipe { pipe: Some(pipes.stdout), sink: output, tokens: [Token::Stdout, Token::StdoutTarget] },
            error: OutputPipe { pipe: Some(pipes.stderr), sink: error, tokens: [Token::Stderr, Token::StderrTarget] },
            stdin: pump.transpose()?,
            terminal: None,
            buffer: Box::new_uninit_slice(1 << 16),
        })
    }

    pub(super) fn register(&self, epoll: &OwnedFd) -> Result<(), Errno> {
        self.output.register(epoll)?;
        self.error.register(epoll)
    }

    /// The inner terminal takes the place of the pipes.
    pub(super) fn use_terminal(&mut self, epoll: &OwnedFd, master: OwnedFd) -> Result<(), Errno> {
        terminal::copy_size(&master);
        let raw = RawTerminal::enter()?;
        let stream = rustix::io::fcntl_dupfd_cloexec(&master, 0)?;
        if let Some(pipe) = self.output.pipe.replace(stream) {
            epoll::delete(epoll, &pipe)?;
        }
        self.output.register(epoll)?;
        let input = rustix::io::fcntl_dupfd_cloexec(&master, 0)?;
        self.stdin = Some(StdinPump::new(input, StdinSource::stdin(), true)?);
        self.terminal = Some(InnerTerminal { master, _raw: raw });
        Ok(())
    }

    /// Begins to feed stdin.
    pub(super) fn feed(&mut self, epoll: &OwnedFd) -> Result<(), Errno> {
        self.stdin.as_mut().map_or(Ok(()), |stdin| stdin.start(epoll, &PUMP))
    }

    /// Moves what there is of one stream, once; the client hears of it.
    pub(super) fn forward(&mut self, stream: OutputStream, epoll: &OwnedFd, client: Listening<'_, '_>) -> Result<(), Errno> {
        let pipe = match stream {
            OutputStream::Stdout => &mut self.output,
            OutputStream::Stderr => &mut self.error,
        };
        pipe.forward(epoll, &mut self.buffer, &mut |bytes| tell(client, stream, bytes))
    }

    /// Whether so much was captured of a stream that the program is to be ended.
    pub(super) fn is_flooded(&self, limit: Option<u64>) -> bool {
        let most = limit.map(|limit| limit.saturating_mul(OUTPUT_FACTOR));
        self.mode == Streams::Capture && most.is_some_and(|most| self.output.sink.total().max(self.error.sink.total()) > most)
    }

    /// Takes what the program had written when it ended; of a slow reader's as much as it
    /// reads in time, where the run `must_end`, and until a signal comes that can end this process.
    pub(super) fn drain(&mut self, signals: &Signals, must_end: bool, client: Listening<'_, '_>) -> [Result<(), Errno>; 2] {
        let timeout = must_end.then_some(SLOW_READER);
        [(OutputStream::Stdout, &mut self.output), (OutputStream::Stderr, &mut self.error)]
            .map(|(stream, pipe)| pipe.drain(signals, timeout, &mut self.buffer, &mut |bytes| tell(client, stream, bytes)))
    }

    /// Bytes that each stream carried.
    pub(super) fn total(&self) -> PerStream<u64> {
        PerStream { output: self.output.sink.total(), error: self.error.sink.total() }
    }
}

/// One of the payload's output streams.
pub(super) struct OutputPipe {
    /// None when it has ended.
    pipe: Option<OwnedFd>,
    pub(super) sink: OutputSink,
    /// Of the pipe, and of the launcher's own stream behind it.
    tokens: [Token; 2],
}

impl OutputPipe {
    fn register(&self, epoll: &OwnedFd) -> Result<(), Errno> {
        let [source, _] = self.tokens;
        self.pipe.as_ref().map_or(Ok(()), |pipe| epoll::add(epoll, pipe, source.data(), epoll::EventFlags::IN))
    }

    fn forward(&mut self, epoll: &OwnedFd, buffer: &mut [MaybeUninit<u8>], heard: &mut dyn FnMut(&[u8])) -> Result<(), Errno> {
        let Some(pipe) = &self.pipe else { return Ok(()) };
        let [source, target] = self.tokens;
        match self.sink.transfer(pipe, buffer, heard)? {
            Transfer::More => {
                if let Some(to) = self.sink.target() {
                    // It may have been waiting for its receiver.
                    epoll::modify(epoll, pipe, source.data(), epoll::EventFlags::IN)?;
                    unregister(epoll, to)?;
                }
            }
            Transfer::Blocked => {
                epoll::modify(epoll, pipe, source.data(), epoll::EventFlags::empty())?;
                if let Some(to) = self.sink.target() {
                    match epoll::add(epoll, to, target.data(), epoll::EventFlags::OUT) {
                        Ok(()) | Err(Errno::EXIST) => {}
                        Err(errno) => return Err(errno),
                    }
                }
            }
            Transfer::Ended => {
                epoll::delete(epoll, pipe)?;
                self.pipe = None;
                if let Some(to) = self.sink.target() {
                    // A receiver that went away would stay ready for ever.
                    unregister(epoll, to)?;
                }
            }
        }
        Ok(())
    }

    fn drain(
        &mut self,
        signals: &Signals,
        timeout: Option<Duration>,
        buffer: &mut [MaybeUninit<u8>],
        heard: &mut dyn FnMut(&[u8]),
    ) -> Result<(), Errno> {
        let Some(pipe) = self.pipe.take() else { return Ok(()) };
        // Every writer is dead, so what the pipe holds is finite. A writer that is alive against
        // all reason is not waited for.
        while self.sink.holds() || is_readable(&pipe)? {
            match self.sink.transfer(&pipe, buffer, heard)? {
                Transfer::Ended => break,
                Transfer::More => {}
                Transfer::Blocked => {
                    let Some(target) = self.sink.target() else { break };
                    if !becomes_writable(target, signals, timeout) {
                        break;
                    }
                }
            }
        }
        Ok(())
    }
}

/// Whether a stream becomes writable, before this time is over and before a signal comes that can
/// end this process. What signals else come does not matter: another process's may, at any time.
fn becomes_writable(stream: BorrowedFd<'_>, signals: &Signals, timeout: Option<Duration>) -> bool {
    let until = timeout.map(|timeout| Instant::now() + timeout);
    while !signals.has_ending() {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let left = left.map(|left| Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: i64::from(left.subsec_nanos()) });
        let mut fds = [PollFd::new(&stream, PollFlags::OUT), PollFd::from_borrowed_fd(signals.as_fd(), PollFlags::IN)];
        match poll(&mut fds, left.as_ref()) {
            Ok(0) => return false,
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => return false,
        }
        let [stream, _] = &fds;
        if !stream.revents().is_empty() {
            return true;
        }
    }
    false
}
