//! The audit log: one JSON line for each run, each refusal and each use of a session's
//! files, each line carrying the hash of the one before it.
//!
//! What it keeps: nothing that was whole is ever changed or removed by a writer; several
//! writers keep one chain; a writer that dies in the middle of a line costs that line
//! alone. What it cannot keep: whoever may write to the directory can write a new log. The
//! heads of the chain that go to the journal contradict that, and nothing else does.
//!
//! It knows no sandbox and no policy, starts nothing, and reads no environment variable.
#![forbid(unsafe_code)]

pub mod alert;
mod anchor;
mod chain;
mod event;
mod log;
mod tail;
pub mod text;
mod verify;

use std::{io, path::PathBuf};

pub use anchor::{Anchor, Carrier, Carriers, HEAD};
pub use chain::{Header, LONGEST_LINE, Link, ZERO};
pub use event::{Approved, Code, Denied, Egress, Event, FileAct, Finding, Kind, Met, Peer, PolicyRef, Preview, Usage, Who};
pub use log::{Appended, FILE_SIZE, Log, files};
pub use verify::{Findings, Problem, Verifier};

/// Why a record is not in the log, or the log cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum AuditError {
    /// A system call failed.
    #[error("cannot {attempt} {}: {source}", path.display())]
    Io {
        /// What was tried.
        attempt: &'static str,
        /// On what.
        path: PathBuf,
        /// What the kernel answered.
        source: io::Error,
    },
    /// Others could have written there.
    #[error("{} must be {wanted} of uid {owner} that nobody else may write to; mend its owner and mode", path.display())]
    Untrusted {
        /// The directory or file.
        path: PathBuf,
        /// What it should be.
        wanted: &'static str,
        /// Whose.
        owner: u32,
    },
    /// Somebody else writes, and does not come to an end.
    #[error("the audit log's lock {} was not free for {seconds} s; end the process that holds it (`lsof` names it)", path.display())]
    Locked {
        /// The lock.
        path: PathBuf,
        /// How long it was waited for.
        seconds: u64,
    },
    /// The end of the log is not what a writer leaves.
    #[error(
        "the audit log {} is corrupted: {why}; see `stockade audit verify`, keep the directory as evidence under another name, and a new log begins",
        path.display()
    )]
    Corrupted {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: &'static str,
    },
}

impl AuditError {
    /// A stable identifier.
    pub fn reason(&self) -> &'static str {
        match self {
            AuditError::Io { .. } => "audit_unwritable",
            AuditError::Untrusted { .. } => "audit_untrusted",
            AuditError::Locked { .. } => "audit_locked",
            AuditError::Corrupted { .. } => "audit_corrupted",
        }
    }
}

fn failed(attempt: &'static str, path: &std::path::Path) -> impl Fn(io::Error) -> AuditError {
    move |source| AuditError::Io { attempt, path: path.to_path_buf(), source }
}
