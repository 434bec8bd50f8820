//! A view, policy and host facts, to the root that is built: what is shown of the host, in which order,
//! and what is refused.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test may panic")]

use std::path::{Path, PathBuf};

use stockade_policy::{
    facts::{Caller, CgroupFacts, HostFacts, PathKind},
    filter::Filters,
    load_shipped,
    model::Degradable,
    plan::{HostScratch, HostSocket, Plan, PlanError, Program, Protection, RootEntry, RunRequest, View, ViewEntry, plan},
};
use stockade_protocol::landlock::access;

fn facts() -> HostFacts {
    let directories = [
        "/usr",
        "/usr/lib",
        "/usr/share",
        "/etc/alternatives",
        "/etc/ssl/certs",
        "/srv/w",
        "/srv/w/.git",
        "/srv/w/.git/hooks",
        "/tmp/full",
    ];
    let paths = directories.map(|path| (PathBuf::from(path), PathKind::Directory));
    let files = ["/etc/ld.so.cache", "/dev/null"].map(|path| (PathBuf::from(path), PathKind::File));
    HostFacts {
        landlock_abi: 7,
        caller: Caller { uid: 1234, gid: 1234, groups: vec![1234] },
        cpus: 4,
        cgroup: CgroupFacts::Unavailable { reason: String::from("not delegated") },
        paths: paths.into_iter().chain(files).collect(),
        led: [("/lib", "/usr/lib")].map(|(path, real)| (PathBuf::from(path), PathBuf::from(real))).into(),
        empty: [PathBuf::from("/tmp/empty")].into(),
        links: vec![(String::from("bin"), String::from("usr/bin")), (String::from("lib"), String::from("usr/lib"))],
        ..HostFacts::default()
    }
}

fn show(source: &str, target: &str) -> ViewEntry {
    ViewEntry::Show { source: PathBuf::from(source), target: PathBuf::from(target), optional: false }
}

fn tmpfs(target: &str) -> ViewEntry {
    ViewEntry::Tmpfs { target: PathBuf::from(target), mode: 0o755 }
}

fn tree(source: &str, target: &str) -> ViewEntry {
    ViewEntry::Tree { source: PathBuf::from(source), target: PathBuf::from(target) }
}

fn socket(source: &str, target: &str) -> ViewEntry {
    ViewEntry::Socket { source: PathBuf::from(source), target: PathBuf::from(target) }
}

fn directory(target: &str) -> ViewEntry {
    ViewEntry::Directory { target: PathBuf::from(target), mode: 0o755 }
}

fn overlay(layers: &[&str], target: &str, writable: bool) -> ViewEntry {
    ViewEntry::Overlay { layers: layers.iter().map(PathBuf::from).collect(), target: PathBuf::from(target), writable }
}

fn planned(entries: &[ViewEntry]) -> Result<Plan, PlanError> {
    planned_with(entries, &[])
}

/// With what the policy protects in each writable directory.
fn planned_with(entries: &[ViewEntry], protected: &[(&str, PathKind, Protection)]) -> Result<Plan, PlanError> {
    let policy = load_shipped("bwrap").unwrap();
    let protected: Vec<_> = protected.iter().map(|(path, kind, how)| (PathBuf::from(path), *kind, *how)).collect();
    let trees = entries.iter().filter_map(|entry| match entry {
        ViewEntry::Tree { source, .. } => {
            Some(HostScratch { path: source.clone(), owner: (1234, 1234), protected: protected.clone(), ..HostScratch::default() })
        }
        _ => None,
    });
    let sockets = entries.iter().filter_map(|entry| match entry {
        ViewEntry::Socket { source, .. } => Some(HostSocket { path: source.clone(), idmap_refusal: None }),
        _ => None,
    });
    let run_request = RunRequest {
        program: Program::Command(vec![String::from("true")]),
        writable_trees: trees.collect(),
        sockets: sockets.collect(),
        view: Some(View { entries: entries.to_vec(), working_directories: vec![PathBuf::from("/")], ..View::default() }),
        ..RunRequest::default()
    };
    plan(&policy, &Filters::new(&policy.seccomp).unwrap(), &facts(), &run_request)
}

