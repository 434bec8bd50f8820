//! What workers of a service prepare: that programs cannot tell, whose runs start from which image, and
//! what becomes of it where a process ends or a file is exchanged. The control of each denial is a run
//! that starts from a copy.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, thread,
    time::Duration,
};

use serde_json::{Value, json};

use super::{
    serve::{Answer, Service, kill, start},
    serve_facades::metrics,
};
use crate::support::{
    exec::{exec_with, stockade, text},
    policy_dir::{PolicyDirectory, derived},
    runner::{eventually, test, wait_within},
    session::{children, is_screener},
    starts::{CURIOUS_PROGRAMS, NO_TEMPLATE, started, told},
    timeouts::{scaled, scaled_limit},
};

/// The time that a service has for its template, with others beside it.
const MADE: Duration = Duration::from_secs(60);
/// Prints what all copies of one image have in common.
const LAYOUT: &str = "print(id(print), hash('x'))";

/// A service with one policy of its own, and keys for it.
struct Warm {
    service: Service,
    policy: String,
    tokens: Vec<String>,
}

impl Warm {
    /// With these lines more in `default`, so many workers, and a key of each of these names.
    fn new(lines: &str, workers: usize, keys: &[&str]) -> Self {
        Warm::at(PolicyDirectory::new(), lines, workers, keys)
    }

    fn at(place: PolicyDirectory, lines: &str, workers: usize, keys: &[&str]) -> Self {
        Warm::within("4GiB", place, lines, workers, keys)
    }

    /// The same, whose runs share this memory.
    fn within(memory: &str, place: PolicyDirectory, lines: &str, workers: usize, keys: &[&str]) -> Self {
        let policy = place.write("warm", &derived(lines));
        let at = |name: &str| place.0.join(name);
        let config = format!(
            "schema = 1\nkeys = {:?}\n[listen]\nunix = {:?}\ntcp = \"none\"\n[capacity]\ncpus = {workers}\nmemory = {memory:?}\n",
            at("keys.toml"),
            at("s")
        );
        fs::write(at("serve.toml"), config).unwrap();
        let new = |key: &&str| {
            let made = stockade(["key", "new", key, "--policy", &policy, "--add", "--file", text(&at("keys.toml"))]).output().unwrap();
            assert!(made.status.success(), "{made:?}");
            String::from_utf8(made.stdout).unwrap().trim().to_owned()
        };
        let tokens: Vec<String> = keys.iter().map(new).collect();
        let mut service = Service { child: start(&place), place, token: tokens[0].clone(), port: 0 };
        let is_there = eventually(scaled(Duration::from_secs(20)), || service.get("/live").is_some_and(|live| live.status == 200));
        assert!(is_there, "{}", service.log());
        Warm { service, policy, tokens }
    }

    /// Runs a request of the key of this index.
    #[track_caller]
    fn ask_as(&self, key: usize, request: &Value) -> Value {
        let mut request = request.clone();
        request["limits"] = json!({"wall": scaled_limit(30_000)});
        let Answer { status, body, .. } = self.service.ask("POST", "/v1/run", &self.tokens[key], &request);
        assert_eq!(status, 200, "{body}");
        body
    }

    #[track_caller]
    fn ask(&self, request: &Value) -> Value {
        self.ask_as(0, request)
    }

    #[track_caller]
    fn run(&self, code: &str) -> Value {
        self.ask(&json!({ "code": code }))
    }

    /// Asks until a request starts in this way. Returns that result.
    #[track_caller]
    fn until_started_as(&self, key: usize, request: &Value, start: &str, cause: &str) -> Value {
        let mut result = Value::Null;
        let is_so = eventually(MADE, || {
            result = self.ask_as(key, request);
            let receipt = &result["receipt"];
            receipt["start"] == start && receipt["start_cause"].as_str().unwrap_or_default().contains(cause)
        });
        assert!(is_so, "no request starts so: {start}, {cause}: {} {}\n{}", result["receipt"], result["error"], self.service.log());
        result
    }

