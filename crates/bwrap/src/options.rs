//! The options that stand for what every sandbox has, and those that are refused, each with what to
//! do.
//!
//! Options with an effect of their own are in the parser.

/// What an option of these tables is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlagKind {
    /// Every sandbox has what it asks for; so many arguments follow.
    Inherent(usize),
    /// Refused: its name, and why.
    Refused(&'static str, &'static str),
}

/// Options for what every sandbox has, and how many arguments each takes.
pub const INHERENT: &[(&str, usize)] = &[
    ("--unshare-all", 0),
    ("--unshare-user", 0),
    ("--unshare-user-try", 0),
    ("--unshare-ipc", 0),
    ("--unshare-pid", 0),
    ("--unshare-net", 0),
    ("--unshare-uts", 0),
    ("--unshare-cgroup", 0),
    ("--unshare-cgroup-try", 0),
    ("--disable-userns", 0),
    ("--assert-userns-disabled", 0),
    ("--new-session", 0),
    ("--cap-drop", 1),
    ("--proc", 1),
    ("--dev", 1),
    ("--remount-ro", 1),
    // The launcher keeps what it has open until the sandbox has ended.
    ("--sync-fd", 1),
];

/// Refused options, and what to do instead.
pub const REFUSED: &[(&str, &str)] = &[
    (
        "--share-net",
        "code has no network of the host's; for single peers use `stockade run --allow HOST:PORT`, or a policy with [egress] whitelist",
    ),
    ("--userns", "the sandbox makes its own user namespaces; leave it out"),
    ("--userns2", "the sandbox makes its own user namespaces; leave it out"),
    ("--pidns", "the sandbox makes its own PID namespace; leave it out"),
    ("--userns-block-fd", "the sandbox writes its own id maps; leave it out, or use --block-fd to hold the start"),
    ("--cap-add", "code has no capability, not even in a namespace of its own; leave it out"),
    ("--as-pid-1", "pid 1 is stockade's own, which reaps and reports; leave it out"),
    ("--exec-label", "no SELinux label is set; leave it out"),
    ("--file-label", "no SELinux label is set; leave it out"),
    ("--mqueue", "message queues are memory that no limit counts; leave it out"),
    ("--lock-file", "code could wait for the lock's owner outside; lock the file before, in the caller"),
    ("--bind-fd", "a directory is judged by its path; write --bind PATH DEST"),
    ("--ro-bind-fd", "a directory is judged by its path; write --ro-bind PATH DEST"),
    ("--size", "the policy's tmp_size bounds all that code writes to memory; leave it out"),
    (
        "--overlay",
        "what it leaves in a directory of the host, whiteouts among it, only another overlay can read; write --tmp-overlay, or --bind a copy",
    ),
    ("--argv0", "the program's name is its path; start it by `exec -a` of a shell"),
    ("--level-prefix", "messages have no level; leave it out"),
];

/// What an option is; none: it has an effect of its own, or there is none.
pub(crate) fn kind(flag: &str) -> Option<FlagKind> {
    let inherent = INHERENT.iter().find(|(name, _)| *name == flag).map(|(_, count)| FlagKind::Inherent(*count));
    inherent.or_else(|| REFUSED.iter().find(|(name, _)| *name == flag).map(|(name, why)| FlagKind::Refused(name, why)))
}