/// What is laid where, beside what every view has.
fn laid(plan: &Plan) -> Vec<String> {
    let entries = plan.root.iter().filter_map(|entry| match entry {
        RootEntry::Placed { source, target, executable } => {
            Some(format!("{} at {}{}", source.display(), target.display(), if *executable { "" } else { " noexec" }))
        }
        RootEntry::Tree { index, target } => Some(format!("tree {index} at {}", target.display())),
        RootEntry::Tmpfs { from, target, writable } => {
            Some(format!("{} at {}{}", from.display(), target.display(), if *writable { "" } else { " read-only" }))
        }
        RootEntry::Socket { index, source, target } => Some(format!("socket {index}, {}, at {}", source.display(), target.display())),
        RootEntry::Overlay { layers, changes, target, executable } => {
            let layers: Vec<_> = layers.iter().rev().map(|layer| layer.to_str().unwrap()).collect();
            let writable = changes.as_ref().map(|[upper, work]| format!(" {} {}", upper.display(), work.display())).unwrap_or_default();
            Some(format!("{} at {}{writable}{}", layers.join(" over "), target.display(), if *executable { "" } else { " noexec" }))
        }
        RootEntry::Link { target, to } if !target.starts_with("dev") => Some(format!("{} -> {}", target.display(), to.display())),
        _ => None,
    });
    entries.collect()
}

#[track_caller]
fn refused(entries: &[ViewEntry], reason: &str) {
    let error = planned(entries).expect_err("it was planned");
    assert_eq!((error.reason(), error.is_the_callers_fault()), (reason, true), "{error}");
}

#[test]
fn of_the_whole_host_the_policys_parts_are_shown() {
    let plan = planned(&[show("/", "/"), tmpfs("/tmp")]).unwrap();
    let parts = [
        "bin -> usr/bin",
        "lib -> usr/lib",
        "/usr at usr",
        "/etc/alternatives at etc/alternatives noexec",
        "/etc/ld.so.cache at etc/ld.so.cache noexec",
        "/etc/ssl/certs at etc/ssl/certs noexec",
        "tmp at tmp",
    ];
    assert_eq!(laid(&plan), parts);
    let has = |path: &str| plan.root.iter().any(|entry| matches!(entry, RootEntry::File { target, .. } if target == Path::new(path)));
    assert!(has("etc/passwd") && has("etc/hosts") && !has("etc/shadow"));
    assert_eq!(laid(&planned(&[show("/etc", "/else")]).unwrap()).len(), 3);
}

#[test]
fn a_path_is_shown_where_its_links_lead_if_the_policy_shows_that() {
    assert_eq!(laid(&planned(&[show("/usr/lib", "/lib"), show("/usr/share", "/a/b")]).unwrap()), ["/usr/lib at lib", "/usr/share at a/b"]);
    for path in ["/root", "/etc/shadow", "/home/x", "/var", "/sys", "/usrx"] {
        refused(&[show(path, "/x")], "view_not_shown");
        let optional = ViewEntry::Show { source: PathBuf::from(path), target: PathBuf::from("/x"), optional: true };
        assert!(laid(&planned(&[optional]).unwrap()).is_empty());
    }
    refused(&[show("/usr/missing", "/x")], "view_source_missing");
}

