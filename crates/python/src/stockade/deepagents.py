"""deepagents 0.7: a sandbox backend whose commands and files live in a session.

Files of the session persist from command to command, processes do not: a server started
with `&` ends with its command. Paths are absolute, as the code sees them.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping

from . import _framework
from ._errors import BadRequest
from ._session import Session

_framework.require("deepagents", "0.7", "0.8")

from deepagents.backends.protocol import ExecuteResponse, FileDownloadResponse, FileUploadResponse
from deepagents.backends.sandbox import BaseSandbox
from typing_extensions import Self

__all__ = ["StockadeSandbox"]

# The framework's names for errors that a model can fix; others keep stockade's message.
_ERRORS = {
    "file_missing": "file_not_found",
    "not_a_directory": "file_not_found",
    "is_a_directory": "is_directory",
    "not_a_file": "is_directory",
    "permission_denied": "permission_denied",
    "path_outside": "permission_denied",
    "path_is_link": "permission_denied",
    "path_hidden": "permission_denied",
    "path_read_only": "permission_denied",
    "path_malformed": "invalid_path",
}


class StockadeSandbox(BaseSandbox):
    """A sandbox for `create_deep_agent(backend=…)`. Close it, or use it in a `with` statement.

    `scratch` is a directory of the host to work in; without it files are private and end
    with the session. `timeout` is for each command that names none itself, in seconds.
    """

    def __init__(
        self,
        *,
        scratch: str | os.PathLike[str] | None = None,
        policy: str | os.PathLike[str] = "shell",
        timeout: float = 120,
        runtimes: Mapping[str, str | os.PathLike[str]] | None = None,
        program: str | os.PathLike[str] | None = None,
    ) -> None:
        """Starts the session."""
        if timeout <= 0:
            raise ValueError(f"timeout must be a positive number of seconds, not {timeout!r}")
        self._timeout = timeout
        self._id = f"stockade-{uuid.uuid4().hex[:8]}"
        self._session = Session(policy=policy, scratch=scratch, runtimes=runtimes, program=program)
        self._session.start()

    @property
    def id(self) -> str:
        """The backend's name, different for each."""
        return self._id

    @property
    def work_dir(self) -> str:
        """The working directory as the agent sees it."""
        return self._session.scratch

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        """Runs a command with Bash; what it prints comes as a terminal would show it."""
        if timeout is not None and timeout < 0:
            raise ValueError(f"timeout must not be negative, but is {timeout!r}")
        seconds = self._timeout if timeout is None else timeout
        # No time is no limit, where the policy has none.
        limits = {"wall": "none" if seconds == 0 else f"{round(seconds * 1000)}ms"}
        # Removed, so that the command does not find its own file in the directory.
        result = self._session.run(f'rm -f -- "$0"; exec 2>&1\n{command}', language="bash", limits=limits)
        output = result.output
        if result.timed_out:
            output += f"\nCommand timed out after {seconds} seconds"
        elif result.verdict != "exited" and not result.success:
            output += f"\nCommand ended by {result.verdict}"
        return ExecuteResponse(output=output, exit_code=result.code, truncated=result.truncated.output)

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        """Writes files; one that cannot be written does not keep the others back."""
        return [FileUploadResponse(path=path, error=self._upload(path, content)) for path, content in files]

    def _upload(self, path: str, content: bytes) -> str | None:
        if not path.startswith("/"):
            return "invalid_path"
        try:
            self._session.write_file(path, content)
        except BadRequest as error:
            return _ERRORS.get(error.reason, str(error))
        return None

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        """Reads files; one that cannot be read does not keep the others back."""
        return [self._download(path) for path in paths]

    def _download(self, path: str) -> FileDownloadResponse:
        if not path.startswith("/"):
            return FileDownloadResponse(path=path, error="invalid_path")
        try:
            return FileDownloadResponse(path=path, content=self._session.read_file(path))
        except BadRequest as error:
            return FileDownloadResponse(path=path, error=_ERRORS.get(error.reason, str(error)))

    def close(self) -> None:
        """Ends the session and, unless a scratch was given, removes its files."""
        self._session.close()

    def __enter__(self) -> Self:
        """The session has begun already."""
        return self

    def __exit__(self, *error: object) -> None:
        """Ends the session."""
        self.close()
