"""Answers of a server as they come: the head, and the body in pieces.

A head, trailers and the size of a chunk have a limit of bytes, a head and trailers of lines and
seconds as well, so a server that sends slowly or without end is not awaited for ever. What breaks
the rules of HTTP/1.1 is `Malformed`. A body has no limit here: its reader counts. A connection has
one answer, and no JSON is read.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator

#: Bytes of the fields of a head and of trailers, and how many they are.
MAX_HEAD, MAX_FIELDS = 64 << 10, 100
#: Bytes of a status line, and of the line that has the size of a chunk.
MAX_LINE = 4096
#: Seconds from the first byte of an answer to the end of its head, and those of trailers.
HEAD_TIMEOUT = 60.0
#: Heads that only say that the answer is still to come.
MAX_INTERIM = 10
#: Bytes that are read at once.
BLOCK = 1 << 16

_STATUS_LINE = re.compile(rb"HTTP/1\.[01] ([1-9][0-9]{2})(?: .*)?", re.DOTALL)
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


class Malformed(Exception):
    """What came is no HTTP; the text says why."""


class Answer:
    """The answer on a connection: `status` and `field` of its head, and `body`. Each of its
    methods raises `OSError` where the connection breaks off or time runs out."""

    def __init__(self, connection: socket.socket, silence: float | None) -> None:
        """Waits for the head. `silence`: seconds that may pass without a byte; None: any time."""
        self._connection, self._silence = connection, silence
        self._deadline: float | None = None
        self._received = bytearray()
        if not self._more():
            raise ConnectionResetError("it closed the connection")
        self.within(HEAD_TIMEOUT)
        for _ in range(MAX_INTERIM + 1):
            self.status, self._fields = self._head()
            # What 101 switches to is not HTTP.
            if self.status >= 200 or self.status == 101:
                break
        else:
            raise Malformed(f"more than {MAX_INTERIM} interim answers come before it")
        self._deadline = None
        coding, length = self._fields.get("transfer-encoding"), self._fields.get("content-length", "")
        if coding is not None and coding.lower() != "chunked":
            raise Malformed("its transfer encoding is not `chunked`")
        if not re.fullmatch("[0-9]{0,18}", length):
            raise Malformed("its Content-Length is no number")
        self._is_chunked = coding is not None
        self._length = 0 if self.status in (204, 304) else int(length) if length else None

    def field(self, name: str) -> str | None:
        """The field of the head with this name, in small letters."""
        return self._fields.get(name)

    @property
    def kind(self) -> str:
        """The type, without its parameters."""
        return (self.field("content-type") or "").split(";")[0].strip().lower()

    def within(self, seconds: float) -> None:
        """What is read from now on has to come within this time."""
        self._deadline = time.monotonic() + seconds

    def body(self) -> Iterator[bytes]:
        """The body, in pieces as they come."""
        if self._is_chunked:
            while size := self._size_of_chunk():
                yield from self._part(size)
                if self._line(2, "the end of a chunk"):
                    raise Malformed("a chunk of it is longer than it says")
            self.within(HEAD_TIMEOUT)
            self._lines("its trailer")
        elif self._length is not None:
            yield from self._part(self._length)
        else:
            while self._received or self._more():
                part = bytes(self._received)
                self._received.clear()
                yield part

    def _head(self) -> tuple[int, dict[str, str]]:
        status = _STATUS_LINE.fullmatch(self._line(MAX_LINE, "its first line"))
        if status is None:
            raise Malformed("it does not begin as HTTP/1.1 does")
        fields: dict[str, str] = {}
        for line in self._lines("its head"):
            name, colon, value = line.decode("latin-1").partition(":")
            if not colon or not _NAME.fullmatch(name):
                raise Malformed("a line of its head is no field")
            before, value = fields.get(name.lower()), value.strip(" \t")
            fields[name.lower()] = value if before is None else f"{before}, {value}"
        return int(status[1]), fields

    def _lines(self, what: str) -> list[bytes]:
        """The lines up to an empty one."""
        lines: list[bytes] = []
        left = MAX_HEAD
        while line := self._line(left, what):
            left = max(0, left - len(line) - 1)
            lines.append(line)
            if len(lines) > MAX_FIELDS:
                raise Malformed(f"{what} has more than {MAX_FIELDS} lines")
        return lines

    def _line(self, most: int, what: str) -> bytes:
        """A line without its end, which is among the next `most` bytes."""
        scanned = 0
        while (end := self._received.find(b"\n", scanned, most)) < 0:
            scanned = len(self._received)
            if scanned >= most:
                raise Malformed(f"{what} is too long")
            if not self._more():
                raise ConnectionResetError(f"it broke off in {what}")
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        return line.removesuffix(b"\r")

    def _size_of_chunk(self) -> int:
        # What stands behind `;` means nothing to anybody.
        size = self._line(MAX_LINE, "the size of a chunk").split(b";")[0].strip()
        if not re.fullmatch(b"[0-9A-Fa-f]{1,15}", size):
            raise Malformed("the size of a chunk is no number")
        return int(size, 16)

    def _part(self, size: int) -> Iterator[bytes]:
        """The next `size` bytes."""
        while size:
            if not self._received and not self._more():
                raise ConnectionResetError("it broke off in the body")
            part = bytes(self._received[:size])
            del self._received[:size]
            size -= len(part)
            yield part

    def _more(self) -> bool:
        """Waits for more bytes; False where the server has closed the connection."""
        wait = self._silence
        if self._deadline is not None:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("it takes too long")
            wait = left if wait is None else min(wait, left)
        self._connection.settimeout(wait)
        part = self._connection.recv(BLOCK)
        self._received += part
        return bool(part)
