//! The supervisor: starts front and workers, and replaces those that end.
//!
//! It reads of the front only for which session that wants a keeper, with the labels that a client gave it, and
//! of workers only which template they want and that they have read their table: one that says anything else is
//! ended. A worker that ends is replaced alone. A front that ends is replaced at once, and each worker when the
//! one before, which ends with its front and records what it had, is gone. A process that cannot begin, and ends
//! again and again within a second, ends the service. Workers that had begun, and end so, are replaced after a
//! pause, as is what the host has no room for.

use std::{
    io::{self, IoSlice},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::{net::UnixStream, process::CommandExt},
    },
    process::{Child, Command, Stdio},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use rustix::{
    event::{PollFd, PollFlags, poll},
    io::Errno,
    net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recv, sendmsg},
    process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open},
};
use stockade_engine::{caller::Caller, companion, own_program::own_program_of_service, signals::Signals};
use stockade_protocol::service::{
    FrameDecoder, FromFront, FromSupervisor, KeeperOf, Key, Lack, ListenerKind, MAX_PAYLOAD, Message, NoKeeper, Scope, Settings,
    ToSupervisor, WorkerTable,
};

use super::{
    UNREAD,
    front_watch::{self, FrontState, FrontWatch},
    notify, sealed_file, send,
    templates::{Reply, ServedTemplate, SettingsView, TemplateStore, ready_workers},
    timespec,
};

const FRONT: &str = "stockade-serve";
/// A process that ends sooner counts as failed.
const SHORT_LIFE: Duration = Duration::from_secs(1);
/// So many that fail one after the other end the service, or are replaced after a pause.
const MAX_FAILED: u32 = 5;
/// Those that failed longer ago than this do not count.
const FORGIVEN: Duration = Duration::from_secs(60);
/// After this time a process that could not be started is tried again.
const RETRY: Duration = Duration::from_secs(1);
/// So many messages of a process are answered before all else gets its turn.
const MESSAGES_AT_A_TIME: u32 = 16;
/// How long a process that is told to end has for it, beyond the time to drain.
const EXIT_TIME: Duration = Duration::from_secs(5);
/// How long a front has to take the sockets before the service is said to be ready all the same.
const READY_TIME: Duration = Duration::from_secs(20);

/// What is served, and how.
pub struct Service<'a> {
    /// How many runs there may be at a time.
    pub workers: usize,
    /// How long runs have to end when the service does.
    pub drain: Duration,
    /// Whose the front is, and whose the runs are, where root serves.
    pub account: Option<Caller>,
    /// What it begins with.
    pub settings: ServiceSettings,
    /// Begins to read the settings again. An error keeps those before.
    pub read_again: Box<dyn Fn() -> Result<Box<dyn Reading + 'a>, NotTaken> + 'a>,
    /// Where it listens, for people.
    pub addresses: String,
    /// Tells the administrator.
    pub tell: Box<dyn Fn(&str) + 'a>,
    /// Called once, when connections are accepted.
    pub ready: Box<dyn Fn() + 'a>,
}

/// What may change while it serves.
#[derive(Clone, Debug, PartialEq)]
pub struct ServiceSettings {
    /// What the front may know.
    pub front: Settings,
    /// The templates of all policies that keys name.
    pub templates: Vec<ServedTemplate>,
}

/// Settings that are being read again, while the service goes on. Dropping it gives that up.
pub trait Reading {
    /// What becomes readable when there is something to [`Reading::poll`].
    fn awaited(&self) -> BorrowedFd<'_>;
    /// When to poll it at the latest.
    fn until(&self) -> Option<Instant>;
    /// What came of it, once; none: it goes on.
    fn poll(&mut self) -> Option<Result<ServiceSettings, NotTaken>>;
}

/// Why it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServiceEnd {
    /// It was told to by this signal.
    Signal(i32),
}

/// Why settings that were read again are not taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotTaken {
    /// In words.
    pub why: String,
    /// What the host lacks now, where that was found out.
    pub lacks: Option<Vec<Lack>>,
}

