//! Passing the program's streams on: its stdin fed, its output copied out.
//!
//! No descriptor of the caller enters the sandbox: through one the code could reopen files,
//! reconnect sockets or walk directories. Every byte goes through a pipe, and no copy may hold up
//! the loop that watches the limits. What the bytes mean is not looked at.

use std::{mem::MaybeUninit, time::Duration};

use rustix::{
    event::{PollFd, PollFlags, Timespec, epoll, poll},
    fd::{AsFd, BorrowedFd, OwnedFd},
    fs::{OFlags, fcntl_getfl, fcntl_setfl},
    io::Errno,
};

use crate::{
    capture::Capture,
    nonblocking::NonblockingStdio,
    terminal::is_gone,
    utf8::{self, LossyUtf8},
};

/// A pipe that polls as writable has room for this (PIPE_BUF), unless another process fills it
/// first.
const PIECE: usize = 4096;
/// Bytes read at once of a stream that is to be UTF-8: it may become three times as long.
const PIECE_OF_TEXT: usize = 1360;
const _: () = assert!(utf8::max_len(PIECE_OF_TEXT) <= PIECE);

/// Where one output stream goes.
pub(crate) enum OutputSink {
    /// Into memory, bounded.
    Capture(Capture),
    /// To one of the launcher's own streams.
    Relay(Forwarder),
}

/// Forwards to one of the launcher's own streams.
pub(crate) struct Forwarder {
    to: NonblockingStdio,
    /// Read, and not written yet.
    held: Vec<u8>,
    total: u64,
    kept: Option<Capture>,
    /// It is to be UTF-8.
    text: Option<LossyUtf8>,
}

/// What came of one transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transfer {
    /// More may come.
    More,
    /// The receiver is not ready: wait for it.
    Blocked,
    /// The stream has ended.
    Ended,
}

impl OutputSink {
    /// To this stream; `kept` keeps some of it as well, `text` makes all of it UTF-8.
    pub(crate) fn relay(to: NonblockingStdio, kept: Option<Capture>, text: Option<LossyUtf8>) -> Self {
        OutputSink::Relay(Forwarder { to, held: Vec::new(), total: 0, kept, text })
    }

    pub(crate) fn total(&self) -> u64 {
        match self {
            OutputSink::Capture(capture) => capture.total(),
            OutputSink::Relay(forwarder) => forwarder.total,
        }
    }

    /// Moves what is there, once. `heard` gets what is captured.
    ///
    /// # Errors
    /// It cannot be read. EIO from a terminal means that its other side has closed.
    pub(crate) fn transfer(
        &mut self,
        from: &OwnedFd,
        buffer: &mut [MaybeUninit<u8>],
        heard: &mut dyn FnMut(&[u8]),
    ) -> Result<Transfer, Errno> {
        let room = match self {
            OutputSink::Capture(_) => buffer.len(),
            OutputSink::Relay(forwarder) => match forwarder.pass_on()? {
                // It would never become writable.
                Transfer::More if !forwarder.to.is_open()? => return Err(Errno::BADF),
                Transfer::More if !is_writable(forwarder.to.fd()) => return Ok(Transfer::Blocked),
                Transfer::More if forwarder.text.is_some() => PIECE_OF_TEXT,
                Transfer::More => PIECE,
                transfer => return Ok(transfer),
            },
        };
        let Some(space) = buffer.get_mut(..room) else { return Ok(Transfer::Ended) };
        let bytes: &[u8] = match rustix::io::read(from, space) {
            Ok(([], _)) => return self.finish(),
            Ok((bytes, _)) => bytes,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(Transfer::More),
            Err(Errno::IO) if rustix::termios::isatty(from) => return self.finish(),
            Err(errno) => return Err(errno),
        };
        match self {
            OutputSink::Capture(capture) => {
                capture.push(bytes);
                heard(bytes);
                Ok(Transfer::More)
            }
            OutputSink::Relay(forwarder) => {
                forwarder.take(bytes);
                forwarder.pass_on()
            }
        }
    }

    /// The stream has ended. This is called again while something is held.
    fn finish(&mut self) -> Result<Transfer, Errno> {
        let OutputSink::Relay(forwarder) = self else { return Ok(Transfer::Ended) };
        if let Some(text) = &mut forwarder.text {
            forwarder.held.extend_from_slice(text.finish());
        }
        Ok(if forwarder.pass_on()? == Transfer::Blocked { Transfer::Blocked } else { Transfer::Ended })
    }

    /// Whether something was read that the receiver has not taken.
    pub(crate) fn holds(&self) -> bool {
        matches!(self, OutputSink::Relay(forwarder) if !forwarder.held.is_empty())
    }

