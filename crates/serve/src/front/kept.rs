//! The logs of runs that have ended, for clients that ask again.
//!
//! Each goes at its time, or sooner where all together are too large: then the one that would go first, of
//! the key that has most. Of one key there are [`MAX_OF_KEY`] at most; then its own goes. Each call looks at the
//! keys that have some, never at all logs. Nothing here waits by itself.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use tokio::time::Instant;

use super::RunNumber;
use crate::log::RunLog;

/// The most bytes of all of them, or a quarter of what requests and results may take, if that is less.
const MAX_BYTES: usize = 64 << 20;
/// What each takes beside its result and its output, with its name: a problem has none.
const OF_LOG: usize = 2 << 10;
/// Of one key.
const MAX_OF_KEY: usize = 10_000;

/// A run that has ended.
pub(super) struct EndedRun {
    pub(super) key: String,
    /// Its `Idempotency-Key`.
    pub(super) name: Option<String>,
    pub(super) log: Arc<RunLog>,
    pub(super) until: Instant,
}

struct KeptLog {
    run: EndedRun,
    bytes: usize,
}

#[derive(Default)]
struct OfKey {
    bytes: usize,
    /// By when they go.
    order: BTreeSet<(Instant, RunNumber)>,
}

/// All that are kept.
pub(super) struct KeptRuns {
    most: usize,
    all: BTreeMap<RunNumber, KeptLog>,
    of_keys: BTreeMap<String, OfKey>,
    bytes: usize,
}

impl KeptRuns {
    /// None yet, where requests and results may have so many bytes.
    pub(super) fn new(buffers: u64) -> Self {
        let mut kept = KeptRuns { most: 0, all: BTreeMap::new(), of_keys: BTreeMap::new(), bytes: 0 };
        kept.change(buffers);
        kept
    }

    /// Requests and results may have so many bytes from now on.
    pub(super) fn change(&mut self, buffers: u64) {
        self.most = usize::try_from(buffers / 4).unwrap_or(MAX_BYTES).min(MAX_BYTES);
    }

    /// The log of a key's run.
    pub(super) fn log(&self, number: &str, key: &str) -> Option<&Arc<RunLog>> {
        self.all.get(number).filter(|kept| kept.run.key == key).map(|kept| &kept.run.log)
    }

    /// Keeps a run. Those that go for it, and itself where it is too large.
    pub(super) fn add(&mut self, number: RunNumber, run: EndedRun) -> Vec<EndedRun> {
        let bytes = OF_LOG + run.log.output() + run.log.ending().and_then(Result::ok).map_or(0, |result| result.len());
        let of_key = self.of_keys.entry(run.key.clone()).or_default();
        of_key.bytes += bytes;
        of_key.order.insert((run.until, number.clone()));
        let too_many = (of_key.order.len() > MAX_OF_KEY).then(|| of_key.order.first().cloned()).flatten();
        self.bytes += bytes;
        self.all.insert(number, KeptLog { run, bytes });
        let mut dropped: Vec<_> = too_many.and_then(|(_, first)| self.remove(&first)).into_iter().collect();
        while self.bytes > self.most
            && let Some(most) = self.of_keys.values().max_by_key(|of_key| of_key.bytes)
            && let Some((_, number)) = most.order.first().cloned()
        {
            dropped.extend(self.remove(&number));
        }
        dropped
    }

    /// When the next one goes.
    pub(super) fn next_end(&self) -> Option<Instant> {
        self.of_keys.values().filter_map(|of_key| of_key.order.first()).map(|(until, _)| *until).min()
    }

    /// Those whose time is over go.
    pub(super) fn end(&mut self, now: Instant) -> Vec<EndedRun> {
        let firsts = |of_key: &OfKey| {
            of_key.order.iter().take_while(|(until, _)| *until <= now).map(|(_, number)| number.clone()).collect::<Vec<_>>()
        };
        let over: Vec<RunNumber> = self.of_keys.values().flat_map(firsts).collect();
        over.iter().filter_map(|number| self.remove(number)).collect()
    }

