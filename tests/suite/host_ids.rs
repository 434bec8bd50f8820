//! Root where user namespaces are forbidden: runs that are their host id inside too. Root with
//! a scratch that takes no idmap: runs that are its owner on the host.
//!
//! A user namespace of the test's own stands for the host: its count of further ones can be
//! set to none without touching that of the machine. The control allows some.

use std::fs;

use serde_json::{Value, json};

use crate::support::{
    exec::{ExecResult, OWNER, program_path, run_under, run_with_stdin, scratch, text},
    policy_dir::{PolicyDirectory, derived},
    runner::{directory, test},
};

/// Enters the namespace, with these counts and ids, and becomes a program.
const ENTER: &str = r#"
import ctypes, os, sys
users, ids, *command = sys.argv[1:]
outside, (read, told) = os.getpid(), os.pipe()
helper = os.fork()
if helper == 0:
    os.read(read, 1)
    for file in "uid_map", "gid_map":
        with open(f"/proc/{outside}/{file}", "w") as map:
            map.write(ids)
    os._exit(0)
if ctypes.CDLL(None).unshare(0x10000000) != 0:
    sys.exit("no user namespace for the test")
os.write(told, b"0")
if os.waitpid(helper, 0)[1] != 0:
    sys.exit("no ids for the test")
for name, most in ("user_namespaces", users), ("inotify_instances", "77"):
    with open(f"/proc/sys/user/max_{name}", "w") as file:
        file.write(most)
os.execv(command[0], command)
"#;

const EVERY_ID: &str = "0 0 4294967295";
/// A policy that lets root's runs go without.
const WITHOUT: &str = "[degrade]\nroot = { add = [\"user_namespace\"] }";

/// `exec` where this many user namespaces may be made.
#[track_caller]
fn exec_where(users: &str, ids: &str, lines: &str, options: &[&str], code: &str) -> ExecResult {
    let policies = PolicyDirectory::new();
    let policy = policies.write("without", &derived(lines));
    let program = program_path().unwrap();
    let words = ["python3", "-c", ENTER, users, ids, program.to_str().unwrap(), "exec", "--policy", &policy];
    ExecResult::of(run_with_stdin(&mut run_under(&[&words[..], options].concat()), json!({"code": code}).to_string().as_bytes()))
}

test!(RootOnly, where_user_namespaces_are_forbidden_the_error_names_the_remedy_and_the_line_that_goes_without);
fn where_user_namespaces_are_forbidden_the_error_names_the_remedy_and_the_line_that_goes_without() {
    let line = "[degrade] root = [\"user_namespace\"]";
    exec_where("0", EVERY_ID, "", &[], "print(1)").broke("namespaces_refused", &["ENOSPC", "sysctl user.max_user_namespaces=", line]);
    exec_where("9", EVERY_ID, "", &[], "print(1)").succeeded();
}

const IDS: &str = r"
import grp, json, os, pwd
status = dict(line.split(':\t', 1) for line in open('/proc/self/status').read().splitlines() if ':\t' in line)
print(json.dumps([os.getresuid(), os.getresgid(), os.getgroups(), pwd.getpwuid(os.getuid()).pw_name, grp.getgrgid(os.getgid()).gr_name,
    sorted({status[name] for name in ('CapInh', 'CapPrm', 'CapEff', 'CapBnd', 'CapAmb')}), os.stat('.').st_uid]))
";

