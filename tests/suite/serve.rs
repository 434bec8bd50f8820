//! The service: what a key may do over HTTP and what it may not, what becomes of a run whose client,
//! front, worker or supervisor goes, and what a front that was taken over gets.

use std::{
    fs::{self, File},
    io::{IoSlice, Read, Write},
    net::{TcpListener, TcpStream},
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use rustix::{
    fs::{MemfdFlags, memfd_create},
    net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg},
};
use serde_json::{Value, json};

use crate::support::{
    exec::{program_path, run_under, stockade, text, token},
    leftovers::{host_process_with, no_process_is_left},
    policy_dir::{PolicyDirectory, command_under_etc, command_with_etc},
    runner::{eventually, is_root, test, wait_within},
    timeouts::scaled,
};

/// The user of keyed runs where root serves.
pub(super) const ACCOUNT: u32 = 54322;

/// A service of one test, at a UNIX socket and a TCP port of its own.
pub(super) struct Service {
    pub(super) child: Child,
    pub(super) place: PolicyDirectory,
    pub(super) token: String,
    pub(super) port: u16,
}

/// An answer: status, head and body.
pub(super) struct Answer {
    pub(super) status: u16,
    pub(super) head: String,
    pub(super) body: Value,
}

impl Answer {
    #[track_caller]
    pub(super) fn is(&self, status: u16, reason: &str) -> &Self {
        assert_eq!((self.status, &self.body["reason"]), (status, &json!(reason)), "{}{}", self.head, self.body);
        self
    }

    #[track_caller]
    pub(super) fn ran(&self, output: &str) -> &Self {
        assert_eq!((self.status, &self.body["verdict"], &self.body["output"]), (200, &json!("exited"), &json!(output)), "{}", self.body);
        self
    }
}

/// What a new key may ask for.
pub(super) const RUN: &str = "scopes = [\"run\"]";

impl Service {
    pub(super) fn new() -> Self {
        Service::with("", "")
    }

    /// With these lines more in `serve.toml`, and these in `keys.toml` before the key `test`.
    pub(super) fn with(config: &str, keys: &str) -> Self {
        Service::at(PolicyDirectory::new(), config, keys)
    }

    /// The same, in a directory that has policies.
    pub(super) fn at(place: PolicyDirectory, config: &str, keys: &str) -> Self {
        Service::under(&[], &[], place, config, keys)
    }

    /// The same, with these words before the program, and variables.
    pub(super) fn under(words: &[&str], variables: &[(&str, &str)], place: PolicyDirectory, config: &str, keys: &str) -> Self {
        Service::granted(RUN, words, variables, place, config, keys)
    }

    /// The same, whose key `test` has this in the place of [`RUN`].
    pub(super) fn granted(
        scopes: &str,
        words: &[&str],
        variables: &[(&str, &str)],
        place: PolicyDirectory,
        config: &str,
        keys: &str,
    ) -> Self {
        // Free a moment ago, which is as good as it gets: the service takes no port that it is not told.
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let at = |name: &str| place.0.join(name);
        let listen =
            format!("schema = 1\nkeys = {:?}\n[listen]\nunix = {:?}\ntcp = \"127.0.0.1:{port}\"\n{config}", at("keys.toml"), at("s"));
        fs::write(at("serve.toml"), listen).unwrap();
        let made = stockade(["key", "new", "test", "--policy", "default", "--add", "--file", text(&at("keys.toml"))]).output().unwrap();
        assert!(made.status.success(), "{made:?}");
        let token = String::from_utf8(made.stdout).unwrap().trim().to_owned();
        let own = fs::read_to_string(at("keys.toml")).unwrap();
        assert!(own.contains(RUN), "{own}");
        fs::write(at("keys.toml"), format!("{keys}{}", own.replace(RUN, scopes))).unwrap();
        let mut service = Service { child: start_under(words, variables, &place), place, token, port };
        let is_there = eventually(scaled(Duration::from_secs(20)), || service.get("/live").is_some_and(|live| live.status == 200));
        assert!(is_there, "{}", service.log());
        service
    }

    pub(super) fn log(&self) -> String {
        fs::read_to_string(self.place.0.join("log")).unwrap()
    }

    pub(super) fn keys(&self) -> PathBuf {
        self.place.0.join("keys.toml")
    }

    pub(super) fn connect(&self) -> UnixStream {
        UnixStream::connect(self.place.0.join("s")).unwrap()
    }

    /// None: it does not listen.
    pub(super) fn get(&mut self, path: &str) -> Option<Answer> {
        let stream = UnixStream::connect(self.place.0.join("s")).ok()?;
        Some(answer_of(stream, &head("GET", path, &[], 0), b""))
    }

    pub(super) fn ask(&self, method: &str, path: &str, token: &str, body: &Value) -> Answer {
        self.ask_with(
            method,
            path,
            &[&format!("Authorization: Bearer {token}"), "Content-Type: application/json"],
            body.to_string().as_bytes(),
        )
    }

