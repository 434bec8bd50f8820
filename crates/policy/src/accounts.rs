//! Names of users and groups, from the host's two account files.
//!
//! It does not ask a directory service: that needs plug-ins of the C library, which a privileged
//! launcher does not load. A grant names users of such a service by number.

use std::{collections::BTreeMap, path::Path};

use crate::{
    check::Checked,
    diagnostic::{Diagnostic, quote},
    names,
    trust::{self, ReadError},
};

/// Why the account files could not be read.
#[derive(Debug, thiserror::Error)]
pub enum AccountsError {
    /// A file could not be read or is not trusted.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// A file is missing.
    #[error("{0} is missing, so names of users and groups mean nothing; write their numbers")]
    Missing(&'static str),
}

/// Ids by name.
#[derive(Clone, Debug, Default)]
pub(crate) struct Accounts {
    pub users: BTreeMap<String, u32>,
    pub groups: BTreeMap<String, u32>,
}

impl Accounts {
    /// Reads the host's files, which only root may be able to write.
    pub(crate) fn load() -> Result<Self, AccountsError> {
        let read = |path: &'static str| trust::read_trusted(Path::new(path))?.ok_or(AccountsError::Missing(path));
        Ok(Self::parse(&read("/etc/passwd")?, &read("/etc/group")?))
    }

    pub(crate) fn parse(passwd: &str, group: &str) -> Self {
        Accounts { users: ids(passwd), groups: ids(group) }
    }
}

/// The id of a name, or what to write in its place: `number` is the key of an id.
pub(crate) fn known(ids: &BTreeMap<String, u32>, what: &str, number: &str, name: &str) -> Checked<u32> {
    ids.get(name).copied().ok_or_else(|| {
        let diagnostic = Diagnostic::new(format!("this host has no {what} {}", quote(name)), "not in the account files");
        diagnostic.help(match names::nearest(name, ids.keys().map(String::as_str)) {
            Some(likely) => format!("did you mean `{likely}`?"),
            None => format!("a {what} of a directory service is named by `{number}`"),
        })
    })
}

/// A number as the id of a user or group of the host.
pub(crate) fn id(number: i64) -> Checked<u32> {
    match u32::try_from(number) {
        Ok(id) if id < u32::MAX => Ok(id),
        _ => Err(Diagnostic::new(format!("{number} is not a user or group id"), "0 to 4294967294")),
    }
}

/// Name and third field of each line; the first of a name counts, as in the C library.
fn ids(text: &str) -> BTreeMap<String, u32> {
    let mut out = BTreeMap::new();
    for line in text.lines() {
        let mut fields = line.split(':');
        let (Some(name), Some(id)) = (fields.next(), fields.nth(1)) else { continue };
        if let (false, Ok(id)) = (name.is_empty() || name.starts_with(['#', '+', '-']), id.parse()) {
            out.entry(name.to_owned()).or_insert(id);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_third_field_is_the_id_and_broken_lines_are_none() {
        let accounts = Accounts::parse("root:x:0:0::/:\nalice:x:1001:1001::/:\n#a:x:5:\n+::::\nb:x\nalice:x:7:7::/:", "agents:x:50:alice");
        assert_eq!(accounts.users.get("alice"), Some(&1001));
        assert_eq!(accounts.users.len(), 2);
        assert_eq!(accounts.groups.get("agents"), Some(&50));
    }
}
