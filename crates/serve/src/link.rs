//! The front's ends of its sockets to the supervisor and to the workers.
//!
//! What comes from either is trusted as far as its form goes: a message that is none ends the
//! link. The supervisor sends descriptors along with some of its messages.

use std::{
    io::{self, IoSliceMut},
    mem::MaybeUninit,
    os::fd::OwnedFd,
};

use rustix::{
    io::Errno,
    net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, recv, recvmsg},
};
use stockade_protocol::service::{
    Begin, FrameDecoder, FromFront, FromSupervisor, FromWorker, MAX_PAYLOAD, Malformed, Message, Prepared, ToWorker,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, Interest},
    net::{
        UnixStream,
        unix::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::mpsc,
};

/// Bytes of one read.
const PIECE: usize = 64 << 10;

/// Why a link is of no use any more.
#[derive(Debug)]
pub enum LinkError {
    /// The other process has closed it.
    Closed,
    /// The kernel refuses to read or write.
    System(io::Error),
    /// It sent what is no message.
    Malformed(Malformed),
}

impl std::fmt::Display for LinkError {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            LinkError::Closed => out.write_str("the other process has closed its end"),
            LinkError::System(error) => error.fmt(out),
            LinkError::Malformed(why) => why.fmt(out),
        }
    }
}

impl std::error::Error for LinkError {}

impl From<io::Error> for LinkError {
    fn from(error: io::Error) -> Self {
        LinkError::System(error)
    }
}

impl From<Malformed> for LinkError {
    fn from(why: Malformed) -> Self {
        LinkError::Malformed(why)
    }
}

/// A worker.
#[derive(Debug)]
pub struct WorkerLink {
    stream: UnixStream,
    decoder: FrameDecoder,
}

impl WorkerLink {
    /// Of a socket that has come from the supervisor.
    ///
    /// # Errors
    /// It cannot be watched.
    pub fn new(socket: OwnedFd) -> io::Result<Self> {
        let stream = std::os::unix::net::UnixStream::from(socket);
        stream.set_nonblocking(true)?;
        Ok(WorkerLink { stream: UnixStream::from_std(stream)?, decoder: FrameDecoder::default() })
    }

    /// Whether the process has not closed its end of the socket.
    pub fn is_there(&self) -> bool {
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        matches!(recv(&self.stream, &mut [0; 1], flags), Err(Errno::AGAIN | Errno::INTR) | Ok((1.., _)))
    }

