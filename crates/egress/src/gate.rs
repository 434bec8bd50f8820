//! The gate's process: the launcher forks it, it locks itself down, a closed pipe ends it.
//!
//! [`Gate::start`] forks. [`Gate::confirm`] waits until the gate is confined, [`Gate::watch`] is
//! readable when it has died, and [`Gate::finish`] returns the record of the run. The gate is
//! killed with the launcher.

use std::time::{Duration, Instant};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fd::{AsFd, BorrowedFd, OwnedFd},
    io::{Errno, read, write},
    pipe::{PipeFlags, pipe_with},
    process::{Signal, WaitId, WaitIdOptions, getpid, pidfd_send_signal, waitid},
};
use stockade_policy::{alert::Alert, whitelist::Whitelist};
use stockade_protocol::EgressReport;
use stockade_sys::{
    clone,
    lockdown::{LockdownError, LockdownStep},
};

use crate::{
    confine::{RunAs, confine},
    decide::Decider,
    poll::Poll,
    resolve::Resolver,
    route::Routes,
    serve::GateService,
    setup::Channels,
};

/// What a gate needs to know.
pub struct GateRequest {
    /// The peers that may be reached.
    pub whitelist: Whitelist,
    /// How this host finds addresses.
    pub resolver: Resolver,
    /// The policy's alerts for refused peers.
    pub alerts: Vec<Alert>,
    /// The user that it runs as.
    pub run_as: RunAs,
}

/// A running gate. Dropping it kills it.
pub struct Gate {
    pid: i32,
    process: OwnedFd,
    stop: Option<OwnedFd>,
    record: OwnedFd,
}

/// Why there is no gate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GateError {
    /// It could not be started.
    #[error("start the egress gate: {0}")]
    Start(Errno),
    /// It could not lock itself down, and has exited.
    #[error("the egress gate could not {step}: {errno}")]
    Confine {
        /// The step.
        step: &'static str,
        /// What the kernel answered.
        errno: Errno,
    },
    /// It ended unexpectedly. The sandbox must end too.
    #[error("the egress gate ended unexpectedly")]
    Died,
    /// It did not answer in time, and was killed.
    #[error("the egress gate did not answer in time")]
    Silent,
    /// It sent something else than a record.
    #[error("the egress gate sent a malformed record; this is a bug in stockade")]
    Record,
}

/// First byte on the record pipe: the gate serves, or its lockdown failed and the step and
/// errno follow.
const READY: u8 = b'r';
const FAILED: u8 = b'f';
/// The time limit for its lockdown, and for its end.
const GATE_TIMEOUT: Duration = Duration::from_secs(5);
/// The longest record. Full lists of the longest names are shorter.
const MAX_RECORD_LEN: usize = 4 << 20;

impl Gate {
    /// Forks this process, which must have one thread. The gate takes over `channels`.
    ///
    /// # Errors
    /// The process could not be made.
    pub fn start(channels: Channels, request: GateRequest) -> Result<Self, GateError> {
        let pipe = || pipe_with(PipeFlags::CLOEXEC).map_err(GateError::Start);
        let (stop_read, stop) = pipe()?;
        let (record, record_write) = pipe()?;
        let parent = getpid();
        let child = clone::clone_process(0, || run(channels, request, &stop_read, &record_write, parent)).map_err(GateError::Start)?;
        Ok(Gate { pid: child.pid, process: child.pidfd, stop: Some(stop), record })
    }

    /// Waits until it is confined and serves. Must return before the sandbox runs code.
    ///
    /// # Errors
    /// It could not lock itself down.
    pub fn confirm(&self) -> Result<(), GateError> {
        let mut said = [0u8; 6];
        let end = Instant::now() + GATE_TIMEOUT;
        if !wait_for(self.record.as_fd(), end)? {
            return Err(GateError::Silent);
        }
        // One byte, or six bytes from one write.
        match (rustix::io::retry_on_intr(|| read(&self.record, &mut said)).map_err(GateError::Start)?, said) {
            (1.., [READY, ..]) => Ok(()),
            (6, [FAILED, step, errno @ ..]) => Err(GateError::Confine {
                step: LockdownStep::ALL.get(usize::from(step)).map_or("confine itself", |step| step.name()),
                errno: Errno::from_raw_os_error(i32::from_ne_bytes(errno).clamp(1, 4095)),
            }),
            _ => Err(GateError::Died),
        }
    }

