//! A worker: runs one request after the other for the front.
//!
//! It parses each request itself, and looks its key up in the supervisor's table, which it reads between two
//! runs. It ends with the front, and with the supervisor, and after a message that no front sends: each of these
//! cancels its run, whose record it still writes. After a run it prepares the next sandbox, if it can, before it
//! says that it is idle. The supervisor lends it the templates that it asks for.

use std::{
    collections::VecDeque,
    fs::File,
    io::{self, IoSliceMut, Read, Write},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::{fs::FileExt, net::UnixStream},
    },
    sync::Arc,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, poll},
    io::Errno,
    net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, recv, recvmsg, send as send_now},
    process::{PidfdFlags, Signal, getppid, pidfd_open},
};
use serde::de::DeserializeOwned;
use stockade_engine::{
    Asked, CancelledBeforeStart, Client, MAX_REQUEST, Options, RefusalCause,
    answer::ending,
    approval::ApprovedBy,
    caller::Caller,
    refuse, refuse_unread,
    runner::Runner,
    signals::Signals,
    template::{Lease, TemplateImage},
};
use stockade_protocol::{
    OutputStream, PerStream, Report, Verdict,
    service::{
        Begin, FrameDecoder, FromSupervisor, FromWorker, MAX_PAYLOAD, Malformed, Message, Prepared, TemplateLent, ToSupervisor, ToWorker,
        WorkerTable,
    },
};

use super::{UNREAD, monotonic_ms, send, timespec};

/// The most bytes of frames that wait for the front during a run.
const MAX_UNSENT: usize = 256 << 10;

/// Why a worker ends.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// The kernel refuses to read or write at a socket to the front or the supervisor, or a file from the latter.
    #[error("talk to the front or the supervisor")]
    System(#[from] io::Error),
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
    #[error("what the supervisor sends: {0}")]
    Supervisor(String),
    /// Signals cannot be read.
    #[error("hold back signals: {0}")]
    Signals(String),
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
    supervisor.set_write_timeout(Some(UNREAD))?;
    let base = Options {
        peer: account,
        // The answer is read by a program, and no person gets its token.
        approved_by: ApprovedBy::NoOne,
        ends_with: Arc::from([pidfd]),
        ..Options::default()
    };
    let mut worker = Worker {
        // First: what is prepared ends before a signal that was held back ends this process.
        runner: Runner::new(base),
        front,
        decoder: FrameDecoder::default(),
        supervisor: SupervisorSocket { socket: supervisor, decoder: FrameDecoder::default(), files: VecDeque::new() },
        table: WorkerTable::default(),
        is_table_outdated: false,
        is_told_to_end: false,
        told: None,
        signals: Signals::block().map_err(|error| WorkerError::Signals(error.to_string()))?,
    };
    // No run is told of before the table is there.
    worker.read_supervisor(true)?;
    loop {
        worker.prepare()?;
        worker.say_idle()?;
        let Some(begin) = worker.next_run()? else { return Ok(()) };
        let Some(report) = worker.answer(begin)? else { return Ok(()) };
        // A result always has a JSON form: it is made of text and numbers.
        let line = serde_json::to_vec(&report).map_err(io::Error::other)?;
        for part in line.chunks(MAX_PAYLOAD) {
            send(&worker.front, &FromWorker::Result(part.to_vec()))?;
        }
        send(&worker.front, &FromWorker::End)?;
        if worker.is_told_to_end {
            return Ok(());
        }
    }
}

/// A policy that the supervisor's table does not have for a key: it was taken away just now, or the front
/// was taken over.
#[derive(Debug, thiserror::Error)]
#[error("key {key} may not use policy {policy}")]
struct NotGranted {
    key: String,
    policy: String,
}

impl RefusalCause for NotGranted {
    fn verdict_and_reason(&self) -> (Verdict, &'static str) {
        (Verdict::SandboxError, "not_granted")
    }
}

struct Worker {
    runner: Runner,
    front: UnixStream,
    decoder: FrameDecoder,
    supervisor: SupervisorSocket,
    table: WorkerTable,
    /// The supervisor is about to send another.
    is_table_outdated: bool,
    /// A signal has ended its last run.
    is_told_to_end: bool,
    /// What the front was told is prepared.
    told: Option<Prepared>,
    signals: Signals,
}

