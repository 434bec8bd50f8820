//! A policy after loading: every value checked and typed, independent of any host.
//!
//! Lists are resolved (`add`, `remove` and `replace` are gone) and system calls are
//! known names. What this host can do with them is the plan's question.

use std::{
    collections::BTreeMap,
    fmt,
    path::{Path, PathBuf},
    time::Duration,
};

use serde::{Deserialize, Serialize};
use stockade_protocol::{
    Limits,
    screen::{Action, Rule},
};

use crate::{alert::Alert, approver::Approver, modules, whitelist::Whitelist, written};

/// One resolved policy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Policy {
    /// The name under which it was found.
    pub name: String,
    /// Where it came from.
    pub origin: Origin,
    /// SHA-256 in hex over its text and the text of everything that it extends.
    pub sha256: String,
    /// One line for a person.
    pub description: String,
    /// The runtime of a request that names none.
    pub language: String,
    /// What of the host is visible.
    pub filesystem: Filesystem,
    /// Who the code is, inside.
    pub identity: Identity,
    /// The program's environment.
    pub environment: Environment,
    /// How each language is run, by name.
    pub runtimes: BTreeMap<String, Runtime>,
    /// Interpreters of which runs of a session get copies, by name. Other runs use none of them.
    #[serde(default)]
    pub templates: BTreeMap<String, Template>,
    /// A run's default limits.
    #[serde(with = "written::limits")]
    pub limits: Limits,
    /// How far a request may go.
    #[serde(with = "written::limits")]
    pub limits_max: Limits,
    /// Its file has `max = "same"` in place of `[limits.max]`. For words about the file alone: the
    /// maximum stands in `limits_max`.
    #[serde(skip)]
    pub max_is_same: bool,
    /// System calls.
    pub seccomp: Seccomp,
    /// What may leave.
    pub egress: Egress,
    /// The writable directory.
    pub scratch: Scratch,
    /// Layers that may be missing.
    pub degrade: Degrade,
    /// What is written down.
    pub audit: Audit,
    /// What the code is screened for before it runs.
    pub screen: Screen,
}

impl Policy {
    /// The template that a runtime's runs start from in a session, with its name. The runtime goes
    /// by its own name here, not by an alias. None where the root is an image's.
    pub fn template_of(&self, runtime: &str) -> Option<(&str, &Template)> {
        // A copy is of an interpreter of the host.
        if self.filesystem.root.image.is_some() {
            return None;
        }
        let name = self.runtimes.get(runtime)?.template.as_ref()?;
        self.templates.get_key_value(name).map(|(name, template)| (name.as_str(), template))
    }
}

/// Where a policy came from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Origin {
    /// Compiled in.
    Shipped,
    /// Read from this file.
    File(PathBuf),
}

/// `shipped`, or the path of the file.
impl fmt::Display for Origin {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Shipped => out.write_str("shipped"),
            Origin::File(path) => path.display().fmt(out),
        }
    }
}

/// What of the host the sandbox's root shows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Filesystem {
    /// Absolute paths bound read-only at their own place; a missing one is refused.
    pub read_only: Vec<PathBuf>,
    /// The same, but a missing one is left out.
    pub read_only_optional: Vec<PathBuf>,
    /// Names of nodes below `/dev`: of null, zero, full, random, urandom, tty.
    pub devices: Vec<String>,
    /// What a run starts from that names no image.
    #[serde(default)]
    pub root: Root,
    /// Names and digests of images that a request may have as its root; [`ANY_IMAGE`] for each that
    /// the store has.
    #[serde(default)]
    pub images: Vec<String>,
    /// Code may change the root of an image. What it writes is gone with the run.
    #[serde(default)]
    pub writable_root: bool,
    /// Unix sockets of the host that a caller of `stockade bwrap` may show, by absolute path. A `*` in
    /// the name stands for anything but `/`.
    #[serde(default)]
    pub sockets: Vec<String>,
}

