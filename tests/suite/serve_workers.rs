//! Workers and keepers of a service at its edges: what comes just as something else ends, settings that are
//! read while they run, what none may ask for, and a host that has no room for another process.

use std::{
    fs,
    io::Write,
    os::{fd::OwnedFd, unix::net::UnixStream},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use super::serve::{Service, Worker, frame, kill};
use crate::support::{
    audit_log::{is_whole, own_log, records},
    exec::{stockade, text},
    policy_dir::{PolicyDirectory, derived},
    runner::{eventually, test, wait_within},
    timeouts::scaled,
};

test!(Both, a_cancellation_in_the_same_bytes_as_the_end_of_a_request_ends_the_run, seconds 90);
fn a_cancellation_in_the_same_bytes_as_the_end_of_a_request_ends_the_run() {
    let mut worker = Worker::new();
    let request = json!({"code": "import os, time; os.write(1, b'runs\\n'); time.sleep(20)"}).to_string();
    let begin = json!({"run": "0", "key": "k", "policy": "default", "length": request.len(), "output": true}).to_string();
    let whole = [frame(1, begin.as_bytes()), frame(2, request.as_bytes())].concat();
    for (cancel, started) in [(frame(3, b""), false), (Vec::new(), true)] {
        let begun = Instant::now();
        worker.front.write_all(&[whole.clone(), cancel].concat()).unwrap();
        if started {
            // The control: one that comes later ends it as well, and until then it runs.
            assert_eq!(worker.next().unwrap().0, 131, "it starts");
            assert!(worker.next().unwrap().1.ends_with(b"runs\n"));
            worker.say(3, b"");
        }
        let result = worker.result();
        assert_eq!((&result["verdict"], &result["started"]), (&json!("cancelled"), &json!(started)), "{result}");
        assert!(begun.elapsed() < scaled(Duration::from_secs(15)), "it has run to its end: {result}");
    }
    drop(worker.front.shutdown(std::net::Shutdown::Both));
    worker.ended();
}

test!(RootlessOnly, a_keeper_that_waits_for_a_front_is_ended_by_ending_signals_alone);
fn a_keeper_that_waits_for_a_front_is_ended_by_ending_signals_alone() {
    let (_supervisor, its) = UnixStream::pair().unwrap();
    let mut command = stockade(["serve-keeper", "--key", "k", "--policy", "default"]);
    let mut keeper = command.stdin(OwnedFd::from(its)).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let pid = i32::try_from(keeper.id()).unwrap();
    // It holds signals back once it waits.
    let holds_back = || {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let blocked = status.lines().find_map(|line| line.strip_prefix("SigBlk:\t")).unwrap().to_owned();
        u64::from_str_radix(&blocked, 16).unwrap() & 1 << 14 != 0
    };
    assert!(eventually(scaled(Duration::from_secs(10)), holds_back));
    for signal in ["USR1", "USR2", "WINCH", "URG"] {
        kill(pid, signal);
        assert!(wait_within(&mut keeper, scaled(Duration::from_millis(200))).is_none(), "SIG{signal} has ended it");
    }
    kill(pid, "TERM");
    assert!(wait_within(&mut keeper, scaled(Duration::from_secs(10))).is_some(), "the control");
}

/// So many keys, each with a policy whose path has 3,000 letters: a table that no socket has room for.
fn many_keys(place: &PolicyDirectory, count: usize) -> String {
    let directory = (0..15).fold(place.0.clone(), |path, _| path.join("p".repeat(200)));
    fs::create_dir_all(&directory).unwrap();
    let policy = directory.join("own.toml");
    fs::write(&policy, "schema = 1\nextends = \"default\"\n").unwrap();
    let key = |number: usize| {
        format!("[[key]]\nid = \"k{number}\"\nhash = \"sha256:{number:064x}\"\npolicies = [{policy:?}]\nscopes = [\"run\"]\n")
    };
    (0..count).map(key).collect()
}

test!(Both, a_table_that_a_worker_does_not_read_while_it_runs_holds_up_nothing, seconds 120);
fn a_table_that_a_worker_does_not_read_while_it_runs_holds_up_nothing() {
    let place = PolicyDirectory::new();
    let keys = many_keys(&place, 150);
    let service = Service::at(place, "[capacity]\ncpus = 1\n", &keys);
    let run = service.begin("import time; time.sleep(25); print('whole')");
    assert!(service.has_runs("running", 1));
    for count in 1..=3 {
        let begun = Instant::now();
        service.signal("HUP");
        let is_read = || service.log().matches("the configuration was read again").count() == count;
        assert!(eventually(scaled(Duration::from_secs(60)), is_read), "{}", service.log());
        // A process that reads nothing is waited for 20 s.
        assert!(begun.elapsed() < Duration::from_secs(15), "{:?}", begun.elapsed());
    }
    // What was read last holds: the key has gone for a worker, too.
    let worker = service.processes("stockade serve-worker")[0];
    super::serve::read_answer(run).ran("whole\n");
    assert_eq!(service.processes("stockade serve-worker"), [worker], "{}", service.log());
    service.run("print(1)").ran("1\n");
    service.end();
}

test!(Both, what_is_granted_while_a_worker_runs_it_grants_at_its_next_run, seconds 90);
fn what_is_granted_while_a_worker_runs_it_grants_at_its_next_run() {
    let service = Service::with("[capacity]\ncpus = 1\n", "");
    let run = service.begin("import time; time.sleep(4); print('long')");
    assert!(service.has_runs("running", 1));
    // The worker reads none of both tables before its run ends.
    let mut tokens = Vec::new();
    for (count, id) in (1..).zip(["first", "second"]) {
        let made = stockade(["key", "new", id, "--policy", "default", "--add", "--file", text(&service.keys())]).output().unwrap();
        tokens.push(String::from_utf8(made.stdout).unwrap().trim().to_owned());
        service.signal("HUP");
        let is_read = || service.log().matches("the configuration was read again").count() == count;
        assert!(eventually(scaled(Duration::from_secs(20)), is_read), "{}", service.log());
    }
    // It waits, and comes the moment the worker is free.
    service.ask("POST", "/v1/run", &tokens[1], &json!({"code": "print('next')"})).ran("next\n");
    super::serve::read_answer(run).ran("long\n");
    service.end();
}

test!(RootlessOnly, a_process_that_cannot_be_started_for_a_while_is_started_later, seconds 90);
fn a_process_that_cannot_be_started_for_a_while_is_started_later() {
    let service = Service::with("[capacity]\ncpus = 2\n", "");
    let limits = fs::read_to_string(format!("/proc/{}/limits", service.child.id())).unwrap();
    let usual = limits.lines().find_map(|line| line.strip_prefix("Max processes")?.split_whitespace().next()).unwrap();
    let limit = |most: &str| {
        let limited = Command::new("prlimit").args(["--pid", &service.child.id().to_string(), &format!("--nproc={most}:")]).status();
        assert!(limited.unwrap().success());
    };
    let workers = || service.processes("stockade serve-worker");
    let failures = || service.log().matches("is tried again").count();
    for name in ["stockade serve-worker", "stockade-serve"] {
        // The front answers before the workers have begun.
        assert!(eventually(scaled(Duration::from_secs(20)), || workers().len() == 2), "{}", service.log());
        let (before, earlier) = (service.processes(name)[0], failures());
        limit("1");
        kill(before, "KILL");
        assert!(eventually(scaled(Duration::from_secs(10)), || failures() > earlier), "{name}: {}", service.log());
        limit(usual);
        let is_there = || service.processes(name).iter().all(|pid| *pid != before) && service.processes("stockade-serve").len() == 1;
        assert!(eventually(scaled(Duration::from_secs(20)), || is_there() && workers().len() == 2), "{name}: {}", service.log());
        assert!(eventually(scaled(Duration::from_secs(10)), || service.connect().peer_addr().is_ok()));
        service.run("print(1)").ran("1\n");
    }
    service.end();
}

test!(RootlessOnly, a_worker_that_is_to_be_ready_under_a_broken_policy_waits, seconds 120);
fn a_worker_that_is_to_be_ready_under_a_broken_policy_waits() {
    let place = PolicyDirectory::new();
    let policy = place.write("ready", &derived("[templates.bare]\nready = 1"));
    let hash = "0".repeat(64);
    let keys = format!("[[key]]\nid = \"ready\"\nhash = \"sha256:{hash}\"\npolicies = [{policy:?}]\nscopes = [\"run\"]\n");
    let service = Service::at(place, "[capacity]\ncpus = 1\n", &keys);
    assert!(eventually(scaled(Duration::from_secs(30)), || service.log().contains("an image of")), "{}", service.log());
    thread::sleep(Duration::from_secs(1));
    fs::write(&policy, "schema = 1\nno such line").unwrap();
    // An interpreter has waited for too long after 30 s.
    let worker = service.processes("stockade serve-worker")[0];
    let used = || {
        let stat = fs::read_to_string(format!("/proc/{worker}/stat")).unwrap();
        // utime and stime, in hundredths of a second.
        let fields = stat.rsplit(") ").next().unwrap().split(' ').skip(11).take(2);
        fields.map(|field| field.parse::<u64>().unwrap()).sum::<u64>()
    };
    thread::sleep(Duration::from_secs(32));
    let before = used();
    thread::sleep(Duration::from_secs(2));
    // One that asks again and again takes what it can get, which on a busy host may be a tenth.
    assert!(used() - before <= 3, "{} of 200 hundredths", used() - before);
    service.end();
}

test!(Both, a_worker_that_outlives_its_front_is_killed, seconds 90);
fn a_worker_that_outlives_its_front_is_killed() {
    let mut service = Service::with("[capacity]\ncpus = 2\n", "");
    let workers = || service.processes("stockade serve-worker");
    assert!(eventually(scaled(Duration::from_secs(20)), || workers().len() == 2), "{}", service.log());
    let [stopped, other] = workers()[..] else { panic!("{:?}", workers()) };
    kill(stopped, "STOP");
    let begun = Instant::now();
    kill(service.processes("stockade-serve")[0], "KILL");
    // The control: the other ends by itself, and the one that cannot has its time.
    assert!(eventually(scaled(Duration::from_secs(8)), || !workers().contains(&other)), "{}", service.log());
    assert!(workers().contains(&stopped), "{}", service.log());
    // Nothing waits for it meanwhile.
    assert!(eventually(scaled(Duration::from_secs(8)), || service.get("/live").is_some()), "{}", service.log());
    service.run("print(1)").ran("1\n");
    assert!(eventually(scaled(Duration::from_secs(25)), || !service.processes("stockade serve-worker").contains(&stopped)));
    assert!(begun.elapsed() > Duration::from_secs(10), "{:?}", begun.elapsed());
    service.end();
}

test!(Both, a_policy_that_a_key_may_not_use_is_in_the_audit_log);
fn a_policy_that_a_key_may_not_use_is_in_the_audit_log() {
    let log = own_log();
    let mut worker = Worker::new();
    let asked = json!({"code": "print('never')"});
    let refused = worker.run("k", "strict", &asked);
    assert_eq!((&refused["reason"], &refused["started"]), (&json!("not_granted"), &json!(false)), "{refused}");
    // The control.
    assert_eq!(worker.run("k", "default", &asked)["output"], "never\n");
    let told: Vec<Value> = records(&log).into_iter().filter(|record| record["verdict"].is_string()).collect();
    let [refused, ran] = &told[..] else { panic!("{told:?}") };
    assert_eq!((&refused["reason"], &refused["verdict"]), (&json!("not_granted"), &json!("sandbox_error")), "{refused}");
    assert_eq!((&ran["reason"], &ran["verdict"]), (&Value::Null, &json!("exited")), "{ran}");
    assert_eq!([refused, ran].map(|record| &record["who"]["key"]), ["k", "k"], "{refused} {ran}");
    is_whole();
    drop(worker.front.shutdown(std::net::Shutdown::Both));
    worker.ended();
}
