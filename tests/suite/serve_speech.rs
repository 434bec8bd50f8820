//! The service and what is no plain HTTP: requests that a proxy before it could take for others than
//! it does, and names that are not its own. Each is answered once, with its status, and what stands
//! behind it on the connection is not taken for a request.

use std::{
    io::{Read, Write},
    net::TcpStream,
    time::Duration,
};

use serde_json::json;

use super::serve::Service;
use crate::support::{runner::test, timeouts::scaled};

/// All that is answered to these bytes, until the service closes the connection.
fn answers(service: &Service, bytes: &[u8]) -> String {
    let mut socket = TcpStream::connect(("127.0.0.1", service.port)).unwrap();
    socket.set_read_timeout(Some(scaled(Duration::from_secs(15)))).unwrap();
    socket.write_all(bytes).unwrap();
    let mut said = Vec::new();
    match socket.read_to_end(&mut said) {
        // One that is closed with bytes unread is reset.
        Err(error) if error.kind() != std::io::ErrorKind::ConnectionReset => panic!("{error}: {}", String::from_utf8_lossy(&said)),
        _ => {}
    }
    String::from_utf8(said).unwrap()
}

fn statuses(said: &str) -> Vec<u16> {
    said.split("HTTP/1.1 ").skip(1).map(|answer| answer[..3].parse().unwrap()).collect()
}

test!(Both, what_two_could_read_as_different_requests_is_one_answer_and_the_end, seconds 60);
fn what_two_could_read_as_different_requests_is_one_answer_and_the_end() {
    let service = Service::new();
    let host = format!("Host: localhost:{}", service.port);
    let usual = format!("{host}\r\nAuthorization: Bearer {}\r\nContent-Type: application/json", service.token);
    let code = json!({"code": "echo ran", "language": "sh"}).to_string();
    let length = code.len();
    let chunked = format!("{length:x}\r\n{code}\r\n0\r\n\r\n");
    let smuggled = format!("GET /v1/limits HTTP/1.1\r\n{usual}\r\nConnection: close\r\n\r\n");
    let ask = |head: &str, body: &str| {
        let said = answers(&service, format!("{head}\r\n\r\n{body}{smuggled}").as_bytes());
        (statuses(&said), said)
    };
    let post = |fields: &str| format!("POST /v1/run HTTP/1.1\r\n{usual}\r\n{fields}");
    // The controls: what stands behind a whole request is the next one.
    for (fields, body) in [(format!("Content-Length: {length}"), &code), (String::from("Transfer-Encoding: chunked"), &chunked)] {
        let (statuses, said) = ask(&post(&fields), body);
        assert!(statuses == [200, 200] && said.contains("ran\\n") && said.contains("\"scopes\""), "{fields}: {said}");
    }
    let shorter = length - 4;
    for (head, body, status) in [
        (post(&format!("Content-Length: {length}\r\nContent-Length: {shorter}")), &code, 400),
        (post(&format!("Content-Length: {length}, {shorter}")), &code, 400),
        (post(&format!("Content-Length: +{length}")), &code, 400),
        (post(&format!("Content-Length: 0x{length:x}")), &code, 400),
        (post("Content-Length: -1"), &code, 400),
        (post("Content-Length: 99999999999999999999999"), &code, 400),
        (post("Content-Length: "), &code, 400),
        (post(&format!("Content-Length : {length}")), &code, 400),
        (post(&format!("X-Long: a\r\n b\r\nContent-Length: {length}")), &code, 400),
        (post(&format!("X-Nul: a\0b\r\nContent-Length: {length}")), &code, 400),
        (post(&format!("X-Cr: a\rb\r\nContent-Length: {length}")), &code, 400),
        (post("Transfer-Encoding: gzip"), &chunked, 400),
        (post("Transfer-Encoding: chunked, identity"), &chunked, 400),
        (post("Transfer-Encoding: xchunked"), &chunked, 400),
        (post("Transfer-Encoding: \u{b}chunked"), &chunked, 400),
        (post("Transfer-Encoding: chunked").replace("HTTP/1.1", "HTTP/1.0"), &chunked, 400),
        (post("Transfer-Encoding: chunked"), &format!("+{chunked}"), 400),
        (post("Transfer-Encoding: chunked"), &format!("0x{chunked}"), 400),
        (post("Transfer-Encoding: chunked"), &format!("fffffffffffffffff{chunked}"), 400),
        (post("Transfer-Encoding: chunked"), &chunked.replace("}\r\n0", "}xx0"), 400),
        (format!("POST /v1/../v1/run HTTP/1.1\r\n{usual}\r\nContent-Length: {length}"), &code, 400),
        (format!("POST  /v1/run HTTP/1.1\r\n{usual}\r\nContent-Length: {length}"), &code, 400),
        (format!("POST /v1/run HTTP/1.1 \r\n{usual}\r\nContent-Length: {length}"), &code, 400),
    ] {
        let (statuses, said) = ask(&head, body);
        assert!(statuses == [status] && !said.contains("ran\\n"), "{head}: {said}");
    }
    // Both lengths: the chunks count, and nothing behind them.
    for fields in ["Content-Length: 4\r\nTransfer-Encoding: chunked", "Transfer-Encoding: chunked\r\nContent-Length: 4"] {
        let (statuses, said) = ask(&post(fields), &chunked);
        assert!(statuses == [200] && said.contains("ran\\n"), "{fields}: {said}");
    }
    service.end();
}

