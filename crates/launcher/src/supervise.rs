//! Watching one run from the clone to the last byte.
//!
//! One loop over pidfd, pipes, the filter's listener, the cgroup's oom event, signals
//! and deadlines. The launcher tells the executor nothing but by descriptors, believes
//! nothing but its status pipe, and ends a run by killing pid 1, upon which the kernel
//! kills everything inside.

mod deadlines;
mod finish;

use std::time::{Duration, Instant};

use nix::sys::signal::Signal as NixSignal;
use rustix::{
    event::{Timespec, epoll},
    fd::{AsFd, OwnedFd},
    io::Errno,
    net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg},
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};
use stockade_egress::gate::{Gate, GateError};
use stockade_policy::plan::Plan;
use stockade_protocol::{
    LimitKey, Receipt,
    frame::{Event, Evidence},
    step::Step,
};

use crate::{
    Asked, Client, Inputs, LaunchError, Outcome, Stdin, Streams, What,
    capture::Capture,
    cgroup::{Cgroup, CpuTime},
    child::MOST_HANDED_OVER,
    egress,
    error::step_failed,
    identity::OuterNamespaces,
    modules::Heard,
    notify::{Denials, Next},
    prepared::LauncherPipes,
    receipt::{self, Outside},
    relay::{Feed, FeedTokens, Outlet, Source, Turn, is_readable, own_streams},
    sandbox::Sandbox,
    scratch::{self, INTERVAL_MS, TreeUse},
    signals::Signals,
    terminal::{self, RawTerminal},
    text::Text,
    verdict::Cause,
};

/// Setting up takes milliseconds; large files take longer.
const SETUP_DEADLINE: Duration = Duration::from_secs(60);
/// Bytes kept of relayed errors; hints are read off the last half.
const KEPT_OF_ERRORS: u64 = 32 << 10;
/// How long a payload that was told to end has for it, where whoever told it will not wait.
const GRACE: Duration = Duration::from_millis(500);
/// A program that prints this many times the limit is ended.
const OUTPUT_FACTOR: u64 = 64;

/// Sources of the loop.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
enum Token {
    Pid,
    Status,
    Stdout,
    Stderr,
    StdoutTarget,
    StderrTarget,
    FeedSource,
    FeedTarget,
    HandOver,
    Listener,
    Signals,
    Oom,
    Gate,
    Client,
    ClientGone,
    Modules,
}

impl Token {
    const ALL: [Token; 16] = [
        Token::Pid,
        Token::Status,
        Token::Stdout,
        Token::Stderr,
        Token::StdoutTarget,
        Token::StderrTarget,
        Token::FeedSource,
        Token::FeedTarget,
        Token::HandOver,
        Token::Listener,
        Token::Signals,
        Token::Oom,
        Token::Gate,
        Token::Client,
        Token::ClientGone,
        Token::Modules,
    ];

    fn data(self) -> epoll::EventData {
        epoll::EventData::new_u64(self as u64)
    }

    fn from_data(data: epoll::EventData) -> Option<Token> {
        usize::try_from(data.u64()).ok().and_then(|index| Token::ALL.get(index)).copied()
    }
}

const FEED: FeedTokens =
    FeedTokens { source: epoll::EventData::new_u64(Token::FeedSource as u64), target: epoll::EventData::new_u64(Token::FeedTarget as u64) };

/// How far the sandbox has come.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    SettingUp,
    /// The receipt is in; the program may run from now on.
    Ready,
    Started,
    Ended,
}

