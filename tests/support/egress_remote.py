"""The other hosts of the test bed: one process in a network namespace to which every
address belongs, so that whatever leaves the sandbox's host arrives here and is seen.

Takes one JSON object a line on stdin and answers each with one line on stdout.
"""
import hashlib, http.server, io, json, os, socket, ssl, struct, subprocess, sys, threading, time, zipfile

packets = []      # [protocol, destination, port] of every IP packet that came in
heard = {}        # port -> bytes of the connections to it, in order of their coming
zone = {}         # name -> {"a": [[...], ...], "aaaa": ..., "cname": ..., "cut": bool, "owner": hex,
                  #          "delay": seconds, "delay_aaaa": seconds, "fails": bool}
asked = {}        # name -> how often


def capture():
    tap = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(3))
    tap.bind(("vr", 0))
    tap.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
    while True:
        data, (_, kind, direction, _, _) = tap.recvfrom(200)
        if direction == 4:
            continue
        if kind == 0x0800:
            head, protocol, to = (data[0] & 15) * 4, data[9], socket.inet_ntop(socket.AF_INET, data[16:20])
        elif kind == 0x86DD:
            head, protocol, to = 40, data[6], socket.inet_ntop(socket.AF_INET6, data[24:40])
        else:
            continue
        port = struct.unpack_from("!H", data, head + 2)[0] if protocol in (6, 17, 132) else 0
        # Neighbour discovery and multicast membership are the host's own.
        if protocol == 58 and data[head] in range(130, 138) or protocol in (0, 2):
            continue
        if protocol == 6 and data[head + 13] & 0x17 != 2:
            continue
        packets.append([protocol, to, port])


def everything(connection):
    while True:
        data = connection.recv(1 << 18)
        if not data:
            return
        yield data


def serve(connection, port, behaviour, log):
    if behaviour == "banner":
        connection.sendall(b"220 ready\r\n")
    if behaviour == "ssh":
        connection.sendall(b"SSH-2.0-greeting\r\n")
        connection.shutdown(socket.SHUT_WR)
    if behaviour == "source":
        digest, block = hashlib.sha256(), os.urandom(1 << 20)
        size = int(connection.recv(32))
        while size > 0:
            part = block[: min(size, len(block))]
            connection.sendall(part)
            digest.update(part)
            size -= len(part)
        connection.shutdown(socket.SHUT_WR)
        log.append(digest.hexdigest().encode())
        for _ in everything(connection):
            pass
        return
    if behaviour == "sink":
        digest, size = hashlib.sha256(), 0
        for data in everything(connection):
            digest.update(data)
            size += len(data)
        # The other direction is still open after the first was ended.
        connection.sendall(("%d %s" % (size, digest.hexdigest())).encode())
        return
    if behaviour in ("mute", "ssh"):
        for data in everything(connection):
            log.append(data)
        return
    for data in everything(connection):
        log.append(data)
        if behaviour == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return
        if behaviour == "http":
            body = b"hello"
            for _ in range(data.count(b"\r\n\r\n")):
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        else:
            connection.sendall(data)


def listen(port, behaviour, backlog=512):
    server = socket.socket(socket.AF_INET6)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.setsockopt(41, 26, 0)
    server.bind(("::", port))
    server.listen(backlog)

    def one(connection, log):
        connection.setsockopt(6, 1, 1)
        try:
            serve(connection, port, behaviour, log)
        except OSError as error:
            log.append(b"<%s>" % str(error.errno).encode())
        connection.close()

    def loop():
        while True:
            connection, _ = server.accept()
            log = []
            heard.setdefault(port, []).append(log)
            threading.Thread(target=one, args=(connection, log), daemon=True).start()

    threading.Thread(target=loop, daemon=True).start()


def dns_answer(query, over_tcp):
    at, labels = 12, []
    while query[at]:
        labels.append(query[at + 1 : at + 1 + query[at]].decode().lower())
        at += 1 + query[at]
    name, kind = ".".join(labels), struct.unpack_from("!H", query, at + 1)[0]
    question = query[12 : at + 5]
    head = lambda flags, count: query[:2] + struct.pack("!HHHHH", flags, 1, count, 0, 0) + question
    entry = zone.get(name)
    if entry is None:
        return head(0x8183, 0)
    time.sleep(entry.get("delay", 0) + (entry.get("delay_aaaa", 0) if kind == 28 else 0))
    if entry.get("fails"):
        return head(0x8182, 0)
    if entry.get("cut") and not over_tcp:
        return head(0x8380, 0)
    records, owner = b"", b"\xc0\x0c"
    count = 0
    for alias in entry.get("cname", []):
        target = b"".join(bytes([len(part)]) + part.encode() for part in alias.split(".")) + b"\0"
        records += owner + struct.pack("!HHIH", 5, 1, 1, len(target)) + target
        owner, count = target, count + 1
    turns = entry.get({1: "a", 28: "aaaa"}.get(kind, "none"), [])
    if turns:
        turn = asked.get((name, kind), 0)
        asked[(name, kind)] = turn + 1
        owner = bytes.fromhex(entry["owner"]) if "owner" in entry else owner
        for address in turns[min(turn, len(turns) - 1)]:
            packed = socket.inet_pton(socket.AF_INET if kind == 1 else socket.AF_INET6, address)
            records += owner + struct.pack("!HHIH", kind, 1, 1, len(packed)) + packed
            count += 1
    return head(0x8180, count) + records


