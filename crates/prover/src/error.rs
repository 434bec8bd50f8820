//! Why a policy cannot be attacked at all, beside what any run may be refused for.

use std::io;

use stockade_engine::RefusalCause;
use stockade_policy::filter::FilterError;
use stockade_protocol::Verdict;

use crate::target::FEW;

/// See the module.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ProveError {
    #[error("{attempt}: {error}")]
    Io { attempt: &'static str, error: io::Error },
    #[error("start a process with a pid of at least {FEW}: {0}")]
    Target(io::Error),
    #[error(transparent)]
    Filter(#[from] FilterError),
    #[error("a signal ended the attacks")]
    Cancelled,
}

impl RefusalCause for ProveError {
    fn verdict_and_reason(&self) -> (Verdict, &'static str) {
        let reason = match self {
            ProveError::Io { .. } | ProveError::Target(_) => "prover",
            ProveError::Filter(_) => "filter_unusable",
            ProveError::Cancelled => "cancelled",
        };
        (Verdict::SandboxError, reason)
    }
}

/// For `map_err`.
pub(crate) fn failed(attempt: &'static str) -> impl Fn(io::Error) -> ProveError + Copy {
    move |error| ProveError::Io { attempt, error }
}