struct Supervision<'a> {
    plan: &'a Plan,
    epoll: OwnedFd,
    sandbox: Sandbox,
    cgroup: Cgroup,
    outer: OuterNamespaces,
    gate: Option<Gate>,
    lifeline: OwnedFd,
    signals: Signals,
    client: Option<&'a mut dyn Client>,
    streams: Streams,
    status_read: OwnedFd,
    status: Vec<u8>,
    stdout: Option<OwnedFd>,
    stderr: Option<OwnedFd>,
    out: Outlet,
    err: Outlet,
    feed: Option<Feed<'a>>,
    handover: OwnedFd,
    listener: Option<OwnedFd>,
    listener_rests_until: Option<Instant>,
    master: Option<OwnedFd>,
    raw: Option<RawTerminal>,
    root_fs: Option<OwnedFd>,
    scratch_fs: Option<OwnedFd>,
    scratch_directory: Option<OwnedFd>,
    scratch_before: TreeUse,
    scratch_free: u64,
    next_scratch_count: Option<Instant>,
    next_cpu_check: Option<Instant>,
    /// What setting up has cost, which neither counts as the program's nor against its limit.
    cpu_before: CpuTime,
    denials: Denials,
    modules: Option<Heard>,
    phase: Phase,
    /// The executor has our word to start the program: from here on it may have run.
    released: bool,
    begun: Instant,
    started_at: Option<Instant>,
    ended_at: Option<Instant>,
    /// A signal that ends programs was passed on.
    asked_to_end: bool,
    /// When the payload's time to end by itself is over, and by which signal it was told.
    ends_at: Option<(Instant, i32)>,
    cause: Option<Cause>,
    failure: Option<LaunchError>,
    outside: Option<Outside>,
    receipt: Option<Receipt>,
    wait_status: Option<i32>,
    rusage_us: Option<(u64, u64)>,
    buffer: Vec<u8>,
}

const COUNT: &str = "count what is in scratch";

fn failed(attempt: &'static str) -> impl Fn(Errno) -> LaunchError {
    move |errno| LaunchError::system(What::Prepare, attempt, errno)
}

/// The failure that the child has sent before it ended, if it has; not that it misses the
/// launcher, which follows from a failure of the launcher's own.
pub(crate) fn failure_of_child(plan: &Plan, status_read: &OwnedFd) -> Option<LaunchError> {
    // It was written before the child ended; a moment more for one that is about to.
    let mut fds = [rustix::event::PollFd::new(status_read, rustix::event::PollFlags::IN)];
    let moment = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
    if !matches!(rustix::event::poll(&mut fds, Some(&moment)), Ok(n) if n > 0) || rustix::io::ioctl_fionread(status_read).unwrap_or(0) == 0
    {
        return None;
    }
    let mut bytes = vec![0; 4096];
    let length = rustix::io::read(status_read, &mut bytes).ok()?;
    bytes.truncate(length);
    match Event::take(&mut bytes) {
        Ok(Some(Event::Failed { step, errno, .. }))
            if step == Step::DeathSignal as u16 && Errno::SRCH.raw_os_error() == i32::from(errno) =>
        {
            None
        }
        Ok(Some(Event::Failed { step, errno, index, detail })) => Some(word_failure(plan, step, errno, index, &detail)),
        _ => None,
    }
}

fn word_failure(plan: &Plan, step: u16, errno: u16, index: u32, detail: &[u8]) -> LaunchError {
    let errno = Errno::from_raw_os_error(i32::from(errno));
    match Step::from_number(step) {
        Some(step) => step_failed(plan, step, errno, usize::try_from(index).ok(), &String::from_utf8_lossy(detail)),
        None => LaunchError::other(What::Executor, format!("the sandbox failed at an unknown step {step}")),
    }
}

/// A sandbox that has been told to go on.
pub(crate) struct Begun {
    pub(crate) sandbox: Sandbox,
    pub(crate) cgroup: Cgroup,
    pub(crate) outer: OuterNamespaces,
    pub(crate) gate: Option<Gate>,
    pub(crate) lifeline: OwnedFd,
    pub(crate) status_read: OwnedFd,
    pub(crate) handover: OwnedFd,
    pub(crate) signals: Signals,
}

