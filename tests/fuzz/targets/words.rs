//! The words of a program that failed, which are read for hints.

use std::{path::PathBuf, sync::OnceLock};

use stockade_policy::{
    facts::{CgroupFacts, HostFacts, PathKind},
    filter::Filters,
    load_shipped, load_text,
    model::Policy,
    plan::{HostScratch, Plan, Program, Protection, RunRequest, plan},
};
use stockade_policy_tools::remedy::{MAX_HINTS, hints};

use super::Target;

pub const HINTS: Target = Target {
    name: "hints",
    about: "stderr of a program that failed",
    corpus: include_str!("../corpus/hints"),
    seeds: || {
        let texts = [
            "Traceback (most recent call last):\n  File \"/scratch/a.py\", line 1, in <module>\nFileNotFoundError: [Errno 2] No such file or directory: '/data/x.csv'\n",
            "PermissionError: [Errno 13] Permission denied: '.env'\ncat: .env: Permission denied\n",
            "touch: cannot touch '/usr/x': Read-only file system\n/tmp/a.sh: 1: cannot create /usr/x: Read-only file system\n",
            "ModuleNotFoundError: No module named 'pandas'\nError: Cannot find module 'lodash'\n",
            "/scratch/a.sh: line 1: ruby: command not found\n/usr/bin/env: ‘ruby’: No such file or directory\n",
            "MemoryError\nOSError: [Errno 24] Too many open files: '/x'\nOSError: [Errno 27] File too large\n",
        ];
        texts.iter().map(|text| text.as_bytes().to_vec()).collect()
    },
    words: &[
        b"No such file or directory",
        b"Permission denied",
        b"Read-only file system",
        b": not found",
        b": command not found",
        b"ENOENT",
        b"'/",
        b"../",
        b"/dev/tty",
        b"/proc/kcore",
        b"/srv/work/.git/",
        b"\n",
        "‘’".as_bytes(),
    ],
    longest: 4 << 10,
    run: |input| {
        static WORLD: OnceLock<Option<(Policy, Plan)>> = OnceLock::new();
        let Some((policy, plan)) = WORLD.get_or_init(world) else { panic!("the shipped policy has a plan") };
        let found = hints(input, plan, policy);
        assert!(found.len() <= MAX_HINTS, "hints are bounded");
        for hint in &found {
            assert!(hint.hint && hint.help.is_some() && hint.limit.is_some() == (hint.kind == "limit"), "it is marked as what it is");
            assert!(hint.what.len() <= 4096 && !hint.what.contains(char::is_control), "what is repeated is short and plain");
        }
        // Loading takes long, so that one line of a few inputs is loaded.
        if let Some(line) = found.iter().find_map(|hint| hint.allow.as_deref()).filter(|_| input.len().is_multiple_of(16)) {
            let (section, rest) = line.split_once("] ").unwrap_or_default();
            let text = format!("schema = 1\ndescription = \"x\"\nextends = \"default\"\n{section}]\n{rest}\n");
            assert!(load_text(&text).is_ok(), "{line}");
        }
    },
};

/// A run of `default` in a host scratch with a hidden and a protected part.
fn world() -> Option<(Policy, Plan)> {
    let policy = load_shipped("default").ok()?;
    let directory = |path: &str| (PathBuf::from(path), PathKind::Directory);
    let facts = HostFacts {
        landlock_abi: 7,
        cpus: 2,
        cgroup: CgroupFacts::Unavailable { reason: String::from("not delegated") },
        paths: [directory("/usr"), directory("/etc/alternatives"), (PathBuf::from("/usr/bin/python3"), PathKind::File)].into(),
        links: vec![(String::from("bin"), String::from("usr/bin"))],
        ..HostFacts::default()
    };
    let protected = vec![
        (PathBuf::from(".env"), PathKind::File, Protection::Hidden),
        (PathBuf::from(".git"), PathKind::Directory, Protection::ReadOnly),
    ];
    let scratch = HostScratch { path: PathBuf::from("/srv/work"), owner: (1, 1), idmap_refusal: None, protected };
    let program = Program::Code { language: None, filename: None, stem: String::from("code") };
    let narrowing = RunRequest { program, scratch: Some(scratch), ..RunRequest::default() };
    let plan = plan(&policy, &Filters::new(&policy.seccomp).ok()?, &facts, &narrowing).ok()?;
    Some((policy, plan))
}
