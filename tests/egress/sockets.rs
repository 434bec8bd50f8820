//! Sockets behave as on an open network: connect succeeds exactly if the peer was reached,
//! and what the peer does is what the program sees.

use std::time::Duration;

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::json;

use crate::{egress::testbed::Testbed, egress::testbed::syn, support::runner::test};

test!(Both, a_peer_that_refuses_is_seen_to_refuse, seconds 90);
fn a_peer_that_refuses_is_seen_to_refuse() {
    let mut testbed = Testbed::new();
    let script = "for to in ('10.0.5.7', '2001:db8:5::7'):
    begin = time.time(); say(attempt(to, 81), time.time() - begin < .1)";
    let ran = testbed.run(&["10.0.5.7:81", "[2001:db8:5::7]:81"], script);
    assert_eq!(ran.output, "ECONNREFUSED True\nECONNREFUSED True\n");
    // It was asked: this is no denial.
    assert_eq!(testbed.packets(), [syn("10.0.5.7", 81), syn("2001:db8:5::7", 81)]);
    assert_eq!((&ran.egress["failed"][0]["error"], &ran.egress["denied"]), (&json!("ECONNREFUSED"), &json!([])));
}

test!(Both, a_network_that_has_no_way_is_seen_so, seconds 90);
fn a_network_that_has_no_way_is_seen_so() {
    let mut testbed = Testbed::new();
    // By a router's word, and by the host's own routes.
    let script = "say(attempt('203.0.113.77', 80, 9), attempt('203.0.113.88', 80, 9))";
    let ran = testbed.run(&["203.0.113.0/24:80"], script);
    assert_eq!(ran.output, "EHOSTUNREACH EHOSTUNREACH\n");
    assert_eq!(ran.egress["failed"][0]["error"], "EHOSTUNREACH");
}

test!(Both, a_peer_that_does_not_answer_is_waited_for, seconds 90);
fn a_peer_that_does_not_answer_is_waited_for() {
    let mut testbed = Testbed::new();
    testbed.listen("echo", &[80]);
    let script = "say(attempt('203.0.113.66', 80, 2.5)); say(attempt('203.0.113.5', 80))";
    let ran = testbed.run(&["203.0.113.0/24:80"], script);
    assert_eq!(ran.output, "hang\nconnected\n");
    // The gate's own kernel repeats its SYN; the sandbox's repeats made no second dial.
    let dialled = testbed.packets().iter().filter(|packet| **packet == syn("203.0.113.66", 80)).count();
    assert!((2..=4).contains(&dialled), "{dialled}");
}

test!(Both, a_peer_that_has_not_answered_is_listed_when_the_program_gives_up, seconds 90);
fn a_peer_that_has_not_answered_is_listed_when_the_program_gives_up() {
    let mut testbed = Testbed::new();
    testbed.listen("echo", &[80]);
    testbed.remote(json!({"op": "wake", "address": "203.0.113.67", "after": 2}));
    // Given up early; answered late; under way when the run ends.
    let script = "say(attempt('203.0.113.66', 80, .5), attempt('203.0.113.67', 80, 9), attempt('203.0.113.5', 80)); time.sleep(3)
s = socket.socket(); s.setblocking(False); s.connect_ex(('203.0.113.68', 80)); time.sleep(.2)";
    let ran = testbed.run(&["203.0.113.0/24:80"], script);
    assert_eq!(ran.output, "hang connected connected\n", "{ran:?}");
    let failed: Vec<_> = ran.egress["failed"].as_array().unwrap().iter().map(|failed| (&failed["addr"], &failed["error"])).collect();
    assert_eq!(failed, [(&json!("203.0.113.66"), &json!("ETIMEDOUT")), (&json!("203.0.113.68"), &json!("ETIMEDOUT"))], "{ran:?}");
}

test!(Both, further_addresses_are_tried_while_two_are_silent, seconds 90);
fn further_addresses_are_tried_while_two_are_silent() {
    let mut testbed = Testbed::new();
    testbed.listen("echo", &[80]);
    testbed.zone(json!({"many.internal": {"a": [["203.0.113.66", "203.0.113.67", "203.0.113.68", "203.0.113.5"]]}}));
    let script = "begin = time.time(); say(echo('many.internal', 80, b'GET / HTTP/1.1\\r\\nHost: many.internal\\r\\n\\r\\n', 20)[:3], time.time() - begin < 6)";
    let ran = testbed.run(&["many.internal:80", "203.0.113.0/24:80"], script);
    assert_eq!(ran.output, "b'GET' True\n", "{ran:?}");
    assert_eq!(ran.egress["allowed"][0]["addr"], "203.0.113.5", "{ran:?}");
}

