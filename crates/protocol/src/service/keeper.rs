//! What front, keepers and the supervisor of a service say to each other about sessions.
//!
//! The front asks for a keeper, and the supervisor starts it and hands on its socket. A keeper is of one key
//! and one policy for its life. Values only: who may have one is not decided here.

use alloc::{collections::BTreeMap, string::String, vec::Vec};

use serde::{Deserialize, Serialize};

use super::{Malformed, Message, from_json, json_frame};

/// A session, and whose it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeeperOf {
    /// Its number at the front.
    pub session: String,
    /// The key that has it.
    pub key: String,
    /// The policy of its runs.
    pub policy: String,
    /// How long it is kept without being used, in milliseconds.
    pub idle_ms: u64,
    /// Labels that the client chose.
    pub labels: BTreeMap<String, String>,
}

impl KeeperOf {
    /// Letters of a session's number.
    pub const NUMBER: usize = 16;
    /// The longest time that one is kept without being used, in milliseconds.
    pub const MAX_IDLE_MS: u64 = 86_400_000;
    /// The most labels.
    pub const MAX_LABELS: usize = 64;
    /// The most bytes of all labels as JSON.
    pub const MAX_LABEL_BYTES: usize = 16 << 10;

    /// Whether an honest front could ask for this: the next front would show and address it.
    pub fn is_well_formed(&self) -> bool {
        let is_number = self.session.len() == Self::NUMBER && self.session.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        let fits = serde_json::to_vec(&self.labels).is_ok_and(|text| text.len() <= Self::MAX_LABEL_BYTES);
        is_number && (1000..=Self::MAX_IDLE_MS).contains(&self.idle_ms) && self.labels.len() <= Self::MAX_LABELS && fits
    }
}

/// Why a session was not started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NoKeeper {
    /// Its number.
    pub session: String,
    /// Why not.
    pub why: String,
    /// There are as many as may be, of all keys or of this one.
    pub is_full: bool,
}

/// What the front tells the supervisor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FromFront {
    /// It wants a session.
    Keep(KeeperOf),
}

impl Message for FromFront {
    fn to_frame(&self) -> Result<Vec<u8>, Malformed> {
        match self {
            FromFront::Keep(of) => json_frame(96, of),
        }
    }

    fn parse(kind: u8, payload: &[u8]) -> Result<Self, Malformed> {
        match kind {
            96 => from_json(payload).map(FromFront::Keep),
            _ => Err(Malformed::Kind(kind)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_that_no_client_could_have_asked_for_is_seen() {
        let of = |session: &str, idle_ms, label: usize| KeeperOf {
            session: session.into(),
            key: "k".into(),
            policy: "default".into(),
            idle_ms,
            labels: [("name".into(), "x".repeat(label))].into(),
        };
        assert!(of("0123456789abcdef", 1000, 16_000).is_well_formed());
        for (session, idle_ms) in [("x/../0", 1000), ("0123456789ABCDEF", 1000), ("0123456789abcdef", u64::MAX), ("0123456789abcdef", 0)] {
            assert!(!of(session, idle_ms, 1).is_well_formed(), "{session} {idle_ms}");
        }
        assert!(!of("0123456789abcdef", 1000, KeeperOf::MAX_LABEL_BYTES).is_well_formed());
    }
}
