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
