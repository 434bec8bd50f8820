//! What code can have the kernel keep in sockets beside `memory`; each with a control.

use std::{
    fs::File,
    io::{Read, Write},
    net::UdpSocket,
    process::Stdio,
    time::Duration,
};

use serde_json::json;

use super::limit_bypasses::is_held_by_kernel;
use crate::support::{
    control::{Control, denied},
    exec::{exec, run_under, scratch, text},
    runner::{eventually, test},
    timeouts::scaled_limit,
};

test!(serial Both, answers_that_wait_in_netlink_sockets_are_counted, seconds 60);
fn answers_that_wait_in_netlink_sockets_are_counted() {
    // Each answer repeats the request; SO_MEMINFO tells what waits.
    is_held_by_kernel(
        "\
import socket, struct, time
held, waiting = [], 0
message = struct.pack('=IHHII', 120000, 16, 5, 1, 0) + bytes(120000 - 16)
while waiting < 100 << 20:
    one = socket.socket(16, 3, 0); held.append(one)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 30); one.bind((0, 0))
    before = -1
    while (now := struct.unpack('I', one.getsockopt(socket.SOL_SOCKET, 55, 4))[0]) > before:
        before = now; one.send(message)
    waiting += now
time.sleep(2)
print('kept')",
    );
}

test!(serial Both, connections_that_no_accept_takes_are_counted, seconds 60);
fn connections_that_no_accept_takes_are_counted() {
    is_held_by_kernel(
        "\
import socket, time
held = [socket.create_server(('127.0.0.1', 0), backlog=4096) for _ in range(200)]
for _ in range(60):
    for server in held:
        one = socket.socket(); one.setblocking(False); one.connect_ex(server.getsockname()); one.close()
time.sleep(2)
print('kept')",
    );
}

test!(serial Both, data_in_connections_that_no_accept_takes_is_counted, seconds 60);
fn data_in_connections_that_no_accept_takes_is_counted() {
    for (family, host) in [(2, "127.0.0.1"), (10, "::1")] {
        is_held_by_kernel(&format!(
            "\
import socket, time
server = socket.socket({family}); server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 30)
server.bind(('{host}', 0)); server.listen(4096)
received, room = 0, server.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // 2
while received < 40 << 20:
    one = socket.socket({family}); one.connect(server.getsockname()); one.settimeout(0.02); sent = 0
    try:
        for _ in range(32): sent += one.send(bytes(1 << 16))
    except OSError: pass
    one.close(); received += min(sent, room)
time.sleep(2)
print('kept')"
        ));
    }
}

/// Code whose connections hold 150 MiB in copies of what was sent: the control message of sendmsg(2)
/// has the kernel keep one for its time (SO_TIMESTAMPING), at `when`. SO_MEMINFO tells what waits.
fn copies_of_what_was_sent(family: u32, host: &str, when: u32) -> String {
    format!(
        "\
import socket, struct, time
server = socket.socket({family}); server.bind(('{host}', 0)); server.listen(16)
held, waiting, block = [], 0, bytes(60000)
while waiting < 150 << 20:
    one = socket.socket({family}); one.connect(server.getsockname()); peer, _ = server.accept(); held += [one, peer]
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 30)
    before = -1
    while (now := struct.unpack('I', one.getsockopt(socket.SOL_SOCKET, 55, 4))[0]) > before:
        before = now
        left = one.sendmsg([block], [(1, 37, struct.pack('I', {when}))])
        while left: left -= len(peer.recv(left))
    waiting += now
time.sleep(2)
print('kept')"
    )
}

test!(serial Both, copies_of_what_tcp_has_sent_are_counted, needs [SlowAsUser], seconds 90);
fn copies_of_what_tcp_has_sent_are_counted() {
    // SOF_TIMESTAMPING_TX_SOFTWARE, TX_SCHED and TX_ACK.
    for (family, host, when) in [(2, "127.0.0.1", 2), (10, "::1", 1 << 8), (2, "127.0.0.1", 1 << 9)] {
        let ask = |memory: &str| {
            let limits = json!({"wall": scaled_limit(25_000), "memory": memory, "scratch_size": "8MiB", "tmp_size": "8MiB"});
            exec(json!({"code": copies_of_what_was_sent(family, host, when), "limits": limits}))
        };
        ask("64MiB").expect(json!({"verdict": "out_of_memory", "code": 137, "output": ""}));
        ask("2GiB").succeeded().expect(json!({"output": "kept\n"}));
    }
}

