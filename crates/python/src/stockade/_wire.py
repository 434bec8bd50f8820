"""Connections to a service: a UNIX socket, HTTP or HTTPS, by the standard library alone.

The key goes to the one address that was named: no redirect is followed and no proxy is used. A
UNIX socket must be root's or this user's own. Whatever comes as an answer, a `Problem` or a `Cut`
is all that is raised. An object has a limit of bytes, and outside of a stream one of time; a stream
may go on for ever. Nothing is repeated here.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import ipaddress
import json
import os
import re
import socket
import ssl
import stat
import struct
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn
from urllib.parse import quote, urlsplit

from ._answer import HEAD_TIMEOUT, Answer, Malformed
from ._errors import BadRequest, SandboxError

#: Seconds to connect, and seconds of silence while a stream sends something every 10 s.
CONNECT_TIMEOUT = 10.0
SILENCE_TIMEOUT = 60.0
#: The type of a stream of events, and of a batch.
EVENTS = "application/x-ndjson"
#: Bytes that are sent at once.
BLOCK = 1 << 16
#: The longest object of an answer, and the longest that states a problem.
MAX_OBJECT, MAX_PROBLEM = 128 << 20, 1 << 20
#: Seconds that an answer of one object may take.
WHOLE_TIMEOUT = 600.0
#: The longest token.
MAX_KEY = 4096


class Problem(Exception):
    """What kept a request from having a result. `started`: whether code may have run."""

    def __init__(
        self, status: int, reason: str, detail: str, *, started: bool, retry_after: float | None = None
    ) -> None:
        super().__init__(detail)
        self.status, self.reason, self.detail = status, reason, detail
        self.started, self.retry_after = started, retry_after

    @classmethod
    def of(
        cls, url: str, data: object, status: int = 0, retry_after: float | None = None, *, started: bool = True
    ) -> Problem:
        """The problem that a service states, as RFC 9457 has it: a member of another type counts as
        absent. `started` holds where what came is no such problem."""
        members = data if isinstance(data, dict) else {}
        reason, *words = [
            text if isinstance(text := members.get(name), str) else "" for name in ("reason", "detail", "title")
        ]
        if not reason:
            return wrong_answer(url, "it states a problem without a reason", started=started)
        own = members.get("status")
        return cls(
            own if type(own) is int and 100 <= own < 600 else status,
            reason,
            next(filter(None, words), "the service gives no detail"),
            # One that does not say so leaves it open.
            started=members.get("started") is not False,
            retry_after=retry_after,
        )

    @property
    def may_be_repeated(self) -> bool:
        """Nothing has run, and a later try may go better."""
        return not self.started and self.status in (0, 408, 429, 500, 503)


class Cut(Exception):
    """A stream has broken off."""


@dataclass
class Address:
    """Where a service listens, with the key for it."""

    url: str
    key: str | None = field(repr=False)
    context: ssl.SSLContext | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.path = ""
        self.socket: str | None = None
        self.host, self.port, self.tls = "localhost", 0, False
        if self.url.startswith("unix:"):
            path = self.url[len("unix:") :]
            self.socket = path[2:] if path.startswith("//") else path
            if not self.socket.startswith("/"):
                raise _bad_url(self.url, "the path of a UNIX socket is absolute")
            return
        try:
            parts = urlsplit(self.url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise _bad_url(self.url, str(error)) from None
        if parts.scheme not in ("http", "https") or not host:
            raise _bad_url(self.url, "it begins with none of unix:, http:// and https://, or names no host")
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise _bad_url(self.url, "it has `@`, `?` or `#`; the key is an argument of its own")
        self.tls = parts.scheme == "https"
        self.host, self.port, self.path = host, port or (443 if self.tls else 80), parts.path.rstrip("/")
        if self.key is None:
            raise BadRequest(
                "a service asks for a key over TCP: pass key= or key_file=, or set STOCKADE_KEY_FILE", reason="key_file"
            )
        if self.tls:
            self.context = self.context or ssl.create_default_context()
        elif not _is_loopback(host):
            warnings.warn(
                f"{self.url} sees the key and the code unencrypted, as does all on the way; use https", stacklevel=4
            )

    def connect(self, timeout: float) -> http.client.HTTPConnection:
        """A connection that is not open yet."""
        if self.socket is not None:
            return _UnixConnection(self.socket, timeout)
        if self.tls:
            return http.client.HTTPSConnection(
                self.host, self.port, timeout=timeout, context=self.context, blocksize=BLOCK
            )
        return http.client.HTTPConnection(self.host, self.port, timeout=timeout, blocksize=BLOCK)


def _bad_url(url: str, why: str) -> BadRequest:
    return BadRequest(f"{url}: {why}; write unix:/PATH, http://HOST:PORT or https://HOST", reason="server_url")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout, blocksize=BLOCK)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
        # Another user who listens there would get the code, and could make up its result.
        _, uid, _ = struct.unpack("3i", self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid not in (0, os.geteuid()):
            raise Problem(
                0, "socket_untrusted", f"uid {uid} listens on {self._path}, who is neither root nor you", started=False
            )


def read_key(key: str | None, key_file: str | os.PathLike[str] | None) -> str | None:
    """The token of a key: given, or in a file that others cannot read."""
    if key is not None and key_file is not None:
        raise TypeError("pass key or key_file, not both")
    if key is None:
        path = key_file or os.environ.get("STOCKADE_KEY_FILE")
        if not path:
            return None
        key = _read_key_file(path)
    if not re.fullmatch(r"[!-~]+", key):
        raise BadRequest("the key is no token: it must be what `stockade key new` printed", reason="key_file")
    return key


def _read_key_file(path: str | os.PathLike[str]) -> str:
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            text = file.read(MAX_KEY + 1)
    except OSError as error:
        raise BadRequest(f"the file of the key: {error}", reason="key_file") from None
    if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077 or found.st_uid not in (0, os.geteuid()):
        raise BadRequest(
            f"{os.fspath(path)}: others may read or write it, or it is no file of yours: chmod 600", reason="key_file"
        )
    if len(text) > MAX_KEY:
        raise BadRequest(f"{os.fspath(path)}: it is no token", reason="key_file")
    return text.decode("ascii", "replace").strip()


class Call:
    """One request and its answer. `abort` ends it from another thread."""

    def __init__(self, address: Address) -> None:
        self.address = address
        #: The run's number, once the service has told it.
        self.number: str | None = None
        self.aborted = threading.Event()
        self._connection: http.client.HTTPConnection | None = None
        self._socket: socket.socket | None = None

    def abort(self) -> None:
        """Hangs up, so that the thread that waits for the answer gets an error."""
        self.aborted.set()
        if self._socket is not None:
            # It may have ended by itself.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the connection."""
        if self._connection is not None:
            self._connection.close()

    def send(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        accept: str = "",
        kind: str = "",
        silence: float | None = SILENCE_TIMEOUT,
    ) -> Answer:
        """Sends a request; the head of its answer. `Problem` where that is a refusal."""
        fields = {"User-Agent": "stockade-python", "Connection": "close"}
        if self.address.key is not None:
            fields["Authorization"] = f"Bearer {self.address.key}"
        if body is not None:
            fields["Content-Length"] = str(len(body))
        fields.update({name: value for name, value in (("Accept", accept), ("Content-Type", kind)) if value})
        connection = self._connection = self.address.connect(CONNECT_TIMEOUT)
        try:
            connection.connect()
        except ssl.SSLCertVerificationError as error:
            why = f"{self.address.url} is not trusted: {error.verify_message}; SSL_CERT_FILE names the certificate of a private authority"
            raise Problem(-1, "server_not_trusted", why, started=False) from None
        except OSError as error:
            raise Problem(0, "server_unreachable", f"connect to {self.address.url}: {error}", started=False) from None
        self._socket = connection.sock
        # Of each part: a large request may take its time.
        self._socket.settimeout(SILENCE_TIMEOUT)
        if self._socket.family != socket.AF_UNIX:
            _keep_alive(self._socket)
        if self.aborted.is_set():
            self.abort()
        sent = False
        try:
            try:
                if body is None:
                    connection.request(method, self.address.path + path, None, fields)
                else:
                    connection.request(method, self.address.path + path, io.BytesIO(body), fields)
                sent = True
            except (BrokenPipeError, ConnectionResetError):
                # A refusal may have come before all was sent.
                pass
            answer = Answer(self._socket, silence)
        except Malformed as error:
            raise wrong_answer(self.address.url, str(error), started=sent and method == "POST") from None
        except (OSError, http.client.HTTPException) as error:
            # What a service has not got whole it does not start.
            raise lost(self.address.url, error, started=sent and method == "POST") from None
        if answer.status // 100 != 2:
            raise _refusal(self.address.url, answer)
        return answer


