//! From an outcome to the result of the contract.
//!
//! Wording and encoding only; the verdict was reached before.

use std::collections::BTreeMap;

use base64::{Engine, prelude::BASE64_STANDARD};
use sha2::{Digest, Sha256};
use stockade_launcher::{Captured, Outcome};
use stockade_policy::{model::Policy, plan::Plan};
use stockade_protocol::{Encoding, PerStream, PolicyId, Report, Request, StreamText, Verdict};

/// What a result repeats of its request.
pub(crate) struct Echo {
    id: Option<String>,
    labels: BTreeMap<String, String>,
}

impl Echo {
    pub(crate) fn of(request: &Request) -> Self {
        Echo { id: request.id.clone(), labels: request.labels.clone() }
    }

    pub(crate) fn onto(self, report: Report) -> Report {
        Report { id: self.id, labels: self.labels, ..report }
    }
}

/// The plan's hash, over its canonical JSON.
pub(crate) fn plan_hash(plan: &Plan) -> String {
    let json = serde_json::to_vec(plan).unwrap_or_default();
    Sha256::digest(json).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The result of a run. The plan is hashed only `with_hash`: nobody reads the receipt of
/// a command whose report was not asked for.
pub(crate) fn from_outcome(outcome: Outcome, plan: &Plan, policy: &Policy, encoding: Encoding, with_hash: bool) -> Report {
    let (output, output_lossy) = encode(outcome.output.clone(), encoding);
    let (error, error_lossy) = encode(outcome.error.clone(), encoding);
    let truncated = PerStream { output: outcome.output.truncated, error: outcome.error.truncated };
    let receipt = outcome
        .receipt
        .map(|receipt| stockade_protocol::Receipt { plan_sha256: if with_hash { plan_hash(plan) } else { String::new() }, ..receipt });
    Report {
        schema: 1,
        id: None,
        output: Some(output),
        error: outcome.message.map_or(error, StreamText),
        code: outcome.code,
        success: outcome.verdict == Verdict::Exited && outcome.code == 0,
        verdict: outcome.verdict,
        reason: outcome.reason.map(String::from),
        started: outcome.started,
        signal: outcome.signal.map(signal_name),
        duration_ms: outcome.duration_ms,
        limits_hit: outcome.limits_hit,
        bytes: outcome.bytes,
        truncated,
        lossy: PerStream { output: output_lossy, error: error_lossy },
        usage: outcome.usage,
        limits: plan.limits.clone(),
        denials: outcome.denials,
        denials_omitted: outcome.denials_omitted,
        egress: outcome.egress,
        files: outcome.files,
        receipt,
        policy: Some(PolicyId { name: policy.name.clone(), origin: Plan::origin(policy), sha256: policy.sha256.clone() }),
        labels: BTreeMap::new(),
    }
}

/// A stream in the form that the request asked for, and whether bytes were lost.
fn encode(captured: Captured, encoding: Encoding) -> (StreamText, bool) {
    match encoding {
        Encoding::Base64 => (StreamText(BASE64_STANDARD.encode(captured.bytes)), false),
        Encoding::Text => match String::from_utf8(captured.bytes) {
            Ok(text) => (StreamText(text), false),
            Err(error) => (StreamText(String::from_utf8_lossy(error.as_bytes()).into_owned()), true),
        },
    }
}

fn signal_name(number: i32) -> String {
    nix::sys::signal::Signal::try_from(number).map_or_else(|_| format!("SIG{number}"), |signal| signal.as_str().to_owned())
}