    #[track_caller]
    fn until_started(&self, request: &Value, start: &str, cause: &str) -> Value {
        self.until_started_as(0, request, start, cause)
    }

    /// The same for a copy, of which it returns what copies of its image have in common.
    #[track_caller]
    fn until_restored_as(&self, key: usize) -> String {
        layout(&self.until_started_as(key, &json!({"code": LAYOUT}), "restored", ""))
    }

    /// Processes that make a template.
    fn makers(&self) -> Vec<i32> {
        self.service.processes("/proc/self/exe templates make")
    }

    fn workers(&self) -> Vec<i32> {
        self.service.processes("stockade serve-worker")
    }

    /// The process of its kind that a worker has prepared a sandbox with.
    fn prepared(&self) -> Vec<i32> {
        let below = |worker: &i32| children(u32::try_from(*worker).unwrap());
        // A screener stays beside it.
        let is_sandbox = |pid: &u32| !is_screener(*pid);
        self.workers().iter().flat_map(below).filter(is_sandbox).map(|pid| i32::try_from(pid).unwrap()).collect()
    }

    /// Copies of an interpreter that wait in those sandboxes. A copy has no command line.
    fn waiting_copies(&self) -> usize {
        let read = |pid: u32, name: &str| fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap_or_default();
        let is_copy = |pid: &u32| {
            let lives = !read(*pid, "stat").contains(") Z ") && !read(*pid, "stat").is_empty();
            lives && read(*pid, "comm").starts_with("python") && read(*pid, "cmdline").is_empty()
        };
        let inside = |pid: &i32| children(u32::try_from(*pid).unwrap());
        self.prepared().iter().flat_map(inside).filter(is_copy).count()
    }

    /// Waits until the front knows that all workers wait, and so many of them have prepared a sandbox.
    /// Without that a request may find only the other worker.
    #[track_caller]
    fn settle(&self, workers: usize, prepared: usize) {
        let idle = format!("stockade_workers{{state=\"idle\"}} {workers}\n");
        let is_settled = || metrics(&self.service).contains(&idle) && self.prepared().len() == prepared;
        assert!(eventually(scaled(Duration::from_secs(20)), is_settled), "{:?} {}", self.prepared(), metrics(&self.service));
        // A worker says what it has prepared when that is set up.
        thread::sleep(scaled(Duration::from_millis(50)));
    }
}

#[track_caller]
fn layout(result: &Value) -> String {
    restored(result);
    result["output"].as_str().unwrap().to_owned()
}

#[track_caller]
fn restored(result: &Value) {
    started(result, "restored", "");
    assert_eq!((&result["receipt"]["layout"], &result["receipt"]["start_cause"]), (&json!("shared"), &Value::Null));
}

fn with_template(lines: &str) -> String {
    format!("[templates.bare]\n{lines}")
}

/// Each program's result is that of `exec`, whose interpreter was started for it.
#[track_caller]
fn compared(warm: &Warm, start_of: impl Fn(&str) -> &'static str) {
    for (language, code) in CURIOUS_PROGRAMS {
        let request = json!({"code": code, "language": language, "limits": {"wall": scaled_limit(30_000)}});
        let fresh = exec_with(&["--policy", &warm.policy], request.clone()).result;
        let other = warm.until_started(&request, start_of(language), "");
        assert_eq!(told(&other), told(&fresh), "{language}: {code}");
    }
}

test!(RootlessOnly, a_program_of_a_service_cannot_tell_that_its_interpreter_waited, seconds 240);
fn a_program_of_a_service_cannot_tell_that_its_interpreter_waited() {
    let warm = Warm::new(NO_TEMPLATE, 1, &["a"]);
    compared(&warm, |_| "prestarted");
    warm.service.end();
}

