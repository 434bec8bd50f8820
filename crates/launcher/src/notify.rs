//! Refused system calls: answered and counted.
//!
//! The filter notifies, the launcher answers with an error; it never lets a call through. A
//! program that repeats refused calls is answered at a bounded rate, so that it cannot spend the
//! host's CPU through the launcher. Which policy line would allow a call is not decided here.

use std::collections::BTreeSet;

use rustix::{fd::OwnedFd, io::Errno};
use stockade_policy::{call, filter::names};
use stockade_sys::seccomp::{self, Notification};

/// Different refusals that a result lists.
const MAX_LISTED: usize = 64;
/// Answers in one round of the loop's clock.
const PER_ROUND: u32 = 200;

/// A refused call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RefusedCall {
    /// Its name.
    pub name: String,
    /// What its first refusal named.
    pub arguments: [u64; 6],
    /// Name and arguments as text.
    pub what: String,
    /// How often.
    pub count: u64,
    /// The run was ended for it.
    pub killed: bool,
}

/// The refused calls of one run.
pub(crate) struct Denials {
    kill: BTreeSet<u32>,
    list: Vec<RefusedCall>,
    omitted: u64,
    answered: u32,
}

/// What to do after one notification.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Served {
    /// Go on listening.
    On,
    /// The policy kills for this call.
    Kill,
    /// Enough for this round.
    Rest,
}

impl Denials {
    pub(crate) fn new(kill: BTreeSet<u32>) -> Self {
        Denials { kill, list: Vec::new(), omitted: 0, answered: 0 }
    }

    /// A new round of the clock.
    pub(crate) fn refill(&mut self) {
        self.answered = 0;
    }

    /// Answers one waiting call.
    pub(crate) fn serve(&mut self, listener: &OwnedFd) -> Served {
        let Ok(notification) = seccomp::receive(listener) else { return Served::On };
        let number = u32::try_from(notification.number).unwrap_or(u32::MAX);
        let killed = self.kill.contains(&number);
        self.count(&notification, number, killed);
        if killed {
            return Served::Kill;
        }
        // The caller may have been killed; then there is nothing to answer.
        let _gone = seccomp::refuse(listener, notification.id, Errno::PERM);
        self.answered += 1;
        if self.answered >= PER_ROUND { Served::Rest } else { Served::On }
    }

    fn count(&mut self, notification: &Notification, number: u32, killed: bool) {
        let name = names::name(number).unwrap_or_else(|| format!("system call {number}"));
        let what = call::describe(&name, &notification.arguments);
        if let Some(known) = self.list.iter_mut().find(|refused| refused.what == what) {
            known.count += 1;
        } else if self.list.len() < MAX_LISTED {
            self.list.push(RefusedCall { name, arguments: notification.arguments, what, count: 1, killed });
        } else {
            self.omitted += 1;
        }
    }

    pub(crate) fn finish(self) -> (Vec<RefusedCall>, u64) {
        (self.list, self.omitted)
    }
}
