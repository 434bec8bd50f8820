//! Who may begin a run now, and who waits.
//!
//! Each key has its quotas. Of the keys that have requests waiting, each gets its turn by its
//! weight; a key's own requests begin in the order in which they came. The request whose turn it is
//! begins as soon as it fits into what the runs together may use, and none passes it meanwhile: a
//! large one is not kept waiting by small ones. Time is given to every call, and nothing here
//! waits by itself.

use std::{
    collections::{BTreeMap, VecDeque},
    time::{Duration, Instant},
};

use stockade_protocol::service::{Capacity, Key, RunSize};

const MINUTE: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3600);

/// A request that was let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(u64);

/// Why a request is not let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotAdmitted {
    /// It is larger than all runs together may be.
    NeverFits,
    /// As many requests of all keys wait as may.
    QueueFull,
    /// As many requests of the key wait as may.
    KeyQueue,
    /// The key has begun as many in the last minute as it may; the next may after this time.
    KeyRate(Duration),
    /// The key's runs have used as much CPU time in the last hour as they may; the next may begin after
    /// this time.
    KeyCpu(Duration),
}

#[derive(Debug, Default)]
struct KeyState {
    running: u32,
    waiting: VecDeque<(Ticket, RunSize)>,
    /// When it was let in, within the last minute.
    recent: VecDeque<Instant>,
    /// The CPU time of its runs, in milliseconds, and when they ended; within the last hour.
    spent: VecDeque<(Instant, u64)>,
    /// What is owed to it: grows by its weight whenever another has its turn.
    owed: i64,
}

/// All requests that wait or run.
#[derive(Debug)]
pub struct Admission {
    capacity: Capacity,
    used: RunSize,
    quotas: BTreeMap<String, Key>,
    keys: BTreeMap<String, KeyState>,
    running: BTreeMap<Ticket, (String, RunSize)>,
    /// Whose turn it is, while its request does not fit yet.
    next: Option<String>,
    last: u64,
}

impl Admission {
    /// Nothing waits and nothing runs.
    pub fn new(capacity: Capacity, keys: &[Key]) -> Self {
        let mut admission = Admission {
            capacity,
            used: RunSize::default(),
            quotas: BTreeMap::new(),
            keys: BTreeMap::new(),
            running: BTreeMap::new(),
            next: None,
            last: 0,
        };
        admission.change(capacity, keys);
        admission
    }

    /// Takes other settings. Who was let in stays so.
    pub fn change(&mut self, capacity: Capacity, keys: &[Key]) {
        self.capacity = capacity;
        self.quotas = keys.iter().map(|key| (key.id.clone(), key.clone())).collect();
    }

    /// Lets a request in, which then waits for its turn.
    ///
    /// # Errors
    /// It may not even wait.
    pub fn ask(&mut self, key: &str, size: RunSize, now: Instant) -> Result<Ticket, NotAdmitted> {
        let whole = self.capacity.size;
        if size.cpus > whole.cpus || size.memory > whole.memory {
            return Err(NotAdmitted::NeverFits);
        }
        let waiting = self.waiting();
        let Some(quota) = self.quotas.get(key) else { return Err(NotAdmitted::KeyQueue) };
        let state = self.keys.entry(key.to_owned()).or_default();
        if waiting >= self.capacity.waiting as usize {
            return Err(NotAdmitted::QueueFull);
        }
        if state.waiting.len() >= quota.waiting as usize {
            return Err(NotAdmitted::KeyQueue);
        }
        state.recent.retain(|at| now.duration_since(*at) < MINUTE);
        if let (Some(most), Some(oldest)) = (quota.runs_per_minute, state.recent.front())
            && state.recent.len() >= most as usize
        {
            return Err(NotAdmitted::KeyRate(MINUTE.saturating_sub(now.duration_since(*oldest))));
        }
        state.spent.retain(|(at, _)| now.duration_since(*at) < HOUR);
        let spent: u64 = state.spent.iter().map(|(_, ms)| ms).sum();
        if let (Some(most), Some((oldest, _))) = (quota.cpu_per_hour, state.spent.front())
            && spent >= most
        {
            return Err(NotAdmitted::KeyCpu(HOUR.saturating_sub(now.duration_since(*oldest))));
        }
        self.last += 1;
        let ticket = Ticket(self.last);
        if quota.runs_per_minute.is_some() {
            state.recent.push_back(now);
        }
        state.waiting.push_back((ticket, size));
        Ok(ticket)
    }

    /// The request that begins now, if any does. It runs until [`Self::end`].
    pub fn begin_next(&mut self) -> Option<Ticket> {
        let key = match self.next.take().filter(|key| self.may_begin(key)) {
            Some(key) => key,
            None => self.turn()?,
        };
        let (_, size) = *self.keys.get(&key)?.waiting.front()?;
        let fits = |used: u64, more: u64, most: u64| used.checked_add(more).is_some_and(|sum| sum <= most);
        let whole = self.capacity.size;
        if !fits(self.used.cpus, size.cpus, whole.cpus) || !fits(self.used.memory, size.memory, whole.memory) {
            self.next = Some(key);
            return None;
        }
        let state = self.keys.get_mut(&key)?;
        let (ticket, size) = state.waiting.pop_front()?;
        state.running += 1;
        self.used = RunSize { cpus: self.used.cpus + size.cpus, memory: self.used.memory + size.memory };
        self.running.insert(ticket, (key, size));
        Some(ticket)
    }