test!(RootOnly, a_program_of_a_service_cannot_tell_that_its_interpreter_is_a_copy, seconds 240);
fn a_program_of_a_service_cannot_tell_that_its_interpreter_is_a_copy() {
    let warm = Warm::new("", 1, &["a"]);
    compared(&warm, |language| if language == "python" { "restored" } else { "prestarted" });
    // What is asked for besides holds in a copy too.
    let show = "import os, sys\nprint(sys.argv[1:], sys.stdin.read(), sorted(os.listdir('.')), os.path.basename(__file__))";
    for (field, value, shows) in [
        ("args", json!(["a b", ""]), "['a b', '']  ['main.py'] main.py\n"),
        ("stdin", json!("given"), "[] given ['main.py'] main.py\n"),
        ("files", json!({"a/b": "c"}), "[]  ['a', 'main.py'] main.py\n"),
    ] {
        let mut request = json!({"code": show});
        request[field] = value;
        let result = warm.ask(&request);
        assert_eq!(result["output"], shows, "{field}: {result}");
        restored(&result);
    }
    for (field, value, cause) in [
        ("template", json!("none"), "the request asks for no copy"),
        ("env", json!({"TZ": "Asia/Tokyo"}), "other variables or limits"),
        ("files", json!({"json.py": "", "main.py": "x"}), "another file name"),
    ] {
        let mut request = json!({"code": LAYOUT});
        request[field] = value;
        let result = warm.ask(&request);
        started(&result, "fresh", cause);
        assert_eq!((&result["receipt"]["layout"], &result["success"]), (&Value::Null, &json!(true)), "{result}");
    }
    warm.service.end();
}

test!(Both, code_is_screened_before_a_worker_gives_it_a_copy, seconds 90);
fn code_is_screened_before_a_worker_gives_it_a_copy() {
    let warm = Warm::new("[screen]\ndestroy = \"deny\"", 1, &["a"]);
    warm.until_restored_as(0);
    for _ in 0..3 {
        let result = warm.run("import shutil\nshutil.rmtree('/', ignore_errors=True)\nprint('ran')");
        assert_eq!((&result["verdict"], &result["started"], &result["output"]), (&json!("screened"), &json!(false), &json!("")));
        restored(&warm.run("print('ran')"));
    }
    warm.service.end();
}

test!(RootlessOnly, of_two_hundred_runs_at_once_none_draws_the_random_value_of_another, seconds 120);
fn of_two_hundred_runs_at_once_none_draws_the_random_value_of_another() {
    let modules = "imports = [\"random\", \"secrets\", \"ssl\", \"uuid\"]\nwarm = \"import random; random.random()\"";
    let warm = Warm::new(&with_template(modules), 4, &["a"]);
    let code = "import json, os, random, secrets, ssl, uuid\nprint(json.dumps([id(print), \
                [random.random(), str(uuid.uuid4()), secrets.token_hex(8), ssl.RAND_bytes(8).hex(), os.urandom(8).hex()]]))";
    let one = || {
        thread::scope(|scope| {
            let runs: Vec<_> = (0..8).map(|_| scope.spawn(|| (0..25).map(|_| warm.run(code)).collect::<Vec<_>>())).collect();
            runs.into_iter().flat_map(|run| run.join().unwrap()).collect::<Vec<_>>()
        })
    };
    // A worker has the image after its first request.
    warm.until_restored_as(0);
    one();
    thread::sleep(scaled(Duration::from_millis(300)));
    let (mut layouts, mut drawn) = (BTreeSet::new(), BTreeSet::new());
    for result in one() {
        restored(&result);
        let [layout, values]: [Value; 2] = serde_json::from_str(result["output"].as_str().unwrap()).unwrap();
        layouts.insert(layout.to_string());
        drawn.extend(values.as_array().unwrap().iter().map(Value::to_string));
    }
    // The control: what is not random is the same in all.
    assert_eq!((layouts.len(), drawn.len()), (1, 1000));
    warm.service.end();
}