    /// The launcher's stream that must become writable after [`Transfer::Blocked`].
    pub(crate) fn target(&self) -> Option<BorrowedFd<'static>> {
        match self {
            OutputSink::Capture(_) => None,
            OutputSink::Relay(forwarder) => Some(forwarder.to.fd()),
        }
    }

    /// What was kept.
    pub(crate) fn into_kept(self) -> Option<Capture> {
        match self {
            OutputSink::Capture(capture) => Some(capture),
            OutputSink::Relay(forwarder) => forwarder.kept,
        }
    }
}

impl Forwarder {
    fn take(&mut self, bytes: &[u8]) {
        self.total += bytes.len() as u64;
        if let Some(kept) = &mut self.kept {
            kept.push(bytes);
        }
        match &mut self.text {
            Some(text) => self.held.extend_from_slice(&text.push(bytes)),
            None => self.held.extend_from_slice(bytes),
        }
    }

    /// Writes what is held.
    fn pass_on(&mut self) -> Result<Transfer, Errno> {
        while !self.held.is_empty() {
            match self.to.write(&self.held) {
                Ok(written) => drop(self.held.drain(..written)),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(Transfer::Blocked),
                // A reader that went away is the program's to notice: its next write fails.
                Err(Errno::PIPE | Errno::CONNRESET) => return Ok(self.give_up()),
                Err(Errno::IO) if rustix::termios::isatty(self.to.fd()) || is_gone(self.to.fd()) => return Ok(self.give_up()),
                Err(errno) => return Err(errno),
            }
        }
        Ok(Transfer::More)
    }

    /// The receiver is gone.
    fn give_up(&mut self) -> Transfer {
        self.held.clear();
        Transfer::Ended
    }
}

fn is_writable(fd: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::new(&fd, PollFlags::OUT)];
    // An error condition counts as ready: the write will tell.
    matches!(poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(n) if n > 0)
}

/// Where the program's stdin comes from.
pub(crate) enum StdinSource<'a> {
    Bytes {
        all: std::borrow::Cow<'a, [u8]>,
        /// How many have been passed on.
        passed: usize,
    },
    Stdin {
        stream: NonblockingStdio,
        pollable: bool,
    },
}

impl StdinSource<'_> {
    /// The launcher's own.
    pub(crate) fn stdin() -> Self {
        StdinSource::Stdin { stream: NonblockingStdio::stdin(), pollable: false }
    }
}

/// Feeds the program's stdin from a source.
pub(crate) struct StdinPump<'a> {
    to: Option<OwnedFd>,
    source: StdinSource<'a>,
    buffer: Vec<u8>,
    /// The source gives no more, though the buffer may still hold some.
    ended: bool,
    waits_for_room: bool,
    keep_open: bool,
}

/// The loop's names for the two descriptors of a feed.
pub(crate) struct PumpTokens {
    pub(crate) source: epoll::EventData,
    pub(crate) target: epoll::EventData,
}

impl<'a> StdinPump<'a> {
    /// `keep_open`: the target is a terminal, whose end of input is a character.
    pub(crate) fn new(to: OwnedFd, source: StdinSource<'a>, keep_open: bool) -> Result<Self, Errno> {
        fcntl_setfl(&to, fcntl_getfl(&to)? | OFlags::NONBLOCK)?;
        Ok(StdinPump { to: Some(to), source, buffer: Vec::new(), ended: false, waits_for_room: false, keep_open })
    }

    /// Begins: registers what there is to wait for.
    pub(crate) fn start(&mut self, epoll: &OwnedFd, tokens: &PumpTokens) -> Result<(), Errno> {
        match &mut self.source {
            StdinSource::Bytes { .. } => self.on_room(epoll, tokens),
            // Nothing would ever be there to read.
            StdinSource::Stdin { stream, .. } if !stream.is_open().unwrap_or(false) => {
                self.ended = true;
                self.push(epoll, tokens)
            }
            StdinSource::Stdin { pollable, .. } => match epoll::add(epoll, stdin(), tokens.source, epoll::EventFlags::IN) {
                Ok(()) => {
                    *pollable = true;
                    Ok(())
                }
                // A regular file is always ready, and epoll refuses it.
                Err(Errno::PERM) => self.on_room(epoll, tokens),
                Err(errno) => Err(errno),
            },
        }
    }

    /// The launcher's stdin has something.
    pub(crate) fn on_source(&mut self, epoll: &OwnedFd, tokens: &PumpTokens) -> Result<(), Errno> {
        if !self.refill()? {
            self.ended = true;
            epoll::delete(epoll, stdin())?;
        }
        self.push(epoll, tokens)
    }

