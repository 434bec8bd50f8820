//! The sandbox that a session sets up before the request comes: that it is taken, that it is
//! never another than the request asks for, and that nothing of it is left.

use std::{
    collections::BTreeSet,
    fs,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use crate::{
    cleanup::{cgroups_of, dead_records, mounts, processes, processes_around, the_next_start_has_swept},
    harness::{Test, directory, eventually, is_root, test},
    sessions::{Session, begin, begin_with, stop},
    stockade::{PolicyDirectory, derived, exec, no_process_is_left, put, scratch, text, token},
};

pub const TESTS: &[Test] = &[
    test!(Both, a_request_takes_the_sandbox_that_stands_ready_and_each_gets_its_own, seconds 60),
    test!(Both, what_a_request_asks_for_decides_whether_it_takes_what_stands_ready, seconds 60),
    test!(Both, a_request_that_found_its_sandbox_ready_is_told_as_any_other, seconds 60),
    test!(Both, a_spare_that_was_killed_costs_its_request_nothing, seconds 60),
    test!(alone Both, a_session_that_waits_clears_away_a_spare_that_was_killed, seconds 60),
    test!(Both, a_spare_that_stands_still_gives_way_to_another_sandbox, seconds 60),
    test!(Both, a_reset_ends_the_spare_and_what_it_had_mounted, seconds 60),
    test!(Both, what_is_hidden_meanwhile_is_hidden_from_the_next_request, seconds 60),
    test!(Both, what_changes_names_on_the_host_does_not_change_its_protection, seconds 60),
    test!(Both, a_path_of_the_host_that_is_another_now_is_shown_as_it_is, seconds 60),
    test!(alone Both, a_waiting_session_does_nothing, seconds 60),
    test!(alone Both, a_session_that_ends_with_a_spare_leaves_nothing, seconds 60),
    test!(alone Both, a_session_killed_beside_its_spare_leaves_nothing_running, seconds 60),
];

fn children(pid: u32) -> Vec<u32> {
    let list = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    list.split_whitespace().map(|child| child.parse().unwrap()).collect()
}

/// The first process of the sandbox that waits for a request: it has become the executor, and
/// no program runs in it.
fn waiting(session: &Session) -> Option<u32> {
    let launcher = session.pid().as_raw().unsigned_abs();
    let waits = |pid: &u32| {
        let executor = fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.starts_with(b"stockade-executor"));
        executor && fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| stat.contains(") S ")) && children(*pid).is_empty()
    };
    children(launcher).into_iter().find(waits)
}

/// The same, when it has come so far.
#[track_caller]
pub fn spare(session: &Session) -> u32 {
    let mut found = None;
    let stands = eventually(Duration::from_secs(10), || {
        found = waiting(session);
        found.is_some()
    });
    assert!(stands, "nothing stands ready: {:?}", children(session.pid().as_raw().unsigned_abs()));
    found.unwrap()
}

