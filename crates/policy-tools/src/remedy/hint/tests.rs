//! Hints for a plan: which messages give one, its line, and what it does not reveal.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test may panic")]

use std::{collections::BTreeMap, path::PathBuf};

use stockade_policy::{
    facts::{CgroupFacts, HostFacts, PathKind},
    filter::Filters,
    load_shipped, load_text,
    plan::{HostScratch, Program, Protection, RunRequest},
};

use super::*;

fn derived(lines: &str) -> Policy {
    load_text(&format!("schema = 1\ndescription = \"x\"\nextends = \"default\"\n{lines}\n"))
        .unwrap_or_else(|error| panic!("{lines}: {error}"))
}

/// A plan in the host directory /srv/work, on a host that has these things beside the usual.
fn planned(policy: &Policy, more: &[&str]) -> Plan {
    let directories =
        ["/usr", "/etc/alternatives"].into_iter().chain(more.iter().copied()).map(|path| (PathBuf::from(path), PathKind::Directory));
    let facts = HostFacts {
        landlock_abi: 7,
        cpus: 2,
        cgroup: CgroupFacts::V1 { controllers: BTreeMap::new() },
        paths: directories.chain([(PathBuf::from("/usr/bin/python3"), PathKind::File)]).collect(),
        links: vec![(String::from("bin"), String::from("usr/bin"))],
        ..HostFacts::default()
    };
    let protected = vec![
        (PathBuf::from(".env"), PathKind::File, Protection::Hidden),
        (PathBuf::from(".git"), PathKind::Directory, Protection::ReadOnly),
        (PathBuf::from("socket"), PathKind::File, Protection::Hidden),
    ];
    let scratch = HostScratch { path: PathBuf::from("/srv/work"), owner: (1, 1), idmap_refusal: None, protected };
    let run_request = RunRequest {
        program: Program::Code { language: None, filename: None, stem: String::from("code") },
        scratch: Some(scratch),
        ..RunRequest::default()
    };
    stockade_policy::plan::plan(policy, &Filters::new(&policy.seccomp).unwrap(), &facts, &run_request).unwrap()
}

fn hints_of(stderr: &str, policy: &Policy) -> Vec<Denial> {
    hints(stderr.as_bytes(), &planned(policy, &[]), policy)
}

/// The line of one hint under a policy that keeps `.git`.
fn allowed(stderr: &str) -> Option<Option<String>> {
    let policy = derived("[scratch]\nread_only = { add = [\".git\"] }");
    let mut hints = hints_of(stderr, &policy);
    assert!(hints.len() <= 1 && hints.iter().all(|hint| hint.hint && hint.help.is_some()), "{hints:?}");
    hints.pop().map(|hint| hint.allow)
}

#[test]
fn a_path_gets_the_line_that_fits_where_it_lies() {
    let line = |text: &str| Some(Some(text.to_owned()));
    let shown = "[filesystem] read_only_optional = { add = [\"/data/x.csv\"] }";
    for (stderr, expected) in [
        ("FileNotFoundError: [Errno 2] No such file or directory: '/data/x.csv'", line(shown)),
        ("cat: /data/../data/./x.csv: No such file or directory", line(shown)),
        ("cat: ../../data/x.csv: No such file or directory", line(shown)),
        ("cat: /data/x: Permission denied", Some(None)),
        ("touch: cannot touch '/usr/x': Read-only file system", Some(None)),
        ("touch: cannot touch '/bin/x': Read-only file system", Some(None)),
        ("sh: 1: cannot create /x: Read-only file system", Some(None)),
        ("sh: 1: cannot create /etc/passwd: Permission denied", Some(None)),
        ("cat: /proc/kcore: Permission denied", Some(None)),
        ("cat: /dev/sda: No such file or directory", Some(None)),
        ("cat: .env: Permission denied", line("[scratch] hidden = { remove = [\".env*\"] }")),
        ("cat: /srv/work/.env: Permission denied", line("[scratch] hidden = { remove = [\".env*\"] }")),
        ("cat: socket: Permission denied", Some(None)),
        ("touch: cannot touch '.git/config': Read-only file system", line("[scratch] read_only = { remove = [\".git\"] }")),
        // Nothing that a policy could change.
        ("cat: data.csv: No such file or directory", None),
        ("cat: /usr/share/x: No such file or directory", None),
        ("cat: /tmp/x: No such file or directory", None),
        ("cat: /srv/work/x: Permission denied", None),
        ("cat: /srv: Is a directory", None),
    ] {
        assert_eq!(allowed(stderr), expected, "{stderr}");
    }
    let help = |path: &str| {
        let hint =
            hints_of(&format!("cat: {path}: No such file or directory"), &derived("")).pop().unwrap_or_else(|| panic!("{path}: no hint"));
        assert_eq!((hint.what.as_str(), hint.allow), (path, None));
        hint.help.unwrap()
    };
    for path in ["/etc/shadow", "/home/alice", "/run/docker.sock", "/home/alice/.ssh/id_rsa", "/root/x", "/dev/mem"] {
        assert!(help(path).contains("secrets") && help(path).contains("no line"), "{path}: {}", help(path));
    }
    assert_eq!(
        hints_of("cat: /dev/tty: No such file or directory", &derived("[filesystem]\ndevices = { remove = [\"tty\"] }"))[0]
            .allow
            .as_deref(),
        Some("[filesystem] devices = { add = [\"tty\"] }")
    );
    assert_eq!(
        hints_of("touch: cannot touch 'x': Read-only file system", &derived("[scratch]\naccess = \"ro\""))[0].allow.as_deref(),
        Some("[scratch] access = \"rw\"")
    );
}

