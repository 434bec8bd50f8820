//! Which key a request has.
//!
//! A token is compared by its SHA-256, in constant time, with the hashes of all keys. Over the UNIX
//! socket the uid that the kernel names can be a key. A key in a query is refused: proxies log those.

use std::time::{SystemTime, UNIX_EPOCH};

use axum::{
    extract::Query,
    http::{HeaderMap, StatusCode, Uri, header},
};
use base64::{Engine, prelude::BASE64_STANDARD};
use sha2::{Digest, Sha256};
use stockade_protocol::{
    service::{Credential, Key, Scope},
    text::hex,
};
use subtle::ConstantTimeEq;

use crate::problem::Problem;

const REMEDY: &str = "send `Authorization: Bearer TOKEN`; an administrator makes a token with `stockade key new`";

/// Another field that services take a token in.
const X_API_KEY: &str = "x-api-key";

/// As [`find`], but for a token in `X-API-Key`, which counts before all else.
///
/// # Errors
/// It has none that is known and good.
pub fn find_by_field<'k>(keys: &'k [Key], headers: &HeaderMap, uri: &Uri, uid: Option<u32>) -> Result<&'k Key, Problem> {
    refuse_in_query(uri)?;
    let mut values = headers.get_all(X_API_KEY).iter();
    match (values.next(), values.next()) {
        (None, _) => find(keys, headers, uri, uid),
        (Some(value), None) => by_token(keys, value.as_bytes()),
        (Some(_), Some(_)) => Err(missing("the request has two `X-API-Key` fields")),
    }
}

/// The key of a request. `uid`: its peer, over the UNIX socket.
///
/// # Errors
/// It has none that is known and good.
pub fn find<'k>(keys: &'k [Key], headers: &HeaderMap, uri: &Uri, uid: Option<u32>) -> Result<&'k Key, Problem> {
    refuse_in_query(uri)?;
    let mut values = headers.get_all(header::AUTHORIZATION).iter();
    match (values.next(), values.next()) {
        (None, _) => {
            let of_peer = keys.iter().find(|key| uid.is_some_and(|uid| key.credential == Credential::Uid(uid)));
            let found = of_peer.ok_or_else(|| match uid {
                Some(uid) => missing(&format!("uid {uid} has no key of its own, and the request brings none")),
                None => missing("the request brings no key"),
            });
            found.and_then(not_expired)
        }
        (Some(_), Some(_)) => Err(missing("the request has two `Authorization` fields")),
        (Some(value), None) => {
            let token = token(value.as_bytes()).ok_or_else(|| missing("`Authorization` is neither Bearer nor Basic"))?;
            by_token(keys, &token)
        }
    }
}

fn missing(detail: &str) -> Problem {
    Problem::new(StatusCode::UNAUTHORIZED, "key_missing", format!("{detail}; {REMEDY}"))
}

fn refuse_in_query(uri: &Uri) -> Result<(), Problem> {
    let query = Query::<Vec<(String, String)>>::try_from_uri(uri);
    if query.is_ok_and(|Query(pairs)| pairs.iter().any(|(name, value)| name.starts_with("sd_") || value.starts_with("sd_"))) {
        return Err(Problem::new(
            StatusCode::BAD_REQUEST,
            "key_in_url",
            format!("a key must not stand in a URL, which is logged: {REMEDY}"),
        ));
    }
    Ok(())
}

fn by_token<'k>(keys: &'k [Key], token: &[u8]) -> Result<&'k Key, Problem> {
    let digest: [u8; 32] = Sha256::digest(token).into();
    let hex = hex(&digest);
    // All are looked at, whichever it is.
    let is_it = |key: &&Key| match &key.credential {
        Credential::Sha256(hash) => bool::from(hash.as_bytes().ct_eq(hex.as_bytes())),
        Credential::Uid(_) => false,
    };
    let found = keys.iter().fold(None, |found, key| if is_it(&key) { Some(key) } else { found });
    let unknown = || Problem::new(StatusCode::UNAUTHORIZED, "key_unknown", format!("no key has this token; {REMEDY}"));
    found.ok_or_else(unknown).and_then(not_expired)
}

/// Seconds since 1970, by the host's clock.
pub fn now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs().cast_signed())
}

fn not_expired(found: &Key) -> Result<&Key, Problem> {
    if found.has_expired(now()) {
        let detail = format!("key {} has expired; ask for another", found.id);
        return Err(Problem::new(StatusCode::UNAUTHORIZED, "key_revoked", detail));
    }
    Ok(found)
}

/// The token in `Bearer TOKEN`, or the password in `Basic`.
fn token(value: &[u8]) -> Option<Vec<u8>> {
    let (scheme, rest) = value.split_at(value.iter().position(|byte| *byte == b' ')?);
    let rest = rest.trim_ascii();
    if scheme.eq_ignore_ascii_case(b"bearer") {
        return Some(rest.to_vec());
    }
    let decoded = scheme.eq_ignore_ascii_case(b"basic").then(|| BASE64_STANDARD.decode(rest).ok())??;
    let colon = decoded.iter().position(|byte| *byte == b':')?;
    decoded.get(colon + 1..).map(<[u8]>::to_vec)
}

/// Whether a key that was found before would be found now, and has a scope.
///
/// # Errors
/// The key was removed, has expired or lacks the scope.
pub fn still_good(keys: &[Key], key: &Key, scope: Scope) -> Result<(), Problem> {
    check_scope(still_there(keys, key)?, scope)
}

