//! What the launcher tells its child: a byte each time, and the descriptors with it.
//!
//! The child waits for it and for nothing else; a launcher that is gone ends it. As
//! everything between clone and exec this makes only system calls, and allocates nothing.

use std::mem::MaybeUninit;

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fd::OwnedFd,
    io::Errno,
    net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recv, recvmsg},
};
use stockade_protocol::step::Step;

use super::{At, Outcome};
use crate::prepared::MOST_SENT;

/// What the executor will have, which comes first with the third word.
pub(super) struct ForExecutor {
    pub(super) job: OwnedFd,
    pub(super) stdin: OwnedFd,
    pub(super) stdout: OwnedFd,
    pub(super) stderr: OwnedFd,
}

impl ForExecutor {
    pub(super) fn take(word: &mut impl Iterator<Item = OwnedFd>) -> Result<Self, Errno> {
        let mut next = || word.next().ok_or(Errno::BADF);
        Ok(ForExecutor { job: next()?, stdin: next()?, stdout: next()?, stderr: next()? })
    }
}

/// Waits for the launcher's word and the descriptors that come with it. EPIPE: it is gone.
pub(super) fn await_word(handover: &OwnedFd) -> Result<[Option<OwnedFd>; MOST_SENT], Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_SENT))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut word = [0u8];
    let is_there = || recv(handover, &mut [0u8; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT).ok().map(drop);
    let _or_later = stockade_sys::process::soon(is_there);
    loop {
        match recvmsg(handover, &mut [std::io::IoSliceMut::new(&mut word)], &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Ok(message) if message.bytes == 1 => break,
            Ok(_) => return Err(Errno::PIPE),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    let mut fds = [const { None }; MOST_SENT];
    let received = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(rights) => Some(rights),
        _ => None,
    });
    for (place, fd) in fds.iter_mut().zip(received.flatten()) {
        *place = Some(fd);
    }
    Ok(fds)
}

/// The lifeline hangs up when the launcher ends, however it ends.
pub(super) fn still_alive(lifeline: &OwnedFd) -> Outcome<()> {
    let mut fds = [PollFd::new(lifeline, PollFlags::empty())];
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).at(Step::DeathSignal)?;
    if fds.iter().any(|fd| fd.revents().contains(PollFlags::HUP)) { Err(Errno::SRCH).at(Step::DeathSignal) } else { Ok(()) }
}
