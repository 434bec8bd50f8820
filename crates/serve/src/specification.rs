//! Tests: `openapi.json` describes the endpoints that there are, and the problems that they answer.
//!
//! Whether a body has the shape that is described is not looked at here; a generator of requests
//! does that against a service that runs (`tests/frameworks/service`).
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use axum::http::{Method, StatusCode};
use serde_json::Value;

use crate::http::{OPENAPI, endpoints};

type Reasons = BTreeMap<u16, BTreeSet<String>>;

fn described() -> Value {
    serde_json::from_str(OPENAPI).unwrap()
}

#[test]
fn each_endpoint_is_described_and_nothing_else_is() {
    let description = described();
    let mut found = BTreeSet::new();
    for (path, methods) in description["paths"].as_object().unwrap() {
        for method in methods.as_object().unwrap().keys() {
            let method = Method::from_bytes(method.to_uppercase().as_bytes()).unwrap();
            found.insert((path.clone(), format!("{:?}", axum::routing::MethodFilter::try_from(method).unwrap())));
        }
    }
    let there: BTreeSet<_> =
        endpoints().iter().map(|endpoint| (endpoint.path.replace("{*", "{"), format!("{:?}", endpoint.method))).collect();
    assert_eq!(found, there);
}

/// The reasons of all problems that this crate makes, by status.
fn made() -> Reasons {
    let mut made = Reasons::new();
    let mut paths = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("src")];
    while let Some(path) = paths.pop() {
        if path.is_dir() {
            paths.extend(fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()));
            continue;
        }
        if path.extension().is_none_or(|extension| extension != "rs") {
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        let code = text.split("#[cfg(test)]\nmod tests").next().unwrap();
        for made_here in code.split("StatusCode::").skip(1) {
            let status: String = made_here.chars().take_while(|c| c.is_ascii_uppercase() || *c == '_').collect();
            // Beside the status, or the two belong to no problem.
            let rest = made_here[status.len()..].strip_prefix(',').map(str::trim_start).and_then(|rest| rest.strip_prefix('"'));
            let Some((reason, _)) = rest.and_then(|rest| rest.split_once('"')) else { continue };
            let named = |code: &u16| {
                let name = StatusCode::from_u16(*code).unwrap().canonical_reason().map(|name| name.to_uppercase().replace([' ', '-'], "_"));
                name.as_deref() == Some(&*status)
            };
            let code = (400..600).find(named).unwrap_or_else(|| panic!("{}: no status {status}", path.display()));
            made.entry(code).or_default().insert(reason.to_owned());
        }
    }
    // The facade of SandboxFusion has its own status for those; its requests wait as long as their client.
    let others = ["queue_timeout", "deadline_exceeded", "key_sessions"];
    let again = made[&429].union(&made[&503]).filter(|reason| !others.contains(&reason.as_str())).cloned().collect();
    made.insert(504, again);
    made
}

#[test]
fn each_problem_is_described_with_its_status_and_on_the_page() {
    let description = described();
    let reasons = |list: &Value| list.as_array().unwrap().iter().map(|reason| reason.as_str().unwrap().to_owned()).collect();
    let mut found = Reasons::new();
    for (status, response) in description["components"]["responses"].as_object().unwrap() {
        let own = &response["content"]["application/problem+json"]["schema"]["allOf"][1]["properties"];
        assert_eq!(own["status"]["const"].to_string(), *status);
        found.insert(status.parse().unwrap(), reasons(&own["reason"]["enum"]));
    }
    let made = made();
    assert!(made.len() > 12, "the sources were not read: {made:?}");
    assert_eq!(found, made);
    let all: BTreeSet<String> = reasons(&description["components"]["schemas"]["Problem"]["properties"]["reason"]["enum"]);
    assert_eq!(all, made.values().flatten().cloned().collect());
    // Each has its row for people.
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../cli/help/serve.md")).unwrap();
    let has_row = |status: &u16, reason: &String| {
        page.lines().any(|line| {
            let mut cells = line.strip_prefix("| ").unwrap_or_default().split(" | ");
            let (reasons, found) = (cells.next().unwrap_or_default(), cells.next());
            reasons.split(", ").any(|cell| cell == format!("`{reason}`")) && found == Some(&*status.to_string())
        })
    };
    for (status, reasons) in made.iter().filter(|(status, _)| **status != 504) {
        for reason in reasons {
            assert!(has_row(status, reason), "no row for {reason}, {status}");
        }
    }
}
