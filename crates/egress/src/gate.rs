//! The gate's process: started by the launcher, confined by itself, ended by a closed pipe.
//!
//! [`Gate::start`] forks; the child confines itself and serves. The launcher learns by
//! [`Gate::confirm`] that it is confined, watches [`Gate::watch`] for its death, and gets
//! the record of the run from [`Gate::finish`]. The gate is ended with the launcher.

use std::time::{Duration, Instant};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fd::{AsFd, BorrowedFd, OwnedFd},
    io::{Errno, read, write},
    pipe::{PipeFlags, pipe_with},
    process::{Signal, WaitId, WaitIdOptions, getpid, pidfd_send_signal, waitid},
};
use stockade_policy::egress::Whitelist;
use stockade_protocol::EgressReport;
use stockade_sys::clone;

use crate::{
    confine::{self, NotConfined, RunAs},
    decide::Decider,
    poll::Poll,
    resolve::Resolver,
    route::Routes,
    serve::Service,
    setup::Channels,
};

/// What a gate is to do.
pub struct Request {
    /// What may leave.
    pub whitelist: Whitelist,
    /// How this host finds addresses.
    pub resolver: Resolver,
    /// Whom it runs as.
    pub run_as: RunAs,
}

/// A running gate. Dropping it kills it.
pub struct Gate {
    pid: i32,
    process: OwnedFd,
    stop: Option<OwnedFd>,
    record: OwnedFd,
}

/// Why there is no gate, or none any more.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GateError {
    /// It could not be started.
    #[error("start the egress gate: {0}")]
    Start(Errno),
    /// It could not confine itself, and has ended.
    #[error("the egress gate could not {step}: {errno}")]
    Confine {
        /// What it could not do.
        step: &'static str,
        /// Why.
        errno: Errno,
    },
    /// It ended by itself. The sandbox must be ended too.
    #[error("the egress gate ended unexpectedly")]
    Died,
    /// It did not end in time, and was killed.
    #[error("the egress gate did not answer in time")]
    Silent,
    /// What it said is no record.
    #[error("the egress gate's record makes no sense")]
    Record,
}

/// First byte of the record pipe: it serves; or it could not confine itself, and step and
/// errno follow.
const READY: u8 = b'r';
const FAILED: u8 = b'f';
/// How long the gate may take to confine itself, and to end.
const PATIENCE: Duration = Duration::from_secs(5);
/// Longest record: every list full of long names is less.
const LONGEST_RECORD: usize = 4 << 20;

impl Gate {
    /// Forks this process, which must have one thread. `channels` are the gate's alone
    /// afterwards.
    ///
    /// # Errors
    /// The process could not be made.
    pub fn start(channels: Channels, request: Request) -> Result<Self, GateError> {
        let pipe = || pipe_with(PipeFlags::CLOEXEC).map_err(GateError::Start);
        let (stop_read, stop) = pipe()?;
        let (record, record_write) = pipe()?;
        let parent = getpid();
        let child = clone::clone_process(0, || run(channels, request, &stop_read, &record_write, parent)).map_err(GateError::Start)?;
        Ok(Gate { pid: child.pid, process: child.pidfd, stop: Some(stop), record })
    }

    /// Waits until it is confined and serves. To be called before the sandbox runs code.
    ///
    /// # Errors
    /// It could not confine itself.
    pub fn confirm(&self) -> Result<(), GateError> {
        let mut said = [0u8; 6];
        let end = Instant::now() + PATIENCE;
        if !wait_for(self.record.as_fd(), end)? {
            return Err(GateError::Silent);
        }
        // Its word is one byte, or six that were written in one piece.
        match (rustix::io::retry_on_intr(|| read(&self.record, &mut said)).map_err(GateError::Start)?, said) {
            (1.., [READY, ..]) => Ok(()),
            (6, [FAILED, step, errno @ ..]) => Err(GateError::Confine {
                step: confine::STEPS.get(usize::from(step)).copied().unwrap_or("confine itself"),
                errno: Errno::from_raw_os_error(i32::from_ne_bytes(errno).clamp(1, 4095)),
            }),
            _ => Err(GateError::Died),
        }
    }

    /// Its process id, for a receipt of how it is confined.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Readable once the gate has ended, which ends the sandbox.
    pub fn watch(&self) -> BorrowedFd<'_> {
        self.process.as_fd()
    }

    /// Tells it that everything inside is dead, and takes its record. Takes as long as the
    /// gate needs to read what the kernel still holds, mostly less than a millisecond.
    ///
    /// # Errors
    /// It had ended before, or does not end.
    pub fn finish(mut self) -> Result<EgressReport, GateError> {
        drop(self.stop.take());
        let end = Instant::now() + PATIENCE;
        let mut bytes = Vec::new();
        let mut chunk = [0u8; 8192];
        loop {
            if !wait_for(self.record.as_fd(), end)? || bytes.len() > LONGEST_RECORD {
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
        serde_json::from_slice(text).map_err(|_| GateError::Record)
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        // It may have ended: then there is only a zombie to reap.
        let _gone = pidfd_send_signal(&self.process, Signal::KILL);
        let _reaped = waitid(WaitId::PidFd(self.process.as_fd()), WaitIdOptions::EXITED);
    }
}

/// False: the time is up.
fn wait_for(fd: BorrowedFd<'_>, end: Instant) -> Result<bool, GateError> {
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    let left = end.saturating_duration_since(Instant::now());
    let left = Timespec { tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX), tv_nsec: i64::from(left.subsec_nanos()) };
    let ready = rustix::io::retry_on_intr(|| poll(&mut fds, Some(&left))).map_err(GateError::Start)?;
    Ok(ready > 0)
}

/// The child: confines itself, serves until told to stop, and writes the record.
fn run(channels: Channels, request: Request, stop: &OwnedFd, record: &OwnedFd, parent: rustix::process::Pid) -> i32 {
    let opened = || -> Result<_, Errno> { Ok((Poll::new()?, Routes::open()?)) };
    let confined = opened().map_err(|errno| NotConfined { step: 0, errno }).and_then(|(poll, routes)| {
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
        confine::confine(&kept, Some(parent), request.run_as)?;
        Ok((poll, routes))
    });
    let (poll, routes) = match confined {
        Ok(opened) => opened,
        Err(NotConfined { step, errno }) => {
            let [a, b, c, d] = errno.raw_os_error().to_ne_bytes();
            let _unheard = write(record, &[FAILED, step, a, b, c, d]);
            return 125;
        }
    };
    let decider = Decider::new(request.whitelist, Vec::new());
    let Ok(service) = Service::new(channels, poll, routes, decider, request.resolver, stop) else { return 125 };
    if write(record, &[READY]) != Ok(1) {
        return 125;
    }
    let Ok(report) = service.run() else { return 125 };
    let Ok(text) = serde_json::to_vec(&report) else { return 125 };
    let mut rest = text.as_slice();
    while !rest.is_empty() {
        match rustix::io::retry_on_intr(|| write(record, rest)) {
            Ok(count) => rest = rest.get(count..).unwrap_or_default(),
            Err(_) => return 125,
        }
    }
    0
}
