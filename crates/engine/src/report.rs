//! Turns an outcome into the result of the contract.
//!
//! It words and encodes only; the launcher has decided the verdict, and nothing here changes it.

use std::collections::BTreeMap;

use base64::{Engine, prelude::BASE64_STANDARD};
use sha2::{Digest, Sha256};
use stockade_launcher::{Captured, KERNEL_MEMORY_UNCOUNTED, Outcome, RefusedCall, SCRATCH_UNCOUNTED};
use stockade_policy::{model::Policy, plan::Plan, whitelist::Whitelist};
use stockade_policy_tools::remedy;
use stockade_protocol::{
    Denial, EgressDenial, EgressReport, Encoding, LimitKey, PerStream, PolicyId, Report, Request, StreamText, Verdict,
};

/// Refused peers that stand in `denials`; `egress` has more.
const MAX_PEERS: usize = 8;
/// Rules that a refusal names of the whitelist.
const MAX_RULES: usize = 5;

/// The values of the request that its result repeats.
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
    stockade_protocol::text::hex(&Sha256::digest(json))
}

/// The policy's part of a result.
pub(crate) fn policy_id(policy: &Policy) -> PolicyId {
    PolicyId { name: policy.name.clone(), origin: policy.origin.to_string(), sha256: policy.sha256.clone() }
}

/// The result of a run.
pub(crate) fn from_outcome(outcome: Outcome, plan: &Plan, policy: &Policy, encoding: Encoding) -> Report {
    let egress = with_lines(outcome.egress.clone(), policy);
    let denials = denials(&outcome, &egress, plan, policy);
    let (output, output_lossy) = encode(outcome.output.clone(), encoding);
    let (error, error_lossy) = encode(outcome.error.clone(), encoding);
    let truncated = PerStream { output: outcome.output.truncated, error: outcome.error.truncated };
    Report {
        schema: 1,
        id: None,
        output: Some(output),
        error: outcome.message.map_or(error, StreamText),
        compile: None,
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
        limits_unenforced: plan.unenforced_limits().into_iter().map(LimitKey::name).collect(),
        findings: Vec::new(),
        findings_omitted: 0,
        approval: None,
        modules: outcome.modules,
        denials,
        denials_omitted: outcome.denials_omitted,
        egress,
        files: outcome.files,
        receipt: outcome.receipt,
        policy: Some(policy_id(policy)),
        audit: None,
        labels: BTreeMap::new(),
    }
}

/// The refused calls and peers, the limits that ended or touched the run and, where the run
/// failed, hints from its error output.
fn denials(outcome: &Outcome, egress: &EgressReport, plan: &Plan, policy: &Policy) -> Vec<Denial> {
    let mut all: Vec<Denial> = outcome.denials.iter().map(|refused| call(refused, policy)).collect();
    all.extend(peers(egress, &policy.egress.whitelist));
    let touched = outcome.limits_hit.iter().filter_map(|name| LimitKey::from_name(name));
    all.extend(outcome.limit.into_iter().map(|key| limit(key, outcome, plan, policy)));
    all.extend(touched.map(|key| limit(key, outcome, plan, policy)));
    if outcome.reason == Some(SCRATCH_UNCOUNTED) {
        all.push(uncounted());
    }
    if outcome.reason == Some(KERNEL_MEMORY_UNCOUNTED) {
        all.push(uncounted_kernel_memory());
    }
    if outcome.started && outcome.code != 0 {
        // A terminal has one stream, which carries errors as well.
        let text = if plan.terminal { &outcome.output } else { &outcome.error };
        let hints = remedy::hints(&text.bytes, plan, policy);
        let known = |hint: &Denial, all: &[Denial]| {
            hint.limit.as_ref().is_some_and(|limit| all.iter().flat_map(|denial| &denial.limit).any(|other| other.key == limit.key))
        };
        let new: Vec<Denial> = hints.into_iter().filter(|hint| !known(hint, &all)).collect();
        all.extend(new);
    }
    all
}

/// The first peers that the egress gate refused, each once.
fn peers(egress: &EgressReport, whitelist: &Whitelist) -> Vec<Denial> {
    let mut all: Vec<Denial> = Vec::new();
    for denied in &egress.denied {
        let Some(peer) = denied.host.as_ref().or(denied.addr.as_ref()) else { continue };
        let what = denied.port.map_or_else(|| peer.clone(), |port| format!("{peer} port {port}"));
        if let Some(known) = all.iter_mut().find(|known| known.what == what) {
            known.count += denied.count;
        } else if all.len() < MAX_PEERS {
            all.push(peer_denial(denied, what, whitelist));
        }
    }
    all
}

