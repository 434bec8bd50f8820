//! Roads that pass a whitelist by elsewhere: resolvers over TLS and HTTPS, QUIC, pings, a
//! socket family that no network namespace holds. For each the same probe arrives where the
//! rule is there, or outside the sandbox.

use std::{
    io::{BufRead, BufReader, Read},
    process::{Child, Command, Stdio},
};

use serde_json::json;

use crate::{egress::testbed::Testbed, egress::testbed::denials, egress::testbed::syn, support::runner::test};

test!(Both, resolvers_over_tls_are_not_reached, seconds 90);
fn resolvers_over_tls_are_not_reached() {
    let mut testbed = Testbed::new();
    testbed.listen("mute", &[853]);
    let script = "for to in ('9.9.9.9', '1.1.1.1', '2620:fe::fe', '198.19.255.253', '10.0.5.7'):
    try:
        s = dial(to, 853); s.sendall(hello('dns.example')); time.sleep(.1); say('told')
    except OSError as error: say(word(error))";
    let ran = testbed.run(&["api.internal:443", "10.0.5.0/24:443"], script);
    assert_eq!(ran.output, "ECONNREFUSED\n".repeat(5), "{ran:?}");
    assert_eq!((testbed.packets(), testbed.heard(853).len()), (vec![], 0));
    assert_eq!(denials(&ran)[0], "connect 9.9.9.9 853 no_rule");
    assert_eq!(ran.egress["denied"][0]["allow"], "9.9.9.9:853");
    // The control: each rule opens the way that its denial names.
    let ran = testbed.run(&["9.9.9.9:853", "1.1.1.1:853", "[2620:fe::fe]:853", "10.0.5.7:853"], script);
    assert_eq!(ran.output, "told\ntold\ntold\nECONNREFUSED\ntold\n", "{ran:?}");
    assert_eq!(testbed.packets(), [syn("9.9.9.9", 853), syn("1.1.1.1", 853), syn("2620:fe::fe", 853), syn("10.0.5.7", 853)]);
    assert!(testbed.heard(853).iter().all(|heard| heard.contains("dns.example")));
}

test!(Both, resolvers_over_https_are_not_reached, seconds 90);
fn resolvers_over_https_are_not_reached() {
    let mut testbed = Testbed::new();
    testbed.listen("mute", &[443, 80]);
    let here = json!({"a": [["203.0.113.53"]]});
    testbed.zone(json!({"dns.example": here, "shop.example": here}));
    // By name, by address, and behind an allowed name that is on the same server.
    let script = "query = b'/dns-query?dns=AAABAAABAAAAAAAAA3d3dwdleGFtcGxlA2NvbQAAAQAB'
def tell(to, port, *said):
    try:
        s = dial(to, port)
        for part in said: s.sendall(part); time.sleep(.02)
        s.settimeout(.2); return s.recv(9)
    except OSError as error: return word(error)
say(tell('dns.example', 443, hello('dns.example')), tell('8.8.8.8', 443, hello('dns.example')), tell('203.0.113.53', 443, hello('dns.example')))
say(tell('shop.example', 443, hello('dns.example')))
say(tell('shop.example', 80, b'GET ' + query + b' HTTP/1.1\\r\\nHost: dns.example\\r\\n\\r\\n'))
say(tell('shop.example', 80, b'GET http://dns.example' + query + b' HTTP/1.1\\r\\nHost: shop.example\\r\\n\\r\\n'))";
    let ran = testbed.run(&["shop.example:443,80"], script);
    assert_eq!(ran.output, "EAI_-2 ECONNREFUSED ECONNREFUSED\nECONNRESET\nECONNRESET\nECONNRESET\n", "{ran:?}");
    assert!(testbed.packets_but_dns().iter().all(|(_, to, _)| to == "203.0.113.53"), "{:?}", testbed.packets());
    for port in [443, 80] {
        assert!(testbed.heard(port).iter().all(|heard| heard == "<104>"), "a byte arrived: {:?}", testbed.heard(port));
    }
    let denied = denials(&ran);
    for expected in ["dns dns.example no_rule", "connect 8.8.8.8 443 no_rule", "tls shop.example 203.0.113.53 443 sni_mismatch"] {
        assert!(denied.iter().any(|denied| denied == expected), "{expected}: {denied:?}");
    }
    // The control: with rules for it the resolver is told the same.
    testbed.clear();
    let ran = testbed.run(&["dns.example:443", "8.8.8.8:443"], script);
    assert!(ran.output.starts_with("hang hang ECONNREFUSED\n"), "{ran:?}");
    assert_eq!(testbed.packets_but_dns(), [syn("203.0.113.53", 443), syn("8.8.8.8", 443)]);
    assert!(testbed.heard(443).iter().all(|heard| heard.contains("dns.example")));
}

