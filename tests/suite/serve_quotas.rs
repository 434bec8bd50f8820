//! What a key of the service may do and how much: scopes, quotas, and room in memory. Beside each
//! refusal another key, or the same one at another time, is served.

use std::{io::Write, time::Duration};

use serde_json::{Value, json};

use super::{
    serve::{Service, head, read_answer},
    serve_facades::metrics,
};
use crate::support::{
    exec::stockade,
    policy_dir::{PolicyDirectory, derived},
    runner::{eventually, test},
    timeouts::scaled,
};

/// The table of a key in `keys.toml`, and its token. `lines` replace its scopes.
pub(super) fn key(id: &str, lines: &str) -> (String, String) {
    let made = stockade(["key", "new", id, "--policy", "default"]).output().unwrap();
    let said = String::from_utf8(made.stderr).unwrap();
    let (_, table) = said.split_once("[[key]]").expect("it prints the table");
    let table: String = table.lines().filter(|line| !line.starts_with("scopes")).map(|line| format!("{line}\n")).collect();
    (format!("[[key]]{table}{lines}\n"), String::from_utf8(made.stdout).unwrap().trim().to_owned())
}

fn run(service: &Service, token: &str, code: &str) -> super::serve::Answer {
    service.ask("POST", "/v1/run", token, &json!({ "code": code }))
}

test!(Both, a_key_does_what_its_scopes_say_and_no_more);
fn a_key_does_what_its_scopes_say_and_no_more() {
    let ((looks, looker), (runs, runner)) = (key("looker", "scopes = [\"watch\"]"), key("runner", "scopes = [\"run\"]"));
    let service = Service::with("", &format!("{looks}\n{runs}\n"));
    let _client = service.begin("import time; time.sleep(60)");
    assert!(service.has_runs("running", 1));
    let number = service.runs()[0]["run"].as_str().unwrap().to_owned();
    let (all, one) = ("/v1/runs", format!("/v1/runs/{number}"));
    // With `watch` it sees the run of another key, without it does not.
    let seen = service.ask("GET", all, &looker, &Value::Null).body["runs"].clone();
    assert_eq!((&seen[0]["run"], &seen[0]["key"], &seen[0]["state"]), (&json!(number), &json!("test"), &json!("running")));
    assert_eq!(service.ask("GET", &one, &looker, &Value::Null).body["key"], "test");
    assert_eq!(service.ask("GET", all, &runner, &Value::Null).body, json!({"runs": [], "truncated": false}));
    service.ask("GET", &one, &runner, &Value::Null).is(404, "no_such_run");
    // It neither runs nor cancels; who has `run` does the first, and the run's own key the second.
    let refused = run(&service, &looker, "print(1)");
    assert!(refused.is(403, "scope_missing").body["detail"].as_str().unwrap().contains("\"run\""), "{}", refused.body);
    service.ask("DELETE", &one, &looker, &Value::Null).is(403, "scope_missing");
    run(&service, &runner, "print(1)").ran("1\n");
    assert!(service.has_runs("running", 1));
    assert_eq!(service.ask("DELETE", &one, &service.token, &Value::Null).status, 202);
    assert!(service.has_runs("running", 0));
    service.end();
}

test!(Both, a_key_begins_so_many_runs_a_minute);
fn a_key_begins_so_many_runs_a_minute() {
    let (table, token) = key("slow", "runs_per_minute = 2");
    let service = Service::with("", &format!("{table}\n"));
    for _ in 0..2 {
        run(&service, &token, "print(1)").ran("1\n");
    }
    let refused = run(&service, &token, "print(1)");
    let after: u64 = field(&refused.is(429, "key_rate").head, "retry-after").parse().unwrap();
    assert!((1..=61).contains(&after) && refused.body["started"] == false, "{}", refused.head);
    for _ in 0..3 {
        service.run("print(1)").ran("1\n");
    }
    service.end();
}

