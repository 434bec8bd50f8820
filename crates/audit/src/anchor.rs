//! Anchors: the chain, number and hash of a record, kept outside the log. One goes to the journal
//! for each record, or to syslog where there is no journal, as `audit head CHAIN:SEQ:SHA256`; so
//! does what could not be written down.
//!
//! Each is one datagram that is never waited for: a journal that does not take it loses one
//! anchor, and the next one covers the same records. Fields are ASCII on one line, so that nothing
//! which they quote can add another field.

use std::{
    fmt::Write,
    os::unix::net::UnixDatagram,
    path::{Path, PathBuf},
};

use stockade_protocol::text::{escape_line, is_not_ascii};

use crate::{AppendedRecord, Event, Kind, chain::Link};

/// MESSAGE_ID of every anchor.
pub const HEAD: &str = "3c787cb39d1d4d2db3bdbf27aa2bcc54";
/// MESSAGE_ID of every alert.
pub const ALERT: &str = "0943ddca37114425b7df3e5e40c93faa";
/// MESSAGE_ID of every record that could not be written.
pub const UNRECORDED: &str = "b939dc7099aa41d1bbe6b7fda62107f0";
/// syslog(3): security messages that only some users may read.
const AUTHPRIV: u8 = 10 << 3;
const INFO: u8 = 6;
const WARNING: u8 = 4;
const ERROR: u8 = 3;
const MARK: &str = "audit head ";

/// A record of the chain as something outside the log knows it: the journal, syslog or a result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Anchor {
    /// The record.
    pub link: Link,
}

impl Anchor {
    /// Finds the anchor in a line of a journal or a syslog, however it was printed.
    pub fn find(line: &str) -> Option<Self> {
        let (_, rest) = line.split_once(MARK)?;
        let word = rest.split(|c: char| !c.is_ascii_alphanumeric() && c != ':').next()?;
        let mut parts = word.split(':');
        let (chain, seq, hash) = (parts.next()?, parts.next()?.parse().ok()?, parts.next()?);
        if parts.next().is_some() { None } else { Self::sound(chain, seq, hash) }
    }

    /// The anchor that a result's JSON carries in `audit`.
    pub fn of_result(result: &serde_json::Value) -> Option<Self> {
        let audit = &result["audit"];
        Self::sound(audit["chain"].as_str()?, audit["seq"].as_u64()?, audit["sha256"].as_str()?)
    }

    fn sound(chain: &str, seq: u64, hash: &str) -> Option<Self> {
        let is_hex = |text: &str, length| text.len() == length && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        let sound = is_hex(chain, 16) && is_hex(hash, 64);
        sound.then(|| Anchor { link: Link { chain: chain.to_owned(), seq, hash: hash.to_owned() } })
    }
}

/// The service that took a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnchorSink {
    /// journald.
    Journal,
    /// A syslog daemon.
    Syslog,
}

/// The sockets of the journal and of syslog.
#[derive(Clone, Debug)]
pub struct AnchorSinks {
    /// journald's, for its native protocol.
    pub journal: PathBuf,
    /// syslog's.
    pub syslog: PathBuf,
}

impl Default for AnchorSinks {
    fn default() -> Self {
        AnchorSinks { journal: PathBuf::from("/run/systemd/journal/socket"), syslog: PathBuf::from("/dev/log") }
    }
}

impl AnchorSinks {
    /// The service that would take a message; `None`: neither listens.
    pub fn available(&self) -> Option<AnchorSink> {
        let listens = |path: &Path| UnixDatagram::unbound().and_then(|socket| socket.connect(path)).is_ok();
        if listens(&self.journal) {
            return Some(AnchorSink::Journal);
        }
        listens(&self.syslog).then_some(AnchorSink::Syslog)
    }

    /// Whether a socket exists; without one no message is composed.
    fn are_there(&self) -> bool {
        self.journal.exists() || self.syslog.exists()
    }