/// Why it cannot serve.
#[derive(Debug, thiserror::Error)]
pub enum ServiceError {
    /// A process cannot be started.
    #[error("start {what}: {error}")]
    Start {
        /// Which.
        what: &'static str,
        /// Why not.
        error: io::Error,
    },
    /// A process ends whenever it is started.
    #[error("{what} has ended within a second of its start, as {MAX_FAILED} processes have in a row; what they said stands above")]
    Fails {
        /// Which.
        what: &'static str,
    },
    /// Signals cannot be read.
    #[error("hold back signals: {0}")]
    Signals(String),
    /// The kernel refuses to wait.
    #[error("wait: {0}")]
    Wait(Errno),
}

/// A process of the service, with the socket to it.
pub(super) struct Process {
    child: Child,
    pidfd: OwnedFd,
    socket: UnixStream,
    /// What has come from it, up to the last whole message.
    decoder: FrameDecoder,
    /// Nothing more comes from it.
    is_at_end: bool,
    began: Instant,
}

impl Process {
    fn spawn(mut command: Command, socket: UnixStream) -> io::Result<Self> {
        socket.set_write_timeout(Some(UNREAD))?;
        // A signal from a terminal is meant for the supervisor, which lets runs end.
        let mut child = command.process_group(0).spawn()?;
        let pidfd = match pidfd_open(Pid::from_child(&child), PidfdFlags::empty()) {
            Ok(pidfd) => pidfd,
            Err(errno) => {
                let _ended = child.kill();
                let _reaped = child.wait();
                return Err(errno.into());
            }
        };
        Ok(Process { child, pidfd, socket, decoder: FrameDecoder::default(), is_at_end: false, began: Instant::now() })
    }

    pub(super) fn socket(&self) -> &UnixStream {
        &self.socket
    }

    fn has_ended(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }

    /// How it has ended, for people.
    fn status(&mut self) -> String {
        match self.child.try_wait() {
            Ok(Some(status)) => status.to_string(),
            Ok(None) => String::from("it goes on"),
            Err(error) => error.to_string(),
        }
    }

    /// What it was sent has not reached it whole: it ends, and another takes its place.
    fn kill(&mut self) {
        // It may have ended by itself.
        let _ended = self.child.kill();
    }

    fn kill_and_reap(mut self) {
        // It may have ended by itself.
        let _ended = self.child.kill();
        let _reaped = self.child.wait();
    }

    /// Sends the front its settings, in as many parts as they need.
    fn send_settings(&self, settings: &Settings) -> io::Result<()> {
        let text = serde_json::to_vec(settings).map_err(io::Error::other)?;
        for part in text.chunks(MAX_PAYLOAD) {
            send(&self.socket, &FromSupervisor::SettingsPart(part.to_vec()))?;
        }
        send(&self.socket, &FromSupervisor::SettingsEnd)
    }

    /// Sends a message with at most two descriptors.
    fn send_with(&self, message: &FromSupervisor, files: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.send_flagged(message, files, SendFlags::NOSIGNAL)
    }

    /// The same, but not where no part of it finds room.
    fn send_now(&self, message: &FromSupervisor, files: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.send_flagged(message, files, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)
    }

    fn send_flagged(&self, message: &FromSupervisor, files: &[BorrowedFd<'_>], flags: SendFlags) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(files)) {
            return Err(Errno::NOBUFS.into());
        }
        let bytes = message.to_frame().map_err(io::Error::other)?;
        let sent = sendmsg(&self.socket, &[IoSlice::new(&bytes)], &mut ancillary, flags)?;
        // The descriptors went with the first byte.
        io::Write::write_all(&mut &self.socket, bytes.get(sent..).unwrap_or_default())
    }
}

/// A worker; `index`: of those that run beside each other no two have one.
struct Worker {
    index: usize,
    process: Process,
    table: TableState,
    /// It has read a table.
    has_begun: bool,
}

/// What a worker has of its table.
#[derive(Clone, Copy, PartialEq, Eq)]
enum TableState {
    /// It has read the last that it was sent, or was sent none.
    Read,
    /// It has not read the last yet: a worker reads nothing while it runs.
    Sent,
    /// It has not read the last yet, which is outdated by now. It judges no run by that one.
    Outdated,
}

