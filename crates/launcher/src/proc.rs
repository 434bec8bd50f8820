//! Small reads and writes below one process's `/proc` directory.
//!
//! The directory is opened once, so that a reused pid cannot stand in for the process.

use std::mem::MaybeUninit;

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

    pub(crate) fn open_to_read(&self, name: &str) -> Result<OwnedFd, Errno> {
        openat(&self.0, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
    }

    pub(crate) fn read(&self, name: &str) -> Result<String, Errno> {
        read_to_string(self.open_to_read(name)?)
    }

    /// The process does not inherit a launcher's protection from the OOM killer: the kernel
    /// would kill other processes in place of its code.
    ///
    /// # Errors
    /// It cannot be read or written.
    pub(crate) fn reset_oom_score_adj(&self) -> Result<(), Errno> {
        const FILE: &str = "oom_score_adj";
        if self.read(FILE)?.starts_with('-') { self.write(FILE, "0") } else { Ok(()) }
    }

    pub(crate) fn open_namespace(&self, name: &str) -> Result<OwnedFd, Errno> {
        self.open_to_read(&format!("ns/{name}"))
    }

    /// A namespace's name, such as `user:[4026531837]`.
    pub(crate) fn namespace(&self, name: &str) -> Result<String, Errno> {
        readlinkat(&self.0, format!("ns/{name}"), Vec::new()).map(|link| link.to_string_lossy().into_owned())
    }
}

/// Reads a small file of the kernel whole; what is no UTF-8 is replaced. Such files have no
/// size to go by, and their text is made anew for each read, so it is read in large pieces; on
/// the stack, as a page of fresh memory costs more than most of these files.
///
/// # Errors
/// It cannot be read.
pub fn read_to_string(file: OwnedFd) -> Result<String, Errno> {
    let mut piece = [MaybeUninit::uninit(); 8192];
    let mut bytes = Vec::new();
    loop {
        match rustix::io::read(&file, &mut piece) {
            Ok(([], _)) => break,
            Ok((more, _)) => bytes.extend_from_slice(more),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(String::from_utf8(bytes).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned()))
}
