//! Valid and invalid requests. Each invalid one differs from a valid one only in the cause of
//! its refusal.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use super::*;

const GOOD: &str = "GET /simple/ HTTP/1.1\r\nHost: api.internal:8080\r\nAccept: */*\r\n\r\n";

fn name() -> Name {
    Name::new("api.internal").unwrap()
}

fn examined(bytes: &[u8]) -> Result<usize, DenialReason> {
    HttpInspector::default().examine(bytes, &name(), 8080).map_err(|refused| refused.reason)
}

#[track_caller]
fn passes(text: &str) {
    assert_eq!(examined(text.as_bytes()), Ok(text.len()), "{text:?}");
    // Split at every place.
    let mut check = HttpInspector::default();
    let mut released = 0;
    for end in 0..=text.len() {
        released += check.examine(&text.as_bytes()[released..end], &name(), 8080).unwrap();
    }
    assert_eq!(released, text.len(), "{text:?}");
}

#[track_caller]
fn refused(text: &str, reason: DenialReason) {
    assert_eq!(examined(text.as_bytes()), Err(reason), "{text:?}");
    let mut check = HttpInspector::default();
    let mut released = 0;
    let ended = (0..=text.len()).find_map(|end| match check.examine(&text.as_bytes()[released..end], &name(), 8080) {
        Ok(more) => {
            released += more;
            None
        }
        Err(refused) => Some(refused.reason),
    });
    assert_eq!(ended, Some(reason), "byte by byte: {text:?}");
}

/// A valid request with one text replaced.
fn changed(from: &str, to: &str) -> String {
    assert!(GOOD.contains(from));
    GOOD.replacen(from, to, 1)
}

fn post(headers: &str, body: &str) -> String {
    format!("POST / HTTP/1.1\r\nHost: api.internal\r\n{headers}\r\n{body}")
}

#[test]
fn a_request_for_the_right_host_passes() {
    passes(GOOD);
    for host in ["Host: api.internal", "host:api.internal", "HOST: API.Internal:8080 ", "Host: api.internal."] {
        passes(&changed("Host: api.internal:8080", host));
    }
    passes(&changed("/simple/", "http://api.internal:8080/simple/?a=http://evil.example"));
    passes(&changed("/simple/", "HTTP://API.internal/?a"));
    passes(&changed("GET /simple/", "OPTIONS *"));
    passes(&changed("HTTP/1.1", "HTTP/1.0"));
}

#[test]
fn a_request_for_another_host_is_refused() {
    for host in [
        "evil.example",
        "api.internal.evil.example",
        "evil.api.internal",
        "api.internal:80",
        "api.internal:08080",
        "api.internal:",
        "api.internal:8080:8080",
        "api.internal@evil.example",
        "evil.example/api.internal",
        "api.internal, evil.example",
        "api.internal evil.example",
        "10.0.5.7",
        "[2001:db8::1]",
        "api.internal%00",
    ] {
        refused(&changed("api.internal:8080", host), DenialReason::HostMismatch);
    }
    for target in [
        "http://evil.example/",
        "http://api.internal@evil.example/",
        "http://api.internal:80/",
        "http:///",
        "http://evil.example#api.internal",
        // Where a host ends here, servers do not agree.
        "http://api.internal#@evil.example/",
        "http://api.internal#.evil.example/",
        "http://api.internal?.evil.example/",
        "http://api.internal?@evil.example/",
        "http://api.internal?a",
        "http://api.internal\\@evil.example/",
    ] {
        refused(&changed("/simple/", target), DenialReason::Proxy);
    }
    for target in ["/simple/#@evil.example", "http://api.internal/#@evil.example/"] {
        refused(&changed("/simple/", target), DenialReason::HttpMalformed);
        passes(&changed("/simple/", &target.replace('#', "?")));
    }
}

#[test]
fn a_request_names_one_host_once() {
    refused(&changed("Host: api.internal:8080\r\n", ""), DenialReason::HostMissing);
    refused(&changed("api.internal:8080", ""), DenialReason::HostMissing);
    refused(&changed("Accept: */*", "Host: api.internal:8080"), DenialReason::HttpMalformed);
    refused(&changed("Accept: */*", "hOST: evil.example"), DenialReason::HttpMalformed);
    refused(&changed("Accept: */*\r\n", "Host : evil.example\r\n"), DenialReason::HttpMalformed);
    refused(&changed("Accept: */*", "X: a\r\n Host: evil.example"), DenialReason::HttpMalformed);
    refused(&changed("Accept: */*", "\0Host: evil.example"), DenialReason::HttpMalformed);
    for target in ["ftp://api.internal/", "https://api.internal/", "*", "api.internal", "//api.internal\\"] {
        let expected = if target.starts_with('/') { None } else { Some(DenialReason::HttpMalformed) };
        match expected {
            Some(reason) => refused(&changed("/simple/", target), reason),
            None => passes(&changed("/simple/", target)),
        }
    }
}

#[test]
fn bare_line_ends_are_refused() {
    for (from, to) in
        [("*/*\r\n", "*/*\n"), ("*/*\r\n", "*/*\r"), ("\r\n\r\n", "\n\n"), ("Accept: ", "Accept: \rX: "), ("\r\n\r\n", "\r\n\n")]
    {
        let text = changed(from, to) + "\r\n\r\n";
        assert!(examined(text.as_bytes()).is_err(), "{text:?}");
    }
    // The first line decides whether it is HTTP at all.
    refused("GET / HTTP/1.1\nHost: api.internal\n\n", DenialReason::ProtocolUnknown);
    for other in ["EHLO me\r\n", "SSH-2.0-x\r\n", "GET /\r\n", "GET / HTTP/1.2\r\nHost: api.internal\r\n\r\n", "A\r\n\r\n"] {
        refused(other, DenialReason::ProtocolUnknown);
    }
    // Some servers skip an empty line before a request, others do not.
    refused(&format!("{GOOD}\r\n{GOOD}"), DenialReason::HttpMalformed);
}

