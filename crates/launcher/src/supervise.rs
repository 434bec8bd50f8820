//! Watching one run from the clone to the last byte.
//!
//! One loop over pidfd, pipes, the filter's listener, the cgroup's oom event, signals
//! and deadlines. The launcher tells the executor nothing but by descriptors, believes
//! nothing but its status pipe, and ends a run by killing pid 1, upon which the kernel
//! kills everything inside.

mod caller;
mod deadlines;
mod executor;
mod finish;

use std::{
    mem::MaybeUninit,
    time::{Duration, Instant},
};

use nix::sys::signal::Signal as NixSignal;
use rustix::{
    event::{Timespec, epoll},
    fd::{AsFd, OwnedFd},
    fs::Mode,
    io::Errno,
    thread::CpuSet,
};
use stockade_egress::gate::{Gate, GateError};
use stockade_policy::plan::Plan;
use stockade_protocol::{LimitKey, Receipt};

use crate::{
    Client, Inputs, LaunchError, Outcome, Stdin, Streams, What,
    capture::Capture,
    cgroup::{Cgroup, CpuTime},
    egress,
    identity::OuterNamespaces,
    inside,
    modules::Heard,
    notify::{Denials, Next},
    own::OwnStream,
    prepared::LauncherPipes,
    receipt::{Expected, Outside, Standing},
    registry::Record,
    relay::{Feed, FeedTokens, Outlet, Source, Turn, is_readable},
    remains::Remains,
    sandbox::Sandbox,
    scratch::{self, TreeUse},
    signals::Signals,
    terminal::RawTerminal,
    text::Text,
    verdict::Cause,
};

pub(crate) use deadlines::overdue;
pub(crate) use executor::failure_of_child;

/// Setting up takes milliseconds; large files take longer.
pub(crate) const SETUP_DEADLINE: Duration = Duration::from_secs(60);
/// So does what is left to do of a sandbox that stood ready; one that has not done it gives
/// way to another.
pub(crate) const JOB_DEADLINE: Duration = Duration::from_secs(10);
/// Bytes kept of relayed errors; hints are read off the last half.
const KEPT_OF_ERRORS: u64 = 32 << 10;
/// A program that prints this many times the limit is ended.
const OUTPUT_FACTOR: u64 = 64;

/// How long is looked at what is to be killed.
const LONGEST_LOOK: Duration = Duration::from_millis(5);

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
    record: Option<Record>,
    /// Whether the program's file is out of the scratch.
    program_gone: bool,
    outer: OuterNamespaces,
    gate: Option<Gate>,
    lifeline: OwnedFd,
    roams: Option<CpuSet>,
    patience: Duration,
    signals: Signals,
    client: Option<&'a mut dyn Client>,
    streams: Streams,
    status_read: OwnedFd,
    status: Vec<u8>,
    stdout: Option<OwnedFd>,
    stderr: Option<OwnedFd>,
    out: Outlet,
    err: Outlet,
    /// Nobody inside can print any more.
    has_closed: bool,
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
    /// What its owner might do with it before the run.
    scratch_rights: Mode,
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
    /// What the sandbox will be compared with.
    expected: Expected,
    standing: Option<Standing>,
    outside: Option<Outside>,
    receipt: Option<Receipt>,
    wait_status: Option<i32>,
    rusage_us: Option<(u64, u64)>,
    /// What all of the code's processes have used, once the executor has said that none is left.
    used_by_all: Option<(u64, u64)>,
    /// What those had used that were alive when they were killed.
    used_by_killed: Option<(u64, u64)>,
    buffer: Box<[MaybeUninit<u8>]>,
}

const COUNT: &str = "count what is in scratch";

fn failed(attempt: &'static str) -> impl Fn(Errno) -> LaunchError {
    move |errno| LaunchError::system(What::Prepare, attempt, errno)
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
    /// CPUs between which the executor may move until it is told to go.
    pub(crate) roams: Option<CpuSet>,
    /// How long it may take from here to be ready for the program.
    pub(crate) patience: Duration,
    pub(crate) signals: Signals,
}

