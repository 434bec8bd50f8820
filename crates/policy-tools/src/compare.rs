//! What one policy allows that another does not, by what their lines cover and not by how
//! they are written.
//!
//! A path below an allowed path, a network inside a network and a name under a wildcard are
//! no difference. What cannot be decided counts as a difference and is marked so. Globs are
//! compared as text. Paths are compared by name: symlinks and mounts of a host are not read.

mod calls;
mod files;
mod peers;
mod settings;

use serde::Serialize;
use stockade_policy::model::Policy;

pub(crate) use files::{VisiblePath, visible_paths};
pub(crate) use settings::{bound, excerpt, hooked, launched_by, recorded, screened, shared, without};

/// The part of a policy that a difference is in, in the order in which they are listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Area {
    /// Paths and device nodes of the host.
    Files,
    /// System calls and their arguments.
    SystemCalls,
    /// Peers of the whitelist.
    Egress,
    /// Limits of a request that sets none.
    Limits,
    /// Limits that a request may set at most.
    #[serde(rename = "maxima")]
    RequestMaximums,
    /// Variables.
    Environment,
    /// Languages.
    Runtimes,
    /// Layers that may be missing.
    Degrade,
    /// The writable directory.
    Scratch,
    /// User, group and host name inside.
    Identity,
    /// Records of runs.
    Audit,
    /// Rules of screening.
    Screen,
}

/// One thing that one policy allows and the other does not, or sets to another value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// The part of the policy.
    pub area: Area,
    /// The section and key.
    pub key: String,
    /// What is allowed.
    #[serde(rename = "says")]
    pub text: String,
    /// Which paths, calls, rules or names.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub items: Vec<String>,
    /// What the code can do because of it.
    #[serde(rename = "follows", skip_serializing_if = "Option::is_none")]
    pub consequence: Option<String>,
    /// False: it could not be decided and counts as a difference.
    pub certain: bool,
}

impl Difference {
    pub(crate) fn new(area: Area, key: impl Into<String>, text: impl Into<String>) -> Self {
        Difference { area, key: key.into(), text: text.into(), items: Vec::new(), consequence: None, certain: true }
    }

    fn items(mut self, items: Vec<String>) -> Self {
        self.items = items;
        self
    }

    fn consequence(mut self, what: impl Into<String>) -> Self {
        self.consequence = Some(what.into());
        self
    }

    fn undecided(mut self) -> Self {
        self.certain = false;
        self
    }
}

/// How two policies differ.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Comparison {
    /// What the second allows and the first does not.
    pub more: Vec<Difference>,
    /// What the first allows and the second does not.
    pub less: Vec<Difference>,
    /// What differs and is neither more nor less.
    pub other: Vec<Difference>,
}

/// Compares two policies.
pub fn compare(first: &Policy, second: &Policy) -> Comparison {
    let mut less = loosened(second, first);
    // What cannot be decided counts against the second policy alone.
    less.retain(|difference| difference.certain);
    Comparison { more: loosened(first, second), less, other: settings::other_changes(first, second) }
}

/// What a policy allows beyond a ceiling.
pub fn loosened(ceiling: &Policy, policy: &Policy) -> Vec<Difference> {
    let mut out = Vec::new();
    files::loosened_paths(ceiling, policy, &mut out);
    files::loosened_images(&ceiling.filesystem, &policy.filesystem, &mut out);
    calls::loosened(&ceiling.seccomp, &policy.seccomp, &mut out);
    peers::loosened(&ceiling.egress.whitelist, &policy.egress.whitelist, &mut out);
    settings::loosened(ceiling, policy, &mut out);
    files::loosened_scratch(&ceiling.scratch, &policy.scratch, &mut out);
    out.sort_by_key(|difference| difference.area);
    out
}

#[cfg(test)]
mod tests;
