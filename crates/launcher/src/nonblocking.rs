//! The launcher's own stdin, stdout and stderr, read and written without waiting.
//!
//! Other processes may share these streams: between poll and the call another process may take
//! the data or the room, and a terminal polls as ready for less than it is given. A call that
//! waited would hold up the loop that watches the limits. O_NONBLOCK is not set on a shared
//! stream: it belongs to the open file, so it would change how the other processes wait.
//!
//! A file, a disk and a device that is no terminal count as always ready. A call may still wait
//! on a terminal of another user that cannot be reopened, and before Linux 6.4 on such a pipe.

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
use stockade_sys::streams::stdout_was_closed;

/// One of the three streams.
pub struct NonblockingStdio {
    fd: BorrowedFd<'static>,
    access: OFlags,
    /// Decided when it is first used: many runs leave a stream alone.
    how: OnceCell<StdioAccess>,
}

/// How a stream is used without waiting.
enum StdioAccess {
    /// It is always ready.
    AlwaysReady,
    /// Through an open file that no other process shares.
    Reopened(OwnedFd),
    /// Each call has the flag MSG_DONTWAIT.
    Socket,
    /// Each call has the flag RWF_NOWAIT.
    PerCall,
}

impl NonblockingStdio {
    /// Standard input.
    pub fn stdin() -> Self {
        NonblockingStdio { fd: rustix::stdio::stdin(), access: OFlags::RDONLY, how: OnceCell::new() }
    }

    /// Standard output.
    pub fn stdout() -> Self {
        NonblockingStdio { fd: rustix::stdio::stdout(), access: OFlags::WRONLY, how: OnceCell::new() }
    }

    /// Standard error.
    pub fn stderr() -> Self {
        NonblockingStdio { fd: rustix::stdio::stderr(), access: OFlags::WRONLY, how: OnceCell::new() }
    }

    /// What can be waited for.
    pub fn fd(&self) -> BorrowedFd<'static> {
        self.fd
    }

    /// Reads what there is.
    ///
    /// # Errors
    /// EAGAIN: nothing is there. Else what read(2) answers.
    pub fn read(&self, buffer: &mut [u8]) -> Result<usize, Errno> {
        match self.access_mode() {
            StdioAccess::AlwaysReady => rustix::io::read(self.fd, buffer),
            StdioAccess::Reopened(own) => rustix::io::read(own, buffer),
            StdioAccess::Socket => recv(self.fd, buffer, RecvFlags::DONTWAIT).map(|(length, _)| length),
            StdioAccess::PerCall => match preadv2(self.fd, &mut [IoSliceMut::new(buffer)], HERE, ReadWriteFlags::NOWAIT) {
                Err(Errno::OPNOTSUPP) => rustix::io::read(self.fd, buffer),
                read => read,
            },
        }
    }

    /// Writes as much as there is room for.
    ///
    /// # Errors
    /// EAGAIN: there is none. EBADF: stdout was closed when this program began. Else what write(2)
    /// answers.
    pub fn write(&self, bytes: &[u8]) -> Result<usize, Errno> {
        // Rust has opened /dev/null in its place, where output would be lost without a word.
        if self.fd.as_raw_fd() == rustix::stdio::stdout().as_raw_fd() && stdout_was_closed() {
            return Err(Errno::BADF);
        }
        match self.access_mode() {
            StdioAccess::AlwaysReady => rustix::io::write(self.fd, bytes),
            StdioAccess::Reopened(own) => rustix::io::write(own, bytes),
            StdioAccess::Socket => send(self.fd, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL),
            StdioAccess::PerCall => match pwritev2(self.fd, &[IoSlice::new(bytes)], HERE, ReadWriteFlags::NOWAIT) {
                Err(Errno::OPNOTSUPP) => rustix::io::write(self.fd, bytes),
                written => written,
            },
        }
    }

    fn access_mode(&self) -> &StdioAccess {
        self.how.get_or_init(|| match fstat(self.fd) {
            Ok(stat) => match FileType::from_raw_mode(stat.st_mode) {
                FileType::Socket => StdioAccess::Socket,
                FileType::Fifo => self.reopen().map_or(StdioAccess::PerCall, StdioAccess::Reopened),
                FileType::CharacterDevice if is_terminal(self.fd, stat.st_rdev) => {
                    self.reopen().map_or(StdioAccess::PerCall, StdioAccess::Reopened)
                }
                _ => StdioAccess::AlwaysReady,
            },
            Err(_) => StdioAccess::AlwaysReady,
        })
    }

    /// Whether it is open in its own direction: stdin for reading, the others for writing.
    ///
    /// # Errors
    /// EBADF: there is none.
    pub(crate) fn is_open(&self) -> Result<bool, Errno> {
        let mode = fcntl_getfl(self.fd)? & OFlags::RWMODE;
        Ok(mode == self.access || mode == OFlags::RDWR)
    }

    /// Opens the same file once more.
    ///
    /// # Errors
    /// EBADF: it is not open for this. Reopened with root's rights it would be: through a
    /// descriptor that may only write to a terminal, root would read what a person types there.
    fn reopen(&self) -> Result<OwnedFd, Errno> {
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
    fn stream(fd: OwnedFd, access: OFlags) -> NonblockingStdio {
        let fd: &'static OwnedFd = Box::leak(Box::new(fd));
        NonblockingStdio { fd: fd.as_fd(), access, how: OnceCell::new() }
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
        assert!(
            bytes.starts_with(b"secret")
                && [&reader, &writer].iter().all(|stream| matches!(stream.access_mode(), StdioAccess::Reopened(_)))
        );
    }
}
