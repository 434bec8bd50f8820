//! Why code is not approved, or does not run by its approval.
//!
//! Of a token that is another's an error says no more than of one that there is not.

use std::{io, path::PathBuf};

use stockade_policy::AccountsError;
use stockade_protocol::Verdict::{self, BadRequest, SandboxError};

use super::{MAX_SHOWN, store::MAX_HELD};
use crate::RefusalCause;

/// See the module.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ApprovalError {
    #[error("write what is to be approved: {0}")]
    Unwritable(serde_json::Error),
    #[error(
        "policy `{policy}` has this code approved by others, who approve what they see: {unseen}; or take a policy without `approvers`"
    )]
    NotSelfContained { policy: String, unseen: Unseen },
    #[error("policy `{0}` has code approved by others, which requests of `exec` and `session` can be alone")]
    NeedsRequest(String),
    #[error(
        "policy `{0}` has code approved by others, and what your own launcher keeps you could change; run it through root, by sudo or a socket"
    )]
    NeedsRoot(String),
    #[error(
        "others have to read what they approve, and this request has {0} bytes, more than {MAX_SHOWN}; send less, or have the policy show large data read-only"
    )]
    TooLarge(usize),
    #[error("{MAX_HELD} requests of yours wait for approval already; have them approved, or wait until their time is over")]
    TooMany,
    #[error("cannot {attempt} {}: {error}; nothing was approved", path.display())]
    NotKept { attempt: &'static str, path: PathBuf, error: io::Error },
    #[error("approve: a token has 32 hexadecimal digits, as `approval.token` of a result has them")]
    Malformed,
    #[error(
        "approve: no such token waits for you; it is another's, from before the last start of this host, or long past; send the request again without it"
    )]
    Unknown,
    #[error("approve: this token has been used, and is good once; send the request again without it")]
    Used,
    #[error("approve: this token's time is over; send the request again without it")]
    Expired,
    #[error(
        "approve: this token is for another request: code, language, args, stdin, env, files, collect and limits must be as they were when it was given"
    )]
    OtherRequest,
    #[error("approve: this token is for another policy than `{0}` as it stands, or other interpreters; send the request again without it")]
    OtherPolicy(String),
    #[error("approve: this token is for another scratch: the directory, or the session, must be the one that it was given for")]
    OtherScratch,
    #[error(
        "no such token waits for your approval: it is used, long past, or not yours to approve; approvers come through root, as by `sudo stockade approve`"
    )]
    NotYours,
    #[error("you approve it by sending the request again, with this token as `approve` (or --approve)")]
    ByRequest,
    #[error("you have asked for this yourself; somebody else has to approve it")]
    OwnRequest,
    #[error("cannot tell who may approve: {0}")]
    Accounts(AccountsError),
}

/// What approvers do not see.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unseen {
    #[error(
        "what lies in the scratch {0} they do not see, and it can change until the code runs; leave it out, send what the code needs by `files` and take what it makes by `collect`"
    )]
    Scratch(String),
    #[error("the interpreter {} and its packages they do not see; name it for `{runtime}` in the policy instead of by --runtime", path.display())]
    Interpreter { runtime: String, path: PathBuf },
    #[error(
        "what this session holds already, in scratch, home or /tmp or as an attribute of these, they do not see; `reset` it, and send what the code needs with the request, by `files`"
    )]
    Session,
}

impl RefusalCause for ApprovalError {
    fn verdict_and_reason(&self) -> (Verdict, &'static str) {
        match self {
            ApprovalError::Unwritable(_) => (SandboxError, "approval_unwritable"),
            ApprovalError::NotSelfContained { .. } => (BadRequest, "approval_not_self_contained"),
            ApprovalError::NeedsRequest(_) => (BadRequest, "approval_needs_request"),
            ApprovalError::NeedsRoot(_) => (SandboxError, "approvers_need_root"),
            ApprovalError::TooLarge(_) => (BadRequest, "approval_too_large"),
            ApprovalError::TooMany => (BadRequest, "too_many_approvals"),
            ApprovalError::NotKept { .. } => (SandboxError, "approval_not_kept"),
            ApprovalError::Malformed => (BadRequest, "approval_malformed"),
            ApprovalError::Unknown | ApprovalError::NotYours => (BadRequest, "approval_unknown"),
            ApprovalError::Used => (BadRequest, "approval_used"),
            ApprovalError::Expired => (BadRequest, "approval_expired"),
            ApprovalError::OtherRequest => (BadRequest, "approval_of_other_request"),
            ApprovalError::OtherPolicy(_) => (BadRequest, "approval_of_other_policy"),
            ApprovalError::OtherScratch => (BadRequest, "approval_of_other_scratch"),
            ApprovalError::ByRequest => (BadRequest, "approval_by_request"),
            ApprovalError::OwnRequest => (BadRequest, "approval_of_own_request"),
            ApprovalError::Accounts(_) => (SandboxError, "accounts_unreadable"),
        }
    }
}
