//! The gate as a target: what code may try to stop it, to fill it, or to have it work for
//! nothing at the expense of others. Each time the gate serves on, and stays small.

use serde_json::json;

use crate::{
    egress::gate::resident_kib, egress::testbed::ALERT, egress::testbed::Testbed, egress::testbed::denials, egress::testbed::syn,
    support::runner::test,
};

test!(Both, the_gate_cannot_be_signalled_from_inside, seconds 90);
fn the_gate_cannot_be_signalled_from_inside() {
    let mut testbed = Testbed::new();
    testbed.listen("echo", &[443]);
    // All that there is, every number that the gate may have, and the owner of a socket.
    let script = "import fcntl, signal
time.sleep(.5)
hit = 0
for pid in range(2, 1 << 17):
    if pid != os.getpid():
        try: os.kill(pid, signal.SIGKILL); hit += 1
        except OSError: pass
try: os.kill(-1, signal.SIGKILL); hit += 1
except OSError as error: say(word(error))
s = socket.socket()
try: fcntl.fcntl(s, fcntl.F_SETOWN, GATE); hit += 1
except OSError as error: say(word(error))
say(hit, attempt('10.0.5.7', 443))";
    let policy = testbed.policy(&["10.0.5.7:443"]);
    let mut alive = false;
    let script = script.replace("GATE", "131071");
    let ran = testbed.run_under(&policy, &script, |running| {
        std::thread::sleep(std::time::Duration::from_millis(200));
        // The control: from out here it can be.
        alive = nix::sys::signal::kill(nix::unistd::Pid::from_raw(running.gate), None).is_ok();
    });
    assert!(alive);
    assert_eq!(ran.output, "ESRCH\nESRCH\n0 connected\n", "{ran:?}");
    assert_eq!(testbed.packets(), [syn("10.0.5.7", 443)]);
}

test!(Both, a_busy_connection_leaves_turns_to_others, seconds 90);
fn a_busy_connection_leaves_turns_to_others() {
    let mut testbed = Testbed::new();
    testbed.listen("source", &[81]);
    testbed.listen("echo", &[80]);
    let script = "readers = []
for _ in range(2):
    pid = os.fork()
    if pid == 0:
        s = dial('10.0.5.7', 81); s.sendall(b'%d' % (1 << 40)); room = bytearray(1 << 20)
        while s.recv_into(room): pass
    readers.append(pid)
time.sleep(6)
s = dial('10.0.5.7', 80); s.setsockopt(6, 1, 1); trips = []
for _ in range(30):
    begin = time.time(); s.sendall(b'x'); s.recv(1); trips.append(time.time() - begin)
for pid in readers: os.kill(pid, 9)
trips.sort()
sys.stderr.write('round trip beside two busy connections: %.1f ms\\n' % (trips[15] * 1000))
say(trips[15] < .2)";
    assert_eq!(testbed.run(&["10.0.5.7:80-81"], script).output, "True\n");
}

