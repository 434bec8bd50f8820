"""The client of a service: against `stockade serve`, and against servers that are none."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted import ACCEPTED, Server, ran, refused, reply, says, stream

import stockade


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Service:
    """A service of its own, with one key."""

    def __init__(self, place: Path) -> None:
        place.chmod(0o700)
        program, keys, port = os.environ["STOCKADE"], place / "keys.toml", free_port()
        made = subprocess.run(
            [program, "key", "new", "test", "--add", "--file", keys], capture_output=True, text=True, check=True
        )
        self.key = made.stdout.strip()
        self.key_file = place / "token"
        self.key_file.write_text(made.stdout)
        self.key_file.chmod(0o600)
        keys.write_text(f'{keys.read_text()}\n[[key]]\nid = "own"\nuid = {os.getuid()}\npolicies = ["default"]\n')
        self.url, self.unix = f"http://127.0.0.1:{port}", f"unix:{place}/s"
        config = place / "serve.toml"
        config.write_text(f'schema = 1\n[listen]\nunix = "{place}/s"\ntcp = "127.0.0.1:{port}"\n')
        self.process = subprocess.Popen([program, "serve", "--config", config], stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        # What the host lacks is said before.
        assert any("serving at" in line for line in self.process.stderr)

    def client(self, **options: Any) -> stockade.Client:
        return stockade.Client(self.url, self.key, **options)

    def end(self) -> None:
        self.process.terminate()
        self.process.communicate(timeout=60)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    one = Service(tmp_path)
    yield one
    one.end()


def test_a_program_runs_at_a_service_as_it_does_here(service):
    client = service.client()
    result = client.run("import sys; print('ä'); print('e', file=sys.stderr); raise SystemExit(3)", id="a")
    here = stockade.run("import sys; print('ä'); print('e', file=sys.stderr); raise SystemExit(3)", id="a")
    assert (result.output, result.error, result.code, result.verdict) == ("ä\n", "e\n", 3, "exited")
    assert (result.id, result.policy, result.raw["key"]) == ("a", here.policy, "test")
    assert client.run({"code": "print(input())", "stdin": b"\xff"}).output_bytes == b"\xff\n"
    assert client.run("while True: pass", timeout=0.3).verdict == "wall_timeout"
    assert stockade.Client(service.url, key_file=service.key_file).run("print(1)").output == "1\n"
    assert stockade.Client(service.unix).run("print(1)").raw["key"] == "own"
    with pytest.raises(stockade.BadRequest) as bad:
        client.run("print(1)", language="cobol")
    assert bad.value.reason == stockade_error("print(1)", language="cobol").reason
    for code, options in (({"colour": "red"}, {}), ("1", {"colour": "red"}), ({"code": "1", "timeout": -1}, {})):
        with pytest.raises(stockade.BadRequest):
            client.run(code, **options)
    assert service.key not in repr(client) + repr(client._address)


def stockade_error(code: str, **options: Any) -> stockade.StockadeError:
    with pytest.raises(stockade.StockadeError) as error:
        stockade.run(code, **options)
    return error.value


def test_what_a_service_refuses_is_an_error_with_its_reason(service):
    for client, kind, reason in (
        (stockade.Client(service.url, "sd_test_wrong"), stockade.SandboxError, "key_unknown"),
        (service.client(policy="strict"), stockade.BadRequest, "policy_not_granted"),
        (
            stockade.Client(f"http://127.0.0.1:{free_port()}", "x", retries=0),
            stockade.SandboxError,
            "server_unreachable",
        ),
        (stockade.Client("unix:/nowhere", retries=0), stockade.SandboxError, "server_unreachable"),
    ):
        with pytest.raises(kind) as error:
            client.run("print(1)")
        assert error.value.reason == reason
        assert not error.value.result.started
        with pytest.raises(kind if reason != "policy_not_granted" else stockade.SandboxError) as error:
            client.map(["print(1)"] * 3)
        assert error.value.reason == reason
    # It says so before it has read all.
    with pytest.raises(stockade.BadRequest, match="may use default"):
        service.client(policy="strict").run("print(1)", stdin="x" * (20 << 20))


def test_output_comes_while_the_code_runs(service):
    code = "import sys, time\nprint('first', flush=True)\nprint('x', file=sys.stderr)\ntime.sleep(1)\nprint('last')"
    heard: list[tuple[str, str, float]] = []
    begun = time.monotonic()
    result = service.client().run(
        code,
        on_stdout=lambda text: heard.append(("out", text, time.monotonic() - begun)),
        on_stderr=lambda text: heard.append(("err", text, time.monotonic() - begun)),
    )
    assert result.output == "first\nlast\n"
    out = [(text, at) for kind, text, at in heard if kind == "out"]
    assert "".join(text for text, _ in out) == "first\nlast\n"
    assert "".join(text for kind, text, _ in heard if kind == "err") == "x\n"
    assert out[-1][1] - out[0][1] > 0.8


def test_a_run_that_nobody_waits_for_is_cancelled(service, running, wait_until):
    mark = f"canary-listener-{os.getpid()}"
    code = f"import subprocess; print(1, flush=True); subprocess.run(['sh', '-c', 'sleep 60; : {mark}'])"

    def fails(text: str) -> None:
        wait_until(lambda: running(mark))
        raise BrokenPipeError("of the listener")

    with pytest.raises(BrokenPipeError, match="of the listener"):
        service.client().run(code, on_stdout=fails)
    wait_until(lambda: not running(mark))

    def interrupts(text: str) -> None:
        wait_until(lambda: running(mark))
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        service.client().run(code, on_stdout=interrupts)
    wait_until(lambda: not running(mark))


def test_runs_are_listed_and_cancelled(service, wait_until):
    client = service.client()
    results: list[stockade.Result] = []
    thread = threading.Thread(target=lambda: results.append(client.run("import time; time.sleep(60)", id="long")))
    thread.start()
    wait_until(lambda: any(run["state"] == "running" for run in client.runs()))
    number = client.runs()[0]["run"]
    assert client.cancel(number)
    thread.join(20)
    assert results[0].verdict == "cancelled"
    assert client.runs() == []
    assert not client.cancel("0123456789abcdef")
    with pytest.raises(stockade.BadRequest):
        client.cancel("../../live")


async def test_the_same_under_asyncio(service, running, wait_until):
    client = stockade.AsyncClient(service.url, service.key)
    heard: list[str] = []
    results = await asyncio.gather(*(client.run(f"print({n})", on_stdout=heard.append) for n in range(4)))
    assert [result.output for result in results] == [f"{n}\n" for n in range(4)]
    assert sorted(letter for letter in "".join(heard) if letter.isdigit()) == [str(n) for n in range(4)]
    assert [result.output for result in await client.map(["print(1)", "print(2)"])] == ["1\n", "2\n"]
    mark = f"canary-task-{os.getpid()}"
    code = f"import subprocess; subprocess.run(['sh', '-c', 'sleep 60; : {mark}'])"
    for work in (client.run(code), client.map([code])):
        task = asyncio.ensure_future(work)
        await asyncio.to_thread(wait_until, lambda: running(mark))
        assert len(await client.runs()) == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        wait_until(lambda: not running(mark))


def test_many_programs_keep_their_order_and_none_raises(service):
    programs: list[Any] = [{"code": f"echo {n}", "language": "sh", "id": "same"} for n in range(520)]
    programs[7] = {"code": "exit 7", "language": "sh"}
    programs[8] = {"code": "1", "language": "cobol"}
    programs[9] = {"code": "1", "colour": "red"}
    programs[10] = "1/0"
    shown: list[tuple[int, int]] = []
    results = service.client().map(programs, progress=lambda done, total: shown.append((done, total)), timeout=20)
    wrong = [n for n, result in enumerate(results) if n not in (7, 8, 9, 10) and result.output != f"{n}\n"]
    assert len(results) == 520
    assert not wrong, results[wrong[0]]
    assert [results[n].code for n in (7, 8, 9, 10)] == [7, 2, 2, 1]
    assert [str(results[n].verdict) for n in (7, 8, 9, 10)] == ["exited", "bad_request", "bad_request", "exited"]
    assert results[9].reason == "request_malformed"
    assert shown[-1] == (520, 520)
    assert [done for done, _ in shown] == sorted(done for done, _ in shown)


def test_few_at_a_time_where_so_asked(service):
    assert service.client().map([]) == []
    spans = service.client().map(
        ["import time; a = time.time(); time.sleep(0.2); print(a, time.time())"] * 3, concurrency=1
    )
    times = [tuple(map(float, result.output.split())) for result in spans]
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(times))
    with pytest.raises(stockade.BadRequest):
        service.client().map(["1"], concurrency=0)


def test_only_what_has_not_started_is_repeated():
    with Server(
        says(
            refused("429 Slow", "key_rate", more="Retry-After: 1\r\n"),
            stream(ACCEPTED, {"type": "result", "result": ran()}),
        )
    ) as server:
        begun = time.monotonic()
        assert stockade.Client(server.url, "x").run("print(1)").output == "1\n"
        assert len(server.heard) == 2
        assert time.monotonic() - begun >= 1
    lost = {"type": "problem", "problem": {"status": 500, "reason": "worker_lost", "detail": "d", "started": True}}
    for answer, reason, started in (
        (refused("500 Lost", "worker_lost", started=True), "worker_lost", True),
        (stream(ACCEPTED, lost), "worker_lost", True),
        (stream(ACCEPTED), "server_lost", True),
        (b"", "server_lost", True),
        (refused("401 No", "key_unknown"), "key_unknown", False),
        (refused("403 No", "policy_not_granted"), "policy_not_granted", False),
        (reply("502 Bad", "text/html", b"<html>"), "server_answer", True),
        (reply("503 Bad", "text/html", b"<html>"), "server_answer", True),
    ):
        with Server(says(answer)) as server:
            with pytest.raises(stockade.StockadeError) as error:
                stockade.Client(server.url, "x").run("print(1)")
            assert (error.value.reason, error.value.result.started) == (reason, started)
            assert sum(head.startswith("POST") for head in server.heard) == 1
    with Server(says(refused("503 Full", "queue_full"))) as server:
        with pytest.raises(stockade.SandboxError) as error:
            stockade.Client(server.url, "x", retries=1).run("print(1)")
        assert (error.value.reason, len(server.heard)) == ("queue_full", 2)


def test_a_stream_that_was_cut_is_gone_on_with_and_nothing_runs_twice():
    def output(seq: int) -> dict[str, Any]:
        return {"type": "stdout", "seq": seq, "at_ms": 1, "text": f"{seq}\n"}

    parts = {
        "POST /v1/run ": stream(ACCEPTED, output(2)),
        "GET /v1/runs/00aa/events?after=2 ": stream(output(3)),
        "GET /v1/runs/00aa/events?after=3 ": stream({"type": "result", "seq": 4, "result": ran("2\n3\n")}),
    }
    heard: list[str] = []
    with Server(lambda head, body, connection: connection.sendall(parts[head.split("HTTP/1.1")[0]])) as server:
        assert stockade.Client(server.url, "x").run("print(1)", on_stdout=heard.append).output == "2\n3\n"
    assert heard == ["2\n", "3\n"]


def answers_batches(*turns: Callable[[list[Any]], bytes]) -> Callable[[str, bytes, socket.socket], object]:
    left = list(turns)

    def answer(head: str, body: bytes, connection: socket.socket) -> None:
        requests = [json.loads(line) for line in body.splitlines()]
        connection.sendall((left.pop(0) if len(left) > 1 else left[0])(requests))

    return answer


def whole_batch(requests: list[Any]) -> bytes:
    lines = [{"id": None, "index": n, "result": ran(one["code"])} for n, one in enumerate(requests)]
    return stream(*reversed(lines), {"type": "end", "lines": len(lines), "problems": 0})


def test_what_a_batch_has_not_answered_is_told_or_sent_again():
    later = {"status": 503, "reason": "draining", "detail": "d", "started": False}
    gone = {"status": 500, "reason": "worker_lost", "detail": "d", "started": True}

    def some(requests: list[Any]) -> bytes:
        assert [one["code"] for one in requests] == ["a", "b", "c", "d"]
        lines = [{"index": 0, "problem": later}, {"index": 1, "problem": gone}, {"index": 3, "result": ran("d")}]
        return stream(*lines, {"type": "end", "lines": 4, "problems": 2})

    with Server(answers_batches(some, whole_batch)) as server:
        results = stockade.Client(server.url, "x").map("abcd")
        # The first and the third, which the service never took, once more.
        assert [(str(one.verdict), one.reason, one.output) for one in results] == [
            ("exited", None, "a"),
            ("sandbox_error", "worker_lost", ""),
            ("exited", None, "c"),
            ("exited", None, "d"),
        ]
        assert len(server.heard) in (2, 3)
    # Cut off, it may have started what it has not answered.
    with Server(answers_batches(lambda requests: stream({"index": 1, "result": ran("b")}))) as server:
        results = stockade.Client(server.url, "x").map("ab")
        assert [(one.reason, one.started) for one in results] == [("server_lost", True), (None, True)]
        assert len(server.heard) == 1
    # Too large: in two halves.
    small = lambda requests: refused("413 Large", "too_large") if len(requests) > 2 else whole_batch(requests)  # noqa: E731
    with Server(answers_batches(small)) as server:
        assert [one.output for one in stockade.Client(server.url, "x").map("abcde")] == list("abcde")
    with Server(answers_batches(lambda requests: refused("413 Large", "too_large"))) as server:
        assert [one.reason for one in stockade.Client(server.url, "x").map("a")] == ["too_large"]


def test_what_is_no_answer_of_a_service_is_an_error_that_says_so():
    junk = b"x" * (1 << 20)

    def endless(first: bytes) -> Callable[[str, bytes, socket.socket], object]:
        def answer(head: str, body: bytes, connection: socket.socket) -> None:
            connection.sendall(first)
            while True:
                connection.sendall(junk)

        return answer

    ndjson = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nContent-Length: 10000000000\r\n\r\n"
    for answer in (
        says(reply("200 OK", "text/html", b"<html>")),
        says(reply("200 OK", "application/json", b"[1]")),
        says(reply("200 OK", "application/json", {})),
        says(stream([1])),
        says(stream(ACCEPTED, {"type": "result", "result": {}})),
        says(b"SSH-2.0-OpenSSH_9.2\r\n"),
        endless(b"HTTP/1.1 200 OK\r\nX: "),
        endless(ndjson),
        endless(ndjson.replace(b"x-ndjson", b"json")),
    ):
        with Server(answer) as server:
            with pytest.raises(stockade.SandboxError) as error:
                stockade.Client(server.url, "sd_secret").run("print(1)")
            assert error.value.reason == "server_answer"
            assert len(server.heard) == 1
            assert "sd_secret" not in str(error.value)
    # The control.
    with Server(says(reply("200 OK", "application/json", ran()))) as server:
        assert stockade.Client(server.url, "x").run("print(1)").output == "1\n"


def test_the_key_goes_to_one_address_alone(tmp_path, monkeypatch):
    good = stream(ACCEPTED, {"type": "result", "result": ran()})
    with Server(says(good)) as other:
        for status in ("301 M", "302 F", "303 S", "307 T", "308 P"):
            moved = reply(status, "text/html", b"", f"Location: {other.url}/v1/run\r\n")
            with Server(says(moved)) as server, pytest.raises(stockade.SandboxError, match="does not get the key"):
                stockade.Client(server.url, "x").run("print(1)")
        monkeypatch.setenv("HTTP_PROXY", f"{other.url}")
        with Server(says(good)) as server:
            stockade.Client(server.url, "x").run("print(1)")
        assert other.heard == []
    for url in ("ftp://x", "localhost:1", "http://sd_x@h", "http://h/?a=1", "unix:s", "http://h:x"):
        with pytest.raises(stockade.BadRequest):
            stockade.Client(url, "x")
    with pytest.warns(UserWarning, match="unencrypted"):
        stockade.Client("http://192.0.2.1", "x")
    with pytest.raises(stockade.BadRequest, match="STOCKADE_KEY_FILE"):
        stockade.Client("http://127.0.0.1:1")
    path = tmp_path / "token"
    path.write_text("sd_x\n")
    path.chmod(0o644)
    with pytest.raises(stockade.BadRequest, match="chmod 600"):
        stockade.Client("http://127.0.0.1:1", key_file=path)
    path.chmod(0o600)
    monkeypatch.setenv("STOCKADE_KEY_FILE", str(path))
    assert stockade.Client("http://127.0.0.1:1")._address.key == "sd_x"


def test_a_service_by_tls_is_one_that_an_authority_vouches_for(tmp_path):
    def openssl(*words: object) -> None:
        subprocess.run(["openssl", *map(str, words)], cwd=tmp_path, check=True, capture_output=True)

    new = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj")
    openssl(*new, "/CN=authority", "-x509", "-days", "2", "-keyout", "ca.key", "-out", "ca.pem")
    openssl(*new, "/CN=own", "-keyout", "own.key", "-out", "own.csr")
    (tmp_path / "own.ext").write_text("subjectAltName = IP:127.0.0.1\n")
    signed = ("x509", "-req", "-in", "own.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial")
    openssl(*signed, "-days", "2", "-extfile", "own.ext", "-out", "own.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "own.pem", tmp_path / "own.key")
    with Server(says(stream(ACCEPTED, {"type": "result", "result": ran()})), context) as server:
        trusted = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
        assert stockade.Client(server.url, "x", ssl_context=trusted).run("print(1)").output == "1\n"
        for url, roots in ((server.url, None), (server.url.replace("127.0.0.1", "localhost"), trusted)):
            with pytest.raises(stockade.SandboxError) as error:
                stockade.Client(url, "x", ssl_context=roots).run("print(1)")
            assert error.value.reason == "server_not_trusted"
        assert len(server.heard) == 1


def test_the_readme_tells_the_truth_of_the_client_of_a_service(service, readme):
    before = f"""
import stockade
Client = stockade.Client
stockade.Client = lambda *_, **__: Client({service.url!r}, {service.key!r})
"""
    readme("## At a service", before)
