//! How many runs ended with which verdict in each of the last 24 hours' minutes.
//!
//! A minute is one of this process's clock, which no change of the host's time moves; what it is called
//! is computed when it is asked for. The memory is bounded: names are those that the code has.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Instant,
};

use serde_json::{Value, json};
use stockade_protocol::Verdict;

use crate::metrics::known;

/// Minutes that are kept.
pub const MINUTES: u64 = 24 * 60;

/// What has ended within a minute.
#[derive(Clone, Debug, Default)]
pub struct Minute {
    /// Which, since the first.
    number: u64,
    verdicts: BTreeMap<&'static str, u64>,
    problems: BTreeMap<&'static str, u64>,
    cpu_ms: u64,
}

impl Minute {
    /// A run had a result.
    pub fn add_result(&mut self, verdict: &str, cpu_ms: u64) {
        *self.verdicts.entry(known(&Verdict::NAMES, verdict)).or_default() += 1;
        self.cpu_ms += cpu_ms;
    }

    /// A request that was let in had a problem of this reason.
    pub fn add_problem(&mut self, reason: &'static str) {
        *self.problems.entry(reason).or_default() += 1;
    }
}

/// The minutes in which any run has ended.
#[derive(Debug, Default)]
pub struct History {
    since: Option<Instant>,
    minutes: VecDeque<Minute>,
}

impl History {
    /// The minute that goes on.
    pub fn now(&mut self, now: Instant) -> &mut Minute {
        let number = self.number(now);
        while self.minutes.front().is_some_and(|minute| minute.number + MINUTES <= number) {
            self.minutes.pop_front();
        }
        if self.minutes.back().is_none_or(|last| last.number != number) {
            self.minutes.push_back(Minute { number, ..Minute::default() });
        }
        let last = self.minutes.len() - 1;
        &mut self.minutes[last]
    }

    fn number(&mut self, now: Instant) -> u64 {
        now.duration_since(*self.since.get_or_insert(now)).as_secs() / 60
    }

    /// The last minutes, at this time of the host's clock.
    pub fn show(&mut self, minutes: u64, now: Instant, unix: u64) -> Value {
        let (number, since) = (self.number(now), self.since.unwrap_or(now));
        let of_this = now.duration_since(since).as_secs() % 60;
        let shown = self.minutes.iter().filter(|minute| minute.number + minutes > number).map(|minute| {
            let ago = (number - minute.number) * 60 + of_this;
            json!({
                "at": unix.saturating_sub(ago),
                "verdicts": minute.verdicts,
                "problems": minute.problems,
                "cpu_ms": minute.cpu_ms,
            })
        });
        json!({ "now": unix, "minutes": shown.collect::<Vec<_>>() })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use std::time::Duration;

    use super::*;

    #[test]
    fn a_minute_has_what_ended_within_it_and_is_forgotten_after_a_day() {
        let (mut history, begin) = (History::default(), Instant::now());
        let at = |seconds: u64| begin + Duration::from_secs(seconds);
        history.now(at(0)).add_result("exited", 5);
        history.now(at(59)).add_result("exited", 7);
        history.now(at(59)).add_problem("queue_timeout");
        history.now(at(60)).add_result("a verdict that no code has", 0);
        let shown = history.show(MINUTES, at(90), 10_090);
        let first = json!({ "at": 10_000, "verdicts": { "exited": 2 }, "problems": { "queue_timeout": 1 }, "cpu_ms": 12 });
        let second = json!({ "at": 10_060, "verdicts": { "other": 1 }, "problems": {}, "cpu_ms": 0 });
        assert_eq!(shown, json!({ "now": 10_090, "minutes": [first, second.clone()] }));
        assert_eq!(history.show(1, at(90), 10_090)["minutes"], json!([second]));
        // The host's clock may say anything.
        assert_eq!(history.show(1, at(90), 0)["minutes"][0]["at"], 0);
        for minute in 0..3 * MINUTES {
            history.now(at(minute * 60)).add_result("exited", 0);
        }
        assert_eq!(history.minutes.len() as u64, MINUTES);
        assert_eq!(history.show(MINUTES, at((3 * MINUTES - 1) * 60), 1 << 30)["minutes"].as_array().unwrap().len() as u64, MINUTES);
    }
}
