//! What a registry's challenge is answered with: a password to itself, or a token that the server of
//! its realm gives (<https://distribution.github.io/distribution/spec/auth/token/>).
//!
//! A registry names its realm itself, so the realm is no stranger's only if it is the registry's own
//! host, one of the same domain, or one that the user names; no other gets the password. Where the registry
//! itself is asked by plain HTTP, only its own port or one that the user names does. A realm is
//! asked by https, or on this host; it is followed nowhere. The scope is always ours: to read this one image.

use serde::Deserialize;
use stockade_connect::is_loopback;
use ureq::http::{StatusCode, Uri};

use crate::{
    FetchError,
    challenge::Challenge,
    client::{Answer, Kind, Registry, is_same_origin, server_of},
    credentials::Credentials,
};

const MAX_TOKEN_LEN: u64 = 256 << 10;

#[derive(Deserialize)]
struct Tokens {
    token: Option<String>,
    access_token: Option<String>,
}

/// The value of the header `Authorization` that answers a challenge of the registry.
pub(crate) fn authorization(registry: &Registry, challenges: &[Challenge], what: &str) -> Result<String, FetchError> {
    let of_scheme = |name: &str| challenges.iter().find(|challenge| challenge.scheme == name);
    if let Some(challenge) = of_scheme("bearer") {
        return bearer(registry, challenge, what);
    }
    let server = registry.server();
    if of_scheme("basic").is_none() {
        let schemes: Vec<&str> = challenges.iter().map(|challenge| challenge.scheme.as_str()).collect();
        let what = format!("it wants to be asked by `{}`; Bearer and Basic are spoken here", schemes.join(", "));
        return Err(FetchError::Answer { server, what });
    }
    match registry.credentials() {
        Credentials::Basic(login) => {
            check_secrecy(registry, registry.base())?;
            Ok(login.header())
        }
        _ => Err(registry.denied(what)),
    }
}

fn bearer(registry: &Registry, challenge: &Challenge, what: &str) -> Result<String, FetchError> {
    let server = registry.server();
    let wrong = |what: String| FetchError::Answer { server: registry.server(), what };
    let realm: Uri = challenge
        .parameter("realm")
        .and_then(|realm| realm.parse().ok())
        .filter(|realm: &Uri| realm.scheme().is_some() && realm.host().is_some())
        .ok_or_else(|| wrong(String::from("it asks for a token and names no URL that gives one")))?;
    let refuse = |why| FetchError::Redirect { server: server.clone(), to: format!("{} for a token", server_of(&realm)), why };
    registry.check_scheme(registry.base(), &realm).map_err(refuse)?;
    let password = match registry.credentials() {
        Credentials::Basic(login) => {
            check_secrecy(registry, &realm)?;
            Some(login.header())
        }
        _ => None,
    };
    let service = challenge.parameter("service").map(|service| format!("service={}&", percent_encoded(service))).unwrap_or_default();
    let scope = percent_encoded(&format!("repository:{}:pull", registry.reference().repository()));
    let joint = if realm.query().is_some() { '&' } else { '?' };
    let url: Uri = format!("{realm}{joint}{service}scope={scope}").parse().map_err(|_| wrong(String::from("its realm is no URL")))?;
    let (head, body) = registry.send(&url, password.as_deref(), Kind::Document("application/json"))?.into_parts();
    if head.status != StatusCode::OK {
        return Err(registry.refusal(&url, head.status.as_u16(), &head.headers, body, what));
    }
    let answer = Answer { server: server_of(&url), status: head.status, headers: head.headers, body: body.into_reader() };
    let answered = answer.read(MAX_TOKEN_LEN, "a token", registry.timeouts().silence)?;
    let wrong = |what: &str| FetchError::Answer { server: server_of(&url), what: what.to_owned() };
    let tokens: Tokens = serde_json::from_slice(&answered).map_err(|_| wrong("what it gives for a token is no JSON of one"))?;
    let token = tokens.token.or(tokens.access_token).filter(|token| !token.is_empty()).ok_or_else(|| wrong("it gives no token"))?;
    if !token.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(wrong("its token is no word"));
    }
    Ok(format!("Bearer {token}"))
}

