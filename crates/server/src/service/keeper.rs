//! A keeper: one session of the service, for one key and under one policy.
//!
//! Requests and operations on files come from the front, one after the other, and are judged as those of
//! `stockade session`; a request that names another key or policy ends the keeper. It outlives the front
//! by some seconds, in which the supervisor may give it the next one; it ends with the supervisor, and all
//! that it keeps with it.

use std::{
    collections::VecDeque,
    io::{self, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    sync::Arc,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, poll},
    io::Errno,
    process::{PidfdFlags, getppid, pidfd_open},
};
use stockade_engine::{
    Options, Refusal, admit::parse_request, answer::ending, approval::ApprovedBy, caller::Caller, session::Session, signals::Signals,
};
use stockade_protocol::{
    PerStream,
    service::{Begin, FrameDecoder, FromSupervisor, FromWorker, MAX_PAYLOAD, ToWorker},
    session::{Line, Only},
};

use super::{
    UNREAD, send, timespec,
    worker::{FrontClient, SupervisorSocket, WorkerError, read_into, read_whole},
};
use crate::session::{
    answer::{ErrorAnswer, NoFields, OkAnswer},
    line::parse,
    serve::answer,
};

/// How long it waits for another front.
const WITHOUT_FRONT: Duration = Duration::from_secs(10);

/// Keeps a session of this key under this policy, until the supervisor ends or the session is closed.
/// `account`: whose the runs are, where root serves.
///
/// # Errors
/// It cannot go on.
pub fn keep(supervisor: OwnedFd, key: &str, policy: &str, account: Option<Caller>) -> Result<(), WorkerError> {
    let parent = getppid().ok_or(WorkerError::NoSupervisor(Errno::SRCH))?;
    let pidfd = pidfd_open(parent, PidfdFlags::empty()).map_err(WorkerError::NoSupervisor)?;
    let options = Options {
        policy: Some(policy.to_owned()),
        key: Some(key.to_owned()),
        peer: account,
        // The answer is read by a program, and no person gets its token.
        approved_by: ApprovedBy::NoOne,
        ends_with: Arc::from([pidfd]),
        ..Options::default()
    };
    let mut above = SupervisorSocket { socket: UnixStream::from(supervisor), decoder: FrameDecoder::default(), files: VecDeque::new() };
    let mut signals = Signals::block().map_err(|error| WorkerError::Signals(error.to_string()))?;
    let Some(front) = next_front(&mut above, &mut signals, None)? else { return Ok(()) };
    let session = match Session::open(options) {
        Ok(session) => session,
        Err(refusal) => {
            let refused = serde_json::to_vec(&ErrorAnswer::new("ready", None, &refusal)).map_err(io::Error::other)?;
            return Ok(send_answer(&front, &refused)?);
        }
    };
    let mut keeper = Keeper {
        session,
        front,
        decoder: FrameDecoder::default(),
        above,
        signals,
        is_told_to_end: false,
        key: key.to_owned(),
        policy: policy.to_owned(),
    };
    loop {
        match keeper.serve()? {
            Served::Closed => return Ok(()),
            Served::FrontGone => {}
        }
        let Some(front) = next_front(&mut keeper.above, &mut keeper.signals, Some(WITHOUT_FRONT))? else { return Ok(()) };
        (keeper.front, keeper.decoder) = (front, FrameDecoder::default());
    }
}

/// The socket of the next front. `None` if none comes within `most`, or this process must exit.
fn next_front(above: &mut SupervisorSocket, signals: &mut Signals, most: Option<Duration>) -> Result<Option<UnixStream>, WorkerError> {
    let end = most.map(|most| Instant::now() + most);
    loop {
        match above.decoder.take().map_err(|why| WorkerError::Supervisor(why.to_string()))? {
            Some(FromSupervisor::Front) => {
                let front = UnixStream::from(above.file()?);
                front.set_write_timeout(Some(UNREAD))?;
                return Ok(Some(front));
            }
            Some(other) => return Err(WorkerError::Supervisor(format!("an unexpected {other:?}"))),
            None => {}
        }
        let left = end.map(|end| end.saturating_duration_since(Instant::now()));
        let mut fds = [PollFd::new(&above.socket, PollFlags::IN), PollFd::new(signals, PollFlags::IN)];
        match poll(&mut fds, left.map(timespec).as_ref()) {
            Ok(0) => return Ok(None),
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(io::Error::from(errno).into()),
        }
        let [supervisor, signal] = fds.map(|fd| !fd.revents().is_empty());
        if signal && signals.take().is_some_and(ending) || supervisor && !above.read()? {
            return Ok(None);
        }
    }
}

fn send_answer(front: &UnixStream, answer: &[u8]) -> io::Result<()> {
    for part in answer.chunks(MAX_PAYLOAD) {
        send(front, &FromWorker::Result(part.to_vec()))?;
    }
    send(front, &FromWorker::End)
}

/// Why it serves a front no more.
enum Served {
    /// The session is over.
    Closed,
    /// Another front may come.
    FrontGone,
}

