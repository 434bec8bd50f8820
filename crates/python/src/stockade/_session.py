"""Sessions: requests one after the other, whose files persist while processes do not.

A session is one process, `stockade session`, that takes and answers lines of JSON. When it
ends, its files are gone, and each further call states why. One request runs at a time;
others wait for it.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, Any, TypeVar

from . import _operations, _program, _request, _turns
from ._errors import SessionEnded
from ._exec import END_TIMEOUT, Configuration, to_the_end
from ._operations import FileEntry, Operation
from ._result import Result

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from ._exec import Options
    from ._request import RunOptions

T = TypeVar("T")

_CANCEL = b'{"op":"cancel"}\n'


class _Session(Configuration):
    """The common part of both classes."""

    _facts: Mapping[str, Any] | None = None
    _why_ended = "it has not been started: use it in a `with` statement, or call start()"
    _remarks: IO[bytes] | None = None
    # Not asyncio's, which would be lost with its event loop.
    _process: subprocess.Popen[bytes] | None = None

    def __init__(self, **configuration: Unpack[Options]) -> None:
        super().__init__(**configuration)
        # What the process has printed after its last whole line.
        self._buffer = bytearray()

    def _start_process(self) -> subprocess.Popen[bytes]:
        _program.require(self.program, "session")
        self._remarks = tempfile.TemporaryFile()
        self._buffer.clear()
        return subprocess.Popen(
            self.command_line("session"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._remarks,
            bufsize=0,
        )

    def _note_why(self, why: str) -> None:
        self._why_ended = f"{why}; start another, which has none of its files"

    @property
    def scratch(self) -> str:
        """The working directory as the code sees it."""
        return str(self._begun().get("scratch"))

    @property
    def home(self) -> str:
        """The home directory as the code sees it."""
        return str(self._begun().get("home"))

    def _begun(self) -> Mapping[str, Any]:
        if self._facts is None:
            raise self._ended()
        return self._facts

    def _ended(self) -> SessionEnded:
        return SessionEnded(f"the session is not running: {self._why_ended}", reason="session_ended")

    def _note_end(self, status: int | None) -> None:
        """Notes what is known of an unexpected end."""
        words = b""
        if self._remarks is not None:
            self._remarks.seek(0)
            words = self._remarks.read()[-4096:]
        lines = words.decode("utf-8", "replace").splitlines()
        # Missing layers are in each receipt, and do not explain an end.
        last = " ".join(line for line in lines if not line.startswith("stockade: running without"))
        how = f"signal {-status}" if status is not None and status < 0 else f"status {status}"
        self._note_why(f"its process ended with {how}" + (f" ({last})" if last else ""))

    def _close_remarks(self) -> None:
        if self._remarks is not None:
            self._remarks.close()
            self._remarks = None


class Session(_Session):
    """A session that blocks its caller. Threads may share it; they wait for each other."""

    def __init__(self, **configuration: Unpack[Options]) -> None:
        """Takes what `Stockade` takes; starts nothing yet."""
        super().__init__(**configuration)
        self._lock = threading.Lock()

    def start(self) -> None:
        """Starts the session, unless it is running."""
        with self._lock:
            if self._process is not None:
                return
            self._process = self._start_process()
            try:
                self._facts = _operations.ready(self._receive(None))
            except BaseException:
                self._end(kill=True)
                raise

    def close(self) -> None:
        """Ends the session and removes its files. Calling it again does nothing."""
        with self._lock:
            if self._process is not None:
                self._note_why("it was closed")
                self._end(kill=False)

    def __enter__(self) -> Self:
        """Starts it."""
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Closes it."""
        self.close()

    @_request.in_help
    def run(self, code: str | bytes, **options: Unpack[RunOptions]) -> Result:
        """Runs `code` among the session's files and returns its result.

        Ctrl-C, or any other early end of the call, ends the run and not the session.
        """
        return self._carry_out(_operations.run(code, options))

    def write_file(self, path: str, content: str | bytes, *, append: bool = False) -> int:
        """Writes a file below the scratch, home or /tmp and returns its size."""
        return self._carry_out(_operations.write(path, content, append))

    def read_file(self, path: str, *, limit: int | None = None) -> bytes:
        """Reads a file; one larger than `limit` is refused. Links are never followed."""
        return self._carry_out(_operations.read(path, limit))

    def list_files(self, path: str | None = None, *, recursive: bool = False) -> list[FileEntry]:
        """Lists a directory, by default the scratch."""
        return self._carry_out(_operations.list_files(path, recursive))

    def reset(self) -> None:
        """Empties scratch, home and /tmp; a host directory as scratch is not touched."""
        self._carry_out(_operations.reset())

    def _carry_out(self, operation: Operation[T]) -> T:
        with self._lock:
            self._begun()
            try:
                request = next(operation)
                while True:
                    request = operation.send(self._ask(request))
            except StopIteration as done:
                value: T = done.value
                return value

    def _ask(self, request: Mapping[str, object]) -> Mapping[str, Any]:
        # Encoded before anything is sent: an error must not leave half a line in the pipe.
        line = _request.encode(request)
        sent = False
        try:
            self._send(line)
            sent = True
            return self._receive(None)
        except SessionEnded:
            raise
        except BaseException:
            # Both answers are read here, or the next request would get them.
            try:
                if not sent:
                    raise SessionEnded("half a line was sent", reason="session_ended")
                self._send(_CANCEL)
                deadline = time.monotonic() + END_TIMEOUT
                while self._receive(deadline).get("op") != "cancel":
                    pass
            except SessionEnded:
                if self._process is not None:
                    self._note_why("a call was interrupted, and the session did not cancel it in time")
                    self._end(kill=True)
            raise

    def _send(self, line: bytes) -> None:
        assert self._process is not None and self._process.stdin is not None
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[self._process.stdin.write(rest) or 0 :]
        except BrokenPipeError:
            raise self._lost() from None

    def _receive(self, deadline: float | None) -> Mapping[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        source, scanned = self._process.stdout, 0
        poll = select.poll()
        poll.register(source, select.POLLIN)
        while (end := self._buffer.find(b"\n", scanned)) < 0:
            scanned = len(self._buffer)
            left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
            if not poll.poll(left):
                raise SessionEnded("the session does not answer", reason="session_ended")
            part = os.read(source.fileno(), 1 << 20)
            if not part:
                raise self._lost()
            self._buffer += part
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        answer: Mapping[str, Any] = json.loads(line)
        return answer

    def _lost(self) -> SessionEnded:
        assert self._process is not None
        try:
            self._process.wait(END_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._note_end(self._process.wait())
        self._end(kill=True)
        return self._ended()

    def _end(self, *, kill: bool) -> None:
        process, self._process, self._facts = self._process, None, None
        if process is not None:
            if kill:
                process.kill()
            try:
                # Closing its stdin ends the session; its remaining output is read.
                process.communicate(timeout=END_TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
        self._close_remarks()


class AsyncSession(_Session):
    """A session for asyncio. Cancelling a task that waits for a run ends the run.

    It belongs to no event loop: tasks of any may use it, also of several at a time, and it
    goes on when the loop that started it has ended. They wait for each other.
    """

    def __init__(self, **configuration: Unpack[Options]) -> None:
        """Takes what `AsyncStockade` takes; starts nothing yet."""
        super().__init__(**configuration)
        self._turns = _turns.Turns()
        self._unsent = bytearray()

    async def start(self) -> None:
        """Starts the session, unless it is running."""
        async with self._turns:
            if self._process is not None:
                return
            self._unsent.clear()
            self._process = self._start_process()
            assert self._process.stdin is not None and self._process.stdout is not None
            os.set_blocking(self._process.stdin.fileno(), False)
            os.set_blocking(self._process.stdout.fileno(), False)
            try:
                self._facts = _operations.ready(await self._receive())
            except BaseException:
                await to_the_end(self._end(kill=True), self._process)
                raise

    async def close(self) -> None:
        """Ends the session and removes its files. Calling it again does nothing."""
        async with self._turns:
            if self._process is not None:
                self._note_why("it was closed")
                await to_the_end(self._end(kill=False), self._process)

    async def __aenter__(self) -> Self:
        """Starts it."""
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        """Closes it."""
        await self.close()

    @_request.in_help
    async def run(self, code: str | bytes, **options: Unpack[RunOptions]) -> Result:
        """Runs `code` among the session's files and returns its result."""
        return await self._carry_out(_operations.run(code, options))

    async def write_file(self, path: str, content: str | bytes, *, append: bool = False) -> int:
        """Writes a file below the scratch, home or /tmp and returns its size."""
        return await self._carry_out(_operations.write(path, content, append))

    async def read_file(self, path: str, *, limit: int | None = None) -> bytes:
        """Reads a file; one larger than `limit` is refused. Links are never followed."""
        return await self._carry_out(_operations.read(path, limit))

    async def list_files(self, path: str | None = None, *, recursive: bool = False) -> list[FileEntry]:
        """Lists a directory, by default the scratch."""
        return await self._carry_out(_operations.list_files(path, recursive))

    async def reset(self) -> None:
        """Empties scratch, home and /tmp; a host directory as scratch is not touched."""
        await self._carry_out(_operations.reset())

    async def _carry_out(self, operation: Operation[T]) -> T:
        async with self._turns:
            self._begun()
            try:
                request = next(operation)
                while True:
                    request = operation.send(await self._ask(request))
            except StopIteration as done:
                value: T = done.value
                return value

    async def _ask(self, request: Mapping[str, object]) -> Mapping[str, Any]:
        line = _request.encode(request)
        process = self._process
        assert process is not None
        try:
            await self._send(line)
            return await self._receive()
        except SessionEnded:
            raise
        except BaseException:
            await to_the_end(self._cancel(process), process)
            raise

    async def _cancel(self, process: subprocess.Popen[bytes]) -> None:
        """Reads both answers, or the next request would get them."""

        async def both() -> None:
            await self._send(_CANCEL)
            while (await self._receive()).get("op") != "cancel":
                pass

        try:
            await asyncio.wait_for(both(), END_TIMEOUT)
        except (SessionEnded, asyncio.TimeoutError):
            if self._process is not None:
                self._note_why("a call was cancelled, and the session did not cancel it in time")
                await self._end(kill=True)

    async def _send(self, line: bytes) -> None:
        assert self._process is not None and self._process.stdin is not None
        # What a cancelled call left of its line goes first.
        self._unsent += line
        try:
            while self._unsent:
                await _turns.writable(self._process.stdin)
                del self._unsent[: self._process.stdin.write(self._unsent) or 0]
        except BrokenPipeError:
            raise await self._lost() from None

    async def _receive(self) -> Mapping[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        source, scanned = self._process.stdout, 0
        while (end := self._buffer.find(b"\n", scanned)) < 0:
            scanned = len(self._buffer)
            await _turns.readable(source)
            part = os.read(source.fileno(), 1 << 20)
            if not part:
                raise await self._lost()
            self._buffer += part
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        answer: Mapping[str, Any] = json.loads(line)
        return answer

    async def _lost(self) -> SessionEnded:
        process = self._process
        assert process is not None
        try:
            await asyncio.wait_for(_turns.ended(process), END_TIMEOUT)
        except asyncio.TimeoutError:
            process.kill()
        self._note_end(process.wait())
        await self._end(kill=True)
        return self._ended()

    async def _end(self, *, kill: bool) -> None:
        process, self._process, self._facts = self._process, None, None
        if process is not None:
            assert process.stdin is not None and process.stdout is not None
            if kill:
                process.kill()
            # The end of its stdin ends the session; its remaining output is read.
            process.stdin.close()
            try:
                await asyncio.wait_for(_drain(process.stdout), END_TIMEOUT)
                await asyncio.wait_for(_turns.ended(process), END_TIMEOUT)
            except asyncio.TimeoutError:
                process.kill()
            process.wait()
            process.stdout.close()
        self._close_remarks()


async def _drain(stream: IO[bytes]) -> None:
    while True:
        await _turns.readable(stream)
        if not os.read(stream.fileno(), 1 << 20):
            return
