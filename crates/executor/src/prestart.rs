//! An interpreter that is started before its program is known.
//!
//! An interpreter opens its program when it has started itself. Where a fifo stands in the
//! program's place, that open(2) waits. [`Interpreter::pass`] puts the program's file in the
//! fifo's place while the interpreter is stopped, and continues it: the kernel then restarts the interrupted
//! open(2), which looks the path up again and finds the file (signal(7): open(2) of a fifo is
//! restarted after SIGCONT). The interpreter is the host's own, unchanged, and sees what it sees
//! at any other start.
//!
//! It runs no code of a request before that. Whether earlier code of a session has left anything
//! that an interpreter executes at its start is not looked at here: the launcher does.

use alloc::vec::Vec;

use rustix::{
    fd::{BorrowedFd, OwnedFd},
    fs::{CWD, Mode, OFlags, openat, renameat},
    io::Errno,
    process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid},
};
use stockade_protocol::{
    frame::{Job, Prestart},
    step::Step,
};

use crate::{Failure, payload};

/// As a mask of ignored signals: the launcher has not yet said which are.
const ALL_SIGNALS: u64 = u64::MAX;

/// That a process has ended, without reaping it.
const ENDED: WaitIdOptions = WaitIdOptions::EXITED.union(WaitIdOptions::NOHANG).union(WaitIdOptions::NOWAIT);

/// An interpreter that has been started, and opens its program's fifo.
pub(crate) struct Interpreter<'a> {
    prestart: Prestart<'a>,
    pid: i32,
}

impl<'a> Interpreter<'a> {
    /// Starts it as the frame in `bytes` says.
    pub(crate) fn start(bytes: &'a [u8]) -> Result<Self, Failure> {
        let failed = |errno| Failure::new(Step::Prestart, errno);
        let prestart = Prestart::decode(bytes).map_err(|_| failed(Errno::BADMSG))?;
        let pid = payload::start(&prestart.start, ALL_SIGNALS)?;
        Ok(Interpreter { prestart, pid })
    }

    /// Checks that it is the start that the job asks for, and that it still waits.
    pub(crate) fn check(&self, job: &Job<'_>) -> Result<(), Failure> {
        let Prestart { start, directory, name } = &self.prestart;
        let failed = |errno| Failure::new(Step::Prestart, errno);
        if (start, *directory, *name) != (&job.start, job.program_directory, job.program.path) {
            return Err(failed(Errno::INVAL));
        }
        match self.process().and_then(|process| waitid(WaitId::Pid(process), ENDED)) {
            Ok(None) => Ok(()),
            Ok(Some(_)) => Err(failed(Errno::SRCH)),
            Err(errno) => Err(failed(errno)),
        }
    }

    fn process(&self) -> Result<Pid, Errno> {
        Pid::from_raw(self.pid).ok_or(Errno::SRCH)
    }

    fn open_directory(&self) -> Result<OwnedFd, Errno> {
        openat(CWD, self.prestart.directory, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
    }

    /// Gives it the program, which is written beside the fifo. Returns its pid.
    pub(crate) fn pass(&self) -> Result<i32, Failure> {
        let passed = || {
            let (directory, process) = (self.open_directory()?, self.process()?);
            // First, so that an interpreter that is still starting does not run ahead.
            kill_process(process, Signal::STOP)?;
            let stopped = waitid(WaitId::Pid(process), WaitIdOptions::STOPPED | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT)?;
            if stopped.is_none_or(|status| !status.stopped()) {
                return Err(Errno::SRCH);
            }
            renameat(&directory, &*Prestart::unpassed(self.prestart.name), &directory, self.prestart.name)?;
            kill_process(process, Signal::CONT)
        };
        passed().map(|()| self.pid).map_err(|errno| Failure::new(Step::PassProgram, errno))
    }
}

/// The bytes of a prestart, with which the job's file begins.
pub(crate) fn read(file: BorrowedFd<'_>, length: u64) -> Result<Vec<u8>, Errno> {
    let mut bytes = alloc::vec![0; usize::try_from(length).map_err(|_| Errno::INVAL)?];
    let mut read = 0;
    while read < bytes.len() {
        match rustix::io::pread(file, bytes.get_mut(read..).unwrap_or_default(), read as u64) {
            Ok(0) => return Err(Errno::IO),
            Ok(n) => read += n,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(bytes)
}
