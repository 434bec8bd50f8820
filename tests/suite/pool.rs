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

use crate::support::{
    exec::{exec, scratch, text, token, write_file},
    leftovers::{cgroups_of, dead_records, mounts, no_process_is_left, processes, processes_around, the_next_start_has_swept},
    policy_dir::{PolicyDirectory, derived},
    runner::{directory, eventually, is_root, test},
    session::{Session, begin, begin_with, children, is_screener, prepared_sandbox, stop, waiting},
    starts::{interpreter, session_without_template},
};

/// A session in which no interpreter is started ahead, and which therefore gives its prepared sandbox
/// to requests with other arguments too.
fn session() -> (PolicyDirectory, Session) {
    let policies = PolicyDirectory::new();
    let policy = policies.write("variable", &derived("[environment.set]\nPYTHONPATH = \"/nowhere\""));
    let session = Session::open(&["--policy", &policy]);
    (policies, session)
}

/// Whether code with these limits runs in the sandbox that stands ready. It is cancelled.
fn is_taken(session: &mut Session, name: &str, limits: Value) -> bool {
    let (ready, words) = (prepared_sandbox(session), token(name));
    begin_with(session, &words, limits);
    let taken = !children(ready).is_empty();
    session.send(r#"{"op":"cancel"}"#);
    let (result, cancelled) = (session.answer(), session.answer());
    assert_eq!((&result["verdict"], &cancelled["cancelled"]), (&json!("cancelled"), &json!(true)), "{result}");
    no_process_is_left(&words);
    assert!(!Path::new(&format!("/proc/{ready}")).exists(), "the sandbox outlives its request, taken or not");
    taken
}

test!(Both, each_request_takes_its_own_prepared_sandbox, seconds 60);
fn each_request_takes_its_own_prepared_sandbox() {
    let (_policies, mut session) = session();
    let first = prepared_sandbox(&session);
    assert!(is_taken(&mut session, "taken", json!({})));
    let second = prepared_sandbox(&session);
    assert_ne!(first, second);
    session.output("import os; open('kept', 'w').write('k'); open('/tmp/kept', 'w').write('t'); os.mkdir(os.path.expanduser('~/d'))");
    prepared_sandbox(&session);
    session.write("written", json!("w"));
    let there =
        "import os; print(open('kept').read(), open('/tmp/kept').read(), open('written').read(), os.listdir(os.path.expanduser('~')))";
    assert_eq!(session.output(there), "k t w ['d']\n");
    session.close();
}

test!(Both, a_request_takes_a_prepared_sandbox_only_where_it_fits, seconds 60);
fn a_request_takes_a_prepared_sandbox_only_where_it_fits() {
    let (_policies, mut session) = session();
    // The job's fields are the request's own.
    assert!(is_taken(&mut session, "files", json!({"open_files": 64})));
    prepared_sandbox(&session);
    let limits = "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE))";
    let result = session.ask(json!({"op": "run", "code": limits, "limits": {"open_files": 64}}));
    assert_eq!(result["output"], "(64, 64)\n", "{result}");
    // The limits of a cgroup, where there is one, are in force already.
    let has_cgroup = !result["receipt"]["degraded"].to_string().contains("cgroup");
    assert_eq!(is_taken(&mut session, "memory", json!({"memory": "256MiB"})), !has_cgroup);
    prepared_sandbox(&session);
    let result = session.ask(json!({"op": "run", "code": "bytearray(300 << 20)", "limits": {"memory": "256MiB"}}));
    assert_eq!((&result["limits"]["memory_bytes"], &result["success"]), (&json!(256 << 20), &json!(false)), "{result}");
    // So is where stdin comes from; a control, that it is read.
    prepared_sandbox(&session);
    let read = "import sys, stat, os; print(repr(sys.stdin.read()), stat.S_ISCHR(os.fstat(0).st_mode))";
    assert_eq!(session.ask(json!({"op": "run", "code": read, "stdin": "given"}))["output"], "'given' False\n");
    prepared_sandbox(&session);
    assert_eq!(session.output(read), "'' True\n");
    // Files and arguments come with the job.
    prepared_sandbox(&session);
    let result = session.ask(json!({"op": "run", "code": "import sys; print(open('f').read(), sys.argv[1])", "files": {"f": "x"}, "args": ["y"], "language": "python"}));
    assert_eq!(result["output"], "x y\n", "{result}");
    // A request that is refused is so as ever, and the next one finds its sandbox.
    prepared_sandbox(&session);
    assert_eq!(session.ask(json!({"op": "run", "code": "1", "language": "none"}))["reason"], "unknown_language");
    assert!(is_taken(&mut session, "after", json!({})));
    session.close();
}

fn layers(result: &Value) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    result["receipt"]["layers"].as_array().unwrap().iter().map(|layer| (text(&layer["layer"]), text(&layer["known"]))).collect()
}

