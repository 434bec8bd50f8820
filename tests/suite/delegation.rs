//! cgroup v2, as systemd hands it out: what a run gets there, and what is said to a user who
//! has none; and on either version, that a limit of the caller's own still holds.

use std::{fs, os::unix::fs::chown, path::PathBuf, time::Duration};

use serde_json::{Value, json};

use crate::support::{
    exec::{ExecResult, exec, program_path, run_under, run_with_stdin, stockade, text},
    runner::{directory, eventually, is_root, test},
};

/// The receipt's entry of the cgroup: how it is known, and what it is.
fn cgroup_of(done: &ExecResult) -> (String, String) {
    let layers = done["receipt"]["layers"].as_array().unwrap();
    let layer = layers.iter().find(|layer| layer["layer"] == "cgroup").unwrap_or_else(|| panic!("{}", done.brief()));
    let word = |name: &str| layer[name].as_str().unwrap().to_owned();
    (word("known"), word("detail"))
}

test!(serial Both, limits_stand_in_the_receipt_in_the_words_of_v2, needs [Cgroup2]);
fn limits_stand_in_the_receipt_in_the_words_of_v2() {
    let limits = json!({"memory": "200MiB", "processes": 20, "cpus": 0.5, "scratch_size": "8MiB", "tmp_size": "8MiB"});
    let done = exec(json!({"code": "", "limits": limits}));
    let (known, detail) = cgroup_of(done.succeeded());
    assert_eq!(known, "read_back");
    assert!(detail.starts_with("v2 stockade-"), "{detail}");
    // One process more than the limit: pid 1.
    for file in ["memory.max=209715200", "memory.oom.group=1", "pids.max=21", "cpu.max=50000 100000"] {
        assert!(detail.contains(file), "{file} is not in: {detail}");
    }
}

test!(serial Both, every_process_of_a_run_is_counted_from_its_birth, needs [Cgroup2]);
fn every_process_of_a_run_is_counted_from_its_birth() {
    let sleepers = |n: u32| {
        let code =
            format!("import subprocess\np = [subprocess.Popen(['sleep', '600']) for _ in range({n})]\nfor q in p: q.kill(); q.wait()");
        let done = exec(json!({"code": code, "limits": {"processes": 4}}));
        let peak = done["usage"]["processes_peak"].clone();
        // Older kernels keep no peak.
        assert!(peak.is_null() || peak == n + 1, "{}", done.brief());
        done
    };
    sleepers(0).succeeded();
    // Exactly as many as the limit, the first one among them.
    sleepers(3).succeeded().expect(json!({"limits_hit": []}));
    let code = "import subprocess\nfor _ in range(4): subprocess.Popen(['sleep', '600'])";
    exec(json!({"code": code, "limits": {"processes": 4}})).expect(json!({"verdict": "process_limit", "code": 1}));
}

/// The program's answer in a unit of systemd's, of the user's own manager unless by root.
fn in_unit(options: &[&str], arguments: &[&str], stdin: &str) -> std::process::Output {
    let program = program_path().unwrap();
    let manager: &[&str] = if is_root() { &[] } else { &["--user"] };
    let words = [&["systemd-run", "--quiet"], manager, options, &["--", program.to_str().unwrap()], arguments].concat();
    let mut command = run_under(&words);
    let runtime = format!("/run/user/{}", nix::unistd::getuid());
    command.env("DBUS_SESSION_BUS_ADDRESS", format!("unix:path={runtime}/bus")).env("XDG_RUNTIME_DIR", runtime);
    run_with_stdin(&mut command, stdin.as_bytes())
}

const ALONE: &[&str] = &["--scope", "-p", "Delegate=yes"];