#[test]
fn an_overlay_is_made_of_what_the_policy_shows() {
    let both = [overlay(&["/usr/lib", "/usr/share"], "/o", true), tmpfs("/o/x"), overlay(&["/usr/lib", "/etc/ssl/certs"], "/p/q", false)];
    let plan = planned(&both).unwrap();
    let wanted =
        ["/usr/share over /usr/lib at o .view/0/upper .view/0/work", ".view/1 at o/x", "/etc/ssl/certs over /usr/lib at p/q noexec"];
    assert_eq!(laid(&plan), wanted);
    let (writable, required) = (plan.writable_mounts(), plan.required_mounts());
    let has = |all: &[PathBuf], path: &str| all.contains(&PathBuf::from(path));
    assert!(has(&writable, "/o") && !has(&writable, "/p/q") && has(&required, "/o") && has(&required, "/p/q"));
    let rights = |path: &str| plan.landlock.rules.iter().find(|rule| rule.path == Path::new(path)).unwrap().rights;
    assert_eq!(rights("/o"), rights("/o/x"));
    assert_eq!(rights("/p/q"), plan.landlock.rules.iter().find(|rule| rule.path == Path::new("/sys")).unwrap().rights);
    // What is covered has no rule any more.
    let covered = planned(&[overlay(&["/usr/lib"], "/o/p", true), tmpfs("/o")]).unwrap();
    assert!(covered.landlock.rules.iter().all(|rule| rule.path != Path::new("/o/p")));
    for (layers, reason) in [
        (&["/etc"][..], "view_not_shown"),
        (&["/usr/share", "/home"], "view_not_shown"),
        (&["/usr/missing"], "view_source_missing"),
        (&["/etc/ld.so.cache"], "view_layer_unusable"),
        (&["/usr/share", "/usr"], "view_layer_unusable"),
        (&["/usr/lib", "/usr/lib"], "view_layer_unusable"),
        (&["usr"], "view_path_malformed"),
    ] {
        refused(&[overlay(layers, "/o", true)], reason);
    }
    refused(&[overlay(&["/usr/missing"; 10], "/o", true)], "view_source_missing");
    refused(&[overlay(&["/usr/missing"; 11], "/o", true)], "view_layer_unusable");
    refused(&[overlay(&["/usr"], "/", true)], "view_over_sandbox");
    refused(&[overlay(&["/usr"], "/run", false)], "view_over_sandbox");
    refused(&[overlay(&["/usr"], "/o", true), directory("/o/new")], "view_on_host");
}

#[test]
fn nothing_is_a_layer_where_the_hosts_mounts_do_not_lock_what_they_hide() {
    let mut policy = load_shipped("bwrap").unwrap();
    policy.degrade.root.extend([Degradable::UserNamespace, Degradable::Cgroup]);
    let filters = Filters::new(&policy.seccomp).unwrap();
    let view = View { entries: vec![overlay(&["/usr"], "/o", true)], working_directories: vec![PathBuf::from("/")], ..View::default() };
    let run_request = RunRequest { program: Program::Command(vec![String::from("true")]), view: Some(view), ..RunRequest::default() };
    let refusal = |user_namespace_refusal: Option<String>| {
        let facts = HostFacts { privileged: true, unique_id: Some(0x7000_0000), user_namespace_refusal, ..facts() };
        plan(&policy, &filters, &facts, &run_request).err().map(|error| error.reason())
    };
    assert_eq!(refusal(Some(String::from("forbidden"))), Some("view_layer_unusable"));
    assert_eq!(refusal(None), None, "the control");
}

#[test]
fn permission_bits_change_for_what_operations_have_made_alone() {
    let mode = |target: &str| ViewEntry::Mode { target: PathBuf::from(target), mode: 0o700 };
    let file = ViewEntry::File { target: PathBuf::from("/t/f"), mode: 0o644, bytes: Vec::new() };
    let plan = planned(&[directory("/t"), tmpfs("/t"), file, directory("/d/e"), mode("/t"), mode("/t/f"), mode("/d/e")]).unwrap();
    let changed = plan.root.iter().filter_map(|entry| match entry {
        RootEntry::Directory { target, mode: 0o700 } | RootEntry::Contents { target, mode: 0o700, .. } => Some(target.to_str().unwrap()),
        _ => None,
    });
    assert_eq!(changed.collect::<Vec<_>>(), [".view/0", ".view/0/f", "d/e"]);
    for entries in [[show("/usr", "/x"), mode("/x")], [tree("/srv/w", "/w"), mode("/w")], [directory("/t"), mode("/u")]] {
        refused(&entries, "view_not_made");
    }
}

#[test]
fn nothing_is_made_below_what_is_the_hosts() {
    for entries in [
        [show("/usr", "/usr"), directory("/usr/new")],
        [tree("/srv/w", "/w"), directory("/w/new")],
        [tree("/srv/w", "/w"), ViewEntry::Link { target: PathBuf::from("/w/l"), to: PathBuf::from("x") }],
        [show("/", "/"), ViewEntry::File { target: PathBuf::from("/usr/f"), mode: 0o644, bytes: Vec::new() }],
    ] {
        refused(&entries, "view_on_host");
    }
    // Above a directory of the host is a new one that may be written.
    let plan = planned(&[tree("/srv/w", "/w"), tmpfs("/w/t"), directory("/w/t/d"), show("/usr/share", "/w/t/s")]).unwrap();
    assert_eq!(laid(&plan), ["tree 0 at w", ".view/0 at w/t", "/usr/share at w/t/s"]);
    let made = |path: &str| plan.root.iter().any(|entry| matches!(entry, RootEntry::Directory { target, .. } if target == Path::new(path)));
    assert!(made(".view/0/d") && made(".view/0/s") && !made("w/t"), "{:?}", plan.root);
}

