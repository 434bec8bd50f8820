//! Watching one run from its job to the last byte of its output.
//!
//! One loop over pidfd, pipes, the filter's listener, the cgroup's oom event, signals
//! and deadlines. The launcher tells the executor nothing but by descriptors, believes
//! nothing but its status pipe, and ends a run by killing pid 1: the kernel then kills
//! everything inside. What is verified before the program starts is decided in `receipt.rs`,
//! which verdict the end means in `verdict.rs`.

mod caller;
mod closed_sockets;
mod descriptors;
mod finish;
mod handshake;
mod kernel_memory;
mod locks;
mod memory;
mod quota;
mod sampler;
mod sockets;
mod state;
mod streams;

use std::{
    mem,
    time::{Duration, Instant},
};

use nix::sys::signal::Signal as NixSignal;
use rustix::{
    event::{PollFd, PollFlags, Timespec, epoll, poll},
    fd::{AsFd, BorrowedFd, OwnedFd},
    io::Errno,
    thread::CpuSet,
};
use stockade_egress::gate::{Gate, GateError};
use stockade_policy::plan::Plan;
use stockade_protocol::{LimitKey, OutputStream};

use crate::{
    Client, ErrorKind, Inputs, LaunchError, Outcome,
    cgroup::Cgroup,
    child_data::LauncherPipes,
    identity::OuterNamespaces,
    modules::HookEvents,
    notify::{Denials, Served},
    processes,
    receipt::ExpectedSandbox,
    registry,
    relay::{PumpTokens, is_readable},
    sandbox::Sandbox,
    signals::Signals,
    teardown::Teardown,
    verdict::Cause,
};
use handshake::Handshake;
use quota::Quota;
use state::{Setup, State};
use streams::PayloadStreams;

pub(crate) use handshake::failure_of_child;
pub(crate) use memory::MEMORY_INTERVAL_MS;

/// How long setting up may take: it takes milliseconds, more with large files.
pub(crate) const SETUP_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a prepared sandbox may take for the rest; a slower one is replaced by another.
pub(crate) const JOB_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the processes that are about to be killed are looked at.
const MAX_LOOK: Duration = Duration::from_millis(5);
/// How long the listener rests after one round of answers.
const LISTENER_REST: Duration = Duration::from_millis(20);

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
    StdinSource,
    StdinTarget,
    HandOver,
    Listener,
    Signals,
    Oom,
    Gate,
    Client,
    ClientGone,
    CallerGone,
    Modules,
}

impl Token {
    const ALL: [Token; 17] = [
        Token::Pid,
        Token::Status,
        Token::Stdout,
        Token::Stderr,
        Token::StdoutTarget,
        Token::StderrTarget,
        Token::StdinSource,
        Token::StdinTarget,
        Token::HandOver,
        Token::Listener,
        Token::Signals,
        Token::Oom,
        Token::Gate,
        Token::Client,
        Token::ClientGone,
        Token::CallerGone,
        Token::Modules,
    ];

    fn data(self) -> epoll::EventData {
        epoll::EventData::new_u64(self as u64)
    }

    fn from_data(data: epoll::EventData) -> Option<Token> {
        usize::try_from(data.u64()).ok().and_then(|index| Token::ALL.get(index)).copied()
    }
}

const PUMP: PumpTokens = PumpTokens {
    source: epoll::EventData::new_u64(Token::StdinSource as u64),
    target: epoll::EventData::new_u64(Token::StdinTarget as u64),
};

/// One run, as the launcher watches it.
struct Supervision<'a> {
    plan: &'a Plan,
    state: State,
    epoll: OwnedFd,
    handshake: Handshake,
    streams: PayloadStreams<'a>,
    /// The file of the memory image of which the program's process is a copy.
    memory_file: Option<OwnedFd>,
    quota: Quota,
    outer: OuterNamespaces,
    gate: Option<Gate>,
    client: Option<&'a mut dyn Client>,
    /// The client waits until it can be written to.
    client_wants_room: bool,
    callers: &'a [OwnedFd],
    /// None before the filter is loaded, and where another supervisor holds its listener.
    listener: Option<Listener>,
    /// None where the plan watches no modules.
    hooks: Option<HookEvents>,
    /// What of the program's file in scratch is the run's to remove.
    program: ProgramFile,
    /// Why the launcher has ended the run; the first cause stays.
    cause: Option<Cause>,
    /// What failed; the first failure stays.
    failure: Option<LaunchError>,
    /// What is to be done while the program runs.
    beside: Option<Box<dyn FnOnce() + 'a>>,
    /// A signal that ends programs was passed on.
    asked_to_end: bool,
    /// Without a cgroup: CPU time of the processes that were alive when they were killed.
    cpu_us_of_killed: Option<(u64, u64)>,
    // Last: a signal that was held back may end this process.
    teardown: Teardown,
}

