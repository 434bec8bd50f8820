//! Places for the connections of a socket, and which connection closes for another.
//!
//! A new connection gets a place as long as any other is without a request that has a good key: where all places
//! are taken, the one that has been so for longest closes. That is an idle connection, one that has sent no key
//! yet, or half a head. Requests with good keys keep their places until they are answered, also where they have
//! all of them: then others wait.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    sync::{Arc, Mutex, MutexGuard},
};

use tokio::{
    sync::{Notify, oneshot},
    time::Instant,
};

use crate::lock::lock;

/// The places of one socket.
pub struct Places {
    most: usize,
    state: Mutex<State>,
    /// One was given back, or is that of a connection that may close.
    changed: Notify,
}

#[derive(Default)]
struct State {
    /// The number of the last connection.
    last: u64,
    taken: BTreeMap<u64, Taken>,
}

struct Taken {
    /// Since when its connection is without a request that has a good key; none: it has one.
    without: Option<Instant>,
    /// The connection closes when this is dropped.
    _stays: oneshot::Sender<Infallible>,
}

/// The place of a connection; given back when dropped.
pub struct Place {
    places: Arc<Places>,
    number: u64,
}

impl Places {
    /// So many.
    pub fn new(most: usize) -> Arc<Self> {
        Arc::new(Places { most, state: Mutex::default(), changed: Notify::new() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing that holds it panics.
        lock(&self.state)
    }

    /// A place for a new connection, which closes when the receiver ends.
    pub async fn take(self: &Arc<Self>) -> (Place, oneshot::Receiver<Infallible>) {
        loop {
            if let Some(taken) = self.try_take() {
                return taken;
            }
            self.changed.notified().await;
        }
    }

    fn try_take(self: &Arc<Self>) -> Option<(Place, oneshot::Receiver<Infallible>)> {
        let mut state = self.state();
        if state.taken.len() >= self.most {
            let without = |(number, taken): (&u64, &Taken)| Some((taken.without?, *number));
            let (_, longest) = state.taken.iter().filter_map(without).min()?;
            state.taken.remove(&longest);
        }
        state.last += 1;
        let number = state.last;
        let (stays, closes) = oneshot::channel();
        state.taken.insert(number, Taken { without: Some(Instant::now()), _stays: stays });
        Some((Place { places: Arc::clone(self), number }, closes))
    }
}

impl Place {
    /// Its connection has a request with a good key.
    pub fn has_key(&self) {
        self.set(None);
    }

    /// Its connection has no request any more.
    pub fn is_idle(&self) {
        self.set(Some(Instant::now()));
        self.places.changed.notify_one();
    }

    fn set(&self, without: Option<Instant>) {
        // One that was closed for another has none.
        if let Some(taken) = self.places.state().taken.get_mut(&self.number) {
            taken.without = without;
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.state().taken.remove(&self.number);
        self.places.changed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use futures_util::FutureExt;
    use tokio::sync::oneshot::error::TryRecvError;

    use super::*;

    /// A place, and whether its connection is to close.
    struct Connection(Place, oneshot::Receiver<Infallible>);

    impl Connection {
        fn new(places: &Arc<Places>) -> Self {
            let (place, closes) = places.try_take().unwrap();
            Connection(place, closes)
        }

        fn closes(&mut self) -> bool {
            self.1.try_recv() == Err(TryRecvError::Closed)
        }
    }

    #[test]
    fn the_connection_that_has_had_no_good_key_for_longest_closes_for_another() {
        let places = Places::new(3);
        let [mut silent, mut idle, mut busy] = std::array::from_fn(|_| Connection::new(&places));
        idle.0.has_key();
        busy.0.has_key();
        idle.0.is_idle();
        let mut next = Connection::new(&places);
        assert_eq!([&mut silent, &mut idle, &mut busy].map(Connection::closes), [true, false, false]);
        let last = Connection::new(&places);
        // The control: one with a request stays, and so do those that came later.
        assert_eq!([&mut idle, &mut busy, &mut next].map(Connection::closes), [true, false, false]);
        // What those give back that have closed already is no place for another.
        drop((silent, idle));
        assert_eq!(places.state().taken.len(), 3);
        drop((busy, next, last));
        assert_eq!(places.state().taken.len(), 0);
    }

    #[tokio::test]
    async fn a_connection_waits_where_all_others_have_requests_with_good_keys() {
        let places = Places::new(2);
        let [mut one, other] = std::array::from_fn(|_| Connection::new(&places));
        one.0.has_key();
        other.0.has_key();
        let mut next = Box::pin(places.take());
        assert!(next.as_mut().now_or_never().is_none());
        // The answer of one is there, so it closes.
        one.0.is_idle();
        let (second, _closes) = next.await;
        assert!(one.closes());
        second.has_key();
        let mut next = Box::pin(places.take());
        assert!(next.as_mut().now_or_never().is_none());
        drop(other);
        next.await;
    }
}
