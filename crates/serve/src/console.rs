//! What people see of the service: the console, one page, and what it and others read of runs.
//!
//! Runs, history and denials of all keys are for keys with the scope `watch`. Any key reads of its own policies
//! what they allow; those of all need `watch` too. Nothing here changes anything.
//!
//! The page has no rights of its own: it is sent to anyone, holds no secret, and reads by a key that its
//! user types. Its policy lets it load nothing, send nothing but requests to its own origin, and run
//! the one script that is compiled in.

use std::sync::LazyLock;

use axum::{
    body::{Body, Bytes},
    extract::{Query, State, rejection::QueryRejection},
    http::{HeaderMap, HeaderName, HeaderValue, header},
    response::{IntoResponse, Response},
};
use base64::{Engine, prelude::BASE64_STANDARD};
use serde::Deserialize;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use stockade_protocol::service::Scope;

use crate::{
    auth::{Any, KeyFor, ToWatch},
    history::MINUTES,
    http::{Shared, bad_query, buffered_json, format_of, result_response, stream_response},
    keys::check_scope,
    problem::Problem,
    watch::{Watcher, snapshot},
};

/// The page.
const PAGE: &str = include_str!("console.html");

/// The one policy under which a browser shows the page.
static CONTENT_POLICY: LazyLock<String> = LazyLock::new(|| {
    let hash = |tag: &str| BASE64_STANDARD.encode(Sha256::digest(inside(PAGE, tag)));
    let (script, style) = (hash("script"), hash("style"));
    format!(
        "default-src 'none'; connect-src 'self'; script-src 'sha256-{script}'; style-src 'sha256-{style}'; frame-ancestors 'none'; \
         base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
});

/// What stands between a tag and its end.
fn inside<'p>(page: &'p str, tag: &str) -> &'p str {
    let (_, rest) = page.split_once(&format!("<{tag}>")).unwrap_or_default();
    rest.split_once(&format!("</{tag}>")).unwrap_or_default().0
}

/// `GET /`.
pub async fn console() -> Response {
    let mut response = ([(header::CONTENT_TYPE, "text/html; charset=utf-8")], PAGE).into_response();
    let headers = response.headers_mut();
    headers.extend(HeaderValue::from_str(&CONTENT_POLICY).ok().map(|policy| (header::CONTENT_SECURITY_POLICY, policy)));
    headers.insert(header::X_FRAME_OPTIONS, HeaderValue::from_static("DENY"));
    headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    headers.insert(HeaderName::from_static("cross-origin-opener-policy"), HeaderValue::from_static("same-origin"));
    headers.insert(HeaderName::from_static("cross-origin-resource-policy"), HeaderValue::from_static("same-origin"));
    response
}

/// `GET /v1/watch`: all that happens, as it does; without a stream what there is now.
pub async fn watch(State(front): Shared, KeyFor { key, .. }: KeyFor<ToWatch>, headers: HeaderMap) -> Result<Response, Problem> {
    let Some(format) = format_of(&headers) else {
        let (_, now) = snapshot(&front, &key)?;
        return Ok(result_response(Bytes::from_owner(now)));
    };
    let watcher = Watcher::new(front, key, format);
    let parts = futures_util::stream::unfold(watcher, |mut watcher| async move {
        let part = watcher.next().await?;
        Some((Ok::<_, std::convert::Infallible>(Bytes::from_owner(part)), watcher))
    });
    Ok(stream_response(Body::from_stream(parts), format))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HistoryQuery {
    minutes: Option<u64>,
}

/// `GET /v1/history`: how many runs ended how, by the minute.
pub async fn history(
    State(front): Shared,
    KeyFor { key, .. }: KeyFor<ToWatch>,
    query: Result<Query<HistoryQuery>, QueryRejection>,
) -> Result<Response, Problem> {
    let bad = || bad_query(format!("the query may have `minutes`, 1 to {MINUTES}"));
    let minutes = query.map_err(|_| bad())?.0.minutes.unwrap_or(MINUTES);
    if !(1..=MINUTES).contains(&minutes) {
        return Err(bad());
    }
    buffered_json(&front, &key.id, &front.watch.history(minutes))
}

/// `GET /v1/denials`: what runs were refused, the last first.
pub async fn denials(State(front): Shared, KeyFor { key, .. }: KeyFor<ToWatch>) -> Result<Response, Problem> {
    buffered_json(&front, &key.id, &front.watch.denials())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PolicyQuery {
    /// Those of all keys, which needs `watch`.
    #[serde(default)]
    all: bool,
    /// With what each allows.
    #[serde(default)]
    explain: bool,
}

/// `GET /v1/policies`: which there are for this key, or for all.
pub async fn policies(
    State(front): Shared,
    KeyFor { key, .. }: KeyFor<Any>,
    query: Result<Query<PolicyQuery>, QueryRejection>,
) -> Result<Response, Problem> {
    let query = query.map_err(|error| bad_query(format!("the query may have `all` and `explain`, each `true` or `false`: {error}")))?.0;
    if query.all {
        check_scope(&key, Scope::Watch)?;
    }
    let settings = front.settings();
    let names: Vec<&String> = if query.all { settings.policies.keys().collect() } else { key.policies.iter().collect() };
    let list = names.into_iter().map(|name| {
        let size = settings.policies.get(name).copied().unwrap_or_default();
        let mut policy = json!({ "name": name, "cpus": size.cpus as f64 / 1000.0, "memory_bytes": size.memory });
        if let (true, Some(explanation), Value::Object(policy)) = (query.explain, settings.explained.get(name), &mut policy) {
            policy.insert("explanation".to_owned(), explanation.clone());
        }
        policy
    });
    buffered_json(&front, &key.id, &json!({ "policies": list.collect::<Vec<_>>() }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_has_one_script_and_one_style_and_nothing_from_elsewhere() {
        assert_eq!((PAGE.matches("<script").count(), PAGE.matches("<style").count()), (1, 1));
        assert!(inside(PAGE, "script").len() > 1000 && inside(PAGE, "style").len() > 500, "their hashes are those of something");
        for never in ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "localStorage", "sessionStorage"] {
            assert!(!PAGE.contains(never), "{never}");
        }
        for never in ["cookie", "http://", "https://", " style=\"", " onclick", "src=", "url(", "@import", "<form", "location."] {
            let allowed = PAGE.matches("http://www.w3.org/2000/svg").count();
            let found = PAGE.matches(never).count() - if never == "http://" { allowed } else { 0 };
            assert_eq!(found, 0, "{never}");
        }
        // It reads only.
        assert!(!PAGE.contains("method:"));
        assert!(CONTENT_POLICY.is_ascii() && !CONTENT_POLICY.contains("unsafe"), "{}", *CONTENT_POLICY);
    }
}