def _keep_alive(connection: socket.socket) -> None:
    """Has the kernel notice a peer that is gone, where an answer takes its time."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def lost(url: str, error: object, *, started: bool) -> Problem:
    """The service went away."""
    why = str(error) or type(error).__name__
    code = "the code may have run" if started else "the code has not run"
    return Problem(0, "server_lost", f"{url} went away without a result ({why}); {code}", started=started)


def _refusal(url: str, answer: Answer) -> Problem:
    status, kind, where = answer.status, answer.kind, answer.field("location")
    # A proxy that answers so has not passed the request on.
    started = not 300 <= status < 500
    if kind == "application/problem+json":
        try:
            data = _object(url, answer, MAX_PROBLEM, HEAD_TIMEOUT, started=started)
        except Problem as problem:
            return problem
        return Problem.of(url, data, status, _seconds(answer.field("retry-after")), started=started)
    what = (
        f"status {status} leads to {_shown(where)}, which does not get the key"
        if where
        else f"status {status} with {_shown(kind) if kind else 'no type'}"
    )
    return wrong_answer(url, what, started=started)


def _shown(text: str) -> str:
    """The begin of what a server may have made up."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:200])


def wrong_answer(url: str, what: str, *, started: bool = True) -> Problem:
    """What came is no answer of a service. Another try gets the same."""
    return Problem(-1, "server_answer", f"the answer of {url} is not that of stockade serve: {what}", started=started)


