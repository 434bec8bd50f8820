//! A policy as lines of `key: value`: what code under it may read, write, run, reach and
//! consume, its ids, and what each loosening lets code do.
//!
//! It uses the functions and tables of the plan, so it states for every host what `--dry-run`
//! states for one. A test changes every key of the format and expects a changed line. It does
//! not rate a policy.

mod statements;

use serde::Serialize;
use stockade_policy::model::Policy;

use crate::compare::{Comparison, Difference, compare, loosened};

/// A policy explained.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Explanation {
    /// Version of this format.
    pub schema: u32,
    /// The policy's name.
    pub policy: String,
    /// `shipped`, or its file.
    pub origin: String,
    /// SHA-256 over its text and the text of all that it extends.
    pub sha256: String,
    /// The policy's description of itself.
    pub description: String,
    /// What it changes of the policy that it extends, if it extends one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub changes: Option<Changes>,
    /// What holds, by subject.
    pub sections: Vec<Section>,
    /// What it allows beyond another policy, if there is one to compare it with.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loosened: Option<Loosened>,
}

/// What a policy changes of the one that it extends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Changes {
    /// That policy's name.
    pub base: String,
    /// How the two differ.
    #[serde(flatten)]
    pub comparison: Comparison,
}

/// What a policy changes of its base.
pub fn changes(base: &Policy, policy: &Policy) -> Changes {
    Changes { base: base.name.clone(), comparison: compare(base, policy) }
}

/// The statements about one subject.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Section {
    /// A stable identifier.
    pub about: &'static str,
    /// Its heading.
    pub title: &'static str,
    /// Its lines.
    pub statements: Vec<Statement>,
}

/// One line: `key: value`, or a key and its list.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Statement {
    /// The key, with the value where that is one text.
    #[serde(rename = "says")]
    pub text: String,
    /// The paths, names or rules of the key.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub items: Vec<String>,
}

/// What a policy allows beyond another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Loosened {
    /// The other policy's name.
    pub against: String,
    /// Each with its consequence.
    pub differences: Vec<Difference>,
}

/// Explains a policy; its loosenings are those against another.
pub fn explain(policy: &Policy, against: Option<&Policy>) -> Explanation {
    Explanation {
        schema: 1,
        policy: policy.name.clone(),
        origin: policy.origin.to_string(),
        sha256: policy.sha256.clone(),
        description: policy.description.clone(),
        changes: None,
        sections: statements::sections(policy),
        loosened: against.map(|against| Loosened { against: against.name.clone(), differences: loosened(against, policy) }),
    }
}

#[cfg(test)]
mod tests;
