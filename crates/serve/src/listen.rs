//! Connections: how many there are, and how long their parts may take.
//!
//! HTTP/1.1 by hyper. A head may have 32 KiB, 64 fields and 10 s. A client that takes nothing of its
//! answer for 20 s is gone. A connection that cannot be
//! accepted for want of descriptors waits; it takes nothing from those that are there.

use std::{io, os::fd::OwnedFd, sync::Arc, time::Duration};

use axum::Router;
use hyper::{
    Request,
    body::Incoming,
    server::conn::http1,
    service::{Service, service_fn},
};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use stockade_protocol::service::ListenerKind;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, UnixListener},
    sync::{OwnedSemaphorePermit, Semaphore},
    task::JoinHandle,
};
use tokio_io_timeout::TimeoutStream;

use crate::{
    front::Front,
    http::{Peer, router},
};

/// Connections at a time, for each socket that listens.
const CONNECTIONS: usize = 1024;
const HEAD_BYTES: usize = 32 << 10;
const HEAD_FIELDS: usize = 64;
const HEAD_TIME: Duration = Duration::from_secs(10);
/// How long a client may take nothing of its answer.
const UNREAD: Duration = Duration::from_secs(20);
/// After a connection was refused for want of something.
const PAUSE: Duration = Duration::from_millis(100);
/// How long answers may take that are being written when the service ends.
pub const LAST_ANSWERS: Duration = Duration::from_millis(200);

/// Accepts connections at a socket, until the task is aborted.
///
/// # Errors
/// The socket cannot be watched.
pub fn listen(kind: ListenerKind, socket: OwnedFd, front: Arc<Front>) -> io::Result<JoinHandle<()>> {
    let connections = Arc::new(Semaphore::new(CONNECTIONS));
    let app = router(front);
    match kind {
        ListenerKind::Unix => {
            let listener = std::os::unix::net::UnixListener::from(socket);
            listener.set_nonblocking(true)?;
            let listener = UnixListener::from_std(listener)?;
            Ok(tokio::spawn(async move {
                loop {
                    let Ok(permit) = Arc::clone(&connections).acquire_owned().await else { return };
                    match listener.accept().await {
                        Ok((stream, _)) => {
                            let uid = stream.peer_cred().ok().map(|peer| peer.uid());
                            tokio::spawn(serve(stream, app.clone(), Peer { kind, uid }, permit));
                        }
                        Err(_) => tokio::time::sleep(PAUSE).await,
                    }
                }
            }))
        }
        ListenerKind::Tcp => {
            let listener = std::net::TcpListener::from(socket);
            listener.set_nonblocking(true)?;
            let listener = TcpListener::from_std(listener)?;
            Ok(tokio::spawn(async move {
                loop {
                    let Ok(permit) = Arc::clone(&connections).acquire_owned().await else { return };
                    match listener.accept().await {
                        Ok((stream, _)) => {
                            // Answers are written at once, and wait for no acknowledgement.
                            let _slower = stream.set_nodelay(true);
                            tokio::spawn(serve(stream, app.clone(), Peer { kind, uid: None }, permit));
                        }
                        Err(_) => tokio::time::sleep(PAUSE).await,
                    }
                }
            }))
        }
    }
}

async fn serve(stream: impl AsyncRead + AsyncWrite + Send + 'static, app: Router, peer: Peer, permit: OwnedSemaphorePermit) {
    let app = TowerToHyperService::new(app);
    // As a layer of the router it would have a copy of every route for each connection.
    let with_peer = service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(peer);
        app.call(request)
    });
    let mut stream = TimeoutStream::new(stream);
    stream.set_write_timeout(Some(UNREAD));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME)
        .max_buf_size(HEAD_BYTES)
        .max_headers(HEAD_FIELDS)
        .serve_connection(TokioIo::new(Box::pin(stream)), with_peer);
    // What the client did wrong, it was told, or has gone.
    let _closed = connection.await;
    drop(permit);
}
