//! Who may begin a run now, and who waits.
//!
//! Each key has its quotas. Of the keys that have requests waiting, each gets its turn by its
//! weight; a key's own requests begin in the order in which they came. The request whose turn it is
//! begins as soon as it fits into what the runs together may use, and none passes it meanwhile: a
//! large one is not kept waiting by small ones. Time is given to every call, and nothing here
//! waits by itself. Only a run without a session needs an idle worker: where there is none, the run of a session
//! may pass it.

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
    /// There is no such key any more.
    KeyGone,
    /// As many requests of the key were let in within the last minute as may be; the next may be after this time.
    KeyRate(Duration),
    /// The key's runs have used as much CPU time in the last hour as they may; the next is let in after this
    /// time, if no other run of the key ends meanwhile.
    KeyCpu(Duration),
}

/// A request that has not begun.
#[derive(Clone, Copy, Debug)]
struct Queued {
    ticket: Ticket,
    size: RunSize,
    needs: Needs,
}

/// What a request needs to begin, beside its turn and its size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Needs {
    /// An idle worker.
    Worker,
    /// The keeper of its session, in which another runs.
    Keeper,
    /// Nothing: it has its keeper.
    Nothing,
}

#[derive(Debug, Default)]
struct KeyState {
    running: u32,
    waiting: VecDeque<Queued>,
    /// When its requests were let in, within the last minute; also those that have ended in the queue.
    recent: VecDeque<Instant>,
    /// The CPU time of its runs, in milliseconds, and when they ended; within the last hour.
    spent: VecDeque<(Instant, u64)>,
    /// What is owed to it: grows by its weight whenever a request begins while it has one that could.
    owed: i64,
}