test!(Both, an_image_is_of_one_key_unless_the_policy_shares_it, seconds 120);
fn an_image_is_of_one_key_unless_the_policy_shares_it() {
    for (lines, is_shared) in [("", false), ("shared_by = \"policy\"", true)] {
        let warm = Warm::new(&with_template(lines), 1, &["a", "b"]);
        let layouts: Vec<String> = [0, 1, 0, 1].map(|key| warm.until_restored_as(key)).to_vec();
        assert_eq!((layouts[0] == layouts[1], layouts[0] == layouts[2], layouts[1] == layouts[3]), (is_shared, true, true), "{layouts:?}");
        // What was prepared for one key is a copy of its image, and no other key's run gets it, in whatever
        // language.
        for key in [1, 0, 1] {
            assert_eq!(layout(&warm.ask_as(key, &json!({"code": LAYOUT}))), layouts[key]);
        }
        let bash = warm.ask_as(0, &json!({"code": "echo 1", "language": "bash"}));
        started(&bash, "fresh", if is_shared { "other arguments" } else { "a copy of another key's template" });
        let images = warm.service.log().matches("an image of").count();
        assert_eq!(images, if is_shared { 1 } else { 2 }, "{}", warm.service.log());
        warm.service.end();
    }
}

test!(RootOnly, images_in_rotation_have_each_its_own_layout, seconds 120);
fn images_in_rotation_have_each_its_own_layout() {
    let warm = Warm::new(&with_template("images = 3\nmax_runs = 100"), 2, &["a"]);
    let mut seen = BTreeSet::new();
    assert!(eventually(MADE, || warm.service.log().matches("an image of").count() == 3 || warm.run("").is_null()));
    for _ in 0..120 {
        let result = warm.run(LAYOUT);
        if result["receipt"]["start"] == "restored" {
            seen.insert(layout(&result));
        }
    }
    assert!(seen.len() >= 3, "{seen:?}");
    warm.service.end();
}

test!(RootOnly, all_workers_together_start_no_more_copies_of_an_image_than_it_may_have, seconds 120);
fn all_workers_together_start_no_more_copies_of_an_image_than_it_may_have() {
    let warm = Warm::new(&with_template("max_runs = 5"), 3, &["a"]);
    let counted = std::sync::Mutex::new(BTreeMap::<String, u32>::new());
    let is_renewed = || counted.lock().unwrap().len() > 3;
    let ask = || {
        eventually(MADE, || {
            let result = warm.run(LAYOUT);
            if result["receipt"]["start"] == "restored" {
                *counted.lock().unwrap().entry(layout(&result)).or_default() += 1;
            }
            is_renewed()
        })
    };
    thread::scope(|scope| (0..4).for_each(|_| drop(scope.spawn(ask))));
    let counted = counted.into_inner().unwrap();
    // The control: there were some, and the next image came when the first was used up.
    assert!(counted.len() > 3 && counted.values().all(|runs| *runs <= 5), "{counted:?}");
    warm.service.end();
}

test!(Both, a_worker_is_ready_before_the_first_request, seconds 120);
fn a_worker_is_ready_before_the_first_request() {
    let warm = Warm::new(&with_template("ready = 1"), 2, &["a"]);
    assert!(eventually(MADE, || warm.service.log().contains("template bare of policy") && warm.makers().is_empty()));
    // The interpreter that was started first gives way to the copy.
    let has_copy = || eventually(scaled(Duration::from_secs(20)), || warm.waiting_copies() == 1);
    assert!(has_copy(), "{}", warm.service.log());
    restored(&warm.run(""));
    // It stays ready for that, whatever it has run meanwhile: it has one of two requests at the same time.
    let bash = json!({"code": "sleep 0.3; echo 1", "language": "bash"});
    let ask = || assert_eq!(warm.ask(&bash)["output"], "1\n");
    for prepared in [1, 2] {
        warm.settle(2, prepared);
        thread::scope(|scope| [scope.spawn(ask), scope.spawn(ask)].map(|asking| asking.join().unwrap()));
    }
    warm.settle(2, 2);
    assert!(has_copy(), "{}", warm.service.log());
    restored(&warm.run(""));
    warm.service.end();
}

