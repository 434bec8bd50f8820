//! Pid 1 of the sandbox: waits for its job, writes the request's files, checks which layers
//! are in force, starts the payload, waits for it, reports to the launcher how it ended and
//! whether other processes are left. An interpreter may be started before the job is known
//! (`prestart.rs`).
//!
//! It runs behind every layer that the launcher put in place, as the payload's uid,
//! and is not dumpable, so that the payload can neither trace nor read it. It takes
//! no input but the sealed job and parses no text of the payload's. It decides
//! nothing: limits, paths and rules arrive ready-made. When it exits or is killed, the kernel
//! kills every process of the sandbox.
#![no_std]
#![forbid(unsafe_code)]
extern crate alloc;

mod evidence;
mod files;
mod payload;
mod prestart;

use alloc::vec::Vec;

use rustix::{
    fd::BorrowedFd,
    io::Errno,
    process::{DumpableBehavior, set_dumpable_behavior},
};
use stockade_protocol::{
    frame::{Event, ExecutorCommand, Job},
    step::Step,
};
use stockade_sys::{
    process::{self, Ended},
    start::descriptor,
};

use prestart::Interpreter;

/// How many orphans are reaped once the payload has ended. The limit is needed because the
/// processes that are left may create orphans faster than this one reaps them.
const MAX_ORPHANS: usize = 64;

/// A failed step, as it is sent over the status pipe.
pub(crate) struct Failure {
    step: Step,
    errno: Errno,
    detail: Vec<u8>,
}

impl Failure {
    pub(crate) fn new(step: Step, errno: Errno) -> Self {
        Failure { step, errno, detail: Vec::new() }
    }

    pub(crate) fn because(mut self, detail: &[u8]) -> Self {
        self.detail.extend_from_slice(detail);
        self
    }
}

/// Runs the executor from start to end. The launcher ignores the exit status that this
/// returns and trusts only the events on the status pipe.
pub fn run() -> i32 {
    let status = descriptor::STATUS;
    match supervise(status) {
        Ok(()) => 0,
        Err(failure) => {
            let Failure { step, errno, detail } = failure;
            let event = Event::Failed { step: step as u16, errno: errno.raw_os_error() as u16, index: u32::MAX, detail };
            i32::from(tell(status, &event).is_err())
        }
    }
}

fn supervise(status: BorrowedFd<'static>) -> Result<(), Failure> {
    // First: from here on the payload's uid may not trace or read this process.
    set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(|errno| Failure::new(Step::ReadJob, errno))?;
    // Nothing above depends on the job, which may become known much later.
    let mut command = await_command().map_err(|errno| Failure::new(Step::ReadJob, errno))?;
    let prestart = match command {
        ExecutorCommand::Prestart { length } => Some(prestart::read(descriptor::JOB, length)),
        _ => None,
    };
    let prestart = prestart.transpose().map_err(|errno| Failure::new(Step::Prestart, errno))?;
    let interpreter = prestart.as_deref().map(Interpreter::start).transpose()?;
    if interpreter.is_some() {
        command = await_command().map_err(|errno| Failure::new(Step::ReadJob, errno))?;
    }
    let ExecutorCommand::Job { offset } = command else {
        return Err(Failure::new(Step::ReadJob, Errno::PROTO));
    };
    let bytes = files::map_job(descriptor::JOB, offset).map_err(|errno| Failure::new(Step::ReadJob, errno))?;
    let job = Job::decode(bytes).map_err(|_| Failure::new(Step::ReadJob, Errno::BADMSG))?;

    if let Some(interpreter) = &interpreter {
        interpreter.stop(&job)?;
    }
    files::write_files(bytes, &job)?;
    files::write_program(bytes, &job)?;

    let evidence = evidence::gather(&job, interpreter.is_some())?;
    tell(status, &Event::Ready(evidence)).map_err(|errno| Failure::new(Step::Receipt, errno))?;

    let ExecutorCommand::Go { ignored_signals } = await_command().map_err(|errno| Failure::new(Step::Receipt, errno))? else {
        return Err(Failure::new(Step::Receipt, Errno::PROTO));
    };
    let pid = match interpreter {
        Some(interpreter) => interpreter.go_on()?,
        None => payload::start(&job.start, ignored_signals)?,
    };
    watch(status, pid, job.start.terminal).map_err(|errno| Failure::new(Step::WatchPayload, errno))
}

/// Reports that the payload has started and, once it has ended, its status and CPU time.
fn watch(status: BorrowedFd<'_>, pid: i32, terminal: bool) -> Result<(), Errno> {
    tell(status, &Event::Started)?;
    if !terminal {
        // The output reaches end of file when the last process of the payload closes it. A
        // terminal would be hung up then, though a process inside may still open it again.
        process::close_range(1, 2)?;
    }
    let (mut user_us, mut system_us) = (0, 0);
    let mut add = |ended: &Ended| {
        user_us += ended.user_us;
        system_us += ended.system_us;
    };
    let payload = loop {
        let ended = process::wait_any()?;
        add(&ended);
        // Other children are orphans of the payload; a zombie counts against the process limit.
        if ended.pid == pid {
            break ended;
        }
    };
    let another = |_| match process::ended_any() {
        Ok(Some(orphan)) => {
            add(&orphan);
            None
        }
        Ok(None) => Some(Ok(false)),
        Err(Errno::CHILD) => Some(Ok(true)),
        Err(errno) => Some(Err(errno)),
    };
    let is_last = (0..MAX_ORPHANS).find_map(another).unwrap_or(Ok(false))?;
    let last = is_last.then_some((user_us, system_us));
    tell(status, &Event::Ended { status: payload.status, user_us: payload.user_us, system_us: payload.system_us, last })?;
    if !is_last {
        // The launcher inspects the processes that are left and kills this one. If the launcher
        // has exited, the read returns end of file and this process exits.
        let _until_killed = await_command();
    }
    Ok(())
}

/// Waits for the launcher's next message.
fn await_command() -> Result<ExecutorCommand, Errno> {
    let mut command = [0; ExecutorCommand::BYTES];
    loop {
        // A message is one write of less than PIPE_BUF bytes, which a read returns whole (pipe(7)).
        match rustix::io::read(descriptor::LIFELINE, &mut command) {
            Ok(ExecutorCommand::BYTES) => return ExecutorCommand::decode(command).map_err(|_| Errno::PROTO),
            Ok(0) => return Err(Errno::PIPE),
            Ok(_) => return Err(Errno::PROTO),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
}

fn tell(status: BorrowedFd<'_>, event: &Event) -> Result<(), Errno> {
    let frame = event.encode();
    let mut rest = frame.as_slice();
    while !rest.is_empty() {
        match rustix::io::write(status, rest) {
            Ok(n) => rest = rest.get(n..).unwrap_or_default(),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}
