"""LangChain: an execution policy for `ShellToolMiddleware`, whose shell lives in a sandbox.

Needs langchain 1.x. The shell persists from command to command; of the host it can
change its workspace and nothing else.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import _framework
from ._errors import SandboxError
from ._exec import Stockade

_framework.require("langchain", "1.1", "2")

from langchain.agents.middleware._execution import BaseExecutionPolicy

__all__ = ["StockadeExecutionPolicy"]

# What the sandbox prints before the shell takes its place.
_READY = "stockade: ready\n"
_SAY_READY = f'command -v "$1" >/dev/null && echo {_READY.strip()!r}; exec "$@"'


@dataclass
class StockadeExecutionPolicy(BaseExecutionPolicy):
    """Starts the middleware's shell in a sandbox under `policy`, by default `shell`.

    That policy has no wall clock; `command_timeout` ends a command that takes too long,
    and with it the shell and all that it started. The shell's environment is the middleware's
    `env`, and nothing of the caller's.
    """

    policy: str | os.PathLike[str] = "shell"
    runtimes: Mapping[str, str | os.PathLike[str]] = field(default_factory=dict)
    program: str | os.PathLike[str] | None = None

    def spawn(self, *, workspace: Path, env: Mapping[str, str], command: Sequence[str]) -> subprocess.Popen[str]:
        """Starts the shell; SIGKILL of the process takes the whole sandbox with it.

        Raises `BadRequest` or `SandboxError` where there is no sandbox: the middleware would
        wait for an answer of the shell, and tell the model that its command timed out.
        """
        stockade = Stockade(
            policy=self.policy, scratch=workspace.absolute(), runtimes=self.runtimes, program=self.program
        )
        # `env` sets them inside, so that the policy need not accept these names.
        variables = ["/usr/bin/env", "--", *(f"{name}={value}" for name, value in env.items())] if env else []
        process = subprocess.Popen(
            stockade.command_line("run", "--", *variables, "/bin/sh", "-c", _SAY_READY, "sh", *command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            bufsize=1,
            # The middleware kills a process group, which must not be its own.
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            if process.stdout.readline() == _READY:
                return process
            _, words = process.communicate()
        except BaseException:
            process.kill()
            process.communicate()
            raise
        # The same refusal once more, as a result that says of what kind it is.
        stockade.run(":", language="sh")
        raise SandboxError(f"the shell did not start: {words.strip()}", reason="shell_not_started")