test!(Both, more_workers_ready_than_there_are_is_a_mistake);
fn more_workers_ready_than_there_are_is_a_mistake() {
    for (lines, workers, wanted) in [("ready = 2", 3, 4), ("ready = 4\nshared_by = \"policy\"", 3, 4), ("ready = 1", 2, 2)] {
        let place = PolicyDirectory::new();
        let policy = place.write("warm", &derived(&with_template(lines)));
        let at = |name: &str| place.0.join(name);
        let config = format!(
            "schema = 1\nkeys = {:?}\n[listen]\nunix = {:?}\ntcp = \"none\"\n[capacity]\ncpus = {workers}\nmemory = \"4GiB\"\n",
            at("keys.toml"),
            at("s")
        );
        fs::write(at("serve.toml"), config).unwrap();
        for key in ["a", "b"] {
            assert!(
                stockade(["key", "new", key, "--policy", &policy, "--add", "--file", text(&at("keys.toml"))])
                    .output()
                    .unwrap()
                    .status
                    .success()
            );
        }
        if wanted <= workers {
            // The control.
            let mut child = start(&place);
            assert!(
                eventually(scaled(Duration::from_secs(10)), || fs::read_to_string(at("log")).is_ok_and(|log| log.contains("serving at")))
            );
            kill(i32::try_from(child.id()).unwrap(), "TERM");
            wait_within(&mut child, scaled(Duration::from_secs(20))).expect("it ends");
            continue;
        }
        let ended = wait_within(&mut start(&place), scaled(Duration::from_secs(10))).expect("it does not begin");
        let said = fs::read_to_string(at("log")).unwrap();
        assert_eq!(ended.code(), Some(125), "{said}");
        for words in [&format!("{wanted} workers would have to be ready, and there are {workers}"), "[templates.bare]", "lower `ready`"] {
            assert!(said.contains(words), "{words}: {said}");
        }
    }
}

test!(Both, a_request_gets_the_worker_that_is_prepared_for_it, seconds 90);
fn a_request_gets_the_worker_that_is_prepared_for_it() {
    let warm = Warm::new(NO_TEMPLATE, 2, &["a"]);
    let (python, bash) = (json!({"code": "print(1)"}), json!({"code": "echo 1", "language": "SHELL"}));
    for (request, prepared) in [(&python, 1), (&bash, 2)] {
        warm.ask(request);
        warm.settle(2, prepared);
    }
    for _ in 0..5 {
        for request in [&python, &bash, &json!({"code": "print(2)", "language": "py"}), &bash] {
            started(&warm.ask(request), "prestarted", "");
            warm.settle(2, 2);
        }
    }
    // The control: with one more language than workers one of them is not prepared for it.
    let sh = warm.ask(&json!({"code": "echo 1", "language": "sh"}));
    started(&sh, "fresh", "other arguments");
    warm.service.end();
}

test!(Both, an_interpreter_that_waits_gets_the_stdin_of_its_request, seconds 90);
fn an_interpreter_that_waits_gets_the_stdin_of_its_request() {
    let warm = Warm::new("", 1, &["a"]);
    let large = "line\n".repeat(1 << 18);
    for (language, code, start) in [
        ("bash", "cat", "prestarted"),
        ("sh", "cat", "prestarted"),
        ("node", "process.stdin.pipe(process.stdout)", "prestarted"),
        ("python", "import shutil, sys; shutil.copyfileobj(sys.stdin, sys.stdout)", "restored"),
    ] {
        let request = |stdin: &str| json!({"language": language, "code": code, "stdin": stdin});
        warm.until_started(&request("first"), start, "");
        for stdin in ["", "given", &large] {
            let result = warm.ask(&request(stdin));
            started(&result, start, "");
            let length = usize::try_from(result["bytes"]["output"].as_u64().unwrap()).unwrap();
            assert_eq!((length, &result["success"]), (stdin.len(), &json!(true)), "{language}: {}", result["error"]);
        }
        // Without stdin it is another start, and the next is prepared so.
        let without = json!({"language": language, "code": code});
        let result = warm.ask(&without);
        assert_eq!((&result["output"], &result["success"]), (&json!(""), &json!(true)), "{language}: {}", result["error"]);
        if language != "python" {
            started(&result, "fresh", "did not fit");
        }
        started(&warm.until_started(&without, start, ""), start, "");
    }
    warm.service.end();
}