test!(Both, a_peer_that_answers_late_is_reached, seconds 90);
fn a_peer_that_answers_late_is_reached() {
    let mut testbed = Testbed::new();
    testbed.listen("echo", &[80]);
    testbed.remote(json!({"op": "wake", "address": "203.0.113.66", "after": 2}));
    let script = "begin = time.time(); say(echo('203.0.113.66', 80, timeout=9), time.time() - begin > 1.5)";
    let ran = testbed.run(&["203.0.113.66:80"], script);
    assert_eq!(ran.output, "b'ping' True\n", "{ran:?}");
    assert_eq!(ran.egress["allowed"][0]["connections"], 1, "the repeated SYNs were one connection");
}

test!(Both, a_syn_that_is_read_after_its_connection_was_accepted_dials_no_second_one, seconds 90);
fn a_syn_that_is_read_after_its_connection_was_accepted_dials_no_second_one() {
    let mut testbed = Testbed::new();
    testbed.listen("echo", &[80]);
    testbed.remote(json!({"op": "wake", "address": "203.0.113.66", "after": 2}));
    // While the gate stands still the peer answers, and the program sends its SYN two more times.
    let ran = testbed.run_watched(&["203.0.113.66:80"], "say(echo('203.0.113.66', 80, timeout=20)); time.sleep(1)", |running| {
        let send = |signal| kill(Pid::from_raw(running.gate), signal).unwrap();
        std::thread::sleep(Duration::from_secs(1));
        send(Signal::SIGSTOP);
        std::thread::sleep(Duration::from_secs(4));
        send(Signal::SIGCONT);
    });
    assert_eq!(ran.output, "b'ping'\n", "{ran:?}");
    assert_eq!((&ran.egress["allowed"][0]["connections"], &ran.egress["failed"]), (&json!(1), &json!([])), "{ran:?}");
}

test!(Both, a_connect_that_does_not_block_learns_its_outcome, seconds 90);
fn a_connect_that_does_not_block_learns_its_outcome() {
    let mut testbed = Testbed::new();
    testbed.listen("echo", &[80]);
    let script = "for port in (80, 81, 82):
    s = socket.socket(); s.setblocking(False); poll = select.epoll(); poll.register(s, select.EPOLLOUT)
    begun = s.connect_ex(('10.0.5.7', port)); events = poll.poll(5)
    say(errno.errorcode[begun], len(events), errno.errorcode.get(s.getsockopt(1, 4), 0))";
    let ran = testbed.run(&["10.0.5.7:80-81"], script);
    assert_eq!(ran.output, "EINPROGRESS 1 0\nEINPROGRESS 1 ECONNREFUSED\nEINPROGRESS 1 ECONNREFUSED\n");
}

test!(Both, the_end_of_one_direction_leaves_the_other_open, seconds 90);
fn the_end_of_one_direction_leaves_the_other_open() {
    let mut testbed = Testbed::new();
    testbed.listen("sink", &[80]);
    let script = "s = dial('10.0.5.7', 80); s.sendall(b'x' * 1000); s.shutdown(socket.SHUT_WR); say(s.recv(100).split()[0], s.recv(9))";
    assert_eq!(testbed.run(&["10.0.5.7:80"], script).output, "b'1000' b''\n");
}

test!(Both, a_reset_is_handed_on_both_ways, seconds 90);
fn a_reset_is_handed_on_both_ways() {
    let mut testbed = Testbed::new();
    testbed.listen("reset", &[80]);
    testbed.listen("mute", &[81]);
    let script = "s = dial('10.0.5.7', 80); s.sendall(b'x')
try: s.recv(9); say('no reset')
except OSError as error: say(word(error))
s = dial('10.0.5.7', 81); s.sendall(b'y'); time.sleep(.1); s.setsockopt(1, 13, struct.pack('ii', 1, 0)); s.close(); time.sleep(.1)";
    let ran = testbed.run(&["10.0.5.7:80-81"], script);
    assert_eq!(ran.output, "ECONNRESET\n");
    assert_eq!(testbed.heard(81), ["y<104>"]);
}

