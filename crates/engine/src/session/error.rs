//! Why a session does not do what it is asked, beside what any run may be refused for.

use std::path::PathBuf;

use stockade_launcher::files::FileError;
use stockade_protocol::{
    LimitKey,
    Verdict::{self, BadRequest, SandboxError},
};

use crate::{Refusal, RefusalCause};

/// See the module.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SessionError {
    #[error("scratch: it is the session's, which `--scratch` has named or not; leave it out")]
    Scratch,
    #[error("limits.{}: what a session keeps has the size that its policy gives it from the start; set it there", .0.name())]
    Limit(LimitKey),
    #[error("the run would have other ids than the session, since scratch is on another file system now; start another session")]
    OwnerChanged,
    #[error("the session has nothing any more: {0}; `reset` begins it anew")]
    NoVolumes(NoVolumes),
    #[error("append, whole: a file is either added to or replaced; leave one of the two out")]
    AppendWhole,
    #[error("{path:?}: {problem}")]
    Path { path: String, problem: PathProblem },
}

/// Why a session keeps nothing.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum NoVolumes {
    #[error("it was never begun")]
    NotBegun,
    #[error("it is being reset")]
    BeingReset,
    #[error("its reset failed: {0}")]
    ResetFailed(Box<Refusal>),
    #[error("it has no such directory")]
    NoSuchDirectory,
}

/// Why a file of a session is not read, written or listed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PathProblem {
    #[error("files are read and written in scratch ({}), home and /tmp only", scratch.display())]
    Outside { scratch: PathBuf },
    #[error("policy `{0}` shows it read-only")]
    ReadOnly(String),
    #[error("policy `{0}` shows scratch read-only (access = \"ro\")")]
    ReadOnlyScratch(String),
    #[error("policy `{0}` hides it from the code, and from the session too")]
    Hidden(String),
    #[error(transparent)]
    File(#[from] FileError),
}

impl RefusalCause for SessionError {
    fn verdict_and_reason(&self) -> (Verdict, &'static str) {
        match self {
            SessionError::Scratch => (BadRequest, "scratch_of_session"),
            SessionError::AppendWhole => (BadRequest, "append_whole"),
            SessionError::Limit(_) => (BadRequest, "limit_of_session"),
            SessionError::OwnerChanged => (SandboxError, "session_owner_changed"),
            SessionError::NoVolumes(_) => (SandboxError, "session_ended"),
            SessionError::Path { problem, .. } => (BadRequest, problem.reason()),
        }
    }
}

impl PathProblem {
    fn reason(&self) -> &'static str {
        match self {
            PathProblem::Outside { .. } => "path_outside",
            PathProblem::ReadOnly(_) | PathProblem::ReadOnlyScratch(_) => "path_read_only",
            PathProblem::Hidden(_) => "path_hidden",
            PathProblem::File(error) => error.reason(),
        }
    }
}