/// Watches the run to its end. What then still stands of it goes when it is dropped.
///
/// # Errors
/// The program was not started.
pub(crate) fn supervise(
    plan: &Plan,
    inputs: Inputs<'_>,
    begun: Begun,
    pipes: LauncherPipes,
    tmp: Option<OwnedFd>,
) -> Result<(Outcome, Remains), LaunchError> {
    // In this order for the same reason as in `set_up`.
    let Begun { signals, patience, roams, handover, status_read, lifeline, gate, outer, cgroup, sandbox } = begun;
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed("make the event loop"))?;
    let outlet = |stream, has_errors: bool| match inputs.streams {
        Streams::Capture => Outlet::Capture(Capture::new(plan.limits.get(LimitKey::OutputSize))),
        Streams::Relay(relay) => {
            let kept = (relay.keep_errors && has_errors).then(|| Capture::new(Some(KEPT_OF_ERRORS)));
            let text = (relay.as_text && !plan.terminal).then(Text::default);
            Outlet::relay(stream, kept, text)
        }
    };
    let scratch_rights = inputs.scratch.as_ref().map_or(Mode::empty(), |opened| opened.rights);
    let (scratch_directory, scratch_before) = inputs.scratch.map(|opened| (opened.directory, opened.before)).unzip();
    let scratch_free = scratch_directory.as_ref().map_or(Ok(0), scratch::free_bytes).map_err(failed(COUNT))?;
    let feed = match (pipes.stdin, inputs.stdin) {
        (Some(pipe), Stdin::Bytes(all)) => Some(Feed::new(pipe, Source::Bytes { all, passed: 0 }, false)),
        (Some(pipe), Stdin::Relay) if !plan.terminal => Some(Feed::new(pipe, Source::stdin(), false)),
        _ => None,
    };
    let mut supervision = Supervision {
        plan,
        epoll,
        sandbox,
        cgroup,
        record: inputs.record,
        program_gone: true,
        outer,
        gate,
        lifeline,
        roams,
        patience,
        signals,
        client: inputs.client.map(|client| client as _),
        streams: inputs.streams,
        status_read,
        status: Vec::new(),
        stdout: Some(pipes.stdout),
        stderr: Some(pipes.stderr),
        // A terminal carries both.
        out: outlet(OwnStream::stdout(), plan.terminal),
        err: outlet(OwnStream::stderr(), !plan.terminal),
        has_closed: false,
        feed: feed.transpose().map_err(failed("feed stdin"))?,
        handover,
        listener: None,
        listener_rests_until: None,
        master: None,
        raw: None,
        // The run's own root has nothing that the code could write.
        root_fs: tmp,
        scratch_fs: None,
        scratch_directory,
        scratch_before: scratch_before.unwrap_or_default(),
        scratch_rights,
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
        expected: Expected::of(plan)?,
        standing: None,
        outside: None,
        receipt: None,
        wait_status: None,
        rusage_us: None,
        used_by_all: None,
        used_by_killed: None,
        buffer: Box::new_uninit_slice(1 << 16),
    };
    supervision.register().map_err(failed("fill the event loop"))?;
    // One that has stood ready waits for us alone.
    if let Err(errno) = supervision.hear_child() {
        supervision.break_off(failed("serve the sandbox")(errno));
    }
    if let Some(work) = inputs.meanwhile {
        work();
    }
    if let Err(failure) = supervision.watch() {
        supervision.break_off(failure);
    }
    let program = plan.program_file.as_ref().map(|(_, name)| name.as_str());
    supervision.finish(program, &inputs.collect)
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

    /// The loop: until no process of the code is left.
    fn watch(&mut self) -> Result<(), LaunchError> {
        let mut events = Vec::with_capacity(16);
        loop {
            // Once: code that goes on without them could have us look all the time.
            let has_just_closed = self.stdout.is_none() && self.stderr.is_none() && !std::mem::replace(&mut self.has_closed, true);
            if has_just_closed || matches!(self.phase, Phase::SettingUp | Phase::Ended) {
                // What comes next comes soon, if nothing is the matter.
                let is_next = || is_readable(&self.epoll).ok().filter(|readable| *readable);
                let _or_later = stockade_sys::process::soon(is_next);
            }
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
            if over || self.all_have_ended() {
                return Ok(());
            }
            self.check_deadlines();
        }
    }

    /// Whether every process of the code has ended, and what each has written is there to be
    /// read. Pid 1 may be on its way out still. What was written to a terminal may be as well,
    /// as long as somebody inside has it open.
    fn all_have_ended(&self) -> bool {
        self.sandbox.is_over() || (self.used_by_all.is_some() && !self.plan.terminal)
    }

    fn serve(&mut self, token: Token) -> Result<(), Errno> {
        match token {
            Token::Status => self.read_status(),
            Token::Stdout | Token::StdoutTarget => self.move_output(Token::Stdout),
            Token::Stderr | Token::StderrTarget => self.move_output(Token::Stderr),
            Token::FeedSource => self.serve_source(),
            Token::FeedTarget => self.feed.as_mut().map_or(Ok(()), |feed| feed.on_room(&self.epoll, &FEED)),
            Token::HandOver => self.hear_child(),
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
        self.note_cpu_of_living();
        self.cgroup.kill();
        self.sandbox.kill();
    }

    /// Where no cgroup keeps it: what is about to be killed has used.
    fn note_cpu_of_living(&mut self) {
        if self.used_by_killed.is_none() && self.started_at.is_some() && self.cgroup.cpu().is_none() {
            let until = Instant::now() + LONGEST_LOOK;
            self.used_by_killed = Some(inside::cpu_of_living(self.sandbox.pid(), &mut || Instant::now() < until));
        }
    }

    fn break_off(&mut self, failure: LaunchError) {
        self.failure.get_or_insert(failure);
        self.cgroup.kill();
        self.sandbox.kill();
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
}

fn is_hung_up(fd: &OwnedFd) -> bool {
    let mut fds = [rustix::event::PollFd::new(fd, rustix::event::PollFlags::IN)];
    let polled = rustix::event::poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    polled.is_ok() && fds.iter().any(|fd| fd.revents().contains(rustix::event::PollFlags::HUP))
}
