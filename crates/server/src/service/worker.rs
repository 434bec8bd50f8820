//! A worker: runs one request after the other for the front.
//!
//! It parses each request itself, and looks its key up in the supervisor's table. Where the front
//! says what no front says, the worker ends, after the run that it has. It ends with the front, and
//! with the supervisor, which cancels the run.

use std::{
    io::{self, Read, Write},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    sync::Arc,
};

use rustix::{
    event::{PollFd, PollFlags, poll},
    io::Errno,
    net::{RecvFlags, SendFlags, recv, send as send_now},
    process::{PidfdFlags, Signal, getppid, pidfd_open},
    time::Timespec,
};
use stockade_engine::{Asked, CancelledBeforeStart, Client, MAX_REQUEST, Options, approval::ApprovedBy, caller::Caller, exec_for, refuse};
use stockade_protocol::{
    OutputStream, PerStream, Report, Verdict,
    service::{Begin, FrameDecoder, FromSupervisor, FromWorker, MAX_PAYLOAD, Malformed, Message, ToWorker, WorkerTable},
};

use super::{UNREAD, send};

/// The most bytes of frames that wait for the front during a run.
const MAX_UNSENT: usize = 256 << 10;

/// Why a worker ends.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// The kernel refuses to read or write.
    #[error("talk to the front")]
    Front(#[from] io::Error),
    /// The front says what no front says.
    #[error("what the front sends")]
    Malformed(#[from] Malformed),
    /// The same, in the wrong place.
    #[error("the front sends {0}")]
    Unexpected(&'static str),
    /// It is not below a supervisor.
    #[error("a worker is started by `stockade serve`, with sockets as stdin and stdout: {0}")]
    NoSupervisor(Errno),
    /// What the supervisor says has no meaning.
    #[error("the supervisor's table of keys: {0}")]
    Table(String),
}

/// Runs what the front sends, until either of the others ends. `account`: whose the runs are, where root
/// serves.
///
/// # Errors
/// It cannot go on.
pub fn work(front: OwnedFd, supervisor: OwnedFd, account: Option<Caller>) -> Result<(), WorkerError> {
    let parent = getppid().ok_or(WorkerError::NoSupervisor(Errno::SRCH))?;
    let pidfd = pidfd_open(parent, PidfdFlags::empty()).map_err(WorkerError::NoSupervisor)?;
    let (front, supervisor) = (UnixStream::from(front), UnixStream::from(supervisor));
    front.set_write_timeout(Some(UNREAD))?;
    let mut worker = Worker {
        front,
        said: FrameDecoder::default(),
        supervisor,
        settings: FrameDecoder::default(),
        table: WorkerTable::default(),
        part: Vec::new(),
        account,
        ends_with: Arc::from([pidfd]),
    };
    // No run is told of before the table is there.
    worker.read_table(true)?;
    send(&worker.front, &FromWorker::Idle)?;
    while let Some(begin) = worker.next_run()? {
        let Some(report) = worker.answer(begin)? else { return Ok(()) };
        // A result always has a JSON form: it is made of text and numbers.
        let line = serde_json::to_vec(&report).map_err(io::Error::other)?;
        for part in line.chunks(MAX_PAYLOAD) {
            send(&worker.front, &FromWorker::Result(part.to_vec()))?;
        }
        send(&worker.front, &FromWorker::End)?;
        send(&worker.front, &FromWorker::Idle)?;
    }
    Ok(())
}

struct Worker {
    front: UnixStream,
    said: FrameDecoder,
    supervisor: UnixStream,
    settings: FrameDecoder,
    table: WorkerTable,
    /// Of a table that is not whole yet.
    part: Vec<u8>,
    account: Option<Caller>,
    ends_with: Arc<[OwnedFd]>,
}

impl Worker {
    /// The next run; none: the front or the supervisor has ended.
    fn next_run(&mut self) -> Result<Option<Begin>, WorkerError> {
        loop {
            match self.said.take()? {
                Some(ToWorker::Begin(begin)) => return Ok(Some(begin)),
                // That of a run whose end crossed it.
                Some(ToWorker::Cancel) => {}
                Some(ToWorker::Request(_)) => return Err(WorkerError::Unexpected("a request without its run")),
                None => {
                    let (from_front, from_supervisor) = self.wait(None)?;
                    if from_supervisor && !self.read_table(false)? {
                        return Ok(None);
                    }
                    if from_front && !self.read_front()? {
                        return Ok(None);
                    }
                }
            }
        }
    }

    /// Waits for either of the two, at most so long.
    fn wait(&self, most: Option<&Timespec>) -> Result<(bool, bool), WorkerError> {
        let mut fds = [PollFd::new(&self.front, PollFlags::IN), PollFd::new(&self.supervisor, PollFlags::IN)];
        match poll(&mut fds, most) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(io::Error::from(errno).into()),
        }
        let [front, supervisor] = fds.map(|fd| !fd.revents().is_empty());
        Ok((front, supervisor))
    }

    /// Whether the front is there.
    fn read_front(&mut self) -> Result<bool, WorkerError> {
        read_into(&mut self.front, &mut self.said).map_err(Into::into)
    }

    /// Reads what the supervisor sends; `whole`: until a table is whole. Whether the supervisor is there.
    fn read_table(&mut self, whole: bool) -> Result<bool, WorkerError> {
        loop {
            if !read_into(&mut self.supervisor, &mut self.settings)? {
                return Ok(false);
            }
            while let Some(message) = self.settings.take().map_err(|why| WorkerError::Table(why.to_string()))? {
                match message {
                    FromSupervisor::SettingsPart(part) => self.part.extend(part),
                    FromSupervisor::SettingsEnd => {
                        let part = std::mem::take(&mut self.part);
                        self.table = serde_json::from_slice(&part).map_err(|error| WorkerError::Table(error.to_string()))?;
                        if whole {
                            return Ok(true);
                        }
                    }
                    other => return Err(WorkerError::Table(format!("an unexpected {other:?}"))),
                }
            }
            if !whole {
                return Ok(true);
            }
        }
    }

    /// What comes of a run; none: the front has ended before its request was whole.
    fn answer(&mut self, begin: Begin) -> Result<Option<Report>, WorkerError> {
        let Begin { run: _, key, policy, length, output } = begin;
        if length > MAX_REQUEST as u64 {
            return Err(WorkerError::Unexpected("a request that is too long"));
        }
        let mut request = Vec::new();
        let mut cancelled = false;
        while (request.len() as u64) < length && !cancelled {
            match self.said.take()? {
                Some(ToWorker::Request(part)) if (request.len() + part.len()) as u64 <= length => request.extend(part),
                Some(ToWorker::Request(_)) => return Err(WorkerError::Unexpected("more than it had announced")),
                Some(ToWorker::Begin(_)) => return Err(WorkerError::Unexpected("a run before the end of another")),
                Some(ToWorker::Cancel) => cancelled = true,
                None if self.read_front()? => {}
                None => return Ok(None),
            }
        }
        // A key may have gone, or a policy of it, since the front has let the request in.
        let (_, from_supervisor) = self.wait(Some(&Timespec::default()))?;
        if from_supervisor && !self.read_table(false)? {
            return Ok(None);
        }
        let options = Options {
            policy: Some(policy.clone()),
            peer: self.account.clone(),
            key: Some(key.clone()),
            // The answer is read by a program, and no person gets its token.
            approved_by: ApprovedBy::NoOne,
            ends_with: Arc::clone(&self.ends_with),
            ..Options::default()
        };
        if !self.table.policies.get(&key).is_some_and(|policies| policies.contains(&policy)) {
            let message = format!("key {key} may not use policy {policy}");
            return Ok(Some(Report::refused(Verdict::SandboxError, "not_granted", message)));
        }
        if cancelled {
            return Ok(Some(refuse(&CancelledBeforeStart.into(), &options)));
        }
        let mut client = FrontClient {
            front: self.front.as_fd(),
            said: &mut self.said,
            is_wild: false,
            wants_output: output,
            unsent: Vec::new(),
            left_out: PerStream::default(),
        };
        let report = exec_for(&request, &options, Some(&mut client));
        if client.is_wild {
            return Err(WorkerError::Unexpected("what is not said during a run"));
        }
        let unsent = client.take_unsent();
        self.front.write_all(&unsent)?;
        Ok(Some(report))
    }
}

/// Whether the other process is there.
fn read_into(socket: &mut UnixStream, decoder: &mut FrameDecoder) -> io::Result<bool> {
    let mut piece = vec![0; MAX_PAYLOAD];
    loop {
        match socket.read(&mut piece) {
            Ok(0) => return Ok(false),
            Ok(length) => {
                decoder.push(piece.get(..length).unwrap_or_default());
                return Ok(true);
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// The front, while a run of it goes on.
struct FrontClient<'a> {
    front: BorrowedFd<'a>,
    said: &'a mut FrameDecoder,
    /// It has said what no front says during a run.
    is_wild: bool,
    /// It wants to hear what the program prints.
    wants_output: bool,
    /// Frames that it has not taken yet. A run never waits for it.
    unsent: Vec<u8>,
    /// Bytes that found no room there.
    left_out: PerStream<u64>,
}

impl FrontClient<'_> {
    /// Adds a message; false: there is no room for it.
    fn add(&mut self, message: &FromWorker) -> bool {
        let frame = message.to_frame();
        let has_room = self.unsent.len() + frame.len() <= MAX_UNSENT;
        if has_room {
            self.unsent.extend(frame);
        }
        has_room
    }

    /// Says what was left out of a stream, if there is room for that.
    fn tell_left_out(&mut self, stream: OutputStream) -> bool {
        match std::mem::take(self.left_out.of_mut(stream)) {
            0 => true,
            bytes => {
                let told = self.add(&FromWorker::LeftOut(stream, bytes));
                if !told {
                    *self.left_out.of_mut(stream) = bytes;
                }
                told
            }
        }
    }

    fn flush(&mut self) {
        // A front that is gone is seen when it is looked for.
        if let Ok(sent) = send_now(self.front, &self.unsent, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            self.unsent.drain(..sent.min(self.unsent.len()));
        }
    }

    /// All that is left to be sent, with no limit: the run has ended.
    fn take_unsent(mut self) -> Vec<u8> {
        for (stream, bytes) in [(OutputStream::Stdout, self.left_out.output), (OutputStream::Stderr, self.left_out.error)] {
            if bytes > 0 {
                self.unsent.extend(FromWorker::LeftOut(stream, bytes).to_frame());
            }
        }
        self.unsent
    }
}

impl Client for FrontClient<'_> {
    fn requests(&self) -> Option<BorrowedFd<'_>> {
        Some(self.front)
    }

    fn results(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn look(&mut self) -> Asked {
        let mut piece = [0; 4096];
        match recv(self.front, &mut piece, RecvFlags::DONTWAIT) {
            Ok((length, _)) if length > 0 => self.said.push(piece.get(..length).unwrap_or_default()),
            Err(Errno::AGAIN | Errno::INTR) => {}
            // It is gone, and with it the client.
            _ => return Asked::Cancel(Signal::HUP.as_raw()),
        }
        self.flush();
        match self.said.take() {
            Ok(None) => Asked::Nothing,
            Ok(Some(ToWorker::Cancel)) => Asked::Cancel(Signal::TERM.as_raw()),
            Ok(Some(_)) | Err(_) => {
                self.is_wild = true;
                Asked::Cancel(Signal::HUP.as_raw())
            }
        }
    }

    fn signalled(&mut self, _: i32) {}

    fn begins(&mut self) {
        // Nothing is unsent before.
        let _fits = self.add(&FromWorker::Started);
        self.flush();
    }

    fn printed(&mut self, stream: OutputStream, bytes: &[u8]) {
        if !self.wants_output {
            return;
        }
        for part in bytes.chunks(MAX_PAYLOAD) {
            if !self.tell_left_out(stream) || !self.add(&FromWorker::Output(stream, part.to_vec())) {
                *self.left_out.of_mut(stream) += part.len() as u64;
            }
        }
        self.flush();
    }

    fn wants_room(&self) -> bool {
        !self.unsent.is_empty()
    }
}
