//! Alerts of a policy, written as `KIND:WHAT`.
//!
//! A match compares values that the launcher has; no pattern language runs on hostile text. An
//! alert is a message only: it starts and stops nothing.

use std::{fmt, net::IpAddr};

use serde::{Deserialize, Serialize};
use stockade_protocol::Verdict;

use crate::{
    check::{self, Checked},
    diagnostic::{Diagnostic, quote},
    names,
    whitelist::{Name, views},
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

/// Every verdict, what the log says of a run whose launcher was killed, and `refused` for any run
/// that was not begun.
fn verdicts() -> impl Iterator<Item = &'static str> + Clone {
    Verdict::NAMES.into_iter().chain(["lost", REFUSED])
}

/// In place of a verdict: the event of a run that was refused, whatever its verdict.
pub const REFUSED: &str = "refused";

/// The page of all reasons, which a lint compares with the sources.
const REASONS: &str = include_str!("../../cli/help/reasons.md");

/// The identifiers of its tables.
fn reasons() -> impl Iterator<Item = &'static str> + Clone {
    let rows = REASONS.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
    rows.filter(|reason| *reason != "reason")
}

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

impl Alert {
    /// Whether a refused peer matches: by a name, by its address, or by an IPv4 address that
    /// this hides.
    pub fn meets_peer<'n>(&self, mut names: impl Iterator<Item = &'n str>, address: Option<IpAddr>) -> bool {
        let mut views = address.into_iter().flat_map(|address| views(address.to_canonical()));
        names.any(|name| self.meets(name)) || views.any(|view| self.meets(&view.to_string()))
    }
}

/// The peer of an alert as a denial writes it. None: no name or address is written so.
fn peer(what: &str) -> Option<String> {
    let Some(start) = what.strip_suffix('*') else {
        return match what.parse::<IpAddr>() {
            Ok(address) => Some(address.to_canonical().to_string()),
            Err(_) => Name::new(what).ok().map(|name| name.to_string()),
        };
    };
    let start = start.to_ascii_lowercase();
    let is_v6 = start.contains(':');
    let fits =
        |byte: u8| if is_v6 { byte.is_ascii_hexdigit() || byte == b':' } else { byte.is_ascii_alphanumeric() || b"._-".contains(&byte) };
    let has_zero = start.split(':').any(|group| group.len() > 4 || (group.len() > 1 && group.starts_with('0')));
    let is_no_beginning = start.starts_with(['.', '-']) || start.contains("..") || (is_v6 && has_zero);
    (start.bytes().all(fits) && !is_no_beginning).then(|| format!("{start}*"))
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
        AlertKind::Verdict if looks_for_one && !verdicts().any(|known| known == what) => Err(check::unknown("verdict", what, verdicts())),
        AlertKind::Reason if looks_for_one && !reasons().any(|known| known == what) => Err(check::unknown("reason", what, reasons())),
        AlertKind::Syscall if looks_for_one && !names::is_syscall(what) => check::syscall(what).map(|what| Alert { kind, what }),
        AlertKind::Egress => match peer(what) {
            Some(what) => Ok(Alert { kind, what }),
            None => Err(Diagnostic::new(format!("{} is not an alert", quote(text)), "no refused peer is written so")
                .help("write a host name, an address, or the beginning of one and a star, such as \"egress:169.254.*\"; without a port")),
        },
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
        assert!(
            meets("verdict:refused", "refused") && meets("reason:not_granted", "not_granted") && meets("reason:policy_*", "policy_invalid")
        );
        assert!(meets("syscall:*", "ptrace") && meets("syscall:io_*", "io_uring_setup") && !meets("syscall:ptrace", "ptrac"));
        assert!(meets("egress:169.254.*", "169.254.169.254") && !meets("egress:169.254.*", "10.0.0.1"));
        assert!(meets("code:/etc/shadow", "open('/etc/shadow')") && meets("output:root:x:", "a\nroot:x:0"));
        assert!(!meets("output:a*", "ab"), "a text is looked for as it is");
    }

    #[test]
    fn an_alert_for_a_peer_is_read_as_a_denial_writes_it() {
        for (text, read) in [
            ("egress:Evil.Example.", "egress:evil.example"),
            ("egress:::ffff:169.254.169.254", "egress:169.254.169.254"),
            ("egress:2001:DB8:0::1", "egress:2001:db8::1"),
            ("egress:FE80:*", "egress:fe80:*"),
            ("egress:Evil*", "egress:evil*"),
            ("egress:*", "egress:*"),
        ] {
            assert_eq!(alert(text).map(|alert| alert.to_string()).ok().as_deref(), Some(read), "{text}");
        }
        for bad in
            ["*.evil.example", "evil.example:80", "evil.example:8*", "[::1]:80", "10.0.0.0/8", "169.254", "a..b*", ".a*", "2001:0db8:*"]
        {
            assert!(alert(&format!("egress:{bad}")).is_err(), "{bad}");
        }
    }

    #[test]
    fn an_alert_for_a_peer_is_met_by_what_it_hides_and_by_every_name() {
        let meets =
            |text: &str, name: &str, address: &str| alert(text).ok().unwrap().meets_peer(std::iter::once(name), address.parse().ok());
        for address in ["169.254.169.254", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "2002:a9fe:a9fe::1"] {
            assert!(meets("egress:169.254.*", "a.example", address), "{address}");
            assert!(!meets("egress:10.*", "a.example", address), "{address}");
        }
        assert!(meets("egress:evil.example", "evil.example", "10.0.0.1") && !meets("egress:evil.example", "a.example", "10.0.0.1"));
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
            "reason:not_grantedd",
            "reason:reason",
            "code:\u{1b}",
            &format!("code:{}", "x".repeat(257)),
        ] {
            assert!(alert(bad).is_err(), "{bad}");
        }
    }
}
