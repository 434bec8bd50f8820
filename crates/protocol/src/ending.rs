//! What was refused and what ended a run, in the lines behind its output that a model reads.
//!
//! Words alone, each line in brackets. A program can print such a line too; no verdict depends on
//! one. The names in them are as they came: who prints them escapes them.

use alloc::{borrow::ToOwned, format, string::String, vec::Vec};

use serde::Deserialize;

/// Refusals with a line of their own.
const MAX_REFUSED: usize = 5;

/// The fields of a result that say how it ended. One that lacks a field, or is no result, has
/// nothing in its place.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Ending {
    verdict: String,
    signal: Option<String>,
    started: bool,
    denials: Vec<Refused>,
}

/// One of a result's `denials`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Refused {
    kind: String,
    what: String,
    answer: String,
}

impl Ending {
    /// Its lines. A run that exited by itself and was refused nothing has none.
    pub fn lines(&self) -> Vec<String> {
        let refused: Vec<String> = self.denials.iter().filter_map(Refused::name).collect();
        let mut lines: Vec<String> = refused.iter().take(MAX_REFUSED).map(|name| format!("[refused: {name}]")).collect();
        if let Some(more) = refused.len().checked_sub(MAX_REFUSED).filter(|more| *more > 0) {
            lines.push(format!("[refused: {more} more]"));
        }
        let ended_by = self.denials.iter().find(|denial| denial.kind == "limit" && denial.answer == "ended");
        lines.extend(match (ended_by, self.verdict.as_str(), &self.signal) {
            (Some(limit), ..) => Some(format!("[ended: {}]", limit_in_words(&limit.what))),
            (None, "exited", _) => None,
            (None, "signaled", Some(signal)) => Some(format!("[ended: signal {signal}]")),
            _ => Some(format!("[{}: {}]", if self.started { "ended" } else { "not run" }, self.verdict.replace('_', " "))),
        });
        lines
    }
}

impl Refused {
    /// What the code could not reach or call. A path, a module or a limit stands in its own words
    /// above.
    fn name(&self) -> Option<String> {
        match self.kind.as_str() {
            "connection" => Some(self.what.replacen(" port ", ":", 1)),
            "network" => Some(self.what.clone()),
            "syscall" => Some(format!("system call {}", self.what)),
            _ => None,
        }
    }
}

/// A limit's key and value, such as `wall 10s`.
fn limit_in_words(what: &str) -> String {
    let Some((key, value)) = what.split_once(' ') else { return what.to_owned() };
    match key {
        "wall" => format!("wall clock of {value}"),
        "cpu" => format!("CPU time of {value}"),
        "memory" => format!("memory of {value}"),
        "processes" => format!("{value} processes"),
        "output_size" => format!("output of {value}"),
        "scratch_size" => format!("scratch of {value}"),
        _ => what.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use alloc::vec;

    use super::*;

    #[test]
    fn each_end_but_an_exit_has_its_line() {
        let denial = |kind: &str, what: &str, answer: &str| Refused { kind: kind.into(), what: what.into(), answer: answer.into() };
        let host = || denial("connection", "example.com port 443", "refused");
        let lines = |verdict: &str, signal: Option<&str>, started, denials| {
            Ending { verdict: verdict.into(), signal: signal.map(String::from), started, denials }.lines()
        };
        for (verdict, signal, started, denials, expected) in [
            ("exited", None, true, vec![], vec![]),
            ("exited", None, true, vec![host()], vec!["[refused: example.com:443]"]),
            ("wall_timeout", None, true, vec![denial("limit", "wall 10s", "ended")], vec!["[ended: wall clock of 10s]"]),
            ("exited", None, true, vec![denial("limit", "processes 64", "refused")], vec![]),
            ("signaled", Some("SIGSEGV"), true, vec![], vec!["[ended: signal SIGSEGV]"]),
            ("cancelled", None, true, vec![], vec!["[ended: cancelled]"]),
            ("bad_request", None, false, vec![], vec!["[not run: bad request]"]),
            (
                "syscall_denied",
                None,
                true,
                vec![denial("syscall", "ptrace", "killed")],
                vec!["[refused: system call ptrace]", "[ended: syscall denied]"],
            ),
        ] {
            assert_eq!(lines(verdict, signal, started, denials), expected, "{verdict}");
        }
        assert_eq!(lines("exited", None, true, vec![host(); 7]).last().map(String::as_str), Some("[refused: 2 more]"));
    }

    #[test]
    fn a_result_is_read_with_all_that_it_has_besides() {
        let result = serde_json::json!({"verdict": "signaled", "signal": "SIGKILL", "started": true, "code": 137, "output": "x",
            "denials": [{"kind": "network", "what": "a look-up", "answer": "refused", "hint": true}]});
        let ending: Ending = serde_json::from_value(result).unwrap();
        assert_eq!(ending.lines(), ["[refused: a look-up]", "[ended: signal SIGKILL]"]);
    }
}
