//! The content of one record: a run, or an operation on a session's files.
//!
//! The caller clips every text, and `shortened` and `bare` cut an event that is longer than a line
//! may be. No field holds values of `env`, contents of files, stdin or secrets.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::text;

/// What happened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A run was admitted and is about to start; only where the log is required.
    Begun,
    /// A run is over.
    #[default]
    Run,
    /// A run was refused, or its sandbox could not be put in place.
    Refused,
    /// Something was done, or refused, with the files that a session keeps.
    Files,
    /// A run was not begun, and waits for approval.
    Held,
    /// An approver approved a run of another caller.
    Approved,
    /// A run's launcher was killed before it wrote down the run's end: a later start found it.
    Lost,
    /// A policy was attacked by `prove`; the verdict says what came of it.
    Proof,
}

impl Kind {
    /// The names of all, as records have them.
    pub const NAMES: [&str; 8] = ["run", "refused", "held", "approved", "files", "begun", "lost", "proof"];
}

/// The caller, and the launcher that acted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Actor {
    /// The caller's uid.
    pub uid: u32,
    /// The caller's gid.
    pub gid: u32,
    /// Whether root acted for that caller.
    pub on_behalf: bool,
    /// The launcher's uid.
    pub launcher_uid: u32,
    /// The launcher's process id.
    pub pid: u32,
    /// The systemd unit that the launcher ran in.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unit: Option<String>,
    /// The service's key that asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
}

/// Which policy decided.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyRef {
    /// Its name.
    pub name: String,
    /// `shipped`, or its file.
    pub origin: String,
    /// SHA-256 over its text and the text of all that it extends.
    pub sha256: String,
}

/// The beginning of something, and how long the whole is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Preview {
    /// Bytes of the whole.
    pub bytes: u64,
    /// Its beginning.
    pub preview: String,
}

/// What a hash and a preview are of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CodeKind {
    /// `code` of a request.
    #[default]
    Code,
    /// The words of a command with NUL between them.
    Command,
}

/// What was to be run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Code {
    /// `code` or `command`.
    pub kind: CodeKind,
    /// SHA-256 of the whole.
    pub sha256: String,
    /// Its size and beginning.
    #[serde(flatten)]
    pub preview: Preview,
}

/// Peaks of a run; null where they are not known.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// Peak memory.
    pub memory_peak_bytes: Option<u64>,
    /// Most processes at one time.
    pub processes_peak: Option<u64>,
    /// CPU time in user mode.
    pub cpu_user_ms: Option<u64>,
    /// CPU time in the kernel.
    pub cpu_system_ms: Option<u64>,
    /// What scratch had grown by.
    pub scratch_bytes: Option<u64>,
}

/// Something that was refused.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DenialSummary {
    /// `syscall` or `limit`.
    pub kind: String,
    /// What was tried.
    pub what: String,
    /// What it was answered.
    pub answer: String,
    /// How often.
    pub count: u64,
}

/// A module or event that watched interpreters reported.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ModuleEvent {
    /// Its name.
    pub name: String,
    /// `note` or `deny`.
    pub action: String,
    /// How often at least.
    pub count: u64,
}

/// A peer of connections out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Peer {
    /// The name, or the address where there was none.
    pub peer: String,
    /// The port, where it is known.
    pub port: Option<u16>,
    /// Why not: a reason of the gate, or an errno's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// How often.
    pub count: u64,
}

/// Connections out.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Egress {
    /// Reached.
    pub allowed: Vec<Peer>,
    /// Refused.
    pub denied: Vec<Peer>,
    /// Could not be reached.
    pub failed: Vec<Peer>,
    /// Bytes to all peers.
    pub bytes_out: u64,
    /// Bytes from all peers.
    pub bytes_in: u64,
    /// Peers that are not listed here.
    pub omitted: u64,
}

/// What was found in the code before it ran, and where; its text is not repeated here.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The rule.
    pub rule: String,
    /// What the policy does about it.
    pub action: String,
    /// The file; none: the code itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// Line, from 1; 0 of the whole.
    pub line: u32,
    /// Column in characters, from 1.
    pub column: u32,
}

/// What was asked for files of a session, between two runs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct FileAct {
    /// `write`, `append`, `read`, `list` or `reset`.
    pub op: &'static str,
    /// The path as it was asked for; empty: the whole.
    pub path: String,
    /// Bytes that were written or read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
}

/// The approval that a run had, waits for or was given.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ApprovalRecord {
    /// SHA-256 of the token in hex.
    pub token_sha256: String,
    /// The uid that asked for the run, in an approver's record.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub requester: Option<u32>,
    /// The uid that approved; null while the token is unused or invalid.
    pub approver: Option<u32>,
}

