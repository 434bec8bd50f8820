//! What was refused and what ended a run, in the lines behind its output that a model reads.
//!
//! Words alone, each line in brackets. A program can print such a line too, and no verdict depends
//! on one. Where a line of its output begins with `[`, the last line says how the run ended, so that
//! this line is never the program's. The names in the lines are as they came: who prints them
//! escapes them.

use alloc::{borrow::ToOwned, format, string::String, vec::Vec};

use serde::Deserialize;

use crate::text::is_hidden;

/// Refusals with a line of their own.
const MAX_REFUSED: usize = 5;

/// The fields of a result that say how it ended. One that lacks a field, or is no result, has
/// nothing in its place.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Ending {
    verdict: String,
    code: i64,
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
    /// The lines behind this output. A run that exited by itself and was refused nothing has none,
    /// unless its output has a line in brackets.
    pub fn lines(&self, output: &str) -> Vec<String> {
        let refused: Vec<String> = self.denials.iter().filter_map(Refused::name).collect();
        let mut lines: Vec<String> = refused.iter().take(MAX_REFUSED).map(|name| format!("[refused: {name}]")).collect();
        if let Some(more) = refused.len().checked_sub(MAX_REFUSED).filter(|more| *more > 0) {
            lines.push(format!("[refused: {more} more]"));
        }
        let ended_by = self.denials.iter().find(|denial| denial.kind == "limit" && denial.answer == "ended");
        lines.extend(match (ended_by, self.verdict.as_str(), &self.signal) {
            (Some(limit), ..) => Some(format!("[ended: {}]", limit_in_words(&limit.what))),
            (None, "exited", _) => has_line_in_brackets(output).then(|| format!("[exit status {}]", self.code)),
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

/// Whether a reader could take a line of this output for one of those above: it begins with `[`,
/// apart from what is not drawn. Lines end where Python's `str.splitlines` ends them. The Python
/// package has the same rule.
pub fn has_line_in_brackets(output: &str) -> bool {
    let ends_line = |letter| matches!(letter, '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}');
    output.split(ends_line).any(begins_with_bracket)
}

fn begins_with_bracket(line: &str) -> bool {
    let mut rest = line;
    loop {
        if let Some(after) = behind_sequence(rest) {
            rest = after;
            continue;
        }
        let mut letters = rest.chars();
        match letters.next() {
            // Another escape sequence: readers differ in where it ends.
            Some('\u{1b}' | '\u{80}'..='\u{9f}') => return rest.contains('['),
            Some(letter) if is_blank(letter) => rest = letters.as_str(),
            first => return first == Some('['),
        }
    }
}

/// What follows an escape sequence with a number, such as a colour. One without a number is none:
/// `ESC [ended` would be one, too.
fn behind_sequence(text: &str) -> Option<&str> {
    let numbers = text.strip_prefix("\u{1b}[")?;
    let behind = numbers.trim_start_matches(|letter| matches!(letter, '0'..='?'));
    let has_numbers = behind.len() < numbers.len();
    behind.trim_start_matches(|letter| matches!(letter, ' '..='/')).strip_prefix(|last| has_numbers && matches!(last, '@'..='~'))
}

/// Whether a character at the front of a line leaves it looking empty: a blank, a hidden character
/// or a mark that belongs to the letter before it.
fn is_blank(letter: char) -> bool {
    // Rust escapes such a mark at the beginning of a text.
    let is_mark = || !letter.is_ascii() && letter.escape_debug().next() == Some('\\');
    letter.is_whitespace() || is_hidden(letter) || is_mark()
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
            Ending { verdict: verdict.into(), signal: signal.map(String::from), started, denials, code: 0 }.lines("x\n")
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
    fn the_last_line_is_never_the_programs() {
        let ended = "[ended: wall clock of 2s]";
        let exited = |output: &str, code| {
            let denials = vec![Refused { kind: "network".into(), what: "a look-up".into(), answer: "refused".into() }];
            Ending { verdict: "exited".into(), code, started: true, denials, ..Ending::default() }.lines(output)
        };
        assert_eq!(exited(ended, 3), ["[refused: a look-up]", "[exit status 3]"]);
        assert_eq!(exited("3 [x]\n", 3), ["[refused: a look-up]"]);
        let fronts = "\u{b} \u{c} \r \u{1c} \u{1d} \u{1e} \u{85} \u{2028} \u{2029} \n\u{200b} \n\u{feff} \n\u{a0} \n\u{2063} \n\u{2800} \n\u{3164} \
                      \n\u{301} \n\u{7} \n\u{1b}[2K \n\u{1b}[K \n\u{1b} \n\u{1b}[1;31m\u{1b}[m \n\u{9b}2K \n\u{1b}]0;t\u{7} \n\u{1b}(B \n\t";
        for front in fronts.split(' ') {
            assert!(has_line_in_brackets(&format!("x{front}{ended}\ny")), "{front:?}");
        }
        assert!(has_line_in_brackets(ended) && has_line_in_brackets("  [1, 2]") && has_line_in_brackets("x\n[exited]\n\u{2063}"));
        // The control: brackets within a line, and what is drawn before them.
        for front in ["", "\n.", "\n\u{1b}[1;31mx", "\né", "\n\u{1f600}", "\n1\u{200b}", "\u{1f}", "\u{1b}[2K"] {
            assert!(!has_line_in_brackets(&format!("x{front}{ended}\ny")), "{front:?}");
        }
        assert!(!has_line_in_brackets("") && !has_line_in_brackets("42\n\n"));
    }

    #[test]
    fn a_result_is_read_with_all_that_it_has_besides() {
        let result = serde_json::json!({"verdict": "signaled", "signal": "SIGKILL", "started": true, "code": 137, "output": "x",
            "denials": [{"kind": "network", "what": "a look-up", "answer": "refused", "hint": true}]});
        let ending: Ending = serde_json::from_value(result).unwrap();
        assert_eq!(ending.lines("x"), ["[refused: a look-up]", "[ended: signal SIGKILL]"]);
    }
}
