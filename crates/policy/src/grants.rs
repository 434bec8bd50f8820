//! Grants of a host, `/etc/stockade/grants.toml`: the policies, scratch directories and
//! interpreters that a user may use through a privileged launcher.
//!
//! Without a grant everything is refused. One grant must cover the whole of a request; two
//! grants never add up. Paths are compared as given: the caller of `decide` resolves them. It
//! opens no scratch.

use std::{
    fmt,
    path::{Path, PathBuf},
};

use toml::de::DeTable;

use crate::{
    accounts::{Accounts, AccountsError, id, known},
    check::{self, Checked},
    diagnostic::{Diagnostic, DiagnosticReport, Diagnostics, Located, Source, SourceSpan, quote},
    document::{self, DocumentReader},
    trust::{self, ReadError},
};

/// The file of the grants.
pub const PATH: &str = "/etc/stockade/grants.toml";

const KEYS: &[&str] = &["user", "uid", "group", "gid", "policies", "scratch", "interpreters"];

/// Why grants could not be read.
#[derive(Debug, thiserror::Error)]
pub enum GrantsError {
    /// The file could not be read or is not trusted.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// A name in it could not be looked up.
    #[error("cannot look up the names in the grants: {0}")]
    Accounts(#[from] AccountsError),
    /// It has invalid grants.
    #[error("{0}")]
    Invalid(Box<DiagnosticReport>),
}

/// Who asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// User id on the host.
    pub uid: u32,
    /// All group ids on the host, the first group's too.
    pub gids: Vec<u32>,
}

/// The user or group of a grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grantee {
    /// One user.
    User(u32),
    /// Every member of a group.
    Group(u32),
}

impl Grantee {
    fn is(self, caller: &Caller) -> bool {
        match self {
            Grantee::User(uid) => uid == caller.uid,
            Grantee::Group(gid) => caller.gids.contains(&gid),
        }
    }
}

/// One `[[grant]]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    /// The user or group.
    pub grantee: Grantee,
    /// Names of policies, and absolute paths of policy files.
    pub policies: Vec<String>,
    /// Directories at or below which a scratch may be.
    pub scratch: Vec<PathBuf>,
    /// Interpreters that may be added.
    pub interpreters: Vec<PathBuf>,
    /// Its line in the file.
    pub line: usize,
}

/// All grants of a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grants {
    /// Their file.
    pub path: PathBuf,
    /// In the order of the file.
    pub grants: Vec<Grant>,
}

/// The part of a request that no grant covers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ungranted {
    /// The caller appears in no grant.
    Caller,
    /// A policy.
    Policy(String),
    /// A scratch directory.
    Scratch(PathBuf),
    /// An interpreter.
    Interpreter(PathBuf),
}

/// A refusal, with the line that would grant it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct GrantRefusal {
    /// The caller.
    pub uid: u32,
    /// What is missing.
    pub missing: Ungranted,
    /// The file.
    pub path: PathBuf,
    /// The line of the grant that covers most; `None`: no grant is for the caller.
    pub line: Option<usize>,
    /// What to write there.
    pub remedy: String,
}

impl fmt::Display for GrantRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "uid {} has no grant for ", self.uid)?;
        match &self.missing {
            Ungranted::Caller => f.write_str("anything")?,
            Ungranted::Policy(name) => write!(f, "the policy {}", quote(name))?,
            Ungranted::Scratch(path) => write!(f, "the scratch {}", quote(&path.to_string_lossy()))?,
            Ungranted::Interpreter(path) => write!(f, "the interpreter {}", quote(&path.to_string_lossy()))?,
        }
        match self.line {
            Some(line) => write!(f, "; this line in the grant at {}:{line} would allow it: {}", self.path.display(), self.remedy),
            None => write!(f, "; root allows it by writing to {}: {}", self.path.display(), self.remedy),
        }
    }
}

impl Grants {
    /// Reads grants from a file that only root may be able to write. `None`: there is no file.
    ///
    /// # Errors
    /// The file or the account files cannot be read or are not trusted, or it has a mistake.
    pub fn load(path: &Path) -> Result<Option<Self>, GrantsError> {
        let Some(text) = trust::read_trusted(path)? else { return Ok(None) };
        let accounts = Accounts::load()?;
        Self::parse(path, text, &accounts).map(Some).map_err(GrantsError::Invalid)
    }

