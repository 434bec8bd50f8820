//! Connections: how many there are, and how long their parts may take.
//!
//! HTTP/1.1 by hyper. A head may have 32 KiB, 64 fields and 10 s. A connection that asks for nothing for 60 s is
//! closed. A client that takes nothing of its answer for 20 s is gone. Where there are as many connections as may
//! be, one that has no request with a good key closes for a new one. A connection that cannot be accepted for want
//! of descriptors waits; it takes nothing from those that are there.

mod places;
mod timed;

use std::{convert::Infallible, io, os::fd::OwnedFd, sync::Arc, time::Duration};

use axum::Router;
use hyper::{
    Request,
    body::Incoming,
    server::conn::http1,
    service::{Service, service_fn},
};
use hyper_util::{rt::TokioIo, service::TowerToHyperService};
use stockade_protocol::service::{ListenerKind, Settings};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, UnixListener},
    sync::oneshot,
    task::JoinHandle,
};
use tokio_io_timeout::TimeoutStream;

use crate::{
    front::Front,
    http::{Peer, router},
};
use places::{Place, Places};
pub use timed::Exchange;
use timed::TimedStream;

/// Connections at a time, for each socket that listens; fewer where there are not so many descriptors.
const CONNECTIONS: u64 = 1024;
/// With fewer it serves nothing.
const MIN_CONNECTIONS: u64 = 16;
/// Descriptors of the front's own.
const OWN_DESCRIPTORS: u64 = 64;
const HEAD_BYTES: usize = 32 << 10;
const HEAD_FIELDS: usize = 64;
/// How long a client may take nothing of its answer.
const UNREAD: Duration = Duration::from_secs(20);
/// After a connection was refused for want of something.
const PAUSE: Duration = Duration::from_millis(100);
/// How long small answers may take that are being written when the service ends.
pub const LAST_ANSWERS: Duration = Duration::from_millis(200);

/// How many connections each of two sockets may have, where there may be so many descriptors: each worker and each
/// session has one, too.
///
/// # Errors
/// There is no room for connections.
pub fn connections(settings: &Settings, descriptors: u64) -> anyhow::Result<usize> {
    let beside = u64::from(settings.workers) + u64::from(settings.capacity.sessions) + OWN_DESCRIPTORS;
    let each = (descriptors.saturating_sub(beside) / 2).min(CONNECTIONS);
    if each < MIN_CONNECTIONS {
        anyhow::bail!(
            "{descriptors} open files are too few for {} workers, {} sessions and {MIN_CONNECTIONS} connections at each of two sockets; raise the limit (ulimit -Hn, LimitNOFILE= of the unit), or lower `[capacity] sessions`",
            settings.workers,
            settings.capacity.sessions,
        );
    }
    Ok(each as usize)
}

