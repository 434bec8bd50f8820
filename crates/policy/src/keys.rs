//! The policy format as one table: every key, what it holds, how its value is checked and
//! what it is for.
//!
//! The reader refuses what is not in here, and the schema is generated from it. What a
//! single value must look like stands in `check`; how values go together in `consistency`.

use stockade_protocol::screen::Rule;

use crate::{
    alert, approver,
    check::{self, Checked},
    diagnostic::{Diagnostic, Located, quote},
    model::{ANY_IMAGE, Degradable},
    names, sockets, whitelist,
};

/// Checks a text and returns its one spelling.
pub(crate) type Check = fn(&str) -> Checked<String>;
/// Checks the words of a command together.
pub(crate) type CommandCheck = fn(&[Located<String>]) -> Checked<()>;

/// What a key holds.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    /// The version of the format.
    Version,
    /// A text.
    Text(Check),
    /// One of these texts, and what they are called.
    Choice(&'static str, &'static [&'static str]),
    /// An id above zero.
    Id,
    /// A whole number, and the least and the most that it may be.
    Count(i64, i64),
    /// `true` or `false`.
    Flag,
    /// A set of texts, edited under `extends`.
    List(Item),
    /// Texts in order; always written whole.
    Words(Check),
    /// A program and its arguments, and what checks them together.
    Command(CommandCheck),
    /// Names of inherited runtimes that are dropped.
    Removals,
    /// A table of these keys.
    Table(&'static [Key]),
    /// A table from names to texts.
    Variables,
    /// A table from names of modules and events to what is done about them.
    Modules,
    /// A table from names to tables of these keys, and what checks the names.
    Named(Check, &'static [Key]),
    /// A value of every limit, and a table `max` of the same.
    LimitsWithMax,
}

/// What a list's items are.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Item {
    Path,
    Directory,
    Device,
    Pattern,
    AllowedSyscall,
    Syscall,
    Family,
    Ioctl,
    Peer,
    Glob,
    Socket,
    Layer,
    UsersLayer,
    Alert,
    Module,
    Builtin,
    Approver,
    Image,
}

impl Item {
    /// Checks an item and returns its one spelling, by which `remove` finds it.
    pub(crate) fn check(self, text: &str) -> Checked<String> {
        match self {
            Item::Path => check::shown(text),
            Item::Directory => check::absolute(text),
            Item::Device | Item::Family | Item::Layer => check::listed(self.what(), &self.values(), text),
            Item::UsersLayer if text == Degradable::UserNamespace.name() => {
                let why = "an ordinary user makes all other namespaces by means of it";
                Err(Diagnostic::new(format!("{} may be missing under `root` only", quote(text)), why))
            }
            Item::UsersLayer => Item::Layer.check(text),
            Item::Pattern => check::pattern(text),
            Item::AllowedSyscall => match names::find(names::FORBIDDEN_SYSCALLS, text) {
                Some(reason) => Err(Diagnostic::new(format!("no policy may allow {}", quote(text)), reason)),
                None => check::syscall(text),
            },
            Item::Syscall => check::syscall(text),
            Item::Ioctl => check::ioctl(text).map(names::ioctl_text),
            Item::Peer => whitelist::rule(text).map(|rule| rule.to_string()),
            Item::Glob => check::glob(text),
            Item::Socket => sockets::pattern(text),
            Item::Alert => alert::alert(text).map(|alert| alert.to_string()),
            Item::Module => check::dotted("module", text),
            Item::Builtin => check::dotted("built-in name", text),
            Item::Image if text == ANY_IMAGE => Ok(text.to_owned()),
            Item::Image => check::image(text),
            Item::Approver => approver::approver(text).map(|approver| approver.to_string()),
        }
    }

    /// Every item there is, where the format lists them.
    pub(crate) fn values(self) -> Vec<&'static str> {
        let layers = names::DEGRADABLE.iter().map(|(name, _)| *name);
        match self {
            Item::Device => names::DEVICES.to_vec(),
            Item::Family => names::FAMILIES.iter().map(|(name, _)| *name).collect(),
            Item::Layer => layers.collect(),
            Item::UsersLayer => layers.filter(|name| *name != Degradable::UserNamespace.name()).collect(),
            _ => Vec::new(),
        }
    }

    const fn what(self) -> &'static str {
        match self {
            Item::Device => "device",
            Item::Family => "socket family",
            _ => "degradable layer",
        }
    }
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
    must("description", Kind::Text(check::line), "one line for a person"),
    may("extends", Kind::Text(check::policy_name), "name of the policy that this one starts from"),
    must("language", Kind::Text(check::language), "runtime of a request that names none"),
    may("remove_runtimes", Kind::Removals, "inherited runtimes that this policy drops"),
    must("filesystem", Kind::Table(FILESYSTEM), "what of the host the sandbox's root shows"),
    must("identity", Kind::Table(IDENTITY), "who the code is, inside"),
    must("environment", Kind::Table(ENVIRONMENT), "the program's environment"),
    must("runtimes", Kind::Named(check::language, RUNTIME), "how each language is run"),
    may("templates", Kind::Named(check::template, TEMPLATE), "CPython interpreters of which each run of a session gets a copy"),
    must("limits", Kind::LimitsWithMax, "a run's default limits, and in `max` how far a request may go"),
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
    may("root", Kind::Table(ROOT), "what a run starts from that names no image; the host's directories if absent"),
    may("images", Kind::List(Item::Image), "images that a request may have as its root, by name or digest; \"*\" for each of the store"),
    may("writable_root", Kind::Flag, "code may change the files of an image, which are as before after the run"),
    may("sockets", Kind::List(Item::Socket), "Unix sockets that a caller of `stockade bwrap` may show, by absolute path; * in the name"),
];

