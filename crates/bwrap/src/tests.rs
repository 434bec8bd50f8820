//! The command lines of callers, and every option there is.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use super::{options::INHERENT, *};

fn parsed(line: &str) -> Result<Parsed, ParseError> {
    parse(line.split(' ').map(str::to_owned).collect(), &mut |_| Err(String::from("closed")))
}

fn invocation(line: &str) -> Invocation {
    match parsed(line).unwrap() {
        Parsed::Run(invocation) => *invocation,
        other => panic!("{other:?}"),
    }
}

fn refusal(line: &str) -> String {
    parsed(line).unwrap_err().to_string()
}

/// Options that have an effect of their own: arms of the parser.
const TAKEN: &[&str] = &[
    "--help",
    "--version",
    "--args",
    "--bind",
    "--bind-try",
    "--ro-bind",
    "--ro-bind-try",
    "--dev-bind",
    "--dev-bind-try",
    "--overlay-src",
    "--tmp-overlay",
    "--ro-overlay",
    "--tmpfs",
    "--dir",
    "--symlink",
    "--file",
    "--bind-data",
    "--ro-bind-data",
    "--perms",
    "--chmod",
    "--chdir",
    "--setenv",
    "--unsetenv",
    "--clearenv",
    "--uid",
    "--gid",
    "--hostname",
    "--seccomp",
    "--add-seccomp-fd",
    "--block-fd",
    "--info-fd",
    "--json-status-fd",
    "--die-with-parent",
];

#[test]
fn the_command_line_of_llm_sandbox_is_taken() {
    let line = "--unshare-all --unshare-user --die-with-parent --new-session --disable-userns --cap-drop ALL --clearenv \
                --ro-bind /usr /usr --ro-bind /usr/bin /bin --proc /proc --dev /dev --bind /tmp/x/tmp /tmp --bind /tmp/x/w /workspace \
                --chdir /workspace --setenv HOME /workspace --seccomp 7 -- /bin/sh -c true";
    let seen = invocation(line);
    assert_eq!((seen.command.len(), seen.filters, seen.ends_with_parent, seen.clears_environment), (3, vec![7], true, true));
    assert_eq!(seen.operations.len(), 4);
    assert_eq!(seen.environment, [(String::from("HOME"), Some(String::from("/workspace")))]);
}

#[test]
fn operations_keep_their_order() {
    let seen = invocation("--tmpfs /a --perms 0700 --dir /a/b --symlink b /a/c --ro-bind-try /x /a/b sh");
    let operations = [
        Operation::Tmpfs { target: "/a".into(), mode: 0o755 },
        Operation::Directory { target: "/a/b".into(), mode: 0o700 },
        Operation::Link { to: "b".into(), target: "/a/c".into() },
        Operation::ReadOnly { source: "/x".into(), target: "/a/b".into(), optional: true },
    ];
    assert_eq!(seen.operations, operations);
    let seen = invocation("--overlay-src /a --overlay-src /b --ro-overlay /x --overlay-src /c --tmp-overlay /y --chmod 0700 /x id");
    let operations = [
        Operation::Overlay { layers: vec!["/a".into(), "/b".into()], target: "/x".into(), writable: false },
        Operation::Overlay { layers: vec!["/c".into()], target: "/y".into(), writable: true },
        Operation::Mode { target: "/x".into(), mode: 0o700 },
    ];
    assert_eq!(seen.operations, operations);
}

#[test]
fn words_of_a_descriptor_stand_where_it_is_named() {
    let words = ["--dir", "/a", "--args", "5", "--dir", "/c", "sh"].map(String::from).to_vec();
    let mut read = |fd| if fd == 5 { Ok(vec![String::from("--dir"), String::from("/b")]) } else { Err(String::new()) };
    let Parsed::Run(seen) = parse(words, &mut read).unwrap() else { panic!() };
    let targets: Vec<_> = seen.operations.iter().map(|operation| format!("{operation:?}")).collect();
    assert!(targets[0].contains("/a") && targets[1].contains("/b") && targets[2].contains("/c"), "{targets:?}");
    assert!(refusal("--args 9 sh").contains("--args 9: closed"));
    let many = |_| Ok(vec![String::from("--new-session"); MAX_WORDS]);
    assert_eq!(parse(vec!["--args".into(), "1".into(), "sh".into()], &mut { many }), Err(ParseError::TooManyWords));
}

