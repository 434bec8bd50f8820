//! The keys of a service, `keys.toml`: who may use it, with which policies and how much of it.
//!
//! A key is a token, of which the file has the hash alone, or a uid that the kernel names on the
//! UNIX socket. No two keys share an id, a hash or a uid, so that a client has one key. Whether a
//! policy exists, a token belongs to a hash or a key has expired is not decided here.

use std::{
    collections::BTreeMap,
    fmt,
    path::{Path, PathBuf},
    time::SystemTime,
};

use toml::de::{DeTable, DeValue};

use super::{ServiceError, duration, expiry, refuse_if_wrong};
use crate::{
    accounts::{self, Accounts},
    check::{self, Checked},
    diagnostic::{Diagnostic, Diagnostics, Located, SourceSpan, quote},
    document::{self, DocumentReader},
    trust,
};

const KEYS: &[&str] = &[
    "id",
    "hash",
    "uid",
    "user",
    "policies",
    "scopes",
    "running",
    "waiting",
    "runs_per_minute",
    "cpu_per_hour",
    "weight",
    "expires",
    "sessions",
];

/// The most that the mode of the file may allow: its hashes are for one group.
const MAX_MODE: u32 = 0o640;

/// What a hash in the file begins with; 64 hexadecimal digits follow.
pub const HASH_PREFIX: &str = "sha256:";

const MAX_ID_LEN: usize = 64;

const RUNNING: u32 = 64;
const SESSIONS: u32 = 16;
const WAITING: u32 = 1000;

/// What makes a client the holder of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Credential {
    /// It has the token with this SHA-256.
    Hash([u8; 32]),
    /// It is a process of this user, on the UNIX socket.
    Uid(u32),
}

impl fmt::Display for Credential {
    /// As the file writes it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Credential::Hash(hash) => write!(f, "{HASH_PREFIX}{}", stockade_protocol::text::hex(hash)),
            Credential::Uid(uid) => write!(f, "uid {uid}"),
        }
    }
}

/// What a key is good for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    /// Running code, and seeing and cancelling the runs of the key.
    Run,
    /// Keeping sessions, and running code and reading and writing files in them.
    Keep,
    /// Running code by the interfaces of other services, such as SandboxFusion's.
    Facade,
    /// Seeing the runs and the figures of all keys.
    Watch,
}

impl Scope {
    /// All of them, in the order of the documents.
    pub const ALL: [Scope; 4] = [Scope::Run, Scope::Keep, Scope::Facade, Scope::Watch];

    /// As the file writes it.
    pub fn name(self) -> &'static str {
        match self {
            Scope::Run => "run",
            Scope::Keep => "keep",
            Scope::Facade => "facade",
            Scope::Watch => "watch",
        }
    }

    fn named(text: &str) -> Checked<Self> {
        if text == "approve" {
            let diagnostic = Diagnostic::new("there is no scope `approve`", "code that waits for approval is refused over HTTP");
            return Err(diagnostic.help("send such code to `stockade exec`, where a person approves it"));
        }
        let found = Scope::ALL.into_iter().find(|scope| scope.name() == text);
        found.ok_or_else(|| check::unlisted("scope", text, Scope::ALL.into_iter().map(Scope::name)))
    }
}

/// One `[[key]]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceKey {
    /// Its name, in the audit log too.
    pub id: String,
    /// What makes a client its holder.
    pub credential: Credential,
    /// Names of policies, and absolute paths of policy files; at least one.
    pub policies: Vec<String>,
    /// What it is good for, without repetition and in the order of [`Scope::ALL`]; default: `run`.
    pub scopes: Vec<Scope>,
    /// Its runs at a time; default: 64.
    pub running: u32,
    /// Its requests that wait at a time; default: 1000.
    pub waiting: u32,
    /// Its runs that may begin in a minute; default: any number.
    pub runs_per_minute: Option<u32>,
    /// The CPU time that its runs may use in an hour, in milliseconds; default: any.
    pub cpu_per_hour: Option<u64>,
    /// Its share of the queue beside other keys, 1 to 1000; default: 1.
    pub weight: u32,
    /// Sessions at a time; default: 16.
    pub sessions: u32,
    /// The moment from which on it is refused; default: none.
    pub expires: Option<SystemTime>,
    /// Its line in the file.
    pub line: usize,
}

