//! What workers tell the supervisor of a service, and what the two say to each other about templates.
//!
//! A worker asks for a template by what its request was, and the supervisor answers in its own time, with
//! an image or a reason. Values only: what may be asked for is the supervisor's to know.

use alloc::{string::String, vec::Vec};

use serde::{Deserialize, Serialize};

use super::{Malformed, Message, empty, frame, from_json, json_frame};

/// What a worker has prepared from the beginning on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReadyFor {
    /// For this key.
    pub key: String,
    /// Under this policy.
    pub policy: String,
    /// For programs of this runtime.
    pub runtime: String,
}

/// A template of a service, and whose runs its images are for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TemplateOf {
    /// Its policy, as keys name it.
    pub policy: String,
    /// Its runtime.
    pub runtime: String,
    /// For the runs of this key; none: of all keys that use the policy.
    pub key: Option<String>,
}

/// What a worker tells the supervisor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToSupervisor {
    /// It has too little of a template.
    Wants(TemplateWanted),
    /// It has read its table.
    HasTable,
}

/// What a worker asks for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TemplateWanted {
    /// The template.
    pub of: TemplateOf,
    /// The key whose request would have used it.
    pub key: String,
    /// The image of this number, and those before it, are not what a fresh start is now.
    pub unfit: Option<u64>,
    /// It can still make copies of one, so that an image that is too old is of no use to it.
    pub has_one: bool,
}

impl Message for ToSupervisor {
    fn to_frame(&self) -> Result<Vec<u8>, Malformed> {
        match self {
            ToSupervisor::Wants(wanted) => json_frame(64, wanted),
            ToSupervisor::HasTable => frame(65, &[]),
        }
    }

    fn parse(kind: u8, payload: &[u8]) -> Result<Self, Malformed> {
        match kind {
            64 => from_json(payload).map(ToSupervisor::Wants),
            65 => empty(payload, ToSupervisor::HasTable),
            _ => Err(Malformed::Kind(kind)),
        }
    }
}

/// An image of a template for some runs of a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TemplateLent {
    /// The template.
    pub of: TemplateOf,
    /// The image's number, of all that the service has made.
    pub number: u64,
    /// Copies that the worker may make of it.
    pub runs: u64,
    /// When it was made, in milliseconds of the kernel's CLOCK_MONOTONIC: a worker may read this much later.
    pub made_ms: u64,
}

/// Why there is no image of a template.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TemplateRefused {
    /// The template.
    pub of: TemplateOf,
    /// Why not.
    pub why: String,
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use alloc::{string::ToString, vec};

    use super::{super::FrameDecoder, *};

    #[test]
    fn what_is_said_of_templates_comes_out_as_it_went_in() {
        let of = TemplateOf { policy: "p".to_string(), runtime: "python".to_string(), key: Some("k".to_string()) };
        let wanted = |unfit| ToSupervisor::Wants(TemplateWanted { of: of.clone(), key: "k".to_string(), unfit, has_one: true });
        for message in [wanted(None), wanted(Some(7)), ToSupervisor::HasTable] {
            let mut decoder = FrameDecoder::default();
            decoder.push(&message.to_frame().unwrap());
            assert_eq!(decoder.take(), Ok(Some(message)));
        }
        // A worker says nothing else, and the front's messages are none of its.
        for (kind, payload) in [(64, &b"{}"[..]), (64, b""), (1, b""), (128, b""), (65, b"{}"), (66, b"")] {
            let mut bytes = vec![u8::try_from(payload.len()).unwrap_or_default(), 0, 0, 0, kind];
            bytes.extend_from_slice(payload);
            let mut decoder = FrameDecoder::default();
            decoder.push(&bytes);
            assert!(decoder.take::<ToSupervisor>().is_err(), "{kind}");
        }
    }
}