    /// Whether a key has a request that waits, and fewer running than it may.
    fn may_begin(&self, key: &str) -> bool {
        let most = self.quotas.get(key).map_or(0, |quota| quota.running);
        self.keys.get(key).is_some_and(|state| !state.waiting.is_empty() && state.running < most)
    }

    /// The key whose turn it is (smooth weighted round robin).
    fn turn(&mut self) -> Option<String> {
        let weight = |key: &String, quotas: &BTreeMap<String, Key>| quotas.get(key).map_or(1, |quota| i64::from(quota.weight));
        let ready: Vec<String> = self.keys.keys().filter(|key| self.may_begin(key)).cloned().collect();
        let mut total = 0;
        for key in &ready {
            let weight = weight(key, &self.quotas);
            total += weight;
            if let Some(state) = self.keys.get_mut(key) {
                state.owed += weight;
            }
        }
        let owed = |key: &String| self.keys.get(key).map_or(0, |state| state.owed);
        // Of two that are owed the same, the first by name.
        let chosen = ready.into_iter().rev().max_by_key(|key| owed(key))?;
        if let Some(state) = self.keys.get_mut(&chosen) {
            state.owed -= total;
        }
        Some(chosen)
    }

    /// A request waits or runs no more.
    pub fn end(&mut self, ticket: Ticket) {
        if let Some((key, size)) = self.running.remove(&ticket) {
            self.used = RunSize { cpus: self.used.cpus - size.cpus, memory: self.used.memory - size.memory };
            if let Some(state) = self.keys.get_mut(&key) {
                state.running -= 1;
            }
            return;
        }
        for state in self.keys.values_mut() {
            state.waiting.retain(|(waiting, _)| *waiting != ticket);
            if state.waiting.is_empty() && state.running == 0 {
                // A key that comes back is owed nothing of the time when it asked for nothing.
                state.owed = 0;
            }
        }
    }

    /// A run of this key has used so much CPU time, in milliseconds.
    pub fn spend(&mut self, key: &str, ms: u64, now: Instant) {
        let is_counted = self.quotas.get(key).is_some_and(|quota| quota.cpu_per_hour.is_some());
        if let Some(state) = self.keys.get_mut(key).filter(|_| is_counted) {
            state.spent.push_back((now, ms));
        }
    }

    /// The requests that wait, and whose key there is no more.
    pub fn without_key(&self) -> Vec<Ticket> {
        let gone = self.keys.iter().filter(|(key, _)| !self.quotas.contains_key(*key));
        gone.flat_map(|(_, state)| state.waiting.iter().map(|(ticket, _)| *ticket)).collect()
    }

    /// How many wait.
    pub fn waiting(&self) -> usize {
        self.keys.values().map(|state| state.waiting.len()).sum()
    }

    /// What the requests that run may use together.
    pub fn used(&self) -> RunSize {
        self.used
    }

    /// How many requests of a key came within the last minute, and the CPU time of its runs that ended
    /// within the last hour, in milliseconds; each where a quota counts it.
    pub fn recent_of(&self, key: &str, now: Instant) -> (Option<u64>, Option<u64>) {
        let (Some(quota), Some(state)) = (self.quotas.get(key), self.keys.get(key)) else { return (None, None) };
        let minute = || state.recent.iter().filter(|at| now.duration_since(**at) < MINUTE).count() as u64;
        let hour = || state.spent.iter().filter(|(at, _)| now.duration_since(*at) < HOUR).map(|(_, ms)| ms).sum();
        (quota.runs_per_minute.map(|_| minute()), quota.cpu_per_hour.map(|_| hour()))
    }