/// All keys of a service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceKeys {
    /// Their file.
    pub path: PathBuf,
    /// In the order of the file.
    pub keys: Vec<ServiceKey>,
    text: String,
}

impl ServiceKeys {
    /// Reads keys from a file that only root, or this user, can have written, and that others than
    /// its owner and group cannot read. `None`: there is no file.
    ///
    /// # Errors
    /// The file or the account files cannot be read or are not trusted, or it has a mistake.
    pub fn load(path: &Path, user: u32) -> Result<Option<Self>, ServiceError> {
        trust::read_trusted_of(path, user, MAX_MODE)?.map(|text| Self::of_text(path, text)).transpose()
    }

    /// The keys of a file that does not exist yet.
    pub fn none(path: &Path) -> Self {
        ServiceKeys { path: path.to_owned(), keys: Vec::new(), text: String::new() }
    }

    /// The same with a table behind the last line.
    ///
    /// # Errors
    /// What comes of it has a mistake, such as an id that another key has.
    pub fn with(&self, table: &str) -> Result<Self, ServiceError> {
        let mut text = self.text.clone();
        if !text.is_empty() {
            text.push_str(if text.ends_with('\n') { "\n" } else { "\n\n" });
        }
        text.push_str(table);
        Self::of_text(&self.path, text)
    }

    /// The text of the file.
    pub fn text(&self) -> &str {
        &self.text
    }

    fn of_text(path: &Path, text: String) -> Result<Self, ServiceError> {
        // The account files are read only for a name: without one, a host needs none.
        let accounts = if text.contains("user") { Accounts::load()? } else { Accounts::default() };
        Self::parse(path, text, &accounts)
    }

    fn parse(path: &Path, text: String, accounts: &Accounts) -> Result<Self, ServiceError> {
        let mut problems = Diagnostics::default();
        let mut found = Vec::new();
        if let Some(root) = document::parse(0, &text, &mut problems) {
            let reader = DocumentReader { source: 0, inherits: false, problems: &mut problems };
            found = KeyReader { reader, text: &text, accounts, ids: BTreeMap::new(), credentials: BTreeMap::new() }.all(root.get_ref());
        }
        let report = refuse_if_wrong(path, text.clone(), problems)?;
        let keys = found.into_iter().map(|at| ServiceKey { line: report.position(&at.span).0, ..at.value }).collect();
        Ok(ServiceKeys { path: path.to_owned(), keys, text })
    }
}

/// Whether this can be the id of a key.
pub fn is_key_id(text: &str) -> bool {
    let good = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '.' | '_' | '-');
    (1..=MAX_ID_LEN).contains(&text.len()) && text.chars().all(good)
}

/// A key for a hash as the file writes it, with no quota but the defaults.
pub fn key_table(id: &str, hash: &str, policies: &[String], scopes: &[Scope]) -> String {
    let quoted = |text: &str| toml::Value::from(text).to_string();
    let policies: Vec<String> = policies.iter().map(|policy| quoted(policy)).collect();
    let scopes: Vec<String> = scopes.iter().map(|scope| quoted(scope.name())).collect();
    let (id, hash, policies, scopes) = (quoted(id), quoted(hash), policies.join(", "), scopes.join(", "));
    format!("[[key]]\nid = {id}\nhash = {hash}\npolicies = [{policies}]\nscopes = [{scopes}]\n")
}

/// Reads keys out of one document, each with what those before it have taken.
struct KeyReader<'r> {
    reader: DocumentReader<'r>,
    text: &'r str,
    accounts: &'r Accounts,
    ids: BTreeMap<String, SourceSpan>,
    credentials: BTreeMap<Credential, SourceSpan>,
}

