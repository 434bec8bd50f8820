//! How long a client may take for what it sends: 60 s until a request begins, and 10 s for the rest of its
//! head.
//!
//! hyper has one time for both, from the end of the last answer on, so its own is not used. The time of a
//! body is taken where the body is read, and that of an answer by the stream below this one. A head whose
//! beginning came along with the request before it has the longer time until its next byte.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard},
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::body::{Body, Bytes};
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Instant, Sleep, sleep_until},
};

use super::places::Place;
use crate::lock::lock;

/// How long a connection may ask for nothing.
pub const IDLE_TIME: Duration = Duration::from_secs(60);
/// How long a head may take from its first byte on.
pub const HEAD_TIME: Duration = Duration::from_secs(10);

/// How far a connection is with its request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// No byte of a request has come, and none will after this.
    Idle { until: Instant },
    /// Its head has to be whole by then.
    Head { until: Instant },
    /// It is answered.
    Answer,
    /// The last bytes of the answer are to be written.
    LastBytes,
}

/// The phase of one connection, and its place: its stream and its requests change both in turn.
pub struct Exchange {
    phase: Mutex<Phase>,
    place: Place,
}

impl Exchange {
    /// That of a new connection.
    pub fn new(place: Place) -> Arc<Self> {
        Arc::new(Exchange { phase: Mutex::new(Phase::Idle { until: Instant::now() + IDLE_TIME }), place })
    }

    /// The request has a good key.
    pub fn has_key(&self) {
        self.place.has_key();
    }

    fn phase(&self) -> MutexGuard<'_, Phase> {
        // Nothing that holds it panics.
        lock(&self.phase)
    }

    /// A head is whole.
    pub fn asks(&self) {
        *self.phase() = Phase::Answer;
    }

    /// The body of an answer, with whose end the answer ends.
    pub fn answer(self: &Arc<Self>, body: Body) -> AnswerBody {
        AnswerBody { body, exchange: Arc::clone(self) }
    }

    fn reads_bytes(&self) {
        let mut phase = self.phase();
        if matches!(*phase, Phase::Idle { .. }) {
            *phase = Phase::Head { until: Instant::now() + HEAD_TIME };
        }
    }

    /// All that there was to write is written. Whether that was an answer.
    fn wrote_all(&self) -> bool {
        let mut phase = self.phase();
        let is_answered = *phase == Phase::LastBytes;
        if is_answered {
            *phase = Phase::Idle { until: Instant::now() + IDLE_TIME };
            self.place.is_idle();
        }
        is_answered
    }

    /// When the connection is closed unless it sends something; none: it need not.
    fn until(&self) -> Option<Instant> {
        match *self.phase() {
            Phase::Idle { until } | Phase::Head { until } => Some(until),
            Phase::Answer | Phase::LastBytes => None,
        }
    }
}

/// A stream that fails where a request does not come in its time.
pub struct TimedStream<S> {
    stream: S,
    exchange: Arc<Exchange>,
    timer: Pin<Box<Sleep>>,
}

impl<S> TimedStream<S> {
    /// The same stream.
    pub fn new(stream: S, exchange: Arc<Exchange>) -> Self {
        TimedStream { stream, exchange, timer: Box::pin(sleep_until(Instant::now())) }
    }

    /// Ready when the time is over; else the task is woken then.
    fn poll_late(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let Some(until) = self.exchange.until() else { return Poll::Pending };
        if self.timer.deadline() != until {
            self.timer.as_mut().reset(until);
        }
        self.timer.as_mut().poll(context)
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for TimedStream<S> {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = into.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, into);
        if read.is_pending() {
            return self.poll_late(context).map(|()| Err(io::ErrorKind::TimedOut.into()));
        }
        if into.filled().len() > before {
            self.exchange.reads_bytes();
        }
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for TimedStream<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(mut self: Pin<&mut Self>, context: &mut Context<'_>, parts: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    /// hyper calls it after the last byte that it has.
    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(Pin::new(&mut self.stream).poll_flush(context))?;
        if self.exchange.wrote_all() {
            // Nothing else wakes the task at that time. It is not over yet.
            let _later = self.poll_late(context);
        }
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

/// The body of an answer. hyper drops it when it has taken all of it.
pub struct AnswerBody {
    body: Body,
    exchange: Arc<Exchange>,
}

impl HttpBody for AnswerBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for AnswerBody {
    fn drop(&mut self) {
        *self.exchange.phase() = Phase::LastBytes;
    }
}
