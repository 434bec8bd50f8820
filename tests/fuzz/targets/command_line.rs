//! bubblewrap's command line, and the view that is planned of it.

use std::{
    collections::BTreeSet,
    path::{Component, Path, PathBuf},
    sync::OnceLock,
};

use stockade_bwrap::{Operation, Parsed, parse};
use stockade_policy::{
    facts::{Caller, CgroupFacts, HostFacts, PathKind},
    filter::Filters,
    load_shipped,
    model::Policy,
    plan::{HostScratch, Program, RootEntry, RunRequest, View, ViewEntry, plan},
};

use super::Target;

/// Paths of the host that a view may name; the policy shows the first three and what is below.
const HOST: [&str; 8] = ["/usr", "/usr/lib", "/etc/alternatives", "/etc", "/srv/w", "/srv/w/.git", "/root", "/home"];

pub const COMMAND_LINE: Target = Target {
    name: "bwrap",
    about: "options of bubblewrap, NUL between",
    corpus: include_str!("../corpus/bwrap"),
    seeds: || {
        let lines = [
            "--unshare-all --ro-bind / / --tmpfs /tmp --dir /tmp/x --chdir /tmp -- true",
            "--bind /srv/w /w --ro-bind /srv/w/.git /w/.git --tmpfs /w/t --symlink usr/bin /bin true",
            "--overlay-src /usr --overlay-src /etc/alternatives --tmp-overlay /o --dir /d --chmod 0700 /d true",
            "--args 3 --perms 0700 --file 4 /f --ro-bind-data 5 /usr --uid 7 --hostname h --clearenv --setenv A B true",
        ];
        lines.iter().map(|line| line.replace(' ', "\0").into_bytes()).collect()
    },
    words: &[
        b"--ro-bind\0",
        b"--bind\0",
        b"--tmpfs\0",
        b"--dir\0",
        b"--symlink\0",
        b"--file\0",
        b"--bind-data\0",
        b"--ro-bind-try\0",
        b"--args\0",
        b"--perms\0",
        b"--overlay-src\0",
        b"--tmp-overlay\0",
        b"--ro-overlay\0",
        b"--chmod\0",
        b"/usr\0",
        b"/etc\0",
        b"/srv/w\0",
        b"/root\0",
        b"/proc\0",
        b"/\0",
        b"/../",
        b"/dev/null\0",
        b"/run/stockade",
        b"true",
    ],
    longest: 2 << 10,
    run: |input| {
        static WORLD: OnceLock<Option<(Policy, Filters, HostFacts)>> = OnceLock::new();
        let Some((policy, filters, facts)) = WORLD.get_or_init(world) else { panic!("the shipped policy has filters") };
        let words =
            |bytes: &[u8]| bytes.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned()).collect::<Vec<_>>();
        let mut read = |fd: i32| if fd < 16 { Ok(vec![String::from("--dir"), format!("/{fd}")]) } else { Err(String::from("closed")) };
        let Ok(Parsed::Run(invocation)) = parse(words(input), &mut read) else { return };
        assert!(!invocation.command.is_empty() && invocation.uid != Some(0) && invocation.gid != Some(0), "code is never root");
        let entries: Vec<ViewEntry> = invocation.operations.iter().map(entry).collect();
        let trees = entries.iter().filter_map(|entry| match entry {
            ViewEntry::Tree { source, .. } => Some(HostScratch { path: source.clone(), owner: (1234, 1234), ..HostScratch::default() }),
            _ => None,
        });
        let run_request = RunRequest {
            program: Program::Command(invocation.command.clone()),
            writable_trees: trees.collect(),
            view: Some(View { entries, working_directories: vec![PathBuf::from("/")], ..View::default() }),
            ..RunRequest::default()
        };
        let Ok(planned) = plan(policy, filters, facts, &run_request) else { return };
        let shown = policy.filesystem.read_only.iter().chain(&policy.filesystem.read_only_optional);
        let shown: Vec<&PathBuf> = shown.collect();
        let mut links: Vec<&Path> = Vec::new();
        let mut made = BTreeSet::from([Path::new("")]);
        let mut is_base = true;
        for entry in &planned.root {
            match entry {
                RootEntry::Placed { source, .. } => {
                    assert!(shown.iter().any(|shown| source.starts_with(shown)), "{} is the policy's", source.display());
                }
                RootEntry::Overlay { layers, changes, .. } => {
                    let is_shown = |layer: &PathBuf| shown.iter().any(|shown| layer.starts_with(shown));
                    assert!(layers.iter().all(is_shown), "{layers:?} are the policy's");
                    assert!(changes.iter().flatten().all(|own| own.starts_with(".view")), "{changes:?} are the root's own");
                }
                RootEntry::Link { target, .. } if !target.starts_with("dev") => links.push(target),
                _ => {}
            }
            let Some(target) = target(entry) else { continue };
            if let RootEntry::Directory { .. } | RootEntry::Link { .. } | RootEntry::File { .. } | RootEntry::Contents { .. } = entry {
                assert!(made.insert(target), "{} is made once", target.display());
            }
            assert!(target.components().all(|part| matches!(part, Component::Normal(_))), "{} is plain", target.display());
            assert!(!links.iter().any(|link| target.starts_with(link) && target != *link), "{} is behind a link", target.display());
            is_base &= ["dev", "proc", "sys", "run"].iter().any(|base| target.starts_with(base));
            let ours = ["dev", "proc", "sys", "run/stockade"].iter().any(|ours| target.starts_with(ours));
            assert!(is_base || !ours, "{} is the sandbox's own", target.display());
        }
    },
};