#[test]
fn later_operations_cover_earlier_ones_and_their_rules() {
    let plan = planned(&[tmpfs("/t"), show("/usr/share", "/t/s"), tmpfs("/t")]).unwrap();
    assert_eq!(laid(&plan), ["t at t", "/usr/share at t/s", ".view/0 at t"]);
    assert!(!plan.landlock.rules.iter().any(|rule| rule.path == Path::new("/t/s")), "{:?}", plan.landlock.rules);
}

#[test]
fn the_sandboxs_own_directories_are_out_of_reach() {
    for target in ["/proc", "/proc/sys", "/dev", "/dev/shm", "/sys/kernel", "/run/stockade/bin", "/.view", "/.view/0"] {
        refused(&[tmpfs(target)], "view_over_sandbox");
    }
    for entry in [show("/usr", "/run"), tree("/srv/w", "/run"), tmpfs("/"), show("/usr", "/"), tree("/srv/w", "/")] {
        refused(&[entry], "view_over_sandbox");
    }
    refused(&[ViewEntry::Link { target: PathBuf::from("/.view"), to: PathBuf::from("/run/user/1234") }], "view_over_sandbox");
    refused(&[show("/usr", "/a/../proc")], "view_path_malformed");
    refused(&[tmpfs("relative")], "view_path_malformed");
}

#[test]
fn no_operation_goes_through_a_link_of_the_view() {
    let link = ViewEntry::Link { target: PathBuf::from("/l"), to: PathBuf::from("/etc") };
    for entry in [directory("/l/x"), tmpfs("/l/x"), show("/usr", "/l/x"), show("/usr", "/l"), tree("/srv/w", "/l/x")] {
        refused(&[link.clone(), entry], "view_through_link");
    }
}

#[test]
fn no_path_of_a_view_is_so_deep_that_planning_takes_long() {
    let deep = |names: usize| "/d".repeat(names);
    planned(&[tmpfs(&deep(100)), tree("/srv/w", &format!("{}/e", deep(99)))]).unwrap();
    refused(&[tmpfs(&deep(101))], "view_too_large");
    refused(&[show(&deep(101), "/x")], "view_too_large");
}

#[test]
fn nothing_is_made_where_something_is_already() {
    let link = |target: &str, to: &str| ViewEntry::Link { target: PathBuf::from(target), to: PathBuf::from(to) };
    let file = |target: &str| ViewEntry::File { target: PathBuf::from(target), mode: 0o644, bytes: Vec::new() };
    let data = |target: &str| ViewEntry::Data { target: PathBuf::from(target), mode: 0o644, bytes: Vec::new(), writable: false };
    for entries in [
        vec![link("/", "x")],
        vec![file("/")],
        vec![data("/")],
        vec![show("/dev/null", "/")],
        vec![directory("/a/b"), link("/a", "x")],
        vec![directory("/a"), file("/a")],
        vec![directory("/a"), data("/a")],
        vec![tmpfs("/a"), data("/a/b/c"), file("/a/b")],
        vec![file("/a"), link("/a", "x")],
        vec![file("/a"), directory("/a")],
        vec![file("/a"), directory("/a/b")],
        vec![file("/a"), tmpfs("/a")],
        vec![file("/a"), show("/usr", "/a/b")],
        vec![link("/a", "x"), link("/a", "y")],
    ] {
        refused(&entries, "view_path_taken");
    }
    // The controls: a new place, a file over a file, and the same link again.
    let plan = planned(&[directory("/a"), file("/a/f"), data("/a/f"), link("/l", "a"), link("/l", "a"), directory("/l")]).unwrap();
    assert_eq!(plan.root.iter().filter(|entry| matches!(entry, RootEntry::Link { to, .. } if to == Path::new("a"))).count(), 1);
    // What a directory covers is no longer there.
    planned(&[file("/t/f"), tmpfs("/t"), directory("/t/f"), tmpfs("/t"), link("/t/f", "x")]).unwrap();
}

