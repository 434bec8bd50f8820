//! An interpreter that is started before its program is known.
//!
//! An interpreter opens its program when it has started itself. Where a fifo stands in the
//! program's place, that open(2) waits. [`Interpreter::stop`] stops the interpreter and removes the
//! fifo; the program's file is made under the same name, as for any other start; then
//! [`Interpreter::go_on`] continues the interpreter. The kernel restarts the interrupted open(2),
//! which looks the path up again and finds the file (signal(7): open(2) of a fifo is restarted
//! after SIGCONT). The interpreter is the host's own, unchanged, and sees what it sees at any other
//! start.
//!
//! It runs no code of a request before that. Whether earlier code of a session has left anything
//! that an interpreter executes at its start is not looked at here: the launcher does.

use alloc::vec::Vec;

use rustix::{
    fd::BorrowedFd,
    fs::{AtFlags, CWD, Mode, OFlags, openat, unlinkat},
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

    /// Stops it and removes its fifo, if it is the start that the job asks for and still waits.
    pub(crate) fn stop(&self, job: &Job<'_>) -> Result<(), Failure> {
        let Prestart { start, directory, name } = &self.prestart;
        let stopped = || {
            if (start, *directory, *name) != (&job.start, job.program_directory, job.program.path) {
                return Err(Errno::INVAL);
            }
            kill_process(self.process()?, Signal::STOP)?;
            // Before the stop a SIGCONT would take the SIGSTOP back.
            let seen = waitid(WaitId::Pid(self.process()?), WaitIdOptions::STOPPED | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT)?;
            if seen.is_none_or(|status| !status.stopped()) {
                return Err(Errno::SRCH);
            }
            let directory = openat(CWD, *directory, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
            unlinkat(directory, *name, AtFlags::empty())
        };
        stopped().map_err(|errno| Failure::new(Step::Prestart, errno))
    }

    /// Lets it open its program. Returns its pid.
    pub(crate) fn go_on(&self) -> Result<i32, Failure> {
        let continued = self.process().and_then(|process| kill_process(process, Signal::CONT));
        continued.map(|()| self.pid).map_err(|errno| Failure::new(Step::PassProgram, errno))
    }

    fn process(&self) -> Result<Pid, Errno> {
        Pid::from_raw(self.pid).ok_or(Errno::SRCH)
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