impl KeyReader<'_> {
    fn all(&mut self, top: &DeTable<'_>) -> Vec<Located<ServiceKey>> {
        self.reader.known_names(top, ["key"].into_iter(), "the keys of a service");
        let Some(node) = top.get("key") else { return Vec::new() };
        let Some(items) = node.get_ref().as_array() else {
            self.reader.complain(node, Diagnostic::new("`key` must be an array of tables", "not one").help("write `[[key]]`"));
            return Vec::new();
        };
        let mut out = Vec::new();
        for item in items.iter() {
            let Some(table) = item.get_ref().as_table() else {
                self.reader.complain(item, Diagnostic::new("`key` must be an array of tables", "not a table"));
                continue;
            };
            let span = self.reader.span(item);
            out.extend(self.one(table, &span).map(|value| Located { value, span }));
        }
        out
    }

    fn one(&mut self, table: &DeTable<'_>, span: &SourceSpan) -> Option<ServiceKey> {
        self.reader.known_names(table, KEYS.iter().copied(), "a key");
        let id = self.id(table, span);
        let credential = self.credential(table, span);
        let reader = &mut self.reader;
        let policies: Vec<String> = match table.get("policies") {
            Some(node) => reader.strings(node, "policies", check::policy_reference).into_iter().map(|at| at.value).collect(),
            None => Vec::new(),
        };
        // One that is wrong has been said to be.
        if table.get("policies").is_none_or(|node| node.get_ref().as_array().is_some_and(|items| items.is_empty())) {
            reader.problems.add(span, Diagnostic::new("a key without `policies` can run nothing", "here"));
        }
        let scopes = match table.get("scopes") {
            Some(node) => {
                let named = reader.strings(node, "scopes", Scope::named);
                if node.get_ref().as_array().is_some_and(|items| items.is_empty()) {
                    reader.complain(node, Diagnostic::new("a key without a scope is good for nothing", "empty"));
                }
                Scope::ALL.into_iter().filter(|scope| named.iter().any(|at| at.value == *scope)).collect()
            }
            None => vec![Scope::Run],
        };
        let mut count = |key: &str, least: u32, most: u32| {
            let checked = |number| check::count(key, least.into(), most.into(), number);
            reader.integer(table, key, checked).and_then(|at| u32::try_from(at.value).ok())
        };
        let running = count("running", 1, 100_000).unwrap_or(RUNNING);
        let waiting = count("waiting", 0, 1_000_000).unwrap_or(WAITING);
        let sessions = count("sessions", 1, 10_000).unwrap_or(SESSIONS);
        let runs_per_minute = count("runs_per_minute", 1, 1_000_000);
        let weight = count("weight", 1, 1000).unwrap_or(1);
        let time = |text: &str| duration("cpu_per_hour", 1000, u64::MAX, "CPU time, such as \"30min\"; at least \"1s\"", text);
        let cpu_per_hour = reader.text(table, "cpu_per_hour", time).map(|at| at.value);
        let expires = self.expires(table);
        let (id, credential) = (id?, credential?);
        Some(ServiceKey {
            id,
            credential,
            policies,
            scopes,
            running,
            waiting,
            runs_per_minute,
            cpu_per_hour,
            weight,
            expires,
            sessions,
            line: 0,
        })
    }

    fn id(&mut self, table: &DeTable<'_>, span: &SourceSpan) -> Option<String> {
        if !table.contains_key("id") {
            let diagnostic = Diagnostic::new("a key needs an `id`", "has none");
            self.reader.problems.add(span, diagnostic.help("it names the key in the audit log, such as `id = \"grader\"`"));
        }
        let id = self.reader.text(table, "id", |text| match is_key_id(text) {
            true => Ok(text.to_owned()),
            false => Err(Diagnostic::new(format!("{} cannot be the id of a key", quote(text)), "1 to 64 of a-z, 0-9, `.`, `_` and `-`")),
        })?;
        if let Some(first) = self.ids.get(&id.value) {
            let title = format!("the key in line {} has the id {} already", line(self.text, first), quote(&id.value));
            let diagnostic = Diagnostic::new(title, "a second time").also(first, "first here");
            self.reader.problems.add(&id.span, diagnostic.help("the audit log and clients tell keys apart by their ids"));
            return None;
        }
        self.ids.insert(id.value.clone(), id.span);
        Some(id.value)
    }

    fn credential(&mut self, table: &DeTable<'_>, span: &SourceSpan) -> Option<Credential> {
        let written: Vec<&str> = ["hash", "uid", "user"].into_iter().filter(|key| table.contains_key(*key)).collect();
        if written.len() != 1 {
            let label = if written.is_empty() { "has none of them".to_owned() } else { format!("has {}", written.join(", ")) };
            let diagnostic = Diagnostic::new("a key is for one of `hash`, `uid` and `user`", label);
            self.reader.problems.add(span, diagnostic.help("`stockade key new ID` makes a token and its hash"));
        }
        let hash = self.reader.text(table, "hash", hash).map(|at| Located { value: Credential::Hash(at.value), span: at.span });
        let users = &self.accounts.users;
        let user = self.reader.text(table, "user", |name| accounts::known(users, "user", "uid", name));
        let uid = self.reader.integer(table, "uid", accounts::id);
        let uid = user.or(uid).map(|at| Located { value: Credential::Uid(at.value), span: at.span });
        let found = hash.or(uid)?;
        if let Some(first) = self.credentials.get(&found.value) {
            let what = match found.value {
                Credential::Hash(_) => "this hash".to_owned(),
                Credential::Uid(uid) => format!("the uid {uid}"),
            };
            let title = format!("the key in line {} has {what} already", line(self.text, first));
            let diagnostic = Diagnostic::new(title, "a second time").also(first, "first here");
            self.reader.problems.add(&found.span, diagnostic.help("a client can have only one key"));
            return None;
        }
        self.credentials.insert(found.value, found.span);
        Some(found.value)
    }

    fn expires(&mut self, table: &DeTable<'_>) -> Option<SystemTime> {
        let node = table.get("expires")?;
        let checked = match node.get_ref() {
            DeValue::Datetime(written) => expiry::of(written),
            DeValue::String(text) => expiry::of_text(text),
            _ => {
                self.reader.wrong_type(node, "expires", "a date or a time");
                return None;
            }
        };
        self.reader.take(node, checked).map(|at| at.value)
    }
}

