"""A server of a test that answers by a script, well or badly. It listens on loopback, and is no service: it runs nothing."""

from __future__ import annotations

import base64
import json
import socket
import ssl
import threading
from collections.abc import Callable
from typing import Any


class Server:
    """Answers each connection by a function, which gets the head and the body of the request."""

    def __init__(
        self, answer: Callable[[str, bytes, socket.socket], object], context: ssl.SSLContext | None = None
    ) -> None:
        self.heard: list[str] = []
        self._answer, self._context = answer, context
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"{'https' if context else 'http'}://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._listen)]
        self._threads[0].start()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(connection,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            if self._context:
                connection = self._context.wrap_socket(connection, server_side=True)
            with connection, connection.makefile("rb") as stream:
                head = ""
                while not head.endswith("\r\n\r\n") and (line := stream.readline()):
                    head += line.decode()
                length = next((int(line[16:]) for line in head.splitlines() if line.startswith("Content-Length: ")), 0)
                body = stream.read(length)
                self.heard.append(head)
                self._answer(head, body, connection)
        except OSError:
            pass

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(20)


def encoded(value: object) -> bytes:
    """As JSON, which has no word for what is too large."""
    return json.dumps(value).replace("Infinity", "1e999").encode()


def reply(status: str, kind: str, body: object, more: str = "") -> bytes:
    """An answer of this type, whose body is as it is given, or in JSON."""
    data = body if isinstance(body, bytes) else encoded(body)
    return f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\n{more}Content-Length: {len(data)}\r\n\r\n".encode() + data


def stream(*objects: object) -> bytes:
    """A stream of these, one a line."""
    lines = b"".join(encoded(one) + b"\n" for one in objects)
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nConnection: close\r\n\r\n" + lines


def ran(output: str = "1\n") -> dict[str, Any]:
    """The result of a program that printed this."""
    text = base64.b64encode(output.encode()).decode()
    return {"verdict": "exited", "code": 0, "success": True, "started": True, "output": text, "error": ""}


ACCEPTED = {"type": "accepted", "seq": 1, "at_ms": 0, "run": "00aa", "position": 0}


def says(*answers: bytes) -> Callable[[str, bytes, socket.socket], object]:
    """The answers in turn, the last for ever."""
    left = list(answers)
    return lambda head, body, connection: connection.sendall(left.pop(0) if len(left) > 1 else left[0])


def refused(status: str, reason: str, started: bool = False, more: str = "") -> bytes:
    """A problem as a service states it."""
    problem = {"status": int(status.split()[0]), "reason": reason, "detail": "later", "started": started}
    return reply(status, "application/problem+json", problem, more)