    /// Takes what an idle worker has said since it was idle: what it has prepared by now. Whether it still is one;
    /// it is not where it has ended, or says anything else. Waits for nothing.
    pub fn is_idle(&mut self, prepared: &mut Option<Prepared>) -> bool {
        let mut piece = [0; 1 << 10];
        loop {
            let received = self.stream.try_io(Interest::READABLE, || Ok(recv(&self.stream, &mut piece, RecvFlags::DONTWAIT)?));
            match received {
                Ok((0, _)) => return false,
                Ok((length, _)) => self.decoder.push(piece.get(..length).unwrap_or_default()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
        }
        loop {
            match self.decoder.take() {
                Ok(Some(FromWorker::Idle(now))) => *prepared = now,
                Ok(None) => return true,
                Ok(Some(_)) | Err(_) => return false,
            }
        }
    }

    /// Tells it of a run, request included.
    ///
    /// # Errors
    /// The worker has ended.
    pub async fn begin(&mut self, begin: Begin, request: &[u8]) -> Result<(), LinkError> {
        self.send(&ToWorker::Begin(begin)).await?;
        for part in request.chunks(MAX_PAYLOAD) {
            self.send(&ToWorker::Request(part.to_vec())).await?;
        }
        Ok(())
    }

    /// Tells a keeper of an operation of its session.
    ///
    /// # Errors
    /// The keeper has ended.
    pub async fn ask(&mut self, line: &[u8]) -> Result<Vec<u8>, LinkError> {
        self.send(&ToWorker::Line(line.len() as u64)).await?;
        for part in line.chunks(MAX_PAYLOAD) {
            self.send(&ToWorker::Request(part.to_vec())).await?;
        }
        self.answer().await
    }

    /// The answer to an operation, or why a session could not be begun.
    ///
    /// # Errors
    /// The keeper has ended.
    pub async fn answer(&mut self) -> Result<Vec<u8>, LinkError> {
        let mut answer = Vec::new();
        loop {
            match self.next().await? {
                FromWorker::Result(part) => answer.extend(part),
                FromWorker::End => return Ok(answer),
                _ => return Err(LinkError::Malformed(Malformed::Payload)),
            }
        }
    }

    /// Tells it something.
    ///
    /// # Errors
    /// The worker has ended.
    pub async fn send(&mut self, message: &ToWorker) -> Result<(), LinkError> {
        Ok(self.stream.write_all(&message.to_frame()?).await?)
    }

    /// What it says next. Nothing is lost where this is dropped before it is ready.
    ///
    /// # Errors
    /// The worker has ended.
    pub async fn next(&mut self) -> Result<FromWorker, LinkError> {
        let mut piece = vec![0; PIECE];
        loop {
            if let Some(message) = self.decoder.take()? {
                return Ok(message);
            }
            let length = self.stream.read(&mut piece).await?;
            if length == 0 {
                return Err(LinkError::Closed);
            }
            self.decoder.push(piece.get(..length).unwrap_or_default());
        }
    }
}

/// What the supervisor says.
#[derive(Debug)]
pub struct SupervisorLink {
    stream: OwnedReadHalf,
    decoder: FrameDecoder,
    /// Descriptors whose messages are not read yet; none: the kernel had no number free for it.
    descriptors: std::collections::VecDeque<Option<OwnedFd>>,
}

/// What is told the supervisor.
#[derive(Debug)]
pub struct ToSupervisorLink(OwnedWriteHalf);

impl ToSupervisorLink {
    /// Tells it all that is to be told, until there is no more. It may wait for the supervisor, which waits for
    /// this process where both write and neither reads: never in the task that reads.
    ///
    /// # Errors
    /// The supervisor has ended.
    pub async fn tell(mut self, mut messages: mpsc::UnboundedReceiver<FromFront>) -> Result<(), LinkError> {
        while let Some(message) = messages.recv().await {
            self.0.write_all(&message.to_frame()?).await?;
        }
        Ok(())
    }
}

/// Both directions of the socket that this process was started with.
///
/// # Errors
/// It cannot be watched.
pub fn supervisor(socket: OwnedFd) -> io::Result<(SupervisorLink, ToSupervisorLink)> {
    let stream = std::os::unix::net::UnixStream::from(socket);
    stream.set_nonblocking(true)?;
    let (stream, write) = UnixStream::from_std(stream)?.into_split();
    let read = SupervisorLink { stream, decoder: FrameDecoder::default(), descriptors: std::collections::VecDeque::new() };
    Ok((read, ToSupervisorLink(write)))
}

impl SupervisorLink {
    /// What it says next, with the descriptor that belongs to it, where there was a number free for that. Nothing
    /// is lost where this is dropped before it is ready.
    ///
    /// # Errors
    /// The supervisor has ended.
    pub async fn next(&mut self) -> Result<(FromSupervisor, Option<OwnedFd>), LinkError> {
        loop {
            if let Some(message) = self.decoder.take()? {
                let with_descriptor = matches!(message, FromSupervisor::Listener(_) | FromSupervisor::Worker | FromSupervisor::Keeper(_));
                let descriptor = if with_descriptor { self.descriptors.pop_front().ok_or(Malformed::Payload)? } else { None };
                return Ok((message, descriptor));
            }
            self.stream.readable().await?;
            let mut piece = vec![0; PIECE];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let stream: &UnixStream = self.stream.as_ref();
            let received = stream.try_io(Interest::READABLE, || {
                recvmsg(stream, &mut [IoSliceMut::new(&mut piece)], &mut ancillary, RecvFlags::CMSG_CLOEXEC).map_err(Into::into)
            });
            let (length, flags) = match received {
                Ok(received) => (received.bytes, received.flags),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                Err(error) if error.raw_os_error() == Some(Errno::INTR.raw_os_error()) => continue,
                Err(error) => return Err(error.into()),
            };
            for message in ancillary.drain() {
                if let RecvAncillaryMessage::ScmRights(files) = message {
                    self.descriptors.extend(files.map(Some));
                }
            }
            if flags.contains(ReturnFlags::CTRUNC) {
                // Each message has one (unix(7)).
                self.descriptors.push_back(None);
            }
            if length == 0 {
                return Err(LinkError::Closed);
            }
            self.decoder.push(piece.get(..length).unwrap_or_default());
        }
    }
}
