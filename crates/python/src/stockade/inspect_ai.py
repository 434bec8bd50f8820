"""inspect_ai: the sandbox `stockade`, found by its entry point (`--sandbox stockade`).

One session for each sample: files persist from exec to exec, processes do not, so tools
that keep a server running in the sandbox cannot work. Calls of one sample take turns.
Everything runs as the sandbox's user, without any rights.
"""

from __future__ import annotations

import os
import posixpath
import shlex
import uuid
from typing import Any, Literal, NoReturn, overload

from . import _framework
from ._errors import BadRequest, SandboxError, SessionEnded
from ._request import RunOptions
from ._result import Result, Verdict
from ._session import AsyncSession

_framework.require("inspect-ai", "0.3.200", "0.4")

from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxEnvironment,
    SandboxEnvironmentConfigType,
    SandboxEnvironmentLimits,
    SandboxUnavailableError,
    SandboxUserUnsupportedError,
    sandboxenv,
)
from pydantic import BaseModel
from typing_extensions import override

__all__ = ["StockadeSandboxConfig", "StockadeSandboxEnvironment"]

# A session reads and writes only scratch, home and /tmp, without symlinks. Other files are
# read and written by code, with its rights.
_READ = """\
[ ! -d "$1" ] || exit 21
[ -e "$1" ] || exit 2
exec cat -- "$1"
"""
_WRITE = """\
[ ! -d "$1" ] || exit 21
mkdir -p -- "$(dirname -- "$1")" && cat >"$1"
"""
_ELSEWHERE = ("path_outside", "path_is_link")

# Beyond this, input is written as a file first: a request has at most 64 MiB.
_MAX_STDIN = 8 * 1024 * 1024


def _launch(cmd: list[str], cwd: str, env: dict[str, str], input_file: str) -> str:
    """A program for sh that becomes the command: its status and signals are the run's own.

    The command is part of the program text, which may be longer than arguments.
    What is put before the command lies in /usr, where the code cannot write.
    """
    # Removed, so that the command does not find this program in the directory.
    lines = ['rm -f -- "$0"', f"cd -- {shlex.quote(cwd)} || exit 1"]
    if input_file:
        lines.append(f"exec <{input_file}; rm -f -- {input_file}")
    variables = ["/usr/bin/env", "--", *(f"{name}={value}" for name, value in env.items())] if env else []
    lines.append(f"exec {shlex.join([*variables, *cmd])}")
    return "\n".join(lines)


class StockadeSandboxConfig(BaseModel):
    """The options of a task: `sandbox=SandboxEnvironmentSpec("stockade", StockadeSandboxConfig(…))`."""

    policy: str = "shell"
    runtimes: dict[str, str] = {}
    program: str | None = None


@sandboxenv(name="stockade")
class StockadeSandboxEnvironment(SandboxEnvironment):
    """A session. As configuration a task may also give a policy's name or file alone."""

    @override
    @classmethod
    async def sample_init(
        cls, task_name: str, config: SandboxEnvironmentConfigType | None, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        """Starts a session for the sample."""
        if isinstance(config, str):
            config = StockadeSandboxConfig(policy=config)
        elif not isinstance(config, StockadeSandboxConfig):
            config = StockadeSandboxConfig()
        session = AsyncSession(policy=config.policy, runtimes=config.runtimes, program=config.program)
        await session.start()
        return {"default": cls(session)}

    @override
    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: SandboxEnvironmentConfigType | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        """Ends the sessions."""
        for environment in environments.values():
            await environment.as_type(cls)._session.close()

    @override
    @classmethod
    def default_concurrency(cls) -> int | None:
        """Two samples for each CPU."""
        return 2 * len(os.sched_getaffinity(0))

    @override
    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        """Reads a configuration that was written down."""
        return StockadeSandboxConfig(**config)

    def __init__(self, session: AsyncSession) -> None:
        """Takes a session that has been started."""
        super().__init__()
        self._session = session

    @override
    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """Runs a command. A timeout is final: nothing of the command is left to retry."""
        if user is not None and user not in ("sandbox", "1000"):
            raise SandboxUserUnsupportedError(
                f"everything runs as `sandbox`, uid 1000, without rights to become {user!r}"
            )
        stdin = input.encode() if isinstance(input, str) else input
        input_file = ""
        options: RunOptions = {}
        if stdin is not None and len(stdin) > _MAX_STDIN:
            input_file = f"/tmp/.stdin-{uuid.uuid4().hex}"
            await self.write_file(input_file, stdin)
        elif stdin is not None:
            options["stdin"] = stdin
        if timeout is not None:
            options["timeout"] = timeout
        result = await self._run(_launch(cmd, self._path(cwd or "."), env or {}, input_file), [], options)
        if result.verdict == Verdict.WALL_TIMEOUT:
            raise TimeoutError(f"{cmd[0]} did not end within {result.limits.get('wall_ms')} ms")
        limit = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
        for stream, size in ((result.output, result.total_bytes.output), (result.error, result.total_bytes.error)):
            if size > limit:
                raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, stream[-limit:])
        if result.code == 126 and "ermission denied" in result.error:
            raise PermissionError(result.error.strip())
        return ExecResult(result.success, result.code, result.output, result.error)

    @override
    async def write_file(self, file: str, contents: str | bytes) -> None:
        """Writes a file as the sandbox's user, and makes its directories."""
        path = self._path(file)
        try:
            await self._session.write_file(path, contents)
        except BadRequest as error:
            if error.reason not in _ELSEWHERE:
                self._raise(error.reason, file, error)
            result = await self._run(_WRITE, [path], {"stdin": contents})
            if not result.success:
                self._raise("is_a_directory" if result.code == 21 else "permission_denied", file, error)
        except (SandboxError, SessionEnded) as error:
            raise SandboxUnavailableError(str(error)) from error

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    @override
    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        """Reads a file as the sandbox's user."""
        path = self._path(file)
        limit = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        try:
            content = await self._session.read_file(path, limit=limit)
        except BadRequest as error:
            if error.reason not in _ELSEWHERE:
                self._raise(error.reason, file, error)
            result = await self._run(_READ, [path], {})
            if result.truncated.output or result.total_bytes.output > limit:
                self._raise("file_too_large", file, error)
            if not result.success:
                self._raise(
                    {21: "is_a_directory", 2: "file_missing"}.get(result.code, "permission_denied"), file, error
                )
            content = result.output_bytes
        except (SandboxError, SessionEnded) as error:
            raise SandboxUnavailableError(str(error)) from error
        return content.decode() if text else content

    @override
    def default_polling_interval(self) -> float:
        """As for a sandbox on the same host."""
        return 0.2

    def _path(self, file: str) -> str:
        return posixpath.normpath(posixpath.join(self._session.scratch, file))

    async def _run(self, code: str, args: list[str], options: RunOptions) -> Result:
        asked: RunOptions = {**options, "language": "sh", "args": args}
        try:
            return await self._session.run(code, **asked)
        except (SandboxError, SessionEnded) as error:
            raise SandboxUnavailableError(str(error)) from error

    @staticmethod
    def _raise(reason: str, file: str, error: BadRequest) -> NoReturn:
        if reason == "file_too_large":
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None) from error
        if reason in ("file_missing", "not_a_directory"):
            raise FileNotFoundError(f"{file}: no such file") from error
        if reason in ("is_a_directory", "not_a_file"):
            raise IsADirectoryError(f"{file}: it is a directory, not a file") from error
        if reason in ("permission_denied", "path_outside", "path_is_link", "path_hidden", "path_read_only"):
            raise PermissionError(f"{file}: permission denied") from error
        raise error