/// In [`Filesystem::images`]: every image of the store.
pub const ANY_IMAGE: &str = "*";
/// In place of an image: the host's directories.
pub const NO_IMAGE: &str = "none";

/// What the sandbox's root is made of.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Root {
    /// Name or digest of an image; none: the host's directories.
    #[serde(default, deserialize_with = "written::image")]
    pub image: Option<String>,
}

/// Who the code is, inside.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Login name; letters, digits, `_`, `-`.
    pub user: String,
    /// User and group id inside, never 0.
    pub uid: u32,
    /// Group id inside, never 0.
    pub gid: u32,
    /// Host name of the UTS namespace.
    pub hostname: String,
}

/// The program's environment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Environment {
    /// Variables that every program gets.
    pub set: BTreeMap<String, String>,
    /// Names that a request may set; a trailing `*` matches any ending.
    pub accept: Vec<String>,
}

impl Environment {
    /// Whether a caller may set the variable of this name.
    pub fn accepts(&self, name: &str) -> bool {
        self.accept.iter().any(|pattern| match pattern.strip_suffix('*') {
            Some(prefix) => name.starts_with(prefix),
            None => name == pattern,
        })
    }
}

/// In a runtime's words, the path of what its `compile` makes. It may be the program itself.
pub const OUTPUT: &str = "{output}";

/// How one language is run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Runtime {
    /// Program and arguments; one of them holds `{file}`, the path of the code, or [`OUTPUT`]. The
    /// request's `args` follow.
    pub command: Vec<String>,
    /// What makes [`OUTPUT`] of the code in a run of its own before that of `command`: a compiler and
    /// its arguments, with `{file}` and [`OUTPUT`]. Empty: the code is run as it is.
    #[serde(default)]
    pub compile: Vec<String>,
    /// Other names of this language.
    #[serde(default)]
    pub aliases: Vec<String>,
    /// Ending of the code's file name, without the dot.
    pub extension: String,
    /// A virtual environment, or another directory, shown read-only; the program in its `bin`
    /// takes the place of the command's first word.
    pub venv: Option<PathBuf>,
    /// The template that its runs start from in a session, a key of `Policy::templates`; none: a
    /// run starts a new interpreter.
    #[serde(default, deserialize_with = "written::template")]
    pub template: Option<String>,
    /// Further variables for this language.
    #[serde(default)]
    pub environment: BTreeMap<String, String>,
    /// What its interpreters are watched for.
    #[serde(default)]
    pub modules: Modules,
}

/// A CPython interpreter that has imported some modules. Its memory is written to an image once,
/// and each run of a session starts from a private copy of the image. The copies of one image
/// share memory layout, hash seed and stack canary.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Template {
    /// Dotted names of the modules that it imports, in this order; at most 32, each of at most
    /// 200 bytes.
    pub imports: Vec<String>,
    /// Python code that it runs after the imports, at most 16 KiB, not empty and without NUL.
    #[serde(deserialize_with = "written::code")]
    pub warm: Option<String>,
    /// Runs from one image before it is made anew: 1 to 1,000,000.
    pub max_runs: u64,
    /// Age at which an image is made anew, in whole milliseconds: 1 second to 24 hours.
    #[serde(with = "written::age")]
    pub max_age: Duration,
    /// Images that a service has of it at a time, each with its own layout and hash seed: 1 to 16. A
    /// session has one.
    pub images: u32,
    /// Whose runs may start from one image of a service. A session has one caller.
    pub shared_by: SharedBy,
    /// Workers of a service that keep a copy waiting from the start of the service on: 0 to 256. Where
    /// images are those of one key, so many for each key.
    pub ready: u32,
}

impl Default for Template {
    fn default() -> Self {
        let max_age = Duration::from_secs(10 * 60);
        Template { imports: Vec::new(), warm: None, max_runs: 1000, max_age, images: 1, shared_by: SharedBy::Caller, ready: 0 }
    }
}