def _seconds(text: str | None) -> float | None:
    return float(text) if text is not None and re.fullmatch("[0-9]{1,6}", text) else None


def lines(url: str, answer: Answer) -> Iterator[dict[str, Any]]:
    """The objects of a stream, one a line. A last line that was cut off is left out.
    `Cut` where the stream breaks off.
    """
    line = bytearray()
    try:
        for part in answer.body():
            end, *more = part.split(b"\n")
            line += end
            for begin in more:
                yield _parsed(url, line)
                line = bytearray(begin)
            if len(line) > MAX_OBJECT:
                raise _too_long(url, MAX_OBJECT, started=True)
    except Malformed as error:
        raise wrong_answer(url, str(error)) from None
    except OSError as error:
        raise Cut(str(error) or type(error).__name__) from None


def whole(url: str, answer: Answer) -> dict[str, Any]:
    """The one object of an answer."""
    return _object(url, answer, MAX_OBJECT, WHOLE_TIMEOUT, started=True)


def _object(url: str, answer: Answer, most: int, seconds: float, *, started: bool) -> dict[str, Any]:
    data = bytearray()
    answer.within(seconds)
    try:
        for part in answer.body():
            data += part
            if len(data) > most:
                raise _too_long(url, most, started=started)
    except Malformed as error:
        raise wrong_answer(url, str(error), started=started) from None
    except OSError as error:
        raise lost(url, error, started=started) from None
    return _parsed(url, data, started=started)


def _too_long(url: str, most: int, *, started: bool) -> Problem:
    return wrong_answer(url, f"it is longer than {most >> 20} MiB", started=started)


def _parsed(url: str, data: bytes | bytearray, *, started: bool = True) -> dict[str, Any]:
    """The object of a part of an answer: all JSON that a server sends is read here."""
    try:
        value = _JSON.decode(data.decode())
        if _SURROGATE.search(data):
            # Half of a pair is no text.
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise wrong_answer(url, "a part of it is nested too deeply", started=started) from None
    except ValueError as error:
        raise wrong_answer(url, f"a part of it is no JSON: {error}", started=started) from None
    if not isinstance(value, dict):
        raise wrong_answer(url, "a part of it is no JSON object", started=started)
    return value


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


_JSON = json.JSONDecoder(parse_constant=_no_number)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def query(**fields: str | None) -> str:
    """The query of these fields."""
    given = [f"{name}={quote(value, safe='/')}" for name, value in fields.items() if value is not None]
    return "?" + "&".join(given) if given else ""


def raised(problem: Problem) -> SandboxError:
    """The error of a problem that is not about one run."""
    return SandboxError(problem.detail, reason=problem.reason)