test!(serial Both, a_launcher_alone_in_its_scope_leaves_it_for_a_child, needs [Cgroup2, Systemd]);
fn a_launcher_alone_in_its_scope_leaves_it_for_a_child() {
    let done = ExecResult::of(in_unit(ALONE, &["exec"], r#"{"code": "print(6 * 7)"}"#));
    done.succeeded().expect(json!({"output": "42\n"}));
    let (known, detail) = cgroup_of(&done);
    assert!(known == "read_back" && detail.starts_with("v2 stockade-"), "{known} {detail}");
    assert_eq!(done["receipt"]["degraded"], json!([]));
}

/// A request for that much more than the 128 MiB that the launcher's own cgroup has.
fn greedy(pieces: u32) -> String {
    let code = format!("held = []\nfor number in range({pieces}): held.append(b'x' * (1 << 20))\nprint(len(held))");
    json!({"code": code, "limits": {"memory": "512MiB", "scratch_size": "8MiB", "tmp_size": "8MiB"}}).to_string()
}

/// The launcher lives to tell of it, and the same request within the limit goes well.
#[track_caller]
fn holds(ask: impl Fn(&str) -> ExecResult) {
    ask(&greedy(300)).expect(json!({"verdict": "out_of_memory", "code": 137, "output": "", "started": true}));
    ask(&greedy(50)).succeeded().expect(json!({"output": "50\n"}));
    // The control: without it there is as much as the run's own limit.
    ExecResult::of(run_with_stdin(&mut stockade(["exec"]), greedy(300).as_bytes())).succeeded().expect(json!({"output": "300\n"}));
}

test!(serial RootOnly, a_limit_above_the_launcher_holds_on_v1, needs [Cgroup1]);
fn a_limit_above_the_launcher_holds_on_v1() {
    let above = PathBuf::from(format!("/sys/fs/cgroup/memory/suite-{}", std::process::id()));
    fs::create_dir(&above).unwrap();
    fs::write(above.join("memory.limit_in_bytes"), (128u32 << 20).to_string()).unwrap();
    let script = "echo $$ >\"$1/cgroup.procs\" && exec \"$STOCKADE\" exec";
    let outcome = std::panic::catch_unwind(|| {
        holds(|request| ExecResult::of(run_with_stdin(&mut run_under(&["sh", "-c", script, "sh", text(&above)]), request.as_bytes())))
    });
    assert!(eventually(Duration::from_secs(5), || fs::remove_dir(&above).is_ok()), "{} is left", above.display());
    outcome.unwrap();
}

test!(serial Both, a_limit_above_the_launcher_holds_on_v2, needs [Cgroup2, Systemd]);
fn a_limit_above_the_launcher_holds_on_v2() {
    let options = [ALONE, &["-p", "MemoryMax=128M"]].concat();
    holds(|request| ExecResult::of(in_unit(&options, &["exec"], request)));
}

test!(serial RootOnly, without_delegation_doctor_names_the_command_that_gives_it, needs [Cgroup2, Systemd]);
/// A service of an ordinary user's, whose cgroup belongs to root unless it is delegated.
fn without_delegation_doctor_names_the_command_that_gives_it() {
    const NOBODY: u32 = 65534;
    let runtime = directory().join("runtime");
    fs::create_dir(&runtime).unwrap();
    chown(&runtime, Some(NOBODY), Some(NOBODY)).unwrap();
    let (uid, runtime) = (format!("--uid={NOBODY}"), format!("--setenv=XDG_RUNTIME_DIR={}", text(&runtime)));
    let service = |delegate: &str, arguments: &[&str], stdin: &str| {
        in_unit(&["--wait", "--pipe", "--collect", &uid, &runtime, "-p", delegate], arguments, stdin)
    };
    let examined = |delegate: &str| -> Value {
        let output = service(delegate, &["doctor", "--json"], "");
        let examination: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"));
        examination["findings"].as_array().unwrap().iter().find(|finding| finding["feature"] == "cgroup").unwrap().clone()
    };
    let degraded = |delegate: &str| {
        let done = ExecResult::of(service(delegate, &["exec"], r#"{"code": ""}"#));
        done.succeeded()["receipt"]["degraded"].clone()
    };
    let without = examined("Delegate=no");
    assert_eq!(without["state"], "degraded", "{without}");
    assert!(without["remedy"].as_str().unwrap().contains("`systemd-run --user --scope -p Delegate=yes stockade …`"), "{without}");
    assert_eq!(degraded("Delegate=no"), json!(["cgroup"]));
    // The control: what that option gives.
    assert_eq!(examined("Delegate=yes")["state"], "ok");
    assert_eq!(degraded("Delegate=yes"), json!([]));
}