    fn remove(&mut self, number: &RunNumber) -> Option<EndedRun> {
        let KeptLog { run, bytes } = self.all.remove(number)?;
        self.bytes -= bytes;
        if let Some(of_key) = self.of_keys.get_mut(&run.key) {
            of_key.bytes -= bytes;
            of_key.order.remove(&(run.until, number.clone()));
            if of_key.order.is_empty() {
                self.of_keys.remove(&run.key);
            }
        }
        Some(run)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use axum::{body::Bytes, http::StatusCode};

    use super::*;
    use crate::{front::buffers::Buffers, log::Ending, problem::Problem};

    fn ended(key: &str, until: Instant, ending: Ending) -> EndedRun {
        let log = Arc::new(RunLog::new(Buffers::new(1 << 20, 1, 0).buffer(key), 0));
        log.end(ending);
        EndedRun { key: key.to_owned(), name: None, log, until }
    }

    fn problem() -> Ending {
        Err(Problem::new(StatusCode::CONFLICT, "cancelled", ""))
    }

    #[test]
    fn each_goes_at_its_time() {
        let (mut kept, now) = (KeptRuns::new(u64::MAX), Instant::now());
        assert_eq!(kept.next_end(), None);
        for (number, key, seconds) in [("1", "a", 9), ("2", "b", 3), ("3", "a", 5)] {
            assert!(kept.add(number.to_owned(), ended(key, now + Duration::from_secs(seconds), problem())).is_empty());
        }
        assert_eq!(kept.next_end(), Some(now + Duration::from_secs(3)));
        assert!(kept.log("1", "a").is_some() && kept.log("1", "b").is_none());
        assert_eq!(kept.end(now + Duration::from_secs(5)).len(), 2);
        assert!(kept.log("3", "a").is_none() && kept.log("1", "a").is_some());
        assert_eq!(kept.end(now + Duration::from_secs(9)).len(), 1);
        assert!(kept.all.is_empty() && kept.of_keys.is_empty() && kept.bytes == 0);
    }

    #[test]
    fn the_key_that_keeps_most_loses_first_and_problems_count() {
        let (mut kept, now) = (KeptRuns::new(u64::MAX), Instant::now());
        let whole = |bytes: usize| Ok(Bytes::from(vec![b'x'; bytes - OF_LOG]));
        let until = |number: usize| now + Duration::from_secs(number as u64);
        kept.add("small".to_owned(), ended("small", until(0), whole(1 << 20)));
        for number in 0..63 {
            assert!(kept.add(format!("large{number}"), ended("large", until(100 - number), whole(1 << 20))).is_empty());
        }
        // It is full, and what would go first has the small key.
        let dropped = kept.add("more".to_owned(), ended("small", until(1), whole(1 << 20)));
        assert_eq!(dropped.iter().map(|run| (&*run.key, run.until)).collect::<Vec<_>>(), [("large", until(38))]);
    }

    #[test]
    fn problems_are_bounded_in_number_for_each_key_and_by_what_all_take() {
        let (mut kept, now) = (KeptRuns::new(u64::MAX), Instant::now());
        let until = |number: usize| now + Duration::from_secs(number as u64);
        for number in 0..MAX_OF_KEY {
            assert!(kept.add(number.to_string(), ended("a", until(number), problem())).is_empty());
        }
        assert_eq!(kept.add("one more".to_owned(), ended("a", until(1 << 30), problem())).len(), 1);
        assert!(kept.log("0", "a").is_none() && kept.log("1", "a").is_some() && kept.all.len() == MAX_OF_KEY);
        // The control: another key has room of its own.
        assert!(kept.add("other".to_owned(), ended("b", until(0), problem())).is_empty());
        for key in ["b", "c", "d"] {
            for number in 0..MAX_OF_KEY {
                kept.add(format!("{key}{number}"), ended(key, until(number), problem()));
            }
        }
        assert_eq!(kept.all.len(), MAX_BYTES / OF_LOG);
    }
}