impl KeyState {
    /// The end of the run that must be an hour ago before less CPU time than this was used; none: less was.
    fn over(&self, most: u64) -> Option<Instant> {
        let mut left: u64 = self.spent.iter().map(|(_, ms)| ms).sum();
        let mut last = None;
        for (at, ms) in &self.spent {
            if left < most {
                break;
            }
            (left, last) = (left - ms, Some(*at));
        }
        last
    }
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
    /// There is an idle worker.
    has_worker: bool,
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
            has_worker: false,
            last: 0,
        };
        admission.change(capacity, keys);
        admission
    }

    /// Takes other settings. Returns the requests that can never begin by these: their key has gone, or they take
    /// more than there is.
    pub fn change(&mut self, capacity: Capacity, keys: &[Key]) -> Vec<(Ticket, NotAdmitted)> {
        self.capacity = capacity;
        self.quotas = keys.iter().map(|key| (key.id.clone(), key.clone())).collect();
        // A key that has gone, and of which nothing waits or runs, is forgotten.
        self.keys.retain(|key, state| self.quotas.contains_key(key) || state.running > 0 || !state.waiting.is_empty());
        let mut hopeless = Vec::new();
        for (key, state) in &self.keys {
            let why = |size| match self.quotas.contains_key(key) {
                true => self.exceeds(size).then_some(NotAdmitted::NeverFits),
                false => Some(NotAdmitted::KeyGone),
            };
            hopeless.extend(state.waiting.iter().filter_map(|waiting| Some((waiting.ticket, why(waiting.size)?))));
        }
        hopeless
    }

    /// A request that waits takes this much, by other settings. [`Self::change`] says whether it still fits.
    pub fn resize(&mut self, ticket: Ticket, size: RunSize) {
        let mut waiting = self.keys.values_mut().flat_map(|state| &mut state.waiting);
        waiting.find(|waiting| waiting.ticket == ticket).into_iter().for_each(|waiting| waiting.size = size);
    }

    fn exceeds(&self, size: RunSize) -> bool {
        size.cpus > self.capacity.size.cpus || size.memory > self.capacity.size.memory
    }

    /// Lets a request in, which then waits for its turn. It has none before it has what it needs.
    ///
    /// # Errors
    /// It may not even wait.
    pub fn ask(&mut self, key: &str, size: RunSize, needs: Needs, now: Instant) -> Result<Ticket, NotAdmitted> {
        if self.exceeds(size) {
            return Err(NotAdmitted::NeverFits);
        }
        let waiting = self.waiting();
        let Some(quota) = self.quotas.get(key) else { return Err(NotAdmitted::KeyGone) };
        let state = self.keys.entry(key.to_owned()).or_default();
        if waiting >= self.capacity.waiting as usize {
            return Err(NotAdmitted::QueueFull);
        }
        if state.waiting.len() >= quota.waiting as usize {
            return Err(NotAdmitted::KeyQueue);
        }
        state.recent.retain(|at| now.duration_since(*at) < MINUTE);
        // The one whose end makes room: after a reload there can be more of them than may be.
        if let Some(most) = quota.runs_per_minute
            && let Some(last) = state.recent.iter().rev().nth(most.saturating_sub(1) as usize)
        {
            return Err(NotAdmitted::KeyRate(MINUTE.saturating_sub(now.duration_since(*last))));
        }
        state.spent.retain(|(at, _)| now.duration_since(*at) < HOUR);
        if let Some(most) = quota.cpu_per_hour
            && let Some(last) = state.over(most)
        {
            return Err(NotAdmitted::KeyCpu(HOUR.saturating_sub(now.duration_since(last))));
        }
        self.last += 1;
        let ticket = Ticket(self.last);
        if quota.runs_per_minute.is_some() {
            state.recent.push_back(now);
        }
        state.waiting.push_back(Queued { ticket, size, needs });
        Ok(ticket)
    }

    /// A request that waits has its keeper.
    pub fn has_keeper(&mut self, ticket: Ticket) {
        let mut waiting = self.keys.values_mut().flat_map(|state| &mut state.waiting);
        waiting.find(|waiting| waiting.ticket == ticket).into_iter().for_each(|waiting| waiting.needs = Needs::Nothing);
    }

    /// The request whose turn it is, if it fits. It has its turn until it begins. `has_worker`: there is an idle
    /// one.
    pub fn next(&mut self, has_worker: bool) -> Option<Ticket> {
        self.has_worker = has_worker;
        let key = match self.next.take().filter(|key| self.may_begin(key)) {
            Some(key) => key,
            None => self.turn()?,
        };
        let Queued { ticket, size, .. } = *self.keys.get(&key)?.waiting.iter().find(|waiting| self.has_all(waiting))?;
        self.next = Some(key);
        let fits = |used: u64, more: u64, most: u64| used.checked_add(more).is_some_and(|sum| sum <= most);
        let whole = self.capacity.size;
        (fits(self.used.cpus, size.cpus, whole.cpus) && fits(self.used.memory, size.memory, whole.memory)).then_some(ticket)
    }

    /// The request whose turn it is begins. It runs until [`Self::end`].
    pub fn begin(&mut self, ticket: Ticket) {
        let Some(key) = self.next.take() else { return };
        let Some(place) = self.keys.get(&key).and_then(|state| state.waiting.iter().position(|waiting| waiting.ticket == ticket)) else {
            return;
        };
        // Only now: a request that goes while it waits to fit costs its key no turn.
        self.charge(&key);
        let Some(state) = self.keys.get_mut(&key) else { return };
        let Some(Queued { size, .. }) = state.waiting.remove(place) else { return };
        state.running += 1;
        self.used = RunSize { cpus: self.used.cpus + size.cpus, memory: self.used.memory + size.memory };
        self.running.insert(ticket, (key, size));
    }

    fn has_all(&self, waiting: &Queued) -> bool {
        match waiting.needs {
            Needs::Worker => self.has_worker,
            Needs::Keeper => false,
            Needs::Nothing => true,
        }
    }

    /// Whether a key has a request that could begin, and fewer running than it may.
    fn may_begin(&self, key: &str) -> bool {
        let most = self.quotas.get(key).map_or(0, |quota| quota.running);
        self.keys.get(key).is_some_and(|state| state.running < most && state.waiting.iter().any(|waiting| self.has_all(waiting)))
    }

    /// The keys that have a request which could begin.
    fn ready(&self) -> Vec<String> {
        self.keys.keys().filter(|key| self.may_begin(key)).cloned().collect()
    }

    fn weight(&self, key: &str) -> i64 {
        self.quotas.get(key).map_or(1, |quota| i64::from(quota.weight))
    }

    /// The key whose turn it is (smooth weighted round robin).
    fn turn(&self) -> Option<String> {
        let owed = |key: &String| self.keys.get(key).map_or(0, |state| state.owed) + self.weight(key);
        // Of two that are owed the same, the first by name.
        self.ready().into_iter().rev().max_by_key(owed)
    }

    /// A request of this key begins, of those that could.
    fn charge(&mut self, chosen: &str) {
        let mut total = 0;
        for key in self.ready() {
            let weight = self.weight(&key);
            total += weight;
            self.keys.get_mut(&key).into_iter().for_each(|state| state.owed += weight);
        }
        self.keys.get_mut(chosen).into_iter().for_each(|state| state.owed -= total);
    }

    /// A request waits or runs no more.
    pub fn end(&mut self, ticket: Ticket) {
        let ran = self.running.remove(&ticket);
        if let Some((key, size)) = &ran {
            self.used = RunSize { cpus: self.used.cpus - size.cpus, memory: self.used.memory - size.memory };
            self.keys.get_mut(key).into_iter().for_each(|state| state.running -= 1);
        }
        for state in self.keys.values_mut() {
            if ran.is_none() {
                state.waiting.retain(|waiting| waiting.ticket != ticket);
            }
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

    /// How many wait.
    pub fn waiting(&self) -> usize {
        self.keys.values().map(|state| state.waiting.len()).sum()
    }

    /// What the requests that run may use together.
    pub fn used(&self) -> RunSize {
        self.used
    }

    /// How many requests of a key were let in within the last minute, and the CPU time of its runs that ended
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

    fn begin_next(admission: &mut Admission) -> Option<Ticket> {
        admission.next(true).inspect(|ticket| admission.begin(*ticket))
    }

    #[test]
    fn keys_have_their_turns_by_weight_and_each_key_begins_in_order() {
        let mut admission = admission(1, &[key("a", 1, 9), key("b", 3, 9)]);
        let now = Instant::now();
        let mut of = BTreeMap::new();
        for _ in 0..40 {
            for name in ["a", "b"] {
                of.insert(admission.ask(name, size(1), Needs::Worker, now).unwrap(), name);
            }
        }
        let (mut begun, mut last) = (Vec::new(), BTreeMap::new());
        for _ in 0..40 {
            let ticket = begin_next(&mut admission).unwrap();
            let name = of[&ticket];
            assert!(last.insert(name, ticket).is_none_or(|before| before < ticket));
            begun.push(name);
            assert_eq!(begin_next(&mut admission), None, "only one fits");
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
        let mut small = || admission.ask("small", size(1), Needs::Worker, now).unwrap();
        let first = small();
        assert_eq!(begin_next(&mut admission), Some(first));
        let large = admission.ask("large", size(4), Needs::Worker, now).unwrap();
        let second = admission.ask("small", size(1), Needs::Worker, now).unwrap();
        // It is the large one's turn, since the small one had the last.
        assert_eq!(begin_next(&mut admission), None);
        admission.end(first);
        assert_eq!(begin_next(&mut admission), Some(large));
        assert_eq!(begin_next(&mut admission), None);
        admission.end(large);
        assert_eq!(begin_next(&mut admission), Some(second));
    }

    #[test]
    fn a_request_that_goes_while_it_waits_to_fit_costs_its_key_no_turn() {
        for cancelled in [false, true] {
            let mut admission = admission(4, &[key("a", 1, 9), key("b", 1, 9)]);
            let now = Instant::now();
            let running = ["a", "b"].map(|name| {
                let ticket = admission.ask(name, size(1), Needs::Worker, now).unwrap();
                assert_eq!(begin_next(&mut admission), Some(ticket));
                ticket
            });
            let mut of = BTreeMap::from([(admission.ask("b", size(4), Needs::Worker, now).unwrap(), "b")]);
            if cancelled {
                let gone = admission.ask("a", size(4), Needs::Worker, now).unwrap();
                assert_eq!(begin_next(&mut admission), None, "it is a's turn, and it does not fit");
                admission.end(gone);
                assert_eq!(begin_next(&mut admission), None, "now it is b's");
            }
            for name in ["a", "b", "a", "b", "a"] {
                of.insert(admission.ask(name, size(4), Needs::Worker, now).unwrap(), name);
            }
            running.iter().for_each(|ticket| admission.end(*ticket));
            let mut begun = Vec::new();
            while let Some(ticket) = begin_next(&mut admission) {
                begun.push(of[&ticket]);
                admission.end(ticket);
            }
            // Neither is ahead by more than one, as without the one that has gone.
            let of = |name: &str, count: usize| begun.iter().take(count).filter(|begun| **begun == name).count();
            assert!(begun.len() == 6 && (0..=6).all(|count| of("a", count).abs_diff(of("b", count)) <= 1), "{cancelled} {begun:?}");
        }
    }

    #[test]
    fn a_key_hears_when_its_quota_has_room_again() {
        let rate = Key { runs_per_minute: Some(3), ..key("rate", 1, 9) };
        let cpu = Key { cpu_per_hour: Some(100), ..key("cpu", 1, 9) };
        let mut admission = admission(8, &[rate.clone(), cpu]);
        let now = Instant::now();
        let at = |seconds: u64| now + Duration::from_secs(seconds);
        for second in [0, 10, 20] {
            admission.ask("rate", size(1), Needs::Worker, at(second)).unwrap();
        }
        // After a reload fewer may be than were: the second of them is in the way, too.
        admission
            .change(admission.capacity, &[Key { runs_per_minute: Some(2), ..rate }, Key { cpu_per_hour: Some(100), ..key("cpu", 1, 9) }]);
        assert_eq!(admission.ask("rate", size(1), Needs::Worker, at(30)), Err(NotAdmitted::KeyRate(Duration::from_secs(40))));
        assert!(admission.ask("rate", size(1), Needs::Worker, at(69)).is_err());
        assert!(admission.ask("rate", size(1), Needs::Worker, at(70)).is_ok());
        admission.ask("cpu", size(1), Needs::Worker, now).unwrap();
        for (second, ms) in [(0, 10), (10, 150), (20, 30), (30, 60)] {
            admission.spend("cpu", ms, at(second));
        }
        // The first alone makes no room, and the second does.
        let after = Duration::from_secs(3600 + 10 - 40);
        assert_eq!(admission.ask("cpu", size(1), Needs::Worker, at(40)), Err(NotAdmitted::KeyCpu(after)));
        assert!(admission.ask("cpu", size(1), Needs::Worker, at(3609)).is_err());
        assert!(admission.ask("cpu", size(1), Needs::Worker, at(3610)).is_ok());
    }

    #[test]
    fn quotas_hold_for_their_key_alone() {
        let rate = Key { runs_per_minute: Some(2), ..key("rate", 1, 9) };
        let short = Key { waiting: 1, ..key("short", 1, 1) };
        let cpu = Key { cpu_per_hour: Some(100), ..key("cpu", 1, 9) };
        let mut admission = admission(8, &[rate, short, cpu]);
        let now = Instant::now();
        assert_eq!(admission.ask("short", size(9), Needs::Worker, now), Err(NotAdmitted::NeverFits));
        assert_eq!(admission.ask("unknown", size(1), Needs::Worker, now), Err(NotAdmitted::KeyGone));
        for _ in 0..2 {
            assert!(admission.ask("rate", size(1), Needs::Worker, now).is_ok());
        }
        let later = now + Duration::from_secs(20);
        assert_eq!(admission.ask("rate", size(1), Needs::Worker, later), Err(NotAdmitted::KeyRate(Duration::from_secs(40))));
        assert!(admission.ask("rate", size(1), Needs::Worker, now + MINUTE).is_ok());
        assert!(admission.ask("cpu", size(1), Needs::Worker, now).is_ok());
        admission.spend("cpu", 60, now);
        assert!(admission.ask("cpu", size(1), Needs::Worker, later).is_ok());
        admission.spend("cpu", 40, later);
        assert_eq!(admission.ask("cpu", size(1), Needs::Worker, later), Err(NotAdmitted::KeyCpu(HOUR - Duration::from_secs(20))));
        assert!(admission.ask("cpu", size(1), Needs::Worker, now + HOUR).is_ok());
        let first = admission.ask("short", size(1), Needs::Worker, now).unwrap();
        assert_eq!(admission.ask("short", size(1), Needs::Worker, now), Err(NotAdmitted::KeyQueue));
        while begin_next(&mut admission).is_some() {}
        let second = admission.ask("short", size(1), Needs::Worker, now).unwrap();
        assert_eq!((begin_next(&mut admission), admission.of_key("short")), (None, (1, 1)), "one may run at a time");
        admission.end(first);
        assert_eq!(begin_next(&mut admission), Some(second));
    }

    #[test]
    fn what_cannot_begin_yet_holds_nothing_and_keeps_nobody() {
        let mut admission = admission(2, &[key("session", 1, 9), key("other", 1, 9)]);
        let now = Instant::now();
        let first = admission.ask("session", size(1), Needs::Worker, now).unwrap();
        let second = admission.ask("session", size(1), Needs::Keeper, now).unwrap();
        assert_eq!(begin_next(&mut admission), Some(first));
        assert_eq!(begin_next(&mut admission), None, "its session is in use");
        let third = admission.ask("session", size(1), Needs::Worker, now).unwrap();
        assert_eq!(begin_next(&mut admission), Some(third));
        let other = admission.ask("other", size(1), Needs::Worker, now).unwrap();
        admission.end(first);
        assert_eq!(begin_next(&mut admission), Some(other));
        admission.has_keeper(second);
        assert_eq!(begin_next(&mut admission), None, "nothing is free");
        admission.end(other);
        assert_eq!(begin_next(&mut admission), Some(second));
    }

    #[test]
    fn the_run_of_a_session_needs_no_worker() {
        let mut admission = admission(2, &[key("a", 1, 9), key("b", 1, 9)]);
        let now = Instant::now();
        let first = admission.ask("a", size(1), Needs::Worker, now).unwrap();
        let of_session = admission.ask("b", size(1), Needs::Keeper, now).unwrap();
        admission.has_keeper(of_session);
        assert_eq!(admission.next(false), Some(of_session));
        admission.begin(of_session);
        assert_eq!(admission.next(false), None);
        // The control: with a worker the other begins.
        assert_eq!(begin_next(&mut admission), Some(first));
    }

    #[test]
    fn a_smaller_capacity_and_a_key_that_goes_keep_nobody_waiting() {
        let keys = [key("a", 1, 9), key("b", 1, 9), key("c", 1, 9)];
        let mut admission = admission(8, &keys);
        let now = Instant::now();
        let first = admission.ask("a", size(8), Needs::Worker, now).unwrap();
        let large = admission.ask("a", size(8), Needs::Worker, now).unwrap();
        let small = admission.ask("b", size(1), Needs::Worker, now).unwrap();
        let gone = admission.ask("c", size(1), Needs::Worker, now).unwrap();
        assert_eq!(begin_next(&mut admission), Some(first));
        let smaller = Capacity { size: size(4), ..admission.capacity };
        assert_eq!(admission.change(smaller, &keys[..2]), [(large, NotAdmitted::NeverFits), (gone, NotAdmitted::KeyGone)]);
        for ticket in [large, gone, first] {
            admission.end(ticket);
        }
        assert_eq!(begin_next(&mut admission), Some(small));
    }

    #[test]
    fn all_that_was_used_is_given_back() {
        let mut admission = admission(3, &[key("a", 2, 9), key("b", 1, 2)]);
        let now = Instant::now();
        let tickets: Vec<_> = (0..60)
            .filter_map(|number| admission.ask(["a", "b"][number % 2], size(1 + number as u64 % 3), Needs::Worker, now).ok())
            .collect();
        let mut begun = 0;
        for ticket in &tickets {
            while begin_next(&mut admission).is_some() {
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
        assert!(admission.ask("a", size(1), Needs::Worker, now).is_ok());
        let second = admission.ask("a", size(1), Needs::Worker, now).unwrap();
        assert_eq!(admission.ask("a", size(1), Needs::Worker, now), Err(NotAdmitted::QueueFull));
        // One that gives up makes room.
        admission.end(second);
        assert!(admission.ask("a", size(1), Needs::Worker, now).is_ok());
    }
}
