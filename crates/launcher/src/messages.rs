//! What the launcher and its child tell each other: one enum for each direction, whose members
//! carry their own descriptors.
//!
//! A message is one packet: its number, which of its optional descriptors are there, and the
//! descriptors in the order of its fields. A packet of another number or with another count is
//! EPROTO, so a message out of phase ends the run. Both ends make only system calls and
//! allocate nothing, since one of them is the child between clone and exec. The executor's
//! frames have a pipe of their own.

use std::mem::MaybeUninit;

use rustix::{
    fd::{AsFd, BorrowedFd, OwnedFd},
    io::Errno,
    net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recvmsg, sendmsg},
};

/// The most mounts that a run's child is sent.
pub(crate) const MAX_SENT_MOUNTS: usize = 32;
/// The most hierarchies of cgroup v1 that a run joins.
pub(crate) const MAX_TASKS: usize = 4;
/// The most descriptors of one message.
const MAX_DESCRIPTORS: usize = MAX_SENT_MOUNTS + 1;

/// From the launcher to the child.
pub(crate) enum LauncherMessage<F> {
    /// The id maps are written and the plan stands in shared memory.
    Plan {
        /// Hangs up when the launcher ends.
        lifeline: F,
        /// Mounts that the launcher has opened, copied or idmapped.
        mounts: [Option<F>; MAX_SENT_MOUNTS],
    },
    /// Scratch can be mounted.
    Scratch {
        /// What the executor gets.
        executor: ExecutorFiles<F>,
        /// A copy of scratch's mount; none where the child makes or opens it itself.
        tree: Option<F>,
    },
    /// The cgroup is made; on v1 with the files through which the child joins.
    Cgroup {
        /// One for each hierarchy.
        tasks: [Option<F>; MAX_TASKS],
    },
}

/// What the executor reads and writes, and the payload after it.
pub(crate) struct ExecutorFiles<F> {
    pub(crate) job: F,
    pub(crate) stdin: F,
    pub(crate) stdout: F,
    pub(crate) stderr: F,
    /// The file of a memory image that the payload gets.
    pub(crate) memory: Option<F>,
}

impl ExecutorFiles<OwnedFd> {
    /// To be sent.
    pub(crate) fn borrowed(&self) -> ExecutorFiles<BorrowedFd<'_>> {
        let ExecutorFiles { job, stdin, stdout, stderr, memory } = self;
        let memory = memory.as_ref().map(AsFd::as_fd);
        ExecutorFiles { job: job.as_fd(), stdin: stdin.as_fd(), stdout: stdout.as_fd(), stderr: stderr.as_fd(), memory }
    }
}

/// From the child to the launcher, after the egress gate's sockets, which have a form of
/// their own (`stockade_egress::netns`).
pub(crate) enum ChildMessage<F> {
    /// No mount is to come any more.
    MountsStand,
    /// What only the launcher may keep.
    Handover {
        /// The root's file system.
        root: F,
        /// Scratch's file system.
        scratch: F,
        /// The filter's listener.
        listener: Option<F>,
        /// The terminal's master.
        terminal: Option<F>,
        /// The read end of what watched interpreters write.
        modules: Option<F>,
        /// A copy of /proc, to be closed once no process waits for the launcher.
        proc: Option<F>,
        /// What tells of the sockets in the network namespace; none where nothing limits memory,
        /// or the kernel has no such thing.
        sock_diag: Option<F>,
    },
}

const PLAN: u8 = 1;
const SCRATCH: u8 = 2;
const CGROUP: u8 = 3;
const MOUNTS_STAND: u8 = 4;
const HANDOVER: u8 = 5;

impl LauncherMessage<BorrowedFd<'_>> {
    /// Sends it to the child.
    pub(crate) fn send(&self, socket: &OwnedFd) -> Result<(), Errno> {
        match self {
            LauncherMessage::Plan { lifeline, mounts } => {
                let mut packet = Packet::new(PLAN, socket);
                packet.push(*lifeline)?;
                mounts.iter().flatten().try_for_each(|mount| packet.push(*mount))?;
                packet.send(socket)
            }
            LauncherMessage::Scratch { executor: ExecutorFiles { job, stdin, stdout, stderr, memory }, tree } => {
                let mut packet = Packet::new(SCRATCH, socket);
                [job, stdin, stdout, stderr].into_iter().try_for_each(|fd| packet.push(*fd))?;
                packet.push_optional(*memory)?;
                packet.push_optional(*tree)?;
                packet.send(socket)
            }
            LauncherMessage::Cgroup { tasks } => {
                let mut packet = Packet::new(CGROUP, socket);
                tasks.iter().flatten().try_for_each(|fd| packet.push(*fd))?;
                packet.send(socket)
            }
        }
    }
}