    /// The program's stdin has room.
    pub(crate) fn on_room(&mut self, epoll: &OwnedFd, tokens: &PumpTokens) -> Result<(), Errno> {
        loop {
            let pollable = matches!(self.source, StdinSource::Stdin { pollable: true, .. });
            if self.buffer.is_empty() && !pollable && !self.refill()? {
                self.ended = true;
            }
            self.push(epoll, tokens)?;
            if self.to.is_none() || self.waits_for_room || pollable {
                return Ok(());
            }
        }
    }

    /// Reads the next piece; false at the end.
    fn refill(&mut self) -> Result<bool, Errno> {
        match &mut self.source {
            StdinSource::Bytes { all, passed } => {
                let rest = all.get(*passed..).unwrap_or_default();
                let piece = rest.get(..1 << 16).unwrap_or(rest);
                self.buffer.extend_from_slice(piece);
                *passed += piece.len();
                Ok(!piece.is_empty())
            }
            StdinSource::Stdin { stream, .. } => {
                let mut piece = [0; PIECE];
                match stream.read(&mut piece) {
                    Ok(length) => {
                        self.buffer.extend_from_slice(piece.get(..length).unwrap_or_default());
                        Ok(length > 0)
                    }
                    Err(Errno::AGAIN | Errno::INTR) => Ok(true),
                    // Open for writing only, as nohup(1) leaves it: there is nothing to read.
                    Err(Errno::BADF) => Ok(false),
                    // A terminal that was hung up, or is another process group's.
                    Err(Errno::IO) if rustix::termios::isatty(stdin()) || is_gone(stdin()) => Ok(false),
                    Err(errno) => Err(errno),
                }
            }
        }
    }

    fn push(&mut self, epoll: &OwnedFd, tokens: &PumpTokens) -> Result<(), Errno> {
        let Some(to) = &self.to else { return Ok(()) };
        while !self.buffer.is_empty() {
            match rustix::io::write(to, &self.buffer) {
                Ok(written) => drop(self.buffer.drain(..written)),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return self.wait_for_room(epoll, tokens),
                // The program reads no more; EIO: it has closed its terminal.
                Err(Errno::PIPE | Errno::IO) => return self.close(epoll),
                Err(errno) => return Err(errno),
            }
        }
        if self.waits_for_room {
            epoll::delete(epoll, to)?;
            self.waits_for_room = false;
            if matches!(self.source, StdinSource::Stdin { pollable: true, .. }) && !self.ended {
                epoll::modify(epoll, stdin(), tokens.source, epoll::EventFlags::IN)?;
            }
        }
        if self.ended && !self.keep_open { self.close(epoll) } else { Ok(()) }
    }

    fn wait_for_room(&mut self, epoll: &OwnedFd, tokens: &PumpTokens) -> Result<(), Errno> {
        let (Some(to), false) = (&self.to, self.waits_for_room) else { return Ok(()) };
        epoll::add(epoll, to, tokens.target, epoll::EventFlags::OUT)?;
        self.waits_for_room = true;
        if matches!(self.source, StdinSource::Stdin { pollable: true, .. }) {
            // Nothing more is read until there is room for it.
            match epoll::modify(epoll, stdin(), tokens.source, epoll::EventFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
    }

    fn close(&mut self, epoll: &OwnedFd) -> Result<(), Errno> {
        if let Some(to) = self.to.take()
            && std::mem::take(&mut self.waits_for_room)
        {
            epoll::delete(epoll, &to)?;
        }
        if matches!(self.source, StdinSource::Stdin { pollable: true, .. }) {
            return unregister(epoll, stdin());
        }
        Ok(())
    }
}

/// Takes a descriptor out of the loop, if it is in it.
pub(crate) fn unregister(epoll: &OwnedFd, fd: BorrowedFd<'_>) -> Result<(), Errno> {
    match epoll::delete(epoll, fd) {
        Ok(()) | Err(Errno::NOENT | Errno::PERM) => Ok(()),
        Err(errno) => Err(errno),
    }
}

fn stdin() -> BorrowedFd<'static> {
    rustix::stdio::stdin()
}

/// Whether a descriptor has something to read now.
///
/// # Errors
/// ENOMEM.
pub(crate) fn is_readable(fd: impl AsFd) -> Result<bool, Errno> {
    is_readable_within(fd, Duration::ZERO)
}

/// Whether something can be read from it, now or before this time is over.
///
/// # Errors
/// Likewise.
pub(crate) fn is_readable_within(fd: impl AsFd, time: Duration) -> Result<bool, Errno> {
    let fd = fd.as_fd();
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    let time = Timespec { tv_sec: time.as_secs().cast_signed(), tv_nsec: i64::from(time.subsec_nanos()) };
    Ok(rustix::io::retry_on_intr(|| poll(&mut fds, Some(&time)))? > 0)
}