    pub(super) fn ask_with(&self, method: &str, path: &str, fields: &[&str], body: &[u8]) -> Answer {
        answer_of(self.connect(), &head(method, path, fields, body.len()), body)
    }

    pub(super) fn run(&self, code: &str) -> Answer {
        self.ask("POST", "/v1/run", &self.token, &json!({ "code": code }))
    }

    /// Sends a run whose answer nothing reads yet.
    pub(super) fn begin(&self, code: &str) -> UnixStream {
        let (mut stream, body) = (self.connect(), json!({ "code": code }).to_string());
        let fields = [&*format!("Authorization: Bearer {}", self.token), "Content-Type: application/json"];
        stream.write_all(head("POST", "/v1/run", &fields, body.len()).as_bytes()).unwrap();
        stream.write_all(body.as_bytes()).unwrap();
        stream
    }

    /// The runs that this key sees.
    pub(super) fn runs(&self) -> Vec<Value> {
        self.ask("GET", "/v1/runs", &self.token, &Value::Null).body["runs"].as_array().unwrap().clone()
    }

    pub(super) fn has_runs(&self, state: &str, count: usize) -> bool {
        eventually(scaled(Duration::from_secs(10)), || self.runs().iter().filter(|run| run["state"] == state).count() == count)
    }

    /// Pids below the supervisor whose first word is this.
    pub(super) fn processes(&self, name: &str) -> Vec<i32> {
        let of = format!("/proc/{0}/task/{0}/children", self.child.id());
        let below = fs::read_to_string(of).unwrap();
        let is_it =
            |pid: &&str| fs::read_to_string(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.replace('\0', " ").starts_with(name));
        below.split_whitespace().filter(is_it).map(|pid| pid.parse().unwrap()).collect()
    }

    pub(super) fn signal(&self, signal: &str) {
        kill(i32::try_from(self.child.id()).unwrap(), signal);
    }

    /// Ends it, and looks whether it has left anything.
    pub(super) fn end(mut self) -> String {
        self.signal("TERM");
        let ended = wait_within(&mut self.child, scaled(Duration::from_secs(20))).expect("it ends when it is told to");
        assert!(ended.success(), "{ended}: {}", self.log());
        assert!(!self.place.0.join("s").exists());
        no_process_is_left(text(&self.place.0));
        self.log()
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        // After `end` it is gone; a test that has failed leaves no service behind.
        let _ended = self.child.kill();
        let _reaped = self.child.wait();
    }
}

pub(super) fn start(place: &PolicyDirectory) -> Child {
    start_under(&[], &[], place)
}

pub(super) fn start_under(words: &[&str], variables: &[(&str, &str)], place: &PolicyDirectory) -> Child {
    let (program, config) = (program_path().unwrap(), place.0.join("serve.toml"));
    let words = [words, &[text(&program), "serve", "--config", text(&config)]].concat();
    let mut command = if is_root() {
        let passwd = fs::read_to_string("/etc/passwd").unwrap();
        let passwd = format!("{passwd}stockade-serve:x:{ACCOUNT}:{ACCOUNT}::/nonexistent:/usr/sbin/nologin\n");
        command_under_etc(&[("passwd", &passwd)], &words)
    } else {
        run_under(&words)
    };
    let log = File::create(place.0.join("log")).unwrap();
    command.envs(variables.iter().copied()).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().unwrap()
}

pub(super) fn kill(pid: i32, signal: &str) {
    assert!(Command::new("kill").args([&format!("-{signal}"), &pid.to_string()]).status().unwrap().success());
}

pub(super) fn head(method: &str, path: &str, fields: &[&str], length: usize) -> String {
    let fields: String = fields.iter().map(|field| format!("{field}\r\n")).collect();
    format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{fields}Content-Length: {length}\r\n\r\n")
}

pub(super) fn answer_of(mut stream: impl Read + Write, head: &str, body: &[u8]) -> Answer {
    stream.write_all(head.as_bytes()).unwrap();
    // A request that is refused by its head is not read to its end.
    let _unread = stream.write_all(body);
    read_answer(stream)
}

pub(super) fn read_answer(mut stream: impl Read) -> Answer {
    let mut bytes = Vec::new();
    let _reset = stream.read_to_end(&mut bytes);
    let said = String::from_utf8(bytes).unwrap();
    let (head, body) = said.split_once("\r\n\r\n").unwrap_or((&said, ""));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or_else(|| panic!("no answer: {said:?}"));
    Answer { status, head: head.to_owned(), body: serde_json::from_str(body).unwrap_or(Value::Null) }
}

