"""Runs untrusted code in a fresh Linux sandbox: a client of the program `stockade`.

    >>> import stockade
    >>> stockade.run("print(6*7)").output
    '42\\n'

A program that fails is a `Result`; an error is raised only where no sandbox could be set
up. `Client` runs code at a service (`stockade serve`). Adapters for agent frameworks are modules of this package, which import their
framework when they are imported: `stockade.autogen`, `stockade.ag2`, `stockade.langchain`,
`stockade.deepagents`, `stockade.inspect_ai`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import _request
from ._client import AsyncClient, Client
from ._errors import BadRequest, NotInstalled, SandboxError, SessionEnded, StockadeError
from ._exec import AsyncStockade, Stockade
from ._operations import FileEntry
from ._result import (
    Approval,
    CollectedFile,
    Compile,
    Denial,
    Finding,
    Layer,
    PerStream,
    PolicyId,
    Receipt,
    Result,
    Usage,
    Verdict,
)
from ._session import AsyncSession, Session

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from typing_extensions import Unpack

    from ._request import RunOptions

__version__ = "0.1.0"

__all__ = [
    "Approval",
    "AsyncClient",
    "AsyncSession",
    "AsyncStockade",
    "BadRequest",
    "Client",
    "CollectedFile",
    "Compile",
    "Denial",
    "FileEntry",
    "Finding",
    "Layer",
    "NotInstalled",
    "PerStream",
    "PolicyId",
    "Receipt",
    "Result",
    "SandboxError",
    "Session",
    "SessionEnded",
    "Stockade",
    "StockadeError",
    "Usage",
    "Verdict",
    "arun",
    "run",
]


@_request.in_help
def run(
    code: str | bytes,
    *,
    policy: str | os.PathLike[str] | None = None,
    scratch: str | os.PathLike[str] | None = None,
    runtimes: Mapping[str, str | os.PathLike[str]] | None = None,
    allow: Sequence[str] | None = None,
    **options: Unpack[RunOptions],
) -> Result:
    """Runs `code` in its own sandbox and returns its result."""
    return Stockade(policy=policy, scratch=scratch, runtimes=runtimes, allow=allow).run(code, **options)


@_request.in_help
async def arun(
    code: str | bytes,
    *,
    policy: str | os.PathLike[str] | None = None,
    scratch: str | os.PathLike[str] | None = None,
    runtimes: Mapping[str, str | os.PathLike[str]] | None = None,
    allow: Sequence[str] | None = None,
    **options: Unpack[RunOptions],
) -> Result:
    """The same for asyncio; cancelling the task ends the run."""
    return await AsyncStockade(policy=policy, scratch=scratch, runtimes=runtimes, allow=allow).run(code, **options)