impl LauncherMessage<OwnedFd> {
    /// Waits for the launcher's next message. EPIPE: the launcher is gone.
    pub(crate) fn recv(socket: &OwnedFd) -> Result<Self, Errno> {
        let mut received = Received::from(socket)?.ok_or(Errno::PIPE)?;
        let message = match received.number {
            PLAN => {
                let lifeline = received.take()?;
                LauncherMessage::Plan { lifeline, mounts: std::array::from_fn(|_| received.take().ok()) }
            }
            SCRATCH => LauncherMessage::Scratch {
                executor: ExecutorFiles {
                    job: received.take()?,
                    stdin: received.take()?,
                    stdout: received.take()?,
                    stderr: received.take()?,
                    memory: received.take_optional()?,
                },
                tree: received.take_optional()?,
            },
            CGROUP => LauncherMessage::Cgroup { tasks: std::array::from_fn(|_| received.take().ok()) },
            _ => return Err(Errno::PROTO),
        };
        received.end().map(|()| message)
    }
}

impl ChildMessage<BorrowedFd<'_>> {
    /// Sends it to the launcher.
    pub(crate) fn send(&self, socket: &OwnedFd) -> Result<(), Errno> {
        match self {
            ChildMessage::MountsStand => Packet::new(MOUNTS_STAND, socket).send(socket),
            ChildMessage::Handover { root, scratch, listener, terminal, modules, proc, sock_diag } => {
                let mut packet = Packet::new(HANDOVER, socket);
                packet.push(*root)?;
                packet.push(*scratch)?;
                [listener, terminal, modules, proc, sock_diag].into_iter().try_for_each(|fd| packet.push_optional(*fd))?;
                packet.send(socket)
            }
        }
    }
}

impl ChildMessage<OwnedFd> {
    /// Waits for the child's next message; none: the child has ended.
    pub(crate) fn recv(socket: &OwnedFd) -> Result<Option<Self>, Errno> {
        let Some(mut received) = Received::from(socket)? else { return Ok(None) };
        let message = match received.number {
            MOUNTS_STAND => ChildMessage::MountsStand,
            HANDOVER => ChildMessage::Handover {
                root: received.take()?,
                scratch: received.take()?,
                listener: received.take_optional()?,
                terminal: received.take_optional()?,
                modules: received.take_optional()?,
                proc: received.take_optional()?,
                sock_diag: received.take_optional()?,
            },
            _ => return Err(Errno::PROTO),
        };
        received.end().map(|()| Some(message))
    }
}

/// A message as it is sent.
struct Packet<'f> {
    number: u8,
    /// A bit for each optional descriptor that is there, in the order of the fields.
    there: u8,
    optional: u32,
    fds: [BorrowedFd<'f>; MAX_DESCRIPTORS],
    count: usize,
}

impl<'f> Packet<'f> {
    /// Without descriptors; `filler` stands in the places that are not used.
    fn new(number: u8, filler: &'f OwnedFd) -> Self {
        Packet { number, there: 0, optional: 0, fds: [filler.as_fd(); MAX_DESCRIPTORS], count: 0 }
    }

    fn push(&mut self, fd: BorrowedFd<'f>) -> Result<(), Errno> {
        *self.fds.get_mut(self.count).ok_or(Errno::NOBUFS)? = fd;
        self.count += 1;
        Ok(())
    }

    fn push_optional(&mut self, fd: Option<BorrowedFd<'f>>) -> Result<(), Errno> {
        self.there |= u8::from(fd.is_some()) << self.optional;
        self.optional += 1;
        fd.map_or(Ok(()), |fd| self.push(fd))
    }

    fn send(&self, socket: &OwnedFd) -> Result<(), Errno> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let fds = self.fds.get(..self.count).unwrap_or_default();
        if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(Errno::NOBUFS);
        }
        let bytes = [self.number, self.there];
        sendmsg(socket, &[std::io::IoSlice::new(&bytes)], &mut ancillary, SendFlags::NOSIGNAL).map(drop)
    }
}

