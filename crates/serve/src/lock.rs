//! The one way in which mutexes are locked here. What holds one never waits and never panics half-way.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex, whose value is whole also where a holder has panicked.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
