//! Small reads and writes below one process's `/proc` directory.
//!
//! The directory is opened once, so that a reused pid cannot stand in for the process.

use std::io::Read;

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

/// Reads a small file of the kernel whole; what is no UTF-8 is replaced.
pub(crate) fn read_to_string(file: OwnedFd) -> Result<String, Errno> {
    let mut bytes = Vec::with_capacity(4096);
    std::fs::File::from(file).read_to_end(&mut bytes).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