#[test]
fn hidden_characters_are_escaped_and_the_line_still_means_the_path() {
    let policy = derived("");
    let path = "/data/\u{202e}vsc.x\u{2028}\u{200b}";
    let hint = hints_of(&format!("FileNotFoundError: [Errno 2] No such file or directory: '{path}'"), &policy).pop().unwrap();
    assert_eq!(hint.what, "/data/\\u{202e}vsc.x\\u{2028}\\u{200b}");
    let line = hint.allow.unwrap();
    assert!(line.is_ascii(), "{line}");
    let (section, rest) = line.split_once("] ").unwrap();
    let allowing = derived(&format!("{section}]\n{rest}"));
    assert!(allowing.filesystem.read_only_optional.contains(&PathBuf::from(path)), "{line}");
}

#[test]
fn the_hosts_paths_change_no_hint() {
    let policy = derived("");
    let stderr = b"cat: /data/x.csv: No such file or directory\ncat: /etc/pki/x: No such file or directory";
    let (without, with) = (planned(&policy, &[]), planned(&policy, &["/data", "/data/x.csv", "/etc/pki"]));
    assert_eq!(hints(stderr, &without, &policy), hints(stderr, &with, &policy));
}

#[test]
fn a_line_of_a_hint_loads_in_a_policy_that_extends_the_first() {
    let policy = derived("");
    for path in ["/data/x", "/data/it's", "/data/\"x\"", "/dätä/x", "/home/alice/.ssh/id", "/run/x", "/etc/shadow", "/proc/x/y", "/sys/x"]
    {
        let stderr = format!(
            "FileNotFoundError: [Errno 2] No such file or directory: {}",
            if path.contains('\'') { format!("\"{path}\"") } else { format!("'{path}'") }
        );
        for line in hints_of(&stderr, &policy).into_iter().filter_map(|hint| hint.allow) {
            let (section, rest) = line.split_once("] ").unwrap();
            let allowing = derived(&format!("{section}]\n{rest}"));
            assert!(crate::compare::compare(&policy, &allowing).more.iter().any(|more| more.items == [path]), "{line}");
        }
    }
}

