"""One run for each call: `stockade exec` is started, given the request, and waited for.

No thread is started and nothing persists between calls. An early end of a call, by a
cancelled task or Ctrl-C too, ends the run first: nothing runs on in the background.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from . import _program, _request, _result
from ._errors import BadRequest, SandboxError
from ._result import Result, Verdict

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._request import RunOptions

#: Seconds that the program has to end a cancelled run; it takes milliseconds.
END_TIMEOUT = 10.0


class Options(TypedDict, total=False):
    """The arguments of `Configuration`, for those that pass them on."""

    policy: str | os.PathLike[str] | None
    scratch: str | os.PathLike[str] | None
    runtimes: Mapping[str, str | os.PathLike[str]] | None
    allow: Sequence[str] | None
    program: str | os.PathLike[str] | None


class Configuration:
    """Which program, policy, scratch and interpreters. Holds nothing that must be closed."""

    def __init__(
        self,
        *,
        policy: str | os.PathLike[str] | None = None,
        scratch: str | os.PathLike[str] | None = None,
        runtimes: Mapping[str, str | os.PathLike[str]] | None = None,
        allow: Sequence[str] | None = None,
        program: str | os.PathLike[str] | None = None,
    ) -> None:
        """`policy` is a name, or a path (with a slash); `scratch` a directory of the host
        to work in; `runtimes` names interpreters, such as `{"python": ".venv/bin/python"}`;
        `allow` hosts that code may reach besides the policy's, such as `["pypi.org:443"]`.
        """
        if runtimes is not None and not isinstance(runtimes, Mapping):
            raise TypeError(f'write runtimes={{"python": ".venv/bin/python"}}, not runtimes={runtimes!r}')
        if isinstance(allow, (str, bytes)) or any(not isinstance(peer, str) for peer in allow or ()):
            raise TypeError(f'write allow=["api.github.com:443"], a list with one host and port each, not {allow!r}')
        self.program = _program.find(program)
        # A path object is meant as a path, even one without a slash.
        self._policy = policy if policy is None or isinstance(policy, str) else os.path.abspath(policy)
        self._scratch = None if scratch is None else os.path.abspath(scratch)
        self._runtimes = {name: os.path.abspath(path) for name, path in (runtimes or {}).items()}
        self._allow = list(allow or ())

    def command_line(self, command: str, *further: str) -> list[str]:
        """`stockade COMMAND` with the options of this configuration."""
        line = [self.program, command]
        if self._policy is not None:
            line += ["--policy", self._policy]
        if self._scratch is not None:
            line += ["--scratch", self._scratch]
        for name, path in self._runtimes.items():
            line += ["--runtime", f"{name}={path}"]
        for peer in self._allow:
            line += ["--allow", peer]
        return [*line, *further]

    def _prepare(self, code: str | bytes, options: RunOptions) -> tuple[list[str], bytes]:
        _program.require(self.program, "exec")
        fixed: dict[str, object] = {} if self._scratch is None else {"scratch": self._scratch}
        return self.command_line("exec"), _request.encode(_request.run(code, options, **fixed))


class Stockade(Configuration):
    """Runs code, each time in a new sandbox. Safe to use from several threads."""

    @_request.in_help
    def run(self, code: str | bytes, **options: Unpack[RunOptions]) -> Result:
        """Runs `code` and returns its result, whatever the code did.

        Raises `BadRequest` or `SandboxError` where no sandbox could be set up.
        """
        line, request = self._prepare(code, options)
        with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            try:
                output, remarks = process.communicate(request)
            except BaseException:
                process.terminate()
                try:
                    process.communicate(timeout=END_TIMEOUT)
                except subprocess.TimeoutExpired:
                    process.kill()
                raise
        return judge(output, remarks, process.returncode)


class AsyncStockade(Configuration):
    """The same for asyncio. Cancelling the task ends the run before the task ends."""

    @_request.in_help
    async def run(self, code: str | bytes, **options: Unpack[RunOptions]) -> Result:
        """Runs `code` and returns its result, whatever the code did.

        Raises `BadRequest` or `SandboxError` where no sandbox could be set up.
        """
        line, request = self._prepare(code, options)
        process = await asyncio.create_subprocess_exec(
            *line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        try:
            output, remarks = await process.communicate(request)
        except BaseException:
            await to_the_end(_stop(process), process)
            raise
        return judge(output, remarks, process.returncode)


async def to_the_end(work: Any, process: asyncio.subprocess.Process | subprocess.Popen[bytes]) -> None:
    """Awaits `work` although the task is being cancelled; cancelled again, it kills."""
    task = asyncio.ensure_future(work)
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if process.returncode is None:
                process.kill()


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
    # Its remaining output is read, or it could wait for a reader forever.
    assert process.stdout is not None and process.stderr is not None
    last_words = asyncio.gather(process.stdout.read(), process.stderr.read(), process.wait())
    try:
        await asyncio.wait_for(last_words, END_TIMEOUT)
    except asyncio.TimeoutError:
        process.kill()
        await process.wait()


def judge(output: bytes, remarks: bytes, status: int | None) -> Result:
    """The result that the program printed; raises the error where it is one."""
    try:
        data = json.loads(output)
    except ValueError:
        data = None
    if not isinstance(data, dict):
        words = remarks.decode("utf-8", "replace").strip() or "its stderr was empty"
        raise SandboxError(f"stockade ended with status {status} and without a result: {words}", reason="no_result")
    return read_result(data)


def read_result(data: Mapping[str, Any]) -> Result:
    """The result that the program gave; raises the error where it is one."""
    try:
        result = _result.parse(data)
    except ValueError as error:
        raise SandboxError(f"what stockade gave is no result: {error}", reason="no_result") from None
    return checked(result)


def checked(result: Result) -> Result:
    """The result; raises where no sandbox could be set up."""
    if result.verdict in (Verdict.BAD_REQUEST, Verdict.SANDBOX_ERROR):
        raise refusal(result.verdict, result.error, result.reason or result.verdict, result)
    return result


def refusal(verdict: str, message: str, reason: str, result: Result | None = None) -> BadRequest | SandboxError:
    """The error of a request that was refused. The policy is the caller's own words here, which
    no second try makes better."""
    if verdict == Verdict.BAD_REQUEST or reason.startswith("policy_"):
        return BadRequest(message, reason=reason, result=result)
    return SandboxError(message, reason=reason, result=result)
