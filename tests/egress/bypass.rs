//! Ways round the rules, each of which must lead nowhere.

use std::os::{
    linux::net::SocketAddrExt,
    unix::{fs::PermissionsExt, net::UnixListener},
};

use crate::{egress::testbed::Testbed, egress::testbed::denials, egress::testbed::syn, support::runner::test};

test!(Both, datagrams_are_refused_at_once, seconds 90);
fn datagrams_are_refused_at_once() {
    let mut testbed = Testbed::new();
    let script = "for family, to, port in ((2, '10.0.5.7', 443), (2, '9.9.9.9', 123), (10, '2001:db8:5::7', 443), (2, '255.255.255.255', 67), (2, '224.0.0.251', 5353)):
    s = socket.socket(family, socket.SOCK_DGRAM); s.settimeout(2); begin = time.time()
    try: s.connect((to, port)); s.send(b'quic'); s.recv(9)
    except OSError as error: say(word(error), time.time() - begin < .5)";
    let ran = testbed.run(&["10.0.5.0/24:443", "[2001:db8:5::/64]:443"], script);
    assert!(ran.output.starts_with("ECONNREFUSED True\nECONNREFUSED True\nECONNREFUSED True\nEACCES True\n"), "{ran:?}");
    assert_eq!(testbed.packets(), []);
    assert!(denials(&ran).contains(&String::from("udp 9.9.9.9 123 protocol_unsupported")), "{ran:?}");
    // The control: outside the sandbox they arrive.
    let _answers = testbed.outside(script);
    let packets = testbed.packets();
    for (to, port) in [("10.0.5.7", 443), ("9.9.9.9", 123), ("2001:db8:5::7", 443)] {
        assert!(packets.contains(&(17, String::from(to), port)), "{to}: {packets:?}");
    }
}

test!(Both, other_protocols_and_raw_sockets_lead_nowhere, seconds 90);
fn other_protocols_and_raw_sockets_lead_nowhere() {
    let mut testbed = Testbed::new();
    let script = "def kind(family, type, protocol=0):
    try: return socket.socket(family, type, protocol)
    except OSError as error: return word(error)
say(kind(2, 3, 255), kind(2, 3, 1), kind(10, 3, 58), kind(17, 3, 0x300), kind(17, 2, 0x300))
ping = kind(2, 2, 1)
if not isinstance(ping, str):
    ping.settimeout(.5)
    try: ping.sendto(bytes([8, 0, 0, 0, 0, 1, 0, 1]), ('10.0.5.7', 0)); say('pong', ping.recv(9))
    except OSError as error: say('no pong')
else: say('no pong')
sctp = kind(2, 1, 132)
try: sctp.settimeout(.5); sctp.connect(('10.0.5.7', 443)); say('connected')
except Exception as error: say('no sctp')
lite = kind(2, 2, 136)
try: lite.sendto(b'x', ('10.0.5.7', 443)); say('sent')
except Exception: say('no lite')";
    // With the filter, and without it: the namespace alone is enough.
    for ran in [testbed.run(&["10.0.5.0/24:443"], script), testbed.run_bare(&["10.0.5.0/24:443"], script)] {
        assert!(ran.output.starts_with("EPERM EPERM EPERM EPERM EPERM\nno pong\nno sctp\n"), "{ran:?}");
        assert_eq!(testbed.packets(), []);
    }
    // The control: outside the sandbox, what this kernel has of them leaves.
    let _answers = testbed.outside(script);
    let packets = testbed.packets();
    assert!(packets.iter().any(|(protocol, ..)| *protocol == 1), "{packets:?}");
    for (kind, protocol) in [(1, 132), (2, 136)] {
        let has = testbed.outside(&format!("socket.socket(2, {kind}, {protocol}); say('made')")) == "made\n";
        assert_eq!(packets.iter().any(|packet| packet.0 == protocol), has, "{protocol}: {packets:?}");
    }
}