/// Whose runs may start from one image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SharedBy {
    /// Those of one key of the service.
    Caller,
    /// Those of all keys that use the policy.
    Policy,
}

/// What is done about modules that code imports, and about events of its interpreter.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "BTreeMap<String, Action>", into = "BTreeMap<String, Action>")]
pub struct Modules {
    /// About an import that no rule names.
    pub default: Option<Action>,
    /// By name.
    pub rules: BTreeMap<String, Action>,
}

impl From<BTreeMap<String, Action>> for Modules {
    fn from(mut rules: BTreeMap<String, Action>) -> Self {
        Modules { default: rules.remove(modules::DEFAULT), rules }
    }
}

impl From<Modules> for BTreeMap<String, Action> {
    fn from(modules: Modules) -> Self {
        let default = modules.default.map(|action| (modules::DEFAULT.to_owned(), action));
        modules.rules.into_iter().chain(default).collect()
    }
}

impl Modules {
    fn actions(&self) -> impl Iterator<Item = Action> + '_ {
        self.rules.values().copied().chain(self.default)
    }

    /// Whether anything is done about anything.
    pub fn watches(&self) -> bool {
        self.actions().any(|action| action != Action::Allow)
    }

    /// Whether anything is refused.
    pub fn denies(&self) -> bool {
        self.actions().any(|action| action == Action::Deny)
    }
}

impl Runtime {
    /// Whether its code is compiled before it runs.
    pub fn compiles(&self) -> bool {
        !self.compile.is_empty()
    }

    /// Whether what `compile` makes is the program.
    pub fn runs_output(&self) -> bool {
        self.command.first().is_some_and(|program| program == OUTPUT)
    }

    /// The program that compiles, unless a run names another for it; none: nothing does.
    pub fn compiler(&self) -> Option<&Path> {
        self.compile.first().map(Path::new)
    }

    /// The program of the host that runs it, unless a run names another: the command's first word, in
    /// the virtual environment where there is one; the compiler, where its output is the program.
    pub fn interpreter(&self) -> PathBuf {
        let words = if self.runs_output() { &self.compile } else { &self.command };
        let first = Path::new(words.first().map_or("", String::as_str));
        match &self.venv {
            Some(venv) => venv.join("bin").join(first.file_name().unwrap_or_default()),
            None => first.to_path_buf(),
        }
    }

    /// The name of a file of this language.
    pub fn file_name(&self, stem: &str) -> String {
        if self.extension.is_empty() { stem.to_owned() } else { format!("{stem}.{}", self.extension) }
    }
}

/// What a system call's filter answers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seccomp {
    /// Names of allowed system calls.
    #[serde(with = "written::joined")]
    pub allow: Vec<String>,
    /// Calls that end the run when they are tried.
    #[serde(with = "written::joined")]
    pub kill: Vec<String>,
    /// Calls answered ENOSYS, as if the kernel were older; a program falls back.
    #[serde(with = "written::joined")]
    pub enosys: Vec<String>,
    /// Socket families that `socket` may open.
    pub socket_families: Vec<SocketFamily>,
    /// Requests that `ioctl` may make, by number.
    #[serde(with = "written::ioctls")]
    pub ioctl: Vec<u32>,
}

/// A socket family that a policy can allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SocketFamily {
    /// AF_UNIX.
    Unix,
    /// AF_INET, with TCP and UDP.
    Inet,
    /// AF_INET6, with TCP and UDP.
    Inet6,
    /// AF_NETLINK with NETLINK_ROUTE only, which getifaddrs needs.
    Netlink,
}

impl SocketFamily {
    /// The name in `[seccomp] socket_families`.
    pub const fn name(self) -> &'static str {
        match self {
            SocketFamily::Unix => "unix",
            SocketFamily::Inet => "inet",
            SocketFamily::Inet6 => "inet6",
            SocketFamily::Netlink => "netlink",
        }
    }
}

