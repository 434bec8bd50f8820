"""AutoGen 0.7: a `CodeExecutor` whose code blocks run in sandboxes.

Needs autogen-core. Differs from `LocalCommandLineCodeExecutor` where that one falls
short: a timeout takes effect at its second and keeps what was printed before, a child
left in the background delays nothing, output need not be UTF-8, and nothing of the
caller's environment reaches the code.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass

from . import _blocks, _framework
from ._errors import BadRequest
from ._exec import AsyncStockade
from ._result import Result
from ._session import AsyncSession

_framework.require("autogen-core", "0.7", "0.8")

from autogen_core import CancellationToken, Component
from autogen_core.code_executor import CodeBlock, CodeExecutor, CodeResult
from pydantic import BaseModel
from typing_extensions import Self

__all__ = ["StockadeCodeExecutor", "StockadeCodeExecutorConfig", "StockadeCodeResult"]


@dataclass
class StockadeCodeResult(CodeResult):
    """A `CodeResult` that also has each block's whole result."""

    results: tuple[Result, ...] = ()
    #: The first block's file; there if the block named itself, or was not cleaned up.
    code_file: str | None = None


class StockadeCodeExecutorConfig(BaseModel):
    """The executor's options in a component file."""

    timeout: float = 60
    work_dir: str | None = None
    cleanup_temp_files: bool = True
    policy: str | None = None
    runtimes: dict[str, str] = {}
    program: str | None = None


class StockadeCodeExecutor(_blocks.Executor, CodeExecutor, Component[StockadeCodeExecutorConfig]):
    """Runs each code block in its own sandbox, in one working directory.

    `timeout` is for each block, in seconds. `work_dir` is a directory of the host, which
    is made if it is missing; without it the blocks share the private files of a session,
    which lives from the first block to stop(). Between start() and stop() there is a
    session with a `work_dir` too: each block starts sooner, and home and /tmp persist from
    block to block. It may be used from any event loop, and from one after the other.
    A block's file stays if the block named it by `# filename: NAME`; other files stay as
    `tmp_code_….py` and so on without `cleanup_temp_files`.
    `policy` and `runtimes` are as for `stockade.Stockade`.
    """

    component_config_schema = StockadeCodeExecutorConfig
    component_provider_override = "stockade.autogen.StockadeCodeExecutor"

    _session: AsyncSession | None = None

    def __init__(
        self,
        timeout: float = 60,
        work_dir: str | os.PathLike[str] | None = None,
        *,
        cleanup_temp_files: bool = True,
        policy: str | os.PathLike[str] | None = None,
        runtimes: Mapping[str, str | os.PathLike[str]] | None = None,
        program: str | os.PathLike[str] | None = None,
    ) -> None:
        """Starts nothing; raises `NotInstalled` if the program is missing."""
        super().__init__(timeout, work_dir, policy=policy, runtimes=runtimes, program=program)
        self._cleanup_temp_files = cleanup_temp_files

    async def _runner(self) -> tuple[AsyncStockade | AsyncSession, str]:
        """What runs the blocks, and their working directory."""
        if self._work_dir is None:
            await self.start()
        else:
            self._work_dir.mkdir(exist_ok=True)
        if self._session is None:
            return AsyncStockade(**self._options), str(self._work_dir)
        return self._session, str(self._work_dir or self._session.scratch)

    async def execute_code_blocks(
        self, code_blocks: list[CodeBlock], cancellation_token: CancellationToken
    ) -> StockadeCodeResult:
        """Runs the blocks until one fails. Cancelled by the token, the exit code is 125."""
        stockade, work_dir = await self._runner()
        collected, code_file = _blocks.Collected(), None
        for block in code_blocks:
            own_name = _own_name(block)
            try:
                keep_as = None if self._cleanup_temp_files else own_name
                options = _blocks.options(block.language, block.code, work_dir, self.timeout, keep_as)
                named = _blocks.file_name(block.code, work_dir)
            except _blocks.NotInWorkspace:
                return StockadeCodeResult(1, "Filename is not in the workspace", tuple(collected.results))
            code_file = code_file or os.path.join(work_dir, named or own_name)
            run = asyncio.ensure_future(stockade.run(block.code, **options))
            cancellation_token.link_future(run)
            try:
                collected.add(await run)
            except BadRequest as error:
                collected.refuse(block.language, error)
            except asyncio.CancelledError:
                if not cancellation_token.is_cancelled():
                    # Not the token but the task itself was cancelled: that is no result.
                    raise
                collected.output += "\nCancelled"
                collected.exit_code = _blocks.CANCELLED
            if collected.exit_code != 0:
                break
        return StockadeCodeResult(collected.exit_code, collected.output, tuple(collected.results), code_file)

    async def start(self) -> None:
        """Makes the working directory and starts the session."""
        if self._work_dir is not None:
            self._work_dir.mkdir(exist_ok=True)
        session = self._session
        if session is None:
            session = self._session = AsyncSession(**self._options)
        try:
            # Blocks that come meanwhile wait for it.
            await session.start()
        except BaseException:
            self._session = None
            raise

    async def stop(self) -> None:
        """Ends the session, if there is one; a working directory of the host stays."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def restart(self) -> None:
        """Restarts the session, if there is one; a working directory is the caller's and stays."""
        if self._session is not None:
            await self.stop()
            await self.start()

    def _to_config(self) -> StockadeCodeExecutorConfig:
        def text(path: str | os.PathLike[str] | None) -> str | None:
            return None if path is None else os.fspath(path)

        return StockadeCodeExecutorConfig(
            timeout=self._timeout,
            work_dir=text(self._told_work_dir),
            cleanup_temp_files=self._cleanup_temp_files,
            policy=text(self._options["policy"]),
            runtimes={name: os.fspath(path) for name, path in (self._options["runtimes"] or {}).items()},
            program=text(self._options["program"]),
        )

    @classmethod
    def _from_config(cls, config: StockadeCodeExecutorConfig) -> Self:
        return cls(**config.model_dump())


def _own_name(block: CodeBlock) -> str:
    """The name that the framework's executor gives to a block's file."""
    language = block.language.lower()
    ending = "py" if language in ("python", "py") else language
    return f"tmp_code_{hashlib.sha256(block.code.encode()).hexdigest()}.{ending}"
