//! What a refusal says to whoever reads it, a person or a model: what was tried, which rule
//! decided, and the smallest lines of a policy that would allow it.
//!
//! Everything is read off the policy, the plan and the refusal; no host is asked, so that a
//! remedy tells nothing about what lies on it. Hints are read off the program's own words,
//! which may be lies: they never decide anything.

mod call;
mod hint;
mod limit;
mod peer;

pub use call::{Remedy, call, remedy};
pub use hint::{LONGEST_TAIL, MOST_HINTS, hints};
pub use limit::{LimitRemedy, limit};
pub use peer::peer;

pub(crate) use crate::visible::toml_text as quoted;

/// A line of a policy, behind the section where it stands.
pub(crate) fn line(section: &str, lines: &[String]) -> String {
    format!("[{section}] {}", lines.join("\n"))
}
