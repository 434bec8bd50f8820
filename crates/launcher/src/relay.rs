//! Passing the program's streams on: its stdin fed, its output copied out.
//!
//! No descriptor of the caller enters the sandbox: through one, the code could reopen
//! files, reconnect sockets or walk directories. Every copy goes through a pipe, and
//! none may hold up the loop that watches the limits. What the bytes mean is not
//! looked at.

use std::{mem::MaybeUninit, time::Duration};

use rustix::{
    event::{PollFd, PollFlags, Timespec, epoll, poll},
    fd::{AsFd, BorrowedFd, OwnedFd},
    fs::{OFlags, fcntl_getfl, fcntl_setfl},
    io::Errno,
};

use crate::{
    capture::Capture,
    own::OwnStream,
    terminal::is_gone,
    text::{self, Text},
};

/// A pipe that polls as writable has room for this (PIPE_BUF), unless somebody else is faster.
const PIECE: usize = 4096;
/// What is read of a stream that is to be UTF-8: it may become three times as long.
const PIECE_OF_TEXT: usize = 1360;
const _: () = assert!(text::longest(PIECE_OF_TEXT) <= PIECE);

/// Where one output stream goes.
pub(crate) enum Outlet {
    /// Into memory, bounded.
    Capture(Capture),
    /// To one of the launcher's own streams.
    Relay(Passage),
}

/// The way to one of the launcher's own streams.
pub(crate) struct Passage {
    to: OwnStream,
    /// Read, and not written yet.
    held: Vec<u8>,
    total: u64,
    kept: Option<Capture>,
    /// It is to be UTF-8.
    text: Option<Text>,
}

/// What came of one turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// More may come.
    More,
    /// The receiver is not ready: wait for it.
    Blocked,
    /// The stream has ended.
    Ended,
}

impl Outlet {
    /// To this stream; some of it is kept as well, and all becomes UTF-8 where there is `text`.
    pub(crate) fn relay(to: OwnStream, kept: Option<Capture>, text: Option<Text>) -> Self {
        Outlet::Relay(Passage { to, held: Vec::new(), total: 0, kept, text })
    }

    pub(crate) fn total(&self) -> u64 {
        match self {
            Outlet::Capture(capture) => capture.total(),
            Outlet::Relay(passage) => passage.total,
        }
    }

    /// Moves what is there, once.
    ///
    /// # Errors
    /// It cannot be read. EIO from a terminal means that its other side has closed.
    pub(crate) fn turn(&mut self, from: &OwnedFd, buffer: &mut [MaybeUninit<u8>]) -> Result<Turn, Errno> {
        let room = match self {
            Outlet::Capture(_) => buffer.len(),
            Outlet::Relay(passage) => match passage.pass_on()? {
                // It would never become writable.
                Turn::More if !passage.to.is_open()? => return Err(Errno::BADF),
                Turn::More if !is_writable(passage.to.fd()) => return Ok(Turn::Blocked),
                Turn::More if passage.text.is_some() => PIECE_OF_TEXT,
                Turn::More => PIECE,
                turn => return Ok(turn),
            },
        };
        let Some(space) = buffer.get_mut(..room) else { return Ok(Turn::Ended) };
        let bytes: &[u8] = match rustix::io::read(from, space) {
            Ok(([], _)) => return self.finish(),
            Ok((bytes, _)) => bytes,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(Turn::More),
            Err(Errno::IO) if rustix::termios::isatty(from) => return self.finish(),
            Err(errno) => return Err(errno),
        };
        match self {
            Outlet::Capture(capture) => {
                capture.push(bytes);
                Ok(Turn::More)
            }
            Outlet::Relay(passage) => {
                passage.take(bytes);
                passage.pass_on()
            }
        }
    }

    /// The stream has ended; it is found to be so again while something is held.
    fn finish(&mut self) -> Result<Turn, Errno> {
        let Outlet::Relay(passage) = self else { return Ok(Turn::Ended) };
        if let Some(text) = &mut passage.text {
            passage.held.extend_from_slice(text.finish());
        }
        Ok(if passage.pass_on()? == Turn::Blocked { Turn::Blocked } else { Turn::Ended })
    }

    /// Whether something was read that the receiver has not taken.
    pub(crate) fn holds(&self) -> bool {
        matches!(self, Outlet::Relay(passage) if !passage.held.is_empty())
    }

    /// The launcher's stream that must become writable after [`Turn::Blocked`].
    pub(crate) fn target(&self) -> Option<BorrowedFd<'static>> {
        match self {
            Outlet::Capture(_) => None,
            Outlet::Relay(passage) => Some(passage.to.fd()),
        }
    }

    /// What was kept.
    pub(crate) fn into_kept(self) -> Option<Capture> {
        match self {
            Outlet::Capture(capture) => Some(capture),
            Outlet::Relay(passage) => passage.kept,
        }
    }
}

impl Passage {
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
    fn pass_on(&mut self) -> Result<Turn, Errno> {
        while !self.held.is_empty() {
            match self.to.write(&self.held) {
                Ok(written) => drop(self.held.drain(..written)),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(Turn::Blocked),
                // A reader that went away is the program's to notice: its next write fails.
                Err(Errno::PIPE | Errno::CONNRESET) => return Ok(self.give_up()),
                Err(Errno::IO) if rustix::termios::isatty(self.to.fd()) || is_gone(self.to.fd()) => return Ok(self.give_up()),
                Err(errno) => return Err(errno),
            }
        }
        Ok(Turn::More)
    }