    pub(crate) fn parse(path: &Path, text: String, accounts: &Accounts) -> Result<Self, Box<DiagnosticReport>> {
        let mut problems = Diagnostics::default();
        let mut found = Vec::new();
        if let Some(root) = document::parse(0, &text, &mut problems) {
            let mut reader = DocumentReader { source: 0, inherits: false, problems: &mut problems };
            found = read(root.get_ref(), &mut reader, accounts);
        }
        let report = DiagnosticReport::new(vec![Source { label: path.display().to_string(), text }], problems);
        if !report.diagnostics().is_empty() {
            return Err(Box::new(report));
        }
        let grants = found.into_iter().map(|at| Grant { line: report.position(&at.span).0, ..at.value }).collect();
        Ok(Grants { path: path.to_owned(), grants })
    }

    /// Whether the caller may use a policy on a scratch with further interpreters.
    ///
    /// Paths are those of the opened files, absolute and without symlinks.
    ///
    /// # Errors
    /// No single grant covers all of it; the refusal has the part that the closest one lacks.
    pub fn decide(&self, caller: &Caller, policy: &str, scratch: Option<&Path>, interpreters: &[PathBuf]) -> Result<(), GrantRefusal> {
        let mut closest: Option<(usize, &Grant, Ungranted)> = None;
        for grant in self.grants.iter().filter(|grant| grant.grantee.is(caller)) {
            let Some((covered, missing)) = grant.lacks(policy, scratch, interpreters) else { return Ok(()) };
            if closest.as_ref().is_none_or(|(best, ..)| covered > *best) {
                closest = Some((covered, grant, missing));
            }
        }
        Err(self.refuse(caller, policy, scratch, closest))
    }

    fn refuse(&self, caller: &Caller, policy: &str, scratch: Option<&Path>, closest: Option<(usize, &Grant, Ungranted)>) -> GrantRefusal {
        let (line, missing, remedy) = match closest {
            Some((_, grant, missing)) => {
                let remedy = match &missing {
                    Ungranted::Caller => String::new(),
                    Ungranted::Policy(name) => with("policies", grant.policies.iter().map(String::as_str), name),
                    Ungranted::Scratch(path) => with_path("scratch", &grant.scratch, path),
                    Ungranted::Interpreter(path) => with_path("interpreters", &grant.interpreters, path),
                };
                (Some(grant.line), missing, remedy)
            }
            None => {
                let mut remedy = format!("[[grant]] uid = {}; {}", caller.uid, with("policies", [].into_iter(), policy));
                if let Some(scratch) = scratch {
                    remedy = format!("{remedy}; {}", with_path("scratch", &[], scratch));
                }
                (None, Ungranted::Caller, remedy.replace("; ", "\n").replacen("]] uid", "]]\nuid", 1))
            }
        };
        GrantRefusal { uid: caller.uid, missing, path: self.path.clone(), line, remedy }
    }
}

impl Grant {
    /// The part that is missing, and how much was covered before it, or `None`.
    fn lacks(&self, policy: &str, scratch: Option<&Path>, interpreters: &[PathBuf]) -> Option<(usize, Ungranted)> {
        if !self.policies.iter().any(|granted| granted == policy) {
            return Some((0, Ungranted::Policy(policy.to_owned())));
        }
        if let Some(scratch) = scratch
            && !(is_plain(scratch) && self.scratch.iter().any(|root| scratch.starts_with(root)))
        {
            return Some((1, Ungranted::Scratch(scratch.to_owned())));
        }
        let wanting = interpreters.iter().find(|wanted| !self.interpreters.contains(wanted));
        wanting.map(|wanted| (2, Ungranted::Interpreter(wanted.clone())))
    }
}

/// Absolute, without `..`, so that a comparison by component is exact.
fn is_plain(path: &Path) -> bool {
    use std::path::Component::{Normal, RootDir};
    path.is_absolute() && path.components().all(|part| matches!(part, Normal(_) | RootDir))
}

