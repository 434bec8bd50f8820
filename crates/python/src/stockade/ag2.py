"""AG2 classic (`autogen.coding`): a `CodeExecutor` whose code blocks run in sandboxes.

Needs a distribution with the module `autogen.coding`: `autogen` up to 0.14, `ag2` before
1.0, or `pyautogen` 0.2. Where its own executor searches shell code for dangerous words,
this one lets the sandbox decide.
"""

from __future__ import annotations

from . import _blocks
from ._errors import BadRequest, NotInstalled
from ._exec import Stockade
from ._session import Session

try:
    from autogen.coding import CodeBlock, CodeExtractor, CodeResult, MarkdownCodeExtractor
except ImportError as error:
    raise NotInstalled(
        f"no module autogen.coding ({error}), which ag2 1.x has no more: pip install 'autogen>=0.9,<0.15'",
        reason="framework_missing",
    ) from error

__all__ = ["StockadeCodeExecutor"]


class StockadeCodeExecutor(_blocks.Executor):
    """Runs each code block in its own sandbox, in one working directory.

    For `code_execution_config={"executor": StockadeCodeExecutor(…)}`. `timeout` is for
    each block, in seconds. `work_dir` is a directory of the host, which is made if it is
    missing; without it the blocks share the private files of a session, which lives from
    the first block to close().
    """

    _session: Session | None = None

    @property
    def code_extractor(self) -> CodeExtractor:
        """Code is the content of Markdown fences."""
        return MarkdownCodeExtractor()

    def _runner(self) -> tuple[Stockade | Session, str]:
        """What runs the blocks, and their working directory."""
        if self._work_dir is not None:
            self._work_dir.mkdir(exist_ok=True)
            return Stockade(**self._options), str(self._work_dir)
        if self._session is None:
            session = Session(**self._options)
            session.start()
            self._session = session
        return self._session, self._session.scratch

    def execute_code_blocks(self, code_blocks: list[CodeBlock]) -> CodeResult:
        """Runs the blocks until one fails."""
        stockade, work_dir = self._runner()
        collected = _blocks.Collected()
        for block in code_blocks:
            try:
                options = _blocks.options(block.language, block.code, work_dir, self.timeout)
            except _blocks.NotInWorkspace:
                return CodeResult(exit_code=1, output="Filename is not in the workspace")
            try:
                collected.add(stockade.run(block.code, **options))
            except BadRequest as error:
                collected.refuse(block.language, error)
            if collected.exit_code != 0:
                break
        return CodeResult(exit_code=collected.exit_code, output=collected.output)

    def restart(self) -> None:
        """Ends the session; a working directory of the host is the caller's and stays."""
        self.close()

    def close(self) -> None:
        """The same: the next block starts another session."""
        if self._session is not None:
            self._session.close()
            self._session = None