/// What has happened while the worker waited.
#[derive(Default)]
struct Woken {
    front: bool,
    supervisor: bool,
    signal: bool,
    end_of_prepared: bool,
    /// The time is over.
    late: bool,
}

impl Worker {
    /// Prepares what the next request can be expected to ask for.
    fn prepare(&mut self) -> Result<(), WorkerError> {
        self.runner.prepare_next();
        if let Some(wanted) = self.runner.wanted_template() {
            send(&self.supervisor.socket, &ToSupervisor::Wants(wanted))?;
        }
        Ok(())
    }

    /// Says what is prepared to the front, which chooses a worker by that.
    fn say_idle(&mut self) -> io::Result<()> {
        self.told = self.runner.prepared();
        send(&self.front, &FromWorker::Idle(self.told.clone()))
    }

    /// The next run; none: the front or the supervisor has ended, or this process is to.
    fn next_run(&mut self) -> Result<Option<Begin>, WorkerError> {
        loop {
            match self.decoder.take()? {
                Some(ToWorker::Begin(begin)) => return Ok(Some(begin)),
                // It came after its run had ended.
                Some(ToWorker::Cancel) => {}
                Some(ToWorker::Request(_) | ToWorker::Line(_)) => return Err(WorkerError::Unexpected("a request without its run")),
                None => {
                    let woken = self.wait(self.runner.until_preparation())?;
                    if woken.signal && self.signals.take().is_some_and(ending) {
                        return Ok(None);
                    }
                    if woken.supervisor && !self.read_supervisor(false)? || woken.front && !self.read_front()? {
                        return Ok(None);
                    }
                    if woken.end_of_prepared {
                        self.runner.replace_prepared();
                    } else if woken.late || woken.supervisor {
                        self.prepare()?;
                    }
                    // A front that does not take it has ended.
                    if self.runner.prepared() != self.told && self.say_idle().is_err() {
                        return Ok(None);
                    }
                }
            }
        }
    }

    /// Waits for any of them, at most so long.
    fn wait(&self, most: Option<Duration>) -> Result<Woken, WorkerError> {
        let most = most.map(timespec);
        let fds =
            [Some(self.front.as_fd()), Some(self.supervisor.socket.as_fd()), Some(self.signals.as_fd()), self.runner.end_of_prepared()];
        let mut fds: Vec<PollFd<'_>> = fds.iter().flatten().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        let late = match poll(&mut fds, most.as_ref()) {
            Ok(ready) => ready == 0,
            Err(Errno::INTR) => false,
            Err(errno) => return Err(io::Error::from(errno).into()),
        };
        let mut ready = fds.iter().map(|fd| !fd.revents().is_empty()).chain([false; 4]);
        let mut next = || ready.next().unwrap_or_default();
        Ok(Woken { front: next(), supervisor: next(), signal: next(), end_of_prepared: next(), late })
    }

    /// Whether the front is there.
    fn read_front(&mut self) -> Result<bool, WorkerError> {
        read_into(&mut self.front, &mut self.decoder).map_err(Into::into)
    }

    /// Reads what the supervisor sends; `first`: until the table is there. Whether the supervisor is there.
    fn read_supervisor(&mut self, first: bool) -> Result<bool, WorkerError> {
        loop {
            if !self.supervisor.read()? {
                return Ok(false);
            }
            let mut has_table = false;
            while let Some(message) = self.supervisor.decoder.take().map_err(|why| WorkerError::Supervisor(why.to_string()))? {
                match message {
                    FromSupervisor::Table => {
                        self.table = self.supervisor.file_of_json()?;
                        self.is_table_outdated = false;
                        send(&self.supervisor.socket, &ToSupervisor::HasTable)?;
                        self.runner.be_ready_for(self.table.ready_for.clone());
                        self.runner.forget_templates();
                        has_table = true;
                    }
                    FromSupervisor::TableOutdated => self.is_table_outdated = true,
                    FromSupervisor::Template(lent) => {
                        let lease = self.supervisor.lease(&lent)?;
                        self.runner.give_template(&lent.of, lease);
                    }
                    FromSupervisor::NoTemplate(refused) => self.runner.refuse_template(&refused.of, refused.why),
                    other => return Err(WorkerError::Supervisor(format!("an unexpected {other:?}"))),
                }
            }
            if has_table || !first {
                return Ok(true);
            }
        }
    }

    /// What comes of a run; none: the front has ended before its request was whole.
    fn answer(&mut self, begin: Begin) -> Result<Option<Report>, WorkerError> {
        let Begin { run: _, key, policy, length, output } = begin;
        let Some((request, cancelled)) = read_whole(&mut self.front, &mut self.decoder, &self.signals, length)? else { return Ok(None) };
        // A key may have gone, or a policy of it, since the front has let the request in.
        while self.is_table_outdated || self.wait(Some(Duration::ZERO))?.supervisor {
            if !self.read_supervisor(false)? {
                return Ok(None);
            }
        }
        if !self.table.policies.get(&key).is_some_and(|policies| policies.contains(&policy)) {
            let refusal = NotGranted { key: key.clone(), policy: policy.clone() };
            return Ok(Some(refuse_unread(&refusal.into(), &self.runner.options(&key, &policy))));
        }
        if cancelled {
            return Ok(Some(refuse(&CancelledBeforeStart.into(), &self.runner.options(&key, &policy))));
        }
        let mut client = FrontClient {
            front: self.front.as_fd(),
            decoder: &mut self.decoder,
            violates_protocol: false,
            wants_output: output,
            has_begun: false,
            unsent: Vec::new(),
            left_out: PerStream::default(),
            is_told_to_end: false,
        };
        let report = self.runner.run(&key, &policy, &request, &mut client);
        if client.violates_protocol {
            return Err(WorkerError::Unexpected("what is not said during a run"));
        }
        self.is_told_to_end = client.is_told_to_end;
        let unsent = client.take_unsent();
        self.front.write_all(&unsent)?;
        Ok(Some(report))
    }
}

