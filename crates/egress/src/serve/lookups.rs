//! Look-ups of names by the host's name servers, shared by the connections that wait for them.
//!
//! A name is looked up once at a time. Its answer serves for [`KEPT`] from its first address on, and
//! a look-up that still waits for the other family then ends, so that a program's next
//! connections do not ask again; each connection is decided on its addresses nevertheless. A
//! look-up goes on after the connection that began it has gone, and its end is learned from.

use std::{
    collections::BTreeMap,
    net::IpAddr,
    time::{Duration, Instant},
};

use stockade_policy::whitelist::Name;

use super::{GateService, Id, MAX_CONNECTIONS};
use crate::resolve::{Lookup, Progress, ResolveError};

/// How long an answer serves.
const KEPT: Duration = Duration::from_secs(2);
/// Look-ups at once. Each has at most three sockets.
const MAX_LOOKUPS: usize = 128;
/// Marks the tokens of look-ups, in the half of a token that has the index of a slot otherwise.
const LOOKUP: u64 = 1 << 31;

/// What is known of each name now.
#[derive(Default)]
pub(super) struct SharedLookups {
    under_way: BTreeMap<Name, SharedLookup>,
    by_number: BTreeMap<u32, Name>,
    answered: BTreeMap<Name, (Answer, Instant)>,
    next_number: u32,
}

struct SharedLookup {
    number: u32,
    lookup: Lookup,
    /// The addresses that have come so far, and when they came.
    found: Vec<IpAddr>,
    found_at: Option<Instant>,
    /// The connections that wait for more.
    waiting: Vec<Id>,
}

impl SharedLookup {
    /// The addresses of one family, where those of the other have not come while these served:
    /// the next connection looks the name up anew.
    fn ended(&self, now: Instant) -> Option<Vec<IpAddr>> {
        self.found_at.filter(|at| now >= *at + KEPT).map(|_| self.found.clone())
    }
}

type Answer = Result<Vec<IpAddr>, ResolveError>;

/// What becomes of a look-up at its begin.
pub(super) enum LookupStart {
    /// This much is known already.
    Known(Addresses),
    /// The connection will be told.
    Waits,
    /// There are more than may be.
    Refused,
}

/// What a connection is told of its name.
pub(super) enum Addresses {
    /// These, and others may come.
    Some(Vec<IpAddr>),
    /// These are the last ones.
    Last(Vec<IpAddr>),
    /// There are none.
    None(ResolveError),
}

impl SharedLookups {
    /// Whether there is one that has a deadline.
    pub(super) fn are_under_way(&self) -> bool {
        !self.under_way.is_empty()
    }

    /// An answer that still serves.
    fn known(&mut self, name: &Name, now: Instant) -> Option<Answer> {
        self.answered.retain(|_, (_, until)| now < *until);
        self.answered.get(name).map(|(answer, _)| answer.clone())
    }

    /// Keeps an answer that came at this time. That a server failed is none.
    fn learn(&mut self, name: Name, answer: &Answer, now: Instant) {
        if !matches!(answer, Err(ResolveError::Failed | ResolveError::TimedOut)) {
            self.answered.insert(name, (answer.clone(), now + KEPT));
        }
    }
}

/// The number of the look-up that a token belongs to.
pub(super) fn number_of(token: u64) -> Option<u32> {
    (token & 0xffff_ffff == LOOKUP).then(|| u32::try_from(token >> 32).unwrap_or_default())
}

fn token(number: u32) -> u64 {
    u64::from(number) << 32 | LOOKUP
}

impl GateService {
    /// Looks a name up for a connection, which is told later of what is not known yet.
    pub(super) fn look_up(&mut self, id: Id, name: &Name) -> LookupStart {
        if let Some(answer) = self.shared.known(name, self.now) {
            return LookupStart::Known(answer.map_or_else(Addresses::None, Addresses::Last));
        }
        if let Some(shared) = self.shared.under_way.get_mut(name) {
            if shared.waiting.len() >= 2 * MAX_CONNECTIONS {
                shared.waiting.retain(|id| self.slots.get_mut(*id).is_some());
            }
            shared.waiting.push(id);
            return if shared.found.is_empty() { LookupStart::Waits } else { LookupStart::Known(Addresses::Some(shared.found.clone())) };
        }
        if self.shared.under_way.len() >= MAX_LOOKUPS || !self.lookups.takes_one(self.elapsed_ms()) {
            return LookupStart::Refused;
        }
        let number = self.shared.next_number;
        self.shared.next_number = number.wrapping_add(1);
        let (lookup, progress) = Lookup::start(&mut self.resolver, name.as_str(), &self.poll, token(number), self.now);
        if let Progress::Done(answer) = progress {
            self.shared.learn(name.clone(), &answer, self.now);
            return LookupStart::Known(answer.map_or_else(Addresses::None, Addresses::Last));
        }
        self.shared.by_number.insert(number, name.clone());
        self.shared.under_way.insert(name.clone(), SharedLookup { number, lookup, found: Vec::new(), found_at: None, waiting: vec![id] });
        LookupStart::Waits
    }