test!(Both, another_host_or_origin_is_answered_so_in_each_form);
fn another_host_or_origin_is_answered_so_in_each_form() {
    let service = Service::new();
    let port = service.port;
    let get = |target: &str, fields: &str| {
        let said = answers(&service, format!("GET {target} HTTP/1.1\r\n{fields}Connection: close\r\n\r\n").as_bytes());
        let reason = said.split_once("\"reason\":\"").and_then(|(_, rest)| rest.split('"').next()).unwrap_or_default().to_owned();
        (statuses(&said), reason)
    };
    let own = format!("Host: localhost:{port}\r\n");
    for (target, fields, status, reason) in [
        ("/live", own.clone(), 200, ""),
        ("/live", own.to_uppercase(), 200, ""),
        ("/live", format!("{own}Origin: http://127.0.0.1:{port}\r\n"), 200, ""),
        (&*format!("http://localhost:{port}/live"), own.clone(), 200, ""),
        ("/live", String::new(), 421, "host_unknown"),
        ("/live", String::from("Host: evil.example\r\n"), 421, "host_unknown"),
        ("/live", format!("Host: evil.example:{port}\r\n"), 421, "host_unknown"),
        ("/live", format!("Host: localhost:{port}.evil.example\r\n"), 421, "host_unknown"),
        ("/live", format!("Host: localhost.:{port}\r\n"), 421, "host_unknown"),
        ("/live", String::from("Host: localhost:1\r\n"), 421, "host_unknown"),
        ("/live", format!("{own}{own}"), 421, "host_unknown"),
        // The target's host counts before the field (RFC 9112, 3.2.2).
        (&format!("http://evil.example:{port}/live"), own.clone(), 421, "host_unknown"),
        ("/live", format!("{own}Origin: http://evil.example\r\n"), 403, "origin_refused"),
        ("/live", format!("{own}Origin: null\r\n"), 403, "origin_refused"),
        ("/live", format!("{own}Origin: file://localhost:{port}\r\n"), 403, "origin_refused"),
        ("/live", format!("{own}Origin: http://localhost:{port}.evil.example\r\n"), 403, "origin_refused"),
        ("/live", format!("{own}Origin: http://localhost:{port}\r\nOrigin: http://evil.example\r\n"), 403, "origin_refused"),
    ] {
        assert_eq!(get(target, &fields), (vec![status], reason.to_owned()), "{target} {fields}");
    }
    service.end();
}
