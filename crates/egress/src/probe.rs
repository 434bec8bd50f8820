//! Tests whether this host supports egress: creates a network namespace and sets it up as for
//! a run. For `doctor`. It starts no gate and dials nothing.

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
    netns::Sockets,
    setup::{self, SetupError},
};

/// What this host does not support.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProbeError {
    /// Creating the namespaces.
    #[error("create a user and a network namespace: {0}")]
    Namespaces(Errno),
    /// Creating the sockets in them; netfilter or IPv6 may be missing.
    #[error("create netlink, raw and IPv6 sockets in a new network namespace: {0}")]
    Sockets(Errno),
    /// Setting them up.
    #[error(transparent)]
    Setup(#[from] SetupError),
}

/// Runs the test, which takes about 1 ms. This process must have one thread.
///
/// # Errors
/// The first thing that failed.
pub fn probe() -> Result<(), ProbeError> {
    let (ours, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).map_err(ProbeError::Namespaces)?;
    let our_number = std::os::fd::AsRawFd::as_raw_fd(&ours).unsigned_abs();
    let child = clone_process(flags::NEWUSER | flags::NEWNET, || {
        // A copy of the parent's end would hide the parent's death.
        if let Err(errno) = close_range(our_number, our_number) {
            return errno.raw_os_error();
        }
        let sent = Sockets::open().map_err(|failed| failed.errno).and_then(|sockets| sockets.send(theirs.as_fd()));
        sent.map_or_else(Errno::raw_os_error, |()| 0)
    })
    .map_err(ProbeError::Namespaces)?;
    drop(theirs);
    let received = Sockets::receive(ours.as_fd());
    let ended = wait_child(&child.pidfd).map_err(ProbeError::Namespaces)?;
    match (received, ended.status) {
        (Ok(sockets), 0) => Ok(setup::configure(sockets).map(drop)?),
        (_, errno @ 1..) => Err(ProbeError::Sockets(Errno::from_raw_os_error(errno))),
        (Err(errno), _) => Err(ProbeError::Sockets(errno)),
        (Ok(_), _) => Err(ProbeError::Sockets(Errno::CHILD)),
    }
}
