//! The companion `stockade-serve`: the HTTP side of `stockade serve`.
//!
//! It has no rights: it accepts connections at sockets that it was given, checks keys, keeps the
//! queue and passes requests on to workers, which judge them again. It ends with its supervisor.
//! It parses no policy and starts no program.
#![forbid(unsafe_code)]

mod admission;
mod auth;
mod batch;
mod confine;
mod console;
mod denials;
mod facade_routes;
mod front;
mod history;
mod http;
mod keys;
mod link;
mod listen;
mod lock;
mod log;
mod mcp;
mod metrics;
mod problem;
mod sessions;
#[cfg(test)]
mod specification;
mod watch;

use std::{
    io::Write,
    os::fd::{AsFd, OwnedFd},
    process::ExitCode,
    sync::Arc,
};

use anyhow::{Context, bail};
use stockade_protocol::service::{FromSupervisor, FromWorker, Settings};

use front::Front;
use link::WorkerLink;

const FAILED: u8 = 125;

fn main() -> ExitCode {
    match start() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _unheard = writeln!(std::io::stderr(), "stockade-serve: {error:#}");
            ExitCode::from(FAILED)
        }
    }
}

fn start() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let (version, ids) = (arguments.next(), arguments.next());
    let own = env!("CARGO_PKG_VERSION");
    if version.as_deref() != Some(own) {
        bail!("it is started by `stockade serve` of the same version, {own}; install both from one package or one build");
    }
    let ids = ids.map(|text| {
        text.split_once(':').and_then(|(uid, gid)| Some((uid.parse().ok()?, gid.parse().ok()?))).context("the ids of its user")
    });
    let descriptors =
        confine::confine(ids.transpose()?).map_err(|error| anyhow::anyhow!("could not {}: {}", error.step.name(), error.errno))?;
    // All others were closed.
    let socket = rustix::stdio::stdin().as_fd().try_clone_to_owned().context("the supervisor's socket")?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
    runtime.block_on(serve(socket, descriptors))
}

