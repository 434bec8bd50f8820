"""Turns keyword arguments into the bytes of a request. The program checks their values."""

from __future__ import annotations

import base64
import inspect
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from ._errors import BadRequest

if TYPE_CHECKING:
    from typing import TypeAlias

#: The content of a file or of stdin.
Content: TypeAlias = "str | bytes"
F = TypeVar("F", bound=Callable[..., Any])

#: What is fixed for all runs, and no field of a request.
_FIXED = {
    "allow": '["api.github.com:443"]',
    "runtimes": '{"python": ".venv/bin/python"}',
    "policy": '"strict"',
    "program": '"/usr/bin/stockade"',
}


class RunOptions(TypedDict, total=False):
    """The fields of a request besides its code."""

    #: A runtime of the policy, or an alias; default: the policy's.
    language: str
    #: The name of the program's file; default: `main` with the language's ending, or beside
    #: your own files a name that nothing else has.
    filename: str
    #: The program's arguments.
    args: Sequence[str]
    #: The program's stdin; absent: /dev/null.
    stdin: Content
    #: Variables of the names that the policy accepts.
    env: Mapping[str, str]
    #: Written into the scratch before the start, by relative path.
    files: Mapping[str, Content]
    #: Globs of files below the scratch to return.
    collect: Sequence[str]
    #: Seconds of wall clock: short for `limits={"wall": …}`.
    timeout: float
    #: Limits as in a policy: {"memory": "1GiB", "cpus": 0.5}.
    limits: Mapping[str, str | int | float]
    #: The same for the compiler of a language that has one; those not named are the policy's.
    compile_limits: Mapping[str, str | int | float]
    #: The image whose files are the root, by name or digest, if the policy allows it.
    image: str
    #: The template of the language, or "none" for an interpreter that is no copy of it; default:
    #: a copy where the policy has a template.
    template: str
    #: Echoed in the result.
    id: str
    #: Written to the audit log as claims of the caller.
    labels: Mapping[str, str]
    #: `approval.token` of an earlier result of the same request.
    approve: str


def in_help(function: F) -> F:
    """Lists the options of a run in the function's signature, for help() and editors."""
    own = inspect.signature(function)
    named = [one for one in own.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in RunOptions.__annotations__
    ]
    function.__signature__ = own.replace(parameters=[*named, *options])  # type: ignore[attr-defined]
    return function


def run(code: str | bytes, options: RunOptions, **fixed: object) -> dict[str, object]:
    """A request as an object; its streams come back in base64, so that no byte is lost."""
    request: dict[str, Any] = {"code": content(code), "encoding": "base64", **fixed}
    given: dict[str, Any] = dict(options)
    for name in given:
        if name in _FIXED:
            where = f"Stockade({name}={_FIXED[name]})"
            raise TypeError(f"`{name}` is the same for all runs of a client: write {where}.run(code)")
        # A session has its scratch for good, and its answer says so.
        if name not in RunOptions.__annotations__ and name != "scratch":
            known = ", ".join(RunOptions.__annotations__)
            raise BadRequest(f"unknown field `{name}`: a run takes {known}", reason="request_malformed")
    timeout = given.pop("timeout", None)
    limits = given.pop("limits", None)
    if limits is not None or timeout is not None:
        request["limits"] = dict(limits) if isinstance(limits, Mapping) else limits or {}
    if timeout is not None:
        request["limits"]["wall"] = duration(timeout)
    for name, value in given.items():
        if value is None:
            continue
        if name == "stdin":
            value = content(value)
        elif name == "files" and isinstance(value, Mapping):
            value = {path: content(text) for path, text in value.items()}
        elif name in ("args", "collect"):
            value = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
        elif isinstance(value, Mapping):
            value = dict(value)
        request[name] = value
    return request


def duration(seconds: object) -> str:
    """As a limit is written; never less than asked for."""
    if not isinstance(seconds, (int, float)) or not math.isfinite(seconds) or seconds <= 0:
        raise BadRequest(f"timeout must be a positive number of seconds, not {seconds!r}", reason="timeout_malformed")
    return f"{math.ceil(seconds * 1000)}ms"


def content(value: object) -> object:
    """Text as it is, bytes in base64."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"base64": base64.b64encode(value).decode()}
    return value


def encode(request: Mapping[str, object]) -> bytes:
    """One line of JSON."""
    try:
        text = json.dumps(request, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=os.fspath)
        return text.encode() + b"\n"
    except UnicodeEncodeError as error:
        raise BadRequest(
            f"{error.object[error.start : error.end]!r} is no Unicode text; pass stdin and files as bytes",
            reason="request_not_unicode",
        ) from None
    except (TypeError, ValueError) as error:
        raise BadRequest(
            f"{_not_json(request)} cannot be written as JSON: {error}", reason="request_not_json"
        ) from None


def _not_json(request: Mapping[str, object]) -> str:
    """Which field it is."""
    for name, value in request.items():
        try:
            json.dumps(value, allow_nan=False, default=os.fspath)
        except (TypeError, ValueError):
            return f"`{name}`"
    return "the request"