/// The line of a place, counted from 1.
fn line(text: &str, at: &SourceSpan) -> usize {
    text.as_bytes().iter().take(at.start).filter(|byte| **byte == b'\n').count() + 1
}

fn hash(text: &str) -> Checked<[u8; 32]> {
    let digits = text.strip_prefix(HASH_PREFIX).filter(|digits| digits.len() == 64);
    let is_digit = |byte: &u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(byte);
    let digits = digits.filter(|digits| digits.as_bytes().iter().all(is_digit));
    let mut out = [0; 32];
    for (index, byte) in out.iter_mut().enumerate() {
        let pair = digits.and_then(|digits| digits.get(2 * index..2 * index + 2));
        *byte = pair.and_then(|pair| u8::from_str_radix(pair, 16).ok()).ok_or_else(|| {
            let diagnostic = Diagnostic::new("this is not the hash of a token", "`sha256:` and 64 of 0-9 and a-f");
            diagnostic.help("`stockade key new ID` prints the line")
        })?;
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic, reason = "a test may panic")]
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;
    use crate::trust::tests::Scene;

    const HASH: &str = "sha256:00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";

    const TEXT: &str = r#"
[[key]]
id = "rl-grader.1"
hash = "sha256:00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff"
policies = ["default", "/etc/own.toml"]
scopes = ["watch", "facade", "run", "watch"]
running = 8
waiting = 2
runs_per_minute = 600
cpu_per_hour = "2h"
weight = 10
sessions = 3
expires = 2027-01-31