test!(Both, families_that_know_no_namespace_are_closed, seconds 90);
fn families_that_know_no_namespace_are_closed() {
    let mut testbed = Testbed::new();
    // vsock, alg, netlink for netfilter, packet, bluetooth, rds, tipc, xdp; what is open for comparison.
    let script = "def kind(family, type, protocol=0):
    try: socket.socket(family, type, protocol).close(); return 'made'
    except OSError as error: return word(error)
say(*[kind(*what) for what in ((40, 1), (40, 2), (38, 5), (16, 3, 12), (17, 3), (31, 3), (21, 5), (30, 2), (44, 3))])
say(*[kind(*what) for what in ((1, 1), (2, 1), (10, 2), (16, 3, 0))])";
    let ran = testbed.run(&["10.0.5.0/24:443"], script);
    let (closed, open) = ran.output.split_once('\n').unwrap();
    assert!(!closed.contains("made") && closed.split(' ').count() == 9, "{ran:?}");
    assert!(closed.split(' ').take(3).all(|word| word == "EPERM" || word == "EAFNOSUPPORT"), "the filter's answer: {ran:?}");
    assert_eq!(open, "made made made made\n");
    // The control: where only the filter is missing, those that the kernel has can be made.
    let ran = testbed.run_bare(&["10.0.5.0/24:443"], script);
    assert!(ran.output.split_once('\n').unwrap().0.contains("made"), "{ran:?}");
}

test!(Both, a_call_of_the_older_abi_connects_no_further_than_a_socket, seconds 90);
fn a_call_of_the_older_abi_connects_no_further_than_a_socket() {
    let mut testbed = Testbed::new();
    testbed.listen("echo", &[443]);
    // socketcall(SYS_CONNECT) by int 0x80, its arguments below 4 GiB.
    let script = "libc.mmap.restype = ctypes.c_void_p; libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
page = libc.mmap(None, 4096, 7, 0x62, -1, 0)
def connect(to):
    s = socket.socket(); s.settimeout(None)
    ctypes.memmove(page + 256, struct.pack('=HH4s8x', 2, socket.htons(443), socket.inet_aton(to)), 16)
    ctypes.memmove(page + 512, struct.pack('=III', s.fileno(), page + 256, 16), 12)
    code = b'\\x53\\xb8' + struct.pack('=I', 102) + b'\\xbb' + struct.pack('=I', 3) + b'\\xb9' + struct.pack('=I', page + 512) + b'\\xcd\\x80\\x5b\\xc3'
    ctypes.memmove(page, code, len(code))
    return errno.errorcode.get(-ctypes.CFUNCTYPE(ctypes.c_int)(page)(), 'connected')
say(connect('10.0.5.7'), connect('10.0.6.7'))";
    // The filter knows no call of that ABI.
    assert_eq!(testbed.run(&["10.0.5.0/24:443"], script).output, "ENOSYS ENOSYS\n");
    assert_eq!(testbed.packets(), []);
    // Without the filter the namespace and its rules hold; the control is in it.
    let ran = testbed.run_bare(&["10.0.5.0/24:443"], script);
    match ran.output.as_str() {
        "connected ECONNREFUSED\n" => assert_eq!(testbed.packets(), [syn("10.0.5.7", 443)]),
        // A kernel that does not have it.
        other => assert_eq!(other, "ENOSYS ENOSYS\n"),
    }
}

test!(Both, sockets_of_the_host_are_out_of_reach, seconds 90);
fn sockets_of_the_host_are_out_of_reach() {
    let mut testbed = Testbed::new();
    let name = format!("egress-test-{}", std::process::id());
    let address = std::os::unix::net::SocketAddr::from_abstract_name(&name).unwrap();
    let path = std::env::temp_dir().join(&name);
    let listeners = [UnixListener::bind_addr(&address).unwrap(), UnixListener::bind(&path).unwrap()];
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o777)).unwrap();
    let script = format!(
        "for to in ('\\0{name}', {path:?}):
    s = socket.socket(socket.AF_UNIX)
    try: s.connect(to); say('connected')
    except OSError as error: say(word(error))"
    );
    let ran = testbed.run(&["10.0.5.0/24:443"], &script);
    assert!(matches!(ran.output.as_str(), "ECONNREFUSED\nENOENT\n" | "EPERM\nENOENT\n"), "{ran:?}");
    // An abstract name belongs to the network namespace, with and without other layers.
    assert_eq!(testbed.run_bare(&["10.0.5.0/24:443"], &script).output, "ECONNREFUSED\nconnected\n");
    // The control: in the host's own namespaces both answer.
    let _clients =
        [std::os::unix::net::UnixStream::connect_addr(&address).unwrap(), std::os::unix::net::UnixStream::connect(&path).unwrap()];
    for listener in listeners {
        assert!(listener.accept().is_ok());
    }
    std::fs::remove_file(path).unwrap();
}

