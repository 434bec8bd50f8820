//! `stockade serve`: the supervisor, and the workers that have the launcher's rights.
//!
//! The supervisor starts one front, which has no rights and speaks HTTP, and workers, which each
//! run one request at a time. Front and workers talk over sockets that the supervisor made. A worker
//! takes what the front says for hostile: it runs what the table of keys permits, and nothing else.
//! All of them end with the supervisor.

mod keeper;
mod notify;
mod supervisor;
mod templates;
mod watch;
mod worker;

use std::{io, os::unix::net::UnixStream, time::Duration};

pub use keeper::keep;
pub use supervisor::{NotTaken, Service, ServiceEnd, ServiceError, ServiceSettings, serve};
pub use templates::{ServedTemplate, ready_workers};
pub use worker::{WorkerError, work};

use stockade_protocol::service::Message;

/// How long another process of the service may leave a message unread.
const UNREAD: Duration = Duration::from_secs(20);

/// Sends a message.
fn send(mut socket: &UnixStream, message: &impl Message) -> io::Result<()> {
    io::Write::write_all(&mut socket, &message.to_frame())
}
