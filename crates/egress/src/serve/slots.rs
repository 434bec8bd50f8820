//! Slots for connections, and the epoll tokens of their sockets.
//!
//! A token holds slot, generation and side, so that a late event is never taken for one of the
//! slot's next connection. It does not know what a slot holds.

use crate::relay::Side;

/// The slot of one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Id {
    index: u32,
    generation: u32,
}

/// The token of a socket of a connection.
pub(super) fn token(id: Id, side: Side) -> u64 {
    let low = (u64::from(id.index) << 1 | u64::from(side == Side::Peer)) + super::FIRST_SLOT;
    u64::from(id.generation) << 32 | low
}

pub(super) fn id_of(token: u64) -> Option<(Id, Side)> {
    let low = (token & 0xffff_ffff).checked_sub(super::FIRST_SLOT)?;
    let side = if low & 1 == 0 { Side::Client } else { Side::Peer };
    let id = Id { index: u32::try_from(low >> 1).ok()?, generation: u32::try_from(token >> 32).ok()? };
    Some((id, side))
}

struct Place<T> {
    generation: u32,
    taken: bool,
    content: Option<T>,
}

/// The content of a slot.
pub(super) trait Timed {
    /// It has a deadline. May change only while it is taken out.
    fn has_clock(&self) -> bool;
}

/// The slots.
pub(super) struct Slots<T> {
    places: Vec<Place<T>>,
    free: Vec<u32>,
    most: usize,
    /// How many have a deadline.
    clocks: usize,
}

impl<T: Timed> Slots<T> {
    pub(super) fn new(most: usize) -> Self {
        Slots { places: Vec::new(), free: Vec::new(), most, clocks: 0 }
    }

    /// Whether any has a deadline.
    pub(super) fn have_clocks(&self) -> bool {
        self.clocks > 0
    }

    pub(super) fn taken(&self) -> usize {
        self.places.len() - self.free.len()
    }

    /// An empty slot; none where all are taken.
    pub(super) fn reserve(&mut self) -> Option<Id> {
        let index = match self.free.pop() {
            Some(index) => index,
            None if self.places.len() < self.most => {
                self.places.push(Place { generation: 0, taken: false, content: None });
                u32::try_from(self.places.len() - 1).ok()?
            }
            None => return None,
        };
        let place = self.places.get_mut(index as usize)?;
        place.taken = true;
        Some(Id { index, generation: place.generation })
    }

    fn place(&mut self, id: Id) -> Option<&mut Place<T>> {
        self.places.get_mut(id.index as usize).filter(|place| place.taken && place.generation == id.generation)
    }

    pub(super) fn get_mut(&mut self, id: Id) -> Option<&mut T> {
        self.place(id)?.content.as_mut()
    }

    /// Takes the content out; the slot stays taken until it is freed.
    pub(super) fn take(&mut self, id: Id) -> Option<T> {
        let content = self.place(id)?.content.take();
        self.clocks -= usize::from(content.as_ref().is_some_and(T::has_clock));
        content
    }

    /// Replaces the content.
    pub(super) fn replace(&mut self, id: Id, content: T) {
        drop(self.take(id));
        let has_clock = content.has_clock();
        if let Some(place) = self.place(id) {
            place.content = Some(content);
            self.clocks += usize::from(has_clock);
        }
    }

    pub(super) fn free(&mut self, id: Id) {
        drop(self.take(id));
        if let Some(place) = self.place(id) {
            *place = Place { generation: place.generation.wrapping_add(1), taken: false, content: None };
            self.free.push(id.index);
        }
    }

    pub(super) fn any(&self, holds: impl Fn(&T) -> bool) -> bool {
        self.places.iter().filter_map(|place| place.content.as_ref()).any(holds)
    }

    pub(super) fn count(&self, counts: impl Fn(&T) -> bool) -> usize {
        self.places.iter().filter_map(|place| place.content.as_ref()).filter(|content| counts(content)).count()
    }

    /// The one with the least key, of those that have one.
    pub(super) fn least_by<K: Ord>(&self, key: impl Fn(&T) -> Option<K>) -> Option<Id> {
        let keyed = (0..).zip(&self.places).filter_map(|(index, place)| {
            let key = key(place.content.as_ref()?)?;
            Some((key, Id { index, generation: place.generation }))
        });
        keyed.min_by(|(one, _), (other, _)| one.cmp(other)).map(|(_, id)| id)
    }

    /// All that are taken.
    pub(super) fn ids(&self) -> Vec<Id> {
        let taken = (0..).zip(&self.places).filter(|(_, place)| place.taken);
        taken.map(|(index, place)| Id { index, generation: place.generation }).collect()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use super::*;

    impl Timed for &str {
        fn has_clock(&self) -> bool {
            self.starts_with("tick")
        }
    }

    #[test]
    fn clocks_are_counted_wherever_they_go() {
        let mut slots = Slots::new(2);
        let (first, second) = (slots.reserve().unwrap(), slots.reserve().unwrap());
        assert!(!slots.have_clocks());
        slots.replace(first, "tick");
        slots.replace(second, "ticktack");
        slots.replace(first, "tick");
        slots.free(second);
        // It belongs to an earlier generation.
        slots.replace(second, "tick");
        assert!(slots.have_clocks());
        slots.replace(first, "silent");
        assert!(!slots.have_clocks());
        slots.replace(first, "tick");
        assert!(slots.have_clocks() && slots.take(first) == Some("tick") && !slots.have_clocks());
    }

    #[test]
    fn the_least_is_found_among_those_that_have_a_key() {
        let mut slots = Slots::new(4);
        let key = |content: &&str| content.strip_prefix("tick").map(str::len);
        assert_eq!(slots.least_by(key), None);
        let ids: Vec<Id> = (0..4).map(|_| slots.reserve().unwrap()).collect();
        for (id, content) in ids.iter().zip(["silent", "tickxx", "tickx"]) {
            slots.replace(*id, content);
        }
        assert_eq!(slots.least_by(key), Some(ids[2]));
        assert_eq!(slots.take(ids[2]), Some("tickx"));
        assert_eq!(slots.least_by(key), Some(ids[1]));
    }

    #[test]
    fn a_freed_place_is_no_longer_known_under_its_old_number() {
        let mut slots = Slots::new(1);
        let old = slots.reserve().unwrap();
        slots.replace(old, "old");
        assert!(slots.reserve().is_none());
        assert_eq!(slots.taken(), 1);
        slots.free(old);
        assert_eq!(slots.taken(), 0);
        let new = slots.reserve().unwrap();
        slots.replace(new, "new");
        assert_eq!(slots.get_mut(old), None);
        assert_eq!(slots.take(new), Some("new"));
        for side in [Side::Client, Side::Peer] {
            assert_eq!(id_of(token(new, side)), Some((new, side)));
        }
        assert_eq!(id_of(super::super::NAMES), None);
    }
}