test!(Both, no_descriptor_of_the_host_is_inside, seconds 90);
fn no_descriptor_of_the_host_is_inside() {
    let mut testbed = Testbed::new();
    testbed.listen("echo", &[443]);
    // A connection that the host has, not closed on exec.
    let open = std::net::TcpStream::connect("10.0.5.7:443").unwrap();
    rustix::io::fcntl_setfd(&open, rustix::io::FdFlags::empty()).unwrap();
    let script = "import os
print(sorted(os.readlink('/proc/self/fd/%d' % n).split(':')[0] for n in range(2048) if os.path.lexists('/proc/self/fd/%d' % n)), flush=True)";
    let ran = testbed.run(&["10.0.5.0/24:443"], script);
    assert!(ran.output.starts_with('[') && !ran.output.contains("socket"), "{ran:?}");
    // The control: a process started without the program has it.
    let plain = std::process::Command::new("/usr/bin/python3").args(["-c", script]).output().unwrap();
    assert!(String::from_utf8(plain.stdout).unwrap().contains("socket"));
}

test!(Both, the_gates_listener_refuses_connections_that_were_not_sent_to_it, seconds 90);
fn the_gates_listener_refuses_connections_that_were_not_sent_to_it() {
    let mut testbed = Testbed::new();
    testbed.listen("echo", &[1, 443]);
    let script = "for to in ('127.0.0.1', '::1', '198.19.255.254'):
    try:
        s = dial(to, 1); s.sendall(b'x'); say(to, s.recv(9))
    except OSError as error: say(word(error))
say(attempt('10.0.5.7', 1), attempt('10.0.5.7', 443))
try: socket.socket().bind(('0.0.0.0', 1)); say('bound')
except OSError as error: say(word(error))";
    let ran = testbed.run(&["10.0.5.0/24:443"], script);
    assert!(!ran.output.contains("b'x'"), "{ran:?}");
    assert!(ran.output.ends_with("ECONNREFUSED connected\nEACCES\n"), "{ran:?}");
    assert_eq!(testbed.packets(), [syn("10.0.5.7", 443)]);
}

test!(Both, a_marked_or_forged_packet_cannot_be_made, seconds 90);
fn a_marked_or_forged_packet_cannot_be_made() {
    let mut testbed = Testbed::new();
    let script = "s = socket.socket(socket.AF_INET6)
for level, option, value in ((1, 36, 0x57), (0, 19, 1), (41, 75, 1), (1, 25, b'lo')):
    try: s.setsockopt(level, option, value); say('set', option)
    except OSError as error: say(word(error))";
    assert_eq!(testbed.run(&["10.0.5.0/24:443"], script).output, "EPERM\nEPERM\nEPERM\nset 25\n");
}