/// One run, refusal, approval, or act with files.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Event {
    /// What happened.
    pub event: Kind,
    /// The run's own number, which nothing else has.
    pub run: String,
    /// The caller and the launcher.
    pub who: Actor,
    /// The run whose code this one compiled; none: it ran code itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compiles: Option<String>,
    /// `doctor`, `prove` or `runtimes`, which ran this to examine the host; else none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub via: Option<&'static str>,
    /// The program and its version; empty where another launcher writes this down.
    #[serde(skip_serializing_if = "str::is_empty")]
    pub program: &'static str,
    /// The request's `id`: a claim of the caller.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Its labels: claims of the caller too.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// The policy; null where none could be read.
    pub policy: Option<PolicyRef>,
    /// The name or file of the policy that was asked for, where none could be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub policy_requested: Option<String>,
    /// What was to be run; null where the request could not be read.
    pub code: Option<Code>,
    /// The operation on files, where the record is not of a run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub files: Option<FileAct>,
    /// The one cause of the end; null for a run that only began or was approved, and for an
    /// operation on files.
    pub verdict: Option<String>,
    /// Its detail.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Exit status.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<i32>,
    /// Whether the first instruction of the code ran; null for a lost run, of which it is not
    /// known.
    pub started: Option<bool>,
    /// From start to end.
    pub duration_ms: u64,
    /// When a lost run or a proof was begun.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub begun: Option<String>,
    /// Peaks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
    /// What was found in the code before it ran.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub findings: Vec<Finding>,
    /// Findings that are not listed here.
    #[serde(skip_serializing_if = "is_zero")]
    pub findings_omitted: u64,
    /// What was refused.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub denials: Vec<DenialSummary>,
    /// Refusals that are not listed here.
    #[serde(skip_serializing_if = "is_zero")]
    pub denials_omitted: u64,
    /// Peers that the caller has allowed beside those of the policy.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub allowed_by_caller: Vec<String>,
    /// Peers of the caller's that are not listed here.
    #[serde(skip_serializing_if = "is_zero")]
    pub allowed_by_caller_omitted: u64,
    /// Directories of the host that the code could write.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub writable: Vec<String>,
    /// Such directories that are not listed here.
    #[serde(skip_serializing_if = "is_zero")]
    pub writable_omitted: u64,
    /// Connections out, where there were any or some were refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub egress: Option<Egress>,
    /// What watched interpreters reported: advice, which the code can forge and suppress.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub modules: Vec<ModuleEvent>,
    /// Reports that are not listed here.
    #[serde(skip_serializing_if = "is_zero")]
    pub modules_omitted: u64,
    /// The digest of the image that was the root; none: the host's directories were.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// SHA-256 of the receipt's JSON; null where no sandbox was set up, and for a command
    /// without `--report`.
    pub receipt_sha256: Option<String>,
    /// Its approval, where a token was issued or used.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub approval: Option<ApprovalRecord>,
    /// SHA-256 of a proof's JSON.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub proof_sha256: Option<String>,
    /// Layers that the run went without.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub degraded: Vec<String>,
    /// Stdout.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output: Option<Preview>,
    /// Stderr.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<Preview>,
    /// The lines of the policy's `alerts` that this met.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub alerts: Vec<String>,
    /// Labels, lists and previews are left out, and longer texts cut: together they were too long for
    /// a line.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub shortened: bool,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for a reference")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl Event {
    /// Its result in one word.
    pub(crate) fn outcome(&self) -> &str {
        self.verdict.as_deref().unwrap_or(match self.event {
            Kind::Approved => "approved",
            Kind::Lost => "lost",
            Kind::Files => "a use of files",
            _ => "begun",
        })
    }

    /// The same without the fields that can be long.
    pub(crate) fn shortened(&self) -> Self {
        let bare = |preview: &Preview| Preview { preview: String::new(), ..preview.clone() };
        let code = self.code.as_ref().map(|code| Code { preview: bare(&code.preview), ..code.clone() });
        Event {
            labels: BTreeMap::new(),
            code,
            findings: Vec::new(),
            findings_omitted: self.findings_omitted + self.findings.len() as u64,
            denials: Vec::new(),
            denials_omitted: self.denials_omitted + self.denials.len() as u64,
            allowed_by_caller: Vec::new(),
            allowed_by_caller_omitted: self.allowed_by_caller_omitted + self.allowed_by_caller.len() as u64,
            writable: Vec::new(),
            writable_omitted: self.writable_omitted + self.writable.len() as u64,
            egress: None,
            modules: Vec::new(),
            modules_omitted: self.modules_omitted + self.modules.len() as u64,
            output: self.output.as_ref().map(bare),
            error: self.error.as_ref().map(bare),
            shortened: true,
            ..self.clone()
        }
    }

    /// What fits into a line whatever its caller has left unclipped: no list, and of each text the
    /// beginning.
    pub(crate) fn bare(&self) -> Self {
        const MAX_TEXT_LEN: usize = 256;
        let clip = |text: &String| text::clip(text, MAX_TEXT_LEN);
        let short = self.shortened();
        Event {
            run: clip(&self.run),
            who: Actor { unit: None, ..short.who },
            id: self.id.as_ref().map(clip),
            policy: self.policy.as_ref().map(|policy| PolicyRef {
                name: clip(&policy.name),
                origin: clip(&policy.origin),
                sha256: clip(&policy.sha256),
            }),
            code: short.code.map(|code| Code { sha256: clip(&code.sha256), ..code }),
            files: self.files.as_ref().map(|act| FileAct { path: clip(&act.path), ..act.clone() }),
            verdict: self.verdict.as_ref().map(clip),
            reason: self.reason.as_ref().map(clip),
            begun: self.begun.as_ref().map(clip),
            image: self.image.as_ref().map(clip),
            receipt_sha256: self.receipt_sha256.as_ref().map(clip),
            approval: self
                .approval
                .as_ref()
                .map(|approval| ApprovalRecord { token_sha256: clip(&approval.token_sha256), ..approval.clone() }),
            proof_sha256: self.proof_sha256.as_ref().map(clip),
            degraded: Vec::new(),
            alerts: Vec::new(),
            ..short
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use super::*;

    #[test]
    fn every_kind_is_among_the_names() {
        let all = [Kind::Run, Kind::Refused, Kind::Held, Kind::Approved, Kind::Files, Kind::Begun, Kind::Lost, Kind::Proof];
        for (kind, name) in all.into_iter().zip(Kind::NAMES) {
            // A new one belongs above, too.
            match kind {
                Kind::Run | Kind::Refused | Kind::Held | Kind::Approved | Kind::Files | Kind::Begun | Kind::Lost | Kind::Proof => {}
            }
            assert_eq!(serde_json::to_value(kind).unwrap(), name);
        }
    }
}
