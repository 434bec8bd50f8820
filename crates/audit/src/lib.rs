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
    #[error("cannot {attempt} {}: {error}{}", path.display(), remedy(error, path))]
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
    #[error("{} must be {wanted} of uid {owner} that no other user may write to; {}", path.display(), found.remedy(path, *owner))]
    Untrusted {
        /// The directory or file.
        path: PathBuf,
        /// What it should be.
        wanted: &'static str,
        /// The uid that must own it.
        owner: u32,
        /// What it is.
        found: Untrusted,
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

/// What is wrong with a directory or file of a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Untrusted {
    /// It is a symlink, which is not followed.
    Link,
    /// It is something else, or another user's, or others may write to it.
    Status {
        /// It is of the kind that it should be.
        kind_fits: bool,
        /// Its owner.
        uid: u32,
        /// Its mode, without the kind.
        mode: u32,
    },
}

impl Untrusted {
    fn remedy(self, path: &std::path::Path, owner: u32) -> String {
        let path = path.display();
        match self {
            Untrusted::Link => format!("it is a symlink: put the log itself there, by a bind mount if it is to be elsewhere (rm {path})"),
            Untrusted::Status { kind_fits: false, .. } => format!("it is something else: move it away (mv {path} {path}.old)"),
            Untrusted::Status { uid, mode, .. } if uid != owner => {
                format!("it belongs to uid {uid} (mode {mode:04o}): chown {owner} {path} && chmod go-w {path}")
            }
            Untrusted::Status { mode, .. } => format!("its mode is {mode:04o}: chmod go-w {path}"),
        }
    }
}

/// What helps where a log cannot be written, from its `; ` on.
fn remedy(error: &io::Error, path: &std::path::Path) -> String {
    let directory = if path.extension().is_some() { path.parent().unwrap_or(path) } else { path }.display();
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            format!("; make room on its file system (df -h {directory}), as by stockade audit rotate --keep-days 90")
        }
        io::ErrorKind::ReadOnlyFilesystem => {
            format!("; make its file system writable: mount -o remount,rw \"$(findmnt -no TARGET -T {directory})\"")
        }
        _ => String::new(),
    }
}

impl AuditError {
    /// Whether the log's file system had no room, which code can fill where its scratch is on it, or
    /// the caller's limit of a file's size (RLIMIT_FSIZE).
    pub fn is_no_room(&self) -> bool {
        let kinds = [io::ErrorKind::StorageFull, io::ErrorKind::QuotaExceeded, io::ErrorKind::FileTooLarge];
        matches!(self, AuditError::Io { error, .. } if kinds.contains(&error.kind()))
    }

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