/// Code whose UDP sockets hold so much in copies of what was sent, and have given their port back.
fn closed_with_copies(mebibytes: u32) -> String {
    format!(
        "\
import ctypes, socket, struct, time
libc = ctypes.CDLL(None)
held, waiting, block = [], 0, bytes(60000)
while waiting < {mebibytes} << 20:
    one = socket.socket(2, 2); one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 30); held.append(one)
    before = -1
    while (now := struct.unpack('I', one.getsockopt(socket.SOL_SOCKET, 55, 4))[0]) > before:
        before = now
        try: one.sendmsg([block], [(1, 37, struct.pack('I', 2))], 0, ('127.0.0.1', 9))
        except OSError: pass
    waiting += now
    libc.connect(one.fileno(), bytes(16), 16)
"
    )
}

test!(serial Both, what_waits_in_closed_sockets_is_counted, needs [SlowAsUser], seconds 120);
/// No dump has them: connections that their peers have reset, and UDP sockets without a port.
fn what_waits_in_closed_sockets_is_counted() {
    let reset = "peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0)); peer.close()";
    let connections = copies_of_what_was_sent(2, "127.0.0.1", 2).replace("    waiting += now\n", &format!("    waiting += now; {reset}\n"));
    let datagrams = format!("{}time.sleep(2)\nprint('kept')", closed_with_copies(150));
    // No descriptor leads to what is on its way to another process.
    let passed = "    ends = socket.socketpair(); socket.send_fds(ends[0], [b'x'], [one.fileno()]); one.close(); held += ends\n";
    let on_their_way = format!("{}{passed}time.sleep(2)\nprint('kept')", closed_with_copies(150));
    for (code, reason) in
        [(connections, json!("kernel_memory")), (datagrams, json!("kernel_memory")), (on_their_way, json!("kernel_memory_uncounted"))]
    {
        let ask = |memory: &str| {
            let limits = json!({"wall": scaled_limit(25_000), "memory": memory, "scratch_size": "8MiB", "tmp_size": "8MiB"});
            exec(json!({"code": code, "limits": limits}))
        };
        ask("64MiB").expect(json!({"verdict": "out_of_memory", "code": 137, "output": "", "reason": reason}));
        ask("2GiB").succeeded().expect(json!({"output": "kept\n"}));
    }
}

test!(serial Both, closed_sockets_are_counted_where_others_give_back_as_much, needs [SlowAsUser], seconds 120);
/// Another process holds more than the run will, and gives back what the run has filled: what the
/// host has in use does not grow. Both are on one CPU, because the kernel shows pages that one has
/// given back as free only after a while, and gives them to the same CPU meanwhile.
fn closed_sockets_are_counted_where_others_give_back_as_much() {
    // By one socket of 8 MiB at a time.
    let one_cpu = "import os\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n";
    let fill = closed_with_copies(150).replace("    waiting += now\n", "    waiting += now; step(waiting >> 20)\n");
    let code = format!(
        "\
{one_cpu}def step(filled):
    open('filled.new', 'w').write(str(filled)); os.rename('filled.new', 'filled')
    while int(open('given').read()) < filled: time.sleep(0.001)
{fill}time.sleep(14)
print('kept')"
    );
    let other = format!(
        "\
{one_cpu}{}given = 0
open('filled', 'w').write('0')
def given_back():
    open('given.new', 'w').write(str(given)); os.rename('given.new', 'given')
given_back()
print('held', flush=True)
while True:
    filled = int(open('filled').read())
    while held and given < filled:
        one = held.pop(); given += struct.unpack('I', one.getsockopt(socket.SOL_SOCKET, 55, 4))[0] >> 20; one.close()
    if not held: given = 1 << 20
    given_back(); time.sleep(0.001)
",
        closed_with_copies(300)
    );
    let inside = scratch();
    // A tenth of it is more than the free pages that the kernel does not show.
    for (memory, expected) in [("640MiB", json!({"verdict": "out_of_memory", "code": 137})), ("2GiB", json!({"output": "kept\n"}))] {
        let mut holder =
            run_under(&["/usr/bin/python3", "-"]).current_dir(&inside).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        holder.stdin.take().unwrap().write_all(other.as_bytes()).unwrap();
        holder.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        let limits = json!({"wall": scaled_limit(40_000), "memory": memory, "scratch_size": "8MiB", "tmp_size": "8MiB"});
        let done = exec(json!({"code": code, "scratch": text(&inside), "limits": limits}));
        holder.kill().unwrap();
        holder.wait().unwrap();
        done.expect(expected);
    }
}