/// Does what the supervisor says, until that ends or has it drain.
async fn serve(socket: OwnedFd, descriptors: u64) -> anyhow::Result<()> {
    let (mut supervisor, to_supervisor) = link::supervisor(socket)?;
    let mut front: Option<Arc<Front>> = None;
    let (mut settings, mut listeners) = (Vec::new(), Vec::new());
    let (wish, wishes) = tokio::sync::mpsc::unbounded_channel();
    let mut telling = tokio::spawn(to_supervisor.tell(wishes));
    loop {
        let next = tokio::select! {
            next = supervisor.next() => next,
            told = &mut telling => told?.and(Err(link::LinkError::Closed)),
        };
        let (message, descriptor) = match next {
            Ok(next) => next,
            Err(link::LinkError::Closed) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        match (message, descriptor, &front) {
            (FromSupervisor::SettingsPart(part), ..) => settings.extend(part),
            (FromSupervisor::SettingsEnd, _, known) => {
                let new: Settings = serde_json::from_slice(&std::mem::take(&mut settings)).context("the supervisor's settings")?;
                confine::limit_memory(new.max_buffers).context("a limit of its memory")?;
                match known {
                    Some(front) => front.change(new),
                    None => front = Some(Arc::new(Front::new(new, wish.clone()))),
                }
            }
            (FromSupervisor::Listener(kind), Some(socket), Some(front)) => {
                let connections = listen::connections(&front.settings(), descriptors)?;
                listeners.push(listen::listen(kind, socket, Arc::clone(front), connections)?);
            }
            (FromSupervisor::Worker, Some(socket), Some(front)) => {
                front.worker_came();
                let (mut worker, front) = (WorkerLink::new(socket)?, Arc::clone(front));
                tokio::spawn(async move {
                    if let Ok(FromWorker::Idle(prepared)) = worker.next().await {
                        front.add_idle(worker, prepared);
                    }
                });
            }
            (FromSupervisor::Keeper(of), Some(socket), Some(front)) => front.sessions.add(front, of, WorkerLink::new(socket)?),
            // No descriptor was free: it has lost its front, and ends.
            (FromSupervisor::Worker | FromSupervisor::Keeper(_), None, Some(_)) => {}
            (FromSupervisor::NoKeeper(none), _, Some(front)) => front.sessions.refuse(none),
            (FromSupervisor::Ping, ..) => {}
            (FromSupervisor::Drain, _, Some(front)) => {
                front.drain();
                // Their sockets close with them.
                listeners.drain(..).for_each(|listener| listener.abort());
                front.drained().await;
                // The supervisor says when it waits no longer. Small answers have a moment.
                front.all_answered().await;
                tokio::time::sleep(listen::LAST_ANSWERS).await;
                return Ok(());
            }
            (message, ..) => bail!("the supervisor says {message:?}, which is for another process or comes before the settings"),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use std::{
        io::{Error, IoSlice, Write},
        os::unix::net::{UnixListener, UnixStream},
        time::Duration,
    };

    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    use stockade_protocol::service::{Capacity, Credential, Key, ListenerKind, Message, Scope};

    use super::*;

    /// More wishes, and more settings, than a socket holds.
    const MANY: usize = 256;
    /// So many bytes of wishes leave no room for one more.
    const FULL: u64 = 128 << 10;

    fn send_with(socket: &UnixStream, message: &FromSupervisor, descriptor: &impl AsFd) {
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let files = [descriptor.as_fd()];
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(&files)));
        sendmsg(socket, &[IoSlice::new(&message.to_frame().unwrap())], &mut ancillary, SendFlags::empty()).unwrap();
    }

    /// What a supervisor that reads nothing can still tell a front of which clients want so many sessions.
    fn told_while_it_wants(sessions: usize) -> Result<(), Error> {
        let key = Key {
            id: "a".to_owned(),
            credential: Credential::Uid(rustix::process::getuid().as_raw()),
            policies: vec!["p".to_owned()],
            scopes: vec![Scope::Keep],
            running: 1,
            waiting: 1,
            runs_per_minute: None,
            cpu_per_hour: None,
            weight: 1,
            expires: None,
            sessions: MANY as u32,
        };
        let capacity = Capacity { sessions: MANY as u32, ..Capacity::default() };
        let settings = Settings { keys: vec![key], capacity, max_body: 1 << 20, max_buffers: 1 << 30, ..Settings::default() };
        let (mut ours, its) = UnixStream::pair().unwrap();
        let front = std::thread::spawn(|| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(serve(its.into(), 1024))
        });
        let place = std::env::temp_dir().join(format!("stockade-front-{}-{sessions}", std::process::id()));
        let listener = UnixListener::bind(&place).unwrap();
        for message in [FromSupervisor::SettingsPart(serde_json::to_vec(&settings).unwrap()), FromSupervisor::SettingsEnd] {
            ours.write_all(&message.to_frame().unwrap()).unwrap();
        }
        send_with(&ours, &FromSupervisor::Listener(ListenerKind::Unix), &listener);
        let body = format!("{{\"labels\": {{\"label\": \"{}\"}}}}", "x".repeat(15 << 10));
        let fields = format!("Host: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n", body.len());
        let clients: Vec<UnixStream> = (0..sessions)
            .map(|_| {
                let mut client = UnixStream::connect(&place).unwrap();
                write!(client, "POST /v1/sessions HTTP/1.1\r\n{fields}\r\n{body}").unwrap();
                client
            })
            .collect();
        std::fs::remove_file(&place).unwrap();
        // Its wishes fill the socket.
        while sessions > 0 && rustix::io::ioctl_fionread(&ours).unwrap() < FULL {
            std::thread::sleep(Duration::from_millis(1));
        }
        ours.set_write_timeout(Some(Duration::from_secs(5))).unwrap();
        let part = FromSupervisor::SettingsPart(vec![b' '; 60 << 10]).to_frame().unwrap();
        let told = (0..MANY).try_for_each(|_| ours.write_all(&part));
        drop((ours, clients));
        // It ends with the supervisor, with an error or without.
        let _ended = front.join().unwrap();
        told
    }

    #[test]
    fn a_front_hears_a_supervisor_that_does_not_hear_it() {
        told_while_it_wants(0).unwrap();
        told_while_it_wants(MANY / 2).unwrap();
    }
}
