//! What was refused and what ended a run, in the lines behind its output that a model reads.
//!
//! Words alone, each line in brackets. A program can print such a line too; no verdict depends on
//! one. The names in them are as they came: who prints them escapes them.

use alloc::{borrow::ToOwned, format, string::String, vec::Vec};

/// Refusals with a line of their own.
const MAX_REFUSED: usize = 5;

/// One of a result's `denials`.
#[derive(Clone, Copy, Debug)]
pub struct Refused<'a> {
    /// Its `kind`.
    pub kind: &'a str,
    /// Its `what`.
    pub what: &'a str,
    /// Its `answer`.
    pub answer: &'a str,
}

/// The lines of a result with this verdict, signal and denials. One that exited by itself and was
/// refused nothing has none.
pub fn lines(verdict: &str, signal: Option<&str>, started: bool, denials: &[Refused<'_>]) -> Vec<String> {
    let refused: Vec<String> = denials.iter().filter_map(Refused::name).collect();
    let mut lines: Vec<String> = refused.iter().take(MAX_REFUSED).map(|name| format!("[refused: {name}]")).collect();
    if let Some(more) = refused.len().checked_sub(MAX_REFUSED).filter(|more| *more > 0) {
        lines.push(format!("[refused: {more} more]"));
    }
    let ended_by = denials.iter().find(|denial| denial.kind == "limit" && denial.answer == "ended");
    lines.extend(match (ended_by, verdict, signal) {
        (Some(limit), ..) => Some(format!("[ended: {}]", limit_in_words(limit.what))),
        (None, "exited", _) => None,
        (None, "signaled", Some(signal)) => Some(format!("[ended: signal {signal}]")),
        _ => Some(format!("[{}: {}]", if started { "ended" } else { "not run" }, verdict.replace('_', " "))),
    });
    lines
}

impl Refused<'_> {
    /// What the code could not reach or call. A path, a module or a limit stands in its own words
    /// above.
    fn name(&self) -> Option<String> {
        match self.kind {
            "connection" => Some(self.what.replacen(" port ", ":", 1)),
            "network" => Some(self.what.to_owned()),
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
    use alloc::vec;

    use super::*;

    #[test]
    fn each_end_but_an_exit_has_its_line() {
        let denial = |kind, what, answer| Refused { kind, what, answer };
        let host = denial("connection", "example.com port 443", "refused");
        for (verdict, signal, started, denials, expected) in [
            ("exited", None, true, vec![], vec![]),
            ("exited", None, true, vec![host], vec!["[refused: example.com:443]"]),
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
            assert_eq!(lines(verdict, signal, started, &denials), expected, "{verdict}");
        }
        assert_eq!(lines("exited", None, true, &[host; 7]).last().map(String::as_str), Some("[refused: 2 more]"));
    }
}
