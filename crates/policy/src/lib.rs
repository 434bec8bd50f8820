//! Policies: from TOML to checked values, and from those to the plan of one run.
//!
//! Everything here is pure, save for reading the policies' own files and, for grants, the
//! host's account files: it asks no clock, starts nothing and changes nothing. What it
//! refuses, it refuses with the place and the remedy.
#![forbid(unsafe_code)]

mod accounts;
pub mod alert;
pub mod approver;
mod check;
pub mod compare;
mod diagnostic;
mod document;
pub mod egress;
mod explain;
pub mod facts;
pub mod filter;
pub mod grants;
mod inherit;
mod keys;
mod lookup;
pub mod model;
mod modules;
pub mod names;
pub mod plan;
pub mod remedy;
mod schema;
mod shipped;
mod show;
#[cfg(test)]
mod tests;
mod trust;
pub mod visible;

pub use accounts::AccountsError;
pub use check::is_never_shown;
pub use diagnostic::{Place, Problem, Report, Source};
pub use explain::{Explanation, Section, Statement, explain};
pub use grants::{Caller, GrantRefusal, Grants, GrantsError};
pub use lookup::{LookupContext, PolicyError, SYSTEM_DIR, load, load_shipped, load_text, names as list_names};
pub use schema::schema;
pub use shipped::{EXAMPLES, SHIPPED};
pub use show::show;
pub use trust::{Distrust, ReadError, open_trusted_program};
