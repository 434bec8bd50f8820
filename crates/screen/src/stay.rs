//! A screener that stays: for each question it makes a copy of itself, which answers that one and ends.
//!
//! It reads no question itself, so what a text does to the copy that reads it reaches no other. A
//! message on the socket is the question's number, with the file of the question and that for the
//! answer. The copy is a child of the launcher's, as a screener that was started would be, and the
//! reply is that number with the copy's pidfd. All copies have the layout of this process's memory: one
//! that a text has taken over has its own question and answer, and nothing to use that on. How long a copy may take is the launcher's to decide.

use std::{
    io::{IoSlice, IoSliceMut},
    mem::MaybeUninit,
};

use crate::NOT_ASKED;
use rustix::{
    fd::{AsFd, OwnedFd},
    io::{Errno, retry_on_intr},
    net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recvmsg, sendmsg},
};
use stockade_sys::{
    clone::{clone_process, flags},
    process::place_descriptor,
};

/// Until the launcher closes its end. `answer` is what a copy does, with the question as its stdin and
/// the answer's file as its stdout.
///
/// # Errors
/// The socket fails, a message is malformed, or the kernel makes no copy.
pub(crate) fn serve(socket: impl AsFd, answer: impl Fn() -> u8) -> Result<(), Errno> {
    while let Some((number, question, file)) = receive(&socket)? {
        let copy = clone_process(flags::PARENT, || {
            // The first closes the socket.
            let placed = place_descriptor(&question, 0).and_then(|()| place_descriptor(&file, 1));
            placed.map_or(i32::from(NOT_ASKED), |()| i32::from(answer()))
        })?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let pidfd = [copy.pidfd.as_fd()];
        let fits = ancillary.push(SendAncillaryMessage::ScmRights(&pidfd));
        debug_assert!(fits, "one descriptor");
        retry_on_intr(|| sendmsg(&socket, &[IoSlice::new(&number)], &mut ancillary, SendFlags::NOSIGNAL))?;
    }
    Ok(())
}

/// The next question's number, its file and that of its answer; none where there is none to come.
fn receive(socket: impl AsFd) -> Result<Option<([u8; 4], OwnedFd, OwnedFd)>, Errno> {
    let mut number = [0; 4];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let got = retry_on_intr(|| recvmsg(&socket, &mut [IoSliceMut::new(&mut number)], &mut ancillary, RecvFlags::CMSG_CLOEXEC))?;
    if got.bytes == 0 {
        return Ok(None);
    }
    let mut files = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(files) => Some(files),
        _ => None,
    });
    let mut files = files.next().ok_or(Errno::PROTO)?;
    let (question, answer) = files.next().zip(files.next()).ok_or(Errno::PROTO)?;
    Ok(Some((number, question, answer)))
}