pub(crate) const ROOT: &[Key] = &[may("image", Kind::Text(check::image), "name or digest of an image of the store; \"none\" for none")];

pub(crate) const IDENTITY: &[Key] = &[
    must("user", Kind::Text(check::user), "login name"),
    must("uid", Kind::Id, "user id inside; never 0"),
    must("gid", Kind::Id, "group id inside; never 0"),
    must("hostname", Kind::Text(check::hostname), "host name inside"),
];

pub(crate) const ENVIRONMENT: &[Key] = &[
    must("accept", Kind::List(Item::Pattern), "names that a request may set; a trailing * matches any ending"),
    must("set", Kind::Variables, "variables that every program gets"),
];

pub(crate) const RUNTIME: &[Key] = &[
    must("command", Kind::Command(check::command), "program and arguments; one of them holds {file}, or {output}"),
    may("compile", Kind::Command(check::compile), "compiler and arguments; they hold {file}, and {output}, which the command runs"),
    may("aliases", Kind::Words(check::language), "other names of the language"),
    must("extension", Kind::Text(check::extension), "ending of the code's file name, without the dot"),
    may("venv", Kind::Text(check::shown), "virtual environment, or another directory, whose bin has the interpreter"),
    may("template", Kind::Text(check::template_or_none), "template that its runs start from in a session; \"none\" for none"),
    may("environment", Kind::Variables, "further variables for this language"),
    may("modules", Kind::Modules, "Python's modules and audit events that are noted or refused while code runs; advice, not a boundary"),
];

pub(crate) const TEMPLATE: &[Key] = &[
    may("imports", Kind::Words(check::import), "modules that the interpreter imports, in this order"),
    may("warm", Kind::Text(check::warm), "Python code that the interpreter runs after its imports; empty: none"),
    may("max_runs", Kind::Count(1, 1_000_000), "runs from one image, then it is made anew; 1000 if absent"),
    may("max_age", Kind::Text(check::max_age), "age at which an image is made anew, such as \"10min\", the default"),
    may("images", Kind::Count(1, 16), "images that a service keeps, each with a layout of its own; 1 if absent"),
    may(
        "shared_by",
        Kind::Choice("shared_by", &["caller", "policy"]),
        "whose runs start from one image of a service: those of one key, the default, or of all keys of the policy",
    ),
    may("ready", Kind::Count(0, 256), "workers of a service that keep a copy waiting from the start of the service on; 0 if absent"),
];

pub(crate) const SECCOMP: &[Key] = &[
    must("allow", Kind::List(Item::AllowedSyscall), "allowed system calls"),
    must("kill", Kind::List(Item::Syscall), "system calls that end the run"),
    must("enosys", Kind::List(Item::Syscall), "system calls answered as if the kernel were older"),
    must("socket_families", Kind::List(Item::Family), "families that socket may open"),
    must("ioctl", Kind::List(Item::Ioctl), "requests that ioctl may make"),
];

pub(crate) const EGRESS: &[Key] = &[must("whitelist", Kind::List(Item::Peer), "peers that may be reached, as TARGET:PORTS; empty: none")];

pub(crate) const SCRATCH: &[Key] = &[
    must("access", Kind::Choice("access", &["rw", "ro"]), "whether the code may write there"),
    must("create", Kind::Flag, "make a missing directory"),
    must("home", Kind::Flag, "HOME is in scratch and survives"),
    must("read_only", Kind::List(Item::Glob), "what stays read-only below scratch"),
    must("hidden", Kind::List(Item::Glob), "what cannot be read below scratch"),
    must("root", Kind::List(Item::Directory), "where root itself may use a directory of its own; one of the system only where it is named"),
];

pub(crate) const DEGRADE: &[Key] = &[
    must("rootless", Kind::List(Item::UsersLayer), "when an ordinary user launches"),
    must("root", Kind::List(Item::Layer), "when root launches"),
];

pub(crate) const AUDIT: &[Key] = &[
    must(
        "mode",
        Kind::Choice("mode", &["off", "try", "required"]),
        "whether a run is written down: never, where it can be, or else it does not start",
    ),
    must("preview", Kind::Text(check::preview), "how much of the code and of each output stream is written down, such as \"256B\""),
    must("alerts", Kind::List(Item::Alert), "what raises an alert, as KIND:WHAT"),
];

/// Every rule, what its rules allow by name, and who approves.
pub(crate) const SCREEN: [Key; Rule::ALL.len() + 4] = {
    const ACTIONS: Kind = Kind::Choice("action", &["allow", "note", "approve", "deny"]);
    let mut keys = [may("modules", Kind::List(Item::Module), "modules that may be imported; empty: any"); Rule::ALL.len() + 4];
    keys[1] = may("builtins", Kind::List(Item::Builtin), "built-in names that may be used; empty: any");
    keys[2] = may("approval_time", Kind::Text(check::approval_time), "how long code may wait for its approval, such as \"15min\"");
    keys[3] = may("approvers", Kind::List(Item::Approver), "who approves, as KIND:WHO, never the caller; empty: the caller");
    let mut at = 0;
    while at < Rule::ALL.len() {
        let rule = Rule::ALL[at];
        keys[at + 4] = may(rule.name(), ACTIONS, rule.about());
        at += 1;
    }
    keys
};