    /// Nobody takes any of it any more.
    fn give_up(&mut self) -> Turn {
        self.held.clear();
        Turn::Ended
    }
}

fn is_writable(fd: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::new(&fd, PollFlags::OUT)];
    // An error condition counts as ready: the write will tell.
    matches!(poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(n) if n > 0)
}

/// Where the program's stdin comes from.
pub(crate) enum Source<'a> {
    Bytes {
        all: std::borrow::Cow<'a, [u8]>,
        /// How many have been passed on.
        passed: usize,
    },
    Stdin {
        stream: OwnStream,
        pollable: bool,
    },
}

impl Source<'_> {
    /// The launcher's own.
    pub(crate) fn stdin() -> Self {
        Source::Stdin { stream: OwnStream::stdin(), pollable: false }
    }
}

/// Feeds the program's stdin.
pub(crate) struct Feed<'a> {
    to: Option<OwnedFd>,
    source: Source<'a>,
    buffer: Vec<u8>,
    /// The source gives no more, though the buffer may still hold some.
    ended: bool,
    waits_for_room: bool,
    keep_open: bool,
}

/// The loop's names for the two descriptors of a feed.
pub(crate) struct FeedTokens {
    pub(crate) source: epoll::EventData,
    pub(crate) target: epoll::EventData,
}

impl<'a> Feed<'a> {
    /// `keep_open`: the target is a terminal, whose end of input is a character.
    pub(crate) fn new(to: OwnedFd, source: Source<'a>, keep_open: bool) -> Result<Self, Errno> {
        fcntl_setfl(&to, fcntl_getfl(&to)? | OFlags::NONBLOCK)?;
        Ok(Feed { to: Some(to), source, buffer: Vec::new(), ended: false, waits_for_room: false, keep_open })
    }

    /// Begins: registers what there is to wait for.
    pub(crate) fn start(&mut self, epoll: &OwnedFd, tokens: &FeedTokens) -> Result<(), Errno> {
        match &mut self.source {
            Source::Bytes { .. } => self.on_room(epoll, tokens),
            // Nothing would ever be there to read.
            Source::Stdin { stream, .. } if !stream.is_open().unwrap_or(false) => {
                self.ended = true;
                self.push(epoll, tokens)
            }
            Source::Stdin { pollable, .. } => match epoll::add(epoll, stdin(), tokens.source, epoll::EventFlags::IN) {
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
    pub(crate) fn on_source(&mut self, epoll: &OwnedFd, tokens: &FeedTokens) -> Result<(), Errno> {
        if !self.refill()? {
            self.ended = true;
            epoll::delete(epoll, stdin())?;
        }
        self.push(epoll, tokens)
    }

    /// The program's stdin has room.
    pub(crate) fn on_room(&mut self, epoll: &OwnedFd, tokens: &FeedTokens) -> Result<(), Errno> {
        loop {
            let pollable = matches!(self.source, Source::Stdin { pollable: true, .. });
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
            Source::Bytes { all, passed } => {
                let rest = all.get(*passed..).unwrap_or_default();
                let piece = rest.get(..1 << 16).unwrap_or(rest);
                self.buffer.extend_from_slice(piece);
                *passed += piece.len();
                Ok(!piece.is_empty())
            }
            Source::Stdin { stream, .. } => {
                let mut piece = [0; PIECE];
                match stream.read(&mut piece) {
                    Ok(length) => {
                        self.buffer.extend_from_slice(piece.get(..length).unwrap_or_default());
                        Ok(length > 0)
                    }
                    Err(Errno::AGAIN | Errno::INTR) => Ok(true),
                    // Open for writing only, as nohup(1) leaves it: there is nothing to read.
                    Err(Errno::BADF) => Ok(false),
                    // A terminal that was hung up.
                    Err(Errno::IO) if rustix::termios::isatty(stdin()) || is_gone(stdin()) => Ok(false),
                    Err(errno) => Err(errno),
                }
            }
        }
    }

    fn push(&mut self, epoll: &OwnedFd, tokens: &FeedTokens) -> Result<(), Errno> {
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
            if matches!(self.source, Source::Stdin { pollable: true, .. }) && !self.ended {
                epoll::modify(epoll, stdin(), tokens.source, epoll::EventFlags::IN)?;
            }
        }
        if self.ended && !self.keep_open { self.close(epoll) } else { Ok(()) }
    }

    fn wait_for_room(&mut self, epoll: &OwnedFd, tokens: &FeedTokens) -> Result<(), Errno> {
        let (Some(to), false) = (&self.to, self.waits_for_room) else { return Ok(()) };
        epoll::add(epoll, to, tokens.target, epoll::EventFlags::OUT)?;
        self.waits_for_room = true;
        if matches!(self.source, Source::Stdin { pollable: true, .. }) {
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
        if matches!(self.source, Source::Stdin { pollable: true, .. }) {
            match epoll::delete(epoll, stdin()) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(errno) => return Err(errno),
            }
        }
        Ok(())
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