test!(serial Both, what_others_hold_in_sockets_ends_no_run, seconds 60);
/// The control: the host has as much more in use that nothing shows, and the run has sockets that
/// could hold it, and one whose reader is slow.
fn what_others_hold_in_sockets_ends_no_run() {
    let code = "\
import os, socket, time
held = [socket.socket(2, kind) for kind in (1, 2) for _ in range(50)]
server = socket.socket(); server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2 << 20); server.bind(('127.0.0.1', 0)); server.listen()
one = socket.create_connection(server.getsockname()); reader, _ = server.accept(); one.setblocking(False)
sent = got = 0
try:
    while sent < 2 << 20: sent += one.send(bytes(65536))
except BlockingIOError: pass
open('ready', 'w')
while not os.path.exists('go'): time.sleep(0.01)
time.sleep(2)
one.close()
while part := reader.recv(1 << 20): got += len(part)
print('done', got == sent > 1 << 20)";
    let inside = scratch();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            assert!(eventually(Duration::from_secs(20), || inside.join("ready").exists()));
            let mut other = run_under(&["/usr/bin/python3", "-"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
            let held = format!("{}print('held', flush=True)\ntime.sleep(600)", closed_with_copies(100));
            other.stdin.take().unwrap().write_all(held.as_bytes()).unwrap();
            other.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
            File::create(inside.join("go")).unwrap();
            std::thread::sleep(Duration::from_secs(3));
            other.kill().unwrap();
            other.wait().unwrap();
        });
        let limits = json!({"wall": scaled_limit(30_000), "memory": "64MiB", "scratch_size": "8MiB", "tmp_size": "8MiB"});
        exec(json!({"code": code, "scratch": text(&inside), "limits": limits})).succeeded().expect(json!({"output": "done True\n"}));
    });
}

test!(serial Both, what_others_give_back_late_ends_no_run, seconds 60);
/// What a process with huge pages gives back when it ends is on no line of `/proc/meminfo` until the
/// kernel has freed it: datagrams stand in for it here. The run has packets that could hold as much.
fn what_others_give_back_late_ends_no_run() {
    let code = "\
import os, socket, time
server = socket.create_server(('127.0.0.1', 0), backlog=64)
pairs = [(socket.create_connection(server.getsockname()), server.accept()[0]) for _ in range(50)]
for one, _ in pairs:
    one.setsockopt(6, 1, 1)
    for _ in range(100): one.send(bytes(100))
open('ready', 'w')
while not os.path.exists('go'): time.sleep(0.01)
print('done')";
    let inside = scratch();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            assert!(eventually(Duration::from_secs(20), || inside.join("ready").exists()));
            for _ in 0..4 {
                let sockets: Vec<_> = (0..800).map(|_| UdpSocket::bind("127.0.0.1:0").unwrap()).collect();
                for socket in &sockets {
                    for _ in 0..3 {
                        socket.send_to(&[0; 60_000], socket.local_addr().unwrap()).unwrap();
                    }
                }
                std::thread::sleep(Duration::from_millis(120));
                drop(sockets);
                std::thread::sleep(Duration::from_millis(200));
            }
            File::create(inside.join("go")).unwrap();
        });
        let limits = json!({"wall": scaled_limit(30_000), "memory": "64MiB", "scratch_size": "8MiB", "tmp_size": "8MiB"});
        exec(json!({"code": code, "scratch": text(&inside), "limits": limits})).succeeded().expect(json!({"output": "done\n"}));
    });
}