test!(Both, a_key_runs_programs_by_both_sockets);
fn a_key_runs_programs_by_both_sockets() {
    let service = Service::new();
    let answer = service.run("import os; print(6 * 7, os.getuid())");
    assert_eq!((answer.status, answer.body["code"].as_i64()), (200, Some(0)), "{}", answer.body);
    assert!(answer.body["output"].as_str().unwrap().starts_with("42 "));
    assert_eq!((&answer.body["key"], answer.body["run"].as_str().unwrap().len()), (&json!("test"), 16));
    assert!(answer.body["queued_ms"].is_u64());
    // As `Basic` too, and over TCP, where `Host` must be the service's.
    let body = json!({"code": "print(1)", "id": "x"}).to_string();
    let tcp = |host: &str| {
        let head =
            head("POST", "/v1/run", &[&format!("Authorization: Bearer {}", service.token), "Content-Type: application/json"], body.len());
        answer_of(TcpStream::connect(("127.0.0.1", service.port)).unwrap(), &head.replace("Host: localhost", host), body.as_bytes())
    };
    assert_eq!(tcp(&format!("Host: localhost:{}", service.port)).ran("1\n").body["id"], "x");
    tcp("Host: evil.example").is(421, "host_unknown");
    tcp(&format!("Host: localhost:{}\r\nOrigin: http://evil.example", service.port)).is(403, "origin_refused");
    tcp(&format!("Host: localhost:{0}\r\nOrigin: http://localhost:{0}", service.port)).ran("1\n");
    tcp(&format!("Host: localhost:{}\r\nHost: evil.example", service.port)).is(421, "host_unknown");
    // What a program does wrong is its result.
    let failed = service.run("raise SystemExit(3)");
    assert_eq!((failed.status, failed.body["code"].as_i64()), (200, Some(3)));
    service.end();
}