impl Worker {
    /// Sends it the table as it is now; if it has not read the last, when it has. Waits for nothing.
    fn update_table(&mut self, settings: &ServiceSettings) {
        let (state, sent) = match self.table {
            TableState::Read => (TableState::Sent, self.send_table(settings)),
            TableState::Sent => (TableState::Outdated, self.process.send_now(&FromSupervisor::TableOutdated, &[])),
            TableState::Outdated => return,
        };
        self.table = state;
        if sent.is_err() {
            // One that cannot be told what holds now would go on with what held before.
            self.process.kill();
        }
    }

    fn send_table(&self, ServiceSettings { front, templates }: &ServiceSettings) -> io::Result<()> {
        let policies = front.keys.iter().map(|key| (key.id.clone(), key.policies.clone())).collect();
        let ready_for = ready_workers(&front.keys, templates).into_iter().nth(self.index);
        let table = serde_json::to_vec(&WorkerTable { policies, ready_for }).map_err(io::Error::other)?;
        self.process.send_now(&FromSupervisor::Table, &[sealed_file(&table)?.as_fd()])
    }

    /// It has read its table.
    fn has_table(&mut self, settings: &ServiceSettings) {
        self.has_begun = true;
        if std::mem::replace(&mut self.table, TableState::Read) == TableState::Outdated {
            self.update_table(settings);
        }
    }
}

/// A session of the service.
struct Keeping {
    of: KeeperOf,
    process: Process,
}

impl Keeping {
    /// Connects it with a front. Both find out by themselves where the other has ended.
    fn connect(&self, front: &Process) -> io::Result<()> {
        let (of_front, its_front) = UnixStream::pair()?;
        self.process.send_with(&FromSupervisor::Front, &[its_front.as_fd()])?;
        front.send_with(&FromSupervisor::Keeper(self.of.clone()), &[of_front.as_fd()])
    }
}

impl Process {
    /// What it says; none: nothing more has come.
    fn receive<M: Message>(&mut self) -> Option<M> {
        let Process { socket, decoder, is_at_end, child, .. } = self;
        if let Ok(Some(message)) = decoder.take() {
            return Some(message);
        }
        let mut piece = [0; 4096];
        match recv(&*socket, &mut piece, RecvFlags::DONTWAIT) {
            Ok((length, _)) if length > 0 => decoder.push(piece.get(..length).unwrap_or_default()),
            Err(Errno::AGAIN | Errno::INTR) => return None,
            // It ends.
            _ => *is_at_end = true,
        }
        decoder.take().unwrap_or_else(|_malformed| {
            let _ended = child.kill();
            *is_at_end = true;
            None
        })
    }
}

/// Serves at the sockets that listen until a signal ends it. Then they close, unless systemd has them too.
///
/// # Errors
/// It cannot begin, or not go on.
pub fn serve(service: &Service<'_>, listeners: Vec<(ListenerKind, OwnedFd)>) -> Result<ServiceEnd, ServiceError> {
    let mut signals = Signals::block().map_err(|error| ServiceError::Signals(error.to_string()))?;
    let mut group = Group {
        service,
        listeners,
        settings: service.settings.clone(),
        front: None,
        watch: FrontWatch::new(),
        more_to_read: false,
        not_taken: None,
        reading: None,
        workers: Vec::new(),
        keepers: Vec::new(),
        leaving: Vec::new(),
        failed: Failures::default(),
        short_lived: Failures::default(),
        not_started: 0,
        next_try: None,
        templates: TemplateStore::default(),
    };
    group.start()?;
    group.wait_for_accepting()?;
    (service.ready)();
    notify::ready(&group.status());
    loop {
        let woken = group.wait(&signals)?;
        group.watch.note(group.front.as_ref());
        while let Some(signal) = signals.take() {
            match Signal::from_named_raw(signal) {
                Some(Signal::HUP) => group.reload(),
                Some(Signal::TERM | Signal::INT | Signal::QUIT) => {
                    group.drain()?;
                    // A second signal is not to end this process otherwise than the first.
                    std::mem::forget(signals);
                    return Ok(ServiceEnd::Signal(signal));
                }
                _ => {}
            }
        }
        if woken.has_ended {
            group.note_ended()?;
        }
        group.take_settings();
        group.end_leaving();
        group.start_missing()?;
        if woken.has_input {
            group.more_to_read = false;
            group.serve_front();
            group.serve_workers();
        }
        group.look_at_front();
    }
}