/// Accepts so many connections at a socket, until the task is aborted.
///
/// # Errors
/// The socket cannot be watched.
pub fn listen(kind: ListenerKind, socket: OwnedFd, front: Arc<Front>, connections: usize) -> io::Result<JoinHandle<()>> {
    let places = Places::new(connections);
    let app = router(front);
    match kind {
        ListenerKind::Unix => {
            let listener = std::os::unix::net::UnixListener::from(socket);
            listener.set_nonblocking(true)?;
            let listener = UnixListener::from_std(listener)?;
            Ok(tokio::spawn(async move {
                loop {
                    match listener.accept().await {
                        Ok((stream, _)) => {
                            let uid = stream.peer_cred().ok().map(|peer| peer.uid());
                            tokio::spawn(serve(stream, app.clone(), Peer { kind, uid }, places.take().await));
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
                    match listener.accept().await {
                        Ok((stream, _)) => {
                            // Answers are written at once, and wait for no acknowledgement.
                            let _slower = stream.set_nodelay(true);
                            tokio::spawn(serve(stream, app.clone(), Peer { kind, uid: None }, places.take().await));
                        }
                        Err(_) => tokio::time::sleep(PAUSE).await,
                    }
                }
            }))
        }
    }
}

/// Serves a connection until it ends, or has to close for another.
async fn serve(
    stream: impl AsyncRead + AsyncWrite + Send + 'static,
    app: Router,
    peer: Peer,
    (place, closes): (Place, oneshot::Receiver<Infallible>),
) {
    let app = TowerToHyperService::new(app);
    let exchange = Exchange::new(place);
    let mut stream = TimeoutStream::new(stream);
    stream.set_write_timeout(Some(UNREAD));
    let stream = TimedStream::new(Box::pin(stream), Arc::clone(&exchange));
    // As a layer of the router it would have a copy of every route for each connection.
    let with_peer = service_fn(move |mut request: Request<Incoming>| {
        exchange.asks();
        request.extensions_mut().insert(peer);
        request.extensions_mut().insert(Arc::clone(&exchange));
        let (answer, exchange) = (app.call(request), Arc::clone(&exchange));
        async move { Ok::<_, Infallible>(answer.await?.map(|body| exchange.answer(body))) }
    });
    // `TimedStream` has the times of heads.
    let connection = http1::Builder::new()
        .header_read_timeout(None::<Duration>)
        .max_buf_size(HEAD_BYTES)
        .max_headers(HEAD_FIELDS)
        .serve_connection(TokioIo::new(stream), with_peer);
    tokio::select! {
        // First: one that closes begins no request.
        biased;
        _ = closes => {}
        // What the client did wrong, it was told, or has gone.
        _ = connection => {}
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use axum::routing::get;
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex},
        time::{Instant, sleep},
    };

    use super::*;

    const HEAD: &[u8] = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n";
    /// What an answer takes.
    const SLOW: Duration = Duration::from_secs(300);

    fn connect() -> DuplexStream {
        let (client, its) = duplex(4096);
        let app = Router::new().route("/", get(|| async { "done" })).route(
            "/slow",
            get(|| async {
                sleep(SLOW).await;
                "done"
            }),
        );
        tokio::spawn(async { serve(its, app, Peer { kind: ListenerKind::Tcp, uid: None }, Places::new(1).take().await).await });
        client
    }

    /// Reads an answer, which ends in `done`.
    async fn answered(client: &mut DuplexStream) {
        let mut said = Vec::new();
        while !said.ends_with(b"done") {
            assert!(client.read_buf(&mut said).await.unwrap() > 0, "{}", String::from_utf8_lossy(&said));
        }
    }

    /// The seconds from now to the end of a connection.
    async fn seconds_to_end(mut client: DuplexStream) -> u64 {
        let begun = Instant::now();
        assert_eq!(client.read_to_end(&mut Vec::new()).await.unwrap(), 0);
        begun.elapsed().as_secs()
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_that_asks_for_nothing_is_closed_after_a_minute() {
        assert_eq!(seconds_to_end(connect()).await, 60);
        // The control: it is answered whenever it asks before, and the time begins anew.
        let mut client = connect();
        for _ in 0..3 {
            sleep(Duration::from_secs(59)).await;
            client.write_all(HEAD).await.unwrap();
            answered(&mut client).await;
        }
        assert_eq!(seconds_to_end(client).await, 60);
    }

    #[tokio::test(start_paused = true)]
    async fn a_head_that_has_begun_has_ten_seconds_however_it_comes() {
        for answers in 0..2 {
            let mut client = connect();
            for _ in 0..answers {
                client.write_all(HEAD).await.unwrap();
                answered(&mut client).await;
            }
            sleep(Duration::from_secs(30)).await;
            let begun = Instant::now();
            // Each byte comes soon after the one before.
            for byte in HEAD {
                if client.write_all(&[*byte]).await.is_err() {
                    break;
                }
                sleep(Duration::from_secs(1)).await;
            }
            assert!((10..=11).contains(&begun.elapsed().as_secs()), "{:?}", begun.elapsed());
        }
        // The control: one that is whole in time.
        let mut client = connect();
        for part in HEAD.chunks(5) {
            client.write_all(part).await.unwrap();
            sleep(Duration::from_secs(1)).await;
        }
        answered(&mut client).await;
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_may_take_longer_than_a_connection_may_be_idle() {
        let (mut client, begun) = (connect(), Instant::now());
        client.write_all(b"GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n").await.unwrap();
        answered(&mut client).await;
        assert_eq!(begun.elapsed(), SLOW);
        assert_eq!(seconds_to_end(client).await, 60);
    }
}