test!(Both, a_run_in_a_prepared_sandbox_is_reported_as_any_other, seconds 60);
fn a_run_in_a_prepared_sandbox_is_reported_as_any_other() {
    let policies = PolicyDirectory::new();
    let mut session = session_without_template(&policies);
    let code = "import os; print(sum(range(100000)), len(os.sched_getaffinity(0)))";
    let line = json!({"op": "run", "code": code}).to_string();
    // The second of two lines that come together finds none ready.
    session.send(&format!("{line}\n{line}"));
    let (_, own) = (session.answer(), session.answer());
    interpreter(&session);
    let ready = prepared_sandbox(&session);
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
        prepared_sandbox(&session);
        of_found = of_found.min(cpu(&session.ask(json!({"op": "run", "code": code}))));
    }
    // Counted by the tick, ten milliseconds each.
    assert!(of_found <= of_own + of_own / 2 + 20, "{of_found} ms with a sandbox that stood ready, {of_own} ms without");
    session.close();
}

test!(Both, a_killed_prepared_sandbox_costs_its_request_nothing, seconds 60);
fn a_killed_prepared_sandbox_costs_its_request_nothing() {
    let (_policies, mut session) = session();
    for _ in 0..2 {
        let ready = prepared_sandbox(&session);
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

test!(serial Both, a_waiting_session_clears_away_a_killed_prepared_sandbox, seconds 60);
fn a_waiting_session_clears_away_a_killed_prepared_sandbox() {
    let (_policies, mut session) = session();
    let launcher = session.pid().as_raw().unsigned_abs();
    let own = || cgroups_of(&BTreeSet::from([launcher])).len();
    for round in 0..2 {
        // It takes its place with each answer, and with nothing else.
        let ready = prepared_sandbox(&session);
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
        let has_sandbox = || children(launcher).into_iter().any(|pid| !is_screener(pid));
        assert_eq!((activity(launcher), has_sandbox()), (before, false), "it does something: round {round}");
        assert_eq!(session.output("print(open('between').read())"), "w\n");
    }
    assert!(is_taken(&mut session, "answered", json!({})));
    session.close();
}

test!(Both, a_stopped_prepared_sandbox_is_replaced, seconds 60);
fn a_stopped_prepared_sandbox_is_replaced() {
    let (_policies, mut session) = session();
    // A control: one that can go on is taken.
    assert!(is_taken(&mut session, "goes on", json!({})));
    let (ready, begun) = (prepared_sandbox(&session), Instant::now());
    stop(Pid::from_raw(ready.cast_signed()));
    let result = session.run("open('ran', 'a').write('x'); print(open('ran').read())");
    assert_eq!((&result["verdict"], &result["output"]), (&json!("exited"), &json!("x\n")), "{result}");
    // It had its time, but not the time of a sandbox that is set up from the beginning.
    assert!((9..50).contains(&begun.elapsed().as_secs()), "{:?}", begun.elapsed());
    assert!(!Path::new(&format!("/proc/{ready}")).exists(), "it still stands there");
    assert!(is_taken(&mut session, "after it", json!({})));
    // A line to cancel need not wait so long.
    stop(Pid::from_raw(prepared_sandbox(&session).cast_signed()));
    session.send(r#"{"op":"run","code":"print('never')"}"#);
    session.send(r#"{"op":"cancel"}"#);
    let result = session.answer();
    assert_eq!((&result["verdict"], &result["started"]), (&json!("cancelled"), &json!(false)), "{result}");
    assert_eq!(session.answer()["cancelled"], true);
    session.close();
}

test!(Both, a_reset_ends_the_prepared_sandbox_and_its_mounts, seconds 60);
fn a_reset_ends_the_prepared_sandbox_and_its_mounts() {
    let policies = PolicyDirectory::new();
    let mut session = session_without_template(&policies);
    prepared_sandbox(&session);
    // What code has closed is opened when the next begins, and not before.
    session.output("import os; os.chmod('/tmp', 0)");
    thread::sleep(Duration::from_millis(100));
    assert_eq!(waiting(&session), None);
    session.refused(json!({"op": "read", "path": "/tmp/x"}), "permission_denied");
    session.output("open('/tmp/kept', 'w')");
    let ready = prepared_sandbox(&session);
    assert_eq!(session.ask(json!({"op": "reset"}))["ok"], true);
    assert!(!Path::new(&format!("/proc/{ready}")).exists(), "it holds what was reset");
    assert_ne!(prepared_sandbox(&session), ready);
    assert_eq!(session.output("import os; print(os.listdir('/tmp'))"), "[]\n");
    session.close();
}

test!(Both, what_is_hidden_meanwhile_is_hidden_from_the_next_request, seconds 60);
fn what_is_hidden_meanwhile_is_hidden_from_the_next_request() {
    let host = scratch();
    let (secret, read) = (
        token("env"),
        "import os\nfor name in ('.env', 'd/.env', 'plain'):\n  try: print(open(name).read())\n  except OSError as error: print(error.errno)",
    );
    write_file(&host.join("plain"), "plain");
    let policies = PolicyDirectory::new();
    let policy = policies.write("hides", &derived("[scratch]\nhidden = { add = [\"d/.env\"] }"));
    let mut session = Session::open(&["--policy", &policy, "--scratch", text(&host)]);
    prepared_sandbox(&session);
    // One that was not there when the sandbox was prepared.
    write_file(&host.join(".env"), &secret);
    assert_eq!(session.output(read), "13\n2\nplain\n");
    // One in the place of what the prepared sandbox covers: the kernel takes its cover off.
    prepared_sandbox(&session);
    write_file(&host.join("new"), &secret);
    fs::rename(host.join("new"), host.join(".env")).unwrap();
    assert_eq!(session.output(read), "13\n2\nplain\n");
    // One whose directory has moved with its cover, and another in its old place.
    fs::create_dir(host.join("d")).unwrap();
    crate::support::exec::chown_to_owner(&host.join("d"));
    write_file(&host.join("d/.env"), &secret);
    assert_eq!(session.output(read), "13\n13\nplain\n");
    prepared_sandbox(&session);
    fs::rename(host.join("d"), host.join("old")).unwrap();
    fs::create_dir(host.join("d")).unwrap();
    crate::support::exec::chown_to_owner(&host.join("d"));
    write_file(&host.join("d/.env"), &secret);
    fs::remove_file(host.join("old/.env")).unwrap();
    assert_eq!(session.output(read), "13\n13\nplain\n");
    // A control: what nothing hides is read as it is now.
    prepared_sandbox(&session);
    write_file(&host.join("plain"), "another");
    fs::remove_file(host.join(".env")).unwrap();
    assert_eq!(session.output(read), "2\n13\nanother\n");
    session.close();
}

test!(Both, what_changes_names_on_the_host_does_not_change_its_protection, seconds 60);
fn what_changes_names_on_the_host_does_not_change_its_protection() {
    let (host, secret) = (scratch(), token("exchanged"));
    write_file(&host.join(".env"), "hidden");
    write_file(&host.join("ro1"), "read-only");
    let policies = PolicyDirectory::new();
    let policy = policies.write("exchanges", &derived("[scratch]\nread_only = { add = [\"ro*\"] }"));
    let mut session = Session::open(&["--policy", &policy, "--scratch", text(&host)]);
    let read = "for name in ('.env', 'ro1'):\n  try: print(open(name).read())\n  except OSError as error: print(error.errno)";
    // A control: with their names unchanged, what stands ready is taken.
    assert!(is_taken(&mut session, "unchanged", json!({})));
    let ready = prepared_sandbox(&session);
    assert_eq!(session.output(read), "13\nread-only\n");
    assert!(!Path::new(&format!("/proc/{ready}")).exists());
    // Its covers go with the files.
    prepared_sandbox(&session);
    for (from, to) in [(".env", "other"), ("ro1", ".env"), ("other", "ro1")] {
        fs::rename(host.join(from), host.join(to)).unwrap();
    }
    fs::write(host.join(".env"), &secret).unwrap();
    assert_eq!(session.output(read), "13\nhidden\n");
    assert!(is_taken(&mut session, "as they are now", json!({})));
    session.close();
}

test!(Both, a_path_of_the_host_that_is_another_now_is_shown_as_it_is, seconds 60);
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
    prepared_sandbox(&session);
    assert_eq!(session.output(&read), "first\n");
    prepared_sandbox(&session);
    fs::rename(&shown, shown.with_file_name("moved")).unwrap();
    make(&shown, "second");
    assert_eq!(session.output(&read), "second\n");
    prepared_sandbox(&session);
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

test!(serial Both, a_waiting_session_does_nothing, seconds 60);
fn a_waiting_session_does_nothing() {
    let policies = PolicyDirectory::new();
    let mut session = session_without_template(&policies);
    session.output("print(1)");
    let ready = prepared_sandbox(&session);
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

test!(serial Both, a_session_that_ends_with_a_prepared_sandbox_leaves_nothing, seconds 60);
fn a_session_that_ends_with_a_prepared_sandbox_leaves_nothing() {
    let host = scratch();
    let (before, mounts_before) = (processes(), mounts());
    let mut session = Session::open(&["--scratch", text(&host)]);
    let launchers = BTreeSet::from([session.pid().as_raw().unsigned_abs()]);
    session.output("print(1)");
    let ready = prepared_sandbox(&session);
    session.end_input();
    assert_eq!(session.ended().code(), Some(0));
    assert!(!Path::new(&format!("/proc/{ready}")).exists());
    assert!(processes_around(&host, &before).is_empty(), "{:?}", processes_around(&host, &before));
    assert_eq!(cgroups_of(&launchers), Vec::<std::path::PathBuf>::new());
    assert_eq!((mounts(), dead_records()), (mounts_before, Vec::new()));
    // A signal ends it as well.
    let mut session = Session::open(&["--scratch", text(&host)]);
    let ready = prepared_sandbox(&session);
    kill(session.pid(), Signal::SIGTERM).unwrap();
    assert_eq!(session.ended().code(), Some(143));
    assert!(!Path::new(&format!("/proc/{ready}")).exists());
    assert_eq!(fs::read_dir(&host).unwrap().count(), 0);
}

test!(serial Both, a_session_killed_beside_its_prepared_sandbox_leaves_nothing_running, seconds 60);
fn a_session_killed_beside_its_prepared_sandbox_leaves_nothing_running() {
    let host = scratch();
    let mut launchers = BTreeSet::new();
    let before = processes();
    for runs in [false, true] {
        let mut session = Session::open(&["--scratch", text(&host)]);
        launchers.insert(session.pid().as_raw().unsigned_abs());
        let ready = prepared_sandbox(&session);
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
