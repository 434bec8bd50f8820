//! A rate limit per second, for work that costs CPU time of the host.
//!
//! The caller passes the time. It does not wait or queue.

/// Operations per second.
pub(super) struct Budget {
    most: u32,
    second: u64,
    taken: u32,
}

impl Budget {
    /// At most this many per second.
    pub(super) fn of(most: u32) -> Self {
        Budget { most, second: 0, taken: 0 }
    }

    /// Whether one more is allowed now.
    pub(super) fn takes_one(&mut self, now_ms: u64) -> bool {
        if self.second != now_ms / 1000 {
            (self.second, self.taken) = (now_ms / 1000, 0);
        }
        self.taken = self.taken.saturating_add(1);
        self.taken <= self.most
    }
}

#[cfg(test)]
mod tests {
    use super::Budget;

    #[test]
    fn what_is_used_up_comes_back_with_the_next_second() {
        let mut budget = Budget::of(2);
        let takes: Vec<bool> = [0, 400, 999, 1000, 1001, 1999, 7000].into_iter().map(|now| budget.takes_one(now)).collect();
        assert_eq!(takes, [true, true, false, true, true, false, true]);
    }
}