/// Whether the password may be sent to a URL: by TLS or on this host, and to none that is foreign to
/// the registry.
fn check_secrecy(registry: &Registry, to: &Uri) -> Result<(), FetchError> {
    let host = to.host().unwrap_or_default();
    let refuse =
        |why, can_be_allowed| Err(FetchError::PasswordElsewhere { server: registry.server(), to: server_of(to), why, can_be_allowed });
    if to.scheme_str() != Some("https") && !is_loopback(host) {
        return refuse("no password goes over plain HTTP to another host", false);
    }
    let authority = to.authority().map(|authority| authority.as_str()).unwrap_or_default();
    let base = registry.base();
    let own = base.host().unwrap_or_default();
    if registry.is_auth_host(authority) || is_same_origin(base, to) {
        Ok(())
    } else if !is_kin(own, host) {
        refuse("it is another's host", true)
    } else if base.scheme_str() == Some("https") {
        Ok(())
    } else if is_loopback(own) {
        refuse("the registry is asked by plain HTTP, and another's program may have that port of this host", true)
    } else {
        refuse("the registry is asked by plain HTTP, so anyone between can have named that host", true)
    }
}

/// Whether a host is the registry, below it, or in the domain that the registry is in.
fn is_kin(registry: &str, host: &str) -> bool {
    let (registry, host) = (registry.to_ascii_lowercase(), host.to_ascii_lowercase());
    let is_below = |domain: &str| host == domain || host.strip_suffix(domain).is_some_and(|rest| rest.ends_with('.'));
    let is_address = |host: &str| host.starts_with('[') || host.parse::<std::net::IpAddr>().is_ok();
    if is_address(&registry) || is_address(&host) {
        return registry == host;
    }
    // Of `example.com` the domain is itself: `com` is shared by strangers.
    let domain = registry.split_once('.').map(|(_, domain)| domain).filter(|domain| domain.contains('.'));
    is_below(&registry) || domain.is_some_and(is_below)
}

/// As a value in a query.
fn percent_encoded(text: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~');
    text.bytes().map(|byte| if is_plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") }).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::*;
    use crate::Options;

    #[test]
    fn a_realm_that_plain_http_names_gets_no_password_unless_the_user_names_it() {
        let hosts = |host: &str| vec![host.to_owned()];
        let registry = |options| Registry::new("registry.example.com/a/b:1".parse().unwrap(), options).unwrap();
        let realm: Uri = "https://auth.example.com/token".parse().unwrap();
        let plain = Options { insecure_http: hosts("registry.example.com"), ..Options::default() };
        let error = check_secrecy(&registry(plain.clone()), &realm).unwrap_err().to_string();
        assert!(error.contains("plain HTTP") && error.contains("--auth-host"), "{error}");
        check_secrecy(&registry(Options { auth_hosts: hosts("auth.example.com"), ..plain }), &realm).unwrap();
        // The control: the same realm of the same registry, which is asked by TLS.
        check_secrecy(&registry(Options::default()), &realm).unwrap();
    }

    #[test]
    fn another_port_of_this_host_gets_no_password_unless_the_user_names_it() {
        let sent = |options, realm: &str| {
            let registry = Registry::new("127.0.0.1:5900/a/b:1".parse().unwrap(), options).unwrap();
            check_secrecy(&registry, &realm.parse().unwrap()).map_err(|error| error.to_string())
        };
        let error = sent(Options::default(), "http://127.0.0.1:5901/token").unwrap_err();
        assert!(error.contains("that port") && error.contains("--auth-host"), "{error}");
        // The controls: its own port, and one that is named.
        sent(Options::default(), "http://127.0.0.1:5900/token").unwrap();
        let named = Options { auth_hosts: vec![String::from("127.0.0.1:5901")], ..Options::default() };
        sent(named, "http://127.0.0.1:5901/token").unwrap();
    }

    #[test]
    fn a_password_goes_to_the_registrys_own_domain() {
        for (registry, host, is) in [
            ("registry-1.docker.io", "auth.docker.io", true),
            ("registry.gitlab.com", "gitlab.com", true),
            ("ghcr.io", "ghcr.io", true),
            ("GHCR.io", "token.ghcr.io", true),
            ("ghcr.io", "quay.io", false),
            ("ghcr.io", "evil-ghcr.io", false),
            ("registry.example.com", "evilexample.com", false),
            ("registry.example.com", "example.com.evil.org", false),
            ("registry.redhat.io", "sso.redhat.com", false),
            ("127.0.0.1", "127.0.0.1", true),
            ("127.0.0.1", "127.0.0.2", false),
            ("10.0.0.1", "2.0.0.1", false),
            ("[::1]", "[::1]", true),
            ("localhost", "localhost", true),
            ("localhost", "127.0.0.1", false),
        ] {
            assert_eq!(is_kin(registry, host), is, "{registry} {host}");
        }
    }
}
