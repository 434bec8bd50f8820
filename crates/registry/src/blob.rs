//! A blob as it comes: exactly the bytes that its descriptor says, or an error. A transfer that breaks
//! goes on where it stopped.

use std::{
    io::{self, Read},
    time::{Duration, Instant},
};

use stockade_images::Digest;
use ureq::{
    BodyReader, Error,
    http::{StatusCode, header},
};

use crate::{
    FetchError,
    client::{Attempts, Kind, Registry, broken},
};

/// Bytes of each second, below which a server only seems to send.
const MIN_PACE: u64 = 1 << 10;
/// Bytes that are read at once of what is left out.
const SKIPPED_AT_ONCE: usize = 64 << 10;

/// A blob of a registry, which is asked for when it is read. Its errors have a [`FetchError`] inside.
pub struct Blob {
    registry: Registry,
    digest: Digest,
    size: u64,
    has: u64,
    transfer: Option<Transfer>,
    attempts: Attempts,
}

/// One answer with the blob, or with the rest of it.
struct Transfer {
    server: String,
    body: BodyReader<'static>,
    /// Since when, and how many bytes since then.
    pace: (Instant, u64),
}

impl Transfer {
    /// Counts bytes that came.
    fn check_pace(&mut self, count: usize, silence: Duration) -> Result<(), FetchError> {
        self.pace.1 += count as u64;
        let window = silence * 2;
        if self.pace.0.elapsed() > window {
            if self.pace.1 < MIN_PACE * window.as_secs() {
                let why = format!("it sent {} bytes in {} s", self.pace.1, window.as_secs());
                return Err(FetchError::Broken { server: self.server.clone(), why });
            }
            self.pace = (Instant::now(), 0);
        }
        Ok(())
    }

    /// Leaves out what is here already, of an answer that begins at the beginning.
    fn skip(&mut self, mut bytes: u64, silence: Duration) -> Result<(), FetchError> {
        let mut buffer = vec![0; SKIPPED_AT_ONCE];
        while bytes > 0 {
            let most = usize::try_from(bytes).unwrap_or(usize::MAX).min(SKIPPED_AT_ONCE);
            match self.body.read(buffer.get_mut(..most).unwrap_or_default()) {
                // What is read next says that it has ended.
                Ok(0) => return Ok(()),
                Ok(count) => {
                    self.check_pace(count, silence)?;
                    bytes -= count as u64;
                }
                Err(error) => return Err(broken(&self.server, Error::from(error), silence)),
            }
        }
        Ok(())
    }
}

impl Blob {
    pub(crate) fn new(registry: Registry, digest: Digest, size: u64) -> Self {
        let attempts = registry.attempts();
        Blob { registry, digest, size, has: 0, transfer: None, attempts }
    }

    fn what(&self) -> String {
        format!("the blob {}", self.digest)
    }

    /// Reads some, from the answer that there is or from another.
    fn next(&mut self, buffer: &mut [u8]) -> Result<usize, FetchError> {
        loop {
            match self.attempt(buffer) {
                Err(error) => {
                    self.transfer = None;
                    self.attempts.after(error)?;
                }
                done => return done,
            }
        }
    }

    fn attempt(&mut self, buffer: &mut [u8]) -> Result<usize, FetchError> {
        let mut transfer = match self.transfer.take() {
            Some(transfer) => transfer,
            None => self.ask()?,
        };
        let timeouts = self.registry.timeouts();
        // A byte beyond the end is looked for, too.
        let room = usize::try_from(self.size - self.has).unwrap_or(usize::MAX);
        let mut beyond = [0];
        let place = if room == 0 { &mut beyond[..] } else { buffer.get_mut(..buffer.len().min(room)).unwrap_or_default() };
        let count = match transfer.body.read(place) {
            // All is here; its digest decides.
            Err(_) if room == 0 => 0,
            Err(error) => return Err(broken(&transfer.server, Error::from(error), timeouts.silence)),
            Ok(0) if room > 0 => {
                let why = format!("it ended after {} of {} bytes", self.has, self.size);
                return Err(FetchError::Broken { server: transfer.server, why });
            }
            Ok(count) if room == 0 && count > 0 => return Err(self.length(&transfer.server, String::from("more bytes"))),
            Ok(count) => count,
        };
        transfer.check_pace(count, timeouts.silence)?;
        self.has += count as u64;
        self.transfer = Some(transfer);
        Ok(count)
    }

    /// Asks for what is still missing.
    fn ask(&self) -> Result<Transfer, FetchError> {
        let answer = self.registry.get(&format!("blobs/{}", self.digest), &self.what(), Kind::Blob { from: self.has })?;
        let begin = format!("bytes {}-", self.has);
        let goes_on = answer.status == StatusCode::PARTIAL_CONTENT;
        if goes_on && !answer.text(header::CONTENT_RANGE).is_some_and(|range| self.has > 0 && range.starts_with(&begin)) {
            return Err(FetchError::Answer { server: answer.server, what: format!("it sends another part of {}", self.what()) });
        }
        let skipped = if goes_on { self.has } else { 0 };
        let said = answer.text(header::CONTENT_LENGTH).and_then(|said| said.parse::<u64>().ok());
        if let Some(said) = said.filter(|said| *said != self.size - skipped) {
            return Err(self.length(&answer.server, format!("{} bytes", skipped.saturating_add(said))));
        }
        let mut transfer = Transfer { server: answer.server, body: answer.body, pace: (Instant::now(), 0) };
        if !goes_on && self.has > 0 {
            transfer.skip(self.has, self.registry.timeouts().silence)?;
        }
        Ok(transfer)
    }

    fn length(&self, server: &str, got: String) -> FetchError {
        FetchError::Length { server: server.to_owned(), what: self.what(), wanted: self.size, got }
    }
}

impl Read for Blob {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        self.next(buffer).map_err(io::Error::other)
    }
}
