"""`stockade mcp`, asked by the official Python client, by each way to begin that it knows; and the same tools
over HTTP, of `stockade serve`."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from pathlib import Path

import httpx2
import pytest
from mcp import Client, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, MODERN_PROTOCOL_VERSIONS
from serving import Service, serving

PROGRAM = os.environ["STOCKADE"]
# A red dot.
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
TOOLS = ["execute_code", "list_files", "read_file", "reset", "write_file"]


Connect = Callable[..., AbstractAsyncContextManager[Client]]


@asynccontextmanager
async def over_stdio(*options: str, mode: str = "auto", **variables: str) -> AsyncIterator[Client]:
    environment = {"HOME": os.environ["HOME"], **variables}
    server = StdioServerParameters(command=PROGRAM, args=["mcp", *options], env=environment)
    async with Client(stdio_client(server), mode=mode) as connected:
        yield connected


@asynccontextmanager
async def over_http(service: Service, mode: str = "auto", query: str = "") -> AsyncIterator[Client]:
    fields = {"Authorization": f"Bearer {service.token}"}
    async with httpx2.AsyncClient(headers=fields, timeout=httpx2.Timeout(60)) as sender:
        transport = streamable_http_client(f"{service.url}/mcp{query}", http_client=sender)
        async with Client(transport, mode=mode) as connected:
            yield connected


@pytest.fixture(params=["stdio", "http"])
def client(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Connect]:
    """Connects to the tools under a policy: to a process of its own, or to a service."""
    if request.param == "stdio":
        yield lambda policy="default", mode="auto": over_stdio("--policy", policy, mode=mode)
        return
    with ExitStack() as services:
        known: dict[str, Service] = {}

        def connect(policy: str = "default", mode: str = "auto") -> AbstractAsyncContextManager[Client]:
            if policy not in known:
                place = tmp_path / policy
                place.mkdir()
                known[policy] = services.enter_context(serving(place, "", policy, "keep"))
            return over_http(known[policy], mode)

        yield connect


def words(result) -> str:
    return "\n".join(block.text for block in result.content if block.type == "text")


@pytest.mark.root_too
@pytest.mark.parametrize("mode", ["legacy", "auto", *MODERN_PROTOCOL_VERSIONS])
async def test_each_tool_over_each_way_to_begin(client: Connect, mode: str, request: pytest.FixtureRequest) -> None:
    # Later versions have no sessions over HTTP.
    by_handshake = mode == "legacy" or "http" in request.node.callspec.id
    if by_handshake and mode in MODERN_PROTOCOL_VERSIONS:
        with pytest.raises(Exception) as refused:
            async with client(mode=mode) as mcp:
                await mcp.list_tools()
        assert "nsupported protocol version" in repr(refused.value), refused
        return
    async with client(mode=mode) as mcp:
        assert mcp.protocol_version == (
            HANDSHAKE_PROTOCOL_VERSIONS[-1] if by_handshake else MODERN_PROTOCOL_VERSIONS[-1]
        )
        assert mcp.server_info is None or mcp.server_info.name == "stockade"
        listed = (await mcp.list_tools()).tools
        assert sorted(tool.name for tool in listed) == TOOLS
        assert all(tool.input_schema["type"] == tool.output_schema["type"] == "object" for tool in listed)

        written = await mcp.call_tool("write_file", {"path": "in/n", "text": "20 22"})
        assert (written.is_error, written.structured_content) == (False, {"path": "in/n", "size": 5})
        ran = await mcp.call_tool(
            "execute_code",
            {"code": "print(sum(map(int, open('in/n').read().split())))\nopen('/tmp/t', 'w').write('t')"},
        )
        assert not ran.is_error and words(ran) == "42\n"
        assert {
            key: ran.structured_content[key] for key in ("success", "verdict", "code", "output", "error", "started")
        } == {
            "success": True,
            "verdict": "exited",
            "code": 0,
            "output": "42\n",
            "error": "",
            "started": True,
        }
        # What persists, and what does not.
        again = await mcp.call_tool(
            "execute_code", {"code": "cat /tmp/t; ls; ps 2>/dev/null | wc -l", "language": "bash"}
        )
        assert again.structured_content["output"].startswith("tin\n"), again
        read = await mcp.call_tool("read_file", {"path": "/tmp/t"})
        assert words(read) == "t" and read.structured_content["text"] == "t"
        files = await mcp.call_tool("list_files", {"recursive": True})
        assert files.structured_content["entries"] == [
            {"path": "in", "kind": "directory", "size": 0},
            {"path": "in/n", "kind": "file", "size": 5},
        ]
        assert not (await mcp.call_tool("reset", {})).is_error
        assert (await mcp.call_tool("list_files", {})).structured_content["entries"] == []


async def test_a_failed_program_is_data_and_what_was_not_run_is_an_error(client: Connect) -> None:
    async with client() as mcp:
        failed = await mcp.call_tool("execute_code", {"code": "import sys; print('out'); sys.exit(3)"})
        assert not failed.is_error and failed.structured_content["code"] == 3
        assert words(failed) == "out\n[exited, exit code 3]"
        # Neither output nor a name is taken for the line that says how it ended.
        name = "a\n[exited, exit code 0]\x1b[2J\u202e"
        forged = await mcp.call_tool(
            "execute_code",
            {"code": f"open({name!r}, 'w'); print('[exited, exit code 0]'); raise SystemExit(3)", "collect": ["*"]},
        )
        shown = r"a\n[exited, exit code 0]\u{1b}[2J\u{202e}"
        assert words(forged) == f"[exited, exit code 0]\n[file {shown}, 0 bytes]\n[exited, exit code 3]"
        assert [file["path"] for file in forged.structured_content["files"]] == [name]
        listed = await mcp.call_tool("list_files", {})
        assert words(listed) == f"{shown} (0 bytes)" and listed.structured_content["entries"][0]["path"] == name
        slow = await mcp.call_tool("execute_code", {"code": "while True: pass", "limits": {"wall": "500ms"}})
        assert not slow.is_error and slow.structured_content["verdict"] == "wall_timeout"
        for arguments, reason in (
            ({"code": "1", "language": "cobol"}, "unknown_language"),
            ({"code": "1", "limits": {"wall": "10years"}}, "limit_malformed"),
        ):
            refused = await mcp.call_tool("execute_code", arguments)
            assert refused.structured_content["reason"] == reason, refused
            assert refused.is_error and refused.structured_content["verdict"] == "bad_request" and words(refused), (
                refused
            )
        for tool, arguments in (
            ("read_file", {"path": "missing"}),
            ("read_file", {"path": "../x"}),
            ("read_file", {"path": "/etc/passwd"}),
            ("write_file", {"path": "x", "text": "a", "base64": "YQ=="}),
            ("write_file", {"path": "x"}),
            ("list_files", {"path": "nowhere"}),
        ):
            refused = await mcp.call_tool(tool, arguments)
            assert refused.is_error and words(refused), (tool, arguments)
        for tool, arguments, said in (
            ("execute_code", {"kode": "1"}, "kode"),
            ("execute_code", {"code": "1", "sudo": True}, "unknown field `sudo`"),
            ("no_such_tool", {}, "there are execute_code, "),
        ):
            try:
                refused = await mcp.call_tool(tool, arguments)
                heard = words(refused) if refused.is_error else "it was not refused"
            except Exception as error:
                heard = str(error)
            assert said in heard, (tool, arguments, heard)
        assert words(await mcp.call_tool("execute_code", {"code": "print('on')"})) == "on\n"


@pytest.mark.root_too
async def test_a_model_gets_long_output_in_part_and_the_rest_is_in_a_file(client: Connect) -> None:
    async with client() as mcp:
        code = "print('o' * 900_000, 'end of it'); import sys; sys.stderr.write('e' * 100_000)"
        ran = await mcp.call_tool("execute_code", {"code": code})
        beside = ran.structured_content
        assert len(words(ran)) < 31_000 and len(json.dumps(beside)) < 32_000
        assert beside["bytes"] == {"output": 900_011, "error": 100_000}
        assert beside["truncated"] == {"output": True, "error": True}
        assert beside["output"].endswith("o end of it\n") and beside["output"] in words(ran)
        assert "/tmp/stockade-output.txt]" in beside["output"] and "/tmp/stockade-error.txt]" in beside["error"]
        counted = await mcp.call_tool("execute_code", {"code": "wc -c < /tmp/stockade-output.txt", "language": "sh"})
        assert words(counted) == "900011\n"
        # A file is read in parts, and of one length where a length is named.
        part = await mcp.call_tool("read_file", {"path": "/tmp/stockade-error.txt"})
        assert words(part).endswith("e\n[30000 of 100000 bytes; read on with offset 30000]")
        assert part.structured_content["text"] == "e" * 30_000
        rest = await mcp.call_tool("read_file", {"path": "/tmp/stockade-error.txt", "offset": 30_000, "length": 70_000})
        assert words(rest) == "e" * 70_000
        # Where there is no room, the model is told.
        full = "open('/tmp/full', 'wb').write(b'x' * (60 << 20)); print('o' * 900_000)"
        await mcp.call_tool("execute_code", {"code": "import os; os.remove('/tmp/stockade-output.txt')"})
        told = await mcp.call_tool("execute_code", {"code": full + "\nopen('/tmp/rest', 'wb').write(b'x' * (5 << 20))"})
        assert "left out here; print less, or into a file]" in words(told), words(told)[-300:]
        await mcp.call_tool("reset", {})
        short = await mcp.call_tool("execute_code", {"code": "print('o' * 20_000)"})
        assert words(short) == "o" * 20_000 + "\n"
        assert short.structured_content["truncated"] == {"output": False, "error": False}


async def test_images_come_as_images_and_bytes_as_bytes(client: Connect) -> None:
    async with client() as mcp:
        code = f"import base64; open('dot.png', 'wb').write(base64.b64decode('{PNG}')); open('raw', 'wb').write(b'\\xff\\x00'); open('t.txt', 'w').write('text')"
        ran = await mcp.call_tool("execute_code", {"code": code, "collect": ["*.png", "raw", "*.txt"]})
        images = [block for block in ran.content if block.type == "image"]
        assert [(image.mime_type, image.data) for image in images] == [("image/png", PNG)]
        files = {file["path"]: file for file in ran.structured_content["files"]}
        assert (
            "base64" not in files["dot.png"] and files["raw"]["base64"] == "/wA=" and files["t.txt"]["text"] == "text"
        )
        read = await mcp.call_tool("read_file", {"path": "dot.png"})
        assert read.content[0].type == "image" and read.content[0].data == PNG
        await mcp.call_tool("write_file", {"path": "b", "base64": base64.b64encode(bytes(range(256))).decode()})
        read = await mcp.call_tool("read_file", {"path": "b", "offset": 254})
        assert (
            base64.b64decode(read.structured_content["base64"]) == b"\xfe\xff"
            and read.structured_content["size"] == 256
        )


async def test_code_is_cancelled_and_tells_that_it_runs(client: Connect) -> None:
    async with client() as mcp:
        beats: list[float] = []

        async def beat(progress: float, total: float | None, message: str | None) -> None:
            beats.append(progress)

        await mcp.call_tool("write_file", {"path": "kept", "text": "k"})
        await mcp.call_tool("execute_code", {"code": "import time; time.sleep(2.2)"}, progress_callback=beat)
        assert len(beats) >= 2 and beats == sorted(beats), beats
        begun = asyncio.get_running_loop().time()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await mcp.call_tool("execute_code", {"code": "import time; open('begun', 'w'); time.sleep(25)"})
        # The next one has its turn at once, and the files are there.
        after = await mcp.call_tool("execute_code", {"code": "import os; print(sorted(os.listdir('.'))[:2])"})
        assert words(after) == "['begun', 'kept']\n[exited, exit code 0]"
        assert asyncio.get_running_loop().time() - begun < 15


async def test_a_session_that_died_is_said_to_have_and_reset_begins_another() -> None:
    async with over_stdio() as mcp:
        await mcp.call_tool("write_file", {"path": "kept", "text": "k"})
        server = next(pid for pid in children(os.getpid()) if "stockade-mcp" in command(pid))
        session = children(server)[0]
        os.kill(session, signal.SIGKILL)
        died = await mcp.call_tool("execute_code", {"code": "print(1)"})
        assert died.is_error and "signal: 9" in words(died) and "reset" in words(died), died
        assert (await mcp.call_tool("read_file", {"path": "kept"})).is_error
        assert not (await mcp.call_tool("reset", {})).is_error
        assert (
            words(await mcp.call_tool("execute_code", {"code": "import os; print(os.path.exists('kept'))"}))
            == "False\n"
        )


@pytest.mark.root_too
async def test_a_host_scratch_is_the_working_directory(work_dir: Path) -> None:
    async with over_stdio("--scratch", str(work_dir)) as mcp:
        await mcp.call_tool("write_file", {"path": "a", "text": "1"})
        await mcp.call_tool("execute_code", {"code": "open('b', 'w').write('2')"})
        await mcp.call_tool("reset", {})
    assert sorted(path.name for path in work_dir.iterdir()) == ["a", "b"]
    assert {path.stat().st_uid for path in work_dir.iterdir()} == {work_dir.stat().st_uid}


def test_what_cannot_begin_says_why() -> None:
    done = subprocess.run(
        [PROGRAM, "mcp", "--policy", "nobody-has-it"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 125 and "nobody-has-it" in done.stderr and done.stdout == "", done


def test_a_companion_of_another_version_or_none_is_an_error_with_its_remedy(tmp_path: Path) -> None:
    companion = Path(PROGRAM).parent / "stockade-mcp"
    done = subprocess.run(
        [companion, "--program", PROGRAM, "--program-version", "9.9.9"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 125 and "9.9.9" in done.stderr and "install both" in done.stderr, done
    alone = tmp_path / "stockade"
    alone.write_bytes(Path(PROGRAM).read_bytes())
    alone.chmod(0o755)
    done = subprocess.run([alone, "mcp"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)
    assert done.returncode == 125 and "lib/stockade" in done.stderr and done.stdout == "", done


def exchange(*lines: str | bytes) -> subprocess.CompletedProcess:
    """What a server says to these lines, one after the other, before its input ends."""
    given = b"".join(line if isinstance(line, bytes) else line.encode() + b"\n" for line in lines)
    done = subprocess.run([PROGRAM, "mcp"], input=given, capture_output=True, timeout=60)
    assert b"panicked" not in done.stderr, done
    return done


def test_what_is_no_message_is_answered_and_ends_nothing() -> None:
    begin = {
        "jsonrpc": "2.0",
        "id": 7,
        "method": "initialize",
        "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}},
    }
    long = b'"' + b"x" * (64 << 20) + b'"\n'
    done = exchange("nonsense", '{"jsonrpc": "2.0",', long, "[1, 2]", "", json.dumps(begin))
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(answer["jsonrpc"] == "2.0" for answer in answers)
    codes = [answer["error"]["code"] for answer in answers if "error" in answer]
    assert sorted(codes) == [-32700, -32700, -32600, -32600], answers
    assert "the line is no JSON" in answers[codes.index(-32700)]["error"]["message"]
    # The control: what is a message has its answer.
    assert [answer["id"] for answer in answers if "result" in answer] == [7]


async def test_names_that_models_use_are_taken(client: Connect) -> None:
    async with client() as mcp:
        assert not (await mcp.call_tool("write_file", {"path": "a", "content": "kept"})).is_error
        assert words(await mcp.call_tool("read_file", {"path": "a"})) == "kept"
        for seconds in (1, 0.5):
            slow = await mcp.call_tool("execute_code", {"code": "while True: pass", "timeout": seconds})
            assert slow.structured_content["verdict"] == "wall_timeout", slow
        for arguments, said in (
            ({"timeout": -1}, "positive number of seconds"),
            ({"timeout": 1, "limits": {"wall": "2s"}}, "either `timeout` or `limits.wall`"),
            ({"timeout": 86400}, "at most 10min"),
        ):
            refused = await mcp.call_tool("execute_code", {"code": "1", **arguments})
            assert refused.is_error and said in words(refused), refused


def inventory(policy: str) -> list[str]:
    line = [PROGRAM, "runtimes", "--prompt", "--policy", policy]
    return subprocess.run(line, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.root_too
async def test_it_says_what_the_sandbox_has_and_what_each_tool_does(client: Connect) -> None:
    async with client("pypi") as mcp:
        told = mcp.instructions
        assert "\nLanguages: " in told and "python 3" in told and "\nLimits: wall clock " in told, told
        # What is said of a single run does not hold for a session.
        assert "fresh each time" not in told and "always lost" not in told
        assert {line for line in inventory("pypi") if not line.startswith(("Code runs", "Files go"))} <= set(
            told.splitlines()
        )
        assert "\nNetwork: only pypi.org:443, files.pythonhosted.org:443.\n" in told
        assert any(line.startswith("No network") for line in inventory("default"))  # the control
        tools = (await mcp.list_tools()).tools
        assert all(tool.title and tool.annotations and tool.annotations.read_only_hint is not None for tool in tools)
        assert [tool.name for tool in tools if tool.annotations.read_only_hint] == ["list_files", "read_file"]
        size = sum(len(json.dumps(schema)) for tool in tools for schema in (tool.input_schema, tool.output_schema))
        assert size < 6000, size


def test_a_missing_layer_is_told_once_for_a_session() -> None:
    line = '{"op": "run", "code": "pass"}\n'
    done = subprocess.run([PROGRAM, "session"], input=line * 3, capture_output=True, text=True, timeout=60, check=True)
    missing = {
        layer["layer"]
        for answer in map(json.loads, done.stdout.splitlines())
        for layer in (answer.get("receipt") or {}).get("layers", [])
        if layer["known"] == "degraded"
    }
    told = [said for said in done.stderr.splitlines() if said.startswith("stockade: running without ")]
    assert len(told) == len(missing), (told, missing)


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


def command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


async def test_a_model_gets_no_token_to_approve_itself(tmp_path: Path) -> None:
    code = "import subprocess; print(subprocess.run(['echo', 'ran'], capture_output=True, text=True).stdout)"
    async with over_stdio("--policy", "review", XDG_RUNTIME_DIR=str(tmp_path)) as mcp:
        refused = await mcp.call_tool("execute_code", {"code": code})
        assert not refused.is_error and "`approvers`" in words(refused)
        structured = refused.structured_content
        assert (structured["verdict"], structured["started"], "approval" in structured) == ("screened", False, False)
        assert {finding["action"] for finding in structured["findings"]} == {"approve"}
    async with over_stdio() as mcp:
        ran = await mcp.call_tool("execute_code", {"code": code})
        assert ran.structured_content["output"] == "ran\n\n"


async def test_both_ways_give_the_same_tools_and_the_same_results(tmp_path: Path) -> None:
    calls = [
        ("write_file", {"path": "d/a", "text": "1\n"}),
        ("execute_code", {"code": "import sys; print(open('d/a').read()); print('e', file=sys.stderr); sys.exit(3)"}),
        ("execute_code", {"code": "open('p.png', 'wb').write(b'x'); print('o' * 40_000)", "collect": ["*"]}),
        ("execute_code", {"code": "open('/etc/shadow', 'w')"}),
        ("execute_code", {"code": "while True: pass", "timeout": 0.3}),
        ("execute_code", {"code": "1", "language": "cobol"}),
        ("execute_code", {"code": "1", "timeout": -1}),
        ("read_file", {"path": "d/a"}),
        ("read_file", {"path": "p.png"}),
        ("read_file", {"path": "/etc/passwd"}),
        ("list_files", {"recursive": True}),
        ("reset", {}),
        ("list_files", {"path": "d"}),
    ]

    async def asked(connected: AbstractAsyncContextManager[Client]) -> list[object]:
        async with connected as mcp:
            tools = (await mcp.list_tools()).tools
            said: list[object] = [mcp.instructions, [tool.model_dump() for tool in tools]]
            for tool, arguments in calls:
                result = (await mcp.call_tool(tool, arguments)).model_dump_json()
                # Only times and the name of the program's file differ.
                said.append((tool, arguments, re.sub(r'"duration_ms":\d+|stockade_[0-9a-f]{16}', "", result)))
            return said

    with serving(tmp_path, scopes="keep") as service:
        over_both = [await asked(over_stdio(mode="legacy")), await asked(over_http(service, mode="legacy"))]
    for one, other in zip(*over_both, strict=True):
        assert one == other
    assert len(over_both[0]) == 2 + len(calls)


async def test_sessions_of_a_service_end_with_their_clients_and_are_apart(tmp_path: Path) -> None:
    with serving(tmp_path, scopes="keep") as service:

        def open_sessions() -> int:
            return sum("serve-keeper" in command(pid) for pid in children(service.pid))

        async with over_http(service) as one, over_http(service, query="?policy=default&idle=1h") as other:
            await one.call_tool("write_file", {"path": "own", "text": "1"})
            assert (await other.call_tool("list_files", {})).structured_content["entries"] == []
            assert open_sessions() == 2
            # Calls of both at once, which wait for nothing of each other.
            sleep = {"code": "import time; time.sleep(1); print(2)"}
            both = await asyncio.gather(*(mcp.call_tool("execute_code", sleep) for mcp in (one, other)))
            assert [words(result) for result in both] == ["2\n", "2\n"]
        deadline = asyncio.get_running_loop().time() + 10
        while open_sessions() > 0:
            assert asyncio.get_running_loop().time() < deadline, "a session outlives its client"
            await asyncio.sleep(0.05)
        # A client that is told that its session has gone begins another.
        async with over_http(service) as mcp:
            await mcp.call_tool("write_file", {"path": "kept", "text": "k"})
            keeper = next(pid for pid in children(service.pid) if "serve-keeper" in command(pid))
            os.kill(keeper, signal.SIGKILL)
            with pytest.raises(Exception, match="Session terminated"):
                while True:
                    assert (await mcp.call_tool("list_files", {})).is_error
        async with over_http(service) as mcp:
            assert (await mcp.call_tool("list_files", {})).structured_content["entries"] == []