test!(Both, data_in_held_packets_is_not_kept, seconds 90);
fn data_in_held_packets_is_not_kept() {
    let mut testbed = Testbed::new();
    testbed.listen("echo", &[80]);
    // Fast open to a peer that does not answer, each with as much as fits.
    let script = "held = []
for number in range(400):
    s = socket.socket(); s.setblocking(False); s.setsockopt(6, 34, 1)
    try: s.sendto(b'x' * 60000, 0x20000000, ('203.0.113.66', 80))
    except BlockingIOError: pass
    held.append(s)
time.sleep(.5)
s = socket.socket(); s.settimeout(5); s.setsockopt(6, 34, 1); s.sendto(b'y' * 9000, 0x20000000, ('10.0.5.7', 80)); got = b''
while len(got) < 9000: got += s.recv(9000)
say(got == b'y' * 9000); time.sleep(.5)";
    let mut peak = 0;
    let ran = testbed.run_watched(&["203.0.113.66:80", "10.0.5.7:80"], script, |running| {
        let end = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while std::time::Instant::now() < end {
            match resident_kib(running.gate) {
                0 => break,
                now => peak = peak.max(now),
            }
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    });
    assert_eq!(ran.output, "True\n", "{ran:?}");
    // None was lost for want of room, and none was kept with its data.
    assert_eq!(ran.egress["audit_lost"], 0, "{ran:?}");
    // Four hundred of them would be 24 MB.
    assert!((1..16 << 10).contains(&peak), "{peak} KiB");
}

test!(Both, a_socket_in_the_way_of_a_released_packet_is_not_asked_again, seconds 90);
fn a_socket_in_the_way_of_a_released_packet_is_not_asked_again() {
    let mut testbed = Testbed::new();
    testbed.listen("echo", &[8443, 80]);
    // While the gate waits for the peer, a second socket takes both ends of the connection
    // that will be released: the listener cannot have it.
    let script = "a = socket.socket(); a.setblocking(False); a.bind(('198.19.255.254', 40000)); a.connect_ex(('203.0.113.66', 8443))
time.sleep(.3)
b = socket.socket(); b.setblocking(False); b.bind(('203.0.113.66', 8443)); say(errno.errorcode[b.connect_ex(('198.19.255.254', 40000))])
time.sleep(4); say(attempt('10.0.5.7', 80))";
    testbed.remote(json!({"op": "wake", "address": "203.0.113.66", "after": 2}));
    let ran = testbed.run(&["203.0.113.66:8443", "10.0.5.7:80"], script);
    assert_eq!(ran.output, "EINPROGRESS\nconnected\n", "{ran:?}");
    // It was released once: nothing went round until the kernel's rate had enough of it.
    assert_eq!(denials(&ran), Vec::<String>::new(), "{ran:?}");
    // The control: without a socket in the way it arrives.
    let ran = testbed.run(&["203.0.113.66:8443"], "say(attempt('203.0.113.66', 8443))");
    assert_eq!(ran.output, "connected\n", "{ran:?}");
}

test!(Both, connects_given_up_midway_are_forgotten, seconds 90);
fn connects_given_up_midway_are_forgotten() {
    let mut testbed = Testbed::new();
    testbed.listen("echo", &[80]);
    let script = "for _ in range(1500):
    s = socket.socket(); s.setblocking(False); s.connect_ex(('10.0.5.7', 80)); s.close()
begin = time.time(); said = ''
while said != 'connected' and time.time() - begin < 20: said = attempt('10.0.5.7', 80)
say(said)";
    assert_eq!(testbed.run(&["10.0.5.7:80"], script).output, "connected\n");
}

test!(Both, peers_that_never_answer_leave_places_for_others, seconds 90);
/// More connects to a silent peer than there are places, none of which is closed. Those that
/// have waited the longest give their places up, and are told so.
fn peers_that_never_answer_leave_places_for_others() {
    let mut testbed = Testbed::new();
    testbed.listen("echo", &[80]);
    let script = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (2048, 2048))
held = []
for _ in range(600):
    s = socket.socket(); s.setblocking(False); s.connect_ex(('203.0.113.66', 80)); held.append(s)
time.sleep(.5)
say([attempt('10.0.5.7', 80) for _ in range(5)])
told = [s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) for s in held]
say(88 <= told.count(errno.EHOSTUNREACH) <= 100, told.count(0) >= 500, told[-1])";
    let ran = testbed.run(&["203.0.113.66:80", "10.0.5.7:80"], script);
    assert_eq!(ran.output, format!("{:?}\nTrue True 0\n", ["connected"; 5]).replace('"', "'"), "{ran:?}");
    assert_eq!(denials(&ran), ["connect 203.0.113.66 80 limit"], "{ran:?}");
    let failed = &ran.egress["failed"][0];
    assert_eq!(
        (&failed["addr"], &failed["error"], &failed["count"]),
        (&json!("203.0.113.66"), &json!("ETIMEDOUT"), &json!(600)),
        "{ran:?}"
    );
}

/// Connects of the host to a port that no peer has answered so far.
fn under_way(port: u16) -> usize {
    let output = std::process::Command::new("ss")
        .args(["-tnH", "state", "syn-sent", "dport", "=", &format!(":{port}")])
        .env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin")
        .output()
        .expect("run ss");
    String::from_utf8_lossy(&output.stdout).lines().count()
}

