//! What those see who watch the service: runs of all keys as they come, begin and end, what ended how,
//! and what was refused; that no watcher slows a run; and what the console's page may do.

use std::{
    fs,
    io::{BufReader, Read, Write},
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use super::{
    serve::{Service, head},
    serve_quotas::key,
    serve_streams::{Stream, next},
};
use crate::support::{
    runner::{eventually, test},
    timeouts::scaled,
};

/// A service with a key that watches alone, and the token of that.
fn watched() -> (Service, String) {
    let (table, watcher) = key("watcher", "scopes = [\"watch\"]");
    (Service::with("", &format!("{table}\n")), watcher)
}

fn watch(service: &Service, token: &str, accept: &str) -> BufReader<Stream> {
    let mut socket = service.connect();
    let fields = [&*format!("Authorization: Bearer {token}"), &format!("Accept: {accept}")];
    socket.write_all(head("GET", "/v1/watch", &fields, 0).as_bytes()).unwrap();
    BufReader::new(Stream::of(socket))
}

/// The next event of these types.
fn next_of(stream: &mut BufReader<Stream>, types: &[&str]) -> Value {
    loop {
        let event = next(stream).expect("the stream goes on");
        if types.contains(&event["type"].as_str().unwrap()) {
            return event;
        }
    }
}

fn get(service: &Service, token: &str, path: &str) -> Value {
    let answer = service.ask("GET", path, token, &Value::Null);
    assert_eq!(answer.status, 200, "{}", answer.body);
    answer.body
}

test!(Both, a_watcher_sees_the_runs_of_all_keys_as_they_go);
fn a_watcher_sees_the_runs_of_all_keys_as_they_go() {
    let (service, watcher) = watched();
    for path in ["/v1/watch", "/v1/history", "/v1/denials", "/v1/policies?all=true"] {
        service.ask("GET", path, &service.token, &Value::Null).is(403, "scope_missing");
        service.ask("GET", path, "sd_watcher_x", &Value::Null).is(401, "key_unknown");
        get(&service, &watcher, path);
    }
    let _before = service.begin("import time; time.sleep(60)");
    assert!(service.has_runs("running", 1));
    let mut stream = watch(&service, &watcher, "application/x-ndjson");
    // First what there is.
    let snapshot = next(&mut stream).unwrap();
    assert_eq!(
        (&snapshot["type"], &snapshot["runs"][0]["state"], &snapshot["runs"][0]["key"]),
        (&json!("snapshot"), &json!("running"), &json!("test"))
    );
    let keys: Vec<&str> = snapshot["keys"].as_array().unwrap().iter().map(|key| key["key"].as_str().unwrap()).collect();
    assert_eq!(keys, ["watcher", "test"]);
    assert!(snapshot["capacity"]["cpus"].as_f64().unwrap() > 0.0 && snapshot["load"]["keys"]["test"]["running"] == 1, "{snapshot}");
    assert!(!snapshot.to_string().contains("sha256"), "no hash of a token: {snapshot}");
    let before = snapshot["runs"][0]["run"].clone();
    // Then what changes.
    let request = json!({"code": "import ctypes; ctypes.CDLL(None).ptrace(0, 0, 0, 0); raise SystemExit(3)", "id": "a", "language": "python", "labels": {"who": "<b>"}});
    let result = service.ask("POST", "/v1/run", &service.token, &request).body;
    let [waiting, running, ended] = [(); 3].map(|()| next_of(&mut stream, &["waiting", "running", "ended"]));
    for (event, kind) in [(&waiting, "waiting"), (&running, "running"), (&ended, "ended")] {
        assert_eq!((&event["type"], &event["state"], &event["run"]), (&json!(kind), &json!(kind), &result["run"]));
        let of_request = [&event["key"], &event["policy"], &event["language"], &event["id"], &event["labels"]];
        assert_eq!(of_request, [&json!("test"), &json!("default"), &json!("python"), &json!("a"), &json!({"who": "<b>"})]);
        assert!(event["queued_ms"].is_u64() && event["at_ms"].is_u64(), "{event}");
    }
    assert_eq!(
        [&ended["verdict"], &ended["code"], &ended["denials"], &ended["started"]],
        [&json!("exited"), &json!(3), &json!(1), &json!(true)]
    );
    // A run that is cancelled, as one that came before the watcher.
    assert_eq!(service.ask("DELETE", &format!("/v1/runs/{}", before.as_str().unwrap()), &service.token, &Value::Null).status, 202);
    let ended = next_of(&mut stream, &["ended"]);
    assert_eq!((&ended["run"], &ended["verdict"]), (&before, &json!("cancelled")));
    // One that has never begun has no verdict.
    let fill: Vec<_> = (0..get(&service, &watcher, "/v1/watch")["capacity"]["workers"].as_u64().unwrap())
        .map(|_| service.begin("import time; time.sleep(60)"))
        .collect();
    assert!(service.has_runs("running", fill.len()));
    service.ask("POST", "/v1/run?queue=100ms", &service.token, &json!({"code": "1", "id": "late"})).is(503, "queue_timeout");
    let ended = next_of(&mut stream, &["ended"]);
    assert_eq!(
        [&ended["id"], &ended["verdict"], &ended["reason"], &ended["started"]],
        [&json!("late"), &Value::Null, &json!("queue_timeout"), &json!(false)]
    );
    // Both stand in the history, and the denial with the line of the result.
    let history = get(&service, &watcher, "/v1/history?minutes=5");
    let of = |kind: &str, name: &str| -> u64 {
        history["minutes"].as_array().unwrap().iter().filter_map(|minute| minute[kind][name].as_u64()).sum()
    };
    assert_eq!([of("verdicts", "exited"), of("verdicts", "cancelled"), of("problems", "queue_timeout")], [1, 1, 1], "{history}");
    let denials = get(&service, &watcher, "/v1/denials");
    let denial = &denials["denials"][0];
    assert_eq!(
        [&denial["kind"], &denial["what"], &denial["policy"], &denial["count"]],
        [&json!("syscall"), &json!("ptrace"), &json!("default"), &json!(1)]
    );
    assert_eq!(denial["line"], result["denials"][0]["allow"]);
    for path in ["/v1/history?minutes=0", "/v1/history?minutes=1441", "/v1/history?hours=1", "/v1/policies?every=true"] {
        service.ask("GET", path, &watcher, &Value::Null).is(400, "bad_http");
    }
    drop(fill);
    service.end();
}

test!(Both, a_watcher_that_reads_nothing_slows_no_run_and_hears_what_it_has_missed);
fn a_watcher_that_reads_nothing_slows_no_run_and_hears_what_it_has_missed() {
    const RUNS: usize = 300;
    let (service, watcher) = watched();
    // Of each run so much is told of as can be.
    let labels: serde_json::Map<_, _> = (0..40).map(|number| (format!("label{number:02}"), json!("x".repeat(300)))).collect();
    // A worker refuses it at once.
    let line = json!({"code": "1", "colour": "red", "labels": labels}).to_string() + "\n";
    let fields = [&*format!("Authorization: Bearer {}", service.token), "Content-Type: application/x-ndjson"];
    let batch = || {
        let begin = Instant::now();
        assert_eq!(service.ask_with("POST", "/v1/batch", &fields, line.repeat(RUNS).as_bytes()).status, 200);
        begin.elapsed()
    };
    let alone = batch();
    let mut stream = watch(&service, &watcher, "application/x-ndjson");
    let first = next(&mut stream).unwrap()["seq"].as_u64().unwrap();
    assert_eq!(first, 3 * RUNS as u64, "each run of the first batch has waited, run and ended");
    // Labels are told up to 32, of 256 characters each.
    let fields_of_run = [fields[0], "Content-Type: application/json"];
    assert_eq!(service.ask_with("POST", "/v1/run", &fields_of_run, line.as_bytes()).body["verdict"], "bad_request");
    let event = next_of(&mut stream, &["waiting"]);
    let told = event["labels"].as_object().unwrap();
    assert!(told.len() == 32 && told.values().all(|text| text.as_str().unwrap().len() == 256), "{event}");
    let (mut seen, mut missed, mut last) = (1, 0, event["seq"].as_u64().unwrap());
    assert_eq!(last, first + 1);
    // Nothing is read meanwhile.
    let with_watcher = batch();
    assert!(with_watcher < alone * 3 + scaled(Duration::from_secs(2)), "{with_watcher:?} against {alone:?}");
    let ends = 3 * (2 * RUNS as u64 + 1);
    while last < ends {
        let event = next_of(&mut stream, &["waiting", "running", "ended", "gap", "snapshot"]);
        let seq = event["seq"].as_u64().unwrap();
        match event["type"].as_str().unwrap() {
            "gap" => {
                assert_eq!(seq, last + event["events"].as_u64().unwrap());
                missed += event["events"].as_u64().unwrap();
                // What there is now follows, with what has happened meanwhile in it.
                let snapshot = next(&mut stream).unwrap();
                assert_eq!(snapshot["type"], "snapshot");
                assert!(snapshot["seq"].as_u64().unwrap() >= seq, "{snapshot}");
                missed += snapshot["seq"].as_u64().unwrap() - seq;
                last = snapshot["seq"].as_u64().unwrap();
            }
            _ => {
                assert_eq!(seq, last + 1);
                (seen, last) = (seen + 1, seq);
            }
        }
    }
    assert!(missed > 0, "one that reads nothing misses nothing");
    assert_eq!(first + seen + missed, ends);
    service.end();
}

test!(Both, a_watcher_whose_key_is_taken_away_hears_so_and_no_more);
fn a_watcher_whose_key_is_taken_away_hears_so_and_no_more() {
    let (service, watcher) = watched();
    let mut stream = watch(&service, &watcher, "application/x-ndjson");
    assert_eq!(next(&mut stream).unwrap()["type"], "snapshot");
    // The control: to read the keys again takes nothing from a key that is still there.
    service.signal("HUP");
    assert_eq!(next_of(&mut stream, &["snapshot", "problem"])["type"], "snapshot");
    let keys = fs::read_to_string(service.keys()).unwrap();
    fs::write(service.keys(), keys.replace("scopes = [\"watch\"]", "scopes = [\"run\"]")).unwrap();
    let begin = Instant::now();
    service.signal("HUP");
    let last = next_of(&mut stream, &["problem"]);
    assert!(begin.elapsed() < scaled(Duration::from_secs(1)));
    assert_eq!((&last["problem"]["reason"], &last["problem"]["status"]), (&json!("scope_missing"), &json!(403)));
    assert_eq!(next(&mut stream), None);
    service.end();
}

test!(Both, an_event_stream_has_the_same_events);
fn an_event_stream_has_the_same_events() {
    let (service, watcher) = watched();
    let mut stream = watch(&service, &watcher, "text/event-stream");
    service.run("print(1)").ran("1\n");
    let mut text = String::new();
    let ended = eventually(scaled(Duration::from_secs(10)), || {
        let mut piece = [0; 4096];
        let length = stream.read(&mut piece).unwrap();
        text.push_str(&String::from_utf8_lossy(&piece[..length]));
        text.contains("event: ended\n")
    });
    assert!(ended && text.starts_with("id: ") && text.contains("\nevent: snapshot\ndata: {"), "{text}");
    // Without a stream it is the first event alone.
    let now = get(&service, &watcher, "/v1/watch");
    assert_eq!((&now["type"], &now["runs"]), (&json!("snapshot"), &json!([])));
    service.end();
}

test!(Both, what_each_policy_allows_is_told_to_its_keys_and_to_watchers);
fn what_each_policy_allows_is_told_to_its_keys_and_to_watchers() {
    let (table, strict) = key("shell", "scopes = [\"run\"]");
    let (watches, watcher) = key("watcher", "scopes = [\"watch\"]");
    let service = Service::with("", &format!("{}\n{watches}\n", table.replace("\"default\"", "\"shell\"")));
    let names =
        |all: &Value| all["policies"].as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap().to_owned()).collect::<Vec<_>>();
    let own = get(&service, &strict, "/v1/policies?explain=true");
    assert_eq!(names(&own), ["shell"]);
    assert_eq!(
        (&own["policies"][0]["explanation"]["policy"], &own["policies"][0]["explanation"]["origin"]),
        (&json!("shell"), &json!("shipped"))
    );
    assert!(own.to_string().contains("network: none"), "{own}");
    assert_eq!(get(&service, &strict, "/v1/policies")["policies"][0]["explanation"], Value::Null);
    service.ask("GET", "/v1/policies?all=true", &strict, &Value::Null).is(403, "scope_missing");
    assert_eq!(names(&get(&service, &watcher, "/v1/policies?all=true&explain=true")), ["default", "shell"]);
    service.end();
}

test!(Both, the_page_is_open_and_has_a_policy_that_permits_nothing_else);
fn the_page_is_open_and_has_a_policy_that_permits_nothing_else() {
    let mut service = Service::new();
    let page = service.get("/").unwrap();
    let field = |name: &str| page.head.lines().find_map(|line| line.strip_prefix(&format!("{name}: "))).unwrap_or_default().to_owned();
    assert_eq!((page.status, &*field("content-type"), &*field("x-frame-options")), (200, "text/html; charset=utf-8", "DENY"));
    let policy = field("content-security-policy");
    for part in [
        "default-src 'none'",
        "connect-src 'self'",
        "frame-ancestors 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        "script-src 'sha256-",
        "style-src 'sha256-",
    ] {
        assert!(policy.contains(part), "{policy}");
    }
    assert!(!policy.contains("unsafe") && !policy.contains('*'), "{policy}");
    assert_eq!(
        (&*field("referrer-policy"), &*field("cache-control"), &*field("x-content-type-options")),
        ("no-referrer", "no-store", "nosniff")
    );
    assert!(!page.head.contains("access-control"), "no other site may read an answer: {}", page.head);
    service.end();
}
