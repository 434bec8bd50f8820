//! Whether this host can do it, found out by doing it: a network namespace is made, set up
//! as for a run, and gone again. For `doctor`. No gate is started and nothing is dialled.

use rustix::{
    fd::AsFd,
    io::Errno,
    net::{AddressFamily, SocketFlags, SocketType, socketpair},
};
use stockade_sys::{
    clone::{clone_process, flags},
    process::{close_range, wait_child},
};

use crate::{
    inside::Sockets,
    setup::{self, SetupError},
};

/// What this host cannot do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Cannot {
    /// Make the namespaces.
    #[error("make a user and a network namespace: {0}")]
    Namespaces(Errno),
    /// Make the sockets in them; netfilter or IPv6 may be missing.
    #[error("make netlink, raw and IPv6 sockets in a network namespace of its own: {0}")]
    Sockets(Errno),
    /// Set them up.
    #[error(transparent)]
    Setup(#[from] SetupError),
}

/// Tries. This process must have one thread; about a millisecond.
///
/// # Errors
/// The first thing that failed.
pub fn probe() -> Result<(), Cannot> {
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).map_err(Cannot::Namespaces)?;
    let our_number = std::os::fd::AsRawFd::as_raw_fd(&ours).unsigned_abs();
    let child = clone_process(flags::NEWUSER | flags::NEWNET, || {
        // Our copy of the parent's end would hide its death.
        if let Err(errno) = close_range(our_number, our_number) {
            return errno.raw_os_error();
        }
        let sent = Sockets::open().map_err(|failed| failed.errno).and_then(|sockets| sockets.send(theirs.as_fd()));
        sent.map_or_else(Errno::raw_os_error, |()| 0)
    })
    .map_err(Cannot::Namespaces)?;
    drop(theirs);
    let received = Sockets::receive(ours.as_fd());
    let ended = wait_child(&child.pidfd).map_err(Cannot::Namespaces)?;
    match (received, ended.status) {
        (Ok(sockets), 0) => Ok(setup::configure(sockets).map(drop)?),
        (_, errno @ 1..) => Err(Cannot::Sockets(Errno::from_raw_os_error(errno))),
        (Err(errno), _) => Err(Cannot::Sockets(errno)),
        (Ok(_), _) => Err(Cannot::Sockets(Errno::CHILD)),
    }
}