fn with<'a>(key: &str, granted: impl Iterator<Item = &'a str>, new: &'a str) -> String {
    let items: Vec<String> = granted.chain([new]).map(|item| toml::Value::from(item).to_string()).collect();
    format!("{key} = [{}]", items.join(", "))
}

fn with_path(key: &str, granted: &[PathBuf], new: &Path) -> String {
    let granted: Vec<_> = granted.iter().map(|path| path.to_string_lossy()).collect();
    with(key, granted.iter().map(AsRef::as_ref), &new.to_string_lossy())
}

fn read(top: &DeTable<'_>, reader: &mut DocumentReader<'_>, accounts: &Accounts) -> Vec<Located<Grant>> {
    reader.known_names(top, ["grant"].into_iter(), "grants");
    let Some(node) = top.get("grant") else { return Vec::new() };
    let Some(items) = node.get_ref().as_array() else {
        reader.complain(node, Diagnostic::new("`grant` must be an array of tables", "not one").help("write `[[grant]]`"));
        return Vec::new();
    };
    let mut out = Vec::new();
    for item in items.iter() {
        let Some(table) = item.get_ref().as_table() else {
            reader.complain(item, Diagnostic::new("`grant` must be an array of tables", "not a table"));
            continue;
        };
        let span = reader.span(item);
        out.extend(grant(table, &span, reader, accounts).map(|value| Located { value, span }));
    }
    out
}

fn grant(table: &DeTable<'_>, span: &SourceSpan, reader: &mut DocumentReader<'_>, accounts: &Accounts) -> Option<Grant> {
    reader.known_names(table, KEYS.iter().copied(), "a grant");
    let keys: Vec<&str> = KEYS[..4].iter().copied().filter(|key| table.contains_key(*key)).collect();
    if keys.len() != 1 {
        let label = if keys.is_empty() { "names no user or group".to_owned() } else { format!("has {}", keys.join(", ")) };
        let diagnostic = Diagnostic::new("a grant is for one of `user`, `uid`, `group` and `gid`", label);
        reader.problems.add(span, diagnostic.help("write one `[[grant]]` for each"));
    }
    let user = reader.text(table, "user", |name| known(&accounts.users, "user", "uid", name));
    let group = reader.text(table, "group", |name| known(&accounts.groups, "group", "gid", name));
    let uid = reader.integer(table, "uid", id);
    let gid = reader.integer(table, "gid", id);
    let mut list = |key: &str, check: fn(&str) -> Checked<String>| match table.get(key) {
        Some(node) => reader.strings(node, key, check).into_iter().map(|at| at.value).collect(),
        None => Vec::new(),
    };
    let policies: Vec<String> = list("policies", check::policy_reference);
    let scratch: Vec<String> = list("scratch", root);
    let interpreters: Vec<String> = list("interpreters", check::absolute);
    if policies.is_empty() {
        reader.problems.add(span, Diagnostic::new("a grant without `policies` grants nothing", "here"));
    }
    let user = user.or(uid).map(|at| Grantee::User(at.value));
    Some(Grant {
        grantee: user.or(group.or(gid).map(|at| Grantee::Group(at.value)))?,
        policies,
        scratch: scratch.into_iter().map(PathBuf::from).collect(),
        interpreters: interpreters.into_iter().map(PathBuf::from).collect(),
        line: 0,
    })
}

