//! The audit log: one JSON line for each run, each refusal and each use of a session's
//! files, each line carrying the hash of the one before it.
//!
//! It guarantees: no writer changes or removes a whole record, but old files when it is told to,
//! which the chain states; several writers keep one
//! chain; a writer that dies in the middle of a line costs only that line. It does not stop
//! a user who may write to the directory from writing a new log. Only anchors outside the log
//! reveal that.
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

pub use anchor::{Anchor, AnchorSink, AnchorSinks, HEAD, UNRECORDED};
pub use chain::{Header, Link, MAX_LINE_LEN, ZERO};
pub use event::{
    Actor, ApprovalRecord, Code, CodeKind, DenialSummary, Egress, Event, FileAct, Finding, Kind, ModuleEvent, Peer, PolicyRef, Preview,
    Usage,
};
pub use log::{AppendedRecord, FILE_SIZE, Log, Place, RotatedLog, files};
pub use verify::{Findings, Problem, Verifier};

/// Why a record is not in the log, or the log cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum AuditError {
    /// A system call failed.
    #[error("cannot {attempt} {}: {error}", path.display())]
    Io {
        /// What was tried.
        attempt: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// What the kernel answered.
        error: io::Error,
    },
    /// The kernel gave no random bytes for the name of a new chain.
    #[error("cannot name a new chain: getrandom(2): {0}; a filter over stockade must allow this call")]
    NoRandomness(io::Error),
    /// Others could have written there.
    #[error("{} must be {wanted} of uid {owner} that no other user may write to; fix its owner and mode", path.display())]
    Untrusted {
        /// The directory or file.
        path: PathBuf,
        /// What it should be.
        wanted: &'static str,
        /// The uid that must own it.
        owner: u32,
    },
    /// Another writer holds the lock and does not release it.
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
            AuditError::Io { .. } | AuditError::NoRandomness(_) => "audit_unwritable",
            AuditError::Untrusted { .. } => "audit_untrusted",
            AuditError::Locked { .. } => "audit_locked",
            AuditError::Corrupted { .. } => "audit_corrupted",
        }
    }
}

fn failed(attempt: &'static str, path: &std::path::Path) -> impl Fn(io::Error) -> AuditError {
    move |error| AuditError::Io { attempt, path: path.to_path_buf(), error }
}