#[test]
fn every_request_of_a_connection_is_checked() {
    passes(&GOOD.repeat(3));
    let evil = changed("api.internal:8080", "evil.example");
    refused(&(GOOD.to_owned() + &evil), DenialReason::HostMismatch);
    let mut check = HttpInspector::default();
    let both = GOOD.to_owned() + &evil[..evil.len() - 1];
    assert_eq!(check.examine(both.as_bytes(), &name(), 8080), Ok(GOOD.len()), "the first one leaves alone");
    assert!(check.examine(evil.as_bytes(), &name(), 8080).is_err());
    refused(&(post("Content-Length: 5\r\n", "12345") + &evil), DenialReason::HostMismatch);
    refused(&(post("Transfer-Encoding: chunked\r\n", "5\r\n12345\r\n0\r\n\r\n") + &evil), DenialReason::HostMismatch);
    // The same bytes in a body are no request.
    passes(&post(&format!("Content-Length: {}\r\n", evil.len()), &evil));
    passes(&(post("Content-Length: 5\r\n", "12345") + GOOD));
    passes(&(post("Content-Length: 0\r\n", "") + GOOD));
    passes(&(post("Transfer-Encoding: Chunked\r\n", "5\r\n12345\r\nA\r\n0123456789\r\n0\r\n\r\n") + GOOD));
}

#[test]
fn a_body_is_released_as_it_arrives() {
    let mut check = HttpInspector::default();
    let head = post("Content-Length: 10\r\n", "");
    assert_eq!(check.examine((head.clone() + "123").as_bytes(), &name(), 8080), Ok(head.len() + 3));
    assert_eq!(check.examine(b"4567", &name(), 8080), Ok(4));
    assert_eq!(check.examine(b"890GET", &name(), 8080), Ok(3));
}

#[test]
fn a_request_without_a_certain_end_is_refused() {
    for headers in [
        "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        "Content-Length: 5\r\nContent-Length: 5\r\n",
        "Content-Length: 5\r\nContent-Length: 6\r\n",
        "Content-Length: 5, 5\r\n",
        "Content-Length: +5\r\n",
        "Content-Length: -5\r\n",
        "Content-Length: 0x5\r\n",
        "Content-Length: 5 5\r\n",
        "Content-Length:\r\n",
        "Content-Length: 99999999999999999999\r\n",
        "Content_Length: 5\r\n",
        "Transfer_Encoding: chunked\r\n",
        "Transfer-Encoding: identity\r\n",
        "Transfer-Encoding: gzip, chunked\r\n",
        "Transfer-Encoding: chunked, chunked\r\n",
        "Transfer-Encoding: xchunked\r\n",
        "Transfer-Encoding:\x0bchunked\r\n",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding : chunked\r\n",
    ] {
        refused(&post(headers, ""), DenialReason::HttpMalformed);
    }
    refused("POST / HTTP/1.0\r\nHost: api.internal\r\nTransfer-Encoding: chunked\r\n\r\n", DenialReason::HttpMalformed);
}

#[test]
fn chunks_are_plain() {
    let chunked = |body: &str| post("Transfer-Encoding: chunked\r\n", body);
    passes(&chunked("1\r\na\r\n0\r\n\r\n"));
    passes(&chunked("0000000000000001\r\na\r\n0\r\n\r\n"));
    for body in [
        "1\na\r\n0\r\n\r\n",
        "1;x=y\r\na\r\n0\r\n\r\n",
        "1 \r\na\r\n0\r\n\r\n",
        " 1\r\na\r\n0\r\n\r\n",
        "+1\r\na\r\n0\r\n\r\n",
        "0x1\r\na\r\n0\r\n\r\n",
        "\r\n",
        "g\r\n",
        "00000000000000001\r\na\r\n",
        "ffffffffffffffff\r\na\r\n",
        "1\r\nab\r\n0\r\n\r\n",
        "1\r\na\n0\r\n\r\n",
        "1\r\na\rX",
        "0\r\nHost: evil.example\r\n\r\n",
        "0\r\n\n",
    ] {
        refused(&chunked(body), DenialReason::HttpMalformed);
    }
}

#[test]
fn upgrades_to_another_protocol_are_refused() {
    refused(&changed("GET /simple/", "CONNECT evil.example:443"), DenialReason::Proxy);
    refused(&changed("Accept: */*", "Connection: upgrade\r\nUpgrade: websocket"), DenialReason::HttpTunnel);
    passes(&changed("Accept: */*", "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c"));
    refused("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", DenialReason::Http2Cleartext);
    refused(&(GOOD.to_owned() + "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), DenialReason::Http2Cleartext);
}

#[test]
fn a_head_has_a_maximum_size_and_number_of_lines() {
    let lines = |count: usize| changed("Accept: */*\r\n", &"X: y\r\n".repeat(count));
    passes(&lines(127));
    refused(&lines(128), DenialReason::HttpMalformed);
    let long = |length: usize| changed("*/*", &"a".repeat(length));
    assert!(examined(long(MAX_HEAD_LEN - GOOD.len() + 3).as_bytes()).is_ok());
    assert_eq!(examined(long(MAX_HEAD_LEN - GOOD.len() + 4).as_bytes()), Err(DenialReason::HttpMalformed));
}
