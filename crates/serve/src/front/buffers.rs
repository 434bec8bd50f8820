//! The memory that requests and results may take together.
//!
//! What asks for more than is left gets a problem, and no result is cut. An answer that may have more than some
//! KiB counts until its last byte was written or its client has gone; a kept result has one copy for all who ask
//! for it. Of several keys none has more than half of it, or than the largest body where that is more. A result
//! counts when it is whole, and a part of a session's file when it has come: what a worker is just sending is not
//! counted, nor what hyper and the kernel hold of a connection.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard},
};

use axum::{body::Bytes, http::StatusCode};

use crate::{lock::lock, problem::Problem};

/// Bytes of requests and results in memory.
pub(super) struct Buffers(Mutex<State>);

struct State {
    most: u64,
    /// Of one key.
    most_of_key: u64,
    used: u64,
    of_keys: BTreeMap<Arc<str>, u64>,
}

impl Buffers {
    /// None is used yet.
    pub(super) fn new(most: u64, keys: usize, body: u64) -> Arc<Self> {
        let buffers = Buffers(Mutex::new(State { most, most_of_key: 0, used: 0, of_keys: BTreeMap::new() }));
        buffers.change(most, keys, body);
        Arc::new(buffers)
    }

    /// There may be so many from now on, for so many keys, whose bodies have at most so many.
    pub(super) fn change(&self, most: u64, keys: usize, body: u64) {
        let mut state = self.state();
        (state.most, state.most_of_key) = (most, if keys > 1 { body.clamp(most / 2, most) } else { most });
    }

    /// Whether nothing is in memory.
    pub(super) fn are_empty(&self) -> bool {
        self.state().used == 0
    }

    /// An empty one of a key.
    pub(super) fn buffer(self: &Arc<Self>, key: &str) -> Buffer {
        Buffer { buffers: Arc::clone(self), key: Arc::from(key), bytes: 0 }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.0)
    }
}

/// Bytes that a request, or its result, has in memory; given back when dropped.
pub struct Buffer {
    buffers: Arc<Buffers>,
    key: Arc<str>,
    bytes: u64,
}

impl Buffer {
    /// Takes more.
    ///
    /// # Errors
    /// The key's requests, or all together, have as much as they may.
    pub fn grow(&mut self, bytes: usize) -> Result<(), Problem> {
        let mut state = self.buffers.state();
        let more = bytes as u64;
        let of_key = state.of_keys.get(&self.key).copied().unwrap_or(0) + more;
        let full = |whose: String| {
            let detail = format!("{whose} in memory (`[limits] buffers`); try again when some have ended");
            Err(Problem::new(StatusCode::SERVICE_UNAVAILABLE, "buffers_full", detail).after(1))
        };
        if state.used + more > state.most {
            return full(format!("requests and results of all keys may have {} bytes", state.most));
        }
        if of_key > state.most_of_key {
            return full(format!("requests and results of key {} may have {} bytes", self.key, state.most_of_key));
        }
        state.used += more;
        state.of_keys.insert(Arc::clone(&self.key), of_key);
        self.bytes += more;
        Ok(())
    }

    /// An empty one of the same key.
    pub fn another(&self) -> Self {
        self.buffers.buffer(&self.key)
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
        self.bytes -= bytes;
        let mut state = self.buffers.state();
        state.used -= bytes;
        let left = state.of_keys.get(&self.key).copied().unwrap_or(0).saturating_sub(bytes);
        if left == 0 {
            state.of_keys.remove(&self.key);
        } else {
            state.of_keys.insert(Arc::clone(&self.key), left);
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.shrink(self.bytes());
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::*;

    #[test]
    fn no_key_takes_the_room_of_all() {
        let buffers = Buffers::new(100, 2, 10);
        let (mut one, mut more, mut other) = (buffers.buffer("a"), buffers.buffer("a"), buffers.buffer("b"));
        one.grow(30).unwrap();
        more.grow(20).unwrap();
        let refused = more.grow(1).err().unwrap();
        assert!(refused.reason == "buffers_full" && refused.detail.contains("key a may have 50"), "{}", refused.detail);
        // The control: there is room for another, and what is given back is there again.
        other.grow(50).unwrap();
        assert!(other.grow(1).err().unwrap().detail.contains("all keys may have 100"));
        one.shrink(10);
        more.grow(10).unwrap();
        let held = more.hold(vec![0; 30]);
        drop((one, other));
        assert!(buffers.buffer("a").grow(21).is_err());
        drop(held);
        buffers.buffer("a").grow(50).unwrap();
        // A key that is alone has all.
        buffers.change(100, 1, 10);
        buffers.buffer("a").grow(100).unwrap();
        // The largest body finds room, however many keys there are.
        buffers.change(100, 2, 70);
        buffers.buffer("a").grow(70).unwrap();
        assert!(buffers.buffer("a").grow(71).is_err());
        assert!(buffers.state().used == 0 && buffers.state().of_keys.is_empty());
    }
}