/// What has happened while it waited.
struct Woken {
    /// A process has ended.
    has_ended: bool,
    /// The front, a worker, or a process that makes an image or examines the host has said something.
    has_input: bool,
}

fn view<'t>(service: &'t Service<'_>, settings: &'t ServiceSettings, workers: &'t [u32]) -> SettingsView<'t> {
    SettingsView {
        templates: &settings.templates,
        keys: &settings.front.keys,
        workers,
        memory: settings.front.capacity.size.memory,
        account: service.account.as_ref(),
        tell: &service.tell,
    }
}

/// A process that is to end by itself.
struct Leaving {
    process: Process,
    since: Instant,
    /// The worker after it takes its share of what runs may use.
    is_worker: bool,
}

/// How many processes failed, one after the other.
#[derive(Default)]
struct Failures(Option<(u32, Instant)>);

impl Failures {
    /// Another one. Whether there are too many now.
    fn add(&mut self) -> bool {
        let earlier = self.0.filter(|(_, last)| last.elapsed() < FORGIVEN).map_or(0, |(count, _)| count);
        self.0 = Some((earlier + 1, Instant::now()));
        earlier + 1 >= MAX_FAILED
    }
}

/// All processes of a service.
struct Group<'s, 'a> {
    service: &'s Service<'a>,
    listeners: Vec<(ListenerKind, OwnedFd)>,
    settings: ServiceSettings,
    front: Option<Process>,
    watch: FrontWatch,
    /// Not all was read that the front and the workers have said.
    more_to_read: bool,
    /// Why the settings that were read last were not taken.
    not_taken: Option<String>,
    /// Those that are being read.
    reading: Option<Box<dyn Reading + 'a>>,
    workers: Vec<Worker>,
    keepers: Vec<Keeping>,
    templates: TemplateStore,
    /// Workers of a front that has ended, and keepers whose key has gone: each cancels its run and records it,
    /// and ends.
    leaving: Vec<Leaving>,
    /// Processes that ended before they had begun.
    failed: Failures,
    /// Workers that had begun, and did not live for long.
    short_lived: Failures,
    /// Processes that could not be started, one after the other.
    not_started: u32,
    /// When that is tried again.
    next_try: Option<Instant>,
}

impl Group<'_, '_> {
    /// Starts the processes that are not there.
    fn start(&mut self) -> Result<(), ServiceError> {
        if self.front.is_none() {
            let front = self.start_front().map_err(|error| ServiceError::Start { what: "the front, stockade-serve", error })?;
            for keeper in &self.keepers {
                // One that has ended is not there any more.
                let _ended = keeper.connect(&front);
            }
            self.front = Some(front);
            self.watch.begin();
        }
        let leaving = self.leaving.iter().filter(|leaving| leaving.is_worker).count();
        while self.workers.len() + leaving < self.service.workers {
            self.start_worker()?;
        }
        Ok(())
    }

    fn start_front(&self) -> io::Result<Process> {
        let privileged = self.service.account.is_some();
        let (_, program) = companion::find(FRONT, privileged).map_err(io::Error::other)?;
        let (ours, its) = UnixStream::pair()?;
        let mut command = Command::new(format!("/proc/self/fd/{}", program.as_raw_fd()));
        command.arg0(FRONT).arg(env!("CARGO_PKG_VERSION")).env_clear().stdin(OwnedFd::from(its)).stdout(Stdio::null());
        if let Some(Caller { uid, gid, .. }) = &self.service.account {
            command.arg(format!("{uid}:{gid}"));
        }
        let mut front = Process::spawn(command, ours)?;
        let send = || -> io::Result<()> {
            front.send_settings(&self.settings.front)?;
            for (kind, socket) in &self.listeners {
                front.send_with(&FromSupervisor::Listener(*kind), &[socket.as_fd()])?;
            }
            Ok(())
        };
        if send().is_err() {
            front.kill();
        }
        Ok(front)
    }