/// The socket from the supervisor, and what has come by it.
pub(super) struct SupervisorSocket {
    pub(super) socket: UnixStream,
    pub(super) decoder: FrameDecoder,
    /// Descriptors whose messages are not read yet.
    pub(super) files: VecDeque<OwnedFd>,
}

impl SupervisorSocket {
    /// Whether the supervisor is there.
    pub(super) fn read(&mut self) -> io::Result<bool> {
        let mut piece = vec![0; MAX_PAYLOAD];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let length = loop {
            match recvmsg(&self.socket, &mut [IoSliceMut::new(&mut piece)], &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
                Ok(received) => break received.bytes,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        };
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(files) = message {
                self.files.extend(files);
            }
        }
        self.decoder.push(piece.get(..length).unwrap_or_default());
        Ok(length > 0)
    }

    /// What came along with a template: its image, and what is known of it.
    fn lease(&mut self, lent: &TemplateLent) -> Result<Lease, WorkerError> {
        let image = self.file()?;
        let made = self.file_of_json()?;
        let (now, age) = (Instant::now(), Duration::from_millis(monotonic_ms().saturating_sub(lent.made_ms)));
        let since = now.checked_sub(age).unwrap_or(now);
        Ok(Lease { number: lent.number, image: TemplateImage { file: Arc::new(image), made }, runs: lent.runs, since })
    }

    /// The descriptor that came along with a message.
    pub(super) fn file(&mut self) -> Result<OwnedFd, WorkerError> {
        self.files.pop_front().ok_or_else(|| WorkerError::Supervisor(String::from("a message without its file")))
    }

    /// What the file that came along with a message says.
    fn file_of_json<T: DeserializeOwned>(&mut self) -> Result<T, WorkerError> {
        let file = File::from(self.file()?);
        let mut text = vec![0; usize::try_from(file.metadata()?.len()).map_err(io::Error::other)?];
        file.read_exact_at(&mut text, 0)?;
        serde_json::from_slice(&text).map_err(|error| WorkerError::Supervisor(error.to_string()))
    }
}

