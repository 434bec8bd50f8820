//! A screener that stays for a session or a worker, and copies itself for each of its texts.
//!
//! To copy a confined process takes less than to start and confine one. A question goes to it as two
//! files; the copy that answers is a child of this process, and is judged as a screener that was
//! started for the question. Where the one that stays has ended, a question gets a screener of its own;
//! one that made no copy in time is replaced.

use std::{
    cell::{Cell, RefCell},
    fs::File,
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::process::CommandExt,
    },
    process::{Child, Command, Stdio},
    rc::Rc,
    time::Instant,
};

use rustix::{
    io::{Errno, retry_on_intr},
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
        SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
    },
};
use stockade_policy::model::{Policy, Screen};
use stockade_protocol::screen::{Action, STAY};

use super::{PROGRAM, gives_way, less_urgent, pid_of, readable_by};
use crate::companion;

/// The screener that stays for a session or a worker, if any does.
#[derive(Default)]
pub(crate) struct SessionScreener(RefCell<Option<Rc<StandingScreener>>>);

impl SessionScreener {
    /// Starts one where the policy screens and none lives that is as urgent. Without one, each text gets
    /// its own.
    pub(crate) fn start(&self, policy: &Policy, privileged: bool) {
        let lives = |screener: &Rc<StandingScreener>| screener.lives() && screener.gives_way == gives_way(&policy.screen);
        if policy.screen.severest() > Action::Allow && !self.0.borrow().as_ref().is_some_and(lives) {
            *self.0.borrow_mut() = StandingScreener::start(&policy.screen, privileged).ok().map(Rc::new);
        }
    }

    /// Not one that has made no copy: the next text would wait for it as long. Nor one that is more or
    /// less urgent than this policy's.
    pub(super) fn screener(&self, screen: &Screen) -> Option<Rc<StandingScreener>> {
        self.0.borrow().clone().filter(|screener| !screener.has_failed.get() && screener.gives_way == gives_way(screen))
    }
}

pub(super) struct StandingScreener {
    child: RefCell<Child>,
    socket: OwnedFd,
    questions: Cell<u32>,
    gives_way: bool,
    /// It has made no copy where it should.
    has_failed: Cell<bool>,
}

impl StandingScreener {
    fn start(screen: &Screen, privileged: bool) -> io::Result<Self> {
        let (_, program) = companion::find(PROGRAM, privileged).map_err(io::Error::other)?;
        let (socket, its_end) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let mut command = Command::new(format!("/proc/self/fd/{}", program.as_raw_fd()));
        command.arg0(PROGRAM).arg(STAY).env_clear().stdin(its_end).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn()?;
        // Its copies have its niceness.
        less_urgent(screen, pid_of(&child));
        let (questions, has_failed) = (Cell::default(), Cell::default());
        Ok(StandingScreener { child: RefCell::new(child), socket, questions, gives_way: gives_way(screen), has_failed })
    }

    fn lives(&self) -> bool {
        !self.has_failed.get() && matches!(self.child.borrow_mut().try_wait(), Ok(None))
    }

    /// Hands in a question, with the file for its answer. Returns its number.
    ///
    /// # Errors
    /// EPIPE where it has ended, EAGAIN where it takes none.
    pub(super) fn ask(&self, question: &File, answer: &File) -> Result<u32, Errno> {
        let number = self.questions.get().wrapping_add(1);
        let files = [question.as_fd(), answer.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !ancillary.push(SendAncillaryMessage::ScmRights(&files)) {
            return Err(Errno::NOBUFS);
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        retry_on_intr(|| sendmsg(&self.socket, &[IoSlice::new(&number.to_ne_bytes())], &mut ancillary, flags))?;
        self.questions.set(number);
        Ok(number)
    }

    /// The process that answers this question, as soon as there is one; none where there is none by
    /// `end`.
    ///
    /// # Errors
    /// EPIPE or ECONNRESET where the screener has ended.
    pub(super) fn copy_for(&self, number: u32, end: Instant) -> Result<Option<OwnedFd>, Errno> {
        let copy = self.receive_copy(number, end);
        self.has_failed.set(!matches!(copy, Ok(Some(_))));
        copy
    }

    fn receive_copy(&self, number: u32, end: Instant) -> Result<Option<OwnedFd>, Errno> {
        loop {
            if !readable_by(self.socket.as_fd(), end)? {
                return Ok(None);
            }
            let mut bytes = [0; 4];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
            let got = retry_on_intr(|| recvmsg(&self.socket, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, flags))?;
            let copy = ancillary.drain().find_map(|message| match message {
                RecvAncillaryMessage::ScmRights(mut files) => files.next(),
                _ => None,
            });
            match copy {
                _ if got.bytes == 0 => return Err(Errno::PIPE),
                Some(copy) if u32::from_ne_bytes(bytes) == number => return Ok(Some(copy)),
                // That of a question whose answer was not waited for.
                Some(copy) => super::end(&copy),
                None => return Err(Errno::PROTO),
            }
        }
    }
}

impl Drop for StandingScreener {
    fn drop(&mut self) {
        let child = self.child.get_mut();
        // It may have ended by itself. A copy that no question waits for is reaped when this process ends.
        let _ended = child.kill();
        let _reaped = child.wait();
    }
}