test!(Both, an_idle_worker_that_has_ended_gets_no_request, seconds 90);
fn an_idle_worker_that_has_ended_gets_no_request() {
    let warm = Warm::new("", 2, &["a"]);
    warm.until_restored_as(0);
    // A service ends whose workers end again and again as soon as they begin.
    for _ in 0..2 {
        let before = warm.workers();
        before.iter().for_each(|worker| kill(*worker, "KILL"));
        let has_others = || warm.workers().len() == 2 && warm.workers().iter().all(|worker| !before.contains(worker));
        assert!(eventually(scaled(Duration::from_secs(10)), has_others));
        // The front still has those that have ended, and no client hears of it.
        assert_eq!(warm.run("print(6 * 7)")["output"], "42\n");
    }
    // Those that take their places get the template too.
    let before = warm.workers();
    assert!(before.len() <= 2);
    warm.until_restored_as(0);
    assert_eq!(warm.service.log().matches("an image of").count(), 1, "{}", warm.service.log());
    warm.service.end();
}

test!(Both, a_prepared_sandbox_that_is_killed_costs_a_service_nothing_else, seconds 90);
fn a_prepared_sandbox_that_is_killed_costs_a_service_nothing_else() {
    let warm = Warm::new("", 1, &["a"]);
    warm.until_restored_as(0);
    for _ in 0..5 {
        assert!(eventually(scaled(Duration::from_secs(10)), || warm.prepared().len() == 1), "{:?}", warm.prepared());
        kill(warm.prepared()[0], "KILL");
        let result = warm.run("print(6 * 7)");
        assert_eq!(result["output"], "42\n", "{result}");
    }
    warm.until_restored_as(0);
    warm.service.end();
}

test!(Both, a_signal_to_an_idle_worker_ends_no_run, seconds 90);
fn a_signal_to_an_idle_worker_ends_no_run() {
    let warm = Warm::new("", 1, &["a"]);
    warm.until_restored_as(0);
    for signal in ["TERM", "HUP", "INT"] {
        let worker = warm.workers()[0];
        kill(worker, signal);
        let is_another = || warm.workers().first().is_some_and(|now| *now != worker);
        assert!(eventually(scaled(Duration::from_secs(10)), is_another), "{signal}");
        assert_eq!(warm.run("print(6 * 7)")["output"], "42\n");
    }
    warm.service.end();
}

test!(Both, an_image_whose_maker_is_killed_is_made_by_another, seconds 120);
fn an_image_whose_maker_is_killed_is_made_by_another() {
    for (times, is_refused) in [(1, false), (3, true)] {
        let warm = Warm::new(&with_template("warm = \"import time; time.sleep(0.5)\""), 1, &["a"]);
        let mut killed = BTreeSet::new();
        let all = eventually(MADE, || {
            warm.run("");
            for maker in warm.makers() {
                if killed.len() < times && killed.insert(maker) {
                    kill(maker, "KILL");
                }
            }
            killed.len() == times
        });
        assert!(all, "{killed:?} {}", warm.service.log());
        match is_refused {
            false => drop(warm.until_restored_as(0)),
            true => {
                let cause = "the template was refused: the process that makes it ended";
                warm.until_started(&json!({"code": ""}), "prestarted", cause);
                assert!(warm.service.log().contains("template bare of policy"), "{}", warm.service.log());
                // It is tried again where the settings are read anew.
                warm.service.signal("HUP");
                warm.until_restored_as(0);
            }
        }
        warm.service.end();
    }
}

