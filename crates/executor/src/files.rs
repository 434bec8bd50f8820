//! Writing the request's files and the program.
//!
//! Never follows a symlink: scratch may be a host directory in which an earlier run left
//! some. It does not check paths: the launcher has, and none has a component `.` or `..`.

use rustix::{
    fd::{BorrowedFd, OwnedFd},
    fs::{CWD, FileType, Mode, OFlags, fstat, mkdirat, openat},
    io::Errno,
};
use stockade_protocol::{
    frame::{FileToWrite, Job},
    step::Step,
};

use crate::Failure;

/// The job's bytes, mapped; they begin at this place of its file.
pub(crate) fn map_job(job: BorrowedFd<'_>, offset: u64) -> Result<&'static [u8], Errno> {
    let length = usize::try_from(fstat(job)?.st_size).map_err(|_| Errno::INVAL)?;
    let bytes = stockade_sys::process::map_file(job, length)?;
    usize::try_from(offset).ok().and_then(|offset| bytes.get(offset..)).ok_or(Errno::INVAL)
}

pub(crate) fn write_files(bytes: &[u8], job: &Job<'_>) -> Result<(), Failure> {
    for file in &job.files {
        let failed = |errno| Failure::new(Step::WriteFile, errno).because(end_of(file.path));
        let contents = Job::contents(bytes, file).map_err(|_| failed(Errno::BADMSG))?;
        write_below(file.path, contents).map_err(failed)?;
    }
    Ok(())
}

/// Writes the program to a new file (O_EXCL).
pub(crate) fn write_program(bytes: &[u8], job: &Job<'_>) -> Result<(), Failure> {
    if job.program_directory.is_empty() {
        return Ok(());
    }
    let failed = |errno| Failure::new(Step::WriteProgram, errno);
    let FileToWrite { path: name, .. } = job.program;
    let contents = Job::contents(bytes, &job.program).map_err(|_| failed(Errno::BADMSG))?;
    let directory =
        openat(CWD, job.program_directory, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()).map_err(failed)?;
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = openat(&directory, name, flags, Mode::from_raw_mode(0o600)).map_err(failed)?;
    write_all(&file, contents).map_err(failed)
}

/// As much of a path as an event takes: a write of more than PIPE_BUF is not atomic.
fn end_of(path: &[u8]) -> &[u8] {
    &path[path.len().saturating_sub(1024)..]
}

fn write_below(path: &[u8], contents: &[u8]) -> Result<(), Errno> {
    let directory = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut current = openat(CWD, c".", directory, Mode::empty())?;
    let mut components = path.split(|&byte| byte == b'/').peekable();
    while let Some(component) = components.next() {
        if components.peek().is_none() {
            let file = create(&current, component)?;
            return write_all(&file, contents);
        }
        match mkdirat(&current, component, Mode::from_raw_mode(0o755)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(errno),
        }
        current = openat(&current, component, directory, Mode::empty())?;
    }
    Err(Errno::INVAL)
}

fn create(directory: &OwnedFd, name: &[u8]) -> Result<OwnedFd, Errno> {
    // NONBLOCK: open(2) of an existing fifo fails with ENXIO instead of blocking the run.
    let flags = OFlags::CREATE | OFlags::TRUNC | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = openat(directory, name, flags, Mode::from_raw_mode(0o644))?;
    if FileType::from_raw_mode(fstat(&file)?.st_mode) == FileType::RegularFile { Ok(file) } else { Err(Errno::INVAL) }
}

fn write_all(file: &OwnedFd, mut contents: &[u8]) -> Result<(), Errno> {
    while !contents.is_empty() {
        match rustix::io::write(file, contents) {
            Ok(0) => return Err(Errno::IO),
            Ok(n) => contents = contents.get(n..).unwrap_or_default(),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}