    /// How many requests of a key run, and how many wait.
    pub fn of_key(&self, key: &str) -> (u32, usize) {
        self.keys.get(key).map_or((0, 0), |state| (state.running, state.waiting.len()))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::*;
    use stockade_protocol::service::{Credential, Scope};

    fn key(id: &str, weight: u32, running: u32) -> Key {
        Key {
            id: id.to_owned(),
            credential: Credential::Uid(1),
            policies: vec!["default".to_owned()],
            scopes: vec![Scope::Run],
            running,
            waiting: 100,
            runs_per_minute: None,
            cpu_per_hour: None,
            weight,
            expires: None,
            sessions: 1,
        }
    }

    fn size(cpus: u64) -> RunSize {
        RunSize { cpus: cpus * 1000, memory: cpus }
    }

    fn admission(cpus: u64, keys: &[Key]) -> Admission {
        Admission::new(Capacity { size: size(cpus), waiting: 200, queue_ms: 1000, sessions: 1 }, keys)
    }

    #[test]
    fn keys_have_their_turns_by_weight_and_each_key_begins_in_order() {
        let mut admission = admission(1, &[key("a", 1, 9), key("b", 3, 9)]);
        let now = Instant::now();
        let mut of = BTreeMap::new();
        for _ in 0..40 {
            for name in ["a", "b"] {
                of.insert(admission.ask(name, size(1), now).unwrap(), name);
            }
        }
        let (mut begun, mut last) = (Vec::new(), BTreeMap::new());
        for _ in 0..40 {
            let ticket = admission.begin_next().unwrap();
            let name = of[&ticket];
            assert!(last.insert(name, ticket).is_none_or(|before| before < ticket));
            begun.push(name);
            assert_eq!(admission.begin_next(), None, "only one fits");
            admission.end(ticket);
        }
        assert_eq!(begun.iter().filter(|name| **name == "a").count(), 10);
        // Nor does either wait for long.
        assert!(begun.windows(5).all(|five| five.contains(&"a") && five.contains(&"b")));
    }

    #[test]
    fn a_large_request_is_not_passed_by_small_ones() {
        let mut admission = admission(4, &[key("large", 1, 9), key("small", 1, 9)]);
        let now = Instant::now();
        let mut small = || admission.ask("small", size(1), now).unwrap();
        let first = small();
        assert_eq!(admission.begin_next(), Some(first));
        let large = admission.ask("large", size(4), now).unwrap();
        let second = admission.ask("small", size(1), now).unwrap();
        // It is the large one's turn, since the small one had the last.
        assert_eq!(admission.begin_next(), None);
        admission.end(first);
        assert_eq!(admission.begin_next(), Some(large));
        assert_eq!(admission.begin_next(), None);
        admission.end(large);
        assert_eq!(admission.begin_next(), Some(second));
    }

    #[test]
    fn quotas_hold_for_their_key_alone() {
        let rate = Key { runs_per_minute: Some(2), ..key("rate", 1, 9) };
        let short = Key { waiting: 1, ..key("short", 1, 1) };
        let cpu = Key { cpu_per_hour: Some(100), ..key("cpu", 1, 9) };
        let mut admission = admission(8, &[rate, short, cpu]);
        let now = Instant::now();
        assert_eq!(admission.ask("short", size(9), now), Err(NotAdmitted::NeverFits));
        assert_eq!(admission.ask("unknown", size(1), now), Err(NotAdmitted::KeyQueue));
        for _ in 0..2 {
            assert!(admission.ask("rate", size(1), now).is_ok());
        }
        let later = now + Duration::from_secs(20);
        assert_eq!(admission.ask("rate", size(1), later), Err(NotAdmitted::KeyRate(Duration::from_secs(40))));
        assert!(admission.ask("rate", size(1), now + MINUTE).is_ok());
        assert!(admission.ask("cpu", size(1), now).is_ok());
        admission.spend("cpu", 60, now);
        assert!(admission.ask("cpu", size(1), later).is_ok());
        admission.spend("cpu", 40, later);
        assert_eq!(admission.ask("cpu", size(1), later), Err(NotAdmitted::KeyCpu(HOUR - Duration::from_secs(20))));
        assert!(admission.ask("cpu", size(1), now + HOUR).is_ok());
        let first = admission.ask("short", size(1), now).unwrap();
        assert_eq!(admission.ask("short", size(1), now), Err(NotAdmitted::KeyQueue));
        while admission.begin_next().is_some() {}
        let second = admission.ask("short", size(1), now).unwrap();
        assert_eq!((admission.begin_next(), admission.of_key("short")), (None, (1, 1)), "one may run at a time");
        admission.end(first);
        assert_eq!(admission.begin_next(), Some(second));
    }

    #[test]
    fn all_that_was_used_is_given_back() {
        let mut admission = admission(3, &[key("a", 2, 9), key("b", 1, 2)]);
        let now = Instant::now();
        let tickets: Vec<_> =
            (0..60).filter_map(|number| admission.ask(["a", "b"][number % 2], size(1 + number as u64 % 3), now).ok()).collect();
        let mut begun = 0;
        for ticket in &tickets {
            while admission.begin_next().is_some() {
                begun += 1;
            }
            assert!(admission.used.cpus <= 3000);
            admission.end(*ticket);
        }
        assert!(begun > 0);
        assert_eq!((admission.waiting(), admission.running.len(), admission.used), (0, 0, RunSize::default()));
    }

    #[test]
    fn a_full_queue_takes_no_more() {
        let mut admission = Admission::new(Capacity { size: size(1), waiting: 2, queue_ms: 1, sessions: 1 }, &[key("a", 1, 1)]);
        let now = Instant::now();
        assert!(admission.ask("a", size(1), now).is_ok());
        let second = admission.ask("a", size(1), now).unwrap();
        assert_eq!(admission.ask("a", size(1), now), Err(NotAdmitted::QueueFull));
        // One that gives up makes room.
        admission.end(second);
        assert!(admission.ask("a", size(1), now).is_ok());
    }
}
