//! Policies explained and compared, and the remedies for what a run was refused.
//!
//! Everything here is pure: it reads a policy, a plan and what was refused, asks no host and
//! decides nothing. The launcher does not link it.
#![forbid(unsafe_code)]

pub mod compare;
mod explain;
pub mod remedy;

pub use explain::{Changes, Explanation, Section, Statement, changes, explain};
