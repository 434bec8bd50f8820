//! `ps` and `kill`: who sees which runs, that an ended run leaves nothing, and that no process
//! but a run's launcher gets a signal.

use std::{
    fs::{self, File},
    io::{BufRead, BufReader},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::{Child, Stdio},
    time::Duration,
};

use nix::mount::{MsFlags, mount};
use serde_json::{Value, json};

use crate::support::{
    audit_log::{own_log, records},
    exec::{
        ExecResult, OWNER, chown_to_owner, exec, program_path, run_under, run_with_stdin, scratch, scratch_named, start, stockade, text,
    },
    leftovers::{dead_records, names, registry},
    policy_dir::{PolicyDirectory, command_under_etc, command_with_etc, derived},
    runner::{directory, eventually, is_root, test, wait_within},
    session::Session,
    timeouts::scaled_limit,
};

const CODE: &str = "open('running', 'w').close()\nimport signal, time\nfor number in (1, 2, 3, 15): signal.signal(number, signal.SIG_IGN)\ntime.sleep(600)";

fn request(id: &str, scratch: &Path) -> String {
    json!({"code": CODE, "id": id, "scratch": text(scratch)}).to_string()
}

#[track_caller]
fn runs(sign: &Path) {
    assert!(eventually(Duration::from_secs(10), || sign.join("running").exists()), "it does not run");
}

fn started(id: &str) -> Child {
    let scratch = scratch_named(id);
    let child = start(&mut stockade(["exec"]), request(id, &scratch).as_bytes());
    runs(&scratch);
    child
}

fn listed() -> Vec<Value> {
    let output = stockade(["ps", "--json"]).output().unwrap();
    let all: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((output.status.code(), &all["schema"]), (Some(0), &json!(1)));
    all["runs"].as_array().unwrap().clone()
}

/// The number of the run whose request has this id.
#[track_caller]
fn number(id: &str) -> String {
    let all = listed();
    let run = all.iter().find(|run| run["id"] == id).unwrap_or_else(|| panic!("{id}: {all:?}"));
    run["run"].as_str().unwrap().to_owned()
}

