"""Errors other than those of the code that was to run.

A failed program is not an error: it is a `Result`. The text of every error here states what
was wrong and how to fix it; `reason` is a stable identifier.
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
    """The request cannot be run as written: fix it, or the policy that it names, or loosen that."""


class SandboxError(StockadeError):
    """The sandbox could not be put in place, or broke. Nothing ran without it.

    `result.started` is true if the code's first instruction ran; if it is false, a retry is
    safe.
    """


class SessionEnded(StockadeError):
    """The session has ended, and its files are gone; the text states why."""
