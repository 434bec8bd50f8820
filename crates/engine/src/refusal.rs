//! Why a request is not run, as its result says it.
//!
//! Each area has an enum of its errors, with their wording in `Display`. What such an error
//! is in the JSON contract is said beside the enum, in [`RefusalCause`]; a [`Refusal`] is made
//! of it here alone. Nothing is decided here.

use rustix::io::Errno;
use stockade_launcher::{ErrorKind, LaunchError, scratch::ScratchError};
use stockade_policy::plan::PlanError;
use stockade_protocol::{
    Report,
    Verdict::{self, BadRequest, SandboxError},
    step::Step,
};

/// Why a request is not run.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    /// `bad_request`, `sandbox_error` or, before it has begun, `cancelled`.
    pub verdict: Verdict,
    /// A stable identifier.
    pub reason: String,
    /// What, where, why and how to fix it.
    pub message: String,
    /// The errno, where a system call failed at the program's execve.
    pub exec_errno: Option<i32>,
}

impl Refusal {
    /// The result that says so.
    pub fn report(&self) -> Report {
        Report::refused(self.verdict, &self.reason, self.message.clone())
    }
}

/// An error that a request is refused for.
pub trait RefusalCause: std::error::Error {
    /// `BadRequest`: the caller must change the request. `SandboxError`: the host or the
    /// policy must be fixed. The reason is a stable identifier.
    fn verdict_and_reason(&self) -> (Verdict, &'static str);

    /// The errno, where a system call failed at the program's execve.
    fn exec_errno(&self) -> Option<i32> {
        None
    }
}

impl<E: RefusalCause> From<E> for Refusal {
    fn from(error: E) -> Self {
        let (verdict, reason) = error.verdict_and_reason();
        Refusal { verdict, reason: reason.to_owned(), message: error.to_string(), exec_errno: error.exec_errno() }
    }
}

impl RefusalCause for LaunchError {
    fn verdict_and_reason(&self) -> (Verdict, &'static str) {
        match (self.kind(), self.step_errno()) {
            (ErrorKind::Step(Step::WriteProgram), Some(Errno::NOSPC | Errno::DQUOT)) => (SandboxError, "scratch_full"),
            (ErrorKind::Step(Step::WriteProgram), Some(Errno::EXIST)) => (BadRequest, "filename_taken"),
            (ErrorKind::Step(Step::WriteFile), _) => (BadRequest, "files_not_writable"),
            (ErrorKind::Step(Step::ExecPayload), _) => (SandboxError, "program_not_started"),
            (kind, _) => (SandboxError, kind.reason()),
        }
    }

    fn exec_errno(&self) -> Option<i32> {
        let at_exec = self.kind() == ErrorKind::Step(Step::ExecPayload);
        self.step_errno().filter(|_| at_exec).map(Errno::raw_os_error)
    }
}

impl RefusalCause for PlanError {
    fn verdict_and_reason(&self) -> (Verdict, &'static str) {
        (if self.is_the_callers_fault() { BadRequest } else { SandboxError }, self.reason())
    }
}

impl RefusalCause for ScratchError {
    fn verdict_and_reason(&self) -> (Verdict, &'static str) {
        (BadRequest, self.problem.reason())
    }
}

/// A request that was cancelled before its turn came.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cancelled before it was begun")]
pub struct CancelledBeforeStart;

impl RefusalCause for CancelledBeforeStart {
    fn verdict_and_reason(&self) -> (Verdict, &'static str) {
        (Verdict::Cancelled, "cancelled_before_start")
    }
}
