//! Names of users and groups, from the host's two account files.
//!
//! It does not ask a directory service: that needs plug-ins of the C library, which a privileged
//! launcher does not load. A grant names users of such a service by number.

use std::{collections::BTreeMap, path::Path};

use crate::trust::{self, ReadError};

/// Why the account files could not be read.
#[derive(Debug, thiserror::Error)]
pub enum AccountsError {
    /// A file could not be read or is not trusted.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// A file is missing.
    #[error("{0} is missing, so names in grants mean nothing; grant by number")]
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
