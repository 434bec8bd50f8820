//! Alerts of a policy, written as `KIND:WHAT`.
//!
//! A match compares values that the launcher has; no pattern language runs on hostile text. An
//! alert is a message only: it starts and stops nothing.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{
    check::{self, Checked},
    diagnostic::{Diagnostic, quote},
    names,
};

/// The value that an alert compares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AlertKind {
    /// The verdict, by name.
    Verdict,
    /// The reason beside it.
    Reason,
    /// A refused system call.
    Syscall,
    /// A refused peer: a name or an address.
    Egress,
    /// A text in the code.
    Code,
    /// A text in the kept part of stdout or stderr.
    Output,
}

const KINDS: &[(&str, AlertKind)] = &[
    ("verdict", AlertKind::Verdict),
    ("reason", AlertKind::Reason),
    ("syscall", AlertKind::Syscall),
    ("egress", AlertKind::Egress),
    ("code", AlertKind::Code),
    ("output", AlertKind::Output),
];

/// Every verdict, and what the log says of a run whose launcher was killed.
const VERDICTS: &[&str] = &[
    "exited",
    "signaled",
    "wall_timeout",
    "cpu_timeout",
    "out_of_memory",
    "process_limit",
    "disk_limit",
    "output_limit",
    "syscall_denied",
    "cancelled",
    "bad_request",
    "sandbox_error",
    "screened",
    "approval_required",
    "lost",
];

/// One line of `alerts`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Alert {
    /// The value that it compares.
    pub kind: AlertKind,
    /// The text to find: for `code` and `output` a part of the value, else the whole of it, or
    /// its beginning and a star.
    pub what: String,
}

impl fmt::Display for Alert {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = KINDS.iter().find(|(_, kind)| *kind == self.kind).map_or("", |(name, _)| name);
        write!(out, "{name}:{}", self.what)
    }
}

impl From<Alert> for String {
    fn from(alert: Alert) -> Self {
        alert.to_string()
    }
}

impl TryFrom<String> for Alert {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        alert(&text).map_err(|diagnostic| diagnostic.title)
    }
}

impl Alert {
    /// Whether a value of its kind matches.
    pub fn meets(&self, value: &str) -> bool {
        match (self.kind, self.what.strip_suffix('*')) {
            (AlertKind::Code | AlertKind::Output, _) => value.contains(&self.what),
            (_, Some(start)) => value.starts_with(start),
            (_, None) => value == self.what,
        }
    }
}

/// Reads one line of `alerts`.
pub(crate) fn alert(text: &str) -> Checked<Alert> {
    let Some((kind, what)) = text.split_once(':') else {
        return Err(Diagnostic::new(format!("{} is not an alert", quote(text)), "no `:` in it")
            .help("write KIND:WHAT, such as \"verdict:out_of_memory\""));
    };
    let kind = check::one_of(KINDS, "kind of alert", kind)?;
    let whole = what.strip_suffix('*').unwrap_or(what);
    if what.is_empty() || what.len() > 256 || what.chars().any(char::is_control) {
        return Err(Diagnostic::new(
            format!("{} is not an alert", quote(text)),
            "WHAT is empty, longer than 256 bytes, or has a control character",
        ));
    }
    let looks_for_one = whole.len() == what.len();
    match kind {
        AlertKind::Verdict if looks_for_one && !VERDICTS.contains(&what) => Err(check::unknown("verdict", what, VERDICTS.iter().copied())),
        AlertKind::Syscall if looks_for_one && !names::is_syscall(what) => check::syscall(what).map(|what| Alert { kind, what }),
        _ => Ok(Alert { kind, what: what.to_owned() }),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use super::*;

    #[test]
    fn an_alert_is_read_shown_and_met() {
        let meets = |text: &str, value: &str| {
            let alert = alert(text).unwrap_or_else(|diagnostic| panic!("{text}: {}", diagnostic.title));
            assert_eq!(alert.to_string(), text);
            alert.meets(value)
        };
        assert!(meets("verdict:out_of_memory", "out_of_memory") && !meets("verdict:exited", "out_of_memory"));
        assert!(meets("syscall:*", "ptrace") && meets("syscall:io_*", "io_uring_setup") && !meets("syscall:ptrace", "ptrac"));
        assert!(meets("egress:169.254.*", "169.254.169.254") && !meets("egress:169.254.*", "10.0.0.1"));
        assert!(meets("code:/etc/shadow", "open('/etc/shadow')") && meets("output:root:x:", "a\nroot:x:0"));
        assert!(!meets("output:a*", "ab"), "a text is looked for as it is");
    }

    #[test]
    fn what_cannot_be_met_is_refused() {
        for bad in [
            "",
            "exited",
            "verdict:",
            "verdict:exploded",
            "verdit:exited",
            "syscall:opnat",
            "code:\u{1b}",
            &format!("code:{}", "x".repeat(257)),
        ] {
            assert!(alert(bad).is_err(), "{bad}");
        }
    }
}