    /// Sends the anchor of a record.
    pub fn head(&self, appended: &AppendedRecord, event: &Event) -> Option<AnchorSink> {
        if !self.are_there() {
            return None;
        }
        let Link { chain, seq, hash } = &appended.link;
        let verdict = event.outcome();
        let message = format!("{MARK}{chain}:{seq}:{hash} run {} uid {} {verdict}", event.run, event.who.uid);
        let file = appended.file.display().to_string();
        let mut fields = common(event);
        fields.extend([
            ("AUDIT_LOG", file),
            ("AUDIT_CHAIN", chain.clone()),
            ("AUDIT_SEQ", seq.to_string()),
            ("AUDIT_SHA256", hash.clone()),
        ]);
        let priority = if event.event == Kind::Lost { WARNING } else { INFO };
        self.send(priority, HEAD, &message, &fields)
    }

    /// Raises an alert. `held_back`: alerts of the same caller that the rate did not let pass.
    pub fn alert(&self, event: &Event, held_back: u64) -> Option<AnchorSink> {
        if !self.are_there() {
            return None;
        }
        let reason = event.reason.as_ref().map(|reason| format!(" ({reason})")).unwrap_or_default();
        let mut message =
            format!("audit alert: {}{reason} by run {} of uid {}: {}", event.outcome(), event.run, event.who.uid, event.alerts.join(", "));
        if held_back > 0 {
            let _written = write!(message, "; {held_back} alerts before it were held back");
        }
        let mut fields = common(event);
        fields.extend([("ALERTS", event.alerts.join(", ")), ("ALERTS_HELD_BACK", held_back.to_string())]);
        self.send(WARNING, ALERT, &message, &fields)
    }

    /// Says that a record could not be written, and why.
    pub fn unrecorded(&self, event: &Event, failure: &str) -> Option<AnchorSink> {
        if !self.are_there() {
            return None;
        }
        let message = format!("not in the audit log: {} by run {} of uid {}: {failure}", event.outcome(), event.run, event.who.uid);
        let mut fields = common(event);
        fields.push(("FAILURE", failure.to_owned()));
        self.send(ERROR, UNRECORDED, &message, &fields)
    }

    fn send(&self, priority: u8, id: &str, message: &str, fields: &[(&str, String)]) -> Option<AnchorSink> {
        let socket = UnixDatagram::unbound().ok()?;
        socket.set_nonblocking(true).ok()?;
        let message = escape_line(message, is_not_ascii);
        let mut native =
            format!("MESSAGE={message}\nMESSAGE_ID={id}\nPRIORITY={priority}\nSYSLOG_FACILITY=10\nSYSLOG_IDENTIFIER=stockade\n");
        for (name, value) in fields {
            let _written = writeln!(native, "STOCKADE_{name}={}", escape_line(value, is_not_ascii));
        }
        if socket.send_to(native.as_bytes(), &self.journal).is_ok() {
            return Some(AnchorSink::Journal);
        }
        let line = format!("<{}>stockade[{}]: {message}", AUTHPRIV | priority, std::process::id());
        socket.send_to(line.as_bytes(), &self.syslog).ok().map(|_| AnchorSink::Syslog)
    }
}

fn common(event: &Event) -> Vec<(&'static str, String)> {
    let mut fields = vec![("RUN", event.run.clone()), ("CALLER_UID", event.who.uid.to_string()), ("VERDICT", event.outcome().to_owned())];
    fields.extend(event.reason.clone().map(|reason| ("REASON", reason)));
    fields.extend(event.policy.as_ref().map(|policy| ("POLICY", policy.name.clone())));
    fields.extend(event.policy.as_ref().map(|policy| ("POLICY_SHA256", policy.sha256.clone())));
    fields.extend(event.code.as_ref().map(|code| ("CODE_SHA256", code.sha256.clone())));
    fields
}

#[cfg(test)]
mod tests;