#[test]
fn writable_directories_keep_apart_from_what_is_shown_and_from_each_other() {
    refused(&[tree("/usr/local", "/w")], "view_tree_shown");
    refused(&[tree("/", "/w")], "view_tree_shown");
    refused(&[tree("/srv/w", "/a"), tree("/srv/w/in", "/b")], "view_trees_nested");
    let plan = planned(&[tree("/srv/w", "/a"), tree("/srv/other", "/b"), show("/srv/w/.git", "/a/.git")]).unwrap();
    assert_eq!(plan.writable_trees.len(), 2);
    assert_eq!(
        plan.writable_trees[0].protected.iter().map(|(path, _, how)| (path.as_path(), *how)).collect::<Vec<_>>(),
        [(Path::new(".git"), Protection::ReadOnly)]
    );
    assert_eq!(plan.writable_mounts(), ["/dev/shm", "/a", "/b", "/run/stockade/scratch"].map(PathBuf::from));
    // At another place it would show what the policy does not.
    refused(&[tree("/srv/w", "/a"), show("/srv/w/.git", "/git")], "view_not_shown");
}

#[test]
fn what_stays_read_only_in_a_writable_directory_cannot_be_moved_away() {
    use Protection::{Hidden, Pinned, ReadOnly};
    let protected = |plan: &Plan| -> Vec<(String, Protection)> {
        plan.writable_trees[0].protected.iter().map(|(path, _, how)| (path.display().to_string(), *how)).collect()
    };
    let is = |paths: &[(&str, Protection)]| paths.iter().map(|(path, how)| ((*path).to_owned(), *how)).collect::<Vec<_>>();
    let hooks = [tree("/srv/w", "/w"), show("/srv/w/.git/hooks", "/w/.git/hooks")];
    assert_eq!(protected(&planned(&hooks).unwrap()), is(&[(".git", Pinned), (".git/hooks", ReadOnly)]));
    // What was pinned for another rule.
    let rules = [(".git", PathKind::Directory, Pinned), (".git/key", PathKind::File, Hidden)];
    let whole = planned_with(&[tree("/srv/w", "/w"), show("/srv/w/.git", "/w/.git")], &rules).unwrap();
    assert_eq!(protected(&whole), is(&[(".git", ReadOnly), (".git/key", Hidden)]));
    // What is laid over a path.
    for entry in [show("/dev/null", "/w/.git/hooks/file"), show("/usr/share", "/w/.git/hooks/file")] {
        assert_eq!(protected(&planned(&[tree("/srv/w", "/w"), entry]).unwrap()), is(&[(".git", Pinned), (".git/hooks", Pinned)]));
    }
    // One thing has one name.
    let twice = [tree("/srv/w", "/w"), show("/dev/null", "/w//a/./b"), show("/dev/null", "/w/a/c")];
    assert_eq!(protected(&planned(&twice).unwrap()), is(&[("a", Pinned)]));
    let deep = planned(&[tree("/srv/w", "/w"), show("/dev/null", &format!("/w{}/y", "/x".repeat(90)))]).unwrap();
    assert_eq!(protected(&deep).len(), 90);
    let many: Vec<_> = (0..100).map(|first| show("/dev/null", &format!("/w/{first}{}/y", "/x".repeat(90)))).collect();
    refused(&[vec![tree("/srv/w", "/w")], many].concat(), "view_too_large");
}

#[test]
fn the_whole_of_a_writable_directory_can_be_made_read_only() {
    let plan = planned(&[tree("/srv/w", "/w"), show("/srv/w", "/w")]).unwrap();
    let protected: Vec<_> = plan.writable_trees[0].protected.iter().map(|(path, _, how)| (path.as_path(), *how)).collect();
    assert_eq!(protected, [(Path::new("."), Protection::ReadOnly)]);
    // Compared as bytes with what the kernel says.
    assert!(plan.required_mounts().iter().any(|point| point.as_os_str() == "/w"), "{:?}", plan.required_mounts());
}

#[test]
fn what_was_laid_over_a_writable_directory_is_not_shown_by_its_name() {
    for over in [tmpfs("/w/.git"), tree("/srv/other", "/w")] {
        refused(&[tree("/srv/w", "/w"), over, show("/srv/w/.git/hooks", "/w/.git/hooks")], "view_not_shown");
    }
}