fn kill(run: &str) -> (Option<i32>, String) {
    let output = stockade(["kill", run]).output().unwrap();
    assert!(output.stdout.is_empty());
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

test!(Both, ps_lists_what_runs_and_nothing_else, seconds 60);
fn ps_lists_what_runs_and_nothing_else() {
    let log = own_log();
    assert_eq!(listed(), Vec::<Value>::new());
    let mut requested = started("asked");
    let command = "open('running', 'w').close(); import time; time.sleep(600)";
    let place = scratch_named("command");
    let mut commanded = stockade(["run", "--scratch", text(&place), "--", "python3", "-c", command]).spawn().unwrap();
    runs(&place);
    let place = scratch_named("session");
    let mut session = Session::open(&["--scratch", text(&place)]);
    session.send(&json!({"op": "run", "code": CODE, "id": "in session"}).to_string());
    runs(&place);
    let all = listed();
    let column = |name: &str| all.iter().map(|run| run[name].clone()).collect::<Vec<_>>();
    assert_eq!(column("via"), ["exec", "run", "session"], "{all:?}");
    assert_eq!(column("id"), [json!("asked"), Value::Null, json!("in session")], "{all:?}");
    assert_eq!(column("pid")[..2], [json!(requested.id()), json!(commanded.id())], "{all:?}");
    assert!(
        column("policy").iter().all(|policy| policy == "default")
            && column("policy_sha256").iter().all(|hash| hash.as_str().unwrap().len() == 64)
    );
    assert!(column("uid").iter().all(|uid| *uid == json!(nix::unistd::getuid().as_raw())), "{all:?}");
    let table = String::from_utf8(stockade(["ps"]).output().unwrap().stdout).unwrap();
    let lines: Vec<&str> = table.lines().collect();
    assert!(lines.len() == 4 && lines[0].starts_with("ID ") && lines[2].contains("  python3 -c open('running'"), "{table}");
    assert!(lines[1].starts_with(all[0]["run"].as_str().unwrap()) && lines[3].ends_with("session (in session)"), "{table}");
    // A launcher that was killed has no run any more, and one that ends has none.
    commanded.kill().unwrap();
    commanded.wait().unwrap();
    requested.kill().unwrap();
    requested.wait().unwrap();
    assert_eq!(kill(&number("in session")), (Some(0), String::new()));
    assert_eq!(session.answer()["verdict"], "cancelled");
    // The session's next start may be writing down a killed one, whose record it holds meanwhile.
    assert!(eventually(Duration::from_secs(5), || listed().is_empty()), "{:?}", listed());
    session.close();
    assert!(records(&log).len() > 1);
}

test!(Both, kill_ends_a_run_as_cancelled_and_waits_for_its_end, seconds 60);
fn kill_ends_a_run_as_cancelled_and_waits_for_its_end() {
    let log = own_log();
    let child = started("ended");
    let run = number("ended");
    assert_eq!(kill(&run), (Some(0), String::new()));
    assert_eq!(listed(), Vec::<Value>::new());
    assert!(names(&registry()).iter().all(|name| !name.starts_with("run-")), "{:?}", names(&registry()));
    let done = ExecResult::of(child.wait_with_output().unwrap());
    done.expect(json!({"verdict": "cancelled", "code": 143, "started": true}));
    assert_eq!((&records(&log)[1]["run"], &records(&log)[1]["verdict"]), (&json!(run), &json!("cancelled")));
    // A command, which would be passed a SIGTERM and ignores it.
    let place = scratch_named("command");
    let mut command = stockade(["run", "--scratch", text(&place), "--", "python3", "-c", CODE]).spawn().unwrap();
    runs(&place);
    assert_eq!(kill(listed()[0]["run"].as_str().unwrap()), (Some(0), String::new()));
    let status = wait_within(&mut command, Duration::from_secs(5)).expect("it has ended");
    assert_eq!((status.code(), &records(&log)[2]["verdict"]), (Some(143), &json!("cancelled")));
    // A session goes on without it.
    let place = scratch_named("session");
    let mut session = Session::open(&["--scratch", text(&place)]);
    session.send(&json!({"op": "run", "code": CODE, "id": "s"}).to_string());
    runs(&place);
    assert_eq!(kill(&number("s")), (Some(0), String::new()));
    assert_eq!(session.answer()["verdict"], "cancelled");
    assert_eq!(session.output("print('on')"), "on\n");
    session.close();
    for unknown in [run.as_str(), "nonsense", ""] {
        let (status, said) = kill(unknown);
        assert!(status == Some(1) && said.contains("no run") && said.contains("stockade ps"), "{status:?}: {said}");
    }
}

test!(RootOnly, a_caller_of_sudo_sees_and_ends_its_own_runs_only);
fn a_caller_of_sudo_sees_and_ends_its_own_runs_only() {
    own_log();
    let roots_own = started("roots");
    let own = scratch_named("own");
    let grants = format!("[[grant]]\nuid = {OWNER}\npolicies = [\"default\"]\nscratch = [{:?}]\n", text(&own));
    let id = OWNER.to_string();
    let variables = [("SUDO_UID", id.as_str()), ("SUDO_GID", id.as_str()), ("SUDO_USER", "agent")];
    let files = [("stockade/grants.toml", grants.as_str())];
    let child = start(&mut command_with_etc(&files, &variables, &["exec"]), request("own", &own).as_bytes());
    runs(&own);
    let sudo = |arguments: &[&str]| {
        let output = stockade(arguments).envs(variables).output().unwrap();
        (output.status.code(), String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
    };
    let (roots, agents) = (number("roots"), number("own"));
    let (_, seen, _) = sudo(&["ps"]);
    assert!(seen.contains(&agents) && !seen.contains(&roots), "{seen}");
    let (status, _, said) = sudo(&["kill", &roots]);
    assert!(status == Some(1) && said.contains(&format!("belongs to uid 0, not to uid {OWNER}")), "{said}");
    assert_eq!(listed().len(), 2);
    assert_eq!(sudo(&["kill", &agents]).0, Some(0));
    ExecResult::of(child.wait_with_output().unwrap()).expect(json!({"verdict": "cancelled"}));
    assert_eq!(kill(&roots).0, Some(0));
    ExecResult::of(roots_own.wait_with_output().unwrap()).expect(json!({"verdict": "cancelled"}));
}

test!(serial RootOnly, root_sees_and_ends_the_runs_of_an_ordinary_user);
fn root_sees_and_ends_the_runs_of_an_ordinary_user() {
    own_log();
    let home = directory().join("users");
    fs::create_dir(&home).unwrap();
    chown_to_owner(&home);
    let place = scratch_named("rootless");
    let id = OWNER.to_string();
    let user = ["setpriv", "--reuid", &id, "--regid", &id, "--clear-groups", "--inh-caps=-all", "--"];
    let program = std::env::var("STOCKADE").unwrap_or_else(|_| crate::support::exec::program_path().unwrap().display().to_string());
    let mut command = run_under(&[&user[..], &[&program, "exec"]].concat());
    command.env("HOME", &home).env_remove("XDG_RUNTIME_DIR");
    let child = start(&mut command, request("rootless", &place).as_bytes());
    runs(&place);
    let all = listed();
    assert_eq!((all.len(), &all[0]["uid"], &all[0]["id"]), (1, &json!(OWNER), &json!("rootless")), "{all:?}");
    assert_eq!(kill(all[0]["run"].as_str().unwrap()), (Some(0), String::new()));
    ExecResult::of(child.wait_with_output().unwrap()).expect(json!({"verdict": "cancelled"}));
}

test!(Both, kill_signals_no_process_but_the_launcher, seconds 60);
/// A record can outlive its launcher, whose pid another process then has; or name any pid.
fn kill_signals_no_process_but_the_launcher() {
    own_log();
    let mut run = started("gone");
    let number = number("gone");
    let record = |registry: &Path| -> PathBuf {
        names(registry).into_iter().find(|name| name.starts_with("run-")).map(|name| registry.join(name)).unwrap()
    };
    let noted = fs::read_to_string(record(&registry())).unwrap();
    // One that answers the signal which ends runs.
    let script = "trap 'echo signalled; exit' URG; echo ready; while :; do sleep 0.05; done";
    let mut bystander = run_under(&["sh", "-c", script]).stdout(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(bystander.stdout.take().unwrap());
    let mut line = String::new();
    said.read_line(&mut line).unwrap();
    run.kill().unwrap();
    run.wait().unwrap();
    let path = record(&registry());
    // The launcher of a session alone gets no SIGTERM, which would end this process.
    let own = noted.replace(&format!("\"pid\":{}", run.id()), &format!("\"pid\":{}", bystander.id()));
    let own = own.replace("\"via\":\"exec\"", "\"via\":\"session\"");
    assert_ne!(own, noted);
    fs::write(&path, &own).unwrap();
    // Its lock is free: no launcher has it.
    assert_eq!(kill(&number).0, Some(1));
    // Somebody holds the lock, but not this process.
    let held = File::open(&path).unwrap();
    held.lock().unwrap();
    let (status, said_of_it) = kill(&number);
    assert!(status == Some(125) && said_of_it.contains("has not ended within"), "{status:?}: {said_of_it}");
    drop(held);
    // The control: that process would have said so.
    assert!(bystander.try_wait().unwrap().is_none());
    run_under(&["kill", "-URG", &bystander.id().to_string()]).status().unwrap();
    line.clear();
    said.read_line(&mut line).unwrap();
    assert_eq!(line, "signalled\n");
    bystander.wait().unwrap();
    crate::support::exec::exec(json!({"code": ""})).succeeded();
    assert_eq!(dead_records(), Vec::<String>::new());
}

test!(Both, the_signal_of_kill_ends_no_run_by_itself);
fn the_signal_of_kill_ends_no_run_by_itself() {
    own_log();
    let child = started("urgent");
    // As programs in Go send it to themselves, and runc to what it has started.
    for _ in 0..20 {
        run_under(&["kill", "-URG", &child.id().to_string()]).status().unwrap();
    }
    let run = number("urgent");
    // The control: with its word it does.
    assert_eq!(kill(&run), (Some(0), String::new()));
    ExecResult::of(child.wait_with_output().unwrap()).expect(json!({"verdict": "cancelled"}));
}

test!(Both, the_signal_that_ends_one_run_ends_no_other_of_its_session, seconds 60);
/// It can come when that run has ended, and waits for the next to look at it.
fn the_signal_that_ends_one_run_ends_no_other_of_its_session() {
    own_log();
    let place = scratch_named("session");
    let mut session = Session::open(&["--scratch", text(&place)]);
    let tell = |session: &Session, word: u32| {
        let line = format!("import ctypes; assert ctypes.CDLL(None).sigqueue({}, 23, ctypes.c_void_p({word})) == 0", session.pid());
        assert!(run_under(&["/usr/bin/python3", "-c", &line]).status().unwrap().success());
    };
    let word = |run: &str| u32::from_str_radix(&run[..8], 16).unwrap();
    session.send(&json!({"op": "run", "code": ""}).to_string());
    let first = session.answer()["audit"]["run"].as_str().unwrap().to_owned();
    let waits = "import os, time\nopen('running', 'w').close()\nwhile not os.path.exists('go'): time.sleep(0.01)\nprint('on')";
    for (id, foreign) in [("b", Some(word(&first))), ("c", Some(0x5354_4344)), ("d", None)] {
        session.send(&json!({"op": "run", "code": waits, "id": id}).to_string());
        runs(&place);
        match foreign {
            Some(foreign) => tell(&session, foreign),
            // The control: its own number ends it.
            None => assert_eq!(kill(&number(id)), (Some(0), String::new())),
        }
        File::create(place.join("go")).unwrap();
        let answer = session.answer();
        let expected = if foreign.is_some() { (json!("exited"), json!("on\n")) } else { (json!("cancelled"), json!("")) };
        assert_eq!((&answer["verdict"], &answer["output"]), (&expected.0, &expected.1));
        for name in ["running", "go"] {
            fs::remove_file(place.join(name)).unwrap();
        }
    }
    session.close();
}

test!(Both, a_run_without_an_audit_log_is_listed_and_ended_too);
fn a_run_without_an_audit_log_is_listed_and_ended_too() {
    own_log();
    let policies = PolicyDirectory::new();
    let policy = policies.write("off", &derived("[audit]\nmode = \"off\""));
    let place = scratch_named("unlogged");
    let child = start(&mut stockade(["exec", "--policy", &policy]), request("unlogged", &place).as_bytes());
    runs(&place);
    assert_eq!(kill(&number("unlogged")), (Some(0), String::new()));
    ExecResult::of(child.wait_with_output().unwrap()).expect(json!({"verdict": "cancelled", "audit": null}));
    assert!(is_root() || names(&registry()).iter().all(|name| !name.starts_with("run-")));
}

/// A cgroup v2 that belongs to the caller, as systemd delegates one; removed with it.
struct CallersCgroup(PathBuf);

impl CallersCgroup {
    fn new(name: &str) -> Self {
        let mounted = directory().join(format!("unified-{name}"));
        fs::create_dir(&mounted).unwrap();
        mount(Some("none"), &mounted, Some("cgroup2"), MsFlags::empty(), None::<&str>).unwrap();
        let path = mounted.join(format!("suite-{}-{name}", std::process::id()));
        fs::create_dir(&path).unwrap();
        for file in ["cgroup.kill", "cgroup.freeze"] {
            chown_to_owner(&path.join(file));
        }
        CallersCgroup(path)
    }

    /// What its owner writes there.
    #[track_caller]
    fn write(&self, file: &str, what: &str) {
        let id = OWNER.to_string();
        let line = format!("echo {what} >{}", text(&self.0.join(file)));
        let done = run_under(&["setpriv", "--reuid", &id, "--regid", &id, "--clear-groups", "sh", "-c", &line]).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    }

    fn is_frozen(&self) -> bool {
        fs::read_to_string(self.0.join("cgroup.events")).unwrap().contains("frozen 1")
    }
}

impl Drop for CallersCgroup {
    fn drop(&mut self) {
        let _thawed = fs::write(self.0.join("cgroup.freeze"), "0");
        let _killed = fs::write(self.0.join("cgroup.kill"), "1");
        let removed = || {
            // Where runs have their limits by it, the launcher has left for a child.
            let _none = fs::remove_dir(self.0.join("stockade-launcher"));
            fs::remove_dir(&self.0).is_ok()
        };
        let _left = eventually(Duration::from_secs(5), removed);
    }
}

test!(RootOnly, a_caller_of_sudo_loses_no_record_by_its_cgroup, seconds 90);
/// The launcher stays in its caller's cgroup, whose limits hold for it.
fn a_caller_of_sudo_loses_no_record_by_its_cgroup() {
    let log = own_log();
    let own = scratch_named("own");
    let grants = format!("[[grant]]\nuid = {OWNER}\npolicies = [\"default\"]\nscratch = [{:?}]\n", text(&own));
    let id = OWNER.to_string();
    let begin = |cgroup: &CallersCgroup, request: &Value| {
        let enter = format!("echo $$ >{} && exec {} exec", text(&cgroup.0.join("cgroup.procs")), text(&program_path().unwrap()));
        let mut command = command_under_etc(&[("stockade/grants.toml", grants.as_str())], &["sh", "-c", &enter]);
        let child = start(command.envs([("SUDO_UID", &id), ("SUDO_GID", &id)]), request.to_string().as_bytes());
        runs(&own);
        child
    };
    // Frozen: the run is seen, its limits wait, and nothing is lost.
    let cgroup = CallersCgroup::new("frozen");
    let wall = scaled_limit(2000);
    let mut child = begin(&cgroup, &json!({"code": CODE, "id": "frozen", "scratch": text(&own), "limits": {"wall": wall}}));
    cgroup.write("cgroup.freeze", "1");
    assert!(eventually(Duration::from_secs(5), || cgroup.is_frozen()));
    assert!(wait_within(&mut child, Duration::from_secs(4)).is_none(), "a frozen launcher has ended the run");
    number("frozen");
    cgroup.write("cgroup.freeze", "0");
    ExecResult::of(child.wait_with_output().unwrap()).expect(json!({"verdict": "wall_timeout"}));
    // Killed: the next start writes it down, once. On cgroup v2 the first cgroup takes no process
    // any more, since the launcher has given its limits to children.
    let cgroup = CallersCgroup::new("killed");
    fs::remove_file(own.join("running")).unwrap();
    let child = begin(&cgroup, &json!({"code": CODE, "id": "killed", "scratch": text(&own), "limits": {"wall": scaled_limit(30_000)}}));
    let run = number("killed");
    cgroup.write("cgroup.kill", "1");
    let killed = child.wait_with_output().unwrap();
    assert_eq!(killed.status.code(), None, "it was not killed: {killed:?}");
    exec(json!({"code": ""})).succeeded();
    exec(json!({"code": ""})).succeeded();
    let of = |id: &str| records(&log).into_iter().filter(|record| record["id"] == id).collect::<Vec<_>>();
    assert_eq!(of("frozen").iter().map(|record| &record["verdict"]).collect::<Vec<_>>(), ["wall_timeout"]);
    let killed = of("killed");
    assert_eq!(killed.len(), 1, "{killed:?}");
    assert_eq!((&killed[0]["event"], &killed[0]["run"], &killed[0]["who"]["uid"]), (&json!("lost"), &json!(run), &json!(OWNER)));
}

/// The registry that an ordinary user without a directory of the session has in `/tmp`.
struct UsersRegistry(u32);

impl UsersRegistry {
    fn path(&self) -> PathBuf {
        PathBuf::from(format!("/tmp/stockade-{}", self.0))
    }

    fn make(&self) {
        fs::create_dir(self.path()).unwrap();
        fs::set_permissions(self.path(), std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
        std::os::unix::fs::chown(self.path(), Some(self.0), Some(self.0)).unwrap();
    }

    /// A record with a note of that user's, whose lock is held until it is dropped.
    fn forge(&self, slot: u32, run: &str) -> File {
        let note = json!({"run": run, "who": {"uid": self.0, "gid": self.0, "on_behalf": false, "launcher_uid": self.0, "pid": std::process::id()},
            "policy": {"name": "default", "origin": "shipped", "sha256": ""}, "id": "forged",
            "begun": "2020-01-01T00:00:00Z", "via": "exec", "command": "", "mode": "off", "log": null});
        let path = self.path().join(format!("run-{slot}"));
        fs::write(&path, format!("run {note}\n")).unwrap();
        std::os::unix::fs::chown(&path, Some(self.0), Some(self.0)).unwrap();
        let file = File::open(&path).unwrap();
        file.lock().unwrap();
        file
    }

    /// The program as this user, with no directory of the session.
    fn command(&self, arguments: &[&str]) -> std::process::Command {
        let home = directory().join(format!("home-{}", self.0));
        fs::create_dir_all(&home).unwrap();
        std::os::unix::fs::chown(&home, Some(self.0), Some(self.0)).unwrap();
        let (id, program) = (self.0.to_string(), program_path().unwrap());
        let user = ["setpriv", "--reuid", &id, "--regid", &id, "--clear-groups", "--inh-caps=-all", "--", text(&program)];
        let mut command = run_under(&[&user[..], arguments].concat());
        command.env("HOME", &home).env_remove("XDG_RUNTIME_DIR");
        command
    }

    /// A run of this user's.
    fn started(&self, id: &str) -> Child {
        let scratch = scratch_named(id);
        std::os::unix::fs::chown(&scratch, Some(self.0), Some(self.0)).unwrap();
        let child = start(&mut self.command(&["exec"]), request(id, &scratch).as_bytes());
        runs(&scratch);
        child
    }
}

impl Drop for UsersRegistry {
    fn drop(&mut self) {
        for entry in fs::read_dir("/tmp").into_iter().flatten().flatten() {
            if entry.file_name().to_string_lossy().starts_with(&format!("stockade-{}", self.0)) {
                let _removed = fs::remove_dir_all(entry.path());
            }
        }
    }
}

/// What `ps --json` lists, its status and what it says beside.
fn ps(command: &mut std::process::Command) -> (Option<i32>, Vec<Value>, String) {
    let output = command.output().unwrap();
    let all: Value = serde_json::from_slice(&output.stdout).unwrap();
    (output.status.code(), all["runs"].as_array().unwrap().clone(), String::from_utf8(output.stderr).unwrap())
}

test!(serial RootOnly, a_run_that_another_user_has_noted_too_is_ended, seconds 90);
fn a_run_that_another_user_has_noted_too_is_ended() {
    own_log();
    let (forger, user) = (UsersRegistry(OWNER + 21), UsersRegistry(OWNER + 22));
    forger.make();
    // Root's own run: no other user has a say in it.
    let child = started("roots");
    let run = number("roots");
    let forged = [forger.forge(7, &run), forger.forge(8, "../../etc")];
    let (status, all, said) = ps(&mut stockade(["ps", "--json"]));
    assert_eq!((status, all.len(), &all[0]["id"]), (Some(0), 1, &json!("roots")), "{all:?} {said}");
    assert!(said.contains(&format!("uid {}", forger.0)) && said.contains(&run), "{said}");
    assert_eq!(kill(&run), (Some(0), String::new()));
    ExecResult::of(child.wait_with_output().unwrap()).expect(json!({"verdict": "cancelled"}));
    drop(forged);
    // Another user's: both are told, and that one cannot be is said.
    let child = user.started("users");
    let run = number("users");
    let forged = forger.forge(7, &run);
    let (status, all, said) = ps(&mut stockade(["ps", "--json"]));
    assert!(status == Some(0) && all.len() == 2 && said.contains("noted more than once"), "{all:?} {said}");
    let (status, said) = kill(&run);
    assert!(status == Some(125) && said.contains(&format!("uid {}", forger.0)), "{status:?} {said}");
    ExecResult::of(child.wait_with_output().unwrap()).expect(json!({"verdict": "cancelled"}));
    drop(forged);
    // The control.
    let child = user.started("alone");
    assert_eq!(kill(&number("alone")), (Some(0), String::new()));
    ExecResult::of(child.wait_with_output().unwrap()).expect(json!({"verdict": "cancelled"}));
}

test!(serial RootOnly, many_records_of_one_user_hide_no_other_run, seconds 60);
fn many_records_of_one_user_hide_no_other_run() {
    own_log();
    let (forger, user) = (UsersRegistry(OWNER + 23), UsersRegistry(OWNER + 24));
    forger.make();
    let child = user.started("hidden");
    let forged: Vec<File> = (0..200).map(|slot| forger.forge(slot, &format!("{slot:016x}"))).collect();
    let few = |arguments: &[&str]| {
        let program = program_path().unwrap();
        run_under(&[&["prlimit", "--nofile=64:64", "--", text(&program)], arguments].concat())
    };
    let (status, all, said) = ps(&mut few(&["ps", "--json"]));
    assert!(status == Some(0) && all.len() == 201 && said.is_empty(), "{status:?} {} {said}", all.len());
    let run = all.iter().find(|run| run["id"] == "hidden").unwrap()["run"].as_str().unwrap();
    assert!(few(&["kill", run]).status().unwrap().success());
    ExecResult::of(child.wait_with_output().unwrap()).expect(json!({"verdict": "cancelled"}));
    drop(forged);
    // What cannot be read is said.
    let _readable = forger.forge(1, "0000000000000001");
    let _unreadable = forger.forge(2, "0000000000000002");
    fs::set_permissions(forger.path().join("run-2"), std::os::unix::fs::PermissionsExt::from_mode(0o000)).unwrap();
    let (status, all, said) = ps(&mut forger.command(&["ps", "--json"]));
    assert!(status == Some(125) && said.contains("run-2") && said.contains("EACCES"), "{status:?} {said}");
    assert!(all.iter().any(|run| run["run"] == "0000000000000001"), "{all:?}");
}

test!(serial RootOnly, a_users_runs_are_found_wherever_they_were_noted, seconds 90);
fn a_users_runs_are_found_wherever_they_were_noted() {
    own_log();
    let user = UsersRegistry(OWNER + 25);
    // Somebody else has the name, and gives it back later.
    fs::create_dir(user.path()).unwrap();
    let mut child = user.started("moved");
    let run = number("moved");
    fs::remove_dir(user.path()).unwrap();
    let session = directory().join("session");
    fs::create_dir(&session).unwrap();
    std::os::unix::fs::chown(&session, Some(user.0), Some(user.0)).unwrap();
    let (_, plain, _) = ps(&mut user.command(&["ps", "--json"]));
    let (_, elsewhere, _) = ps(user.command(&["ps", "--json"]).env("XDG_RUNTIME_DIR", &session));
    assert!(plain.len() == 1 && plain == elsewhere && plain[0]["run"] == json!(run), "{plain:?} {elsewhere:?}");
    // Lost, it is written down by a start with another environment, once.
    child.kill().unwrap();
    child.wait().unwrap();
    for _ in 0..2 {
        let mut command = user.command(&["exec"]);
        command.env("XDG_RUNTIME_DIR", &session);
        ExecResult::of(crate::support::exec::run_with_stdin(&mut command, br#"{"code": ""}"#)).succeeded();
    }
    let log = directory().join(format!("home-{}/.local/state/stockade/audit", user.0));
    let lost: Vec<Value> = records(&log).into_iter().filter(|record| record["event"] == "lost").collect();
    assert!(lost.len() == 1 && lost[0]["run"] == json!(run), "{lost:?}");
    // The control: another user does not see it.
    let child = user.started("seen");
    assert_eq!(ps(&mut UsersRegistry(OWNER + 26).command(&["ps", "--json"])).1, Vec::<Value>::new());
    assert!(user.command(&["kill", &number("seen")]).status().unwrap().success());
    ExecResult::of(child.wait_with_output().unwrap()).expect(json!({"verdict": "cancelled"}));
}

test!(Both, kill_ends_a_run_whose_launcher_is_stopped);
fn kill_ends_a_run_whose_launcher_is_stopped() {
    own_log();
    let child = started("stopped");
    let run = number("stopped");
    let pid = nix::unistd::Pid::from_raw(child.id().cast_signed());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGSTOP).unwrap();
    assert_eq!(kill(&run), (Some(0), String::new()));
    ExecResult::of(child.wait_with_output().unwrap()).expect(json!({"verdict": "cancelled"}));
}

test!(Both, kill_ends_a_run_whose_launcher_has_no_room_for_signals, seconds 90);
/// The kernel drops what a signal carries where the receiver's queue is full.
fn kill_ends_a_run_whose_launcher_has_no_room_for_signals() {
    own_log();
    let (lone, place) = (scratch_named("lone"), scratch_named("of-session"));
    let program = program_path().unwrap();
    let without_room = |words: &str| {
        let line = format!("ulimit -i 0; exec {} {words}", text(&program));
        let mut command = run_under(&["bash", "-c", &line]);
        command.stdin(Stdio::piped());
        command
    };
    let child = start(&mut without_room("exec"), request("lone", &lone).as_bytes());
    runs(&lone);
    assert_eq!(kill(&number("lone")), (Some(0), String::new()));
    ExecResult::of(child.wait_with_output().unwrap()).expect(json!({"verdict": "cancelled"}));
    // The control: a session is not ended for one of its runs.
    let mut session = Session::of(&mut without_room(&format!("session --scratch {}", text(&place))));
    session.send(&json!({"op": "run", "code": CODE, "id": "of-session"}).to_string());
    runs(&place);
    let (status, said) = kill(&number("of-session"));
    assert!(status == Some(125) && said.contains("end the whole session") && said.contains("ulimit -i"), "{status:?}: {said}");
    assert!(session.child.try_wait().unwrap().is_none());
    nix::sys::signal::kill(session.pid(), nix::sys::signal::Signal::SIGTERM).unwrap();
    assert!(wait_within(&mut session.child, Duration::from_secs(10)).is_some());
}

test!(RootOnly, kill_ends_a_run_in_another_pid_namespace);
fn kill_ends_a_run_in_another_pid_namespace() {
    own_log();
    let place = scratch_named("apart");
    let program = program_path().unwrap();
    let mut command = run_under(&["unshare", "-p", "-f", "--mount-proc", text(&program), "exec"]);
    let child = start(&mut command, request("apart", &place).as_bytes());
    runs(&place);
    let run = number("apart");
    // From a namespace beside it, no process of it is to be seen.
    let beside = run_under(&["unshare", "-p", "-f", "--mount-proc", text(&program), "kill", &run]).output().unwrap();
    let said = String::from_utf8(beside.stderr).unwrap();
    assert!(beside.status.code() == Some(125) && said.contains("PID namespace"), "{said}");
    assert_eq!(kill(&run), (Some(0), String::new()));
    ExecResult::of(child.wait_with_output().unwrap()).expect(json!({"verdict": "cancelled"}));
}

test!(serial RootOnly, a_registry_name_taken_in_tmp_first_stops_no_run);
fn a_registry_name_taken_in_tmp_first_stops_no_run() {
    struct Taken(String);
    impl Drop for Taken {
        fn drop(&mut self) {
            let _removed = fs::remove_dir_all(&self.0).or_else(|_| fs::remove_file(&self.0));
        }
    }
    // A user who has run nothing else.
    const USER: u32 = OWNER + 17;
    let own = |path: &Path| std::os::unix::fs::chown(path, Some(USER), Some(USER)).unwrap();
    let place = Taken(format!("/tmp/stockade-{USER}"));
    let (home, scratch) = (directory().join("own"), scratch());
    fs::create_dir(&home).unwrap();
    own(&home);
    own(&scratch);
    let id = USER.to_string();
    let request = json!({"code": "print(6*7)", "scratch": text(&scratch)}).to_string();
    let program = program_path().unwrap();
    let ask = || {
        let words = ["setpriv", "--reuid", &id, "--regid", &id, "--clear-groups", "--inh-caps=-all", text(&program), "exec"];
        ExecResult::of(run_with_stdin(run_under(&words).env("HOME", &home).env_remove("XDG_RUNTIME_DIR"), request.as_bytes()))
    };
    fs::create_dir(&place.0).unwrap();
    ask().succeeded().expect(json!({"output": "42\n"}));
    let longer =
        || fs::read_dir("/tmp").unwrap().flatten().map(|entry| entry.path()).find(|path| text(path).starts_with(&format!("{}-", place.0)));
    let own_place = Taken(text(&longer().expect("a name that no other user knew")).to_owned());
    assert_eq!(fs::metadata(&own_place.0).map(|there| (there.uid(), there.mode() & 0o777)).unwrap(), (USER, 0o700));
    assert_eq!(fs::read_dir(&place.0).unwrap().count(), 0);
    // A file of the user's own, which somebody else has moved there.
    fs::remove_dir(&place.0).unwrap();
    fs::write(&place.0, "").unwrap();
    own(Path::new(&place.0));
    ask().succeeded().expect(json!({"output": "42\n"}));
    // The control: left alone, it is where the runs are noted.
    fs::remove_file(&place.0).unwrap();
    ask().succeeded();
    assert!(Path::new(&place.0).is_dir());
}
