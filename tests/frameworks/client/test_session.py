"""Sessions: what persists, what ends, and what a call that is ended early leaves behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import stockade

pytestmark = pytest.mark.root_too


def test_files_persist_and_processes_do_not(running):
    with stockade.Session() as session:
        assert session.run("open('n', 'w').write('1'); open('/tmp/t', 'w').write('2')").success
        begun = session.run("setsid sleep 300 7.5 & echo $!", language="sh")
        assert begun.success
        read = session.run("print(open('n').read(), open('/tmp/t').read())")
        assert read.output == "1 2\n"
        assert not running("300\x007.5")
        # A variable is not a file.
        assert session.run("x = 1").success
        assert "NameError" in session.run("print(x)").error


def test_files_are_written_and_read_byte_for_byte():
    with stockade.Session() as session:
        assert session.write_file("d/a.bin", b"\x00\xff\r\n") == 4
        assert session.write_file("d/a.bin", "é", append=True) == 6
        assert session.read_file("d/a.bin") == b"\x00\xff\r\n\xc3\xa9"
        assert session.run("print(open('d/a.bin', 'rb').read())").output == "b'\\x00\\xff\\r\\n\\xc3\\xa9'\n"
        session.write_file(f"{session.home}/h", "")
        assert session.read_file(f"{session.home}/h") == b""
        assert session.list_files(recursive=True) == [
            stockade.FileEntry("d", "directory", 0),
            stockade.FileEntry("d/a.bin", "file", 6),
        ]
        session.run("open(b'odd\\xff', 'w')")
        assert session.list_files()[-1] == stockade.FileEntry("odd\ufffd", "file", 0, lossy=True)
        session.reset()
        assert session.list_files() == []


def test_a_file_larger_than_a_line_goes_in_parts():
    content = os.urandom(1024) * (50 * 1024)
    with stockade.Session() as session:
        assert session.write_file("big", content) == len(content)
        assert session.read_file("big") == content
        with pytest.raises(stockade.BadRequest, match="more than 1000") as caught:
            session.read_file("big", limit=1000)
        assert caught.value.reason == "file_too_large"


def test_what_cannot_be_done_says_why_and_the_session_goes_on():
    with stockade.Session() as session:
        assert session.run("import os; os.symlink('/etc/passwd', 'link'); os.mkdir('sub')").success
        for call, reason in (
            (lambda: session.read_file("none"), "file_missing"),
            (lambda: session.read_file("link"), "path_is_link"),
            (lambda: session.read_file("/etc/passwd"), "path_outside"),
            (lambda: session.write_file("../x", "x"), "path_malformed"),
            (lambda: session.write_file("sub", "x"), "is_a_directory"),
            (lambda: session.list_files("none"), "file_missing"),
            (lambda: session.run("1", language="cobol"), "unknown_language"),
            (lambda: session.run("1", scratch="/tmp"), "scratch_of_session"),
            (lambda: session.write_file("x", "\ud800"), None),
        ):
            with pytest.raises(ValueError) as caught:
                call()
            if reason is not None:
                assert caught.value.reason == reason
        assert session.run("print('still here')").output == "still here\n"


def test_a_clock_ends_a_request_and_not_the_session():
    with stockade.Session() as session:
        session.write_file("n", "kept")
        assert session.run("import time; time.sleep(60)", timeout=0.5).verdict == "wall_timeout"
        assert session.read_file("n") == b"kept"


def test_a_scratch_of_the_host_stays_when_the_session_ends(work_dir: Path):
    with stockade.Session(scratch=work_dir) as session:
        assert session.scratch == str(work_dir)
        session.write_file("n", "kept")
        session.reset()
    assert (work_dir / "n").read_text() == "kept"
    assert (work_dir / "n").stat().st_uid == work_dir.stat().st_uid


def test_a_session_that_cannot_be_had_says_why(tmp_path: Path):
    with pytest.raises(stockade.BadRequest, match="make it") as caught, stockade.Session(scratch=tmp_path / "none"):
        pass
    assert caught.value.reason == "scratch_missing"


def test_a_session_that_is_not_running_says_why():
    session = stockade.Session()
    with pytest.raises(stockade.SessionEnded, match=r"or call start\(\)$"):
        session.run("pass")
    session.start()
    session.start()
    process = session._process
    assert process is not None
    process.kill()
    with pytest.raises(stockade.SessionEnded, match="ended with signal 9"):
        session.run("pass")
    with pytest.raises(stockade.SessionEnded, match="ended with signal 9"):
        session.read_file("x")
    session.start()
    assert session.run("print(1)").output == "1\n"
    session.close()
    session.close()
    with pytest.raises(stockade.SessionEnded, match="was closed; start another"):
        session.run("pass")


def test_an_interrupted_call_ends_its_run_and_not_the_session(running, wait_until):
    def interrupt() -> None:
        wait_until(lambda: running("300\x008.5"))
        signal.pthread_kill(main.ident, signal.SIGINT)

    main = threading.main_thread()
    with stockade.Session() as session:
        session.write_file("n", "kept")
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            session.run("exec sleep 300 8.5", language="sh")
        thread.join()
        assert not running("300\x008.5")
        assert session.read_file("n") == b"kept"


async def test_under_asyncio_it_does_the_same():
    async with stockade.AsyncSession() as session:
        assert (await session.run("open('n', 'w').write('1')")).success
        assert (await session.run("print(open('n').read())")).output == "1\n"
        assert await session.write_file("b", b"\xff" * 100_000) == 100_000
        assert await session.read_file("b") == b"\xff" * 100_000
        assert [entry.path for entry in await session.list_files()] == ["b", "n"]
        await session.reset()
        assert await session.list_files() == []
    with pytest.raises(stockade.SessionEnded, match="was closed; start another"):
        await session.run("pass")


async def test_a_cancelled_task_ends_its_run_and_not_the_session(running, wait_until):
    async with stockade.AsyncSession() as session:
        await session.write_file("n", "kept")
        run = asyncio.ensure_future(session.run("exec sleep 300 9.5", language="sh"))
        await asyncio.to_thread(wait_until, lambda: running("300\x009.5"))
        begin = time.monotonic()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert time.monotonic() - begin < 10
        assert not running("300\x009.5")
        # Answers to requests that were given up are not taken for those of later requests.
        results = await asyncio.gather(*(session.run(f"print({number})") for number in range(3)))
        assert [result.output for result in results] == ["0\n", "1\n", "2\n"]
        assert await session.read_file("n") == b"kept"


async def test_a_task_cancelled_at_any_moment_leaves_the_session_in_step():
    async with stockade.AsyncSession() as session:
        for turns in range(8):
            run = asyncio.ensure_future(session.run("print('cancelled')"))
            for _ in range(turns):
                await asyncio.sleep(0)
            run.cancel()
            await asyncio.gather(run, return_exceptions=True)
            assert (await session.run(f"print({turns})")).output == f"{turns}\n"


async def three_at_a_time(session: stockade.AsyncSession, name: str) -> list[str]:
    results = await asyncio.gather(*(session.run(f"print('{name}{number}')") for number in range(3)))
    return [result.output for result in results]


def test_it_goes_on_in_a_second_event_loop():
    session = stockade.AsyncSession()
    asyncio.run(session.start())
    # Several at a time, so that they wait for each other in each loop.
    for name in ("a", "b"):
        assert asyncio.run(three_at_a_time(session, name)) == [f"{name}0\n", f"{name}1\n", f"{name}2\n"]
    asyncio.run(session.write_file("n", b"\xff" * 1_000_000))
    assert asyncio.run(session.read_file("n")) == b"\xff" * 1_000_000

    async def cancelled() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(session.run("import time; time.sleep(300)"), 0.5)

    asyncio.run(cancelled())
    assert asyncio.run(three_at_a_time(session, "c")) == ["c0\n", "c1\n", "c2\n"]
    asyncio.run(session.close())
    with pytest.raises(stockade.SessionEnded, match="was closed; start another"):
        asyncio.run(session.run("pass"))
    asyncio.run(session.start())
    asyncio.run(session.close())


def test_event_loops_of_several_threads_wait_for_each_other():
    session = stockade.AsyncSession()
    asyncio.run(session.start())
    outputs: dict[str, list[str]] = {}
    threads = [
        threading.Thread(target=lambda name=name: outputs.update({name: asyncio.run(three_at_a_time(session, name))}))
        for name in "abc"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outputs == {name: [f"{name}0\n", f"{name}1\n", f"{name}2\n"] for name in "abc"}
    asyncio.run(session.close())


async def test_who_gives_up_waiting_keeps_nobody_back():
    async with stockade.AsyncSession() as session:
        first = asyncio.ensure_future(session.run("import time; time.sleep(1); print('first')"))
        waiting = [asyncio.ensure_future(session.run(f"print({number})")) for number in range(6)]
        await asyncio.sleep(0.2)
        for task in waiting[::2]:
            task.cancel()
        results = await asyncio.gather(first, *waiting, return_exceptions=True)
        assert [getattr(result, "output", None) for result in results] == [
            "first\n",
            None,
            "1\n",
            None,
            "3\n",
            None,
            "5\n",
        ]


async def test_a_session_that_was_killed_says_so_under_asyncio():
    async with stockade.AsyncSession() as session:
        assert session._process is not None
        session._process.kill()
        with pytest.raises(stockade.SessionEnded, match="ended with signal 9"):
            await session.run("pass")


def test_when_the_caller_dies_the_session_ends(running, wait_until):
    # The caller is killed, so that it can end nothing itself.
    code = (
        "import stockade\n"
        "session = stockade.Session(); session.start()\n"
        'session.run(\'import subprocess; subprocess.run(["sleep", "300", "10.5"])\')\n'
    )
    caller = subprocess.Popen([sys.executable, "-c", code])
    wait_until(lambda: running("300\x0010.5"))
    caller.kill()
    caller.wait()
    wait_until(lambda: not running("300\x0010.5"))