/// Where something is made in the root's own file system, or laid.
fn target(entry: &RootEntry) -> Option<&Path> {
    match entry {
        RootEntry::Directory { target, .. }
        | RootEntry::Link { target, .. }
        | RootEntry::File { target, .. }
        | RootEntry::Placed { target, .. }
        | RootEntry::Tree { target, .. }
        | RootEntry::Tmpfs { target, .. }
        | RootEntry::Overlay { target, .. }
        | RootEntry::Contents { target, .. }
        | RootEntry::Laid { target, .. } => Some(target),
        _ => None,
    }
}

fn entry(operation: &Operation) -> ViewEntry {
    let path = PathBuf::from;
    match operation.clone() {
        Operation::ReadOnly { source, target, optional } => ViewEntry::Show { source: path(source), target: path(target), optional },
        Operation::Writable { source, target, .. } => ViewEntry::Tree { source: path(source), target: path(target) },
        Operation::Overlay { layers, target, writable } => {
            ViewEntry::Overlay { layers: layers.into_iter().map(path).collect(), target: path(target), writable }
        }
        Operation::Mode { target, mode } => ViewEntry::Mode { target: path(target), mode },
        Operation::Tmpfs { target, mode } => ViewEntry::Tmpfs { target: path(target), mode },
        Operation::Directory { target, mode } => ViewEntry::Directory { target: path(target), mode },
        Operation::Link { to, target } => ViewEntry::Link { target: path(target), to: path(to) },
        Operation::File { target, mode, .. } => ViewEntry::File { target: path(target), mode, bytes: Vec::new() },
        Operation::Data { target, mode, writable, .. } => ViewEntry::Data { target: path(target), mode, bytes: Vec::new(), writable },
    }
}

fn world() -> Option<(Policy, Filters, HostFacts)> {
    let policy = load_shipped("bwrap").ok()?;
    let filters = Filters::new(&policy.seccomp).ok()?;
    let facts = HostFacts {
        landlock_abi: 7,
        caller: Caller { uid: 1234, gid: 1234, groups: Vec::new() },
        cpus: 2,
        cgroup: CgroupFacts::Unavailable { reason: String::from("none") },
        paths: HOST.map(|path| (PathBuf::from(path), PathKind::Directory)).into(),
        links: vec![(String::from("bin"), String::from("usr/bin"))],
        ..HostFacts::default()
    };
    Some((policy, filters, facts))
}