struct Keeper {
    /// First: what is prepared ends before a signal that was held back ends this process.
    session: Session,
    front: UnixStream,
    decoder: FrameDecoder,
    above: SupervisorSocket,
    signals: Signals,
    /// A signal has ended its last run: it keeps nothing any more.
    is_told_to_end: bool,
    key: String,
    policy: String,
}

impl Keeper {
    fn serve(&mut self) -> Result<Served, WorkerError> {
        loop {
            if send(&self.front, &FromWorker::Idle(None)).is_err() {
                return Ok(Served::FrontGone);
            }
            let (length, begin) = loop {
                match self.decoder.take()? {
                    Some(ToWorker::Begin(begin)) => break (begin.length, Some(begin)),
                    Some(ToWorker::Line(length)) => break (length, None),
                    // It came after its run had ended.
                    Some(ToWorker::Cancel) => {}
                    Some(ToWorker::Request(_)) => return Err(WorkerError::Unexpected("a request without its run")),
                    None => {
                        if let Some(served) = self.wait()? {
                            return Ok(served);
                        }
                    }
                }
            };
            let read = read_whole(&mut self.front, &mut self.decoder, &self.signals, length)?;
            let Some((bytes, cancelled)) = read else { return Ok(Served::FrontGone) };
            let answer = match begin {
                Some(begin) => self.run(&begin, &bytes, cancelled)?,
                None => match parse(&bytes) {
                    Ok(Line::Close(Only { id })) => {
                        let closed = serde_json::to_vec(&OkAnswer::new("close", id.as_ref(), NoFields {})).map_err(io::Error::other)?;
                        // It ends in either case.
                        let _unheard = send_answer(&self.front, &closed);
                        return Ok(Served::Closed);
                    }
                    Ok(line) => answer(&mut self.session, &line)
                        .map_err(io::Error::other)?
                        .ok_or(WorkerError::Unexpected("a run as an operation on files"))?,
                    Err(malformed) => {
                        serde_json::to_vec(&ErrorAnswer::new(malformed.op, malformed.id.as_ref(), &Refusal::from(malformed.error)))
                            .map_err(io::Error::other)?
                    }
                },
            };
            let is_sent = send_answer(&self.front, &answer).is_ok();
            if self.is_told_to_end {
                return Ok(Served::Closed);
            }
            if !is_sent {
                return Ok(Served::FrontGone);
            }
        }
    }

    /// Waits for something to be read. Why nothing more is to come, if so.
    fn wait(&mut self) -> Result<Option<Served>, WorkerError> {
        let fds = [Some(self.front.as_fd()), Some(self.above.socket.as_fd()), Some(self.signals.as_fd()), self.session.end_of_prepared()];
        let mut fds: Vec<PollFd<'_>> = fds.iter().flatten().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        let late = match poll(&mut fds, self.session.until_preparation().map(timespec).as_ref()) {
            Ok(ready) => ready == 0,
            Err(Errno::INTR) => false,
            Err(errno) => return Err(io::Error::from(errno).into()),
        };
        let mut ready = fds.iter().map(|fd| !fd.revents().is_empty()).chain([false; 4]);
        let mut next = || ready.next().unwrap_or_default();
        let (front, supervisor, signal, prepared) = (next(), next(), next(), next());
        if signal && self.signals.take().is_some_and(ending) || supervisor && !self.above.read()? {
            return Ok(Some(Served::Closed));
        }
        // The next front comes when this one has ended.
        if supervisor || front && !read_into(&mut self.front, &mut self.decoder).unwrap_or(false) {
            return Ok(Some(Served::FrontGone));
        }
        if prepared {
            self.session.clear_prepared();
        } else if late {
            self.session.prepare_next();
        }
        Ok(None)
    }

    fn run(&mut self, begin: &Begin, request: &[u8], cancelled: bool) -> Result<Vec<u8>, WorkerError> {
        if (&begin.key, &begin.policy) != (&self.key, &self.policy) {
            return Err(WorkerError::Unexpected("a run of another key, or under another policy, than the session's"));
        }
        let report = match parse_request(request) {
            Err(refusal) => {
                self.session.refuse(&refusal);
                refusal.report()
            }
            Ok(request) if cancelled => self.session.never_begun(&request, rustix::process::Signal::TERM.as_raw()),
            Ok(request) => {
                let mut client = FrontClient {
                    front: self.front.as_fd(),
                    decoder: &mut self.decoder,
                    violates_protocol: false,
                    wants_output: begin.output,
                    has_begun: false,
                    unsent: Vec::new(),
                    left_out: PerStream::default(),
                    is_told_to_end: false,
                };
                let report = self.session.run(&request, &mut client);
                if client.violates_protocol {
                    return Err(WorkerError::Unexpected("what is not said during a run"));
                }
                self.is_told_to_end = client.is_told_to_end;
                let unsent = client.take_unsent();
                // A front that is gone is seen when the answer is sent.
                let _unheard = self.front.write_all(&unsent);
                report
            }
        };
        // A result always has a JSON form: it is made of text and numbers.
        Ok(serde_json::to_vec(&report).map_err(io::Error::other)?)
    }
}
