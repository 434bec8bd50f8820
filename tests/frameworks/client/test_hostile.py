"""The client against servers that misbehave: whatever they answer, it raises its own errors, and ends."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from scripted import ACCEPTED, Server, encoded, ran, refused, reply, says, stream

import stockade
from stockade import _answer, _result, _wire

JSON, EVENTS, PROBLEM = "application/json", "application/x-ndjson", "application/problem+json"
DEEP = b"[" * 100_000 + b"]" * 100_000
#: What is no JSON, or none that can be read.
NO_JSON = {
    "words": b"<html>",
    "too deep": DEEP,
    "too deep within": b'{"a":' + DEEP + b"}",
    "not closed": b"{" * 100_000,
    "not UTF-8": b'{"a": "\xff"}',
    "half a pair": b'{"a": "\\ud800"}',
    "no number": b'{"a": NaN}',
    "long number": b'{"a": ' + b"9" * 100_000 + b"}",
    "a list": b"[1]",
    "nothing": b"",
}
#: Values that a member may have in place of its own.
ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    5,
    1e999,
    "",
    "abc",
    "\xe9",
    [],
    [7],
    [None],
    [[]],
    {},
    {"a": 1},
    {"output": []},
)


def client(server: Server, **options: Any) -> stockade.Client:
    return stockade.Client(server.url, "sd_secret", **{"retries": 0, **options})


def outcome(work: Callable[[], Any]) -> tuple[str, bool]:
    """The reason of the error, which is one of this package, and whether code may have run."""
    with pytest.raises(stockade.SandboxError) as caught:
        work()
    assert type(caught.value) is stockade.SandboxError
    words = str(caught.value)
    assert words
    assert "sd_secret" not in words
    assert "Error" not in words, "it has no words but Python's"
    assert caught.value.result is not None
    assert caught.value.result.reason == caught.value.reason
    return caught.value.reason, caught.value.result.started


def ways(server: Server) -> Iterator[Callable[[], Any]]:
    """A run, and one in asyncio."""
    yield lambda: client(server).run("1")
    yield lambda: asyncio.run(stockade.AsyncClient(server.url, "sd_secret", retries=0).run("1"))


def reason_in_map(server: Server, programs: int = 1) -> list[str | None]:
    """What became of programs, in both colours alike."""
    results = client(server).map(["1"] * programs)
    again = asyncio.run(stockade.AsyncClient(server.url, "sd_secret", retries=0).map(["1"] * programs))
    assert [one.reason for one in again] == [one.reason for one in results]
    assert all(str(one.verdict) == ("sandbox_error" if one.reason else "exited") for one in results)
    return [one.reason for one in results]


@pytest.mark.parametrize("name", NO_JSON)
def test_what_is_no_json_is_an_error_wherever_it_stands(name: str):
    text = NO_JSON[name] + b"\n"
    for answer, may_have_run in (
        (reply("200 OK", JSON, text), True),
        (stream(ACCEPTED) + text, True),
        (reply("500 No", PROBLEM, text), True),
        (reply("403 No", PROBLEM, text), False),
    ):
        with Server(says(answer)) as server:
            for work in ways(server):
                assert outcome(work) == ("server_answer", may_have_run)
            assert reason_in_map(server) == ["server_answer"]
            with pytest.raises(stockade.SandboxError, match="not that of stockade serve"):
                client(server).runs()
    # The control: the same server, with what is read.
    good = json.dumps({"type": "result", "result": ran(), "a": [[[9]], "\U0001f600"]}).encode()
    assert b"\\ud83d\\ude00" in good
    with Server(says(stream(ACCEPTED) + good + b"\n")) as server:
        assert [work().output for work in ways(server)] == ["1\n"] * 2


def test_members_of_a_problem_that_are_of_another_type_count_as_absent():
    for status in ("abc", [1], 1e999, -1e999, True, None, {}, -5, 10**30, 1.5):
        members = {"reason": "x", "status": status, "detail": [1], "title": "of the title", "started": 0}
        text = encoded(members)
        with Server(says(reply("500 No", PROBLEM, text))) as server:
            for work in ways(server):
                assert outcome(work) == ("x", True)
            with pytest.raises(stockade.SandboxError, match="of the title"):
                client(server).run("1")
        problem = b'{"type": "problem", "index": 0, "problem": ' + text + b"}\n"
        with Server(says(stream() + problem)) as server:
            assert outcome(next(ways(server))) == ("x", True)
            assert reason_in_map(server) == ["x"]
    for odd in (*ODD, {"reason": 5}, {"reason": ["x"]}, {"reason": ""}):
        lines = ({"type": "problem", "index": 0, "problem": odd}, {"type": "end"})
        with Server(says(reply("500 No", PROBLEM, odd))) as server:
            assert outcome(next(ways(server))) == ("server_answer", True)
        with Server(says(stream(*lines))) as server:
            assert outcome(next(ways(server))) == ("server_answer", True)
            assert reason_in_map(server) == ["server_answer"]
    # The control: of the right type, they count.
    with Server(says(refused("500 No", "x"))) as server:
        assert outcome(next(ways(server))) == ("x", False)
        assert len(server.heard) == 1
        with pytest.raises(stockade.SandboxError, match="later"):
            client(server, retries=1).run("1")
        assert len(server.heard) == 3
    with Server(says(refused("403 No", "x"))) as server, pytest.raises(stockade.SandboxError):
        client(server, retries=1).run("1")
    assert len(server.heard) == 1


def test_events_that_are_odd_are_errors():
    heard: list[str] = []
    for event in (
        {"type": "accepted", "run": ["x"]},
        {"type": "accepted"},
        {"type": "accepted", "run": "../../x"},
        {"type": "accepted", "run": "\xe9"},
        {"type": "accepted", "run": "0" * 100},
        {"type": "stdout", "text": 5},
        {"type": "stdout", "base64": "\xe9"},
        {"type": "stdout", "base64": "a"},
        *({"type": "result", "result": odd} for odd in ODD),
    ):
        with Server(says(stream({"seq": 1, **event}))) as server:
            for listen in (
                lambda: client(server).run("1", on_stdout=heard.append),
                lambda: asyncio.run(stockade.AsyncClient(server.url, "x", retries=0).run("1", on_stdout=heard.append)),
            ):
                assert outcome(listen) == ("server_answer", True), event
            assert len(server.heard) == 2
    assert heard == []
    # The control. What it does not know, it leaves out.
    odd = [{"type": kind, "seq": kind, "text": "no"} for kind in ODD]
    output = [{"type": "stdout", "text": "a"}, {"type": "stdout", "base64": "/w=="}]
    with Server(says(stream(ACCEPTED, *odd, *output, {"type": "result", "result": ran()}))) as server:
        assert client(server).run("1", on_stdout=heard.append).output == "1\n"
    assert heard == ["a", "\ufffd"]


def test_a_result_has_the_types_that_it_declares_or_is_none():
    code = "import urllib.request as u\nopen('a', 'w').write('1')\nu.urlopen('https://example.com')"
    real = dict(stockade.run(code, collect=["a"], id="a", labels={"x": "y"}).raw)
    for member, one in (("denials", "kind"), ("findings", "rule"), ("files", "path")):
        assert real[member][0][one]
    real["compile"] = {"output": "", "error": "", "code": 0, "verdict": "exited", "duration_ms": 1}
    real["approval"] = {"token": "t", "seconds_left": 1, "approvers": ["a"]}
    # The control: as it is, it is read, whatever a later version adds.
    assert _result.parse({**real, "later": 1}).labels == {"x": "y"}
    seen = {"read": 0, "refused": 0}
    for place, odd in itertools.product(places(real), ODD):
        changed = copy.deepcopy(real)
        at = changed
        for step in place[:-1]:
            at = at[step]
        at[place[-1]] = odd
        try:
            result = _result.parse(changed)
        except ValueError as error:
            assert not isinstance(error, UnicodeError), (place, odd)
            assert len(str(error)) > 10, (place, odd)
            seen["refused"] += 1
            continue
        assert _result._is_of(result.denials, tuple[_result.Denial, ...])
        for text in (repr(result), result._repr_html_(), result.for_model()):
            assert isinstance(text, str)
        seen["read"] += 1
    assert min(seen.values()) > 300, seen


def places(value: Any) -> Iterator[tuple[Any, ...]]:
    """The way to each member of an object, and to those of its members."""
    members = value.items() if isinstance(value, dict) else enumerate(value[:2])
    for name, inner in members:
        yield (name,)
        if isinstance(inner, (dict, list)):
            yield from ((name, *rest) for rest in places(inner))


def test_a_batch_keeps_what_was_understood():
    with Server(
        says(
            stream(
                {"index": 2, "result": ran()},
                {"index": True, "result": ran()},
                {"index": 0, "result": ran()},
            )
        )
    ) as server:
        assert reason_in_map(server, 3) == ["server_answer", "server_answer", None]
    odd = {"verdict": [1]}
    lines = (
        {"index": 1, "result": odd},
        {"index": 10**30, "result": odd},
        {"index": -1},
        {"index": 0, "result": ran()},
    )
    with Server(says(stream(*lines, {"type": "end"}))) as server:
        assert reason_in_map(server, 2) == [None, "server_answer"]
    # The control.
    lines = ({"index": 1, "result": ran()}, {"index": 0, "result": ran()})
    with Server(says(stream(*lines, {"type": "end"}))) as server:
        assert reason_in_map(server, 2) == [None, None]


def test_lists_of_runs_and_cancellations_are_read_as_carefully():
    for odd in ODD:
        if odd != []:
            with Server(says(reply("200 OK", JSON, {"runs": odd}))) as server:
                with pytest.raises(stockade.SandboxError, match="no list of runs"):
                    client(server).runs()
                with pytest.raises(stockade.SandboxError, match="no list of runs"):
                    asyncio.run(stockade.AsyncClient(server.url, "x").runs())
        with Server(says(reply("500 No", PROBLEM, odd))) as server:
            with pytest.raises(stockade.SandboxError, match=r"without a reason|no JSON object"):
                client(server).cancel("00aa")
            with pytest.raises(stockade.SandboxError, match=r"without a reason|no JSON object"):
                asyncio.run(stockade.AsyncClient(server.url, "x").cancel("00aa"))
    # The control.
    with Server(says(reply("200 OK", JSON, {"runs": [{"run": "00aa"}]}))) as server:
        assert client(server).runs() == [{"run": "00aa"}]
        assert client(server).cancel("00aa")
    with Server(says(refused("404 No", "no_such_run"))) as server:
        assert not client(server).cancel("00aa")
        with pytest.raises(stockade.BadRequest):
            client(server).cancel("\xe9")


def endless(first: bytes, then: bytes, pause: float = 0.0) -> Callable[[str, bytes, socket.socket], object]:
    def answer(head: str, body: bytes, connection: socket.socket) -> None:
        connection.sendall(first)
        while True:
            connection.sendall(then)
            time.sleep(pause)

    return answer


OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


def as_stream(head: bytes) -> bytes:
    return head.replace(b"application/json", b"application/x-ndjson")


def chunk(data: bytes, extension: bytes = b"") -> bytes:
    return b"%x%s\r\n%s\r\n" % (len(data), extension, data)


@pytest.mark.parametrize("ok", [OK, as_stream(OK)], ids=["an object", "a stream"])
def test_what_breaks_the_rules_of_http_is_an_error_that_says_so(ok: bytes):
    many = b"X: y\r\n" * 1000
    chunked = ok + b"Transfer-Encoding: chunked\r\n\r\n"
    for answer, words in (
        (endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n"), "interim"),
        (endless(b"", b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"), "interim"),
        (endless(b"HTTP/1.1 ", b"2" * 1000), "first line"),
        (endless(ok, many), "head has more than 100 lines"),
        (endless(ok + b"X: ", b"y" * 1000), "head is too long"),
        (endless(ok, b"X: " + b"y" * 1000 + b"\r\n"), "head is too long"),
        (endless(chunked + chunk(b"{}") + b"0\r\n", many), "trailer has more than 100 lines"),
        (endless(chunked + chunk(b"{}") + b"0\r\nX: ", b"y" * 1000), "trailer is too long"),
        (endless(chunked, b"0" * 1000), "size of a chunk"),
        (endless(chunked + b"1;", b"y" * 1000), "size of a chunk"),
        (endless(chunked + b"-1\r\n", b"y" * 1000), "size of a chunk"),
        (says(chunked + b"-5\r\nhello\r\n"), "size of a chunk"),
        (says(chunked + b"ten\r\n"), "size of a chunk"),
        (says(chunked + b"\r\n"), "size of a chunk"),
        (says(chunked + b"1\r\n{}\r\n0\r\n\r\n"), "chunk"),
        (says(ok + b"Transfer-Encoding: gzip\r\n\r\n{}"), "transfer encoding"),
        (says(ok + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"), "transfer encoding"),
        (says(ok + b"Content-Length: -1\r\n\r\n{}"), "Content-Length"),
        (says(ok + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}"), "Content-Length"),
        (says(ok + b"Content-Length: \xb2\r\n\r\n{}"), "Content-Length"),
        (says(ok + b"no field\r\n\r\n{}"), "no field"),
        (says(ok + b" folded: a\r\n\r\n{}"), "no field"),
        (says(b"\r\n\r\n"), "begin"),
        (says(b"\0" * 5000), "first line"),
        (says(b"HTTP/2 200 OK\r\n\r\n"), "begin"),
        (says(b"HTTP/1.1 2000 OK\r\n\r\n"), "begin"),
        (says(b"HTTP/1.1 099 OK\r\n\r\n"), "begin"),
        (says(b"HTTP/1.1 101 Switching\r\n\r\n"), "no type|interim"),
        (says(b"HTTP/1.1 302 F\r\nLocation: \x1b[31m" + b"x" * 5000 + b"\r\n\r\n"), "leads to  .31mx{190,200}, which"),
    ):
        with Server(answer) as server:
            begun = time.monotonic()
            for work in ways(server):
                assert outcome(work)[0] == "server_answer", words
            with pytest.raises(stockade.SandboxError, match=words):
                client(server).run("1")
            assert reason_in_map(server) == ["server_answer"], words
            with pytest.raises(stockade.SandboxError, match=words):
                client(server).runs()
            assert time.monotonic() - begun < 20


def test_what_http_allows_is_read():
    result = json.dumps(ran()).encode()
    halves = chunk(result[:7], b" ; a=b") + chunk(result[7:], b";c") + b"000\r\nExpires: x\r\n\r\n"
    for answer in (
        CHUNKED + halves,
        CHUNKED.replace(b"chunked", b"Chunked") + halves,
        OK + b"\r\n" + result,
        (OK + b"\r\n").replace(b"\r\n", b"\n") + result,
        OK.replace(b"1.1 200 OK", b"1.0 200") + b"X:\r\nX: \xe9\t\r\n\r\n" + result,
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nLink: x\r\n\r\n" + OK + b"\r\n" + result,
        OK + b"X: y\r\n" * 98 + b"X: " + b"y" * 60_000 + b"\r\n\r\n" + result,
        OK + b"Content-Length: %d\r\n\r\n%s, and more" % (len(result), result),
    ):
        for parts in ([answer], [bytes([byte]) for byte in answer] if len(answer) < 1000 else []):
            if parts:
                with Server(
                    lambda head, body, connection, parts=parts: [connection.sendall(part) for part in parts]
                ) as server:
                    assert [work().output for work in ways(server)] == ["1\n"] * 2
    events = b"".join(json.dumps(one).encode() + b"\n" for one in (ACCEPTED, {"type": "result", "result": ran()}))
    for size in (1, 3, len(events)):
        body = b"".join(chunk(events[at : at + size]) for at in range(0, len(events), size))
        with Server(says(as_stream(CHUNKED) + body)) as server:
            assert client(server).run("1").output == "1\n"


def test_what_breaks_off_is_lost():
    for answer in (
        b"HTTP/1.1 200",
        OK,
        OK + b"Content-Length: 100\r\n\r\n{}",
        CHUNKED + b"5",
        CHUNKED + b"5\r\n{}",
        CHUNKED + chunk(b"{}"),
        CHUNKED + chunk(b"{}") + b"0\r\nX: y",
        b"HTTP/1.1 100 Continue\r\n\r\n",
    ):
        with Server(says(answer)) as server:
            for work in ways(server):
                assert outcome(work) == ("server_lost", True), answer
        with Server(says(as_stream(answer))) as server:
            for work in ways(server):
                assert outcome(work) == ("server_lost", True), answer
            assert reason_in_map(server) == ["server_lost"], answer


@contextmanager
def short_times(monkeypatch: pytest.MonkeyPatch, head: float, whole: float) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(_answer, "HEAD_TIMEOUT", head)
        patch.setattr(_wire, "HEAD_TIMEOUT", head)
        patch.setattr(_wire, "WHOLE_TIMEOUT", whole)
        yield


def test_what_comes_bit_by_bit_has_a_time_in_all(monkeypatch: pytest.MonkeyPatch):
    # Each byte comes long before the server counts as silent.
    slow = {
        "a head": endless(OK + b"X: ", b"y", 0.1),
        "its fields": endless(OK, b"X: y\r\n", 0.1),
        "interim answers": endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n", 0.3),
        "trailers": endless(CHUNKED + chunk(b"{}") + b"0\r\nX: ", b"y", 0.1),
        "a problem": endless(b"HTTP/1.1 500 No\r\nContent-Type: application/problem+json\r\n\r\n", b" ", 0.1),
        "an object": endless(OK + b"\r\n", b" ", 0.1),
        "empty chunks": endless(CHUNKED, b"1\r\n \r\n", 0.1),
    }

    def ends(name: str) -> None:
        with Server(slow[name]) as server:
            for work in ways(server):
                begun = time.monotonic()
                assert outcome(work) == ("server_lost", True), name
                assert 0.9 < time.monotonic() - begun < 8, name
            with pytest.raises(stockade.SandboxError, match="went away"):
                client(server).runs()
            if name in ("a head", "interim answers", "a problem"):
                assert reason_in_map(server) == ["server_lost"], name
                with pytest.raises(stockade.SandboxError, match="went away"):
                    client(server).cancel("00aa")

    with short_times(monkeypatch, head=1, whole=1.5):
        with ThreadPoolExecutor(len(slow)) as threads:
            assert list(threads.map(ends, slow)) == [None] * len(slow)

        # The controls: a head that comes bit by bit in time, and a stream that takes longer.
        def in_time(head: str, body: bytes, connection: socket.socket) -> None:
            for byte in OK[:5]:
                connection.sendall(bytes([byte]))
                time.sleep(0.1)
            connection.sendall(as_stream(OK)[5:] + b"\r\n")
            for seq in range(2, 20):
                connection.sendall(json.dumps({"type": "heartbeat", "seq": seq}).encode() + b"\n")
                time.sleep(0.1)
            line = json.dumps({"type": "result", "index": 0, "result": ran()}).encode() + b"\n"
            for part in (line[:9], line[9:]):
                connection.sendall(part)
                time.sleep(0.1)

        with Server(in_time) as server:
            begun = time.monotonic()
            assert client(server).run("1").output == "1\n"
            assert time.monotonic() - begun > 1.8
    # The control: with the usual times, the same server is still listened to.
    with Server(slow["a head"]) as server:
        assert asyncio.run(still_waits(server, 3))


async def still_waits(server: Server, seconds: float) -> bool:
    """Whether a run is still awaited after this time. It is cancelled then."""
    task = asyncio.ensure_future(stockade.AsyncClient(server.url, "x", retries=0).run("1"))
    done, _ = await asyncio.wait([task], timeout=seconds)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return not done


def test_one_object_may_be_so_long_and_no_longer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_wire, "MAX_OBJECT", 2 << 20)
    for size, is_read in ((1 << 20, True), (3 << 20, False)):
        text = json.dumps({**ran(), "later": "x" * size}).encode()
        line = b'{"type": "result", "index": 0, "result": ' + text + b"}\n"
        for answer in (reply("200 OK", JSON, text), stream(ACCEPTED) + line):
            with Server(says(answer)) as server:
                if is_read:
                    assert client(server).run("1").output == "1\n"
                else:
                    assert outcome(next(ways(server))) == ("server_answer", True)
        with Server(says(stream() + line)) as server:
            assert reason_in_map(server) == [None if is_read else "server_answer"]
