//! An interpreter that is started before its program is known.
//!
//! An interpreter opens its program when it has started itself. Where a fifo stands in the
//! program's place, that open(2) waits. [`Interpreter::pass`] puts the program's file in the
//! fifo's place, stops the interpreter and continues it: the kernel then restarts the interrupted
//! open(2), which looks the path up again and finds the file (signal(7): open(2) of a fifo is
//! restarted after SIGCONT). The interpreter is the host's own, unchanged, and sees what it sees
//! at any other start.
//!
//! It runs no code of a request before that. Whether earlier code of a session has left anything
//! that an interpreter executes at its start is not looked at here: the launcher does.

use alloc::vec::Vec;

use rustix::{
    fd::{BorrowedFd, OwnedFd},
    fs::{AtFlags, CWD, Mode, OFlags, openat, renameat, unlinkat},
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

    /// Whether it is the start that the job asks for, and still waits.
    pub(crate) fn fits(&self, job: &Job<'_>) -> bool {
        let Prestart { start, directory, name } = &self.prestart;
        (start, *directory, *name) == (&job.start, job.program_directory, job.program.path) && self.has_ended().is_ok_and(|ended| !ended)
    }

    fn process(&self) -> Result<Pid, Errno> {
        Pid::from_raw(self.pid).ok_or(Errno::SRCH)
    }

    fn has_ended(&self) -> Result<bool, Errno> {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        waitid(WaitId::Pid(self.process()?), options).map(|ended| ended.is_some())
    }

    fn open_directory(&self) -> Result<OwnedFd, Errno> {
        openat(CWD, self.prestart.directory, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
    }

    /// Ends it; its fifo goes.
    pub(crate) fn discard(self) -> Result<(), Failure> {
        let discarded = || {
            match kill_process(self.process()?, Signal::KILL) {
                Ok(()) | Err(Errno::SRCH) => {}
                Err(errno) => return Err(errno),
            }
            waitid(WaitId::Pid(self.process()?), WaitIdOptions::EXITED)?;
            match unlinkat(self.open_directory()?, self.prestart.name, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => Ok(()),
                Err(errno) => Err(errno),
            }
        };
        discarded().map_err(|errno| Failure::new(Step::Prestart, errno))
    }

    /// Gives it the program, which is written beside the fifo. Returns its pid.
    pub(crate) fn pass(&self) -> Result<i32, Failure> {
        let passed = || {
            let (directory, process) = (self.open_directory()?, self.process()?);
            renameat(&directory, &*Prestart::unpassed(self.prestart.name), &directory, self.prestart.name)?;
            kill_process(process, Signal::STOP)?;
            // A SIGCONT before the stop would take the SIGSTOP back.
            let stopped = waitid(WaitId::Pid(process), WaitIdOptions::STOPPED | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT)?;
            if stopped.is_none_or(|status| !status.stopped()) {
                return Err(Errno::SRCH);
            }
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
