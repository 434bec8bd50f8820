//! Small reads and writes below one process's `/proc` directory.
//!
//! The directory is opened once, so that a reused pid cannot stand in for the process.

use rustix::{
    fd::OwnedFd,
    fs::{CWD, Mode, OFlags, openat, readlinkat},
    io::Errno,
};

/// A process's directory in /proc.
pub(crate) struct ProcDirectory(OwnedFd);

impl ProcDirectory {
    pub(crate) fn open(pid: i32) -> Result<Self, Errno> {
        openat(CWD, format!("/proc/{pid}"), OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).map(ProcDirectory)
    }

    pub(crate) fn write(&self, name: &str, value: &str) -> Result<(), Errno> {
        let file = openat(&self.0, name, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
        rustix::io::write(&file, value.as_bytes()).map(drop)
    }

    pub(crate) fn read(&self, name: &str) -> Result<String, Errno> {
        read_to_string(openat(&self.0, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
    }

    pub(crate) fn open_namespace(&self, name: &str) -> Result<OwnedFd, Errno> {
        openat(&self.0, format!("ns/{name}"), OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
    }

    /// A namespace's name, such as `user:[4026531837]`.
    pub(crate) fn namespace(&self, name: &str) -> Result<String, Errno> {
        readlinkat(&self.0, format!("ns/{name}"), Vec::new()).map(|link| link.to_string_lossy().into_owned())
    }
}

/// Reads a small file of the kernel whole; what is no UTF-8 is replaced. In one large
/// read where that is enough: such files have no size to go by.
pub(crate) fn read_to_string(file: OwnedFd) -> Result<String, Errno> {
    let mut bytes = vec![0; 4096];
    let mut length = 0;
    loop {
        if length == bytes.len() {
            bytes.resize(length * 2, 0);
        }
        match rustix::io::read(&file, bytes.get_mut(length..).unwrap_or_default()) {
            Ok(0) => break,
            Ok(more) => length += more,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    bytes.truncate(length);
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