#[test]
fn hints_for_modules_and_commands_fit_the_policy() {
    let help = |stderr: &str, policy: &Policy| hints_of(stderr, policy)[0].help.clone().unwrap();
    let pandas = "Traceback (most recent call last):\nModuleNotFoundError: No module named 'pandas'\n";
    let default = help(pandas, &load_shipped("default").unwrap());
    assert!(default.contains("`pypi`") && default.contains("`data-science`") && default.contains("--runtime python="), "{default}");
    let other = help("ModuleNotFoundError: No module named 'requests'", &load_shipped("default").unwrap());
    assert!(!other.contains("data-science"), "{other}");
    let pypi = help(pandas, &load_shipped("pypi").unwrap());
    assert!(pypi.contains("can be reached") && !pypi.contains("`pypi`"), "{pypi}");
    // The names `python` and `--runtime` would lead out of the second wall.
    let (plan, pyodide) = (planned(&derived(""), &[]), load_shipped("pyodide").unwrap());
    for stderr in [pandas, "ERROR: No matching distribution found for requests"] {
        let help = hints(stderr.as_bytes(), &plan, &pyodide)[0].help.clone().unwrap();
        assert!(help.contains("prepare-pyodide --wheels") && !help.contains("--runtime") && !help.contains("`pypi`"), "{help}");
    }
    assert!(help("bash: line 1: ruby: command not found", &derived("")).contains("/usr/local/bin:/usr/bin:/bin"));
    assert!(!help("bash: line 1: ruby: command not found", &derived("")).contains("is there"));
    assert!(help("bash: line 1: python3.9: command not found", &derived("")).contains("`python` is there"));
}

#[test]
fn a_program_that_python_could_not_start_is_a_command_and_a_file_is_none() {
    let error = "FileNotFoundError: [Errno 2] No such file or directory: 'ruby'";
    let started =
        format!("  File \"/usr/lib/python3.11/subprocess.py\", line 1901, in _execute_child\n    raise child_exception_type(\n{error}");
    let kinds = |stderr: &str| hints_of(stderr, &derived("")).into_iter().map(|hint| (hint.kind, hint.what)).collect::<Vec<_>>();
    assert_eq!(kinds(&started), [("command", String::from("ruby"))]);
    // The control: a file that was to be opened.
    assert_eq!(kinds(error), []);
    assert_eq!(kinds(&started.replace("'ruby'", "'/data/ruby'")), [("path", String::from("/data/ruby"))]);
}

#[test]
fn a_missing_network_is_told_where_there_is_none() {
    for stderr in ["socket.gaierror: [Errno -3] Temporary failure in name resolution", "ERROR: No matching distribution found for requests"]
    {
        let hint = hints_of(stderr, &load_shipped("default").unwrap()).pop().unwrap();
        assert_eq!((hint.kind, hint.rule.as_str(), &hint.allow), ("network", "[egress] whitelist", &None), "{stderr}");
        assert!(hint.help.unwrap().contains("policy `default` has no network"), "{stderr}");
        // Under a whitelist the gate says what was refused.
        assert_eq!(hints_of(stderr, &load_shipped("pypi").unwrap()), [], "{stderr}");
    }
    let data = hints_of("FileNotFoundError: [Errno 2] No such file or directory: '/mnt/data/sales.csv'", &derived(""));
    assert!(data[0].help.as_ref().unwrap().contains("working directory") && data[0].allow.is_none(), "{data:?}");
}

#[test]
fn a_limit_gives_a_hint_only_if_it_is_set_and_the_kernel_counts_nothing() {
    let keys = |stderr: &str, policy: &Policy| {
        hints_of(stderr, policy).into_iter().filter_map(|hint| hint.limit).map(|limit| limit.key).collect::<Vec<_>>()
    };
    assert_eq!(keys("MemoryError", &derived("")), [""; 0]);
    assert_eq!(keys("MemoryError", &load_shipped("blueprint").unwrap()), ["address_space"]);
    assert_eq!(keys("OSError: [Errno 24] Too many open files: '/x'", &derived("")), ["open_files"]);
    assert_eq!(keys("OSError: [Errno 27] File too large", &derived("")), ["file_size"]);
}

#[test]
fn hints_are_bounded_for_any_stderr() {
    let policy = derived("");
    let many: String = (0..100_000).map(|number| format!("cat: /data/{number}: No such file or directory\n")).collect();
    let found = hints_of(&many, &policy);
    assert_eq!(found.len(), MAX_HINTS);
    // Only the end is read.
    assert!(found[0].what.strip_prefix("/data/").unwrap().parse::<u32>().unwrap() > 99_000, "{}", found[0].what);
    let same = "cat: /data/x: No such file or directory\n".repeat(50);
    assert_eq!((hints_of(&same, &policy).len(), hints_of(&same, &policy)[0].count), (1, 50));
    for hostile in [&b"'"[..], b"cat: '", b"\xff\xfe: Permission denied", b": not found", b"/: No such file or directory", b"\"\"ENOENT"] {
        let _none = hints(&hostile.repeat(10_000), &planned(&policy, &[]), &policy);
    }
}
