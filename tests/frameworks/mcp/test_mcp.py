"""`stockade mcp`, asked by the official Python client, by each way to begin that it knows."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from mcp import Client, StdioServerParameters, stdio_client
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, MODERN_PROTOCOL_VERSIONS

PROGRAM = os.environ["STOCKADE"]
# A red dot.
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
TOOLS = ["execute_code", "list_files", "read_file", "reset", "write_file"]


@asynccontextmanager
async def client(*options: str, mode: str = "auto", **variables: str) -> AsyncIterator[Client]:
    environment = {"HOME": os.environ["HOME"], **variables}
    server = StdioServerParameters(command=PROGRAM, args=["mcp", *options], env=environment)
    async with Client(stdio_client(server), mode=mode) as connected:
        yield connected


def words(result) -> str:
    return "\n".join(block.text for block in result.content if block.type == "text")


@pytest.mark.root_too
@pytest.mark.parametrize("mode", ["legacy", "auto", *MODERN_PROTOCOL_VERSIONS])
async def test_each_tool_over_each_way_to_begin(mode: str) -> None:
    async with client(mode=mode) as mcp:
        assert mcp.protocol_version == (
            HANDSHAKE_PROTOCOL_VERSIONS[-1] if mode == "legacy" else MODERN_PROTOCOL_VERSIONS[-1]
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


async def test_a_failed_program_is_data_and_what_was_not_run_is_an_error() -> None:
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
        for arguments in ({"code": "1", "language": "cobol"}, {"code": "1", "limits": {"wall": "10years"}}):
            refused = await mcp.call_tool("execute_code", arguments)
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


async def test_images_come_as_images_and_bytes_as_bytes() -> None:
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


async def test_code_is_cancelled_and_tells_that_it_runs() -> None:
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
    async with client() as mcp:
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
    async with client("--scratch", str(work_dir)) as mcp:
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


def test_nonsense_on_stdin_ends_nothing_but_itself() -> None:
    # Nothing of a request is needed to end: the end of stdin does.
    done = subprocess.run([PROGRAM, "mcp"], input="nonsense\n{}\n[]\n", capture_output=True, text=True, timeout=30)
    assert "panicked" not in done.stderr, done
    for line in done.stdout.splitlines():
        assert json.loads(line)["jsonrpc"] == "2.0"


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


def command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


async def test_a_model_gets_no_token_to_approve_itself(tmp_path: Path) -> None:
    code = "import subprocess; print(subprocess.run(['echo', 'ran'], capture_output=True, text=True).stdout)"
    async with client("--policy", "review", XDG_RUNTIME_DIR=str(tmp_path)) as mcp:
        refused = await mcp.call_tool("execute_code", {"code": code})
        assert not refused.is_error and "`approvers`" in words(refused)
        structured = refused.structured_content
        assert (structured["verdict"], structured["started"], "approval" in structured) == ("screened", False, False)
        assert {finding["action"] for finding in structured["findings"]} == {"approve"}
    async with client() as mcp:
        ran = await mcp.call_tool("execute_code", {"code": code})
        assert ran.structured_content["output"] == "ran\n\n"