/// The bound of what no dump tells of ends the code; with a larger `memory` it is within it.
#[track_caller]
fn is_ended_by_bound(code: &str) {
    let ask = |memory: &str| {
        let limits = json!({"wall": scaled_limit(30_000), "memory": memory, "scratch_size": "8MiB", "tmp_size": "8MiB"});
        exec(json!({"code": code, "limits": limits}))
    };
    ask("64MiB").expect(json!({"verdict": "out_of_memory", "code": 137, "output": "", "reason": "kernel_memory_uncounted"}));
    ask("2GiB").succeeded().expect(json!({"output": "kept\n"}));
}

test!(serial Both, pages_that_single_bytes_keep_end_the_run, needs [SlowAsUser], seconds 120);
/// A byte that waits keeps a page of 32 KiB, whose rest was read: in connections, in connections that
/// have ended, and in unsent pieces of datagrams.
fn pages_that_single_bytes_keep_end_the_run() {
    let connections = "\
pairs = [pair() for _ in range(100)]
for _ in range(150):
    for one, _ in pairs:
        try: one.send(b'x')
        except BlockingIOError: continue
        fill_page()";
    let ended = "\
held = []
for _ in range(100):
    one, peer = pair(); held.append(peer)
    for _ in range(150):
        one.send(b'x'); fill_page()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0)); one.close()";
    let datagrams = "\
held = [socket.socket(2, 2) for _ in range(700)]
for one in held:
    one.connect(('127.0.0.1', 9))
    for _ in range(17):
        one.send(b'x', socket.MSG_MORE); fill_page()";
    for pinned in [connections, ended, datagrams] {
        let code = format!(
            "\
import socket, struct, time
server = socket.create_server(('127.0.0.1', 0), backlog=256)
def pair():
    one = socket.create_connection(server.getsockname()); one.setsockopt(6, 1, 1); one.setblocking(False)
    return one, server.accept()[0]
drain, drained = pair(); drain.setblocking(True)
def fill_page():
    left = drain.send(bytes(32767))
    while left: left -= len(drained.recv(left))
{pinned}
time.sleep(2)
print('kept')"
        );
        is_ended_by_bound(&code);
    }
}

test!(serial Both, errors_that_wait_in_sockets_are_counted, seconds 60);
fn errors_that_wait_in_sockets_are_counted() {
    // A copy of each datagram, which its sender may have for its time (SO_TIMESTAMPING); SO_MEMINFO
    // tells what waits.
    is_held_by_kernel(
        "\
import socket, struct, time
held, waiting = [], 0
while waiting < 60 << 20:
    one = socket.socket(2, 2); held.append(one)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 30)
    before = -1
    while (now := struct.unpack('I', one.getsockopt(socket.SOL_SOCKET, 55, 4))[0]) > before:
        before = now
        try: one.sendmsg([bytes(60000)], [(1, 37, struct.pack('I', 2))], 0, ('127.0.0.1', 9))
        except OSError: pass
    waiting += now
time.sleep(2)
print('kept')",
    );
}

test!(serial Both, pieces_of_unsent_datagrams_are_counted, seconds 60);
fn pieces_of_unsent_datagrams_are_counted() {
    for (family, host) in [(2, "127.0.0.1"), (10, "::1")] {
        is_held_by_kernel(&format!(
            "\
import socket, time
held = [socket.socket({family}, 2) for _ in range(900)]
for one in held: one.connect(('{host}', 9)); one.send(bytes(65000), socket.MSG_MORE)
time.sleep(2)
print('kept')"
        ));
    }
}

