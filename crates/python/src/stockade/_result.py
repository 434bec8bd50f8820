"""The result of a run, as frozen values.

Fields that this package does not know are left out, but `raw` has all of them; a verdict
that it does not know stays a plain string, and `success` still tells how to judge it. Each field
is of the type that it declares: what came otherwise is no result, and `parse` says why.
"""

from __future__ import annotations

import base64
import functools
import html
import re
import types
import typing
import unicodedata
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Verdict(str, Enum):
    """What ended a run. Members compare equal to the strings of the contract."""

    EXITED = "exited"
    SIGNALED = "signaled"
    WALL_TIMEOUT = "wall_timeout"
    CPU_TIMEOUT = "cpu_timeout"
    OUT_OF_MEMORY = "out_of_memory"
    PROCESS_LIMIT = "process_limit"
    DISK_LIMIT = "disk_limit"
    OUTPUT_LIMIT = "output_limit"
    SYSCALL_DENIED = "syscall_denied"
    CANCELLED = "cancelled"
    BAD_REQUEST = "bad_request"
    SANDBOX_ERROR = "sandbox_error"
    SCREENED = "screened"
    APPROVAL_REQUIRED = "approval_required"

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True)
class PerStream(Generic[T]):
    """One value for each of the program's two streams."""

    output: T
    error: T


@dataclass(frozen=True)
class Usage:
    """Peaks of one run; None where the kernel keeps no such count."""

    memory_peak_bytes: int | None = None
    processes_peak: int | None = None
    cpu_user_ms: int | None = None
    cpu_system_ms: int | None = None
    scratch_bytes: int | None = None
    tmp_bytes: int | None = None


@dataclass(frozen=True)
class Compile:
    """What came of the compiler, where the language has one."""

    output: str
    error: str
    code: int
    verdict: str
    duration_ms: int = 0


@dataclass(frozen=True)
class Denial:
    """One refusal, the rule that decided, and the policy line that would allow it."""

    kind: str = ""
    what: str = ""
    count: int = 0
    answer: str = ""
    rule: str = ""
    allow: str | None = None
    help: str | None = None
    #: Read off the program's own words: it may be mistaken or a lie.
    hint: bool = False


@dataclass(frozen=True)
class Finding:
    """What screening found in the code, and what the policy does about it."""

    rule: str = ""
    #: `note`, `approve` or `deny`.
    action: str = ""
    #: From 1; 0 where it is about all of the code.
    line: int = 0
    column: int = 0
    text: str = ""
    what: str = ""
    #: The file that it is in; None: the code itself.
    file: str | None = None


@dataclass(frozen=True)
class Approval:
    """How code is run that waits for approval: the same run again with `approve=token`."""

    token: str = field(default="", repr=False)
    seconds_left: int = 0
    #: Who approves it by `stockade approve`, never the caller; empty: the caller.
    approvers: tuple[str, ...] = ()


@dataclass(frozen=True)
class CollectedFile:
    """A file that `collect` matched; `content` is None where `omitted` names the reason. Where
    the name is not UTF-8, `lossy` is true: U+FFFD replaces its other bytes in `path`."""

    path: str
    size: int = 0
    sha256: str | None = None
    content: bytes | None = None
    omitted: str | None = None
    lossy: bool = False

    @property
    def text(self) -> str:
        """The content as UTF-8, with replacement characters for what is not."""
        return (self.content or b"").decode("utf-8", "replace")


@dataclass(frozen=True)
class Layer:
    """One layer of the sandbox, and how it is known that it was in force."""

    layer: str = ""
    known: str = ""
    detail: str = ""


@dataclass(frozen=True)
class Receipt:
    """What was in force, taken before the code's first instruction."""

    mode: str = ""
    kernel: str = ""
    layers: tuple[Layer, ...] = ()
    degraded: tuple[str, ...] = ()
    plan_sha256: str = ""
    program: str = ""


@dataclass(frozen=True)
class PolicyId:
    """Which policy decided."""

    name: str = ""
    origin: str = ""
    sha256: str = ""