test!(Both, quic_does_not_leave, seconds 90);
fn quic_does_not_leave() {
    let mut testbed = Testbed::new();
    testbed.zone(json!({"api.internal": {"a": [["10.0.5.7"]]}}));
    // As a QUIC client begins: 1200 bytes with a long header, by each call that sends.
    let script = "first = bytes([0xc0, 0, 0, 0, 1]) + bytes(1195)
def probe(family, to):
    said = []
    for way in ('connect', 'sendto', 'sendmsg'):
        s = socket.socket(family, socket.SOCK_DGRAM); s.settimeout(.5)
        try:
            if way != 'sendto': s.connect((to, 443))
            if way == 'sendto': s.sendto(first, (to, 443)); s.sendto(first, (to, 443))
            else: s.sendmsg([first])
            said.append(s.recv(9))
        except OSError as error: said.append(word(error))
    return said
targets = [(2, '10.0.5.7'), (10, '2001:db8:5::7'), (10, '::ffff:10.0.5.7')]
for target in targets: say(*probe(*target))";
    let inside = format!("{script}\nsay(*probe(2, socket.gethostbyname('api.internal')))");
    let rules = ["10.0.5.0/24:443", "[2001:db8:5::/64]:443", "api.internal:443"];
    let ran = testbed.run(&rules, &inside);
    assert_eq!(ran.output.lines().count(), 4, "{ran:?}");
    // Refused at once; an unconnected socket has no peer to notify.
    assert!(ran.output.lines().all(|line| line == "ECONNREFUSED hang ECONNREFUSED"), "{ran:?}");
    assert_eq!(testbed.packets(), []);
    assert!(denials(&ran).contains(&String::from("udp 10.0.5.7 443 protocol_unsupported")), "{ran:?}");
    // The control: outside the sandbox the same probe arrives.
    let _answers = testbed.outside(script);
    let packets = testbed.packets();
    for to in ["10.0.5.7", "2001:db8:5::7"] {
        assert!(packets.contains(&(17, String::from(to), 443)), "{packets:?}");
    }
}

test!(Both, pings_do_not_leave, seconds 90);
fn pings_do_not_leave() {
    let mut testbed = Testbed::new();
    let script = "for family, protocol, kind, to in ((2, 1, 8, '10.0.5.7'), (10, 58, 128, '2001:db8:5::7')):
    try:
        s = socket.socket(family, socket.SOCK_DGRAM, protocol); s.settimeout(1)
        s.sendto(bytes([kind, 0, 0, 0, 0, 1, 0, 1]) + b'secret', (to, 0)); say('pong', len(s.recv(99)))
    except OSError as error: say(word(error))";
    let rules = ["10.0.5.0/24:443", "[2001:db8:5::/64]:443"];
    // With the filter, and without it.
    for ran in [testbed.run(&rules, script), testbed.run_bare(&rules, script)] {
        assert!(!ran.output.contains("pong") && ran.output.lines().count() == 2, "{ran:?}");
        assert_eq!(testbed.packets(), []);
    }
    // The control: outside the sandbox both are answered.
    assert_eq!(testbed.outside(script), "pong 14\npong 14\n");
    let packets = testbed.packets();
    assert!(packets.contains(&(1, String::from("10.0.5.7"), 0)) && packets.iter().any(|(protocol, ..)| *protocol == 58), "{packets:?}");
}

/// Accepts connections of a family until it is told to stop, and returns how many there were.
struct Listener(Child, BufReader<std::process::ChildStdout>);

impl Listener {
    fn of_virtual_machines(port: u32) -> Self {
        let script = "import socket, sys, threading
l = socket.socket(40, 1); l.bind((0xffffffff, int(sys.argv[1]))); l.listen(); came = []
def serve():
    while True: came.append(l.accept())
threading.Thread(target=serve, daemon=True).start()
print('up', flush=True); sys.stdin.read(); print(len(came), flush=True)";
        let mut child = Command::new("/usr/bin/python3")
            .args(["-c", script, &port.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("a listener");
        let mut said = BufReader::new(child.stdout.take().unwrap());
        let mut up = String::new();
        said.read_line(&mut up).unwrap();
        Listener(child, said)
    }

    fn count(mut self) -> Option<u32> {
        drop(self.0.stdin.take());
        let mut said = String::new();
        self.1.read_to_string(&mut said).unwrap();
        let _ended = self.0.wait();
        said.trim().parse().ok()
    }
}

test!(Both, virtual_machine_sockets_reach_no_listener_of_the_host, seconds 90);
fn virtual_machine_sockets_reach_no_listener_of_the_host() {
    let mut testbed = Testbed::new();
    // To this machine itself (VMADDR_CID_LOCAL): a stream and datagrams.
    // No namespace keeps the ports of two runs of this test apart.
    let port = 0x10000 + std::process::id();
    let script = format!(
        "for kind in (1, 2):
    try:
        s = socket.socket(40, kind); s.settimeout(1); s.connect((1, {port})); say('connected')
    except OSError as error: say(word(error))"
    );
    let mut arrived = |run: &mut dyn FnMut(&mut Testbed) -> String| {
        let listener = Listener::of_virtual_machines(port);
        (run(&mut testbed), listener.count())
    };
    let inside = arrived(&mut |testbed| testbed.run(&["10.0.5.0/24:443"], &script).output);
    let (outside, at_listener) = arrived(&mut |testbed| testbed.outside(&script));
    let (bare, from_bare) = arrived(&mut |testbed| testbed.run_bare(&["10.0.5.0/24:443"], &script).output);
    if outside.starts_with("EAFNOSUPPORT") {
        // A kernel without the family: nothing can be made anywhere.
        return assert!(inside.0.lines().all(|word| word == "EPERM" || word == "EAFNOSUPPORT"), "{inside:?}");
    }
    assert_eq!(inside, (String::from("EPERM\nEPERM\n"), Some(0)), "the filter's answer, and no connection came");
    // The control: what the filter forbids is there without it, namespace or not, and leads
    // as far as it does outside: to the listener, where the host has the loopback of it.
    assert!(!bare.starts_with("EPERM") && !bare.starts_with("EAFNOSUPPORT"), "{bare}");
    assert_eq!(outside.starts_with("connected"), at_listener == Some(1), "{outside}");
    if bare.starts_with("connected") {
        assert_eq!(from_bare, Some(1));
    }
}