    /// Continues one look-up whose server has answered.
    pub(super) fn advance_lookup(&mut self, number: u32) {
        let Some(name) = self.shared.by_number.get(&number).cloned() else { return };
        let Some(shared) = self.shared.under_way.get_mut(&name) else { return };
        let progress = shared.lookup.progress(&mut self.resolver, &self.poll, token(number), self.now);
        self.progressed(&name, progress);
    }

    /// Checks the deadlines of all look-ups.
    pub(super) fn tick_lookups(&mut self) {
        let names: Vec<Name> = self.shared.under_way.keys().cloned().collect();
        for name in names {
            let Some(shared) = self.shared.under_way.get_mut(&name) else { continue };
            let progress = match shared.ended(self.now) {
                Some(found) => Progress::Done(Ok(found)),
                None => shared.lookup.tick(&mut self.resolver, &self.poll, token(shared.number), self.now),
            };
            self.progressed(&name, progress);
        }
    }

    fn progressed(&mut self, name: &Name, progress: Progress) {
        match progress {
            Progress::Waiting => {}
            Progress::Found(addresses) => {
                let Some(shared) = self.shared.under_way.get_mut(name) else { return };
                shared.found.clone_from(&addresses);
                shared.found_at.get_or_insert(self.now);
                for id in shared.waiting.clone() {
                    self.told(id, Addresses::Some(addresses.clone()));
                }
            }
            Progress::Done(answer) => {
                let Some(shared) = self.shared.under_way.remove(name) else { return };
                self.shared.by_number.remove(&shared.number);
                self.shared.learn(name.clone(), &answer, shared.found_at.unwrap_or(self.now));
                for id in shared.waiting {
                    let news = match &answer {
                        Ok(all) => Addresses::Last(all.iter().filter(|address| !shared.found.contains(address)).copied().collect()),
                        Err(error) => Addresses::None(*error),
                    };
                    self.told(id, news);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use super::*;
    use crate::{relay::Side, serve::slots};

    #[test]
    fn an_answer_serves_for_two_seconds_and_a_failure_not_at_all() {
        let mut shared = SharedLookups::default();
        let (name, now) = (Name::new("api.internal").unwrap(), Instant::now());
        for (answer, is_kept) in [
            (Ok(vec![IpAddr::from([10, 0, 5, 7])]), true),
            (Err(ResolveError::NoSuchName), true),
            (Err(ResolveError::NoAddress), true),
            (Err(ResolveError::Failed), false),
            (Err(ResolveError::TimedOut), false),
        ] {
            shared.answered.clear();
            shared.learn(name.clone(), &answer, now);
            assert_eq!(shared.known(&name, now + Duration::from_millis(1900)), is_kept.then_some(answer));
            assert_eq!(shared.known(&name, now + KEPT), None);
            assert!(shared.answered.is_empty(), "what no longer serves is not kept");
        }
    }

    #[test]
    fn a_look_up_of_which_one_family_came_serves_no_longer_than_an_answer() {
        let mut shared = SharedLookups::default();
        let (name, now) = (Name::new("api.internal").unwrap(), Instant::now());
        let mut resolver = crate::resolve::Resolver::new("", "nameserver 127.0.0.1\noptions timeout:10");
        let poll = crate::poll::Poll::new().unwrap();
        let (lookup, _) = Lookup::start(&mut resolver, name.as_str(), &poll, token(0), now);
        let mut one = SharedLookup { number: 0, lookup, found: Vec::new(), found_at: None, waiting: Vec::new() };
        assert_eq!(one.ended(now + Duration::from_secs(9)), None, "the control: nothing came");
        one.found = vec![IpAddr::from([10, 0, 5, 7])];
        one.found_at = Some(now);
        assert_eq!(one.ended(now + Duration::from_millis(1900)), None);
        assert_eq!(one.ended(now + KEPT), Some(one.found.clone()));
        shared.learn(name.clone(), &Ok(one.found), now);
        assert_eq!(shared.known(&name, now + KEPT), None, "its end lengthens nothing");
    }

    #[test]
    fn no_token_is_a_look_ups_and_a_connections() {
        for number in [0, 7, u32::MAX] {
            assert_eq!(number_of(token(number)), Some(number));
        }
        let mut slots = slots::Slots::new(1);
        let id = slots.reserve().unwrap();
        slots.replace(id, "x");
        assert!([Side::Client, Side::Peer].iter().all(|side| number_of(slots::token(id, *side)).is_none()));
        assert!((0..super::super::FIRST_SLOT).all(|token| number_of(token).is_none()));
        let stale = slots::id_of(token(u32::MAX)).map(|(id, _)| slots.get_mut(id).is_some());
        assert_eq!(stale, Some(false));
    }
}