#[test]
fn a_missing_name_of_a_writable_directory_gets_a_mount_point() {
    let points = |entries: &[ViewEntry]| -> Vec<String> {
        let plan = planned(entries).unwrap();
        plan.writable_trees[0].mount_points.iter().map(|(path, kind)| format!("{} {kind:?}", path.display())).collect()
    };
    let over = [tree("/srv/w", "/w"), show("/dev/null", "/w/.bashrc"), show("/tmp/empty", "/w/.claude"), tmpfs("/w/t")];
    assert_eq!(points(&over), [".bashrc File", ".claude Directory", "t Directory"]);
    let over = [tree("/srv/w", "/w"), overlay(&["/usr"], "/w/o", true), socket("/tmp/claude-http-1.sock", "/w/s")];
    assert_eq!(points(&over), ["o Directory", "s File"]);
    // What lies over the directory has places of its own.
    let own = [tree("/srv/w", "/w"), tmpfs("/w/t"), show("/dev/null", "/w/t/x")];
    assert_eq!(points(&own), ["t Directory"]);
    // What is read-only in it may be another run's mount point; the whole of it is none.
    let kept = [tree("/srv/w", "/w"), show("/srv/w/.git", "/w/.git"), show("/srv/w", "/w")];
    assert_eq!(points(&kept), [".git Directory"]);
    // Nothing is made in what the policy hides.
    let hidden = [("key", PathKind::Directory, Protection::Hidden)];
    let error = planned_with(&[tree("/srv/w", "/w"), show("/dev/null", "/w/key/x")], &hidden).expect_err("it was planned");
    assert_eq!(error.reason(), "view_on_host");
}

#[test]
fn a_directory_that_holds_nothing_is_shown_as_one_of_the_sandboxs_own() {
    let plan = planned(&[show("/tmp/empty", "/a/b"), tree("/srv/w", "/w"), show("/tmp/empty", "/w/e")]).unwrap();
    assert_eq!(laid(&plan), ["a/b at a/b read-only", "tree 0 at w", ".view/0 at w/e read-only"]);
    assert_eq!(plan.writable_mounts(), ["/dev/shm", "/w", "/run/stockade/scratch"].map(PathBuf::from));
    refused(&[show("/tmp/full", "/a/b")], "view_not_shown");
    refused(&[show("/tmp/empty", "/")], "view_over_sandbox");
}

#[test]
fn nothing_that_is_laid_read_only_leaves_the_host_writable_there() {
    let (whole, optional) = (tree("/srv/w", "/w"), |target: &str| ViewEntry::Show {
        source: PathBuf::from("/tmp/full"),
        target: PathBuf::from(target),
        optional: true,
    });
    // Of a source the policy shows parts, and what is there already would show through between them.
    for target in ["/w", "/w/etc", "/usr/share"] {
        refused(&[show("/usr", "/usr"), whole.clone(), show("/etc", target)], "view_parts_over");
    }
    // A rule for a directory holds below what lies over a part of it.
    for below in [tree("/srv/other", "/w/.git/hooks"), tmpfs("/w/.git/hooks"), overlay(&["/usr/lib"], "/w/.git/hooks", true)] {
        for (source, target) in [("/srv/w", "/w"), ("/srv/w/.git", "/w/.git")] {
            refused(&[whole.clone(), below.clone(), show(source, target)], "view_writable_below");
            // What follows it is meant so, and what is covered is not there.
            assert!(planned(&[whole.clone(), show(source, target), below.clone()]).is_ok());
            assert!(planned(&[whole.clone(), below.clone(), whole.clone(), show(source, target)]).is_ok());
        }
    }
    // What the policy does not show covers nothing.
    for target in ["/w", "/w/kept", "/"] {
        refused(&[whole.clone(), optional(target)], "view_not_shown");
    }
    assert!(planned(&[whole.clone(), optional("/else"), tmpfs("/w"), optional("/w/kept")]).is_ok());
    // A link on the way may lead to it.
    let link = ViewEntry::Link { target: PathBuf::from("/v"), to: PathBuf::from("w") };
    for target in ["/v", "/v/kept"] {
        refused(&[whole.clone(), link.clone(), optional(target)], "view_not_shown");
        assert!(planned(&[link.clone(), optional(target)]).is_ok());
    }
    refused(&[show("/usr", "/usr"), whole.clone(), optional("/usr/share/kept")], "view_not_shown");
    // A mount point will be there.
    let made = ViewEntry::Show { source: PathBuf::from("/srv/w/new"), target: PathBuf::from("/w/new"), optional: true };
    refused(&[whole.clone(), tree("/srv/other", "/w/new"), made.clone()], "view_not_shown");
    assert!(planned(&[whole.clone(), made]).is_ok());
    // What speaks to the host is kept from code as what writes it.
    let socket = socket("/tmp/claude-http-1.sock", "/w/s");
    refused(&[whole.clone(), socket.clone(), show("/srv/w", "/w")], "view_writable_below");
    refused(&[tmpfs("/w"), socket, optional("/w")], "view_not_shown");
}

