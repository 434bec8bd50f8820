//! What one policy allows that another does not, by what their lines cover and not by how
//! they are written.
//!
//! A difference is claimed to be none only where that can be decided: a path below an
//! allowed path, a network inside a network, a name under a wildcard, a glob that matches
//! less. What cannot be decided counts as allowed beyond the other, and says so. Paths are
//! compared by name: links and mounts of a host are not looked at.

mod calls;
mod files;
mod globs;
mod peers;
mod settings;

use serde::Serialize;

use crate::model::Policy;

pub(crate) use calls::ioctl;
pub(crate) use files::{Shown, shown};
pub(crate) use globs::covers;
pub(crate) use settings::{consequence, launched_by, met, recorded, screened, without};

/// What a difference is about, in the order in which they are listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Area {
    /// Paths and device nodes of the host.
    Files,
    /// System calls and their arguments.
    SystemCalls,
    /// Who may be reached.
    Egress,
    /// What a run gets unasked.
    Limits,
    /// How far a request may go.
    Maxima,
    /// Variables.
    Environment,
    /// Languages.
    Runtimes,
    /// Layers that may be missing.
    Degrade,
    /// The writable directory.
    Scratch,
    /// Who the code is, inside.
    Identity,
    /// What is written down.
    Audit,
    /// What the code is screened for.
    Screen,
}

/// Something that one policy allows and the other does not, or sets otherwise.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// What it is about.
    pub area: Area,
    /// The section and key.
    pub key: String,
    /// What is allowed, in plain words.
    pub says: String,
    /// Which paths, calls, rules or names.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub items: Vec<String>,
    /// What follows from it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub follows: Option<String>,
    /// False: it could not be decided, and so counts.
    pub certain: bool,
}

impl Difference {
    pub(crate) fn new(area: Area, key: impl Into<String>, says: impl Into<String>) -> Self {
        Difference { area, key: key.into(), says: says.into(), items: Vec::new(), follows: None, certain: true }
    }

    fn items(mut self, items: Vec<String>) -> Self {
        self.items = items;
        self
    }

    fn follows(mut self, what: impl Into<String>) -> Self {
        self.follows = Some(what.into());
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
    /// What is otherwise, and neither more nor less.
    pub other: Vec<Difference>,
}

/// Compares two policies.
pub fn compare(first: &Policy, second: &Policy) -> Comparison {
    let mut less = beyond(second, first);
    // What cannot be decided is held against the second alone.
    less.retain(|difference| difference.certain);
    Comparison { more: beyond(first, second), less, other: settings::otherwise(first, second) }
}

/// What a policy allows beyond a ceiling.
pub fn beyond(ceiling: &Policy, policy: &Policy) -> Vec<Difference> {
    let mut out = Vec::new();
    files::shown_beyond(ceiling, policy, &mut out);
    calls::beyond(&ceiling.seccomp, &policy.seccomp, &mut out);
    peers::beyond(&ceiling.egress.whitelist, &policy.egress.whitelist, &mut out);
    settings::beyond(ceiling, policy, &mut out);
    files::scratch_beyond(&ceiling.scratch, &policy.scratch, &mut out);
    out.sort_by_key(|difference| difference.area);
    out
}

#[cfg(test)]
mod tests;