test!(Both, a_connect_that_the_program_has_closed_is_not_dialled_on, seconds 90);
fn a_connect_that_the_program_has_closed_is_not_dialled_on() {
    let mut testbed = Testbed::new();
    let script = "held = []
for _ in range(100):
    s = socket.socket(); s.setblocking(False); s.connect_ex(('203.0.113.66', 80)); held.append(s)
time.sleep(1.5); CLOSE
time.sleep(6)";
    let mut counts = |close: &str| {
        let mut counts = Vec::new();
        testbed.run_watched(&["203.0.113.66:80"], &script.replace("CLOSE", close), |running| {
            let end = std::time::Instant::now() + std::time::Duration::from_secs(30);
            while std::time::Instant::now() < end {
                let count = under_way(80);
                if resident_kib(running.gate) == 0 {
                    break;
                }
                counts.push(count);
                std::thread::sleep(std::time::Duration::from_millis(100));
            }
        });
        // A gate that ends has closed them all: not the last samples.
        (counts.iter().max().copied(), counts.iter().rev().nth(3).copied())
    };
    assert_eq!(counts("del held, s"), (Some(100), Some(0)));
    assert_eq!(counts("pass"), (Some(100), Some(100)), "the control: the kernel sends the SYNs of open sockets again");
}

test!(Both, no_flood_of_refusals_hides_a_closed_address_or_silences_an_alert, seconds 90);
fn no_flood_of_refusals_hides_a_closed_address_or_silences_an_alert() {
    let mut testbed = Testbed::new();
    let script = |count: usize, last: &str| {
        format!(
            "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (2048, 2048))
for number in range({count}):
    s = socket.socket(); s.setblocking(False); s.connect_ex(('203.0.%d.%d' % (number // 250, number % 250), 80)); s.close()
{last}"
        )
    };
    let met = "say(attempt('169.254.169.254', 80))";
    // More than the list has room for.
    let ran = testbed.run_bare(&["10.0.5.7:80"], &script(400, ""));
    assert_eq!((ran.alerts.len(), &ran.egress["truncated"]), (0, &json!(true)), "the control: {ran:?}");
    let ran = testbed.run_bare(&["10.0.5.7:80"], &script(400, met));
    assert_eq!((ran.output.as_str(), &ran.alerts[..]), ("ECONNREFUSED\n", &[String::from(ALERT)][..]), "{ran:?}");
    assert!(denials(&ran).contains(&String::from("connect 169.254.169.254 80 no_rule")), "{ran:?}");
    let listed: u64 = ran.egress["denied"].as_array().unwrap().iter().map(|denied| denied["count"].as_u64().unwrap()).sum();
    assert_eq!(listed + ran.egress["omitted"].as_u64().unwrap(), 401, "{ran:?}");
    // Faster than the kernel reports: what it refused by itself may have been anything.
    let ran = testbed.run_bare(&["10.0.5.7:80"], &script(6000, met));
    assert_eq!((&ran.alerts[..], &ran.egress["truncated"]), (&[String::from(ALERT)][..], &json!(true)), "{ran:?}");
    assert_eq!(testbed.packets(), []);
}

test!(Both, datagrams_beyond_what_the_kernel_reports_are_admitted, seconds 90);
fn datagrams_beyond_what_the_kernel_reports_are_admitted() {
    let mut testbed = Testbed::new();
    let script = |count: usize| {
        format!(
            "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for number in range({count}):
    try: s.sendto(b'x', ('203.0.113.9', 9))
    except OSError: pass"
        )
    };
    let mut run = |count| testbed.run_bare(&["10.0.5.7:80"], &script(count));
    let (few, many) = (run(20), run(1000));
    assert_eq!((few.alerts.len(), &few.egress["truncated"]), (0, &json!(false)), "the control: {few:?}");
    assert_eq!((many.alerts.len(), &many.egress["truncated"]), (1, &json!(true)), "{many:?}");
}

test!(Both, clients_that_say_half_of_it_do_not_use_up_the_gate, seconds 90);
fn clients_that_say_half_of_it_do_not_use_up_the_gate() {
    let mut testbed = Testbed::new();
    testbed.listen("mute", &[8443]);
    testbed.zone(json!({"api.internal": {"a": [["10.0.5.7"]]}}));
    // As many as there are places, each with half a hello, byte by byte.
    let script = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (2048, 2048))
half, open = hello('api.internal')[:60], []
to = socket.gethostbyname('api.internal')
for _ in range(480):
    s = dial(to, 8443); s.sendall(half[:1]); open.append(s)
for byte in half[1:]:
    for s in open: s.send(bytes([byte]))
time.sleep(12); cut = 0
for s in open:
    s.settimeout(1)
    try: s.recv(1)
    except ConnectionResetError: cut += 1
    except TimeoutError: pass
say(cut, attempt(to, 8443))";
    let ran = testbed.run(&["api.internal:8443"], script);
    assert_eq!(ran.output, "480 connected\n", "{ran:?}");
    assert!(testbed.heard(8443).iter().all(|heard| heard.is_empty() || heard == "<104>"), "a byte arrived");
}

test!(Both, look_ups_are_bounded, seconds 90);
/// A name whose server fails is asked for anew by each connection; an answer would serve for
/// the next ones, too.
fn look_ups_are_bounded() {
    let mut testbed = Testbed::new();
    testbed.listen("echo", &[80]);
    testbed.zone(json!({"api.internal": {"a": [["10.0.5.7"]]}, "bad.internal": {"fails": true}}));
    let script = "to = (socket.gethostbyname('bad.internal'), 80); end = time.time() + 2
while time.time() < end:
    s = socket.socket(); s.setblocking(False); s.connect_ex(to); s.close(); time.sleep(.0005)
time.sleep(1.5); said = ''
end = time.time() + 8
while said != 'connected' and time.time() < end: said = attempt('api.internal', 80)
say(said)";
    let begin = std::time::Instant::now();
    let ran = testbed.run(&["api.internal:80", "bad.internal:80"], script);
    let seconds = begin.elapsed().as_secs() + 2;
    assert_eq!(ran.output, "connected\n", "{ran:?}");
    let asked = testbed.packets().iter().filter(|packet| **packet == (17, String::from("10.0.5.7"), 53)).count() as u64;
    // Both families, twice, five hundred a second.
    assert!(asked >= 200 && asked <= seconds.min(5) * 2000, "{asked} in {seconds} s");
    assert_eq!(ran.egress["failed"][0]["error"], "EAI_AGAIN", "{ran:?}");
}

test!(Both, circular_answers_do_no_harm, seconds 90);
fn circular_answers_do_no_harm() {
    let mut testbed = Testbed::new();
    testbed.listen("echo", &[80]);
    let good = json!({"a": [["10.0.5.7"]]});
    testbed.zone(json!({
        // An alias of itself; a name that points at itself; one that points behind the end.
        "circle.internal": {"cname": ["circle.internal"]},
        "self.internal": {"a": [["10.0.5.7"]], "owner": "c01f"},
        "behind.internal": {"a": [["10.0.5.7"]], "owner": "ffff"},
        "good.internal": good,
    }));
    let names = ["circle.internal", "self.internal", "behind.internal", "good.internal"];
    let rules: Vec<String> = names.iter().map(|name| format!("{name}:80")).collect();
    let rules: Vec<&str> = rules.iter().map(String::as_str).collect();
    let script = "for name in ('circle.internal', 'self.internal', 'behind.internal', 'good.internal'): say(name, attempt(name, 80, 20))";
    let ran = testbed.run(&rules, script);
    let failed = "EHOSTUNREACH";
    assert_eq!(
        ran.output,
        format!("circle.internal {failed}\nself.internal {failed}\nbehind.internal {failed}\ngood.internal connected\n"),
        "{ran:?}"
    );
    assert_eq!(testbed.packets_but_dns(), [syn("10.0.5.7", 80)]);
}

test!(Both, circular_names_do_no_harm, seconds 90);
fn circular_names_do_no_harm() {
    let mut testbed = Testbed::new();
    testbed.listen("echo", &[80]);
    testbed.zone(json!({"api.internal": {"a": [["10.0.5.7"]]}}));
    // A question whose name points at itself, at another pointer, and into the header.
    let script = "head = struct.pack('!HHHHHH', 7, 0x100, 1, 0, 0, 0)
for name in (b'\\xc0\\x0c', b'\\xc0\\x0e\\xc0\\x0c', b'\\x03api\\xc0\\x00', b'\\x3f' + b'a' * 63 + b'\\xc0\\x0c', b'\\x40' + b'a' * 64 + b'\\0'):
    asked = head + name + struct.pack('!HH', 1, 1)
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(2); s.connect(('8.8.8.8', 53)); s.send(asked)
    t = dial('8.8.8.8', 53); t.sendall(struct.pack('!H', len(asked)) + asked)
    say(s.recv(600)[3] & 15, t.recv(600)[5] & 15)
say(attempt('api.internal', 80))";
    let ran = testbed.run(&["api.internal:80"], script);
    assert_eq!(ran.output, format!("{}connected\n", "1 1\n".repeat(5)), "{ran:?}");
    assert_eq!(testbed.packets_but_dns(), [syn("10.0.5.7", 80)]);
}

test!(Both, an_urgent_byte_stays_in_its_place, seconds 90);
fn an_urgent_byte_stays_in_its_place() {
    let mut testbed = Testbed::new();
    testbed.listen("mute", &[80]);
    testbed.zone(json!({"api.internal": {"a": [["10.0.5.7"]]}}));
    // A reader that takes the X out of band sees the right host, and one that does not
    // another.
    let script = "def tell(*parts):
    s = dial('api.internal', 80)
    try:
        for part, flags in parts: s.send(part, flags); time.sleep(.05)
        s.settimeout(.3); return s.recv(9)
    except OSError as error: return word(error)
say(tell((b'GET / HTTP/1.1\\r\\nHost: X', socket.MSG_OOB), (b'api.internal\\r\\n\\r\\n', 0)))";
    let ran = testbed.run(&["api.internal:80"], script);
    assert!(ran.output == "ECONNRESET\n" || ran.output == "hang\n", "{ran:?}");
    assert!(testbed.heard(80).iter().all(|heard| !heard.contains("Host")), "{:?}", testbed.heard(80));
    // The control: where any bytes may pass, all of them arrive, in their order.
    testbed.clear();
    let _ran = testbed.run(&["api.internal:80/tcp"], script);
    assert!(testbed.heard(80)[0].starts_with("GET / HTTP/1.1\r\nHost: Xapi.internal\r\n\r\n"), "{:?}", testbed.heard(80));
}

/// What the kernel keeps for the host's own connections to a port, in bytes, and how many
/// there are.
fn kept(port: u16) -> (u64, usize) {
    let output = std::process::Command::new("ss")
        .args(["-tmnH", "dport", "=", &format!(":{port}")])
        .env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin")
        .output()
        .expect("run ss");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let of = |line: &str, key: &str| line.split(['(', ',', ')']).find_map(|word| word.strip_prefix(key)?.parse::<u64>().ok()).unwrap_or(0);
    let sockets: Vec<&str> = text.lines().filter(|line| line.contains("skmem:")).collect();
    // Received and not read, queued for sending.
    (sockets.iter().map(|line| of(line, "r") + of(line, "w")).sum(), sockets.len())
}

test!(Both, stalled_connections_hold_little_of_the_hosts_memory, seconds 90);
fn stalled_connections_hold_little_of_the_hosts_memory() {
    let mut testbed = Testbed::new();
    testbed.listen("source", &[81]);
    // Reads fast for a while, so that every buffer on the way grows, and then no more.
    let script = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (2048, 2048))
open = []
for _ in range(100):
    s = dial('10.0.5.7', 81); s.sendall(b'%d' % (1 << 30)); room = 1 << 20
    while room > 0: room -= len(s.recv(1 << 20))
    open.append(s)
say(len(open)); time.sleep(3)";
    let mut most = (0, 0);
    // On cgroup v1 a tenth of it holds the buffers of the run, which stop every connection when full.
    let policy = testbed.policy_with(&["10.0.5.7:81"], "4GiB");
    let ran = testbed.run_under(&policy, script, |running| {
        let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while resident_kib(running.gate) > 0 && std::time::Instant::now() < end {
            most = most.max(kept(81));
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
    });
    assert_eq!(ran.output, "100\n", "{ran:?}");
    // Each could have seven.
    assert!(most.1 >= 90 && most.0 < 200 << 20, "{} MiB in {} sockets", most.0 >> 20, most.1);
}

test!(Both, idle_connections_for_queries_leave_places_for_others, seconds 60);
fn idle_connections_for_queries_leave_places_for_others() {
    let mut testbed = Testbed::new();
    testbed.listen("echo", &[80]);
    let script = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (2048, 2048))
say(attempt('10.0.5.7', 80))
idle = [dial('8.8.8.8', 53) for _ in range(600)]
say(attempt('10.0.5.7', 80))";
    let ran = testbed.run(&["10.0.5.7:80"], script);
    assert_eq!(ran.output, "connected\nconnected\n", "{ran:?}");
}
