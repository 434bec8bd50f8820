//! What a client holds of its run: the wait for the answer, or the events as they come.
//!
//! A client that goes cancels its run, unless the run was detached from it.

use std::{sync::Arc, time::Duration};

use axum::body::Bytes;
use tokio::runtime::Handle;

use super::{Front, RunNumber};
use crate::log::{Ending, Format, Reader, RunLog};

/// A run whose stream nobody reads is cancelled after this time: its client may come back.
const UNREAD: Duration = Duration::from_secs(10);

/// A run that was let in. Dropping it cancels the run, unless it was detached.
pub struct RunHandle {
    pub(super) front: Arc<Front>,
    pub(super) number: RunNumber,
    pub(super) log: Arc<RunLog>,
    pub(super) cancels: bool,
}

impl RunHandle {
    /// Waits for what comes of it.
    ///
    /// # Errors
    /// It was not run, or its result is lost.
    pub async fn answer(&self) -> Ending {
        self.log.ended().await
    }

    /// Lets it go on by itself.
    pub fn detach(mut self) -> Arc<RunLog> {
        self.cancels = false;
        Arc::clone(&self.log)
    }

    /// Its events. `cancels`: it is cancelled when nothing has read them for some time.
    pub fn into_events(self, format: Format, cancels: bool) -> Option<EventStream> {
        let (front, number) = (Arc::clone(&self.front), self.number.clone());
        let log = self.detach();
        if cancels {
            log.must_be_read();
        }
        EventStream::new(front, number, log, 0, format)
    }
}

impl Drop for RunHandle {
    fn drop(&mut self) {
        if self.cancels {
            self.front.cancel(&self.number, |_| true);
        }
    }
}

/// The events of a run, for one client.
pub struct EventStream {
    front: Arc<Front>,
    number: RunNumber,
    log: Arc<RunLog>,
    /// None at its end.
    reader: Option<Reader>,
    format: Format,
}

impl EventStream {
    /// Those that come `after` one; none: the log does not reach so far back.
    pub fn new(front: Arc<Front>, number: RunNumber, log: Arc<RunLog>, after: u64, format: Format) -> Option<Self> {
        let reader = log.read(after)?;
        Some(EventStream { front, number, log, reader: Some(reader), format })
    }

    /// The next bytes, in parts; none at the end.
    pub async fn next(&mut self) -> Option<Vec<Bytes>> {
        self.reader.as_mut()?.next(self.format).await
    }
}

impl Drop for EventStream {
    fn drop(&mut self) {
        self.reader = None;
        if self.log.unread_for().is_none() || self.log.ending().is_some() {
            return;
        }
        // None when the process ends, and all runs with it.
        let Ok(runtime) = Handle::try_current() else { return };
        let (front, number, log) = (Arc::clone(&self.front), self.number.clone(), Arc::clone(&self.log));
        runtime.spawn(async move {
            tokio::time::sleep(UNREAD).await;
            // Another reader may have come, and gone later.
            if log.unread_for().is_some_and(|time| time >= UNREAD) {
                front.cancel(&number, |_| true);
            }
        });
    }
}