test!(Both, a_ring_connects_no_further_than_a_socket, seconds 90);
fn a_ring_connects_no_further_than_a_socket() {
    let mut testbed = Testbed::new();
    // IORING_OP_SOCKET is as good as any: what it makes is a socket of this namespace.
    let script = "parameters = ctypes.create_string_buffer(120)
ring = libc.syscall(425, 4, parameters)
say('ring' if ring >= 0 else word(OSError(ctypes.get_errno(), '')))
if ring >= 0:
    offsets = struct.unpack_from('10I', parameters.raw, 40)
    import mmap
    entries = struct.unpack_from('I', parameters.raw, 0)[0]
    queue = mmap.mmap(ring, offsets[6] + entries * 4, offset=0)
    requests = mmap.mmap(ring, entries * 64, offset=0x10000000)
    s = socket.socket(); address = ctypes.create_string_buffer(struct.pack('=HHI8x', 2, socket.htons(443), struct.unpack('=I', bytes([10, 0, 6, 7]))[0]))
    requests[:64] = struct.pack('=BBHiQQIIQ24x', 16, 0, 0, s.fileno(), 16, ctypes.addressof(address), 0, 0, 7)[:64]
    struct.pack_into('I', queue, offsets[6], 0); struct.pack_into('I', queue, offsets[1], 1)
    say(libc.syscall(426, ring, 1, 1, 1, None, 0)); time.sleep(.2)
    try: s.send(b'x'); say('sent')
    except OSError as error: say(word(error) in ('EPIPE', 'ENOTCONN', 'ECONNREFUSED'))";
    let ran = testbed.run(&["10.0.5.0/24:443", "10.0.6.7:443"], script);
    assert!(matches!(ran.output.as_str(), "EPERM\n" | "ENOSYS\n"), "the filter knows no ring: {ran:?}");
    // Without the filter the rules hold alone, where the kernel has rings.
    let ran = testbed.run_bare(&["10.0.5.0/24:443"], script);
    assert!(!ran.output.contains("sent"), "{ran:?}");
    assert_eq!(testbed.packets(), []);
    // The control.
    testbed.listen("echo", &[443]);
    let ran = testbed.run_bare(&["10.0.6.7:443"], script);
    if ran.output.starts_with("ring") {
        assert!(ran.output.ends_with("sent\n"), "{ran:?}");
        assert_eq!(testbed.packets(), [syn("10.0.6.7", 443)]);
    }
}

test!(Both, new_namespaces_are_empty, seconds 90);
fn new_namespaces_are_empty() {
    let mut testbed = Testbed::new();
    testbed.listen("echo", &[443]);
    let script = "before = os.open('/proc/self/ns/net', os.O_RDONLY); host = None
say(attempt('10.0.5.7', 443))
say(libc.setns(os.open('/proc/1/ns/net', os.O_RDONLY) if os.access('/proc/1/ns/net', os.R_OK) else -1, 0x40000000))
say(libc.unshare(0x50000000)); say(attempt('10.0.5.7', 443)); say(libc.setns(before, 0))";
    let ran = testbed.run_bare(&["10.0.5.0/24:443"], script);
    assert_eq!(ran.output, "connected\n-1\n0\nENETUNREACH\n-1\n", "{ran:?}");
    assert_eq!(testbed.packets(), [syn("10.0.5.7", 443)]);
    // The filter lets none be made in the first place.
    let ran = testbed.run(&["10.0.5.0/24:443"], script);
    assert_eq!(ran.output, "connected\n-1\n-1\nconnected\n-1\n", "{ran:?}");
}

test!(Both, a_flood_of_connections_is_refused_and_the_rest_is_served, seconds 90);
fn a_flood_of_connections_is_refused_and_the_rest_is_served() {
    let mut testbed = Testbed::new();
    testbed.listen("echo", &[443]);
    let script = "end = time.time() + 1.5; count = 0
while time.time() < end:
    s = socket.socket(); s.setblocking(False); s.connect_ex(('10.0.6.7', 1024 + count % 60000)); s.close(); count += 1
sys.stderr.write('%d SYNs\\n' % count)
time.sleep(.3); say(count > 5000, attempt('10.0.5.7', 443))";
    let ran = testbed.run(&["10.0.5.0/24:443"], script);
    assert_eq!(ran.output, "True connected\n", "{ran:?}");
    assert_eq!(testbed.packets(), [syn("10.0.5.7", 443)]);
    assert!(ran.egress["truncated"].as_bool().unwrap());
    assert!(ran.egress["denied"].as_array().unwrap().len() <= 256);
}

test!(Both, many_denials_do_not_stop_the_gate, seconds 90);
fn many_denials_do_not_stop_the_gate() {
    let mut testbed = Testbed::new();
    testbed.listen("echo", &[443]);
    let script = "for number in range(600):
    u = socket.socket(2, 2); u.sendto(b'x', ('9.9.%d.%d' % (number >> 8, number & 255), 123)); u.close()
    attempt('10.0.%d.7' % (6 + number % 200), 1 + number)
say(attempt('10.0.5.7', 443))";
    let ran = testbed.run(&["10.0.5.0/24:443"], script);
    assert_eq!(ran.output, "connected\n");
    assert_eq!(testbed.packets(), [syn("10.0.5.7", 443)]);
}
