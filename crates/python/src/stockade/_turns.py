"""Waiting in asyncio without being bound to one event loop, as its own locks and processes are.

A task waits in the loop that it runs in; nothing is kept of a loop between calls.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
from collections import deque
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import TypeAlias

    Waiting: TypeAlias = "tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]"


class Turns:
    """A lock that lets one task through at a time, in the order of their coming, whichever loops they run in."""

    def __init__(self) -> None:
        self._taken = False
        self._waiting: deque[Waiting] = deque()
        # Held for a few instructions, never while anything waits.
        self._guard = threading.Lock()

    async def __aenter__(self) -> None:
        """Waits for the turn."""
        loop = asyncio.get_running_loop()
        with self._guard:
            if not self._taken:
                self._taken = True
                return
            one = (loop, loop.create_future())
            self._waiting.append(one)
        try:
            await one[1]
        except BaseException:
            with self._guard:
                still_waits = one in self._waiting
                if still_waits:
                    self._waiting.remove(one)
            if not still_waits:
                self._pass_on()
            raise

    async def __aexit__(self, *error: object) -> None:
        """Gives the turn to who has waited longest."""
        self._pass_on()

    def _pass_on(self) -> None:
        with self._guard:
            while self._waiting:
                loop, turn = self._waiting.popleft()
                try:
                    loop.call_soon_threadsafe(_complete, turn)
                    return
                except RuntimeError:
                    # Its loop was closed: no task waits there any more.
                    continue
            self._taken = False


def _complete(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def readable(stream: IO[bytes]) -> None:
    """Waits until reading does not block."""
    loop = asyncio.get_running_loop()
    await _when(stream.fileno(), loop.add_reader, loop.remove_reader)


async def writable(stream: IO[bytes]) -> None:
    """Waits until writing does not block."""
    loop = asyncio.get_running_loop()
    await _when(stream.fileno(), loop.add_writer, loop.remove_writer)


async def ended(process: subprocess.Popen[bytes]) -> None:
    """Waits until it has ended; it is still to be reaped."""
    if process.poll() is not None:
        return
    loop, pidfd = asyncio.get_running_loop(), os.pidfd_open(process.pid)
    try:
        await _when(pidfd, loop.add_reader, loop.remove_reader)
    finally:
        os.close(pidfd)


async def _when(descriptor: int, add: Callable[..., Any], remove: Callable[[int], Any]) -> None:
    ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    add(descriptor, _complete, ready)
    try:
        await ready
    finally:
        remove(descriptor)
