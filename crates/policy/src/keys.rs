//! The policy format as one table: every key, what it holds and what it is for.
//!
//! The parser refuses what is not in here and the schema is generated from it, so the two
//! cannot disagree. How values are checked stands in `check`.

use stockade_protocol::screen::Rule;

/// What a key holds.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    /// The version of the format.
    Version,
    /// A text.
    Text,
    /// One of these texts.
    Choice(&'static [&'static str]),
    /// A whole number above zero.
    Number,
    /// `true` or `false`.
    Flag,
    /// A set of texts, edited under `extends`.
    List(Item),
    /// Texts in order; always written whole.
    Words,
    /// A table of these keys.
    Table(&'static [Key]),
    /// A table from names to texts.
    Variables,
    /// A table from names of modules and events to what is done about them.
    Modules,
    /// A table from names to tables of these keys.
    Named(&'static [Key]),
    /// A value of every limit.
    Limits,
    /// The same, with a table `max` of the same kind.
    LimitsWithMax,
}

/// What a list's items are.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Item {
    Path,
    Device,
    Pattern,
    Syscall,
    Family,
    Ioctl,
    Peer,
    Glob,
    Layer,
    UsersLayer,
    Alert,
    Module,
    Builtin,
    Approver,
}

/// One key of a table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Key {
    pub name: &'static str,
    pub kind: Kind,
    /// Whether a policy that extends nothing must have it.
    pub required: bool,
    pub about: &'static str,
}

const fn must(name: &'static str, kind: Kind, about: &'static str) -> Key {
    Key { name, kind, required: true, about }
}

const fn may(name: &'static str, kind: Kind, about: &'static str) -> Key {
    Key { name, kind, required: false, about }
}

/// The whole document.
pub(crate) const TOP: &[Key] = &[
    must("schema", Kind::Version, "version of the format: 1"),
    must("description", Kind::Text, "one line for a person"),
    may("extends", Kind::Text, "name of the policy that this one starts from"),
    must("language", Kind::Text, "runtime of a request that names none"),
    may("remove_runtimes", Kind::Words, "inherited runtimes that this policy drops"),
    must("filesystem", Kind::Table(FILESYSTEM), "what of the host the sandbox's root shows"),
    must("identity", Kind::Table(IDENTITY), "who the code is, inside"),
    must("environment", Kind::Table(ENVIRONMENT), "the program's environment"),
    must("runtimes", Kind::Named(RUNTIME), "how each language is run"),
    must("limits", Kind::LimitsWithMax, "what a run gets unasked, and in `max` how far a request may go"),
    must("seccomp", Kind::Table(SECCOMP), "system calls"),
    must("egress", Kind::Table(EGRESS), "what may leave"),
    must("scratch", Kind::Table(SCRATCH), "the writable directory"),
    must("degrade", Kind::Table(DEGRADE), "layers that a run may go without where the host has none"),
    must("audit", Kind::Table(AUDIT), "what is written down about a run"),
    may("screen", Kind::Table(&SCREEN), "what the code of a request is screened for before it runs; advice, not a boundary"),
];

pub(crate) const FILESYSTEM: &[Key] = &[
    must("read_only", Kind::List(Item::Path), "host paths shown read-only at their own place"),
    must("read_only_optional", Kind::List(Item::Path), "the same, left out where the host has none"),
    must("devices", Kind::List(Item::Device), "nodes below /dev"),
];

pub(crate) const IDENTITY: &[Key] = &[
    must("user", Kind::Text, "login name"),
    must("uid", Kind::Number, "user id inside; never 0"),
    must("gid", Kind::Number, "group id inside; never 0"),
    must("hostname", Kind::Text, "host name inside"),
];

pub(crate) const ENVIRONMENT: &[Key] = &[
    must("accept", Kind::List(Item::Pattern), "names that a request may set; a trailing * matches any ending"),
    must("set", Kind::Variables, "variables that every program gets"),
];

pub(crate) const RUNTIME: &[Key] = &[
    must("command", Kind::Words, "program and arguments; one of them holds {file}"),
    may("aliases", Kind::Words, "other names of the language"),
    must("extension", Kind::Text, "ending of the code's file name, without the dot"),
    may("venv", Kind::Text, "virtual environment whose interpreter is used"),
    may("environment", Kind::Variables, "further variables for this language"),
    may("modules", Kind::Modules, "Python's modules and audit events that are noted or refused while code runs; advice, not a boundary"),
];

pub(crate) const SECCOMP: &[Key] = &[
    must("allow", Kind::List(Item::Syscall), "allowed system calls"),
    must("kill", Kind::List(Item::Syscall), "system calls that end the run"),
    must("enosys", Kind::List(Item::Syscall), "system calls answered as if the kernel were older"),
    must("socket_families", Kind::List(Item::Family), "families that socket may open"),
    must("ioctl", Kind::List(Item::Ioctl), "requests that ioctl may make"),
];

pub(crate) const EGRESS: &[Key] = &[must("whitelist", Kind::List(Item::Peer), "peers that may be reached, as TARGET:PORTS; empty: none")];

pub(crate) const SCRATCH: &[Key] = &[
    must("access", Kind::Choice(&["rw", "ro"]), "whether the code may write there"),
    must("create", Kind::Flag, "make a missing directory"),
    must("home", Kind::Flag, "HOME is in scratch and survives"),
    must("read_only", Kind::List(Item::Glob), "what stays read-only below scratch"),
    must("hidden", Kind::List(Item::Glob), "what cannot be read below scratch"),
];

pub(crate) const DEGRADE: &[Key] = &[
    must("rootless", Kind::List(Item::UsersLayer), "when an ordinary user launches"),
    must("root", Kind::List(Item::Layer), "when root launches"),
];

pub(crate) const AUDIT: &[Key] = &[
    must(
        "mode",
        Kind::Choice(&["off", "try", "required"]),
        "whether a run is written down: never, where it can be, or else it does not start",
    ),
    must("preview", Kind::Text, "how much of the code and of each output stream is written down, such as \"256B\""),
    must("alerts", Kind::List(Item::Alert), "what raises an alert, as KIND:WHAT"),
];

/// Every rule, what its rules allow by name, and who approves.
pub(crate) const SCREEN: [Key; Rule::ALL.len() + 4] = {
    const ACTIONS: Kind = Kind::Choice(&["allow", "note", "approve", "deny"]);
    let mut keys = [may("modules", Kind::List(Item::Module), "modules that may be imported; empty: any"); Rule::ALL.len() + 4];
    keys[1] = may("builtins", Kind::List(Item::Builtin), "built-in names that may be used; empty: any");
    keys[2] = may("approval_time", Kind::Text, "how long code may wait for its approval, such as \"15min\"");
    keys[3] = may("approvers", Kind::List(Item::Approver), "who approves, as KIND:WHO, never whoever asks; empty: whoever asks");
    let mut at = 0;
    while at < Rule::ALL.len() {
        let rule = Rule::ALL[at];
        keys[at + 4] = may(rule.name(), ACTIONS, rule.about());
        at += 1;
    }
    keys
};
