//! The names of `[runtimes.NAME.modules]`: of Python's modules and audit events.
//!
//! Whether there is a module of some name only the host's interpreter knows. What can be
//! known is refused where it would never be met: a misspelt event, and a module that stands
//! loaded before any code can import it.

use stockade_protocol::screen::Action;

use crate::{
    check::{self, Checked},
    diagnostic::{Diagnostic, quote},
    model::Modules,
};

/// The key for what no other names.
pub(crate) const DEFAULT: &str = "default";
/// The one name that is neither a module's nor an event's.
const WRITE_OUTSIDE: &str = "write_outside";

/// What a policy can do about one.
pub(crate) const ACTIONS: &[(&str, Action)] = &[("allow", Action::Allow), ("note", Action::Note), ("deny", Action::Deny)];

/// Loaded by the interpreter for itself.
const LOADED: &[&str] = &[
    "abc",
    "builtins",
    "codecs",
    "encodings",
    "genericpath",
    "io",
    "marshal",
    "os",
    "os.path",
    "posix",
    "posixpath",
    "site",
    "stat",
    "sys",
    "time",
];

/// Raised for every line of every library, and so of no use.
const EVERYWHERE: &[&str] = &["compile", "exec", "import", "open"];

/// The events of modules that have no modules below them
/// (<https://docs.python.org/3/library/audit_events.html>), by module.
const EVENTS: &[(&str, &[&str])] = &[
    ("builtins", &["breakpoint", "id", "input", "input/result"]),
    ("fcntl", &["fcntl", "flock", "ioctl", "lockf"]),
    ("gc", &["get_objects", "get_referents", "get_referrers"]),
    ("glob", &["glob", "glob/2"]),
    ("marshal", &["dumps", "load", "loads"]),
    ("mmap", &["__new__"]),
    (
        "os",
        &[
            "chdir",
            "chflags",
            "chmod",
            "chown",
            "exec",
            "fork",
            "forkpty",
            "fwalk",
            "getxattr",
            "kill",
            "killpg",
            "link",
            "listdir",
            "listxattr",
            "lockf",
            "mkdir",
            "posix_spawn",
            "putenv",
            "remove",
            "removexattr",
            "rename",
            "rmdir",
            "scandir",
            "setxattr",
            "spawn",
            "symlink",
            "system",
            "truncate",
            "unsetenv",
            "utime",
            "walk",
        ],
    ),
    ("pickle", &["find_class"]),
    ("pty", &["spawn"]),
    ("resource", &["prlimit", "setrlimit"]),
    ("shutil", &["chown", "copyfile", "copymode", "copystat", "copytree", "make_archive", "move", "rmtree", "unpack_archive"]),
    ("signal", &["pthread_kill"]),
    (
        "socket",
        &[
            "__new__",
            "bind",
            "connect",
            "getaddrinfo",
            "gethostbyaddr",
            "gethostbyname",
            "gethostname",
            "getnameinfo",
            "getservbyname",
            "getservbyport",
            "sendmsg",
            "sendto",
            "sethostname",
        ],
    ),
    ("subprocess", &["Popen"]),
    (
        "sys",
        &[
            "_current_exceptions",
            "_current_frames",
            "_getframe",
            "_getframemodulename",
            "addaudithook",
            "monitoring.register_callback",
            "setprofile",
            "settrace",
            "set_asyncgen_hooks_finalizer",
            "set_asyncgen_hooks_firstiter",
            "unraisablehook",
            "excepthook",
        ],
    ),
    ("tempfile", &["mkdtemp", "mkstemp"]),
    ("webbrowser", &["open"]),
];

impl Modules {
    /// What is done about a name, which may end in `.*`: its own line decides, else the nearest
    /// one that covers it. Watched interpreters decide so too (`inside/import_hooks.py`).
    pub fn action(&self, name: &str) -> Action {
        let is_event = name == WRITE_OUTSIDE
            || name.split_once('.').is_some_and(|(module, rest)| {
                EVENTS.iter().any(|(known, _)| *known == module) && !LOADED.contains(&name) && !rest.is_empty()
            });
        let rule = |name: &str| self.rules.get(name).copied();
        let stem = name.strip_suffix(".*").unwrap_or(name);
        let mut above = stem.match_indices('.').rev().filter_map(|(end, _)| stem.get(..end));
        let nearest = above.find_map(|parent| rule(&format!("{parent}.*")).or_else(|| rule(parent).filter(|_| !is_event)));
        let rest = self.default.filter(|_| !is_event).unwrap_or(Action::Allow);
        rule(name).or(nearest).unwrap_or(rest)
    }
}

/// A name that can be met.
pub(crate) fn name(text: &str, action: Action) -> Checked<()> {
    if [DEFAULT, WRITE_OUTSIDE].contains(&text) {
        return Ok(());
    }
    if EVERYWHERE.contains(&text) {
        let diagnostic = Diagnostic::new(format!("the event `{text}` is raised wherever Python imports anything"), "of no use");
        return Err(diagnostic.help("name modules, an event such as \"os.system\", or \"write_outside\": files opened for writing there"));
    }
    if LOADED.contains(&text) && action > Action::Allow {
        let diagnostic = Diagnostic::new(format!("{} is loaded before any code, so no import of it is seen", quote(text)), "of no use");
        return Err(diagnostic.help("name an event of it, such as \"os.system\" or \"os.*\""));
    }
    let stem = text.strip_suffix(".*").unwrap_or(text);
    if let Some((module, event)) = text.split_once('.')
        && let Some((_, events)) = EVENTS.iter().find(|(known, _)| *known == module)
    {
        return match event == "*" || events.contains(&event) || LOADED.contains(&text) {
            true => Ok(()),
            false => Err(check::unknown(&format!("event of {module},"), event, events.iter().copied())),
        };
    }
    check::dotted("module or event", stem).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_line_decides() {
        let lines = [("socket.*", Action::Note), ("socket.connect", Action::Deny), ("json", Action::Allow), ("xml.etree.*", Action::Allow)];
        let modules = Modules { default: Some(Action::Deny), rules: lines.map(|(name, action)| (name.to_owned(), action)).into() };
        let of = |name| modules.action(name);
        assert_eq!(
            [of("socket.connect"), of("socket.bind"), of("socket"), of("os.system")],
            [Action::Deny, Action::Note, Action::Deny, Action::Allow]
        );
        assert_eq!(
            [of("json.decoder"), of("xml"), of("xml.etree.ElementTree"), of("write_outside")],
            [Action::Allow, Action::Deny, Action::Allow, Action::Allow]
        );
        assert_eq!([of("socket.*"), of("os.*")], [Action::Note, Action::Allow]);
    }

    #[test]
    fn what_can_be_met_is_taken_and_what_never_is_is_refused() {
        for text in
            ["default", "write_outside", "ctypes", "ctypes.util", "ctypes.dlopen", "os.system", "os.*", "socket", "socket.*", "a._b"]
        {
            assert!(name(text, Action::Deny).is_ok(), "{text}");
        }
        assert!(name("os", Action::Allow).is_ok());
        for text in ["os", "sys", "open", "exec", "os.sytem", "socket.conect", "a b", "", "*", "a.*.b", "1a", ".a", "a."] {
            assert!(name(text, Action::Note).is_err(), "{text}");
        }
    }
}