test!(Both, a_template_that_a_service_refuses_costs_its_requests_nothing_else, seconds 90);
fn a_template_that_a_service_refuses_costs_its_requests_nothing_else() {
    let warm = Warm::new(&with_template("imports = [\"no_such_module\"]"), 1, &["a"]);
    let result = warm.until_started(&json!({"code": "print(1)"}), "prestarted", "the template was refused: ");
    assert!(result["receipt"]["start_cause"].as_str().unwrap().contains("no_such_module"), "{}", result["receipt"]["start_cause"]);
    assert_eq!(result["output"], "1\n");
    assert!(warm.service.log().contains("no_such_module"), "{}", warm.service.log());
    warm.service.end();
    // A reason of whatever length ends no worker.
    let warm = Warm::new(&with_template("warm = \"raise ValueError('x' * 100000)\""), 1, &["a"]);
    let worker = warm.workers();
    let result = warm.until_started(&json!({"code": "print(1)"}), "prestarted", "ValueError: xxx");
    let cause = result["receipt"]["start_cause"].as_str().unwrap();
    assert!(cause.len() < 2000, "{}", cause.len());
    assert_eq!(warm.workers(), worker, "{}", warm.service.log());
    warm.service.end();
}

test!(Both, images_have_an_eighth_of_the_memory_of_runs, seconds 120);
fn images_have_an_eighth_of_the_memory_of_runs() {
    // Its image has 40 MiB and some more.
    let lines = with_template("warm = \"import sys; sys.kept = bytearray(range(256)) * (160 << 10)\"\n[limits]\nmemory = \"256MiB\"");
    let too_small = Warm::within("256MiB", PolicyDirectory::new(), &lines, 1, &["a"]);
    let result = too_small.until_started(&json!({"code": "print(1)"}), "prestarted", "the template was refused: its image has ");
    let cause = result["receipt"]["start_cause"].as_str().unwrap();
    assert!(cause.ends_with("and all images together may have 32 MiB, an eighth of [capacity] memory"), "{cause}");
    assert_eq!(result["output"], "1\n");
    too_small.service.end();
    // The control: the same image where it fits.
    let large_enough = Warm::within("512MiB", PolicyDirectory::new(), &lines, 1, &["a"]);
    large_enough.until_restored_as(0);
    large_enough.service.end();
}

test!(Both, a_worker_that_has_nothing_to_run_keeps_no_image_for_it, seconds 120);
fn a_worker_that_has_nothing_to_run_keeps_no_image_for_it() {
    // A request runs for longer than its image is young, so that each has another made.
    let warm = Warm::new(&with_template("max_age = \"1s\""), 3, &["a"]);
    let images_of = |worker: &i32| {
        let files = fs::read_dir(format!("/proc/{worker}/fd")).unwrap().filter_map(|file| fs::read_link(file.ok()?.path()).ok());
        files.filter(|path| path.to_string_lossy().contains("stockade-image")).count()
    };
    let mut layouts = BTreeSet::new();
    let images = || warm.service.log().matches("an image of").count();
    while images() < 6 {
        layouts.insert(layout(&warm.until_started(&json!({"code": LAYOUT}), "restored", "")));
        thread::sleep(Duration::from_millis(1200));
    }
    let held: Vec<usize> = warm.workers().iter().map(images_of).collect();
    // What copies are made of, what comes then, and what is prepared.
    assert!(held.iter().all(|held| *held <= 3) && held.iter().any(|held| *held > 0), "{held:?}");
    // The old one serves until the new one is there, and no longer.
    assert!(layouts.len() >= 4, "{layouts:?}");
    warm.service.end();
}