/// A key that was found before, as it is now.
///
/// # Errors
/// It was removed or has expired.
pub fn still_there<'k>(keys: &'k [Key], key: &Key) -> Result<&'k Key, Problem> {
    let found = keys.iter().find(|known| known.id == key.id && known.credential == key.credential).ok_or_else(|| {
        let detail = format!("key {} was taken away; {REMEDY}", key.id);
        Problem::new(StatusCode::UNAUTHORIZED, "key_revoked", detail)
    })?;
    not_expired(found)
}

/// Whether a key has a scope.
///
/// # Errors
/// It has not.
pub fn check_scope(key: &Key, scope: Scope) -> Result<(), Problem> {
    if key.scopes.contains(&scope) {
        return Ok(());
    }
    let name = serde_json::to_string(&scope).unwrap_or_default();
    let detail = format!("key {} has not the scope {name}; an administrator adds it to its `scopes` in keys.toml", key.id);
    Err(Problem::new(StatusCode::FORBIDDEN, "scope_missing", detail))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::*;

    fn keys() -> Vec<Key> {
        let key = |id: &str, credential, expires| Key {
            id: id.to_owned(),
            credential,
            policies: vec!["default".to_owned()],
            scopes: vec![Scope::Run],
            running: 1,
            waiting: 1,
            runs_per_minute: None,
            cpu_per_hour: None,
            weight: 1,
            expires,
            sessions: 1,
        };
        let hash = |token: &str| Credential::Sha256(Sha256::digest(token).iter().map(|byte| format!("{byte:02x}")).collect());
        vec![key("a", hash("sd_a_1"), None), key("old", hash("sd_old_1"), Some(1)), key("uid", Credential::Uid(1000), None)]
    }

    fn found(authorization: &[&str], uri: &str, uid: Option<u32>) -> Result<String, &'static str> {
        let mut headers = HeaderMap::new();
        for value in authorization {
            headers.append(header::AUTHORIZATION, value.parse().unwrap());
        }
        let keys = keys();
        find(&keys, &headers, &uri.parse().unwrap(), uid).map(|key| key.id.clone()).map_err(|problem| problem.reason)
    }

    #[test]
    fn a_token_is_found_in_both_forms_and_nothing_else_is() {
        let basic = |text: &str| format!("Basic {}", BASE64_STANDARD.encode(text));
        assert_eq!(found(&["Bearer sd_a_1"], "/", None), Ok("a".to_owned()));
        assert_eq!(found(&["bearer  sd_a_1"], "/", None), Ok("a".to_owned()));
        assert_eq!(found(&[&basic("x:sd_a_1")], "/", None), Ok("a".to_owned()));
        for other in ["Bearer sd_a_2", "Bearer sd_a_", "Bearer sd_a_1x", &basic("sd_a_1:"), "Bearer "] {
            assert_eq!(found(&[other], "/", Some(1000)), Err("key_unknown"), "{other}");
        }
        for other in ["sd_a_1", "Digest sd_a_1", "Basic !", &basic("sd_a_1")] {
            assert_eq!(found(&[other], "/", None), Err("key_missing"), "{other}");
        }
        assert_eq!(found(&["Bearer sd_a_1", "Bearer sd_a_1"], "/", None), Err("key_missing"));
        assert_eq!(found(&["Bearer sd_old_1"], "/", None), Err("key_revoked"));
        assert_eq!(found(&["Bearer sd_a_1"], "/v1/run?key=sd_a_1", None), Err("key_in_url"));
    }

    #[test]
    fn a_token_in_a_field_of_its_own_counts_before_all_else() {
        let found = |fields: &[(&'static str, &str)]| {
            let mut headers = HeaderMap::new();
            for (name, value) in fields {
                headers.append(*name, value.parse().unwrap());
            }
            let keys = keys();
            find_by_field(&keys, &headers, &"/".parse().unwrap(), Some(1000)).map(|key| key.id.clone()).map_err(|problem| problem.reason)
        };
        let (good, wrong) = (("x-api-key", "sd_a_1"), ("x-api-key", "sd_a_2"));
        assert_eq!(found(&[good]), Ok("a".to_owned()));
        assert_eq!(found(&[good, ("authorization", "Bearer sd_a_2")]), Ok("a".to_owned()));
        assert_eq!(found(&[wrong, ("authorization", "Bearer sd_a_1")]), Err("key_unknown"));
        assert_eq!(found(&[("x-api-key", "")]), Err("key_unknown"));
        assert_eq!(found(&[("x-api-key", "sd_old_1")]), Err("key_revoked"));
        assert_eq!(found(&[good, good]), Err("key_missing"));
        // Without it, what others may send.
        assert_eq!(found(&[("authorization", "Bearer sd_a_1")]), Ok("a".to_owned()));
        assert_eq!(found(&[]), Ok("uid".to_owned()));
    }

    #[test]
    fn a_uid_is_a_key_over_the_unix_socket_alone() {
        assert_eq!(found(&[], "/", Some(1000)), Ok("uid".to_owned()));
        assert_eq!(found(&[], "/", Some(1001)), Err("key_missing"));
        assert_eq!(found(&[], "/", None), Err("key_missing"));
    }
}
