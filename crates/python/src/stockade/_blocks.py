"""Code blocks as AutoGen and AG2 run them: one after the other, until one fails.

Each block is a separate run in the same scratch. A block with `# filename: NAME` as its
first line is kept there under that name for later blocks. Output is each block's stderr,
then its stdout, as in those frameworks' own executors.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ._errors import BadRequest
from ._exec import Configuration, Options
from ._request import RunOptions
from ._result import Result, Verdict

_FILE_NAME = re.compile(r"(?:#|//|/\*|<!--)\s*filename:\s*(.+?)\s*(?:\*/|-->)?\s*$")

# What a model reads about an end that the program's output does not show.
_ENDS = {
    Verdict.WALL_TIMEOUT: "Timeout",
    Verdict.CPU_TIMEOUT: "Timeout: its CPU time ran out",
    Verdict.OUT_OF_MEMORY: "Killed: it ran out of memory",
    Verdict.PROCESS_LIMIT: "It reached the limit of processes",
    Verdict.DISK_LIMIT: "Its disk space is full",
    Verdict.OUTPUT_LIMIT: "Killed: it printed too much",
    Verdict.SYSCALL_DENIED: "Killed: it made a system call that is not allowed",
    Verdict.CANCELLED: "Cancelled",
}

#: What these frameworks report for a run that was cancelled.
CANCELLED = 125


class Executor:
    """The common part of the executors of both frameworks."""

    def __init__(
        self,
        timeout: float = 60,
        work_dir: str | os.PathLike[str] | None = None,
        *,
        policy: str | os.PathLike[str] | None = None,
        runtimes: Mapping[str, str | os.PathLike[str]] | None = None,
        program: str | os.PathLike[str] | None = None,
    ) -> None:
        """Starts nothing; raises `NotInstalled` if the program is missing."""
        if timeout <= 0:
            raise ValueError(f"timeout must be a positive number of seconds, not {timeout!r}")
        self._timeout = timeout
        self._told_work_dir = work_dir
        self._work_dir = None if work_dir is None else Path(work_dir).absolute()
        self._options: Options = {
            "policy": policy,
            "scratch": self._work_dir,
            "runtimes": runtimes,
            "program": program,
        }
        # Raises now, and not at the first block, if the program is missing.
        Configuration(**self._options)

    @property
    def timeout(self) -> float:
        """Seconds that each block may take."""
        return self._timeout

    @property
    def work_dir(self) -> Path | None:
        """The directory of the host where the code works, if there is one."""
        return self._work_dir


class NotInWorkspace(Exception):
    """A block names a file that does not lie below the working directory."""


@dataclass
class Collected:
    """What the blocks that have run so far amount to."""

    exit_code: int = 0
    output: str = ""
    results: list[Result] = field(default_factory=list)

    def add(self, result: Result) -> None:
        """Takes a block's result; the caller stops when `exit_code` is no longer 0."""
        self.results.append(result)
        self.output += result.error + result.output
        end = _ENDS.get(Verdict(result.verdict)) if isinstance(result.verdict, Verdict) else None
        # Where the program ended by itself, its output needs no explanation.
        if end is not None and not result.success:
            self.output += f"\n{end}"
        self.exit_code = result.code if result.success or result.code else 1

    def refuse(self, language: str, error: BadRequest) -> None:
        """Takes a refusal that the model can fix; raises any other to the caller."""
        if error.reason == "unknown_language":
            self.output += f"\nunknown language {language}"
        elif error.reason in ("path_malformed", "files_not_writable"):
            self.output += f"\n{error}"
        else:
            raise error
        self.exit_code = 1


def options(language: str, code: str, work_dir: str, timeout: float, keep_as: str | None = None) -> RunOptions:
    """How a block is run; raises `NotInWorkspace`. `keep_as`: the name of its file, if it names none itself."""
    # For these frameworks `shell` is sh; the program takes it for Bash.
    chosen: RunOptions = {"language": "sh" if language.lower() == "shell" else language, "timeout": timeout}
    name = file_name(code, work_dir) or keep_as
    if name is not None:
        chosen["files"] = {name: code}
    return chosen


def file_name(code: str, work_dir: str) -> str | None:
    """The path below the working directory that a block names; raises `NotInWorkspace`."""
    named = _FILE_NAME.match(code.split("\n", 1)[0])
    if named is None:
        return None
    name = named[1]
    if os.path.isabs(name):
        name = os.path.relpath(name, work_dir)
    name = os.path.normpath(name)
    if name == "." or name.split(os.sep)[0] == "..":
        raise NotInWorkspace
    return name