test!(Both, a_key_uses_so_much_cpu_time_an_hour);
fn a_key_uses_so_much_cpu_time_an_hour() {
    let (table, token) = key("short", "cpu_per_hour = \"1s\"");
    let service = Service::with("", &format!("{table}\n"));
    let burn = "import time\nwhile time.process_time() < 1.2: pass\nprint('burnt')";
    // Waiting is no CPU time.
    run(&service, &token, "import time; time.sleep(1.5); print(1)").ran("1\n");
    run(&service, &token, burn).ran("burnt\n");
    let refused = run(&service, &token, "print(1)");
    let after: u64 = field(&refused.is(429, "key_cpu").head, "retry-after").parse().unwrap();
    assert!((3500..=3601).contains(&after), "{}", refused.head);
    service.run(burn).ran("burnt\n");
    service.run("print(1)").ran("1\n");
    service.end();
}

test!(Both, a_compiler_uses_the_cpu_time_of_its_key, seconds 60);
fn a_compiler_uses_the_cpu_time_of_its_key() {
    let place = PolicyDirectory::new();
    let runtime = |name: &str, seconds: &str| {
        let script =
            format!("import shutil, sys, time\nwhile time.process_time() < {seconds}: pass\nshutil.copy(sys.argv[1], sys.argv[2])");
        format!(
            "[runtimes.{name}]\ncompile = [\"/usr/bin/python3\", \"-c\", {script:?}, \"{{file}}\", \"{{output}}\"]\ncommand = [\"/usr/bin/sh\", \"{{output}}\"]\nextension = \"sh\"\n"
        )
    };
    let policy = place.write("compiled", &derived(&format!("{}{}", runtime("quick", "0"), runtime("slow", "1.2"))));
    let (table, token) = key("short", "cpu_per_hour = \"1s\"");
    let service = Service::at(place, "", &format!("{}\n", table.replace("\"default\"", &format!("{policy:?}"))));
    let run = |language: &str| service.ask("POST", "/v1/run", &token, &json!({ "code": "echo ran", "language": language }));
    // The control: compiling alone uses nothing up.
    run("quick").ran("ran\n");
    run("slow").ran("ran\n");
    run("quick").is(429, "key_cpu");
    let metrics = metrics(&service);
    let used = metrics.lines().find_map(|line| line.strip_prefix("stockade_run_cpu_seconds_total{key=\"short\"} ")).expect(&metrics);
    assert!(used.parse::<f64>().unwrap() >= 1.2, "{used}");
    service.end();
}

test!(Both, requests_and_results_share_so_much_memory);
fn requests_and_results_share_so_much_memory() {
    let service = Service::with("[limits]\nbody = \"1MiB\"\nbuffers = \"1MiB\"\n", "");
    let code = |length: usize| format!("print('ran')\n#{}", "x".repeat(length));
    service.run(&code(400 << 10)).ran("ran\n");
    // A body that is not whole yet has its room.
    let body = json!({ "code": code(800 << 10) }).to_string();
    let mut slow = service.connect();
    let fields = [&*format!("Authorization: Bearer {}", service.token), "Content-Type: application/json"];
    slow.write_all(head("POST", "/v1/run", &fields, body.len()).as_bytes()).unwrap();
    let (most, last) = body.as_bytes().split_at(body.len() - 1);
    slow.write_all(most).unwrap();
    let is_refused = || {
        let answer = service.run(&code(400 << 10));
        answer.status == 503 && answer.is(503, "buffers_full").body["started"] == false
    };
    assert!(eventually(scaled(Duration::from_secs(10)), is_refused));
    service.run("print(1)").ran("1\n");
    slow.write_all(last).unwrap();
    read_answer(slow).ran("ran\n");
    service.run(&code(400 << 10)).ran("ran\n");
    // A result without room is lost, and its problem says that the code has run.
    let print = |length: usize| format!("print('x' * {length}, end='')");
    assert_eq!(service.run(&print(900 << 10)).body["output"].as_str().map(str::len), Some(900 << 10));
    let lost = service.run(&format!("{}\nimport sys; sys.stderr.write('y' * {})", print(900 << 10), 200 << 10));
    assert_eq!(lost.is(503, "buffers_full").body["started"], true);
    service.end();
}

/// What a field of a head says.
fn field<'h>(head: &'h str, name: &str) -> &'h str {
    let of = |line: &'h str| line.split_once(": ").filter(|(found, _)| found.eq_ignore_ascii_case(name)).map(|(_, value)| value.trim());
    head.lines().find_map(of).unwrap_or_else(|| panic!("no {name}: {head}"))
}