/// What may leave the sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Egress {
    /// Peers; empty: none.
    pub whitelist: Whitelist,
}

/// How scratch is opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Access {
    /// Readable and writable.
    #[default]
    Rw,
    /// Readable only.
    Ro,
}

impl Access {
    /// The name in `[scratch] access`.
    pub const fn name(self) -> &'static str {
        match self {
            Access::Rw => "rw",
            Access::Ro => "ro",
        }
    }
}

/// The writable directory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scratch {
    /// Whether the code may write there.
    pub access: Access,
    /// Make a missing directory (its parent must exist).
    pub create: bool,
    /// HOME is in scratch and survives.
    pub home: bool,
    /// Globs below scratch that stay read-only.
    pub read_only: Vec<String>,
    /// Globs below scratch that cannot be read.
    pub hidden: Vec<String>,
    /// Directories at or below which one of root's may be a scratch of root itself. Those of the
    /// system count only where they, or directories in them, are named.
    pub root: Vec<PathBuf>,
}

/// A layer that a policy may let a run go without.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Degradable {
    /// Memory, process and CPU limits of a cgroup.
    Cgroup,
    /// The Landlock rules.
    Landlock,
    /// A host uid of the run's own.
    UniqueUid,
    /// The user namespaces, for root only: an ordinary user needs them to make a sandbox.
    UserNamespace,
}

impl Degradable {
    /// The name in `[degrade]` and in the receipt.
    pub const fn name(self) -> &'static str {
        match self {
            Degradable::Cgroup => "cgroup",
            Degradable::Landlock => "landlock",
            Degradable::UniqueUid => "unique_uid",
            Degradable::UserNamespace => "user_namespace",
        }
    }
}

/// Layers that may be missing, by who launches.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Degrade {
    /// When an ordinary user launches.
    pub rootless: Vec<Degradable>,
    /// When root launches.
    pub root: Vec<Degradable>,
}

/// Whether a run is written down.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AuditMode {
    /// No.
    Off,
    /// Where it can be.
    #[default]
    Try,
    /// Or it does not start.
    Required,
}

impl AuditMode {
    /// The name in `[audit] mode`.
    pub const fn name(self) -> &'static str {
        match self {
            AuditMode::Off => "off",
            AuditMode::Try => "try",
            AuditMode::Required => "required",
        }
    }
}

/// What is written down about a run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Audit {
    /// Whether.
    pub mode: AuditMode,
    /// So many bytes of the code and of each output stream.
    #[serde(with = "written::size")]
    pub preview: u64,
    /// What raises an alert.
    pub alerts: Vec<Alert>,
}

/// What the code of a request is screened for before it runs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Screen {
    /// What is done about what; nothing about a rule that is not there.
    pub actions: BTreeMap<Rule, Action>,
    /// Modules that may be imported; empty: any.
    #[serde(default)]
    pub modules: Vec<String>,
    /// Built-in names that may be used; empty: any.
    #[serde(default)]
    pub builtins: Vec<String>,
    /// How long code that needs approval may wait for it, in milliseconds.
    #[serde(default = "approval_time", with = "written::duration")]
    pub approval_time: u64,
    /// Who approves it; empty: the caller, by sending it again.
    #[serde(default)]
    pub approvers: Vec<Approver>,
}

/// The default time to wait for an approval: 15 minutes.
const fn approval_time() -> u64 {
    15 * 60 * 1000
}

impl Screen {
    /// What is done about a finding.
    pub fn action(&self, rule: Rule) -> Action {
        self.actions.get(&rule).copied().unwrap_or(Action::Allow)
    }

    /// Whether there is something that wants an approval.
    pub fn wants_approval(&self) -> bool {
        self.actions.values().any(|action| *action == Action::Approve)
    }

    /// The most that is done about anything.
    pub fn severest(&self) -> Action {
        self.actions.values().copied().max().unwrap_or(Action::Allow)
    }
}