#[test]
fn what_a_writable_directory_covers_later_need_not_be_shown() {
    let plan = planned(&[show("/srv/w/.git", "/srv/w/.git"), tree("/srv/w", "/srv/w")]).unwrap();
    assert_eq!(laid(&plan), ["tree 0 at srv/w"]);
    refused(&[show("/srv/w/.git", "/srv/w/.git"), tree("/srv/other", "/srv/other")], "view_not_shown");
}

#[test]
fn sockets_are_shown_that_the_policy_names() {
    let (path, wanted) = ("/tmp/claude-http-1.sock", "socket 0, /tmp/claude-http-1.sock, at tmp/claude-http-1.sock");
    // The whole of the host has it too, and what is laid over its directory hides it.
    let plan = planned(&[socket(path, path), show("/", "/")]).unwrap();
    assert!(laid(&plan).contains(&wanted.to_owned()), "{:?}", laid(&plan));
    assert_eq!(plan.host_sockets().collect::<Vec<_>>(), [Path::new(path)]);
    assert!(plan.required_mounts().contains(&PathBuf::from(path)));
    assert!(planned(&[socket(path, "/s"), socket("/tmp/claude-socks-1.sock", "/t")]).is_ok());
    // What else lies on its way is no part of the host.
    refused(&[overlay(&["/usr/lib"], "/usr", true), socket(path, "/usr/s"), show("/", "/")], "view_parts_over");
    refused(&[socket(path, "/usr/s"), overlay(&["/usr/lib"], "/usr", true), show("/", "/")], "view_parts_over");
    refused(&[socket(path, "/run")], "view_over_sandbox");
    for other in ["/tmp/other.sock", "/tmp/claude-http-1.sock.x", "/tmp/x/claude-http-1.sock", "/run/user/1234/claude-http-1.sock"] {
        refused(&[socket(other, "/s")], "view_socket_not_shown");
    }
    for never in ["/run/docker.sock", "/run/user/1234/bus", "/run/dbus/system_bus_socket", "/tmp/ssh-abc/agent.7"] {
        refused(&[socket(never, "/s")], "view_socket_never_shown");
    }
}

#[test]
fn code_is_never_root_inside() {
    let plan = planned(&[show("/usr", "/usr")]).unwrap();
    assert_eq!(plan.identity.inside, (1234, 1234));
}

#[test]
fn no_socket_or_fifo_is_made_in_a_directory_of_the_host_below_tmp() {
    let rights = |entries: &[ViewEntry]| {
        let plan = planned(entries).unwrap();
        let rules = plan.landlock.rules.iter().filter(|rule| rule.path.starts_with("/tmp"));
        rules.map(|rule| rule.rights & (access::MAKE_SOCK | access::MAKE_FIFO)).fold(0, |all, rights| all | rights)
    };
    for target in ["/tmp/w", "/tmp/a/b", "/tmp"] {
        assert_eq!(rights(&[show("/", "/"), tmpfs("/tmp"), tree("/srv/work", target)]), 0, "{target}");
    }
    // The controls: without one, and with one beside it.
    assert_ne!(rights(&[show("/", "/"), tmpfs("/tmp")]), 0);
    assert_ne!(rights(&[show("/", "/"), tmpfs("/tmp"), tree("/srv/work", "/tmpx")]), 0);
}