test!(RootOnly, a_policy_that_names_it_runs_without_user_namespaces_and_says_so);
fn a_policy_that_names_it_runs_without_user_namespaces_and_says_so() {
    const NO_CAPABILITY: &str = "0000000000000000";
    let done = exec_where("0", EVERY_ID, WITHOUT, &[], IDS);
    let seen = done.succeeded().json();
    let id = seen[0][0].as_u64().unwrap();
    assert!((0x7000_0000..0x7000_0000 + (1 << 14)).contains(&id), "{seen}");
    assert_eq!(seen, json!([[id, id, id], [id, id, id], [], "sandbox", "sandbox", [NO_CAPABILITY], id]));
    assert_eq!(done["receipt"]["degraded"], json!(["user_namespace"]));
    assert!(done.stderr.contains("running without `user_namespace`: ") && done.stderr.contains("ENOSPC"), "{}", done.stderr);
    let layers = done["receipt"]["layers"].as_array().unwrap();
    let layer = |name: &str| layers.iter().find(|layer| layer["layer"] == name).cloned().unwrap_or_default();
    assert_eq!((&layer("host_id")["known"], &layer("user_namespace")["known"]), (&json!("read_back"), &json!("degraded")));
    let namespaces = layer("namespaces")["detail"].as_str().unwrap().to_owned();
    let kinds: Vec<&str> = namespaces.split(' ').filter_map(|name| name.split(':').next()).collect();
    assert_eq!(kinds, ["mnt", "pid", "net", "uts", "ipc", "cgroup"]);
    // The control: the policy gives up nothing that is to be had.
    let done = exec_where("9", EVERY_ID, WITHOUT, &[], IDS);
    let seen = done.succeeded().json();
    assert_eq!((&seen[0], &done["receipt"]["degraded"]), (&json!([1000, 1000, 1000]), &json!([])));
}

test!(RootOnly, a_dry_run_shows_the_missing_user_namespace);
fn a_dry_run_shows_the_missing_user_namespace() {
    let planned = |users: &str| {
        let policies = PolicyDirectory::new();
        let policy = policies.write("without", &derived(WITHOUT));
        let program = program_path().unwrap();
        let words =
            ["python3", "-c", ENTER, users, EVERY_ID, program.to_str().unwrap(), "exec", "--policy", &policy, "--dry-run", "--json"];
        let output = run_with_stdin(&mut run_under(&words), br#"{"code": ""}"#);
        let plan: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"));
        (plan["identity"]["user_namespaces"].clone(), plan["degraded"].as_array().unwrap().len())
    };
    assert_eq!(planned("0"), (json!("missing"), 1));
    assert_eq!(planned("9"), (json!("nested"), 0));
}

test!(RootOnly, counts_that_would_be_the_hosts_are_left_alone);
fn counts_that_would_be_the_hosts_are_left_alone() {
    let code = "print(*(open(f'/proc/sys/user/max_{name}').read().strip() for name in ('user_namespaces', 'inotify_instances')))";
    exec_where("0", EVERY_ID, WITHOUT, &[], code).succeeded().expect(json!({"output": "0 77\n"}));
    // The control: with its own namespaces the run shows others.
    let other = exec_where("9", EVERY_ID, WITHOUT, &[], code);
    assert_ne!(other.succeeded().output(), "9 77\n");
}

test!(RootOnly, nothing_that_root_may_do_can_be_done_by_a_run_without_user_namespaces);
fn nothing_that_root_may_do_can_be_done_by_a_run_without_user_namespaces() {
    // Acts of root's, each with the errno that the code gets. What the filter and the mounts
    // refuse they refuse as everywhere; the rest is refused for want of a capability.
    let acts = [
        ("os.setgroups([])", "EPERM"),
        ("os.setresuid(0, 0, 0)", "EPERM"),
        ("os.setresgid(0, 0, 0)", "EPERM"),
        ("write('f'); os.chown('f', 12345, 12345)", "EPERM"),
        ("socket.sethostname('other')", "EPERM"),
        ("write('/proc/sys/kernel/hostname')", "EROFS"),
        ("call(165, b'none', b'/tmp', b'tmpfs', 0, None)", "EPERM"),
        ("call(272, 0x20000)", "EPERM"),
        ("os.setpriority(os.PRIO_PROCESS, 0, -5)", "EACCES"),
    ];
    let program = program_path().unwrap();
    for (act, errno) in acts {
        let code = crate::support::control::program(act);
        assert_eq!(exec_where("0", EVERY_ID, WITHOUT, &[], &code).succeeded().json(), errno, "{act}");
        if act.contains("PRIO") {
            // Not even root of a user namespace may: that right is the machine's root's.
            continue;
        }
        // The control: root of that namespace, with its own mount table and host name.
        let path = program.parent().unwrap().display().to_string();
        let words = ["python3", "-c", ENTER, "0", EVERY_ID, "/usr/bin/unshare", "--mount", "--uts", "python3", "-c", &code, &path];
        let output = run_under(&words).current_dir(crate::support::runner::directory()).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "\"ok\"\n", "the control of {act}: {output:?}");
    }
}

