//! The two files of `stockade serve`: its configuration, `serve.toml`, and its keys, `keys.toml`.
//!
//! Each is read whole or refused whole, and no key of them is accepted that means nothing. Only
//! root, or the user who serves, can have written them, and of the keys others cannot even read the
//! hashes. Nothing here listens, compares a token, asks a clock, or looks at what the host has.

mod config;
mod expiry;
mod key;

use std::path::Path;

use stockade_protocol::LimitKey;

use crate::{
    accounts::AccountsError,
    check::Checked,
    diagnostic::{Diagnostic, DiagnosticReport, Diagnostics, Source, quote},
    trust::ReadError,
};

pub use config::{Capacity, Execute, Listen, SandboxFusion, ServeConfig, ServiceLimits};
pub use key::{Credential, HASH_PREFIX, Scope, ServiceKey, ServiceKeys, is_key_id, key_table};

/// Why a file of the service could not be used.
#[derive(Debug, thiserror::Error)]
pub enum ServiceError {
    /// The file could not be read or is not trusted.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// A name in it could not be looked up.
    #[error("cannot look up the names in the keys: {0}")]
    Accounts(#[from] AccountsError),
    /// It has mistakes.
    #[error("{0}")]
    Invalid(Box<DiagnosticReport>),
}

/// What is wrong with a text, if anything is.
fn refuse_if_wrong(path: &Path, text: String, problems: Diagnostics) -> Result<DiagnosticReport, ServiceError> {
    let report = DiagnosticReport::new(vec![Source { label: path.display().to_string(), text }], problems);
    if report.diagnostics().is_empty() { Ok(report) } else { Err(ServiceError::Invalid(Box::new(report))) }
}

/// A duration in milliseconds, in a range that `range` words.
fn duration(key: &str, least: u64, most: u64, range: &str, text: &str) -> Checked<u64> {
    match LimitKey::Wall.parse_text(text) {
        Ok(Some(time)) if (least..=most).contains(&time) => Ok(time),
        _ => Err(Diagnostic::new(format!("`{key}` cannot be {}", quote(text)), range)),
    }
}

/// A size in bytes, at least `least`.
fn size(key: &str, least: u64, range: &str, text: &str) -> Checked<u64> {
    match LimitKey::OutputSize.parse_text(text) {
        Ok(Some(bytes)) if bytes >= least => Ok(bytes),
        _ => Err(Diagnostic::new(format!("`{key}` cannot be {}", quote(text)), range)),
    }
}
