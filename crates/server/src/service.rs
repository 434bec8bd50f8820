//! `stockade serve`: the supervisor, and the workers that have the launcher's rights.
//!
//! The supervisor starts one front, which has no rights and speaks HTTP, workers, which each run one
//! request at a time, a keeper for each session, and one process at a time that makes the image of a
//! template. Front and workers talk over sockets that the supervisor made. A worker takes what the
//! front says for hostile: it runs what the table of keys permits, and nothing else. All of them end
//! with the supervisor; keepers alone outlive a front.

mod front_watch;
mod keeper;
mod notify;
mod supervisor;
mod templates;
mod worker;

use std::{
    fs::File,
    io::{self, Write},
    os::{fd::OwnedFd, unix::net::UnixStream},
    time::Duration,
};

pub use keeper::keep;
pub use supervisor::{NotTaken, Reading, Service, ServiceEnd, ServiceError, ServiceSettings, serve};
pub use templates::{ServedTemplate, ready_workers};
pub use worker::{WorkerError, work};

use rustix::{
    fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create},
    time::{ClockId, Timespec, clock_gettime},
};
use stockade_protocol::service::Message;

/// How long another process of the service may leave a message unread.
const UNREAD: Duration = Duration::from_secs(20);

/// Sends a message.
fn send(mut socket: &UnixStream, message: &impl Message) -> io::Result<()> {
    socket.write_all(&message.to_frame().map_err(io::Error::other)?)
}

/// For `poll`.
fn timespec(time: Duration) -> Timespec {
    Timespec { tv_sec: time.as_secs().cast_signed(), tv_nsec: i64::from(time.subsec_nanos()) }
}

/// The kernel's clock that [`std::time::Instant`] reads, which all processes of a host have in common.
fn monotonic_ms() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec.cast_unsigned() * 1000 + now.tv_nsec.cast_unsigned() / 1_000_000
}

/// A file in memory that nothing can change: what is too long for a message, or for its reader to take
/// at once.
fn sealed_file(text: &[u8]) -> io::Result<OwnedFd> {
    let mut file = File::from(memfd_create(c"stockade-text", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
    file.write_all(text)?;
    fcntl_add_seals(&file, SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL)?;
    Ok(file.into())
}
