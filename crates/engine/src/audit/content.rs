//! What a record says of a request, a result and who asked. Each text and each list is cut to a
//! length here.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::SystemTime,
};

use stockade_audit::{Actor, DenialSummary, Egress, Event, Finding, ModuleEvent, Peer, PolicyRef, text};
use stockade_policy::{
    alert::{Alert, AlertKind},
    model::Policy,
    plan::{Plan, Protection},
};
use stockade_protocol::{
    Denial, EgressDenial, EgressReport, Verdict,
    modules::{self, HookRecord},
    screen,
};

use super::AuditSubject;
use crate::caller::Identity;

/// The longest text of a record that is no preview.
pub(super) const MAX_TEXT_LEN: usize = 256;
/// Entries of a list.
pub(super) const MAX_ENTRIES: usize = 32;

pub(super) fn verdict_name(verdict: Verdict) -> String {
    serde_json::to_value(verdict).ok().and_then(|value| value.as_str().map(String::from)).unwrap_or_default()
}

/// `socket(AF_VSOCK)` is about `socket`.
pub(super) fn call_name(denial: &Denial) -> &str {
    denial.what.split('(').next().unwrap_or_default()
}

pub(super) fn finding(found: &screen::Finding) -> Finding {
    Finding {
        rule: found.rule.name().to_owned(),
        action: found.action.name().to_owned(),
        file: found.file.as_ref().map(|file| text::clip(file, MAX_TEXT_LEN)),
        line: found.line,
        column: found.column,
    }
}

pub(super) fn denied(denial: &Denial) -> DenialSummary {
    let clip = |text: &str| text::clip(text, MAX_TEXT_LEN);
    DenialSummary { kind: clip(denial.kind), what: clip(&denial.what), answer: clip(&denial.answer), count: denial.count }
}

pub(super) fn met_module(seen: &HookRecord) -> ModuleEvent {
    let action = match seen.action {
        modules::HookAction::Note => "note",
        modules::HookAction::Deny => "deny",
    };
    ModuleEvent { name: text::clip(&seen.name, MAX_TEXT_LEN), action: action.to_owned(), count: seen.count }
}

/// None where nothing was tried. Refusals that an alert names come first.
pub(super) fn egress(report: &EgressReport, alerts: &[Alert]) -> Option<Egress> {
    let peer = |host: &Option<String>, addr: Option<&String>, port, why: Option<String>, count| Peer {
        peer: text::clip(host.as_ref().or(addr).map_or("", String::as_str), MAX_TEXT_LEN),
        port,
        why,
        count,
    };
    let clip = |text: &String| text::clip(text, MAX_TEXT_LEN);
    let lists = [report.allowed.len(), report.denied.len(), report.failed.len()];
    if lists == [0; 3] {
        return None;
    }
    let why = |reason| serde_json::to_value(reason).ok().and_then(|value| value.as_str().map(String::from));
    let allowed = report.allowed.iter().map(|flow| peer(&flow.host, Some(&flow.addr), Some(flow.port), None, flow.connections));
    let is_named = |denied: &&EgressDenial| {
        let names = || [&denied.host, &denied.sni].into_iter().flatten().map(String::as_str);
        let address = denied.addr.as_ref().and_then(|address| address.parse().ok());
        alerts.iter().filter(|alert| alert.kind == AlertKind::Egress).any(|alert| alert.meets_peer(names(), address))
    };
    let (named, others): (Vec<_>, Vec<_>) = report.denied.iter().partition(is_named);
    let denied = named
        .into_iter()
        .chain(others)
        .map(|denied| peer(&denied.host, denied.addr.as_ref(), denied.port, why(denied.reason), denied.count));
    let failed = report
        .failed
        .iter()
        .map(|failed| peer(&failed.host, failed.addr.as_ref(), Some(failed.port), Some(clip(&failed.error)), failed.count));
    Some(Egress {
        allowed: allowed.take(MAX_ENTRIES).collect(),
        denied: denied.take(MAX_ENTRIES).collect(),
        failed: failed.take(MAX_ENTRIES).collect(),
        bytes_out: report.allowed.iter().map(|flow| flow.bytes_out).sum(),
        bytes_in: report.allowed.iter().map(|flow| flow.bytes_in).sum(),
        omitted: lists.iter().map(|length| length.saturating_sub(MAX_ENTRIES) as u64).sum::<u64>() + report.omitted,
    })
}

