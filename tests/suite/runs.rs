//! `ps` and `kill`: who sees which runs, that an ended run leaves nothing, and that no process
//! but a run's launcher gets a signal.

use std::{
    fs::{self, File},
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Stdio},
    time::Duration,
};

use nix::mount::{MsFlags, mount};
use serde_json::{Value, json};

use crate::support::{
    audit_log::{own_log, records},
    exec::{ExecResult, OWNER, chown_to_owner, exec, program_path, run_under, scratch_named, start, stockade, text},
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

test!(RootOnly, root_sees_and_ends_the_runs_of_an_ordinary_user);
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

test!(Both, kill_signals_no_process_but_the_launcher);
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
    let own = noted.replace(&format!("\"pid\":{}", run.id()), &format!("\"pid\":{}", bystander.id()));
    assert_ne!(own, noted);
    fs::write(&path, &own).unwrap();
    // Its lock is free: no launcher has it.
    assert_eq!(kill(&number).0, Some(1));
    // Somebody holds the lock, but not this process.
    let held = File::open(&path).unwrap();
    held.lock().unwrap();
    let (status, said_of_it) = kill(&number);
    assert!(status == Some(125) && said_of_it.contains("is not the launcher"), "{status:?}: {said_of_it}");
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
    assert!(is_root() || names(&registry()).is_empty());
}

/// A cgroup v2 that belongs to the caller, as systemd delegates one; removed with it.
struct CallersCgroup(PathBuf);

impl CallersCgroup {
    fn new() -> Self {
        let mounted = directory().join("unified");
        fs::create_dir(&mounted).unwrap();
        mount(Some("none"), &mounted, Some("cgroup2"), MsFlags::empty(), None::<&str>).unwrap();
        let path = mounted.join(format!("suite-{}", std::process::id()));
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
    let cgroup = CallersCgroup::new();
    let own = scratch_named("own");
    let grants = format!("[[grant]]\nuid = {OWNER}\npolicies = [\"default\"]\nscratch = [{:?}]\n", text(&own));
    let id = OWNER.to_string();
    let enter = format!("echo $$ >{}; exec {} exec", text(&cgroup.0.join("cgroup.procs")), text(&program_path().unwrap()));
    let begin = |request: &Value| {
        let mut command = command_under_etc(&[("stockade/grants.toml", grants.as_str())], &["sh", "-c", &enter]);
        let child = start(command.envs([("SUDO_UID", &id), ("SUDO_GID", &id)]), request.to_string().as_bytes());
        runs(&own);
        child
    };
    // Frozen: the run is seen, its limits wait, and nothing is lost.
    let wall = scaled_limit(2000);
    let mut child = begin(&json!({"code": CODE, "id": "frozen", "scratch": text(&own), "limits": {"wall": wall}}));
    cgroup.write("cgroup.freeze", "1");
    assert!(eventually(Duration::from_secs(5), || cgroup.is_frozen()));
    assert!(wait_within(&mut child, Duration::from_secs(4)).is_none(), "a frozen launcher has ended the run");
    number("frozen");
    cgroup.write("cgroup.freeze", "0");
    ExecResult::of(child.wait_with_output().unwrap()).expect(json!({"verdict": "wall_timeout"}));
    // Killed: the next start writes it down, once.
    fs::remove_file(own.join("running")).unwrap();
    let mut child = begin(&json!({"code": CODE, "id": "killed", "scratch": text(&own)}));
    let run = number("killed");
    cgroup.write("cgroup.kill", "1");
    assert_eq!(child.wait().unwrap().code(), None, "it was killed");
    exec(json!({"code": ""})).succeeded();
    exec(json!({"code": ""})).succeeded();
    let of = |id: &str| records(&log).into_iter().filter(|record| record["id"] == id).collect::<Vec<_>>();
    assert_eq!(of("frozen").iter().map(|record| &record["verdict"]).collect::<Vec<_>>(), ["wall_timeout"]);
    let killed = of("killed");
    assert_eq!(killed.len(), 1, "{killed:?}");
    assert_eq!((&killed[0]["event"], &killed[0]["run"], &killed[0]["who"]["uid"]), (&json!("lost"), &json!(run), &json!(OWNER)));
}
