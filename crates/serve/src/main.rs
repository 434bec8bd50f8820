//! The companion `stockade-serve`: the HTTP side of `stockade serve`.
//!
//! It has no rights: it accepts connections at sockets that it was given, checks keys, keeps the
//! queue and passes requests on to workers, which judge them again. It ends with its supervisor.
//! It parses no policy and starts no program.
#![forbid(unsafe_code)]

mod admission;
mod asking;
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
use link::{SupervisorLink, WorkerLink};

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
    confine::confine(ids.transpose()?).map_err(|error| anyhow::anyhow!("could not {}: {}", error.step.name(), error.errno))?;
    // All others were closed.
    let socket = rustix::stdio::stdin().as_fd().try_clone_to_owned().context("the supervisor's socket")?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
    runtime.block_on(serve(socket))
}

/// Does what the supervisor says, until that ends or has it drain.
async fn serve(socket: OwnedFd) -> anyhow::Result<()> {
    let mut supervisor = SupervisorLink::new(socket)?;
    let mut front: Option<Arc<Front>> = None;
    let (mut settings, mut listeners) = (Vec::new(), Vec::new());
    let (wish, mut wishes) = tokio::sync::mpsc::unbounded_channel();
    loop {
        let next = tokio::select! {
            next = supervisor.next() => next,
            Some(wish) = wishes.recv() => {
                supervisor.send(&wish).await?;
                continue;
            }
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
                match known {
                    Some(front) => front.change(new),
                    None => front = Some(Arc::new(Front::new(new, wish.clone()))),
                }
            }
            (FromSupervisor::Listener(kind), Some(socket), Some(front)) => {
                listeners.push(listen::listen(kind, socket, Arc::clone(front))?);
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
            (FromSupervisor::NoKeeper(none), _, Some(front)) => front.sessions.refuse(none),
            (FromSupervisor::Ping, ..) => {}
            (FromSupervisor::Drain, _, Some(front)) => {
                front.drain();
                // Their sockets close with them.
                listeners.drain(..).for_each(|listener| listener.abort());
                front.drained().await;
                // Answers that are being written have a moment.
                tokio::time::sleep(listen::LAST_ANSWERS).await;
                return Ok(());
            }
            (message, ..) => bail!("the supervisor says {message:?} before its settings"),
        }
    }
}