/// What of the program's file in a scratch is the run's to remove.
enum ProgramFile {
    /// What stands under a random name, which nothing else has.
    Random,
    /// Nothing: the request has named it, and pid 1 has not made it.
    Unwritten,
    /// The file that pid 1 made under the request's name. While it is held, no other file gets
    /// its inode number.
    Written(OwnedFd),
}

impl ProgramFile {
    /// Whether what stands at a name is to be removed.
    ///
    /// # Errors
    /// What fstat(2) answers.
    fn is_at(&self, scratch: &OwnedFd, name: &str) -> Result<bool, Errno> {
        let written = match self {
            ProgramFile::Random => return Ok(true),
            ProgramFile::Unwritten => return Ok(false),
            ProgramFile::Written(file) => rustix::fs::fstat(file)?,
        };
        match rustix::fs::statat(scratch, name, rustix::fs::AtFlags::SYMLINK_NOFOLLOW) {
            Ok(there) => Ok((there.st_dev, there.st_ino) == (written.st_dev, written.st_ino)),
            Err(Errno::NOENT) => Ok(false),
            Err(errno) => Err(errno),
        }
    }
}

/// The filter's listener.
struct Listener {
    fd: OwnedFd,
    denials: Denials,
    rests_until: Option<Instant>,
}

fn failed(attempt: &'static str) -> impl Fn(Errno) -> LaunchError {
    LaunchError::system(ErrorKind::Prepare, attempt)
}

/// The program's output can be passed on no longer.
fn unwritten(errno: Errno) -> LaunchError {
    LaunchError::system(ErrorKind::Output, "pass the program's output on")(errno)
}

/// What the launcher holds of a sandbox that is set up and has not yet shown its evidence.
pub(crate) struct SandboxHandles {
    pub(crate) sandbox: Sandbox,
    pub(crate) cgroup: Cgroup,
    pub(crate) outer: OuterNamespaces,
    pub(crate) gate: Option<Gate>,
    pub(crate) lifeline: OwnedFd,
    pub(crate) status_read: OwnedFd,
    pub(crate) handover: OwnedFd,
    /// CPUs among which the executor may move until it is told to go.
    pub(crate) usable_cpus: Option<CpuSet>,
    /// How long it may take from here to be ready for the program.
    pub(crate) timeout: Duration,
    pub(crate) signals: Signals,
}

/// Watches the run to its end. Dropping the [`Teardown`] removes what the run still has on the
/// host.
///
/// # Errors
/// The program was not started.
pub(crate) fn supervise(
    plan: &Plan,
    mut inputs: Inputs<'_>,
    mut handles: SandboxHandles,
    pipes: LauncherPipes,
    tmp: Option<OwnedFd>,
) -> Result<(Outcome, Teardown), LaunchError> {
    handles.signals.serve_run(inputs.cancel_word);
    let meanwhile = inputs.meanwhile.take();
    let collect = std::mem::take(&mut inputs.collect);
    let mut supervision = Supervision::new(plan, inputs, handles, pipes, tmp)?;
    supervision.register().map_err(failed("fill the event loop"))?;
    // A prepared sandbox waits for the launcher alone.
    if let Err(errno) = supervision.read_handover() {
        supervision.break_off(failed("serve the sandbox")(errno));
    }
    if let Some(work) = meanwhile {
        work();
    }
    if let Err(failure) = supervision.watch() {
        supervision.break_off(failure);
    }
    supervision.finish(&collect)
}

