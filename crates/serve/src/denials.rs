//! What runs were refused: the last denials that differ, with the line that would allow each.
//!
//! There are at most [`MAX_DENIALS`], of which the one that was seen longest ago goes first. A
//! denial's text comes from inside a sandbox in part, so it is cut; what is done with it must take
//! it for hostile. A run can push others out of this list, not out of the audit log.

use std::{collections::BTreeMap, time::Instant};

use serde_json::{Value, json};

use crate::metrics::Denial;

/// Denials that are kept.
pub const MAX_DENIALS: usize = 1000;
/// Of one run.
const MAX_OF_RUN: usize = 64;
/// Characters of a text.
const MAX_TEXT: usize = 500;

/// Two denials with this in common are one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Id {
    policy: String,
    kind: String,
    what: String,
    line: Option<String>,
}

#[derive(Clone, Debug)]
struct Seen {
    count: u64,
    runs: u64,
    hint: bool,
    help: Option<String>,
    last: Instant,
    turn: u64,
}

/// All that are kept.
#[derive(Debug, Default)]
pub struct Denials {
    seen: BTreeMap<Id, Seen>,
    /// By when they were seen last.
    turns: BTreeMap<u64, Id>,
    last_turn: u64,
}

impl Denials {
    /// A run under this policy was refused these.
    pub fn add(&mut self, policy: &str, denials: &[Denial], now: Instant) {
        for denial in denials.iter().take(MAX_OF_RUN) {
            let id =
                Id { policy: policy.to_owned(), kind: cut(&denial.kind), what: cut(&denial.what), line: denial.allow.as_deref().map(cut) };
            self.last_turn += 1;
            let new = Seen { count: 0, runs: 0, hint: denial.hint, help: denial.help.as_deref().map(cut), last: now, turn: self.last_turn };
            let seen = self.seen.entry(id.clone()).or_insert(new);
            self.turns.remove(&seen.turn);
            self.turns.insert(self.last_turn, id);
            *seen = Seen {
                count: seen.count.saturating_add(denial.count),
                runs: seen.runs + 1,
                last: now,
                turn: self.last_turn,
                ..seen.clone()
            };
            if self.seen.len() > MAX_DENIALS
                && let Some((_, oldest)) = self.turns.pop_first()
            {
                self.seen.remove(&oldest);
            }
        }
    }

    /// All, the last first, at this time of the host's clock.
    pub fn show(&self, now: Instant, unix: u64) -> Value {
        let in_order = self.turns.values().rev().filter_map(|id| Some((id, self.seen.get(id)?)));
        let shown = in_order.map(|(Id { policy, kind, what, line }, seen)| {
            json!({
                "policy": policy,
                "kind": kind,
                "what": what,
                "line": line,
                "help": seen.help,
                "hint": seen.hint,
                "count": seen.count,
                "runs": seen.runs,
                "last": unix.saturating_sub(now.duration_since(seen.last).as_secs()),
            })
        });
        json!({ "denials": shown.collect::<Vec<_>>() })
    }
}

fn cut(text: &str) -> String {
    text.chars().take(MAX_TEXT).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use std::time::Duration;

    use super::*;

    fn denial(what: &str, count: u64) -> Denial {
        let kind = "syscall".to_owned();
        Denial { kind, what: what.to_owned(), count, allow: Some(format!("allow {what}")), ..Denial::default() }
    }

    #[test]
    fn the_same_denial_is_counted_and_the_one_seen_longest_ago_goes_first() {
        let (mut denials, now) = (Denials::default(), Instant::now());
        denials.add("default", &[denial("ptrace", 2), denial("bpf", 1)], now);
        denials.add("default", &[denial("ptrace", 3)], now + Duration::from_secs(5));
        denials.add("strict", &[denial("ptrace", 1)], now + Duration::from_secs(5));
        let shown = denials.show(now + Duration::from_secs(7), 1007);
        let shown = shown["denials"].as_array().unwrap();
        let brief: Vec<_> = shown.iter().map(|one| json!([one["policy"], one["what"], one["count"], one["runs"], one["last"]])).collect();
        assert_eq!(
            brief,
            [json!(["strict", "ptrace", 1, 1, 1005]), json!(["default", "ptrace", 5, 2, 1005]), json!(["default", "bpf", 1, 1, 1000])]
        );
        assert_eq!(shown[0]["line"], "allow ptrace");
        for number in 0..MAX_DENIALS - 1 {
            denials.add("default", &[denial(&number.to_string(), 1)], now);
        }
        let shown = denials.show(now, 0)["denials"].as_array().unwrap().clone();
        assert_eq!((shown.len(), denials.turns.len()), (MAX_DENIALS, MAX_DENIALS));
        assert_eq!(shown.last().unwrap()["policy"], "strict", "bpf was the oldest, then default's ptrace");
    }

    #[test]
    fn a_run_fills_no_more_than_its_part() {
        let (mut denials, now) = (Denials::default(), Instant::now());
        let many: Vec<Denial> = (0..5000).map(|number| denial(&format!("{number}{}", "x".repeat(9000)), 1)).collect();
        denials.add("default", &many, now);
        let shown = denials.show(now, 0)["denials"].as_array().unwrap().clone();
        assert_eq!(shown.len(), MAX_OF_RUN);
        assert_eq!(shown[0]["what"].as_str().unwrap().len(), MAX_TEXT);
    }
}