/// Whether code with these limits runs in the sandbox that stands ready. It is cancelled.
fn is_taken(session: &mut Session, name: &str, limits: Value) -> bool {
    let (ready, words) = (spare(session), token(name));
    begin_with(session, &words, limits);
    let taken = !children(ready).is_empty();
    session.send(r#"{"op":"cancel"}"#);
    let (result, cancelled) = (session.answer(), session.answer());
    assert_eq!((&result["verdict"], &cancelled["cancelled"]), (&json!("cancelled"), &json!(true)), "{result}");
    no_process_is_left(&words);
    assert!(!Path::new(&format!("/proc/{ready}")).exists(), "the sandbox outlives its request, taken or not");
    taken
}

fn a_request_takes_the_sandbox_that_stands_ready_and_each_gets_its_own() {
    let mut session = Session::open(&[]);
    let first = spare(&session);
    assert!(is_taken(&mut session, "taken", json!({})));
    let second = spare(&session);
    assert_ne!(first, second);
    session.output("import os; open('kept', 'w').write('k'); open('/tmp/kept', 'w').write('t'); os.mkdir(os.path.expanduser('~/d'))");
    spare(&session);
    session.write("written", json!("w"));
    let there =
        "import os; print(open('kept').read(), open('/tmp/kept').read(), open('written').read(), os.listdir(os.path.expanduser('~')))";
    assert_eq!(session.output(there), "k t w ['d']\n");
    session.close();
}

fn what_a_request_asks_for_decides_whether_it_takes_what_stands_ready() {
    let mut session = Session::open(&[]);
    // What the job says is the request's own.
    assert!(is_taken(&mut session, "files", json!({"open_files": 64})));
    spare(&session);
    let limits = "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE))";
    let result = session.ask(json!({"op": "run", "code": limits, "limits": {"open_files": 64}}));
    assert_eq!(result["output"], "(64, 64)\n", "{result}");
    // What a cgroup says, where there is one, is in force already.
    let has_cgroup = !result["receipt"]["degraded"].to_string().contains("cgroup");
    assert_eq!(is_taken(&mut session, "memory", json!({"memory": "256MiB"})), !has_cgroup);
    spare(&session);
    let result = session.ask(json!({"op": "run", "code": "bytearray(300 << 20)", "limits": {"memory": "256MiB"}}));
    assert_eq!((&result["limits"]["memory_bytes"], &result["success"]), (&json!(256 << 20), &json!(false)), "{result}");
    // So is where stdin comes from; a control, that it is read.
    spare(&session);
    let read = "import sys, stat, os; print(repr(sys.stdin.read()), stat.S_ISCHR(os.fstat(0).st_mode))";
    assert_eq!(session.ask(json!({"op": "run", "code": read, "stdin": "given"}))["output"], "'given' False\n");
    spare(&session);
    assert_eq!(session.output(read), "'' True\n");
    // Files and arguments come with the job.
    spare(&session);
    let result = session.ask(json!({"op": "run", "code": "import sys; print(open('f').read(), sys.argv[1])", "files": {"f": "x"}, "args": ["y"], "language": "python"}));
    assert_eq!(result["output"], "x y\n", "{result}");
    // A request that is refused is so as ever, and the next one finds its sandbox.
    spare(&session);
    assert_eq!(session.ask(json!({"op": "run", "code": "1", "language": "none"}))["reason"], "unknown_language");
    assert!(is_taken(&mut session, "after", json!({})));
    session.close();
}

fn layers(result: &Value) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    result["receipt"]["layers"].as_array().unwrap().iter().map(|layer| (text(&layer["layer"]), text(&layer["known"]))).collect()
}

fn a_request_that_found_its_sandbox_ready_is_told_as_any_other() {
    let mut session = Session::open(&[]);
    let code = "import os; print(sum(range(100000)), len(os.sched_getaffinity(0)))";
    let line = json!({"op": "run", "code": code}).to_string();
    // The second of two lines that come together finds none ready.
    session.send(&format!("{line}\n{line}"));
    let (_, own) = (session.answer(), session.answer());
    let ready = spare(&session);
    let pause = Instant::now();
    // A wait, during which no clock of the request's may run.
    thread::sleep(Duration::from_millis(1500));
    assert_eq!(waiting(&session), Some(ready));
    let found = session.ask(json!({"op": "run", "code": code, "limits": {"wall": "30s"}}));
    assert_eq!((&found["output"], &found["verdict"], &found["started"]), (&own["output"], &json!("exited"), &json!(true)), "{found}");
    assert_eq!(layers(&found), layers(&own));
    assert_eq!(found["receipt"]["degraded"], own["receipt"]["degraded"]);
    for result in [&own, &found] {
        assert_eq!(result["receipt"]["plan_sha256"].as_str().unwrap().len(), 64);
        assert!(result["audit"]["run"].is_string() && result["audit"]["seq"].is_u64(), "{}", result["audit"]);
    }
    assert_ne!(found["audit"]["run"], own["audit"]["run"]);
    assert!(found["duration_ms"].as_u64().unwrap() < u64::try_from(pause.elapsed().as_millis()).unwrap() - 1000, "{found}");
    let usage = |result: &Value, what: &str| result["usage"][what].as_u64();
    assert!(usage(&found, "memory_peak_bytes") <= usage(&own, "memory_peak_bytes").map(|bytes| bytes + (1 << 20)), "{}", found["usage"]);
    // What the host does beside it tells in each alone.
    let cpu = |result: &Value| usage(result, "cpu_user_ms").unwrap() + usage(result, "cpu_system_ms").unwrap();
    let (mut of_found, mut of_own) = (cpu(&found), cpu(&own));
    for _ in 0..3 {
        session.send(&format!("{line}\n{line}"));
        let (first, second) = (session.answer(), session.answer());
        of_own = of_own.min(cpu(&first)).min(cpu(&second));
        spare(&session);
        of_found = of_found.min(cpu(&session.ask(json!({"op": "run", "code": code}))));
    }
    // Counted by the tick, ten milliseconds each.
    assert!(of_found <= of_own + of_own / 2 + 20, "{of_found} ms with a sandbox that stood ready, {of_own} ms without");
    session.close();
}

