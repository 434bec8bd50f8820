//! The part of a run that needs to know nothing of it, begun before it is known.
//!
//! Making namespaces takes as long as reading a command line, a request, a policy and what
//! the host offers, and goes on beside that. What is begun here holds nothing of whoever
//! asks and has not touched the host; dropped, it is gone. In a session all of the sandbox
//! may stand already: that is [`Spare`]'s.

use stockade_launcher::{Embryo, LaunchError, early};
use stockade_policy::{facts::Caller, plan::UserNamespaces};

use crate::{caller, facts, spare::Spare};

/// See the module.
#[derive(Default)]
pub struct Ahead {
    pub(crate) embryo: Option<Result<Embryo, LaunchError>>,
    pub(crate) spare: Option<Spare>,
}

impl Ahead {
    /// Begins it, where nothing must come first: a grant for whomever root acts for, or the
    /// cgroup that a process is started in on cgroup v2.
    pub fn begin(peer: Option<&Caller>) -> Self {
        let acts_for_itself = |identity: &caller::Identity| !identity.on_behalf;
        let identity = caller::identify(peer).ok().filter(acts_for_itself).filter(|_| !facts::is_unified());
        if identity.is_none() {
            // What was begun before libc is of no use, and would only hold descriptors.
            drop(early::Unused);
        }
        let embryo = identity.map(|identity| Embryo::begin(identity.privileged, UserNamespaces::Nested, None, None));
        Ahead { embryo, spare: None }
    }
}