def dns():
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.bind(("10.0.5.7", 53))
    tcp = socket.socket()
    tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    tcp.bind(("10.0.5.7", 53))
    tcp.listen(16)

    def datagrams():
        while True:
            query, peer = udp.recvfrom(2000)
            udp.sendto(dns_answer(query, False), peer)

    def streams():
        while True:
            connection, _ = tcp.accept()
            data = connection.recv(2000)
            answer = dns_answer(data[2:], True)
            connection.sendall(struct.pack("!H", len(answer)) + answer)
            connection.close()

    for work in (datagrams, streams):
        threading.Thread(target=work, daemon=True).start()


def run(*command):
    subprocess.run(command, check=True, env={"PATH": "/usr/sbin:/sbin:/usr/bin:/bin"})


def up():
    for line in (
        "link set lo up",
        "addr add 10.0.5.7/24 dev vr",
        "addr add 10.0.6.7/24 dev vr",
        "-6 addr add 2001:db8:5::7/64 dev vr nodad",
        "link set vr addrgenmode none",
        "link set vr up",
        # All addresses of the world are here, but for some that answer nothing and one
        # that a router knows no way to.
        "route add blackhole 203.0.113.66/32 table local",
        "route add blackhole 203.0.113.67/32 table local",
        "route add blackhole 203.0.113.68/32 table local",
        "route add unreachable 203.0.113.77/32 table local",
        "route add local 0.0.0.0/0 dev lo src 10.0.5.7",
        "-6 route add local ::/0 dev lo",
        "route add 10.0.5.1/32 dev vr src 10.0.5.7",
        "-6 route add 2001:db8:5::1/128 dev vr table local",
    ):
        run("ip", *line.split())
    with open("/proc/sys/net/ipv4/ip_forward", "w") as file:
        file.write("1")
    threading.Thread(target=capture, daemon=True).start()
    dns()


def wheel(name):
    """A package as an index has them: one module with its name, and with the function of the
    package `humanize` that the documents call."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        facts = "%s-1.0.dist-info/" % name
        archive.writestr(name + ".py", "NAME = %r\n\n\ndef intcomma(number):\n    return format(number, ',')\n" % name)
        archive.writestr(facts + "METADATA", "Metadata-Version: 2.1\nName: %s\nVersion: 1.0\n" % name)
        archive.writestr(facts + "WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(facts + "RECORD", "")
    return file.getvalue()


class Index(http.server.BaseHTTPRequestHandler):
    """A package index, whose files of `stray` lie on a host that no rule allows, and the
    files of a git repository."""

    protocol_version = "HTTP/1.1"
    repository = None

    def do_GET(self):
        name = self.path.strip("/").split("/")[-1].split("-")[0]
        inside = self.path.split("?")[0].partition("/demo.git/")[2]
        if inside:
            try:
                with open(os.path.join(self.repository, inside), "rb") as file:
                    body, kind = file.read(), "text/plain"
            except OSError:
                return self.send_error(404)
        elif self.path.endswith(".json"):
            body, kind = b'{"name": "demo"}', "application/json"
        elif self.path.endswith(".whl"):
            body, kind = wheel(name), "application/octet-stream"
        else:
            host = "stray.example" if name == "stray" else "files.pythonhosted.org"
            link = "%s-1.0-py3-none-any.whl" % name
            body, kind = ('<a href="https://%s/%s">%s</a>' % (host, link, link)).encode(), "text/html"
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def index(certificate, key, repository):
    Index.repository = repository
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = http.server.ThreadingHTTPServer(("0.0.0.0", 443), Index)
    server.daemon_threads = True
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    threading.Thread(target=server.serve_forever, daemon=True).start()


def wake(address, after):
    """Lets an address that answers nothing answer after so many seconds."""

    def work():
        time.sleep(after)
        run("ip", "route", "del", "blackhole", address, "table", "local")

    threading.Thread(target=work, daemon=True).start()


OPERATIONS = {
    "up": lambda _: up(),
    "listen": lambda o: [listen(port, o["behaviour"]) for port in o["ports"]] and None,
    "index": lambda o: index(o["certificate"], o["key"], o["repository"]),
    "wake": lambda o: wake(o["address"], o["after"]),
    "zone": lambda o: zone.update(o["zone"]),
    "packets": lambda _: (time.sleep(0.05), list(packets))[1],
    "clear": lambda _: (packets.clear(), heard.clear(), asked.clear())[2],
    "heard": lambda o: [b"".join(log).decode("latin1") for log in heard.get(o["port"], [])],
}

for line in sys.stdin:
    operation = json.loads(line)
    print(json.dumps(OPERATIONS[operation["op"]](operation)), flush=True)