test!(Both, an_interpreter_that_is_replaced_while_a_service_lives_is_the_next_request_s, seconds 120);
fn an_interpreter_that_is_replaced_while_a_service_lives_is_the_next_request_s() {
    let place = PolicyDirectory::new();
    let own = place.0.join("env/bin/python3");
    let replace = || {
        fs::create_dir_all(own.parent().unwrap()).unwrap();
        fs::copy("/usr/bin/python3", own.with_extension("new")).unwrap();
        fs::rename(own.with_extension("new"), &own).unwrap();
    };
    replace();
    let shown = own.parent().unwrap();
    let lines = format!("[filesystem]\nread_only = {{ add = [{shown:?}] }}\n[runtimes.python]\ncommand = [{own:?}, \"{{file}}\"]");
    let warm = Warm::at(place, &lines, 1, &["a"]);
    let inode = json!({"code": "import os, sys\nprint(os.stat(sys.executable).st_ino)"});
    for _ in 0..3 {
        let before = warm.until_started(&inode, "restored", "");
        replace();
        let after = warm.ask(&inode);
        assert_ne!(after["output"], before["output"]);
        assert_ne!(after["receipt"]["start"], "restored");
        let again = warm.until_started(&inode, "restored", "");
        assert_eq!(again["output"], after["output"]);
    }
    warm.service.end();
}

test!(Both, a_policy_that_is_changed_holds_for_the_next_request_of_a_service, seconds 120);
fn a_policy_that_is_changed_holds_for_the_next_request_of_a_service() {
    let warm = Warm::new("", 1, &["a"]);
    let zone = json!({"code": "import os; print(os.environ['TZ'])"});
    assert_eq!(warm.until_started(&zone, "restored", "")["output"], "UTC\n");
    fs::write(&warm.policy, derived("[environment.set]\nTZ = \"Asia/Tokyo\"")).unwrap();
    let result = warm.ask(&zone);
    assert_eq!(result["output"], "Asia/Tokyo\n");
    started(&result, "fresh", "did not fit");
    assert_eq!(warm.until_started(&zone, "restored", "")["output"], "Asia/Tokyo\n");
    warm.service.end();
}

test!(Both, a_policy_that_is_changed_outdates_all_images_in_rotation, seconds 120);
fn a_policy_that_is_changed_outdates_all_images_in_rotation() {
    let warm = Warm::new(&with_template("images = 3"), 1, &["a"]);
    let zone = json!({"code": "import os; print(os.environ['TZ'])"});
    warm.until_started(&zone, "restored", "");
    assert!(eventually(MADE, || warm.service.log().matches("an image of").count() == 3), "{}", warm.service.log());
    fs::write(&warm.policy, derived(&format!("{}\n[environment.set]\nTZ = \"Asia/Tokyo\"", with_template("images = 3")))).unwrap();
    for _ in 0..8 {
        let result = warm.ask(&zone);
        assert_eq!(result["output"], "Asia/Tokyo\n");
        let cause = result["receipt"]["start_cause"].to_string();
        assert!(!cause.contains("refused"), "{cause}");
    }
    assert_eq!(warm.until_started(&zone, "restored", "")["output"], "Asia/Tokyo\n");
    warm.service.end();
}

test!(Both, a_service_that_is_killed_leaves_no_prepared_sandbox_running, seconds 90);
fn a_service_that_is_killed_leaves_no_prepared_sandbox_running() {
    let mut warm = Warm::new(&with_template("ready = 2\nshared_by = \"policy\""), 2, &["a"]);
    warm.until_restored_as(0);
    assert!(eventually(scaled(Duration::from_secs(10)), || warm.prepared().len() == 2), "{:?}", warm.prepared());
    let prepared = warm.prepared();
    warm.service.child.kill().unwrap();
    warm.service.child.wait().unwrap();
    let lives = |pid: &i32| fs::exists(format!("/proc/{pid}")).unwrap();
    assert!(eventually(scaled(Duration::from_secs(10)), || !prepared.iter().any(lives)), "{prepared:?}");
}
