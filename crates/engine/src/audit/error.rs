//! Why something is not written down, and what does not happen for it.

use std::path::PathBuf;

use stockade_audit::AuditError;
use stockade_protocol::Verdict;

use crate::RefusalCause;

/// Why something is not written down.
#[derive(Debug, thiserror::Error)]
pub(super) enum RecordError {
    #[error("neither XDG_STATE_HOME nor HOME says where this user's audit log is; set one of them")]
    Nowhere,
    #[error("it is not known who asks")]
    UnknownCaller,
    #[error(transparent)]
    Log(#[from] AuditError),
}

impl RecordError {
    /// Whether only room was lacking.
    pub(super) fn is_no_room(&self) -> bool {
        matches!(self, RecordError::Log(error) if error.is_no_room())
    }
}

/// What does not happen, or is not said, for want of its record; or because it would show the
/// log.
#[derive(Debug, thiserror::Error)]
pub(super) enum RecordRefusal {
    #[error("policy `{policy}` requires an audit log ([audit] mode = \"required\"): {error}")]
    Begin { policy: String, error: RecordError },
    #[error("an approval is written down or not given, and the audit log cannot be written: {0}")]
    Approval(RecordError),
    #[error(
        "the code has run, but its end could not be written to the audit log, which policy `{policy}` requires, so its result is withheld: {error}"
    )]
    End { policy: String, error: RecordError },
    #[error("the audit log cannot be rotated: {0}")]
    Rotate(RecordError),
    #[error(
        "the audit log is root's, and uid {uid} has no grant for it; have a timer of root's do it{}",
        remedy.as_ref().map(|remedy| format!("\n{remedy}")).unwrap_or_default()
    )]
    RotateForAnother { uid: u32, remedy: Option<String> },
    #[error("it may have been done, but could not be written to the audit log, which policy `{policy}` requires: {error}")]
    Files { policy: String, error: RecordError },
    #[error(
        "{} would show the audit log {} inside the sandbox; show directories beside it, and not the one that holds it",
        path.display(),
        log.display()
    )]
    Shown { path: PathBuf, log: PathBuf },
}

impl RefusalCause for RecordRefusal {
    fn verdict_and_reason(&self) -> (Verdict, &'static str) {
        let reason = match self {
            RecordRefusal::Begin { error, .. }
            | RecordRefusal::Approval(error)
            | RecordRefusal::Rotate(error)
            | RecordRefusal::End { error, .. }
            | RecordRefusal::Files { error, .. } => match error {
                RecordError::Nowhere | RecordError::UnknownCaller => "audit_nowhere",
                RecordError::Log(error) => error.reason(),
            },
            RecordRefusal::RotateForAnother { .. } => "not_granted",
            RecordRefusal::Shown { .. } => "audit_log_shown",
        };
        (Verdict::SandboxError, reason)
    }
}