fn root(text: &str) -> Checked<String> {
    if text == "/" {
        return Err(Diagnostic::new("`/` cannot be granted for scratch", "every directory of the host").help("name single directories"));
    }
    check::absolute(text)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use super::*;

    const TEXT: &str = r#"
[[grant]]
user = "alice"
policies = ["default", "/etc/own.toml"]
scratch = ["/srv/agents/alice"]
interpreters = ["/opt/venv/bin/python"]

[[grant]]
group = "agents"
policies = ["strict"]
"#;

    fn parse(text: &str) -> Result<Grants, String> {
        let accounts = Accounts::parse("alice:x:1001:1001:::", "agents:x:50:");
        Grants::parse(Path::new("/g.toml"), text.to_owned(), &accounts).map_err(|report| report.to_string())
    }

    fn caller(uid: u32, gids: &[u32]) -> Caller {
        Caller { uid, gids: gids.to_vec() }
    }

    #[test]
    fn a_grant_covers_what_it_names_and_nothing_else() {
        let grants = parse(TEXT).unwrap();
        let alice = caller(1001, &[1001]);
        let python = [PathBuf::from("/opt/venv/bin/python")];
        assert!(grants.decide(&alice, "default", None, &[]).is_ok());
        assert!(grants.decide(&alice, "/etc/own.toml", None, &[]).is_ok());
        assert!(grants.decide(&alice, "default", Some(Path::new("/srv/agents/alice/x")), &python).is_ok());
        for scratch in ["/srv/agents/alice2", "/srv/agents", "/srv/agents/alice/../bob", "srv/agents/alice"] {
            assert!(grants.decide(&alice, "default", Some(Path::new(scratch)), &[]).is_err(), "{scratch}");
        }
        assert!(grants.decide(&alice, "default", None, &[PathBuf::from("/bin/sh")]).is_err());
        assert!(grants.decide(&alice, "own", None, &[]).is_err());
    }

    #[test]
    fn members_of_a_group_are_granted_and_others_are_not() {
        let grants = parse(TEXT).unwrap();
        assert!(grants.decide(&caller(7, &[7, 50]), "strict", None, &[]).is_ok());
        assert!(grants.decide(&caller(50, &[7]), "strict", None, &[]).is_err());
    }

    #[test]
    fn two_grants_do_not_add_up() {
        let grants = parse(TEXT).unwrap();
        let both = caller(1001, &[50]);
        assert!(grants.decide(&both, "strict", None, &[]).is_ok());
        assert!(grants.decide(&both, "strict", Some(Path::new("/srv/agents/alice")), &[]).is_err());
    }

    #[test]
    fn a_refusal_names_the_line_that_would_grant() {
        let grants = parse(TEXT).unwrap();
        let refusal = grants.decide(&caller(1001, &[]), "default", Some(Path::new("/home/alice")), &[]).unwrap_err();
        assert_eq!(
            refusal.to_string(),
            "uid 1001 has no grant for the scratch `/home/alice`; this line in the grant at /g.toml:2 \
             would allow it: scratch = [\"/srv/agents/alice\", \"/home/alice\"]"
        );
        let refusal = grants.decide(&caller(9, &[]), "default", None, &[]).unwrap_err();
        assert_eq!(refusal.remedy, "[[grant]]\nuid = 9\npolicies = [\"default\"]");
        assert_eq!(refusal.line, None);
        assert!(parse(&format!("{}\n{}", TEXT, refusal.remedy)).unwrap().decide(&caller(9, &[]), "default", None, &[]).is_ok());
    }

    #[test]
    fn mistakes_are_refused_where_they_stand() {
        for (text, said) in [
            ("[[grants]]", "did you mean `grant`?"),
            ("[[grant]]\npolicies = [\"a\"]", "names no user or group"),
            ("[[grant]]\nuid = 1\ngid = 2\npolicies = [\"a\"]", "has uid, gid"),
            ("[[grant]]\nuser = \"alcie\"\npolicies = [\"a\"]", "did you mean `alice`?"),
            ("[[grant]]\nuid = 1", "grants nothing"),
            ("[[grant]]\nuid = 1\npolicies = [\"./a\"]", "must be absolute"),
            ("[[grant]]\nuid = 1\npolicies = [\"a\"]\nscratch = [\"/\"]", "cannot be granted"),
            ("[[grant]]\nuid = 1\npolicies = [\"a\"]\nscratch = [\"/a/..\"]", "`..`"),
            ("[[grant]]\nuid = 1\npolicies = [\"a\"]\nscrath = []", "did you mean `scratch`?"),
            ("[[grant]]\nuid = -1\npolicies = [\"a\"]", "not a user or group id"),
            ("[grant]\nuid = 1", "array of tables"),
            ("grant = [1]", "not a table"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(said) && error.contains("/g.toml:"), "{text}: {error}");
        }
    }
}
