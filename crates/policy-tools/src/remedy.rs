//! Remedies for refusals: which rule refused, and the fewest policy lines that would allow it.
//!
//! A remedy is made from the policy, the plan and the refusal alone. It reads no host, so it
//! cannot reveal what lies there. Hints are made from the program's stderr, which may lie:
//! no verdict depends on them.

mod call;
mod hint;
mod limit;
mod peer;

pub use call::{CallRemedy, call};
pub use hint::{MAX_HINTS, hints};
pub use limit::{LimitRemedy, limit};
pub use peer::{peer, peers};

pub(crate) use stockade_policy::toml_text as quoted;

/// Lines of a policy, after the section that they belong to.
pub(crate) fn line(section: &str, lines: &[String]) -> String {
    format!("[{section}] {}", lines.join("\n"))
}