test!(serial Both, what_waits_in_unix_sockets_is_counted_without_a_cgroup, needs[NoCgroup], seconds 60);
/// As streams and as datagrams; also with their senders on the way to a process.
fn what_waits_in_unix_sockets_is_counted_without_a_cgroup() {
    let passed = "; socket.send_fds(ends[0], [b'x'], [one.fileno()]); one.close(); held += ends";
    for (kind, then) in [(1, ""), (2, ""), (1, passed)] {
        is_held_by_kernel(&format!(
            "\
import socket, time
held, sent = [], 0
while sent < 60 << 20:
    one, peer = socket.socketpair(1, {kind}); held += [one, peer]; ends = socket.socketpair()
    one.setblocking(False); one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
    try:
        while True: sent += one.send(bytes(60000))
    except BlockingIOError: pass{then}
time.sleep(2)
print('kept')"
        ));
    }
}

test!(serial Both, what_closed_unix_sockets_have_sent_ends_the_run_without_a_cgroup, needs[NoCgroup], seconds 60);
/// No dump has the senders. Each sends less than half of what it could, since the growth of others
/// can hide what fills them.
fn what_closed_unix_sockets_have_sent_ends_the_run_without_a_cgroup() {
    for size in [60_000, 4000] {
        let code = format!(
            "\
import socket, time
held, sent = [], 0
while sent < 250 << 20:
    one, peer = socket.socketpair(); held.append(peer)
    one.setblocking(False); one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
    try:
        for _ in range((3 << 20) // {size}): sent += one.send(bytes({size}))
    except BlockingIOError: pass
    one.close()
time.sleep(2)
print('kept')"
        );
        is_ended_by_bound(&code);
    }
}

test!(serial Both, sockets_themselves_are_counted_without_a_cgroup, needs[NoCgroup], seconds 90);
/// Without a name, a connection or data.
fn sockets_themselves_are_counted_without_a_cgroup() {
    for family in [1, 2] {
        is_held_by_kernel(&format!(
            "\
import os, socket, time
first = os.getpid()
full, says = os.pipe()
for _ in range(23):
    if os.fork() == 0: break
held = [socket.socket({family}, 1) for _ in range(1000)]
os.write(says, b'.')
if os.getpid() != first: time.sleep(600)
for _ in range(24): os.read(full, 1)
time.sleep(2)
print('kept')"
        ));
    }
}

test!(serial Both, what_descriptors_and_maps_keep_ends_the_run_without_a_cgroup, needs[NoCgroup], seconds 120);
fn what_descriptors_and_maps_keep_ends_the_run_without_a_cgroup() {
    let read = "def fill():\n    while True:\n        os.read(os.open('/proc/self/stat', 0), 1)";
    let pipes = "def fill():\n    while True:\n        os.write(os.pipe()[1], bytes(8192))";
    let watched = "\
import select
def fill():
    pipes = [os.pipe()[0] for _ in range(700)]
    while True:
        one = select.epoll()
        held.append(one)
        for pipe in pipes: one.register(pipe)";
    let maps = "\
import ctypes
libc = ctypes.CDLL(None)
def fill():
    # Shared, without a file; they are in no list of the code's, which would be memory too.
    while libc.mmap(None, 4096, 1, 0x21, -1, 0) != -1: pass";
    for fill in [read, pipes, watched, maps] {
        let code = |each: &str| {
            format!(
                "\
import os, time
held = []
{fill}
full, says = os.pipe()
first = os.getpid()
for _ in range(23):
    if os.fork() == 0: break
try: {each}
except (OSError, MemoryError): pass
os.write(says, b'.')
if os.getpid() != first: time.sleep(600)
for _ in range(24): os.read(full, 1)
time.sleep(2)
print('kept')"
            )
        };
        let ask = |memory: &str, each: &str| {
            let limits = json!({
                "wall": scaled_limit(60_000), "memory": memory, "scratch_size": "8MiB", "tmp_size": "8MiB",
                "processes": 32, "open_files": 4096,
            });
            exec(json!({"code": code(each), "limits": limits}))
        };
        ask("160MiB", "fill()").expect(json!({"verdict": "out_of_memory", "code": 137, "output": "", "reason": "kernel_memory_uncounted"}));
        // The controls: they fit into more memory, and the processes alone into this.
        ask("2GiB", "fill()").succeeded().expect(json!({"output": "kept\n"}));
        ask("160MiB", "pass").succeeded().expect(json!({"output": "kept\n"}));
    }
}

test!(serial Both, sockets_that_no_cgroup_charges_are_counted, seconds 60);
fn sockets_that_no_cgroup_charges_are_counted() {
    // Unbound netlink sockets, and groups of SO_REUSEPORT.
    for made in ["socket.socket(16, 3, 0)", "port()"] {
        is_held_by_kernel(&format!(
            "\
import os, socket, time
def port():
    one = socket.socket(2, 2); one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1); one.bind(('127.0.0.1', 0))
    return one
first = os.getpid()
full, says = os.pipe()
for _ in range(15):
    if os.fork() == 0: break
held = [{made} for _ in range(1000)]
os.write(says, b'.')
if os.getpid() != first: time.sleep(600)
for _ in range(16): os.read(full, 1)
time.sleep(2)
print('kept')"
        ));
    }
}