#[test]
fn each_refused_option_says_what_to_do() {
    for (flag, why) in REFUSED {
        let said = refusal(&format!("{flag} 3 x"));
        assert!(said.starts_with(&format!("{flag} is not taken: ")) && said.ends_with(why), "{said}");
    }
    assert!(refusal("--uid 0 id").contains("never root"));
    assert!(refusal("--gid 0 id").contains("never root"));
    assert!(refusal("--bind / / id").contains("never writable"));
    assert!(refusal("--dev-bind /dev /dev id").contains("no devices of the host"));
    assert!(refusal("--bind /proc /proc id").contains("--proc /proc"));
    assert!(refusal("--perms 4755 --dir /x id").contains("set-ID"));
}

#[test]
fn what_every_sandbox_has_is_taken_without_effect() {
    for (flag, count) in INHERENT {
        let argument = match *flag {
            "--proc" => " /proc",
            "--dev" => " /dev",
            "--remount-ro" => " /",
            _ if *count == 1 => " ALL",
            _ => "",
        };
        let seen = invocation(&format!("{flag}{argument} true"));
        assert_eq!(seen, Invocation { command: vec![String::from("true")], ..Invocation::default() }, "{flag}");
    }
    assert!(refusal("--proc /elsewhere true").contains("/proc alone"));
}

#[test]
fn malformed_lines_are_refused() {
    for (line, words) in [
        ("--tmpfs", "--tmpfs takes 1 argument, and 0 follow"),
        ("--ro-bind /usr", "--ro-bind takes 2 arguments, and 1 follow"),
        ("--frobnicate x", "unknown option --frobnicate"),
        ("--new-session", "no command"),
        ("--new-session --", "no command"),
        ("--uid -1 id", "a number above 0"),
        ("--seccomp x id", "open descriptor"),
        ("--setenv A=B c id", "no `=`"),
        ("--perms 9 --dir /x id", "octal"),
        ("--perms 0700 --bind /x /y id", "must be --dir"),
        ("--perms 0700 id", "must be --dir"),
        ("--perms 0700 --overlay-src /a --tmp-overlay /x id", "must be --dir"),
        ("--overlay-src /a id", "must be --overlay-src, --tmp-overlay"),
        ("--overlay-src /a --dir /x id", "must be --overlay-src, --tmp-overlay"),
        ("--tmp-overlay /x id", "by --overlay-src before it"),
        ("--overlay-src /a --ro-overlay /x id", "two directories or more"),
        ("--chmod 4755 /x id", "set-ID"),
        ("--hostname a_b id", "letters"),
        ("--block-fd 5 --info-fd 6 id", "has no pid before"),
        ("--json-status-fd 6 --block-fd 5 id", "has no pid before"),
    ] {
        assert!(refusal(line).contains(words), "{line}: {}", refusal(line));
    }
    assert_eq!(invocation("-- --tmpfs x").command, ["--tmpfs", "x"]);
}

#[test]
fn the_whole_help_of_bubblewrap_is_known() {
    // `bwrap --help` of 0.8.0 and 0.11.0, option by option.
    let known = "--help --version --args --argv0 --level-prefix --unshare-all --share-net --unshare-user --unshare-user-try \
        --unshare-ipc --unshare-pid --unshare-net --unshare-uts --unshare-cgroup --unshare-cgroup-try --userns --userns2 \
        --disable-userns --assert-userns-disabled --pidns --uid --gid --hostname --chdir --clearenv --setenv --unsetenv \
        --lock-file --sync-fd --bind --bind-try --dev-bind --dev-bind-try --ro-bind --ro-bind-try --bind-fd --ro-bind-fd \
        --remount-ro --overlay-src --overlay --tmp-overlay --ro-overlay --exec-label --file-label --proc --dev --tmpfs --mqueue \
        --dir --file --bind-data --ro-bind-data --symlink --seccomp --add-seccomp-fd --block-fd --userns-block-fd --info-fd \
        --json-status-fd --new-session --die-with-parent --as-pid-1 --cap-add --cap-drop --perms --size --chmod";
    for flag in known.split_ascii_whitespace() {
        assert!(options::kind(flag).is_some() || TAKEN.contains(&flag), "{flag}");
    }
}
