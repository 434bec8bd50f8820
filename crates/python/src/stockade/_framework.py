"""Whether the framework that an adapter is for is there, and is one that the adapter knows."""

from __future__ import annotations

import re
from importlib import metadata

from ._errors import NotInstalled


def require(distribution: str, at_least: str, below: str) -> None:
    """Raises `NotInstalled` unless that range holds the installed version."""
    try:
        found = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        found = None
    if found is None or not _numbers(at_least) <= _numbers(found) < _numbers(below):
        state = "is not installed" if found is None else f"{found} is installed, which this adapter does not know"
        raise NotInstalled(
            f"{distribution} {state}: pip install '{distribution}>={at_least},<{below}'", reason="framework_missing"
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])
