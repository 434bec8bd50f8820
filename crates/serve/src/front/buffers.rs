//! The memory that requests and results may take together.
//!
//! What asks for more than is left gets a problem, and no result is cut. What hyper and the kernel
//! hold of a connection is not counted.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use axum::{body::Bytes, http::StatusCode};

use crate::problem::Problem;

/// Bytes of requests and results in memory.
pub(super) struct Buffers {
    used: AtomicU64,
    most: AtomicU64,
}

impl Buffers {
    pub(super) fn new(most: u64) -> Arc<Self> {
        Arc::new(Buffers { used: AtomicU64::new(0), most: AtomicU64::new(most) })
    }

    pub(super) fn set_most(&self, most: u64) {
        self.most.store(most, Relaxed);
    }

    /// An empty one.
    pub(super) fn buffer(self: &Arc<Self>) -> Buffer {
        Buffer { buffers: Arc::clone(self), bytes: 0 }
    }
}

/// Bytes that a request, or its result, has in memory; given back when dropped.
pub struct Buffer {
    buffers: Arc<Buffers>,
    bytes: u64,
}

impl Buffer {
    /// Takes more.
    ///
    /// # Errors
    /// All requests together have as much as they may.
    pub fn grow(&mut self, bytes: usize) -> Result<(), Problem> {
        let most = self.buffers.most.load(Relaxed);
        // One thread alone does all this.
        if self.buffers.used.load(Relaxed) + bytes as u64 > most {
            let detail =
                format!("requests and results in memory have {most} bytes together (`[limits] buffers`); try again when some have ended");
            return Err(Problem::new(StatusCode::SERVICE_UNAVAILABLE, "buffers_full", detail).after(1));
        }
        self.buffers.used.fetch_add(bytes as u64, Relaxed);
        self.bytes += bytes as u64;
        Ok(())
    }

    /// How many it has room for.
    pub fn bytes(&self) -> usize {
        self.bytes as usize
    }

    /// These bytes, which it has room for: they count until the last was written.
    pub fn hold(self, answer: Vec<u8>) -> Bytes {
        Bytes::from_owner(BufferedAnswer { answer, _buffer: self })
    }

    /// Gives some back.
    pub fn shrink(&mut self, bytes: usize) {
        let bytes = self.bytes.min(bytes as u64);
        self.buffers.used.fetch_sub(bytes, Relaxed);
        self.bytes -= bytes;
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.buffers.used.fetch_sub(self.bytes, Relaxed);
    }
}

/// An answer, with its room.
struct BufferedAnswer {
    answer: Vec<u8>,
    _buffer: Buffer,
}

impl AsRef<[u8]> for BufferedAnswer {
    fn as_ref(&self) -> &[u8] {
        &self.answer
    }
}