    /// Starts what is not there. What the host has no room for now is tried again and again, as long as a
    /// front and a worker serve meanwhile.
    fn start_missing(&mut self) -> Result<(), ServiceError> {
        if self.next_try.is_some_and(|next| Instant::now() < next) {
            return Ok(());
        }
        let Err(error) = self.start() else {
            (self.not_started, self.next_try) = (0, None);
            return Ok(());
        };
        self.not_started += 1;
        if self.not_started == 1 {
            (self.service.tell)(&format!("stockade: {error}; it is tried again every second"));
        }
        let serves = self.front.is_some() && !self.workers.is_empty();
        if self.not_started >= MAX_FAILED && !serves {
            return Err(error);
        }
        self.next_try = Some(Instant::now() + RETRY);
        Ok(())
    }

    fn start_worker(&mut self) -> Result<(), ServiceError> {
        let failed = |error| ServiceError::Start { what: "a worker", error };
        let is_free = |index: &usize| self.workers.iter().all(|worker| worker.index != *index);
        let index = (0..).find(is_free).unwrap_or_default();
        let start = || -> io::Result<(Worker, UnixStream)> {
            let (of_front, its_front) = UnixStream::pair()?;
            let (ours, its) = UnixStream::pair()?;
            let mut command = own_program_of_service();
            command.arg0("stockade").arg("serve-worker").stdin(OwnedFd::from(its_front)).stdout(OwnedFd::from(its));
            Ok((Worker { index, process: Process::spawn(command, ours)?, table: TableState::Read, has_begun: false }, of_front))
        };
        let (mut worker, of_front) = start().map_err(failed)?;
        worker.update_table(&self.settings);
        self.workers.push(worker);
        // A front that has just ended is replaced, and all workers with it.
        let _unsent = self.front.as_ref().map(|front| front.send_with(&FromSupervisor::Worker, &[of_front.as_fd()]));
        Ok(())
    }

    /// Waits until a front has its sockets.
    fn wait_for_accepting(&mut self) -> Result<(), ServiceError> {
        let end = Instant::now() + READY_TIME;
        while Instant::now() < end {
            let Some(front) = &mut self.front else { break };
            let has_read_all = front_watch::has_read_all(front);
            if front.has_ended() {
                // What it was sent is gone, and was not read.
                self.note_ended()?;
                self.start()?;
            } else if has_read_all {
                break;
            } else {
                wait_until(&front.pidfd, Instant::now() + Duration::from_millis(2))?;
            }
        }
        Ok(())
    }

    /// For the manager's list of services.
    fn status(&self) -> String {
        let Settings { keys, lacks, .. } = &self.settings.front;
        let lacks = lacks.iter().map(|lack| format!("; {}", lack.in_short())).collect::<String>();
        let kept = self.not_taken.as_ref().and_then(|why| why.lines().next());
        let kept = kept.map(|why| format!("; the configuration stays as it was: {why}")).unwrap_or_default();
        format!("serving at {}, {} workers, {} keys{lacks}{kept}", self.service.addresses, self.service.workers, keys.len())
    }

    /// Ends a front that stands still; the loop replaces it.
    fn look_at_front(&mut self) {
        if self.watch.look(self.front.as_ref()) == FrontState::Stuck
            && let Some(front) = &mut self.front
        {
            (self.service.tell)("stockade: the front does not read what it is sent, and is ended");
            front.kill();
        }
    }

