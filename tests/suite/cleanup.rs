//! What is left when the launcher is killed: nothing that runs, at once; nothing at all,
//! after the next start.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::{Child, Stdio},
    thread,
    time::Duration,
};

use serde_json::json;

use crate::support::{
    exec::{ExecResult, exec, program_path, run_under, run_with_stdin, scratch, start, stockade, text},
    leftovers::{
        cgroups_of, dead_records, host_process_with, mounts, names, no_process_is_left, processes, processes_around,
        the_next_start_has_swept,
    },
    policy_dir::{PolicyDirectory, derived},
    runner::{directory, eventually, test},
};

/// Starts a program under a filter that knows no close_range(2), as Linux 5.8 does not.
const WITHOUT_CLOSE_RANGE: &str = r#"
import ctypes, os, struct, sys
rules = [(0x20, 0, 0, 0), (0x15, 0, 1, 436), (6, 0, 0, 0x50026), (6, 0, 0, 0x7fff0000)]
text = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(rules), ctypes.addressof(text)))
prctl = ctypes.CDLL(None).prctl
assert prctl(38, 1, 0, 0, 0) == 0 and prctl(22, 2, program, 0, 0) == 0
os.execv(sys.argv[1], sys.argv[1:])
"#;

test!(serial Both, a_launcher_killed_while_it_reads_leaves_no_process_that_waits_for_it);
fn a_launcher_killed_while_it_reads_leaves_no_process_that_waits_for_it() {
    let program = program_path().unwrap().display().to_string();
    let filtered = ["python3", "-c", WITHOUT_CLOSE_RANGE, &program, "exec"];
    // The control: it is the filter that such a launcher starts under, and misses the call.
    let refused = ExecResult::of(run_with_stdin(&mut run_under(&filtered), br#"{"code": ""}"#));
    assert_eq!((&refused["verdict"], &refused["started"]), (&json!("sandbox_error"), &json!(false)), "{}", refused.brief());
    exec(json!({"code": ""})).succeeded();
    for words in [&filtered[..], &filtered[3..]] {
        let before = processes();
        let mut launcher = run_under(words).stdin(Stdio::piped()).spawn().unwrap();
        let children = format!("/proc/{0}/task/{0}/children", launcher.id());
        let waits = || fs::read_to_string(format!("/proc/{}/wchan", launcher.id())).unwrap_or_default().contains("poll");
        let started = || fs::read_link(format!("/proc/{}/exe", launcher.id())).is_ok_and(|exe| exe == Path::new(&program));
        assert!(eventually(Duration::from_secs(10), || started() && waits()), "it does not read");
        let early = fs::read_to_string(children).unwrap();
        launcher.kill().unwrap();
        launcher.wait().unwrap();
        let left = || early.split_whitespace().filter(|pid| !before.contains(&pid.parse().unwrap()) && lives(pid)).count();
        assert!(eventually(Duration::from_secs(5), || left() == 0), "{words:?} leaves {early}");
    }
}

fn lives(pid: &str) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    status.lines().any(|line| line.starts_with("State:") && !line.contains("zombie"))
}

test!(serial Both, an_ended_run_leaves_nothing);
fn an_ended_run_leaves_nothing() {
    let scratch = scratch();
    let (mounts_before, before) = (mounts(), processes());
    let mut launchers = BTreeSet::new();
    for request in [
        json!({"code": "print(1)", "scratch": text(&scratch)}),
        json!({"code": "while True: pass", "scratch": text(&scratch), "limits": {"wall": "100ms"}}),
        json!({"code": "import os; os.abort()", "scratch": text(&scratch)}),
        json!({"code": "x", "scratch": text(&scratch), "language": "klingon"}),
    ] {
        let child = start(&mut stockade(["exec"]), request.to_string().as_bytes());
        launchers.insert(child.id());
        ExecResult::of(child.wait_with_output().unwrap());
    }
    assert_eq!(names(&scratch), BTreeSet::new());
    assert_eq!(cgroups_of(&launchers), Vec::<PathBuf>::new());
    assert_eq!(mounts(), mounts_before);
    assert!(
        eventually(Duration::from_secs(5), || processes_around(&scratch, &before).is_empty()),
        "{:?}",
        processes_around(&scratch, &before)
    );
    assert_eq!(dead_records(), Vec::<String>::new());
}

/// From before the first system call of the setup to the middle of the run.
fn delays() -> impl Iterator<Item = Duration> {
    (0..64u64).map(|step| Duration::from_micros(step * step * 10)).chain([60, 90, 150, 300, 3000].map(Duration::from_millis))
}

test!(serial Both, a_launcher_killed_at_any_moment_leaves_nothing_running_and_the_next_start_sweeps, seconds 120);
fn a_launcher_killed_at_any_moment_leaves_nothing_running_and_the_next_start_sweeps() {
    let scratch = scratch();
    let (mounts_before, before) = (mounts(), processes());
    let mark = format!("600.{}7", std::process::id());
    let code = format!(
        "import subprocess\nopen('mine', 'w').close()\nsubprocess.Popen(['sleep', '{mark}'], start_new_session=True)\nsubprocess.run(['sleep', '{mark}'])"
    );
    let request = json!({"code": code, "scratch": text(&scratch), "files": {"given/file": "x"}}).to_string();
    let (mut launchers, mut reached) = (BTreeSet::new(), BTreeSet::new());
    for delay in delays() {
        let mut child = start(&mut stockade(["exec"]), request.as_bytes());
        thread::sleep(delay);
        reached.insert((scratch.join("given").exists(), scratch.join("mine").exists()));
        child.kill().unwrap();
        child.wait().unwrap();
        launchers.insert(child.id());
        for name in ["mine", "given/file", "given"] {
            let path = scratch.join(name);
            let _not_yet = if path.is_dir() { fs::remove_dir(path) } else { fs::remove_file(path) };
        }
        let nothing_runs =
            eventually(Duration::from_secs(5), || !host_process_with(&mark) && processes_around(&scratch, &before).is_empty());
        assert!(nothing_runs, "after {delay:?}: {:?}", processes_around(&scratch, &before));
    }
    // It was killed before anything was there, and after the code had begun.
    assert!(reached.contains(&(false, false)) && reached.contains(&(true, true)), "{reached:?}");
    assert_eq!(mounts(), mounts_before);
    exec(json!({"code": "print(1)", "scratch": text(&scratch)})).succeeded();
    let left: Vec<String> = names(&scratch).into_iter().filter(|name| name.starts_with("stockade")).collect();
    assert_eq!(left, Vec::<String>::new(), "program files in scratch");
    the_next_start_has_swept(&launchers);
    assert_eq!(dead_records(), Vec::<String>::new());
}

fn kill_when_running(request: &serde_json::Value, sign: &Path) -> Child {
    let child = start(&mut stockade(["exec"]), request.to_string().as_bytes());
    assert!(eventually(Duration::from_secs(10), || sign.exists()));
    child
}

test!(serial Both, the_sweep_touches_no_run_that_is_alive);
fn the_sweep_touches_no_run_that_is_alive() {
    let scratch = scratch();
    let code = "import os, time\nopen('running', 'w').close()\nwhile not os.path.exists('stop'): time.sleep(0.005)\nprint(len([n for n in os.listdir('.') if n.startswith('stockade_')]))";
    let alive = kill_when_running(&json!({"code": code, "scratch": text(&scratch)}), &scratch.join("running"));
    for _ in 0..3 {
        exec(json!({"code": "print(1)", "scratch": text(&scratch)})).succeeded();
    }
    crate::support::exec::write_file(&scratch.join("stop"), "");
    ExecResult::of(alive.wait_with_output().unwrap()).succeeded().expect(json!({"output": "1\n"}));
}

test!(serial RootOnly, a_start_that_sees_no_cgroups_forgets_none);
fn a_start_that_sees_no_cgroups_forgets_none() {
    let scratch = scratch();
    let request = json!({"code": "import time\nopen('running', 'w').close()\ntime.sleep(60)", "scratch": text(&scratch)});
    let mut child = kill_when_running(&request, &scratch.join("running"));
    child.kill().unwrap();
    child.wait().unwrap();
    let launchers = BTreeSet::from([child.id()]);
    let policies = PolicyDirectory::new();
    let policy = policies.write("without", &derived("[degrade]\nroot = { add = [\"cgroup\"] }"));
    let sweep = |script: &str| {
        let (program, script) = (program_path().unwrap(), format!("{script}; exec \"$0\" exec --policy \"$1\""));
        let mut command = run_under(&["unshare", "--mount", "sh", "-c", &script, text(&program), &policy]);
        ExecResult::of(run_with_stdin(&mut command, br#"{"code": ""}"#)).succeeded()["receipt"]["degraded"].clone()
    };
    assert_eq!(sweep("mount -t tmpfs none /sys/fs/cgroup"), json!(["cgroup"]));
    assert!(!cgroups_of(&launchers).is_empty() && !dead_records().is_empty(), "{:?}", dead_records());
    // The control: one that sees them removes them.
    assert_eq!(sweep("true"), json!([]));
    the_next_start_has_swept(&launchers);
}

test!(serial Both, the_sweep_removes_only_what_is_a_programs_file);
/// The code could leave anything under the noted name before its launcher is killed.
fn the_sweep_removes_only_what_is_a_programs_file() {
    let scratch = scratch();
    let victim = directory().join("victim");
    fs::create_dir(&victim).unwrap();
    fs::write(victim.join("file"), "untouched").unwrap();
    let code = format!(
        "import os, sys, time\nos.unlink(sys.argv[0]); os.symlink({:?}, sys.argv[0])\nopen('running', 'w').close()\ntime.sleep(600)",
        text(&victim)
    );
    let mut child = kill_when_running(&json!({"code": code, "scratch": text(&scratch)}), &scratch.join("running"));
    child.kill().unwrap();
    child.wait().unwrap();
    exec(json!({"code": "", "scratch": text(&scratch)})).succeeded();
    assert_eq!(fs::read_to_string(victim.join("file")).unwrap(), "untouched");
    assert_eq!(names(&scratch), BTreeSet::from([String::from("running")]));
    // A scratch that has become a link to somewhere else is not followed.
    let other = crate::support::exec::scratch_named("other");
    let code = "import os, sys, time\nopen('running', 'w').write(os.path.basename(sys.argv[0]))\ntime.sleep(600)";
    let mut child = kill_when_running(&json!({"code": code, "scratch": text(&other)}), &other.join("running"));
    let mut name = String::new();
    assert!(eventually(Duration::from_secs(5), || {
        name = fs::read_to_string(other.join("running")).unwrap();
        !name.is_empty()
    }));
    child.kill().unwrap();
    child.wait().unwrap();
    fs::remove_dir_all(&other).unwrap();
    fs::write(victim.join(&name), "untouched").unwrap();
    std::os::unix::fs::symlink(&victim, &other).unwrap();
    exec(json!({"code": ""})).succeeded();
    exec(json!({"code": "", "scratch": text(&scratch)})).succeeded();
    assert!(victim.join(&name).exists());
}

test!(serial Both, killed_launchers_by_the_dozen_leave_nothing, seconds 120);
fn killed_launchers_by_the_dozen_leave_nothing() {
    let scratch = scratch();
    let before = processes();
    let mark = format!("600.{}8", std::process::id());
    let request = json!({"language": "sh", "code": format!("sleep {mark} & sleep {mark}"), "scratch": text(&scratch)}).to_string();
    let mut children: Vec<Child> = (0..12).map(|_| start(&mut stockade(["exec"]), request.as_bytes())).collect();
    assert!(eventually(Duration::from_secs(10), || host_process_with(&mark)));
    let launchers: BTreeSet<u32> = children.iter().map(Child::id).collect();
    for child in &mut children {
        child.kill().unwrap();
    }
    for child in &mut children {
        child.wait().unwrap();
    }
    no_process_is_left(&mark);
    assert!(
        eventually(Duration::from_secs(5), || processes_around(&scratch, &before).is_empty()),
        "{:?}",
        processes_around(&scratch, &before)
    );
    exec(json!({"code": "print(1)", "scratch": text(&scratch)})).succeeded();
    assert_eq!(names(&scratch), BTreeSet::new());
    the_next_start_has_swept(&launchers);
    assert_eq!(dead_records(), Vec::<String>::new());
}

test!(serial Both, a_signal_at_any_moment_of_the_set_up_ends_the_run, seconds 120);
/// Signals that end a run, while the sandbox is being made too: the launcher ends, soon.
fn a_signal_at_any_moment_of_the_set_up_ends_the_run() {
    use nix::sys::signal::{Signal, kill};
    let request = json!({"code": "import time; time.sleep(600)"}).to_string();
    let mut statuses = BTreeSet::new();
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGQUIT] {
        for step in 0..40u64 {
            let delay = Duration::from_micros(step * step * 12);
            let mut child = start(&mut stockade(["exec"]), request.as_bytes());
            thread::sleep(delay);
            kill(nix::unistd::Pid::from_raw(child.id().cast_signed()), signal).unwrap();
            let ended = eventually(Duration::from_secs(15), || child.try_wait().unwrap().is_some());
            if !ended {
                child.kill().unwrap();
            }
            assert!(ended, "{signal} after {delay:?}: the launcher still runs");
            statuses.insert(child.wait().unwrap().to_string());
        }
    }
    // Some signals came before it held them back, and some when the run had begun.
    assert!(statuses.len() > 1, "{statuses:?}");
}

test!(RootlessOnly, code_that_becomes_a_directory_leaves_no_record);
fn code_that_becomes_a_directory_leaves_no_record() {
    let scratch = scratch();
    let registry = directory().join("home/stockade");
    let records = || {
        let entries = fs::read_dir(&registry).into_iter().flatten().flatten();
        entries.filter(|entry| entry.file_name().as_encoded_bytes().starts_with(b"run-")).count()
    };
    let before = records();
    let code = "import os, sys; p = sys.argv[0]; print(os.path.isfile(p)); os.remove(p); os.mkdir(p)";
    let done = exec(json!({"code": code, "scratch": text(&scratch)}));
    done.succeeded().expect(json!({"output": "True\n"}));
    assert_eq!(records(), before);
}
