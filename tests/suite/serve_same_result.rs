//! That a program has the same result through the service as through `exec`: the table of causes,
//! the honest programs of the corpus, and what the tests of verdicts and misdeeds send to `exec`.
//! What a program decides of its result is compared, as in `same_result.rs`.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Mutex,
    thread,
};

use serde_json::{Value, json};

use super::{
    causes::TABLE,
    same_result::{cold, decided, differences, lines_of_limits, recorded},
    serve::Service,
};
use crate::support::{
    policy_dir::{PolicyDirectory, derived},
    runner::test,
    starts::compare_corpus,
    timeouts::scaled_limit,
};

/// How many requests there are at a time.
const CLIENTS: usize = 2;
/// How often a program is compared whose result was not the same at once.
const TRIES: usize = 4;

/// A request under a policy.
struct Case {
    policy: String,
    request: Value,
}

/// A service whose key may use these policies.
fn service_of(place: PolicyDirectory, policies: &BTreeSet<String>) -> Service {
    let uid = rustix::process::geteuid().as_raw();
    let policies: Vec<&String> = policies.iter().collect();
    let key = format!("[[key]]\nid = \"all\"\nuid = {uid}\npolicies = {policies:?}\n");
    Service::at(place, "[capacity]\noversubscribe = 8.0\nmemory = \"64GiB\"\n", &key)
}

/// The result over HTTP. Where nothing was prepared, the program has the name that `exec` gives.
#[track_caller]
fn over_http(service: &Service, policy: &str, request: &Value) -> Value {
    let path = format!("/v1/run?policy={policy}");
    let answer = service.ask_with("POST", &path, &["Content-Type: application/json"], request.to_string().as_bytes());
    assert_eq!(answer.status, 200, "{}", answer.body);
    let text = answer.body.to_string();
    let text = ["py", "sh", "js"]
        .iter()
        .fold(text, |text, ending| text.replace(&format!("main.{ending}"), &format!("stockade_0000000000000000.{ending}")));
    serde_json::from_str(&text).unwrap()
}

/// Compares all, some at a time. Returns how many programs vary by themselves.
#[track_caller]
fn compare_all(service: &Service, cases: Vec<Case>) -> usize {
    let (left, wrong, varied) = (Mutex::new(cases.into_iter()), Mutex::new(Vec::new()), Mutex::new(0));
    let work = || {
        loop {
            let Some(Case { policy, request }) = left.lock().unwrap().next() else { break };
            let first = cold(&policy, &request);
            let mut found = Vec::new();
            for _ in 0..TRIES {
                found = differences(&first, &over_http(service, &policy, &request), false);
                if found.is_empty() {
                    break;
                }
            }
            if found.is_empty() {
                continue;
            }
            if differences(&first, &cold(&policy, &request), false).is_empty() {
                wrong.lock().unwrap().push(format!("{}\n{request}", found.join("; ")));
            } else {
                *varied.lock().unwrap() += 1;
            }
        }
    };
    thread::scope(|scope| (0..CLIENTS).for_each(|_| drop(scope.spawn(work))));
    let wrong = wrong.into_inner().unwrap();
    assert!(wrong.is_empty(), "{} differ:\n{}", wrong.len(), wrong.join("\n\n"));
    varied.into_inner().unwrap()
}

test!(RootlessOnly, each_cause_of_an_end_is_told_alike_over_http, needs [Program("curl"), Program("node")], seconds 120);
fn each_cause_of_an_end_is_told_alike_over_http() {
    let place = PolicyDirectory::new();
    let (mut policies, mut cases) = (BTreeMap::new(), Vec::new());
    // bash itself waits 15 s before it gives a refused fork up.
    for row in TABLE.iter().filter(|row| (row.cause, row.language) != ("processes", "bash")) {
        let mut limits: Value = serde_json::from_str(row.limits).unwrap();
        if limits.get("wall").is_none() {
            limits["wall"] = json!(scaled_limit(20_000));
        }
        let egress = if row.cause == "host not allowed" { "[egress]\nwhitelist = { add = [\"allowed.example:443\"] }\n" } else { "" };
        let text = derived(&format!("{egress}{}", lines_of_limits(&limits)));
        let number = policies.len();
        let policy = policies.entry(text.clone()).or_insert_with(|| place.write(&format!("row-{number}"), &text)).clone();
        cases.push(Case { policy, request: json!({"language": row.language, "code": row.code}) });
    }
    let service = service_of(place, &policies.into_values().collect());
    assert!(compare_all(&service, cases) < 3);
    service.end();
}

test!(Both, honest_programs_end_alike_over_http, needs [Long], seconds 240);
fn honest_programs_end_alike_over_http() {
    let place = PolicyDirectory::new();
    // Else the order of a set is another at every start.
    let policy = place.write("honest", &derived("[environment.set]\nPYTHONHASHSEED = \"1\""));
    let service = service_of(place, &BTreeSet::from([policy.clone()]));
    let (mut same, mut different) = (0, Vec::new());
    for corpus in [include_str!("../corpus/benign-python-1.txt"), include_str!("../corpus/benign-python-2.txt")] {
        let (alike, others) = compare_corpus(corpus, |code| {
            let request = json!({"code": code, "limits": {"wall": scaled_limit(20_000)}});
            let told = |result: &Value| Value::Object(decided(result)).to_string();
            (told(&cold(&policy, &request)), told(&over_http(&service, &policy, &request)))
        });
        same += alike;
        different.extend(others);
    }
    assert!(different.is_empty() && same > 90, "{same} are the same, and not: {different:?}");
    service.end();
}

test!(serial Both, what_tests_of_verdicts_and_misdeeds_ask_for_ends_alike_over_http, needs [Long], seconds 900);
fn what_tests_of_verdicts_and_misdeeds_ask_for_ends_alike_over_http() {
    let lines = recorded(&["suite::verdicts::", "suite::agent_misuse::", "--skip", "the_launcher_stays_small"]);
    let place = PolicyDirectory::new();
    let (mut policies, mut cases, mut seen) = (BTreeMap::new(), Vec::new(), BTreeSet::new());
    for line in &lines {
        let (Some(text), request) = (line["policy"].as_str(), &line["request"]) else { continue };
        let was_run = line["result"]["started"] == true && request["code"].is_string();
        // No key has a directory of the host, and one of the test's is gone.
        let has_place = ["scratch", "filename", "approve"].iter().any(|field| request.get(field).is_some()) || text.contains("/suite-");
        if !was_run || has_place || !seen.insert(format!("{text}{request}")) {
            continue;
        }
        let text = if text.is_empty() { derived("") } else { text.to_owned() };
        let number = policies.len();
        let policy = policies.entry(text.clone()).or_insert_with(|| place.write(&format!("of-{number}"), &text)).clone();
        cases.push(Case { policy, request: request.clone() });
    }
    let count = cases.len();
    let service = service_of(place, &policies.into_values().collect());
    let varied = compare_all(&service, cases);
    assert!(count > 60 && varied < 12, "{count} programs, of which {varied} vary");
    service.end();
}