    /// Waits for a signal, the end of a process, a word from one, the next look at the front, or the time to
    /// try again what could not be started.
    fn wait(&self, signals: &Signals) -> Result<Woken, ServiceError> {
        let workers = self.workers.iter().map(|worker| &worker.process);
        let keepers = self.keepers.iter().map(|keeper| &keeper.process);
        let processes: Vec<&Process> =
            self.front.iter().chain(workers.clone()).chain(keepers).chain(self.leaving.iter().map(|leaving| &leaving.process)).collect();
        let speakers = self.front.iter().chain(workers).filter(|worker| !worker.is_at_end).map(|worker| worker.socket.as_fd());
        let mut fds = vec![PollFd::new(signals, PollFlags::IN)];
        fds.extend(processes.iter().map(|process| PollFd::new(&process.pidfd, PollFlags::IN)));
        let reading = self.reading.as_deref();
        let others = self.templates.maker().into_iter().chain(reading.map(Reading::awaited));
        fds.extend(speakers.chain(others).map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        let now = self.more_to_read.then(Instant::now);
        let times = self.next_try.into_iter().chain(now).chain(reading.and_then(Reading::until));
        let next = times.fold(self.watch.next(), Instant::min);
        match poll(&mut fds, Some(&timespec(next.saturating_duration_since(Instant::now())))) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(ServiceError::Wait(errno)),
        }
        let is_ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
        let mut fds = fds.iter().skip(1);
        let has_ended = fds.by_ref().take(processes.len()).filter(|fd| is_ready(fd)).count() > 0;
        Ok(Woken { has_ended, has_input: self.more_to_read || fds.any(is_ready) })
    }

    /// Starts the keepers that the front asks for: some at a time, as there may be no end of them.
    fn serve_front(&mut self) {
        let mut asked = 0;
        while asked < MESSAGES_AT_A_TIME
            && let Some(FromFront::Keep(of)) = self.front.as_mut().and_then(Process::receive)
        {
            asked += 1;
            let session = of.session.clone();
            let is_full = self.is_full(&of);
            let started = self.check_keeper(&of).and_then(|()| self.start_keeper(of).map_err(|error| format!("start a keeper: {error}")));
            if let (Err(why), Some(front)) = (started, &mut self.front)
                && front.send_now(&FromSupervisor::NoKeeper(NoKeeper { session, why, is_full }), &[]).is_err()
            {
                // One that asks and does not read would hold up all else.
                front.kill();
            }
        }
        self.more_to_read |= asked == MESSAGES_AT_A_TIME;
    }

    /// Whether the front may have this keeper: its word alone is not enough.
    fn check_keeper(&self, of: &KeeperOf) -> Result<(), String> {
        if !of.is_well_formed() {
            return Err(String::from("the front asks for a session that no client could have asked for"));
        }
        if !self.may_keep(of) {
            return Err(format!("key {} may have no session under policy {}", of.key, of.policy));
        }
        if self.keepers.iter().any(|keeper| keeper.of.session == of.session) {
            return Err(String::from("there is such a session"));
        }
        if self.is_full(of) {
            return Err(String::from("there are as many sessions as may be"));
        }
        Ok(())
    }