test!(RootOnly, without_user_namespaces_an_id_of_the_runs_own_cannot_be_missing_too);
fn without_user_namespaces_an_id_of_the_runs_own_cannot_be_missing_too() {
    let both = "[degrade]\nroot = { add = [\"user_namespace\", \"unique_uid\"] }";
    exec_where("0", "0 0 1", both, &[], "print(1)").broke("unique_uid_unavailable", &["user_namespace", "does not map id"]);
    exec_where("0", EVERY_ID, both, &[], "print(1)").succeeded();
}

test!(RootOnly, a_scratch_that_takes_no_idmap_is_refused_or_belongs_to_the_run_by_leave_of_the_policy);
fn a_scratch_that_takes_no_idmap_is_refused_or_belongs_to_the_run_by_leave_of_the_policy() {
    let place = scratch();
    // Mounted where the run alone sees it; ramfs takes no idmap.
    let ask = |lines: &str, mount: &str| {
        let script = format!(r#"{mount} && exec "$STOCKADE" exec --policy "$0" --scratch "$1""#);
        let policies = PolicyDirectory::new();
        let policy = policies.write("leave", &derived(lines));
        let mut command = run_under(&["unshare", "--mount", "sh", "-c", &script, &policy, text(&place)]);
        let code = "import os\nopen('made', 'w').close()\nprint(os.stat('made').st_uid == os.stat('.').st_uid == os.getuid())";
        ExecResult::of(run_with_stdin(&mut command, json!({"code": code}).to_string().as_bytes()))
    };
    let (leave, ramfs) =
        ("[degrade]\nroot = { add = [\"unique_uid\"] }", format!(r#"mount -t ramfs none "$1" && chown {OWNER}:{OWNER} "$1""#));
    ask("", &ramfs).broke("unique_uid_unavailable", &[text(&place), "cannot be idmapped", "[degrade] root = [\"unique_uid\"]"]);
    ask(leave, &ramfs).succeeded().expect(json!({"output": "True\n"}));
    assert_eq!(ask(leave, &ramfs)["receipt"]["degraded"], json!(["unique_uid"]));
    // The control: a disk takes it, so the policy's leave is not used.
    let done = ask(leave, "true");
    done.succeeded().expect(json!({"output": "True\n"}));
    assert_eq!(done["receipt"]["degraded"], json!([]));
}

test!(RootOnly, a_file_of_the_host_that_cannot_be_read_is_not_taken_for_missing);
/// Whose ids are whose is not guessed at: `/etc/subuid` may give away that of the run.
fn a_file_of_the_host_that_cannot_be_read_is_not_taken_for_missing() {
    let exec_after = |name: &str, act: &str| {
        let script = format!(
            "set -e; mount -t tmpfs -o mode=755 none \"$1\"; cp -a /etc/. \"$1\"; cd \"$1\"; {act}; cd /; mount --bind \"$1\" /etc; exec \"$STOCKADE\" exec"
        );
        let etc = directory().join(name);
        fs::create_dir(&etc).unwrap();
        let mut command = run_under(&["unshare", "--mount", "--propagation", "private", "sh", "-c", &script, "sh", text(&etc)]);
        ExecResult::of(run_with_stdin(&mut command, br#"{"code": "print(1)"}"#))
    };
    exec_after("circle", "rm -f subuid; ln -s subuid subuid").broke("host_unreadable", &["/etc/subuid", "symbolic links"]);
    // The controls: one that is not there gives nothing away, nor does the host's own.
    exec_after("missing", "rm -f subuid").succeeded();
    exec_after("own", "true").succeeded();
}