test!(Both, servers_with_hundreds_of_connections_are_not_ended, seconds 60);
/// The control of these counts.
fn servers_with_hundreds_of_connections_are_not_ended() {
    let code = "\
import asyncio, socket
async def serve(reader, writer):
    while data := await reader.read(65536):
        writer.write(data); await writer.drain()
    writer.close()
async def ask(port):
    reader, writer = await asyncio.open_connection('127.0.0.1', port)
    writer.write(bytes(10000)); writer.write_eof()
    size = len(await reader.read()); writer.close()
    return size
class Echo(asyncio.DatagramProtocol):
    def connection_made(self, transport): self.transport = transport
    def datagram_received(self, data, peer): self.transport.sendto(data, peer)
async def main():
    server = await asyncio.start_server(serve, '127.0.0.1', 0, backlog=512)
    loop = asyncio.get_running_loop()
    echo, _ = await loop.create_datagram_endpoint(Echo, ('127.0.0.1', 0))
    asked = socket.socket(2, 2); asked.setblocking(False); asked.connect(echo.get_extra_info('sockname'))
    for _ in range(6):
        sizes = await asyncio.gather(*[ask(server.sockets[0].getsockname()[1]) for _ in range(300)])
        await loop.sock_sendall(asked, bytes(60000))
        print(sum(sizes), len(await loop.sock_recv(asked, 65536)))
        await asyncio.sleep(0.3)
asyncio.run(main())";
    let limits = json!({"wall": scaled_limit(40_000), "memory": "128MiB", "scratch_size": "8MiB", "tmp_size": "8MiB"});
    exec(json!({"code": code, "limits": limits})).succeeded().expect(json!({"output": "3000000 60000\n".repeat(6)}));
}

test!(Both, servers_with_slow_readers_of_small_packets_are_not_ended, seconds 60);
/// The same: what waits in their connections takes far more than its bytes, and more than a run may
/// hold beside its memory.
fn servers_with_slow_readers_of_small_packets_are_not_ended() {
    let code = "\
import socket, struct, time
server = socket.create_server(('127.0.0.1', 0), backlog=256)
pairs, sent, got = [], 0, 0
for _ in range(150):
    one = socket.create_connection(server.getsockname()); one.setsockopt(6, 1, 1); one.setblocking(False)
    pairs.append((one, server.accept()[0]))
for one, _ in pairs:
    try:
        for _ in range(400): sent += one.send(bytes(100))
    except BlockingIOError: pass
waiting = sum(struct.unpack('I', peer.getsockopt(socket.SOL_SOCKET, 55, 4))[0] for _, peer in pairs)
time.sleep(2.5)
for one, peer in pairs:
    one.shutdown(socket.SHUT_WR)
    while part := peer.recv(65536): got += len(part)
print(got == sent, waiting > sent)";
    let limits = json!({"wall": scaled_limit(40_000), "memory": "128MiB", "scratch_size": "8MiB", "tmp_size": "8MiB"});
    exec(json!({"code": code, "limits": limits})).succeeded().expect(json!({"output": "True True\n"}));
}

