//! Interfaces of other services, the metrics and the description: who may use each, and what each
//! verdict becomes. SandboxFusion's own clients are tried by `tests/frameworks`.

use std::{
    io::{BufReader, Read, Write},
    net::TcpStream,
    os::unix::net::UnixStream,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use super::{
    compiled::C,
    serve::{Answer, Service, head, read_answer},
    serve_quotas::key,
    serve_streams::{Stream, peak_of_front, rest},
};
use crate::support::{
    exec::token,
    leftovers::host_process_with,
    policy_dir::{PolicyDirectory, derived},
    runner::{eventually, test},
    timeouts::scaled,
};

const BOTH: &str = "[facade.sandbox_fusion]\nenabled = true\nheartbeat = \"1min\"\n[facade.execute]\nenabled = true\n";

/// A service with both, and the token of a key that may use them.
fn with_facades(config: &str) -> (Service, String) {
    let (table, token) = key("facade", "scopes = [\"facade\"]");
    (Service::with(&format!("{config}\n{BOTH}"), &format!("{table}\n")), token)
}

/// The same, where a client that waits hears of it soon.
fn with_blanks(config: &str) -> (Service, String) {
    let (table, token) = key("facade", "scopes = [\"facade\"]");
    (Service::with(&format!("{config}\n{}", BOTH.replace("1min", "300ms")), &format!("{table}\n")), token)
}

fn run_code(service: &Service, token: &str, body: &Value) -> Answer {
    service.ask("POST", "/run_code", token, body)
}

/// Sends a request whose answer nothing reads yet.
fn begin(service: &Service, token: &str, code: &str) -> UnixStream {
    let (mut stream, body) = (service.connect(), json!({ "code": code, "language": "python", "run_timeout": 60 }).to_string());
    let fields = [&*format!("Authorization: Bearer {token}"), "Content-Type: application/json"];
    stream.write_all(head("POST", "/run_code", &fields, body.len()).as_bytes()).unwrap();
    stream.write_all(body.as_bytes()).unwrap();
    stream
}

test!(Both, a_facade_is_off_until_it_is_enabled_and_takes_keys_with_its_scope);
fn a_facade_is_off_until_it_is_enabled_and_takes_keys_with_its_scope() {
    let body = json!({ "code": "print(6*7)", "language": "python" });
    let (table, token) = key("facade", "scopes = [\"facade\"]");
    let off = Service::with("", &format!("{table}\n"));
    for path in ["/run_code", "/execute"] {
        let answer = off.ask("POST", path, &token, &body);
        assert!(answer.is(404, "facade_off").body["detail"].as_str().unwrap().contains("enabled = true"), "{}", answer.body);
    }
    off.ask("GET", "/v1/ping", &token, &Value::Null).is(404, "facade_off");
    off.end();
    let (service, token) = with_facades("");
    let ran = run_code(&service, &token, &body);
    assert_eq!((ran.status, &ran.body["status"], &ran.body["run_result"]["stdout"]), (200, &json!("Success"), &json!("42\n")));
    service.ask("POST", "/execute", &token, &body).ran("42\n");
    assert_eq!(service.ask("GET", "/v1/ping", &token, &Value::Null).body, json!("pong"));
    // The key `test` has `run`, and this one has not.
    run_code(&service, &service.token, &body).is(403, "scope_missing");
    service.ask("POST", "/execute", &service.token, &body).is(403, "scope_missing");
    service.ask("POST", "/v1/run", &token, &json!({ "code": "print(1)" })).is(403, "scope_missing");
    service.run("print(1)").ran("1\n");
    service.end();
    // A policy that the key has not is no policy of its runs.
    let (table, token) = key("facade", "scopes = [\"facade\"]");
    let strict = BOTH.replace("enabled = true\n", "enabled = true\npolicy = \"strict\"\n");
    let service = Service::with(&strict, &format!("{table}\n"));
    assert!(service.log().contains("under policy strict, which no key with the scope \"facade\" may use"), "{}", service.log());
    run_code(&service, &token, &body).is(403, "policy_not_granted");
    service.end();
}

test!(Both, each_end_of_a_run_has_its_status_of_sandbox_fusion);
fn each_end_of_a_run_has_its_status_of_sandbox_fusion() {
    let (service, token) = with_facades("");
    let python = |code: &str, more: Value| {
        let mut body = json!({ "code": code, "language": "python" });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        run_code(&service, &token, &body).body
    };
    let is = |answer: &Value, status: &str, ran: &str, code: Value| {
        let found = (&answer["status"], &answer["run_result"]["status"], &answer["run_result"]["return_code"]);
        assert_eq!(found, (&json!(status), &json!(ran), &code), "{answer}");
    };
    let fine = python(
        "import sys; print(sys.stdin.read(), sys.argv[1:], open('d/in').read()); open('o[1]', 'wb').write(b'\\xff')",
        json!({ "stdin": "s", "args": ["-a"], "files": { "d/in": "aW4=", "no": null }, "fetch_files": ["o[1]", "none"] }),
    );
    is(&fine, "Success", "Finished", json!(0));
    assert_eq!((&fine["run_result"]["stdout"], &fine["files"]), (&json!("s ['-a'] in\n"), &json!({ "o[1]": "/w==" })));
    assert_eq!((&fine["compile_result"], &fine["stockade"]["verdict"]), (&Value::Null, &json!("exited")));
    is(&python("raise SystemExit(3)", json!({})), "Failed", "Finished", json!(3));
    is(&python("import os; os.kill(os.getpid(), 9)", json!({})), "Failed", "Finished", json!(137));
    is(&python("while True: pass", json!({ "run_timeout": 0.5 })), "Failed", "TimeLimitExceeded", Value::Null);
    let memory = python("x = bytearray(1 << 30); print(len(x))", json!({ "memory_limit_MB": 64 }));
    assert_eq!((&memory["status"], &memory["run_result"]["status"]), (&json!("Failed"), &json!("Finished")), "{memory}");
    for (more, words) in [
        (json!({ "language": "cobol" }), "[runtimes.NAME]"),
        (json!({ "language": "pytest" }), "\"-m\", \"pytest\", \"{file}\""),
        (json!({ "run_timeout": 86400 }), "raise `wall` under [limits.max]"),
        (json!({ "memory_limit_MB": 1_u64 << 40 }), "more CPUs or memory"),
        (json!({ "files": { "../x": "" } }), "`..`"),
        (json!({ "files": { "x": "!" } }), "base64"),
    ] {
        let answer = python("print(1)", more.clone());
        assert_eq!((&answer["status"], &answer["run_result"]), (&json!("SandboxError"), &Value::Null), "{more}");
        assert!(answer["message"].as_str().is_some_and(|message| message.contains(words)), "{more}: {answer}");
    }
    let wrong = run_code(&service, &token, &json!({ "code": 1 }));
    assert_eq!((wrong.status, wrong.body["detail"].as_array().map(Vec::len)), (422, Some(2)), "{}", wrong.body);
    service.ask_with("POST", "/run_code", &[&format!("Authorization: Bearer {token}")], b"{}").is(415, "bad_type");
    service.end();
}

test!(RootOnly, a_body_of_a_facade_takes_little_more_memory_than_it_has_bytes, seconds 60);
fn a_body_of_a_facade_takes_little_more_memory_than_it_has_bytes() {
    let (service, token) = with_facades("");
    let before = peak_of_front(&service);
    let fields = [&*format!("Authorization: Bearer {token}"), "Content-Type: application/json"];
    // 16 MiB, in eight million values.
    let list = "1,".repeat(8 << 20) + "1";
    let members = "\"\":1,".repeat(3 << 20) + "\"\":1";
    for (field, status) in [
        (format!("\"unknown\":[{list}]"), 200),
        (format!("\"unknown\":{{{members}}}"), 200),
        (members.replace("\"\"", "\"u\""), 200),
        (format!("\"args\":[{list}]"), 422),
        (format!("\"files\":{{{members}}}"), 422),
        (format!("\"stdin\":[{list}]"), 422),
    ] {
        let body = format!("{{\"code\":\"print(1)\",\"language\":\"python\",{field}}}");
        let answer = service.ask_with("POST", "/run_code", &fields, body.as_bytes());
        assert_eq!(answer.status, status, "{} {}", &body[..60], answer.body);
        assert!(peak_of_front(&service) < before + (64 << 10), "{}: {} KiB after {before}", &body[..60], peak_of_front(&service));
    }
    // The control: what a front holds is seen there.
    assert!(peak_of_front(&service) > before + (12 << 10), "{} KiB after {before}", peak_of_front(&service));
    service.end();
}

test!(Both, a_client_of_sandbox_fusion_waits_by_blanks_or_is_told_to_come_again);
fn a_client_of_sandbox_fusion_waits_by_blanks_or_is_told_to_come_again() {
    let (service, token) = with_blanks("[capacity]\ncpus = 1\nqueue = \"200ms\"\nwaiting = 1\n");
    let begun = Instant::now();
    let mut first = begin(&service, &token, "import time; time.sleep(2); print('first')");
    let has_one = |state: &str| {
        let line = format!("stockade_runs_{state} 1\n");
        assert!(eventually(scaled(Duration::from_secs(10)), || metrics(&service).contains(&line)), "{}", metrics(&service));
    };
    has_one("running");
    let mut second = begin(&service, &token, "print('second')");
    has_one("waiting");
    let full = run_code(&service, &token, &json!({ "code": "print(3)", "language": "python" }));
    full.is(504, "queue_full");
    // The control: elsewhere it is 503.
    service.run("print(4)").is(503, "queue_full");
    let whole = |stream: &mut UnixStream| {
        let mut said = String::new();
        stream.read_to_string(&mut said).unwrap();
        said
    };
    for (stream, output) in [(&mut first, "first\\n"), (&mut second, "second\\n")] {
        let said = whole(stream);
        let blanks = said.matches("\r\n1\r\n \r\n").count();
        assert!(said.starts_with("HTTP/1.1 200") && said.contains(&format!("\"stdout\":\"{output}\"")), "{said}");
        assert!(blanks > 0 && said.contains("\"status\":\"Success\""), "{said}");
    }
    assert!(begun.elapsed() > Duration::from_secs(2), "the second has waited longer than `queue`");
    service.end();
}

test!(Both, a_client_that_hangs_up_after_a_blank_cancels_its_run);
fn a_client_that_hangs_up_after_a_blank_cancels_its_run() {
    let (service, token_of_key) = with_blanks("");
    let mark = token("blank");
    let mut client = begin(&service, &token_of_key, &format!("import subprocess; subprocess.run(['sh', '-c', 'sleep 60; : {mark}'])"));
    let mut piece = [0; 512];
    let length = client.read(&mut piece).unwrap();
    assert!(piece[..length].starts_with(b"HTTP/1.1 200"), "the head comes before the end");
    assert!(eventually(scaled(Duration::from_secs(10)), || host_process_with(&mark)));
    drop(client);
    assert!(eventually(scaled(Duration::from_secs(10)), || !host_process_with(&mark)), "it outlives its client");
    service.end();
}

test!(Both, a_service_that_ends_tells_the_clients_of_sandbox_fusion);
fn a_service_that_ends_tells_the_clients_of_sandbox_fusion() {
    let (service, token) = with_blanks("[capacity]\ncpus = 1\n[limits]\ndrain = \"1s\"\n");
    let mut running = begin(&service, &token, "import time; time.sleep(60)");
    let mut piece = [0; 512];
    assert!(running.read(&mut piece).unwrap() > 0);
    let mut waiting = begin(&service, &token, "print(1)");
    assert!(waiting.read(&mut piece).unwrap() > 0, "it gets its head while it waits");
    service.signal("TERM");
    for (stream, words) in [(&mut running, "\"verdict\":\"cancelled\""), (&mut waiting, "takes no more requests")] {
        let mut said = String::new();
        stream.read_to_string(&mut said).unwrap();
        assert!(said.contains("\"status\":\"SandboxError\"") && said.contains(words), "{said}");
    }
    service.end();
}

test!(Both, execute_takes_its_key_in_a_field_of_its_own);
fn execute_takes_its_key_in_a_field_of_its_own() {
    let (service, token) = with_facades("");
    let ask = |fields: &[&str], body: &Value| {
        let fields: Vec<&str> = fields.iter().copied().chain(["Content-Type: application/json"]).collect();
        service.ask_with("POST", "/execute", &fields, body.to_string().as_bytes())
    };
    let (own, code) = (format!("X-API-Key: {token}"), json!({ "code": "print(6*7)", "session": 1 }));
    let ran = ask(&[&own], &code);
    assert_eq!((&ran.ran("42\n").body["success"], &ran.body["key"]), (&json!(true), &json!("facade")));
    ask(&["X-API-Key: sd_facade_x"], &code).is(401, "key_unknown");
    ask(&[&own, &own], &code).is(401, "key_missing");
    ask(&[&format!("X-API-Key: {}", service.token)], &code).is(403, "scope_missing");
    let late = ask(&[&own], &json!({ "code": "while true; do :; done", "language": "bash", "timeout": 0.5 }));
    assert_eq!((late.status, &late.body["verdict"], &late.body["success"]), (200, &json!("wall_timeout"), &json!(false)));
    let wrong = ask(&[&own], &json!({ "language": "python" }));
    assert_eq!((wrong.status, &wrong.body["detail"][0]["loc"]), (422, &json!(["body", "code"])));
    service.end();
}

/// As text, over the UNIX socket and without a key.
pub(super) fn metrics(service: &Service) -> String {
    let mut stream = service.connect();
    stream.write_all(head("GET", "/metrics", &[], 0).as_bytes()).unwrap();
    let mut said = String::new();
    stream.read_to_string(&mut said).unwrap();
    assert!(said.contains("content-type: application/openmetrics-text"), "{said}");
    said
}

test!(Both, metrics_count_what_has_happened_and_name_nothing_of_a_client);
fn metrics_count_what_has_happened_and_name_nothing_of_a_client() {
    let (table, watcher) = key("watcher", "scopes = [\"watch\"]");
    let service = Service::with("[capacity]\ncpus = 1\nqueue = \"300ms\"\n", &format!("{table}\n"));
    service.run("print(1)").ran("1\n");
    assert_eq!(service.run("raise SystemExit(3)").body["code"], 3);
    assert_eq!(
        service.ask("POST", "/v1/run", &service.token, &json!({ "code": "1", "colour": "secretive" })).body["verdict"],
        "bad_request"
    );
    let lines = b"{\"code\": \"print(1)\"}\n{\n";
    let fields = [&*format!("Authorization: Bearer {}", service.token), "Content-Type: application/x-ndjson"];
    assert_eq!(service.ask_with("POST", "/v1/batch", &fields, lines).status, 200);
    let long = service.begin("import time; time.sleep(2)");
    assert!(service.has_runs("running", 1));
    service.run("print('late')").is(503, "queue_timeout");
    let during = metrics(&service);
    for line in ["stockade_runs_running 1", "stockade_workers{state=\"running\"} 1", "stockade_memory_reserved_bytes 536870912"] {
        assert!(during.lines().any(|found| found == line), "{line}\n{during}");
    }
    drop(long);
    service.ask("GET", "/v1/nothing-secretive", &service.token, &Value::Null).is(404, "no_such_path");
    service.ask("GET", "/v1/runs/secretive", &service.token, &Value::Null).is(404, "no_such_run");
    let done = "stockade_runs_total{policy=\"default\",verdict=\"cancelled\",key=\"test\"} 1";
    assert!(eventually(scaled(Duration::from_secs(10)), || metrics(&service).contains(done)), "{}", metrics(&service));
    let text = metrics(&service);
    for line in [
        "stockade_runs_total{policy=\"default\",verdict=\"exited\",key=\"test\"} 3",
        "stockade_runs_total{policy=\"default\",verdict=\"bad_request\",key=\"test\"} 1",
        "stockade_run_seconds_count 4",
        "stockade_start_seconds_count 4",
        "stockade_refused_total{reason=\"queue_timeout\"} 1",
        "stockade_refused_total{reason=\"bad_json\"} 1",
        "stockade_requests_total{route=\"none\",status=\"404\"} 1",
        "stockade_requests_total{route=\"/v1/runs/{run}\",status=\"404\"} 1",
        "stockade_requests_total{route=\"/v1/run\",status=\"503\"} 1",
        "stockade_worker_restarts_total 0",
        "stockade_runs_waiting 0",
        "# EOF",
    ] {
        assert!(text.lines().any(|found| found == line), "{line}\n{text}");
    }
    assert!(!text.contains("secretive") && text.lines().count() < 400, "{text}");
    // A worker that dies is counted when another has come.
    super::serve::kill(service.processes("stockade serve-worker")[0], "KILL");
    let restarted = || metrics(&service).contains("stockade_worker_restarts_total 1\n");
    assert!(eventually(scaled(Duration::from_secs(10)), restarted), "{}", metrics(&service));
    // Over TCP they are for keys with `watch`.
    let tcp = |token: &str| {
        let fields = [&*format!("Authorization: Bearer {token}")];
        let head = head("GET", "/metrics", if token.is_empty() { &[] } else { &fields }, 0);
        let mut stream = TcpStream::connect(("127.0.0.1", service.port)).unwrap();
        stream.write_all(head.replace("Host: localhost", &format!("Host: localhost:{}", service.port)).as_bytes()).unwrap();
        read_answer(stream)
    };
    tcp("").is(401, "key_missing");
    tcp(&service.token).is(403, "scope_missing");
    assert_eq!(tcp(&watcher).status, 200);
    service.ask("GET", "/metrics", &service.token, &Value::Null).is(403, "scope_missing");
    service.end();
}

test!(Both, the_description_is_open_to_all);
fn the_description_is_open_to_all() {
    let mut service = Service::new();
    let description = service.get("/openapi.json").unwrap();
    assert_eq!((description.status, &description.body["openapi"]), (200, &json!("3.1.0")));
    assert!(description.body["paths"]["/v1/run"]["post"]["responses"]["200"].is_object());
    service.end();
}

/// A service with the facades and the policy of compiled languages, and a key that may use it.
fn with_compiler() -> (Service, String, String) {
    let place = PolicyDirectory::new();
    let lines = "[runtimes.made]\ncompile = [\"/usr/bin/sh\", \"-c\", \"sleep 1; cp $0 $1\", \"{file}\", \"{output}\"]\ncommand = [\"/usr/bin/sh\", \"{output}\"]\naliases = [\"slow\"]\nextension = \"sh\"\n";
    let policy = place.write("c", &derived(&format!("{C}{lines}")));
    let (table, token) = key("compiles", "scopes = [\"facade\", \"run\"]");
    let table = table.replace("\"default\"", &format!("{policy:?}"));
    (Service::at(place, BOTH, &format!("{table}\n")), token, policy)
}

test!(Both, a_language_that_is_compiled_has_a_result_of_its_compiler, needs [Program("gcc")], seconds 60);
fn a_language_that_is_compiled_has_a_result_of_its_compiler() {
    let (service, token, _) = with_compiler();
    let ask = |code: &str, language: &str, compile_timeout: f64, run_timeout: f64| {
        let limits = json!({ "compile_timeout": compile_timeout, "run_timeout": run_timeout });
        let mut body = json!({ "code": code, "language": language });
        body.as_object_mut().unwrap().extend(limits.as_object().unwrap().clone());
        let answer = run_code(&service, &token, &body);
        assert_eq!(answer.status, 200, "{}", answer.body);
        let of = |part: &str| json!([answer.body[part]["status"], answer.body[part]["return_code"]]);
        (answer.body["status"].clone(), of("compile_result"), of("run_result"), answer.body.clone())
    };
    let (finished, late, none) = (|code: i32| json!(["Finished", code]), json!(["TimeLimitExceeded", null]), json!([null, null]));
    let patient = scaled(Duration::from_secs(20)).as_secs_f64();
    let hello = "#include <stdio.h>\nint main(void) { puts(\"hi\"); return 0; }";
    let (status, compiled, ran, body) = ask(hello, "c", patient, patient);
    assert_eq!((status, compiled, ran), (json!("Success"), finished(0), finished(0)), "{body}");
    assert_eq!((&body["run_result"]["stdout"], &body["compile_result"]["stdout"]), (&json!("hi\n"), &json!("")));
    assert!(body["compile_result"]["execution_time"].as_f64().unwrap() > 0.0, "{body}");
    let (status, compiled, ran, body) = ask("int main(void) { return nowhere; }", "c", patient, patient);
    assert_eq!((status, compiled, ran, &body["run_result"]), (json!("Failed"), finished(1), none.clone(), &Value::Null), "{body}");
    assert!(body["compile_result"]["stderr"].as_str().unwrap().contains("nowhere"), "{body}");
    let (status, compiled, ran, _) = ask("int main(void) { return 3; }", "c", patient, patient);
    assert_eq!((status, compiled, ran), (json!("Failed"), finished(0), finished(3)));
    let (status, compiled, ran, body) = ask("echo ran", "made", 0.3, patient);
    assert_eq!((status, compiled, ran), (json!("Failed"), late.clone(), none.clone()), "{body}");
    let (status, compiled, ran, _) = ask("sleep 60", "made", patient, 0.3);
    assert_eq!((status, compiled, ran), (json!("Failed"), finished(0), late));
    let (status, compiled, _, body) = ask(hello, "c", 1e9, patient);
    assert_eq!((status, compiled), (json!("SandboxError"), none.clone()), "{body}");
    assert!(body["message"].as_str().unwrap().contains("[limits.max]"), "{body}");
    // Of a language that is not compiled the time bounds nothing.
    let (status, compiled, ran, _) = ask("print(1)", "python", 1e-9, patient);
    assert_eq!((status, compiled, ran), (json!("Success"), none, finished(0)));
    service.end();
}

test!(Both, a_run_takes_the_room_of_its_compiler, seconds 60);
fn a_run_takes_the_room_of_its_compiler() {
    let (service, token, _) = with_compiler();
    let taken = |language: &str, more: Value| {
        let mut body = json!({ "code": "sleep 1", "language": language, "limits": {"memory": "64MiB"} });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let (mut stream, body) = (service.connect(), body.to_string());
        let fields = [&*format!("Authorization: Bearer {token}"), "Content-Type: application/json"];
        stream.write_all(head("POST", "/v1/run", &fields, body.len()).as_bytes()).unwrap();
        stream.write_all(body.as_bytes()).unwrap();
        let mut seen = None;
        assert!(eventually(scaled(Duration::from_secs(10)), || {
            let runs = service.ask("GET", "/v1/runs", &token, &Value::Null).body["runs"].clone();
            seen = runs[0]["memory_bytes"].as_u64();
            seen.is_some()
        }));
        read_answer(stream).ran("");
        seen.unwrap() >> 20
    };
    // What the policy has for one that its request does not say.
    assert_eq!(taken("SLOW", json!({})), 512);
    assert_eq!(taken("made", json!({ "compile_limits": {"memory": "256MiB"} })), 256);
    // The control, which has no compiler.
    assert_eq!(taken("sh", json!({ "compile_limits": {"memory": "256MiB"} })), 64);
    service.end();
}

test!(Both, each_case_of_a_batch_is_compiled, needs [Program("gcc")], seconds 60);
fn each_case_of_a_batch_is_compiled() {
    let (service, token, _) = with_compiler();
    let code = "#include <stdio.h>\nint main(int count, char **words) { return putchar(getchar()) == 'x' ? 0 : 5; }";
    let line = json!({ "id": "p", "code": code, "language": "c", "cases": [{"stdin": "x"}, {"id": "b", "stdin": "y"}] });
    let bad = json!({ "id": "q", "code": "int main(void) { return nowhere; }", "language": "c", "cases": [{}] });
    let fields = [&*format!("Authorization: Bearer {token}"), "Content-Type: application/x-ndjson"];
    let lines = format!("{line}\n{bad}\n");
    let mut socket = service.connect();
    socket.write_all(head("POST", "/v1/batch?order=input", &fields, lines.len()).as_bytes()).unwrap();
    socket.write_all(lines.as_bytes()).unwrap();
    let answers = rest(BufReader::new(Stream::of(socket)));
    let told: Vec<_> =
        answers.iter().map(|one| json!([one["id"], one["result"]["output"], one["result"]["code"], one["result"]["reason"]])).collect();
    assert_eq!(
        told,
        [
            json!(["p/0", "x", 0, null]),
            json!(["p/b", "y", 5, null]),
            json!(["q/0", "", 1, "compile_failed"]),
            json!([null, null, null, null])
        ],
        "{answers:?}"
    );
    service.end();
}