test!(Both, what_no_key_may_have_is_a_problem_that_says_what_to_do);
fn what_no_key_may_have_is_a_problem_that_says_what_to_do() {
    let service = Service::with("[limits]\nbody = \"64KiB\"\n", "");
    let (token, json_type) = (format!("Authorization: Bearer {}", service.token), "Content-Type: application/json");
    let code = br#"{"code": "print(1)"}"#;
    let run = |path: &str, fields: &[&str], body: &[u8]| service.ask_with("POST", path, fields, body);
    run("/v1/run", &[&token, json_type], code).ran("1\n");
    run("/v1/run?policy=default", &[&token, json_type], code).ran("1\n");
    for (path, fields, body, status, reason) in [
        ("/v1/run", &[json_type][..], &code[..], 401, "key_missing"),
        ("/v1/run", &["Authorization: Bearer sd_test_x", json_type], code, 401, "key_unknown"),
        ("/v1/run", &[&token, &token, json_type], code, 401, "key_missing"),
        ("/v1/run", &["Authorization: Basic eDp5", json_type], code, 401, "key_unknown"),
        ("/v1/run?policy=strict", &[&token, json_type], code, 403, "policy_not_granted"),
        ("/v1/run?policy=/etc/passwd", &[&token, json_type], code, 403, "policy_not_granted"),
        ("/v1/run?queue=1", &[&token, json_type], code, 400, "bad_http"),
        (&format!("/v1/run?key={}", service.token), &[json_type], code, 400, "key_in_url"),
        ("/v1/run", &[&token], code, 415, "bad_type"),
        ("/v1/run", &[&token, "Content-Type: text/plain"], code, 415, "bad_type"),
        ("/v1/run", &[&token, json_type], b"{", 400, "bad_json"),
        ("/v1/run", &[&token, json_type], br#"{"code": "1", "limits": {"cpus": 100000}}"#, 422, "never_fits"),
        ("/v1/run", &[&token, json_type], &vec![b' '; 65537], 413, "too_large"),
        ("/v1/../v1/run", &[&token, json_type], code, 400, "bad_http"),
        ("/v1/%2e%2e/run", &[&token, json_type], code, 400, "bad_http"),
        ("/v1%2frun", &[&token, json_type], code, 400, "bad_http"),
        ("/v1/nothing", &[&token, json_type], code, 404, "no_such_path"),
        ("/live", &[&token, json_type], code, 405, "no_such_method"),
    ] {
        let answer = run(path, fields, body);
        answer.is(status, reason);
        assert!(answer.head.contains("application/problem+json") && answer.body["started"] == false, "{}", answer.head);
        assert_eq!(answer.body["type"], format!("urn:stockade:{reason}"));
        assert!(answer.body["detail"].as_str().is_some_and(|detail| detail.len() > 20), "{}", answer.body);
    }
    // What the launcher refuses is a result, as that of `exec`.
    let refused = run("/v1/run", &[&token, json_type], br#"{"code": "1", "colour": "red"}"#);
    assert_eq!((refused.status, &refused.body["verdict"]), (200, &json!("bad_request")));
    let scratch = json!({"code": "1", "scratch": "/tmp"}).to_string();
    let refused = run("/v1/run", &[&token, json_type], scratch.as_bytes());
    assert_eq!((refused.status, &refused.body["reason"]), (200, &json!("scratch_of_key")), "{}", refused.body);
    // It has served none of them, and serves.
    service.run("print(2)").ran("2\n");
    service.end();
}

test!(Both, a_client_that_hangs_up_cancels_its_run_and_another_key_cannot);
fn a_client_that_hangs_up_cancels_its_run_and_another_key_cannot() {
    let mark = token("hang");
    let service = Service::new();
    let other = stockade(["key", "new", "other", "--policy", "default", "--add", "--file", text(&service.keys())]).output().unwrap();
    let other = String::from_utf8(other.stdout).unwrap().trim().to_owned();
    service.signal("HUP");
    assert!(eventually(scaled(Duration::from_secs(5)), || service.ask("GET", "/v1/runs", &other, &Value::Null).status == 200));
    let sleep = format!("import subprocess; subprocess.run(['sh', '-c', 'sleep 60; : {mark}'])");
    let client = service.begin(&sleep);
    assert!(eventually(scaled(Duration::from_secs(10)), || host_process_with(&mark)), "the run does not begin: {}", service.log());
    assert!(service.has_runs("running", 1));
    let number = service.runs()[0]["run"].as_str().unwrap().to_owned();
    // The other key neither sees it nor can end it.
    assert_eq!(service.ask("GET", "/v1/runs", &other, &Value::Null).body, json!({"runs": [], "truncated": false}));
    service.ask("GET", &format!("/v1/runs/{number}"), &other, &Value::Null).is(404, "no_such_run");
    service.ask("DELETE", &format!("/v1/runs/{number}"), &other, &Value::Null).is(404, "no_such_run");
    assert!(host_process_with(&mark));
    drop(client);
    assert!(eventually(scaled(Duration::from_secs(5)), || !host_process_with(&mark)), "it outlives its client");
    assert!(service.has_runs("running", 0));
    // Its own key ends one, whose client hears of it.
    let client = service.begin(&sleep);
    assert!(service.has_runs("running", 1));
    assert!(eventually(scaled(Duration::from_secs(10)), || host_process_with(&mark)));
    let number = service.runs()[0]["run"].as_str().unwrap().to_owned();
    assert_eq!(service.ask("DELETE", &format!("/v1/runs/{number}"), &service.token, &Value::Null).status, 202);
    let answer = read_answer(client);
    assert_eq!((answer.status, &answer.body["verdict"], &answer.body["started"]), (200, &json!("cancelled"), &json!(true)));
    service.end();
}

test!(Both, requests_wait_for_their_turn_and_not_for_ever);
fn requests_wait_for_their_turn_and_not_for_ever() {
    let service = Service::with("[capacity]\ncpus = 1\nqueue = \"2s\"\nwaiting = 1\n[limits]\ndrain = \"1s\"\n", "");
    let begun = Instant::now();
    let first = service.begin("import time; time.sleep(1); print('first')");
    assert!(service.has_runs("running", 1));
    let second = service.begin("print('second')");
    assert!(service.has_runs("waiting", 1));
    let of = |state: &str| service.ask("GET", &format!("/v1/runs?state={state}"), &service.token, &Value::Null);
    assert!(["waiting", "running"].iter().all(|state| of(state).body["runs"].as_array().is_some_and(|runs| runs.len() == 1)));
    of("ended").is(400, "bad_http");
    let third = service.run("print('third')");
    assert!(third.is(503, "queue_full").head.to_ascii_lowercase().contains("retry-after: 1"), "{}", third.head);
    read_answer(first).ran("first\n");
    let second = read_answer(second);
    assert!(second.ran("second\n").body["queued_ms"].as_u64().unwrap() > 100 && begun.elapsed() > Duration::from_secs(1));
    let _long = service.begin("import time; time.sleep(20)");
    assert!(service.has_runs("running", 1));
    service.run("print('late')").is(503, "queue_timeout");
    service.end();
}

test!(Both, a_front_that_dies_is_replaced_and_its_runs_end);
fn a_front_that_dies_is_replaced_and_its_runs_end() {
    let mark = token("front");
    let mut service = Service::new();
    let _client = service.begin(&format!("import subprocess; subprocess.run(['sh', '-c', 'sleep 60; : {mark}'])"));
    assert!(eventually(scaled(Duration::from_secs(10)), || host_process_with(&mark)));
    let fronts = service.processes("stockade-serve");
    assert_eq!(fronts.len(), 1);
    kill(fronts[0], "KILL");
    assert!(eventually(scaled(Duration::from_secs(10)), || service.get("/live").is_some()), "{}", service.log());
    assert!(eventually(scaled(Duration::from_secs(10)), || !host_process_with(&mark)), "a run outlives its front");
    service.run("print(1)").ran("1\n");
    assert_ne!(service.processes("stockade-serve"), fronts);
    assert!(service.end().contains("the front has ended"));
}

test!(Both, a_front_that_takes_more_memory_than_it_may_is_replaced);
fn a_front_that_takes_more_memory_than_it_may_is_replaced() {
    let mut service = Service::with("[limits]\nbody = \"32MiB\"\nbuffers = \"64MiB\"\n", "");
    let front = service.processes("stockade-serve")[0];
    let number_of = |file: &str, name: &str| -> u64 {
        let text = fs::read_to_string(format!("/proc/{front}/{file}")).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.split_whitespace().next().unwrap().parse().unwrap()
    };
    let most = |buffers: u64| (2 * buffers + 512) << 20;
    assert_eq!(number_of("limits", "Max data size"), most(64));
    // It changes with the settings.
    let file = service.place.0.join("serve.toml");
    fs::write(&file, fs::read_to_string(&file).unwrap().replace("64MiB", "128MiB")).unwrap();
    service.signal("HUP");
    assert!(eventually(scaled(Duration::from_secs(5)), || number_of("limits", "Max data size") == most(128)), "{}", service.log());
    // The control: a request of this size has room.
    let code = format!("print(1)\n#{}", "x".repeat(24 << 20));
    service.run(&code).ran("1\n");
    // As if the front had more than it counts: that ends it, and not the host.
    let little = (number_of("status", "VmData:") << 10) + (4 << 20);
    let limit = ["prlimit", "--pid", &front.to_string(), &format!("--data={little}:")].map(str::to_owned);
    // Its own user may, and root perhaps not.
    let ids = [format!("--reuid={}", number_of("status", "Uid:")), format!("--regid={}", number_of("status", "Gid:"))];
    let (program, arguments): (_, Vec<String>) =
        if is_root() { ("setpriv", [&ids[..], &["--clear-groups".to_owned()], &limit].concat()) } else { ("prlimit", limit[1..].to_vec()) };
    assert!(Command::new(program).args(arguments).status().unwrap().success());
    let body = json!({ "code": code }).to_string();
    let mut stream = service.connect();
    let fields = [&*format!("Authorization: Bearer {}", service.token), "Content-Type: application/json"];
    let request = head("POST", "/v1/run", &fields, body.len()) + &body;
    // It breaks off where the front ends.
    let _sent = stream.write_all(request.as_bytes());
    let is_replaced = || service.processes("stockade-serve").first().is_some_and(|pid| *pid != front) && service.get("/live").is_some();
    assert!(eventually(scaled(Duration::from_secs(10)), is_replaced), "{}", service.log());
    service.run(&code).ran("1\n");
    assert!(service.end().contains("the front has ended"));
}

test!(Both, a_worker_that_dies_is_replaced_and_its_client_hears_of_it);
fn a_worker_that_dies_is_replaced_and_its_client_hears_of_it() {
    let service = Service::with("[capacity]\ncpus = 1\n", "");
    let mark = token("worker");
    let client = service.begin(&format!("import subprocess; subprocess.run(['sh', '-c', 'sleep 60; : {mark}'])"));
    assert!(eventually(scaled(Duration::from_secs(10)), || host_process_with(&mark)));
    let workers = service.processes("stockade serve-worker");
    assert_eq!(workers.len(), 1);
    kill(workers[0], "KILL");
    let answer = read_answer(client);
    assert_eq!(answer.is(500, "worker_lost").body["started"], true);
    assert!(eventually(scaled(Duration::from_secs(10)), || !host_process_with(&mark)), "a run outlives its worker");
    service.run("print(1)").ran("1\n");
    assert!(service.end().contains("a worker has ended"));
}

test!(Both, workers_that_are_killed_as_they_come_end_no_service);
fn workers_that_are_killed_as_they_come_end_no_service() {
    let service = Service::with("[capacity]\ncpus = 1\n", "");
    // More than may fail at their start.
    for _ in 0..8 {
        service.run("print(1)").ran("1\n");
        let workers = service.processes("stockade serve-worker");
        assert_eq!(workers.len(), 1);
        kill(workers[0], "KILL");
    }
    service.run("print(2)").ran("2\n");
    assert!(service.end().contains("is replaced (signal: 9 (SIGKILL))"));
}

test!(Both, an_answer_that_is_being_read_is_whole_when_the_service_ends);
fn an_answer_that_is_being_read_is_whole_when_the_service_ends() {
    for (drain, is_whole) in [("20s", true), ("100ms", false)] {
        let service = Service::with(&format!("[limits]\ndrain = \"{drain}\"\n"), "");
        // More than the sockets hold.
        let body = json!({"code": "print('x' * (3 << 20))", "limits": {"output_size": "4MiB"}}).to_string();
        let fields = [&*format!("Authorization: Bearer {}", service.token), "Content-Type: application/json"];
        let mut stream = service.connect();
        stream.write_all((head("POST", "/v1/run", &fields, body.len()) + &body).as_bytes()).unwrap();
        let mut said = vec![0; 100];
        stream.read_exact(&mut said).unwrap();
        service.signal("TERM");
        // The supervisor's own patience, beyond that of the file.
        std::thread::sleep(Duration::from_secs(if is_whole { 2 } else { 8 }));
        let _cut = stream.read_to_end(&mut said);
        assert_eq!(said.len() > 3 << 20 && said.ends_with(b"}\n"), is_whole, "{drain}: {}", said.len());
        service.end();
    }
}

test!(Both, a_service_that_is_told_to_end_answers_what_runs);
fn a_service_that_is_told_to_end_answers_what_runs() {
    let service = Service::with("[limits]\ndrain = \"2s\"\n", "");
    let short = service.begin("import time; time.sleep(1); print('done')");
    assert!(service.has_runs("running", 1));
    service.signal("TERM");
    read_answer(short).ran("done\n");
    service.end();
    // One that takes longer is cancelled, and its client hears that.
    let service = Service::with("[limits]\ndrain = \"1s\"\n", "");
    let long = service.begin("import time; time.sleep(60)");
    assert!(service.has_runs("running", 1));
    service.signal("TERM");
    let answer = read_answer(long);
    assert_eq!((answer.status, &answer.body["verdict"]), (200, &json!("cancelled")), "{}", answer.body);
    service.end();
}

test!(Both, keys_are_read_again_or_stay_as_they_were);
fn keys_are_read_again_or_stay_as_they_were() {
    let service = Service::new();
    let good = fs::read_to_string(service.keys()).unwrap();
    fs::write(service.keys(), format!("{good}colour = 1\n")).unwrap();
    service.signal("HUP");
    assert!(eventually(scaled(Duration::from_secs(5)), || service.log().contains("stays as it was")));
    service.run("print(1)").ran("1\n");
    fs::write(service.keys(), good.replace("id = \"test\"", "id = \"renamed\"")).unwrap();
    service.signal("HUP");
    assert!(eventually(scaled(Duration::from_secs(5)), || service.run("print(1)").body["key"] == "renamed"));
    let other = stockade(["key", "new", "next", "--policy", "default"]).output().unwrap();
    fs::write(
        service.keys(),
        String::from_utf8(other.stderr).unwrap().split_once("[[key]]").map(|(_, table)| format!("[[key]]{table}")).unwrap(),
    )
    .unwrap();
    service.signal("HUP");
    assert!(eventually(scaled(Duration::from_secs(5)), || service.run("print(1)").status == 401), "{}", service.log());
    service.run("print(1)").is(401, "key_unknown");
    service.end();
}

test!(Both, a_service_without_keys_or_with_a_mistake_does_not_begin);
fn a_service_without_keys_or_with_a_mistake_does_not_begin() {
    let place = PolicyDirectory::new();
    let begin = |config: &str, keys: &str| {
        fs::write(place.0.join("serve.toml"), format!("schema = 1\nkeys = {:?}\n{config}", place.0.join("keys.toml"))).unwrap();
        fs::write(place.0.join("keys.toml"), keys).unwrap();
        fs::set_permissions(place.0.join("keys.toml"), std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        let mut child = start(&place);
        let ended = wait_within(&mut child, scaled(Duration::from_secs(10))).expect("it does not begin");
        (ended.code(), fs::read_to_string(place.0.join("log")).unwrap())
    };
    let key = "[[key]]\nid = \"a\"\nuid = 1000\npolicies = [\"default\"]\n";
    for (config, keys, words) in [
        ("", "", &["has no key", "stockade key new"][..]),
        ("[listen]\ncolour = 1\n", key, &["colour", "serve.toml:4"]),
        ("", &key.replace("default", "missing"), &["keys.toml:1", "missing"]),
        (&format!("[listen]\nunix = {:?}\n", place.0.join("log")), key, &["another file is there"]),
    ] {
        let (status, said) = begin(config, keys);
        assert_eq!(status, Some(125), "{said}");
        words.iter().for_each(|word| assert!(said.contains(word), "{word}: {said}"));
    }
}

/// A worker whose front and supervisor are this test.
pub(super) struct Worker {
    child: Child,
    pub(super) front: UnixStream,
    supervisor: UnixStream,
}

impl Worker {
    /// One whose table has the key `k` with the policy `default`.
    pub(super) fn new() -> Self {
        let (front, its_front) = UnixStream::pair().unwrap();
        let (supervisor, its) = UnixStream::pair().unwrap();
        let mut command = if is_root() {
            let passwd = fs::read_to_string("/etc/passwd").unwrap();
            let passwd = format!("{passwd}stockade-serve:x:{ACCOUNT}:{ACCOUNT}::/nonexistent:/usr/sbin/nologin\n");
            command_with_etc(&[("passwd", &passwd)], &[], &["serve-worker"])
        } else {
            stockade(["serve-worker"])
        };
        let child = command.stdin(OwnedFd::from(its_front)).stdout(OwnedFd::from(its)).stderr(Stdio::piped()).spawn().unwrap();
        front.set_read_timeout(Some(scaled(Duration::from_secs(20)))).unwrap();
        let mut worker = Worker { child, front, supervisor };
        worker.give_table(&json!({"policies": {"k": ["default"]}}));
        assert_eq!(worker.next().unwrap().0, 128, "it is idle");
        worker
    }

    /// Its table is this from now on.
    fn give_table(&mut self, table: &Value) {
        let file = fs::File::from(memfd_create(c"table", MemfdFlags::CLOEXEC).unwrap());
        (&file).write_all(table.to_string().as_bytes()).unwrap();
        let (files, bytes) = ([file.as_fd()], frame(27, b""));
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(&files)));
        sendmsg(&self.supervisor, &[IoSlice::new(&bytes)], &mut ancillary, SendFlags::empty()).unwrap();
    }

    pub(super) fn say(&mut self, kind: u8, payload: &[u8]) {
        // One that has ended does not listen.
        let _unheard = self.front.write_all(&frame(kind, payload));
    }

    /// None: it has ended.
    pub(super) fn next(&mut self) -> Option<(u8, Vec<u8>)> {
        let mut head = [0; 5];
        self.front.read_exact(&mut head).ok()?;
        let mut payload = vec![0; u32::from_le_bytes([head[0], head[1], head[2], head[3]]) as usize];
        self.front.read_exact(&mut payload).ok()?;
        Some((head[4], payload))
    }

    pub(super) fn run(&mut self, key: &str, policy: &str, request: &Value) -> Value {
        let request = request.to_string();
        self.say(1, json!({"run": "0", "key": key, "policy": policy, "length": request.len(), "output": false}).to_string().as_bytes());
        self.say(2, request.as_bytes());
        self.result()
    }

    /// The result of its run, after which it is idle.
    pub(super) fn result(&mut self) -> Value {
        let mut result = Vec::new();
        while let Some((kind @ (129 | 131), part)) = self.next() {
            assert!(kind == 129 || result.is_empty(), "it starts after its result");
            result.extend(part);
        }
        assert_eq!(self.next().map(|(kind, _)| kind), Some(128));
        serde_json::from_slice(&result).unwrap()
    }

    /// What it said at its end.
    pub(super) fn ended(mut self) -> String {
        assert!(wait_within(&mut self.child, scaled(Duration::from_secs(10))).is_some(), "it goes on");
        let mut said = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        said
    }
}

pub(super) fn frame(kind: u8, payload: &[u8]) -> Vec<u8> {
    [&u32::try_from(payload.len()).unwrap().to_le_bytes()[..], &[kind], payload].concat()
}

test!(Both, a_front_that_was_taken_over_gets_what_its_keys_have);
fn a_front_that_was_taken_over_gets_what_its_keys_have() {
    let mut worker = Worker::new();
    let print = json!({"code": "print(1)"});
    assert_eq!(worker.run("k", "default", &print)["output"], "1\n");
    let policy = PolicyDirectory::new();
    let own = policy.write("own.toml", "schema = 1\nextends = \"default\"\n");
    for (key, policy) in [("k", "strict"), ("k", &own), ("k", "../default"), ("other", "default"), ("", ""), ("k", "")] {
        let refused = worker.run(key, policy, &print);
        assert_eq!((&refused["reason"], &refused["started"]), (&json!("not_granted"), &json!(false)), "{key} {policy}");
    }
    let scratch = worker.run("k", "default", &json!({"code": "print(1)", "scratch": "/var/lib"}));
    assert_eq!(scratch["reason"], "scratch_of_key");
    if is_root() {
        // A run is the account's, never root's.
        let seen = worker.run("k", "default", &json!({"code": "print(open('/proc/self/uid_map').read().split()[1])"}));
        assert_ne!(seen["output"], "0\n");
    }
    // The supervisor's word counts, not the front's.
    worker.give_table(&json!({"policies": {}}));
    assert!(eventually(scaled(Duration::from_secs(5)), || worker.run("k", "default", &print)["reason"] == "not_granted"));
    drop(worker.front.shutdown(std::net::Shutdown::Both));
    worker.ended();
}

test!(Both, an_idle_worker_says_what_it_has_prepared_by_now);
fn an_idle_worker_says_what_it_has_prepared_by_now() {
    let mut worker = Worker::new();
    // It has nothing prepared, and says nothing more for a table that does not change that.
    worker.give_table(&json!({"policies": {"k": ["default"]}}));
    worker.give_table(&json!({"policies": {"k": ["default"]}, "ready_for": {"key": "k", "policy": "default", "runtime": "python"}}));
    let (kind, said) = worker.next().unwrap();
    let prepared: Value = serde_json::from_slice(&said).unwrap();
    assert_eq!((kind, &prepared["policy"], &prepared["key"]), (128, &json!("default"), &Value::Null), "{prepared}");
    assert!(prepared["languages"].as_array().unwrap().contains(&json!("python")), "{prepared}");
    assert_eq!(worker.run("k", "default", &json!({"code": "print(1)"}))["output"], "1\n");
    drop(worker.front.shutdown(std::net::Shutdown::Both));
    worker.ended();
}

test!(Both, what_no_front_says_ends_a_worker);
fn what_no_front_says_ends_a_worker() {
    let begin =
        |length: u64| json!({"run": "0", "key": "k", "policy": "default", "length": length, "output": true}).to_string().into_bytes();
    let cases: [(&str, Vec<Vec<u8>>); 7] = [
        ("unexpected kind 77", vec![frame(77, b"")]),
        ("payload does not fit", vec![frame(1, b"{}")]),
        ("more than 65536 bytes", vec![vec![255; 5]]),
        ("a request without its run", vec![frame(2, b"x")]),
        ("more than it had announced", vec![frame(1, &begin(1)), frame(2, b"xx")]),
        ("a run before the end", vec![frame(1, &begin(9)), frame(1, &begin(9))]),
        ("too long", vec![frame(1, &begin(1 << 40))]),
    ];
    for (words, said) in cases {
        let mut worker = Worker::new();
        for bytes in said {
            let _unheard = worker.front.write_all(&bytes);
        }
        let last = worker.ended();
        assert!(last.contains(words), "{words}: {last}");
    }
    // What it says in the middle of a run ends the run first.
    let mark = token("wild");
    let mut worker = Worker::new();
    let request = json!({"code": format!("import subprocess; subprocess.run(['sh', '-c', 'sleep 60; : {mark}'])")}).to_string();
    worker.say(1, &begin(request.len() as u64));
    worker.say(2, request.as_bytes());
    assert!(eventually(scaled(Duration::from_secs(10)), || host_process_with(&mark)));
    worker.say(77, b"");
    assert!(eventually(scaled(Duration::from_secs(10)), || !host_process_with(&mark)));
    drop(worker.supervisor.shutdown(std::net::Shutdown::Both));
    let _result = std::iter::from_fn(|| worker.next()).count();
    worker.ended();
}

test!(Both, a_front_has_no_rights_and_no_file);
fn a_front_has_no_rights_and_no_file() {
    let service = Service::new();
    service.run("print(1)").ran("1\n");
    let front = service.processes("stockade-serve")[0];
    let worker = service.processes("stockade serve-worker")[0];
    let status = |pid: i32| fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let of = |pid: i32, name: &str| status(pid).lines().find_map(|line| Some(line.strip_prefix(name)?.trim().to_owned())).unwrap();
    assert_eq!([of(front, "Seccomp:"), of(front, "NoNewPrivs:"), of(front, "CapEff:"), of(front, "CapBnd:")], {
        let bounding = if is_root() { "0000000000000000".to_owned() } else { of(worker, "CapBnd:") };
        ["2".to_owned(), "1".to_owned(), "0000000000000000".to_owned(), bounding]
    });
    // The control: a worker has what a launcher has.
    assert_eq!(of(worker, "Seccomp:"), of(i32::try_from(std::process::id()).unwrap(), "Seccomp:"));
    if is_root() {
        assert_eq!(of(front, "Uid:").split_whitespace().next(), Some(&*ACCOUNT.to_string()));
        assert!(of(worker, "CapEff:") != "0000000000000000");
    }
    for entry in fs::read_dir(format!("/proc/{front}/fd")).into_iter().flatten().flatten() {
        let leads = fs::read_link(entry.path()).unwrap();
        let (leads, number) = (text(&leads).to_owned(), entry.file_name());
        let is_harmless = ["socket:", "anon_inode:", "/dev/null"].iter().any(|kind| leads.starts_with(kind)) || number == "2";
        assert!(is_harmless, "{number:?} leads to {leads}");
    }
    let environment = fs::read(format!("/proc/{front}/environ")).unwrap_or_default();
    assert!(environment.is_empty(), "{environment:?}");
    service.end();
}

test!(Both, no_token_is_kept_by_any_process_but_the_client);
fn no_token_is_kept_by_any_process_but_the_client() {
    let service = Service::new();
    service.run("print(1)").ran("1\n");
    let files = [service.keys(), service.place.0.join("serve.toml"), service.place.0.join("log")];
    // It may have this letter in it, too.
    let secret = service.token.strip_prefix("sd_test_").unwrap();
    assert_eq!(secret.len(), 43);
    for file in &files {
        assert!(!fs::read_to_string(file).unwrap().contains(secret), "{}", file.display());
    }
    let lines = |pid: &i32| fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("cmdline")).unwrap_or_default();
    assert!(service.processes("stockade").iter().all(|pid| !lines(pid).contains(secret)));
    service.end();
}