    /// Whether the key of a session may have sessions under its policy.
    fn may_keep(&self, of: &KeeperOf) -> bool {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs().cast_signed());
        let may =
            |key: &Key| key.id == of.key && !key.has_expired(now) && key.scopes.contains(&Scope::Keep) && key.policies.contains(&of.policy);
        self.settings.front.keys.iter().any(may)
    }

    /// Whether there are as many keepers as may be, of all keys or of this one; also those that are
    /// ending.
    fn is_full(&self, of: &KeeperOf) -> bool {
        let Settings { keys, capacity, .. } = &self.settings.front;
        let most = keys.iter().find(|key| key.id == of.key).map_or(0, |key| key.sessions);
        let of_key = self.keepers.iter().filter(|keeper| keeper.of.key == of.key).count();
        self.keepers.len() >= capacity.sessions as usize || of_key >= most as usize
    }

    fn start_keeper(&mut self, of: KeeperOf) -> io::Result<()> {
        let (ours, its) = UnixStream::pair()?;
        let mut command = own_program_of_service();
        command.arg0("stockade").args(["serve-keeper", "--key", &of.key, "--policy", &of.policy]);
        command.stdin(OwnedFd::from(its)).stdout(Stdio::null());
        let keeper = Keeping { of, process: Process::spawn(command, ours)? };
        let connected = self.front.as_ref().map_or(Ok(()), |front| keeper.connect(front));
        match connected {
            Ok(()) => self.keepers.push(keeper),
            Err(_) => keeper.process.kill_and_reap(),
        }
        connected
    }

    /// Answers what workers ask for, some messages of each, and hands on the images that were made.
    fn serve_workers(&mut self) {
        let mut asked = Vec::new();
        for worker in &mut self.workers {
            let mut read = 0;
            while read < MESSAGES_AT_A_TIME
                && let Some(message) = worker.process.receive()
            {
                read += 1;
                match message {
                    ToSupervisor::Wants(wanted) => asked.push((worker.process.child.id(), wanted)),
                    ToSupervisor::HasTable => worker.has_table(&self.settings),
                }
            }
            self.more_to_read |= read == MESSAGES_AT_A_TIME;
        }
        let workers = self.worker_ids();
        let view = view(self.service, &self.settings, &workers);
        let mut replies: Vec<Reply> = asked.into_iter().flat_map(|(worker, wanted)| self.templates.ask(worker, wanted, &view)).collect();
        replies.extend(self.templates.take_made(&view));
        self.send_all(&replies);
    }

    fn send_all(&self, replies: &[Reply]) {
        for reply in replies {
            // One that has ended meanwhile is replaced, and its successor asks by itself. One that has read
            // nothing for long has a run, and asks again after that: it is not waited for.
            let worker = self.workers.iter().find(|worker| worker.process.child.id() == reply.worker);
            let _unsent = worker.map(|worker| worker.process.send_now(&reply.message, &reply.files()));
        }
    }

    fn worker_ids(&self) -> Vec<u32> {
        self.workers.iter().map(|worker| worker.process.child.id()).collect()
    }

    /// Kills those that have not ended for too long: something else has a worker's socket, or a keeper does
    /// not come to its end. What they leave, the next start of a run sweeps.
    fn end_leaving(&mut self) {
        for Leaving { process, .. } in self.leaving.iter_mut().filter(|leaving| leaving.since.elapsed() > 2 * EXIT_TIME) {
            // It is reaped when it has ended.
            process.kill();
        }
    }

    /// Removes processes that have ended; [`Group::start_missing`] starts others.
    fn note_ended(&mut self) -> Result<(), ServiceError> {
        self.leaving.retain_mut(|leaving| !leaving.process.has_ended());
        self.keepers.retain_mut(|keeper| !keeper.process.has_ended());
        if let Some(mut front) = self.front.take_if(Process::has_ended) {
            let status = front.status();
            (self.service.tell)(&format!("stockade: the front has ended, and is started again with its workers ({status})"));
            let since = Instant::now();
            self.leaving.extend(self.workers.drain(..).map(|worker| Leaving { process: worker.process, since, is_worker: true }));
            return self.count_failure(&front, "the front");
        }
        let mut index = 0;
        while let Some(worker) = self.workers.get_mut(index) {
            if !worker.process.has_ended() {
                index += 1;
                continue;
            }
            let mut worker = self.workers.swap_remove(index);
            (self.service.tell)(&format!("stockade: a worker has ended, and is replaced ({})", worker.process.status()));
            if !worker.has_begun {
                self.count_failure(&worker.process, "a worker")?;
            } else if worker.process.began.elapsed() < SHORT_LIFE && self.short_lived.add() {
                // A front or its clients that end workers as fast as they come have no others made without a pause.
                self.next_try = Some(Instant::now() + RETRY);
            }
        }
        Ok(())
    }

    /// Notes that a process has ended by itself.
    fn count_failure(&mut self, process: &Process, what: &'static str) -> Result<(), ServiceError> {
        if process.began.elapsed() >= SHORT_LIFE {
            self.failed = Failures::default();
        } else if self.failed.add() {
            return Err(ServiceError::Fails { what });
        }
        Ok(())
    }

    /// Sends the settings to the front.
    fn tell_front(&mut self) {
        if let Some(front) = &mut self.front
            && front.send_settings(&self.settings.front).is_err()
        {
            front.kill();
        }
    }

    /// Begins to read the settings again, also where that was under way: its files may have changed since.
    fn reload(&mut self) {
        notify::reloading();
        self.reading = None;
        match (self.service.read_again)() {
            Ok(reading) => self.reading = Some(reading),
            Err(why) => self.end_reload(Err(why)),
        }
    }

    /// Takes the settings that are read, or says why not.
    fn take_settings(&mut self) {
        if let Some(read) = self.reading.as_mut().and_then(|reading| reading.poll()) {
            self.reading = None;
            self.end_reload(read);
        }
    }

    fn end_reload(&mut self, read: Result<ServiceSettings, NotTaken>) {
        match read {
            Ok(settings) => {
                (self.settings, self.not_taken) = (settings, None);
                self.templates.reload(&view(self.service, &self.settings, &self.worker_ids()));
                // Before the front: it lets in what a worker would still refuse.
                for worker in &mut self.workers {
                    worker.update_table(&self.settings);
                }
                self.tell_front();
                self.end_keepers();
                (self.service.tell)("stockade: the configuration was read again");
            }
            Err(NotTaken { why, lacks }) => {
                (self.service.tell)(&format!("stockade: the configuration stays as it was: {why}"));
                self.not_taken = Some(why);
                if let Some(mut lacks) = lacks {
                    lacks.retain(|lack| self.settings.front.policies.contains_key(&lack.policy));
                    self.settings.front.lacks = lacks;
                    self.tell_front();
                }
            }
        }
        notify::ready(&self.status());
    }

    /// Tells the keepers whose key may have no such session any more to end.
    fn end_keepers(&mut self) {
        let since = Instant::now();
        let (stay, end): (Vec<_>, Vec<_>) = std::mem::take(&mut self.keepers).into_iter().partition(|keeper| self.may_keep(&keeper.of));
        self.keepers = stay;
        for Keeping { process, .. } in end {
            let _ended_meanwhile = kill_process(Pid::from_child(&process.child), Signal::TERM);
            self.leaving.push(Leaving { process, since, is_worker: false });
        }
    }

    /// Lets runs end, up to a time, cancels the others, and ends all processes.
    fn drain(&mut self) -> Result<(), ServiceError> {
        notify::stopping(self.service.drain + 3 * EXIT_TIME);
        self.reading = None;
        // The front closes its own: who connects from now on is refused, and does not wait in a backlog.
        self.listeners.clear();
        let _ended = self.front.as_ref().map(|front| send(&front.socket, &FromSupervisor::Drain));
        self.wait_for_front(self.service.drain)?;
        if self.front.as_mut().is_some_and(|front| !front.has_ended()) {
            for process in self.workers.iter().map(|worker| &worker.process).chain(self.keepers.iter().map(|keeper| &keeper.process)) {
                // The signal cancels its run, whose result the front still delivers.
                let _ended_meanwhile = kill_process(Pid::from_child(&process.child), Signal::TERM);
            }
            self.wait_for_front(EXIT_TIME)?;
        }
        self.front.take().into_iter().for_each(Process::kill_and_reap);
        let workers = self.workers.drain(..).map(|worker| worker.process);
        end_all(
            workers.chain(self.keepers.drain(..).map(|keeper| keeper.process)).chain(self.leaving.drain(..).map(|leaving| leaving.process)),
            EXIT_TIME,
        );
        Ok(())
    }

    /// Waits for the end of the front, at most so long.
    fn wait_for_front(&mut self, most: Duration) -> Result<(), ServiceError> {
        let end = Instant::now() + most;
        while let Some(front) = self.front.as_mut().filter(|_| Instant::now() < end) {
            if front.has_ended() {
                break;
            }
            wait_until(&front.pidfd, end)?;
        }
        Ok(())
    }
}

/// Waits for the end of a process, at most until then.
fn wait_until(pidfd: &OwnedFd, end: Instant) -> Result<(), ServiceError> {
    match poll(&mut [PollFd::new(pidfd, PollFlags::IN)], Some(&timespec(end.saturating_duration_since(Instant::now())))) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(errno) => Err(ServiceError::Wait(errno)),
    }
}

/// Ends workers: each has lost its socket to the supervisor, and gets this time to end by itself.
fn end_all(workers: impl Iterator<Item = Process>, most: Duration) {
    let end = Instant::now() + most;
    let mut left: Vec<(Child, OwnedFd)> = workers
        .map(|worker| {
            let Process { child, pidfd, socket, .. } = worker;
            drop(socket);
            (child, pidfd)
        })
        .collect();
    for (child, pidfd) in &mut left {
        // Whatever comes of it: it is killed if it still lives.
        let _waited = wait_until(pidfd, end);
        let _ended = child.kill();
        let _reaped = child.wait();
    }
}
