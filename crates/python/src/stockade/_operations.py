"""What a session can be asked, without knowing how lines travel.

Each operation is a generator: it yields requests, is sent their answers, and returns its
value. So the two kinds of session, one that blocks and one for asyncio, differ only in
how they carry a line.
"""

from __future__ import annotations

import base64
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from . import _request
from ._errors import BadRequest, SandboxError, SessionEnded
from ._exec import read_result, refusal
from ._result import Result

if TYPE_CHECKING:
    from typing import TypeAlias

T = TypeVar("T")
Operation: TypeAlias = "Generator[Mapping[str, object], Mapping[str, Any], T]"

# A line holds at most 64 MiB, and base64 makes four bytes of three.
_WRITE_PART = 32 * 1024 * 1024
# What one answer holds.
_READ_PART = 16 * 1024 * 1024


@dataclass(frozen=True)
class FileEntry:
    """One entry of a listing; `kind` is file, directory, link or other. Where the name is not
    UTF-8, `lossy` is true: `path` is not quite it."""

    path: str
    kind: str
    size: int
    lossy: bool = False


def run(code: str | bytes, options: _request.RunOptions) -> Operation[Result]:
    """Runs code in the session's files."""
    answer = yield _request.run(code, options, op="run")
    if answer.get("reason") == "session_ended":
        _refuse(answer)
    return read_result(answer)


def write(path: str, content: str | bytes, append: bool) -> Operation[int]:
    """Writes a file, in parts where it is larger than a line; returns its size."""
    data = content.encode() if isinstance(content, str) else bytes(content)
    size = 0
    for start in range(0, max(len(data), 1), _WRITE_PART):
        part = _request.content(data[start : start + _WRITE_PART])
        request = {"op": "write", "path": path, "contents": part}
        if append or start > 0:
            request["append"] = True
        answer = _agreed((yield request))
        size = int(answer.get("size") or 0)
    return size


def read(path: str, limit: int | None) -> Operation[bytes]:
    """Reads a file, in parts where it is larger than an answer."""
    parts: list[bytes] = []
    offset = 0
    while True:
        request = {"op": "read", "path": path, "offset": offset, "length": _READ_PART, "encoding": "base64"}
        answer = _agreed((yield request))
        size = int(answer.get("size") or 0)
        if limit is not None and size > limit:
            raise BadRequest(f"{path}: it has {size} bytes, more than {limit}", reason="file_too_large")
        part = base64.b64decode(answer.get("base64") or "")
        parts.append(part)
        offset += len(part)
        # A file that shrank meanwhile ends where it ends.
        if offset >= size or not part:
            return b"".join(parts)


def list_files(path: str | None, recursive: bool) -> Operation[list[FileEntry]]:
    """Lists a directory, sorted by path."""
    request: dict[str, object] = {"op": "list", "recursive": recursive}
    if path is not None:
        request["path"] = path
    answer = _agreed((yield request))
    if answer.get("truncated"):
        raise BadRequest(
            f"{path or 'the scratch'}: it has too many entries for one answer; list its directories one by one",
            reason="list_truncated",
        )
    return [
        FileEntry(str(entry["path"]), str(entry["kind"]), int(entry.get("size") or 0), bool(entry.get("lossy")))
        for entry in answer["entries"]
    ]


def reset() -> Operation[None]:
    """Empties what the session keeps."""
    _agreed((yield {"op": "reset"}))


def _agreed(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    if answer.get("ok") is not True:
        _refuse(answer)
    return answer


def ready(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    """The session's first line; raises where the session cannot be had."""
    if answer.get("op") != "ready":
        raise SandboxError("stockade did not begin a session; it may be of another version", reason="no_session")
    return _agreed(answer)


def _refuse(answer: Mapping[str, Any]) -> None:
    message = str(answer.get("error") or "refused without a word")
    reason = str(answer.get("reason") or "refused")
    if reason == "session_ended":
        raise SessionEnded(message, reason=reason)
    raise refusal(str(answer.get("verdict") or "bad_request"), message, reason)