/// Watches the run to its end and takes everything down.
///
/// # Errors
/// The program was not started.
pub(crate) fn supervise(plan: &Plan, inputs: Inputs<'_>, begun: Begun, pipes: LauncherPipes) -> Result<Outcome, LaunchError> {
    // In this order for the same reason as in `launch`.
    let Begun { signals, handover, status_read, lifeline, gate, outer, cgroup, sandbox } = begun;
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed("make the event loop"))?;
    let outlet = |stream, has_errors: bool| match inputs.streams {
        Streams::Capture => Outlet::Capture(Capture::new(plan.limits.get(LimitKey::OutputSize))),
        Streams::Relay(relay) => {
            let kept = (relay.keep_errors && has_errors).then(|| Capture::new(Some(KEPT_OF_ERRORS)));
            let text = (relay.as_text && !plan.terminal).then(Text::default);
            Outlet::Relay { to: stream, total: 0, kept, text }
        }
    };
    let (own_out, own_err) = own_streams();
    let (scratch_directory, scratch_before) = inputs.scratch.map(|opened| (opened.directory, opened.before)).unzip();
    let scratch_free = scratch_directory.as_ref().map_or(Ok(0), scratch::free_bytes).map_err(failed(COUNT))?;
    let feed = match (pipes.stdin, inputs.stdin) {
        (Some(pipe), Stdin::Bytes(all)) => Some(Feed::new(pipe, Source::Bytes { all, passed: 0 }, false)),
        (Some(pipe), Stdin::Relay) if !plan.terminal => Some(Feed::new(pipe, Source::Stdin { pollable: false }, false)),
        _ => None,
    };
    let mut supervision = Supervision {
        plan,
        epoll,
        sandbox,
        cgroup,
        outer,
        gate,
        lifeline,
        signals,
        client: inputs.client.map(|client| client as _),
        streams: inputs.streams,
        status_read,
        status: Vec::new(),
        stdout: Some(pipes.stdout),
        stderr: Some(pipes.stderr),
        // A terminal carries both.
        out: outlet(own_out, plan.terminal),
        err: outlet(own_err, !plan.terminal),
        feed: feed.transpose().map_err(failed("feed stdin"))?,
        handover,
        listener: None,
        listener_rests_until: None,
        master: None,
        raw: None,
        // The run's own root has nothing that the code could write.
        root_fs: inputs.kept.map(|kept| kept.tmp),
        scratch_fs: None,
        scratch_directory,
        scratch_before: scratch_before.unwrap_or_default(),
        scratch_free,
        next_scratch_count: None,
        next_cpu_check: None,
        cpu_before: CpuTime::default(),
        denials: Denials::new(plan.filter.kill.clone()),
        modules: None,
        phase: Phase::SettingUp,
        released: false,
        begun: Instant::now(),
        started_at: None,
        ended_at: None,
        asked_to_end: false,
        ends_at: None,
        cause: None,
        failure: None,
        outside: None,
        receipt: None,
        wait_status: None,
        rusage_us: None,
        buffer: vec![0; 1 << 16],
    };
    supervision.register().map_err(failed("fill the event loop"))?;
    if let Some(work) = inputs.meanwhile {
        work();
    }
    if let Err(failure) = supervision.watch() {
        supervision.break_off(failure);
    }
    let program = plan.program_file.as_ref().map(|(_, name)| name.as_str());
    supervision.finish(program, &inputs.collect, inputs.record)
}

impl<'a> Supervision<'a> {
    fn register(&mut self) -> Result<(), Errno> {
        let add = |fd: rustix::fd::BorrowedFd<'_>, token: Token| epoll::add(&self.epoll, fd, token.data(), epoll::EventFlags::IN);
        add(self.sandbox.child.pidfd.as_fd(), Token::Pid)?;
        add(self.status_read.as_fd(), Token::Status)?;
        add(self.handover.as_fd(), Token::HandOver)?;
        add(self.signals.as_fd(), Token::Signals)?;
        for (stream, token) in [(&self.stdout, Token::Stdout), (&self.stderr, Token::Stderr)] {
            if let Some(stream) = stream {
                add(stream.as_fd(), token)?;
            }
        }
        if let Some(gate) = &self.gate {
            add(gate.watch(), Token::Gate)?;
        }
        if let Some(client) = &self.client {
            // That it has hung up is told unasked.
            let both = [
                (client.requests(), Token::Client, epoll::EventFlags::IN),
                (client.results(), Token::ClientGone, epoll::EventFlags::empty()),
            ];
            for (fd, token, events) in both {
                match fd.map_or(Ok(()), |fd| epoll::add(&self.epoll, fd, token.data(), events)) {
                    // A regular file, of which nothing is to be expected.
                    Ok(()) | Err(Errno::PERM) => {}
                    Err(errno) => return Err(errno),
                }
            }
        }
        self.cgroup.watch_oom(&self.epoll, Token::Oom.data())
    }