[[key]]
id = "local"
user = "alice"
policies = ["strict"]
"#;

    fn parse(text: &str) -> Result<ServiceKeys, String> {
        let accounts = Accounts::parse("alice:x:1001:1001:::", "");
        ServiceKeys::parse(Path::new("/k.toml"), text.to_owned(), &accounts).map_err(|error| error.to_string())
    }

    #[test]
    fn keys_have_what_is_written_and_defaults_for_the_rest() {
        let [first, second] = parse(TEXT).unwrap().keys.try_into().unwrap();
        let Credential::Hash(hash) = first.credential else { panic!("{first:?}") };
        assert_eq!((hash[0], hash[1], hash[31]), (0, 0x11, 0xff));
        assert_eq!(first.credential.to_string(), HASH);
        let expected = ServiceKey {
            id: "rl-grader.1".to_owned(),
            credential: first.credential,
            policies: vec!["default".to_owned(), "/etc/own.toml".to_owned()],
            scopes: vec![Scope::Run, Scope::Facade, Scope::Watch],
            running: 8,
            waiting: 2,
            runs_per_minute: Some(600),
            cpu_per_hour: Some(7_200_000),
            weight: 10,
            sessions: 3,
            expires: Some(UNIX_EPOCH + Duration::from_secs(1_801_353_600)),
            line: 2,
        };
        assert_eq!(first, expected);
        let expected = ServiceKey {
            id: "local".to_owned(),
            credential: Credential::Uid(1001),
            policies: vec!["strict".to_owned()],
            scopes: vec![Scope::Run],
            running: 64,
            waiting: 1000,
            runs_per_minute: None,
            cpu_per_hour: None,
            weight: 1,
            sessions: 16,
            expires: None,
            line: 15,
        };
        assert_eq!(second, expected);
        assert!(parse("").unwrap().keys.is_empty());
    }

    #[test]
    fn mistakes_are_refused_where_they_stand() {
        let key = |lines: &str| format!("[[key]]\nid = \"a\"\npolicies = [\"default\"]\n{lines}\n");
        let other = |lines: &str| key(&format!("uid = 1\n{lines}"));
        for (text, said) in [
            ("[[keys]]".to_owned(), "did you mean `key`?"),
            ("[key]\nid = \"a\"".to_owned(), "array of tables"),
            ("key = [1]".to_owned(), "not a table"),
            ("[[key]]\nuid = 1\npolicies = [\"a\"]".to_owned(), "a key needs an `id`"),
            ("[[key]]\nid = \"A\"\nuid = 1\npolicies = [\"a\"]".to_owned(), "`A` cannot be the id of a key"),
            ("[[key]]\nid = \"\"\nuid = 1\npolicies = [\"a\"]".to_owned(), "`` cannot be the id of a key"),
            ("[[key]]\nid = 7\nuid = 1\npolicies = [\"a\"]".to_owned(), "`id` must be a string"),
            ("[[key]]\nid = \"a\"\nuid = 1".to_owned(), "can run nothing"),
            ("[[key]]\nid = \"a\"\nuid = 1\npolicies = []".to_owned(), "can run nothing"),
            ("[[key]]\nid = \"a\"\nuid = 1\npolicies = [\"./a\"]".to_owned(), "must be absolute"),
            (key(""), "has none of them"),
            (key(&format!("uid = 1\nhash = \"{HASH}\"")), "has hash, uid"),
            (key("uid = 1\nuser = \"alice\""), "has uid, user"),
            (key("uid = -1"), "not a user or group id"),
            (key("user = \"alcie\""), "did you mean `alice`?"),
            (key("user = \"bob\""), "named by `uid`"),
            (key(&format!("hash = \"{}\"", HASH.to_uppercase())), "not the hash of a token"),
            (key(&format!("hash = \"{}\"", &HASH[..70])), "64 of 0-9 and a-f"),
            (key(&format!("hash = \"{}F\"", &HASH[..70])), "64 of 0-9 and a-f"),
            (key(&format!("hash = \"{}\"", &HASH[7..])), "`sha256:`"),
            (other("scopes = []"), "good for nothing"),
            (other("scopes = [\"approve\"]"), "there is no scope `approve`"),
            (other("scopes = [\"kep\"]"), "known: run, keep, facade, watch"),
            (other("scopes = \"run\""), "a list of strings"),
            (other("running = 0"), "1 to 100000"),
            (other("waiting = -1"), "0 to 1000000"),
            (other("runs_per_minute = 0"), "1 to 1000000"),
            (other("weight = 1001"), "1 to 1000"),
            (other("weight = 0"), "1 to 1000"),
            (other("weight = 1.5"), "a whole number"),
            (other("cpu_per_hour = \"none\""), "at least \"1s\""),
            (other("cpu_per_hour = \"999ms\""), "at least \"1s\""),
            (other("cpu_per_hour = 60"), "`cpu_per_hour` must be a string"),
            (other("expires = 2027-01-31T00:00:00"), "without its offset"),
            (other("expires = \"soon\""), "not a date"),
            (other("expires = 1_801_353_600"), "a date or a time"),
            (other("sessions = 0"), "1 to 10000"),
            (other("runing = 1"), "did you mean `running`?"),
            ("schema = 1".to_owned(), "not a key of the keys of a service"),
        ] {
            let error = parse(&text).unwrap_err();
            assert!(error.contains(said) && error.contains("/k.toml:"), "{text}: {error}");
            assert_eq!(error.lines().filter(|line| line.starts_with("error")).count(), 1, "{text}: {error}");
        }
    }

    #[test]
    fn what_two_keys_share_is_refused_at_the_second_with_the_line_of_the_first() {
        let local = "[[key]]\nid = \"b\"\nuid = 1001\npolicies = [\"default\"]\n";
        let token = format!("[[key]]\nid = \"c\"\nhash = \"{HASH}\"\npolicies = [\"default\"]\n");
        let same_id = local.replace("\"b\"", "\"local\"").replace("1001", "7");
        for (more, at, said) in [
            (&same_id, "/k.toml:21:6", "the key in line 16 has the id `local` already"),
            (&local.to_owned(), "/k.toml:22:7", "the key in line 17 has the uid 1001 already"),
            (&token, "/k.toml:22:8", "the key in line 4 has this hash already"),
        ] {
            let error = parse(&format!("{TEXT}\n{more}")).unwrap_err();
            assert!(error.contains(at) && error.contains(said) && error.contains("first here"), "{error}");
            assert_eq!(error.lines().filter(|line| line.starts_with("error")).count(), 1, "{error}");
            // The control: each is a key by itself.
            assert!(parse(more).is_ok());
        }
    }

    #[test]
    fn a_table_is_added_behind_the_last_line_or_not_at_all() {
        let table = key_table("new", HASH, &["default".to_owned(), "/a \"b\".toml".to_owned()], &[Scope::Run, Scope::Keep]);
        let first = ServiceKeys::none(Path::new("/k.toml")).with(&table).unwrap();
        assert_eq!(first.text(), table);
        assert_eq!(first.keys[0].policies, ["default", "/a \"b\".toml"]);
        let kept = "# no end of line";
        for (text, between) in [(kept.to_owned(), "\n\n"), (format!("{kept}\n"), "\n")] {
            let before = parse(&text).unwrap();
            let after = before.with(&table).unwrap();
            assert_eq!(after.text(), format!("{text}{between}{table}"));
            assert_eq!((after.keys.len(), after.keys[0].line), (1, 3));
        }
        let error = first.with(&table).unwrap_err().to_string();
        assert!(error.contains("line 2 has the id `new`") && error.contains("line 3 has this hash"), "{error}");
        // A table cannot follow what is no array of tables.
        assert!(parse("key = []").unwrap().with(&table).is_err());
    }

    #[test]
    fn a_file_that_others_may_read_or_write_is_not_read() {
        use std::{fs, os::unix::fs::PermissionsExt};
        let scene = Scene::new();
        let path = scene.write("keys.toml", &key_table("a", HASH, &["default".to_owned()], &[Scope::Run]));
        let user = rustix::process::geteuid().as_raw();
        let load = |mode: u32| {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            ServiceKeys::load(&path, user).map(|keys| keys.unwrap().keys.len()).map_err(|error| error.to_string())
        };
        // Nothing in a sticky directory is trusted as root.
        if user != 0 {
            assert_eq!(load(0o640), Ok(1));
            assert!(load(0o644).unwrap_err().contains("may have at most 0640"));
            assert!(load(0o660).unwrap_err().contains("may be written by others"));
            assert!(ServiceKeys::load(&scene.0.join("none.toml"), user).unwrap().is_none());
        } else {
            assert!(load(0o640).unwrap_err().contains("while running as root"));
        }
    }
}