    /// Its process id, for the receipt.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Readable once the gate has ended, which ends the sandbox.
    pub fn watch(&self) -> BorrowedFd<'_> {
        self.process.as_fd()
    }

    /// Tells the gate that every process of the sandbox is dead, and takes its record. The
    /// gate first reads what the kernel still holds, usually in less than 1 ms.
    ///
    /// # Errors
    /// It has ended before, or does not end in time.
    pub fn finish(mut self) -> Result<EgressReport, GateError> {
        drop(self.stop.take());
        let end = Instant::now() + GATE_TIMEOUT;
        let mut bytes = Vec::new();
        let mut chunk = [0u8; 8192];
        loop {
            if !wait_for(self.record.as_fd(), end)? || bytes.len() > MAX_RECORD_LEN {
                return Err(GateError::Silent);
            }
            match rustix::io::retry_on_intr(|| read(&self.record, &mut chunk)).map_err(GateError::Start)? {
                0 => break,
                count => bytes.extend_from_slice(chunk.get(..count).unwrap_or_default()),
            }
        }
        let text = bytes.strip_prefix(&[READY]).unwrap_or(&bytes);
        if text.is_empty() {
            return Err(GateError::Died);
        }
        let (report, alerts): (EgressReport, Vec<String>) = serde_json::from_slice(text).map_err(|_| GateError::Record)?;
        Ok(EgressReport { alerts, ..report })
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        // It may have exited already, as a zombie.
        let _gone = pidfd_send_signal(&self.process, Signal::KILL);
        let _reaped = waitid(WaitId::PidFd(self.process.as_fd()), WaitIdOptions::EXITED);
    }
}

/// False after a timeout.
fn wait_for(fd: BorrowedFd<'_>, end: Instant) -> Result<bool, GateError> {
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    let left = end.saturating_duration_since(Instant::now());
    let left = Timespec { tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX), tv_nsec: i64::from(left.subsec_nanos()) };
    let ready = rustix::io::retry_on_intr(|| poll(&mut fds, Some(&left))).map_err(GateError::Start)?;
    Ok(ready > 0)
}

/// The child: locks itself down, serves until the stop pipe closes, and writes the record.
fn run(channels: Channels, request: GateRequest, stop: &OwnedFd, record: &OwnedFd, parent: rustix::process::Pid) -> i32 {
    let opened = || -> Result<_, Errno> { Ok((Poll::new()?, Routes::open()?)) };
    let confined = opened().map_err(|errno| LockdownError { step: LockdownStep::CloseDescriptors, errno }).and_then(|(poll, routes)| {
        let kept = [
            channels.log.as_fd(),
            channels.listener.as_fd(),
            channels.names.as_fd(),
            channels.raw4.as_fd(),
            channels.raw6.as_fd(),
            poll.as_fd(),
            routes.as_fd(),
            stop.as_fd(),
            record.as_fd(),
        ];
        confine(&kept, Some(parent), request.run_as)?;
        Ok((poll, routes))
    });
    let (poll, routes) = match confined {
        Ok(opened) => opened,
        Err(LockdownError { step, errno }) => {
            let [a, b, c, d] = errno.raw_os_error().to_ne_bytes();
            let _unheard = write(record, &[FAILED, step as u8, a, b, c, d]);
            return 125;
        }
    };
    let decider = Decider::new(request.whitelist, Vec::new());
    let Ok(service) = GateService::new(channels, poll, routes, decider, request.resolver, request.alerts, stop) else { return 125 };
    if write(record, &[READY]) != Ok(1) {
        return 125;
    }
    let Ok(recorded) = service.run() else { return 125 };
    let Ok(text) = serde_json::to_vec(&recorded) else { return 125 };
    let mut rest = text.as_slice();
    while !rest.is_empty() {
        match rustix::io::retry_on_intr(|| write(record, rest)) {
            Ok(count) => rest = rest.get(count..).unwrap_or_default(),
            Err(_) => return 125,
        }
    }
    0
}
