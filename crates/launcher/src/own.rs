//! The launcher's own streams, read and written without waiting.
//!
//! Whoever started the launcher may share them with others: between a stream's being ready
//! and the call somebody else may take what was there, or the room, and a terminal is ready
//! for less than it is given. A call that waited would hold up the loop that watches the
//! limits. And none may change how the others wait: O_NONBLOCK belongs to the open file and
//! not to the descriptor.
//!
//! A file, a disk and a device that is no terminal are taken to be ready at all times. Where a
//! terminal, or on Linux before 6.4 a pipe, belongs to another user and cannot be opened anew,
//! a call may wait after all.

use std::{
    cell::OnceCell,
    io::{IoSlice, IoSliceMut},
};

use rustix::{
    fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    fs::{FileType, Mode, OFlags, fcntl_getfl, fstat, major, minor, open},
    io::{Errno, ReadWriteFlags, preadv2, pwritev2},
    net::{RecvFlags, SendFlags, recv, send},
};

/// One of them.
pub struct OwnStream {
    fd: BorrowedFd<'static>,
    access: OFlags,
    /// Decided when it is first used: many a run leaves a stream alone.
    way: OnceCell<Way>,
}

/// How it is used without waiting.
enum Way {
    /// It is always ready.
    Plainly,
    /// Through an open file of our own.
    Anew(OwnedFd),
    /// Each call says so; a socket's with the flags of its own.
    Socket,
    EachCall,
}

impl OwnStream {
    /// Standard input.
    pub fn stdin() -> Self {
        OwnStream { fd: rustix::stdio::stdin(), access: OFlags::RDONLY, way: OnceCell::new() }
    }

    /// Standard output.
    pub fn stdout() -> Self {
        OwnStream { fd: rustix::stdio::stdout(), access: OFlags::WRONLY, way: OnceCell::new() }
    }

    /// Standard error.
    pub fn stderr() -> Self {
        OwnStream { fd: rustix::stdio::stderr(), access: OFlags::WRONLY, way: OnceCell::new() }
    }

    /// What can be waited for.
    pub fn fd(&self) -> BorrowedFd<'static> {
        self.fd
    }

    /// Reads what there is.
    ///
    /// # Errors
    /// EAGAIN: nothing is there. Else what read(2) says.
    pub fn read(&self, buffer: &mut [u8]) -> Result<usize, Errno> {
        match self.way() {
            Way::Plainly => rustix::io::read(self.fd, buffer),
            Way::Anew(own) => rustix::io::read(own, buffer),
            Way::Socket => recv(self.fd, buffer, RecvFlags::DONTWAIT).map(|(length, _)| length),
            Way::EachCall => match preadv2(self.fd, &mut [IoSliceMut::new(buffer)], HERE, ReadWriteFlags::NOWAIT) {
                Err(Errno::OPNOTSUPP) => rustix::io::read(self.fd, buffer),
                read => read,
            },
        }
    }

    /// Writes as much as there is room for.
    ///
    /// # Errors
    /// EAGAIN: there is none. Else what write(2) says.
    pub fn write(&self, bytes: &[u8]) -> Result<usize, Errno> {
        match self.way() {
            Way::Plainly => rustix::io::write(self.fd, bytes),
            Way::Anew(own) => rustix::io::write(own, bytes),
            Way::Socket => send(self.fd, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL),
            Way::EachCall => match pwritev2(self.fd, &[IoSlice::new(bytes)], HERE, ReadWriteFlags::NOWAIT) {
                Err(Errno::OPNOTSUPP) => rustix::io::write(self.fd, bytes),
                written => written,
            },
        }
    }

    fn way(&self) -> &Way {
        self.way.get_or_init(|| match fstat(self.fd) {
            Ok(stat) => match FileType::from_raw_mode(stat.st_mode) {
                FileType::Socket => Way::Socket,
                FileType::Fifo => self.anew().map_or(Way::EachCall, Way::Anew),
                FileType::CharacterDevice if is_terminal(self.fd, stat.st_rdev) => self.anew().map_or(Way::EachCall, Way::Anew),
                _ => Way::Plainly,
            },
            Err(_) => Way::Plainly,
        })
    }

    /// Whether it is open for what it is for: a stream may be there, and go the other way.
    ///
    /// # Errors
    /// EBADF: there is none.
    pub(crate) fn is_open(&self) -> Result<bool, Errno> {
        let mode = fcntl_getfl(self.fd)? & OFlags::RWMODE;
        Ok(mode == self.access || mode == OFlags::RDWR)
    }

    /// The same file, opened once more.
    ///
    /// # Errors
    /// EBADF: it is not open for this. Opened with root's rights it would be, whoever gave root
    /// the descriptor: one that writes to a terminal would read what somebody else types there.
    fn anew(&self) -> Result<OwnedFd, Errno> {
        if !self.is_open()? {
            return Err(Errno::BADF);
        }
        let flags = self.access | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        open(format!("/proc/self/fd/{}", self.fd.as_raw_fd()), flags, Mode::empty())
    }
}

/// As an offset: where the file is (preadv2(2)).
const HERE: u64 = u64::MAX;

/// Whether it is a terminal that is the same when it is opened anew: the end of a pseudo
/// terminal that its maker holds would be another pair.
fn is_terminal(fd: impl AsFd, device: u64) -> bool {
    const PTMX: (u32, u32) = (5, 2);
    rustix::termios::isatty(fd) && (major(device), minor(device)) != PTMX
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use super::*;

    /// Kept open for as long as the tests run.
    fn stream(fd: OwnedFd, access: OFlags) -> OwnStream {
        let fd: &'static OwnedFd = Box::leak(Box::new(fd));
        OwnStream { fd: fd.as_fd(), access, way: OnceCell::new() }
    }

    #[test]
    fn what_is_open_one_way_is_not_used_the_other() {
        let (read_end, write_end) = rustix::pipe::pipe().unwrap();
        rustix::io::write(&write_end, b"secret").unwrap();
        let (reader, writer) =
            (stream(read_end.try_clone().unwrap(), OFlags::RDONLY), stream(write_end.try_clone().unwrap(), OFlags::WRONLY));
        assert_eq!(stream(write_end, OFlags::RDONLY).read(&mut [0; 6]), Err(Errno::BADF));
        assert_eq!(stream(read_end, OFlags::WRONLY).write(b"forged"), Err(Errno::BADF));
        // The control: the other way round both are opened anew, and work.
        let mut bytes = [0; 16];
        assert_eq!((reader.read(&mut bytes), writer.write(b"more")), (Ok(6), Ok(4)));
        assert!(bytes.starts_with(b"secret") && [&reader, &writer].iter().all(|stream| matches!(stream.way(), Way::Anew(_))));
    }
}