fn peer_denial(denied: &EgressDenial, what: String, whitelist: &Whitelist) -> Denial {
    let reason = serde_json::to_value(denied.reason).ok();
    let reason = reason.as_ref().and_then(|reason| reason.as_str()).unwrap_or_default();
    let rules: Vec<String> = whitelist.rules().iter().map(ToString::to_string).collect();
    let more = rules.len().checked_sub(MAX_RULES).filter(|more| *more > 0).map(|more| format!(" and {more} more"));
    let open = format!("{}{}", rules.iter().take(MAX_RULES).map(String::as_str).collect::<Vec<_>>().join(", "), more.unwrap_or_default());
    Denial {
        kind: "connection",
        what,
        count: denied.count,
        answer: String::from("refused"),
        rule: String::from("[egress] whitelist"),
        allow: denied.line.as_ref().and_then(|line| line.strip_prefix("egress.")).map(|line| format!("[egress] {line}")),
        help: Some(match open.as_str() {
            "" => format!("this is refused ({reason}); the code can reach no host"),
            open => format!("this is refused ({reason}); the code can reach only {open}"),
        }),
        hint: false,
        limit: None,
    }
}

/// The gate's record, with the policy line that would allow each refused peer, and one for all.
fn with_lines(mut egress: EgressReport, policy: &Policy) -> EgressReport {
    egress.line = remedy::peers(&policy.egress.whitelist, &egress.denied);
    for denied in &mut egress.denied {
        denied.line = denied.allow.as_deref().and_then(|rule| remedy::peer(&policy.egress.whitelist, rule));
    }
    egress
}

fn call(refused: &RefusedCall, policy: &Policy) -> Denial {
    let remedy = remedy::call(&policy.seccomp, &refused.name, &refused.arguments);
    Denial {
        kind: "syscall",
        what: refused.what.clone(),
        count: refused.count,
        answer: String::from(if refused.killed { "killed" } else { "EPERM" }),
        rule: remedy.rule,
        allow: remedy.allow,
        help: remedy.help,
        hint: false,
        limit: None,
    }
}

fn limit(key: LimitKey, outcome: &Outcome, plan: &Plan, policy: &Policy) -> Denial {
    let usage = &outcome.usage;
    let peak = match key {
        LimitKey::Wall => Some(outcome.duration_ms),
        LimitKey::Cpu => usage.cpu_user_ms.zip(usage.cpu_system_ms).map(|(user, system)| user + system),
        LimitKey::Memory => usage.memory_peak_bytes,
        LimitKey::Processes => usage.processes_peak,
        LimitKey::ScratchSize => usage.scratch_bytes,
        LimitKey::TmpSize => usage.tmp_bytes,
        LimitKey::OutputSize => Some(outcome.bytes.output.max(outcome.bytes.error)),
        _ => None,
    };
    // A limit that only refuses (a fork, a write) does not end the program.
    let ended = outcome.limit == Some(key)
        && (matches!(outcome.verdict, Verdict::WallTimeout | Verdict::CpuTimeout | Verdict::OutOfMemory | Verdict::OutputLimit)
            || outcome.signal.is_some()
            || outcome.code == 137);
    let remedy = remedy::limit(policy, plan, key, peak);
    Denial {
        kind: "limit",
        what: format!("{} {}", key.name(), remedy.limit.value),
        count: 1,
        answer: String::from(if ended { "ended" } else { "refused" }),
        rule: remedy.rule,
        allow: remedy.allow,
        help: Some(remedy.help),
        hint: false,
        limit: Some(remedy.limit),
    }
}

/// The denial for a scratch that cannot be counted. It names no limit, since a larger one does
/// not help.
fn uncounted() -> Denial {
    Denial {
        kind: "limit",
        what: String::from("something in scratch that cannot be counted"),
        count: 1,
        answer: String::from("ended"),
        rule: String::from("the limits of a host scratch"),
        allow: None,
        help: Some(String::from(
            "a program closed a directory to its owner, nested directories more than 200 deep, made the count take far too long, or kept deleted files that no count finds (mapped only, in messages between processes, in a process of a program that its user may not read), and what they hold could be anything; no larger limit helps: keep u+rx on directories, keep such files in /tmp, or leave `scratch` out, since a private one needs no counting",
        )),
        hint: false,
        limit: None,
    }
}

/// The denial for kernel memory that cannot be counted. It names no limit either: how much the run
/// holds of it is not known.
fn uncounted_kernel_memory() -> Denial {
    Denial {
        kind: "limit",
        what: String::from("kernel memory that cannot be counted"),
        count: 1,
        answer: String::from("ended"),
        rule: String::from("[limits] memory, whose tenth bounds what the kernel holds beside it"),
        allow: None,
        help: Some(String::from(
            "this host has very many file locks, or much memory that sockets may hold, and a program could not be stopped for half a second, made the count take far too long, passed closed sockets to another, or is one that its user may not read, so all of it could be its own: end such processes before the program goes on, or run it where fewer locks are held",
        )),
        hint: false,
        limit: None,
    }
}

/// The result of a command whose streams were passed through: `error` holds only Stockade's
/// message.
pub(crate) fn without_streams(report: Report, message: Option<String>) -> Report {
    let (truncated, lossy) = (PerStream::default(), PerStream::default());
    Report { output: None, error: StreamText(message.unwrap_or_default()), truncated, lossy, ..report }
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