/// A message as it has come.
struct Received {
    number: u8,
    there: u8,
    fds: [Option<OwnedFd>; MAX_DESCRIPTORS],
    next: usize,
}

impl Received {
    /// None: the other end is gone; ECONNRESET: with a message unread.
    fn from(socket: &OwnedFd) -> Result<Option<Self>, Errno> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut bytes = [0; 2];
        loop {
            match recvmsg(socket, &mut [std::io::IoSliceMut::new(&mut bytes)], &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
                Ok(message) if message.bytes == bytes.len() => break,
                Ok(message) if message.bytes != 0 => return Err(Errno::PROTO),
                Ok(_) | Err(Errno::CONNRESET) => return Ok(None),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
        let mut fds = [const { None }; MAX_DESCRIPTORS];
        let rights = ancillary.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(rights) => Some(rights),
            _ => None,
        });
        for (place, fd) in fds.iter_mut().zip(rights.flatten()) {
            *place = Some(fd);
        }
        let [number, there] = bytes;
        Ok(Some(Received { number, there, fds, next: 0 }))
    }

    fn take(&mut self) -> Result<OwnedFd, Errno> {
        let fd = self.fds.get_mut(self.next).and_then(Option::take).ok_or(Errno::PROTO)?;
        self.next += 1;
        Ok(fd)
    }

    fn take_optional(&mut self) -> Result<Option<OwnedFd>, Errno> {
        let is_there = self.there & 1 == 1;
        self.there >>= 1;
        is_there.then(|| self.take()).transpose()
    }

    /// Nothing may be left over.
    fn end(&self) -> Result<(), Errno> {
        if self.there == 0 && self.fds.iter().all(Option::is_none) { Ok(()) } else { Err(Errno::PROTO) }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use rustix::net::{AddressFamily, SocketFlags, SocketType, send, socketpair};

    use super::*;

    fn pair() -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
    }

    /// Which file a descriptor is.
    fn inode(fd: impl AsFd) -> u64 {
        rustix::fs::fstat(fd).unwrap().st_ino
    }

    #[test]
    fn optional_descriptors_arrive_in_their_fields() {
        let (launcher, child) = pair();
        let (read, write) = rustix::pipe::pipe().unwrap();
        let (other, _end) = rustix::pipe::pipe().unwrap();
        let sent = ChildMessage::Handover {
            root: launcher.as_fd(),
            scratch: child.as_fd(),
            listener: None,
            terminal: Some(read.as_fd()),
            modules: None,
            proc: Some(other.as_fd()),
            sock_diag: None,
        };
        sent.send(&child).unwrap();
        let Some(ChildMessage::Handover {
            root,
            scratch,
            listener: None,
            terminal: Some(terminal),
            modules: None,
            proc: Some(proc),
            sock_diag: None,
        }) = ChildMessage::recv(&launcher).unwrap()
        else {
            panic!("another message")
        };
        let found = [root, scratch, terminal, proc].map(inode);
        assert_eq!(found, [inode(&launcher), inode(&child), inode(&write), inode(&other)]);
    }

    #[test]
    fn a_message_of_the_other_direction_or_another_length_is_refused() {
        let (launcher, child) = pair();
        ChildMessage::MountsStand.send(&launcher).unwrap();
        assert!(matches!(LauncherMessage::recv(&child), Err(Errno::PROTO)));
        send(&launcher, &[CGROUP], SendFlags::empty()).unwrap();
        assert!(matches!(LauncherMessage::recv(&child), Err(Errno::PROTO)));
        send(&launcher, &[SCRATCH, 0], SendFlags::empty()).unwrap();
        assert!(matches!(LauncherMessage::recv(&child), Err(Errno::PROTO)));
    }

    #[test]
    fn an_end_that_is_gone_is_told_from_a_message() {
        let (launcher, child) = pair();
        LauncherMessage::Cgroup { tasks: [None; MAX_TASKS] }.send(&launcher).unwrap();
        drop(launcher);
        assert!(matches!(LauncherMessage::recv(&child), Ok(LauncherMessage::Cgroup { tasks: [None, None, None, None] })));
        assert!(matches!(LauncherMessage::recv(&child), Err(Errno::PIPE)));
    }
}