/// A list, cut to its first entries, and how many are left out.
pub(super) fn listed(entries: impl ExactSizeIterator<Item = String>) -> (Vec<String>, u64) {
    let omitted = entries.len().saturating_sub(MAX_ENTRIES) as u64;
    (entries.take(MAX_ENTRIES).map(|entry| text::clip(&entry, MAX_TEXT_LEN)).collect(), omitted)
}

/// Directories of the host that a run may write.
pub(super) fn writable(plan: &Plan) -> Vec<String> {
    // A caller may bind a directory and then cover all of it by itself, read-only.
    let is_kept = |(path, _, how): &(PathBuf, _, _)| path == Path::new(".") && *how == Protection::ReadOnly;
    let trees = plan.writable_trees.iter().filter(|tree| !tree.protected.iter().any(is_kept)).map(|tree| &tree.source);
    let scratch = (plan.scratch.host && !plan.scratch.read_only).then_some(&plan.scratch.path);
    scratch.into_iter().chain(trees).map(|path| path.to_string_lossy().into_owned()).collect()
}

pub(crate) fn policy_ref(policy: &Policy) -> PolicyRef {
    PolicyRef { name: policy.name.clone(), origin: policy.origin.to_string(), sha256: policy.sha256.clone() }
}

pub(super) fn claims(subject: AuditSubject<'_>) -> Event {
    let AuditSubject::Request(request) = subject else { return Event::default() };
    let labels: BTreeMap<String, String> =
        request.labels.iter().take(MAX_ENTRIES).map(|(name, value)| (text::clip(name, 64), text::clip(value, MAX_TEXT_LEN))).collect();
    Event { id: request.id.as_ref().map(|id| text::clip(id, MAX_TEXT_LEN)), labels, ..Event::default() }
}

pub(super) fn who(identity: &Identity, key: Option<&str>) -> Actor {
    Actor {
        uid: identity.caller.uid,
        gid: identity.caller.gid,
        on_behalf: identity.on_behalf,
        launcher_uid: rustix::process::geteuid().as_raw(),
        pid: std::process::id(),
        unit: crate::facts::small_file("/proc/self/cgroup").ok().as_deref().and_then(unit),
        key: key.map(|key| text::clip(key, MAX_TEXT_LEN)),
    }
}

/// The innermost systemd unit of a process, from its line in `/proc/self/cgroup`.
pub(super) fn unit(cgroups: &str) -> Option<String> {
    let of_systemd = |line: &&str| line.starts_with("0::") || line.contains(":name=systemd:");
    let is_unit = |part: &&str| [".service", ".scope"].iter().any(|ending| part.ends_with(ending));
    cgroups.lines().filter(of_systemd).find_map(|line| line.rsplit('/').find(is_unit)).map(|name| text::clip(name, MAX_TEXT_LEN))
}

/// An id that no other run has. It is a name, no secret.
pub(super) fn run_id() -> String {
    let mut bytes = [0; 8];
    // Without randomness the run is refused elsewhere; time and process tell refusals apart.
    if crate::admit::random_bytes(&mut bytes).is_err() {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
        bytes = (since << 32 | u64::from(std::process::id())).to_ne_bytes();
    }
    format!("{:016x}", u64::from_ne_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_unit_is_the_innermost_one() {
        assert_eq!(unit("0::/system.slice/stockade-exec@a-1.service\n").as_deref(), Some("stockade-exec@a-1.service"));
        let session = "12:pids:/x.service\n1:name=systemd:/user.slice/user-1000.slice/user@1000.service/app.slice/run-u3.scope/below\n";
        assert_eq!(unit(session).as_deref(), Some("run-u3.scope"));
        assert_eq!(unit("0::/\n"), None);
        assert_eq!(unit(""), None);
    }
}
