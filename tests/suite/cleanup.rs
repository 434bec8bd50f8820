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

use crate::{
    harness::{Test, directory, eventually, is_root, test},
    stockade::{Done, exec, feed, host_process_with, no_process_is_left, scratch, start, stockade, text, under},
};

pub const TESTS: &[Test] = &[
    test!(alone Both, an_ended_run_leaves_nothing),
    test!(alone Both, a_launcher_killed_at_any_moment_leaves_nothing_running_and_the_next_start_sweeps, seconds 120),
    test!(alone Both, a_launcher_killed_while_it_reads_leaves_no_process_that_waits_for_it),
    test!(alone Both, a_signal_at_any_moment_of_the_set_up_ends_the_run, seconds 120),
    test!(alone Both, the_sweep_touches_no_run_that_is_alive),
    test!(alone Both, the_sweep_removes_only_what_is_a_programs_file),
    test!(alone Both, killed_launchers_by_the_dozen_leave_nothing, seconds 120),
];

/// The directory of the run records of whoever runs this.
fn registry() -> PathBuf {
    if is_root() { PathBuf::from("/run/stockade") } else { directory().join("home/stockade") }
}

/// Cgroups of this launcher's run.
pub fn cgroups_of(launchers: &BTreeSet<u32>) -> Vec<PathBuf> {
    fn walk(directory: &Path, depth: usize, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                if entry.file_name().to_string_lossy().starts_with("stockade-") {
                    found.push(entry.path());
                }
                if depth < 8 {
                    walk(&entry.path(), depth + 1, found);
                }
            }
        }
    }
    let mut found = Vec::new();
    walk(Path::new("/sys/fs/cgroup"), 0, &mut found);
    found.retain(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        name.split('-').nth(1).and_then(|pid| pid.parse().ok()).is_some_and(|pid| launchers.contains(&pid))
    });
    found
}

/// Processes of the sandboxes that this scratch was shown in, and launchers of this
/// program: by their mounts, or, where those may not be read, by their owner.
pub fn processes_around(scratch: &Path, before: &BTreeSet<u32>) -> Vec<String> {
    let own = nix::unistd::getuid().as_raw();
    let program = std::env::var("STOCKADE").unwrap();
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let Ok(pid) = entry.file_name().to_string_lossy().parse::<u32>() else { continue };
        if before.contains(&pid) {
            continue;
        }
        let status = fs::read_to_string(entry.path().join("status")).unwrap_or_default();
        let field =
            |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(|rest| rest.trim().to_owned()).unwrap_or_default();
        let uid = field("Uid:").split_whitespace().next().and_then(|uid| uid.parse().ok()).unwrap_or(0u32);
        let mounts = fs::read_to_string(entry.path().join("mountinfo")).unwrap_or_default();
        let launcher = fs::read_link(entry.path().join("exe")).is_ok_and(|exe| exe == Path::new(&program));
        let ours = if is_root() { mounts.contains(text(scratch)) || launcher } else { uid == own };
        if ours && !field("State:").starts_with('Z') {
            found.push(format!("{pid} {} {}", field("Name:"), field("State:")));
        }
    }
    found
}

pub fn processes() -> BTreeSet<u32> {
    fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| entry.file_name().to_string_lossy().parse().ok()).collect()
}

pub fn mounts() -> usize {
    fs::read_to_string("/proc/self/mountinfo").unwrap().lines().count()
}

fn names(directory: &Path) -> BTreeSet<String> {
    fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// Records that no launcher holds any more: such a file can be locked.
pub fn dead_records() -> Vec<String> {
    names(&registry())
        .into_iter()
        .filter(|name| {
            // The door's file is nobody's record, and stays; so does what waits for somebody's
            // approval, whoever on this host has asked.
            if name == "connections" || name.starts_with("approval-") {
                return false;
            }
            let Ok(file) = fs::File::open(registry().join(name)) else { return false };
            file.try_lock().is_ok() && fs::exists(registry().join(name)).unwrap()
        })
        .collect()
}

/// Another launcher of this host may be sweeping the same record at this moment, or have
/// been killed at it: then it is the start after that one which finds it free.
#[track_caller]
pub fn the_next_start_has_swept(launchers: &BTreeSet<u32>) {
    let swept = (0..5).any(|_| {
        let clean = cgroups_of(launchers).is_empty();
        if !clean {
            exec(json!({"code": ""})).succeeded();
        }
        clean
    });
    assert!(swept, "{:?}, records {:?}", cgroups_of(launchers), names(&registry()));
}

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

fn a_launcher_killed_while_it_reads_leaves_no_process_that_waits_for_it() {
    let program = std::env::var("STOCKADE").unwrap();
    let filtered = ["python3", "-c", WITHOUT_CLOSE_RANGE, &program, "exec"];
    // The control: it is the filter that such a launcher starts under, and misses the call.
    let refused = Done::of(feed(&mut under(&filtered), br#"{"code": ""}"#));
    assert_eq!((&refused["verdict"], &refused["started"]), (&json!("sandbox_error"), &json!(false)), "{}", refused.brief());
    exec(json!({"code": ""})).succeeded();
    for words in [&filtered[..], &filtered[3..]] {
        let before = processes();
        let mut launcher = under(words).stdin(Stdio::piped()).spawn().unwrap();
        let children = format!("/proc/{0}/task/{0}/children", launcher.id());
        let waits = || fs::read_to_string(format!("/proc/{}/wchan", launcher.id())).unwrap_or_default().contains("pipe");
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
        Done::of(child.wait_with_output().unwrap());
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
    (0..64u64).map(|step| Duration::from_micros(step * step * 10)).chain([60, 90, 150, 300].map(Duration::from_millis))
}

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

fn the_sweep_touches_no_run_that_is_alive() {
    let scratch = scratch();
    let code = "import os, time\nopen('running', 'w').close()\nwhile not os.path.exists('stop'): time.sleep(0.005)\nprint(len([n for n in os.listdir('.') if n.startswith('stockade_')]))";
    let alive = kill_when_running(&json!({"code": code, "scratch": text(&scratch)}), &scratch.join("running"));
    for _ in 0..3 {
        exec(json!({"code": "print(1)", "scratch": text(&scratch)})).succeeded();
    }
    crate::stockade::put(&scratch.join("stop"), "");
    Done::of(alive.wait_with_output().unwrap()).succeeded().expect(json!({"output": "1\n"}));
}

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
    let other = crate::stockade::scratch_named("other");
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
