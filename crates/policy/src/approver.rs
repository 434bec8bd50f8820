//! Approvers of code that screening holds back, written as `KIND:WHO`.
//!
//! A name is looked up in the host's accounts at each approval, not when the policy is read.
//! Refusing the approval of one's own request is the engine's task.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{
    accounts::{Accounts, AccountsError},
    check::{self, Checked},
    diagnostic::{Diagnostic, quote},
    facts::Caller,
};

/// One line of `approvers`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Approver {
    /// A user by name.
    User(String),
    /// A user by number.
    Uid(u32),
    /// Every member of a group, by its name.
    Group(String),
    /// The same by number.
    Gid(u32),
}

const KINDS: &[(&str, &str)] = &[("user", "user"), ("uid", "uid"), ("group", "group"), ("gid", "gid")];

impl fmt::Display for Approver {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Approver::User(name) => write!(out, "user:{name}"),
            Approver::Uid(number) => write!(out, "uid:{number}"),
            Approver::Group(name) => write!(out, "group:{name}"),
            Approver::Gid(number) => write!(out, "gid:{number}"),
        }
    }
}

impl From<Approver> for String {
    fn from(approver: Approver) -> Self {
        approver.to_string()
    }
}

impl TryFrom<String> for Approver {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        approver(&text).map_err(|diagnostic| diagnostic.title)
    }
}

impl Approver {
    fn is(&self, caller: &Caller, accounts: &Accounts) -> bool {
        let member = |gid: &u32| *gid == caller.gid || caller.groups.contains(gid);
        match self {
            Approver::User(name) => accounts.users.get(name) == Some(&caller.uid),
            Approver::Uid(uid) => *uid == caller.uid,
            Approver::Group(name) => accounts.groups.get(name).is_some_and(member),
            Approver::Gid(gid) => member(gid),
        }
    }
}

/// Whether a caller is one of these, by the host's account files.
///
/// # Errors
/// Those cannot be read or are not trusted.
pub fn is_approver(approvers: &[Approver], caller: &Caller) -> Result<bool, AccountsError> {
    let accounts = Accounts::load()?;
    Ok(approvers.iter().any(|approver| approver.is(caller, &accounts)))
}

/// Reads one line of `approvers`.
pub(crate) fn approver(text: &str) -> Checked<Approver> {
    let wrong = |label: &str| {
        Diagnostic::new(format!("{} is not an approver", quote(text)), label).help("write user:NAME, uid:NUMBER, group:NAME or gid:NUMBER")
    };
    let (kind, who) = text.split_once(':').ok_or_else(|| wrong("no `:` in it"))?;
    let kind = check::one_of(KINDS, "kind of approver", kind)?;
    let number = || who.parse().map_err(|_| wrong("not a number"));
    if who.is_empty() || who.len() > 256 || who.contains(|c: char| c.is_control() || c.is_whitespace() || c == ':') {
        return Err(wrong("not the name of an account"));
    }
    Ok(match kind {
        "user" => Approver::User(who.to_owned()),
        "group" => Approver::Group(who.to_owned()),
        "uid" => Approver::Uid(number()?),
        _ => Approver::Gid(number()?),
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use super::*;

    #[test]
    fn a_line_matches_the_account_that_it_names_and_no_other() {
        let accounts = Accounts::parse("alice:x:1001:1001::/:\n", "secops:x:50:\n");
        let caller = |uid, gid, groups: &[u32]| Caller { uid, gid, groups: groups.to_vec() };
        for (text, yes, no) in [
            ("user:alice", caller(1001, 7, &[]), caller(1002, 1001, &[1001])),
            ("uid:1001", caller(1001, 7, &[]), caller(1002, 1001, &[1001])),
            ("group:secops", caller(5, 7, &[50]), caller(50, 7, &[7])),
            ("gid:50", caller(5, 50, &[]), caller(50, 7, &[7])),
        ] {
            let approver = approver(text).unwrap();
            assert_eq!(approver.to_string(), text);
            assert!(approver.is(&yes, &accounts) && !approver.is(&no, &accounts), "{text}");
        }
        // An unknown name matches no account.
        assert!(!approver("user:bob").unwrap().is(&caller(0, 0, &[0]), &accounts));
        for wrong in ["alice", "user:", "uid:alice", "uid:-1", "boss:alice", "user:a b", "gid:4294967296"] {
            assert!(approver(wrong).is_err(), "{wrong}");
        }
    }
}
