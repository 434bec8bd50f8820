//! A policy in plain sentences: what code under it may read, write, run, reach and consume,
//! whose rights it has, and what follows from each loosening.
//!
//! Made from the resolved policy by the functions and tables that the plan is made from, so
//! that it says of every host what `--dry-run` says of one. Every key of the format has a
//! sentence here; a test goes through them all. It judges nothing.

mod says;

use serde::Serialize;

use crate::{
    compare::{Difference, beyond},
    model::{Origin, Policy},
};

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
    /// The policy's own words.
    pub description: String,
    /// What holds, by what it is about.
    pub sections: Vec<Section>,
    /// What it allows beyond another policy.
    pub loosened: Loosened,
}

/// What is said about one thing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Section {
    /// A stable identifier.
    pub about: &'static str,
    /// Its heading.
    pub title: &'static str,
    /// Sentences.
    pub statements: Vec<Statement>,
}

/// One sentence, and the paths, names or rules that it speaks of.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Statement {
    /// The sentence.
    pub says: String,
    /// What it speaks of.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub items: Vec<String>,
}

/// What a policy allows beyond another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Loosened {
    /// The other policy's name.
    pub against: String,
    /// Each with what follows from it.
    pub differences: Vec<Difference>,
}

/// Explains a policy; its loosenings are those against another.
pub fn explain(policy: &Policy, against: &Policy) -> Explanation {
    Explanation {
        schema: 1,
        policy: policy.name.clone(),
        origin: origin(policy),
        sha256: policy.sha256.clone(),
        description: policy.description.clone(),
        sections: says::sections(policy),
        loosened: Loosened { against: against.name.clone(), differences: beyond(against, policy) },
    }
}

fn origin(policy: &Policy) -> String {
    match &policy.origin {
        Origin::Shipped => String::from("shipped"),
        Origin::File(path) => path.display().to_string(),
    }
}

#[cfg(test)]
mod tests;