fn a_spare_that_was_killed_costs_its_request_nothing() {
    let mut session = Session::open(&[]);
    for _ in 0..2 {
        let ready = spare(&session);
        // While the session stands still it cannot see to it before its request comes.
        stop(session.pid());
        kill(Pid::from_raw(ready.cast_signed()), Signal::SIGKILL).unwrap();
        let dead = || fs::read_to_string(format!("/proc/{ready}/stat")).is_ok_and(|stat| stat.contains(") Z "));
        assert!(eventually(Duration::from_secs(5), dead), "it does not die");
        session.send(r#"{"op":"run","code":"print('ran')"}"#);
        kill(session.pid(), Signal::SIGCONT).unwrap();
        assert_eq!(session.answer()["output"], "ran\n");
    }
    assert!(is_taken(&mut session, "killed", json!({})));
    session.close();
}

fn a_session_that_waits_clears_away_a_spare_that_was_killed() {
    let mut session = Session::open(&[]);
    let launcher = session.pid().as_raw().unsigned_abs();
    let own = || cgroups_of(&BTreeSet::from([launcher])).len();
    for round in 0..2 {
        // It takes its place with each answer, and with nothing else.
        let ready = spare(&session);
        let with_it = own();
        kill(Pid::from_raw(ready.cast_signed()), Signal::SIGKILL).unwrap();
        assert!(eventually(Duration::from_secs(5), || !Path::new(&format!("/proc/{ready}")).exists()), "it is not waited for");
        assert!(eventually(Duration::from_secs(5), || with_it == 0 || own() < with_it), "its cgroup is left");
        assert!(dead_records().is_empty(), "{:?}", dead_records());
        session.write("between", json!("w"));
        let mut before = Vec::new();
        // It may still be on its way from its answer to its wait.
        let sleeps = || fs::read_to_string(format!("/proc/{launcher}/stat")).is_ok_and(|stat| stat.contains(") S "));
        assert!(eventually(Duration::from_secs(5), || sleeps() && std::mem::replace(&mut before, activity(launcher)) == before));
        thread::sleep(Duration::from_millis(200));
        assert_eq!((activity(launcher), children(launcher)), (before, Vec::new()), "it does something: round {round}");
        assert_eq!(session.output("print(open('between').read())"), "w\n");
    }
    assert!(is_taken(&mut session, "answered", json!({})));
    session.close();
}

fn a_spare_that_stands_still_gives_way_to_another_sandbox() {
    let mut session = Session::open(&[]);
    // A control: one that can go on is taken.
    assert!(is_taken(&mut session, "goes on", json!({})));
    let (ready, begun) = (spare(&session), Instant::now());
    stop(Pid::from_raw(ready.cast_signed()));
    let result = session.run("open('ran', 'a').write('x'); print(open('ran').read())");
    assert_eq!((&result["verdict"], &result["output"]), (&json!("exited"), &json!("x\n")), "{result}");
    // It had its time, but not the time of a sandbox that is set up from the beginning.
    assert!((9..50).contains(&begun.elapsed().as_secs()), "{:?}", begun.elapsed());
    assert!(!Path::new(&format!("/proc/{ready}")).exists(), "it still stands there");
    assert!(is_taken(&mut session, "after it", json!({})));
    // A line to cancel need not wait so long.
    stop(Pid::from_raw(spare(&session).cast_signed()));
    session.send(r#"{"op":"run","code":"print('never')"}"#);
    session.send(r#"{"op":"cancel"}"#);
    let result = session.answer();
    assert_eq!((&result["verdict"], &result["started"]), (&json!("cancelled"), &json!(false)), "{result}");
    assert_eq!(session.answer()["cancelled"], true);
    session.close();
}

fn a_reset_ends_the_spare_and_what_it_had_mounted() {
    let mut session = Session::open(&[]);
    spare(&session);
    // What code has closed is opened when the next begins, and not before.
    session.output("import os; os.chmod('/tmp', 0)");
    thread::sleep(Duration::from_millis(100));
    assert_eq!(waiting(&session), None);
    session.refused(json!({"op": "read", "path": "/tmp/x"}), "permission_denied");
    session.output("open('/tmp/kept', 'w')");
    let ready = spare(&session);
    assert_eq!(session.ask(json!({"op": "reset"}))["ok"], true);
    assert!(!Path::new(&format!("/proc/{ready}")).exists(), "it holds what was reset");
    assert_ne!(spare(&session), ready);
    assert_eq!(session.output("import os; print(os.listdir('/tmp'))"), "[]\n");
    session.close();
}

fn what_is_hidden_meanwhile_is_hidden_from_the_next_request() {
    let host = scratch();
    let (secret, read) = (
        token("env"),
        "import os\nfor name in ('.env', 'd/.env', 'plain'):\n  try: print(open(name).read())\n  except OSError as error: print(error.errno)",
    );
    put(&host.join("plain"), "plain");
    let policies = PolicyDirectory::new();
    let policy = policies.write("hides", &derived("[scratch]\nhidden = { add = [\"d/.env\"] }"));
    let mut session = Session::open(&["--policy", &policy, "--scratch", text(&host)]);
    spare(&session);
    // One that was not there when the spare was set up.
    put(&host.join(".env"), &secret);
    assert_eq!(session.output(read), "13\n2\nplain\n");
    // One in the place of what the spare covers: the kernel takes its cover off.
    spare(&session);
    put(&host.join("new"), &secret);
    fs::rename(host.join("new"), host.join(".env")).unwrap();
    assert_eq!(session.output(read), "13\n2\nplain\n");
    // One whose directory has moved with its cover, and another in its old place.
    fs::create_dir(host.join("d")).unwrap();
    crate::stockade::give(&host.join("d"));
    put(&host.join("d/.env"), &secret);
    assert_eq!(session.output(read), "13\n13\nplain\n");
    spare(&session);
    fs::rename(host.join("d"), host.join("old")).unwrap();
    fs::create_dir(host.join("d")).unwrap();
    crate::stockade::give(&host.join("d"));
    put(&host.join("d/.env"), &secret);
    fs::remove_file(host.join("old/.env")).unwrap();
    assert_eq!(session.output(read), "13\n13\nplain\n");
    // A control: what nothing hides is read as it is now.
    spare(&session);
    put(&host.join("plain"), "another");
    fs::remove_file(host.join(".env")).unwrap();
    assert_eq!(session.output(read), "2\n13\nanother\n");
    session.close();
}

fn what_changes_names_on_the_host_does_not_change_its_protection() {
    let (host, secret) = (scratch(), token("exchanged"));
    put(&host.join(".env"), "hidden");
    put(&host.join("ro1"), "read-only");
    let policies = PolicyDirectory::new();
    let policy = policies.write("exchanges", &derived("[scratch]\nread_only = { add = [\"ro*\"] }"));
    let mut session = Session::open(&["--policy", &policy, "--scratch", text(&host)]);
    let read = "for name in ('.env', 'ro1'):\n  try: print(open(name).read())\n  except OSError as error: print(error.errno)";
    // A control: with their names unchanged, what stands ready is taken.
    assert!(is_taken(&mut session, "unchanged", json!({})));
    let ready = spare(&session);
    assert_eq!(session.output(read), "13\nread-only\n");
    assert!(!Path::new(&format!("/proc/{ready}")).exists());
    // Its covers go with the files.
    spare(&session);
    for (from, to) in [(".env", "other"), ("ro1", ".env"), ("other", "ro1")] {
        fs::rename(host.join(from), host.join(to)).unwrap();
    }
    fs::write(host.join(".env"), &secret).unwrap();
    assert_eq!(session.output(read), "13\nhidden\n");
    assert!(is_taken(&mut session, "as they are now", json!({})));
    session.close();
}

fn a_path_of_the_host_that_is_another_now_is_shown_as_it_is() {
    let policies = PolicyDirectory::new();
    let shown = if is_root() { policies.0.join("shown") } else { directory().join("shown") };
    let make = |path: &Path, what: &str| {
        fs::create_dir(path).unwrap();
        fs::write(path.join("file"), what).unwrap();
    };
    make(&shown, "first");
    let lines = format!("[filesystem]\nread_only_optional = {{ add = [{shown:?}] }}");
    let mut session = Session::open(&["--policy", &policies.write("shows", &derived(&lines))]);
    let read = format!("print(open({:?}).read())", shown.join("file"));
    spare(&session);
    assert_eq!(session.output(&read), "first\n");
    spare(&session);
    fs::rename(&shown, shown.with_file_name("moved")).unwrap();
    make(&shown, "second");
    assert_eq!(session.output(&read), "second\n");
    spare(&session);
    fs::remove_dir_all(&shown).unwrap();
    assert!(session.run(&read)["error"].as_str().unwrap().contains("FileNotFoundError"));
    session.close();
}

/// How often a process has been given a CPU, and how long it has used one.
fn activity(pid: u32) -> Vec<String> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let switches = status.lines().filter(|line| line.contains("ctxt_switches")).map(str::to_owned);
    switches.chain([fs::read_to_string(format!("/proc/{pid}/schedstat")).unwrap_or_default()]).collect()
}

fn a_waiting_session_does_nothing() {
    let mut session = Session::open(&[]);
    session.output("print(1)");
    let ready = spare(&session);
    let both = || [activity(session.pid().as_raw().unsigned_abs()), activity(ready)];
    // It may still be on its way from the set-up to its wait.
    let mut before = both();
    assert!(eventually(Duration::from_secs(5), || std::mem::replace(&mut before, both()) == both()));
    thread::sleep(Duration::from_millis(500));
    assert_eq!(both(), before);
    let status = fs::read_to_string(format!("/proc/{ready}/status")).unwrap();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    assert!(resident.trim().trim_end_matches(" kB").parse::<u64>().unwrap() < 256, "{resident}");
    session.close();
}

fn a_session_that_ends_with_a_spare_leaves_nothing() {
    let host = scratch();
    let (before, mounts_before) = (processes(), mounts());
    let mut session = Session::open(&["--scratch", text(&host)]);
    let launchers = BTreeSet::from([session.pid().as_raw().unsigned_abs()]);
    session.output("print(1)");
    let ready = spare(&session);
    session.end_input();
    assert_eq!(session.ended().code(), Some(0));
    assert!(!Path::new(&format!("/proc/{ready}")).exists());
    assert!(processes_around(&host, &before).is_empty(), "{:?}", processes_around(&host, &before));
    assert_eq!(cgroups_of(&launchers), Vec::<std::path::PathBuf>::new());
    assert_eq!((mounts(), dead_records()), (mounts_before, Vec::new()));
    // A signal ends it as well.
    let mut session = Session::open(&["--scratch", text(&host)]);
    let ready = spare(&session);
    kill(session.pid(), Signal::SIGTERM).unwrap();
    assert_eq!(session.ended().code(), Some(143));
    assert!(!Path::new(&format!("/proc/{ready}")).exists());
    assert_eq!(fs::read_dir(&host).unwrap().count(), 0);
}

fn a_session_killed_beside_its_spare_leaves_nothing_running() {
    let host = scratch();
    let mut launchers = BTreeSet::new();
    let before = processes();
    for runs in [false, true] {
        let mut session = Session::open(&["--scratch", text(&host)]);
        launchers.insert(session.pid().as_raw().unsigned_abs());
        let ready = spare(&session);
        if runs {
            begin(&mut session, &token("beside"));
            assert!(!children(ready).is_empty());
        }
        kill(session.pid(), Signal::SIGKILL).unwrap();
        drop(session);
        let gone = || processes_around(&host, &before).is_empty() && !Path::new(&format!("/proc/{ready}")).exists();
        assert!(eventually(Duration::from_secs(5), gone), "{:?}", processes_around(&host, &before));
    }
    the_next_start_has_swept(&launchers);
    exec(json!({"code": "", "scratch": text(&host)})).succeeded();
    assert_eq!(fs::read_dir(&host).unwrap().count(), 0, "a program's file is left");
}