impl<'a> Supervision<'a> {
    fn new<'i: 'a>(
        plan: &'a Plan,
        inputs: Inputs<'i>,
        handles: SandboxHandles,
        mut pipes: LauncherPipes,
        tmp: Option<OwnedFd>,
    ) -> Result<Supervision<'a>, LaunchError> {
        let SandboxHandles { signals, timeout, usable_cpus, handover, status_read, lifeline, gate, outer, cgroup, sandbox } = handles;
        let program_gone = plan.program_file.is_none();
        let is_random = plan.program_file.as_ref().is_some_and(|(_, name)| name.starts_with(registry::PROGRAM_PREFIX));
        let program = if is_random { ProgramFile::Random } else { ProgramFile::Unwritten };
        let teardown = Teardown {
            sandbox,
            cgroup,
            _held: inputs.held,
            _mount_points: inputs.mount_points,
            record: inputs.record,
            program_gone,
            signals,
        };
        Ok(Supervision {
            plan,
            state: State::Setup(Setup { since: Instant::now(), timeout, usable_cpus, expected: ExpectedSandbox::of(plan)?, mounts: None }),
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed("make the event loop"))?,
            handshake: Handshake { status_read, status: Vec::new(), handover, lifeline },
            memory_file: pipes.memory_file.take(),
            streams: PayloadStreams::new(plan, inputs.streams, pipes, inputs.stdin).map_err(failed("feed stdin"))?,
            quota: Quota::new(plan, inputs.scratch, inputs.writable_trees, tmp).map_err(failed(quota::COUNT))?,
            outer,
            gate,
            client: inputs.client.map(|client| client as _),
            client_wants_room: false,
            callers: inputs.callers,
            listener: None,
            hooks: None,
            program,
            cause: None,
            failure: None,
            beside: inputs.beside,
            asked_to_end: false,
            cpu_us_of_killed: None,
            teardown,
        })
    }

    fn register(&mut self) -> Result<(), Errno> {
        let add = |fd: BorrowedFd<'_>, token: Token| epoll::add(&self.epoll, fd, token.data(), epoll::EventFlags::IN);
        add(self.teardown.sandbox.child.pidfd.as_fd(), Token::Pid)?;
        add(self.handshake.status_read.as_fd(), Token::Status)?;
        add(self.handshake.handover.as_fd(), Token::HandOver)?;
        add(self.teardown.signals.as_fd(), Token::Signals)?;
        self.streams.register(&self.epoll)?;
        if let Some(gate) = &self.gate {
            add(gate.watch(), Token::Gate)?;
        }
        for caller in self.callers {
            add(caller.as_fd(), Token::CallerGone)?;
        }
        if let Some(client) = &self.client {
            // The kernel reports a hang-up whether it is asked for or not.
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
        self.teardown.cgroup.watch_oom(&self.epoll, Token::Oom.data())
    }

    /// The loop: until no process of the code is left.
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
            // The child hands its descriptors over before the executor speaks, but one wait may
            // bring both, in any order.
            events.sort_by_key(|event| Token::from_data(event.data) != Some(Token::HandOver));
            let mut over = false;
            for event in &events {
                match Token::from_data(event.data) {
                    Some(Token::Pid) => over = true,
                    Some(token) => self.serve(token)?,
                    None => {}
                }
            }
            if over || self.all_have_ended() {
                return Ok(());
            }
            if let Some(work) = self.beside.take_if(|_| self.state.is_released() && self.state.end().is_none()) {
                work();
            }
            self.check_deadlines();
            if self.teardown.signals.has_kept() {
                self.serve_signals().map_err(failed("serve the sandbox"))?;
            }
        }
    }

    /// Whether every process of the code has ended and all that they have written can be read.
    /// Pid 1 may still be ending. Output to a terminal may still be on its way as long as a
    /// process inside has the terminal open.
    fn all_have_ended(&self) -> bool {
        let none_is_left = self.state.end().is_some_and(|end| end.cpu_us_of_all.is_some());
        self.teardown.sandbox.is_over() || (none_is_left && !self.plan.terminal)
    }

    fn serve(&mut self, token: Token) -> Result<(), LaunchError> {
        match token {
            Token::Stdout | Token::StdoutTarget => self.read_output(OutputStream::Stdout)?,
            Token::Stderr | Token::StderrTarget => self.read_output(OutputStream::Stderr)?,
            other => return self.serve_other(other).map_err(failed("serve the sandbox")),
        }
        self.check_output();
        Ok(())
    }

    fn read_output(&mut self, stream: OutputStream) -> Result<(), LaunchError> {
        self.streams.forward(stream, &self.epoll, &mut self.client).map_err(unwritten)?;
        self.watch_for_room().map_err(failed("serve the sandbox"))
    }

    /// Serves what is no output of the program.
    fn serve_other(&mut self, token: Token) -> Result<(), Errno> {
        match token {
            Token::Pid | Token::Stdout | Token::StdoutTarget | Token::Stderr | Token::StderrTarget => Ok(()),
            Token::Status => self.read_status(),
            Token::HandOver => self.read_handover(),
            Token::StdinSource => self.serve_source(),
            Token::StdinTarget => self.streams.stdin.as_mut().map_or(Ok(()), |stdin| stdin.on_room(&self.epoll, &PUMP)),
            Token::Listener => self.serve_listener(),
            Token::Signals => self.serve_signals(),
            Token::Oom => {
                self.teardown.cgroup.acknowledge_oom();
                self.check_oom();
                Ok(())
            }
            Token::Gate => self.serve_gate(),
            Token::Client => self.serve_client(),
            Token::ClientGone => {
                let gone = self.client.as_ref().and_then(|client| client.results());
                gone.map_or(Ok(()), |fd| epoll::delete(&self.epoll, fd))?;
                self.end(Cause::Cancelled(NixSignal::SIGHUP as i32));
                Ok(())
            }
            Token::CallerGone => {
                let callers = mem::take(&mut self.callers);
                if !callers.is_empty() {
                    self.hang_up();
                }
                callers.iter().try_for_each(|caller| epoll::delete(&self.epoll, caller))
            }
            Token::Modules => {
                let Some(hooks) = &mut self.hooks else { return Ok(()) };
                if hooks.read(&mut self.streams.buffer)? { Ok(()) } else { epoll::delete(&self.epoll, hooks.pipe()) }
            }
        }
    }

    /// Whether the launcher has killed it. The kernel may take seconds to free what it held.
    fn is_ending(&self) -> bool {
        self.cause.is_some() || self.failure.is_some()
    }

    /// Ends the run; the first cause stays.
    fn end(&mut self, cause: Cause) {
        self.cause.get_or_insert(cause);
        self.kill();
    }

    fn break_off(&mut self, failure: LaunchError) {
        self.failure.get_or_insert(failure);
        self.teardown.kill();
    }

    /// Kills everything inside. Without a cgroup nothing else tells what the processes have used.
    fn kill(&mut self) {
        if self.cpu_us_of_killed.is_none() && self.state.started_at().is_some() && self.teardown.cgroup.cpu().is_none() {
            let until = Instant::now() + MAX_LOOK;
            self.cpu_us_of_killed = Some(processes::cpu_of_living(self.teardown.sandbox.pid(), &mut || Instant::now() < until));
        }
        self.teardown.kill();
    }

    fn check_output(&mut self) {
        if self.streams.is_flooded(self.plan.limits.get(LimitKey::OutputSize)) {
            self.end(Cause::Output);
        }
    }

    /// The gate ends only when the launcher tells it to, which it has not done; or it could not
    /// begin, which it has reported.
    fn serve_gate(&mut self) -> Result<(), Errno> {
        let Some(gate) = &self.gate else { return Ok(()) };
        epoll::delete(&self.epoll, gate.watch())?;
        let error = gate.confirm().err().unwrap_or(GateError::Died);
        self.break_off(error.into());
        Ok(())
    }

    fn serve_listener(&mut self) -> Result<(), Errno> {
        let Some(Listener { fd, denials, rests_until }) = &mut self.listener else { return Ok(()) };
        while is_readable(&*fd)? {
            // A dead sandbox makes it readable for ever, with nothing to receive.
            match denials.serve(fd) {
                Served::On if is_hung_up(fd) => return epoll::delete(&self.epoll, fd),
                Served::On => {}
                Served::Kill => {
                    self.end(Cause::SystemCall);
                    return Ok(());
                }
                Served::Rest => {
                    epoll::modify(&self.epoll, fd, Token::Listener.data(), epoll::EventFlags::empty())?;
                    *rests_until = Some(Instant::now() + LISTENER_REST);
                    return Ok(());
                }
            }
        }
        Ok(())
    }
}

fn is_hung_up(fd: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(fd, PollFlags::IN)];
    let polled = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    polled.is_ok() && fds.iter().any(|fd| fd.revents().contains(PollFlags::HUP))
}