/// So many bytes that the front has announced, and whether they are cancelled; none: it has ended, or a signal
/// has come for this process, which is left to be taken. A cancellation that was read along with the last of
/// them counts: the socket will not become readable for it.
pub(super) fn read_whole(
    front: &mut UnixStream,
    decoder: &mut FrameDecoder,
    signals: &Signals,
    length: u64,
) -> Result<Option<(Vec<u8>, bool)>, WorkerError> {
    if length > MAX_REQUEST as u64 {
        return Err(WorkerError::Unexpected("a request that is too long"));
    }
    let mut bytes = Vec::new();
    loop {
        match decoder.take()? {
            Some(ToWorker::Request(part)) if (bytes.len() + part.len()) as u64 <= length => bytes.extend(part),
            Some(ToWorker::Request(_)) => return Err(WorkerError::Unexpected("more than it had announced")),
            Some(ToWorker::Begin(_) | ToWorker::Line(_)) => return Err(WorkerError::Unexpected("a run before the end of another")),
            Some(ToWorker::Cancel) => return Ok(Some((bytes, true))),
            None if bytes.len() as u64 == length => return Ok(Some((bytes, false))),
            // A front whose socket cannot be read has ended, too.
            None if !has_signal(front, signals)? && read_into(front, decoder).unwrap_or(false) => {}
            None => return Ok(None),
        }
    }
}

/// Whether a signal has come, once there is one or the socket can be read.
fn has_signal(socket: &UnixStream, signals: &Signals) -> Result<bool, WorkerError> {
    let mut fds = [PollFd::new(signals, PollFlags::IN), PollFd::new(socket, PollFlags::IN)];
    match poll(&mut fds, None) {
        Ok(_) | Err(Errno::INTR) => Ok(!fds[0].revents().is_empty()),
        Err(errno) => Err(io::Error::from(errno).into()),
    }
}

/// Whether the other process is there.
pub(super) fn read_into(socket: &mut UnixStream, decoder: &mut FrameDecoder) -> io::Result<bool> {
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
pub(super) struct FrontClient<'a> {
    pub(super) front: BorrowedFd<'a>,
    pub(super) decoder: &'a mut FrameDecoder,
    /// It has said what no front says during a run.
    pub(super) violates_protocol: bool,
    /// It wants to hear what the program prints.
    pub(super) wants_output: bool,
    /// It was told that the program may run: once, also where another start has to be tried.
    pub(super) has_begun: bool,
    /// Frames that it has not taken yet. A run never waits for it.
    pub(super) unsent: Vec<u8>,
    /// Bytes that found no room there.
    pub(super) left_out: PerStream<u64>,
    /// A signal that cancelled the run was for this process: nothing more is run.
    pub(super) is_told_to_end: bool,
}

impl FrontClient<'_> {
    /// Adds a message; false: there is no room for it.
    fn add(&mut self, message: &FromWorker) -> bool {
        match message.to_frame() {
            Ok(frame) if self.unsent.len() + frame.len() <= MAX_UNSENT => {
                self.unsent.extend(frame);
                true
            }
            _ => false,
        }
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
    pub(super) fn take_unsent(mut self) -> Vec<u8> {
        for (stream, bytes) in [(OutputStream::Stdout, self.left_out.output), (OutputStream::Stderr, self.left_out.error)] {
            if bytes > 0 {
                // Eight bytes always fit.
                self.unsent.extend(FromWorker::LeftOut(stream, bytes).to_frame().into_iter().flatten());
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
            Ok((length, _)) if length > 0 => self.decoder.push(piece.get(..length).unwrap_or_default()),
            Err(Errno::AGAIN | Errno::INTR) => {}
            // It is gone, and with it the client.
            _ => return Asked::Cancel(Signal::HUP.as_raw()),
        }
        self.flush();
        match self.decoder.take() {
            Ok(None) => Asked::Nothing,
            Ok(Some(ToWorker::Cancel)) => Asked::Cancel(Signal::TERM.as_raw()),
            Ok(Some(_)) | Err(_) => {
                self.violates_protocol = true;
                Asked::Cancel(Signal::HUP.as_raw())
            }
        }
    }

    fn signalled(&mut self, signal: i32) {
        self.is_told_to_end |= ending(signal);
    }

    fn begins(&mut self, _: i32) {
        if std::mem::replace(&mut self.has_begun, true) {
            return;
        }
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