test!(Both, a_peer_may_speak_first, seconds 90);
fn a_peer_may_speak_first() {
    let mut testbed = Testbed::new();
    testbed.listen("banner", &[25]);
    testbed.zone(json!({"mail.internal": {"a": [["10.0.5.7"]]}}));
    // Even where the program's first bytes are still to be judged.
    let script = "say(dial('10.0.5.7', 25).recv(99), dial('mail.internal', 25).recv(99))";
    let ran = testbed.run(&["10.0.5.7:25", "mail.internal:25"], script);
    assert_eq!(ran.output, "b'220 ready\\r\\n' b'220 ready\\r\\n'\n", "{ran:?}");
}

test!(Both, a_peer_that_speaks_first_does_not_wait_for_its_acknowledgement, seconds 90);
fn a_peer_that_speaks_first_does_not_wait_for_its_acknowledgement() {
    let mut testbed = Testbed::new();
    testbed.listen("banner", &[25]);
    // The kernel would acknowledge the handshake by itself, a fifth of a second later. The
    // shortest of some, since on a busy host each may take long.
    let script = "def first(port, *before):
    begin = time.monotonic(); s = socket.socket()
    for option in before: s.setsockopt(6, *option)
    s.connect(('10.0.5.7', port)); s.recv(99); return time.monotonic() - begin
say(min(first(25) for _ in range(8)) < .1)
";
    let ran = testbed.run(&["10.0.5.7:25"], script);
    assert_eq!(ran.output, "True\n", "{ran:?}");
    let control = testbed.outside(&format!("{script}say(min(first(25, (12, 0)) for _ in range(3)) < .1)"));
    assert_eq!(control, "True\nFalse\n", "the control: an acknowledgement for no packet");
}

test!(Both, a_gigabyte_each_way_arrives_whole, seconds 90);
fn a_gigabyte_each_way_arrives_whole() {
    let mut testbed = Testbed::new();
    testbed.listen("sink", &[80]);
    testbed.listen("source", &[81]);
    let script = "size, block, digest = 1 << 30, os.urandom(1 << 20), hashlib.sha256()
s = dial('10.0.5.7', 80, 60)
for _ in range(size >> 20): s.sendall(block); digest.update(block)
s.shutdown(socket.SHUT_WR); say(s.recv(200).decode() == '%d %s' % (size, digest.hexdigest()))
s = dial('10.0.5.7', 81, 60); s.sendall(b'%d' % size); digest, got = hashlib.sha256(), 0
while True:
    data = s.recv(1 << 18)
    if not data: break
    digest.update(data); got += len(data)
say(got == size, digest.hexdigest())";
    let ran = testbed.run(&["10.0.5.7:80-81"], script);
    let output: Vec<&str> = ran.output.split_whitespace().collect();
    assert_eq!(output[..2], ["True", "True"]);
    assert_eq!(testbed.heard(81), output[2..]);
    assert_eq!(ran.egress["allowed"][0]["bytes_out"], 1u64 << 30);
    assert_eq!(ran.egress["allowed"][1]["bytes_in"], 1u64 << 30);
}

test!(Both, two_hundred_connections_at_once_are_all_served, seconds 90);
fn two_hundred_connections_at_once_are_all_served() {
    let mut testbed = Testbed::new();
    testbed.listen("echo", &[80]);
    testbed.zone(json!({"api.internal": {"a": [["10.0.5.7"]]}}));
    let script = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
address = socket.getaddrinfo('api.internal', 80)[0][4][0]
for to in ('10.0.5.7', address):
    begin, sockets, poll = time.time(), {}, select.epoll()
    for number in range(200):
        s = socket.socket(); s.setblocking(False); s.connect_ex((to, 80)); sockets[s.fileno()] = s; poll.register(s, select.EPOLLOUT)
    open = set()
    while len(open) < 200 and time.time() - begin < 20:
        for number, _ in poll.poll(1):
            poll.unregister(number)
            if sockets[number].getsockopt(1, 4) == 0: open.add(number)
    for number in open: sockets[number].setblocking(True); sockets[number].sendall(b'GET / HTTP/1.1\\r\\nHost: api.internal\\r\\n\\r\\n')
    say(len(open), sum(sockets[number].recv(99)[:3] == b'GET' for number in open))
    sys.stderr.write('200 connections in %d ms\\n' % ((time.time() - begin) * 1000))";
    let ran = testbed.run(&["10.0.5.7:80", "api.internal:80"], script);
    assert_eq!(ran.output, "200 200\n200 200\n", "{ran:?}");
    assert_eq!(ran.egress["allowed"][0]["connections"], 200);
}