test!(Both, socket_options_that_take_kernel_memory_are_refused);
fn socket_options_that_take_kernel_memory_are_refused() {
    // IP_ADD_MEMBERSHIP, MCAST_JOIN_GROUP, MCAST_JOIN_SOURCE_GROUP, IPV6_JOIN_GROUP.
    let group4 = "struct.pack('I4xHH4s120x', 1, 2, 0, socket.inet_aton('239.1.2.3'))";
    let member = "socket.inet_aton('239.1.2.3') + socket.inet_aton('127.0.0.1')";
    let group6 = "socket.inet_pton(10, 'ff02::1234') + struct.pack('I', 1)";
    for (family, option) in [(2, format!("0, 35, {member}")), (2, format!("0, 42, {group4}")), (10, format!("41, 20, {group6}"))] {
        denied(&format!("socket.socket({family}, 2).setsockopt({option})"), "EPERM", Control::Outside);
    }
    // Keys of TCP, of which a kernel may have none.
    for (option, length) in [(14, 216), (32, 216), (38, 216)] {
        let key = format!("struct.pack('=HH4s120xBBH', 2, 0, socket.inet_aton('127.0.0.1'), 0, 0, 2).ljust({length}, b'x')");
        denied(&format!("socket.socket().setsockopt(6, {option}, {key})"), "EPERM", Control::Reaches(&["ok", "EINVAL", "ENOPROTOOPT"]));
    }
    // The control: an option of the same level, and one of TCP.
    let others = "s = socket.socket(2, 2)\ns.setsockopt(0, 33, 1)\ns.setsockopt(0, 34, 1)\nsocket.socket().setsockopt(6, 1, 1)";
    denied("socket.socket().setsockopt(6, 14, bytes(216))", "EPERM", Control::Instead(others));
}

test!(RootOnly, socket_buffers_are_a_tenth_beside_the_memory, needs[Cgroup1]);
fn socket_buffers_are_a_tenth_beside_the_memory() {
    for (memory, buffers) in [("200MiB", 20 << 20), ("24MiB", 4 << 20)] {
        let limits = json!({"memory": memory, "scratch_size": "8MiB", "tmp_size": "8MiB"});
        let done = exec(json!({"code": "", "limits": limits}));
        let layers = done.succeeded()["receipt"]["layers"].as_array().unwrap();
        let detail = layers.iter().find(|layer| layer["layer"] == "cgroup").unwrap()["detail"].as_str().unwrap();
        assert!(detail.contains(&format!("memory.kmem.tcp.limit_in_bytes={buffers}")), "{detail}");
    }
}

test!(Both, a_hundred_megabytes_pass_through_loopback, seconds 60);
/// The control of the limit of socket buffers, both ways at a time.
fn a_hundred_megabytes_pass_through_loopback() {
    let code = "\
import socket, threading
server = socket.create_server(('127.0.0.1', 0))
size, block = 100 << 20, bytes(1 << 20)
def send(one):
    for _ in range(size // len(block)): one.sendall(block)
    one.shutdown(socket.SHUT_WR)
def receive(one, counts):
    count = 0
    while part := one.recv(1 << 20): count += len(part)
    counts.append(count)
ours = socket.create_connection(server.getsockname()); theirs, _ = server.accept()
counts = []
threads = [threading.Thread(target=send, args=[one]) for one in (ours, theirs)]
threads += [threading.Thread(target=receive, args=[one, counts]) for one in (ours, theirs)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(counts == [size, size])";
    let limits = json!({"wall": scaled_limit(30_000), "memory": "64MiB", "scratch_size": "8MiB", "tmp_size": "8MiB"});
    exec(json!({"code": code, "limits": limits})).succeeded().expect(json!({"output": "True\n"}));
}
