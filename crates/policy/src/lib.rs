//! Policies: from TOML to checked values, and from those to the plan of one run.
//!
//! Everything here is pure, save for reading the policies' own files and, for grants and keys, the
//! host's account files: it asks no clock, starts nothing and changes nothing. What it
//! refuses, it refuses with the place and the remedy.
#![forbid(unsafe_code)]

mod accounts;
mod advice;
pub mod alert;
pub mod approver;
pub mod call;
mod check;
mod consistency;
mod diagnostic;
mod document;
pub mod facts;
pub mod filter;
pub mod grants;
mod keys;
mod lookup;
mod merge;
pub mod model;
mod modules;
pub mod names;
pub mod plan;
mod schema;
pub mod service;
mod shipped;
mod show;
mod sockets;
#[cfg(test)]
mod tests;
mod trust;
pub mod visible;
pub mod whitelist;
mod written;

pub use accounts::AccountsError;
pub use check::{is_never_shown, is_policy_name, may_be_shown};
pub use diagnostic::{Diagnostic, DiagnosticReport, Located, Source, SourceSpan};
pub use grants::{Caller, GrantRefusal, Grants, GrantsError};
pub use lookup::{
    Ancestry, HidingPolicy, LookupContext, PolicyError, SYSTEM_DIR, ancestry, hiding, load, load_shipped, load_text, names as list_names,
    review,
};
pub use schema::schema;
pub use shipped::{EXAMPLES, SHIPPED};
pub use show::show;
pub use trust::{Distrust, ReadError, open_trusted_program};
pub use visible::toml_text;