test!(Both, a_slow_reader_slows_its_writer, seconds 90);
fn a_slow_reader_slows_its_writer() {
    let mut testbed = Testbed::new();
    testbed.listen("source", &[81]);
    let script = "s = dial('10.0.5.7', 81); s.sendall(b'%d' % (1 << 28)); time.sleep(.5); got = 0
while True:
    data = s.recv(1 << 20)
    if not data: break
    got += len(data)
say(got == 1 << 28)";
    let mut peak = 0;
    let ran = testbed.run_watched(&["10.0.5.7:81"], script, |running| {
        std::thread::sleep(std::time::Duration::from_millis(400));
        peak = crate::egress::gate::resident_kib(running.gate);
    });
    assert_eq!(ran.output, "True\n");
    // A debug build of the whole suite; the shipped program's gate is measured by bench.
    assert!(peak < 64 << 10, "{peak} KiB");
}

test!(Both, what_was_said_last_is_delivered, seconds 90);
fn what_was_said_last_is_delivered() {
    let mut testbed = Testbed::new();
    testbed.listen("mute", &[80]);
    for _ in 0..5 {
        testbed.clear();
        let _ran = testbed.run(&["10.0.5.7:80"], "s = dial('10.0.5.7', 80); s.sendall(b'x' * 100000); os._exit(0)");
        let heard = |testbed: &mut Testbed| testbed.heard(80).iter().map(String::len).sum::<usize>();
        // The peer's own program may still be reading.
        let all = (0..100).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(10));
            heard(&mut testbed) == 100_000
        });
        assert!(all, "{}", heard(&mut testbed));
    }
}

test!(Both, programs_of_the_sandbox_reach_each_other, seconds 90);
fn programs_of_the_sandbox_reach_each_other() {
    let mut testbed = Testbed::new();
    let script = "for family, address in ((socket.AF_INET, '127.0.0.1'), (socket.AF_INET6, '::1')):
    server = socket.socket(family); server.bind((address, 8443)); server.listen()
    say(attempt(address, 8443))
u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.bind(('127.0.0.1', 9999)); u.sendto(b'x', ('127.0.0.1', 9999)); say(u.recv(9))";
    assert_eq!(testbed.run(&["10.0.5.0/24:8443"], script).output, "connected\nconnected\nb'x'\n");
    assert_eq!(testbed.packets(), []);
}

test!(Both, multipath_fast_open_and_reconnecting_sockets_obey, seconds 90);
fn multipath_fast_open_and_reconnecting_sockets_obey() {
    let mut testbed = Testbed::new();
    testbed.listen("echo", &[443]);
    let script = "def multipath(to):
    try: s = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262); s.settimeout(3); s.connect((to, 443)); s.sendall(b'm'); return s.recv(9)
    except OSError as error: return word(error)
def fast(to):
    s = socket.socket(); s.settimeout(3); s.setsockopt(6, 34, 1)
    try: s.sendto(b'f' * 900, 0x20000000, (to, 443)); return len(s.recv(9999))
    except OSError as error: return word(error)
def again(to):
    s = socket.socket(); s.settimeout(3); s.connect(('10.0.5.7', 443)); libc.connect(s.fileno(), bytes(16), 16)
    try: s.connect((to, 443)); return 'connected'
    except OSError as error: return word(error)
for to in ('10.0.5.7', '10.0.6.7'): say(multipath(to), fast(to), again(to))";
    // The filter lets no socket of many paths be made; without it, it obeys like the rest.
    let ran = testbed.run(&["10.0.5.7:443"], script);
    assert_eq!(ran.output, "EPERM 900 connected\nEPERM ECONNREFUSED ECONNREFUSED\n", "{ran:?}");
    let ran = testbed.run_bare(&["10.0.5.7:443"], script);
    assert_eq!(ran.output, "b'm' 900 connected\nECONNREFUSED ECONNREFUSED ECONNREFUSED\n", "{ran:?}");
    assert!(testbed.packets().iter().all(|packet| *packet == syn("10.0.5.7", 443)));
}
