"""What can go wrong before, or beside, the code that was to run.

A program that fails is no error: it is a `Result`. Every error here says what was wrong
and what to do about it in its text, and carries `reason`, a stable identifier.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._result import Result


class StockadeError(Exception):
    """The common base. `reason` is a stable identifier such as `scratch_missing`."""

    def __init__(self, message: str, *, reason: str, result: Result | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        #: The whole result, where the program gave one.
        self.result = result


class NotInstalled(StockadeError, ImportError):
    """The program, or a framework that an adapter is for, is missing or of another version."""


class BadRequest(StockadeError, ValueError):
    """The request cannot be run as written: mend it, or loosen the policy."""


class SandboxError(StockadeError):
    """The sandbox could not be put in place, or broke. Nothing ran without it.

    `result.started` says whether the code's first instruction ran; if not, it is safe
    to try again.
    """


class SessionEnded(StockadeError):
    """The session has ended, and with it what it kept; the text says why."""