@dataclass(frozen=True, repr=False)
class Result:
    """One run. `output` and `error` are text, lossy where bytes were not UTF-8."""

    #: The program's stdout, and its stderr or what went wrong before it could start.
    output: str
    error: str
    #: Exit status; 128+N for a signal, 124 wall clock, 137 another limit, 126 screened.
    code: int
    #: It exited by itself with 0.
    success: bool
    #: A `Verdict`, or a string that this package does not know.
    verdict: str
    #: A stable identifier of the detail; "compile_failed": verdict and streams are the compiler's.
    reason: str | None
    #: Whether the first instruction of the code ran; False: safe to try again.
    started: bool
    #: None: nothing was compiled.
    compile: Compile | None
    signal: str | None
    duration_ms: int
    limits_hit: tuple[str, ...]
    #: The streams as they came, byte for byte.
    output_bytes: bytes
    error_bytes: bytes
    #: What each stream carried in all, whether its middle was cut out, whether it was not UTF-8.
    total_bytes: PerStream[int]
    truncated: PerStream[bool]
    lossy: PerStream[bool]
    usage: Usage
    #: The limits in force, with their units in the names; None: unlimited.
    limits: Mapping[str, int | None]
    #: Those of them that nothing enforces on this host.
    limits_unenforced: tuple[str, ...]
    #: What screening found, also where the code ran.
    findings: tuple[Finding, ...]
    #: Only of `approval_required`.
    approval: Approval | None
    denials: tuple[Denial, ...]
    egress: Mapping[str, Any]
    files: tuple[CollectedFile, ...]
    receipt: Receipt | None
    policy: PolicyId | None
    audit: Mapping[str, Any] | None
    id: str | None
    labels: Mapping[str, str]
    #: The whole object, unchanged.
    raw: Mapping[str, Any] = field(repr=False, compare=False)

    def __repr__(self) -> str:
        parts = [f"verdict={str.__str__(self.verdict)!r}", f"code={self.code}"]
        if self.reason:
            parts.append(f"reason={self.reason!r}")
        if self.limits_hit:
            parts.append(f"limits_hit={list(self.limits_hit)}")
        streams = (("output", self.output), ("error", self.error))
        parts += [f"{name}={_clipped(text)!r}" for name, text in streams if text]
        return f"Result({', '.join(parts)})"

    def _repr_html_(self) -> str:
        """For notebooks: what ended the run, and its streams."""
        head = f"<b>{html.escape(str.__str__(self.verdict))}</b> (status {self.code}, {self.duration_ms} ms)"
        helps = [denial.help for denial in self.denials if denial.help]
        notes = "".join(f"<li>{html.escape(text)}</li>" for text in helps)
        streams = (("", self.output), ("color:#b00", self.error))
        texts = "".join(
            f'<pre style="{style}">{html.escape(_clipped(text, 20_000))}</pre>' for style, text in streams if text
        )
        return f"<div>{head}{f'<ul>{notes}</ul>' if notes else ''}{texts}</div>"

    @property
    def timed_out(self) -> bool:
        """A clock ended it: the wall's or the CPU's."""
        return self.verdict in (Verdict.WALL_TIMEOUT, Verdict.CPU_TIMEOUT)

    def for_model(self, limit: int = 8000) -> str:
        """What a model should read of it: the output, the end of the errors, and in brackets what
        was refused and what ended the run. Never empty, and about `limit` characters at most.

        A program can print lines in brackets too. Where a line before it begins with `[`, the last
        line says how the run ended, and is Stockade's; any other line may be the program's.
        """
        notes = [f"[refused: {_refused(one)}]" for one in self.denials if one.kind != "limit" or one.answer != "ended"]
        notes = notes[:_MAX_NOTES] + ([f"[refused: {len(notes) - _MAX_NOTES} more]"] if len(notes) > _MAX_NOTES else [])
        ending = f"[{self._how_it_ended()}]"
        if not self.success:
            notes.append(ending)
        room = max(limit - sum(len(note) + 1 for note in notes), 0)
        error = _tail(self.error.strip("\n"), room // 4 if self.output.strip() else room)
        output = _head_and_tail(self.output.strip("\n"), max(room - len(error), 0))
        if self.success and (_has_line_in_brackets(output) or _has_line_in_brackets(error)):
            notes.append(ending)
        return "\n".join(part for part in (output, error, *notes) if part.strip()) or "[no output]"

    def _how_it_ended(self) -> str:
        ended = next((one for one in self.denials if one.kind == "limit" and one.answer == "ended"), None)
        if ended is not None:
            key, _, value = ended.what.partition(" ")
            limit = _LIMITS[key].format(value) if key in _LIMITS else ended.what
            return f"ended: {limit}" + (f"; {ended.help}" if ended.help else "")
        if self.verdict == Verdict.EXITED:
            return f"{'the compiler: ' if self.reason == 'compile_failed' else ''}exit status {self.code}"
        if self.verdict == Verdict.SIGNALED:
            return f"ended: signal {self.signal}"
        words = str.__str__(self.verdict).replace("_", " ")
        return f"ended: {words}" if self.started else f"not run: {words}"

    def file(self, path: str) -> bytes:
        """The content of a collected file; `KeyError` if there is none of that path."""
        for collected in self.files:
            if collected.path == path and collected.content is not None:
                return collected.content
        raise KeyError(path)


def _clipped(text: str, most: int = 160) -> str:
    """Head and tail of a long text."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]} … {text[-most // 2 :]}"


#: Refusals that a model is told of.
_MAX_NOTES = 5

#: Limits in words, by their keys, as `stockade exec --text` has them.
_LIMITS = {
    "wall": "wall clock of {}",
    "cpu": "CPU time of {}",
    "memory": "memory of {}",
    "processes": "{} processes",
    "output_size": "output of {}",
    "scratch_size": "scratch of {}",
}


def _refused(denial: Denial) -> str:
    """One line: a name in it is the code's choice."""
    what = denial.what.replace(" port ", ":", 1) if denial.kind == "connection" else denial.what
    words = what + (f"; {denial.help}" if denial.help else "")
    return "".join(letter if letter.isprintable() else " " for letter in words)


#: An escape sequence with a number, such as a colour. `ESC [ended` would be one without a number.
_SEQUENCE = re.compile(r"\x1b\[[0-?]+[ -/]*[@-~]")

#: What is drawn as nothing, though Unicode counts it as letters and symbols.
_FILLERS = "\u115f\u1160\u2800\u3164\uffa0\U00013441\U00013442\U0001d159"


def _has_line_in_brackets(text: str) -> bool:
    """Whether a line begins with `[`, apart from what is not drawn: the program's own rule."""
    return any(_begins_with_bracket(line) for line in text.splitlines())


def _begins_with_bracket(line: str) -> bool:
    at = 0
    while at < len(line):
        letter = line[at]
        if sequence := _SEQUENCE.match(line, at):
            at = sequence.end()
        elif letter == "\x1b" or "\x80" <= letter <= "\x9f":
            # Another escape sequence: readers differ in where it ends.
            return "[" in line[at:]
        elif letter.isspace() or unicodedata.category(letter)[0] in "CMZ" or letter in _FILLERS:
            at += 1
        else:
            return letter == "["
    return False


def _tail(text: str, most: int) -> str:
    """The end of a text, from the beginning of a line."""
    if len(text) <= most:
        return text
    end = text[len(text) - most :]
    _, line_break, whole = end.partition("\n")
    return f"[…]\n{whole if line_break and whole else end}"


def _head_and_tail(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    return (
        f"{text[: most // 2]}\n[… {len(text) - most} characters left out …]\n{text[len(text) - (most - most // 2) :]}"
    )


#: Results whose `error` is Stockade's own words.
_IN_WORDS = (Verdict.BAD_REQUEST, Verdict.SANDBOX_ERROR, Verdict.SCREENED, Verdict.APPROVAL_REQUIRED)


def parse(data: object) -> Result:
    """A result object of the program that was asked for streams in base64. `ValueError`, which says
    why, where it is none."""
    given = _object(data, "a result")
    verdict = given.get("verdict")
    if not isinstance(verdict, str):
        raise ValueError("a result has no `verdict`")
    output, error = _bytes(given, "output"), _error(given)
    made = {
        "output": output.decode("utf-8", "replace"),
        "error": error.decode("utf-8", "replace"),
        "code": given.get("code", 125),
        "success": given.get("success") is True,
        "verdict": Verdict(verdict) if verdict in Verdict._value2member_map_ else verdict,
        "started": given.get("started") is True,
        "compile": _compile(given["compile"]) if given.get("compile") else None,
        "duration_ms": given.get("duration_ms") or 0,
        "limits_unenforced": _tuple(given, "limits_unenforced"),
        "limits_hit": _tuple(given, "limits_hit"),
        "output_bytes": output,
        "error_bytes": error,
        "total_bytes": _per_stream(given.get("bytes"), 0),
        "truncated": _per_stream(given.get("truncated"), False),
        "lossy": PerStream(*(not _is_utf8(stream) for stream in (output, error))),
        "usage": _known(Usage, given.get("usage") or {}),
        "limits": given.get("limits") or {},
        "findings": tuple(_known(Finding, one) for one in _tuple(given, "findings")),
        "approval": _approval(given["approval"]) if given.get("approval") else None,
        "denials": tuple(_known(Denial, one) for one in _tuple(given, "denials")),
        "egress": given.get("egress") or {},
        "files": tuple(_file(one) for one in _tuple(given, "files")),
        "receipt": _receipt(given["receipt"]) if given.get("receipt") else None,
        "policy": _known(PolicyId, given["policy"]) if given.get("policy") else None,
        "labels": given.get("labels") or {},
        "raw": given,
    }
    return _known(Result, {**given, **made})


def _is_utf8(stream: bytes) -> bool:
    try:
        stream.decode()
    except UnicodeDecodeError:
        return False
    return True


def _object(data: object, what: str) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise ValueError(f"{what} is no object")
    return data


def _text(data: Mapping[str, Any], name: str) -> str:
    text = data.get(name) or ""
    if not isinstance(text, str):
        raise ValueError(f"`{name}` is no text")
    return text


def _bytes(data: Mapping[str, Any], name: str) -> bytes:
    try:
        return base64.b64decode(_text(data, name), validate=True)
    except ValueError as error:
        raise ValueError(f"`{name}` is no base64: {error}") from None


def _error(data: Mapping[str, Any]) -> bytes:
    """The errors of the program, or why nothing ran: that is plain text, not base64."""
    if data.get("verdict") in _IN_WORDS or data.get("reason") == "cancelled_before_start":
        return _text(data, "error").encode("utf-8", "replace")
    return _bytes(data, "error")


def _tuple(data: Mapping[str, Any], name: str) -> tuple[Any, ...]:
    values = data.get(name) or []
    if not isinstance(values, list):
        raise ValueError(f"`{name}` is no list")
    return tuple(values)


def _per_stream(data: Any, absent: T) -> PerStream[T]:
    data = data if isinstance(data, Mapping) else {}
    return PerStream(data.get("output", absent), data.get("error", absent))


def _known(kind: type[T], data: object) -> T:
    """Of a dataclass, with the members of `data` that it has. One that is null is absent."""
    name = kind.__name__
    given, known = _object(data, f"the {name}"), {}
    for member, (declared, is_needed) in _members(kind).items():  # type: ignore[arg-type]
        value = given.get(member)
        if not _is_of(value, declared):
            if value is not None or is_needed:
                raise ValueError(f"`{member}` of the {name} is missing, or of a wrong type")
        elif member in given or is_needed:
            known[member] = value
    return kind(**known)


@functools.cache
def _members(kind: type[Any]) -> dict[str, tuple[Any, bool]]:
    """The fields of a dataclass: their type, and whether they have no default."""
    declared = typing.get_type_hints(kind)
    return {one.name: (declared[one.name], one.default is MISSING) for one in fields(kind)}


def _is_of(value: object, declared: Any) -> bool:
    """Whether a value is of a type, such as those above are declared with."""
    origin, inner = typing.get_origin(declared), typing.get_args(declared)
    if declared is Any:
        return True
    if origin is types.UnionType:
        return any(_is_of(value, one) for one in inner)
    if origin is tuple:
        return isinstance(value, tuple) and all(_is_of(one, inner[0]) for one in value)
    if origin is PerStream:
        return isinstance(value, PerStream) and _is_of(value.output, inner[0]) and _is_of(value.error, inner[0])
    if origin is Mapping:
        return isinstance(value, Mapping) and all(_is_of(one, inner[1]) for one in value.values())
    # A truth value is an `int` too, for Python.
    return isinstance(value, declared) and (declared is bool or not isinstance(value, bool))


def _compile(data: object) -> Compile:
    given = _object(data, "`compile`")
    output, error = (stream.decode("utf-8", "replace") for stream in (_bytes(given, "output"), _error(given)))
    return _known(Compile, {**given, "output": output, "error": error})


def _receipt(data: object) -> Receipt:
    given = _object(data, "`receipt`")
    layers = tuple(_known(Layer, one) for one in _tuple(given, "layers"))
    return _known(Receipt, {**given, "layers": layers, "degraded": _tuple(given, "degraded")})


def _approval(data: object) -> Approval:
    given = _object(data, "`approval`")
    return _known(Approval, {**given, "approvers": _tuple(given, "approvers")})


def _file(data: object) -> CollectedFile:
    given = _object(data, "a file")
    content: bytes | None = None
    if isinstance(given.get("text"), str):
        content = given["text"].encode()
    elif given.get("base64") is not None:
        content = _bytes(given, "base64")
    return _known(CollectedFile, {**given, "content": content})