    /// The loop: until pid 1 has ended.
    fn watch(&mut self) -> Result<(), LaunchError> {
        let mut events = Vec::with_capacity(16);
        loop {
            let timeout = self.next_deadline().map(|at| at.saturating_duration_since(Instant::now()));
            let timeout = timeout.map(|left| Timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: i64::from(left.subsec_nanos()) });
            events.clear();
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), timeout.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(failed("wait for the sandbox")(errno)),
            }
            // What was handed over was sent before the executor began to speak, but one
            // wait may bring both, in any order.
            events.sort_by_key(|event| Token::from_data(event.data) != Some(Token::HandOver));
            let mut over = false;
            for event in &events {
                match Token::from_data(event.data) {
                    Some(Token::Pid) => over = true,
                    Some(token) => self.serve(token).map_err(failed("serve the sandbox"))?,
                    None => {}
                }
            }
            if over {
                return Ok(());
            }
            self.check_deadlines();
        }
    }

    fn serve(&mut self, token: Token) -> Result<(), Errno> {
        match token {
            Token::Status => self.read_status(),
            Token::Stdout | Token::StdoutTarget => self.move_output(Token::Stdout),
            Token::Stderr | Token::StderrTarget => self.move_output(Token::Stderr),
            Token::FeedSource => self.feed.as_mut().map_or(Ok(()), |feed| feed.on_source(&self.epoll, &FEED)),
            Token::FeedTarget => self.feed.as_mut().map_or(Ok(()), |feed| feed.on_room(&self.epoll, &FEED)),
            Token::HandOver => self.take_descriptors(),
            Token::Listener => self.serve_listener(),
            Token::Signals => self.serve_signals(),
            Token::Oom => {
                if self.cgroup.oom_kills() > 0 {
                    self.end(Cause::OutOfMemory);
                }
                self.cgroup.acknowledge_oom();
                Ok(())
            }
            Token::Gate => {
                let Some(gate) = &self.gate else { return Ok(()) };
                epoll::delete(&self.epoll, gate.watch())?;
                // Only on our word it may end, and we have given none; unless it could not
                // begin, which it has said.
                let error = gate.confirm().err().unwrap_or(GateError::Died);
                self.break_off(egress::failed(&error));
                Ok(())
            }
            Token::Client => self.serve_client(),
            Token::ClientGone => {
                let gone = self.client.as_ref().and_then(|client| client.results());
                gone.map_or(Ok(()), |fd| epoll::delete(&self.epoll, fd))?;
                self.end(Cause::Cancelled(NixSignal::SIGHUP as i32));
                Ok(())
            }
            Token::Modules => {
                let Some(heard) = &mut self.modules else { return Ok(()) };
                if heard.hear(&mut self.buffer)? { Ok(()) } else { epoll::delete(&self.epoll, heard.pipe()) }
            }
            Token::Pid => Ok(()),
        }
    }

    /// Ends the run; the first cause stays.
    fn end(&mut self, cause: Cause) {
        self.cause.get_or_insert(cause);
        self.cgroup.kill();
        self.sandbox.kill();
    }

    fn break_off(&mut self, failure: LaunchError) {
        self.failure.get_or_insert(failure);
        self.cgroup.kill();
        self.sandbox.kill();
    }

    fn read_status(&mut self) -> Result<(), Errno> {
        let mut bytes = [0; 4096];
        let length = rustix::io::read(&self.status_read, &mut bytes)?;
        if length == 0 {
            return epoll::delete(&self.epoll, &self.status_read);
        }
        self.status.extend_from_slice(bytes.get(..length).unwrap_or_default());
        loop {
            match Event::take(&mut self.status) {
                Ok(Some(event)) => self.take_event(event),
                Ok(None) => return Ok(()),
                Err(_) => {
                    self.break_off(LaunchError::other(What::Executor, String::from("the executor sent something that is no event")));
                    return epoll::delete(&self.epoll, &self.status_read);
                }
            }
        }
    }

    fn take_event(&mut self, event: Event) {
        match (event, self.phase) {
            (Event::Ready(evidence), Phase::SettingUp) => self.become_ready(&evidence),
            (Event::Started, Phase::Ready) => self.phase = Phase::Started,
            (Event::Ended { status, user_us, system_us }, Phase::Started) => {
                self.phase = Phase::Ended;
                self.ended_at = Some(Instant::now());
                self.wait_status = Some(status);
                self.rusage_us = Some((user_us, system_us));
            }
            (Event::Failed { step, errno, index, detail }, Phase::SettingUp | Phase::Ready) if step != Step::WatchPayload as u16 => {
                self.phase = Phase::SettingUp;
                self.released = false;
                // Whatever the launcher met meanwhile followed from this.
                self.failure = None;
                self.break_off(word_failure(self.plan, step, errno, index, &detail));
            }
            (Event::Failed { step, errno, index, detail }, Phase::Ready | Phase::Started) => {
                self.break_off(word_failure(self.plan, step, errno, index, &detail));
            }
            _ => self.break_off(LaunchError::other(What::Executor, String::from("the executor sent an event out of turn"))),
        }
    }

    fn become_ready(&mut self, evidence: &Evidence) {
        self.sandbox.take_back();
        let Some(outside) = &self.outside else {
            return self
                .break_off(LaunchError::other(What::Executor, String::from("the executor was ready before the sandbox was handed over")));
        };
        self.receipt = Some(receipt::assemble(self.plan, outside, &self.cgroup, evidence, self.listener.is_some()));
        let now = Instant::now();
        self.phase = Phase::Ready;
        self.started_at = Some(now);
        if self.scratch_directory.is_some() && !self.plan.scratch.read_only && self.plan.scratch.size.or(self.plan.scratch.files).is_some()
        {
            self.next_scratch_count = Some(now + Duration::from_millis(INTERVAL_MS));
        }
        if self.plan.limits.get(LimitKey::Cpu).is_some() && self.cgroup.cpu().is_some() {
            self.next_cpu_check = Some(now);
        }
        // Only now: nothing of the caller's is read for a program that will not run.
        let fed = self.feed.as_mut().map_or(Ok(()), |feed| feed.start(&self.epoll, &FEED));
        if let Err(errno) = fed {
            self.break_off(failed("feed stdin")(errno));
        }
    }

    fn move_output(&mut self, which: Token) -> Result<(), Errno> {
        let (stream, outlet, target) = match which {
            Token::Stdout => (&mut self.stdout, &mut self.out, Token::StdoutTarget),
            _ => (&mut self.stderr, &mut self.err, Token::StderrTarget),
        };
        let Some(from) = stream.as_ref() else { return Ok(()) };
        match outlet.turn(from, &mut self.buffer)? {
            Turn::More => {
                if let Some(to) = outlet.target() {
                    // It may have been waiting for its receiver.
                    epoll::modify(&self.epoll, from, which.data(), epoll::EventFlags::IN)?;
                    match epoll::delete(&self.epoll, to) {
                        Ok(()) | Err(Errno::NOENT | Errno::PERM) => {}
                        Err(errno) => return Err(errno),
                    }
                }
            }
            Turn::Blocked => {
                epoll::modify(&self.epoll, from, which.data(), epoll::EventFlags::empty())?;
                if let Some(to) = outlet.target() {
                    match epoll::add(&self.epoll, to, target.data(), epoll::EventFlags::OUT) {
                        Ok(()) | Err(Errno::EXIST) => {}
                        Err(errno) => return Err(errno),
                    }
                }
            }
            Turn::Ended => {
                epoll::delete(&self.epoll, from)?;
                *stream = None;
                if let Some(to) = outlet.target() {
                    // A receiver that went away would stay ready for ever.
                    match epoll::delete(&self.epoll, to) {
                        Ok(()) | Err(Errno::NOENT | Errno::PERM) => {}
                        Err(errno) => return Err(errno),
                    }
                }
            }
        }
        let most = self.plan.limits.get(LimitKey::OutputSize).map(|limit| limit.saturating_mul(OUTPUT_FACTOR));
        if self.streams == Streams::Capture && most.is_some_and(|most| self.out.total().max(self.err.total()) > most) {
            self.end(Cause::Output);
        }
        Ok(())
    }

    /// Takes the listener and the file systems that the child hands over, once.
    fn take_descriptors(&mut self) -> Result<(), Errno> {
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_HANDED_OVER))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut tags = [0; MOST_HANDED_OVER];
        let message = recvmsg(&self.handover, &mut [std::io::IoSliceMut::new(&mut tags)], &mut ancillary, RecvFlags::CMSG_CLOEXEC);
        epoll::delete(&self.epoll, &self.handover)?;
        let message = match message {
            // It has ended instead, by its own word or by ours; ECONNRESET: with one unread.
            Ok(message) if message.bytes == 0 => return Ok(()),
            Err(Errno::CONNRESET) => return Ok(()),
            message => message?,
        };
        let mut fds = Vec::new();
        for received in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = received {
                fds.extend(rights);
            }
        }
        for (tag, fd) in tags.iter().take(message.bytes).zip(fds) {
            match tag {
                b'r' => drop(self.root_fs.get_or_insert(fd)),
                b's' => self.scratch_fs = Some(fd),
                b't' => self.use_terminal(fd)?,
                b'm' => {
                    epoll::add(&self.epoll, &fd, Token::Modules.data(), epoll::EventFlags::IN)?;
                    self.modules = Some(Heard::new(fd));
                }
                b'l' => {
                    epoll::add(&self.epoll, &fd, Token::Listener.data(), epoll::EventFlags::IN)?;
                    self.listener = Some(fd);
                }
                _ => {}
            }
        }
        // The executor is on its way, and waits for this before it starts the program.
        let checked = receipt::check_outside(self.plan, &self.outer, &self.cgroup).and_then(|outside| {
            // The gate has had the time of the steps since the pivot to confine itself.
            self.gate.as_ref().map_or(Ok(()), Gate::confirm).map_err(|error| egress::failed(&error))?;
            Ok(outside)
        });
        match checked {
            Ok(outside) => {
                self.outside = Some(outside);
                // The last moment at which no instruction of the program can have run.
                self.cpu_before = self.cgroup.cpu().unwrap_or_default();
                match rustix::io::write(&self.lifeline, b"g") {
                    Ok(_) => self.released = true,
                    // It is gone, and will have said why.
                    Err(Errno::PIPE) => {}
                    Err(errno) => return Err(errno),
                }
                Ok(())
            }
            Err(failure) => {
                self.break_off(failure);
                Ok(())
            }
        }
    }

    /// The inner terminal takes the place of the pipes.
    fn use_terminal(&mut self, master: OwnedFd) -> Result<(), Errno> {
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
        self.feed = Some(Feed::new(input, Source::Stdin { pollable: false }, true)?);
        self.master = Some(master);
        Ok(())
    }

    fn serve_listener(&mut self) -> Result<(), Errno> {
        let Some(listener) = &self.listener else { return Ok(()) };
        loop {
            if !is_readable(listener)? {
                return Ok(());
            }
            // A dead sandbox makes it readable for ever, with nothing to receive.
            match self.denials.serve(listener) {
                Next::On if is_hung_up(listener) => return epoll::delete(&self.epoll, listener),
                Next::On => {}
                Next::Kill => {
                    self.end(Cause::SystemCall);
                    return Ok(());
                }
                Next::Rest => {
                    epoll::modify(&self.epoll, listener, Token::Listener.data(), epoll::EventFlags::empty())?;
                    self.listener_rests_until = Some(Instant::now() + Duration::from_millis(20));
                    return Ok(());
                }
            }
        }
    }

    fn serve_signals(&mut self) -> Result<(), Errno> {
        while let Some(signal) = self.signals.take() {
            if signal == NixSignal::SIGWINCH as i32 {
                if let Some(master) = &self.master {
                    terminal::copy_size(master);
                }
            } else if self.streams == Streams::Capture || self.phase == Phase::SettingUp {
                self.end(Cause::Cancelled(signal));
            } else {
                self.forward(signal);
                let Streams::Relay(relay) = self.streams else { continue };
                if relay.ends_on_sigterm && signal == NixSignal::SIGTERM as i32 {
                    self.ends_at.get_or_insert((Instant::now() + GRACE, signal));
                }
            }
        }
        Ok(())
    }

    fn serve_client(&mut self) -> Result<(), Errno> {
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

fn is_hung_up(fd: &OwnedFd) -> bool {
    let mut fds = [rustix::event::PollFd::new(fd, rustix::event::PollFlags::IN)];
    let polled = rustix::event::poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    polled.is_ok() && fds.iter().any(|fd| fd.revents().contains(rustix::event::PollFlags::HUP))
}
